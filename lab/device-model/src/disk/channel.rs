//! An I/O channel of a model bdev: requests are scheduled at submission and complete when they are due.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bdev::{BdevGeometry, Completion, DeviceMemory, Request};
use block_io::{Op, Payload, RequestFlags, Status};
use dma::SharedRegion;
use os::clock;

use super::fifo::CompletionFifo;
use super::shares::ChannelShare;
use super::timer_wheel::TimerWheel;
use super::{DEPTH, FATAL, ModelDiskShared, PRESENT, SURPRISE_REMOVED};
use crate::faults::{FaultOutcome, ModelFaultRules};
use crate::rng::ModelRng;
use crate::timing::{IoCommand, TimingModel};

/// Interval at which a channel updates its share of the device.
const SHARE_UPDATE_NS: u64 = 250_000;
/// Interval at which a channel with only hung requests checks whether its device was removed.
const HUNG_POLL_NS: u64 = 10_000_000;

/// A channel of a model bdev.
///
/// It owns its requests in flight and the [`TimingModel`] that schedules them. `submit` computes the
/// completion time of each request and stores it; `poll` returns those that are due. Requests that are
/// due in order of arrival, the common case, go to a FIFO, all others to a timer wheel.
pub(super) struct ModelChannel {
    shared: Arc<ModelDiskShared>,
    timing: TimingModel,
    /// Requests that are due in order of arrival: few for most devices, all for one without dies.
    fifo: CompletionFifo,
    /// Due times of all other requests, by slot.
    timer_wheel: TimerWheel,
    /// Requests in the timer wheel, with their status.
    slots: Box<[Option<Completion>]>,
    free: Vec<u16>,
    in_flight: usize,
    /// Scratch, empty between calls: due times of the requests of a batch.
    due_times: Vec<u64>,
    /// Hung requests, which complete only when they are aborted.
    hung: Vec<Request>,
    /// This channel has seen the controller's fatal status.
    is_frozen: bool,
    ready: Vec<Completion>,
    rules: ModelFaultRules,
    rules_epoch: u64,
    rng: ModelRng,
    region: Option<Arc<DeviceMemory>>,
    /// Scratch, empty between calls: requests whose data is copied.
    executing: Vec<Completion>,
    block_size: u32,
    block_shift: Option<u32>,
    share: ChannelShare,
    share_update_at: u64,
    /// Time of the last poll, in nanoseconds of the time stamp counter.
    now: u64,
    /// The time stamp that was converted last, in ticks and nanoseconds.
    ticks: (u64, u64),
    /// Offset from the time stamp counter to the reactor's clock, in nanoseconds.
    offset_ns: i64,
}

impl ModelChannel {
    pub(super) fn new(
        shared: &Arc<ModelDiskShared>,
        region: Option<Arc<DeviceMemory>>,
        geometry: BdevGeometry,
        seed: u64,
    ) -> ModelChannel {
        // Read in this order, so that the error of the offset makes deadlines early, never late.
        let reactor_now = clock::now_ns();
        let now = clock::ticks_to_ns(clock::ticks());
        // A tick of 1/64 of the shortest latency bounds the delay of the timer wheel.
        let span = (shared.timing.min_latency_ns() / 64).clamp(64, 4096);
        let block_size = geometry.block_size;
        ModelChannel {
            timing: TimingModel::new(shared.timing.clone(), shared.flash.clone(), seed),
            fifo: CompletionFifo::new(),
            timer_wheel: TimerWheel::new(DEPTH as usize, span.ilog2(), now),
            slots: (0..DEPTH).map(|_| None).collect(),
            free: (0..DEPTH as u16).rev().collect(),
            in_flight: 0,
            due_times: Vec::new(),
            hung: Vec::new(),
            is_frozen: false,
            ready: Vec::new(),
            rules: ModelFaultRules::default(),
            rules_epoch: 0,
            rng: ModelRng::new(!seed),
            region,
            executing: Vec::new(),
            block_size,
            block_shift: block_size.is_power_of_two().then(|| block_size.trailing_zeros()),
            share: shared.shares.register(),
            share_update_at: 0,
            now,
            ticks: (0, 0),
            offset_ns: reactor_now as i64 - now as i64,
            shared: shared.clone(),
        }
    }

