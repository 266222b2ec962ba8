#!/usr/bin/env python3
"""Runs the tests of the workspace, two programs at a time.

cargo runs one test program after another, and most of them wait rather than compute. Programs are those of
`cargo test --no-run`, each in the folder of its package, as cargo runs them. Doc tests follow. Exits with status 1
if a test fails; the output of a program that fails is printed whole.
"""

import concurrent.futures
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time

AT_ONCE = 2


def cpu_seconds():
    """Of all programs that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def programs(options):
    """Path and folder of each test program, which are built first."""
    command = ["cargo", "test", "-q", "--workspace", "--no-run", "--message-format=json", *options]
    built = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if built.returncode != 0:
        sys.exit(built.returncode)
    found = []
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message["profile"]["test"] and message["executable"]:
            found.append((message["executable"], os.path.dirname(message["manifest_path"])))
    return found


def run(program, folder):
    """Seconds, processor seconds with its children's, exit status and output."""
    started = time.monotonic()
    environment = {**os.environ, "CARGO": "cargo", "CARGO_MANIFEST_DIR": folder}
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen([program, "-q"], cwd=folder, env=environment, stdout=output, stderr=output)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return time.monotonic() - started, usage.ru_utime + usage.ru_stime, child.returncode, text


def print_slowest(kind, slow):
    print(f"the most {kind}:", *(f"  {seconds:5.1f} s  {name}" for seconds, name in sorted(slow)[-8:]), sep="\n")


def main():
    options = sys.argv[1:]
    found = programs(options)
    if not found:
        sys.exit("cargo has built no test program")
    built, started = cpu_seconds(), time.monotonic()
    failed, tests, slow, busy = [], 0, [], []
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        running = {pool.submit(run, *each): each for each in found}
        for done in concurrent.futures.as_completed(running):
            program, folder = running[done]
            name = f"{os.path.relpath(folder)}: {re.sub(r'-[0-9a-f]{16}$', '', os.path.basename(program))}"
            seconds, cpu, status, output = done.result()
            counts = re.findall(r"^test result: \w+\. (\d+) passed", output, re.MULTILINE)
            tests += sum(int(count) for count in counts)
            slow.append((seconds, name))
            busy.append((cpu, name))
            skipped = [line for line in output.splitlines() if "SKIPPED" in line]
            if status != 0 or not counts:
                failed.append(name)
                print(f"\n{name}: FAILED with status {status}\n{output}", flush=True)
            elif skipped:
                print(f"{name}:", *skipped, sep="\n  ", flush=True)
    print_slowest("seconds", slow)
    print_slowest("processor seconds", busy)
    print(f"build {built:.0f} s of CPU time; programs {time.monotonic() - started:.0f} s, "
          f"{sum(seconds for seconds, _ in busy):.0f} s of CPU time")
    print(f"{tests} tests of {len(found)} programs passed, {len(failed)} programs failed{': ' if failed else ''}"
          + "; ".join(failed), flush=True)
    docs = subprocess.run(["cargo", "test", "-q", "--workspace", "--doc", "--no-fail-fast", *options], check=False)
    sys.exit(1 if failed or docs.returncode != 0 else 0)


if __name__ == "__main__":
    main()
