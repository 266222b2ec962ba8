//! Counters that one core writes and any thread reads.
//!
//! Each channel owns a set. Its core is the only writer and uses plain loads and stores; a reader
//! may see one counter of an I/O a moment before another. Sums over channels are made by the reader.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ring::Op;

const OPS: usize = Op::ALL.len();

/// Buckets to a power of two: a percentile is exact to 1/32, about 3 %.
const STEPS_BITS: u32 = 5;
const STEPS: u64 = 1 << STEPS_BITS;
/// Latencies from 2^44 ticks on, over an hour, share the last bucket.
const TICKS_BITS_MAX: u32 = 44;
const BUCKETS: usize = ((TICKS_BITS_MAX - STEPS_BITS + 1) << STEPS_BITS) as usize;

/// What one operation has done. Operations and bytes count what succeeded; latency too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpStats {
    /// I/Os that succeeded.
    pub ops: u64,
    /// Their bytes; 0 for operations without a range.
    pub bytes: u64,
    /// I/Os that failed.
    pub errors: u64,
    /// Sum of the latencies, in ticks of [`sys::clock`].
    pub latency_ticks: u64,
    /// Shortest latency; `u64::MAX` while there is none.
    pub latency_min_ticks: u64,
    /// Longest latency.
    pub latency_max_ticks: u64,
}

/// What a device has done since it was registered or its statistics were reset.
#[derive(Clone, Debug)]
pub struct DeviceStats {
    ops: [OpStats; OPS],
    histograms: Vec<Histogram>,
}

/// What one channel has done.
#[derive(Clone, Debug)]
pub struct ChannelStats {
    /// The reactor's index.
    pub core: usize,
    /// Its counts.
    pub stats: DeviceStats,
}

/// Latencies in buckets whose width grows with the latency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
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
    /// Adds another's counts.
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
        DeviceStats { ops: [OpStats::default(); OPS], histograms: vec![Histogram::default(); OPS] }
    }
}

impl DeviceStats {
    /// The counts of one operation.
    pub fn op(&self, op: Op) -> &OpStats {
        &self.ops[op.index()]
    }

    /// The latencies of one operation.
    pub fn histogram(&self, op: Op) -> &Histogram {
        &self.histograms[op.index()]
    }

    /// Failed I/Os of every operation.
    pub fn errors(&self) -> u64 {
        self.ops.iter().map(|op| op.errors).sum()
    }

    fn add(&mut self, other: &DeviceStats) {
        for (mine, theirs) in self.ops.iter_mut().zip(&other.ops) {
            mine.add(theirs);
        }
        for (mine, theirs) in self.histograms.iter_mut().zip(&other.histograms) {
            mine.add(theirs);
        }
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { counts: vec![0; BUCKETS] }
    }
}

impl Histogram {
    /// Number of I/Os.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// A latency in ticks that `percent` of the I/Os do not exceed, rounded up to its bucket's end;
    /// 0 where there are none.
    pub fn percentile_ticks(&self, percent: f64) -> u64 {
        let count = self.count();
        if count == 0 {
            return 0;
        }
        let rank = ((count as f64 * percent / 100.0).ceil() as u64).clamp(1, count);
        let mut seen = 0;
        for (index, bucket) in self.counts.iter().enumerate() {
            seen += bucket;
            if seen >= rank {
                return bucket_range(index).1 - 1;
            }
        }
        unreachable!("{rank} of {count} latencies lie in no bucket")
    }

    /// Buckets that hold something: first tick, first tick of the next bucket, count.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        self.counts.iter().enumerate().filter(|(_, count)| **count > 0).map(|(index, count)| {
            let (from, to) = bucket_range(index);
            (from, to, *count)
        })
    }

    /// Adds another's counts.
    pub fn add(&mut self, other: &Histogram) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
    }
}

#[inline]
fn bucket_of(ticks: u64) -> usize {
    if ticks < STEPS {
        return ticks as usize;
    }
    let power = 63 - ticks.leading_zeros();
    let range = power - STEPS_BITS + 1;
    let step = (ticks >> (power - STEPS_BITS)) & (STEPS - 1);
    ((u64::from(range) << STEPS_BITS | step) as usize).min(BUCKETS - 1)
}

fn bucket_range(index: usize) -> (u64, u64) {
    let (range, step) = (index as u64 >> STEPS_BITS, index as u64 & (STEPS - 1));
    if range == 0 {
        return (step, step + 1);
    }
    let shift = range - 1;
    ((STEPS + step) << shift, (STEPS + step + 1) << shift)
}

/// I/Os of one operation that were issued together and come back together.
#[derive(Default)]
pub(crate) struct Run {
    pub(crate) ops: u64,
    pub(crate) blocks: u64,
    pub(crate) errors: u64,
}

/// One channel's counters.
pub(crate) struct Counters {
    core: usize,
    /// Counters of an older epoch than the table's count as zero.
    epoch: AtomicU32,
    ops: [OpCounters; OPS],
    histograms: [Box<[AtomicU64]>; OPS],
}

