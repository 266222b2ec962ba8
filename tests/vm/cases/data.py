"""Data through the guest's block layer: file systems, discard, multiple queues, large transfers."""

from harness.case import case
from harness.targets import MIB, Namespace, Subsystem


@case("ext4", seconds=40)
def ext4(bench):
    """mkfs.ext4, mount, fio with verification, umount, and a clean fsck."""
    subsystem = Subsystem("ext4", [Namespace(mib=256, block_size=512)])
    bench.serve(subsystem)
    bench.connect(subsystem)
    device = bench.block(subsystem)
    bench.guest.check(f"mkfs.ext4 -q {device} && mount -t ext4 {device} /mnt", 60)
    options = ["--rw=randwrite", "--bs=4k", "--iodepth=16", "--size=24m", "--fallocate=none"]
    bench.fio("verify", "/mnt/file", *options, "--verify=crc32c", "--verify_fatal=1", "--fsync=256")
    bench.guest.check("cp /mnt/file /mnt/copy && sync && echo 3 > /proc/sys/vm/drop_caches && cmp /mnt/file /mnt/copy", 60)
    bench.guest.check("umount /mnt", 60)
    bench.guest.check(f"fsck.ext4 -fn {device}", 60)


@case("discard", seconds=20)
def discard(bench):
    """Discarded blocks read as zeroes and are deallocated in the backing file."""
    subsystem = Subsystem("discard", [Namespace(mib=64)])
    namespace = subsystem.namespaces[0]
    target = bench.serve(subsystem)
    bench.connect(subsystem)
    device = bench.block(subsystem)
    name = device.removeprefix("/dev/")
    assert int(bench.guest.check(f"cat /sys/block/{name}/queue/discard_max_bytes")) > 0, "discard is not supported"

    bench.write_random(device, "data", 0, 24 * MIB, "1M")
    before = target.allocated(namespace)
    assert before >= 24 * MIB, f"{before} bytes allocated after writing {24 * MIB}"
    bench.guest.check(f"blkdiscard -o {8 * MIB} -l {8 * MIB} {device}", 60)
    bench.guest.check("dd if=/dev/zero of=/tmp/data bs=1M seek=8 count=8 conv=notrunc status=none")
    bench.compare(device, "data", 0, 24 * MIB, "1M")
    after = target.allocated(namespace)
    assert after <= before - 8 * MIB + 64 * 1024, f"discarding {8 * MIB} bytes changed the allocation from {before} to {after}"

    bench.guest.check(f"blkdiscard -z -o {2 * MIB} -l {MIB} {device}", 60)
    bench.guest.check("dd if=/dev/zero of=/tmp/data bs=1M seek=2 count=1 conv=notrunc status=none")
    bench.compare(device, "data", 0, 24 * MIB, "1M")
    bench.guest.check(f"blkdiscard {device}", 60)
    bench.guest.check("rm /tmp/data; truncate -s 24M /tmp/data")
    bench.compare(device, "data", 0, 24 * MIB, "1M")
    left = target.allocated(namespace)
    assert left <= 64 * 1024, f"{left} bytes are still allocated after discarding everything"


@case("queues", seconds=20)
def queues(bench):
    """Verified I/O on several queues at depth 32, from two CPUs in parallel."""
    subsystem = Subsystem("queues", [Namespace(mib=64)])
    bench.serve(subsystem)
    controller = bench.connect(subsystem, "--nr-io-queues=2 --queue-size=128")
    device = bench.block(subsystem)
    count = int(bench.guest.check(f"cat /sys/class/nvme/{controller}/queue_count"))
    assert count == 3, f"the controller has {count} queues, not the admin queue and two more"
    jobs = ["--numjobs=2", "--iodepth=32", "--size=12m", "--offset_increment=32m", "--cpus_allowed=0,1"]
    jobs += ["--cpus_allowed_policy=split", "--verify=crc32c", "--verify_fatal=1"]
    bench.fio("small", device, "--rw=randwrite", "--bs=4k", *jobs)
    bench.fio("mixed", device, "--rw=randrw", "--bsrange=4k-256k", "--rwmixread=30", *jobs)


@case("large-io", seconds=10)
def large_io(bench):
    """Transfers of the maximum size, at unaligned offsets."""
    subsystem = Subsystem("large", [Namespace(mib=64)])
    bench.serve(subsystem)
    bench.connect(subsystem)
    device = bench.block(subsystem)
    name = device.removeprefix("/dev/")
    bench.guest.check(f"cat /sys/block/{name}/queue/max_hw_sectors_kb > /sys/block/{name}/queue/max_sectors_kb")
    largest = int(bench.guest.check(f"cat /sys/block/{name}/queue/max_sectors_kb"))
    bench.write_random(device, "data", 12 * 1024, 12 * MIB, f"{min(largest, 4096)}k")
    bench.compare(device, "data", 12 * 1024, 12 * MIB, f"{min(largest, 4096)}k")
    bench.compare(device, "data", 12 * 1024, 12 * MIB, "132k")
