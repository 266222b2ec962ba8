"""The registration of test cases, and the API that they use.

A case is a function with the decorator `case`. It takes a `Bench` and fails with an exception.
"""

import re
import time
from dataclasses import dataclass

from .targets import KernelTarget, Ringbolt

REGISTRY = []
# Patterns in the guest's kernel log that are always errors.
ALWAYS_BAD = r"BUG:|WARNING:|Oops|general protection|blocked for more than|soft lockup|Call Trace"
# Patterns that are errors unless the case declares them with `provokes`.
TROUBLE = r"I/O error|I/O timeout|timeout, |reconnect|digest error|Failed|failed|Buffer I/O|EXT4-fs error|invalid"
# This file tells the load to stop; the folder is emptied after each case.
END_LOAD = "/tmp/end-load"


class Skip(Exception):
    """This case cannot run here, with the reason."""


@dataclass
class Case:
    """A registered case."""

    name: str
    about: str
    run: object
    on: tuple
    provokes: str
    machine: object
    seconds: float


def case(name, on=("ringbolt", "nvmet"), provokes=None, machine=None, seconds=5):
    """Registers a test case; `on` lists the targets that it runs against.

    `provokes` is a pattern for expected kernel log lines among TROUBLE; `machine` is the additional hardware
    of its guest; `seconds` tells the schedule how long it takes, roughly, so that long cases start first."""

    def register(function):
        about = (function.__doc__ or "").strip().splitlines()[0]
        REGISTRY.append(Case(name, about, function, on, provokes, machine, seconds))
        return function

    return register


class Bench:
    """A guest, a target and the operations that most cases share."""

    def __init__(self, guest, folder, kind, binary):
        self.guest, self.folder, self.kind = guest, folder, kind
        self.target = Ringbolt(guest, folder, binary) if kind == "ringbolt" else KernelTarget(guest, folder)

    @staticmethod
    def skip(reason):
        raise Skip(reason)

    # Set-up.

    def serve(self, *subsystems, families=(4,), options=()):
        """Starts the target with these subsystems, `ringbolt serve` with these options too; -> the target."""
        more = {"options": options} if options else {}
        self.target.start(*subsystems, families=families, **more)
        return self.target

    def connect(self, subsystem, options="", family=4):
        """Connects the guest's kernel to a subsystem; -> the controller's name, such as nvme0."""
        address = self.target.address(family)
        self.guest.check(f"nvme connect {address} -n {subsystem.nqn} {options}")
        return self.controller(subsystem)

    def controller(self, subsystem, timeout=10):
        """Waits until the subsystem's controller is live; -> its name."""
        return self.guest.until(
            f"""for c in /sys/class/nvme/nvme*; do
              [ "$(cat $c/subsysnqn)" = {subsystem.nqn} ] && [ "$(cat $c/state)" = live ] && echo ${{c##*/}} && return 0
            done; return 1""",
            timeout,
        ).strip()

    def block(self, subsystem, nsid=1, timeout=10):
        """Waits for the block device of a namespace; -> its path, such as /dev/nvme0n1."""
        return "/dev/" + self.guest.until(find_block(subsystem, nsid), timeout).strip()

    def disconnect(self, subsystem):
        self.guest.check(f"nvme disconnect -n {subsystem.nqn}")

    # Checks.

    def blocks_seen(self, device):
        """The device's size in the guest, in units of 512 bytes."""
        return int(self.guest.check(f"cat /sys/block/{device.removeprefix('/dev/')}/size"))

    def write_random(self, device, name, offset, length, block):
        """Writes random bytes to the device with direct I/O; keeps a copy in /tmp/NAME."""
        where = f"oflag=direct,seek_bytes conv=notrunc,fsync seek={offset}"
        self.guest.check(f"head -c {length} /dev/urandom > /tmp/{name}", 60)
        self.guest.check(f"dd if=/tmp/{name} of={device} bs={block} {where} status=none", 120)

    def compare(self, device, name, offset, length, block):
        """The device's content must equal /tmp/NAME."""
        where = f"iflag=direct,skip_bytes,count_bytes skip={offset} count={length}"
        self.guest.check(f"dd if={device} bs={block} {where} status=none | cmp - /tmp/{name}", 120)

    def fio(self, name, filename, *options, timeout=180):
        """Runs a fio job, which must succeed."""
        return self.guest.check(fio_command(name, filename, *options), timeout)

    def start_load(self, name, filename, *options):
        """Repeats a fio job until `end_load`; -> its guest job.

        Each run must end by itself: after a signal, fio may hang on a lock that the signal handler takes while its
        holder is interrupted, or on I/O that it counts but never submitted."""
        run = fio_command(name, filename, *options)
        return self.guest.spawn(f"while [ ! -e {END_LOAD} ]; do {run} || exit; done")

    def end_load(self, load):
        """Stops the load, which must have succeeded."""
        assert load.rc is None, f"the load ended early: {load.out}"
        self.guest.check(f"touch {END_LOAD}")
        load.check(60)

    # Tear-down.

    def tear_down(self, allowed):
        """Cleans up the guest and stops the target; -> unexpected kernel log lines."""
        log_errors = []
        # Relays (nc) end last: a keep-alive that is in flight when its relay dies fails, and the kernel logs that.
        self.guest.check(
            "umount -l /mnt 2> /dev/null; killall -q -9 fio dd uevent; nvme disconnect-all; killall -q -9 nc;"
            " rm -rf /tmp/*; true",
            60,
        )
        # Controllers of the machine itself remain.
        if not self.guest.machine:
            self.guest.until('[ -z "$(ls /sys/class/nvme)" ] && ! ls /sys/block | grep -q nvme', 20)
        self.target.stop()
        for line in self.guest.check("dmesg -c").splitlines():
            if re.search(ALWAYS_BAD, line) or (re.search(TROUBLE, line) and not re.search(allowed or r"(?!)", line)):
                log_errors.append(line)
        return log_errors


def find_block(subsystem, nsid):
    """Shell text that prints the name of a namespace's device, and fails if it does not exist."""
    return f"""for b in /sys/block/nvme*; do
      [ "$(cat $b/device/subsysnqn 2> /dev/null)" = {subsystem.nqn} ] && [ "$(cat $b/nsid)" = {nsid} ] &&
        [ "$(cat $b/hidden)" = 0 ] && [ -b /dev/${{b##*/}} ] && echo ${{b##*/}} && return 0
    done; return 1"""


def fio_command(name, filename, *options):
    fixed = ["--ioengine=libaio", "--direct=1", "--group_reporting", "--output-format=terse", "--minimal"]
    return " ".join(["fio", f"--name={name}", f"--filename={filename}", *fixed, *options])


def run_case(selected, bench):
    """Runs one case and cleans up after it; -> seconds. Re-raises the exception of a failed case."""
    started = time.monotonic()
    bench.guest.check("dmesg -c > /dev/null")
    selected.run(bench)
    if bench.guest.dead:  # the case cut its power: there is no log to check
        return time.monotonic() - started
    log_errors = bench.tear_down(selected.provokes)
    if log_errors:
        raise AssertionError("unexpected lines in the guest's kernel log:\n" + "\n".join(log_errors[:10]))
    return time.monotonic() - started
