"""iSCSI: the guest's kernel with open-iscsi as the initiator of the target."""

import os
import re

from harness.case import case
from harness.targets import Namespace, Subsystem

from .machines import NEWEST, NO_IOMMU, PLAIN
from .scsi_debug import AtomicDisk
from .ublk import Serve

MIB = 1 << 20
NODE = "iqn.2016-06.io.spdk:disk"
INITIATOR = "iqn.2026-11.io.ringbolt:guest"
# The host as the guest reaches it.
HOST = "10.0.2.2"
# Microseconds that a read or write of the slow disk takes, so that requests are in flight at any time of a load.
SLOW_US = 10000
# How often the target is killed.
KILLS = 20
SECRETS = [{"user": "guest", "secret": "0123456789abcdef", "muser": "target", "msecret": "fedcba9876543210"}]


def prepare_initiator(guest):
    """Starts open-iscsi's daemon; -> its job."""
    guest.check(f"mkdir -p /etc/iscsi /run/lock/iscsi /var/lib/iscsi && echo InitiatorName={INITIATOR} > "
                "/etc/iscsi/initiatorname.iscsi && echo 'iscsid.startup = /bin/false' > /etc/iscsi/iscsid.conf")
    return guest.spawn("iscsid -f 2>&1")


def create(target, folder, port):
    """A target node with two files as logical units, the second one slow, that wants mutual CHAP; -> its port."""
    for name in ("Disk", "Base"):
        target.rpc("bdev_uring_create", name=name, filename=f"{folder}/{name}", block_size=512)
    latencies = {f"{kind}_{what}_latency": SLOW_US for kind in ("avg", "p99") for what in ("read", "write")}
    target.rpc("bdev_delay_create", name="Slow", base_bdev_name="Base", **latencies)
    target.rpc("iscsi_create_auth_group", tag=1, secrets=SECRETS)
    target.rpc("iscsi_create_initiator_group", tag=1, initiators=[INITIATOR], netmasks=["ANY"])
    target.rpc("iscsi_create_portal_group", tag=1, portals=[{"host": "127.0.0.1", "port": str(port)}])
    luns = [{"bdev_name": "Disk", "lun_id": 0}, {"bdev_name": "Slow", "lun_id": 1}]
    auth = {"require_chap": True, "mutual_chap": True, "chap_group": 1}
    target.rpc("iscsi_create_target_node", name="disk", pg_ig_maps=[{"pg_tag": 1, "ig_tag": 1}], luns=luns, **auth)
    return int(target.rpc("iscsi_get_portal_groups")[0]["portals"][0]["port"])


def configure(guest, port, algorithm, digest):
    """Describes the node to open-iscsi."""
    settings = {
        "node.startup": "manual",
        "node.session.auth.authmethod": "CHAP",
        "node.session.auth.chap_algs": algorithm,
        "node.session.auth.username": SECRETS[0]["user"],
        "node.session.auth.password": SECRETS[0]["secret"],
        "node.session.auth.username_in": SECRETS[0]["muser"],
        "node.session.auth.password_in": SECRETS[0]["msecret"],
        "node.conn[0].iscsi.HeaderDigest": digest,
        "node.conn[0].iscsi.DataDigest": digest,
        "node.session.iscsi.InitialR2T": "Yes" if digest == "None" else "No",
    }
    node = f"iscsiadm -m node -T {NODE} -p {HOST}:{port}"
    guest.check(f"{node} -o delete > /dev/null 2>&1; {node} -o new")
    for name, value in settings.items():
        guest.check(f"{node} -o update -n '{name}' -v '{value}'")


def disks(guest, timeout=30):
    """Waits for the disks of both units; -> their names."""
    found = guest.until("cd /sys/block && ls -d sd? | wc -l | grep -qx 2 && for d in sd?; do "
                        "echo $(readlink $d/device | sed 's/.*://') $d; done", timeout)
    return [line.split()[1] for line in sorted(found.splitlines())]


