"""vhost-user: the guest's virtio block and SCSI drivers, with QEMU as the client of the target."""

import os

from harness import qemu
from harness.case import case
from harness.guest import Guest
from harness.image import Image
from harness.targets import Namespace, Subsystem

CACHE = os.environ.get("RINGBOLT_VM_CACHE") or os.path.expanduser("~/.cache/ringbolt-vm")
MEMORY = "768M"
MIB = 1 << 20
# Microseconds that a read or write of the slow disk takes.
SLOW_US = 20000
# How often the target is killed in each guest.
KILLS = 3


def create(target, folder):
    """Makes two files virtio disks, the second one slow, so that requests are in flight at any time of a load; -> sockets."""
    for name in ("Disk", "Base"):
        target.rpc("bdev_uring_create", name=name, filename=f"{folder}/{name}", block_size=512)
    latencies = {f"{kind}_{what}_latency": SLOW_US for kind in ("avg", "p99") for what in ("read", "write")}
    target.rpc("bdev_delay_create", name="Slow", base_bdev_name="Base", **latencies)
    sockets = {name: f"{folder}/{name}.sock" for name in ("Disk", "Slow")}
    for name, path in sockets.items():
        target.rpc("vhost_create_blk_controller", ctrlr=path, dev_name=name, packed_ring=True)
    return sockets


def hardware(sockets, packed, options=",reconnect=1"):
    """QEMU options for the disks, in a guest whose memory the target can map."""
    more = [
        *("-object", f"memory-backend-memfd,id=shared,size={MEMORY},share=on"),
        *("-machine", "memory-backend=shared"),
    ]
    for name, path in sockets.items():
        more += ["-chardev", f"socket,id={name},path={path}{options}"]
        more += ["-device", f"vhost-user-blk-pci,chardev={name},num-queues=2,packed={packed}"]
    return more


def boot(bench, sockets, packed):
    """Boots a separate guest with the disks; to be closed by the caller."""
    folder = f"{bench.folder}/packed-{packed}"
    os.mkdir(folder)
    return Guest(Image(CACHE), folder, memory=MEMORY, more=hardware(sockets, packed))


def check_cores(target, first=0):
    """The request queues of a session, from index `first` on, are on as many reactors as there are, at most one each."""
    reactors = len(target.rpc("framework_get_reactors")["reactors"])
    sessions = [session for one in target.rpc("vhost_get_controllers") for session in one["sessions"]]
    assert sessions
    for session in sessions:
        queues = [queue for queue in session["virtqueues"] if queue["index"] >= first]
        assert [queue["index"] for queue in queues] == [first, first + 1], queues
        assert len({queue["lcore"] for queue in queues}) == min(reactors, 2), queues


def kill_under_load(bench, target, guest, disk, create):
    """Kills the target with requests in flight and starts it again, several times; fio verifies what it has written."""
    options = "--ioengine=libaio --direct=1 --rw=randrw --bsrange=4k-64k --iodepth=16 --size=8m --verify=crc32c --verify_fatal=1"
    load = f"fio --name=load --filename=/dev/{disk} --numjobs=2 --offset_increment=16m {options}"
    rounds = guest.spawn(f"while [ ! -e /tmp/stop ]; do {load} || exit 1; echo round; done; echo stopped")
    for _ in range(KILLS):

        def is_under_load():
            statistics = target.rpc("bdev_get_iostat", names=["Slow"])["bdevs"][0]
            return statistics["num_write_ops"] >= 50

        guest.wait(is_under_load, 60, "50 writes", poll=0.02)
        target.kill()
        target.launch()
        create(target, bench.folder)
    rounds.expect("^round$", 240)
    guest.check("touch /tmp/stop")
    rounds.expect("^stopped$", 240)
    rounds.check()
    guest.check("rm /tmp/stop")


def reset_under_load(guest, disk):
    """LOGICAL UNIT RESET ends the commands of all virtqueues, and the guest submits them again; fio verifies what it writes."""
    options = "--rw=randwrite --ioengine=libaio --direct=1 --bs=4k --iodepth=8 --size=2m --verify=crc32c --verify_fatal=1"
    load = f"fio --name=reset --filename=/dev/{disk} --numjobs=2 --offset_increment=16m {options}"
    resets = f"for round in 1 2 3 4 5; do sg_reset -d /dev/{disk} || exit 1; done"
    guest.check(f"{load} & {resets}; wait $!", 240)


