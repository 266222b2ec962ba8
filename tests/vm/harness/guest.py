"""A QEMU guest that runs commands, with one event loop for all waits of a test.

`run` waits for a command, `spawn` runs it in the background; each uses an agent in the guest on its
own virtio serial port. Nothing here sleeps: a wait ends with an event or at its deadline, and all
waits end if QEMU dies.
"""

import base64
import json
import os
import re
import select
import selectors
import shutil
import signal
import socket
import subprocess
import time

from . import Unavailable, image as images, machine as machines

QEMU = "qemu-system-x86_64"
JOB_PORTS = 6
# An oops ends QEMU, and with it every wait. Hardened usercopy is off, as it reports a false positive
# for nvmet, which sends pages that happen to be adjacent.
COMMAND_LINE = "console=ttyS0 quiet oops=panic panic=-1 mitigations=off net.ifnames=0 hardened_usercopy=off"
# On a busy machine, emulated timers fail the kernel's check at boot, and it panics.
COMMAND_LINE += " no_timer_check"
# For speed. The emulated TSC advances with the host's on all CPUs, but Linux distrusts it and reads the emulated HPET,
# which costs a quarter of the CPU time of small I/O.
COMMAND_LINE += " tsc=reliable cryptomgr.notests audit=0 apparmor=0 init_on_alloc=0"
# Without five-level page tables, which lengthen every emulated page walk.
CPU = "max,la57=off"
# For slow machines: RINGBOLT_VM_PATIENCE=3 multiplies every deadline by three.
PATIENCE = float(os.environ.get("RINGBOLT_VM_PATIENCE", "1"))


class GuestError(Exception):
    """The guest died or missed a deadline; it is no longer usable."""


class ProcessDied(AssertionError):
    """A process on the host, such as the target, ended while a test was waiting."""


class CommandFailed(AssertionError):
    """A command in the guest ended with an unexpected status."""


class Events:
    """An event loop over file descriptors with callbacks."""

    def __init__(self):
        self.selector = selectors.DefaultSelector()

    def add(self, file, callback):
        self.selector.register(file, selectors.EVENT_READ, callback)

    def remove(self, file):
        self.selector.unregister(file)

    def wait(self, predicate, timeout, what, poll=None):
        """Processes events until `predicate()` is true, and returns its value.

        With `poll` (seconds) the predicate is also evaluated at that interval, for conditions
        without an event here, such as the result of an RPC."""
        deadline = time.monotonic() + timeout * PATIENCE
        while True:
            value = predicate()
            if value:
                return value
            left = deadline - time.monotonic()
            if left <= 0:
                raise GuestError(f"no {what} within {timeout * PATIENCE:.0f} s")
            for key, _mask in self.selector.select(min(left, poll) if poll else left):
                key.data()


class Result:
    """The exit status and the output (both streams) of a command."""

    def __init__(self, rc, out):
        self.rc, self.out = rc, out

    def __repr__(self):
        return f"exit status {self.rc}: {self.out.strip()[-2000:]}"


class Port:
    """The connection to one agent in the guest, which runs one script at a time."""

    def __init__(self, guest, sock):
        self.guest, self.sock, self.buffer, self.job, self.ready = guest, sock, b"", None, False
        self.serial, self.closed = 0, False
        sock.setblocking(False)
        guest.events.add(sock, self._readable)

    def _readable(self):
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.guest.events.remove(self.sock)
            self.closed = True
            return
        if self.job:
            self.job.feed(data)
        else:
            self.buffer += data
            self.ready = self.ready or b"ready\n" in self.buffer

    def drain(self):
        """Reads what QEMU has written already."""
        while select.select([self.sock], [], [], 0)[0] and not self.closed:
            self._readable()

    def resume(self, origin):
        """Continues a job of the guest that has migrated here."""
        self.job = Job(self, origin.id, origin.script)
        self.job.data, self.job.read_to = origin.data, origin.read_to
        early, self.buffer = self.buffer, b""
        resumed = self.job
        resumed.feed(early)
        return resumed

    def start(self, script):
        self.serial += 1
        self.job = Job(self, f"{self.sock.fileno()}.{self.serial}.{time.monotonic_ns()}", script)
        self.sock.setblocking(True)
        self.sock.sendall(f"{self.job.id} {base64.b64encode(script.encode()).decode()}\n".encode())
        self.sock.setblocking(False)
        return self.job


