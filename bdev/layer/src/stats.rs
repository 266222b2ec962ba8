//! I/O statistics: counters that one core writes and any thread reads.
//!
//! Each channel owns a set of counters. Its core is the only writer and uses plain loads and stores; a reader may
//! see one counter of an I/O slightly before another. The reader adds channels up.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use block_io::Op;
use histogram::{LogBuckets, index_of_rank};

const OPS: usize = Op::ALL.len();

/// 32 buckets in a power of two: the relative error of a percentile is at most 1/32, about 3 %. Latencies of 2^44 ticks
/// and more, over an hour, share the last bucket.
type TickBuckets = LogBuckets<5, 44>;
const BUCKETS: usize = TickBuckets::COUNT;

/// Statistics of one operation. Operations, bytes and latency count successful I/Os only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpStats {
    /// Successful I/Os.
    pub ops: u64,
    /// Bytes of successful I/Os; 0 for operations without a range.
    pub bytes: u64,
    /// Failed I/Os.
    pub errors: u64,
    /// Sum of the latencies, in ticks of [`os::clock`].
    pub latency_ticks: u64,
    /// Shortest latency in ticks; `u64::MAX` if there is none.
    pub latency_min_ticks: u64,
    /// Longest latency in ticks.
    pub latency_max_ticks: u64,
}

/// Statistics of a device since it was registered or its statistics were reset.
#[derive(Clone, Debug)]
pub struct DeviceStats {
    ops: [OpStats; OPS],
    histograms: Vec<BdevHistogram>,
}

/// Statistics of one channel.
#[derive(Clone, Debug)]
pub struct ChannelStats {
    /// Index of the channel's core.
    pub core: usize,
    /// Statistics since the channel was opened or the device's statistics were reset.
    pub stats: DeviceStats,
}

/// A latency histogram with 32 buckets to each power of two, in ticks of [`os::clock`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BdevHistogram {
    counts: Vec<u64>,
}

impl Default for OpStats {
    fn default() -> Self {
        OpStats {
            ops: 0,
            bytes: 0,
            errors: 0,
            latency_ticks: 0,
            latency_min_ticks: u64::MAX,
            latency_max_ticks: 0,
        }
    }
}

impl OpStats {
    /// Adds the statistics of another channel or device.
    pub fn add(&mut self, other: &OpStats) {
        self.ops += other.ops;
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.latency_ticks += other.latency_ticks;
        self.latency_min_ticks = self.latency_min_ticks.min(other.latency_min_ticks);
        self.latency_max_ticks = self.latency_max_ticks.max(other.latency_max_ticks);
    }
}

impl Default for DeviceStats {
    fn default() -> Self {
        DeviceStats { ops: [OpStats::default(); OPS], histograms: vec![BdevHistogram::default(); OPS] }
    }
}

impl DeviceStats {
    /// Statistics of one operation.
    pub fn op(&self, op: Op) -> &OpStats {
        &self.ops[op.index()]
    }

    /// Latency histogram of one operation.
    pub fn histogram(&self, op: Op) -> &BdevHistogram {
        &self.histograms[op.index()]
    }

    /// Failed I/Os of all operations.
    pub fn errors(&self) -> u64 {
        self.ops.iter().map(|op| op.errors).sum()
    }

    fn add(&mut self, other: &DeviceStats) {
        for (sum, added) in self.ops.iter_mut().zip(&other.ops) {
            sum.add(added);
        }
        for (sum, added) in self.histograms.iter_mut().zip(&other.histograms) {
            sum.add(added);
        }
    }
}

impl Default for BdevHistogram {
    fn default() -> Self {
        BdevHistogram { counts: vec![0; BUCKETS] }
    }
}

impl BdevHistogram {
    /// Number of I/Os in all buckets.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Latency in ticks that `percent` of the I/Os do not exceed, rounded up to the end of its bucket; 0 without
    /// I/Os.
    pub fn percentile_ticks(&self, percent: f64) -> u64 {
        let count = self.count();
        if count == 0 {
            return 0;
        }
        let rank = ((count as f64 * percent / 100.0).ceil() as u64).clamp(1, count);
        let index =
            index_of_rank(&self.counts, rank).expect("a rank up to the number of I/Os is in a bucket");
        let (first, width) = TickBuckets::range(index);
        first + (width - 1)
    }

