//! Snapshots of images, clones of snapshots, and images that go back to a snapshot.
//!
//! Each is one change of the record of an image in the map. The image is attached meanwhile, and all groups
//! refuse what others have in flight, before its head becomes a snapshot: a volume with children never
//! changes. Volumes that are not part of an image any more are in its record until they are empty.

use std::time::{Duration, Instant, SystemTime};

use cluster_map::{
    ChildVolume, ImageEntry, ImageLayers, ImageSnapshot, Images, LAYERS_MAX, MapError, ParentVolume,
    SNAPSHOTS_MAX, SnapshotRequest, TrashedImage, check_snapshot_name, children_of, parents_of,
    random_volume,
};
use reactor::Core;
use uuid::Uuid;

use crate::cluster::check_whole;
use crate::layers::pull;
use crate::reclaim::{Emptied, ReclaimError, empty_dropped};
use crate::trash::{TRASH, TrashEntry, restore_image};
use crate::{ClientError, Cluster, check_plain_name};

/// A client that has an image attached has this time to make a snapshot.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Attempts to change a record that others change at the same time.
const ATTEMPTS_MAX: usize = 32;

fn invalid(reason: String) -> ClientError {
    MapError::Invalid(reason).into()
}

fn changed(pool: &str, image: &str) -> ClientError {
    ClientError::Changed { pool: pool.to_string(), image: image.to_string() }
}

pub(crate) fn seconds_since_1970() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Changes the record of an image that is still what was read.
fn change(
    cluster: &Cluster,
    (pool, name): (&str, &str),
    known: &ImageEntry,
    to: &ImageEntry,
) -> Result<(), ClientError> {
    match cluster.map().change_image(pool, name, known, to)? {
        true => Ok(()),
        false => Err(changed(pool, name)),
    }
}

/// An image with one of its snapshots.
struct KnownSnapshot {
    images: Images,
    image: ImageEntry,
    snapshot: ImageSnapshot,
}

fn find(cluster: &Cluster, pool: &str, image: &str, snapshot: &str) -> Result<KnownSnapshot, ClientError> {
    let entry = cluster.image(pool, image)?;
    let found = entry.layers.snapshot(snapshot).cloned();
    let found = found.ok_or_else(|| ClientError::NoSnapshot {
        pool: pool.to_string(),
        image: image.to_string(),
        snapshot: snapshot.to_string(),
    })?;
    Ok(KnownSnapshot { images: cluster.map().images()?, image: entry, snapshot: found })
}

/// Refuses a snapshot that cannot be made.
pub(crate) fn check_new(
    images: &Images,
    pool: &str,
    name: &str,
    image: &ImageEntry,
) -> Result<(), ClientError> {
    check_whole(pool, name, image)?;
    check_limits(images, pool, name, image)
}

/// Refuses one more snapshot than an image may have.
pub(crate) fn check_limits(
    images: &Images,
    pool: &str,
    name: &str,
    image: &ImageEntry,
) -> Result<(), ClientError> {
    if image.cut_from.is_some() {
        let reason = "what was cut off is not removed yet: `ringbolt image resize` ends that first";
        return Err(invalid(format!("image {pool}/{name}: {reason}")));
    }
    if image.layers.snapshots.len() >= SNAPSHOTS_MAX {
        return Err(invalid(format!(
            "image {pool}/{name} has {SNAPSHOTS_MAX} snapshots, the most that it may have"
        )));
    }
    let parents = parents_of(images, pool, image.layers.parent)?;
    if parents.len() >= LAYERS_MAX {
        return Err(invalid(format!(
            "image {pool}/{name} has {LAYERS_MAX} volumes below each other, the most that it may have: \
             remove snapshots, or `ringbolt image flatten` it"
        )));
    }
    Ok(())
}

