//! The module of the store for the control plane: the methods `store_*`.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bdev::{BdevError, Registry, Uuid};
use control::json::{Value, json};
use control::{JobHandle, Method, Module, RpcError};
use reactor::{ReactorHandle, blocking};

use crate::{
    FormatOptions, ImageInfo, NonPriorityThreads, StoreBdevs, StoreCores, StoreError, StoreNode,
    StoreOptions, StoreThreads, StoreTuning, ThreadMode, format_device,
};

/// Stores on the devices of a program, as a [`Module`].
pub struct StoreModule {
    registry: Registry,
    reactors: Vec<ReactorHandle>,
    /// By name.
    stores: Mutex<BTreeMap<String, Arc<StoreNode>>>,
    /// Held by each job that changes something: they may take long, and keep no other method waiting.
    changes: Mutex<()>,
    /// The non-priority threads of its stores, once one has prioritized threads.
    threads: Mutex<Option<Arc<NonPriorityThreads>>>,
}

impl StoreModule {
    /// No stores; those that are opened run on `reactors`.
    pub fn new(registry: Registry, reactors: &[ReactorHandle]) -> Arc<StoreModule> {
        Arc::new(StoreModule {
            registry,
            reactors: reactors.to_vec(),
            stores: Mutex::default(),
            changes: Mutex::default(),
            threads: Mutex::default(),
        })
    }

    fn cores(&self) -> StoreCores<'_> {
        StoreCores::Reactors(&self.reactors)
    }

    /// Returns when what was closed has released its device.
    fn settle(&self) -> Result<(), StoreError> {
        wait(self.cores().settle())?;
        let threads = sync::lock(&self.threads).clone();
        let handles = threads.map_or_else(Vec::new, |threads| threads.handles());
        wait(StoreCores::Reactors(&handles).settle())
    }

    fn find(&self, name: &str) -> Result<Arc<StoreNode>, RpcError> {
        let missing = || RpcError::new(RpcError::ENODEV, format!("no store called {name} is open"));
        sync::lock(&self.stores).get(name).cloned().ok_or_else(missing)
    }
}

/// Indices of the non-priority threads begin here: a program has fewer reactors.
const FIRST_INDEX: usize = 1 << 16;

/// Waits on a control thread, which reactors never are.
fn wait<R>(future: impl Future<Output = Result<R, StoreError>>) -> Result<R, StoreError> {
    blocking::block_on(future).map_err(|_| StoreError::Closed)?
}

const NO_STORE: (i64, &str) = (RpcError::ENODEV, "no store of this name is open");
const NO_IMAGE: (i64, &str) = (RpcError::ENODEV, "no store of this name is open, or it has no such image");
const DEVICE: (i64, &str) = (RpcError::EIO, "the device reports an error, or what is on it is damaged");

impl Module for StoreModule {
    const NAME: &'static str = "store";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];
    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<StoreModule>> {
        vec![
            Method::job("store_format", format)
                .text(
                    "Writes an empty store to a bdev, which nothing else may use. Not an SPDK method.",
                    "`uuid` of the device, `partitions`, and `log_bytes` of each",
                )
                .errors(&[
                    (RpcError::ENODEV, "there is no such bdev"),
                    (RpcError::EEXIST, "there is a store on it, and force is not given"),
                    (RpcError::EINVAL, "the bdev is too small, or has blocks that a store cannot use"),
                    (RpcError::EBUSY, "the bdev is in use"),
                    DEVICE,
                ]),
            Method::job("store_open", open)
                .text(
                    "Opens the store on a bdev, which it claims, and registers its images as the bdevs `NAME/IMAGE`. What \
                     a crash left in the logs is applied first. Not an SPDK method.",
                    "array of the bdevs' names",
                )
                .canonical(|module: &StoreModule, params: &mut OpenParams| {
                    params.bdev_name = module.registry.name_of(&params.bdev_name);
                    params.log_bdev_name = params.log_bdev_name.take().map(|name| module.registry.name_of(&name));
                    Ok(())
                })
                .errors(&[
                    (RpcError::ENODEV, "there is no such bdev"),
                    (RpcError::EEXIST, "a store of this name is open"),
                    (RpcError::EINVAL, "there is no store on the bdev"),
                    (RpcError::EBUSY, "the bdev is in use"),
                    DEVICE,
                ]),
            Method::job("store_close", close)
                .text("Removes a store's bdevs, writes everything in place, and releases its device. Not an SPDK method.", "true")
                .errors(&[NO_STORE]),
            Method::query("store_get_stores", get_stores)
                .text(
                    "Describes the open stores: space, logs, counters and images. Not an SPDK method.",
                    "array of stores with `name`, `base_bdev`, `log_bdev`, `uuid`, `durability`, \
                     `checksum_cache_limit_bytes`, `threads` with their wake-ups, `partitions` and `images`",
                )
                .errors(&[NO_STORE]),
            Method::job("store_image_create", create_image)
                .text(
                    "Creates an image, a volume that is thin or preallocated, and its bdev `STORE/NAME`. Not an SPDK method.",
                    "name of the bdev",
                )
                .errors(&[
                    NO_STORE,
                    (RpcError::EEXIST, "the store has an image of this name"),
                    (RpcError::EINVAL, "the name or the size is invalid"),
                    (RpcError::ENOSPC, "the store is full"),
                    DEVICE,
                ]),
            Method::job("store_image_resize", resize_image)
                .text("Resizes an image. What is cut off is gone. Not an SPDK method.", "true")
                .errors(&[NO_IMAGE, (RpcError::EINVAL, "the size is invalid"), DEVICE]),
            Method::job("store_image_delete", delete_image)
                .text("Deletes an image with its data and its bdev. Not an SPDK method.", "true")
                .errors(&[NO_IMAGE, DEVICE]),
        ]
    }

