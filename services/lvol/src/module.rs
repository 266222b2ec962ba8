//! The module: which devices have stores, and which volumes are there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use bdev::stacking::BaseBdev;
use bdev::{BdevError, BlockDevice, ClaimType, DeviceEvent, DiskReader, Registry, Uuid};
use blobstore::StoreSeverity;
use control::json::{Value, json};
use control::{Examination, Method, Module, RpcError};
use reactor::ReactorHandle;
use wire_blob::{PAGE_BYTES, SuperBlock};

use crate::load::{LoadedStore, StoreLoads};
use crate::store::{ChainEnd, LvolStore, STORE_TYPE, Volume};
use crate::volume::{LvolBdev, VolumeError, register};

/// The first bytes of every blobstore.
const SIGNATURE: &[u8] = b"SPDKBLOB";
/// Lines of the log about one store; more are counted.
const PROBLEMS_LOGGED_MAX: usize = 20;

/// Logical volumes as a [`Module`]: stores are found on devices that appear, and their volumes can be read.
pub struct LvolModule {
    reader: Option<DiskReader>,
    loads: StoreLoads,
    pub(crate) stores: Arc<LvolStores>,
}

/// The stores that are used.
pub(crate) struct LvolStores {
    registry: Registry,
    /// Not locked during calls of the registry, whose events lock it.
    by_uuid: Mutex<BTreeMap<Uuid, UsedStore>>,
}

/// A store and its device.
#[derive(Clone)]
pub(crate) struct UsedStore {
    pub(crate) store: Arc<LvolStore>,
    pub(crate) base: Arc<BaseBdev>,
}

impl LvolModule {
    /// Finds stores on devices of `registry`, which are read on the first of the reactors.
    pub fn new(registry: Registry, reactors: &[ReactorHandle]) -> Arc<LvolModule> {
        let reader = reactors.first().map(|reactor| DiskReader::new(registry.clone(), reactor.clone()));
        let stores = Arc::new(LvolStores { registry, by_uuid: Mutex::default() });
        Arc::new(LvolModule { reader, loads: StoreLoads::new(), stores })
    }
}

impl Module for LvolModule {
    const NAME: &'static str = "bdev_lvol";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];

    fn methods() -> Vec<Method<LvolModule>> {
        crate::methods::methods()
    }

    fn start(&self) -> Result<(), RpcError> {
        let stores = Arc::downgrade(&self.stores);
        self.stores.registry.subscribe(Box::new(move |event| {
            if let DeviceEvent::Removed(device) = event
                && let Some(stores) = stores.upgrade()
            {
                stores.forget_base(device);
            }
        }));
        let Some(reader) = self.reader.clone() else { return Ok(()) };
        let (registry, stores) = (self.stores.registry.clone(), self.stores.clone());
        let adopt = move |loaded: LoadedStore, examination: Examination| {
            let stores = stores.clone();
            examination.finish(move || stores.adopt(loaded));
        };
        self.loads.start(registry, reader, Box::new(adopt)).map_err(RpcError::internal)
    }

    /// The volumes go before the devices that they are on.
    fn stop(&self) {
        for used in self.stores.all() {
            for volume in &used.store.volumes {
                if self.stores.device(&used, volume).is_some() {
                    // An error means that it is gone already.
                    _ = self.stores.registry.unregister(&volume.bdev_name);
                }
            }
        }
        let all = std::mem::take(&mut *self.stores.lock());
        drop(all);
    }

    fn examine_config(&self, bdev: &str) {
        self.stores.appeared(bdev);
    }

    fn examine_disk(&self, bdev: &str, examination: Examination) {
        let (Some(reader), Some(device)) = (&self.reader, self.stores.registry.find(bdev)) else { return };
        let block_size = device.geometry().block_size;
        if !self.stores.is_examined(&device) {
            return;
        }
        let queue = self.loads.queue();
        reader.read(bdev, 0, PAGE_BYTES as u32 / block_size, move |read| match read {
            Ok(page) if has_lvol_store(&page, examination.bdev()) => queue.push(examination),
            Ok(_) => {}
            Err(error) => log::debug!(target: "lvol", "{} is not examined: {error}", examination.bdev()),
        });
    }

