//! The devices that verify the data of stores: put on those that an operator has named, and removed.

use std::sync::Arc;
use std::time::Duration;

use bdev::stacking::BaseBdev;
use bdev::{Access, BdevError, BlockDevice, Closing, DiskReader};
use bdev_checksums::{ChecksumBdev, ChecksumLayout};
use blobstore::{BlobStore, BlobStoreLayout};
use control::Examination;
use wire_blob::{ChecksumHeader, ChecksumsId, PAGE_BYTES};

use crate::checksums::{checksums_of, describe_of, has_checksums, used_regions};
use crate::load::{CLAIM_HOLDER, LoadQueue};
use crate::module::LvolStores;
use crate::store::LvolStore;

/// How long it is waited until checksums are there, or all are written.
const CHECKSUMS_TIMEOUT: Duration = Duration::from_secs(30);

/// A device that is not examined, as a store is being made on it.
pub(crate) struct NotExamined {
    stores: Arc<LvolStores>,
    bdev: String,
}

impl Drop for NotExamined {
    fn drop(&mut self) {
        sync::lock(&self.stores.making).remove(&self.bdev);
    }
}

impl LvolStores {
    /// Looks for checksums after the end of the store on a device, and puts the device that verifies data on
    /// it if there are some. Otherwise the store is loaded as it is.
    pub(crate) fn find_checksums(
        self: &Arc<Self>,
        reader: &DiskReader,
        store_bytes: u64,
        examination: Examination,
        queue: LoadQueue,
    ) {
        let Some(device) = self.registry.find(examination.bdev()) else { return };
        let (stores, block_size) = (self.clone(), device.geometry().block_size);
        let (lba, blocks) = (store_bytes / u64::from(block_size), PAGE_BYTES as u32 / block_size);
        reader.read(device.name(), lba, blocks, move |read| {
            let page = match read {
                Ok(page) => page,
                // Without its checksums its data could be changed, and they not.
                Err(error) => {
                    log::warn!(
                        target: "lvol",
                        "the logical volume store on {} is not used: what follows its end cannot be read: {error}",
                        examination.bdev()
                    );
                    return;
                }
            };
            match ChecksumHeader::decode(&page).filter(|header| header.data_bytes == store_bytes) {
                Some(header) => {
                    let (bdev, is_requested) = (examination.bdev().to_string(), examination.is_requested());
                    let examiner = examination.examiner();
                    examination.finish(move || {
                        let stacked = stores.stack_checksums(&bdev, header, is_requested);
                        // Otherwise it is examined as any device that appears, or not at all.
                        if let Some(device) = stacked.filter(|_| is_requested) {
                            examiner.request(device.name());
                        }
                    });
                }
                None => queue.push(examination),
            }
        });
    }

    /// Puts the device that verifies data on one that has a store with checksums, which is found there when
    /// the new device is examined.
    fn stack_checksums(
        &self,
        bdev: &str,
        header: ChecksumHeader,
        is_requested: bool,
    ) -> Option<Arc<BlockDevice>> {
        let refuse = |reason: &dyn std::fmt::Display| {
            log::warn!(target: "lvol", "the logical volume store on {bdev} is not used: {reason}");
        };
        let access = Access::ReadManyWriteOne { by: CLAIM_HOLDER };
        let base = BaseBdev::open(&self.registry, bdev, access).inspect_err(|error| refuse(error)).ok()?;
        let bytes = base.device().geometry().bytes();
        let Some(layout) = ChecksumLayout::of(&header, bytes) else {
            refuse(&format!(
                "the checksums of its data end after the {bytes} bytes of the device, which had more when the \
                 store was made; give it the size that it had"
            ));
            return None;
        };
        if is_requested {
            self.mark_volumes_below(base.device());
        }
        let reactor = self.next_reactor()?;
        bdev_checksums::register(&self.registry, reactor, Arc::new(base), layout, header.id)
            .inspect_err(|error| refuse(error))
            .ok()
    }

