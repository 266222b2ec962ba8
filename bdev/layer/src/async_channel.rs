//! The `async` interface of a channel, for control code and tests.
//!
//! One table of I/Os and one poller a channel; a future holds an index into the table. The table and the device own
//! the buffer, so that a future may be dropped at any time: the I/O then completes in the background and its buffer
//! goes back to the pool.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use block_io::{Channel as _, Op, RequestFlags, Status, Tag};
use dma::Buffer;
use reactor::{Core, Period, PollResult, Poller, Shutdown};
use slots::{Slab, Slot};

use crate::{BdevChannel, BlockDevice, Completion, Request};

/// I/Os in flight on one channel; further futures wait for a slot.
const IOS_MAX: u32 = 1024;

/// A block device channel with `async` operations. Cheap to clone; used on its core only.
#[derive(Clone)]
pub struct AsyncChannel(Rc<UserHandle>);

/// Shared by the clones, not by the poller: its drop tells the poller that no user is left.
struct UserHandle(Rc<RefCell<AsyncChannelState>>);

struct AsyncChannelState {
    channel: BdevChannel,
    batch: Vec<Request>,
    sink: Vec<Completion>,
    table: Slab<IoState>,
    /// Tasks that wait for a free slot of the table.
    slot_waiters: Vec<Waker>,
    closed: bool,
}

enum IoState {
    Waiting(Option<Waker>),
    Done(Completion),
    /// The future was dropped; the completion is discarded.
    Abandoned,
}

struct AsyncChannelPoller(Rc<RefCell<AsyncChannelState>>);

/// The future of one I/O.
struct IoFuture {
    state: Rc<RefCell<AsyncChannelState>>,
    request: Option<Request>,
    slot: Option<Slot>,
}

impl AsyncChannel {
    /// Adds a poller for `channel` to `core`, which runs until the last clone is dropped and no I/O is in flight.
    pub fn new(core: &Core, channel: BdevChannel) -> AsyncChannel {
        let state = Rc::new(RefCell::new(AsyncChannelState {
            channel,
            batch: Vec::new(),
            sink: Vec::new(),
            table: Slab::with_capacity(IOS_MAX),
            slot_waiters: Vec::new(),
            closed: false,
        }));
        core.add_poller(Box::new(AsyncChannelPoller(state.clone())), Period::EveryTurn);
        AsyncChannel(Rc::new(UserHandle(state)))
    }

    /// The block device of the channel.
    pub fn device(&self) -> std::sync::Arc<BlockDevice> {
        self.0.0.borrow().channel.device().clone()
    }

    /// Reads into `buffer`, whose length is a multiple of the block size. Errors return the buffer.
    pub async fn read(&self, lba: u64, buffer: Buffer) -> Result<Buffer, (Status, Buffer)> {
        self.submit_data(Op::Read, lba, buffer, RequestFlags::NONE).await
    }

    /// Writes `buffer`, whose length is a multiple of the block size. Errors return the buffer.
    pub async fn write(&self, lba: u64, buffer: Buffer) -> Result<Buffer, (Status, Buffer)> {
        self.submit_data(Op::Write, lba, buffer, RequestFlags::NONE).await
    }

    /// Like [`write`](Self::write) with FUA: the data is on non-volatile media on return.
    pub async fn write_durable(&self, lba: u64, buffer: Buffer) -> Result<Buffer, (Status, Buffer)> {
        self.submit_data(Op::Write, lba, buffer, RequestFlags::FUA).await
    }

    /// Makes all writes that completed before durable.
    pub async fn flush(&self) -> Result<(), Status> {
        self.submit_range(Op::Flush, 0, 0).await
    }

    /// Deallocates blocks; they read as zeroes afterwards.
    pub async fn unmap(&self, lba: u64, blocks: u32) -> Result<(), Status> {
        self.submit_range(Op::Unmap, lba, blocks).await
    }

    /// Writes zeroes without a data buffer.
    pub async fn write_zeroes(&self, lba: u64, blocks: u32) -> Result<(), Status> {
        self.submit_range(Op::WriteZeroes, lba, blocks).await
    }

    /// Makes reads of the blocks fail until they are written again (Write Uncorrectable).
    pub async fn write_uncorrectable(&self, lba: u64, blocks: u32) -> Result<(), Status> {
        self.submit_range(Op::WriteUncorrectable, lba, blocks).await
    }

    /// Resets the device; completes after all I/O in flight on the channel.
    pub async fn reset(&self) -> Result<(), Status> {
        self.submit_range(Op::Reset, 0, 0).await
    }

