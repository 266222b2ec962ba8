//! The loop: closed, where an I/O starts when one has ended, or open, where it starts when its time has come.
//!
//! Plain jobs, closed loops of I/Os of one size on one file, have a path of their own in which requests
//! are moved and counted in batches. Everything else that fio's options ask for is in the other one.

use std::mem;

use memory::{Buffer, Pool};
use ring::{Channel, Completion, Op, Request, Tag};
use sys::clock;

use crate::Random;
use crate::log::{Entry, Logs};
use crate::pace::Pace;
use crate::place::{Geometry, Mix, Place, SetupError};
use crate::result::{Direction, IoFailure, JobResult};
use crate::side::Side;
use crate::spec::{Content, JobSpec, Verify, Workload};
use crate::tuner::Tuner;
use crate::usage::Usage;
use crate::verify::Verifier;

/// The rings that a generator drives.
pub trait IoChannel: Channel<Request = Request<Buffer>, Completion = Completion<Buffer>> {}
impl<C: ?Sized + Channel<Request = Request<Buffer>, Completion = Completion<Buffer>>> IoChannel for C {}

/// Rounds of submit and poll in one turn, so that one dynamic call from the reactor is paid for by
/// thousands of I/Os, and the longest that they may take: other pollers share the core.
const ROUNDS_MAX: u32 = 1024;
const TURN_NS_MAX: u64 = 50_000;
/// How long I/Os may stay out after the job has ended before they are given up.
const DRAIN_NS_MAX: u64 = 30_000_000_000;
/// Failed I/Os that are kept to be shown; all are counted.
const FAILURES_SHOWN_MAX: usize = 16;

/// One job on one channel of one core.
pub struct Generator {
    // What the loop touches for every I/O.
    ready: Vec<Request<Buffer>>,
    done: Vec<Completion<Buffer>>,
    /// Requests there are; as many as fit the depth.
    slots: usize,
    /// Reads, writes, trims, flushes.
    sides: [Side; 4],
    place: Place,
    remaining: u64,
    event_ticks: u64,
    completed: u64,
    /// By tag: when the request was handed to the channel.
    sent: Box<[u64]>,
    /// Tags of what is being handed over.
    order: Vec<u32>,
    measure_submission: bool,
    // What it touches seldom.
    parked: Vec<Request<Buffer>>,
    phase: Phase,
    start_ticks: u64,
    end_ticks: u64,
    sample_ticks: u64,
    turn_ticks_max: u64,
    spec: JobSpec,
    usage_start: Usage,
    usage: Usage,
    failures: Vec<IoFailure>,
    errors: u64,
    verifier: Option<Verifier>,
    stopped: bool,
    stuck: bool,
    /// Of jobs that are not plain.
    full: Option<Box<Full>>,
}

/// What only jobs that are not plain have.
struct Full {
    pace: Option<Pace>,
    /// By tag: when the request was to start, and its bytes.
    starts: Box<[(u64, u32)]>,
    /// By tag: the buffer of a request that carries no data.
    aside: Box<[Option<Buffer>]>,
    remaining_bytes: u64,
    block_bytes: u32,
    unflushed: u32,
    flush_due: bool,
    flushed_at_end: bool,
    thought: u32,
    think_until: u64,
    spin_until: u64,
    latency_ticks_max: u64,
    tuner: Option<Tuner>,
    logs: Logs,
    random: Random,
}

/// In the order in which a job passes through them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// Not begun.
    Before,
    /// Running, not counting yet.
    Ramp,
    /// Counting.
    Measuring,
    /// Nothing new is issued.
    Draining,
    /// What was written is read back and checked.
    ReadingBack,
    /// Nothing is in flight.
    Over,
}

impl Generator {
    /// Checks the job against the device and takes every buffer that it will use from `pool`.
    pub fn new(spec: JobSpec, geometry: Geometry, pool: &Pool) -> Result<Generator, SetupError> {
        Generator::over(spec, &[geometry], pool)
    }

