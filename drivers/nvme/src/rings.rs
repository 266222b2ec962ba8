//! The submission and completion rings of a queue pair, and their doorbells.

use std::sync::atomic::{Ordering, fence};

use block_io::Status;
use dma::{Buffer, DeviceBuffer, EntryRing};
use wire_nvme::{Sqe, cqe, sqe};

use crate::device::DoorbellRegion;
use crate::shadow::QueueShadowDoorbells;

const SQE_WORDS: usize = sqe::SIZE / 8;
const CQE_WORDS: usize = cqe::SIZE / 8;

/// A submission queue and a completion queue with the same number of entries, a power of two.
///
/// Pushing entries or consuming completions moves local indices only;
/// [`ring_sq_doorbell`](Self::ring_sq_doorbell) and [`ring_cq_doorbell`](Self::ring_cq_doorbell) publish them once
/// per batch, through the shadow doorbell or the register. Flow control is the caller's: its slots bound the
/// commands in flight.
pub(crate) struct Rings {
    sq: EntryRing<SQE_WORDS>,
    cq: EntryRing<CQE_WORDS>,
    /// Submission queue tail as a free-running counter, and the tail last published to the device.
    tail: u32,
    published_tail: u32,
    /// Completion queue head as a free-running counter, the head last published, and the expected phase tag.
    head: u32,
    published_head: u32,
    phase: u64,
    qid: u16,
    doorbells: DoorbellRegion,
    /// Doorbell offsets in the doorbell region.
    sq_doorbell: u64,
    cq_doorbell: u64,
    shadow: Option<QueueShadowDoorbells>,
    /// Doorbell updates of each queue.
    pub(crate) sq_doorbell_counts: DoorbellCounts,
    pub(crate) cq_doorbell_counts: DoorbellCounts,
}

/// Doorbell updates of one queue.
#[derive(Clone, Copy, Default)]
pub(crate) struct DoorbellCounts {
    /// Writes to the shadow doorbell.
    pub(crate) shadow_updates: u64,
    /// Writes to the doorbell register.
    pub(crate) register_writes: u64,
}

/// Dwords 2 and 3 of a completion queue entry, not decoded.
#[derive(Clone, Copy)]
pub(crate) struct RawCqe(u64);

impl RawCqe {
    #[inline(always)]
    pub(crate) fn sqhd(self) -> u16 {
        self.0 as u16
    }

    #[inline(always)]
    pub(crate) fn sqid(self) -> u16 {
        (self.0 >> 16) as u16
    }

    #[inline(always)]
    pub(crate) fn cid(self) -> u16 {
        (self.0 >> 32) as u16
    }

    #[inline(always)]
    pub(crate) fn status(self) -> Status {
        Status::from_field((self.0 >> 49) as u16)
    }

    #[inline(always)]
    fn phase(self) -> u64 {
        self.0 >> 48 & 1
    }
}

/// Least number of queue entries in the specification.
pub(crate) const ENTRIES_MIN: u32 = 2;

impl Rings {
    /// Creates rings over zeroed memory: `sq` and `cq` hold `entries` entries each.
    pub(crate) fn new(
        sq: DeviceBuffer,
        cq: DeviceBuffer,
        entries: u32,
        qid: u16,
        doorbells: DoorbellRegion,
        stride_log2: u8,
    ) -> Rings {
        assert!(entries.is_power_of_two() && entries >= ENTRIES_MIN, "{entries} entries");
        let doorbell = |index: u64| doorbells.offset + (index << (2 + stride_log2));
        let (sq_doorbell, cq_doorbell) = (doorbell(2 * u64::from(qid)), doorbell(2 * u64::from(qid) + 1));
        assert!(cq_doorbell + 4 <= doorbells.offset + doorbells.bytes, "queue {qid} has no doorbell");
        Rings {
            sq: EntryRing::new(sq, entries),
            cq: EntryRing::new(cq, entries),
            tail: 0,
            published_tail: 0,
            head: 0,
            published_head: 0,
            phase: 1,
            qid,
            doorbells,
            sq_doorbell,
            cq_doorbell,
            shadow: None,
            sq_doorbell_counts: DoorbellCounts::default(),
            cq_doorbell_counts: DoorbellCounts::default(),
        }
    }

    /// Uses shadow doorbells, if the controller has them, and clears them: a deleted queue pair of the same identifier
    /// may have left its tail there, which the controller would take for commands of this one.
    pub(crate) fn set_shadow(&mut self, shadow: Option<QueueShadowDoorbells>) {
        if let Some(shadow) = &shadow {
            shadow.clear();
        }
        self.shadow = shadow;
    }

    pub(crate) fn qid(&self) -> u16 {
        self.qid
    }

    pub(crate) fn mask(&self) -> u32 {
        self.sq.mask()
    }

    pub(crate) fn buffers(&self) -> (&Buffer, &Buffer) {
        (self.sq.buffer(), self.cq.buffer())
    }

