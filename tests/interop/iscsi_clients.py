#!/usr/bin/python3 -B
"""The iSCSI target of `ringbolt serve` against initiators of other projects, and against hostile ones.

    RINGBOLT=target/debug/ringbolt tests/interop/iscsi_clients.py [CASE...]

Each case prints one line. A case whose program is missing is SKIPPED, with the reason. Random data comes from a seed,
which is printed (INTEROP_SEED=N repeats it).
"""

import base64
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time

import serving
from serving import MIB, Moves, Skipped, program, random_bytes, run

INITIATOR = "iqn.2026-11.io.ringbolt:initiator"


class Server(serving.Server):
    def portal_group(self, tag=1, **params):
        """A portal group on any free port; its address."""
        self.rpc("iscsi_create_portal_group", tag=tag, portals=[{"host": "127.0.0.1", "port": "0"}], **params)
        groups = {group["tag"]: group for group in self.rpc("iscsi_get_portal_groups")}
        return f"127.0.0.1:{groups[tag]['portals'][0]['port']}"

    def node(self, name, *bdevs, tags=(1,), **params):
        """A target node for anyone; its name."""
        if not self.rpc("iscsi_get_initiator_groups"):
            self.rpc("iscsi_create_initiator_group", tag=1, initiators=["ANY"], netmasks=["127.0.0.0/8"])
        luns = [{"bdev_name": bdev, "lun_id": lun} for lun, bdev in enumerate(bdevs)]
        maps = [{"pg_tag": tag, "ig_tag": 1} for tag in tags]
        self.rpc("iscsi_create_target_node", name=name, alias_name="", pg_ig_maps=maps, luns=luns, **params)
        return f"iqn.2016-06.io.spdk:{name}"

    def disk(self, **params):
        """A target node with one bdev in memory; its URL."""
        address = self.portal_group()
        return f"iscsi://{address}/{self.node('disk', self.malloc(), **params)}/0"


# What iscsi-test-cu does not test here, and why.
SKIPS = {
    "BLK_TO_BLK_OFF_SEG_DESCR not supported": "copies have no offsets in bytes",
    "BUSY_TIMEOUT_PERIOD is undefined.": "the unit is never busy for long",
    "LBPPB < 2. Skipping test": "physical blocks are as large as logical ones",
    "Logical unit is not removable. Skipping test.": "volumes are not removable",
    "Media is not removable.": "volumes are not removable",
    "Logical unit is not write-protected. Skipping test.": "the volume can be written",
    "SANITIZE CRYPTO_ERASE is not implemented according to REPORT_SUPPORTED_OPCODES.": "the unit has no keys",
    "SANITIZE OVERWRITE is not implemented according to REPORT_SUPPORTED_OPCODES.":
        "overwriting a thin volume leaves what its blocks were before",
    "Not an iSCSI device. Skipping test": "an earlier test has ended the session",
    "Third-party Copy VPD page is not implemented.": "copies are reported by RECEIVE COPY RESULTS",
    "This test requires an iSCSI session with CHAP_A=5": "case chap has logins with CHAP",
    "WRITEATOMIC16 is not implemented.": "memory promises no atomic writes",
    "WRITESAME10 does not support 0-blocks.": "WSNZ is set",
    "WRITESAME16 does not support 0-blocks.": "WSNZ is set",
}


# It demands that SendTargets=All lists targets in a normal session, where RFC 7143 (appendix C) forbids that.
OTHER_RULES = "iSCSI.iSCSISendTargets"


def suites_of(suite):
    """What to run of libiscsi's suite, all of it unless it has tests that follow other rules."""
    listed = run(suite, "-l").split()
    if OTHER_RULES not in listed:
        return ["ALL"]
    print(f"  not run: {OTHER_RULES}")
    return ["SCSI"] + [one for one in listed if re.fullmatch(r"iSCSI\.\w+", one) and one != OTHER_RULES]


