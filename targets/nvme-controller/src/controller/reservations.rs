//! The reservation features of a controller: the notification log and its mask, persistence, which completes
//! when the change is on stable storage, and the host identifier.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use block_io::Status;
use wire_nvme::feature::{PERSIST_THROUGH_POWER_LOSS, reservation_mask};
use wire_nvme::log::{NotificationType, ReservationNotification};
use wire_nvme::{Cqe, NSID_ALL, Sqe};

use super::{AdminCompletion, AdminResponse, AdminResult, Controller, ControllerAction};
use crate::reservation::{PendingChange, Requester, outcome_status};
use crate::{INVALID_FIELD, SubsystemNamespace};

/// Most unread notifications: the log page can count 255.
const UNREAD_MAX: usize = 255;
/// Most Set Features commands that are pending: the longest admin queue.
const PENDING_MAX: usize = 4096;

/// Unread reservation notifications, their mask, and pending Set Features commands.
#[derive(Debug, Default)]
pub(super) struct ReservationNotifications {
    unread: VecDeque<ReservationNotification>,
    count: u64,
    // Notification mask by namespace identifier; 0 if absent.
    masks: BTreeMap<u32, u32>,
    pending: Vec<PendingFeature>,
}

#[derive(Debug)]
struct PendingFeature {
    cid: u16,
    changes: Vec<Arc<PendingChange>>,
}

impl ReservationNotifications {
    /// Whether a notification is unread.
    pub(super) fn has_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    /// The Reservation Notification log page: the oldest notification, which stays in the log.
    pub(super) fn page(&self) -> Vec<u8> {
        let available = self.unread.len().saturating_sub(1);
        let oldest = self.unread.front().copied().unwrap_or(ReservationNotification::EMPTY);
        let notification = ReservationNotification { available: available as u8, ..oldest };
        let mut page = [0; ReservationNotification::SIZE];
        notification.encode(&mut page);
        page.to_vec()
    }

    /// Removes the oldest notification after the host read it.
    pub(super) fn pop_oldest(&mut self) {
        self.unread.pop_front();
    }

    fn log(&mut self, nsid: u32, kind: NotificationType) {
        let bit = match kind {
            NotificationType::Empty => return,
            NotificationType::RegistrationPreempted => reservation_mask::REGISTRATION_PREEMPTED,
            NotificationType::ReservationReleased => reservation_mask::RESERVATION_RELEASED,
            NotificationType::ReservationPreempted => reservation_mask::RESERVATION_PREEMPTED,
        };
        if self.masks.get(&nsid).is_some_and(|mask| mask & bit != 0) {
            return;
        }
        self.count += 1;
        if self.unread.len() < UNREAD_MAX {
            let count = self.count;
            self.unread.push_back(ReservationNotification { count, kind, available: 0, nsid });
        }
    }

    /// A controller reset: aborts pending commands and discards notifications and masks.
    pub(super) fn reset(&mut self, actions: &mut Vec<ControllerAction>) {
        for PendingFeature { cid, .. } in std::mem::take(&mut self.pending) {
            complete(cid, Status::ABORT_REQUESTED, actions);
        }
        *self = ReservationNotifications::default();
    }
}

fn complete(cid: u16, status: Status, actions: &mut Vec<ControllerAction>) {
    actions
        .push(ControllerAction::Complete(AdminCompletion { cqe: Cqe::new(cid, status), data: Vec::new() }));
}

impl Controller {
    /// A [`ReservationNotifier`](crate::reservation::ReservationNotifier) was notified: logs new
    /// notifications and completes commands whose changes are no longer pending.
    pub(super) fn reservation_changed(&mut self, actions: &mut Vec<ControllerAction>) {
        let (notifications, dropped) = self.association().take_notifications();
        let unread_before = self.notifications.unread.len();
        for (nsid, kind) in notifications {
            self.notifications.log(nsid, kind);
        }
        self.notifications.count += dropped;
        if self.notifications.unread.len() > unread_before {
            self.events.reservation_logged();
        }
        self.notifications.pending.retain(|PendingFeature { cid, changes }| {
            let outcomes: Option<Vec<Status>> = changes.iter().map(|change| outcome_status(change)).collect();
            let Some(outcomes) = outcomes else { return true };
            let failed = outcomes.into_iter().find(|status| !status.is_success());
            complete(*cid, failed.unwrap_or(Status::SUCCESS), actions);
            false
        });
    }

    /// The namespace that a reservation feature applies to.
    fn find_namespace(&self, nsid: u32) -> Result<&SubsystemNamespace, Status> {
        let invalid = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
        self.view.namespace(nsid).ok_or(invalid)
    }

