"""The lab inside the guest, on what needs a kernel of one's own: polled queues, and every scheduler."""

import json

from harness.case import case
from harness.machine import Machine, Nvme, function_of, serial

MACHINE = Machine(nvme=(Nvme(mib=64),))
# A user's own definition, as long as this test can wait.
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


def run(bench, words):
    """Runs experiments; -> what each cell left, by what was varied."""
    bench.guest.check(f"ringbolt lab run {words} --runtime 1s --ramp 0s --repetitions 1 --out /tmp/run 2>&1", 300)
    lines = bench.guest.check("cat /tmp/run/results.jsonl").splitlines()
    bench.guest.check("ringbolt lab report /tmp/run 2>&1 && grep -q '<svg' /tmp/run/report.html && rm -r /tmp/run", 120)
    return [json.loads(line) for line in lines]


def iops(cell):
    assert not cell.get("failed") and not cell.get("skipped"), cell
    return cell["roles"]["fg"]["metrics"]["iops"]


@case("lab-polled-queues", on=("ringbolt",), machine=MACHINE)
def lab_polled_queues(bench):
    """The first figure of CHEOPS'23 on an emulated NVMe device whose completions are really polled for."""
    guest = bench.guest
    address = function_of(guest, serial(0))
    name = guest.until(f"cd /sys/bus/pci/devices/{address}/nvme/nvme*/ && ls -d nvme*n1").strip()
    without = run(bench, f"cheops23.fig2 --device /dev/{name}")
    polled = [cell for cell in without if cell["parameters"]["api"] == "iou-c"]
    assert polled and all("poll" in cell["skipped"] for cell in polled), polled
    again = f"cd /sys/bus/pci/drivers/nvme && echo {address} > unbind && echo {address} > bind"
    guest.check(f"echo 1 > /sys/module/nvme/parameters/poll_queues; {again}", 60)
    guest.until(f"[ $(cat /sys/block/{name}/queue/io_poll) = 1 ]")
    cells = {cell["parameters"]["api"]: cell for cell in run(bench, f"cheops23.fig2 --device /dev/{name}")}
    for api in ("psync", "aio", "iou", "iou-s", "iou-c"):
        assert iops(cells[api]) > 0, cells[api]


@case("lab-schedulers", on=("ringbolt",), machine=MACHINE)
def lab_schedulers(bench):
    """A definition of one's own on null_blk: each scheduler is set, read back and put back, polled too."""
    guest = bench.guest
    guest.check(f"cat > /tmp/own.toml <<'END'\n{DEFINITION}END")
    guest.check("echo mq-deadline > /sys/block/nullb0/queue/scheduler")
    cells = run(bench, "own.schedulers --definition /tmp/own.toml --device null_blk")
    assert len(cells) == 8, [cell["parameters"] for cell in cells]
    for cell in cells:
        assert iops(cell) > 0, cell
        assert [one["scheduler"] for one in cell["schedulers"]] == [cell["parameters"]["scheduler"]], cell
    assert "[mq-deadline]" in guest.check("cat /sys/block/nullb0/queue/scheduler")


@case("lab-passthrough", on=("ringbolt",), machine=MACHINE)
def lab_passthrough(bench):
    """NVMe commands by io_uring_cmd: what is written through the generic device is read back and right."""
    passthrough(bench)


@case("lab-passthrough-modern", on=("ringbolt",), machine=Machine(nvme=(Nvme(mib=64),), vfio=True))
def lab_passthrough_modern(bench):
    """The same with a kernel two years younger, which imports registered memory in another way."""
    passthrough(bench)


def passthrough(bench):
    guest = bench.guest
    address = function_of(guest, serial(0))
    name = guest.until(f"cd /sys/bus/pci/devices/{address}/nvme/nvme*/ && ls -d nvme*n1").strip()
    job = "--name=x --ioengine=io_uring_cmd --bs=4k --size=4m --iodepth=8 --generator_cost=0"
    generic = f"--filename=/dev/{name.replace('nvme', 'ng')}"
    all_of_it = "--fixedbufs=1 --registerfiles=1 --sqthread_poll=1"
    for more in ("", "--registerfiles=1", "--sqthread_poll=1", "--fixedbufs=1", all_of_it):
        said = guest.check(f"ringbolt perf {job} {generic} --rw=randwrite --verify=crc32c {more} 2>&1", 120)
        assert "8192 blocks checked, 0 wrong" in said, said
    # Commands that use a part of their registered buffer, and those that use all of it.
    mixed = "--name=x --ioengine=io_uring_cmd --size=4m --iodepth=8 --generator_cost=0 --bssplit=512/40:4k/40:64k/20"
    for more in ("--fixedbufs=1", all_of_it):
        guest.check(f"ringbolt perf {mixed} {generic} --rw=randrw {more} 2>&1", 120)
    refused = guest.check(f"! ringbolt perf {job} --filename=/dev/{name} --rw=randread 2>&1")
    assert "NVMe generic device" in refused, refused
