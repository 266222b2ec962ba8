//! `ringbolt store status`: what the map has and what the nodes report, put together by group.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cluster_map::{
    ClusterMap, DeviceId, GroupId, MapError, NodeId, NodeRecord, OutReason, PartitionSize, PoolClass,
    PoolRecord, ReplicaId, Topology,
};
use comfy_table::Table;
use serde_json::{Value, json};

use super::ClusterArgs;
use super::layout::ClusterLayout;
use crate::command_error::CommandError;
use crate::commands::rpc;
use crate::console::stdout_line;

/// How long a node may take for its answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// What the nodes on this machine report; `None` of one that does not answer.
type NodeReports = BTreeMap<u32, Option<Value>>;

/// What the map has.
struct MapContents {
    nodes: BTreeMap<NodeId, NodeRecord>,
    up: BTreeSet<NodeId>,
    out: BTreeMap<NodeId, OutReason>,
    pools: BTreeMap<String, PoolRecord>,
    groups: Vec<GroupView>,
}

/// A group, as the map has it or, without the map, as the nodes know it.
struct GroupView {
    group: u32,
    pool: Option<String>,
    class: Option<PoolClass>,
    /// The class, as far as the devices of its replicas keep it.
    durability: Option<PoolClass>,
    epoch: u64,
    primary: u32,
    in_sync: Vec<u32>,
    replicas: Vec<u32>,
    /// How many there are to be.
    wanted: usize,
    /// Placement wants others.
    is_moving: bool,
    /// Replicas whose partitions are too small for what the group has.
    without_room: Vec<u32>,
}

/// What the table shows of a group.
const GROUP_FIELDS: [&str; 10] =
    ["group", "pool", "class", "durability", "state", "epoch", "primary", "in_sync", "catching_up", "why"];

pub(super) fn run(of: &ClusterArgs, as_json: bool) -> Result<(), CommandError> {
    let layout = ClusterLayout::open(&of.cluster, &of.etcd.options())?;
    let status = status(&layout)?;
    if as_json {
        stdout_line!("{status:#}");
        return Ok(());
    }
    stdout_line!("{}", status["summary"].as_str().unwrap_or_default());
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(GROUP_FIELDS.map(|field| field.replace('_', " ")));
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Array(all) => all.iter().map(Value::to_string).collect::<Vec<_>>().join(" "),
        Value::Null => String::new(),
        other => other.to_string(),
    };
    for group in status["groups"].as_array().into_iter().flatten() {
        table.add_row(GROUP_FIELDS.map(|field| text(&group[field])));
    }
    stdout_line!("{table}");
    for node in status["nodes"].as_array().into_iter().flatten() {
        let out = match node["out"].as_str() {
            Some("operator") => ", out: it gets no data",
            Some(_) => ", out: it was down for too long",
            None => "",
        };
        stdout_line!("node {}: {}{out}", node["node"], text(&node["state"]));
    }
    Ok(())
}

fn numbers(ids: &[ReplicaId]) -> Vec<u32> {
    ids.iter().map(|id| id.0).collect()
}

/// What a group uses of a partition, as the replicas that have all of it report.
fn used_by(group: u32, reports: &NodeReports) -> PartitionSize {
    let mut used = PartitionSize::default();
    let of_nodes = reports.values().flat_map(|report| replicas_of(report.as_ref()));
    for replica in of_nodes.filter(|replica| replica["group"] == group && replica["complete"] == true) {
        let number = |name: &str| replica[name].as_u64().unwrap_or_default() as u32;
        used.extents = used.extents.max(number("used_extents"));
        used.onodes = used.onodes.max(number("objects"));
    }
    used
}

