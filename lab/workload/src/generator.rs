//! The I/O loop: closed, where an I/O starts when another completes, or open, where it starts at a scheduled time.
//!
//! Simple jobs, with one I/O size and one file, take the [`fast_path`], which moves and counts requests in
//! batches; an open loop differs only in when it starts them. [`general`] implements everything else that
//! fio's options can ask for.

mod content;
mod fast_path;
mod general;
mod pauses;
mod phases;
mod zoned;

use std::mem;
use std::sync::Arc;

use block_io::{Channel, Completion, Op, Request, Status, Tag};
use dma::{Data, Pool};
use os::{RequestPriorities, clock};

use crate::WyRand;
use crate::access_pattern::{AccessPattern, Geometry, SetupError};
use crate::arrivals::ArrivalSchedule;
use crate::batches::SubmissionBatches;
use crate::direction_stats::{DirectionStats, direction_index};
use crate::flow::FlowMember;
use crate::rate_minimum::RateMinimumCheck;
use crate::result::{DepthCounts, IoFailure, JobResult};
use crate::spec::{BufferContent, JobSpec, Verify, Workload};
use crate::steady::SteadyDetector;
use crate::timeline::TimelineRecorder;
use crate::tuner::LatencyTuner;
use crate::usage::Usage;
use crate::verify::Verifier;
use crate::zoned::ZonedJob;

use general::GeneralState;
use phases::JobPhase;
use zoned::ZonedState;

/// A block I/O channel that a generator can drive: submit and poll on one core.
pub trait IoChannel: Channel<Request = Request<Data>, Completion = Completion<Data>> {}
impl<C: ?Sized + Channel<Request = Request<Data>, Completion = Completion<Data>>> IoChannel for C {}

/// Most rounds of submit and poll in one turn, which spread the cost of the reactor's dynamic call over
/// thousands of I/Os, and the longest time that they may take, because other pollers share the core.
const ROUNDS_MAX: u32 = 1024;
const TURN_NS_MAX: u64 = 50_000;

/// Runs one job on one channel of one core.
///
/// It owns every request and its buffer, allocated when it is created, so that the loop allocates nothing. A
/// request is in one of three places: `idle`, `ready` to be submitted, or in flight in the channel. Call
/// [`turn`](Self::turn) until [`is_finished`](Self::is_finished), then [`finish`](Self::finish) or
/// [`into_result`](Self::into_result). A job passes through ramp, measurement, drain and, where it verifies
/// its writes, a read-back. `examples/cost.rs` measures what it costs an I/O.
pub struct Generator {
    // Hot: used for every I/O.
    ready: Vec<Request<Data>>,
    completions: Vec<Completion<Data>>,
    /// Number of requests: the I/O depth.
    slots: usize,
    /// Reads, writes, trims, flushes.
    stats: [DirectionStats; 4],
    pattern: AccessPattern,
    remaining_ios: u64,
    event_ticks: u64,
    completed: u64,
    /// Blocks of the ramp, which statistics do not contain.
    ramp_blocks: u64,
    /// Blocks of one pass over the files.
    pass_blocks: u64,
    batches: SubmissionBatches,
    depths: DepthCounts,
    measure_submission: bool,
    /// State of an open loop; `None` in a closed one.
    open_loop: Option<Box<OpenLoop>>,
    /// State of jobs that do not take the fast path.
    general: Option<Box<GeneralState>>,
    // Cold.
    idle: Vec<Request<Data>>,
    phase: JobPhase,
    start_ticks: u64,
    end_ticks: u64,
    sample_ticks: u64,
    turn_ticks_max: u64,
    /// Bytes of a logical block of the device.
    block_bytes: u32,
    spec: JobSpec,
    usage_start: Usage,
    usage: Usage,
    failures: Vec<IoFailure>,
    errors: u64,
    verifier: Option<Verifier>,
    steady: Option<Box<SteadyDetector>>,
    timeline: Option<Box<TimelineRecorder>>,
    rate_minimum: Option<Box<RateMinimumCheck>>,
    /// Which of the job's limits was broken.
    broken_limit: Option<String>,
    stopped: bool,
    drain_timed_out: bool,
}

