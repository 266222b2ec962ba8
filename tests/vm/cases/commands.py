"""Every command of the user-space NVMe driver, on QEMU's emulated controllers, inside the guest."""

from harness.case import case
from harness.machine import Machine, Namespace, Nvme, bound, function_of, serial

# From NSID 2: separate metadata; protection information of each type, separate and interleaved; zoned; a guard of 64
# bits. They are
# detached until our driver attaches them, because the guest's kernel fails on some of them.
NAMESPACES = (
    Namespace(block_size=4096, options="detached=true,ms=16"),
    Namespace(options="detached=true,ms=8,pi=1"),
    Namespace(block_size=4096, options="detached=true,ms=8,mset=1,pi=2"),
    Namespace(options="detached=true,ms=16,pi=3,pil=1"),
    Namespace(block_size=4096, options="detached=true,zoned=true,zoned.zone_size=1M,zoned.zone_capacity=1M"),
    Namespace(block_size=4096, options="detached=true,ms=16,mset=1,pi=1,pif=2"),
)
MACHINE = Machine(nvme=(Nvme(more=NAMESPACES), Nvme(block_size=4096)), iommu=True, hugepages=16)
# The commands that QEMU's controller supports; it reports the others as unsupported.
PLAIN = ("write, read", "out of range", "compare", "write zeroes", "dataset management", "copy", "flush", "format")


def exercise(bench, address, nsid):
    """The results of the `exercise` example by command name; the example fails if a command misbehaves."""
    command = f"exercise nvme+pcie://{address}?ns={nsid} --yes-destroy-data"
    results = bench.guest.check(f"{command} 2> /tmp/errors || {{ cat /tmp/errors; exit 1; }}", 120)
    return dict(line.removeprefix("# ").rsplit(" ", 1) for line in results.replace("not offered", "missing").splitlines())


@case("driver-commands", on=("ringbolt",), machine=MACHINE)
def driver_commands(bench):
    """All commands of the device work, with metadata, protection information and zones."""
    address = function_of(bench.guest, serial(0))
    with bound(bench, address, "vfio-pci"):
        plain = exercise(bench, address, 1)
        assert all(plain[name] == "ok" for name in PLAIN), plain
        for nsid in (2, 3, 4, 5, 7):
            results = exercise(bench, address, nsid)
            assert results["metadata"] == "ok", results
            assert results["protection information"] == ("missing" if nsid == 2 else "ok"), results
            assert results["attach"] == "ok", results
        zoned = exercise(bench, address, 6)
        assert zoned["zone append"] == zoned["zone report, zone reset"] == "ok", zoned
        shadow = [text for text in plain if "shadow doorbells" in text]
        assert shadow and plain[shadow[0]] == "true", plain
