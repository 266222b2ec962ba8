//! The checksum table of a partition: a cache of its blocks, and what changed since they were written.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;

use wire_store::{BLOCK_BYTES, PartitionLayout};

const PER_BLOCK: usize = PartitionLayout::CHECKSUMS_PER_BLOCK as usize;
/// Changes that are kept for each block of the cache's limit: they take a tenth of its memory.
const CHANGES_PER_BLOCK: usize = 16;
/// So many are kept however small the cache is: a checkpoint for less would cost more than it frees.
const CHANGES_MIN: usize = 1024;

/// The checksums of a partition's blocks, in the order of the table.
///
/// A change is in `changed` until a checkpoint begins, and in `in_checkpoint` until that is finished. So a cached block of the
/// table is never the only place that has a checksum, and is evicted at any time. A block as the device has it, with
/// the changes of checkpoints that were finished since the read began, then `in_checkpoint`, then `changed`, is the block as
/// it is now, even if a checkpoint was writing it meanwhile.
#[derive(Debug)]
pub(crate) struct ChecksumTable {
    /// For each block of the table: its index in `cached` plus 1, or 0.
    places: Vec<u32>,
    cached: Vec<CachedBlock>,
    cached_max: usize,
    /// Where the search for a block to evict begins (CLOCK).
    hand: usize,
    changed: BTreeMap<u64, u32>,
    in_checkpoint: BTreeMap<u64, u32>,
    /// Blocks of the table that are being read, with the changes of checkpoints that were finished since.
    loading: BTreeMap<u32, Vec<(u64, u32)>>,
}

#[derive(Debug)]
struct CachedBlock {
    /// Index in the table.
    index: u32,
    /// It was used since the hand passed.
    is_recent: Cell<bool>,
    checksums: Box<[u32; PER_BLOCK]>,
}

impl ChecksumTable {
    /// A table of `blocks` blocks, of which at most `cached_max` are cached, and at least one.
    pub(crate) fn new(blocks: usize, cached_max: usize) -> ChecksumTable {
        ChecksumTable {
            places: vec![0; blocks],
            cached: Vec::new(),
            cached_max: cached_max.max(1),
            hand: 0,
            changed: BTreeMap::new(),
            in_checkpoint: BTreeMap::new(),
            loading: BTreeMap::new(),
        }
    }

    /// A checksum; `None` if its block of the table is to be read.
    pub(crate) fn get(&self, index: u64) -> Option<u32> {
        match self.places[index as usize / PER_BLOCK] {
            0 => self.changed.get(&index).copied(),
            place => {
                let block = &self.cached[place as usize - 1];
                block.is_recent.set(true);
                Some(block.checksums[index as usize % PER_BLOCK])
            }
        }
    }

    pub(crate) fn set(&mut self, index: u64, crc32c: u32) {
        if self.get(index) == Some(crc32c) {
            return;
        }
        self.changed.insert(index, crc32c);
        if let Some(place) = self.places[index as usize / PER_BLOCK].checked_sub(1) {
            self.cached[place as usize].checksums[index as usize % PER_BLOCK] = crc32c;
        }
    }

    /// Whether so many changes are kept that a checkpoint is due.
    pub(crate) fn has_many_changes(&self) -> bool {
        self.changed.len() > CHANGES_MIN.max(CHANGES_PER_BLOCK * self.cached_max)
    }

    /// Cached blocks.
    pub(crate) fn cached(&self) -> usize {
        self.cached.len()
    }

    /// Begins to read a block of the table; whether it is neither cached nor being read.
    pub(crate) fn begin_load(&mut self, block: u32) -> bool {
        if self.places[block as usize] > 0 || self.loading.contains_key(&block) {
            return false;
        }
        self.loading.insert(block, Vec::new());
        true
    }

    /// Ends a read that failed.
    pub(crate) fn cancel_load(&mut self, block: u32) {
        self.loading.remove(&block);
    }

    /// Ends a read: the block is cached.
    pub(crate) fn finish_load(&mut self, block: u32, bytes: &[u8; BLOCK_BYTES]) {
        let finished = self.loading.remove(&block).unwrap_or_default();
        self.cache(block, bytes, finished);
    }

