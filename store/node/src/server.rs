//! The server of a node: connections of other nodes and of clients, and the map.
//!
//! One poller, on the node's first core, has all connections. What arrives goes to the cores that own the groups, by
//! mailbox; so does what they send. A thread of its own asks the map, so that nothing else waits for it.

mod hosting;
mod hub;
mod keys;
mod leave;
mod map_watch;
mod membership;
mod memory;
mod preferred;
mod report;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bdev::{Registry, Uuid};
use cluster_map::{ClusterMap, ReplicaId};
use control::JobHandle;
use control::json::Value;
use reactor::{Core, MailboxSender};
use replica::{ClientReply, GroupConfig, ReplicaMessage, ReplicaSettings};
use sockets::{CoreNetwork, StreamAddress};
use store_link::Identity;

use crate::disks::class_of;
use crate::once::once;
use crate::{Outbox, PoolOptions, ReplicaNode, ReplicaNodeConfig, StoreBdevs, StoreCores, StoreError};
use hub::{Hub, HubInput};
pub use keys::ClientKeyTable;
use map_watch::{MapWatch, MapWatchConfig, Proposals};
pub use membership::NoRoom;
use memory::KeptMemory;
use report::NodeReport;

/// Messages that wait for the connections, from all cores.
const HUB_MAILBOX: usize = 16 << 10;

/// How a node runs.
pub struct NodeServerConfig {
    /// Block device with the node's replicas.
    pub bdev_name: String,
    /// Block device with their logs, if these are on one of their own.
    pub log_bdev_name: Option<String>,
    /// Where others connect to it. Port 0 selects a free one.
    pub listen: StreamAddress,
    /// Who it is.
    pub identity: Identity,
    /// Its UUID, as on its device.
    pub node: Uuid,
    /// The keys of clients that it takes.
    pub keys: ClientKeyTable,
    /// The map of its cluster.
    pub map: Arc<dyn ClusterMap>,
    /// Seconds after which others see that it is down; at least 2.
    pub lease_seconds: u32,
    /// How long a node is down before others say that it is out.
    pub out_after: Duration,
    /// The same on all nodes.
    pub settings: ReplicaSettings,
    /// The pools, by logical groups.
    pub pools: Vec<(Range<u32>, PoolOptions)>,
    /// The boot of the machine, a UUID.
    pub boot: [u8; 16],
    /// Limit for checksums in memory, as in [`ReplicaNodeConfig`].
    pub checksum_cache_bytes: u64,
}

/// A node that serves.
pub struct NodeServer {
    cluster_map: Arc<dyn ClusterMap>,
    report: Arc<NodeReport>,
    hub: MailboxSender<HubInput>,
    map: Option<MapWatch>,
}

/// The outbox of a group: what it sends goes to the connections' core, its proposals to the map's thread.
struct NodeOutbox {
    hub: MailboxSender<HubInput>,
    proposals: Proposals,
}

impl Outbox for NodeOutbox {
    // What finds no room is lost, as on a link, and sent again.
    fn send(&mut self, group: u32, to: ReplicaId, message: ReplicaMessage) {
        let _ = self.hub.send(HubInput::Send { group, to, message: Box::new(message) });
    }

    fn reply(&mut self, group: u32, client: u64, number: u64, reply: ClientReply) {
        let _ = self.hub.send(HubInput::Reply { group, client, number, reply });
    }

    fn propose(&mut self, group: u32, config: Arc<GroupConfig>) {
        self.proposals.add(group, config);
    }

    fn restored(&mut self, group: u32) {
        self.proposals.restored(group);
    }
}

/// Refuses a device of another cluster or node.
async fn check_identity(
    node: ReplicaNode,
    bdev_name: &str,
    cluster: [u8; 16],
    uuid: Uuid,
) -> Result<ReplicaNode, StoreError> {
    let superblock = node.superblock();
    let what = if superblock.cluster != cluster {
        "cluster"
    } else if superblock.node != uuid.into_bytes() {
        "node"
    } else {
        return Ok(node);
    };
    node.close().await;
    Err(StoreError::Foreign { device: bdev_name.to_string(), what })
}

