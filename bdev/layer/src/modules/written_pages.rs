//! Which pages of a memory device were written, so that it knows its data and holes.

use std::sync::atomic::{AtomicU64, Ordering};

use block_io::Op;
use os::barrier;

const PAGE_BYTES: u64 = 4096;
const PAGES_PER_WORD: u64 = u64::BITS as u64;

/// A bit a page, set by the first write of the page and cleared when all of it is zeroed.
///
/// A write stores its data and then [marks](Self::mark) the page; a zeroing [clears](Self::clear) the marks first. Of a
/// write and a zeroing that overlap, either the write's data is zeroed, or the page is marked: with
/// [`barrier`], a write of a page that is marked already costs one load.
pub(super) struct WrittenPages {
    words: Box<[AtomicU64]>,
}

impl WrittenPages {
    /// Of a device of `bytes`, none of it written.
    pub(super) fn new(bytes: u64) -> WrittenPages {
        let words = bytes.div_ceil(PAGE_BYTES * PAGES_PER_WORD);
        WrittenPages { words: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Marks the pages of a range whose data is stored.
    #[inline]
    pub(super) fn mark(&self, offset: u64, bytes: u64) {
        barrier::light();
        let end = (offset + bytes).div_ceil(PAGE_BYTES);
        self.for_each_word(offset / PAGE_BYTES, end, |word, mask| {
            if word.load(Ordering::Relaxed) & mask != mask {
                word.fetch_or(mask, Ordering::Release);
            }
        });
    }

    /// Clears the pages that are wholly in a range, before the range is zeroed.
    pub(super) fn clear(&self, offset: u64, bytes: u64) {
        // Without the barrier pages stay marked, which is allowed.
        if !barrier::is_supported() {
            return;
        }
        let (first, end) = (offset.div_ceil(PAGE_BYTES), (offset + bytes) / PAGE_BYTES);
        let mut cleared = false;
        self.for_each_word(first, end, |word, mask| {
            cleared |=
                word.load(Ordering::Relaxed) & mask != 0 && word.fetch_and(!mask, Ordering::AcqRel) != 0;
        });
        if cleared {
            barrier::heavy();
        }
    }

    /// Calls `visit` with each word of pages `first..end` and the bits of these pages in it.
    #[inline]
    fn for_each_word(&self, first: u64, end: u64, mut visit: impl FnMut(&AtomicU64, u64)) {
        let mut page = first;
        while page < end {
            let count = (PAGES_PER_WORD - page % PAGES_PER_WORD).min(end - page);
            let mask = (u64::MAX >> (PAGES_PER_WORD - count)) << (page % PAGES_PER_WORD);
            visit(&self.words[(page / PAGES_PER_WORD) as usize], mask);
            page += count;
        }
    }

    /// The first block with a written page (`op` [`Op::SeekData`]) or without one ([`Op::SeekHole`]) in a range.
    pub(super) fn find(&self, op: Op, lba: u64, blocks: u32, block_size: u32) -> Option<u64> {
        let (end, block_size) = (lba + u64::from(blocks), u64::from(block_size));
        let end_page = (end * block_size).div_ceil(PAGE_BYTES);
        let mut block = lba;
        while block < end {
            let page = block * block_size / PAGE_BYTES;
            if op == Op::SeekData {
                let page = self.first_page(page, end_page, true)?;
                return Some(block.max(page * PAGE_BYTES / block_size));
            }
            // A block may begin in a written page, or end in one.
            let hole = self.first_page(page, end_page, false)?;
            block = block.max((hole * PAGE_BYTES).div_ceil(block_size));
            let block_end_page = ((block + 1) * block_size).div_ceil(PAGE_BYTES);
            match self.first_page(block * block_size / PAGE_BYTES, block_end_page, true) {
                None if block < end => return Some(block),
                None => return None,
                Some(written) => block = (block + 1).max(written * PAGE_BYTES / block_size),
            }
        }
        None
    }

    /// The first page in `first..end` that is written, or is not.
    fn first_page(&self, first: u64, end: u64, written: bool) -> Option<u64> {
        let mut page = first;
        while page < end {
            let word = self.words.get((page / PAGES_PER_WORD) as usize)?.load(Ordering::Acquire);
            let wanted = (if written { word } else { !word }) >> (page % PAGES_PER_WORD);
            if wanted != 0 {
                let found = page + u64::from(wanted.trailing_zeros());
                return (found < end).then_some(found);
            }
            page = (page / PAGES_PER_WORD + 1) * PAGES_PER_WORD;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The oracle: block by block, page by page.
    fn find_slowly(written: &[bool], op: Op, lba: u64, blocks: u32, block_size: u32) -> Option<u64> {
        (lba..lba + u64::from(blocks)).find(|block| {
            let (start, end) = (block * u64::from(block_size), (block + 1) * u64::from(block_size));
            let pages = start / PAGE_BYTES..end.div_ceil(PAGE_BYTES);
            pages.into_iter().any(|page| written[page as usize]) == (op == Op::SeekData)
        })
    }

    proptest! {
        #[test]
        fn data_and_holes_are_those_of_an_oracle(
            steps in prop::collection::vec((any::<bool>(), 0u64..200 * 4096, 1u64..70 * 4096), 0..8),
            block_size in prop::sample::select(vec![512u32, 520, 4096, 4160, 16384]),
            from in 0u64..100,
            blocks in 1u32..1000,
        ) {
            let bytes = 200 * PAGE_BYTES;
            let pages = WrittenPages::new(bytes);
            let mut oracle = [false; 200];
            for (is_write, offset, length) in steps {
                let length = length.min(bytes - offset);
                let end = offset + length;
                if is_write {
                    pages.mark(offset, length);
                    (offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES)).for_each(|page| oracle[page as usize] = true);
                } else if barrier::is_supported() {
                    pages.clear(offset, length);
                    (offset.div_ceil(PAGE_BYTES)..end / PAGE_BYTES).for_each(|page| oracle[page as usize] = false);
                }
            }
            let total = bytes / u64::from(block_size);
            let lba = from.min(total - 1);
            let blocks = blocks.min((total - lba) as u32);
            for op in [Op::SeekData, Op::SeekHole] {
                let expected = find_slowly(&oracle, op, lba, blocks, block_size);
                prop_assert_eq!(pages.find(op, lba, blocks, block_size), expected, "{:?}", op);
            }
        }
    }
}
