//! What does not go to the module at once: requests that wait, are divided or blocked, or that the layer executes.

use std::sync::atomic::Ordering;

use block_io::{Op, Payload, RequestFlags, Status, Tag};

use super::validate::RequestLimits;
use super::{BdevChannel, count_writes, submit_to_module};
use crate::device::TRACED;
use crate::parts::seek_without_module;
use crate::trace::TracePoint;
use crate::{Completion, Request};

/// Resets in flight on one channel; further ones stay in the caller's batch.
pub(crate) const RESETS_MAX: usize = 16;
/// Rejected requests whose completions are not polled yet; further ones stay in the caller's batch.
pub(super) const REJECTED_MAX: usize = 1024;

impl BdevChannel {
    /// Handles the batch request by request: rejects invalid ones and queues valid ones.
    #[cold]
    pub(super) fn submit_each(&mut self, batch: &mut Vec<Request>) {
        let limits = self.limits();
        let mut requests = batch.drain(..);
        while let Some(request) = requests.next() {
            if request.op == Op::Compare {
                let write = if request.flags.contains(RequestFlags::FUSED) { requests.next() } else { None };
                self.accept_compare(request, write, &limits);
                continue;
            }
            if request.op == Op::Abort
                && let Payload::Abort(target) = request.payload
            {
                self.abort(request, target);
                continue;
            }
            let rejected = match self.validate(&request, &limits) {
                Some(_) if self.finished.len() >= REJECTED_MAX => Some(request),
                Some(status) => {
                    self.resets_outstanding += usize::from(request.op == Op::Reset);
                    self.finished.push(request.complete(status));
                    None
                }
                None if request.op == Op::Reset && self.resets_outstanding >= RESETS_MAX => Some(request),
                None if request.op == Op::Reset => {
                    self.resets_outstanding += 1;
                    self.resets.push(request);
                    None
                }
                None if matches!(request.op, Op::SeekData | Op::SeekHole) && !limits.allows(request.op) => {
                    let mut request = request;
                    seek_without_module(&mut request);
                    self.finished.push(request.complete(Status::SUCCESS));
                    None
                }
                None => match self.scheduler.enqueue(request, &self.clock) {
                    Ok(()) => {
                        self.queued += 1;
                        None
                    }
                    Err(request) => Some(request),
                },
            };
            self.returned.extend(rejected);
        }
        drop(requests);
        std::mem::swap(batch, &mut self.returned);
        let device = &self.open.device;
        if device.state.load(Ordering::Relaxed) & TRACED != 0 {
            self.trace.record_requests(TracePoint::IoReturned, device.trace_id(), batch);
        }
        self.dispatch();
        self.update_idle();
    }

    /// Completes an abort, and the request that it names if that has not reached the module.
    fn abort(&mut self, abort: Request, target: Tag) {
        if self.finished.len() >= REJECTED_MAX {
            return self.returned.push(abort);
        }
        let flow = abort.flow;
        let take = |list: &mut Vec<Request>| {
            let found = list.iter().position(|request| request.tag == target && request.flow == flow)?;
            Some(list.remove(found))
        };
        if let Some(request) = self.scheduler.remove(target, flow) {
            self.queued -= 1;
            self.finished.push(request.complete(Status::ABORT_REQUESTED));
        } else if let Some(request) = take(&mut self.selected).or_else(|| take(&mut self.blocked)) {
            self.finish_selected([request.complete(Status::ABORT_REQUESTED)]);
        }
        self.finished.push(abort.complete(Status::SUCCESS));
    }

