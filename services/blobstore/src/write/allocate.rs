//! First writes to clusters, and changes that are many of them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use wire_blob::{BlobId, CLUSTERS_PER_EXTENT_PAGE};

use super::change::{BlobChange, ChangeError, ChangeId, ChangeOutcome, ChangeProgress, StoreEvent};
use super::device::{StoreAction, StoreIoFailed};
use super::fault::Fault;
use super::plan::{Plan, Step, Update};
use super::rewrite::freed_pages;
use super::task::{Locks, Progress, Task, Waiter};
use super::{IoOwner, OpenBlobStore};
use crate::blob::Blob;
use crate::read::BlobSegment;

/// Clusters that an inflation copies at the same time.
const COPIES_MAX: usize = 4;

/// A first write that waits for its turn.
pub(super) struct WaitingWrite {
    pub(super) change: ChangeId,
    pub(super) index: u32,
    pub(super) written: Range<u32>,
}

/// A first write whose cluster is being filled.
struct Filling {
    index: u32,
    cluster: u32,
    in_flight: usize,
    is_written: bool,
    failed: bool,
    /// Whether it is a copy of an inflation, which takes long.
    is_job: bool,
}

impl Filling {
    fn is_ready(&self) -> bool {
        self.in_flight == 0 && self.is_written
    }
}

/// The first writes to one blob.
#[derive(Default)]
pub(super) struct Lane {
    pub(super) waiting: VecDeque<WaitingWrite>,
    filling: BTreeMap<ChangeId, Filling>,
    /// Whether the cluster map is being written, or a copy of it.
    is_committing: bool,
    /// The first writes whose clusters it has.
    committing: BTreeMap<ChangeId, Filling>,
}

impl Lane {
    pub(super) fn is_active(&self) -> bool {
        !self.filling.is_empty() || self.is_committing
    }

    /// Whether a first write waits that began before a change.
    pub(super) fn waits_before(&self, change: ChangeId) -> bool {
        self.waiting.iter().any(|write| write.change < change)
    }

    fn is_empty(&self) -> bool {
        !self.is_active() && self.waiting.is_empty()
    }

    fn all(&self) -> impl Iterator<Item = &Filling> {
        self.filling.values().chain(self.committing.values())
    }

    fn find(&mut self, change: ChangeId) -> Option<&mut Filling> {
        self.filling.get_mut(&change).or_else(|| self.committing.get_mut(&change))
    }
}

/// The extent pages with the clusters of first writes, by their place in the map.
fn extent_pages_of(members: &BTreeMap<ChangeId, Filling>) -> BTreeSet<u32> {
    members.values().map(|filling| filling.index / CLUSTERS_PER_EXTENT_PAGE).collect()
}

/// An inflation, or a decoupling.
pub(super) struct Job {
    change: ChangeId,
    pub(super) blob: BlobId,
    inflate: bool,
    missing: VecDeque<u32>,
    members: BTreeSet<ChangeId>,
    progress: ChangeProgress,
    error: Option<ChangeError>,
}

impl OpenBlobStore {
    /// Starts first writes to blobs that nothing else changes, and writes the cluster maps of those whose
    /// data is there. Whether it did anything.
    pub(super) fn start_allocations(&mut self) -> bool {
        let blobs: Vec<BlobId> = self.lanes.keys().copied().collect();
        let mut has_changed = false;
        for blob in blobs {
            let Some(mut lane) = self.lanes.remove(&blob) else { continue };
            let before = match self.locked_from(blob) {
                Some(change) if !self.is_closed() => change,
                _ => ChangeId(u64::MAX),
            };
            has_changed |= self.fill(blob, &mut lane, before);
            has_changed |= self.commit(blob, &mut lane);
            if !lane.is_empty() {
                self.lanes.insert(blob, lane);
            }
        }
        has_changed
    }

    /// Begins to fill the clusters of first writes that began before a change.
    fn fill(&mut self, blob: BlobId, lane: &mut Lane, before: ChangeId) -> bool {
        let mut has_changed = false;
        let mut left = VecDeque::new();
        while let Some(write) = lane.waiting.pop_front() {
            let is_busy = lane.all().any(|other| other.index == write.index);
            if write.change >= before || is_busy && !self.is_closed() {
                left.push_back(write);
                continue;
            }
            has_changed = true;
            let change = write.change;
            match self.begin_fill(blob, write) {
                Ok(Ok(filling)) => drop(lane.filling.insert(change, filling)),
                Ok(Err(cluster)) => self.end_change(change, Ok(ChangeOutcome::Cluster(cluster))),
                Err(error) => self.end_change(change, Err(error)),
            }
        }
        lane.waiting = left;
        has_changed
    }

