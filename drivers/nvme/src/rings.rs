//! The memory of a queue pair, and its doorbells.

use std::sync::atomic::{Ordering, fence};

use memory::{Buffer, DeviceBuffer};
use ring::Status;
use wire_nvme::{Sqe, cqe, sqe};

use crate::device::Doorbells;
use crate::shadow::Shadow;

/// A submission queue and a completion queue of as many entries, a power of two.
pub(crate) struct Rings {
    sq: DeviceBuffer,
    cq: DeviceBuffer,
    mask: u32,
    /// Where the next submission goes, and how far the device was told.
    tail: u32,
    rung: u32,
    /// Where the next completion will be, how far the device was told, and the phase that it will have.
    head: u32,
    acknowledged: u32,
    phase: bool,
    qid: u16,
    doorbells: Doorbells,
    /// Offsets in the doorbells' region.
    sq_bell: u64,
    cq_bell: u64,
    shadow: Option<Shadow>,
    pub(crate) bells_rung: u64,
}

/// A completion queue entry, as it was found.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) result: u64,
    pub(crate) sqhd: u16,
    pub(crate) sqid: u16,
    pub(crate) cid: u16,
    pub(crate) status: Status,
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
        assert!(sq.len() >= u64::from(entries) * sqe::SIZE as u64, "a short submission queue");
        assert!(cq.len() >= u64::from(entries) * cqe::SIZE as u64, "a short completion queue");
        let bell = |index: u64| doorbells.offset + (index << (2 + stride_log2));
        let (sq_bell, cq_bell) = (bell(2 * u64::from(qid)), bell(2 * u64::from(qid) + 1));
        assert!(cq_bell + 4 <= doorbells.offset + doorbells.bytes, "queue {qid} has no doorbell");
        Rings {
            sq,
            cq,
            mask: entries - 1,
            tail: 0,
            rung: 0,
            head: 0,
            acknowledged: 0,
            phase: true,
            qid,
            doorbells,
            sq_bell,
            cq_bell,
            shadow: None,
            bells_rung: 0,
        }
    }

    pub(crate) fn set_shadow(&mut self, shadow: Option<Shadow>) {
        self.shadow = shadow;
    }

    pub(crate) fn qid(&self) -> u16 {
        self.qid
    }

    pub(crate) fn mask(&self) -> u32 {
        self.mask
    }

    pub(crate) fn buffers(&self) -> (&Buffer, &Buffer) {
        (self.sq.buffer(), self.cq.buffer())
    }

    pub(crate) fn bytes(&self) -> usize {
        self.sq.buffer().capacity() + self.cq.buffer().capacity()
    }

    /// Puts a command at the tail. There is room: whoever bounds the commands in flight sees to that.
    #[inline(always)]
    pub(crate) fn push(&mut self, sqe: &Sqe) {
        self.sq.write(u64::from(self.tail) * sqe::SIZE as u64, &sqe.to_bytes());
        self.tail = (self.tail + 1) & self.mask;
    }

    /// Tells the device of what was pushed, once.
    #[inline(always)]
    pub(crate) fn ring(&mut self) {
        if self.tail == self.rung {
            return;
        }
        let old = std::mem::replace(&mut self.rung, self.tail);
        if let Some(shadow) = &self.shadow {
            if !shadow.submit(old as u16, self.tail as u16) {
                return;
            }
        } else {
            // What was written to memory is there before the doorbell says so.
            fence(Ordering::Release);
        }
        self.doorbells.region.store_u32(self.sq_bell, self.tail);
        self.bells_rung += 1;
    }

    /// The next completion, if the device has written it.
    #[inline(always)]
    pub(crate) fn peek(&self) -> Option<Entry> {
        let at = u64::from(self.head) * cqe::SIZE as u64;
        // The device writes the word with the phase last; what is loaded after it is what it wrote before.
        let last = self.cq.load_u32(at + 12);
        if (last >> 16 & 1 != 0) != self.phase {
            return None;
        }
        let middle = self.cq.load_u32(at + 8);
        Some(Entry {
            result: self.cq.load_u64(at),
            sqhd: middle as u16,
            sqid: (middle >> 16) as u16,
            cid: last as u16,
            status: Status::from_field((last >> 17) as u16),
        })
    }

    /// Steps over the completion that was last peeked at.
    #[inline(always)]
    pub(crate) fn advance(&mut self) {
        self.head = (self.head + 1) & self.mask;
        self.phase ^= self.head == 0;
    }

    /// Tells the device which completions may be overwritten, once.
    #[inline(always)]
    pub(crate) fn acknowledge(&mut self) {
        if self.head == self.acknowledged {
            return;
        }
        let old = std::mem::replace(&mut self.acknowledged, self.head);
        if let Some(shadow) = &self.shadow
            && !shadow.complete(old as u16, self.head as u16)
        {
            return;
        }
        self.doorbells.region.store_u32(self.cq_bell, self.head);
        self.bells_rung += 1;
    }

    /// Makes the rings what they were when they were new. The device must have let go of them.
    pub(crate) fn reset(&mut self) {
        let zeroes = [0; 4096];
        for cells in [&self.sq, &self.cq] {
            for at in (0..cells.len()).step_by(zeroes.len()) {
                let length = (cells.len() - at).min(zeroes.len() as u64);
                cells.write(at, &zeroes[..length as usize]);
            }
        }
        (self.tail, self.rung, self.head, self.acknowledged, self.phase) = (0, 0, 0, 0, true);
        if let Some(shadow) = &self.shadow {
            shadow.clear();
        }
    }
}
