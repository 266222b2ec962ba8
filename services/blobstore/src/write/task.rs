//! Plans that run.

use std::collections::VecDeque;
use std::sync::Arc;

use wire_blob::{BitMask, BlobId, ChecksumsId, CopyTarget, PAGE_BYTES, PageGroups};

use super::change::{ChangeError, ChangeId, ChangeOutcome, ClearMethod, StoreEvent};
use super::device::StoreAction;
use super::fault::Fault;
use super::plan::{Plan, Step, Update};
use super::{IoOwner, OpenBlobStore, Session};
use crate::blob::{Blob, BlobParent};
use crate::layout::BlobStoreLayout;

/// Bytes that are cleared in one I/O.
const CLEAR_BYTES_MAX: u64 = 256 << 20;
/// I/O of clearing in flight, of each change.
const CLEARS_MAX: usize = 4;
/// Groups of pages that are marked as used together, so that this is rarely written.
const GROUPS_AHEAD: u32 = 16;

/// What a plan has for itself while it runs.
#[derive(Clone, Debug, Default)]
pub(super) struct Locks {
    pub(super) blobs: Vec<BlobId>,
    /// Everything: nothing else runs.
    pub(super) all: bool,
}

impl Locks {
    pub(super) fn of(blobs: impl IntoIterator<Item = BlobId>) -> Locks {
        Locks { blobs: blobs.into_iter().collect(), all: false }
    }

    pub(super) fn all() -> Locks {
        Locks { blobs: Vec::new(), all: true }
    }
}

/// Who is notified of the end of a plan.
#[derive(Clone, Debug)]
pub(super) enum Waiter {
    /// The store itself.
    None,
    /// A change.
    Change(ChangeId),
    /// The first writes to a blob whose cluster map is written.
    Allocations(BlobId),
}

/// A plan that runs.
pub(super) struct Task {
    pub(super) waiter: Waiter,
    pub(super) locks: Locks,
    pub(super) steps: VecDeque<Step>,
    pages: Vec<u32>,
    clusters: Vec<u32>,
    outcome: ChangeOutcome,
    in_flight: usize,
    /// Whether something was written since the last barrier.
    is_dirty: bool,
    /// The flush that a barrier waits for.
    flush: Option<u64>,
    committed: bool,
    pub(super) failed: bool,
    /// Targets whose copies are written, while they themselves are not.
    copies: Vec<CopyTarget>,
    /// A page that is being replaced in place.
    in_place: Option<CopyTarget>,
    paused: Option<(BlobId, bool)>,
    epoch: u64,
    /// Groups whose write is in flight.
    groups: Option<Vec<BitMask>>,
    has_uncleared: bool,
    pub(super) cleared: u32,
    pub(super) to_clear: u32,
}

/// Whether a step is done.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Next,
    /// The first step is another one now.
    Again,
    Wait,
}

/// Flushes of the device: one at a time, for all that wait.
#[derive(Default)]
pub(super) struct Flushes {
    pub(super) started: u64,
    pub(super) completed: u64,
    pub(super) failed: u64,
    wanted: bool,
}

impl Flushes {
    /// The number of a flush that begins from now on.
    fn want(&mut self) -> u64 {
        self.wanted = true;
        self.started + 1
    }

    fn is_in_flight(&self) -> bool {
        self.started > self.completed.max(self.failed)
    }
}

/// The groups of pages that may be in use.
pub(super) struct UsedGroups {
    parts: Vec<PageGroups>,
    durable: Vec<BitMask>,
    is_writing: bool,
}

impl UsedGroups {
    pub(super) fn new(pages: u32) -> UsedGroups {
        let parts: Vec<PageGroups> = (0..PageGroups::parts(pages)).map(PageGroups::new).collect();
        UsedGroups {
            durable: parts.iter().map(|part| part.groups.clone()).collect(),
            parts,
            is_writing: false,
        }
    }

