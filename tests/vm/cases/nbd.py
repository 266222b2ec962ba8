"""`ringbolt serve` inside the guest, with a bdev as a block device of the kernel's NBD driver."""

import json

from harness.case import case

from .machines import PLAIN


def rpc(guest, method, *parameters):
    """Calls an RPC method; -> its result."""
    out = guest.check(f"ringbolt rpc -r /tmp/nbd.rpc {method} {' '.join(parameters)} 2> /tmp/errors || cat /tmp/errors", 60)
    try:
        return json.loads(out)
    except ValueError:
        raise AssertionError(f"{method}: {out}") from None


@case("nbd-disk", on=("ringbolt",), machine=PLAIN, provokes=r"nbd|block nbd|EXT4", seconds=20)
def nbd_disk(bench):
    """nbd_start_disk makes /dev/nbdN of a bdev: ext4 under fio verify, discard, stop; the kernel frees it at the end."""
    guest = bench.guest
    guest.check("[ -e /dev/nbd0 ] || { echo 'no module nbd'; exit 1; }")
    serve = guest.spawn("ringbolt serve -r /tmp/nbd.rpc 2>&1")
    guest.until("[ -S /tmp/nbd.rpc ]", 60)
    rpc(guest, "bdev_malloc_create", "name=Malloc0", "num_blocks=16384", "block_size=4096")
    rpc(guest, "bdev_malloc_create", "name=Malloc1", "num_blocks=2048", "block_size=512")
    device = rpc(guest, "nbd_start_disk", "bdev_name=Malloc0", "nbd_device=/dev/nbd1", "connections=2")
    assert device == "/dev/nbd1", device
    other = rpc(guest, "nbd_start_disk", "bdev_name=Malloc1")
    assert other != device, other
    disks = [(disk["bdev_name"], disk["nbd_device"]) for disk in rpc(guest, "nbd_get_disks")]
    assert disks == [("Malloc0", device), ("Malloc1", other)], disks
    assert rpc(guest, "nbd_export_get") == [], "disks are not exports"
    size = guest.check("cat /sys/block/nbd1/size /sys/block/nbd1/queue/logical_block_size").split()
    assert size == ["131072", "4096"], size
    taken = guest.run("ringbolt rpc -r /tmp/nbd.rpc nbd_start_disk bdev_name=Malloc1 nbd_device=/dev/nbd1 2>&1")
    assert taken.rc != 0 and "connected already" in taken.out, taken
    guest.check("mkfs.ext4 -q /dev/nbd1 && mkdir -p /tmp/nbd && mount /dev/nbd1 /tmp/nbd", 60)
    guest.check("fio --name=verify --directory=/tmp/nbd --rw=randwrite --bsrange=4k-64k --size=16m --ioengine=libaio "
                "--direct=1 --iodepth=16 --verify=crc32c --verify_fatal=1 --numjobs=2", 120)
    guest.check("umount /tmp/nbd && fsck.ext4 -fn /dev/nbd1", 60)
    guest.check(f"dd if=/dev/urandom of=/tmp/bytes bs=64k count=8 && dd if=/tmp/bytes of={other} oflag=direct bs=64k && "
                f"dd if={other} iflag=direct bs=64k count=8 | cmp - /tmp/bytes && blkdiscard {other}", 60)
    assert guest.check(f"dd if={other} bs=64k count=1 2> /dev/null | tr -d '\\000' | wc -c").strip() == "0"
    assert rpc(guest, "nbd_stop_disk", f"nbd_device={other}") is True
    guest.until(f"[ ! -e /sys/block/{other[5:]}/pid ]", 30)
    # A disk goes with its bdev, though it is idle.
    other = rpc(guest, "nbd_start_disk", "bdev_name=Malloc1")
    assert rpc(guest, "bdev_malloc_delete", "name=Malloc1") is True
    guest.until(f"[ ! -e /sys/block/{other[5:]}/pid ]", 30)
    assert [disk["nbd_device"] for disk in rpc(guest, "nbd_get_disks")] == [device]
    # The end of the process disconnects the rest.
    guest.check("killall -TERM ringbolt")
    assert serve.wait(60).rc == 0, serve.out
    guest.until("[ ! -e /sys/block/nbd1/pid ]", 30)
