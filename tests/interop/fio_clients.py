#!/usr/bin/python3 -B
"""fio with Ringbolt's engine as an external one, and the layouts of fio's structures that the engine has.

    RINGBOLT=target/debug/ringbolt tests/interop/fio_clients.py [CASE...]

Each case prints one line. A case whose program is missing is SKIPPED, with the reason.
"""

import json
import os
import re
import subprocess
import sys
import time

import serving
from serving import MIB, RINGBOLT, Skipped, program, run

ENGINE = os.environ.get("RINGBOLT_FIO", os.path.join(os.path.dirname(RINGBOLT), "libringbolt_fio.so"))
LAYOUTS = os.path.join(os.path.dirname(RINGBOLT), "examples", "layouts")
NQN = "nqn.2025-01.io.ringbolt:fio"
# Of Debian 12 and 13.
RELEASES = {"bookworm": "3.33", "trixie": "3.39"}


def fio_command(*options):
    return [program("fio"), "--name=job", f"--ioengine=external:{ENGINE}", "--bs=4k", "--output-format=json",
            "--verify_state_save=0", *options]


def fio(*options):
    """Runs a job, which must succeed; its results."""
    output = run(*fio_command(*options))
    # Lines of warnings precede the document.
    return json.loads(output[output.index("{\n"):])["jobs"][0]


def fails(*options):
    """Runs a job, which must fail and not hang; both streams."""
    done = subprocess.run(fio_command(*options), capture_output=True, text=True, timeout=60)
    assert done.returncode != 0, f"{options}: it succeeded\n{done.stdout}"
    assert "panicked" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def ram_disk(_server):
    for threads in ([], ["--thread"]):
        job = fio("--filename=malloc\\:32m", "--rw=randrw", "--iodepth=32", "--verify=crc32c", "--verify_fatal=1", *threads)
        assert job["error"] == 0 and job["read"]["total_ios"] >= 32 * MIB // 4096, job["read"]


def shared_ram_disk(_server):
    """What one thread has written another verifies: a RAM disk is one for all jobs of a process."""
    common = ["--filename=malloc\\:16m", "--size=16m", "--thread", "--iodepth=8", "--verify=xxhash", "--verify_fatal=1"]
    fio(*common, "--rw=write", "--do_verify=0", "--name=second", f"--ioengine=external:{ENGINE}", "--bs=4k", "--stonewall",
        *common, "--rw=read")


def file_of_the_kernel(server):
    """Written through the engine, verified by fio through the kernel."""
    path = f"{server.folder}/disk"
    with open(path, "wb") as disk:
        disk.truncate(16 * MIB)
    verify = ["--size=16m", "--verify=crc32c", "--verify_fatal=1"]
    job = fio(f"--filename=uring\\:{path}", "--rw=randwrite", "--iodepth=16", "--fsync=64", "--do_verify=0", *verify)
    assert job["sync"]["total_ios"] > 0, job["sync"]
    run(program("fio"), "--name=check", "--ioengine=psync", f"--filename={path}", "--bs=4k", "--rw=randwrite", "--verify_only",
        "--verify_state_save=0", *verify)


def bdevs_of_a_configuration(server):
    """Bdevs that a configuration file makes: parts of a file."""
    path, config = f"{server.folder}/parts", f"{server.folder}/parts.json"
    with open(path, "wb") as disk:
        disk.truncate(32 * MIB)
    methods = [("bdev_uring_create", {"name": "disk", "filename": path, "block_size": 4096}),
               ("bdev_split_create", {"base_bdev": "disk", "split_count": 2})]
    bdevs = [{"method": method, "params": params} for method, params in methods]
    with open(config, "w", encoding="ascii") as file:
        json.dump({"subsystems": [{"subsystem": "bdev", "config": bdevs}]}, file)
    verify = ["--size=16m", "--verify=crc32c", "--verify_fatal=1"]
    job = fio(f"--ringbolt_config={config}", "--filename=diskp1", "--rw=randwrite", "--iodepth=16", *verify)
    assert job["error"] == 0 and job["write"]["total_ios"] == 4096, job["write"]
    with open(path, "rb") as disk:
        parts = [disk.read(16 * MIB) for _ in range(2)]
    assert not any(parts[0]) and parts[1].count(0) < MIB, "it was written elsewhere"
    fio(f"--ringbolt_config={config}", "--filename=diskp0", "--rw=randrw", "--iodepth=16", "--thread", "--numjobs=2", "--size=8m")
    output = fails(f"--ringbolt_config={config}", "--filename=diskp2", "--rw=read")
    assert "makes no bdev diskp2" in output, output


def trim(_server):
    job = fio("--filename=malloc\\:16m", "--rw=randtrim", "--iodepth=8")
    assert job["trim"]["total_ios"] == 16 * MIB // 4096, job["trim"]


def served(server):
    server.malloc(mib=16)
    server.rpc("nvmf_create_transport", trtype="TCP")
    server.rpc("nvmf_create_subsystem", nqn=NQN, allow_any_host=True)
    server.rpc("nvmf_subsystem_add_ns", nqn=NQN, namespace={"bdev_name": "Malloc0"})
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0"}
    server.rpc("nvmf_subsystem_add_listener", nqn=NQN, listen_address=address)
    [listener] = server.rpc("nvmf_subsystem_get_listeners", nqn=NQN)
    uri = f"nvme+tcp://127.0.0.1:{listener['address']['trsvcid']}/{NQN}?ns=1"
    return "--filename=" + uri.replace(":", "\\:")


