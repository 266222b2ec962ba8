//! One core's ring to a model: requests are booked when they arrive and held until they are due.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bdev::{Completion, Geometry, Request};
use memory::SharedRegion;
use ring::{Flags, Op, Status};
use sys::clock;

use super::calendar::Calendar;
use super::shares::Share;
use super::{DEPTH, HERE, PULLED, Shared};
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
    calendar: Calendar,
    /// Requests in flight by slot, each with how it will end.
    slots: Box<[Option<(Request, Status)>]>,
    free: Vec<u16>,
    stuck: Vec<Request>,
    finished: Vec<Completion>,
    rules: Rules,
    rules_epoch: u64,
    dice: Random,
    region: Option<Arc<SharedRegion>>,
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
            calendar: Calendar::new(DEPTH as usize, span.ilog2(), now),
            slots: (0..DEPTH).map(|_| None).collect(),
            free: (0..DEPTH as u16).rev().collect(),
            stuck: Vec::new(),
            finished: Vec::new(),
            rules: Rules::default(),
            rules_epoch: 0,
            dice: Random::new(!seed),
            region,
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

    #[inline]
    fn in_flight(&self) -> usize {
        DEPTH as usize - self.free.len()
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

    #[inline]
    fn take(&mut self, request: Request) {
        let now = self.arrival(request.issued);
        let (offset, bytes) = if request.op.has_range() {
            (self.bytes(request.lba), self.bytes(u64::from(request.blocks)))
        } else {
            (0, 0)
        };
        // Deallocations may be longer than 32 bits count; their time does not depend on it.
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let io = Io { op: request.op, offset, bytes, fua: request.flags.contains(Flags::FUA) };
        let mut due = self.timing.book(now, &io);
        let mut status = Status::SUCCESS;
        if !self.rules.is_empty() {
            match self.rules.judge(request.op, request.lba, request.blocks, &mut self.dice) {
                Verdict::Late(ns) => due += ns,
                Verdict::Fails(failure) => status = failure,
                Verdict::Never => return self.stuck.push(request),
            }
        }
        let Some(slot) = self.free.pop() else {
            unreachable!("the layer admits no more than the depth of {DEPTH}")
        };
        self.slots[usize::from(slot)] = Some((request, status));
        self.calendar.insert(slot, due);
    }

    /// Ends everything in flight with one status.
    #[cold]
    fn abort(&mut self, status: Status) {
        let Channel { calendar, slots, free, finished, stuck, .. } = self;
        calendar.drain(|slot| {
            if let Some((request, _)) = slots[usize::from(slot)].take() {
                finished.push(request.complete(status));
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
        let share = self.share.look(&self.shared.shares, self.in_flight());
        self.timing.set_share(share);
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
            (Op::Read | Op::Write | Op::Flush | Op::Reset, _) => {}
        }
    }
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
        if self.free.len() == DEPTH as usize {
            // It rested: its share may be what others had left it.
            self.look_at = 0;
        }
        for request in batch.drain(..) {
            if request.op == Op::Reset {
                self.abort(Status::ABORT_REQUESTED);
                self.finished.push(request.complete(Status::SUCCESS));
            } else {
                self.take(request);
            }
        }
        if self.look_at == 0 {
            self.look();
        }
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        if self.shared.gone.load(Ordering::Relaxed) != HERE {
            self.leave();
        }
        let ticks = clock::ticks();
        self.now = clock::ticks_to_ns(ticks).max(self.now);
        let Channel { calendar, slots, free, region, block_size, .. } = self;
        calendar.expire(self.now, |slot| {
            free.push(slot);
            if let Some((mut request, status)) = slots[usize::from(slot)].take() {
                if let Some(region) = region
                    && status.is_success()
                {
                    Self::execute(region, &mut request, *block_size);
                }
                sink.push(request.complete(status));
            }
        });
        if !self.finished.is_empty() {
            sink.append(&mut self.finished);
        }
        if self.now >= self.look_at {
            self.look();
        }
        if self.free.len() == DEPTH as usize && sink.len() > before {
            self.share.rest();
        }
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.finished.is_empty() || (self.shared.gone.load(Ordering::Relaxed) == PULLED) {
            return Some(0);
        }
        let due = self.calendar.earliest().map(|due| due.saturating_add_signed(self.offset_ns));
        let look = (!self.stuck.is_empty()).then(|| clock::now_ns() + STUCK_LOOK_NS);
        [due, look].into_iter().flatten().min()
    }
}

impl Channel {
    /// The device went away: in order, so that only what would never end is given up, or not.
    #[cold]
    fn leave(&mut self) {
        let gone = Status::ABORTED_SQ_DELETION;
        if self.shared.gone.load(Ordering::Acquire) == PULLED {
            self.abort(gone);
        } else {
            self.finished.extend(self.stuck.drain(..).map(|request| request.complete(gone)));
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.shared.shares.leave(&self.share);
    }
}
