#!/usr/bin/env python3
"""Runs the VM tests: the Linux kernel's NVMe/TCP initiator, in a QEMU guest, against the target.

RINGBOLT names the ringbolt binary. One line per case, then `N passed, N failed, N skipped`.
"""

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True

import cases  # noqa: E402, F401  (registers the cases)
from harness import Unavailable, parallel, qemu  # noqa: E402
from harness.case import REGISTRY, Bench, Skip, run_case  # noqa: E402
from harness.guest import Guest, GuestError  # noqa: E402
from harness.image import Image  # noqa: E402

CACHE = os.environ.get("RINGBOLT_VM_CACHE") or os.path.expanduser("~/.cache/ringbolt-vm")

# Maximum number of attempts to boot a guest.
BOOTS_MAX = 3


class Runner:
    """Runs cases, reusing one guest until a case leaves it unusable."""

    def __init__(self, options):
        self.options, self.guest, self.folder, self.bench = options, None, None, None
        self.image = self.vfio_image = self.program = None
        self.count = {"PASS": 0, "FAIL": 0, "SKIPPED": 0}

    def report(self, outcome, name, detail):
        self.count[outcome] += 1
        print(f"{outcome:7} {name}: {detail}", flush=True)
        return outcome

    def prepare(self):
        """Makes the guests' image and selects their QEMU; raises Unavailable if there is none."""
        if not shutil.which(qemu.PROGRAM):
            raise Unavailable(f"{qemu.PROGRAM} is not installed: apt install qemu-system-x86")
        self.image = self.make_image()
        self.program = qemu.PROGRAM
        try:
            self.program = qemu.with_vfio_user(CACHE)
        except (Unavailable, OSError) as reason:
            print(f"# with this machine's QEMU, which may be slower: {reason}", flush=True)

    def cpu_seconds(self):
        """The CPU time of the guest, and of all guests and targets that have ended."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime + (self.guest.cpu_seconds() if self.guest else 0)

    def kind_for(self, selected_case):
        """The target to run a case against; raises Skip if there is none."""
        if self.options.target == "nvmet" or "ringbolt" not in selected_case.on:
            if "nvmet" not in selected_case.on:
                raise Skip("requires Ringbolt, but --target nvmet is selected")
            return "nvmet"
        if not os.environ.get("RINGBOLT"):
            raise Skip("RINGBOLT is not set to a ringbolt binary")
        return "ringbolt"

    def make_image(self, **options):
        """The guest's kernel and initramfs, from the cache or newly built."""
        started = time.monotonic()
        image = Image(CACHE, self.options.release, self.options.refresh, **options)
        if time.monotonic() - started > 1:
            print(f"# guest image built in {time.monotonic() - started:.1f} s", flush=True)
        return image

    def bench_for(self, selected_case):
        """A bench for a case; boots a guest if none is running."""
        kind = self.kind_for(selected_case)
        if self.guest and self.guest.machine != selected_case.machine:
            self.retire()
        if self.guest is None:
            image = self.image
            if selected_case.machine and selected_case.machine.vfio:
                image = self.vfio_image = self.vfio_image or self.make_image(vfio=True)
            elif selected_case.machine and (selected_case.machine.newest or selected_case.machine.tls):
                image = self.make_image(newest=selected_case.machine.newest, tls=selected_case.machine.tls)
            self.folder = tempfile.mkdtemp(prefix="ringbolt-vm.", dir=self.options.tmp)
            self.guest = self.boot(image, selected_case.machine)
            seconds = f"{self.guest.boot_seconds:.1f} s ({self.guest.cpu_seconds():.1f} s of CPU time)"
            print(f"# kernel {image.made['kernel']}, booted in {seconds}", flush=True)
        folder = f"{self.folder}/{selected_case.name}"
        os.mkdir(folder)
        return Bench(self.guest, folder, kind, os.environ.get("RINGBOLT"))

    def boot(self, image, machine):
        """Boots a guest. Emulated CPUs sometimes crash on code that the kernel patches during boot. None of our
        code runs before the agent answers, so a retry hides no bug."""
        # Only QEMU's releases before 9 have the plugin interface that counts instructions.
        program = qemu.PROGRAM if machine and machine.counted else self.program
        for attempt in range(BOOTS_MAX):
            try:
                return Guest(image, self.folder, machine=machine, program=program)
            except GuestError as error:
                if attempt + 1 == BOOTS_MAX:
                    raise
                print(f"# retrying the boot: {str(error).splitlines()[0]}", flush=True)

    def run(self, selected_case):
        """Runs one case; -> its outcome. The reported seconds do not include the boot of its guest."""
        started, cpu_before = time.monotonic(), self.cpu_seconds()

        def seconds():
            return f"{time.monotonic() - started:.1f} s ({self.cpu_seconds() - cpu_before:.1f} s of CPU time)"

        try:
            self.bench = self.bench_for(selected_case)
            started, cpu_before = time.monotonic(), self.cpu_seconds()
            run_case(selected_case, self.bench)
            shutil.rmtree(self.bench.folder)
            self.bench = None
            outcome = self.report("PASS", selected_case.name, seconds())
            if self.guest.dead:
                self.retire()
        except (Skip, Unavailable) as reason:
            outcome = self.report("SKIPPED", selected_case.name, str(reason))
            if self.bench:
                self.retire()
        except Exception as error:  # a broken case must not prevent the others from running
            outcome = self.report("FAIL", selected_case.name, seconds())
            self.print_diagnostics(error, self.bench)
            self.retire(failed=True)
        return outcome

    def print_diagnostics(self, error, bench):
        """Prints the diagnostics of a failure, for readers who have only this log."""
        kind = "" if isinstance(error, (AssertionError, GuestError)) else f"{type(error).__name__}: "
        parts = {"": f"{kind}{error}"}
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/cases/" in frame.filename]
        if frames:
            parts[""] += f"\nat {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}: {frames[-1].line}"
        if bench:
            parts["target"] = bench.target.log()
            self.guest.alarm = None  # the guest still answers if only the target died
            try:
                parts["guest's kernel"] = self.guest.check("dmesg | tail -n 25", 10)
                parts["guest's disks"] = self.guest.check("cd /sys/block; grep . nvme*/inflight 2> /dev/null; true", 10)
                blocked = "dmesg -c > /dev/null; echo w > /proc/sysrq-trigger; dmesg | grep -v '^.\\{15\\}sysrq:'"
                parts["guest's blocked tasks"] = self.guest.run(blocked, 10).out
            except (AssertionError, GuestError, OSError):
                parts["guest's console"] = self.guest.console()
        for title, text in parts.items():
            for line in text.strip().splitlines():
                print(f"    {title + '| ' if title else ''}{line}", flush=True)

    def retire(self, failed=False):
        """Stops the guest and the target; the next case gets new ones."""
        if self.bench and self.bench.kind == "ringbolt":
            self.bench.target.kill_if_running()
        self.bench = None
        if self.guest:
            self.guest.close()
            self.guest = None
        if self.folder and failed and self.options.keep:
            print(f"    files kept in {self.folder}", flush=True)
        elif self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = None


