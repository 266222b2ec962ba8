//! The client's end of vfio-user: a PCI device that another process serves over a UNIX socket.
//!
//! [`Client`] connects, learns what the [`Region`]s of the device are, reads and writes them by
//! message, maps the parts that can be mapped, shares memory with the device and takes its interrupts
//! through eventfds. Every call is a short exchange with a time limit; nothing here is for the path of an
//! I/O, which goes through doorbells that are mapped and queues in memory that is shared. Calls may come
//! from several threads; they take turns.
//!
//! ```no_run
//! use vfio_user::{Client, Config};
//! let client = Client::connect("/var/run/ringbolt/one".as_ref(), &Config::default())?;
//! println!("{client}: version {:#x}", client.read_u32(vfio_user::BAR0, 8)?);
//! let doorbells = client.map_region(vfio_user::BAR0, 0x1000, 0x1000)?;
//! doorbells.store_u32(0, 1);
//! # Ok::<(), vfio_user::ClientError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod client;
mod error;
mod link;
#[cfg(test)]
mod tests;

pub use client::{Client, Config, Region};
pub use error::ClientError;

/// Index of the region behind the first base address register.
pub const BAR0: u32 = wire_vfio_user::region::BAR0;
/// Index of configuration space.
pub const CONFIG: u32 = wire_vfio_user::region::CONFIG;
