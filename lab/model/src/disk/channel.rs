//! One core's ring to a model: requests are booked when they arrive and held until they are due.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bdev::{Completion, Geometry, Request};
use memory::SharedRegion;
use ring::{Flags, Op, Status};
use sys::clock;

use super::calendar::Calendar;
use super::lane::Lane;
use super::shares::Share;
use super::{DEPTH, FATAL, HERE, PULLED, Shared};
use crate::faults::{Rules, Verdict};
use crate::random::Random;
use crate::timing::{Io, Timing};

/// How often a channel looks at how much the others have in flight.
const LOOK_NS: u64 = 250_000;
/// How soon a channel that holds only commands that never end notices that its device went away.
const STUCK_LOOK_NS: u64 = 10_000_000;

pub(super) struct Channel {
    shared: Arc<Shared>,
    timing: Timing,
    /// Commands that are due in the order in which they came: of most devices few, of one without a
    /// medium all.
    lane: Lane,
    /// All others, by slot.
    calendar: Calendar,
    /// Requests in the calendar, each with how it will end.
    slots: Box<[Option<Completion>]>,
    free: Vec<u16>,
    in_flight: usize,
    /// Empty between calls: when the commands of a batch end.
    ends: Vec<u64>,
    /// Commands that never end by themselves.
    stuck: Vec<Request>,
    /// The controller's fatal status was noticed here.
    is_frozen: bool,
    finished: Vec<Completion>,
    rules: Rules,
    rules_epoch: u64,
    dice: Random,
    region: Option<Arc<SharedRegion>>,
    /// Empty between calls: commands whose data is moved.
    executing: Vec<Completion>,
    block_size: u32,
    block_shift: Option<u32>,
    share: Share,
    look_at: u64,
    /// The latest time that is known, in nanoseconds since the counter's zero.
    now: u64,
    /// The ticks that `now_of_ticks` was last asked about, and its answer.
    ticks: (u64, u64),
    /// What is added to the time here to get the reactor's.
    offset_ns: i64,
}

impl Channel {
    pub(super) fn new(
        shared: &Arc<Shared>,
        region: Option<Arc<SharedRegion>>,
        geometry: Geometry,
        seed: u64,
    ) -> Channel {
        // Read in this order, so that a deadline comes out early by the time between, and never late.
        let reactor_now = clock::now_ns();
        let now = clock::ticks_to_ns(clock::ticks());
        // Spans of a 64th of the shortest latency: nothing there is late by more than that.
        let span = (shared.plan.least_ns() / 64).clamp(64, 4096);
        let block_size = geometry.block_size;
        Channel {
            timing: Timing::new(shared.plan.clone(), shared.wear.clone(), seed),
            lane: Lane::new(),
            calendar: Calendar::new(DEPTH as usize, span.ilog2(), now),
            slots: (0..DEPTH).map(|_| None).collect(),
            free: (0..DEPTH as u16).rev().collect(),
            in_flight: 0,
            ends: Vec::new(),
            stuck: Vec::new(),
            is_frozen: false,
            finished: Vec::new(),
            rules: Rules::default(),
            rules_epoch: 0,
            dice: Random::new(!seed),
            region,
            executing: Vec::new(),
            block_size,
            block_shift: block_size.is_power_of_two().then(|| block_size.trailing_zeros()),
            share: shared.shares.join(),
            look_at: 0,
            now,
            ticks: (0, 0),
            offset_ns: reactor_now as i64 - now as i64,
            shared: shared.clone(),
        }
    }

