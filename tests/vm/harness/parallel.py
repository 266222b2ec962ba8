"""Several guests at once: groups of cases that share a guest, each run by a process of its own."""

import concurrent.futures
import os
import re
import subprocess
import threading

HEADER = re.compile(r"PASS|FAIL|SKIPPED|#")
SUMMARY = re.compile(r"(\d+) passed, (\d+) failed, (\d+) skipped$")


def groups(cases):
    """-> lists of names of cases that follow one another and have the same machine."""
    found, last = [], None
    for case in cases:
        # What makes the kernel with all of VFIO's ways is for one process to make.
        kind = "vfio" if case.machine and case.machine.vfio else case.machine
        if not found or kind != last:
            found.append([])
        found[-1].append(case.name)
        last = kind
    return found


class Lines:
    """Prints what several processes say: a header line with all that follows it as one piece."""

    def __init__(self, show):
        self.show, self.lock = show, threading.Lock()

    def of(self, stream):
        """Shows the lines of a stream until it ends; -> (passed, failed, skipped), or None without a summary."""
        piece, counts = [], None
        for line in stream:
            summary = SUMMARY.match(line)
            if summary:
                counts = tuple(map(int, summary.groups()))
                continue
            if HEADER.match(line):
                self._flush(piece)
                piece = []
            piece.append(line)
        self._flush(piece)
        return counts

    def _flush(self, piece):
        with self.lock:
            if piece:
                self.show("".join(piece))


def run(command, wanted, jobs, show):
    """Runs `command NAME…` for each group, `jobs` of them at a time; -> {PASS, FAIL, SKIPPED: count}."""
    lines, running, count = Lines(show), set(), {"PASS": 0, "FAIL": 0, "SKIPPED": 0}
    # Two guests on two processors take longer than one.
    environment = {"RINGBOLT_VM_PATIENCE": str(jobs), **os.environ}

    def one(names):
        process = subprocess.Popen(
            [*command, *names], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        running.add(process)
        try:
            with process.stdout:
                counts = lines.of(process.stdout)
            status = process.wait()
        finally:
            running.discard(process)
        if counts is None:
            show(f"FAIL    {' '.join(names)}: their process ended with status {status} and no summary\n")
            return 0, len(names), 0
        return counts

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, names) for names in wanted]
        try:
            for future in concurrent.futures.as_completed(futures):
                for word, number in zip(count, future.result(), strict=True):
                    count[word] += number
        except BaseException:
            for future in futures:
                future.cancel()
            for process in list(running):
                process.terminate()
            raise
    return count
