"""User-space PCI access and `ringbolt nvme bind`, inside the guest, on emulated NVMe controllers."""

import json

from harness.case import case
from harness.machine import bound, driver_of, function_of, functions, plug, serial, unplug

from .machines import IOMMU, IOMMUFD, NO_IOMMU, PLAIN


def registers(bench, address, way=""):
    """Runs the `registers` example on a function; -> its output by name."""
    out = bench.guest.check(f"registers {address} {way}", 60)
    return dict(line.split(" ", 1) for line in out.splitlines())


def check_registers(seen, index):
    """Checks that hold for every backend."""
    assert seen["present"] == seen["reset"] == "true", seen
    assert int(seen["cap"], 16) != 0 and int(seen["vs"], 16) >= 0x10200, seen
    # The controller fetched a command from our memory and wrote data and a completion.
    assert seen["status"] == "0x0" and seen["serial"] == serial(index), seen
    # Memory decoding on, bus mastering off.
    assert int(seen["command"], 16) & 6 == 2, seen


def check_driver(bench, address):
    """Our driver writes and verifies blocks on a bound function."""
    load = "--rw=randwrite --bs=4k --iodepth=16 --size=2m --verify=pattern"
    out = bench.guest.check(f"ringbolt perf --filename=nvme+pcie://{address}?ns=1 {load} 2>&1", 120)
    assert " 0 wrong" in out, out


def check_needs_hugepages(bench, address):
    """If devices use physical addresses, memory without hugepages is rejected with a hint."""
    bench.guest.check("echo 0 > /proc/sys/vm/nr_hugepages")
    refused = bench.guest.run(f"registers {address}", 60)
    bench.guest.check("echo 16 > /proc/sys/vm/nr_hugepages")
    assert refused.rc == 1 and "nr_hugepages" in refused.out, refused


@case("pci-vfio", on=("ringbolt",), machine=IOMMU)
def pci_vfio(bench):
    """A function bound to vfio-pci is opened through its group, performs DMA through the IOMMU and interrupts."""
    address = function_of(bench.guest, serial(1))
    with bound(bench, address, "vfio-pci"):
        for hugepages in (16, 0):  # memory with and without hugepages
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
    """If the locked memory limit is too low, the error says how to raise it."""
    address = function_of(bench.guest, serial(1))
    with bound(bench, address, "vfio-pci"):
        group = bench.guest.check(f"readlink /sys/bus/pci/devices/{address}/iommu_group").strip().rpartition("/")[2]
        # An unprivileged user with access to the group's node, and a limit of 64 KiB.
        bench.guest.check(f"chown 1000 /dev/vfio/{group}")
        result = bench.guest.run(f"ulimit -l 64; chroot --userspec=1000:1000 / registers {address}", 60)
        assert result.rc == 1 and "LimitMEMLOCK=infinity" in result.out and "64 KiB" in result.out, result
        check_registers_as_user = f"ulimit -l unlimited; chroot --userspec=1000:1000 / registers {address}"
        assert "status 0x0" in bench.guest.check(check_registers_as_user, 60)


@case("pci-uio", on=("ringbolt",), machine=PLAIN)
def pci_uio(bench):
    """A function bound to uio_pci_generic is opened through sysfs and performs DMA to hugepages."""
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
    """Without an IOMMU, binding to vfio-pci is rejected without any change."""
    address = function_of(bench.guest, serial(0))
    refused = bench.guest.run(f"ringbolt nvme bind {address}")
    assert refused.rc == 1 and "it is behind no IOMMU" in refused.out, refused
    assert driver_of(bench.guest, address) == "nvme"


@case("bind-and-back", on=("ringbolt",), machine=IOMMU)
def bind_and_back(bench):
    """Binding to vfio-pci and undoing it keeps data and restores drivers and hugepages."""
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
    # Undo is rejected while a program has the function open.
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
    """A disk in use (mounted, swap, held) is always rejected; on-disk signatures can be overridden."""
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
    # Also if it is mounted only in another mount namespace.
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
    # The other controllers are not in use: --all skips this one.
    done = json.loads(guest.check("ringbolt nvme bind --all --json", 60))
    assert done["applied"] and len(done["plan"]["changes"]) == 2, done
    assert driver_of(guest, address) == "nvme"
    guest.check("ringbolt nvme bind --undo", 60)
    guest.check(f"umount /mnt && dd if=/dev/zero of={device} bs=64k count=64 status=none conv=fsync")


@case("pci-hotplug", on=("ringbolt",), machine=IOMMU, provokes=r"nvme|pcieport|pciehp")
def pci_hotplug(bench):
    """Hot removal and hot add of a controller are reported through kernel uevents."""
    address = function_of(bench.guest, serial(2))
    job = bench.guest.spawn(f"registers --watch {address}")
    job.expect("^watching")
    unplug(bench.guest, 2)
    job.expect("^Remove 010802$", 30)
    bench.guest.until(f"[ ! -e /sys/bus/pci/devices/{address} ]")
    plug(bench.guest, 2)
    job.expect("^Add 010802$", 30)
    job.check()
    assert function_of(bench.guest, serial(2)) == address


def block_of(bench, index):
    """Waits for a controller's first disk; -> its name."""
    address = function_of(bench.guest, serial(index))
    return bench.guest.until(f"cd /sys/bus/pci/devices/{address}/nvme/nvme*/ && ls -d nvme*n1").strip()


@case("pci-iommufd", on=("ringbolt",), machine=IOMMUFD, seconds=15)
def pci_iommufd(bench):
    """A function bound to vfio-pci is opened through its device node with iommufd, and through its group."""
    address, other = function_of(bench.guest, serial(0)), function_of(bench.guest, serial(1))
    with bound(bench, address, "vfio-pci"), bound(bench, other, "vfio-pci"):
        for way, name in (("iommufd", "VFIO (iommufd)"), ("", "VFIO (group)"), ("iommufd", "VFIO (iommufd)")):
            seen = registers(bench, address, way)
            check_registers(seen, 0)
            assert seen["backend"] == name and seen["interrupted"] == "true", seen
            assert "has it open" in seen["again"] and seen["dma"].endswith("translated"), seen
        check_registers(registers(bench, other, "iommufd"), 1)
        # Without the node of its group, a function is opened through its device node.
        group = bench.guest.check(f"readlink /sys/bus/pci/devices/{address}/iommu_group").strip().rpartition("/")[2]
        bench.guest.check(f"mv /dev/vfio/{group} /dev/vfio/away")
        check_driver(bench, address)
        bench.guest.check(f"mv /dev/vfio/away /dev/vfio/{group}")
        node = bench.guest.check(f"ls /sys/bus/pci/devices/{address}/vfio-dev").strip()
        refused = bench.guest.run(f"exec 5<> /dev/vfio/devices/{node}; ringbolt nvme bind --undo {address} 5<&-")
        assert refused.rc == 1 and f"a program has it open (/dev/vfio/devices/{node}, process" in refused.out, refused


@case("pci-no-iommu", on=("ringbolt",), machine=NO_IOMMU)
def pci_no_iommu(bench):
    """Without an IOMMU, VFIO works only in its unsafe no-IOMMU mode."""
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
