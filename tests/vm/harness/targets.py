"""The targets under test: `ringbolt serve` on the host, or the kernel's nvmet inside the guest, which
validates the tests themselves.

Both have the same interface and configuration, so a case that passes against nvmet and fails against
Ringbolt shows a bug in Ringbolt.
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import uuid
from dataclasses import dataclass, field

from .guest import PATIENCE
from .rpc import Rpc

MIB = 1 << 20
DISCOVERY = "nqn.2014-08.org.nvmexpress.discovery"
ANY_HOST = None


@dataclass
class Namespace:
    """A namespace, backed by a sparse file on the target's machine."""

    mib: int = 64
    nsid: int = 1
    block_size: int = 4096
    malloc: bool = False  # backed by memory of the target instead of a file
    metadata: dict = field(default_factory=dict)  # parameters of one in memory: md_size, dif_type, ...
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    nguid: str = field(default_factory=lambda: uuid.uuid4().hex.upper())
    configured: bool = True  # the configuration gives UUID and NGUID; otherwise they are the file's
    path: str = ""
    visible: bool = True  # to every host; otherwise to those of nvmf_ns_add_host

    @property
    def blocks(self):
        return self.mib * MIB // self.block_size


@dataclass
class Subsystem:
    """A subsystem and its namespaces; `hosts` lists the allowed host NQNs, ANY_HOST allows all."""

    name: str
    namespaces: list
    hosts: list = ANY_HOST
    serial: str = "RB0123456789"
    model: str = "Ringbolt VM test"

    @property
    def nqn(self):
        return f"nqn.2026-11.org.ringbolt:{self.name}"


class Target:
    """The common interface of both targets; `kind` identifies the implementation."""

    kind = None

    def __init__(self, guest, folder):
        self.guest, self.folder, self.subsystems = guest, folder, []

    def address(self, family=4):
        """Options of nvme-cli with the target's address as seen from the guest."""
        return f"-t tcp -a {self.hosts[family]} -s {self.port}"

    def log(self):
        """The last part of the target's output."""
        return ""