    /// As [`new`](Self::new), over several files: the `flow` of a request is the index of its file.
    pub fn over(spec: JobSpec, files: &[Geometry], pool: &Pool) -> Result<Generator, SetupError> {
        let place = Place::new(&spec, files)?;
        let geometry = files[0];
        let verifier = match spec.verify {
            Verify::Off => None,
            mode => {
                if u64::from(spec.io_depth) > place.positions {
                    let (depth, positions) = (spec.io_depth, place.positions);
                    return Err(SetupError::DepthAbovePositions { depth, positions });
                }
                let strict = !spec.workload.writes();
                Some(Verifier::new(mode, spec.seed, geometry.block_bytes, place.positions, strict)?)
            }
        };
        if spec.time_based && spec.runtime_ns.is_none() {
            return Err(SetupError::NoRuntime);
        }
        let ready = take_buffers(&spec, pool)?;
        let depth = ready.len();
        let block_bytes = geometry.block_bytes;
        let whole = place.total_bytes(block_bytes).saturating_mul(u64::from(spec.loops.max(1)));
        let bytes = if spec.time_based { u64::MAX } else { spec.io_bytes.unwrap_or(whole) };
        let unit = u64::from(place.io_blocks) * u64::from(block_bytes);
        let fixed = spec.sizes.is_none();
        let by_bytes = if fixed && bytes != u64::MAX { bytes.div_ceil(unit) } else { u64::MAX };
        let remaining =
            spec.number_ios.map_or(by_bytes, |ios| ios.min(if fixed { u64::MAX } else { by_bytes }));
        let pace = Pace::new(&spec.rates, spec.workload.directions(spec.read_percent), spec.seed);
        let is_plain = place.is_plain()
            && pace.is_none()
            && verifier.is_none()
            && fixed
            && !spec.log.is_on()
            && spec.think.ns == 0
            && spec.flush_every == 0
            && !spec.flush_at_end
            && spec.latency_target.is_none()
            && spec.latency_max_ns.is_none()
            && spec.content != Content::FreshNoise;
        let full = (!is_plain).then(|| {
            Box::new(Full {
                pace,
                starts: vec![(0, 0); depth].into(),
                aside: (0..depth).map(|_| None).collect(),
                remaining_bytes: if fixed || spec.number_ios.is_some() { u64::MAX } else { bytes },
                block_bytes,
                unflushed: 0,
                flush_due: false,
                flushed_at_end: false,
                thought: 0,
                think_until: 0,
                spin_until: 0,
                latency_ticks_max: spec.latency_max_ns.map_or(u64::MAX, clock::ns_to_ticks),
                tuner: spec.latency_target.map(|target| Tuner::new(target, depth)),
                logs: Logs::new(spec.log.clone()),
                random: Random::new(spec.seed ^ 0x6672_6573_6821),
            })
        });
        Ok(Generator {
            done: Vec::with_capacity(depth),
            slots: depth,
            parked: Vec::with_capacity(depth),
            ready,
            sides: Default::default(),
            remaining,
            place,
            event_ticks: u64::MAX,
            completed: 0,
            sent: vec![0; depth].into(),
            order: Vec::with_capacity(depth),
            measure_submission: spec.measure_submission,
            phase: Phase::Before,
            start_ticks: 0,
            end_ticks: u64::MAX,
            sample_ticks: u64::MAX,
            turn_ticks_max: clock::ns_to_ticks(TURN_NS_MAX),
            usage_start: Usage::default(),
            usage: Usage::default(),
            failures: Vec::new(),
            errors: 0,
            verifier,
            stopped: false,
            stuck: false,
            spec,
            full,
        })
    }

