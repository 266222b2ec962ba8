"""vfio-user: the guest's PCI NVMe driver, with QEMU as the client of the target."""

import os

from harness import qemu
from harness.case import case
from harness.guest import Guest
from harness.image import Image
from harness.targets import Namespace, Subsystem

CACHE = os.environ.get("RINGBOLT_VM_CACHE") or os.path.expanduser("~/.cache/ringbolt-vm")
MEMORY = "768M"


def listen(target, subsystem, folder):
    """Adds a vfio-user listener to the subsystem; -> the path of the socket."""
    if "VFIOUSER" not in [transport["trtype"] for transport in target.rpc("nvmf_get_transports")]:
        target.rpc("nvmf_create_transport", trtype="VFIOUSER")
    os.makedirs(folder, exist_ok=True)
    address = {"trtype": "VFIOUSER", "traddr": folder, "trsvcid": "0"}
    target.rpc("nvmf_subsystem_add_listener", nqn=subsystem.nqn, listen_address=address)
    return f"{folder}/cntrl"


def boot(bench, program, socket, name):
    """Boots a separate guest with the device; to be closed by the caller."""
    folder = f"{bench.folder}/{name}"
    os.mkdir(folder)
    return Guest(Image(CACHE), folder, memory=MEMORY, program=program, more=qemu.device(socket, MEMORY))


def find(guest, subsystem):
    """Waits for the controller and its first namespace in the guest; -> (controller, device path)."""
    shown = f'for c in /sys/class/nvme/nvme*; do [ "$(cat $c/subsysnqn)" = {subsystem.nqn} ] && [ "$(cat $c/state)" = live ]'
    name = guest.until(shown + " && [ -b /dev/${c##*/}n1 ] && echo ${c##*/} && return 0; done; return 1", 60).strip()
    return name, f"/dev/{name}n1"


@case("vfio-user", on=("ringbolt",), seconds=60)
def vfio_user(bench):
    """The guest's PCI driver runs a file system and verified I/O, resets the controller, and survives a reboot."""
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
        # Large transfers: PRP lists and scattered pages.
        guest.check("dd if=/dev/urandom of=/mnt/large bs=1M count=16 oflag=direct status=none", 120)
        guest.check(f"nvme reset /dev/{controller}", 60)
        sums = guest.check("sha256sum /mnt/file /mnt/large", 120)
        guest.check("umount /mnt", 60)
        guest.check(f"fsck.ext4 -fn {device}", 120)
        log_errors = guest.check("dmesg | grep -iE 'nvme.*(timeout,|error|invalid|abort)|WARNING|[^a-z]BUG:' || true")
        assert not log_errors, log_errors
        assert len(target.controllers(subsystem)) == 1
    # The guest ended without a shutdown, as in a power loss; the next one finds all data.
    guest_gone = "the controller of a guest that has gone"
    bench.guest.wait(lambda: not target.controllers(subsystem), 30, f"end of {guest_gone}", poll=0.05)
    with boot(bench, program, socket, "second") as guest:
        _, device = find(guest, subsystem)
        guest.check(f"mount -t ext4 {device} /mnt", 60)
        assert guest.check("sha256sum /mnt/file /mnt/large", 120) == sums, "data has changed over a reboot"
        guest.check("umount /mnt", 60)
