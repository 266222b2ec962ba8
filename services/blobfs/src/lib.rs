//! Files and directories on SPDK's blobstore, sans-IO, for databases such as RocksDB.
//!
//! [`BlobFs`] takes requests ([`BlobFsRequest`]) and asks for I/O; [`BlockingBlobFs`] runs it over a
//! [`BlockingDevice`] for threads that wait. A file is a blob with its name and length in xattrs, as in
//! SPDK's blobfs, whose stores open here.
//!
//! ```
//! use blobfs::{BlobFsOptions, BlockingBlobFs, MemoryDevice, OpenHow};
//! let device = MemoryDevice::new(64 << 20);
//! let files = BlockingBlobFs::format(&blobfs::format_options(), device, BlobFsOptions::default())?;
//! files.make_directory(b"db")?;
//! let file = files.open(b"db/CURRENT.tmp", OpenHow::REPLACE)?;
//! files.append(file, b"MANIFEST-000001\n".to_vec())?;
//! files.sync(file)?;
//! files.close(file)?;
//! files.rename(b"db/CURRENT.tmp", b"db/CURRENT")?;
//! let file = files.open(b"db/CURRENT", OpenHow::READ)?;
//! assert_eq!(files.read(file, 9, 100)?, b"000001\n");
//! # Ok::<(), blobfs::BlobFsOpenError>(())
//! ```
//!
//! # What survives a power failure
//! - A sync writes the data, flushes it, and then writes the length and that the name is valid, both in one
//!   page that is replaced as a whole. A new file exists from its first sync on, or that of its directory.
//! - A sync of a log ([`BlobFsRequest::SyncLog`]) writes the data and flushes it: the length is ahead, over
//!   zeroes.
//! - A rename writes the data and the new name in the same way. A file that has the name already is deleted
//!   afterwards. If power fails between, there are two files of one name: the one with the larger sequence
//!   is the file, and the other is deleted when the store is opened.
//! - A smaller size, a removed name, a directory that was made, removed or renamed: when the request ends.
//! - What was written in place since the last sync is there or not, block by block, as on any device.
//!
//! # Names
//! The index is a map in memory, made of the blobs when a store is opened. A look-up is a search for each
//! component of the path. Directories have numbers, which files name as their parent, so that the rename of a
//! directory is one write too. SPDK's names are whole paths: directories in them are implied.
//!
//! # Space
//! A file grows by whole clusters, and by more than it needs ([`BlobFsOptions::preallocate_bytes`]), or as
//! much as its writer expects ([`BlobFsRequest::Allocate`]), so that most appends write no metadata. Space is
//! allocated before data is accepted: a full store is an error of the write, never of the sync. A caller that
//! accepts data before it writes it here reserves space for it ([`BlobFsRequest::Reserve`]).
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod blocking;
mod cache;
mod content;
#[cfg(test)]
mod crash;
mod error;
mod extents;
mod file;
mod fs;
mod index;
mod load;
mod path;
mod record;
mod request;

pub use blocking::{BlobFsOpenError, BlockingBlobFs, BlockingDevice, MemoryDevice, content_of};
pub use content::{DeviceContent, DeviceLook};
pub use error::{BlobFsError, NoBlobFs};
pub use extents::{ExtentPart, ExtentRead, FileExtents};
pub use fs::{
    BlobFs, BlobFsOptions, LOG_AHEAD_BYTES, LOG_BLOCK_BYTES, MetadataPages, REQUEST_BYTES_MAX, REQUESTS_MAX,
    format_options,
};
pub use load::FileFinding;
pub use path::NAME_BYTES_MAX;
pub use record::{NoRecord, STORE_TYPE, STORE_TYPE_TEXT};
pub use request::{
    BlobFsAction, BlobFsIo, BlobFsReply, BlobFsRequest, BlobFsRequestId, DirectoryItem, FileStatus, OpenHow,
    OpenNumber,
};
