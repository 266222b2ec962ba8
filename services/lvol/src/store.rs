//! A logical volume store, as the attributes of its blobs describe it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bdev::{InfoValue, Uuid};
use blobstore::{Blob, BlobId, BlobParent, BlobStore};
use control::json::{Value, json};

/// The type in the super block of a store of logical volumes.
pub(crate) const STORE_TYPE: &str = "LVOLSTORE";
/// Bytes of length, type and bit count before the bits of a mask.
const MASK_HEADER_BYTES: u64 = 5;

/// A loaded store and its volumes.
pub(crate) struct LvolStore {
    pub(crate) uuid: Uuid,
    pub(crate) name: String,
    pub(crate) blobs: Arc<BlobStore>,
    /// Ascending by blob.
    pub(crate) volumes: Vec<Volume>,
}

/// A volume.
pub(crate) struct Volume {
    pub(crate) blob: BlobId,
    pub(crate) name: String,
    /// Null in stores that are older than UUIDs of volumes, or if it is damaged.
    pub(crate) stored_uuid: Uuid,
    /// Name of its block device: the UUID, or that of the store and the blob's id.
    pub(crate) bdev_name: String,
    pub(crate) end: ChainEnd,
}

/// What the chain of snapshots from a blob on ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChainEnd {
    /// Zeroes.
    Zeroes,
    /// The external snapshot of this blob.
    External(BlobId),
    /// This snapshot, which is not there or cannot be used.
    Missing(BlobId),
    /// It has none: a blob is its own ancestor.
    Cycle,
}

/// Why a blobstore is no store of logical volumes, although its type says so.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoLvolStore {
    #[error("it has no super blob that can be used, which has its name")]
    SuperBlob,
    #[error("its UUID is missing or damaged")]
    Uuid,
    #[error("its name is missing")]
    Name,
}

impl LvolStore {
    /// The store of loaded blobs. What is wrong with single volumes is in `problems`, one sentence each.
    pub(crate) fn new(blobs: BlobStore, problems: &mut Vec<String>) -> Result<LvolStore, NoLvolStore> {
        let super_blob = blobs.super_block().super_blob.and_then(|id| blobs.blob(id));
        let super_blob = super_blob.ok_or(NoLvolStore::SuperBlob)?;
        let uuid = uuid_of(super_blob).ok_or(NoLvolStore::Uuid)?;
        let name = name_of(super_blob).ok_or(NoLvolStore::Name)?;
        for (id, unusable) in blobs.unusable() {
            let name = name_of(unusable.partial()).unwrap_or_else(|| "without a name".to_string());
            problems.push(format!("the volume {name}, blob {id}, cannot be used: {}", unusable.damage()));
        }
        let ends = chain_ends(&blobs);
        let mut volumes = Vec::new();
        for blob in blobs.blobs().values().filter(|blob| blob.id() != super_blob.id()) {
            let id = blob.id();
            let Some(name) = name_of(blob) else {
                problems.push(format!("blob {id} cannot be used: the name of the volume is missing"));
                continue;
            };
            let end = ends.get(&id).copied().unwrap_or(ChainEnd::Zeroes);
            match end {
                ChainEnd::Missing(snapshot) => problems.push(format!(
                    "the volume {name} cannot be used: its snapshot, blob {snapshot}, is not there or damaged"
                )),
                ChainEnd::Cycle => problems.push(format!(
                    "the volume {name} cannot be used: its snapshots are clones of each other in a circle"
                )),
                ChainEnd::Zeroes | ChainEnd::External(_) => {}
            }
            let stored_uuid = uuid_of(blob).unwrap_or(Uuid::nil());
            let bdev_name =
                if stored_uuid.is_nil() { format!("{uuid}_{}", id.0) } else { stored_uuid.to_string() };
            volumes.push(Volume { blob: id, name, stored_uuid, bdev_name, end });
        }
        Ok(LvolStore { uuid, name, blobs: Arc::new(blobs), volumes })
    }

    /// The name `STORE/VOLUME`.
    pub(crate) fn alias(&self, volume: &Volume) -> String {
        format!("{}/{}", self.name, volume.name)
    }

    /// The UUID of the volume's block device: its own, or one that is made of the store's and the blob's id.
    pub(crate) fn bdev_uuid(&self, volume: &Volume) -> Uuid {
        match volume.stored_uuid.is_nil() {
            true => Uuid::new_v5(&self.uuid, &volume.blob.0.to_le_bytes()),
            false => volume.stored_uuid,
        }
    }

    /// The name, alias or UUID of the external snapshot of which the volume or an ancestor is a clone.
    pub(crate) fn external_name(&self, volume: &Volume) -> Option<String> {
        match volume.end {
            ChainEnd::External(clone) => self.blobs.blob(clone).and_then(external_text).map(|(name, _)| name),
            _ => None,
        }
    }

