"""Secure channel concatenation of NVMe/TCP: the kernel's host with our target."""

import uuid

from harness.case import case
from harness.targets import MIB, Namespace, Subsystem, free_port

from .authentication import REJECTED, add_key, secret
from .keyed_initiator import KeyedInitiator
from .machines import NEWEST_TLS
from .tls import KEYRING, clear_keys, start_tlshd


@case("concatenation", on=("ringbolt",), machine=NEWEST_TLS, provokes=f"reconnect|{REJECTED}", seconds=60)
def concatenation(bench):
    """The kernel's host makes a key of TLS by authentication, also after a reset and with new keys; without
    `--concat`, with a wrong key or without any it is rejected, and no I/O is sent in clear."""
    guest = bench.guest
    if "concat" not in guest.check("cat /dev/nvme-fabrics"):
        bench.skip("the guest's kernel has no secure channel concatenation")
    tlshd = start_tlshd(guest)
    subsystem = Subsystem("secret", [Namespace(mib=16)], hosts=[])
    target = bench.serve(subsystem)
    host = f"nqn.2014-08.org.nvmexpress:uuid:{uuid.uuid4()}"
    identity = f"--hostnqn={host} --hostid={uuid.uuid4()} --nr-io-queues=2"
    keys = {"host": secret(1), "controller": secret(1), "other": secret(1)}
    for name, text in keys.items():
        add_key(bench, name, text)
    # The groups are slow in an emulated processor.
    target.rpc("nvmf_set_config", dhchap_dhgroups=["null", "ffdhe2048"])
    port = free_port()
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
    target.rpc("nvmf_subsystem_add_listener", nqn=subsystem.nqn, listen_address=address, secure_channel=True)
    target.rpc(
        "nvmf_subsystem_add_host", nqn=subsystem.nqn, host=host, dhchap_key="host", dhchap_ctrlr_key="controller"
    )
    connect = f"nvme connect -t tcp -a 10.0.2.2 -s {port} -n {subsystem.nqn} {identity}"

    def check_data():
        device = bench.block(subsystem)
        bench.write_random(device, "data", 0, 4 * MIB, "256k")
        bench.compare(device, "data", 0, 4 * MIB, "64k")
        sent = guest.check("sha256sum < /tmp/data").split()[0]
        assert target.digest(subsystem.namespaces[0], 0, 4 * MIB) == sent, "it differs in the target's storage"

    def queues():
        found = target.rpc("nvmf_subsystem_get_qpairs", nqn=subsystem.nqn)
        return sorted(queue["qid"] for queue in found)

    seen = set()

    def check_new_key():
        """The host has generated one, and uses it."""
        lines = [line for line in target.log().splitlines() if "NVMe1G01 " in line]
        made = [line.split("NVMe1G01 ")[1] for line in lines if "has generated a key of TLS: NVMe1G01 " in line]
        used = [line.split("NVMe1G01 ")[1] for line in lines if " is established: NVMe1G01 " in line]
        assert made and used and made[-1] == used[-1] and made[-1] not in seen, target.log()
        assert made[-1].startswith(f"{host} {subsystem.nqn} "), made
        seen.add(made[-1])

    def is_rejected(options):
        assert guest.run(f"{connect} {options}", 60).rc != 0, f"accepted: {options}"

    for number, options in enumerate(("", f" --dhchap-ctrl-secret={keys['controller']}")):
        guest.check(f"{connect} --dhchap-secret={keys['host']}{options} --concat", 120)
        check_data()
        assert queues() == [0, 1, 2], queues()
        check_new_key()
        name = guest.check("ls /sys/class/nvme").split()[0]
        assert int(guest.check(f"cat /sys/class/nvme/{name}/tls_key"), 16) != 0
        if number == 0:
            bench.disconnect(subsystem)
    guest.check(f"nvme reset /dev/{name}", 120)
    guest.until(f"grep -q live /sys/class/nvme/{name}/state", 60)
    check_data()
    check_new_key()
    # New keys of the authentication replace that of TLS, for queues that connect afterwards.
    target.rpc("nvmf_subsystem_set_keys", nqn=subsystem.nqn, host=host, dhchap_key="other")
    guest.check(f"echo '{keys['other']}' > /sys/class/nvme/{name}/dhchap_secret")

    def replaced():
        made = [line for line in target.log().splitlines() if "has generated a key of TLS" in line]
        return made[-1].split("NVMe1G01 ")[1] not in seen

    guest.wait(replaced, 60, "a new key", poll=0.1)
    check_data()
    bench.disconnect(subsystem)
    target.rpc("nvmf_subsystem_set_keys", nqn=subsystem.nqn, host=host, dhchap_key="host")
    clear_keys(guest)
    for options in ("", f"--dhchap-secret={keys['host']}", f"--dhchap-secret={keys['other']} --concat"):
        is_rejected(options)
    assert "failed at DH-HMAC-CHAP_Reply: the keys do not match" in target.log(), target.log()
    # Not where there is no TLS.
    plain = f"nvme connect {target.address()} -n {subsystem.nqn} {identity} --dhchap-secret={keys['host']}"
    assert guest.run(f"{plain} --concat", 60).rc != 0, "accepted without TLS"
    assert "secure channel concatenation is not possible" in target.log(), target.log()
    # The kernel does not begin anew without tlshd: nothing is sent in clear instead.
    guest.check("killall tlshd")
    tlshd.wait(timeout=30)
    is_rejected(f"--dhchap-secret={keys['host']} --concat")
    assert not [queue for queue in queues() if queue > 0], queues()


