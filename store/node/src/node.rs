//! A store on one device: its shards on the cores, and its images.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bdev::{Access, BlockDevice, Durability, Registry, Uuid};
use control::JobHandle;
use reactor::{Core, ReactorHandle};
use store_image::{IMAGE_BLOCK_BYTES, IMAGE_BYTES_MAX};
use wire_store::{ImageRecord, OBJECT_BYTES, ObjectId, Superblock};

use crate::disks::{StoreBdevs, StoreDescriptors, open_store};
use crate::format::{FormatOptions, check_empty, format};
use crate::image::{ImageBdev, Shards, locate, object_of};
use crate::once::once;
use crate::shard::{self, ControlReply, ShardHandle, ShardOperation};
use crate::threads::StoreThreads;
use crate::tuning::StoreTuning;
use crate::{ReplicaDescription, ShardStats, StoreError};

/// The cores that own a store's shards.
pub enum StoreCores<'a> {
    /// The calling core, which runs the caller.
    This(&'a Core),
    /// These reactors, in turn. The caller is on none of them.
    Reactors(&'a [ReactorHandle]),
}

/// How a store runs.
pub struct StoreOptions<'a> {
    /// What the names of its block devices begin with.
    pub name: &'a str,
    /// How its partitions run.
    pub tuning: StoreTuning,
    /// Which threads do its work.
    pub threads: StoreThreads,
}

impl<'a> From<&'a str> for StoreOptions<'a> {
    fn from(name: &'a str) -> StoreOptions<'a> {
        StoreOptions { name, tuning: StoreTuning::default(), threads: StoreThreads::default() }
    }
}

/// An open store.
pub struct StoreNode {
    name: String,
    registry: Registry,
    device: Arc<BlockDevice>,
    log_device: Option<Arc<BlockDevice>>,
    durability: Durability,
    superblock: Superblock,
    tuning: StoreTuning,
    threads: StoreThreads,
    shards: Shards,
    /// By name. Held over changes, so that they are one after another.
    images: Mutex<BTreeMap<String, ImageRecord>>,
}

/// An image, as [`StoreNode::images`] describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageInfo {
    /// Name.
    pub name: String,
    /// Name of its block device.
    pub bdev_name: String,
    /// Identity.
    pub uuid: Uuid,
    /// Size in bytes.
    pub bytes: u64,
    /// It is being removed.
    pub removing: bool,
}

/// What a store reports of one of its partitions.
#[derive(Clone, Debug)]
pub struct PartitionStatus {
    /// Space of the partition.
    pub space: objects::SpaceUse,
    /// Blocks of the checksum table in memory.
    pub checksum_cache_bytes: u64,
    /// Bytes of the log's area.
    pub log_bytes: u64,
    /// Bytes of it that are in use.
    pub log_used_bytes: u64,
    /// Entries that are acknowledged and not in place.
    pub entries_to_place: u64,
    /// Why it failed, if it did: its operations end with an error.
    pub failed: Option<Arc<str>>,
    /// It failed because a file of the device found no space on its file system.
    pub is_out_of_space: bool,
    /// Counters since it was opened.
    pub stats: ShardStats,
    /// The replica that owns it.
    pub replica: Option<ReplicaDescription>,
}

/// Operations of the control plane in flight.
const CONTROL_IN_FLIGHT_MAX: usize = 64;
/// Shards that start on a core at the same time. More would need more memory: each has its metadata and its
/// log there.
const STARTS_PER_CORE: usize = 2;
/// Within this time, timers of a core expire after its pollers have run.
const SETTLE_NS: u64 = 1_000_000;

impl<'a> StoreCores<'a> {
    fn count(&self) -> usize {
        match self {
            StoreCores::This(_) => 1,
            StoreCores::Reactors(handles) => handles.len(),
        }
    }

    /// Shards that start at the same time: a core reads for one while it works for another.
    pub(crate) fn starts_max(&self) -> usize {
        STARTS_PER_CORE * self.count()
    }

