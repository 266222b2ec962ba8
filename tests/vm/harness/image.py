"""Builds the guest's kernel and initramfs from packages: no root, no chroot, nothing installed.

The initramfs contains busybox, the programs of `PROGRAMS` with their libraries, the modules of
`MODULES` in load order, and the two scripts of `guest/`.
"""

import fcntl
import glob
import hashlib
import json
import lzma
import os
import re
import shutil
import stat
import struct
import subprocess
import zlib

from . import Unavailable, elf, modules
from .apt import NEXT_RELEASES, Archive, os_release

HERE = os.path.dirname(os.path.abspath(__file__))
GUEST = os.path.join(os.path.dirname(HERE), "guest")

PACKAGES = ["busybox-static", "dash", "nvme-cli", "fio", "e2fsprogs", "util-linux", "coreutils", "diffutils",
            "open-iscsi", "dmsetup", "sg3-utils", "nbd-client"]
# Program in the guest -> its name in the packages. All others are applets of busybox.
PROGRAMS = {
    "sh": "dash",  # unlike busybox's shell, it prefers the programs below over busybox applets
    "nvme": "nvme",
    "fio": "fio",
    "mkfs.ext4": "mke2fs",
    "fsck.ext4": "e2fsck",
    "blkdiscard": "blkdiscard",
    "lsblk": "lsblk",
    "dd": "dd",
    "cmp": "cmp",  # busybox compares byte by byte: slow under emulation
    "stat": "stat",
    "chroot": "chroot",
    "setpriv": "setpriv",
    "iscsid": "iscsid",
    "iscsiadm": "iscsiadm",
    "dmsetup": "dmsetup",
    "sg_persist": "sg_persist",
    "sg_raw": "sg_raw",
    "sg_rtpg": "sg_rtpg",
    "sg_reset": "sg_reset",
    "nbd-client": "nbd-client",
}
FILES = ["etc/mke2fs.conf"]
LIBRARIES = ["libgcc_s.so.1"]  # loaded by pthread_exit with dlopen
MODULES = ["virtio_pci", "virtio_console", "virtio_net", "nvme-tcp", "nvmet-tcp", "ext4"]
# Requested at run time through modprobe, which the guest lacks; built into newer kernels. Those after
# the first three are for guests with PCI functions to bind.
OPTIONAL_MODULES = ["crc32c_generic", "crc32c-intel", "configfs", "nvme", "vfio-pci"]
OPTIONAL_MODULES += ["vfio_iommu_type1", "uio_pci_generic"]
# For the lab: a null block device, and every I/O scheduler.
OPTIONAL_MODULES += ["null_blk", "mq-deadline", "kyber-iosched", "bfq"]
# For disks of the NBD target.
OPTIONAL_MODULES += ["nbd"]
# For disks of the vhost-user target.
OPTIONAL_MODULES += ["virtio_blk", "virtio_scsi"]
# For disks of the iSCSI target.
OPTIONAL_MODULES += ["iscsi_tcp", "sd_mod", "sg", "scsi_dh_alua", "dm-multipath", "dm-round-robin"]
# For disks of the ublk target; kernels before 6.12 lack it.
OPTIONAL_MODULES += ["ublk_drv"]
# For atomic writes: a disk once `add_host` is written. Kernels before 6.11 ignore the parameter.
OPTIONAL_MODULES += ["scsi_debug"]
# A network card with scatter-gather: the virtio one has none on QEMU's user network.
OPTIONAL_MODULES += ["e1000e"]
# For persistent memory: a range of RAM that the kernel's command line names.
OPTIONAL_MODULES += ["nd_pmem", "nd_e820"]
# For TLS: the daemon of the handshakes, keys, and what the kernel requests for AES-GCM.
TLS_PACKAGES = ["ktls-utils", "keyutils"]
TLS_PROGRAMS = {"tlshd": "tlshd", "keyctl": "keyctl"}
TLS_MODULES = ["tls", "gcm", "ctr", "ghash-generic", "aesni-intel", "ghash-clmulni-intel"]
# For RDMA, over Ethernet in software: the verbs with their provider, and what makes the device.
TLS_PACKAGES += ["libibverbs1", "librdmacm1t64", "ibverbs-providers", "iproute2"]
TLS_PROGRAMS |= {"rdma": "rdma"}
TLS_MODULES += ["crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm", "nvme-rdma", "nvmet-rdma"]
# Loaded with dlopen, with their libraries: the verbs, and the provider, which a file of the folder names.
TLS_LIBRARIES = ["libibverbs.so.1", "librdmacm.so.1"]
VERBS_FOLDER, VERBS_PROVIDERS = "etc/libibverbs.d", ["rxe"]
PARAMETERS = {
    "null_blk": "nr_devices=1 gb=1 submit_queues=1 poll_queues=1",
    "nbd": "nbds_max=4",
    "scsi_debug": "add_host=0 dev_size_mb=16 atomic_wr=1",
}
KERNELS = {"debian": "linux-image-amd64", "ubuntu": "linux-image-generic"}
# The first kernel whose iommufd works with all cases; older releases provide it as an additional package.
VFIO_KERNEL = "linux-image-6.12-amd64"
# ELF note with the entry point of a PVH kernel (include/xen/interface/elfnote.h).
PHYS32_ENTRY = 18
LIBRARY_FOLDER = "usr/lib/x86_64-linux-gnu"
HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:5a1f0c5e-7b1e-4d0a-9c55-0f2f6d1c7a01"
HOST_ID = "5a1f0c5e-7b1e-4d0a-9c55-0f2f6d1c7a01"


