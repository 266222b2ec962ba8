#!/usr/bin/env python3
"""Compares Ringbolt's engine for fio, on a null device, with fio's own null engine: the same jobs, in turn.

    tests/perf/compare-fio-engine.py target/plugin/libringbolt_fio.so
    tests/perf/compare-fio-engine.py target/plugin/libringbolt_fio.so --rounds 1 --runtime 1 --case read-128

Neither does I/O: what is compared is the path from fio to a device, and back. Prints medians over the rounds of
I/Os a second and of CPU time an I/O. The goal is 0.7 of the null engine's I/Os.

With --floor ENGINE, the least engine that copies the data of each I/O (host/fio-abi/examples/copy_engine.rs) is
measured in turn with both; the goal is then the lower of 0.7 of the null engine and 0.85 of that floor.

The exit status is 1 below the goal in any case, and 2 if fio fails. Run it on an otherwise idle machine.
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

# Of the engine that only copies.
FLOOR_LEAST = 0.85


def measure(engine, name, case, runtime):
    """I/Os a second, and CPU time of one in nanoseconds."""
    direction, depth, batch = CASES[case]
    device = ["--ioengine=null", "--size=1g"] if engine is None else [f"--ioengine=external:{engine}", f"--filename={name}"]
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
    parser.add_argument("--floor", type=pathlib.Path, help="the engine that only copies")
    parser.add_argument("--case", action="append", choices=CASES)
    options = parser.parse_args()
    if not shutil.which("fio"):
        print("SKIPPED: fio is not installed")
        return 0
    engines = {"null": (None, None), "ringbolt": (options.engine.resolve(), "null\\:1g")}
    if options.floor:
        engines["floor"] = (options.floor.resolve(), "copy")
    status = 0
    print("case           fio, IOPS  ringbolt, IOPS   of fio (least to most)  of the floor (least to most)   ns/IO: "
          + ", ".join(engines))
    for case in options.case or CASES:
        results = {name: [] for name in engines}
        for round_number in range(options.rounds):
            # Each is the first in turn.
            names = list(engines)[round_number % len(engines):] + list(engines)[:round_number % len(engines)]
            for name in names:
                results[name].append(measure(*engines[name], case, options.runtime))
        iops, cpu = ({name: statistics.median(run[at] for run in results[name]) for name in engines} for at in (0, 1))
        ratios = {name: sorted(ours[0] / theirs[0] for ours, theirs in zip(results["ringbolt"], results[name]))
                  for name in engines if name != "ringbolt"}
        ratio = {name: statistics.median(of) for name, of in ratios.items()}
        shown = "".join(f"   {ratio[name]:>5.2f} ({ratios[name][0]:.2f} to {ratios[name][-1]:.2f})" for name in ratios)
        print(f"{case:<10} {iops['null']:>13.0f} {iops['ringbolt']:>15.0f}{shown}   "
              + ", ".join(f"{cpu[name]:.0f}" for name in engines))
        status |= ratio["null"] < options.least and ratio.get("floor", 0) < FLOOR_LEAST
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
