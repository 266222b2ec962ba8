//! I/O statistics: counters that one core writes and any thread reads.
//!
//! Each channel owns a set of counters. Its core is the only writer and uses plain loads and stores; a reader may
//! see one counter of an I/O slightly before another. The reader adds channels up.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BdevHistogram {
    /// Empty without I/Os: most operations of most devices have none, and all buckets are 10 KiB.
    counts: Vec<u64>,
}

/// What of the statistics is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatsReset {
    /// Everything.
    All,
    /// The shortest and longest latencies.
    MaxMin,
    /// The numbers of failed I/Os.
    Errors,
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
        if self.counts.is_empty() {
            self.counts.clone_from(&other.counts);
            return;
        }
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
    /// Failed I/Os that were reset, in this epoch. Only the control plane writes them.
    errors_reset: [AtomicU64; OPS],
    errors_reset_epoch: AtomicU32,
    /// Requests in flight, while the table is [`SAMPLED`].
    in_flight: AtomicU32,
    /// Of operations that have completed on this channel.
    histograms: [OnceLock<Box<[AtomicU64]>>; OPS],
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
        for counter in [&self.ops, &self.bytes, &self.errors, &self.latency_ticks] {
            counter.store(0, Relaxed);
        }
        self.clear_extremes();
    }

    fn clear_extremes(&self) {
        self.latency_max_ticks.store(0, Relaxed);
        self.latency_min_ticks.store(u64::MAX, Relaxed);
    }
}

impl ChannelCounters {
    fn new(core: usize, epoch: u32) -> ChannelCounters {
        ChannelCounters {
            core,
            epoch: AtomicU32::new(epoch),
            ops: Default::default(),
            errors_reset: Default::default(),
            errors_reset_epoch: AtomicU32::new(epoch),
            in_flight: AtomicU32::new(0),
            histograms: Default::default(),
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
        let histogram = self.histograms[op.index()].get_or_init(new_histogram);
        add(&histogram[TickBuckets::index(latency_ticks)], run.ops);
    }

    /// Clears the counters if the table was reset, and publishes the requests in flight if it is sampled. Returns whether
    /// completions are traced. Only the owning core may call it.
    #[inline]
    pub(crate) fn sync_epoch(&self, epoch: u32, in_flight: impl FnOnce() -> usize) -> bool {
        self.epoch.load(Relaxed) != epoch && self.sync(epoch, in_flight)
    }

    #[cold]
    fn sync(&self, epoch: u32, in_flight: impl FnOnce() -> usize) -> bool {
        if epoch & SAMPLED != 0 {
            self.set_in_flight(in_flight());
        }
        if self.epoch.load(Relaxed) != epoch & RESETS {
            self.clear(epoch & RESETS);
        }
        epoch & TRACED != 0
    }

    /// Publishes the requests in flight to the control plane.
    pub(crate) fn set_in_flight(&self, in_flight: usize) {
        self.in_flight.store(in_flight as u32, Relaxed);
    }

    fn clear(&self, epoch: u32) {
        self.ops.iter().for_each(OpCounters::clear);
        let buckets = self.histograms.iter().filter_map(OnceLock::get).flatten();
        buckets.for_each(|bucket| bucket.store(0, Relaxed));
        self.epoch.store(epoch, Relaxed);
    }

    fn snapshot(&self, epoch: u32) -> DeviceStats {
        if self.epoch.load(Relaxed) != epoch {
            return DeviceStats::default();
        }
        let histogram = |index: usize| {
            let is_empty = self.ops[index].ops.load(Relaxed) == 0;
            let buckets = self.histograms[index].get().filter(|_| !is_empty);
            let counts = buckets.into_iter().flatten().map(|bucket| bucket.load(Relaxed));
            BdevHistogram { counts: counts.collect() }
        };
        let mut ops: [OpStats; OPS] = std::array::from_fn(|index| self.ops[index].load());
        if self.errors_reset_epoch.load(Relaxed) == epoch {
            for (op, reset) in ops.iter_mut().zip(&self.errors_reset) {
                op.errors = op.errors.saturating_sub(reset.load(Relaxed));
            }
        }
        DeviceStats { ops, histograms: (0..OPS).map(histogram).collect() }
    }

    /// Has [`snapshot`](Self::snapshot) count failed I/Os from now on. The counters themselves are the core's.
    fn reset_errors(&self, epoch: u32) {
        if self.epoch.load(Relaxed) != epoch {
            return;
        }
        for (reset, op) in self.errors_reset.iter().zip(&self.ops) {
            reset.store(op.errors.load(Relaxed), Relaxed);
        }
        self.errors_reset_epoch.store(epoch, Relaxed);
    }
}

#[cold]
fn new_histogram() -> Box<[AtomicU64]> {
    (0..BUCKETS).map(|_| AtomicU64::new(0)).collect()
}

/// Adds to a counter that only this thread writes: a load and a store instead of a locked instruction.
#[inline]
fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(amount), Relaxed);
}

