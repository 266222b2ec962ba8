//! The I/O path of a block device: validation, queue depth, fair queueing between flows, and statistics.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use block_io::{Op, Status};

use crate::compare::CompareQueue;
use crate::device::{
    IoLimits, LIMITED, OpenHandle, READS_RESERVED, REMOVED, SAMPLED, TRACED, WRITES_RESERVED,
};
use crate::parts::PartQueue;
use crate::range_locks::InflightWrites;
use crate::scheduler::Scheduler;
use crate::stats::{ChannelCounters, CompletionRun};
use crate::trace::{TracePoint, TraceRing};
use crate::{BdevError, BlockDevice, BoxedChannel, Completion, Request};

mod dispatch;
mod validate;

pub(crate) use dispatch::RESETS_MAX;
use validate::RequestLimits;

/// Interval at which a range that another core has locked is checked again; its release sends no event.
const RECHECK_NS: u64 = 20_000;

const RESERVED: u8 = READS_RESERVED | WRITES_RESERVED;
/// What a reservation denies with reads: bits as in `allowed_ops`. The layer divides the others into these
/// and writes.
const OPS_THAT_READ: u16 = bits_of(&[Op::Read, Op::SeekData, Op::SeekHole]);
/// What it denies with writes (NVMe Base 2.0, section 8.19, has Flush among them, as has SBC-4 SYNCHRONIZE
/// CACHE).
const OPS_THAT_WRITE: u16 =
    bits_of(&[Op::Write, Op::Unmap, Op::WriteZeroes, Op::WriteUncorrectable, Op::Copy, Op::Flush]);

const fn bits_of(ops: &[Op]) -> u16 {
    let (mut bits, mut index) = (0, 0);
    while index < ops.len() {
        bits |= 1 << ops[index].index();
        index += 1;
    }
    bits
}

/// An I/O channel to a block device, on one core (SPDK's `spdk_io_channel` of a bdev).
///
/// It owns the module's channel, the queues in front of it, and this channel's counters. The caller submits a
/// batch and polls for completions. An invalid request completes with an error and never reaches the module;
/// compare its status with [`Status::same_code`], as Do Not Retry is set.
///
/// A valid request goes to the module at once while fewer than [`Bdev::depth`](crate::Bdev::depth) are in
/// flight. Beyond that it is queued by the channel's [`Scheduler`]: by default in a bounded FIFO of its flow.
/// The [tenants](crate::Tenants) take turns by deficit round robin, and the flows of a tenant within its
/// turns. Requests of a flow whose FIFO is full stay in the caller's batch, in order; other flows are not
/// affected.
///
/// A request that the module cannot take as it is ([`Bdev::io_limits`](crate::Bdev::io_limits)) is divided
/// here, with its parts in flight together, and so is a copy; an abort removes what has not reached the
/// module.
///
/// The fast path is a batch of valid requests that fits the queue depth while nothing is queued: it costs a
/// validation of each request, one clock read a batch, and a store, a load and a branch for writes. A write
/// that overlaps a locked range is blocked here until the range is unlocked, so that the write of a fused
/// compare-and-write is atomic with its compare on all cores.
pub struct BdevChannel {
    module: BoxedChannel,
    open: Arc<OpenHandle>,
    counters: Arc<ChannelCounters>,
    trace: Arc<TraceRing>,
    /// Bit [`Op::index`] is set where the module supports the operation and the descriptor allows it; never
    /// for operations that the layer executes.
    allowed_ops: u16,
    /// Bits of the device's state with which not all of these are allowed now.
    restricted: u8,
    io_limits: IoLimits,
    module_resets: bool,
    takes_registered: bool,
    writes: bool,
    block_size: u32,
    depth: u32,
    in_flight: u32,
    /// Of these, requests of the layer itself: of compares and divided requests.
    internal_in_flight: u32,
    /// The caller's writes that the module has, and where that count is published to other cores.
    writes_in_flight: u32,
    inflight_writes: Arc<InflightWrites>,
    /// Writes that overlap a locked range; at most `depth`.
    blocked: Vec<Request>,
    compares: CompareQueue,
    parts: PartQueue,
    /// Time of the last poll that returned completions, in ticks.
    last_poll_ticks: u64,
    scheduler: Box<dyn Scheduler>,
    /// Requests that it has queued.
    queued: usize,
    /// Every request goes through it, and it learns of every completion.
    decides_all: bool,
    /// Dequeued, and not accepted by the module yet.
    selected: Vec<Request>,
    resets: Vec<Request>,
    /// Resets that were accepted and whose completions are not polled yet.
    resets_outstanding: usize,
    /// Completions that the layer made itself and that are not polled yet.
    finished: Vec<Completion>,
    /// Nothing is queued and no completion is kept: the state of the fast path, which tests this instead of
    /// each queue.
    is_idle: bool,
    /// Empty between calls; requests that go back into the caller's batch.
    returned: Vec<Request>,
    /// The clock of its core.
    clock: os::clock::Clock,
    /// A channel is used on the core that opened it.
    _not_send: std::marker::PhantomData<Rc<()>>,
}