fn read_map(map: &dyn ClusterMap, reports: &NodeReports) -> Result<MapContents, MapError> {
    let (pools, nodes, devices) = (map.pools()?, map.nodes()?, map.devices()?);
    let topology = Topology::new(&nodes, &devices);
    let partitions: BTreeMap<u32, PartitionSize> =
        devices.values().filter_map(|device| Some((device.node.0, device.partition?))).collect();
    let mut groups = Vec::new();
    for (name, pool) in &pools {
        for (GroupId(group), record) in map.groups(pool.first_group..pool.first_group + pool.groups)? {
            let wanted = pool.replicas as usize;
            let used = used_by(group, reports);
            let has_room = |node: u32| record.has_room(ReplicaId(node), partitions.get(&node).copied(), used);
            let node_of = |device: &DeviceId| devices[device].node.0;
            let placed = topology.place_where(GroupId(group), wanted, |device| has_room(node_of(&device)));
            let placed: Vec<u32> = placed.iter().map(node_of).collect();
            let replicas = numbers(&record.replicas);
            let without_room = replicas.iter().copied().filter(|node| !has_room(*node)).collect();
            // With too few nodes nothing moves.
            let is_moving = placed.len() == wanted
                && (replicas.len() != wanted || placed.iter().any(|node| !replicas.contains(node)));
            groups.push(GroupView {
                group,
                pool: Some(name.clone()),
                class: Some(pool.class),
                durability: Some(
                    pool.class_on(devices.values().filter(|device| replicas.contains(&device.node.0))),
                ),
                epoch: record.config.epoch.into(),
                primary: record.config.primary.0,
                in_sync: numbers(&record.config.in_sync),
                replicas,
                wanted,
                is_moving,
                without_room,
            });
        }
    }
    Ok(MapContents { nodes, up: map.nodes_up()?, out: map.out()?, pools, groups })
}

/// The replicas that a node reports.
fn replicas_of(report: Option<&Value>) -> impl Iterator<Item = &Value> {
    report.and_then(|report| report["replicas"].as_array()).into_iter().flatten()
}

/// The groups that the nodes know: each as the one with its newest epoch does.
fn known_groups(reports: &NodeReports) -> Vec<GroupView> {
    let mut groups: BTreeMap<u64, GroupView> = BTreeMap::new();
    for (node, report) in reports {
        for replica in replicas_of(report.as_ref()) {
            let number = |value: &Value| value.as_u64().unwrap_or_default();
            let in_sync = replica["in_sync"].as_array().into_iter().flatten();
            let view = GroupView {
                group: number(&replica["group"]) as u32,
                pool: None,
                class: PoolClass::ALL.into_iter().find(|class| replica["class"] == class.name()),
                durability: None,
                epoch: number(&replica["epoch"]),
                primary: number(&replica["primary"]) as u32,
                in_sync: in_sync.map(|member| number(member) as u32).collect(),
                replicas: Vec::new(),
                wanted: 0,
                is_moving: false,
                without_room: Vec::new(),
            };
            let known = groups.entry(number(&replica["group"])).or_insert_with(|| GroupView {
                pool: None,
                in_sync: Vec::new(),
                replicas: Vec::new(),
                without_room: Vec::new(),
                ..view
            });
            known.replicas.extend([*node]);
            known.replicas.extend(&view.in_sync);
            if view.epoch >= known.epoch {
                let replicas = std::mem::take(&mut known.replicas);
                *known = GroupView { replicas, ..view };
            }
            known.replicas.sort_unstable();
            known.replicas.dedup();
            known.wanted = known.replicas.len();
        }
    }
    groups.into_values().collect()
}

/// The state of a group, and why it is not healthy.
fn describe(view: &GroupView, reports: &NodeReports, map: Option<&MapContents>) -> Value {
    let of = |node: u32| {
        let report = reports.get(&node).and_then(Option::as_ref);
        replicas_of(report).find(|replica| replica["group"] == view.group)
    };
    let is_remote_up =
        |node: u32| !reports.contains_key(&node) && map.is_some_and(|map| map.up.contains(&NodeId(node)));
    let primary = view.primary;
    let served = if view.in_sync.len() < view.wanted { "degraded" } else { "healthy" };
    let waits = |report: &Value| report["waits_for"].as_str().map(str::to_string);
    let (state, mut why) = match of(primary) {
        Some(report) if report["state"] == "primary" => (served, None),
        Some(report) => ("waiting", waits(report)),
        None if is_remote_up(primary) => (served, None),
        None => {
            let silent = format!("its primary, node {primary}, does not answer");
            let waits = view.replicas.iter().filter_map(|node| waits(of(*node)?)).next();
            ("down", Some(waits.map_or(silent.clone(), |waits| format!("{silent}; {waits}"))))
        }
    };
    let reason = |node: u32, list: &str| {
        let report = reports.get(&node).and_then(Option::as_ref);
        let all = report.and_then(|report| report[list].as_array()).into_iter().flatten();
        all.filter(|each| each["group"] == view.group).find_map(|each| each["why"].as_str())
    };
    let outside = view.replicas.iter().filter(|replica| !view.in_sync.contains(replica));
    let catching_up: Vec<String> = outside
        .map(|node| match of(*node) {
            None if is_remote_up(*node) => format!("{node}"),
            None if reports.get(node).is_some_and(Option::is_some) => format!("{node} (to come)"),
            None => format!("{node} (down)"),
            Some(_) if view.without_room.contains(node) => format!("{node} (no room)"),
            Some(report) if report["complete"] == false => format!("{node} (copying)"),
            Some(_) => format!("{node}"),
        })
        .collect();
    let refusal = view.replicas.iter().find_map(|node| Some((*node, reason(*node, "refused")?)));
    if let (None, Some((node, refusal))) = (&why, refusal) {
        why = Some(format!("node {node}: {refusal}"));
    } else if let (None, Some(no_room)) = (&why, reason(primary, "without_room")) {
        why = Some(no_room.to_string());
    } else if why.is_none() && !catching_up.is_empty() {
        why = Some("replicas are not in sync".to_string());
    } else if why.is_none() && view.replicas.len() < view.wanted {
        why = Some(format!("{} replicas of {}: too few nodes are in", view.replicas.len(), view.wanted));
    }
    if why.is_none() && view.is_moving {
        why = Some("replicas move to other nodes".to_string());
    }
    json!({
        "group": view.group,
        "moving": view.is_moving,
        "pool": view.pool,
        "class": view.class.map(PoolClass::name),
        "durability": view.durability.map(PoolClass::name),
        "state": state,
        "epoch": view.epoch,
        "primary": primary,
        "in_sync": view.in_sync,
        "replicas": view.replicas,
        "catching_up": catching_up.join(" "),
        "why": why,
    })
}

