//! The part of a shard that is with a non-priority thread: blocks in place, and their checksums.
//!
//! The priority thread, which owns the shard, decides everything: it has the log, the overlay, the onodes and
//! the free space, so that it knows which entries are committed and which blocks an operation changes or a
//! read needs. The non-priority thread carries that out: it gathers blocks from entries, reads the ones that
//! entries change in part, compares and sets checksums, and writes data and metadata. So nothing that is not
//! committed can be in place, and a read is of committed data, as if one thread did both.
//!
//! Both exchange messages, in their order ([`StoreRequest`], [`StoreReply`]). Data of entries is shared: the
//! overlay has it for reads until the batch is in place. What the order means:
//!
//! - A read that was sent before a batch may find some of the blocks of the batch new. It finds the new
//!   checksums then, or is damaged; the priority thread repeats it as one that a batch overtook on one core.
//! - A checksum that is set after a block was overwritten is there before later reads of the block: what is
//!   sent next has the checksums until then before it.
//! - A checkpoint has the checksums of all that was sent before it. It is the only background work then,
//!   since the flusher sends one batch or checkpoint at a time.

mod reads;
mod worker;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use block_io::Status;
use dma::{Data, Parcel};
use objects::Checkpoint;
use reactor::{Core, MailboxReceiver, MailboxSender};
use slots::Slot;
use wire_store::BLOCK_BYTES;

use super::in_place::{BlockChange, InPlaceBatch};
use super::overlay::{EntryData, SentData};
use super::{DeviceIo, IOS_MAX, Shard};
use crate::StoreError;
use crate::disks::StoreDescriptors;
use crate::once::{OnceSender, once};
use crate::threads::{NonPriorityThread, WakeCause};

/// Messages to the thread. All reads that there are at a time have a place; what finds none, since others
/// have some, waits at the sender.
const REQUESTS_MAX: usize = IOS_MAX as usize;
/// Answers from it: to reads only.
const REPLIES_MAX: usize = IOS_MAX as usize;
/// Checksums that wait for a message. As many are worth a wake-up of their own; fewer wait for what is sent
/// anyway.
const CHECKSUMS_MAX: usize = 256;
/// How long a batch waits at a time for its entries' memory to be adopted.
const ADOPT_WAIT_NS: u64 = 1_000_000;

/// What the priority thread wants.
pub(super) enum StoreRequest {
    Read(StoreRead),
    /// Writes blocks in place. Those that keep bytes are verified if `verify`.
    Batch {
        batch: SentBatch,
        verify: bool,
        done: OnceSender<Result<(), StoreError>>,
    },
    /// Blocks were overwritten: they have these checksums.
    SetChecksums(Vec<(u64, u32)>),
    /// Makes durable what is in place, with these onodes.
    Checkpoint {
        checkpoint: Checkpoint,
        done: OnceSender<Result<(), StoreError>>,
    },
    /// Ends once everything before is done.
    Close {
        done: OnceSender<()>,
    },
}

/// A read of adjacent blocks.
pub(super) struct StoreRead {
    pub(super) tag: u64,
    pub(super) block: u64,
    pub(super) blocks: u32,
    pub(super) verify: bool,
    /// Blocks, counted from the first, of which all that is needed comes from the log: they may be damaged.
    pub(super) from_log: Vec<u32>,
}

/// The end of a read.
pub(super) struct StoreReply {
    tag: u64,
    outcome: ReadOutcome,
}

/// How a read ended.
pub(super) enum ReadOutcome {
    /// With the blocks. They were compared up to the first that is damaged, which this is.
    Done(Parcel, Option<u64>),
    Failed(Status),
    /// It did not begin: the thread has no memory for it now, or too much in flight.
    NoMemory,
}

/// A batch on its way to the thread.
pub(super) struct SentBatch {
    blocks: BTreeMap<u64, BlockChange>,
    data: Vec<SentData>,
}

/// What the thread lets others see.
#[derive(Default)]
pub(super) struct WorkerState {
    /// It has something to do.
    is_working: AtomicBool,
    has_many_changed_checksums: AtomicBool,
    cached_checksum_blocks: AtomicUsize,
    checksum_hits: AtomicU64,
    checksum_misses: AtomicU64,
}

