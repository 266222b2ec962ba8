//! An I/O channel of a namespace on one core: its links to paths, and the splitting of long requests.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bdev::{Completion, Request};
use block_io::{Op, RequestFlags, Status, Tag};
use dma::Data;
use nvme::{IoQueue, NvmeOpenError};
use reactor::Core;
use slots::{Slab, Slot};

use crate::counts::LinkCounts;
use crate::inject::QueueInjections;
use crate::multipath::{IoWait, Multipath, PathView};
use crate::path::ChangedNamespaces;
use crate::path_id::PathId;
use crate::shared_namespace::{ChannelStatus, LinkStatus, NamespacePath, PathConnection, SharedNamespace};
use crate::transport_stats::LiveQueueStats;

/// Queue depth of a channel; of each split request one fragment is in flight at a time.
pub(crate) const DEPTH: u32 = 1024;
/// Most blocks of a Write Zeroes or Dataset Management command (NVM 1.0, NLB has 16 bits).
const RANGE_BLOCKS_MAX: u32 = 65536;
/// Interval between attempts to open an I/O queue while the controller is connected.
const OPEN_RETRY_NS: u64 = 100_000_000;
/// Consecutive failed attempts after which the controller is reset.
const OPEN_ATTEMPTS_MAX: u32 = 5;
/// `user_data` of a request that was not split.
const NOT_SPLIT: u32 = u32::MAX;

/// An I/O channel of a namespace on one core (SPDK's `nvme_bdev_channel`).
///
/// It owns a link with an I/O queue to each path, the multipath state machine that selects a path for each
/// request, and the requests that are split. The control plane changes paths in the [`SharedNamespace`] and
/// increments its version; `submit` and `poll` compare the version, apply the change and open or close
/// queues. An I/O costs that comparison, one clock read a batch, a slot of the state machine, and the queue's
/// own cost. Queues open asynchronously in a task; a queue that is closed is polled until its last command
/// has completed.
pub(crate) struct NvmeBdevChannel {
    core: Core,
    shared: Arc<SharedNamespace>,
    applied_version: u64,
    preferred: Option<PathId>,
    status_id: u64,
    status: Arc<ChannelStatus>,
    multipath: Multipath<Data>,
    /// By path index of `multipath`.
    links: Vec<PathLink>,
    by_id: HashMap<PathId, usize>,
    split_requests: Slab<SplitRequest>,
    /// Split requests that wait for a buffer for their next fragment.
    deferred: Vec<Slot>,
    sink: Vec<Completion>,
    done: Vec<Completion>,
    block_size: u32,
}

/// The link to one path: the path's configuration, and the I/O queue.
struct PathLink {
    path: NamespacePath,
    queue: LinkQueue,
    /// The connection that the queue belongs to, or belonged to last.
    epoch: u64,
    failed_opens: u32,
    ana_generation: u64,
    /// The control plane was asked to read the ANA log page again.
    ana_refresh_requested: bool,
    scan_generation: u64,
    /// The control plane was asked to identify the namespace again.
    rescan_requested: bool,
    removed: bool,
    counts: Option<Arc<LinkCounts>>,
    injections: QueueInjections,
    /// Where the queue's counters are published, while it is open.
    live_stats: Option<Arc<LiveQueueStats>>,
}

/// The result of opening a queue.
type OpenedQueue = Result<Box<dyn IoQueue>, NvmeOpenError>;

enum LinkQueue {
    None,
    /// A task opens it; the result arrives in the cell.
    Opening(Rc<RefCell<Option<OpenedQueue>>>, Rc<CancelFlag>),
    Open(Box<dyn IoQueue>),
    /// Gets no new commands until the namespace has been identified again. The flag tells whether it was
    /// published that none is in flight.
    Suspended(Box<dyn IoQueue>, bool),
    /// Gets no new commands; it owns buffers until the driver's reset or detach has ended its commands. The
    /// flag tells whether the queue failed.
    Closing(Box<dyn IoQueue>, bool),
    /// To be opened again at that time, in nanoseconds.
    RetryAt(u64),
}

/// Cancels the task that opens a queue.
#[derive(Default)]
struct CancelFlag(std::cell::Cell<bool>);

