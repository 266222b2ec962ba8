//! Loading of a store: which reads it takes, and what they make.

use std::collections::{BTreeMap, VecDeque};

use wire_blob::{
    BitMask, ChecksumsId, ChecksumsMark, CopyTarget, DecodeError, MaskKind, PAGE_BYTES, PageCopy, PageGroups,
    PageRange, SuperBlock,
};

use crate::assemble::{PageSet, TornPages};
use crate::finding::{NumberRanges, StoreFinding};
use crate::layout::BlobStoreLayout;
use crate::store::{BlobStore, StoreMasks, build};

/// Bytes of the largest read. Larger ones do not make a device faster.
const READ_BYTES_MAX: u32 = 1 << 20;
/// Reads in flight: with their size, the memory that loading takes besides the store's state.
const READS_MAX: usize = 32;
/// Pages that are not used, between two that are, which are read with both: a read of its own costs more.
const GAP_PAGES_MAX: u32 = 16;

/// How a store is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Read all metadata of a store that was unloaded too, and compare its masks with it.
    pub scan: bool,
    /// Do so, and find what is used by the metadata alone, whether the masks can be used or not. This is the
    /// state that a program would find if the store had not been unloaded.
    pub ignore_masks: bool,
}

/// Why a store cannot be loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The device has no store, or one of another format.
    #[error("there is no blobstore: {0}")]
    SuperBlock(#[from] DecodeError),
    /// The device is smaller than a super block.
    #[error("there is no blobstore: the device has {device_bytes} bytes")]
    NoSuperBlock {
        /// Bytes of the device.
        device_bytes: u64,
    },
    /// The device is smaller than the store.
    #[error("the blobstore has {store_bytes} bytes, but its device only {device_bytes}")]
    DeviceTooSmall {
        /// Bytes of the store.
        store_bytes: u64,
        /// Bytes of the device.
        device_bytes: u64,
    },
    /// More clusters than masks and maps can count.
    #[error("the blobstore has {clusters} clusters, more than the format can count")]
    TooManyClusters {
        /// Clusters.
        clusters: u64,
    },
    /// The metadata is larger than the store.
    #[error("the blobstore has {metadata_bytes} bytes of metadata, but only {store_bytes} in all")]
    MetadataTooLarge {
        /// Bytes from the start of the device to the end of the metadata.
        metadata_bytes: u64,
        /// Bytes of the store.
        store_bytes: u64,
    },
    /// A mask lies beyond the metadata, or is smaller than its number of bits.
    #[error(
        "the mask of used {mask} has {bytes} bytes for {bits} bits, or is not before the end of the metadata"
    )]
    MaskTooSmall {
        /// Which one.
        mask: &'static str,
        /// Bytes of the mask.
        bytes: u64,
        /// Bits that it must have.
        bits: u32,
    },
    /// The device did not read.
    #[error("{length} bytes at {offset} cannot be read")]
    Read {
        /// Where on the device.
        offset: u64,
        /// Bytes.
        length: usize,
    },
}

/// A read that the loader needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetadataRead {
    /// Names the read in [`BlobStoreLoader::complete`].
    pub id: u64,
    /// Where on the device, a multiple of 4096.
    pub offset: u64,
    /// Bytes, a multiple of 4096, at most 1 MiB.
    pub length: usize,
}

#[derive(Clone, Copy, Debug)]
enum Purpose {
    SuperBlock,
    Mask {
        kind: MaskKind,
        at: usize,
    },
    /// A page of a mask of a store that is not clean, which has a copy of a page.
    Copies,
    /// The same with a part of the groups of pages.
    Groups {
        part: u32,
    },
    Pages {
        first: u32,
        page_bytes: u32,
    },
}

/// A range of the device to be read, in one read or in several.
#[derive(Clone, Copy, Debug)]
struct PlannedRange {
    offset: u64,
    length: u64,
    purpose: Purpose,
}