    /// Returns when what was closed before has released its device.
    pub(crate) async fn settle(&self) -> Result<(), StoreError> {
        for index in 0..self.count() {
            let settled = |core: Core| async move {
                core.sleep_ns(SETTLE_NS).await;
                Ok(())
            };
            self.run(index, settled).await?;
        }
        Ok(())
    }

    /// Runs a task on the core that owns shard `index`.
    pub(crate) async fn run<R, F, Fut>(&self, index: usize, work: F) -> Result<R, StoreError>
    where
        R: Send + 'static,
        F: FnOnce(Core) -> Fut + Send + 'static,
        Fut: Future<Output = Result<R, StoreError>> + 'static,
    {
        let handle = match self {
            StoreCores::This(core) => return work((*core).clone()).await,
            StoreCores::Reactors(handles) => &handles[index % self.count()],
        };
        let (sender, receiver) = once();
        let run = move |core: &Core| {
            let task = work(core.clone());
            core.spawn(async move { sender.send(task.await) });
        };
        handle.post(run).map_err(|_| StoreError::Closed)?;
        receiver.await.ok_or(StoreError::Closed)?
    }
}

/// Refuses block devices with a store, with the logs of one, or with what may be an encrypted one. For those
/// that are to be formatted through a crypto bdev, which does not see what its base has.
///
/// # Errors
/// [`StoreError::Exists`]; [`StoreError::LooksEncrypted`]; what the devices report.
pub async fn check_unused(
    registry: &Registry,
    bdevs: impl Into<StoreBdevs<'_>>,
    cores: &StoreCores<'_>,
) -> Result<(), StoreError> {
    let descriptors = StoreDescriptors::open(registry, bdevs.into(), Access::ReadOnly)?;
    let work = move |core: Core| async move {
        let disks = descriptors.disks(&core)?;
        let mut checked = Ok(());
        for device in disks.all() {
            if checked.is_ok() {
                checked = check_empty(device).await;
            }
        }
        drop(descriptors);
        disks.close().await;
        checked
    };
    cores.run(0, work).await
}

/// Writes an empty store to a block device, which is used by nothing else.
///
/// # Errors
/// [`StoreError::Exists`] if it has one, and [`StoreError::LooksEncrypted`], without
/// [`FormatOptions::force`]; [`StoreError::Geometry`]; what the device reports.
pub async fn format_device(
    registry: &Registry,
    bdevs: impl Into<StoreBdevs<'_>>,
    cores: &StoreCores<'_>,
    options: FormatOptions,
    job: &JobHandle,
) -> Result<Superblock, StoreError> {
    let access = Access::Exclusive { by: "store format" };
    let descriptors = StoreDescriptors::open(registry, bdevs.into(), access)?;
    if options.replicas.is_some() {
        descriptors.check_logs_of_replicas()?;
    }
    let job = job.clone();
    let work = move |core: Core| async move {
        let disks = descriptors.disks(&core)?;
        let superblock = format(&disks, &options, &job).await;
        drop(descriptors);
        disks.close().await;
        superblock
    };
    cores.run(0, work).await
}

impl StoreNode {
    /// Opens the store on a block device, which it claims. What a crash left in the logs is applied; then the
    /// images are registered as the block devices `NAME/IMAGE`.
    ///
    /// # Errors
    /// [`StoreError::NoStore`], and what else is wrong with it.
    pub async fn open(
        registry: &Registry,
        bdevs: impl Into<StoreBdevs<'_>>,
        options: impl Into<StoreOptions<'_>>,
        cores: &StoreCores<'_>,
        job: &JobHandle,
    ) -> Result<StoreNode, StoreError> {
        let opened = StoreNode::open_devices(registry, bdevs.into(), options.into(), cores, job).await;
        if opened.is_err() {
            // The device is free for others when this returns.
            cores.settle().await?;
        }
        opened
    }

