//! Blobs from the metadata pages of their chains.

use std::collections::{BTreeMap, BTreeSet};

use wire_blob::{
    BitMask, BlobClusterRun, BlobId, CLUSTERS_PER_EXTENT_PAGE, CopyTarget, ExtentPage, ExtentTable, MaskKind,
    MetadataDescriptor, MetadataPage, PAGE_BYTES, PageCopy, PageError, PageHeader, XATTR_EXTERNAL_SNAPSHOT,
    XATTR_SNAPSHOT, has_valid_crc,
};

use crate::blob::{Blob, BlobDamage, BlobParent};
use crate::cluster_map::BlobClusterMap;
use crate::finding::StoreFinding;
use crate::layout::BlobStoreLayout;

/// A page with a right CRC.
enum PageEntry {
    Decoded(MetadataPage),
    Undecodable(PageHeader, PageError),
}

/// Pages of a scanned store that are neither empty nor have a right CRC.
#[derive(Debug, Default)]
pub(crate) struct TornPages {
    /// Those that no blob has, unless the chain of one names them.
    pub(crate) free: Vec<u32>,
    /// Those that may be half of the first page of a blob. What the blob has is not known.
    pub(crate) doubtful: Vec<u32>,
}

/// Whether a page is empty. Most of a store's pages are, and all of them are read where nothing says which.
fn is_zero(page: &[u8]) -> bool {
    let chunks = page.chunks_exact(64);
    let is_zero = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all | byte) == 0;
    is_zero(chunks.remainder()) && chunks.clone().all(is_zero)
}

/// The metadata pages that were read. Of pages without a right CRC it knows only whether they are empty.
pub(crate) struct PageSet {
    read: BitMask,
    invalid: BitMask,
    /// Invalid pages that begin like the first page of the blob that would be there.
    halves: BitMask,
    pages: BTreeMap<u32, PageEntry>,
    copies: BTreeMap<u32, PageCopy>,
    restored: Vec<(u32, Vec<u8>)>,
}

impl PageSet {
    pub(crate) fn new(pages: u32) -> PageSet {
        let none = || BitMask::new(MaskKind::Pages, pages);
        let (pages, copies) = (BTreeMap::new(), BTreeMap::new());
        PageSet { read: none(), invalid: none(), halves: none(), pages, copies, restored: Vec::new() }
    }

    /// Adds a copy of a page. It has the page's content if the page turns out to be half written.
    pub(crate) fn add_copy(&mut self, copy: PageCopy) {
        let CopyTarget::Page(page) = copy.target else { return };
        let is_newer = self.copies.get(&page).is_none_or(|other| other.number < copy.number);
        if page < self.read.length() && is_newer && has_valid_crc(&copy.content) {
            self.copies.insert(page, copy);
        }
    }

    /// The pages that are as their copies say, ascending, with their content.
    pub(crate) fn restored(&self) -> Vec<(u32, Vec<u8>)> {
        self.restored.clone()
    }

    /// Adds a page of zeroes.
    pub(crate) fn add_empty(&mut self, page: u32) {
        self.read.set(page);
    }

    /// Adds the content of a page.
    pub(crate) fn add(&mut self, page: u32, content: &[u8]) {
        self.read.set(page);
        if is_zero(&content[..PAGE_BYTES.min(content.len())]) {
            return;
        }
        let copy =
            self.copies.get(&page).filter(|_| !has_valid_crc(content)).map(|copy| copy.content.clone());
        if let Some(copy) = &copy {
            self.restored.push((page, copy.clone()));
        }
        let content = copy.as_deref().unwrap_or(content);
        if !has_valid_crc(content) {
            self.invalid.set(page);
            // The header is in the first sector, which is whole, and the same before and after.
            let header = PageHeader::decode(content);
            if header.is_some_and(|header| header.sequence == 0 && header.id == BlobId::from_page(page)) {
                self.halves.set(page);
            }
            return;
        }
        let entry = match (MetadataPage::decode(content, page), PageHeader::decode(content)) {
            (Ok(decoded), _) => PageEntry::Decoded(decoded),
            (Err(error), Some(header)) => PageEntry::Undecodable(header, error),
            (Err(_), None) => return,
        };
        self.pages.insert(page, entry);
    }

    pub(crate) fn has_read(&self, page: u32) -> bool {
        self.read.get(page)
    }

