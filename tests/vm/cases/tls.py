"""TLS of NVMe/TCP: the kernel's host with our target, our initiator with the kernel's target.

The guest's nvme-cli derives keys as libnvme did until July 2025. Its GnuTLS has SHA-256 alone for keys (3.8.11 is the
first with others), so no case has a key for SHA-384.
"""

import base64
import hmac
import os
import uuid
import zlib

from harness.case import case
from harness.targets import MIB, Namespace, Subsystem, free_port

from .authentication import REJECTED, add_key
from .connect import discovered
from .keyed_initiator import KeyedInitiator
from .machines import TLS

KEYRING = "%:.nvme"


def new_key():
    """A new key, as nvme gen-tls-key prints it."""
    key = os.urandom(32)
    return f"NVMeTLSkey-1:01:{base64.b64encode(key + zlib.crc32(key).to_bytes(4, 'little')).decode()}:"


def specified(key, host, subsystem):
    """-> the identity and the key of TLS, as the specification derives them (TCP 1.0, section 3.6.1.3)."""

    def expand(secret, label, context):
        label = b"tls13 " + label
        info = bytes([0, 32, len(label)]) + label + bytes([len(context)]) + context
        return hmac.digest(hmac.digest(bytes(32), secret, "sha256"), info + b"\1", "sha256")

    retained = expand(base64.b64decode(key.split(":")[2])[:32], b"HostNQN", host.encode())
    names = f"{host} {subsystem.nqn}"
    digest = base64.b64encode(hmac.digest(retained, f"{names} NVMe-over-Fabrics".encode(), "sha256")).decode()
    return f"NVMe1R01 {names} {digest}", expand(retained, b"nvme-tls-psk", f"01 {digest}".encode())


def start_tlshd(guest):
    """The daemon of the kernel's handshakes; -> its job."""
    if guest.run("which tlshd && test -e /sys/module/tls").rc != 0:
        raise AssertionError("the guest has no TLS")
    guest.check("printf '[debug]\\nloglevel=1\\n[authenticate]\\nkeyrings=.nvme\\n' > /tmp/tlshd.conf")
    job = guest.spawn("exec tlshd -c /tmp/tlshd.conf -s")
    job.expect("linked into our session keyring")
    return job


def clear_keys(guest):
    """Empties the kernel's keyring."""
    guest.check(f"for k in $(keyctl rlist {KEYRING}); do keyctl unlink $k {KEYRING} || exit; done")


def use_key(guest, host, subsystem, key):
    """Makes it the only key of the kernel's keyring, with nvme-cli's derivation; -> its identity."""
    clear_keys(guest)
    names = f"--hostnqn={host} --subsysnqn={subsystem.nqn}"
    guest.check(f"nvme check-tls-key --insert --identity=1 {names} --keydata='{key}'")
    return guest.check(f"keyctl rdescribe $(keyctl rlist {KEYRING})").strip().split(";", 4)[4]


def use_derived_key(guest, identity, key):
    """Makes it the only key of the kernel's keyring, as it is."""
    clear_keys(guest)
    text = base64.b64encode(key).decode()
    guest.check(f"echo {text} | base64 -d | keyctl padd psk '{identity}' {KEYRING}")


