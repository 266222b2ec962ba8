//! What the kernel tells of PCI functions.

use std::io;
use std::path::{Path, PathBuf};

use crate::{Address, PciError};

/// Class code of an NVM Express I/O controller: mass storage, non-volatile memory, NVMe.
pub const NVME_CLASS: u32 = 0x01_0802;

/// Where `/sys`, `/dev` and `/proc` are; a folder with a made-up machine in tests.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sysfs {
    root: PathBuf,
}

impl Default for Sysfs {
    fn default() -> Self {
        Sysfs::new("/")
    }
}

impl Sysfs {
    /// The machine below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Sysfs {
        Sysfs { root: root.into() }
    }

    /// A path below the root, given without its leading `/`.
    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.join(path)
    }

    /// The folder of a function.
    pub(crate) fn function(&self, address: Address) -> PathBuf {
        self.path(format!("sys/bus/pci/devices/{address}"))
    }
}

/// One function, as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Where it is.
    pub address: Address,
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Base class, subclass and programming interface, 24 bits.
    pub class: u32,
    /// Revision ID.
    pub revision: u8,
    /// The driver that it is bound to.
    pub driver: Option<String>,
    /// Its IOMMU group.
    pub iommu_group: Option<u32>,
    /// The memory node that it is closest to.
    pub numa_node: Option<u32>,
}

impl Info {
    /// Whether it is an NVMe controller.
    pub fn is_nvme(&self) -> bool {
        self.class == NVME_CLASS
    }
}

/// What a base address register decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// Memory.
    Memory,
    /// I/O ports.
    Ports,
}

/// One base address register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// 0 to 5.
    pub index: u8,
    /// What it decodes.
    pub kind: BarKind,
    /// How much of it.
    pub bytes: u64,
}

/// Every function, in the order of addresses.
pub fn enumerate(sysfs: &Sysfs) -> Result<Vec<Info>, PciError> {
    let folder = sysfs.path("sys/bus/pci/devices");
    let file_error = |error| PciError::File { path: folder.clone(), error };
    let entries = match std::fs::read_dir(&folder) {
        // A machine without PCI.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(file_error)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let name = entry.map_err(file_error)?.file_name();
        let Some(address) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        match info(sysfs, address) {
            // It was pulled out between the two looks.
            Err(PciError::NotFound(_)) => {}
            one => found.push(one?),
        }
    }
    found.sort_by_key(|info| info.address);
    Ok(found)
}

/// One function.
pub fn info(sysfs: &Sysfs, address: Address) -> Result<Info, PciError> {
    let folder = sysfs.function(address);
    let number = |name: &str, expected| {
        let path = folder.join(name);
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && !folder.exists() => {
                return Err(PciError::NotFound(address));
            }
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {
                return Err(PciError::NotFound(address));
            }
            text => text.map_err(|error| PciError::File { path: path.clone(), error })?,
        };
        let digits = text.trim().strip_prefix("0x");
        let value = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok());
        value.ok_or_else(|| content(path, &text, expected))
    };
    Ok(Info {
        address,
        vendor: number("vendor", "vendor ID")? as u16,
        device: number("device", "device ID")? as u16,
        class: number("class", "class code")? & 0xff_ffff,
        // Kernels before 4.10 do not show it.
        revision: number("revision", "revision").unwrap_or(0) as u8,
        driver: link_name(&folder.join("driver")),
        iommu_group: link_name(&folder.join("iommu_group")).and_then(|name| name.parse().ok()),
        // -1 where the firmware does not say.
        numa_node: read(&folder.join("numa_node")).and_then(|text| text.parse().ok()),
    })
}

/// The base address registers that decode something, from the function's `resource` file.
pub fn bars(sysfs: &Sysfs, address: Address) -> Result<Vec<Bar>, PciError> {
    let path = sysfs.function(address).join("resource");
    let text =
        std::fs::read_to_string(&path).map_err(|error| PciError::File { path: path.clone(), error })?;
    let lines = text.lines().take(6).enumerate();
    let all: Option<Vec<Option<Bar>>> = lines.map(|(index, line)| bar(index as u8, line)).collect();
    all.map(|all| all.into_iter().flatten().collect()).ok_or_else(|| content(path, &text, "list of BARs"))
}

/// One line of `resource`: first and last address and the kernel's flags. `None` if it is none.
fn bar(index: u8, line: &str) -> Option<Option<Bar>> {
    // The kernel's IORESOURCE_IO and IORESOURCE_MEM.
    const PORTS: u64 = 0x100;
    const MEMORY: u64 = 0x200;
    let mut numbers = line
        .split_ascii_whitespace()
        .map(|word| word.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok()));
    let (first, last, flags) = (numbers.next()??, numbers.next()??, numbers.next()??);
    let kind = match flags & (PORTS | MEMORY) {
        PORTS => BarKind::Ports,
        MEMORY => BarKind::Memory,
        _ => return Some(None),
    };
    // A BAR that was given no address is 0 to 0, or last before first.
    let bytes = last.checked_sub(first).and_then(|less| less.checked_add(1)).unwrap_or(0);
    Some((first != 0 && bytes > 0).then_some(Bar { index, kind, bytes }))
}

/// The last part of what a link points to.
pub(crate) fn link_name(path: &Path) -> Option<String> {
    std::fs::read_link(path).ok()?.file_name()?.to_str().map(str::to_string)
}

/// A file's text without the line's end; `None` if it cannot be read.
pub(crate) fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_string())
}

fn content(path: PathBuf, text: &str, expected: &'static str) -> PciError {
    PciError::Content { path, text: text.trim().chars().take(64).collect(), expected }
}

#[cfg(test)]
pub(crate) mod tests;
