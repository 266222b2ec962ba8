"""`ringbolt serve` inside the guest, with bdevs as block devices of the kernel's ublk driver."""

import json

from harness.case import case

from .machines import NEWEST, NO_IOMMU

SOCKET = "/tmp/ublk.rpc"
# Writes of the slow disk that show that a load is running.
LOAD_WRITES = 50
FIO = "--ioengine=libaio --direct=1 --bsrange=4k-64k --iodepth=8 --verify=crc32c --verify_fatal=1"


USER = 1000


def as_user(command, user=USER):
    """A command of the guest, run by an ordinary user."""
    return f"setpriv --reuid {user} --regid {user} --clear-groups {command}"


class Serve:
    """`ringbolt serve` in the guest, with both CPUs; by an ordinary user with `unprivileged`."""

    def __init__(self, guest, config="", unprivileged=False):
        self.guest, self.config, self.unprivileged = guest, config, unprivileged
        self.launch()

    def launch(self):
        self.guest.check(f"rm -f {SOCKET}")
        command = f"ringbolt serve --cores 0,1 -r {SOCKET} {self.config}"
        command = as_user(command) if self.unprivileged else command
        self.job = self.guest.spawn(f"echo $$ > /tmp/ublk.pid; exec {command} 2>&1")
        self.guest.until(f"ringbolt rpc -r {SOCKET} spdk_get_version", 60)

    def rpc(self, method, *parameters):
        """Calls a method; -> its result."""
        words = " ".join(parameters)
        out = self.guest.check(f"ringbolt rpc -r {SOCKET} {method} {words} 2> /tmp/errors || cat /tmp/errors", 90)
        try:
            return json.loads(out)
        except ValueError:
            raise AssertionError(f"{method}: {out}") from None

    def refuses(self, method, *parameters):
        """Calls a method that fails; -> what it says."""
        ran = self.guest.run(f"ringbolt rpc -r {SOCKET} {method} {' '.join(parameters)} 2>&1", 60)
        assert ran.rc != 0, ran
        return ran.out

    def kill(self):
        self.guest.check("kill -KILL $(cat /tmp/ublk.pid)")
        self.job.wait(30)


def writes(serve, name):
    """The writes that a bdev has executed."""
    statistics = {one["name"]: one for one in serve.rpc("bdev_get_iostat")["bdevs"]}
    return statistics[name]["num_write_ops"]


def make_devices(serve):
    serve.rpc("bdev_uring_create", "name=Disk", "filename=/tmp/ublk.disk", "block_size=4096")
    serve.rpc("bdev_uring_create", "name=Base", "filename=/tmp/ublk.base", "block_size=512")
    latencies = [f"{kind}_{what}_latency=5000" for kind in ("avg", "p99") for what in ("read", "write")]
    serve.rpc("bdev_delay_create", "name=Slow", "base_bdev_name=Base", *latencies)


