//! Reservations, which control the access of several hosts to a shared namespace (Base 2.0, section 8.19):
//! the NVMe face of [`reservations::Reservations`], which the namespaces of one block device share with every
//! other target.
//!
//! [`NamespaceReservations`] decodes commands, maps outcomes to status codes, reports the controllers of
//! registered hosts, and turns notices into log pages. I/O commands check a [`DenyMask`], one byte per host
//! and namespace. A command that must wait for stable storage or for I/O of other hosts to drain returns a
//! [`PendingChange`].

mod notifier;

#[cfg(test)]
mod tests;

use std::sync::{Arc, OnceLock, Weak};

use block_io::Status;
use reservations::{
    LossEvent, Registrant, Registration, ReservationCommand, ReservationError, ReservationNotice,
    ReservationState, ReservationSubscriber, ReservationType, Reservations,
};
use wire_nvme::Sqe;
use wire_nvme::fabrics::Nqn;
use wire_nvme::identify::rescap;
use wire_nvme::log::NotificationType;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::reservation::{
    self as wire, AcquireAction, KEYS_SIZE, PersistChange, RegisterAction, ReleaseAction, ReservationAcquire,
    ReservationRegister, ReservationRelease, ReservationReport, ReservationStatus, decode_keys,
};

use crate::{ControllerAssociation, ControllerDirectory, INVALID_FIELD};

pub(crate) use notifier::ReservationNotifiers;
pub use notifier::{DrainGuards, DrainRequest, PREEMPT_TIMEOUT_NS, PendingCommands, ReservationNotifier};
pub use reservations::{DenyMask, PendingChange, PendingGuard, access};

/// A host identifier. A 64-bit identifier occupies the first eight bytes.
pub type HostId = [u8; 16];

/// The reservations of a namespace: those of its block device, as the hosts of its subsystem see them.
///
/// Shared by all snapshots of the namespace. It subscribes to the device's [`Reservations`] when the first
/// controller attaches the namespace, and notifies the controllers of its own subsystem.
#[derive(Debug, Default)]
pub struct NamespaceReservations {
    device: Arc<Reservations>,
    subscription: OnceLock<Arc<NamespaceSubscription>>,
}

/// Where the notices and aborts of a namespace's hosts go.
#[derive(Debug)]
struct NamespaceSubscription {
    directory: Weak<ControllerDirectory>,
    subnqn: Nqn,
    nsid: u32,
}

/// Always equal: a change of reservations is not a change of the namespace's configuration, for which
/// snapshots are compared.
impl PartialEq for NamespaceReservations {
    fn eq(&self, _: &NamespaceReservations) -> bool {
        true
    }
}

impl Eq for NamespaceReservations {}

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

impl ReservationSubscriber for NamespaceSubscription {
    fn notify(&self, notices: &[ReservationNotice]) {
        let Some(directory) = self.directory.upgrade() else { return };
        for association in directory.controllers(&self.subnqn) {
            let registrant = Registrant::nvme_host(association.host_id());
            for notice in notices.iter().filter(|notice| notice.registrant == registrant) {
                association.notify(self.nsid, notification_type(notice.event));
            }
        }
        directory.notifiers().notify_all(None);
    }

    fn abort(&self, registrants: &[Registrant], guard: &PendingGuard) {
        let Some(directory) = self.directory.upgrade() else { return };
        let hosts: Arc<[HostId]> = registrants.iter().filter_map(Registrant::nvme_host_id).collect();
        if !hosts.is_empty() {
            let drain = DrainRequest { subnqn: self.subnqn.clone(), hosts, guard: guard.clone() };
            directory.notifiers().notify_all(Some(&drain));
        }
    }
}

impl NamespaceReservations {
    /// The reservations of a namespace on a device.
    pub fn new(device: Arc<Reservations>) -> NamespaceReservations {
        NamespaceReservations { device, subscription: OnceLock::new() }
    }

    /// Reservation Capabilities (RESCAP) for Identify Namespace.
    pub fn capabilities(&self) -> u8 {
        let persist = if self.device.can_persist() { rescap::PERSIST } else { 0 };
        rescap::ALL_TYPES | rescap::IGNORE_KEY | persist
    }

    /// A copy of the state in force.
    pub fn state(&self) -> ReservationState {
        self.device.state()
    }

