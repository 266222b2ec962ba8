//! The general path, for all that the fast path leaves out: several sizes or files, verification, think time,
//! flushes, logs, latency targets and limits.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;

use block_io::{Op, Request};
use dma::Data;
use os::clock;

use super::content::ReducibleWriter;
use super::fast_path::OPS;
use super::pauses::Pauses;
use super::phases::{DRAIN_NS_MAX, JobPhase};
use super::zoned::ZonedState;
use super::{Generator, NEVER, UNLIMITED, fill_noise};
use crate::WyRand;
use crate::direction_stats::direction_index;
use crate::flow::FlowMember;
use crate::log::{JobLogs, LogEntry};
use crate::priorities::PriorityRecorder;
use crate::spec::{BufferContent, JobSpec};
use crate::tuner::LatencyTuner;

/// State that only jobs on the general path need.
pub(super) struct GeneralState {
    /// By tag: the buffer of a request whose operation carries no data, until it completes.
    detached_buffers: Box<[Option<Data>]>,
    pub(super) remaining_bytes: u64,
    unflushed: u32,
    flush_due: bool,
    flushed_at_end: bool,
    pub(super) pauses: Pauses,
    pub(super) flow: Option<Arc<FlowMember>>,
    /// No I/O starts before this time, because the job is ahead of its share of the flow.
    flow_until: u64,
    latency_ticks_max: u64,
    pub(super) priorities: Option<PriorityRecorder>,
    pub(super) zoned: Option<Box<ZonedState>>,
    /// Whether a log, the tuner or `max_latency` needs the latency of each I/O.
    records_latency: bool,
    pub(super) tuner: Option<LatencyTuner>,
    pub(super) logs: JobLogs,
    random: WyRand,
    reducible: Option<ReducibleWriter>,
    /// Positions that were written and not yet read back, with `verify_backlog`; at most that many and the I/O depth.
    backlog: VecDeque<u64>,
    /// How many of them are to be read back now.
    backlog_due: usize,
}

impl GeneralState {
    pub(super) fn new(spec: &JobSpec, depth: usize, remaining_bytes: u64, region_bytes: u64) -> GeneralState {
        GeneralState {
            detached_buffers: (0..depth).map(|_| None).collect(),
            remaining_bytes,
            unflushed: 0,
            flush_due: false,
            flushed_at_end: false,
            pauses: Pauses::new(spec.think),
            flow: None,
            flow_until: 0,
            zoned: None,
            priorities: spec
                .command_priorities
                .is_on()
                .then(|| PriorityRecorder::new(&spec.command_priorities, spec.priority, depth, spec.seed)),
            latency_ticks_max: spec.latency_max_ns.map_or(NEVER, clock::ns_to_ticks),
            records_latency: spec.latency_max_ns.is_some()
                || spec.latency_target.is_some()
                || spec.log.needs_each_io()
                || spec.command_priorities.is_on(),
            tuner: spec.latency_target.map(|target| LatencyTuner::new(target, depth)),
            logs: JobLogs::new(spec.log.clone()),
            random: WyRand::new(spec.seed ^ 0x6672_6573_6821),
            reducible: match &spec.content {
                BufferContent::Reducible(content) => Some(ReducibleWriter::new(content, spec, region_bytes)),
                _ => None,
            },
            backlog: match spec.verify_backlog {
                0 => VecDeque::new(),
                writes => VecDeque::with_capacity(writes as usize + depth),
            },
            backlog_due: 0,
        }
    }
}

/// How long a job waits for its share of a flow without `flow_sleep`.
const FLOW_WAIT_NS: u64 = 10_000;

impl GeneralState {
    /// No I/O starts before this time, ticks; 0 for any.
    pub(super) fn not_before(&self) -> u64 {
        let zone_until = self.zoned.as_ref().map_or(0, |zoned| zoned.not_before());
        self.pauses.until().max(self.flow_until).max(zone_until)
    }

    /// Whether the job may start an I/O now, by its share of a flow; counts the I/O if it may.
    fn flow_admits(&mut self, now: u64) -> bool {
        let Some(flow) = &self.flow else { return true };
        if now < self.flow_until {
            return false;
        }
        let admitted = flow.admit();
        self.flow_until =
            if admitted { 0 } else { now + clock::ns_to_ticks(flow.options.sleep_ns.max(FLOW_WAIT_NS)) };
        admitted
    }

