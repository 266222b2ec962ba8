//! Which blocks of an object are written, now and after operations that are in the log.

use wire_store::{BlockBitmap, EntryHeader, INLINE_BYTES_MAX, OnodeContent, Operation};

/// The written blocks of an object that exists. Those of one with inline data are its first block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrittenBlocks {
    blocks: BlockBitmap,
    is_inline: bool,
}

impl WrittenBlocks {
    /// Those of an onode.
    pub fn of(content: &OnodeContent) -> WrittenBlocks {
        match content {
            OnodeContent::Inline(data) => {
                WrittenBlocks { blocks: BlockBitmap::of(0..usize::from(!data.is_empty())), is_inline: true }
            }
            OnodeContent::Mapped(map) => WrittenBlocks { blocks: map.written_blocks(), is_inline: false },
        }
    }

    /// The blocks.
    pub fn blocks(&self) -> &BlockBitmap {
        &self.blocks
    }

    /// Those of an object after an operation; `None` if there is no object.
    pub fn after(before: Option<WrittenBlocks>, entry: &EntryHeader) -> Option<WrittenBlocks> {
        let end = entry.offset.saturating_add(entry.length);
        let new = WrittenBlocks { blocks: BlockBitmap::default(), is_inline: true };
        match entry.operation {
            Operation::Write => {
                let WrittenBlocks { blocks, is_inline } = before.unwrap_or(new);
                let is_inline = is_inline && end as usize <= INLINE_BYTES_MAX;
                Some(WrittenBlocks { blocks: blocks.or(&BlockBitmap::touched(entry.offset, end)), is_inline })
            }
            Operation::WriteZeroes => before.map(|before| match before.is_inline {
                // They are zeroes that are written.
                true => before,
                false => {
                    let blocks = before.blocks.without(&BlockBitmap::covered(entry.offset, end));
                    WrittenBlocks { blocks, ..before }
                }
            }),
            Operation::Preallocate => Some(WrittenBlocks { is_inline: false, ..before.unwrap_or(new) }),
            Operation::Remove => None,
        }
    }
}
