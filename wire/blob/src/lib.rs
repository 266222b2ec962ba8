//! The on-disk format of SPDK's blobstore, version 3: [`SuperBlock`], [`BitMask`]s and [`MetadataPage`]s.
//!
//! A store begins with a super block of 4 KiB. It says where three masks are (used metadata pages, clusters
//! and blob ids) and where the metadata region begins, in metadata pages of 4 KiB or more from the start of
//! the device. A blob is a chain of metadata pages, each with [`MetadataDescriptor`]s; the first page is at
//! the index that the [`BlobId`] has. Super block and pages end with a CRC32C of what is before it. Integers
//! are little-endian and not aligned. Versions 1 and 2 lack the mask of blob ids, and have zeroes in fields
//! that came later.
//!
//! While a store is not clean, the pages of its masks are not read. Two structures of our own are there then:
//! [`PageCopy`] and [`PageGroups`]. Beside a store there may be checksums of its data: [`ChecksumHeader`].
//!
//! The crate decodes and encodes; `blobstore` knows what the structures mean together.
//!
//! ```
//! use wire_blob::{BlobFlags, BlobId, MetadataDescriptor, MetadataPage};
//! let page = MetadataPage {
//!     id: BlobId::from_page(7),
//!     sequence: 0,
//!     descriptors: vec![MetadataDescriptor::Flags(BlobFlags { invalid: BlobFlags::THIN, ..BlobFlags::default() })],
//!     next: None,
//! };
//! let bytes = page.encode().expect("the descriptors fit");
//! assert_eq!(MetadataPage::decode(&bytes, 7)?, page);
//! # Ok::<(), wire_blob::PageError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod checksums;
mod descriptor;
mod fields;
mod intent;
mod mask;
mod page;
mod sealed;
mod super_block;

pub use checksums::{
    CHECKSUM_BLOCK_BYTES, CHECKSUM_REGION_BYTES, CHECKSUMS_PER_REGION, ChecksumHeader, ChecksumPage,
    ChecksumsId, ChecksumsMark, DirtyRegions,
};
pub use codec::DecodeError;
pub use descriptor::{
    BlobClusterRun, BlobFlags, ExtentPage, ExtentTable, ExtentTableRun, MetadataDescriptor, Xattr,
};
pub use intent::{CopyTarget, PageCopy, PageGroups};
pub use mask::{BitMask, MaskKind};
pub use page::{MetadataPage, PageError, PageHeader, has_valid_crc};
pub use super_block::{PageRange, STORE_TYPE_BYTES, SuperBlock};

/// Bytes of the super block, and of what a metadata page uses however large pages are.
pub const PAGE_BYTES: usize = 4096;

/// The version of the format that is written.
pub const FORMAT_VERSION: u32 = 3;

/// Bytes of a metadata page for descriptors.
pub const DESCRIPTOR_AREA_BYTES: usize = 4072;

/// Clusters of each extent page but the last of a blob.
pub const CLUSTERS_PER_EXTENT_PAGE: u32 = 512;

/// The internal xattr with the id of the snapshot that a thin blob is a clone of: 8 bytes.
pub const XATTR_SNAPSHOT: &[u8] = b"SNAP";

/// The internal xattr of a snapshot that is being made, with the id of the blob of which it is made: 8 bytes.
pub const XATTR_SNAPSHOT_IN_PROGRESS: &[u8] = b"SNAPTMP";

/// The internal xattr of a snapshot that is being deleted, with the id of its clone: 8 bytes.
pub const XATTR_SNAPSHOT_PENDING_REMOVAL: &[u8] = b"SNAPRM";

/// The internal xattr with the name of the external snapshot of a clone, as the store's owner gave it.
pub const XATTR_EXTERNAL_SNAPSHOT: &[u8] = b"EXTSNAP";

/// The id of a blob: bit 32, and below it the index of its first metadata page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlobId(pub u64);

impl BlobId {
    const MARK: u64 = 1 << 32;

    /// The id of the blob whose first metadata page has this index.
    pub const fn from_page(page: u32) -> BlobId {
        BlobId(BlobId::MARK | page as u64)
    }

    /// The index of the blob's first metadata page; `None` if no blob has such an id.
    pub const fn page(self) -> Option<u32> {
        if self.0 >> 32 == 1 { Some(self.0 as u32) } else { None }
    }
}

impl std::fmt::Display for BlobId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