/// Makes a snapshot of an image. It has every write that was completed before, and no write that began after
/// another one was completed without that. A client that has the image attached makes it, unless it is fenced
/// with `force`.
///
/// # Errors
/// [`MapError::Exists`], [`MapError::Invalid`]; [`ClientError::InUse`] if several clients have the image, and
/// [`ClientError::Unanswered`] if the one that has it does not make the snapshot; [`ClientError::Changed`];
/// [`ReclaimError::Unlisted`] if a group does not answer.
pub async fn create_snapshot(
    core: &Core,
    cluster: &Cluster,
    (pool, name): (&str, &str),
    snapshot: &str,
    force: bool,
) -> Result<(), ReclaimError> {
    check_snapshot_name(snapshot).map_err(ClientError::Map)?;
    let image = cluster.image(pool, name)?;
    if image.layers.snapshot(snapshot).is_some() {
        return Err(ClientError::Map(MapError::Exists(format!("snapshot {pool}/{name}@{snapshot}"))).into());
    }
    check_new(&cluster.map().images().map_err(ClientError::Map)?, pool, name, &image)?;
    let held = match Emptied::new(cluster, pool, name, &image, force) {
        Err(in_use @ ClientError::InUse { .. }) => {
            return Ok(ask_holder(cluster, (pool, name), snapshot, &image, in_use)?);
        }
        held => held?,
    };
    let made = async {
        held.fence(core, image.volume).await?;
        let to = image.with_snapshot(snapshot, seconds_since_1970(), random_volume());
        Ok(change(cluster, (pool, name), &image, &to)?)
    };
    let made = made.await;
    held.detach();
    made
}

/// Has the client that has an image attached make a snapshot.
fn ask_holder(
    cluster: &Cluster,
    (pool, name): (&str, &str),
    snapshot: &str,
    image: &ImageEntry,
    in_use: ClientError,
) -> Result<(), ClientError> {
    let map = cluster.map();
    let lock = map.image_lock(pool, image.volume)?.unwrap_or_default();
    let [holder] = &lock.holders[..] else { return Err(in_use) };
    if holder.shared {
        return Err(in_use);
    }
    let unanswered = || ClientError::Unanswered {
        pool: pool.to_string(),
        image: name.to_string(),
        holder: holder.name.clone(),
        process: holder.process,
        address: holder.address.clone(),
    };
    let mut changes = map.changes();
    let id = Uuid::new_v4();
    let mut asked = image.clone();
    asked.layers.request = Some(SnapshotRequest { id, name: snapshot.to_string() });
    change(cluster, (pool, name), image, &asked)?;
    let started = Instant::now();
    loop {
        let entry = cluster.image(pool, name)?;
        if entry.layers.snapshot(snapshot).is_some_and(|made| made.volume == image.volume) {
            return Ok(());
        }
        if entry.layers.request.as_ref().is_none_or(|request| request.id != id) {
            return Err(changed(pool, name));
        }
        let left = ANSWER_MAX.saturating_sub(started.elapsed());
        if left.is_zero() {
            let mut withdrawn = entry.clone();
            withdrawn.layers.request = None;
            if map.change_image(pool, name, &entry, &withdrawn)? {
                return Err(unanswered());
            }
        } else if changes.wait(left).is_err() {
            std::thread::sleep(changes.retry_after().min(left));
        }
    }
}

/// Protects a snapshot from being removed, or ends that.
///
/// # Errors
/// [`ClientError::NoSnapshot`], [`ClientError::Changed`].
pub fn protect_snapshot(
    cluster: &Cluster,
    (pool, name): (&str, &str),
    snapshot: &str,
    protected: bool,
) -> Result<(), ClientError> {
    let KnownSnapshot { image, snapshot, .. } = find(cluster, pool, name, snapshot)?;
    let mut to = image.clone();
    let of_name = to.layers.snapshots.iter_mut().filter(|it| it.volume == snapshot.volume);
    of_name.for_each(|it| it.protected = protected);
    change(cluster, (pool, name), &image, &to)
}

/// Takes an image back to one of its snapshots. What was written since is removed.
///
/// # Errors
/// [`MapError::Protected`], [`ClientError::NoSnapshot`]; [`ClientError::InUse`] without `force`.
pub async fn rollback_image(
    core: &Core,
    cluster: &Cluster,
    (pool, name): (&str, &str),
    snapshot: &str,
    force: bool,
) -> Result<(), ReclaimError> {
    let KnownSnapshot { image, snapshot, .. } = find(cluster, pool, name, snapshot)?;
    // It loses what it has.
    image.check_unprotected(pool, name).map_err(ClientError::Map)?;
    let held = Emptied::new(cluster, pool, name, &image, force)?;
    let rolled = change(cluster, (pool, name), &image, &image.rolled_back(&snapshot, random_volume()));
    held.detach();
    rolled?;
    empty_dropped(core, cluster, pool, name).await
}

