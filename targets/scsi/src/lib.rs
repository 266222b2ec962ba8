//! A SCSI logical unit on a block device, sans-IO, for every transport: commands and data go in, requests of the block
//! device and answers come out (SPC-4, SBC-4, SAM-5).
//!
//! [`LogicalUnit`] is what a target exports under a LUN, shared by all cores. [`UnitNexus`] is an I_T_L nexus: its unit
//! attentions, its reservations and its registration. [`Task`] executes one command on one core, and lives in the
//! transport's slot for the command.
//!
//! # Order of calls
//! 1. [`LogicalUnit::new`], and [`LogicalUnit::attach`] for each session (its connections share the nexus).
//! 2. For a command, [`Task::start`]; it returns what happens next, a [`Step`]. Each step but the last leads to
//!    [`Task::resume`]: with data-out ([`Step::DataOut`]), memory for data-in ([`Step::DataIn`]) or for the task itself
//!    ([`Step::Memory`]), each completion of a device request ([`Step::InFlight`]), or when the waker was called
//!    ([`Step::Pending`]). Requests are appended to [`TaskContext::requests`]; they are submitted to the unit's device
//!    in order and in one batch, and have the command's tag.
//! 3. [`Step::Done`] has the [`Response`]: status, sense data, data-in and the residual, which the transport encodes.
//!
//! [`TaskRunner`] does this for all tasks of a session on a core, and collects their requests.
//!
//! A task is aborted with [`TaskEvent::Abort`]. [`LogicalUnit::manage`] executes task management functions, for tasks on any
//! core: it asks the [`UnitSubscriber`]s of all transports to abort the tasks of nexuses, and is complete when they have
//! ended. [`LogicalUnit::query`] asks whether there are any.
//!
//! SANITIZE belongs to the unit: a [`SanitizeExecutor`] executes it at the device, whatever becomes of the nexus. For units
//! with reactors it is [`ReactorSanitizer`], the one part with I/O.
//!
//! READ and WRITE allocate nothing: data-out is the request's data as it is, of one slice or many, and data-in is
//! read where the transport wants it.
//!
//! ```
//! use bdev::BdevGeometry;
//! use scsi::{Command, LogicalUnit, NexusPorts, Response, Step, Task, TaskContext, UnitConfig};
//! let config = UnitConfig::new(bdev::Uuid::nil(), BdevGeometry::new(512, 1024));
//! let unit = LogicalUnit::new(config, Default::default());
//! let nexus = unit.attach(&NexusPorts::iscsi("iqn.2026-11.io.ringbolt:host", 1, "iqn.2026-11.io.ringbolt:disk", 1))?;
//! let mut requests = Vec::new();
//! let waker = scsi::no_waker();
//! let mut peers = scsi::NoPeers;
//! let mut context =
//!     TaskContext { nexus: &nexus, luns: &[0], waker: &waker, requests: &mut requests, peers: &mut peers };
//! // READ CAPACITY(10), after the unit attention of a new nexus.
//! let command = Command { cdb: &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], data_in_bytes: 8, ..Command::default() };
//! let (_, Step::Done(refused)) = Task::start(&command, &mut context) else { panic!() };
//! assert_eq!(refused.status, wire_scsi::ScsiStatus::CheckCondition);
//! let (_, Step::Done(response)) = Task::start(&command, &mut context) else { panic!() };
//! assert_eq!(response.status, wire_scsi::ScsiStatus::Good);
//! assert_eq!(response.data.bytes(), Some(&[0, 0, 3, 0xff, 0, 0, 2, 0][..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod absent;
mod access;
#[cfg(any(test, fuzzing))]
mod any_bytes;
mod blocks;
mod copy;
mod devices;
mod events;
mod functions;
mod identity;
mod information;
mod limits;
mod nexus;
mod operation;
mod ports;
mod reserve;
mod response;
mod runner;
mod sanitize;
mod sense;
mod settings;
mod task;
#[cfg(any(test, fuzzing))]
mod test_unit;
mod transfer;
mod unit;

pub use absent::absent_unit;
#[cfg(any(test, fuzzing))]
pub use any_bytes::any_bytes;
pub use devices::{ScsiDeviceModule, ScsiDeviceOwner, ScsiDeviceSource};
pub use events::{CoreEvents, TaskManagement};
pub use functions::{ManagedTasks, TaskQuery, UnitFunction, UnitSubscriber};
pub use limits::{ATTENTIONS_MAX, NEXUSES_MAX, TRANSFER_BYTES_MAX};
pub use nexus::{AttachError, NexusPorts, SessionNexuses, UnitNexus};
pub use ports::TargetPort;
pub use response::{DataIn, Residual, Response, SenseBytes};
pub use runner::{RunningTask, SessionCommand, SessionUnit, TaskRunner};
pub use sanitize::{ReactorSanitizer, SanitizeExecutor, SanitizeJob, SanitizeRun};
pub use sense::failure_of;
pub use task::{Command, NoPeers, SessionPeers, Step, Task, TaskContext, TaskEvent, no_waker};
pub use unit::{LogicalUnit, UnitConfig};
pub use wire_scsi::inquiry::ProtocolId;
pub use wire_scsi::port_groups::AccessState;
