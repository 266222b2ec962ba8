"""Admin commands through nvme-cli: Identify, log pages, features, properties and discovery."""

import json
import re

from harness.case import case
from harness.targets import DISCOVERY, Namespace, Subsystem

# Features that an I/O controller over fabrics must support (NVM Express Base 2.0, figure 316), and
# the options to get them. Over fabrics the host identifier is the extended one.
FEATURES_EVERYWHERE = {"number of queues": "7", "asynchronous events": "11", "keep-alive timer": "15"}
# The kernel's target lacks these.
FEATURES = {"arbitration": "1", "power management": "2", "temperature threshold": "4", "error recovery": "5 -n 1"}
FEATURES |= {"write atomicity normal": "10", "host identifier": "129 -l 16 --cdw11=1"}
VOLATILE_WRITE_CACHE = "6"  # only with a volatile write cache

# Commands that must end with status 0.
LOGS = ["error-log /dev/nvme0 -e 4", "fw-log /dev/nvme0", "effects-log /dev/nvme0", "changed-ns-list-log /dev/nvme0"]
LOGS += ["get-log /dev/nvme0 --log-id=4 --log-len=4096", "get-log /dev/nvme0 --log-id=2 --log-len=512 --lpo=0"]
LOGS_IN_2_0 = ["supported-log-pages /dev/nvme0"]

# Commands that the controller must reject, and then continue to work.
REJECTED = [
    "get-log /dev/nvme0 --log-id=0xee --log-len=512",
    "get-feature /dev/nvme0 -f 0x7e",
    "admin-passthru /dev/nvme0 --opcode=0xfe",
    "admin-passthru /dev/nvme0 --opcode=0x06 --cdw10=0x7f -r --data-len=4096",
    "io-passthru /dev/nvme0n1 --opcode=0x7e --namespace-id=1",
    "read /dev/nvme0n1 --start-block=999999999 --block-count=0 --data-size=4096",
]


class Checks:
    """Collects all failed checks, so one run reports them all."""

    def __init__(self, guest):
        self.guest, self.failures = guest, []

    def run(self, command):
        result = self.guest.run(f"nvme {command}")
        if result.rc != 0:
            self.failures.append(f"nvme {command}: {result}")
        return result

    def json(self, command):
        """The output of `nvme COMMAND -o json`; an empty dictionary if it fails."""
        result = self.run(f"{command} -o json")
        try:
            return json.loads(result.out)
        except json.JSONDecodeError:
            self.failures.append(f"nvme {command} -o json: no JSON in {result.out[:200]!r}")
            return {}

    def value(self, command):
        """The number after "value:" in the command's output; 0 if there is none."""
        match = re.search(r"value:\s*(?:0x)?([0-9a-fA-F]+)", self.run(command).out)
        return int(match[1], 16) if match else 0

    def rejected(self, command):
        result = self.guest.run(f"nvme {command}")
        if result.rc == 0:
            self.failures.append(f"nvme {command}: succeeded, but must be rejected")

    def expect(self, what, seen, expected):
        if seen != expected:
            self.failures.append(f"{what} is {seen!r}, not {expected!r}")

    def expect_true(self, what, condition):
        if not condition:
            self.failures.append(f"condition failed: {what}")

    def raise_failures(self):
        assert not self.failures, "\n".join(self.failures)


def identity(bench):
    """A target with one malloc namespace that has all identifiers set."""
    namespace = Namespace(mib=32, malloc=True)
    subsystem = Subsystem("identity", [namespace], serial="RINGBOLT0000042", model="Ringbolt Controller")
    bench.serve(subsystem)
    assert bench.connect(subsystem) == "nvme0"
    assert bench.block(subsystem) == "/dev/nvme0n1"
    return subsystem, namespace


