//! The devices of a store: one with everything, or one with the partitions and one with the logs.

use std::sync::Arc;

use bdev::{Access, BdevError, BlockDevice, Descriptor, Durability, Registry};
use cluster_map::PoolClass;
use reactor::Core;
use uuid::Uuid;
use wire_store::{BLOCK_BYTES, DecodeError, LogSuperblock, Superblock};

use crate::device::StoreDevice;
use crate::format::{read_head, read_superblock};
use crate::threads::StoreThreads;
use crate::tuning::StoreTuning;
use crate::{StoreCores, StoreError};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Which bdevs have a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreBdevs<'a> {
    /// The partitions, and the logs unless they are elsewhere.
    pub data: &'a str,
    /// The logs, if these are on a device of their own.
    pub log: Option<&'a str>,
}

impl<'a> From<&'a str> for StoreBdevs<'a> {
    fn from(data: &'a str) -> StoreBdevs<'a> {
        StoreBdevs { data, log: None }
    }
}

impl<'a> From<&'a String> for StoreBdevs<'a> {
    fn from(data: &'a String) -> StoreBdevs<'a> {
        StoreBdevs { data, log: None }
    }
}

impl StoreBdevs<'_> {
    /// What acknowledged writes of a store on these bdevs survive.
    ///
    /// # Errors
    /// [`BdevError::NotFound`].
    pub fn durability(&self, registry: &Registry) -> Result<Durability, BdevError> {
        let find = |name: &str| {
            let device = registry.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
            Ok::<_, BdevError>(device.durability())
        };
        let data = find(self.data)?;
        Ok(acknowledged(data, self.log.map_or(Ok(data), find)?))
    }
}

/// What acknowledged writes survive: they are in the log, until they are in place and flushed. So data on a
/// disk is no weaker than a log in persistent memory.
fn acknowledged(data: Durability, log: Durability) -> Durability {
    if data.is_volatile() { data.min(log) } else { log }
}

/// The class that a pool would have for this.
pub fn class_of(durability: Durability) -> PoolClass {
    match durability {
        Durability::None | Durability::Process | Durability::Memory => PoolClass::Memory,
        Durability::Disk => PoolClass::Disk,
        Durability::Pmem => PoolClass::Pmem,
    }
}

/// The product name of bdevs that encrypt their base.
const ENCRYPTED: &str = "crypto";

/// Whether what is written to a device is encrypted by a crypto bdev.
pub(crate) fn is_encrypted(device: &BlockDevice) -> bool {
    device.bdev().product_name() == ENCRYPTED
}

/// The descriptors of a store's devices.
#[derive(Clone)]
pub(crate) struct StoreDescriptors {
    pub(crate) data: Arc<Descriptor>,
    /// That of the log's own device.
    separate_log: Option<Arc<Descriptor>>,
    pub(crate) tuning: StoreTuning,
    pub(crate) threads: StoreThreads,
}

impl StoreDescriptors {
    pub(crate) fn open(
        registry: &Registry,
        bdevs: StoreBdevs<'_>,
        access: Access<'_>,
    ) -> Result<StoreDescriptors, StoreError> {
        if bdevs.log == Some(bdevs.data) {
            let reason = format!("{} is for the partitions and for the logs: name another one", bdevs.data);
            return Err(StoreError::Geometry(reason));
        }
        let open = |name: &str| registry.open(name, access).map(Arc::new);
        let descriptors = StoreDescriptors {
            data: open(bdevs.data)?,
            separate_log: bdevs.log.map(open).transpose()?,
            tuning: StoreTuning::default(),
            threads: StoreThreads::default(),
        };
        // What is in place relies on whole sectors; the logs do not.
        if descriptors.data.device().durability() == Durability::Pmem {
            let reason = format!(
                "{} is persistent memory, of which a power failure tears sectors: only the logs of a store may be there",
                bdevs.data
            );
            return Err(StoreError::Geometry(reason));
        }
        Ok(descriptors)
    }

    /// Most blocks of the checksum table that a partition has in memory.
    pub(crate) fn checksum_blocks_max(&self, superblock: &Superblock) -> usize {
        (self.tuning.checksum_cache_bytes / BLOCK / u64::from(superblock.partitions.max(1))) as usize
    }

    /// The device with the logs.
    pub(crate) fn log(&self) -> &Arc<Descriptor> {
        self.separate_log.as_ref().unwrap_or(&self.data)
    }

    pub(crate) fn separate_log(&self) -> Option<&Arc<Descriptor>> {
        self.separate_log.as_ref()
    }

    /// The devices.
    pub(crate) fn devices(&self) -> Vec<&BlockDevice> {
        self.separate_log.iter().chain([&self.data]).map(|it| &**it.device()).collect()
    }

    /// Opens channels on this core.
    pub(crate) fn disks(&self, core: &Core) -> Result<StoreDisks, StoreError> {
        let data = StoreDevice::open(core, &self.data)?;
        let separate_log = self.separate_log.as_ref().map(|log| StoreDevice::open(core, log)).transpose()?;
        Ok(StoreDisks { data, separate_log })
    }

