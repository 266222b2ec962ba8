//! A store that is open for changes.
//!
//! A change is checked and planned when nothing else has its blobs: [`plan`] has the steps that there are,
//! `blobs`, `snapshot` and `session` make them of changes, and `task` runs them. First writes to clusters,
//! which are many and must not wait for each other, are in `allocate`.

mod allocate;
mod blobs;
mod change;
mod device;
mod encode;
mod fault;
mod plan;
mod rewrite;
mod session;
mod slots;
mod snapshot;
mod space;
mod task;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use wire_blob::{BlobId, ChecksumsId};

pub use change::{
    BlobChange, BlobStoreFormat, ChangeError, ChangeId, ChangeOutcome, ChangeProgress, ClearMethod,
    StoreEvent,
};
pub use device::{BlobStoreDevice, StoreAction, StoreIo, StoreIoFailed};
#[cfg(test)]
pub(crate) use fault::Fault;

use crate::blob::BlobParent;
use crate::layout::BlobStoreLayout;
use crate::store::BlobStore;
use allocate::{Job, Lane, WaitingWrite};
use plan::Plan;
use slots::CopySlots;
use space::Space;
use task::{Flushes, Locks, Task, UsedGroups, Waiter};

/// How far the store is ready for changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Session {
    /// Nothing was written.
    Unchanged,
    /// The super block and what is in place of the masks are being written.
    Starting,
    /// What loading decided is being written.
    Recovering,
    /// Changes may begin.
    Started,
}

/// What an I/O is for.
#[derive(Clone, Copy, Debug)]
enum IoOwner {
    /// A plan.
    Task(u64),
    /// All who wait for a flush.
    Flush,
    /// A first write.
    Fill(BlobId, ChangeId),
}

/// A store that is open for changes, on the core that owns it. Sans-IO.
///
/// [`begin`](Self::begin) starts changes; after it and each other call, [`next_io`](Self::next_io) and
/// [`next_event`](Self::next_event) are to be called until they return nothing. Each I/O is completed by
/// [`complete`](Self::complete), in any order.
///
/// Other cores read and write by [`published`](Self::published), a state that does not change, and ask the
/// owner only for a first write to a cluster.
pub struct OpenBlobStore {
    device: BlobStoreDevice,
    published: Arc<BlobStore>,
    epoch: u64,
    /// No state before this one is in use.
    released: u64,
    pages: Space,
    clusters: Space,
    /// Clusters that no blob has, and whose old content could not be cleared.
    uncleared: Vec<u32>,
    session: Session,
    is_broken: bool,
    is_closed: bool,
    /// Changes that wait, in order.
    queue: VecDeque<(ChangeId, BlobChange)>,
    lanes: BTreeMap<BlobId, Lane>,
    jobs: Vec<Job>,
    /// Jobs whose last write is due.
    finishing: BTreeSet<ChangeId>,
    tasks: BTreeMap<u64, Task>,
    slots: CopySlots,
    groups: UsedGroups,
    flushes: Flushes,
    ready: VecDeque<StoreIo>,
    in_flight: BTreeMap<u64, IoOwner>,
    events: VecDeque<StoreEvent>,
    next_change: u64,
    next_task: u64,
    next_io: u64,
    low_space: u32,
    is_low: bool,
    #[cfg(test)]
    fault: Option<fault::Fault>,
}

impl OpenBlobStore {
    /// Opens a loaded store for changes. What loading decided about operations that were cut in two is
    /// written before any change. Opening alone writes nothing to a store that was unloaded.
    pub fn open(store: BlobStore, device: BlobStoreDevice) -> OpenBlobStore {
        OpenBlobStore::open_with_checksums(store, device, None)
    }

    /// [`open`](Self::open), where all data is written through a layer that keeps these checksums. The store
    /// says so from then on, until another program changes it ([`BlobStore::checksums`]).
    pub fn open_with_checksums(
        store: BlobStore,
        device: BlobStoreDevice,
        checksums: Option<ChecksumsId>,
    ) -> OpenBlobStore {
        // The mark of the checksums must be true before data is written.
        let is_said = checksums == store.checksums();
        let needs_start = !store.super_block.clean || !store.recovery().is_empty() || !is_said;
        let mut open = OpenBlobStore::new(store, device);
        open.groups.set_checksums(checksums);
        if needs_start {
            open.start();
            open.run();
        }
        open
    }

