"""Guests with additional hardware (NVMe controllers, an IOMMU, hugepages) and our programs inside.

    MACHINE = Machine(nvme=(Nvme(), Nvme(block_size=4096)), iommu=True, hugepages=16)

    @case("example", on=("ringbolt",), machine=MACHINE)
    def example(bench):
        address = functions(bench.guest)[0]
        with bound(bench, address, "vfio-pci"):
            bench.guest.check(f"registers {address}")
"""

import contextlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass

from . import Unavailable

MIB = 1 << 20
# Where persistent memory begins: above the kernel, and below the initramfs, which is at the end of the memory.
PMEM_AT_MIB = 384
QEMU = "qemu-system-x86_64"
PLUGIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "plugin")
# Example -> its package, for `cargo build -p PACKAGE --example NAME`; expected in examples/ beside the RINGBOLT binary.
EXAMPLES = {"registers": "ringbolt-pci", "blocks": "ringbolt-nvme", "exercise": "ringbolt-nvme"}


@dataclass(frozen=True)
class Namespace:
    """An additional namespace of an emulated controller, of 16 MiB."""

    block_size: int = 512
    options: str = ""  # further QEMU options, such as ms=8,pi=1 or zoned=true


@dataclass(frozen=True)
class Nvme:
    """An emulated NVMe controller with one namespace, or none if `mib` is 0. With `port`, it is behind a
    hot-pluggable root port of that name."""

    mib: int = 64
    block_size: int = 512
    port: str = ""
    options: str = ""  # further QEMU options of the controller, such as max_ioqpairs=4
    more: tuple = ()  # further namespaces, from NSID 2


@dataclass(frozen=True)
class Machine:
    """The additional hardware of a guest."""

    nvme: tuple = ()
    iommu: bool = False
    hugepages: int = 0  # number of 2 MiB pages
    pmem_mib: int = 0  # of the memory, from `PMEM_AT_MIB` on, as persistent memory: /dev/pmem0
    counted: bool = False  # enables `Guest.counted`, the count of executed instructions
    tls: bool = False  # kernel and programs of the next release, with those that TLS requires
    newest: bool = False  # the newest kernel that the distribution's packages have, in the backports to its next release
    nic: str = "virtio-net-pci"  # QEMU's device of the network card
    vfio: bool = False  # a kernel whose VFIO has iommufd and the no-IOMMU mode: see `modules`

    def command_line(self):
        """The additional kernel command line."""
        words = ["intel_iommu=on"] * self.iommu + [f"hugepages={self.hugepages}"] * bool(self.hugepages)
        words += [f"memmap={self.pmem_mib}M!{PMEM_AT_MIB}M"] * bool(self.pmem_mib)
        return " ".join(words)

    def arguments(self, folder):
        """The additional arguments of QEMU; creates the backing files in `folder`."""
        # Newer QEMUs have 48 bits, so that IOVAs may equal virtual addresses.
        arguments = ["-device", "intel-iommu,intremap=on,caching-mode=on,aw-bits=39"] * self.iommu
        if self.counted:
            # The plugin uses API version 1; QEMU 9 and later require another version.
            if int(subprocess.check_output([QEMU, "--version"], text=True).split("version ")[1].split(".")[0]) > 8:
                raise Unavailable("this QEMU does not support TCG plugins with API version 1, used to count instructions")
            arguments += ["-plugin", compiled(folder, "count", "-fPIC", "-shared")]
        for index, nvme in enumerate(self.nvme):
            controller = f"nvme,id=nvme{index},serial={serial(index)}"
            if nvme.more:  # namespace attachment requires a subsystem
                arguments += ["-device", f"nvme-subsys,id=subsystem{index},nqn=subsystem{index}"]
                controller += f",subsys=subsystem{index}"
            if nvme.port:
                arguments += ["-device", f"pcie-root-port,id={nvme.port},chassis={index + 1},slot={index + 1}"]
                controller += f",bus={nvme.port}"
            arguments += ["-device", f"{controller},{nvme.options}".rstrip(",")]
            if nvme.mib:
                first = f"{folder}/nvme{index}.raw"
                # QEMU does not release the medium of an unplugged controller.
                arguments += namespace(first, nvme.mib, index, 1, nvme.block_size, "share-rw=on" if nvme.port else "")
            for nsid, more in enumerate(nvme.more, 2):
                path = f"{folder}/nvme{index}n{nsid}.raw"
                arguments += namespace(path, 16, index, nsid, more.block_size, more.options)
        return arguments


