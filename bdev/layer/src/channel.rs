//! What every I/O goes through: checked, limited, shared out, counted.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ring::{Flags, Op, Status};

use crate::compare::Compares;
use crate::device::Open;
use crate::fair::Waiting;
use crate::locks::Writes;
use crate::stats::{Counters, Run};
use crate::{BdevError, BoxedChannel, Completion, Device, Request};

/// Resets that are under way at a time on one channel; further ones stay with the caller.
pub(crate) const RESETS_MAX: usize = 16;
/// Refused requests whose completions wait to be polled; further ones stay with the caller.
const REFUSED_MAX: usize = 1024;
/// How soon to look again whether a range that another core has locked is free; there is no event for that.
const LOOK_NS: u64 = 20_000;

/// A ring to a device, on one core.
///
/// A request that cannot be is completed with a status and reaches no module: compare with
/// [`Status::same_code`], as Do Not Retry is set. Requests beyond the in-flight limit wait here, each
/// flow in its own bounded FIFO, and are served in turn; those of a flow whose FIFO is full stay in
/// the caller's batch, in order, while other flows' are taken.
pub struct Channel {
    module: BoxedChannel,
    open: Arc<Open>,
    counters: Arc<Counters>,
    /// Bit [`Op::index`] is set where the operation goes straight to the module.
    plain_ops: u8,
    module_resets: bool,
    writes: bool,
    block_size: u32,
    depth: u32,
    in_flight: u32,
    /// Writes of the caller's that the module has, and where other cores see their number.
    writes_in_flight: u32,
    told: Arc<Writes>,
    /// Writes of ranges that are locked; no more of them than `depth`.
    held: Vec<Request>,
    compares: Compares,
    /// When completions were last counted, in ticks.
    polled_at: u64,
    waiting: Waiting,
    /// Chosen from `waiting` but not taken by the module yet.
    chosen: Vec<Request>,
    resets: Vec<Request>,
    /// Resets taken and not given back.
    resets_outstanding: usize,
    /// Completed by the layer itself, to be polled.
    finished: Vec<Completion>,
    /// Empty between calls; holds what goes back into the caller's batch.
    kept: Vec<Request>,
    /// A channel stays on its core.
    _not_send: std::marker::PhantomData<Rc<()>>,
}

/// What a request is checked against, read once a batch.
struct Limits {
    blocks: u64,
    block_size: u64,
    plain_ops: u8,
}

impl Channel {
    pub(crate) fn new(open: Arc<Open>, core: &reactor::Core) -> Result<Channel, BdevError> {
        let device = &open.device;
        let bdev = device.bdev();
        let writes = open.writes && !bdev.read_only();
        let allowed = |op: &Op| *op != Op::Reset && bdev.supports(*op) && (writes || !op.is_write());
        let plain_ops = Op::ALL.iter().filter(|op| allowed(op)).fold(0, |bits, op| bits | 1 << op.index());
        let geometry = device.geometry();
        let module = bdev.open(core)?;
        Ok(Channel {
            module,
            counters: device.stats.join(core.index()),
            plain_ops,
            writes,
            module_resets: bdev.supports(Op::Reset),
            block_size: geometry.block_size,
            depth: bdev.depth(),
            in_flight: 0,
            writes_in_flight: 0,
            told: device.locks.join(),
            held: Vec::new(),
            compares: Compares::default(),
            polled_at: 0,
            waiting: Waiting::new(geometry.block_size),
            chosen: Vec::new(),
            resets: Vec::new(),
            resets_outstanding: 0,
            finished: Vec::new(),
            kept: Vec::new(),
            open,
            _not_send: std::marker::PhantomData,
        })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.open.device
    }

    /// Bytes of a block.
    #[inline]
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Number of blocks now.
    #[inline]
    pub fn blocks(&self) -> u64 {
        self.open.device.blocks.load(Ordering::Relaxed)
    }

    /// Whether the device was removed; from then on every new I/O fails.
    #[inline]
    pub fn is_removed(&self) -> bool {
        self.open.device.removed.load(Ordering::Relaxed)
    }

