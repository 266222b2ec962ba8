#!/usr/bin/python3 -B
"""The vhost-user target of `ringbolt serve` with QEMU, whose firmware boots from it and uses it. No kernel is needed.

    RINGBOLT=target/debug/ringbolt tests/interop/vhost_clients.py [CASE...]

Each case prints one line. A case whose program is missing is SKIPPED, with the reason. The guest is boot.S.
"""

import json
import os
import re
import socket
import struct
import subprocess
import sys
import time

import serving
from serving import MIB, program, run

SECTOR = 512
# As in boot.S.
FIRST, AREAS, AREA_SECTORS, COPY = 2048, 32, 768, 32768
DISK_MIB = 32
# Microseconds that a request of a slow disk takes.
SLOW_US = 2000
# How often the target is killed.
KILLS = 3
PATIENCE_S = 60


def wait(what, condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not after {PATIENCE_S} s: {what}"
        time.sleep(0.02)


class Server(serving.Server):
    def disk(self):
        """A bdev on a file with the boot sector and the areas that it reads; its name."""
        if not os.path.exists(f"{self.folder}/disk"):
            self.write_disk()
        self.rpc("bdev_uring_create", name="Disk", filename=f"{self.folder}/disk", block_size=SECTOR)
        return "Disk"

    def slow_disk(self):
        """The same with a delay, so that a request is in flight at nearly any time; its name."""
        latencies = {f"{kind}_{what}_latency": SLOW_US for kind in ("avg", "p99") for what in ("read", "write")}
        self.rpc("bdev_delay_create", name="Slow", base_bdev_name=self.disk(), **latencies)
        return "Slow"

    def write_disk(self):
        assembler, linker = program("as"), program("ld")
        source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "boot.S")
        run(assembler, "--32", "-o", f"{self.folder}/boot.o", source)
        run(linker, "-m", "elf_i386", "-Ttext", "0x7c00", "--oformat", "binary", "-o", f"{self.folder}/boot", f"{self.folder}/boot.o")
        with open(f"{self.folder}/boot", "rb") as boot, open(f"{self.folder}/disk", "wb") as disk:
            disk.write(boot.read())
            disk.truncate(DISK_MIB * MIB)
            disk.seek(FIRST * SECTOR)
            for sector in range(FIRST, FIRST + AREAS * AREA_SECTORS):
                disk.write(struct.pack("<I", sector) * (SECTOR // 4))

    def controller(self, kind):
        """A controller of the disk, for blk or scsi; its socket."""
        path = f"{self.folder}/{kind}.sock"
        if kind == "blk":
            self.rpc("vhost_create_blk_controller", ctrlr=path, dev_name=self.disk(), packed_ring=True)
        else:
            self.rpc("vhost_create_scsi_controller", ctrlr=path, delay=True)
            self.rpc("vhost_scsi_controller_add_target", ctrlr=path, scsi_target_num=3, bdev_name=self.disk())
            self.rpc("vhost_start_scsi_controller", ctrlr=path)
        return path

    def sessions(self):
        return self.rpc("vhost_get_controllers")[0]["sessions"]


class Machine:
    """A QEMU whose only disk is a controller's, with shared memory; a context manager."""

    def __init__(self, folder, name, path, kind, device_options="", more=(), socket_options=""):
        self.serial, monitor = f"{folder}/{name}.serial", f"{folder}/{name}.monitor"
        device = f"vhost-user-{kind}-pci,chardev=disk,bootindex=1{device_options}"
        self.log = open(f"{folder}/{name}.log", "w+")
        self.process = subprocess.Popen([
            program("qemu-system-x86_64"), "-nodefaults", "-display", "none", "-no-reboot", "-accel", "tcg", "-m", "128M",
            "-machine", "q35,memory-backend=memory", "-object", "memory-backend-memfd,id=memory,size=128M,share=on",
            "-serial", f"file:{self.serial}", "-qmp", f"unix:{monitor},server=on,wait=off",
            "-chardev", f"socket,id=disk,path={path}{socket_options}", "-device", device, *more,
        ], stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        self.monitor = socket.socket(socket.AF_UNIX)
        self.monitor.settimeout(PATIENCE_S)
        wait("QEMU's monitor", lambda: self.is_running() and self.monitor.connect_ex(monitor) == 0)
        self.lines = self.monitor.makefile()
        assert "QMP" in self.lines.readline()
        self.qmp("qmp_capabilities")

    def is_running(self):
        if self.process.poll() is not None:
            self.log.seek(0)
            raise AssertionError(f"QEMU has ended: {self.log.read()}")
        return True

    def qmp(self, command, **arguments):
        self.monitor.sendall(json.dumps({"execute": command, "arguments": arguments}).encode())
        for line in self.lines:
            reply = json.loads(line)
            if "return" in reply or "error" in reply:
                assert "return" in reply, (command, reply)
                return reply["return"]
        raise AssertionError(f"QEMU has closed its monitor: {command}")

    def output(self):
        with open(self.serial) as file:
            return file.read()

    def rounds(self):
        """Rounds that the guest has finished here."""
        output = self.output().replace("BOOTED", "")
        assert "E" not in output, f"a request of the guest has failed: {output}"
        assert "W" not in output, f"the guest has found other data than was written: {output}"
        return output.count(".")

    def expect_rounds(self, count):
        wait(f"{count} rounds", lambda: self.is_running() and self.rounds() >= count)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.monitor.close()
        self.log.close()


def check_copy(folder):
    """The copy on the disk is of areas that the guest has copied one after another."""
    with open(f"{folder}/disk", "rb") as disk:
        disk.seek(COPY * SECTOR)
        sectors = [struct.unpack("<I", disk.read(SECTOR)[:4])[0] for _ in range(AREA_SECTORS)]
    areas = {(sector - FIRST) // AREA_SECTORS for sector in sectors}
    assert all((sector - FIRST) % AREA_SECTORS == place for place, sector in enumerate(sectors)), sectors
    assert len(areas) <= 2, areas


def boot(server, kind, device_options=""):
    path = server.controller(kind)
    with Machine(server.folder, "guest", path, kind, device_options) as guest:
        guest.expect_rounds(3)
        assert guest.output().startswith("BOOTED"), guest.output()
    wait("end of the session", lambda: server.sessions() == [])
    check_copy(server.folder)


def case_boot_blk(server):
    """SeaBIOS boots from a vhost-user-blk disk, reads and writes it."""
    boot(server, "blk")


def case_boot_blk_packed(server):
    """SeaBIOS boots from a vhost-user-blk disk over packed virtqueues."""
    boot(server, "blk", ",packed=on")


def case_boot_scsi(server):
    """SeaBIOS boots from a target of a vhost-user-scsi host."""
    boot(server, "scsi")


def case_boot_scsi_packed(server):
    """The same over packed virtqueues."""
    boot(server, "scsi", ",packed=on")


def reconnection():
    """The option by which QEMU comes back to a target that was killed."""
    version = re.search(r"version (\d+)\.(\d+)", run(program("qemu-system-x86_64"), "--version"))
    return ",reconnect-ms=500" if (int(version[1]), int(version[2])) >= (9, 2) else ",reconnect=1"


def kill(server, device_options=""):
    """The target is killed with a request in flight and started again: the guest sees a pause and no error."""

    def create(server):
        path = f"{server.folder}/slow.sock"
        server.rpc("vhost_create_blk_controller", ctrlr=path, dev_name=server.slow_disk(), packed_ring=True)
        return path

    path, servers = create(server), [server]
    try:
        with Machine(server.folder, "guest", path, "blk", device_options, socket_options=reconnection()) as guest:
            guest.expect_rounds(1)
            for _ in range(KILLS):
                servers[-1].kill()
                before = guest.rounds()
                servers.append(Server(server.folder))
                create(servers[-1])
                guest.expect_rounds(before + 2)
            assert guest.output().count("BOOTED") == 1, guest.output()
        check_copy(server.folder)
    finally:
        for one in servers[1:]:
            one.end()


def case_kill_blk(server):
    """The target is killed and started again under a guest that reads, writes and checks."""
    kill(server)


def case_kill_blk_packed(server):
    """The same over packed virtqueues."""
    kill(server, ",packed=on")


def migrate(server, kind, device_options=""):
    """A guest moves to another QEMU while it reads, writes and checks; several passes see its pages written."""
    path = server.controller(kind)
    incoming = f"unix:{server.folder}/migration"
    with Machine(server.folder, "source", path, kind, device_options) as source:
        source.expect_rounds(3)
        with Machine(server.folder, "destination", path, kind, device_options, ("-incoming", incoming)) as destination:
            # So slow that what the guest and the device write is never sent in the permitted downtime.
            source.qmp("migrate-set-parameters", **{"max-bandwidth": MIB, "downtime-limit": 1})
            before = source.rounds()
            source.qmp("migrate", uri=incoming)

            def is_under_way():
                status = source.qmp("query-migrate")
                assert status["status"] != "failed", status
                passes = status.get("ram", {}).get("dirty-sync-count", 0)
                # A guest that gets no time on a processor writes nothing, and has moved already.
                return status["status"] == "completed" or passes >= 4 and source.rounds() >= before + 5

            wait("four passes of the migration", is_under_way)
            source.qmp("migrate-set-parameters", **{"max-bandwidth": 1024 * MIB, "downtime-limit": 2000})

            def is_completed():
                status = source.qmp("query-migrate")
                assert status["status"] != "failed", status
                return status["status"] == "completed"

            wait("end of the migration", is_completed)
            wait("the guest runs again", lambda: destination.qmp("query-status")["status"] == "running")
            assert "BOOTED" not in destination.output(), "the guest has begun anew"
            destination.expect_rounds(10)
            source.rounds()
            started = [session["started"] for session in server.sessions()]
            assert sorted(started) == [False, True], started
    wait("end of the sessions", lambda: server.sessions() == [])
    check_copy(server.folder)


def case_migrate_blk(server):
    """A live migration of a guest with a vhost-user-blk disk."""
    migrate(server, "blk")


def case_migrate_blk_packed(server):
    """The same over packed virtqueues."""
    migrate(server, "blk", ",packed=on")


def case_migrate_scsi(server):
    """A live migration of a guest with a vhost-user-scsi host."""
    migrate(server, "scsi")


def case_migrate_scsi_packed(server):
    """The same over packed virtqueues."""
    migrate(server, "scsi", ",packed=on")


def main():
    cases = {name[5:]: case for name, case in globals().items() if name.startswith("case_")}
    return serving.run_cases(cases, Server)


if __name__ == "__main__":
    sys.exit(main())