@case("identify")
def identify(bench):
    """Identify data and descriptors match the configuration."""
    subsystem, namespace = identity(bench)
    found = Checks(bench.guest)

    controller = found.json("id-ctrl /dev/nvme0")
    found.expect("sn", str(controller.get("sn")).strip(), subsystem.serial)
    found.expect("mn", str(controller.get("mn")).strip(), subsystem.model)
    found.expect("subnqn", controller.get("subnqn"), subsystem.nqn)
    found.expect("cntrltype", controller.get("cntrltype"), 1)
    found.expect_true("fr is not empty", str(controller.get("fr", "")).strip())
    found.expect_true("ver is 1.3 or later", controller.get("ver", 0) >= 0x10300)
    found.expect_true("kas is not 0: keep-alive is mandatory over fabrics", controller.get("kas", 0) > 0)
    found.expect_true("sgls is not 0: fabrics transfer by SGL", controller.get("sgls", 0) & 3)
    found.expect_true("ioccsz holds at least a command", controller.get("ioccsz", 0) >= 4)
    found.expect_true("iorcsz is 1", controller.get("iorcsz") == 1)
    found.expect_true("maxcmd is not 0", controller.get("maxcmd", 0) > 0)
    found.expect_true("sqes asks for 64 bytes", controller.get("sqes", 0) & 15 == 6)
    found.expect_true("cqes asks for 16 bytes", controller.get("cqes", 0) & 15 == 4)
    found.expect_true("discard is offered (oncs)", controller.get("oncs", 0) & 4)
    found.expect_true("write zeroes is offered (oncs)", controller.get("oncs", 0) & 8)
    found.expect_true("changed namespaces are announced (oaes)", controller.get("oaes", 0) & 0x100)

    ns = found.json("id-ns /dev/nvme0 -n 1")
    found.expect("nsze", ns.get("nsze"), namespace.blocks)
    found.expect("ncap", ns.get("ncap"), namespace.blocks)
    found.expect_true("nuse is at most nsze", ns.get("nuse", 1 << 64) <= namespace.blocks)
    found.expect("nguid", str(ns.get("nguid")).upper(), namespace.nguid)
    formats = ns.get("lbafs") or [{}]
    current = formats[min(ns.get("flbas", 0) & 15, len(formats) - 1)]
    found.expect("block size", 1 << current.get("ds", 0), namespace.block_size)
    found.expect("metadata size", current.get("ms"), 0)

    descriptors = found.json("ns-descs /dev/nvme0 -n 1").get("ns-descs", [])
    reported = {key: value for descriptor in descriptors for key, value in descriptor.items()}
    found.expect("uuid", reported.get("uuid"), namespace.uuid)
    found.expect("nguid descriptor", str(reported.get("nguid")).upper(), namespace.nguid)
    found.expect("uuid in sysfs", bench.guest.check("cat /sys/block/nvme0n1/uuid").strip(), namespace.uuid)

    listed = found.json("list-ns /dev/nvme0").get("nsid_list", [])
    found.expect("active namespaces", [entry.get("nsid") for entry in listed], [1])
    # An inactive NSID returns zeroes; an invalid one is rejected.
    found.expect("nsze of an inactive namespace", found.json("id-ns /dev/nvme0 -n 2").get("nsze"), 0)
    if bench.kind == "ringbolt":  # nvmet returns zeroes for both
        found.rejected("id-ns /dev/nvme0 -n 4294967294")

    devices = found.json("list").get("Devices", [])
    device = next((entry for entry in devices if entry.get("DevicePath") == "/dev/nvme0n1"), {})
    found.expect("serial in `nvme list`", device.get("SerialNumber"), subsystem.serial)
    found.expect("model in `nvme list`", device.get("ModelNumber"), subsystem.model)
    found.expect("size in `nvme list`", device.get("PhysicalSize"), namespace.blocks * namespace.block_size)
    found.expect("sector size in `nvme list`", device.get("SectorSize"), namespace.block_size)
    found.expect_true("`nvme list-subsys` names the subsystem", subsystem.nqn in found.run("list-subsys").out)
    found.raise_failures()


@case("logs-and-features", provokes="nvmet_tcp: failed cmd")
def logs_and_features(bench):
    """Mandatory log pages, features and properties; invalid commands are rejected."""
    subsystem, _namespace = identity(bench)
    found = Checks(bench.guest)
    full = bench.kind == "ringbolt"

    smart = found.json("smart-log /dev/nvme0")
    found.expect("critical warnings", smart.get("critical_warning"), 0)
    for command in LOGS + LOGS_IN_2_0 * full:
        found.run(command)
    features = list((FEATURES_EVERYWHERE | (FEATURES if full else {})).values())
    if found.json("id-ctrl /dev/nvme0").get("vwc", 0) & 1:
        features.append(VOLATILE_WRITE_CACHE)
    for feature in features:
        found.run(f"get-feature /dev/nvme0 -f {feature}")
    queues = found.value("get-feature /dev/nvme0 -f 7")
    found.expect_true(f"as many I/O queues of each kind are granted ({queues:#x})", queues & 0xFFFF == queues >> 16)
    found.run("set-feature /dev/nvme0 -f 11 --value=0x100")
    found.expect("the feature that was set", found.value("get-feature /dev/nvme0 -f 11"), 0x100)

    for offset, name in {0x00: "capabilities", 0x08: "version", 0x14: "configuration"}.items():
        found.expect_true(f"controller {name} is not zero", found.value(f"get-property /dev/nvme0 --offset={offset}"))
    found.expect("controller status", found.value("get-property /dev/nvme0 --offset=0x1c"), 1)
    version = re.search(r"nvme version (\d+)\.(\d+)", bench.guest.check("nvme version"))
    if (int(version[1]), int(version[2])) >= (2, 5):  # 2.3 aborts at the first register that fabrics lack
        found.run("show-regs /dev/nvme0")

    for command in REJECTED:
        found.rejected(command)
    found.expect("state after invalid commands", bench.guest.check("cat /sys/class/nvme/nvme0/state").strip(), "live")
    found.run("reset /dev/nvme0")
    bench.controller(subsystem)
    found.json("id-ctrl /dev/nvme0")
    found.raise_failures()