def run_suite(server):
    """libiscsi's test suite passes, with two paths to the unit; each skip is known."""
    suite = program("iscsi-test-cu")
    addresses = [server.portal_group(1), server.portal_group(2)]
    name = server.node("disk", server.malloc(), tags=(1, 2))
    urls = [f"iscsi://{address}/{name}/0" for address in addresses]
    skipped, passed = [], 0
    for tests in suites_of(suite):
        done = subprocess.run([suite, "--dataloss", "--allow-sanitize", "-n", "-S", "-t", tests, *urls],
                              capture_output=True, text=True, timeout=300)
        output = done.stdout + done.stderr
        summary = re.search(r"tests\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)", output)
        failed = re.findall(r"^Suite .* had failures:$|^ +\d+\. test_.*", output, re.MULTILINE)
        assert summary, output[-2000:]
        total, ran, succeeded, failures = map(int, summary.groups())
        assert failures == 0 and succeeded == ran == total > 0, (tests, failed)
        skipped += re.findall(r"\[SKIPPED\] (.*)", output)
        passed += succeeded
    unknown = sorted(set(skipped) - SKIPS.keys())
    assert not unknown, f"skipped without a known reason: {unknown}"
    for text in sorted(set(skipped)):
        print(f"  {skipped.count(text)} parts not tested: {text} ({SKIPS[text]})")
    print(f"  {passed} tests passed")


def case_suite(server):
    """libiscsi's test suite."""
    run_suite(server)


def case_moves(server):
    """libiscsi's test suite and qemu-img do not notice that their connections move between cores."""
    program("iscsi-test-cu")
    with Moves(server, at_least=20):
        run_suite(server)


def case_moves_qemu_img(server):
    """qemu-img does not notice that its connections move between cores, with digests and without."""
    with Moves(server):
        case_qemu_img(server)


