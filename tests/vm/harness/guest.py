"""A QEMU guest that runs commands, with one event loop for everything that a test waits for.

`run` waits for a command, `spawn` lets it go on while the test does something else; both speak to
an agent in the guest over a virtio serial port of their own. Nothing here sleeps: each wait ends
at an event or at its deadline, and QEMU's death ends all of them at once.
"""

import base64
import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import time

from . import Unavailable, image as images, machine as machines

QEMU = "qemu-system-x86_64"
JOB_PORTS = 6
# An oops ends QEMU, and with it every wait. The check of copied objects takes the kernel's own
# target, which sends pages that only happen to adjoin, for an attack.
COMMAND_LINE = "console=ttyS0 quiet oops=panic panic=-1 mitigations=off net.ifnames=0 hardened_usercopy=off"
# Slower machines: RINGBOLT_VM_PATIENCE=3 makes every deadline three times as long.
PATIENCE = float(os.environ.get("RINGBOLT_VM_PATIENCE", "1"))


class GuestError(Exception):
    """The guest died, or did not answer by the deadline: it is of no further use."""


class ProcessDied(AssertionError):
    """A process beside the guest, such as the target, ended while a test was waiting."""


class CommandFailed(AssertionError):
    """A command in the guest ended with another status than the test wanted."""


class Events:
    """File descriptors to call back for, and the waiting."""

    def __init__(self):
        self.selector = selectors.DefaultSelector()

    def add(self, file, callback):
        self.selector.register(file, selectors.EVENT_READ, callback)

    def remove(self, file):
        self.selector.unregister(file)

    def wait(self, predicate, timeout, what, poll=None):
        """Runs events until `predicate()` is true, and returns its value.

        With `poll` (seconds) the predicate is also tried at that interval: for conditions that
        give no event here, such as the answer of an RPC."""
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
    """What a command left: its exit status and its output (both streams)."""

    def __init__(self, rc, out):
        self.rc, self.out = rc, out

    def __repr__(self):
        return f"exit status {self.rc}: {self.out.strip()[-2000:]}"


class Port:
    """One agent in the guest: runs one script at a time."""

    def __init__(self, guest, sock):
        self.guest, self.sock, self.buffer, self.job, self.ready = guest, sock, b"", None, False
        self.serial = 0
        sock.setblocking(False)
        guest.events.add(sock, self._readable)

    def _readable(self):
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.guest.events.remove(self.sock)
            return
        if self.job:
            self.job.feed(data)
        else:
            self.buffer += data
            self.ready = self.ready or b"ready\n" in self.buffer

    def start(self, script):
        self.serial += 1
        self.job = Job(self, f"{self.sock.fileno()}.{self.serial}.{time.monotonic_ns()}", script)
        self.sock.setblocking(True)
        self.sock.sendall(f"{self.job.id} {base64.b64encode(script.encode()).decode()}\n".encode())
        self.sock.setblocking(False)
        return self.job


class Job:
    """A command that runs, or ran, in the guest."""

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
        """-> Result, when the command has ended."""
        self.port.guest.wait(lambda: self.rc is not None, timeout, f"end of `{brief(self.script)}`")
        return Result(self.rc, self.out)

    def check(self, timeout=30):
        """-> output; the command must end with status 0."""
        result = self.wait(timeout)
        if result.rc != 0:
            raise CommandFailed(f"`{brief(self.script)}`: {result}")
        return result.out

    def expect(self, pattern, timeout=30):
        """-> match of `pattern` in output that no earlier `expect` has consumed."""

        def found():
            match = re.compile(pattern, re.M).search(self.out, self.read_to)
            if not match and self.rc is not None:
                raise CommandFailed(f"`{brief(self.script)}` ended without /{pattern}/: {Result(self.rc, self.out)}")
            return match

        match = self.port.guest.wait(found, timeout, f"/{pattern}/ from `{brief(self.script)}`")
        self.read_to = match.end()
        return match


def brief(script):
    text = " ".join(script.split())
    return text if len(text) < 120 else text[:117] + "…"


