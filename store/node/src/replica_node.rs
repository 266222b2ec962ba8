//! The replicas on one device: each group's replica with its log and objects, on the core that owns them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use bdev::{BlockDevice, Durability, Registry};
use cluster_map::{PartitionSize, PoolClass, PoolRecord};
use control::JobHandle;
use reactor::Core;
use replica::{CopyPacer, ObjectPart, ReplicaId, ReplicaSettings, VolumeStats, VolumeTotals};
use wire_store::Superblock;

use crate::device::join_all;
use crate::device_memory::DeviceMemory;
use crate::disks::{StoreBdevs, StoreDescriptors, StoreDisks, is_encrypted, open_store};
use crate::node::{close_shards, describe_shards};
use crate::once::once;
use crate::shard::replication::{Outbox, ReplicaInput, ReplicaOptions, start};
use crate::shard::scrub_state::ScrubStep;
use crate::shard::{Reply, ShardHandle, ShardOperation, ShardRequest};
use crate::spare::{self, SPARE_GROUP};
use crate::threads::StoreThreads;
use crate::tuning::StoreTuning;
use crate::{PartitionStatus, StoreCores, StoreError};

/// Makes the outbox of a group, on the core that owns its replica.
pub type MakeOutbox = dyn Fn(&Core, u32) -> Box<dyn Outbox> + Send + Sync;

/// What a pool demands of its groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// Replicas in sync that writes need.
    pub in_sync_min: usize,
    /// When a write is acknowledged.
    pub class: PoolClass,
}

impl From<&PoolRecord> for PoolOptions {
    fn from(pool: &PoolRecord) -> PoolOptions {
        PoolOptions { in_sync_min: pool.in_sync_min as usize, class: pool.class }
    }
}

/// How replicas run.
pub struct ReplicaNodeConfig<'a> {
    /// Who uses the device, for messages.
    pub name: &'a str,
    /// Number of the node: its replica of every group has it.
    pub id: ReplicaId,
    /// The same on all nodes.
    pub settings: ReplicaSettings,
    /// The pools, by logical groups. Other groups need as many replicas in sync as the settings say, and are
    /// of class `disk`.
    pub pools: Vec<(Range<u32>, PoolOptions)>,
    /// The boot of the machine, a UUID: another one means that caches of devices are lost.
    pub boot: [u8; 16],
    /// How its partitions run.
    pub tuning: StoreTuning,
    /// Which threads do their work.
    pub threads: StoreThreads,
    /// The outboxes.
    pub outbox: Arc<MakeOutbox>,
}

/// The replicas on an open device. Each has a partition; others are spare, for replicas that the node gets
/// later.
pub struct ReplicaNode {
    device: Arc<BlockDevice>,
    log_device: Option<Arc<BlockDevice>>,
    durability: Durability,
    superblock: Superblock,
    id: ReplicaId,
    settings: ReplicaSettings,
    pacer: Arc<CopyPacer>,
    volumes: Arc<VolumeTotals>,
    boot: [u8; 16],
    tuning: StoreTuning,
    threads: StoreThreads,
    outbox: Arc<MakeOutbox>,
    memory: DeviceMemory,
    partitions: Mutex<Partitions>,
}

/// A partition that is damaged or cannot be read, so that its group has no replica here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedPartition {
    /// Its index on the device.
    pub index: u32,
    /// Its logical group; `None` if the headers of its log, which name it, are damaged.
    pub group: Option<u32>,
    /// What is wrong with it.
    pub reason: String,
}

#[derive(Default)]
struct Partitions {
    /// Not after [`ReplicaNode::close`].
    descriptors: Option<StoreDescriptors>,
    /// By logical group: the partition, and the shard on it.
    hosted: BTreeMap<u32, (u32, ShardHandle)>,
    spare: BTreeSet<u32>,
    /// By index: they are kept as they are.
    failed: BTreeMap<u32, FailedPartition>,
    /// No checkpoint record of a replica that was on the device has a higher generation.
    generation: u64,
}