impl BdevChannel {
    pub(crate) fn new(open: Arc<OpenHandle>, core: &reactor::Core) -> Result<BdevChannel, BdevError> {
        let device = &open.device;
        let bdev = device.bdev();
        let writes = open.writes && !bdev.read_only();
        // A module that claims one of these must not get it past the layer on the fast path.
        let allowed = |op: &Op| {
            let by_layer = matches!(op, Op::Reset | Op::Compare | Op::Copy | Op::Abort);
            !by_layer && bdev.supports(*op) && (writes || !op.is_write())
        };
        let allowed_ops = Op::ALL.iter().filter(|op| allowed(op)).fold(0, |bits, op| bits | 1 << op.index());
        let geometry = device.geometry();
        let module = bdev.open(core)?;
        let trace = device.trace.ring(core.index());
        let (scheduler, decides_all) = device.scheduler(core.index());
        trace.record_channel(TracePoint::ChannelCreate, device.trace_id());
        Ok(BdevChannel {
            module,
            counters: device.stats.add_channel(core.index()),
            trace,
            allowed_ops,
            restricted: if open.checks_reservations { REMOVED } else { REMOVED | RESERVED },
            io_limits: bdev.io_limits(),
            writes,
            module_resets: bdev.supports(Op::Reset),
            takes_registered: bdev.registered_page_alignment().is_some(),
            block_size: geometry.block_size,
            depth: bdev.depth(),
            in_flight: 0,
            internal_in_flight: 0,
            writes_in_flight: 0,
            inflight_writes: device.range_locks.register_channel(),
            blocked: Vec::new(),
            compares: CompareQueue::new(core.pool().clone(), geometry),
            parts: PartQueue::new(bdev.io_limits(), geometry, core.pool().clone()),
            last_poll_ticks: 0,
            scheduler,
            queued: 0,
            decides_all,
            selected: Vec::new(),
            resets: Vec::new(),
            resets_outstanding: 0,
            finished: Vec::new(),
            is_idle: !decides_all,
            returned: Vec::new(),
            clock: core.clock().clone(),
            open,
            _not_send: std::marker::PhantomData,
        })
    }

    /// The block device that this is a channel of.
    pub fn device(&self) -> &Arc<BlockDevice> {
        &self.open.device
    }

    /// Size of a logical block in bytes.
    #[inline]
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Current number of blocks; a resize changes it.
    #[inline]
    pub fn blocks(&self) -> u64 {
        self.open.device.blocks.load(Ordering::Relaxed)
    }

    /// Whether the device was unregistered; every new I/O then fails with `INVALID_NAMESPACE_OR_FORMAT`.
    #[inline]
    pub fn is_removed(&self) -> bool {
        self.open.device.is_removed()
    }

