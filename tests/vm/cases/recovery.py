"""Recovery after the target is killed or the host stops responding."""

import hashlib
import time

from harness.case import case
from harness.guest import PATIENCE
from harness.targets import MIB, Namespace, Subsystem

BLOCK = 4096
BLOCKS = 240
KILL_AT = (60, 140)
LOAD = ["--size=8m", "--rw=randwrite", "--bs=16k", "--iodepth=16", "--time_based", "--runtime=5"]


def block_content(sequence):
    """The content of block `sequence`: 128 lines of 32 bytes with its number."""
    return f"ringbolt block {sequence:016d}\n".encode() * (BLOCK // 32)


MAKE_BLOCKS = f"""awk 'BEGIN {{ for (i = 0; i < {BLOCKS}; i++) for (k = 0; k < {BLOCK // 32}; k++)
  printf "ringbolt block %016d\\n", i }}' > /tmp/blocks"""


@case("target-killed", on=("ringbolt",), provokes=r"reconnect|failed|timeout|timed out|I/O error|error recovery|Failed", seconds=45)
def target_killed(bench):
    """The target is killed during writes and restarted: every flushed block is preserved.

    The host's page cache survives the kill, so this shows that no write is acknowledged from process memory
    only. Tests with crash images cover power loss."""
    subsystem = Subsystem("durable", [Namespace(mib=16)])
    namespace = subsystem.namespaces[0]
    target = bench.serve(subsystem)
    bench.connect(subsystem, "--ctrl-loss-tmo=120 --reconnect-delay=1")
    device = bench.block(subsystem)
    bench.guest.check(MAKE_BLOCKS, 60)
    assert bench.guest.check("sha256sum < /tmp/blocks").split()[0] == sha256(range(BLOCKS))

    # Sequential blocks, each flushed before its number is reported to the host.
    one = f"dd if=/tmp/blocks of={device} bs={BLOCK} count=1 skip=$i seek=$i oflag=direct conv=notrunc,fsync status=none"
    writer = bench.guest.spawn(f"i=0; while [ $i -lt {BLOCKS} ]; do {one} || exit 1; echo flushed $i; i=$((i + 1)); done")
    # A concurrent random load, so that writes are in flight when the target is killed.
    load = bench.start_load("load", device, "--offset=4m", *LOAD)
    for moment in KILL_AT:
        writer.expect(f"^flushed {moment}$", 120)
        target.kill()
        last = last_flushed(writer)
        for sequence in range(last + 1):
            stored = target.stored(namespace, sequence * BLOCK, BLOCK)
            assert stored == block_content(sequence), f"block {sequence} was flushed, but is missing in the file after the kill"
        target.launch()
        bench.controller(subsystem, 60)
        # New writes complete after the reconnection.
        writer.expect(f"^flushed {last + 10}$", 90)
    writer.check(120)
    bench.end_load(load)

    assert last_flushed(writer) == BLOCKS - 1
    assert target.digest(namespace, 0, BLOCKS * BLOCK) == sha256(range(BLOCKS)), "the content of the file is wrong"
    bench.compare(device, "blocks", 0, BLOCKS * BLOCK, "64k")


@case("restarts", on=("ringbolt",), provokes=r"reconnect|failed|timeout|timed out|I/O error|error recovery|Failed|buffer_io_error|Retrying", seconds=60)
def restarts(bench):
    """The target is killed and restarted 20 times under a mounted ext4, configured as in the README, without UUIDs.

    The volume keeps its identity, so that every file that was synced is there, and the file system sees no error."""
    subsystem = Subsystem("restarts", [Namespace(mib=64, configured=False)])
    target = bench.serve(subsystem)
    restart_under_ext4(bench, target, subsystem, 20)


def restart_under_ext4(bench, target, subsystem, times):
    """Kills and restarts the target under a mounted ext4 whose files are synced one by one, and checks all of them."""
    bench.connect(subsystem, "--ctrl-loss-tmo=120 --reconnect-delay=1")
    device = bench.block(subsystem)
    identity = f"cat /sys/block/{device.removeprefix('/dev/')}/uuid /sys/block/{device.removeprefix('/dev/')}/nguid"
    before = bench.guest.check(identity)
    bench.guest.check(f"mkfs.ext4 -q {device} && mount -t ext4 -o errors=remount-ro {device} /mnt", 60)
    write = "dd if=/dev/urandom of=/mnt/$i bs=16k count=1 conv=fsync status=none && sha256sum /mnt/$i > /tmp/sum.$i"
    writer = bench.guest.spawn(f"i=0; while [ ! -e /tmp/stop ]; do {write} || exit 1; echo synced $i; i=$((i + 1)); done; echo done")
    synced = 0
    for _ in range(times):
        writer.expect(f"^synced {synced + 3}$", 60)
        target.kill()
        target.launch()
        synced = last_flushed(writer)
    writer.expect(f"^synced {synced + 3}$", 60)
    bench.guest.check("touch /tmp/stop")
    writer.expect("^done$", 60)
    writer.check(60)
    assert bench.guest.check(identity) == before, "the volume has another identity"
    bench.guest.check("echo 3 > /proc/sys/vm/drop_caches; cat /tmp/sum.* > /tmp/sums; sha256sum -c -s /tmp/sums", 60)
    bench.guest.check("grep ' /mnt ext4 rw' /proc/mounts && umount /mnt", 60)
    bench.guest.check(f"fsck.ext4 -fn {device}", 60)


def sha256(sequences):
    return hashlib.sha256(b"".join(map(block_content, sequences))).hexdigest()


def last_flushed(writer):
    return int(writer.out.rstrip().splitlines()[-1].split()[1])


@case("keep-alive", on=("ringbolt",), provokes=r"reconnect|failed|timeout|timed out|I/O error|error recovery|Failed", seconds=30)
def keep_alive(bench):
    """The controller of an unresponsive host is removed after the keep-alive timeout; the host reconnects."""
    subsystem = Subsystem("silent", [Namespace(mib=16)])
    target = bench.serve(subsystem)
    bench.connect(subsystem, "--keep-alive-tmo=5 --reconnect-delay=1 --ctrl-loss-tmo=120")
    device = bench.block(subsystem)
    bench.write_random(device, "data", 0, MIB, "64k")
    # Keep Alive commands preserve the controller of an idle host for twice the timeout.
    before = [c["cntlid"] for c in target.controllers(subsystem)]
    assert len(before) == 1, before
    bench.guest.check("sleep 11", 30)
    assert [c["cntlid"] for c in target.controllers(subsystem)] == before, "an idle host lost its controller"

    bench.guest.qmp("stop")
    stopped = time.monotonic()
    bench.guest.wait(lambda: not target.controllers(subsystem), 12, "removal of the unresponsive host's controller", poll=0.1)
    took = time.monotonic() - stopped
    assert took >= 2, f"the controller was dropped after only {took:.1f} s of silence"
    assert took <= 12 * PATIENCE, took
    bench.guest.qmp("cont")
    bench.guest.wait(lambda: target.controllers(subsystem), 30, "reconnection of the host", poll=0.1)
    bench.controller(subsystem, 30)
    bench.compare(device, "data", 0, MIB, "64k")


@case("host-vanishes", provokes=r"reconnect|failed|timeout|timed out|I/O error|error recovery|Failed", seconds=20)
def host_vanishes(bench):
    """Repeated controller resets under load leave no stale controllers."""
    subsystem = Subsystem("vanish", [Namespace(mib=16)])
    target = bench.serve(subsystem)
    bench.connect(subsystem, "--reconnect-delay=1 --ctrl-loss-tmo=60")
    device = bench.block(subsystem)
    load = bench.start_load("load", device, *LOAD)
    for _ in range(4):
        name = bench.controller(subsystem, 30)
        bench.guest.check(f"nvme reset /dev/{name}", 60)
    bench.controller(subsystem, 30)
    bench.end_load(load)
    bench.write_random(device, "data", 0, MIB, "64k")
    bench.compare(device, "data", 0, MIB, "64k")
    bench.disconnect(subsystem)
    if bench.kind == "ringbolt":
        bench.guest.wait(lambda: not target.controllers(subsystem), 10, "removal of all controllers", poll=0.1)