    /// Non-empty buckets: first tick, first tick of the next bucket, count.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        self.counts.iter().enumerate().filter(|(_, count)| **count > 0).map(|(index, count)| {
            let (first, width) = TickBuckets::range(index);
            (first, first + width, *count)
        })
    }

    /// Adds the counts of another histogram.
    pub fn add(&mut self, other: &BdevHistogram) {
        for (sum, added) in self.counts.iter_mut().zip(&other.counts) {
            *sum += added;
        }
    }
}

/// Successive completions of one operation and one submit time, counted together.
#[derive(Default)]
pub(crate) struct CompletionRun {
    pub(crate) ops: u64,
    pub(crate) blocks: u64,
    pub(crate) errors: u64,
}

/// The counters of one channel.
pub(crate) struct ChannelCounters {
    core: usize,
    /// Counters of another epoch than the table's count as zero: a reset increments the table's epoch.
    epoch: AtomicU32,
    ops: [OpCounters; OPS],
    histograms: [Box<[AtomicU64]>; OPS],
}

/// Atomic counters behind [`OpStats`]: written by one core, read by any thread.
#[derive(Debug)]
pub struct OpCounters {
    ops: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    latency_ticks: AtomicU64,
    latency_min_ticks: AtomicU64,
    latency_max_ticks: AtomicU64,
}

impl Default for OpCounters {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        OpCounters {
            ops: zero(),
            bytes: zero(),
            errors: zero(),
            latency_ticks: zero(),
            latency_min_ticks: AtomicU64::new(u64::MAX),
            latency_max_ticks: zero(),
        }
    }
}

impl OpCounters {
    /// Counts `ops` successful I/Os of `bytes` in total, each of this latency. Only the owning core may call it.
    #[inline]
    pub fn succeed(&self, ops: u64, bytes: u64, latency_ticks: u64) {
        add(&self.ops, ops);
        if bytes > 0 {
            add(&self.bytes, bytes);
        }
        add(&self.latency_ticks, latency_ticks * ops);
        if latency_ticks < self.latency_min_ticks.load(Relaxed) {
            self.latency_min_ticks.store(latency_ticks, Relaxed);
        }
        if latency_ticks > self.latency_max_ticks.load(Relaxed) {
            self.latency_max_ticks.store(latency_ticks, Relaxed);
        }
    }

    /// Counts failed I/Os. Only the owning core may call it.
    #[inline]
    pub fn fail(&self, errors: u64) {
        add(&self.errors, errors);
    }

    /// The current values; usable from any thread.
    pub fn load(&self) -> OpStats {
        OpStats {
            ops: self.ops.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            errors: self.errors.load(Relaxed),
            latency_ticks: self.latency_ticks.load(Relaxed),
            latency_min_ticks: self.latency_min_ticks.load(Relaxed),
            latency_max_ticks: self.latency_max_ticks.load(Relaxed),
        }
    }

    fn clear(&self) {
        for counter in [&self.ops, &self.bytes, &self.errors, &self.latency_ticks, &self.latency_max_ticks] {
            counter.store(0, Relaxed);
        }
        self.latency_min_ticks.store(u64::MAX, Relaxed);
    }
}

impl ChannelCounters {
    fn new(core: usize, epoch: u32) -> ChannelCounters {
        let histogram = |_| (0..BUCKETS).map(|_| AtomicU64::new(0)).collect();
        ChannelCounters {
            core,
            epoch: AtomicU32::new(epoch),
            ops: Default::default(),
            histograms: std::array::from_fn(histogram),
        }
    }

    /// Counts a run of completions; `latency_ticks` is the latency of each.
    #[inline]
    pub(crate) fn record(&self, op: Op, run: &CompletionRun, block_size: u32, latency_ticks: u64) {
        let counters = &self.ops[op.index()];
        if run.errors > 0 {
            counters.fail(run.errors);
        }
        if run.ops == 0 {
            return;
        }
        let bytes = if op.has_range() { run.blocks * u64::from(block_size) } else { 0 };
        counters.succeed(run.ops, bytes, latency_ticks);
        add(&self.histograms[op.index()][TickBuckets::index(latency_ticks)], run.ops);
    }

    /// Clears the counters if the table was reset. Only the owning core may call it.
    #[inline]
    pub(crate) fn sync_epoch(&self, epoch: u32) {
        if self.epoch.load(Relaxed) != epoch {
            self.clear(epoch);
        }
    }

    #[cold]
    fn clear(&self, epoch: u32) {
        self.ops.iter().for_each(OpCounters::clear);
        self.histograms.iter().flatten().for_each(|bucket| bucket.store(0, Relaxed));
        self.epoch.store(epoch, Relaxed);
    }

