//! Results of jobs.

use std::fmt;

use block_io::{Op, Status};

use crate::Histogram;
use crate::priorities;
use crate::spec::JobSpec;
use crate::steady::SteadyResult;
use crate::timeline::{self, TimelineEntry};
use crate::usage::Usage;
use crate::verify::VerifyMismatch;

/// The kinds of I/O that are reported separately; the value is the index in [`JobResult::directions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Reads.
    Read = 0,
    /// Writes.
    Write = 1,
    /// Deallocations.
    Trim = 2,
}

impl Direction {
    /// All directions, by index.
    pub const ALL: [Direction; 3] = [Direction::Read, Direction::Write, Direction::Trim];

    /// fio's name, a key of its JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Direction::Read => "read",
            Direction::Write => "write",
            Direction::Trim => "trim",
        }
    }
}

/// An I/O that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoFailure {
    /// Operation.
    pub op: Op,
    /// Index of the job's file.
    pub file: u16,
    /// First logical block.
    pub lba: u64,
    /// Length in logical blocks.
    pub blocks: u32,
    /// Completion status.
    pub status: Status,
}

impl fmt::Display for IoFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} blocks at LBA {}: {}", self.op.name(), self.blocks, self.lba, self.status)
    }
}

/// Results of one direction of a job.
#[derive(Clone, Debug, Default)]
pub struct DirectionResult {
    /// I/Os that succeeded.
    pub total_ios: u64,
    /// Bytes that they transferred.
    pub bytes: u64,
    /// Total latencies (`lat`), from the scheduled start to completion, in ticks of [`os::clock`].
    pub latency_ticks: Histogram,
    /// Completion latencies (`clat`), from submission to completion; from the start if submission is not
    /// measured.
    pub completion_ticks: Histogram,
    /// Submission latencies (`slat`), from the start to the channel's acceptance; empty if not measured.
    pub submission_ticks: Histogram,
    /// I/Os that failed.
    pub errors: u64,
    /// Length of the measurement.
    pub elapsed_ns: u64,
    /// Bytes of a logical block of the device.
    pub block_bytes: u32,
    /// Samples of I/Os a second.
    pub iops_samples: Samples,
    /// Samples of KiB a second.
    pub bandwidth_samples: Samples,
    /// Latencies by I/O priority, where I/Os have different ones: total ones with `lat_percentiles`,
    /// otherwise those of completion.
    pub priorities: Vec<(u16, Histogram)>,
}

/// Summary statistics of a series of samples; the samples are not kept.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Samples {
    /// Number of samples.
    pub count: u64,
    /// Smallest sample, 0 if there is none.
    pub min: f64,
    /// Largest sample, 0 if there is none.
    pub max: f64,
    /// Sum of the samples.
    pub sum: f64,
    /// Sum of their squares.
    pub sum_of_squares: f64,
}

impl Samples {
    /// Adds a sample.
    pub fn add(&mut self, value: f64) {
        self.min = if self.count == 0 { value } else { self.min.min(value) };
        self.max = self.max.max(value);
        self.count += 1;
        self.sum += value;
        self.sum_of_squares += value * value;
    }

    /// The mean, 0 if there is no sample.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum / self.count as f64 }
    }

    /// The standard deviation, 0 if there is no sample.
    pub fn deviation(&self) -> f64 {
        let mean = self.mean();
        if self.count == 0 {
            0.0
        } else {
            (self.sum_of_squares / self.count as f64 - mean * mean).max(0.0).sqrt()
        }
    }

    /// Merges the samples of jobs that ran at the same time, as if they had been sampled as one: rates add
    /// up, and so do variances.
    fn merge_concurrent(&self, other: &Samples) -> Samples {
        if self.count == 0 || other.count == 0 {
            return if self.count == 0 { *other } else { *self };
        }
        let count = self.count.max(other.count);
        let mean = self.mean() + other.mean();
        let variance = self.deviation().powi(2) + other.deviation().powi(2);
        Samples {
            count,
            min: self.min + other.min,
            max: self.max + other.max,
            sum: mean * count as f64,
            sum_of_squares: (variance + mean * mean) * count as f64,
        }
    }
}

/// Counts of queue depths and of batch sizes in fio's buckets, which end at 1, 2, 4, 8, 16, 32 and above for
/// depths, and at 0, 4, 8, 16, 32, 64 and above for batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DepthCounts {
    /// I/Os by the number in flight at their submission, themselves included.
    pub level: [u64; 7],
    /// Submissions by the number of I/Os that the channel accepted.
    pub submit: [u64; 7],
    /// Polls by the number of completions that they returned.
    pub complete: [u64; 7],
}