def case_blocks_of_520(server):
    """libiscsi's test suite passes on a unit with blocks of 520 bytes: SCSI has any length, other initiators do not."""
    suite = program("iscsi-test-cu")
    server.rpc("bdev_malloc_create", name="Malloc520", num_blocks=65536, block_size=512, md_size=8, md_interleave=True)
    addresses = [server.portal_group(1), server.portal_group(2)]
    name = server.node("disk", "Malloc520", tags=(1, 2))
    urls = [f"iscsi://{address}/{name}/0" for address in addresses]
    capacity = run(program("iscsi-readcapacity16"), urls[0])
    assert "LOGICAL BLOCK LENGTH IN BYTES:520" in capacity, capacity
    done = subprocess.run([suite, "--dataloss", "--allow-sanitize", "-n", "-S", "-t", "ALL", *urls],
                          capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    failed = re.findall(r"^Suite (\w+), Test (\w+) had failures", output, re.MULTILINE)
    # It writes 2048 blocks with one command: more than 1 MiB.
    assert failed == [("ExtendedCopy", "Simple")], failed
    summary = re.search(r"tests\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)", output)
    assert summary and int(summary[3]) > 200, output[-2000:]


def case_atomic(server):
    """libiscsi's tests of WRITE ATOMIC pass on a bdev that promises atomic writes: an image of a store."""
    suite = program("iscsi-test-cu")
    disk = f"{server.folder}/store"
    with open(disk, "wb") as file:
        file.truncate(1 << 30)
    server.rpc("bdev_uring_create", name="Disk", filename=disk, block_size=512)
    server.rpc("store_format", bdev_name="Disk")
    server.rpc("store_open", bdev_name="Disk", name="s")
    image = server.rpc("store_image_create", store="s", name="image", size=64 * MIB)
    url = f"iscsi://{server.portal_group()}/{server.node('disk', image)}/0"
    done = subprocess.run([suite, "--dataloss", "-n", "-S", "-t", "SCSI.WriteAtomic16", url], capture_output=True,
                          text=True, timeout=120)
    output = done.stdout + done.stderr
    summary = re.search(r"tests\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)", output)
    assert summary and summary[4] == "0" and int(summary[1]) >= 6, output[-2000:]
    assert "[SKIPPED]" not in output, output


def case_discovery(server):
    """Initiators see the targets that they may log in to, under the address that they have reached."""
    ls, inquiry = program("iscsi-ls"), program("iscsi-inq")
    address = server.portal_group()
    first, second = server.node("disk1", server.malloc("Malloc1")), server.node("disk2", server.malloc("Malloc2", 8, 4096))
    server.rpc("iscsi_create_initiator_group", tag=7, initiators=["iqn.2026-11.io.ringbolt:other"], netmasks=["ANY"])
    server.rpc("iscsi_create_target_node", name="disk3", pg_ig_maps=[{"pg_tag": 1, "ig_tag": 7}], luns=[])
    listed = run(ls, "-i", INITIATOR, "-s", f"iscsi://{address}/")
    found = sorted(re.findall(r"Target:(\S+) Portal:(\S+)", listed))
    assert found == [(first, f"{address},1"), (second, f"{address},1")], listed
    assert listed.count("DIRECT_ACCESS") == 2, listed
    other = run(ls, "-i", "iqn.2026-11.io.ringbolt:other", f"iscsi://{address}/")
    assert "disk3" in other, other
    refused = subprocess.run([inquiry, "-i", INITIATOR, f"iscsi://{address}/iqn.2016-06.io.spdk:disk3/0"],
                             capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0 and "Authorization failure" in refused.stderr + refused.stdout, refused
    serial = run(inquiry, "-e", "1", "-c", "128", f"iscsi://{address}/{first}/0")
    uuid = server.rpc("bdev_get_bdevs", name="Malloc1")[0]["uuid"]
    assert uuid.replace("-", "") in serial.lower().replace("-", ""), (uuid, serial)


def case_qemu_img(server):
    """qemu-img copies to a volume and compares, with digests and without."""
    qemu_img = program("qemu-img")
    image = f"{server.folder}/image"
    with open(image, "wb") as file:
        file.write(random_bytes(64 * MIB))
    url = server.disk()
    portal, name = url.removeprefix("iscsi://").split("/")[:2]
    for digest in ["none", "crc32c"]:
        target = f"driver=iscsi,transport=tcp,portal={portal},target={name},lun=0,header-digest={digest}"
        run(qemu_img, "convert", "-n", "--target-image-opts", image, target)
        run(qemu_img, "compare", "--image-opts", f"driver=file,filename={image}", target)


def case_sessions(server):
    """Sessions on several cores serve one unit at once, each with what all have written."""
    perf = program("iscsi-perf")
    url = server.disk()
    server.rpc("iscsi_enable_histogram", name="disk", enable=True)
    load = [subprocess.Popen([perf, "-b", "8", "-m", "32", "-t", "2", "-i", f"{INITIATOR}{number}", url],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for number in range(4)]
    deadline = time.monotonic() + 20
    while [one["state"] for one in server.rpc("iscsi_get_connections")] != ["running"] * 4:
        assert time.monotonic() < deadline, "four initiators do not log in"
    connections = server.rpc("iscsi_get_connections")
    cpus = [one["lcore"] for one in server.rpc("framework_get_reactors")["reactors"]]
    assert len({one["tsih"] for one in connections}) == 4, connections
    for one in connections:
        described = [one[name] for name in ("state", "login_phase", "initiator_addr", "target_addr")]
        assert described == ["running", "full_feature_phase", "127.0.0.1", "127.0.0.1"], one
        assert one["thread_name"] == f"reactor_{cpus.index(one['lcore_id'])}", (one, cpus)
    cores = {one["lcore_id"] for one in connections}
    assert len(cores) == 2 or os.cpu_count() == 1, connections
    for one in load:
        output = one.communicate(timeout=60)[0]
        assert one.returncode == 0 and "finished" in output, output
    while server.rpc("iscsi_get_connections"):
        assert time.monotonic() < deadline + 20, "connections are left"
    reads = server.rpc("bdev_get_iostat", names=["Malloc0"])["bdevs"][0]["num_read_ops"]
    assert reads > 100
    # Every command of all sessions is in the target node's histogram: those reads, and a few others of each.
    histogram = server.rpc("iscsi_get_histogram", name="disk")
    counts = struct.unpack("<7424Q", base64.b64decode(histogram["histogram"]))
    assert len(counts) == histogram["max_range"] - histogram["min_range"] + 1 << histogram["granularity"]
    assert reads <= sum(counts) <= reads + 100, (reads, sum(counts))
    server.rpc("iscsi_enable_histogram", name="disk", enable=False)
    assert "iscsi_enable_histogram" not in json.dumps(server.rpc("save_config"))


def case_chap(server):
    """Initiators authenticate themselves, and the target too; secrets that are wrong or missing are refused."""
    inquiry = program("iscsi-inq")
    address = server.portal_group()
    server.rpc("iscsi_create_auth_group", tag=1, secrets=[
        {"user": "host", "secret": "0123456789abcdef", "muser": "target", "msecret": "fedcba9876543210"}])
    server.rpc("iscsi_auth_group_add_secret", tag=1, user="other", secret="another secret")
    name = server.node("disk", server.malloc(), require_chap=True, chap_group=1)

    def log_in(credentials, query=""):
        done = subprocess.run([inquiry, f"iscsi://{credentials}{address}/{name}/0{query}"], capture_output=True,
                              text=True, timeout=60)
        return done.returncode == 0

    mutual = "?target_user=target&target_password=fedcba9876543210"
    assert log_in("host%0123456789abcdef@")
    assert log_in("host%0123456789abcdef@", mutual)
    assert log_in("other%another secret@")
    assert not log_in("")
    assert not log_in("host%0123456789abcdee@")
    assert not log_in("nobody%0123456789abcdef@")
    assert not log_in("host%0123456789abcdef@", "?target_user=target&target_password=wrong")
    server.rpc("iscsi_target_node_set_auth", name="disk", require_chap=True, mutual_chap=True, chap_group=1)
    assert not log_in("host%0123456789abcdef@")
    assert log_in("host%0123456789abcdef@", mutual)
    # Discovery has a policy of its own.
    ls = program("iscsi-ls")
    assert name in run(ls, f"iscsi://{address}/")
    server.rpc("iscsi_set_discovery_auth", require_chap=True, chap_group=1)
    refused = subprocess.run([ls, f"iscsi://{address}/"], capture_output=True, text=True, timeout=60)
    assert name not in refused.stdout, refused
    assert name in run(ls, f"iscsi://host%0123456789abcdef@{address}/")
    saved = json.dumps(server.rpc("save_config"))
    assert "fedcba9876543210" in saved and "iscsi_set_discovery_auth" in saved, saved
    assert "0123456789abcdef" not in json.dumps(server.rpc("iscsi_get_auth_groups"))
    assert "0123456789abcdef" not in open(f"{server.folder}/serve.log").read()


def case_redirect(server):
    """Initiators are sent to another portal, which discovery does not list."""
    inquiry, ls = program("iscsi-inq"), program("iscsi-ls")
    public, private = server.portal_group(1), server.portal_group(2, private=True)
    name = server.node("disk", server.malloc(), tags=(1, 2))
    listed = run(ls, f"iscsi://{public}/")
    assert public in listed and private not in listed, listed
    host, port = private.split(":")
    server.rpc("iscsi_target_node_set_redirect", name="disk", pg_tag=1, redirect_host=host, redirect_port=port)
    run(inquiry, f"iscsi://{public}/{name}/0")
    assert "redirect_port" in json.dumps(server.rpc("save_config"))
    # A portal group that waits is reached when it is started.
    server.rpc("iscsi_create_portal_group", tag=3, portals=[{"host": "127.0.0.1", "port": "0"}], wait=True)
    waiting = next(group for group in server.rpc("iscsi_get_portal_groups") if group["tag"] == 3)
    assert waiting["portals"][0]["port"] == "0", waiting
    server.rpc("iscsi_target_node_add_pg_ig_maps", name="disk", pg_ig_maps=[{"pg_tag": 3, "ig_tag": 1}])
    server.rpc("iscsi_start_portal_group", tag=3)
    started = next(group for group in server.rpc("iscsi_get_portal_groups") if group["tag"] == 3)
    run(inquiry, f"iscsi://127.0.0.1:{started['portals'][0]['port']}/{name}/0")
    counts = server.rpc("iscsi_get_stats")
    assert counts.keys() == {"invalid", "running", "exiting", "exited", "peers"}, counts


def case_configuration(server):
    """A configuration is saved and loaded; what is deleted is gone for initiators."""
    inquiry = program("iscsi-inq")
    url = server.disk()
    saved = server.rpc("save_config")
    calls = [call for one in saved["subsystems"] if one["subsystem"] == "iscsi" for call in one["config"]]
    methods = ["iscsi_create_portal_group", "iscsi_create_initiator_group", "iscsi_create_target_node"]
    assert [call["method"] for call in calls] == methods, calls
    server.rpc("iscsi_delete_target_node", name="disk")
    gone = subprocess.run([inquiry, url], capture_output=True, text=True, timeout=60)
    assert gone.returncode != 0 and "Target not found" in gone.stderr + gone.stdout, gone
    server.rpc("iscsi_delete_portal_group", tag=1)
    server.rpc("iscsi_delete_initiator_group", tag=1)
    for call in calls:
        server.rpc(call["method"], **call["params"])
    run(inquiry, url)
    assert server.rpc("save_config") == saved
    # A logical unit that is added, and a device that is removed with its unit.
    server.rpc("iscsi_target_node_add_lun", name="disk", bdev_name=server.malloc("Malloc1"))
    second = url[:-1] + "1"
    run(inquiry, second)
    server.rpc("bdev_malloc_delete", name="Malloc1")
    absent = subprocess.run([inquiry, second], capture_output=True, text=True, timeout=60)
    assert "LOGICAL_UNIT_NOT_SUPPORTED" in absent.stderr + absent.stdout, absent


class Connection:
    """One connection of a session: libiscsi and open-iscsi have no more than one each."""

    def __init__(self, url, cid, tsih=0, cmd_sn=1, initiator=INITIATOR):
        portal, name = url.removeprefix("iscsi://").split("/")[:2]
        host, port = portal.split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=30)
        keys = {"InitiatorName": initiator, "TargetName": name}
        if tsih == 0:
            keys |= {"MaxConnections": "4", "ImmediateData": "Yes"}
        self.socket.sendall(login_pdu(keys, cmd_sn, tsih, cid))
        header, _ = self.receive()
        self.status, self.tsih = struct.unpack_from(">H", header, 36)[0], struct.unpack_from(">H", header, 14)[0]

    def receive(self):
        header = self.receive_exactly(48)
        length = int.from_bytes(header[5:8])
        return header, self.receive_exactly((length + 3) // 4 * 4)[:length]

    def receive_exactly(self, count):
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            assert part, "the target has closed the connection"
            data += part
        return data

    def is_closed(self):
        try:
            return not self.socket.recv(65536)
        except ConnectionError:
            return True

    def command(self, cmd_sn, cdb, data_out=b"", data_in_bytes=0):
        flags = 0x80 | (0x20 if data_out else 0) | (0x40 if data_in_bytes else 0)
        length = len(data_out) or data_in_bytes
        header = struct.pack(">BB2xI8xIIII16s", 1, flags, len(data_out), 1000 + cmd_sn, length, cmd_sn, 0, cdb)
        self.socket.sendall(header + data_out)

    def answer(self):
        """The status of the next command that is answered, its task tag, and its data."""
        data = b""
        while True:
            header, part = self.receive()
            opcode = header[0] & 0x3F
            if opcode == 0x25:
                data += part
            if opcode == 0x21 or opcode == 0x25 and header[1] & 1:
                return header[3], struct.unpack_from(">I", header, 16)[0] - 1000, data


def case_cores(server):
    """A connection's core is the number of its processor, whichever reactor of the program that is."""
    if os.cpu_count() == 1:
        raise Skipped("one processor")
    folder = f"{server.folder}/second"
    os.mkdir(folder)
    pinned = Server(folder, cores="1")
    connection = Connection(pinned.disk(), 1)
    assert connection.status == 0, connection.status
    [described] = pinned.rpc("iscsi_get_connections")
    assert (described["lcore_id"], described["thread_name"]) == (1, "reactor_0"), described
    pinned.end()


def case_connections(server):
    """Connections of one session, on several cores, serve one unit in the order of the session's commands."""
    url = server.disk()
    one = Connection(url, 1)
    assert one.status == 0, one.status
    two = Connection(url, 2, one.tsih)
    assert (two.status, two.tsih) == (0, one.tsih)
    assert Connection(url, 3, one.tsih).status == 0x0206, "too many connections"
    connections = server.rpc("iscsi_get_connections")
    assert sorted(one["cid"] for one in connections) == [1, 2], connections
    assert len({one["lcore_id"] for one in connections}) == 2 or os.cpu_count() == 1, connections
    one.command(1, bytes(16))
    assert one.answer()[:2] == (2, 1), "the unit attention of a new session"
    write = lambda lba: struct.pack(">BBIBHB6x", 0x2A, 0, lba, 0, 1, 0)
    read = lambda lba: struct.pack(">BBIBHB6x", 0x28, 0, lba, 0, 1, 0)
    # Each command on the connection that chance selects, at most 32 in flight; answers come in any order.
    chance, cmd_sn, unanswered = serving.random.Random(serving.SEED), 2, {one: 0, two: 0}
    blocks = {lba: chance.randbytes(512) for lba in range(2000)}
    for lba, data in blocks.items():
        connection = chance.choice([one, two])
        connection.command(cmd_sn, write(lba), data)
        unanswered[connection] += 1
        cmd_sn += 1
        while sum(unanswered.values()) >= 32:
            connection = max(unanswered, key=unanswered.get)
            assert connection.answer()[0] == 0
            unanswered[connection] -= 1
    for connection, count in unanswered.items():
        assert all(connection.answer()[0] == 0 for _ in range(count))
    for lba, data in blocks.items():
        connection = chance.choice([one, two])
        connection.command(cmd_sn, read(lba), data_in_bytes=512)
        assert connection.answer() == (0, cmd_sn, data), lba
        cmd_sn += 1
    # A command waits for the one before it, on the other connection.
    two.command(cmd_sn + 1, bytes(16))
    two.socket.settimeout(0.3)
    try:
        raise AssertionError(f"it has not waited: {two.answer()}")
    except TimeoutError:
        two.socket.settimeout(30)
    one.command(cmd_sn, bytes(16))
    assert (one.answer()[:2], two.answer()[:2]) == ((0, cmd_sn), (0, cmd_sn + 1))
    # A connection replaces its predecessor, and a session its own.
    again = Connection(url, 2, one.tsih, cmd_sn + 2)
    assert again.status == 0 and two.is_closed()
    again.command(cmd_sn + 2, read(7), data_in_bytes=512)
    assert again.answer()[2] == blocks[7]
    new = Connection(url, 1)
    assert new.status == 0 and one.is_closed() and again.is_closed()
    new.socket.close()


class Registrant:
    """An initiator that registers and reserves (SPC-4, sections 6.15 and 6.16)."""

    def __init__(self, url, name):
        self.connection, self.cmd_sn = Connection(url, 1, initiator=f"{INITIATOR}-{name}"), 0
        assert self.execute(bytes(6))[0] == 2, "the unit attention of a new session"

    def execute(self, cdb, data_out=b"", data_in_bytes=0):
        """-> status and data."""
        self.cmd_sn += 1
        self.connection.command(self.cmd_sn, cdb, data_out, data_in_bytes)
        status, _, data = self.connection.answer()
        return status, data

    def change(self, action, kind, key, action_key, flags=0):
        """PERSISTENT RESERVE OUT; -> status."""
        parameters = struct.pack(">QQIB3x", key, action_key, 0, flags)
        return self.execute(struct.pack(">BBBHIB", 0x5F, action, kind, 0, len(parameters), 0), parameters)[0]

    def keys(self):
        data = self.execute(struct.pack(">BB5xHB", 0x5E, 0, 256, 0), data_in_bytes=256)[1]
        return [int.from_bytes(data[at:at + 8]) for at in range(8, 8 + int.from_bytes(data[4:8]), 8)]

    def write(self):
        """-> status."""
        return self.execute(struct.pack(">BBIBHB", 0x2A, 0, 0, 0, 1, 0), bytes(512))[0]


def case_persistence(server):
    """Persistent reservations with APTPL are there after SIGKILL, with their exclusions; the last ones without it are not."""
    register, reserve, aptpl, write_exclusive, conflict = 0, 1, 1, 1, 0x18
    file = f"{server.folder}/reservations"

    def serve():
        uuid = "9c4e6f0a-3b6d-4a53-a4ef-0c6d0fb40d4f"
        server.rpc("bdev_malloc_create", name="Malloc0", num_blocks=2048, block_size=512, uuid=uuid)
        address = server.portal_group()
        name = server.node("disk")
        server.rpc("iscsi_target_node_add_lun", name="disk", bdev_name="Malloc0", ptpl_file=file)
        return f"iscsi://{address}/{name}/0"

    def restart():
        server.kill()
        server.__init__(server.folder)
        return serve()

    url = serve()
    owner = Registrant(url, "owner")
    assert owner.change(register, 0, 0, 0xA, aptpl) == 0
    assert owner.change(reserve, write_exclusive, 0xA, 0) == 0
    saved = json.dumps(server.rpc("save_config"))
    assert f'"ptpl_file": "{file}"' in saved, saved
    url = restart()
    other, owner = Registrant(url, "other"), Registrant(url, "owner")
    assert other.keys() == [0xA]
    assert (other.write(), owner.write()) == (conflict, 0)
    assert owner.change(register, 0, 0xA, 0xB) == 0, "without APTPL"
    assert (other.keys(), other.write()) == ([0xB], conflict)
    url = restart()
    other = Registrant(url, "other")
    assert (other.keys(), other.write()) == ([], 0)
    # A unit that is created with its file, and the file of another device.
    server.rpc("iscsi_delete_target_node", name="disk")
    luns = [{"bdev_name": "Malloc0", "ptpl_file": file}]
    maps = [{"pg_tag": 1, "ig_tag": 1}]
    server.rpc("iscsi_create_target_node", name="disk", pg_ig_maps=maps, luns=luns)
    assert server.rpc("iscsi_get_target_nodes")[0]["luns"] == [{"bdev_name": "Malloc0", "lun_id": 0, "ptpl_file": file}]
    server.malloc("Malloc1")
    try:
        server.rpc("iscsi_target_node_add_lun", name="disk", bdev_name="Malloc1", ptpl_file=file)
        raise RuntimeError("two devices have one file")
    except AssertionError as error:
        assert "holds the reservations of device" in str(error), error


def login_pdu(keys, cmd_sn=1, tsih=0, cid=1):
    text = "".join(f"{key}={value}\0" for key, value in keys.items()).encode()
    header = struct.pack(">BBBBI6sHIHHII16x", 0x43, 0x87, 0, 0, len(text), b"\x80\0\0\0\0\1", tsih, 1, cid, 0, cmd_sn, 1)
    assert len(header) == 48, len(header)
    return header + text + bytes(-len(text) % 4)


def case_hostile(server):
    """Silent and malformed initiators cost themselves their connection, and others nothing."""
    inquiry = program("iscsi-inq")
    url = server.disk()
    portal, name = url.removeprefix("iscsi://").split("/")[:2]
    host, port = portal.split(":")
    silent = [socket.create_connection((host, int(port)), timeout=10) for _ in range(600)]
    run(inquiry, url)
    for garbage in [b"GET / HTTP/1.1\r\n\r\n" * 20, b"\x43" + b"\xff" * 3000, bytes(48), random_bytes(4096)]:
        with socket.create_connection((host, int(port)), timeout=30) as peer:
            peer.sendall(garbage)
            while True:
                try:
                    if not peer.recv(65536):
                        break
                except ConnectionError:
                    break
    # Writes whose data never comes, as many as the queue takes, from several initiators: others are served.
    held = []
    for number in range(20):
        peer = socket.create_connection((host, int(port)), timeout=10)
        keys = {"InitiatorName": f"{INITIATOR}{number}", "TargetName": name, "ImmediateData": "No",
                "MaxBurstLength": "1048576"}
        peer.sendall(login_pdu(keys))
        answer = peer.recv(4096)
        assert answer[0] == 0x23 and answer[36:38] == b"\0\0", answer[:48].hex()
        for index in range(64):
            cdb = struct.pack(">BBIBHB6x", 0x2A, 0, 0, 0, 2048, 0)
            peer.sendall(struct.pack(">BB6xQIIII16s", 1, 0xA0, 0, 10 + index, MIB, 1 + index, 2, cdb))
        held.append(peer)
    run(inquiry, url)
    for peer in silent + held:
        peer.close()
    deadline = time.monotonic() + 30
    while server.rpc("iscsi_get_connections"):
        assert time.monotonic() < deadline, "connections are left"
        time.sleep(0.05)
    run(inquiry, url)


def main():
    cases = {name[5:]: case for name, case in globals().items() if name.startswith("case_")}
    return serving.run_cases(cases, Server)


if __name__ == "__main__":
    sys.exit(main())