class Cpio:
    """Writes the "newc" archive that the kernel unpacks."""

    def __init__(self, file):
        self.file, self.inode, self.seen = file, 0, set()

    def _entry(self, path, mode, data=b"", device=(0, 0)):
        self.inode += 1
        name = path.encode() + b"\0"
        fields = [self.inode, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name), 0]
        header = b"070701" + b"".join(b"%08X" % field for field in fields) + name
        self.file.write(header + b"\0" * (-len(header) % 4))
        self.file.write(data)
        self.file.write(b"\0" * (-len(data) % 4))

    def _parents(self, path):
        parent = os.path.dirname(path)
        if parent and parent not in self.seen:
            self.folder(parent)

    def folder(self, path):
        if path not in self.seen:
            self._parents(path)
            self.seen.add(path)
            self._entry(path, stat.S_IFDIR | 0o755)

    def add(self, path, data, mode=0o644):
        self._parents(path)
        self.seen.add(path)
        self._entry(path, stat.S_IFREG | mode, data)

    def link(self, path, to):
        self._parents(path)
        self.seen.add(path)
        self._entry(path, stat.S_IFLNK | 0o777, to.encode())

    def character_device(self, path, major, minor):
        self._parents(path)
        self._entry(path, stat.S_IFCHR | 0o600, device=(major, minor))

    def close(self):
        self._entry("TRAILER!!!", 0)


def with_files(initramfs, files, path):
    """Appends files, {path in the guest: path on the host}, to an initramfs; the kernel unpacks both archives."""
    with open(path, "wb") as file:
        with open(initramfs, "rb") as first:
            shutil.copyfileobj(first, file)
        file.write(b"\0" * (-file.tell() % 4))
        archive = Cpio(file)
        for where, source in files.items():
            archive.add(where, read(source), 0o755)
        archive.close()


def read(path):
    with open(path, "rb") as file:
        return file.read()