impl ReplicaNode {
    /// What clients did to volumes since this was opened, through the primaries here. Those without a volume
    /// are of several. It waits for no core.
    pub fn volumes(&self) -> BTreeMap<Option<u64>, VolumeStats> {
        self.volumes.all()
    }

    /// Bounds the bytes in a second that are copied from here to replicas of other nodes.
    pub fn set_recovery_rate(&self, rate: Option<u64>) {
        self.pacer.set_rate(rate);
    }

    /// Opens the replicas on a block device, which it claims, and starts them: they wait for the map's record
    /// ([`ReplicaInput::Map`]). Without those whose [partitions are damaged](Self::failed_partitions).
    ///
    /// # Errors
    /// [`StoreError::NoStore`], and what else is wrong with it.
    pub async fn open(
        registry: &Registry,
        bdevs: impl Into<StoreBdevs<'_>>,
        cores: &StoreCores<'_>,
        config: ReplicaNodeConfig<'_>,
        job: &JobHandle,
    ) -> Result<ReplicaNode, StoreError> {
        let opened = ReplicaNode::open_devices(registry, bdevs.into(), cores, config, job).await;
        if opened.is_err() {
            // The device is free for others when this returns.
            cores.settle().await?;
        }
        opened
    }

    async fn open_devices(
        registry: &Registry,
        bdevs: StoreBdevs<'_>,
        cores: &StoreCores<'_>,
        config: ReplicaNodeConfig<'_>,
        job: &JobHandle,
    ) -> Result<ReplicaNode, StoreError> {
        let (mut descriptors, superblock) = open_store(registry, bdevs, config.name, cores).await?;
        descriptors.tuning = config.tuning;
        config.threads.check(registry, &descriptors.devices())?;
        descriptors.threads = config.threads.clone();
        descriptors.check_logs_of_replicas()?;
        let durability = descriptors.durability();
        if superblock.checkpoint_blocks == 0 {
            let reason = "the device has a store without replicas: `store_open` opens it";
            return Err(StoreError::Geometry(reason.to_string()));
        }
        let ReplicaNodeConfig { id, settings, pools, boot, tuning, threads, outbox, .. } = config;
        let device = descriptors.data.device().clone();
        let log_device = descriptors.separate_log().map(|log| log.device().clone());
        let memory = DeviceMemory::open(cores, descriptors.clone(), superblock.clone()).await?;
        let partitions = Mutex::new(Partitions { descriptors: Some(descriptors), ..Partitions::default() });
        let node = ReplicaNode {
            device,
            log_device,
            durability,
            superblock,
            id,
            settings,
            pacer: Arc::default(),
            volumes: Arc::default(),
            boot,
            tuning,
            threads,
            outbox,
            memory,
            partitions,
        };
        let of_others = PoolOptions { in_sync_min: node.settings.in_sync_min, class: PoolClass::Disk };
        let pool_of = |group: u32| {
            let found = pools.iter().find(|(groups, _)| groups.contains(&group));
            found.map_or(of_others, |(_, pool)| *pool)
        };
        let (owners, generation) = match node.read_owners(cores).await {
            Ok(read) => read,
            Err(error) => {
                node.close().await;
                return Err(error);
            }
        };
        sync::lock(&node.partitions).generation = generation;
        job.set_total(owners.len() as u64, "partitions");
        let mut groups = BTreeMap::new();
        let mut is_twice = false;
        for (index, owner) in (0..).zip(owners) {
            match owner {
                Ok(SPARE_GROUP) => _ = sync::lock(&node.partitions).spare.insert(index),
                Ok(group) => {
                    is_twice |= groups.insert(group, index).is_some();
                    continue;
                }
                Err(error) => node.fail_partition(index, None, &error),
            }
            job.advance(1);
        }
        if is_twice {
            node.close().await;
            return Err(StoreError::Geometry("two partitions of the device are of one group".to_string()));
        }
        let starts = groups.into_iter().map(|(group, index)| {
            let (node, pool) = (&node, pool_of(group));
            async move {
                if job.is_cancelled() {
                    return Err(StoreError::Cancelled);
                }
                match node.restart_shard(cores, index, group, pool).await {
                    Err(error) if error.is_damage() => node.fail_partition(index, Some(group), &error),
                    started => started?,
                }
                job.advance(1);
                Ok(())
            }
        });
        let started = join_all(cores.starts_max(), starts).await;
        if let Err(error) = started {
            node.close().await;
            return Err(error);
        }
        Ok(node)
    }

