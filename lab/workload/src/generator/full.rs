//! The path of jobs that are not plain: several sizes or files, checks, pauses, flushes, logs, a latency to
//! be kept.

use std::mem;

use memory::Buffer;
use ring::{Op, Request};
use sys::clock;

use super::plain::OPS;
use super::{DRAIN_NS_MAX, Generator, Phase, fill_noise};
use crate::Random;
use crate::log::{Entry, Logs};
use crate::side::side_of;
use crate::spec::{Content, JobSpec};
use crate::tuner::Tuner;

/// What only such jobs have.
pub(super) struct Full {
    /// By tag: the buffer of a request that carries no data.
    aside: Box<[Option<Buffer>]>,
    remaining_bytes: u64,
    unflushed: u32,
    flush_due: bool,
    flushed_at_end: bool,
    thought: u32,
    /// When the pause is over; 0 before the first.
    pub(super) think_until: u64,
    pub(super) spin_until: u64,
    latency_ticks_max: u64,
    /// Whether somebody looks at each I/O's latency.
    watches: bool,
    pub(super) tuner: Option<Tuner>,
    pub(super) logs: Logs,
    random: Random,
}

impl Full {
    pub(super) fn new(spec: &JobSpec, depth: usize, remaining_bytes: u64) -> Full {
        Full {
            aside: (0..depth).map(|_| None).collect(),
            remaining_bytes,
            unflushed: 0,
            flush_due: false,
            flushed_at_end: false,
            thought: 0,
            think_until: 0,
            spin_until: 0,
            latency_ticks_max: spec.latency_max_ns.map_or(u64::MAX, clock::ns_to_ticks),
            watches: spec.latency_max_ns.is_some()
                || spec.latency_target.is_some()
                || spec.log.latency.is_some(),
            tuner: spec.latency_target.map(|target| Tuner::new(target, depth)),
            logs: Logs::new(spec.log.clone()),
            random: Random::new(spec.seed ^ 0x6672_6573_6821),
        }
    }
}

impl Generator {
    /// Counts what came back, checks it, and keeps the requests for what comes next.
    pub(super) fn absorb_full(&mut self, now: u64) {
        if self.full.as_ref().is_some_and(|full| full.watches) {
            self.watch(now);
        }
        self.count(now);
        let mut done = mem::take(&mut self.done);
        for completion in done.drain(..) {
            let success = completion.status().is_success();
            self.settle(completion.request(), success);
            self.parked.push(completion.into_request());
            if let (Some(request), Some(full)) = (self.parked.last_mut(), &mut self.full)
                && request.buffer.is_none()
            {
                request.buffer = full.aside[request.tag.0 as usize].take();
            }
        }
        self.done = done;
        if self.phase == Phase::ReadingBack {
            self.event_ticks = now.saturating_add(clock::ns_to_ticks(DRAIN_NS_MAX));
        }
    }

    /// Shows each latency to whoever looks at it.
    fn watch(&mut self, now: u64) {
        let Some(full) = &mut self.full else { return };
        for completion in self.done.iter().filter(|completion| completion.status().is_success()) {
            let (request, batch) = (completion.request(), self.batches.batch(completion.request()));
            let index = side_of(request.op);
            let start = self.open.as_ref().map_or(batch.issued, |open| open.starts[request.tag.0 as usize]);
            let latency = now.saturating_sub(start);
            if latency > full.latency_ticks_max && self.phase <= Phase::Measuring {
                self.errors += 1;
                self.sides[index].errors += 1;
                self.remaining = 0;
                full.remaining_bytes = 0;
            }
            if let Some(tuner) = &mut full.tuner {
                tuner.note(latency);
            }
            let counted = matches!(self.phase, Phase::Measuring | Phase::Draining);
            if full.logs.options.latency.is_some() && index < 3 && counted {
                let sent = if batch.sent == 0 { batch.issued } else { batch.sent };
                let spans = [sent.saturating_sub(batch.issued), now.saturating_sub(sent), latency];
                let at_ns = clock::ticks_to_ns(now.saturating_sub(self.start_ticks));
                let bytes = request.blocks * self.block_bytes;
                let offset = request.lba * u64::from(self.block_bytes);
                let entry = Entry { at_ns, value: 0, direction: index as u8, bytes, offset };
                full.logs.latency(entry, spans.map(clock::ticks_to_ns));
            }
        }
    }

    /// Checks what came back, and remembers what is there now.
    fn settle(&mut self, request: &Request<Buffer>, success: bool) {
        let Some(verifier) = &mut self.verifier else { return };
        if request.op == Op::Flush {
            // It has no place.
            return;
        }
        let position = (request.lba - self.place.first_lba) / u64::from(self.place.io_blocks);
        match (request.op, &request.buffer) {
            (Op::Read, Some(buffer)) if success => {
                verifier.check(position, request.lba, buffer.as_slice());
            }
            (Op::Write, _) => verifier.written(position, success),
            (Op::Unmap, _) => verifier.forget(position),
            _ => {}
        }
        verifier.release(position);
    }

