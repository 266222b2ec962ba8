//! Stores with checksums of their data.
//!
//! Such a store is on a device of the module `bdev_checksums`, which is on the device that the operator has
//! named. That has the data from its first byte, where SPDK finds the store; the checksums follow its end. An
//! attribute of the store says that it has some. Whether they are those of the data is known from the store:
//! each program that changes it without them removes what says so (`blobstore::BlobStore::checksums`).

use std::sync::Arc;

use bdev::BlockDevice;
use bdev_checksums::{ChecksumBdev, DescribeOffset};
use blobstore::{Blob, BlobId, BlobStore, Xattr};
use wire_blob::CHECKSUM_REGION_BYTES;

use crate::store::{LvolStore, name_of, text_of_store};

/// The attribute of a store with checksums of its data: a C string with their kind.
const CHECKSUMS_XATTR: &[u8] = b"data_checksums";
/// The only kind.
pub(crate) const CRC32C: &str = "crc32c";

/// The attribute of a store with checksums.
pub(crate) fn checksums_xattr() -> Xattr {
    Xattr { name: CHECKSUMS_XATTR.to_vec(), value: format!("{CRC32C}\0").into_bytes() }
}

/// What the store records about checksums of its data.
pub(crate) fn has_checksums(blobs: &BlobStore) -> bool {
    text_of_store(blobs, CHECKSUMS_XATTR).is_some()
}

/// The device that verifies the data of a store on `device`, if it is one.
pub(crate) fn checksums_of(device: &BlockDevice) -> Option<&ChecksumBdev> {
    device.module::<ChecksumBdev>()
}

/// The device that the operator has named for the store on `device`.
pub(crate) fn named_device(device: &Arc<BlockDevice>) -> &Arc<BlockDevice> {
    checksums_of(device).map_or(device, ChecksumBdev::base)
}

/// The regions with clusters that blobs have, a bit each, lowest first.
pub(crate) fn used_regions(blobs: &BlobStore) -> Vec<u8> {
    let layout = blobs.layout();
    let regions = layout.store_bytes.div_ceil(CHECKSUM_REGION_BYTES);
    // A store has fewer regions than memory has bits.
    let mut bits = vec![0; regions.div_ceil(8) as usize];
    for cluster in blobs.used_clusters().ones().filter(|cluster| layout.is_data_cluster(*cluster)) {
        let offset = layout.cluster_offset(cluster);
        let end = offset + u64::from(layout.cluster_bytes);
        for region in offset / CHECKSUM_REGION_BYTES..end.div_ceil(CHECKSUM_REGION_BYTES) {
            bits[(region / 8) as usize] |= 1 << (region % 8);
        }
    }
    bits
}

/// The volume that a byte of the device belongs to.
fn describe(store: &LvolStore, offset: u64) -> Option<String> {
    let blobs = store.shared.published();
    let cluster_bytes = u64::from(blobs.layout().cluster_bytes);
    let cluster = u32::try_from(offset / cluster_bytes).ok()?;
    let place = |blob: &Blob| blob.clusters().iter().find(|(_, of)| *of == cluster).map(|(index, _)| index);
    let found: Option<(BlobId, u32)> =
        blobs.blobs().values().find_map(|blob| place(blob).map(|index| (blob.id(), index)));
    let (blob, index) = found?;
    let at = u64::from(index) * cluster_bytes + offset % cluster_bytes;
    let name = blobs.blob(blob).and_then(name_of).unwrap_or_else(|| blob.to_string());
    Some(format!("byte {at} of the volume {}/{name}, and of its clones", store.name()))
}

/// Says to whom a byte of the store's device belongs, for the log.
pub(crate) fn describe_of(store: &Arc<LvolStore>) -> DescribeOffset {
    let weak = Arc::downgrade(store);
    Box::new(move |offset| weak.upgrade().and_then(|store| describe(&store, offset)))
}
