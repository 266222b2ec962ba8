"""The user-space NVMe driver on QEMU's emulated controllers, behind an IOMMU, inside the guest."""

from harness.case import case
from harness.machine import Machine, Nvme, bound, function_of, serial

MACHINE = Machine(
    nvme=(Nvme(options="max_ioqpairs=4"), Nvme(block_size=4096), Nvme(mib=16, port="driver0")),
    iommu=True,
    hugepages=16,
)


def disk_of(bench, index):
    """The kernel's name of a controller's first disk, as soon as it is there."""
    address = function_of(bench.guest, serial(index))
    return "/dev/" + bench.guest.until(f"cd /sys/bus/pci/devices/{address}/nvme/nvme*/ && ls -d nvme*n1").strip()


def kernel_sum(bench, index, kib):
    """What the kernel's driver reads."""
    device = disk_of(bench, index)
    return bench.guest.check(f"dd if={device} bs=4k count={kib // 4} iflag=direct status=none | sha256sum").split()[0]


def our_sum(bench, address, blocks):
    """What our driver reads."""
    # A reactor says on standard error that the emulated processor was slow.
    read = f"blocks nvme+pcie://{address} read 0 {blocks} > /tmp/read 2> /tmp/errors || {{ cat /tmp/errors; exit 1; }}"
    return bench.guest.check(f"{read}; sha256sum < /tmp/read", 60).split()[0]


def round_trip(bench, index, block_size):
    """What one driver writes is what the other reads."""
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


@case("driver-round-trip", on=("ringbolt",), machine=MACHINE)
def driver_round_trip(bench):
    """Data goes from the kernel's driver to ours and back, in blocks of 512 bytes and of 4 KiB."""
    round_trip(bench, 0, 512)
    round_trip(bench, 1, 4096)


@case("driver-perf-verify", on=("ringbolt",), machine=MACHINE)
def driver_perf_verify(bench):
    """perf writes and verifies through PCI Express, with queue pairs on two cores of one controller."""
    address = function_of(bench.guest, serial(0))
    with bound(bench, address, "vfio-pci"):
        for jobs, idle in ((1, "spin"), (2, "adaptive"), (1, "sleep")):
            job = f"--rw=randwrite --bs=4k --iodepth=16 --numjobs={jobs} --size=4m --verify=pattern"
            out = bench.guest.check(
                f"ringbolt perf --filename=nvme+pcie://{address}?ns=1 {job} --idle {idle} --cpus_allowed=0-1", 240
            )
            assert " 0 wrong" in out, out


@case("driver-unbound", on=("ringbolt",), machine=MACHINE)
def driver_unbound(bench):
    """A function that the kernel's driver has is refused with what to do."""
    address = function_of(bench.guest, serial(0))
    refused = bench.guest.run(f"blocks nvme+pcie://{address} read 0 1 > /dev/null", 60)
    assert refused.rc == 1 and "nvme bind" in refused.out, refused
