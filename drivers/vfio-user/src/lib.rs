//! The vfio-user client: access to a PCI device that another process serves over a UNIX socket.
//!
//! [`VfioUserClient`] connects, reads the description of the device's [`DeviceRegion`]s, accesses them by
//! message, maps the mappable areas, shares memory with the device and receives its interrupts through
//! eventfds. Every call is one synchronous exchange or more, with a timeout, and is meant for setup. I/O uses
//! mapped doorbells and queues in shared memory instead. Several threads may call; a lock serializes the
//! calls.
//!
//! ```no_run
//! use vfio_user::{ClientConfig, VfioUserClient};
//! let client = VfioUserClient::connect("/var/run/ringbolt/one".as_ref(), &ClientConfig::default())?;
//! println!("{client}: version {:#x}", client.read_u32(vfio_user::BAR0, 8)?);
//! let doorbells = client.map_region(vfio_user::BAR0, 0x1000, 0x1000)?;
//! doorbells.store_u32(0, 1);
//! # Ok::<(), vfio_user::VfioUserError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod client;
mod connection;
mod error;
#[cfg(test)]
mod tests;

pub use client::{ClientConfig, DeviceRegion, VfioUserClient};
pub use error::VfioUserError;

/// Index of the region of BAR0, the first base address register.
pub const BAR0: u32 = wire_vfio_user::region::BAR0;
/// Index of the region of the PCI configuration space.
pub const CONFIG: u32 = wire_vfio_user::region::CONFIG;