    fn find_namespaces(&self, nsid: u32) -> Result<Vec<&SubsystemNamespace>, Status> {
        match nsid {
            NSID_ALL => Ok(self.view.namespaces.iter().collect()),
            nsid => Ok(vec![self.find_namespace(nsid)?]),
        }
    }

    /// Reservation Notification Mask (Base 2.0, section 5.27.1).
    pub(super) fn reservation_mask(&self, nsid: u32) -> Result<u32, Status> {
        self.find_namespace(nsid)?;
        Ok(self.notifications.masks.get(&nsid).copied().unwrap_or(0))
    }

    pub(super) fn set_reservation_mask(&mut self, nsid: u32, mask: u32) -> AdminResult {
        let nsids: Vec<u32> = self.find_namespaces(nsid)?.iter().map(|namespace| namespace.nsid).collect();
        self.notifications.masks.extend(nsids.into_iter().map(|nsid| (nsid, mask)));
        AdminResponse::empty()
    }

    /// Reservation Persistence (Base 2.0, section 5.27.1).
    pub(super) fn reservation_persistence(&self, nsid: u32) -> Result<u32, Status> {
        Ok(u32::from(self.find_namespace(nsid)?.reservations.state().persistent) * PERSIST_THROUGH_POWER_LOSS)
    }

    pub(super) fn set_reservation_persistence(&mut self, sqe: &Sqe, value: u32) -> AdminResult {
        if self.notifications.pending.len() == PENDING_MAX {
            return Err(Status::COMMAND_INTERRUPTED);
        }
        let persistent = value & PERSIST_THROUGH_POWER_LOSS != 0;
        let requester = Requester {
            directory: self.registration.directory.clone(),
            association: self.registration.association.clone(),
        };
        let mut changes = Vec::new();
        for namespace in self.find_namespaces(sqe.nsid)? {
            match namespace.reservations.set_persistent(&requester, persistent) {
                Ok(pending) => changes.push(pending),
                // FFFFFFFFh applies to the namespaces that support it (as in SPDK).
                Err(_) if sqe.nsid == NSID_ALL => {}
                Err(status) => return Err(status),
            }
        }
        let is_saved =
            |changes: &[Arc<PendingChange>]| changes.iter().all(|change| change.outcome() == Some(Ok(())));
        if is_saved(&changes) {
            return AdminResponse::empty();
        }
        self.notifications.pending.push(PendingFeature { cid: sqe.cid, changes });
        // A change that completed meanwhile has notified the notifier, so this entry is checked again.
        Ok(AdminResponse { deferred: true, ..AdminResponse::default() })
    }

    /// Sets the Host Identifier (Base 2.0, section 5.27.1) on a memory-based transport, which has no Connect.
    pub(super) fn set_host_id(&mut self, cdw11: u32, data: &[u8]) -> AdminResult {
        let extended = cdw11 & wire_nvme::feature::HOST_ID_EXTENDED != 0;
        let bytes = if extended { 16 } else { 8 };
        let given = data.get(..bytes).ok_or(Status::DATA_SGL_LENGTH_INVALID.do_not_retry())?;
        let mut host_id = [0; 16];
        host_id[..bytes].copy_from_slice(given);
        if host_id == [0; 16] {
            // Zero means none: the controller keeps its generated identifier.
            return if self.association().host_id_is_extended().is_none() {
                AdminResponse::empty()
            } else {
                Err(INVALID_FIELD)
            };
        }
        // All controllers of a subsystem use one length, so that a host has one identity on all of them.
        let others = self.registration.directory.controllers(&self.view.nqn);
        if others.iter().any(|other| {
            other.cntlid() != self.association().cntlid()
                && other.host_id_is_extended().is_some_and(|theirs| theirs != extended)
        }) {
            return Err(Status::HOST_ID_INCONSISTENT.do_not_retry());
        }
        if self.association().set_host_id(host_id, extended) {
            return AdminResponse::empty();
        }
        // Another identifier is already set, and registrations may exist under it.
        Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry())
    }

    /// Get Features of the Host Identifier; zeroes until the host sets it.
    pub(super) fn host_id(&self, cdw11: u32) -> Result<Vec<u8>, Status> {
        let extended = cdw11 & wire_nvme::feature::HOST_ID_EXTENDED != 0;
        let bytes = if extended { 16 } else { 8 };
        match self.association().host_id_is_extended() {
            None => Ok(vec![0; bytes]),
            Some(is_extended) if is_extended == extended => {
                Ok(self.association().host_id()[..bytes].to_vec())
            }
            // Over fabrics host identifiers are 128 bits long.
            Some(_) if !self.limits.memory_based => Err(INVALID_FIELD),
            Some(_) => Err(Status::HOST_ID_INCONSISTENT.do_not_retry()),
        }
    }
}
