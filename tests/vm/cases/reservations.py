"""Reservations, through nvme-cli and the kernel's block layer."""

import json
import re
import uuid

from harness.case import case
from harness.targets import MIB, Namespace, Subsystem

REGISTER, UNREGISTER = 0, 1
ACQUIRE, PREEMPT_ABORT = 0, 2
WRITE_EXCLUSIVE, EXCLUSIVE_ACCESS = 1, 2


class Host:
    """A host NQN and host identifier under which the guest connects."""

    def __init__(self, bench, subsystem):
        self.bench, self.subsystem, self.id = bench, subsystem, str(uuid.uuid4())
        self.nqn = f"nqn.2014-08.org.nvmexpress:uuid:{self.id}"
        self.device = None

    def connect(self):
        before = set(self.controllers())
        # Without nvme-cli, which mistakes another host's controller for its own.
        target = self.bench.target
        options = f"transport=tcp,traddr={target.hosts[4]},trsvcid={target.port},nqn={self.subsystem.nqn}"
        options += f",hostnqn={self.nqn},hostid={self.id},nr_io_queues=1,reconnect_delay=1,ctrl_loss_tmo=120"
        self.bench.guest.check(f"printf %s '{options}' > /dev/nvme-fabrics")
        (name,) = set(self.controllers()) - before
        self.device = f"/dev/{name}"
        self.bench.guest.until(f'[ "$(cat /sys/class/nvme/{name}/state)" = live ] && ls -d /sys/class/nvme/{name}/nvme*n1', 20)

    def controllers(self):
        return self.bench.guest.check("ls /sys/class/nvme").split()

    def disconnect(self):
        self.bench.guest.check(f"nvme disconnect -d {self.device.removeprefix('/dev/')}")

    def try_nvme(self, command, options=""):
        return self.bench.guest.run(f"nvme {command} {self.device} --namespace-id=1 {options}")

    def nvme(self, command, options=""):
        result = self.try_nvme(command, options)
        assert result.rc == 0, f"nvme {command} {options}: {result}"
        return result.out

    def register(self, key, persist=0):
        self.nvme("resv-register", f"--nrkey={key:#x} --rrega={REGISTER} --cptpl={persist}")

    def report(self):
        return json.loads(self.nvme("resv-report", "--eds -o json"))


def conflict(result):
    """Whether nvme-cli reports a reservation conflict."""
    return result.rc != 0 and re.search(r"(?i)reservation.conflict|0x4?083", result.out)


@case("reservations", on=("ringbolt",), provokes=r"I/O [Ee]rror|critical nexus|Failed|failed|reconnect|invalid", seconds=15)
def reservations(bench):
    """A reservation blocks and notifies the other host, and persists when the target is killed."""
    namespace = Namespace(mib=16, malloc=False)
    subsystem = Subsystem("reserved", [])
    target = bench.serve(subsystem)
    method, parameters = target._bdev(subsystem, namespace)
    # The persisted state refers to the bdev's UUID, so the bdev has a fixed one.
    target.rpc(method, **parameters, uuid=namespace.uuid)
    ptpl_path = f"{target.folder}/reserved.json"
    target.rpc("nvmf_subsystem_add_ns", nqn=subsystem.nqn, namespace={**target._ns(subsystem, namespace), "ptpl_file": ptpl_path})
    one, other = Host(bench, subsystem), Host(bench, subsystem)

    # Through the block layer: a host without the reservation can read, but not write.
    one.connect()
    device = bench.block(subsystem)
    bench.write_random(device, "data", 0, MIB, "64k")
    one.register(0xA, persist=3)
    one.nvme("resv-acquire", f"--crkey=0xa --racqa={ACQUIRE} --rtype={WRITE_EXCLUSIVE}")
    bench.write_random(device, "data", 0, MIB, "64k")
    one.disconnect()
    other.connect()
    device = bench.block(subsystem)
    bench.compare(device, "data", 0, MIB, "64k")
    write = f"dd if=/dev/zero of={device} bs=4k count=1 oflag=direct conv=notrunc,fsync"
    rejected = bench.guest.run(write)
    # EBADE, to which the block layer maps only a reservation conflict.
    assert rejected.rc != 0 and "Invalid exchange" in rejected.out, rejected
    bench.compare(device, "data", 0, MIB, "64k")
    assert conflict(other.try_nvme("resv-acquire", f"--crkey=0xb --racqa={ACQUIRE} --rtype={WRITE_EXCLUSIVE}"))

    # Both hosts at the same time, each through its own controller.
    one.connect()
    report = other.report()
    assert (report["rtype"], report["regctl"], report["ptpls"]) == (WRITE_EXCLUSIVE, 1, 1), report
    identity = json.loads(other.nvme("id-ns", "-o json"))
    assert (identity["rescap"], identity["nmic"] & 1) == (0xFF, 1), identity
    other.register(0xB)
    one.nvme("resv-acquire", f"--crkey=0xa --prkey=0xb --racqa={PREEMPT_ABORT} --rtype={EXCLUSIVE_ACCESS}")
    assert one.report()["rtype"] == WRITE_EXCLUSIVE, "preempting a registrant must not change the reservation"
    log = bench.guest.check(f"nvme get-log {other.device} --log-id=0x80 --log-len=64 -b | od -An -tu1 -w16 | head -1").split()
    # Log page count 1, Registration Preempted, no further pages, namespace 1.
    assert log == ["1"] + ["0"] * 7 + ["1", "0", "0", "0", "1", "0", "0", "0"], log
    assert conflict(other.try_nvme("resv-release", f"--crkey=0xb --rrela=0 --rtype={WRITE_EXCLUSIVE}"))

    # The reservation survives a kill and restart of the target.
    config = target.rpc("save_config")
    with open(target.config, "w", encoding="utf-8") as file:
        json.dump(config, file)
    target.kill()
    target.launch()
    bench.guest.wait(lambda: len(target.controllers(subsystem)) == 2, 60, "reconnection of both hosts", poll=0.2)
    bench.guest.until("! grep -L live /sys/class/nvme/*/state | grep .", 60)
    report = other.report()
    assert (report["rtype"], report["regctl"], report["ptpls"]) == (WRITE_EXCLUSIVE, 1, 1), report
    one.disconnect()
    assert bench.guest.run(write).rc != 0, "a host wrote despite a reservation from before the target was killed"
    one.connect()
    one.nvme("resv-release", f"--crkey=0xa --rrela=0 --rtype={WRITE_EXCLUSIVE}")
    one.nvme("resv-register", f"--crkey=0xa --rrega={UNREGISTER}")
    bench.guest.check(write)
