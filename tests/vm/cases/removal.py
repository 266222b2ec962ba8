"""Removal and power loss of a device under the user-space NVMe driver."""

import json

from harness.case import case
from harness.machine import bound, function_of, plug, serial, unplug
from harness.pciexpress import Slot

from .machines import IOMMU, PLAIN

# Expected kernel log lines on a hot removal.
REMOVAL_LOG = r"nvme|pcieport|pciehp|vfio|DMAR"


def start_load(bench, address):
    """Starts an endless load on a function; -> the job, once it is running."""
    load = f"--filename=nvme+pcie://{address}?ns=1 --rw=randread --bs=4k --iodepth=16 --time_based --runtime=3600"
    job = bench.guest.spawn(f"ringbolt perf {load} --eta=always 2>&1")
    job.expect("IOPS", 60)
    return job


@case("driver-surprise-removal", on=("ringbolt",), machine=PLAIN, provokes=REMOVAL_LOG)
def driver_surprise_removal(bench):
    """Surprise removal under load: all I/O fails without hanging, and the replacement works."""
    guest = bench.guest
    address = function_of(guest, serial(1))
    # Without VFIO: after a surprise removal under VFIO, the kernel waits a minute for the function's reset.
    guest.check(f"ringbolt nvme bind {address} --driver uio_pci_generic", 60)
    slot = Slot(guest, address)
    job = start_load(bench, address)
    slot.power_off()
    ended = job.wait(60)
    assert ended.rc == 1 and "Host Pathing Error" in ended.out, ended
    slot.replace()
    assert function_of(guest, serial(1)) == address


@case("driver-orderly-removal", on=("ringbolt",), machine=IOMMU, provokes=REMOVAL_LOG)
def driver_orderly_removal(bench):
    """Orderly removal under load: the driver releases the function, and the kernel's driver gets the new one."""
    guest = bench.guest
    address = function_of(guest, serial(2))
    guest.check(f"ringbolt nvme bind {address}", 60)
    job = start_load(bench, address)
    unplug(guest, 2)
    ended = job.wait(90)
    assert ended.rc == 1 and "Host Pathing Error" in ended.out, ended
    plug(guest, 2)
    assert function_of(guest, serial(2)) == address


@case("driver-queues", on=("ringbolt",), machine=IOMMU)
def driver_queues(bench):
    """All queue pairs of the controller can be used; one more is rejected with the limit."""
    address = function_of(bench.guest, serial(0))
    with bound(bench, address, "vfio-pci"):
        job = f"ringbolt perf --filename=nvme+pcie://{address}?ns=1 --rw=randread --number_ios=200 --iodepth=8 --thread"
        out = bench.guest.check(f"{job} --numjobs=4 --output-format=json 2> /tmp/errors || cat /tmp/errors", 120)
        jobs = json.loads(out[out.index("{") :])["jobs"]
        assert sum(one["read"]["total_ios"] for one in jobs) == 800, jobs
        refused = bench.guest.run(f"{job} --numjobs=5", 120)
        assert refused.rc == 1 and "no I/O queue left; it has 4" in refused.out, refused


@case("driver-power-cut", on=("ringbolt",), machine=IOMMU)
def driver_power_cut(bench):
    """Flushed data survives a power loss."""
    guest = bench.guest
    address = function_of(guest, serial(0))
    guest.check(f"ringbolt nvme bind {address}", 60)
    # Each round writes its own text to its own range and flushes.
    write = f"yes round-$i | head -c 65536 | blocks nvme+pcie://{address} write $((i * 128)) 2> /dev/null"
    job = guest.spawn(f"i=0; while {write}; do echo flushed-$i; i=$((i + 1)); done")
    flushed = int(job.expect(r"flushed-([3-9])\n", 120).group(1))
    guest.cut_power()
    with open(f"{guest.folder}/nvme0.raw", "rb") as medium:
        for number in range(flushed + 1):
            line = f"round-{number}\n".encode()
            found = medium.read(65536)
            assert found == (line * (65536 // len(line) + 1))[:65536], f"round {number} was flushed, but is missing"
