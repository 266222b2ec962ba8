//! The state of a store.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use wire_blob::{BitMask, BlobId, ChecksumsId, MaskKind, STORE_TYPE_BYTES, SuperBlock};

use crate::assemble::{PageSet, TornPages, assemble};
use crate::blob::{Blob, BlobParent, UnusableBlob};
use crate::finding::{NumberRanges, StoreFinding};
use crate::layout::BlobStoreLayout;
use crate::read::{BlobReadError, ReadPlan};
use crate::recover::{Recovery, recover};
use crate::table::BlobTable;

/// Findings of one kind that are listed; more are counted.
const FINDINGS_MAX: usize = 1000;

/// The masks of a store that was unloaded.
pub(crate) struct StoreMasks {
    pub(crate) pages: BitMask,
    pub(crate) clusters: BitMask,
    pub(crate) blob_ids: BitMask,
}

/// A state of a store: its blobs, what they use, and what is wrong with it. Copies share what is large.
///
/// The state that was loaded is that after recovery: operations that were cut in two are finished or undone
/// in it, though not on the device before the store is open for changes.
#[derive(Clone, Debug)]
pub struct BlobStore {
    pub(crate) super_block: SuperBlock,
    pub(crate) layout: BlobStoreLayout,
    pub(crate) blobs: BlobTable,
    pub(crate) free_clusters: u32,
    unusable: Arc<BTreeMap<BlobId, UnusableBlob>>,
    used_pages: Arc<BitMask>,
    used_clusters: Arc<BitMask>,
    findings: Arc<Vec<StoreFinding>>,
    recovery: Arc<Recovery>,
    pub(crate) checksums: Option<ChecksumsId>,
}

impl BlobStore {
    /// The super block.
    pub fn super_block(&self) -> &SuperBlock {
        &self.super_block
    }

    /// Gives the store a type. It is on the device when the store was opened for changes and one was made.
    pub fn set_store_type(&mut self, store_type: [u8; STORE_TYPE_BYTES]) {
        self.super_block.store_type = store_type;
    }

    /// The geometry.
    pub fn layout(&self) -> &BlobStoreLayout {
        &self.layout
    }

    /// The blobs that can be used.
    pub fn blobs(&self) -> &BlobTable {
        &self.blobs
    }

    /// A blob that can be used.
    pub fn blob(&self, id: BlobId) -> Option<&Blob> {
        self.blobs.get(&id)
    }

    /// The blobs that cannot be used.
    pub fn unusable(&self) -> &BTreeMap<BlobId, UnusableBlob> {
        &self.unusable
    }

    /// The clones of a snapshot, ascending.
    pub fn clones(&self, snapshot: BlobId) -> &[BlobId] {
        self.blobs.clones(snapshot)
    }

    /// Bytes of a blob.
    pub fn blob_bytes(&self, blob: &Blob) -> u64 {
        u64::from(blob.clusters().length()) * u64::from(self.layout.cluster_bytes)
    }

    /// Clusters for data: all but those of the metadata.
    pub fn data_clusters(&self) -> u32 {
        self.layout.clusters - self.layout.metadata_clusters
    }

    /// Clusters that are not used.
    pub fn free_clusters(&self) -> u32 {
        self.free_clusters
    }

    /// The clusters that were used when the store was loaded: by blobs, by the metadata, and those that the
    /// masks of an unloaded store say besides. Changes since are not in it.
    pub fn used_clusters(&self) -> &BitMask {
        &self.used_clusters
    }

    /// The metadata pages that are used, as for clusters.
    pub fn used_pages(&self) -> &BitMask {
        &self.used_pages
    }

    /// The checksums of data that are those of this store, if the program that changed it last kept some.
    /// `None` too if it was SPDK, or another that does not know them, since then no checksum is to be
    /// believed.
    pub fn checksums(&self) -> Option<ChecksumsId> {
        self.checksums
    }

    /// What must be written before the store is changed.
    pub(crate) fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    /// The state of a new store without blobs, and with this use.
    pub(crate) fn empty(super_block: SuperBlock, layout: BlobStoreLayout) -> BlobStore {
        let (pages, torn) = (PageSet::new(0), TornPages::default());
        build(super_block, layout, None, &pages, false, torn, Vec::new())
    }

    /// What is not as in a store that was unloaded properly when it was loaded, in the order: notes of
    /// loading, blobs, owners, masks.
    pub fn findings(&self) -> &[StoreFinding] {
        &self.findings
    }

