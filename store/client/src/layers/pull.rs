//! Copies to a volume what it has from parents, so that it needs them no more.
//!
//! What is copied does not change what the volume looks like from above, so that it may end at any moment and
//! be repeated: what was copied before is not copied again.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bdev::{Completion, Request};
use block_io::{Channel, Status, Tag};
use cluster_map::ParentVolume;
use dma::{Buffer, Data};
use reactor::{Core, Period, PollResult, Poller, Shutdown};
use sockets::Sockets;
use store_image::{IMAGE_BLOCK_BYTES, TRANSFER_BYTES_MAX};
use wire_store::{BlockBitmap, OBJECT_BYTES};

use super::VolumeChannel;
use super::channel::zero_from;
use super::object::{ParentData, limit_in};
use super::plan::{Action, ParentPart, plan_read};
use crate::attach::AttachState;
use crate::channel::ImageChannel;
use crate::lanes::{LANES, Lane, run_lanes};
use crate::placement::Placement;
use crate::reclaim::{ReclaimError, sweep};
use crate::sweep::SweepKind;
use crate::watch::PoolWatch;

/// Requests of volumes as futures. Each has a key of its own.
struct VolumeIo {
    channel: ImageChannel<Sockets>,
    next_key: u64,
    done: HashMap<u64, Completion>,
    listed: HashMap<u64, Result<BlockBitmap, Status>>,
    wakers: Vec<Waker>,
    is_dropped: bool,
}

impl VolumeIo {
    fn key(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }
}

struct VolumePoller(Rc<RefCell<VolumeIo>>);

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

/// What the lanes share.
struct Pulling<'a> {
    core: Core,
    io: Rc<RefCell<VolumeIo>>,
    volume: u64,
    parents: &'a [ParentVolume],
    waiting: RefCell<Vec<u32>>,
    copied: Cell<u64>,
}

/// Copies to a volume, which `attach` has attached, the blocks of its parents that it lacks. `progress` gets
/// the objects that are done, and how many there are.
pub(crate) async fn pull(
    core: &Core,
    (watch, attach): (Arc<PoolWatch>, Arc<AttachState>),
    volume: u64,
    parents: &[ParentVolume],
    mut progress: impl FnMut(u64, u64),
) -> Result<(), ReclaimError> {
    let pool = watch.view().0.pool.clone();
    // Parents do not change. With the attach epoch of the child, groups would refuse the lower one of whoever
    // removes a parent later.
    let reads = Arc::new(AttachState::new(0, pool.first_group..pool.first_group + pool.groups));
    let mut indices = BTreeSet::new();
    for parent in parents {
        let kind = SweepKind::Indices { end: parent.bytes.div_ceil(OBJECT_BYTES as u64) };
        let swept = sweep(core, watch.clone(), parent.volume, reads.clone(), kind, |_, _| {}).await;
        indices.extend(swept.map_err(ReclaimError::of_list)?.indices);
    }
    let count = indices.len() as u64;
    let placement = Placement { first_group: pool.first_group, groups: pool.groups, volume };
    let channel = ImageChannel::new(core, watch, placement, attach, IMAGE_BLOCK_BYTES);
    let io = VolumeIo {
        channel,
        next_key: 0,
        done: HashMap::new(),
        listed: HashMap::new(),
        wakers: Vec::new(),
        is_dropped: false,
    };
    let io = Rc::new(RefCell::new(io));
    core.add_poller(Box::new(VolumePoller(io.clone())), Period::EveryTurn);
    let pulling = Pulling {
        core: core.clone(),
        io: io.clone(),
        volume,
        parents,
        waiting: RefCell::new(indices.into_iter().rev().collect()),
        copied: Cell::new(0),
    };
    let mut lanes: Vec<Lane<'_, ReclaimError>> = Vec::new();
    for _ in 0..LANES {
        lanes.push(Box::pin(pulling.pull_objects()));
    }
    let pulled = run_lanes(lanes, || progress(pulling.copied.get(), count)).await;
    io.borrow_mut().is_dropped = true;
    pulled
}

