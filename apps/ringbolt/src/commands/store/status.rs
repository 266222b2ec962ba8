//! `ringbolt store status`: what the map has and what the nodes report, put together by group.

mod ask;
mod ok_to_stop;
mod volumes;

pub(super) use ask::TIMEOUT as ASK_MAX;
pub(super) use ok_to_stop::{OkToStopArgs, run as ok_to_stop};
pub(crate) use volumes::{VolumeCounts, count_volumes};

use std::collections::{BTreeMap, BTreeSet};

use cluster_map::{
    ClusterMap, ClusterSettings, DeviceId, GroupId, MapError, MapPosition, NodeId, NodeRecord, OutReason,
    PartitionSize, PoolClass, PoolRecord, RecoverySettings, ReplicaId, Topology,
};
use comfy_table::Table;
use serde_json::{Value, json};
use store_node::ThreadMode;

use super::arguments::ClusterArgs;
use super::layout::{ClusterLayout, describe_older, shared_domain};
use super::scrub_records;
use crate::command_error::CommandError;
use crate::console::stdout_line;
use ask::{NodeAnswer, NodeAnswers, NodeReply};

/// What the map has.
struct MapContents {
    settings: ClusterSettings,
    nodes: BTreeMap<NodeId, NodeRecord>,
    up: BTreeSet<NodeId>,
    out: BTreeMap<NodeId, OutReason>,
    weights: BTreeMap<NodeId, u32>,
    pools: BTreeMap<String, PoolRecord>,
    groups: Vec<GroupView>,
    recovery: RecoverySettings,
    /// When groups were scrubbed, and what was found.
    scrub: Value,
    position: MapPosition,
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
        Value::String(text) => text.replace(char::is_control, "?"),
        Value::Array(all) => all.iter().map(Value::to_string).collect::<Vec<_>>().join(" "),
        Value::Null => String::new(),
        other => other.to_string(),
    };
    for group in status["groups"].as_array().into_iter().flatten() {
        table.add_row(GROUP_FIELDS.map(|field| text(&group[field])));
    }
    stdout_line!("{table}");
    if let (Some(lease), Some(grace)) = (status["lease_ms"].as_u64(), status["grace_ms"].as_u64()) {
        stdout_line!("lease {lease} ms, grace {grace} ms");
    }
    if status["noout"] == true {
        stdout_line!("noout: replicas of nodes that are down stay where they are");
    }
    if let Some(rate) = status["recovery_bytes_per_second"].as_u64() {
        stdout_line!("recovery rate: a node copies {} at most", mib_per_second(rate));
    }
    if !status["scrub"].is_null() {
        stdout_line!("{}", scrub_records::summary(&status["scrub"]));
    }
    for node in status["nodes"].as_array().into_iter().flatten() {
        let out = match node["out"].as_str() {
            Some("operator") => ", out: it gets no data",
            Some(_) => ", out: it was down for too long",
            None => "",
        };
        let error =
            if node["error"].is_null() { String::new() } else { format!(": {}", text(&node["error"])) };
        // That of a node for which none was given is its own.
        let own = format!("node{}", node["node"]);
        let domain = match node["domain"].as_str() {
            Some(domain) if domain != own => format!(" ({})", text(&node["domain"])),
            _ => String::new(),
        };
        let primaries = match node["primaries"].as_u64() {
            None | Some(0) => String::new(),
            Some(1) => ", primary of 1 group".to_string(),
            Some(groups) => format!(", primary of {groups} groups"),
        };
        let encrypted = if node["encrypted"] == true { ", encrypted" } else { "" };
        stdout_line!(
            "node {}{domain}: {}{encrypted}{primaries}{error}{out}{}{}{}{}",
            node["node"],
            text(&node["state"]),
            prioritized_threads(&node["report"]),
            failed_partitions(&node["report"]),
            damage(&node["report"]),
            unknown_groups(&node["report"])
        );
    }
    Ok(())
}

/// The cores of a node with prioritized threads.
fn prioritized_threads(report: &Value) -> String {
    let threads = &report["threads"];
    if threads["mode"] != ThreadMode::Prioritized.name() {
        return String::new();
    }
    let cores = |name: &str| threads[name].as_str().unwrap_or_default().replace(char::is_control, "?");
    let overlap = if threads["pools_overlap"] == true { ", which overlap" } else { "" };
    format!(
        ", prioritized threads on cores {} and {}{overlap}",
        cores("priority_cores"),
        cores("non_priority_cores")
    )
}

