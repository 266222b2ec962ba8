"""The user-space NVMe driver and the device under it: pulled out, asked back, cut off from power, reset."""

import json

from harness.case import case
from harness.machine import Machine, Nvme, bound, function_of, serial
from harness.pciexpress import Slot

CONTROLLERS = (Nvme(options="max_ioqpairs=4"), Nvme(mib=16, port="port0"))
MACHINE = Machine(nvme=CONTROLLERS, iommu=True, hugepages=16)
# Where VFIO has a function that was pulled out, the kernel waits a minute for its reset.
PLAIN = Machine(nvme=CONTROLLERS, hugepages=16)
# What the guest's kernel says when hardware goes.
GONE = r"nvme|pcieport|pciehp|vfio|DMAR"


def busy(bench, address):
    """Starts load without end on a function; -> the job, as soon as it runs."""
    load = f"--filename=nvme+pcie://{address}?ns=1 --rw=randread --bs=4k --iodepth=16 --time_based --runtime=3600"
    job = bench.guest.spawn(f"ringbolt perf {load} --eta=always 2>&1")
    job.expect("IOPS", 60)
    return job


def plug(guest, identifier, index, port):
    """Plugs a controller in again; -> its address, as soon as the kernel's driver has it."""
    guest.wait(lambda: gone(guest, identifier), 60, f"end of {identifier}", poll=0.1)
    guest.qmp("device_add", driver="nvme", id=identifier, serial=serial(index), bus=port)
    return function_of(guest, serial(index))


def gone(guest, identifier):
    """Whether QEMU has no such device any more."""
    return all(one["name"] != identifier for one in guest.qmp("qom-list", path="/machine/peripheral"))


@case("driver-pulled-out", on=("ringbolt",), machine=PLAIN, provokes=GONE)
def driver_pulled_out(bench):
    """A controller whose slot loses power under load: every I/O fails, nothing hangs, and its successor works."""
    guest = bench.guest
    address = function_of(guest, serial(1))
    guest.check(f"ringbolt nvme bind {address} --driver uio_pci_generic", 60)
    slot = Slot(guest, address)
    job = busy(bench, address)
    slot.power_off()
    ended = job.wait(60)
    assert ended.rc == 1 and "Host Pathing Error" in ended.out, ended
    slot.replace()
    assert function_of(guest, serial(1)) == address


@case("driver-asked-back", on=("ringbolt",), machine=MACHINE, provokes=GONE)
def driver_asked_back(bench):
    """A controller that is to be unplugged, and is in use: the driver lets go of it, and the kernel gets it."""
    guest = bench.guest
    address = function_of(guest, serial(1))
    guest.check(f"ringbolt nvme bind {address}", 60)
    job = busy(bench, address)
    guest.qmp("device_del", id="nvme1")
    ended = job.wait(90)
    assert ended.rc == 1 and "Host Pathing Error" in ended.out, ended
    assert plug(guest, "nvme1", 1, "port0") == address


@case("driver-queues", on=("ringbolt",), machine=MACHINE)
def driver_queues(bench):
    """As many queue pairs as the controller has are used, and one more is refused by name."""
    address = function_of(bench.guest, serial(0))
    with bound(bench, address, "vfio-pci"):
        job = f"ringbolt perf --filename=nvme+pcie://{address}?ns=1 --rw=randread --number_ios=200 --iodepth=8 --thread"
        out = bench.guest.check(f"{job} --numjobs=4 --output-format=json 2> /tmp/errors || cat /tmp/errors", 120)
        jobs = json.loads(out[out.index("{") :])["jobs"]
        assert sum(one["read"]["total_ios"] for one in jobs) == 800, jobs
        refused = bench.guest.run(f"{job} --numjobs=5", 120)
        assert refused.rc == 2 and "no I/O queue left; it has 4" in refused.out, refused


@case("driver-power-cut", on=("ringbolt",), machine=MACHINE)
def driver_power_cut(bench):
    """What was flushed before the power went is on the medium."""
    guest = bench.guest
    address = function_of(guest, serial(0))
    guest.check(f"ringbolt nvme bind {address}", 60)
    # Each round writes its own text over all blocks of its place and flushes.
    write = f"yes round-$i | head -c 65536 | blocks nvme+pcie://{address} write $((i * 128)) 2> /dev/null"
    job = guest.spawn(f"i=0; while {write}; do echo flushed-$i; i=$((i + 1)); done")
    flushed = int(job.expect(r"flushed-([3-9])\n", 120).group(1))
    guest.cut_power()
    with open(f"{guest.folder}/nvme0.raw", "rb") as medium:
        for number in range(flushed + 1):
            line = f"round-{number}\n".encode()
            found = medium.read(65536)
            assert found == (line * (65536 // len(line) + 1))[:65536], f"round {number} was flushed and is not there"
