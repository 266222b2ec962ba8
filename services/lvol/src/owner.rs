//! The owner of a store: a poller on one core, which makes all changes of its metadata.
//!
//! Control threads begin changes ([`ChangeHandle`]), and channels ask for first writes to clusters. What the
//! [`OpenBlobStore`] wants done is done on the channel of the store's device; what it publishes goes to the
//! channels of all volumes, through [`StoreShared`].

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use bdev::stacking::{BaseBdev, BaseChannel};
use bdev::{BdevError, BlockDevice, PlanRunner};
use blobstore::{
    BlobChange, BlobId, ChangeError, ChangeId, ChangeOutcome, ChangeProgress, OpenBlobStore, StoreEvent,
    StoreIoFailed,
};
use block_io::Status;
use reactor::{Core, MailboxReceiver, Period, PollResult, Poller, ReactorHandle, Shutdown, blocking};

use crate::blob_store_device;
use crate::plan::StorePlan;
use crate::shared::{ChannelMessage, ChannelSeat, StoreShared, VolumeShared};
use crate::store::{low_space_clusters, name_of};

/// Messages that wait for the owner; senders keep more.
const MESSAGES_MAX: usize = 4096;
/// Messages that are taken in one turn.
const MESSAGES_A_TURN: usize = 256;
/// How often it is looked whether channels use older metadata: a look interrupts all cores, and what waits
/// for it is only space that was freed.
const LOOK_NS: u64 = 500_000;
/// How often the log says that there are no metadata pages left.
const NO_PAGES_LOG_NS: u64 = 600_000_000_000;

/// A message to the owner.
pub(crate) enum OwnerMessage {
    /// Begin a change.
    Begin { change: BlobChange, handle: Arc<ChangeHandle> },
    /// Prepare a cluster for a first write.
    Allocate { seat: Arc<ChannelSeat>, blob: BlobId, index: u32, written: Range<u32> },
    /// Free a cluster.
    Release { seat: Arc<ChannelSeat>, blob: BlobId, index: u32 },
    /// The data of a first write is in its cluster, or could not be written.
    Written { change: ChangeId, is_written: bool },
    /// Something has changed that is shared.
    Look,
    /// End, when all that has begun is done.
    Close,
}

/// A change that a control thread waits for.
#[derive(Default)]
pub(crate) struct ChangeHandle {
    result: Mutex<Option<Result<ChangeOutcome, ChangeError>>>,
    changed: Condvar,
    is_cancelled: AtomicBool,
    /// Clusters, of all.
    progress: AtomicU64,
}

impl ChangeHandle {
    /// A handle of a change that was not begun yet.
    pub(crate) fn new() -> Arc<ChangeHandle> {
        Arc::new(ChangeHandle::default())
    }

    fn end(&self, result: Result<ChangeOutcome, ChangeError>) {
        *sync::lock(&self.result) = Some(result);
        self.changed.notify_all();
    }

    /// Waits for the end.
    pub(crate) fn wait(&self) -> Result<ChangeOutcome, ChangeError> {
        loop {
            if let Some(result) = self.wait_for(Duration::from_secs(3600)) {
                return result;
            }
        }
    }

    /// Waits for the end, for a time.
    pub(crate) fn wait_for(&self, timeout: Duration) -> Option<Result<ChangeOutcome, ChangeError>> {
        blocking::wait_until(&self.result, &self.changed, timeout, |result| result.clone()).ok()
    }

    /// Asks for the end, if that is safe.
    pub(crate) fn cancel(&self, store: &StoreShared) {
        self.is_cancelled.store(true, Ordering::Release);
        _ = store.send(OwnerMessage::Look);
    }

    /// Clusters that are done, and all.
    pub(crate) fn progress(&self) -> (u32, u32) {
        let both = self.progress.load(Ordering::Relaxed);
        ((both >> 32) as u32, both as u32)
    }
}

