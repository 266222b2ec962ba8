"""PCI functions in user space, and `ringbolt nvme bind`: inside the guest, on emulated NVMe controllers."""

import json

from harness.case import case
from harness.machine import Machine, Nvme, bound, driver_of, function_of, functions, serial

IOMMU = Machine(nvme=(Nvme(), Nvme(block_size=4096), Nvme(mib=0, port="port0")), iommu=True, hugepages=16)
PLAIN = Machine(nvme=(Nvme(),), hugepages=16)
IOMMUFD = Machine(nvme=(Nvme(), Nvme()), iommu=True, hugepages=16, vfio=True)
NO_IOMMU = Machine(nvme=(Nvme(),), hugepages=16, vfio=True)


def registers(bench, address, way=""):
    """What the example says of a function, by name."""
    out = bench.guest.check(f"registers {address} {way}", 60)
    return dict(line.split(" ", 1) for line in out.splitlines())


def check_registers(seen, index):
    """What must hold however the function was opened."""
    assert seen["present"] == seen["reset"] == "true", seen
    assert int(seen["cap"], 16) != 0 and int(seen["vs"], 16) >= 0x10200, seen
    # It read a command from our memory and wrote an answer and a completion.
    assert seen["status"] == "0x0" and seen["serial"] == serial(index), seen
    # Memory decoding on, bus mastering off.
    assert int(seen["command"], 16) & 6 == 2, seen


def check_driver(bench, address):
    """Our driver writes and verifies blocks on a function, however it is bound."""
    load = "--rw=randwrite --bs=4k --iodepth=16 --size=2m --verify=pattern"
    out = bench.guest.check(f"ringbolt perf --filename=nvme+pcie://{address}?ns=1 {load} 2>&1", 120)
    assert " 0 wrong" in out, out


def check_needs_hugepages(bench, address):
    """Where devices see physical addresses, memory of small pages is refused with what to do."""
    bench.guest.check("echo 0 > /proc/sys/vm/nr_hugepages")
    refused = bench.guest.run(f"registers {address}", 60)
    bench.guest.check("echo 16 > /proc/sys/vm/nr_hugepages")
    assert refused.rc == 1 and "nr_hugepages" in refused.out, refused


@case("pci-vfio", on=("ringbolt",), machine=IOMMU)
def pci_vfio(bench):
    """A function bound to vfio-pci is opened through its group, does DMA through the IOMMU and interrupts."""
    address = function_of(bench.guest, serial(1))
    with bound(bench, address, "vfio-pci"):
        for hugepages in (16, 0):  # memory of either kind
            bench.guest.check(f"echo {hugepages} > /proc/sys/vm/nr_hugepages")
            seen = registers(bench, address)
            check_registers(seen, 1)
            assert seen["backend"] == "VFIO (group)" and seen["interrupted"] == "true", seen
            assert int(seen["interrupts"]) >= 2, seen
            assert "this process has it open already" in seen["again"], seen
        bench.guest.check("echo 16 > /proc/sys/vm/nr_hugepages")
        # The IOMMU's aperture (39 bits here) is smaller than the address space.
        assert seen["dma"].endswith("translated") and int(seen["dma"].split()[0], 16) < 1 << 39, seen
        assert function_of(bench.guest, serial(0)) != address


@case("pci-vfio-memory-limit", on=("ringbolt",), machine=IOMMU)
def pci_vfio_memory_limit(bench):
    """Where memory may not be locked, the error says how to allow it."""
    address = function_of(bench.guest, serial(1))
    with bound(bench, address, "vfio-pci"):
        group = bench.guest.check(f"readlink /sys/bus/pci/devices/{address}/iommu_group").strip().rpartition("/")[2]
        # An ordinary user who was given the group's node, and 64 KiB.
        bench.guest.check(f"chown 1000 /dev/vfio/{group}")
        result = bench.guest.run(f"ulimit -l 64; chroot --userspec=1000:1000 / registers {address}", 60)
        assert result.rc == 1 and "LimitMEMLOCK=infinity" in result.out and "64 KiB" in result.out, result
        check_registers_as_user = f"ulimit -l unlimited; chroot --userspec=1000:1000 / registers {address}"
        assert "status 0x0" in bench.guest.check(check_registers_as_user, 60)


@case("pci-uio", on=("ringbolt",), machine=PLAIN)
def pci_uio(bench):
    """A function bound to uio_pci_generic is opened through sysfs, and does DMA to hugepages."""
    address = function_of(bench.guest, serial(0))
    with bound(bench, address, "uio_pci_generic"):
        seen = registers(bench, address)
        check_registers(seen, 0)
        assert seen["backend"] == "UIO" and seen["interrupts"] == "0", seen
        assert "another process has it open" in seen["again"], seen
        check_driver(bench, address)
        check_needs_hugepages(bench, address)


