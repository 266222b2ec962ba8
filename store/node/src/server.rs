//! The server of a node: connections of other nodes and of clients, and the map.
//!
//! One poller, on the node's first core, has all connections. What arrives goes to the cores that own the
//! groups, by mailbox; so does what they send. A thread of its own asks the map, so that nothing else waits
//! for it.

mod client_limits;
mod hosting;
mod hub;
mod keys;
mod leave;
mod map_watch;
mod membership;
mod memory;
mod preferred;
mod report;
pub(crate) mod scrub;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bdev::{Registry, Uuid};
use cluster_map::{ClusterMap, KnownMap, LeaseHolder, LeaseOutcome, NodeId, NodeRecord, ReplicaId};
use control::JobHandle;
use control::json::Value;
use reactor::{Core, MailboxSender};
use replica::{ClientReply, GroupConfig, ReplicaMessage, ReplicaSettings, VolumeStats};
use sockets::{ServerNetwork, StreamAddress};
use store_link::{Identity, NodeAddress};

use crate::disks::class_of;
use crate::once::once;
use crate::threads::StoreThreads;
use crate::tuning::StoreTuning;
use crate::{Outbox, PoolOptions, ReplicaNode, ReplicaNodeConfig, StoreBdevs, StoreCores, StoreError};
use client_limits::ConnectionLimits;
use hub::{ConnectionCounts, Hub, HubConfig, HubInput};
pub use keys::ClientKeyTable;
use map_watch::{MapWatch, MapWatchConfig, Proposals, Refusal, SeenMap};
pub use membership::NoRoom;
use memory::KeptMemory;
use report::NodeReport;
use scrub::{ScrubStatus, Scrubber};

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
    /// Its record in the map: its UUID is on its device.
    pub record: NodeRecord,
    /// The boot of its machine and its directory: a process there that has opened its device is in the place
    /// of one that has ended.
    pub place: String,
    /// The file that keeps what the node has seen of the map.
    pub known_map: Option<PathBuf>,
    /// Called once, on a thread that does not wait, if another process is the node: this one serves nothing
    /// then, and is to be [closed](NodeServer::close).
    pub taken: Box<dyn FnOnce(LeaseHolder) + Send>,
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
    /// How its partitions run.
    pub tuning: StoreTuning,
    /// Which threads do their work.
    pub threads: StoreThreads,
}

/// A node that serves.
pub struct NodeServer {
    cluster_map: Arc<dyn ClusterMap>,
    report: Arc<NodeReport>,
    hub: MailboxSender<HubInput>,
    map: Option<MapWatch>,
    scrubber: Option<Scrubber>,
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
    own: &OwnNode,
) -> Result<ReplicaNode, StoreError> {
    let superblock = node.superblock();
    let what = if superblock.cluster != own.cluster.into_bytes() {
        "cluster"
    } else if superblock.node != own.node.into_bytes() {
        "node"
    } else {
        return Ok(node);
    };
    node.close().await;
    Err(StoreError::Foreign { device: bdev_name.to_string(), what })
}

/// Makes this process a node, whose device it has open: one that had it before has ended. The device is
/// released if it is another node's, or another process is the node.
async fn become_node(
    node: ReplicaNode,
    bdev_name: &str,
    map: &dyn ClusterMap,
    known_map: Option<&Path>,
    own: &OwnNode,
    holder: &LeaseHolder,
) -> Result<(Arc<ReplicaNode>, KnownMap), StoreError> {
    let node = check_identity(node, bdev_name, own).await?;
    match hold(map, known_map, own, holder) {
        Ok(known) => Ok((Arc::new(node), known)),
        Err(error) => {
            node.close().await;
            Err(error)
        }
    }
}

/// A node that a process becomes.
struct OwnNode {
    cluster: Uuid,
    node: Uuid,
    id: ReplicaId,
    lease_seconds: u32,
}

/// Becomes the process of a node. Returns what the node has seen of the map.
fn hold(
    map: &dyn ClusterMap,
    known_map: Option<&Path>,
    own: &OwnNode,
    holder: &LeaseHolder,
) -> Result<KnownMap, StoreError> {
    let known = KnownMap::open(known_map, own.cluster, own.node)?;
    let seconds = own.lease_seconds;
    match map.renew_lease(NodeId(own.id.0), holder, seconds)? {
        LeaseOutcome::Held => Ok(known),
        LeaseOutcome::Taken(other) => {
            Err(StoreError::AnotherProcess { node: own.id.0, address: other.address, seconds })
        }
    }
}

/// Starts the connections of a node on its first core. Returns where it listens.
async fn start_hub<N: ServerNetwork>(
    cores: &StoreCores<'_>,
    config: &NodeServerConfig,
) -> Result<(MailboxSender<HubInput>, StreamAddress, Arc<ConnectionCounts>), StoreError> {
    let (listen, counts) = (config.listen.clone(), Arc::new(ConnectionCounts::default()));
    let hub_config = HubConfig {
        identity: Arc::new(config.identity.clone()),
        grants: config.keys.grants(),
        tls: config.record.tls,
        counts: counts.clone(),
        limits: ConnectionLimits::default(),
    };
    let start = move |core: Core| async move { Hub::<N>::start(&core, hub_config, &listen) };
    let (hub, address) = cores.run(0, start).await?;
    Ok((hub, address, counts))
}

