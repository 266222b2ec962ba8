//! `ringbolt store scrub`: every copy of every block is read and compared.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand};
use cluster_map::{GroupId, GroupScrub, NodeId};
use comfy_table::Table;
use serde_json::{Value, json};

use super::arguments::ClusterArgs;
use super::layout::ClusterLayout;
use super::scrub_records::{ScrubbedGroup, change, groups, span_of, text_of};
use super::status;
use crate::command_error::CommandError;
use crate::console::stdout_line;

/// How often `--wait` looks: nothing says when a group is scrubbed.
const WAIT_POLL: Duration = Duration::from_millis(200);
/// What the table shows of a group.
const FIELDS: [&str; 9] = [
    "group",
    "pool",
    "state",
    "ended",
    "mib",
    "damaged_copies",
    "repaired_copies",
    "differing_copies",
    "uncompared_parts",
];

/// The subcommands of `ringbolt store scrub`.
#[derive(Subcommand)]
pub(crate) enum ScrubCommand {
    /// Scrub all groups now, or those of a pool, or those whose primary is on a node
    #[command(after_help = "Examples:\n  ringbolt store scrub start\n  \
        ringbolt store scrub start --pool pool --wait\n  ringbolt store scrub start --node 2 --json\n\n\
        With --wait the exit status is 1 if copies differ, or could not be read and not be written again.")]
    Start(StartArgs),
    /// Stop what runs; groups that were due are due again when their next time has come
    #[command(after_help = "Example:\n  ringbolt store scrub stop\n\n\
        `ringbolt store set scrub-every=off` ends scrubs that begin by themselves.")]
    Stop(ShowArgs),
    /// Show when each group was scrubbed last, what was found, and which blocks differ
    #[command(after_help = "Example:\n  ringbolt store scrub status --json")]
    Status(ShowArgs),
}

/// Arguments of `ringbolt store scrub start`.
#[derive(Args)]
pub(crate) struct StartArgs {
    /// Only the groups of this pool
    #[arg(long)]
    pool: Option<String>,
    /// Only the groups whose primary is on this node
    #[arg(long)]
    node: Option<u32>,
    /// Wait until it has ended, and show what was found
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    show: ShowArgs,
}

/// Arguments of `ringbolt store scrub stop` and `status`.
#[derive(Args)]
pub(crate) struct ShowArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    of: ClusterArgs,
}

pub(super) fn run(command: &ScrubCommand) -> Result<(), CommandError> {
    match command {
        ScrubCommand::Start(options) => start(options),
        ScrubCommand::Stop(options) => stop(options),
        ScrubCommand::Status(options) => show(&open(options)?, options.json),
    }
}

fn open(options: &ShowArgs) -> Result<ClusterLayout, CommandError> {
    ClusterLayout::open(&options.of.cluster, &options.of.etcd.options())
}

fn seconds_since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn start(options: &StartArgs) -> Result<(), CommandError> {
    let layout = open(&options.show)?;
    let StartArgs { pool, node, .. } = options;
    let (pools, nodes) = (layout.map.pools(), layout.map.nodes());
    let (pools, nodes) = (pools.map_err(CommandError::operation)?, nodes.map_err(CommandError::operation)?);
    if let Some(unknown) = pool.as_ref().filter(|pool| !pools.contains_key(*pool)) {
        return Err(CommandError::operation(format!("the cluster has no pool {unknown}")));
    }
    if let Some(unknown) = node.filter(|node| !nodes.contains_key(&NodeId(*node))) {
        return Err(CommandError::operation(format!("the cluster has no node {unknown}")));
    }
    let of_pool = |group: &ScrubbedGroup| pool.as_ref().is_none_or(|pool| *pool == group.pool);
    let is_wanted = |group: &ScrubbedGroup| {
        of_pool(group) && node.is_none_or(|node| group.record.config.primary.0 == node)
    };
    let wanted = groups(&*layout.map).map_err(CommandError::operation)?;
    let wanted: Vec<GroupId> = wanted.iter().filter(|it| is_wanted(it)).map(|it| it.id).collect();
    if wanted.is_empty() {
        return Err(CommandError::operation(match node {
            Some(node) => format!("node {node} is the primary of none of these groups"),
            None => "there is no group".to_string(),
        }));
    }
    let settings = change(&*layout.map, |settings| settings.started(pool.clone(), *node))?;
    if options.wait {
        let found = wait(&layout, &wanted, settings.number)?;
        show(&layout, options.show.json)?;
        return judge(&found);
    }
    match options.show.json {
        true => {
            let ids: Vec<u32> = wanted.iter().map(|id| id.0).collect();
            stdout_line!("{:#}", json!({ "groups": ids }));
        }
        false => {
            let count = wanted.len();
            stdout_line!("the scrub of {count} groups is started; `ringbolt store scrub status` shows it");
        }
    }
    Ok(())
}