/// Makes an image that has what a snapshot has, and is written apart from it.
///
/// # Errors
/// [`ClientError::NoSnapshot`]; [`MapError::Exists`] if an image has the name.
pub fn clone_snapshot(
    cluster: &Cluster,
    pool: &str,
    (image, snapshot): (&str, &str),
    to: &str,
) -> Result<(), ClientError> {
    check_plain_name(to)?;
    let KnownSnapshot { images, snapshot, .. } = find(cluster, pool, image, snapshot)?;
    if images.contains_key(&(pool.to_string(), to.to_string())) {
        return Err(MapError::Exists(format!("image {pool}/{to}")).into());
    }
    if parents_of(&images, pool, snapshot.parent)?.len() + 1 >= LAYERS_MAX {
        return Err(invalid(format!(
            "snapshot {pool}/{image}@{} has {LAYERS_MAX} volumes below each other, the most that a clone may \
             have",
            snapshot.name
        )));
    }
    // Until it is whole it is in the trash, where the next `image purge --expired` finds it.
    let map = cluster.map();
    let map_name = format!("{TRASH}clone.{}", Uuid::new_v4().simple());
    let created = map.create_image(pool, &map_name, snapshot.bytes)?;
    let trashed = TrashedImage { name: format!("{to} (unfinished clone)"), until: seconds_since_1970() };
    let parent = Some(ParentVolume { volume: snapshot.volume, bytes: snapshot.bytes });
    let layers = ImageLayers { parent, ..ImageLayers::default() };
    let clone = ImageEntry { trashed: Some(trashed.clone()), layers, ..created.clone() };
    let made = change(cluster, (pool, &map_name), &created, &clone)
        .and_then(|()| count_clone(cluster, pool, image, &snapshot))
        .and_then(|()| {
            let entry = TrashEntry {
                pool: pool.to_string(),
                map_name: map_name.clone(),
                trashed,
                image: clone.clone(),
            };
            restore_image(cluster, &entry, to)
        });
    if made.is_err() {
        // It has no objects. What cannot be removed now is found in the trash.
        let removed =
            map.remove_image(pool, &map_name, None).and_then(|removed| map.image_is_empty(&removed));
        if let Err(error) = removed {
            log::warn!("an unfinished clone of pool {pool} stays in the trash: {error}");
        }
    }
    made
}

/// Has a removal of the snapshot that is under way see that there is a clone.
fn count_clone(cluster: &Cluster, pool: &str, image: &str, of: &ImageSnapshot) -> Result<(), ClientError> {
    for _ in 0..ATTEMPTS_MAX {
        let KnownSnapshot { image: entry, snapshot, .. } = find(cluster, pool, image, &of.name)?;
        if snapshot.volume != of.volume {
            return Err(changed(pool, image));
        }
        let mut to = entry.clone();
        to.layers.clones += 1;
        if cluster.map().change_image(pool, image, &entry, &to)? {
            return Ok(());
        }
    }
    Err(changed(pool, image))
}

/// What a snapshot's volume is to be merged into before it is removed: a child of the same image.
fn only_child(found: &KnownSnapshot, pool: &str, name: &str) -> Result<Option<ChildVolume>, ClientError> {
    let KnownSnapshot { images, image, snapshot } = found;
    let label = |child: &ChildVolume| match &child.snapshot {
        Some(snapshot) => format!("{pool}/{}@{snapshot}", child.image),
        None => format!("{pool}/{}", child.image),
    };
    let mut own = Vec::new();
    // Of the clones of later snapshots too: those who read them know which volumes these consist of.
    let mut clones = Vec::new();
    let mut above = vec![snapshot.volume];
    while let Some(volume) = above.pop() {
        for child in children_of(images, pool, volume) {
            if child.uuid != image.uuid {
                clones.push(label(&child));
                continue;
            }
            if let Some(of) = child.snapshot.as_ref().and_then(|name| image.layers.snapshot(name)) {
                above.push(of.volume);
            }
            if volume == snapshot.volume {
                own.push(child);
            }
        }
    }
    if !clones.is_empty() {
        let clones = clones.join(", ");
        return Err(invalid(format!(
            "snapshot {pool}/{name}@{} has clones: {clones}; remove them, or `ringbolt image flatten` them \
             first",
            snapshot.name
        )));
    }
    if own.len() > 1 {
        let children = own.iter().map(label).collect::<Vec<_>>().join(", ");
        return Err(invalid(format!(
            "snapshot {pool}/{name}@{} has what {children} have in common: remove all of these snapshots but \
             one first",
            snapshot.name
        )));
    }
    Ok(own.pop())
}