/// A time in ticks that does not come.
pub(crate) const NEVER: u64 = u64::MAX;
/// A count of I/Os or bytes that is not decremented.
const UNLIMITED: u64 = u64::MAX;

/// State of an open loop.
struct OpenLoop {
    schedule: ArrivalSchedule,
    /// By tag: when the request was scheduled to start, in ticks.
    intended_starts: Box<[u64]>,
}

impl Generator {
    /// Checks the job against the device and allocates all of its buffers from `pool`.
    pub fn new(spec: JobSpec, geometry: Geometry, pool: &Pool) -> Result<Generator, SetupError> {
        Generator::with_files(spec, &[geometry], pool)
    }

    /// Like [`new`](Self::new), for several files: the `flow` of a request is the index of its file.
    pub fn with_files(spec: JobSpec, files: &[Geometry], pool: &Pool) -> Result<Generator, SetupError> {
        let pattern = AccessPattern::new(&spec, files)?;
        let geometry = files[0];
        let verifier = match spec.verify {
            Verify::Off => None,
            _ => {
                if u64::from(spec.io_depth) > pattern.positions {
                    let (depth, positions) = (spec.io_depth, pattern.positions);
                    return Err(SetupError::DepthAbovePositions { depth, positions });
                }
                Some(Verifier::new(&spec, geometry.block_bytes, pattern.positions)?)
            }
        };
        if spec.time_based && spec.runtime_ns.is_none() {
            return Err(SetupError::NoRuntime);
        }
        let ready = allocate_requests(&spec, pool)?;
        let depth = ready.len();
        let block_bytes = geometry.block_bytes;
        let region_bytes = pattern.total_bytes(block_bytes);
        let pass_bytes = region_bytes.saturating_mul(u64::from(spec.loops.max(1)));
        let of_region =
            spec.io_percent.map(|percent| (u128::from(region_bytes) * u128::from(percent) / 100) as u64);
        let bytes =
            if spec.time_based { UNLIMITED } else { spec.io_bytes.or(of_region).unwrap_or(pass_bytes) };
        let unit = u64::from(pattern.io_blocks) * u64::from(block_bytes);
        let is_fixed_size = spec.sizes.is_none();
        let by_bytes = if is_fixed_size && bytes != UNLIMITED { bytes.div_ceil(unit) } else { UNLIMITED };
        let remaining_ios =
            spec.number_ios.map_or(by_bytes, |ios| ios.min(if is_fixed_size { UNLIMITED } else { by_bytes }));
        let schedule =
            ArrivalSchedule::new(&spec.rates, spec.workload.directions(spec.read_percent), spec.seed);
        let open_loop =
            schedule.map(|schedule| Box::new(OpenLoop { schedule, intended_starts: vec![0; depth].into() }));
        let is_fast_path = pattern.is_simple()
            && verifier.is_none()
            && is_fixed_size
            && !spec.log.is_on()
            && spec.think.ns == 0
            && spec.flow.is_none()
            && !spec.workload.writes_what_it_trims()
            && spec.flush_every == 0
            && !spec.flush_at_end
            && spec.latency_target.is_none()
            && spec.latency_max_ns.is_none()
            && !spec.command_priorities.is_on()
            && spec.zoned.is_none()
            && !matches!(spec.content, BufferContent::FreshNoise | BufferContent::Reducible(_));
        let remaining_bytes = if is_fixed_size || spec.number_ios.is_some() { UNLIMITED } else { bytes };
        let general =
            (!is_fast_path).then(|| Box::new(GeneralState::new(&spec, depth, remaining_bytes, region_bytes)));
        Ok(Generator {
            completions: Vec::with_capacity(depth),
            slots: depth,
            idle: Vec::with_capacity(depth),
            ready,
            stats: Default::default(),
            remaining_ios,
            pattern,
            event_ticks: NEVER,
            completed: 0,
            ramp_blocks: 0,
            pass_blocks: (region_bytes / u64::from(block_bytes)).max(1),
            batches: SubmissionBatches::new(depth),
            depths: DepthCounts::default(),
            measure_submission: spec.measure_submission,
            open_loop,
            general,
            phase: JobPhase::NotStarted,
            start_ticks: 0,
            end_ticks: NEVER,
            sample_ticks: NEVER,
            turn_ticks_max: clock::ns_to_ticks(TURN_NS_MAX),
            block_bytes,
            usage_start: Usage::default(),
            usage: Usage::default(),
            failures: Vec::new(),
            errors: 0,
            verifier,
            steady: spec.steady.map(|options| Box::new(SteadyDetector::new(options))),
            timeline: (spec.timeline_ns > 0).then(|| Box::new(TimelineRecorder::new(spec.timeline_ns))),
            rate_minimum: (spec.rate_minima.is_on()).then(|| {
                let directions = spec.workload.directions(spec.read_percent);
                Box::new(RateMinimumCheck::new(spec.rate_minima, directions, spec.ramp_ns))
            }),
            broken_limit: None,
            stopped: false,
            drain_timed_out: false,
            spec,
        })
    }