/// What is read: the super block, the masks or what is in their place, then pages until no blob has one that
/// was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    SuperBlock,
    /// The super block was half written: copies of it are looked for where the masks are.
    TornSuperBlock,
    Masks,
    Intent,
    Pages,
    Finished,
}

/// Loads a store, sans-IO.
///
/// It plans reads: [`next_read`](Self::next_read) returns one after the other, as many as may be in flight.
/// Each is completed with its bytes in any order by [`complete`](Self::complete), after which there may be
/// more. [`outcome`](Self::outcome) returns the store when nothing is left to read, or the first error.
///
/// A store that was unloaded costs reads of its masks and of the used pages. Any other, and one of version 1
/// or 2, costs one pass over the metadata region in reads of 1 MiB.
pub struct BlobStoreLoader {
    device_bytes: u64,
    options: LoadOptions,
    phase: Phase,
    super_block: Option<(SuperBlock, BlobStoreLayout)>,
    masks: [Vec<u8>; 3],
    copies: Vec<PageCopy>,
    groups: BTreeMap<u32, PageGroups>,
    /// The checksums that belong to the data, as the last program says that changed the store.
    checksums: Option<ChecksumsId>,
    torn: Option<(SuperBlock, DecodeError)>,
    restored_super_block: bool,
    usable_masks: Option<StoreMasks>,
    pages: PageSet,
    scanned: bool,
    findings: Vec<StoreFinding>,
    planned: VecDeque<PlannedRange>,
    in_flight: BTreeMap<u64, PlannedRange>,
    next_id: u64,
    outcome: Option<Result<BlobStore, LoadError>>,
}

impl BlobStoreLoader {
    /// A loader of the store on a device of this size.
    pub fn new(device_bytes: u64, options: LoadOptions) -> BlobStoreLoader {
        let mut loader = BlobStoreLoader {
            device_bytes,
            options,
            phase: Phase::SuperBlock,
            super_block: None,
            masks: Default::default(),
            copies: Vec::new(),
            groups: BTreeMap::new(),
            checksums: None,
            torn: None,
            restored_super_block: false,
            usable_masks: None,
            pages: PageSet::new(0),
            scanned: false,
            findings: Vec::new(),
            planned: VecDeque::new(),
            in_flight: BTreeMap::new(),
            next_id: 0,
            outcome: None,
        };
        if device_bytes < PAGE_BYTES as u64 {
            loader.finish(Err(LoadError::NoSuperBlock { device_bytes }));
        } else {
            let (length, purpose) = (PAGE_BYTES as u64, Purpose::SuperBlock);
            loader.planned.push_back(PlannedRange { offset: 0, length, purpose });
        }
        loader
    }

    /// A read to begin now; `None` if others must complete first, or nothing is left to read.
    pub fn next_read(&mut self) -> Option<MetadataRead> {
        if self.in_flight.len() == READS_MAX {
            return None;
        }
        let range = self.planned.front_mut()?;
        let read = PlannedRange { length: range.length.min(READ_BYTES_MAX.into()), ..*range };
        if read.length == range.length {
            self.planned.pop_front();
        } else {
            range.offset += read.length;
            range.length -= read.length;
            match &mut range.purpose {
                Purpose::SuperBlock | Purpose::Copies | Purpose::Groups { .. } => {}
                Purpose::Mask { at, .. } => *at += read.length as usize,
                // A read is a whole number of pages: both are powers of two.
                Purpose::Pages { first, page_bytes } => *first += read.length as u32 / *page_bytes,
            }
        }
        let id = self.next_id;
        self.next_id += 1;
        self.in_flight.insert(id, read);
        Some(MetadataRead { id, offset: read.offset, length: read.length as usize })
    }

