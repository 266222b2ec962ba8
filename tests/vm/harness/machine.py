"""Guests with hardware of their own: NVMe controllers, an IOMMU, hugepages, and our programs inside.

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
QEMU = "qemu-system-x86_64"
PLUGIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "plugin")
# Beside the binary that RINGBOLT names, and the packages that `cargo build -p PACKAGE --example NAME` makes them of.
EXAMPLES = {"registers": "ringbolt-pci", "blocks": "ringbolt-nvme", "exercise": "ringbolt-nvme"}


@dataclass(frozen=True)
class Namespace:
    """One more namespace of an emulated controller, of 16 MiB."""

    block_size: int = 512
    options: str = ""  # more of QEMU's options, such as ms=8,pi=1 or zoned=true


@dataclass(frozen=True)
class Nvme:
    """An emulated NVMe controller with one namespace, or with none (`mib` 0); with `port`, behind a port of
    that name, where it can be plugged and unplugged."""

    mib: int = 64
    block_size: int = 512
    port: str = ""
    options: str = ""  # more of QEMU's options for the controller, such as max_ioqpairs=4
    more: tuple = ()  # namespaces besides the first, from number 2


@dataclass(frozen=True)
class Machine:
    """What a guest has besides what every guest has."""

    nvme: tuple = ()
    iommu: bool = False
    hugepages: int = 0  # of 2 MiB
    counted: bool = False  # `Guest.counted` tells how many instructions the guest has executed
    vfio: bool = False  # a kernel whose VFIO has iommufd and the no-IOMMU mode: see `modules`

    def command_line(self):
        """The kernel's."""
        words = ["intel_iommu=on"] * self.iommu + [f"hugepages={self.hugepages}"] * bool(self.hugepages)
        return " ".join(words)

    def arguments(self, folder):
        """QEMU's, with the backing files in `folder`."""
        arguments = ["-device", "intel-iommu,intremap=on,caching-mode=on"] * self.iommu
        if self.counted:
            # The plugin's interface is version 1; that of QEMU 9 and later is another.
            if int(subprocess.check_output([QEMU, "--version"], text=True).split("version ")[1].split(".")[0]) > 8:
                raise Unavailable("this QEMU takes no plugin of version 1, which counts instructions")
            arguments += ["-plugin", compiled(folder, "count", "-fPIC", "-shared")]
        for index, nvme in enumerate(self.nvme):
            controller = f"nvme,id=nvme{index},serial={serial(index)}"
            if nvme.more:  # of a subsystem, without which namespaces cannot be attached and detached
                arguments += ["-device", f"nvme-subsys,id=subsystem{index},nqn=subsystem{index}"]
                controller += f",subsys=subsystem{index}"
            if nvme.port:
                arguments += ["-device", f"pcie-root-port,id={nvme.port},chassis={index + 1},slot={index + 1}"]
                controller += f",bus={nvme.port}"
            arguments += ["-device", f"{controller},{nvme.options}".rstrip(",")]
            if nvme.mib:
                first = f"{folder}/nvme{index}.raw"
                arguments += namespace(first, nvme.mib, index, 1, nvme.block_size)
            for nsid, more in enumerate(nvme.more, 2):
                path = f"{folder}/nvme{index}n{nsid}.raw"
                arguments += namespace(path, 16, index, nsid, more.block_size, more.options)
        return arguments


def namespace(path, mib, controller, nsid, block_size, options=""):
    """QEMU's arguments for a namespace over a file that is made here."""
    with open(path, "wb") as file:
        file.truncate(mib * MIB)
    blocks = f"logical_block_size={block_size},physical_block_size={block_size}"
    node = f"disk{controller}n{nsid}"
    return [
        *("-blockdev", f"driver=file,filename={path},node-name={node},discard=unmap"),
        *("-device", f"nvme-ns,bus=nvme{controller},drive={node},nsid={nsid},{blocks},{options}".rstrip(",")),
    ]


def serial(index):
    """The serial number of a machine's controller."""
    return f"RBPCI{index}"


def programs(folder):
    """{path in the guest: path here} of our programs, without what only a debugger reads."""
    binary = os.environ.get("RINGBOLT")
    found = {"usr/bin/ringbolt": binary}
    for name, package in EXAMPLES.items():
        path = os.path.join(os.path.dirname(binary), "examples", name)
        if not os.path.exists(path):
            raise Unavailable(f"{path} is not there: cargo build -p {package} --example {name}")
        found[f"usr/bin/{name}"] = path
    strip = shutil.which("strip")
    if not strip:
        raise Unavailable("strip is not here: apt install binutils")
    for where, path in found.items():
        found[where] = f"{folder}/{os.path.basename(where)}"
        subprocess.run([strip, "-o", found[where], path], check=True)
    return found


def compiled(folder, name, *options):
    """What the C compiler makes of a file of `plugin/`."""
    if not shutil.which("cc"):
        raise Unavailable("cc is not here: apt install gcc libc6-dev")
    made = f"{folder}/{name}"
    subprocess.run(["cc", "-O2", *options, "-o", made, f"{PLUGIN}/{name}.c"], check=True)
    return made


def functions(guest):
    """The PCI addresses of the guest's NVMe controllers, in order."""
    of_class = 'for f in /sys/bus/pci/devices/*; do [ "$(cat $f/class)" = 0x010802 ] && echo ${f##*/}; done; true'
    return guest.check(of_class).split()


def function_of(guest, serial_number):
    """The PCI address of a controller that the kernel's driver has, by its serial number."""
    own = "for c in /sys/class/nvme/nvme*; do read -r s < $c/serial; "
    return guest.until(own + f'[ "$s" = {serial_number} ] && cat $c/address && return 0; done; return 1').strip()


def driver_of(guest, address):
    """The driver of a function, or an empty text."""
    return guest.check(f"readlink /sys/bus/pci/devices/{address}/driver; true").strip().rpartition("/")[2]


@contextlib.contextmanager
def bound(bench, address, driver, options=""):
    """Binds a function to a driver with `ringbolt nvme bind`, and gives it back at the end; -> what it said."""
    out = bench.guest.check(f"ringbolt nvme bind {address} --driver {driver} --json {options}", 60)
    assert driver_of(bench.guest, address) == driver, out
    yield json.loads(out)
    bench.guest.check(f"ringbolt nvme bind --undo {address}", 60)
    assert driver_of(bench.guest, address) == "nvme"
