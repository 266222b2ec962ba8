//! The `async` face of a channel, for control code and tests.
//!
//! One table of I/Os and one poller a channel; a future is a tag into the table. The table and the
//! device own the buffer, so that a future may be dropped at any time: the I/O then runs to its end
//! and its buffer goes back to the pool.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use memory::Buffer;
use reactor::{Core, Period, Poller, Shutdown, Work};
use ring::{Channel as _, Flags, Op, Status, Tag};
use slots::{Slab, Slot};

use crate::{Channel, Completion, Device, Request};

/// Most I/Os at a time; further ones wait their turn.
const IOS_MAX: u32 = 1024;

/// A channel that is awaited. Cheap to clone; stays on its core.
#[derive(Clone)]
pub struct Io(Rc<Handle>);

/// Counts the users: the poller holds the state but no handle.
struct Handle(Rc<RefCell<State>>);

struct State {
    channel: Channel,
    batch: Vec<Request>,
    sink: Vec<Completion>,
    table: Slab<Entry>,
    /// Tasks that found the table full.
    crowd: Vec<Waker>,
    closed: bool,
}

enum Entry {
    Waiting(Option<Waker>),
    Done(Completion),
    /// Its future was dropped.
    Abandoned,
}

struct Pump(Rc<RefCell<State>>);

/// An I/O that is being awaited.
struct InFlight {
    state: Rc<RefCell<State>>,
    request: Option<Request>,
    slot: Option<Slot>,
}

impl Io {
    /// Drives `channel` by a poller on `core` until the last clone is gone and nothing is in flight.
    pub fn new(core: &Core, channel: Channel) -> Io {
        let state = Rc::new(RefCell::new(State {
            channel,
            batch: Vec::new(),
            sink: Vec::new(),
            table: Slab::with_capacity(IOS_MAX),
            crowd: Vec::new(),
            closed: false,
        }));
        core.add_poller(Box::new(Pump(state.clone())), Period::EveryTurn);
        Io(Rc::new(Handle(state)))
    }

    /// The device.
    pub fn device(&self) -> std::sync::Arc<Device> {
        self.0.0.borrow().channel.device().clone()
    }

    /// Fills `buffer`, a whole number of blocks, from the blocks at `lba`.
    pub async fn read(&self, lba: u64, buffer: Buffer) -> Result<Buffer, (Status, Buffer)> {
        self.transfer(Op::Read, lba, buffer, Flags::NONE).await
    }

    /// Puts `buffer`, a whole number of blocks, into the blocks at `lba`.
    pub async fn write(&self, lba: u64, buffer: Buffer) -> Result<Buffer, (Status, Buffer)> {
        self.transfer(Op::Write, lba, buffer, Flags::NONE).await
    }

    /// Like [`write`](Self::write), and on the medium when it returns.
    pub async fn write_durable(&self, lba: u64, buffer: Buffer) -> Result<Buffer, (Status, Buffer)> {
        self.transfer(Op::Write, lba, buffer, Flags::FUA).await
    }

    /// Everything acknowledged before reaches the medium.
    pub async fn flush(&self) -> Result<(), Status> {
        self.range(Op::Flush, 0, 0).await
    }

    /// Gives blocks up; they read as zeroes afterwards.
    pub async fn unmap(&self, lba: u64, blocks: u32) -> Result<(), Status> {
        self.range(Op::Unmap, lba, blocks).await
    }

    /// Makes blocks zero.
    pub async fn write_zeroes(&self, lba: u64, blocks: u32) -> Result<(), Status> {
        self.range(Op::WriteZeroes, lba, blocks).await
    }

    /// Makes reads of blocks fail until they are written again.
    pub async fn write_uncorrectable(&self, lba: u64, blocks: u32) -> Result<(), Status> {
        self.range(Op::WriteUncorrectable, lba, blocks).await
    }

    /// Brings the device back to a known state, once what was in flight has completed.
    pub async fn reset(&self) -> Result<(), Status> {
        self.range(Op::Reset, 0, 0).await
    }

    /// Any request; its tag is replaced.
    pub async fn submit(&self, request: Request) -> Completion {
        InFlight { state: self.0.0.clone(), request: Some(request), slot: None }.await
    }

