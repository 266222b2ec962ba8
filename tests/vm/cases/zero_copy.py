"""NVMe/TCP in the guest over a network card with scatter-gather, where zero-copy sends are sends without a copy. Over the
loopback device the kernel always copies."""

import subprocess

from harness.case import case
from harness.machine import Machine
from harness.targets import Namespace, Subsystem, free_port

from .ublk import Serve

# Kernels before 6.7 do not say whether they have copied.
CARD = Machine(nic="e1000e", vfio=True)
NQN = "nqn.2026-11.org.ringbolt:zero-copy"


@case("zero-copy", on=("ringbolt",), machine=CARD, seconds=20)
def zero_copy(bench):
    """Reads are sent from the target's buffers, and writes from the initiator's, while perf on the host verifies them."""
    guest, behind = bench.guest, Subsystem("behind", [Namespace(mib=64, block_size=512, malloc=True)])
    bench.serve(behind)
    serve = Serve(guest)
    # The volume is one of the host: what perf writes goes out again through the guest's own initiator.
    where = ("trtype=TCP", "adrfam=IPv4")
    far = (f"traddr={bench.target.hosts[4]}", f"trsvcid={bench.target.port}", f"subnqn={behind.nqn}")
    serve.rpc("nvmf_create_transport", "trtype=TCP")
    serve.rpc("nvmf_create_subsystem", f"nqn={NQN}", "allow_any_host=true")
    port, forwarded = free_port(), free_port()
    listen = '{"trtype":"TCP","adrfam":"IPv4","traddr":"0.0.0.0","trsvcid":"%d"}' % port
    serve.rpc("nvmf_subsystem_add_listener", f"nqn={NQN}", f"'listen_address={listen}'")
    guest.qmp("human-monitor-command", **{"command-line": f"hostfwd_add net tcp:127.0.0.1:{forwarded}-:{port}"})
    uri = f"nvme+tcp://127.0.0.1:{forwarded}/{NQN}?ns=1"
    load = ("--size=64m", "--bs=128k", "--iodepth=16", "--verify=crc32c", "--name=t", "--eta=never")

    def sends():
        transport = serve.rpc("nvmf_get_stats")["poll_groups"]
        counts = [one["transports"][0] for one in transport]
        return {name: sum(one[name] for one in counts) for name in counts[0] if name != "trtype"}

    for switch in ("false", "true"):
        sides = (f"enable_zerocopy_send_{side}={switch}" for side in ("server", "client"))
        serve.rpc("sock_impl_set_options", "impl_name=posix", *sides)
        serve.rpc("bdev_nvme_attach_controller", "name=Far", *where, *far)
        serve.rpc("nvmf_subsystem_add_ns", f"nqn={NQN}", """'namespace={"bdev_name":"Farn1"}'""")
        command = [bench.target.binary, "perf", f"--filename={uri}", "--rw=randwrite", *load]
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False)
        assert ran.returncode == 0, ran.stdout
        serve.rpc("nvmf_subsystem_remove_ns", f"nqn={NQN}", "nsid=1")
        serve.rpc("bdev_nvme_detach_controller", "name=Far")
        if switch == "false":
            assert not any(sends().values()), sends()
    counts = sends()
    # No connection found that its sends are copied, so that all went without.
    assert counts["zerocopy_sends"] > 100 and counts["zerocopy_connections_off"] == 0, counts
    guest.qmp("human-monitor-command", **{"command-line": f"hostfwd_remove net tcp:127.0.0.1:{forwarded}"})
    guest.check("kill -TERM $(cat /tmp/ublk.pid)")
    assert serve.job.wait(60).rc == 0, serve.job.out
