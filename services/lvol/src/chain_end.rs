//! What the chains of snapshots of volumes end with.

use std::collections::{BTreeMap, BTreeSet};

use blobstore::{Blob, BlobId, BlobParent, BlobStore};

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

/// The name, alias or UUID of the external snapshot of which the blob or an ancestor is a clone.
pub(crate) fn external_of(blobs: &BlobStore, end: ChainEnd) -> Option<String> {
    match end {
        ChainEnd::External(clone) => blobs.blob(clone).and_then(external_text).map(|(name, _)| name),
        _ => None,
    }
}

/// The name of a blob's external snapshot, and whether it is all that the attribute has besides a terminator.
pub(crate) fn external_text(blob: &Blob) -> Option<(String, bool)> {
    let BlobParent::External(name) = blob.parent() else { return None };
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    Some((String::from_utf8_lossy(&name[..end]).into_owned(), end + 1 == name.len()))
}

/// The text of an attribute, unless it is empty.
pub(crate) fn text_of(blob: &Blob, attribute: &[u8]) -> Option<String> {
    blob.xattr_text(attribute).map(|text| text.into_owned()).filter(|text| !text.is_empty())
}

/// What the chain of one blob ends with.
pub(crate) fn chain_end(blobs: &BlobStore, blob: BlobId) -> ChainEnd {
    let Some(mut blob) = blobs.blob(blob) else { return ChainEnd::Missing(blob) };
    for _ in 0..=blobs.blobs().len() {
        match blob.parent() {
            BlobParent::None => return ChainEnd::Zeroes,
            BlobParent::External(_) => return ChainEnd::External(blob.id()),
            BlobParent::Snapshot(parent) => match blobs.blob(*parent) {
                Some(snapshot) => blob = snapshot,
                None => return ChainEnd::Missing(*parent),
            },
        }
    }
    ChainEnd::Cycle
}

/// What the chain of each blob ends with. Each blob is visited once.
pub(crate) fn chain_ends(blobs: &BlobStore) -> BTreeMap<BlobId, ChainEnd> {
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