    /// Requests that were accepted and whose completions are not polled yet, queued ones included.
    pub fn outstanding(&self) -> usize {
        // Internal requests are counted with the request that they belong to.
        (self.in_flight - self.internal_in_flight) as usize
            + self.queued
            + self.selected.len()
            + self.resets.len()
            + self.finished.len()
            + self.blocked.len()
            + self.compares.len()
            + self.parts.len()
    }

    #[inline]
    fn limits(&self) -> RequestLimits {
        let state = self.open.device.state.load(Ordering::Relaxed);
        let is_restricted = state & self.restricted != 0;
        let allowed_ops = if is_restricted { self.restricted_ops(state) } else { self.allowed_ops };
        let block_size = u64::from(self.block_size);
        let is_watched = state & (LIMITED | SAMPLED | TRACED) != 0;
        let (takes_registered, io) = (self.takes_registered, self.io_limits);
        RequestLimits { blocks: self.blocks(), block_size, allowed_ops, is_watched, takes_registered, io }
    }

    /// What is allowed of a device that was removed, or is reserved by others.
    #[cold]
    fn restricted_ops(&self, state: u8) -> u16 {
        let mut denied = 0;
        for (bit, ops) in
            [(REMOVED, u16::MAX), (READS_RESERVED, OPS_THAT_READ), (WRITES_RESERVED, OPS_THAT_WRITE)]
        {
            denied |= if state & bit != 0 { ops } else { 0 };
        }
        self.allowed_ops & !denied
    }

    /// Called after whatever may queue or dequeue a request.
    fn update_idle(&mut self) {
        self.is_idle = self.finished.is_empty() && self.nothing_queued() && !self.decides_all;
    }

    fn nothing_queued(&self) -> bool {
        self.queued == 0
            && self.selected.is_empty()
            && self.resets.is_empty()
            && self.blocked.is_empty()
            && self.compares.is_empty()
            && self.parts.is_empty()
    }

    /// Publishes to other cores that writes are about to be submitted. `false` if a range is locked: then
    /// they must not be submitted yet.
    #[inline]
    fn publish_writes(&mut self, writes: u32) -> bool {
        self.writes_in_flight += writes;
        self.inflight_writes.publish(self.writes_in_flight);
        if !self.open.device.range_locks.has_locks() {
            return true;
        }
        self.retract_writes(writes);
        false
    }

    #[cold]
    fn retract_writes(&mut self, writes: u32) {
        self.writes_in_flight -= writes;
        self.inflight_writes.publish(self.writes_in_flight);
    }

    /// Before a batch is submitted to a device with a rate limit, a sampled queue depth or a trace. Returns
    /// whether the batch may take the fast path.
    #[inline(never)]
    fn watch(&mut self, batch: &[Request], same_shape: bool, fast_path: bool) -> bool {
        let device = &self.open.device;
        let state = device.state.load(Ordering::Relaxed);
        if state & SAMPLED != 0 {
            self.counters.set_in_flight(self.outstanding() + batch.len());
        }
        if state & TRACED != 0 {
            self.trace.record_requests(TracePoint::IoStart, device.trace_id(), batch);
        }
        let is_limited = state & LIMITED != 0;
        fast_path && (!is_limited || self.scheduler.admits(batch, same_shape, &self.clock))
    }

    /// Moves requests that the module cannot take as they are from the batch to the queue that divides them.
    #[cold]
    fn divide(&mut self, batch: &mut Vec<Request>) {
        let parts = &mut self.parts;
        let divided: Vec<Request> = batch.extract_if(.., |request| parts.divides(request)).collect();
        divided.into_iter().for_each(|request| parts.push(request));
    }

    /// Submits requests whose writes are already published. Those that stay in the batch have not started.
    #[inline]
    fn submit_to_module(&mut self, batch: &mut Vec<Request>) {
        submit_to_module(&mut self.module, batch, &mut self.in_flight);
        if !batch.is_empty() {
            self.retract_writes(count_writes(batch));
        }
    }

