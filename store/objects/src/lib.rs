//! The in-place object store of a partition, sans-IO: it decides where blocks are, and its caller moves them.
//!
//! A [`Partition`] owns the onodes, the free extents and the checksums of one partition of a device. It holds
//! no data and does no I/O, so that it needs no device: its tests run it on crash images. Its caller has an
//! operation planned ([`Partition::apply`]), writes the [`WritePiece`]s when the entry is durable in the log,
//! and reports their checksums. An operation that is refused never reaches the log, where REDO would find it:
//! it is planned before it is appended, or later with the space that was reserved for it then
//! ([`Partition::space_need`]). Reads are planned too ([`ReadPiece`]).
//!
//! # Crash consistency
//! There is no journal: the operation log is one. A *checkpoint* ([`Partition::begin_checkpoint`]) makes
//! durable what was applied before it; then those entries may be freed. After a crash, the caller loads the
//! partition ([`PartitionLoader`]) and applies the entries since the last complete checkpoint again
//! ([`entries_to_redo`]), in order, whatever state the crash left data and metadata in. Three rules make this
//! right:
//!
//! - An onode is one sector and therefore old or new, never torn. Free space follows from the onodes.
//! - Extents and onodes that an operation gives up are free after the next checkpoint, not before (delayed
//!   deallocation), so that no two onodes that a crash can combine share an extent.
//! - An onode that says that a block is written is durable after the block and its checksum. An overwrite
//!   needs no such order: bytes outside of the log's entries are the same in the old and the new block, and
//!   the others are written again. So a checkpoint needs a flush before its onodes only if blocks were
//!   written for the first time.
//!
//! A block that an entry covers in part is not verified while entries are applied again, since the crash may
//! have left it without its checksum.
//!
//! The device is flushed before a partition is loaded: what a killed process wrote may only be in the
//! device's cache, and a later power failure must not bring older onodes back.
//!
//! # Checksums
//! The table of checksums stays on the device: 4 KiB of it have those of 4 MiB of data. Its blocks are read
//! when a checksum in them is needed, and are cached up to a limit. A change needs no read: it is kept until
//! a checkpoint is durable, which merges it with what the device has of that block of the table. So only
//! reads and partial writes of blocks wait for the table ([`Partition::checksum`]), while the block itself
//! may be read at the same time.
//!
//! Memory: about 500 bytes an object, 12 a free onode, the cached blocks of the checksum table, and 4 bytes
//! for each of those on the device. Changed checksums take about 20 bytes each; when they are many
//! ([`BlockChecksums::has_many_changes`]), the caller makes a checkpoint.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod block_checksums;
mod checkpoint;
mod checksums;
mod free;
mod load;
mod partition;
mod plan;
mod redo;
mod written;

pub use block_checksums::BlockChecksums;
pub use checkpoint::Checkpoint;
pub use load::PartitionLoader;
pub use partition::{Partition, SpaceNeed, SpaceUse};
pub use plan::{BlockBase, MetadataWrite, PieceSource, ReadPiece, ReadSource, WritePiece};
pub use redo::entries_to_redo;
use wire_store::{DecodeError, ObjectId};
pub use written::WrittenBlocks;

/// Why a load or an operation is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ObjectsError {
    /// The partition has no free extent, or no free onode. Nothing was changed.
    #[error("the partition is full")]
    Full,
    /// The operation is longer than its object, or its data is shorter than it says. Nothing was changed.
    #[error("the operation's range or data is not valid")]
    Range,
    /// A superblock, header or onode is not valid.
    #[error("block {block}: {source}")]
    Invalid {
        /// The device block.
        block: u64,
        /// What is wrong.
        source: DecodeError,
    },
    /// The partition belongs to another device, or is another one.
    #[error("block {block}: the partition belongs to another device, or has another index or size")]
    Foreign {
        /// The device block of the header.
        block: u64,
    },
    /// Two onodes name one extent, or one names an extent that does not exist.
    #[error("block {block}: extent {extent} of object {object:?} does not exist or is in use")]
    Extent {
        /// The device block of the onode.
        block: u64,
        /// The extent.
        extent: u32,
        /// The object.
        object: ObjectId,
    },
    /// Two onodes are of one object.
    #[error("block {block}: object {object:?} has another onode")]
    Twice {
        /// The device block of the second onode.
        block: u64,
        /// The object.
        object: ObjectId,
    },
    /// Not all of the partition's metadata was given to the loader.
    #[error("the metadata of the partition is incomplete")]
    Incomplete,
}