def kill_under_load(bench, target, guest, disk, port):
    """Kills the target with requests in flight and starts it again; fio verifies what it has written and flushed to ext4."""
    guest.check(f"mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 /dev/{disk} && mkdir /run/slow && "
                f"mount -t ext4 /dev/{disk} /run/slow", 120)
    options = "--ioengine=libaio --direct=1 --rw=randrw --bsrange=4k-64k --iodepth=16 --size=6m --fsync=16"
    load = f"fio --name=load --directory=/run/slow --numjobs=2 {options} --verify=crc32c --verify_fatal=1"
    rounds = guest.spawn(f"while [ ! -e /tmp/stop ]; do {load} || exit 1; echo round; done; echo stopped")
    for _ in range(KILLS):

        def is_under_load():
            statistics = target.rpc("bdev_get_iostat", names=["Slow"])["bdevs"][0]
            return statistics["num_write_ops"] >= 50

        guest.wait(is_under_load, 60, "50 writes", poll=0.02)
        target.kill()
        target.launch()
        create(target, bench.folder, port)
    rounds.expect("^round$", 240)
    guest.check("touch /tmp/stop")
    rounds.expect("^stopped$", 240)
    rounds.check()
    guest.check(f"umount /run/slow && fsck.ext4 -fn /dev/{disk}", 120)


@case("iscsi", on=("ringbolt",), machine=PLAIN, provokes=r"sd[a-z]|scsi|iscsi|EXT4|connection\d", seconds=130)
def iscsi(bench):
    """open-iscsi logs in with mutual CHAP and digests: ext4 under fio verify, discard, resize, kills under load."""
    guest = bench.guest
    target = bench.serve(Subsystem("iscsi", [Namespace(mib=16, block_size=512)]))
    for name, mib in (("Disk", 128), ("Base", 32)):
        with open(f"{bench.folder}/{name}", "wb") as file:
            file.truncate(mib * MIB)
    port = create(target, bench.folder, 0)
    daemon = prepare_initiator(guest)
    node = f"iscsiadm -m node -T {NODE} -p {HOST}:{port}"
    configure(guest, port, "MD5", "None")
    wrong = f"{node} -o update -n node.session.auth.password -v 0123456789abcdee"
    guest.until(f"{wrong} && iscsiadm -m session 2>&1 | grep -q 'No active sessions'", 30)
    refused = guest.run(f"{node} --login 2>&1", 60)
    assert refused.rc != 0 and "authorization failure" in refused.out, refused
    for algorithm, digest in (("MD5", "None"), ("SHA1", "CRC32C"), ("SHA256", "None"), ("SHA3-256", "CRC32C")):
        configure(guest, port, algorithm, digest)
        guest.check(f"{node} --login", 60)
        disk, slow = disks(guest)
        connection = target.rpc("iscsi_get_connections")[0]
        facts = (connection["initiator_name"], connection["header_digest"], connection["data_digest"])
        assert facts == (INITIATOR, digest == "CRC32C", digest == "CRC32C"), connection
        guest.check(f"dd if=/dev/urandom of=/tmp/bytes bs=1M count=4 status=none && "
                    f"dd if=/tmp/bytes of=/dev/{disk} oflag=direct bs=1M status=none && "
                    f"dd if=/dev/{disk} iflag=direct bs=1M count=4 status=none | cmp - /tmp/bytes", 60)
        if algorithm != "SHA3-256":
            guest.check(f"{node} --logout", 60)
            guest.until("! ls /sys/block | grep -q ^sd", 30)
    guest.check(f"mkfs.ext4 -q /dev/{disk} && mount -t ext4 -o discard /dev/{disk} /mnt", 120)
    options = "--ioengine=libaio --direct=1 --bsrange=4k-256k --iodepth=16 --size=16m --verify=crc32c --verify_fatal=1"
    guest.check(f"fio --name=verify --directory=/mnt --rw=randwrite --fallocate=none --numjobs=2 {options}", 240)
    kill_under_load(bench, target, guest, slow, port)
    sums = guest.check("sha256sum /mnt/verify*", 120)
    guest.check("sync && echo 3 > /proc/sys/vm/drop_caches", 60)
    assert guest.check("sha256sum /mnt/verify*", 120) == sums
    guest.check(f"rm /mnt/verify* && sync && umount /mnt && fsck.ext4 -fn /dev/{disk}", 120)
    os.truncate(f"{bench.folder}/Disk", 160 * MIB)
    target.rpc("bdev_uring_rescan", name="Disk")
    guest.until(f"echo 1 > /sys/block/{disk}/device/rescan; [ $(cat /sys/block/{disk}/size) = {160 * MIB // 512} ]", 30)
    guest.check(f"blkdiscard /dev/{disk}", 60)
    assert guest.check(f"dd if=/dev/{disk} bs=1M count=4 status=none | tr -d '\\000' | wc -c").strip() == "0"
    guest.check(f"{node} --logout", 60)
    guest.until("! ls /sys/block | grep -q ^sd", 30)
    assert target.rpc("iscsi_get_connections") == []
    # On TERM it waits for what systemd would do.
    guest.check("killall -KILL iscsid")
    daemon.wait(30)
    assert os.stat(f"{bench.folder}/Disk").st_blocks * 512 < 16 * MIB, "the discard reached the file"