    /// Attaches a controller: returns the mask that I/O commands of its host check; every change updates it.
    pub(crate) fn attach(&self, requester: &Requester, nsid: u32) -> Arc<DenyMask> {
        let association = &requester.association;
        self.subscription.get_or_init(|| {
            let directory = Arc::downgrade(&requester.directory);
            let subnqn = association.subnqn().clone();
            let subscription = Arc::new(NamespaceSubscription { directory, subnqn, nsid });
            self.device.subscribe(&subscription);
            subscription
        });
        self.device.deny_mask(&Registrant::nvme_host(association.host_id()))
    }

    fn change(&self, requester: &Requester, command: ReservationCommand) -> Arc<PendingChange> {
        let registrant = Registrant::nvme_host(requester.association.host_id());
        self.device.execute(&registrant, command, requester.directory.notifiers())
    }

    /// Sets whether the state persists through power loss (the Reservation Persistence feature).
    ///
    /// # Errors
    /// Invalid Field if the device has no file for it.
    pub(crate) fn set_persistent(
        &self,
        requester: &Requester,
        persistent: bool,
    ) -> Result<Arc<PendingChange>, Status> {
        if persistent && !self.device.can_persist() {
            return Err(INVALID_FIELD);
        }
        Ok(self.change(requester, ReservationCommand::SetPersistent(persistent)))
    }

    /// Executes a reservation command of a host. `sqe` needs only opcode and dwords 10 and 11; `data` is the
    /// host's data.
    pub(crate) fn execute(&self, requester: &Requester, sqe: &Sqe, data: &[u8]) -> ReservationOutcome {
        self.try_execute(requester, sqe, data).unwrap_or_else(ReservationOutcome::Done)
    }

    fn try_execute(
        &self,
        requester: &Requester,
        sqe: &Sqe,
        data: &[u8],
    ) -> Result<ReservationOutcome, Status> {
        if sqe.opcode == NvmOpcode::ReservationReport.to_wire() {
            return self.report(requester, ReservationReport::from_sqe(sqe)).map(ReservationOutcome::Report);
        }
        // Hosts with a zero identifier are indistinguishable: the host must set one first.
        if requester.association.host_id() == [0; 16] {
            return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        }
        let pending = self.change(requester, decode_command(sqe, data)?);
        Ok(outcome_status(&pending).map_or(ReservationOutcome::Pending(pending), ReservationOutcome::Done))
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
        for Registration { registrant, key } in &state.registrations {
            // A registrant of another protocol has no host identifier: zero, which no host can register with.
            let host_id = registrant.nvme_host_id().unwrap_or_default();
            let holder = state.is_holder(registrant);
            let entry = |cntlid| wire::RegisteredController { cntlid, holder, host_id, key: *key };
            let host_controllers = controllers
                .iter()
                .filter(|association| *registrant == Registrant::nvme_host(association.host_id()));
            let before = registrants.len();
            registrants.extend(host_controllers.map(|association| entry(association.cntlid())));
            if registrants.len() == before {
                // The registrant has no controller here. FFFFh: the dynamic controller model cannot predict
                // its identifier.
                registrants.push(entry(0xffff));
            }
        }
        let reservation = ReservationStatus {
            generation: state.generation,
            kind: state.reservation.map(|held| type_to_wire(held.kind)),
            persistent: state.persistent,
            registrants,
        };
        let mut data = vec![0; usize::try_from(report.length_bytes).map_err(|_| INVALID_FIELD)?];
        reservation.encode(report.extended, &mut data);
        Ok(data)
    }
}

/// The status to complete a command with; `None` while its change is pending.
pub(crate) fn outcome_status(pending: &PendingChange) -> Option<Status> {
    Some(match pending.outcome()? {
        Ok(()) => Status::SUCCESS,
        Err(ReservationError::Conflict) => Status::RESERVATION_CONFLICT.do_not_retry(),
        Err(ReservationError::ZeroKey | ReservationError::WrongType | ReservationError::CannotPersist) => {
            INVALID_FIELD
        }
        Err(ReservationError::TooManyRegistrants) => Status::INTERNAL_ERROR.do_not_retry(),
        Err(ReservationError::NotSaved | ReservationError::NotDrained) => Status::INTERNAL_ERROR,
        Err(ReservationError::Busy) => Status::COMMAND_INTERRUPTED,
    })
}