    /// Counts completions. Successive ones of the same operation and submit time are counted together.
    #[inline]
    fn account(&mut self, mut completions: &[Completion]) {
        let now_ticks = os::clock::ticks();
        self.last_poll_ticks = now_ticks;
        let epoch = self.open.device.stats.epoch.load(Ordering::Relaxed);
        if self.counters.sync_epoch(epoch, || self.outstanding()) {
            self.trace.record_completions(self.open.device.trace_id(), now_ticks, completions);
        }
        if let [only] = completions
            && only.status().is_success()
            && only.request().op != Op::Reset
        {
            // As at depth 1, where looking for a run costs more than it saves.
            let request = only.request();
            let run = CompletionRun { ops: 1, blocks: u64::from(request.blocks), errors: 0 };
            let latency_ticks = now_ticks.saturating_sub(request.issued_ticks);
            self.counters.record(request.op, &run, self.block_size, latency_ticks);
            return;
        }
        while let Some(first) = completions.first() {
            let (op, issued) = (first.request().op, first.request().issued_ticks);
            let mut run = CompletionRun::default();
            let mut length = 0;
            for completion in completions {
                let request = completion.request();
                let same_run = request.op == op && request.issued_ticks == issued;
                if !same_run || !completion.status().is_success() {
                    break;
                }
                length += 1;
                run.blocks += u64::from(request.blocks);
            }
            run.ops = length as u64;
            if length == 0 {
                // A compare that finds a difference is not an I/O error.
                let status = completions[0].status();
                let differs =
                    status.same_code(Status::COMPARE_FAILURE) || status.same_code(Status::FUSED_FAILED);
                (run.errors, length) = (u64::from(!differs), 1);
            }
            if op == Op::Reset {
                self.resets_outstanding -= length;
            }
            // The tick counters of two processors may differ slightly; a latency is never negative.
            let latency_ticks = now_ticks.saturating_sub(issued);
            self.counters.record(op, &run, self.block_size, latency_ticks);
            completions = &completions[length..];
        }
    }
}

impl block_io::Channel for BdevChannel {
    type Request = Request;
    type Completion = Completion;

    #[inline]
    fn submit(&mut self, batch: &mut Vec<Request>) {
        if batch.is_empty() {
            return;
        }
        let name = self.open.device.name();
        // A static probe point: one NOP until a tracer attaches. Requests, and the device's name and its
        // length.
        probe::probe!(ringbolt, bdev_submit, batch.len(), name.as_ptr(), name.len());
        let limits = self.limits();
        let free = self.depth.saturating_sub(self.in_flight) as usize;
        let mut fast_path = batch.len() <= free && self.is_idle;
        let mut now_ticks = 0;
        if batch[0].issued_ticks == 0 {
            batch.iter_mut().for_each(|request| stamp(request, &mut now_ticks));
        }
        let (first, mut others) = batch.split_at_mut(1);
        let first = &first[0];
        let op = first.op;
        let first_is_valid = limits.is_fast_path(first);
        fast_path &= first_is_valid;
        let mut same_shape = true;
        if !others.is_empty() {
            // Requests of a batch usually have the same shape; then little of each is checked.
            let mut shape = limits.shape(first, first_is_valid);
            loop {
                let matching = shape.count_matching(others);
                let Some((request, rest)) = others[matching..].split_first_mut() else { break };
                others = rest;
                same_shape = false;
                fast_path &= limits.is_fast_path(request);
                stamp(request, &mut now_ticks);
            }
            let aligned = shape.addresses & (limits.io.alignment as usize - 1) == 0;
            fast_path &= aligned && !(shape.read_only && op == Op::Read);
        }
        if limits.is_watched {
            fast_path = self.watch(batch, same_shape, fast_path);
        }
        if fast_path {
            let writes = match same_shape {
                true if op == Op::Read => 0,
                _ => count_writes(batch),
            };
            if writes == 0 || self.publish_writes(writes) {
                self.submit_to_module(batch);
            }
        }
        if !batch.is_empty() {
            self.submit_each(batch);
        }
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let start = sink.len();
        // A module may have work without I/O: a path that connects or is lost.
        if self.in_flight > 0 || self.module.deadline() == Some(0) {
            self.module.poll(sink);
            let returned = (sink.len() - start) as u32;
            assert!(
                returned <= self.in_flight,
                "{} completed {returned} of {} requests",
                self.open.device.name(),
                self.in_flight
            );
            self.in_flight -= returned;
            if self.internal_in_flight > 0 {
                self.take_internal(sink, start);
                self.update_idle();
            }
            if self.writes_in_flight > 0 && returned > 0 {
                self.writes_in_flight -= count_completed_writes(&sink[start..]);
                self.inflight_writes.publish(self.writes_in_flight);
            }
        }
        if !self.is_idle {
            self.poll_queued(sink, start);
            self.update_idle();
        }
        let count = sink.len() - start;
        if count > 0 {
            let name = self.open.device.name();
            probe::probe!(ringbolt, bdev_complete, count, name.as_ptr(), name.len());
            self.account(&sink[start..]);
        }
        count
    }