OTHER = "iqn.2026-11.io.ringbolt:other"


class Paths:
    """A target node through two portal groups, and a session of the guest through each, of different initiators."""

    def __init__(self, bench, target):
        self.bench, self.target, self.guest = bench, target, bench.guest
        target.rpc("bdev_uring_create", name="Disk", filename=f"{bench.folder}/Disk", block_size=512)
        target.rpc("iscsi_create_initiator_group", tag=1, initiators=["ANY"], netmasks=["ANY"])
        for tag in (1, 2):
            target.rpc("iscsi_create_portal_group", tag=tag, portals=[{"host": "127.0.0.1", "port": "0"}])
        maps = [{"pg_tag": tag, "ig_tag": 1} for tag in (1, 2)]
        luns = [{"bdev_name": "Disk", "lun_id": 0}]
        target.rpc("iscsi_create_target_node", name="disk", pg_ig_maps=maps, luns=luns)
        groups = target.rpc("iscsi_get_portal_groups")
        self.ports = {group["tag"]: int(group["portals"][0]["port"]) for group in groups}

    def node(self, tag):
        return f"iscsiadm -m node -T {NODE} -p {HOST}:{self.ports[tag]} -I {'default' if tag == 1 else 'other'}"

    def log_in(self, tag):
        node = self.node(tag)
        # A path that is lost fails its commands soon, for the other one.
        self.guest.check(f"{node} -o new && {node} -o update -n node.session.timeo.replacement_timeout -v 2 && "
                         f"{node} --login", 60)

    def disk(self, tag):
        """The disk behind a portal group, by the port of its connection."""
        script = f"""for c in /sys/class/iscsi_connection/*; do
          [ "$(cat $c/persistent_port)" = {self.ports[tag]} ] || continue
          h=${{c##*/connection}}
          ls /sys/class/iscsi_session/session${{h%%:*}}/device/target*/*/block && return 0
        done; return 1"""
        return self.guest.until(script, 30).strip()