    /// The checksums that a loaded store on `device` has from now on. The second is whether they are those of
    /// its data; otherwise they are computed anew.
    pub(crate) fn checksums_for(
        &self,
        device: &BlockDevice,
        blobs: &BlobStore,
    ) -> Option<(ChecksumsId, bool)> {
        let Some(module) = checksums_of(device) else {
            if has_checksums(blobs) {
                log::warn!(
                    target: "lvol",
                    "the store on {} was made with checksums of its data, which are not there: it is \
                     read-only here, or another program has extended it; data is not verified",
                    device.name()
                );
            }
            return None;
        };
        let is_believed = blobs.checksums() == Some(module.id());
        Some((if is_believed { module.id() } else { ChecksumBdev::new_id() }, is_believed))
    }

    /// Begins to verify the data of a store that was loaded as `blobs`.
    pub(crate) fn begin_checksums(
        &self,
        store: &Arc<LvolStore>,
        blobs: &BlobStore,
        (id, is_believed): (ChecksumsId, bool),
    ) {
        let Some(module) = checksums_of(store.base.device()) else { return };
        let describe = describe_of(store);
        if is_believed {
            return module.begin(describe);
        }
        log::warn!(
            target: "lvol",
            "a program that does not know the checksums of the store {} has changed it, or ended before it \
             said whose they are: they are computed anew, and what is damaged now is not noticed",
            store.name()
        );
        module.begin_anew(id, used_regions(blobs), describe);
    }

    /// Puts the device that verifies data on the one of a new store, and begins when the store is there.
    pub(crate) fn create_checksums(
        &self,
        base: &Arc<BaseBdev>,
        data_bytes: u64,
        layout: &BlobStoreLayout,
    ) -> Result<Arc<BlockDevice>, BdevError> {
        let data_start = layout.cluster_offset(layout.metadata_clusters);
        let header = ChecksumHeader { id: ChecksumBdev::new_id(), data_start, data_bytes };
        let layout = ChecksumLayout::of(&header, base.device().geometry().bytes());
        let removed = || BdevError::Removed { name: base.device().name().to_string() };
        let layout = layout.ok_or_else(removed)?;
        let reactor = self.next_reactor().ok_or_else(removed)?;
        bdev_checksums::register(&self.registry, reactor, base.clone(), layout, header.id)
    }

    /// Has a device not examined while the result is there: a store is being made on it.
    pub(crate) fn not_examined(self: &Arc<Self>, bdev: String) -> NotExamined {
        sync::lock(&self.making).insert(bdev.clone());
        NotExamined { stores: self.clone(), bdev }
    }

    /// Begins to verify the data of a new store. Returns whether its checksums are there in time.
    pub(crate) fn begin_new_checksums(&self, store: &Arc<LvolStore>) -> bool {
        let Some(module) = checksums_of(store.base.device()) else { return true };
        let describe = describe_of(store);
        module.begin_anew(module.id(), Vec::new(), describe);
        module.wait_started(CHECKSUMS_TIMEOUT)
    }

    /// As [`remove_checksums`](Self::remove_checksums), if no store is on the device: one was refused.
    pub(crate) fn remove_unused_checksums(&self, device: &Arc<BlockDevice>) {
        if !self.all().iter().any(|store| Arc::ptr_eq(store.base.device(), device)) {
            self.remove_checksums(device);
        }
    }

    /// Removes the device that verifies data, of which no store is left, so that the one below is free.
    pub(crate) fn remove_checksums(&self, device: &Arc<BlockDevice>) {
        let Some(module) = checksums_of(device) else { return };
        // Gone already, if the device below was removed.
        if self.registry.unregister(device.name()).is_ok() {
            _ = Closing::removed([device.clone()]).wait();
            module.wait_closed(CHECKSUMS_TIMEOUT);
        }
    }

    /// Writes all checksums, after the stores are unloaded: the next start then has nothing to compute.
    pub(crate) fn settle_checksums(&self, timeout: Duration) {
        for store in self.all() {
            let Some(module) = checksums_of(store.base.device()) else { continue };
            if !module.settle(timeout) {
                log::warn!(
                    target: "lvol",
                    "not all checksums of the store {} are written: the next start computes the others",
                    store.name()
                );
            }
        }
    }
}
