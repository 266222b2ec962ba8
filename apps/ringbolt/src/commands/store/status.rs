//! `ringbolt store status`: what the nodes report, put together by group.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use cluster_map::{ClusterMap, GroupId};
use comfy_table::Table;
use serde_json::{Value, json};

use super::layout::ClusterLayout;
use crate::command_error::CommandError;
use crate::commands::rpc;
use crate::console::stdout_line;

/// How long a node may take for its answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// What a node reports; `None` if it does not answer.
type NodeReports = BTreeMap<u32, Option<Value>>;

pub(super) fn run(directory: &Path, as_json: bool) -> Result<(), CommandError> {
    let layout = ClusterLayout::open(directory)?;
    let status = status(&layout)?;
    if as_json {
        stdout_line!("{status:#}");
        return Ok(());
    }
    stdout_line!("{}", status["summary"].as_str().unwrap_or_default());
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["group", "state", "epoch", "primary", "in sync", "catching up", "why"]);
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Array(all) => all.iter().map(Value::to_string).collect::<Vec<_>>().join(" "),
        Value::Null => String::new(),
        other => other.to_string(),
    };
    for group in status["groups"].as_array().into_iter().flatten() {
        let fields = ["group", "state", "epoch", "primary", "in_sync", "catching_up", "why"];
        table.add_row(fields.map(|field| text(&group[field])));
    }
    stdout_line!("{table}");
    for node in status["nodes"].as_array().into_iter().flatten() {
        stdout_line!("node {}: {}", node["node"], text(&node["state"]));
    }
    Ok(())
}

/// The state of a cluster as an object.
pub(super) fn status(layout: &ClusterLayout) -> Result<Value, CommandError> {
    let ask = |node: &u32| {
        let report = rpc::call(&layout.socket(*node), "store_node_get_status", Value::Null, TIMEOUT);
        (*node, report.ok())
    };
    let reports: NodeReports = layout.nodes.iter().map(ask).collect();
    let map = layout.map()?;
    let mut groups = Vec::new();
    for pool in map.pools().map_err(CommandError::operation)?.values() {
        for group in pool.first_group..pool.first_group + pool.groups {
            let record = map.group(GroupId(group)).map_err(CommandError::operation)?;
            let Some(record) = record else { continue };
            let in_sync: Vec<u32> = record.config.in_sync.iter().map(|member| member.0).collect();
            let primary = record.config.primary.0;
            let of = |node: u32| {
                let replicas = reports.get(&node)?.as_ref()?["replicas"].as_array()?;
                replicas.iter().find(|replica| replica["group"] == group).cloned()
            };
            let reported = of(primary);
            let (state, why) = match &reported {
                None => ("down", Some(format!("its primary, node {primary}, does not answer"))),
                Some(report) if report["state"] == "primary" && in_sync.len() < pool.replicas as usize => {
                    ("degraded", None)
                }
                Some(report) if report["state"] == "primary" => ("healthy", None),
                Some(report) => ("waiting", report["waits_for"].as_str().map(str::to_string)),
            };
            let outside =
                record.replicas.iter().map(|replica| replica.0).filter(|replica| !in_sync.contains(replica));
            let catching_up: Vec<String> = outside
                .map(|node| match of(node) {
                    None => format!("{node} (down)"),
                    Some(report) if report["complete"] == false => format!("{node} (copying)"),
                    Some(_) => format!("{node}"),
                })
                .collect();
            let why =
                why.or_else(|| (!catching_up.is_empty()).then(|| "replicas are not in sync".to_string()));
            groups.push(json!({
                "group": group,
                "state": state,
                "epoch": record.config.epoch,
                "primary": primary,
                "in_sync": in_sync,
                "catching_up": catching_up.join(" "),
                "why": why,
            }));
        }
    }
    let count = |state: &str| groups.iter().filter(|group| group["state"] == state).count();
    let healthy = count("healthy");
    let summary = if healthy == groups.len() {
        format!("healthy: all {healthy} groups are served, all their replicas are in sync")
    } else {
        let rest = ["degraded", "waiting", "down"].map(|state| format!("{} {state}", count(state)));
        format!("not healthy: of {} groups {healthy} healthy, {}", groups.len(), rest.join(", "))
    };
    let nodes: Vec<Value> = reports
        .iter()
        .map(|(node, report)| {
            let state = if report.is_some() { "serves" } else { "does not answer" };
            json!({ "node": node, "state": state, "report": report })
        })
        .collect();
    Ok(json!({ "summary": summary, "healthy": healthy == groups.len(), "groups": groups, "nodes": nodes }))
}
