//! Snapshots of images, and the volumes that an image consists of.
//!
//! An image is a chain of volumes. The first one, its head, is written. What a volume does not have comes from
//! its parent, which is the volume of a snapshot and never changes. The record of an image names the parents
//! of its own volumes; a chain that leaves the image goes on in the record of the image with that snapshot.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{ImageEntry, MapError, TrashedImage};

/// Images of a map, by pool and name.
pub type Images = BTreeMap<(String, String), ImageEntry>;

/// The volume from which another one has what it does not have itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParentVolume {
    /// The volume of a snapshot of the same pool.
    pub volume: u64,
    /// What the parent has from this byte on is not seen: the volume above was smaller at some time.
    pub bytes: u64,
}

/// A snapshot of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageSnapshot {
    /// Its name: no other snapshot of the image has it.
    pub name: String,
    /// The volume that was the head of the image until then.
    pub volume: u64,
    /// Size of the image then, in bytes.
    pub bytes: u64,
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// It is not removed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub protected: bool,
    /// From where its volume has what it does not have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ParentVolume>,
}

/// What an image has besides its head.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageLayers {
    /// From where the head has what it does not have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ParentVolume>,
    /// The oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<ImageSnapshot>,
    /// Volumes that are not part of the image any more, and are still to be emptied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dropped: Vec<u64>,
    /// Raised with each clone of a snapshot, so that a removal of the snapshot that is under way sees it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub clones: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Most volumes of a chain: each has a bitmap that is read for each object.
pub const LAYERS_MAX: usize = 64;
/// Most snapshots of an image: its record has them all.
pub const SNAPSHOTS_MAX: usize = 256;

impl ImageLayers {
    /// Whether the image is its head and nothing else.
    pub fn is_empty(&self) -> bool {
        self.parent.is_none() && self.snapshots.is_empty() && self.dropped.is_empty()
    }

    /// A snapshot.
    pub fn snapshot(&self, name: &str) -> Option<&ImageSnapshot> {
        self.snapshots.iter().find(|snapshot| snapshot.name == name)
    }
}

/// Refuses what is no name of a snapshot.
///
/// # Errors
/// [`MapError::Invalid`].
pub fn check_snapshot_name(name: &str) -> Result<(), MapError> {
    if name.is_empty() || name.len() > 64 || name.contains(['/', '@', '?', '\n']) {
        let reason = format!("{name:?} is no name of a snapshot: 1 to 64 bytes without `/`, `@` and `?`");
        return Err(MapError::Invalid(reason));
    }
    Ok(())
}

/// The parents of a volume in their order, each with the limit that all above it set.
///
/// # Errors
/// [`MapError::Missing`] if the map lacks one, as an older copy of itself may; [`MapError::Invalid`] if there
/// are more than [`LAYERS_MAX`].
pub fn parents_of(
    images: &Images,
    pool: &str,
    first: Option<ParentVolume>,
) -> Result<Vec<ParentVolume>, MapError> {
    let of_pool = images.iter().filter(|((of, _), _)| of == pool);
    let snapshots = of_pool.flat_map(|(_, image)| &image.layers.snapshots);
    let snapshots: HashMap<u64, &ImageSnapshot> = match first {
        Some(_) => snapshots.map(|snapshot| (snapshot.volume, snapshot)).collect(),
        None => return Ok(Vec::new()),
    };
    let (mut parents, mut next, mut bytes) = (Vec::new(), first, u64::MAX);
    while let Some(parent) = next {
        if parents.len() == LAYERS_MAX {
            let reason =
                format!("an image of pool {pool} has more than {LAYERS_MAX} volumes below each other");
            return Err(MapError::Invalid(reason));
        }
        let missing = || MapError::Missing(format!("snapshot with volume {} in pool {pool}", parent.volume));
        bytes = bytes.min(parent.bytes);
        parents.push(ParentVolume { volume: parent.volume, bytes });
        next = snapshots.get(&parent.volume).ok_or_else(missing)?.parent;
    }
    Ok(parents)
}

/// What has a volume as its parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChildVolume {
    /// The name of its image.
    pub image: String,
    /// The identity of its image.
    pub uuid: Uuid,
    /// The snapshot that it is of; `None` for the head.
    pub snapshot: Option<String>,
}