    /// The same error, of an encrypted device without a store with the reasons that there may be.
    pub(crate) fn explain(&self, error: StoreError) -> StoreError {
        let device = match &error {
            StoreError::NoStore(_) => self.data.device(),
            StoreError::NoLogs(_) => self.log().device(),
            _ => return error,
        };
        match is_encrypted(device) {
            true => StoreError::NotDecrypted { bdev: device.name().to_string() },
            false => error,
        }
    }

    /// What acknowledged writes survive.
    pub(crate) fn durability(&self) -> Durability {
        acknowledged(self.data.device().durability(), self.log().device().durability())
    }

    /// Refuses logs of replicas that end before the data does: the replicas would be lost with them.
    pub(crate) fn check_logs_of_replicas(&self) -> Result<(), StoreError> {
        let (data, log) = (self.data.device(), self.log().device());
        if log.durability().is_volatile() && log.durability() < data.durability() {
            let (log, data) = (log.name().to_string(), data.name().to_string());
            return Err(StoreError::LogInMemory { log, data });
        }
        Ok(())
    }
}

/// The devices as background work uses them.
#[derive(Clone)]
pub(crate) struct StoreDisks {
    pub(crate) data: StoreDevice,
    /// That of the logs, if they are on one of their own.
    separate_log: Option<StoreDevice>,
}

impl StoreDisks {
    /// The device with the logs, which may be that with the data.
    pub(crate) fn log(&self) -> &StoreDevice {
        self.separate_log.as_ref().unwrap_or(&self.data)
    }

    /// Each device once.
    pub(crate) fn all(&self) -> impl Iterator<Item = &StoreDevice> {
        self.separate_log.iter().chain([&self.data])
    }

    /// Makes all writes durable that completed before.
    pub(crate) async fn flush(&self) -> Result<(), StoreError> {
        for device in self.all() {
            device.flush().await?;
        }
        Ok(())
    }

    /// What is in the devices' caches counts as durable from now on.
    pub(crate) fn set_volatile(&mut self) {
        self.separate_log.iter_mut().chain([&mut self.data]).for_each(StoreDevice::set_volatile);
    }

    /// Closes the channels, and returns when that is done.
    pub(crate) async fn close(self) {
        let StoreDisks { data, separate_log } = self;
        drop(separate_log);
        data.close().await;
    }

    pub(crate) fn has_separate_log(&self) -> bool {
        self.separate_log.is_some()
    }
}

/// Opens the devices of a store for itself, and reads and compares their superblocks.
pub(crate) async fn open_store(
    registry: &Registry,
    bdevs: StoreBdevs<'_>,
    name: &str,
    cores: &StoreCores<'_>,
) -> Result<(StoreDescriptors, Superblock), StoreError> {
    let by = format!("store {name}");
    let descriptors = StoreDescriptors::open(registry, bdevs, Access::Exclusive { by: &by })?;
    let of_core = descriptors.clone();
    let read = move |core: Core| async move {
        let disks = of_core.disks(&core)?;
        read_superblocks(&disks).await
    };
    let read = cores.run(0, read).await;
    let superblock = read.map_err(|error| descriptors.explain(error))?;
    Ok((descriptors, superblock))
}

/// Reads the superblock of the device with the partitions; that of the logs must belong to it.
///
/// # Errors
/// [`StoreError::LogWanted`] and the others for log devices: a store is never opened without the logs that it
/// had.
pub(crate) async fn read_superblocks(disks: &StoreDisks) -> Result<Superblock, StoreError> {
    let superblock = match read_superblock(&disks.data).await {
        Err(StoreError::NoStore(error)) => {
            return Err(match read_log_superblock(&disks.data).await? {
                Ok(log) => StoreError::LogsOnly { device: Uuid::from_bytes(log.device) },
                Err(_) => StoreError::NoStore(error),
            });
        }
        read => read?,
    };
    if superblock.logs != superblock.partitions {
        let reason =
            format!("the store has {} logs for {} partitions", superblock.logs, superblock.partitions);
        return Err(StoreError::Geometry(reason));
    }
    let log_device = match (superblock.log_device, disks.has_separate_log()) {
        (None, false) => return Ok(superblock),
        (None, true) => return Err(StoreError::LogNotWanted),
        (Some(wanted), false) => return Err(StoreError::LogWanted { wanted: Uuid::from_bytes(wanted) }),
        (Some(wanted), true) => wanted,
    };
    let found = read_log_superblock(disks.log()).await?.map_err(StoreError::NoLogs)?;
    if found.log_device != log_device || found.device != superblock.device {
        return Err(StoreError::ForeignLogDevice {
            wanted: Uuid::from_bytes(log_device),
            found: Uuid::from_bytes(found.log_device),
        });
    }
    if LogSuperblock::of(&superblock, found.device_blocks).as_ref() != Some(&found) {
        let reason = "the device with the logs has another division than the store: one of the superblocks is an older one";
        return Err(StoreError::Geometry(reason.to_string()));
    }
    let expected = found.device_blocks.saturating_mul(BLOCK);
    if expected > disks.log().bytes() {
        return Err(StoreError::Truncated { found: disks.log().bytes(), expected });
    }
    Ok(superblock)
}

/// Reads the superblock of a device with logs alone.
pub(crate) async fn read_log_superblock(
    log: &StoreDevice,
) -> Result<Result<LogSuperblock, DecodeError>, StoreError> {
    read_head(log, LogSuperblock::decode).await
}
