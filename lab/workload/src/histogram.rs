//! A log-linear histogram of latencies in a fixed array.

use histogram::{LogBuckets, index_of_rank};

/// Counts values in buckets whose width is at most 1/128 of their value, like an HDR histogram.
///
/// Values below 256 have a bucket each; above, every power of two is split into 128 buckets. Recording is a
/// leading-zeros count, a shift and an add; nothing allocates after [`Histogram::new`]. The unit is the
/// caller's, usually ticks of [`os::clock`].
#[derive(Clone)]
pub struct Histogram {
    buckets: Box<[u64; BUCKETS]>,
    sum: u64,
    min: u64,
    max: u64,
}

/// 128 buckets for each power of two. Values are cut off at 2^42: 25 minutes of a 3 GHz clock.
type HistogramBuckets = LogBuckets<7, 42>;
const BUCKETS: usize = HistogramBuckets::COUNT;

impl Default for Histogram {
    fn default() -> Self {
        Histogram::new()
    }
}

impl std::fmt::Debug for Histogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Histogram({} values, mean {:.1})", self.count(), self.mean())
    }
}

impl Histogram {
    /// An empty histogram of 36 KiB.
    pub fn new() -> Histogram {
        // Zeroed by the allocator, so that only touched pages use memory: hundreds of processes start with a
        // dozen histograms each.
        let buckets = vec![0u64; BUCKETS].into_boxed_slice();
        let buckets = buckets.try_into().expect("a slice of BUCKETS is an array of BUCKETS");
        Histogram { buckets, sum: 0, min: u64::MAX, max: 0 }
    }

    /// Records one value.
    #[inline]
    pub fn record(&mut self, value: u64) {
        self.record_many(value, 1);
    }

    /// Records one value `times` times.
    #[inline]
    pub fn record_many(&mut self, value: u64, times: u64) {
        let value = value.min(HistogramBuckets::VALUE_MAX);
        self.buckets[HistogramBuckets::index(value)] += times;
        self.sum += value * times;
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    /// Removes all values.
    pub fn clear(&mut self) {
        self.buckets.fill(0);
        (self.sum, self.min, self.max) = (0, u64::MAX, 0);
    }

    /// Adds the values of another histogram.
    pub fn merge(&mut self, other: &Histogram) {
        for (mine, theirs) in self.buckets.iter_mut().zip(other.buckets.iter()) {
            *mine += theirs;
        }
        self.sum += other.sum;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// Number of values; sums all buckets.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The smallest value, 0 if there is none.
    pub fn min(&self) -> u64 {
        if self.min == u64::MAX { 0 } else { self.min }
    }

    /// The largest value, 0 if there is none.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The exact mean, 0 if there is no value.
    pub fn mean(&self) -> f64 {
        let count = self.count();
        if count == 0 { 0.0 } else { self.sum as f64 / count as f64 }
    }

    /// The standard deviation, within the precision of the buckets; 0 if there is no value.
    pub fn deviation(&self) -> f64 {
        let count = self.count();
        if count == 0 {
            return 0.0;
        }
        let mean = self.mean();
        let spread = |(index, count): (usize, &u64)| (midpoint(index) - mean).powi(2) * *count as f64;
        let sum: f64 = self.buckets.iter().enumerate().filter(|(_, count)| **count > 0).map(spread).sum();
        (sum / count as f64).sqrt()
    }

    /// The value that `percent` of the values do not exceed: the upper bound of its bucket, but at most the
    /// largest recorded value.
    pub fn percentile(&self, percent: f64) -> u64 {
        let count = self.count();
        let rank = ((percent / 100.0 * count as f64).ceil() as u64).clamp(1, count.max(1));
        index_of_rank(&self.buckets[..], rank).map_or(self.max, |index| highest(index).min(self.max))
    }

    /// The histogram as numbers: sum, smallest, largest, then index and count of each non-empty bucket.
    pub(crate) fn parts(&self) -> Vec<u64> {
        let full = self.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
        let pairs = full.flat_map(|(index, count)| [index as u64, *count]);
        [self.sum, self.min, self.max].into_iter().chain(pairs).collect()
    }

    /// Rebuilds a histogram from [`parts`](Self::parts); `None` if they are malformed.
    pub(crate) fn from_parts(parts: &[u64]) -> Option<Histogram> {
        let (&[sum, min, max], pairs) = parts.split_first_chunk::<3>()?;
        let mut histogram = Histogram { sum, min, max, ..Histogram::new() };
        for pair in pairs.chunks(2) {
            let &[index, count] = pair else { return None };
            *histogram.buckets.get_mut(usize::try_from(index).ok()?)? = count;
        }
        Some(histogram)
    }

    /// The largest value and the count of each non-empty bucket, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let full = self.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
        full.map(|(index, count)| (highest(index), *count))
    }
}

/// The largest value of a bucket.
fn highest(index: usize) -> u64 {
    let (lowest, width) = HistogramBuckets::range(index);
    lowest + width - 1
}

fn midpoint(index: usize) -> f64 {
    let (lowest, width) = HistogramBuckets::range(index);
    lowest as f64 + (width - 1) as f64 / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_agree_with_an_exact_reference() {
        let mut random = crate::WyRand::new(3);
        let mut exact: Vec<u64> = (0..20_000).map(|_| random.below(1 << 20)).collect();
        let mut histogram = Histogram::new();
        let mut reference = hdrhistogram::Histogram::<u64>::new(3).unwrap();
        for value in &exact {
            histogram.record(*value);
            reference.record(*value).unwrap();
        }
        exact.sort_unstable();
        for percent in [1.0, 50.0, 90.0, 99.0, 99.9, 100.0] {
            let rank = ((percent / 100.0 * exact.len() as f64).ceil() as usize).max(1);
            let (got, want) = (histogram.percentile(percent), exact[rank - 1]);
            assert!(got >= want && got - want <= want / 128 + 1, "p{percent}: {got} against {want}");
        }
        assert!((histogram.mean() - reference.mean()).abs() < reference.mean() / 500.0);
        assert!((histogram.deviation() - reference.stdev()).abs() < reference.stdev() / 100.0);
        assert_eq!((histogram.min(), histogram.max()), (exact[0], exact[exact.len() - 1]));
    }

    #[test]
    fn merging_equals_recording_both() {
        let (mut one, mut two, mut both) = (Histogram::new(), Histogram::new(), Histogram::new());
        for value in 0..1000 {
            if value % 3 == 0 {
                one.record(value * 9)
            } else {
                two.record(value * 9)
            }
            both.record(value * 9);
        }
        one.merge(&two);
        assert!(one.iter().eq(both.iter()));
        assert_eq!((one.count(), one.max(), one.mean()), (1000, both.max(), both.mean()));
    }

    #[test]
    fn an_empty_histogram_reports_zeros() {
        let histogram = Histogram::new();
        let zero = (histogram.count(), histogram.min(), histogram.max(), histogram.percentile(99.0));
        assert_eq!(zero, (0, 0, 0, 0));
        assert_eq!(histogram.mean() + histogram.deviation(), 0.0);
    }
}