/// Begins a change. It has ended with [`ChangeError::Broken`] if the store has no owner any more.
pub(crate) fn begin(store: &StoreShared, change: BlobChange) -> Arc<ChangeHandle> {
    let handle = ChangeHandle::new();
    let mut message = OwnerMessage::Begin { change, handle: handle.clone() };
    loop {
        match store.send(message) {
            Ok(true) => return handle,
            Ok(false) => {
                handle.end(Err(ChangeError::Broken));
                return handle;
            }
            Err(returned) => message = returned,
        }
        blocking::sleep(Duration::from_millis(1));
    }
}

/// Ends the owner of a store when all changes are done, and waits until it has closed the device. Returns
/// whether it has in time.
pub(crate) fn close(store: &StoreShared, closed: &ChangeHandle, timeout: Duration) -> bool {
    begin_close(store);
    closed.wait_for(timeout).is_some()
}

/// The first part of [`close`].
pub(crate) fn begin_close(store: &StoreShared) {
    let mut message = OwnerMessage::Close;
    while let Err(returned) = store.send(message) {
        message = returned;
        blocking::sleep(Duration::from_millis(1));
    }
}

/// Starts the owner of a store on a core. `first` is a change that has begun. What is returned ends when the
/// owner has ended, and has closed the device.
///
/// # Errors
/// The device cannot be opened there, or the core has stopped.
pub(crate) fn start(
    reactor: &ReactorHandle,
    shared: &Arc<StoreShared>,
    base: &Arc<BaseBdev>,
    store: OpenBlobStore,
    first: Option<(ChangeId, Arc<ChangeHandle>)>,
) -> Result<Arc<ChangeHandle>, BdevError> {
    let (shared, base) = (shared.clone(), base.clone());
    let device = base.device().clone();
    let ended = ChangeHandle::new();
    let closed = ended.clone();
    let start = move |core: &Core| -> Result<(), BdevError> {
        let runner = PlanRunner::new(core, base.channel(core)?);
        let flushes = BaseChannel::new(base.channel(core)?);
        let (sender, messages) = core.mailbox(MESSAGES_MAX);
        shared.set_free_clusters(store.free_clusters());
        shared.set_owner(sender);
        let mut owner = StoreOwner {
            name: format!("lvol store {}", base.device().name()),
            device: base.device().clone(),
            released: store.epoch(),
            limit: None,
            has_cache: blob_store_device(&base).has_volatile_cache,
            plan: StorePlan::new(store, shared.clone(), core, flushes),
            runner,
            shared,
            messages,
            changes: first.into_iter().collect(),
            allocations: BTreeMap::new(),
            pausing: Vec::new(),
            look_at_ns: None,
            last_look_ns: 0,
            no_pages_log_ns: 0,
            is_pause_due: false,
            is_closing: false,
            is_unloading: false,
            is_ended: false,
        };
        owner.follow_limit();
        core.add_poller(Box::new(OwnerPoller { owner: Some(owner), closed }), Period::EveryTurn);
        Ok(())
    };
    let removed = || BdevError::Removed { name: device.name().to_string() };
    reactor.call(start).map_err(|_| removed())??;
    Ok(ended)
}

struct StoreOwner {
    name: String,
    device: Arc<BlockDevice>,
    plan: StorePlan,
    runner: PlanRunner,
    shared: Arc<StoreShared>,
    messages: MailboxReceiver<OwnerMessage>,
    /// Of control threads.
    changes: BTreeMap<ChangeId, Arc<ChangeHandle>>,
    /// Of channels.
    allocations: BTreeMap<ChangeId, AllocationOf>,
    /// Volumes of which writes in flight have to end.
    pausing: Vec<Arc<VolumeShared>>,
    /// States before this one are released.
    released: u64,
    /// The limit of free clusters, in percent, and of how many it is.
    limit: Option<(u32, u32)>,
    has_cache: bool,
    look_at_ns: Option<u64>,
    last_look_ns: u64,
    /// When the log may say again that there are no metadata pages left.
    no_pages_log_ns: u64,
    /// Writes may have ended.
    is_pause_due: bool,
    is_closing: bool,
    /// No first write to a cluster begins any more.
    is_unloading: bool,
    is_ended: bool,
}

