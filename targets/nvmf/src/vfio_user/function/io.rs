//! Fetches commands, passes I/O commands to their queues, and device completions to their commands.

use block_io::{Status, Tag};
use nvme_controller::{ControllerEvent, IoQueue};
use wire_nvme::{Sqe, sqe};

use super::super::data::DataSegment;
use super::super::protocol::VfioUserContext;
use super::super::queue::{SubmissionQueue, SubmissionQueueState, cqe_high, reported_status};
use super::link::{QueueLink, QueueTransport, SegmentList, TAG_QID_SHIFT};
use super::{POLL_BYTES_MAX, POLL_COMMANDS_MAX, POLL_QUEUE_COMMANDS_MIN, QUEUES_MAX, VfioUserFunction};

impl VfioUserFunction {
    /// Fetches and executes new entries of every submission queue, and writes blocked completions. Returns
    /// the number of commands, or of written queues.
    #[inline]
    pub(in super::super) fn fetch(&mut self, context: &mut VfioUserContext<'_>) -> usize {
        let written = if self.has_blocked_completions { self.flush_each_blocked() } else { 0 };
        if !self.running || self.faults.surprise_removed {
            return written;
        }
        let mut count = self.fetch_all(context);
        if self.doorbells_trapped && self.doorbells.can_arm() && count == 0 {
            count = self.arm_and_fetch(context);
        }
        if count > 0 {
            self.last_activity_ns = context.now_ns;
            self.doorbells.disarm();
        }
        count + written
    }

    /// Arms the shadow doorbells because the core may sleep, then fetches once more.
    #[cold]
    fn arm_and_fetch(&mut self, context: &mut VfioUserContext<'_>) -> usize {
        let tails = self.sqs.iter().flatten().map(|queue| (queue.ring.doorbell, queue.ring.head));
        let heads = self.cqs.iter().flatten().map(|queue| queue.known_head());
        self.doorbells.arm(tails.chain(heads));
        self.fetch_all(context)
    }

    /// Fetches from the admin queue, and from the I/O queues in turn until the poll has had enough. The queue
    /// that had the last command is the last of the next poll.
    #[inline]
    fn fetch_all(&mut self, context: &mut VfioUserContext<'_>) -> usize {
        let mut left = PollBudget { commands: POLL_COMMANDS_MAX, bytes: POLL_BYTES_MAX };
        let mut count = 0;
        let admin_queues = usize::from(self.active_sqids.first() == Some(&0));
        if admin_queues > 0
            && let Some(tail) = self.new_tail(0)
        {
            count += self.fetch_queue(0, tail, &mut left, context);
        }
        // Admin commands may have created and deleted queues.
        let io_queues = self.active_sqids.len().saturating_sub(admin_queues);
        for _ in 0..io_queues {
            let index = if self.next_io_queue < io_queues { self.next_io_queue } else { 0 };
            self.next_io_queue = index + 1;
            let qid = self.active_sqids[admin_queues + index];
            if let Some(tail) = self.new_tail(qid) {
                count += self.fetch_queue(qid, tail, &mut left, context);
                if left.is_used_up(context) {
                    break;
                }
            }
        }
        count
    }

    /// The tail doorbell of a submission queue, if it was written: all that a queue without commands costs.
    #[inline(always)]
    fn new_tail(&self, qid: u16) -> Option<u32> {
        let ring = &self.sqs.get(usize::from(qid))?.as_ref()?.ring;
        self.doorbells.load(ring.doorbell).filter(|tail| *tail != ring.head)
    }

    /// Fetches new entries of a submission queue. Returns the number of commands.
    #[inline(never)]
    fn fetch_queue(
        &mut self,
        qid: u16,
        tail: u32,
        left: &mut PollBudget,
        context: &mut VfioUserContext<'_>,
    ) -> usize {
        let reserved = self.reserve(qid, tail, left, context);
        let fetched = match qid {
            _ if reserved == 0 => 0,
            0 => self.fetch_admin(reserved, context),
            _ => self.fetch_io(qid, reserved, left, context),
        };
        if fetched < reserved {
            self.release(qid, reserved - fetched);
        }
        fetched as usize
    }

    /// Reserves completion queue entries for new commands, up to a tail doorbell's value. Returns their
    /// number.
    fn reserve(&mut self, qid: u16, tail: u32, left: &PollBudget, context: &VfioUserContext<'_>) -> u32 {
        let Some(Some(SubmissionQueue { ring, io })) = self.sqs.get_mut(usize::from(qid)) else { return 0 };
        if tail >= ring.entries {
            // Base 2.0, section 5.2.1: Invalid Doorbell Write Value, reported once per value.
            let is_new = ring.invalid_tail != tail;
            ring.invalid_tail = tail;
            if is_new {
                self.controller_event(ControllerEvent::InvalidDoorbellValue, context.now_ns);
            }
            return 0;
        }
        if ring.memory.is_none() || self.faults.stalled == Some(qid) {
            return 0;
        }
        let pending = ring.pending_entries(tail);
        let commands_max = if context.is_turn_shared() {
            left.commands
        } else {
            left.commands.min(POLL_QUEUE_COMMANDS_MIN.max(pending.div_ceil(2)))
        };
        let slots = if qid == 0 { u32::MAX } else { commands_max.min(io.free_slots() as u32) };
        let Some(Some(completions)) = self.cqs.get_mut(usize::from(ring.cqid)) else { return 0 };
        let reserved = completions.reserve(pending.min(slots), &self.doorbells);
        if completions.take_invalid_head() {
            self.controller_event(ControllerEvent::InvalidDoorbellValue, context.now_ns);
        }
        reserved
    }

