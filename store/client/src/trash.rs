//! The trash of a cluster: images that are removed later, and can be had back until then.
//!
//! An image in the trash is an image whose record says so, under a name that no client opens. Programs of
//! older releases see an image with a strange name, and remove nothing of it.

use cluster_map::{ImageEntry, MapError, TrashedImage, check_image_name};
use reactor::Core;

use crate::cluster::check_whole;
use crate::reclaim::{Emptied, ReclaimError, check_no_snapshots, empty};
use crate::{ClientError, Cluster};

/// An image in the trash, with its pool and the name that it has there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrashEntry {
    /// Its pool.
    pub pool: String,
    /// Its name in the map.
    pub map_name: String,
    /// The name that it had, and until when it is kept.
    pub trashed: TrashedImage,
    /// Its record.
    pub image: ImageEntry,
}

/// Gives an image another name. Who has it attached keeps it.
///
/// # Errors
/// There is no such image; [`MapError::Exists`].
pub fn rename_image(cluster: &Cluster, pool: &str, name: &str, to: &str) -> Result<(), ClientError> {
    let image = cluster.image(pool, name)?;
    check_plain_name(to)?;
    Ok(cluster.map().rename_image(pool, name, to, Some(&image))?)
}

/// Puts an image into the trash, to be kept there until a time, in seconds since 1970.
///
/// # Errors
/// [`MapError::Protected`]; [`ClientError::InUse`] if another one has the image attached, without `force`;
/// [`ClientError::Changed`] if another one changes it at the same time.
pub fn trash_image(
    cluster: &Cluster,
    pool: &str,
    name: &str,
    until: u64,
    force: bool,
) -> Result<(), ClientError> {
    let image = cluster.image(pool, name)?;
    image.check_unprotected(pool, name)?;
    check_no_snapshots(&image, pool, name)?;
    if !image.layers.dropped.is_empty() {
        let reason =
            "what a rollback or a snapshot has left is not removed yet: `ringbolt store reclaim` first";
        return Err(MapError::Invalid(format!("image {pool}/{name}: {reason}")).into());
    }
    // Those that have it lose it, in every group.
    let emptied = Emptied::new(cluster, pool, name, &image, force)?;
    let trashed = TrashedImage { name: name.to_string(), until };
    let to = ImageEntry { trashed: Some(trashed), ..image.clone() };
    let moved = match cluster.map().change_image(pool, name, &image, &to) {
        Ok(true) => {
            cluster.map().rename_image(pool, name, &map_name(&image), Some(&to)).map_err(ClientError::Map)
        }
        Ok(false) => Err(ClientError::Changed { pool: pool.to_string(), image: name.to_string() }),
        Err(error) => Err(error.into()),
    };
    emptied.detach();
    moved
}

/// The images in the trash, those that are kept the shortest time first.
///
/// # Errors
/// [`ClientError::Map`].
pub fn trash(cluster: &Cluster) -> Result<Vec<TrashEntry>, ClientError> {
    let images = cluster.map().images()?.into_iter();
    let mut all: Vec<TrashEntry> =
        images.filter_map(|((pool, map_name), image)| trash_entry(pool, map_name, image)).collect();
    all.sort_by_key(|entry| entry.trashed.until);
    Ok(all)
}

/// The entry of an image, if it is in the trash. A clone or a copy is named as one when it is created, and
/// its record says so with the next change: if its maker ends between the two, it is in the trash all the
/// same.
fn trash_entry(pool: String, map_name: String, image: ImageEntry) -> Option<TrashEntry> {
    let unfinished = || {
        let name = map_name.strip_prefix(TRASH)?;
        Some(TrashedImage { name: format!("{name} (unfinished)"), until: 0 })
    };
    let trashed = image.trashed.clone().or_else(unfinished)?;
    Some(TrashEntry { pool, map_name, trashed, image })
}

/// Takes an image out of the trash, under a name that no other one has.
///
/// # Errors
/// [`MapError::Exists`]; [`ClientError::Changed`] if another one changes it at the same time.
pub fn restore_image(cluster: &Cluster, entry: &TrashEntry, name: &str) -> Result<(), ClientError> {
    let pool = &entry.pool;
    check_plain_name(name)?;
    check_whole(pool, &entry.trashed.name, &entry.image)?;
    // Without a name of its own first: two images never have one name.
    if entry.map_name != name {
        cluster.map().rename_image(pool, &entry.map_name, name, Some(&entry.image))?;
    }
    let to = ImageEntry { trashed: None, ..entry.image.clone() };
    match cluster.map().change_image(pool, name, &entry.image, &to)? {
        true => Ok(()),
        false => Err(ClientError::Changed { pool: pool.clone(), image: name.to_string() }),
    }
}