    /// Caches a block of the table that was read while no checkpoint was finished.
    pub(crate) fn cache_stored(&mut self, block: u32, bytes: &[u8; BLOCK_BYTES]) {
        self.cache(block, bytes, Vec::new());
    }

    fn cache(&mut self, block: u32, bytes: &[u8; BLOCK_BYTES], finished: Vec<(u64, u32)>) {
        if self.places[block as usize] > 0 {
            return;
        }
        let place = self.place_for(block);
        let range = range_of(block);
        let changes = self.in_checkpoint.range(range.clone()).chain(self.changed.range(range));
        let changes = finished.into_iter().chain(changes.map(|(index, crc32c)| (*index, *crc32c)));
        let checksums = &mut self.cached[place].checksums;
        for (to, from) in checksums.iter_mut().zip(bytes.as_chunks().0) {
            *to = u32::from_le_bytes(*from);
        }
        for (index, crc32c) in changes {
            checksums[index as usize % PER_BLOCK] = crc32c;
        }
    }

    /// A place for a block: a new one, or that of a block which was not used for a while.
    fn place_for(&mut self, block: u32) -> usize {
        let place = if self.cached.len() < self.cached_max {
            let checksums = Box::new([0; PER_BLOCK]);
            self.cached.push(CachedBlock { index: block, is_recent: Cell::new(true), checksums });
            self.cached.len() - 1
        } else {
            // A round at most: it clears every mark.
            while self.cached[self.hand].is_recent.replace(false) {
                self.hand = (self.hand + 1) % self.cached.len();
            }
            let place = self.hand;
            self.hand = (place + 1) % self.cached.len();
            let evicted = std::mem::replace(&mut self.cached[place].index, block);
            self.places[evicted as usize] = 0;
            self.cached[place].is_recent.set(true);
            place
        };
        self.places[block as usize] = place as u32 + 1;
        place
    }

    /// Begins a checkpoint of the changes; returns the blocks of the table that it writes, in their order.
    pub(crate) fn begin_checkpoint(&mut self) -> Vec<u32> {
        self.in_checkpoint = std::mem::take(&mut self.changed);
        let mut blocks: Vec<u32> =
            self.in_checkpoint.keys().map(|index| (index / PER_BLOCK as u64) as u32).collect();
        blocks.dedup();
        blocks
    }

    /// What the checkpoint in progress writes to a block of the table; `None` if that is not cached, and `stored`, the block
    /// as it is on the device, is needed. It is cached then.
    ///
    /// It may have later changes as well, as REDO would make them.
    pub(crate) fn checkpoint_bytes(
        &mut self,
        block: u32,
        stored: Option<&[u8; BLOCK_BYTES]>,
    ) -> Option<Box<[u8; BLOCK_BYTES]>> {
        if let Some(stored) = stored {
            self.cache_stored(block, stored);
        }
        let cached = &self.cached[self.places[block as usize].checked_sub(1)? as usize];
        let mut bytes = Box::new([0; BLOCK_BYTES]);
        for (to, from) in bytes.as_chunks_mut().0.iter_mut().zip(cached.checksums.iter()) {
            *to = from.to_le_bytes();
        }
        Some(bytes)
    }

    /// The device has what the checkpoint wrote.
    pub(crate) fn finish_checkpoint(&mut self) {
        for (index, crc32c) in std::mem::take(&mut self.in_checkpoint) {
            // The read may have been first.
            if let Some(finished) = self.loading.get_mut(&((index / PER_BLOCK as u64) as u32)) {
                finished.push((index, crc32c));
            }
        }
    }

    /// The device may have some of what the checkpoint wrote.
    pub(crate) fn abort_checkpoint(&mut self) {
        for (index, crc32c) in std::mem::take(&mut self.in_checkpoint) {
            self.changed.entry(index).or_insert(crc32c);
        }
    }
}

/// The checksums of a block of the table.
fn range_of(block: u32) -> Range<u64> {
    let first = u64::from(block) * PER_BLOCK as u64;
    first..first + PER_BLOCK as u64
}

#[cfg(test)]
mod tests;