/// A request that is split into fragments, submitted one after the other: it is longer than a command may be,
/// or its data is a peer's memory that the device cannot access in place.
struct SplitRequest {
    request: Request,
    done_blocks: u32,
    fragment_blocks: u32,
}

impl NvmeBdevChannel {
    pub(crate) fn new(
        core: &Core,
        shared: &Arc<SharedNamespace>,
        block_size: u32,
        retries_max: u16,
    ) -> NvmeBdevChannel {
        let (status_id, status) = shared.register_channel(core);
        let mut channel = NvmeBdevChannel {
            core: core.clone(),
            shared: shared.clone(),
            applied_version: 0,
            preferred: None,
            status_id,
            status,
            multipath: Multipath::new(shared.policy(), DEPTH, retries_max),
            links: Vec::new(),
            by_id: HashMap::new(),
            split_requests: Slab::with_capacity(DEPTH),
            deferred: Vec::new(),
            sink: Vec::new(),
            done: Vec::new(),
            block_size,
        };
        channel.apply_update(core.now_ns());
        channel
    }

    /// Applies the control plane's latest version of the paths.
    #[cold]
    fn apply_update(&mut self, now_ns: u64) {
        let (version, paths, policy, preferred) = self.shared.snapshot();
        self.applied_version = version;
        // Before the links are published: until then they are not quiesced.
        self.status.applied_version.store(version, Ordering::Release);
        self.preferred = preferred;
        self.multipath.set_policy(policy);
        for link in &mut self.links {
            link.removed = !paths.iter().any(|path| path.id == link.path.id);
        }
        for state in paths {
            let index = match self.by_id.get(&state.id) {
                Some(index) => *index,
                None => self.add_link(&state),
            };
            self.links[index].path = state;
        }
        for index in 0..self.links.len() {
            self.reconcile(index, now_ns);
        }
        self.publish();
    }

    /// Adds a link to a new path; reuses the index of a removed one if there is one.
    fn add_link(&mut self, state: &NamespacePath) -> usize {
        let view = PathView { connected: false, ana: state.ana, wait: IoWait::Unlimited, preferred: false };
        let link = PathLink {
            path: state.clone(),
            queue: LinkQueue::None,
            epoch: 0,
            failed_opens: 0,
            ana_generation: 0,
            ana_refresh_requested: false,
            scan_generation: 0,
            rescan_requested: false,
            removed: false,
            counts: state.controller_path.counts_io().then(Arc::default),
            injections: QueueInjections::new(&state.controller_path.injections),
            live_stats: None,
        };
        let is_reusable = |index: &usize| {
            let link = &self.links[*index];
            link.removed && matches!(link.queue, LinkQueue::None) && self.multipath.in_flight(*index) == 0
        };
        let index = match (0..self.links.len()).find(is_reusable) {
            Some(index) => {
                self.multipath.replace_path(index, view);
                self.by_id.remove(&self.links[index].path.id);
                self.links[index] = link;
                index
            }
            None => {
                self.links.push(link);
                self.multipath.add_path(view)
            }
        };
        self.by_id.insert(state.id, index);
        index
    }

    /// Opens or closes the queue of a link as the control plane requires.
    fn reconcile(&mut self, index: usize, now_ns: u64) {
        let link = &mut self.links[index];
        let wanted_epoch =
            link.path.connection.as_ref().filter(|_| !link.removed).map(|connection| connection.epoch);
        if wanted_epoch != Some(link.epoch) {
            self.close(index, now_ns);
        }
        let link = &mut self.links[index];
        if let (Some(epoch), LinkQueue::None) = (wanted_epoch, &link.queue) {
            if epoch != link.epoch {
                link.failed_opens = 0;
            }
            self.open(index);
        }
        self.update_suspended(index);
        let link = &mut self.links[index];
        link.injections.sync(&link.path.controller_path.injections);
        if link.ana_generation != link.path.ana_generation {
            link.ana_generation = link.path.ana_generation;
            link.ana_refresh_requested = false;
            self.multipath.ana_refreshed(index, now_ns);
        }
        let link = &mut self.links[index];
        if link.scan_generation != link.path.scan_generation {
            link.scan_generation = link.path.scan_generation;
            link.rescan_requested = false;
            self.multipath.namespace_identified(index, now_ns);
        }
        self.update_multipath(index, now_ns);
    }

