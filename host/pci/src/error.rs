//! Why a function cannot be had, or does not do what was asked.

use std::io;
use std::path::PathBuf;

use crate::{Address, Backend};

/// What went wrong. The text says what to do about it where something can be done.
#[derive(Debug, thiserror::Error)]
pub enum PciError {
    /// No such function.
    #[error("{0}: there is no such PCI function")]
    NotFound(Address),
    /// A file of sysfs cannot be read or written.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        error: io::Error,
    },
    /// A file of sysfs holds something else than it should.
    #[error("{} holds '{text}', which is no {expected}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The beginning of what it holds.
        text: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// The function is bound to a driver of the kernel, or to none.
    #[error(
        "{address}: bound to {}; `ringbolt nvme bind {address}` takes it from the kernel",
        driver.as_deref().unwrap_or("no driver")
    )]
    Driver {
        /// The function.
        address: Address,
        /// Its driver, if it has one.
        driver: Option<String>,
    },
    /// The backend that was asked for is not what the function is bound to.
    #[error("{address}: {backend} was asked for, but it is bound to {driver}")]
    Backend {
        /// The function.
        address: Address,
        /// The wanted backend.
        backend: Backend,
        /// Its driver.
        driver: String,
    },
    /// The function has no IOMMU group.
    #[error(
        "{0}: no IOMMU group: enable the IOMMU (VT-d or AMD-Vi in the firmware, intel_iommu=on on the kernel's \
         command line), or VFIO's no-IOMMU mode, or use uio_pci_generic"
    )]
    NoGroup(Address),
    /// This process has the function open.
    #[error("{0}: this process has it open already")]
    AlreadyOpen(Address),
    /// A device node cannot be opened.
    #[error("{}: {error}{}", path.display(), node_hint(error))]
    Node {
        /// The node.
        path: PathBuf,
        /// What the kernel said.
        error: io::Error,
    },
    /// Another function of the group is bound to a driver of the kernel.
    #[error(
        "{address}: IOMMU group {group} is not viable: every function of it ({}) is to be bound to vfio-pci \
         or to no driver",
        join(others)
    )]
    NotViable {
        /// The function.
        address: Address,
        /// Its group.
        group: u32,
        /// The functions of the group.
        others: Vec<Address>,
    },
    /// The kernel does not know what is needed.
    #[error("the kernel lacks {0}")]
    Unsupported(&'static str),
    /// An operation on the function failed.
    #[error("{address}: {what}: {error}")]
    Operation {
        /// The function.
        address: Address,
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        error: io::Error,
    },
    /// The backend has no such operation.
    #[error("{address}: {backend} has no {what}")]
    NotOffered {
        /// The function.
        address: Address,
        /// How it was opened.
        backend: Backend,
        /// What was asked for.
        what: &'static str,
    },
    /// There is no such BAR, or it decodes nothing.
    #[error("{address}: there is no BAR {index}")]
    BarMissing {
        /// The function.
        address: Address,
        /// 0 to 5.
        index: u8,
    },
    /// A BAR of I/O ports.
    #[error("{address}: BAR {index} is I/O ports, not memory")]
    BarPorts {
        /// The function.
        address: Address,
        /// 0 to 5.
        index: u8,
    },
    /// A BAR that is no whole number of pages.
    #[error("{address}: BAR {index} has {bytes} bytes, no whole number of pages, and cannot be mapped")]
    BarSize {
        /// The function.
        address: Address,
        /// 0 to 5.
        index: u8,
        /// Its size.
        bytes: u64,
    },
    /// The BAR was not mapped.
    #[error("{address}: BAR {index}: {error}")]
    BarMap {
        /// The function.
        address: Address,
        /// 0 to 5.
        index: u8,
        /// Why.
        error: memory::RegionError,
    },
    /// The limit on locked memory is reached.
    #[error(
        "{address}: locking {bytes} bytes for DMA: the limit on locked memory ({}) is reached: raise it \
         (`ulimit -l unlimited`, or LimitMEMLOCK=infinity in the service's unit) or grant CAP_IPC_LOCK",
        limit_bytes.map_or("none".to_string(), |bytes| format!("{} KiB", bytes >> 10))
    )]
    LockedMemory {
        /// The function.
        address: Address,
        /// What was to be mapped.
        bytes: u64,
        /// RLIMIT_MEMLOCK, if there is one.
        limit_bytes: Option<u64>,
    },
    /// The device can reach no more addresses.
    #[error("{address}: no device address is free for {bytes} bytes")]
    NoAddress {
        /// The function.
        address: Address,
        /// What was to be mapped.
        bytes: u64,
    },
    /// Memory that is not mapped for the device.
    #[error("{address}: the memory at {start:#x} is not mapped for it")]
    NotMapped {
        /// The function.
        address: Address,
        /// Where the memory is.
        start: u64,
    },
    /// Without an IOMMU a device needs memory that lies together.
    #[error(
        "{0}: without an IOMMU a device can only reach hugepages: provide some \
         (`echo 64 > /proc/sys/vm/nr_hugepages` as root), or enable the IOMMU"
    )]
    NeedsHugepages(Address),
    /// The physical address of memory is kept from this process.
    #[error(
        "{0}: without an IOMMU the physical address of memory is needed, and /proc/self/pagemap does not \
         show it: run as root, or with CAP_SYS_ADMIN"
    )]
    NoPhysicalAddress(Address),
    /// The function has fewer interrupts than asked for.
    #[error("{address}: {wanted} interrupts were asked for, and it has {available}")]
    Interrupts {
        /// The function.
        address: Address,
        /// How many were asked for.
        wanted: u32,
        /// How many there are.
        available: u32,
    },
    /// A range outside the configuration space.
    #[error("{address}: {length} bytes at {offset} are not inside the configuration space")]
    ConfigRange {
        /// The function.
        address: Address,
        /// Where.
        offset: u16,
        /// How many.
        length: usize,
    },
}

fn join(addresses: &[Address]) -> String {
    addresses.iter().map(Address::to_string).collect::<Vec<_>>().join(", ")
}

fn node_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => "; run as root, or give your user the node (chown)",
        Some(libc::ENOENT) => "; is the module loaded (modprobe vfio-pci)?",
        Some(libc::EBUSY) => "; another process has it open",
        _ => "",
    }
}
