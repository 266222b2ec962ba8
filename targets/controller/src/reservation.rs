//! Reservations, which control the access of several hosts to a shared namespace (Base 2.0, section 8.19).
//!
//! [`ReservationState`] is the pure state machine; [`Reservations`] is the state of one namespace behind a
//! lock that only reservation commands take. I/O commands check a [`DenyMask`], one byte per host and
//! namespace: each I/O command loads it, and a command that changes the reservation stores it before it
//! completes, so that the reservation is enforced on every core by then. A command that must wait for stable
//! storage or for I/O of other hosts to drain returns a [`PendingChange`].
//!
//! ```
//! use nvme_controller::reservation::{ReservationCommand, ReservationState, access};
//! use wire_nvme::reservation::*;
//! let register = ReservationRegister { action: RegisterAction::Register, ignore_key: false, persist: PersistChange::None };
//! let kind = ReservationType::WriteExclusive;
//! let acquire = ReservationAcquire { action: AcquireAction::Acquire, ignore_key: false, kind };
//! let (one, other) = ([1; 16], [2; 16]);
//! let mut state = ReservationState::default();
//! state.apply(one, &ReservationCommand::Register(register, 0, 0xa), false)?;
//! state.apply(one, &ReservationCommand::Acquire(acquire, 0xa, 0), false)?;
//! assert_eq!((state.denied(&one), state.denied(&other)), (0, access::WRITE));
//! # Ok::<(), block_io::Status>(())
//! ```

mod notifier;
mod state;

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use block_io::Status;
use wire_nvme::Sqe;
use wire_nvme::identify::rescap;
use wire_nvme::log::NotificationType;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::reservation::{
    KEYS_SIZE, Registrant, ReservationAcquire, ReservationRegister, ReservationRelease, ReservationReport,
    ReservationStatus, decode_keys,
};

use crate::{ControllerAssociation, ControllerDirectory, INVALID_FIELD};

pub(crate) use notifier::ReservationNotifiers;
pub use notifier::{DrainRequest, PendingChange, PendingCommands, PendingGuard, ReservationNotifier};
pub use state::{
    ActiveReservation, Effects, HostId, REGISTRANTS_MAX, Registration, ReservationCommand, ReservationState,
    access, denied,
};

/// The access to a namespace that reservations deny to a host: an atomic byte that I/O queues load and
/// reservation commands store. 0 without a reservation.
#[derive(Debug, Default)]
pub struct DenyMask(AtomicU8);

impl DenyMask {
    /// Whether commands of a class are denied; see [`access`].
    #[inline(always)]
    pub fn denies(&self, class: u8) -> bool {
        self.0.load(Ordering::Acquire) & class != 0
    }
}

/// Saves reservations that persist through power loss. Called with the namespace's lock held, in the order of
/// changes: the implementation queues the state and returns. It drops the guard when the state is on stable
/// storage.
pub trait ReservationStore: Send + Sync + std::fmt::Debug {
    /// Saves a state. One that is not [persistent](ReservationState::persistent) deletes the saved state.
    fn save(&self, state: &ReservationState, guard: PendingGuard);
}

/// Registrations and the reservation of one namespace, shared by all controllers that attach it.
///
/// It owns the [`ReservationState`] and a [`DenyMask`] for each connected host. A change runs under the lock:
/// it applies the command to the state, stores the masks and queues the state for the [`ReservationStore`].
/// After the lock it requests drains of preempted hosts and notifies the other cores. I/O costs one atomic
/// load and takes no lock.
#[derive(Debug, Default)]
pub struct Reservations {
    inner: Mutex<ReservationsInner>,
    store: Option<Box<dyn ReservationStore>>,
}

#[derive(Debug, Default)]
struct ReservationsInner {
    state: ReservationState,
    deny_masks: Vec<(HostId, Weak<DenyMask>)>,
}

/// Always equal: a change of reservations is not a change of the namespace's configuration, for which
/// snapshots are compared.
impl PartialEq for Reservations {
    fn eq(&self, _: &Reservations) -> bool {
        true
    }
}

impl Eq for Reservations {}

/// The controller that sends a reservation command, and the directory of the target's controllers.
#[derive(Clone, Debug)]
pub(crate) struct Requester {
    pub(crate) directory: Arc<ControllerDirectory>,
    pub(crate) association: Arc<ControllerAssociation>,
}