    /// Where the data of a range of a blob is.
    ///
    /// # Errors
    /// There is no such blob, or the range is beyond its end. Pieces are errors if a snapshot is missing.
    pub fn read(&self, blob: BlobId, offset: u64, length: u64) -> Result<ReadPlan<'_>, BlobReadError> {
        ReadPlan::new(self, blob, offset, length)
    }
}

/// Makes the state from all that was read. `scanned` says that it is all pages.
pub(crate) fn build(
    super_block: SuperBlock,
    layout: BlobStoreLayout,
    masks: Option<StoreMasks>,
    pages: &PageSet,
    scanned: bool,
    torn: TornPages,
    mut findings: Vec<StoreFinding>,
) -> BlobStore {
    let (mut blobs, mut unusable) = (BTreeMap::new(), BTreeMap::new());
    let mut recovery = Recovery { restored: pages.restored(), ..Recovery::default() };
    let first_pages: Vec<u32> = match &masks {
        Some(masks) => masks.blob_ids.ones().collect(),
        None => pages.first_pages().collect(),
    };
    for first in first_pages {
        let assembled = assemble(pages, &layout, first);
        let id = assembled.blob.id;
        recovery.rewrite(id, assembled.other_size.iter().copied());
        findings.extend(assembled.resize);
        match assembled.damage {
            None => drop(blobs.insert(id, assembled.blob)),
            Some(damage) => {
                findings.push(StoreFinding::Unusable { blob: id, damage: damage.clone() });
                unusable.insert(id, UnusableBlob { partial: assembled.blob, damage });
            }
        }
    }
    findings.extend(recover(&mut blobs, &mut recovery));
    let clones = relations(&super_block, &blobs, &mut findings);
    let mut claims = Claims::new(&layout);
    let all = || blobs.values().chain(unusable.values().map(UnusableBlob::partial));
    all().for_each(|blob| claims.add(blob));
    claims.name_owners(all(), &mut findings);
    recovery.shared_clusters = claims.shared_clusters.clone();
    recovery.shared_pages = claims.shared_pages.clone();
    if unusable.is_empty() {
        recovery.torn = torn.free.into_iter().filter(|page| !claims.pages.get(*page)).collect();
    }
    recovery.doubtful = torn.doubtful.into_iter().filter(|page| !claims.pages.get(*page)).collect();
    let numbers: NumberRanges = pages.invalid().collect();
    if scanned && numbers.count() > 0 {
        findings.push(StoreFinding::InvalidPages { numbers, unloaded: super_block.clean });
    }
    let Claims { pages: mut used_pages, clusters: mut used_clusters, .. } = claims;
    if masks.is_none() && !unusable.is_empty() {
        // Which of them the damaged blobs have is not known.
        pages.written().for_each(|page| _ = used_pages.set(page));
    }
    if let Some(masks) = &masks {
        compare(&used_pages, &masks.pages, &mut findings);
        compare(&used_clusters, &masks.clusters, &mut findings);
        if scanned {
            let unlisted =
                pages.first_pages().filter(|page| !masks.blob_ids.get(*page)).map(BlobId::from_page);
            list(unlisted.map(|blob| StoreFinding::Unlisted { blob }), &mut findings);
        }
        used_pages.union(&masks.pages);
        used_clusters.union(&masks.clusters);
    }
    BlobStore {
        free_clusters: layout.clusters - used_clusters.count_ones(),
        super_block,
        layout,
        blobs: BlobTable::new(blobs, clones),
        unusable: Arc::new(unusable),
        used_pages: Arc::new(used_pages),
        used_clusters: Arc::new(used_clusters),
        findings: Arc::new(findings),
        recovery: Arc::new(recovery),
        checksums: None,
    }
}

/// Adds findings up to a limit, and the number of those beyond it.
fn list(new: impl Iterator<Item = StoreFinding>, findings: &mut Vec<StoreFinding>) {
    let mut new = new;
    findings.extend(new.by_ref().take(FINDINGS_MAX));
    let count = new.count() as u64;
    if count > 0 {
        findings.push(StoreFinding::More { count });
    }
}

