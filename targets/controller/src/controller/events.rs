//! Asynchronous events (Base 2.0, section 5.2).

use std::collections::{BTreeSet, VecDeque};

use ring::Status;
use wire_nvme::Cqe;
use wire_nvme::aer::AsyncEvent;
use wire_nvme::feature::AsyncEventConfiguration;
use wire_nvme::identify::NAMESPACE_LIST_MAX;

use super::{Action, Completion};
use crate::Subsystem;

/// Requests that wait for an event, and events that wait for a request.
#[derive(Debug)]
pub(super) struct Events {
    requests: VecDeque<u16>,
    requests_max: usize,
    notices: [Notice; 7],
    changed: BTreeSet<u32>,
    ana_changes: u64,
}

#[derive(Debug)]
struct Notice {
    event: AsyncEvent,
    enabled_by: u32,
    // An event has happened that no request has been completed with.
    pending: bool,
    // The host was told and has not read the log page since: it will not be told again.
    masked: bool,
}

const NAMESPACE: usize = 0;
const ANA: usize = 1;
const DISCOVERY: usize = 2;
const DOORBELL: usize = 3;
const DOORBELL_VALUE: usize = 4;
const RESERVATION: usize = 5;
const TEMPERATURE: usize = 6;

/// No bit of the configuration switches it off.
const ALWAYS: u32 = 0;

impl Events {
    pub(super) fn new(requests_max: u16) -> Events {
        let notice = |event, enabled_by| Notice { event, enabled_by, pending: false, masked: false };
        Events {
            requests: VecDeque::with_capacity(requests_max.into()),
            requests_max: requests_max.into(),
            notices: [
                notice(AsyncEvent::NAMESPACE_CHANGED, AsyncEventConfiguration::NAMESPACE),
                notice(AsyncEvent::ANA_CHANGED, AsyncEventConfiguration::ANA),
                notice(AsyncEvent::DISCOVERY_CHANGED, AsyncEventConfiguration::DISCOVERY),
                // Errors are told of whatever the configuration says (Base 2.0, section 5.2.1).
                notice(AsyncEvent::INVALID_DOORBELL, ALWAYS),
                notice(AsyncEvent::INVALID_DOORBELL_VALUE, ALWAYS),
                // Masked by a feature of its own, before anything is logged.
                notice(AsyncEvent::RESERVATION_LOG, ALWAYS),
                notice(AsyncEvent::TEMPERATURE, AsyncEventConfiguration::TEMPERATURE),
            ],
            changed: BTreeSet::new(),
            ana_changes: 0,
        }
    }

    /// Takes a request, to be completed later.
    pub(super) fn request(&mut self, cid: u16) -> Result<(), Status> {
        if self.requests.len() == self.requests_max {
            return Err(Status::ASYNC_EVENT_LIMIT_EXCEEDED.do_not_retry());
        }
        if self.requests.contains(&cid) {
            return Err(Status::COMMAND_ID_CONFLICT.do_not_retry());
        }
        self.requests.push_back(cid);
        Ok(())
    }

    /// Completes a request without an event; whether there was one.
    pub(super) fn abort(&mut self, cid: u16, actions: &mut Vec<Action>) -> bool {
        let Some(index) = self.requests.iter().position(|&request| request == cid) else {
            return false;
        };
        self.requests.remove(index);
        complete(Cqe::new(cid, Status::ABORT_REQUESTED), actions);
        true
    }

    /// Completes all requests without an event and forgets all events.
    pub(super) fn reset(&mut self, actions: &mut Vec<Action>) {
        for cid in std::mem::take(&mut self.requests) {
            complete(Cqe::new(cid, Status::ABORT_REQUESTED), actions);
        }
        self.changed.clear();
        for notice in &mut self.notices {
            (notice.pending, notice.masked) = (false, false);
        }
    }

    /// Notes what differs between two pictures of the subsystem.
    pub(super) fn subsystem_changed(&mut self, was: &Subsystem, is: &Subsystem, portid: u16) {
        let all: BTreeSet<u32> =
            was.namespaces.iter().chain(&is.namespaces).map(|namespace| namespace.nsid).collect();
        let changed: Vec<u32> =
            all.into_iter().filter(|&nsid| was.namespace(nsid) != is.namespace(nsid)).collect();
        if !changed.is_empty() {
            self.changed.extend(changed);
            self.notices[NAMESPACE].pending = true;
        }
        let states = |subsystem: &Subsystem| -> Vec<_> {
            subsystem
                .ana_groups()
                .into_iter()
                .map(|group| (group, subsystem.ana_state(portid, group)))
                .collect()
        };
        if is.ana_reporting && states(was) != states(is) {
            self.ana_changes += 1;
            self.notices[ANA].pending = true;
        }
    }

    pub(super) fn discovery_changed(&mut self) {
        self.notices[DISCOVERY].pending = true;
    }

    /// There are reservation notifications to read.
    pub(super) fn reservation_logged(&mut self) {
        self.notices[RESERVATION].pending = true;
    }

    /// Whether the temperature is beyond what the host wants.
    pub(super) fn temperature(&mut self, is_beyond: bool) {
        self.notices[TEMPERATURE].pending = is_beyond;
    }

    /// A doorbell was written that does not exist, or with a value that it cannot have.
    pub(super) fn doorbell(&mut self, exists: bool) {
        self.notices[if exists { DOORBELL_VALUE } else { DOORBELL }].pending = true;
    }

    /// How often the ANA log page has changed.
    pub(super) fn ana_changes(&self) -> u64 {
        self.ana_changes
    }

    /// The Changed Namespace List as it is now (Base 2.0, section 5.16.1.5): FFFFFFFFh alone when there
    /// are more than fit.
    pub(super) fn changed(&self) -> Vec<u32> {
        if self.changed.len() > NAMESPACE_LIST_MAX {
            return vec![wire_nvme::NSID_ALL];
        }
        self.changed.iter().copied().collect()
    }

    /// The host has read a log page and did not retain its event.
    pub(super) fn log_read(&mut self, log_page: u8) {
        for notice in &mut self.notices {
            if notice.event.log_page == log_page {
                (notice.pending, notice.masked) = (false, false);
            }
        }
        if log_page == AsyncEvent::NAMESPACE_CHANGED.log_page {
            self.changed.clear();
        }
    }

    /// Completes requests with events.
    pub(super) fn deliver(&mut self, wanted: AsyncEventConfiguration, actions: &mut Vec<Action>) {
        for notice in &mut self.notices {
            if !notice.pending
                || notice.masked
                || (notice.enabled_by != ALWAYS && !wanted.has(notice.enabled_by))
            {
                continue;
            }
            let Some(cid) = self.requests.pop_front() else {
                return;
            };
            (notice.pending, notice.masked) = (false, true);
            complete(Cqe::new(cid, Status::SUCCESS).with_result(notice.event.to_result()), actions);
        }
    }
}

fn complete(cqe: Cqe, actions: &mut Vec<Action>) {
    actions.push(Action::Complete(Completion { cqe, data: Vec::new() }));
}
