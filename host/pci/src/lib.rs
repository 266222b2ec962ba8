//! PCI functions from user space: enumeration, VFIO and UIO, BARs, DMA mappings, interrupts, hotplug.
//!
//! [`enumerate`] lists the functions in [`Sysfs`]. [`PciFunction`] is one opened function: its BARs as
//! [`dma::SharedRegion`]s, device addresses (IOVAs) for the chunks of a [`dma::Arena`], interrupts
//! as eventfds, and reset. [`HotplugMonitor`] reports functions that are added or removed.
//!
//! A function must first be unbound from its kernel driver; `ringbolt nvme bind` does that.
//!
//! ```no_run
//! let sysfs = pci::Sysfs::default();
//! for info in pci::enumerate(&sysfs)?.iter().filter(|info| info.is_nvme()) {
//!     let function = pci::PciFunction::open(&sysfs, info.address, None)?;
//!     let registers = function.map_bar(0)?;
//!     println!("{}: NVMe version {:#x}", info.address, registers.load_u32(8));
//! }
//! # Ok::<(), pci::PciError>(())
//! ```
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod address;
pub mod bind;
mod error;
mod flock;
mod function;
mod function_dma;
mod hotplug;
mod ioat_ids;
mod iova;
mod pagemap;
mod sysfs;
mod uapi;
mod uio;
mod vfio;

pub use address::{PciAddress, PciAddressError};
pub use error::PciError;
pub use function::{PciBackend, PciFunction};
pub use function_dma::FunctionDma;
pub use hotplug::{HotplugEvent, HotplugMonitor, Uevent, UeventKind};
pub use ioat_ids::is_ioat;
pub use sysfs::{
    BarKind, NVME_CLASS, PciBar, PciFunctionInfo, Sysfs, bars, config_space, enumerate, function_info,
    is_for_user_space,
};
