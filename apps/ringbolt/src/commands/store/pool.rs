//! `ringbolt store pool`: the pools of a cluster.

use clap::{Args, Subcommand, ValueEnum};
use cluster_map::{GroupId, MapError, PoolClass, PoolRecord, ReplicaId, Topology};
use comfy_table::Table;
use serde_json::{Value, json};

use super::arguments::ClusterArgs;
use super::layout::{self, ClusterLayout, LackingNode};
use crate::command_error::CommandError;
use crate::console::stdout_line;

/// The subcommands of `ringbolt store pool`.
#[derive(Subcommand)]
pub(crate) enum PoolCommand {
    /// Create a pool: images whose groups have as many replicas
    #[command(
        after_help = "Example:\n  ringbolt store pool create scratch --replicas 2 --groups 4 --class memory"
    )]
    Create(CreateArgs),
    /// List the pools
    #[command(after_help = "Example:\n  ringbolt store pool list --json")]
    List(ListArgs),
    /// Change the number of replicas of a pool: they are made, or leave, while the pool is used
    #[command(after_help = "Examples:\n  ringbolt store pool set scratch --replicas 3\n  \
        ringbolt store pool set scratch --replicas 2\n\n\
        `ringbolt store status` shows when all are there.")]
    Set(SetArgs),
    /// Give a pool another name, while no client has an image of it
    #[command(after_help = "Example:\n  ringbolt store pool rename scratch builds\n\n\
        Configurations and scripts that name the pool are for you to change. If it is interrupted, \
        repeat it.")]
    Rename(RenameArgs),
    /// Remove a pool that has no images
    #[command(after_help = "Example:\n  ringbolt store pool remove scratch")]
    Remove(RemoveArgs),
}

/// Arguments of `ringbolt store pool create`.
#[derive(Args)]
pub(crate) struct CreateArgs {
    /// Name
    name: String,
    /// Replicas of each logical group
    #[arg(long, default_value_t = 3)]
    replicas: u32,
    /// Logical groups; each node needs a spare partition for each replica that it gets
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    groups: u32,
    /// When a write is acknowledged
    #[arg(long, value_enum, default_value_t = Class::Disk)]
    class: Class,
    #[command(flatten)]
    of: ClusterArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum Class {
    /// It is durable on the device of every replica in sync
    Disk,
    /// The device's cache of every replica in sync has it; a group's data is lost if the machines of all lose
    /// their power
    Memory,
    /// The persistent memory of the logs of every replica in sync has it; each node needs its logs there
    Pmem,
}

impl Class {
    fn of_pool(self) -> PoolClass {
        match self {
            Class::Disk => PoolClass::Disk,
            Class::Memory => PoolClass::Memory,
            Class::Pmem => PoolClass::Pmem,
        }
    }
}

/// Arguments of `ringbolt store pool set`.
#[derive(Args)]
pub(crate) struct SetArgs {
    /// Name
    name: String,
    /// Replicas of each logical group from now on
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    replicas: u32,
    #[command(flatten)]
    of: ClusterArgs,
}

/// Arguments of `ringbolt store pool rename`.
#[derive(Args)]
pub(crate) struct RenameArgs {
    /// Name
    name: String,
    /// Another name
    to: String,
    #[command(flatten)]
    of: ClusterArgs,
}

/// Arguments of `ringbolt store pool list`.
#[derive(Args)]
pub(crate) struct ListArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    of: ClusterArgs,
}

/// Arguments of `ringbolt store pool remove`.
#[derive(Args)]
pub(crate) struct RemoveArgs {
    /// Name
    name: String,
    #[command(flatten)]
    of: ClusterArgs,
}

pub(super) fn run(command: PoolCommand) -> Result<(), CommandError> {
    let open = |of: &ClusterArgs| ClusterLayout::open(&of.cluster, &of.etcd.options());
    match command {
        PoolCommand::Create(CreateArgs { name, replicas, groups, class, of }) => {
            layout::create_pool(&*open(&of)?.map, &name, groups, replicas, class.of_pool()).map(drop)
        }
        PoolCommand::Set(SetArgs { name, replicas, of }) => set_replicas(&open(&of)?, &name, replicas),
        PoolCommand::Rename(RenameArgs { name, to, of }) => {
            open(&of)?.map.rename_pool(&name, &to).map_err(CommandError::operation)
        }
        PoolCommand::List(ListArgs { json, of }) => list(&open(&of)?, json),
        PoolCommand::Remove(RemoveArgs { name, of }) => {
            open(&of)?.map.remove_pool(&name).map_err(CommandError::operation)
        }
    }
}

