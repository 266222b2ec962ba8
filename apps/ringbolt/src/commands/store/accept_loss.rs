//! `ringbolt store accept-loss`: a person decides that a replica serves which lacks what its group had.

use clap::Args;
use cluster_map::{AcceptedLoss, GroupId, ReplicaId};
use serde_json::Value;

use super::arguments::ClusterArgs;
use super::layout::ClusterLayout;
use super::status;
use crate::command_error::CommandError;
use crate::console::stdout_line;

/// Arguments of `ringbolt store accept-loss`.
#[derive(Args)]
pub(crate) struct AcceptLossArgs {
    /// The logical group, as `ringbolt store status` numbers it
    group: u32,
    /// Accept what it says
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    of: ClusterArgs,
}

/// A replica that waits because it lacks something.
#[derive(Debug, PartialEq, Eq)]
struct Candidate {
    node: u32,
    why: String,
    /// Epoch and sequence of its last entry, and of the one that is known to be committed.
    last: (u64, u64),
    known: (u64, u64),
}

impl Candidate {
    /// What a node reports of its replica, if that is one.
    fn of(node: u32, replica: &Value) -> Option<Candidate> {
        let name = |entry: &Value| Some((entry["epoch"].as_u64()?, entry["sequence"].as_u64()?));
        let is_member = replica["in_sync"].as_array()?.iter().any(|member| *member == node);
        let is_waiting = replica["state"] == "waiting" && replica["complete"] == true && is_member;
        let why = replica["stale"].as_str().filter(|_| is_waiting)?.to_string();
        Some(Candidate {
            node,
            why,
            last: name(&replica["last_entry"])?,
            known: name(&replica["known_committed"])?,
        })
    }

    /// What is lost if it serves.
    fn cost(&self, group: u32) -> String {
        let Candidate { node, why, last, known } = self;
        let missing = match known.1.saturating_sub(last.1) {
            0 => "nothing that the map knows of is missing, but what was written after the copy was made is"
                .to_string(),
            entries => format!(
                "at least {entries} acknowledged writes are missing: the map has entry {} of epoch {} as committed",
                known.1, known.0
            ),
        };
        format!(
            "group {group}: node {node} has it up to entry {} of epoch {}, and {why}. If it serves, {missing}. What other nodes \
             have of the group since then is dropped when they return",
            last.1, last.0
        )
    }
}

pub(super) fn run(options: &AcceptLossArgs) -> Result<(), CommandError> {
    let layout = ClusterLayout::open(&options.of.cluster, &options.of.etcd.options())?;
    let group = options.group;
    let status = status::status(&layout)?;
    let candidate = candidate(&status, group).map_err(CommandError::operation)?;
    let cost = candidate.cost(group);
    if !options.yes {
        return Err(CommandError::usage(format!(
            "{cost}. Start its other nodes if there are any; --yes accepts the loss"
        )));
    }
    let record = layout.map.group(GroupId(group)).map_err(CommandError::operation)?;
    let record = record.ok_or_else(|| CommandError::operation(format!("there is no group {group}")))?;
    let loss = AcceptedLoss { node: ReplicaId(candidate.node), epoch: record.config.epoch };
    layout.map.accept_loss(GroupId(group), &loss).map_err(CommandError::operation)?;
    stdout_line!("{cost}");
    stdout_line!("accepted: node {} serves group {group} within a second", candidate.node);
    Ok(())
}

/// The replica of a group that has most of those that wait.
fn candidate(status: &Value, group: u32) -> Result<Candidate, String> {
    let groups = status["groups"].as_array().into_iter().flatten();
    let Some(state) = groups.into_iter().find(|each| each["group"] == group) else {
        return Err(format!("there is no group {group}"));
    };
    if ["healthy", "degraded"].iter().any(|served| state["state"] == *served) {
        return Err(format!("group {group} is served: there is nothing to accept"));
    }
    let nodes = status["nodes"].as_array().into_iter().flatten();
    let candidates = nodes.filter_map(|node| {
        let replicas = node["report"]["replicas"].as_array()?;
        let replica = replicas.iter().find(|replica| replica["group"] == group)?;
        Candidate::of(u32::try_from(node["node"].as_u64()?).ok()?, replica)
    });
    candidates.max_by_key(|candidate| candidate.last).ok_or_else(|| {
        let why = state["why"].as_str().unwrap_or("no node says why");
        format!("no replica of group {group} waits because it lacks something: {why}")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(state: &str, stale: &Value) -> Value {
        let replica = |epoch, sequence| {
            json!({
                "group": 3, "state": "waiting", "complete": true, "in_sync": [1, 2], "stale": stale,
                "last_entry": { "epoch": epoch, "sequence": sequence },
                "known_committed": { "epoch": 5, "sequence": 120 },
            })
        };
        let node = |node, replica| json!({ "node": node, "report": { "replicas": [replica] } });
        json!({
            "groups": [{ "group": 3, "state": state, "why": "it waits" }],
            "nodes": [node(1, replica(4, 95)), node(2, replica(5, 90)), { "node": 3, "report": null }],
        })
    }

    #[test]
    fn the_replica_with_the_newest_entry_is_chosen_and_the_cost_named() {
        let older = json!("its device is an older copy of itself");
        let found = candidate(&status("waiting", &older), 3).unwrap();
        assert_eq!((found.node, found.last), (2, (5, 90)));
        let cost = found.cost(3);
        assert!(cost.contains("at least 30 acknowledged writes") && cost.contains("an older copy"), "{cost}");
        let refused = |status: &Value, group| candidate(status, group).unwrap_err();
        assert!(refused(&status("degraded", &older), 3).contains("is served"));
        assert!(refused(&status("down", &Value::Null), 3).contains("it waits"));
        assert!(refused(&status("down", &older), 4).contains("no group 4"));
    }
}
