//! SPDK's blobstore: a store of blobs on one block device, sans-IO. Stores that SPDK wrote are loaded,
//! checked and changed, and SPDK loads what is written here.
//!
//! [`BlobStoreLoader`] says what to read, and makes a [`BlobStore`]: its [`Blob`]s, what they use, and the
//! [`StoreFinding`]s that say what is wrong. [`BlobStore::read`] says where the data of a blob is.
//! [`OpenBlobStore`] changes a store, and [`StoreRepair`] repairs one.
//!
//! ```
//! use blobstore::{BlobStoreLoader, LoadOptions};
//! let device = vec![0u8; 1 << 20];
//! let mut loader = BlobStoreLoader::new(device.len() as u64, LoadOptions::default());
//! let outcome = loop {
//!     while let Some(read) = loader.next_read() {
//!         let start = read.offset as usize;
//!         loader.complete(read.id, Some(&device[start..start + read.length]));
//!     }
//!     if let Some(outcome) = loader.outcome() {
//!         break outcome;
//!     }
//! };
//! let error = outcome.expect_err("there are zeroes only");
//! assert!(error.to_string().starts_with("there is no blobstore: the signature"));
//! ```
//!
//! # Layout
//! The device is divided into clusters, of 1 MiB by default. The first ones are the metadata's, as many as it
//! needs:
//!
//! ```text
//! super block | mask of pages | mask of clusters | for growth | mask of blob ids | metadata region
//! ```
//!
//! All start at multiples of the metadata page, which is 4 KiB or larger and has 4 KiB of content. Page 0 is
//! the first of the metadata region. A blob's metadata is a chain of pages. The first is at the index in the
//! blob's id and is replaced in place; the others are written to free pages before, and zeroed when no chain
//! has them any more. Each page says its blob, its place in the chain, and its CRC32C.
//!
//! A chain has flags, attributes of the store's owner (xattrs), the blobstore's own (internal xattrs), and
//! the clusters of the blob: either as runs, or as a table of extent pages. An extent page has 512 clusters
//! and is not in the chain, so that the first write to a cluster of a thin blob replaces one page in place.
//! It names the blob that wrote it, which need not be the one that has it: a snapshot gets the pages of the
//! original.
//!
//! # Thin blobs, snapshots and clones
//! Where a thin blob has no cluster, it reads its parent: a snapshot of the same store (internal xattr
//! `SNAP`), a device outside (`EXTSNAP`), or zeroes. A parent's end is followed by zeroes, also if it has a
//! parent that is larger. A snapshot gets the clusters of the original, which becomes a thin clone of it. A
//! blob is a snapshot if another one is its clone.
//!
//! # What is used
//! `clean` in the super block says that the masks are those of the metadata. It is cleared before the first
//! change of metadata, and set when the store is unloaded. A store that is not clean is scanned: pages with a
//! right CRC that are the first of a chain, and are at the index of their blob's id, are the first pages of
//! blobs; what their chains name is used, and all else is free. A page that is neither empty nor has a right
//! CRC was torn: it is free too, and a finding.
//!
//! Writes are ordered so that a store can be loaded after each of them: extent pages and the chain's later
//! pages before its first. SPDK relies on a device that replaces a page as a whole or not at all; here a copy
//! of the page is written before, in place of the masks (`wire_blob::PageCopy`). What is left in two states
//! is decided so:
//! - Making and deleting a snapshot: `recover.rs` has the rules. The clone says whether the snapshot exists.
//! - Resizing: SPDK writes the last extent page before the table. If it has more clusters than the table
//!   says, the blob has the size of the table; if it has fewer, the blob ends there. What is written here has
//!   a new extent page then, so that the first page alone decides.
//! - Creating and deleting a blob: it exists while its first page does, which is written last. SPDK zeroes
//!   the pages of a deleted one together: if the first is left alone, the blob is unusable, its chain being
//!   broken.
//!
//! SPDK 26.09 refuses a store in which a blob is damaged. Here such a blob is listed as unusable, its pages
//! and clusters are not free, and the others can be used.
//!
//! # State
//! A [`BlobStore`] does not change. Its copies share cluster maps ([`BlobClusterMap`]) and blobs
//! ([`BlobTable`]), so that a change publishes another one at little cost, and channels on other cores read
//! and write by the one that they have.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod assemble;
mod blob;
mod chain;
mod cluster_map;
#[cfg(test)]
mod crash;
mod finding;
mod layout;
mod load;
mod read;
mod recover;
mod repair;
mod store;
mod table;
mod write;

pub use blob::{Blob, BlobDamage, BlobParent, UnusableBlob};
pub use chain::{ChainCluster, SnapshotChain};
pub use cluster_map::{BlobClusterMap, MappedRun};
pub use finding::{NumberRanges, StoreFinding, StoreSeverity};
pub use layout::BlobStoreLayout;
pub use load::{BlobStoreLoader, LoadError, LoadOptions, MetadataRead, load_with};
pub use read::{BlobReadError, BlobSegment, ReadPlan};
pub use recover::{RecoveredOperation, SnapshotOperation};
pub use repair::{RepairStep, StoreRepair};
pub use store::BlobStore;
pub use table::BlobTable;
pub use wire_blob::{BlobFlags, BlobId, ChecksumsId, MaskKind, Xattr};
pub use write::{
    BlobChange, BlobStoreDevice, BlobStoreFormat, ChangeError, ChangeId, ChangeOutcome, ChangeProgress,
    ClearMethod, OpenBlobStore, StoreAction, StoreEvent, StoreIo, StoreIoFailed,
};