/// The children of a volume, those of images in the trash too.
pub fn children_of(images: &Images, pool: &str, volume: u64) -> Vec<ChildVolume> {
    let mut children = Vec::new();
    for ((_, name), image) in images.iter().filter(|((of, _), _)| of == pool) {
        let name = match &image.trashed {
            Some(trashed) => format!("{} (in the trash)", trashed.name),
            None => name.clone(),
        };
        let heads = [(None, image.layers.parent)];
        let snapshots = image.layers.snapshots.iter().map(|it| (Some(it.name.clone()), it.parent));
        for (snapshot, parent) in heads.into_iter().chain(snapshots) {
            if parent.is_some_and(|parent| parent.volume == volume) {
                children.push(ChildVolume { image: name.clone(), uuid: image.uuid, snapshot });
            }
        }
    }
    children
}

/// The snapshot with a volume, and the name of its image.
pub fn snapshot_of<'a>(images: &'a Images, pool: &str, volume: u64) -> Option<(&'a str, &'a ImageSnapshot)> {
    let of_pool = images.iter().filter(|((of, _), _)| of == pool);
    let mut snapshots = of_pool
        .flat_map(|((_, name), image)| image.layers.snapshots.iter().map(move |it| (name.as_str(), it)));
    snapshots.find(|(_, snapshot)| snapshot.volume == volume)
}

/// An image as the map has it. Programs that know no snapshots would read the head of an image alone, and
/// would lose the rest when they change the record: they cannot read one with layers, and the text in place
/// of the number says why.
#[derive(Serialize, Deserialize)]
pub(crate) struct ImageJson {
    uuid: Uuid,
    volume: VolumeJson,
    bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cut_from: Option<u64>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    protected: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    trashed: Option<TrashedImage>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    layers: Option<ImageLayers>,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum VolumeJson {
    Plain(u64),
    Layered(String),
}

const LAYERED: &str = " with snapshots or a parent: older programs cannot read it";

impl From<ImageEntry> for ImageJson {
    fn from(image: ImageEntry) -> ImageJson {
        let ImageEntry { uuid, volume, bytes, cut_from, protected, trashed, layers } = image;
        let layers = (!layers.is_empty()).then_some(layers);
        let volume = match layers {
            None => VolumeJson::Plain(volume),
            Some(_) => VolumeJson::Layered(format!("{volume}{LAYERED}")),
        };
        ImageJson { uuid, volume, bytes, cut_from, protected, trashed, layers }
    }
}

impl TryFrom<ImageJson> for ImageEntry {
    type Error = String;

