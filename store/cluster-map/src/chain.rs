//! Chains of volumes, through the records of images.

use std::collections::{BTreeMap, HashMap};

use uuid::Uuid;

use crate::image::ImageEntry;
use crate::layers::{ImageSnapshot, ParentVolume};
use crate::record::MapError;

/// Images of a map, by pool and name.
pub type Images = BTreeMap<(String, String), ImageEntry>;

/// Most volumes of a chain: each has a bitmap that is read for each object.
pub const LAYERS_MAX: usize = 64;
/// Most snapshots of an image: its record has them all.
pub const SNAPSHOTS_MAX: usize = 256;

impl ImageEntry {
    /// The volumes that the image has, with those that are to be emptied.
    pub fn volumes(&self) -> impl Iterator<Item = u64> {
        let snapshots = self.layers.snapshots.iter().map(|snapshot| snapshot.volume);
        [self.volume].into_iter().chain(snapshots).chain(self.layers.dropped.iter().copied())
    }

    /// The image after a snapshot: its head has become that, and the new head is empty.
    #[must_use]
    pub fn with_snapshot(&self, name: &str, created: u64, head: u64) -> ImageEntry {
        let mut layers = self.layers.clone();
        layers.snapshots.push(ImageSnapshot {
            name: name.to_string(),
            volume: self.volume,
            bytes: self.bytes,
            created,
            protected: false,
            parent: layers.parent,
            origin: None,
        });
        layers.parent = Some(ParentVolume { volume: self.volume, bytes: self.bytes });
        layers.request = None;
        ImageEntry { volume: head, layers, ..self.clone() }
    }

    /// The image after an import: its head has become a snapshot, which is the copy of another one.
    #[must_use]
    pub fn imported(&self, name: &str, created: u64, origin: Uuid, head: u64) -> ImageEntry {
        let mut image = self.with_snapshot(name, created, head);
        image.layers.import = None;
        image.layers.snapshots.iter_mut().filter(|it| it.volume == self.volume).for_each(|it| {
            it.origin = Some(origin);
        });
        image
    }

    /// The image as it was at a snapshot, with a new head. The head that it had is to be emptied.
    #[must_use]
    pub fn rolled_back(&self, to: &ImageSnapshot, head: u64) -> ImageEntry {
        let mut layers = self.layers.clone();
        layers.dropped.push(self.volume);
        layers.import = None;
        layers.parent = Some(ParentVolume { volume: to.volume, bytes: to.bytes });
        ImageEntry { volume: head, bytes: to.bytes, cut_from: None, layers, ..self.clone() }
    }

    /// The image without a snapshot, whose volume is to be emptied: its child, if there is one, has its data.
    #[must_use]
    pub fn without_snapshot(&self, snapshot: &ImageSnapshot) -> ImageEntry {
        let mut layers = self.layers.clone();
        layers.snapshots.retain(|it| it.volume != snapshot.volume);
        layers.dropped.push(snapshot.volume);
        let skip = |parent: &mut Option<ParentVolume>| match *parent {
            Some(ParentVolume { volume, bytes }) if volume == snapshot.volume => {
                *parent = snapshot.parent.map(|it| ParentVolume { bytes: it.bytes.min(bytes), ..it });
            }
            _ => {}
        };
        skip(&mut layers.parent);
        layers.snapshots.iter_mut().for_each(|it| skip(&mut it.parent));
        if layers.snapshots.is_empty() {
            layers.clones = 0;
        }
        ImageEntry { layers, ..self.clone() }
    }

