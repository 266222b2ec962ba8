//! The NVMe controller that all transports share: protocol logic without sockets, memory or block devices
//! (sans-IO).
//!
//! A transport passes a Connect command to [`connect`]. For an admin queue it gets an [`AdminConnect`],
//! creates a [`Controller`] from it, feeds the controller with events and performs the actions that it
//! returns. For an I/O queue it gets a [`QueueLease`] and passes each command to an [`IoQueue`], which plans
//! it against a [`NamespaceTable`] and executes it. The crate uses no clock, socket, thread or random number.
//! Cores share the [`ControllerDirectory`], which is used when queues connect and disconnect, and the
//! reservations of a namespace (see [`reservation`]).
//!
//! ```
//! use std::sync::Arc;
//! use nvme_controller::*;
//! use wire_nvme::{Sqe, fabrics, fabrics::{Connect, ConnectData, Nqn}};
//!
//! let subsystem = Arc::new(Subsystem { allow_any_host: true, ..Subsystem::new("nqn.2026-11.io.ringbolt:one".parse()?) });
//! let (directory, limits) = (Arc::new(ControllerDirectory::new()), Arc::new(ControllerLimits::default()));
//! let sqe = Connect { record_format: 0, qid: 0, queue_entries: 32, attributes: Default::default(), kato_ms: 5000 }.to_sqe();
//! let mut data = [0; fabrics::CONNECT_DATA_SIZE];
//! let hostnqn = "nqn.2014-08.org.nvmexpress:uuid:6d5c7a3e-0a52-4d5f-9d0b-7d3a1f7d2c11".parse()?;
//! ConnectData { host_id: [1; 16], cntlid: 0xffff, subnqn: subsystem.nqn.clone(), hostnqn }.encode(&mut data);
//! let port = SubsystemPort::default();
//! let context = ConnectContext { directory: &directory, limits: &limits, port, secure: None };
//! let lookup = |nqn: &Nqn| (*nqn == subsystem.nqn).then(|| subsystem.clone());
//! let Ok(ConnectOk::Admin(admin)) = connect(&sqe, &data, &context, lookup) else { panic!("rejected") };
//! let controller = Controller::new(admin, limits.clone(), Arc::default(), 0);
//! assert_eq!(controller.deadline(), Some(5_000_000_000));
//! # Ok::<(), fabrics::NqnError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod io;
pub mod io_queue;
pub mod queues;
pub mod reservation;
pub mod sgl;

mod connect;
mod controller;
mod directory;
mod discovery;
mod generated_keys;
#[cfg(any(test, fuzzing))]
mod harness;
mod limits;
mod persistent_events;
mod subsystem;

pub use connect::{
    AdminConnect, AuthRequirement, ConnectContext, ConnectError, ConnectOk, IoConnect, SecureChannel,
    SubsystemPort, connect,
};
pub use controller::{
    AdminCompletion, Controller, ControllerAction, ControllerEvent, HealthCounters, TerminationReason,
    data_from_host, log_has_health,
};
pub use directory::{ControllerAssociation, ControllerDirectory, LeaseError, QueueLease};
pub use discovery::{AllowedHosts, DiscoveryFilter, DiscoveryLog, DiscoveryRecord};
#[cfg(any(test, fuzzing))]
pub use harness::Harness;
pub use io::NamespaceTable;
pub use io_queue::{CommandToken, IoQueue};
pub use limits::ControllerLimits;
pub use persistent_events::PersistentEventLog;
pub use subsystem::{Subsystem, SubsystemKind, SubsystemListener, SubsystemNamespace};

use block_io::Status;

/// Firmware revision.
const FIRMWARE: &str = env!("CARGO_PKG_VERSION");
/// The command was sent on a queue of the wrong type (Base 2.0, section 6: command specific 85h).
const INVALID_QUEUE_TYPE: Status = Status::new(1, 0x85).do_not_retry();
/// Invalid Field in Command with Do Not Retry: a retry of the same command fails again.
const INVALID_FIELD: Status = Status::INVALID_FIELD.do_not_retry();
