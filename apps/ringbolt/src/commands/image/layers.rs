//! What people read of snapshots and parents.

use std::time::{Duration, SystemTime};

use cluster_map::{ImageEntry, ImageSnapshot, Images, children_of, snapshot_of};
use serde_json::{Value, json};

/// A time as people read it.
pub(super) fn text_of(seconds: u64) -> String {
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
    time.map(|time| humantime::format_rfc3339_seconds(time).to_string()).unwrap_or_default()
}

/// The images that are clones of a snapshot.
pub(super) fn clones_of(
    images: &Images,
    pool: &str,
    image: &ImageEntry,
    snapshot: &ImageSnapshot,
) -> Vec<String> {
    let children = children_of(images, pool, snapshot.volume).into_iter();
    children.filter(|child| child.uuid != image.uuid).map(|child| child.image).collect()
}

/// The snapshots of an image.
pub(super) fn snapshots_json(images: &Images, pool: &str, image: &ImageEntry) -> Vec<Value> {
    let snapshots = image.layers.snapshots.iter().map(|snapshot| {
        json!({
            "name": snapshot.name,
            "size": snapshot.bytes,
            "created": text_of(snapshot.created),
            "protected": snapshot.protected,
            "volume": snapshot.volume,
            "clones": clones_of(images, pool, image, snapshot),
            "origin": snapshot.origin.map(|origin| origin.to_string()),
        })
    });
    snapshots.collect()
}

/// The snapshot of another image that an image is a clone of, `IMAGE@SNAPSHOT`.
pub(super) fn parent_of(images: &Images, pool: &str, image: &ImageEntry) -> Option<String> {
    // Below its own snapshots.
    let oldest = image.layers.snapshots.iter().map(|snapshot| snapshot.parent);
    let parents = [image.layers.parent].into_iter().chain(oldest).flatten();
    let is_own = |volume: u64| image.layers.snapshots.iter().any(|it| it.volume == volume);
    let foreign = parents.map(|parent| parent.volume).find(|volume| !is_own(*volume))?;
    let (name, snapshot) = snapshot_of(images, pool, foreign)?;
    Some(format!("{name}@{}", snapshot.name))
}
