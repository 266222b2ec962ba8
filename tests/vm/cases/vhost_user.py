"""vhost-user: the guest's virtio block driver, with QEMU as the client of the target."""

import os

from harness.case import case
from harness.guest import Guest
from harness.image import Image
from harness.targets import Namespace, Subsystem

CACHE = os.environ.get("RINGBOLT_VM_CACHE") or os.path.expanduser("~/.cache/ringbolt-vm")
MEMORY = "768M"
MIB = 1 << 20


def create(target, folder):
    """Makes a file a virtio disk; -> the path of the socket."""
    target.rpc("bdev_uring_create", name="Disk", filename=f"{folder}/disk", block_size=512)
    path = f"{folder}/vhost.sock"
    target.rpc("vhost_create_blk_controller", ctrlr=path, dev_name="Disk", packed_ring=True)
    return path


def boot(bench, socket, packed):
    """Boots a separate guest with the disk; to be closed by the caller."""
    folder = f"{bench.folder}/packed-{packed}"
    os.mkdir(folder)
    device = f"vhost-user-blk-pci,chardev=disk,num-queues=2,packed={packed}"
    more = [
        *("-object", f"memory-backend-memfd,id=shared,size={MEMORY},share=on"),
        *("-machine", "memory-backend=shared"),
        *("-chardev", f"socket,id=disk,path={socket},reconnect=1"),
        *("-device", device),
    ]
    return Guest(Image(CACHE), folder, memory=MEMORY, more=more)


@case("vhost-user-blk", on=("ringbolt",), seconds=60)
def vhost_user_blk(bench):
    """The guest's virtio driver uses split and packed rings: ext4 under fio verify, discard, a restart of the target."""
    target = bench.serve(Subsystem("vhost", [Namespace(mib=16, block_size=512)]))
    with open(f"{bench.folder}/disk", "wb") as file:
        file.truncate(128 * MIB)
    socket = create(target, bench.folder)
    for packed in ["off", "on"]:
        with boot(bench, socket, packed) as guest:
            guest.until("[ -b /dev/vda ]", 60)
            facts = guest.check("cat /sys/block/vda/size /sys/block/vda/serial && echo && ls /sys/block/vda/mq | wc -l").split()
            assert facts == [str(128 * MIB // 512), "Disk", "2"], facts
            guest.check("mkfs.ext4 -q /dev/vda && mount -t ext4 -o discard /dev/vda /mnt", 120)
            options = "--ioengine=libaio --direct=1 --bsrange=4k-256k --iodepth=16 --size=16m --verify=crc32c --verify_fatal=1"
            guest.check(f"fio --name=verify --directory=/mnt --rw=randwrite --fallocate=none --numjobs=2 {options}", 240)
            if packed == "off":
                # QEMU waits for the target and connects again; nothing is in flight.
                guest.check("sync")
                target.kill()
                target.launch()
                assert create(target, bench.folder) == socket
            sums = guest.check("sha256sum /mnt/verify*", 120)
            guest.check("sync && echo 3 > /proc/sys/vm/drop_caches", 60)
            assert guest.check("sha256sum /mnt/verify*", 120) == sums
            guest.check("rm /mnt/verify* && sync && umount /mnt && fsck.ext4 -fn /dev/vda", 120)
            guest.check("blkdiscard /dev/vda")
            assert guest.check("dd if=/dev/vda bs=1M count=4 status=none | tr -d '\\000' | wc -c").strip() == "0"
            log = guest.check("dmesg | grep -iE 'virtio.*(error|fail)|I/O error|WARNING|BUG:' || true")
            assert not log, log
    gone = lambda: target.rpc("vhost_get_controllers")[0]["connections"] == 0  # noqa: E731
    bench.guest.wait(gone, 30, "end of the connection of a guest that has gone", poll=0.05)
    assert os.stat(f"{bench.folder}/disk").st_blocks * 512 < 16 * MIB, "the discard reached the file"