    /// Requests taken and not yet given back, those that wait included.
    pub fn outstanding(&self) -> usize {
        // What the module does for a compare is part of that.
        (self.in_flight - self.compares.at_module) as usize
            + self.waiting.len()
            + self.chosen.len()
            + self.resets.len()
            + self.finished.len()
            + self.held.len()
            + self.compares.len()
    }

    #[inline]
    fn limits(&self) -> Limits {
        let plain_ops = if self.is_removed() { 0 } else { self.plain_ops };
        Limits { blocks: self.blocks(), block_size: u64::from(self.block_size), plain_ops }
    }

    #[inline]
    fn nothing_waits(&self) -> bool {
        self.waiting.is_empty()
            && self.chosen.is_empty()
            && self.resets.is_empty()
            && self.held.is_empty()
            && self.compares.is_empty()
    }

    /// Tells other cores of writes that are about to be handed over; whether they may be.
    #[inline]
    fn announce(&mut self, writes: u32) -> bool {
        self.writes_in_flight += writes;
        self.told.tell(self.writes_in_flight);
        if !self.open.device.locks.any() {
            return true;
        }
        self.retract(writes);
        false
    }

    #[cold]
    fn retract(&mut self, writes: u32) {
        self.writes_in_flight -= writes;
        self.told.tell(self.writes_in_flight);
    }

    /// Hands requests to the module, whose writes are told of already. Those that it leaves have not begun.
    #[inline]
    fn hand_over(&mut self, batch: &mut Vec<Request>) {
        hand_over(&mut self.module, batch, &mut self.in_flight);
        if !batch.is_empty() {
            self.retract(writes_of(batch));
        }
    }

    /// Takes the batch one by one: refuses what cannot be, queues what can.
    #[cold]
    fn submit_each(&mut self, batch: &mut Vec<Request>) {
        let limits = self.limits();
        let mut requests = batch.drain(..);
        while let Some(request) = requests.next() {
            if request.op == Op::Compare {
                let write = if request.flags.contains(Flags::FUSED) { requests.next() } else { None };
                self.take_compare(request, write, &limits);
                continue;
            }
            let back = match self.verdict(&request, &limits) {
                Some(_) if self.finished.len() >= REFUSED_MAX => Some(request),
                Some(status) => {
                    self.resets_outstanding += usize::from(request.op == Op::Reset);
                    self.finished.push(request.complete(status));
                    None
                }
                None if request.op == Op::Reset && self.resets_outstanding >= RESETS_MAX => Some(request),
                None if request.op == Op::Reset => {
                    self.resets_outstanding += 1;
                    self.resets.push(request);
                    None
                }
                None => self.waiting.push(request).err(),
            };
            self.kept.extend(back);
        }
        drop(requests);
        std::mem::swap(batch, &mut self.kept);
        self.dispatch();
    }

    /// Takes a compare, with the request that follows it if it is fused to that.
    fn take_compare(&mut self, compare: Request, write: Option<Request>, limits: &Limits) {
        if self.compares.is_full() || self.finished.len() >= REFUSED_MAX {
            self.kept.push(compare);
            return self.kept.extend(write);
        }
        let range = |request: &Request| (request.op.is_write(), request.lba, request.blocks);
        let fused = compare.flags.contains(Flags::FUSED);
        let alone = fused
            && write.as_ref().is_none_or(|write| {
                write.op != Op::Write || range(write) != (true, compare.lba, compare.blocks)
            });
        let of_first = match self.verdict(&compare, limits) {
            None if fused && !crate::can_fuse() => Some(Status::INVALID_OPCODE.do_not_retry()),
            None if alone => Some(Status::FUSED_MISSING.do_not_retry()),
            verdict => verdict,
        };
        let of_second = write.as_ref().and_then(|write| self.verdict(write, limits));
        if of_first.is_none() && of_second.is_none() {
            return self.compares.push(compare, write);
        }
        self.finished.push(compare.complete(of_first.unwrap_or(Status::FUSED_FAILED)));
        let refused = |write: Request| write.complete(of_second.unwrap_or(Status::FUSED_FAILED));
        self.finished.extend(write.map(refused));
    }