    /// Arrival time of a request. The bdev layer stamps a whole batch at once, so the conversion is cached.
    #[inline]
    fn arrival_ns(&mut self, ticks: u64) -> u64 {
        if ticks == 0 {
            return self.now;
        }
        if ticks != self.ticks.0 {
            self.ticks = (ticks, clock::ticks_to_ns(ticks));
        }
        self.ticks.1.max(self.now)
    }

    #[inline]
    fn bytes(&self, blocks: u64) -> u64 {
        match self.block_shift {
            Some(shift) => blocks << shift,
            None => blocks * u64::from(self.block_size),
        }
    }

    /// Schedules a request and returns its due time.
    #[inline(always)]
    fn schedule(&mut self, request: &Request) -> u64 {
        let now = self.arrival_ns(request.issued_ticks);
        let (offset, bytes) = if request.op.has_range() {
            (self.bytes(request.lba), self.bytes(u64::from(request.blocks)))
        } else {
            (0, 0)
        };
        // The length of a deallocation may exceed 32 bits; its latency does not depend on it.
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let io = IoCommand { op: request.op, offset, bytes, fua: request.flags.contains(RequestFlags::FUA) };
        self.timing.schedule(now, &io)
    }

    /// Schedules the reads of equal size at the front of the batch, for a device with a constant read
    /// time.
    #[inline]
    fn schedule_identical_reads(&mut self, batch: &[Request], due_times: &mut Vec<u64>) {
        let Some(first) = batch.first() else { return };
        let (blocks, issued) = (first.blocks, first.issued_ticks);
        let is_identical = |request: &&Request| {
            request.op == Op::Read && request.blocks == blocks && request.issued_ticks == issued
        };
        let count = batch.iter().take_while(is_identical).count();
        let (now, bytes) = (self.arrival_ns(issued), self.bytes(u64::from(blocks)));
        self.timing.schedule_identical_reads(now, u32::try_from(bytes).unwrap_or(u32::MAX), count, due_times);
    }

    /// Fast path: submits requests from the front of the batch, up to the first reset or Write
    /// Uncorrectable. Requires that there are no fault rules and no bad blocks.
    #[inline]
    fn submit_fast(&mut self, batch: &mut Vec<Request>) {
        let mut due_times = std::mem::take(&mut self.due_times);
        if self.timing.has_constant_read_time() {
            self.schedule_identical_reads(batch, &mut due_times);
        }
        let mut in_order = due_times.first().is_none_or(|first| *first >= self.fifo.last_due());
        let mut last = due_times.last().copied().unwrap_or(self.fifo.last_due());
        for request in &batch[due_times.len()..] {
            if !is_fast(request.op) {
                break;
            }
            let due = self.schedule(request);
            in_order &= due >= last;
            last = due;
            due_times.push(due);
        }
        let taken = batch.drain(..due_times.len());
        if in_order {
            self.in_flight += taken.len();
            self.fifo.extend(taken, &due_times);
        } else {
            taken.zip(&due_times).for_each(|(request, due)| self.enqueue(*due, request, Status::SUCCESS));
        }
        due_times.clear();
        self.due_times = due_times;
    }

