//! Persistent reservations of block devices: the state that NVMe reservations and SCSI persistent reservations
//! share, kept once for a device, whatever exports it (NVMe Base 2.0, section 8.19; SPC-4, section 5.13).
//!
//! Three types carry it. [`ReservationState`] is the pure state: a [`Registrant`] sends a [`ReservationCommand`], and
//! [`Effects`] say who is notified and whose I/O is aborted. [`ReservationMachine`] adds stable storage, sans-IO: a
//! change takes effect when it is saved, or not at all. [`Reservations`] is the machine of one device behind a lock that
//! only reservation commands take, with the [`DenyMask`]s that I/O checks: one atomic byte for each
//! registrant, and what a [`ReservedDevice`] denies to users that cannot become one.
//!
//! A protocol decodes its commands into [`ReservationCommand`]s, maps [`ReservationError`] to its status, and implements
//! [`ReservationSubscriber`] for its log pages, events or unit attentions. [`encode_file`] and [`decode_file`] are the
//! format of the file that a device's reservations are saved in.
//!
//! ```
//! use reservations::{Registrant, ReservationCommand, ReservationState, ReservationType, access};
//! let one = Registrant::nvme_host([1; 16]);
//! let other = Registrant::scsi_nexus("iqn.2026-11.io.ringbolt:host,i,0x1", "iqn.2026-11.io.ringbolt:disk,t,0x1")?;
//! let mut state = ReservationState::default();
//! state.apply(&one, &ReservationCommand::Register { key: 0xa, persist: None })?;
//! state.apply(&one, &ReservationCommand::Acquire { key: 0xa, kind: ReservationType::WriteExclusive })?;
//! assert_eq!((state.denied(&one), state.denied(&other)), (0, access::WRITE));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What SCSI adds
//! A command can concern several registrants at once ([`ReservationState::apply_with`]): SPEC_I_PT registers a list of
//! nexuses, ALL_TG_PT an initiator port at all target ports, of which each is a registrant of its own, and REGISTER AND
//! MOVE gives the reservation to another one.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod file;
mod machine;
mod pending;
mod registrant;
mod shared;
mod state;

pub use file::{FILE_BYTES_MAX, decode_file, encode_file};
pub use machine::{ReservationAction, ReservationEvent, ReservationMachine, WAITING_MAX};
pub use pending::{ChangeWaker, PendingChange, PendingGuard};
pub use registrant::{Registrant, RegistrantError, RegistrantKind};
pub use shared::{
    DenyMask, ReservationStore, ReservationSubscriber, Reservations, ReservedDevice, SaveCompletion,
};
pub use state::{
    ActiveReservation, Effects, LossEvent, REGISTRANTS_MAX, Registration, ReservationCommand,
    ReservationError, ReservationNotice, ReservationState, ReservationType, access,
};