impl DepthCounts {
    /// Counts a submission of which the channel accepted `taken`, with `in_flight` afterwards.
    #[inline]
    pub(crate) fn submitted(&mut self, taken: usize, in_flight: usize) {
        // Submissions to a full channel are retried and do not count.
        if taken > 0 {
            self.level[(in_flight.max(1).ilog2() as usize).min(6)] += taken as u64;
            self.submit[batch_class(taken)] += 1;
        }
    }

    /// Counts a poll that returned `count` completions.
    #[inline]
    pub(crate) fn completed(&mut self, count: usize) {
        self.complete[batch_class(count)] += 1;
    }

    fn merge(&mut self, other: &DepthCounts) {
        let add = |mine: &mut [u64; 7], theirs: &[u64; 7]| {
            mine.iter_mut().zip(theirs).for_each(|(mine, theirs)| *mine += theirs);
        };
        add(&mut self.level, &other.level);
        add(&mut self.submit, &other.submit);
        add(&mut self.complete, &other.complete);
    }
}

/// The bucket of a batch size: 0, then up to 4, 8, 16, 32, 64, and above.
#[inline]
fn batch_class(count: usize) -> usize {
    if count == 0 { 0 } else { (((count - 1) | 3).ilog2() as usize).min(6) }
}

/// Processor time of the kernel threads that served a job, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelThreads {
    /// io_uring's submission queue polling thread (`iou-sqp-*`).
    pub submission_ns: u64,
    /// io_uring's workers (`iou-wrk-*`) that existed at the end.
    pub workers_ns: u64,
}

impl DirectionResult {
    /// I/Os a second.
    pub fn iops(&self) -> f64 {
        per_second(self.total_ios, self.elapsed_ns)
    }

    /// Bytes a second.
    pub fn bytes_per_second(&self) -> f64 {
        per_second(self.bytes, self.elapsed_ns)
    }

    fn merge(&mut self, other: &DirectionResult) {
        self.total_ios += other.total_ios;
        self.bytes += other.bytes;
        self.latency_ticks.merge(&other.latency_ticks);
        self.completion_ticks.merge(&other.completion_ticks);
        self.submission_ticks.merge(&other.submission_ticks);
        self.iops_samples = self.iops_samples.merge_concurrent(&other.iops_samples);
        self.bandwidth_samples = self.bandwidth_samples.merge_concurrent(&other.bandwidth_samples);
        self.block_bytes = self.block_bytes.max(other.block_bytes);
        self.errors += other.errors;
        self.elapsed_ns = self.elapsed_ns.max(other.elapsed_ns);
        priorities::merge(&mut self.priorities, &other.priorities);
    }
}

/// The result of a job, or the merged result of several.
#[derive(Clone, Debug)]
pub struct JobResult {
    /// The job.
    pub spec: JobSpec,
    /// Results by [`Direction`].
    pub directions: [DirectionResult; 3],
    /// Flushes; fio reports them as `sync`.
    pub sync: DirectionResult,
    /// Processor time, context switches and page faults of the job's thread during the measurement.
    pub usage: Usage,
    /// I/Os that failed.
    pub errors: u64,
    /// Details of the first failed I/Os.
    pub failures: Vec<IoFailure>,
    /// Which of the job's limits was broken: `max_latency`, `rate_min`.
    pub broken_limit: Option<String>,
    /// Details of the first verification mismatches.
    pub mismatches: Vec<VerifyMismatch>,
    /// Blocks that did not verify.
    pub mismatch_count: u64,
    /// Blocks that were verified, with or without success.
    pub checked_blocks: u64,
    /// I/Os that were still in flight when the drain timed out.
    pub never_completed: u64,
    /// Number of jobs merged in this result.
    pub jobs: u32,
    /// Queue depths and batch sizes.
    pub depths: DepthCounts,
    /// The I/O depth that the latency tuner reached; `None` without a latency target.
    pub latency_depth: Option<usize>,
    /// The steady state; `None` if it was not asked for, or in merged results.
    pub steady: Option<SteadyResult>,
    /// I/Os and latencies over the run; empty unless `timeline` is given.
    pub timeline: Vec<TimelineEntry>,
    /// Processor time of kernel threads.
    pub kernel: KernelThreads,
    /// Write pointers of zones that the job reset; `None` of jobs that are not on zones.
    pub zone_resets: Option<u64>,
    /// Log entries dropped because the log was full.
    pub dropped_log_entries: u64,
    /// The job's number among its copies.
    pub number: u32,
    /// Why the log files could not be written, if so.
    pub log_error: Option<String>,
}

