//! PCI functions and their attributes in sysfs.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::{PciAddress, PciError};

/// Class code of an NVM Express I/O controller: mass storage, non-volatile memory, NVMe.
pub const NVME_CLASS: u32 = 0x01_0802;

/// The root of `/sys`, `/dev` and `/proc`; in tests a directory with a fake system.
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
    /// The system below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Sysfs {
        Sysfs { root: root.into() }
    }

    /// A path below the root; `path` has no leading `/`.
    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.join(path)
    }

    /// The sysfs directory of a function.
    pub(crate) fn function(&self, address: PciAddress) -> PathBuf {
        self.path(format!("sys/bus/pci/devices/{address}"))
    }
}

/// The attributes of a PCI function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciFunctionInfo {
    /// The address of the function.
    pub address: PciAddress,
    /// Vendor ID (configuration space offset 0).
    pub vendor: u16,
    /// Device ID (configuration space offset 2).
    pub device: u16,
    /// Base class, subclass and programming interface, 24 bits.
    pub class: u32,
    /// Revision ID.
    pub revision: u8,
    /// The bound driver, if any.
    pub driver: Option<String>,
    /// The IOMMU group, if any.
    pub iommu_group: Option<u32>,
    /// The closest NUMA node; `None` if the firmware does not report it.
    pub numa_node: Option<u32>,
}

impl PciFunctionInfo {
    /// Whether it is an NVMe controller.
    pub fn is_nvme(&self) -> bool {
        self.class == NVME_CLASS
    }
}

/// The address space of a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// Memory space.
    Memory,
    /// I/O port space.
    Ports,
}

/// A base address register (BAR).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciBar {
    /// Index, 0 to 5.
    pub index: u8,
    /// The address space.
    pub kind: BarKind,
    /// Size in bytes.
    pub bytes: u64,
}

/// Lists all functions, in order of address.
pub fn enumerate(sysfs: &Sysfs) -> Result<Vec<PciFunctionInfo>, PciError> {
    let directory = sysfs.path("sys/bus/pci/devices");
    let file_error = |error| PciError::File { path: directory.clone(), error };
    let entries = match std::fs::read_dir(&directory) {
        // A system without PCI.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(file_error)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let name = entry.map_err(file_error)?.file_name();
        let Some(address) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        match function_info(sysfs, address) {
            // Removed since the directory was read.
            Err(PciError::NotFound(_)) => {}
            one => found.push(one?),
        }
    }
    found.sort_by_key(|info| info.address);
    Ok(found)
}

/// Reads the attributes of one function.
pub fn function_info(sysfs: &Sysfs, address: PciAddress) -> Result<PciFunctionInfo, PciError> {
    let directory = sysfs.function(address);
    let number = |name: &str, expected| {
        let path = directory.join(name);
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && !directory.exists() => {
                return Err(PciError::NotFound(address));
            }
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {
                return Err(PciError::NotFound(address));
            }
            text => text.map_err(|error| PciError::File { path: path.clone(), error })?,
        };
        let value = hexadecimal(text.trim()).and_then(|value| u32::try_from(value).ok());
        value.ok_or_else(|| content_error(path, &text, expected))
    };
    Ok(PciFunctionInfo {
        address,
        vendor: number("vendor", "vendor ID")? as u16,
        device: number("device", "device ID")? as u16,
        class: number("class", "class code")? & 0xff_ffff,
        // Kernels before 4.10 do not have this file.
        revision: number("revision", "revision").unwrap_or(0) as u8,
        driver: link_name(&directory.join("driver")),
        iommu_group: link_name(&directory.join("iommu_group")).and_then(|name| name.parse().ok()),
        // -1 if the firmware does not report it.
        numa_node: read(&directory.join("numa_node")).and_then(|text| text.parse().ok()),
    })
}

/// The BARs that have an address, from the function's `resource` file.
pub fn bars(sysfs: &Sysfs, address: PciAddress) -> Result<Vec<PciBar>, PciError> {
    let path = sysfs.function(address).join("resource");
    let text =
        std::fs::read_to_string(&path).map_err(|error| PciError::File { path: path.clone(), error })?;
    let lines = text.lines().take(6).enumerate();
    let all: Option<Vec<Option<PciBar>>> = lines.map(|(index, line)| bar(index as u8, line)).collect();
    all.map(|all| all.into_iter().flatten().collect())
        .ok_or_else(|| content_error(path, &text, "list of BARs"))
}

/// Whether user space may own a function: a VFIO or UIO driver is bound to it.
pub fn is_for_user_space(info: &PciFunctionInfo) -> bool {
    matches!(info.driver.as_deref(), Some("vfio-pci" | "uio_pci_generic" | "igb_uio"))
}

/// The configuration space of a function: 256 or 4,096 bytes, or the first 64 without privileges.
pub fn config_space(sysfs: &Sysfs, address: PciAddress) -> Result<Vec<u8>, PciError> {
    const BYTES_MAX: u64 = 4096;
    let path = sysfs.function(address).join("config");
    let mut bytes = Vec::new();
    let read = File::open(&path).and_then(|file| file.take(BYTES_MAX).read_to_end(&mut bytes));
    match read {
        Ok(_) => Ok(bytes),
        Err(_) if !sysfs.function(address).exists() => Err(PciError::NotFound(address)),
        Err(error) => Err(PciError::File { path, error }),
    }
}

/// Parses a line of `resource`: first address, last address and flags. `None` if it is invalid, `Some(None)` if the
/// BAR has no address.
fn bar(index: u8, line: &str) -> Option<Option<PciBar>> {
    // The kernel's IORESOURCE_IO and IORESOURCE_MEM.
    const PORTS: u64 = 0x100;
    const MEMORY: u64 = 0x200;
    let mut numbers = line.split_ascii_whitespace().map(hexadecimal);
    let (first, last, flags) = (numbers.next()??, numbers.next()??, numbers.next()??);
    let kind = match flags & (PORTS | MEMORY) {
        PORTS => BarKind::Ports,
        MEMORY => BarKind::Memory,
        _ => return Some(None),
    };
    // A BAR without an address is 0 to 0, or its last address is below the first.
    let bytes = last.checked_sub(first).and_then(|less| less.checked_add(1)).unwrap_or(0);
    Some((first != 0 && bytes > 0).then_some(PciBar { index, kind, bytes }))
}

/// Parses a number as sysfs writes it: hexadecimal digits after `0x`.
pub(crate) fn hexadecimal(word: &str) -> Option<u64> {
    u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()
}

/// The file name of a symbolic link's target.
pub(crate) fn link_name(path: &Path) -> Option<String> {
    std::fs::read_link(path).ok()?.file_name()?.to_str().map(str::to_string)
}

/// A file's text without surrounding white space; `None` if it cannot be read.
pub(crate) fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_string())
}

fn content_error(path: PathBuf, text: &str, expected: &'static str) -> PciError {
    PciError::Content { path, text: text.trim().chars().take(64).collect(), expected }
}

#[cfg(test)]
pub(crate) mod tests;
