//! The state of a device that all cores with virtqueues of it have.

use dma::Pool;
use wire_virtio::Features;

use crate::device::VhostDevice;
use crate::dirty_log::{DirtyLog, SharedDirtyLog};
use crate::inflight_region::{InflightRegion, SharedInflightRegion};
use crate::memory::{MemoryError, RemovedRegions, SharedGuestRegion};

/// What the front-end has set for all virtqueues, on its way to another core. Memory stays mapped once.
pub(crate) struct DeviceState {
    features: Features,
    writeback: bool,
    memory: Vec<SharedGuestRegion>,
    inflight: Option<SharedInflightRegion>,
    dirty_log: Option<SharedDirtyLog>,
}

impl VhostDevice {
    /// The device's state, for another core.
    pub(crate) fn share_state(&self) -> DeviceState {
        DeviceState {
            features: self.features,
            writeback: self.writeback,
            memory: self.memory.share(),
            inflight: self.inflight.as_ref().map(InflightRegion::share),
            dirty_log: self.dirty_log.as_ref().map(DirtyLog::share),
        }
    }

    /// Applies the state of another core. Returns the memory that was removed.
    ///
    /// # Errors
    /// There is no room for regions; some have been removed.
    pub(crate) fn apply_state(
        &mut self,
        state: DeviceState,
        pool: &Pool,
        now_ns: u64,
    ) -> Result<RemovedRegions, MemoryError> {
        self.features = state.features;
        self.writeback = state.writeback;
        self.inflight = state.inflight.map(InflightRegion::from);
        self.dirty_log = state.dirty_log.map(DirtyLog::from);
        let removed = self.memory.replace(pool, state.memory)?;
        self.update_queues(now_ns);
        Ok(removed)
    }
}
