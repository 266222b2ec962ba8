"""Rebuilds the VFIO modules with options that the distribution lacks: device nodes, iommufd, no-IOMMU mode.

The modules are compiled from the headers and the source package of the guest's kernel version. This takes
about half a minute; the result is cached.
"""

import glob
import os
import re
import shutil
import subprocess

from . import Unavailable

# The missing options, for make and for the compiler.
OPTIONS = {"CONFIG_IOMMUFD": "m", "CONFIG_VFIO_DEVICE_CDEV": "y", "CONFIG_VFIO_NOIOMMU": "y"}
DEFINITIONS = ["CONFIG_IOMMUFD_MODULE", "CONFIG_INTERVAL_TREE_SPAN_ITER", "CONFIG_VFIO_DEVICE_CDEV", "CONFIG_VFIO_NOIOMMU"]
# Options of these folders that are not needed.
LEFT_OUT = ["CONFIG_IOMMUFD_DRIVER", "CONFIG_VFIO_DEBUGFS", "CONFIG_VFIO_MDEV", "CONFIG_VFIO_PLATFORM_BASE"]
LEFT_OUT += ["CONFIG_DEBUG_INFO_BTF_MODULES"]
SOURCES = ["drivers/vfio", "drivers/iommu/iommufd", "drivers/iommu/iommu-priv.h", "lib/interval_tree.c"]


def packages(version):
    """The packages for building modules of kernel `version`, such as 6.12.117+deb12-amd64."""
    found = re.fullmatch(r"((\d+\.\d+)\.\d+\S*)-amd64", version)
    if not found:
        raise Unavailable(f"the header packages of kernel {version} are unknown")
    headers = [f"linux-headers-{version}", f"linux-headers-{found[1]}-common", f"linux-kbuild-{found[1]}"]
    return [*headers, f"linux-source-{found[2]}"]


def build(tree, version, work):
    """Builds the modules from the unpacked packages in `tree`; -> their files."""
    made = f"{work}/made"
    if not os.path.exists(made):
        for tool in ("make", "tar", "xz"):
            if not shutil.which(tool):
                raise Unavailable(f"{tool} is not installed, which rebuilding VFIO requires")
        shutil.rmtree(work, ignore_errors=True)
        os.makedirs(work)
        headers = _headers(tree, version)
        _extract(tree, work)
        _make(headers, work)
        with open(made, "w", encoding="utf-8"):
            pass
    return glob.glob(f"{work}/modules/**/*.ko", recursive=True)


def _headers(tree, version):
    """The headers' folder, with its Makefile pointing to the common headers."""
    headers = f"{tree}/usr/src/linux-headers-{version}"
    common = f"{tree}/usr/src/linux-headers-{version.removesuffix('-amd64')}-common"
    with open(f"{headers}/Makefile", "w", encoding="utf-8") as file:
        file.write(f"include {common}/Makefile\n")
    return headers


def _extract(tree, work):
    archives = glob.glob(f"{tree}/usr/src/linux-source-*.tar.xz")
    if not archives:
        raise Unavailable("the source package contains no source archive")
    root = os.path.basename(archives[0]).removesuffix(".tar.xz")
    wanted = [f"{root}/{path}" for path in SOURCES]
    run = subprocess.run(["tar", "-xf", archives[0], "-C", work, *wanted], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise Unavailable(f"the kernel's source lacks a required file: {run.stderr.strip()[-200:]}")
    source, modules = f"{work}/{root}", f"{work}/modules"
    os.makedirs(modules)
    shutil.copytree(f"{source}/drivers/vfio", f"{modules}/vfio")
    shutil.copytree(f"{source}/drivers/iommu/iommufd", f"{modules}/iommufd")
    shutil.copy(f"{source}/drivers/iommu/iommu-priv.h", modules)
    # The kernel builds this file without the span iterator, which iommufd uses.
    with open(f"{source}/lib/interval_tree.c", encoding="utf-8") as file:
        text = file.read()
    with open(f"{modules}/iommufd/span.c", "w", encoding="utf-8") as file:
        file.write(re.sub(r"^EXPORT_SYMBOL_GPL\(.*\);$", "", text, flags=re.M))
    with open(f"{modules}/iommufd/Makefile", "a", encoding="utf-8") as file:
        file.write("iommufd-y += span.o\n")
    with open(f"{modules}/Makefile", "w", encoding="utf-8") as file:
        file.write("subdir-ccflags-y += " + " ".join(f"-D{name}=1" for name in DEFINITIONS) + "\n")
        file.write("obj-m += iommufd/ vfio/\n")


def _make(headers, work):
    with open(f"{headers}/.config", encoding="utf-8") as file:
        version = re.search(r"^CONFIG_GCC_VERSION=(\d+)0000", file.read(), re.M)
    candidates = [f"gcc-{int(version[1])}"] if version else []
    compiler = next((name for name in [*candidates, "gcc"] if shutil.which(name)), None)
    if not compiler:
        raise Unavailable("gcc is not installed, which rebuilding VFIO requires")
    options = [f"{name}={value}" for name, value in OPTIONS.items()] + [f"{name}=" for name in LEFT_OUT]
    command = ["make", "-s", "-C", headers, f"M={os.path.abspath(work)}/modules", f"CC={compiler}", *options, "modules"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise Unavailable(f"rebuilding VFIO failed: {(run.stderr or run.stdout).strip()[-300:]}")