    /// Completes a read: its bytes, or `None` if the device failed.
    ///
    /// # Panics
    /// If no such read is in flight, or the bytes are more or less than it asked for.
    pub fn complete(&mut self, id: u64, content: Option<&[u8]>) {
        let read = self.in_flight.remove(&id).expect("a read that is in flight");
        if self.phase == Phase::Finished {
            return;
        }
        let PlannedRange { offset, length, purpose } = read;
        let length = length as usize;
        let Some(content) = content else {
            self.finish(Err(LoadError::Read { offset, length }));
            return;
        };
        assert_eq!(content.len(), length, "bytes of the read at {offset}");
        match purpose {
            Purpose::SuperBlock => {
                if let Err(error) = self.super_block(content) {
                    self.finish(Err(error));
                    return;
                }
            }
            Purpose::Mask { kind, at } => self.masks[kind as usize][at..at + length].copy_from_slice(content),
            Purpose::Copies => self.copies.extend(PageCopy::decode(content)),
            Purpose::Groups { part } => {
                let groups = PageGroups::decode(content, part);
                if part == 0 {
                    self.checksums = groups.as_ref().and_then(|groups| groups.checksums);
                }
                self.groups.extend(groups.map(|groups| (part, groups)));
            }
            Purpose::Pages { first, page_bytes } => {
                for (page, content) in (first..).zip(content.chunks_exact(page_bytes as usize)) {
                    self.pages.add(page, content);
                }
            }
        }
        if self.planned.is_empty() && self.in_flight.is_empty() {
            self.advance();
        }
    }

    /// Completes a read of nothing but zeroes, as of a hole of a sparse file.
    ///
    /// # Panics
    /// If no such read is in flight.
    pub fn complete_zeroes(&mut self, id: u64) {
        let read = self.in_flight.get(&id).expect("a read that is in flight");
        let Purpose::Pages { first, page_bytes } = read.purpose else {
            let zeroes = vec![0; read.length as usize];
            return self.complete(id, Some(&zeroes));
        };
        let pages = first..first + (read.length / u64::from(page_bytes)) as u32;
        self.in_flight.remove(&id);
        if self.phase == Phase::Finished {
            return;
        }
        pages.for_each(|page| self.pages.add_empty(page));
        if self.planned.is_empty() && self.in_flight.is_empty() {
            self.advance();
        }
    }

    /// The store, or why it cannot be loaded; `None` while reads are left, and after it was returned.
    pub fn outcome(&mut self) -> Option<Result<BlobStore, LoadError>> {
        self.outcome.take()
    }

    /// Bytes that are still to be read, as far as is known.
    pub fn bytes_left(&self) -> u64 {
        self.planned.iter().chain(self.in_flight.values()).map(|range| range.length).sum()
    }

    fn finish(&mut self, outcome: Result<BlobStore, LoadError>) {
        self.phase = Phase::Finished;
        self.planned.clear();
        self.outcome = Some(outcome);
    }

    fn layout(&self) -> &BlobStoreLayout {
        &self.super_block.as_ref().expect("the super block was read").1
    }

    fn super_block(&mut self, content: &[u8]) -> Result<(), LoadError> {
        let error = match SuperBlock::decode(content) {
            Ok(super_block) => return self.use_super_block(super_block),
            Err(error) => error,
        };
        if let Some(super_block) = SuperBlock::restore(content) {
            self.restored_super_block = true;
            return self.use_super_block(super_block);
        }
        let Ok(torn) = SuperBlock::decode_torn(content) else { return Err(error.into()) };
        // Before and after, the masks are at the same place.
        if BlobStoreLayout::new(&torn, self.device_bytes).is_err() {
            return Err(error.into());
        }
        self.plan_copies(&torn);
        self.torn = Some((torn, error));
        self.phase = Phase::TornSuperBlock;
        Ok(())
    }

