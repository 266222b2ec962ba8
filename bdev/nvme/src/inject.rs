//! Errors on purpose, by opcode: what becomes of commands on their way to a path, and of their answers.
//!
//! The control plane gives [`Orders`] to a path; each queue that there is at that moment follows them by itself
//! with [`Faults`] of its own, so that a count is a count for each queue.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use bdev::{Completion, Request};
use ring::Status;

use crate::path::lock;

/// What becomes of the next commands of one opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorInjection {
    /// Opcode of the commands.
    pub opcode: u8,
    /// How many of them, on each queue.
    pub count: u32,
    /// How they end. Only a command that went well is made to end otherwise.
    pub status: Status,
    /// Whether they are sent to the controller at all.
    pub submit: bool,
    /// How long one that is not sent is held back, in nanoseconds.
    pub delay_ns: u64,
}

/// What was ordered for the queues of a path: the last word for each opcode, and when it was said.
#[derive(Default)]
pub(crate) struct Orders {
    version: AtomicU64,
    given: Mutex<BTreeMap<u8, (u64, Option<ErrorInjection>)>>,
}

impl Orders {
    /// Orders an injection for an opcode, in place of the one that there is, or the end of it.
    pub(crate) fn give(&self, opcode: u8, injection: Option<ErrorInjection>) {
        let mut given = lock(&self.given);
        let version = self.version.load(Ordering::Relaxed) + 1;
        given.insert(opcode, (version, injection));
        self.version.store(version, Ordering::Release);
    }

    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }
}

/// The injections of one queue, one an opcode.
#[derive(Default)]
pub(crate) struct Active(Vec<ErrorInjection>);

impl Active {
    /// Puts an injection in the place of the one of its opcode, or takes that away.
    pub(crate) fn put(&mut self, opcode: u8, injection: Option<ErrorInjection>) {
        self.0.retain(|known| known.opcode != opcode);
        self.0.extend(injection.filter(|injection| injection.count > 0));
    }

    /// What becomes of a command, before it is sent or after it went well.
    pub(crate) fn take(&mut self, opcode: u8, sent: bool) -> Option<ErrorInjection> {
        let hits = |one: &ErrorInjection| one.opcode == opcode && one.submit == sent;
        let at = self.0.iter().position(hits)?;
        let injection = &mut self.0[at];
        injection.count -= 1;
        let taken = *injection;
        if taken.count == 0 {
            self.0.remove(at);
        }
        Some(taken)
    }
}

/// The injections of an I/O queue, and what they hold back.
#[derive(Default)]
pub(crate) struct Faults {
    seen: u64,
    active: Active,
    /// Requests that are not sent: when each ends, and how.
    held: Vec<(u64, Status, Request)>,
}

impl Faults {
    /// Of a queue that is new: what was ordered before is not for it.
    pub(crate) fn new(orders: &Orders) -> Faults {
        Faults { seen: orders.version(), ..Faults::default() }
    }

    /// Takes over what was ordered since the last look.
    pub(crate) fn follow(&mut self, orders: &Orders) {
        if self.seen == orders.version() {
            return;
        }
        let given = lock(&orders.given);
        let news = given.iter().filter(|(_, (version, _))| *version > self.seen);
        for (opcode, (_, injection)) in news {
            self.active.put(*opcode, *injection);
        }
        self.seen = orders.version();
    }

