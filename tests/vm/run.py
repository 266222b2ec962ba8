#!/usr/bin/env python3
"""Runs the VM tests: the Linux kernel's NVMe/TCP initiator, in a QEMU guest, against the target.

RINGBOLT names the ringbolt binary. One line per case, then `N passed, N failed, N skipped`.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True

import cases  # noqa: E402, F401  (registers the cases)
from harness import Unavailable, parallel  # noqa: E402
from harness.case import REGISTRY, Bench, Skip, run_case  # noqa: E402
from harness.guest import Guest, GuestError  # noqa: E402
from harness.image import Image  # noqa: E402

CACHE = os.environ.get("RINGBOLT_VM_CACHE") or os.path.expanduser("~/.cache/ringbolt-vm")

# How often a guest is started before it is given up.
BOOTS_MAX = 3


class Runner:
    """Keeps one guest for as many cases as leave it usable."""

    def __init__(self, options):
        self.options, self.guest, self.folder, self.bench = options, None, None, None
        self.vfio_image = None
        self.count = {"PASS": 0, "FAIL": 0, "SKIPPED": 0}

    def report(self, word, name, detail):
        self.count[word] += 1
        print(f"{word:7} {name}: {detail}", flush=True)

    def kind_for(self, chosen):
        """The target to run a case against, or a Skip that says why there is none."""
        if self.options.target == "nvmet" or "ringbolt" not in chosen.on:
            if "nvmet" not in chosen.on:
                raise Skip("needs Ringbolt, and --target nvmet was asked for")
            return "nvmet"
        if not os.environ.get("RINGBOLT"):
            raise Skip("RINGBOLT does not name a ringbolt binary")
        return "ringbolt"

    def make_image(self, vfio=False):
        """The guest's kernel and initramfs, from the cache or new."""
        started = time.monotonic()
        image = Image(CACHE, self.options.release, self.options.refresh, vfio)
        if time.monotonic() - started > 1:
            print(f"# guest made in {time.monotonic() - started:.1f} s", flush=True)
        return image

    def bench_for(self, chosen, image):
        """A bench in the guest, which is booted if there is none."""
        kind = self.kind_for(chosen)
        if self.guest and self.guest.machine != chosen.machine:
            self.retire()
        if self.guest is None:
            if chosen.machine and chosen.machine.vfio:
                image = self.vfio_image = self.vfio_image or self.make_image(vfio=True)
            self.folder = tempfile.mkdtemp(prefix="ringbolt-vm.", dir=self.options.tmp)
            self.guest = self.boot(image, chosen.machine)
            print(f"# kernel {image.made['kernel']}, booted in {self.guest.boot_seconds:.1f} s", flush=True)
        folder = f"{self.folder}/{chosen.name}"
        os.mkdir(folder)
        return Bench(self.guest, folder, kind, os.environ.get("RINGBOLT"))

    def boot(self, image, machine):
        """A guest. Emulated processors sometimes trip over code that the kernel patches while it starts; nothing
        of ours runs before the agent answers, so that trying again hides nothing."""
        for trial in range(BOOTS_MAX):
            try:
                return Guest(image, self.folder, machine=machine)
            except GuestError as error:
                if trial + 1 == BOOTS_MAX:
                    raise
                print(f"# booting again: {str(error).splitlines()[0]}", flush=True)

    def run(self, chosen, image):
        started = time.monotonic()
        try:
            self.bench = self.bench_for(chosen, image)
            run_case(chosen, self.bench)
            shutil.rmtree(self.bench.folder)
            self.bench = None
            self.report("PASS", chosen.name, f"{time.monotonic() - started:.1f} s")
            if self.guest.dead:
                self.retire()
        except (Skip, Unavailable) as reason:
            self.report("SKIPPED", chosen.name, str(reason))
            if self.bench:
                self.retire()
        except Exception as error:  # a broken case must not keep the others from being run
            self.report("FAIL", chosen.name, f"{time.monotonic() - started:.1f} s")
            self.explain(error, self.bench)
            self.retire(failed=True)

    def explain(self, error, bench):
        """What someone needs who reads only this log."""
        kind = "" if isinstance(error, (AssertionError, GuestError)) else f"{type(error).__name__}: "
        parts = {"": f"{kind}{error}"}
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/cases/" in frame.filename]
        if frames:
            parts[""] += f"\nat {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}: {frames[-1].line}"
        if bench:
            parts["target"] = bench.target.log()
            self.guest.alarm = None  # the guest can still be asked when it is the target that died
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
        """Ends the guest and the target: after a failure the next case gets new ones."""
        if self.bench and self.bench.kind == "ringbolt":
            self.bench.target.abandon()
        self.bench = None
        if self.guest:
            self.guest.close()
            self.guest = None
        if self.folder and failed and self.options.keep:
            print(f"    kept {self.folder}", flush=True)
        elif self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases to run (default: all)")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    kernels = "nvmet: the guest kernel's own target, to check the cases themselves"
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="guests at a time (default: 1)")
    parser.add_argument("--target", choices=("ringbolt", "nvmet"), default="ringbolt", help=kernels)
    parser.add_argument("--release", help="another release of this distribution for the guest, such as trixie")
    parser.add_argument("--refresh", action="store_true", help="fetch the guest's packages again")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a failed case")
    parser.add_argument("--tmp", help="where backing files and logs go (default: the system's)")
    options = parser.parse_args()
    if options.list:
        for chosen in REGISTRY:
            print(f"{chosen.name:20} {chosen.about}")
        return 0
    unknown = set(options.names) - {chosen.name for chosen in REGISTRY}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))} (--list names them)")
    binary = os.environ.get("RINGBOLT")
    if binary and not os.access(binary, os.X_OK):
        parser.error(f"RINGBOLT names {binary}, which cannot be run")
    selected = [chosen for chosen in REGISTRY if not options.names or chosen.name in options.names]
    # Also when this process is told to end, QEMU and the target end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runner = Runner(options)
    count = runner.count
    try:
        if not shutil.which("qemu-system-x86_64"):
            raise Unavailable("qemu-system-x86_64 is not here: apt install qemu-system-x86")
        image = runner.make_image()
    except (Unavailable, OSError) as reason:
        for chosen in selected:
            runner.report("SKIPPED", chosen.name, str(reason))
    else:
        wanted = parallel.groups(selected)
        if min(options.jobs, len(wanted)) > 1:
            same = [f"--target={options.target}", *(["--keep"] if options.keep else [])]
            same += [f"--{name}={value}" for name in ("release", "tmp") if (value := getattr(options, name))]
            command = [sys.executable, os.path.abspath(__file__), *same]
            count = parallel.run(command, wanted, options.jobs, lambda text: print(text, end="", flush=True))
        else:
            try:
                for chosen in selected:
                    runner.run(chosen, image)
            finally:
                runner.retire()
    print(f"{count['PASS']} passed, {count['FAIL']} failed, {count['SKIPPED']} skipped")
    return 1 if count["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