    /// Suspends or resumes the open queue of a link as its path is.
    fn update_suspended(&mut self, index: usize) {
        let link = &mut self.links[index];
        let queue = std::mem::replace(&mut link.queue, LinkQueue::None);
        link.queue = match (queue, link.path.suspended) {
            (LinkQueue::Open(opened), true) => LinkQueue::Suspended(opened, false),
            (LinkQueue::Suspended(opened, _), false) => LinkQueue::Open(opened),
            (queue, _) => queue,
        };
    }

    fn update_multipath(&mut self, index: usize, now_ns: u64) {
        let link = &self.links[index];
        let view = PathView {
            connected: matches!(link.queue, LinkQueue::Open(_)),
            ana: link.path.ana,
            wait: if link.removed { IoWait::No } else { link.path.wait },
            preferred: self.preferred == Some(link.path.id),
        };
        self.multipath.set_path(index, view, now_ns);
    }

    fn open(&mut self, index: usize) {
        let link = &mut self.links[index];
        let Some(connection) = link.path.connection.clone() else { return };
        link.epoch = connection.epoch;
        let (result, cancel) = (Rc::new(RefCell::new(None)), Rc::new(CancelFlag::default()));
        let (result_cell, cancelled) = (result.clone(), cancel.clone());
        let (core, nsid) = (self.core.clone(), self.shared.nsid);
        let waker = self.core.event_loop().waker();
        let spawned = self.core.spawn(async move {
            let PathConnection { queues, identify, metadata, .. } = &connection;
            let opened = queues.open(&core, nsid, identify, metadata).await;
            if !cancelled.0.get() {
                *result_cell.borrow_mut() = Some(opened);
                // The reactor of the channel may be asleep.
                waker.wake();
            }
        });
        link.queue = if spawned {
            LinkQueue::Opening(result, cancel)
        } else {
            LinkQueue::RetryAt(self.core.now_ns() + OPEN_RETRY_NS)
        };
    }

    /// Closes the queue of a link; its I/O in flight is retried on other paths.
    fn close(&mut self, index: usize, now_ns: u64) {
        match std::mem::replace(&mut self.links[index].queue, LinkQueue::None) {
            LinkQueue::Opening(_, cancel) => cancel.0.set(true),
            LinkQueue::Open(opened) | LinkQueue::Suspended(opened, _) => {
                self.start_closing(index, opened, false, now_ns);
            }
            closing @ LinkQueue::Closing(..) => self.links[index].queue = closing,
            LinkQueue::None | LinkQueue::RetryAt(_) => {}
        }
    }

    /// Starts to close a queue. Unsent I/O moves to other paths at once, I/O in flight when it has completed.
    fn start_closing(&mut self, index: usize, mut opened: Box<dyn IoQueue>, failed: bool, now_ns: u64) {
        let ana = self.links[index].path.ana;
        let view = PathView { connected: false, ana, wait: IoWait::Unlimited, preferred: false };
        self.multipath.set_path(index, view, now_ns);
        opened.detach();
        let delayed: Vec<Completion> = self.links[index].injections.drain().collect();
        for completion in delayed {
            self.multipath.path_completed(index, completion, now_ns);
        }
        self.links[index].queue = LinkQueue::Closing(opened, failed);
        self.advance_closing(index, now_ns);
    }

    /// Reaps the I/O in flight of a queue that is closing; `true` once it is closed.
    fn advance_closing(&mut self, index: usize, now_ns: u64) -> bool {
        let LinkQueue::Closing(mut opened, failed) =
            std::mem::replace(&mut self.links[index].queue, LinkQueue::None)
        else {
            return false;
        };
        self.reap(index, &mut *opened, now_ns);
        if self.multipath.in_flight(index) > 0 {
            self.links[index].queue = LinkQueue::Closing(opened, failed);
            return false;
        }
        if let Some(live_stats) = self.links[index].live_stats.take() {
            self.shared.totals.remove_queue(&live_stats, &opened.stats());
        }
        if failed {
            self.open_failed(index, now_ns);
        }
        true
    }

