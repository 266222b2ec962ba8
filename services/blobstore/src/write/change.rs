//! Changes of a store, and what becomes of them.

use std::ops::Range;

use wire_blob::{BlobId, ChecksumsId, STORE_TYPE_BYTES, Xattr};

/// Names a change that was begun. Ids ascend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChangeId(pub u64);

/// How clusters are cleared that a blob no longer needs; the numbers are those of the format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClearMethod {
    /// As the store is used to: deallocated.
    #[default]
    Default = 0,
    /// They keep their content until they are given out again.
    None = 1,
    /// They are deallocated.
    Unmap = 2,
    /// Zeroes are written.
    WriteZeroes = 3,
}

/// How a new store is made. The defaults are those of SPDK's stores of volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlobStoreFormat {
    /// Bytes of a cluster, a multiple of 4096 and of the metadata page.
    pub cluster_bytes: u32,
    /// Bytes of a metadata page: a power of two from 4096 to 65536.
    pub metadata_page_bytes: u32,
    /// Metadata pages for each hundred clusters.
    pub metadata_pages_percent: u32,
    /// What becomes of the old content of the clusters for data.
    pub clear: ClearMethod,
    /// The type, `LVOLSTORE` for volumes, padded with zeroes.
    pub store_type: [u8; STORE_TYPE_BYTES],
    /// Attributes of the super blob, which is made with the store; `None` for a store without one.
    pub super_blob: Option<Vec<Xattr>>,
    /// The checksums that a layer keeps through which all data is written.
    pub checksums: Option<ChecksumsId>,
}

impl Default for BlobStoreFormat {
    fn default() -> BlobStoreFormat {
        BlobStoreFormat {
            cluster_bytes: 4 << 20,
            metadata_page_bytes: 4096,
            metadata_pages_percent: 100,
            clear: ClearMethod::Unmap,
            store_type: *b"LVOLSTORE\0\0\0\0\0\0\0",
            super_blob: Some(Vec::new()),
            checksums: None,
        }
    }
}

/// A change of a store.
///
/// Changes of one blob run one after another in the order in which they were begun, those of different blobs
/// at the same time. All checks are made when a change starts, with the blobs as they are then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlobChange {
    /// Makes a blob without parent. Done returns its id.
    Create {
        /// Whether clusters are allocated by the first write. Otherwise they are now, and have the content
        /// that they have on the device.
        thin: bool,
        /// Clusters.
        clusters: u32,
        /// How clusters are cleared.
        clear: ClearMethod,
        /// Attributes.
        xattrs: Vec<Xattr>,
    },
    /// Deletes a blob. A snapshot with one clone is merged into it; with more, it fails with
    /// [`ChangeError::HasClones`].
    Delete {
        /// The blob.
        blob: BlobId,
    },
    /// Changes the number of clusters.
    Resize {
        /// The blob.
        blob: BlobId,
        /// Clusters.
        clusters: u32,
    },
    /// Sets and removes attributes, all in one write.
    SetXattrs {
        /// The blob.
        blob: BlobId,
        /// Attributes that are added, or replace those of the same name.
        set: Vec<Xattr>,
        /// Names of attributes that are removed, as far as they exist.
        remove: Vec<Vec<u8>>,
    },
    /// Makes data and metadata read-only, for ever.
    SetReadOnly {
        /// The blob.
        blob: BlobId,
    },
    /// Makes a snapshot, of which the blob becomes a thin clone. There is a [`StoreEvent::Pause`] in it. Done
    /// returns the snapshot's id.
    Snapshot {
        /// The blob.
        blob: BlobId,
        /// Attributes of the snapshot.
        xattrs: Vec<Xattr>,
    },
    /// Makes a thin clone of a read-only blob. Done returns its id.
    Clone {
        /// The read-only blob.
        of: BlobId,
        /// Attributes of the clone.
        xattrs: Vec<Xattr>,
    },
    /// Makes a thin clone of a device outside the store. Done returns its id.
    CloneExternal {
        /// The name of the external snapshot as it is stored, with a terminator if there is to be one.
        name: Vec<u8>,
        /// Clusters of the clone.
        clusters: u32,
        /// Attributes of the clone.
        xattrs: Vec<Xattr>,
    },
    /// Allocates every cluster, so that the blob is thick and has no parent.
    Inflate {
        /// The blob.
        blob: BlobId,
    },
    /// Copies what the direct parent itself has; the parent's parent becomes the blob's, or none. A clone of
    /// an external snapshot is inflated, but stays thin.
    Decouple {
        /// The blob.
        blob: BlobId,
    },
    /// Makes a snapshot of the same size the parent of a thin blob. What the blob has not of its own changes.
    SetParent {
        /// The thin blob.
        blob: BlobId,
        /// The snapshot.
        parent: BlobId,
    },
    /// Makes a device outside the store the parent of a thin blob.
    SetParentExternal {
        /// The thin blob.
        blob: BlobId,
        /// The name, as for [`CloneExternal`](Self::CloneExternal).
        name: Vec<u8>,
    },
    /// Takes what the device has more now. Done without a change if that is less than a cluster.
    Grow {
        /// Bytes of the device now.
        device_bytes: u64,
    },
    /// Sets the super blob, or none.
    SetSuperBlob {
        /// The blob.
        blob: Option<BlobId>,
    },
    /// Allocates a cluster of a thin blob for a first write.
    ///
    /// What the write does not cover is copied from the parent or zeroed. At the same time
    /// [`StoreEvent::WriteCluster`] asks for the write; [`OpenBlobStore::cluster_written`] answers it. Then
    /// the cluster map is written, many allocations at once, and Done returns the cluster. The write may be
    /// acknowledged then. If the cluster is allocated already, Done returns that, and nothing was asked for:
    /// the write goes there.
    ///
    /// [`OpenBlobStore::cluster_written`]: super::OpenBlobStore::cluster_written
    AllocateCluster {
        /// The thin blob.
        blob: BlobId,
        /// Index of the cluster in the blob.
        index: u32,
        /// The bytes of the cluster that the write covers, in multiples of a block.
        written: Range<u32>,
    },
    /// Frees clusters of a thin blob without parent, as unmap does: they read as zeroes.
    ReleaseClusters {
        /// The thin blob.
        blob: BlobId,
        /// Indexes in the blob.
        clusters: Range<u32>,
    },
    /// Writes masks and a clean super block. Nothing can be begun afterwards.
    Unload,
    /// Erases the super block, so that there is no store. Blobs are not cleared. Nothing can be begun
    /// afterwards.
    Destroy,
}

