//! The end of a non-priority thread: a poller for reads, and a task for batches and checkpoints.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};

use bdev::{BdevChannel, Completion, Descriptor, Request};
use block_io::Channel as _;
use objects::{BlockChecksums, Checkpoint};
use reactor::{Core, MailboxReceiver, MailboxSender, Period, PollResult, Poller, Shutdown};
use slots::{Slab, Slot};
use wire_store::BLOCK_BYTES;

use super::reads::WorkerIo;
use super::{REQUESTS_MAX, ReadOutcome, SentBatch, StoreRead, StoreReply, StoreRequest, WorkerState};
use crate::StoreError;
use crate::device::StoreDevice;
use crate::once::OnceSender;
use crate::shard::checksums::{BlockReader as _, ChecksumReads};
use crate::shard::flusher::write_checkpoint;
use crate::shard::{IOS_MAX, REQUESTS_PER_POLL, RETRY_NS};
use crate::threads::NonPriorityThread;

/// What a worker is made of.
pub(super) struct WorkerConfig {
    pub(super) thread: Arc<NonPriorityThread>,
    pub(super) state: Arc<WorkerState>,
    /// The device with the blocks.
    pub(super) device: Arc<Descriptor>,
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
    pub(super) waiting: ChecksumReads<StoreRead>,
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

/// Opens the device on this core, and waits for requests.
pub(super) async fn start(
    core: &Core,
    config: WorkerConfig,
) -> Result<MailboxSender<StoreRequest>, StoreError> {
    let WorkerConfig { thread, state, device: descriptor, checksums, is_volatile, replies } = config;
    let mut device = StoreDevice::open(core, &descriptor)?;
    if is_volatile {
        device.set_volatile();
    }
    let channel = descriptor.channel(core)?;
    let spare = device.buffer(BLOCK_BYTES).await?;
    let (sender, requests) = core.mailbox(REQUESTS_MAX);
    let worker = Rc::new(RefCell::new(StoreWorker {
        core: core.clone(),
        block_bytes: channel.block_size().into(),
        channel,
        checksums,
        ios: Slab::with_capacity(IOS_MAX),
        requests: Vec::new(),
        completions: Vec::new(),
        waiting: ChecksumReads::new(spare),
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
    if !core.spawn(carry_out(worker.clone(), device)) {
        return Err(StoreError::Closed);
    }
    core.add_poller(Box::new(WorkerPoller { worker, requests }), Period::EveryTurn);
    Ok(sender)
}

/// Carries out commands until the worker ends.
async fn carry_out(worker: Rc<RefCell<StoreWorker>>, device: StoreDevice) {
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
                (done, batch.write(&*worker, &device, verify).await)
            }
            Command::Checkpoint(mut checkpoint, done) => {
                checkpoint.checksum_blocks = worker.borrow_mut().checksums.begin_checkpoint();
                let written = write_checkpoint(&*worker, &device, &checkpoint).await;
                if written.is_ok() {
                    worker.borrow_mut().checksums.finish_checkpoint();
                }
                (done, written)
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
    device.close().await;
    closing.into_iter().for_each(|done| done.send(()));
}

impl StoreWorker {
    fn take(&mut self, request: StoreRequest) {
        match request {
            StoreRequest::Read(read) => self.read(read),
            StoreRequest::Batch { batch, verify, done } => {
                self.add_command(Command::Batch(batch, verify, done));
            }
            StoreRequest::SetChecksums(list) => {
                list.into_iter().for_each(|(block, crc32c)| self.checksums.set(block, crc32c));
            }
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
    pub(super) fn reply(&self, tag: u64, outcome: ReadOutcome) {
        // There are as many reads as fit into the mailbox; without its owner nothing waits for the
        // answer.
        let _ = self.replies.send(StoreReply { tag, outcome });
    }

    /// Lets others see what changed.
    fn publish(&self) {
        let WorkerState { has_many_changed_checksums, cached_checksum_blocks, .. } = &*self.state;
        has_many_changed_checksums.store(self.checksums.has_many_changes(), Ordering::Relaxed);
        cached_checksum_blocks.store(self.checksums.cached_blocks(), Ordering::Relaxed);
    }

    fn poll(&mut self, requests: &mut MailboxReceiver<StoreRequest>) -> usize {
        let mut work = 0;
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
        let retry = self.waiting.is_blocked().then(|| self.core.now_ns() + RETRY_NS);
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
