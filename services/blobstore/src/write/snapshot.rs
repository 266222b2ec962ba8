//! Snapshots, clones and parents.

use std::collections::BTreeSet;
use std::sync::Arc;

use wire_blob::{
    BlobFlags, BlobId, XATTR_EXTERNAL_SNAPSHOT, XATTR_SNAPSHOT, XATTR_SNAPSHOT_IN_PROGRESS,
    XATTR_SNAPSHOT_PENDING_REMOVAL, Xattr,
};

use super::OpenBlobStore;
use super::change::{ChangeError, ChangeOutcome};
use super::fault::Fault;
use super::plan::{Plan, Step, Update};
use super::rewrite::{freed_pages, remove_xattr, set_xattr};
use crate::blob::{Blob, BlobParent};
use crate::cluster_map::BlobClusterMap;

/// Makes `parent` the parent of a blob.
pub(super) fn set_parent(blob: &mut Blob, parent: BlobParent) {
    remove_xattr(&mut blob.internal_xattrs, XATTR_SNAPSHOT);
    remove_xattr(&mut blob.internal_xattrs, XATTR_EXTERNAL_SNAPSHOT);
    blob.flags.invalid &= !BlobFlags::EXTERNAL_SNAPSHOT;
    match &parent {
        BlobParent::None => {}
        BlobParent::Snapshot(id) => {
            set_xattr(&mut blob.internal_xattrs, XATTR_SNAPSHOT, &id.0.to_le_bytes());
        }
        BlobParent::External(name) => {
            set_xattr(&mut blob.internal_xattrs, XATTR_EXTERNAL_SNAPSHOT, name);
            blob.flags.invalid |= BlobFlags::EXTERNAL_SNAPSHOT;
        }
    }
    blob.parent = parent;
}

/// A thin blob without clusters of its own.
fn clone_of(id: BlobId, clusters: u32, flags: u64, xattrs: Vec<Xattr>, parent: BlobParent) -> Blob {
    let mut blob = Blob::new(id);
    blob.has_extent_table = true;
    blob.flags.invalid = BlobFlags::THIN;
    blob.flags.metadata_read_only = flags;
    blob.clusters = BlobClusterMap::new(clusters);
    blob.xattrs = xattrs;
    set_parent(&mut blob, parent);
    blob
}

impl OpenBlobStore {
    pub(super) fn plan_clone(
        &mut self,
        plan: &mut Plan,
        of: BlobId,
        xattrs: Vec<Xattr>,
    ) -> Result<(), ChangeError> {
        let parent = self.find(of)?;
        if !parent.is_read_only() {
            return Err(ChangeError::Invalid("only a read-only blob can be cloned"));
        }
        let flags = parent.flags.metadata_read_only & BlobFlags::CLEAR_METHOD;
        let id = self.take_id(plan)?;
        plan.outcome = Some(ChangeOutcome::Blob(id));
        let length = parent.clusters.length();
        self.plan_new(plan, clone_of(id, length, flags, xattrs, BlobParent::Snapshot(of)))
    }

    pub(super) fn plan_clone_external(
        &mut self,
        plan: &mut Plan,
        name: Vec<u8>,
        clusters: u32,
        xattrs: Vec<Xattr>,
    ) -> Result<(), ChangeError> {
        let id = self.take_id(plan)?;
        plan.outcome = Some(ChangeOutcome::Blob(id));
        self.plan_new(plan, clone_of(id, clusters, 0, xattrs, BlobParent::External(name)))
    }

