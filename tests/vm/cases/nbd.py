"""Bdevs as block devices of the kernel's NBD driver (of `ringbolt serve` inside the guest, and of nbd-client), and of QEMU."""

import json
import os
import re

from harness import qemu
from harness.case import case
from harness.guest import Guest
from harness.image import Image
from harness.targets import Namespace, Subsystem

from .machines import PLAIN

CACHE = os.environ.get("RINGBOLT_VM_CACHE") or os.path.expanduser("~/.cache/ringbolt-vm")


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


# The host as the guest reaches it.
HOST = "10.0.2.2"


@case("nbd-client", on=("ringbolt",), machine=PLAIN, provokes=r"nbd|block nbd|EXT4", seconds=20)
def nbd_client(bench):
    """The reference client attaches exports over TCP, with two connections: ext4 under fio verify, discard, read-only."""
    guest = bench.guest
    guest.check("[ -e /dev/nbd3 ] || { echo 'no module nbd'; exit 1; }")
    target = bench.serve(Subsystem("nbd", [Namespace(mib=16, block_size=512)]))
    target.rpc("bdev_malloc_create", name="Disk", num_blocks=16384, block_size=4096)

    def attach(name, options="", **parameters):
        uri = target.rpc("nbd_export_create", bdev_name="Disk", name=name, port=0, **parameters)
        port = re.fullmatch(rf"nbd://127\.0\.0\.1:(\d+)/{name}", uri).group(1)
        guest.check(f"nbd-client {HOST} {port} /dev/nbd3 -N {name} {options}", 60)

    def detach(name):
        guest.check("nbd-client -d /dev/nbd3", 30)
        guest.until("[ ! -e /sys/block/nbd3/pid ]", 30)
        target.rpc("nbd_export_delete", name=name)

    attach("disk", "-C 2 -b 4096")
    assert target.rpc("nbd_export_get", name="disk")[0]["connections"] == 2
    assert guest.check("cat /sys/block/nbd3/size /sys/block/nbd3/ro").split() == ["131072", "0"]
    guest.check("mkfs.ext4 -q /dev/nbd3 && mkdir -p /tmp/nbd && mount /dev/nbd3 /tmp/nbd", 60)
    guest.check(f"fio --name=verify --directory=/tmp/nbd --rw=randwrite --size=8m --numjobs=2 --fsync=16 {FIO}", 120)
    guest.check("umount /tmp/nbd && fsck.ext4 -fn /dev/nbd3", 60)
    guest.check("dd if=/dev/urandom of=/dev/nbd3 oflag=direct bs=64k count=4 && blkdiscard /dev/nbd3", 60)
    assert guest.check("dd if=/dev/nbd3 bs=64k count=4 2> /dev/null | tr -d '\\000' | wc -c").strip() == "0"
    detach("disk")
    attach("fixed", read_only=True)
    assert guest.check("cat /sys/block/nbd3/ro").strip() == "1"
    assert guest.run("dd if=/dev/zero of=/dev/nbd3 oflag=direct bs=4k count=1 2>&1").rc != 0
    detach("fixed")


FIO = "--ioengine=libaio --direct=1 --bsrange=4k-64k --iodepth=8 --verify=crc32c --verify_fatal=1"