    pub(crate) fn bytes(&self) -> usize {
        self.sq.buffer().capacity() + self.cq.buffer().capacity()
    }

    /// Writes a command at the tail. The caller bounds the commands in flight, so that the queue is never full.
    pub(crate) fn push(&mut self, sqe: &Sqe) {
        self.sq.view().write(self.tail, &sqe.to_words());
        self.tail = self.tail.wrapping_add(1);
    }

    /// Writes commands at the tail until `next` returns `None`; returns their number. The queue is never full, as in
    /// [`push`](Self::push).
    #[inline(always)]
    pub(crate) fn push_all(&mut self, mut next: impl FnMut() -> Option<Sqe>) -> u32 {
        let (sq, mut tail) = (self.sq.view(), self.tail);
        while let Some(sqe) = next() {
            sq.write(tail, &sqe.to_words());
            tail = tail.wrapping_add(1);
        }
        let count = tail.wrapping_sub(self.tail);
        self.tail = tail;
        count
    }

    /// Publishes the tail to the device, if it has moved.
    #[inline(always)]
    pub(crate) fn ring_sq_doorbell(&mut self) {
        if self.tail == self.published_tail {
            return;
        }
        let old = std::mem::replace(&mut self.published_tail, self.tail) & self.mask();
        let tail = self.tail & self.mask();
        if let Some(shadow) = &self.shadow {
            self.sq_doorbell_counts.shadow_updates += 1;
            if !shadow.update_sq_tail(old as u16, tail as u16) {
                return;
            }
        } else {
            // The entries must be visible in memory before the doorbell write.
            fence(Ordering::Release);
        }
        self.doorbells.region.store_u32(self.sq_doorbell, tail);
        self.sq_doorbell_counts.register_writes += 1;
    }

    /// The completion at the head, if the device has posted it.
    #[inline(always)]
    pub(crate) fn peek(&self) -> Option<RawCqe> {
        // One acquire load returns the phase tag, which the device writes last, with the status and the identifiers;
        // later loads see what the device wrote before it.
        let entry = RawCqe(self.cq.view().load(self.head, 1));
        (entry.phase() == self.phase).then_some(entry)
    }

    /// Consumes the run of successful completions at the head for which `take` accepts the command identifier. Any
    /// other completion is left to [`peek`](Self::peek).
    #[inline(always)]
    pub(crate) fn advance_over_successes(&mut self, mut take: impl FnMut(u16) -> bool) {
        let mask = self.mask();
        // Every bit except the command identifier and the submission queue head. The status of success is zero, so
        // that its 16 bits are the phase tag alone.
        let significant = 0xffff_0000_ffff_ffff ^ u64::from(mask);
        let (cq, mut head, mut phase) = (self.cq.view(), self.head, self.phase);
        'laps: loop {
            let end = (head | mask).wrapping_add(1);
            let expected = phase << 48 | u64::from(self.qid) << 16;
            while head != end {
                let entry = cq.load(head, 1);
                if entry & significant != expected || !take((entry >> 32) as u16) {
                    break 'laps;
                }
                head = head.wrapping_add(1);
            }
            phase ^= 1;
        }
        (self.head, self.phase) = (head, phase);
    }

    /// Dwords 0 and 1 of the completion at the head.
    pub(crate) fn result(&self) -> u64 {
        self.cq.view().load(self.head, 0)
    }

    /// Whether a completion has this queue's SQID and an SQHD within the queue. The driver does not use SQHD, because
    /// slots bound the queue, but a value out of range is a controller error.
    pub(crate) fn matches_queue(&self, entry: RawCqe) -> bool {
        entry.0 as u32 & !self.mask() == u32::from(self.qid) << 16
    }

    /// Consumes the completion at the head.
    #[inline(always)]
    pub(crate) fn advance(&mut self) {
        self.head = self.head.wrapping_add(1);
        self.phase ^= u64::from(self.head & self.mask() == 0);
    }

    /// Publishes the completion queue head to the device, if it has moved.
    #[inline(always)]
    pub(crate) fn ring_cq_doorbell(&mut self) {
        if self.head == self.published_head {
            return;
        }
        let old = std::mem::replace(&mut self.published_head, self.head) & self.mask();
        let head = self.head & self.mask();
        if let Some(shadow) = &self.shadow {
            self.cq_doorbell_counts.shadow_updates += 1;
            if !shadow.update_cq_head(old as u16, head as u16) {
                return;
            }
        }
        self.doorbells.region.store_u32(self.cq_doorbell, head);
        self.cq_doorbell_counts.register_writes += 1;
    }

    /// Resets entries, indices and phase to their initial state. The device must no longer access the rings.
    pub(crate) fn reset(&mut self) {
        self.sq.clear();
        self.cq.clear();
        (self.tail, self.published_tail, self.head, self.published_head, self.phase) = (0, 0, 0, 0, 1);
        if let Some(shadow) = &self.shadow {
            shadow.clear();
        }
    }
}