    /// Takes a cluster and begins to fill what the write does not; or returns the one that is there.
    fn begin_fill(&mut self, id: BlobId, write: WaitingWrite) -> Result<Result<Filling, u32>, ChangeError> {
        if self.is_closed() {
            return Err(ChangeError::Broken);
        }
        let WaitingWrite { change, index, written } = write;
        let is_job = self.job_of(change).is_some();
        let blob = self.published.blob(id).ok_or(ChangeError::NoBlob(id))?;
        // A snapshot may be inflated too.
        if blob.is_read_only() && !is_job {
            return Err(ChangeError::ReadOnly(id));
        }
        let cluster_bytes = self.published.layout.cluster_bytes;
        let is_block = |at: u32| at.is_multiple_of(self.device.block_bytes) && at <= cluster_bytes;
        if index >= blob.clusters.length() || !is_block(written.start) || !is_block(written.end) {
            return Err(ChangeError::Invalid("the write is beyond the end, or not of whole blocks"));
        }
        if let Some(cluster) = blob.clusters.get(index) {
            return Ok(Err(cluster));
        }
        let rest = match written.is_empty() {
            true => [0..cluster_bytes, 0..0],
            false => [0..written.start, written.end..cluster_bytes],
        };
        let mut fills = Vec::new();
        for range in rest.into_iter().filter(|range| !range.is_empty()) {
            let offset = u64::from(index) * u64::from(cluster_bytes) + u64::from(range.start);
            let segments = self.published.read(id, offset, u64::from(range.end - range.start));
            let segments: Result<Vec<BlobSegment>, _> = segments.and_then(Iterator::collect);
            fills.push((range, segments.map_err(|_| ChangeError::Invalid("the parent cannot be read"))?));
        }
        let free = self.clusters.free();
        let cluster = self.clusters.take().ok_or(ChangeError::NoClusters { need: 1, free })?;
        self.note_space();
        let cluster_offset = self.published.layout.cluster_offset(cluster);
        if self.has_fault(Fault::RestNotFilled) {
            fills.clear();
        }
        let in_flight = fills.len();
        for (range, from) in fills {
            let offset = cluster_offset + u64::from(range.start);
            let has_data = from.iter().any(|segment| !matches!(segment, BlobSegment::Zeroes { .. }));
            let action = match has_data {
                true => StoreAction::Copy { from, offset },
                false => StoreAction::WriteZeroes { offset, bytes: u64::from(range.end - range.start) },
            };
            self.push_io(IoOwner::Fill(id, change), action);
        }
        let is_written = is_job || written.is_empty();
        if !is_written {
            self.events.push_back(StoreEvent::WriteCluster { change, offset: cluster_offset });
        }
        Ok(Ok(Filling { index, cluster, in_flight, is_written, failed: false, is_job }))
    }

    pub(super) fn fill_completed(&mut self, blob: BlobId, change: ChangeId, is_ok: bool) {
        if let Some(filling) = self.lanes.get_mut(&blob).and_then(|lane| lane.find(change)) {
            filling.in_flight -= 1;
            filling.failed |= !is_ok;
        }
    }

    pub(super) fn data_written(&mut self, change: ChangeId, result: Result<(), StoreIoFailed>) {
        let filling = self.lanes.values_mut().find_map(|lane| lane.find(change));
        if let Some(filling) = filling {
            filling.is_written = true;
            filling.failed |= result.is_err();
        }
    }

    /// Ends a first write that failed. In a store that is broken a copy may name its cluster.
    fn fill_failed(&mut self, change: ChangeId, cluster: u32) {
        if !self.is_broken {
            self.clusters.release([cluster]);
        }
        self.end_change(change, Err(ChangeError::Io));
    }

    /// Writes the cluster map with all clusters that are filled, if it is not being written. Where a page of
    /// it is replaced in place, its copy is written while they are filled.
    fn commit(&mut self, id: BlobId, lane: &mut Lane) -> bool {
        let mut has_changed = false;
        let failed = |filling: &Filling| filling.is_ready() && filling.failed;
        while let Some(change) = lane.filling.iter().find(|(_, filling)| failed(filling)).map(|(id, _)| *id) {
            let Some(filling) = lane.filling.remove(&change) else { break };
            self.fill_failed(change, filling.cluster);
            has_changed = true;
        }
        if lane.is_committing {
            return has_changed;
        }
        let taken = self.to_commit(id, lane);
        if taken.is_empty() {
            return has_changed;
        }
        let members = taken.into_iter().filter_map(|change| Some((change, lane.filling.remove(&change)?)));
        lane.committing = members.collect();
        match self.plan_commit(id, &lane.committing, extent_pages_of(&lane.committing)) {
            Ok(plan) => {
                lane.is_committing = true;
                self.add_task(Task::new(plan, Waiter::Allocations(id), Locks::default()));
            }
            Err(error) => self.end_committing(lane, &Err(error)),
        }
        true
    }

