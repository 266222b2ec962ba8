//! The module: which devices have stores, and which volumes are there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bdev::{BdevError, BlockDevice, ClaimType, Closing, DeviceEvent, DiskReader, Registry, Uuid};
use blobstore::{OpenBlobStore, StoreFinding, StoreSeverity};
use control::json::{Value, json};
use control::{Examination, Method, Metric, MetricSamples, Module, RpcError};
use reactor::ReactorHandle;
use wire_blob::{PAGE_BYTES, SuperBlock};

use crate::blob_store_device;
use crate::chain_end::{ChainEnd, chain_end, chain_ends, external_of};
use crate::checksums::checksums_of;
use crate::load::{LoadedStore, StoreLoads};
use crate::owner;
use crate::shallow_copy::ShallowCopies;
use crate::shared::StoreShared;
use crate::store::{LvolStore, STORE_TYPE, Volume};
use crate::volume::{LvolBdev, VolumeError, register};

/// The first bytes of every blobstore.
const SIGNATURE: &[u8] = b"SPDKBLOB";
/// Lines of the log about one store; more are counted.
const PROBLEMS_LOGGED_MAX: usize = 20;
/// How long the end of the program waits for the stores that it unloads together.
const UNLOAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Logical volumes as a [`Module`]: stores are found on devices that appear, or created on them.
pub struct LvolModule {
    reader: Option<DiskReader>,
    loads: StoreLoads,
    unload_timeout: Duration,
    pub(crate) stores: Arc<LvolStores>,
}

/// The stores that are used.
pub(crate) struct LvolStores {
    pub(crate) registry: Registry,
    /// Not locked during calls of the registry, whose events lock it.
    by_uuid: Mutex<BTreeMap<Uuid, Arc<LvolStore>>>,
    /// Names of stores that are being created or renamed.
    reserved: Mutex<BTreeSet<String>>,
    /// Where the owners of stores run, in turn.
    reactors: Vec<ReactorHandle>,
    next_reactor: AtomicUsize,
    pub(crate) copies: ShallowCopies,
    /// Devices on which a store is being made, and which are not examined therefore.
    pub(crate) making: Mutex<BTreeSet<String>>,
}

impl LvolModule {
    /// Finds stores on devices of `registry`, which are read on the first of the reactors.
    pub fn new(registry: Registry, reactors: &[ReactorHandle]) -> Arc<LvolModule> {
        LvolModule::with_unload_timeout(registry, reactors, UNLOAD_TIMEOUT)
    }

    /// [`new`](Self::new), with the time that the end of the program waits for stores, 10 s by default: for
    /// all whose devices are not volumes of other stores, and for each level of those that are.
    pub fn with_unload_timeout(
        registry: Registry,
        reactors: &[ReactorHandle],
        unload_timeout: Duration,
    ) -> Arc<LvolModule> {
        let reader = reactors.first().map(|reactor| DiskReader::new(registry.clone(), reactor.clone()));
        let stores = Arc::new(LvolStores {
            registry,
            by_uuid: Mutex::default(),
            reserved: Mutex::default(),
            reactors: reactors.to_vec(),
            next_reactor: AtomicUsize::new(0),
            copies: ShallowCopies::default(),
            making: Mutex::default(),
        });
        Arc::new(LvolModule { reader, loads: StoreLoads::new(), unload_timeout, stores })
    }
}