    /// A verified position was written: read it back when the backlog is full.
    fn add_to_backlog(&mut self, spec: &JobSpec, position: u64) {
        if spec.verify_backlog == 0 {
            return;
        }
        self.backlog.push_back(position);
        if self.backlog_due == 0 && self.backlog.len() >= spec.verify_backlog as usize {
            self.backlog_due = match spec.verify_batch {
                0 => self.backlog.len(),
                batch => (batch as usize).min(self.backlog.len()),
            };
        }
    }

    /// The next position to read back before the job goes on.
    fn next_of_backlog(&mut self) -> Option<u64> {
        self.backlog_due = self.backlog_due.checked_sub(1)?;
        self.backlog.pop_front()
    }

    pub(super) fn issue_no_more(&mut self) {
        self.remaining_bytes = 0;
    }
}

impl Generator {
    /// Counts and verifies completions and returns their requests to `idle`.
    pub(super) fn complete_general(&mut self, now: u64) {
        if self.general.as_ref().is_some_and(|general| general.records_latency) {
            self.record_latencies(now);
        }
        self.record_completions(now);
        let mut completions = mem::take(&mut self.completions);
        let first_new = self.ready.len();
        for completion in completions.drain(..) {
            let success = completion.status().is_success();
            self.verify_completed(completion.request(), success);
            let mut request = completion.into_request();
            let Some(general) = &mut self.general else { continue };
            if let (Some(zoned), true) = (&mut general.zoned, request.op != Op::Flush) {
                zoned.completed(&request, self.block_bytes, success);
            }
            if request.op != Op::Flush {
                general.pauses.count_completed(now);
            }
            if request.data().is_none() {
                request.set_data(general.detached_buffers[request.tag.0 as usize].take());
            }
            let goes_on = success && !self.stopped && now < self.end_ticks;
            if request.op == Op::Unmap && goes_on && self.spec.workload.writes_what_it_trims() {
                request.op = Op::Write;
                self.prepare_write(&mut request);
                self.ready.push(request);
            } else {
                self.idle.push(request);
            }
        }
        self.completions = completions;
        self.batches.start(&mut self.ready[first_new..], now);
        if self.idle.len() == self.slots
            && let Some(general) = &mut self.general
        {
            general.pauses.begin_due(now);
        }
        if self.phase == JobPhase::ReadingBack {
            self.event_ticks = now.saturating_add(clock::ns_to_ticks(DRAIN_NS_MAX));
        }
    }

    /// Passes each latency to the log, the tuner and the check of `max_latency`.
    fn record_latencies(&mut self, now: u64) {
        let mut too_long = None;
        let Some(general) = &mut self.general else { return };
        for completion in self.completions.iter().filter(|completion| completion.status().is_success()) {
            let (request, batch) = (completion.request(), self.batches.batch(completion.request()));
            let index = direction_index(request.op);
            let start = self
                .open_loop
                .as_ref()
                .map_or(batch.issued, |open_loop| open_loop.intended_starts[request.tag.0 as usize]);
            let latency = now.saturating_sub(start);
            if latency > general.latency_ticks_max && self.phase <= JobPhase::Measuring {
                too_long = Some(index);
            }
            if let Some(tuner) = &mut general.tuner {
                tuner.record(latency);
            }
            let counted = matches!(self.phase, JobPhase::Measuring | JobPhase::Draining);
            let submitted = if batch.submitted == 0 { batch.issued } else { batch.submitted };
            let mut priority = self.spec.priority;
            if let Some(recorder) = &mut general.priorities {
                priority = recorder.of(request.tag.0);
                recorder.record(request.tag.0, index, now.saturating_sub(submitted), latency);
            }
            if general.logs.options.needs_each_io() && index < 3 && counted {
                let spans = [submitted.saturating_sub(batch.issued), now.saturating_sub(submitted), latency];
                let at_ns = clock::ticks_to_ns(now.saturating_sub(self.start_ticks));
                let bytes = request.blocks * self.block_bytes;
                let offset = request.lba * u64::from(self.block_bytes);
                let entry = LogEntry { at_ns, value: 0, direction: index as u8, bytes, offset, priority };
                general.logs.record_io(entry, spans.map(clock::ticks_to_ns));
            }
        }
        if let Some(direction) = too_long {
            self.break_limit(direction, || "an I/O took longer than --max_latency".to_string());
        }
    }

