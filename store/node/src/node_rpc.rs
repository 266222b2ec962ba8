//! The module of a node with replicas for the control plane: the methods `store_node_*`.
//!
//! If another process becomes the node, as a copy of its machine, this one stops it at once, and starts it
//! again when that one has ended.

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, RwLock, Weak};
use std::time::Duration;

use bdev::{Registry, Uuid};
use cluster_map::{
    ClusterMap, EtcdFiles, EtcdOptions, KnownMap, LeaseHolder, MapError, MapLocation, NodeId, NodeRecord,
    OutReason, PoolRecord, ReplicaId, TlsPolicy,
};
use control::json::{Value, json};
use control::{JobHandle, Method, Metric, MetricSamples, Module, RpcError};
use reactor::{ReactorHandle, blocking};
use replica::ReplicaSettings;
use sockets::{Sockets, StreamAddress};
use store_link::{ClusterKey, Identity};

use crate::node_metrics;
use crate::rpc::{store_threads, tuning};
use crate::{
    ClientKeyTable, NodeServer, NodeServerConfig, NonPriorityThreads, PoolOptions, StoreCores, StoreError,
    StoreTuning, ThreadMode,
};

/// The node that a program is, as a [`Module`].
pub struct NodeModule {
    registry: Registry,
    reactors: Vec<ReactorHandle>,
    /// Locked by starts and stops, which are one after the other.
    changes: Mutex<()>,
    /// Read while others take over, so that the node reports its status meanwhile.
    node: RwLock<NodeState>,
    /// The non-priority threads of the node, once it had prioritized threads.
    threads: Mutex<Option<Arc<NonPriorityThreads>>>,
    this: Weak<NodeModule>,
}

struct Running {
    server: NodeServer,
    params: NodeParams,
}

/// The node of a server.
#[derive(Default)]
enum NodeState {
    #[default]
    None,
    Running(Running),
    /// Another process is the node.
    Taken {
        params: NodeParams,
        why: String,
    },
}

impl NodeState {
    fn server(&self) -> Result<&NodeServer, RpcError> {
        match self {
            NodeState::Running(running) => Ok(&running.server),
            NodeState::Taken { why, .. } => Err(RpcError::new(RpcError::ENODEV, why.clone())),
            NodeState::None => Err(RpcError::new(NO_NODE.0, NO_NODE.1)),
        }
    }

    fn params(&self) -> Option<&NodeParams> {
        match self {
            NodeState::None => None,
            NodeState::Running(Running { params, .. }) | NodeState::Taken { params, .. } => Some(params),
        }
    }
}

/// How a node is started.
#[derive(Clone)]
struct NodeParams {
    bdev_name: String,
    log_bdev_name: Option<String>,
    cluster: PathBuf,
    etcd: EtcdOptions,
    node: u32,
    lease_s: u32,
    out_after_s: u32,
    listen: String,
    allow_plain_network: bool,
    atomic_blocks: bool,
    read_policy: ReadPolicy,
    tuning: StoreTuning,
    threads: ThreadMode,
}

control::choices! {
    /// What a read does of an object of which the log has entries.
    enum ReadPolicy {
        Overlay = "overlay",
        Flush = "flush",
    }
}

impl NodeModule {
    /// No node; one that is started runs on `reactors`.
    pub fn new(registry: Registry, reactors: &[ReactorHandle]) -> Arc<NodeModule> {
        let reactors = reactors.to_vec();
        Arc::new_cyclic(|this| NodeModule {
            registry,
            reactors,
            changes: Mutex::default(),
            node: RwLock::default(),
            threads: Mutex::default(),
            this: this.clone(),
        })
    }
}

/// Bounds of a lease: etcd grants none that is shorter.
const LEASE_S_MIN: u32 = 2;
const LEASE_S_MAX: u32 = 3600;
const MS: u64 = 1_000_000;
/// How long other nodes may take to take over before a node stops. What needs longer, as a map that does not
/// answer, would end as a failure does.
const LEAVE_MAX: Duration = Duration::from_secs(5);
/// The same for a program that ends: nothing waits for an error, and the machine may be about to stop.
const DRAIN_LEAVE_MAX: Duration = Duration::from_secs(1);
/// How often a node that another process is is tried.
const RECOVER_EVERY: Duration = Duration::from_secs(1);
/// Indices of the non-priority threads begin here: those of a store without replicas are lower.
const FIRST_INDEX: usize = 1 << 17;
const NO_NODE: (i64, &str) = (RpcError::ENODEV, "no node is started");

