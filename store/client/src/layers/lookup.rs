//! Images and snapshots by their names.

use cluster_map::{ImageEntry, ImageSnapshot, Images, ParentVolume, parents_of};
use uuid::Uuid;

use super::LayerChain;
use crate::cluster::check_whole;
use crate::{ClientError, Cluster};

/// An image or a snapshot, with the volumes that it is made of.
pub(crate) struct FoundImage {
    /// The image, or that of the snapshot.
    pub(crate) entry: ImageEntry,
    /// The name of the image.
    pub(crate) image: String,
    pub(crate) snapshot: Option<ImageSnapshot>,
    pub(crate) parents: Vec<ParentVolume>,
}

impl FoundImage {
    /// The volume whose data is seen first.
    pub(crate) fn head(&self) -> u64 {
        self.snapshot.as_ref().map_or(self.entry.volume, |snapshot| snapshot.volume)
    }

    /// Size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.snapshot.as_ref().map_or(self.entry.bytes, |snapshot| snapshot.bytes)
    }

    /// Its identity. That of a snapshot follows from the image and the volume.
    pub(crate) fn uuid(&self) -> Uuid {
        match &self.snapshot {
            None => self.entry.uuid,
            Some(snapshot) => Uuid::from_u128(self.entry.uuid.as_u128() ^ u128::from(snapshot.volume)),
        }
    }

    /// Its chain. While another process writes it, what its head has is read anew for each request.
    pub(crate) fn chain(&self, is_written_elsewhere: bool) -> LayerChain {
        let is_volatile = is_written_elsewhere && self.snapshot.is_none();
        LayerChain::new(self.head(), self.parents.clone(), is_volatile)
    }
}

/// An image, or `IMAGE@SNAPSHOT`. An image of that name comes first: earlier releases allowed such names.
///
/// # Errors
/// [`ClientError::NoImage`], [`ClientError::NoSnapshot`], [`ClientError::Trashed`], [`ClientError::Map`];
/// [`ClientError::Importing`] for an image, but not for its snapshots.
pub(crate) fn find_image(images: &Images, pool: &str, name: &str) -> Result<FoundImage, ClientError> {
    let key = |image: &str| (pool.to_string(), image.to_string());
    let (image, snapshot) = match name.rsplit_once('@') {
        Some((image, snapshot)) if !images.contains_key(&key(name)) => (image, Some(snapshot)),
        _ => (name, None),
    };
    let missing = || ClientError::NoImage { pool: pool.to_string(), image: image.to_string() };
    let entry = images.get(&key(image)).ok_or_else(missing)?.clone();
    if entry.trashed.is_some() {
        return Err(ClientError::Trashed { pool: pool.to_string(), image: image.to_string() });
    }
    let snapshot = match snapshot {
        None => {
            check_whole(pool, image, &entry)?;
            None
        }
        Some(name) => Some(entry.layers.snapshot(name).cloned().ok_or_else(|| ClientError::NoSnapshot {
            pool: pool.to_string(),
            image: image.to_string(),
            snapshot: name.to_string(),
        })?),
    };
    let first = snapshot.as_ref().map_or(entry.layers.parent, |snapshot| snapshot.parent);
    let parents = parents_of(images, pool, first)?;
    Ok(FoundImage { entry, image: image.to_string(), snapshot, parents })
}

impl Cluster {
    /// The identity of an image, or of `IMAGE@SNAPSHOT`.
    ///
    /// # Errors
    /// As [`image`](Self::image); [`ClientError::NoSnapshot`].
    pub fn image_uuid(&self, pool: &str, name: &str) -> Result<Uuid, ClientError> {
        Ok(find_image(&self.map().images()?, pool, name)?.uuid())
    }
}