def nvme_tcp(server):
    job = fio(served(server), "--rw=randrw", "--iodepth=32", "--verify=crc32c", "--verify_fatal=1", "--numjobs=2", "--size=8m",
              "--offset_increment=8m")
    assert job["error"] == 0, job


def killed_target(server):
    """I/O fails when its target is killed; fio ends."""
    job = fio_command(served(server), "--rw=randread", "--iodepth=32", "--time_based", "--runtime=60")
    with subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        reads = lambda: server.rpc("bdev_get_iostat", name="Malloc0")["bdevs"][0]["num_read_ops"]
        deadline = time.monotonic() + 20
        while reads() < 1000:
            assert running.poll() is None and time.monotonic() < deadline, running.communicate()[0]
            time.sleep(0.05)
        server.kill()
        output, _ = running.communicate(timeout=50)
    assert running.returncode != 0 and "panicked" not in output, output


def clumsy(_server):
    """What users type wrong is named, and ends in an error."""
    for options, expected in [
        (["--filename=/dev/nvme9n9", "--rw=read"], "is no URI"),
        (["--filename=uring\\:/nonexistent/disk", "--rw=read"], "/nonexistent/disk"),
        (["--filename=null\\:1g?bs=x", "--rw=read"], "?bs=4k"),
        (["--filename=nvme+tcp\\://127.0.0.1\\:1/nqn.2025-01.io.ringbolt\\:none?ns=1", "--rw=read"], "127.0.0.1:1"),
        (["--filename=malloc\\:1m?bs=4k", "--rw=read", "--bs=512"], "Invalid argument"),
        (["--filename=malloc\\:1m", "--rw=read", "--io_submit_mode=offload", "--iodepth=4"], "offload"),
    ]:
        output = fails(*options)
        assert expected in output, f"{options}: no {expected!r} in\n{output}"


OFFSETS = """
#include "fio.h"
#include "optgroup.h"
#include <stdio.h>
int main(void)
{
%s    return 0;
}
"""


def expression(name):
    if name.startswith("sizeof "):
        return f"sizeof(struct {name.split()[1]})"
    if "." in name:
        return "offsetof(struct {}, {})".format(*name.split("."))
    return name


def headers(server, release, version):
    """The folder of fio's headers of a Debian release, from its source package."""
    given = os.environ.get("RINGBOLT_FIO_SOURCES")
    if given:
        return f"{given}/fio-{version}"
    sources = "/etc/apt/sources.list.d/debian.sources"
    if not os.path.exists(sources):
        raise Skipped("Debian's source packages are not at hand; RINGBOLT_FIO_SOURCES=DIR names one with fio-3.33 and fio-3.39")
    with open(sources) as file:
        uri = re.search(r"^URIs: (\S+)", file.read(), re.M).group(1)
    folder = f"{server.folder}/apt"
    os.makedirs(f"{folder}/lists/partial")
    with open(f"{folder}/source.sources", "w") as file:
        file.write(f"Types: deb-src\nURIs: {uri}\nSuites: {release}\nComponents: main\n"
                   "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n")
    apt = ["apt-get", "-qq", "-o", "Dir::Etc::sourcelist=/dev/null", "-o", f"Dir::Etc::sourceparts={folder}",
           "-o", f"Dir::State::Lists={folder}/lists", "-o", "APT::Sandbox::User=root"]
    for arguments in (["update"], ["source", "--download-only", "fio"]):
        done = subprocess.run([*apt, *arguments], capture_output=True, text=True, cwd=folder, timeout=300)
        if done.returncode != 0:
            raise Skipped(f"fio's source package of {release}: {done.stderr.strip().splitlines()[-1:]}")
    archive = f"{folder}/fio_{version}.orig.tar.gz"
    if not os.path.exists(archive):
        raise Skipped(f"{release} has another fio than {version}: {sorted(os.listdir(folder))}")
    os.makedirs(f"{folder}/tree")
    run("tar", "-xf", archive, "-C", f"{folder}/tree", "--strip-components=1")
    return f"{folder}/tree"


def layouts(server, release):
    version = RELEASES[release]
    known = dict(line.rsplit(" ", 1) for line in run(LAYOUTS, f"fio-{version}").splitlines())
    compiler, tree = program("cc"), headers(server, release, version)
    if not os.path.exists(f"{tree}/config-host.h"):
        run("./configure", cwd=tree, timeout=300)
    lines = "".join(f'    printf("{name} %lld\\n", (long long)({expression(name)}));\n' for name in known)
    with open(f"{server.folder}/offsets.c", "w") as file:
        file.write(OFFSETS % lines)
    run(compiler, "-w", "-D_GNU_SOURCE", "-include", f"{tree}/config-host.h", f"-I{tree}", "-o", f"{server.folder}/offsets",
        f"{server.folder}/offsets.c")
    real = dict(line.rsplit(" ", 1) for line in run(f"{server.folder}/offsets").splitlines())
    assert known == real, {name: (known[name], real[name]) for name in known if known[name] != real[name]}


CASES = {
    "ram_disk": ram_disk,
    "shared_ram_disk": shared_ram_disk,
    "file_of_the_kernel": file_of_the_kernel,
    "trim": trim,
    "nvme_tcp": nvme_tcp,
    "killed_target": killed_target,
    "bdevs_of_a_configuration": bdevs_of_a_configuration,
    "clumsy": clumsy,
    "layouts_of_debian_12": lambda server: layouts(server, "bookworm"),
    "layouts_of_debian_13": lambda server: layouts(server, "trixie"),
}

if __name__ == "__main__":
    sys.exit(serving.run_cases(CASES, serving.Server))