def fail_over(paths, disks):
    """dm-multipath follows the access states that the target sets, and the loss of a portal, under fio verify."""
    guest, target = paths.guest, paths.target
    blocks = guest.check(f"cat /sys/block/{disks[1]}/size").strip()
    devices = {tag: guest.check(f"cat /sys/block/{disk}/dev").strip() for tag, disk in disks.items()}
    groups = " ".join(f"round-robin 0 1 1 {devices[tag]} 1000" for tag in (1, 2))
    guest.check(f"dmsetup create --noudevsync mp --table '0 {blocks} multipath 1 queue_if_no_path 1 alua 2 1 {groups}' && "
                "dmsetup mknodes", 30)
    device = "/dev/mapper/mp"

    def active():
        """Tags of the path groups that dm-multipath has in use (A)."""
        status = guest.check("dmsetup status mp")
        found = re.findall(r"([AED]) 0 1 \d+ (\d+:\d+) ([AF])", status)
        return [tag for state, number, _ in found for tag in (1, 2) if state == "A" and devices[tag] == number]

    options = "--ioengine=libaio --direct=1 --rw=randrw --bsrange=4k-64k --iodepth=8 --size=4m --verify=crc32c --verify_fatal=1"
    load = f"fio --name=load --filename={device} {options}"
    rounds = guest.spawn(f"while [ ! -e /tmp/stop ]; do {load} || exit 1; echo round; done; echo stopped")
    rounds.expect("^round$", 120)
    guest.wait(lambda: active() == [1], 60, "the first path in use")
    # The target takes the first path out of service, and then the second one, which first is brought back.
    for standby, used in ((1, 2), (2, 1)):
        target.rpc("iscsi_target_node_set_access_state", name="disk", pg_tag=used, access_state="optimized")
        target.rpc("iscsi_target_node_set_access_state", name="disk", pg_tag=standby, access_state="standby")
        guest.until(f"sg_rtpg -d /dev/{disks[used]} | grep -q standby", 30)
        if used == 1:
            guest.check(f"dmsetup message mp 0 reinstate_path {devices[1]}")
        guest.wait(lambda: active() == [used], 120, f"path {used} in use")
        count = rounds.out.count("round")
        guest.wait(lambda: rounds.out.count("round") > count + 1, 240, "load on it")
    # The second one comes back, and the portal of the first one goes.
    target.rpc("iscsi_target_node_set_access_state", name="disk", pg_tag=2, access_state="optimized")
    guest.check(f"dmsetup message mp 0 reinstate_path {devices[2]}")
    target.rpc("iscsi_delete_portal_group", tag=1)
    guest.wait(lambda: active() == [2], 120, "the second path in use")
    count = rounds.out.count("round")
    guest.wait(lambda: rounds.out.count("round") > count + 1, 240, "load on it")
    guest.check("touch /tmp/stop")
    rounds.expect("^stopped$", 240)
    rounds.check()
    guest.check("dmsetup remove --noudevsync mp", 30)


def reservations(paths, disks):
    """sg_persist of two initiators: who holds the reservation writes, and it is preempted."""
    guest = paths.guest
    one, two = (f"/dev/{disks[tag]}" for tag in (1, 2))
    write = "dd if=/dev/zero oflag=direct bs=4k count=1 status=none of="
    guest.check(f"sg_persist --out --register --param-sark=0xa {one} && "
                f"sg_persist --out --reserve --param-rk=0xa --prout-type=1 {one}", 30)
    status = guest.check(f"sg_persist --in --read-full-status {two}")
    assert INITIATOR in status and "0xa" in status and "Write Exclusive" in status, status
    guest.check(write + one)
    assert guest.run(write + two).rc != 0, "another initiator has written"
    guest.check(f"dd if={two} iflag=direct bs=4k count=1 status=none of=/dev/null")
    guest.check(f"sg_persist --out --register --param-sark=0xb {two} && "
                f"sg_persist --out --preempt --param-rk=0xb --param-sark=0xa --prout-type=1 {two}", 30)
    guest.check(write + two)
    # The first of these reports what the initiator has lost.
    guest.run(f"sg_persist --in --read-keys {one}")
    assert guest.run(write + one).rc != 0, "a preempted initiator has written"
    # To the first initiator again, which is registered by it.
    port = re.search(rf"{INITIATOR},i,0x[0-9a-f]+", status)
    if port is None:
        # Version 1.46 prints name and ISID on lines of their own.
        isid = re.search(r"(?:session id|ISID)[^0-9a-f]*(?:0x)?([0-9a-f]{12})", status)
        assert isid, status
        port = f"{INITIATOR},i,0x{isid.group(1)}"
    else:
        port = port.group(0)
    guest.check(f"sg_persist --out --register-move --param-rk=0xb --param-sark=0xc --unreg --relative-target-port=1 "
                f"--transport-id={port} {two}", 30)
    guest.check(write + one)
    assert guest.run(write + two).rc != 0, "it has moved"
    guest.check(f"sg_persist --out --clear --param-rk=0xc {one}")
    guest.check(write + two)


@case("iscsi-paths", on=("ringbolt",), machine=PLAIN,
      provokes=r"sd[a-z]|scsi|iscsi|EXT4|connection\d|reservation|multipath|device-mapper|alua|dm-\d", seconds=60)