    async fn open_devices(
        registry: &Registry,
        bdevs: StoreBdevs<'_>,
        options: StoreOptions<'_>,
        cores: &StoreCores<'_>,
        job: &JobHandle,
    ) -> Result<StoreNode, StoreError> {
        let StoreOptions { name, tuning, threads } = options;
        let (mut descriptors, superblock) = open_store(registry, bdevs, name, cores).await?;
        descriptors.tuning = tuning;
        threads.check(registry, &descriptors.devices())?;
        descriptors.threads = threads.clone();
        if superblock.checkpoint_blocks > 0 {
            let reason = "the device has replicas of a cluster: `ringbolt store` serves them";
            return Err(StoreError::Geometry(reason.to_string()));
        }
        let start = |index| {
            let (of_core, superblock) = (descriptors.clone(), superblock.clone());
            move |core: Core| async move { shard::start(&core, &of_core, &superblock, index).await }
        };
        let shards = start_shards(superblock.partitions, cores, job, start).await?;
        let node = StoreNode {
            name: name.to_string(),
            registry: registry.clone(),
            device: descriptors.data.device().clone(),
            log_device: descriptors.separate_log().map(|log| log.device().clone()),
            durability: descriptors.durability(),
            superblock,
            tuning,
            threads,
            shards: shards.into(),
            images: Mutex::default(),
        };
        match node.load_images().await {
            Ok(()) => Ok(node),
            Err(error) => {
                node.close().await;
                Err(error)
            }
        }
    }

    /// The name that its block devices begin with.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device that it is on.
    pub fn device(&self) -> &Arc<BlockDevice> {
        &self.device
    }

    /// The device that its logs are on, if that is another one.
    pub fn log_device(&self) -> Option<&Arc<BlockDevice>> {
        self.log_device.as_ref()
    }

    /// What acknowledged writes survive on its devices.
    pub fn durability(&self) -> Durability {
        self.durability
    }

    /// The identity of the device, and its division.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// How its partitions run.
    pub fn tuning(&self) -> StoreTuning {
        self.tuning
    }

    /// Which threads do its work.
    pub fn threads(&self) -> &StoreThreads {
        &self.threads
    }

    /// The images, by name.
    pub fn images(&self) -> Vec<ImageInfo> {
        sync::lock(&self.images).values().map(|record| self.describe(record)).collect()
    }

    fn describe(&self, record: &ImageRecord) -> ImageInfo {
        ImageInfo {
            name: record.name.clone(),
            bdev_name: self.bdev_name(&record.name),
            uuid: Uuid::from_bytes(record.uuid),
            bytes: record.bytes,
            removing: record.removing,
        }
    }

    fn bdev_name(&self, image: &str) -> String {
        format!("{}/{image}", self.name)
    }

    /// Creates an image, thin: it takes space as it is written. Changes of images are made one after another.
    ///
    /// # Errors
    /// [`StoreError::ImageExists`], [`StoreError::InvalidImage`], and what the device reports.
    pub async fn create_image(&self, name: &str, bytes: u64) -> Result<ImageInfo, StoreError> {
        self.create(name, bytes, None).await
    }

    /// Creates an image of which every block has space. If that fails or is cancelled, there is no image.
    ///
    /// # Errors
    /// As [`create_image`](Self::create_image).
    pub async fn create_preallocated_image(
        &self,
        name: &str,
        bytes: u64,
        job: &JobHandle,
    ) -> Result<ImageInfo, StoreError> {
        self.create(name, bytes, Some(job)).await
    }