/// The groups of which a node has replicas, and the map no pool.
fn unknown_groups(report: &Value) -> String {
    let unknown: Vec<_> = report["map"]["unknown_groups"].as_array().into_iter().flatten().collect();
    match unknown[..] {
        [] => String::new(),
        [first, ..] => {
            let count = unknown.len();
            format!(
                "; it keeps {count} replicas of groups that no pool of the map has (group {first} and others)"
            )
        }
    }
}

/// The partitions of a node that are damaged; why is with their groups.
fn failed_partitions(report: &Value) -> String {
    let failed = report["failed_partitions"].as_array().into_iter().flatten();
    let named = failed.map(|failed| match failed["group"].as_u64() {
        Some(group) => format!("{} (group {group})", failed["partition"]),
        None => format!("{} (group not known)", failed["partition"]),
    });
    match named.collect::<Vec<_>>()[..] {
        [] => String::new(),
        ref named => format!("; damaged partitions: {}", named.join(", ")),
    }
}

/// The damaged blocks that a node has found, and what it wrote again.
fn damage(report: &Value) -> String {
    let sum = |name: &str| {
        let numbers = replicas_of(Some(report)).filter_map(|it| it[name].as_u64());
        numbers.fold(0, u64::saturating_add)
    };
    match (sum("damaged_blocks"), sum("repaired_ranges")) {
        (0, 0) => String::new(),
        (damaged, repaired) => format!("; {damaged} damaged blocks found, {repaired} ranges repaired"),
    }
}

fn numbers(ids: &[ReplicaId]) -> Vec<u32> {
    ids.iter().map(|id| id.0).collect()
}

/// What a group uses of a partition, as the replicas that have all of it report.
fn used_by(group: u32, answers: &NodeAnswers) -> PartitionSize {
    let mut used = PartitionSize::default();
    let of_nodes = answers.values().flat_map(|answer| replicas_of(answer.report()));
    for replica in of_nodes.filter(|replica| replica["group"] == group && replica["complete"] == true) {
        let number = |name: &str| replica[name].as_u64().unwrap_or_default() as u32;
        used.extents = used.extents.max(number("used_extents"));
        used.onodes = used.onodes.max(number("objects"));
    }
    used
}