    /// Submits and polls until nothing more is done at once or the turn is long enough; returns the
    /// number of completions. The first call starts the job.
    pub fn turn<C: IoChannel + ?Sized>(&mut self, channel: &mut C) -> usize {
        if self.phase == Phase::Before {
            self.begin();
        }
        let (mut total, mut turn_end_ticks) = (0, u64::MAX);
        for _ in 0..ROUNDS_MAX {
            if self.full.is_some() {
                self.feed(clock::ticks());
            }
            if !self.ready.is_empty() {
                self.submit(channel);
            }
            let count = channel.poll(&mut self.done);
            if count == 0 {
                break;
            }
            total += count;
            // A channel that looked at the clock saves us the look: it costs as much as the rest.
            let now = match channel.polled_at() {
                0 => clock::ticks(),
                ticks => ticks,
            };
            if self.full.is_some() {
                self.absorb_full(now);
            } else {
                self.absorb(now);
            }
            if now >= self.event_ticks {
                self.on_event(now);
            }
            if turn_end_ticks == u64::MAX {
                turn_end_ticks = now + self.turn_ticks_max;
            } else if now >= turn_end_ticks {
                break;
            }
        }
        self.completed += total as u64;
        if total == 0 {
            self.on_idle();
        }
        if self.in_flight() == 0 && self.ready.is_empty() && self.phase > Phase::Measuring {
            if self.phase == Phase::ReadingBack {
                self.feed_back(clock::ticks());
            }
            if self.ready.is_empty() {
                self.on_drained();
            }
        }
        total
    }

    /// Hands over what is ready, and notes when the channel had taken it.
    #[inline]
    fn submit<C: IoChannel + ?Sized>(&mut self, channel: &mut C) {
        if !self.measure_submission {
            return channel.submit(&mut self.ready);
        }
        self.order.clear();
        self.order.extend(self.ready.iter().map(|request| request.tag.0 as u32));
        channel.submit(&mut self.ready);
        let taken = self.order.len() - self.ready.len();
        let now = clock::ticks();
        for tag in &self.order[..taken] {
            self.sent[*tag as usize] = now;
        }
    }

    /// Every request, with its buffer, before the job begins: for engines that register memory.
    pub fn requests(&self) -> &[Request<Buffer>] {
        &self.ready
    }

    /// Requests handed over and not yet back.
    pub fn outstanding(&self) -> usize {
        self.in_flight()
    }

    /// Whether the job has ended and nothing is in flight.
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// Issues nothing more.
    pub fn stop(&mut self) {
        if self.phase != Phase::Over {
            self.stopped = true;
            self.end(clock::ticks());
        }
    }

    /// Completions so far, those of the ramp and of failed I/Os too.
    pub fn completed(&self) -> u64 {
        self.completed
    }

    /// Failed I/Os and wrong blocks so far.
    pub fn faults(&self) -> u64 {
        self.errors + self.verifier.as_ref().map_or(0, Verifier::mismatch_count)
    }

    /// When a turn is due although nothing completes, in nanoseconds of [`clock::now_ns`].
    pub fn deadline_ns(&self, now_ns: u64) -> Option<u64> {
        if self.phase == Phase::Before || !self.ready.is_empty() {
            return Some(0);
        }
        let mut due = self.event_ticks;
        if let Some(full) = &self.full
            && !self.parked.is_empty()
            && self.phase <= Phase::Measuring
        {
            let next = full.pace.as_ref().map_or(u64::MAX, |pace| pace.next().1);
            let next = if full.think_until > 0 { next.min(u64::MAX - 1).max(full.think_until) } else { next };
            due = due.min(if full.pace.is_none() && full.think_until > 0 { full.think_until } else { next });
        }
        let left = due.saturating_sub(clock::ticks());
        (due != u64::MAX).then(|| now_ns + clock::ticks_to_ns(left))
    }

    /// What was measured. Meant for a job that is over.
    pub fn into_result(self) -> JobResult {
        let (mismatches, mismatch_count, checked_blocks) =
            self.verifier.as_ref().map_or((Vec::new(), 0, 0), |verifier| {
                (verifier.mismatches().to_vec(), verifier.mismatch_count(), verifier.checked_blocks())
            });
        let stuck = if self.stuck { self.in_flight() as u64 } else { 0 };
        let mut sides = self.sides.map(Side::into_result);
        let depth = self.full.as_ref().and_then(|full| full.tuner.as_ref()).map(Tuner::depth);
        let lost_entries = self.full.as_ref().map_or(0, |full| full.logs.lost);
        JobResult {
            sync: mem::take(&mut sides[3]),
            sides: {
                let [read, write, trim, _] = sides;
                [read, write, trim]
            },
            spec: self.spec,
            usage: self.usage,
            errors: self.errors,
            failures: self.failures,
            mismatches,
            mismatch_count,
            checked_blocks,
            stuck,
            jobs: 1,
            latency_depth: depth,
            kernel: Default::default(),
            lost_entries,
            number: 0,
            log_error: None,
        }
    }

