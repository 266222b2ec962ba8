//! Latencies of a target node's commands, with SPDK's buckets.

use std::sync::atomic::{AtomicU64, Ordering};

use histogram::LogBuckets;

/// SPDK's default layout: 128 buckets a range, each range twice as wide as the one before, for all values.
type Buckets = LogBuckets<GRANULARITY, 64>;

const GRANULARITY: u32 = 7;

/// How many commands took how long, from their arrival to the end of their tasks. All cores count in it.
#[derive(Debug)]
pub(crate) struct NodeHistogram(Box<[AtomicU64]>);

/// The counts of a histogram, in SPDK's terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistogramCounts {
    /// Commands by latency in ticks.
    pub buckets: Vec<u64>,
    /// Buckets of a range, as a power of two.
    pub granularity: u32,
    /// The first range.
    pub range_min: u32,
    /// The last range.
    pub range_max: u32,
}

impl NodeHistogram {
    pub(crate) fn new() -> NodeHistogram {
        NodeHistogram((0..Buckets::COUNT).map(|_| AtomicU64::new(0)).collect())
    }

    #[inline]
    pub(crate) fn count(&self, ticks: u64) {
        self.0[Buckets::index(ticks)].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn counts(&self) -> HistogramCounts {
        HistogramCounts {
            buckets: self.0.iter().map(|count| count.load(Ordering::Relaxed)).collect(),
            granularity: GRANULARITY,
            range_min: 0,
            range_max: u64::BITS - GRANULARITY,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_those_of_spdk() {
        let histogram = NodeHistogram::new();
        // Range 0 and 1 have values by themselves; range r has 128 buckets of 2^(r-1) values.
        for ticks in [0, 127, 128, 255, 256, 257, 1000, u64::MAX] {
            histogram.count(ticks);
        }
        let counts = histogram.counts();
        assert_eq!(counts.buckets.len(), ((counts.range_max - counts.range_min + 1) as usize) << 7);
        let filled = counts.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
        let last = counts.buckets.len() - 1;
        let expected =
            [(0, 1), (127, 1), (128, 1), (255, 1), (256, 2), (3 * 128 + (1000 >> 2) - 128, 1), (last, 1)];
        assert_eq!(filled.map(|(at, count)| (at, *count)).collect::<Vec<_>>(), expected);
    }
}
