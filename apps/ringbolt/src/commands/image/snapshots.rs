//! Snapshots of a cluster's images, clones of them, and images that need their parents no more.

use clap::{Args, Subcommand};
use serde_json::Value;

use super::cluster::{CopyProgress, open, run};
use super::layers::{clones_of, snapshots_json, text_of};
use super::owner::{ImageOwner, mib, print_table};
use crate::command_error::CommandError;
use crate::console::stdout_line;

/// The subcommands of `ringbolt image snapshot`.
#[derive(Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Make a snapshot: no data is copied
    #[command(after_help = "Example:\n  ringbolt image snapshot create --cluster ringbolt-store vol@monday")]
    Create {
        /// Make it although a server has the image attached, whose requests fail from then on
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        snapshot: NamedSnapshot,
    },
    /// List the snapshots of an image, the oldest first
    #[command(after_help = "Example:\n  ringbolt image snapshot list --cluster ringbolt-store vol --json")]
    List {
        /// Name of the image
        name: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        of: ImageOwner,
    },
    /// Remove a snapshot without clones; what the image has from it stays
    #[command(
        after_help = "Example:\n  ringbolt image snapshot remove --cluster ringbolt-store vol@monday\n\n\
        What the next snapshot, or the image, has from this one is copied to it first, which takes as long as \
        that is large; close what reads the image or a later snapshot (read_only=true) before. A command that \
        was interrupted is repeated."
    )]
    Remove {
        /// Remove it although a server has the image attached, whose requests fail from then on
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        snapshot: NamedSnapshot,
    },
    /// Take an image back to a snapshot; what was written since is gone
    #[command(
        after_help = "Example:\n  ringbolt image snapshot rollback --cluster ringbolt-store vol@monday\n\n\
        No data is copied. The image has the size of the snapshot afterwards. Later snapshots stay."
    )]
    Rollback {
        /// Go back although a server has the image attached, whose requests fail from then on
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        snapshot: NamedSnapshot,
    },
    /// Protect a snapshot: it cannot be removed
    #[command(after_help = "Example:\n  ringbolt image snapshot protect --cluster ringbolt-store vol@monday")]
    Protect {
        #[command(flatten)]
        snapshot: NamedSnapshot,
    },
    /// End the protection of a snapshot
    #[command(
        after_help = "Example:\n  ringbolt image snapshot unprotect --cluster ringbolt-store vol@monday"
    )]
    Unprotect {
        #[command(flatten)]
        snapshot: NamedSnapshot,
    },
}

/// A snapshot.
#[derive(Args)]
pub(crate) struct NamedSnapshot {
    /// Image and snapshot, as vol@monday
    #[arg(value_name = "IMAGE@SNAPSHOT", value_parser = parse_snapshot)]
    name: (String, String),
    #[command(flatten)]
    of: ImageOwner,
}

/// Arguments of `ringbolt image clone`.
#[derive(Args)]
pub(crate) struct CloneArgs {
    /// Image and snapshot, as vol@monday
    #[arg(value_name = "IMAGE@SNAPSHOT", value_parser = parse_snapshot)]
    snapshot: (String, String),
    /// Name of the clone; no image may have it
    to: String,
    #[command(flatten)]
    pub(super) of: ImageOwner,
}

/// Splits `IMAGE@SNAPSHOT`.
pub(super) fn parse_snapshot(text: &str) -> Result<(String, String), String> {
    match text.rsplit_once('@') {
        Some((image, snapshot)) if !image.is_empty() && !snapshot.is_empty() => {
            Ok((image.to_string(), snapshot.to_string()))
        }
        _ => Err("expected an image and a snapshot, as vol@monday".to_string()),
    }
}

impl SnapshotCommand {
    pub(super) fn owner(&self) -> &ImageOwner {
        match self {
            SnapshotCommand::List { of, .. } => of,
            SnapshotCommand::Create { snapshot, .. }
            | SnapshotCommand::Remove { snapshot, .. }
            | SnapshotCommand::Rollback { snapshot, .. }
            | SnapshotCommand::Protect { snapshot }
            | SnapshotCommand::Unprotect { snapshot } => &snapshot.of,
        }
    }
}

