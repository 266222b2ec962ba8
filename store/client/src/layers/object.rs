//! What the channels of an image know of an object: which blocks its head has from parents.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use cluster_map::ParentVolume;
use wire_store::{BLOCK_BYTES, BlockBitmap, OBJECT_BYTES};

/// The blocks of an object that a parent has.
#[derive(Clone, Debug)]
pub(super) struct ParentBlocks {
    pub(super) volume: u64,
    pub(super) blocks: BlockBitmap,
    /// What it has from this offset of the object on is not seen.
    pub(super) limit: u32,
}

/// What parents have of an object.
#[derive(Debug, Default)]
pub(super) struct ParentData {
    /// The nearest first, those without blocks left out.
    parents: Vec<ParentBlocks>,
    /// The blocks that any of them has.
    pub(super) blocks: BlockBitmap,
}

impl ParentData {
    /// That of parents, in their order, with what they have.
    pub(super) fn new(index: u32, written: impl Iterator<Item = (ParentVolume, BlockBitmap)>) -> ParentData {
        let mut data = ParentData::default();
        for (parent, blocks) in written {
            let limit = limit_in(&parent, index);
            let blocks = blocks.and(&BlockBitmap::touched(0, limit));
            if !blocks.is_empty() {
                data.blocks = data.blocks.or(&blocks);
                data.parents.push(ParentBlocks { volume: parent.volume, blocks, limit });
            }
        }
        data
    }

    /// The nearest parent that has a block.
    pub(super) fn source(&self, block: usize) -> Option<&ParentBlocks> {
        self.parents.iter().find(|parent| parent.blocks.has(block))
    }
}

/// The offset in an object up to which a parent is seen.
pub(crate) fn limit_in(parent: &ParentVolume, index: u32) -> u32 {
    let start = u64::from(index) * OBJECT_BYTES as u64;
    parent.bytes.saturating_sub(start).min(OBJECT_BYTES as u64) as u32
}

const _: () = assert!(OBJECT_BYTES.is_multiple_of(BLOCK_BYTES));

/// An object of an image, shared by the channels of all cores.
///
/// `inherited` only shrinks: a parent never changes, and a block that the head has over one is never given
/// up. A channel reads the bitmaps ([`load`](Self::load)), then writes: it claims the inherited blocks of the
/// write, and these are inherited no more when the write is done ([`written`](Self::written)), before its
/// completion is reported.
#[derive(Debug)]
pub(super) struct ObjectLayers {
    /// Blocks that a parent has and the head lacks, as far as is known.
    inherited: [AtomicU64; BlockBitmap::WORDS],
    /// Inherited blocks that are being written.
    claimed: [AtomicU64; BlockBitmap::WORDS],
    is_loaded: AtomicBool,
    parents: OnceLock<Arc<ParentData>>,
}

impl Default for ObjectLayers {
    fn default() -> ObjectLayers {
        ObjectLayers {
            inherited: [const { AtomicU64::new(u64::MAX) }; BlockBitmap::WORDS],
            claimed: [const { AtomicU64::new(0) }; BlockBitmap::WORDS],
            is_loaded: AtomicBool::new(false),
            parents: OnceLock::new(),
        }
    }
}

impl ObjectLayers {
    /// One of which only the parents' data is known.
    pub(super) fn of_parents(parents: Option<Arc<ParentData>>) -> ObjectLayers {
        let object = ObjectLayers::default();
        if let Some(parents) = parents {
            let _ = object.parents.set(parents);
        }
        object
    }

    /// What parents have, if it is known.
    pub(super) fn parents(&self) -> Option<&Arc<ParentData>> {
        self.parents.get()
    }

    /// The same, of an object whose bitmaps were read.
    pub(super) fn known_parents(&self) -> &Arc<ParentData> {
        self.parents.get().expect("bitmaps were read")
    }

    /// Whether the bitmaps count.
    pub(super) fn is_loaded(&self) -> bool {
        self.is_loaded.load(Ordering::Acquire)
    }

    /// Takes the bitmaps that were read: what parents have, and what the head has.
    pub(super) fn load(&self, parents: Arc<ParentData>, head: &BlockBitmap) {
        let parents = self.parents.get_or_init(|| parents);
        // Blocks that were written since are not inherited already.
        let inherited = parents.blocks.without(head);
        for (word, bits) in self.inherited.iter().zip(inherited.words()) {
            word.fetch_and(*bits, Ordering::AcqRel);
        }
        self.is_loaded.store(true, Ordering::Release);
    }

