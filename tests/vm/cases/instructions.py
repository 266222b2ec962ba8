"""Instructions and system calls per I/O of the kernel's I/O interfaces and of our driver.

4 KiB random reads on the same emulated controller, at queue depth 1 and at a depth that keeps the
device busy. The cost is the difference between a run of N and a run of 2N I/Os: in user mode, in
kernel mode, and in system calls. Timing is meaningless in an emulated guest. Instruction counts are
meaningful except when polling, where they depend on the speed of the emulated device and include
timer interrupts. The assertions therefore use system calls.
"""

from contextlib import contextmanager

from harness.case import Skip, case
from harness.guest import GuestError
from harness.machine import Machine, Nvme, bound, function_of, serial

COUNTED = Machine(nvme=(Nvme(mib=64, block_size=4096),), hugepages=32, counted=True)
IOS = 1000
# A submission polling thread shares the only CPU with the submitter.
IOS_POLLED = 200
BUSY = 32
# System calls per I/O that pass for none.
CALLS_MAX = 0.1
# Name -> options of `perf`, for depth 1 and for a busy device.
KERNEL = {
    "psync": ("--ioengine=psync", None),
    "libaio": ("--ioengine=libaio", "--ioengine=libaio"),
    "iou": ("--ioengine=io_uring", "--ioengine=io_uring"),
    "iou-c": ("--ioengine=io_uring --hipri=1", "--ioengine=io_uring --hipri=1"),
    "iou-s": ("--ioengine=io_uring --sqthread_poll=1", "--ioengine=io_uring --sqthread_poll=1"),
}


@case("instructions", on=("ringbolt",), machine=COUNTED, seconds=40)
def instructions(bench):
    """Instructions and system calls per 4 KiB read: our driver makes no system calls."""
    guest = bench.guest
    address = function_of(guest, serial(0))
    counts = {}
    with bound(bench, address, "uio_pci_generic"):
        for depth in (1, BUSY):
            uri = f"'--filename=nvme+pcie://{address}?ns=1'"
            # Threads beside the reactor make calls now and then: on a busy machine a run can meet more than the other.
            for _ in range(3):
                counts["ringbolt", depth] = cost_per_io(guest, f"{uri} --idle=spin", depth, IOS)
                if abs(counts["ringbolt", depth][2]) < CALLS_MAX:
                    break
    for depth in (1, BUSY):
        calls = counts["ringbolt", depth][2]
        assert abs(calls) < CALLS_MAX, f"{calls:.2f} system calls per I/O of the user-space driver"
    # Polled queues are disabled by default.
    guest.check("echo 1 > /sys/module/nvme/parameters/poll_queues")
    guest.check(f"for file in /sys/bus/pci/devices/{address}/nvme/nvme*/reset_controller; do echo 1 > $file; done", 30)
    device = "/dev/" + guest.until(f"cd /sys/bus/pci/devices/{address}/nvme/nvme*/ && ls -d nvme*n1").strip()
    for name, options_by_depth in KERNEL.items():
        for depth, options in zip((1, BUSY), options_by_depth, strict=True):
            if options:
                ios = IOS_POLLED if name == "iou-s" else IOS
                with requests_that_end(guest, f"{name} at depth {depth}"):
                    counts[name, depth] = cost_per_io(guest, f"--filename={device} --direct=1 {options}", depth, ios)
    print("# per 4 KiB read: instructions in user mode, in kernel mode, system calls")
    for (name, depth), (user, kernel, calls) in counts.items():
        print(f"#   {name:<9} QD {depth:<3} {user:>8.0f} {kernel:>8.0f} {calls:>6.2f}", flush=True)
    # The synchronous interfaces show that system calls are counted.
    for name, calls_min in (("psync", 1), ("libaio", 1.9)):
        calls = counts[name, 1][2]
        assert calls_min * 0.95 < calls, f"{calls:.2f} system calls per I/O of {name}"


@contextmanager
def requests_that_end(guest, what):
    """QEMU's controller can lose the requests of the guest's own driver, which then time out: that says nothing of us."""
    try:
        yield
    except GuestError as error:
        if "timeout, aborting" not in guest.check("dmesg", 30):
            raise
        raise Skip(f"the emulated controller lost requests of the guest's kernel ({what}); our driver passed") from error


def cost_per_io(guest, options, depth, ios):
    """-> (user, kernel, calls): instructions and system calls per I/O."""
    perf = f"ringbolt perf {options} --rw=randread --bs=4k --iodepth={depth} --size=32m --eta=never"
    before = guest.counted()
    guest.check(f"{perf} --number_ios={ios} > /dev/null", 60)
    middle = guest.counted()
    guest.check(f"{perf} --number_ios={2 * ios} > /dev/null", 60)
    after = guest.counted()
    return tuple((z - y - (y - x)) / ios for x, y, z in zip(before, middle, after, strict=True))
