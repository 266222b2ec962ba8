"""`ringbolt serve` inside the guest, with bdevs as block devices of the kernel's ublk driver."""

import json

from harness.case import case

from .machines import NO_IOMMU

SOCKET = "/tmp/ublk.rpc"
# Writes of the slow disk that show that a load is running.
LOAD_WRITES = 50
FIO = "--ioengine=libaio --direct=1 --bsrange=4k-64k --iodepth=8 --verify=crc32c --verify_fatal=1"


class Serve:
    """`ringbolt serve` in the guest, with both CPUs."""

    def __init__(self, guest, config=""):
        self.guest, self.config = guest, config
        self.launch()

    def launch(self):
        self.guest.check(f"rm -f {SOCKET}")
        command = f"exec ringbolt serve --cores 0,1 -r {SOCKET} {self.config}"
        self.job = self.guest.spawn(f"echo $$ > /tmp/ublk.pid; {command} 2>&1")
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
        statistics = {one["name"]: one for one in serve.rpc("bdev_get_iostat")["bdevs"]}
        return statistics["Slow"]["num_write_ops"] >= LOAD_WRITES

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
