//! What a controller knows of reservations: notifications, what the host does not want to know of, and features
//! that are answered when they are kept.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use ring::Status;
use wire_nvme::feature::{PERSIST_THROUGH_POWER_LOSS, reservation_mask};
use wire_nvme::log::{NotificationType, ReservationNotification};
use wire_nvme::{Cqe, NSID_ALL, Sqe};

use super::{Action, Answer, Completion, Controller, Reply};
use crate::reservation::{Pending, Seat};
use crate::{INVALID_FIELD, Namespace};

/// Notifications that can be unread: as many as the page can tell of.
const UNREAD_MAX: usize = 255;
/// Commands that can wait to be kept. An admin queue is not longer.
const WAITING_MAX: usize = 4096;

/// Notifications and what waits.
#[derive(Debug, Default)]
pub(super) struct Notifications {
    unread: VecDeque<ReservationNotification>,
    count: u64,
    // By namespace; none is 0.
    masks: BTreeMap<u32, u32>,
    waiting: Vec<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    cid: u16,
    all: Vec<Arc<Pending>>,
}

impl Notifications {
    /// Whether there is something to read.
    pub(super) fn is_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    /// The oldest, as the log page tells it; it stays.
    pub(super) fn page(&self) -> Vec<u8> {
        let available = self.unread.len().saturating_sub(1);
        let oldest = self.unread.front().copied().unwrap_or(ReservationNotification::EMPTY);
        let notification = ReservationNotification { available: available as u8, ..oldest };
        let mut page = [0; ReservationNotification::SIZE];
        notification.encode(&mut page);
        page.to_vec()
    }

    /// The host has read the oldest.
    pub(super) fn read(&mut self) {
        self.unread.pop_front();
    }

    fn note(&mut self, nsid: u32, kind: NotificationType) {
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

    /// A reset: what waits is aborted, what was noted is forgotten.
    pub(super) fn reset(&mut self, actions: &mut Vec<Action>) {
        for Waiting { cid, .. } in std::mem::take(&mut self.waiting) {
            complete(cid, Status::ABORT_REQUESTED, actions);
        }
        *self = Notifications::default();
    }
}

fn complete(cid: u16, status: Status, actions: &mut Vec<Action>) {
    actions.push(Action::Complete(Completion { cqe: Cqe::new(cid, status), data: Vec::new() }));
}

impl Controller {
    /// A [`Bell`](crate::reservation::Bell) rang: there may be notifications, and commands to answer.
    pub(super) fn look(&mut self, actions: &mut Vec<Action>) {
        let (notices, lost) = self.association().take_notices();
        let was = self.notifications.unread.len();
        for (nsid, kind) in notices {
            self.notifications.note(nsid, kind);
        }
        self.notifications.count += lost;
        if self.notifications.unread.len() > was {
            self.events.reservation_logged();
        }
        self.notifications.waiting.retain(|Waiting { cid, all }| {
            let outcomes: Option<Vec<Status>> = all.iter().map(|one| one.outcome()).collect();
            let Some(outcomes) = outcomes else { return true };
            let failed = outcomes.into_iter().find(|status| !status.is_success());
            complete(*cid, failed.unwrap_or(Status::SUCCESS), actions);
            false
        });
    }

    /// The namespace that a feature of reservations is about.
    fn reserved(&self, nsid: u32) -> Result<&Namespace, Status> {
        let none = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
        self.subsystem.namespace(nsid).ok_or(none)
    }

    fn reserved_or_all(&self, nsid: u32) -> Result<Vec<&Namespace>, Status> {
        match nsid {
            NSID_ALL => Ok(self.subsystem.namespaces.iter().collect()),
            nsid => Ok(vec![self.reserved(nsid)?]),
        }
    }

    /// Reservation Notification Mask (Base 2.0, section 5.27.1).
    pub(super) fn reservation_mask(&self, nsid: u32) -> Result<u32, Status> {
        self.reserved(nsid)?;
        Ok(self.notifications.masks.get(&nsid).copied().unwrap_or(0))
    }