    /// Starts what is due, as far as requests are free: closed loops at once, open ones at their time.
    pub(super) fn feed_full(&mut self, now: u64) {
        let fresh = self.ready.len();
        match self.phase {
            Phase::Before | Phase::Ramp | Phase::Measuring => self.feed_forward(now),
            Phase::ReadingBack => self.feed_back(now),
            Phase::Draining | Phase::Over => {}
        }
        self.batches.start(&mut self.ready[fresh..], now);
    }

    fn feed_forward(&mut self, now: u64) {
        let limit = match self.full.as_ref().and_then(|full| full.tuner.as_ref()) {
            Some(tuner) => tuner.depth(),
            None => usize::MAX,
        };
        while !self.parked.is_empty() && self.in_flight() + self.ready.len() < limit {
            let Some(full) = &mut self.full else { return };
            if self.remaining == 0 || full.remaining_bytes == 0 {
                self.drain(now);
                return;
            }
            if now < full.think_until {
                return;
            }
            let (mut start, mut op) = (now, None);
            if full.flush_due {
                op = Some(Op::Flush);
            } else if let Some(open) = &self.open {
                let Some((direction, due)) = open.pace.due(now) else { return };
                start = due;
                op = Some(OPS[direction]);
            }
            self.start(op, start, now);
        }
    }

    /// Makes a request that is free the next of the job.
    fn start(&mut self, op: Option<Op>, start: u64, now: u64) {
        let (Some(request), Some(full)) = (self.parked.last_mut(), &mut self.full) else { return };
        let tag = request.tag.0 as usize;
        if let Some(open) = &mut self.open {
            open.starts[tag] = start;
        }
        if op == Some(Op::Flush) {
            full.flush_due = false;
            (request.op, request.lba, request.blocks) = (Op::Flush, 0, 0);
            full.aside[tag] = request.buffer.take();
            self.ready.extend(self.parked.pop());
            return;
        }
        self.place.next_as(request, op);
        if let Some(verifier) = &mut self.verifier {
            let drawn = (request.lba - self.place.first_lba) / u64::from(self.place.io_blocks);
            let position = verifier.claim(drawn);
            request.lba = self.place.first_lba + position * u64::from(self.place.io_blocks);
            if let (Op::Write, Some(buffer)) = (request.op, &mut request.buffer) {
                verifier.fill(position, request.lba, buffer.as_mut_slice());
            }
        }
        let bytes = request.blocks * self.block_bytes;
        match &mut request.buffer {
            Some(buffer) if request.op.has_data() => {
                if buffer.len() != bytes as usize {
                    buffer.resize(bytes as usize);
                }
                if request.op == Op::Write && self.spec.content == Content::FreshNoise {
                    fill_noise(buffer, &mut full.random);
                }
            }
            buffer => full.aside[tag] = buffer.take(),
        }
        if let Some(open) = &mut self.open {
            open.pace.advance(side_of(request.op), u64::from(bytes));
        }
        if self.remaining != u64::MAX {
            self.remaining -= 1;
        }
        if full.remaining_bytes != u64::MAX {
            full.remaining_bytes = full.remaining_bytes.saturating_sub(u64::from(bytes));
        }
        if request.op == Op::Write && self.spec.flush_every > 0 {
            full.unflushed += 1;
            full.flush_due = full.unflushed.is_multiple_of(self.spec.flush_every);
        }
        if self.spec.think.ns > 0 {
            full.thought += 1;
            if full.thought >= self.spec.think.blocks.max(1) {
                full.thought = 0;
                full.think_until = now + clock::ns_to_ticks(self.spec.think.ns);
                full.spin_until = now + clock::ns_to_ticks(self.spec.think.spin_ns);
            }
        }
        self.ready.extend(self.parked.pop());
    }

    /// What was written is read back.
    fn feed_back(&mut self, now: u64) {
        while let (Some(request), Some(verifier)) = (self.parked.last_mut(), &mut self.verifier) {
            let Some(position) = verifier.known_from(self.place.position) else { return };
            self.place.position = position + 1;
            let position = verifier.claim(position);
            // It may have been a flush, which has no blocks.
            (request.op, request.blocks) = (Op::Read, self.place.io_blocks);
            request.lba = self.place.first_lba + position * u64::from(self.place.io_blocks);
            if let Some(open) = &mut self.open {
                open.starts[request.tag.0 as usize] = now;
            }
            self.ready.extend(self.parked.pop());
        }
    }

    /// The flush at the end, once; whether it goes out now.
    pub(super) fn flush_last(&mut self, now: u64) -> bool {
        let wanted = self.spec.flush_at_end && !self.stopped && self.errors == 0;
        let Some(full) = &mut self.full else { return false };
        if !wanted || full.flushed_at_end || self.parked.is_empty() {
            return false;
        }
        full.flushed_at_end = true;
        self.start(Some(Op::Flush), now, now);
        self.batches.start(&mut self.ready, now);
        true
    }

    /// Whether the job is to be busy now although it does nothing: `thinktime_spin`.
    pub fn is_spinning(&self) -> bool {
        self.full.as_ref().is_some_and(|full| full.spin_until > 0 && clock::ticks() < full.spin_until)
    }
}
