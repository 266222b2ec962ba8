//! Latencies counted in buckets whose width is at most 1/128 of their value.

/// Log2 of the buckets an octave.
const BITS: u32 = 7;
/// Below this a bucket is a nanosecond.
const LINEAR: u64 = 1 << (BITS + 1);

/// A distribution of latencies, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Latencies {
    buckets: Vec<u64>,
    count: u64,
    sum_ns: u128,
    max_ns: u64,
}

impl Latencies {
    /// Counts one.
    pub fn add(&mut self, ns: u64) {
        let bucket = bucket_of(ns);
        if bucket >= self.buckets.len() {
            self.buckets.resize(bucket + 1, 0);
        }
        self.buckets[bucket] += 1;
        self.count += 1;
        self.sum_ns += u128::from(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Mean; 0 where there are none.
    pub fn mean_ns(&self) -> f64 {
        self.sum_ns as f64 / self.count.max(1) as f64
    }

    /// Longest; exact.
    pub fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// The latency that `percent` of them do not exceed, to within 1/256; 0 where there are none.
    pub fn percentile_ns(&self, percent: f64) -> f64 {
        let rank = (self.count as f64 * percent / 100.0).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank {
                let (low, width) = bounds_of(bucket);
                return (low as f64 + (width - 1) as f64 / 2.0).min(self.max_ns as f64);
            }
        }
        0.0
    }
}

fn bucket_of(ns: u64) -> usize {
    if ns < LINEAR {
        return ns as usize;
    }
    let shift = ns.ilog2() - BITS;
    ((u64::from(shift) << BITS) + (ns >> shift)) as usize
}

/// First latency of a bucket and number of latencies in it.
fn bounds_of(bucket: usize) -> (u64, u64) {
    let bucket = bucket as u64;
    if bucket < LINEAR {
        return (bucket, 1);
    }
    let shift = (bucket >> BITS) - 1;
    (((bucket & ((1 << BITS) - 1)) + (1 << BITS)) << shift, 1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_latency_is_in_its_bucket() {
        for ns in (0..2000).chain((11..63).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 1])) {
            let (low, width) = bounds_of(bucket_of(ns));
            assert!(low <= ns && ns - low < width, "{ns}: {low} + {width}");
            assert!(width == 1 || width * 128 <= low, "{ns}: {low} + {width}");
        }
    }

    #[test]
    fn percentiles_are_those_of_the_sorted_latencies() {
        let mut latencies = Latencies::default();
        (1..=10_000u64).for_each(|us| latencies.add(us * 1000));
        for percent in [1.0, 50.0, 90.0, 99.0, 99.9] {
            let expected = percent * 100.0 * 1000.0;
            let error = latencies.percentile_ns(percent) / expected - 1.0;
            assert!(error.abs() < 0.005, "{percent}: {error}");
        }
        assert_eq!((latencies.count(), latencies.max_ns()), (10_000, 10_000_000));
        assert_eq!(latencies.mean_ns(), 5_000_500.0);
        assert_eq!(Latencies::default().percentile_ns(50.0), 0.0);
    }
}
