"""Logical volumes under the kernel's initiator: snapshots of a mounted file system, trim, and a pool that is full."""

import json
import os
import subprocess

from harness.case import case
from harness.targets import MIB, Subsystem

CLUSTER = 64 * 1024
VOLUME_MIB = 48
# What the kernel and ext4 log when a write fails because the pool is full.
NO_SPACE = r"critical space allocation error|space allocation|I/O error|EXT4-fs|JBD2|Aborting journal|failed|reset"


class Pool:
    """A store on a file, whose volumes are namespaces of one subsystem."""

    def __init__(self, bench, target, subsystem, mib):
        self.bench, self.target, self.subsystem, self.nsid = bench, target, subsystem, 0
        self.path = f"{bench.folder}/pool.raw"
        self.resize(mib)
        target.rpc("bdev_uring_create", name="Pool", filename=self.path, block_size=4096)
        target.rpc("bdev_lvol_create_lvstore", bdev_name="Pool", lvs_name="pool", cluster_sz=CLUSTER)

    def resize(self, mib):
        with open(self.path, "ab") as file:
            file.truncate(mib * MIB)

    def thin(self, name, mib):
        self.target.rpc("bdev_lvol_create", lvs_name="pool", lvol_name=name, size_in_mib=mib, thin_provision=True)

    def clone(self, snapshot, name):
        self.target.rpc("bdev_lvol_clone", snapshot_name=f"pool/{snapshot}", clone_name=name)

    def snapshot(self, name, snapshot):
        self.target.rpc("bdev_lvol_snapshot", lvol_name=f"pool/{name}", snapshot_name=snapshot)

    def attach(self, name):
        """Exports a volume; -> its device in the guest."""
        self.nsid += 1
        namespace = {"bdev_name": f"pool/{name}", "nsid": self.nsid}
        self.target.rpc("nvmf_subsystem_add_ns", nqn=self.subsystem.nqn, namespace=namespace)
        return self.bench.block(self.subsystem, self.nsid, 30)

    def free(self):
        return self.target.rpc("bdev_lvol_get_lvstores", lvs_name="pool")[0]["free_clusters"]

    def volume(self, name):
        return next(it for it in self.target.rpc("bdev_lvol_get_lvols", lvs_name="pool") if it["name"] == name)