    /// Makes a new store. The change whose id is returned with it is done when the store is on the device;
    /// until then there is none.
    ///
    /// # Errors
    /// [`ChangeError::Invalid`] for sizes that no store can have, [`ChangeError::NoPages`] if the metadata
    /// does not fit, [`ChangeError::NoClusters`] if the device is smaller than a cluster.
    pub fn format(
        options: &BlobStoreFormat,
        device: BlobStoreDevice,
    ) -> Result<(OpenBlobStore, ChangeId), ChangeError> {
        let super_block = session::new_super_block(options, &device)?;
        let layout = BlobStoreLayout::new(&super_block, device.bytes).map_err(|_| ChangeError::NoPages)?;
        let mut open = OpenBlobStore::new(BlobStore::empty(super_block, layout), device);
        open.groups.set_checksums(options.checksums);
        let mut plan = Plan::default();
        open.plan_format(&mut plan, options)?;
        let change = open.next_id();
        open.session = Session::Starting;
        open.add_task(Task::new(plan, Waiter::Change(change), Locks::all()));
        open.run();
        Ok((open, change))
    }

    /// Opens a store, writes all that loading decided, and unloads it, also if that changes nothing.
    pub(crate) fn open_and_unload(store: BlobStore, device: BlobStoreDevice) -> (OpenBlobStore, ChangeId) {
        let mut open = OpenBlobStore::new(store, device);
        open.start();
        let change = open.begin(BlobChange::Unload);
        (open, change)
    }

    /// Opens a store that was unloaded, and writes the masks of pages and clusters of what is used over those
    /// that it has. The store is as unloaded as it was at any time: a bit is as before or as after.
    pub(crate) fn open_and_mark(store: BlobStore, device: BlobStoreDevice) -> (OpenBlobStore, ChangeId) {
        let mut open = OpenBlobStore::new(store, device);
        let mut plan = Plan::default();
        open.plan_mark(&mut plan);
        let change = open.next_id();
        open.add_task(Task::new(plan, Waiter::Change(change), Locks::all()));
        open.run();
        (open, change)
    }

    fn new(store: BlobStore, device: BlobStoreDevice) -> OpenBlobStore {
        let recovery = store.recovery();
        OpenBlobStore {
            pages: Space::new(store.used_pages().clone(), recovery.shared_pages.clone()),
            clusters: Space::new(store.used_clusters().clone(), recovery.shared_clusters.clone()),
            slots: CopySlots::new(Self::copy_places(&store.super_block)),
            groups: UsedGroups::new(store.layout.pages),
            uncleared: Vec::new(),
            device,
            published: Arc::new(store),
            epoch: 0,
            released: 0,
            session: Session::Unchanged,
            is_broken: false,
            is_closed: false,
            queue: VecDeque::new(),
            lanes: BTreeMap::new(),
            jobs: Vec::new(),
            finishing: BTreeSet::new(),
            tasks: BTreeMap::new(),
            flushes: Flushes::default(),
            ready: VecDeque::new(),
            in_flight: BTreeMap::new(),
            events: VecDeque::new(),
            next_change: 0,
            next_task: 0,
            next_io: 0,
            low_space: 0,
            is_low: false,
            #[cfg(test)]
            fault: None,
        }
    }

    /// Begins a change. How it ended is an event with the id.
    pub fn begin(&mut self, change: BlobChange) -> ChangeId {
        let id = self.next_id();
        match change {
            _ if self.is_closed() => self.end_change(id, Err(ChangeError::Broken)),
            BlobChange::AllocateCluster { blob, index, written } => {
                let write = WaitingWrite { change: id, index, written };
                self.lanes.entry(blob).or_default().waiting.push_back(write);
            }
            change => self.queue.push_back((id, change)),
        }
        self.run();
        id
    }

