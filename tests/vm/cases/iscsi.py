"""iSCSI: the guest's kernel with open-iscsi as the initiator of the target."""

import os

from harness.case import case
from harness.targets import Namespace, Subsystem

from .machines import PLAIN

MIB = 1 << 20
NODE = "iqn.2016-06.io.spdk:disk"
INITIATOR = "iqn.2026-11.io.ringbolt:guest"
# The host as the guest reaches it.
HOST = "10.0.2.2"
# Microseconds that a read or write of the slow disk takes, so that requests are in flight at any time of a load.
SLOW_US = 10000
# How often the target is killed.
KILLS = 3
SECRETS = [{"user": "guest", "secret": "0123456789abcdef", "muser": "target", "msecret": "fedcba9876543210"}]


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
    """Kills the target with requests in flight and starts it again; fio verifies what it has written."""
    options = "--ioengine=libaio --direct=1 --rw=randrw --bsrange=4k-64k --iodepth=16 --size=8m --verify=crc32c --verify_fatal=1"
    load = f"fio --name=load --filename=/dev/{disk} --numjobs=2 --offset_increment=16m {options}"
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


@case("iscsi", on=("ringbolt",), machine=PLAIN, provokes=r"sd[a-z]|scsi|iscsi|EXT4|connection\d", seconds=90)
def iscsi(bench):
    """open-iscsi logs in with mutual CHAP and digests: ext4 under fio verify, discard, resize, kills under load."""
    guest = bench.guest
    target = bench.serve(Subsystem("iscsi", [Namespace(mib=16, block_size=512)]))
    for name, mib in (("Disk", 128), ("Base", 32)):
        with open(f"{bench.folder}/{name}", "wb") as file:
            file.truncate(mib * MIB)
    port = create(target, bench.folder, 0)
    guest.check(f"mkdir -p /etc/iscsi /run/lock/iscsi /var/lib/iscsi && echo InitiatorName={INITIATOR} > "
                "/etc/iscsi/initiatorname.iscsi && echo 'iscsid.startup = /bin/false' > /etc/iscsi/iscsid.conf")
    daemon = guest.spawn("iscsid -f 2>&1")
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