/// The priority thread's end.
pub(super) struct StoreClient {
    thread: Arc<NonPriorityThread>,
    state: Arc<WorkerState>,
    requests: MailboxSender<StoreRequest>,
    /// Checksums of blocks, which no message has yet.
    checksums: Vec<(u64, u32)>,
    /// What found no place, in order: besides reads, which are bounded, and one batch or checkpoint, lists of
    /// checksums, of which an entry of the log has at most one.
    unsent: VecDeque<StoreRequest>,
    replies: MailboxReceiver<StoreReply>,
    is_closed: bool,
}

/// Moves the data in place of a shard that has just been loaded to a non-priority thread.
pub(super) async fn attach(
    core: &Core,
    shard: &RefCell<Shard>,
    descriptors: &StoreDescriptors,
    thread: Arc<NonPriorityThread>,
) -> Result<(), StoreError> {
    let (checksums, is_volatile) = {
        let mut shard = shard.borrow_mut();
        (shard.partition.detach_checksums(), shard.is_volatile)
    };
    let (sender, replies) = core.mailbox(REPLIES_MAX);
    let state = Arc::new(WorkerState::default());
    let (opened, is_open) = once();
    let worker = worker::WorkerConfig {
        thread: thread.clone(),
        state: state.clone(),
        device: descriptors.data.clone(),
        checksums,
        is_volatile,
        replies: sender,
    };
    let start = move |core: &Core| {
        let of_task = core.clone();
        core.spawn(async move { opened.send(worker::start(&of_task, worker).await) });
    };
    thread.handle.post(start).map_err(|_| StoreError::Closed)?;
    let requests = is_open.await.ok_or(StoreError::Closed)??;
    shard.borrow_mut().store = Some(StoreClient {
        thread,
        state,
        requests,
        checksums: Vec::new(),
        unsent: VecDeque::new(),
        replies,
        is_closed: false,
    });
    Ok(())
}

impl StoreClient {
    /// Sends a request after those before it, and wakes the thread if it sleeps. Once it is closed, nothing
    /// is sent.
    pub(super) fn send(&mut self, request: StoreRequest, cause: WakeCause) {
        if self.is_closed {
            return;
        }
        self.wake(cause);
        self.push_checksums();
        self.unsent.push_back(request);
        self.send_unsent();
    }

    /// Has the thread set a block's checksum before it carries out what is sent later.
    fn set_checksum(&mut self, block: u64, crc32c: u32) {
        if self.is_closed {
            return;
        }
        self.checksums.push((block, crc32c));
        if self.checksums.len() >= CHECKSUMS_MAX {
            self.wake(WakeCause::Other);
            self.push_checksums();
            self.send_unsent();
        }
    }

    fn push_checksums(&mut self) {
        if !self.checksums.is_empty() {
            self.unsent.push_back(StoreRequest::SetChecksums(std::mem::take(&mut self.checksums)));
        }
    }

    /// Before something is sent to it: the thread has something to do.
    fn wake(&self, cause: WakeCause) {
        if !self.state.is_working.swap(true, Ordering::AcqRel) {
            self.thread.begin(cause);
        }
    }

    /// Sends what did not fit.
    pub(super) fn send_unsent(&mut self) {
        while let Some(request) = self.unsent.pop_front() {
            if let Err(request) = self.requests.send(request) {
                return self.unsent.push_front(request);
            }
        }
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    pub(super) fn has_replies(&self) -> bool {
        !self.replies.is_empty()
    }

    /// The thread has released its devices: it carries out nothing any more.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub(super) fn has_many_changed_checksums(&self) -> bool {
        self.state.has_many_changed_checksums.load(Ordering::Relaxed)
    }

    pub(super) fn checksum_cache_bytes(&self) -> u64 {
        (self.state.cached_checksum_blocks.load(Ordering::Relaxed) * BLOCK_BYTES) as u64
    }

    /// Checksums that were in memory when they were needed, and those that were not.
    pub(super) fn checksum_counts(&self) -> (u64, u64) {
        let WorkerState { checksum_hits, checksum_misses, .. } = &*self.state;
        (checksum_hits.load(Ordering::Relaxed), checksum_misses.load(Ordering::Relaxed))
    }
}

impl Drop for StoreClient {
    fn drop(&mut self) {
        self.send(StoreRequest::Close { done: once().0 }, WakeCause::Other);
    }
}