impl NodeServer {
    /// Opens the replicas on a device, listens, and serves.
    ///
    /// # Errors
    /// [`StoreError`]: of the device, [`StoreError::Listen`], [`StoreError::Foreign`] if the device is another node's.
    pub async fn start<N: CoreNetwork>(
        registry: &Registry,
        cores: &StoreCores<'_>,
        config: NodeServerConfig,
        job: &JobHandle,
    ) -> Result<NodeServer, StoreError> {
        let id = config.identity.node.ok_or(StoreError::Closed)?;
        let cluster = config.identity.cluster;
        let identity = Arc::new(config.identity);
        let listen = config.listen.clone();
        let grants = config.keys.grants();
        let start = move |core: Core| async move { Hub::<N>::start(&core, identity, grants, &listen) };
        let (hub, address) = cores.run(0, start).await?;
        let (proposals, receiver) = map_watch::proposals();
        let (of_groups, to_map) = (hub.clone(), proposals.clone());
        let outbox = Arc::new(move |_: &Core, _: u32| -> Box<dyn Outbox> {
            Box::new(NodeOutbox { hub: of_groups.clone(), proposals: to_map.clone() })
        });
        let (settings, pools, boot) = (config.settings, config.pools, config.boot);
        let (lease_ns, grace_ns) = (settings.lease_ns, settings.grace_ns);
        let checksum_cache_bytes = config.checksum_cache_bytes;
        let replicas =
            ReplicaNodeConfig { name: "node", id, settings, pools, boot, checksum_cache_bytes, outbox };
        let bdevs = StoreBdevs { data: &config.bdev_name, log: config.log_bdev_name.as_deref() };
        let opened = ReplicaNode::open(registry, bdevs, cores, replicas, job).await;
        let opened = match opened {
            Ok(node) => check_identity(node, &config.bdev_name, cluster, config.node).await,
            Err(error) => Err(error),
        };
        let node = match opened {
            Ok(node) => Arc::new(node),
            Err(error) => {
                let _ = hub.send(HubInput::Close(once().0));
                return Err(error);
            }
        };
        let groups = node.groups().into_iter();
        let groups: BTreeMap<_, _> = groups.filter_map(|group| Some((group, node.replica(group)?))).collect();
        let _ = hub.send(HubInput::Replicas(groups.clone()));
        let refused: Arc<Mutex<BTreeMap<u32, String>>> = Arc::default();
        let without_room: Arc<Mutex<BTreeMap<u32, NoRoom>>> = Arc::default();
        let addresses: Arc<Mutex<BTreeMap<ReplicaId, StreamAddress>>> = Arc::default();
        let report = Arc::new(NodeReport {
            node: node.clone(),
            is_leaving: AtomicBool::new(false),
            id,
            cluster: Uuid::from_bytes(cluster),
            bdev_name: config.bdev_name,
            address,
            lease_ns,
            grace_ns,
            refused: refused.clone(),
            without_room: without_room.clone(),
            addresses: addresses.clone(),
        });
        report::start_reporter(&report, hub.clone());
        let cluster_map = config.map.clone();
        let memory = KeptMemory::new(config.map.clone(), id, node.clone());
        let watch = MapWatchConfig {
            map: config.map,
            cluster: Uuid::from_bytes(cluster),
            node: id,
            keys: config.keys,
            lease_seconds: config.lease_seconds,
            out_after: config.out_after,
            groups,
            partition: node.partition_size(),
            class: class_of(node.durability()),
            hub: hub.clone(),
            proposals,
            refused,
            without_room,
            addresses,
            memory,
            host: match cores {
                StoreCores::Reactors(reactors) => Some((node.clone(), reactors.to_vec())),
                // It cannot wait for itself.
                StoreCores::This(_) => None,
            },
        };
        let map = Some(MapWatch::start(watch, receiver));
        Ok(NodeServer { cluster_map, report, hub, map })
    }

    /// Its number.
    pub fn id(&self) -> ReplicaId {
        self.report.id
    }

    /// Name of its block device.
    pub fn bdev_name(&self) -> &str {
        &self.report.bdev_name
    }

    /// Name of the block device with its logs, if that is another one.
    pub fn log_bdev_name(&self) -> Option<&str> {
        self.report.node.log_device().map(|device| device.name())
    }

    /// Where it listens.
    pub fn address(&self) -> &StreamAddress {
        &self.report.address
    }

    /// What it reports: the result of the method `store_node_get_status`.
    ///
    /// # Errors
    /// [`StoreError::Closed`].
    pub async fn report(&self) -> Result<Value, StoreError> {
        self.report.make().await
    }

    /// Ends its connections and its replicas, and releases the device.
    pub async fn close(mut self) {
        let (sender, receiver) = once();
        if self.hub.send(HubInput::Close(sender)).is_ok() {
            receiver.await;
        }
        self.map.take().into_iter().for_each(MapWatch::stop);
        self.report.node.close().await;
    }
}
