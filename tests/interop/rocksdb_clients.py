#!/usr/bin/python3 -B
"""RocksDB's own tools on files in a blobstore, through the plugin.

    RINGBOLT=target/debug/ringbolt tests/interop/rocksdb_clients.py [CASE...]

Each case prints one line. A case whose program is missing is SKIPPED, with the reason.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import serving
from serving import MIB, RINGBOLT, Skipped, program, run

PLUGIN = os.environ.get("RINGBOLT_ROCKSDB", os.path.join(os.path.dirname(RINGBOLT), "libringbolt_rocksdb.so"))
NQN = "nqn.2025-01.io.ringbolt:rocksdb"
DATABASE = "/db"


def needs_plugin():
    if not os.path.exists(PLUGIN):
        raise Skipped(f"{PLUGIN} is not built: RocksDB's headers are not installed")


class Store:
    """A file with a store of files, and the configuration that makes a bdev of it."""

    def __init__(self, server, mib=512, name="disk"):
        needs_plugin()
        self.folder = server.folder
        self.image, self.config = f"{server.folder}/{name}.img", f"{server.folder}/{name}.json"
        with open(self.image, "wb") as image:
            image.truncate(mib * MIB)
        self.configure("bdev_uring_create", name="Disk", filename=self.image, block_size=4096)
        self.uri = f"ringbolt://{self.config}?bdev=Disk"

    def configure(self, method, **params):
        call = {"method": method, "params": params}
        with open(self.config, "w") as file:
            json.dump({"subsystems": [{"subsystem": "bdev", "config": [call]}]}, file)

    def format(self):
        run(RINGBOLT, "blobfs", "format", self.image)
        return self

    def check(self):
        """What `blobfs check` finds: nothing, and no file that was not closed."""
        run(RINGBOLT, "blobfs", "check", self.image)

    def command(self, name, *options, uri=None):
        return [program(name), f"--fs_uri={uri or self.uri}", *options]

    def tool(self, name, *options, uri=None, status=0, timeout=100):
        """Runs one of RocksDB's tools and returns both streams."""
        done = subprocess.run(self.command(name, *options, uri=uri), capture_output=True, text=True, errors="replace",
                              env=environment(), timeout=timeout)
        output = done.stdout + done.stderr
        assert "panicked" not in output, output[-4000:]
        expected = done.returncode == status if status == 0 else done.returncode > 0
        assert expected, f"{name} {options}: {done.returncode}\n{output[-4000:]}"
        return output

    def bench(self, benchmarks, *options, uri=None, status=0, db=DATABASE):
        common = [f"--db={db}", f"--benchmarks={benchmarks}", "--key_size=16", "--value_size=400", "--verify_checksum=true",
                  "--write_buffer_size=2097152", "--target_file_size_base=2097152", "--max_bytes_for_level_base=8388608",
                  "--compression_type=none", "--max_background_jobs=2"]
        output = self.tool("db_bench", *common, *options, uri=uri, status=status)
        if status == 0:
            for name in benchmarks.split(","):
                assert re.search(rf"^{name} +:|^{name}\b|{name} +:", output, re.M) or name == "compact", output[-3000:]
        return output

    def checked(self, db=DATABASE):
        """Every table file is read, and each block's checksum compared."""
        output = self.tool("sst_dump", f"--file={db}", "--command=check", "--verify_checksum")
        assert "Corruption" not in output and "not ok" not in output.lower(), output[-2000:]

    def keys(self, db=DATABASE, *options):
        output = self.tool("ldb", f"--db={db}", "scan", "--hex", "--no_value", *options)
        return [line for line in output.splitlines() if line.startswith("0x")]


def environment():
    return {**os.environ, "LD_PRELOAD": PLUGIN}


def benchmarks(server):
    """RocksDB's benchmarks: each read is verified."""
    store = Store(server).format()
    store.bench("fillseq,readseq,fillrandom,overwrite,readrandom,multireadrandom", "--num=15000")
    store.bench("deleterandom,compact,readrandom,mergerandom", "--use_existing_db=1", "--num=10000", "--merge_operator=put",
                "--merge_keys=3000")
    store.bench("readrandom,seekrandom,readwhilewriting", "--use_existing_db=1", "--num=4000", "--threads=2",
                "--merge_operator=put")
    store.checked()
    store.check()