@case("persistent-events", on=("ringbolt",))
def persistent_events(bench):
    """nvme-cli establishes a context of the Persistent Event log, decodes all events, and releases it."""
    subsystem, namespace = identity(bench)
    found = Checks(bench.guest)
    found.expect_true("the log is announced (lpa)", found.json("id-ctrl /dev/nvme0").get("lpa", 0) & 0x10)
    found.rejected("persistent-event-log /dev/nvme0 --action=0")
    found.run("set-feature /dev/nvme0 -f 1 --value=7")
    found.run("reset /dev/nvme0")
    bench.controller(subsystem)
    found.run("persistent-event-log /dev/nvme0 --action=1 --log_len=512")
    found.rejected("persistent-event-log /dev/nvme0 --action=1 --log_len=512")
    found.run("set-feature /dev/nvme0 -f 1 --value=3")
    log = found.json("persistent-event-log /dev/nvme0 --action=0")
    found.expect("log identifier", log.get("log_id"), 0x0D)
    found.expect("serial", str(log.get("serial_number", log.get("sn", ""))).strip(), subsystem.serial)
    text = found.run("persistent-event-log /dev/nvme0 --action=0").out
    found.expect_true(f"the subsystem is named: {text[:1500]}", subsystem.nqn in text)
    # nvme-cli leaves out the last event, which ends where the log does.
    events = re.findall(r"^Event Type: (.*)$", text, re.M)
    total = re.search(r"^Total Number of Events: (\d+)$", text, re.M)
    found.expect("events", len(events), int(total[1]) - 1 if total else None)
    found.expect_true(f"the newest is a health snapshot: {events}", "SMART" in str(events[:1]))
    kinds = ["Power On Reset Event Entry", "Set Feature Event Entry", "Change Namespace Event Entry"]
    for kind in kinds:
        found.expect_true(f"an event of each kind is decoded, {kind}: {text}", kind in text)
    found.expect_true(f"the value of the feature: {text}", re.search(r"value:\s*0x0*7\b", text))
    found.expect_true("not what came after the context", not re.search(r"value:\s*0x0*3\b", text))
    size = re.search(r"^Namespace Size: (\d+)$", text, re.M)
    found.expect("size of the created namespace", size and int(size[1]), namespace.blocks)
    raw = bench.guest.check("nvme persistent-event-log /dev/nvme0 --action=0 -b | od -An -tu1 -N 24")
    found.expect("log header", [int(value) for value in raw.split()][:4], [0x0D, 0, 0, 0])
    found.run("persistent-event-log /dev/nvme0 --action=2")
    found.rejected("persistent-event-log /dev/nvme0 --action=0")
    found.raise_failures()


@case("io-commands")
def io_commands(bench):
    """Write, read, compare, write zeroes, discard and flush: single commands by nvme-cli."""
    _subsystem, namespace = identity(bench)
    found = Checks(bench.guest)
    size = namespace.block_size
    bench.guest.check(f"head -c {size} /dev/urandom > /tmp/a; head -c {size} /dev/urandom > /tmp/b")
    where = "/dev/nvme0n1 --start-block=5 --block-count=0"
    found.run(f"write {where} --data-size={size} --data=/tmp/a")
    found.run(f"read {where} --data-size={size} --data=/tmp/c")
    bench.guest.check("cmp /tmp/a /tmp/c")
    if bench.kind == "ringbolt":
        oncs = found.json("id-ctrl /dev/nvme0").get("oncs", 0)
        if oncs & 1:
            found.run(f"compare {where} --data-size={size} --data=/tmp/a")
            found.rejected(f"compare {where} --data-size={size} --data=/tmp/b")
        # nvmet does not support it on the guest's tmpfs.
        found.run(f"write-zeroes {where}")
        found.run(f"read {where} --data-size={size} --data=/tmp/c")
        bench.guest.check(f"head -c {size} /dev/zero | cmp - /tmp/c")
    found.run("flush /dev/nvme0n1 -n 1")
    found.run(f"write {where} --data-size={size} --data=/tmp/b --force-unit-access")
    found.run("dsm /dev/nvme0n1 -n 1 --ad --slbs=64 --blocks=64")
    found.run(f"read {where} --data-size={size} --data=/tmp/c")
    bench.guest.check("cmp /tmp/b /tmp/c")
    found.raise_failures()


