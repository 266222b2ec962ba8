"""An image of a store under the kernel's initiator."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from harness.case import case
from harness.guest import PATIENCE, Guest
from harness.image import Image
from harness.machine import Machine
from harness.targets import MIB, Subsystem
from .machines import NO_IOMMU
from .recovery import restart_under_ext4
from .scsi_debug import AtomicDisk
from .vhost_user import CACHE


@case("store-restarts", on=("ringbolt",), provokes=r"reconnect|failed|timeout|timed out|I/O error|error recovery|Failed|buffer_io_error|Retrying", seconds=40)
def store_restarts(bench):
    """fio verifies an image of a store; the server is killed 10 times under ext4 on it, and the store is sound afterwards."""
    subsystem = Subsystem("store", [])
    target = bench.serve(subsystem)
    path = f"{bench.folder}/store.raw"
    with open(path, "wb") as file:
        file.truncate(256 * MIB)
    target.rpc("bdev_uring_create", name="Disk", filename=path)
    target.rpc("store_format", bdev_name="Disk", partitions=2, log_bytes=MIB)
    target.rpc("store_open", bdev_name="Disk")
    target.rpc("store_image_create", name="vol", size=128 * MIB)
    target.rpc("nvmf_subsystem_add_ns", nqn=subsystem.nqn, namespace={"bdev_name": "store/vol", "nsid": 1})
    with open(target.config, "w", encoding="utf-8") as file:
        json.dump(target.rpc("save_config"), file)
    bench.connect(subsystem)
    device = bench.block(subsystem)
    options = ("--rw=randwrite", "--bsrange=512-64k", "--iodepth=16", "--size=64m", "--verify=crc32c", "--verify_fatal=1")
    bench.fio("image", device, *options)
    bench.disconnect(subsystem)
    restart_under_ext4(bench, target, subsystem, 10)
    redone = [partition["entries_redone"] for partition in target.rpc("store_get_stores")[0]["partitions"]]
    assert sum(redone) > 0, "no crash left anything in the logs"
    bench.disconnect(subsystem)
    target.stop()
    found = subprocess.run([target.binary, "objects", "check", path], capture_output=True, text=True, check=False)
    assert found.returncode == 0 and " 0 problems" in found.stdout, found.stdout + found.stderr


class Cluster:
    """`ringbolt store up`: three nodes on the host."""

    def __init__(self, binary, directory):
        self.binary, self.directory = binary, directory
        command = [binary, "store", "up", "--cluster", directory, "--size=400m", "--groups=4", "--log-size=2m"]
        self.up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in self.up.stdout:
            if line.startswith("ready"):
                return
        raise AssertionError(f"the cluster does not start: {self.up.wait()}")

    def run(self, *arguments):
        return subprocess.run([self.binary, *arguments, "--cluster", self.directory], capture_output=True, text=True, check=True).stdout

    def node(self, number):
        """The process of a node."""
        config = f"{self.directory}/node{number}/config.json".encode()
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if config in entry.read_bytes():
                    return int(entry.parent.name)
            except OSError:
                pass
        raise AssertionError(f"node {number} does not run")

    def wait_until_healthy(self):
        deadline = time.monotonic() + 60 * PATIENCE
        while not (status := json.loads(self.run("store", "status", "--json")))["healthy"]:
            assert time.monotonic() < deadline, status
            time.sleep(0.1)

    def stop(self):
        self.up.send_signal(signal.SIGINT)
        self.up.stdout.read()
        assert self.up.wait() == 0


@case("store-cluster", on=("ringbolt",), seconds=30)
def store_cluster(bench):
    """fio verifies an image of a cluster through the kernel's initiator, while nodes are killed and stopped: no I/O fails."""
    subsystem = Subsystem("cluster", [])
    target = bench.serve(subsystem)
    cluster = Cluster(target.binary, f"{bench.folder}/cluster")
    try:
        cluster.run("image", "create", "vol", "128m")
        target.rpc("bdev_store_create", pool="pool", image="vol", cluster=cluster.directory)
        target.rpc("nvmf_subsystem_add_ns", nqn=subsystem.nqn, namespace={"bdev_name": "pool/vol", "nsid": 1})
        bench.connect(subsystem)
        device = bench.block(subsystem)
        options = ("--rw=randwrite", "--bsrange=512-64k", "--iodepth=16", "--size=32m", "--verify=crc32c", "--verify_fatal=1")
        load = bench.start_load("cluster", device, *options)
        # A node that ends soon after its start is started again later.
        time.sleep(3)
        killed = cluster.node(1)
        os.kill(killed, signal.SIGKILL)
        cluster.wait_until_healthy()
        stopped = cluster.node(2)
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(2)
        os.kill(stopped, signal.SIGCONT)
        cluster.wait_until_healthy()
        bench.end_load(load)
        bench.guest.check(f"mkfs.ext4 -q {device} && mount {device} /mnt && echo 1 > /mnt/file && umount /mnt", 60)
        assert cluster.node(1) != killed
        bench.disconnect(subsystem)
        target.rpc("bdev_store_delete", name="pool/vol")
    finally:
        cluster.stop()
    for node in (1, 2, 3):
        found = subprocess.run([target.binary, "objects", "check", f"{cluster.directory}/node{node}/store.img"], capture_output=True, text=True, check=False)
        assert found.returncode == 0 and re.search(r"\b0 problems", found.stdout), found.stdout + found.stderr