    /// The pages that are neither empty nor have a right CRC, ascending.
    pub(crate) fn invalid(&self) -> impl Iterator<Item = u32> + '_ {
        self.invalid.ones()
    }

    /// What the invalid pages are if all were read. Where pages have copies before they are replaced, none is
    /// half of a page that a blob has. Otherwise a page is free if it does not begin like a first page, as
    /// long as none does: what a blob has whose first page is damaged is not known.
    pub(crate) fn torn(&self, has_copies: bool) -> TornPages {
        let doubtful: Vec<u32> = self.halves.ones().filter(|_| !has_copies).collect();
        let is_clear = doubtful.is_empty();
        TornPages { free: self.invalid().filter(|_| is_clear).collect(), doubtful }
    }

    /// The pages that are not empty.
    pub(crate) fn written(&self) -> impl Iterator<Item = u32> + '_ {
        self.pages.keys().copied().chain(self.invalid())
    }

    fn header(&self, page: u32) -> Option<PageHeader> {
        match self.pages.get(&page)? {
            PageEntry::Decoded(page) => {
                Some(PageHeader { id: page.id, sequence: page.sequence, next: page.next })
            }
            PageEntry::Undecodable(header, _) => Some(*header),
        }
    }

    fn get(&self, page: u32) -> Result<&MetadataPage, BlobDamage> {
        match self.pages.get(&page) {
            Some(PageEntry::Decoded(decoded)) => Ok(decoded),
            Some(PageEntry::Undecodable(_, error)) => Err(BlobDamage::Page(*error)),
            None if page >= self.read.length() => {
                Err(BlobDamage::NoSuchPage { page, pages: self.read.length() })
            }
            None => Err(BlobDamage::Crc { page }),
        }
    }

    /// Whether a page is the first one of a blob. An extent page names a blob too, but is not where that
    /// blob's first is.
    pub(crate) fn is_first(&self, page: u32) -> bool {
        let header = self.header(page);
        header.is_some_and(|header| header.sequence == 0 && header.id == BlobId::from_page(page))
    }

    /// The first pages of blobs, ascending.
    pub(crate) fn first_pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.pages.keys().copied().filter(|page| self.is_first(*page))
    }

    /// The pages that the blobs with these first pages have, as far as those that were read say it, and that
    /// were not read.
    pub(crate) fn missing(&self, first_pages: impl Iterator<Item = u32>) -> Vec<u32> {
        let mut seen = BitMask::new(MaskKind::Pages, self.read.length());
        let mut stack: Vec<u32> = first_pages.collect();
        let mut missing = Vec::new();
        while let Some(page) = stack.pop() {
            if page >= self.read.length() || seen.set(page) {
                continue;
            }
            if !self.has_read(page) {
                missing.push(page);
            } else if let Some(PageEntry::Decoded(decoded)) = self.pages.get(&page) {
                stack.extend(decoded.next);
                for descriptor in &decoded.descriptors {
                    if let MetadataDescriptor::ExtentTable(table) = descriptor {
                        stack.extend(table.runs.iter().map(|run| run.page).filter(|page| *page != 0));
                    }
                }
            }
        }
        missing.sort_unstable();
        missing
    }
}

/// What the pages of a blob make.
pub(crate) struct AssembledBlob {
    /// The blob, as far as it could be read.
    pub(crate) blob: Blob,
    /// Why it cannot be used.
    pub(crate) damage: Option<BlobDamage>,
    /// A resize that was cut in two.
    pub(crate) resize: Option<StoreFinding>,
    /// Indexes of the extent pages that have more or fewer clusters than the blob has there.
    pub(crate) other_size: BTreeSet<u32>,
}

/// Assembles the blob with this first page.
pub(crate) fn assemble(pages: &PageSet, layout: &BlobStoreLayout, first: u32) -> AssembledBlob {
    let mut assembly = Assembly {
        pages,
        layout,
        blob: Blob::new(BlobId::from_page(first)),
        table: None,
        has_runs: false,
        resize: None,
        other_size: BTreeSet::new(),
        damage: None,
    };
    assembly.run(first);
    let Assembly { blob, damage, resize, mut other_size, .. } = assembly;
    if damage.is_some() {
        other_size.clear();
    }
    AssembledBlob { blob, resize: resize.filter(|_| damage.is_none()), other_size, damage }
}

struct Assembly<'a> {
    pages: &'a PageSet,
    layout: &'a BlobStoreLayout,
    blob: Blob,
    table: Option<ExtentTable>,
    has_runs: bool,
    resize: Option<StoreFinding>,
    other_size: BTreeSet<u32>,
    // The first of them: what can be read after it is read too, because it is not free.
    damage: Option<BlobDamage>,
}