    /// Writes the job's logs, if it keeps any, and gives what was measured; `number` counts jobs from 1.
    pub fn finish(self, number: u32) -> JobResult {
        let written = self.full.as_ref().map_or(Ok(()), |full| full.logs.write(number));
        let mut result = self.into_result();
        result.log_error = written.err().map(|error| error.to_string());
        result
    }

    /// Whether what happens now is counted.
    pub fn is_measuring(&self) -> bool {
        self.phase == Phase::Measuring
    }

    fn begin(&mut self) {
        let now = clock::ticks();
        self.usage_start = Usage::now();
        self.start_ticks = now;
        if self.spec.ramp_ns > 0 {
            self.phase = Phase::Ramp;
            self.event_ticks = now + clock::ns_to_ticks(self.spec.ramp_ns);
        } else {
            self.measure(now);
        }
        if let Some(full) = &mut self.full {
            if let Some(pace) = &mut full.pace {
                pace.begin(now);
            }
            self.parked.append(&mut self.ready);
            // The first of all is the one of tag 0.
            self.parked.reverse();
            return;
        }
        let wanted = (self.ready.len() as u64).min(self.remaining) as usize;
        self.remaining =
            self.remaining.saturating_sub(if self.remaining == u64::MAX { 0 } else { wanted as u64 });
        self.parked.extend(self.ready.drain(wanted..));
        for request in &mut self.ready {
            self.place.next(request);
            request.issued = now;
        }
        if self.ready.is_empty() {
            self.drain(now);
        }
    }

    fn measure(&mut self, now: u64) {
        self.phase = Phase::Measuring;
        self.start_ticks = now;
        let runtime = self.spec.runtime_ns.map(clock::ns_to_ticks);
        self.end_ticks = runtime.map_or(u64::MAX, |runtime| now.saturating_add(runtime));
        let sample = match self.spec.sample_ns {
            0 => u64::MAX,
            ns => now.saturating_add(clock::ns_to_ticks(ns)),
        };
        self.sample_ticks = sample;
        self.event_ticks = self.end_ticks.min(sample);
        if let Some(tuner) = self.full.as_mut().and_then(|full| full.tuner.as_mut()) {
            self.event_ticks = self.event_ticks.min(tuner.begin(now));
        }
    }

    /// The loop's inside: for each I/O, its latency into a bucket and its request out again.
    ///
    /// Whole requests are moved first and changed then: three plain loops cost less than one that
    /// does all.
    #[inline]
    fn absorb(&mut self, now: u64) {
        let mut done = mem::take(&mut self.done);
        let again = self.take_remaining(done.len());
        self.count(&done, now);
        let (ready, place) = (&mut self.ready, &mut self.place);
        let fresh = ready.len();
        ready.extend(done.drain(..again).map(Completion::into_request));
        for request in &mut ready[fresh..] {
            place.next(request);
            request.issued = now;
        }
        self.parked.extend(done.drain(..).map(Completion::into_request));
        self.done = done;
        if again == 0 && self.phase <= Phase::Measuring {
            self.drain(now);
        }
    }

    /// Counts completions, neighbours that were issued together as one.
    #[inline]
    fn count(&mut self, mut completions: &[Completion<Buffer>], now: u64) {
        while let Some(first) = completions.first() {
            let (op, issued) = (first.request().op, first.request().issued);
            let sent = self.sent[first.tag().0 as usize];
            let like_first = |completion: &&Completion<Buffer>| {
                let request = completion.request();
                completion.status().is_success()
                    && request.op == op
                    && request.issued == issued
                    && self.sent[request.tag.0 as usize] == sent
            };
            let length = completions.iter().take_while(like_first).count();
            if length == 0 {
                self.note_failure(first);
                completions = &completions[1..];
                continue;
            }
            let blocks = first.request().blocks;
            let side = &mut self.sides[side_of(op)];
            side.record(issued, issued, if self.measure_submission { sent } else { 0 }, now, length as u64);
            side.blocks += u64::from(blocks) * length as u64;
            completions = &completions[length..];
        }
    }