    fn try_from(json: ImageJson) -> Result<ImageEntry, String> {
        let ImageJson { uuid, volume, bytes, cut_from, protected, trashed, layers } = json;
        let volume = match volume {
            VolumeJson::Plain(volume) => volume,
            VolumeJson::Layered(text) => {
                let number = text.strip_suffix(LAYERED).and_then(|number| number.parse().ok());
                number.ok_or_else(|| format!("{text:?} is no volume"))?
            }
        };
        Ok(ImageEntry {
            uuid,
            volume,
            bytes,
            cut_from,
            protected,
            trashed,
            layers: layers.unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(name: &str, volume: u64, parent: Option<(u64, u64)>) -> ImageSnapshot {
        let parent = parent.map(|(volume, bytes)| ParentVolume { volume, bytes });
        ImageSnapshot { name: name.to_string(), volume, bytes: 1 << 30, created: 5, protected: false, parent }
    }

    fn image(volume: u64, parent: Option<(u64, u64)>, snapshots: Vec<ImageSnapshot>) -> ImageEntry {
        let parent = parent.map(|(volume, bytes)| ParentVolume { volume, bytes });
        let layers = ImageLayers { parent, snapshots, ..ImageLayers::default() };
        ImageEntry { layers, ..ImageEntry::new(Uuid::from_u128(volume.into()), volume, 1 << 30) }
    }

    /// `vol` with snapshots in volumes 1 and 2, `clone` of the second with one of its own.
    fn images() -> Images {
        let vol = image(3, Some((2, 700)), vec![snapshot("a", 1, None), snapshot("b", 2, Some((1, 500)))]);
        let clone = image(5, Some((4, 800)), vec![snapshot("c", 4, Some((2, 600)))]);
        let other = image(6, None, Vec::new());
        let name = |pool: &str, name: &str| (pool.to_string(), name.to_string());
        [(name("p", "vol"), vol), (name("p", "clone"), clone), (name("q", "vol"), other)].into()
    }

    #[test]
    fn a_chain_goes_through_images_and_its_limits_only_fall() {
        let images = images();
        let chain = |name: &str| {
            let image = &images[&("p".to_string(), name.to_string())];
            let parents = parents_of(&images, "p", image.layers.parent).unwrap();
            parents.into_iter().map(|parent| (parent.volume, parent.bytes)).collect::<Vec<_>>()
        };
        assert_eq!(chain("vol"), [(2, 700), (1, 500)]);
        assert_eq!(chain("clone"), [(4, 800), (2, 600), (1, 500)]);
        // Volumes of other pools are others.
        let other = parents_of(&images, "q", Some(ParentVolume { volume: 2, bytes: 1 }));
        assert_eq!(other.unwrap_err().to_string(), "there is no snapshot with volume 2 in pool q");
        // A record that was changed by hand ends in no endless loop.
        let own = image(9, Some((8, 1)), vec![snapshot("a", 8, Some((8, 1)))]);
        let circle = [(("p".to_string(), "own".to_string()), own)].into();
        let circle = parents_of(&circle, "p", Some(ParentVolume { volume: 8, bytes: 1 }));
        assert!(circle.unwrap_err().to_string().contains("more than 64 volumes"));
    }

    #[test]
    fn children_are_heads_and_snapshots_of_all_images_of_the_pool() {
        let images = images();
        let names = |pool: &str, volume| {
            let children = children_of(&images, pool, volume).into_iter();
            children.map(|child| (child.image, child.snapshot)).collect::<Vec<_>>()
        };
        let child = |image: &str, snapshot: Option<&str>| (image.to_string(), snapshot.map(str::to_string));
        assert_eq!(names("p", 2), [child("clone", Some("c")), child("vol", None)]);
        assert_eq!(names("p", 1), [child("vol", Some("b"))]);
        assert_eq!((names("p", 3), names("q", 2)), (vec![], vec![]));
        assert_eq!(
            snapshot_of(&images, "p", 4).map(|(image, it)| (image, it.name.as_str())),
            Some(("clone", "c"))
        );
        assert!(snapshot_of(&images, "q", 4).is_none());
    }

    #[test]
    fn programs_without_snapshots_read_plain_images_and_refuse_others() {
        /// As releases before snapshots read an image.
        #[derive(Debug, Deserialize)]
        struct OlderImage {
            volume: u64,
        }
        let plain = serde_json::to_string(&image(7, None, Vec::new())).unwrap();
        assert!(!plain.contains("layers"), "{plain}");
        assert_eq!(serde_json::from_str::<OlderImage>(&plain).unwrap().volume, 7);
        for layered in images().into_values().filter(|image| !image.layers.is_empty()) {
            let text = serde_json::to_string(&layered).unwrap();
            let refused = serde_json::from_str::<OlderImage>(&text).unwrap_err().to_string();
            assert!(
                refused.contains("with snapshots or a parent: older programs cannot read it"),
                "{refused}"
            );
            assert_eq!(serde_json::from_str::<ImageEntry>(&text).unwrap(), layered);
            // What a later version may add to a chain is not passed over.
            let later = text.replace("\"layers\":{", "\"layers\":{\"later\":1,");
            assert!(serde_json::from_str::<ImageEntry>(&later).is_err(), "{later}");
        }
        let wrong = plain.replace("\"volume\":7", "\"volume\":\"x\"");
        assert!(serde_json::from_str::<ImageEntry>(&wrong).unwrap_err().to_string().contains("is no volume"));
    }

    #[test]
    fn names_of_snapshots_are_told_from_those_of_images() {
        assert!(check_snapshot_name("monday 1").is_ok());
        for name in ["", "a/b", "a@b", "a?b", "a\nb", &"x".repeat(65)] {
            assert!(check_snapshot_name(name).unwrap_err().to_string().contains("no name of a snapshot"));
        }
    }
}