def blob_files(server):
    store = Store(server).format()
    options = ["--enable_blob_files=1", "--min_blob_size=100", "--blob_file_size=2097152", "--num=8000",
               "--enable_blob_garbage_collection=1"]
    store.bench("fillrandom,overwrite,compact,readrandom", *options)
    store.bench("readrandom,overwrite", *options, "--use_existing_db=1")
    names = run(RINGBOLT, "blobfs", "ls", store.image, DATABASE)
    assert ".blob" in names, names
    store.check()


# db_bench has no flag for logs that are recycled.
OPTIONS = """
[Version]
  rocksdb_version=7.8.3
  options_file_version=1.1
[DBOptions]
  create_if_missing=true
  recycle_log_file_num=2
  use_direct_reads=true
  use_direct_io_for_flush_and_compaction=true
  max_total_wal_size=1048576
[CFOptions "default"]
  write_buffer_size=262144
"""


def direct_and_recycled(server):
    """Direct I/O, logs that are recycled, and a sync of each write."""
    store = Store(server).format()
    with open(f"{server.folder}/options", "w") as file:
        file.write(OPTIONS)
    run(RINGBOLT, "blobfs", "cp", store.image, file.name, ":/options")
    options = ["--options_file=/options", "--num=500"]
    store.bench("fillrandom,overwrite", *options, "--sync=1")
    first = store.keys()
    store.bench("readrandom", *options, "--use_existing_db=1")
    assert len(first) > 300 and store.keys() == first
    store.checked()


def tools(server):
    """ldb: a database that is made, changed, reopened, and copied by a checkpoint and a backup within the store."""
    store = Store(server).format()
    ldb = lambda *options: store.tool("ldb", f"--db={DATABASE}", *options)
    ldb("--create_if_missing", "put", "a", "one")
    ldb("batchput", "b", "two", "c", "three")
    ldb("delete", "b")
    assert ldb("get", "a").strip() == "one"
    assert [line.strip() for line in ldb("scan").splitlines() if " : " in line] == ["a : one", "c : three"]
    ldb("compact")
    ldb("checkpoint", "--checkpoint_dir=/copy")
    assert store.tool("ldb", "--db=/copy", "get", "c").strip() == "three"
    store.tool("ldb", "--db=/copy", "put", "c", "four")
    assert ldb("get", "c").strip() == "three"
    assert "OK" in ldb("checkconsistency")
    store.checked()
    store.checked("/copy")
    store.check()


def create(server):
    """An empty device gets a store only if that is asked for; what is there already is opened."""
    store = Store(server)
    output = store.bench("fillseq", "--num=100", status=1)
    assert "is empty: create=1" in output, output
    for _ in range(2):
        store.bench("fillseq", "--num=100", uri=store.uri + "&create=1")
    assert len(store.keys()) == 100


def killed(server):
    """A process that is killed while it fills with syncs: every write that was confirmed is there."""
    store = Store(server).format()
    for round in range(2):
        database = f"/db{round}"
        command = store.command("db_bench", f"--db={database}", "--benchmarks=fillseq", "--num=1000000", "--sync=1",
                                "--value_size=200", "--write_buffer_size=65536", "--stats_interval=100",
                                "--compression_type=none")
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment()) as running:
            confirmed, text = 0, b""
            while confirmed < 400:
                part = os.read(running.stderr.fileno(), 4096)
                assert part, text.decode(errors="replace")[-3000:]
                text += part
                found = re.findall(rb"thread 0: \(\d+,(\d+)\)|finished (\d+) ops", text)
                confirmed = max((int(one or other) for one, other in found), default=0)
            running.send_signal(signal.SIGKILL)
            running.wait()
        keys = store.keys(database)
        # db_bench writes keys in order: as many as it has reported, without a gap.
        assert len(keys) >= confirmed, f"{len(keys)} keys of {confirmed} confirmed"
        store.tool("ldb", f"--db={database}", "compact")
        store.checked(database)
    store.check()


