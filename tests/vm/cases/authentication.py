"""In-band authentication (DH-HMAC-CHAP): the kernel's host with our target, our initiator with the kernel's target."""

import base64
import os
import uuid
import zlib

from harness.case import case
from harness.targets import MIB, Namespace, Subsystem

from .keyed_initiator import KeyedInitiator
from .machines import IOMMUFD

REJECTED = r"[Ff]ailed|not allowed|invalid|Invalid|denied|auth|qid"


def secret(kind=1):
    """A new key, as nvme gen-dhchap-key makes it."""
    key = os.urandom([32, 32, 48, 64][kind])
    return f"DHHC-1:{kind:02}:{base64.b64encode(key + zlib.crc32(key).to_bytes(4, 'little')).decode()}:"


def need_authentication(bench):
    """Skips the case where the guest's kernel lacks it."""
    if bench.guest.run("test -e /sys/module/nvme_auth").rc != 0:
        bench.skip("the guest's kernel has no in-band authentication")


def add_key(bench, name, text):
    """A key of the target's keyring."""
    path = f"{bench.folder}/{name}"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    bench.target.rpc("keyring_file_add_key", name=name, path=path)


@case("authentication", on=("ringbolt",), machine=IOMMUFD, provokes=REJECTED, seconds=20)
def authentication(bench):
    """The kernel's host authenticates, also mutually; a wrong key and none are rejected, and changed keys are used,
    also while it is connected."""
    need_authentication(bench)
    subsystem = Subsystem("secret", [Namespace(mib=16)], hosts=[])
    target = bench.serve(subsystem)
    host = f"nqn.2014-08.org.nvmexpress:uuid:{uuid.uuid4()}"
    identity = f"--hostnqn={host} --hostid={uuid.uuid4()} --nr-io-queues=2"
    keys = {"host": secret(1), "controller": secret(3), "other": secret(2), "plain": secret(0)}
    for name, text in keys.items():
        add_key(bench, name, text)
    target.rpc(
        "nvmf_subsystem_add_host", nqn=subsystem.nqn, host=host, dhchap_key="host", dhchap_ctrlr_key="controller"
    )

    def is_rejected(options):
        connected = bench.guest.run(f"nvme connect {target.address()} -n {subsystem.nqn} {identity} {options}", 60)
        assert connected.rc != 0, f"accepted with {options}"

    def connects(options):
        bench.connect(subsystem, f"{identity} {options}")
        device = bench.block(subsystem)
        bench.write_random(device, "data", 0, MIB, "64k")
        bench.compare(device, "data", 0, MIB, "64k")
        bench.disconnect(subsystem)

    is_rejected("")
    is_rejected(f"--dhchap-secret={keys['other']}")
    is_rejected(f"--dhchap-secret={keys['host']} --dhchap-ctrl-secret={keys['other']}")
    for digest, group in (("sha256", "null"), ("sha384", "ffdhe2048"), ("sha512", "ffdhe3072")):
        target.rpc("nvmf_set_config", dhchap_digests=[digest], dhchap_dhgroups=[group])
        connects(f"--dhchap-secret={keys['host']}")
        connects(f"--dhchap-secret={keys['host']} --dhchap-ctrl-secret={keys['controller']}")
    target.rpc("nvmf_subsystem_set_keys", nqn=subsystem.nqn, host=host, dhchap_key="plain")
    is_rejected(f"--dhchap-secret={keys['host']}")
    connects(f"--dhchap-secret={keys['plain']}")
    controller = bench.connect(subsystem, f"{identity} --dhchap-secret={keys['plain']}")
    device = bench.block(subsystem)
    bench.write_random(device, "kept", 0, MIB, "64k")
    target.rpc("nvmf_subsystem_set_keys", nqn=subsystem.nqn, host=host, dhchap_key="host")

    def commands():
        return {queue["qid"]: queue["commands"] for queue in target.rpc("nvmf_subsystem_get_qpairs", nqn=subsystem.nqn)}

    before = commands()
    assert len(before) == 3, before
    bench.guest.check(f"echo '{keys['host']}' > /sys/class/nvme/{controller}/dhchap_secret")
    # Send, Receive, Send and Receive on each queue, without a new connection.
    bench.guest.wait(lambda: all(commands()[qid] >= before[qid] + 4 for qid in before), 30, "authentication", poll=0.1)
    bench.compare(device, "kept", 0, MIB, "64k")
    bench.disconnect(subsystem)
    target.rpc("nvmf_subsystem_set_keys", nqn=subsystem.nqn, host=host)
    connects("")