@case("ublk-disk", on=("ringbolt",), machine=NO_IOMMU, seconds=60)
def ublk_disk(bench):
    """Bdevs are /dev/ublkbN: ext4 under fio verify, discard, zeroes, several queues, removal with the bdev, a clean end."""
    guest = bench.guest
    guest.check("[ -e /dev/ublk-control ] || { echo 'no module ublk_drv'; exit 1; }")
    guest.check("truncate -s 128M /tmp/ublk.disk && truncate -s 48M /tmp/ublk.base")
    serve = Serve(guest)
    make_devices(serve)
    serve.rpc("bdev_malloc_create", "name=Malloc0", "num_blocks=2048", "block_size=512")
    assert "no ublk target" in serve.refuses("ublk_start_disk", "bdev_name=Disk", "ublk_id=0")
    assert serve.rpc("ublk_create_target") is True
    assert "already" in serve.refuses("ublk_create_target")
    assert serve.rpc("ublk_start_disk", "bdev_name=Disk", "ublk_id=0", "num_queues=2", "queue_depth=64") == 0
    assert serve.rpc("ublk_start_disk", "bdev_name=Malloc0", "ublk_id=7") == 7
    assert "in use" in serve.refuses("ublk_start_disk", "bdev_name=Malloc0", "ublk_id=0")
    first = {"ublk_device": "/dev/ublkb0", "id": 0, "queue_depth": 64, "num_queues": 2, "bdev_name": "Disk"}
    disks = serve.rpc("ublk_get_disks")
    assert disks[0] == first and [disk["id"] for disk in disks] == [0, 7], disks
    queue = "/sys/block/ublkb0/queue"
    facts = guest.check(f"cat /sys/block/ublkb0/size {queue}/logical_block_size {queue}/write_cache; ls /sys/block/ublkb0/mq")
    assert facts.split() == ["262144", "4096", "write", "back", "0", "1"], facts
    guest.check("mkfs.ext4 -q /dev/ublkb0 && mkdir -p /tmp/ublk && mount /dev/ublkb0 /tmp/ublk", 60)
    guest.check(f"fio --name=verify --directory=/tmp/ublk --rw=randwrite --size=16m --numjobs=2 --fsync=16 {FIO}", 120)
    guest.check("umount /tmp/ublk && fsck.ext4 -fn /dev/ublkb0", 60)
    # Blocks are where they belong, large requests too; what is discarded and zeroed reads as zeroes.
    guest.check("dd if=/dev/urandom of=/tmp/bytes bs=1M count=1 status=none && "
                "dd if=/tmp/bytes of=/dev/ublkb7 oflag=direct bs=1M status=none && "
                "dd if=/dev/ublkb7 iflag=direct bs=1M count=1 status=none | cmp - /tmp/bytes", 60)
    guest.check("blkdiscard -o 65536 -l 65536 /dev/ublkb7 && blkdiscard -z -o 262144 -l 65536 /dev/ublkb7", 60)
    for start in (65536, 262144):
        guest.check(f"dd if=/dev/zero of=/tmp/bytes bs=64k count=1 seek={start // 65536} conv=notrunc status=none")
    guest.check("dd if=/dev/ublkb7 iflag=direct bs=1M count=1 status=none | cmp - /tmp/bytes", 60)
    saved = serve.rpc("framework_get_config", "name=ublk")
    assert saved == [
        {"method": "ublk_create_target", "params": {}},
        {"method": "ublk_start_disk",
         "params": {"bdev_name": "Disk", "ublk_id": 0, "num_queues": 2, "queue_depth": 64}},
        {"method": "ublk_start_disk",
         "params": {"bdev_name": "Malloc0", "ublk_id": 7, "num_queues": 1, "queue_depth": 128}},
    ], saved
    # A disk goes with its bdev, and its number can be used again.
    serve.rpc("bdev_malloc_delete", "name=Malloc0")
    guest.until("[ ! -e /dev/ublkb7 ] && [ ! -e /dev/ublkc7 ]", 30)
    assert serve.rpc("ublk_start_disk", "bdev_name=Slow", "ublk_id=7") == 7
    assert serve.rpc("ublk_stop_disk", "ublk_id=7") is True
    guest.check("[ ! -e /dev/ublkb7 ] && [ ! -e /dev/ublkc7 ]")
    assert "no disk" in serve.refuses("ublk_stop_disk", "ublk_id=7")
    # The end of the process removes the rest.
    guest.check("kill -TERM $(cat /tmp/ublk.pid)")
    assert serve.job.wait(60).rc == 0, serve.job.out
    guest.check("[ ! -e /dev/ublkb0 ] && [ ! -e /dev/ublkc0 ]; rm /tmp/ublk.disk /tmp/ublk.base")


