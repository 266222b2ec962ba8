//! What was measured.

use std::fmt;

use ring::{Op, Status};

use crate::Histogram;
use crate::spec::JobSpec;
use crate::usage::Usage;
use crate::verify::Mismatch;

/// The three kinds of I/O that are reported apart; also their index in [`JobResult::sides`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Data in.
    Read = 0,
    /// Data out.
    Write = 1,
    /// Deallocation.
    Trim = 2,
}

impl Direction {
    /// All of them, by index.
    pub const ALL: [Direction; 3] = [Direction::Read, Direction::Write, Direction::Trim];

    /// fio's name.
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
    /// What it was.
    pub op: Op,
    /// Where it began.
    pub lba: u64,
    /// How long it was.
    pub blocks: u32,
    /// How it ended.
    pub status: Status,
}

impl fmt::Display for IoFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} blocks at LBA {}: {}", self.op.name(), self.blocks, self.lba, self.status)
    }
}

/// One direction of a job.
#[derive(Clone, Debug, Default)]
pub struct SideResult {
    /// I/Os that succeeded.
    pub total_ios: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Their latencies, from when they were to start to their end, in ticks of [`sys::clock`].
    pub latency_ticks: Histogram,
    /// From when the channel had taken them to their end; from their start, where that was not measured.
    pub completion_ticks: Histogram,
    /// From their start to when the channel had taken them; empty where that was not measured.
    pub submission_ticks: Histogram,
    /// I/Os that failed.
    pub errors: u64,
    /// How long was measured.
    pub elapsed_ns: u64,
    /// Bytes of a block of the device.
    pub block_bytes: u32,
    /// I/Os a second, sampled.
    pub iops_samples: Samples,
    /// KiB a second, sampled.
    pub bandwidth_samples: Samples,
}

/// Numbers of which only their spread is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Samples {
    /// How many.
    pub count: u64,
    /// The smallest, 0 of none.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// Their sum.
    pub sum: f64,
    /// The sum of their squares.
    pub squares: f64,
}

impl Samples {
    /// One more.
    pub fn add(&mut self, value: f64) {
        self.min = if self.count == 0 { value } else { self.min.min(value) };
        self.max = self.max.max(value);
        self.count += 1;
        self.sum += value;
        self.squares += value * value;
    }

    /// 0 of none.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum / self.count as f64 }
    }

    /// The standard deviation of the samples.
    pub fn deviation(&self) -> f64 {
        let mean = self.mean();
        if self.count == 0 { 0.0 } else { (self.squares / self.count as f64 - mean * mean).max(0.0).sqrt() }
    }

    /// Those of jobs that ran beside each other, as if they had been sampled as one: rates add up, and
    /// so do the squares of their deviations.
    fn beside(&self, other: &Samples) -> Samples {
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
            squares: (variance + mean * mean) * count as f64,
        }
    }
}

/// How deep the queue was, and how many requests went and came together: fio's classes, which end at 1, 2, 4,
/// 8, 16, 32 and above for depths, and at 0, 4, 8, 16, 32, 64 and above for batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depths {
    /// I/Os by how many were in flight when they were handed over, themselves included.
    pub level: [u64; 7],
    /// Submissions by how many I/Os the channel took.
    pub submit: [u64; 7],
    /// Polls that returned something by how much that was.
    pub complete: [u64; 7],
}

impl Depths {
    /// The channel took so many, and has so many then.
    #[inline]
    pub(crate) fn submitted(&mut self, taken: usize, in_flight: usize) {
        // A full channel is asked again and again.
        if taken > 0 {
            self.level[(in_flight.max(1).ilog2() as usize).min(6)] += taken as u64;
            self.submit[class(taken)] += 1;
        }
    }

    /// The channel gave back so many.
    #[inline]
    pub(crate) fn completed(&mut self, count: usize) {
        self.complete[class(count)] += 1;
    }

    fn merge(&mut self, other: &Depths) {
        let add = |mine: &mut [u64; 7], theirs: &[u64; 7]| {
            mine.iter_mut().zip(theirs).for_each(|(mine, theirs)| *mine += theirs);
        };
        add(&mut self.level, &other.level);
        add(&mut self.submit, &other.submit);
        add(&mut self.complete, &other.complete);
    }
}

/// 0, then up to 4, 8, 16, 32, 64, and above.
#[inline]
fn class(count: usize) -> usize {
    if count == 0 { 0 } else { (((count - 1) | 3).ilog2() as usize).min(6) }
}

/// Processor time of kernel threads that worked for a job, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelThreads {
    /// The thread that polls for submissions (`iou-sqp-*`).
    pub submission_ns: u64,
    /// Workers of io_uring (`iou-wrk-*`) that were there at the end.
    pub workers_ns: u64,
}

