"""Copy, Write Uncorrectable, Verify and Compare, as nvme-cli and the kernel send them.

Fused operations cannot be sent by nvme-cli or through the kernel's pass-through: `targets/nvmf/tests/hostile/copies.rs`
sends those.
"""

from harness.case import case
from harness.targets import Namespace, Subsystem

ONCS_COMPARE, ONCS_WRITE_UNCORRECTABLE, ONCS_VERIFY, ONCS_COPY = 1 << 0, 1 << 1, 1 << 7, 1 << 8
# 80h and up, with the status code type in front and perhaps Do Not Retry.
UNRECOVERED, COMPARE_FAILURE, SIZE_LIMIT = "281", "285", "183"


class Device:
    """A namespace of which every block is a known one."""

    def __init__(self, bench, namespace):
        self.guest, self.size = bench.guest, namespace.block_size

    def run(self, command):
        return self.guest.run(f"nvme {command}")

    def check(self, command):
        result = self.run(command)
        assert result.rc == 0, f"nvme {command}: {result}"
        return result.out

    def refused(self, command, code):
        """The command must fail, and what nvme-cli prints must name this status."""
        result = self.run(command)
        assert result.rc != 0, f"nvme {command} succeeded, and should have been refused"
        assert code in result.out.lower(), f"nvme {command}: {result}, not status {code}"

    def fill(self, name, blocks):
        self.guest.check(f"head -c {blocks * self.size} /dev/urandom > /tmp/{name}")

    def where(self, lba, blocks):
        return f"/dev/nvme0n1 --start-block={lba} --block-count={blocks - 1}"

    def data(self, name, blocks):
        return f"--data-size={blocks * self.size} --data=/tmp/{name}"

    def write(self, lba, blocks, name):
        self.check(f"write {self.where(lba, blocks)} {self.data(name, blocks)}")

    def holds(self, lba, blocks, name):
        self.check(f"read {self.where(lba, blocks)} {self.data('read', blocks)}")
        self.guest.check(f"cmp /tmp/{name} /tmp/read")


@case("copies", on=("ringbolt",), provokes=r"I/O error|critical medium error|Unrecovered Read Error|nvme0n1: ")
def copies(bench):
    """What `nvme copy`, `write-uncor`, `verify` and `compare` do, and that the kernel gets a medium error."""
    namespace = Namespace(mib=32, malloc=True)
    subsystem = Subsystem("copies", [namespace])
    bench.serve(subsystem)
    bench.connect(subsystem)
    assert bench.block(subsystem) == "/dev/nvme0n1"
    device = Device(bench, namespace)
    oncs = bench.guest.check("nvme id-ctrl /dev/nvme0 -o json | tr -d ' ,' | grep '^\"oncs\":' | cut -d: -f2")
    wanted = ONCS_COMPARE | ONCS_WRITE_UNCORRECTABLE | ONCS_VERIFY | ONCS_COPY
    assert int(oncs) & wanted == wanted, oncs
    told = bench.guest.check("nvme id-ns /dev/nvme0n1")
    assert "mssrl" in told and "mcl" in told, told
    for name in ("a", "b"):
        device.fill(name, 8)
    device.write(0, 8, "a")
    device.write(8, 8, "b")
    # Two ranges, the other way round.
    device.check("copy /dev/nvme0n1 --sdlba=100 --slbs=8,0 --blocks=7,7")
    device.holds(100, 8, "b")
    device.holds(108, 8, "a")
    device.refused("copy /dev/nvme0n1 --sdlba=4 --slbs=0 --blocks=7", "02")
    device.refused("copy /dev/nvme0n1 --sdlba=0 --slbs=20000 --blocks=40000", SIZE_LIMIT)
    device.check(f"compare {device.where(100, 8)} {device.data('b', 8)}")
    device.refused(f"compare {device.where(100, 8)} {device.data('a', 8)}", COMPARE_FAILURE)
    device.check(f"verify {device.where(0, 16)}")
    device.check(f"write-uncor {device.where(2, 1)}")
    device.refused(f"read {device.where(0, 8)} {device.data('read', 8)}", UNRECOVERED)
    device.refused(f"verify {device.where(0, 8)}", UNRECOVERED)
    device.refused("copy /dev/nvme0n1 --sdlba=200 --slbs=0 --blocks=7", UNRECOVERED)
    # What the block layer reads of it is a medium error.
    assert bench.guest.run(f"dd if=/dev/nvme0n1 of=/dev/null bs={8 * device.size} count=1 iflag=direct").rc != 0
    device.write(0, 8, "a")
    device.holds(0, 8, "a")