    /// The group of each partition's log, or why it is not known, and the highest generation of a checkpoint
    /// record.
    async fn read_owners(
        &self,
        cores: &StoreCores<'_>,
    ) -> Result<(Vec<Result<u32, StoreError>>, u64), StoreError> {
        let (descriptors, superblock) = (self.descriptors()?, self.superblock.clone());
        let read = move |core: Core| async move {
            let disks = descriptors.disks(&core)?;
            let (mut owners, mut newest) = (Vec::new(), 0);
            for index in 0..superblock.partitions {
                let owner = match spare::read_owner(disks.log(), &superblock, index).await {
                    Err(error) if error.is_damage() => {
                        owners.push(Err(error));
                        continue;
                    }
                    read => read?,
                };
                newest = newest.max(spare::read_generation(disks.log(), &superblock, index, &owner).await?);
                owners.push(Ok(owner.group));
            }
            drop(descriptors);
            disks.close().await;
            Ok((owners, newest))
        };
        cores.run(0, read).await
    }

    fn fail_partition(&self, index: u32, group: Option<u32>, error: &StoreError) {
        let of_group = group.map_or_else(String::new, |group| format!(" of group {group}"));
        log::error!("partition {index}{of_group} is kept as it is, and has no replica: {error}");
        let failed = FailedPartition { index, group, reason: error.to_string() };
        sync::lock(&self.partitions).failed.insert(index, failed);
    }

    /// Starts a replica that was there before. If its device may have lost what it acknowledged, it has no
    /// data any more, and gets a copy.
    async fn restart_shard(
        &self,
        cores: &StoreCores<'_>,
        index: u32,
        group: u32,
        pool: PoolOptions,
    ) -> Result<(), StoreError> {
        if pool.class == PoolClass::Memory {
            let (descriptors, superblock, boot) = (self.descriptors()?, self.superblock.clone(), self.boot);
            let generation = {
                let mut partitions = sync::lock(&self.partitions);
                partitions.generation = spare::generation_after(partitions.generation);
                partitions.generation
            };
            let forget = move |core: Core| async move {
                let disks = descriptors.disks(&core)?;
                let is_lost = spare::is_lost(disks.log(), &superblock, index, boot).await;
                let forgotten = match is_lost {
                    Ok(true) => {
                        log::warn!(
                            "group {group} is of class memory, and this machine was booted again: its replica gets a copy"
                        );
                        forget(&disks, &superblock, index, group, generation).await
                    }
                    is_lost => is_lost.map(drop),
                };
                drop(descriptors);
                disks.close().await;
                forgotten
            };
            cores.run(index as usize, forget).await?;
        }
        self.start_shard(cores, index, group, pool).await.map(drop)
    }

    /// Starts the replica on a partition.
    async fn start_shard(
        &self,
        cores: &StoreCores<'_>,
        index: u32,
        group: u32,
        pool: PoolOptions,
    ) -> Result<ReplicaHandle, StoreError> {
        let (of_core, superblock) = (self.descriptors()?, self.superblock.clone());
        let (id, pacer, outbox) = (self.id, self.pacer.clone(), self.outbox.clone());
        let volumes = self.volumes.clone();
        let settings = ReplicaSettings { group, in_sync_min: pool.in_sync_min, ..self.settings.clone() };
        let (class, boot) = (pool.class, self.boot);
        let run = move |core: Core| async move {
            start(&core, &of_core, &superblock, index, |group| ReplicaOptions {
                id,
                settings,
                pacer,
                volumes,
                outbox: outbox(&core, group),
                class,
                boot,
            })
            .await
        };
        let shard = cores.run(index as usize, run).await?;
        sync::lock(&self.partitions).hosted.insert(group, (index, shard.clone()));
        Ok(ReplicaHandle(shard))
    }