    /// The image with a smaller size, of which nothing comes back when it grows.
    #[must_use]
    pub fn cut_to(&self, bytes: u64) -> ImageEntry {
        let mut layers = self.layers.clone();
        if let Some(parent) = &mut layers.parent {
            parent.bytes = parent.bytes.min(bytes);
        }
        ImageEntry { bytes: bytes.min(self.bytes), layers, ..self.clone() }
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

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::layers::{ImageLayers, SnapshotRequest, UnfinishedImport};

    fn snapshot(name: &str, volume: u64, parent: Option<(u64, u64)>) -> ImageSnapshot {
        let parent = parent.map(|(volume, bytes)| ParentVolume { volume, bytes });
        let (name, bytes) = (name.to_string(), 1 << 30);
        ImageSnapshot { name, volume, bytes, created: 5, protected: false, parent, origin: None }
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
    fn snapshots_come_and_go_and_the_head_follows() {
        let mut plain = image(1, None, Vec::new());
        plain.layers.request = Some(SnapshotRequest { id: Uuid::from_u128(9), name: "a".to_string() });
        let first = plain.with_snapshot("a", 7, 2);
        let second = ImageEntry { bytes: 1 << 20, ..first.clone() }.with_snapshot("b", 8, 3);
        assert_eq!((plain.layers.is_empty(), &first.layers.request), (false, &None));
        assert_eq!(second.volumes().collect::<Vec<_>>(), [3, 1, 2]);
        let parent = |image: &ImageEntry| image.layers.parent.map(|it| (it.volume, it.bytes));
        assert_eq!((parent(&first), parent(&second)), (Some((1, 1 << 30)), Some((2, 1 << 20))));
        // Back at the first, the second has no child.
        let back = second.rolled_back(second.layers.snapshot("a").unwrap(), 4);
        assert_eq!((back.bytes, parent(&back)), (1 << 30, Some((1, 1 << 30))));
        assert_eq!(back.layers.dropped, [3]);
        // What is cut off is not seen again when the image grows, nor after the snapshot above is gone.
        let cut = second.cut_to(4096);
        assert_eq!((cut.bytes, parent(&cut)), (4096, Some((2, 4096))));
        let merged = cut.without_snapshot(cut.layers.snapshot("b").unwrap());
        assert_eq!((parent(&merged), &merged.layers.dropped[..]), (Some((1, 4096)), &[2][..]));
        let last = merged.without_snapshot(merged.layers.snapshot("a").unwrap());
        assert_eq!((parent(&last), last.layers.snapshots.len()), (None, 0));
        assert_eq!(last.volumes().collect::<Vec<_>>(), [3, 2, 1]);
    }

    #[test]
    fn an_import_is_in_the_record_until_the_image_has_its_snapshot_or_goes_back() {
        let (from, to) = (Some(Uuid::from_u128(1)), Uuid::from_u128(2));
        let import = UnfinishedImport { from, to, name: "b".to_string(), done: 4096 };
        let mut begun = image(3, None, Vec::new());
        begun.layers.import = Some(import);
        // Programs that know no imports do not take it for a whole image.
        let text = serde_json::to_string(&begun).unwrap();
        assert!(text.contains("older programs cannot read it"), "{text}");
        assert_eq!(serde_json::from_str::<ImageEntry>(&text).unwrap(), begun);
        let whole = begun.imported("b", 5, to, 4);
        let text = serde_json::to_string(&whole).unwrap();
        assert_eq!(serde_json::from_str::<ImageEntry>(&text).unwrap(), whole);
        assert_eq!((whole.volume, &whole.layers.import), (4, &None));
        let snapshot = whole.layers.snapshot("b").unwrap();
        assert_eq!((snapshot.volume, snapshot.created, snapshot.origin), (3, 5, Some(to)));
        // A snapshot that is made here has no origin, and leaves that of the others.
        let later = whole.with_snapshot("c", 6, 5);
        let origins: Vec<_> = later.layers.snapshots.iter().map(|it| it.origin).collect();
        assert_eq!(origins, [Some(to), None]);
        let again =
            ImageEntry { layers: ImageLayers { import: begun.layers.import, ..later.layers }, ..later };
        assert_eq!(again.rolled_back(&again.layers.snapshots[0], 6).layers.import, None);
    }

    #[test]
    fn names_of_snapshots_are_told_from_those_of_images() {
        assert!(check_snapshot_name("monday 1").is_ok());
        for name in ["", "a/b", "a@b", "a?b", "a\nb", &"x".repeat(65)] {
            assert!(check_snapshot_name(name).unwrap_err().to_string().contains("no name of a snapshot"));
        }
    }
}