@case("nbd-recovery", on=("ringbolt",), machine=PLAIN, provokes=r"nbd|block nbd|EXT4", seconds=120)
def nbd_recovery(bench):
    """A disk waits while its killed server is gone, and goes on with the next one: ext4 under fio verify, no I/O error."""
    guest = bench.guest
    guest.check("truncate -s 48M /tmp/nbd.disk")

    def launch(config=""):
        guest.check("rm -f /tmp/nbd.rpc")
        job = guest.spawn(f"echo $$ > /tmp/nbd.pid; exec ringbolt serve -r /tmp/nbd.rpc {config} 2>&1")
        guest.until("ringbolt rpc -r /tmp/nbd.rpc spdk_get_version", 60)
        return job

    serve = launch()
    rpc(guest, "bdev_uring_create", "name=Disk", "filename=/tmp/nbd.disk", "block_size=512")
    rpc(guest, "bdev_malloc_create", "name=Malloc0", "num_blocks=2048", "block_size=512")
    start = ("nbd_start_disk", "bdev_name=Disk", "nbd_device=/dev/nbd2", "connections=2", "reconnect_timeout_s=300")
    assert rpc(guest, *start) == "/dev/nbd2"
    disks = [{"bdev_name": "Disk", "nbd_device": "/dev/nbd2", "connections": 2, "reconnect_timeout_s": 300}]
    assert rpc(guest, "nbd_get_disks") == disks
    guest.check("ringbolt rpc -r /tmp/nbd.rpc save_config > /tmp/nbd.json")
    guest.check("mkfs.ext4 -q /dev/nbd2 && mkdir -p /tmp/nbd && mount /dev/nbd2 /tmp/nbd", 60)
    load = f"fio --name=load --directory=/tmp/nbd --rw=randwrite --size=4m --numjobs=2 --fsync=8 {FIO}"
    rounds = guest.spawn(f"while [ ! -e /tmp/stop ]; do {load} || exit 1; echo round; done; echo stopped")

    def is_under_load():
        statistics = {one["name"]: one for one in rpc(guest, "bdev_get_iostat")["bdevs"]}
        return statistics["Disk"]["num_write_ops"] >= 50

    for _ in range(2):
        guest.wait(is_under_load, 120, "50 writes", poll=0.1)
        guest.check("kill -KILL $(cat /tmp/nbd.pid)")
        serve.wait(30)
        serve = launch("--config /tmp/nbd.json")
        assert rpc(guest, "nbd_get_disks") == disks
    # While it is served, it is no other's.
    taken = guest.run("ringbolt rpc -r /tmp/nbd.rpc nbd_start_disk bdev_name=Malloc0 nbd_device=/dev/nbd2 2>&1")
    assert taken.rc != 0 and "connected already" in taken.out, taken
    # Requests that were in flight are sent again by the kernel's timer of 30 s.
    guest.wait(is_under_load, 120, "50 writes", poll=0.1)
    rounds.expect("^round$", 240)
    guest.check("touch /tmp/stop")
    rounds.expect("^stopped$", 240)
    rounds.check()
    guest.check("rm /tmp/stop; umount /tmp/nbd && fsck.ext4 -fn /dev/nbd2", 60)
    assert rpc(guest, "nbd_stop_disk", "nbd_device=/dev/nbd2") is True
    guest.until("[ ! -e /sys/block/nbd2/pid ]", 30)
    guest.check("kill -TERM $(cat /tmp/nbd.pid)")
    assert serve.wait(60).rc == 0, serve.out
    guest.check("rm /tmp/nbd.disk /tmp/nbd.json")


@case("nbd-qemu", on=("ringbolt",), seconds=30)
def nbd_qemu(bench):
    """QEMU is the client, with extended headers: ext4 under fio verify, and a trim of 6 GiB."""
    target = bench.serve(Subsystem("nbd", [Namespace(mib=16, block_size=512)]))
    disk = f"{bench.folder}/disk"
    with open(disk, "wb") as file:
        file.truncate(6 << 30)
    target.rpc("bdev_uring_create", name="Disk", filename=disk, block_size=512)
    uri = target.rpc("nbd_export_create", bdev_name="Disk", path=f"{bench.folder}/nbd.sock")
    drive = f"if=none,id=disk,format=raw,cache=none,discard=unmap,file={uri}"
    folder = f"{bench.folder}/guest"
    os.mkdir(folder)
    # QEMU has extended headers since 8.2.
    program, more = qemu.with_vfio_user(CACHE), ["-drive", drive, "-device", "virtio-blk-pci,drive=disk"]
    with Guest(Image(CACHE), folder, program=program, more=more) as guest:
        guest.until("[ -b /dev/vda ]", 60)
        assert guest.check("cat /sys/block/vda/size").strip() == str(6 << 21)
        # Without discards: what is written then is all that the file has.
        guest.check("mkfs.ext4 -q -E nodiscard /dev/vda && mount -t ext4 /dev/vda /mnt", 120)
        options = "--ioengine=libaio --direct=1 --bsrange=4k-256k --iodepth=16 --size=16m --verify=crc32c --verify_fatal=1"
        guest.check(f"fio --name=verify --directory=/mnt --rw=randwrite --fallocate=none {options}", 240)
        guest.check("umount /mnt && fsck.ext4 -fn /dev/vda", 120)
        assert os.stat(disk).st_blocks * 512 >= 16 << 20, "the writes reached the file"
        guest.check("blkdiscard /dev/vda", 60)
        assert os.stat(disk).st_blocks * 512 < 1 << 20, "a discard of the whole disk frees its space"
