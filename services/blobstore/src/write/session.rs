//! The super block and the masks: new stores, the first change, recovery, unloading.

use std::collections::BTreeSet;
use std::sync::Arc;

use wire_blob::{
    BitMask, BlobId, ChecksumsMark, CopyTarget, FORMAT_VERSION, MaskKind, PAGE_BYTES, PageRange, SuperBlock,
};

use super::OpenBlobStore;
use super::change::{BlobStoreFormat, ChangeError, ClearMethod};
use super::device::{BlobStoreDevice, StoreAction};
use super::fault::Fault;
use super::plan::{Plan, Step, Update};
use super::rewrite::freed_pages;
use crate::blob::Blob;
use crate::layout::BlobStoreLayout;
use crate::load::{copy_places, group_places, mark_place};

/// Bytes of the largest metadata page that a store is made with.
const PAGE_BYTES_MAX: u32 = 65536;
/// Bytes of one I/O that clears a new store.
const CLEAR_BYTES_MAX: u64 = 1 << 30;

/// The super block of a new store. The sizes are SPDK's.
pub(super) fn new_super_block(
    options: &BlobStoreFormat,
    device: &BlobStoreDevice,
) -> Result<SuperBlock, ChangeError> {
    let (cluster_bytes, page_bytes) = (options.cluster_bytes, options.metadata_page_bytes);
    let is_page = page_bytes.is_power_of_two() && (PAGE_BYTES as u32..=PAGE_BYTES_MAX).contains(&page_bytes);
    if !is_page || !page_bytes.is_multiple_of(device.block_bytes) {
        return Err(ChangeError::Invalid("the metadata page is no power of two from 4096 to 65536"));
    }
    let is_cluster = cluster_bytes >= page_bytes
        && cluster_bytes.is_multiple_of(page_bytes)
        && cluster_bytes.is_multiple_of(device.block_bytes);
    if !is_cluster {
        return Err(ChangeError::Invalid("the cluster is no multiple of the metadata page"));
    }
    let clusters = device.bytes / u64::from(cluster_bytes);
    let clusters =
        u32::try_from(clusters).map_err(|_| ChangeError::Invalid("there are too many clusters"))?;
    if clusters == 0 {
        return Err(ChangeError::NoClusters { need: 1, free: 0 });
    }
    let pages = u64::from(clusters) * u64::from(options.metadata_pages_percent) / 100;
    let pages = u32::try_from(pages).map_err(|_| ChangeError::NoPages)?;
    if pages == 0 {
        return Err(ChangeError::Invalid("the store would have no metadata page"));
    }
    let mask_pages = |bits: u32| BitMask::encoded_bytes(bits).div_ceil(page_bytes.into()) as u32;
    let mut used_pages = PageRange { start: 1, pages: mask_pages(pages) };
    if options.checksums.is_some() && mark_place(used_pages, pages, page_bytes.into()).is_none() {
        used_pages.pages += 1;
    }
    // Where the device grows, the mask may take what a mask of metadata pages would.
    let used_clusters = PageRange { start: 1 + used_pages.pages, pages: mask_pages(clusters) };
    let reserved = used_clusters.pages.max(mask_pages(pages));
    let used_blob_ids = PageRange { start: used_clusters.start + reserved, pages: mask_pages(pages) };
    let metadata = PageRange { start: used_blob_ids.start + used_blob_ids.pages, pages };
    Ok(SuperBlock {
        version: FORMAT_VERSION,
        clean: false,
        super_blob: options.super_blob.as_ref().map(|_| BlobId::from_page(0)),
        cluster_bytes,
        used_pages,
        used_clusters,
        used_blob_ids: Some(used_blob_ids),
        metadata,
        store_type: options.store_type,
        size_bytes: Some(device.bytes),
        io_unit_bytes: device.block_bytes,
        metadata_page_bytes: page_bytes,
    })
}

impl OpenBlobStore {
    fn super_block_steps(&self, super_block: &SuperBlock) -> Vec<Step> {
        let content = super_block.encode().to_vec();
        vec![
            Step::Copy(CopyTarget::SuperBlock, content.clone()),
            Step::Barrier,
            Step::Commit,
            Step::InPlace(CopyTarget::SuperBlock, content),
            Step::Barrier,
        ]
    }