@case("reauthentication-wrong", on=("ringbolt",), machine=IOMMUFD, provokes=f"{REJECTED}|[Rr]econnect|recovery", seconds=30)
def reauthentication_wrong(bench):
    """A connected host that authenticates anew with a wrong key loses its connections, and has them again with
    the right one."""
    need_authentication(bench)
    subsystem = Subsystem("secret", [Namespace(mib=16)], hosts=[])
    target = bench.serve(subsystem)
    host = f"nqn.2014-08.org.nvmexpress:uuid:{uuid.uuid4()}"
    right, wrong = secret(1), secret(1)
    add_key(bench, "right", right)
    target.rpc("nvmf_subsystem_add_host", nqn=subsystem.nqn, host=host, dhchap_key="right")
    identity = f"--hostnqn={host} --hostid={uuid.uuid4()} --nr-io-queues=2 --reconnect-delay=2 --dhchap-secret={right}"
    controller = bench.connect(subsystem, identity)
    device = bench.block(subsystem)
    bench.write_random(device, "kept", 0, MIB, "64k")
    state = f"/sys/class/nvme/{controller}"
    bench.guest.check(f"echo '{wrong}' > {state}/dhchap_secret")
    bench.guest.until(f"[ $(cat {state}/state) != live ]")
    bench.guest.check(f"echo '{right}' > {state}/dhchap_secret")
    bench.guest.until(f"[ $(cat {state}/state) = live ]")
    bench.compare(device, "kept", 0, MIB, "64k")
    bench.disconnect(subsystem)


@case("authentication-initiator", on=("nvmet",), machine=IOMMUFD, provokes=REJECTED, seconds=20)
def authentication_initiator(bench):
    """Our initiator authenticates to the kernel's target, one way and mutually; wrong keys are rejected."""
    need_authentication(bench)
    guest = bench.guest
    guest.check("ifconfig lo up")
    host = f"nqn.2014-08.org.nvmexpress:uuid:{uuid.uuid4()}"
    subsystem = Subsystem("secret", [Namespace(mib=16)], hosts=[host])
    target = bench.serve(subsystem)
    keys = {"host": secret(1), "controller": secret(3), "other": secret(2)}
    folder = f"{target.ROOT}/hosts/{host}"
    if guest.run(f"test -e {folder}/dhchap_key").rc != 0:
        bench.skip("the guest's nvmet has no in-band authentication")
    guest.check(f"cd {folder} && echo '{keys['host']}' > dhchap_key && echo '{keys['controller']}' > dhchap_ctrl_key")
    initiator = KeyedInitiator(guest, target, subsystem, host, keys)
    for options in ("", "dhchap_key=other", "dhchap_key=host dhchap_ctrlr_key=other"):
        initiator.is_rejected(options)
    for digest in ("sha256", "sha384", "sha512"):
        for group in ("null", "ffdhe2048"):
            guest.check(f"cd {folder} && echo 'hmac({digest})' > dhchap_hash && echo {group} > dhchap_dhgroup")
            for mutual in ("", "dhchap_ctrlr_key=controller"):
                initiator.attach(f"dhchap_key=host {mutual}")
                initiator.detach()
    # New keys while it is connected.
    initiator.attach("dhchap_key=host")
    guest.check(f"cd {folder} && echo '{keys['other']}' > dhchap_key")
    assert initiator.rpc("bdev_nvme_set_keys name=n dhchap_key=host").rc != 0, "the old key is accepted"
    initiator.check("bdev_nvme_set_keys name=n dhchap_key=other")
    initiator.end()