    /// The snapshot gets the clusters of the original, and says that it is not valid yet. The original
    /// becomes its clone: from then on it is. Writes wait for that write alone.
    pub(super) fn plan_snapshot(
        &mut self,
        plan: &mut Plan,
        blob: BlobId,
        xattrs: Vec<Xattr>,
    ) -> Result<(), ChangeError> {
        let old = self.find(blob)?;
        if old.flags.is_metadata_read_only() {
            return Err(ChangeError::Invalid("a read-only blob needs no snapshot"));
        }
        let id = self.take_id(plan)?;
        plan.outcome = Some(ChangeOutcome::Blob(id));
        let mut snapshot = Blob { id, xattrs, ..old.clone() };
        let mark = XATTR_SNAPSHOT_IN_PROGRESS;
        if !self.has_fault(Fault::SnapshotNotMarked) {
            set_xattr(&mut snapshot.internal_xattrs, mark, &old.id.0.to_le_bytes());
        }
        let first = self.plan_pages(plan, &mut snapshot, &[&old], &BTreeSet::new())?;
        plan.add(first.copy());
        plan.add(Step::Barrier);
        plan.extend(first.replace());

        let mut clone = old.clone();
        clone.flags.invalid |= BlobFlags::THIN;
        clone.clusters = BlobClusterMap::new(old.clusters.length());
        set_parent(&mut clone, BlobParent::Snapshot(id));
        let first = self.plan_pages(plan, &mut clone, &[], &BTreeSet::new())?;
        plan.extend([first.copy(), Step::Barrier, Step::Pause(blob)]);
        plan.extend(first.replace());

        let marked = snapshot.clone();
        remove_xattr(&mut snapshot.internal_xattrs, mark);
        snapshot.flags.data_read_only |= BlobFlags::READ_ONLY;
        let first = self.plan_pages(plan, &mut snapshot, &[&marked], &BTreeSet::new())?;
        // With the id that will be on the device soon: nothing changes the snapshot in between.
        plan.publish([Update::Set(Arc::new(snapshot.clone())), Update::Set(Arc::new(clone.clone()))]);
        plan.add(Step::Resume(blob));
        plan.extend([first.copy(), Step::Barrier]);
        plan.extend(first.replace());
        let pages = freed_pages(&[&old, &marked], &[&snapshot, &clone]);
        plan.free(pages, Vec::new(), old.clear_method());
        Ok(())
    }

    /// Plans the end of a snapshot with one clone, which gets what it lacks.
    pub(super) fn plan_merge(
        &mut self,
        plan: &mut Plan,
        snapshot: BlobId,
        clone: BlobId,
    ) -> Result<(), ChangeError> {
        let (old, old_clone) = (self.find(snapshot)?, self.find(clone)?);
        let first_page = snapshot.page().ok_or(ChangeError::NoBlob(snapshot))?;
        check_end(&old_clone, &old)?;
        let mut marked = old.clone();
        let mark = XATTR_SNAPSHOT_PENDING_REMOVAL;
        if !self.has_fault(Fault::RemovalNotMarked) {
            set_xattr(&mut marked.internal_xattrs, mark, &clone.0.to_le_bytes());
        }
        let first = self.plan_pages(plan, &mut marked, &[&old], &BTreeSet::new())?;
        plan.extend([first.copy(), Step::Barrier]);
        plan.extend(first.replace());

        let mut new = old_clone.clone();
        let mut freed = Vec::new();
        for (index, cluster) in old.clusters.iter() {
            match index < new.clusters.length() && new.clusters.get(index).is_none() {
                true => drop(new.clusters.set(index, Some(cluster))),
                false => freed.push(cluster),
            }
        }
        set_parent(&mut new, old.parent.clone());
        let first = self.plan_pages(plan, &mut new, &[&old_clone, &old], &BTreeSet::new())?;
        plan.extend([first.copy(), Step::Barrier]);
        plan.extend(first.replace());
        plan.publish([Update::Set(Arc::new(new.clone())), Update::Remove(snapshot)]);
        let zeroes = vec![0; wire_blob::PAGE_BYTES];
        plan.extend([Step::InPlace(wire_blob::CopyTarget::Page(first_page), zeroes), Step::Barrier]);
        plan.free(freed_pages(&[&old, &marked, &old_clone], &[&new]), freed, old.clear_method());
        Ok(())
    }

