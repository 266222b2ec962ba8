"""Access control and address families."""

import socket
import uuid

from harness.case import case
from harness.targets import MIB, Namespace, Subsystem

from .connect import discovered


@case("allowed-hosts", provokes=r"[Ff]ailed|not allowed|invalid|Invalid|denied")
def allowed_hosts(bench):
    """A host that is not allowed is rejected; an allowed host connects."""
    allowed_nqn = f"nqn.2014-08.org.nvmexpress:uuid:{uuid.uuid4()}"
    other_nqn = f"nqn.2014-08.org.nvmexpress:uuid:{uuid.uuid4()}"
    subsystem = Subsystem("private", [Namespace(mib=16)], hosts=[allowed_nqn])
    bench.serve(subsystem)
    address = bench.target.address()
    rejected = bench.guest.run(f"nvme connect {address} -n {subsystem.nqn} --hostnqn={other_nqn} --hostid={uuid.uuid4()}")
    assert rejected.rc != 0, "a host that is not allowed was accepted"
    assert bench.guest.run(f"grep -l {subsystem.nqn} /sys/class/nvme/*/subsysnqn").rc != 0
    bench.connect(subsystem, f"--hostnqn={allowed_nqn} --hostid={uuid.uuid4()}")
    device = bench.block(subsystem)
    bench.write_random(device, "data", 0, MIB, "64k")
    bench.compare(device, "data", 0, MIB, "64k")


@case("unknown-subsystem", provokes=r"[Ff]ailed|not allowed|invalid|Invalid|denied")
def unknown_subsystem(bench):
    """A connection to a nonexistent subsystem is rejected at once."""
    subsystem = Subsystem("known", [Namespace(mib=16)])
    bench.serve(subsystem)
    rejected = bench.guest.run(f"nvme connect {bench.target.address()} -n {subsystem.nqn}.not", timeout=15)
    assert rejected.rc != 0, "a connection to a nonexistent subsystem was accepted"
    bench.connect(subsystem)


@case("ipv6")
def ipv6(bench):
    """Discovery, connection and data over IPv6."""
    if bench.kind == "ringbolt":
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError as error:
            bench.skip(f"this machine has no IPv6 loopback ({error.strerror})")
    subsystem = Subsystem("six", [Namespace(mib=16)])
    bench.serve(subsystem, families=(4, 6))
    if bench.kind == "ringbolt" and bench.guest.run(f"nc -w 5 fec0::2 {bench.target.port} < /dev/null", 15).rc != 0:
        bench.skip("QEMU's user network does not route IPv6")
    assert any(r["subnqn"] == subsystem.nqn and r["adrfam"] == "ipv6" for r in discovered(bench, family=6))
    bench.connect(subsystem, family=6)
    device = bench.block(subsystem)
    bench.write_random(device, "data", 0, MIB, "64k")
    bench.compare(device, "data", 0, MIB, "64k")
