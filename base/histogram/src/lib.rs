//! Buckets of latency histograms: [`LogBuckets`], and [`index_of_rank`] for percentiles.
//!
//! A histogram owns its counts, which may be plain or atomic, fixed or growing; which bucket a value is in, and which
//! values a bucket holds, is decided here for all of them.
//!
//! ```
//! use histogram::{LogBuckets, index_of_rank};
//! // 32 buckets for each power of two, values below 2^44.
//! type Buckets = LogBuckets<5, 44>;
//! let mut counts = vec![0u64; Buckets::COUNT];
//! for ticks in [100, 1000, 1000] {
//!     counts[Buckets::index(ticks)] += 1;
//! }
//! let median = index_of_rank(&counts, 2).expect("there are three values");
//! let (first, width) = Buckets::range(median);
//! assert!((first..first + width).contains(&1000) && width <= 1000 / 32);
//! ```
#![forbid(unsafe_code)]

/// Logarithmic buckets: 2^`STEPS_BITS` of equal width for each power of two.
///
/// Values below 2^(`STEPS_BITS` + 1) have a bucket each; above, a bucket is at most 2^-`STEPS_BITS` of its values wide.
/// Values of 2^`VALUE_BITS` and more share the last bucket. [`index`](Self::index) costs a leading-zeros count, a
/// minimum and two shifts.
#[derive(Clone, Copy, Debug)]
pub struct LogBuckets<const STEPS_BITS: u32, const VALUE_BITS: u32>;

impl<const STEPS_BITS: u32, const VALUE_BITS: u32> LogBuckets<STEPS_BITS, VALUE_BITS> {
    /// Number of buckets.
    pub const COUNT: usize = {
        assert!(STEPS_BITS < VALUE_BITS && VALUE_BITS <= u64::BITS);
        ((VALUE_BITS - STEPS_BITS + 1) as usize) << STEPS_BITS
    };
    /// Largest value of the last bucket; larger values are counted there, too.
    pub const VALUE_MAX: u64 = u64::MAX >> (u64::BITS - VALUE_BITS);

    /// The bucket of a value, below [`COUNT`](Self::COUNT).
    #[inline]
    pub const fn index(value: u64) -> usize {
        let value = if value < Self::VALUE_MAX { value } else { Self::VALUE_MAX };
        // At least the bits of a value that has a bucket of its own.
        let bits = u64::BITS - (value | ((2 << STEPS_BITS) - 1)).leading_zeros();
        let shift = bits - STEPS_BITS - 1;
        ((shift as usize) << STEPS_BITS) + (value >> shift) as usize
    }

    /// The smallest value of a bucket, and its width.
    pub const fn range(index: usize) -> (u64, u64) {
        if index < 2 << STEPS_BITS {
            return (index as u64, 1);
        }
        let shift = (index >> STEPS_BITS) - 1;
        (((index - (shift << STEPS_BITS)) as u64) << shift, 1 << shift)
    }
}

/// The index of the bucket with the value of this rank, from 1 for the smallest; `None` if there are fewer values.
pub fn index_of_rank(counts: &[u64], rank: u64) -> Option<usize> {
    let mut seen = 0;
    counts.iter().position(|count| {
        seen += count;
        seen >= rank.max(1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<const STEPS_BITS: u32, const VALUE_BITS: u32>() {
        let range = LogBuckets::<STEPS_BITS, VALUE_BITS>::range;
        let index = LogBuckets::<STEPS_BITS, VALUE_BITS>::index;
        let mut end = Some(0);
        for bucket in 0..LogBuckets::<STEPS_BITS, VALUE_BITS>::COUNT {
            let (first, width) = range(bucket);
            assert_eq!(Some(first), end, "bucket {bucket}");
            assert_eq!((index(first), index(first + (width - 1))), (bucket, bucket));
            assert!(width == 1 || width << STEPS_BITS <= first, "{width} at {first}");
            end = first.checked_add(width);
        }
        assert_eq!(end, 1u64.checked_shl(VALUE_BITS));
        assert_eq!(index(u64::MAX), LogBuckets::<STEPS_BITS, VALUE_BITS>::COUNT - 1);
    }

    #[test]
    fn buckets_cover_all_values_without_gap_or_overlap() {
        check::<5, 44>();
        check::<7, 42>();
        check::<7, 64>();
    }

    #[test]
    fn a_rank_is_in_the_bucket_that_reaches_it() {
        let counts = [0, 2, 0, 3];
        let found = [0, 1, 2, 3, 5, 6].map(|rank| index_of_rank(&counts, rank));
        assert_eq!(found, [Some(1), Some(1), Some(1), Some(3), Some(3), None]);
        assert_eq!(index_of_rank(&[], 1), None);
    }
}