    async fn transfer(
        &self,
        op: Op,
        lba: u64,
        buffer: Buffer,
        flags: Flags,
    ) -> Result<Buffer, (Status, Buffer)> {
        let blocks = buffer.len() / self.0.0.borrow().channel.block_size() as usize;
        let mut request = Request::new(Tag(0), op, lba, blocks as u32);
        request.flags = flags;
        request.buffer = Some(buffer);
        let completion = self.submit(request).await;
        let status = completion.status();
        let buffer = completion.into_request().buffer.expect("a completion gives the buffer back");
        if status.is_success() { Ok(buffer) } else { Err((status, buffer)) }
    }

    async fn range(&self, op: Op, lba: u64, blocks: u32) -> Result<(), Status> {
        let status = self.submit(Request::new(Tag(0), op, lba, blocks)).await.status();
        if status.is_success() { Ok(()) } else { Err(status) }
    }
}

impl State {
    fn pump(&mut self) -> usize {
        if !self.batch.is_empty() {
            self.channel.submit(&mut self.batch);
        }
        let mut sink = std::mem::take(&mut self.sink);
        let count = self.channel.poll(&mut sink);
        for completion in sink.drain(..) {
            let slot = Slot::from_bits(completion.tag().0);
            match self.table.get_mut(slot) {
                Some(Entry::Abandoned) => drop(self.table.remove(slot)),
                Some(entry) => {
                    let old = std::mem::replace(entry, Entry::Done(completion));
                    if let Entry::Waiting(Some(waker)) = old {
                        waker.wake();
                    }
                }
                None => unreachable!("slot {slot:?} completed and is not in the table"),
            }
        }
        self.sink = sink;
        if !self.table.is_full() {
            self.crowd.drain(..).for_each(Waker::wake);
        }
        count
    }
}

impl Future for InFlight {
    type Output = Completion;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Completion> {
        let this = &mut *self;
        let mut state = this.state.borrow_mut();
        let Some(slot) = this.slot else {
            let Ok(slot) = state.table.insert(Entry::Waiting(Some(context.waker().clone()))) else {
                state.crowd.push(context.waker().clone());
                return Poll::Pending;
            };
            let mut request = this.request.take().expect("a future without a slot holds its request");
            request.tag = Tag(slot.to_bits());
            this.slot = Some(slot);
            state.batch.push(request);
            // Handed over now and not at the poller's next turn: one turn less of latency.
            let State { channel, batch, .. } = &mut *state;
            channel.submit(batch);
            return Poll::Pending;
        };
        match state.table.get_mut(slot) {
            Some(Entry::Waiting(waker)) => {
                *waker = Some(context.waker().clone());
                Poll::Pending
            }
            Some(Entry::Done(_)) => {
                let Some(Entry::Done(completion)) = state.table.remove(slot) else {
                    unreachable!("slot {slot:?} was done a line ago")
                };
                this.slot = None;
                Poll::Ready(completion)
            }
            Some(Entry::Abandoned) | None => unreachable!("slot {slot:?} is awaited and not in the table"),
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let Some(slot) = self.slot else { return };
        let mut state = self.state.borrow_mut();
        match state.table.get_mut(slot) {
            Some(entry @ Entry::Waiting(_)) => *entry = Entry::Abandoned,
            _ => drop(state.table.remove(slot)),
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.borrow_mut().closed = true;
    }
}

impl Poller for Pump {
    fn name(&self) -> &str {
        "bdev io"
    }

    fn poll(&mut self, _now_ns: u64) -> Work {
        let mut state = self.0.borrow_mut();
        let count = state.pump();
        if state.closed && state.table.is_empty() { Work::Finished } else { Work::count(count) }
    }

    fn deadline(&self) -> Option<u64> {
        let state = self.0.borrow();
        let ends = state.closed && state.table.is_empty();
        if ends || !state.batch.is_empty() { Some(0) } else { state.channel.deadline() }
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        if self.0.borrow().table.is_empty() { Shutdown::Done } else { Shutdown::Draining }
    }
}
