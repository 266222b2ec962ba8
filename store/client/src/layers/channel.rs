//! A channel of an image that is a chain of volumes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bdev::{Completion, Request};
use block_io::{Channel, Op, RequestFlags, Status, Tag};
use dma::Data;
use foldhash::HashMap;
use reactor::Core;
use slots::{Slab, Slot};
use wire_store::{BLOCK_BYTES, BlockBitmap, OBJECT_BYTES};

use super::object::{ObjectLayers, ParentData, limit_in};
use super::plan::{Action, ParentPart, Step, plan_read, plan_write, plan_zeroes};
use super::{ChannelSeat, ImageChain, LayerChain, VolumeChannel};
use crate::keeper::IdleChannel;
use crate::placement::DEPTH;

/// Parts of one request in flight.
const STEPS_MAX: u32 = 16;
/// Objects whose bitmaps are being read.
const LOADS_MAX: u32 = 256;
/// Objects that a channel finds without the table of all channels.
const OBJECTS_MAX: usize = 4096;
/// What waits for a claim of another core, or for memory, is tried again after this time.
const RETRY_NS: u64 = 100_000;

static ZEROES: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

/// A request that was accepted.
struct Job {
    /// Without its data while that is in pieces; `None` while it is in flight as it is.
    request: Option<Request>,
    tag: Tag,
    op: Op,
    flags: RequestFlags,
    flow: u16,
    /// What is not begun, in bytes of the image, and the part that is under way: an object, and bytes of it.
    next: u64,
    end: u64,
    index: u32,
    offset: u32,
    length: u32,
    object: Option<Arc<ObjectLayers>>,
    /// Blocks that are inherited until this is done.
    claimed: BlockBitmap,
    steps: VecDeque<Step>,
    pieces: Vec<Option<Data>>,
    in_flight: u32,
    /// It is among those that wait.
    is_blocked: bool,
    status: Status,
}

/// A request of the channel below.
struct Sub {
    job: Slot,
    kind: SubKind,
}

enum SubKind {
    /// The request of the job, whose data after a parent's limit is zero.
    Whole {
        limit: Option<u32>,
    },
    Step(Step),
    /// The write of a block that was merged.
    Merged,
}

/// The bitmaps of an object that are being read.
struct Load {
    index: u32,
    object: Arc<ObjectLayers>,
    /// Of parents, in their order; `None` if the object has their data already.
    parents: Option<Vec<BlockBitmap>>,
    head: BlockBitmap,
    lists: u32,
    jobs: Vec<Slot>,
    status: Status,
}

/// A channel of one core. Its requests complete in any order.
pub(crate) struct LayeredChannel<C> {
    core: Core,
    pub(super) io: C,
    followed: Arc<ImageChain>,
    chain: Arc<LayerChain>,
    version: u64,
    block_bytes: u32,
    /// Requests that were accepted and are not reported as complete, here and for those who wait for none.
    in_flight: usize,
    seat: Arc<ChannelSeat>,
    objects: HashMap<u32, Arc<ObjectLayers>>,
    jobs: Slab<Job>,
    subs: Slab<Sub>,
    loads: Slab<Load>,
    loading: HashMap<u32, Slot>,
    /// Lists in flight: of which load, and of which parent.
    lists: Slab<(Slot, Option<usize>)>,
    /// What the channel below did not take yet.
    to_submit: Vec<Request>,
    to_read: VecDeque<(u64, Request)>,
    to_list: VecDeque<(u64, u64, u32)>,
    /// Jobs that wait for claims, memory or loads.
    blocked: VecDeque<Slot>,
    /// Scratch of `submit` and `poll`, empty between calls.
    batch: Vec<Request>,
    completions: Vec<Completion>,
    done: Vec<Completion>,
}

