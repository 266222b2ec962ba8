//! The closed loop.

use std::mem;

use memory::{Buffer, Pool};
use ring::{Channel, Completion, Op, Request, Tag};
use sys::clock;

use crate::place::{Geometry, Mix, Place, SetupError};
use crate::result::{Direction, IoFailure, JobResult, SideResult};
use crate::spec::{JobSpec, Verify, Workload};
use crate::usage::Usage;
use crate::verify::Verifier;
use crate::{Histogram, Random};

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
    sides: [Side; 3],
    place: Place,
    remaining: u64,
    event_ticks: u64,
    completed: u64,
    // What it touches seldom.
    parked: Vec<Request<Buffer>>,
    phase: Phase,
    start_ticks: u64,
    turn_ticks_max: u64,
    spec: JobSpec,
    usage_start: Usage,
    usage: Usage,
    failures: Vec<IoFailure>,
    errors: u64,
    verifier: Option<Verifier>,
    stopped: bool,
    stuck: bool,
}

#[derive(Default)]
struct Side {
    latency: Histogram,
    errors: u64,
    elapsed_ns: u64,
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
        let place = Place::new(&spec, geometry)?;
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
        let once = if spec.time_based { u64::MAX } else { place.positions };
        Ok(Generator {
            done: Vec::with_capacity(ready.len()),
            slots: ready.len(),
            parked: Vec::with_capacity(ready.len()),
            ready,
            sides: Default::default(),
            remaining: spec.number_ios.unwrap_or(once),
            place,
            event_ticks: u64::MAX,
            completed: 0,
            phase: Phase::Before,
            start_ticks: 0,
            turn_ticks_max: clock::ns_to_ticks(TURN_NS_MAX),
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
            self.begin();
        }
        let (mut total, mut turn_end_ticks) = (0, u64::MAX);
        for _ in 0..ROUNDS_MAX {
            if !self.ready.is_empty() {
                channel.submit(&mut self.ready);
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
            if self.verifier.is_some() {
                self.absorb_verifying(now);
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
        if self.in_flight() == 0 && self.ready.is_empty() {
            self.on_drained();
        }
        total
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
        let left = self.event_ticks.saturating_sub(clock::ticks());
        (self.event_ticks != u64::MAX).then(|| now_ns + clock::ticks_to_ns(left))
    }

    /// What was measured. Meant for a job that is over.
    pub fn into_result(self) -> JobResult {
        let unit = u64::from(self.spec.block_bytes);
        let (mismatches, mismatch_count, checked_blocks) =
            self.verifier.as_ref().map_or((Vec::new(), 0, 0), |verifier| {
                (verifier.mismatches().to_vec(), verifier.mismatch_count(), verifier.checked_blocks())
            });
        let stuck = if self.stuck { self.in_flight() as u64 } else { 0 };
        let sides = self.sides.map(|side| SideResult {
            total_ios: side.latency.count(),
            bytes: side.latency.count() * unit,
            latency_ticks: side.latency,
            errors: side.errors,
            elapsed_ns: side.elapsed_ns,
        });
        JobResult {
            spec: self.spec,
            sides,
            usage: self.usage,
            errors: self.errors,
            failures: self.failures,
            mismatches,
            mismatch_count,
            checked_blocks,
            stuck,
            jobs: 1,
        }
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
        let wanted = (self.ready.len() as u64).min(self.remaining) as usize;
        self.remaining -= wanted as u64;
        self.parked.extend(self.ready.drain(wanted..));
        let mut ready = mem::take(&mut self.ready);
        for request in &mut ready {
            self.prepare(request, now);
        }
        self.ready = ready;
    }

    fn measure(&mut self, now: u64) {
        self.phase = Phase::Measuring;
        self.start_ticks = now;
        let runtime = self.spec.runtime_ns.map(clock::ns_to_ticks);
        self.event_ticks = runtime.map_or(u64::MAX, |runtime| now.saturating_add(runtime));
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
            let like_first = |completion: &&Completion<Buffer>| {
                let request = completion.request();
                completion.status().is_success() && request.op == op && request.issued == issued
            };
            let length = completions.iter().take_while(like_first).count();
            if length == 0 {
                self.note_failure(first);
                completions = &completions[1..];
                continue;
            }
            let elapsed = now.saturating_sub(issued);
            self.sides[side_of(op)].latency.record_many(elapsed, length as u64);
            completions = &completions[length..];
        }
    }

    /// As [`absorb`](Self::absorb), and looks at the data.
    fn absorb_verifying(&mut self, now: u64) {
        let mut done = mem::take(&mut self.done);
        let again =
            if self.phase == Phase::ReadingBack { done.len() } else { self.take_remaining(done.len()) };
        for (index, completion) in done.drain(..).enumerate() {
            let success = completion.status().is_success();
            if !success {
                self.note_failure(&completion);
            }
            let mut request = completion.into_request();
            if success {
                let elapsed = now.saturating_sub(request.issued);
                self.sides[side_of(request.op)].latency.record(elapsed);
            }
            self.settle(&request, success);
            let reissued = index < again && self.prepare(&mut request, now);
            if reissued { &mut self.ready } else { &mut self.parked }.push(request);
        }
        self.done = done;
        match self.phase {
            Phase::ReadingBack => self.event_ticks = now.saturating_add(clock::ns_to_ticks(DRAIN_NS_MAX)),
            Phase::Ramp | Phase::Measuring if again == 0 => self.drain(now),
            _ => {}
        }
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

    /// Makes a request the next of the job; `false` when there is no next one to read back.
    fn prepare(&mut self, request: &mut Request<Buffer>, now: u64) -> bool {
        request.issued = now;
        let Some(verifier) = &mut self.verifier else {
            self.place.next(request);
            return true;
        };
        let position = if self.phase == Phase::ReadingBack {
            let Some(position) = verifier.known_from(self.place.position) else { return false };
            self.place.position = position + 1;
            request.op = Op::Read;
            verifier.claim(position)
        } else {
            self.place.next(request);
            let drawn = (request.lba - self.place.first_lba) / u64::from(self.place.io_blocks);
            verifier.claim(drawn)
        };
        request.lba = self.place.first_lba + position * u64::from(self.place.io_blocks);
        if let (Op::Write, Some(buffer)) = (request.op, &mut request.buffer) {
            verifier.fill(position, request.lba, buffer.as_mut_slice());
        }
        true
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
                    side.latency.clear();
                }
                self.usage_start = Usage::now();
                self.measure(now);
            }
            Phase::Measuring => self.end(now),
            _ => {}
        }
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
            for request in &self.ready {
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
        self.account(now);
        let only_writes = matches!(self.place.mix, Mix::Only(Op::Write));
        let read_back = self.phase == Phase::Draining && only_writes && self.verifier.is_some();
        if !read_back || self.stopped || self.errors > 0 {
            self.phase = Phase::Over;
            return;
        }
        self.phase = Phase::ReadingBack;
        (self.start_ticks, self.place.position) = (now, 0);
        self.event_ticks = now.saturating_add(clock::ns_to_ticks(DRAIN_NS_MAX));
        let parked = mem::take(&mut self.parked);
        for mut request in parked {
            let reissued = self.prepare(&mut request, now);
            if reissued { &mut self.ready } else { &mut self.parked }.push(request);
        }
    }

    /// Notes how long the phase that ends now took.
    fn account(&mut self, now: u64) {
        let elapsed_ns = clock::ticks_to_ns(now.saturating_sub(self.start_ticks));
        if self.phase == Phase::ReadingBack {
            self.sides[Direction::Read as usize].elapsed_ns = elapsed_ns;
            return;
        }
        for side in &mut self.sides {
            side.elapsed_ns = elapsed_ns;
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
                for chunk in buffer.as_mut_slice().chunks_mut(8) {
                    chunk.copy_from_slice(&random.next_bits().to_le_bytes()[..chunk.len()]);
                }
                request.buffer = Some(buffer);
            }
            Ok(request)
        })
        .collect()
}

#[inline]
fn side_of(op: Op) -> usize {
    match op {
        Op::Read => Direction::Read as usize,
        Op::Write => Direction::Write as usize,
        _ => Direction::Trim as usize,
    }
}

#[cfg(test)]
mod tests;
