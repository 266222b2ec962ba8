//! Where external snapshots end for their clones.
//!
//! A clone that is larger than its external snapshot reads zeroes behind it. If the device grows, what is
//! there then is no part of the snapshot. So the size of the device is recorded when a volume becomes its
//! clone, in an attribute of the volume that SPDK ignores and keeps, with the name of the external snapshot:
//! a record for another one is not used. Snapshots and clones of the volume get it too, as they become clones
//! of the external snapshot when what is between is deleted. If the device becomes smaller, reads of what it
//! had fail. Of clones that SPDK made, only the present size is known.

use blobstore::{Blob, BlobId, BlobStore, Xattr};

use crate::chain_end::{ChainEnd, chain_end, external_text, text_of};

/// The attribute: a C string with the bytes, a space, and the name of the external snapshot.
const EXTERNAL_BYTES_XATTR: &[u8] = b"external_bytes";

/// The record for an external snapshot with a name as it is stored, of this length.
pub(crate) fn external_bytes_xattr(name: &[u8], bytes: u64) -> Xattr {
    let name = name.strip_suffix(b"\0").unwrap_or(name);
    let value = [bytes.to_string().as_bytes(), b" ", name, b"\0"].concat();
    Xattr { name: EXTERNAL_BYTES_XATTR.to_vec(), value }
}

/// The record of a volume, for a snapshot or clone of it.
pub(crate) fn recorded_xattr(blob: &Blob) -> Option<Xattr> {
    let value = blob.xattr(EXTERNAL_BYTES_XATTR)?.to_vec();
    Some(Xattr { name: EXTERNAL_BYTES_XATTR.to_vec(), value })
}

/// The bytes that the external snapshot of a blob has for it; all that there can be without a record.
pub(crate) fn external_bytes_of(blobs: &BlobStore, clone: BlobId) -> u64 {
    let recorded = || {
        let blob = blobs.blob(clone)?;
        let record = text_of(blob, EXTERNAL_BYTES_XATTR)?;
        let (bytes, name) = record.split_once(' ')?;
        let (external, _) = external_text(blob)?;
        (name == external).then(|| bytes.parse().ok())?
    };
    recorded().unwrap_or(u64::MAX)
}

/// Where reads of an external snapshot end, of `recorded` bytes, whose device has `present` bytes now. A
/// device that has become smaller fails reads behind its end: there are no zeroes where the clone had data.
pub(crate) fn readable_bytes(present: u64, recorded: u64) -> u64 {
    if recorded == u64::MAX { present } else { recorded }
}

/// [`external_bytes_of`] for the end of the chain of a volume.
pub(crate) fn external_bytes_below(blobs: &BlobStore, volume: BlobId) -> u64 {
    match chain_end(blobs, volume) {
        ChainEnd::External(clone) => external_bytes_of(blobs, clone),
        _ => u64::MAX,
    }
}