class Job:
    """A running or finished command in the guest."""

    def __init__(self, port, job_id, script):
        self.port, self.id, self.script, self.data, self.rc = port, job_id, script, b"", None
        self.read_to = 0

    def feed(self, data):
        self.data += data
        end = re.search(rb"\n\x1e" + re.escape(self.id.encode()) + rb" (\d+)\n", self.data[-len(data) - 100 :])
        if end:
            self.rc = int(end[1])
            self.data = self.data[: self.data.rindex(b"\n\x1e")]
            self.port.job, self.port.buffer = None, b""

    @property
    def out(self):
        return self.data.decode("utf-8", "replace")

    def wait(self, timeout=30):
        """Waits for the end of the command; -> Result."""
        self.port.guest.wait(lambda: self.rc is not None, timeout, f"end of `{abbreviated(self.script)}`")
        return Result(self.rc, self.out)

    def check(self, timeout=30):
        """Waits for the end of the command, which must have status 0; -> its output."""
        result = self.wait(timeout)
        if result.rc != 0:
            raise CommandFailed(f"`{abbreviated(self.script)}`: {result}")
        return result.out

    def expect(self, pattern, timeout=30):
        """Waits for `pattern` in output not consumed by an earlier `expect`; -> the match."""

        def found():
            match = re.compile(pattern, re.M).search(self.out, self.read_to)
            if not match and self.rc is not None:
                raise CommandFailed(f"`{abbreviated(self.script)}` ended without /{pattern}/: {Result(self.rc, self.out)}")
            return match

        match = self.port.guest.wait(found, timeout, f"/{pattern}/ from `{abbreviated(self.script)}`")
        self.read_to = match.end()
        return match


def abbreviated(script):
    text = " ".join(script.split())
    return text if len(text) < 120 else text[:117] + "…"


