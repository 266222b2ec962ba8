//! Error injection by opcode, into commands before they are sent or into their completions.
//!
//! The control plane sets the [`Injections`] of a path. Each I/O queue that is open at that moment copies them into
//! its own [`QueueInjections`], so that counts are per queue.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use bdev::{Completion, Request};
use block_io::Status;

/// An error injected into the next commands of one opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorInjection {
    /// Opcode of the commands.
    pub opcode: u8,
    /// Number of commands, on each queue.
    pub count: u32,
    /// Status of their completion. Only successful completions are changed.
    pub status: Status,
    /// Whether they are sent to the controller.
    pub submit: bool,
    /// Delay of the completion of a command that is not sent, in nanoseconds.
    pub delay_ns: u64,
}

/// The injections of a path's I/O queues: the latest for each opcode, with the version in which it was set.
#[derive(Default)]
pub(crate) struct Injections {
    version: AtomicU64,
    entries: Mutex<BTreeMap<u8, (u64, Option<ErrorInjection>)>>,
}

impl Injections {
    /// Sets, replaces or removes the injection for an opcode.
    pub(crate) fn set(&self, opcode: u8, injection: Option<ErrorInjection>) {
        let mut entries = sync::lock(&self.entries);
        let version = self.version.load(Ordering::Relaxed) + 1;
        entries.insert(opcode, (version, injection));
        self.version.store(version, Ordering::Release);
    }

    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }
}

/// The active injections of one queue, at most one an opcode.
#[derive(Default)]
pub(crate) struct ActiveInjections(Vec<ErrorInjection>);

impl ActiveInjections {
    /// Sets, replaces or removes the injection for an opcode.
    pub(crate) fn set(&mut self, opcode: u8, injection: Option<ErrorInjection>) {
        self.0.retain(|known| known.opcode != opcode);
        self.0.extend(injection.filter(|injection| injection.count > 0));
    }

    /// Uses the injection that applies to a command, before it is sent or after it succeeded.
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

/// The injections of an I/O queue, and the requests that they delay.
#[derive(Default)]
pub(crate) struct QueueInjections {
    applied_version: u64,
    active: ActiveInjections,
    /// Requests that are not sent: completion time in nanoseconds, status, request.
    delayed: Vec<(u64, Status, Request)>,
}

impl QueueInjections {
    /// For a new queue: injections that were set before do not apply to it.
    pub(crate) fn new(injections: &Injections) -> QueueInjections {
        QueueInjections { applied_version: injections.version(), ..QueueInjections::default() }
    }

    /// Applies the injections that were set since the last call.
    pub(crate) fn sync(&mut self, injections: &Injections) {
        if self.applied_version == injections.version() {
            return;
        }
        let entries = sync::lock(&injections.entries);
        let updates = entries.iter().filter(|(_, (version, _))| *version > self.applied_version);
        for (opcode, (_, injection)) in updates {
            self.active.set(*opcode, *injection);
        }
        self.applied_version = injections.version();
    }

    /// Whether there is no active injection and no delayed request.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.active.0.is_empty() && self.delayed.is_empty()
    }

    /// Removes the requests from a batch that must not be sent.
    #[cold]
    pub(crate) fn intercept(&mut self, batch: &mut Vec<Request>, now_ns: u64) {
        if self.active.0.iter().all(|injection| injection.submit) {
            return;
        }
        let mut remaining = Vec::with_capacity(batch.len());
        for request in std::mem::take(batch) {
            let opcode = nvme::opcode_of(request.op);
            match opcode.and_then(|opcode| self.active.take(opcode, false)) {
                Some(injection) => {
                    let due_ns = now_ns.saturating_add(injection.delay_ns);
                    self.delayed.push((due_ns, injection.status, request));
                }
                None => remaining.push(request),
            }
        }
        *batch = remaining;
    }

    /// Changes the status of successful completions, and adds delayed requests that are due.
    #[cold]
    pub(crate) fn rewrite(&mut self, completions: &mut Vec<Completion>, now_ns: u64) {
        let changed = completions.drain(..).map(|completion| {
            let opcode =
                nvme::opcode_of(completion.request().op).filter(|_| completion.status().is_success());
            match opcode.and_then(|opcode| self.active.take(opcode, true)) {
                Some(injection) => completion.into_request().complete(injection.status),
                None => completion,
            }
        });
        let mut changed: Vec<Completion> = changed.collect();
        let due = self.delayed.extract_if(.., |(due_ns, _, _)| *due_ns <= now_ns);
        changed.extend(due.map(|(_, status, request)| request.complete(status)));
        *completions = changed;
    }

