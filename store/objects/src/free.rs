//! Free extents of a partition, as runs.

use std::collections::BTreeMap;

/// Runs of free extents by their first. In memory only: which extents are free follows from the onodes.
#[derive(Debug, Default)]
pub(crate) struct FreeExtents {
    runs: BTreeMap<u32, u32>,
    count: u32,
}

impl FreeExtents {
    /// All of `count` extents, counted from 1.
    pub(crate) fn all(count: u32) -> FreeExtents {
        FreeExtents { runs: BTreeMap::from([(1, count)]), count }
    }

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

    /// Takes one extent; whether it was free.
    pub(crate) fn take(&mut self, extent: u32) -> bool {
        let Some((&first, &length)) = self.runs.range(..=extent).next_back() else { return false };
        let end = first + length;
        if extent >= end {
            return false;
        }
        self.runs.remove(&first);
        if first < extent {
            self.runs.insert(first, extent - first);
        }
        if extent + 1 < end {
            self.runs.insert(extent + 1, end - extent - 1);
        }
        self.count -= 1;
        true
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

#[cfg(test)]
mod tests {
    use super::*;
    use random::WyRand;
    use std::collections::BTreeSet;

    #[test]
    fn runs_match_a_set() {
        let (mut free, mut oracle) = (FreeExtents::all(40), (1..=40).collect::<BTreeSet<u32>>());
        let mut random = WyRand::new(1);
        for _ in 0..5000 {
            let extent = 1 + random.below(41) as u32;
            match random.below(3) {
                0 => assert_eq!(free.allocate(), oracle.pop_first()),
                1 => assert_eq!(free.take(extent), oracle.remove(&extent)),
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