    #[inline]
    fn last_poll_ticks(&self) -> u64 {
        self.last_poll_ticks
    }

    fn deadline(&self) -> Option<u64> {
        let scheduled = if self.queued > 0 { self.scheduler.deadline(&self.clock) } else { None };
        let nothing_to_submit = scheduled != Some(0)
            && self.selected.is_empty()
            && self.resets.is_empty()
            && self.parts.internal.is_empty();
        let has_queued = !nothing_to_submit;
        if !self.finished.is_empty() || (self.in_flight == 0 && has_queued) {
            return Some(0);
        }
        let module = self.module.deadline().filter(|at| self.in_flight > 0 || *at == 0);
        // What could go at once awaits the module's space, which comes with its completions.
        let module = [module, scheduled.filter(|at| *at > 0)].into_iter().flatten().min();
        if self.blocked.is_empty() && self.compares.is_empty() && self.parts.is_empty() {
            return module;
        }
        // What another core unlocks or frees sends no event.
        let lock_pending = !self.blocked.is_empty()
            || self.compares.awaits_lock()
            || self.parts.awaits_buffer()
            || self.in_flight == 0;
        let recheck = lock_pending.then(|| self.clock.now_ns() + RECHECK_NS);
        [module, recheck].into_iter().flatten().min()
    }
}

impl Drop for BdevChannel {
    fn drop(&mut self) {
        self.compares.release_locks(&self.open.device.range_locks);
        self.open.device.range_locks.unregister_channel(&self.inflight_writes);
        self.open.device.stats.remove_channel(&self.counters);
        self.trace.record_channel(TracePoint::ChannelDestroy, self.open.device.trace_id());
    }
}

/// Sets the time of issue where the caller did not, with one clock read a batch.
#[inline(always)]
fn stamp(request: &mut Request, now_ticks: &mut u64) {
    if request.issued_ticks == 0 {
        if *now_ticks == 0 {
            *now_ticks = os::clock::ticks();
        }
        request.issued_ticks = *now_ticks;
    }
}

fn count_writes(batch: &[Request]) -> u32 {
    batch.iter().filter(|request| request.op.is_write()).count() as u32
}

fn count_completed_writes(completions: &[Completion]) -> u32 {
    completions.iter().filter(|completion| completion.request().op.is_write()).count() as u32
}

#[inline]
fn submit_to_module(module: &mut BoxedChannel, batch: &mut Vec<Request>, in_flight: &mut u32) {
    let before = batch.len();
    module.submit(batch);
    *in_flight += (before - batch.len()) as u32;
}

#[cfg(test)]
mod tests;
