//! Names and the trash of a cluster's images.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use store_client::{Cluster, TrashEntry};

use super::cluster::{RemovalProgress, open, run};
use super::owner::{ImageOwner, mib, print_table};
use crate::command_error::CommandError;
use crate::console::{stderr_line, stdout_line};

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A time as people read it.
fn text_of(seconds: u64) -> String {
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
    time.map(|time| humantime::format_rfc3339_seconds(time).to_string()).unwrap_or_default()
}

/// Gives an image another name.
pub(super) fn rename(of: &ImageOwner, name: &str, to: &str) -> Result<(), CommandError> {
    store_client::rename_image(&open(of)?, &of.pool, name, to).map_err(CommandError::operation)
}

/// Puts an image into the trash.
pub(super) fn remove(of: &ImageOwner, name: &str, keep_ns: u64, force: bool) -> Result<(), CommandError> {
    let until = now().saturating_add(keep_ns / 1_000_000_000);
    store_client::trash_image(&open(of)?, &of.pool, name, until, force).map_err(CommandError::operation)
}

/// Lists what is in the trash of all pools.
pub(super) fn list(of: &ImageOwner, as_json: bool) -> Result<(), CommandError> {
    let trash = store_client::trash(&open(of)?).map_err(CommandError::operation)?;
    if as_json {
        let all = trash.iter().map(|entry| {
            json!({
                "pool": entry.pool,
                "name": entry.trashed.name,
                "size": entry.image.bytes,
                "uuid": entry.image.uuid.to_string(),
                "volume": entry.image.volume,
                "kept_until": text_of(entry.trashed.until),
            })
        });
        stdout_line!("{:#}", Value::Array(all.collect()));
        return Ok(());
    }
    let rows = trash.iter().map(|entry| {
        let TrashEntry { pool, trashed, image, .. } = entry;
        let name = format!("{pool}/{}", trashed.name);
        [name, mib(image.bytes), text_of(trashed.until), image.volume.to_string()]
    });
    print_table(["image", "MiB", "kept until", "volume"], rows);
    Ok(())
}

/// Takes an image out of the trash.
pub(super) fn restore(
    of: &ImageOwner,
    name: &str,
    volume: Option<u64>,
    to: Option<&str>,
) -> Result<(), CommandError> {
    let cluster = open(of)?;
    let entry = store_client::trashed_image(&cluster, &of.pool, name, volume);
    let entry = entry.map_err(CommandError::operation)?;
    let to = to.unwrap_or(name);
    store_client::restore_image(&cluster, &entry, to).map_err(|error| match error {
        store_client::ClientError::Map(error @ cluster_map::MapError::Exists(_)) => {
            CommandError::operation(format!("{error}: give it another name with --as"))
        }
        error => CommandError::operation(error),
    })?;
    stdout_line!("store:{}/{to}", of.pool);
    Ok(())
}

/// Removes an image that is in the trash, or, without a name, all whose time is over.
pub(super) fn purge(
    of: &ImageOwner,
    name: Option<&str>,
    volume: Option<u64>,
    force: bool,
) -> Result<(), CommandError> {
    let cluster = open(of)?;
    let Some(name) = name else {
        let mut expired = store_client::trash(&cluster).map_err(CommandError::operation)?;
        expired.retain(|entry| entry.trashed.until <= now());
        // One that cannot be removed now keeps no other.
        let mut failed = Ok(());
        for entry in &expired {
            let TrashEntry { pool, trashed, .. } = entry;
            match purge_one(&cluster, entry) {
                Ok(()) => stdout_line!("{pool}/{} is removed", trashed.name),
                Err(error) => {
                    stderr_line!("ringbolt: {pool}/{} is not removed: {error}", trashed.name);
                    failed = Err(CommandError::operation("some images in the trash are not removed"));
                }
            }
        }
        return failed;
    };
    let entry = store_client::trashed_image(&cluster, &of.pool, name, volume);
    let entry = entry.map_err(CommandError::operation)?;
    if entry.trashed.until > now() && !force {
        let until = text_of(entry.trashed.until);
        return Err(CommandError::operation(format!(
            "{}/{name} is kept until {until}: --force removes it now",
            of.pool
        )));
    }
    purge_one(&cluster, &entry)
}

fn purge_one(cluster: &Cluster, entry: &TrashEntry) -> Result<(), CommandError> {
    let (cluster, entry) = (cluster.clone(), entry.clone());
    let progress = RemovalProgress::new(format!("{}/{}", entry.pool, entry.trashed.name));
    run(move |core| async move {
        let progress = move |removed, known| progress.update(removed, known);
        store_client::purge_image(&core, &cluster, &entry, progress).await
    })
    .map(drop)
}