    /// Accepts a compare, with the write that follows it if it is fused.
    fn accept_compare(&mut self, compare: Request, write: Option<Request>, limits: &RequestLimits) {
        if self.compares.is_full() || self.finished.len() >= REJECTED_MAX {
            self.returned.push(compare);
            return self.returned.extend(write);
        }
        let range = |request: &Request| (request.op.is_write(), request.lba, request.blocks);
        let fused = compare.flags.contains(RequestFlags::FUSED);
        let unpaired = fused
            && write.as_ref().is_none_or(|write| {
                write.op != Op::Write || range(write) != (true, compare.lba, compare.blocks)
            });
        let compare_error = match self.validate(&compare, limits) {
            None if fused && !crate::supports_fused() => Some(Status::INVALID_OPCODE.do_not_retry()),
            None if unpaired => Some(Status::FUSED_MISSING.do_not_retry()),
            error => error,
        };
        let write_error = write.as_ref().and_then(|write| self.validate(write, limits));
        if compare_error.is_none() && write_error.is_none() {
            return self.compares.push(compare, write);
        }
        self.finished.push(compare.complete(compare_error.unwrap_or(Status::FUSED_FAILED)));
        let fail_write = |write: Request| write.complete(write_error.unwrap_or(Status::FUSED_FAILED));
        self.finished.extend(write.map(fail_write));
    }

    /// Submits queued requests to the module as far as its queue depth allows.
    pub(super) fn dispatch(&mut self) {
        if self.is_removed() {
            return self.fail_queued();
        }
        if !self.parts.is_empty() {
            // Before a reset too, which waits for what has started.
            self.advance_parts();
        }
        if !self.resets.is_empty() {
            if self.module_resets {
                submit_to_module(&mut self.module, &mut self.resets, &mut self.in_flight);
            } else if self.in_flight == 0 && self.parts.is_empty() {
                let done = self.resets.drain(..).map(|reset| reset.complete(Status::SUCCESS));
                self.finished.extend(done);
            } else {
                // New I/O stays queued until everything in flight before the reset has completed.
                return;
            }
        }
        if !self.compares.is_empty() {
            self.advance_compares();
        }
        let free = self.depth.saturating_sub(self.in_flight) as usize;
        let selected = self.selected.len() + self.blocked.len();
        let room = free.saturating_sub(selected);
        if self.queued > 0 {
            let before = self.selected.len();
            self.scheduler.exchange(&self.clock);
            self.scheduler.next(room, &self.clock, &mut self.selected);
            self.queued -= self.selected.len() - before;
        }
        if free > 0 && !(self.selected.is_empty() && self.blocked.is_empty()) {
            let all_fit = self.blocked.is_empty() && self.selected.len() <= free;
            let writes = if all_fit { count_writes(&self.selected) } else { 0 };
            let mut ready = if all_fit && (writes == 0 || self.publish_writes(writes)) {
                std::mem::take(&mut self.selected)
            } else {
                self.take_unblocked(free)
            };
            self.divide(&mut ready);
            self.submit_to_module(&mut ready);
            if !self.parts.is_empty() {
                self.advance_parts();
            }
            // Requests that the module did not accept are submitted first the next time.
            ready.append(&mut self.selected);
            self.selected = ready;
        }
    }

    /// Ends requests that the scheduler had let go, and that do not end in the module.
    #[cold]
    fn finish_selected(&mut self, completions: impl IntoIterator<Item = Completion>) {
        let before = self.finished.len();
        self.finished.extend(completions);
        if self.decides_all {
            self.scheduler.completed(&self.finished[before..], &self.clock);
        }
    }

    /// Returns at most `max` requests that may be submitted now; keeps writes that overlap locked ranges blocked.
    #[cold]
    fn take_unblocked(&mut self, max: usize) -> Vec<Request> {
        let table = self.open.device.range_locks.table();
        let is_blocked = |request: &Request| {
            let end = request.lba.saturating_add(u64::from(request.blocks));
            request.op.is_write() && table.must_wait(&(request.lba..end))
        };
        let (mut ready, mut blocked, mut selected) = (Vec::new(), Vec::new(), Vec::new());
        // Blocked requests are older.
        for request in self.blocked.drain(..).chain(self.selected.drain(..)) {
            let list = match is_blocked(&request) {
                true => &mut blocked,
                false if ready.len() < max => &mut ready,
                false => &mut selected,
            };
            list.push(request);
        }
        (self.blocked, self.selected) = (blocked, selected);
        // Published before the table is unlocked, so that a later lock request waits for them.
        self.writes_in_flight += count_writes(&ready);
        self.inflight_writes.publish(self.writes_in_flight);
        ready
    }