    /// As [`absorb`](Self::absorb), of everything that jobs can be.
    fn absorb_full(&mut self, now: u64) {
        let mut done = mem::take(&mut self.done);
        for completion in done.drain(..) {
            let success = completion.status().is_success();
            if !success {
                self.note_failure(&completion);
            }
            let mut request = completion.into_request();
            let tag = request.tag.0 as usize;
            if success {
                self.record(&request, now);
            }
            self.settle(&request, success);
            if let Some(full) = &mut self.full
                && let Some(buffer) = full.aside[tag].take()
            {
                request.buffer = Some(buffer);
            }
            self.parked.push(request);
        }
        self.done = done;
        if self.phase == Phase::ReadingBack {
            self.event_ticks = now.saturating_add(clock::ns_to_ticks(DRAIN_NS_MAX));
        }
    }

    fn record(&mut self, request: &Request<Buffer>, now: u64) {
        let Some(full) = &mut self.full else { return };
        let tag = request.tag.0 as usize;
        let (start, bytes) = full.starts[tag];
        let sent = if self.measure_submission { self.sent[tag] } else { 0 };
        let index = side_of(request.op);
        let side = &mut self.sides[index];
        side.record(start, request.issued, sent, now, 1);
        side.blocks += u64::from(request.blocks);
        let latency = now.saturating_sub(start);
        if latency > full.latency_ticks_max && self.phase <= Phase::Measuring {
            self.errors += 1;
            side.errors += 1;
            self.remaining = 0;
            full.remaining_bytes = 0;
        }
        if let Some(tuner) = &mut full.tuner {
            tuner.note(latency);
        }
        let counted = matches!(self.phase, Phase::Measuring | Phase::Draining);
        if full.logs.options.latency.is_some() && index < 3 && counted {
            let sent = if sent == 0 { request.issued } else { sent };
            let spans = [sent.saturating_sub(request.issued), now.saturating_sub(sent), latency];
            let at_ns = clock::ticks_to_ns(now.saturating_sub(self.start_ticks));
            let offset = request.lba * u64::from(full.block_bytes);
            let entry = Entry { at_ns, value: 0, direction: index as u8, bytes, offset };
            full.logs.latency(entry, spans.map(clock::ticks_to_ns));
        }
    }