    fn report(&self) -> Value {
        let stores = self.stores.all();
        let volumes: usize = stores.iter().map(|used| used.store.volumes.len()).sum();
        let is_there = |used: &UsedStore| {
            used.store.volumes.iter().filter(|volume| self.stores.device(used, volume).is_some()).count()
        };
        let bdevs: usize = stores.iter().map(is_there).sum();
        json!({ "stores": stores.len(), "volumes": volumes, "bdevs": bdevs, "access": "read-only" })
    }
}

/// Whether the first bytes of a device are those of a store of logical volumes.
fn has_lvol_store(page: &[u8], bdev: &str) -> bool {
    if !page.starts_with(SIGNATURE) {
        return false;
    }
    match SuperBlock::decode(page) {
        Ok(super_block) => super_block.store_type_text() == STORE_TYPE,
        Err(error) => {
            log::warn!(target: "lvol", "{bdev} has a blobstore that cannot be used: {error}");
            false
        }
    }
}

impl LvolStores {
    /// All stores, by UUID.
    pub(crate) fn all(&self) -> Vec<UsedStore> {
        self.lock().values().cloned().collect()
    }

    /// The block device of a volume, if it has one.
    pub(crate) fn device(&self, used: &UsedStore, volume: &Volume) -> Option<Arc<BlockDevice>> {
        let device = self.registry.find(&volume.bdev_name)?;
        device.module::<LvolBdev>().is_some_and(|module| module.is_of(&used.store)).then_some(device)
    }

    /// Whether data of the volume is missing.
    pub(crate) fn is_degraded(&self, used: &UsedStore, volume: &Volume) -> bool {
        match volume.end {
            ChainEnd::Zeroes => false,
            ChainEnd::External(_) => self.device(used, volume).is_none(),
            ChainEnd::Missing(_) | ChainEnd::Cycle => true,
        }
    }

    /// Whether the device may have a store that is not used yet. One with metadata beside its blocks never
    /// has, nor one whose owner is another.
    fn is_examined(&self, device: &Arc<BlockDevice>) -> bool {
        let geometry = device.geometry();
        let is_owned = device.claim().is_some_and(|(kind, _)| kind != ClaimType::ReadManyWriteNone);
        let is_used = self.lock().values().any(|used| Arc::ptr_eq(used.base.device(), device));
        geometry.metadata.bytes == 0
            && (PAGE_BYTES as u32).is_multiple_of(geometry.block_size)
            && geometry.bytes() >= PAGE_BYTES as u64
            && !is_owned
            && !is_used
    }

    /// Uses a store that was loaded, unless it is there already.
    fn adopt(&self, loaded: LoadedStore) {
        let LoadedStore { base, blobs } = loaded;
        let device = base.device().clone();
        if device.is_removed() {
            return;
        }
        let name = device.name();
        let refuse = |reason: &dyn std::fmt::Display| {
            log::warn!(target: "lvol", "the logical volume store on {name} is not used: {reason}");
        };
        let (block_size, io_unit) = (device.geometry().block_size, blobs.super_block().io_unit_bytes);
        if !io_unit.is_multiple_of(block_size) {
            return refuse(&format!("its blocks have {io_unit} bytes, and those of the device {block_size}"));
        }
        let findings: Vec<(StoreSeverity, String)> =
            blobs.findings().iter().map(|finding| (finding.severity(), finding.to_string())).collect();
        let mut problems = Vec::new();
        let store = match LvolStore::new(blobs, &mut problems) {
            Ok(store) => Arc::new(store),
            Err(error) => return refuse(&error),
        };
        let used = UsedStore { store: store.clone(), base };
        if let Err(reason) = self.insert(&used) {
            if let Some(reason) = reason {
                refuse(&reason);
            }
            return;
        }
        let title = format!("the logical volume store {} on {name}", store.name);
        log::info!(target: "lvol", "{title} has {} volumes, which are read-only here", store.volumes.len());
        log_findings(&title, &findings, &problems);
        for index in 0..store.volumes.len() {
            self.register(&used, index);
        }
        // Its removal was reported before it was there.
        if device.is_removed() {
            self.forget_base(&device);
        }
    }

