"""Copy, Write Uncorrectable, Verify and Compare, sent by nvme-cli and the kernel.

nvme-cli and the kernel's passthrough cannot send fused operations; `targets/nvmf/tests/hostile/copies.rs` tests
those.
"""

from harness.case import case
from harness.targets import Namespace, Subsystem

ONCS_COMPARE, ONCS_WRITE_UNCORRECTABLE, ONCS_VERIFY, ONCS_COPY = 1 << 0, 1 << 1, 1 << 7, 1 << 8
# Status code with its type as the leading digit; without Do Not Retry.
UNRECOVERED, COMPARE_FAILURE, SIZE_LIMIT = "281", "285", "183"


class Device:
    """Sends commands to a namespace and compares its content with known data."""

    def __init__(self, bench, namespace):
        self.guest, self.size = bench.guest, namespace.block_size

    def run(self, command):
        return self.guest.run(f"nvme {command}")

    def check(self, command):
        result = self.run(command)
        assert result.rc == 0, f"nvme {command}: {result}"
        return result.out

    def rejected(self, command, code):
        """The command must fail, and nvme-cli must print this status."""
        result = self.run(command)
        assert result.rc != 0, f"nvme {command} succeeded, but must be rejected"
        assert code in result.out.lower(), f"nvme {command}: {result}, not status {code}"

    def fill(self, name, blocks):
        self.guest.check(f"head -c {blocks * self.size} /dev/urandom > /tmp/{name}")

    def where(self, lba, blocks):
        return f"/dev/nvme0n1 --start-block={lba} --block-count={blocks - 1}"

    def data(self, name, blocks):
        return f"--data-size={blocks * self.size} --data=/tmp/{name}"

    def write(self, lba, blocks, name):
        self.check(f"write {self.where(lba, blocks)} {self.data(name, blocks)}")

    def verify_content(self, lba, blocks, name):
        self.check(f"read {self.where(lba, blocks)} {self.data('read', blocks)}")
        self.guest.check(f"cmp /tmp/{name} /tmp/read")


@case("copies", on=("ringbolt",), provokes=r"I/O error|critical medium error|Unrecovered Read Error|nvme0n1: ", seconds=10)
def copies(bench):
    """`nvme copy`, `write-uncor`, `verify` and `compare` work, and the kernel gets a medium error."""
    namespace = Namespace(mib=32, malloc=True)
    subsystem = Subsystem("copies", [namespace])
    bench.serve(subsystem)
    bench.connect(subsystem)
    assert bench.block(subsystem) == "/dev/nvme0n1"
    device = Device(bench, namespace)
    oncs = bench.guest.check("nvme id-ctrl /dev/nvme0 -o json | tr -d ' ,' | grep '^\"oncs\":' | cut -d: -f2")
    expected = ONCS_COMPARE | ONCS_WRITE_UNCORRECTABLE | ONCS_VERIFY | ONCS_COPY
    assert int(oncs) & expected == expected, oncs
    identify = bench.guest.check("nvme id-ns /dev/nvme0n1")
    assert "mssrl" in identify and "mcl" in identify, identify
    for name in ("a", "b"):
        device.fill(name, 8)
    device.write(0, 8, "a")
    device.write(8, 8, "b")
    # Two source ranges in reverse order.
    device.check("copy /dev/nvme0n1 --sdlba=100 --slbs=8,0 --blocks=7,7")
    device.verify_content(100, 8, "b")
    device.verify_content(108, 8, "a")
    device.rejected("copy /dev/nvme0n1 --sdlba=4 --slbs=0 --blocks=7", "02")
    device.rejected("copy /dev/nvme0n1 --sdlba=0 --slbs=20000 --blocks=40000", SIZE_LIMIT)
    device.check(f"compare {device.where(100, 8)} {device.data('b', 8)}")
    device.rejected(f"compare {device.where(100, 8)} {device.data('a', 8)}", COMPARE_FAILURE)
    device.check(f"verify {device.where(0, 16)}")
    device.check(f"write-uncor {device.where(2, 1)}")
    device.rejected(f"read {device.where(0, 8)} {device.data('read', 8)}", UNRECOVERED)
    device.rejected(f"verify {device.where(0, 8)}", UNRECOVERED)
    device.rejected("copy /dev/nvme0n1 --sdlba=200 --slbs=0 --blocks=7", UNRECOVERED)
    # The block layer reports a medium error.
    assert bench.guest.run(f"dd if=/dev/nvme0n1 of=/dev/null bs={8 * device.size} count=1 iflag=direct").rc != 0
    device.write(0, 8, "a")
    device.verify_content(0, 8, "a")