def with_relay(bench):
    """The discovery log contains the target's listen address, which in the guest is its own loopback: a
    relay there forwards to the host."""
    if bench.kind == "ringbolt":
        port = bench.target.port
        bench.guest.check(f"nc -ll -p {port} -e nc 10.0.2.2 {port} > /dev/null 2>&1 &")


@case("connect-all")
def connect_all(bench):
    """`nvme connect-all` connects to every subsystem of the discovery log."""
    subsystems = [Subsystem(name, [Namespace(mib=16)]) for name in ("first", "second")]
    bench.serve(*subsystems)
    with_relay(bench)
    bench.guest.check(f"nvme connect-all {bench.target.address()}", 60)
    devices = {bench.block(subsystem) for subsystem in subsystems}
    assert len(devices) == 2, devices
    for device in devices:
        bench.write_random(device, device.removeprefix("/dev/"), 0, 1 << 20, "64k")
    for device in devices:
        bench.compare(device, device.removeprefix("/dev/"), 0, 1 << 20, "64k")


def persistent_discovery(bench):
    """Connects a persistent discovery controller; -> its name."""
    bench.guest.check(f"nvme discover -p {bench.target.address()}")
    kind = "for c in /sys/class/nvme/nvme*; do [ $(cat $c/cntrltype) = discovery ] && echo ${c##*/} && return 0; done; return 1"
    return bench.guest.until(kind, 10).strip()


@case("discovery-persistent")
def discovery_persistent(bench):
    """A persistent discovery controller stays live and can be queried again."""
    subsystem = Subsystem("found", [Namespace(mib=16)])
    bench.serve(subsystem)
    controller = persistent_discovery(bench)
    assert bench.guest.check(f"cat /sys/class/nvme/{controller}/subsysnqn").strip() == DISCOVERY
    for _ in range(2):
        bench.guest.check(f"nvme discover -d {controller} {bench.target.address()} | grep -q {subsystem.nqn}")
    assert bench.guest.check(f"cat /sys/class/nvme/{controller}/state").strip() == "live"
    bench.guest.check(f"nvme disconnect -d {controller}")


@case("discovery-change")
def discovery_change(bench):
    """Adding a subsystem sends a discovery change event to a persistent discovery controller."""
    bench.serve(Subsystem("before", [Namespace(mib=16)]))
    listener = bench.guest.spawn("uevent sh -c 'echo event $ACTION ${NVME_AEN:-none}'")
    controller = persistent_discovery(bench)
    later = Subsystem("later", [Namespace(mib=16)])
    bench.target.add_subsystem(later)
    listener.expect("^event change 0x70f002$", 10)
    bench.guest.until(f"nvme discover -d {controller} {bench.target.address()} | grep -q {later.nqn}", 10)


@case("discovery-referral", on=("ringbolt",))
def discovery_referral(bench):
    """A referral is an entry of the discovery log, and adding it is a change of the log."""
    bench.serve(Subsystem("referring", [Namespace(mib=16)]))
    listener = bench.guest.spawn("uevent sh -c 'echo event $ACTION ${NVME_AEN:-none}'")
    controller = persistent_discovery(bench)
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "192.0.2.7", "trsvcid": "8009"}
    bench.target.rpc("nvmf_discovery_add_referral", address=address)
    listener.expect("^event change 0x70f002$", 10)
    log = json.loads(bench.guest.check(f"nvme discover -d {controller} -o json {bench.target.address()}"))
    found = [record for record in log["records"] if record["traddr"] == "192.0.2.7"]
    assert [(record["subtype"], record["trsvcid"], record["subnqn"]) for record in found] == [
        ("discovery subsystem referral", "8009", DISCOVERY)
    ], log
    bench.target.rpc("nvmf_discovery_remove_referral", address=address)
    bench.guest.until(f"! nvme discover -d {controller} {bench.target.address()} | grep -q 192.0.2.7", 10)
    bench.guest.check(f"nvme disconnect -d {controller}")