/// What becomes [`OpStats`]: counted by one core, read by any thread.
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
    /// Counts I/Os that succeeded, of so many bytes together and each of this latency. For the core that writes.
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

    /// Counts I/Os that failed. For the core that writes.
    #[inline]
    pub fn fail(&self, errors: u64) {
        add(&self.errors, errors);
    }

    /// The counts so far.
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

impl Counters {
    fn new(core: usize, epoch: u32) -> Counters {
        let histogram = |_| (0..BUCKETS).map(|_| AtomicU64::new(0)).collect();
        Counters {
            core,
            epoch: AtomicU32::new(epoch),
            ops: Default::default(),
            histograms: std::array::from_fn(histogram),
        }
    }

    /// Takes a run in. `latency_ticks` is that of each of its I/Os.
    #[inline]
    pub(crate) fn record(&self, op: Op, run: &Run, block_size: u32, latency_ticks: u64) {
        let counters = &self.ops[op.index()];
        if run.errors > 0 {
            counters.fail(run.errors);
        }
        if run.ops == 0 {
            return;
        }
        let bytes = if op.has_range() { run.blocks * u64::from(block_size) } else { 0 };
        counters.succeed(run.ops, bytes, latency_ticks);
        add(&self.histograms[op.index()][bucket_of(latency_ticks)], run.ops);
    }

    /// Starts from zero where the table has been reset. For the core that writes.
    #[inline]
    pub(crate) fn follow(&self, epoch: u32) {
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
            histograms: self.histograms.iter().map(|buckets| Histogram { counts: counts(buckets) }).collect(),
        }
    }
}

/// Adds to a counter that only this thread writes: a load and a store, no locked instruction.
#[inline]
fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(amount), Relaxed);
}

/// The counters of a device's channels, those that are gone included.
#[derive(Default)]
pub(crate) struct StatsTable {
    pub(crate) epoch: AtomicU32,
    channels: Mutex<Channels>,
}

#[derive(Default)]
struct Channels {
    live: Vec<Arc<Counters>>,
    gone: DeviceStats,
}

impl StatsTable {
    pub(crate) fn join(&self, core: usize) -> Arc<Counters> {
        let counters = Arc::new(Counters::new(core, self.epoch.load(Relaxed)));
        self.lock().live.push(counters.clone());
        counters
    }

    pub(crate) fn leave(&self, counters: &Arc<Counters>) {
        let mut channels = self.lock();
        let last = counters.snapshot(self.epoch.load(Relaxed));
        channels.gone.add(&last);
        channels.live.retain(|other| !Arc::ptr_eq(other, counters));
    }

    pub(crate) fn total(&self) -> DeviceStats {
        let channels = self.lock();
        let mut total = channels.gone.clone();
        for counters in &channels.live {
            total.add(&counters.snapshot(self.epoch.load(Relaxed)));
        }
        total
    }

    pub(crate) fn channels(&self) -> Vec<ChannelStats> {
        let epoch = self.epoch.load(Relaxed);
        let stats =
            |counters: &Arc<Counters>| ChannelStats { core: counters.core, stats: counters.snapshot(epoch) };
        self.lock().live.iter().map(stats).collect()
    }

    pub(crate) fn reset(&self) {
        let mut channels = self.lock();
        self.epoch.fetch_add(1, Relaxed);
        channels.gone = DeviceStats::default();
    }

    fn lock(&self) -> MutexGuard<'_, Channels> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_latency_lies_in_its_bucket_and_buckets_join() {
        let mut end = 0;
        for index in 0..BUCKETS {
            let (from, to) = bucket_range(index);
            assert_eq!(from, end, "bucket {index}");
            assert_eq!((bucket_of(from), bucket_of(to - 1)), (index, index));
            end = to;
        }
        assert_eq!(end, 1 << TICKS_BITS_MAX);
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_are_within_a_bucket() {
        let table = StatsTable::default();
        let counters = table.join(0);
        for ticks in 1..=1000 {
            counters.record(Op::Read, &Run { ops: 1, blocks: 8, errors: 0 }, 512, ticks * 100);
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
    fn a_channel_that_leaves_is_still_counted_and_a_reset_forgets_all() {
        let table = StatsTable::default();
        let (first, second) = (table.join(0), table.join(1));
        let run = Run { ops: 2, blocks: 2, errors: 1 };
        first.record(Op::Write, &run, 4096, 5);
        second.record(Op::Write, &run, 4096, 7);
        table.leave(&first);
        assert_eq!(table.total().op(Op::Write).ops, 4);
        assert_eq!(table.total().errors(), 2);
        table.reset();
        assert_eq!(table.total().op(Op::Write), &OpStats::default());
        second.follow(table.epoch.load(Relaxed));
        second.record(Op::Write, &run, 4096, 9);
        assert_eq!(table.total().op(Op::Write).latency_min_ticks, 9);
        assert_eq!(table.channels().len(), 1);
    }
}
