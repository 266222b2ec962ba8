//! Errors of PCI functions.

use std::io;
use std::path::PathBuf;

use crate::{PciAddress, PciBackend};

/// Why an operation on a PCI function failed. The text contains advice if the user can fix the cause.
#[derive(Debug, thiserror::Error)]
pub enum PciError {
    /// The function does not exist.
    #[error("{0}: there is no such PCI function")]
    NotFound(PciAddress),
    /// A sysfs file cannot be read or written.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// A sysfs file has unexpected contents.
    #[error("{} contains '{text}', which is not a {expected}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The start of its contents.
        text: String,
        /// The expected contents.
        expected: &'static str,
    },
    /// The function is bound to a kernel driver other than VFIO and UIO, or to no driver.
    #[error(
        "{address}: bound to {}; `ringbolt nvme bind {address}` takes it from the kernel",
        driver.as_deref().unwrap_or("no driver")
    )]
    Driver {
        /// The function.
        address: PciAddress,
        /// Its driver, if any.
        driver: Option<String>,
    },
    /// The requested backend does not match the driver of the function.
    #[error("{address}: {backend} was requested, but it is bound to {driver}")]
    Backend {
        /// The function.
        address: PciAddress,
        /// The requested backend.
        backend: PciBackend,
        /// The driver of the function.
        driver: String,
    },
    /// The function has no IOMMU group.
    #[error(
        "{0}: no IOMMU group: enable the IOMMU (VT-d or AMD-Vi in the firmware, intel_iommu=on on the kernel's \
         command line), or VFIO's no-IOMMU mode, or use uio_pci_generic"
    )]
    NoGroup(PciAddress),
    /// This process has already opened the function.
    #[error("{0}: this process has it open already")]
    AlreadyOpen(PciAddress),
    /// A device node cannot be opened.
    #[error("{}: {error}{}", path.display(), node_hint(error))]
    Node {
        /// The node.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// Another function of the IOMMU group is bound to a kernel driver.
    #[error(
        "{address}: IOMMU group {group} is not viable: every function of it ({}) must be bound to vfio-pci \
         or to no driver",
        join(others)
    )]
    NotViable {
        /// The function.
        address: PciAddress,
        /// Its IOMMU group.
        group: u32,
        /// All functions of the group.
        others: Vec<PciAddress>,
    },
    /// The kernel lacks a feature or module.
    #[error("the kernel lacks {0}")]
    Unsupported(&'static str),
    /// An operation on the function failed.
    #[error("{address}: {what}: {error}")]
    Operation {
        /// The function.
        address: PciAddress,
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        error: io::Error,
    },
    /// The backend does not support the operation.
    #[error("{address}: {backend} has no {what}")]
    NotOffered {
        /// The function.
        address: PciAddress,
        /// The backend in use.
        backend: PciBackend,
        /// The missing operation.
        what: &'static str,
    },
    /// The BAR does not exist or has no address.
    #[error("{address}: there is no BAR {index}")]
    BarMissing {
        /// The function.
        address: PciAddress,
        /// The index of the BAR, 0 to 5.
        index: u8,
    },
    /// The BAR is for I/O ports.
    #[error("{address}: BAR {index} is I/O ports, not memory")]
    BarPorts {
        /// The function.
        address: PciAddress,
        /// The index of the BAR, 0 to 5.
        index: u8,
    },
    /// The size of the BAR is not a multiple of the page size.
    #[error(
        "{address}: BAR {index} has {bytes} bytes, which is not a whole number of pages, and cannot be mapped"
    )]
    BarSize {
        /// The function.
        address: PciAddress,
        /// The index of the BAR, 0 to 5.
        index: u8,
        /// The size of the BAR.
        bytes: u64,
    },
    /// The BAR could not be mapped.
    #[error("{address}: BAR {index}: {error}")]
    BarMap {
        /// The function.
        address: PciAddress,
        /// The index of the BAR, 0 to 5.
        index: u8,
        /// The cause.
        error: dma::RegionError,
    },
    /// The limit of locked memory is exceeded.
    #[error(
        "{address}: locking {bytes} bytes for DMA: the limit on locked memory ({}) is reached: raise it \
         (`ulimit -l unlimited`, or LimitMEMLOCK=infinity in the service's unit) or grant CAP_IPC_LOCK",
        limit_bytes.map_or("none".to_string(), |bytes| format!("{} KiB", bytes >> 10))
    )]
    LockedMemory {
        /// The function.
        address: PciAddress,
        /// The size of the memory to map.
        bytes: u64,
        /// RLIMIT_MEMLOCK, if limited.
        limit_bytes: Option<u64>,
    },
    /// The IOVA space is full.
    #[error("{address}: no device address is free for {bytes} bytes")]
    NoAddress {
        /// The function.
        address: PciAddress,
        /// The size of the memory to map.
        bytes: u64,
    },
    /// The memory is not mapped for the device.
    #[error("{address}: the memory at {start:#x} is not mapped for it")]
    NotMapped {
        /// The function.
        address: PciAddress,
        /// The virtual address of the memory.
        start: u64,
    },
    /// Without an IOMMU the memory must be physically contiguous.
    #[error(
        "{0}: without an IOMMU a device can only reach hugepages: provide some \
         (`echo 64 > /proc/sys/vm/nr_hugepages` as root), or enable the IOMMU"
    )]
    NeedsHugepages(PciAddress),
    /// The process may not read physical addresses.
    #[error(
        "{0}: without an IOMMU the physical address of memory is needed, and /proc/self/pagemap does not \
         show it: run as root, or with CAP_SYS_ADMIN"
    )]
    NoPhysicalAddress(PciAddress),
    /// The function has fewer interrupts than requested.
    #[error("{address}: {wanted} interrupts were requested, but it has {available}")]
    Interrupts {
        /// The function.
        address: PciAddress,
        /// The requested number.
        wanted: u32,
        /// The available number.
        available: u32,
    },
    /// The range is outside the configuration space.
    #[error("{address}: {length} bytes at {offset} are not inside the configuration space")]
    ConfigRange {
        /// The function.
        address: PciAddress,
        /// The start of the range, in bytes.
        offset: u16,
        /// The length of the range, in bytes.
        length: usize,
    },
}

fn join(addresses: &[PciAddress]) -> String {
    addresses.iter().map(PciAddress::to_string).collect::<Vec<_>>().join(", ")
}

fn node_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => "; run as root, or give your user the node (chown)",
        Some(libc::ENOENT) => "; is the module loaded (modprobe vfio-pci)?",
        Some(libc::EBUSY) => "; another process has it open",
        _ => "",
    }
}