impl<C: VolumeChannel> LayeredChannel<C> {
    pub(crate) fn new(
        core: &Core,
        mut io: C,
        followed: Arc<ImageChain>,
        block_bytes: u32,
    ) -> LayeredChannel<C> {
        let (chain, version) = followed.get();
        io.set_head(chain.head);
        LayeredChannel {
            core: core.clone(),
            seat: followed.add_seat(),
            io,
            followed,
            chain,
            version,
            block_bytes,
            in_flight: 0,
            objects: HashMap::default(),
            jobs: Slab::with_capacity(DEPTH),
            subs: Slab::with_capacity(DEPTH * STEPS_MAX),
            loads: Slab::with_capacity(LOADS_MAX),
            loading: HashMap::default(),
            lists: Slab::with_capacity(LOADS_MAX * (cluster_map::LAYERS_MAX as u32 + 1)),
            to_submit: Vec::new(),
            to_read: VecDeque::new(),
            to_list: VecDeque::new(),
            blocked: VecDeque::new(),
            batch: Vec::new(),
            completions: Vec::new(),
            done: Vec::new(),
        }
    }

    /// Takes another chain once nothing is in flight. Returns whether requests may begin.
    fn follow_chain(&mut self) -> bool {
        if self.followed.version() == self.version {
            return true;
        }
        if self.in_flight > 0 {
            return false;
        }
        (self.chain, self.version) = self.followed.get();
        self.objects.clear();
        self.io.set_head(self.chain.head);
        true
    }

    /// Says what is in flight to those who wait until nothing is.
    fn count_in_flight(&self) {
        self.seat.in_flight.store(self.in_flight, Ordering::SeqCst);
        if self.in_flight == 0 {
            self.followed.notify_drained();
        }
    }

    fn accept(&mut self, request: Request) -> Result<(), Request> {
        if self.jobs.is_full() {
            return Err(request);
        }
        let block = u64::from(self.block_bytes);
        let (next, end) = (request.lba * block, (request.lba + u64::from(request.blocks)) * block);
        let job = Job {
            tag: request.tag,
            op: request.op,
            flags: request.flags,
            flow: request.flow,
            next,
            end,
            index: 0,
            offset: 0,
            length: 0,
            object: None,
            claimed: BlockBitmap::default(),
            steps: VecDeque::new(),
            pieces: Vec::new(),
            in_flight: 0,
            is_blocked: false,
            status: Status::SUCCESS,
            request: Some(request),
        };
        let (op, is_empty) = (job.op, next == end);
        let slot = self.jobs.insert(job).ok().expect("there is room");
        match op {
            Op::Read | Op::Write | Op::Unmap | Op::WriteZeroes if !is_empty => self.advance(slot),
            _ => self.forward(slot, None),
        }
        Ok(())
    }

    /// Begins the next part of a job, or goes on with one that waited.
    fn advance(&mut self, slot: Slot) {
        let Some(job) = self.jobs.get_mut(slot) else { return };
        if job.object.is_none() {
            job.index = (job.next / OBJECT_BYTES as u64) as u32;
            job.offset = (job.next % OBJECT_BYTES as u64) as u32;
            job.length = (OBJECT_BYTES as u64 - u64::from(job.offset)).min(job.end - job.next) as u32;
            let index = job.index;
            let object = self.object(index);
            let has_parents = object.parents().is_none_or(|parents| !parents.blocks.is_empty());
            if !object.is_loaded() || (self.chain.is_volatile && has_parents) {
                return self.load(slot, index, object);
            }
            self.jobs.get_mut(slot).expect("it was there").object = Some(object);
        }
        self.begin_part(slot);
    }

    /// A job is tried again with a later poll.
    fn block(&mut self, slot: Slot) {
        if let Some(job) = self.jobs.get_mut(slot) {
            job.is_blocked = true;
            self.blocked.push_back(slot);
        }
    }

    fn retry_blocked(&mut self) {
        for _ in 0..self.blocked.len() {
            let Some(slot) = self.blocked.pop_front() else { return };
            let Some(job) = self.jobs.get_mut(slot).filter(|job| job.is_blocked) else { continue };
            job.is_blocked = false;
            match job.steps.is_empty() {
                true => self.advance(slot),
                false => self.run_steps(slot),
            }
        }
    }

    fn object(&mut self, index: u32) -> Arc<ObjectLayers> {
        if let Some(object) = self.objects.get(&index) {
            return object.clone();
        }
        if self.objects.len() >= OBJECTS_MAX {
            self.objects.clear();
        }
        let object = self.chain.object(index);
        self.objects.insert(index, object.clone());
        object
    }