@case("lvol", on=("ringbolt",), provokes=NO_SPACE, seconds=60)
def lvol(bench):
    """ext4 on a thin clone: its snapshot while frozen is whole, trim returns clusters, and a full pool is an error."""
    guest, subsystem = bench.guest, Subsystem("lvol", [])
    target = bench.serve(subsystem)
    pool = Pool(bench, target, subsystem, 96)
    # Before there is a namespace: what the host reads of the controller then holds for all that come.
    bench.connect(subsystem)
    work = clone_of_an_image(bench, pool)
    snapshot_while_frozen(bench, pool, work)
    trim(guest, target, pool)
    full(bench, target, pool, work)
    bench.disconnect(subsystem)
    target.stop()
    found = subprocess.run([target.binary, "blob", "check", pool.path], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def clone_of_an_image(bench, pool):
    """A file system on a volume becomes the snapshot of which the volume under test is a clone; -> its device."""
    pool.thin("golden", VOLUME_MIB)
    device = pool.attach("golden")
    queue = f"/sys/block/{device.removeprefix('/dev/')}/queue"
    facts = bench.guest.check(f"cat {queue}/write_cache {queue}/discard_max_bytes").split("\n")
    assert facts[0] == "write back" and int(facts[1]) > 0, f"the host sends no flush or no discard: {facts}"
    bench.guest.check(f"mkfs.ext4 -q {device} && mount -t ext4 {device} /mnt && "
                      "dd if=/dev/urandom of=/mnt/golden bs=64k count=64 conv=fsync status=none && "
                      "sha256sum /mnt/golden > /tmp/golden && umount /mnt", 90)
    pool.snapshot("golden", "image")
    pool.clone("image", "work")
    before = pool.volume("work")
    assert before["is_clone"] and before["num_allocated_clusters"] == 0, before
    work = pool.attach("work")
    bench.guest.check(f"mount -t ext4 -o noatime {work} /mnt && sha256sum -c -s /tmp/golden", 60)
    return work


def snapshot_while_frozen(bench, pool, work):
    """A snapshot by RPC between fsfreeze and thaw: its clone has the files as they were, and fsck finds nothing."""
    guest = bench.guest
    write = "dd if=/dev/urandom of=/mnt/$((i % 24)) bs=16k count=$((i % 13 + 1)) conv=fsync status=none"
    writer = guest.spawn(f"i=0; while [ ! -e /tmp/stop ]; do {write} || exit 1; echo wrote $i; i=$((i + 1)); done; echo done")
    for round_, moment in enumerate((8, 30)):
        writer.expect(f"^wrote {moment}$", 90)
        # Reads of a frozen file system go on; the writer is blocked.
        guest.check(f"fsfreeze --freeze /mnt && (cd /mnt && find . -type f -exec sha256sum {{}} +) > /tmp/sums{round_}", 60)
        pool.snapshot("work", f"frozen{round_}")
        guest.check("fsfreeze --unfreeze /mnt", 30)
    count = len(writer.out.splitlines())
    writer.expect(f"^wrote {count + 12}$", 90)
    guest.check("touch /tmp/stop")
    writer.expect("^done$", 60)
    writer.check(30)
    for round_ in range(2):
        pool.clone(f"frozen{round_}", f"copy{round_}")
        copy = pool.attach(f"copy{round_}")
        guest.check(f"fsck.ext4 -fn {copy}", 60)
        check = (f"mkdir -p /tmp/copy && mount -t ext4 -o ro {copy} /tmp/copy && cd /tmp/copy && sha256sum -c -s /tmp/sums{round_} &&"
                 f" find . -type f | sort > /tmp/found && sed 's/^[0-9a-f]*  //' /tmp/sums{round_} | sort | cmp - /tmp/found &&"
                 " cd / && umount /tmp/copy")
        guest.check(check, 60)


def trim(guest, target, pool):
    """The mounted clone gets no parent any more; what fstrim discards is free for others then."""
    for _ in range(3):
        target.rpc("bdev_lvol_decouple_parent", name="pool/work")
    assert not pool.volume("work")["is_clone"], pool.volume("work")
    guest.check("sha256sum -c -s /tmp/golden && dd if=/dev/urandom of=/mnt/big bs=64k count=160 conv=fsync status=none", 60)
    with_big = pool.free()
    guest.check("rm /mnt/big && sync && fstrim /mnt", 60)
    freed = pool.free() - with_big
    # ext4's first and last extents may share clusters with other data.
    assert freed >= 150, f"fstrim has returned {freed} clusters of {CLUSTER} bytes, after 160 were written"
    guest.check("echo 3 > /proc/sys/vm/drop_caches && sha256sum -c -s /tmp/golden", 60)


def full(bench, target, pool, work):
    """A write for which the pool has no cluster fails at once, with ENOSPC; what has clusters is written; growth helps."""
    guest = bench.guest
    pool.thin("large", 256)
    large = pool.attach("large")
    done = guest.run(f"dd if=/dev/zero of={large} bs=64k count=1024 oflag=direct status=none 2>&1 && echo all zeroes", 90)
    assert "all zeroes" in done.out, "writes of zeroes fit, up to here"
    done = guest.run(f"dd if=/dev/urandom of={large} bs=64k count=4096 oflag=direct status=none 2>&1", 120)
    assert done.rc != 0 and "No space left on device" in done.out, f"not ENOSPC: {done}"
    assert pool.free() == 0, pool.free()
    # What it has, it can write and read; a file system ends its write with an error, too.
    guest.check(f"dd if=/dev/urandom of={large} bs=64k count=16 oflag=direct conv=notrunc status=none", 60)
    guest.check("sha256sum -c -s /tmp/golden", 60)
    done = guest.run("dd if=/dev/urandom of=/mnt/toomuch bs=64k count=128 conv=fsync 2>&1", 90)
    assert done.rc != 0 and ("No space" in done.out or "Input/output" in done.out or "Read-only" in done.out), done
    pool.resize(192)
    target.rpc("bdev_uring_rescan", name="Pool")
    target.rpc("bdev_lvol_grow_lvstore", lvs_name="pool")
    assert pool.free() >= 1400, pool.free()
    guest.check(f"umount /mnt && mount -t ext4 {work} /mnt && sha256sum -c -s /tmp/golden && rm -f /mnt/toomuch && "
                "dd if=/dev/urandom of=/mnt/after bs=64k count=64 conv=fsync status=none && umount /mnt", 90)
    # Errors that were marked when the pool was full are mended, and nothing else is wrong.
    repaired = guest.run(f"fsck.ext4 -fy {work}", 90)
    assert repaired.rc in (0, 1), repaired
    guest.check(f"fsck.ext4 -fn {work}", 60)
    assert os.stat(pool.path).st_size == 192 * MIB


@case("lvol-stops", on=("ringbolt",), provokes=r"reconnect|failed|timeout|timed out|I/O error|error recovery|Failed|Retrying", seconds=60)
def lvol_stops(bench):
    """The target is stopped with SIGTERM and started again four times under ext4 on a thin volume: no I/O fails."""
    guest, subsystem = bench.guest, Subsystem("lvol", [])
    target = bench.serve(subsystem)
    pool = Pool(bench, target, subsystem, 96)
    pool.thin("work", VOLUME_MIB)
    target.rpc("nvmf_subsystem_add_ns", nqn=subsystem.nqn, namespace={"bdev_name": "pool/work", "nsid": 1})
    # It names the volume, which is found when the pool has been read.
    with open(target.config, "w", encoding="utf-8") as file:
        json.dump(target.rpc("save_config"), file)
    bench.connect(subsystem, "--ctrl-loss-tmo=120 --reconnect-delay=1")
    device = bench.block(subsystem)
    guest.check(f"mkfs.ext4 -q {device} && mount -t ext4 -o errors=remount-ro {device} /mnt", 60)
    write = ("dd if=/dev/urandom of=/mnt/$((i % 90)) bs=16k count=16 conv=fsync status=none &&"
             " sha256sum /mnt/$((i % 90)) > /tmp/sum.$((i % 90))")
    writer = guest.spawn(f"i=0; while [ ! -e /tmp/stop ]; do {write} || exit 1; echo synced $i; i=$((i + 1)); done; echo done")
    for _ in range(4):
        writer.expect(f"^synced {len(writer.out.splitlines()) + 3}$", 60)
        target.stop()
        target.launch()
    writer.expect(f"^synced {len(writer.out.splitlines()) + 3}$", 60)
    guest.check("touch /tmp/stop")
    writer.expect("^done$", 60)
    writer.check(30)
    # What a path cannot do is done by the next one, and no error gets to the file system.
    guest.check("! dmesg | grep 'Buffer I/O error\\|EXT4-fs error'")
    guest.check("echo 3 > /proc/sys/vm/drop_caches; cat /tmp/sum.* > /tmp/sums; sha256sum -c -s /tmp/sums", 60)
    guest.check(f"grep ' /mnt ext4 rw' /proc/mounts && umount /mnt && fsck.ext4 -fn {device}", 60)
