//! Latencies in a fixed array.

/// Counts of values in buckets whose width is at most 1/128 of their value.
///
/// Values below 256 have a bucket each; above, every power of two is cut into 128. Recording is a
/// leading-zeros, a shift and an add; nothing allocates after [`Histogram::new`]. Values are in
/// whatever unit the caller records, as a rule ticks of [`sys::clock`].
#[derive(Clone)]
pub struct Histogram {
    buckets: Box<[u64; BUCKETS]>,
    sum: u64,
    min: u64,
    max: u64,
}

/// Bits of a value that choose its bucket within a power of two.
const BITS: u32 = 7;
const SUB: usize = 1 << BITS;
/// Values are cut off at 2^42: 25 minutes of a 3 GHz clock.
const VALUE_BITS_MAX: u32 = 42;
const VALUE_MAX: u64 = (1 << VALUE_BITS_MAX) - 1;
const BUCKETS: usize = (VALUE_BITS_MAX - BITS + 1) as usize * SUB;

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
    /// An empty one; 36 KiB.
    pub fn new() -> Histogram {
        // Zeroed by the allocator, so that memory is taken only where values fall: hundreds of processes
        // start with a dozen of these each.
        let buckets = vec![0u64; BUCKETS].into_boxed_slice();
        let buckets = buckets.try_into().expect("a slice of BUCKETS is an array of BUCKETS");
        Histogram { buckets, sum: 0, min: u64::MAX, max: 0 }
    }

    /// Counts one value.
    #[inline]
    pub fn record(&mut self, value: u64) {
        self.record_many(value, 1);
    }

    /// Counts one value so many times.
    #[inline]
    pub fn record_many(&mut self, value: u64, times: u64) {
        let value = value.min(VALUE_MAX);
        self.buckets[index(value)] += times;
        self.sum += value * times;
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.buckets.fill(0);
        (self.sum, self.min, self.max) = (0, u64::MAX, 0);
    }

    /// Adds another's values.
    pub fn merge(&mut self, other: &Histogram) {
        for (mine, theirs) in self.buckets.iter_mut().zip(other.buckets.iter()) {
            *mine += theirs;
        }
        self.sum += other.sum;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// Number of values.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The smallest value, 0 when there is none.
    pub fn min(&self) -> u64 {
        if self.min == u64::MAX { 0 } else { self.min }
    }

    /// The largest value, 0 when there is none.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The exact mean, 0 when there is no value.
    pub fn mean(&self) -> f64 {
        let count = self.count();
        if count == 0 { 0.0 } else { self.sum as f64 / count as f64 }
    }

    /// The standard deviation, as exact as the buckets are narrow.
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

    /// The value that `percent` of the values do not exceed: the top of its bucket, but never above
    /// the largest value recorded.
    pub fn percentile(&self, percent: f64) -> u64 {
        let count = self.count();
        let rank = ((percent / 100.0 * count as f64).ceil() as u64).clamp(1, count.max(1));
        let mut seen = 0;
        for (index, bucket) in self.buckets.iter().enumerate() {
            seen += bucket;
            if seen >= rank {
                return highest(index).min(self.max);
            }
        }
        self.max
    }

    /// Sum, smallest, largest, then index and count of each bucket that is not empty.
    pub(crate) fn parts(&self) -> Vec<u64> {
        let full = self.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
        let pairs = full.flat_map(|(index, count)| [index as u64, *count]);
        [self.sum, self.min, self.max].into_iter().chain(pairs).collect()
    }

    /// From what [`parts`](Self::parts) gave; `None` for anything else.
    pub(crate) fn from_parts(parts: &[u64]) -> Option<Histogram> {
        let (&[sum, min, max], pairs) = parts.split_first_chunk::<3>()?;
        let mut histogram = Histogram { sum, min, max, ..Histogram::new() };
        for pair in pairs.chunks(2) {
            let &[index, count] = pair else { return None };
            *histogram.buckets.get_mut(usize::try_from(index).ok()?)? = count;
        }
        Some(histogram)
    }

    /// Each bucket that is not empty: its largest value and its count.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let full = self.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
        full.map(|(index, count)| (highest(index), *count))
    }
}

/// The bucket of a value of at most [`VALUE_MAX`].
#[inline]
fn index(value: u64) -> usize {
    let shift = (u64::BITS - (value | (2 * SUB as u64 - 1)).leading_zeros()) - BITS - 1;
    ((shift as usize) << BITS) + (value >> shift) as usize
}

/// The largest value of a bucket.
fn highest(index: usize) -> u64 {
    let (lowest, width) = range(index);
    lowest + width - 1
}

fn midpoint(index: usize) -> f64 {
    let (lowest, width) = range(index);
    lowest as f64 + (width - 1) as f64 / 2.0
}

fn range(index: usize) -> (u64, u64) {
    if index < 2 * SUB {
        return (index as u64, 1);
    }
    let shift = (index >> BITS) - 1;
    let lowest = ((index - (shift << BITS)) as u64) << shift;
    (lowest, 1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_in_its_bucket_and_buckets_are_narrow() {
        let values = (0..5000).chain((12..42).flat_map(|bit| [(1u64 << bit) - 1, 1 << bit, (1 << bit) + 77]));
        for value in values {
            let (lowest, width) = range(index(value));
            assert!((lowest..lowest + width).contains(&value), "{value} in {lowest}+{width}");
            assert!(width == 1 || width * 128 <= lowest, "{width} at {lowest}");
        }
        assert_eq!(index(VALUE_MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_agree_with_an_exact_reference() {
        let mut random = crate::Random::new(3);
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
    fn merging_is_recording_both() {
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
    fn nothing_recorded_is_all_zero() {
        let histogram = Histogram::new();
        let zero = (histogram.count(), histogram.min(), histogram.max(), histogram.percentile(99.0));
        assert_eq!(zero, (0, 0, 0, 0));
        assert_eq!(histogram.mean() + histogram.deviation(), 0.0);
    }
}
