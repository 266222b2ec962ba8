//! Which blocks of an object have something.

use std::ops::Range;

use crate::{BLOCK_BYTES, BLOCKS_PER_OBJECT};

const WORDS: usize = BLOCKS_PER_OBJECT / 64;

/// A bit for each block of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockBitmap([u64; WORDS]);

impl BlockBitmap {
    /// Size of the encoding: a bit for each block, the lowest of the first byte for the first.
    pub const SIZE: usize = BLOCKS_PER_OBJECT / 8;
    /// Words of 64 blocks.
    pub const WORDS: usize = WORDS;

    /// All blocks of a range, counted in blocks.
    pub fn of(blocks: Range<usize>) -> BlockBitmap {
        let mut bitmap = BlockBitmap::default();
        blocks.for_each(|block| bitmap.set(block, true));
        bitmap
    }

    /// The blocks that a range of bytes touches.
    pub fn touched(offset: u32, end: u32) -> BlockBitmap {
        BlockBitmap::of(offset as usize / BLOCK_BYTES..(end as usize).div_ceil(BLOCK_BYTES))
    }

    /// The blocks that a range of bytes covers as a whole.
    pub fn covered(offset: u32, end: u32) -> BlockBitmap {
        BlockBitmap::of((offset as usize).div_ceil(BLOCK_BYTES)..end as usize / BLOCK_BYTES)
    }

    /// Whether it has a block.
    pub fn has(&self, block: usize) -> bool {
        self.0[block / 64] >> (block % 64) & 1 != 0
    }

    /// Adds a block, or takes it out.
    pub fn set(&mut self, block: usize, has: bool) {
        self.0[block / 64] &= !(1 << (block % 64));
        self.0[block / 64] |= u64::from(has) << (block % 64);
    }

    /// Whether it has no block.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }

    /// The blocks of either.
    #[must_use]
    pub fn or(&self, other: &BlockBitmap) -> BlockBitmap {
        BlockBitmap(std::array::from_fn(|word| self.0[word] | other.0[word]))
    }

    /// The blocks of both.
    #[must_use]
    pub fn and(&self, other: &BlockBitmap) -> BlockBitmap {
        BlockBitmap(std::array::from_fn(|word| self.0[word] & other.0[word]))
    }

    /// The blocks that another one does not have.
    #[must_use]
    pub fn without(&self, other: &BlockBitmap) -> BlockBitmap {
        BlockBitmap(std::array::from_fn(|word| self.0[word] & !other.0[word]))
    }

    /// Its words, of 64 blocks each.
    pub fn words(&self) -> &[u64; WORDS] {
        &self.0
    }

    /// The bitmap with these words.
    pub fn from_words(words: [u64; WORDS]) -> BlockBitmap {
        BlockBitmap(words)
    }

    /// The encoding.
    pub fn to_bytes(&self) -> [u8; BlockBitmap::SIZE] {
        std::array::from_fn(|byte| (self.0[byte / 8] >> (byte % 8 * 8)) as u8)
    }

    /// Decodes a bitmap: any bytes are one.
    pub fn from_bytes(bytes: &[u8; BlockBitmap::SIZE]) -> BlockBitmap {
        let mut words = [0; WORDS];
        bytes.iter().enumerate().for_each(|(at, byte)| words[at / 8] |= u64::from(*byte) << (at % 8 * 8));
        BlockBitmap(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_encoding_is_that_of_an_onode() {
        let bitmap = BlockBitmap::of(3..12);
        let bytes = bitmap.to_bytes();
        assert_eq!(bytes[..3], [0b1111_1000, 0b1111, 0]);
        assert_eq!(BlockBitmap::from_bytes(&bytes), bitmap);
        let mut last = BlockBitmap::default();
        last.set(BLOCKS_PER_OBJECT - 1, true);
        assert_eq!((last.to_bytes()[127], last.has(1023), last.has(1022)), (0x80, true, false));
        last.set(1023, false);
        assert!(last.is_empty());
    }

    #[test]
    fn a_range_touches_blocks_that_it_does_not_cover() {
        let block = BLOCK_BYTES as u32;
        assert_eq!(BlockBitmap::touched(1, block + 1), BlockBitmap::of(0..2));
        assert!(BlockBitmap::covered(1, block + 1).is_empty());
        assert_eq!(BlockBitmap::covered(1, 3 * block), BlockBitmap::of(1..3));
        assert_eq!(BlockBitmap::touched(block, 2 * block), BlockBitmap::covered(block, 2 * block));
        // Of a part of one block there is no whole one.
        assert!(BlockBitmap::covered(block + 1, block + 7).is_empty());
        let [some, more] = [BlockBitmap::of(0..4), BlockBitmap::of(2..6)];
        assert_eq!(some.or(&more), BlockBitmap::of(0..6));
        assert_eq!((some.and(&more), some.without(&more)), (BlockBitmap::of(2..4), BlockBitmap::of(0..2)));
    }
}