    fn drain(&self) {
        let _changes = sync::lock(&self.changes);
        let stores = std::mem::take(&mut *sync::lock(&self.stores));
        for store in stores.values() {
            // What is not written in place is in the log.
            let _ = blocking::block_on(store.close());
        }
    }

    fn save(&self) -> Vec<Value> {
        let stores = sync::lock(&self.stores);
        let call = |store: &Arc<StoreNode>| {
            let mut params = json!({
                "name": store.name(),
                "bdev_name": store.device().name(),
                "checksum_cache_bytes": store.tuning().checksum_cache_bytes,
                "flush_entries": store.tuning().flush_entries,
                "flush_after_ms": store.tuning().flush_after.as_millis() as u64,
                "threads": store.threads().mode().name(),
            });
            if let Some(log) = store.log_device() {
                params["log_bdev_name"] = log.name().into();
            }
            json!({ "method": "store_open", "params": params })
        };
        stores.values().map(call).collect()
    }

    fn report(&self) -> Value {
        let stores = sync::lock(&self.stores);
        let images: usize = stores.values().map(|store| store.images().len()).sum();
        json!({ "stores": stores.len(), "images": images })
    }
}

impl From<StoreError> for RpcError {
    fn from(error: StoreError) -> RpcError {
        let code = match &error {
            StoreError::Bdev(BdevError::NotFound { .. }) | StoreError::NoImage(_) => RpcError::ENODEV,
            StoreError::Bdev(BdevError::Claimed { .. })
            | StoreError::Busy
            | StoreError::AnotherProcess { .. }
            | StoreError::TooFewInSync { .. } => RpcError::EBUSY,
            StoreError::NotLeft { .. } => RpcError::ETIMEDOUT,
            StoreError::Exists | StoreError::LooksEncrypted | StoreError::ImageExists(_) => RpcError::EEXIST,
            StoreError::Geometry(_)
            | StoreError::InvalidImage(_)
            | StoreError::NoStore(_)
            | StoreError::NotDecrypted { .. }
            | StoreError::LogsOnly { .. }
            | StoreError::LogWanted { .. }
            | StoreError::LogNotWanted
            | StoreError::NoLogs(_)
            | StoreError::ForeignLogDevice { .. }
            | StoreError::LogInMemory { .. }
            | StoreError::Foreign { .. } => RpcError::EINVAL,
            StoreError::NoBuffers => RpcError::ENOMEM,
            StoreError::Cancelled => RpcError::ECANCELED,
            StoreError::Failed { status, .. } if *status == block_io::Status::CAPACITY_EXCEEDED => {
                RpcError::ENOSPC
            }
            _ => RpcError::EIO,
        };
        RpcError::new(code, error.to_string())
    }
}

control::parameters! {
    struct FormatParams {
        /// Device to format
        bdev_name: String,
        /// Device for the logs, formatted as well; without, they are on the first one
        log_bdev_name: Option<String>,
        /// Partitions, each owned by one core; without, one for each 16 GiB, 1 to 16
        partitions: Option<u32>,
        /// Size of each partition's log; without, a 32nd of the partition, 1 to 64 MiB
        log_bytes: Option<u64> ["bytes"],
        /// Destroys a store that is there
        force: bool = false,
    }
}

fn format(module: &StoreModule, params: FormatParams, job: &JobHandle) -> Result<Value, RpcError> {
    let _changes = sync::lock(&module.changes);
    let options = FormatOptions {
        partitions: params.partitions,
        log_bytes: params.log_bytes,
        force: params.force,
        replicas: None,
    };
    let cores = module.cores();
    let bdevs = StoreBdevs { data: &params.bdev_name, log: params.log_bdev_name.as_deref() };
    let superblock = wait(format_device(&module.registry, bdevs, &cores, options, job))?;
    Ok(json!({
        "uuid": Uuid::from_bytes(superblock.device).to_string(),
        "partitions": superblock.partitions,
        "log_bytes": superblock.log_area_blocks() * wire_store::BLOCK_BYTES as u64,
    }))
}