@case("ublk-recovery", on=("ringbolt",), machine=NO_IOMMU, seconds=90)
def ublk_recovery(bench):
    """A disk waits while its killed server is gone: recovered by method and by configuration under ext4 and fio verify."""
    guest = bench.guest
    guest.check("truncate -s 64M /tmp/ublk.disk && truncate -s 48M /tmp/ublk.base")
    serve = Serve(guest)
    make_devices(serve)
    serve.rpc("ublk_create_target")
    serve.rpc("ublk_start_disk", "bdev_name=Slow", "ublk_id=1", "num_queues=2", "queue_depth=32")
    guest.check(f"ringbolt rpc -r {SOCKET} save_config > /tmp/ublk.json")
    guest.check("mkfs.ext4 -q /dev/ublkb1 && mkdir -p /tmp/ublk && mount /dev/ublkb1 /tmp/ublk", 60)
    load = f"fio --name=load --directory=/tmp/ublk --rw=randwrite --size=4m --numjobs=2 --fsync=8 {FIO}"
    rounds = guest.spawn(f"while [ ! -e /tmp/stop ]; do {load} || exit 1; echo round; done; echo stopped")

    def is_under_load():
        return writes(serve, "Slow") >= LOAD_WRITES

    for by_method in (True, False, True):
        guest.wait(is_under_load, 60, f"{LOAD_WRITES} writes", poll=0.1)
        serve.kill()
        guest.check("[ -e /dev/ublkb1 ]")
        if by_method:
            serve = Serve(guest)
            make_devices(serve)
            serve.rpc("ublk_create_target")
            assert "size" in serve.refuses("ublk_recover_disk", "bdev_name=Disk", "ublk_id=1")
            assert "no disk" in serve.refuses("ublk_recover_disk", "bdev_name=Slow", "ublk_id=5")
            assert serve.rpc("ublk_recover_disk", "bdev_name=Slow", "ublk_id=1") == 1
        else:
            serve = Serve(guest, "--config /tmp/ublk.json")
        disk = {"ublk_device": "/dev/ublkb1", "id": 1, "queue_depth": 32, "num_queues": 2, "bdev_name": "Slow"}
        assert serve.rpc("ublk_get_disks") == [disk]
    guest.wait(is_under_load, 60, f"{LOAD_WRITES} writes", poll=0.1)
    rounds.expect("^round$", 240)
    guest.check("touch /tmp/stop")
    rounds.expect("^stopped$", 240)
    rounds.check()
    guest.check("rm /tmp/stop; umount /tmp/ublk && fsck.ext4 -fn /dev/ublkb1", 60)
    assert serve.rpc("ublk_destroy_target") is True
    guest.check("[ ! -e /dev/ublkb1 ] && [ ! -e /dev/ublkc1 ]")
    serve.rpc("bdev_delay_delete", "name=Slow")
    guest.check("kill -TERM $(cat /tmp/ublk.pid)")
    assert serve.job.wait(60).rc == 0, serve.job.out
    guest.check("rm /tmp/ublk.disk /tmp/ublk.base /tmp/ublk.json")


# What udev does with the rules that docs/UBLK.md has.
RULE = f"""#!/bin/sh
case "$ACTION $DEVNAME" in
"add ublk"[bc]*) chown {USER}:{USER} "/dev/$DEVNAME" ;;
esac
"""


