//! Blobs, as the metadata of a store describes them.

use std::borrow::Cow;

use wire_blob::{BlobFlags, BlobId, PageError, Xattr};

use crate::cluster_map::BlobClusterMap;
use crate::write::ClearMethod;

/// What a blob reads where it has no cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlobParent {
    /// Zeroes.
    None,
    /// A blob of the same store.
    Snapshot(BlobId),
    /// A device outside the store, by the name that the store's owner gave it. Its end is followed by zeroes.
    External(Vec<u8>),
}

/// A blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    pub(crate) id: BlobId,
    pub(crate) flags: BlobFlags,
    pub(crate) xattrs: Vec<Xattr>,
    pub(crate) internal_xattrs: Vec<Xattr>,
    pub(crate) clusters: BlobClusterMap,
    pub(crate) parent: BlobParent,
    pub(crate) pages: Vec<u32>,
    pub(crate) extent_pages: Vec<(u32, u32)>,
    pub(crate) has_extent_table: bool,
}

impl Blob {
    pub(crate) fn new(id: BlobId) -> Blob {
        Blob {
            id,
            flags: BlobFlags::default(),
            xattrs: Vec::new(),
            internal_xattrs: Vec::new(),
            clusters: BlobClusterMap::default(),
            parent: BlobParent::None,
            pages: Vec::new(),
            extent_pages: Vec::new(),
            has_extent_table: false,
        }
    }

    /// The id.
    pub fn id(&self) -> BlobId {
        self.id
    }

    /// The flags.
    pub fn flags(&self) -> BlobFlags {
        self.flags
    }

    /// Whether clusters may be unallocated.
    pub fn is_thin(&self) -> bool {
        self.flags.is_thin()
    }

    /// Whether the data must not be changed.
    pub fn is_read_only(&self) -> bool {
        self.flags.is_data_read_only()
    }

    /// What the blob reads where it has no cluster.
    pub fn parent(&self) -> &BlobParent {
        &self.parent
    }

    /// The clusters.
    #[inline]
    pub fn clusters(&self) -> &BlobClusterMap {
        &self.clusters
    }

    /// Attributes of the store's owner, in the order on the device.
    pub fn xattrs(&self) -> &[Xattr] {
        &self.xattrs
    }

    /// Attributes of the blobstore itself, in the order on the device.
    pub fn internal_xattrs(&self) -> &[Xattr] {
        &self.internal_xattrs
    }

    /// The value of an attribute of the store's owner.
    pub fn xattr(&self, name: &[u8]) -> Option<&[u8]> {
        value_of(&self.xattrs, name)
    }

    /// The value of an attribute that is a C string, up to its terminator.
    pub fn xattr_text(&self, name: &[u8]) -> Option<Cow<'_, str>> {
        let value = self.xattr(name)?;
        let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
        Some(String::from_utf8_lossy(&value[..end]))
    }

    /// The metadata pages of the chain, from the first.
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// The allocated extent pages: their index in the blob, and their metadata page. None in a blob without
    /// extent table.
    pub fn extent_pages(&self) -> &[(u32, u32)] {
        &self.extent_pages
    }

    /// Whether clusters are in extent pages; otherwise they are in runs in the chain.
    pub fn has_extent_table(&self) -> bool {
        self.has_extent_table
    }

    /// How clusters are cleared that the blob no longer needs.
    pub fn clear_method(&self) -> ClearMethod {
        match self.flags.metadata_read_only & BlobFlags::CLEAR_METHOD {
            0 => ClearMethod::Default,
            1 => ClearMethod::None,
            2 => ClearMethod::Unmap,
            _ => ClearMethod::WriteZeroes,
        }
    }

    /// The extent page with this index in the blob, as its metadata page.
    pub(crate) fn extent_page(&self, index: u32) -> Option<u32> {
        let at = self.extent_pages.binary_search_by_key(&index, |(index, _)| *index).ok()?;
        Some(self.extent_pages[at].1)
    }

    pub(crate) fn internal_xattr(&self, name: &[u8]) -> Option<&[u8]> {
        value_of(&self.internal_xattrs, name)
    }

    /// The metadata pages of chain and extents.
    pub(crate) fn all_pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.pages.iter().copied().chain(self.extent_pages.iter().map(|(_, page)| *page))
    }
}

