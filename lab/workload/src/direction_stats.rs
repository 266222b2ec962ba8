//! Counters of one direction (reads, writes, trims or flushes) while a job runs.

use block_io::Op;

use crate::Histogram;
use crate::batches::SubmissionBatch;
use crate::result::{Direction, DirectionResult, Samples};

/// The index of an operation's counters: that of its [`Direction`], and 3 for flushes.
#[inline]
pub(crate) const fn direction_index(op: Op) -> usize {
    match op {
        Op::Read => Direction::Read as usize,
        Op::Write => Direction::Write as usize,
        Op::Flush => 3,
        _ => Direction::Trim as usize,
    }
}

/// Counters and histograms of one direction.
#[derive(Default)]
pub(crate) struct DirectionStats {
    pub(crate) total_latency: Histogram,
    pub(crate) completion_latency: Histogram,
    submission_latency: Histogram,
    ios: u64,
    /// Logical blocks transferred.
    pub(crate) blocks: u64,
    pub(crate) errors: u64,
    pub(crate) result: DirectionResult,
    /// At the last sample: elapsed nanoseconds, I/Os, blocks.
    last_sample: (u64, u64, u64),
    iops: Samples,
    bandwidth: Samples,
}

impl DirectionStats {
    /// Records `count` completions of a batch at `now`. The caller records the total latency, which counts
    /// from each I/O's scheduled start.
    #[inline]
    pub(crate) fn record(&mut self, batch: &SubmissionBatch, now: u64, count: u64) {
        self.ios += count;
        if batch.submitted != 0 {
            self.submission_latency.record_many(batch.submitted.saturating_sub(batch.issued), count);
            self.completion_latency.record_many(now.saturating_sub(batch.submitted), count);
        } else {
            self.completion_latency.record_many(now.saturating_sub(batch.issued), count);
        }
    }

    /// Discards the counts of the ramp, except errors.
    pub(crate) fn clear(&mut self) {
        *self = DirectionStats { errors: self.errors, ..DirectionStats::default() };
    }

    /// Completed I/Os.
    pub(crate) fn ios(&self) -> u64 {
        self.ios
    }

    /// Takes a sample; returns I/Os and bytes a second since the last one.
    pub(crate) fn sample(&mut self, elapsed_ns: u64, block_bytes: u32) -> (f64, f64) {
        let (then, ios, blocks) =
            std::mem::replace(&mut self.last_sample, (elapsed_ns, self.ios, self.blocks));
        let seconds = elapsed_ns.saturating_sub(then) as f64 / 1e9;
        if seconds <= 0.0 {
            return (0.0, 0.0);
        }
        let iops = (self.ios - ios) as f64 / seconds;
        let rate = (self.blocks - blocks) as f64 * f64::from(block_bytes) / seconds;
        self.iops.add(iops);
        self.bandwidth.add(rate / 1024.0);
        (iops, rate)
    }

    /// Sets the length of the measured phase and the block size, once the phase has ended.
    pub(crate) fn set_elapsed(&mut self, elapsed_ns: u64, block_bytes: u32) {
        self.result.elapsed_ns = elapsed_ns;
        self.result.block_bytes = block_bytes;
    }

    pub(crate) fn into_result(self) -> DirectionResult {
        DirectionResult {
            total_ios: self.ios,
            bytes: self.blocks * u64::from(self.result.block_bytes),
            latency_ticks: self.total_latency,
            completion_ticks: self.completion_latency,
            submission_ticks: self.submission_latency,
            errors: self.errors,
            elapsed_ns: self.result.elapsed_ns,
            block_bytes: self.result.block_bytes,
            iops_samples: self.iops,
            bandwidth_samples: self.bandwidth,
            priorities: Vec::new(),
        }
    }
}
