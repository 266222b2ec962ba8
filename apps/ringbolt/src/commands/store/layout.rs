//! The directory of a cluster: its map, its key, and a directory a node.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{ErrorKind, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bdev::uring::{self, UringConfig};
use bdev::{Registry, Uuid, pmem};
use cluster_map::{
    ClusterMap, ClusterSettings, DeviceId, DeviceRecord, DirectoryPlace, EtcdFiles, EtcdMap, EtcdOptions,
    GroupConfig, GroupId, GroupRecord, KnownMap, LocalMap, MapError, MapLocation, MapPosition, NodeId,
    NodeRecord, PoolClass, PoolRecord, ReplicaId, Topology,
};
use control::JobHandle;
use reactor::{Reactor, ReactorConfig};
use serde_json::{Value, json};
use store_link::ClusterKey;
use store_node::{
    FormatOptions, PARTITIONS_MAX, ReplicaFormat, StoreBdevs, StoreCores, check_unused, class_of,
    format_device,
};

use super::arguments::{NewCluster, NodeOptions, POOL, ThreadsOption};
use super::encryption::{self, DeviceKeys, NodeKey, sync_directory};
use super::listen;
use crate::command_error::CommandError;
use crate::commands::objects;
use crate::console::stderr_line;

/// Names of a node's devices in its process.
const DEVICE: &str = "Disk";
const LOG_DEVICE: &str = "Log";
/// Names of a node's file and configuration, and the size of the file unless it is given.
const FILE: &str = "store.img";
const CONFIG: &str = "config.json";
const FILE_BYTES: u64 = 10 << 30;

/// Parameters with paths, in the configuration of a node.
const PATHS: [&str; 4] = ["cluster", "filename", "pmem_file", "key_file"];

/// A path in the cluster's directory as the configuration of a node has it, whose process runs there.
fn relative_to(directory: &Path, path: &Path) -> Option<String> {
    let rest = path.strip_prefix(directory).ok()?.to_str()?;
    Some(if rest.is_empty() { ".".to_string() } else { rest.to_string() })
}

/// A cluster, and its nodes on this machine.
#[derive(Clone)]
pub(crate) struct ClusterLayout {
    /// Absolute.
    pub(super) directory: PathBuf,
    /// The nodes on this machine.
    pub(super) nodes: Vec<u32>,
    pub(crate) map: Arc<dyn ClusterMap>,
}

impl ClusterLayout {
    /// The cluster in a directory. Its map is not asked.
    pub(crate) fn open(directory: &Path, etcd: &EtcdOptions) -> Result<ClusterLayout, CommandError> {
        let missing = || {
            let directory = directory.display();
            CommandError::operation(format!(
                "{directory} is no cluster: `ringbolt store up` makes one where nothing is"
            ))
        };
        let location = MapLocation::find(directory, etcd).map_err(CommandError::operation)?;
        let location = location.filter(|_| directory.join("key").exists()).ok_or_else(missing)?;
        let directory = directory.canonicalize().map_err(CommandError::environment)?;
        let map = location.open().map_err(CommandError::operation)?;
        let mut layout = ClusterLayout { directory, nodes: Vec::new(), map };
        layout.find_nodes()?;
        Ok(layout)
    }

    /// Makes the directory usable where it is: paths in the configuration of nodes are relative to it, and a
    /// copy of which the original is gone has nothing to do with that one's processes. Returns what people
    /// are to know.
    ///
    /// # Errors
    /// If it is a copy, and the original is there.
    pub(super) fn settle(&self) -> Result<Option<String>, CommandError> {
        let created = self.nodes.iter().find_map(|node| self.created_in(*node));
        let place = DirectoryPlace::find(&self.directory, created.as_deref()).map_err(failed)?;
        for node in &self.nodes {
            self.make_relative(*node)?;
        }
        let map = self.directory.join("map");
        let is_copy = place == DirectoryPlace::Copied;
        if is_copy && map.is_dir() {
            LocalMap::open(&map).and_then(|map| map.forget_processes()).map_err(failed)?;
        }
        DirectoryPlace::save(&self.directory, &self.directory).map_err(failed)?;
        let directory = self.directory.display();
        Ok(is_copy.then(|| {
            format!("{directory} was copied or moved from elsewhere, where nothing is any more: it is the cluster now")
        }))
    }

    /// The key of a node of this machine, if it is encrypted.
    pub(super) fn key_of(&self, node: u32) -> Option<encryption::ConfiguredKey> {
        encryption::configured_key(&self.read_config(node)?)
    }

    /// Why a node of this machine cannot start with its key.
    pub(super) fn key_problem(&self, node: u32) -> Option<String> {
        self.key_of(node)?.problem(&self.directory, node)
    }

    /// Refuses a cluster of which a node here is not encrypted.
    pub(super) fn check_encrypted(&self) -> Result<(), CommandError> {
        match self.nodes.iter().find(|node| self.key_of(**node).is_none()) {
            None => Ok(()),
            Some(node) => Err(CommandError::usage(format!(
                "--encrypt is for the nodes of a new cluster, and node {node} of {} is not encrypted: \
                 `ringbolt store replace-device {node} --encrypt` gives it an encrypted device",
                self.directory.display()
            ))),
        }
    }