    fn reap(&mut self, index: usize, opened: &mut dyn IoQueue, now_ns: u64) -> usize {
        let mut sink = std::mem::take(&mut self.sink);
        opened.poll(&mut sink);
        if let Some(counts) = &self.links[index].counts {
            counts.add(&sink, self.block_size);
        }
        let count = sink.len();
        let quiesced_ns = opened.quiesced_ns();
        for completion in sink.drain(..) {
            self.multipath.path_lost(index, completion, quiesced_ns, now_ns);
        }
        self.sink = sink;
        count
    }

    /// Advances links whose queue is opening, failed, closing or to be opened again.
    fn poll_links(&mut self, now_ns: u64) {
        for index in 0..self.links.len() {
            let link = &mut self.links[index];
            match &mut link.queue {
                LinkQueue::Opening(result, _) => {
                    let Some(outcome) = result.borrow_mut().take() else { continue };
                    match outcome {
                        Ok(opened) => {
                            let trtype = link.path.controller_path.id().trtype();
                            link.live_stats = Some(self.shared.totals.add_queue(self.status.core, trtype));
                            (link.failed_opens, link.queue) = (0, LinkQueue::Open(opened));
                            self.update_suspended(index);
                        }
                        Err(_) => self.open_failed(index, now_ns),
                    }
                }
                LinkQueue::Open(opened) | LinkQueue::Suspended(opened, _) if opened.failure().is_some() => {
                    let (LinkQueue::Open(opened) | LinkQueue::Suspended(opened, _)) =
                        std::mem::replace(&mut link.queue, LinkQueue::None)
                    else {
                        continue;
                    };
                    self.start_closing(index, opened, true, now_ns);
                }
                LinkQueue::Suspended(_, is_quiesced @ false) if self.multipath.in_flight(index) == 0 => {
                    *is_quiesced = true;
                }
                LinkQueue::Closing(..) => {
                    if !self.advance_closing(index, now_ns) {
                        continue;
                    }
                    // A newer connection may already exist.
                    self.reconcile(index, now_ns);
                }
                LinkQueue::RetryAt(due_ns) if *due_ns <= now_ns => {
                    link.queue = LinkQueue::None;
                    self.open(index);
                    continue;
                }
                _ => continue,
            }
            self.update_multipath(index, now_ns);
            self.publish();
        }
    }

    fn open_failed(&mut self, index: usize, now_ns: u64) {
        let link = &mut self.links[index];
        link.failed_opens += 1;
        if link.failed_opens >= OPEN_ATTEMPTS_MAX {
            link.failed_opens = 0;
            link.path.controller_path.request_reset(link.epoch);
        }
        link.queue = LinkQueue::RetryAt(now_ns + OPEN_RETRY_NS);
    }

    /// Requests once that the control plane reads again what commands have shown to be outdated.
    #[cold]
    fn refresh_stale(&mut self, index: usize) {
        let link = &mut self.links[index];
        if self.multipath.is_ana_stale(index) && !link.ana_refresh_requested {
            link.ana_refresh_requested = true;
            link.path.controller_path.refresh_ana();
        }
        if self.multipath.is_namespace_stale(index) && !link.rescan_requested {
            link.rescan_requested = true;
            let nsids = BTreeSet::from([self.shared.nsid]);
            link.path.controller_path.request_rescan(ChangedNamespaces::Some(nsids));
        }
    }

    /// Publishes the state of the links to the control plane.
    fn publish(&self) {
        let current = self.multipath.current();
        let links = self.links.iter().enumerate().filter(|(_, link)| !link.removed);
        let statuses = links.map(|(index, link)| LinkStatus {
            id: link.path.id,
            connected: matches!(link.queue, LinkQueue::Open(_) | LinkQueue::Suspended(..)),
            current: current == Some(index),
            quiesced: link.path.suspended && self.multipath.in_flight(index) == 0,
            counts: link.counts.clone(),
        });
        *self.status.links() = statuses.collect();
        // The task that suspended a path waits for its links.
        let suspended = self.links.iter().filter(|link| !link.removed && link.path.suspended);
        suspended.for_each(|link| link.path.controller_path.wake());
    }

