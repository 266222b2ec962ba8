#!/usr/bin/python3 -B
"""Ordinary programs on a store of files that is mounted by `ringbolt blobfs mount`.

    RINGBOLT=target/debug/ringbolt tests/interop/blobfs_clients.py [CASE...]

Each case prints one line. Without FUSE, as in a container that has no /dev/fuse, all are SKIPPED.
"""

import hashlib
import json
import os
import signal
import struct
import subprocess
import sys

import serving
from serving import MIB, RINGBOLT, Skipped, program, random_bytes, run

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "blob"))
import built  # noqa: E402  A builder of SPDK's format that shares no code with Ringbolt.

# Sizes around blocks and clusters.
SIZES = [0, 1, 4095, 4096, 4097, MIB - 1, MIB, 3 * MIB + 17]
NAME = "a name with spaces"


def needs_fuse():
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        raise Skipped(f"/dev/fuse: {error.strerror}") from None


def sum_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Mount:
    """A mount, which ends with its `with`."""

    def __init__(self, folder, image, name="mounted", how=signal.SIGTERM, options=()):
        needs_fuse()
        self.how, self.path, self.errors = how, f"{folder}/{name}", f"{folder}/{name}.log"
        os.makedirs(self.path, exist_ok=True)
        with open(self.errors, "w") as errors:
            self.process = subprocess.Popen([RINGBOLT, "blobfs", "mount", *options, image, self.path],
                                            stdout=subprocess.PIPE, stderr=errors, text=True)
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            error = open(self.errors).read()
            if "not permitted" in error:
                raise Skipped(error.strip())
            raise AssertionError(error)
        assert f"read-only, until `umount {self.path}`" in line, line

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self.process.poll() is None:
            self.process.send_signal(self.how)
        try:
            status = self.process.wait(20)
        finally:
            # What is left after a failure is not the next case's.
            self.process.kill()
            self.process.wait()
            subprocess.run(["umount", "-l", self.path], capture_output=True)
        error = open(self.errors).read()
        if kind is None and self.how != signal.SIGKILL:
            assert status == 0 and not error, f"{status}: {error}"
            assert os.listdir(self.path) == []

    def __truediv__(self, name):
        return f"{self.path}/{name}"


def refused(*arguments):
    """The error of a command that has to fail because of what is around it."""
    done = subprocess.run([RINGBOLT, "blobfs", *arguments], capture_output=True, text=True, timeout=20)
    assert done.returncode == 4, f"{arguments}: {done.returncode} {done.stdout}{done.stderr}"
    [line] = done.stderr.splitlines()
    return line


def formatted(folder, name="files.img", mib=64):
    image = f"{folder}/{name}"
    run(RINGBOLT, "blobfs", "format", f"--size={mib}m", image)
    return image


def filled(folder):
    """A store with files of all sizes, and a folder with the same."""
    image, source = formatted(folder), f"{folder}/source"
    os.makedirs(f"{source}/db/below/{NAME}")
    for path in ["/db", "/db/below", f"/db/below/{NAME}"]:
        run(RINGBOLT, "blobfs", "mkdir", image, path)
    for size in SIZES:
        for path in [f"db/{size}", f"db/below/{NAME}/{size}"]:
            with open(f"{source}/{path}", "wb") as file:
                file.write(random_bytes(size))
            run(RINGBOLT, "blobfs", "cp", image, file.name, f":/{path}")
    return image, source


def programs(server):
    """cat, cmp, find, ls, cp and df see what is in the store, and it stays as it is."""
    image, source = filled(server.folder)
    before = sum_of(image)
    with Mount(server.folder, image) as mount:
        tree = lambda folder: sorted(run("find", ".", "-printf", "%p %y\\n", cwd=folder).splitlines())
        assert tree(mount.path) == tree(source)
        listing = run("ls", "-lR", mount.path)
        assert NAME in listing and str(SIZES[-1]) in listing, listing
        for size in SIZES:
            path = f"db/below/{NAME}/{size}"
            run("cmp", f"{source}/{path}", mount / path)
            assert subprocess.run(["cat", mount / path], capture_output=True).stdout == random_bytes(size)
        run("diff", "-r", source, mount.path)
        run("cp", "-r", mount.path, f"{server.folder}/copy")
        run("diff", "-r", source, f"{server.folder}/copy")
        run("dd", f"if={mount.path}/db/{SIZES[-1]}", f"of={server.folder}/part", "bs=1000", "skip=1234", "count=77")
        assert open(f"{server.folder}/part", "rb").read() == random_bytes(SIZES[-1])[1234000:1311000]
        assert "fuse" in run("stat", "-f", "-c", "%T", mount.path)
        assert os.stat(mount / "db/4097").st_size == 4097 and os.statvfs(mount.path).f_bavail > 0
    assert sum_of(image) == before


