//! Repair of a store: what can be proved to be right is written, and the rest is named.
//!
//! The metadata decides, as after a power failure. What it says is compared with the masks by two loads: one
//! with the masks, and one that ignores them. If the second finds no damage, it has all blobs, so that
//! whatever else is marked as used is not: the masks are written from it, and with them all that loading
//! finished or undid. If it finds damage, what is marked as used may be what a damaged blob has, and nothing is
//! freed. Only what has owners is marked then.
//!
//! A store that was not unloaded has no masks, and is what the metadata says in any case. It is unloaded,
//! with its damaged blobs, unless a page may be half of a blob's first page.
//!
//! A repair is made of the writes of recovery and of unloading, and may be repeated wherever it ended.

use std::fmt;

use wire_blob::BlobId;

use crate::finding::{NumberRanges, StoreFinding, StoreSeverity, names};
use crate::recover::SnapshotOperation;
use crate::store::BlobStore;
use crate::write::{BlobStoreDevice, ChangeId, OpenBlobStore};

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RepairScope {
    /// Nothing.
    Nothing,
    /// Bits of what has owners.
    Marks,
    /// Everything that loading decided, and the masks.
    Store,
}

/// A step of a repair. It prints what it does, as an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepairStep {
    finding: StoreFinding,
}

impl RepairStep {
    /// What the step ends.
    pub fn finding(&self) -> &StoreFinding {
        &self.finding
    }
}

/// What a repair does, and what it leaves.
///
/// [`plan`](Self::plan) compares two loads of one store, between which nothing may change it.
/// [`open`](Self::open) begins the repair. Memory and time are those of loading and unloading.
#[derive(Clone, Debug)]
pub struct StoreRepair {
    store: BlobStore,
    scope: RepairScope,
    steps: Vec<RepairStep>,
    left: Vec<StoreFinding>,
}

impl StoreRepair {
    /// Plans the repair of a store that was loaded with [`LoadOptions::scan`](crate::LoadOptions::scan).
    /// `rebuilt` is the same with [`LoadOptions::ignore_masks`](crate::LoadOptions::ignore_masks).
    pub fn plan(found: BlobStore, rebuilt: BlobStore) -> StoreRepair {
        let is_clean = found.super_block().clean;
        let doubtful: NumberRanges = rebuilt.recovery().doubtful.iter().copied().collect();
        let is_known = match is_clean {
            true => {
                let is_no_blob = |id: &BlobId| is_used(&rebuilt, id.page());
                is_whole(&found, &rebuilt) && found.unusable().keys().all(is_no_blob)
            }
            false => doubtful.count() == 0,
        };
        let mut repair = match is_known {
            true => StoreRepair::of_store(&found, &rebuilt),
            false => StoreRepair::of_marks(&found),
        };
        if doubtful.count() > 0 {
            repair.left.push(StoreFinding::Doubtful { numbers: doubtful });
        }
        let scope = if is_known { RepairScope::Store } else { RepairScope::Marks };
        repair.scope = if repair.steps.is_empty() { RepairScope::Nothing } else { scope };
        repair.store = if is_known { rebuilt } else { found };
        repair
    }

    /// All that was found, by the state without masks. In a store that was unloaded, that has no damage: what
    /// the metadata seems to lack are blobs that the mask lacks.
    fn of_store(found: &BlobStore, rebuilt: &BlobStore) -> StoreRepair {
        use StoreFinding::*;
        let (mut steps, mut left) = (Vec::new(), Vec::new());
        let (is_clean, torn) = (found.super_block().clean, &rebuilt.recovery().torn);
        for finding in found.findings() {
            match finding {
                NotUnloaded if is_clean => {}
                NotUnloaded | Mask { .. } | MaskLength { .. } | Leaked { .. } | Unmarked { .. } => {
                    steps.push(finding.clone());
                }
                Unlisted { .. } => steps.push(finding.clone()),
                Recovered(_) | Resize { .. } | Restored { .. } | InvalidPages { .. } => {}
                Unusable { .. } if is_clean => steps.push(finding.clone()),
                _ if is_clean => {}
                _ => left.push(finding.clone()),
            }
        }
        for finding in rebuilt.findings() {
            match finding {
                Recovered(_) | Resize { .. } | Restored { .. } => steps.push(finding.clone()),
                InvalidPages { .. } if torn.is_empty() => left.push(finding.clone()),
                InvalidPages { unloaded, .. } => {
                    let numbers = torn.iter().copied().collect();
                    steps.push(InvalidPages { numbers, unloaded: *unloaded });
                }
                _ => {}
            }
        }
        StoreRepair::new(found, steps, left)
    }

