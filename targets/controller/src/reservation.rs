//! Reservations: which hosts may read and write a namespace that they share (Base 2.0, section 8.19).
//!
//! [`State`] decides; [`Reservations`] is that of one namespace behind a lock, which only reservation commands
//! take. What I/O commands look at is a [`Gate`]: a byte for each host and namespace, loaded with the command and
//! written by whoever changes the reservation, so that what was acquired holds on every core when the command
//! is answered. What must be on a medium or drained before that is waited for with a [`Pending`].
//!
//! ```
//! use controller::reservation::{Command, State, access};
//! use wire_nvme::reservation::*;
//! let register = Register { action: RegisterAction::Register, ignore_key: false, persist: PersistChange::None };
//! let kind = ReservationType::WriteExclusive;
//! let acquire = Acquire { action: AcquireAction::Acquire, ignore_key: false, kind };
//! let (one, other) = ([1; 16], [2; 16]);
//! let mut state = State::default();
//! state.apply(one, &Command::Register(register, 0, 0xa), false)?;
//! state.apply(one, &Command::Acquire(acquire, 0xa, 0), false)?;
//! assert_eq!((state.denied(&one), state.denied(&other)), (0, access::WRITE));
//! # Ok::<(), ring::Status>(())
//! ```

mod bell;
mod state;

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use ring::Status;
use wire_nvme::Sqe;
use wire_nvme::identify::rescap;
use wire_nvme::log::NotificationType;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::reservation::{
    Acquire, KEYS_SIZE, Register, Registrant, Release, Report, Reservation, decode_keys,
};

use crate::{Association, Directory, INVALID_FIELD};

pub(crate) use bell::Bells;
pub use bell::{Bell, Drain, Parked, Pending, Ticket};
pub use state::{Command, Effects, Held, HostId, REGISTRANTS_MAX, Registration, State, access, denied};

/// What a host may not do with a namespace: one byte, which I/O queues read and reservation commands write.
#[derive(Debug, Default)]
pub struct Gate(AtomicU8);

impl Gate {
    /// Whether commands of a class are refused; see [`access`].
    #[inline(always)]
    pub fn denies(&self, class: u8) -> bool {
        self.0.load(Ordering::Acquire) & class != 0
    }
}

/// Keeps what is to survive a power loss. Called with the namespace's lock held, in the order of changes, so it
/// passes the state on and returns; the ticket is dropped when it is on the medium.
pub trait Keeper: Send + Sync + std::fmt::Debug {
    /// Keeps a state. One that is not [persistent](State::persistent) replaces what was kept by nothing.
    fn keep(&self, state: &State, ticket: Ticket);
}

/// Registrations and the reservation of one namespace, shared by all controllers that reach it.
#[derive(Debug, Default)]
pub struct Reservations {
    inner: Mutex<Inner>,
    keeper: Option<Box<dyn Keeper>>,
}

#[derive(Debug, Default)]
struct Inner {
    state: State,
    gates: Vec<(HostId, Weak<Gate>)>,
}

/// Pictures of a namespace are equal whatever is reserved: that is its state, not what it is.
impl PartialEq for Reservations {
    fn eq(&self, _: &Reservations) -> bool {
        true
    }
}

impl Eq for Reservations {}

/// Who reserves: the controller, among those of the target.
#[derive(Clone, Debug)]
pub(crate) struct Seat {
    pub(crate) directory: Arc<Directory>,
    pub(crate) association: Arc<Association>,
}

/// What a reservation command comes to.
#[derive(Debug)]
pub enum Outcome {
    /// It is done; the status to complete it with.
    Done(Status),
    /// It is done, and this goes to the host.
    Report(Vec<u8>),
    /// It is done when there is nothing left to wait for; a [`Bell`] rings then.
    Pending(Arc<Pending>),
}

