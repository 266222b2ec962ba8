//! `ringbolt store remove-node`: a node that leaves for good.

use std::collections::BTreeMap;
use std::time::Duration;

use clap::Args;
use cluster_map::{GroupId, GroupRecord, MapError, NodeId, OutReason, PoolRecord, ReplicaId, Topology};
use serde_json::json;

use super::arguments::ClusterArgs;
use super::layout::ClusterLayout;
use super::stop;
use crate::command_error::CommandError;
use crate::console::{stderr_line, stdout_line};

/// Changes of the map are waited for this long at a time.
const WATCH_TIME: Duration = Duration::from_secs(1);

/// Arguments of `ringbolt store remove-node`.
#[derive(Args)]
pub(crate) struct RemoveNodeArgs {
    /// Number of the node
    node: u32,
    /// Take it out, wait until its replicas are on other nodes, stop it if it is on this machine, and remove
    /// it then
    #[arg(long)]
    wait: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    of: ClusterArgs,
}

pub(super) fn run(options: &RemoveNodeArgs) -> Result<(), CommandError> {
    let RemoveNodeArgs { node, wait, json, .. } = *options;
    let layout = ClusterLayout::open(&options.of.cluster, &options.of.etcd.options())?;
    let map = &*layout.map;
    if !map.nodes().map_err(failed)?.contains_key(&NodeId(node)) {
        return Err(CommandError::operation(format!("the cluster has no node {node}")));
    }
    if wait {
        drain(&layout, node)?;
        end(&layout, node)?;
    }
    let in_sync = groups_of(&layout, |record| record.config.has(ReplicaId(node)))?;
    if !in_sync.is_empty() {
        return Err(CommandError::operation(format!(
            "node {node} has a replica in sync of {}: `ringbolt store remove-node {node} --wait` moves its \
             replicas to other nodes first",
            count(&in_sync)
        )));
    }
    if map.nodes_up().map_err(failed)?.contains(&NodeId(node)) {
        let reason = format!("node {node} is up: `ringbolt store stop-node {node}` on its machine stops it");
        return Err(CommandError::operation(reason));
    }
    map.remove_node(NodeId(node)).map_err(failed)?;
    let place = layout.node(node);
    match place.exists() {
        _ if json => stdout_line!("{:#}", json!({ "node": node, "state": "removed" })),
        true => {
            stdout_line!("node {node} is removed; {} and its device are for you to delete", place.display());
        }
        false => stdout_line!("node {node} is removed"),
    }
    Ok(())
}

fn failed(error: MapError) -> CommandError {
    CommandError::operation(error)
}

/// The groups of all pools whose record is of a kind.
fn groups_of(
    layout: &ClusterLayout,
    is_one: impl Fn(&GroupRecord) -> bool,
) -> Result<Vec<u32>, CommandError> {
    let mut found = Vec::new();
    for pool in layout.map.pools().map_err(failed)?.values() {
        let records = layout.map.groups(pool.first_group..pool.first_group + pool.groups).map_err(failed)?;
        found.extend(records.iter().filter(|(_, record)| is_one(record)).map(|(group, _)| group.0));
    }
    Ok(found)
}

fn count(groups: &[u32]) -> String {
    match groups {
        [group] => format!("group {group}"),
        groups => format!("{} groups", groups.len()),
    }
}

/// Takes a node out, and waits until others have its replicas.
fn drain(layout: &ClusterLayout, node: u32) -> Result<(), CommandError> {
    let map = &*layout.map;
    check_others(layout, node)?;
    // Changes are watched before anything is read.
    let mut changes = map.changes();
    map.set_out(NodeId(node), Some(OutReason::Operator)).map_err(failed)?;
    let mut shown = usize::MAX;
    loop {
        let left = groups_of(layout, |record| record.replicas.contains(&ReplicaId(node)))?;
        if left.is_empty() {
            return Ok(());
        }
        check_alone(layout, node)?;
        if left.len() != shown {
            stderr_line!("node {node}: replicas of {} are still to move", count(&left));
            shown = left.len();
        }
        if changes.wait(WATCH_TIME).is_err() {
            // Nothing says when the map can be used again.
            std::thread::sleep(changes.retry_after());
        }
    }
}

/// Refuses to take out a node without which a pool has too few nodes: its replicas would stay.
fn check_others(layout: &ClusterLayout, node: u32) -> Result<(), CommandError> {
    let map = &*layout.map;
    let (mut nodes, devices) = (map.nodes().map_err(failed)?, map.devices().map_err(failed)?);
    if let Some(record) = nodes.get_mut(&NodeId(node)) {
        record.out = true;
    }
    let topology = Topology::new(&nodes, &devices);
    let pools: BTreeMap<String, PoolRecord> = map.pools().map_err(failed)?;
    for (name, pool) in pools {
        let placed = topology.place(GroupId(pool.first_group), pool.replicas as usize).len();
        if placed < pool.replicas as usize {
            return Err(CommandError::operation(format!(
                "without node {node} pool {name} has {placed} nodes for {} replicas: add a node first \
                 (`ringbolt store add-node`), or have the pool take fewer (`ringbolt store pool set`)",
                pool.replicas
            )));
        }
    }
    check_alone(layout, node)
}

/// Refuses a node that is down and has what no other one has.
fn check_alone(layout: &ClusterLayout, node: u32) -> Result<(), CommandError> {
    if layout.map.nodes_up().map_err(failed)?.contains(&NodeId(node)) {
        return Ok(());
    }
    match groups_of(layout, |record| record.config.in_sync == [ReplicaId(node)])?[..] {
        [] => Ok(()),
        [group, ..] => Err(CommandError::operation(format!(
            "node {node} is down, and only it has the data of group {group}: start it first"
        ))),
    }
}

/// Stops a node that has nothing any more, if it is on this machine; else waits until it is down.
fn end(layout: &ClusterLayout, node: u32) -> Result<(), CommandError> {
    let is_up = || layout.map.nodes_up().map(|up| up.contains(&NodeId(node))).map_err(failed);
    if layout.nodes.contains(&node) {
        stop::stop(layout, node, false)?;
    } else if is_up()? {
        stderr_line!(
            "node {node} has no replicas any more: stop it on its machine, `ringbolt store stop-node {node}`"
        );
    }
    let mut changes = layout.map.changes();
    while is_up()? {
        if changes.wait(WATCH_TIME).is_err() {
            std::thread::sleep(changes.retry_after());
        }
    }
    Ok(())
}