    /// Starts what is due, as far as requests are free: closed loops at once, open ones at their time.
    fn feed(&mut self, now: u64) {
        if self.phase == Phase::ReadingBack {
            return self.feed_back(now);
        }
        if self.phase > Phase::Measuring {
            return;
        }
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
            } else if let Some(pace) = &full.pace {
                let (direction, due) = pace.next();
                if due > now {
                    return;
                }
                start = due;
                op = Some([Op::Read, Op::Write, Op::Unmap][direction]);
            }
            if let Some(request) = self.parked.pop() {
                self.start(request, op, start, now);
            }
        }
    }

    /// Makes a request the next of the job.
    fn start(&mut self, mut request: Request<Buffer>, op: Option<Op>, start: u64, now: u64) {
        let Some(full) = &mut self.full else { return };
        let tag = request.tag.0 as usize;
        request.issued = now;
        if op == Some(Op::Flush) {
            full.flush_due = false;
            (request.op, request.lba, request.blocks) = (Op::Flush, 0, 0);
            full.aside[tag] = request.buffer.take();
            full.starts[tag] = (start, 0);
            self.ready.push(request);
            return;
        }
        self.place.next_as(&mut request, op);
        if let Some(verifier) = &mut self.verifier {
            let drawn = (request.lba - self.place.first_lba) / u64::from(self.place.io_blocks);
            let position = verifier.claim(drawn);
            request.lba = self.place.first_lba + position * u64::from(self.place.io_blocks);
            if let (Op::Write, Some(buffer)) = (request.op, &mut request.buffer) {
                verifier.fill(position, request.lba, buffer.as_mut_slice());
            }
        }
        let bytes = request.blocks * full.block_bytes;
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
        full.starts[tag] = (start, bytes);
        if let Some(pace) = &mut full.pace {
            pace.advance(side_of(request.op), u64::from(bytes));
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
        self.ready.push(request);
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
            request.issued = now;
            if let Some(full) = &mut self.full {
                let bytes = request.blocks * full.block_bytes;
                full.starts[request.tag.0 as usize] = (now, bytes);
            }
            self.ready.extend(self.parked.pop());
        }
    }

    /// Whether the job is to be busy now although it does nothing: `thinktime_spin`.
    pub fn is_spinning(&self) -> bool {
        self.full.as_ref().is_some_and(|full| full.spin_until > 0 && clock::ticks() < full.spin_until)
    }

    /// How many of `count` requests are to go out again.
    #[inline]
    fn take_remaining(&mut self, count: usize) -> usize {
        if self.phase > Phase::Measuring {
            return 0;
        }
        let again = (count as u64).min(self.remaining);
        if self.remaining != u64::MAX {
            self.remaining -= again;
        }
        again as usize
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

    #[cold]
    fn note_failure(&mut self, completion: &Completion<Buffer>) {
        let request = completion.request();
        self.errors += 1;
        self.sides[side_of(request.op)].errors += 1;
        if self.failures.len() < FAILURES_SHOWN_MAX {
            let (op, lba, blocks) = (request.op, request.lba, request.blocks);
            self.failures.push(IoFailure { op, lba, blocks, status: completion.status() });
        }
        if !self.spec.continue_on_error {
            self.remaining = 0;
        }
    }

    #[cold]
    fn on_event(&mut self, now: u64) {
        match self.phase {
            Phase::Ramp => {
                for side in &mut self.sides {
                    side.clear();
                }
                if let Some(full) = &mut self.full {
                    full.logs.clear();
                }
                self.usage_start = Usage::now();
                self.measure(now);
            }
            Phase::Measuring if now >= self.end_ticks => self.end(now),
            Phase::Measuring => self.tick(now),
            _ => {}
        }
    }

    /// Samples, and the judgement of a depth.
    fn tick(&mut self, now: u64) {
        let elapsed_ns = clock::ticks_to_ns(now.saturating_sub(self.start_ticks));
        let mut tuner_ticks = u64::MAX;
        if now >= self.sample_ticks {
            let bytes = self.full.as_ref().map_or(0, |full| full.block_bytes).max(1);
            let unit = if self.full.is_some() { bytes } else { self.spec.block_bytes / self.place.io_blocks };
            let directions = self.spec.workload.directions(self.spec.read_percent);
            for index in (0..3).filter(|index| directions[*index]) {
                let (iops, rate) = self.sides[index].sample(elapsed_ns, unit);
                if let Some(full) = &mut self.full {
                    full.logs.rates(elapsed_ns, index as u8, iops as u64, rate as u64);
                }
            }
            if let Some(full) = &mut self.full
                && full.logs.options.average_ns > 0
            {
                full.logs.end_window(elapsed_ns);
            }
            let step = clock::ns_to_ticks(self.spec.sample_ns).max(1);
            let missed = (now - self.sample_ticks) / step;
            self.sample_ticks = self.sample_ticks.saturating_add((missed + 1).saturating_mul(step));
        }
        if let Some(tuner) = self.full.as_mut().and_then(|full| full.tuner.as_mut()) {
            tuner_ticks = tuner.judge(now);
        }
        self.event_ticks = self.end_ticks.min(self.sample_ticks).min(tuner_ticks);
    }

    /// Time passes although nothing completes.
    fn on_idle(&mut self) {
        let now = clock::ticks();
        match self.phase {
            Phase::Ramp | Phase::Measuring if now >= self.event_ticks => self.on_event(now),
            Phase::Draining | Phase::ReadingBack if now >= self.event_ticks => {
                self.account(now);
                self.stuck = true;
                self.phase = Phase::Over;
            }
            _ => {}
        }
    }

    /// Issues nothing more. What is out is waited for and counted, what is ready stays.
    #[cold]
    fn end(&mut self, now: u64) {
        if let Some(verifier) = &mut self.verifier {
            for request in self.ready.iter().filter(|request| request.op.has_range()) {
                verifier.release((request.lba - self.place.first_lba) / u64::from(self.place.io_blocks));
            }
        }
        self.parked.append(&mut self.ready);
        self.drain(now);
    }

    /// Nothing is left to issue but what is ready.
    fn drain(&mut self, now: u64) {
        self.phase = Phase::Draining;
        self.event_ticks = now.saturating_add(clock::ns_to_ticks(DRAIN_NS_MAX));
    }

    /// Nothing is in flight: over, unless what was written is to be read back.
    #[cold]
    fn on_drained(&mut self) {
        if self.phase == Phase::Over {
            return;
        }
        let now = clock::ticks();
        if self.phase == Phase::Draining {
            self.account(now);
            if self.flush_last(now) {
                return;
            }
        }
        let only_writes = matches!(self.place.mix, Mix::Only(Op::Write));
        let read_back = self.phase == Phase::Draining && only_writes && self.verifier.is_some();
        if !read_back || self.stopped || self.errors > 0 {
            if self.phase == Phase::ReadingBack {
                self.account(now);
            }
            self.phase = Phase::Over;
            return;
        }
        self.phase = Phase::ReadingBack;
        (self.start_ticks, self.place.position) = (now, 0);
        self.event_ticks = now.saturating_add(clock::ns_to_ticks(DRAIN_NS_MAX));
        self.feed_back(now);
    }

    /// The flush at the end, once; whether it goes out now.
    fn flush_last(&mut self, now: u64) -> bool {
        let wanted = self.spec.flush_at_end && !self.stopped && self.errors == 0;
        let Some(full) = &mut self.full else { return false };
        if !wanted || full.flushed_at_end {
            return false;
        }
        full.flushed_at_end = true;
        let Some(request) = self.parked.pop() else { return false };
        self.start(request, Some(Op::Flush), now, now);
        true
    }

    /// Notes how long the phase that ends now took.
    fn account(&mut self, now: u64) {
        let elapsed_ns = clock::ticks_to_ns(now.saturating_sub(self.start_ticks));
        if self.phase == Phase::ReadingBack {
            self.sides[Direction::Read as usize].result.elapsed_ns = elapsed_ns;
            return;
        }
        let unit = match &self.full {
            Some(full) => full.block_bytes,
            None => self.spec.block_bytes / self.place.io_blocks,
        };
        for side in &mut self.sides {
            side.account(elapsed_ns, unit);
        }
        self.usage = Usage::now().since(self.usage_start);
    }

    fn in_flight(&self) -> usize {
        self.slots - self.ready.len() - self.parked.len()
    }
}

