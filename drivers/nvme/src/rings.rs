//! The memory of a queue pair, and its doorbells.

use std::sync::atomic::{Ordering, fence};

use memory::{Buffer, DeviceBuffer, Entries};
use ring::Status;
use wire_nvme::{Sqe, cqe, sqe};

use crate::device::Doorbells;
use crate::shadow::Shadow;

const SQE_WORDS: usize = sqe::SIZE / 8;
const CQE_WORDS: usize = cqe::SIZE / 8;

/// A submission queue and a completion queue of as many entries, a power of two.
pub(crate) struct Rings {
    sq: Entries<SQE_WORDS>,
    cq: Entries<CQE_WORDS>,
    /// Where the next submission goes, counted on and on, and how far the device was told.
    tail: u32,
    rung: u32,
    /// Where the next completion will be, how far the device was told, and the phase that it will have.
    head: u32,
    acknowledged: u32,
    phase: u64,
    qid: u16,
    doorbells: Doorbells,
    /// Offsets in the doorbells' region.
    sq_bell: u64,
    cq_bell: u64,
    shadow: Option<Shadow>,
    /// Times that each queue moved, and how many of them took a register.
    pub(crate) tails: Bells,
    pub(crate) heads: Bells,
}

/// How often one queue's other end was told something.
#[derive(Clone, Copy, Default)]
pub(crate) struct Bells {
    /// In a shadow doorbell.
    pub(crate) shadows: u64,
    /// In the register.
    pub(crate) rung: u64,
}

/// Dwords 2 and 3 of a completion queue entry, as they were found.
#[derive(Clone, Copy)]
pub(crate) struct Entry(u64);

impl Entry {
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

/// The specification's least number of entries.
pub(crate) const ENTRIES_MIN: u32 = 2;

impl Rings {
    /// Rings over zeroed memory; `sq` holds `entries` entries, and so does `cq`.
    pub(crate) fn new(
        sq: DeviceBuffer,
        cq: DeviceBuffer,
        entries: u32,
        qid: u16,
        doorbells: Doorbells,
        stride_log2: u8,
    ) -> Rings {
        assert!(entries.is_power_of_two() && entries >= ENTRIES_MIN, "{entries} entries");
        let bell = |index: u64| doorbells.offset + (index << (2 + stride_log2));
        let (sq_bell, cq_bell) = (bell(2 * u64::from(qid)), bell(2 * u64::from(qid) + 1));
        assert!(cq_bell + 4 <= doorbells.offset + doorbells.bytes, "queue {qid} has no doorbell");
        Rings {
            sq: Entries::new(sq, entries),
            cq: Entries::new(cq, entries),
            tail: 0,
            rung: 0,
            head: 0,
            acknowledged: 0,
            phase: 1,
            qid,
            doorbells,
            sq_bell,
            cq_bell,
            shadow: None,
            tails: Bells::default(),
            heads: Bells::default(),
        }
    }

    pub(crate) fn set_shadow(&mut self, shadow: Option<Shadow>) {
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

    /// Puts a command at the tail. There is room: whoever bounds the commands in flight sees to that.
    pub(crate) fn push(&mut self, sqe: &Sqe) {
        self.sq.cursor().write(self.tail, &sqe.to_words());
        self.tail = self.tail.wrapping_add(1);
    }

    /// Puts commands at the tail for as long as there are any; how many. There is room, as for one.
    #[inline(always)]
    pub(crate) fn push_all(&mut self, mut next: impl FnMut() -> Option<Sqe>) -> u32 {
        let (sq, mut tail) = (self.sq.cursor(), self.tail);
        while let Some(sqe) = next() {
            sq.write(tail, &sqe.to_words());
            tail = tail.wrapping_add(1);
        }
        let count = tail.wrapping_sub(self.tail);
        self.tail = tail;
        count
    }

    /// Tells the device of what was pushed, once.
    #[inline(always)]
    pub(crate) fn ring(&mut self) {
        if self.tail == self.rung {
            return;
        }
        let old = std::mem::replace(&mut self.rung, self.tail) & self.mask();
        let tail = self.tail & self.mask();
        if let Some(shadow) = &self.shadow {
            self.tails.shadows += 1;
            if !shadow.submit(old as u16, tail as u16) {
                return;
            }
        } else {
            // What was written to memory is there before the doorbell says so.
            fence(Ordering::Release);
        }
        self.doorbells.region.store_u32(self.sq_bell, tail);
        self.tails.rung += 1;
    }

    /// The next completion, if the device has written it.
    #[inline(always)]
    pub(crate) fn peek(&self) -> Option<Entry> {
        // One load takes the phase, which the device writes last, and what says how the command ended; what is
        // loaded after it is what the device wrote before.
        let entry = Entry(self.cq.cursor().load(self.head, 1));
        (entry.phase() == self.phase).then_some(entry)
    }

    /// Steps over the successful completions of this queue that come next, as long as `take` knows their command
    /// identifiers. Whatever else comes next is left to [`peek`](Self::peek).
    #[inline(always)]
    pub(crate) fn advance_over_successes(&mut self, mut take: impl FnMut(u16) -> bool) {
        let mask = self.mask();
        // All but the command identifier and the place in the submission queue: a status of success is zero, so that
        // its 16 bits are the phase alone.
        let told = 0xffff_0000_ffff_ffff ^ u64::from(mask);
        let (cq, mut head, mut phase) = (self.cq.cursor(), self.head, self.phase);
        'laps: loop {
            let end = (head | mask).wrapping_add(1);
            let expected = phase << 48 | u64::from(self.qid) << 16;
            while head != end {
                let entry = cq.load(head, 1);
                if entry & told != expected || !take((entry >> 32) as u16) {
                    break 'laps;
                }
                head = head.wrapping_add(1);
            }
            phase ^= 1;
        }
        (self.head, self.phase) = (head, phase);
    }

    /// What the completion that was last peeked at returns besides its status.
    pub(crate) fn result(&self) -> u64 {
        self.cq.cursor().load(self.head, 0)
    }

    /// Whether an entry is of this queue and names a place in its submission queue. Nothing is done with that
    /// place: slots bound the queue. One outside of it is nonsense all the same.
    pub(crate) fn is_ours(&self, entry: Entry) -> bool {
        entry.0 as u32 & !self.mask() == u32::from(self.qid) << 16
    }

    /// Steps over the completion that was last peeked at.
    #[inline(always)]
    pub(crate) fn advance(&mut self) {
        self.head = self.head.wrapping_add(1);
        self.phase ^= u64::from(self.head & self.mask() == 0);
    }

    /// Tells the device which completions may be overwritten, once.
    #[inline(always)]
    pub(crate) fn acknowledge(&mut self) {
        if self.head == self.acknowledged {
            return;
        }
        let old = std::mem::replace(&mut self.acknowledged, self.head) & self.mask();
        let head = self.head & self.mask();
        if let Some(shadow) = &self.shadow {
            self.heads.shadows += 1;
            if !shadow.complete(old as u16, head as u16) {
                return;
            }
        }
        self.doorbells.region.store_u32(self.cq_bell, head);
        self.heads.rung += 1;
    }

    /// Makes the rings what they were when they were new. The device must have let go of them.
    pub(crate) fn reset(&mut self) {
        self.sq.clear();
        self.cq.clear();
        (self.tail, self.rung, self.head, self.acknowledged, self.phase) = (0, 0, 0, 0, 1);
        if let Some(shadow) = &self.shadow {
            shadow.clear();
        }
    }
}
