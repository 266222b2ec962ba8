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
    /// Their latencies, in ticks of [`sys::clock`].
    pub latency_ticks: Histogram,
    /// I/Os that failed.
    pub errors: u64,
    /// How long was measured.
    pub elapsed_ns: u64,
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