    fn place(page: u32) -> (usize, u32) {
        let group = page / PageGroups::GROUP_PAGES;
        ((group / PageGroups::GROUPS) as usize, group % PageGroups::GROUPS)
    }

    /// Marks the group of a page.
    pub(super) fn mark(&mut self, page: u32) {
        let (part, group) = Self::place(page);
        self.parts[part].groups.set(group);
    }

    /// Says with each write which checksums of data belong to the store.
    pub(super) fn set_checksums(&mut self, checksums: Option<ChecksumsId>) {
        self.parts.iter_mut().for_each(|part| part.checksums = checksums);
    }

    pub(super) fn checksums(&self) -> Option<ChecksumsId> {
        self.parts.first().and_then(|part| part.checksums)
    }

    pub(super) fn all(&self) -> &[PageGroups] {
        &self.parts
    }

    /// All marks are durable.
    pub(super) fn set_durable(&mut self) {
        self.durable = self.parts.iter().map(|part| part.groups.clone()).collect();
    }

    fn is_durable(&self, page: u32) -> bool {
        let (part, group) = Self::place(page);
        self.durable[part].get(group)
    }
}

impl Task {
    pub(super) fn new(plan: Plan, waiter: Waiter, locks: Locks) -> Task {
        let to_clear = plan.steps.iter().map(|step| match step {
            Step::Clear(runs, _) => runs.iter().map(|(_, length)| *length).sum(),
            _ => 0,
        });
        Task {
            to_clear: to_clear.sum(),
            waiter,
            locks,
            steps: plan.steps,
            pages: plan.pages,
            clusters: plan.clusters,
            outcome: plan.outcome.unwrap_or(ChangeOutcome::Done),
            in_flight: 0,
            is_dirty: false,
            flush: None,
            committed: false,
            failed: false,
            copies: Vec::new(),
            in_place: None,
            paused: None,
            epoch: 0,
            groups: None,
            has_uncleared: false,
            cleared: 0,
        }
    }

    pub(super) fn completed(&mut self, is_ok: bool) {
        self.in_flight -= 1;
        match self.steps.front() {
            // Nothing depends on it, but the clusters are not given out again before the store is loaded.
            Some(Step::Clear(..)) => self.has_uncleared |= !is_ok,
            _ => self.failed |= !is_ok,
        }
    }

    /// Whether I/O of the plan is in flight.
    pub(super) fn is_writing(&self) -> bool {
        self.in_flight > 0
    }

    pub(super) fn set_paused(&mut self, blob: BlobId) {
        if let Some((paused, is_paused)) = &mut self.paused {
            *is_paused |= *paused == blob;
        }
    }
}

impl OpenBlobStore {
    /// Runs tasks as far as they can. Whether one ended.
    pub(super) fn run_tasks(&mut self) -> bool {
        let mut has_ended = false;
        loop {
            let mut has_advanced = false;
            let ids: Vec<u64> = self.tasks.keys().copied().collect();
            for id in ids {
                let Some(mut task) = self.tasks.remove(&id) else { continue };
                task.failed |= self.is_broken;
                while !task.failed {
                    match self.step(id, &mut task) {
                        Progress::Next => drop(task.steps.pop_front()),
                        Progress::Again => {}
                        Progress::Wait => break,
                    }
                    has_advanced = true;
                }
                if task.in_flight == 0 && (task.failed || task.steps.is_empty()) {
                    self.end_task(task);
                    (has_advanced, has_ended) = (true, true);
                } else {
                    self.tasks.insert(id, task);
                }
            }
            if !has_advanced {
                break;
            }
        }
        if self.flushes.wanted && !self.flushes.is_in_flight() {
            self.flushes.wanted = false;
            self.flushes.started += 1;
            self.push_io(IoOwner::Flush, StoreAction::Flush);
        }
        has_ended
    }