    pub(super) fn set_reservation_mask(&mut self, nsid: u32, mask: u32) -> Answer {
        let nsids: Vec<u32> = self.reserved_or_all(nsid)?.iter().map(|namespace| namespace.nsid).collect();
        self.notifications.masks.extend(nsids.into_iter().map(|nsid| (nsid, mask)));
        Reply::none()
    }

    /// Reservation Persistence (Base 2.0, section 5.27.1).
    pub(super) fn reservation_persistence(&self, nsid: u32) -> Result<u32, Status> {
        Ok(u32::from(self.reserved(nsid)?.reservations.state().persistent) * PERSIST_THROUGH_POWER_LOSS)
    }

    pub(super) fn set_reservation_persistence(&mut self, sqe: &Sqe, value: u32) -> Answer {
        if self.notifications.waiting.len() == WAITING_MAX {
            return Err(Status::COMMAND_INTERRUPTED);
        }
        let persistent = value & PERSIST_THROUGH_POWER_LOSS != 0;
        let seat = Seat {
            directory: self.membership.directory.clone(),
            association: self.membership.association.clone(),
        };
        let mut all = Vec::new();
        for namespace in self.reserved_or_all(sqe.nsid)? {
            match namespace.reservations.persist(&seat, persistent) {
                Ok(pending) => all.push(pending),
                // Of all namespaces those are meant that can (as SPDK does).
                Err(_) if sqe.nsid == NSID_ALL => {}
                Err(status) => return Err(status),
            }
        }
        let is_kept = |all: &[Arc<Pending>]| all.iter().all(|one| one.outcome() == Some(Status::SUCCESS));
        if is_kept(&all) {
            return Reply::none();
        }
        self.notifications.waiting.push(Waiting { cid: sqe.cid, all });
        // Whatever was kept meanwhile has rung the bell.
        Ok(Reply { is_later: true, ..Reply::default() })
    }

    /// Host Identifier (Base 2.0, section 5.27.1), where no Connect has told it.
    pub(super) fn set_host_id(&mut self, cdw11: u32, data: &[u8]) -> Answer {
        let long = cdw11 & wire_nvme::feature::HOST_ID_EXTENDED != 0;
        let bytes = if long { 16 } else { 8 };
        let given = data.get(..bytes).ok_or(Status::DATA_SGL_LENGTH_INVALID.do_not_retry())?;
        let mut host_id = [0; 16];
        host_id[..bytes].copy_from_slice(given);
        if host_id == [0; 16] {
            // It stays a host of its own.
            return if self.association().id_is_long().is_none() {
                Reply::none()
            } else {
                Err(INVALID_FIELD)
            };
        }
        // One length for all of the subsystem, so that a host is one wherever it comes in.
        let others = self.membership.directory.controllers(&self.subsystem.nqn);
        if others.iter().any(|other| {
            other.cntlid() != self.association().cntlid()
                && other.id_is_long().is_some_and(|theirs| theirs != long)
        }) {
            return Err(Status::HOST_ID_INCONSISTENT.do_not_retry());
        }
        if self.association().set_host_id(host_id, long) {
            return Reply::none();
        }
        // It was another before, under which there may be registrations.
        Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry())
    }

    /// Get Features of the Host Identifier: zeroes while the host has not said who it is.
    pub(super) fn host_id(&self, cdw11: u32) -> Result<Vec<u8>, Status> {
        let long = cdw11 & wire_nvme::feature::HOST_ID_EXTENDED != 0;
        let bytes = if long { 16 } else { 8 };
        match self.association().id_is_long() {
            None => Ok(vec![0; bytes]),
            Some(is_long) if is_long == long => Ok(self.association().host_id()[..bytes].to_vec()),
            // Over fabrics host identifiers are 128 bits long.
            Some(_) if !self.limits.memory_based => Err(INVALID_FIELD),
            Some(_) => Err(Status::HOST_ID_INCONSISTENT.do_not_retry()),
        }
    }
}