fn value_of<'a>(xattrs: &'a [Xattr], name: &[u8]) -> Option<&'a [u8]> {
    xattrs.iter().find(|xattr| xattr.name == name).map(|xattr| &xattr.value[..])
}

/// A blob that cannot be used, with what is known of it: its pages and clusters are not free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusableBlob {
    pub(crate) partial: Blob,
    pub(crate) damage: BlobDamage,
}

impl UnusableBlob {
    /// What could be read before the damage.
    pub fn partial(&self) -> &Blob {
        &self.partial
    }

    /// Why the blob cannot be used.
    pub fn damage(&self) -> &BlobDamage {
        &self.damage
    }
}

/// Why a blob cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlobDamage {
    /// The mask of blob ids names a blob whose first page is another's, or none.
    #[error("metadata page {page}, its first one, is not the first page of a blob")]
    NotFirstPage {
        /// Index of the page.
        page: u32,
    },
    /// A page with a wrong CRC.
    #[error("metadata page {page} has a wrong CRC")]
    Crc {
        /// Index of the page.
        page: u32,
    },
    /// A page with a right CRC that cannot be decoded.
    #[error("{0}")]
    Page(PageError),
    /// A page number beyond the metadata region.
    #[error("it has metadata page {page}, but the store has {pages}")]
    NoSuchPage {
        /// Index of the page.
        page: u32,
        /// Pages of the region.
        pages: u32,
    },
    /// A chain that continues with a page of another blob.
    #[error("its chain continues with metadata page {page}, which is blob {other}'s")]
    PageOfAnother {
        /// Index of the page.
        page: u32,
        /// The blob that wrote it.
        other: BlobId,
    },
    /// A chain whose pages are not in order.
    #[error("metadata page {page} is number {found} of its chain, but must be number {expected}")]
    Sequence {
        /// Index of the page.
        page: u32,
        /// Its place.
        expected: u32,
        /// What it says.
        found: u32,
    },
    /// Flags that the format does not define, and without whose knowledge the blob must not be opened.
    #[error("it has flags {flags:#x} that this version does not know; a newer program wrote it")]
    UnknownFlags {
        /// The flags.
        flags: u64,
    },
    /// A blob with both kinds of extents, or different extent tables.
    #[error("metadata page {page} describes clusters in another way than the pages before it")]
    Extents {
        /// Index of the page.
        page: u32,
    },
    /// A blob that is larger than the format allows, or has more clusters than the store.
    #[error("it has {clusters} clusters, more than it can have")]
    Size {
        /// Clusters.
        clusters: u64,
    },
    /// An extent table with a wrong number of pages.
    #[error("it has {found} extent pages for {clusters} clusters")]
    ExtentTable {
        /// Extent pages.
        found: u64,
        /// Clusters of the blob.
        clusters: u64,
    },
    /// An extent table with a page that is no extent page, or another part's.
    #[error("metadata page {page} is not the extent page of its clusters from {first} on")]
    ExtentPage {
        /// Index of the page.
        page: u32,
        /// The first cluster that it should have.
        first: u32,
    },
    /// A blob that is not thin and lacks a cluster.
    #[error("it is not thin, but its cluster {index} is not allocated")]
    Unallocated {
        /// Index in the blob.
        index: u32,
    },
    /// A cluster beyond the store, or of the metadata.
    #[error("its cluster {index} is cluster {cluster} of the store, which no blob can have")]
    Cluster {
        /// Index in the blob.
        index: u32,
        /// The cluster of the store.
        cluster: u32,
    },
    /// A clone of an external snapshot without the name of that.
    #[error("it is a clone of an external snapshot, but does not name it")]
    NoExternalSnapshot,
    /// A snapshot's id of a wrong length.
    #[error("the id of its snapshot has {bytes} bytes instead of 8")]
    SnapshotId {
        /// Bytes of the id.
        bytes: usize,
    },
}
