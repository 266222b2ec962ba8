"""`ringbolt serve` inside the guest, with a PCI Express controller as an NVMe bdev."""

import json

from harness.case import case
from harness.guest import PATIENCE
from harness.machine import bound, function_of, is_removed, plug, serial, unplug

from .machines import IOMMU

NQN = "nqn.2025-01.io.ringbolt:pcie"
URI = f"nvme+tcp://127.0.0.1:4420/{NQN}?ns=1"


def rpc(guest, method, *parameters):
    """Calls an RPC method; -> its result."""
    out = guest.check(f"ringbolt rpc -r /tmp/rpc {method} {' '.join(parameters)} 2> /tmp/errors || cat /tmp/errors", 60)
    try:
        return json.loads(out)
    except ValueError:
        raise AssertionError(f"{method}: {out}") from None


@case("bdev-nvme-pcie", on=("ringbolt",), machine=IOMMU, provokes=r"nvme|pcieport|pciehp|vfio|DMAR", seconds=20)
def bdev_nvme_pcie(bench):
    """A PCI Express controller is exported over TCP, survives resets under load, and is hot-removed."""
    guest = bench.guest
    address = function_of(guest, serial(2))
    guest.check(f"ifconfig lo up; ringbolt nvme bind {address}", 60)
    serve = guest.spawn("ringbolt serve -r /tmp/rpc 2>&1")
    guest.until("[ -S /tmp/rpc ]", 60)
    names = rpc(guest, "bdev_nvme_attach_controller", "name=Nvme0", "trtype=PCIe", f"traddr={address}")
    assert names == ["Nvme0n1"], names
    assert rpc(guest, "bdev_nvme_get_controllers")[0]["name"] == "Nvme0"
    rpc(guest, "nvmf_create_transport", "trtype=TCP")
    rpc(guest, "nvmf_create_subsystem", f"nqn={NQN}", "allow_any_host=true")
    rpc(guest, "nvmf_subsystem_add_ns", f"nqn={NQN}", "namespace.bdev_name=Nvme0n1")
    address_of = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "4420"}
    words = (f"listen_address.{key}={value}" for key, value in address_of.items())
    rpc(guest, "nvmf_subsystem_add_listener", f"nqn={NQN}", *words)
    seconds = int(5 * PATIENCE)
    load = f"--rw=randwrite --bs=4k --iodepth=16 --size=8m --time_based --runtime={seconds} --verify=pattern --eta=always"
    job = guest.spawn(f"ringbolt perf '--filename={URI}' {load} 2>&1")
    job.expect("IOPS", 60)
    for _ in range(3):
        rpc(guest, "bdev_nvme_reset_controller", "name=Nvme0")
    assert job.rc is None, "the load ended before the resets"
    ended = job.wait(240)
    assert ended.rc == 0 and " 0 wrong" in ended.out, ended
    job = guest.spawn(f"ringbolt perf '--filename={URI}' --rw=randread --time_based --runtime=3600 --eta=always 2>&1")
    job.expect("IOPS", 60)
    unplug(guest, 2)
    guest.wait(lambda: is_removed(guest, 2), 90, "end of nvme2", poll=0.1)
    guest.until("[ \"$(ringbolt rpc -r /tmp/rpc bdev_get_bdevs)\" = '[]' ]", 60)
    ended = job.wait(60)
    assert ended.rc == 1, ended
    guest.check("killall -TERM ringbolt")
    assert serve.wait(60).rc == 0, serve.out
    plug(guest, 2)
    function_of(guest, serial(2))