    /// Ends a change early, if that is safe: before it started, or between two clusters of
    /// [`BlobChange::Inflate`] and [`BlobChange::Decouple`]. Its event follows, with
    /// [`ChangeError::Cancelled`] if it was in time.
    pub fn cancel(&mut self, change: ChangeId) {
        let is_queued = |(id, _): &(ChangeId, BlobChange)| *id == change;
        let mut was_waiting = false;
        if let Some(at) = self.queue.iter().position(is_queued) {
            self.queue.remove(at);
            self.finishing.remove(&change);
            was_waiting = true;
        }
        for lane in self.lanes.values_mut() {
            let before = lane.waiting.len();
            lane.waiting.retain(|write| write.change != change);
            was_waiting |= lane.waiting.len() < before;
        }
        if was_waiting {
            self.end_change(change, Err(ChangeError::Cancelled));
        }
        self.cancel_job(change);
        self.run();
    }

    /// How far a change is that has begun and not ended.
    pub fn progress(&self, change: ChangeId) -> Option<ChangeProgress> {
        let is_it = |task: &&Task| matches!(task.waiter, Waiter::Change(id) if id == change);
        let task = self.tasks.values().find(is_it);
        let task = task.map(|task| ChangeProgress { done: task.cleared, all: task.to_clear });
        let waiting = self.queue.iter().any(|(id, _)| *id == change).then(ChangeProgress::default);
        self.job_progress(change).or(task).or(waiting)
    }

    /// An I/O to begin now.
    pub fn next_io(&mut self) -> Option<StoreIo> {
        self.ready.pop_front()
    }

    /// Completes an I/O.
    ///
    /// # Panics
    /// If no I/O with this id is in flight.
    pub fn complete(&mut self, id: u64, result: Result<(), StoreIoFailed>) {
        let owner = self.in_flight.remove(&id).expect("an I/O that is in flight");
        let is_ok = result.is_ok();
        match owner {
            IoOwner::Task(task) => {
                if let Some(task) = self.tasks.get_mut(&task) {
                    task.completed(is_ok);
                }
            }
            IoOwner::Flush => self.flush_completed(is_ok),
            IoOwner::Fill(blob, change) => self.fill_completed(blob, change, is_ok),
        }
        self.run();
    }

    /// The next event, in the order in which they happened.
    pub fn next_event(&mut self) -> Option<StoreEvent> {
        self.events.pop_front()
    }

    /// The state that channels read and write by, since the last [`StoreEvent::Published`]. The state at open
    /// is that of epoch 0.
    pub fn published(&self) -> &Arc<BlobStore> {
        &self.published
    }

    /// Number of the published state.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// States before `epoch` are no longer used: no channel has one, and no I/O by one is in flight.
    pub fn release(&mut self, epoch: u64) {
        self.released = self.released.max(epoch.min(self.epoch));
        self.run();
    }

    /// Answers [`StoreEvent::Pause`]: no write to the blob is in flight.
    pub fn paused(&mut self, blob: BlobId) {
        self.tasks.values_mut().for_each(|task| task.set_paused(blob));
        self.run();
    }

    /// Answers [`StoreEvent::WriteCluster`]. After a failure, the cluster stays unallocated.
    pub fn cluster_written(&mut self, change: ChangeId, result: Result<(), StoreIoFailed>) {
        self.data_written(change, result);
        self.run();
    }

    /// Clusters that can be given out.
    pub fn free_clusters(&self) -> u32 {
        self.clusters.free()
    }

    /// Sets the limit of [`StoreEvent::LowSpace`], in clusters; 0, the default, for none. The event follows
    /// at once if there are fewer free clusters now.
    pub fn set_low_space(&mut self, clusters: u32) {
        self.low_space = clusters;
        self.is_low = false;
        self.note_space();
    }

    /// Whether nothing is in flight or waits: no change, no cleaning up, no recovery.
    pub fn is_idle(&self) -> bool {
        let is_waiting = !self.queue.is_empty() || !self.lanes.is_empty() || !self.jobs.is_empty();
        self.tasks.is_empty() && self.in_flight.is_empty() && !is_waiting
    }