def resize(bench, target, guest, mib):
    """The guest learns of a resize, and uses the new blocks."""
    os.truncate(f"{bench.folder}/Disk", mib * MIB)
    target.rpc("bdev_uring_rescan", name="Disk")
    guest.until(f"[ $(cat /sys/block/vda/size) = {mib * MIB // 512} ]", 30)
    guest.check(f"dd if=/dev/vda of=/dev/null bs=1M skip={mib - 1} count=1 iflag=direct status=none")


@case("vhost-user-blk", on=("ringbolt",), seconds=120)
def vhost_user_blk(bench):
    """The guest's virtio driver uses split and packed rings: ext4 under fio verify, discard, resize, kills under load."""
    # Two reactors, which sleep when they are idle: a virtqueue each.
    cores = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:2])
    target = bench.serve(Subsystem("vhost", [Namespace(mib=16, block_size=512)]), options=("--cores", cores))
    for name, mib in (("Disk", 128), ("Base", 32)):
        with open(f"{bench.folder}/{name}", "wb") as file:
            file.truncate(mib * MIB)
    sockets = create(target, bench.folder)
    for packed, mib in (("off", 128), ("on", 160)):
        with boot(bench, sockets, packed) as guest:
            guest.until("[ -b /dev/vda ] && [ -b /dev/vdb ]", 60)
            facts = guest.check("cat /sys/block/vda/size /sys/block/vda/serial && echo && ls /sys/block/vda/mq | wc -l").split()
            assert facts == [str(mib * MIB // 512), "Disk", "2"], facts
            check_cores(target)
            guest.check("mkfs.ext4 -q /dev/vda && mount -t ext4 -o discard /dev/vda /mnt", 120)
            options = "--ioengine=libaio --direct=1 --bsrange=4k-256k --iodepth=16 --size=16m --verify=crc32c --verify_fatal=1"
            guest.check(f"fio --name=verify --directory=/mnt --rw=randwrite --fallocate=none --numjobs=2 {options}", 240)
            kill_under_load(bench, target, guest, "vdb", create)
            sums = guest.check("sha256sum /mnt/verify*", 120)
            guest.check("sync && echo 3 > /proc/sys/vm/drop_caches", 60)
            assert guest.check("sha256sum /mnt/verify*", 120) == sums
            guest.check("rm /mnt/verify* && sync && umount /mnt && fsck.ext4 -fn /dev/vda", 120)
            resize(bench, target, guest, mib + 32)
            guest.check("blkdiscard /dev/vda")
            assert guest.check("dd if=/dev/vda bs=1M count=4 status=none | tr -d '\\000' | wc -c").strip() == "0"
            log = guest.check("dmesg | grep -iE 'virtio.*(error|fail)|I/O error|WARNING|[^a-z]BUG:' || true")
            assert not log, log

    def are_gone():
        return all(one["sessions"] == [] for one in target.rpc("vhost_get_controllers"))

    bench.guest.wait(are_gone, 30, "end of the connections of a guest that has gone", poll=0.05)
    assert os.stat(f"{bench.folder}/Disk").st_blocks * 512 < 16 * MIB, "the discard reached the file"


def migrate(source, folder, more, meanwhile):
    """Moves a guest to another QEMU with the same hardware while its load runs; -> the destination, to be closed by the
    caller. The virtqueues are served through several passes over the memory, whose pages the target marks as written. After
    them `meanwhile` is called."""
    incoming = f"unix:{folder}/migration"
    os.mkdir(f"{folder}/destination")
    image = Image(CACHE)
    destination = Guest(image, f"{folder}/destination", memory=MEMORY, more=more, program=source.program, incoming=incoming)
    try:
        # So slow that the first pass does not end before the load has written to pages that were sent.
        source.qmp("migrate-set-parameters", **{"max-bandwidth": 32 * MIB, "downtime-limit": 1})
        source.qmp("migrate", uri=incoming)

        def status():
            now = source.qmp("query-migrate")
            assert now["status"] not in ("failed", "cancelled"), now
            return now

        def has_passes():
            assert (now := status())["status"] != "completed", now
            return now.get("ram", {}).get("dirty-sync-count", 0) >= 4

        source.wait(has_passes, 90, "four passes of the migration", poll=0.1)
        meanwhile()
        source.qmp("migrate-set-parameters", **{"max-bandwidth": 1024 * MIB, "downtime-limit": 2000})
        source.wait(lambda: status()["status"] == "completed", 60, "end of the migration", poll=0.05)
        destination.wait(lambda: destination.qmp("query-status")["status"] == "running", 30, "guest", poll=0.05)
    except BaseException:
        destination.close()
        raise
    return destination


@case("vhost-user-migrate", on=("ringbolt",), seconds=60)
def vhost_user_migrate(bench):
    """A Linux guest moves to another QEMU while fio writes and verifies its vhost-user disk: no error, no wrong block, and
    what the target has written to pages that were sent is there."""
    target = bench.serve(Subsystem("vhost", [Namespace(mib=16, block_size=512)]))
    with open(f"{bench.folder}/Disk", "wb") as file:
        file.truncate(64 * MIB)
    target.rpc("bdev_uring_create", name="Disk", filename=f"{bench.folder}/Disk", block_size=512)
    path = f"{bench.folder}/Disk.sock"
    target.rpc("vhost_create_blk_controller", ctrlr=path, dev_name="Disk", packed_ring=True)
    more = hardware({"Disk": path}, "on", options="")
    os.mkdir(f"{bench.folder}/source")
    source = Guest(Image(CACHE), f"{bench.folder}/source", memory=MEMORY, more=more, program=bench.guest.program)
    with source:
        source.until("[ -b /dev/vda ]", 60)
        source.check("mkfs.ext4 -q /dev/vda && mount -t ext4 /dev/vda /mnt", 120)
        options = "--ioengine=libaio --direct=1 --rw=randwrite --bsrange=4k-64k --iodepth=16 --size=8m --verify=crc32c --verify_fatal=1"
        load = source.spawn(
            f"while [ ! -e /tmp/stop ]; do fio --name=load --directory=/mnt --numjobs=2 {options} || exit 1; echo round; done;"
            " echo stopped"
        )
        load.expect("^round$", 120)
        # The two halves of a file, read into one buffer. When the second one is, the buffer's pages have been sent, and only
        # the target writes them: they are sent again because it has marked them. Its sum is made at the destination.
        source.check("dd if=/dev/urandom of=/mnt/halves bs=8M count=2 status=none && sync && mkfifo /tmp/second /tmp/moved", 60)
        expected = source.check(f"tail -c {8 * MIB} /mnt/halves | sha256sum", 60)
        skip, begin = ("dd bs=64k iflag=fullblock status=none count=" + count for count in ("128 of=/dev/null", "1 of=/tmp/begin"))
        reader = source.spawn(
            "dd if=/mnt/halves iflag=direct bs=8M count=2 status=none |"
            f" (cat /tmp/second; {skip}; {begin}; echo read; cat /tmp/moved; cat /tmp/begin - | sha256sum)"
        )

        def read_second():
            source.check("echo > /tmp/second")
            reader.expect("^read$", 60)

        with migrate(source, bench.folder, more, read_second) as guest:
            adopted = guest.adopt(source)
            moved = adopted[load]
            guest.check("echo > /tmp/moved")
            got = adopted[reader].check(60).split()[1:]
            assert got == expected.split(), (got, expected)
            started = sorted(one["started"] for one in target.rpc("vhost_get_controllers")[0]["sessions"])
            assert started == [False, True], started
            for _ in range(2):
                moved.expect("^round$", 120)
            guest.check("touch /tmp/stop")
            moved.expect("^stopped$", 120)
            moved.check()
            guest.check("umount /mnt && fsck.ext4 -fn /dev/vda", 120)
            log = guest.check("dmesg | grep -iE 'virtio.*(error|fail)|I/O error|WARNING|[^a-z]BUG:' || true")
            assert not log, log


def create_scsi(target, folder):
    """Makes two files targets 0 and 5 of a SCSI controller, the second one slow; -> socket."""
    for name in ("Disk", "Base"):
        target.rpc("bdev_uring_create", name=name, filename=f"{folder}/{name}", block_size=512)
    latencies = {f"{kind}_{what}_latency": SLOW_US for kind in ("avg", "p99") for what in ("read", "write")}
    target.rpc("bdev_delay_create", name="Slow", base_bdev_name="Base", **latencies)
    path = f"{folder}/scsi.sock"
    target.rpc("vhost_create_scsi_controller", ctrlr=path, delay=True)
    assert target.rpc("vhost_scsi_controller_add_target", ctrlr=path, scsi_target_num=-1, bdev_name="Disk") == 0
    assert target.rpc("vhost_scsi_controller_add_target", ctrlr=path, scsi_target_num=5, bdev_name="Slow") == 5
    target.rpc("vhost_start_scsi_controller", ctrlr=path)
    return path


def boot_scsi(bench, path):
    """Boots a separate guest with the SCSI host; to be closed by the caller."""
    folder = f"{bench.folder}/guest"
    os.mkdir(folder)
    more = [
        *("-object", f"memory-backend-memfd,id=shared,size={MEMORY},share=on"),
        *("-machine", "memory-backend=shared"),
        *("-chardev", f"socket,id=scsi,path={path},reconnect-ms=1000"),
        *("-device", "vhost-user-scsi-pci,chardev=scsi,num_queues=2"),
    ]
    # Older releases, as 7.2, do not reconnect this device.
    return Guest(Image(CACHE), folder, memory=MEMORY, more=more, program=qemu.with_vfio_user(CACHE))


def disk_of(guest, number):
    """The name of a target's disk in the guest, once it is there."""
    guest.until(f"ls /sys/class/scsi_disk/*:0:{number}:0/device/block", 60)
    return guest.check(f"ls /sys/class/scsi_disk/*:0:{number}:0/device/block").strip()


@case("vhost-user-scsi", on=("ringbolt",), seconds=120)
def vhost_user_scsi(bench):
    """The guest's virtio_scsi: ext4 under fio verify, UNMAP, targets that come and go, a resize, resets and kills under load."""
    # Two reactors, a request queue each.
    cores = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:2])
    target = bench.serve(Subsystem("vhost", [Namespace(mib=16, block_size=512)]), options=("--cores", cores))
    for name, mib in (("Disk", 128), ("Base", 32), ("Added", 16)):
        with open(f"{bench.folder}/{name}", "wb") as file:
            file.truncate(mib * MIB)
    path = create_scsi(target, bench.folder)
    with boot_scsi(bench, path) as guest:
        disk, slow = disk_of(guest, 0), disk_of(guest, 5)
        assert guest.check(f"cat /sys/block/{disk}/size").strip() == str(128 * MIB // 512)
        check_cores(target, first=2)
        guest.check(f"mkfs.ext4 -q /dev/{disk} && mount -t ext4 -o discard /dev/{disk} /mnt", 120)
        options = "--ioengine=libaio --direct=1 --bsrange=4k-256k --iodepth=16 --size=16m --verify=crc32c --verify_fatal=1"
        guest.check(f"fio --name=verify --directory=/mnt --rw=randwrite --fallocate=none --numjobs=2 {options}", 240)
        reset_under_load(guest, slow)
        kill_under_load(bench, target, guest, slow, create_scsi)
        sums = guest.check("sha256sum /mnt/verify*", 120)
        guest.check("sync && echo 3 > /proc/sys/vm/drop_caches", 60)
        assert guest.check("sha256sum /mnt/verify*", 120) == sums
        guest.check(f"rm /mnt/verify* && sync && umount /mnt && fsck.ext4 -fn /dev/{disk}", 120)
        target.rpc("bdev_uring_create", name="Added", filename=f"{bench.folder}/Added", block_size=512)
        target.rpc("vhost_scsi_controller_add_target", ctrlr=path, scsi_target_num=3, bdev_name="Added")
        added = disk_of(guest, 3)
        load = "--rw=randwrite --ioengine=libaio --direct=1 --bs=4k --iodepth=8 --size=8m --verify=crc32c --verify_fatal=1"
        guest.check(f"fio --name=added --filename=/dev/{added} {load}", 120)
        target.rpc("vhost_scsi_controller_remove_target", ctrlr=path, scsi_target_num=3)
        guest.until(f"[ ! -e /sys/block/{added} ]", 30)
        os.truncate(f"{bench.folder}/Disk", 160 * MIB)
        target.rpc("bdev_uring_rescan", name="Disk")
        guest.until(f"[ $(cat /sys/block/{disk}/size) = {160 * MIB // 512} ]", 30)
        guest.check(f"dd if=/dev/{disk} of=/dev/null bs=1M skip=159 count=1 iflag=direct status=none")
        guest.check(f"blkdiscard /dev/{disk}")
        assert guest.check(f"dd if=/dev/{disk} bs=1M count=4 status=none | tr -d '\\000' | wc -c").strip() == "0"
        log = guest.check("dmesg | grep -iE 'virtio.*(error|fail)|I/O error|WARNING|[^a-z]BUG:' || true")
        assert not log, log
    assert os.stat(f"{bench.folder}/Disk").st_blocks * 512 < 16 * MIB, "the discard reached the file"
