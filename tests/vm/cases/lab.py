"""The lab inside the guest, for features that need kernel settings: polled queues, I/O schedulers."""

import json

from harness.case import Skip, case
from harness.machine import function_of, serial

from .machines import NO_IOMMU, PLAIN

# A user-defined experiment with a short runtime.
DEFINITION = """
id = "own.schedulers"
title = "io_uring with interrupts and polled, under each scheduler"
section = "1"
x = "scheduler"
y = "iops"
series = ["api"]
shape = "table"

[time]
runtime_s = 1
ramp_s = 0

[fixed]
block_bytes = 4096
rw = "randread"
devices = 1
jobs = 1
iodepth = 16
cores = 1

[vary]
api = ["iou", "iou-c"]
scheduler = ["none", "mq-deadline", "kyber", "bfq"]
"""


def run(bench, arguments):
    """Runs experiments; -> the results of all cells."""
    bench.guest.check(f"ringbolt lab run {arguments} --runtime 1s --ramp 0s --repetitions 1 --out /tmp/run 2>&1", 300)
    lines = bench.guest.check("cat /tmp/run/results.jsonl").splitlines()
    bench.guest.check("ringbolt lab report /tmp/run 2>&1 && grep -q '<svg' /tmp/run/report.html && rm -r /tmp/run", 120)
    return [json.loads(line) for line in lines]


def iops(cell):
    assert not cell.get("failed") and not cell.get("skipped"), cell
    return cell["roles"]["fg"]["metrics"]["iops"]


@case("lab-polled-queues", on=("ringbolt",), machine=PLAIN, seconds=25)
def lab_polled_queues(bench):
    """A figure of CHEOPS'23 on an emulated NVMe device with polled queues."""
    guest = bench.guest
    address = function_of(guest, serial(0))
    name = guest.until(f"cd /sys/bus/pci/devices/{address}/nvme/nvme*/ && ls -d nvme*n1").strip()
    without = run(bench, f"cheops23.fig2 --device /dev/{name}")
    polled = [cell for cell in without if cell["parameters"]["api"] == "iou-c"]
    assert polled and all("poll" in cell["skipped"] for cell in polled), polled
    rebind = f"cd /sys/bus/pci/drivers/nvme && echo {address} > unbind && echo {address} > bind"
    guest.check(f"echo 1 > /sys/module/nvme/parameters/poll_queues; {rebind}", 60)
    guest.until(f"[ $(cat /sys/block/{name}/queue/io_poll) = 1 ]")
    cells = {cell["parameters"]["api"]: cell for cell in run(bench, f"cheops23.fig2 --device /dev/{name}")}
    for api in ("psync", "aio", "iou", "iou-s", "iou-c"):
        assert iops(cells[api]) > 0, cells[api]


@case("lab-schedulers", on=("ringbolt",), machine=PLAIN, seconds=20)
def lab_schedulers(bench):
    """A user-defined experiment on null_blk: each scheduler is set, verified and restored, also polled."""
    guest = bench.guest
    guest.check(f"cat > /tmp/own.toml <<'END'\n{DEFINITION}END")
    guest.check("echo mq-deadline > /sys/block/nullb0/queue/scheduler")
    cells = run(bench, "own.schedulers --definition /tmp/own.toml --device null_blk")
    assert len(cells) == 8, [cell["parameters"] for cell in cells]
    for cell in cells:
        assert iops(cell) > 0, cell
        assert [one["scheduler"] for one in cell["schedulers"]] == [cell["parameters"]["scheduler"]], cell
    assert "[mq-deadline]" in guest.check("cat /sys/block/nullb0/queue/scheduler")


@case("lab-zones", on=("ringbolt",), machine=PLAIN, seconds=15)
def lab_zones(bench):
    """zonemode=zbd on a zoned null_blk, which rejects writes that are not at a write pointer."""
    guest = bench.guest
    folder = "/sys/kernel/config/nullb/zones"
    settings = {"zoned": 1, "zone_size": 4, "size": 64, "zone_nr_conv": 1, "zone_max_open": 3, "memory_backed": 1}
    made = " && ".join(f"echo {value} > {name}" for name, value in settings.items())
    if guest.run(f"mkdir {folder} && cd {folder} && {made} && echo 1 > power").rc:
        raise Skip("the guest's null_blk has no zones")
    index = guest.check(f"cat {folder}/index").strip()
    try:
        # Newer kernels name the device after the folder.
        name = guest.until(f"cd /sys/block && ls -d zones nullb{index} 2> /dev/null | grep -m 1 .").strip()
        zones(guest, f"/dev/{name}")
    finally:
        guest.check(f"echo 0 > {folder}/power; rmdir {folder}")


