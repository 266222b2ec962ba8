//! The NBD target: block devices for qemu-img, libnbd, fio, the Linux kernel and whatever else speaks NBD.
//!
//! An [`NbdTarget`] has exports ([`ExportConfig`]) and, for each address, one listener that they share; an
//! [`rpc::NbdModule`] makes it a part of a program. Fixed newstyle with structured replies, extended headers
//! and `base:allocation`, over TCP and UNIX sockets, as `doc/proto.md` of the NBD project specifies it. The
//! shell drives the connections on all cores, and a flush covers the writes of all of them, so that clients
//! may open several. Connections move to other cores ([`NbdTarget::balanced`]).
//!
//! ```
//! use bdev::{Registry, malloc};
//! use nbd::{ExportConfig, NbdTarget};
//! let reactors = reactor::Reactors::start(&reactor::ReactorConfig { pin: false, ..Default::default() }).expect("reactors");
//! let registry = Registry::new();
//! malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 2048, 512)).expect("a device");
//! let target = NbdTarget::new(registry, reactors.handles());
//! let export = target.create(ExportConfig {
//!     bdev_name: "Malloc0".into(),
//!     name: "disk".into(),
//!     description: String::new(),
//!     read_only: false,
//!     require_tls: false,
//!     address: "127.0.0.1:0".parse().expect("an address"),
//! })?;
//! assert!(export.uri().starts_with("nbd://127.0.0.1:") && export.uri().ends_with("/disk"));
//! target.shutdown();
//! reactors.stop();
//! # Ok::<(), nbd::NbdTargetError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod connection;
mod export;
mod failure;
mod handshake;
mod kernel;
mod limits;
mod moving;
pub mod rpc;
mod secure;
mod session;
mod status;
mod target;
#[cfg(any(test, fuzzing))]
pub mod testing;
mod tls_keys;

pub use failure::{NbdTargetError, NbdViolation, TlsKeysError};
pub use kernel::{KernelDisk, KernelDiskError};
pub use target::{ExportConfig, ExportInfo, NbdTarget};
pub use tls_keys::TlsFiles;