    /// Plans a new store: nothing is one before its super block, which is written last.
    pub(super) fn plan_format(
        &mut self,
        plan: &mut Plan,
        options: &BlobStoreFormat,
    ) -> Result<(), ChangeError> {
        let super_block = self.published.super_block.clone();
        let layout = self.published.layout.clone();
        let zeroes = |offset, bytes| StoreAction::WriteZeroes { offset, bytes };
        plan.extend([Step::Io(vec![zeroes(0, PAGE_BYTES as u64)]), Step::Barrier]);
        let metadata_end = super_block.metadata.end() * u64::from(layout.page_bytes);
        let mut actions = vec![zeroes(0, metadata_end)];
        let mut offset = layout.cluster_offset(layout.metadata_clusters);
        let end = layout.cluster_offset(layout.clusters);
        while offset < end && options.clear != ClearMethod::None {
            let bytes = CLEAR_BYTES_MAX.min(end - offset);
            actions.push(match options.clear {
                ClearMethod::WriteZeroes => zeroes(offset, bytes),
                _ => StoreAction::Deallocate { offset, bytes },
            });
            offset += bytes;
        }
        plan.extend([Step::Io(actions), Step::Barrier]);
        let mut updates = Vec::new();
        if let Some(xattrs) = &options.super_blob {
            let mut blob = Blob::new(self.take_id(plan)?);
            blob.has_extent_table = true;
            blob.xattrs = xattrs.clone();
            let first = self.plan_pages(plan, &mut blob, &[], &BTreeSet::new())?;
            plan.add(Step::Barrier);
            plan.add(first.write(self));
            updates.push(Update::Set(Arc::new(blob)));
        }
        plan.extend([Step::Barrier, Step::Commit]);
        let data = super_block.encode().to_vec();
        plan.extend([Step::Io(vec![StoreAction::Write { offset: 0, data }]), Step::Barrier]);
        plan.publish(updates);
        plan.add(Step::Started);
        Ok(())
    }

    fn groups_step(&self) -> Step {
        let places = group_places(&self.published.super_block);
        let writes = places.map(|(part, offset)| {
            let data = self.groups.all()[part as usize].encode().to_vec();
            StoreAction::Write { offset, data }
        });
        Step::Io(writes.collect())
    }

    /// Plans what must be on the device before the first change: the super block says that the masks are not
    /// valid, and what is there instead is.
    pub(super) fn plan_start(&mut self, plan: &mut Plan) {
        let mut super_block = self.published.super_block.clone();
        plan.add(Step::Commit);
        // Also where it was not clean: it may have been half written.
        super_block.clean = self.has_fault(Fault::LeftClean);
        let data = super_block.encode().to_vec();
        plan.extend([Step::Io(vec![StoreAction::Write { offset: 0, data }]), Step::Flush]);
        let recovery = self.published.recovery().clone();
        let removed = recovery.removed.iter().chain(&recovery.torn).copied();
        let used: Vec<u32> = self.pages.used().ones().chain(removed).collect();
        used.iter().for_each(|page| self.groups.mark(*page));
        // A page that was half written is restored while its copy is there.
        let restored =
            recovery.restored.iter().map(|(page, content)| self.page_write(*page, content.clone()));
        plan.extend([Step::Io(restored.collect()), Step::Barrier]);
        plan.extend([self.groups_step(), Step::Barrier]);
        let zeroes = self.slots.offsets();
        let zeroes = zeroes.map(|offset| StoreAction::WriteZeroes { offset, bytes: PAGE_BYTES as u64 });
        plan.extend([Step::Io(zeroes.collect()), Step::Barrier]);
        plan.publish([Update::SuperBlock(super_block)]);
        plan.add(Step::Started);
        self.groups.set_durable();
    }

    /// Plans the writes that recovery decided. Each is one that may be repeated.
    pub(super) fn plan_recovery(&mut self, plan: &mut Plan) -> Result<(), ChangeError> {
        let recovery = self.published.recovery().clone();
        plan.add(Step::Erase(recovery.torn.clone()));
        for page in &recovery.removed {
            let target = CopyTarget::Page(*page);
            plan.extend([Step::InPlace(target, vec![0; PAGE_BYTES]), Step::Barrier]);
        }
        for (blob, extents) in &recovery.rewritten {
            let Ok(old) = self.find(*blob) else { continue };
            let mut new = old.clone();
            let first = self.plan_pages(plan, &mut new, &[&old], extents)?;
            plan.extend([first.copy(), Step::Barrier]);
            plan.extend(first.replace());
            let freed = freed_pages(&[&old], &[&new]);
            plan.publish([Update::Set(Arc::new(new))]);
            plan.free(freed, Vec::new(), ClearMethod::None);
        }
        plan.add(Step::Started);
        Ok(())
    }

    pub(super) fn plan_super_blob(
        &mut self,
        plan: &mut Plan,
        blob: Option<BlobId>,
    ) -> Result<(), ChangeError> {
        if let Some(blob) = blob {
            self.find(blob)?;
        }
        let super_block = SuperBlock { super_blob: blob, ..self.published.super_block.clone() };
        plan.extend(self.super_block_steps(&super_block));
        plan.publish([Update::SuperBlock(super_block)]);
        Ok(())
    }

