//! Snapshots of images, and the volumes that an image consists of.
//!
//! An image is a chain of volumes. The first one, its head, is written. What a volume does not have comes
//! from its parent, which is the volume of a snapshot and never changes. The record of an image names the
//! parents of its own volumes; a chain that leaves the image goes on in the record of the image with that
//! snapshot.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

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
    /// The identity of the snapshot that it is the copy of, if it was imported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Uuid>,
}

/// A stream of differences of which the head of an image has a part. Until it has all, the image is neither
/// read nor written otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnfinishedImport {
    /// The identity of the snapshot that the stream begins at; `None` if it is of everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<Uuid>,
    /// The identity of the snapshot that it leads to.
    pub to: Uuid,
    /// The name of that snapshot.
    pub name: String,
    /// What the stream has before this offset, in bytes of the image, is written.
    pub done: u64,
}

/// A snapshot that a command wants of an image in use. Its holder makes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// This request.
    pub id: Uuid,
    /// The name of the snapshot.
    pub name: String,
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
    /// A snapshot that its holder is to make.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<SnapshotRequest>,
    /// An import that was begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub import: Option<UnfinishedImport>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl ImageLayers {
    /// Whether the image is its head and nothing else.
    pub fn is_empty(&self) -> bool {
        let has_volumes = self.parent.is_some() || !self.snapshots.is_empty() || !self.dropped.is_empty();
        !has_volumes && self.request.is_none() && self.import.is_none()
    }

    /// A snapshot.
    pub fn snapshot(&self, name: &str) -> Option<&ImageSnapshot> {
        self.snapshots.iter().find(|snapshot| snapshot.name == name)
    }
}