    /// Makes a replica of a group on a spare partition: one of a new group, of which nothing is written yet,
    /// or one that needs a copy of what others have. Replicas are added and removed one after another, with
    /// the cores that the node was opened with.
    ///
    /// # Errors
    /// [`StoreError::NoSpare`] if all partitions are in use, [`StoreError::Damaged`] if the group has one
    /// that failed; what the device reports.
    pub async fn add_group(
        &self,
        cores: &StoreCores<'_>,
        group: u32,
        is_new: bool,
        pool: PoolOptions,
    ) -> Result<ReplicaHandle, StoreError> {
        let (index, generation) = {
            if let Some(FailedPartition { index: partition, reason, .. }) = self.failed_partition_of(group) {
                return Err(StoreError::Damaged { partition, group, reason });
            }
            let mut partitions = sync::lock(&self.partitions);
            let index = partitions.spare.first().copied().ok_or(StoreError::NoSpare(group))?;
            partitions.generation = spare::generation_after(partitions.generation);
            (index, partitions.generation)
        };
        let (descriptors, superblock) = (self.descriptors()?, self.superblock.clone());
        let give = move |core: Core| async move {
            let disks = descriptors.disks(&core)?;
            let given = spare::give_to(&disks, &superblock, index, group, generation, is_new).await;
            drop(descriptors);
            disks.close().await;
            given
        };
        cores.run(index as usize, give).await?;
        sync::lock(&self.partitions).spare.remove(&index);
        let started = self.start_shard(cores, index, group, pool).await;
        started.inspect_err(|error| self.fail_partition(index, Some(group), error))
    }

    /// Removes the replica of a group with its data: it is no member of the group any more.
    ///
    /// # Errors
    /// What the device reports.
    pub async fn remove_group(&self, cores: &StoreCores<'_>, group: u32) -> Result<(), StoreError> {
        let removed = sync::lock(&self.partitions).hosted.remove(&group);
        let Some((index, shard)) = removed else { return Ok(()) };
        close_shards(&[shard]).await;
        self.make_spare(cores, index).await
    }

    /// Makes a partition that failed a spare one: what it has is discarded. The caller knows that other nodes
    /// have the data of its group.
    ///
    /// # Errors
    /// What the device reports: the partition is as before.
    pub async fn discard_partition(&self, cores: &StoreCores<'_>, index: u32) -> Result<(), StoreError> {
        if !sync::lock(&self.partitions).failed.contains_key(&index) {
            return Ok(());
        }
        self.make_spare(cores, index).await
    }

    async fn make_spare(&self, cores: &StoreCores<'_>, index: u32) -> Result<(), StoreError> {
        let (descriptors, superblock) = (self.descriptors()?, self.superblock.clone());
        let take = move |core: Core| async move {
            let disks = descriptors.disks(&core)?;
            let taken = spare::take_back(disks.log(), &superblock, index).await;
            drop(descriptors);
            disks.close().await;
            taken
        };
        cores.run(index as usize, take).await?;
        let mut partitions = sync::lock(&self.partitions);
        partitions.failed.remove(&index);
        partitions.spare.insert(index);
        Ok(())
    }

    /// The partitions that failed since the node was opened.
    pub fn failed_partitions(&self) -> Vec<FailedPartition> {
        sync::lock(&self.partitions).failed.values().cloned().collect()
    }

    /// The partition of a group that failed.
    pub(crate) fn failed_partition_of(&self, group: u32) -> Option<FailedPartition> {
        let partitions = sync::lock(&self.partitions);
        partitions.failed.values().find(|failed| failed.group == Some(group)).cloned()
    }

    /// Whether a partition that failed has, or may have, what a group's replica had.
    pub(crate) fn may_have_failed(&self, group: u32) -> bool {
        let partitions = sync::lock(&self.partitions);
        partitions.failed.values().any(|failed| failed.group.is_none_or(|known| known == group))
    }

    /// How its partitions run.
    pub fn tuning(&self) -> StoreTuning {
        self.tuning
    }