def run_all(runner, selected):
    """Runs cases in this process."""
    schedule, last = parallel.Schedule(selected), None
    try:
        while last := schedule.take(last):
            runner.run(last)
    finally:
        runner.retire()


def work(runner):
    """Runs the cases whose names arrive on standard input, for `parallel.run`."""
    by_name = {selected_case.name: selected_case for selected_case in REGISTRY}
    try:
        for line in sys.stdin:
            print(f"{parallel.END}{runner.run(by_name[line.strip()])}", flush=True)
    finally:
        runner.retire()


def worker_command(options):
    """The command of a process that runs `work`."""
    command = [sys.executable, os.path.abspath(__file__), "--worker", f"--target={options.target}"]
    command += ["--keep"] if options.keep else []
    return command + [f"--{name}={value}" for name in ("release", "tmp") if (value := getattr(options, name))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases to run (default: all)")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    target_help = "nvmet: the guest kernel's own target, to validate the cases themselves"
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="guests in parallel (default: 1)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--target", choices=("ringbolt", "nvmet"), default="ringbolt", help=target_help)
    parser.add_argument("--release", help="another release of this distribution for the guest, such as trixie")
    parser.add_argument("--refresh", action="store_true", help="download the guest's packages again")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a failed case")
    parser.add_argument("--tmp", help="directory for backing files and logs (default: the system's)")
    options = parser.parse_args()
    if options.list:
        for selected_case in REGISTRY:
            print(f"{selected_case.name:20} {selected_case.about}")
        return 0
    unknown = set(options.names) - {selected_case.name for selected_case in REGISTRY}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))} (see --list)")
    binary = os.environ.get("RINGBOLT")
    if binary and not os.access(binary, os.X_OK):
        parser.error(f"RINGBOLT names {binary}, which is not executable")
    selected = [selected_case for selected_case in REGISTRY if not options.names or selected_case.name in options.names]
    # On SIGTERM, stop QEMU and the target as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runner = Runner(options)
    count = runner.count
    try:
        runner.prepare()
    except (Unavailable, OSError) as reason:
        for selected_case in selected:
            runner.report("SKIPPED", selected_case.name, str(reason))
    else:
        jobs = min(options.jobs, len(selected))
        if options.worker:
            work(runner)
            return 0
        if jobs > 1:
            count = parallel.run(worker_command(options), selected, jobs, lambda text: print(text, end="", flush=True))
        else:
            run_all(runner, selected)
    print(f"{count['PASS']} passed, {count['FAIL']} failed, {count['SKIPPED']} skipped")
    return 1 if count["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