    /// The object of `bdev_lvol_get_lvstores`.
    pub(crate) fn to_json(&self, base: &str) -> Value {
        let (layout, blobs) = (self.blobs.layout(), &self.blobs);
        let (page_bytes, cluster_bytes) = (u64::from(layout.page_bytes), u64::from(layout.cluster_bytes));
        // The mask of clusters, rounded up to whole pages, limits their number.
        let mask_bytes = MASK_HEADER_BYTES + u64::from(layout.pages).div_ceil(8);
        let clusters_max = (mask_bytes.next_multiple_of(page_bytes) - MASK_HEADER_BYTES) * 8;
        json!({
            "uuid": self.uuid.to_string(),
            "name": self.name,
            "base_bdev": base,
            "total_data_clusters": blobs.data_clusters(),
            "free_clusters": blobs.free_clusters(),
            "block_size": blobs.super_block().io_unit_bytes,
            "cluster_size": layout.cluster_bytes,
            "max_growable_size": clusters_max.saturating_mul(cluster_bytes),
        })
    }

    /// The object of `bdev_lvol_get_lvols`.
    pub(crate) fn volume_to_json(&self, volume: &Volume, is_degraded: bool) -> Value {
        let relations = self.relations(volume);
        json!({
            "alias": self.alias(volume),
            "uuid": volume.stored_uuid.to_string(),
            "name": volume.name,
            "is_thin_provisioned": relations.is_thin,
            "is_snapshot": !relations.clones.is_empty(),
            "is_clone": relations.snapshot.is_some(),
            "is_esnap_clone": relations.external.is_some(),
            "is_degraded": is_degraded,
            "num_allocated_clusters": relations.allocated_clusters,
            "lvs": { "name": self.name, "uuid": self.uuid.to_string() },
        })
    }

    /// The members of `driver_specific` in `bdev_get_bdevs`.
    pub(crate) fn driver_specific(&self, volume: &Volume, base: &str) -> Vec<(&'static str, InfoValue)> {
        let relations = self.relations(volume);
        let mut object = vec![
            ("lvol_store_uuid", InfoValue::Text(self.uuid.to_string())),
            ("base_bdev", base.into()),
            ("thin_provision", InfoValue::Bool(relations.is_thin)),
            ("num_allocated_clusters", InfoValue::Number(relations.allocated_clusters.into())),
            ("snapshot", InfoValue::Bool(!relations.clones.is_empty())),
            ("clone", InfoValue::Bool(relations.snapshot.is_some())),
        ];
        let name_of = |id: &BlobId| self.blobs.blob(*id).and_then(name_of).map(InfoValue::Text);
        object.extend(relations.snapshot.as_ref().and_then(name_of).map(|name| ("base_snapshot", name)));
        if !relations.clones.is_empty() {
            let names = relations.clones.iter().filter_map(name_of).collect();
            object.push(("clones", InfoValue::List(names)));
        }
        object.push(("esnap_clone", InfoValue::Bool(relations.external.is_some())));
        if let Some((name, true)) = relations.external {
            object.push(("external_snapshot_name", InfoValue::Text(name)));
        }
        vec![("lvol", InfoValue::Object(object))]
    }

    fn relations(&self, volume: &Volume) -> Relations<'_> {
        let blob = self.blobs.blob(volume.blob);
        Relations {
            is_thin: blob.is_some_and(Blob::is_thin),
            allocated_clusters: blob.map_or(0, |blob| blob.clusters().allocated()),
            clones: self.blobs.clones(volume.blob),
            snapshot: match blob.map(Blob::parent) {
                Some(BlobParent::Snapshot(parent)) => Some(*parent),
                _ => None,
            },
            external: blob.and_then(external_text),
        }
    }
}

/// What methods report of a volume.
struct Relations<'a> {
    is_thin: bool,
    allocated_clusters: u32,
    clones: &'a [BlobId],
    snapshot: Option<BlobId>,
    external: Option<(String, bool)>,
}

/// The text of an attribute, unless it is empty.
fn text_of(blob: &Blob, attribute: &[u8]) -> Option<String> {
    blob.xattr_text(attribute).map(|text| text.into_owned()).filter(|text| !text.is_empty())
}

fn name_of(blob: &Blob) -> Option<String> {
    text_of(blob, b"name")
}

fn uuid_of(blob: &Blob) -> Option<Uuid> {
    let text = text_of(blob, b"uuid")?;
    Uuid::try_parse(&text).ok().filter(|uuid| !uuid.is_nil())
}

/// The name of a blob's external snapshot, and whether it is all that the attribute has besides a terminator.
fn external_text(blob: &Blob) -> Option<(String, bool)> {
    let BlobParent::External(name) = blob.parent() else { return None };
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    Some((String::from_utf8_lossy(&name[..end]).into_owned(), end + 1 == name.len()))
}

/// What the chain of each blob ends with. Each blob is visited once.
fn chain_ends(blobs: &BlobStore) -> BTreeMap<BlobId, ChainEnd> {
    let mut ends: BTreeMap<BlobId, ChainEnd> = BTreeMap::new();
    for start in blobs.blobs().values() {
        let mut path = BTreeSet::new();
        let mut blob = start;
        let end = loop {
            if let Some(end) = ends.get(&blob.id()) {
                break *end;
            }
            if !path.insert(blob.id()) {
                break ChainEnd::Cycle;
            }
            match blob.parent() {
                BlobParent::None => break ChainEnd::Zeroes,
                BlobParent::External(_) => break ChainEnd::External(blob.id()),
                BlobParent::Snapshot(parent) => match blobs.blob(*parent) {
                    Some(snapshot) => blob = snapshot,
                    None => break ChainEnd::Missing(*parent),
                },
            }
        };
        ends.extend(path.into_iter().map(|id| (id, end)));
    }
    ends
}