    /// Which threads do their work.
    pub fn threads(&self) -> &StoreThreads {
        &self.threads
    }

    /// What its devices remember of its past.
    pub(crate) fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    fn descriptors(&self) -> Result<StoreDescriptors, StoreError> {
        sync::lock(&self.partitions).descriptors.clone().ok_or(StoreError::Closed)
    }

    /// In the order of their partitions.
    fn shards(&self) -> Vec<ShardHandle> {
        let partitions = sync::lock(&self.partitions);
        let mut all: Vec<_> = partitions.hosted.values().cloned().collect();
        all.sort_by_key(|(index, _)| *index);
        all.into_iter().map(|(_, shard)| shard).collect()
    }

    /// Partitions that are spare.
    pub fn spare_partitions(&self) -> usize {
        sync::lock(&self.partitions).spare.len()
    }

    /// The device that they are on.
    pub fn device(&self) -> &Arc<BlockDevice> {
        &self.device
    }

    /// The device that their logs are on, if that is another one.
    pub fn log_device(&self) -> Option<&Arc<BlockDevice>> {
        self.log_device.as_ref()
    }

    /// Whether what it writes, to its logs too, is encrypted by crypto bdevs.
    pub fn is_encrypted(&self) -> bool {
        let logs = self.log_device.as_deref().into_iter();
        logs.chain([&*self.device]).all(is_encrypted)
    }

    /// What acknowledged writes survive on these devices.
    pub fn durability(&self) -> Durability {
        self.durability
    }

    /// The identity of the device, and its division.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// How large its partitions are.
    pub fn partition_size(&self) -> PartitionSize {
        let layout = self.superblock.layout().expect("a partition that was opened has room for an extent");
        PartitionSize { extents: layout.extents, onodes: layout.onodes }
    }

    /// The groups that have a replica here.
    pub fn groups(&self) -> Vec<u32> {
        sync::lock(&self.partitions).hosted.keys().copied().collect()
    }

    /// The way to a group's replica, for any thread.
    pub fn replica(&self, group: u32) -> Option<ReplicaHandle> {
        sync::lock(&self.partitions).hosted.get(&group).map(|(_, shard)| ReplicaHandle(shard.clone()))
    }

    /// What each partition reports.
    ///
    /// # Errors
    /// [`StoreError::Closed`].
    pub async fn status(&self) -> Result<Vec<PartitionStatus>, StoreError> {
        describe_shards(&self.shards()).await
    }

    /// Stops the replicas, and releases the device. What they have not written in place is in their logs.
    pub async fn close(&self) {
        sync::lock(&self.partitions).descriptors = None;
        self.memory.close().await;
        close_shards(&self.shards()).await;
    }
}

/// Makes a partition of a replica one that needs a copy.
async fn forget(
    disks: &StoreDisks,
    superblock: &Superblock,
    index: u32,
    group: u32,
    generation: u64,
) -> Result<(), StoreError> {
    spare::take_back(disks.log(), superblock, index).await?;
    spare::give_to(disks, superblock, index, group, generation, false).await
}

/// The way to a replica, for any thread.
#[derive(Clone)]
pub struct ReplicaHandle(ShardHandle);

impl ReplicaHandle {
    /// What its group uses of its partition, as of the last batch in place or checkpoint.
    pub fn used(&self) -> PartitionSize {
        self.0.used()
    }

    /// Compares the part after another one with what the other members of its group have.
    pub(crate) async fn scrub(&self, after: Option<ObjectPart>) -> Result<ScrubStep, StoreError> {
        let (answer, step) = once();
        let operation = ShardOperation::Scrub { after, answer };
        let request = ShardRequest { operation, reply: Reply::None };
        self.0.send(request).map_err(|_| StoreError::Busy)?;
        step.await.ok_or(StoreError::Closed)
    }

    /// Hands it something; `false` if too much waits for its core already, and it is dropped.
    pub fn send(&self, input: ReplicaInput) -> bool {
        let operation = ShardOperation::Replica(Box::new(input));
        let request = ShardRequest { operation, reply: Reply::None };
        self.0.send(request).is_ok()
    }
}