    /// Verifies a read, or records the new content after a write or trim, and releases the position.
    fn verify_completed(&mut self, request: &Request<Data>, success: bool) {
        let Some(verifier) = &mut self.verifier else { return };
        if request.op == Op::Flush {
            // A flush has no position.
            return;
        }
        let position = (request.lba - self.pattern.first_lba) / u64::from(self.pattern.io_blocks);
        match (request.op, request.data().and_then(Data::single)) {
            (Op::Read, Some(buffer)) if success => {
                verifier.check(position, request.lba, buffer.as_slice());
            }
            (Op::Write, _) => {
                verifier.record_write(position, success);
                if let Some(general) = self.general.as_mut().filter(|_| success) {
                    general.add_to_backlog(&self.spec, position);
                }
            }
            (Op::Unmap, _) => verifier.mark_unknown(position),
            _ => {}
        }
        verifier.release(position);
    }

    /// Starts the I/Os that are due while requests are idle: at once in a closed loop, at their scheduled time in
    /// an open one.
    pub(super) fn start_due_general(&mut self, now: u64) {
        let first_new = self.ready.len();
        match self.phase {
            JobPhase::NotStarted | JobPhase::Ramp | JobPhase::Measuring => self.start_new(now),
            JobPhase::ReadingBack => self.start_read_back(now),
            JobPhase::Draining | JobPhase::Finished => {}
        }
        self.batches.start(&mut self.ready[first_new..], now);
    }

    fn start_new(&mut self, now: u64) {
        let limit = match self.general.as_ref().and_then(|general| general.tuner.as_ref()) {
            Some(tuner) => tuner.depth(),
            None => usize::MAX,
        };
        while !self.idle.is_empty() && self.in_flight() + self.ready.len() < limit {
            let Some(general) = &mut self.general else { return };
            if let Some(position) = general.next_of_backlog() {
                self.read_back(position, now);
                continue;
            }
            let Some(general) = &mut self.general else { return };
            let is_last = self.remaining_ios == 0 || general.remaining_bytes == 0;
            // fio pauses after the last I/O, too.
            if now < general.pauses.until() && !(is_last && self.errors > 0) {
                return;
            }
            if is_last {
                self.start_draining(now);
                return;
            }
            let (mut start, mut op) = (now, None);
            if general.flush_due {
                op = Some(Op::Flush);
            } else if let Some(open_loop) = &self.open_loop {
                let Some((direction, due)) = open_loop.schedule.due(now) else { return };
                start = due;
                op = Some(OPS[direction]);
            }
            let is_admitted = general.zoned.as_ref().is_some_and(|zoned| zoned.has_drawn());
            if op != Some(Op::Flush) && !is_admitted && !general.flow_admits(now) {
                return;
            }
            if op != Some(Op::Flush) && self.is_on_zones() && !self.draw_in_zones(op, now) {
                return;
            }
            self.start_request(op, start);
        }
    }

