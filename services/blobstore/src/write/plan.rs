//! Plans: the steps of a change, in order.

use std::collections::VecDeque;
use std::sync::Arc;

use wire_blob::{BlobId, CopyTarget, SuperBlock};

use super::change::{ChangeOutcome, ClearMethod};
use super::device::StoreAction;
use crate::blob::Blob;

/// Something that becomes part of the published state.
#[derive(Clone, Debug)]
pub(super) enum Update {
    /// A blob, new or changed.
    Set(Arc<Blob>),
    /// A blob that is no more.
    Remove(BlobId),
    /// Another super block, and with it the size of the store.
    SuperBlock(SuperBlock),
}

/// A step of a plan. It begins when the one before it is done.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Begins I/O, all at once, and does not wait for it.
    Io(Vec<StoreAction>),
    /// Makes sure that these pages are among those that may be in use.
    Groups(Vec<u32>),
    /// Begins to write a copy of a page that is to be replaced in place.
    Copy(CopyTarget, Vec<u8>),
    /// Waits for the data of the first writes to a blob whose cluster map this plan writes.
    Filled(BlobId),
    /// Waits for the I/O of the plan, and makes durable what it wrote.
    Barrier,
    /// The same, and makes durable what others wrote before.
    Flush,
    /// From here on, a failure leaves a state that is not known.
    Commit,
    /// Begins to replace a page in place.
    InPlace(CopyTarget, Vec<u8>),
    /// Publishes another state.
    Publish(Vec<Update>),
    /// Waits until writes to a blob have ended.
    Pause(BlobId),
    /// Lets writes to a blob begin again.
    Resume(BlobId),
    /// Waits until no channel uses a state before the last that this plan published.
    Release,
    /// Clears clusters: runs of the first one and their number.
    Clear(Vec<(u32, u32)>, ClearMethod),
    /// Zeroes pages and their copies.
    Erase(Vec<u32>),
    /// Makes copies' places usable that were zeroed.
    Erased(Vec<u64>),
    /// Makes pages and clusters free.
    Free {
        /// Metadata pages.
        pages: Vec<u32>,
        /// Clusters.
        clusters: Vec<u32>,
    },
    /// The store has no masks any more but intent: changes may begin.
    Started,
    /// The store takes no changes any more.
    Closed,
}

/// The steps of a change, and what is reserved for it until it is committed.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) steps: VecDeque<Step>,
    pub(super) pages: Vec<u32>,
    pub(super) clusters: Vec<u32>,
    pub(super) outcome: Option<ChangeOutcome>,
}

impl Plan {
    pub(super) fn add(&mut self, step: Step) {
        self.steps.push_back(step);
    }

    pub(super) fn extend(&mut self, steps: impl IntoIterator<Item = Step>) {
        self.steps.extend(steps);
    }

    pub(super) fn publish(&mut self, updates: impl IntoIterator<Item = Update>) {
        self.add(Step::Publish(updates.into_iter().collect()));
    }

    /// Frees pages and clusters when no channel can use them: pages are zeroed, clusters cleared.
    pub(super) fn free(&mut self, pages: Vec<u32>, clusters: Vec<u32>, method: ClearMethod) {
        if pages.is_empty() && clusters.is_empty() {
            return;
        }
        if !clusters.is_empty() {
            self.add(Step::Release);
            if method != ClearMethod::None {
                self.add(Step::Clear(runs(&clusters), method));
            }
        }
        self.add(Step::Erase(pages.clone()));
        self.add(Step::Free { pages, clusters });
    }
}

/// Runs of consecutive numbers, which need not be in order.
pub(super) fn runs(numbers: &[u32]) -> Vec<(u32, u32)> {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for number in sorted {
        match runs.last_mut() {
            Some((first, length)) if *first + *length == number => *length += 1,
            _ => runs.push((number, 1)),
        }
    }
    runs
}