/// Waits until groups were scrubbed, or another command has stopped that. Returns what was found.
fn wait(layout: &ClusterLayout, wanted: &[GroupId], number: u64) -> Result<Vec<GroupScrub>, CommandError> {
    loop {
        let scrubs = layout.map.group_scrubs().map_err(CommandError::operation)?;
        let done = |id: &GroupId| scrubs.get(id).filter(|scrub| scrub.number >= number).cloned();
        if let Some(found) = wanted.iter().map(done).collect() {
            return Ok(found);
        }
        let settings = layout.map.scrub().map_err(CommandError::operation)?;
        if !settings.starts.iter().any(|start| start.number >= number) {
            return Err(CommandError::operation("the scrub was stopped"));
        }
        std::thread::sleep(WAIT_POLL);
    }
}

/// An error if something is left that was found.
fn judge(found: &[GroupScrub]) -> Result<(), CommandError> {
    let differing: u64 = found.iter().map(|scrub| scrub.differing).sum();
    let damaged: u64 = found.iter().map(|scrub| scrub.damaged.saturating_sub(scrub.repaired)).sum();
    match (differing, damaged) {
        (0, 0) => Ok(()),
        (differing, damaged) => Err(CommandError::operation(format!(
            "{differing} copies of blocks differ from that of the primary, and {damaged} damaged ones could \
             not be written again"
        ))),
    }
}

fn stop(options: &ShowArgs) -> Result<(), CommandError> {
    let layout = open(options)?;
    let now_s = seconds_since_1970();
    let settings = change(&*layout.map, |settings| settings.stopped(now_s))?;
    match options.json {
        true => stdout_line!("{:#}", json!({ "stopped": text_of(settings.stopped_s) })),
        false => stdout_line!("scrubs are stopped"),
    }
    Ok(())
}

fn show(layout: &ClusterLayout, as_json: bool) -> Result<(), CommandError> {
    let status = status::status(layout)?;
    let mut scrub = status["scrub"].clone();
    if scrub.is_null() {
        let error = status["map_error"].as_str().unwrap_or_default();
        return Err(CommandError::operation(format!("what was scrubbed is in the map: {error}")));
    }
    let nodes: BTreeMap<String, &Value> = status["nodes"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|node| (node["node"].to_string(), &node["report"]["scrub"]["current"]))
        .filter(|(_, current)| !current.is_null())
        .collect();
    if as_json {
        scrub["running"] = json!(nodes);
        stdout_line!("{scrub:#}");
        return Ok(());
    }
    let every = scrub["every_seconds"].as_u64();
    let every =
        every.map_or("when started only".to_string(), |every_s| format!("every {}", span_of(every_s)));
    let rate = status::mib_per_second(scrub["bytes_per_second"].as_u64().unwrap_or_default());
    stdout_line!("{every}, {rate} a node at most");
    for (node, current) in nodes {
        let mib = current["bytes"].as_u64().unwrap_or_default() >> 20;
        let (group, seconds) = (&current["group"], &current["elapsed_s"]);
        stdout_line!("node {node} scrubs group {group}: {mib} MiB in {seconds} s");
    }
    print_groups(&scrub);
    Ok(())
}

fn print_groups(scrub: &Value) {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(FIELDS.map(|field| field.replace("mib", "MiB").replace('_', " ")));
    let groups = || scrub["groups"].as_array().into_iter().flatten();
    let text = |group: &Value, field: &str| match field {
        "mib" => group["bytes"].as_u64().map_or_else(String::new, |bytes| (bytes >> 20).to_string()),
        _ => match &group[field] {
            Value::String(text) => text.replace(char::is_control, "?"),
            Value::Null => String::new(),
            other => other.to_string(),
        },
    };
    for group in groups() {
        table.add_row(FIELDS.map(|field| text(group, field)));
    }
    stdout_line!("{table}");
    for group in groups() {
        for it in group["differences"].as_array().into_iter().flatten() {
            stdout_line!(
                "group {}: object {} of volume {} at {}: node {} has other data than node {}",
                group["group"],
                it["object"],
                it["volume"],
                it["offset"],
                it["node"],
                group["node"]
            );
        }
    }
}