    /// With a job, the image's objects are allocated.
    async fn create(
        &self,
        name: &str,
        bytes: u64,
        preallocates: Option<&JobHandle>,
    ) -> Result<ImageInfo, StoreError> {
        check_image(name, bytes)?;
        let volume = {
            let images = sync::lock(&self.images);
            if images.contains_key(name) {
                return Err(StoreError::ImageExists(name.to_string()));
            }
            // The record's object has the volume as its index.
            let highest = images.values().map(|record| record.volume).max().unwrap_or(0);
            if highest >= u64::from(u32::MAX) {
                return Err(StoreError::InvalidImage("no volume number is left".to_string()));
            }
            highest + 1
        };
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let record = ImageRecord {
            uuid: Uuid::new_v4().into_bytes(),
            volume,
            bytes,
            created_ns: now.map_or(0, |time| time.as_nanos() as u64),
            removing: false,
            name: name.to_string(),
        };
        if let Some(job) = preallocates {
            // If the server is killed while objects are allocated, the next one removes the image.
            self.put_record(&ImageRecord { removing: true, ..record.clone() }).await?;
            if let Err(error) = self.preallocate(&record, job).await {
                self.finish_removal(&record, &JobHandle::standalone()).await?;
                return Err(error);
            }
        }
        self.put_record(&record).await?;
        if let Err(error) = self.register(&record) {
            self.finish_removal(&record, &JobHandle::standalone()).await?;
            return Err(error);
        }
        let info = self.describe(&record);
        sync::lock(&self.images).insert(name.to_string(), record);
        Ok(info)
    }

    /// Changes an image's size. What is cut off is gone.
    ///
    /// # Errors
    /// [`StoreError::NoImage`], [`StoreError::InvalidImage`], and what the device reports.
    pub async fn resize_image(
        &self,
        name: &str,
        bytes: u64,
        job: &JobHandle,
    ) -> Result<ImageInfo, StoreError> {
        check_image(name, bytes)?;
        let old = self.record(name)?;
        let record = ImageRecord { bytes, ..old.clone() };
        if bytes < old.bytes {
            // Nothing is written there from now on; and what is there is gone before the record says so.
            self.set_device_bytes(name, bytes)?;
            self.discard_from(&old, bytes, job).await?;
        }
        self.put_record(&record).await?;
        self.set_device_bytes(name, bytes)?;
        let info = self.describe(&record);
        sync::lock(&self.images).insert(name.to_string(), record);
        Ok(info)
    }

    /// Removes an image with its data, and its block device. If that is interrupted or cancelled, it goes on
    /// when it is removed again or the store is opened.
    ///
    /// # Errors
    /// [`StoreError::NoImage`], and what the device reports.
    pub async fn remove_image(&self, name: &str, job: &JobHandle) -> Result<(), StoreError> {
        let record = ImageRecord { removing: true, ..self.record(name)? };
        self.put_record(&record).await?;
        sync::lock(&self.images).insert(name.to_string(), record.clone());
        // It may be gone already, after an attempt that failed.
        let _ = self.registry.unregister(&self.bdev_name(name));
        self.finish_removal(&record, job).await
    }

    /// What each partition reports.
    ///
    /// # Errors
    /// [`StoreError::Closed`].
    pub async fn status(&self) -> Result<Vec<PartitionStatus>, StoreError> {
        describe_shards(&self.shards).await
    }

    /// Removes the block devices, writes everything in place, and releases the device. A store that is not
    /// closed loses nothing: its logs are applied when it is opened.
    pub async fn close(&self) {
        for image in self.images() {
            let _ = self.registry.unregister(&image.bdev_name);
        }
        close_shards(&self.shards).await;
    }

