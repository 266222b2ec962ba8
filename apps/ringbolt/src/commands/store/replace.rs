//! `ringbolt store replace-device`: another device for a node of this machine, while the others serve.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use cluster_map::{NodeId, ReplicaId, TlsPolicy};
use serde_json::{Value, json};

use super::arguments::{ClusterArgs, NodeOptions, TlsOption};
use super::encryption::{self, NodeKey};
use super::layout::{self, ClusterLayout};
use super::stop;
use crate::command_error::CommandError;
use crate::console::stdout_line;
use crate::options::parse_size;

/// Changes of the map are waited for this long at a time.
const WATCH_TIME: Duration = Duration::from_secs(1);

/// Arguments of `ringbolt store replace-device`.
#[derive(Args)]
pub(crate) struct ReplaceDeviceArgs {
    /// Number of the node, whose directory is on this machine
    node: u32,
    /// The new block device, whose data is lost, instead of a file
    #[arg(long, value_name = "PATH")]
    device: Option<PathBuf>,
    /// Block device or file for the logs of the node; without, they are where the data is
    #[arg(long, value_name = "PATH")]
    log: Option<PathBuf>,
    /// Size of the file, if there is no device [default: 10g]
    #[arg(long, value_parser = parse_size, conflicts_with = "device")]
    size: Option<u64>,
    /// Size of each group's log
    #[arg(long, default_value = "8m", value_parser = parse_size)]
    log_size: u64,
    /// Groups for which the device has space besides those of the node [default: half as many]
    #[arg(long, value_name = "GROUPS", value_parser = clap::value_parser!(u32).range(0..=1023))]
    spare: Option<u32>,
    /// Destroy a store that is on the device; use a device that looks used
    #[arg(long, requires = "device")]
    force: bool,
    /// Encrypt the device and the logs; a node that is encrypted stays so, with a new key
    #[arg(long)]
    encrypt: bool,
    /// File of the new key: the one that is there, 128 hexadecimal digits, else a new one
    #[arg(long, value_name = "FILE", conflicts_with = "key_dir")]
    key_file: Option<PathBuf>,
    /// Directory for the file of the new key [default: that of the old one, if this was outside of the node's
    /// directory]
    #[arg(long, value_name = "DIR")]
    key_dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    of: ClusterArgs,
}

pub(super) fn run(options: &ReplaceDeviceArgs) -> Result<(), CommandError> {
    let layout = ClusterLayout::open(&options.of.cluster, &options.of.etcd.options())?;
    let node = options.node;
    if !layout.nodes.contains(&node) {
        return Err(CommandError::operation(no_directory(&layout, node)));
    }
    let params = layout.start_of(node)?;
    let new = new_node(&layout, options, &params)?;
    encryption::check_log(&new, options.log.as_deref())?;
    NodeKey::prepare(&new)?;
    check_others(&layout, node)?;
    let was_stopped = layout.is_stopped(node);
    stop::stop(&layout, node, false)?;
    wait_until_down(&layout, node)?;
    let (place, aside) = (layout.node(node), aside(&layout, node));
    fs::rename(&place, &aside).map_err(CommandError::environment)?;
    let disks = (options.device.as_deref(), options.log.as_deref());
    if let Err(error) = layout::add_node(&layout, Some(node), disks, &new, Some(&params)) {
        // The node is what it was.
        fs::rename(&aside, &place).map_err(CommandError::environment)?;
        if !was_stopped {
            layout.set_stopped(node, false).map_err(CommandError::environment)?;
        }
        return Err(error);
    }
    match options.json {
        true => stdout_line!("{:#}", json!({ "node": node, "state": "replaced", "old_directory": aside })),
        false => stdout_line!(
            "node {node} has an empty device, and gets copies of its groups when it runs; what was in its \
             directory is in {}",
            aside.display()
        ),
    }
    Ok(())
}