    /// Reads the bitmaps of an object for a job.
    fn load(&mut self, job: Slot, index: u32, known: Arc<ObjectLayers>) {
        let is_volatile = self.chain.is_volatile;
        // What is read for another request may be older than this one, if another process writes.
        if !is_volatile
            && let Some(load) = self.loading.get(&index).and_then(|load| self.loads.get_mut(*load))
        {
            return load.jobs.push(job);
        }
        if self.loads.is_full() {
            return self.block(job);
        }
        let is_known = known.parents().is_some();
        let object = match is_volatile {
            true => Arc::new(ObjectLayers::of_parents(known.parents().cloned())),
            false => known,
        };
        let count = self.chain.parents.len();
        let (parents, head) =
            ((!is_known).then(|| vec![BlockBitmap::default(); count]), BlockBitmap::default());
        let (jobs, status) = (vec![job], Status::SUCCESS);
        let load = Load { index, object, parents, head, lists: 0, jobs, status };
        let load = self.loads.insert(load).ok().expect("there is room");
        if !is_volatile {
            self.loading.insert(index, load);
        }
        let chain = self.chain.clone();
        if !is_known {
            for (at, parent) in chain.parents.iter().enumerate() {
                if limit_in(parent, index) > 0 {
                    self.list(load, Some(at), parent.volume, index);
                }
            }
        }
        self.list(load, None, chain.head, index);
    }

    fn list(&mut self, load: Slot, parent: Option<usize>, volume: u64, index: u32) {
        let key = self.lists.insert((load, parent)).expect("as many as loads have");
        self.to_list.push_back((key.to_bits(), volume, index));
        self.loads.get_mut(load).expect("it is being read").lists += 1;
    }

    fn listed(&mut self, key: u64, answer: Result<BlockBitmap, Status>) {
        let Some((slot, parent)) = self.lists.remove(Slot::from_bits(key)) else { return };
        let Some(load) = self.loads.get_mut(slot) else { return };
        match (answer, parent, &mut load.parents) {
            (Ok(bitmap), Some(at), Some(parents)) => parents[at] = bitmap,
            (Ok(bitmap), ..) => load.head = bitmap,
            (Err(status), ..) => load.status = status,
        }
        load.lists -= 1;
        if load.lists > 0 {
            return;
        }
        let load = self.loads.remove(slot).expect("it was there");
        if !self.chain.is_volatile {
            self.loading.remove(&load.index);
        }
        self.loaded(load);
    }

    /// All bitmaps of an object are read: what waited for them begins.
    fn loaded(&mut self, load: Load) {
        if !load.status.is_success() {
            for slot in load.jobs {
                if let Some(job) = self.jobs.get_mut(slot) {
                    job.status = load.status;
                    self.finish(slot);
                }
            }
            return;
        }
        let parents = match load.parents {
            None => load.object.known_parents().clone(),
            Some(written) => {
                let all = self.chain.parents.iter().copied().zip(written);
                Arc::new(ParentData::new(load.index, all))
            }
        };
        load.object.load(parents.clone(), &load.head);
        if self.chain.is_volatile {
            self.object(load.index).load(parents, &BlockBitmap::default());
        }
        for slot in load.jobs {
            if let Some(job) = self.jobs.get_mut(slot) {
                job.object = Some(load.object.clone());
                self.begin_part(slot);
            }
        }
    }

