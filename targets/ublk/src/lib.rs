//! The ublk target: block devices of this machine (`/dev/ublkbN`) whose I/O the kernel's ublk driver sends to this
//! process.
//!
//! [`UblkTarget`] is the control plane's handle: it adds, starts, recovers and stops disks through `/dev/ublk-control`,
//! on control threads. Each queue of a disk belongs to one reactor, whose io_uring fetches the queue's requests and
//! copies their data from and to the kernel (user copy); `DiskQueue` is the state of its requests, sans-IO.
//! [`rpc::UblkModule`] is the module with the methods `ublk_*`.
//!
//! A disk outlives the process: when it is killed, the kernel keeps the disk and its requests, and the next process
//! serves them again ([`UblkTarget::recover`]). Linux 6.5 or later, CAP_SYS_ADMIN and io_uring are required.
//!
//! ```no_run
//! # fn example(registry: bdev::Registry, reactors: &reactor::Reactors) -> Result<(), ublk::UblkError> {
//! let target = ublk::UblkTarget::new(registry, reactors.handles());
//! target.create(None)?;
//! let number = target.start(&ublk::UblkDisk::new("Malloc0", 0))?;
//! println!("/dev/ublkb{number}");
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

#[cfg(any(test, fuzzing))]
mod any_driver;
mod core_queue;
mod failure;
mod group;
mod limits;
mod plan;
mod queue;
pub mod rpc;
mod shape;
mod target;

#[cfg(any(test, fuzzing))]
pub use any_driver::any_driver;
pub use failure::UblkError;
pub use target::{UblkDisk, UblkTarget};
