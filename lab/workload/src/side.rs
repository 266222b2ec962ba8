//! One direction of a job while it runs.

use ring::Op;

use crate::Histogram;
use crate::batches::Batch;
use crate::result::{Direction, Samples, SideResult};

/// Where an operation is counted: by [`Direction`], flushes after them.
#[inline]
pub(crate) const fn side_of(op: Op) -> usize {
    match op {
        Op::Read => Direction::Read as usize,
        Op::Write => Direction::Write as usize,
        Op::Flush => 3,
        _ => Direction::Trim as usize,
    }
}

/// What is counted of one direction.
#[derive(Default)]
pub(crate) struct Side {
    pub(crate) whole: Histogram,
    completion: Histogram,
    submission: Histogram,
    ios: u64,
    /// Blocks of the device.
    pub(crate) blocks: u64,
    pub(crate) errors: u64,
    pub(crate) result: SideResult,
    /// What was counted at the last sample, and when that was.
    sampled: (u64, u64, u64),
    iops: Samples,
    bandwidth: Samples,
}

impl Side {
    /// So many I/Os of a batch ended at `now`. Their whole latency, which counts from when each was to
    /// start, is the caller's.
    #[inline]
    pub(crate) fn record(&mut self, batch: &Batch, now: u64, count: u64) {
        self.ios += count;
        if batch.sent != 0 {
            self.submission.record_many(batch.sent.saturating_sub(batch.issued), count);
            self.completion.record_many(now.saturating_sub(batch.sent), count);
        } else {
            self.completion.record_many(now.saturating_sub(batch.issued), count);
        }
    }

    /// Forgets what came before the measurement.
    pub(crate) fn clear(&mut self) {
        *self = Side { errors: self.errors, ..Side::default() };
    }

    /// The rates since the last sample: I/Os and bytes a second.
    pub(crate) fn sample(&mut self, elapsed_ns: u64, block_bytes: u32) -> (f64, f64) {
        let (then, ios, blocks) = std::mem::replace(&mut self.sampled, (elapsed_ns, self.ios, self.blocks));
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

    /// A phase has ended: what was counted, over how long.
    pub(crate) fn account(&mut self, elapsed_ns: u64, block_bytes: u32) {
        self.result.elapsed_ns = elapsed_ns;
        self.result.block_bytes = block_bytes;
    }

    pub(crate) fn into_result(self) -> SideResult {
        SideResult {
            total_ios: self.ios,
            bytes: self.blocks * u64::from(self.result.block_bytes),
            latency_ticks: self.whole,
            completion_ticks: self.completion,
            submission_ticks: self.submission,
            errors: self.errors,
            elapsed_ns: self.result.elapsed_ns,
            block_bytes: self.result.block_bytes,
            iops_samples: self.iops,
            bandwidth_samples: self.bandwidth,
        }
    }
}