    /// Submits and polls until a poll returns nothing, or for up to 1024 rounds or 50 us; returns the number
    /// of completions. The first call starts the job.
    pub fn turn<C: IoChannel + ?Sized>(&mut self, channel: &mut C) -> usize {
        if self.phase == JobPhase::NotStarted {
            self.begin(clock::ticks());
        }
        let is_closed = self.is_fast_path() && self.open_loop.is_none();
        let (mut total, mut turn_end_ticks) = (0, NEVER);
        for _ in 0..ROUNDS_MAX {
            if !is_closed {
                self.start_due(clock::ticks());
            }
            if !self.ready.is_empty() {
                self.submit(channel);
            }
            let count = channel.poll(&mut self.completions);
            if count == 0 {
                break;
            }
            total += count;
            // Reuse the channel's time stamp: reading the clock costs as much as the rest of the loop.
            let now = match channel.last_poll_ticks() {
                0 => clock::ticks(),
                ticks => ticks,
            };
            self.complete(now);
            if now >= self.event_ticks {
                self.on_event(now);
            }
            if turn_end_ticks == NEVER {
                turn_end_ticks = now + self.turn_ticks_max;
            } else if now >= turn_end_ticks {
                break;
            }
        }
        self.completed += total as u64;
        if total == 0 {
            self.on_idle();
        }
        if self.in_flight() == 0 && self.ready.is_empty() && self.phase > JobPhase::Measuring {
            if self.phase == JobPhase::ReadingBack {
                self.start_due_general(clock::ticks());
            }
            if self.ready.is_empty() {
                self.on_drained();
            }
        }
        total
    }

    /// Submits the ready requests and records when the channel accepted them.
    #[inline]
    fn submit<C: IoChannel + ?Sized>(&mut self, channel: &mut C) {
        let before = self.ready.len();
        channel.submit(&mut self.ready);
        let taken = before - self.ready.len();
        self.batches.mark_submitted(&self.ready, if self.measure_submission { clock::ticks() } else { 0 });
        self.depths.submitted(taken, self.in_flight());
    }

    /// Makes requests ready for the I/Os that are due.
    #[inline]
    fn start_due(&mut self, now: u64) {
        if self.is_fast_path() { self.start_due_open_loop(now) } else { self.start_due_general(now) }
    }

    /// Counts completions; a closed loop makes their requests ready again.
    #[inline]
    fn complete(&mut self, now: u64) {
        self.depths.completed(self.completions.len());
        if !self.is_fast_path() {
            self.complete_general(now);
        } else if self.open_loop.is_some() {
            self.complete_open_loop(now);
        } else {
            self.complete_closed_loop(now);
        }
    }

    #[inline]
    fn is_fast_path(&self) -> bool {
        self.general.is_none()
    }

    /// Shares I/Os with the other jobs of a flow.
    pub(crate) fn join_flow(&mut self, member: Arc<FlowMember>) {
        if let Some(general) = &mut self.general {
            general.flow = Some(member);
        }
    }

    /// Every request with its buffer, before the job starts: for engines that register buffers.
    pub fn requests(&self) -> &[Request<Data>] {
        &self.ready
    }

    /// The job is on zones.
    pub(crate) fn join_zones(&mut self, job: ZonedJob) {
        if let Some(general) = &mut self.general {
            general.zoned = Some(Box::new(ZonedState::new(job)));
        }
    }