    /// A write has failed, and may have happened: the bitmap of the head is to be read again.
    pub(super) fn forget(&self) {
        self.is_loaded.store(false, Ordering::Release);
    }

    /// The inherited ones of some blocks.
    pub(super) fn inherited(&self, of: &BlockBitmap) -> BlockBitmap {
        let words = std::array::from_fn(|word| self.inherited[word].load(Ordering::Acquire));
        of.and(&BlockBitmap::from_words(words))
    }

    /// Claims blocks; returns whether they were free.
    pub(super) fn claim(&self, blocks: &BlockBitmap) -> bool {
        let mut own = [0; BlockBitmap::WORDS];
        for (at, bits) in blocks.words().iter().enumerate().filter(|(_, bits)| **bits != 0) {
            let before = self.claimed[at].fetch_or(*bits, Ordering::AcqRel);
            own[at] = bits & !before;
            if before & bits != 0 {
                self.release(&BlockBitmap::from_words(own));
                return false;
            }
        }
        true
    }

    /// Ends the claim of blocks.
    pub(super) fn release(&self, blocks: &BlockBitmap) {
        for (word, bits) in self.claimed.iter().zip(blocks.words()) {
            if *bits != 0 {
                word.fetch_and(!bits, Ordering::AcqRel);
            }
        }
    }

    /// The head has blocks that were claimed.
    pub(super) fn written(&self, blocks: &BlockBitmap) {
        for (word, bits) in self.inherited.iter().zip(blocks.words()) {
            if *bits != 0 {
                word.fetch_and(!bits, Ordering::AcqRel);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parents(index: u32, all: &[(u64, u64, BlockBitmap)]) -> Arc<ParentData> {
        let written = all
            .iter()
            .map(|(volume, bytes, blocks)| (ParentVolume { volume: *volume, bytes: *bytes }, *blocks));
        Arc::new(ParentData::new(index, written))
    }

    #[test]
    fn a_block_comes_from_the_nearest_parent_that_has_it_within_its_limit() {
        let block = BLOCK_BYTES as u64;
        let all = [(7, 10 * block, BlockBitmap::of(2..4)), (8, 5 * block + 1, BlockBitmap::of(3..9))];
        let data = parents(0, &all);
        let source = |block| data.source(block).map(|parent| (parent.volume, parent.limit));
        assert_eq!(source(3), Some((7, 10 * BLOCK_BYTES as u32)));
        assert_eq!(source(5), Some((8, 5 * BLOCK_BYTES as u32 + 1)));
        assert_eq!((source(1), source(6)), (None, None));
        assert_eq!(data.blocks, BlockBitmap::of(2..6));
        // Nothing of the object is within the limits.
        assert!(parents(1, &all).blocks.is_empty());
    }

    #[test]
    fn what_was_written_meanwhile_is_not_inherited_again() {
        let object = ObjectLayers::default();
        let data = parents(0, &[(7, u64::MAX, BlockBitmap::of(0..8))]);
        assert!(!object.is_loaded());
        object.load(data.clone(), &BlockBitmap::of(0..2));
        let all = BlockBitmap::of(0..1024);
        assert_eq!((object.is_loaded(), object.inherited(&all)), (true, BlockBitmap::of(2..8)));
        object.written(&BlockBitmap::of(2..3));
        object.forget();
        // As it was read before that write was done.
        object.load(data, &BlockBitmap::of(4..5));
        assert_eq!(object.inherited(&all), BlockBitmap::of(3..4).or(&BlockBitmap::of(5..8)));
    }

    #[test]
    fn a_claim_is_of_all_blocks_or_of_none() {
        let object = ObjectLayers::default();
        assert!(object.claim(&BlockBitmap::of(60..70)));
        assert!(!object.claim(&BlockBitmap::of(0..61)));
        assert!(!object.claim(&BlockBitmap::of(69..200)));
        // What was refused has claimed nothing.
        assert!(object.claim(&BlockBitmap::of(0..60)) && object.claim(&BlockBitmap::of(70..200)));
        object.release(&BlockBitmap::of(60..70));
        assert!(object.claim(&BlockBitmap::of(61..69)));
    }
}