@case("store-atomic", on=("ringbolt",), machine=NO_IOMMU, provokes=r"sd[a-z]|scsi", seconds=20)
def store_atomic(bench):
    """A node on a disk of the kernel that has atomic writes overwrites blocks in place unasked, each with one such write."""
    guest = bench.guest
    disk = AtomicDisk(guest)
    cluster, perf = "--cluster /tmp/cluster", "ringbolt perf --filename='store:pool/vol?cluster=/tmp/cluster' --name=t"
    options = f"--replicas 1 --groups 1 --spare 1 --log-size 512k --device /dev/{disk.name} --force"
    up = guest.spawn(f"echo $$ > /tmp/up.pid; exec ringbolt store up {cluster} {options} 2>&1")
    guest.until(f"ringbolt store status {cluster} --json | grep -q '\"healthy\": true'", 60)

    def overwritten():
        status = json.loads(guest.check(f"ringbolt store status {cluster} --json"))
        return status["nodes"][0]["report"]["replicas"][0]["entries_overwriting"]

    guest.check(f"ringbolt image create {cluster} vol 4m")
    guest.check(f"{perf} --rw=write --bs=64k --iodepth=8 --size=4m --verify=crc32c", 60)
    # What is in place is known after a checkpoint: the first writes are logged with their data.
    guest.check(f"{perf} --rw=randwrite --bs=4k --iodepth=8 --size=4m --verify=crc32c", 60)
    before = overwritten()
    disk.start_log()
    guest.check(f"{perf} --rw=randwrite --bs=4k --iodepth=1 --size=4m --number_ios=64 --verify=crc32c", 60)
    atomic = disk.atomic_writes()
    assert atomic > 0 and atomic == overwritten() - before, (atomic, overwritten() - before)
    guest.check("kill -INT $(cat /tmp/up.pid)")
    assert up.wait(60).rc == 0, up.out
    found = guest.check(f"ringbolt objects check /dev/{disk.name}", 60)
    assert re.search(r"\b0 problems", found), found
    guest.check("rm -r /tmp/cluster")
    disk.remove()


PMEM = Machine(pmem_mib=192)
CLUSTER = "--cluster /mnt/cluster"


def perf(image):
    """The command of a verified load on an image, without what it does."""
    device = f"store:pool/{image}?cluster=/mnt/cluster"
    return f"ringbolt perf --filename='{device}' --name=t --bs=4k --iodepth=8 --verify=crc32c"


PERF = perf("vol")


def boot_with_pmem(bench, name):
    """Boots a guest whose memory is a file: what is in its persistent memory is there for the next one. To be closed."""
    folder = f"{bench.folder}/{name}"
    os.mkdir(folder)
    memory = f"memory-backend-file,id=ram,mem-path={bench.folder}/memory,size=1G,share=on"
    more = ["-object", memory, "-machine", "memory-backend=ram"]
    return Guest(Image(CACHE), folder, memory="1G", machine=PMEM, program=bench.guest.program, more=more)


def start_on_pmem(guest, options=""):
    """Starts the cluster in /mnt/cluster, and waits until it is healthy; -> the job, and what the node reports."""
    up = guest.spawn(f"exec ringbolt store up {CLUSTER} {options} 2>&1")
    return up, report_on_pmem(guest)


