//! A latency histogram with buckets whose width is at most 1/128 of their value.

use histogram::{LogBuckets, index_of_rank};

/// 128 buckets for each power of two, of any number of nanoseconds.
type LatencyBuckets = LogBuckets<7, 64>;

/// A histogram of latencies in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LatencyHistogram {
    buckets: Vec<u64>,
    count: u64,
    sum_ns: u128,
    max_ns: u64,
}

impl LatencyHistogram {
    /// Adds one latency in nanoseconds.
    pub fn record(&mut self, ns: u64) {
        let bucket = LatencyBuckets::index(ns);
        if bucket >= self.buckets.len() {
            self.buckets.resize(bucket + 1, 0);
        }
        self.buckets[bucket] += 1;
        self.count += 1;
        self.sum_ns += u128::from(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Number of recorded latencies.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Exact mean in nanoseconds; 0 if the histogram is empty.
    pub fn mean_ns(&self) -> f64 {
        self.sum_ns as f64 / self.count.max(1) as f64
    }

    /// Exact maximum in nanoseconds; 0 if the histogram is empty.
    pub fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// The latency in nanoseconds that `percent` of the samples do not exceed, to within 1/256; 0 if the
    /// histogram is empty.
    pub fn percentile_ns(&self, percent: f64) -> f64 {
        let rank = (self.count as f64 * percent / 100.0).ceil().max(1.0) as u64;
        let Some(bucket) = index_of_rank(&self.buckets, rank) else { return 0.0 };
        let (low, width) = LatencyBuckets::range(bucket);
        (low as f64 + (width - 1) as f64 / 2.0).min(self.max_ns as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_match_the_sorted_samples() {
        let mut latencies = LatencyHistogram::default();
        (1..=10_000u64).for_each(|us| latencies.record(us * 1000));
        for percent in [1.0, 50.0, 90.0, 99.0, 99.9] {
            let expected = percent * 100.0 * 1000.0;
            let error = latencies.percentile_ns(percent) / expected - 1.0;
            assert!(error.abs() < 0.005, "{percent}: {error}");
        }
        assert_eq!((latencies.count(), latencies.max_ns()), (10_000, 10_000_000));
        assert_eq!(latencies.mean_ns(), 5_000_500.0);
        assert_eq!(LatencyHistogram::default().percentile_ns(50.0), 0.0);
    }
}