    pub(super) fn plan_set_parent(
        &mut self,
        plan: &mut Plan,
        blob: BlobId,
        parent: BlobParent,
    ) -> Result<(), ChangeError> {
        let old = self.find(blob)?;
        if old.parent == parent {
            return Err(ChangeError::Exists);
        }
        if !old.is_thin() {
            return Err(ChangeError::Invalid("the blob is not thin"));
        }
        if let BlobParent::Snapshot(id) = parent {
            let found = self.find(id)?;
            if !found.is_read_only() {
                return Err(ChangeError::Invalid("the parent is not read-only"));
            }
            if found.clusters.length() != old.clusters.length() {
                return Err(ChangeError::Invalid("the parent has another size"));
            }
            if self.is_ancestor(blob, id) {
                return Err(ChangeError::Invalid("the parent would be a clone of itself"));
            }
        }
        let mut new = old.clone();
        set_parent(&mut new, parent);
        self.plan_changed(plan, &old, new, Vec::new())
    }

    /// Whether a blob is another, or one of its ancestors.
    fn is_ancestor(&self, ancestor: BlobId, of: BlobId) -> bool {
        let mut next = Some(of);
        // No more steps than blobs: the metadata of others may have a circle.
        for _ in 0..=self.published.blobs.len() {
            let Some(id) = next else { return false };
            if id == ancestor {
                return true;
            }
            next = match self.published.blob(id).map(Blob::parent) {
                Some(BlobParent::Snapshot(parent)) => Some(*parent),
                _ => None,
            };
        }
        true
    }

    /// The clusters that a blob needs to be inflated, or to lose its direct parent.
    pub(super) fn missing_clusters(&self, blob: &Blob, inflate: bool) -> Result<Vec<u32>, ChangeError> {
        let missing = |index: &u32| blob.clusters.get(*index).is_none();
        let all = || (0..blob.clusters.length()).filter(missing).collect();
        match &blob.parent {
            BlobParent::None if inflate => Ok(all()),
            BlobParent::None => Err(ChangeError::Invalid("the blob has no parent")),
            BlobParent::External(_) => Ok(all()),
            BlobParent::Snapshot(_) if inflate => Ok(all()),
            BlobParent::Snapshot(parent) => {
                let parent = self.find(*parent)?;
                check_end(blob, &parent)?;
                let own = parent.clusters.iter().map(|(index, _)| index);
                Ok(own.filter(|index| *index < blob.clusters.length()).filter(missing).collect())
            }
        }
    }

    /// Plans the last write of an inflation, when all clusters are there.
    pub(super) fn plan_inflated(
        &mut self,
        plan: &mut Plan,
        blob: BlobId,
        inflate: bool,
    ) -> Result<(), ChangeError> {
        let old = self.find(blob)?;
        if !self.missing_clusters(&old, inflate)?.is_empty() {
            return Err(ChangeError::Invalid("the blob or its parent was changed at the same time"));
        }
        let mut new = old.clone();
        let parent = match &old.parent {
            BlobParent::Snapshot(parent) if !inflate => self.find(*parent)?.parent,
            _ => BlobParent::None,
        };
        set_parent(&mut new, parent);
        if inflate {
            new.flags.invalid &= !BlobFlags::THIN;
        }
        self.plan_changed(plan, &old, new, Vec::new())
    }
}

/// A clone that is larger than its snapshot reads zeroes beyond it. With the snapshot's parent as its own, it
/// would read that.
fn check_end(clone: &Blob, snapshot: &Blob) -> Result<(), ChangeError> {
    let end = snapshot.clusters.length();
    let is_larger = (end..clone.clusters.length()).any(|index| clone.clusters.get(index).is_none());
    match is_larger && snapshot.parent != BlobParent::None {
        true => Err(ChangeError::Invalid("the clone is larger than its snapshot, which has a parent")),
        false => Ok(()),
    }
}