    /// Begins the part of a job whose object is known.
    fn begin_part(&mut self, slot: Slot) {
        let Some(job) = self.jobs.get_mut(slot) else { return };
        let Some(object) = job.object.clone() else { return };
        if !object.is_loaded() {
            // A write has failed meanwhile.
            job.object = None;
            return self.advance(slot);
        }
        let bytes = job.offset..job.offset + job.length;
        let touched = BlockBitmap::touched(bytes.start, bytes.end);
        let mut inherited = object.inherited(&touched);
        if job.op != Op::Read && !inherited.is_empty() {
            if !object.claim(&inherited) {
                return self.block(slot);
            }
            // Others may have written some since.
            let left = object.inherited(&inherited);
            object.release(&inherited.without(&left));
            (job.claimed, inherited) = (left, left);
        }
        let parents = object.known_parents();
        let is_whole_request = u64::from(job.length) == job.end - job.next && job.pieces.is_empty();
        let covered = BlockBitmap::covered(bytes.start, bytes.end);
        let is_direct = is_whole_request
            && match job.op {
                Op::Read => inherited.is_empty(),
                Op::Write => inherited.without(&covered).is_empty(),
                // Of a range of several objects this is the last one.
                _ => parents.blocks.and(&touched).is_empty() && is_first_part(job, self.block_bytes),
            };
        if is_direct {
            return self.forward(slot, None);
        }
        let steps = match job.op {
            Op::Read => plan_read(bytes, &inherited, parents),
            Op::Write => plan_write(bytes, &inherited, parents),
            _ => plan_zeroes(bytes, &inherited, parents),
        };
        if let [Step { action: Action::ReadParent(parent), .. }] = steps[..] {
            return self.forward(slot, Some(parent));
        }
        let data = job.request.as_mut().filter(|_| job.op.has_data()).and_then(Request::take_data);
        if let Some(mut data) = data {
            job.pieces.resize_with(steps.len(), || None);
            for (at, step) in steps.iter().enumerate().skip(1).rev() {
                job.pieces[at] = Some(data.split_off((step.bytes.start - steps[0].bytes.start) as usize));
            }
            job.pieces[0] = Some(data);
        }
        job.steps = steps.into();
        self.run_steps(slot);
    }

    /// Submits the request of a job as it is, or as a read of a parent.
    fn forward(&mut self, slot: Slot, parent: Option<ParentPart>) {
        let Some(job) = self.jobs.get_mut(slot) else { return };
        let Some(mut request) = job.request.take() else { return };
        let limit = parent.map(|parent| parent.limit.saturating_sub(job.offset));
        let sub = self.subs.insert(Sub { job: slot, kind: SubKind::Whole { limit } });
        request.tag = Tag(sub.ok().expect("a slot for each job").to_bits());
        job.in_flight = 1;
        match parent {
            None => self.to_submit.push(request),
            Some(parent) => self.to_read.push_back((parent.volume, request)),
        }
    }

    /// Submits steps of a job, as many as may be in flight.
    fn run_steps(&mut self, slot: Slot) {
        if let Some(job) = self.jobs.get_mut(slot) {
            job.is_blocked = false;
        }
        while let Some(job) = self.jobs.get_mut(slot)
            && job.in_flight < STEPS_MAX
            && let Some(step) = job.steps.pop_front()
        {
            if !job.status.is_success() {
                continue;
            }
            if let Err(step) = self.run_step(slot, step) {
                if let Some(job) = self.jobs.get_mut(slot) {
                    job.steps.push_front(step);
                }
                return self.block(slot);
            }
        }
        if self.jobs.get(slot).is_some_and(|job| job.in_flight == 0) {
            self.part_done(slot);
        }
    }

    /// Submits a step; gives it back if there is no memory now.
    fn run_step(&mut self, slot: Slot, step: Step) -> Result<(), Step> {
        let Some(job) = self.jobs.get_mut(slot) else { return Ok(()) };
        let (bytes, action) = (step.bytes.clone(), step.action);
        let mut flags = RequestFlags::NONE;
        let (op, range, data) = match action {
            Action::Read | Action::ReadParent(_) | Action::Write => {
                flags = job.flags;
                (job.op, bytes, step.piece.and_then(|piece| job.pieces[piece].take()))
            }
            Action::Zero => {
                flags = job.flags;
                (job.op, bytes, None)
            }
            Action::WriteZeroes => {
                let Some(mut buffer) = self.core.pool().take(bytes.len()) else { return Err(step) };
                buffer.as_mut_slice().fill(0);
                (Op::Write, bytes, Some(Data::One(buffer)))
            }
            Action::Merge(_) => {
                let Some(buffer) = self.core.pool().take(BLOCK_BYTES) else { return Err(step) };
                (Op::Read, block_around(&bytes), Some(Data::One(buffer)))
            }
        };
        job.in_flight += 1;
        let (index, flow) = (job.index, job.flow);
        let sub = self.subs.insert(Sub { job: slot, kind: SubKind::Step(step) });
        let tag = Tag(sub.ok().expect("slots for all steps").to_bits());
        let mut request = self.request(op, tag, index, range, data);
        (request.flags, request.flow) = (flags, flow);
        match action {
            Action::ReadParent(parent) | Action::Merge(parent) => {
                self.to_read.push_back((parent.volume, request));
            }
            _ => self.to_submit.push(request),
        }
        Ok(())
    }

