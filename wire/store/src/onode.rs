//! Object identifiers and onodes.

use codec::DecodeError;

use crate::fields::{array, check_location, check_zero, open, put, seal, u32_at, u64_at};
use crate::{BLOCKS_PER_EXTENT, BLOCKS_PER_OBJECT, BlockBitmap, SECTOR_BYTES};

const ONODE_MAGIC: [u8; 4] = *b"RBON";
const CONTENT: usize = 128;
const BITMAP: usize = CONTENT + 4 * EXTENTS_PER_OBJECT;
const INLINE: u8 = 1;
const MAPPED: u8 = 2;

/// Extents of an object.
pub const EXTENTS_PER_OBJECT: usize = BLOCKS_PER_OBJECT / BLOCKS_PER_EXTENT;

/// Most bytes of an object that are in its onode.
pub const INLINE_BYTES_MAX: usize = SECTOR_BYTES - CONTENT;

/// The identifier of an object. Its order is that of its fields: the high bits are the logical group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId {
    /// The logical group.
    pub group: u32,
    /// The volume.
    pub volume: u64,
    /// Index of the object in the volume.
    pub index: u32,
    /// The version suffix: 0 is the current object, another number an older version of it.
    pub suffix: u64,
}

impl ObjectId {
    /// Size of the encoding.
    pub const SIZE: usize = 24;

    /// Encodes the identifier.
    pub fn to_bytes(&self) -> [u8; ObjectId::SIZE] {
        let mut out = [0; ObjectId::SIZE];
        self.put(&mut out, 0);
        out
    }

    /// Decodes an identifier: any bytes are one.
    pub fn from_bytes(bytes: &[u8; ObjectId::SIZE]) -> ObjectId {
        ObjectId::at(bytes, 0)
    }

    pub(crate) fn put(&self, out: &mut [u8], at: usize) {
        put(out, at, self.group.to_le_bytes());
        put(out, at + 4, self.index.to_le_bytes());
        put(out, at + 8, self.volume.to_le_bytes());
        put(out, at + 16, self.suffix.to_le_bytes());
    }

    pub(crate) fn at(from: &[u8], at: usize) -> ObjectId {
        ObjectId {
            group: u32_at(from, at),
            index: u32_at(from, at + 4),
            volume: u64_at(from, at + 8),
            suffix: u64_at(from, at + 16),
        }
    }
}

/// Metadata and block map of an object, or the object itself if it is small: one sector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Onode {
    /// The object.
    pub id: ObjectId,
    /// Version of the object: that of the last operation applied.
    pub version: u64,
    /// Sequence of the last operation applied, in its logical group.
    pub sequence: u64,
    /// Epoch of the logical group at that operation.
    pub epoch: u32,
    /// Time of the last change, in nanoseconds since 1970.
    pub mtime_ns: u64,
    /// The data, or where it is.
    pub content: OnodeContent,
}

/// The data of an object, or where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OnodeContent {
    /// The data, at most [`INLINE_BYTES_MAX`] bytes; the rest of the object is zero.
    Inline(Vec<u8>),
    /// Where the blocks are.
    Mapped(Box<ObjectBlockMap>),
}

/// The extents of an object, and which of their blocks were written. Other blocks read as zeroes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectBlockMap {
    /// For each 64 KiB of the object its extent, counted from 1; 0 is none.
    pub extents: [u32; EXTENTS_PER_OBJECT],
    written: [u8; BLOCKS_PER_OBJECT / 8],
}

/// A free onode.
const FREE: [u8; SECTOR_BYTES] = [0; SECTOR_BYTES];
/// The bits of an extent of which no block is written.
const NO_BLOCKS: [u8; BLOCKS_PER_EXTENT / 8] = [0; BLOCKS_PER_EXTENT / 8];

impl Default for ObjectBlockMap {
    fn default() -> Self {
        ObjectBlockMap { extents: [0; EXTENTS_PER_OBJECT], written: [0; BLOCKS_PER_OBJECT / 8] }
    }
}

impl ObjectBlockMap {
    /// Whether a block of the object was written.
    pub fn is_written(&self, block: usize) -> bool {
        self.written[block / 8] & (1 << (block % 8)) != 0
    }