    /// Takes the last copy of a super block that was half written. Its sectors before and after are those of
    /// the same store.
    fn copied_super_block(&mut self, torn: &SuperBlock, error: DecodeError) -> Result<(), LoadError> {
        let copies = self.copies.iter().filter(|copy| copy.target == CopyTarget::SuperBlock);
        let last =
            copies.max_by_key(|copy| copy.number).and_then(|copy| SuperBlock::decode(&copy.content).ok());
        let is_same = |copy: &SuperBlock| {
            let place = |block: &SuperBlock| {
                (block.cluster_bytes, block.metadata_page_bytes, block.metadata, block.used_pages.start)
            };
            place(copy) == place(torn)
        };
        match last.filter(is_same) {
            Some(super_block) => {
                self.restored_super_block = true;
                self.use_super_block(SuperBlock { clean: false, ..super_block })
            }
            None => Err(error.into()),
        }
    }

    fn use_super_block(&mut self, super_block: SuperBlock) -> Result<(), LoadError> {
        let layout = BlobStoreLayout::new(&super_block, self.device_bytes)?;
        self.pages = PageSet::new(layout.pages);
        self.super_block = Some((super_block, layout));
        Ok(())
    }

    /// Goes on when the reads of a phase are complete.
    fn advance(&mut self) {
        if let Some((torn, error)) = self.torn.take()
            && let Err(error) = self.copied_super_block(&torn, error)
        {
            self.finish(Err(error));
            return;
        }
        let (super_block, layout) = self.super_block.clone().expect("the super block was read");
        match (self.phase, super_block.used_blob_ids) {
            (Phase::SuperBlock, Some(blob_ids)) if super_block.clean && !self.options.ignore_masks => {
                self.phase = Phase::Masks;
                self.plan_mask(MaskKind::Pages, super_block.used_pages, layout.pages);
                self.plan_mask(MaskKind::Clusters, super_block.used_clusters, layout.clusters);
                self.plan_mask(MaskKind::BlobIds, blob_ids, layout.pages);
                return;
            }
            (Phase::SuperBlock, _) => {
                if !(super_block.clean && self.options.ignore_masks) {
                    self.findings.push(StoreFinding::NotUnloaded);
                }
                self.phase = Phase::Intent;
                self.plan_copies(&super_block);
                self.plan_groups(&super_block);
                return;
            }
            (Phase::TornSuperBlock, _) => {
                self.findings.push(StoreFinding::NotUnloaded);
                self.phase = Phase::Intent;
                self.plan_groups(&super_block);
                return;
            }
            (Phase::Intent, _) => {
                self.phase = Phase::Pages;
                for copy in std::mem::take(&mut self.copies) {
                    self.pages.add_copy(copy);
                }
                match self.has_groups() && !self.options.scan {
                    true => self.plan_used_groups(&layout),
                    false => self.plan_scan(),
                }
            }
            (Phase::Masks, _) => {
                self.usable_masks = self.decode_masks(&layout);
                self.phase = Phase::Pages;
                match &self.usable_masks {
                    Some(masks) if !self.options.scan => {
                        let mut used = masks.pages.clone();
                        used.union(&masks.blob_ids);
                        self.plan_pages(used.ones().collect());
                    }
                    _ => self.plan_scan(),
                }
            }
            (Phase::Pages, _) | (Phase::Finished, _) => {}
        }
        if self.planned.is_empty() {
            self.plan_missing();
        }
        if self.planned.is_empty() {
            let pages = std::mem::replace(&mut self.pages, PageSet::new(0));
            let mut findings = std::mem::take(&mut self.findings);
            let restored: NumberRanges = pages.restored().iter().map(|(page, _)| *page).collect();
            if restored.count() > 0 || self.restored_super_block {
                let super_block = self.restored_super_block;
                findings.push(StoreFinding::Restored { pages: restored, super_block });
            }
            let masks = self.usable_masks.take();
            // Masks say besides which pages are free, and what is not free is not zeroed.
            let by_pages = masks.is_none() && (!super_block.clean || self.options.ignore_masks);
            let torn = if by_pages { pages.torn(self.has_groups()) } else { TornPages::default() };
            let mut store = build(super_block, layout, masks, &pages, self.scanned, torn, findings);
            store.checksums = self.checksums;
            self.finish(Ok(store));
        }
    }