impl Reservations {
    /// Of a namespace whose state a keeper makes survive; `state` is what it had kept.
    pub fn kept(state: State, keeper: Box<dyn Keeper>) -> Reservations {
        Reservations { inner: Mutex::new(Inner { state, gates: Vec::new() }), keeper: Some(keeper) }
    }

    /// Whether the state can survive a power loss.
    pub fn can_persist(&self) -> bool {
        self.keeper.is_some()
    }

    /// RESCAP: what Identify Namespace tells.
    pub fn capabilities(&self) -> u8 {
        rescap::ALL_TYPES | rescap::IGNORE_KEY | if self.can_persist() { rescap::PERSIST } else { 0 }
    }

    /// The state now.
    pub fn state(&self) -> State {
        self.lock().state.clone()
    }

    /// What a host's I/O commands are to look at, now and after every change.
    pub fn gate(&self, host: &HostId) -> Arc<Gate> {
        let mut inner = self.lock();
        inner.gates.retain(|(_, gate)| gate.strong_count() > 0);
        if let Some(gate) = inner.gates.iter().find(|(of, _)| of == host).and_then(|(_, gate)| gate.upgrade())
        {
            return gate;
        }
        let gate = Arc::new(Gate(AtomicU8::new(inner.state.denied(host))));
        inner.gates.push((*host, Arc::downgrade(&gate)));
        gate
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state; what came of it and, if something is waited for, what with.
    fn change(
        &self,
        seat: &Seat,
        change: impl FnOnce(&mut State) -> Result<Effects, Status>,
    ) -> Result<(Effects, Arc<Pending>), Status> {
        let (pending, ticket) = Pending::new(seat.directory.bells());
        let mut inner = self.lock();
        let before = inner.state.clone();
        let effects = change(&mut inner.state)?;
        if inner.state != before {
            let Inner { state, gates } = &*inner;
            for (host, gate) in gates {
                if let Some(gate) = gate.upgrade() {
                    gate.0.store(state.denied(host), Ordering::Release);
                }
            }
            if let Some(keeper) = self.keeper.as_ref().filter(|_| state.persistent || before.persistent) {
                keeper.keep(state, ticket.clone());
            }
        }
        drop(inner);
        if !effects.abort.is_empty() {
            let drain = Drain {
                subnqn: seat.association.subnqn().clone(),
                hosts: effects.abort.clone().into(),
                ticket: ticket.clone(),
            };
            seat.directory.bells().ring(Some(&drain));
        }
        drop(ticket);
        Ok((effects, pending))
    }

    /// Sets whether the state survives a power loss (the Reservation Persistence feature).
    ///
    /// # Errors
    /// It cannot.
    pub(crate) fn persist(&self, seat: &Seat, persistent: bool) -> Result<Arc<Pending>, Status> {
        if persistent && !self.can_persist() {
            return Err(INVALID_FIELD);
        }
        let (_, pending) = self.change(seat, |state| {
            state.persistent = persistent;
            Ok(Effects::default())
        })?;
        Ok(pending)
    }

    /// Executes a reservation command of a host. `sqe` is as [`words`] keeps it, `data` is what came with it.
    pub(crate) fn execute(&self, seat: &Seat, nsid: u32, sqe: &Sqe, data: &[u8]) -> Outcome {
        self.try_execute(seat, nsid, sqe, data).unwrap_or_else(Outcome::Done)
    }

    fn try_execute(&self, seat: &Seat, nsid: u32, sqe: &Sqe, data: &[u8]) -> Result<Outcome, Status> {
        if sqe.opcode == NvmOpcode::ReservationReport.to_wire() {
            return self.report(seat, Report::of(sqe)).map(Outcome::Report);
        }
        let host = seat.association.host_id();
        // Hosts without an identifier cannot be told apart: theirs has to be set first.
        if host == [0; 16] {
            return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        }
        let command = command(sqe, data)?;
        let (effects, pending) =
            self.change(seat, |state| state.apply(host, &command, self.can_persist()))?;
        let told = [
            (NotificationType::RegistrationPreempted, &effects.preempted),
            (NotificationType::ReservationReleased, &effects.released),
            (NotificationType::ReservationPreempted, &effects.cleared),
        ];
        if told.iter().any(|(_, hosts)| !hosts.is_empty()) {
            for association in seat.directory.controllers(seat.association.subnqn()) {
                for (kind, _) in told.iter().filter(|(_, hosts)| hosts.contains(&association.host_id())) {
                    association.notify(nsid, *kind);
                }
            }
            seat.directory.bells().ring(None);
        }
        Ok(pending.outcome().map_or(Outcome::Pending(pending), Outcome::Done))
    }

    /// Reservation Report (Base 2.0, section 7.5): an entry for each controller of a registered host.
    fn report(&self, seat: &Seat, report: Report) -> Result<Vec<u8>, Status> {
        // The form is that of host identifiers (Base 2.0, section 7.5: EDS).
        if seat.association.id_is_long().is_some_and(|long| long != report.extended) {
            return Err(Status::HOST_ID_INCONSISTENT.do_not_retry());
        }
        let state = self.state();
        let controllers = seat.directory.controllers(seat.association.subnqn());
        let mut registrants = Vec::new();
        for Registration { host, key } in &state.registrations {
            let entry =
                |cntlid| Registrant { cntlid, holder: state.is_holder(host), host_id: *host, key: *key };
            let of = controllers.iter().filter(|association| association.host_id() == *host);
            let before = registrants.len();
            registrants.extend(of.map(|association| entry(association.cntlid())));
            if registrants.len() == before {
                // The host has no controller now, and which it gets is not known (dynamic controller model).
                registrants.push(entry(0xffff));
            }
        }
        let reservation = Reservation {
            generation: state.generation,
            kind: state.held.map(|held| held.kind),
            persistent: state.persistent,
            registrants,
        };
        let mut data = vec![0; usize::try_from(report.length_bytes).map_err(|_| INVALID_FIELD)?];
        reservation.encode(report.extended, &mut data);
        Ok(data)
    }
}

/// Bytes of data that a reservation command needs: to the host for Report, else from it.
pub(crate) fn data_bytes(opcode: NvmOpcode, sqe: &Sqe) -> u64 {
    match opcode {
        NvmOpcode::ReservationReport => Report::of(sqe).length_bytes,
        NvmOpcode::ReservationRelease => 8,
        _ => KEYS_SIZE as u64,
    }
}

fn command(sqe: &Sqe, data: &[u8]) -> Result<Command, Status> {
    let short = Status::DATA_SGL_LENGTH_INVALID.do_not_retry();
    let keys = || data.first_chunk::<KEYS_SIZE>().map(decode_keys).ok_or(short);
    match NvmOpcode::from_wire(sqe.opcode) {
        Some(NvmOpcode::ReservationRegister) => {
            let register = Register::of(sqe).ok_or(INVALID_FIELD)?;
            let (current, new) = keys()?;
            Ok(Command::Register(register, current, new))
        }
        Some(NvmOpcode::ReservationAcquire) => {
            let acquire = Acquire::of(sqe).ok_or(INVALID_FIELD)?;
            let (current, preempt) = keys()?;
            Ok(Command::Acquire(acquire, current, preempt))
        }
        Some(NvmOpcode::ReservationRelease) => {
            // Of Clear the type means nothing (Base 2.0, section 7.4).
            let typed = Sqe { cdw10: sqe.cdw10 & !0xff00 | 1 << 8, ..*sqe };
            let is_clear = sqe.cdw10 & 7 == 1;
            let release = Release::of(if is_clear { &typed } else { sqe }).ok_or(INVALID_FIELD)?;
            let key = data.first_chunk().copied().map(u64::from_le_bytes).ok_or(short)?;
            Ok(Command::Release(release, key))
        }
        _ => Err(Status::INVALID_OPCODE.do_not_retry()),
    }
}