    fn read_config(&self, node: u32) -> Option<Value> {
        let text = fs::read(self.config(node)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// The directory in which a node of an earlier release was made, whose configuration has absolute paths.
    fn created_in(&self, node: u32) -> Option<PathBuf> {
        let config = self.read_config(node)?;
        let mut methods =
            config["subsystems"].as_array()?.iter().flat_map(|it| it["config"].as_array()).flatten();
        let start = methods.find(|method| method["method"] == "store_node_start")?;
        let directory = PathBuf::from(start["params"]["cluster"].as_str()?);
        directory.is_absolute().then_some(directory)
    }

    /// Makes the paths in a node's configuration relative that are in the directory where it was made, or in
    /// this one.
    pub(super) fn make_relative(&self, node: u32) -> Result<(), CommandError> {
        // What cannot be read the node's process reports.
        let Some(mut config) = self.read_config(node) else { return Ok(()) };
        let before = config.clone();
        let directories: Vec<_> = self.created_in(node).into_iter().chain([self.directory.clone()]).collect();
        let subsystems = config.get_mut("subsystems").and_then(Value::as_array_mut).into_iter().flatten();
        let methods = subsystems.filter_map(|it| it.get_mut("config")?.as_array_mut()).flatten();
        for params in methods.filter_map(|method| method.get_mut("params")?.as_object_mut()) {
            for (_, value) in params.iter_mut().filter(|(name, _)| PATHS.contains(&name.as_str())) {
                let relative = value.as_str().and_then(|path| {
                    directories.iter().find_map(|directory| relative_to(directory, Path::new(path)))
                });
                relative.into_iter().for_each(|relative| *value = relative.into());
            }
        }
        if config == before {
            return Ok(());
        }
        self.write_config(node, &config)
    }

    /// The configuration of a node of this machine, which starts it with these parameters.
    fn config_with_start(&self, node: u32) -> Result<(Value, Value), CommandError> {
        let path = self.config(node);
        let unusable = || CommandError::operation(format!("{} does not start a node", path.display()));
        let text = fs::read(&path)
            .map_err(|error| CommandError::environment(format!("{}: {error}", path.display())))?;
        let mut config: Value = serde_json::from_slice(&text).map_err(|_| unusable())?;
        let params = start_params(&mut config).ok_or_else(unusable)?.clone();
        Ok((config, params))
    }

    /// The parameters with which a node of this machine starts.
    pub(super) fn start_of(&self, node: u32) -> Result<Value, CommandError> {
        Ok(self.config_with_start(node)?.1)
    }

    /// Changes the parameters with which a node of this machine starts, from its next start on.
    pub(super) fn change_start(
        &self,
        node: u32,
        change: impl FnOnce(&mut Value) -> Result<(), CommandError>,
    ) -> Result<(), CommandError> {
        let (mut config, mut params) = self.config_with_start(node)?;
        change(&mut params)?;
        match start_params(&mut config) {
            Some(known) if *known != params => *known = params,
            _ => return Ok(()),
        }
        self.write_config(node, &config)
    }

    /// Has these threads do the work of the nodes of this machine, from their next start on.
    pub(super) fn set_threads(&self, threads: ThreadsOption) -> Result<(), CommandError> {
        for node in &self.nodes {
            self.change_start(*node, |params| {
                params["threads"] = threads.name().into();
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Replaces the configuration of a node.
    fn write_config(&self, node: u32, config: &Value) -> Result<(), CommandError> {
        let path = self.config(node);
        let scratch = path.with_extension("json.new");
        let written = fs::write(&scratch, format!("{config:#}\n")).and_then(|()| fs::rename(&scratch, &path));
        written.map_err(|error| CommandError::environment(format!("{}: {error}", path.display())))
    }

    /// Finds the nodes on this machine again: one may have been added.
    pub(super) fn find_nodes(&mut self) -> Result<(), CommandError> {
        let entries = fs::read_dir(&self.directory).map_err(CommandError::environment)?;
        let name = |entry: std::io::Result<fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
        let number = |name: String| name.strip_prefix("node")?.parse().ok();
        self.nodes = entries.filter_map(name).filter_map(number).collect();
        self.nodes.sort_unstable();
        Ok(())
    }

    /// The cluster in a directory whose map may be lost: then it is empty.
    pub(super) fn open_to_restore(
        directory: &Path,
        etcd: &EtcdOptions,
    ) -> Result<ClusterLayout, CommandError> {
        let location = MapLocation::find(directory, etcd).map_err(CommandError::operation)?;
        if location.is_none() && directory.join("key").exists() {
            fs::create_dir(directory.join("map")).map_err(CommandError::environment)?;
        }
        ClusterLayout::open(directory, etcd)
    }

    /// Makes a cluster: beside the directory at first, so that what is interrupted leaves no half of one.
    pub(super) fn create(
        directory: &Path,
        etcd: &EtcdOptions,
        new: &NewCluster,
    ) -> Result<ClusterLayout, CommandError> {
        let nodes = new.node_count();
        let replicas = new.replicas.unwrap_or(nodes.min(3));
        if !(1..=nodes).contains(&replicas) {
            let reason = format!("{replicas} replicas need as many nodes, and there are {nodes}");
            return Err(CommandError::usage(reason));
        }
        new.node.check()?;
        if new.node.key_file.is_some() && nodes > 1 {
            return Err(CommandError::usage(format!(
                "--key-file is the key of one node, and there are {nodes}: --key-dir has a key for each"
            )));
        }
        listen::check_ports(new.node.listen, nodes)?;
        new.settings(ClusterSettings::default()).check().map_err(CommandError::usage)?;
        let location = MapLocation::find(directory, etcd).map_err(CommandError::operation)?;
        let name = directory
            .file_name()
            .ok_or_else(|| CommandError::usage("the cluster needs a directory of its own"))?;
        let parent =
            directory.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(CommandError::environment)?;
        let scratch = parent.join(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
        fs::create_dir(&scratch).map_err(CommandError::environment)?;
        let made = match location {
            Some(MapLocation::Etcd { urls, files }) => fill_etcd((urls, files), &scratch, new, replicas),
            _ => fill_directory(&scratch, new, replicas),
        };
        let made = made.and_then(|()| {
            let path = std::path::absolute(directory).map_err(CommandError::environment)?;
            let path =
                path.parent().and_then(|parent| Some(parent.canonicalize().ok()?.join(name))).unwrap_or(path);
            DirectoryPlace::save(&scratch, &path).map_err(failed)?;
            // The keys of encrypted nodes are there when something was written with them.
            let renamed = sync_directory(&scratch).and_then(|()| fs::rename(&scratch, directory));
            renamed.and_then(|()| sync_directory(parent)).map_err(CommandError::environment)
        });
        if made.is_err() {
            let _ = fs::remove_dir_all(&scratch);
        }
        made?;
        ClusterLayout::open(directory, &EtcdOptions::default())
    }

    /// The directory of a node.
    pub(super) fn node(&self, node: u32) -> PathBuf {
        self.directory.join(format!("node{node}"))
    }

    /// The file that says that an operator stopped a node: `store up` does not start it. It is beside the
    /// node's directory, so that one watch sees it come and go.
    fn stop_mark(&self, node: u32) -> PathBuf {
        self.directory.join(format!("node{node}.stopped"))
    }

    /// Whether an operator stopped a node.
    pub(super) fn is_stopped(&self, node: u32) -> bool {
        self.stop_mark(node).exists()
    }

    /// Says that an operator stopped a node, or wants it to run. Returns whether that is new.
    pub(super) fn set_stopped(&self, node: u32, is_stopped: bool) -> std::io::Result<bool> {
        let mark = self.stop_mark(node);
        let changed = match is_stopped {
            true => fs::File::options().write(true).create_new(true).open(mark).map(drop),
            false => fs::remove_file(mark),
        };
        match changed {
            Err(error) if matches!(error.kind(), ErrorKind::AlreadyExists | ErrorKind::NotFound) => Ok(false),
            changed => changed.map(|()| true),
        }
    }

    /// The RPC socket of a node.
    pub(super) fn socket(&self, node: u32) -> PathBuf {
        self.node(node).join("rpc.sock")
    }

    /// The configuration of a node's process.
    pub(super) fn config(&self, node: u32) -> PathBuf {
        self.node(node).join(CONFIG)
    }

    /// What a node on this machine has seen of the map.
    pub(super) fn known_map(&self, node: u32) -> PathBuf {
        self.node(node).join(KnownMap::FILE)
    }

    /// The log of a node's process.
    pub(super) fn log(&self, node: u32) -> PathBuf {
        self.node(node).join("log")
    }

    /// The nodes on this machine that have their data in memory, which a power failure empties.
    pub(super) fn nodes_in_memory(&self) -> Result<Vec<u32>, CommandError> {
        let devices = self.map.devices().map_err(failed)?;
        let in_memory = |device: &&DeviceRecord| device.class == Some(PoolClass::Memory);
        let nodes = devices.values().filter(in_memory).map(|device| device.node.0);
        Ok(nodes.filter(|node| self.nodes.contains(node)).collect())
    }

    /// Refuses a lease or a grace that is given and is not what the cluster has. Without them the map is not
    /// asked.
    pub(super) fn check_settings(&self, new: &NewCluster) -> Result<(), CommandError> {
        if new.lease.is_none() && new.grace.is_none() {
            return Ok(());
        }
        let known = self.map.settings().map_err(CommandError::operation)?;
        if new.settings(known) == known {
            return Ok(());
        }
        Err(CommandError::usage(format!(
            "the cluster has a lease of {} ms and a grace of {} ms, which do not change",
            known.lease_ms, known.grace_ms
        )))
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

/// The cluster in a directory has its map in etcd, and uses it in this way from now on.
pub(super) fn set_etcd(directory: &Path, etcd: &EtcdOptions) -> Result<(), CommandError> {
    let known = MapLocation::find(directory, &EtcdOptions::default()).map_err(CommandError::operation)?;
    let location = MapLocation::find(directory, etcd).map_err(CommandError::operation)?;
    let (Some(MapLocation::Etcd { .. }), Some(location)) = (known, location) else {
        let directory = directory.display();
        return Err(CommandError::usage(format!("{directory} is no cluster with its map in etcd")));
    };
    location.open().map_err(CommandError::operation)?;
    location.save(directory).map_err(CommandError::operation)
}

fn fill_directory(scratch: &Path, new: &NewCluster, replicas: u32) -> Result<(), CommandError> {
    let map = LocalMap::open(&scratch.join("map")).map_err(CommandError::operation)?;
    fill(&map, scratch, new, replicas)
}

/// A cluster whose map is in etcd: there nothing is left of one that is not made.
fn fill_etcd(
    (urls, files): (String, EtcdFiles),
    scratch: &Path,
    new: &NewCluster,
    replicas: u32,
) -> Result<(), CommandError> {
    let map = EtcdMap::with_files(&urls, &files).map_err(CommandError::operation)?;
    map.create().map_err(CommandError::operation)?;
    MapLocation::Etcd { urls, files }.save(scratch).map_err(CommandError::operation)?;
    fill(&map, scratch, new, replicas).inspect_err(|_| _ = map.remove())
}

/// Makes the parts of a cluster in `scratch`.
fn fill(map: &dyn ClusterMap, scratch: &Path, new: &NewCluster, replicas: u32) -> Result<(), CommandError> {
    let environment = |error: std::io::Error| CommandError::environment(error);
    ClusterKey::create(&scratch.join("key")).map_err(environment)?;
    let cluster = map.cluster().map_err(CommandError::operation)?;
    map.create_settings(&new.settings(ClusterSettings::default())).map_err(failed)?;
    let disks = node_disks(scratch, new)?;
    // Placed before they are formatted, which needs their groups.
    let mut devices = Vec::new();
    for (node, disk) in (1..).zip(&disks) {
        map.put_node(NodeId(node), &node_record(&new.node, node)).map_err(failed)?;
        let device = device_record(disk, node);
        map.put_device(DeviceId(node), &device).map_err(failed)?;
        devices.push((disk, device));
    }
    let of_nodes = create_pool(map, POOL, new.groups, replicas, PoolClass::Disk)?;
    let mut keys = Vec::new();
    let mut make = |node: u32, disk: &NodeDisk, device: DeviceRecord| {
        let uuid = map.nodes().map_err(CommandError::operation)?[&NodeId(node)].uuid;
        let groups = of_nodes.get(&node).cloned().unwrap_or_default();
        let spare = new.node.spare.unwrap_or((groups.len() as u32).div_ceil(2).max(1));
        let replicas = ReplicaFormat { cluster, node: uuid, groups, are_new: true, generation: 0, spare };
        let options = new.node.of_index(node - 1);
        let mut key = NodeKey::prepare(&options)?;
        let path = scratch.join(format!("node{node}"));
        let class = make_node(&path, node, disk, &options, replicas, key.as_mut());
        keys.extend(key);
        map.put_device(DeviceId(node), &DeviceRecord { class: Some(class?), ..device }).map_err(failed)
    };
    let made = (1..).zip(devices).try_for_each(|(node, (disk, device))| make(node, disk, device));
    if made.is_err() {
        keys.iter_mut().for_each(NodeKey::discard);
    }
    made
}

/// Where a node has its data.
struct NodeDisk {
    path: PathBuf,
    is_file: bool,
    bytes: u64,
    /// The device or file of its logs, if they are not there.
    log: Option<PathBuf>,
}

impl NodeDisk {
    /// A file to make.
    fn file(node: &Path, options: &NodeOptions) -> NodeDisk {
        let bytes = options.size.unwrap_or(FILE_BYTES);
        NodeDisk { path: node.join(FILE), is_file: true, bytes, log: None }
    }

    /// A block device.
    fn device(device: &Path) -> Result<NodeDisk, CommandError> {
        let failed = |error: std::io::Error| {
            CommandError::environment(format!("--device {}: {error}", device.display()))
        };
        let path = device.canonicalize().map_err(failed)?;
        let bytes = fs::File::open(&path).and_then(|mut file| file.seek(SeekFrom::End(0))).map_err(failed)?;
        Ok(NodeDisk { path, is_file: false, bytes, log: None })
    }

    /// With its logs elsewhere.
    fn with_log(self, log: Option<&Path>) -> Result<NodeDisk, CommandError> {
        let canonical = |log: &Path| {
            let failed = |error| CommandError::environment(format!("--log {}: {error}", log.display()));
            log.canonicalize().map_err(failed)
        };
        let log = log.map(canonical).transpose()?;
        if log.as_ref() == Some(&self.path) {
            let reason = format!("{} is for the data of a node and for its logs", self.path.display());
            return Err(CommandError::usage(reason));
        }
        Ok(NodeDisk { log, ..self })
    }
}

/// The disks of the nodes, in their order: the devices that were named, or files to make.
fn node_disks(scratch: &Path, new: &NewCluster) -> Result<Vec<NodeDisk>, CommandError> {
    let disks = disks_for_data(scratch, new)?;
    if new.logs.is_empty() {
        return Ok(disks);
    }
    new.logs.iter().try_for_each(|log| encryption::check_log(&new.node, Some(log)))?;
    if new.logs.len() != disks.len() {
        let reason = format!("{} nodes need as many --log, and {} are given", disks.len(), new.logs.len());
        return Err(CommandError::usage(reason));
    }
    let with_logs = disks.into_iter().zip(&new.logs).map(|(disk, log)| disk.with_log(Some(log)));
    let disks = with_logs.collect::<Result<Vec<_>, _>>()?;
    for (index, disk) in disks.iter().enumerate() {
        let is_taken = |other: &NodeDisk| other.log == disk.log || Some(&other.path) == disk.log.as_ref();
        if disks[..index].iter().any(is_taken) {
            let reason = format!("--log {} is given twice: each node needs one", new.logs[index].display());
            return Err(CommandError::usage(reason));
        }
    }
    Ok(disks)
}

fn disks_for_data(scratch: &Path, new: &NewCluster) -> Result<Vec<NodeDisk>, CommandError> {
    if new.devices.is_empty() {
        let file = |node| NodeDisk::file(&scratch.join(format!("node{node}")), &new.node);
        return Ok((1..=new.node_count()).map(file).collect());
    }
    let mut disks: Vec<NodeDisk> = Vec::new();
    for device in &new.devices {
        let disk = NodeDisk::device(device)?;
        if disks.iter().any(|other| other.path == disk.path) {
            let reason = format!("--device {} is given twice: each node needs one", device.display());
            return Err(CommandError::usage(reason));
        }
        disks.push(disk);
    }
    Ok(disks)
}

fn failed(error: MapError) -> CommandError {
    CommandError::operation(error)
}

fn node_record(options: &NodeOptions, node: u32) -> NodeRecord {
    let domain = options.domain.clone().unwrap_or_else(|| own_domain(node));
    NodeRecord { uuid: Uuid::new_v4(), addresses: Vec::new(), domain, tls: options.tls.into(), out: false }
}

/// The failure domain of a node for which none was given.
fn own_domain(node: u32) -> String {
    format!("node{node}")
}

/// The failure domain that all nodes on this machine were given: one that is added is in it too.
fn domain_of_machine(layout: &ClusterLayout) -> Result<Option<String>, CommandError> {
    let records = layout.map.nodes().map_err(failed)?;
    let domain = |node: &u32| records.get(&NodeId(*node)).map(|record| record.domain.clone());
    let mut domains =
        layout.nodes.iter().map(|node| domain(node).filter(|domain| *domain != own_domain(*node)));
    let first = domains.next().flatten();
    Ok(first.filter(|first| domains.all(|domain| domain.as_ref() == Some(first))))
}

fn device_record(disk: &NodeDisk, node: u32) -> DeviceRecord {
    let weight = u32::try_from(disk.bytes >> 20).unwrap_or(u32::MAX).max(1);
    DeviceRecord {
        uuid: Uuid::new_v4(),
        node: NodeId(node),
        weight,
        out: false,
        partition: None,
        partitions: None,
        class: None,
    }
}

/// Makes a pool, and the records of its groups. Returns the groups of each node.
pub(super) fn create_pool(
    map: &dyn ClusterMap,
    name: &str,
    groups: u32,
    replicas: u32,
    class: PoolClass,
) -> Result<BTreeMap<u32, Vec<u32>>, CommandError> {
    let devices = map.devices().map_err(failed)?;
    if class == PoolClass::Pmem {
        check_pmem(&devices)?;
    }
    let nodes = map.nodes().map_err(failed)?;
    let topology = Topology::new(&nodes, &devices);
    let position = map.position().map_err(failed)?;
    if position.is_older() {
        return Err(CommandError::operation(describe_older(&position)));
    }
    let first_group = map.free_groups(groups).map_err(failed)?;
    let node_of = |device: DeviceId| ReplicaId(devices[&device].node.0);
    let place = |group: u32| {
        let members = topology.place(GroupId(group), replicas as usize).into_iter().map(node_of);
        (GroupId(group), members.collect::<Vec<_>>())
    };
    let placed: Vec<_> = (first_group..first_group.saturating_add(groups)).map(place).collect();
    if let Some((_, members)) = placed.iter().find(|(_, members)| members.len() < replicas as usize) {
        let reason = format!("{replicas} replicas need as many nodes, and {} are in", members.len());
        return Err(CommandError::usage(reason));
    }
    check_partitions(map, &devices, &placed)?;
    warn_of_domains(&nodes, &placed);
    let in_sync_min = in_sync_min_of(replicas);
    let pool = PoolRecord { first_group, groups, replicas, in_sync_min, class };
    map.create_pool(name, &pool).map_err(failed)?;
    let mut of_nodes: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let record = |(group, members): (GroupId, Vec<ReplicaId>)| {
        members.iter().for_each(|member| of_nodes.entry(member.0).or_default().push(group.0));
        let config = GroupConfig { epoch: 1, primary: members[0], in_sync: members.clone() };
        (group, GroupRecord { config, replicas: members })
    };
    let records: Vec<_> = placed.into_iter().map(record).collect();
    map.propose_groups(&records).map_err(failed)?;
    Ok(of_nodes)
}

/// Replicas in sync that writes of a pool need: no write is on one node alone where there is a choice.
pub(super) fn in_sync_min_of(replicas: u32) -> u32 {
    if replicas > 2 { 2 } else { 1 }
}

/// A node with fewer spare partitions than it needs.
pub(super) struct LackingNode {
    pub(super) node: u32,
    pub(super) spare: u32,
    /// Replicas that it would get.
    pub(super) wanted: u32,
    /// The number of groups, in their order, that fit.
    fitting: u32,
}

/// Refuses groups whose replicas find no partition, before any is taken.
fn check_partitions(
    map: &dyn ClusterMap,
    devices: &BTreeMap<DeviceId, DeviceRecord>,
    placed: &[(GroupId, Vec<ReplicaId>)],
) -> Result<(), CommandError> {
    let Some(LackingNode { node, spare, wanted, fitting }) = lacking_node(map, devices, placed)? else {
        return Ok(());
    };
    let advice = match fitting {
        0 => String::new(),
        fitting => format!("--groups {fitting} fits; "),
    };
    Err(CommandError::operation(format!(
        "{} groups do not fit: node {node} has {spare} spare partitions, and would get {wanted} replicas. {advice}`ringbolt store \
         add-node --spare N` adds a node with as many partitions",
        placed.len(),
    )))
}

/// The node that lacks the most partitions for replicas of groups that it does not have yet. What a node has
/// not said of its device is not known, as of one that has not run yet.
pub(super) fn lacking_node(
    map: &dyn ClusterMap,
    devices: &BTreeMap<DeviceId, DeviceRecord>,
    placed: &[(GroupId, Vec<ReplicaId>)],
) -> Result<Option<LackingNode>, CommandError> {
    let mut free: BTreeMap<u32, u32> =
        devices.values().filter_map(|device| Some((device.node.0, device.partitions?))).collect();
    for pool in map.pools().map_err(failed)?.values() {
        let groups = map.groups(pool.first_group..pool.first_group + pool.groups).map_err(failed)?;
        for replica in groups.values().flat_map(|record| &record.replicas) {
            free.entry(replica.0).and_modify(|free| *free = free.saturating_sub(1));
        }
    }
    let (at_first, mut fitting) = (free.clone(), 0);
    let mut lacking: BTreeMap<u32, u32> = BTreeMap::new();
    for (_, members) in placed {
        for member in members {
            match free.get_mut(&member.0) {
                Some(0) => *lacking.entry(member.0).or_default() += 1,
                Some(free) => *free -= 1,
                None => {}
            }
        }
        fitting += u32::from(lacking.is_empty());
    }
    let lacking = lacking.into_iter().max_by_key(|(_, missing)| *missing);
    Ok(lacking.map(|(node, missing)| {
        let spare = at_first[&node];
        LackingNode { node, spare, wanted: spare + missing, fitting }
    }))
}

/// What a map is that is an older copy of itself, and what to do.
pub(super) fn describe_older(position: &MapPosition) -> String {
    let revision = position.revision;
    match position.lost {
        Some(MapPosition::RESTORING) => {
            "the restoration of the map was interrupted: `ringbolt store map restore` again".to_string()
        }
        lost => format!(
            "the map is older than what nodes have seen, which was at revision {}, and it is at {revision}: no replica is made, moved or removed. Restore a \
             newer one, or let this one count with `ringbolt store map accept`",
            lost.unwrap_or(revision)
        ),
    }
}

/// Says that the loss of a failure domain will be the loss of several replicas, where that is so.
pub(super) fn warn_of_domains(nodes: &BTreeMap<NodeId, NodeRecord>, placed: &[(GroupId, Vec<ReplicaId>)]) {
    let members = placed.iter().map(|(_, members)| members.iter().map(|member| NodeId(member.0)));
    let sharing = members.filter(|members| shared_domain(members.clone(), nodes).is_some()).count();
    if sharing > 0 {
        stderr_line!(
            "ringbolt: {sharing} of {} groups have several replicas in one failure domain, until there are more domains",
            placed.len()
        );
    }
}

/// A failure domain that has several of the replicas on these nodes.
pub(super) fn shared_domain(
    members: impl IntoIterator<Item = NodeId>,
    nodes: &BTreeMap<NodeId, NodeRecord>,
) -> Option<&str> {
    let mut domains = BTreeSet::new();
    let mut of_members = members.into_iter().filter_map(|node| Some(nodes.get(&node)?.domain.as_str()));
    of_members.find(|domain| !domains.insert(*domain))
}

/// Refuses a pool of class `pmem` where a node could not keep what that says.
fn check_pmem(devices: &BTreeMap<DeviceId, DeviceRecord>) -> Result<(), CommandError> {
    match devices.values().find(|device| device.class != Some(PoolClass::Pmem)) {
        None => Ok(()),
        Some(DeviceRecord { node, class, .. }) => Err(CommandError::usage(format!(
            "class pmem needs the logs of every node in persistent memory (--log FILE on a file system with DAX): those of node \
             {} are {}",
            node.0,
            class.map_or("not known before it starts", PoolClass::name),
        ))),
    }
}

/// Makes the directory of a node: its file and its configuration, whose paths are relative to the cluster's
/// directory. Returns where a write is when the node acknowledges it.
fn make_node(
    path: &Path,
    node: u32,
    disk: &NodeDisk,
    options: &NodeOptions,
    replicas: ReplicaFormat,
    key: Option<&mut NodeKey>,
) -> Result<PoolClass, CommandError> {
    fs::create_dir(path).map_err(CommandError::environment)?;
    let raw = StoreBdevs { data: DEVICE, log: disk.log.as_ref().map(|_| LOG_DEVICE) };
    let keys = key.as_ref().map(|key| key.keys.clone());
    // The key is durable before something is written with it.
    let encrypted = key.map(|key| key.configure(path, node, raw)).transpose()?;
    let class = format(disk, raw, options, replicas, keys)?;
    let image = match disk.is_file {
        true => Path::new(&format!("node{node}")).join(FILE),
        false => disk.path.clone(),
    };
    let create = |name: &str, path: &Path| json!({ "method": "bdev_uring_create", "params": { "name": name, "filename": path } });
    let mut devices = vec![create(DEVICE, &image)];
    let names = encrypted.as_ref().map_or(raw, |encrypted| encrypted.names);
    let mut params = json!({
        "bdev_name": names.data, "cluster": ".", "node": node,
        "listen": options.listen.to_string(),
        "allow_plain_network": options.allow_plain_network,
        "atomic_blocks": options.atomic_blocks,
        "read_policy": options.read_policy.name(),
        "checksum_cache_bytes": options.checksum_cache,
        "flush_entries": options.flush_entries,
        "flush_after_ms": options.flush_after / 1_000_000,
        "threads": options.threads.unwrap_or(ThreadsOption::RunToCompletion).name(),
        "out_after_s": options.out_after / 1_000_000_000 });
    if let Some(log) = &disk.log {
        devices.push(match pmem::is_persistent(log) {
            true => {
                json!({ "method": "bdev_pmem_create", "params": { "name": LOG_DEVICE, "pmem_file": log } })
            }
            false => create(LOG_DEVICE, log),
        });
        params["log_bdev_name"] = names.log.into();
    }
    let mut subsystems = Vec::new();
    if let Some(encrypted) = encrypted {
        subsystems.push(json!({ "subsystem": "accel", "config": encrypted.keys }));
        devices.extend(encrypted.bdevs);
    }
    subsystems.push(json!({ "subsystem": "bdev", "config": devices }));
    let start = json!({ "method": "store_node_start", "params": params });
    subsystems.push(json!({ "subsystem": "store_node", "config": [start] }));
    let config = json!({ "subsystems": subsystems });
    fs::write(path.join(CONFIG), format!("{config:#}\n")).map_err(CommandError::environment)?;
    Ok(class)
}

/// Makes the file of a node, or formats its device, through crypto bdevs with `keys`. Returns where a write
/// is when the node acknowledges it.
fn format(
    disk: &NodeDisk,
    raw: StoreBdevs<'static>,
    options: &NodeOptions,
    replicas: ReplicaFormat,
    keys: Option<DeviceKeys>,
) -> Result<PoolClass, CommandError> {
    if replicas.groups.len() as u32 + replicas.spare == 0 {
        return Err(CommandError::usage("a node would have no group: give more with --groups"));
    }
    let registry = Registry::new();
    let (create_bytes, force) = (disk.is_file.then_some(disk.bytes), options.force);
    let config = UringConfig { create_bytes, force, ..UringConfig::new(DEVICE, &disk.path) };
    objects::create_file(&config)?;
    uring::create(&registry, config).map_err(CommandError::environment)?;
    if let Some(log) = &disk.log {
        objects::create_log(&registry, UringConfig { force, ..UringConfig::new(LOG_DEVICE, log) })?;
    }
    let durability = raw.durability(&registry).map_err(CommandError::environment)?;
    let reactor = Reactor::new(&ReactorConfig::default()).map_err(CommandError::environment)?;
    let core = reactor.core();
    let log_bytes = Some(options.log_size);
    let mut options =
        FormatOptions { log_bytes, force, replicas: Some(replicas), ..FormatOptions::default() };
    let formatted = reactor.block_on(async move {
        let cores = StoreCores::This(&core);
        let mut bdevs = raw;
        if let Some(keys) = keys {
            if !options.force {
                check_unused(&registry, raw, &cores).await?;
            }
            bdevs = keys.encrypt(&registry, raw)?;
            // Decrypted, what the device had before looks like anything.
            options.force = true;
        }
        format_device(&registry, bdevs, &cores, options, &JobHandle::standalone()).await
    });
    formatted.map_err(|error| CommandError::operation(format!("{}: {error}", disk.path.display())))?;
    Ok(class_of(durability))
}

/// The parameters of `store_node_start` in the configuration of a node.
fn start_params(config: &mut Value) -> Option<&mut Value> {
    let subsystems = config.get_mut("subsystems")?.as_array_mut()?.iter_mut();
    let mut methods = subsystems.filter_map(|it| it.get_mut("config")?.as_array_mut()).flatten();
    let start = methods.find(|method| method["method"] == "store_node_start")?;
    start.get_mut("params").filter(|params| params.is_object())
}

/// Has a new node started with the parameters of another one, but for its devices.
fn start_like(path: &Path, like: &Value) -> Result<(), CommandError> {
    let path = path.join(CONFIG);
    let text = fs::read(&path).map_err(CommandError::environment)?;
    let mut config: Value = serde_json::from_slice(&text).map_err(CommandError::environment)?;
    let params = start_params(&mut config);
    let own = params.and_then(Value::as_object_mut).expect("the configuration of a new node starts it");
    for (name, value) in like.as_object().into_iter().flatten() {
        if !["bdev_name", "log_bdev_name"].contains(&name.as_str()) {
            own.insert(name.clone(), value.clone());
        }
    }
    fs::write(path, format!("{config:#}\n")).map_err(CommandError::environment)
}

/// Adds an empty node to a cluster, or puts an empty one in the place of one that is lost; `like` has the
/// parameters of that one's start. Returns its number.
pub(super) fn add_node(
    layout: &ClusterLayout,
    replace: Option<u32>,
    (device, log): (Option<&Path>, Option<&Path>),
    options: &NodeOptions,
    like: Option<&Value>,
) -> Result<u32, CommandError> {
    options.check()?;
    let map = &*layout.map;
    let known = map.nodes().map_err(failed)?;
    listen::check_address(&known, &layout.nodes, replace, options.listen)?;
    // Before anything is changed.
    device.map(|device| NodeDisk::device(device)?.with_log(log)).transpose()?;
    encryption::check_log(options, log)?;
    let mut key = NodeKey::prepare(options)?;
    let cluster = map.cluster().map_err(failed)?;
    let pools = map.pools().map_err(failed)?;
    let mut groups = Vec::new();
    if let Some(node) = replace {
        check_replacement(layout, node)?;
        for pool in pools.values() {
            let records = map.groups(pool.first_group..pool.first_group + pool.groups).map_err(failed)?;
            let is_here = |record: &GroupRecord| record.replicas.contains(&ReplicaId(node));
            if let Some((GroupId(group), _)) =
                records.iter().find(|(_, record)| record.config.in_sync == [ReplicaId(node)])
            {
                let reason =
                    format!("only node {node} has the data of group {group}: start that node instead");
                return Err(CommandError::operation(reason));
            }
            groups.extend(records.iter().filter(|(_, record)| is_here(record)).map(|(group, _)| group.0));
        }
    }
    let domain =
        options.domain.clone().map_or_else(|| domain_of_machine(layout), |domain| Ok(Some(domain)))?;
    let record = node_record(options, 0);
    let node = match replace {
        Some(node) => {
            let domain = options.domain.clone().unwrap_or_else(|| known[&NodeId(node)].domain.clone());
            map.put_node(NodeId(node), &NodeRecord { domain, ..record.clone() }).map_err(failed)?;
            node
        }
        None => {
            // Its number is in its domain, unless it is named.
            let NodeId(node) = map.create_node(&record).map_err(failed)?;
            let domain = domain.unwrap_or_else(|| own_domain(node));
            map.put_node(NodeId(node), &NodeRecord { domain, ..record.clone() }).map_err(failed)?;
            node
        }
    };
    // As many as its share, and half as many again.
    let nodes = map.nodes().map_err(failed)?.len() as u64;
    let replicas: u64 = pools.values().map(|pool| u64::from(pool.groups) * u64::from(pool.replicas)).sum();
    let all: u64 = pools.values().map(|pool| u64::from(pool.groups)).sum();
    let share = replicas.div_ceil(nodes).min(all);
    let wanted = (share + share.div_ceil(2)).clamp(1, PARTITIONS_MAX.into()) as u32;
    let spare = options.spare.unwrap_or(wanted.saturating_sub(groups.len() as u32).max(1));
    let generation = ReplicaFormat::generation_now();
    let replicas = ReplicaFormat { cluster, node: record.uuid, groups, are_new: false, generation, spare };
    let scratch = layout.directory.join(format!(".node{node}.{}", std::process::id()));
    let disk = device.map_or_else(|| Ok(NodeDisk::file(&scratch, options)), NodeDisk::device)?;
    let disk = disk.with_log(log)?;
    let made = make_node(&scratch, node, &disk, options, replicas, key.as_mut());
    let made = made.and_then(|class| {
        like.map_or(Ok(()), |like| start_like(&scratch, like))?;
        // The one that it replaces may have been stopped.
        layout.set_stopped(node, false).map_err(CommandError::environment)?;
        let renamed = fs::rename(&scratch, layout.node(node));
        renamed.and_then(|()| sync_directory(&layout.directory)).map_err(CommandError::environment)?;
        Ok(class)
    });
    if made.is_err() {
        key.iter_mut().for_each(NodeKey::discard);
        let _ = fs::remove_dir_all(&scratch);
        if let Some(record) = replace.and_then(|node| known.get(&NodeId(node))) {
            // What has its device is the node still.
            map.put_node(NodeId(node), record).map_err(failed)?;
        }
    }
    let class = made?;
    // From here on it gets replicas. A replaced one keeps its device's number.
    let device = map.devices().map_err(failed)?.into_iter().find(|(_, device)| device.node == NodeId(node));
    let id = device.map_or(DeviceId(node), |(id, _)| id);
    let device = DeviceRecord { class: Some(class), ..device_record(&disk, node) };
    map.put_device(id, &device).map_err(failed)?;
    Ok(node)
}

fn check_replacement(layout: &ClusterLayout, node: u32) -> Result<(), CommandError> {
    if !layout.map.nodes().map_err(failed)?.contains_key(&NodeId(node)) {
        return Err(CommandError::operation(format!("the cluster has no node {node}")));
    }
    if layout.map.nodes_up().map_err(failed)?.contains(&NodeId(node)) {
        return Err(CommandError::operation(format!("node {node} is up: only one that is lost is replaced")));
    }
    let path = layout.node(node);
    if path.exists() {
        let reason = format!("{} is there: move it away first", path.display());
        return Err(CommandError::operation(reason));
    }
    Ok(())
}

/// Makes the directory of a machine that joins a cluster whose map is in etcd.
pub(super) fn join(directory: &Path, etcd: &EtcdOptions, key: &Path) -> Result<(), CommandError> {
    let Some(location) = MapLocation::find(directory, etcd).map_err(CommandError::operation)? else {
        return Err(CommandError::usage("--etcd names the map of the cluster"));
    };
    let map = location.open().map_err(CommandError::operation)?;
    map.cluster().map_err(CommandError::operation)?;
    ClusterKey::load(key).map_err(|error| CommandError::operation(format!("{}: {error}", key.display())))?;
    fs::create_dir_all(directory).map_err(CommandError::environment)?;
    fs::copy(key, directory.join("key")).map_err(CommandError::environment)?;
    let path = directory.canonicalize().map_err(CommandError::environment)?;
    DirectoryPlace::save(directory, &path).map_err(CommandError::operation)?;
    location.save(directory).map_err(CommandError::operation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parameters_of_the_node_are_found() {
        let mut config = serde_json::json!({ "subsystems": [
            { "subsystem": "bdev", "config": [{ "method": "bdev_uring_create", "params": {} }] },
            { "subsystem": "store_node", "config": [
                { "method": "store_node_start", "params": { "listen": "127.0.0.1:0" } }] }] });
        start_params(&mut config).unwrap()["listen"] = "127.0.0.1:7001".into();
        assert_eq!(config["subsystems"][1]["config"][0]["params"]["listen"], "127.0.0.1:7001");
        assert!(start_params(&mut serde_json::json!({ "subsystems": [] })).is_none());
    }
}
