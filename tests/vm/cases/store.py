"""An image of a store under the kernel's initiator."""

import json
import subprocess

from harness.case import case
from harness.targets import MIB, Subsystem
from .recovery import restart_under_ext4


@case("store-restarts", on=("ringbolt",), provokes=r"reconnect|failed|timeout|timed out|I/O error|error recovery|Failed|buffer_io_error|Retrying", seconds=40)
def store_restarts(bench):
    """fio verifies an image of a store; the server is killed 10 times under ext4 on it, and the store is sound afterwards."""
    subsystem = Subsystem("store", [])
    target = bench.serve(subsystem)
    path = f"{bench.folder}/store.raw"
    with open(path, "wb") as file:
        file.truncate(256 * MIB)
    target.rpc("bdev_uring_create", name="Disk", filename=path)
    target.rpc("store_format", bdev_name="Disk", partitions=2, log_bytes=MIB)
    target.rpc("store_open", bdev_name="Disk")
    target.rpc("store_image_create", name="vol", size=128 * MIB)
    target.rpc("nvmf_subsystem_add_ns", nqn=subsystem.nqn, namespace={"bdev_name": "store/vol", "nsid": 1})
    with open(target.config, "w", encoding="utf-8") as file:
        json.dump(target.rpc("save_config"), file)
    bench.connect(subsystem)
    device = bench.block(subsystem)
    options = ("--rw=randwrite", "--bsrange=512-64k", "--iodepth=16", "--size=64m", "--verify=crc32c", "--verify_fatal=1")
    bench.fio("image", device, *options)
    bench.disconnect(subsystem)
    restart_under_ext4(bench, target, subsystem, 10)
    redone = [partition["entries_redone"] for partition in target.rpc("store_get_stores")[0]["partitions"]]
    assert sum(redone) > 0, "no crash left anything in the logs"
    bench.disconnect(subsystem)
    target.stop()
    found = subprocess.run([target.binary, "objects", "check", path], capture_output=True, text=True, check=False)
    assert found.returncode == 0 and " 0 problems" in found.stdout, found.stdout + found.stderr
