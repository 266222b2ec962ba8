"""Divides cases among guests: a schedule, and worker processes that take cases from it in parallel."""

import os
import subprocess
import threading

# A worker ends the output of each case with this character and the outcome.
END = "\x1e"
# The seconds that another guest costs, at least.
BOOT_SECONDS = 10


class Schedule:
    """The waiting cases, by the machine of their guest.

    A guest runs all cases for its machine, the longest first. A worker without waiting cases for its guest takes
    those of a machine without a guest, or else helps another worker if that saves more than the boot costs."""

    def __init__(self, cases):
        self.groups, self.served, self.lock = {}, set(), threading.Lock()
        for case in cases:
            self.groups.setdefault(kind(case), []).append(case)
        for group in self.groups.values():
            machines = list(dict.fromkeys(case.machine for case in group))
            group.sort(key=lambda case: (machines.index(case.machine), -case.seconds))

    def take(self, last=None):
        """-> the next case for a worker after the case `last`, or None if nothing is left for it."""
        with self.lock:
            own = self.groups.get(kind(last)) if last else None
            if own:
                return own.pop(0)
            waiting = [name for name, group in self.groups.items() if group]
            candidates = [name for name in waiting if name not in self.served]
            candidates = candidates or [name for name in waiting if self._seconds(name) > BOOT_SECONDS]
            if not candidates:
                return None
            chosen = max(candidates, key=self._seconds)
            self.served.add(chosen)
            return self.groups[chosen].pop(0)

    def _seconds(self, name):
        return sum(case.seconds for case in self.groups[name])


def kind(case):
    """The group of a case. All cases with rebuilt VFIO modules form one group, so only one process builds them."""
    return "vfio" if case.machine and case.machine.vfio else case.machine


class Worker:
    """A process that runs the cases whose names it reads, one at a time."""

    def __init__(self, command, environment):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, text=True, bufsize=1, env=environment, **pipes)

    def run(self, name):
        """-> (outcome, output) of a case; the outcome is None if the process ended."""
        output = []
        try:
            self.process.stdin.write(f"{name}\n")
        except BrokenPipeError:
            return None, ""
        for line in self.process.stdout:
            if line.startswith(END):
                return line[1:].strip(), "".join(output)
            output.append(line)
        return None, "".join(output)

    def close(self):
        """Waits for the end of the process; -> its status."""
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.stdout.close()
        return self.process.wait()


def run(command, cases, jobs, print_text):
    """Runs the cases in `jobs` processes of `command`; -> {PASS, FAIL, SKIPPED: count}."""
    schedule, lock, workers, failures = Schedule(cases), threading.Lock(), set(), []
    stopped = threading.Event()
    count = {"PASS": 0, "FAIL": 0, "SKIPPED": 0}
    # Guests in parallel are slower than one alone.
    environment = {"RINGBOLT_VM_PATIENCE": str(jobs), **os.environ}

    def work():
        worker = case = None
        while not stopped.is_set() and (case := schedule.take(case)):
            if worker is None:
                worker = Worker(command, environment)
                workers.add(worker)
            outcome, output = worker.run(case.name)
            if outcome is None:
                outcome = "FAIL"
                output += f"FAIL    {case.name}: its process exited with status {worker.close()}\n"
                workers.discard(worker)
                worker = None
            with lock:
                count[outcome] += 1
                print_text(output)
        if worker:
            worker.close()
            workers.discard(worker)

    def guarded():
        try:
            work()
        except Exception as error:  # raised in the main thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, daemon=True) for _ in range(jobs)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        stopped.set()
        for worker in list(workers):
            worker.process.terminate()
        for thread in threads:
            thread.join()
        raise
    if failures:
        raise failures[0]
    return count