impl Assembly<'_> {
    fn run(&mut self, first: u32) {
        if !self.pages.is_first(first) {
            self.damage = Some(BlobDamage::NotFirstPage { page: first });
            return;
        }
        let mut next = Some(first);
        while let Some(page) = next {
            next = self.chain_page(page).unwrap_or_else(|damage| {
                self.damage = Some(damage);
                None
            });
        }
        if let Some(table) = self.table.take() {
            self.blob.has_extent_table = true;
            let read = self.extent_pages(&table);
            self.note(read);
        }
        let finished = self.check_flags().and_then(|()| self.check_clusters()).and_then(|()| self.parent());
        match finished {
            Ok(parent) => self.blob.parent = parent,
            Err(damage) => self.note(Err(damage)),
        }
    }

    fn note(&mut self, result: Result<(), BlobDamage>) {
        if let Err(damage) = result {
            self.damage.get_or_insert(damage);
        }
    }

    fn check_flags(&self) -> Result<(), BlobDamage> {
        match self.blob.flags.unknown_invalid() {
            0 => Ok(()),
            flags => Err(BlobDamage::UnknownFlags { flags }),
        }
    }

    /// Adds a page of the chain; the one that follows. A chain ends, because each page has another place in
    /// it.
    fn chain_page(&mut self, page: u32) -> Result<Option<u32>, BlobDamage> {
        let pages = self.pages;
        let decoded = pages.get(page)?;
        if decoded.id != self.blob.id {
            return Err(BlobDamage::PageOfAnother { page, other: decoded.id });
        }
        let expected = self.blob.pages.len() as u32;
        if decoded.sequence != expected {
            return Err(BlobDamage::Sequence { page, expected, found: decoded.sequence });
        }
        self.blob.pages.push(page);
        for descriptor in &decoded.descriptors {
            match descriptor {
                MetadataDescriptor::Flags(flags) => self.blob.flags = *flags,
                MetadataDescriptor::Xattr(xattr) => self.blob.xattrs.push(xattr.clone()),
                MetadataDescriptor::XattrInternal(xattr) => self.blob.internal_xattrs.push(xattr.clone()),
                MetadataDescriptor::ExtentRuns(runs) => self.runs(page, runs)?,
                MetadataDescriptor::ExtentTable(table) => self.table_part(page, table)?,
                MetadataDescriptor::ExtentPage(_) => return Err(BlobDamage::Extents { page }),
                MetadataDescriptor::Unknown { .. } => {}
            }
        }
        Ok(decoded.next)
    }

    fn runs(&mut self, page: u32, runs: &[BlobClusterRun]) -> Result<(), BlobDamage> {
        if self.table.is_some() {
            return Err(BlobDamage::Extents { page });
        }
        self.has_runs = true;
        for run in runs {
            let first = self.blob.clusters.length();
            let size = BlobDamage::Size { clusters: u64::from(first) + u64::from(run.length) };
            self.blob.clusters.extend(run.length).ok_or(size)?;
            if run.cluster == 0 {
                continue;
            }
            for step in 0..run.length {
                self.set(first + step, run.cluster + step)?;
            }
        }
        Ok(())
    }

    /// Sets a cluster. A blob has at most as many as the store, whatever its metadata says.
    fn set(&mut self, index: u32, cluster: u32) -> Result<(), BlobDamage> {
        if !self.layout.is_data_cluster(cluster) {
            return Err(BlobDamage::Cluster { index, cluster });
        }
        if self.blob.clusters.allocated() == self.layout.clusters {
            return Err(BlobDamage::Size { clusters: u64::from(self.layout.clusters) + 1 });
        }
        self.blob.clusters.set(index, Some(cluster));
        Ok(())
    }

    /// Sets the clusters of an extent page, 0 for those that are not allocated.
    fn set_all(&mut self, first: u32, entries: &[u32]) {
        let (store, allocated) = (self.layout.clusters, self.blob.clusters.allocated());
        let is_right = |cluster: &u32| *cluster == 0 || self.layout.is_data_cluster(*cluster);
        if entries.len() <= (store - allocated) as usize && entries.iter().all(is_right) {
            return self.blob.clusters.set_chunk(first / CLUSTERS_PER_EXTENT_PAGE, entries);
        }
        for (step, cluster) in entries.iter().enumerate().filter(|(_, cluster)| **cluster != 0) {
            let set = self.set(first + step as u32, *cluster);
            self.note(set);
        }
    }

    fn table_part(&mut self, page: u32, part: &ExtentTable) -> Result<(), BlobDamage> {
        match &mut self.table {
            _ if self.has_runs => Err(BlobDamage::Extents { page }),
            Some(table) if table.clusters != part.clusters => Err(BlobDamage::Extents { page }),
            Some(table) => {
                table.runs.extend_from_slice(&part.runs);
                Ok(())
            }
            None => {
                self.table = Some(part.clone());
                Ok(())
            }
        }
    }

    /// Reads the extent pages. A resize writes the last of them before the table: if it was cut in two, the
    /// page has other clusters than the table says. What the page lacks cannot be found any more, so that the
    /// blob ends there; what it has too many was not in use yet.
    fn extent_pages(&mut self, table: &ExtentTable) -> Result<(), BlobDamage> {
        let clusters = u32::try_from(table.clusters);
        let clusters = clusters.map_err(|_| BlobDamage::Size { clusters: table.clusters })?;
        let found: u64 = table.runs.iter().map(|run| u64::from(run.length)).sum();
        if found != u64::from(clusters.div_ceil(CLUSTERS_PER_EXTENT_PAGE)) {
            self.note(Err(BlobDamage::ExtentTable { found, clusters: table.clusters }));
        }
        self.blob.clusters = BlobClusterMap::new(clusters);
        let mut first = 0;
        for run in &table.runs {
            let Some(end) =
                run.length.checked_mul(CLUSTERS_PER_EXTENT_PAGE).and_then(|all| all.checked_add(first))
            else {
                // The last one of the largest blobs; more than that was found to be too many.
                break;
            };
            if first >= clusters || run.page != 0 && !self.extent_page(first, run.page, clusters) {
                break;
            }
            first = end;
        }
        Ok(())
    }

    /// Reads the extent page of the clusters from `first` on; whether the blob goes on after it.
    fn extent_page(&mut self, first: u32, page: u32, clusters: u32) -> bool {
        let pages = self.pages;
        let extents = pages.get(page).and_then(|decoded| {
            let is_valid = |extents: &&ExtentPage| {
                extents.first == first && extents.clusters.len() <= CLUSTERS_PER_EXTENT_PAGE as usize
            };
            let extents = decoded.extent_page().filter(is_valid);
            extents.ok_or(BlobDamage::ExtentPage { page, first })
        });
        if page < self.layout.pages {
            self.blob.extent_pages.push((first / CLUSTERS_PER_EXTENT_PAGE, page));
        }
        let extents = match extents {
            Ok(extents) => extents,
            Err(damage) => {
                self.note(Err(damage));
                return true;
            }
        };
        let expected = (clusters - first).min(CLUSTERS_PER_EXTENT_PAGE) as usize;
        let found = extents.clusters.len().min(expected);
        self.set_all(first, &extents.clusters[..found]);
        if extents.clusters.len() == expected {
            return true;
        }
        self.other_size.insert(first / CLUSTERS_PER_EXTENT_PAGE);
        let length = if found < expected { first + found as u32 } else { clusters };
        self.blob.clusters.truncate(length);
        let extents = first.saturating_add(extents.clusters.len() as u32);
        self.resize =
            Some(StoreFinding::Resize { blob: self.blob.id, table: clusters, extents, clusters: length });
        found == expected
    }

    fn check_clusters(&self) -> Result<(), BlobDamage> {
        let clusters = &self.blob.clusters;
        if self.blob.is_thin() || clusters.allocated() == clusters.length() {
            return Ok(());
        }
        let allocated = clusters.iter().enumerate();
        let gap = allocated.map(|(at, (index, _))| (at as u32, index)).find(|(at, index)| at != index);
        Err(BlobDamage::Unallocated { index: gap.map_or(clusters.allocated(), |(at, _)| at) })
    }

    fn parent(&self) -> Result<BlobParent, BlobDamage> {
        let blob = &self.blob;
        if blob.flags.has_external_snapshot() {
            let name = blob.internal_xattr(XATTR_EXTERNAL_SNAPSHOT).ok_or(BlobDamage::NoExternalSnapshot)?;
            return Ok(BlobParent::External(name.to_vec()));
        }
        match blob.internal_xattr(XATTR_SNAPSHOT) {
            Some(id) if blob.is_thin() => match id.try_into() {
                Ok(id) => Ok(BlobParent::Snapshot(BlobId(u64::from_le_bytes(id)))),
                Err(_) => Err(BlobDamage::SnapshotId { bytes: id.len() }),
            },
            _ => Ok(BlobParent::None),
        }
    }
}
