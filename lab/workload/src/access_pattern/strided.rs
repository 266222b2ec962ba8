//! Zones of fio's `zonemode=strided`: some bytes of each zone, then the next zone.

use crate::WyRand;
use crate::spec::StridedZones;

/// The zone of a job's I/O, in logical blocks from the start of its region.
#[derive(Clone, Debug)]
pub(super) struct ZoneCursor {
    range: u64,
    size: u64,
    skip: u64,
    start: u64,
    /// Blocks of I/O in this zone.
    done: u64,
    next: u64,
}

impl ZoneCursor {
    pub(super) fn new(zones: StridedZones, block_bytes: u32) -> ZoneCursor {
        let blocks = |bytes: u64| bytes / u64::from(block_bytes);
        let range = blocks(zones.range_bytes).max(1);
        let (size, skip) = (blocks(zones.size_bytes).max(1), blocks(zones.skip_bytes));
        ZoneCursor { range, size, skip, start: 0, done: 0, next: 0 }
    }

    /// The start of the next I/O of `blocks` blocks, which is at most the length of the region.
    pub(super) fn next(&mut self, region: u64, blocks: u64, random: Option<(&mut WyRand, u64)>) -> u64 {
        if self.done >= self.size {
            self.done = 0;
            self.start = self.start.saturating_add(self.range).saturating_add(self.skip);
            if self.start >= region {
                self.start = 0;
            }
            self.next = self.start;
        }
        let end = self.start.saturating_add(self.range).min(region);
        let at = match random {
            Some((random, align)) => {
                let positions = (end - self.start).saturating_sub(blocks) / align + 1;
                self.start + random.below(positions) * align
            }
            None if self.next + blocks <= end => self.next,
            // The zone is accessed again.
            None => self.start,
        };
        let at = at.min(region - blocks);
        (self.next, self.done) = (at + blocks, self.done + blocks);
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn starts(range: u64, size: u64, skip: u64, count: usize) -> Vec<u64> {
        let zones = StridedZones { range_bytes: range, size_bytes: size, skip_bytes: skip };
        let mut cursor = ZoneCursor::new(zones, 1);
        (0..count).map(|_| cursor.next(100, 10, None)).collect()
    }

    #[test]
    fn each_zone_has_its_share_of_the_io() {
        // All of each zone, then a gap, with a wrap at the end of the region.
        assert_eq!(starts(20, 20, 30, 6), [0, 10, 50, 60, 0, 10]);
        // Half of each zone.
        assert_eq!(starts(20, 10, 30, 3), [0, 50, 0]);
        // Each zone twice.
        assert_eq!(starts(20, 40, 30, 5), [0, 10, 0, 10, 50]);
    }

    #[test]
    fn random_io_stays_in_the_zone() {
        let zones = StridedZones { range_bytes: 40, size_bytes: 1000, skip_bytes: 0 };
        let (mut cursor, mut random) = (ZoneCursor::new(zones, 1), WyRand::new(1));
        let starts: std::collections::BTreeSet<u64> =
            (0..100).map(|_| cursor.next(100, 10, Some((&mut random, 10)))).collect();
        assert_eq!(starts.into_iter().collect::<Vec<_>>(), [0, 10, 20, 30]);
    }
}
