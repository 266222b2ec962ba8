#!/usr/bin/python3 -B
"""bdevs on images of a Ceph cluster, against Ceph's own tools.

    RINGBOLT=target/debug/ringbolt tests/interop/rbd_clients.py [CASE...]

The distribution's Ceph runs as one monitor and one OSD in a temporary folder, on ports of 127.0.0.1 that are
free. `rbd export` and `rbd import` judge what a bdev writes and reads. Without a Ceph that starts all cases are
SKIPPED.
"""

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid

import serving
from nbd_clients import Server
from serving import MIB, RINGBOLT, Skipped, program, random_bytes, run

START_SECONDS_MAX = 60
STOP_SECONDS_MAX = 10
OSD_BYTES = 1 << 30


def wait_until(what, check, seconds=START_SECONDS_MAX, reason=lambda: ""):
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, f"{what}: not within {seconds} s{reason()}"
        time.sleep(0.1)


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Ceph:
    """A cluster of one monitor and one OSD, which authenticates its clients by cephx or not."""

    def __init__(self, auth="none"):
        for name in ["ceph-mon", "ceph-osd", "ceph", "rbd", "monmaptool"]:
            program(name)
        self.folder = tempfile.mkdtemp(prefix="ceph-")
        self.auth = auth
        self.processes = {}
        self.answer = ""
        atexit.register(self.end)
        self.config = f"{self.folder}/ceph.conf"
        fsid, port = str(uuid.uuid4()), free_ports(1)[0]
        self.monitor = f"127.0.0.1:{port}"
        for name in ["mon", "osd", "run"]:
            os.mkdir(f"{self.folder}/{name}")
        open(f"{self.folder}/keyring", "w").close()
        if auth == "cephx":
            tool = [program("ceph-authtool"), f"{self.folder}/keyring"]
            run(*tool, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
            run(*tool, "--gen-key", "-n", "client.admin", "--cap", "mon", "allow *", "--cap", "osd", "allow *")
            run(*tool, "--gen-key", "-n", "osd.0", "--cap", "mon", "allow profile osd", "--cap", "osd", "allow *")
        with open(self.config, "w") as file:
            file.write(f"""[global]
fsid = {fsid}
mon host = v2:{self.monitor}
mon initial members = a
public addr = 127.0.0.1
auth cluster required = {auth}
auth service required = {auth}
auth client required = {auth}
auth allow insecure global id reclaim = false
keyring = {self.folder}/keyring
run dir = {self.folder}/run
admin socket = {self.folder}/run/$name.$pid.asok
log file = {self.folder}/$name.log
mon data = {self.folder}/mon
osd data = {self.folder}/osd
mon data avail crit = 1
osd pool default size = 1
osd pool default min size = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
bluestore block size = {OSD_BYTES}
bluestore cache autotune = false
bluestore cache size = 67108864
""")
        path = f"{self.folder}/monmap"
        run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:{self.monitor}]", path)
        run("ceph-mon", "--mkfs", "-i", "a", "-c", self.config, "--monmap", path, "--keyring", f"{self.folder}/keyring")
        self.start("mon", "ceph-mon", "a")
        wait_until("the monitor answers", lambda: self.try_run("mon", "stat"), reason=lambda: self.reason("mon"))
        osd = str(uuid.uuid4())
        self.ceph("osd", "new", osd)
        if auth == "cephx":
            self.ceph("auth", "add", "osd.0", "-i", f"{self.folder}/keyring")
        run("ceph-osd", "-i", "0", "-c", self.config, "--mkfs", "--osd-uuid", osd)
        self.start("osd", "ceph-osd", "0")
        up = lambda: json.loads(self.ceph("osd", "stat", "-f", "json"))["num_up_osds"] == 1
        wait_until("the OSD is up", up, reason=lambda: self.reason("osd"))
        self.ceph("osd", "pool", "create", "rbd", "8", "8", "replicated")

    def start(self, name, command, identity):
        log = open(f"{self.folder}/{name}.out", "a")
        self.processes[name] = subprocess.Popen([program(command), "-f", "-i", identity, "-c", self.config],
                                                stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def try_run(self, *arguments):
        command = ["ceph", "-c", self.config, "--connect-timeout", "5", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
        except subprocess.TimeoutExpired as error:
            self.answer = str(error)
            return False
        self.answer = done.stderr
        return done.returncode == 0

    def reason(self, name):
        """Why a process of the cluster does not answer, in one line, as far as it is known."""
        end, output = self.processes[name].poll(), open(f"{self.folder}/{name}.out", errors="replace").read()
        state = "runs" if end is None else f"ended with {end}"
        return " ".join(f": ceph-{name} {state}: {output[-300:]}: ceph: {self.answer[-300:]}".split())

    def ceph(self, *arguments):
        return run("ceph", "-c", self.config, "--connect-timeout", "30", *arguments)

    def rbd(self, *arguments):
        return run("rbd", "-c", self.config, *arguments)

    def image(self, name, mib=32):
        self.rbd("create", "--size", f"{mib}M", name)
        return name

    def signal(self, name, number):
        self.processes[name].send_signal(number)

    def end(self):
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


CLUSTERS = {}


def ceph(auth="none"):
    """The cluster, which the first case starts."""
    if auth not in CLUSTERS:
        started = time.monotonic()
        try:
            CLUSTERS[auth] = Ceph(auth)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            CLUSTERS[auth] = Skipped(" ".join(f"Ceph does not start: {error}".split()))
            raise CLUSTERS[auth]
        else:
            print(f"Ceph runs, authentication: {auth} ({time.monotonic() - started:.1f} s)", flush=True)
    if isinstance(CLUSTERS[auth], Skipped):
        raise Skipped("Ceph does not start")
    return CLUSTERS[auth]


def create(server, image, name="Rbd0", **params):
    options = {"mon_host": f"v2:{ceph().monitor}", "auth_client_required": "none",
               "auth_cluster_required": "none", "auth_service_required": "none", "keyring": "/dev/null"}
    options.update(params.pop("config", {}))
    return server.rpc("bdev_rbd_create", name=name, pool_name="rbd", rbd_name=image, block_size=4096,
                      config=options, **params)


def fails(server, text, method, **params):
    try:
        result = server.rpc(method, **params)
    except AssertionError as error:
        assert text in str(error), error
        return
    raise AssertionError(f"{method} {params}: {result}")


def export(image, folder):
    path = f"{folder}/exported"
    if os.path.exists(path):
        os.unlink(path)
    ceph().rbd("export", "--no-progress", image, path)
    return open(path, "rb").read()


def blocks(server, name="Rbd0"):
    return server.rpc("bdev_get_bdevs", name=name)[0]["num_blocks"]


# Cases.


def case_written_data(server):
    """What is written through NBD is what rbd exports, with zeroes and discarded ranges."""
    qemu_io, nbdcopy = program("qemu-io"), program("nbdcopy")
    image = ceph().image("written")
    assert create(server, image) == "Rbd0"
    info = server.rpc("bdev_get_bdevs", name="Rbd0")[0]
    assert info["product_name"] == "Ceph Rbd Disk" and info["num_blocks"] == 32 * MIB // 4096, info
    specific = info["driver_specific"]["rbd"]
    assert specific["pool_name"] == "rbd" and specific["rbd_name"] == image, specific
    data = bytearray(random_bytes(32 * MIB))
    source = f"{server.folder}/source"
    open(source, "wb").write(data)
    uri = server.export("Rbd0")
    run(nbdcopy, "--flush", "--connections=4", source, uri)
    assert export(image, server.folder) == data
    # FUA, zeroes, discards of whole objects and of a block, and an unaligned write.
    run(qemu_io, "-f", "raw", "-c", "write -f -P 7 1M 64k", "-c", "write -z 2M 128k", "-c", "discard 8M 8M", "-c", "discard 20M 4k",
        "-c", "write -P 9 5000 12345", "-c", "flush", uri)
    data[MIB:MIB + (64 << 10)] = b"\7" * (64 << 10)
    data[2 * MIB:2 * MIB + (128 << 10)] = bytes(128 << 10)
    data[8 * MIB:16 * MIB] = bytes(8 * MIB)
    data[20 * MIB:20 * MIB + 4096] = bytes(4096)
    data[5000:5000 + 12345] = b"\x09" * 12345
    assert export(image, server.folder) == data


def case_imported_data(server):
    """What rbd imports is read through NBD."""
    nbdcopy = program("nbdcopy")
    source, copy = f"{server.folder}/source", f"{server.folder}/copy"
    data = random_bytes(16 * MIB)
    open(source, "wb").write(data)
    ceph().rbd("import", "--no-progress", source, "imported")
    create(server, "imported")
    run(nbdcopy, "--connections=4", server.export("Rbd0"), copy)
    assert open(copy, "rb").read() == data


def case_resize(server):
    """The bdev follows the image, also when another client changes its size."""
    image = ceph().image("resized", 16)
    create(server, image)
    ceph().rbd("resize", "--no-progress", "--size", "24M", image)
    wait_until("the larger size is seen", lambda: blocks(server) == 24 * MIB // 4096, 30)
    assert server.rpc("bdev_rbd_resize", name="Rbd0", new_size=32) is True
    assert blocks(server) == 32 * MIB // 4096
    assert json.loads(ceph().rbd("info", "--format", "json", image))["size"] == 32 * MIB
    fails(server, "data would be lost", "bdev_rbd_resize", name="Rbd0", new_size=8)
    ceph().rbd("resize", "--no-progress", "--allow-shrink", "--size", "8M", image)
    wait_until("the smaller size is seen", lambda: blocks(server) == 8 * MIB // 4096, 30)


def case_in_use(server):
    """An image in use is not removed; a snapshot that is made meanwhile keeps its data."""
    qemu_io = program("qemu-io")
    image = ceph().image("used", 8)
    create(server, image)
    uri = server.export("Rbd0")
    run(qemu_io, "-f", "raw", "-c", "write -P 1 0 8M", "-c", "flush", uri)
    removal = subprocess.run(["rbd", "-c", ceph().config, "rm", "--no-progress", image], capture_output=True,
                             text=True, timeout=60)
    assert removal.returncode != 0 and "watchers" in removal.stderr, removal
    ceph().rbd("snap", "create", "--no-progress", f"{image}@before")
    run(qemu_io, "-f", "raw", "-c", "write -P 2 1M 1M", "-c", "flush", uri)
    assert export(f"{image}@before", server.folder) == b"\1" * (8 * MIB)
    assert export(image, server.folder) == b"\1" * MIB + b"\2" * MIB + b"\1" * (6 * MIB)
    server.rpc("nbd_export_delete", name="Rbd0")
    assert server.rpc("bdev_rbd_delete", name="Rbd0") is True
    ceph().rbd("snap", "purge", "--no-progress", image)
    ceph().rbd("rm", "--no-progress", image)


def case_clusters(server):
    """Registered clusters are shared, saved, and used by perf."""
    cluster, image = ceph(), ceph().image("shared", 16)
    assert server.rpc("bdev_rbd_register_cluster", name="c", config_file=cluster.config, core_mask="0x1") == "c"
    fails(server, "registered as c already", "bdev_rbd_register_cluster", name="c")
    wanted = {"cluster_name": "c", "config_file": cluster.config, "core_mask": "0x1"}
    assert server.rpc("bdev_rbd_get_clusters_info") == [wanted]
    assert server.rpc("bdev_rbd_get_clusters_info", name="c") == wanted
    fails(server, "no cluster is registered as d", "bdev_rbd_get_clusters_info", name="d")
    on_cluster = {"pool_name": "rbd", "block_size": 512, "cluster_name": "c"}
    fails(server, "image nosuch of pool rbd", "bdev_rbd_create", rbd_name="nosuch", **on_cluster)
    assert server.rpc("bdev_rbd_create", name="Shared", rbd_name=image, **on_cluster) == "Shared"
    fails(server, "the bdev Shared uses the cluster c", "bdev_rbd_unregister_cluster", name="c")
    saved = json.loads(run(RINGBOLT, "rpc", "-r", server.rpc_socket, "save_config"))
    path = f"{server.folder}/saved.json"
    json.dump(saved, open(path, "w"))
    calls = [call["method"] for part in saved["subsystems"] for call in part["config"] or []]
    assert calls.index("bdev_rbd_register_cluster") < calls.index("bdev_rbd_create"), calls
    assert server.rpc("bdev_rbd_delete", name="Shared") is True
    assert server.rpc("bdev_rbd_unregister_cluster", name="c") is True
    print(run(RINGBOLT, "perf", "--config", path, "--filename=Shared", "--rw=randwrite", "--bs=4k",
              "--iodepth=16", "--size=16M", "--verify=crc32c", "--name=verify"))


def case_silent_cluster(server):
    """Requests of a cluster that does not answer wait or fail, and nothing else does."""
    qemu_io = program("qemu-io")
    cluster = ceph()
    create(server, cluster.image("waits", 8), "Waits")
    create(server, cluster.image("fails", 8), "Fails", config={"rados_osd_op_timeout": "2"})
    server.malloc()
    waits = server.export("Waits", path=f"{server.folder}/waits.sock")
    ends = server.export("Fails", path=f"{server.folder}/fails.sock")
    other = server.export("Malloc0", path=f"{server.folder}/malloc.sock")
    for uri in [waits, ends]:
        run(qemu_io, "-f", "raw", "-c", "write -f -P 3 0 1M", uri)
    cluster.signal("osd", signal.SIGSTOP)
    try:
        command = [qemu_io, "-f", "raw", "-c", "write -f -P 4 0 64k", waits]
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        failed = subprocess.run([qemu_io, "-f", "raw", "-c", "write -f -P 4 0 64k", ends], capture_output=True,
                                text=True, timeout=60)
        assert "failed" in failed.stdout + failed.stderr, failed
        started = time.monotonic()
        run(qemu_io, "-f", "raw", "-c", "write -P 5 0 1M", "-c", "read -P 5 0 1M", other)
        server.rpc("bdev_get_bdevs")
        assert time.monotonic() - started < 5
        assert waiting.poll() is None
    finally:
        cluster.signal("osd", signal.SIGCONT)
    output = waiting.communicate(timeout=60)[0]
    assert waiting.returncode == 0 and "wrote" in output, output
    run(qemu_io, "-f", "raw", "-c", "read -P 4 0 64k", waits)


def case_no_monitor(server):
    """A cluster that cannot be reached is an error after the time of its option; other calls go on."""
    ceph()
    port = free_ports(1)[0]
    config = {"mon_host": f"v2:127.0.0.1:{port}", "client_mount_timeout": "2"}
    started = time.monotonic()
    fails(server, "cannot connect to Ceph as client.admin", "bdev_rbd_create", pool_name="rbd", rbd_name="x",
          block_size=512, config=config)
    assert time.monotonic() - started < 20
    fails(server, "multiple of 512", "bdev_rbd_create", pool_name="rbd", rbd_name="x", block_size=500)
    fails(server, "nosuch_option", "bdev_rbd_create", pool_name="rbd", rbd_name="x", block_size=512,
          config={"nosuch_option": "1"})


def case_cephx(server):
    """A cluster with cephx takes a user with its key, from a file and as an option, and refuses others at once."""
    qemu_io = program("qemu-io")
    cluster = ceph("cephx")
    cluster.rbd("create", "--size", "8M", "secured")
    caps = ["mon", "profile rbd", "osd", "profile rbd pool=rbd"]
    key_file, wrong_file = f"{server.folder}/user.keyring", f"{server.folder}/wrong.keyring"
    cluster.ceph("auth", "get-or-create", "client.ringbolt", *caps, "-o", key_file)
    key = cluster.ceph("auth", "get-key", "client.ringbolt").strip()
    other = cluster.ceph("auth", "get-key", "client.admin").strip()
    open(wrong_file, "w").write(f"[client.ringbolt]\n\tkey = {other}\n")
    address = {"mon_host": f"v2:{cluster.monitor}"}

    register = lambda **params: server.rpc("bdev_rbd_register_cluster", user_id="ringbolt", **params)
    register(name="file", config_param=address, key_file=key_file)
    register(name="option", config_param={**address, "key": key})
    register(name="configured", config_file=cluster.config, key_file=key_file)
    for cluster_name in ["file", "option", "configured"]:
        bdev = f"On{cluster_name}"
        server.rpc("bdev_rbd_create", name=bdev, pool_name="rbd", rbd_name="secured", block_size=512,
                   cluster_name=cluster_name)
        uri = server.export(bdev, path=f"{server.folder}/{bdev}.sock")
        run(qemu_io, "-f", "raw", "-c", "write -f -P 3 0 64k", "-c", "read -P 3 0 64k", uri)
        info = server.rpc("bdev_get_bdevs", name=bdev)[0]["driver_specific"]["rbd"]
        assert info["user_id"] == "ringbolt" and key not in json.dumps(info), info

    # A wrong key, no key, and an unknown user: an error that names the user, long before client_mount_timeout.
    def refused(text, **params):
        started = time.monotonic()
        fails(server, text, "bdev_rbd_register_cluster", **params)
        assert time.monotonic() - started < 15, params

    refused("client.ringbolt", name="bad", user_id="ringbolt", config_param=address, key_file=wrong_file)
    refused("client.ringbolt", name="bad", user_id="ringbolt", config_param={**address, "key": other})
    refused("client.nobody", name="bad", user_id="nobody", config_param=address, key_file=key_file)
    refused("client.ringbolt", name="bad", user_id="ringbolt", config_param=address,
            key_file=f"{server.folder}/nosuch")
    # The user has no rights to another pool.
    cluster.ceph("osd", "pool", "create", "private", "8", "8", "replicated")
    cluster.rbd("create", "--size", "8M", "private/image")
    fails(server, "image image of pool private", "bdev_rbd_create", name="No", pool_name="private", rbd_name="image",
          block_size=512, cluster_name="file")
    names = {one["cluster_name"] for one in server.rpc("bdev_rbd_get_clusters_info")}
    assert names == {"file", "option", "configured"}, names


CASES = {name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")}

if __name__ == "__main__":
    sys.exit(serving.run_cases(CASES, Server))
