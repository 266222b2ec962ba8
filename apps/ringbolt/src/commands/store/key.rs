//! `ringbolt store key`: the keys of clients with rights on some pools.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use cluster_map::{ClientKeyRecord, KeyName, PoolAccess};
use comfy_table::Table;
use serde_json::{Value, json};
use store_link::ClusterKey;

use super::arguments::ClusterArgs;
use super::layout::ClusterLayout;
use crate::command_error::CommandError;
use crate::console::stdout_line;

/// The subcommands of `ringbolt store key`.
#[derive(Subcommand)]
pub(crate) enum KeyCommand {
    /// Create the key of a client, which may use the images of some pools and nothing else
    #[command(after_help = "Examples:\n  ringbolt store key create vm7 --pool pool:rw --out vm7.key\n  \
        ringbolt store key create backup --pool pool:r --pool scratch:rw --out backup.key\n\n\
        The client's machine has the file as `key` in a directory that it names with --cluster or cluster=.")]
    Create(CreateKeyArgs),
    /// List the keys of clients and their rights
    #[command(after_help = "Example:\n  ringbolt store key list --json")]
    List(ListKeysArgs),
    /// Delete the key of a client: nodes end its connections, and take it no more
    #[command(after_help = "Example:\n  ringbolt store key delete vm7")]
    Delete(DeleteKeyArgs),
}

/// Arguments of `ringbolt store key create`.
#[derive(Args)]
pub(crate) struct CreateKeyArgs {
    /// Name: 1 to 32 letters, digits, `-`, `_` and `.`
    #[arg(value_parser = parse_name)]
    name: KeyName,
    /// A pool, and the right on it: r (read) or rw (read-write); repeat it for each pool
    #[arg(long = "pool", value_name = "POOL:RIGHT", required = true, value_parser = parse_grant)]
    pools: Vec<(String, PoolAccess)>,
    /// File to write the key to, which its owner alone can read
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    of: ClusterArgs,
}

/// Arguments of `ringbolt store key list`.
#[derive(Args)]
pub(crate) struct ListKeysArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    of: ClusterArgs,
}

/// Arguments of `ringbolt store key delete`.
#[derive(Args)]
pub(crate) struct DeleteKeyArgs {
    /// Name
    #[arg(value_parser = parse_name)]
    name: KeyName,
    #[command(flatten)]
    of: ClusterArgs,
}

fn parse_name(name: &str) -> Result<KeyName, String> {
    KeyName::new(name).ok_or_else(|| "a name is 1 to 32 letters, digits, `-`, `_` and `.`".to_string())
}

fn parse_grant(text: &str) -> Result<(String, PoolAccess), String> {
    let (pool, access) = text.rsplit_once(':').ok_or_else(|| "expected POOL:r or POOL:rw".to_string())?;
    Ok((pool.to_string(), access.parse()?))
}

pub(super) fn run(command: KeyCommand) -> Result<(), CommandError> {
    let open = |of: &ClusterArgs| ClusterLayout::open(&of.cluster, &of.etcd.options());
    match command {
        KeyCommand::Create(arguments) => create(&open(&arguments.of)?, arguments),
        KeyCommand::List(ListKeysArgs { json, of }) => list(&open(&of)?, json),
        KeyCommand::Delete(DeleteKeyArgs { name, of }) => {
            open(&of)?.map.remove_client_key(name).map_err(CommandError::operation)
        }
    }
}

fn create(layout: &ClusterLayout, arguments: CreateKeyArgs) -> Result<(), CommandError> {
    let CreateKeyArgs { name, pools, out, of: _ } = arguments;
    let mut rights = BTreeMap::new();
    for (pool, access) in pools {
        if rights.insert(pool.clone(), access).is_some() {
            return Err(CommandError::usage(format!("--pool {pool} is given twice")));
        }
    }
    let path = layout.directory.join("key");
    let key = ClusterKey::load(&path)
        .map_err(|error| CommandError::operation(format!("{}: {error}", path.display())))?;
    let cluster = layout.map.cluster().map_err(CommandError::operation)?;
    let record = ClientKeyRecord::new(rights);
    let key = key.client_key(name, &record.context(cluster));
    // The file first: a key in the map without a file has no use.
    key.save(&out).map_err(|error| CommandError::environment(format!("{}: {error}", out.display())))?;
    layout.map.create_client_key(name, &record).map_err(CommandError::operation).inspect_err(|_| {
        let _ = fs::remove_file(&out);
    })?;
    stdout_line!("the key {name} is in {}; nodes take it within a second", out.display());
    Ok(())
}

fn list(layout: &ClusterLayout, as_json: bool) -> Result<(), CommandError> {
    let keys = layout.map.client_keys().map_err(CommandError::operation)?;
    let rights = |record: &ClientKeyRecord| -> serde_json::Map<String, Value> {
        record.pools.iter().map(|(pool, access)| (pool.clone(), access.name().into())).collect()
    };
    if as_json {
        let all = keys.iter().map(|(name, record)| {
            json!({ "name": name.as_str(), "id": record.id.to_string(), "pools": rights(record) })
        });
        stdout_line!("{:#}", Value::Array(all.collect()));
        return Ok(());
    }
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["key", "rights"]);
    for (name, record) in &keys {
        let rights = record.pools.iter().map(|(pool, access)| format!("{pool}:{}", access.name()));
        table.add_row([name.to_string(), rights.collect::<Vec<_>>().join(" ")]);
    }
    stdout_line!("{table}");
    Ok(())
}
