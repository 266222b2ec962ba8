//! Requests of whole volumes as futures: for what copies between the volumes of a chain, or reads them one by
//! one.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bdev::{Completion, Request};
use block_io::{Channel, Status, Tag};
use dma::{Buffer, Data};
use reactor::{Core, Period, PollResult, Poller, Shutdown};
use sockets::Sockets;
use store_image::IMAGE_BLOCK_BYTES;
use wire_store::BlockBitmap;

use super::VolumeChannel;
use crate::attach::AttachState;
use crate::channel::ImageChannel;
use crate::placement::Placement;
use crate::watch::PoolWatch;

/// What the futures and the poller share. Each request has a key of its own.
struct VolumeIoState {
    channel: ImageChannel<Sockets>,
    next_key: u64,
    done: HashMap<u64, Completion>,
    listed: HashMap<u64, Result<BlockBitmap, Status>>,
    wakers: Vec<Waker>,
    is_dropped: bool,
}

impl VolumeIoState {
    fn key(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }
}

struct VolumePoller(Rc<RefCell<VolumeIoState>>);

impl Poller for VolumePoller {
    fn name(&self) -> &str {
        "volume copy"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        let io = &mut *self.0.borrow_mut();
        if io.is_dropped {
            return PollResult::Finished;
        }
        let mut completions = Vec::new();
        io.channel.poll(&mut completions);
        let before = io.done.len() + io.listed.len();
        io.done.extend(completions.into_iter().map(|completion| (completion.tag().0, completion)));
        while let Some((key, answer)) = io.channel.take_written() {
            io.listed.insert(key, answer);
        }
        let count = io.done.len() + io.listed.len() - before;
        if count > 0 {
            io.wakers.drain(..).for_each(Waker::wake);
        }
        PollResult::from_count(count)
    }

    fn deadline(&self) -> Option<u64> {
        self.0.borrow().channel.deadline()
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        Shutdown::Done
    }
}

/// A channel of the volumes of a pool, for one core. Writes go to one volume, which is attached; others are
/// read.
pub(crate) struct VolumeIo(Rc<RefCell<VolumeIoState>>);

impl VolumeIo {
    /// A channel that writes a volume, if `attach` has it attached.
    pub(crate) fn new(core: &Core, watch: Arc<PoolWatch>, attach: Arc<AttachState>, volume: u64) -> VolumeIo {
        let pool = watch.view().0.pool.clone();
        let placement = Placement { first_group: pool.first_group, groups: pool.groups, volume };
        let state = VolumeIoState {
            channel: ImageChannel::new(core, watch, placement, attach, IMAGE_BLOCK_BYTES),
            next_key: 0,
            done: HashMap::new(),
            listed: HashMap::new(),
            wakers: Vec::new(),
            is_dropped: false,
        };
        let state = Rc::new(RefCell::new(state));
        core.add_poller(Box::new(VolumePoller(state.clone())), Period::EveryTurn);
        VolumeIo(state)
    }

    /// Which blocks of an object a volume has.
    ///
    /// # Errors
    /// The status of the group.
    pub(crate) async fn written(&self, volume: u64, index: u32) -> Result<BlockBitmap, Status> {
        let key = self.0.borrow_mut().key();
        let mut is_sent = false;
        let answer = std::future::poll_fn(|context| {
            let io = &mut *self.0.borrow_mut();
            is_sent = is_sent || io.channel.list_written(key, volume, index);
            wait(&mut io.wakers, context, io.listed.remove(&key))
        });
        answer.await
    }

    /// Reads a volume from an offset in bytes on, within an object.
    ///
    /// # Errors
    /// The status of the read.
    pub(crate) async fn read(&self, volume: u64, start: u64, buffer: Buffer) -> Result<Data, Status> {
        let key = self.0.borrow_mut().key();
        let blocks = buffer.len() as u32 / IMAGE_BLOCK_BYTES;
        let mut request = Some(Request::read(Tag(key), start / u64::from(IMAGE_BLOCK_BYTES), blocks, buffer));
        let completion = std::future::poll_fn(|context| {
            let io = &mut *self.0.borrow_mut();
            if let Some(unsent) = request.take() {
                request = io.channel.read_volume(volume, unsent).err();
            }
            wait(&mut io.wakers, context, io.done.remove(&key))
        });
        data_of(completion.await)
    }

    /// Writes its volume from an offset in bytes on, within an object.
    ///
    /// # Errors
    /// The status of the write.
    pub(crate) async fn write(&self, start: u64, data: Data) -> Result<(), Status> {
        let key = self.0.borrow_mut().key();
        let blocks = data.len() as u32 / IMAGE_BLOCK_BYTES;
        let request = Request::write(Tag(key), start / u64::from(IMAGE_BLOCK_BYTES), blocks, data);
        let mut batch = vec![request];
        let completion = std::future::poll_fn(|context| {
            let io = &mut *self.0.borrow_mut();
            if !batch.is_empty() {
                io.channel.submit(&mut batch);
            }
            wait(&mut io.wakers, context, io.done.remove(&key))
        });
        data_of(completion.await).map(drop)
    }
}

impl Drop for VolumeIo {
    fn drop(&mut self) {
        self.0.borrow_mut().is_dropped = true;
    }
}

fn wait<T>(wakers: &mut Vec<Waker>, context: &Context<'_>, answer: Option<T>) -> Poll<T> {
    match answer {
        Some(answer) => Poll::Ready(answer),
        None => {
            wakers.push(context.waker().clone());
            Poll::Pending
        }
    }
}

fn data_of(completion: Completion) -> Result<Data, Status> {
    match completion.status() {
        status if !status.is_success() => Err(status),
        _ => completion.into_data().ok_or(Status::INTERNAL_ERROR),
    }
}