    /// Completes all delayed requests when the queue is closed; they were never sent, so that they can be retried.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Completion> + '_ {
        self.delayed.drain(..).map(|(_, _, request)| request.complete(Status::ABORTED_SQ_DELETION))
    }

    /// When the next delayed request is due, in nanoseconds.
    pub(crate) fn deadline_ns(&self) -> Option<u64> {
        self.delayed.iter().map(|(due_ns, _, _)| *due_ns).min()
    }
}

#[cfg(test)]
mod tests {
    use block_io::{Op, Tag};

    use super::*;

    const READ: u8 = 2;

    fn injection(submit: bool, count: u32, delay_ns: u64) -> ErrorInjection {
        ErrorInjection { opcode: READ, count, status: Status::UNRECOVERED_READ_ERROR, submit, delay_ns }
    }

    fn requests(ops: &[Op]) -> Vec<Request> {
        ops.iter().enumerate().map(|(at, op)| Request::new(Tag(at as u64), *op, 0, 1)).collect()
    }

    fn results(completions: &[Completion]) -> Vec<(u64, bool)> {
        completions.iter().map(|one| (one.tag().0, one.status().is_success())).collect()
    }

    #[test]
    fn completions_of_one_opcode_are_changed_count_times() {
        let mut faults = QueueInjections::default();
        faults.active.set(READ, Some(injection(true, 2, 0)));
        let mut batch = requests(&[Op::Read, Op::Write, Op::Read, Op::Read]);
        faults.intercept(&mut batch, 0);
        assert_eq!(batch.len(), 4, "they are sent");
        let mut done: Vec<_> = batch.into_iter().map(|request| request.complete(Status::SUCCESS)).collect();
        faults.rewrite(&mut done, 0);
        assert_eq!(results(&done), [(0, false), (1, true), (2, false), (3, true)]);
        assert!(faults.is_idle());
        // A completion that already failed is not changed or counted.
        faults.active.set(READ, Some(injection(true, 1, 0)));
        let failed = requests(&[Op::Read]).remove(0).complete(Status::ABORTED_BY_HOST);
        let mut done = vec![failed];
        faults.rewrite(&mut done, 0);
        assert_eq!((done[0].status(), faults.is_idle()), (Status::ABORTED_BY_HOST, false));
    }

    #[test]
    fn unsent_requests_complete_once_after_the_delay_or_with_the_queue() {
        let mut faults = QueueInjections::default();
        faults.active.set(READ, Some(injection(false, 2, 100)));
        let mut batch = requests(&[Op::Read, Op::Write, Op::Read, Op::Read]);
        faults.intercept(&mut batch, 50);
        assert_eq!(batch.iter().map(|request| request.tag.0).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(faults.deadline_ns(), Some(150));
        let mut done = Vec::new();
        faults.rewrite(&mut done, 149);
        assert!(done.is_empty());
        faults.rewrite(&mut done, 150);
        assert_eq!(results(&done), [(0, false), (2, false)]);
        assert!(faults.is_idle() && faults.deadline_ns().is_none());
        faults.active.set(READ, Some(injection(false, 1, u64::MAX)));
        faults.intercept(&mut requests(&[Op::Read]), 1);
        assert_eq!(results(&faults.drain().collect::<Vec<_>>()), [(0, false)]);
    }

    #[test]
    fn queues_apply_injections_set_after_they_were_opened() {
        let injections = Injections::default();
        injections.set(READ, Some(injection(true, 1, 0)));
        let mut new_queue = QueueInjections::new(&injections);
        let mut open_queue = QueueInjections::default();
        new_queue.sync(&injections);
        open_queue.sync(&injections);
        assert!(new_queue.is_idle() && !open_queue.is_idle());
        injections.set(READ, None);
        open_queue.sync(&injections);
        assert!(open_queue.is_idle());
    }
}
