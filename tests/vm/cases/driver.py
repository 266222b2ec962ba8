"""The user-space NVMe driver on QEMU's emulated controllers, behind an IOMMU, inside the guest."""

from harness.case import case
from harness.machine import bound, function_of, serial

from .machines import IOMMU


def disk_of(bench, index):
    """Waits for a controller's first disk; -> its device path."""
    address = function_of(bench.guest, serial(index))
    return "/dev/" + bench.guest.until(f"cd /sys/bus/pci/devices/{address}/nvme/nvme*/ && ls -d nvme*n1").strip()


def kernel_sum(bench, index, kib):
    """The SHA-256 of the data read through the kernel's driver."""
    device = disk_of(bench, index)
    return bench.guest.check(f"dd if={device} bs=4k count={kib // 4} iflag=direct status=none | sha256sum").split()[0]


def our_sum(bench, address, blocks):
    """The SHA-256 of the data read through our driver."""
    # A reactor reports a slow (emulated) CPU on standard error.
    read = f"blocks nvme+pcie://{address} read 0 {blocks} > /tmp/read 2> /tmp/errors || {{ cat /tmp/errors; exit 1; }}"
    return bench.guest.check(f"{read}; sha256sum < /tmp/read", 60).split()[0]


def round_trip(bench, index, block_size):
    """Each driver reads what the other one wrote."""
    guest, kib = bench.guest, 1024
    blocks = kib * 1024 // block_size
    address = function_of(guest, serial(index))
    device = disk_of(bench, index)
    guest.check(f"yes kernel-{index} | dd of={device} bs=64k count={kib // 64} iflag=fullblock oflag=direct status=none")
    written = kernel_sum(bench, index, kib)
    with bound(bench, address, "vfio-pci"):
        assert our_sum(bench, address, blocks) == written
        guest.check(f"yes ours-{index} | head -c {kib * 1024} > /tmp/ours; sha256sum < /tmp/ours > /tmp/sum")
        guest.check(f"blocks nvme+pcie://{address} write 0 < /tmp/ours", 60)
        ours = guest.check("cut -d' ' -f1 < /tmp/sum").strip()
        assert our_sum(bench, address, blocks) == ours != written
    assert kernel_sum(bench, index, kib) == ours


@case("driver-round-trip", on=("ringbolt",), machine=IOMMU)
def driver_round_trip(bench):
    """The kernel's driver and ours read each other's data, with blocks of 512 bytes and 4 KiB."""
    round_trip(bench, 0, 512)
    round_trip(bench, 1, 4096)


@case("driver-perf-verify", on=("ringbolt",), machine=IOMMU)
def driver_perf_verify(bench):
    """perf writes and verifies over PCI Express, with queue pairs on two cores."""
    address = function_of(bench.guest, serial(0))
    with bound(bench, address, "vfio-pci"):
        for jobs, idle in ((1, "spin"), (2, "adaptive"), (1, "sleep")):
            job = f"--rw=randwrite --bs=4k --iodepth=16 --numjobs={jobs} --size=4m --verify=pattern"
            out = bench.guest.check(
                f"ringbolt perf --filename=nvme+pcie://{address}?ns=1 {job} --idle {idle} --cpus_allowed=0-1", 240
            )
            assert " 0 wrong" in out, out


@case("driver-unbound", on=("ringbolt",), machine=IOMMU)
def driver_unbound(bench):
    """A function bound to the kernel's driver is rejected with a hint."""
    address = function_of(bench.guest, serial(0))
    rejected = bench.guest.run(f"blocks nvme+pcie://{address} read 0 1 > /dev/null", 60)
    assert rejected.rc == 1 and "nvme bind" in rejected.out, rejected