impl Pulling<'_> {
    async fn pull_objects(&self) -> Result<(), ReclaimError> {
        loop {
            let Some(index) = self.waiting.borrow_mut().pop() else { return Ok(()) };
            self.pull_object(index).await?;
            self.copied.set(self.copied.get() + 1);
        }
    }

    async fn pull_object(&self, index: u32) -> Result<(), ReclaimError> {
        let mut written = Vec::new();
        for parent in self.parents.iter().filter(|parent| limit_in(parent, index) > 0) {
            written.push((*parent, self.written(parent.volume, index).await?));
        }
        let parents = ParentData::new(index, written.into_iter());
        if parents.blocks.is_empty() {
            return Ok(());
        }
        let inherited = parents.blocks.without(&self.written(self.volume, index).await?);
        for step in plan_read(0..OBJECT_BYTES as u32, &inherited, &parents) {
            let Action::ReadParent(parent) = step.action else { continue };
            let mut start = step.bytes.start;
            while start < step.bytes.end {
                let end = step.bytes.end.min(start + TRANSFER_BYTES_MAX);
                self.copy(index, parent, start, (end - start) as usize).await?;
                start = end;
            }
        }
        Ok(())
    }

    async fn copy(
        &self,
        index: u32,
        parent: ParentPart,
        offset: u32,
        length: usize,
    ) -> Result<(), ReclaimError> {
        let buffer = self.core.pool().take(length).ok_or(ReclaimError::NoMemory)?;
        let start = u64::from(index) * OBJECT_BYTES as u64 + u64::from(offset);
        let mut data = self.read(parent.volume, start, buffer).await?;
        zero_from(&mut data, parent.limit.saturating_sub(offset) as usize);
        self.write(start, data).await
    }

    async fn written(&self, volume: u64, index: u32) -> Result<BlockBitmap, ReclaimError> {
        let key = self.io.borrow_mut().key();
        let mut is_sent = false;
        let answer = std::future::poll_fn(|context| {
            let io = &mut *self.io.borrow_mut();
            is_sent = is_sent || io.channel.list_written(key, volume, index);
            wait(&mut io.wakers, context, io.listed.remove(&key))
        });
        answer.await.map_err(ReclaimError::Unlisted)
    }

    async fn read(&self, volume: u64, start: u64, buffer: Buffer) -> Result<Data, ReclaimError> {
        let key = self.io.borrow_mut().key();
        let blocks = buffer.len() as u32 / IMAGE_BLOCK_BYTES;
        let mut request = Some(Request::read(Tag(key), start / u64::from(IMAGE_BLOCK_BYTES), blocks, buffer));
        let completion = std::future::poll_fn(|context| {
            let io = &mut *self.io.borrow_mut();
            if let Some(unsent) = request.take() {
                request = io.channel.read_volume(volume, unsent).err();
            }
            wait(&mut io.wakers, context, io.done.remove(&key))
        });
        data_of(completion.await)
    }

    async fn write(&self, start: u64, data: Data) -> Result<(), ReclaimError> {
        let key = self.io.borrow_mut().key();
        let blocks = data.len() as u32 / IMAGE_BLOCK_BYTES;
        let request = Request::write(Tag(key), start / u64::from(IMAGE_BLOCK_BYTES), blocks, data);
        let mut batch = vec![request];
        let completion = std::future::poll_fn(|context| {
            let io = &mut *self.io.borrow_mut();
            if !batch.is_empty() {
                io.channel.submit(&mut batch);
            }
            wait(&mut io.wakers, context, io.done.remove(&key))
        });
        data_of(completion.await).map(drop)
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

fn data_of(completion: Completion) -> Result<Data, ReclaimError> {
    match completion.status() {
        status if !status.is_success() => Err(ReclaimError::Uncopied(status)),
        _ => completion.into_data().ok_or(ReclaimError::Uncopied(Status::INTERNAL_ERROR)),
    }
}