    /// Adds a store; fails with the reason if it is another's, or without if its device has it already.
    fn insert(&self, used: &UsedStore) -> Result<(), Option<String>> {
        let (store, device) = (&used.store, used.base.device());
        let mut stores = self.lock();
        if let Some(present) = stores.get(&store.uuid) {
            let other = present.base.device();
            let reason = format!(
                "{} has a store of the same UUID, {}, and so one of both is a copy; remove one of both devices",
                other.name(),
                store.uuid
            );
            return Err((!Arc::ptr_eq(other, device)).then_some(reason));
        }
        if let Some(present) = stores.values().find(|present| present.store.name == store.name) {
            let other = present.base.device().name();
            return Err(Some(format!("{other} has another store of the same name, {}", store.name)));
        }
        stores.insert(store.uuid, used.clone());
        Ok(())
    }

    /// Registers a volume, if its data is there.
    fn register(&self, used: &UsedStore, index: usize) {
        let (store, volume) = (&used.store, &used.store.volumes[index]);
        if matches!(volume.end, ChainEnd::Missing(_) | ChainEnd::Cycle) {
            return;
        }
        match register(&self.registry, store, index, &used.base) {
            Ok(()) => {}
            Err(VolumeError::NoExternal(name)) => {
                let alias = store.alias(volume);
                log::info!(target: "lvol", "the logical volume {alias} waits for its external snapshot {name}");
            }
            // That is reported of the store.
            Err(VolumeError::Bdev(BdevError::Removed { .. })) if used.base.device().is_removed() => {}
            Err(error) => {
                let alias = store.alias(volume);
                log::warn!(target: "lvol", "the logical volume {alias} has no bdev: {error}");
            }
        }
    }

    /// Registers the volumes that wait for a device which has appeared.
    fn appeared(&self, bdev: &str) {
        let Some(device) = self.registry.find(bdev) else { return };
        for used in self.all() {
            for (index, volume) in used.store.volumes.iter().enumerate() {
                let Some(external) = used.store.external_name(volume) else { continue };
                let is_this = self.registry.find(&external).is_some_and(|found| Arc::ptr_eq(&found, &device));
                if is_this && self.device(&used, volume).is_none() {
                    self.register(&used, index);
                }
            }
        }
    }

    /// Forgets the store of a device that was removed. The volumes go with the device.
    fn forget_base(&self, device: &Arc<BlockDevice>) {
        let mut stores = self.lock();
        let gone = stores.extract_if(.., |_, used| Arc::ptr_eq(used.base.device(), device));
        let gone: Vec<(Uuid, UsedStore)> = gone.collect();
        drop(stores);
        for (uuid, used) in gone {
            let (name, base) = (&used.store.name, device.name());
            log::info!(target: "lvol", "the logical volume store {name} ({uuid}) has gone with {base}");
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Uuid, UsedStore>> {
        // Each change is one call.
        sync::lock(&self.by_uuid)
    }
}

fn log_findings(title: &str, findings: &[(StoreSeverity, String)], problems: &[String]) {
    for (severity, finding) in findings.iter().take(PROBLEMS_LOGGED_MAX) {
        match severity {
            StoreSeverity::Note => log::info!(target: "lvol", "{title}: {finding}"),
            StoreSeverity::Leak | StoreSeverity::Damage => log::warn!(target: "lvol", "{title}: {finding}"),
        }
    }
    for problem in problems.iter().take(PROBLEMS_LOGGED_MAX) {
        log::warn!(target: "lvol", "{title}: {problem}");
    }
    let left = |count: usize| count.saturating_sub(PROBLEMS_LOGGED_MAX);
    let more = left(findings.len()) + left(problems.len());
    if more > 0 {
        log::warn!(target: "lvol", "{title}: {more} more findings");
    }
}