    /// Whether the store takes no changes any more, because a write of metadata failed, or after it was
    /// unloaded or destroyed.
    pub fn is_closed(&self) -> bool {
        self.is_broken || self.is_closed
    }

    fn next_id(&mut self) -> ChangeId {
        self.next_change += 1;
        ChangeId(self.next_change - 1)
    }

    fn push_io(&mut self, owner: IoOwner, mut action: StoreAction) {
        // A page has 4 KiB; its place is as large as a block.
        let block = u64::from(self.device.block_bytes.max(1));
        match &mut action {
            StoreAction::Write { data, .. } => data.resize(data.len().next_multiple_of(block as usize), 0),
            StoreAction::WriteZeroes { bytes, .. } | StoreAction::Deallocate { bytes, .. } => {
                *bytes = bytes.next_multiple_of(block);
            }
            StoreAction::Copy { .. } | StoreAction::Flush => {}
        }
        self.in_flight.insert(self.next_io, owner);
        self.ready.push_back(StoreIo { id: self.next_io, action });
        self.next_io += 1;
    }

    fn add_task(&mut self, mut task: Task) {
        task.steps = self.with_fault(task.steps);
        self.tasks.insert(self.next_task, task);
        self.next_task += 1;
    }

    fn end_change(&mut self, change: ChangeId, result: Result<ChangeOutcome, ChangeError>) {
        if !self.job_member_ended(change, &result) {
            self.events.push_back(StoreEvent::Done { change, result });
        }
    }

    /// Frees what a plan reserved that is not carried out.
    fn abandon(&mut self, plan: Plan) {
        self.pages.release(plan.pages);
        self.clusters.release(plan.clusters);
    }

    fn note_space(&mut self) {
        let free = self.clusters.free();
        if free < self.low_space {
            if !std::mem::replace(&mut self.is_low, true) {
                self.events.push_back(StoreEvent::LowSpace { free });
            }
            return;
        }
        // A quarter above the limit, so that a store about there does not repeat itself; all if there are
        // fewer.
        let enough = self.low_space.saturating_add((self.low_space / 4).max(1));
        self.is_low &= free < enough.min(self.published.data_clusters());
    }

    fn start(&mut self) {
        let mut plan = Plan::default();
        self.plan_start(&mut plan);
        self.session = Session::Starting;
        self.add_task(Task::new(plan, Waiter::None, Locks::all()));
    }

    fn run(&mut self) {
        loop {
            let has_started = self.start_changes() | self.run_jobs() | self.may_allocate();
            if !(self.run_tasks() | has_started) {
                return;
            }
        }
    }

    fn may_allocate(&mut self) -> bool {
        (self.session == Session::Started || self.is_closed()) && self.start_allocations()
    }

    /// Starts changes whose blobs nothing else has. Whether one was started.
    fn start_changes(&mut self) -> bool {
        if self.is_closed() {
            let waiting = std::mem::take(&mut self.queue);
            let has_ended = !waiting.is_empty();
            waiting.iter().for_each(|(change, _)| self.end_change(*change, Err(ChangeError::Broken)));
            return has_ended;
        }
        let is_unload = matches!(self.queue.front(), Some((_, BlobChange::Unload)));
        match self.session {
            Session::Unchanged if is_unload && self.lanes.is_empty() => {
                let Some((change, _)) = self.queue.pop_front() else { return false };
                self.is_closed = true;
                self.end_change(change, Ok(ChangeOutcome::Done));
                return true;
            }
            Session::Unchanged if !self.queue.is_empty() || !self.lanes.is_empty() => {
                self.start();
                return true;
            }
            Session::Recovering if self.has_fault(fault::Fault::RecoveryLeftOut) => {
                self.session = Session::Started;
            }
            Session::Recovering if self.tasks.is_empty() => {
                let mut plan = Plan::default();
                match self.plan_recovery(&mut plan) {
                    Ok(()) => self.add_task(Task::new(plan, Waiter::None, Locks::all())),
                    Err(_) => {
                        self.abandon(plan);
                        self.is_broken = true;
                    }
                }
                return true;
            }
            Session::Started => {}
            _ => return false,
        }
        let mut blocked = Locks::default();
        let mut has_started = false;
        let waiting = std::mem::take(&mut self.queue);
        for (id, change) in waiting {
            let locks = self.locks(&change);
            if self.conflicts(id, &locks, &blocked) {
                blocked.blobs.extend(locks.blobs);
                blocked.all |= locks.all;
                self.queue.push_back((id, change));
            } else {
                self.start_change(id, change, locks);
                has_started = true;
            }
        }
        has_started
    }