    /// Slow path: evaluates the fault rules and bad blocks for each request.
    #[cold]
    fn submit_slow(&mut self, batch: &mut Vec<Request>) {
        for request in batch.drain(..) {
            if request.op == Op::Reset {
                let _ = self.shared.presence.compare_exchange(
                    FATAL,
                    PRESENT,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
                self.is_frozen = false;
                self.abort(Status::ABORT_REQUESTED);
                self.ready.push(request.complete(Status::SUCCESS));
                continue;
            }
            if self.is_frozen {
                self.hung.push(request);
                continue;
            }
            let due = self.schedule(&request);
            match self.rules.evaluate(request.op, request.lba, request.blocks, &mut self.rng) {
                FaultOutcome::Delay(ns) => {
                    let status = self.apply_bad_blocks(&request);
                    self.enqueue(due + ns, request, status);
                }
                FaultOutcome::Fail(failure) => self.enqueue(due, request, failure),
                FaultOutcome::Hang => self.hung.push(request),
                FaultOutcome::DropCompletion => self.drop_completion(request),
                FaultOutcome::Fatal => {
                    self.hung.push(request);
                    self.fail_device(FATAL);
                }
                FaultOutcome::SurpriseRemoval => {
                    self.hung.push(request);
                    self.fail_device(SURPRISE_REMOVED);
                }
            }
        }
    }

    /// Executes a request and drops its completion.
    fn drop_completion(&mut self, mut request: Request) {
        if let Some(region) = &self.region {
            Self::execute(region, &mut request, self.block_size);
        }
        let _ = self.apply_bad_blocks(&request);
        self.hung.push(request);
    }

    /// Marks the device as failed, for all channels.
    fn fail_device(&mut self, how: u8) {
        let _ = self.shared.presence.compare_exchange(PRESENT, how, Ordering::AcqRel, Ordering::Relaxed);
        self.handle_presence_change();
    }

    /// Applies a request to the list of uncorrectable blocks and returns its status.
    fn apply_bad_blocks(&self, request: &Request) -> Status {
        let (bad, lba, blocks) = (&self.shared.bad_blocks, request.lba, request.blocks);
        match request.op {
            Op::Read if bad.overlaps(lba, blocks) => Status::UNRECOVERED_READ_ERROR,
            Op::Write | Op::Unmap | Op::WriteZeroes if bad.clear(lba, blocks).is_err() => Status::WRITE_FAULT,
            Op::WriteUncorrectable if bad.set(lba, blocks).is_err() => Status::WRITE_FAULT,
            _ => Status::SUCCESS,
        }
    }

    /// Stores a request until it is due.
    #[inline]
    fn enqueue(&mut self, due: u64, request: Request, status: Status) {
        self.in_flight += 1;
        if due >= self.fifo.last_due() {
            return self.fifo.push(due, request.complete(status));
        }
        let Some(slot) = self.free.pop() else {
            unreachable!("the bdev layer admits at most {DEPTH} requests")
        };
        self.slots[usize::from(slot)] = Some(request.complete(status));
        self.timer_wheel.insert(slot, due);
    }

    /// Aborts all requests in flight with one status.
    #[cold]
    fn abort(&mut self, status: Status) {
        let ModelChannel { fifo, timer_wheel, slots, free, ready, hung, .. } = self;
        ready.extend(fifo.drain().map(|done| done.into_request().complete(status)));
        self.in_flight = 0;
        timer_wheel.drain(|slot| {
            if let Some(done) = slots[usize::from(slot)].take() {
                ready.push(done.into_request().complete(status));
            }
            free.push(slot);
        });
        ready.extend(hung.drain(..).map(|request| request.complete(status)));
    }

    #[cold]
    fn reload_rules(&mut self, epoch: u64) {
        self.rules_epoch = epoch;
        self.rules = sync::lock(&self.shared.rules).clone();
    }

    #[cold]
    fn update_share(&mut self) {
        self.share_update_at = self.now + SHARE_UPDATE_NS;
        let share = self.share.update(&self.shared.shares, self.in_flight);
        self.timing.set_share(share);
    }

    /// Fatal status: all requests in flight hang.
    fn freeze(&mut self) {
        self.is_frozen = true;
        let ModelChannel { fifo, timer_wheel, slots, free, hung, .. } = self;
        hung.extend(fifo.drain().map(Completion::into_request));
        timer_wheel.drain(|slot| {
            hung.extend(slots[usize::from(slot)].take().map(Completion::into_request));
            free.push(slot);
        });
        self.in_flight = 0;
    }

    /// Executes the successful completions of `sink` from index `first` on the stored data.
    fn execute_all(&mut self, sink: &mut Vec<Completion>, first: usize) {
        let Some(region) = &self.region else { return };
        self.executing.extend(sink.drain(first..));
        sink.extend(self.executing.drain(..).map(|done| {
            let status = done.status();
            let mut request = done.into_request();
            if status.is_success() {
                Self::execute(region, &mut request, self.block_size);
            }
            request.complete(status)
        }));
    }

    /// Executes a request on the stored data.
    fn execute(region: &SharedRegion, request: &mut Request, block_size: u32) {
        let offset = request.lba.wrapping_mul(u64::from(block_size));
        match (request.op, &mut request.payload) {
            (Op::Read, Payload::Data(data)) => {
                let mut offset = offset;
                for slice in data.slices_mut() {
                    region.read_into(offset, slice);
                    offset += slice.len() as u64;
                }
            }
            (Op::Write, Payload::Data(data)) => {
                let mut offset = offset;
                for slice in data.slices() {
                    region.write_from(offset, slice);
                    offset += slice.len() as u64;
                }
            }
            (Op::Unmap | Op::WriteZeroes, _) => {
                region.zero(offset, u64::from(request.blocks) * u64::from(block_size));
            }
            _ => {}
        }
    }
}

/// Whether an operation is eligible for the fast path.
#[inline]
fn is_fast(op: Op) -> bool {
    !matches!(op, Op::Reset | Op::WriteUncorrectable)
}

impl block_io::Channel for ModelChannel {
    type Request = Request;
    type Completion = Completion;

