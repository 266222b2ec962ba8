"""What the interoperability tests share: a `ringbolt serve` for each case, programs that may be missing, and the run."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

RINGBOLT = os.path.abspath(os.environ.get("RINGBOLT", "target/debug/ringbolt"))
SEED = int(os.environ.get("INTEROP_SEED", "0")) or random.SystemRandom().getrandbits(32)
MIB = 1 << 20


class Skipped(Exception):
    pass


def program(name):
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        raise Skipped(f"{name} is not installed")
    return path


def run(*command, **options):
    """Runs a command and returns its output; a failure has both streams."""
    options = {"timeout": 60, **options}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, errors="replace", **options)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


class Server:
    """A `ringbolt serve` with the exports of one case."""

    # Called in the child before it is executed.
    preexec = None

    def __init__(self, folder, cores="0-1"):
        self.folder = folder
        self.rpc_socket = f"{folder}/rpc.sock"
        self.config = None
        command = [RINGBOLT, "serve", "-r", self.rpc_socket]
        command += ["--cores", cores] if os.cpu_count() > 1 else []
        self.log = open(f"{folder}/serve.log", "a")
        streams = {"stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen(command, **streams, text=True, preexec_fn=self.preexec)
        self.head = ""
        for line in self.process.stdout:
            self.head += line
            if line.strip() == "ready":
                break
        else:
            raise AssertionError(f"serve ended: {open(f'{folder}/serve.log').read()}")

    def rpc(self, method, **params):
        pairs = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in params.items()]
        return json.loads(run(RINGBOLT, "rpc", "-r", self.rpc_socket, method, *pairs))

    def malloc(self, name="Malloc0", mib=64, block_size=512):
        self.rpc("bdev_malloc_create", name=name, num_blocks=mib * MIB // block_size, block_size=block_size)
        return name

    def end(self):
        """Ends it as an operator does; it must not have crashed, and not hang."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(20)
        finally:
            self.process.kill()
        assert status in (0, -signal.SIGKILL), f"serve ended with {status}"
        log = open(f"{self.folder}/serve.log").read()
        assert "panicked" not in log, log

    def kill(self):
        self.process.kill()
        self.process.wait()


class Moves:
    """Connections of a server move from one reactor to the other and back all the time, in the body of `with`."""

    def __init__(self, server, at_least=4):
        self.server, self.at_least, self.failure = server, at_least, None
        self.cpus = [reactor["lcore"] for reactor in server.rpc("framework_get_reactors")["reactors"]]
        if len(self.cpus) < 2:
            raise Skipped("one processor, and so one reactor")
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.move)

    def move(self):
        try:
            while not self.stop.is_set():
                for thread, own, other in [(1, *self.cpus[:2]), (2, *self.cpus[1::-1])]:
                    self.server.rpc("thread_set_cpumask", id=thread, cpumask=f"{1 << other:#x}")
                    self.server.rpc("thread_set_cpumask", id=thread, cpumask=f"{1 << own:#x}")
        except Exception as error:
            self.failure = error

    def moved(self):
        [metric] = self.server.rpc("metrics_get", name="ringbolt_target_moved")
        return sum(sample["value"] for sample in metric["samples"])

    def __enter__(self):
        self.before = self.moved()
        self.thread.start()
        return self

    def __exit__(self, failure, *_):
        self.stop.set()
        self.thread.join()
        assert self.failure is None, self.failure
        moved = self.moved() - self.before
        print(f"  {moved} moves")
        assert failure or moved >= self.at_least, f"{moved} moves"


def random_bytes(count):
    return random.Random(SEED).randbytes(count)


def run_cases(cases, server_class):
    """Runs the cases that the command line names, or all; returns the exit status."""
    selected = sys.argv[1:] or list(cases)
    print(f"seed {SEED}")
    counts = {"passed": 0, "failed": 0, "SKIPPED": 0}
    for name in selected:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="interop-") as folder:
            server = server_class(folder)
            outcome, detail = "passed", ""
            try:
                try:
                    cases[name](server)
                finally:
                    server.end()
            except Skipped as reason:
                outcome, detail = "SKIPPED", f": {reason}"
            except Exception as error:  # Any failure of a case is reported, and the others run.
                log = open(f"{folder}/serve.log").read()[-2000:]
                outcome, detail = "failed", f": {type(error).__name__}: {error}\n{log}"
        counts[outcome] += 1
        print(f"{outcome} {name} ({time.monotonic() - started:.1f} s){detail}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["failed"] else 0