    /// The layer stamps a request when it comes, and a whole batch at once.
    #[inline]
    fn arrival(&mut self, ticks: u64) -> u64 {
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

    /// When a command ends that arrives now.
    #[inline(always)]
    fn book(&mut self, request: &Request) -> u64 {
        let now = self.arrival(request.issued);
        let (offset, bytes) = if request.op.has_range() {
            (self.bytes(request.lba), self.bytes(u64::from(request.blocks)))
        } else {
            (0, 0)
        };
        // Deallocations may be longer than 32 bits count; their time does not depend on it.
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let io = Io { op: request.op, offset, bytes, fua: request.flags.contains(Flags::FUA) };
        self.timing.book(now, &io)
    }

    /// Books reads from the front of the batch that differ in nothing that matters to a device
    /// without a medium.
    #[inline]
    fn book_alike(&mut self, batch: &[Request], ends: &mut Vec<u64>) {
        let Some(first) = batch.first() else { return };
        let (blocks, issued) = (first.blocks, first.issued);
        let alike = |request: &&Request| {
            request.op == Op::Read && request.blocks == blocks && request.issued == issued
        };
        let count = batch.iter().take_while(alike).count();
        let (now, bytes) = (self.arrival(issued), self.bytes(u64::from(blocks)));
        self.timing.book_alike(now, u32::try_from(bytes).unwrap_or(u32::MAX), count, ends);
    }

    /// Takes commands from the front of the batch to which nothing happens but that they take their
    /// time, up to the first for which more has to be looked at. There are no rules and no bad blocks.
    #[inline]
    fn take_plain(&mut self, batch: &mut Vec<Request>) {
        let mut ends = std::mem::take(&mut self.ends);
        if self.timing.is_plain_read() {
            self.book_alike(batch, &mut ends);
        }
        let mut in_order = ends.first().is_none_or(|first| *first >= self.lane.last());
        let mut last = ends.last().copied().unwrap_or(self.lane.last());
        for request in &batch[ends.len()..] {
            if !is_plain(request.op) {
                break;
            }
            let due = self.book(request);
            in_order &= due >= last;
            last = due;
            ends.push(due);
        }
        let taken = batch.drain(..ends.len());
        if in_order {
            self.in_flight += taken.len();
            self.lane.extend(taken, &ends);
        } else {
            taken.zip(&ends).for_each(|(request, due)| self.hold(*due, request, Status::SUCCESS));
        }
        ends.clear();
        self.ends = ends;
    }

    /// Takes commands for each of which everything is looked at.
    #[cold]
    fn take_each(&mut self, batch: &mut Vec<Request>) {
        for request in batch.drain(..) {
            if request.op == Op::Reset {
                let _ = self.shared.gone.compare_exchange(FATAL, HERE, Ordering::AcqRel, Ordering::Relaxed);
                self.is_frozen = false;
                self.abort(Status::ABORT_REQUESTED);
                self.finished.push(request.complete(Status::SUCCESS));
                continue;
            }
            if self.is_frozen {
                self.stuck.push(request);
                continue;
            }
            let due = self.book(&request);
            match self.rules.judge(request.op, request.lba, request.blocks, &mut self.dice) {
                Verdict::Late(ns) => {
                    let status = self.correctable(&request);
                    self.hold(due + ns, request, status);
                }
                Verdict::Fails(failure) => self.hold(due, request, failure),
                Verdict::Never => self.stuck.push(request),
                Verdict::Lost => self.lose(request),
                Verdict::Fatal => {
                    self.stuck.push(request);
                    self.fail(FATAL);
                }
                Verdict::Gone => {
                    self.stuck.push(request);
                    self.fail(PULLED);
                }
            }
        }
    }

    /// Carries a command out that will not be told of.
    fn lose(&mut self, mut request: Request) {
        if let Some(region) = &self.region {
            Self::execute(region, &mut request, self.block_size);
        }
        let _ = self.correctable(&request);
        self.stuck.push(request);
    }

    /// The device stops working, for every channel.
    fn fail(&mut self, how: u8) {
        let _ = self.shared.gone.compare_exchange(HERE, how, Ordering::AcqRel, Ordering::Relaxed);
        self.leave();
    }

    /// How a command ends that meets blocks which were written as uncorrectable, or makes some.
    fn correctable(&self, request: &Request) -> Status {
        let (bad, lba, blocks) = (&self.shared.bad, request.lba, request.blocks);
        match request.op {
            Op::Read if bad.touches(lba, blocks) => Status::UNRECOVERED_READ_ERROR,
            Op::Write | Op::Unmap | Op::WriteZeroes if bad.heal(lba, blocks).is_err() => Status::WRITE_FAULT,
            Op::WriteUncorrectable if bad.mark(lba, blocks).is_err() => Status::WRITE_FAULT,
            _ => Status::SUCCESS,
        }
    }

    /// Keeps a command until it is due.
    #[inline]
    fn hold(&mut self, due: u64, request: Request, status: Status) {
        self.in_flight += 1;
        if due >= self.lane.last() {
            return self.lane.push(due, request.complete(status));
        }
        let Some(slot) = self.free.pop() else {
            unreachable!("the layer admits no more than the depth of {DEPTH}")
        };
        self.slots[usize::from(slot)] = Some(request.complete(status));
        self.calendar.insert(slot, due);
    }

    /// Ends everything in flight with one status.
    #[cold]
    fn abort(&mut self, status: Status) {
        let Channel { lane, calendar, slots, free, finished, stuck, .. } = self;
        finished.extend(lane.drain().map(|done| done.into_request().complete(status)));
        self.in_flight = 0;
        calendar.drain(|slot| {
            if let Some(done) = slots[usize::from(slot)].take() {
                finished.push(done.into_request().complete(status));
            }
            free.push(slot);
        });
        finished.extend(stuck.drain(..).map(|request| request.complete(status)));
    }

    #[cold]
    fn follow_rules(&mut self, epoch: u64) {
        self.rules_epoch = epoch;
        self.rules = self.shared.rules.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    }

    #[cold]
    fn look(&mut self) {
        self.look_at = self.now + LOOK_NS;
        let share = self.share.look(&self.shared.shares, self.in_flight);
        self.timing.set_share(share);
    }

    /// Nothing completes any more.
    fn freeze(&mut self) {
        self.is_frozen = true;
        let Channel { lane, calendar, slots, free, stuck, .. } = self;
        stuck.extend(lane.drain().map(Completion::into_request));
        calendar.drain(|slot| {
            stuck.extend(slots[usize::from(slot)].take().map(Completion::into_request));
            free.push(slot);
        });
        self.in_flight = 0;
    }

    /// Does to the contents what the commands say that succeed, from `first` on.
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

    /// Does to the contents what the command says.
    fn execute(region: &SharedRegion, request: &mut Request, block_size: u32) {
        let offset = request.lba.wrapping_mul(u64::from(block_size));
        match (request.op, &mut request.buffer) {
            (Op::Read, Some(buffer)) => region.read_into(offset, buffer),
            (Op::Write, Some(buffer)) => region.write_from(offset, buffer),
            (Op::Unmap | Op::WriteZeroes, _) => {
                region.zero(offset, u64::from(request.blocks) * u64::from(block_size));
            }
            _ => {}
        }
    }
}

/// Whether a command may be taken without a look at anything but its time.
#[inline]
fn is_plain(op: Op) -> bool {
    !matches!(op, Op::Reset | Op::WriteUncorrectable)
}

impl ring::Channel for Channel {
    type Request = Request;
    type Completion = Completion;

