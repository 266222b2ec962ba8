#!/usr/bin/env python3
"""Compares Ringbolt's engine for fio, on a null device, with fio's own null engine: the same jobs, in turn.

    tests/perf/compare-fio-engine.py target/plugin/libringbolt_fio.so
    tests/perf/compare-fio-engine.py target/plugin/libringbolt_fio.so --rounds 1 --runtime 1 --case read-128

Neither does I/O: what is compared is the path from fio to a device, and back. Prints medians over the rounds of
I/Os a second and of CPU time an I/O. The goal is 0.7 of the null engine's I/Os.

The exit status is 1 below --least in any case, and 2 if fio fails. Run it on an otherwise idle machine.
"""
import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys

# Name: direction, depth, I/Os of one submission.
CASES = {
    "read-1": ("randread", 1, 1),
    "read-32": ("randread", 32, 1),
    "read-128": ("randread", 128, 32),
    "write-128": ("randwrite", 128, 32),
}


def measure(engine, case, runtime):
    """I/Os a second, and CPU time of one in nanoseconds."""
    direction, depth, batch = CASES[case]
    device = ["--ioengine=null", "--size=1g"] if engine is None else [f"--ioengine=external:{engine}", "--filename=null\\:1g"]
    command = ["fio", "--name=job", "--thread", *device, f"--rw={direction}", "--bs=4k", f"--iodepth={depth}",
               f"--iodepth_batch={batch}", f"--iodepth_batch_complete_max={batch}", "--time_based", f"--runtime={runtime}",
               "--gtod_reduce=1", "--norandommap", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=runtime + 60)
    if done.returncode != 0:
        print(f"{' '.join(command)}: {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr)
        sys.exit(2)
    job = json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]
    side = job["write" if direction == "randwrite" else "read"]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * side["runtime"] * 1e6
    return side["iops"], cpu / max(side["total_ios"], 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runtime", type=int, default=3, help="seconds of each job")
    parser.add_argument("--least", type=float, default=0.7, help="least ratio of I/Os a second")
    parser.add_argument("--case", action="append", choices=CASES)
    options = parser.parse_args()
    if not shutil.which("fio"):
        print("SKIPPED: fio is not installed")
        return 0
    engines = {"null": None, "ringbolt": options.engine.resolve()}
    status = 0
    print("case          fio, IOPS   ringbolt, IOPS   ratio (least to most)   fio, ns/IO   ringbolt, ns/IO")
    for case in options.case or CASES:
        results = {name: [] for name in engines}
        for round_number in range(options.rounds):
            # Each is the first in turn.
            for name in list(engines)[::1 if round_number % 2 == 0 else -1]:
                results[name].append(measure(engines[name], case, options.runtime))
        ratios = [ours[0] / theirs[0] for ours, theirs in zip(results["ringbolt"], results["null"])]
        iops, cpu = ({name: statistics.median(run[at] for run in results[name]) for name in engines} for at in (0, 1))
        ratio = statistics.median(ratios)
        print(f"{case:<10} {iops['null']:>12.0f} {iops['ringbolt']:>16.0f}   {ratio:>5.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
              f"      {cpu['null']:>10.0f} {cpu['ringbolt']:>17.0f}")
        status |= ratio < options.least
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