/// In [`StatsTable::epoch`]: channels publish their requests in flight. Without it they do nothing for that: no channel
/// has an epoch with this bit, so that the test for a reset covers both.
const SAMPLED: u32 = 1 << 31;
/// Likewise: channels record completions in the trace.
const TRACED: u32 = 1 << 30;
/// The number of resets in an epoch.
const RESETS: u32 = !(SAMPLED | TRACED);

/// The statistics of a device: counters of open channels, and sums of closed ones.
#[derive(Default)]
pub(crate) struct StatsTable {
    /// Number of resets, [`SAMPLED`] and [`TRACED`].
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
        let mut channels = self.lock();
        let counters = Arc::new(ChannelCounters::new(core, self.resets()));
        channels.open.push(counters.clone());
        counters
    }

    pub(crate) fn remove_channel(&self, counters: &Arc<ChannelCounters>) {
        let mut channels = self.lock();
        let last = counters.snapshot(self.resets());
        channels.closed.add(&last);
        channels.open.retain(|other| !Arc::ptr_eq(other, counters));
    }

    pub(crate) fn total(&self) -> DeviceStats {
        let channels = self.lock();
        let mut total = channels.closed.clone();
        for counters in &channels.open {
            total.add(&counters.snapshot(self.resets()));
        }
        total
    }

    pub(crate) fn channels(&self) -> Vec<ChannelStats> {
        let epoch = self.resets();
        let stats = |counters: &Arc<ChannelCounters>| ChannelStats {
            core: counters.core,
            stats: counters.snapshot(epoch),
        };
        self.lock().open.iter().map(stats).collect()
    }

    pub(crate) fn reset(&self, what: StatsReset) {
        let mut channels = self.lock();
        let Channels { open, closed } = &mut *channels;
        match what {
            StatsReset::All => {
                let next = self.resets().wrapping_add(1) & RESETS;
                self.epoch.store(next | (self.epoch.load(Relaxed) & !RESETS), Relaxed);
                *closed = DeviceStats::default();
            }
            StatsReset::MaxMin => {
                // What a core stores meanwhile is the latency of an I/O that has just completed.
                open.iter().flat_map(|counters| &counters.ops).for_each(OpCounters::clear_extremes);
                for op in &mut closed.ops {
                    (op.latency_min_ticks, op.latency_max_ticks) = (u64::MAX, 0);
                }
            }
            StatsReset::Errors => {
                open.iter().for_each(|counters| counters.reset_errors(self.resets()));
                closed.ops.iter_mut().for_each(|op| op.errors = 0);
            }
        }
    }

    /// Starts or ends the publication of requests in flight.
    pub(crate) fn set_sampled(&self, is_sampled: bool) {
        let channels = self.lock();
        channels.open.iter().for_each(|counters| counters.set_in_flight(0));
        self.set_flag(SAMPLED, is_sampled);
    }

    /// Starts or ends the trace of completions.
    pub(crate) fn set_traced(&self, is_traced: bool) {
        let _channels = self.lock();
        self.set_flag(TRACED, is_traced);
    }

    /// Under the lock.
    fn set_flag(&self, flag: u32, is_set: bool) {
        let epoch = self.epoch.load(Relaxed);
        self.epoch.store(if is_set { epoch | flag } else { epoch & !flag }, Relaxed);
    }

    /// Requests in flight on all channels, as they have published last.
    pub(crate) fn in_flight(&self) -> u64 {
        let channels = self.lock();
        channels.open.iter().map(|counters| u64::from(counters.in_flight.load(Relaxed))).sum()
    }

    /// The cores that have a channel, one for each channel.
    pub(crate) fn channel_cores(&self) -> Vec<usize> {
        self.lock().open.iter().map(|counters| counters.core).collect()
    }

    fn resets(&self) -> u32 {
        self.epoch.load(Relaxed) & RESETS
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
        table.reset(StatsReset::All);
        assert_eq!(table.total().op(Op::Write), &OpStats::default());
        second.sync_epoch(table.epoch.load(Relaxed), || 0);
        second.record(Op::Write, &run, 4096, 9);
        assert_eq!(table.total().op(Op::Write).latency_min_ticks, 9);
        assert_eq!(table.channels().len(), 1);
    }

    #[test]
    fn errors_and_extremes_are_reset_alone_on_open_and_closed_channels() {
        let table = StatsTable::default();
        let (open, closed) = (table.add_channel(0), table.add_channel(1));
        let run = CompletionRun { ops: 2, blocks: 2, errors: 3 };
        open.record(Op::Read, &run, 512, 5);
        closed.record(Op::Read, &run, 512, 7);
        table.remove_channel(&closed);
        let read = || {
            let total = table.total();
            let op = total.op(Op::Read);
            (op.ops, op.errors, op.latency_min_ticks, op.latency_max_ticks)
        };
        table.reset(StatsReset::Errors);
        assert_eq!(read(), (4, 0, 5, 7));
        open.record(Op::Read, &run, 512, 6);
        table.reset(StatsReset::MaxMin);
        assert_eq!(read(), (6, 3, u64::MAX, 0));
        open.record(Op::Read, &run, 512, 9);
        assert_eq!(read(), (8, 6, 9, 9));
        // After a full reset the old baseline of errors does not count.
        table.reset(StatsReset::All);
        open.sync_epoch(table.epoch.load(Relaxed), || 0);
        open.record(Op::Read, &run, 512, 9);
        assert_eq!(read(), (2, 3, 9, 9));
    }

    #[test]
    fn requests_in_flight_are_published_while_sampled() {
        let table = StatsTable::default();
        let counters = table.add_channel(0);
        counters.sync_epoch(table.epoch.load(Relaxed), || unreachable!("nothing is published"));
        table.set_sampled(true);
        counters.sync_epoch(table.epoch.load(Relaxed), || 5);
        assert_eq!(table.in_flight(), 5);
        counters.record(Op::Read, &CompletionRun { ops: 1, blocks: 1, errors: 0 }, 512, 5);
        table.reset(StatsReset::All);
        counters.sync_epoch(table.epoch.load(Relaxed), || 4);
        assert_eq!((table.in_flight(), table.total().op(Op::Read).ops), (4, 0));
        table.set_sampled(false);
        counters.sync_epoch(table.epoch.load(Relaxed), || unreachable!("nothing is published"));
        assert_eq!(table.in_flight(), 0);
    }

    #[test]
    fn statistics_without_io_take_no_buckets() {
        let table = StatsTable::default();
        let counters = table.add_channel(0);
        counters.record(Op::Read, &CompletionRun { ops: 1, blocks: 1, errors: 0 }, 512, 5);
        let total = table.total();
        let allocated = |op| total.histogram(op).counts.capacity();
        assert_eq!((allocated(Op::Write), allocated(Op::Flush)), (0, 0));
        assert_eq!(
            (allocated(Op::Read), table.lock().closed.histogram(Op::Read).counts.capacity()),
            (BUCKETS, 0)
        );
    }
}