def remove(path):
    """Removes a file or a folder if it exists."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.remove(path)


def find(tree, name, folders=("usr/bin", "usr/sbin", "bin", "sbin")):
    for folder in folders:
        path = os.path.join(tree, folder, name)
        if os.path.exists(path):
            return path
    raise Unavailable(f"the packages of this release do not contain {name}")


def library(tree, soname, index):
    """The file of a library; `index` (name -> path) is filled on first use."""
    if not index:
        for folder, _folders, files in os.walk(tree):
            if "/lib" in folder[len(tree) :]:
                index.update({f: os.path.join(folder, f) for f in files if ".so" in f})
    if soname not in index:
        raise Unavailable(f"the packages of this release do not contain {soname}")
    return index[soname]


def closure(tree, programs, extra=()):
    """-> (interpreter, {soname: path}) of all libraries that `programs` load."""
    index, found, interpreter = {}, {}, None
    todo = [read(program) for program in programs]
    names = list(extra)
    while todo or names:
        while todo:
            requested, sonames = elf.needed(todo.pop())
            interpreter = interpreter or requested
            names += sonames
        soname = names.pop()
        if soname not in found:
            found[soname] = os.path.realpath(library(tree, soname, index))
            todo.append(read(found[soname]))
    return interpreter, found


def verbs_provider(tree, name):
    """The library of a provider of libibverbs, whose name has the version of its interface."""
    found = glob.glob(f"{tree}/{LIBRARY_FOLDER}/libibverbs/lib{name}-rdmav*.so")
    if not found:
        raise Unavailable(f"the packages of this release do not contain libibverbs' provider {name}")
    return found[0]


def decompressed(data):
    """The data, decompressed if it is compressed."""
    if data.startswith(b"\xfd7zXZ"):
        return lzma.LZMADecompressor().decompress(data)
    if data.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(wbits=31).decompress(data)
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        if not shutil.which("zstd"):
            raise Unavailable("this kernel is compressed with zstd: apt install zstd")
        return subprocess.run(["zstd", "-dcq"], input=data, check=True, capture_output=True).stdout
    return data


def bootable(data):
    """The ELF kernel inside a bzImage, which QEMU boots directly (PVH): under emulation, decompression takes longer
    than the boot. The bzImage itself if the kernel does not support PVH."""
    # Documentation/arch/x86/boot.rst: setup_sects, payload_offset, payload_length.
    sectors = data[0x1F1] or 4
    offset, length = struct.unpack_from("<II", data, 0x248)
    payload = data[(sectors + 1) * 512 + offset :][:length]
    if not payload.startswith(b"\x1f\x8b"):
        payload = payload[:-4]  # without the trailing uncompressed size
    kernel = decompressed(payload)
    return kernel if kernel.startswith(b"\x7fELF") and elf.has_note(kernel, b"Xen\0", PHYS32_ENTRY) else data


def canonical_name(name):
    """The canonical name of a module: without suffix, and with _ for -."""
    return re.sub(r"\.ko(\.\w+)?$", "", os.path.basename(name)).replace("-", "_")


def load_order(wanted, paths, builtin, info_of):
    """Modules in load order: dependencies first."""
    order = []

    def visit(name, required):
        name = canonical_name(name)
        if name in order or name in builtin:
            return
        if name not in paths:
            if required:
                raise Unavailable(f"this kernel has no module {name}")
            return
        info = info_of(name)
        for value in info.get("softdep", []):
            before = re.search(r"pre:(.*?)(?:post:|$)", value)
            for soft in before[1].split() if before else []:
                visit(soft, False)
        for dependency in ",".join(info.get("depends", [])).split(","):
            if dependency:
                visit(dependency, True)
        order.append(name)

    for name, required in wanted:
        visit(name, required)
    return order


class Image:
    """A kernel and an initramfs, built once and cached; with `vfio`, a kernel with rebuilt VFIO modules (see
    `modules`), with `newest`, that of the backports to the next release. With `tls`, programs, and without `newest` the
    kernel, are those of the next release, the first that has what TLS requires."""

    def __init__(self, cache, release=None, refresh=False, vfio=False, newest=False, tls=False):
        self.names = PACKAGES + TLS_PACKAGES * tls
        self.sources = {**PROGRAMS, **(TLS_PROGRAMS if tls else {})}
        self.optional = OPTIONAL_MODULES + TLS_MODULES * tls
        self.providers = VERBS_PROVIDERS * tls
        self.libraries = LIBRARIES + TLS_LIBRARIES * tls
        if tls and release is None:
            release = NEXT_RELEASES.get(os_release()[0])
        parts = [self.names, self.sources, FILES, MODULES, self.optional, PARAMETERS, self.libraries]
        recipe = hashlib.sha256(repr(parts).encode())
        for path in sorted(glob.glob(GUEST + "/*")) + [f"{HERE}/{name}.py" for name in ("image", "elf", "modules")]:
            recipe.update(read(path))
        self.vfio, self.newest = vfio, newest
        self.folder = f"{cache}/{release or 'own'}{'-vfio' * vfio}{'-newest' * newest}{'-tls' * tls}"
        os.makedirs(self.folder, exist_ok=True)
        with open(f"{self.folder}/lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._make(recipe.hexdigest(), release, refresh)

    def _make(self, recipe, release, refresh):
        """Downloads and builds what is not cached."""
        self.kernel = f"{self.folder}/vmlinuz"
        self.initramfs = f"{self.folder}/initramfs"
        self.programs = f"{self.folder}/programs-{hashlib.sha256(repr(self.names).encode()).hexdigest()[:8]}"
        made = f"{self.folder}/made.json"
        if refresh:
            for path in [made, f"{self.folder}/kernel", *glob.glob(f"{self.folder}/programs-*")]:
                remove(path)
        if os.path.exists(made):
            with open(made, encoding="utf-8") as file:
                self.made = json.load(file)
            if self.made["recipe"] == recipe:
                return
            remove(made)
        self.packages = Archive(f"{self.folder}/apt", release)
        self._fetch()
        version = self._build()
        self.made = {"recipe": recipe, "kernel": version}
        with open(made + ".new", "w", encoding="utf-8") as file:
            json.dump(self.made, file)
        os.rename(made + ".new", made)

    def _fetch(self):
        programs, kernel = self.programs, f"{self.folder}/kernel"
        if not os.path.exists(programs) or not os.path.exists(kernel):
            self.packages.update()
        if not os.path.exists(programs):
            for older in glob.glob(f"{self.folder}/programs-*"):
                remove(older)
            self.packages.unpack(self.packages.closure(self.names), programs)
        if not os.path.exists(kernel):
            packages = Archive.backports(f"{self.folder}/apt-kernel") if self.newest else self.packages
            if self.newest:
                packages.update()
            todo, names = [KERNELS.get(self.packages.distribution, KERNELS["debian"])], []
            if self.vfio:
                todo = [VFIO_KERNEL]
            while todo:
                wanted = r"linux-(base|image|binary|modules|modules-extra)-\d"
                more = [n for n in packages.depends(todo.pop()) if re.match(wanted, n) and n not in names]
                todo, names = todo + more, names + more
            if not names:
                raise Unavailable("this release's kernel package depends on no image package")
            packages.unpack(names, kernel)

    def _build(self):
        """Writes the kernel and the initramfs; -> the kernel's version."""
        tree, kernel = self.programs, f"{self.folder}/kernel"
        folders = glob.glob(f"{kernel}/lib/modules/*") + glob.glob(f"{kernel}/usr/lib/modules/*")
        images = glob.glob(f"{kernel}/boot/vmlinuz-*") + [f"{folder}/vmlinuz" for folder in folders]
        images = [image for image in images if os.path.exists(image)]
        if not folders or not images:
            raise Unavailable("this release's kernel package contains no kernel")
        with open(self.kernel, "wb") as file:
            file.write(bootable(read(images[0])))
        programs = {name: find(tree, source) for name, source in self.sources.items()}
        providers = {name: verbs_provider(tree, name) for name in self.providers}
        interpreter, libraries = closure(tree, [*programs.values(), *providers.values()], self.libraries)
        with open(self.initramfs + ".new", "wb") as file:
            archive = Cpio(file)
            for path in ("dev", "proc", "sys", "tmp", "run", "root", "mnt", "var", "usr/lib", "usr/lib64"):
                archive.folder(path)
            for path, to in {"bin": "usr/bin", "sbin": "usr/bin", "usr/sbin": "bin"}.items():
                archive.link(path, to)
            archive.link("lib", "usr/lib")
            archive.link("lib64", "usr/lib64")
            archive.character_device("dev/console", 5, 1)
            archive.character_device("dev/null", 1, 3)
            archive.add("usr/bin/busybox", read(find(tree, "busybox")), 0o755)
            for name, path in programs.items():
                archive.add(f"usr/bin/{name}", read(path), 0o755)
            for soname, path in libraries.items():
                if soname != os.path.basename(interpreter):
                    archive.add(f"{LIBRARY_FOLDER}/{soname}", read(path), 0o755)
            for name, path in providers.items():
                archive.add(f"{LIBRARY_FOLDER}/libibverbs/{os.path.basename(path)}", read(path), 0o755)
                archive.add(f"{VERBS_FOLDER}/{name}.driver", f"driver {name}\n".encode())
            loader = os.path.basename(interpreter)
            archive.add(f"usr/lib64/{loader}", read(os.path.realpath(library(tree, loader, {}))), 0o755)
            for name in FILES:
                archive.add(name, read(os.path.join(tree, name)))
            archive.add("etc/nvme/hostnqn", HOST_NQN.encode() + b"\n")
            archive.add("etc/nvme/hostid", HOST_ID.encode() + b"\n")
            archive.add("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n")
            archive.add("init", read(f"{GUEST}/init"), 0o755)
            archive.add("usr/bin/agent", read(f"{GUEST}/agent"), 0o755)
            self._modules(archive, folders[0], self._rebuilt(os.path.basename(folders[0])))
            archive.close()
        os.rename(self.initramfs + ".new", self.initramfs)
        return os.path.basename(folders[0])

    def _rebuilt(self, version):
        """Rebuilt modules that replace those of the kernel package."""
        if not self.vfio:
            return []
        tree = f"{self.folder}/headers"
        if not os.path.exists(f"{tree}/usr/src/linux-headers-{version}"):
            remove(tree)
            self.packages.unpack(modules.packages(version), tree)
        return modules.build(tree, version, f"{self.folder}/rebuilt-{version}")

    def _modules(self, archive, folder, rebuilt):
        paths = {}
        for path in glob.glob(f"{folder}/kernel/**/*.ko*", recursive=True):
            paths[canonical_name(path)] = path
        paths.update((canonical_name(path), path) for path in rebuilt)
        with open(f"{folder}/modules.builtin", encoding="utf-8") as file:
            builtin = {canonical_name(line.strip()) for line in file}
        data = {}

        def info_of(name):
            data[name] = decompressed(read(paths[name]))
            return elf.module_info(data[name])

        wanted = [(n, False) for n in self.optional] + [(n, True) for n in MODULES]
        order = load_order(wanted, paths, builtin, info_of)
        for name in order:
            archive.add(f"modules/{name}.ko", data[name])
        archive.add("etc/modules", "".join(f"{name}.ko {PARAMETERS.get(name, '')}\n" for name in order).encode())