    pub(super) fn flush_completed(&mut self, is_ok: bool) {
        if is_ok {
            self.flushes.completed = self.flushes.started;
            self.slots.flushed(self.flushes.completed);
        } else {
            self.flushes.failed = self.flushes.started;
            // What was written before may be lost, also by changes that have ended.
            self.is_broken = true;
        }
    }

    fn io(&mut self, id: u64, task: &mut Task, action: StoreAction) {
        task.in_flight += 1;
        task.is_dirty = true;
        self.push_io(IoOwner::Task(id), action);
    }

    /// Does the first step of a task, or begins it.
    fn step(&mut self, id: u64, task: &mut Task) -> Progress {
        let Some(step) = task.steps.front_mut() else { return Progress::Wait };
        match step {
            Step::Io(actions) => {
                for action in std::mem::take(actions) {
                    self.io(id, task, action);
                }
                Progress::Next
            }
            Step::Groups(pages) => {
                let pages = std::mem::take(pages);
                let progress = self.write_groups(id, task, &pages);
                if let Some(Step::Groups(again)) = task.steps.front_mut() {
                    *again = pages;
                }
                progress
            }
            Step::Copy(..) => self.copy(id, task),
            Step::Filled(_) if self.has_fault(Fault::DataNotAwaited) => Progress::Next,
            Step::Filled(blob) => {
                let blob = *blob;
                self.filled(blob, task)
            }
            Step::Barrier => self.barrier(task, false),
            Step::Flush => self.barrier(task, !self.has_fault(Fault::DataFlushLeftOut)),
            Step::Commit => {
                task.committed = true;
                Progress::Next
            }
            Step::InPlace(..) => self.in_place(id, task),
            Step::Publish(updates) => {
                let updates = std::mem::take(updates);
                self.publish(updates);
                task.epoch = self.epoch;
                Progress::Next
            }
            Step::Pause(_) if self.has_fault(Fault::NotPaused) => Progress::Next,
            Step::Pause(blob) => match task.paused {
                Some((_, true)) => {
                    task.paused = None;
                    Progress::Next
                }
                Some(_) => Progress::Wait,
                None => {
                    task.paused = Some((*blob, false));
                    self.events.push_back(StoreEvent::Pause { blob: *blob });
                    Progress::Wait
                }
            },
            Step::Resume(blob) => {
                self.events.push_back(StoreEvent::Resume { blob: *blob });
                Progress::Next
            }
            Step::Release => match self.released >= task.epoch || self.has_fault(Fault::NotReleased) {
                true => Progress::Next,
                false => Progress::Wait,
            },
            Step::Clear(..) => self.clear(id, task),
            Step::Erase(pages) => {
                let pages = std::mem::take(pages);
                self.erase(id, task, &pages)
            }
            Step::Erased(copies) => {
                self.slots.erased(copies);
                Progress::Next
            }
            Step::Free { pages, clusters } => {
                self.pages.release(std::mem::take(pages));
                match task.has_uncleared {
                    false => self.clusters.release(std::mem::take(clusters)),
                    true => self.uncleared.extend_from_slice(clusters),
                }
                Arc::make_mut(&mut self.published).free_clusters = self.clusters.free();
                self.note_space();
                Progress::Next
            }
            Step::Started => {
                self.session = match self.session {
                    Session::Starting if !self.published.recovery().is_empty() => Session::Recovering,
                    _ => Session::Started,
                };
                Progress::Next
            }
            Step::Closed => {
                self.is_closed = true;
                Progress::Next
            }
        }
    }

    fn copy(&mut self, id: u64, task: &mut Task) -> Progress {
        let Some(Step::Copy(target, content)) = task.steps.front() else { return Progress::Wait };
        if self.replaces_whole_pages() {
            return Progress::Next;
        }
        let is_again = task.copies.contains(target);
        let Some((offset, data)) = self.slots.take(*target, content, is_again) else {
            if self.slots.needs_flush() && self.device.has_volatile_cache {
                self.flushes.want();
            }
            return Progress::Wait;
        };
        if !is_again {
            task.copies.push(*target);
        }
        self.io(id, task, StoreAction::Write { offset, data });
        Progress::Next
    }