@case("concatenation-initiator", on=("nvmet",), machine=NEWEST_TLS, provokes=REJECTED, seconds=30)
def concatenation_initiator(bench):
    """Our initiator makes a key of TLS by authenticating to the kernel's target, and uses it; wrong keys are
    rejected.

    Not mutually: the kernel's target then forgets the challenges before it makes the key
    (nvmet_auth_insert_psk fails).
    """
    guest = bench.guest
    if "concat" not in guest.check("cat /dev/nvme-fabrics"):
        bench.skip("the guest's kernel has no secure channel concatenation")
    tlshd = start_tlshd(guest)
    host = f"nqn.2014-08.org.nvmexpress:uuid:{uuid.uuid4()}"
    subsystem = Subsystem("secret", [Namespace(mib=16)], hosts=[host])
    target = bench.serve()
    # The key is made without TLS.
    guest.check(f"cd {target.ROOT}/ports/4 && echo tls1.3 > addr_tsas && echo 'not required' > addr_treq")
    target.add_subsystem(subsystem)
    keys = {"host": secret(1), "controller": secret(1), "other": secret(1)}
    folder = f"{target.ROOT}/hosts/{host}"
    guest.check(f"cd {folder} && echo '{keys['host']}' > dhchap_key && echo '{keys['controller']}' > dhchap_ctrl_key")
    guest.check(f"cd {folder} && echo 'hmac(sha256)' > dhchap_hash && echo ffdhe2048 > dhchap_dhgroup")
    initiator = KeyedInitiator(guest, target, subsystem, host, keys)
    initiator.check("bdev_nvme_set_options dhchap_digests='[\"sha256\"]'")
    for options in ("dhchap_key=other concat=true", "dhchap_key=host dhchap_ctrlr_key=other concat=true"):
        initiator.is_rejected(options)
    initiator.attach("dhchap_key=host concat=true")
    keyring = guest.check(f"for key in $(keyctl rlist {KEYRING}); do keyctl rdescribe $key; done")
    assert f"NVMe1G01 {host} {subsystem.nqn} " in keyring, keyring
    initiator.detach()
    initiator.end()
    clear_keys(guest)
    guest.check("killall tlshd")
    tlshd.wait(timeout=30)