    fn plan_mask(&mut self, kind: MaskKind, range: PageRange, bits: u32) {
        let page_bytes = u64::from(self.layout().page_bytes);
        // The layout has checked that the range is as long.
        let mut bytes = BitMask::encoded_bytes(bits).next_multiple_of(page_bytes);
        if let (MaskKind::Pages, Some(place)) = (kind, mark_place(range, bits, page_bytes)) {
            bytes = place + ChecksumsMark::BYTES as u64;
        }
        self.masks[kind as usize] = vec![0; bytes as usize];
        let offset = self.layout().range_offset(range);
        self.planned.push_back(PlannedRange {
            offset,
            length: bytes,
            purpose: Purpose::Mask { kind, at: 0 },
        });
    }

    /// Whether the store says which pages may be in use: it was not SPDK that changed it last.
    fn has_groups(&self) -> bool {
        let parts = PageGroups::parts(self.layout().pages) as usize;
        self.groups.len() == parts
    }

    /// Plans reads of the pages where copies of pages may be.
    fn plan_copies(&mut self, super_block: &SuperBlock) {
        let places = copy_places(super_block);
        let ranges =
            places.map(|offset| PlannedRange { offset, length: PAGE_BYTES as u64, purpose: Purpose::Copies });
        self.planned.extend(ranges);
    }

    /// Plans reads of the groups of pages that may be in use.
    fn plan_groups(&mut self, super_block: &SuperBlock) {
        for (part, offset) in group_places(super_block) {
            let purpose = Purpose::Groups { part };
            self.planned.push_back(PlannedRange { offset, length: PAGE_BYTES as u64, purpose });
        }
    }

    /// Plans reads of the groups of pages that may be in use.
    fn plan_used_groups(&mut self, layout: &BlobStoreLayout) {
        let groups: Vec<u32> = self
            .groups
            .iter()
            .flat_map(|(part, groups)| {
                groups.groups.ones().map(move |group| part * PageGroups::GROUPS + group)
            })
            .collect();
        self.scanned = true;
        let mut groups = groups.into_iter().peekable();
        while let Some(first) = groups.next() {
            let mut end = first + 1;
            while groups.next_if_eq(&end).is_some() {
                end += 1;
            }
            let first = first.saturating_mul(PageGroups::GROUP_PAGES).min(layout.pages);
            let end = end.saturating_mul(PageGroups::GROUP_PAGES).min(layout.pages);
            if first < end {
                self.plan_range(first, end - first);
            }
        }
    }

    fn decode_masks(&mut self, layout: &BlobStoreLayout) -> Option<StoreMasks> {
        let [pages, clusters, blob_ids] = std::mem::take(&mut self.masks);
        self.checksums =
            pages.last_chunk::<{ ChecksumsMark::BYTES }>().and_then(|end| ChecksumsMark::decode(end));
        let mut decode = |kind, bytes: Vec<u8>, expected: u32| {
            let mut mask = match BitMask::decode(&bytes, kind) {
                Ok(mask) => mask,
                Err(error) => {
                    self.findings.push(StoreFinding::Mask { kind, error });
                    return None;
                }
            };
            // The mask of clusters is written before the super block when a store grows.
            let found = mask.length();
            if found < expected || found > expected && kind != MaskKind::Clusters {
                self.findings.push(StoreFinding::MaskLength { kind, found, expected });
                return None;
            }
            mask.truncate(expected);
            Some(mask)
        };
        let pages = decode(MaskKind::Pages, pages, layout.pages);
        let clusters = decode(MaskKind::Clusters, clusters, layout.clusters);
        let blob_ids = decode(MaskKind::BlobIds, blob_ids, layout.pages);
        Some(StoreMasks { pages: pages?, clusters: clusters?, blob_ids: blob_ids? })
    }