impl Shard {
    /// Reads that the thread has carried out.
    pub(super) fn take_store_replies(&mut self) -> usize {
        let mut count = 0;
        while let Some(StoreReply { tag, outcome }) =
            self.store.as_mut().and_then(|store| store.replies.receive())
        {
            count += 1;
            if !matches!(outcome, ReadOutcome::NoMemory) {
                self.device_watch.completed();
            }
            let Some(DeviceIo::Read(read)) = self.ios.remove(Slot::from_bits(tag)) else { continue };
            self.store_read_completed(read, outcome);
        }
        count
    }

    /// Sets the checksum of a block that was overwritten.
    pub(super) fn set_checksum(&mut self, block: u64, crc32c: u32) {
        match &mut self.store {
            Some(store) => store.set_checksum(block, crc32c),
            None => self.partition.checksums_mut().set(block, crc32c),
        }
    }

    pub(super) fn has_many_changed_checksums(&self) -> bool {
        match &self.store {
            Some(store) => store.has_many_changed_checksums(),
            None => self.partition.checksums().has_many_changes(),
        }
    }
}

/// Has the thread carry out background work. One is in progress at a time.
pub(super) async fn perform(
    shard: &RefCell<Shard>,
    cause: WakeCause,
    request: impl FnOnce(OnceSender<Result<(), StoreError>>) -> StoreRequest,
) -> Result<(), StoreError> {
    let (done, result) = once();
    {
        let mut shard = shard.borrow_mut();
        let store = shard.store.as_mut().filter(|store| !store.is_closed).ok_or(StoreError::Closed)?;
        store.send(request(done), cause);
    }
    result.await.ok_or(StoreError::Closed)?
}

/// Has the thread release its devices. What is sent later is not carried out.
pub(super) async fn close(shard: &RefCell<Shard>) {
    let (done, closed) = once();
    {
        let mut shard = shard.borrow_mut();
        let Some(store) = shard.store.as_mut().filter(|store| !store.is_closed) else { return };
        store.send(StoreRequest::Close { done }, WakeCause::Other);
        store.is_closed = true;
    }
    closed.await;
}

impl SentBatch {
    pub(super) fn new(batch: InPlaceBatch) -> SentBatch {
        let InPlaceBatch { blocks, data } = batch;
        SentBatch { blocks, data: data.iter().map(EntryData::send).collect() }
    }

    /// On the thread, with memory of its pool. Waits while too much is adopted there.
    async fn adopt(self, core: &Core) -> InPlaceBatch {
        let SentBatch { blocks, data } = self;
        let turn = AdoptionTurn::take(core).await;
        let mut adopted = Vec::with_capacity(data.len());
        for sent in data {
            adopted.push(match sent {
                SentData::None => EntryData::None,
                SentData::Recovered(bytes) => EntryData::Recovered(bytes),
                SentData::Logged(parcel) => {
                    let buffer = adopt(core, parcel).await.into_single().expect("an entry is one buffer");
                    EntryData::logged(buffer, false)
                }
            });
        }
        drop(turn);
        InPlaceBatch { blocks, data: adopted }
    }
}

/// Makes an entry's memory usable on this core.
async fn adopt(core: &Core, mut parcel: Parcel) -> Data {
    loop {
        match core.pool().adopt(parcel) {
            Ok(data) => return data,
            Err(back) => parcel = back,
        }
        core.sleep_ns(ADOPT_WAIT_NS).await;
    }
}

/// Of the batches of a core, one adopts memory at a time. Those before it have all of theirs, and give it
/// back: if several had a part, each could wait for the others without end.
struct AdoptionTurn(Rc<AdoptionState>);

#[derive(Default)]
struct AdoptionState {
    is_taken: Cell<bool>,
}

impl AdoptionTurn {
    async fn take(core: &Core) -> AdoptionTurn {
        let state = core.local::<AdoptionState>();
        while state.is_taken.replace(true) {
            core.sleep_ns(ADOPT_WAIT_NS).await;
        }
        AdoptionTurn(state)
    }
}

impl Drop for AdoptionTurn {
    fn drop(&mut self) {
        self.0.is_taken.set(false);
    }
}

#[cfg(test)]
mod tests;