/// Removes a snapshot of an image that no other client has attached. What the next volume has from it is
/// copied to that first. `progress` gets the objects that are copied, and how many there are.
///
/// # Errors
/// [`MapError::ProtectedSnapshot`]; [`MapError::Invalid`] if it has clones or several children;
/// [`ClientError::InUse`] if another client has the image, without `force`.
pub async fn remove_snapshot(
    core: &Core,
    cluster: &Cluster,
    (pool, name): (&str, &str),
    snapshot: &str,
    force: bool,
    progress: impl FnMut(u64, u64),
) -> Result<(), ReclaimError> {
    let found = find(cluster, pool, name, snapshot)?;
    if found.snapshot.protected {
        return Err(ClientError::Map(MapError::ProtectedSnapshot(format!("{pool}/{name}@{snapshot}"))).into());
    }
    check_whole(pool, name, &found.image)?;
    let child = only_child(&found, pool, name)?;
    let KnownSnapshot { image, snapshot, .. } = found;
    let held = Emptied::new(cluster, pool, name, &image, force)?;
    let removed = async {
        held.fence(core, image.volume).await?;
        if let Some(child) = child {
            merge(core, cluster, (pool, name), (&image, &snapshot), &child, &held, progress).await?;
        }
        Ok::<_, ReclaimError>(change(cluster, (pool, name), &image, &image.without_snapshot(&snapshot))?)
    };
    let removed = removed.await;
    held.detach();
    removed?;
    empty_dropped(core, cluster, pool, name).await
}

/// Copies to the volume of a child what it has from a snapshot.
async fn merge(
    core: &Core,
    cluster: &Cluster,
    (pool, name): (&str, &str),
    (image, snapshot): (&ImageEntry, &ImageSnapshot),
    child: &ChildVolume,
    held: &Emptied,
    progress: impl FnMut(u64, u64),
) -> Result<(), ReclaimError> {
    let of_child = child.snapshot.as_ref().and_then(|name| image.layers.snapshot(name));
    let (volume, parent) = match of_child {
        Some(child) => (child.volume, child.parent),
        None => (image.volume, image.layers.parent),
    };
    let Some(parent) = parent.filter(|parent| parent.volume == snapshot.volume) else {
        return Err(changed(pool, name).into());
    };
    if of_child.is_none() {
        let io = (held.watch.clone(), held.attachment.state.clone());
        return pull(core, io, volume, &[parent], progress).await;
    }
    // The volume of a snapshot is written for this alone, by who has its lock.
    let entry = ImageEntry::new(image.uuid, volume, image.bytes);
    let own = Emptied::new(cluster, pool, &format!("{name} (volume {volume})"), &entry, false)?;
    let io = (own.watch.clone(), own.attachment.state.clone());
    let pulled = pull(core, io, volume, &[parent], progress).await;
    own.detach();
    pulled
}

/// Copies to an image what it has from its parents, so that it needs no snapshot of another image. Its own
/// snapshots keep their parents.
///
/// # Errors
/// [`ClientError::InUse`] if another client has the image, without `force`; what was copied is not copied
/// again.
pub async fn flatten_image(
    core: &Core,
    cluster: &Cluster,
    (pool, name): (&str, &str),
    force: bool,
    progress: impl FnMut(u64, u64),
) -> Result<(), ReclaimError> {
    let image = cluster.image(pool, name)?;
    check_whole(pool, name, &image)?;
    let images = cluster.map().images().map_err(ClientError::Map)?;
    let parents = parents_of(&images, pool, image.layers.parent).map_err(ClientError::Map)?;
    if parents.is_empty() {
        return Ok(());
    }
    let held = Emptied::new(cluster, pool, name, &image, force)?;
    let flattened = async {
        held.fence(core, image.volume).await?;
        let io = (held.watch.clone(), held.attachment.state.clone());
        pull(core, io, image.volume, &parents, progress).await?;
        let layers = ImageLayers { parent: None, ..image.layers.clone() };
        Ok::<_, ReclaimError>(change(cluster, (pool, name), &image, &ImageEntry { layers, ..image.clone() })?)
    };
    let flattened = flattened.await;
    held.detach();
    flattened
}
