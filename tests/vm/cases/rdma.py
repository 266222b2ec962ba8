"""NVMe/RDMA over Ethernet in software (rdma_rxe): the kernel's host with our target, both in the guest."""

import json

from harness.case import case

from .machines import TLS

ADDRESS = "10.0.2.15"
NQN = "nqn.2026-11.org.ringbolt:rdma"
RPC = "ringbolt rpc -r /tmp/rdma.sock"
CONNECT = f"nvme connect -t rdma -a {ADDRESS} -s 4420 -n {NQN} --nr-io-queues=2"
DEVICE = "/dev/nvme0n1"


def configuration(**options):
    """A target with a namespace of 64 MiB in memory, whose listener is on the RDMA device."""
    listener = {"trtype": "RDMA", "adrfam": "IPv4", "traddr": ADDRESS, "trsvcid": "4420"}
    bdevs = [("bdev_malloc_create", {"name": "Malloc0", "num_blocks": 16384, "block_size": 4096})]
    nvmf = [
        ("nvmf_create_transport", {"trtype": "RDMA", **options}),
        ("nvmf_create_subsystem", {"nqn": NQN, "allow_any_host": True, "serial_number": "RDMA"}),
        ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "Malloc0"}}),
        ("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": listener}),
        ("nvmf_subsystem_add_listener", {"nqn": "nqn.2014-08.org.nvmexpress.discovery", "listen_address": listener}),
    ]
    return {
        "subsystems": [
            {"subsystem": name, "config": [{"method": method, "params": params} for method, params in calls]}
            for name, calls in (("bdev", bdevs), ("nvmf", nvmf))
        ]
    }


def serve(guest, **options):
    """Starts the target in the guest; -> its job."""
    guest.check(f"cat > /tmp/rdma.json <<'EOF'\n{json.dumps(configuration(**options))}\nEOF")
    job = guest.spawn("exec ringbolt serve -c /tmp/rdma.json -r /tmp/rdma.sock --memory 128m 2>&1")
    job.expect("ready", 30)
    return job


def rpc(guest, call):
    return json.loads(guest.check(f"{RPC} {call}"))


@case("rdma", on=("ringbolt",), machine=TLS, provokes="reconnect", seconds=60)
def rdma(bench):
    """The kernel's host discovers, connects, verifies data in and behind capsules, and survives a restart."""
    guest = bench.guest
    guest.check("rdma link add rxe0 type rxe netdev eth0")
    target = serve(guest)
    assert NQN in guest.check(f"nvme discover -t rdma -a {ADDRESS} -s 4420", 60)
    guest.check(CONNECT, 60)
    guest.until(f"[ -b {DEVICE} ]")
    identified = json.loads(guest.check("nvme id-ctrl /dev/nvme0 -o json"))
    assert identified["sn"].strip() == "RDMA" and identified["sgls"] & 0x100004 == 0x100004, identified
    # Small writes are in capsules, large ones are read from the host's memory.
    for size, depth in (("512", 1), ("4k", 16), ("64k", 8), ("128k", 4)):
        size = "4k" if size == "512" else size
        guest.check(
            f"fio --name=v --filename={DEVICE} --rw=randwrite --bs={size} --iodepth={depth} --size=8m --direct=1 "
            "--ioengine=libaio --verify=crc32c --verify_fatal=1 --output=/tmp/fio || { cat /tmp/fio; exit 1; }",
            120,
        )
    guest.check("head -c 4194304 /dev/urandom > /tmp/data")
    guest.check(f"dd if=/tmp/data of={DEVICE} bs=1M oflag=direct 2> /dev/null")
    guest.check(f"blkdiscard -o 4194304 -l 1048576 {DEVICE}")
    guest.check(f"dd if={DEVICE} bs=1M count=4 iflag=direct 2> /dev/null | cmp - /tmp/data", 60)
    qpairs = rpc(guest, f"nvmf_subsystem_get_qpairs nqn={NQN}")
    assert len(qpairs) == 3 and qpairs[0]["listen_address"]["trtype"] == "RDMA", qpairs
    assert rpc(guest, "nvmf_get_transports")[0]["trtype"] == "RDMA"
    # The target ends in order, and the host connects again.
    guest.check(f"{RPC} spdk_kill_instance sig_name=SIGTERM")
    assert target.wait(60).rc == 0
    target = serve(guest, in_capsule_data_size=0, max_srq_depth=16)
    guest.until("[ \"$(cat /sys/class/nvme/nvme0/state)\" = live ]", 60)
    guest.check(f"dd if=/tmp/data of={DEVICE} bs=64k oflag=direct 2> /dev/null", 60)
    guest.check(f"dd if={DEVICE} bs=1M count=4 iflag=direct 2> /dev/null | cmp - /tmp/data", 60)
    guest.check(f"nvme disconnect -n {NQN}", 60)
    guest.check(f"{RPC} spdk_kill_instance sig_name=SIGTERM")
    assert target.wait(60).rc == 0
    guest.check("rdma link delete rxe0")