    /// Why a request cannot be, or `None` if it can.
    fn verdict(&self, request: &Request, limits: &Limits) -> Option<Status> {
        let op = request.op;
        if limits.is_plain(request) || (op == Op::Reset && !self.is_removed()) {
            return None;
        }
        let length = u64::from(request.blocks);
        // The layer reads for a compare.
        let asked = if op == Op::Compare { Op::Read } else { op };
        let status = if self.is_removed() {
            Status::INVALID_NAMESPACE_OR_FORMAT
        } else if !self.writes && op.is_write() {
            Status::NAMESPACE_WRITE_PROTECTED
        } else if limits.plain_ops >> asked.index() & 1 == 0 {
            Status::INVALID_OPCODE
        } else if op.has_range() && length == 0 {
            Status::INVALID_FIELD
        } else if op.has_range() && (length > limits.blocks || request.lba > limits.blocks - length) {
            Status::LBA_OUT_OF_RANGE
        } else if op == Op::Compare && limits.is_comparable(request) {
            return None;
        } else {
            Status::DATA_SGL_LENGTH_INVALID
        };
        Some(status.do_not_retry())
    }

    /// Hands what waits to the module as far as there are slots.
    fn dispatch(&mut self) {
        if self.is_removed() {
            return self.fail_waiting();
        }
        if !self.resets.is_empty() {
            if self.module_resets {
                hand_over(&mut self.module, &mut self.resets, &mut self.in_flight);
            } else if self.in_flight == 0 {
                let done = self.resets.drain(..).map(|reset| reset.complete(Status::SUCCESS));
                self.finished.extend(done);
            } else {
                // New I/O waits until what was in flight before the reset has drained.
                return;
            }
        }
        if !self.compares.is_empty() {
            self.drive_compares();
        }
        let free = self.depth.saturating_sub(self.in_flight) as usize;
        let chosen = self.chosen.len() + self.held.len();
        self.waiting.serve(free.saturating_sub(chosen), &mut self.chosen);
        if free > 0 && !(self.chosen.is_empty() && self.held.is_empty()) {
            let plain = self.held.is_empty() && self.chosen.len() <= free;
            let writes = if plain { writes_of(&self.chosen) } else { 0 };
            let mut going = if plain && (writes == 0 || self.announce(writes)) {
                std::mem::take(&mut self.chosen)
            } else {
                self.sort_out(free)
            };
            self.hand_over(&mut going);
            // What the module has no room for comes first the next time.
            going.append(&mut self.chosen);
            self.chosen = going;
        }
    }

    /// Tells requests that may go, `most` of them, from writes that have to wait while ranges are locked.
    #[cold]
    fn sort_out(&mut self, most: usize) -> Vec<Request> {
        let table = self.open.device.locks.table();
        let waits = |request: &Request| {
            let end = request.lba.saturating_add(u64::from(request.blocks));
            request.op.is_write() && table.holds(&(request.lba..end))
        };
        let (mut going, mut held, mut chosen) = (Vec::new(), Vec::new(), Vec::new());
        // What was held is older.
        for request in self.held.drain(..).chain(self.chosen.drain(..)) {
            let list = match waits(&request) {
                true => &mut held,
                false if going.len() < most => &mut going,
                false => &mut chosen,
            };
            list.push(request);
        }
        (self.held, self.chosen) = (held, chosen);
        // Told of before the table is let go of, so that whoever wants a range from now on awaits them.
        self.writes_in_flight += writes_of(&going);
        self.told.tell(self.writes_in_flight);
        going
    }

    /// Goes on with compares.
    #[cold]
    fn drive_compares(&mut self) {
        self.compares.drive(&self.open.device.locks);
        let free = self.depth.saturating_sub(self.in_flight) as usize;
        let own = &mut self.compares.own;
        let mut batch: Vec<Request> = own.drain(..own.len().min(free)).collect();
        let count = batch.len();
        hand_over(&mut self.module, &mut batch, &mut self.in_flight);
        self.compares.at_module += (count - batch.len()) as u32;
        self.compares.own.append(&mut batch);
    }