    /// What a change has for itself.
    fn locks(&self, change: &BlobChange) -> Locks {
        use BlobChange::*;
        match change {
            Create { .. } | CloneExternal { .. } => Locks::default(),
            Delete { blob } => {
                Locks::of([*blob].into_iter().chain(self.published.clones(*blob).iter().copied()))
            }
            Resize { blob, .. }
            | SetXattrs { blob, .. }
            | SetReadOnly { blob }
            | Snapshot { blob, .. }
            | Inflate { blob }
            | ReleaseClusters { blob, .. }
            | AllocateCluster { blob, .. }
            | Clone { of: blob, .. } => Locks::of([*blob]),
            // The parent's parent becomes the blob's.
            Decouple { blob } => {
                let parent = self.published.blob(*blob).map(|blob| blob.parent().clone());
                let parent = match parent {
                    Some(BlobParent::Snapshot(parent)) => Some(parent),
                    _ => None,
                };
                Locks::of([*blob].into_iter().chain(parent))
            }
            // What all descendants read changes, also for first writes that copy it. One after another, or
            // two changes could make a circle: no blob has this id.
            SetParent { blob, parent } => {
                Locks::of(self.with_descendants(*blob).into_iter().chain([*parent, BlobId(0)]))
            }
            SetParentExternal { blob, .. } => Locks::of(self.with_descendants(*blob)),
            Grow { .. } | SetSuperBlob { .. } | Unload | Destroy => Locks::all(),
        }
    }

    /// A blob and all clones of it, and of these.
    fn with_descendants(&self, blob: BlobId) -> BTreeSet<BlobId> {
        let mut all = BTreeSet::new();
        let mut next = vec![blob];
        while let Some(blob) = next.pop() {
            if all.insert(blob) {
                next.extend(self.published.clones(blob));
            }
        }
        all
    }

    /// Whether something else has what a change needs, or waits for it.
    fn conflicts(&self, id: ChangeId, locks: &Locks, blocked: &Locks) -> bool {
        let ends_job = self.finishing.contains(&id);
        let is_used = |lane: &Lane| lane.is_active() || lane.waits_before(id);
        let is_busy = |blob: &BlobId| {
            blocked.blobs.contains(blob)
                || self.tasks.values().any(|task| task.locks.blobs.contains(blob))
                || self.lanes.get(blob).is_some_and(is_used)
                || !ends_job && self.jobs.iter().any(|job| job.blob == *blob)
        };
        let has_others = || {
            let is_active = self.lanes.values().any(is_used);
            !self.tasks.is_empty() || is_active || !self.jobs.is_empty() || !blocked.blobs.is_empty()
        };
        blocked.all
            || self.tasks.values().any(|task| task.locks.all)
            || locks.all && has_others()
            || locks.blobs.iter().any(is_busy)
    }

    /// The change that has a blob, or the first that waits for it: first writes that began after it wait too.
    /// A job is made of first writes, which do not wait for what comes after the job.
    fn locked_from(&self, blob: BlobId) -> Option<ChangeId> {
        let has_it = |locks: &Locks| locks.all || locks.blobs.contains(&blob);
        if self.tasks.values().any(|task| has_it(&task.locks)) {
            return Some(ChangeId(0));
        }
        if self.jobs.iter().any(|job| job.blob == blob) {
            return None;
        }
        let mut waiting = self.queue.iter().filter(|(_, change)| has_it(&self.locks(change)));
        waiting.next().map(|(id, _)| *id)
    }