@case("tls", on=("ringbolt",), machine=TLS, provokes=f"reconnect|{REJECTED}", seconds=40)
def tls(bench):
    """The kernel's host uses TLS with keys of both derivations; other or removed keys, and no TLS, are rejected."""
    guest = bench.guest
    tlshd = start_tlshd(guest)
    subsystem = Subsystem("secret", [Namespace(mib=16)], hosts=[])
    target = bench.serve(subsystem)
    host = f"nqn.2014-08.org.nvmexpress:uuid:{uuid.uuid4()}"
    identity = f"--hostnqn={host} --hostid={uuid.uuid4()} --nr-io-queues=2"
    keys = {"right": new_key(), "other": new_key()}
    add_key(bench, "right", keys["right"])
    port = free_port()
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
    target.rpc("nvmf_subsystem_add_listener", nqn=subsystem.nqn, listen_address=address, secure_channel=True)
    target.rpc("nvmf_subsystem_add_host", nqn=subsystem.nqn, host=host, psk="right")
    record = next(one for one in discovered(bench, f"--hostnqn={host}") if str(one["trsvcid"]).strip() == str(port))
    assert record["treq"].startswith("required") and record["sectype"] == "tls13", record
    connect = f"nvme connect -t tcp -a 10.0.2.2 -s {port} -n {subsystem.nqn} {identity}"

    def connects(tries):
        guest.check(f"{connect} --tls", 60)
        device = bench.block(subsystem)
        for _ in range(tries):
            bench.write_random(device, "data", 0, 4 * MIB, "256k")
            bench.compare(device, "data", 0, 4 * MIB, "64k")
            sent = guest.check("sha256sum < /tmp/data").split()[0]
            assert target.digest(subsystem.namespaces[0], 0, 4 * MIB) == sent, "it differs in the target's storage"

    def is_rejected(command):
        assert guest.run(command, 60).rc != 0, f"accepted: {command}"

    offered = use_key(guest, host, subsystem, keys["right"])
    assert offered.startswith(f"NVMe1R01 {host} {subsystem.nqn} "), offered
    connects(2)
    assert f"{offered} (derived as libnvme" in target.log(), target.log()
    target.rpc("nvmf_subsystem_remove_host", nqn=subsystem.nqn, host=host)
    guest.until('! grep -q live /sys/class/nvme/nvme*/state', 20)
    bench.disconnect(subsystem)
    is_rejected(f"{connect} --tls")
    assert "an identity that is not known here" in target.log(), target.log()
    target.rpc("nvmf_subsystem_add_host", nqn=subsystem.nqn, host=host, psk="right")
    connects(1)
    bench.disconnect(subsystem)
    is_rejected(connect)
    assert "the peer does not use TLS" in target.log(), target.log()
    is_rejected(f"nvme connect {target.address()} -n {subsystem.nqn} {identity}")
    use_key(guest, host, subsystem, keys["other"])
    is_rejected(f"{connect} --tls")
    clear_keys(guest)
    is_rejected(f"{connect} --tls")
    use_derived_key(guest, offered, os.urandom(32))
    is_rejected(f"{connect} --tls")
    assert "binder does not match" in target.log(), target.log()
    offered, derived = specified(keys["right"], host, subsystem)
    use_derived_key(guest, offered, derived)
    connects(1)
    assert f"{offered}\n" in target.log(), target.log()
    bench.disconnect(subsystem)
    clear_keys(guest)
    guest.check("killall tlshd")
    tlshd.wait(timeout=30)


@case("tls-initiator", on=("nvmet",), machine=TLS, provokes=REJECTED, seconds=30)
def tls_initiator(bench):
    """Our initiator uses TLS with the kernel's target, in both derivations; other keys and no TLS are rejected."""
    guest = bench.guest
    tlshd = start_tlshd(guest)
    host = f"nqn.2014-08.org.nvmexpress:uuid:{uuid.uuid4()}"
    subsystem = Subsystem("secret", [Namespace(mib=16)], hosts=[host])
    target = bench.serve()
    guest.check(f"cd {target.ROOT}/ports/4 && echo tls1.3 > addr_tsas && echo required > addr_treq")
    target.add_subsystem(subsystem)
    keys = {"right": new_key(), "other": new_key()}
    initiator = KeyedInitiator(guest, target, subsystem, host, keys)

    def check(accepted, *rejected):
        for options in rejected:
            initiator.is_rejected(options)
        initiator.attach(accepted)
        initiator.detach()

    use_derived_key(guest, *specified(keys["right"], host, subsystem))
    check("psk=right", "", "psk=other", "psk=right psk_derivation=libnvme")
    use_key(guest, host, subsystem, keys["right"])
    check("psk=right psk_derivation=libnvme", "", "psk=other psk_derivation=libnvme", "psk=right")
    options = f"hostnqn={host}&psk=/tmp/keys/right&psk_derivation=libnvme"
    url = f"nvme+tcp://127.0.0.1:{target.port}/{subsystem.nqn}?{options}"
    job = f"ringbolt perf --name=j --rw=randwrite --bs=64k --iodepth=8 --size=4m --filename='{url}'"
    empty = target.digest(subsystem.namespaces[0], 0, 4 * MIB)
    guest.check(f"{job} --verify=crc32c", 120)
    assert target.digest(subsystem.namespaces[0], 0, 4 * MIB) != empty, "nothing was written"
    initiator.end()
    clear_keys(guest)
    guest.check("killall tlshd")
    tlshd.wait(timeout=30)
