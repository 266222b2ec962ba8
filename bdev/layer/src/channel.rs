//! What every I/O goes through: checked, limited, shared out, counted.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ring::{Op, Status};

use crate::device::Open;
use crate::fair::Waiting;
use crate::stats::{Counters, Run};
use crate::{BdevError, BoxedChannel, Completion, Device, Request};

/// Resets that are under way at a time on one channel; further ones stay with the caller.
pub(crate) const RESETS_MAX: usize = 16;
/// Refused requests whose completions wait to be polled; further ones stay with the caller.
const REFUSED_MAX: usize = 1024;

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
        self.in_flight as usize
            + self.waiting.len()
            + self.chosen.len()
            + self.resets.len()
            + self.finished.len()
    }

    #[inline]
    fn limits(&self) -> Limits {
        let plain_ops = if self.is_removed() { 0 } else { self.plain_ops };
        Limits { blocks: self.blocks(), block_size: u64::from(self.block_size), plain_ops }
    }

    #[inline]
    fn nothing_waits(&self) -> bool {
        self.waiting.is_empty() && self.chosen.is_empty() && self.resets.is_empty()
    }

    /// Takes the batch one by one: refuses what cannot be, queues what can.
    #[cold]
    fn submit_each(&mut self, batch: &mut Vec<Request>) {
        let limits = self.limits();
        for request in batch.drain(..) {
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
        std::mem::swap(batch, &mut self.kept);
        self.dispatch();
    }

    /// Why a request cannot be, or `None` if it can.
    fn verdict(&self, request: &Request, limits: &Limits) -> Option<Status> {
        let op = request.op;
        if limits.is_plain(request) || (op == Op::Reset && !self.is_removed()) {
            return None;
        }
        let length = u64::from(request.blocks);
        let status = if self.is_removed() {
            Status::INVALID_NAMESPACE_OR_FORMAT
        } else if !self.writes && op.is_write() {
            Status::NAMESPACE_WRITE_PROTECTED
        } else if limits.plain_ops >> op.index() & 1 == 0 {
            Status::INVALID_OPCODE
        } else if op.has_range() && length == 0 {
            Status::INVALID_FIELD
        } else if op.has_range() && (length > limits.blocks || request.lba > limits.blocks - length) {
            Status::LBA_OUT_OF_RANGE
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
        let free = self.depth.saturating_sub(self.in_flight) as usize;
        self.waiting.serve(free.saturating_sub(self.chosen.len()), &mut self.chosen);
        if free > 0 && !self.chosen.is_empty() {
            hand_over(&mut self.module, &mut self.chosen, &mut self.in_flight);
        }
    }

    /// Completes what the module of a removed device will not get any more.
    #[cold]
    fn fail_waiting(&mut self) {
        self.waiting.serve(usize::MAX, &mut self.chosen);
        let gone = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
        let failed = self.chosen.drain(..).chain(self.resets.drain(..));
        self.finished.extend(failed.map(|request| request.complete(gone)));
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
                (run.errors, length) = (1, 1);
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
        for request in batch.iter_mut() {
            // Neighbours are alike as a rule, and then only their places have to be looked at.
            if !like.covers(request) && !limits.is_plain(request) {
                plain = false;
            }
            if request.issued == 0 {
                if now_ticks == 0 {
                    now_ticks = sys::clock::ticks();
                }
                request.issued = now_ticks;
            }
        }
        if plain {
            hand_over(&mut self.module, batch, &mut self.in_flight);
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
        if !self.finished.is_empty() || (self.in_flight == 0 && !self.nothing_waits()) {
            return Some(0);
        }
        self.module.deadline().filter(|at| self.in_flight > 0 || *at == 0)
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
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.open.device.stats.leave(&self.counters);
    }
}

#[inline]
fn hand_over(module: &mut BoxedChannel, batch: &mut Vec<Request>, in_flight: &mut u32) {
    let before = batch.len();
    module.submit(batch);
    *in_flight += (before - batch.len()) as u32;
}

#[cfg(test)]
mod tests;