    /// Marks a block of the object as written or as zero; returns what it was.
    pub fn set_written(&mut self, block: usize, written: bool) -> bool {
        let before = self.is_written(block);
        self.written[block / 8] &= !(1 << (block % 8));
        self.written[block / 8] |= u8::from(written) << (block % 8);
        before
    }

    /// All blocks that were written.
    pub fn written_blocks(&self) -> BlockBitmap {
        BlockBitmap::from_bytes(&self.written)
    }

    /// Whether a block is written that has no extent.
    fn has_stray_block(&self) -> bool {
        let written = self.written.chunks_exact(BLOCKS_PER_EXTENT / 8);
        self.extents.iter().zip(written).any(|(extent, written)| *extent == 0 && written != NO_BLOCKS)
    }
}

impl Onode {
    /// An onode of version 0.
    pub fn new(id: ObjectId, content: OnodeContent) -> Onode {
        Onode { id, version: 0, sequence: 0, epoch: 0, mtime_ns: 0, content }
    }

    /// Encodes the onode for its place, counted from 0 in the partition.
    ///
    /// # Panics
    /// If inline data is longer than [`INLINE_BYTES_MAX`].
    pub fn encode(&self, place: u32) -> [u8; SECTOR_BYTES] {
        let mut out = [0; SECTOR_BYTES];
        put(&mut out, 12, place.to_le_bytes());
        self.id.put(&mut out, 16);
        put(&mut out, 40, self.version.to_le_bytes());
        put(&mut out, 48, self.sequence.to_le_bytes());
        put(&mut out, 56, self.epoch.to_le_bytes());
        put(&mut out, 64, self.mtime_ns.to_le_bytes());
        match &self.content {
            OnodeContent::Inline(data) => {
                assert!(data.len() <= INLINE_BYTES_MAX, "inline data of {} bytes", data.len());
                out[6] = INLINE;
                put(&mut out, 60, (data.len() as u32).to_le_bytes());
                out[CONTENT..CONTENT + data.len()].copy_from_slice(data);
            }
            OnodeContent::Mapped(map) => {
                out[6] = MAPPED;
                for (index, extent) in map.extents.iter().enumerate() {
                    put(&mut out, CONTENT + 4 * index, extent.to_le_bytes());
                }
                put(&mut out, BITMAP, map.written);
            }
        }
        seal(&mut out, ONODE_MAGIC);
        out
    }

    /// Decodes a sector of the onode area; `None` if it is free, which is all zeroes.
    ///
    /// # Errors
    /// The first field that no onode of this version and place has.
    pub fn decode(from: &[u8], place: u32) -> Result<Option<Onode>, DecodeError> {
        // Most onodes of a partition are free, and all are read before it serves.
        if from == FREE {
            return Ok(None);
        }
        open("the onode", from, SECTOR_BYTES, ONODE_MAGIC)?;
        check_location(u32_at(from, 12).into(), place.into(), 12)?;
        check_zero("a reserved field of the onode", from, 7..8)?;
        check_zero("a reserved field of the onode", from, 72..CONTENT)?;
        let length = u32_at(from, 60) as usize;
        let content = match from[6] {
            INLINE if length <= INLINE_BYTES_MAX => {
                check_zero("bytes after the inline data", from, CONTENT + length..SECTOR_BYTES)?;
                OnodeContent::Inline(from[CONTENT..CONTENT + length].to_vec())
            }
            MAPPED if length == 0 => {
                let extents = std::array::from_fn(|index| u32_at(from, CONTENT + 4 * index));
                let map = ObjectBlockMap { extents, written: array(from, BITMAP) };
                if map.has_stray_block() {
                    return Err(DecodeError::Text { what: "the onode", reason: "a block has no extent" });
                }
                OnodeContent::Mapped(Box::new(map))
            }
            INLINE | MAPPED => return Err(DecodeError::value("the inline length", 60, length as u64)),
            kind => return Err(DecodeError::value("the kind of onode", 6, kind.into())),
        };
        Ok(Some(Onode {
            id: ObjectId::at(from, 16),
            version: u64_at(from, 40),
            sequence: u64_at(from, 48),
            epoch: u32_at(from, 56),
            mtime_ns: u64_at(from, 64),
            content,
        }))
    }
}