/// The poller: the owner until it has ended, and what waits for that.
struct OwnerPoller {
    owner: Option<StoreOwner>,
    closed: Arc<ChangeHandle>,
}

/// A change that a channel has asked for.
struct AllocationOf {
    seat: Arc<ChannelSeat>,
    index: u32,
    /// Its data is to be written by the channel.
    is_asked: bool,
    /// The channel has written it, or there was none.
    is_written: bool,
}

impl StoreOwner {
    fn take_messages(&mut self) -> usize {
        let mut count = 0;
        while count < MESSAGES_A_TURN
            && let Some(message) = self.messages.receive()
        {
            count += 1;
            self.take_message(message);
        }
        count
    }

    fn take_message(&mut self, message: OwnerMessage) {
        let store = &mut self.plan.store;
        match message {
            OwnerMessage::Begin { handle, .. } if self.is_closing => handle.end(Err(ChangeError::Broken)),
            OwnerMessage::Begin { change, handle } => {
                self.is_unloading |= matches!(change, BlobChange::Unload);
                let id = store.begin(change);
                self.changes.insert(id, handle);
            }
            // The program ends: an error would be taken for one of the volume.
            OwnerMessage::Allocate { .. } | OwnerMessage::Release { .. } if self.is_unloading => {}
            OwnerMessage::Allocate { seat, index, .. } | OwnerMessage::Release { seat, index, .. }
                if self.is_closing =>
            {
                seat.reply(ChannelMessage::Done { index, result: Err(Status::INTERNAL_ERROR) });
            }
            OwnerMessage::Allocate { seat, blob, index, written } => {
                let id = store.begin(BlobChange::AllocateCluster { blob, index, written });
                self.allocations.insert(id, AllocationOf { seat, index, is_asked: false, is_written: false });
            }
            OwnerMessage::Release { seat, blob, index } => {
                let clusters = index..index + 1;
                let id = store.begin(BlobChange::ReleaseClusters { blob, clusters });
                self.allocations.insert(id, AllocationOf { seat, index, is_asked: false, is_written: true });
            }
            OwnerMessage::Written { change, is_written } => {
                if let Some(allocation) = self.allocations.get_mut(&change)
                    && std::mem::take(&mut allocation.is_asked)
                {
                    allocation.is_written = is_written;
                    store.cluster_written(change, if is_written { Ok(()) } else { Err(StoreIoFailed) });
                }
            }
            OwnerMessage::Look => self.follow_limit(),
            OwnerMessage::Close => self.is_closing = true,
        }
    }

    fn take_events(&mut self, now_ns: u64) -> usize {
        let mut count = 0;
        // Before those are answered who have changed it.
        self.shared.set_free_clusters(self.plan.store.free_clusters());
        while let Some(event) = self.plan.store.next_event() {
            count += 1;
            match event {
                StoreEvent::Done { change, result } => {
                    if matches!(result, Err(ChangeError::NoPages)) && now_ns >= self.no_pages_log_ns {
                        self.no_pages_log_ns = now_ns + NO_PAGES_LOG_NS;
                        self.warn_of_pages();
                    }
                    self.change_ended(change, result);
                }
                StoreEvent::Published { epoch } => {
                    let published = self.plan.store.published().clone();
                    self.shared.publish(epoch, published);
                    self.follow_limit();
                    self.look_at_ns.get_or_insert(self.last_look_ns + LOOK_NS);
                }
                StoreEvent::Pause { blob } => match self.shared.volume(blob) {
                    Some(volume) => {
                        volume.set_paused(true);
                        self.pausing.push(volume);
                        self.is_pause_due = true;
                    }
                    None => self.plan.store.paused(blob),
                },
                StoreEvent::Resume { blob } => {
                    if let Some(volume) = self.shared.volume(blob) {
                        volume.set_paused(false);
                    }
                }
                StoreEvent::WriteCluster { change, offset } => {
                    let Some(allocation) = self.allocations.get_mut(&change) else { continue };
                    allocation.is_asked = true;
                    let index = allocation.index;
                    allocation.seat.reply(ChannelMessage::Write { index, change, offset });
                    if allocation.seat.is_abandoned() {
                        self.abandon();
                    }
                }
                StoreEvent::LowSpace { free } => self.warn_of_space(free),
            }
        }
        count
    }