def namespace(path, mib, controller, nsid, block_size, options=""):
    """QEMU's arguments for a namespace; creates its backing file."""
    with open(path, "wb") as file:
        file.truncate(mib * MIB)
    blocks = f"logical_block_size={block_size},physical_block_size={block_size}"
    node = f"disk{controller}n{nsid}"
    return [
        *("-blockdev", f"driver=file,filename={path},node-name={node},discard=unmap"),
        *("-device", f"nvme-ns,bus=nvme{controller},drive={node},nsid={nsid},{blocks},{options}".rstrip(",")),
    ]


def serial(index):
    """The serial number of the controller with this index."""
    return f"RBPCI{index}"


def programs(folder):
    """{path in the guest: path on the host} of our programs, stripped of debug information."""
    binary = os.environ.get("RINGBOLT")
    found = {"usr/bin/ringbolt": binary}
    for name, package in EXAMPLES.items():
        path = os.path.join(os.path.dirname(binary), "examples", name)
        if not os.path.exists(path):
            raise Unavailable(f"{path} does not exist: cargo build -p {package} --example {name}")
        found[f"usr/bin/{name}"] = path
    strip = shutil.which("strip")
    if not strip:
        raise Unavailable("strip is not installed: apt install binutils")
    for where, path in found.items():
        found[where] = f"{folder}/{os.path.basename(where)}"
        subprocess.run([strip, "-o", found[where], path], check=True)
    return found


def compiled(folder, name, *options):
    """Compiles a C file of `plugin/`; -> the path of the result."""
    if not shutil.which("cc"):
        raise Unavailable("cc is not installed: apt install gcc libc6-dev")
    made = f"{folder}/{name}"
    subprocess.run(["cc", "-O2", *options, "-o", made, f"{PLUGIN}/{name}.c"], check=True)
    return made


def functions(guest):
    """The PCI addresses of the guest's NVMe controllers, in ascending order."""
    of_class = 'for f in /sys/bus/pci/devices/*; do [ "$(cat $f/class)" = 0x010802 ] && echo ${f##*/}; done; true'
    return guest.check(of_class).split()


def function_of(guest, serial_number):
    """Waits for a controller bound to the kernel's driver, by serial number; -> its PCI address."""
    own = "for c in /sys/class/nvme/nvme*; do read -r s < $c/serial; "
    return guest.until(own + f'[ "$s" = {serial_number} ] && cat $c/address && return 0; done; return 1').strip()


def driver_of(guest, address):
    """The driver of a function, or an empty string."""
    return guest.check(f"readlink /sys/bus/pci/devices/{address}/driver; true").strip().rpartition("/")[2]


def is_removed(guest, index):
    """Whether QEMU has completed the removal of the controller with this index."""
    return all(one["name"] != f"nvme{index}" for one in guest.qmp("qom-list", path="/machine/peripheral"))


def unplug(guest, index):
    """Requests the orderly hot removal of a controller, which `is_removed` completes."""
    guest.qmp("device_del", id=f"nvme{index}")


def plug(guest, index):
    """Hot-adds a controller with its medium once its predecessor is removed."""
    guest.wait(lambda: is_removed(guest, index), 90, f"end of nvme{index}", poll=0.1)
    port, medium = guest.machine.nvme[index].port, {"drive": f"disk{index}n1", "share-rw": True}
    guest.qmp("device_add", driver="nvme", id=f"nvme{index}", serial=serial(index), bus=port, **medium)


@contextlib.contextmanager
def bound(bench, address, driver, options=""):
    """Context manager: binds a function to a driver with `ringbolt nvme bind`, and unbinds it; -> the JSON output."""
    out = bench.guest.check(f"ringbolt nvme bind {address} --driver {driver} --json {options}", 60)
    assert driver_of(bench.guest, address) == driver, out
    yield json.loads(out)
    bench.guest.check(f"ringbolt nvme bind --undo {address}", 60)
    assert driver_of(bench.guest, address) == "nvme"