control::parameters! {
    struct OpenParams {
        /// Device with the store
        bdev_name: String,
        /// Device with its logs, if these are on one of their own
        log_bdev_name: Option<String>,
        /// What the names of its bdevs begin with
        name: String = "store".to_string(),
        /// Limit for checksums in memory; 1 MiB has those of 1 GiB of data
        checksum_cache_bytes: u64 ["bytes"] = StoreTuning::default().checksum_cache_bytes,
        /// Entries of a partition beyond which they are written in place, at most 1024
        flush_entries: u32 = StoreTuning::default().flush_entries,
        /// Time after which an entry is written in place however few there are, at most 60000
        flush_after_ms: u32 ["ms"] = 100,
        /// Which threads do the work: `run-to-completion`, the core that owns a partition; `prioritized`, a
        /// priority thread, which is pinned, for the log, and a non-priority thread for what is in place
        threads: ThreadMode = ThreadMode::RunToCompletion,
    }
}

/// The parameters of a store's or a node's partitions.
pub(crate) fn tuning(
    checksum_cache_bytes: u64,
    flush_entries: u32,
    flush_after_ms: u32,
) -> Result<StoreTuning, RpcError> {
    let flush_after = Duration::from_millis(flush_after_ms.into());
    if flush_entries > StoreTuning::FLUSH_ENTRIES_MAX {
        let reason =
            format!("flush_entries: {flush_entries} is more than {}", StoreTuning::FLUSH_ENTRIES_MAX);
        return Err(RpcError::new(RpcError::EINVAL, reason));
    }
    if flush_after > StoreTuning::FLUSH_AFTER_MAX {
        let reason = format!(
            "flush_after_ms: {flush_after_ms} is more than {}",
            StoreTuning::FLUSH_AFTER_MAX.as_millis()
        );
        return Err(RpcError::new(RpcError::EINVAL, reason));
    }
    Ok(StoreTuning { checksum_cache_bytes, flush_entries, flush_after })
}

/// The threads of a store. Non-priority threads are started when they are first needed, and reactors that are
/// not pinned get cores from the one with index `first` on. The program's reactors have indices below
/// `first_index`.
pub(crate) fn store_threads(
    mode: ThreadMode,
    reactors: &[ReactorHandle],
    (first, first_index): (usize, usize),
    threads: &Mutex<Option<Arc<NonPriorityThreads>>>,
) -> Result<StoreThreads, StoreError> {
    if mode == ThreadMode::RunToCompletion {
        return Ok(StoreThreads::RunToCompletion);
    }
    let mut threads = sync::lock(threads);
    let started = match &*threads {
        Some(threads) => threads.clone(),
        None => NonPriorityThreads::start(reactors, first, first_index)?,
    };
    *threads = Some(started.clone());
    Ok(StoreThreads::Prioritized(started))
}

fn open(module: &StoreModule, params: OpenParams, job: &JobHandle) -> Result<Value, RpcError> {
    let _changes = sync::lock(&module.changes);
    if sync::lock(&module.stores).contains_key(&params.name) {
        let message = format!("a store called {} is open: give another name", params.name);
        return Err(RpcError::new(RpcError::EEXIST, message));
    }
    if params.name.is_empty() || params.name.contains(['/', '\n']) {
        return Err(RpcError::new(RpcError::EINVAL, "a name without `/` is needed"));
    }
    let cores = module.cores();
    let bdevs = StoreBdevs { data: &params.bdev_name, log: params.log_bdev_name.as_deref() };
    let tuning = tuning(params.checksum_cache_bytes, params.flush_entries, params.flush_after_ms)?;
    let threads = store_threads(params.threads, &module.reactors, (0, FIRST_INDEX), &module.threads)?;
    let options = StoreOptions { name: &params.name, tuning, threads };
    let store = wait(StoreNode::open(&module.registry, bdevs, options, &cores, job))?;
    let names = store.images().into_iter().map(|image| image.bdev_name).collect();
    sync::lock(&module.stores).insert(params.name, Arc::new(store));
    Ok(names)
}

control::parameters! {
    struct StoreName {
        /// Store
        name: String = "store".to_string(),
    }
}

fn close(module: &StoreModule, params: StoreName, _job: &JobHandle) -> Result<bool, RpcError> {
    let _changes = sync::lock(&module.changes);
    let store = module.find(&params.name)?;
    blocking::block_on(store.close()).map_err(|_| StoreError::Closed)?;
    sync::lock(&module.stores).remove(&params.name);
    drop(store);
    // The device is free for others when this returns.
    module.settle()?;
    Ok(true)
}