    /// The first writes whose cluster map can be written now, or a copy of it.
    fn to_commit(&self, id: BlobId, lane: &Lane) -> Vec<ChangeId> {
        let blob = self.published.blob(id).filter(|blob| blob.has_extent_table);
        let has_page = |filling: &Filling| {
            blob.is_some_and(|blob| blob.extent_page(filling.index / CLUSTERS_PER_EXTENT_PAGE).is_some())
        };
        // New pages are written when what they name is there.
        let may_be_early = !self.is_closed()
            && !self.replaces_whole_pages()
            && self.slots.has_many_free()
            && lane.filling.values().all(|filling| !filling.is_ready() || has_page(filling));
        let is_taken = |filling: &Filling| {
            filling.is_ready() || may_be_early && !filling.failed && !filling.is_job && has_page(filling)
        };
        lane.filling.iter().filter(|(_, filling)| is_taken(filling)).map(|(change, _)| *change).collect()
    }

    /// Plans to write a cluster map with the clusters of first writes: at least these pages of it.
    fn plan_commit(
        &mut self,
        id: BlobId,
        members: &BTreeMap<ChangeId, Filling>,
        pages: BTreeSet<u32>,
    ) -> Result<Plan, ChangeError> {
        if self.is_broken {
            return Err(ChangeError::Broken);
        }
        let mut plan = Plan::default();
        match self.plan_clusters(&mut plan, id, members, pages) {
            Ok(()) => Ok(plan),
            Err(error) => {
                self.abandon(plan);
                Err(error)
            }
        }
    }

    fn plan_clusters(
        &mut self,
        plan: &mut Plan,
        id: BlobId,
        members: &BTreeMap<ChangeId, Filling>,
        pages: BTreeSet<u32>,
    ) -> Result<(), ChangeError> {
        let old = self.find(id)?;
        let mut new = old.clone();
        for filling in members.values() {
            new.clusters.set(filling.index, Some(filling.cluster));
        }
        let places: Option<Vec<(u32, u32)>> =
            pages.into_iter().map(|index| Some((index, old.extent_page(index)?))).collect();
        let Some(places) = places.filter(|_| old.has_extent_table) else {
            return self.plan_commit_first_page(plan, &old, new);
        };
        // The data is durable before the map has its cluster. A copy names it earlier, but nothing reads that
        // before the page is being replaced.
        let mut barrier = vec![Step::Filled(id), Step::Flush];
        for (index, page) in places {
            let barrier = std::mem::replace(&mut barrier, vec![Step::Barrier]);
            self.plan_extent_in_place(plan, &new, index, page, barrier)?;
        }
        plan.publish([Update::Set(Arc::new(new))]);
        Ok(())
    }