    /// The I/O priorities of requests, for engines that support them; `None` if all have that of the job.
    pub(crate) fn priorities(&self) -> Option<RequestPriorities> {
        let recorder = self.general.as_ref().and_then(|general| general.priorities.as_ref());
        recorder.map(|recorder| recorder.by_tag.clone())
    }

    /// Requests in flight in the channel.
    pub fn outstanding(&self) -> usize {
        self.in_flight()
    }

    /// The pass over its files that the job is in, from 0, by the I/Os that completed; `None` when it starts no more I/O.
    pub(crate) fn pass(&self) -> Option<u64> {
        let is_running = self.phase <= JobPhase::Measuring;
        is_running.then(|| (self.ramp_blocks + self.measured_blocks()) / self.pass_blocks)
    }

    fn measured_blocks(&self) -> u64 {
        self.stats[..3].iter().map(|stats| stats.blocks).sum()
    }

    /// Whether the job has finished and drained.
    pub fn is_finished(&self) -> bool {
        self.phase == JobPhase::Finished
    }

    /// Starts no more I/O; the job then drains.
    pub fn stop(&mut self) {
        if self.phase != JobPhase::Finished {
            self.stopped = true;
            self.stop_issuing(clock::ticks());
        }
    }

    /// Completions so far, including those of the ramp and of failed I/Os.
    pub fn completed(&self) -> u64 {
        self.completed
    }

    /// Failed I/Os and verification mismatches so far.
    pub fn faults(&self) -> u64 {
        self.errors + self.verifier.as_ref().map_or(0, Verifier::mismatch_count)
    }

    /// Takes the rates of seconds of a job whose group's steady state is judged: I/Os and bytes.
    pub(crate) fn take_rates(&mut self) -> Vec<(u64, u64)> {
        self.steady.as_mut().map_or(Vec::new(), |detector| detector.take_samples())
    }

    /// When the next turn is due if nothing completes before, in nanoseconds of [`clock::now_ns`]; `None` for
    /// no deadline.
    pub fn deadline_ns(&self, now_ns: u64) -> Option<u64> {
        if self.phase == JobPhase::NotStarted || !self.ready.is_empty() {
            return Some(0);
        }
        let mut due = self.event_ticks;
        if !self.idle.is_empty() && self.phase <= JobPhase::Measuring {
            let think_until = self.general.as_ref().map_or(0, |general| general.not_before());
            match &self.open_loop {
                Some(open_loop) => due = due.min(open_loop.schedule.next_start().max(think_until)),
                None if think_until > 0 => due = due.min(think_until),
                None => {}
            }
        }
        let left = due.saturating_sub(clock::ticks());
        (due != NEVER).then(|| now_ns + clock::ticks_to_ns(left))
    }

    /// The measurements, once the job has finished.
    pub fn into_result(mut self) -> JobResult {
        let (mismatches, mismatch_count, checked_blocks) =
            self.verifier.as_ref().map_or((Vec::new(), 0, 0), |verifier| {
                (verifier.mismatches().to_vec(), verifier.mismatch_count(), verifier.checked_blocks())
            });
        let never_completed = if self.drain_timed_out { self.in_flight() as u64 } else { 0 };
        let zoned = self.general.as_ref().and_then(|general| general.zoned.as_ref());
        let zone_resets = zoned.map(|zoned| zoned.resets());
        let mut stats = self.stats.map(DirectionStats::into_result);
        let priorities = self.general.as_mut().and_then(|general| general.priorities.take());
        for (side, latencies) in
            stats.iter_mut().zip(priorities.into_iter().flat_map(|recorder| recorder.into_latencies()))
        {
            side.priorities = latencies;
        }
        let depth = self.general.as_ref().and_then(|general| general.tuner.as_ref()).map(LatencyTuner::depth);
        let dropped_log_entries = self.general.as_ref().map_or(0, |general| general.logs.dropped());
        JobResult {
            sync: mem::take(&mut stats[3]),
            directions: {
                let [read, write, trim, _] = stats;
                [read, write, trim]
            },
            spec: self.spec,
            usage: self.usage,
            errors: self.errors,
            failures: self.failures,
            broken_limit: self.broken_limit,
            mismatches,
            mismatch_count,
            checked_blocks,
            never_completed,
            jobs: 1,
            latency_depth: depth,
            steady: self
                .steady
                .filter(|detector| !detector.is_of_group())
                .map(|detector| detector.into_result()),
            timeline: self.timeline.map_or(Vec::new(), |timeline| timeline.into_entries()),
            depths: self.depths,
            kernel: Default::default(),
            dropped_log_entries,
            zone_resets,
            number: 0,
            log_error: None,
        }
    }

