//! Differences between two snapshots of an image, as a stream that another image is brought up to date with.
//!
//! An image is a chain of volumes, so that what differs between two of its snapshots are the blocks that are
//! written in volumes which only one of them has: [`DiffExport`] reads these and no others. [`import_diff`]
//! applies a stream to an image whose newest snapshot is the one that the stream begins at. `wire_store` has
//! the encoding.

mod export;
mod import;
mod plan;
mod stream;
mod turns;

use std::io;

use bdev::BdevError;
use block_io::Status;
use cluster_map::MapError;
use wire_store::DecodeError;

use crate::ClientError;
use crate::reclaim::ReclaimError;

pub use export::{DiffExport, ExportedDiff};
pub use import::{ImportOptions, ImportedDiff, import_diff};
pub use stream::{DiffPosition, StartedDiff, read_started};

/// Why a diff is not exported or imported.
#[derive(Debug, thiserror::Error)]
pub enum DiffError {
    /// A cluster cannot be used, there is no such image or snapshot, or another one has the image.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Objects cannot be listed, or what an image had cannot be removed.
    #[error(transparent)]
    Reclaim(#[from] ReclaimError),
    /// The image cannot be opened here.
    #[error(transparent)]
    Bdev(#[from] BdevError),
    /// A read failed.
    #[error("the image cannot be read: {0}; does its cluster serve? `ringbolt store status` says")]
    Read(Status),
    /// A write failed.
    #[error(
        "the image cannot be written: {0}; does its cluster serve, and has it space? `ringbolt store status` \
         says"
    )]
    Write(Status),
    /// This process has no memory for I/O, or no thread.
    #[error("there is no memory for I/O")]
    NoMemory,
    /// The stream cannot be read or written.
    #[error("the stream: {0}")]
    Stream(#[from] io::Error),
    /// The stream is not one, or is damaged.
    #[error("the stream is damaged, or none of `image export-diff`, at byte {at}: {source}")]
    Damaged {
        /// Bytes of it that are whole.
        at: u64,
        /// What is wrong behind them.
        source: DecodeError,
    },
    /// The stream ends before its end record.
    #[error("the stream ends after byte {at}, and is not whole: was its export interrupted?")]
    Truncated {
        /// Bytes of it that are whole.
        at: u64,
    },
    /// The volumes of a snapshot are others than they were.
    #[error(
        "snapshots of image {pool}/{image} were removed while it was read, so that the stream is not valid: \
         export it anew"
    )]
    SnapshotRemoved {
        /// Pool.
        pool: String,
        /// Name of the image.
        image: String,
    },
    /// A stream of everything makes an image, and there is one.
    #[error(
        "image {pool}/{image} exists, and the stream is of a whole image: give it a name that no image has"
    )]
    ImageExists {
        /// Pool.
        pool: String,
        /// Name of the image.
        image: String,
    },
    /// There is no image that a diff could be applied to.
    #[error(
        "there is no image {pool}/{image}, and the stream has what changed since snapshot {from}: import the \
         whole image first, as it was at {from}"
    )]
    NoBaseImage {
        /// Pool.
        pool: String,
        /// Name of the image.
        image: String,
        /// The snapshot that the stream begins at.
        from: String,
    },
    /// The newest snapshot of the image is not the one that the stream begins at.
    #[error("the stream begins at snapshot {from}, and the newest one of image {pool}/{image} is {newest}")]
    OtherBase {
        /// Pool.
        pool: String,
        /// Name of the image.
        image: String,
        /// The snapshot that the stream begins at.
        from: String,
        /// That of the image.
        newest: String,
    },
    /// The snapshot that the stream begins at has the name of the image's, and is another one.
    #[error(
        "snapshot {pool}/{image}@{from} is the copy of another snapshot than the {from} that the stream \
         begins at: that was made anew since; import the whole image under another name"
    )]
    ForeignBase {
        /// Pool.
        pool: String,
        /// Name of the image.
        image: String,
        /// The snapshot.
        from: String,
    },
    /// The image has the snapshot that the stream leads to.
    #[error("image {pool}/{image} has a snapshot {to} already")]
    Imported {
        /// Pool.
        pool: String,
        /// Name of the image.
        image: String,
        /// The snapshot.
        to: String,
    },
    /// The image was written, resized or rolled back since its newest snapshot.
    #[error(
        "image {pool}/{image} has changes since its snapshot {newest}: --discard-changes removes them for \
         good"
    )]
    HeadChanged {
        /// Pool.
        pool: String,
        /// Name of the image.
        image: String,
        /// The snapshot.
        newest: String,
    },
    /// The image has a part of another stream.
    #[error(
        "image {pool}/{image} has a part of another stream, to snapshot {other}: import that again, which \
         goes on, or --discard-changes, which removes the part"
    )]
    OtherImport {
        /// Pool.
        pool: String,
        /// Name of the image.
        image: String,
        /// The snapshot that the other stream leads to.
        other: String,
    },
    /// An image has a part of the stream.
    #[error("{source}; {pool}/{image} has a part of it: {advice}")]
    Unfinished {
        /// Pool.
        pool: String,
        /// Name of the image.
        image: String,
        /// What to do.
        advice: String,
        /// Why it has no more.
        source: Box<DiffError>,
    },
}

impl From<MapError> for DiffError {
    fn from(error: MapError) -> DiffError {
        ClientError::Map(error).into()
    }
}