@case("bdev-nvme-hotplug", on=("ringbolt",), machine=IOMMU, provokes=r"nvme|pcieport|pciehp|vfio|DMAR", seconds=20)
def bdev_nvme_hotplug(bench):
    """A controller that is plugged in and bound becomes a bdev by itself, and goes when it is unplugged."""
    guest = bench.guest
    address = function_of(guest, serial(2))
    serve = guest.spawn("ringbolt serve -r /tmp/rpc 2>&1")
    guest.until("[ -S /tmp/rpc ]", 60)
    assert rpc(guest, "bdev_nvme_set_hotplug", "enable=true", "period_us=50000") is True
    bdevs = "ringbolt rpc -r /tmp/rpc bdev_get_bdevs"
    for name in ("HotInNvme0n1", "HotInNvme1n1"):
        assert rpc(guest, "bdev_get_bdevs") == [], "it belongs to the kernel's driver"
        guest.check(f"ringbolt nvme bind {address}", 60)
        guest.until(f"{bdevs} | grep -q '\"{name}\"'", 60)
        controllers = rpc(guest, "bdev_nvme_get_controllers")
        assert controllers[0]["ctrlrs"][0]["trid"]["traddr"] == address, controllers
        unplug(guest, 2)
        guest.wait(lambda: is_removed(guest, 2), 90, "end of nvme2", poll=0.1)
        guest.until(f"[ \"$({bdevs})\" = '[]' ]", 60)
        guest.until("[ \"$(ringbolt rpc -r /tmp/rpc bdev_nvme_get_controllers)\" = '[]' ]", 60)
        plug(guest, 2)
        address = function_of(guest, serial(2))
    # One that was detached by request is left alone, and one that was attached by request goes when it is unplugged.
    guest.check(f"ringbolt nvme bind {address}", 60)
    guest.until(f"{bdevs} | grep -q '\"HotInNvme2n1\"'", 60)
    rpc(guest, "bdev_nvme_detach_controller", "name=HotInNvme2")
    names = rpc(guest, "bdev_nvme_attach_controller", "name=Nvme0", "trtype=PCIe", f"traddr={address}")
    assert names == ["Nvme0n1"], names
    unplug(guest, 2)
    guest.wait(lambda: is_removed(guest, 2), 90, "end of nvme2", poll=0.1)
    guest.until(f"[ \"$({bdevs})\" = '[]' ]", 60)
    guest.check("killall -TERM ringbolt")
    ended = serve.wait(60)
    assert ended.rc == 0, ended
    plug(guest, 2)
    function_of(guest, serial(2))


@case("bdev-nvme-lent-memory", on=("ringbolt",), machine=IOMMU, provokes=r"nvme|vfio|DMAR", seconds=20)
def bdev_nvme_lent_memory(bench):
    """The memory of a vfio-user client reaches a PCI Express controller behind an IOMMU without a copy."""
    guest = bench.guest
    address = function_of(guest, serial(2))
    guest.check("mkdir /tmp/device")
    with bound(bench, address, "vfio-pci"):
        serve = guest.spawn("ringbolt serve -r /tmp/rpc 2>&1")
        guest.until("[ -S /tmp/rpc ]", 60)
        rpc(guest, "bdev_nvme_attach_controller", "name=Nvme0", "trtype=PCIe", f"traddr={address}")
        rpc(guest, "nvmf_create_transport", "trtype=VFIOUSER")
        rpc(guest, "nvmf_create_subsystem", f"nqn={NQN}", "allow_any_host=true")
        rpc(guest, "nvmf_subsystem_add_ns", f"nqn={NQN}", "namespace.bdev_name=Nvme0n1")
        words = ("listen_address.trtype=VFIOUSER", "listen_address.traddr=/tmp/device", "listen_address.trsvcid=0")
        rpc(guest, "nvmf_subsystem_add_listener", f"nqn={NQN}", *words)
        # Each client lends other memory, often at the addresses of the one before it.
        for block in ("4k", "64k", "128k"):
            load = f"--rw=randwrite --bs={block} --iodepth=16 --size=8m --number_ios=2000 --verify=pattern"
            out = guest.check(f"ringbolt perf '--filename=nvme+vfio-user:/tmp/device?ns=1' {load} 2>&1", 240)
            assert " 0 wrong" in out, out
        guest.check("killall -TERM ringbolt")
        ended = serve.wait(60)
        assert ended.rc == 0, ended
        assert ended.out.count("of lent memory in place") >= 3 and "are copied" not in ended.out, ended.out
        faults = guest.check("dmesg | grep -ci 'dmar.*fault' || true").strip()
        assert faults == "0", f"{faults} accesses to memory that is not mapped"
