//! Loading of a store: which reads it takes, and what they make.

use std::collections::{BTreeMap, VecDeque};

use wire_blob::{BitMask, DecodeError, MaskKind, PAGE_BYTES, PageRange, SuperBlock};

use crate::assemble::PageSet;
use crate::finding::StoreFinding;
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
    Mask { kind: MaskKind, at: usize },
    Pages { first: u32, page_bytes: u32 },
}

/// A range of the device to be read, in one read or in several.
#[derive(Clone, Copy, Debug)]
struct PlannedRange {
    offset: u64,
    length: u64,
    purpose: Purpose,
}

/// What is read: the super block, the masks, then pages until no blob has one that was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    SuperBlock,
    Masks,
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
                Purpose::SuperBlock => {}
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

    /// The store, or why it cannot be loaded; `None` while reads are left, and after it was returned.
    pub fn outcome(&mut self) -> Option<Result<BlobStore, LoadError>> {
        self.outcome.take()
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
        let super_block = SuperBlock::decode(content)?;
        let layout = BlobStoreLayout::new(&super_block, self.device_bytes)?;
        self.pages = PageSet::new(layout.pages);
        self.super_block = Some((super_block, layout));
        Ok(())
    }

    /// Goes on when the reads of a phase are complete.
    fn advance(&mut self) {
        let (super_block, layout) = self.super_block.clone().expect("the super block was read");
        match (self.phase, super_block.used_blob_ids) {
            (Phase::SuperBlock, Some(blob_ids)) if super_block.clean => {
                self.phase = Phase::Masks;
                self.plan_mask(MaskKind::Pages, super_block.used_pages, layout.pages);
                self.plan_mask(MaskKind::Clusters, super_block.used_clusters, layout.clusters);
                self.plan_mask(MaskKind::BlobIds, blob_ids, layout.pages);
                return;
            }
            (Phase::SuperBlock, _) => {
                self.findings.push(StoreFinding::NotUnloaded);
                self.phase = Phase::Pages;
                self.plan_scan();
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
            let findings = std::mem::take(&mut self.findings);
            let masks = self.usable_masks.take();
            let store = build(super_block, layout, masks, &pages, self.scanned, findings);
            self.finish(Ok(store));
        }
    }

    fn plan_mask(&mut self, kind: MaskKind, range: PageRange, bits: u32) {
        let page_bytes = u64::from(self.layout().page_bytes);
        // The layout has checked that the range is as long.
        let bytes = BitMask::encoded_bytes(bits).next_multiple_of(page_bytes);
        self.masks[kind as usize] = vec![0; bytes as usize];
        let offset = self.layout().range_offset(range);
        self.planned.push_back(PlannedRange {
            offset,
            length: bytes,
            purpose: Purpose::Mask { kind, at: 0 },
        });
    }

    fn decode_masks(&mut self, layout: &BlobStoreLayout) -> Option<StoreMasks> {
        let [pages, clusters, blob_ids] = std::mem::take(&mut self.masks);
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