    /// Writes a page in place when all I/O before has completed, and waits for that.
    fn in_place(&mut self, id: u64, task: &mut Task) -> Progress {
        if task.in_flight > 0 {
            return Progress::Wait;
        }
        if let Some(target) = task.in_place.take() {
            self.page_written(target);
            task.copies.retain(|copy| *copy != target);
            return Progress::Next;
        }
        let Some(Step::InPlace(target, content)) = task.steps.front_mut() else { return Progress::Wait };
        let (target, data) = (*target, std::mem::take(content));
        let offset = match target {
            CopyTarget::SuperBlock => 0,
            CopyTarget::Page(page) => self.published.layout.page_offset(page),
        };
        task.in_place = Some(target);
        self.io(id, task, StoreAction::Write { offset, data });
        Progress::Wait
    }

    /// Zeroes pages and the copies of them.
    fn erase(&mut self, id: u64, task: &mut Task, pages: &[u32]) -> Progress {
        let page_bytes = u64::from(self.published.layout.page_bytes);
        for (first, length) in super::plan::runs(pages) {
            let offset = self.published.layout.page_offset(first);
            let bytes = u64::from(length) * page_bytes;
            self.io(id, task, StoreAction::WriteZeroes { offset, bytes });
        }
        let copies = self.slots.forget(pages);
        for offset in copies.iter().copied() {
            self.io(id, task, StoreAction::WriteZeroes { offset, bytes: PAGE_BYTES as u64 });
        }
        task.steps[0] = Step::Erased(copies);
        task.steps.push_front(Step::Barrier);
        Progress::Again
    }

    /// Whether the device replaces a page as a whole or not at all.
    pub(super) fn replaces_whole_pages(&self) -> bool {
        self.device.atomic_write_bytes as usize >= PAGE_BYTES || self.has_fault(Fault::CopyLeftOut)
    }

    fn page_written(&mut self, target: CopyTarget) {
        let flushes = self.flushes.started;
        self.slots.written(target, flushes);
        if !self.device.has_volatile_cache {
            self.slots.flushed(u64::MAX);
        }
    }

    fn barrier(&mut self, task: &mut Task, always: bool) -> Progress {
        if task.in_flight > 0 {
            return Progress::Wait;
        }
        let needs_flush = self.device.has_volatile_cache && !self.has_fault(Fault::FlushLeftOut);
        if !needs_flush || !task.is_dirty && !always {
            task.is_dirty = false;
            return Progress::Next;
        }
        let flush = *task.flush.get_or_insert_with(|| self.flushes.want());
        if self.flushes.failed >= flush {
            task.failed = true;
            return Progress::Wait;
        }
        if self.flushes.completed < flush {
            return Progress::Wait;
        }
        task.flush = None;
        task.is_dirty = false;
        Progress::Next
    }

    fn write_groups(&mut self, id: u64, task: &mut Task, pages: &[u32]) -> Progress {
        if let Some(written) = task.groups.take() {
            // The barrier after the write.
            if self.barrier(task, false) == Progress::Wait {
                task.groups = Some(written);
                return Progress::Wait;
            }
            self.groups.durable = written;
            self.groups.is_writing = false;
        }
        if pages.iter().all(|page| self.groups.is_durable(*page)) {
            return Progress::Next;
        }
        if self.groups.is_writing {
            return Progress::Wait;
        }
        let end = self.published.layout.pages;
        for page in pages {
            let ahead = (0..GROUPS_AHEAD).map(|step| page.saturating_add(step * PageGroups::GROUP_PAGES));
            ahead.filter(|page| *page < end).for_each(|page| self.groups.mark(page));
        }
        let places: Vec<(u32, u64)> = crate::load::group_places(&self.published.super_block).collect();
        for (part, offset) in places {
            let groups = &self.groups.parts[part as usize];
            if groups.groups != self.groups.durable[part as usize] {
                let data = groups.encode().to_vec();
                self.io(id, task, StoreAction::Write { offset, data });
            }
        }
        self.groups.is_writing = true;
        task.groups = Some(self.groups.parts.iter().map(|part| part.groups.clone()).collect());
        Progress::Wait
    }

