//! The end of the program: stores are unloaded, so that they are clean on their devices.
//!
//! Targets have disconnected their hosts before, and what is left of users, such as a mirror that copies,
//! ends with the reactors. Volumes stay open for it: reads, and writes to clusters that a volume has, are
//! done as ever. A first write to a cluster would make the store unclean again; it waits, as an error would
//! be taken for one of the volume, and ends with the program.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::BlockDevice;
use blobstore::BlobChange;

use crate::module::LvolStores;
use crate::owner;
use crate::store::LvolStore;
use crate::volume::LvolBdev;

impl LvolStores {
    /// Unloads all stores that can be changed, those on volumes of others before these: all on one level
    /// together. Each level has `timeout`: a device that does not answer keeps nothing for ever.
    pub(crate) fn unload_all(&self, timeout: Duration) {
        let mut left = self.all();
        left.retain(|store| store.shared.is_writable());
        loop {
            let (below, stores) = self.split_below(left);
            if stores.is_empty() {
                return;
            }
            unload(&stores, timeout);
            left = below;
        }
    }

    /// Those of the stores that others of them stand on, and those that none does.
    fn split_below(&self, stores: Vec<Arc<LvolStore>>) -> (Vec<Arc<LvolStore>>, Vec<Arc<LvolStore>>) {
        let mut devices: Vec<Arc<BlockDevice>> = Vec::new();
        for store in &stores {
            let base = store.base.device();
            devices.extend(self.registry.below(base).into_iter().chain([base.clone()]));
        }
        let is_of = |device: &Arc<BlockDevice>, store: &Arc<LvolStore>| {
            device.module::<LvolBdev>().is_some_and(|volume| volume.is_of(store))
        };
        stores.into_iter().partition(|store| devices.iter().any(|device| is_of(device, store)))
    }
}

fn unload(stores: &[Arc<LvolStore>], timeout: Duration) {
    let begin = |store: &Arc<LvolStore>| {
        store.begin_removal();
        owner::begin(&store.shared, BlobChange::Unload)
    };
    let unloads: Vec<_> = stores.iter().map(begin).collect();
    let end = Instant::now() + timeout;
    for (store, unload) in stores.iter().zip(unloads) {
        let title = format!("the logical volume store {}", store.name());
        match unload.wait_for(end.saturating_duration_since(Instant::now())) {
            Some(Ok(_)) => log::debug!(target: "lvol", "{title} is unloaded"),
            Some(Err(error)) => log::warn!(target: "lvol", "{title} is not unloaded: {error}"),
            None => {
                let base = store.base.device().name();
                log::warn!(target: "lvol", "{title} is not unloaded: {base} has not answered in {timeout:?}");
            }
        }
    }
}