class Guest:
    """A booted guest. `close` it, or use it in a `with`."""

    def __init__(self, image, folder, cpus=2, memory="1G", machine=None, program=QEMU, more=()):
        if not shutil.which(program):
            raise Unavailable(f"{program} is not here: apt install qemu-system-x86")
        self.folder, self.events, self.machine = folder, Events(), machine
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
        theirs = [pair[1] for pair in channels]
        arguments = [
            program,
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-machine", "q35", "-accel", f"tcg,thread={threads}", "-cpu", "max"),
            *("-smp", str(cpus), "-m", memory),
            *("-kernel", image.kernel, "-initrd", initramfs),
            *("-append", command_line.rstrip()),
            *hardware,
            *more,
            *("-chardev", f"file,id=console,path={folder}/console", "-serial", "chardev:console"),
            *("-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="),
            *("-chardev", f"socket,id=qmp,fd={theirs[0].fileno()}", "-mon", "chardev=qmp,mode=control"),
            *("-device", "virtio-serial-pci"),
        ]
        for index, sock in enumerate(theirs[1:]):
            arguments += ["-chardev", f"socket,id=port{index},fd={sock.fileno()}"]
            arguments += ["-device", f"virtserialport,chardev=port{index}"]
        with open(f"{folder}/qemu", "wb") as log:
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[sock.fileno() for sock in theirs],
                start_new_session=True,
            )
        for sock in theirs:
            sock.close()
        self.watch_process(self.process, self._qemu_died)
        self.sockets = [pair[0] for pair in channels]
        self.qmp_socket, self.qmp_buffer, self.qmp_replies = self.sockets[0], b"", []
        self.qmp_socket.setblocking(False)
        self.events.add(self.qmp_socket, self._qmp_readable)
        self.ports = [Port(self, sock) for sock in self.sockets[1:]]
        try:
            self.qmp("qmp_capabilities")
            self.wait(lambda: all(port.ready for port in self.ports), 60, "agent in the guest")
        except ConnectionError as error:
            self.close()
            raise GuestError(f"QEMU ended while it started\n{self.console()}") from error
        except BaseException:
            self.close()
            raise
        self.boot_seconds = time.monotonic() - started

    # Waiting.

    def _qemu_died(self, status):
        self.dead = f"QEMU ended with status {status}"

    def watch_target(self, process):
        """From now on the death of `process` ends every wait, until `unwatch_process`."""

        def died(status):
            self.alarm = f"the target ended by itself, with status {status}"

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
        def alive():
            if self.dead:
                raise GuestError(f"{self.dead}, while waiting for {what}\n{self.console()}".rstrip())
            if self.alarm:
                raise ProcessDied(f"{self.alarm}, while waiting for {what}")
            return predicate()

        return self.events.wait(alive, timeout, what, poll)

    # Commands.

    def spawn(self, script):
        """Starts `script` (shell text, as root) and returns its Job at once."""
        for port in self.ports:
            if port.job is None:
                return port.start(script)
        raise AssertionError("every port has a job: too many spawned")

    def run(self, script, timeout=30):
        """-> Result(rc, out) of `script`."""
        return self.spawn(script).wait(timeout)

    def check(self, script, timeout=30):
        """-> output of `script`, which must end with status 0."""
        return self.spawn(script).check(timeout)

    def until(self, script, timeout=30):
        """Runs `script` again and again in the guest, every 50 ms, until its status is 0; -> output."""
        trial = f"try() {{ {script}\n}}\nwhile ! out=$(try 2>&1); do usleep 50000; done; echo \"$out\""
        return self.check(trial, timeout)

    def counted(self):
        """-> (user, kernel, calls): instructions that the guest has executed so far, and system calls."""
        with open(f"{self.folder}/qemu", "rb") as log:
            seen = log.read().count(b"count: ")
        self.check("mark")
        with open(f"{self.folder}/qemu", encoding="utf-8", errors="replace") as log:
            found = re.findall(r"^count: (\d+) (\d+) (\d+)$", log.read(), re.M)
        assert len(found) == seen + 1, f"{len(found) - seen} marks were seen, not one"
        return tuple(map(int, found[-1]))

    # The machine.

    def _qmp_readable(self):
        data = self.qmp_socket.recv(1 << 16)
        if not data:
            self.events.remove(self.qmp_socket)
        self.qmp_buffer += data
        *lines, self.qmp_buffer = self.qmp_buffer.split(b"\n")
        self.qmp_replies += [reply for reply in map(json.loads, lines) if "return" in reply or "error" in reply]

    def qmp(self, command, **arguments):
        """A command to QEMU's monitor, such as `stop` and `cont`; -> what it returns."""
        self.qmp_replies.clear()
        self.qmp_socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        reply = self.wait(lambda: self.qmp_replies, 10, f"answer to {command} from QEMU")[0]
        if "error" in reply:
            raise GuestError(f"QEMU refused {command}: {reply['error']}")
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
        """Ends the guest at once; nothing can be asked of it any more."""
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