fn read_map(map: &dyn ClusterMap, answers: &NodeAnswers) -> Result<MapContents, MapError> {
    let (pools, nodes, devices) = (map.pools()?, map.nodes()?, map.devices()?);
    let topology = Topology::new(&nodes, &devices);
    let partitions: BTreeMap<u32, PartitionSize> =
        devices.values().filter_map(|device| Some((device.node.0, device.partition?))).collect();
    let mut groups = Vec::new();
    for (name, pool) in &pools {
        for (GroupId(group), record) in map.groups(pool.first_group..pool.first_group + pool.groups)? {
            let wanted = pool.replicas as usize;
            let used = used_by(group, answers);
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
    let weights = devices.values().map(|device| (device.node, device.weight)).collect();
    let (settings, recovery, scrub) = (map.settings()?, map.recovery()?, scrub_records::describe(map)?);
    let (up, out, position) = (map.nodes_up()?, map.out()?, map.position()?);
    Ok(MapContents { settings, nodes, up, out, weights, pools, groups, recovery, scrub, position })
}

/// The replicas that a node reports.
fn replicas_of(report: Option<&Value>) -> impl Iterator<Item = &Value> {
    report.and_then(|report| report["replicas"].as_array()).into_iter().flatten()
}

/// The groups that the nodes know: each as the one with its newest epoch does.
fn known_groups(answers: &NodeAnswers) -> Vec<GroupView> {
    let mut groups: BTreeMap<u64, GroupView> = BTreeMap::new();
    for (node, answer) in answers {
        for replica in replicas_of(answer.report()) {
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

impl NodeAnswer {
    fn report(&self) -> Option<&Value> {
        match &self.answer {
            NodeReply::Report(report) => Some(report),
            NodeReply::Unreported(_) | NodeReply::Silent(_) | NodeReply::Stopped(_) => None,
        }
    }

    fn error(&self) -> Option<&str> {
        match &self.answer {
            NodeReply::Report(_) => None,
            NodeReply::Unreported(error) | NodeReply::Silent(error) | NodeReply::Stopped(error) => {
                Some(error)
            }
        }
    }
}

/// What a group's replica on a node is like.
enum ReplicaAnswer<'a> {
    /// The node reports it.
    Known(&'a Value),
    /// The node has none.
    Missing,
    /// The node serves, and reports nothing.
    Unreported,
    /// The node is on another machine, which does not answer this one, and the map has it as up.
    Unknown(&'a str),
    Down(&'a str),
}

/// The replica of a group on a node.
fn replica_on<'a>(
    node: u32,
    group: u32,
    answers: &'a NodeAnswers,
    map: Option<&MapContents>,
) -> ReplicaAnswer<'a> {
    let is_up = map.is_some_and(|map| map.up.contains(&NodeId(node)));
    let Some(NodeAnswer { answer, is_local }) = answers.get(&node) else {
        return ReplicaAnswer::Down("its address is not known");
    };
    match answer {
        NodeReply::Report(report) => match replicas_of(Some(report)).find(|it| it["group"] == group) {
            Some(replica) => ReplicaAnswer::Known(replica),
            None => ReplicaAnswer::Missing,
        },
        NodeReply::Unreported(_) => ReplicaAnswer::Unreported,
        NodeReply::Silent(why) if is_up && !is_local => ReplicaAnswer::Unknown(why),
        NodeReply::Silent(why) | NodeReply::Stopped(why) => ReplicaAnswer::Down(why),
    }
}

/// Whether a group is served: its state, and why not.
fn serving(
    view: &GroupView,
    answers: &NodeAnswers,
    map: Option<&MapContents>,
) -> (&'static str, Option<String>) {
    let of = |node: u32| replica_on(node, view.group, answers, map);
    let primary = view.primary;
    let served = if view.in_sync.len() < view.wanted { "degraded" } else { "healthy" };
    let waits = |report: &Value| report["waits_for"].as_str().map(str::to_string);
    let silent = match of(primary) {
        ReplicaAnswer::Known(report) if report["state"] == "primary" => return (served, None),
        ReplicaAnswer::Known(report) => {
            let failed = failure(report).map(|why| format!("its primary, node {primary}, failed: {why}"));
            return ("waiting", failed.or_else(|| waits(report)));
        }
        ReplicaAnswer::Unreported => return (served, None),
        ReplicaAnswer::Unknown(why) => {
            let why = format!("its primary, node {primary}, is up, and does not answer this machine: {why}");
            return ("unknown", Some(why));
        }
        ReplicaAnswer::Missing => format!("its primary, node {primary}, does not have it"),
        ReplicaAnswer::Down(why) => format!("its primary, node {primary}, does not answer: {why}"),
    };
    let waits = view.replicas.iter().find_map(|node| match of(*node) {
        ReplicaAnswer::Known(report) => waits(report),
        _ => None,
    });
    ("down", Some(waits.map_or(silent.clone(), |waits| format!("{silent}; {waits}"))))
}

/// The replica of a group that its node does not have because a partition there is damaged, and why; what it
/// had is kept if no other one in sync has that.
fn damaged(view: &GroupView, answers: &NodeAnswers) -> Option<(u32, String)> {
    let group = view.group;
    let damage_of = |node: &u32| {
        let refused = answers.get(node)?.report()?["refused"].as_array()?;
        let of_group = |each: &&Value| each["group"] == group && each["partition"].is_u64();
        let refusal = refused.iter().find(of_group)?;
        Some((*node, &refusal["partition"], refusal["why"].as_str()?))
    };
    let (node, partition, why) = view.replicas.iter().find_map(damage_of)?;
    let are_all_damaged = view.in_sync.iter().all(|node| damage_of(node).is_some());
    let decide = if view.in_sync.contains(&node) && are_all_damaged {
        let nodes = view.in_sync.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        format!(
            "no other replica in sync has what it had, so it is kept: put the device of node {nodes} in order, \
             or an older copy of it in its place, and start that node again (`ringbolt store accept-loss \
             {group}` says then what the copy lacks); without one, the data of this group is lost"
        )
    } else if view.in_sync.contains(&node) {
        "it gets a copy when others are in sync without it".to_string()
    } else {
        "start that node again, or replace it".to_string()
    };
    Some((node, format!("partition {partition} of node {node} is damaged: {why}; {decide}")))
}

/// Why a replica failed, if it did: its device reported an error, or a block is damaged.
fn failure(report: &Value) -> Option<&str> {
    report["failure"].as_str().filter(|_| report["state"] == "failed")
}

/// What the primary of a group reports of a replica that catches up.
fn learner(of_primary: &Value, node: u32) -> Option<&Value> {
    of_primary["learners"].as_array().into_iter().flatten().find(|learner| learner["node"] == node)
}

/// How far the copy of all objects to a replica is, and how fast.
fn copying(of_primary: &Value, node: u32) -> String {
    let learner = learner(of_primary, node);
    let number = |name: &str| learner.and_then(|learner| learner[name].as_u64());
    match (number("copied_objects"), number("copied_bytes_per_second"), of_primary["objects"].as_u64()) {
        (Some(copied), Some(speed), Some(objects)) => {
            format!("copying: {copied} of {objects} objects, {}", mib_per_second(speed))
        }
        _ => "copying".to_string(),
    }
}

/// Entries of the log that a replica lacks.
fn entries_behind(of_primary: &Value, node: u32) -> Option<u64> {
    learner(of_primary, node)
        .and_then(|learner| learner["entries_behind"].as_u64())
        .filter(|entries| *entries > 0)
}

pub(super) fn mib_per_second(bytes: u64) -> String {
    format!("{:.1} MiB/s", bytes as f64 / f64::from(1 << 20))
}

/// Bytes a second that are copied to replicas of all groups.
fn copy_speed(groups: &[Value]) -> u64 {
    let learners = groups.iter().flat_map(|group| group["learners"].as_array()).flatten();
    learners.filter_map(|it| it["copied_bytes_per_second"].as_u64()).fold(0, u64::saturating_add)
}

/// The state of a group, and why it is not healthy.
fn describe(view: &GroupView, answers: &NodeAnswers, map: Option<&MapContents>) -> Value {
    let of = |node: u32| replica_on(node, view.group, answers, map);
    let primary = view.primary;
    let (state, mut why) = serving(view, answers, map);
    let reason = |node: u32, list: &str| {
        let report = answers.get(&node).and_then(NodeAnswer::report);
        let all = report.and_then(|report| report[list].as_array()).into_iter().flatten();
        all.filter(|each| each["group"] == view.group).find_map(|each| each["why"].as_str())
    };
    let of_primary = match of(primary) {
        ReplicaAnswer::Known(report) => report,
        _ => &Value::Null,
    };
    let outside = view.replicas.iter().filter(|replica| !view.in_sync.contains(replica));
    let stale = view.replicas.iter().filter_map(|node| match of(*node) {
        ReplicaAnswer::Known(report) => Some((*node, report["stale"].as_str()?)),
        _ => None,
    });
    let stale: Vec<(u32, &str)> = stale.collect();
    let has_more = view.replicas.iter().find(|node| match of(**node) {
        ReplicaAnswer::Known(report) => report["has_more_than_primary"] == true,
        _ => false,
    });
    let damaged = damaged(view, answers);
    let catching_up: Vec<String> = outside
        .map(|node| match of(*node) {
            ReplicaAnswer::Known(report) if report["has_more_than_primary"] == true => {
                format!("{node} (has more than the primary)")
            }
            ReplicaAnswer::Known(report) if failure(report).is_some() => format!("{node} (failed)"),
            ReplicaAnswer::Known(_) if view.without_room.contains(node) => format!("{node} (no room)"),
            ReplicaAnswer::Known(report) if report["complete"] == false => {
                format!("{node} ({})", copying(of_primary, *node))
            }
            ReplicaAnswer::Known(_) | ReplicaAnswer::Unreported => match entries_behind(of_primary, *node) {
                Some(entries) => format!("{node} ({entries} entries behind)"),
                None => format!("{node}"),
            },
            ReplicaAnswer::Missing if damaged.as_ref().is_some_and(|(of, _)| of == node) => {
                format!("{node} (failed)")
            }
            ReplicaAnswer::Missing => format!("{node} (to come)"),
            ReplicaAnswer::Unknown(_) => format!("{node} (no answer)"),
            ReplicaAnswer::Down(_) => format!("{node} (down)"),
        })
        .collect();
    let refusal = view.replicas.iter().find_map(|node| Some((*node, reason(*node, "refused")?)));
    // That of the primary is known by now.
    let failed = view.replicas.iter().filter(|node| **node != primary).find_map(|node| match of(*node) {
        ReplicaAnswer::Known(report) => Some((*node, failure(report)?, report["out_of_space"] == true)),
        _ => None,
    });
    if let Some((node, failure, is_out_of_space)) = failed {
        let remedy = match is_out_of_space {
            true => "`ringbolt store up` starts that node again when its file system has space",
            false => "start that node again, or replace it",
        };
        let failed = format!("the replica on node {node} failed: {failure}; {remedy}");
        why = Some(why.map_or(failed.clone(), |why| format!("{why}; {failed}")));
    } else if let Some((_, damaged)) = damaged {
        why = Some(why.map_or(damaged.clone(), |why| format!("{why}; {damaged}")));
    } else if let (None, Some((node, refusal))) = (&why, refusal) {
        why = Some(format!("node {node}: {refusal}"));
    } else if let (None, Some(no_room)) = (&why, reason(primary, "without_room")) {
        why = Some(no_room.to_string());
    } else if let (None, Some(node)) = (&why, has_more) {
        why = Some(format!(
            "the replica on node {node} has committed entries that its primary lacks, and keeps them: another replica was believed \
             that had lost them"
        ));
    } else if let (None, [(node, reason), ..]) = (&why, &stale[..]) {
        why = Some(format!("the replica on node {node} catches up: {reason}"));
    } else if why.is_none() && !catching_up.is_empty() {
        why = Some("replicas are not in sync".to_string());
    } else if why.is_none() && view.replicas.len() < view.wanted {
        why = Some(format!("{} replicas of {}: too few nodes are in", view.replicas.len(), view.wanted));
    }
    if why.is_none() && view.is_moving {
        why = Some("replicas move to other nodes".to_string());
    }
    // While replicas move, the new and the old ones may share one.
    let shared = map.filter(|_| !view.is_moving);
    let shared = shared.and_then(|map| shared_domain(view.replicas.iter().copied().map(NodeId), &map.nodes));
    if let (None, Some(domain)) = (&why, shared) {
        why = Some(format!("several replicas are in failure domain {domain}"));
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
        "learners": of_primary["learners"],
        "stale": stale.iter().map(|(node, why)| json!({ "node": node, "why": why })).collect::<Vec<_>>(),
        "shared_domain": shared,
        "why": why,
    })
}

/// The nodes of the map, and those on this machine.
fn describe_nodes(answers: &NodeAnswers, map: Option<&MapContents>, groups: &[GroupView]) -> Vec<Value> {
    let known = map.into_iter().flat_map(|map| map.nodes.keys().map(|id| id.0));
    // One that was removed from the cluster has left its directory.
    let is_listed = |node: &u32| {
        let has_reported = answers.get(node).and_then(NodeAnswer::report).is_some();
        has_reported || map.is_none_or(|map| map.nodes.contains_key(&NodeId(*node)))
    };
    let all: BTreeSet<u32> = answers.keys().copied().chain(known).filter(is_listed).collect();
    let mut primaries = BTreeMap::new();
    groups.iter().for_each(|group| *primaries.entry(group.primary).or_insert(0u64) += 1);
    let describe = |node: u32| {
        let answer = answers.get(&node);
        let state = match answer.map(|answer| &answer.answer) {
            // One whose version is older has no state.
            Some(NodeReply::Report(report)) if report["state"] == "leaving" => "leaving",
            Some(NodeReply::Report(_)) => "serves",
            Some(NodeReply::Unreported(_)) => "up",
            Some(NodeReply::Stopped(_)) => "stopped",
            Some(NodeReply::Silent(_)) | None => "does not answer",
        };
        json!({
            "node": node,
            "state": state,
            "domain": map.and_then(|map| map.nodes.get(&NodeId(node))).map(|record| &record.domain),
            "up": map.map(|map| map.up.contains(&NodeId(node))),
            "out": map.and_then(|map| map.out.get(&NodeId(node))),
            "tls": map.and_then(|map| map.nodes.get(&NodeId(node))).map(|record| record.tls.name()),
            "weight": map.and_then(|map| map.weights.get(&NodeId(node))),
            "encrypted": answer.and_then(NodeAnswer::report).map(|report| &report["encrypted"]),
            "primaries": primaries.get(&node).copied().unwrap_or(0),
            "error": answer.and_then(NodeAnswer::error),
            "report": answer.and_then(NodeAnswer::report),
        })
    };
    all.into_iter().map(describe).collect()
}

/// The state of a cluster as an object.
pub(super) fn status(layout: &ClusterLayout) -> Result<Value, CommandError> {
    let (answers, map_error) = ask::ask(layout)?;
    let (map, map_error) = match map_error.map_or_else(|| read_map(&*layout.map, &answers), Err) {
        Ok(map) => (Some(map), None),
        Err(error @ MapError::Storage { .. }) => (None, Some(error.to_string())),
        Err(error) => return Err(CommandError::operation(error)),
    };
    let of_reports = if map.is_none() { known_groups(&answers) } else { Vec::new() };
    let views = map.as_ref().map_or(&of_reports, |map| &map.groups);
    let groups: Vec<Value> = views.iter().map(|view| describe(view, &answers, map.as_ref())).collect();
    let count = |state: &str| groups.iter().filter(|group| group["state"] == state).count();
    let healthy = count("healthy");
    let older = map.as_ref().map(|map| map.position).filter(MapPosition::is_older);
    let forgotten = if map.is_some() && groups.is_empty() { known_groups(&answers).len() } else { 0 };
    let is_healthy = healthy == groups.len() && map_error.is_none() && older.is_none() && forgotten == 0;
    let mut summary = if healthy == groups.len() {
        format!("healthy: all {healthy} groups are served, all their replicas are in sync")
    } else {
        let others = ["degraded", "waiting", "unknown", "down"].map(|state| (state, count(state)));
        let others = others.iter().filter(|(state, count)| *state != "unknown" || *count > 0);
        let others: Vec<_> = others.map(|(state, count)| format!("{count} {state}")).collect();
        format!("not healthy: of {} groups {healthy} healthy, {}", groups.len(), others.join(", "))
    };
    if forgotten > 0 {
        summary = format!(
            "not healthy: the map has no groups, and the nodes have replicas of {forgotten}: put the map back, \
             as with `ringbolt store map restore FILE`"
        );
    }
    let moving = views.iter().filter(|view| view.is_moving).count();
    if moving > 0 {
        summary = format!("{summary}; {moving} move to other nodes");
    }
    let sharing = groups.iter().filter(|group| !group["shared_domain"].is_null()).count();
    if sharing > 0 {
        summary = format!("{summary}; {sharing} have several replicas in one failure domain");
    }
    let mut nodes = describe_nodes(&answers, map.as_ref(), views);
    for node in nodes.iter_mut().filter(|node| node["encrypted"].is_null()) {
        // One that does not answer has a configuration, if it is on this machine.
        let local = layout.nodes.iter().find(|local| node["node"] == **local);
        if let Some(local) = local {
            node["encrypted"] = layout.key_of(*local).is_some().into();
        }
    }
    let speed = copy_speed(&groups);
    if speed > 0 {
        summary = format!("{summary}; {} are copied", mib_per_second(speed));
    }
    if let Some(error) = &map_error {
        summary = format!("memberships stand still: {error}\nas the nodes know it, {summary}");
    }
    if let Some(position) = &older {
        summary = format!("{}\n{summary}", describe_older(position));
    }
    Ok(json!({
        "summary": summary,
        "map_revision": map.as_ref().map(|map| map.position.revision),
        "map_lost_revision": older.and_then(|position| position.lost),
        "healthy": is_healthy,
        "moving": moving,
        "copied_bytes_per_second": speed,
        "map_error": map_error,
        "noout": map.as_ref().map(|map| map.recovery.noout),
        "recovery_bytes_per_second": map.as_ref().and_then(|map| map.recovery.rate),
        "scrub": map.as_ref().map(|map| &map.scrub),
        "lease_ms": map.as_ref().map(|map| map.settings.lease_ms),
        "grace_ms": map.as_ref().map(|map| map.settings.grace_ms),
        "pools": map.iter().flat_map(|map| map.pools.keys()).collect::<Vec<_>>(),
        "groups": groups,
        "nodes": nodes,
    }))
}

#[cfg(test)]
mod tests;