    /// Submits any request; its tag is replaced.
    pub async fn submit(&self, request: Request) -> Completion {
        IoFuture { state: self.0.0.clone(), request: Some(request), slot: None }.await
    }

    async fn submit_data(
        &self,
        op: Op,
        lba: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Result<Buffer, (Status, Buffer)> {
        let blocks = buffer.len() / self.0.0.borrow().channel.block_size() as usize;
        let mut request = Request::new(Tag(0), op, lba, blocks as u32);
        request.flags = flags;
        request.set_data(Some(buffer));
        let completion = self.submit(request).await;
        let status = completion.status();
        let data = completion.into_data().expect("a completion gives the data back");
        let buffer = data.into_single().expect("data comes back as it was submitted");
        if status.is_success() { Ok(buffer) } else { Err((status, buffer)) }
    }

    async fn submit_range(&self, op: Op, lba: u64, blocks: u32) -> Result<(), Status> {
        let status = self.submit(Request::new(Tag(0), op, lba, blocks)).await.status();
        if status.is_success() { Ok(()) } else { Err(status) }
    }
}

impl AsyncChannelState {
    fn poll_channel(&mut self) -> usize {
        if !self.batch.is_empty() {
            self.channel.submit(&mut self.batch);
        }
        let mut sink = std::mem::take(&mut self.sink);
        let count = self.channel.poll(&mut sink);
        for completion in sink.drain(..) {
            let slot = Slot::from_bits(completion.tag().0);
            match self.table.get_mut(slot) {
                Some(IoState::Abandoned) => drop(self.table.remove(slot)),
                Some(entry) => {
                    let old = std::mem::replace(entry, IoState::Done(completion));
                    if let IoState::Waiting(Some(waker)) = old {
                        waker.wake();
                    }
                }
                None => unreachable!("slot {slot:?} completed and is not in the table"),
            }
        }
        self.sink = sink;
        if !self.table.is_full() {
            self.slot_waiters.drain(..).for_each(Waker::wake);
        }
        count
    }
}

impl Future for IoFuture {
    type Output = Completion;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Completion> {
        let this = &mut *self;
        let mut state = this.state.borrow_mut();
        let Some(slot) = this.slot else {
            let Ok(slot) = state.table.insert(IoState::Waiting(Some(context.waker().clone()))) else {
                state.slot_waiters.push(context.waker().clone());
                return Poll::Pending;
            };
            let mut request = this.request.take().expect("a future without a slot holds its request");
            request.tag = Tag(slot.to_bits());
            this.slot = Some(slot);
            state.batch.push(request);
            // Submitted now and not at the poller's next turn, which saves a turn of latency.
            let AsyncChannelState { channel, batch, .. } = &mut *state;
            channel.submit(batch);
            return Poll::Pending;
        };
        match state.table.get_mut(slot) {
            Some(IoState::Waiting(waker)) => {
                *waker = Some(context.waker().clone());
                Poll::Pending
            }
            Some(IoState::Done(_)) => {
                let Some(IoState::Done(completion)) = state.table.remove(slot) else {
                    unreachable!("slot {slot:?} was Done just before")
                };
                this.slot = None;
                Poll::Ready(completion)
            }
            Some(IoState::Abandoned) | None => {
                unreachable!("slot {slot:?} of a pending future is not in the table")
            }
        }
    }
}

impl Drop for IoFuture {
    fn drop(&mut self) {
        let Some(slot) = self.slot else { return };
        let mut state = self.state.borrow_mut();
        match state.table.get_mut(slot) {
            Some(entry @ IoState::Waiting(_)) => *entry = IoState::Abandoned,
            _ => drop(state.table.remove(slot)),
        }
    }
}

impl Drop for UserHandle {
    fn drop(&mut self) {
        self.0.borrow_mut().closed = true;
    }
}

impl Poller for AsyncChannelPoller {
    fn name(&self) -> &str {
        "bdev io"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        let mut state = self.0.borrow_mut();
        let count = state.poll_channel();
        if state.closed && state.table.is_empty() {
            PollResult::Finished
        } else {
            PollResult::from_count(count)
        }
    }

    fn deadline(&self) -> Option<u64> {
        let state = self.0.borrow();
        let finished = state.closed && state.table.is_empty();
        if finished || !state.batch.is_empty() { Some(0) } else { state.channel.deadline() }
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        if self.0.borrow().table.is_empty() { Shutdown::Done } else { Shutdown::Draining }
    }
}