    /// Waits for the data of first writes whose cluster map is to be written. Without those that failed, the
    /// plan begins again.
    pub(super) fn filled(&mut self, id: BlobId, task: &mut Task) -> Progress {
        let Some(lane) = self.lanes.get_mut(&id) else { return Progress::Next };
        if !lane.committing.values().all(Filling::is_ready) {
            return Progress::Wait;
        }
        if !lane.committing.values().any(|filling| filling.failed) {
            return Progress::Next;
        }
        if task.is_writing() {
            return Progress::Wait;
        }
        let all = std::mem::take(&mut lane.committing);
        // The copies that name the clusters of those that failed are replaced.
        let pages = extent_pages_of(&all);
        let (failed, members): (BTreeMap<_, _>, _) = all.into_iter().partition(|(_, at)| at.failed);
        let planned = self.plan_commit(id, &members, pages);
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.committing = members;
        }
        failed.into_iter().for_each(|(change, filling)| self.fill_failed(change, filling.cluster));
        match planned {
            Ok(plan) => {
                task.steps = self.with_fault(plan.steps);
                Progress::Again
            }
            Err(_) => {
                task.failed = true;
                Progress::Wait
            }
        }
    }
    fn plan_commit_first_page(
        &mut self,
        plan: &mut Plan,
        old: &Blob,
        mut new: Blob,
    ) -> Result<(), ChangeError> {
        let first = self.plan_pages(plan, &mut new, &[old], &BTreeSet::new())?;
        plan.extend([first.copy(), Step::Flush]);
        plan.extend(first.replace());
        let freed = freed_pages(&[old], &[&new]);
        plan.publish([Update::Set(Arc::new(new))]);
        plan.free(freed, Vec::new(), old.clear_method());
        Ok(())
    }

    pub(super) fn allocations_ended(&mut self, blob: BlobId, result: &Result<ChangeOutcome, ChangeError>) {
        if let Some(mut lane) = self.lanes.remove(&blob) {
            self.end_committing(&mut lane, result);
            self.lanes.insert(blob, lane);
        }
    }

    /// Ends first writes whose cluster map is written, or cannot be. What is in flight is waited for.
    fn end_committing(&mut self, lane: &mut Lane, result: &Result<ChangeOutcome, ChangeError>) {
        lane.is_committing = false;
        for (change, filling) in std::mem::take(&mut lane.committing) {
            match result {
                Ok(_) => self.end_change(change, Ok(ChangeOutcome::Cluster(filling.cluster))),
                Err(_) if !filling.is_ready() => {
                    lane.filling.insert(change, Filling { failed: true, ..filling });
                }
                Err(error) => {
                    if !self.is_broken {
                        self.clusters.release([filling.cluster]);
                    }
                    self.end_change(change, Err(error.clone()));
                }
            }
        }
    }

    fn job_of(&mut self, member: ChangeId) -> Option<&mut Job> {
        self.jobs.iter_mut().find(|job| job.members.contains(&member))
    }

    /// Begins an inflation or a decoupling. `false` if nothing needs to be done.
    pub(super) fn begin_job(
        &mut self,
        change: ChangeId,
        blob: BlobId,
        inflate: bool,
    ) -> Result<bool, ChangeError> {
        let found = self.find(blob)?;
        if inflate && !found.is_thin() {
            return Ok(false);
        }
        let missing = self.missing_clusters(&found, inflate)?;
        let (need, free) = (missing.len() as u32, self.clusters.free());
        if need > free {
            return Err(ChangeError::NoClusters { need, free });
        }
        self.jobs.push(Job {
            change,
            blob,
            inflate,
            missing: missing.into(),
            members: BTreeSet::new(),
            progress: ChangeProgress { done: 0, all: need },
            error: None,
        });
        Ok(true)
    }

    /// Begins copies of jobs, and ends those that have them all. Whether it did anything.
    pub(super) fn run_jobs(&mut self) -> bool {
        let mut has_changed = false;
        for at in 0..self.jobs.len() {
            while self.jobs[at].members.len() < COPIES_MAX && self.jobs[at].error.is_none() {
                let Some(index) = self.jobs[at].missing.pop_front() else { break };
                let change = self.next_id();
                let job = &mut self.jobs[at];
                job.members.insert(change);
                let lane = self.lanes.entry(job.blob).or_default();
                lane.waiting.push_back(WaitingWrite { change, index, written: 0..0 });
                has_changed = true;
            }
        }
        while let Some(at) = self
            .jobs
            .iter()
            .position(|job| job.members.is_empty() && (job.missing.is_empty() || job.error.is_some()))
        {
            let job = self.jobs.remove(at);
            has_changed = true;
            match job.error {
                Some(error) => self.end_change(job.change, Err(error)),
                None => {
                    // The rest of it is a change like others, before those that wait for it.
                    self.finishing.insert(job.change);
                    let change = match job.inflate {
                        true => BlobChange::Inflate { blob: job.blob },
                        false => BlobChange::Decouple { blob: job.blob },
                    };
                    self.queue.push_front((job.change, change));
                }
            }
        }
        has_changed
    }

    /// Whether the end of a first write is one of a job.
    pub(super) fn job_member_ended(
        &mut self,
        change: ChangeId,
        result: &Result<ChangeOutcome, ChangeError>,
    ) -> bool {
        let Some(job) = self.job_of(change) else { return false };
        job.members.remove(&change);
        match result {
            Ok(_) => job.progress.done += 1,
            Err(error) => job.error = Some(error.clone()),
        }
        true
    }

    pub(super) fn cancel_job(&mut self, change: ChangeId) {
        if let Some(job) = self.jobs.iter_mut().find(|job| job.change == change) {
            job.error.get_or_insert(ChangeError::Cancelled);
        }
    }

    pub(super) fn job_progress(&self, change: ChangeId) -> Option<ChangeProgress> {
        self.jobs.iter().find(|job| job.change == change).map(|job| job.progress)
    }
}