impl SideResult {
    /// I/Os a second.
    pub fn iops(&self) -> f64 {
        per_second(self.total_ios, self.elapsed_ns)
    }

    /// Bytes a second.
    pub fn bytes_per_second(&self) -> f64 {
        per_second(self.bytes, self.elapsed_ns)
    }

    fn merge(&mut self, other: &SideResult) {
        self.total_ios += other.total_ios;
        self.bytes += other.bytes;
        self.latency_ticks.merge(&other.latency_ticks);
        self.completion_ticks.merge(&other.completion_ticks);
        self.submission_ticks.merge(&other.submission_ticks);
        self.iops_samples = self.iops_samples.beside(&other.iops_samples);
        self.bandwidth_samples = self.bandwidth_samples.beside(&other.bandwidth_samples);
        self.block_bytes = self.block_bytes.max(other.block_bytes);
        self.errors += other.errors;
        self.elapsed_ns = self.elapsed_ns.max(other.elapsed_ns);
    }
}

/// A job, or several that were merged.
#[derive(Clone, Debug)]
pub struct JobResult {
    /// What was asked for.
    pub spec: JobSpec,
    /// By [`Direction`].
    pub sides: [SideResult; 3],
    /// Flushes.
    pub sync: SideResult,
    /// What the job's thread used while it measured.
    pub usage: Usage,
    /// I/Os that failed.
    pub errors: u64,
    /// The first of them.
    pub failures: Vec<IoFailure>,
    /// The first blocks that were wrong.
    pub mismatches: Vec<Mismatch>,
    /// How many blocks were wrong.
    pub mismatch_count: u64,
    /// How many blocks were checked.
    pub checked_blocks: u64,
    /// I/Os that never came back.
    pub stuck: u64,
    /// How many jobs are in this result.
    pub jobs: u32,
    /// How deep the queue was, and how large batches were.
    pub depths: Depths,
    /// The depth that kept the latency target, where there was one.
    pub latency_depth: Option<usize>,
    /// Kernel threads that worked for it.
    pub kernel: KernelThreads,
    /// Entries of logs that were too many to keep.
    pub lost_entries: u64,
    /// The job's number among its copies.
    pub number: u32,
    /// Why its logs could not be written.
    pub log_error: Option<String>,
}

impl JobResult {
    /// One result for all: counts and rates added, latencies merged. `None` for none.
    pub fn merged(results: &[JobResult]) -> Option<JobResult> {
        let (first, rest) = results.split_first()?;
        let mut merged = first.clone();
        for result in rest {
            for (mine, theirs) in merged.sides.iter_mut().zip(&result.sides) {
                mine.merge(theirs);
            }
            merged.sync.merge(&result.sync);
            merged.kernel.submission_ns += result.kernel.submission_ns;
            merged.kernel.workers_ns += result.kernel.workers_ns;
            merged.depths.merge(&result.depths);
            merged.lost_entries += result.lost_entries;
            merged.log_error = merged.log_error.or_else(|| result.log_error.clone());
            merged.latency_depth = merged.latency_depth.max(result.latency_depth);
            merged.usage = merged.usage.plus(result.usage);
            merged.errors += result.errors;
            merged.failures.extend_from_slice(&result.failures);
            merged.mismatches.extend_from_slice(&result.mismatches);
            merged.mismatch_count += result.mismatch_count;
            merged.checked_blocks += result.checked_blocks;
            merged.stuck += result.stuck;
            merged.jobs += result.jobs;
        }
        Some(merged)
    }

    /// One direction.
    pub fn side(&self, direction: Direction) -> &SideResult {
        &self.sides[direction as usize]
    }

    /// All directions as one.
    pub fn unified(&self) -> SideResult {
        let [reads, writes, trims] = &self.sides;
        let mut all = reads.clone();
        all.merge(writes);
        all.merge(trims);
        all
    }

    /// I/Os of all directions.
    pub fn total_ios(&self) -> u64 {
        self.sides.iter().map(|side| side.total_ios).sum()
    }

    /// Processor nanoseconds of the job's threads for each I/O.
    pub fn cpu_ns_per_io(&self) -> f64 {
        self.usage.cpu_ns as f64 / self.total_ios().max(1) as f64
    }

    /// Longest measured time of any direction.
    pub fn elapsed_ns(&self) -> u64 {
        self.sides.iter().map(|side| side.elapsed_ns).max().unwrap_or(0)
    }

    /// Whether every I/O came back, succeeded, and held what it should.
    pub fn is_clean(&self) -> bool {
        self.errors == 0 && self.mismatch_count == 0 && self.stuck == 0
    }
}

fn per_second(count: u64, elapsed_ns: u64) -> f64 {
    if elapsed_ns == 0 { 0.0 } else { count as f64 * 1e9 / elapsed_ns as f64 }
}