    /// Advances compares and submits their internal reads and writes.
    #[cold]
    fn advance_compares(&mut self) {
        self.compares.advance(&self.open.device.range_locks);
        let free = self.depth.saturating_sub(self.in_flight) as usize;
        let internal = &mut self.compares.internal;
        let mut batch: Vec<Request> = internal.drain(..internal.len().min(free)).collect();
        self.divide(&mut batch);
        let count = batch.len();
        submit_to_module(&mut self.module, &mut batch, &mut self.in_flight);
        self.internal_in_flight += (count - batch.len()) as u32;
        self.compares.internal.append(&mut batch);
    }

    /// Advances divided requests and submits their parts.
    #[cold]
    fn advance_parts(&mut self) {
        self.parts.advance();
        let free = self.depth.saturating_sub(self.in_flight) as usize;
        let internal = &mut self.parts.internal;
        let mut batch: Vec<Request> = internal.drain(..internal.len().min(free)).collect();
        let count = batch.len();
        submit_to_module(&mut self.module, &mut batch, &mut self.in_flight);
        self.internal_in_flight += (count - batch.len()) as u32;
        batch.append(&mut self.parts.internal);
        self.parts.internal = batch;
    }

    /// Replaces the completions of internal requests in `sink` by those of the requests that they end.
    #[cold]
    pub(super) fn take_internal(&mut self, sink: &mut Vec<Completion>, start: usize) {
        let completions = sink.split_off(start).into_iter();
        let (parts, mut others): (Vec<_>, Vec<_>) = completions.partition(|one| self.parts.owns(one));
        self.internal_in_flight -= parts.len() as u32;
        let compares = others.iter().filter(|one| self.compares.owns(one)).count();
        self.internal_in_flight -= compares as u32;
        // The last part of a compare's read completes that read.
        parts.into_iter().for_each(|part| self.parts.complete_part(part, &mut others));
        for completion in others {
            if self.compares.owns(&completion) {
                let locks = &self.open.device.range_locks;
                self.compares.complete_internal(completion, locks, &mut self.finished);
            } else {
                sink.push(completion);
            }
        }
    }

    /// Fails everything that is queued, as the module of a removed device gets no new requests.
    #[cold]
    fn fail_queued(&mut self) {
        let removed = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
        let selected: Vec<Request> = self.selected.drain(..).chain(self.blocked.drain(..)).collect();
        self.finish_selected(selected.into_iter().map(|request| request.complete(removed)));
        let mut queued = Vec::new();
        self.scheduler.drain(&mut queued);
        self.queued = 0;
        let failed = queued.into_iter().chain(self.resets.drain(..));
        self.finished.extend(failed.map(|request| request.complete(removed)));
        let mut divided = Vec::new();
        self.parts.fail_idle(removed, &mut divided);
        for completion in divided {
            if self.compares.owns(&completion) {
                let locks = &self.open.device.range_locks;
                self.compares.complete_internal(completion, locks, &mut self.finished);
                continue;
            }
            if completion.request().op.is_write() {
                self.retract_writes(1);
            }
            self.finish_selected([completion]);
        }
        self.compares.fail_idle(removed, &self.open.device.range_locks, &mut self.finished);
    }

    #[cold]
    pub(super) fn poll_queued(&mut self, sink: &mut Vec<Completion>, start: usize) {
        if self.decides_all {
            self.report_completed(&sink[start..]);
        }
        if !self.nothing_queued() {
            self.dispatch();
        }
        sink.append(&mut self.finished);
    }

    /// Reports to the scheduler what the module has completed. A reset goes past it.
    fn report_completed(&mut self, mut completions: &[Completion]) {
        let is_reset = |one: &Completion| one.request().op == Op::Reset;
        while !completions.is_empty() {
            let count = completions.iter().position(is_reset).unwrap_or(completions.len());
            if count > 0 {
                self.scheduler.completed(&completions[..count], &self.clock);
            }
            completions = &completions[(count + 1).min(completions.len())..];
        }
    }
}