impl Module for NodeModule {
    const NAME: &'static str = "store_node";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];
    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<NodeModule>> {
        vec![
            Method::job("store_node_start", start)
                .text(
                    "Serves the replicas on a bdev as a node of a cluster, which `ringbolt store up` makes. Not an SPDK \
                     method.",
                    "the address that it listens on",
                )
                .errors(&[
                    (RpcError::ENODEV, "there is no such bdev, cluster or node"),
                    (RpcError::EEXIST, "this server is a node already"),
                    (RpcError::EINVAL, "the bdev has no replicas, or those of another node; the address is none"),
                    (RpcError::EBUSY, "the bdev is in use, or another process is the node"),
                    (RpcError::EIO, "the device, the map or the key cannot be used, or the address"),
                ]),
            Method::job("store_node_stop", stop)
                .text(
                    "Stops to serve, and releases the bdev. Other nodes take over before, so that clients wait for no lease. Not an \
                     SPDK method.",
                    "true",
                )
                .errors(&[
                    NO_NODE,
                    (RpcError::EBUSY, "without this node too few replicas of a group are in sync; force stops it all the same"),
                    (RpcError::ETIMEDOUT, "no other node has taken over in 5 s; force stops it all the same"),
                    (RpcError::EIO, "the map cannot be used; force stops it all the same"),
                ]),
            Method::query("store_node_get_status", get_status)
                .text(
                    "Describes the replicas of this node: their state, and why a group is not served. Not an SPDK method.",
                    "object with `node`, `state` (`serves`, or `leaving` while others take over), `cluster`, \
                     `address`, `bdev_name`, `log_bdev_name`, `encrypted` if its data and its logs are on \
                     crypto bdevs, `durability`, `lease_ms`, `grace_ms`, `replicas`, `volumes` with what \
                     clients did to images, `checksum_cache_limit_bytes`, \
                     `threads` with their wake-ups, `spare_partitions`, `failed_partitions`, `refused`, \
                     `without_room`, `connections` with and without TLS, `scrub` with what scrubs do and \
                     found since the start, `map` with what the node has seen of the map, and `nodes` with \
                     the addresses of all nodes",
                )
                .errors(&[NO_NODE]),
        ]
    }

    fn metrics() -> Vec<&'static Metric> {
        node_metrics::declared()
    }

    fn collect(&self, samples: &mut MetricSamples) {
        // A node that starts or stops has none: this does not wait for it.
        if let Ok(node) = self.node.try_read()
            && let Ok(server) = node.server()
        {
            node_metrics::collect(server, samples);
        }
    }

    fn drain(&self) {
        let _changes = sync::lock(&self.changes);
        if let Ok(server) = sync::read(&self.node).server()
            && let Err(error) = server.leave(false, DRAIN_LEAVE_MAX)
        {
            log::info!("this node ends although {error}");
        }
        let _ = self.close_node(NodeState::None);
    }

    fn save(&self) -> Vec<Value> {
        let node = sync::read(&self.node);
        let call = |params: &NodeParams| {
            let mut saved = json!({
                "bdev_name": params.bdev_name,
                "cluster": params.cluster,
                "node": params.node,
                "listen": params.listen,
                "allow_plain_network": params.allow_plain_network,
                "lease_s": params.lease_s,
                "out_after_s": params.out_after_s,
                "atomic_blocks": params.atomic_blocks,
                "read_policy": params.read_policy.name(),
                "checksum_cache_bytes": params.tuning.checksum_cache_bytes,
                "flush_entries": params.tuning.flush_entries,
                "flush_after_ms": params.tuning.flush_after.as_millis() as u64,
                "threads": params.threads.name(),
            });
            if let Some(log) = &params.log_bdev_name {
                saved["log_bdev_name"] = log.as_str().into();
            }
            for (name, value) in params.etcd.parameters() {
                saved[name] = value.into();
            }
            json!({ "method": "store_node_start", "params": saved })
        };
        node.params().map(call).into_iter().collect()
    }
}

