//! Changes of one blob.

use std::collections::BTreeMap;

use wire_blob::{BlobFlags, BlobId, CLUSTERS_PER_EXTENT_PAGE, CopyTarget, PAGE_BYTES, Xattr};

use super::change::{ChangeError, ChangeOutcome, ClearMethod};
use super::plan::{Plan, Step, Update};
use super::rewrite::{clear_flags, remove_xattr, set_xattr};
use super::{OpenBlobStore, encode};
use crate::blob::{Blob, BlobParent};
use crate::cluster_map::BlobClusterMap;

impl OpenBlobStore {
    /// A blob that can be used.
    pub(super) fn find(&self, blob: BlobId) -> Result<Blob, ChangeError> {
        self.published.blob(blob).cloned().ok_or(ChangeError::NoBlob(blob))
    }

    /// A blob whose metadata may be changed.
    pub(super) fn find_writable(&self, blob: BlobId) -> Result<Blob, ChangeError> {
        let found = self.find(blob)?;
        match found.flags.is_metadata_read_only() {
            false => Ok(found),
            true => Err(ChangeError::ReadOnly(blob)),
        }
    }

    pub(super) fn plan_create(
        &mut self,
        plan: &mut Plan,
        thin: bool,
        clusters: u32,
        clear: ClearMethod,
        xattrs: Vec<Xattr>,
    ) -> Result<(), ChangeError> {
        let mut blob = Blob::new(self.take_id(plan)?);
        blob.has_extent_table = true;
        blob.flags.invalid = if thin { BlobFlags::THIN } else { 0 };
        blob.flags.metadata_read_only = clear_flags(clear);
        blob.clusters = BlobClusterMap::new(clusters);
        blob.xattrs = xattrs;
        if !thin {
            for (index, cluster) in (0..clusters).zip(self.take_clusters(plan, clusters)?) {
                blob.clusters.set(index, Some(cluster));
            }
        }
        plan.outcome = Some(ChangeOutcome::Blob(blob.id));
        self.plan_new(plan, blob)
    }

    /// The size is in the first page alone: the extent page with the end of the blob is a new one.
    pub(super) fn plan_resize(
        &mut self,
        plan: &mut Plan,
        blob: BlobId,
        clusters: u32,
    ) -> Result<(), ChangeError> {
        let old = self.find_writable(blob)?;
        let length = old.clusters.length();
        let mut new = old.clone();
        let mut freed = Vec::new();
        if clusters < length {
            freed.extend(
                old.clusters.iter().filter(|(index, _)| *index >= clusters).map(|(_, cluster)| cluster),
            );
            new.clusters.truncate(clusters);
        } else {
            let more = clusters - length;
            let too_large = ChangeError::Invalid("the blob would be larger than a blob can be");
            new.clusters.extend(more).ok_or(too_large)?;
            if !old.is_thin() {
                for (index, cluster) in (length..).zip(self.take_clusters(plan, more)?) {
                    new.clusters.set(index, Some(cluster));
                }
            }
        }
        match clusters == length {
            true => Ok(()),
            false => self.plan_changed(plan, &old, new, freed),
        }
    }

    pub(super) fn plan_xattrs(
        &mut self,
        plan: &mut Plan,
        blob: BlobId,
        set: &[Xattr],
        remove: &[Vec<u8>],
    ) -> Result<(), ChangeError> {
        let old = self.find_writable(blob)?;
        let mut new = old.clone();
        remove.iter().for_each(|name| remove_xattr(&mut new.xattrs, name));
        set.iter().for_each(|xattr| set_xattr(&mut new.xattrs, &xattr.name, &xattr.value));
        match new.xattrs == old.xattrs {
            true => Ok(()),
            false => self.plan_changed(plan, &old, new, Vec::new()),
        }
    }

    pub(super) fn plan_read_only(&mut self, plan: &mut Plan, blob: BlobId) -> Result<(), ChangeError> {
        let old = self.find(blob)?;
        let mut new = old.clone();
        new.flags.data_read_only |= BlobFlags::READ_ONLY;
        match new.flags == old.flags {
            true => Ok(()),
            false => self.plan_changed(plan, &old, new, Vec::new()),
        }
    }

    /// Plans the end of a blob without clones: the first page, and only then the others.
    pub(super) fn plan_delete(&mut self, plan: &mut Plan, old: &Blob) -> Result<(), ChangeError> {
        let first = old.id.page().ok_or(ChangeError::NoBlob(old.id))?;
        // Half of a page of zeroes is no first page, and no blob is the new state: a copy is not needed.
        plan.extend([
            Step::Commit,
            Step::InPlace(CopyTarget::Page(first), vec![0; PAGE_BYTES]),
            Step::Barrier,
        ]);
        plan.publish([Update::Remove(old.id)]);
        let clusters = old.clusters.iter().map(|(_, cluster)| cluster).collect();
        plan.free(old.all_pages().collect(), clusters, old.clear_method());
        Ok(())
    }

    /// Frees clusters of a thin blob. Extent pages are replaced in place, one after another: each is as
    /// it was or as it is to be, which is all that unmap promises.
    pub(super) fn plan_release(
        &mut self,
        plan: &mut Plan,
        blob: BlobId,
        clusters: std::ops::Range<u32>,
    ) -> Result<(), ChangeError> {
        let old = self.find(blob)?;
        if old.is_read_only() {
            return Err(ChangeError::ReadOnly(blob));
        }
        if !old.is_thin() || *old.parent() != BlobParent::None {
            return Err(ChangeError::NotReleased);
        }
        let mut new = old.clone();
        let released: BTreeMap<u32, u32> =
            old.clusters.iter().filter(|(index, _)| clusters.contains(index)).collect();
        for index in released.keys() {
            new.clusters.set(*index, None);
        }
        if released.is_empty() {
            return Ok(());
        }
        let freed: Vec<u32> = released.into_values().collect();
        if !old.has_extent_table {
            return self.plan_changed(plan, &old, new, freed);
        }
        for (index, page) in old.extent_pages.iter().copied() {
            if old.clusters.extents(index) != new.clusters.extents(index) {
                self.plan_extent_in_place(plan, &new, index, page, [Step::Barrier])?;
            }
        }
        plan.add(Step::Barrier);
        plan.publish([Update::Set(new.into())]);
        plan.free(Vec::new(), freed, old.clear_method());
        Ok(())
    }

    /// Plans to replace an extent page in place, when its copy and what was written before are durable by
    /// `barrier`.
    pub(super) fn plan_extent_in_place(
        &mut self,
        plan: &mut Plan,
        blob: &Blob,
        index: u32,
        page: u32,
        barrier: impl IntoIterator<Item = Step>,
    ) -> Result<(), ChangeError> {
        let left = blob.clusters.length() - index * CLUSTERS_PER_EXTENT_PAGE;
        let empty = vec![0; left.min(CLUSTERS_PER_EXTENT_PAGE) as usize];
        let entries = blob.clusters.extents(index).unwrap_or(&empty);
        let (target, content) = (CopyTarget::Page(page), encode::extent_page(blob.id, index, entries)?);
        plan.add(Step::Copy(target, content.clone()));
        plan.extend(barrier);
        plan.extend([Step::Commit, Step::InPlace(target, content)]);
        Ok(())
    }
}