def iscsi_paths(bench):
    """Two portals, two initiators: persistent reservations, and dm-multipath with ALUA fail-over under fio verify."""
    guest = bench.guest
    target = bench.serve(Subsystem("iscsi", [Namespace(mib=16, block_size=512)]))
    with open(f"{bench.folder}/Disk", "wb") as file:
        file.truncate(16 * MIB)
    daemon = prepare_initiator(guest)
    paths = Paths(bench, target)
    guest.until(f"iscsiadm -m iface -I other -o new && iscsiadm -m iface -I other -o update -n iface.initiatorname -v {OTHER}", 30)
    for tag in (1, 2):
        paths.log_in(tag)
    disks_of = {tag: paths.disk(tag) for tag in (1, 2)}
    names = {one["initiator_name"] for one in target.rpc("iscsi_get_connections")}
    assert names == {INITIATOR, OTHER}, names
    reservations(paths, disks_of)
    fail_over(paths, disks_of)
    guest.check(f"{paths.node(2)} --logout; {paths.node(1)} --logout; true", 120)
    guest.until("! ls /sys/block | grep -q ^sd", 60)
    guest.check("killall -KILL iscsid")
    daemon.wait(30)


def write_atomic(lba, blocks):
    """A command that writes /tmp/bytes atomically (SBC-4, section 5.47), without the disk."""
    cdb = bytes([0x9C, 0]) + lba.to_bytes(8, "big") + bytes(2) + blocks.to_bytes(2, "big") + bytes(2)
    return f"sg_raw -s {blocks * 512} -i /tmp/bytes", cdb.hex(" ")


class AtomicUnit:
    """A file or block device of the guest as a logical unit of a target in the guest, to which the guest has logged in."""

    def __init__(self, guest, filename, backing):
        self.guest, self.backing = guest, backing
        self.serve = Serve(guest)
        self.serve.rpc("bdev_uring_create", "name=Atomic", f"filename={filename}")
        self.serve.rpc("iscsi_create_initiator_group", "tag=1", """initiators='["ANY"]'""", """netmasks='["ANY"]'""")
        portals = '[{"host": "127.0.0.1", "port": "3260"}]'
        self.serve.rpc("iscsi_create_portal_group", "tag=1", f"portals='{portals}'")
        maps, luns = '[{"pg_tag": 1, "ig_tag": 1}]', '[{"bdev_name": "Atomic", "lun_id": 0}]'
        self.serve.rpc("iscsi_create_target_node", "name=disk", f"pg_ig_maps='{maps}'", f"luns='{luns}'")
        self.daemon = prepare_initiator(guest)
        self.node = f"iscsiadm -m node -T {NODE} -p 127.0.0.1:3260"
        guest.until(f"{self.node} -o new", 30)
        guest.check(f"{self.node} --login", 60)
        self.disk = guest.until(f"cd /sys/block && ls -d sd? | grep -v {backing.name}", 30).strip()

    def writes(self, runs):
        """Writes runs of (LBA, blocks) atomically: each is one atomic write of the backing disk."""
        self.guest.check(f"head -c {MIB} /dev/urandom > /tmp/bytes")
        self.backing.start_log()
        for lba, blocks in runs:
            command, cdb = write_atomic(lba, blocks)
            self.guest.check(f"{command} /dev/{self.disk} {cdb}", 60)
            self.guest.check(f"dd if=/dev/{self.disk} iflag=direct bs=512 skip={lba} count={blocks} status=none | "
                             f"cmp -n {blocks * 512} - /tmp/bytes", 60)
            assert self.backing.atomic_writes() == 1, (lba, blocks)

    def refuses(self, runs):
        """None of these runs reaches the backing disk."""
        for lba, blocks in runs:
            command, cdb = write_atomic(lba, blocks)
            ran = self.guest.run(f"truncate -s {blocks * 512} /tmp/bytes; {command} /dev/{self.disk} {cdb} 2>&1", 60)
            assert ran.rc == 5 and "Invalid field in cdb" in ran.out, (lba, blocks, ran)
        assert self.backing.atomic_writes() == 0

    def leave(self):
        """Logs out and ends the target."""
        self.guest.check(f"{self.node} --logout", 60)
        self.guest.until(f"[ ! -e /sys/block/{self.disk} ]", 30)
        self.guest.check("killall -KILL iscsid")
        self.daemon.wait(30)
        self.guest.check("kill -TERM $(cat /tmp/ublk.pid)")
        assert self.serve.job.wait(60).rc == 0, self.serve.job.out