    /// Takes what belongs to compares out of completions.
    #[cold]
    fn take_own(&mut self, sink: &mut Vec<Completion>, start: usize) {
        for completion in sink.split_off(start) {
            if completion.request().flags.contains(Flags::OWN) {
                self.compares.done(completion, &self.open.device.locks, &mut self.finished);
            } else {
                sink.push(completion);
            }
        }
    }

    /// Completes what the module of a removed device will not get any more.
    #[cold]
    fn fail_waiting(&mut self) {
        self.waiting.serve(usize::MAX, &mut self.chosen);
        let gone = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
        let failed = self.chosen.drain(..).chain(self.held.drain(..)).chain(self.resets.drain(..));
        self.finished.extend(failed.map(|request| request.complete(gone)));
        self.compares.fail(gone, &self.open.device.locks, &mut self.finished);
    }

    #[cold]
    fn poll_waiting(&mut self, sink: &mut Vec<Completion>) {
        if !self.nothing_waits() {
            self.dispatch();
        }
        sink.append(&mut self.finished);
    }

    /// Counts completions. Neighbours of one operation and one submit are counted as one.
    #[inline]
    fn account(&mut self, mut completions: &[Completion]) {
        let now_ticks = sys::clock::ticks();
        self.polled_at = now_ticks;
        self.counters.follow(self.open.device.stats.epoch.load(Ordering::Relaxed));
        while let Some(first) = completions.first() {
            let (op, issued) = (first.request().op, first.request().issued);
            let mut run = Run::default();
            let mut length = 0;
            for completion in completions {
                let request = completion.request();
                let alike = request.op == op && request.issued == issued;
                if !alike || !completion.status().is_success() {
                    break;
                }
                length += 1;
                run.blocks += u64::from(request.blocks);
            }
            run.ops = length as u64;
            if length == 0 {
                // That blocks differ is an answer.
                let status = completions[0].status();
                let differs =
                    status.same_code(Status::COMPARE_FAILURE) || status.same_code(Status::FUSED_FAILED);
                (run.errors, length) = (u64::from(!differs), 1);
            }
            if op == Op::Reset {
                self.resets_outstanding -= length;
            }
            // Counters of two processors may differ by a little; a latency is never negative.
            let latency_ticks = now_ticks.saturating_sub(issued);
            self.counters.record(op, &run, self.block_size, latency_ticks);
            completions = &completions[length..];
        }
    }
}

impl ring::Channel for Channel {
    type Request = Request;
    type Completion = Completion;

    #[inline]
    fn submit(&mut self, batch: &mut Vec<Request>) {
        if batch.is_empty() {
            return;
        }
        let limits = self.limits();
        let free = self.depth.saturating_sub(self.in_flight) as usize;
        let mut now_ticks = 0;
        let mut plain = batch.len() <= free && self.nothing_waits();
        let like = limits.like(&batch[0]);
        let mut alike = true;
        for request in batch.iter_mut() {
            // Neighbours are alike as a rule, and then only their places have to be looked at.
            if !like.covers(request) {
                alike = false;
                plain &= limits.is_plain(request);
            }
            if request.issued == 0 {
                if now_ticks == 0 {
                    now_ticks = sys::clock::ticks();
                }
                request.issued = now_ticks;
            }
        }
        if plain {
            let writes = match alike {
                true if like.op == Op::Read => 0,
                true => batch.len() as u32,
                false => writes_of(batch),
            };
            if writes == 0 || self.announce(writes) {
                self.hand_over(batch);
            }
        }
        if !batch.is_empty() {
            self.submit_each(batch);
        }
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let start = sink.len();
        // A module may have work of its own: a path that comes or goes.
        if self.in_flight > 0 || self.module.deadline() == Some(0) {
            self.module.poll(sink);
            let returned = (sink.len() - start) as u32;
            assert!(
                returned <= self.in_flight,
                "{} gave back {returned} of {} requests",
                self.open.device.name(),
                self.in_flight
            );
            self.in_flight -= returned;
            if self.compares.at_module > 0 {
                self.take_own(sink, start);
            }
            if self.writes_in_flight > 0 && returned > 0 {
                self.writes_in_flight -= writes_back(&sink[start..]);
                self.told.tell(self.writes_in_flight);
            }
        }
        if !self.finished.is_empty() || !self.nothing_waits() {
            self.poll_waiting(sink);
        }
        let count = sink.len() - start;
        if count > 0 {
            self.account(&sink[start..]);
        }
        count
    }