    async fn load_images(&self) -> Result<(), StoreError> {
        for shard in &*self.shards {
            let objects = list(shard, ImageRecord::VOLUME).await?;
            for object in objects {
                let length = ImageRecord::SIZE as u32;
                let read = shard.call(ShardOperation::Read { object, offset: 0, length }).await?;
                let bytes = match read {
                    ControlReply::Data(bytes) => bytes,
                    ControlReply::Done(status) => {
                        return Err(StoreError::Failed { what: "reading the record of an image", status });
                    }
                    _ => return Err(StoreError::Closed),
                };
                let record = ImageRecord::decode(&bytes);
                let record = record.map_err(|source| StoreError::Image { volume: object.index, source })?;
                sync::lock(&self.images).insert(record.name.clone(), record);
            }
        }
        let records: Vec<ImageRecord> = sync::lock(&self.images).values().cloned().collect();
        for record in records {
            if record.removing {
                self.finish_removal(&record, &JobHandle::standalone()).await?;
            } else {
                self.register(&record)?;
            }
        }
        Ok(())
    }

    fn record(&self, name: &str) -> Result<ImageRecord, StoreError> {
        sync::lock(&self.images).get(name).cloned().ok_or_else(|| StoreError::NoImage(name.to_string()))
    }

    fn register(&self, record: &ImageRecord) -> Result<(), StoreError> {
        let module = ImageBdev {
            store: self.name.clone(),
            image: record.name.clone(),
            volume: record.volume,
            bytes: AtomicU64::new(record.bytes),
            shards: self.shards.clone(),
            durability: self.durability,
        };
        let uuid = Some(Uuid::from_bytes(record.uuid));
        self.registry.register(&self.bdev_name(&record.name), uuid, &[], Arc::new(module))?;
        Ok(())
    }

    fn set_device_bytes(&self, name: &str, bytes: u64) -> Result<(), StoreError> {
        let bdev_name = self.bdev_name(name);
        let device = self.registry.find(&bdev_name).ok_or_else(|| StoreError::NoImage(name.to_string()))?;
        if let Some(module) = device.module::<ImageBdev>() {
            module.bytes.store(bytes, Ordering::Relaxed);
        }
        Ok(self.registry.notify_resized(&bdev_name)?)
    }

    /// The object with an image's record, and its shard.
    fn record_place(&self, record: &ImageRecord) -> (ObjectId, &ShardHandle) {
        let object = object_of(ImageRecord::VOLUME, record.volume as u32, self.shards.len());
        (object, &self.shards[object.group as usize])
    }

    async fn put_record(&self, record: &ImageRecord) -> Result<(), StoreError> {
        let (object, shard) = self.record_place(record);
        let operation = ShardOperation::Put { object, bytes: record.encode().to_vec() };
        shard.perform("writing the record of an image", operation).await
    }

    async fn remove_record(&self, record: &ImageRecord) -> Result<(), StoreError> {
        let (object, shard) = self.record_place(record);
        shard.perform("removing the record of an image", ShardOperation::Remove { object }).await
    }

    /// Allocates every object of an image.
    async fn preallocate(&self, record: &ImageRecord, job: &JobHandle) -> Result<(), StoreError> {
        let objects = record.bytes.div_ceil(OBJECT_BYTES as u64);
        job.set_total(objects, "objects");
        let preallocate = |index: u64| async move {
            if job.is_cancelled() {
                return Err(StoreError::Cancelled);
            }
            let (object, _) = locate(record.volume, index * OBJECT_BYTES as u64, self.shards.len());
            let shard = &self.shards[object.group as usize];
            shard.perform("allocating an object", ShardOperation::Preallocate { object }).await?;
            job.advance(1);
            Ok(())
        };
        crate::device::join_all(CONTROL_IN_FLIGHT_MAX, (0..objects).map(preallocate)).await
    }

    async fn finish_removal(&self, record: &ImageRecord, job: &JobHandle) -> Result<(), StoreError> {
        self.discard_from(record, 0, job).await?;
        self.remove_record(record).await?;
        sync::lock(&self.images).remove(&record.name);
        Ok(())
    }