fn notification_type(event: LossEvent) -> NotificationType {
    match event {
        LossEvent::RegistrationPreempted => NotificationType::RegistrationPreempted,
        LossEvent::ReservationReleased => NotificationType::ReservationReleased,
        LossEvent::ReservationPreempted => NotificationType::ReservationPreempted,
    }
}

fn type_from_wire(kind: wire::ReservationType) -> ReservationType {
    match kind {
        wire::ReservationType::WriteExclusive => ReservationType::WriteExclusive,
        wire::ReservationType::ExclusiveAccess => ReservationType::ExclusiveAccess,
        wire::ReservationType::WriteExclusiveRegistrants => ReservationType::WriteExclusiveRegistrants,
        wire::ReservationType::ExclusiveAccessRegistrants => ReservationType::ExclusiveAccessRegistrants,
        wire::ReservationType::WriteExclusiveAll => ReservationType::WriteExclusiveAll,
        wire::ReservationType::ExclusiveAccessAll => ReservationType::ExclusiveAccessAll,
    }
}

fn type_to_wire(kind: ReservationType) -> wire::ReservationType {
    match kind {
        ReservationType::WriteExclusive => wire::ReservationType::WriteExclusive,
        ReservationType::ExclusiveAccess => wire::ReservationType::ExclusiveAccess,
        ReservationType::WriteExclusiveRegistrants => wire::ReservationType::WriteExclusiveRegistrants,
        ReservationType::ExclusiveAccessRegistrants => wire::ReservationType::ExclusiveAccessRegistrants,
        ReservationType::WriteExclusiveAll => wire::ReservationType::WriteExclusiveAll,
        ReservationType::ExclusiveAccessAll => wire::ReservationType::ExclusiveAccessAll,
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
            let (current, key) = keys()?;
            let persist = match register.persist {
                PersistChange::None => None,
                PersistChange::Volatile => Some(false),
                PersistChange::Persistent => Some(true),
            };
            let expected = (!register.ignore_key).then_some(current);
            Ok(match register.action {
                RegisterAction::Register => ReservationCommand::Register { key, persist },
                RegisterAction::Replace => ReservationCommand::Replace { expected, key, persist },
                RegisterAction::Unregister => ReservationCommand::Unregister { expected, persist },
            })
        }
        Some(NvmOpcode::ReservationAcquire) => {
            let acquire = ReservationAcquire::from_sqe(sqe).ok_or(INVALID_FIELD)?;
            let (key, victim) = keys()?;
            check_ignore_key(acquire.ignore_key)?;
            let kind = type_from_wire(acquire.kind);
            let preempt = |abort| ReservationCommand::Preempt { key, victim, kind, abort };
            Ok(match acquire.action {
                AcquireAction::Acquire => ReservationCommand::Acquire { key, kind },
                AcquireAction::Preempt => preempt(false),
                AcquireAction::PreemptAndAbort => preempt(true),
            })
        }
        Some(NvmOpcode::ReservationRelease) => {
            // Clear ignores the reservation type (Base 2.0, section 7.4).
            let typed = Sqe { cdw10: sqe.cdw10 & !0xff00 | 1 << 8, ..*sqe };
            let is_clear = sqe.cdw10 & 7 == 1;
            let release =
                ReservationRelease::from_sqe(if is_clear { &typed } else { sqe }).ok_or(INVALID_FIELD)?;
            let key = data.first_chunk().copied().map(u64::from_le_bytes).ok_or(too_short)?;
            check_ignore_key(release.ignore_key)?;
            Ok(match release.action {
                ReleaseAction::Release => {
                    ReservationCommand::Release { key, kind: type_from_wire(release.kind) }
                }
                ReleaseAction::Clear => ReservationCommand::Clear { key },
            })
        }
        _ => Err(Status::INVALID_OPCODE.do_not_retry()),
    }
}

/// IEKEY must be clear in Acquire and Release (Base 2.0, sections 7.2 and 7.4).
fn check_ignore_key(ignore_key: bool) -> Result<(), Status> {
    if ignore_key { Err(INVALID_FIELD) } else { Ok(()) }
}