    /// Sets the limit of free clusters if it is another one, or the store has another size.
    fn follow_limit(&mut self) {
        let total = self.plan.store.published().data_clusters();
        let percent = self.shared.low_space_percent();
        if self.limit.replace((percent, total)) != Some((percent, total)) {
            self.plan.store.set_low_space(low_space_clusters(percent, total));
        }
    }

    fn warn_of_space(&self, free: u32) {
        let Some((percent, total)) = self.limit else { return };
        let (name, published) = (self.store_name(), self.plan.store.published());
        let mib = (u64::from(free) * u64::from(published.layout().cluster_bytes)) >> 20;
        log::warn!(
            target: "lvol",
            "the logical volume store {name} on {} has {free} of {total} clusters free, {mib} MiB, less than its \
             limit of {percent} %; without one, writes to thin volumes fail: delete volumes or snapshots, or \
             extend the device and call bdev_lvol_grow_lvstore",
            self.device.name()
        );
    }

    fn warn_of_pages(&self) {
        let pages = self.plan.store.published().layout().pages;
        log::warn!(
            target: "lvol",
            "the logical volume store {} on {} has no free metadata page of {pages}: new volumes, snapshots \
             and clones, and first writes to thin volumes, fail with no space left: delete volumes or \
             snapshots, or move to a store that was created with a larger num_md_pages_per_cluster_ratio",
            self.store_name(),
            self.device.name()
        );
    }

    fn store_name(&self) -> String {
        let published = self.plan.store.published();
        let super_blob = published.super_block().super_blob.and_then(|id| published.blob(id));
        super_blob.and_then(name_of).unwrap_or_default()
    }

    fn change_ended(&mut self, change: ChangeId, result: Result<ChangeOutcome, ChangeError>) {
        if let Some(handle) = self.changes.remove(&change) {
            return handle.end(result);
        }
        let Some(allocation) = self.allocations.remove(&change) else { return };
        if self.has_cache && result.is_ok() {
            self.shared.map_written();
        }
        let result = match result {
            Ok(_) => Ok(allocation.is_written),
            // A snapshot was taken meanwhile: the channel looks again what is to be done.
            Err(ChangeError::NotReleased) => Ok(false),
            Err(error) => Err(status_of(&error)),
        };
        allocation.seat.reply(ChannelMessage::Done { index: allocation.index, result });
    }

    /// Ends what channels have asked for that are closed.
    fn abandon(&mut self) {
        for (change, allocation) in &mut self.allocations {
            if allocation.seat.is_abandoned() && std::mem::take(&mut allocation.is_asked) {
                self.plan.store.cluster_written(*change, Err(StoreIoFailed));
            }
        }
    }

    /// Looks which channels have writes in flight, or I/O by older metadata.
    fn look(&mut self, now_ns: u64) -> usize {
        let is_due = self.look_at_ns.is_some_and(|at_ns| at_ns <= now_ns);
        let is_pause_due = std::mem::take(&mut self.is_pause_due) && !self.pausing.is_empty();
        if !is_pause_due && !is_due {
            return 0;
        }
        self.shared.set_awaited(!self.pausing.is_empty());
        StoreShared::synchronize();
        let (shared, store) = (&self.shared, &mut self.plan.store);
        let before = self.pausing.len();
        self.pausing.retain(|volume| {
            let is_quiet = volume.has_no_writes();
            if is_quiet {
                store.paused(volume.blob);
            }
            !is_quiet
        });
        let mut count = before - self.pausing.len();
        if is_due {
            self.last_look_ns = now_ns;
            let epoch = store.epoch();
            let left = shared.oldest_epoch().min(epoch);
            if left > self.released {
                self.released = left;
                store.release(left);
                count += 1;
            }
            self.look_at_ns = (left < epoch).then_some(now_ns + LOOK_NS);
        }
        count
    }

