//! Zones of fio's `zonemode=strided`: some bytes of each zone, then the next zone.

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
}

impl ZoneCursor {
    pub(super) fn new(zones: StridedZones, block_bytes: u32) -> ZoneCursor {
        let blocks = |bytes: u64| bytes / u64::from(block_bytes);
        let range = blocks(zones.range_bytes).max(1);
        let (size, skip) = (blocks(zones.size_bytes).max(1), blocks(zones.skip_bytes));
        ZoneCursor { range, size, skip, start: 0, done: 0 }
    }

    /// Moves to the next zone when this one has had its I/O. Returns whether a zone begins, the same one
    /// where `zonesize` is above `zonerange` and what is done is whole ranges, as in fio. The region has
    /// `region` blocks.
    pub(super) fn advance(&mut self, region: u64) -> bool {
        if self.done < self.size {
            return self.done > 0 && self.done.is_multiple_of(self.range);
        }
        self.done = 0;
        self.start = self.start.saturating_add(self.range).saturating_add(self.skip);
        if self.start >= region {
            self.start = 0;
        }
        true
    }

    /// The pass begins again.
    pub(super) fn restart(&mut self) {
        (self.start, self.done) = (0, 0);
    }

    /// First block, and the block behind the last one, which may be beyond the region.
    pub(super) fn range(&self) -> (u64, u64) {
        (self.start, self.start.saturating_add(self.range))
    }

    /// Counts an I/O.
    pub(super) fn count(&mut self, blocks: u64) {
        self.done += blocks;
    }
}
