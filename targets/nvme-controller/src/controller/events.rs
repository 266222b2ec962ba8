//! Asynchronous events (Base 2.0, section 5.2).

use std::collections::{BTreeSet, VecDeque};

use block_io::Status;
use wire_nvme::Cqe;
use wire_nvme::aer::AsyncEvent;
use wire_nvme::feature::AsyncEventConfiguration;
use wire_nvme::identify::NAMESPACE_LIST_MAX;

use super::{AdminCompletion, ControllerAction};
use crate::Subsystem;

/// Outstanding Asynchronous Event Requests, and events that no request has reported yet.
#[derive(Debug)]
pub(super) struct AsyncEvents {
    requests: VecDeque<u16>,
    requests_max: usize,
    events: [EventState; 7],
    changed: BTreeSet<u32>,
    ana_changes: u64,
}

#[derive(Debug)]
struct EventState {
    event: AsyncEvent,
    enabled_by: AsyncEventConfiguration,
    // The event occurred and no request has reported it yet.
    pending: bool,
    // Reported, and masked until the host reads the log page (Base 2.0, section 5.2).
    masked: bool,
}

const NAMESPACE: usize = 0;
const ANA: usize = 1;
const DISCOVERY: usize = 2;
const DOORBELL: usize = 3;
const DOORBELL_VALUE: usize = 4;
const RESERVATION: usize = 5;
const TEMPERATURE: usize = 6;

/// Not masked by any bit of the configuration.
const ALWAYS: AsyncEventConfiguration = AsyncEventConfiguration::empty();

impl AsyncEvents {
    pub(super) fn new(requests_max: u16) -> AsyncEvents {
        let event = |event, enabled_by| EventState { event, enabled_by, pending: false, masked: false };
        AsyncEvents {
            requests: VecDeque::with_capacity(requests_max.into()),
            requests_max: requests_max.into(),
            events: [
                event(AsyncEvent::NAMESPACE_CHANGED, AsyncEventConfiguration::NAMESPACE),
                event(AsyncEvent::ANA_CHANGED, AsyncEventConfiguration::ANA),
                event(AsyncEvent::DISCOVERY_CHANGED, AsyncEventConfiguration::DISCOVERY),
                // The configuration does not mask error events (Base 2.0, section 5.2.1).
                event(AsyncEvent::INVALID_DOORBELL, ALWAYS),
                event(AsyncEvent::INVALID_DOORBELL_VALUE, ALWAYS),
                // The Reservation Notification Mask feature masks it, before the notification is logged.
                event(AsyncEvent::RESERVATION_LOG, ALWAYS),
                event(AsyncEvent::TEMPERATURE, AsyncEventConfiguration::TEMPERATURE),
            ],
            changed: BTreeSet::new(),
            ana_changes: 0,
        }
    }

    /// Accepts an Asynchronous Event Request, which [`deliver`](Self::deliver) completes.
    pub(super) fn add_request(&mut self, cid: u16) -> Result<(), Status> {
        if self.requests.len() == self.requests_max {
            return Err(Status::ASYNC_EVENT_LIMIT_EXCEEDED.do_not_retry());
        }
        if self.requests.contains(&cid) {
            return Err(Status::COMMAND_ID_CONFLICT.do_not_retry());
        }
        self.requests.push_back(cid);
        Ok(())
    }

    /// Aborts an outstanding request. Returns whether one had this identifier.
    pub(super) fn abort(&mut self, cid: u16, actions: &mut Vec<ControllerAction>) -> bool {
        let Some(index) = self.requests.iter().position(|&request| request == cid) else {
            return false;
        };
        self.requests.remove(index);
        complete(Cqe::new(cid, Status::ABORT_REQUESTED), actions);
        true
    }

    /// Aborts all requests and discards all events.
    pub(super) fn reset(&mut self, actions: &mut Vec<ControllerAction>) {
        for cid in std::mem::take(&mut self.requests) {
            complete(Cqe::new(cid, Status::ABORT_REQUESTED), actions);
        }
        self.changed.clear();
        for event in &mut self.events {
            (event.pending, event.masked) = (false, false);
        }
    }

    /// Raises events for the differences between two snapshots of the subsystem.
    pub(super) fn subsystem_changed(&mut self, before: &Subsystem, after: &Subsystem, portid: u16) {
        let all: BTreeSet<u32> =
            before.namespaces.iter().chain(&after.namespaces).map(|namespace| namespace.nsid).collect();
        let changed: Vec<u32> =
            all.into_iter().filter(|&nsid| before.namespace(nsid) != after.namespace(nsid)).collect();
        if !changed.is_empty() {
            self.changed.extend(changed);
            self.events[NAMESPACE].pending = true;
        }
        let states = |subsystem: &Subsystem| -> Vec<_> {
            subsystem
                .ana_groups()
                .into_iter()
                .map(|group| (group, subsystem.ana_state(portid, group)))
                .collect()
        };
        if after.ana_reporting && states(before) != states(after) {
            self.ana_changes += 1;
            self.events[ANA].pending = true;
        }
    }

    pub(super) fn discovery_changed(&mut self) {
        self.events[DISCOVERY].pending = true;
    }

    /// Raises the event for unread reservation notifications.
    pub(super) fn reservation_logged(&mut self) {
        self.events[RESERVATION].pending = true;
    }

    /// Raises or clears the event for a temperature at or beyond a threshold.
    pub(super) fn set_temperature_exceeded(&mut self, is_beyond: bool) {
        self.events[TEMPERATURE].pending = is_beyond;
    }

    /// Raises the event for an invalid value of a doorbell or, unless it `exists`, for an invalid doorbell.
    pub(super) fn invalid_doorbell(&mut self, exists: bool) {
        self.events[if exists { DOORBELL_VALUE } else { DOORBELL }].pending = true;
    }

    /// Change count of the ANA log page.
    pub(super) fn ana_changes(&self) -> u64 {
        self.ana_changes
    }

    /// The Changed Namespace List (Base 2.0, section 5.16.1.5): only FFFFFFFFh if more identifiers changed
    /// than fit.
    pub(super) fn changed_namespaces(&self) -> Vec<u32> {
        if self.changed.len() > NAMESPACE_LIST_MAX {
            return vec![wire_nvme::NSID_ALL];
        }
        self.changed.iter().copied().collect()
    }

    /// The host read a log page without Retain Asynchronous Event: unmasks its events.
    pub(super) fn log_read(&mut self, log_page: u8) {
        for event in &mut self.events {
            if event.event.log_page == log_page {
                (event.pending, event.masked) = (false, false);
            }
        }
        if log_page == AsyncEvent::NAMESPACE_CHANGED.log_page {
            self.changed.clear();
        }
    }

    /// Completes requests with the pending events that are enabled.
    pub(super) fn deliver(&mut self, enabled: AsyncEventConfiguration, actions: &mut Vec<ControllerAction>) {
        for event in &mut self.events {
            if !event.pending || event.masked || !enabled.contains(event.enabled_by) {
                continue;
            }
            let Some(cid) = self.requests.pop_front() else {
                return;
            };
            (event.pending, event.masked) = (false, true);
            complete(Cqe::new(cid, Status::SUCCESS).with_result(event.event.to_result()), actions);
        }
    }
}

fn complete(cqe: Cqe, actions: &mut Vec<ControllerAction>) {
    actions.push(ControllerAction::Complete(AdminCompletion { cqe, data: Vec::new() }));
}