def full(server):
    """A store that fills up: RocksDB stops with NoSpace, keeps what it has, and opens again."""
    store = Store(server, mib=64).format()
    output = store.bench("fillrandom,overwrite", "--num=150000", "--max_background_jobs=4", status=1)
    assert "No space left" in output or "NoSpace" in output or "store is full" in output, output[-3000:]
    store.check()
    store.tool("ldb", f"--db={DATABASE}", "scan", "--max_keys=10")
    assert len(store.keys(DATABASE, "--max_keys=1000")) == 1000
    store.checked()


def in_use(server):
    """A second process is refused, with the holder named; a second database in the store works."""
    store = Store(server).format()
    command = store.command("db_bench", f"--db={DATABASE}", "--benchmarks=fillseq,waitforcompaction,readwhilewriting",
                            "--num=1000", "--duration=60", "--stats_interval=100")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment()) as running:
        assert running.stderr.read(100), "it has ended"
        output = store.bench("fillseq", "--num=10", status=1)
        assert f"process {running.pid}" in output or "has it open" in output, output
        running.kill()
        running.wait()
    store.bench("fillseq", "--num=10")


def foreign(server):
    """What is no store of files is named, and stays as it is."""
    store = Store(server)
    with open(store.image, "r+b") as image:
        image.write(b"something else" * 1000)
    before = open(store.image, "rb").read(65536)
    output = store.bench("fillseq", "--num=10", uri=store.uri + "&create=1", status=1)
    assert "there is something else on it" in output, output
    assert open(store.image, "rb").read(65536) == before
    # A blobstore without files: that of logical volumes.
    server.rpc("bdev_uring_create", name="Disk", filename=Store(server, name="lvols").image, block_size=4096)
    server.rpc("bdev_lvol_create_lvstore", bdev_name="Disk", lvs_name="volumes")
    server.rpc("bdev_uring_delete", name="Disk")
    store = f"ringbolt://{server.folder}/lvols.json?bdev=Disk"
    output = Store(server, name="other").bench("fillseq", "--num=10", uri=store + "&create=1", status=1)
    assert "Disk" in output and ("LVOLSTORE" in output or "logical volume store" in output), output


def clumsy(server):
    """What users type wrong is named, and ends in an error."""
    store = Store(server).format()
    with open(f"{server.folder}/nonsense.json", "w") as file:
        file.write("{nonsense")
    for uri, expected in [
        ("ringbolt://", "configuration file is missing"),
        ("ringbolt:///nonexistent.json?bdev=Disk", "/nonexistent.json"),
        (f"ringbolt://{store.config}", "bdev=NAME is missing"),
        (f"ringbolt://{store.config}?bdev=Other", "makes no bdev Other; it makes Disk"),
        (f"ringbolt://{store.config}?bdev=Disk&size=5", "size=5 is no option"),
        (f"ringbolt://{server.folder}/nonsense.json?bdev=Disk", "nonsense.json"),
    ]:
        output = store.bench("fillseq", "--num=10", uri=uri, status=1)
        assert expected in output, f"{uri}: no {expected!r} in\n{output}"
    os.remove(store.image)
    output = store.bench("fillseq", "--num=10", status=1)
    assert "No such file" in output, output


