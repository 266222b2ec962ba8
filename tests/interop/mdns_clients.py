#!/usr/bin/python3 -B
"""Discovery by multicast DNS of `ringbolt serve` against Avahi, python-zeroconf and hostile packets.

    RINGBOLT=target/debug/ringbolt tests/interop/mdns_clients.py [CASE...]

Each case prints one line. A case whose program is missing is SKIPPED, with the reason. An avahi-daemon that
runs is used; otherwise one is started on a private bus, which takes root.
"""

import contextlib
import ipaddress
import os
import random
import socket
import struct
import subprocess
import sys
import time
import uuid

import serving
from serving import SEED, Skipped, program, run

SERVICE = "_nvme-disc._tcp"
DISCOVERY = "nqn.2014-08.org.nvmexpress.discovery"
NQN = "nqn.2026-11.io.ringbolt:mdns"
PORT = 14427


def zeroconf():
    try:
        import zeroconf
    except ImportError:
        raise Skipped("python3-zeroconf is not installed") from None
    return zeroconf


def own_address():
    """An address of an interface for multicast."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("224.0.0.251", 5353))
        except OSError as error:
            raise Skipped(f"no interface for multicast: {error}") from None
        return one.getsockname()[0]


def until(what, condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not in {seconds} s"
        time.sleep(0.05)
    return found


class Server(serving.Server):
    def listen(self, address, port=PORT):
        """A subsystem with a namespace, at an address."""
        self.malloc()
        self.rpc("nvmf_create_transport", trtype="TCP")
        self.rpc("nvmf_create_subsystem", nqn=NQN, allow_any_host=True, serial_number="MDNS")
        self.rpc("nvmf_subsystem_add_ns", nqn=NQN, namespace={"bdev_name": "Malloc0", "uuid": str(uuid.uuid4())})
        self.add_listener(address, port)

    def add_listener(self, address, port):
        self.rpc("nvmf_subsystem_add_listener", nqn=NQN, listen_address=listener(address, port))

    def follows(self):
        """Discovers and attaches what is announced; -> the name of the bdev."""
        self.rpc("bdev_nvme_start_mdns_discovery", name="found", svcname=SERVICE)
        until("the bdev", lambda: self.bdevs() & {"found0_nvme0n1"})
        info = [one for one in self.rpc("bdev_nvme_get_mdns_discovery_info") if one["name"] == "found"]
        assert [one["svcname"] for one in info] == [SERVICE], info
        return info[0]["referrals"]

    def bdevs(self):
        return {one["name"] for one in self.rpc("bdev_get_bdevs")}


def listener(address, port):
    return {"trtype": "TCP", "adrfam": "IPv4", "traddr": address, "trsvcid": str(port)}


def saved_methods(server):
    subsystems = server.rpc("save_config")["subsystems"]
    return [call["method"] for one in subsystems for call in one["config"] or []]


class Seen:
    """What python-zeroconf sees of the service, by the name of the instance."""

    def __init__(self, module):
        self.module, self.conf, self.instances = module, module.Zeroconf(ip_version=module.IPVersion.V4Only), {}
        self.browser = module.ServiceBrowser(self.conf, f"{SERVICE}.local.", self)

    def add_service(self, conf, kind, name):
        info = conf.get_service_info(kind, name, 5000)
        if info:
            self.instances[name] = info

    update_service = add_service

    def remove_service(self, _conf, _kind, name):
        self.instances.pop(name, None)

    def services(self):
        return {(one.parsed_addresses()[0], one.port) for one in self.instances.values()}


# Cases.


def case_zeroconf_browses(server):
    """python-zeroconf finds each listener, also one that is added, and learns that they are withdrawn."""
    module, address = zeroconf(), own_address()
    server.listen(address)
    seen = Seen(module)
    try:
        server.rpc("nvmf_publish_mdns_prr")
        until("the announcement", lambda: seen.services() == {(address, PORT)})
        info = next(iter(seen.instances.values()))
        assert info.properties == {b"p": b"tcp", b"nqn": DISCOVERY.encode()}, info
        server.add_listener(address, PORT + 1)
        until("the other listener", lambda: seen.services() == {(address, PORT), (address, PORT + 1)})
        assert "nvmf_publish_mdns_prr" in saved_methods(server)
        server.rpc("nvmf_stop_mdns_prr")
        until("the withdrawal", lambda: not seen.services())
        assert "nvmf_publish_mdns_prr" not in saved_methods(server)
    finally:
        seen.conf.close()


def case_zeroconf_asks(server):
    """A browser that starts after the announcements gets an answer to its question."""
    module, address = zeroconf(), own_address()
    server.listen(address)
    server.rpc("nvmf_publish_mdns_prr")
    time.sleep(2.5)  # The announcements are over; nothing says so.
    seen = Seen(module)
    try:
        until("the answer", lambda: seen.services() == {(address, PORT)})
    finally:
        seen.conf.close()


def case_zeroconf_publishes(server):
    """The initiator attaches what python-zeroconf announces, and detaches it when it stops."""
    module, address = zeroconf(), own_address()
    server.listen(address)
    conf = module.Zeroconf(ip_version=module.IPVersion.V4Only)
    try:
        info = module.ServiceInfo(
            f"{SERVICE}.local.",
            f"other.{SERVICE}.local.",
            PORT,
            addresses=[ipaddress.ip_address(address).packed],
            properties={"p": "tcp", "NQN": DISCOVERY},
            server="other-host.local.",
        )
        conf.register_service(info)
        referrals = server.follows()
        assert referrals[0]["name"] == "found0_nvme" and len(referrals) == 1, referrals
        trid = referrals[0]["trid"]
        assert (trid["traddr"], trid["trsvcid"], trid["subnqn"]) == (address, str(PORT), DISCOVERY), trid
        assert "bdev_nvme_start_mdns_discovery" in saved_methods(server)
        server.rpc("bdev_nvme_stop_mdns_discovery", name="found")
        assert server.bdevs() == {"Malloc0"}, server.bdevs()
        assert server.rpc("bdev_nvme_get_mdns_discovery_info") == []
    finally:
        conf.close()


@contextlib.contextmanager
def avahi(folder):
    """The environment of Avahi's programs: the machine's daemon, or one that is started."""
    daemon, _browse = program("avahi-daemon"), program("avahi-browse")
    if subprocess.run([daemon, "--check"], capture_output=True).returncode == 0:
        yield dict(os.environ)
        return
    if os.geteuid() != 0:
        raise Skipped("no avahi-daemon runs, and starting one takes root")
    bus, path = program("dbus-daemon"), f"{folder}/bus"
    with open(f"{folder}/bus.conf", "w") as config:
        config.write(
            f'<busconfig><type>system</type><listen>unix:path={path}</listen><auth>EXTERNAL</auth>'
            '<policy context="default"><allow user="*"/><allow own="*"/><allow send_type="method_call"/>'
            '<allow send_type="signal"/><allow send_requested_reply="true" send_type="method_return"/>'
            '<allow send_requested_reply="true" send_type="error"/><allow receive_type="method_call"/>'
            '<allow receive_type="signal"/><allow receive_type="method_return"/><allow receive_type="error"/>'
            "</policy></busconfig>"
        )
    with open(f"{folder}/avahi.conf", "w") as config:
        config.write("[server]\nuse-ipv4=yes\nuse-ipv6=no\n")
    environment = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={path}"}
    options = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    os.makedirs("/run/avahi-daemon", exist_ok=True)
    processes = []
    try:
        processes.append(subprocess.Popen([bus, f"--config-file={folder}/bus.conf", "--nofork", "--nopidfile"], **options))
        until("the bus", lambda: os.path.exists(path))
        command = [daemon, "-f", f"{folder}/avahi.conf", "--no-drop-root", "--no-chroot", "--no-rlimits"]
        processes.append(subprocess.Popen(command, **options))
        until("avahi-daemon", lambda: subprocess.run([daemon, "--check"], capture_output=True).returncode == 0)
        yield environment
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(10)


def case_avahi_browses(server):
    """avahi-browse resolves what the target publishes, beside a daemon that has port 5353 too."""
    address = own_address()
    with avahi(server.folder) as environment:
        server.listen(address)
        server.rpc("nvmf_publish_mdns_prr")

        def resolved():
            found = run("avahi-browse", "-rpt", SERVICE, env=environment).splitlines()
            return [line.split(";") for line in found if line.startswith("=")]

        fields = until("the service", resolved)[0]
        assert fields[7:9] == [address, str(PORT)], fields
        assert '"p=tcp"' in fields[9] and f'"nqn={DISCOVERY}"' in fields[9], fields


def case_avahi_publishes(server):
    """The initiator attaches what avahi-publish announces."""
    address = own_address()
    with avahi(server.folder) as environment:
        server.listen(address)
        command = ["avahi-publish", "-s", "of-avahi", SERVICE, str(PORT), "p=tcp", f"NQN={DISCOVERY}"]
        publisher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        try:
            assert server.follows()[0]["trid"]["trsvcid"] == str(PORT)
        finally:
            publisher.terminate()
            publisher.wait(10)


def case_own_initiator(server):
    """Target and initiator of one process find each other; names and states that there are not fail."""
    server.listen(own_address())
    server.rpc("nvmf_publish_mdns_prr")
    server.follows()
    for method, parameters in (
        ("nvmf_publish_mdns_prr", {}),
        ("bdev_nvme_start_mdns_discovery", {"name": "found", "svcname": "_other._tcp"}),
        ("bdev_nvme_start_mdns_discovery", {"name": "other", "svcname": SERVICE}),
        ("bdev_nvme_start_mdns_discovery", {"name": "other", "svcname": "x..y"}),
        ("bdev_nvme_stop_mdns_discovery", {"name": "other"}),
    ):
        try:
            server.rpc(method, **parameters)
        except AssertionError:
            continue
        raise AssertionError(f"{method} {parameters} succeeded")


def hostile_packets(random_source):
    """Packets of every kind: random, with plausible headers, and floods of names that are found."""
    for _ in range(2000):
        yield random_source.randbytes(random_source.randrange(600))
    for _ in range(2000):
        counts = [random_source.choice((0, 1, 2, 65535)) for _ in range(4)]
        flags = random_source.choice((0, 0x8400))
        body = bytes(random_source.choice((0, 1, 4, 12, 0xC0, 33, random_source.randrange(256))) for _ in range(200))
        yield struct.pack(">6H", 0, flags, *counts) + body
    kind = b"\x0a_nvme-disc\x04_tcp\x05local\x00"
    for number in range(2000):
        label = f"flood{number}".encode()
        name = bytes([len(label)]) + label + b"\xc0\x0c"
        record = b"\xc0\x0c" + struct.pack(">2HIH", 12, 1, 120, len(name)) + name
        yield struct.pack(">6H", 0, 0x8400, 0, 1, 0, 0) + kind + record[2:]


def case_hostile(server):
    """Hostile packets leave both ends working, and attach nothing."""
    address = own_address()
    server.listen(address)
    server.rpc("nvmf_publish_mdns_prr")
    server.rpc("bdev_nvme_start_mdns_discovery", name="other", svcname="_other._tcp")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        # Answers come from this port; others are ignored.
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            sender.setsockopt(socket.SOL_SOCKET, option, 1)
        sender.bind((address, 5353))
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
        for packet in hostile_packets(random.Random(SEED)):
            sender.sendto(packet, ("224.0.0.251", 5353))
    assert server.bdevs() == {"Malloc0"}
    referrals = server.follows()
    assert len(referrals) == 1, referrals


CASES = {name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")}

if __name__ == "__main__":
    sys.exit(serving.run_cases(CASES, Server))
