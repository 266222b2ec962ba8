"""Our initiator inside the guest, against the kernel's own NVMe/TCP target on the guest's loopback."""

from harness.case import case
from harness.targets import Namespace, Subsystem

from .machines import PLAIN


@case("initiator", on=("nvmet",), machine=PLAIN, seconds=10)
def initiator(bench):
    """perf verifies data on nvmet, with and without digests; the nvme subcommands identify it and read a log page."""
    guest = bench.guest
    guest.check("ifconfig lo up")
    subsystem = Subsystem("initiator", [Namespace(mib=32)])
    target = bench.serve(subsystem)
    empty = target.digest(subsystem.namespaces[0], 0, 4 << 20)
    controller = f"nvme+tcp://127.0.0.1:{target.port}/{subsystem.nqn}"
    for size, digests in (("4k", ""), ("8k", "&hdgst=1"), ("64k", "&ddgst=1"), ("4k", "&hdgst=1&ddgst=1")):
        load = f"--rw=randwrite --bs={size} --iodepth=16 --size=4m --verify=pattern"
        out = guest.check(f"ringbolt perf '--filename={controller}?ns=1{digests}' {load} 2>&1", 120)
        assert " 0 wrong" in out, out
    assert target.digest(subsystem.namespaces[0], 0, 4 << 20) != empty, "nothing was written"
    assert subsystem.serial in guest.check(f"ringbolt nvme identify {controller}", 60)
    assert "temperature" in guest.check(f"ringbolt nvme log {controller} health", 60).lower()
    listed = guest.check(f"ringbolt nvme discover 127.0.0.1:{target.port}", 60)
    assert subsystem.nqn in listed, listed
