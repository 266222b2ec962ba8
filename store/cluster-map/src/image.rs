//! Images, as the map has them.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::layers::ImageLayers;
use crate::record::MapError;

/// An image: a volume of a pool, and what it has not itself from others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ImageJson", into = "ImageJson")]
pub struct ImageEntry {
    /// Identity.
    pub uuid: Uuid,
    /// The volume that is written, which its objects name: the head. No other image ever has it.
    pub volume: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// The image had this size, and what was cut off is not removed yet: until then it does not grow.
    pub cut_from: Option<u64>,
    /// It is neither removed nor made smaller.
    pub protected: bool,
    /// It is in the trash, and no client opens it.
    pub trashed: Option<TrashedImage>,
    /// Its snapshots, and where it has the data from that its head lacks.
    pub layers: ImageLayers,
}

/// What is known of an image that is in the trash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrashedImage {
    /// The name that it had.
    pub name: String,
    /// Until when it is kept at least, in seconds since 1970.
    pub until: u64,
}

impl ImageEntry {
    /// An image of one volume.
    pub fn new(uuid: Uuid, volume: u64, bytes: u64) -> ImageEntry {
        let layers = ImageLayers::default();
        ImageEntry { uuid, volume, bytes, cut_from: None, protected: false, trashed: None, layers }
    }

    /// Refuses to go on where the image of this name is another one than that which was read, or has been put
    /// into the trash, or taken out, since.
    ///
    /// # Errors
    /// [`MapError::Changed`].
    pub fn check_known(&self, known: Option<&ImageEntry>, pool: &str, name: &str) -> Result<(), MapError> {
        let is_same = |known: &ImageEntry| {
            (known.volume, known.uuid, &known.trashed) == (self.volume, self.uuid, &self.trashed)
        };
        match known.is_none_or(is_same) {
            true => Ok(()),
            false => Err(MapError::Changed(format!("image {pool}/{name}"))),
        }
    }

    /// Refuses what takes data from an image that is protected. The image has this name.
    ///
    /// # Errors
    /// [`MapError::Protected`].
    pub fn check_unprotected(&self, pool: &str, name: &str) -> Result<(), MapError> {
        match self.protected {
            true => Err(MapError::Protected(format!("{pool}/{name}"))),
            false => Ok(()),
        }
    }
}

/// An image that was removed, while its objects are not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemovedImage {
    /// Its pool.
    pub pool: String,
    /// Its name.
    pub name: String,
    /// What it was.
    pub image: ImageEntry,
}

impl RemovedImage {
    /// What is left of an image: its head.
    pub fn new(pool: &str, name: &str, image: ImageEntry) -> RemovedImage {
        let image = ImageEntry { layers: ImageLayers::default(), ..image };
        RemovedImage { pool: pool.to_string(), name: name.to_string(), image }
    }
}

/// An image as the map has it. Programs that know no snapshots would read the head of an image alone, and
/// would lose the rest when they change the record: they cannot read one with layers, and the text in place
/// of the number says why.
#[derive(Serialize, Deserialize)]
struct ImageJson {
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
