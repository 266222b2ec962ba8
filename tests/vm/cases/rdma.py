"""NVMe/RDMA over Ethernet in software (rdma_rxe): the kernel's host with our target, both in the guest."""

import json

from harness.case import case
from harness.targets import DISCOVERY

from .machines import TLS

ADDRESS = "10.0.2.15"
NQN = "nqn.2026-11.org.ringbolt:rdma"
RPC = "ringbolt rpc -r /tmp/rdma.sock"
CONNECT = f"nvme connect -t rdma -a {ADDRESS} -s 4420 -n {NQN} --nr-io-queues=2"
DEVICE = "/dev/nvme0n1"
UUID = "4b6a0c5e-7b1e-4d0a-9c55-0f2f6d1c7a01"


def configuration(**options):
    """A target with a namespace of 64 MiB in memory, whose listener is on the RDMA device."""
    listener = {"trtype": "RDMA", "adrfam": "IPv4", "traddr": ADDRESS, "trsvcid": "4420"}
    # A namespace with other identifiers after a restart is another one to the host.
    disk = {"name": "Malloc0", "num_blocks": 16384, "block_size": 4096, "uuid": UUID}
    bdevs = [("bdev_malloc_create", disk)]
    nvmf = [
        ("nvmf_create_transport", {"trtype": "RDMA", **options}),
        ("nvmf_create_subsystem", {"nqn": NQN, "allow_any_host": True, "serial_number": "RDMA"}),
        ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "Malloc0"}}),
        ("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": listener}),
        ("nvmf_subsystem_add_listener", {"nqn": DISCOVERY, "listen_address": listener}),
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


def serve_by_kernel(guest):
    """The kernel's target with a namespace of 16 MiB in memory, on the RDMA device."""
    nqn = f"{NQN}-kernel"
    sub, port = f"/sys/kernel/config/nvmet/subsystems/{nqn}", "/sys/kernel/config/nvmet/ports/9"
    guest.check(
        f"dd if=/dev/zero of=/tmp/kernel.raw bs=1M count=16 2> /dev/null; mkdir -p {sub}/namespaces/1 {port}\n"
        f"echo 1 > {sub}/attr_allow_any_host; echo /tmp/kernel.raw > {sub}/namespaces/1/device_path\n"
        f"echo 1 > {sub}/namespaces/1/buffered_io; echo 1 > {sub}/namespaces/1/enable\n"
        f"echo rdma > {port}/addr_trtype; echo ipv4 > {port}/addr_adrfam\n"
        f"echo {ADDRESS} > {port}/addr_traddr; echo 4421 > {port}/addr_trsvcid\n"
        f"ln -s {sub} {port}/subsystems/{nqn}"
    )
    return nqn


@case("rdma-initiator", on=("ringbolt",), machine=TLS, seconds=60)
def rdma_initiator(bench):
    """Our initiator verifies data on the kernel's target and on ours, as a tool and as a bdev."""
    guest = bench.guest
    guest.check("rdma link add rxe0 type rxe netdev eth0")
    target, kernel = serve(guest), serve_by_kernel(guest)
    for port, nqn in ((4420, NQN), (4421, kernel)):
        uri = f"nvme+rdma://{ADDRESS}:{port}/{nqn}?ns=1"
        assert guest.check(f"ringbolt nvme list '{uri}'", 60)
        for size, depth in (("4k", 16), ("16k", 4), ("128k", 4)):
            guest.check(
                f"ringbolt perf --name=v --filename='{uri}' --rw=randwrite --bs={size} --iodepth={depth} --size=8m "
                "--verify=crc32c > /tmp/perf 2>&1 || { cat /tmp/perf; exit 1; }",
                120,
            )
    listed = json.loads(guest.check(f"ringbolt nvme discover nvme+rdma://{ADDRESS}:4420 --json", 60))
    found = [record for record in listed if record["subnqn"] == NQN]
    assert [(one["trtype"], one["traddr"], one["trsvcid"]) for one in found] == [("RDMA", ADDRESS, "4420")], listed
    discovery = f"trtype=RDMA adrfam=IPv4 traddr={ADDRESS} trsvcid=4421 wait_for_attach=true"
    assert rpc(guest, f"bdev_nvme_start_discovery name=D {discovery}") is True
    bdevs = rpc(guest, "bdev_get_bdevs")
    trids = {bdev["name"]: path["trid"] for bdev in bdevs for path in bdev["driver_specific"].get("nvme", [])}
    assert trids.get("D0n1", {}).get("trtype") == "RDMA", (trids, rpc(guest, "bdev_nvme_get_discovery_info"))
    assert rpc(guest, "bdev_nvme_stop_discovery name=D") is True
    attach = "bdev_nvme_attach_controller trtype=RDMA adrfam=IPv4 traddr=10.0.2.15"
    assert rpc(guest, f"{attach} name=K trsvcid=4421 subnqn={kernel}") == ["Kn1"]
    assert rpc(guest, "bdev_get_bdevs name=Kn1")[0]["driver_specific"]["nvme"][0]["trid"]["trtype"] == "RDMA"
    rpc(guest, "bdev_nvme_detach_controller name=K")
    refused = guest.run(f"ringbolt nvme list 'nvme+rdma://{ADDRESS}:4422/{NQN}?ns=1'", 60)
    assert refused.rc != 0 and f"cannot connect to {ADDRESS}:4422: connection refused" in refused.out, refused
    guest.check(f"{RPC} spdk_kill_instance sig_name=SIGTERM")
    assert target.wait(60).rc == 0
    port = "/sys/kernel/config/nvmet/ports/9"
    subsystem = f"/sys/kernel/config/nvmet/subsystems/{kernel}"
    guest.check(f"rm {port}/subsystems/*; rmdir {port} {subsystem}/namespaces/1 {subsystem}; rdma link delete rxe0")