    fn clear(&mut self, id: u64, task: &mut Task) -> Progress {
        let cluster_bytes = u64::from(self.published.layout.cluster_bytes);
        let clusters_max = (CLEAR_BYTES_MAX / cluster_bytes).max(1) as u32;
        while task.in_flight < CLEARS_MAX {
            let Some(Step::Clear(runs, method)) = task.steps.front_mut() else { break };
            let Some((first, length)) = runs.last_mut() else { break };
            let method = *method;
            let now = (*length).min(clusters_max);
            let (offset, bytes) = (u64::from(*first) * cluster_bytes, u64::from(now) * cluster_bytes);
            (*first, *length) = (*first + now, *length - now);
            if *length == 0 {
                runs.pop();
            }
            task.cleared += now;
            let action = match method {
                ClearMethod::WriteZeroes => StoreAction::WriteZeroes { offset, bytes },
                _ => StoreAction::Deallocate { offset, bytes },
            };
            self.io(id, task, action);
        }
        match task.steps.front() {
            Some(Step::Clear(runs, _)) if runs.is_empty() && task.in_flight == 0 => Progress::Next,
            _ => Progress::Wait,
        }
    }

    /// Publishes a state with changes.
    pub(super) fn publish(&mut self, updates: Vec<Update>) {
        let store = Arc::make_mut(&mut self.published);
        let parent = |blob: Option<&Blob>| match blob.map(Blob::parent) {
            Some(BlobParent::Snapshot(parent)) => Some(*parent),
            _ => None,
        };
        for update in updates {
            match update {
                Update::Set(blob) => {
                    let (id, new) = (blob.id(), parent(Some(&blob)));
                    let old = parent(store.blobs.get(&id));
                    store.blobs.set(blob);
                    if old != new {
                        old.into_iter().for_each(|old| store.blobs.set_clone(old, id, false));
                        new.into_iter().for_each(|new| store.blobs.set_clone(new, id, true));
                    }
                }
                Update::Remove(id) => {
                    let old = parent(store.blobs.get(&id));
                    old.into_iter().for_each(|old| store.blobs.set_clone(old, id, false));
                    store.blobs.remove(id);
                }
                Update::SuperBlock(super_block) => {
                    if let Ok(layout) = BlobStoreLayout::new(&super_block, self.device.bytes) {
                        self.clusters.extend(layout.clusters);
                        store.layout = layout;
                    }
                    store.super_block = super_block;
                }
            }
        }
        store.free_clusters = self.clusters.free();
        self.epoch += 1;
        self.events.push_back(StoreEvent::Published { epoch: self.epoch });
        self.note_space();
    }

    fn end_task(&mut self, task: Task) {
        let Task { waiter, committed, failed, pages, clusters, outcome, copies, groups, steps, .. } = task;
        if groups.is_some() {
            self.groups.is_writing = false;
        }
        if !steps.iter().any(|step| matches!(step, Step::Pause(_))) || task.paused.is_some() {
            let resume = steps.iter().filter_map(|step| match step {
                Step::Resume(blob) => Some(StoreEvent::Resume { blob: *blob }),
                _ => None,
            });
            self.events.extend(resume);
        }
        let result = match failed {
            false => Ok(outcome),
            true => Err(ChangeError::Io),
        };
        if failed {
            if committed || !copies.is_empty() {
                self.is_broken = true;
            } else {
                self.pages.release(pages);
                self.clusters.release(clusters);
            }
        }
        match waiter {
            Waiter::None => self.is_broken |= failed,
            Waiter::Change(change) => self.end_change(change, result),
            Waiter::Allocations(blob) => self.allocations_ended(blob, &result),
        }
    }
}
