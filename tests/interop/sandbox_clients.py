#!/usr/bin/python3 -B
"""`ringbolt serve` in a sandbox like a container's: a seccomp filter forbids io_uring.

    RINGBOLT=target/debug/ringbolt tests/interop/sandbox_clients.py [CASE...]

Each case prints one line. Files are served through AIO to our own host over NVMe/TCP, which verifies what it reads.
"""

import ctypes
import os
import platform
import struct
import subprocess
import sys

import serving
from serving import MIB, RINGBOLT, random_bytes, run

NQN = "nqn.2025-01.io.ringbolt:sandbox"
# io_uring_setup, io_uring_enter and io_uring_register have the same numbers on all architectures.
IO_URING = (425, 426, 427)
# linux/prctl.h, linux/seccomp.h and linux/bpf_common.h.
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL_EPERM = 0x7FFF0000, 0x00050000 | 1


def forbid_io_uring():
    """Installs a filter for this process and its children; the first word of what it sees is the system call's number."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = [(LOAD_WORD, 0, 0, 0)]
    for left, number in zip(range(len(IO_URING), 0, -1), IO_URING):
        code.append((JUMP_IF_EQUAL, left, 0, number))
    code += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, FAIL_EPERM)]
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer)))
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)):
        if libc.prctl(*(value if isinstance(value, ctypes.Array) else ctypes.c_ulong(value) for value in arguments)):
            os._exit(99)


class Server(serving.Server):
    preexec = staticmethod(forbid_io_uring)

    def serve(self, bdev):
        """Exports a bdev over NVMe/TCP; -> the URI of the namespace."""
        self.rpc("nvmf_create_transport", trtype="TCP")
        self.rpc("nvmf_create_subsystem", nqn=NQN, allow_any_host=True)
        self.rpc("nvmf_subsystem_add_ns", nqn=NQN, namespace={"bdev_name": bdev})
        address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0"}
        self.rpc("nvmf_subsystem_add_listener", nqn=NQN, listen_address=address)
        address = self.rpc("nvmf_get_subsystems", nqn=NQN)[0]["listen_addresses"][0]
        return f"nvme+tcp://127.0.0.1:{address['trsvcid']}/{NQN}?ns=1"


def file_of(server, mib=32):
    path = f"{server.folder}/disk"
    with open(path, "wb") as file:
        file.write(random_bytes(mib * MIB))
    return path


def aio_serves(server):
    """A file is a bdev through AIO, and data and flushes of a host reach it."""
    path = file_of(server)
    assert server.rpc("bdev_aio_create", name="A", filename=path, block_size=4096) == "A"
    uri = server.serve("A")
    load = ("--rw=randwrite", "--bs=4k", "--iodepth=32", "--number_ios=4000", "--verify=pattern", "--fsync=64")
    out = run(RINGBOLT, "perf", f"--filename={uri}", *load)
    assert " 0 wrong" in out, out
    assert open(path, "rb").read() != random_bytes(32 * MIB), "nothing reached the file"


def uring_says_why(server):
    """A uring bdev is refused with the reason, and what to do."""
    path = file_of(server, 1)
    call = [RINGBOLT, "rpc", "-r", server.rpc_socket, "bdev_uring_create", "name=U", f"filename={path}"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "seccomp" in done.stderr, done
    log = open(f"{server.folder}/serve.log").read()
    assert "engine: epoll" in log + server.head, log


def aio_resizes_and_ends(server):
    """Rescan and delete, and a loop of creations, as contexts are destroyed in the background."""
    path = file_of(server, 4)
    for _ in range(20):
        server.rpc("bdev_aio_create", name="A", filename=path, block_size=512, fallocate=True)
        os.truncate(path, 8 * MIB)
        server.rpc("bdev_aio_rescan", name="A")
        assert server.rpc("bdev_get_bdevs", name="A")[0]["num_blocks"] == 8 * MIB // 512
        server.rpc("bdev_aio_delete", name="A")
        os.truncate(path, 4 * MIB)


CASES = {case.__name__: case for case in (aio_serves, uring_says_why, aio_resizes_and_ends)}

if __name__ == "__main__":
    if platform.machine() not in ("x86_64", "aarch64"):
        print("SKIPPED: no filter for this machine")
        sys.exit(0)
    sys.exit(serving.run_cases(CASES, Server))
