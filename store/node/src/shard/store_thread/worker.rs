//! The end of a non-priority thread: a poller for reads, and a task for batches and checkpoints.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};

use bdev::{BdevChannel, Completion, Request};
use block_io::Channel as _;
use dma::{Data, Parcel};
use objects::{BlockChecksums, Checkpoint};
use reactor::{Core, MailboxReceiver, MailboxSender, Period, PollResult, Poller, Shutdown};
use slots::{Slab, Slot};
use wire_store::BLOCK_BYTES;

use super::reads::{ChecksumWaiters, WorkerIo};
use super::{REQUESTS_MAX, SentBatch, StoreReply, StoreRequest, WorkerState};
use crate::StoreError;
use crate::device::StoreDevice;
use crate::disks::{StoreDescriptors, StoreDisks};
use crate::once::OnceSender;
use crate::shard::flusher::{write_checksum_blocks, write_metadata};
use crate::shard::in_place::ChecksumOwner;
use crate::shard::{IOS_MAX, REQUESTS_PER_POLL, RETRY_NS};
use crate::threads::NonPriorityThread;

/// How long a task waits at a time for an entry's memory to be adopted.
const ADOPT_WAIT_NS: u64 = 1_000_000;

/// What a worker is made of.
pub(super) struct WorkerConfig {
    pub(super) thread: Arc<NonPriorityThread>,
    pub(super) state: Arc<WorkerState>,
    pub(super) descriptors: StoreDescriptors,
    pub(super) checksums: BlockChecksums,
    pub(super) is_volatile: bool,
    pub(super) replies: MailboxSender<StoreReply>,
}

/// The blocks of a partition, on its non-priority thread.
pub(super) struct StoreWorker {
    pub(super) core: Core,
    pub(super) block_bytes: u64,
    channel: BdevChannel,
    pub(super) checksums: BlockChecksums,
    pub(super) ios: Slab<WorkerIo>,
    /// Requests that the channel has not accepted.
    pub(super) requests: Vec<Request>,
    completions: Vec<Completion>,
    /// Reads that wait for memory.
    pub(super) parked: Vec<super::StoreRead>,
    pub(super) waiting: ChecksumWaiters,
    replies: MailboxSender<StoreReply>,
    commands: VecDeque<Command>,
    command_waker: Option<Waker>,
    /// A command is carried out.
    is_busy: bool,
    closing: Vec<OnceSender<()>>,
    is_closing: bool,
    /// Its poller has ended.
    is_ended: bool,
    pub(super) state: Arc<WorkerState>,
    thread: Arc<NonPriorityThread>,
    /// Counted as a partition for which the thread has something to do.
    is_counted: bool,
}

/// What takes several requests, one after another.
enum Command {
    Batch(SentBatch, bool, OnceSender<Result<(), StoreError>>),
    Checkpoint(Checkpoint, OnceSender<Result<(), StoreError>>),
}

/// Opens the devices on this core, and waits for requests.
pub(super) async fn start(
    core: &Core,
    config: WorkerConfig,
) -> Result<MailboxSender<StoreRequest>, StoreError> {
    let WorkerConfig { thread, state, descriptors, checksums, is_volatile, replies } = config;
    let mut disks = descriptors.disks(core)?;
    if is_volatile {
        disks.set_volatile();
    }
    let channel = descriptors.data.channel(core)?;
    let spare = disks.data.buffer(BLOCK_BYTES).await?;
    let (sender, requests) = core.mailbox(REQUESTS_MAX);
    let worker = Rc::new(RefCell::new(StoreWorker {
        core: core.clone(),
        block_bytes: channel.block_size().into(),
        channel,
        checksums,
        ios: Slab::with_capacity(IOS_MAX),
        requests: Vec::new(),
        completions: Vec::new(),
        parked: Vec::new(),
        waiting: ChecksumWaiters::new(spare),
        replies,
        commands: VecDeque::new(),
        command_waker: None,
        is_busy: false,
        closing: Vec::new(),
        is_closing: false,
        is_ended: false,
        state,
        thread,
        is_counted: false,
    }));
    if !core.spawn(carry_out(worker.clone(), disks)) {
        return Err(StoreError::Closed);
    }
    core.add_poller(Box::new(WorkerPoller { worker, requests }), Period::EveryTurn);
    Ok(sender)
}

/// Makes data of another core usable; waits for a while if too much is adopted.
pub(super) async fn adopt(core: &Core, mut parcel: Parcel) -> Data {
    loop {
        match core.pool().adopt(parcel) {
            Ok(data) => return data,
            Err(back) => parcel = back,
        }
        core.sleep_ns(ADOPT_WAIT_NS).await;
    }
}