    /// Takes an idle request and makes it the job's next I/O; `op` overrides the drawn operation.
    fn start_request(&mut self, op: Option<Op>, start: u64) {
        let (Some(request), Some(general)) = (self.idle.last_mut(), &mut self.general) else { return };
        let tag = request.tag.0 as usize;
        if let Some(open_loop) = &mut self.open_loop {
            open_loop.intended_starts[tag] = start;
        }
        if op == Some(Op::Flush) {
            general.flush_due = false;
            (request.op, request.lba, request.blocks) = (Op::Flush, 0, 0);
            general.detached_buffers[tag] = request.take_data();
            self.ready.extend(self.idle.pop());
            return;
        }
        if general.zoned.is_none() {
            self.pattern.next_with_op(request, op);
            // The last I/O of several sizes is as large as what is left, as in fio.
            let left = general.remaining_bytes / u64::from(self.block_bytes);
            if general.remaining_bytes != UNLIMITED && u64::from(request.blocks) > left {
                request.blocks = left.max(1) as u32;
            }
        }
        if let Some(verifier) = &mut self.verifier {
            let drawn = (request.lba - self.pattern.first_lba) / u64::from(self.pattern.io_blocks);
            let position = verifier.claim(drawn);
            request.lba = self.pattern.first_lba + position * u64::from(self.pattern.io_blocks);
            let (op, lba) = (request.op, request.lba);
            if let (Op::Write, Some(buffer)) = (op, request.data_mut().and_then(Data::single_mut)) {
                verifier.fill(position, lba, buffer.as_mut_slice());
            }
        }
        let bytes = request.blocks * self.block_bytes;
        let op = request.op;
        if !op.has_data() {
            general.detached_buffers[tag] = request.take_data();
        } else if let Some(buffer) = request.data_mut().and_then(Data::single_mut)
            && buffer.len() != bytes as usize
        {
            buffer.resize(bytes as usize);
        }
        if let Some(open_loop) = &mut self.open_loop {
            open_loop.schedule.advance(direction_index(request.op), u64::from(bytes));
        }
        if self.remaining_ios != UNLIMITED {
            self.remaining_ios -= 1;
        }
        if general.remaining_bytes != UNLIMITED {
            general.remaining_bytes = general.remaining_bytes.saturating_sub(u64::from(bytes));
        }
        general.pauses.count_issued();
        if let Some(recorder) = &mut general.priorities {
            recorder.draw(tag as u64, op, bytes);
        }
        let Some(mut request) = self.idle.pop() else { return };
        if op == Op::Write {
            self.prepare_write(&mut request);
        }
        self.ready.push(request);
    }

    /// Fills a write's buffer where each has bytes of its own, and counts the write for `fsync`.
    fn prepare_write(&mut self, request: &mut Request<Data>) {
        let Some(general) = &mut self.general else { return };
        if let Some(data) = request.data_mut() {
            match (&mut general.reducible, data.single_mut()) {
                (Some(writer), Some(buffer)) => writer.fill(buffer.as_mut_slice()),
                _ if self.spec.content == BufferContent::FreshNoise => {
                    fill_noise(data, &mut general.random);
                }
                _ => {}
            }
        }
        if self.spec.flush_every > 0 {
            general.unflushed += 1;
            general.flush_due = general.unflushed.is_multiple_of(self.spec.flush_every);
        }
    }

    /// Reads back the positions that hold verified data, in order.
    fn start_read_back(&mut self, now: u64) {
        while let (false, Some(verifier)) = (self.idle.is_empty(), &self.verifier) {
            // With a backlog, all others were read back before.
            let position = match (&mut self.general, self.spec.verify_backlog) {
                (Some(general), 1..) => general.backlog.pop_front(),
                _ => verifier.next_known(self.pattern.position),
            };
            let Some(position) = position else { return };
            self.pattern.position = position + 1;
            self.read_back(position, now);
        }
    }

    /// Makes an idle request read a written position, or the next one that no I/O is using.
    fn read_back(&mut self, position: u64, now: u64) {
        let (Some(request), Some(verifier)) = (self.idle.last_mut(), &mut self.verifier) else { return };
        let position = verifier.claim(position);
        // The request's last operation may have been a flush, with 0 blocks.
        (request.op, request.blocks) = (Op::Read, self.pattern.io_blocks);
        request.lba = self.pattern.first_lba + position * u64::from(self.pattern.io_blocks);
        if let Some(open_loop) = &mut self.open_loop {
            open_loop.intended_starts[request.tag.0 as usize] = now;
        }
        self.ready.extend(self.idle.pop());
    }

    /// Makes the flush of `end_fsync` ready, once; returns whether it did.
    pub(super) fn submit_final_flush(&mut self, now: u64) -> bool {
        let wanted = self.spec.flush_at_end && !self.stopped && self.errors == 0;
        let Some(general) = &mut self.general else { return false };
        if !wanted || general.flushed_at_end || self.idle.is_empty() {
            return false;
        }
        general.flushed_at_end = true;
        self.start_request(Some(Op::Flush), now);
        self.batches.start(&mut self.ready, now);
        true
    }

    /// Whether the job must busy-wait now: `thinktime_spin`.
    pub fn is_spinning(&self) -> bool {
        self.general.as_ref().is_some_and(|general| general.pauses.is_spinning())
    }
}