def zones(guest, device):
    guest.until(f"[ -b {device} ]")
    fixed = f"--filename={device} --zonemode=zbd --direct=1 --generator_cost=0 --name=x"

    def job(options):
        output = guest.check(f"ringbolt perf {fixed} {options} --output-format=json 2>&1", 120)
        return json.loads(output[output.index("{"):])["jobs"][0]

    region = "--offset=1z --size=8z --bs=64k --group_reporting"
    for engine in ("psync --numjobs=2", "libaio --iodepth=4", "io_uring --iodepth=4"):
        report = job(f"--ioengine={engine} {region} --rw=randwrite --io_size=64m")
        # Twice the size of the region is written.
        assert report["error"] == 0 and report["write"]["total_ios"] >= 1024, report
        assert report["zone_resets"] >= 4, report["zone_resets"]
    # fio finds the zones as they were left: both read what was written, and no more.
    reads = f"--filename={device} --zonemode=zbd --direct=1 --name=x --offset=4m --size=32m --bs=64k --rw=read"
    counts = []
    for program in ("fio", "ringbolt perf"):
        output = guest.check(f"{program} {reads} --ioengine=psync --output-format=json 2>&1", 120)
        counts.append(json.loads(output[output.index("{"):])["jobs"][0]["read"]["total_ios"])
    assert counts[0] == counts[1] > 0, counts
    report = job("--offset=1z --size=8z --bs=4m --rw=randtrim --number_ios=8")
    assert report["error"] == 0 and 0 < report["zone_resets"] <= 8, report
    for options, reason in (
        ("--direct=0", "need --direct=1"),
        ("--zonesize=1m", "have 4194304 bytes"),
        ("--max_open_zones=9", "at most 3 open zones"),
    ):
        rejected = guest.check(f"! ringbolt perf {fixed} {options} --rw=randwrite 2>&1")
        assert reason in rejected, rejected


@case("lab-passthrough", on=("ringbolt",), machine=PLAIN, seconds=10)
def lab_passthrough(bench):
    """io_uring_cmd: data written through the NVMe generic device is read back and verified."""
    passthrough(bench)


@case("lab-passthrough-modern", on=("ringbolt",), machine=NO_IOMMU, seconds=20)
def lab_passthrough_modern(bench):
    """io_uring_cmd on kernel 6.12, which imports registered buffers differently."""
    passthrough(bench)


def passthrough(bench):
    guest = bench.guest
    address = function_of(guest, serial(0))
    name = guest.until(f"cd /sys/bus/pci/devices/{address}/nvme/nvme*/ && ls -d nvme*n1").strip()
    job = "--name=x --ioengine=io_uring_cmd --bs=4k --size=4m --iodepth=8 --generator_cost=0"
    generic = f"--filename=/dev/{name.replace('nvme', 'ng')}"
    all_options = "--fixedbufs=1 --registerfiles=1 --sqthread_poll=1"
    for more in ("", "--registerfiles=1", "--sqthread_poll=1", "--fixedbufs=1", all_options):
        output = guest.check(f"ringbolt perf {job} {generic} --rw=randwrite --verify=crc32c {more} 2>&1", 120)
        assert "1024 blocks checked, 0 wrong" in output, output
    # Commands that use part of their registered buffer, and commands that use all of it.
    mixed = "--name=x --ioengine=io_uring_cmd --size=4m --iodepth=8 --generator_cost=0 --bssplit=512/40:4k/40:64k/20"
    for more in ("--fixedbufs=1", all_options):
        guest.check(f"ringbolt perf {mixed} {generic} --rw=randrw {more} 2>&1", 120)
    rejected = guest.check(f"! ringbolt perf {job} --filename=/dev/{name} --rw=randread 2>&1")
    assert "NVMe generic device" in rejected, rejected