/// What a change returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeOutcome {
    /// Nothing besides that it is done.
    Done,
    /// The id of the new blob.
    Blob(BlobId),
    /// The cluster of the store of a first write.
    Cluster(u32),
}

/// Why a change failed. Except for [`Io`](Self::Io), nothing has changed; but what an inflation has copied
/// before it fails stays allocated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// There is no such blob, or it cannot be used. `ENOENT`.
    #[error("blob {0} is not there or cannot be used")]
    NoBlob(BlobId),
    /// The parent is the parent already. `EEXIST`.
    #[error("it is so already")]
    Exists,
    /// Too few free clusters. `ENOSPC`.
    #[error("there are {free} free clusters, and {need} are needed")]
    NoClusters {
        /// Clusters that it needs.
        need: u32,
        /// Free ones.
        free: u32,
    },
    /// Too few free metadata pages. `ENOSPC`, but `ENOMEM` where SPDK's clients expect that.
    #[error("there are not enough free metadata pages")]
    NoPages,
    /// Data or metadata of the blob are read-only. `EPERM`.
    #[error("blob {0} is read-only")]
    ReadOnly(BlobId),
    /// A snapshot with several clones cannot be deleted. `EPERM`.
    #[error("the snapshot has {0} clones")]
    HasClones(usize),
    /// The change makes no sense for the blob. `EINVAL`.
    #[error("{0}")]
    Invalid(&'static str),
    /// Clusters can only be released by a thin blob without parent, which the blob is not, or not any more.
    #[error("the blob is not thin, or has a parent")]
    NotReleased,
    /// It was cancelled. `ECANCELED`.
    #[error("it was cancelled")]
    Cancelled,
    /// The device failed. `EIO`.
    #[error("the device failed")]
    Io,
    /// An earlier write of metadata failed, so that what is on the device is not known: the store must be
    /// loaded again before it can be changed. Or it was unloaded. `EIO`.
    #[error("the store takes no changes any more")]
    Broken,
}

/// What happened. Events must be taken after each call that may cause some.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreEvent {
    /// A change ended. What it did is durable, except that of [`BlobChange::AllocateCluster`], which a flush
    /// of the device makes durable together with the data.
    Done {
        /// The change.
        change: ChangeId,
        /// How.
        result: Result<ChangeOutcome, ChangeError>,
    },
    /// [`published`](super::OpenBlobStore::published) is another state: channels must use it from now on.
    /// When all do, and no I/O is in flight by an older one, [`release`](super::OpenBlobStore::release) is
    /// due: clusters that were freed wait for it.
    Published {
        /// Number of the state. They ascend.
        epoch: u64,
    },
    /// Writes to the blob must wait, and those in flight must end; then
    /// [`paused`](super::OpenBlobStore::paused) is due. Reads need not wait.
    Pause {
        /// The blob.
        blob: BlobId,
    },
    /// Writes to the blob may begin again, with the state that was published last.
    Resume {
        /// The blob.
        blob: BlobId,
    },
    /// The data of a first write is to be written, within the cluster at this offset of the device.
    WriteCluster {
        /// The change.
        change: ChangeId,
        /// Where the cluster begins on the device.
        offset: u64,
    },
    /// There are fewer free clusters than the limit; once, until there were a quarter more than that again.
    LowSpace {
        /// Free clusters.
        free: u32,
    },
}

/// How far a change is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChangeProgress {
    /// Clusters that are copied, zeroed or cleared.
    pub done: u32,
    /// All that have to be.
    pub all: u32,
}