/// Runs a subcommand of `ringbolt image snapshot`.
pub(super) fn run_snapshot(command: SnapshotCommand) -> Result<(), CommandError> {
    match command {
        SnapshotCommand::List { name, json, of } => list(&of, &name, json),
        SnapshotCommand::Create { force, snapshot } => create(&snapshot, force),
        SnapshotCommand::Remove { force, snapshot } => remove(&snapshot, force),
        SnapshotCommand::Rollback { force, snapshot } => rollback(&snapshot, force),
        SnapshotCommand::Protect { snapshot } => protect(&snapshot, true),
        SnapshotCommand::Unprotect { snapshot } => protect(&snapshot, false),
    }
}

fn create(named: &NamedSnapshot, force: bool) -> Result<(), CommandError> {
    let (cluster, pool) = (open(&named.of)?, named.of.pool.clone());
    let (image, snapshot) = named.name.clone();
    let uri = format!("store:{pool}/{image}@{snapshot}");
    run(move |core| async move {
        store_client::create_snapshot(&core, &cluster, (&pool, &image), &snapshot, force).await
    })?;
    stdout_line!("{uri}");
    Ok(())
}

fn remove(named: &NamedSnapshot, force: bool) -> Result<(), CommandError> {
    let (cluster, pool) = (open(&named.of)?, named.of.pool.clone());
    let (image, snapshot) = named.name.clone();
    let progress = CopyProgress::new(format!("{pool}/{image}@{snapshot}"));
    run(move |core| async move {
        let progress = move |copied, objects| progress.update(copied, objects);
        store_client::remove_snapshot(&core, &cluster, (&pool, &image), &snapshot, force, progress).await
    })
}

fn rollback(named: &NamedSnapshot, force: bool) -> Result<(), CommandError> {
    let (cluster, pool) = (open(&named.of)?, named.of.pool.clone());
    let (image, snapshot) = named.name.clone();
    run(move |core| async move {
        store_client::rollback_image(&core, &cluster, (&pool, &image), &snapshot, force).await
    })
}

fn protect(named: &NamedSnapshot, protected: bool) -> Result<(), CommandError> {
    let (image, snapshot) = &named.name;
    let cluster = open(&named.of)?;
    store_client::protect_snapshot(&cluster, (&named.of.pool, image), snapshot, protected)
        .map_err(CommandError::operation)
}

/// Makes a clone, and prints how clients name it.
pub(super) fn clone(options: &CloneArgs) -> Result<(), CommandError> {
    let (image, snapshot) = &options.snapshot;
    let pool = &options.of.pool;
    store_client::clone_snapshot(&open(&options.of)?, pool, (image, snapshot), &options.to)
        .map_err(CommandError::operation)?;
    stdout_line!("store:{pool}/{}", options.to);
    Ok(())
}

/// Copies to an image what it has from its parents.
pub(super) fn flatten(of: &ImageOwner, name: &str, force: bool) -> Result<(), CommandError> {
    let (cluster, pool, name) = (open(of)?, of.pool.clone(), name.to_string());
    let progress = CopyProgress::new(format!("{pool}/{name}"));
    run(move |core| async move {
        let progress = move |copied, objects| progress.update(copied, objects);
        store_client::flatten_image(&core, &cluster, (&pool, &name), force, progress).await
    })
}

fn list(of: &ImageOwner, name: &str, as_json: bool) -> Result<(), CommandError> {
    let cluster = open(of)?;
    let image = cluster.image(&of.pool, name).map_err(CommandError::operation)?;
    let images = cluster.map().images().map_err(CommandError::operation)?;
    if as_json {
        stdout_line!("{:#}", Value::Array(snapshots_json(&images, &of.pool, &image)));
        return Ok(());
    }
    let rows = image.layers.snapshots.iter().map(|snapshot| {
        let protected = if snapshot.protected { "yes" } else { "no" };
        let clones = clones_of(&images, &of.pool, &image, snapshot).join(", ");
        let name = format!("{}/{name}@{}", of.pool, snapshot.name);
        [name, mib(snapshot.bytes), text_of(snapshot.created), protected.to_string(), clones]
    });
    print_table(["snapshot", "MiB", "made", "protected", "clones"], rows);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_named_by_its_image_and_its_name() {
        let names = |text: &str| parse_snapshot(text).ok();
        assert_eq!(names("vol@monday"), Some(("vol".to_string(), "monday".to_string())));
        // An image of an earlier release may have such a name.
        assert_eq!(names("a@b@c"), Some(("a@b".to_string(), "c".to_string())));
        assert_eq!([names("vol"), names("@a"), names("vol@"), names("")], [None, None, None, None]);
    }
}