    /// Plans a larger store.
    pub(super) fn plan_grow(&mut self, plan: &mut Plan, device_bytes: u64) -> Result<(), ChangeError> {
        let old = &self.published.super_block;
        let layout = &self.published.layout;
        let too_small = ChangeError::Invalid("the device is smaller than the store");
        if device_bytes < layout.store_bytes {
            return Err(too_small);
        }
        let clusters = device_bytes / u64::from(layout.cluster_bytes);
        let clusters =
            u32::try_from(clusters).map_err(|_| ChangeError::Invalid("there are too many clusters"))?;
        if clusters == layout.clusters {
            return Ok(());
        }
        let pages = BitMask::encoded_bytes(clusters).div_ceil(layout.page_bytes.into()) as u32;
        let next = old.used_blob_ids.map_or(old.metadata.start, |mask| mask.start);
        let next = if next > old.used_clusters.start { next } else { old.metadata.start };
        let reserved = next.saturating_sub(old.used_clusters.start);
        if pages > reserved {
            // SPDK's answer is ENOSPC too.
            return Err(ChangeError::NoPages);
        }
        let mut super_block = old.clone();
        super_block.used_clusters.pages = pages;
        super_block.size_bytes = Some(device_bytes);
        BlobStoreLayout::new(&super_block, device_bytes).map_err(|_| too_small)?;
        self.device.bytes = device_bytes;
        plan.extend(self.super_block_steps(&super_block));
        plan.publish([Update::SuperBlock(super_block)]);
        Ok(())
    }

    /// Plans masks, and then a clean super block.
    pub(super) fn plan_unload(&mut self, plan: &mut Plan) {
        let old = &self.published.super_block;
        let mut blob_ids = BitMask::new(MaskKind::BlobIds, self.published.layout.pages);
        let ids = self.published.blobs.values().map(Blob::id);
        let ids = ids.chain(self.published.unusable().keys().copied());
        ids.filter_map(BlobId::page).for_each(|page| _ = blob_ids.set(page));
        let mut clusters = self.clusters.used().clone();
        self.uncleared.iter().for_each(|cluster| _ = clusters.clear(*cluster));
        let mut masks = vec![(old.used_pages, self.encode_pages()), (old.used_clusters, clusters.encode())];
        masks.extend(old.used_blob_ids.map(|place| (place, blob_ids.encode())));
        // What others wrote in place may still be only in the device's cache, and has copies in the masks.
        plan.add(Step::Flush);
        plan.add(Step::Commit);
        plan.extend([self.mask_writes(masks), Step::Barrier]);
        let super_block = SuperBlock { clean: true, ..old.clone() };
        let data = super_block.encode().to_vec();
        plan.extend([Step::Io(vec![StoreAction::Write { offset: 0, data }]), Step::Barrier]);
        plan.publish([Update::SuperBlock(super_block)]);
        plan.add(Step::Closed);
    }

    /// Plans the masks of pages and clusters of a store that was unloaded.
    pub(super) fn plan_mark(&mut self, plan: &mut Plan) {
        let old = &self.published.super_block;
        let masks =
            vec![(old.used_pages, self.encode_pages()), (old.used_clusters, self.clusters.used().encode())];
        plan.extend([Step::Commit, self.mask_writes(masks), Step::Barrier, Step::Closed]);
    }

    /// The mask of pages, with the mark of the checksums that the store has.
    fn encode_pages(&self) -> Vec<u8> {
        let (range, layout) = (self.published.super_block.used_pages, &self.published.layout);
        let mut mask = self.pages.used().encode();
        let place = mark_place(range, layout.pages, layout.page_bytes.into());
        if let (Some(id), Some(place)) = (self.groups.checksums(), place) {
            mask.resize(place as usize, 0);
            mask.extend_from_slice(&ChecksumsMark::encode(id));
        }
        mask
    }

    fn mask_writes(&self, masks: Vec<(PageRange, Vec<u8>)>) -> Step {
        let layout = &self.published.layout;
        let writes = masks.into_iter().map(|(place, mut data)| {
            data.resize((u64::from(place.pages) * u64::from(layout.page_bytes)) as usize, 0);
            StoreAction::Write { offset: layout.range_offset(place), data }
        });
        Step::Io(writes.collect())
    }

    pub(super) fn plan_destroy(&mut self, plan: &mut Plan) {
        plan.add(Step::Commit);
        let zeroes = StoreAction::WriteZeroes { offset: 0, bytes: PAGE_BYTES as u64 };
        plan.extend([Step::Io(vec![zeroes]), Step::Barrier, Step::Closed]);
    }

    /// Where copies of pages are.
    pub(super) fn copy_places(super_block: &SuperBlock) -> impl Iterator<Item = u64> + use<> {
        copy_places(super_block)
    }
}
