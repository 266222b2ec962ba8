//! The directory of a cluster: its map, its key, and a directory a node.

use std::fs;
use std::io::{Seek, SeekFrom};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bdev::uring::{self, UringConfig};
use bdev::{Registry, Uuid};
use cluster_map::{
    ClusterMap, DeviceId, DeviceRecord, EtcdMap, GroupConfig, GroupId, GroupRecord, LocalMap, MapLocation,
    NodeId, NodeRecord, PoolRecord, ReplicaId, Topology,
};
use control::JobHandle;
use reactor::{Reactor, ReactorConfig};
use serde_json::json;
use store_link::ClusterKey;
use store_node::{FormatOptions, ReplicaFormat, StoreCores, format_device};

use super::{NewCluster, POOL};
use crate::command_error::CommandError;

/// Name of a node's device in its process.
const DEVICE: &str = "Disk";
/// Name of a node's file, and its size unless it is given.
const FILE: &str = "store.img";
const FILE_BYTES: u64 = 10 << 30;

/// A cluster, and its nodes on this machine.
#[derive(Clone)]
pub(super) struct ClusterLayout {
    /// Absolute.
    pub(super) directory: PathBuf,
    /// The nodes on this machine.
    pub(super) nodes: Vec<u32>,
    pub(super) map: Arc<dyn ClusterMap>,
}

impl ClusterLayout {
    /// The cluster in a directory. Its map is not asked.
    pub(super) fn open(directory: &Path, etcd: Option<&str>) -> Result<ClusterLayout, CommandError> {
        let missing = || {
            let directory = directory.display();
            CommandError::operation(format!(
                "{directory} is no cluster: `ringbolt store up` makes one where nothing is"
            ))
        };
        let location = MapLocation::find(directory, etcd).map_err(CommandError::operation)?;
        let location = location.filter(|_| directory.join("key").exists()).ok_or_else(missing)?;
        let directory = directory.canonicalize().map_err(CommandError::environment)?;
        let entries = fs::read_dir(&directory).map_err(CommandError::environment)?;
        let name = |entry: std::io::Result<fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
        let number = |name: String| name.strip_prefix("node")?.parse().ok();
        let mut nodes: Vec<u32> = entries.filter_map(name).filter_map(number).collect();
        nodes.sort_unstable();
        let map = location.open().map_err(CommandError::operation)?;
        Ok(ClusterLayout { directory, nodes, map })
    }

