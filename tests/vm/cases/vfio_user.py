"""A PCI device behind a UNIX socket: the guest's own NVMe driver, with QEMU as the client of the target."""

import os

from harness import qemu
from harness.case import case
from harness.guest import Guest
from harness.image import Image
from harness.targets import Namespace, Subsystem

CACHE = os.environ.get("RINGBOLT_VM_CACHE") or os.path.expanduser("~/.cache/ringbolt-vm")
MEMORY = "768M"


def listen(target, subsystem, folder):
    """Makes the target serve the subsystem in a folder; -> the socket."""
    if "VFIOUSER" not in [transport["trtype"] for transport in target.rpc("nvmf_get_transports")]:
        target.rpc("nvmf_create_transport", trtype="VFIOUSER")
    os.makedirs(folder, exist_ok=True)
    address = {"trtype": "VFIOUSER", "traddr": folder, "trsvcid": "0"}
    target.rpc("nvmf_subsystem_add_listener", nqn=subsystem.nqn, listen_address=address)
    return f"{folder}/cntrl"


def boot(bench, program, socket, name):
    """A guest of its own that has the device; to be closed."""
    folder = f"{bench.folder}/{name}"
    os.mkdir(folder)
    return Guest(Image(CACHE), folder, memory=MEMORY, program=program, more=qemu.device(socket, MEMORY))


def find(guest, subsystem):
    """The device of the subsystem's first namespace, once the guest's driver has it."""
    shown = f'for c in /sys/class/nvme/nvme*; do [ "$(cat $c/subsysnqn)" = {subsystem.nqn} ] && [ "$(cat $c/state)" = live ]'
    name = guest.until(shown + " && [ -b /dev/${c##*/}n1 ] && echo ${c##*/} && return 0; done; return 1", 60).strip()
    return name, f"/dev/{name}n1"


@case("vfio-user", on=("ringbolt",))
def vfio_user(bench):
    """A guest's PCI driver makes a file system, verifies data, resets the controller, and comes back after a reboot."""
    program = qemu.with_vfio_user(CACHE)
    subsystem = Subsystem("vfiouser", [Namespace(mib=256, block_size=512)])
    target = bench.serve(subsystem)
    socket = listen(target, subsystem, f"{bench.folder}/device")
    with boot(bench, program, socket, "first") as guest:
        controller, device = find(guest, subsystem)
        assert guest.check(f"cat /sys/class/nvme/{controller}/transport").strip() == "pcie"
        queues = int(guest.check(f"cat /sys/class/nvme/{controller}/queue_count"))
        assert queues == 3, f"{queues} queues, not the admin queue and one for each of two processors"
        vectors = int(guest.check("grep -c ' nvme[0-9]*q' /proc/interrupts"))
        assert vectors >= 2, f"{vectors} interrupts"
        guest.check("nvme id-ctrl /dev/" + controller + " | grep -q '^sgls *: 0x1'")
        guest.check(f"mkfs.ext4 -q {device} && mount -t ext4 {device} /mnt", 120)
        options = "--ioengine=libaio --direct=1 --bs=4k --iodepth=16 --size=16m --verify=crc32c --verify_fatal=1"
        guest.check(f"fio --name=verify --filename=/mnt/file --rw=randwrite --fallocate=none {options}", 240)
        guest.check("cp /mnt/file /mnt/copy && sync && echo 3 > /proc/sys/vm/drop_caches && cmp /mnt/file /mnt/copy", 120)
        # Large transfers: lists of pages, and pages that lie apart.
        guest.check("dd if=/dev/urandom of=/mnt/large bs=1M count=16 oflag=direct status=none", 120)
        guest.check(f"nvme reset /dev/{controller}", 60)
        sums = guest.check("sha256sum /mnt/file /mnt/large", 120)
        guest.check("umount /mnt", 60)
        guest.check(f"fsck.ext4 -fn {device}", 120)
        complaints = guest.check("dmesg | grep -iE 'nvme.*(timeout,|error|invalid|abort)|WARNING|BUG:' || true")
        assert not complaints, complaints
        assert len(target.controllers(subsystem)) == 1
    # The guest is gone without a word, as after a power cut; the next one finds everything.
    guest_gone = "the controller of a guest that has gone"
    bench.guest.wait(lambda: not target.controllers(subsystem), 30, f"end of {guest_gone}", poll=0.05)
    with boot(bench, program, socket, "second") as guest:
        _, device = find(guest, subsystem)
        guest.check(f"mount -t ext4 {device} /mnt", 60)
        assert guest.check("sha256sum /mnt/file /mnt/large", 120) == sums, "data has changed over a reboot"
        guest.check("umount /mnt", 60)