    #[inline]
    fn submit(&mut self, batch: &mut Vec<Request>) {
        let epoch = self.shared.rules_epoch.load(Ordering::Acquire);
        if epoch != self.rules_epoch {
            self.follow_rules(epoch);
        }
        if self.in_flight == 0 {
            // It rested: its share may be what others had left it.
            self.look_at = 0;
        }
        if self.shared.gone.load(Ordering::Relaxed) != HERE || self.is_frozen {
            self.leave();
        }
        if self.rules.is_empty() && self.shared.bad.is_empty() && !self.is_frozen {
            self.take_plain(batch);
        }
        if !batch.is_empty() {
            self.take_each(batch);
        }
        if self.look_at == 0 {
            self.look();
        }
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        if self.shared.gone.load(Ordering::Relaxed) != HERE || self.is_frozen {
            self.leave();
        }
        let ticks = clock::ticks();
        self.now = clock::ticks_to_ns(ticks).max(self.now);
        let Channel { lane, calendar, slots, free, .. } = self;
        lane.expire(self.now, sink);
        calendar.expire(self.now, |slot| {
            free.push(slot);
            sink.extend(slots[usize::from(slot)].take());
        });
        if self.region.is_some() && sink.len() > before {
            self.execute_all(sink, before);
        }
        self.in_flight -= sink.len() - before;
        if !self.finished.is_empty() {
            sink.append(&mut self.finished);
        }
        if self.now >= self.look_at {
            self.look();
        }
        if self.in_flight == 0 && sink.len() > before {
            self.share.rest();
        }
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.finished.is_empty() || (self.shared.gone.load(Ordering::Relaxed) == PULLED) {
            return Some(0);
        }
        let due = [self.lane.earliest(), self.calendar.earliest()].into_iter().flatten().min();
        let due = due.map(|due| due.saturating_add_signed(self.offset_ns));
        let look = (!self.stuck.is_empty()).then(|| clock::now_ns() + STUCK_LOOK_NS);
        [due, look].into_iter().flatten().min()
    }
}

impl Channel {
    /// The device went away: in order, so that only what would never end is given up, or not. Or its
    /// controller failed, or was reset after that through another channel.
    #[cold]
    fn leave(&mut self) {
        let gone = Status::ABORTED_SQ_DELETION;
        match self.shared.gone.load(Ordering::Acquire) {
            PULLED => self.abort(gone),
            FATAL => self.freeze(),
            HERE if self.is_frozen => {
                self.is_frozen = false;
                self.abort(Status::ABORT_REQUESTED);
            }
            HERE => {}
            _ => self.finished.extend(self.stuck.drain(..).map(|request| request.complete(gone))),
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.shared.shares.leave(&self.share);
    }
}