impl NodeServer {
    /// Opens the replicas on a device, listens, and serves.
    ///
    /// # Errors
    /// [`StoreError`]: of the device, [`StoreError::Listen`], [`StoreError::Foreign`] if the device is
    /// another node's, [`StoreError::AnotherProcess`] if another process is the node.
    pub async fn start<N: ServerNetwork>(
        registry: &Registry,
        cores: &StoreCores<'_>,
        mut config: NodeServerConfig,
        job: &JobHandle,
    ) -> Result<NodeServer, StoreError> {
        let id = config.identity.node.ok_or(StoreError::Closed)?;
        let cluster = config.identity.cluster;
        let (hub, address, connections) = start_hub::<N>(cores, &config).await?;
        let (proposals, receiver) = map_watch::proposals();
        let (of_groups, to_map) = (hub.clone(), proposals.clone());
        let outbox = Arc::new(move |_: &Core, _: u32| -> Box<dyn Outbox> {
            Box::new(NodeOutbox { hub: of_groups.clone(), proposals: to_map.clone() })
        });
        let (settings, boot) = (config.settings.clone(), config.boot);
        let pools = std::mem::take(&mut config.pools);
        let (lease_ns, grace_ns) = (settings.lease_ns, settings.grace_ns);
        let (tuning, threads) = (config.tuning, config.threads.clone());
        let replicas = ReplicaNodeConfig { name: "node", id, settings, pools, boot, tuning, threads, outbox };
        let bdevs = StoreBdevs { data: &config.bdev_name, log: config.log_bdev_name.as_deref() };
        let opened = ReplicaNode::open(registry, bdevs, cores, replicas, job).await;
        let holder = LeaseHolder {
            id: Uuid::new_v4(),
            address: address.to_string(),
            place: std::mem::take(&mut config.place),
        };
        let own = OwnNode {
            cluster: Uuid::from_bytes(cluster),
            node: config.record.uuid,
            id,
            lease_seconds: config.lease_seconds,
        };
        let opened = match opened {
            Ok(node) => {
                let known_map = config.known_map.as_deref();
                become_node(node, &config.bdev_name, &*config.map, known_map, &own, &holder).await
            }
            Err(error) => Err(error),
        };
        let (node, known) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                let _ = hub.send(HubInput::Close(once().0));
                return Err(error);
            }
        };
        let groups = node.groups().into_iter();
        let groups: BTreeMap<_, _> = groups.filter_map(|group| Some((group, node.replica(group)?))).collect();
        let _ = hub.send(HubInput::Replicas(groups.clone()));
        let refused: Arc<Mutex<BTreeMap<u32, Refusal>>> = Arc::default();
        let without_room: Arc<Mutex<BTreeMap<u32, NoRoom>>> = Arc::default();
        let addresses: Arc<Mutex<BTreeMap<ReplicaId, NodeAddress>>> = Arc::default();
        let seen: Arc<Mutex<SeenMap>> = Arc::default();
        let scrubber = Scrubber::start(config.map.clone(), id.0, node.clone());
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
            connections,
            seen: seen.clone(),
            scrub: scrubber.status.clone(),
        });
        report::start_reporter(&report, hub.clone());
        let cluster_map = config.map.clone();
        let memory = KeptMemory::new(config.map.clone(), id, node.clone());
        let watch = MapWatchConfig {
            map: config.map,
            cluster: Uuid::from_bytes(cluster),
            node: id,
            holder,
            record: NodeRecord { addresses: vec![report.address.to_string()], ..config.record },
            known,
            seen,
            taken: config.taken,
            keys: config.keys,
            lease_seconds: config.lease_seconds,
            out_after: config.out_after,
            groups,
            partition: node.partition_size(),
            partitions: node.superblock().partitions,
            class: class_of(node.durability()),
            hub: hub.clone(),
            proposals,
            refused,
            without_room,
            addresses,
            memory,
            scrubs: scrubber.inputs.clone(),
            replicas: node.clone(),
            host: match cores {
                StoreCores::Reactors(reactors) => Some(reactors.to_vec()),
                // It cannot wait for itself.
                StoreCores::This(_) => None,
            },
        };
        let map = Some(MapWatch::start(watch, receiver));
        Ok(NodeServer { cluster_map, report, hub, map, scrubber: Some(scrubber) })
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

    /// What clients did to volumes since it started.
    pub fn volumes(&self) -> BTreeMap<Option<u64>, VolumeStats> {
        self.report.node.volumes()
    }

    /// What its scrubs do, and did since it started.
    pub(crate) fn scrub_status(&self) -> ScrubStatus {
        sync::lock(&self.report.scrub).clone()
    }

    /// Which threads do its work.
    pub(crate) fn threads(&self) -> &StoreThreads {
        self.report.node.threads()
    }

    /// Its connections with TLS and without, and those that were refused because there were too many.
    pub fn connections(&self) -> (u32, u32, u64) {
        self.report.connections.read()
    }

    /// Ends its connections and its replicas, and releases the device.
    pub async fn close(mut self) {
        let (sender, receiver) = once();
        if self.hub.send(HubInput::Close(sender)).is_ok() {
            receiver.await;
        }
        let scrubber = self.scrubber.take().inspect(Scrubber::stop);
        self.map.take().into_iter().for_each(MapWatch::stop);
        self.report.node.close().await;
        scrubber.into_iter().for_each(Scrubber::join);
    }
}