def read_only(server):
    """Every change is refused with EROFS."""
    image, _ = filled(server.folder)
    with Mount(server.folder, image) as mount:
        file, directory = mount / "db/4096", mount / "db/below"
        for command in [["touch", file], ["touch", mount / "new"], ["mkdir", mount / "new"], ["rm", "-f", file],
                        ["rm", "-rf", directory], ["mv", file, mount / "new"], ["ln", file, mount / "new"],
                        ["ln", "-s", file, mount / "new"], ["chmod", "u+w", file], ["truncate", "-s", "1", file],
                        ["cp", "/dev/null", file]]:
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
            assert done.returncode != 0 and "Read-only file system" in done.stderr, f"{command}: {done.stderr}"
        assert sum_of(file) == hashlib.sha256(random_bytes(4096)).hexdigest()


def flat(server):
    """A store as SPDK's blobfs made it: whole paths as names, and no directories."""
    image = f"{server.folder}/flat.img"
    store = built.Built()
    store.pages.clear(), store.roots.clear(), store.used_pages.clear()
    store.type, store.super_blob = b"BLOBFS", (1 << 64) - 1
    for root, name, length, cluster in [(2, "/db/000012.sst", 5000, 3), (4, "/db/LOG", 200_000, 4), (6, "top", 1, 5)]:
        table = struct.pack("<QII", 1, root + 1, 1)
        store.blob(root, name, descriptors=[built.attribute("length", struct.pack("<Q", length)),
                                            built.descriptor(built.EXTENT_TABLE, table)])
        store.put(root + 1, built.page(built.BLOB | root, [built.extents(0, [cluster])]))
        store.used_clusters.add(cluster)
    store.write(image)
    before = sum_of(image)
    with Mount(server.folder, image) as mount:
        found = sorted(run("find", ".", "-type", "f", "-printf", "%p %s\\n", cwd=mount.path).splitlines())
        assert found == ["./db/000012.sst 5000", "./db/LOG 200000", "./top 1"], found
        assert open(mount / "db/LOG", "rb").read() == bytes([4]) * 200_000
        assert open(mount / "db/000012.sst", "rb").read() == bytes([3]) * 5000
    assert sum_of(image) == before


def rocksdb(server):
    """RocksDB's own reader, on the kernel's file system, checks tables that the plugin wrote."""
    import rocksdb_clients
    store = rocksdb_clients.Store(server).format()
    store.bench("fillrandom,compact", "--num=10000")
    keys = store.keys()
    with Mount(server.folder, store.image) as mount:
        checked = run(program("sst_dump"), f"--file={mount / 'db'}", "--command=check", "--verify_checksum")
        assert "Corruption" not in checked and ".sst" in checked, checked
        copy = f"{server.folder}/db"
        run("cp", "-r", mount / "db", copy)
        run("chmod", "-R", "u+w", copy)
    found = run(program("ldb"), f"--db={copy}", "scan", "--hex", "--no_value").splitlines()
    assert len(keys) > 1000 and [line for line in found if line.startswith("0x")] == keys


def bdevs(server):
    """With --config, stores on bdevs: a namespace over the network, and one whose target is killed."""
    image, source = filled(server.folder)
    nqn = "nqn.2025-01.io.ringbolt:files"
    config = f"{server.folder}/files.json"
    server.rpc("bdev_uring_create", name="Disk", filename=image, block_size=4096)
    server.rpc("nvmf_create_transport", trtype="TCP")
    server.rpc("nvmf_create_subsystem", nqn=nqn, allow_any_host=True)
    server.rpc("nvmf_subsystem_add_ns", nqn=nqn, namespace={"bdev_name": "Disk"})
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0"}
    server.rpc("nvmf_subsystem_add_listener", nqn=nqn, listen_address=address)
    [listener] = server.rpc("nvmf_subsystem_get_listeners", nqn=nqn)
    params = {"name": "Nvme0", "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "subnqn": nqn,
              "trsvcid": listener["address"]["trsvcid"], "ctrlr_loss_timeout_sec": 2, "reconnect_delay_sec": 1}
    call = {"method": "bdev_nvme_attach_controller", "params": params}
    with open(config, "w") as file:
        json.dump({"subsystems": [{"subsystem": "bdev", "config": [call]}]}, file)
    options = [f"--config={config}"]
    assert "makes no bdev Other; it makes Nvme0n1" in refused("ls", *options, "Other")
    assert "db/" in run(RINGBOLT, "blobfs", "ls", *options, "Nvme0n1")
    run(RINGBOLT, "blobfs", "rm", *options, "Nvme0n1", "/db/1")
    run(RINGBOLT, "blobfs", "cp", *options, "Nvme0n1", f"{source}/db/{SIZES[-1]}", ":/db/copied")
    os.rename(f"{source}/db/1", f"{source}/removed")
    run("cp", f"{source}/db/{SIZES[-1]}", f"{source}/db/copied")
    with Mount(server.folder, "Nvme0n1", options=options) as mount:
        run("diff", "-r", f"{source}/db", mount / "db")
    run(RINGBOLT, "blobfs", "check", *options, "Nvme0n1")
    mount = Mount(server.folder, "Nvme0n1", options=options)
    try:
        server.kill()
        done = subprocess.run(["cat", mount / f"db/{SIZES[-1]}"], capture_output=True, text=True, errors="replace", timeout=40)
        assert done.returncode != 0 and "error" in done.stderr, done.stderr
        assert "copied" in os.listdir(mount / "db")
        mount.process.send_signal(signal.SIGTERM)
        assert mount.process.wait(20) == 0
    finally:
        mount.process.kill()
        subprocess.run(["umount", "-l", mount.path], capture_output=True)


