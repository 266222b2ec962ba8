//! Stores in volumes of other stores.
//!
//! The hosts of a volume write what they like to it, a store too. Were it used, it would keep the volume from
//! being exported again, and its name could be that of another store, which then is refused. So a store in a
//! volume, or in a device that stands on one, is used only if an operator has said so: by making it there
//! with `bdev_lvol_create_lvstore`, or with `bdev_examine`. An attribute of the volume, which its hosts
//! cannot write, says so from then on.

use std::sync::Arc;
use std::time::Duration;

use bdev::BlockDevice;
use blobstore::BlobChange;

use crate::module::LvolStores;
use crate::owner;
use crate::store::{LvolStore, Volume, has_nested_store, nested_store_xattr};
use crate::volume::LvolBdev;

/// How long it is waited until an attribute is written.
const MARK_TIMEOUT: Duration = Duration::from_secs(10);

impl LvolStores {
    /// Whether a store on the device is used without a request: each volume that it stands on, if any, has
    /// the attribute.
    pub(crate) fn may_have_store(&self, device: &Arc<BlockDevice>) -> bool {
        self.volumes_below(device).iter().all(|(store, volume)| is_marked(store, volume))
    }

    /// Sets the attribute of each volume that the device stands on.
    pub(crate) fn mark_volumes_below(&self, device: &Arc<BlockDevice>) {
        for (store, volume) in self.volumes_below(device) {
            if is_marked(&store, &volume) {
                continue;
            }
            let set = vec![nested_store_xattr()];
            let change = BlobChange::SetXattrs { blob: volume.blob, set, remove: Vec::new() };
            let failure = match owner::begin(&store.shared, change).wait_for(MARK_TIMEOUT) {
                Some(Ok(_)) => continue,
                Some(Err(error)) => error.to_string(),
                None => "its device does not answer".to_string(),
            };
            log::warn!(
                target: "lvol",
                "the store in the volume {} is not used by itself at the next start: {failure}; bdev_examine has it used",
                store.alias(&volume)
            );
        }
    }

    /// The volumes that a device stands on, or is.
    fn volumes_below(&self, device: &Arc<BlockDevice>) -> Vec<(Arc<LvolStore>, Arc<Volume>)> {
        let devices = std::iter::once(device.clone()).chain(self.registry.below(device));
        let of = |device: Arc<BlockDevice>| {
            let volume = device.module::<LvolBdev>()?;
            Some((volume.store().clone(), volume.volume()?))
        };
        devices.filter_map(of).collect()
    }
}

fn is_marked(store: &LvolStore, volume: &Volume) -> bool {
    store.shared.published().blob(volume.blob).is_some_and(has_nested_store)
}