control::parameters! {
    struct StartParams {
        /// Device with the node's replicas
        bdev_name: String,
        /// Device with the logs of the replicas, if these are on one of their own
        log_bdev_name: Option<String>,
        /// Directory of the cluster, with its key, and with its map or the URLs of etcd
        cluster: String,
        /// URLs of etcd, which has the map: `http://HOST:PORT[/PREFIX]`, with commas between
        etcd: Option<String>,
        /// File with a user of etcd, a line `NAME:PASSWORD`; without, `etcd-user` of the directory if it is
        /// there
        etcd_user_file: Option<String>,
        /// File with the certificates of etcd's CAs, which `https://` needs; without, `etcd-ca.pem` of the
        /// directory
        etcd_ca_file: Option<String>,
        /// File with a client certificate for etcd; without, `etcd-cert.pem` of the directory if it is there
        etcd_cert_file: Option<String>,
        /// File with its key; without, `etcd-key.pem` of the directory if it is there
        etcd_key_file: Option<String>,
        /// Number of the node
        node: u32,
        /// Address to listen on; port 0 selects the one that the node had before, or a free one
        listen: String = "127.0.0.1:0".to_string(),
        /// Listens on other addresses than loopback's, although data is not encrypted; not needed where the
        /// node's record in the map requires TLS
        allow_plain_network: bool = false,
        /// Seconds after which others see that the node is down, if it does not answer any more; at least 2
        lease_s: u32 = 5,
        /// Seconds that another node is down before it is out: its replicas move to other nodes
        out_after_s: u32 = 600,
        /// The device writes each aligned 4 KiB whole or not at all, also when the power fails, although it
        /// does not report that: overwrites of 4 KiB go in place, and the log has only their headers
        atomic_blocks: bool = false,
        /// What a read does of an object of which the log has entries: `overlay` lays their bytes over the
        /// device's, `flush` has them written in place and waits for that
        read_policy: ReadPolicy = ReadPolicy::Overlay,
        /// Limit for checksums in memory; 1 MiB has those of 1 GiB of data
        checksum_cache_bytes: u64 ["bytes"] = StoreTuning::default().checksum_cache_bytes,
        /// Entries of a replica beyond which they are written in place, at most 1024
        flush_entries: u32 = StoreTuning::default().flush_entries,
        /// Time after which an entry is written in place however few there are, at most 60000
        flush_after_ms: u32 ["ms"] = 100,
        /// Which threads do the work: `run-to-completion`, the core that owns a replica; `prioritized`, a
        /// priority thread, which is pinned, for connections, log and replication, and a non-priority thread
        /// for what is in place
        threads: ThreadMode = ThreadMode::RunToCompletion,
    }
}

fn start(module: &NodeModule, params: StartParams, job: &JobHandle) -> Result<String, RpcError> {
    let _changes = sync::lock(&module.changes);
    let StartParams { bdev_name, log_bdev_name, cluster, node, listen, .. } = params;
    let StartParams { etcd_user_file, etcd_ca_file, etcd_cert_file, etcd_key_file, .. } = params;
    let files = EtcdFiles::at(etcd_user_file, etcd_ca_file, etcd_cert_file, etcd_key_file);
    let etcd = EtcdOptions { urls: params.etcd, files };
    let StartParams { allow_plain_network, lease_s, out_after_s, atomic_blocks, .. } = params;
    let StartParams { read_policy, checksum_cache_bytes, flush_entries, flush_after_ms, threads, .. } =
        params;
    let params = NodeParams {
        bdev_name,
        log_bdev_name,
        cluster: cluster.into(),
        etcd,
        node,
        lease_s,
        out_after_s,
        listen,
        allow_plain_network,
        atomic_blocks,
        read_policy,
        tuning: tuning(checksum_cache_bytes, flush_entries, flush_after_ms)?,
        threads,
    };
    start_node(module, params, job)
}