/// Removes an image that is in the trash, with its data. Returns how many objects it had.
///
/// # Errors
/// As [`remove_image`](crate::remove_image).
pub async fn purge_image(
    core: &Core,
    cluster: &Cluster,
    entry: &TrashEntry,
    progress: impl FnMut(u64, u64),
) -> Result<u64, ReclaimError> {
    let TrashEntry { pool, map_name, image, .. } = entry;
    let emptied = Emptied::new(cluster, pool, map_name, image, false)?;
    let removed = match cluster.map().remove_image(pool, map_name, Some(image)) {
        Ok(removed) => removed,
        Err(error) => {
            emptied.detach();
            return Err(ClientError::Map(error).into());
        }
    };
    empty(core, cluster, &emptied, &removed, progress).await
}

/// How the names of images in the trash begin.
pub(crate) const TRASH: &str = "trash.";

/// The name of an image in the trash: no other one has its volume.
fn map_name(image: &ImageEntry) -> String {
    format!("{TRASH}{}", image.volume)
}

/// Refuses names that an image in the trash may have, and those that mean something else in a URI, a path or
/// a command line.
///
/// # Errors
/// [`MapError::Invalid`].
pub fn check_plain_name(name: &str) -> Result<(), ClientError> {
    let reason = if name.starts_with(TRASH) {
        format!("names that begin with `{TRASH}` are the trash's")
    } else if name.contains('@') {
        "IMAGE@SNAPSHOT is the name of a snapshot".to_string()
    } else if name.starts_with('-') || [".", ".."].contains(&name) {
        "a name neither begins with `-` nor is `.` or `..`".to_string()
    } else if name.contains(|c: char| c.is_control() || "?#%\\".contains(c)) {
        "a name has no control characters, and none of `?`, `#`, `%` and `\\`".to_string()
    } else {
        return Ok(check_image_name(name)?);
    };
    Err(MapError::Invalid(format!("{name:?}: {reason}")).into())
}

/// An image that is in the trash, by the name that it had.
///
/// # Errors
/// [`ClientError::NoImage`]; [`ClientError::SeveralTrashed`] if several had that name, without the volume of
/// one of them.
pub fn trashed_image(
    cluster: &Cluster,
    pool: &str,
    name: &str,
    volume: Option<u64>,
) -> Result<TrashEntry, ClientError> {
    let is_it = |entry: &TrashEntry| {
        let has_volume = volume.is_none_or(|volume| entry.image.volume == volume);
        entry.pool == pool && entry.trashed.name == name && has_volume
    };
    let mut found: Vec<TrashEntry> = trash(cluster)?.into_iter().filter(is_it).collect();
    let entry = found.pop();
    if !found.is_empty() {
        let volumes = found.iter().chain(&entry).map(|entry| entry.image.volume.to_string());
        let volumes = volumes.collect::<Vec<_>>().join(", ");
        return Err(ClientError::SeveralTrashed { pool: pool.to_string(), image: name.to_string(), volumes });
    }
    entry.ok_or_else(|| MapError::Missing(format!("image {pool}/{name} in the trash")).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_whose_maker_ended_is_in_the_trash() {
        let image = ImageEntry::new(uuid::Uuid::from_u128(1), 7, 1 << 20);
        let entry = |name: &str, image: &ImageEntry| trash_entry("pool".into(), name.into(), image.clone());
        assert_eq!(entry("vol", &image), None);
        let found = entry("trash.clone.ab", &image).unwrap();
        let unfinished = TrashedImage { name: "clone.ab (unfinished)".to_string(), until: 0 };
        assert_eq!((found.trashed, found.image), (unfinished, image.clone()));
        let trashed = TrashedImage { name: "vol".to_string(), until: 5 };
        let image = ImageEntry { trashed: Some(trashed.clone()), ..image };
        assert_eq!(entry("trash.7", &image).unwrap().trashed, trashed);
    }

    #[test]
    fn a_name_is_a_word_of_a_command_line_and_a_part_of_a_uri() {
        for name in ["vol", "a.b", "my disk", "äöü", "...", "x-y_z:1"] {
            assert!(check_plain_name(name).is_ok(), "{name}");
        }
        for name in
            ["trash.1", "a@b", "-x", "--force", ".", "..", "a?b", "a#b", "a%20", "a\\b", "a\tb", "\u{7f}"]
        {
            assert!(check_plain_name(name).is_err(), "{name}");
        }
        for name in ["", "a/b", &"a".repeat(65)] {
            let error = check_plain_name(name).unwrap_err().to_string();
            assert!(error.ends_with("is no name of an image: 1 to 64 bytes without `/`"), "{error}");
        }
    }
}
