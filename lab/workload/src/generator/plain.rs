//! The paths of plain jobs: requests are counted, moved and placed in batches.

use std::mem;

use memory::Buffer;
use ring::{Completion, Op};

use super::{Generator, Phase};
use crate::side::side_of;

impl Generator {
    /// The closed loop's inside: for each I/O, its latency into a bucket and its request out again.
    ///
    /// Whole requests are moved first and changed then: plain loops cost less than one that does all.
    #[inline]
    pub(super) fn absorb_closed(&mut self, now: u64) {
        if self.done.len() == 1 && self.absorb_one(now) {
            return;
        }
        self.count(now);
        let again = self.take_remaining(self.done.len());
        let fresh = self.ready.len();
        self.ready.extend(self.done.drain(..again).map(Completion::into_request));
        self.issue(fresh, now, false);
        if !self.done.is_empty() {
            self.parked.extend(self.done.drain(..).map(Completion::into_request));
        }
        if again == 0 && self.phase <= Phase::Measuring {
            self.drain(now);
        }
    }

    /// A completion that comes alone, as all do at depth 1: what counting and placing alike things together
    /// saves costs more than a single one does. Says no, and does nothing, where it is not simply to go out again.
    #[inline]
    fn absorb_one(&mut self, now: u64) -> bool {
        let goes_on = self.phase <= Phase::Measuring && self.remaining > 0;
        let Some(completion) = self.done.pop_if(|done| goes_on && done.status().is_success()) else {
            return false;
        };
        let mut request = completion.into_request();
        if self.remaining != u64::MAX {
            self.remaining -= 1;
        }
        let side = &mut self.sides[side_of(request.op)];
        side.blocks += u64::from(request.blocks);
        let batch = self.batches.again(&mut request, now);
        side.record(&batch, now, 1);
        side.whole.record(now.saturating_sub(batch.issued));
        self.place.next_one(&mut request);
        self.ready.push(request);
        true
    }

    /// The same of an open loop, whose requests wait for their time.
    #[inline]
    pub(super) fn absorb_open(&mut self, now: u64) {
        self.count(now);
        self.parked.extend(self.done.drain(..).map(Completion::into_request));
    }

    /// Starts what is due, as far as requests are free.
    pub(super) fn feed_open(&mut self, now: u64) {
        if self.phase > Phase::Measuring || self.parked.is_empty() {
            return;
        }
        if self.remaining == 0 {
            return self.drain(now);
        }
        let Some(open) = &mut self.open else { return };
        let bytes = u64::from(self.spec.block_bytes);
        let most = usize::try_from(self.remaining).unwrap_or(usize::MAX);
        let mut due = 0;
        // The last to come back is the first to go: the processor's caches still have it.
        for request in self.parked.iter_mut().rev().take(most) {
            let Some((direction, start)) = open.pace.due(now) else { break };
            open.starts[request.tag.0 as usize] = start;
            request.op = OPS[direction];
            open.pace.advance(direction, bytes);
            due += 1;
        }
        if due == 0 {
            return;
        }
        self.take_remaining(due);
        let (fresh, rest) = (self.ready.len(), self.parked.len() - due);
        self.ready.extend(self.parked.drain(rest..).rev());
        self.issue(fresh, now, true);
    }

    /// Places what was made ready from `fresh` on and notes that it starts now. With `given` each request
    /// has its operation already.
    #[inline]
    pub(super) fn issue(&mut self, fresh: usize, now: u64, given: bool) {
        let fresh = &mut self.ready[fresh..];
        let mut start = self.batches.starting(fresh.len(), now);
        self.place.next_all(fresh, given, |request| start(request));
    }

    /// How many of `count` requests are to go out again.
    #[inline]
    pub(super) fn take_remaining(&mut self, count: usize) -> usize {
        if self.phase > Phase::Measuring {
            return 0;
        }
        let again = (count as u64).min(self.remaining);
        if self.remaining != u64::MAX {
            self.remaining -= again;
        }
        again as usize
    }

    /// Counts completions, neighbours of one batch and one operation at once.
    #[inline]
    pub(super) fn count(&mut self, now: u64) {
        let all_alike = self.is_plain();
        let done = mem::take(&mut self.done);
        let mut completions = done.as_slice();
        while let Some(first) = completions.first() {
            let (op, number) = (first.request().op, self.batches.number(first.request()));
            let like_first = |completion: &&Completion<Buffer>| {
                let request = completion.request();
                completion.status().is_success() && request.op == op && self.batches.number(request) == number
            };
            let length = completions.iter().take_while(like_first).count();
            let batch = self.batches.end(number, length.max(1) as u32);
            if length == 0 {
                self.note_failure(first);
                completions = &completions[1..];
                continue;
            }
            let (run, rest) = completions.split_at(length);
            completions = rest;
            let side = &mut self.sides[side_of(op)];
            side.record(&batch, now, length as u64);
            side.blocks += match all_alike {
                true => u64::from(first.request().blocks) * length as u64,
                false => run.iter().map(|completion| u64::from(completion.request().blocks)).sum(),
            };
            match &self.open {
                None => side.whole.record_many(now.saturating_sub(batch.issued), length as u64),
                Some(open) => {
                    for completion in run {
                        let start = open.starts[completion.tag().0 as usize];
                        side.whole.record(now.saturating_sub(start));
                    }
                }
            }
        }
        self.done = done;
    }
}

/// By [`Direction`](crate::Direction).
pub(super) const OPS: [Op; 3] = [Op::Read, Op::Write, Op::Unmap];
