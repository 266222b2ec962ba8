"""Instructions and system calls an I/O, of the kernel's ways to a device and of our driver: counted, not timed.

The same emulated controller, 4 KiB random reads, at queue depth 1 and at one that keeps the device
busy. What a run of twice as many I/Os takes more than a run of so many is what the I/Os took: in
user space, in the kernel, and in system calls. Time means nothing in such a guest; instructions do,
but of whoever polls: they are as many as the emulated device is slow, and the kernel's clock ticks
meanwhile. What must hold is therefore said in system calls.
"""

from harness.case import case
from harness.machine import Machine, Nvme, bound, function_of, serial

COUNTED = Machine(nvme=(Nvme(mib=64, block_size=4096),), hugepages=32, counted=True)
IOS = 2000
# A thread that polls for submissions takes turns with its submitter on the one processor there is.
IOS_POLLED = 200
BUSY = 32
# Name -> options of `perf`, for depth 1 and for a busy device.
KERNEL = {
    "psync": ("--ioengine=psync", None),
    "libaio": ("--ioengine=libaio", "--ioengine=libaio"),
    "iou": ("--ioengine=io_uring", "--ioengine=io_uring"),
    "iou-c": ("--ioengine=io_uring --hipri=1", "--ioengine=io_uring --hipri=1"),
    "iou-s": ("--ioengine=io_uring --sqthread_poll=1", "--ioengine=io_uring --sqthread_poll=1"),
}


@case("instructions", on=("ringbolt",), machine=COUNTED)
def instructions(bench):
    """Instructions and system calls per 4 KiB read: our driver makes none."""
    guest = bench.guest
    # Once more with a queue that is polled; it has none unless it is told so.
    guest.check("echo 1 > /sys/module/nvme/parameters/poll_queues")
    guest.check("echo 1 > /sys/class/nvme/nvme0/reset_controller", 30)
    address = function_of(guest, serial(0))
    device = "/dev/" + guest.until(f"cd /sys/bus/pci/devices/{address}/nvme/nvme*/ && ls -d nvme*n1").strip()
    counts = {}
    for name, ways in KERNEL.items():
        for depth, options in zip((1, BUSY), ways, strict=True):
            if options:
                ios = IOS_POLLED if name == "iou-s" else IOS
                counts[name, depth] = each(guest, f"--filename={device} --direct=1 {options}", depth, ios)
    with bound(bench, address, "uio_pci_generic"):
        for depth in (1, BUSY):
            uri = f"'--filename=nvme+pcie://{address}?ns=1'"
            counts["ringbolt", depth] = each(guest, f"{uri} --idle=spin", depth, IOS)
    print("# per 4 KiB read: instructions in user mode, in kernel mode, system calls")
    for (name, depth), (user, kernel, calls) in counts.items():
        print(f"#   {name:<9} QD {depth:<3} {user:>8.0f} {kernel:>8.0f} {calls:>6.2f}", flush=True)
    for depth in (1, BUSY):
        calls = counts["ringbolt", depth][2]
        assert abs(calls) < 0.1, f"{calls:.2f} system calls for each I/O of a driver in user space"
    # That calls are counted at all, the ways show that cannot do without.
    for name, least in (("psync", 1), ("libaio", 1.9)):
        calls = counts[name, 1][2]
        assert least * 0.95 < calls, f"{calls:.2f} system calls for each I/O by {name}"


def each(guest, options, depth, ios):
    """-> (user, kernel, calls): instructions and system calls of one I/O."""
    perf = f"ringbolt perf {options} --rw=randread --bs=4k --iodepth={depth} --size=32m --eta=never"
    before = guest.counted()
    guest.check(f"{perf} --number_ios={ios} > /dev/null", 120)
    middle = guest.counted()
    guest.check(f"{perf} --number_ios={2 * ios} > /dev/null", 120)
    after = guest.counted()
    return tuple((z - y - (y - x)) / ios for x, y, z in zip(before, middle, after, strict=True))