    /// Releases completion queue entries that were reserved for commands of a queue.
    #[cold]
    fn release(&mut self, qid: u16, count: u32) {
        if let Some(cqid) = self.sq(qid).map(|queue| queue.ring.cqid)
            && let Some(completions) = self.cq(cqid)
        {
            completions.release(count);
        }
    }

    /// Executes admin commands one at a time, because each may delete or close queues.
    #[cold]
    fn fetch_admin(&mut self, reserved: u32, context: &mut VfioUserContext<'_>) -> u32 {
        self.rescheduled = true;
        let mut fetched = 0;
        while fetched < reserved {
            let Some(Some(queue)) = self.sqs.first_mut() else { break };
            if queue.ring.state != SubmissionQueueState::Active
                || queue.ring.fetch(1, &mut self.fetched[..]) == 0
            {
                break;
            }
            let sqe = Sqe::decode(&self.fetched[0]);
            self.admin_command(&sqe, context);
            fetched += 1;
        }
        fetched
    }

    // A function of its own, so that its loop has all registers: 20 instructions a command.
    #[inline(never)]
    fn fetch_io(
        &mut self,
        qid: u16,
        reserved: u32,
        left: &mut PollBudget,
        context: &mut VfioUserContext<'_>,
    ) -> u32 {
        let Some(QueueParts { io, link, segments, entries }) = self.queue(qid) else { return 0 };
        let mut transport = QueueTransport { link, segments, context, bytes: 0 };
        let mut fetched = 0;
        if transport.context.is_turn_shared() {
            fetched = fetch_counted(io, &mut transport, entries, reserved);
        } else {
            while fetched < reserved && transport.bytes < left.bytes {
                let count = transport.link.ring.fetch(reserved - fetched, entries);
                if count == 0 {
                    break;
                }
                for entry in &entries[..count as usize] {
                    io.entry(entry, &mut transport);
                }
                fetched += count;
            }
        }
        left.commands -= fetched;
        left.bytes = left.bytes.saturating_sub(transport.bytes);
        let (is_waiting, has_ready) = (io.is_waiting(), io.has_ready());
        self.has_deferred |= is_waiting;
        self.has_ready |= has_ready;
        self.rescheduled |= is_waiting;
        fetched
    }

    /// Continues commands that are ready or deferred.
    #[cold]
    pub(in super::super) fn resume(&mut self, context: &mut VfioUserContext<'_>) {
        self.rescheduled = false;
        if !self.has_ready && !self.has_deferred {
            return;
        }
        (self.has_ready, self.has_deferred) = (false, false);
        for index in 0..self.active_sqids.len() {
            let Some(QueueParts { io, link, segments, .. }) = self.queue(self.active_sqids[index]) else {
                continue;
            };
            io.retry(&mut QueueTransport { link, segments, context, bytes: 0 });
            let (is_waiting, has_ready) = (io.is_waiting(), io.has_ready());
            self.has_deferred |= is_waiting;
            self.has_ready |= has_ready;
        }
    }

    /// Completes the commands without a slot among these completions. Returns whether there are no others.
    #[inline]
    pub(in super::super) fn complete_direct(&mut self, all: &[bdev::Completion]) -> bool {
        let mut is_all = true;
        // One run per queue.
        for run in all.chunk_by(|one, next| (one.tag().0 ^ next.tag().0) >> 16 == 0) {
            if is_direct(run[0].tag()) {
                self.complete_run(run);
            } else {
                is_all = false;
            }
        }
        is_all
    }

    #[inline]
    fn complete_run(&mut self, run: &[bdev::Completion]) {
        let qid = qid_of(run[0].tag());
        let Some(Some(SubmissionQueue { ring, io })) = self.sqs.get_mut(usize::from(qid)) else { return };
        io.complete_direct(run.len() as u32);
        if ring.state == SubmissionQueueState::Active
            && self.faults.drop_completions == 0
            && let Some(Some(completions)) = self.cqs.get_mut(usize::from(ring.cqid))
        {
            let was_dirty = completions.dirty;
            ring.in_flight -= run.len() as u32;
            let (head, mut errors, lease) = (ring.head as u16, 0, ring.lease.as_ref());
            let entries = run.iter().map(|completion| {
                errors += u64::from(!completion.status().is_success());
                let status = reported_status(lease, completion.status());
                cqe_high(head, qid, completion.tag().0 as u16, status)
            });
            self.has_blocked_completions |= !completions.post_all(entries);
            ring.errors += errors;
            if completions.dirty && !was_dirty {
                self.dirty_cqids.push(ring.cqid);
            }
            return;
        }
        for completion in run {
            self.complete_command(qid, completion.tag().0 as u16, completion.status(), 0);
        }
    }

