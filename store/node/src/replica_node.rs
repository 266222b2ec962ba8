//! The replicas on one device: each group's replica with its log and objects, on the core that owns them.

use std::collections::BTreeMap;
use std::sync::Arc;

use bdev::{BlockDevice, Registry};
use control::JobHandle;
use reactor::Core;
use replica::{ReplicaId, ReplicaSettings};
use wire_store::Superblock;

use crate::node::{close_shards, describe_shards, open_superblock, start_shards};
use crate::shard::replication::{Outbox, ReplicaInput, ReplicaOptions, start};
use crate::shard::{Reply, ShardHandle, ShardOperation, ShardRequest};
use crate::{PartitionStatus, StoreCores, StoreError};

/// Makes the outbox of a group, on the core that owns its replica.
pub type MakeOutbox = dyn Fn(&Core, u32) -> Box<dyn Outbox> + Send + Sync;

/// How replicas run.
pub struct ReplicaNodeConfig<'a> {
    /// Who uses the device, for messages.
    pub name: &'a str,
    /// Number of the node: its replica of every group has it.
    pub id: ReplicaId,
    /// The same on all nodes.
    pub settings: ReplicaSettings,
    /// The outboxes.
    pub outbox: Arc<MakeOutbox>,
}

/// The replicas on an open device.
pub struct ReplicaNode {
    device: Arc<BlockDevice>,
    superblock: Superblock,
    /// In the order of the partitions.
    shards: Vec<ShardHandle>,
    /// Index in `shards`, by logical group.
    groups: BTreeMap<u32, usize>,
}

impl ReplicaNode {
    /// Opens the replicas on a block device, which it claims, and starts them: they wait for the map's record
    /// ([`ReplicaInput::Map`]).
    ///
    /// # Errors
    /// [`StoreError::NoStore`], and what else is wrong with it.
    pub async fn open(
        registry: &Registry,
        bdev_name: &str,
        cores: &StoreCores<'_>,
        config: ReplicaNodeConfig<'_>,
        job: &JobHandle,
    ) -> Result<ReplicaNode, StoreError> {
        let opened = ReplicaNode::open_device(registry, bdev_name, cores, config, job).await;
        if opened.is_err() {
            // The device is free for others when this returns.
            cores.settle().await?;
        }
        opened
    }

    async fn open_device(
        registry: &Registry,
        bdev_name: &str,
        cores: &StoreCores<'_>,
        config: ReplicaNodeConfig<'_>,
        job: &JobHandle,
    ) -> Result<ReplicaNode, StoreError> {
        let (descriptor, superblock) = open_superblock(registry, bdev_name, config.name, cores).await?;
        if superblock.checkpoint_blocks == 0 {
            let reason = "the device has a store without replicas: `store_open` opens it";
            return Err(StoreError::Geometry(reason.to_string()));
        }
        let start = |index| {
            let (of_core, superblock) = (descriptor.clone(), superblock.clone());
            let (id, settings, outbox) = (config.id, config.settings.clone(), config.outbox.clone());
            move |core: Core| async move {
                start(&core, &of_core, &superblock, index, |group| ReplicaOptions {
                    id,
                    settings,
                    outbox: outbox(&core, group),
                })
                .await
            }
        };
        let shards = start_shards(superblock.partitions, cores, job, start).await?;
        let node =
            ReplicaNode { device: descriptor.device().clone(), superblock, shards, groups: BTreeMap::new() };
        let replicas = node.status().await?.into_iter().filter_map(|status| status.replica);
        let groups: BTreeMap<u32, usize> =
            replicas.zip(0..).map(|(replica, index)| (replica.group, index)).collect();
        if groups.len() < node.shards.len() {
            close_shards(&node.shards).await;
            return Err(StoreError::Geometry("two partitions of the device are of one group".to_string()));
        }
        Ok(ReplicaNode { groups, ..node })
    }

    /// The device that they are on.
    pub fn device(&self) -> &Arc<BlockDevice> {
        &self.device
    }

    /// The identity of the device, and its division.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The groups that have a replica here.
    pub fn groups(&self) -> impl Iterator<Item = u32> {
        self.groups.keys().copied()
    }

    /// The way to a group's replica, for any thread.
    pub fn replica(&self, group: u32) -> Option<ReplicaHandle> {
        self.groups.get(&group).map(|index| ReplicaHandle(self.shards[*index].clone()))
    }

    /// What each partition reports.
    ///
    /// # Errors
    /// [`StoreError::Closed`].
    pub async fn status(&self) -> Result<Vec<PartitionStatus>, StoreError> {
        describe_shards(&self.shards).await
    }

    /// Stops the replicas, and releases the device. What they have not written in place is in their logs.
    pub async fn close(&self) {
        close_shards(&self.shards).await;
    }
}

/// The way to a replica, for any thread.
#[derive(Clone)]
pub struct ReplicaHandle(ShardHandle);

impl ReplicaHandle {
    /// Hands it something; `false` if too much waits for its core already, and it is dropped.
    pub fn send(&self, input: ReplicaInput) -> bool {
        let operation = ShardOperation::Replica(Box::new(input));
        let request = ShardRequest { operation, reply: Reply::None };
        self.0.send(request).is_ok()
    }
}