@case("bind-without-iommu", on=("ringbolt",), machine=PLAIN)
def bind_without_iommu(bench):
    """Without an IOMMU, binding to vfio-pci is refused before anything is touched."""
    address = function_of(bench.guest, serial(0))
    refused = bench.guest.run(f"ringbolt nvme bind {address}")
    assert refused.rc == 1 and "it is behind no IOMMU" in refused.out, refused
    assert driver_of(bench.guest, address) == "nvme"


@case("bind-and-back", on=("ringbolt",), machine=IOMMU)
def bind_and_back(bench):
    """Controllers go to vfio-pci and back, with their data, and hugepages as they were."""
    guest = bench.guest
    addresses = functions(guest)
    assert len(addresses) == 3
    device = f"/dev/{block_of(bench, 0)}"
    guest.check(f"yes ringbolt | dd of={device} bs=64k count=16 iflag=fullblock oflag=direct status=none")
    before = guest.check(f"dd if={device} bs=64k count=16 iflag=direct status=none | sha256sum")
    planned = guest.check("ringbolt nvme bind --all --dry-run")
    assert planned.count("nvme -> vfio-pci") == 3, planned
    assert all(driver_of(guest, address) == "nvme" for address in addresses)
    done = json.loads(guest.check("ringbolt nvme bind --all --hugepages 24 --json", 60))
    assert done["applied"] and done["plan"]["hugepages"] == {"from": 16, "to": 24}, done
    assert all(driver_of(guest, address) == "vfio-pci" for address in addresses)
    assert guest.check("ls /sys/class/nvme").strip() == ""
    shown = json.loads(guest.check("ringbolt nvme bind --status --json"))
    assert all(one["undo"]["driver"] == "nvme" for one in shown["functions"]), shown
    # Nobody takes it back while a program has it.
    guest.check("mkfifo /tmp/end")
    group = shown["functions"][0]["iommu_group"]
    job = guest.spawn(f"exec 5<> /dev/vfio/{group}; echo open; read -r line < /tmp/end")
    job.expect("^open$")
    refused = guest.run(f"ringbolt nvme bind --undo {addresses[0]}")
    assert refused.rc == 1 and "a program has it open" in refused.out, refused
    guest.check("echo > /tmp/end")
    job.wait()
    guest.check("ringbolt nvme bind --undo", 60)
    assert all(driver_of(guest, address) == "nvme" for address in addresses)
    assert guest.check("cat /proc/sys/vm/nr_hugepages").strip() == "16"
    assert "nothing to do" in guest.check("ringbolt nvme bind --undo")
    assert guest.check("ls -A /run/ringbolt").split() == ["bind.lock"]
    device = f"/dev/{block_of(bench, 0)}"
    assert guest.check(f"dd if={device} bs=64k count=16 iflag=direct status=none | sha256sum") == before
    guest.check(f"blkdiscard -z {device} 2> /dev/null || dd if=/dev/zero of={device} bs=64k count=16 status=none")


@case("bind-refuses", on=("ringbolt",), machine=IOMMU, provokes=r"nvme\d+n1|EXT4-fs")
def bind_refuses(bench):
    """A disk that is mounted, swapped to or held is refused, whatever is forced; marks can be overridden."""
    guest = bench.guest
    address = function_of(guest, serial(0))
    name = block_of(bench, 0)
    device = f"/dev/{name}"

    def refused(options, *texts):
        result = guest.run(f"ringbolt nvme bind {address} {options}")
        assert result.rc == 1 and all(text in result.out for text in texts), result
        assert driver_of(guest, address) == "nvme"

    guest.check(f"mkfs.ext4 -q {device} && mount {device} /mnt", 60)
    refused("--force-signature", f"{name} is mounted at /mnt", "nothing was changed")
    # Also where only another namespace has it.
    guest.check("mkfifo /tmp/end")
    job = guest.spawn("unshare -m sh -c 'echo apart; read -r line < /tmp/end'")
    job.expect("^apart$")
    guest.check("umount /mnt")
    refused("--force-signature", f"{name} is mounted at /mnt in the namespace of process")
    guest.check("echo > /tmp/end")
    job.wait()
    refused("", f"{name} has the mark of a ext2/3/4 file system")
    with bound(bench, address, "vfio-pci", "--force-signature"):
        pass
    name = block_of(bench, 0)
    device = f"/dev/{name}"
    guest.check(f"mkswap {device} && swapon {device}")
    refused("--force-signature", f"{name} is swapped to")
    guest.check(f"swapoff {device} && dd if=/dev/zero of={device} bs=64k count=2 status=none conv=fsync")
    guest.check(f"printf 'n\\np\\n1\\n\\n\\nw\\n' | fdisk {device}")
    refused("", f"{name} has the mark of a MBR partition table")
    guest.check(f"mkfs.ext4 -q {device}p1 && mount {device}p1 /mnt", 60)
    refused("--force-signature", f"{name}p1 is mounted at /mnt")
    # The other controllers are free: --all leaves this one out.
    done = json.loads(guest.check("ringbolt nvme bind --all --json", 60))
    assert done["applied"] and len(done["plan"]["changes"]) == 2, done
    assert driver_of(guest, address) == "nvme"
    guest.check("ringbolt nvme bind --undo", 60)
    guest.check(f"umount /mnt && dd if=/dev/zero of={device} bs=64k count=64 status=none conv=fsync")