    /// Handles the completion of a device request of a command with a slot; ignores the others.
    pub(in super::super) fn complete(&mut self, completion: bdev::Completion) {
        if is_direct(completion.tag()) {
            return;
        }
        let qid = qid_of(completion.tag());
        let Some(QueueParts { io, mut link, .. }) = self.queue(qid) else { return };
        io.complete(Tag(completion.tag().0 & QUEUE_TAG_MASK), completion, &mut link);
        self.has_ready |= io.has_ready();
        self.reap(qid);
    }

    /// Completes a command. A completion queue entry must be reserved for it.
    pub(super) fn complete_command(&mut self, qid: u16, cid: u16, status: Status, result: u64) {
        if let Some(QueueParts { mut link, .. }) = self.queue(qid) {
            link.post(cid, status, result);
        }
        self.reap(qid);
    }

    /// Removes a submission queue that is deleted or closed when the last of its commands has completed.
    #[inline]
    pub(super) fn reap(&mut self, qid: u16) {
        let Some(Some(SubmissionQueue { ring, .. })) = self.sqs.get(usize::from(qid)) else { return };
        if ring.state == SubmissionQueueState::Active || ring.in_flight > 0 {
            return;
        }
        let state = ring.state;
        self.sqs[usize::from(qid)] = None;
        if let SubmissionQueueState::Deleting(cid) = state {
            self.complete_command(0, cid, Status::SUCCESS, 0);
        }
    }

    /// Answers the commands of a queue that are not at a block device, after its state has changed.
    pub(super) fn abort_pending(&mut self, qid: u16) {
        if let Some(QueueParts { io, mut link, .. }) = self.queue(qid) {
            io.abort_pending(Status::ABORTED_SQ_DELETION, &mut link);
        }
    }

    /// Completes pending reservation commands that no longer wait for anything.
    pub(in super::super) fn complete_pending_reservations(&mut self) {
        for index in 0..self.active_sqids.len() {
            if let Some(QueueParts { io, mut link, .. }) = self.queue(self.active_sqids[index]) {
                io.complete_reservations(&mut link);
            }
        }
    }

    /// A queue, and the parts of the function that its commands need.
    #[inline(always)]
    fn queue(&mut self, qid: u16) -> Option<QueueParts<'_>> {
        let SubmissionQueue { ring, io } = self.sqs.get_mut(usize::from(qid))?.as_mut()?;
        let completions = self.cqs.get_mut(usize::from(ring.cqid)).and_then(Option::as_mut);
        let link = QueueLink {
            qid,
            ring,
            completions,
            memory: &self.memory,
            faults: &mut self.faults,
            dirty_cqids: &mut self.dirty_cqids,
            has_blocked_completions: &mut self.has_blocked_completions,
            flow: self.flow,
        };
        Some(QueueParts { io, link, segments: &mut self.segments, entries: &mut self.fetched[..] })
    }
}

/// What a poll may still fetch, however many others share the core.
struct PollBudget {
    commands: u32,
    bytes: u64,
}

impl PollBudget {
    /// Nothing more is fetched, because of this budget or of that of the turn.
    #[inline]
    fn is_used_up(&self, context: &VfioUserContext<'_>) -> bool {
        self.commands == 0 || self.bytes == 0 || context.turn_commands() == 0
    }
}

/// Fetches commands one at a time, because the data of each says how many more the turn has. Returns their
/// number.
#[inline(never)]
fn fetch_counted(
    io: &mut IoQueue<SegmentList>,
    transport: &mut QueueTransport<'_, '_>,
    entries: &mut [[u8; sqe::SIZE]],
    reserved: u32,
) -> u32 {
    let mut fetched = 0;
    while fetched < reserved
        && transport.context.turn_commands() > 0
        && transport.link.ring.fetch(1, entries) == 1
    {
        let before = transport.bytes;
        io.entry(&entries[0], transport);
        transport.context.count_command(transport.bytes - before);
        fetched += 1;
    }
    fetched
}

/// A queue, and the parts of its function that its commands need.
struct QueueParts<'a> {
    io: &'a mut IoQueue<SegmentList>,
    link: QueueLink<'a>,
    segments: &'a mut Vec<DataSegment>,
    /// Scratch space for fetched entries.
    entries: &'a mut [[u8; sqe::SIZE]],
}

/// Bits of a request's tag that belong to the queue.
const QUEUE_TAG_MASK: u64 = (1 << TAG_QID_SHIFT) - 1;

/// The submission queue of a request's tag.
#[inline(always)]
fn qid_of(tag: Tag) -> u16 {
    (tag.0 >> TAG_QID_SHIFT) as u16 & (QUEUES_MAX - 1)
}

/// Whether a tag is that of a request of lent memory, which has no slot.
#[inline(always)]
fn is_direct(tag: Tag) -> bool {
    IoQueue::<SegmentList>::direct_token(tag).is_some_and(|token| {
        token.abandon();
        true
    })
}