    /// Writes the job's log files, if it keeps any, and returns the measurements. `number` is the number in the
    /// names of the log files, from 1.
    pub fn finish(self, number: u32) -> JobResult {
        let written = self.general.as_ref().map_or(Ok(()), |general| general.logs.write(number));
        let mut result = self.into_result();
        result.log_error = written.err().map(|error| error.to_string());
        result
    }

    /// Whether the job is in its measured phase.
    pub fn is_measuring(&self) -> bool {
        self.phase == JobPhase::Measuring
    }

    #[cold]
    fn record_failure(&mut self, completion: &Completion<Data>) {
        let request = completion.request();
        let (op, status) = (request.op, completion.status());
        if self.spec.errors.ignores(op, status) {
            return;
        }
        if self.spec.fills_device && op == Op::Write && status.same_code(Status::CAPACITY_EXCEEDED) {
            return self.issue_no_more();
        }
        self.errors += 1;
        self.stats[direction_index(request.op)].errors += 1;
        if self.failures.len() < self.spec.errors.stored_max() {
            let (op, lba, blocks, file) = (request.op, request.lba, request.blocks, request.flow);
            self.failures.push(IoFailure { op, file, lba, blocks, status: completion.status() });
        }
        if !self.spec.errors.continues(op) {
            self.issue_no_more();
        }
    }

    /// Starts no new I/O, except a read-back.
    fn issue_no_more(&mut self) {
        self.remaining_ios = 0;
        if let Some(general) = &mut self.general {
            general.issue_no_more();
        }
    }

    /// The job fails, because one of its limits is broken.
    #[cold]
    fn break_limit(&mut self, direction: usize, description: impl FnOnce() -> String) {
        self.errors += 1;
        self.stats[direction].errors += 1;
        self.broken_limit.get_or_insert_with(description);
        self.issue_no_more();
    }

    fn in_flight(&self) -> usize {
        self.slots - self.ready.len() - self.idle.len()
    }
}

/// One request for each slot, with a buffer unless the job only trims. By default buffers hold random bytes,
/// so that the device cannot compress them.
fn allocate_requests(spec: &JobSpec, pool: &Pool) -> Result<Vec<Request<Data>>, SetupError> {
    let has_data = !matches!(spec.workload, Workload::Trim | Workload::RandTrim);
    let mut random = WyRand::new(spec.seed ^ 0x6275_6666_6572);
    (0..spec.io_depth)
        .map(|slot| {
            let mut request = Request::new(Tag(u64::from(slot)), Op::Read, 0, 0);
            if has_data {
                let mut data = pool
                    .take_data(spec.block_bytes as usize)
                    .ok_or(SetupError::NoMemory(spec.io_depth, spec.block_bytes))?;
                match &spec.content {
                    BufferContent::Noise | BufferContent::FreshNoise | BufferContent::Reducible(_) => {
                        fill_noise(&mut data, &mut random);
                    }
                    BufferContent::Zeroes => data.clear(),
                    BufferContent::Pattern(bytes) => {
                        let places = data.slices_mut().iter_mut().flat_map(|slice| slice.as_mut_slice());
                        places.zip(bytes.iter().cycle()).for_each(|(to, from)| *to = *from);
                    }
                }
                request.set_data(Some(data));
            }
            Ok(request)
        })
        .collect()
}

fn fill_noise(data: &mut Data, random: &mut WyRand) {
    for slice in data.slices_mut() {
        for chunk in slice.as_mut_slice().chunks_mut(8) {
            chunk.copy_from_slice(&random.next_bits().to_le_bytes()[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests;