def report_on_pmem(guest):
    """Waits until the cluster is healthy; -> what the node reports."""
    guest.until(f"ringbolt store status {CLUSTER} --json | grep -q '\"healthy\": true'", 60)
    return json.loads(guest.check(f"ringbolt store status {CLUSTER} --json"))["nodes"][0]["report"]


@case("store-pmem", on=("ringbolt",), seconds=90)
def store_pmem(bench):
    """The logs of a node are on persistent memory: what is acknowledged is there after a kill and after a loss of power."""
    with boot_with_pmem(bench, "first") as guest:
        if not guest.check("ls /dev/pmem0 2> /dev/null; true"):
            bench.skip("this kernel has no persistent memory at memmap=")
        guest.check("mkfs.ext4 -q -b 4096 /dev/pmem0 && mount -o dax /dev/pmem0 /mnt", 60)
        guest.check("truncate -s 16M /mnt/log /mnt/disk /tmp/log")
        # Elsewhere it is refused, with the reason.
        server = guest.spawn("exec ringbolt serve -r /tmp/rpc.sock 2>&1")
        server.expect("^ready", 60)
        refused = guest.run("ringbolt rpc -r /tmp/rpc.sock bdev_pmem_create name=P pmem_file=/tmp/log")
        assert refused.rc != 0 and "mount -o dax" in refused.out, refused
        guest.check("ringbolt rpc -r /tmp/rpc.sock bdev_pmem_create name=P pmem_file=/mnt/disk")
        shown = json.loads(guest.check("ringbolt rpc -r /tmp/rpc.sock bdev_get_bdevs name=P"))[0]
        assert (shown["durability"], shown["write_cache"]) == ("pmem", False), shown
        # What the kernel says of other files and devices.
        for path, durability in {"/tmp/log": "memory", "/mnt/log": "disk", "/dev/nullb0": "memory"}.items():
            name = path.replace("/", "_")
            guest.check(f"ringbolt rpc -r /tmp/rpc.sock bdev_uring_create name={name} filename={path}")
            shown = json.loads(guest.check(f"ringbolt rpc -r /tmp/rpc.sock bdev_get_bdevs name={name}"))[0]
            assert shown["durability"] == durability, shown
        guest.check("killall ringbolt")
        server.wait(60)

        options = "--nodes 1 --size=96m --groups 2 --spare 2 --log-size 2m --log /mnt/log"
        up, report = start_on_pmem(guest, options)
        assert report["durability"] == "pmem", report
        guest.check(f"ringbolt store pool create fast --replicas 1 --groups 1 --class pmem {CLUSTER}")
        classes = {pool["name"]: pool["class"] for pool in json.loads(guest.check(f"ringbolt store pool list --json {CLUSTER}"))}
        assert classes == {"pool": "disk", "fast": "pmem"}, classes
        guest.check(f"ringbolt image create {CLUSTER} vol 16m")
        guest.check(f"ringbolt image create {CLUSTER} load 4m")
        # A node that ends in its first two seconds is started again later.
        guest.check(f"{PERF} --rw=randwrite --size=8m --do_verify=0 --runtime=3 --time_based", 60)
        guest.check(f"{PERF} --rw=write --size=8m --do_verify=0", 60)
        guest.check("for p in $(pidof ringbolt); do ! grep -q node1/config /proc/$p/cmdline || kill -9 $p; done")
        guest.check(f"{PERF} --rw=read --size=8m", 60)
        report_on_pmem(guest)
        guest.check(f"{PERF} --rw=randwrite --size=8m --do_verify=0 --runtime=3 --time_based", 60)
        guest.check(f"{PERF} --rw=write --offset=8m --size=4m --do_verify=0", 60)
        # Writes are in flight when the power is cut.
        load = guest.spawn(f"{perf('load')} --rw=randwrite --size=4m --do_verify=0 --runtime=600 --time_based")
        guest.check(f"{PERF} --rw=write --size=4m --do_verify=0", 60)
        assert load.rc is None, load.out
        guest.cut_power()
    with boot_with_pmem(bench, "second") as guest:
        guest.check("mount -o dax /dev/pmem0 /mnt", 60)
        up, report = start_on_pmem(guest)
        assert report["durability"] == "pmem", report
        guest.check(f"{PERF} --rw=read --size=12m", 60)
        guest.check("killall -INT ringbolt")
        up.wait(60)
        found = guest.check("ringbolt objects check --log /mnt/log /mnt/cluster/node1/store.img", 60)
        assert re.search(r"\b0 problems", found), found
