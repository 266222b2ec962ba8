//! The vhost-user target: block devices as virtio disks of virtual machines and of whatever else speaks vhost-user.
//!
//! A [`VhostTarget`] has controllers, each a UNIX socket at which QEMU or libblkio finds a virtio block device
//! ([`VhostBlkConfig`]) or QEMU a virtio SCSI host with up to eight targets; an [`rpc::VhostModule`] makes it a part of a
//! program. The client shares its memory: requests are fetched from virtqueues there, split or packed, and block devices
//! read and write the guest's buffers without a copy. The shell drives the connections. Each is on one core; its virtqueues
//! are also on others, served by workers.
//!
//! ```
//! use bdev::{Registry, malloc};
//! use vhost::{VhostBlkConfig, VhostTarget};
//! let reactors = reactor::Reactors::start(&reactor::ReactorConfig { pin: false, ..Default::default() }).expect("reactors");
//! let registry = Registry::new();
//! malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 2048, 512)).expect("a device");
//! let directory = std::env::temp_dir();
//! let target = VhostTarget::new(registry, reactors.handles(), directory.clone());
//! let name = format!("vhost-doc-{}", std::process::id());
//! let controller = target.create(VhostBlkConfig::new(&name, "Malloc0"))?;
//! assert_eq!(controller.socket, directory.join(&name));
//! target.shutdown();
//! reactors.stop();
//! # Ok::<(), vhost::VhostTargetError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

#[cfg(any(test, fuzzing))]
mod any_frontend;
#[cfg(any(test, fuzzing))]
mod any_ring;
mod backend;
mod blk;
mod blk_requests;
mod chain;
mod coalescing;
mod connection;
mod controller;
mod core;
mod device;
mod device_state;
mod dirty_log;
mod failure;
mod inflight_region;
mod info;
mod limits;
mod links;
mod memory;
mod messages;
mod queue;
mod requests;
mod rotation;
pub mod rpc;
mod scsi_requests;
mod session;
mod status;
mod tags;
mod target;
mod vring;
mod worker;
mod workers;

#[cfg(any(test, fuzzing))]
pub use any_frontend::any_frontend;
#[cfg(any(test, fuzzing))]
pub use any_ring::any_ring;
pub use coalescing::Coalescing;
pub use failure::{RequestError, VhostTargetError, VhostViolation};
pub use info::{
    VhostBackendInfo, VhostBlkConfig, VhostControllerInfo, VhostScsiTargetInfo, VhostSessionInfo,
};
pub use memory::MemoryError;
pub use target::VhostTarget;
