//! Operations on snapshots that a power failure or the end of the program cut in two.
//!
//! A snapshot is made in three writes: a new blob with the internal xattr `SNAPTMP`, which names the
//! original; the original's clusters as the new blob's; the original as a thin clone of the new blob, without
//! clusters. Then `SNAPTMP` is removed. A snapshot with one clone is deleted in three: the xattr `SNAPRM`,
//! which names the clone; the snapshot's clusters as the clone's where this has none, and the snapshot's
//! parent as the clone's; the end of the snapshot. Between the second and third write of each, both blobs
//! have the same clusters, and the clone says which of them is valid: while it names the snapshot as its
//! parent, the snapshot is; afterwards the clone is, and the snapshot does not exist.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use wire_blob::{
    BlobFlags, BlobId, CLUSTERS_PER_EXTENT_PAGE, XATTR_SNAPSHOT_IN_PROGRESS, XATTR_SNAPSHOT_PENDING_REMOVAL,
};

use crate::blob::{Blob, BlobParent};
use crate::finding::StoreFinding;

/// What was being done with a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotOperation {
    /// It was being made.
    Create,
    /// It was being deleted.
    Delete,
}

/// An operation that was cut in two, and what became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecoveredOperation {
    /// The operation.
    pub operation: SnapshotOperation,
    /// The snapshot.
    pub snapshot: BlobId,
    /// The blob of which it is or was a snapshot.
    pub clone: BlobId,
    /// Whether the operation was finished; otherwise it was undone.
    pub finished: bool,
}

impl RecoveredOperation {
    /// Whether the snapshot exists.
    pub fn has_snapshot(&self) -> bool {
        self.finished == (self.operation == SnapshotOperation::Create)
    }
}

impl fmt::Display for RecoveredOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RecoveredOperation { snapshot, clone, .. } = self;
        let what = match self.operation {
            SnapshotOperation::Create => "made",
            SnapshotOperation::Delete => "deleted",
        };
        let outcome = if self.finished { "finished" } else { "undone" };
        write!(f, "snapshot {snapshot} of blob {clone} was being {what}; that is {outcome}")
    }
}

/// What the device has otherwise than the state that was loaded. It is written before the store is changed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recovery {
    /// Pages that were half written, with their content.
    pub(crate) restored: Vec<(u32, Vec<u8>)>,
    /// Blobs whose chains are to be written, with the indexes of extent pages that are. A blob's own are
    /// written before those of its snapshot: the order is that of the list.
    pub(crate) rewritten: Vec<(BlobId, BTreeSet<u32>)>,
    /// First pages of blobs that do not exist.
    pub(crate) removed: Vec<u32>,
    /// Pages that were half written before a blob had them.
    pub(crate) torn: Vec<u32>,
    /// Pages that may be half of the first page of a blob, and are left as they are.
    pub(crate) doubtful: Vec<u32>,
    /// Clusters with several owners, which are never free.
    pub(crate) shared_clusters: BTreeSet<u32>,
    /// The same of metadata pages.
    pub(crate) shared_pages: BTreeSet<u32>,
}

impl Recovery {
    /// Adds a blob to be written, if it has extent pages to be.
    pub(crate) fn rewrite(&mut self, blob: BlobId, extents: impl Iterator<Item = u32>) {
        let extents: BTreeSet<u32> = extents.collect();
        if extents.is_empty() {
            return;
        }
        match self.rewritten.iter_mut().find(|(other, _)| *other == blob) {
            Some((_, others)) => others.extend(extents),
            None => self.rewritten.push((blob, extents)),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        let is_right = self.restored.is_empty() && self.rewritten.is_empty();
        is_right && self.removed.is_empty() && self.torn.is_empty()
    }
}

/// Finishes or undoes what was cut in two.
pub(crate) fn recover(blobs: &mut BTreeMap<BlobId, Blob>, recovery: &mut Recovery) -> Vec<StoreFinding> {
    let marked: Vec<(BlobId, SnapshotOperation, Option<BlobId>)> = blobs.values().filter_map(mark).collect();
    let mut findings = Vec::new();
    for (snapshot, operation, clone) in marked {
        let has_other_clones = || {
            blobs.values().any(|blob| Some(blob.id) != clone && blob.parent == BlobParent::Snapshot(snapshot))
        };
        let is_parent = clone
            .and_then(|clone| blobs.get(&clone))
            .map(|blob| blob.parent == BlobParent::Snapshot(snapshot));
        let (Some(clone), Some(is_parent)) = (clone, is_parent) else {
            findings.push(StoreFinding::Unclear { snapshot, clone });
            continue;
        };
        if is_parent {
            restore(blobs, snapshot, clone, recovery);
        } else if has_other_clones() {
            findings.push(StoreFinding::Unclear { snapshot, clone: Some(clone) });
            continue;
        } else {
            blobs.remove(&snapshot);
            recovery.rewritten.retain(|(blob, _)| *blob != snapshot);
            recovery.removed.extend(snapshot.page());
        }
        let finished = is_parent == (operation == SnapshotOperation::Create);
        findings.push(StoreFinding::Recovered(RecoveredOperation { operation, snapshot, clone, finished }));
    }
    findings
}

/// The snapshot's id, the operation and the clone, if the blob is a snapshot that was being made or deleted.
fn mark(blob: &Blob) -> Option<(BlobId, SnapshotOperation, Option<BlobId>)> {
    let find = |name, operation| blob.internal_xattr(name).map(|value| (operation, value));
    let (operation, value) = find(XATTR_SNAPSHOT_PENDING_REMOVAL, SnapshotOperation::Delete)
        .or_else(|| find(XATTR_SNAPSHOT_IN_PROGRESS, SnapshotOperation::Create))?;
    let clone = <[u8; 8]>::try_from(value).ok().map(|id| BlobId(u64::from_le_bytes(id)));
    Some((blob.id, operation, clone.filter(|clone| *clone != blob.id)))
}

/// Makes the snapshot an ordinary one. A deletion may have written clusters into the clone's extent page,
/// which are those of the snapshot.
fn restore(blobs: &mut BTreeMap<BlobId, Blob>, snapshot: BlobId, clone: BlobId, recovery: &mut Recovery) {
    let Some(restored) = blobs.get_mut(&snapshot) else { return };
    let marks = [XATTR_SNAPSHOT_PENDING_REMOVAL, XATTR_SNAPSHOT_IN_PROGRESS];
    restored.internal_xattrs.retain(|xattr| !marks.contains(&&xattr.name[..]));
    restored.flags.data_read_only |= BlobFlags::READ_ONLY;
    let clusters = restored.clusters.clone();
    if let Some(clone) = blobs.get_mut(&clone) {
        let mut changed = BTreeSet::new();
        for (index, cluster) in clusters.iter() {
            if clone.clusters.get(index) == Some(cluster) {
                clone.clusters.set(index, None);
                changed.insert(index / CLUSTERS_PER_EXTENT_PAGE);
            }
        }
        recovery.rewrite(clone.id, changed.into_iter());
    }
    // After the clone: until then, the snapshot has the mark that says so.
    match recovery.rewritten.iter().position(|(blob, _)| *blob == snapshot) {
        Some(at) => {
            let last = recovery.rewritten.remove(at);
            recovery.rewritten.push(last);
        }
        None => recovery.rewritten.push((snapshot, BTreeSet::new())),
    }
}
