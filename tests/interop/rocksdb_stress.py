#!/usr/bin/python3 -B
"""RocksDB's db_stress and its crash test on files in a blobstore: random operations, kills, and expected values.

    tests/interop/rocksdb_stress.py PLUGIN SECONDS [OPTION OF db_crashtest.py...]

db_stress is no part of Debian's packages: it is built of the distribution's source package, against its library,
in `target/rocksdb-stress`, once. The crash test kills it again and again, and compares what it finds with what was
written. Whatever is printed on standard error is a failure.
"""

import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CACHE = os.path.join(os.environ.get("CARGO_TARGET_DIR", f"{ROOT}/target"), "rocksdb-stress")
RINGBOLT = os.path.abspath(os.environ.get("RINGBOLT", f"{ROOT}/target/debug/ringbolt"))
STORE_BYTES = 4 << 30
# Of Debian's build, as far as they change the layout of classes.
DEFINES = ["GFLAGS=gflags", "OS_LINUX", "ROCKSDB_PLATFORM_POSIX", "ROCKSDB_LIB_IO_POSIX", "ROCKSDB_FALLOCATE_PRESENT",
           "ROCKSDB_PTHREAD_ADAPTIVE_MUTEX", "ROCKSDB_SCHED_GETCPU_PRESENT", "ROCKSDB_MALLOC_USABLE_SIZE",
           "ROCKSDB_RANGESYNC_PRESENT", "ROCKSDB_AUXV_GETAUXVAL_PRESENT", "SNAPPY", "ZLIB", "BZIP2", "LZ4", "ZSTD"]
# What was not synced is lost with a process that is killed: RocksDB calls that a fault of the file system, and
# then expects a prefix of the writes. Links and memory maps are not there. GetMergeOperands of RocksDB 7.8 fails
# with MergeInProgress while a flush is late (facebook/rocksdb#11136): merges are db_bench's.
OPTIONS = ["--use_merge=0", "--sync_fault_injection=1", "--mmap_read=0", "--use_direct_reads=0", "--max_key=20000", "--ops_per_thread=100000000",
           "--write_buffer_size=1048576", "--target_file_size_base=1048576", "--threads=4", "--backup_one_in=0"]


class Skipped(Exception):
    pass


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", **options)
    if done.returncode != 0:
        raise Skipped(f"{' '.join(command[:6])}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def sources():
    """The folder of RocksDB's sources, of the distribution's version."""
    found = glob.glob(f"{CACHE}/rocksdb-*/db_stress_tool")
    if found:
        return os.path.dirname(found[0])
    listed = "/etc/apt/sources.list.d/debian.sources"
    if not os.path.exists(listed):
        raise Skipped("Debian's source packages are not at hand")
    with open("/etc/os-release") as file:
        suite = dict(line.strip().split("=", 1) for line in file if "=" in line)["VERSION_CODENAME"]
    uri = next(line.split()[1] for line in open(listed) if line.startswith("URIs:"))
    os.makedirs(f"{CACHE}/lists/partial", exist_ok=True)
    with open(f"{CACHE}/source.sources", "w") as file:
        file.write(f"Types: deb-src\nURIs: {uri}\nSuites: {suite}\nComponents: main\n"
                   "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n")
    apt = ["apt-get", "-qq", "-o", "Dir::Etc::sourcelist=/dev/null", "-o", f"Dir::Etc::sourceparts={CACHE}",
           "-o", f"Dir::State::Lists={CACHE}/lists", "-o", "APT::Sandbox::User=root"]
    run(*apt, "update", cwd=CACHE, timeout=300)
    run(*apt, "source", "--download-only", "rocksdb", cwd=CACHE, timeout=300)
    [archive] = glob.glob(f"{CACHE}/rocksdb_*.orig.tar.gz")
    run("tar", "-xf", archive, "-C", CACHE)
    return os.path.dirname(glob.glob(f"{CACHE}/rocksdb-*/db_stress_tool")[0])


def build(tree):
    """The path of db_stress; minutes where it is not built yet."""
    program = f"{CACHE}/db_stress"
    if os.path.exists(program):
        return program
    if not shutil.which("c++") or not os.path.exists("/usr/include/gflags/gflags.h"):
        raise Skipped("c++ or libgflags-dev is not installed")
    files = [*glob.glob(f"{tree}/db_stress_tool/*.cc"), f"{tree}/test_util/testutil.cc"]
    compiler = ["c++", "-std=c++17", "-O1", "-w", f"-I{tree}", f"-I{tree}/include", *(f"-D{name}" for name in DEFINES)]
    waiting, running = list(files), []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            source = waiting.pop()
            running.append(subprocess.Popen([*compiler, "-c", source, "-o", f"{CACHE}/{os.path.basename(source)}.o"]))
        assert running.pop(0).wait() == 0, "db_stress does not compile"
    objects = [f"{CACHE}/{os.path.basename(source)}.o" for source in files]
    # With the libraries for compression that RocksDB's needs: its headers call them too.
    run("c++", "-Wl,--copy-dt-needed-entries", *objects, "-lrocksdb", "-lgflags", "-lpthread", "-ldl", "-o", f"{program}.new")
    os.rename(f"{program}.new", program)
    return program


def main():
    plugin, seconds = os.path.abspath(sys.argv[1]), int(sys.argv[2])
    os.makedirs(CACHE, exist_ok=True)
    try:
        tree = sources()
        program = build(tree)
    except Skipped as reason:
        print(f"SKIPPED rocksdb_stress: {reason}")
        return 0
    with tempfile.TemporaryDirectory(prefix="rocksdb-stress-") as folder:
        image, config = f"{folder}/disk.img", f"{folder}/disk.json"
        run(RINGBOLT, "blobfs", "format", f"--size={STORE_BYTES}", image)
        # The crash test makes folders beside its own, which db_stress expects in the store.
        path = ""
        for name in folder.strip("/").split("/"):
            path += f"/{name}"
            run(RINGBOLT, "blobfs", "mkdir", image, path)
        call = {"method": "bdev_uring_create", "params": {"name": "Disk", "filename": image, "block_size": 4096}}
        with open(config, "w") as file:
            json.dump({"subsystems": [{"subsystem": "bdev", "config": [call]}]}, file)
        wrapper = f"{folder}/db_stress"
        with open(wrapper, "w") as file:
            file.write(f'#!/bin/sh\nLD_PRELOAD={plugin} exec {program} "$@"\n')
        os.chmod(wrapper, 0o755)
        command = [sys.executable, f"{tree}/tools/db_crashtest.py", "blackbox", "--simple", f"--stress_cmd={wrapper}",
                   f"--duration={seconds}", f"--interval={min(max(seconds // 4, 10), 60)}",
                   f"--fs_uri=ringbolt://{config}?bdev=Disk", *OPTIONS, *sys.argv[3:]]
        print("+", " ".join(command), flush=True)
        env = {**os.environ, "TEST_TMPDIR": folder}
        done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace")
        output = done.stdout + done.stderr
        with open(f"{CACHE}/last.log", "w") as file:
            file.write(output)
        checked = subprocess.run([RINGBOLT, "blobfs", "check", image], capture_output=True, text=True)
    if done.returncode != 0 or checked.returncode != 0:
        print(f"{output[-6000:]}\n{checked.stdout}{checked.stderr}\nfailed rocksdb_stress: all of it is in {CACHE}/last.log")
        return 1
    print(f"passed rocksdb_stress: {output.count('KILLED')} kills in {seconds} s, {checked.stdout.splitlines()[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
