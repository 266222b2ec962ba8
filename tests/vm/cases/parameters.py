"""Parameters of the target whose effect the kernel's host reports."""

from harness.case import case
from harness.targets import MIB, Namespace, Subsystem, free_port


@case("parameters", on=("ringbolt",), provokes=r"[Ff]ailed|reset|Reset|resetting|duplicate|busy|Busy", seconds=10)
def parameters(bench):
    """Masked commands, limits, retry delays, filters, and the reset of a subsystem; of two targets of a process."""
    subsystem = Subsystem("first", [Namespace(mib=16)])
    target = bench.serve(subsystem)
    guest = bench.guest
    target.rpc("nvmf_set_crdt", crdt1=5, crdt2=6)
    target.rpc("nvmf_set_config", dup_host_policy="restrict_per_listener")
    controller = bench.connect(subsystem)
    delays = guest.check(f"nvme id-ctrl /dev/{controller} | grep crdt").split()
    assert delays == ["crdt1", ":", "5", "crdt2", ":", "6", "crdt3", ":", "0"], delays
    again = f"nvme connect {target.address()} -n {subsystem.nqn} --duplicate-connect"
    assert guest.run(again).rc != 0, "a second controller of a host was created"
    bench.disconnect(subsystem)

    # Another target, with a transport of its own.
    other, port = Subsystem("second", []), str(free_port())
    of_other = {"nqn": other.nqn, "tgt_name": "second"}
    target.rpc("nvmf_create_target", name="second", discovery_filter=["svcid"])
    target.rpc("nvmf_create_transport", trtype="TCP", tgt_name="second", masked_oncs=["nvmwzsv"])
    target.rpc("nvmf_create_subsystem", **of_other, allow_any_host=True, dmrsl=64, enable_nssr=True)
    target.rpc("bdev_malloc_create", name="m", num_blocks=32768, block_size=512)
    target.rpc("nvmf_subsystem_add_ns", **of_other, namespace={"bdev_name": "m"})
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1"}
    for trsvcid in (port, str(free_port())):
        target.rpc("nvmf_subsystem_add_listener", **of_other, listen_address={**address, "trsvcid": trsvcid})
    place = f"-t tcp -a {target.hosts[4]} -s {port}"
    found = guest.check(f"nvme discover {place}")
    assert found.count(other.nqn) == 1 and subsystem.nqn not in found, found
    guest.check(f"nvme connect {place} -n {other.nqn}")
    controller, device = bench.controller(other), bench.block(other)
    queue = f"/sys/block/{device.removeprefix('/dev/')}/queue"
    assert guest.check(f"cat {queue}/write_zeroes_max_bytes").strip() == "0"
    assert guest.check(f"cat {queue}/discard_max_hw_bytes").strip() == str(64 * 512)
    bench.write_random(device, "data", 0, MIB, "64k")
    guest.check(f"blkdiscard -o {MIB} -l {MIB} {device}")
    guest.check(f"nvme subsystem-reset /dev/{controller}")
    assert bench.controller(other, 60) == controller
    bench.compare(device, "data", 0, MIB, "64k")
    bench.disconnect(other)
    target.rpc("nvmf_delete_target", name="second")
    assert guest.run(f"nvme connect {place} -n {other.nqn}").rc != 0, "a target that was deleted is served"
    bench.connect(subsystem)
