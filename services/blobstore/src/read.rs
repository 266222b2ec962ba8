//! Where the data of a blob is.

use wire_blob::BlobId;

use crate::blob::{Blob, BlobParent};
use crate::store::BlobStore;

/// A piece of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlobSegment {
    /// Bytes of the store's device.
    Device {
        /// Where on the device.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Zeroes.
    Zeroes {
        /// Bytes.
        length: u64,
    },
    /// Bytes of an external snapshot; what is beyond its end is zero.
    External {
        /// The blob that has the snapshot's name ([`BlobParent::External`]).
        clone: BlobId,
        /// Where in the snapshot.
        offset: u64,
        /// Bytes.
        length: u64,
    },
}

impl BlobSegment {
    /// Bytes of the piece.
    pub fn length(&self) -> u64 {
        match self {
            BlobSegment::Device { length, .. }
            | BlobSegment::Zeroes { length }
            | BlobSegment::External { length, .. } => *length,
        }
    }
}

/// Why a blob cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlobReadError {
    /// There is no such blob, or it cannot be used.
    #[error("blob {blob} is not there or cannot be used")]
    NoBlob {
        /// The blob.
        blob: BlobId,
    },
    /// The range is beyond the end.
    #[error("{length} bytes at {offset} of blob {blob}, which has {bytes}")]
    Range {
        /// The blob.
        blob: BlobId,
        /// Where the read begins.
        offset: u64,
        /// Bytes to read.
        length: u64,
        /// Bytes of the blob.
        bytes: u64,
    },
    /// Data is in a snapshot that is not there or cannot be used.
    #[error("blob {blob} has data in snapshot {parent}, which is not there or cannot be used")]
    NoParent {
        /// The blob.
        blob: BlobId,
        /// Its snapshot.
        parent: BlobId,
    },
    /// The blob is its own ancestor.
    #[error("blob {blob} is a clone of itself")]
    ParentCycle {
        /// The blob.
        blob: BlobId,
    },
}

/// The pieces of a read, in order. A piece follows each step; an error is the last one.
#[derive(Debug)]
pub struct ReadPlan<'a> {
    store: &'a BlobStore,
    blob: &'a Blob,
    offset: u64,
    end: u64,
}

impl<'a> ReadPlan<'a> {
    pub(crate) fn new(
        store: &'a BlobStore,
        id: BlobId,
        offset: u64,
        length: u64,
    ) -> Result<ReadPlan<'a>, BlobReadError> {
        let blob = store.blob(id).ok_or(BlobReadError::NoBlob { blob: id })?;
        let bytes = store.blob_bytes(blob);
        match offset.checked_add(length).filter(|end| *end <= bytes) {
            Some(end) => Ok(ReadPlan { store, blob, offset, end }),
            None => Err(BlobReadError::Range { blob: id, offset, length, bytes }),
        }
    }

    /// The piece at an offset, as long as the blob's and its ancestors' maps allow. The cost is a look-up for
    /// each ancestor down to the owner of the cluster.
    fn piece(&self, offset: u64) -> Result<BlobSegment, BlobReadError> {
        let cluster_bytes = u64::from(self.store.layout().cluster_bytes);
        // The blob has at most 2^32 clusters.
        let (index, within) = ((offset / cluster_bytes) as u32, offset % cluster_bytes);
        // No more than the piece can have: the map is searched for that.
        let wanted = (within + (self.end - offset)).div_ceil(cluster_bytes) as u32;
        let mut clusters = u32::MAX;
        let mut owner = self.blob;
        let length_of = |clusters: u32| (u64::from(clusters) * cluster_bytes - within).min(self.end - offset);
        for _ in 0..=self.store.blobs().len() {
            if index >= owner.clusters().length() {
                return Ok(BlobSegment::Zeroes { length: length_of(clusters) });
            }
            let run = owner.clusters().run_within(index, wanted);
            clusters = clusters.min(run.length);
            let length = length_of(clusters);
            owner = match (run.cluster, owner.parent()) {
                (Some(cluster), _) => {
                    let offset = self.store.layout().cluster_offset(cluster) + within;
                    return Ok(BlobSegment::Device { offset, length });
                }
                (None, BlobParent::None) => return Ok(BlobSegment::Zeroes { length }),
                (None, BlobParent::External(_)) => {
                    return Ok(BlobSegment::External { clone: owner.id(), offset, length });
                }
                (None, BlobParent::Snapshot(parent)) => {
                    let missing = BlobReadError::NoParent { blob: owner.id(), parent: *parent };
                    self.store.blob(*parent).ok_or(missing)?
                }
            };
        }
        Err(BlobReadError::ParentCycle { blob: self.blob.id() })
    }
}

impl Iterator for ReadPlan<'_> {
    type Item = Result<BlobSegment, BlobReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.offset == self.end {
            return None;
        }
        let piece = self.piece(self.offset);
        self.offset = match &piece {
            Ok(piece) => self.offset + piece.length(),
            Err(_) => self.end,
        };
        Some(piece)
    }
}