@case("ublk-user", on=("ringbolt",), machine=NO_IOMMU, seconds=60, provokes=r"I/O error, dev ublkb[34],")
def ublk_user(bench):
    """A server of an ordinary user has a disk, which the driver copies: fio verify, ext4, a kill, and what is missing."""
    guest = bench.guest
    guest.check(f"truncate -s 64M /tmp/ublk.disk && chown {USER}:{USER} /tmp/ublk.disk && chmod 600 /dev/ublk-control")
    disk = ("bdev_name=Disk", "ublk_id=3", "num_queues=2", "queue_depth=32", "unprivileged=true")

    def make_disk(serve):
        serve.rpc("bdev_uring_create", "name=Disk", "filename=/tmp/ublk.disk", "block_size=4096")

    serve = Serve(guest)
    make_disk(serve)
    serve.rpc("ublk_create_target")
    assert "CAP_SYS_ADMIN" in serve.refuses("ublk_start_disk", *disk)
    guest.check("[ ! -e /dev/ublkc3 ] && kill -TERM $(cat /tmp/ublk.pid)")
    assert serve.job.wait(60).rc == 0, serve.job.out

    serve = Serve(guest, unprivileged=True)
    make_disk(serve)
    assert "/dev/ublk-control: permission denied" in serve.refuses("ublk_create_target")
    guest.check("chmod 666 /dev/ublk-control")
    serve.rpc("ublk_create_target")
    assert "unprivileged=true" in serve.refuses("ublk_start_disk", *disk[:4])
    assert "own /dev/ublkc3" in serve.refuses("ublk_start_disk", *disk)
    # What that has left is replaced once its node is the user's.
    guest.check(f"chown {USER}:{USER} /dev/ublkc3")
    guest.check(f"cat > /tmp/ublk.rule <<'END'\n{RULE}END\nchmod 755 /tmp/ublk.rule")
    rules = guest.spawn("echo $$ > /tmp/uevent.pid; exec uevent /tmp/ublk.rule")
    guest.until("grep -q '^[^ ]*  *15  *[1-9]' /proc/net/netlink", 30)
    assert serve.rpc("ublk_start_disk", *disk) == 3
    [found] = serve.rpc("ublk_get_disks")
    assert found["unprivileged"] is True and (found["num_queues"], found["queue_depth"]) == (2, 32), found

    # The user reads and writes; others may not, whatever the node's mode.
    guest.until(f"[ $(stat -c %u /dev/ublkb3) = {USER} ]", 30)
    verify = f"fio --name=verify --filename=/dev/ublkb3 --size=16m --rw=randwrite {FIO} --output=/tmp/ublk.fio"
    guest.check(as_user(verify.replace("4k-64k", "4k-1m")), 120)
    guest.check("dd if=/dev/urandom of=/tmp/bytes bs=1M count=4 status=none && chmod 644 /tmp/bytes")
    guest.check(as_user("dd if=/tmp/bytes of=/dev/ublkb3 oflag=direct bs=1M status=none"))
    guest.check(as_user("blkdiscard -o 65536 -l 65536 /dev/ublkb3"))
    guest.check("dd if=/dev/zero of=/tmp/bytes bs=64k count=1 seek=1 conv=notrunc status=none")
    compare = "dd if=/dev/ublkb3 iflag=direct bs=1M count=4 status=none | cmp - /tmp/bytes"
    guest.check(compare)
    other = as_user("dd if=/dev/ublkb3 of=/dev/null bs=4k count=1", USER + 1)
    other = guest.run(f"chmod 666 /dev/ublkb3; {other} 2>&1; chmod 600 /dev/ublkb3")
    assert "not permitted" in other.out, other.out

    # A read that fails leaves its tag, the only one, in use.
    serve.rpc("bdev_malloc_create", "name=Malloc0", "num_blocks=2048", "block_size=512")
    serve.rpc("bdev_error_create", "base_name=Malloc0")
    serve.rpc("bdev_error_inject_error", "name=EE_Malloc0", "io_type=read", "error_type=failure", "num=1")
    assert serve.rpc("ublk_start_disk", "bdev_name=EE_Malloc0", "ublk_id=4", "queue_depth=1", "unprivileged=true") == 4
    read = "dd if=/dev/ublkb4 of=/dev/null iflag=direct bs=4k count=1"
    failed = guest.run(f"{read} 2>&1")
    assert failed.rc != 0 and "Input/output error" in failed.out, failed
    guest.check(read)
    assert serve.rpc("ublk_stop_disk", "ublk_id=4") is True
    serve.rpc("bdev_error_delete", "name=EE_Malloc0")
    serve.rpc("bdev_malloc_delete", "name=Malloc0")

    # A server that is killed under load takes the disk along, and the next one has its data.
    guest.check(f"ringbolt rpc -r {SOCKET} save_config > /tmp/ublk.json && chmod 644 /tmp/ublk.json")
    load = "dd if=/dev/zero of=/dev/ublkb3 oflag=direct bs=64k seek=256 count=64 2>/dev/null"
    load = guest.spawn(f"while {load}; do :; done; echo over")
    first = writes(serve, "Disk")
    guest.wait(lambda: writes(serve, "Disk") >= first + LOAD_WRITES, 60, f"{LOAD_WRITES} writes", poll=0.1)
    serve.kill()
    guest.until("[ ! -e /dev/ublkb3 ]", 60)
    load.expect("^over$", 60)
    serve = Serve(guest, "--config /tmp/ublk.json", unprivileged=True)
    assert serve.rpc("ublk_get_disks") == [found]
    guest.check(compare)

    # Root may mount it.
    guest.check("mkfs.ext4 -q /dev/ublkb3 && mkdir -p /tmp/ublk && mount /dev/ublkb3 /tmp/ublk", 60)
    guest.check(f"fio --name=verify --directory=/tmp/ublk --rw=randwrite --size=8m --numjobs=2 --fsync=16 {FIO}", 120)
    guest.check("umount /tmp/ublk && fsck.ext4 -fn /dev/ublkb3", 60)
    guest.check("kill -TERM $(cat /tmp/ublk.pid)")
    assert serve.job.wait(60).rc == 0, serve.job.out
    guest.check("[ ! -e /dev/ublkb3 ] && [ ! -e /dev/ublkc3 ]")
    guest.check("chmod 600 /dev/ublk-control; kill $(cat /tmp/uevent.pid)")
    rules.wait(30)
    guest.check("rm /tmp/ublk.disk /tmp/ublk.json /tmp/ublk.rule /tmp/bytes")