    /// Whether a request needs no splitting.
    #[inline]
    fn fits_one_command(&mut self, request: &Request, transfer_max_bytes: u32) -> bool {
        match request.data() {
            Some(data) => {
                data.len() as u64 <= u64::from(transfer_max_bytes)
                    && (!data.is_external() || self.can_access(data))
            }
            None => !request.op.has_range() || request.blocks <= RANGE_BLOCKS_MAX,
        }
    }

    /// Whether every path's device accesses a peer's memory in place: a request may use any.
    fn can_access(&mut self, data: &Data) -> bool {
        let mut open = self.links.iter_mut().filter_map(|link| match &mut link.queue {
            LinkQueue::Open(opened) => Some(opened.can_access(data)),
            _ => None,
        });
        // Without any, it is copied and waits.
        open.next().unwrap_or(false) && open.all(|can_access| can_access)
    }

    /// Starts a request that is split.
    fn start_split(&mut self, request: Request, transfer_max_bytes: u32, now_ns: u64) {
        let fragment_blocks = match request.data() {
            Some(_) => (transfer_max_bytes / self.block_size).max(1),
            None => RANGE_BLOCKS_MAX,
        };
        match self.split_requests.insert(SplitRequest { request, done_blocks: 0, fragment_blocks }) {
            Ok(slot) => self.submit_fragment(slot, now_ns),
            Err(split_requests) => self.done.push(split_requests.request.complete(Status::INTERNAL_ERROR)),
        }
    }

    fn submit_fragment(&mut self, slot: Slot, now_ns: u64) {
        let Some(split_requests) = self.split_requests.get(slot) else { return };
        let whole = &split_requests.request;
        let blocks = split_requests.fragment_blocks.min(whole.blocks - split_requests.done_blocks);
        let offset = split_requests.done_blocks as usize * self.block_size as usize;
        let bytes = blocks as usize * self.block_size as usize;
        let mut fragment =
            Request::new(Tag(0), whole.op, whole.lba + u64::from(split_requests.done_blocks), blocks);
        (fragment.flags, fragment.flow, fragment.issued_ticks) =
            (whole.flags, whole.flow, whole.issued_ticks);
        if let Some(data) = whole.data() {
            let Some(mut buffer) = self.core.pool().take(bytes) else {
                self.deferred.push(slot);
                return;
            };
            if whole.op == Op::Write {
                data.copy_to(offset, buffer.as_mut_slice());
            }
            fragment.set_data(Some(buffer));
        }
        self.multipath.submit(fragment, slot.index(), now_ns);
    }

    fn fragment_done(&mut self, user_data: u32, completion: Completion, now_ns: u64) {
        let Some(slot) = self.split_requests.slot_at(user_data) else { return };
        let status = completion.status();
        let fragment = completion.into_request();
        let Some(split_requests) = self.split_requests.get_mut(slot) else { return };
        if status.is_success() {
            if let (Op::Read, Some(from), Some(to)) =
                (fragment.op, fragment.data().and_then(Data::single), split_requests.request.data_mut())
            {
                to.copy_from(split_requests.done_blocks as usize * self.block_size as usize, from.as_slice());
            }
            split_requests.done_blocks += fragment.blocks;
            if split_requests.done_blocks < split_requests.request.blocks {
                drop(fragment);
                self.submit_fragment(slot, now_ns);
                return;
            }
        }
        if let Some(split_requests) = self.split_requests.remove(slot) {
            self.done.push(split_requests.request.complete(status));
        }
    }

    /// Submits the outgoing requests of each path to its queue.
    #[inline]
    fn submit_outgoing(&mut self, now_ns: u64) {
        for (index, link) in self.links.iter_mut().enumerate() {
            let outgoing = self.multipath.outgoing(index);
            if !outgoing.is_empty()
                && let LinkQueue::Open(opened) = &mut link.queue
            {
                if !link.injections.is_idle() {
                    link.injections.intercept(outgoing, now_ns);
                }
                opened.submit(outgoing);
            }
        }
    }
}

