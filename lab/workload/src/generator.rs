//! The loop: closed, where an I/O starts when one has ended, or open, where it starts when its time has come.
//!
//! Plain jobs, I/Os of one size on one file, have a path of their own in which requests are moved and
//! counted in batches; an open one differs only in when it starts them. Everything else that fio's options
//! ask for is in [`full`].

mod full;
mod plain;

use std::mem;

use memory::{Buffer, Pool};
use ring::{Channel, Completion, Op, Request, Tag};
use sys::clock;

use crate::Random;
use crate::batches::Batches;
use crate::pace::Pace;
use crate::place::{Geometry, Mix, Place, SetupError};
use crate::result::{Depths, Direction, IoFailure, JobResult};
use crate::side::{Side, side_of};
use crate::spec::{Content, JobSpec, Verify, Workload};
use crate::tuner::Tuner;
use crate::usage::Usage;
use crate::verify::Verifier;

use full::Full;

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
    batches: Batches,
    depths: Depths,
    measure_submission: bool,
    /// Of open loops.
    open: Option<Box<Open>>,
    /// Of jobs that are not plain.
    full: Option<Box<Full>>,
    // What it touches seldom.
    parked: Vec<Request<Buffer>>,
    phase: Phase,
    start_ticks: u64,
    end_ticks: u64,
    sample_ticks: u64,
    turn_ticks_max: u64,
    /// Of a block of the device.
    block_bytes: u32,
    spec: JobSpec,
    usage_start: Usage,
    usage: Usage,
    failures: Vec<IoFailure>,
    errors: u64,
    verifier: Option<Verifier>,
    stopped: bool,
    stuck: bool,
}

/// What only open loops have.
struct Open {
    pace: Pace,
    /// By tag: when the request was to start.
    starts: Box<[u64]>,
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
        let open = pace.map(|pace| Box::new(Open { pace, starts: vec![0; depth].into() }));
        let is_plain = place.is_plain()
            && verifier.is_none()
            && fixed
            && !spec.log.is_on()
            && spec.think.ns == 0
            && spec.flush_every == 0
            && !spec.flush_at_end
            && spec.latency_target.is_none()
            && spec.latency_max_ns.is_none()
            && spec.content != Content::FreshNoise;
        let remaining_bytes = if fixed || spec.number_ios.is_some() { u64::MAX } else { bytes };
        let full = (!is_plain).then(|| Box::new(Full::new(&spec, depth, remaining_bytes)));
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
            batches: Batches::new(depth),
            depths: Depths::default(),
            measure_submission: spec.measure_submission,
            open,
            full,
            phase: Phase::Before,
            start_ticks: 0,
            end_ticks: u64::MAX,
            sample_ticks: u64::MAX,
            turn_ticks_max: clock::ns_to_ticks(TURN_NS_MAX),
            block_bytes,
            usage_start: Usage::default(),
            usage: Usage::default(),
            failures: Vec::new(),
            errors: 0,
            verifier,
            stopped: false,
            stuck: false,
            spec,
        })
    }

    /// Submits and polls until nothing more is done at once or the turn is long enough; returns the
    /// number of completions. The first call starts the job.
    pub fn turn<C: IoChannel + ?Sized>(&mut self, channel: &mut C) -> usize {
        if self.phase == Phase::Before {
            self.begin(clock::ticks());
        }
        let is_closed = self.is_plain() && self.open.is_none();
        let (mut total, mut turn_end_ticks) = (0, u64::MAX);
        for _ in 0..ROUNDS_MAX {
            if !is_closed {
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
            self.absorb(now);
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
                self.feed_full(clock::ticks());
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
        let before = self.ready.len();
        channel.submit(&mut self.ready);
        let taken = before - self.ready.len();
        self.batches.sent(&self.ready, if self.measure_submission { clock::ticks() } else { 0 });
        self.depths.submitted(taken, self.in_flight());
    }

    /// Starts what is due.
    #[inline]
    fn feed(&mut self, now: u64) {
        if self.is_plain() { self.feed_open(now) } else { self.feed_full(now) }
    }

    /// Counts what came back; a closed loop starts it again.
    #[inline]
    fn absorb(&mut self, now: u64) {
        self.depths.completed(self.done.len());
        if !self.is_plain() {
            self.absorb_full(now);
        } else if self.open.is_some() {
            self.absorb_open(now);
        } else {
            self.absorb_closed(now);
        }
    }

    #[inline]
    fn is_plain(&self) -> bool {
        self.full.is_none()
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
        if !self.parked.is_empty() && self.phase <= Phase::Measuring {
            let think_until = self.full.as_ref().map_or(0, |full| full.think_until);
            match &self.open {
                Some(open) => due = due.min(open.pace.next_start().max(think_until)),
                None if think_until > 0 => due = due.min(think_until),
                None => {}
            }
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
            depths: self.depths,
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

    fn begin(&mut self, now: u64) {
        self.usage_start = Usage::now();
        self.start_ticks = now;
        if self.spec.ramp_ns > 0 {
            self.phase = Phase::Ramp;
            self.event_ticks = now + clock::ns_to_ticks(self.spec.ramp_ns);
        } else {
            self.measure(now);
        }
        if let Some(open) = &mut self.open {
            open.pace.begin(now);
        }
        if self.full.is_some() || self.open.is_some() {
            self.parked.append(&mut self.ready);
            // The first of all is the one of tag 0.
            self.parked.reverse();
            return;
        }
        let wanted = self.take_remaining(self.ready.len());
        self.parked.extend(self.ready.drain(wanted..));
        self.issue(0, now, false);
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
                self.depths = Depths::default();
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
            let directions = self.spec.workload.directions(self.spec.read_percent);
            for index in (0..3).filter(|index| directions[*index]) {
                let (iops, rate) = self.sides[index].sample(elapsed_ns, self.block_bytes);
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
        if self.phase > Phase::Before {
            self.batches.withdraw(&self.ready);
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
        self.feed_full(now);
    }

    /// Notes how long the phase that ends now took.
    fn account(&mut self, now: u64) {
        let elapsed_ns = clock::ticks_to_ns(now.saturating_sub(self.start_ticks));
        if self.phase == Phase::ReadingBack {
            self.sides[Direction::Read as usize].result.elapsed_ns = elapsed_ns;
            return;
        }
        for side in &mut self.sides {
            side.account(elapsed_ns, self.block_bytes);
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

#[cfg(test)]
mod tests;