/// Starts the node, with the changes locked.
fn start_node(module: &NodeModule, params: NodeParams, job: &JobHandle) -> Result<String, RpcError> {
    let mut node = sync::write(&module.node);
    if let NodeState::Running(_) = &*node {
        return Err(RpcError::new(RpcError::EEXIST, "this server is a node already"));
    }
    let NodeParams { allow_plain_network, lease_s, .. } = params;
    let (directory, id) = (&params.cluster, ReplicaId(params.node));
    if !(LEASE_S_MIN..=LEASE_S_MAX).contains(&lease_s) {
        let reason = format!("a lease of {lease_s} s is not {LEASE_S_MIN} to {LEASE_S_MAX} s");
        return Err(RpcError::new(RpcError::EINVAL, reason));
    }
    let OpenCluster { map, key, identity, record } = open_cluster(directory, &params.etcd, id)?;
    let is_permitted = allow_plain_network || record.tls == TlsPolicy::Required;
    let listen_address = parse_address(&params.listen, is_permitted)?;
    let of_pool =
        |pool: &PoolRecord| (pool.first_group..pool.first_group + pool.groups, PoolOptions::from(pool));
    let boot = this_boot();
    let pools: Vec<_> = map.pools().map_err(map_failed)?.values().map(of_pool).collect();
    let times = map.settings().map_err(map_failed)?;
    let settings = ReplicaSettings {
        checkpoint_entries: 8192,
        entries_max: 16_384,
        retained_entries: 4096,
        reads_max: 1024,
        in_place: params.atomic_blocks,
        reads_flush: params.read_policy == ReadPolicy::Flush,
        ..ReplicaSettings::with_lease(u64::from(times.lease_ms) * MS, u64::from(times.grace_ms) * MS)
    };
    let cores = StoreCores::Reactors(&module.reactors);
    let threads = {
        let places = (params.node as usize, FIRST_INDEX);
        store_threads(params.threads, &module.reactors, places, &module.threads)?
    };
    // Before it listens: a client whose key is unknown reports an error.
    let keys = ClientKeyTable::read(key, &*map).map_err(map_failed)?;
    let own_directory = directory.join(format!("node{}", params.node));
    let own_directory = own_directory.is_dir().then_some(own_directory);
    let start_at = |listen: StreamAddress| {
        let this = module.this.clone();
        let config = NodeServerConfig {
            bdev_name: params.bdev_name.clone(),
            log_bdev_name: params.log_bdev_name.clone(),
            listen,
            identity: identity.clone(),
            record: record.clone(),
            place: place(boot, own_directory.as_deref().unwrap_or(directory)),
            known_map: own_directory.as_ref().map(|directory| directory.join(KnownMap::FILE)),
            taken: Box::new(move |other| _ = std::thread::spawn(move || recover(&this, &other))),
            keys: keys.clone(),
            map: map.clone(),
            lease_seconds: lease_s,
            out_after: Duration::from_secs(params.out_after_s.max(lease_s).into()),
            settings: settings.clone(),
            pools: pools.clone(),
            boot,
            tuning: params.tuning,
            threads: threads.clone(),
        };
        let started = blocking::block_on(NodeServer::start::<Sockets>(&module.registry, &cores, config, job));
        started.map_err(|_| StoreError::Closed)?
    };
    // Clients know the address that it had before.
    let server =
        match start_at(address_before(&record, listen_address).unwrap_or(StreamAddress::Tcp(listen_address)))
        {
            Err(StoreError::Listen { .. }) if listen_address.port() == 0 => {
                start_at(StreamAddress::Tcp(listen_address))
            }
            started => started,
        }?;
    let address = server.address().to_string();
    if let Err(error) = register(&*map, NodeId(params.node), record, &address) {
        let _ = blocking::block_on(server.close());
        return Err(map_failed(error));
    }
    *node = NodeState::Running(Running { server, params });
    Ok(address)
}

/// Says in the map where a node listens, and that it is in again if it was out because it was down.
fn register(map: &dyn ClusterMap, id: NodeId, record: NodeRecord, address: &str) -> Result<(), MapError> {
    let addresses = vec![address.to_string()];
    if record.addresses != addresses {
        map.put_node(id, &NodeRecord { addresses, ..record })?;
    }
    if map.out()?.get(&id) == Some(&OutReason::Down) {
        map.set_out(id, None)?;
    }
    Ok(())
}

/// Where a process is that starts a node: it has the node's device open. A copy of the directory, and a copy
/// of the machine, are other places.
fn place(boot: [u8; 16], directory: &Path) -> String {
    let found = std::fs::metadata(directory);
    let number = found.map_or(String::new(), |found| format!("{}:{}", found.dev(), found.ino()));
    if number.is_empty() { number } else { format!("{}/{number}", Uuid::from_bytes(boot)) }
}

/// Stops a node that another process is, and starts it again when that one has ended.
fn recover(module: &Weak<NodeModule>, other: &LeaseHolder) {
    let Some(params) = module.upgrade().and_then(|module| module.take_from(other)) else { return };
    let mut last_error = String::new();
    loop {
        // The end of another process's lease is no event of this one.
        std::thread::sleep(RECOVER_EVERY);
        let Some(module) = module.upgrade() else { return };
        let _changes = sync::lock(&module.changes);
        // An operator may have stopped or started it.
        if !matches!(&*sync::read(&module.node), NodeState::Taken { .. }) {
            return;
        }
        match start_node(&module, params.clone(), &JobHandle::standalone()) {
            Ok(address) => {
                log::info!("node {} serves again, and listens on {address}", params.node);
                return;
            }
            Err(error) => {
                let why = format!("node {} is stopped: {}", params.node, error.message);
                if why != last_error {
                    log::warn!("{why}; it is tried again");
                }
                last_error.clone_from(&why);
                *sync::write(&module.node) = NodeState::Taken { params: params.clone(), why };
            }
        }
    }
}