impl block_io::Channel for NvmeBdevChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        let now_ns = self.core.now_ns();
        // An idle channel may not have been polled since the change.
        if self.shared.version() != self.applied_version {
            self.apply_update(now_ns);
        }
        let transfer_max_bytes = self.shared.transfer_max_bytes.load(Ordering::Relaxed);
        // Keep room for the deferred fragments: each split request has one I/O at a time.
        let room = self.multipath.room().saturating_sub(self.deferred.len());
        let count = batch.len().min(room);
        for request in batch.drain(..count) {
            if self.fits_one_command(&request, transfer_max_bytes) {
                self.multipath.submit(request, NOT_SPLIT, now_ns);
            } else if request.flags.contains(RequestFlags::ATOMIC) {
                self.done.push(request.complete(Status::INVALID_FIELD.do_not_retry()));
            } else {
                self.start_split(request, transfer_max_bytes, now_ns);
            }
        }
        self.submit_outgoing(now_ns);
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        let now_ns = self.core.now_ns();
        if self.shared.version() != self.applied_version {
            self.apply_update(now_ns);
        }
        for index in 0..self.links.len() {
            let mut completions = std::mem::take(&mut self.sink);
            let link = &mut self.links[index];
            if let LinkQueue::Open(opened) | LinkQueue::Suspended(opened, _) = &mut link.queue
                && opened.poll(&mut completions) > 0
                && let Some(live_stats) = &link.live_stats
            {
                live_stats.publish(&opened.stats());
            }
            if !self.links[index].injections.is_idle() {
                self.links[index].injections.rewrite(&mut completions, now_ns);
            }
            if let Some(counts) = &self.links[index].counts {
                counts.add(&completions, self.block_size);
            }
            for completion in completions.drain(..) {
                let delay_ns = self.links[index].path.controller_path.retry_delay_ns(completion.status());
                self.multipath.path_completed_after(index, completion, delay_ns, now_ns);
            }
            self.sink = completions;
            if self.multipath.is_stale(index) {
                self.refresh_stale(index);
            }
        }
        self.poll_links(now_ns);
        self.multipath.dispatch(now_ns);
        for slot in std::mem::take(&mut self.deferred) {
            self.submit_fragment(slot, now_ns);
        }
        loop {
            let mut done = std::mem::take(self.multipath.completed());
            if done.is_empty() {
                break;
            }
            for (user_data, completion) in done.drain(..) {
                if user_data == NOT_SPLIT {
                    sink.push(completion);
                } else {
                    self.fragment_done(user_data, completion, now_ns);
                }
            }
            if self.multipath.completed().is_empty() {
                // Reuse its allocation.
                *self.multipath.completed() = done;
                break;
            }
        }
        sink.append(&mut self.done);
        self.submit_outgoing(now_ns);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.deferred.is_empty() || !self.done.is_empty() || self.shared.version() != self.applied_version
        {
            return Some(0);
        }
        let links = self.links.iter().filter_map(|link| match &link.queue {
            LinkQueue::Open(opened) | LinkQueue::Suspended(opened, _) | LinkQueue::Closing(opened, _) => {
                if opened.failure().is_some() {
                    Some(0)
                } else {
                    opened.deadline()
                }
            }
            LinkQueue::RetryAt(due_ns) => Some(*due_ns),
            LinkQueue::Opening(result, _) => result.borrow().is_some().then_some(0),
            LinkQueue::None => None,
        });
        let injected = self.links.iter().filter_map(|link| link.injections.deadline_ns());
        links.chain(injected).chain(self.multipath.deadline_ns()).min()
    }
}

impl Drop for NvmeBdevChannel {
    fn drop(&mut self) {
        for link in &mut self.links {
            if let LinkQueue::Open(opened) | LinkQueue::Suspended(opened, _) | LinkQueue::Closing(opened, _) =
                &link.queue
                && let Some(live_stats) = link.live_stats.take()
            {
                self.shared.totals.remove_queue(&live_stats, &opened.stats());
            }
        }
        self.shared.unregister_channel(self.status_id);
        for link in &self.links {
            if let LinkQueue::Opening(_, cancel) = &link.queue {
                cancel.0.set(true);
            }
        }
    }
}