def probe(server, store, what, *options, uri=None):
    """Runs a case of rocksdb_probe.cc."""
    binary = f"{server.folder}/probe"
    if not os.path.exists(binary):
        source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rocksdb_probe.cc")
        run(program("c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-o", binary, source, "-lrocksdb", "-lpthread")
    done = subprocess.run([binary, what, uri or store.uri, *options], capture_output=True, text=True, errors="replace",
                          env=environment(), timeout=100)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and "panicked" not in output, f"{what}: {done.returncode}\n{output[-4000:]}"
    return output


def forks(server):
    """A child of a process with a store gets errors and ends; its parent goes on. Threads that read do not keep a
    process from its end, nor a store from being opened again."""
    store = Store(server).format()
    for what in ["fork", "exit"]:
        probe(server, store, what)
        store.check()


def readers(server):
    """Threads that read files while these are replaced, truncated, appended to and deleted in a small store."""
    store = Store(server, mib=48).format()
    probe(server, store, "readers", "8")
    store.check()
    # The same on a bdev that only the reactor reads.
    with open(store.config, "w") as file:
        calls = [{"method": "bdev_uring_create", "params": {"name": "Base", "filename": store.image, "block_size": 4096}},
                 {"method": "bdev_passthru_create", "params": {"name": "Disk", "base_bdev_name": "Base"}}]
        json.dump({"subsystems": [{"subsystem": "bdev", "config": calls}]}, file)
    probe(server, store, "readers", "4")
    store.check()


def asynchronous(server):
    """Reads that are begun and waited for, aborted or dropped; RocksDB's iterators with them."""
    store = Store(server).format()
    probe(server, store, "async")
    store.bench("fillrandom,compact", "--num=20000")
    store.bench("readseq,seekrandom", "--use_existing_db=1", "--num=5000", "--async_io=1", "--seek_nexts=200",
                "--cache_size=1024")
    store.check()


def remote_store(server):
    """A store on a namespace of the server, which can be killed."""
    store = Store(server)
    server.malloc(name="Malloc0", mib=256, block_size=4096)
    server.rpc("nvmf_create_transport", trtype="TCP")
    server.rpc("nvmf_create_subsystem", nqn=NQN, allow_any_host=True)
    server.rpc("nvmf_subsystem_add_ns", nqn=NQN, namespace={"bdev_name": "Malloc0"})
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0"}
    server.rpc("nvmf_subsystem_add_listener", nqn=NQN, listen_address=address)
    [listener] = server.rpc("nvmf_subsystem_get_listeners", nqn=NQN)
    store.configure("bdev_nvme_attach_controller", name="Nvme0", trtype="TCP", adrfam="IPv4", traddr="127.0.0.1",
                    trsvcid=listener["address"]["trsvcid"], subnqn=NQN, ctrlr_loss_timeout_sec=2, reconnect_delay_sec=1)
    store.uri = f"ringbolt://{store.config}?bdev=Nvme0n1&create=1"
    return store


def lose_device(server, store, benchmarks, *options):
    """Kills the target under a benchmark, which ends with the device's error."""
    command = store.command("db_bench", f"--db={DATABASE}", f"--benchmarks={benchmarks}", "--stats_interval=100", *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()) as running:
        text = b""
        while b"ops" not in text:
            part = os.read(running.stdout.fileno(), 4096)
            assert part, text
            text += part
        server.kill()
        started = time.monotonic()
        rest, _ = running.communicate(timeout=60)
    output = (text + rest).decode(errors="replace")
    assert running.returncode != 0 and "panicked" not in output, f"{running.returncode}: {output[-2000:]}"
    assert "the device failed" in output or "takes no requests" in output, output[-2000:]
    assert time.monotonic() - started < 40


def lost_device(server):
    """A target that is killed under a database that is written: errors, and an end."""
    store = remote_store(server)
    lose_device(server, store, "fillrandom", "--num=10000000", "--sync=1")


def lost_device_of_readers(server):
    """The same under threads that read."""
    store = remote_store(server)
    store.bench("fillrandom,compact", "--num=20000")
    lose_device(server, store, "readrandom", "--use_existing_db=1", "--num=20000", "--reads=100000000", "--threads=3",
                "--cache_size=1024", "--compression_type=none")


CASES = {
    "benchmarks": benchmarks,
    "blob_files": blob_files,
    "direct_and_recycled": direct_and_recycled,
    "tools": tools,
    "create": create,
    "killed": killed,
    "full": full,
    "in_use": in_use,
    "foreign": foreign,
    "clumsy": clumsy,
    "forks": forks,
    "readers": readers,
    "asynchronous": asynchronous,
    "lost_device": lost_device,
    "lost_device_of_readers": lost_device_of_readers,
}

if __name__ == "__main__":
    sys.exit(serving.run_cases(CASES, serving.Server))
