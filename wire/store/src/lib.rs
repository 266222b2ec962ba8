//! On-disk formats of the replicated store: devices, partitions, onodes, operation logs, records of images,
//! and the streams of their differences.
//!
//! A device begins with a [`Superblock`], or with a [`LogSuperblock`] if it has logs alone, and its
//! [`DeviceState`]. The first divides it into partitions, each with a [`PartitionHeader`] and [`Onode`]s of
//! 512 bytes. An operation log has two [`LogHeader`]s and entries, each an [`EntryHeader`] with data. A
//! replica's checkpoints are [`CheckpointRecord`]s. The stream of a [`DiffHeader`] is a backup. Every
//! structure has a magic number, a version, a CRC32C and its own location, and is one sector of 512 bytes or
//! less, which devices write whole. Integers are little-endian. `docs/formats/store.md` has the tables.
//!
//! ```
//! use wire_store::{ObjectId, Onode, OnodeContent};
//! let id = ObjectId { group: 3, volume: 1, index: 9, suffix: 0 };
//! let onode = Onode::new(id, OnodeContent::Inline(b"small".to_vec()));
//! let sector = onode.encode(17);
//! assert_eq!(Onode::decode(&sector, 17)?, Some(onode));
//! # Ok::<(), wire_store::DecodeError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod bitmap;
mod checkpoint;
mod device_state;
mod diff;
mod fields;
mod image;
mod log;
mod onode;
mod superblock;

pub use bitmap::BlockBitmap;
pub use checkpoint::{CheckpointRecord, UnsettledBlock};
pub use codec::{DecodeError, crc32c};
pub use device_state::DeviceState;
pub use diff::{
    DIFF_MAGIC, DiffDecoder, DiffEncoder, DiffHeader, DiffItem, DiffRecord, DiffRecordKind, DiffSnapshot,
};
pub use image::ImageRecord;
pub use log::{EntryHeader, EntryLayout, LogHeader, LogSector, Operation};
pub use onode::{EXTENTS_PER_OBJECT, INLINE_BYTES_MAX, ObjectBlockMap, ObjectId, Onode, OnodeContent};
pub use superblock::{LogSuperblock, PartitionHeader, PartitionLayout, Superblock};

/// Size of a block: the unit of checksums and of in-place writes.
pub const BLOCK_BYTES: usize = 4096;

/// Size of a sector: what a device writes whole or not at all.
pub const SECTOR_BYTES: usize = 512;

/// Size of an object.
pub const OBJECT_BYTES: usize = 4 << 20;

/// Blocks of an object.
pub const BLOCKS_PER_OBJECT: usize = OBJECT_BYTES / BLOCK_BYTES;

/// Blocks of an extent, the unit of allocation: 64 KiB.
pub const BLOCKS_PER_EXTENT: usize = 16;

/// Version of every structure in this crate, but of superblocks that have version 2.
pub const FORMAT_VERSION: u16 = 1;