/// One buffer a slot, filled with the seed's noise, so that nothing below can compress it.
fn take_buffers(spec: &JobSpec, pool: &Pool) -> Result<Vec<Request<Buffer>>, SetupError> {
    let has_data = !matches!(spec.workload, Workload::Trim | Workload::RandTrim);
    let mut random = Random::new(spec.seed ^ 0x6275_6666_6572);
    (0..spec.io_depth)
        .map(|slot| {
            let mut request = Request::new(Tag(u64::from(slot)), Op::Read, 0, 0);
            if has_data {
                let mut buffer = pool
                    .take(spec.block_bytes as usize)
                    .ok_or(SetupError::NoMemory(spec.io_depth, spec.block_bytes))?;
                match &spec.content {
                    Content::Noise | Content::FreshNoise => fill_noise(&mut buffer, &mut random),
                    Content::Zeroes => buffer.clear(),
                    Content::Pattern(bytes) => {
                        let repeated = bytes.iter().cycle();
                        buffer.as_mut_slice().iter_mut().zip(repeated).for_each(|(to, from)| *to = *from);
                    }
                }
                request.buffer = Some(buffer);
            }
            Ok(request)
        })
        .collect()
}

fn fill_noise(buffer: &mut Buffer, random: &mut Random) {
    for chunk in buffer.as_mut_slice().chunks_mut(8) {
        chunk.copy_from_slice(&random.next_bits().to_le_bytes()[..chunk.len()]);
    }
}

#[inline]
fn side_of(op: Op) -> usize {
    match op {
        Op::Read => Direction::Read as usize,
        Op::Write => Direction::Write as usize,
        Op::Flush => 3,
        _ => Direction::Trim as usize,
    }
}

#[cfg(test)]
mod tests;