/// The clones of each snapshot. Adds findings of parents that are missing, and of cycles.
fn relations(
    super_block: &SuperBlock,
    blobs: &BTreeMap<BlobId, Blob>,
    findings: &mut Vec<StoreFinding>,
) -> BTreeMap<BlobId, Vec<BlobId>> {
    let no_super_blob = super_block.super_blob.filter(|id| !blobs.contains_key(id));
    findings.extend(no_super_blob.map(|blob| StoreFinding::NoSuperBlob { blob }));
    let mut clones: BTreeMap<BlobId, Vec<BlobId>> = BTreeMap::new();
    for blob in blobs.values() {
        if let BlobParent::Snapshot(parent) = blob.parent {
            clones.entry(parent).or_default().push(blob.id);
            if !blobs.contains_key(&parent) {
                findings.push(StoreFinding::NoParent { blob: blob.id, parent });
            }
        }
    }
    // Blobs whose chain of snapshots has an end, and those whose chain has none.
    let (mut ending, mut endless) = (BTreeSet::new(), BTreeSet::new());
    for start in blobs.values() {
        let mut path = BTreeSet::new();
        let mut next = Some(start);
        let mut is_endless = false;
        while let Some(blob) = next.filter(|blob| !ending.contains(&blob.id)) {
            is_endless = endless.contains(&blob.id) || !path.insert(blob.id);
            next = match blob.parent {
                BlobParent::Snapshot(parent) if !is_endless => blobs.get(&parent),
                _ => None,
            };
        }
        if is_endless {
            findings.push(StoreFinding::ParentCycle { blob: start.id });
            endless.extend(path);
        } else {
            ending.extend(path);
        }
    }
    clones
}

/// Who uses which pages and clusters.
struct Claims {
    pages: BitMask,
    clusters: BitMask,
    shared_pages: BTreeSet<u32>,
    shared_clusters: BTreeSet<u32>,
}

impl Claims {
    fn new(layout: &BlobStoreLayout) -> Claims {
        let mut clusters = BitMask::new(MaskKind::Clusters, layout.clusters);
        for cluster in 0..layout.metadata_clusters {
            clusters.set(cluster);
        }
        Claims {
            pages: BitMask::new(MaskKind::Pages, layout.pages),
            clusters,
            shared_pages: BTreeSet::new(),
            shared_clusters: BTreeSet::new(),
        }
    }

    /// Pages and clusters of a blob were checked to be within the store.
    fn add(&mut self, blob: &Blob) {
        for page in blob.all_pages() {
            if self.pages.set(page) {
                self.shared_pages.insert(page);
            }
        }
        for run in blob.clusters.allocated_runs() {
            if self.clusters.is_clear(run.clone()) {
                self.clusters.set_range(run);
                continue;
            }
            let shared = run.filter(|cluster| self.clusters.set(*cluster));
            self.shared_clusters.extend(shared);
        }
    }

    /// Names the owners of what has several, in one more pass over the blobs.
    fn name_owners<'a>(&self, blobs: impl Iterator<Item = &'a Blob>, findings: &mut Vec<StoreFinding>) {
        if self.shared_pages.is_empty() && self.shared_clusters.is_empty() {
            return;
        }
        let mut owners: BTreeMap<(bool, u32), Vec<BlobId>> = BTreeMap::new();
        for blob in blobs {
            let pages = blob.all_pages().filter(|page| self.shared_pages.contains(page));
            pages.for_each(|page| owners.entry((false, page)).or_default().push(blob.id));
            let clusters = blob.clusters.iter().map(|(_, cluster)| cluster);
            let clusters = clusters.filter(|cluster| self.shared_clusters.contains(cluster));
            clusters.for_each(|cluster| owners.entry((true, cluster)).or_default().push(blob.id));
        }
        let shared = owners.into_iter().map(|((is_cluster, number), owners)| {
            let kind = if is_cluster { MaskKind::Clusters } else { MaskKind::Pages };
            StoreFinding::Shared { kind, number, owners }
        });
        list(shared, findings);
    }
}

/// Compares what has owners with a mask.
fn compare(owned: &BitMask, mask: &BitMask, findings: &mut Vec<StoreFinding>) {
    let kind = mask.kind();
    let leaked: NumberRanges = mask.ones().filter(|number| !owned.get(*number)).collect();
    if leaked.count() > 0 {
        findings.push(StoreFinding::Leaked { kind, numbers: leaked });
    }
    let unmarked: NumberRanges = owned.ones().filter(|number| !mask.get(*number)).collect();
    if unmarked.count() > 0 {
        findings.push(StoreFinding::Unmarked { kind, numbers: unmarked });
    }
}
