//! Blocks marked by Write Uncorrectable, for modules that keep data in memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Maximum number of ranges: about 3 MiB.
const RANGES_MAX: usize = 65_536;

/// The block ranges of one device whose reads fail, shared by its channels (like the kernel's `badblocks`).
///
/// While there are none, it costs a load and a predictable branch an I/O, and no lock.
///
/// ```
/// let bad = bdev::BadBlocks::default();
/// bad.set(8, 4)?;
/// assert!(bad.overlaps(11, 1) && !bad.overlaps(12, 1));
/// bad.clear(9, 1)?;
/// assert!(bad.overlaps(8, 1) && !bad.overlaps(9, 1) && bad.overlaps(10, 1));
/// # Ok::<(), bdev::TooManyRanges>(())
/// ```
#[derive(Debug, Default)]
pub struct BadBlocks {
    any: AtomicBool,
    /// Start and end (exclusive) of each range; ranges neither overlap nor adjoin.
    ranges: Mutex<BTreeMap<u64, u64>>,
}

/// The maximum number of ranges is reached; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyRanges;

impl std::fmt::Display for TooManyRanges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the maximum of {RANGES_MAX} ranges of uncorrectable blocks is reached")
    }
}

impl std::error::Error for TooManyRanges {}

impl BadBlocks {
    /// Marks a range: its reads fail from now on.
    ///
    /// # Errors
    /// [`TooManyRanges`].
    pub fn set(&self, lba: u64, blocks: u32) -> Result<(), TooManyRanges> {
        let mut ranges = self.lock();
        let mut new = span(lba, blocks);
        let joins = ranges.range(..=new.end).next_back().is_some_and(|(_, &end)| end >= new.start);
        if !joins && ranges.len() >= RANGES_MAX {
            return Err(TooManyRanges);
        }
        // Ranges that it overlaps or adjoins are merged into it.
        while let Some((&start, &end)) = ranges.range(..=new.end).next_back()
            && end >= new.start
        {
            new = new.start.min(start)..new.end.max(end);
            ranges.remove(&start);
        }
        ranges.insert(new.start, new.end);
        self.any.store(true, Ordering::Release);
        Ok(())
    }

    /// Clears a range, which was or is about to be written: it can be read again.
    ///
    /// # Errors
    /// [`TooManyRanges`] if that would split a range and the maximum is reached.
    #[inline]
    pub fn clear(&self, lba: u64, blocks: u32) -> Result<(), TooManyRanges> {
        if self.any.load(Ordering::Acquire) { self.clear_slow(&span(lba, blocks)) } else { Ok(()) }
    }

    /// Whether no block is marked. Costs a load.
    #[inline]
    pub fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    /// Whether the range contains a marked block, so that its read fails.
    #[inline]
    pub fn overlaps(&self, lba: u64, blocks: u32) -> bool {
        self.any.load(Ordering::Acquire) && self.overlaps_slow(&span(lba, blocks))
    }

    #[cold]
    fn clear_slow(&self, cleared: &Range<u64>) -> Result<(), TooManyRanges> {
        let mut ranges = self.lock();
        while let Some((&start, &end)) = ranges.range(..cleared.end).next_back()
            && end > cleared.start
        {
            let splits = start < cleared.start && end > cleared.end;
            if splits && ranges.len() >= RANGES_MAX {
                return Err(TooManyRanges);
            }
            ranges.remove(&start);
            if start < cleared.start {
                ranges.insert(start, cleared.start);
            }
            if end > cleared.end {
                ranges.insert(cleared.end, end);
            }
        }
        self.any.store(!ranges.is_empty(), Ordering::Release);
        Ok(())
    }

    #[cold]
    fn overlaps_slow(&self, read: &Range<u64>) -> bool {
        self.lock().range(..read.end).next_back().is_some_and(|(_, &end)| end > read.start)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        // Every intermediate state under the lock is a valid set of ranges.
        sync::lock(&self.ranges)
    }
}

fn span(lba: u64, blocks: u32) -> Range<u64> {
    lba..lba.saturating_add(blocks.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares with one flag for each block.
        #[test]
        fn reads_fail_exactly_where_blocks_are_marked_and_not_rewritten(
            steps in prop::collection::vec((any::<bool>(), 0..64u64, 1..16u32), 1..60)
        ) {
            let (bad, mut oracle) = (BadBlocks::default(), [false; 80]);
            for (mark, lba, blocks) in steps {
                let done = if mark { bad.set(lba, blocks) } else { bad.clear(lba, blocks) };
                prop_assert_eq!(done, Ok(()));
                oracle[lba as usize..][..blocks as usize].fill(mark);
                for first in 0..80 {
                    for blocks in [1, 5] {
                        let end = (first + blocks).min(80);
                        let expected = oracle[first..end].contains(&true);
                        prop_assert_eq!(bad.overlaps(first as u64, (end - first) as u32), expected);
                    }
                }
                let ranges: Vec<(u64, u64)> = bad.lock().iter().map(|(start, end)| (*start, *end)).collect();
                prop_assert!(ranges.windows(2).all(|two| two[0].1 < two[1].0), "{:?}", ranges);
            }
            prop_assert_eq!(bad.any.load(Ordering::Relaxed), oracle.contains(&true));
        }
    }

    #[test]
    fn a_full_set_rejects_changes_that_need_another_range() {
        let bad = BadBlocks::default();
        bad.set(0, 3).unwrap();
        for index in 1..RANGES_MAX as u64 {
            bad.set(index * 4, 1).unwrap();
        }
        let beyond = RANGES_MAX as u64 * 4;
        assert_eq!(bad.set(beyond, 1), Err(TooManyRanges));
        assert!(!bad.overlaps(beyond, 1));
        assert_eq!(bad.clear(1, 1), Err(TooManyRanges));
        assert!(bad.overlaps(1, 1));
        // Merging ranges, or shortening one, needs no further range.
        bad.set(3, 1).unwrap();
        bad.clear(0, 2).unwrap();
        assert!(!bad.overlaps(0, 2) && bad.overlaps(2, 1));
    }
}
