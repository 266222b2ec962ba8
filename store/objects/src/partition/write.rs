//! Plans of writes and of writes of zeroes.

use std::ops::Range;

use wire_store::{
    BLOCK_BYTES, BLOCKS_PER_EXTENT, EntryHeader, INLINE_BYTES_MAX, ObjectBlockMap, ObjectId, OnodeContent,
};

use super::Partition;
use crate::{BlockBase, ObjectsError, PieceSource, WritePiece};

/// The part of an operation's range in one block of the object.
struct BlockRange {
    block: usize,
    skip: u32,
    length: u32,
    /// Offset of the part in the operation's range.
    from: u32,
}

impl BlockRange {
    fn is_whole(&self) -> bool {
        self.length as usize == BLOCK_BYTES
    }
}

fn block_ranges(offset: u32, end: u32) -> impl Iterator<Item = BlockRange> {
    let mut at = offset;
    std::iter::from_fn(move || {
        let skip = at % BLOCK_BYTES as u32;
        let length = (BLOCK_BYTES as u32 - skip).min(end - at);
        let range = BlockRange { block: at as usize / BLOCK_BYTES, skip, length, from: at - offset };
        at += length;
        (length > 0).then_some(range)
    })
}

impl Partition {
    /// Writes `data`, or zeroes if there is none, to an object that exists if there is none.
    pub(super) fn write(
        &mut self,
        entry: &EntryHeader,
        end: u32,
        data: Option<&[u8]>,
        pieces: &mut Vec<WritePiece>,
    ) -> Result<(), ObjectsError> {
        let id = entry.object;
        let (offset, inline) = (
            entry.offset as usize,
            match self.onode(id).map(|onode| &onode.content) {
                Some(OnodeContent::Inline(inline)) => Some(inline.clone()),
                Some(OnodeContent::Mapped(_)) => None,
                None => Some(Vec::new()),
            },
        );
        let Some(mut inline) = inline else {
            return self.write_blocks(entry, end, data.is_some(), pieces);
        };
        if data.is_none() {
            let zeroed = offset.min(inline.len())..(end as usize).min(inline.len());
            inline[zeroed].fill(0);
        } else if end as usize <= INLINE_BYTES_MAX {
            inline.resize(inline.len().max(end as usize), 0);
            inline[offset..end as usize].copy_from_slice(&data.unwrap_or_default()[..end as usize - offset]);
        } else {
            return self.write_out_of_line(entry, end, inline, pieces);
        }
        self.check_space(id, 0..0, false)?;
        let place = self.ensure_onode(id);
        let onode = self.onodes[place as usize].as_mut().expect("it was ensured");
        onode.content = OnodeContent::Inline(inline);
        Ok(())
    }

    /// Writes to an object that has inline data, which moves to its first block.
    fn write_out_of_line(
        &mut self,
        entry: &EntryHeader,
        end: u32,
        inline: Vec<u8>,
        pieces: &mut Vec<WritePiece>,
    ) -> Result<(), ObjectsError> {
        self.check_space(entry.object, extent_indices(entry.offset, end), !inline.is_empty())?;
        let place = self.ensure_onode(entry.object);
        self.move_out_of_line(place, inline, pieces);
        self.write_blocks(entry, end, true, pieces)
    }

    /// Gives an object with inline data a block map, and plans to move the data to its first block. Space was checked.
    pub(super) fn move_out_of_line(&mut self, place: u32, inline: Vec<u8>, pieces: &mut Vec<WritePiece>) {
        let onode = self.onodes[place as usize].as_mut().expect("the place is in use");
        onode.content = OnodeContent::Mapped(Box::default());
        if !inline.is_empty() {
            let block = self.claim_block(place, 0).0;
            let (source, base) = (PieceSource::Zeroes, BlockBase::Inline(inline));
            pieces.push(WritePiece { block, blocks: 1, skip: 0, length: 0, source, base });
        }
    }

    fn write_blocks(
        &mut self,
        entry: &EntryHeader,
        end: u32,
        has_data: bool,
        pieces: &mut Vec<WritePiece>,
    ) -> Result<(), ObjectsError> {
        let place = self.index[&entry.object];
        if has_data {
            self.check_space(entry.object, extent_indices(entry.offset, end), false)?;
        }
        let first = pieces.len();
        for range in block_ranges(entry.offset, end) {
            let source = if has_data { PieceSource::Data(range.from) } else { PieceSource::Zeroes };
            if has_data || (!range.is_whole() && self.map_at(place).is_written(range.block)) {
                let (block, was_written) = self.claim_block(place, range.block);
                let base = match (range.is_whole(), was_written) {
                    (true, _) => BlockBase::Whole,
                    (false, true) => BlockBase::Stored,
                    (false, false) => BlockBase::Zeroes,
                };
                let (skip, length) = (range.skip, range.length);
                push_write(pieces, first, WritePiece { block, blocks: 1, skip, length, source, base });
            } else if range.is_whole() {
                self.map_at_mut(place).set_written(range.block, false);
            }
        }
        if !has_data {
            self.release_extents(entry.object, place, entry.offset, end);
        }
        Ok(())
    }

    pub(super) fn map_at(&self, place: u32) -> &ObjectBlockMap {
        match self.onodes[place as usize].as_ref().map(|onode| &onode.content) {
            Some(OnodeContent::Mapped(map)) => map,
            _ => unreachable!("the object at {place} has blocks"),
        }
    }

    pub(super) fn map_at_mut(&mut self, place: u32) -> &mut ObjectBlockMap {
        match self.onodes[place as usize].as_mut().map(|onode| &mut onode.content) {
            Some(OnodeContent::Mapped(map)) => map,
            _ => unreachable!("the object at {place} has blocks"),
        }
    }

    /// Allocates a block of an object that is about to be written; returns where it is, and whether it was written
    /// before. Space was checked.
    fn claim_block(&mut self, place: u32, block: usize) -> (u64, bool) {
        let extent = self.claim_extent(place, block / BLOCKS_PER_EXTENT);
        let was_written = self.map_at_mut(place).set_written(block, true);
        if !was_written {
            self.changed.first_write = true;
            let onode = self.onodes[place as usize].as_ref().expect("the place is in use");
            self.changed.remapped.insert(onode.id);
        }
        (self.place_of(extent, block), was_written)
    }

    /// Gives up the extents that are in the range and have no written block.
    fn release_extents(&mut self, id: ObjectId, place: u32, offset: u32, end: u32) {
        let extent_bytes = BLOCKS_PER_EXTENT * BLOCK_BYTES;
        for index in (offset as usize).div_ceil(extent_bytes)..end as usize / extent_bytes {
            let extent = std::mem::take(&mut self.map_at_mut(place).extents[index]);
            if extent != 0 {
                self.changed.released_extents.insert((id, index), extent);
            }
        }
    }
}

/// The extents of an object that a range touches.
pub(super) fn extent_indices(offset: u32, end: u32) -> Range<usize> {
    let extent_bytes = BLOCKS_PER_EXTENT * BLOCK_BYTES;
    offset as usize / extent_bytes..(end as usize).div_ceil(extent_bytes)
}

/// Appends a piece, or extends the last one of this operation if both are whole and adjacent.
fn push_write(pieces: &mut Vec<WritePiece>, first: usize, piece: WritePiece) {
    if let Some(last) = pieces[first..].last_mut()
        && (&last.base, &piece.base) == (&BlockBase::Whole, &BlockBase::Whole)
        && last.block + u64::from(last.blocks) == piece.block
    {
        last.blocks += 1;
        last.length += piece.length;
        return;
    }
    pieces.push(piece);
}