/// Nodes read the record, and make or remove replicas as for nodes that come and go.
fn set_replicas(layout: &ClusterLayout, name: &str, replicas: u32) -> Result<(), CommandError> {
    let map = &*layout.map;
    let position = map.position().map_err(CommandError::operation)?;
    if position.is_older() {
        return Err(CommandError::operation(layout::describe_older(&position)));
    }
    let known = map.pools().map_err(CommandError::operation)?.remove(name);
    let known = known.ok_or_else(|| CommandError::operation(format!("there is no pool {name}")))?;
    let to = PoolRecord { replicas, in_sync_min: layout::in_sync_min_of(replicas), ..known.clone() };
    let range = known.first_group..known.first_group + known.groups;
    let records = map.groups(range.clone()).map_err(CommandError::operation)?;
    let degraded = records.iter().find(|(_, record)| record.config.in_sync.len() < to.in_sync_min as usize);
    if let Some((group, record)) = degraded {
        return Err(CommandError::operation(format!(
            "group {} has {} replica in sync, and would need {}: wait until `ringbolt store status` is healthy",
            group.0,
            record.config.in_sync.len(),
            to.in_sync_min
        )));
    }
    let nodes = map.nodes().map_err(CommandError::operation)?;
    let devices = map.devices().map_err(CommandError::operation)?;
    let topology = Topology::new(&nodes, &devices);
    let place = |group: u32| {
        let placed = topology.place(GroupId(group), replicas as usize).into_iter();
        (GroupId(group), placed.map(|device| ReplicaId(devices[&device].node.0)).collect::<Vec<_>>())
    };
    let placed: Vec<_> = range.map(place).collect();
    if let Some((_, members)) = placed.iter().find(|(_, members)| members.len() < replicas as usize) {
        let reason = format!("{replicas} replicas need as many nodes, and {} are in", members.len());
        return Err(CommandError::usage(reason));
    }
    let is_new = |group: &GroupId, member: &ReplicaId| {
        records.get(group).is_none_or(|record| !record.replicas.contains(member))
    };
    let added = placed.iter().map(|(group, members)| {
        (*group, members.iter().copied().filter(|member| is_new(group, member)).collect::<Vec<_>>())
    });
    let added: Vec<_> = added.collect();
    if let Some(LackingNode { node, spare, wanted, .. }) = layout::lacking_node(map, &devices, &added)? {
        return Err(CommandError::operation(format!(
            "{replicas} replicas do not fit: node {node} has {spare} spare partitions, and would get {wanted} replicas. \
             `ringbolt store add-node --spare N` adds a node with as many partitions"
        )));
    }
    layout::warn_of_domains(&nodes, &placed);
    match map.change_pool(name, &known, &to).map_err(CommandError::operation)? {
        true => Ok(()),
        false => Err(CommandError::operation(MapError::Changed(format!("pool {name}")))),
    }
}

fn list(layout: &ClusterLayout, as_json: bool) -> Result<(), CommandError> {
    let pools = layout.map.pools().map_err(CommandError::operation)?;
    let images = layout.map.images().map_err(CommandError::operation)?;
    let describe = |(name, pool): (&String, &PoolRecord)| {
        json!({
            "name": name,
            "class": pool.class.name(),
            "replicas": pool.replicas,
            "in_sync_min": pool.in_sync_min,
            "groups": pool.groups,
            "first_group": pool.first_group,
            "images": images.keys().filter(|(of, _)| of == name).count(),
        })
    };
    let all: Vec<Value> = pools.iter().map(describe).collect();
    if as_json {
        stdout_line!("{:#}", Value::Array(all));
        return Ok(());
    }
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["pool", "class", "replicas", "needed in sync", "groups", "images"]);
    for pool in &all {
        let fields = ["name", "class", "replicas", "in_sync_min", "groups", "images"];
        table.add_row(fields.map(|field| pool[field].to_string().trim_matches('"').to_string()));
    }
    stdout_line!("{table}");
    Ok(())
}