    fn request(
        &self,
        op: Op,
        tag: Tag,
        index: u32,
        bytes: std::ops::Range<u32>,
        data: Option<Data>,
    ) -> Request {
        let start = u64::from(index) * OBJECT_BYTES as u64 + u64::from(bytes.start);
        let blocks = bytes.len() as u32 / self.block_bytes;
        let mut request = Request::new(tag, op, start / u64::from(self.block_bytes), blocks);
        if data.is_some() {
            request.set_data(data);
        }
        request
    }

    /// A request of the channel below has ended.
    fn completed(&mut self, completion: Completion) {
        let status = completion.status();
        let Some(sub) = self.subs.remove(Slot::from_bits(completion.tag().0)) else { return };
        let Some(job) = self.jobs.get_mut(sub.job) else { return };
        let mut request = completion.into_request();
        match sub.kind {
            SubKind::Whole { limit } => {
                if let (Some(limit), Some(data)) = (limit, request.data_mut()) {
                    zero_from(data, limit as usize);
                }
                request.tag = job.tag;
                job.request = Some(request);
            }
            SubKind::Merged => {}
            SubKind::Step(Step { action: Action::Merge(parent), bytes, piece }) => {
                if status.is_success()
                    && let Some(data) = request.take_data()
                {
                    return self.write_merged(sub.job, parent, &bytes, piece, data);
                }
            }
            SubKind::Step(step) => {
                let mut data = request.take_data();
                if let (Action::ReadParent(parent), Some(data)) = (step.action, &mut data) {
                    zero_from(data, parent.limit.saturating_sub(step.bytes.start) as usize);
                }
                if let Some(piece) = step.piece {
                    job.pieces[piece] = data;
                }
            }
        }
        if job.status.is_success() {
            job.status = status;
        }
        job.in_flight -= 1;
        match job.steps.is_empty() && job.in_flight == 0 {
            true => self.part_done(sub.job),
            false => self.run_steps(sub.job),
        }
    }

    /// Writes a block that was read from a parent, with some bytes changed.
    fn write_merged(
        &mut self,
        slot: Slot,
        parent: ParentPart,
        bytes: &std::ops::Range<u32>,
        piece: Option<usize>,
        mut block: Data,
    ) {
        let Some(job) = self.jobs.get_mut(slot) else { return };
        let range = block_around(bytes);
        zero_from(&mut block, parent.limit.saturating_sub(range.start) as usize);
        let mut changed = [0; BLOCK_BYTES];
        let changed = &mut changed[..bytes.len()];
        if let Some(data) = piece.and_then(|piece| job.pieces[piece].as_ref()) {
            data.copy_to(0, changed);
        }
        block.copy_from((bytes.start - range.start) as usize, changed);
        let (index, flow, flags) = (job.index, job.flow, job.flags & RequestFlags::FUA);
        let sub = self.subs.insert(Sub { job: slot, kind: SubKind::Merged });
        let tag = Tag(sub.ok().expect("the slot of its read").to_bits());
        let mut request = self.request(Op::Write, tag, index, range, Some(block));
        (request.flags, request.flow) = (flags, flow);
        self.to_submit.push(request);
    }

    /// A part of a job has ended.
    fn part_done(&mut self, slot: Slot) {
        let Some(job) = self.jobs.get_mut(slot) else { return };
        if let Some(object) = job.object.take()
            && !job.claimed.is_empty()
        {
            match job.status.is_success() {
                true => object.written(&job.claimed),
                false => object.forget(),
            }
            object.release(&std::mem::take(&mut job.claimed));
        }
        job.next += u64::from(job.length);
        match job.status.is_success() && job.next < job.end && job.length > 0 && job.request.is_some() {
            // What was sent as it is has all of it.
            true if !job.op.has_data() && job.steps.is_empty() => self.advance(slot),
            _ => self.finish(slot),
        }
    }