class Ringbolt(Target):
    """`ringbolt serve` as a child process, controlled by its configuration file and RPC socket."""

    kind = "ringbolt"
    hosts = {4: "10.0.2.2", 6: "fec0::2"}

    def __init__(self, guest, folder, binary):
        super().__init__(guest, folder)
        self.binary, self.process, self.rpc, self.options = binary, None, None, ()
        self.config = f"{folder}/ringbolt.json"
        self.rpc_path = f"{folder}/rpc"
        self.log_path = f"{folder}/ringbolt.log"

    # Start and stop.

    def start(self, *subsystems, families=(4,), options=()):
        self.subsystems, self.families, self.options = list(subsystems), families, options
        self.port = free_port()
        with open(self.config, "w", encoding="utf-8") as file:
            json.dump(self._configuration(), file, indent=2)
        self.launch()

    def _configuration(self):
        bdevs, nvmf = [], [{"method": "nvmf_create_transport", "params": {"trtype": "TCP"}}]
        for subsystem in self.subsystems:
            for namespace in subsystem.namespaces:
                method, parameters = self._bdev(subsystem, namespace)
                bdevs.append({"method": method, "params": parameters})
            nvmf += [{"method": method, "params": params} for method, params in self._subsystem(subsystem)]
        return {"subsystems": [{"subsystem": "bdev", "config": bdevs}, {"subsystem": "nvmf", "config": nvmf}]}

    def _bdev(self, subsystem, namespace):
        name = f"{subsystem.name}_{namespace.nsid}"
        if namespace.malloc:
            parameters = {"num_blocks": namespace.blocks, "uuid": namespace.uuid}
            parameters.update(namespace.metadata)
            return "bdev_malloc_create", {"name": name, "block_size": namespace.block_size, **parameters}
        namespace.path = f"{self.folder}/{name}.raw"
        with open(namespace.path, "wb") as file:
            file.truncate(namespace.mib * MIB)
        return "bdev_uring_create", {"name": name, "filename": namespace.path, "block_size": namespace.block_size}

    @staticmethod
    def _ns(subsystem, namespace):
        identity = {"uuid": namespace.uuid, "nguid": namespace.nguid} if namespace.configured else {}
        visibility = {} if namespace.visible else {"no_auto_visible": True}
        return {"bdev_name": f"{subsystem.name}_{namespace.nsid}", "nsid": namespace.nsid, **identity, **visibility}

    def _subsystem(self, subsystem):
        nqn = subsystem.nqn
        identity = {"serial_number": subsystem.serial, "model_number": subsystem.model}
        allow = subsystem.hosts is ANY_HOST
        yield "nvmf_create_subsystem", {"nqn": nqn, "allow_any_host": allow, **identity, "max_namespaces": 32}
        for host in subsystem.hosts or []:
            yield "nvmf_subsystem_add_host", {"nqn": nqn, "host": host}
        for namespace in subsystem.namespaces:
            yield "nvmf_subsystem_add_ns", {"nqn": nqn, "namespace": self._ns(subsystem, namespace)}
        for family in self.families:
            yield "nvmf_subsystem_add_listener", {"nqn": nqn, "listen_address": self._listen(family)}

    def _listen(self, family):
        address = {4: "127.0.0.1", 6: "::1"}[family]
        return {"trtype": "TCP", "adrfam": f"IPv{family}", "traddr": address, "trsvcid": str(self.port)}

    def launch(self):
        """Starts the process with the configuration and waits for its RPC socket."""
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [self.binary, "serve", "-c", self.config, "--rpc-socket", self.rpc_path, *self.options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.guest.watch_target(self.process)

        def answers():
            try:
                rpc = Rpc(self.rpc_path)
            except OSError:
                return None
            rpc("rpc_get_methods")
            return rpc

        self.rpc = self.guest.wait(answers, 15, "answer on the target's RPC socket", poll=0.02)

    def kill(self):
        """Kills the process with SIGKILL."""
        self.guest.unwatch_process(self.process)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.rpc.close()

    def stop(self):
        """Stops the process with SIGTERM; it must exit with status 0."""
        if self.process is None or self.process.returncode is not None:
            return
        self.guest.unwatch_process(self.process)
        if self.rpc:
            self.rpc.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(10 * PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill_if_running()
            raise AssertionError("the target did not exit within 10 s of SIGTERM") from None
        if status != 0:
            raise AssertionError(f"the target exited with status {status} after SIGTERM")

    def kill_if_running(self):
        """Kills the process if it is running."""
        if self.process is not None and self.process.poll() is None:
            self.guest.unwatch_process(self.process)
            self.process.kill()
            self.process.wait()

    def log(self):
        if not os.path.exists(self.log_path):
            return ""
        with open(self.log_path, "rb") as file:
            return file.read()[-3000:].decode("utf-8", "replace").strip()

    # Changes at run time.

    def add_namespace(self, subsystem, namespace):
        method, parameters = self._bdev(subsystem, namespace)
        self.rpc(method, **parameters)
        self.rpc("nvmf_subsystem_add_ns", nqn=subsystem.nqn, namespace=self._ns(subsystem, namespace))

    def remove_namespace(self, subsystem, namespace):
        self.rpc("nvmf_subsystem_remove_ns", nqn=subsystem.nqn, nsid=namespace.nsid)

    def resize_namespace(self, subsystem, namespace, mib):
        os.truncate(namespace.path, mib * MIB)
        namespace.mib = mib
        self.rpc("bdev_uring_rescan", name=f"{subsystem.name}_{namespace.nsid}")

    def add_subsystem(self, subsystem):
        for namespace in subsystem.namespaces:
            method, parameters = self._bdev(subsystem, namespace)
            self.rpc(method, **parameters)
        for method, parameters in self._subsystem(subsystem):
            self.rpc(method, **parameters)

    def controllers(self, subsystem):
        return self.rpc("nvmf_subsystem_get_controllers", nqn=subsystem.nqn)

    # The backing file, read directly.

    def stored(self, namespace, offset, length):
        with open(namespace.path, "rb") as file:
            file.seek(offset)
            return file.read(length)

    def digest(self, namespace, offset, length):
        """The SHA-256 of the stored data in hexadecimal."""
        return hashlib.sha256(self.stored(namespace, offset, length)).hexdigest()

    def allocated(self, namespace):
        """Bytes that the sparse file occupies."""
        file = os.open(namespace.path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)
        return os.stat(namespace.path).st_blocks * 512


class KernelTarget(Target):
    """The kernel's nvmet in the guest, over the guest's own loopback."""

    kind = "nvmet"
    hosts = {4: "127.0.0.1", 6: "::1"}
    port = 4420
    ROOT = "/sys/kernel/config/nvmet"

    def start(self, *subsystems, families=(4,)):
        self.subsystems = []
        self.families = families
        for family in families:
            folder = f"{self.ROOT}/ports/{family}"
            self.guest.check(
                f"mkdir {folder} && cd {folder} && echo tcp > addr_trtype && echo ipv{family} > addr_adrfam &&"
                f"echo {self.hosts[family]} > addr_traddr && echo {self.port} > addr_trsvcid"
            )
        for subsystem in subsystems:
            self.add_subsystem(subsystem)

    def add_subsystem(self, subsystem):
        folder = f"{self.ROOT}/subsystems/{subsystem.nqn}"
        anyone = int(subsystem.hosts is ANY_HOST)
        self.guest.check(
            f"mkdir {folder} && cd {folder} && echo {anyone} > attr_allow_any_host &&"
            f"echo {subsystem.serial} > attr_serial && echo '{subsystem.model}' > attr_model"
        )
        self.subsystems.append(subsystem)
        for host in subsystem.hosts or []:
            self.guest.check(f"mkdir -p {self.ROOT}/hosts/{host} && ln -s {self.ROOT}/hosts/{host} {folder}/allowed_hosts/")
        for namespace in subsystem.namespaces:
            self.add_namespace(subsystem, namespace)
        for family in self.families:
            self.guest.check(f"ln -s {folder} {self.ROOT}/ports/{family}/subsystems/")

    def _folder(self, subsystem, namespace):
        return f"{self.ROOT}/subsystems/{subsystem.nqn}/namespaces/{namespace.nsid}"

    def add_namespace(self, subsystem, namespace):
        namespace.path = f"/tmp/{subsystem.name}_{namespace.nsid}.raw"
        nguid = str(uuid.UUID(namespace.nguid))
        self.guest.check(
            f"truncate -s {namespace.mib}M {namespace.path} &&"
            f"mkdir {self._folder(subsystem, namespace)} && cd {self._folder(subsystem, namespace)} &&"
            f"echo 1 > buffered_io && echo {namespace.path} > device_path && echo {namespace.uuid} > device_uuid &&"
            f"echo {nguid} > device_nguid && echo 1 > enable"
        )

    def remove_namespace(self, subsystem, namespace):
        self.guest.check(f"echo 0 > {self._folder(subsystem, namespace)}/enable && rmdir {self._folder(subsystem, namespace)}")

    def resize_namespace(self, subsystem, namespace, mib):
        namespace.mib = mib
        rescan = f"echo 1 > {self._folder(subsystem, namespace)}/revalidate_size"
        self.guest.check(f"truncate -s {mib}M {namespace.path} && {rescan}")

    def digest(self, namespace, offset, length):
        count = f"iflag=skip_bytes,count_bytes skip={offset} count={length}"
        return self.guest.check(f"dd if={namespace.path} bs=64k {count} status=none | sha256sum", 60).split()[0]

    def allocated(self, namespace):
        return int(self.guest.check(f"stat -c %b {namespace.path}")) * 512

    def stop(self):
        """Removes the whole configuration."""
        self.guest.check(
            f"cd {self.ROOT}; rm -f ports/*/subsystems/* subsystems/*/allowed_hosts/*\n"
            "rmdir ports/* subsystems/*/namespaces/* subsystems/* hosts/* 2> /dev/null; rm -f /tmp/*.raw"
        )


def free_port():
    """An unused TCP port on the IPv4 loopback address."""
    with socket.socket(socket.AF_INET) as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
