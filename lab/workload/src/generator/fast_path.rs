//! The fast path of simple jobs: requests are counted, moved and assigned in batches.

use std::mem;

use block_io::{Completion, Op};
use dma::Data;

use super::{Generator, JobPhase, UNLIMITED};
use crate::direction_stats::direction_index;

impl Generator {
    /// The closed loop: records each completion's latency and makes its request ready again.
    ///
    /// First moves whole requests, then changes them: two simple loops cost less than one that does both.
    #[inline]
    pub(super) fn complete_closed_loop(&mut self, now: u64) {
        if self.completions.len() == 1 && self.complete_single(now) {
            return;
        }
        self.record_completions(now);
        let restarting = self.take_remaining(self.completions.len());
        let first_new = self.ready.len();
        self.ready.extend(self.completions.drain(..restarting).map(Completion::into_request));
        self.assign_new(first_new, now, false);
        if !self.completions.is_empty() {
            self.idle.extend(self.completions.drain(..).map(Completion::into_request));
        }
        if restarting == 0 && self.phase <= JobPhase::Measuring {
            self.start_draining(now);
        }
    }

    /// Handles a single completion, as all are at depth 1, where the set-up of batching costs more than it
    /// saves. Returns false, and does nothing, unless the I/O succeeded and its request is to be reused at once.
    #[inline]
    fn complete_single(&mut self, now: u64) -> bool {
        let continues = self.phase <= JobPhase::Measuring && self.remaining_ios > 0;
        let Some(completion) =
            self.completions.pop_if(|completion| continues && completion.status().is_success())
        else {
            return false;
        };
        let mut request = completion.into_request();
        if self.remaining_ios != UNLIMITED {
            self.remaining_ios -= 1;
        }
        let stats = &mut self.stats[direction_index(request.op)];
        stats.blocks += u64::from(request.blocks);
        let batch = self.batches.restart(&mut request, now);
        stats.record(&batch, now, 1);
        stats.total_latency.record(now.saturating_sub(batch.issued));
        self.pattern.next_one(&mut request);
        self.ready.push(request);
        true
    }

    /// The open loop: records completions and returns their requests to `idle` until an I/O is due.
    #[inline]
    pub(super) fn complete_open_loop(&mut self, now: u64) {
        self.record_completions(now);
        self.idle.extend(self.completions.drain(..).map(Completion::into_request));
    }

    /// Starts the I/Os whose scheduled time has come while requests are idle.
    pub(super) fn start_due_open_loop(&mut self, now: u64) {
        if self.phase > JobPhase::Measuring || self.idle.is_empty() {
            return;
        }
        if self.remaining_ios == 0 {
            return self.start_draining(now);
        }
        let Some(open_loop) = &mut self.open_loop else { return };
        let bytes = u64::from(self.spec.block_bytes);
        let most = usize::try_from(self.remaining_ios).unwrap_or(usize::MAX);
        let mut due = 0;
        // Reuse the most recently completed request first: it is still in the processor's caches.
        for request in self.idle.iter_mut().rev().take(most) {
            let Some((direction, start)) = open_loop.schedule.due(now) else { break };
            open_loop.intended_starts[request.tag.0 as usize] = start;
            request.op = OPS[direction];
            open_loop.schedule.advance(direction, bytes);
            due += 1;
        }
        if due == 0 {
            return;
        }
        self.take_remaining(due);
        let (first_new, rest) = (self.ready.len(), self.idle.len() - due);
        self.ready.extend(self.idle.drain(rest..).rev());
        self.assign_new(first_new, now, true);
    }

    /// Assigns positions to the ready requests from index `fresh` on, as one batch that starts now. With
    /// `keep_ops` each request keeps its operation.
    #[inline]
    pub(super) fn assign_new(&mut self, first_new: usize, now: u64, keep_ops: bool) {
        let first_new = &mut self.ready[first_new..];
        let mut start = self.batches.starter(first_new.len(), now);
        self.pattern.next_batch(first_new, keep_ops, |request| start(request));
    }

    /// How many of `count` requests may start again; deducts them from the remaining I/Os.
    #[inline]
    pub(super) fn take_remaining(&mut self, count: usize) -> usize {
        if self.phase > JobPhase::Measuring {
            return 0;
        }
        let restarting = (count as u64).min(self.remaining_ios);
        if self.remaining_ios != UNLIMITED {
            self.remaining_ios -= restarting;
        }
        restarting as usize
    }

    /// Records completions; consecutive ones of the same batch and operation are recorded together.
    #[inline]
    pub(super) fn record_completions(&mut self, now: u64) {
        let is_fixed_size = self.is_fast_path();
        let done = mem::take(&mut self.completions);
        let mut completions = done.as_slice();
        while let Some(first) = completions.first() {
            let (op, number) = (first.request().op, self.batches.batch_index(first.request()));
            let is_alike = |completion: &&Completion<Data>| {
                let request = completion.request();
                completion.status().is_success()
                    && request.op == op
                    && self.batches.batch_index(request) == number
            };
            let length = completions.iter().take_while(is_alike).count();
            let batch = self.batches.complete(number, length.max(1) as u32);
            if length == 0 {
                self.record_failure(first);
                completions = &completions[1..];
                continue;
            }
            let (run, rest) = completions.split_at(length);
            completions = rest;
            let stats = &mut self.stats[direction_index(op)];
            stats.record(&batch, now, length as u64);
            stats.blocks += match is_fixed_size {
                true => u64::from(first.request().blocks) * length as u64,
                false => run.iter().map(|completion| u64::from(completion.request().blocks)).sum(),
            };
            match &self.open_loop {
                None => stats.total_latency.record_many(now.saturating_sub(batch.issued), length as u64),
                Some(open_loop) => {
                    for completion in run {
                        let start = open_loop.intended_starts[completion.tag().0 as usize];
                        stats.total_latency.record(now.saturating_sub(start));
                    }
                }
            }
        }
        self.completions = done;
    }
}

/// The operation of each [`Direction`](crate::Direction).
pub(super) const OPS: [Op; 3] = [Op::Read, Op::Write, Op::Unmap];