    /// Removes what a volume has from `bytes` on.
    async fn discard_from(
        &self,
        record: &ImageRecord,
        bytes: u64,
        job: &JobHandle,
    ) -> Result<(), StoreError> {
        let (first, within) = locate(record.volume, bytes, self.shards.len());
        for shard in &*self.shards {
            let objects = list(shard, record.volume).await?;
            let behind = objects
                .into_iter()
                .filter(|object| object.index > first.index || (object.index == first.index && within == 0));
            let behind: Vec<ObjectId> = behind.collect();
            job.set_total(job.done() + behind.len() as u64, "objects");
            let remove = |object| async move {
                if job.is_cancelled() {
                    return Err(StoreError::Cancelled);
                }
                shard.perform("removing an object", ShardOperation::Remove { object }).await?;
                job.advance(1);
                Ok(())
            };
            crate::device::join_all(CONTROL_IN_FLIGHT_MAX, behind.into_iter().map(remove)).await?;
        }
        if within > 0 {
            let length = OBJECT_BYTES as u32 - within;
            let operation = ShardOperation::WriteZeroes { object: first, offset: within, length };
            self.shards[first.group as usize].perform("discarding the end of an image", operation).await?;
        }
        Ok(())
    }
}

/// Starts the shard of each partition on its core.
pub(crate) async fn start_shards<F, Fut>(
    partitions: u32,
    cores: &StoreCores<'_>,
    job: &JobHandle,
    mut start: impl FnMut(u32) -> F,
) -> Result<Vec<ShardHandle>, StoreError>
where
    F: FnOnce(Core) -> Fut + Send + 'static,
    Fut: Future<Output = Result<ShardHandle, StoreError>> + 'static,
{
    job.set_total(partitions.into(), "partitions");
    let shards = Mutex::new(BTreeMap::new());
    let starts = (0..partitions).map(|index| {
        let (start, shards) = (start(index), &shards);
        async move {
            if job.is_cancelled() {
                return Err(StoreError::Cancelled);
            }
            let shard = cores.run(index as usize, start).await?;
            sync::lock(shards).insert(index, shard);
            job.advance(1);
            Ok(())
        }
    });
    let started = crate::device::join_all(cores.starts_max(), starts).await;
    let shards = std::mem::take(&mut *sync::lock(&shards)).into_values().collect::<Vec<_>>();
    if let Err(error) = started {
        close_shards(&shards).await;
        return Err(error);
    }
    Ok(shards)
}

async fn list(shard: &ShardHandle, volume: u64) -> Result<Vec<ObjectId>, StoreError> {
    match shard.call(ShardOperation::Objects { volume }).await? {
        ControlReply::Objects(objects) => Ok(objects),
        ControlReply::Done(status) => Err(StoreError::Failed { what: "listing objects", status }),
        _ => Err(StoreError::Closed),
    }
}

/// What each shard reports.
pub(crate) async fn describe_shards(shards: &[ShardHandle]) -> Result<Vec<PartitionStatus>, StoreError> {
    let mut all = Vec::new();
    for shard in shards {
        let ControlReply::Description(status) = shard.call(ShardOperation::Describe).await? else {
            return Err(StoreError::Closed);
        };
        all.push(*status);
    }
    Ok(all)
}

/// Closes shards; one that failed has nothing to close.
pub(crate) async fn close_shards(shards: &[ShardHandle]) {
    for shard in shards {
        let _ = shard.call(ShardOperation::Close).await;
    }
}

fn check_image(name: &str, bytes: u64) -> Result<(), StoreError> {
    let refuse = |reason: String| Err(StoreError::InvalidImage(reason));
    if name.is_empty() || name.len() > ImageRecord::NAME_BYTES_MAX || name.contains(char::is_control) {
        return refuse(format!(
            "{name:?} is not a name of 1 to {} printable bytes",
            ImageRecord::NAME_BYTES_MAX
        ));
    }
    if !store_image::is_image_size(bytes) {
        return refuse(format!(
            "{bytes} bytes are no size of an image: a multiple of {IMAGE_BLOCK_BYTES}, at most {IMAGE_BYTES_MAX}"
        ));
    }
    Ok(())
}
