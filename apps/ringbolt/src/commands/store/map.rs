//! `ringbolt store map`: copies of a cluster's map, and what to do with one that is older than what nodes
//! have seen.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use cluster_map::{KnownMap, MapBackup, MapError, MapPosition};
use serde_json::Value;

use super::arguments::ClusterArgs;
use super::layout::{ClusterLayout, describe_older};
use super::status::ASK_MAX;
use crate::command_error::CommandError;
use crate::commands::rpc;
use crate::console::stdout_line;

/// The subcommands of `ringbolt store map`.
#[derive(Subcommand)]
pub(crate) enum MapCommand {
    /// Write a copy of the map to a file
    #[command(after_help = "Example:\n  ringbolt store map backup map-monday.json")]
    Backup(BackupArgs),
    /// Put a copy of the map in its place; groups keep their records if these are newer
    #[command(after_help = "Examples:\n  ringbolt store map restore map-monday.json\n  \
        ringbolt store map restore map-monday.json --older\n\n\
        It is refused if nodes have seen a newer map than the copy: pools, images and nodes that were made since are not in it.")]
    Restore(RestoreArgs),
    /// Let a map count that is older than what nodes have seen
    #[command(after_help = "Example:\n  ringbolt store map accept")]
    Accept(AcceptArgs),
}

/// Arguments of `ringbolt store map backup`.
#[derive(Args)]
pub(crate) struct BackupArgs {
    /// File, which must not be there
    file: PathBuf,
    #[command(flatten)]
    of: ClusterArgs,
}

/// Arguments of `ringbolt store map restore`.
#[derive(Args)]
pub(crate) struct RestoreArgs {
    /// File that `backup` wrote
    file: PathBuf,
    /// Restore it although nodes have seen a newer map
    #[arg(long)]
    older: bool,
    #[command(flatten)]
    of: ClusterArgs,
}

/// Arguments of `ringbolt store map accept`.
#[derive(Args)]
pub(crate) struct AcceptArgs {
    #[command(flatten)]
    of: ClusterArgs,
}

pub(super) fn run(command: MapCommand) -> Result<(), CommandError> {
    match command {
        MapCommand::Backup(BackupArgs { file, of }) => {
            let layout = ClusterLayout::open(&of.cluster, &of.etcd.options())?;
            let position = layout.map.position().map_err(failed)?;
            if position.is_older() {
                return Err(CommandError::operation(describe_older(&position)));
            }
            let backup = layout.map.backup().map_err(failed)?;
            backup.save(&file).map_err(failed)?;
            stdout_line!("{}: the map at revision {}", file.display(), backup.revision);
            Ok(())
        }
        MapCommand::Restore(RestoreArgs { file, older, of }) => restore(&file, older, &of),
        MapCommand::Accept(AcceptArgs { of }) => accept(&of),
    }
}

fn failed(error: MapError) -> CommandError {
    CommandError::operation(error)
}

/// The highest revision that is known, and who has seen it.
fn known_revision(layout: &ClusterLayout, backup: &MapBackup) -> Result<(u64, String), CommandError> {
    let position = layout.map.position().map_err(failed)?;
    let lost = position.lost.filter(|lost| *lost != MapPosition::RESTORING);
    // A map that is lost was made anew, and is at its beginning.
    let of_map = (position.revision.max(lost.unwrap_or(0)), "the map".to_string());
    let mut all = vec![of_map];
    for node in &layout.nodes {
        let kept = KnownMap::revision_in(&layout.known_map(*node), backup.cluster).map_err(failed)?;
        let report = rpc::call(&layout.socket(*node), "store_node_get_status", Value::Null, ASK_MAX).ok();
        let reported = report.and_then(|report| report["map"]["known_revision"].as_u64());
        all.extend(kept.max(reported).map(|revision| (revision, format!("node {node}"))));
    }
    Ok(all.into_iter().max_by_key(|(revision, _)| *revision).expect("the map is one of them"))
}

fn restore(file: &std::path::Path, older: bool, of: &ClusterArgs) -> Result<(), CommandError> {
    let backup = MapBackup::load(file).map_err(failed)?;
    let layout = ClusterLayout::open_to_restore(&of.cluster, &of.etcd.options())?;
    let (known, by) = known_revision(&layout, &backup)?;
    if backup.revision < known && !older {
        return Err(CommandError::operation(format!(
            "{} has the map at revision {}, and {by} has seen revision {known}: what was made since would be unknown, pools, images and \
             nodes. Restore a newer copy, or this one with --older",
            file.display(),
            backup.revision
        )));
    }
    let position = layout.map.restore(&backup, known).map_err(failed)?;
    stdout_line!("the map is restored, and at revision {}", position.revision);
    Ok(())
}

fn accept(of: &ClusterArgs) -> Result<(), CommandError> {
    let layout = ClusterLayout::open(&of.cluster, &of.etcd.options())?;
    let before = layout.map.position().map_err(failed)?;
    if !before.is_older() {
        stdout_line!("the map is not older than what nodes have seen");
        return Ok(());
    }
    let position = layout.map.accept_older().map_err(failed)?;
    stdout_line!("the map counts as it is, and is at revision {}", position.revision);
    Ok(())
}
