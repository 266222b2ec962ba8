"""A QEMU with vfio-user support: this machine's own, or a newer one from packages.

All guests run in it, since it also emulates faster than older releases: starting a program takes a third of the time
of QEMU 7.2. QEMU has `vfio-user-pci` since 10.1. If the machine's is older, a newer one is unpacked from the backports of
the next release, with its libraries, and run with their dynamic loader; nothing is installed.
"""

import fcntl
import json
import os
import re
import shutil
import stat
import subprocess

from . import Unavailable
from .apt import NEXT_RELEASES, Archive

DEVICE = "vfio-user-pci"
PACKAGE = "qemu-system-x86"
PROGRAM = "qemu-system-x86_64"
# Packages needed only for maintainer scripts, and unused boot images.
SKIPPED = re.compile(r"^(adduser|passwd|login|debconf|base-passwd|ipxe)")

LAUNCHER = """#!/bin/sh
# Runs the QEMU beside this file with its own libraries, firmware and modules.
r=$(dirname "$0")/tree
l=$r/usr/lib/x86_64-linux-gnu
export QEMU_MODULE_DIR="$l/qemu"
exec "$l/ld-linux-x86-64.so.2" --library-path "$l" "$r/usr/bin/%s" \\
    -L "$r/usr/share/qemu" -L "$r/usr/share/seabios" "$@"
"""


def has_vfio_user(program):
    """Whether this QEMU has the device model."""
    try:
        probe = subprocess.run([program, "-device", f"{DEVICE},help"], capture_output=True, timeout=60, check=False)
    except OSError:
        return False
    return probe.returncode == 0 and b"options" in probe.stdout


def with_vfio_user(cache):
    """-> the path of a QEMU with vfio-user; raises Unavailable if there is none."""
    own = shutil.which(PROGRAM)
    if own and has_vfio_user(own):
        return own
    folder = os.path.join(cache, "qemu")
    launcher = os.path.join(folder, "qemu")
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(launcher):
            fetch(folder, launcher)
    if not has_vfio_user(launcher):
        raise Unavailable(f"the QEMU in {folder} does not run, or has no {DEVICE}; remove it to download it again")
    return launcher


def fetch(folder, launcher):
    """Downloads and unpacks a newer QEMU with its dependencies."""
    archive = Archive(os.path.join(folder, "apt"))
    release = NEXT_RELEASES.get(archive.distribution)
    if release is None:
        raise Unavailable(f"this machine's QEMU has no {DEVICE} (available since 10.1)")
    archive = Archive(os.path.join(folder, "apt"), release)
    main = next((entry for entry in archive.sources if "-security" not in entry["Suites"]), archive.sources[0])
    suites = {"Suites": f"{release}-backports"}
    archive.sources.append({**main, **suites})
    archive.prepare()
    archive.update()
    names = [name for name in archive.closure([PACKAGE], suites["Suites"]) if not SKIPPED.match(name)]
    tree = os.path.join(folder, "tree")
    shutil.rmtree(tree, ignore_errors=True)
    archive.unpack(names, tree, suites["Suites"])
    with open(launcher, "w", encoding="utf-8") as file:
        file.write(LAUNCHER % PROGRAM)
    os.chmod(launcher, os.stat(launcher).st_mode | stat.S_IXUSR)


def device(path, memory, port="behind"):
    """QEMU options for a vfio-user device, in a guest whose memory the target can map."""
    described = {"driver": DEVICE, "id": "device", "bus": port, "socket": {"path": path, "type": "unix"}}
    return [
        *("-object", f"memory-backend-memfd,id=shared,size={memory},share=on"),
        *("-machine", "memory-backend=shared"),
        *("-device", f"pcie-root-port,id={port},chassis=9,slot=9"),
        *("-device", json.dumps(described)),
    ]
