#!/usr/bin/env python3
"""Compares RocksDB on a store of files with RocksDB on the kernel's file system: the same jobs, in turn.

    tests/perf/compare-rocksdb.py target/release/libringbolt_rocksdb.so          # all cases, some minutes
    tests/perf/compare-rocksdb.py PLUGIN --rounds 1 --num 20000 --case fillsync --folder /mnt/disk

Both are on the same device: the store in a file of --folder, which is opened with direct I/O, and the other
database in a folder beside it, once through the page cache ("cached") and once with RocksDB's direct I/O
("direct"). Prints medians over the rounds, and ratios. `append` has one thread append pieces of 1 MiB to a file
(tests/interop/rocksdb_probe.cc, which is compiled), against fio's direct writes of 1 MiB to a file of the same
folder. fillsync and append are also compared with their floors, the least programs that do the same
(tests/perf/floors.cc, compiled too): a durable write of 4 KiB by another thread, with a hand-over there and back; one
copy of each piece, with two writes in flight.

The exit status is 2 if a program fails. Run it on an otherwise idle machine.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

DIRECT = ["--use_direct_reads=1", "--use_direct_io_for_flush_and_compaction=1"]
COMMON = ["--key_size=16", "--value_size=400", "--compression_type=none", "--cache_size=8388608", "--histogram=1",
          "--write_buffer_size=16777216", "--max_background_jobs=2", "--stats_interval=1000000000"]
# Name: benchmark, options, whether it uses the database of fillrandom, its keys as a part of --num.
CASES = {
    "fillseq": ("fillseq", [], False, 1),
    "fillrandom": ("fillrandom", [], False, 1),
    "overwrite": ("overwrite", [], True, 1),
    "readrandom": ("readrandom", ["--threads=2"], True, 0.25),
    "readwhilewriting": ("readwhilewriting", ["--threads=2", "--benchmark_write_rate_limit=2097152"], True, 0.25),
    "fillsync": ("fillrandom", ["--sync=1"], False, 0.005),
}
WAYS = ("ringbolt", "cached", "direct")
# Of the file that floors read and write.
FLOOR_MIB = 512


def run(command, env=None):
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=env)
    if done.returncode != 0:
        print(f"{' '.join(command)}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}", file=sys.stderr)
        sys.exit(2)
    return done.stdout


class Folder:
    """The store and the folders that are compared."""

    def __init__(self, plugin, folder, gib):
        self.plugin, self.folder = plugin, folder
        image, config = folder / "store.img", folder / "store.json"
        # Allocated, as a device is; without holes the file system below has nothing to do.
        with open(image, "wb") as file:
            zeroes = bytes(1 << 20)
            for _ in range(gib << 10):
                file.write(zeroes)
            file.flush()
            os.fsync(file.fileno())
        call = {"method": "bdev_uring_create", "params": {"name": "Disk", "filename": str(image), "block_size": 4096}}
        config.write_text(json.dumps({"subsystems": [{"subsystem": "bdev", "config": [call]}]}))
        self.uri = f"ringbolt://{config}?bdev=Disk&create=1"

        self.floor_file = folder / "floor.img"
        with open(self.floor_file, "wb") as file:
            for _ in range(FLOOR_MIB):
                file.write(zeroes)
            file.flush()
            os.fsync(file.fileno())

    def program(self, name, source, *libraries):
        """A program of the tests, built once."""
        path = self.folder / name
        if not path.exists():
            source = pathlib.Path(__file__).resolve().parents[1] / source
            run(["c++", "-std=c++17", "-O2", "-o", str(path), str(source), *libraries, "-lpthread"])
        return str(path)

    def floor(self, *arguments):
        """What the least program does a second."""
        return float(run([self.program("floors", "perf/floors.cc"), *map(str, arguments)]).split()[0])

    def bench(self, way, benchmark, options, name):
        """The output of a benchmark."""
        env = dict(os.environ)
        command = ["db_bench", f"--benchmarks={benchmark}", *COMMON, *options]
        if way == "ringbolt":
            env["LD_PRELOAD"] = str(self.plugin)
            command += [f"--fs_uri={self.uri}", f"--db=/{name}"]
        else:
            command += [f"--db={self.folder}/{way}-{name}", *(DIRECT if way == "direct" else [])]
        return run(command, env)


def rate(output, benchmark):
    found = re.search(rf"^{benchmark} *: .*?([0-9]+) ops/sec", output, re.M)
    seconds = re.search(rf"^{benchmark} *: .*? ([0-9.]+) seconds", output, re.M)
    p99 = re.search(r"P99: ([0-9.]+)", output)
    return int(found.group(1)), float(seconds.group(1)), float(p99.group(1))


def measure(folder, way, case, num):
    benchmark, options, uses, part = CASES[case]
    name = "db" if uses or case == "fillrandom" else case
    keys = [f"--num={num}", f"--use_existing_db={int(uses)}"]
    keys += [f"--reads={int(num * part)}"] if "read" in case else []
    keys += [f"--writes={max(int(num * part), 100)}"] if case == "fillsync" else []
    return rate(folder.bench(way, benchmark, [*keys, *options], name), benchmark)


def fio(folder, *options):
    """What fio says of writes to a file that has its size already."""
    job = json.loads(run(["fio", "--name=floor", f"--filename={folder.floor_file}", "--rw=write", "--direct=1",
                          "--output-format=json", "--overwrite=1", *options]))
    return job["jobs"][0]["write"]


def append(folder):
    """MiB a second that one thread appends, fio's, and the floor's: one copy of each piece, and two writes in flight."""
    probe = folder.program("probe", "interop/rocksdb_probe.cc", "-lrocksdb")
    env = {**os.environ, "LD_PRELOAD": str(folder.plugin)}
    ours = run([probe, "append", folder.uri, str(FLOOR_MIB), "/append"], env)
    cached = run([probe, "append", "posix://", str(FLOOR_MIB), str(folder.folder / "append")])
    device = fio(folder, f"--size={FLOOR_MIB}m", "--bs=1m", "--ioengine=libaio", "--iodepth=2", "--end_fsync=1")
    return {"ringbolt": float(ours.split()[0]), "cached": float(cached.split()[0]), "fio": device["bw"] / 1024,
            "floor": folder.floor("append", folder.floor_file, FLOOR_MIB)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plugin", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num", type=int, default=200000, help="keys")
    parser.add_argument("--case", action="append", choices=[*CASES, "append"])
    parser.add_argument("--folder", type=pathlib.Path, help="where the store and the databases are (a new folder in it)")
    parser.add_argument("--gib", type=int, default=2, help="size of the store")
    options = parser.parse_args()
    selected = options.case or [*CASES, "append"]
    if not shutil.which("db_bench"):
        print("SKIPPED: db_bench is not installed (rocksdb-tools)")
        return 0
    with tempfile.TemporaryDirectory(prefix="compare-rocksdb-", dir=options.folder) as path:
        folder = Folder(options.plugin.resolve(), pathlib.Path(path), options.gib)
        results = {}
        for round_number in range(options.rounds):
            # Each way is the first in turn.
            ways = WAYS[round_number % 3:] + WAYS[:round_number % 3]
            needs = any(CASES[case][2] for case in selected if case in CASES)
            if needs and "fillrandom" not in selected:
                for way in ways:
                    measure(folder, way, "fillrandom", options.num)
            for case in (case for case in CASES if case in selected):
                for way in ways:
                    results.setdefault((case, way), []).append(measure(folder, way, case, options.num))
                    print(f"{case} {way}: {results[case, way][-1]}", file=sys.stderr)
            if "fillsync" in selected:
                floor = folder.floor("sync", folder.floor_file, 2)
                results.setdefault(("fillsync", "floor"), []).append((floor, 0, 0))
            if "readrandom" in selected:
                for name, arguments in [("floor", ["read", folder.floor_file, 2, 2]), ("handover", ["handover", 2])]:
                    results.setdefault(("readrandom", name), []).append((folder.floor(*arguments), 0, 0))
            if "append" in selected:
                for way, value in append(folder).items():
                    results.setdefault(("append", way), []).append((value, 0, 0))
    print("case               ringbolt     cached     direct  /cached  /direct   p99 us: ringbolt  cached  direct")
    for case in (case for case in CASES if case in selected):
        ops, p99 = ({way: statistics.median(run[at] for run in results[case, way]) for way in WAYS} for at in (0, 2))
        print(f"{case:<17} {ops['ringbolt']:>9.0f}  {ops['cached']:>9.0f}  {ops['direct']:>9.0f}  "
              f"{ops['ringbolt'] / ops['cached']:>7.2f}  {ops['ringbolt'] / ops['direct']:>7.2f}   "
              f"{p99['ringbolt']:>16.0f} {p99['cached']:>7.0f} {p99['direct']:>7.0f}")
    median = lambda case, way: statistics.median(run[0] for run in results[case, way])
    if "fillsync" in selected:
        floor = median("fillsync", "floor")
        print(f"fillsync: the floor is {floor:.0f} durable writes/s: {median('fillsync', 'ringbolt') / floor:.2f} of it, "
              f"cached {median('fillsync', 'cached') / floor:.2f}")
    if "readrandom" in selected:
        print(f"readrandom: two threads read 8 KiB {median('readrandom', 'floor'):.0f} times/s; "
              f"two threads hand over and back {median('readrandom', 'handover'):.0f} times/s")
    if "append" in selected:
        ours, cached, device, floor = (median("append", way) for way in ("ringbolt", "cached", "fio", "floor"))
        print(f"append, MiB/s: ringbolt {ours:.0f}, cached {cached:.0f}, fio {device:.0f}, floor {floor:.0f}: "
              f"{ours / device:.2f} of the device, {ours / floor:.2f} of the floor")
    return 0


if __name__ == "__main__":
    sys.exit(main())