@case("ublk-pages", on=("ringbolt",), machine=NEWEST, seconds=60)
def ublk_pages(bench):
    """Reads and writes of a disk are operations on the kernel's own pages where bdev and kernel can: no copy, verified."""
    guest = bench.guest
    guest.check("[ -e /dev/ublk-control ] || { echo 'no module ublk_drv'; exit 1; }")
    guest.check("truncate -s 64M /tmp/ublk.disk && cat /proc/version")
    serve = Serve(guest)
    # Virtual devices pass the pages on.
    serve.rpc("bdev_uring_create", "name=Base", "filename=/tmp/ublk.disk", "block_size=4096")
    serve.rpc("bdev_passthru_create", "name=File", "base_bdev_name=Base")
    serve.rpc("bdev_uring_create", "name=Disk", "filename=/dev/nvme0n1")
    serve.rpc("bdev_malloc_create", "name=Malloc0", "num_blocks=32768", "block_size=512")
    serve.rpc("ublk_create_target")
    for number, name in enumerate(("File", "Disk", "Malloc0")):
        assert serve.rpc("ublk_start_disk", f"bdev_name={name}", f"ublk_id={number}", "num_queues=2") == number
    disks = {disk["bdev_name"]: disk.get("registered_pages", False) for disk in serve.rpc("ublk_get_disks")}
    assert disks == {"File": True, "Disk": True, "Malloc0": False}, disks
    for number in range(3):
        verify = f"fio --name=verify --filename=/dev/ublkb{number} --rw=randwrite {FIO.replace('4k-64k', '4k-1m')}"
        guest.check(f"{verify} --size=16m --output=/tmp/fio", 120)
    # What is written through the disk is in the file, and the reverse.
    guest.check("dd if=/dev/urandom of=/tmp/bytes bs=1M count=4 status=none")
    guest.check("dd if=/tmp/bytes of=/dev/ublkb0 oflag=direct bs=1M status=none && cmp -n 4194304 /tmp/bytes /tmp/ublk.disk")
    guest.check("dd if=/tmp/bytes of=/tmp/ublk.disk conv=notrunc seek=8 bs=1M status=none")
    guest.check("dd if=/dev/ublkb0 iflag=direct skip=8 bs=1M count=4 status=none | cmp - /tmp/bytes")
    # A killed server's disk is recovered, and by a bdev that takes no pages too: they are copied then.
    guest.check("mkfs.ext4 -q /dev/ublkb1 && mkdir -p /tmp/ublk && mount /dev/ublkb1 /tmp/ublk", 60)
    load = guest.spawn(f"fio --name=load --directory=/tmp/ublk --rw=randwrite --size=8m --numjobs=2 --fsync=8 {FIO} --loops=3")
    first = writes(serve, "Disk")
    guest.wait(lambda: writes(serve, "Disk") >= first + LOAD_WRITES, 60, f"{LOAD_WRITES} writes", poll=0.1)
    serve.kill()
    serve = Serve(guest)
    serve.rpc("bdev_uring_create", "name=Disk", "filename=/dev/nvme0n1")
    serve.rpc("bdev_uring_create", "name=Base", "filename=/tmp/ublk.disk", "block_size=4096")
    # It can change data, so that it needs the data.
    serve.rpc("bdev_error_create", "base_name=Base")
    serve.rpc("ublk_create_target")
    serve.rpc("ublk_recover_disk", "bdev_name=Disk", "ublk_id=1")
    serve.rpc("ublk_recover_disk", "bdev_name=EE_Base", "ublk_id=0")
    disks = {disk["bdev_name"]: disk.get("registered_pages", False) for disk in serve.rpc("ublk_get_disks")}
    assert disks == {"Disk": True, "EE_Base": False}, disks
    load.check(240)
    guest.check("umount /tmp/ublk && fsck.ext4 -fn /dev/ublkb1", 60)
    guest.check("dd if=/dev/ublkb0 iflag=direct skip=8 bs=1M count=4 status=none | cmp - /tmp/bytes")
    guest.check("kill -TERM $(cat /tmp/ublk.pid)")
    assert serve.job.wait(60).rc == 0, serve.job.out
    guest.check("rm /tmp/ublk.disk /tmp/bytes")
