//! `ringbolt store ok-to-stop`: which groups would not be served if some nodes were stopped together now.

use std::collections::BTreeSet;

use clap::Args;
use cluster_map::NodeId;
use comfy_table::Table;
use serde_json::{Value, json};

use super::ask::{self, NodeAnswers};
use super::{GroupView, MapContents, ReplicaAnswer, failure, read_map, replica_on, serving};
use crate::command_error::CommandError;
use crate::commands::store::arguments::ClusterArgs;
use crate::commands::store::layout::ClusterLayout;
use crate::console::stdout_line;

/// Arguments of `ringbolt store ok-to-stop`.
#[derive(Args)]
pub(crate) struct OkToStopArgs {
    /// Numbers of the nodes
    #[arg(required = true)]
    nodes: Vec<u32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    of: ClusterArgs,
}

/// What becomes of a group without some nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StopEffect {
    /// Fewer replicas are in sync than its pool demands.
    NotServed,
    /// It is served, and one replica has all of its data.
    OneCopy,
    /// It is served with fewer replicas than its pool has.
    Degraded,
}

impl StopEffect {
    fn name(self) -> &'static str {
        match self {
            StopEffect::NotServed => "not_served",
            StopEffect::OneCopy => "one_copy",
            StopEffect::Degraded => "degraded",
        }
    }

    /// What becomes of a group of which these replicas in sync are left.
    fn of(left: usize, needed: usize, is_served: bool) -> StopEffect {
        match left {
            _ if left < needed.max(1) || !is_served => StopEffect::NotServed,
            1 => StopEffect::OneCopy,
            _ => StopEffect::Degraded,
        }
    }
}

/// A group that some nodes have a replica of.
struct ConcernedGroup<'a> {
    view: &'a GroupView,
    /// Replicas in sync that would be left on nodes that serve.
    left: Vec<u32>,
    needed: usize,
    effect: StopEffect,
}

pub(in crate::commands::store) fn run(options: &OkToStopArgs) -> Result<(), CommandError> {
    let layout = ClusterLayout::open(&options.of.cluster, &options.of.etcd.options())?;
    let (answers, map_error) = ask::ask(&layout)?;
    // Without the map no node takes over.
    let map = map_error.map_or_else(|| read_map(&*layout.map, &answers), Err);
    let map = map.map_err(CommandError::operation)?;
    let stopped: BTreeSet<u32> = options.nodes.iter().copied().collect();
    if let Some(unknown) = stopped.iter().find(|node| !map.nodes.contains_key(&NodeId(**node))) {
        return Err(CommandError::operation(format!("the cluster has no node {unknown}")));
    }
    let groups = concerned(&stopped, &answers, &map);
    let is_ok = groups.iter().all(|group| group.effect != StopEffect::NotServed);
    let verdict = describe(&stopped, &groups);
    if options.json {
        let groups = groups.iter().map(to_json).collect::<Vec<_>>();
        stdout_line!("{:#}", json!({ "ok": is_ok, "nodes": stopped, "verdict": verdict, "groups": groups }));
    } else if !groups.is_empty() {
        stdout_line!("{}", table(&groups));
    }
    match is_ok {
        true if options.json => Ok(()),
        true => {
            stdout_line!("{verdict}");
            Ok(())
        }
        false => Err(CommandError::operation(verdict)),
    }
}

/// The groups that would have fewer replicas in sync, or that have a replica there and are not served now.
fn concerned<'a>(
    stopped: &BTreeSet<u32>,
    answers: &NodeAnswers,
    map: &'a MapContents,
) -> Vec<ConcernedGroup<'a>> {
    let concerned = |view: &'a GroupView| {
        let (state, _) = serving(view, answers, Some(map));
        let is_served = ["healthy", "degraded"].contains(&state);
        let is_there = |nodes: &[u32]| nodes.iter().any(|node| stopped.contains(node));
        if !is_there(&view.in_sync) && (is_served || !is_there(&view.replicas)) {
            return None;
        }
        let serves = |node: u32| match replica_on(node, view.group, answers, Some(map)) {
            ReplicaAnswer::Known(report) => failure(report).is_none(),
            ReplicaAnswer::Unreported => map.up.contains(&NodeId(node)),
            ReplicaAnswer::Missing | ReplicaAnswer::Unknown(_) | ReplicaAnswer::Down(_) => false,
        };
        let in_sync = view.in_sync.iter().copied();
        let left: Vec<u32> = in_sync.filter(|node| !stopped.contains(node) && serves(*node)).collect();
        let pool = view.pool.as_ref().and_then(|pool| map.pools.get(pool));
        let needed = pool.map_or(1, |pool| pool.in_sync_min as usize);
        let effect = StopEffect::of(left.len(), needed, is_served);
        Some(ConcernedGroup { view, left, needed, effect })
    };
    map.groups.iter().filter_map(concerned).collect()
}

/// One line for people.
fn describe(stopped: &BTreeSet<u32>, groups: &[ConcernedGroup<'_>]) -> String {
    let count = |effect: StopEffect| groups.iter().filter(|group| group.effect == effect).count();
    let nodes = stopped.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    let nodes = if stopped.len() == 1 { format!("node {nodes}") } else { format!("nodes {nodes} together") };
    let of = |count: usize| if count == 1 { "1 group".to_string() } else { format!("{count} groups") };
    match (count(StopEffect::NotServed), count(StopEffect::OneCopy), count(StopEffect::Degraded)) {
        (0, 0, 0) => format!("ok to stop {nodes}: no group has a replica in sync there"),
        (0, 0, degraded) => {
            format!("ok to stop {nodes}: {} would be served with fewer replicas", of(degraded))
        }
        (0, one_copy, _) => {
            format!("ok to stop {nodes}: {} would be served with one copy of the data", of(one_copy))
        }
        (not_served, ..) => format!("not ok to stop {nodes}: {} would not be served", of(not_served)),
    }
}

fn to_json(group: &ConcernedGroup<'_>) -> Value {
    let ConcernedGroup { view, left, needed, effect } = group;
    json!({
        "group": view.group,
        "pool": view.pool,
        "in_sync": view.in_sync,
        "left": left,
        "needed": needed,
        "effect": effect.name(),
    })
}

fn table(groups: &[ConcernedGroup<'_>]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["group", "pool", "in sync", "left", "needed", "effect"]);
    let numbers = |nodes: &[u32]| nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    for ConcernedGroup { view, left, needed, effect } in groups {
        let pool = view.pool.as_deref().unwrap_or_default().replace(char::is_control, "?");
        let effect = effect.name().replace('_', " ");
        let (in_sync, left) = (numbers(&view.in_sync), numbers(left));
        table.add_row([view.group.to_string(), pool, in_sync, left, needed.to_string(), effect]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_needs_as_many_replicas_in_sync_as_its_pool_demands() {
        for (left, needed, is_served, effect) in [
            (2, 2, true, StopEffect::Degraded),
            (1, 2, true, StopEffect::NotServed),
            (1, 1, true, StopEffect::OneCopy),
            (0, 1, true, StopEffect::NotServed),
            // A pool that demands none does not exist: nothing is served without a replica.
            (0, 0, true, StopEffect::NotServed),
            // What is not served now is in no state to lose a node.
            (2, 2, false, StopEffect::NotServed),
        ] {
            assert_eq!(StopEffect::of(left, needed, is_served), effect, "{left} of {needed}");
        }
    }
}
