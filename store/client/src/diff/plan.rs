//! Which blocks may differ between two chains of volumes, and where they are read: pure decisions.
//!
//! A volume with children never changes, so that a block which both chains have from the same volume is the
//! same. Those that any of the other volumes has may differ, whatever is in them.

use std::ops::Range;

use cluster_map::ParentVolume;
use codec::Crc64;
use store_image::TRANSFER_BYTES_MAX;
use wire_store::{BLOCK_BYTES, BlockBitmap, OBJECT_BYTES};

use crate::layers::limit_in;

/// The volumes of a snapshot, its own first, each with the byte from which on it is not seen.
pub(super) type SnapshotChain = Vec<ParentVolume>;

/// A volume that two chains do not have in common, in a range of bytes of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChangedVolume {
    pub(super) volume: u64,
    first: u64,
    end: u64,
}

impl ChangedVolume {
    /// The index of the first object that it may have changed, and that behind the last one.
    pub(super) fn objects(&self) -> Range<u64> {
        self.first / OBJECT_BYTES as u64..self.end.div_ceil(OBJECT_BYTES as u64)
    }

    /// The blocks of an object that it may have changed.
    pub(super) fn blocks(&self, index: u32) -> BlockBitmap {
        let start = u64::from(index) * OBJECT_BYTES as u64;
        let offset = |bytes: u64| bytes.saturating_sub(start).min(OBJECT_BYTES as u64) as u32;
        match offset(self.first)..offset(self.end) {
            range if range.is_empty() => BlockBitmap::default(),
            range => BlockBitmap::touched(range.start, range.end),
        }
    }
}

/// What two chains do not have in common.
pub(super) fn changed_volumes(to: &SnapshotChain, from: &SnapshotChain) -> Vec<ChangedVolume> {
    let limit =
        |chain: &SnapshotChain, volume| chain.iter().find(|it| it.volume == volume).map(|it| it.bytes);
    let mut changed = Vec::new();
    for it in to {
        let (first, end) = match limit(from, it.volume) {
            Some(other) => (other.min(it.bytes), other.max(it.bytes)),
            None => (0, it.bytes),
        };
        changed.push(ChangedVolume { volume: it.volume, first, end });
    }
    let only_from = from.iter().filter(|it| limit(to, it.volume).is_none());
    changed.extend(only_from.map(|it| ChangedVolume { volume: it.volume, first: 0, end: it.bytes }));
    changed.retain(|it| it.first < it.end);
    changed
}

/// A checksum of two chains.
pub(super) fn checksum_of(to: &SnapshotChain, from: &SnapshotChain) -> u64 {
    let mut checksum = Crc64::new();
    for chain in [to, from] {
        checksum.update(&(chain.len() as u64).to_le_bytes());
        for ParentVolume { volume, bytes } in chain {
            checksum.update(&volume.to_le_bytes());
            checksum.update(&bytes.to_le_bytes());
        }
    }
    checksum.value()
}

/// The volume from which blocks of an object are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DiffSource {
    pub(super) volume: u64,
    /// What it has from this offset of the object on is not seen.
    pub(super) limit: u32,
    pub(super) blocks: BlockBitmap,
}

/// A part of an object that may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DiffPart {
    /// Offset in the object, in bytes.
    pub(super) offset: u32,
    /// Bytes; of data at most [`TRANSFER_BYTES_MAX`].
    pub(super) length: u32,
    /// The volume with the data, and its limit; `None` if it is zero.
    pub(super) source: Option<(u64, u32)>,
}

/// Blocks of an object that are looked for from volume to volume, the nearest first.
pub(super) struct BlockSearch {
    index: u32,
    missing: BlockBitmap,
    blocks: BlockBitmap,
    sources: Vec<DiffSource>,
}

impl BlockSearch {
    pub(super) fn new(index: u32, blocks: BlockBitmap) -> BlockSearch {
        BlockSearch { index, missing: blocks, blocks, sources: Vec::new() }
    }

    /// Whether a volume is to be asked for blocks.
    pub(super) fn needs(&self, volume: &ParentVolume) -> bool {
        !self.missing.is_empty() && limit_in(volume, self.index) > 0
    }

    /// A volume has these blocks.
    pub(super) fn found(&mut self, volume: &ParentVolume, written: &BlockBitmap) {
        let limit = limit_in(volume, self.index);
        let blocks = self.missing.and(written).and(&BlockBitmap::touched(0, limit));
        if !blocks.is_empty() {
            self.sources.push(DiffSource { volume: volume.volume, limit, blocks });
            self.missing = self.missing.without(&blocks);
        }
    }