class Guest:
    """A booted guest, or with `incoming` one that waits for a migration; a context manager, or to be closed with `close`."""

    def __init__(self, image, folder, cpus=2, memory="1G", machine=None, program=QEMU, more=(), incoming=None):
        if not shutil.which(program):
            raise Unavailable(f"{program} is not installed: apt install qemu-system-x86")
        self.folder, self.events, self.machine, self.program = folder, Events(), machine, program
        self.dead, self.alarm, self.watched = None, None, []
        started = time.monotonic()
        initramfs, command_line, hardware, threads = image.initramfs, COMMAND_LINE, [], "multi"
        if machine:
            initramfs = f"{folder}/initramfs"
            programs = machines.programs(folder)
            if machine.counted:
                cpus, threads = 1, "single"
                programs["usr/bin/mark"] = machines.compiled(folder, "mark", "-static", "-nostdlib")
            images.with_files(image.initramfs, programs, initramfs)
            command_line += " " + machine.command_line()
            hardware = machine.arguments(folder)
        channels = [socket.socketpair() for _ in range(JOB_PORTS + 1)]
        guest_ends = [pair[1] for pair in channels]
        arguments = [
            program,
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-machine", "q35", "-accel", f"tcg,thread={threads}", "-cpu", CPU),
            *("-smp", str(cpus), "-m", memory),
            *("-kernel", image.kernel, "-initrd", initramfs),
            *("-append", command_line.rstrip()),
            *hardware,
            *more,
            *(("-incoming", incoming) if incoming else ()),
            *("-chardev", f"file,id=console,path={folder}/console", "-serial", "chardev:console"),
            *("-netdev", "user,id=net", "-device", f"{(machine or machines.Machine()).nic},netdev=net,romfile="),
            *("-chardev", f"socket,id=qmp,fd={guest_ends[0].fileno()}", "-mon", "chardev=qmp,mode=control"),
            *("-device", "virtio-serial-pci"),
        ]
        for index, sock in enumerate(guest_ends[1:]):
            arguments += ["-chardev", f"socket,id=port{index},fd={sock.fileno()}"]
            arguments += ["-device", f"virtserialport,chardev=port{index}"]
        with open(f"{folder}/qemu", "wb") as log:
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[sock.fileno() for sock in guest_ends],
                start_new_session=True,
            )
        for sock in guest_ends:
            sock.close()
        self.watch_process(self.process, self._qemu_died)
        self.sockets = [pair[0] for pair in channels]
        self.qmp_socket, self.qmp_buffer, self.qmp_replies = self.sockets[0], b"", []
        self.qmp_socket.setblocking(False)
        self.events.add(self.qmp_socket, self._qmp_readable)
        self.ports = [Port(self, sock) for sock in self.sockets[1:]]
        try:
            self.qmp("qmp_capabilities")
            # Agents that arrive with a migration have been ready before.
            if not incoming:
                self.wait(lambda: all(port.ready for port in self.ports), 60, "agent in the guest")
        except ConnectionError as error:
            self.close()
            raise GuestError(f"QEMU ended during startup\n{self.console()}") from error
        except BaseException:
            self.close()
            raise
        self.boot_seconds = time.monotonic() - started

    def cpu_seconds(self):
        """The CPU time that QEMU has used, in seconds; 0 after its end."""
        if self.process.returncode is not None:
            return 0
        with open(f"/proc/{self.process.pid}/stat", encoding="utf-8") as file:
            # Fields 14 and 15, utime and stime: see proc(5). The second field, in parentheses, may contain spaces.
            user, system = file.read().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    # Waiting.

    def _qemu_died(self, status):
        self.dead = f"QEMU ended with status {status}"

    def watch_target(self, process):
        """Makes every wait fail if `process` dies, until `unwatch_process`."""

        def died(status):
            self.alarm = f"the target exited unexpectedly with status {status}"

        self.alarm = None
        self.watch_process(process, died)

    def watch_process(self, process, callback):
        descriptor = os.pidfd_open(process.pid)

        def died():
            self.unwatch_process(process)
            callback(process.wait())

        self.watched.append((process, descriptor))
        self.events.add(descriptor, died)

    def unwatch_process(self, process):
        for watched, descriptor in list(self.watched):
            if watched is process:
                self.watched.remove((watched, descriptor))
                self.events.remove(descriptor)
                os.close(descriptor)

    def wait(self, predicate, timeout, what, poll=None):
        def check_alive():
            if self.dead:
                raise GuestError(f"{self.dead}, while waiting for {what}\n{self.console()}".rstrip())
            if self.alarm:
                raise ProcessDied(f"{self.alarm}, while waiting for {what}")
            return predicate()

        return self.events.wait(check_alive, timeout, what, poll)

    # Commands.

    def spawn(self, script):
        """Starts `script` (shell text, as root) in the background; -> its Job."""
        for port in self.ports:
            if port.job is None:
                return port.start(script)
        raise AssertionError("every port has a job: too many commands in parallel")

    def run(self, script, timeout=30):
        """-> Result(rc, out) of `script`."""
        return self.spawn(script).wait(timeout)

    def check(self, script, timeout=30):
        """-> output of `script`, which must end with status 0."""
        return self.spawn(script).check(timeout)

    def until(self, script, timeout=30):
        """Repeats `script` in the guest every 50 ms until its status is 0; -> output."""
        loop = f"try() {{ {script}\n}}\nwhile ! out=$(try 2>&1); do usleep 50000; done; echo \"$out\""
        return self.check(loop, timeout)

    def counted(self):
        """-> (user, kernel, calls): instructions executed by the guest so far, and system calls."""
        with open(f"{self.folder}/qemu", "rb") as log:
            seen = log.read().count(b"count: ")
        self.check("mark")
        with open(f"{self.folder}/qemu", encoding="utf-8", errors="replace") as log:
            found = re.findall(r"^count: (\d+) (\d+) (\d+)$", log.read(), re.M)
        assert len(found) == seen + 1, f"{len(found) - seen} marks were recorded, not one"
        return tuple(map(int, found[-1]))

    def adopt(self, other):
        """Continues the jobs of another guest, which has migrated to this one; -> the job here by the job there."""
        adopted = {}
        for port, origin in zip(self.ports, other.ports, strict=True):
            origin.drain()
            if origin.job:
                adopted[origin.job] = port.resume(origin.job)
        return adopted

    # The machine.

    def _qmp_readable(self):
        data = self.qmp_socket.recv(1 << 16)
        if not data:
            self.events.remove(self.qmp_socket)
        self.qmp_buffer += data
        *lines, self.qmp_buffer = self.qmp_buffer.split(b"\n")
        self.qmp_replies += [reply for reply in map(json.loads, lines) if "return" in reply or "error" in reply]

    def qmp(self, command, **arguments):
        """Executes a QMP command, such as `stop` or `cont`; -> its return value."""
        self.qmp_replies.clear()
        self.qmp_socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        reply = self.wait(lambda: self.qmp_replies, 10, f"QMP reply to {command}")[0]
        if "error" in reply:
            raise GuestError(f"QMP command {command} failed: {reply['error']}")
        return reply["return"]

    def console(self):
        """The end of the guest's console and of QEMU's own output."""
        text = ""
        for name in ("console", "qemu"):
            if os.path.exists(f"{self.folder}/{name}"):
                with open(f"{self.folder}/{name}", "rb") as file:
                    text += file.read()[-3000:].decode("utf-8", "replace")
        return text.strip()

    def cut_power(self):
        """Kills QEMU, as a power loss of the guest."""
        self.unwatch_process(self.process)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.dead = "its power was cut"

    def close(self):
        for process, _descriptor in list(self.watched):
            self.unwatch_process(process)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for sock in self.sockets:
            sock.close()
        self.events.selector.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