def ends(server):
    """It ends cleanly with each signal and with umount, and the directory is as it was; then the store can change."""
    image, source = filled(server.folder)
    for name, end in [("SIGINT", signal.SIGINT), ("SIGTERM", signal.SIGTERM), ("umount", None)]:
        with Mount(server.folder, image, how=end or signal.SIGTERM) as mount:
            assert sorted(os.listdir(mount.path)) == ["db"], name
            if end is None:
                run("umount", mount.path)
                mount.process.wait(20)
    run(RINGBOLT, "blobfs", "rm", image, "/db/1")
    run(RINGBOLT, "blobfs", "cp", image, f"{source}/db/4095", ":/db/new")
    # Nothing of the last mount is cached for this one.
    with Mount(server.folder, image) as mount:
        assert not os.path.exists(mount / "db/1")
        assert open(mount / "db/new", "rb").read() == random_bytes(4095)


def in_use(server):
    """A store is read by any number of mounts, or changed by one program; who has it is named."""
    image, _ = filled(server.folder)
    with Mount(server.folder, image) as first, Mount(server.folder, image, "second") as second:
        run("diff", "-r", first.path, second.path)
        error = refused("rm", image, "/db/1")
        assert f"process {first.process.pid}" in error or f"process {second.process.pid}" in error, error
    server.rpc("bdev_uring_create", name="Disk", filename=image, block_size=4096)
    other = f"{server.folder}/other"
    os.mkdir(other)
    error = refused("mount", image, other)
    assert "has it open" in error, error
    server.rpc("bdev_uring_delete", name="Disk")
    with Mount(server.folder, image) as mount:
        done = subprocess.run([RINGBOLT, "rpc", "-r", server.rpc_socket, "bdev_uring_create", "name=Disk",
                               f"filename={image}", "block_size=4096"], capture_output=True, text=True)
        assert done.returncode != 0 and f"process {mount.process.pid}" in done.stderr, done


def clumsy(server):
    """What cannot be mounted, or not there, is named."""
    image, source = filled(server.folder)
    empty = f"{server.folder}/empty"
    os.mkdir(empty)
    assert "there is no such directory" in refused("mount", image, f"{server.folder}/absent")
    assert "it is not a directory" in refused("mount", image, f"{source}/db/1")
    assert "it is not empty" in refused("mount", image, source)
    assert "No such file" in refused("mount", f"{server.folder}/absent.img", empty)
    with open(f"{server.folder}/zeroes.img", "wb") as file:
        file.truncate(MIB)
    done = subprocess.run([RINGBOLT, "blobfs", "mount", file.name, empty], capture_output=True, text=True)
    assert done.returncode == 1 and "there is no blobstore" in done.stderr, done
    bare = formatted(server.folder, "bare.img")
    with Mount(server.folder, bare) as mount:
        assert "is mounted there already" in refused("mount", image, mount.path)
        assert os.listdir(mount.path) == []


def killed(server):
    """The mount of a process that was killed says so, and goes with umount."""
    image, source = filled(server.folder)
    with Mount(server.folder, image, how=signal.SIGKILL) as mount:
        file = open(mount / "db/4096", "rb")
        mount.process.kill()
        mount.process.wait()
        for use in [lambda: os.listdir(mount.path), lambda: file.read()]:
            try:
                use()
                raise AssertionError("a mount without its process is read")
            except OSError as error:
                assert error.strerror in ("Transport endpoint is not connected", "Software caused connection abort"), error
        try:
            file.close()
        except OSError:
            pass  # The kernel reports it here too.
        error = refused("mount", image, mount.path)
        assert "`umount` it first" in error, error
        # The store is free already.
        run(RINGBOLT, "blobfs", "rm", image, "/db/1")
        run("umount", mount.path)
    os.remove(f"{source}/db/1")
    with Mount(server.folder, image) as mount:
        run("diff", "-r", source, mount.path)


def lost_device(server):
    """A device that goes away under the mount: errors of reads, names as before, and a clean end."""
    image, _ = filled(server.folder)
    with Mount(server.folder, image) as mount:
        os.truncate(image, 0)
        done = subprocess.run(["cat", mount / f"db/{SIZES[-1]}"], capture_output=True, text=True, errors="replace")
        assert done.returncode != 0 and "Input/output error" in done.stderr, done.stderr
        assert len(run("ls", mount / "db").split()) == len(SIZES) + 1


CASES = {
    "programs": programs,
    "read_only": read_only,
    "flat": flat,
    "rocksdb": rocksdb,
    "bdevs": bdevs,
    "ends": ends,
    "in_use": in_use,
    "clumsy": clumsy,
    "killed": killed,
    "lost_device": lost_device,
}

if __name__ == "__main__":
    sys.exit(serving.run_cases(CASES, serving.Server))