    fn follow_changes(&mut self) {
        for (id, handle) in &self.changes {
            if handle.is_cancelled.swap(false, Ordering::AcqRel) {
                self.plan.store.cancel(*id);
            }
            if let Some(ChangeProgress { done, all }) = self.plan.store.progress(*id) {
                handle.progress.store(u64::from(done) << 32 | u64::from(all), Ordering::Relaxed);
            }
        }
    }

    fn turn(&mut self, now_ns: u64) -> usize {
        let mut count = self.take_messages();
        self.is_pause_due |= count > 0;
        if self.shared.take_abandoned() {
            self.abandon();
        }
        if !self.changes.is_empty() {
            self.follow_changes();
        }
        count += self.plan.turn();
        count += self.runner.turn(&mut self.plan);
        count += self.take_events(now_ns);
        count += self.look(now_ns);
        count
    }

    fn is_done(&self) -> bool {
        if self.device.is_removed() {
            return self.plan.is_idle() && self.runner.is_idle();
        }
        self.plan.store.is_idle()
            && self.plan.is_idle()
            && self.runner.is_idle()
            && self.changes.is_empty()
            && self.allocations.is_empty()
    }

    /// Answers all that wait, and takes no messages any more.
    fn end(&mut self) {
        if std::mem::replace(&mut self.is_ended, true) {
            return;
        }
        self.is_closing = true;
        self.shared.close();
        for handle in std::mem::take(&mut self.changes).into_values() {
            handle.end(Err(ChangeError::Broken));
        }
        for allocation in std::mem::take(&mut self.allocations).into_values() {
            let result = Err(Status::INTERNAL_ERROR);
            allocation.seat.reply(ChannelMessage::Done { index: allocation.index, result });
        }
        for volume in self.pausing.drain(..) {
            volume.set_paused(false);
        }
        while let Some(message) = self.messages.receive() {
            self.take_message(message);
        }
    }
}

/// The status of a write that needed a cluster.
fn status_of(error: &ChangeError) -> Status {
    match error {
        ChangeError::NoClusters { .. } | ChangeError::NoPages => Status::CAPACITY_EXCEEDED.do_not_retry(),
        ChangeError::ReadOnly(_) => Status::NAMESPACE_WRITE_PROTECTED.do_not_retry(),
        _ => Status::INTERNAL_ERROR,
    }
}

impl StoreOwner {
    fn deadline(&self) -> Option<u64> {
        if !self.messages.is_empty() || (self.is_closing && self.is_done()) {
            return Some(0);
        }
        [self.runner.deadline(), self.plan.deadline(), self.look_at_ns].into_iter().flatten().min()
    }
}

impl Drop for StoreOwner {
    fn drop(&mut self) {
        self.end();
    }
}

impl OwnerPoller {
    fn end(&mut self) {
        drop(self.owner.take());
        self.closed.end(Ok(ChangeOutcome::Done));
    }
}

impl Poller for OwnerPoller {
    fn name(&self) -> &str {
        self.owner.as_ref().map_or("lvol store", |owner| &owner.name)
    }

    fn poll(&mut self, now_ns: u64) -> PollResult {
        let Some(owner) = &mut self.owner else { return PollResult::Finished };
        let count = owner.turn(now_ns);
        if owner.is_closing && owner.is_done() {
            self.end();
            return PollResult::Finished;
        }
        PollResult::from_count(count)
    }

    fn deadline(&self) -> Option<u64> {
        self.owner.as_ref().map_or(Some(0), StoreOwner::deadline)
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        let is_idle = |owner: &StoreOwner| owner.plan.is_idle() && owner.runner.is_idle();
        if !self.owner.as_ref().is_none_or(is_idle) {
            return Shutdown::Draining;
        }
        self.end();
        Shutdown::Done
    }
}

impl Drop for OwnerPoller {
    fn drop(&mut self) {
        self.end();
    }
}
