//! Free extents of a partition, as runs.

use std::collections::BTreeMap;

/// Runs of free extents by their first. In memory only: which extents are free follows from the onodes.
#[derive(Debug, Default)]
pub(crate) struct FreeExtents {
    runs: BTreeMap<u32, u32>,
    count: u32,
}

impl FreeExtents {
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// Takes the lowest extent, so that extents allocated in turn are adjacent where possible.
    pub(crate) fn allocate(&mut self) -> Option<u32> {
        let (first, length) = self.runs.pop_first()?;
        if length > 1 {
            self.runs.insert(first + 1, length - 1);
        }
        self.count -= 1;
        Some(first)
    }

    /// Returns an extent.
    ///
    /// # Panics
    /// If it is free already.
    pub(crate) fn release(&mut self, extent: u32) {
        let (mut first, mut length) = (extent, 1);
        if let Some((&before, &run)) = self.runs.range(..=extent).next_back() {
            assert!(before + run <= extent, "extent {extent} is released twice");
            if before + run == extent {
                (first, length) = (before, run + 1);
            }
        }
        if let Some(after) = self.runs.remove(&(extent + 1)) {
            length += after;
        }
        self.runs.insert(first, length);
        self.count += 1;
    }
}

/// Which extents the onodes of a partition name, a bit each: a large device has millions, in any order.
#[derive(Debug)]
pub(crate) struct UsedExtents {
    words: Vec<u64>,
    extents: u32,
}

impl UsedExtents {
    /// None of `extents`, counted from 1.
    pub(crate) fn none(extents: u32) -> UsedExtents {
        UsedExtents { words: vec![0; extents.div_ceil(u64::BITS) as usize], extents }
    }

    /// Takes one extent; whether it exists and was free.
    pub(crate) fn take(&mut self, extent: u32) -> bool {
        let Some(index) = extent.checked_sub(1).filter(|index| *index < self.extents) else { return false };
        let (word, bit) = (&mut self.words[(index / u64::BITS) as usize], 1 << (index % u64::BITS));
        let is_free = *word & bit == 0;
        *word |= bit;
        is_free
    }

    /// The others.
    pub(crate) fn into_free(self) -> FreeExtents {
        let (mut runs, mut count, mut at) = (Vec::new(), 0, 0);
        while at < self.extents {
            let first = self.run_end(at, true);
            at = self.run_end(first, false);
            if first < at {
                runs.push((first + 1, at - first));
                count += at - first;
            }
        }
        FreeExtents { runs: runs.into_iter().collect(), count }
    }

    /// The first index from `at` on that is not used, or not free; the number of extents if there is none.
    fn run_end(&self, at: u32, used: bool) -> u32 {
        let mut at = at;
        while at < self.extents {
            let word = self.words[(at / u64::BITS) as usize] >> (at % u64::BITS);
            let ahead = if used { word.trailing_ones() } else { word.trailing_zeros() };
            // What was shifted in is free.
            let ahead = ahead.min(u64::BITS - at % u64::BITS);
            at += ahead;
            if !at.is_multiple_of(u64::BITS) || ahead == 0 {
                break;
            }
        }
        at.min(self.extents)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use random::WyRand;
    use std::collections::BTreeSet;

    #[test]
    fn runs_match_a_set() {
        let mut random = WyRand::new(1);
        let (mut used, mut oracle) = (UsedExtents::none(200), (1..=200).collect::<BTreeSet<u32>>());
        for _ in 0..50 {
            // Some in a row, so that words are full.
            let first = random.below(203) as u32;
            for extent in first..first + random.below(90) as u32 {
                assert_eq!(used.take(extent), oracle.remove(&extent));
            }
            let free = UsedExtents { words: used.words.clone(), extents: 200 }.into_free();
            let runs = free.runs.iter().flat_map(|(first, length)| *first..first + length);
            assert!(runs.eq(oracle.iter().copied()));
            assert_eq!(free.count() as usize, oracle.len());
            if oracle.is_empty() || random.happens(100) {
                (used, oracle) = (UsedExtents::none(200), (1..=200).collect());
            }
        }
        let (mut free, mut oracle) = (UsedExtents::none(40).into_free(), (1..=40).collect::<BTreeSet<u32>>());
        for _ in 0..5000 {
            let extent = 1 + random.below(41) as u32;
            match random.below(2) {
                0 => assert_eq!(free.allocate(), oracle.pop_first()),
                _ if extent <= 40 && oracle.insert(extent) => free.release(extent),
                _ => {}
            }
            assert_eq!(free.count() as usize, oracle.len());
            let runs = free.runs.iter().flat_map(|(first, length)| *first..first + length);
            assert!(runs.eq(oracle.iter().copied()));
            let starts: Vec<_> = free.runs.iter().collect();
            assert!(starts.windows(2).all(|two| two[0].0 + two[0].1 < *two[1].0), "runs are not merged");
        }
    }
}