    /// Reports a job.
    fn finish(&mut self, slot: Slot) {
        let Some(mut job) = self.jobs.remove(slot) else { return };
        let Some(mut request) = job.request.take() else { return };
        let pieces = job.pieces.drain(..).flatten().reduce(Data::join);
        if pieces.is_some() {
            request.set_data(pieces);
        }
        self.done.push(request.complete(job.status));
    }

    /// Gives the channel below what it takes.
    fn push_down(&mut self) {
        while let Some((key, volume, index)) = self.to_list.front().copied()
            && self.io.list_written(key, volume, index)
        {
            self.to_list.pop_front();
        }
        while let Some((volume, request)) = self.to_read.pop_front() {
            if let Err(request) = self.io.read_volume(volume, request) {
                self.to_read.push_front((volume, request));
                break;
            }
        }
        if !self.to_submit.is_empty() {
            self.io.submit(&mut self.to_submit);
        }
    }
}

/// Whether a part is the first of its request.
fn is_first_part(job: &Job, block_bytes: u32) -> bool {
    job.request.as_ref().is_some_and(|request| request.lba * u64::from(block_bytes) == job.next)
}

/// The block that bytes of an object are in.
fn block_around(bytes: &std::ops::Range<u32>) -> std::ops::Range<u32> {
    let start = bytes.start - bytes.start % BLOCK_BYTES as u32;
    start..start + BLOCK_BYTES as u32
}

/// Zeroes data from an offset on.
pub(crate) fn zero_from(data: &mut Data, offset: usize) {
    let mut at = offset;
    while at < data.len() {
        let length = BLOCK_BYTES.min(data.len() - at);
        data.copy_from(at, &ZEROES[..length]);
        at += length;
    }
}

impl<C> Drop for LayeredChannel<C> {
    fn drop(&mut self) {
        // What is in flight is fenced by those who wait.
        self.seat.in_flight.store(0, Ordering::SeqCst);
        self.followed.notify_drained();
    }
}

impl<C: VolumeChannel> IdleChannel for LayeredChannel<C> {
    fn is_idle(&self) -> bool {
        self.in_flight == 0
    }
}

impl<C: VolumeChannel> Channel for LayeredChannel<C> {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        if !self.follow_chain() {
            return;
        }
        self.seat.in_flight.store(self.in_flight + batch.len(), Ordering::SeqCst);
        if self.followed.is_paused() {
            return self.count_in_flight();
        }
        let before = batch.len();
        if self.chain.is_plain() {
            self.io.submit(batch);
        } else {
            let mut requests = std::mem::take(&mut self.batch);
            std::mem::swap(&mut requests, batch);
            for request in requests.drain(..) {
                // In order: after the first that waits, all do.
                if batch.is_empty() {
                    batch.extend(self.accept(request).err());
                } else {
                    batch.push(request);
                }
            }
            self.batch = requests;
            self.push_down();
        }
        self.in_flight += before - batch.len();
        self.count_in_flight();
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        self.follow_chain();
        if self.chain.is_plain() {
            self.io.poll(sink);
        } else {
            let mut completions = std::mem::take(&mut self.completions);
            self.io.poll(&mut completions);
            completions.drain(..).for_each(|completion| self.completed(completion));
            self.completions = completions;
            while let Some((key, answer)) = self.io.take_written() {
                self.listed(key, answer);
            }
            self.retry_blocked();
            self.push_down();
            sink.append(&mut self.done);
        }
        let completed = sink.len() - before;
        if completed > 0 {
            self.in_flight -= completed;
            self.count_in_flight();
        }
        completed
    }

    fn deadline(&self) -> Option<u64> {
        if !self.done.is_empty() {
            return Some(0);
        }
        let retry = (!self.blocked.is_empty()).then(|| self.core.now_ns() + RETRY_NS);
        // A request that waits for another chain is submitted again.
        let is_waiting = self.followed.version() != self.version || self.followed.is_paused();
        let follows = is_waiting.then(|| self.core.now_ns() + RETRY_NS);
        self.io.deadline().into_iter().chain(retry).chain(follows).min()
    }
}