/// The result of a reservation command.
#[derive(Debug)]
pub enum ReservationOutcome {
    /// Completed with this status.
    Done(Status),
    /// Completed with success and this data for the host.
    Report(Vec<u8>),
    /// Completes when the change is no longer pending; every [`ReservationNotifier`] is notified then.
    Pending(Arc<PendingChange>),
}

impl Reservations {
    /// Reservations that can persist through power loss. `state` is the state that the store loaded.
    pub fn with_store(state: ReservationState, store: Box<dyn ReservationStore>) -> Reservations {
        Reservations {
            inner: Mutex::new(ReservationsInner { state, deny_masks: Vec::new() }),
            store: Some(store),
        }
    }

    /// Whether the state can persist through power loss.
    pub fn can_persist(&self) -> bool {
        self.store.is_some()
    }

    /// Reservation Capabilities (RESCAP) for Identify Namespace.
    pub fn capabilities(&self) -> u8 {
        rescap::ALL_TYPES | rescap::IGNORE_KEY | if self.can_persist() { rescap::PERSIST } else { 0 }
    }

    /// A copy of the current state.
    pub fn state(&self) -> ReservationState {
        self.lock().state.clone()
    }

    /// The mask that I/O commands of a host check; every change updates it.
    pub fn deny_mask(&self, host: &HostId) -> Arc<DenyMask> {
        let mut inner = self.lock();
        inner.deny_masks.retain(|(_, mask)| mask.strong_count() > 0);
        if let Some(mask) =
            inner.deny_masks.iter().find(|(of, _)| of == host).and_then(|(_, mask)| mask.upgrade())
        {
            return mask;
        }
        let mask = Arc::new(DenyMask(AtomicU8::new(inner.state.denied(host))));
        inner.deny_masks.push((*host, Arc::downgrade(&mask)));
        mask
    }

    fn lock(&self) -> MutexGuard<'_, ReservationsInner> {
        sync::lock(&self.inner)
    }

    /// Changes the state. Returns the effects and the completion of the change, which may be pending.
    fn update(
        &self,
        requester: &Requester,
        change: impl FnOnce(&mut ReservationState) -> Result<Effects, Status>,
    ) -> Result<(Effects, Arc<PendingChange>), Status> {
        let (pending, guard) = PendingChange::new(requester.directory.notifiers());
        let mut inner = self.lock();
        let before = inner.state.clone();
        let effects = change(&mut inner.state)?;
        if inner.state != before {
            let ReservationsInner { state, deny_masks } = &*inner;
            for (host, mask) in deny_masks {
                if let Some(mask) = mask.upgrade() {
                    mask.0.store(state.denied(host), Ordering::Release);
                }
            }
            if let Some(store) = self.store.as_ref().filter(|_| state.persistent || before.persistent) {
                store.save(state, guard.clone());
            }
        }
        drop(inner);
        if !effects.abort.is_empty() {
            let drain = DrainRequest {
                subnqn: requester.association.subnqn().clone(),
                hosts: effects.abort.clone().into(),
                guard: guard.clone(),
            };
            requester.directory.notifiers().notify_all(Some(&drain));
        }
        drop(guard);
        Ok((effects, pending))
    }

    /// Sets whether the state persists through power loss (the Reservation Persistence feature).
    ///
    /// # Errors
    /// Invalid Field without a [`ReservationStore`].
    pub(crate) fn set_persistent(
        &self,
        requester: &Requester,
        persistent: bool,
    ) -> Result<Arc<PendingChange>, Status> {
        if persistent && !self.can_persist() {
            return Err(INVALID_FIELD);
        }
        let (_, pending) = self.update(requester, |state| {
            state.persistent = persistent;
            Ok(Effects::default())
        })?;
        Ok(pending)
    }

    /// Executes a reservation command of a host. `sqe` needs only opcode and dwords 10 and 11; `data` is the
    /// host's data.
    pub(crate) fn execute(
        &self,
        requester: &Requester,
        nsid: u32,
        sqe: &Sqe,
        data: &[u8],
    ) -> ReservationOutcome {
        self.try_execute(requester, nsid, sqe, data).unwrap_or_else(ReservationOutcome::Done)
    }

    fn try_execute(
        &self,
        requester: &Requester,
        nsid: u32,
        sqe: &Sqe,
        data: &[u8],
    ) -> Result<ReservationOutcome, Status> {
        if sqe.opcode == NvmOpcode::ReservationReport.to_wire() {
            return self.report(requester, ReservationReport::from_sqe(sqe)).map(ReservationOutcome::Report);
        }
        let host = requester.association.host_id();
        // Hosts with a zero identifier are indistinguishable: the host must set one first.
        if host == [0; 16] {
            return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        }
        let command = decode_command(sqe, data)?;
        let (effects, pending) =
            self.update(requester, |state| state.apply(host, &command, self.can_persist()))?;
        let notifications = [
            (NotificationType::RegistrationPreempted, &effects.preempted),
            (NotificationType::ReservationReleased, &effects.released),
            (NotificationType::ReservationPreempted, &effects.cleared),
        ];
        if notifications.iter().any(|(_, hosts)| !hosts.is_empty()) {
            for association in requester.directory.controllers(requester.association.subnqn()) {
                for (kind, _) in
                    notifications.iter().filter(|(_, hosts)| hosts.contains(&association.host_id()))
                {
                    association.notify(nsid, *kind);
                }
            }
            requester.directory.notifiers().notify_all(None);
        }
        Ok(pending.outcome().map_or(ReservationOutcome::Pending(pending), ReservationOutcome::Done))
    }

    /// Reservation Report (Base 2.0, section 7.5): one entry per controller of a registered host.
    fn report(&self, requester: &Requester, report: ReservationReport) -> Result<Vec<u8>, Status> {
        // The data structure must match the length of host identifiers (Base 2.0, section 7.5: EDS).
        if requester.association.host_id_is_extended().is_some_and(|long| long != report.extended) {
            return Err(Status::HOST_ID_INCONSISTENT.do_not_retry());
        }
        let state = self.state();
        let controllers = requester.directory.controllers(requester.association.subnqn());
        let mut registrants = Vec::new();
        for Registration { host, key } in &state.registrations {
            let entry =
                |cntlid| Registrant { cntlid, holder: state.is_holder(host), host_id: *host, key: *key };
            let host_controllers = controllers.iter().filter(|association| association.host_id() == *host);
            let before = registrants.len();
            registrants.extend(host_controllers.map(|association| entry(association.cntlid())));
            if registrants.len() == before {
                // The host has no controller now. FFFFh: the dynamic controller model cannot predict its
                // identifier.
                registrants.push(entry(0xffff));
            }
        }
        let reservation = ReservationStatus {
            generation: state.generation,
            kind: state.reservation.map(|held| held.kind),
            persistent: state.persistent,
            registrants,
        };
        let mut data = vec![0; usize::try_from(report.length_bytes).map_err(|_| INVALID_FIELD)?];
        reservation.encode(report.extended, &mut data);
        Ok(data)
    }
}