control::metrics! {
    /// Of stores of logical volumes.
    static LVOL_METRICS {
        /// Clusters of a store of logical volumes that no volume has
        FREE_CLUSTERS = "ringbolt_lvol_free_clusters": gauge [lvstore];
        /// Clusters of a store of logical volumes for data
        TOTAL_CLUSTERS = "ringbolt_lvol_total_clusters": gauge [lvstore];
        /// Reads of a store with checksums whose data was other than what was written
        CHECKSUM_MISMATCHES = "ringbolt_lvol_checksum_mismatches": counter [lvstore];
        /// MiB of a store whose checksums are not on its device yet
        UNWRITTEN_CHECKSUMS = "ringbolt_lvol_checksums_unwritten_mib": gauge [lvstore];
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
            let Some(stores) = stores.upgrade() else { return };
            match event {
                DeviceEvent::Removed(device) => stores.forget_base(device),
                DeviceEvent::Resized(device) => stores.base_resized(device),
                DeviceEvent::Registered(_) => {}
            }
        }));
        let Some(reader) = self.reader.clone() else { return Ok(()) };
        let (registry, stores) = (self.stores.registry.clone(), self.stores.clone());
        let adopt = move |loaded: LoadedStore, examination: Examination| {
            let stores = stores.clone();
            let is_requested = examination.is_requested();
            examination.finish(move || stores.adopt(loaded, is_requested));
        };
        let stores = Arc::downgrade(&self.stores);
        let refused = move |device: &Arc<BlockDevice>| {
            if let Some(stores) = stores.upgrade() {
                stores.remove_unused_checksums(device);
            }
        };
        self.loads.start(registry, reader, Box::new(adopt), Box::new(refused)).map_err(RpcError::internal)
    }

    /// Unloads the stores, so that they are clean on their devices. Targets have disconnected their hosts.
    fn drain(&self) {
        self.stores.unload_all(self.unload_timeout);
        self.stores.settle_checksums(self.unload_timeout);
    }

    /// The volumes go before the devices that they are on.
    fn stop(&self) {
        for store in self.stores.all() {
            for volume in store.volumes() {
                if self.stores.device(&store, &volume).is_some() {
                    // An error means that it is gone already.
                    _ = self.stores.registry.unregister(&volume.bdev_name);
                }
            }
            store.base.release();
            if checksums_of(store.base.device()).is_some() {
                // As for volumes.
                _ = self.stores.registry.unregister(store.base.device().name());
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
        if !self.stores.is_examined(&device) || sync::lock(&self.stores.making).contains(bdev) {
            return;
        }
        let queue = self.loads.queue();
        let (stores, checksums_reader) = (self.stores.clone(), reader.clone());
        let is_used = examination.is_requested() || self.stores.may_have_store(&device);
        reader.read(bdev, 0, PAGE_BYTES as u32 / block_size, move |read| match read {
            Ok(page) if !has_lvol_store(&page, examination.bdev()) => {}
            Ok(page) if is_used => match checksum_header_offset(&device, &page) {
                None => queue.push(examination),
                Some(offset) => stores.find_checksums(&checksums_reader, offset, examination, queue),
            },
            Ok(_) => log::info!(
                target: "lvol",
                "{} is on a logical volume and has a store of its own, which is not used: a user of the \
                 volume may have written it; bdev_examine has it used, now and at each start",
                examination.bdev()
            ),
            Err(error) => log::debug!(target: "lvol", "{} is not examined: {error}", examination.bdev()),
        });
    }

    fn metrics() -> Vec<&'static Metric> {
        LVOL_METRICS.to_vec()
    }

    fn collect(&self, samples: &mut MetricSamples) {
        for store in self.stores.all() {
            let name = store.name();
            samples.add(&FREE_CLUSTERS, &[&name], store.shared.free_clusters());
            samples.add(&TOTAL_CLUSTERS, &[&name], store.shared.published().data_clusters());
            if let Some(checksums) = checksums_of(store.base.device()) {
                samples.add(&CHECKSUM_MISMATCHES, &[&name], checksums.mismatches());
                samples.add(&UNWRITTEN_CHECKSUMS, &[&name], checksums.dirty_regions());
            }
        }
    }

    fn report(&self) -> Value {
        let stores = self.stores.all();
        let (mut volumes, mut bdevs) = (0, 0);
        for store in &stores {
            let all = store.volumes();
            volumes += all.len();
            bdevs += all.iter().filter(|volume| self.stores.device(store, volume).is_some()).count();
        }
        let read_only = stores.iter().filter(|store| !store.shared.is_writable()).count();
        json!({ "stores": stores.len(), "volumes": volumes, "bdevs": bdevs, "read_only_stores": read_only })
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

/// Where the checksums of the data would be, if the store that begins with this page has some: on a device
/// that is larger than it, and can be written.
fn checksum_header_offset(device: &BlockDevice, page: &[u8]) -> Option<u64> {
    let store_bytes = SuperBlock::decode(page).ok()?.size_bytes?;
    let end = store_bytes.checked_add(PAGE_BYTES as u64)?;
    let is_kept = device.claim().is_some_and(|(kind, _)| kind == ClaimType::ReadManyWriteNone);
    let is_possible = end <= device.geometry().bytes()
        && store_bytes.is_multiple_of(PAGE_BYTES as u64)
        && !device.bdev().read_only()
        && !is_kept
        && checksums_of(device).is_none();
    is_possible.then_some(store_bytes)
}

impl LvolStores {
    /// All stores, by UUID.
    pub(crate) fn all(&self) -> Vec<Arc<LvolStore>> {
        self.lock().values().cloned().collect()
    }

    /// The block device of a volume, if it has one.
    pub(crate) fn device(&self, store: &Arc<LvolStore>, volume: &Volume) -> Option<Arc<BlockDevice>> {
        let device = self.registry.find(&volume.bdev_name)?;
        device.module::<LvolBdev>().is_some_and(|module| module.is_of(store)).then_some(device)
    }

    /// Whether data of the volume, whose chain ends so, is missing.
    pub(crate) fn is_degraded(&self, store: &Arc<LvolStore>, volume: &Volume, end: ChainEnd) -> bool {
        match end {
            ChainEnd::Zeroes => false,
            ChainEnd::External(_) => self.device(store, volume).is_none(),
            ChainEnd::Missing(_) | ChainEnd::Cycle => true,
        }
    }

    /// Whether the device may have a store that is not used yet. One with metadata beside its blocks never
    /// has, nor one whose owner is another.
    fn is_examined(&self, device: &Arc<BlockDevice>) -> bool {
        let geometry = device.geometry();
        let is_owned = device.claim().is_some_and(|(kind, _)| kind != ClaimType::ReadManyWriteNone);
        let is_used = self.lock().values().any(|store| Arc::ptr_eq(store.base.device(), device));
        geometry.metadata.bytes == 0
            && (PAGE_BYTES as u32).is_multiple_of(geometry.block_size)
            && geometry.bytes() >= PAGE_BYTES as u64
            && !is_owned
            && !is_used
    }

    /// The core for the owner of the next store.
    pub(crate) fn next_reactor(&self) -> Option<&ReactorHandle> {
        let count = self.reactors.len().max(1);
        self.reactors.get(self.next_reactor.fetch_add(1, Ordering::Relaxed) % count)
    }

    /// Uses a store that was loaded, unless it is there already. A device that verifies its data goes if it
    /// is not used.
    fn adopt(&self, loaded: LoadedStore, is_requested: bool) {
        let device = loaded.base.device().clone();
        self.use_loaded(loaded, is_requested);
        self.remove_unused_checksums(&device);
    }

    fn use_loaded(&self, loaded: LoadedStore, is_requested: bool) {
        let LoadedStore { base, is_writable, blobs } = loaded;
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
        // A write to a cluster with two owners would change both.
        let is_shared = blobs.findings().iter().any(|finding| matches!(finding, StoreFinding::Shared { .. }));
        let reactor = self.next_reactor().filter(|_| is_writable && !is_shared);
        let checksums = self.checksums_for(&device, &blobs).filter(|_| reactor.is_some());
        let loaded = checksums.is_some().then(|| blobs.clone());
        let (open, shared) = match reactor {
            Some(reactor) => {
                let id = checksums.map(|(id, _)| id);
                let open = OpenBlobStore::open_with_checksums(blobs, blob_store_device(&base), id);
                let shared = StoreShared::new(open.published().clone());
                (Some((open, reactor)), shared)
            }
            None => (None, StoreShared::new(Arc::new(blobs))),
        };
        let mut problems = Vec::new();
        let store = match LvolStore::new(shared, base, &mut problems) {
            Ok(store) => Arc::new(store),
            Err(error) => return refuse(&error),
        };
        if let Err(reason) = self.insert(&store) {
            if let Some(reason) = reason {
                refuse(&reason);
            }
            return;
        }
        let is_writable = open.is_some();
        if let (Some(checksums), Some(loaded)) = (checksums, &loaded) {
            self.begin_checksums(&store, loaded, checksums);
        }
        if let Some((open, reactor)) = open {
            match owner::start(reactor, &store.shared, &store.base, open, None) {
                Ok(closed) => store.set_closed(closed),
                Err(error) => {
                    self.lock().remove(&store.uuid);
                    return refuse(&error);
                }
            }
        }
        let title = format!("the logical volume store {} on {name}", store.name());
        let volumes = store.volumes();
        let access = if is_writable { "" } else { ", which are read-only here" };
        log::info!(target: "lvol", "{title} has {} volumes{access}", volumes.len());
        log_findings(&title, &findings, &problems);
        if is_requested {
            self.mark_volumes_below(&device);
        }
        for volume in &volumes {
            self.register(&store, volume);
        }
        // Its removal was reported before it was there.
        if device.is_removed() {
            self.forget_base(&device);
        }
    }

    /// Reserves a name for a store; `None` if another store has it.
    pub(crate) fn reserve_name(self: &Arc<Self>, name: &str) -> Option<ReservedName> {
        let mut reserved = sync::lock(&self.reserved);
        let is_used = self.all().iter().any(|store| store.name() == name);
        if is_used || !reserved.insert(name.to_string()) {
            return None;
        }
        Some(ReservedName { stores: self.clone(), name: name.to_string() })
    }

    /// Adds a store; fails with the reason if it is another's, or without if its device has it already.
    pub(crate) fn insert(&self, store: &Arc<LvolStore>) -> Result<(), Option<String>> {
        let device = store.base.device();
        let name = store.name();
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
        if let Some(present) = stores.values().find(|present| present.name() == name) {
            let other = present.base.device().name();
            return Err(Some(format!("{other} has another store of the same name, {name}")));
        }
        stores.insert(store.uuid, store.clone());
        Ok(())
    }

    /// Forgets a store that is removed.
    pub(crate) fn remove(&self, store: &Arc<LvolStore>) {
        self.lock().remove(&store.uuid);
    }

    /// Registers a volume, if its data is there. Returns whether it has a block device then.
    pub(crate) fn register(&self, store: &Arc<LvolStore>, volume: &Volume) -> bool {
        let blobs = store.shared.published();
        let end = chain_end(&blobs, volume.blob);
        if matches!(end, ChainEnd::Missing(_) | ChainEnd::Cycle) {
            return false;
        }
        // Before it is looked for: the device may appear at the same time.
        if let Some(external) = external_of(&blobs, end) {
            store.set_on_external(volume.blob, &external);
        }
        match register(&self.registry, store, volume) {
            Ok(()) => return true,
            Err(VolumeError::NoExternal(name)) => {
                let alias = store.alias(volume);
                log::info!(target: "lvol", "the logical volume {alias} waits for its external snapshot {name}");
            }
            // That is reported of the store.
            Err(VolumeError::Bdev(BdevError::Removed { .. })) if store.base.device().is_removed() => {}
            Err(error) => {
                let alias = store.alias(volume);
                log::warn!(target: "lvol", "the logical volume {alias} has no bdev: {error}");
            }
        }
        false
    }

    /// Registers the volumes that wait for a device which has appeared.
    fn appeared(&self, bdev: &str) {
        let Some(device) = self.registry.find(bdev) else { return };
        let is_this = |name: &str| self.registry.find(name).is_some_and(|found| Arc::ptr_eq(&found, &device));
        for store in self.all() {
            for external in store.externals().iter().filter(|name| is_this(name)) {
                let blobs = store.shared.published();
                for volume in store.volumes_on(external) {
                    let end = chain_end(&blobs, volume.blob);
                    if external_of(&blobs, end).as_ref() == Some(external)
                        && self.device(&store, &volume).is_none()
                    {
                        self.register(&store, &volume);
                    }
                }
            }
        }
    }

    /// Opens and closes external snapshots as the chains of volumes end now, and gives volumes block devices
    /// that have none yet: after a change of parents. It looks at all volumes, unless none was ever on an
    /// external snapshot.
    pub(crate) fn follow_chains(&self, store: &Arc<LvolStore>) {
        if store.has_no_externals() {
            return;
        }
        let blobs = store.shared.published();
        let ends = chain_ends(&blobs);
        for volume in store.volumes() {
            let end = ends.get(&volume.blob).copied().unwrap_or(ChainEnd::Zeroes);
            let external = external_of(&blobs, end);
            if let Some(external) = &external {
                store.set_on_external(volume.blob, external);
            }
            let Some(device) = self.device(store, &volume) else {
                self.register(store, &volume);
                continue;
            };
            let Some(module) = device.module::<LvolBdev>() else { continue };
            let wanted = external.as_ref().and_then(|name| self.registry.find(name));
            let present = module.external();
            if let Some(present) = &present
                && !wanted.as_ref().is_some_and(|wanted| Arc::ptr_eq(wanted, present))
            {
                self.registry.unstack(present, &device);
                drop(module.close_external());
            }
            let Some(name) = external else { continue };
            match module.open_external(&self.registry, &name) {
                Ok(external) if present.is_none_or(|before| !Arc::ptr_eq(&before, external.device())) => {
                    self.registry.stack(external.device(), &device);
                }
                Ok(_) => {}
                Err(error) => {
                    let alias = store.alias(&volume);
                    log::warn!(target: "lvol", "the logical volume {alias} has lost its external snapshot: {error}");
                    _ = self.registry.unregister(&volume.bdev_name);
                }
            }
        }
    }

    /// Gives the block device of a volume the alias that it should have now.
    pub(crate) fn set_alias(&self, store: &LvolStore, volume: &Volume) {
        let alias = store.alias(volume);
        if let Err(error) = self.registry.set_aliases(&volume.bdev_name, &[alias]) {
            log::warn!(target: "lvol", "a renamed logical volume has no alias: {error}");
        }
    }

    /// Forgets the store of a device that was removed. The volumes go with the device.
    pub(crate) fn forget_base(&self, device: &Arc<BlockDevice>) {
        let mut stores = self.lock();
        let gone = stores.extract_if(.., |_, store| Arc::ptr_eq(store.base.device(), device));
        let gone: Vec<(Uuid, Arc<LvolStore>)> = gone.collect();
        drop(stores);
        for (uuid, store) in gone {
            let (name, base) = (store.name(), device.name());
            log::info!(target: "lvol", "the logical volume store {name} ({uuid}) has gone with {base}");
            store.begin_removal();
            owner::begin_close(&store.shared);
            store.base.release();
        }
    }

    /// Says in the log that a device has become smaller than the store on it.
    fn base_resized(&self, device: &Arc<BlockDevice>) {
        let Some(store) = self.all().into_iter().find(|store| Arc::ptr_eq(store.base.device(), device))
        else {
            return;
        };
        let published = store.shared.published();
        let (bytes, needed) = (device.geometry().bytes(), published.super_block().size_bytes.unwrap_or(0));
        if bytes < needed {
            let name = store.name();
            log::error!(
                target: "lvol",
                "{} has {bytes} bytes now, and the logical volume store {name} on it has {needed}: what is \
                 beyond fails, and the store cannot be loaded again: extend the device to {needed} bytes",
                device.name()
            );
        }
    }

    /// Unregisters all volumes of a store, and waits until their users have closed them. Returns whether they
    /// have in time.
    pub(crate) fn close_volumes(&self, store: &Arc<LvolStore>) -> bool {
        let mut removed = Vec::new();
        for volume in store.volumes() {
            if self.device(store, &volume).is_some()
                && let Ok(device) = self.registry.unregister(&volume.bdev_name)
            {
                removed.push(device);
            }
        }
        Closing::removed(removed).wait().is_ok()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Uuid, Arc<LvolStore>>> {
        // Each change is one call.
        sync::lock(&self.by_uuid)
    }
}

/// The name of a store that is being created or renamed; free again with its drop, unless a store has it.
pub(crate) struct ReservedName {
    stores: Arc<LvolStores>,
    name: String,
}

impl Drop for ReservedName {
    fn drop(&mut self) {
        sync::lock(&self.stores.reserved).remove(&self.name);
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
