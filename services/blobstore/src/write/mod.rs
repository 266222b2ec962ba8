//! A store that is open for changes.

mod change;
mod device;

use std::collections::VecDeque;
use std::sync::Arc;

use wire_blob::BlobId;

pub use change::{
    BlobChange, BlobStoreFormat, ChangeError, ChangeId, ChangeOutcome, ChangeProgress, ClearMethod,
    StoreEvent,
};
pub use device::{BlobStoreDevice, StoreAction, StoreIo, StoreIoFailed};

use crate::store::BlobStore;

/// A store that is open for changes, on the core that owns it. Sans-IO.
///
/// [`begin`](Self::begin) starts changes; after it and each other call, [`next_io`](Self::next_io) and
/// [`next_event`](Self::next_event) are to be called until they return nothing. Each I/O is completed by
/// [`complete`](Self::complete), in any order.
///
/// Other cores read and write by [`published`](Self::published), a state that does not change, and ask the
/// owner only for a first write to a cluster.
pub struct OpenBlobStore {
    published: Arc<BlobStore>,
    epoch: u64,
    next_change: u64,
    events: VecDeque<StoreEvent>,
}

impl OpenBlobStore {
    /// Opens a loaded store for changes. What loading decided about operations that were cut in two is written
    /// before any change. Opening alone writes nothing to a store that was unloaded.
    pub fn open(store: BlobStore, device: BlobStoreDevice) -> OpenBlobStore {
        let _ = device;
        OpenBlobStore { published: Arc::new(store), epoch: 0, next_change: 0, events: VecDeque::new() }
    }

    /// Makes a new store. The change whose id is returned with it is done when the store is on the device;
    /// until then there is none.
    ///
    /// # Errors
    /// [`ChangeError::Invalid`] for sizes that no store can have, [`ChangeError::NoPages`] if the metadata
    /// does not fit, [`ChangeError::NoClusters`] if the device is smaller than a cluster.
    pub fn format(
        options: &BlobStoreFormat,
        device: BlobStoreDevice,
    ) -> Result<(OpenBlobStore, ChangeId), ChangeError> {
        let _ = (options, device);
        Err(ChangeError::Broken)
    }

    /// Begins a change. How it ended is an event with the id.
    pub fn begin(&mut self, change: BlobChange) -> ChangeId {
        let _ = change;
        let change = ChangeId(self.next_change);
        self.next_change += 1;
        self.events.push_back(StoreEvent::Done { change, result: Err(ChangeError::Broken) });
        change
    }

    /// Ends a change early, if that is safe: before it started, or between two clusters of
    /// [`BlobChange::Inflate`] and [`BlobChange::Decouple`]. Its event follows, with [`ChangeError::Cancelled`]
    /// if it was in time.
    pub fn cancel(&mut self, change: ChangeId) {
        let _ = change;
    }

    /// How far a change is that has begun and not ended.
    pub fn progress(&self, change: ChangeId) -> Option<ChangeProgress> {
        let _ = change;
        None
    }

    /// An I/O to begin now. Its bytes belong to the caller.
    pub fn next_io(&mut self) -> Option<StoreIo> {
        None
    }

    /// Completes an I/O.
    ///
    /// # Panics
    /// If no I/O with this id is in flight.
    pub fn complete(&mut self, id: u64, result: Result<(), StoreIoFailed>) {
        let _ = (id, result);
    }

    /// The next event, in the order in which they happened.
    pub fn next_event(&mut self) -> Option<StoreEvent> {
        self.events.pop_front()
    }

    /// The state that channels read and write by, since the last [`StoreEvent::Published`]. The state at open
    /// is that of epoch 0.
    pub fn published(&self) -> &Arc<BlobStore> {
        &self.published
    }

    /// Number of the published state.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// States before `epoch` are no longer used: no channel has one, and no I/O by one is in flight.
    pub fn release(&mut self, epoch: u64) {
        let _ = epoch;
    }

    /// Answers [`StoreEvent::Pause`]: no write to the blob is in flight.
    pub fn paused(&mut self, blob: BlobId) {
        let _ = blob;
    }

    /// Answers [`StoreEvent::WriteCluster`]. After a failure, the cluster stays unallocated.
    pub fn cluster_written(&mut self, change: ChangeId, result: Result<(), StoreIoFailed>) {
        let _ = (change, result);
    }

    /// Clusters that are not in use, those included that are yet to be cleared.
    pub fn free_clusters(&self) -> u32 {
        self.published.free_clusters()
    }

    /// Sets the limit of [`StoreEvent::LowSpace`], in clusters; 0, the default, for none.
    pub fn set_low_space(&mut self, clusters: u32) {
        let _ = clusters;
    }

    /// Whether nothing is in flight or waits: no change, no cleaning up, no recovery.
    pub fn is_idle(&self) -> bool {
        true
    }

    /// Whether the store takes no changes any more, because a write of metadata failed, or after it was
    /// unloaded or destroyed.
    pub fn is_closed(&self) -> bool {
        false
    }
}