impl JobResult {
    /// The result of a job that does no I/O.
    pub(crate) fn without_io(spec: JobSpec, usage: Usage, number: u32) -> JobResult {
        JobResult {
            spec,
            directions: Default::default(),
            sync: DirectionResult::default(),
            usage,
            errors: 0,
            failures: Vec::new(),
            broken_limit: None,
            mismatches: Vec::new(),
            mismatch_count: 0,
            checked_blocks: 0,
            never_completed: 0,
            jobs: 1,
            depths: DepthCounts::default(),
            latency_depth: None,
            steady: None,
            timeline: Vec::new(),
            kernel: KernelThreads::default(),
            zone_resets: None,
            dropped_log_entries: 0,
            number,
            log_error: None,
        }
    }

    /// Merges results: adds counts and rates, merges histograms. `None` if there are none.
    pub fn merged(results: &[JobResult]) -> Option<JobResult> {
        let (first, rest) = results.split_first()?;
        let mut merged = first.clone();
        for result in rest {
            let mut result = result.clone();
            if merged.spec.priority != result.spec.priority
                || merged.has_priorities()
                || result.has_priorities()
            {
                merged.split_by_priority();
                result.split_by_priority();
            }
            for (mine, theirs) in merged.directions.iter_mut().zip(&result.directions) {
                mine.merge(theirs);
            }
            merged.sync.merge(&result.sync);
            merged.kernel.submission_ns += result.kernel.submission_ns;
            merged.kernel.workers_ns += result.kernel.workers_ns;
            merged.depths.merge(&result.depths);
            merged.dropped_log_entries += result.dropped_log_entries;
            merged.log_error = merged.log_error.or_else(|| result.log_error.clone());
            merged.latency_depth = merged.latency_depth.max(result.latency_depth);
            merged.steady = merged.steady.or(result.steady);
            merged.timeline = timeline::merged(&merged.timeline, &result.timeline, first.spec.timeline_ns);
            merged.usage = merged.usage.plus(result.usage);
            merged.errors += result.errors;
            merged.broken_limit = merged.broken_limit.or_else(|| result.broken_limit.clone());
            merged.failures.extend_from_slice(&result.failures);
            merged.mismatches.extend_from_slice(&result.mismatches);
            merged.mismatch_count += result.mismatch_count;
            merged.checked_blocks += result.checked_blocks;
            merged.never_completed += result.never_completed;
            merged.jobs += result.jobs;
            merged.zone_resets = match (merged.zone_resets, result.zone_resets) {
                (None, None) => None,
                (one, other) => Some(one.unwrap_or(0) + other.unwrap_or(0)),
            };
        }
        Some(merged)
    }

    fn has_priorities(&self) -> bool {
        self.directions.iter().any(|side| !side.priorities.is_empty())
    }

    /// Latencies that are not recorded by priority are those of the job's.
    fn split_by_priority(&mut self) {
        let of_total = self.spec.command_priorities.of_total_latency;
        for side in self.directions[..2].iter_mut().filter(|side| side.total_ios > 0) {
            if side.priorities.is_empty() {
                let latencies = if of_total { &side.latency_ticks } else { &side.completion_ticks };
                side.priorities = vec![(self.spec.priority, latencies.clone())];
            }
        }
    }

    /// Results of one direction.
    pub fn direction(&self, direction: Direction) -> &DirectionResult {
        &self.directions[direction as usize]
    }

    /// All directions merged, as with fio's `unified_rw_reporting`.
    pub fn unified(&self) -> DirectionResult {
        let [reads, writes, trims] = &self.directions;
        let mut all = reads.clone();
        all.merge(writes);
        all.merge(trims);
        all
    }

    /// Successful I/Os of all directions.
    pub fn total_ios(&self) -> u64 {
        self.directions.iter().map(|side| side.total_ios).sum()
    }

    /// Processor time of the job's threads per I/O, in nanoseconds.
    pub fn cpu_ns_per_io(&self) -> f64 {
        self.usage.cpu_ns as f64 / self.total_ios().max(1) as f64
    }

    /// Longest measurement of any direction.
    pub fn elapsed_ns(&self) -> u64 {
        self.directions.iter().map(|side| side.elapsed_ns).max().unwrap_or(0)
    }

    /// Whether every I/O completed with success and every checked block verified.
    pub fn is_clean(&self) -> bool {
        self.errors == 0 && self.mismatch_count == 0 && self.never_completed == 0
    }
}

fn per_second(count: u64, elapsed_ns: u64) -> f64 {
    if elapsed_ns == 0 { 0.0 } else { count as f64 * 1e9 / elapsed_ns as f64 }
}
