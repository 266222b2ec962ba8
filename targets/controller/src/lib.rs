//! The NVMe controller that every transport shares: all of it but the bytes and the blocks.
//!
//! A transport hands a Connect command to [`connect`]. For an admin queue it gets what makes a
//! [`Controller`], feeds that with events and does the actions that come out; for an I/O queue it gets
//! a [`QueueLease`] and plans each command with [`io::plan`] against a [`NamespaceTable`]. There is no
//! clock, socket, thread or random number in here, and nothing that a core shares with another but
//! the [`Directory`], which is used when queues come and go.
//!
//! ```
//! use std::sync::Arc;
//! use controller::*;
//! use wire_nvme::{Sqe, fabrics, fabrics::{Connect, ConnectData, Nqn}};
//!
//! let subsystem = Arc::new(Subsystem { allow_any_host: true, ..Subsystem::new("nqn.2026-11.io.ringbolt:one".parse()?) });
//! let (directory, limits) = (Arc::new(Directory::new()), Arc::new(Limits::default()));
//! let sqe = Connect { record_format: 0, qid: 0, queue_entries: 32, attributes: Default::default(), kato_ms: 5000 }.to_sqe();
//! let mut data = [0; fabrics::CONNECT_DATA_SIZE];
//! let hostnqn = "nqn.2014-08.org.nvmexpress:uuid:6d5c7a3e-0a52-4d5f-9d0b-7d3a1f7d2c11".parse()?;
//! ConnectData { host_id: [1; 16], cntlid: 0xffff, subnqn: subsystem.nqn.clone(), hostnqn }.encode(&mut data);
//! let place = Place { directory: &directory, limits: &limits, port: Port::default() };
//! let lookup = |nqn: &Nqn| (*nqn == subsystem.nqn).then(|| subsystem.clone());
//! let Ok(ConnectOk::Admin(admin)) = connect(&sqe, &data, &place, lookup) else { panic!("refused") };
//! let controller = Controller::new(admin, limits.clone(), Arc::default(), 0);
//! assert_eq!(controller.deadline(), Some(5_000_000_000));
//! # Ok::<(), fabrics::NqnError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod io;
pub mod queues;
pub mod reservation;
pub mod sgl;

mod connect;
mod controller;
mod directory;
mod discovery;
#[cfg(any(test, fuzzing))]
mod harness;
mod limits;
mod subsystem;

pub use connect::{AdminConnect, ConnectError, ConnectOk, IoConnect, Place, Port, connect};
pub use controller::{Action, Completion, Controller, Event, HealthCounters, Reason, data_from_host};
pub use directory::{Association, Directory, QueueLease, QueueRefused};
pub use discovery::{DiscoveryLog, DiscoveryRecord, Hosts};
#[cfg(any(test, fuzzing))]
pub use harness::Harness;
pub use io::NamespaceTable;
pub use limits::Limits;
pub use subsystem::{Kind, Listener, Namespace, Subsystem};

use ring::Status;

/// The command was sent on a queue of the wrong type (Base 2.0, section 6: command specific 85h).
const INVALID_QUEUE_TYPE: Status = Status::new(1, 0x85).do_not_retry();
/// Invalid Field in Command; the same command stays invalid.
const INVALID_FIELD: Status = Status::INVALID_FIELD.do_not_retry();
