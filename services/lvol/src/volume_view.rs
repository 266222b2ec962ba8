//! Where a cluster of a volume is, at the cost of a table access.

use std::sync::Arc;

use blobstore::{Blob, BlobId, BlobParent, BlobStore, ChainCluster, SnapshotChain};

/// What a channel keeps of a volume's metadata. It [follows](Self::follow) when other metadata is published,
/// which costs a look-up of the volume.
pub(crate) struct VolumeView {
    /// `None` of a volume that is not there any more, or of which a cluster has not a power of two of bytes:
    /// then nothing is found here.
    blob: Option<Arc<Blob>>,
    /// The number that the published metadata gives its chains.
    chains: u64,
    /// The snapshots below it, if it has any and their chain has an end.
    chain: Option<SnapshotChain>,
    /// Nothing is below it.
    ends_in_zeroes: bool,
    /// The logarithm of a cluster's bytes.
    cluster_shift: u32,
    /// Of the volume.
    clusters: u64,
    is_writable: bool,
}

/// Where a range of a volume is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RangePlace {
    /// At this byte of the store's device, as a whole.
    Device(u64),
    /// Nowhere: it is zero.
    Zeroes,
    /// In several places, or [`VolumeMap`](crate::volume_map::VolumeMap) knows.
    Unknown,
}

impl VolumeView {
    pub(crate) fn new() -> VolumeView {
        VolumeView {
            blob: None,
            chains: 0,
            chain: None,
            ends_in_zeroes: false,
            cluster_shift: 0,
            clusters: 0,
            is_writable: false,
        }
    }

    /// Uses this metadata of the volume.
    #[cold]
    pub(crate) fn follow(&mut self, blobs: &BlobStore, id: BlobId) {
        let cluster_bytes = blobs.layout().cluster_bytes;
        let blob = blobs.blobs().shared(id).filter(|_| cluster_bytes.is_power_of_two());
        let Some(blob) = blob else { return *self = VolumeView::new() };
        self.cluster_shift = cluster_bytes.trailing_zeros();
        self.clusters = blob.clusters().length().into();
        self.is_writable = !blob.is_read_only();
        self.ends_in_zeroes = *blob.parent() == BlobParent::None;
        let chains = blobs.blobs().chains();
        if self.blob.is_none()
            || (chains != self.chains
                && !self.chain.as_ref().is_some_and(|chain| chain.is_current(blobs, blob)))
        {
            self.chain = SnapshotChain::of(blobs, blob);
        }
        (self.chains, self.blob) = (chains, Some(blob.clone()));
    }

    /// Where a range of bytes, at least 1, is read.
    #[inline]
    pub(crate) fn read_at(&mut self, offset: u64, length: u64) -> RangePlace {
        match self.own(offset, length) {
            Some(at) => RangePlace::Device(at),
            None => self.read_elsewhere(offset, length),
        }
    }

    /// Where a range of bytes, at least 1, is written; `None` if it is not in one place of the device, or must
    /// not be.
    #[inline]
    pub(crate) fn write_at(&self, offset: u64, length: u64) -> Option<u64> {
        if self.is_writable {
            self.own(offset, length).or_else(|| self.own_run(offset, length))
        } else {
            None
        }
    }

    fn index(&self, offset: u64) -> (u64, u64) {
        (offset >> self.cluster_shift, offset & ((1 << self.cluster_shift) - 1))
    }

    fn place(&self, cluster: u32, within: u64) -> u64 {
        (u64::from(cluster) << self.cluster_shift) + within
    }

    /// Where a range in one cluster is that the volume has.
    #[inline]
    fn own(&self, offset: u64, length: u64) -> Option<u64> {
        let blob = self.blob.as_ref()?;
        let (index, within) = self.index(offset);
        if within + length > 1 << self.cluster_shift || index >= self.clusters {
            return None;
        }
        // A blob has fewer clusters than 2^32.
        let cluster = blob.clusters().get(index as u32)?;
        Some(self.place(cluster, within))
    }

    /// The same of a range in several clusters that follow each other.
    fn own_run(&self, offset: u64, length: u64) -> Option<u64> {
        let blob = self.blob.as_ref()?;
        let (index, within) = self.index(offset);
        let wanted = (within + length).div_ceil(1 << self.cluster_shift);
        if index.checked_add(wanted)? > self.clusters {
            return None;
        }
        let run = blob.clusters().run_within(index as u32, wanted as u32);
        let cluster = run.cluster.filter(|_| u64::from(run.length) >= wanted)?;
        Some(self.place(cluster, within))
    }

    /// Where a range is that is not in one cluster of the volume.
    #[inline(never)]
    fn read_elsewhere(&mut self, offset: u64, length: u64) -> RangePlace {
        let (index, within) = self.index(offset);
        if self.blob.is_none() || index >= self.clusters {
            return RangePlace::Unknown;
        }
        if within + length > 1 << self.cluster_shift {
            return self.own_run(offset, length).map_or(RangePlace::Unknown, RangePlace::Device);
        }
        if self.ends_in_zeroes {
            return RangePlace::Zeroes;
        }
        match self.chain.as_mut().map(|chain| chain.cluster(index as u32)) {
            Some(ChainCluster::Cluster(cluster)) => RangePlace::Device(self.place(cluster, within)),
            Some(ChainCluster::Zeroes) => RangePlace::Zeroes,
            Some(ChainCluster::Unknown) | None => RangePlace::Unknown,
        }
    }
}