    fn plan_scan(&mut self) {
        self.scanned = true;
        let pages = self.layout().pages;
        self.plan_range(0, pages);
    }

    /// Plans reads of `count` pages from `first` on.
    fn plan_range(&mut self, first: u32, count: u32) {
        let page_bytes = self.layout().page_bytes;
        let length = u64::from(count) * u64::from(page_bytes);
        let offset = self.layout().page_offset(first);
        self.planned.push_back(PlannedRange {
            offset,
            length,
            purpose: Purpose::Pages { first, page_bytes },
        });
    }

    /// Plans reads of these pages, ascending, and of small gaps between them.
    fn plan_pages(&mut self, pages: Vec<u32>) {
        let mut pages = pages.into_iter().peekable();
        while let Some(first) = pages.next() {
            let mut last = first;
            while let Some(next) = pages.next_if(|next| next - last <= GAP_PAGES_MAX) {
                last = next;
            }
            self.plan_range(first, last - first + 1);
        }
    }

    /// Plans reads of pages that blobs have although the mask does not say it.
    fn plan_missing(&mut self) {
        let missing = match &self.usable_masks {
            Some(masks) => self.pages.missing(masks.blob_ids.ones()),
            // All were read.
            None => Vec::new(),
        };
        self.plan_pages(missing);
    }
}

/// Where the mark of checksums is in the mask of pages, in bytes from its start: at the end of the last page
/// of it that is read. `None` if the bits leave no space for it.
pub(crate) fn mark_place(range: PageRange, bits: u32, page_bytes: u64) -> Option<u64> {
    let mark = ChecksumsMark::BYTES as u64;
    let end = (BitMask::encoded_bytes(bits) + mark).next_multiple_of(page_bytes);
    (end <= u64::from(range.pages) * page_bytes).then(|| end - mark)
}

/// Copies of pages in each mask. More would allow more changes at once, and cost more reads.
const COPIES_PER_MASK_MAX: u32 = 8;

/// Where copies of pages are in a store that is not clean: the first pages of the masks of clusters and of
/// blob ids.
pub(crate) fn copy_places(super_block: &SuperBlock) -> impl Iterator<Item = u64> + use<> {
    let page_bytes = u64::from(super_block.metadata_page_bytes);
    let masks = [Some(super_block.used_clusters), super_block.used_blob_ids];
    let places = masks.into_iter().flatten();
    let places =
        places.flat_map(|mask| (0..mask.pages.min(COPIES_PER_MASK_MAX)).map(move |page| (mask.start, page)));
    places.map(move |(start, page)| (u64::from(start) + u64::from(page)) * page_bytes)
}

/// Where the parts of the groups of pages are in a store that is not clean: in the mask of pages.
pub(crate) fn group_places(super_block: &SuperBlock) -> impl Iterator<Item = (u32, u64)> + use<> {
    let page_bytes = u64::from(super_block.metadata_page_bytes);
    let mask = super_block.used_pages;
    let parts = PageGroups::parts(super_block.metadata.pages).min(mask.pages);
    (0..parts).map(move |part| (part, (u64::from(mask.start) + u64::from(part)) * page_bytes))
}

/// Loads a store with a function that reads, one read after the other: for tools and tests.
///
/// # Errors
/// What `read` returned, or why the store cannot be loaded.
pub fn load_with<E: From<LoadError>>(
    device_bytes: u64,
    options: LoadOptions,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
) -> Result<BlobStore, E> {
    let mut loader = BlobStoreLoader::new(device_bytes, options);
    let mut buffer = Vec::new();
    loop {
        if let Some(outcome) = loader.outcome() {
            return Ok(outcome?);
        }
        let next = loader.next_read().expect("reads are left until there is an outcome");
        buffer.resize(next.length, 0);
        read(next.offset, &mut buffer)?;
        loader.complete(next.id, Some(&buffer));
    }
}