impl NodeModule {
    /// Stops the node for another process. Returns how it was started; `None` if it was stopped meanwhile.
    fn take_from(&self, other: &LeaseHolder) -> Option<NodeParams> {
        let _changes = sync::lock(&self.changes);
        let params = sync::read(&self.node).params().cloned()?;
        let why = format!(
            "node {} is stopped: another process is this node, and listens on {}: one of the two is a copy, and must go",
            params.node, other.address
        );
        let _ = self.close_node(NodeState::Taken { params: params.clone(), why });
        Some(params)
    }

    /// Closes the node, which is in another state then.
    fn close_node(&self, next: NodeState) -> Result<(), RpcError> {
        let before = std::mem::replace(&mut *sync::write(&self.node), next);
        if let NodeState::Running(running) = before {
            blocking::block_on(running.server.close()).map_err(|_| StoreError::Closed)?;
        }
        Ok(())
    }
}

/// The boot of this machine. If the kernel does not say which it is, each start of a node is another one.
fn this_boot() -> [u8; 16] {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
    boot.and_then(|boot| boot.trim().parse().ok()).unwrap_or_else(Uuid::new_v4).into_bytes()
}

/// The address that a node had before, if any port will do.
fn address_before(record: &NodeRecord, listen: SocketAddr) -> Option<StreamAddress> {
    let before: SocketAddr = record.addresses.first()?.parse().ok()?;
    (listen.port() == 0 && before.ip() == listen.ip()).then_some(StreamAddress::Tcp(before))
}

/// The address to listen on; only loopback's without permission.
fn parse_address(listen: &str, is_permitted: bool) -> Result<SocketAddr, RpcError> {
    let refused = |reason: String| RpcError::new(RpcError::EINVAL, reason);
    let address: SocketAddr =
        listen.parse().map_err(|_| refused(format!("{listen:?} is no address: HOST:PORT in digits")))?;
    if !address.ip().is_loopback() && !is_permitted {
        return Err(refused(format!(
            "{listen} is not this machine alone, and data is not encrypted: `ringbolt store tls required` \
             encrypts it, and allow_plain_network permits it"
        )));
    }
    Ok(address)
}

fn map_failed(error: cluster_map::MapError) -> RpcError {
    RpcError::new(RpcError::EIO, error.to_string())
}

struct OpenCluster {
    map: Arc<dyn ClusterMap>,
    key: ClusterKey,
    identity: Identity,
    record: NodeRecord,
}

fn open_cluster(directory: &Path, etcd: &EtcdOptions, id: ReplicaId) -> Result<OpenCluster, RpcError> {
    let location = MapLocation::find(directory, etcd).map_err(map_failed)?.ok_or_else(|| {
        let reason = format!("there is no cluster in {}: `ringbolt store up` makes one", directory.display());
        RpcError::new(RpcError::ENODEV, reason)
    })?;
    let map = location.open().map_err(map_failed)?;
    let path = directory.join("key");
    let key = ClusterKey::load(&path);
    let key = key.map_err(|error| RpcError::new(RpcError::EIO, format!("{}: {error}", path.display())))?;
    let record = map.nodes().map_err(map_failed)?.remove(&NodeId(id.0));
    let record =
        record.ok_or_else(|| RpcError::new(RpcError::ENODEV, format!("the cluster has no node {}", id.0)))?;
    let cluster = map.cluster().map_err(map_failed)?.into_bytes();
    let identity = Identity { cluster, node: Some(id), key: key.clone().into() };
    Ok(OpenCluster { map, key, identity, record })
}

control::parameters! {
    struct NoParams {}
}

control::parameters! {
    struct StopParams {
        /// Stops it although groups wait without it, or no other node takes over
        force: bool = false,
    }
}

fn stop(module: &NodeModule, params: StopParams, _job: &JobHandle) -> Result<bool, RpcError> {
    let _changes = sync::lock(&module.changes);
    {
        let node = sync::read(&module.node);
        if let NodeState::None = &*node {
            return Err(RpcError::new(NO_NODE.0, NO_NODE.1));
        }
        // One that another process is has nothing to hand over.
        if let Ok(server) = node.server()
            && let Err(error) = server.leave(params.force, LEAVE_MAX)
        {
            if !params.force {
                server.stay();
                return Err(error.into());
            }
            log::warn!("this node is stopped although {error}");
        }
    }
    module.close_node(NodeState::None)?;
    Ok(true)
}

fn get_status(module: &NodeModule, _params: NoParams) -> Result<Value, RpcError> {
    let node = sync::read(&module.node);
    Ok(blocking::block_on(node.server()?.report()).map_err(|_| StoreError::Closed)??)
}
