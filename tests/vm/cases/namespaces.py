"""Adding, resizing and removing namespaces while another one is in use."""

from harness.case import case, find_block
from harness.image import HOST_NQN
from harness.targets import MIB, Namespace, Subsystem


@case("namespaces", provokes=r"rescanning namespaces", seconds=20)
def namespaces(bench):
    """A namespace is added, resized and removed while another is mounted and under I/O."""
    subsystem = Subsystem("many", [Namespace(mib=128, nsid=1)])
    target = bench.serve(subsystem)
    bench.connect(subsystem)
    first = bench.block(subsystem)
    bench.guest.check(f"mkfs.ext4 -q {first} && mount -t ext4 {first} /mnt", 60)
    # Each run writes and verifies the whole file: a time-based run might end before it verifies anything.
    options = ["--rw=randwrite", "--bs=4k", "--iodepth=4", "--size=8m", "--fallocate=none", "--verify=crc32c"]
    load = bench.start_load("load", "/mnt/file", *options, "--verify_fatal=1")
    bench.guest.until(f'[ "$(stat -c %s /mnt/file)" = {8 * MIB} ]', 30)

    second = Namespace(mib=32, nsid=2)
    target.add_namespace(subsystem, second)
    device = bench.block(subsystem, nsid=2, timeout=10)
    assert bench.blocks_seen(device) == 32 * MIB // 512
    assert bench.guest.check(f"cat /sys/block/{device.removeprefix('/dev/')}/uuid").strip() == second.uuid
    bench.write_random(device, "data", 30 * MIB, MIB, "64k")
    bench.compare(device, "data", 30 * MIB, MIB, "64k")

    target.resize_namespace(subsystem, second, 48)
    bench.guest.until(f"[ $(cat /sys/block/{device.removeprefix('/dev/')}/size) = {48 * MIB // 512} ]", 10)
    bench.compare(device, "data", 30 * MIB, MIB, "64k")
    bench.write_random(device, "more", 46 * MIB, MIB, "64k")
    bench.compare(device, "more", 46 * MIB, MIB, "64k")

    target.remove_namespace(subsystem, second)
    bench.guest.until(f"! ( {find_block(subsystem, 2).replace('return', 'exit')} )", 10)
    bench.end_load(load)
    bench.guest.check("umount /mnt", 60)
    bench.guest.check(f"fsck.ext4 -fn {first}", 60)


@case("namespaces-many")
def namespaces_many(bench):
    """Namespaces with noncontiguous NSIDs have separate data."""
    subsystem = Subsystem("gaps", [Namespace(mib=16, nsid=nsid) for nsid in (1, 3, 8, 32)])
    bench.serve(subsystem)
    bench.connect(subsystem)
    devices = {namespace.nsid: bench.block(subsystem, namespace.nsid) for namespace in subsystem.namespaces}
    for nsid, device in devices.items():
        bench.write_random(device, f"data{nsid}", nsid * 4096, 64 * 1024, "64k")
    for nsid, device in devices.items():
        bench.compare(device, f"data{nsid}", nsid * 4096, 64 * 1024, "64k")


@case("namespaces-protected", on=("ringbolt",))
def namespaces_protected(bench):
    """The kernel uses namespaces with guards of 16 and 64 bits, and has the target insert and strip them."""
    metadata = {"md_interleave": True, "dif_type": 1}
    small = Namespace(mib=16, nsid=1, malloc=True, metadata={"md_size": 8, **metadata})
    wide = Namespace(mib=16, nsid=2, malloc=True, metadata={"md_size": 16, "dif_pi_format": 2, **metadata})
    subsystem = Subsystem("protected", [small, wide])
    bench.serve(subsystem)
    bench.connect(subsystem)
    for namespace in (small, wide):
        device = bench.block(subsystem, namespace.nsid)
        assert bench.blocks_seen(device) == 16 * MIB // 512, namespace
        bench.write_random(device, f"data{namespace.nsid}", 4 * MIB, MIB, "64k")
        bench.compare(device, f"data{namespace.nsid}", 4 * MIB, MIB, "64k")
        bench.guest.check(f"mkfs.ext4 -q {device} && mount -t ext4 {device} /mnt && umount /mnt", 60)


@case("namespaces-visible", on=("ringbolt",), provokes=r"rescanning namespaces")
def namespaces_visible(bench):
    """A namespace is there for the kernel only while it is visible to its host."""
    hidden = Namespace(mib=16, nsid=2, visible=False)
    subsystem = Subsystem("visible", [Namespace(mib=16, nsid=1), hidden])
    target = bench.serve(subsystem)
    bench.connect(subsystem)
    first = bench.block(subsystem)
    absent = f"! ( {find_block(subsystem, 2).replace('return', 'exit')} )"
    bench.guest.check(absent)
    host = {"nqn": subsystem.nqn, "nsid": 2, "host": HOST_NQN}
    target.rpc("nvmf_ns_add_host", **host)
    device = bench.block(subsystem, nsid=2, timeout=10)
    bench.write_random(device, "data", 0, MIB, "64k")
    bench.compare(device, "data", 0, MIB, "64k")
    target.rpc("nvmf_ns_remove_host", **host)
    bench.guest.until(absent, 10)
    bench.write_random(first, "first", 0, MIB, "64k")
    bench.compare(first, "first", 0, MIB, "64k")