/// Why there is nothing to replace.
fn no_directory(layout: &ClusterLayout, node: u32) -> String {
    let directory = layout.directory.display();
    let aside =
        fs::read_dir(&layout.directory).into_iter().flatten().flatten().find(|entry| {
            entry.file_name().to_str().is_some_and(|name| name.starts_with(&aside_prefix(node)))
        });
    match aside {
        Some(aside) => format!(
            "node {node} has no directory in {directory}, since its replacement was interrupted: rename {} to \
             node{node} and `ringbolt store start-node {node}`, or go on with \
             `ringbolt store add-node --replace {node}`",
            aside.path().display()
        ),
        None => format!(
            "node {node} has no directory in {directory}: run this on its machine, or \
             `ringbolt store add-node --replace {node}` if its directory is lost"
        ),
    }
}

/// The new node: where it listens and its domain are as before.
fn new_node(
    layout: &ClusterLayout,
    options: &ReplaceDeviceArgs,
    params: &Value,
) -> Result<NodeOptions, CommandError> {
    let records = layout.map.nodes().map_err(CommandError::operation)?;
    let record = records.get(&NodeId(options.node));
    let record =
        record.ok_or_else(|| CommandError::operation(format!("the cluster has no node {}", options.node)))?;
    let listen: Option<SocketAddr> = params["listen"].as_str().and_then(|listen| listen.parse().ok());
    let local = NodeOptions::local(0);
    let old_key = layout.key_of(options.node);
    let encrypt = options.encrypt || old_key.is_some();
    if !encrypt && (options.key_file.is_some() || options.key_dir.is_some()) {
        let reason = format!("node {} is not encrypted: --encrypt encrypts its new device", options.node);
        return Err(CommandError::usage(reason));
    }
    if let (Some(file), Some(old)) = (&options.key_file, &old_key)
        && old.is_in(file)
    {
        let file = file.display();
        let reason = format!("--key-file {file} has the key of the old device: the new one needs another");
        return Err(CommandError::usage(reason));
    }
    let elsewhere = old_key.and_then(|key| key.directory_elsewhere(&layout.directory, options.node));
    let key_dir = options.key_dir.clone().or(elsewhere);
    Ok(NodeOptions {
        encrypt,
        key_dir: key_dir.filter(|_| options.key_file.is_none()),
        key_file: options.key_file.clone(),
        size: options.size,
        force: options.force,
        log_size: options.log_size,
        spare: options.spare,
        domain: Some(record.domain.clone()),
        listen: listen.unwrap_or(local.listen),
        allow_plain_network: params["allow_plain_network"] == true,
        tls: match record.tls {
            TlsPolicy::Off => TlsOption::Off,
            TlsPolicy::On => TlsOption::On,
            TlsPolicy::Required => TlsOption::Required,
        },
        ..local
    })
}

/// Refuses a node that has what no other one has.
fn check_others(layout: &ClusterLayout, node: u32) -> Result<(), CommandError> {
    for pool in layout.map.pools().map_err(CommandError::operation)?.values() {
        let groups = layout.map.groups(pool.first_group..pool.first_group + pool.groups);
        let groups = groups.map_err(CommandError::operation)?;
        let alone = groups.iter().find(|(_, record)| record.config.in_sync == [ReplicaId(node)]);
        if let Some((group, _)) = alone {
            return Err(CommandError::operation(format!(
                "only node {node} has the data of group {}: its device stays until another node is in sync",
                group.0
            )));
        }
    }
    Ok(())
}

/// A node that was lost is up until its lease ends.
fn wait_until_down(layout: &ClusterLayout, node: u32) -> Result<(), CommandError> {
    let mut changes = layout.map.changes();
    while layout.map.nodes_up().map_err(CommandError::operation)?.contains(&NodeId(node)) {
        if changes.wait(WATCH_TIME).is_err() {
            // Nothing says when the map can be used again.
            std::thread::sleep(changes.retry_after());
        }
    }
    Ok(())
}

/// Where the node's directory goes. Its name is that of no node.
fn aside(layout: &ClusterLayout, node: u32) -> PathBuf {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    layout.directory.join(format!("{}{seconds}", aside_prefix(node)))
}

fn aside_prefix(node: u32) -> String {
    format!("node{node}.replaced-")
}