    /// Whether there is nothing to do.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.active.0.is_empty() && self.held.is_empty()
    }

    /// Keeps those of a batch back that are not to be sent.
    #[cold]
    pub(crate) fn withhold(&mut self, batch: &mut Vec<Request>, now_ns: u64) {
        if self.active.0.iter().all(|injection| injection.submit) {
            return;
        }
        let mut sent = Vec::with_capacity(batch.len());
        for request in std::mem::take(batch) {
            let opcode = nvme::opcode_of(request.op);
            match opcode.and_then(|opcode| self.active.take(opcode, false)) {
                Some(injection) => {
                    let due_ns = now_ns.saturating_add(injection.delay_ns);
                    self.held.push((due_ns, injection.status, request));
                }
                None => sent.push(request),
            }
        }
        *batch = sent;
    }

    /// Changes how commands ended that went well, and adds those that were held back for long enough.
    #[cold]
    pub(crate) fn alter(&mut self, completions: &mut Vec<Completion>, now_ns: u64) {
        let altered = completions.drain(..).map(|completion| {
            let opcode =
                nvme::opcode_of(completion.request().op).filter(|_| completion.status().is_success());
            match opcode.and_then(|opcode| self.active.take(opcode, true)) {
                Some(injection) => completion.into_request().complete(injection.status),
                None => completion,
            }
        });
        let mut altered: Vec<Completion> = altered.collect();
        let due = self.held.extract_if(.., |(due_ns, _, _)| *due_ns <= now_ns);
        altered.extend(due.map(|(_, status, request)| request.complete(status)));
        *completions = altered;
    }

    /// The queue ends: what is held back was never sent.
    pub(crate) fn end(&mut self) -> impl Iterator<Item = Completion> + '_ {
        self.held.drain(..).map(|(_, _, request)| request.complete(Status::ABORTED_SQ_DELETION))
    }

    /// When something that is held back ends.
    pub(crate) fn deadline_ns(&self) -> Option<u64> {
        self.held.iter().map(|(due_ns, _, _)| *due_ns).min()
    }
}

#[cfg(test)]
mod tests {
    use ring::{Op, Tag};

    use super::*;

    const READ: u8 = 2;

    fn injection(submit: bool, count: u32, delay_ns: u64) -> ErrorInjection {
        ErrorInjection { opcode: READ, count, status: Status::UNRECOVERED_READ_ERROR, submit, delay_ns }
    }

    fn requests(ops: &[Op]) -> Vec<Request> {
        ops.iter().enumerate().map(|(at, op)| Request::new(Tag(at as u64), *op, 0, 1)).collect()
    }

    fn told(completions: &[Completion]) -> Vec<(u64, bool)> {
        completions.iter().map(|one| (one.tag().0, one.status().is_success())).collect()
    }

    #[test]
    fn answers_of_one_opcode_change_as_often_as_was_said() {
        let mut faults = Faults::default();
        faults.active.put(READ, Some(injection(true, 2, 0)));
        let mut batch = requests(&[Op::Read, Op::Write, Op::Read, Op::Read]);
        faults.withhold(&mut batch, 0);
        assert_eq!(batch.len(), 4, "they are sent");
        let mut done: Vec<_> = batch.into_iter().map(|request| request.complete(Status::SUCCESS)).collect();
        faults.alter(&mut done, 0);
        assert_eq!(told(&done), [(0, false), (1, true), (2, false), (3, true)]);
        assert!(faults.is_idle());
        // What failed by itself says so, and counts for nothing.
        faults.active.put(READ, Some(injection(true, 1, 0)));
        let failed = requests(&[Op::Read]).remove(0).complete(Status::ABORTED_BY_HOST);
        let mut done = vec![failed];
        faults.alter(&mut done, 0);
        assert_eq!((done[0].status(), faults.is_idle()), (Status::ABORTED_BY_HOST, false));
    }

    #[test]
    fn what_is_not_sent_ends_once_when_its_time_is_over_or_with_the_queue() {
        let mut faults = Faults::default();
        faults.active.put(READ, Some(injection(false, 2, 100)));
        let mut batch = requests(&[Op::Read, Op::Write, Op::Read, Op::Read]);
        faults.withhold(&mut batch, 50);
        assert_eq!(batch.iter().map(|request| request.tag.0).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(faults.deadline_ns(), Some(150));
        let mut done = Vec::new();
        faults.alter(&mut done, 149);
        assert!(done.is_empty());
        faults.alter(&mut done, 150);
        assert_eq!(told(&done), [(0, false), (2, false)]);
        assert!(faults.is_idle() && faults.deadline_ns().is_none());
        faults.active.put(READ, Some(injection(false, 1, u64::MAX)));
        faults.withhold(&mut requests(&[Op::Read]), 1);
        assert_eq!(told(&faults.end().collect::<Vec<_>>()), [(0, false)]);
    }

    #[test]
    fn queues_follow_what_was_ordered_after_they_were_made() {
        let orders = Orders::default();
        orders.give(READ, Some(injection(true, 1, 0)));
        let mut young = Faults::new(&orders);
        let mut old = Faults::default();
        young.follow(&orders);
        old.follow(&orders);
        assert!(young.is_idle() && !old.is_idle());
        orders.give(READ, None);
        old.follow(&orders);
        assert!(old.is_idle());
    }
}