def atomic_units(guest, disk):
    """The least and the most bytes of an atomic write, as the guest's kernel has them of a disk."""
    names = ("atomic_write_unit_min_bytes", "atomic_write_unit_max_bytes")
    return [int(line) for line in guest.check("cd /sys/block/{}/queue && cat {} {}".format(disk, *names)).split()]


@case("iscsi-atomic", on=("ringbolt",), machine=NO_IOMMU, provokes=r"sd[a-z]|scsi|iscsi|connection\d", seconds=30)
def iscsi_atomic(bench):
    """WRITE ATOMIC on a disk of the kernel that has atomic writes, and a partition of it: units, one write of the kernel each."""
    guest = bench.guest
    backing = AtomicDisk(guest)
    least, most = atomic_units(guest, backing.name)
    assert 512 <= least < most, (least, most)
    # A command has at most 1 MiB.
    unit, limit = least // 512, min(most, MIB) // 512
    disk = AtomicUnit(guest, f"/dev/{backing.name}", backing)
    # The guest's own initiator believes the page.
    assert atomic_units(guest, disk.disk) == [least, min(most, MIB)]
    disk.writes(((8 * unit, 8 * unit), (3 * unit, unit), (limit, limit)))
    # Not aligned to its length, no power of two, too long, and shorter than a unit if that is more than a block.
    disk.refuses([(4 * unit, 8 * unit), (0, 3 * unit), (0, 2 * limit)] + [(0, unit // 2)] * (unit > 1))
    disk.leave()
    # A partition of 8 MiB at 1 MiB has the units of its disk.
    entry = bytes([0, 0, 0, 0, 0x83, 0, 0, 0]) + (2048).to_bytes(4, "little") + (16384).to_bytes(4, "little")
    for offset, content in ((446, entry), (510, b"\x55\xaa")):
        octal = "".join(f"\\{byte:03o}" for byte in content)
        guest.check(f"printf '{octal}' | dd of=/dev/{backing.name} bs=1 seek={offset} conv=notrunc status=none")
    guest.check(f"sync && blockdev --rereadpt /dev/{backing.name}")
    guest.until(f"[ -b /dev/{backing.name}1 ]", 30)
    disk = AtomicUnit(guest, f"/dev/{backing.name}1", backing)
    assert atomic_units(guest, disk.disk) == [least, min(most, MIB)]
    disk.writes(((8 * unit, 8 * unit), (limit, limit)))
    disk.refuses([(4 * unit, 8 * unit)])
    disk.leave()
    backing.remove()


@case("iscsi-atomic-file", on=("ringbolt",), machine=NEWEST, provokes=r"sd[a-z]|scsi|iscsi|connection\d|EXT4", seconds=60)
def iscsi_atomic_file(bench):
    """WRITE ATOMIC on a file of ext4, with the units that the file system reports, one such write of its disk each."""
    guest = bench.guest
    backing = AtomicDisk(guest)
    # Clusters of four blocks: a unit is a block, and the longest write is a cluster.
    guest.check(f"mkfs.ext4 -q -b 4096 -O bigalloc -C 16384 /dev/{backing.name} && mkdir -p /tmp/ext4 && dmesg -c > /dev/null", 60)
    guest.check(f"mount -t ext4 /dev/{backing.name} /tmp/ext4", 30)
    log = guest.check("dmesg -c")
    reported = re.search(r"atomic writes awu_min: (\d+), awu_max: (\d+)", log)
    assert reported, log
    least, most = (int(number) for number in reported.groups())
    assert 512 < least < most, (least, most)
    guest.check(f"head -c {4 * MIB} /dev/zero > /tmp/ext4/disk && sync")
    unit, limit = least // 512, most // 512
    disk = AtomicUnit(guest, "/tmp/ext4/disk", backing)
    assert atomic_units(guest, disk.disk) == [least, most]
    disk.writes(((limit, limit), (3 * unit, unit), (0, unit)))
    disk.refuses([(unit, limit), (0, 3 * unit), (0, 2 * limit), (0, unit // 2)])
    disk.leave()
    guest.check("umount /tmp/ext4", 30)
    backing.remove()