    #[inline]
    fn submit(&mut self, batch: &mut Vec<Request>) {
        let epoch = self.shared.rules_epoch.load(Ordering::Acquire);
        if epoch != self.rules_epoch {
            self.reload_rules(epoch);
        }
        if self.in_flight == 0 {
            // The channel was idle: update its share at once.
            self.share_update_at = 0;
        }
        if self.shared.presence.load(Ordering::Relaxed) != PRESENT || self.is_frozen {
            self.handle_presence_change();
        }
        if self.rules.is_empty() && self.shared.bad_blocks.is_empty() && !self.is_frozen {
            self.submit_fast(batch);
        }
        if !batch.is_empty() {
            self.submit_slow(batch);
        }
        if self.share_update_at == 0 {
            self.update_share();
        }
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        if self.shared.presence.load(Ordering::Relaxed) != PRESENT || self.is_frozen {
            self.handle_presence_change();
        }
        let ticks = clock::ticks();
        self.now = clock::ticks_to_ns(ticks).max(self.now);
        let ModelChannel { fifo, timer_wheel, slots, free, .. } = self;
        fifo.expire(self.now, sink);
        timer_wheel.expire(self.now, |slot| {
            free.push(slot);
            sink.extend(slots[usize::from(slot)].take());
        });
        if self.region.is_some() && sink.len() > before {
            self.execute_all(sink, before);
        }
        self.in_flight -= sink.len() - before;
        if !self.ready.is_empty() {
            sink.append(&mut self.ready);
        }
        if self.now >= self.share_update_at {
            self.update_share();
        }
        if self.in_flight == 0 && sink.len() > before {
            self.share.mark_idle();
        }
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.ready.is_empty() || (self.shared.presence.load(Ordering::Relaxed) == SURPRISE_REMOVED) {
            return Some(0);
        }
        let due = [self.fifo.earliest(), self.timer_wheel.earliest()].into_iter().flatten().min();
        let due = due.map(|due| due.saturating_add_signed(self.offset_ns));
        let hung_poll = (!self.hung.is_empty()).then(|| clock::now_ns() + HUNG_POLL_NS);
        [due, hung_poll].into_iter().flatten().min()
    }
}

impl ModelChannel {
    /// Handles a change of the device state: surprise removal aborts all requests, orderly removal only
    /// the hung ones, a fatal status hangs all, and a reset through another channel aborts them.
    #[cold]
    fn handle_presence_change(&mut self) {
        let gone = Status::ABORTED_SQ_DELETION;
        match self.shared.presence.load(Ordering::Acquire) {
            SURPRISE_REMOVED => self.abort(gone),
            FATAL => self.freeze(),
            PRESENT if self.is_frozen => {
                self.is_frozen = false;
                self.abort(Status::ABORT_REQUESTED);
            }
            PRESENT => {}
            _ => self.ready.extend(self.hung.drain(..).map(|request| request.complete(gone))),
        }
    }
}

impl Drop for ModelChannel {
    fn drop(&mut self) {
        self.shared.shares.unregister(&self.share);
    }
}