    /// What does no harm where something is not known.
    fn of_marks(found: &BlobStore) -> StoreRepair {
        let is_step = |finding: &StoreFinding| matches!(finding, StoreFinding::Unmarked { .. });
        let (steps, left) = found.findings().iter().cloned().partition(is_step);
        StoreRepair::new(found, steps, left)
    }

    fn new(store: &BlobStore, steps: Vec<StoreFinding>, left: Vec<StoreFinding>) -> StoreRepair {
        let steps = steps.into_iter().map(|finding| RepairStep { finding }).collect();
        StoreRepair { store: store.clone(), scope: RepairScope::Nothing, steps, left }
    }

    /// What the repair does. If it is nothing, nothing is written.
    pub fn steps(&self) -> &[RepairStep] {
        &self.steps
    }

    /// What it leaves, because it cannot be proved what is right.
    pub fn left(&self) -> &[StoreFinding] {
        &self.left
    }

    /// Begins the repair, which is done when the change has ended; `None` if there is nothing to write. The
    /// store takes no other change.
    pub fn open(self, device: BlobStoreDevice) -> Option<(OpenBlobStore, ChangeId)> {
        match self.scope {
            RepairScope::Nothing => None,
            RepairScope::Marks => Some(OpenBlobStore::open_and_mark(self.store, device)),
            RepairScope::Store => Some(OpenBlobStore::open_and_unload(self.store, device)),
        }
    }
}

/// Whether the metadata of a store that was unloaded has no damage, but for pages that no blob has. No power
/// failure has made those: that they are free is what the mask says too.
fn is_whole(found: &BlobStore, rebuilt: &BlobStore) -> bool {
    let is_mask = |finding: &StoreFinding| {
        matches!(finding, StoreFinding::Mask { .. } | StoreFinding::MaskLength { .. })
    };
    let has_masks = found.super_block().used_blob_ids.is_some() && !found.findings().iter().any(is_mask);
    let torn = &rebuilt.recovery().torn;
    let are_free = || has_masks && !torn.iter().any(|page| is_used(found, Some(*page)));
    rebuilt.findings().iter().all(|finding| match finding {
        StoreFinding::InvalidPages { numbers, .. } => numbers.count() == torn.len() as u64 && are_free(),
        finding => finding.severity() == StoreSeverity::Note,
    })
}

/// Whether a metadata page has an owner, or is marked as used. Masks end with the pages.
fn is_used(store: &BlobStore, page: Option<u32>) -> bool {
    page.is_some_and(|page| store.used_pages().get(page))
}

impl fmt::Display for RepairStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use StoreFinding::*;
        match &self.finding {
            NotUnloaded => write!(f, "write the masks, and unload the store"),
            Mask { kind, .. } | MaskLength { kind, .. } => {
                write!(f, "write the mask of used {} by the metadata", names(*kind).1)
            }
            Recovered(operation) => {
                let how = if operation.finished { "finish" } else { "undo" };
                let what = match operation.operation {
                    SnapshotOperation::Create => "creation",
                    SnapshotOperation::Delete => "deletion",
                };
                write!(f, "{how} the {what} of snapshot {} of blob {}", operation.snapshot, operation.clone)
            }
            Resize { blob, clusters, .. } => {
                write!(f, "end the resize of blob {blob}, with {clusters} clusters")
            }
            Restored { pages, super_block } if pages.count() == 0 && *super_block => {
                write!(f, "write the super block")
            }
            Restored { pages, super_block } => {
                let also = if *super_block { ", and the super block" } else { "" };
                write!(f, "write metadata pages as their copies say: {pages}{also}")
            }
            Leaked { kind, numbers } => {
                write!(f, "free {} that have no owner: {numbers}", names(*kind).1)
            }
            Unmarked { kind, numbers } => {
                write!(f, "mark {} as used that have an owner: {numbers}", names(*kind).1)
            }
            InvalidPages { numbers, .. } => write!(f, "zero metadata pages that no blob has: {numbers}"),
            Unlisted { blob } => write!(f, "add blob {blob} to the mask of blob ids"),
            Unusable { blob, .. } => {
                write!(f, "remove blob {blob} from the mask of blob ids: its page is another blob's")
            }
            // No step is made of others.
            finding => write!(f, "{finding}"),
        }
    }
}