    fn start_change(&mut self, id: ChangeId, change: BlobChange, mut locks: Locks) {
        let mut plan = Plan::default();
        match self.plan(id, change, &mut plan) {
            Ok(Planned::Job) => {}
            Ok(Planned::Steps) if plan.steps.is_empty() => {
                let outcome = plan.outcome.unwrap_or(ChangeOutcome::Done);
                self.end_change(id, Ok(outcome));
            }
            Ok(Planned::Steps) => {
                if let Some(ChangeOutcome::Blob(blob)) = plan.outcome {
                    locks.blobs.push(blob);
                }
                self.add_task(Task::new(plan, Waiter::Change(id), locks));
            }
            Err(error) => {
                self.abandon(plan);
                self.end_change(id, Err(error));
            }
        }
    }

    fn plan(&mut self, id: ChangeId, change: BlobChange, plan: &mut Plan) -> Result<Planned, ChangeError> {
        use BlobChange::*;
        match change {
            Create { thin, clusters, clear, xattrs } => {
                self.plan_create(plan, thin, clusters, clear, xattrs)?
            }
            Delete { blob } => self.plan_any_delete(plan, blob)?,
            Resize { blob, clusters } => self.plan_resize(plan, blob, clusters)?,
            SetXattrs { blob, set, remove } => self.plan_xattrs(plan, blob, &set, &remove)?,
            SetReadOnly { blob } => self.plan_read_only(plan, blob)?,
            Snapshot { blob, xattrs } => self.plan_snapshot(plan, blob, xattrs)?,
            Clone { of, xattrs } => self.plan_clone(plan, of, xattrs)?,
            CloneExternal { name, clusters, xattrs } => {
                self.plan_clone_external(plan, name, clusters, xattrs)?;
            }
            Inflate { blob } | Decouple { blob } => {
                let inflate = matches!(change, Inflate { .. });
                if self.finishing.remove(&id) {
                    self.plan_inflated(plan, blob, inflate)?;
                } else if self.begin_job(id, blob, inflate)? {
                    return Ok(Planned::Job);
                }
            }
            SetParent { blob, parent } => {
                self.plan_set_parent(plan, blob, BlobParent::Snapshot(parent))?;
            }
            SetParentExternal { blob, name } => {
                self.plan_set_parent(plan, blob, BlobParent::External(name))?;
            }
            Grow { device_bytes } => self.plan_grow(plan, device_bytes)?,
            SetSuperBlob { blob } => self.plan_super_blob(plan, blob)?,
            ReleaseClusters { blob, clusters } => self.plan_release(plan, blob, clusters)?,
            Unload => self.plan_unload(plan),
            Destroy => self.plan_destroy(plan),
            AllocateCluster { .. } => return Err(ChangeError::Invalid("a first write is no queued change")),
        }
        Ok(Planned::Steps)
    }

    fn plan_any_delete(&mut self, plan: &mut Plan, blob: BlobId) -> Result<(), ChangeError> {
        let old = self.find(blob)?;
        if self.published.super_block.super_blob == Some(blob) {
            return Err(ChangeError::Invalid("the super blob cannot be deleted"));
        }
        match *self.published.clones(blob) {
            [] if self.has_unusable_clone(blob) => {
                Err(ChangeError::Invalid("a damaged blob is a clone of the snapshot"))
            }
            [] => self.plan_delete(plan, &old),
            [clone] => self.plan_merge(plan, blob, clone),
            ref clones => Err(ChangeError::HasClones(clones.len())),
        }
    }
}

impl OpenBlobStore {
    /// Whether a blob that cannot be used says that it is a clone of another.
    fn has_unusable_clone(&self, of: BlobId) -> bool {
        let id = of.0.to_le_bytes();
        let parent =
            |blob: &crate::blob::Blob| blob.internal_xattr(wire_blob::XATTR_SNAPSHOT) == Some(&id[..]);
        self.published.unusable().values().any(|blob| parent(blob.partial()))
    }
}

/// How a change continues.
enum Planned {
    /// As the steps of its plan; without one, it is done.
    Steps,
    /// As first writes.
    Job,
}