    /// The parts in their order, none behind an offset of the object.
    pub(super) fn parts(&self, end: u32) -> Vec<DiffPart> {
        let mut parts: Vec<DiffPart> = Vec::new();
        let blocks = (0..end.div_ceil(BLOCK_BYTES as u32)).filter(|block| self.blocks.has(*block as usize));
        for block in blocks {
            let source = self.sources.iter().find(|it| it.blocks.has(block as usize));
            let source = source.map(|it| (it.volume, it.limit));
            let offset = block * BLOCK_BYTES as u32;
            let length = (BLOCK_BYTES as u32).min(end - offset);
            let length_max = if source.is_some() { TRANSFER_BYTES_MAX } else { OBJECT_BYTES as u32 };
            let joins = |last: &&mut DiffPart| {
                let is_next = last.offset + last.length == offset && last.source == source;
                is_next && last.length + length <= length_max
            };
            match parts.last_mut().filter(joins) {
                Some(last) => last.length += length,
                None => parts.push(DiffPart { offset, length, source }),
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u32 = BLOCK_BYTES as u32;

    fn chain(volumes: &[(u64, u64)]) -> SnapshotChain {
        volumes.iter().map(|(volume, bytes)| ParentVolume { volume: *volume, bytes: *bytes }).collect()
    }

    fn changed(to: &[(u64, u64)], from: &[(u64, u64)]) -> Vec<(u64, u64, u64)> {
        let changed = changed_volumes(&chain(to), &chain(from)).into_iter();
        changed.map(|it| (it.volume, it.first, it.end)).collect()
    }

    #[test]
    fn only_volumes_that_one_of_two_snapshots_has_are_read() {
        // The snapshots after each other.
        assert_eq!(changed(&[(3, 900), (2, 800), (1, 700)], &[(1, 700)]), [(3, 0, 900), (2, 0, 800)]);
        // Everything.
        assert_eq!(changed(&[(2, 800), (1, 700)], &[]), [(2, 0, 800), (1, 0, 700)]);
        // After a rollback: what the other one had is not there any more.
        assert_eq!(changed(&[(3, 9), (1, 9)], &[(2, 9), (1, 9)]), [(3, 0, 9), (2, 0, 9)]);
        // The end was cut off meanwhile: what was there is zero.
        assert_eq!(changed(&[(2, 900), (1, 500)], &[(1, 700)]), [(2, 0, 900), (1, 500, 700)]);
        assert_eq!(changed(&[(1, 9)], &[(1, 9)]), []);
    }

    #[test]
    fn the_checksum_is_of_all_that_a_chain_is() {
        let of = |to: &[(u64, u64)], from: &[(u64, u64)]| checksum_of(&chain(to), &chain(from));
        let all = [
            of(&[(1, 5), (2, 5)], &[]),
            of(&[(1, 5)], &[(2, 5)]),
            of(&[(2, 5), (1, 5)], &[]),
            of(&[(1, 5), (2, 6)], &[]),
            of(&[], &[(1, 5), (2, 5)]),
        ];
        let distinct: std::collections::BTreeSet<u64> = all.into_iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert_eq!(of(&[(1, 5)], &[]), of(&[(1, 5)], &[]));
    }

    #[test]
    fn a_range_of_the_image_is_one_of_blocks_of_its_objects() {
        let object = OBJECT_BYTES as u64;
        let changed = ChangedVolume { volume: 1, first: object + 5000, end: 2 * object + 1 };
        assert_eq!(changed.objects(), 1..3);
        assert!(changed.blocks(0).is_empty() && changed.blocks(3).is_empty());
        assert_eq!(changed.blocks(1), BlockBitmap::of(1..1024));
        assert_eq!(changed.blocks(2), BlockBitmap::of(0..1));
    }

    #[test]
    fn blocks_are_read_from_the_nearest_volume_that_has_them_and_zero_if_none_has() {
        let mut search = BlockSearch::new(0, BlockBitmap::of(1..80));
        let volumes = chain(&[(3, 1 << 30), (2, 5 * BLOCK_BYTES as u64 + 1), (1, 0)]);
        assert!(search.needs(&volumes[0]) && !search.needs(&volumes[2]));
        search.found(&volumes[0], &BlockBitmap::of(0..3).or(&BlockBitmap::of(40..1024)));
        search.found(&volumes[1], &BlockBitmap::of(2..20));
        let of = |part: DiffPart| (part.offset / BLOCK, part.length, part.source.map(|it| it.0));
        let parts: Vec<_> = search.parts(78 * BLOCK + 512).into_iter().map(of).collect();
        let expected = [
            (1, 2 * BLOCK, Some(3)),
            (3, 3 * BLOCK, Some(2)),
            (6, 34 * BLOCK, None),
            (40, 32 * BLOCK, Some(3)),
            (72, 6 * BLOCK + 512, Some(3)),
        ];
        assert_eq!(parts, expected);
        assert_eq!(search.parts(78 * BLOCK)[1].source, Some((2, 5 * BLOCK + 1)));
        // All are found: the volumes below are not asked.
        search.found(&volumes[0], &BlockBitmap::of(0..1024));
        assert!(!search.needs(&volumes[1]));
    }
}