control::parameters! {
    struct StoreFilter {
        /// Only this store
        name: Option<String>,
    }
}

fn get_stores(module: &StoreModule, params: StoreFilter) -> Result<Value, RpcError> {
    let stores = match params.name {
        Some(name) => vec![module.find(&name)?],
        None => sync::lock(&module.stores).values().cloned().collect(),
    };
    stores.iter().map(|store| describe(store)).collect::<Result<Vec<_>, _>>().map(Value::from)
}

fn describe(store: &StoreNode) -> Result<Value, RpcError> {
    let partition = |status: crate::PartitionStatus| {
        let (space, stats) = (status.space, status.stats);
        json!({
            "state": if status.failed.is_some() { "failed" } else { "serving" },
            "failure": status.failed.as_deref(),
            "extents": space.extents,
            "free_extents": space.free_extents,
            "released_extents": space.released_extents,
            "extent_bytes": wire_store::BLOCK_BYTES * wire_store::BLOCKS_PER_EXTENT,
            "objects": space.objects,
            "log_bytes": status.log_bytes,
            "log_used_bytes": status.log_used_bytes,
            "entries_to_place": status.entries_to_place,
            "entries": stats.entries,
            "log_writes": stats.log_writes,
            "log_written_bytes": stats.log_bytes,
            "reads": stats.reads,
            "reads_from_log": stats.reads_from_log,
            "reads_overlaid": stats.reads_overlaid,
            "reads_repeated": stats.reads_repeated,
            "flushes": stats.flushes,
            "flushes_by_count": stats.flushes_by_count,
            "flushes_by_time": stats.flushes_by_time,
            "entries_in_place": stats.entries_in_place,
            "unplaced_bytes_max": stats.unplaced_bytes_max,
            "checkpoints": stats.checkpoints,
            "deferred": stats.deferred,
            "checksum_cache_bytes": status.checksum_cache_bytes,
            "checksum_hits": stats.checksum_hits,
            "checksum_misses": stats.checksum_misses,
            "damaged_blocks": stats.damaged_blocks,
            "entries_redone": stats.entries_redone,
        })
    };
    let image = |image: ImageInfo| {
        json!({
            "name": image.name,
            "bdev_name": image.bdev_name,
            "uuid": image.uuid.to_string(),
            "size": image.bytes,
            "state": if image.removing { "removing" } else { "ready" },
        })
    };
    let partitions: Vec<Value> = wait(store.status())?.into_iter().map(partition).collect();
    let images: Vec<Value> = store.images().into_iter().map(image).collect();
    Ok(json!({
        "name": store.name(),
        "base_bdev": store.device().name(),
        "log_bdev": store.log_device().map(|device| device.name()),
        "uuid": Uuid::from_bytes(store.superblock().device).to_string(),
        "durability": store.durability().name(),
        "threads": store.threads().describe(),
        "checksum_cache_limit_bytes": store.tuning().checksum_cache_bytes,
        "partitions": partitions,
        "images": images,
    }))
}

control::parameters! {
    struct ImageSize {
        /// Image
        name: String,
        /// Size
        size: u64 ["bytes"],
        /// Store
        store: String = "store".to_string(),
    }
}

control::parameters! {
    struct NewImage {
        /// Image
        name: String,
        /// Size
        size: u64 ["bytes"],
        /// Store
        store: String = "store".to_string(),
        /// Allocates the space of the whole image, instead of that of each block when it is written first
        preallocate: bool = false,
    }
}

fn create_image(module: &StoreModule, params: NewImage, job: &JobHandle) -> Result<String, RpcError> {
    let _changes = sync::lock(&module.changes);
    let store = module.find(&params.store)?;
    let image = match params.preallocate {
        true => wait(store.create_preallocated_image(&params.name, params.size, job))?,
        false => wait(store.create_image(&params.name, params.size))?,
    };
    Ok(image.bdev_name)
}

fn resize_image(module: &StoreModule, params: ImageSize, job: &JobHandle) -> Result<bool, RpcError> {
    let _changes = sync::lock(&module.changes);
    let store = module.find(&params.store)?;
    wait(store.resize_image(&params.name, params.size, job))?;
    Ok(true)
}

control::parameters! {
    struct ImageName {
        /// Image
        name: String,
        /// Store
        store: String = "store".to_string(),
    }
}

fn delete_image(module: &StoreModule, params: ImageName, job: &JobHandle) -> Result<bool, RpcError> {
    let _changes = sync::lock(&module.changes);
    let store = module.find(&params.store)?;
    wait(store.remove_image(&params.name, job))?;
    Ok(true)
}