    /// Makes a cluster: beside the directory at first, so that what is interrupted leaves no half of one.
    pub(super) fn create(
        directory: &Path,
        etcd: Option<&str>,
        new: &NewCluster,
    ) -> Result<ClusterLayout, CommandError> {
        let nodes = new.node_count();
        let replicas = new.replicas.unwrap_or(nodes.min(3));
        if !(1..=nodes).contains(&replicas) {
            let reason = format!("{replicas} replicas need as many nodes, and there are {nodes}");
            return Err(CommandError::usage(reason));
        }
        if !new.network.listen.is_loopback() && !new.network.allow_plain_network {
            return Err(CommandError::usage(format!(
                "{} is not this machine alone, and data is not encrypted: --allow-plain-network permits it",
                new.network.listen
            )));
        }
        let name = directory
            .file_name()
            .ok_or_else(|| CommandError::usage("the cluster needs a directory of its own"))?;
        let parent =
            directory.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(CommandError::environment)?;
        let scratch = parent.join(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
        fs::create_dir(&scratch).map_err(CommandError::environment)?;
        let made = match etcd {
            None => fill_directory(&scratch, directory, new, replicas),
            Some(urls) => fill_etcd(urls, &scratch, directory, new, replicas),
        };
        let made = made.and_then(|()| fs::rename(&scratch, directory).map_err(CommandError::environment));
        if made.is_err() {
            let _ = fs::remove_dir_all(&scratch);
        }
        made?;
        ClusterLayout::open(directory, None)
    }

    /// The directory of a node.
    pub(super) fn node(&self, node: u32) -> PathBuf {
        self.directory.join(format!("node{node}"))
    }

    /// The RPC socket of a node.
    pub(super) fn socket(&self, node: u32) -> PathBuf {
        self.node(node).join("rpc.sock")
    }

    /// A line for people.
    pub(super) fn describe(&self) -> Result<String, CommandError> {
        let pools = self.map.pools().map_err(CommandError::operation)?;
        let pools = pools.iter().map(|(name, pool)| {
            format!("pool `{name}`: {} groups, {} replicas each", pool.groups, pool.replicas)
        });
        let pools: Vec<_> = pools.collect();
        Ok(format!("{} nodes; {}", self.nodes.len(), pools.join("; ")))
    }
}

/// The cluster in a directory has its map in etcd, at these URLs from now on.
pub(super) fn set_etcd(directory: &Path, urls: &str) -> Result<(), CommandError> {
    let location = MapLocation::find(directory, None).map_err(CommandError::operation)?;
    if !matches!(location, Some(MapLocation::Etcd(_))) {
        let directory = directory.display();
        return Err(CommandError::usage(format!("{directory} is no cluster with its map in etcd")));
    }
    EtcdMap::new(urls).map_err(CommandError::operation)?;
    MapLocation::Etcd(urls.to_string()).save(directory).map_err(CommandError::operation)
}

fn fill_directory(
    scratch: &Path,
    directory: &Path,
    new: &NewCluster,
    replicas: u32,
) -> Result<(), CommandError> {
    let map = LocalMap::open(&scratch.join("map")).map_err(CommandError::operation)?;
    fill(&map, scratch, directory, new, replicas)
}

/// A cluster whose map is in etcd: there nothing is left of one that is not made.
fn fill_etcd(
    urls: &str,
    scratch: &Path,
    directory: &Path,
    new: &NewCluster,
    replicas: u32,
) -> Result<(), CommandError> {
    let map = EtcdMap::new(urls).map_err(CommandError::operation)?;
    map.create().map_err(CommandError::operation)?;
    MapLocation::Etcd(urls.to_string()).save(scratch).map_err(CommandError::operation)?;
    fill(&map, scratch, directory, new, replicas).inspect_err(|_| _ = map.remove())
}

/// Makes the parts of a cluster in `scratch`, which will be called `directory`.
fn fill(
    map: &dyn ClusterMap,
    scratch: &Path,
    directory: &Path,
    new: &NewCluster,
    replicas: u32,
) -> Result<(), CommandError> {
    let environment = |error: std::io::Error| CommandError::environment(error);
    ClusterKey::create(&scratch.join("key")).map_err(environment)?;
    let cluster = map.cluster().map_err(CommandError::operation)?;
    let disks = node_disks(scratch, new)?;
    for (node, disk) in (1..).zip(&disks) {
        let record = NodeRecord {
            uuid: Uuid::new_v4(),
            addresses: Vec::new(),
            domain: format!("node{node}"),
            out: false,
        };
        map.put_node(NodeId(node), &record).map_err(CommandError::operation)?;
        let weight = u32::try_from(disk.bytes >> 20).unwrap_or(u32::MAX).max(1);
        let device = DeviceRecord { uuid: Uuid::new_v4(), node: NodeId(node), weight, out: false };
        map.put_device(DeviceId(node), &device).map_err(CommandError::operation)?;
    }
    let in_sync_min = if replicas > 2 { 2 } else { 1 };
    let pool = PoolRecord { first_group: 0, groups: new.groups, replicas, in_sync_min };
    map.create_pool(POOL, &pool).map_err(CommandError::operation)?;
    let (nodes, devices) = (map.nodes(), map.devices());
    let topology =
        Topology::new(&nodes.map_err(CommandError::operation)?, &devices.map_err(CommandError::operation)?);
    let mut of_node: Vec<Vec<u32>> = vec![Vec::new(); disks.len() + 1];
    for group in 0..new.groups {
        let members: Vec<_> = topology
            .place(GroupId(group), replicas as usize)
            .into_iter()
            .map(|device| ReplicaId(device.0))
            .collect();
        members.iter().for_each(|member| of_node[member.0 as usize].push(group));
        let config = GroupConfig { epoch: 1, primary: members[0], in_sync: members.clone() };
        let record = GroupRecord { config, replicas: members };
        map.propose_group(GroupId(group), &record).map_err(CommandError::operation)?;
    }
    let absolute = std::path::absolute(directory).map_err(environment)?;
    for (node, disk) in (1..).zip(&disks) {
        let uuid = map.nodes().map_err(CommandError::operation)?[&NodeId(node)].uuid;
        let name = format!("node{node}");
        fs::create_dir(scratch.join(&name)).map_err(environment)?;
        let replicas =
            ReplicaFormat { cluster, node: uuid, groups: of_node[node as usize].clone(), are_new: true };
        format(disk, new, replicas)?;
        let image = match disk.is_file {
            true => absolute.join(&name).join(FILE),
            false => std::path::absolute(&disk.path).map_err(environment)?,
        };
        let config = json!({ "subsystems": [
            { "subsystem": "bdev", "config": [
                { "method": "bdev_uring_create", "params": { "name": DEVICE, "filename": image } } ] },
            { "subsystem": "store_node", "config": [
                { "method": "store_node_start",
                  "params": {
                      "bdev_name": DEVICE, "cluster": absolute, "node": node,
                      "listen": SocketAddr::new(new.network.listen, 0).to_string(),
                      "allow_plain_network": new.network.allow_plain_network } } ] } ] });
        fs::write(scratch.join(&name).join("config.json"), format!("{config:#}\n")).map_err(environment)?;
    }
    Ok(())
}

/// Where a node has its data.
struct NodeDisk {
    path: PathBuf,
    is_file: bool,
    bytes: u64,
}

/// The disks of the nodes, in their order: the devices that were named, or files to make.
fn node_disks(scratch: &Path, new: &NewCluster) -> Result<Vec<NodeDisk>, CommandError> {
    if new.devices.is_empty() {
        let file = |node| scratch.join(format!("node{node}")).join(FILE);
        let bytes = new.size.unwrap_or(FILE_BYTES);
        let disk = |node| NodeDisk { path: file(node), is_file: true, bytes };
        return Ok((1..=new.node_count()).map(disk).collect());
    }
    let mut disks: Vec<NodeDisk> = Vec::new();
    for device in &new.devices {
        let path = device
            .canonicalize()
            .map_err(|error| CommandError::environment(format!("--device {}: {error}", device.display())))?;
        if disks.iter().any(|disk| disk.path == path) {
            let reason = format!("--device {} is given twice: each node needs one", device.display());
            return Err(CommandError::usage(reason));
        }
        let size = fs::File::open(&path).and_then(|mut file| file.seek(SeekFrom::End(0)));
        let bytes = size
            .map_err(|error| CommandError::environment(format!("--device {}: {error}", device.display())))?;
        disks.push(NodeDisk { path, is_file: false, bytes });
    }
    Ok(disks)
}

/// Makes the file of a node, or formats its device.
fn format(disk: &NodeDisk, new: &NewCluster, replicas: ReplicaFormat) -> Result<(), CommandError> {
    if replicas.groups.is_empty() {
        return Err(CommandError::usage("a node would have no group: give more with --groups"));
    }
    let registry = Registry::new();
    let create_bytes = disk.is_file.then_some(disk.bytes);
    let config = UringConfig { create_bytes, force: new.force, ..UringConfig::new(DEVICE, &disk.path) };
    uring::create(&registry, config).map_err(CommandError::environment)?;
    let reactor = Reactor::new(&ReactorConfig::default()).map_err(CommandError::environment)?;
    let core = reactor.core();
    let options = FormatOptions {
        log_bytes: Some(new.log_size),
        force: new.force,
        replicas: Some(replicas),
        ..FormatOptions::default()
    };
    let formatted = reactor.block_on(async move {
        format_device(&registry, DEVICE, &StoreCores::This(&core), options, &JobHandle::standalone()).await
    });
    formatted.map_err(|error| CommandError::operation(format!("{}: {error}", disk.path.display())))?;
    Ok(())
}
