//! `ringbolt store pool`: the pools of a cluster.

use clap::{Args, Subcommand, ValueEnum};
use cluster_map::PoolClass;
use comfy_table::Table;
use serde_json::{Value, json};

use super::ClusterArgs;
use super::layout::{self, ClusterLayout};
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
    /// The device's cache of every replica in sync has it; a group's data is lost if the machines of all lose their power
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
        PoolCommand::List(ListArgs { json, of }) => list(&open(&of)?, json),
        PoolCommand::Remove(RemoveArgs { name, of }) => {
            open(&of)?.map.remove_pool(&name).map_err(CommandError::operation)
        }
    }
}

fn list(layout: &ClusterLayout, as_json: bool) -> Result<(), CommandError> {
    let pools = layout.map.pools().map_err(CommandError::operation)?;
    let images = layout.map.images().map_err(CommandError::operation)?;
    let describe = |(name, pool): (&String, &cluster_map::PoolRecord)| {
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
