//! Blocks that were written as uncorrectable, for modules that keep data in memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Ranges at a time: about 3 MiB of them.
const RANGES_MAX: usize = 65_536;

/// The ranges of one device of which every read fails, shared by its channels.
///
/// While there are none it costs a load and a predictable branch an I/O, and no lock.
///
/// ```
/// let bad = bdev::BadBlocks::default();
/// bad.mark(8, 4)?;
/// assert!(bad.touches(11, 1) && !bad.touches(12, 1));
/// bad.heal(9, 1)?;
/// assert!(bad.touches(8, 1) && !bad.touches(9, 1) && bad.touches(10, 1));
/// # Ok::<(), bdev::TooManyRanges>(())
/// ```
#[derive(Debug, Default)]
pub struct BadBlocks {
    any: AtomicBool,
    /// First block of each range, and the one behind its last; no two touch each other.
    ranges: Mutex<BTreeMap<u64, u64>>,
}

/// There are so many ranges already that one more is not kept. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyRanges;

impl std::fmt::Display for TooManyRanges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "there are {RANGES_MAX} ranges of uncorrectable blocks already")
    }
}

impl std::error::Error for TooManyRanges {}

impl BadBlocks {
    /// Reads of the range fail from now on.
    ///
    /// # Errors
    /// [`TooManyRanges`].
    pub fn mark(&self, lba: u64, blocks: u32) -> Result<(), TooManyRanges> {
        let mut ranges = self.lock();
        let mut new = span(lba, blocks);
        let joins = ranges.range(..=new.end).next_back().is_some_and(|(_, &end)| end >= new.start);
        if !joins && ranges.len() >= RANGES_MAX {
            return Err(TooManyRanges);
        }
        // Those that it overlaps or touches become part of it.
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

    /// The range can be read again: it was, or is about to be, written.
    ///
    /// # Errors
    /// [`TooManyRanges`], where one would become two.
    #[inline]
    pub fn heal(&self, lba: u64, blocks: u32) -> Result<(), TooManyRanges> {
        if self.any.load(Ordering::Acquire) { self.heal_some(&span(lba, blocks)) } else { Ok(()) }
    }

    /// Whether there is none: a load.
    #[inline]
    pub fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    /// Whether a read of the range fails.
    #[inline]
    pub fn touches(&self, lba: u64, blocks: u32) -> bool {
        self.any.load(Ordering::Acquire) && self.is_touched(&span(lba, blocks))
    }

    #[cold]
    fn heal_some(&self, healed: &Range<u64>) -> Result<(), TooManyRanges> {
        let mut ranges = self.lock();
        while let Some((&start, &end)) = ranges.range(..healed.end).next_back()
            && end > healed.start
        {
            let splits = start < healed.start && end > healed.end;
            if splits && ranges.len() >= RANGES_MAX {
                return Err(TooManyRanges);
            }
            ranges.remove(&start);
            if start < healed.start {
                ranges.insert(start, healed.start);
            }
            if end > healed.end {
                ranges.insert(healed.end, end);
            }
        }
        self.any.store(!ranges.is_empty(), Ordering::Release);
        Ok(())
    }

    #[cold]
    fn is_touched(&self, read: &Range<u64>) -> bool {
        self.lock().range(..read.end).next_back().is_some_and(|(_, &end)| end > read.start)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        // Every change under the lock leaves ranges behind, whichever.
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
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
        /// Against a flag for each block.
        #[test]
        fn a_read_fails_exactly_where_nothing_was_written_since(
            steps in prop::collection::vec((any::<bool>(), 0..64u64, 1..16u32), 1..60)
        ) {
            let (bad, mut oracle) = (BadBlocks::default(), [false; 80]);
            for (mark, lba, blocks) in steps {
                let done = if mark { bad.mark(lba, blocks) } else { bad.heal(lba, blocks) };
                prop_assert_eq!(done, Ok(()));
                oracle[lba as usize..][..blocks as usize].fill(mark);
                for first in 0..80 {
                    for blocks in [1, 5] {
                        let end = (first + blocks).min(80);
                        let expected = oracle[first..end].contains(&true);
                        prop_assert_eq!(bad.touches(first as u64, (end - first) as u32), expected);
                    }
                }
                let ranges: Vec<(u64, u64)> = bad.lock().iter().map(|(start, end)| (*start, *end)).collect();
                prop_assert!(ranges.windows(2).all(|two| two[0].1 < two[1].0), "{:?}", ranges);
            }
            prop_assert_eq!(bad.any.load(Ordering::Relaxed), oracle.contains(&true));
        }
    }

    #[test]
    fn ranges_are_bounded_and_a_full_set_changes_nothing() {
        let bad = BadBlocks::default();
        bad.mark(0, 3).unwrap();
        for index in 1..RANGES_MAX as u64 {
            bad.mark(index * 4, 1).unwrap();
        }
        let beyond = RANGES_MAX as u64 * 4;
        assert_eq!(bad.mark(beyond, 1), Err(TooManyRanges));
        assert!(!bad.touches(beyond, 1));
        assert_eq!(bad.heal(1, 1), Err(TooManyRanges));
        assert!(bad.touches(1, 1));
        // What joins others, or leaves one piece, has room.
        bad.mark(3, 1).unwrap();
        bad.heal(0, 2).unwrap();
        assert!(!bad.touches(0, 2) && bad.touches(2, 1));
    }
}