@case("pci-hotplug", on=("ringbolt",), machine=IOMMU, provokes=r"nvme|pcieport|pciehp")
def pci_hotplug(bench):
    """A controller that is unplugged and plugged in again is reported by the kernel's messages."""
    address = function_of(bench.guest, serial(2))
    job = bench.guest.spawn(f"registers --watch {address}")
    job.expect("^watching")
    bench.guest.qmp("device_del", id="nvme2")
    job.expect("^Remove 010802$", 30)
    bench.guest.until(f"[ ! -e /sys/bus/pci/devices/{address} ]")
    bench.guest.wait(lambda: gone(bench.guest, "nvme2"), 30, "end of the unplugged controller", poll=0.1)
    bench.guest.qmp("device_add", driver="nvme", id="nvme2", serial=serial(2), bus="port0")
    job.expect("^Add 010802$", 30)
    job.check()
    assert function_of(bench.guest, serial(2)) == address


def gone(guest, identifier):
    """Whether QEMU has no such device any more."""
    return all(one["name"] != identifier for one in guest.qmp("qom-list", path="/machine/peripheral"))


def block_of(bench, index):
    """The name of a controller's first disk, as soon as the kernel has it."""
    address = function_of(bench.guest, serial(index))
    return bench.guest.until(f"cd /sys/bus/pci/devices/{address}/nvme/nvme*/ && ls -d nvme*n1").strip()


@case("pci-iommufd", on=("ringbolt",), machine=IOMMUFD)
def pci_iommufd(bench):
    """A function bound to vfio-pci is opened through its own node and an iommufd, and through its group."""
    address, other = function_of(bench.guest, serial(0)), function_of(bench.guest, serial(1))
    with bound(bench, address, "vfio-pci"), bound(bench, other, "vfio-pci"):
        for way, name in (("iommufd", "VFIO (iommufd)"), ("", "VFIO (group)"), ("iommufd", "VFIO (iommufd)")):
            seen = registers(bench, address, way)
            check_registers(seen, 0)
            assert seen["backend"] == name and seen["interrupted"] == "true", seen
            assert "has it open" in seen["again"] and seen["dma"].endswith("translated"), seen
        check_registers(registers(bench, other, "iommufd"), 1)
        # A function without a node of its group is opened by its own.
        group = bench.guest.check(f"readlink /sys/bus/pci/devices/{address}/iommu_group").strip().rpartition("/")[2]
        bench.guest.check(f"mv /dev/vfio/{group} /dev/vfio/away")
        check_driver(bench, address)
        bench.guest.check(f"mv /dev/vfio/away /dev/vfio/{group}")
        node = bench.guest.check(f"ls /sys/bus/pci/devices/{address}/vfio-dev").strip()
        refused = bench.guest.run(f"exec 5<> /dev/vfio/devices/{node}; ringbolt nvme bind --undo {address} 5<&-")
        assert refused.rc == 1 and f"a program has it open (/dev/vfio/devices/{node}, process" in refused.out, refused


@case("pci-no-iommu", on=("ringbolt",), machine=NO_IOMMU)
def pci_no_iommu(bench):
    """Without an IOMMU, VFIO takes a function only when told that this is unsafe, and then it works."""
    address = function_of(bench.guest, serial(0))
    assert bench.guest.run(f"ringbolt nvme bind {address}").rc == 1
    bench.guest.check("echo Y > /sys/module/vfio/parameters/enable_unsafe_noiommu_mode")
    with bound(bench, address, "vfio-pci"):
        seen = registers(bench, address)
        check_registers(seen, 0)
        assert seen["backend"] == "VFIO without IOMMU" and seen["interrupted"] == "true", seen
        assert "has it open" in seen["again"], seen
        check_driver(bench, address)
        check_needs_hugepages(bench, address)
    bench.guest.check("echo N > /sys/module/vfio/parameters/enable_unsafe_noiommu_mode")
