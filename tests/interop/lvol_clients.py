#!/usr/bin/python3 -B
"""Logical volumes through kills of their server: nothing that was acknowledged may be lost.

    RINGBOLT=target/debug/ringbolt tests/interop/lvol_clients.py [CASE...]
    LVOL_KILLS=100 tests/interop/lvol_clients.py kills     # instead of 10

`stops` ends the server with SIGTERM under load: its store is clean then.

In each round of `kills` fio writes to a thin volume and to a clone, through its engine and NVMe/TCP, verifies what it wrote
and flushes after each 8 writes, while snapshots and clones are made and deleted; then the server is killed. Who judges:

- fio's log has each completed write. The block must have it afterwards: of this round, with fio's number of that write
  or of the next one, which was in flight. All other blocks are as they were.
- A snapshot has what was completed before it was requested, and nothing that began after the answer. It is read when it
  is made, and has the same checksum at the end of each round.
- `ringbolt blob check` and the second reader of blobstores (tests/blob) find no problem on the disk as the kill left it,
  and that reader's contents of each volume are those that the server reads after its next start.
- Volumes are those that were acknowledged. What was under way at the kill is done, or is not.
"""

import glob
import hashlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time

import serving
from fio_clients import ENGINE
from serving import MIB, RINGBOLT, SEED, program, run

READER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "blob", "read_store.py")
KILLS = int(os.environ.get("LVOL_KILLS", "10"))
# A few seconds for each round on two slow cores; a hang of the server ends the case with an error.
STEP_SECONDS_MAX = 60
NQN = "nqn.2025-01.io.ringbolt:lvol"
VOLUME_MIB, JOBS, BLOCK = 8, 4, 4096
PART = VOLUME_MIB * MIB // JOBS
VOLUMES_MAX, SNAPSHOTS_MAX = 12, 6
FSYNC = 8
# fio's header of a verified block: magic, type, length, seed, offset, seconds, nanoseconds, thread, number, CRC; then MD5.
HEADER = struct.Struct("<HHIQQIIHHI16s")
MAGIC = 0xACCA


class Gone(Exception):
    """The server does not answer any more."""


