//! How methods describe stores and volumes.

use bdev::InfoValue;
use blobstore::{Blob, BlobId, BlobParent, BlobStore};
use control::json::{Value, json};

use crate::chain_end::external_text;
use crate::checksums::{CRC32C, checksums_of, named_device};
use crate::store::{LvolStore, Volume, low_space_clusters, name_of};

/// Bytes of length, type and bit count before the bits of a mask.
const MASK_HEADER_BYTES: u64 = 5;

impl LvolStore {
    /// The object of `bdev_lvol_get_lvstores`.
    pub(crate) fn to_json(&self) -> Value {
        let blobs = self.shared.published();
        let layout = blobs.layout();
        let (page_bytes, cluster_bytes) = (u64::from(layout.page_bytes), u64::from(layout.cluster_bytes));
        // The mask of clusters, rounded up to whole pages, limits their number.
        let mask_bytes = MASK_HEADER_BYTES + u64::from(layout.pages).div_ceil(8);
        let clusters_max = (mask_bytes.next_multiple_of(page_bytes) - MASK_HEADER_BYTES) * 8;
        let (free, percent) = (self.shared.free_clusters(), self.shared.low_space_percent());
        json!({
            "uuid": self.uuid.to_string(),
            "name": self.name(),
            "base_bdev": named_device(self.base.device()).name(),
            "total_data_clusters": blobs.data_clusters(),
            "free_clusters": free,
            "block_size": blobs.super_block().io_unit_bytes,
            "cluster_size": layout.cluster_bytes,
            "max_growable_size": clusters_max.saturating_mul(cluster_bytes),
            "low_space_percent": percent,
            "is_read_only": !self.shared.is_writable(),
            "data_checksums": if checksums_of(self.base.device()).is_some() { CRC32C } else { "none" },
            "is_low_on_space": free < low_space_clusters(percent, blobs.data_clusters()),
        })
    }

    /// The object of `bdev_lvol_get_lvols`.
    pub(crate) fn volume_to_json(&self, volume: &Volume, is_degraded: bool) -> Value {
        let blobs = self.shared.published();
        let relations = Relations::of(&blobs, volume.blob);
        json!({
            "alias": self.alias(volume),
            "uuid": volume.stored_uuid.to_string(),
            "name": volume.name,
            "is_thin_provisioned": relations.is_thin,
            "is_snapshot": !relations.clones.is_empty() || self.was_snapshot(volume.blob),
            "is_clone": relations.snapshot.is_some(),
            "is_esnap_clone": relations.external.is_some(),
            "is_degraded": is_degraded,
            "is_read_only": relations.is_read_only || !self.shared.is_writable(),
            "num_allocated_clusters": relations.allocated_clusters,
            "lvs": { "name": self.name(), "uuid": self.uuid.to_string() },
        })
    }

    /// The members of `driver_specific` in `bdev_get_bdevs`.
    pub(crate) fn driver_specific(&self, volume: &Volume) -> Vec<(&'static str, InfoValue)> {
        let blobs = self.shared.published();
        let relations = Relations::of(&blobs, volume.blob);
        let is_snapshot = !relations.clones.is_empty() || self.was_snapshot(volume.blob);
        let mut object = vec![
            ("lvol_store_uuid", InfoValue::Text(self.uuid.to_string())),
            ("base_bdev", named_device(self.base.device()).name().into()),
            ("thin_provision", InfoValue::Bool(relations.is_thin)),
            ("num_allocated_clusters", InfoValue::Number(relations.allocated_clusters.into())),
            ("snapshot", InfoValue::Bool(is_snapshot)),
            ("clone", InfoValue::Bool(relations.snapshot.is_some())),
        ];
        let name_of = |id: &BlobId| blobs.blob(*id).and_then(name_of).map(InfoValue::Text);
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
}

/// What methods report of a volume.
struct Relations<'a> {
    is_thin: bool,
    is_read_only: bool,
    allocated_clusters: u32,
    clones: &'a [BlobId],
    snapshot: Option<BlobId>,
    external: Option<(String, bool)>,
}

impl Relations<'_> {
    fn of(blobs: &BlobStore, blob: BlobId) -> Relations<'_> {
        let (id, blob) = (blob, blobs.blob(blob));
        Relations {
            is_thin: blob.is_some_and(Blob::is_thin),
            is_read_only: blob.is_some_and(Blob::is_read_only),
            allocated_clusters: blob.map_or(0, |blob| blob.clusters().allocated()),
            clones: blobs.clones(id),
            snapshot: match blob.map(Blob::parent) {
                Some(BlobParent::Snapshot(parent)) => Some(*parent),
                _ => None,
            },
            external: blob.and_then(external_text),
        }
    }
}
