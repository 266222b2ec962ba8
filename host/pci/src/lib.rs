//! PCI functions from user space: find them, open them through VFIO or UIO, map their registers, and
//! give them memory to read and write.
//!
//! [`enumerate`] lists what [`Sysfs`] knows. [`Function`] is one opened function: its registers as a
//! [`memory::SharedRegion`], device addresses for the chunks of an [`memory::Arena`], interrupts as
//! eventfds, and its reset. [`Hotplug`] says when functions come and go.
//!
//! The kernel driver of a function has to give it up first; `ringbolt nvme bind` does that.
//!
//! ```no_run
//! let sysfs = pci::Sysfs::default();
//! for info in pci::enumerate(&sysfs)?.iter().filter(|info| info.is_nvme()) {
//!     let function = pci::Function::open(&sysfs, info.address, None)?;
//!     let registers = function.map_bar(0)?;
//!     println!("{}: NVMe version {:#x}", info.address, registers.load_u32(8));
//! }
//! # Ok::<(), pci::PciError>(())
//! ```
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod address;
pub mod bind;
mod error;
mod function;
mod hotplug;
mod pagemap;
mod space;
mod sysfs;
mod uapi;
mod uio;
mod vfio;

pub use address::{Address, AddressError};
pub use error::PciError;
pub use function::{Backend, Function};
pub use hotplug::{Hotplug, Notice, Uevent, UeventKind};
pub use sysfs::{Bar, BarKind, Info, NVME_CLASS, Sysfs, bars, enumerate, info};