    fn snapshot(&self, epoch: u32) -> DeviceStats {
        if self.epoch.load(Relaxed) != epoch {
            return DeviceStats::default();
        }
        let counts = |buckets: &[AtomicU64]| buckets.iter().map(|bucket| bucket.load(Relaxed)).collect();
        DeviceStats {
            ops: std::array::from_fn(|index| self.ops[index].load()),
            histograms: self
                .histograms
                .iter()
                .map(|buckets| BdevHistogram { counts: counts(buckets) })
                .collect(),
        }
    }
}

/// Adds to a counter that only this thread writes: a load and a store instead of a locked instruction.
#[inline]
fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(amount), Relaxed);
}

/// The statistics of a device: counters of open channels, and sums of closed ones.
#[derive(Default)]
pub(crate) struct StatsTable {
    pub(crate) epoch: AtomicU32,
    channels: Mutex<Channels>,
}

#[derive(Default)]
struct Channels {
    open: Vec<Arc<ChannelCounters>>,
    closed: DeviceStats,
}

impl StatsTable {
    pub(crate) fn add_channel(&self, core: usize) -> Arc<ChannelCounters> {
        let counters = Arc::new(ChannelCounters::new(core, self.epoch.load(Relaxed)));
        self.lock().open.push(counters.clone());
        counters
    }

    pub(crate) fn remove_channel(&self, counters: &Arc<ChannelCounters>) {
        let mut channels = self.lock();
        let last = counters.snapshot(self.epoch.load(Relaxed));
        channels.closed.add(&last);
        channels.open.retain(|other| !Arc::ptr_eq(other, counters));
    }

    pub(crate) fn total(&self) -> DeviceStats {
        let channels = self.lock();
        let mut total = channels.closed.clone();
        for counters in &channels.open {
            total.add(&counters.snapshot(self.epoch.load(Relaxed)));
        }
        total
    }

    pub(crate) fn channels(&self) -> Vec<ChannelStats> {
        let epoch = self.epoch.load(Relaxed);
        let stats = |counters: &Arc<ChannelCounters>| ChannelStats {
            core: counters.core,
            stats: counters.snapshot(epoch),
        };
        self.lock().open.iter().map(stats).collect()
    }

    pub(crate) fn reset(&self) {
        let mut channels = self.lock();
        self.epoch.fetch_add(1, Relaxed);
        channels.closed = DeviceStats::default();
    }

    fn lock(&self) -> MutexGuard<'_, Channels> {
        sync::lock(&self.channels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_exact_to_one_bucket() {
        let table = StatsTable::default();
        let counters = table.add_channel(0);
        for ticks in 1..=1000 {
            counters.record(Op::Read, &CompletionRun { ops: 1, blocks: 8, errors: 0 }, 512, ticks * 100);
        }
        let stats = table.total();
        let histogram = stats.histogram(Op::Read);
        assert_eq!(histogram.count(), 1000);
        for (percent, exact) in [(0.0, 100), (50.0, 50_000), (99.0, 99_000), (100.0, 100_000)] {
            let got = histogram.percentile_ticks(percent);
            assert!(got >= exact && got <= exact + exact / 32 + 1, "{percent} %: {got} for {exact}");
        }
        let read = stats.op(Op::Read);
        assert_eq!((read.ops, read.bytes), (1000, 1000 * 4096));
        assert_eq!((read.latency_min_ticks, read.latency_max_ticks), (100, 100_000));
        assert_eq!(read.latency_ticks, 100 * 1000 * 1001 / 2);
    }

    #[test]
    fn closed_channels_stay_counted_until_a_reset() {
        let table = StatsTable::default();
        let (first, second) = (table.add_channel(0), table.add_channel(1));
        let run = CompletionRun { ops: 2, blocks: 2, errors: 1 };
        first.record(Op::Write, &run, 4096, 5);
        second.record(Op::Write, &run, 4096, 7);
        table.remove_channel(&first);
        assert_eq!(table.total().op(Op::Write).ops, 4);
        assert_eq!(table.total().errors(), 2);
        table.reset();
        assert_eq!(table.total().op(Op::Write), &OpStats::default());
        second.sync_epoch(table.epoch.load(Relaxed));
        second.record(Op::Write, &run, 4096, 9);
        assert_eq!(table.total().op(Op::Write).latency_min_ticks, 9);
        assert_eq!(table.channels().len(), 1);
    }
}