class Rpc:
    """A connection to the server's socket, which notices its end."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(STEP_SECONDS_MAX)
        self.socket.connect(path)
        self.buffer = b""

    def __call__(self, method, /, **params):
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        try:
            self.socket.sendall(json.dumps(request).encode())
            while True:
                try:
                    reply = json.loads(self.buffer)
                    break
                except ValueError:
                    received = self.socket.recv(1 << 16)
                    if not received:
                        raise Gone from None
                    self.buffer += received
        except ConnectionError:
            raise Gone from None
        self.buffer = b""
        assert "error" not in reply, f"{method} {params}: {reply.get('error')}"
        return reply["result"]

    def close(self):
        self.socket.close()


class Volume:
    """What is known of a volume."""

    def __init__(self, parent=None, like=None, is_snapshot=False):
        self.parent, self.is_snapshot = parent, is_snapshot
        # The checksum of its contents, or of which volume they are the same.
        self.sum, self.like = None, like
        # Of a snapshot: what was written before it, and its moments.
        self.moments = None


class Load:
    """A fio on a volume: four jobs, each with a part of the volume and one write in flight."""

    def __init__(self, folder, volume, round_, port, nsid, content):
        self.folder, self.volume, self.round, self.content = f"{folder}/{volume}-{round_}", volume, round_, content
        os.mkdir(self.folder)
        uri = f"nvme+tcp://127.0.0.1:{port}/{NQN}?ns={nsid}".replace(":", "\\:")
        options = ["--name=job", f"--ioengine=external:{ENGINE}", f"--filename={uri}", "--bs=4k", "--rw=randwrite",
                   "--norandommap", "--time_based", f"--runtime={STEP_SECONDS_MAX}", f"--size={PART}", f"--numjobs={JOBS}",
                   f"--offset_increment={PART}", "--thread", "--iodepth=1", f"--fsync={FSYNC}", "--verify=md5",
                   f"--verify_pattern=0x{round_ + 1:08x}", "--verify_backlog=32", "--verify_fatal=1", "--verify_state_save=0",
                   "--write_lat_log=w", "--log_offset=1", "--log_unix_epoch=1", f"--randseed={SEED + round_}",
                   # fio's numbers of writes have 16 bits.
                   "--number_ios=60000"]
        self.output = open(f"{self.folder}/fio.out", "w+")
        self.process = subprocess.Popen([program("fio"), *options], cwd=self.folder, stdout=self.output, stderr=self.output)

    def end(self):
        """Waits for its end, which the kill of the server causes; a verification must not have failed."""
        try:
            self.process.wait(STEP_SECONDS_MAX)
        finally:
            self.process.kill()
        self.output.seek(0)
        output = self.output.read()
        self.output.close()
        assert self.process.returncode != 0, f"fio does not notice the end of its target\n{output}"
        for bad in ("verify:", "panicked", "bad header", "bad magic"):
            assert bad not in output, output
        self.writes = self.read_log()

    def read_log(self):
        """Of each part: its completed writes in order, as (begin, end, offset) with moments in milliseconds."""
        parts = [[] for _ in range(JOBS)]
        # The logs are not numbered as the parts are.
        for path in glob.glob(f"{self.folder}/w_lat.*.log"):
            with open(path, encoding="ascii") as log:
                for line in log:
                    at, latency_ns, direction, _, offset, _ = (int(field) for field in line.split(","))
                    if direction == 1:
                        parts[offset // PART].append((at - latency_ns // 1_000_000, at, offset))
        return parts

    def last_writes(self, until=None):
        """The number of the last write of each block, counted within its job from 0; of those that ended before a moment."""
        last = {}
        for writes in self.writes:
            for number, (_, end, offset) in enumerate(writes):
                if until is None or end < until:
                    last[offset] = number
        return last

    def check(self, found, until=None, since=None):
        """What a volume, or a snapshot between two moments, has instead of what it should; the number of blocks compared.

        A block has its last completed write or a later one of its job, at most one that was in flight; or what it had
        before the round, if it had none."""
        wanted, problems = self.last_writes(until), []
        for offset in range(0, len(found), BLOCK):
            block, before = found[offset:offset + BLOCK], self.content[offset:offset + BLOCK]
            number = self.number_of(offset, block)
            writes, last = self.writes[offset // PART], wanted.get(offset)
            if number is None:
                if last is not None or block != before:
                    problems.append(f"{offset:#x}: not write {last} of this round, {block[:HEADER.size].hex()}")
            elif last is not None and number < last:
                problems.append(f"{offset:#x}: write {number} instead of {last}")
            elif number > len(writes):
                problems.append(f"{offset:#x}: write {number} of {len(writes)}")
            elif number < len(writes) and writes[number][2] != offset:
                problems.append(f"{offset:#x}: write {number}, which was to {writes[number][2]:#x}")
            elif since is not None and number < len(writes) and writes[number][0] > since + 1:
                problems.append(f"{offset:#x}: write {number}, which began after the snapshot")
        return len(wanted), problems

    def number_of(self, offset, block):
        """fio's number of the write that a whole block is of; None if it is none of this round."""
        magic, _, length, _, at, _, _, _, number, _, digest = HEADER.unpack_from(block)
        pattern = (self.round + 1).to_bytes(4, "big")
        is_this = magic == MAGIC and length == BLOCK and at == offset and block[-4:] in (pattern, pattern[::-1])
        return number if is_this and hashlib.md5(block[HEADER.size:]).digest() == digest else None

    def flushed(self):
        """Completed writes that a completed flush has made durable."""
        return sum(max(0, len(writes) - 1) // FSYNC * FSYNC for writes in self.writes)


class Changes(threading.Thread):
    """Makes and deletes snapshots and clones, until the server is gone."""

    def __init__(self, state, server, round_, loaded):
        super().__init__()
        self.state, self.server, self.round, self.loaded = state, server, round_, loaded
        self.random = random.Random(SEED * 1000 + round_)
        self.rpc, self.count, self.pending, self.error, self.made = Rpc(server.rpc_socket), 0, None, None, 0
        self.start()

    def run(self):
        try:
            while True:
                self.change()
        except Gone:
            pass
        except Exception as error:  # The main thread raises it.
            self.error = error
        finally:
            self.rpc.close()

    def change(self):
        """One change. It is `pending` until it is acknowledged."""
        volumes = self.state.volumes
        clones_of = {name: [other for other, it in volumes.items() if it.parent == name] for name in volumes}
        snapshots = [name for name, it in volumes.items() if it.is_snapshot]
        kinds = ["clone"] if snapshots else []
        if len(snapshots) < SNAPSHOTS_MAX:
            kinds += ["snapshot"] * 3
        unused = [name for name, it in volumes.items() if name not in self.loaded and len(clones_of[name]) <= 1
                  and (not it.is_snapshot or clones_of[name] or len(snapshots) > 2)]
        if len(volumes) >= VOLUMES_MAX:
            kinds = []
        if unused and (not kinds or len(volumes) > VOLUMES_MAX // 2):
            kinds += ["delete"] * 3
        if any(volumes[name].parent for name in self.loaded[1:]):
            kinds.append("decouple")
        kind = self.random.choice(kinds)
        self.count += 1
        name = f"{kind[0]}{self.round}-{self.count}"
        if kind == "snapshot":
            source = self.random.choice(self.loaded)
            self.do(kind, source, name, "bdev_lvol_snapshot", lvol_name=f"lvs/{source}", snapshot_name=name)
            self.read(name)
        elif kind == "clone":
            source = self.random.choice(snapshots)
            self.do(kind, source, name, "bdev_lvol_clone", snapshot_name=f"lvs/{source}", clone_name=name)
        elif kind == "delete":
            victim = self.random.choice(unused)
            self.do(kind, victim, None, "bdev_lvol_delete", name=f"lvs/{victim}")
        else:
            victim = self.random.choice([name for name in self.loaded[1:] if volumes[name].parent])
            self.do(kind, victim, None, "bdev_lvol_decouple_parent", name=f"lvs/{victim}")

    def do(self, kind, source, name, method, /, **params):
        requested = int(time.time() * 1000)
        self.pending = (kind, source, name, requested)
        self.rpc(method, **params)
        self.state.apply(kind, source, name, (requested, int(time.time() * 1000)))
        self.pending = None
        self.made += 1

    def read(self, name):
        """Reads a snapshot over NBD, while the load goes on."""
        path = f"{self.server.folder}/during"
        try:
            self.server.read(self.rpc, name, path)
        except AssertionError:
            # nbdcopy fails at the kill; an RPC that is refused then says so.
            if self.server.process.poll() is None:
                time.sleep(0.2)
            if self.server.process.poll() is None:
                raise
            raise Gone from None
        with open(path, "rb") as file:
            self.state.volumes[name].sum = hashlib.sha256(file.read()).hexdigest()


class State:
    """The volumes that were acknowledged, and what is known of their contents."""

    def __init__(self):
        self.volumes = {"vol": Volume()}

    def apply(self, kind, source, name, moments):
        volumes = self.volumes
        if kind == "snapshot":
            volumes[name] = Volume(volumes[source].parent, is_snapshot=True)
            volumes[name].moments = (source, *moments)
            volumes[source].parent = name
        elif kind == "clone":
            volumes[name] = Volume(source, like=source)
            volumes[name].sum = volumes[source].sum
        elif kind == "delete":
            gone = volumes.pop(source)
            for volume in volumes.values():
                if volume.parent == source:
                    volume.parent = gone.parent
                if volume.like == source:
                    volume.like, volume.sum = None, volume.sum or gone.sum
        else:
            volumes[source].parent = volumes[volumes[source].parent].parent

    def reconcile(self, pending, found):
        """Applies the change that was under way at the kill, if it is done."""
        if pending is None:
            return None
        kind, source, name, requested = pending
        done = {"snapshot": name in found, "clone": name in found, "delete": source not in found,
                "decouple": kind == "decouple" and found[source] != self.volumes[source].parent}[kind]
        if done:
            self.apply(kind, source, name, (requested, None))
        return f"{kind} {'done' if done else 'undone'}"


class Server(serving.Server):
    """A server with the store's disk; exports are made anew, as an orchestrator does."""

    def __init__(self, folder):
        super().__init__(folder)
        rpc = Rpc(self.rpc_socket)
        self.disk = f"{folder}/disk"
        is_new = not os.path.exists(self.disk)
        if is_new:
            with open(self.disk, "wb") as disk:
                disk.truncate(512 * MIB)
        rpc("bdev_uring_create", name="disk", filename=self.disk)
        rpc("bdev_wait_for_examine")
        if is_new:
            rpc("bdev_lvol_create_lvstore", bdev_name="disk", lvs_name="lvs", cluster_sz=65536)
            rpc("bdev_lvol_create", lvs_name="lvs", lvol_name="vol", size_in_mib=VOLUME_MIB, thin_provision=True)
        rpc.close()

    def serve(self, rpc, volumes):
        """Exports volumes over NVMe/TCP; returns the port."""
        rpc("nvmf_create_transport", trtype="TCP")
        rpc("nvmf_create_subsystem", nqn=NQN, allow_any_host=True)
        for nsid, volume in enumerate(volumes, 1):
            rpc("nvmf_subsystem_add_ns", nqn=NQN, namespace={"bdev_name": f"lvs/{volume}", "nsid": nsid})
        address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0"}
        rpc("nvmf_subsystem_add_listener", nqn=NQN, listen_address=address)
        [listener] = rpc("nvmf_subsystem_get_listeners", nqn=NQN)
        return listener["address"]["trsvcid"]

    def read(self, rpc, volume, path):
        """The contents of a volume, as an NBD client reads them."""
        uri = rpc("nbd_export_create", bdev_name=f"lvs/{volume}", name="read", path=f"{self.folder}/nbd.sock", read_only=True)
        run(program("nbdcopy"), "--allocated", uri, path, timeout=STEP_SECONDS_MAX)
        rpc("nbd_export_delete", name="read")

    def contents(self, rpc, volume):
        path = f"{self.folder}/contents"
        self.read(rpc, volume, path)
        with open(path, "rb") as file:
            return file.read()


def relations(server, rpc):
    """The volumes that the server has, with the snapshot that each is a clone of."""
    found = {}
    for bdev in rpc("bdev_get_bdevs"):
        lvol = bdev["driver_specific"].get("lvol")
        if lvol:
            found[bdev["aliases"][0].removeprefix("lvs/")] = lvol.get("base_snapshot")
    return found


class Steps:
    """Seconds of the steps of a round."""

    def __init__(self):
        self.at, self.text = time.monotonic(), ""

    def done(self, name):
        now = time.monotonic()
        self.text += f"{', ' if self.text else ''}{name} {now - self.at:.1f}"
        self.at = now


def check_disk(disk):
    """Both judges on the disk as it is; returns the second reader's checksums."""
    deadline = time.monotonic() + STEP_SECONDS_MAX
    while True:
        found = subprocess.run([RINGBOLT, "blob", "check", disk], capture_output=True, text=True, timeout=STEP_SECONDS_MAX)
        # The kernel closes the files of a killed process when its I/O has ended, which may be after the process.
        if "has it open for writing" not in found.stderr or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert found.returncode == 0, f"blob check: {found.stdout}{found.stderr}"
    found = subprocess.run([READER, "list", disk, "--json", "--sums"], capture_output=True, text=True, timeout=STEP_SECONDS_MAX)
    assert found.returncode == 0, f"the second reader: {found.stdout[-2000:]}{found.stderr}"
    return {volume["name"]: volume["sha256"] for volume in json.loads(found.stdout)["volumes"]}


def one_round(servers, state, round_):
    """Load, changes and kill of the last server; then all checks, with its successor."""
    server = servers[-1]
    steps, chance = Steps(), random.Random(SEED * 77 + round_)
    rpc = Rpc(server.rpc_socket)
    clones = [name for name, it in state.volumes.items() if not it.is_snapshot and name != "vol"]
    loaded = ["vol", *([chance.choice(clones)] if clones else [])]
    contents = {name: server.contents(rpc, name) for name in loaded}
    port = server.serve(rpc, loaded)
    steps.done("exports")
    loads = [Load(server.folder, name, round_, port, nsid, contents[name]) for nsid, name in enumerate(loaded, 1)]
    # The changes begin under load: when each job of each volume has written.
    writes = lambda name: rpc("bdev_get_iostat", name=f"lvs/{name}")["bdevs"][0]["num_write_ops"]
    deadline = time.monotonic() + STEP_SECONDS_MAX
    while not all(writes(name) > 8 * JOBS for name in loaded):
        for load in loads:
            assert load.process.poll() is None, open(f"{load.folder}/fio.out").read()
        assert time.monotonic() < deadline, "no writes"
        time.sleep(0.01)
    rpc.close()
    for name in loaded:
        state.volumes[name].sum = state.volumes[name].like = None
    changes = Changes(state, server, round_, loaded)
    changes.join(chance.uniform(0.2, 1.6))
    server.kill()
    changes.join(STEP_SECONDS_MAX)
    assert not changes.is_alive(), "an RPC outlives its server"
    if changes.error:
        raise changes.error
    for load in loads:
        load.end()
    steps.done("load")
    offline = check_disk(server.disk)
    steps.done("disk")
    server = Server(server.folder)
    servers.append(server)
    rpc = Rpc(server.rpc_socket)
    steps.done("start")
    found = relations(server, rpc)
    pending = state.reconcile(changes.pending, found)
    wanted = {name: volume.parent for name, volume in state.volumes.items()}
    assert found == wanted, f"volumes {found} instead of {wanted}; {changes.pending}"
    problems, compared = [], 0
    # Those of this round, and one more: the second reader has read all.
    new = [name for name, it in state.volumes.items() if it.moments or name in loaded]
    other = sorted(state.volumes.keys() - new)
    for name in new + chance.sample(other, min(1, len(other))):
        content = server.contents(rpc, name)
        checksum = hashlib.sha256(content).hexdigest()
        if offline.get(name) not in (None, checksum):
            problems.append(f"{name}: the server reads other contents than the second reader")
        volume = state.volumes[name]
        if name in loaded:
            count, wrong = loads[loaded.index(name)].check(content)
        elif volume.moments:
            source, requested, answered = volume.moments
            count, wrong = loads[loaded.index(source)].check(content, requested, answered)
            volume.moments = None
        else:
            count, wrong = 0, []
        compared += count
        problems += [f"{name}: {problem}" for problem in wrong[:5]]
        if volume.sum not in (None, checksum):
            problems.append(f"{name}: its contents have changed")
        if not volume.is_snapshot and name in loaded:
            continue
        volume.sum = checksum
    for name, volume in state.volumes.items():
        source = state.volumes.get(volume.like)
        wanted_sum = volume.sum or (source.sum if source else None)
        if name not in loaded and wanted_sum and offline.get(name, wanted_sum) != wanted_sum:
            problems.append(f"{name}: the second reader reads other contents than before")
        volume.sum, volume.like = wanted_sum, None
    assert not problems, "\n".join(problems[:40])
    rpc.close()
    steps.done("compare")
    acknowledged = sum(len(writes) for load in loads for writes in load.writes)
    flushed = sum(load.flushed() for load in loads)
    print(f"  round {round_}: {acknowledged} writes, {flushed} flushed; {changes.made} changes, {len(state.volumes)} volumes"
          f"{', ' + pending if pending else ''}; {compared} blocks compared; seconds: {steps.text}", flush=True)


def kills(server):
    """The server is killed under verified load, with snapshots, clones and deletions under way."""
    state, servers = State(), [server]
    try:
        for round_ in range(KILLS):
            one_round(servers, state, round_)
    finally:
        # The first one ends with the case.
        for later in servers[1:]:
            later.end()
    found = check_disk(server.disk)
    assert found.keys() == state.volumes.keys(), found


def stops(server):
    """SIGTERM under load of two hosts, three times: the store is clean at once, for both judges, and opens again."""
    for round_ in range(3):
        rpc = Rpc(server.rpc_socket)
        if round_ == 0:
            rpc("bdev_lvol_create", lvs_name="lvs", lvol_name="other", size_in_mib=128, thin_provision=True)
        port = server.serve(rpc, ["vol", "other"])
        load = [RINGBOLT, "perf", "--rw=randwrite", "--bs=4k", "--iodepth=16", f"--runtime={STEP_SECONDS_MAX}", "--time_based"]
        loads = [subprocess.Popen([*load, f"--filename=nvme+tcp://127.0.0.1:{port}/{NQN}?ns={nsid}"], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL) for nsid in (1, 2)]
        try:
            # Also with clusters that are written for the first time, as `other` has two thousand.
            writes = lambda name: rpc("bdev_get_iostat", name=f"lvs/{name}")["bdevs"][0]["num_write_ops"]
            deadline = time.monotonic() + STEP_SECONDS_MAX
            while not all(writes(name) > 200 for name in ("vol", "other")):
                assert time.monotonic() < deadline, "no writes"
                time.sleep(0.01)
            rpc.close()
            started = time.monotonic()
            server.end()
            seconds = time.monotonic() - started
        finally:
            for process in loads:
                process.kill()
                process.wait()
        check_disk(server.disk)
        state = json.loads(run(READER, "list", server.disk, "--json"))
        assert state["clean"], "the store is not clean"
        allocated = {volume["name"]: volume["allocated_clusters"] for volume in state["volumes"]}
        print(f"  stop {round_}: {seconds:.2f} s; clusters {allocated}", flush=True)
        server.__init__(server.folder)


def warnings(server):
    """The log has a line when a store has no metadata pages left, and one when its device becomes smaller than it."""
    rpc, disk = Rpc(server.rpc_socket), f"{server.folder}/small"
    with open(disk, "wb") as file:
        file.truncate(64 * MIB)
    rpc("bdev_aio_create", name="small", filename=disk, block_size=512)
    rpc("bdev_lvol_create_lvstore", bdev_name="small", lvs_name="few", cluster_sz=MIB, num_md_pages_per_cluster_ratio=10)
    failures = 0
    for number in range(12):
        try:
            rpc("bdev_lvol_create", lvs_name="few", lvol_name=f"v{number}", size_in_mib=1, thin_provision=True)
        except AssertionError as error:
            assert "not enough free metadata pages" in str(error), error
            failures += 1
    assert failures > 1, "the store has too many pages for this test"
    os.truncate(disk, 32 * MIB)
    rpc("bdev_aio_rescan", name="small")
    rpc.close()
    with open(f"{server.folder}/serve.log", encoding="utf-8") as file:
        log = file.read()
    for line in ("store few on small has no free metadata page", f"extend the device to {64 * MIB} bytes"):
        assert log.count(line) == 1, f"{line}: {log.count(line)} times in {log}"


CASES = {"kills": kills, "stops": stops, "warnings": warnings}

if __name__ == "__main__":
    sys.exit(serving.run_cases(CASES, Server))
