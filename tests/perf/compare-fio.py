#!/usr/bin/env python3
"""Compares the load generator with fio: the same jobs on the same file, alternating.

    tests/perf/compare-fio.py target/release/ringbolt                # all cases, a few minutes
    tests/perf/compare-fio.py target/release/ringbolt --rounds 1 --runtime 1 --case null
    tests/perf/compare-fio.py target/release/ringbolt --file /mnt/disk/data --direct --batch 1

Both programs run each case alternately, so a machine that becomes slower affects both. Prints medians
over the rounds: IOPS, latencies, and CPU time per I/O. `--batch 1` gives perf the defaults of fio, one
I/O per submission and one per completion call; without it perf batches without a limit.

The exit status is 1 if the IOPS ratio of perf to fio is below --least in any case, and 2 if a program
fails. Run it on an otherwise idle machine.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

CASES = {
    # Name: engine, depth, further options.
    "null": ("null", 128, []),
    "psync": ("psync", 1, []),
    "libaio-1": ("libaio", 1, []),
    "libaio-32": ("libaio", 32, []),
    "io_uring-1": ("io_uring", 1, []),
    "io_uring-32": ("io_uring", 32, []),
    "io_uring-32-fixed": ("io_uring", 32, ["--fixedbufs=1", "--registerfiles=1"]),
}


def run(words, timeout):
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        sys.stderr.write(f"{' '.join(words)}\n{done.stderr}")
        raise SystemExit(2)
    return json.loads(done.stdout[done.stdout.index("{"):])


def figures(document):
    """-> (IOPS, 50th and 99th latency percentile in us, CPU time per I/O in ns)."""
    job = document["jobs"][0]
    side = job["read"]
    busy = (job["usr_cpu"] + job["sys_cpu"]) / 100 * side["runtime"] * 1e6
    table = side["clat_ns"]["percentile"]
    return (side["iops"], table["50.000000"] / 1e3, table["99.000000"] / 1e3, busy / max(side["total_ios"], 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ringbolt", type=pathlib.Path, help="path of the ringbolt binary, a release build")
    parser.add_argument("--fio", default="fio")
    parser.add_argument("--case", action="append", choices=CASES, help="run only this case; repeatable")
    parser.add_argument("--file", help="file to read (default: one of --size in /dev/shm)")
    parser.add_argument("--size", default="256m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runtime", type=int, default=5, help="duration of each run in seconds")
    parser.add_argument("--direct", action="store_true", help="use O_DIRECT; needs --file on a disk")
    parser.add_argument("--cpu", help="CPU to pin both programs to")
    parser.add_argument("--batch", type=int, help="iodepth_batch and iodepth_batch_complete_max of perf")
    parser.add_argument("--least", type=float, default=0.0, help="minimum IOPS ratio of perf to fio")
    options = parser.parse_args()
    memory = "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None
    slow = []
    with tempfile.TemporaryDirectory(dir=memory) as scratch:
        file = options.file or f"{scratch}/data"
        print(f"{'case':<20}{'program':<10}{'IOPS':>12}{'p50 us':>10}{'p99 us':>10}{'CPU ns/IO':>11}")
        for name in options.case or CASES:
            engine, depth, more = CASES[name]
            job = [
                f"--name={name}", f"--filename={file}", f"--size={options.size}", f"--ioengine={engine}",
                "--rw=randread", "--bs=4k", f"--iodepth={depth}", "--norandommap", "--time_based",
                f"--runtime={options.runtime}", "--ramp_time=1", "--output-format=json", *more,
            ]
            if options.direct:
                job.append("--direct=1")
            if options.cpu:
                job.append(f"--cpus_allowed={options.cpu}")
            ours = ["--generator_cost=0", "--eta=never"]
            if options.batch and engine not in ("psync", "null"):
                ours += [f"--iodepth_batch={options.batch}", f"--iodepth_batch_complete_max={options.batch}"]
            programs = {"fio": [options.fio, *job], "perf": [str(options.ringbolt), "perf", *job, *ours]}
            seen = {program: [] for program in programs}
            for _ in range(options.rounds):
                for program, words in programs.items():
                    seen[program].append(figures(run(words, options.runtime + 60)))
            middle = {p: [statistics.median(column) for column in zip(*runs)] for p, runs in seen.items()}
            for program, (iops, p50, p99, cpu) in middle.items():
                print(f"{name:<20}{program:<10}{iops:>12.0f}{p50:>10.2f}{p99:>10.2f}{cpu:>11.0f}")
            ratio = middle["perf"][0] / max(middle["fio"][0], 1)
            spread = max(run[0] for run in seen["perf"]) / max(min(run[0] for run in seen["perf"]), 1) - 1
            print(f"{'':<20}{'ratio':<10}{ratio:>12.2f}   spread of perf's runs: {spread:.0%}")
            if ratio < options.least:
                slow.append(f"{name}: {ratio:.2f}")
    if slow:
        raise SystemExit(f"below {options.least} of fio: {', '.join(slow)}")


if __name__ == "__main__":
    main()
