//! Faults that tests plant, to see that the crash tests would find them.

use std::collections::VecDeque;

use super::OpenBlobStore;
use super::plan::Step;

/// Something that is left out, or done too early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code))]
pub(crate) enum Fault {
    /// The device's cache is not flushed.
    FlushLeftOut,
    /// It is not flushed between the data of a first write and the cluster map.
    DataFlushLeftOut,
    /// The cluster map is written while the data of a first write is.
    DataNotAwaited,
    /// A first page is written before the pages that it names.
    FirstPageBeforeOthers,
    /// Pages are replaced without a copy.
    CopyLeftOut,
    /// Clusters and pages are free before the change that frees them is durable.
    FreedEarly,
    /// Clusters are free while channels may still write to them.
    NotReleased,
    /// What a first write does not cover keeps its old content.
    RestNotFilled,
    /// The name of an external snapshot is lost.
    ExternalNameLost,
    /// A snapshot that is being made is not marked.
    SnapshotNotMarked,
    /// A snapshot that is being deleted is not marked.
    RemovalNotMarked,
    /// Writes are not paused while a snapshot is made.
    NotPaused,
    /// The super block is clean while the store is changed.
    LeftClean,
    /// The super block is clean before the masks are written.
    MasksAfterSuperBlock,
    /// What loading decided is not written.
    RecoveryLeftOut,
}

impl Fault {
    #[cfg(test)]
    pub(crate) const ALL: [Fault; 15] = [
        Fault::FlushLeftOut,
        Fault::DataFlushLeftOut,
        Fault::DataNotAwaited,
        Fault::FirstPageBeforeOthers,
        Fault::CopyLeftOut,
        Fault::FreedEarly,
        Fault::NotReleased,
        Fault::RestNotFilled,
        Fault::ExternalNameLost,
        Fault::SnapshotNotMarked,
        Fault::RemovalNotMarked,
        Fault::NotPaused,
        Fault::LeftClean,
        Fault::MasksAfterSuperBlock,
        Fault::RecoveryLeftOut,
    ];
}

impl OpenBlobStore {
    #[cfg(test)]
    pub(crate) fn plant(&mut self, fault: Fault) {
        self.fault = Some(fault);
    }

    #[cfg(test)]
    pub(super) fn has_fault(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    #[cfg(not(test))]
    pub(super) fn has_fault(&self, _: Fault) -> bool {
        false
    }

    /// The steps of a plan with the fault that was planted.
    pub(super) fn with_fault(&self, steps: VecDeque<Step>) -> VecDeque<Step> {
        let mut steps = Vec::from(steps);
        if self.has_fault(Fault::FirstPageBeforeOthers)
            && let Some(at) = steps.iter().position(|step| matches!(step, Step::Commit))
            && let Some(io) = steps[..at].iter().rposition(|step| matches!(step, Step::Io(_)))
        {
            let io = steps.remove(io);
            steps.insert((at + 2).min(steps.len()), io);
        }
        if self.has_fault(Fault::FreedEarly) {
            steps.sort_by_key(|step| !matches!(step, Step::Free { .. }));
        }
        if self.has_fault(Fault::MasksAfterSuperBlock) && matches!(steps.last(), Some(Step::Closed)) {
            let ios: Vec<usize> = (0..steps.len()).filter(|at| matches!(steps[*at], Step::Io(_))).collect();
            if let [masks, super_block] = ios[..] {
                steps.swap(masks, super_block);
            }
        }
        steps.into()
    }
}
