//! What the caller reads and writes to perform an operation.

use wire_store::BLOCK_BYTES;

/// A write to the device: whole blocks, or one block that is changed in part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WritePiece {
    /// First block on the device.
    pub block: u64,
    /// Number of blocks; 1 unless `base` is [`BlockBase::Whole`].
    pub blocks: u32,
    /// Offset of the change in the first block, in bytes.
    pub skip: u32,
    /// Length of the change in bytes.
    pub length: u32,
    /// Where the changed bytes come from.
    pub source: PieceSource,
    /// Where the other bytes come from.
    pub base: BlockBase,
}

/// Where the changed bytes of a [`WritePiece`] come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceSource {
    /// The operation's data, from this offset.
    Data(u32),
    /// They are zero.
    Zeroes,
}

/// Where the unchanged bytes of a [`WritePiece`] come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockBase {
    /// There are none.
    Whole,
    /// They are zero.
    Zeroes,
    /// The block on the device: read, verify, modify, write. It is not verified while entries are applied
    /// again after a crash.
    Stored,
    /// Bytes that were in the onode; those after them are zero.
    Inline(Vec<u8>),
}

/// A part of a read, in the order of the object's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadPiece {
    /// Length in bytes.
    pub length: u32,
    /// Where the bytes are.
    pub source: ReadSource,
}

/// Where the bytes of a [`ReadPiece`] are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadSource {
    /// They are zero.
    Zeroes,
    /// These bytes.
    Inline(Vec<u8>),
    /// On the device, in blocks whose checksums are those of
    /// [`Partition::checksum`](crate::Partition::checksum).
    Stored {
        /// First block on the device.
        block: u64,
        /// Offset in the first block, in bytes.
        skip: u32,
    },
}

/// A block of metadata to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataWrite {
    /// The block of the device.
    pub block: u64,
    /// Its content.
    pub bytes: Box<[u8; BLOCK_BYTES]>,
}