/// The nodes of the map, and those on this machine.
fn describe_nodes(reports: &NodeReports, map: Option<&MapContents>) -> Vec<Value> {
    let known = map.into_iter().flat_map(|map| map.nodes.keys().map(|id| id.0));
    let all: BTreeSet<u32> = reports.keys().copied().chain(known).collect();
    let describe = |node: u32| {
        let is_up = map.map(|map| map.up.contains(&NodeId(node)));
        let state = match (reports.get(&node), is_up) {
            (Some(Some(_)), _) => "serves",
            (Some(None), _) => "does not answer",
            (None, Some(true)) => "up, on another machine",
            (None, _) => "down, on another machine",
        };
        let out = map.and_then(|map| map.out.get(&NodeId(node)));
        let report = reports.get(&node).and_then(Option::as_ref);
        json!({ "node": node, "state": state, "up": is_up, "out": out, "report": report })
    };
    all.into_iter().map(describe).collect()
}

/// The state of a cluster as an object.
pub(super) fn status(layout: &ClusterLayout) -> Result<Value, CommandError> {
    let ask = |node: &u32| {
        let report = rpc::call(&layout.socket(*node), "store_node_get_status", Value::Null, TIMEOUT);
        (*node, report.ok())
    };
    let reports: NodeReports = layout.nodes.iter().map(ask).collect();
    let (map, map_error) = match read_map(&*layout.map, &reports) {
        Ok(map) => (Some(map), None),
        Err(error @ MapError::Storage { .. }) => (None, Some(error.to_string())),
        Err(error) => return Err(CommandError::operation(error)),
    };
    let of_reports = if map.is_none() { known_groups(&reports) } else { Vec::new() };
    let views = map.as_ref().map_or(&of_reports, |map| &map.groups);
    let groups: Vec<Value> = views.iter().map(|view| describe(view, &reports, map.as_ref())).collect();
    let count = |state: &str| groups.iter().filter(|group| group["state"] == state).count();
    let healthy = count("healthy");
    let is_healthy = healthy == groups.len() && map_error.is_none();
    let mut summary = if healthy == groups.len() {
        format!("healthy: all {healthy} groups are served, all their replicas are in sync")
    } else {
        let rest = ["degraded", "waiting", "down"].map(|state| format!("{} {state}", count(state)));
        format!("not healthy: of {} groups {healthy} healthy, {}", groups.len(), rest.join(", "))
    };
    let moving = views.iter().filter(|view| view.is_moving).count();
    if moving > 0 {
        summary = format!("{summary}; {moving} move to other nodes");
    }
    if let Some(error) = &map_error {
        summary = format!("memberships stand still: {error}\nas this machine's nodes know it, {summary}");
    }
    Ok(json!({
        "summary": summary,
        "healthy": is_healthy,
        "moving": moving,
        "map_error": map_error,
        "pools": map.iter().flat_map(|map| map.pools.keys()).collect::<Vec<_>>(),
        "groups": groups,
        "nodes": describe_nodes(&reports, map.as_ref()),
    }))
}