    #[inline]
    fn polled_at(&self) -> u64 {
        self.polled_at
    }

    fn deadline(&self) -> Option<u64> {
        let queued = !(self.waiting.is_empty() && self.chosen.is_empty() && self.resets.is_empty());
        if !self.finished.is_empty() || (self.in_flight == 0 && queued) {
            return Some(0);
        }
        let module = self.module.deadline().filter(|at| self.in_flight > 0 || *at == 0);
        if self.held.is_empty() && self.compares.is_empty() {
            return module;
        }
        let waits = !self.held.is_empty() || self.compares.waits() || self.in_flight == 0;
        let look = waits.then(|| sys::clock::now_ns() + LOOK_NS);
        [module, look].into_iter().flatten().min()
    }
}

/// Requests that are like one that carries data and can go straight to the module.
struct Like {
    op: Op,
    blocks: u32,
    bytes: usize,
    /// The last place for one.
    lba_max: u64,
}

impl Like {
    #[inline]
    fn covers(&self, request: &Request) -> bool {
        let bytes = request.buffer.as_ref().map_or(0, |buffer| buffer.len());
        request.op == self.op
            && request.blocks == self.blocks
            && bytes == self.bytes
            && request.lba <= self.lba_max
    }
}

impl Limits {
    #[inline]
    fn like(&self, first: &Request) -> Like {
        let (op, blocks) = (first.op, first.blocks);
        let bytes = first.buffer.as_ref().map_or(0, |buffer| buffer.len());
        if !op.has_data() || bytes == 0 || !self.is_plain(first) {
            // No request has so many bytes.
            return Like { op, blocks, bytes: usize::MAX, lba_max: 0 };
        }
        Like { op, blocks, bytes, lba_max: self.blocks - u64::from(blocks) }
    }

    /// Whether a request can go straight to the module.
    #[inline]
    fn is_plain(&self, request: &Request) -> bool {
        let op = request.op;
        let length = u64::from(request.blocks);
        // An end that is no number lies behind every device.
        let end = request.lba.saturating_add(length);
        if self.plain_ops >> op.index() & 1 == 0 {
            return false;
        }
        match &request.buffer {
            Some(buffer) if op.has_data() => {
                end <= self.blocks && buffer.len() as u64 == length * self.block_size && length > 0
            }
            _ => !op.has_range() || (!op.has_data() && end <= self.blocks && length > 0),
        }
    }

    /// Whether a compare that is inside of the device has the buffer that it needs. The layer reads into it, so
    /// that it cannot be somebody else's memory.
    fn is_comparable(&self, request: &Request) -> bool {
        let bytes = u64::from(request.blocks) * self.block_size;
        request.buffer.as_ref().is_some_and(|buffer| buffer.len() as u64 == bytes && !buffer.is_lent())
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.compares.release(&self.open.device.locks);
        self.open.device.locks.leave(&self.told);
        self.open.device.stats.leave(&self.counters);
    }
}

fn writes_of(batch: &[Request]) -> u32 {
    batch.iter().filter(|request| request.op.is_write()).count() as u32
}

fn writes_back(completions: &[Completion]) -> u32 {
    completions.iter().filter(|completion| completion.request().op.is_write()).count() as u32
}

#[inline]
fn hand_over(module: &mut BoxedChannel, batch: &mut Vec<Request>, in_flight: &mut u32) {
    let before = batch.len();
    module.submit(batch);
    *in_flight += (before - batch.len()) as u32;
}

#[cfg(test)]
mod tests;