/// Carries out commands until the worker ends.
async fn carry_out(worker: Rc<RefCell<StoreWorker>>, disks: StoreDisks) {
    let core = worker.borrow().core.clone();
    loop {
        let next = std::future::poll_fn(|context| {
            let mut worker = worker.borrow_mut();
            match worker.commands.pop_front() {
                Some(command) => {
                    worker.is_busy = true;
                    Poll::Ready(Some(command))
                }
                None if worker.is_ended => Poll::Ready(None),
                None => {
                    worker.command_waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        });
        let Some(command) = next.await else { break };
        let (done, result) = match command {
            Command::Batch(batch, verify, done) => {
                let batch = batch.adopt(&core).await;
                (done, batch.write(&*worker, &disks.data, verify).await)
            }
            Command::Checkpoint(checkpoint, done) => {
                (done, write_checkpoint(&worker, &disks.data, checkpoint).await)
            }
        };
        {
            let mut worker = worker.borrow_mut();
            worker.is_busy = false;
            worker.publish();
        }
        // The answer is there before the thread counts as idle.
        done.send(result);
    }
    // Nothing else has its channel: it is closed here, before that is answered.
    let closing = std::mem::take(&mut worker.borrow_mut().closing);
    drop(worker);
    disks.close().await;
    closing.into_iter().for_each(|done| done.send(()));
}

/// Makes what is in place durable with its metadata.
async fn write_checkpoint(
    worker: &RefCell<StoreWorker>,
    device: &StoreDevice,
    checkpoint: Checkpoint,
) -> Result<(), StoreError> {
    let blocks = worker.borrow_mut().checksums.begin_checkpoint();
    write_checksum_blocks(worker, device, &blocks).await?;
    if checkpoint.flush_before_onodes {
        device.flush().await?;
    }
    write_metadata(device, &checkpoint.onodes).await?;
    device.flush().await?;
    worker.borrow_mut().checksums.finish_checkpoint();
    Ok(())
}

impl ChecksumOwner for RefCell<StoreWorker> {
    fn with<R>(&self, work: impl FnOnce(&mut BlockChecksums) -> R) -> R {
        work(&mut self.borrow_mut().checksums)
    }

    fn count_miss(&self) {
        self.borrow().count_miss();
    }
}

impl StoreWorker {
    fn take(&mut self, request: StoreRequest) {
        match request {
            StoreRequest::Read(read) => self.read(read),
            StoreRequest::Batch { batch, verify, done } => {
                self.add_command(Command::Batch(batch, verify, done));
            }
            StoreRequest::SetChecksum { block, crc32c } => self.checksums.set(block, crc32c),
            StoreRequest::Checkpoint { checkpoint, done } => {
                self.add_command(Command::Checkpoint(checkpoint, done));
            }
            StoreRequest::Close { done } => {
                self.is_closing = true;
                self.closing.push(done);
            }
        }
    }

    fn add_command(&mut self, command: Command) {
        self.commands.push_back(command);
        self.command_waker.take().into_iter().for_each(Waker::wake);
    }

    /// Answers a read.
    pub(super) fn reply(&self, tag: u64, result: Result<(Parcel, Option<u64>), block_io::Status>) {
        // There are as many reads as fit into the mailbox; without its owner nothing waits for the
        // answer.
        let _ = self.replies.send(StoreReply { tag, result });
    }

    /// Lets others see what changed.
    fn publish(&self) {
        let WorkerState { has_many_changed_checksums, cached_checksum_blocks, .. } = &*self.state;
        has_many_changed_checksums.store(self.checksums.has_many_changes(), Ordering::Relaxed);
        cached_checksum_blocks.store(self.checksums.cached_blocks(), Ordering::Relaxed);
    }

    fn poll(&mut self, requests: &mut MailboxReceiver<StoreRequest>) -> usize {
        let mut work = 0;
        for read in std::mem::take(&mut self.parked) {
            self.read(read);
        }
        self.resume_unverified();
        while work < REQUESTS_PER_POLL {
            let Some(request) = requests.receive() else { break };
            self.take(request);
            work += 1;
        }
        self.submit();
        let mut completions = std::mem::take(&mut self.completions);
        work += self.channel.poll(&mut completions);
        for completion in completions.drain(..) {
            if let Some(io) = self.ios.remove(Slot::from_bits(completion.tag().0)) {
                self.complete(io, completion);
            }
        }
        self.completions = completions;
        if work > 0 {
            self.submit();
            self.publish();
        }
        work
    }

    fn submit(&mut self) {
        if !self.requests.is_empty() {
            self.channel.submit(&mut self.requests);
        }
    }

    /// Whether it has nothing to do.
    fn is_idle(&self) -> bool {
        self.ios.is_empty()
            && self.requests.is_empty()
            && self.parked.is_empty()
            && self.waiting.is_empty()
            && self.commands.is_empty()
            && !self.is_busy
    }

    /// Notes whether the thread has something to do for this partition.
    fn count(&mut self, is_idle: bool) {
        let is_working = &self.state.is_working;
        if !is_idle && !self.is_counted {
            // Its owner has counted it, unless it came after the flag was cleared.
            if !is_working.swap(true, Ordering::AcqRel) {
                self.thread.resume();
            }
            self.is_counted = true;
        } else if is_idle && is_working.swap(false, Ordering::AcqRel) {
            self.is_counted = false;
            self.thread.end();
        }
    }

    fn deadline(&self) -> Option<u64> {
        if !self.requests.is_empty() {
            return Some(0);
        }
        let waits = !self.parked.is_empty() || self.waiting.is_blocked();
        let retry = waits.then(|| self.core.now_ns() + RETRY_NS);
        self.channel.deadline().into_iter().chain(retry).min()
    }
}

/// Drives a worker on its core.
struct WorkerPoller {
    worker: Rc<RefCell<StoreWorker>>,
    requests: MailboxReceiver<StoreRequest>,
}

impl Poller for WorkerPoller {
    fn name(&self) -> &str {
        "store blocks"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        let mut worker = self.worker.borrow_mut();
        let work = worker.poll(&mut self.requests);
        let is_idle = worker.is_idle() && self.requests.is_empty();
        worker.count(is_idle);
        if worker.is_closing && is_idle {
            // The task ends, and releases the devices.
            worker.is_ended = true;
            worker.command_waker.take().into_iter().for_each(Waker::wake);
            return PollResult::Finished;
        }
        PollResult::from_count(work)
    }

    fn deadline(&self) -> Option<u64> {
        // What was sent after the last poll has woken nothing.
        if self.requests.is_empty() { self.worker.borrow().deadline() } else { Some(0) }
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        let is_idle = self.worker.borrow().is_idle() && self.requests.is_empty();
        if is_idle { Shutdown::Done } else { Shutdown::Draining }
    }
}