/// Bytes of data that a reservation command transfers: to the host for Report, otherwise from the host.
pub(crate) fn data_bytes(opcode: NvmOpcode, sqe: &Sqe) -> u64 {
    match opcode {
        NvmOpcode::ReservationReport => ReservationReport::from_sqe(sqe).length_bytes,
        NvmOpcode::ReservationRelease => 8,
        _ => KEYS_SIZE as u64,
    }
}

fn decode_command(sqe: &Sqe, data: &[u8]) -> Result<ReservationCommand, Status> {
    let too_short = Status::DATA_SGL_LENGTH_INVALID.do_not_retry();
    let keys = || data.first_chunk::<KEYS_SIZE>().map(decode_keys).ok_or(too_short);
    match NvmOpcode::from_wire(sqe.opcode) {
        Some(NvmOpcode::ReservationRegister) => {
            let register = ReservationRegister::from_sqe(sqe).ok_or(INVALID_FIELD)?;
            let (current, new) = keys()?;
            Ok(ReservationCommand::Register(register, current, new))
        }
        Some(NvmOpcode::ReservationAcquire) => {
            let acquire = ReservationAcquire::from_sqe(sqe).ok_or(INVALID_FIELD)?;
            let (current, preempt) = keys()?;
            Ok(ReservationCommand::Acquire(acquire, current, preempt))
        }
        Some(NvmOpcode::ReservationRelease) => {
            // Clear ignores the reservation type (Base 2.0, section 7.4).
            let typed = Sqe { cdw10: sqe.cdw10 & !0xff00 | 1 << 8, ..*sqe };
            let is_clear = sqe.cdw10 & 7 == 1;
            let release =
                ReservationRelease::from_sqe(if is_clear { &typed } else { sqe }).ok_or(INVALID_FIELD)?;
            let key = data.first_chunk().copied().map(u64::from_le_bytes).ok_or(too_short)?;
            Ok(ReservationCommand::Release(release, key))
        }
        _ => Err(Status::INVALID_OPCODE.do_not_retry()),
    }
}
