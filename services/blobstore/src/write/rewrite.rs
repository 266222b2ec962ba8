//! Pages of blobs: new ones, and first pages that are replaced.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use wire_blob::{BlobId, CopyTarget, Xattr};

use super::change::{ChangeError, ClearMethod};
use super::device::StoreAction;
use super::fault::Fault;
use super::plan::{Plan, Step, Update};
use super::{OpenBlobStore, encode};
use crate::blob::Blob;

/// The first page of a blob, when all that it names is planned to be written.
pub(super) struct FirstPage {
    page: u32,
    content: Vec<u8>,
}

impl FirstPage {
    fn target(&self) -> CopyTarget {
        CopyTarget::Page(self.page)
    }

    /// Plans to write the page where none is.
    pub(super) fn write(self, store: &OpenBlobStore) -> Step {
        Step::Io(vec![store.page_write(self.page, self.content)])
    }

    /// Plans a copy of the page, which is on the device when the page is replaced.
    pub(super) fn copy(&self) -> Step {
        Step::Copy(self.target(), self.content.clone())
    }

    /// Plans to replace the page.
    pub(super) fn replace(self) -> [Step; 3] {
        [Step::Commit, Step::InPlace(self.target(), self.content), Step::Barrier]
    }
}

impl OpenBlobStore {
    /// Takes a page that is not the first of a blob. An extent table has 0 where there is no page, so that
    /// page 0 is only a first one; it is free in stores without a super blob.
    pub(super) fn take_page(&mut self, plan: &mut Plan) -> Result<u32, ChangeError> {
        self.take_page_from(plan, 1)
    }

    fn take_page_from(&mut self, plan: &mut Plan, first: u32) -> Result<u32, ChangeError> {
        let page = self.pages.take_from(first).ok_or(ChangeError::NoPages)?;
        plan.pages.push(page);
        Ok(page)
    }

    /// Takes clusters.
    pub(super) fn take_clusters(&mut self, plan: &mut Plan, count: u32) -> Result<Vec<u32>, ChangeError> {
        let too_few = ChangeError::NoClusters { need: count, free: self.clusters.free() };
        if count > self.clusters.free() {
            return Err(too_few);
        }
        let mut clusters = Vec::new();
        for _ in 0..count {
            clusters.push(self.clusters.take().ok_or(too_few.clone())?);
        }
        plan.clusters.extend_from_slice(&clusters);
        Ok(clusters)
    }

    pub(super) fn page_write(&self, page: u32, data: Vec<u8>) -> StoreAction {
        StoreAction::Write { offset: self.published.layout.page_offset(page), data }
    }

    /// Plans all pages of a blob but its first. Those after it in the chain are always new ones. An extent
    /// page of `sources` is used again if it is what the blob needs, except those of `forced`.
    pub(super) fn plan_pages(
        &mut self,
        plan: &mut Plan,
        blob: &mut Blob,
        sources: &[&Blob],
        forced: &BTreeSet<u32>,
    ) -> Result<FirstPage, ChangeError> {
        let mut writes: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
        blob.extent_pages.clear();
        if blob.has_extent_table {
            for index in blob.clusters.chunks() {
                let Some(entries) = blob.clusters.extents(index) else { continue };
                let existing = sources.iter().filter(|_| !forced.contains(&index)).find_map(|source| {
                    let page = source.extent_page(index)?;
                    let is_same = source.clusters.shares(&blob.clusters, index)
                        || source.clusters.extents(index) == Some(entries);
                    is_same.then_some(page)
                });
                let page = match existing {
                    Some(page) => page,
                    None => {
                        let page = self.take_page(plan)?;
                        writes.insert(page, encode::extent_page(blob.id, index, entries)?);
                        page
                    }
                };
                blob.extent_pages.push((index, page));
            }
        }
        let first = blob.id.page().ok_or(ChangeError::NoBlob(blob.id))?;
        if self.has_fault(Fault::ExternalNameLost) {
            remove_xattr(&mut blob.internal_xattrs, wire_blob::XATTR_EXTERNAL_SNAPSHOT);
        }
        let chain = encode::chain(blob)?;
        blob.pages = vec![first];
        for _ in 1..chain.len() {
            blob.pages.push(self.take_page(plan)?);
        }
        let mut content = Vec::new();
        for (sequence, descriptors) in chain.into_iter().enumerate() {
            let next = blob.pages.get(sequence + 1).copied();
            let page = encode::page(blob.id, sequence as u32, descriptors, next)?;
            match sequence {
                0 => content = page,
                _ => drop(writes.insert(blob.pages[sequence], page)),
            }
        }
        plan.add(Step::Groups(writes.keys().copied().chain([first]).collect()));
        let writes = writes.into_iter().map(|(page, content)| self.page_write(page, content));
        plan.add(Step::Io(writes.collect()));
        Ok(FirstPage { page: first, content })
    }

    /// Plans a new blob, whose first page is written last.
    pub(super) fn plan_new(&mut self, plan: &mut Plan, mut blob: Blob) -> Result<(), ChangeError> {
        let first = self.plan_pages(plan, &mut blob, &[], &BTreeSet::new())?;
        plan.add(Step::Barrier);
        plan.add(Step::Commit);
        plan.add(first.write(self));
        plan.add(Step::Barrier);
        plan.publish([Update::Set(Arc::new(blob))]);
        Ok(())
    }

    /// Plans to replace a blob by another state of it; `freed` are clusters that only the old one has.
    pub(super) fn plan_changed(
        &mut self,
        plan: &mut Plan,
        old: &Blob,
        mut new: Blob,
        freed: Vec<u32>,
    ) -> Result<(), ChangeError> {
        let first = self.plan_pages(plan, &mut new, &[old], &BTreeSet::new())?;
        plan.add(first.copy());
        // This page names cluster maps of first writes, which may be acknowledged and not durable yet.
        plan.add(Step::Flush);
        plan.extend(first.replace());
        let pages = freed_pages(&[old], &[&new]);
        plan.publish([Update::Set(Arc::new(new))]);
        plan.free(pages, freed, old.clear_method());
        Ok(())
    }

    /// The first page of a new blob, and its id.
    pub(super) fn take_id(&mut self, plan: &mut Plan) -> Result<BlobId, ChangeError> {
        self.take_page_from(plan, 0).map(BlobId::from_page)
    }
}

/// The pages that blobs had and do not have any more.
pub(super) fn freed_pages(before: &[&Blob], after: &[&Blob]) -> Vec<u32> {
    let used: BTreeSet<u32> = after.iter().flat_map(|blob| blob.all_pages()).collect();
    let freed: BTreeSet<u32> = before.iter().flat_map(|blob| blob.all_pages()).collect();
    freed.difference(&used).copied().collect()
}

/// Sets an attribute, or replaces it where it is.
pub(super) fn set_xattr(xattrs: &mut Vec<Xattr>, name: &[u8], value: &[u8]) {
    match xattrs.iter_mut().find(|xattr| xattr.name == name) {
        Some(xattr) => xattr.value = value.to_vec(),
        None => xattrs.push(Xattr { name: name.to_vec(), value: value.to_vec() }),
    }
}

pub(super) fn remove_xattr(xattrs: &mut Vec<Xattr>, name: &[u8]) {
    xattrs.retain(|xattr| xattr.name != name);
}

/// The flags of a clear method.
pub(super) fn clear_flags(method: ClearMethod) -> u64 {
    method as u64
}
