"""What a test case is, and what it is given.

A case is a function with the decorator `case`; it takes a `Bench`, and fails by an exception.
"""

import re
import time
from dataclasses import dataclass

from .targets import KernelTarget, Ringbolt

REGISTRY = []
# Lines of the guest's kernel log that no case may cause.
ALWAYS_BAD = r"BUG:|WARNING:|Oops|general protection|blocked for more than|soft lockup|Call Trace"
# Lines that only a case which provokes them may cause.
TROUBLE = r"I/O error|I/O timeout|timeout, |reconnect|digest error|Failed|failed|Buffer I/O|EXT4-fs error|invalid"
# The load is to end; what is in this folder goes with the case.
END_LOAD = "/tmp/end-load"


class Skip(Exception):
    """This case cannot be run here, and why."""


@dataclass
class Case:
    """A registered case."""

    name: str
    about: str
    run: object
    on: tuple
    provokes: str
    machine: object


def case(name, on=("ringbolt", "nvmet"), provokes=None, machine=None):
    """Registers a test case, by the targets that it can be run against.

    `provokes` is a pattern for the TROUBLE lines that belong to the case; `machine` is the hardware that
    its guest has besides the usual."""

    def register(function):
        REGISTRY.append(Case(name, (function.__doc__ or "").strip().splitlines()[0], function, on, provokes, machine))
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

    def serve(self, *subsystems, families=(4,)):
        """Starts the target with these subsystems; -> the target."""
        self.target.start(*subsystems, families=families)
        return self.target

    def connect(self, subsystem, options="", family=4):
        """Connects the guest's kernel to a subsystem; -> the controller's name, such as nvme0."""
        address = self.target.address(family)
        self.guest.check(f"nvme connect {address} -n {subsystem.nqn} {options}")
        return self.controller(subsystem)

    def controller(self, subsystem, timeout=10):
        """The name of the subsystem's controller, as soon as it is live."""
        return self.guest.until(
            f"""for c in /sys/class/nvme/nvme*; do
              [ "$(cat $c/subsysnqn)" = {subsystem.nqn} ] && [ "$(cat $c/state)" = live ] && echo ${{c##*/}} && return 0
            done; return 1""",
            timeout,
        ).strip()

    def block(self, subsystem, nsid=1, timeout=10):
        """The device of a namespace, such as /dev/nvme0n1, as soon as the guest has it."""
        return "/dev/" + self.guest.until(find_block(subsystem, nsid), timeout).strip()

    def disconnect(self, subsystem):
        self.guest.check(f"nvme disconnect -n {subsystem.nqn}")

    # Checks.

    def blocks_seen(self, device):
        """The device's size in the guest, in units of 512 bytes."""
        return int(self.guest.check(f"cat /sys/block/{device.removeprefix('/dev/')}/size"))

    def write_random(self, device, name, offset, length, block):
        """Writes random bytes through the device, without its page cache; keeps them in /tmp/NAME."""
        where = f"oflag=direct,seek_bytes conv=notrunc,fsync seek={offset}"
        self.guest.check(f"head -c {length} /dev/urandom > /tmp/{name}", 60)
        self.guest.check(f"dd if=/tmp/{name} of={device} bs={block} {where} status=none", 120)

    def compare(self, device, name, offset, length, block):
        """What the device holds must be what is in /tmp/NAME."""
        where = f"iflag=direct,skip_bytes,count_bytes skip={offset} count={length}"
        self.guest.check(f"dd if={device} bs={block} {where} status=none | cmp - /tmp/{name}", 120)

    def fio(self, name, filename, *options, timeout=180):
        """Runs a fio job, which must find no error."""
        return self.guest.check(fio_command(name, filename, *options), timeout)

    def start_load(self, name, filename, *options):
        """Runs a fio job again and again until `end_load`; -> its guest job.

        Each run ends by itself: a fio that is told to end by a signal may wait forever, for a lock that its
        handler took while its holder was interrupted, or for I/O that it counts and never began."""
        run = fio_command(name, filename, "--time_based", "--runtime=5", *options)
        return self.guest.spawn(f"while [ ! -e {END_LOAD} ]; do {run} || exit; done")

    def end_load(self, load):
        """Ends the load, which must have found no error."""
        assert load.rc is None, f"the load ended by itself: {load.out}"
        self.guest.check(f"touch {END_LOAD}")
        load.check(60)

    # The end.

    def tear_down(self, allowed):
        """Leaves the guest as it was and stops the target; -> complaints about what was left behind."""
        complaints = []
        self.guest.check(
            "umount -l /mnt 2> /dev/null; killall -q -9 fio dd nc uevent; nvme disconnect-all; rm -rf /tmp/*; true", 60
        )
        # Controllers of the machine itself stay.
        if not self.guest.machine:
            self.guest.until('[ -z "$(ls /sys/class/nvme)" ] && ! ls /sys/block | grep -q nvme', 20)
        self.target.stop()
        for line in self.guest.check("dmesg -c").splitlines():
            if re.search(ALWAYS_BAD, line) or (re.search(TROUBLE, line) and not re.search(allowed or r"(?!)", line)):
                complaints.append(line)
        return complaints


def find_block(subsystem, nsid):
    """Shell text that prints the name of a namespace's device, and fails while there is none."""
    return f"""for b in /sys/block/nvme*; do
      [ "$(cat $b/device/subsysnqn 2> /dev/null)" = {subsystem.nqn} ] && [ "$(cat $b/nsid)" = {nsid} ] &&
        [ "$(cat $b/hidden)" = 0 ] && [ -b /dev/${{b##*/}} ] && echo ${{b##*/}} && return 0
    done; return 1"""


def fio_command(name, filename, *options):
    fixed = ["--ioengine=libaio", "--direct=1", "--group_reporting", "--output-format=terse", "--minimal"]
    return " ".join(["fio", f"--name={name}", f"--filename={filename}", *fixed, *options])


def run_case(chosen, bench):
    """Runs one case and cleans up behind it; -> seconds. Raises what the case raised."""
    started = time.monotonic()
    bench.guest.check("dmesg -c > /dev/null")
    chosen.run(bench)
    if bench.guest.dead:  # the case has cut its power: there is nothing left to look at
        return time.monotonic() - started
    complaints = bench.tear_down(chosen.provokes)
    if complaints:
        raise AssertionError("the guest's kernel complained:\n" + "\n".join(complaints[:10]))
    return time.monotonic() - started
