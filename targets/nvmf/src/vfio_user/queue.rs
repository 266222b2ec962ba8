//! Submission and completion queues in the client's memory.

use std::collections::VecDeque;
use std::rc::Rc;

use block_io::Status;
use dma::SharedRegion;
use nvme_controller::{IoQueue, QueueLease};
use wire_nvme::{cqe, sqe};

use super::doorbells::ControllerDoorbells;
use super::function::SegmentList;
use super::memory::ClientMemory;
use crate::queue_totals::QueueTotals;

/// The mapped memory of a queue, while its DMA range is mapped.
pub(super) struct QueueMemory {
    region: Rc<SharedRegion>,
    offset: u64,
}

impl QueueMemory {
    /// The memory of a queue; `None` unless it lies in one mapped range that is, if `written`, writable.
    pub(super) fn locate(
        memory: &ClientMemory,
        address: u64,
        bytes: u64,
        written: bool,
    ) -> Option<QueueMemory> {
        let mapped = memory.translate(address, bytes).filter(|mapped| mapped.writable || !written)?;
        Some(QueueMemory { region: mapped.external.region().clone(), offset: mapped.offset })
    }

    #[inline]
    pub(super) fn load_u32(&self, at: u64) -> u32 {
        self.region.load_u32(self.offset + at)
    }

    pub(super) fn store_u32(&self, at: u64, value: u32) {
        self.region.store_u32(self.offset + at, value);
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.region.is_poisoned()
    }
}

/// A submission queue: its ring in client memory, and the commands that were fetched from it.
pub(super) struct SubmissionQueue {
    pub(super) ring: SubmissionRing,
    pub(super) io: IoQueue<SegmentList>,
}

/// The ring of a submission queue. The controller reads entries in place; it owns the head.
pub(super) struct SubmissionRing {
    pub(super) qid: u16,
    /// Where its commands are counted when it is dropped.
    pub(super) totals: Rc<QueueTotals>,
    pub(super) entries: u32,
    /// The next entry to fetch.
    pub(super) head: u32,
    pub(super) cqid: u16,
    /// Index of its tail doorbell.
    pub(super) doorbell: u64,
    pub(super) address: u64,
    /// `None` while its DMA range is unmapped.
    pub(super) memory: Option<QueueMemory>,
    /// Commands that were fetched and not completed.
    pub(super) in_flight: u32,
    pub(super) state: SubmissionQueueState,
    /// Exclusive use of its queue identifier; `None` for the admin queue.
    pub(super) lease: Option<QueueLease>,
    /// The last invalid tail doorbell value, which was reported once.
    pub(super) invalid_tail: u32,
    pub(super) commands: u64,
    pub(super) errors: u64,
}

/// The status of a command as its host gets it: of one that failed maybe with a retry delay. The admin queue,
/// which has no lease, leaves that to the controller.
#[inline]
pub(super) fn reported_status(lease: Option<&QueueLease>, status: Status) -> Status {
    match lease {
        Some(lease) if !status.is_success() => lease.association().with_retry_delay(status),
        _ => status,
    }
}

/// Life cycle of a submission queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SubmissionQueueState {
    /// Commands are fetched.
    Active,
    /// Deleted by the admin command with this CID, which completes when all fetched commands have completed.
    Deleting(u16),
    /// The controller was reset or shut down: commands in flight get no completion.
    Closed,
}

impl Drop for SubmissionRing {
    fn drop(&mut self) {
        self.count_completed();
    }
}

impl SubmissionRing {
    pub(super) const BYTES: u64 = sqe::SIZE as u64;

    /// Copies up to `count_max` entries to `out`, without wrapping around. Returns their number; 0 while its
    /// memory is unmapped.
    #[inline]
    pub(super) fn fetch(&mut self, count_max: u32, out: &mut [[u8; sqe::SIZE]]) -> u32 {
        let Some(memory) = &self.memory else { return 0 };
        let count = count_max.min(self.entries - self.head).min(out.len() as u32);
        let bytes = out[..count as usize].as_flattened_mut();
        memory.region.read(memory.offset + u64::from(self.head) * Self::BYTES, bytes);
        self.head += count;
        if self.head == self.entries {
            self.head = 0;
        }
        self.in_flight += count;
        self.commands += u64::from(count);
        count
    }

    /// Number of entries between the head and this tail, which must be a valid index.
    #[inline]
    pub(super) fn pending_entries(&self, tail: u32) -> u32 {
        if tail >= self.head { tail - self.head } else { tail + self.entries - self.head }
    }

    /// Counts what it has completed among the commands of closed queues: it is not reported any more.
    pub(super) fn count_completed(&mut self) {
        if self.qid != 0 {
            self.totals.closed(self.completed());
        }
        self.commands = self.in_flight.into();
    }

    /// Commands that have completed, and are not counted yet.
    pub(super) fn completed(&self) -> u64 {
        self.commands.saturating_sub(self.in_flight.into())
    }

    /// Translates its address again, after DMA ranges have changed.
    pub(super) fn remap(&mut self, memory: &ClientMemory) {
        self.memory = QueueMemory::locate(memory, self.address, u64::from(self.entries) * Self::BYTES, false);
    }
}

/// A completion queue in client memory. The controller owns the tail and the phase tag.
///
/// A slot is reserved before a command is fetched, so a completion of a command always fits, except while
/// the queue's memory is unmapped. Completions without a slot (asynchronous events) or without memory are
/// blocked and written later, in order.
pub(super) struct CompletionQueue {
    pub(super) entries: u32,
    /// Index of the next entry to write.
    tail: u32,
    phase: bool,
    /// The client's head, as of the last read of the doorbell.
    head: u32,
    /// Entries reserved for commands in flight.
    reserved: u32,
    /// Index of its head doorbell.
    doorbell: u64,
    address: u64,
    /// `None` while its DMA range is unmapped.
    memory: Option<QueueMemory>,
    /// MSI-X vector to signal after entries were written; `None` disables interrupts.
    pub(super) vector: Option<u16>,
    /// Completions blocked because the queue is full or its memory is unmapped, oldest first.
    blocked: VecDeque<(u64, u64)>,
    /// Entries were written since the last interrupt.
    pub(super) dirty: bool,
    invalid_head: u32,
    /// `invalid_head` was not reported yet.
    unreported_head: bool,
}

impl CompletionQueue {
    pub(super) const BYTES: u64 = cqe::SIZE as u64;

    pub(super) fn new(
        entries: u32,
        address: u64,
        place: QueueMemory,
        doorbell: u64,
        vector: Option<u16>,
    ) -> Self {
        CompletionQueue {
            entries,
            tail: 0,
            phase: true,
            head: 0,
            reserved: 0,
            doorbell,
            address,
            memory: Some(place),
            vector,
            blocked: VecDeque::new(),
            dirty: false,
            invalid_head: 0,
            unreported_head: false,
        }
    }

    #[inline]
    fn used(&self) -> u32 {
        if self.tail >= self.head { self.tail - self.head } else { self.tail + self.entries - self.head }
    }

    #[inline]
    fn free(&self) -> u32 {
        (self.entries - 1).saturating_sub(self.used() + self.reserved + self.blocked.len() as u32)
    }

    /// Reserves up to `count_max` entries and returns their number. Reads the doorbell only when the known
    /// head leaves too few.
    #[inline]
    pub(super) fn reserve(&mut self, count_max: u32, doorbells: &ControllerDoorbells) -> u32 {
        let mut free = self.free();
        if free < count_max {
            self.refresh_head(doorbells);
            free = self.free();
        }
        let count = free.min(count_max);
        self.reserved += count;
        count
    }

    /// Whether the client wrote an invalid value to the head doorbell that was not reported yet. The caller
    /// reports it; each value is reported once.
    #[inline]
    pub(super) fn take_invalid_head(&mut self) -> bool {
        std::mem::take(&mut self.unreported_head)
    }

    /// Releases reserved entries.
    #[inline]
    pub(super) fn release(&mut self, count: u32) {
        self.reserved -= count;
    }

    fn refresh_head(&mut self, doorbells: &ControllerDoorbells) {
        let Some(head) = doorbells.load(self.doorbell) else { return };
        let consumed = if head >= self.head { head - self.head } else { head + self.entries - self.head };
        // The head cannot pass the tail.
        if head >= self.entries || consumed > self.used() {
            self.unreported_head |= self.invalid_head != head;
            self.invalid_head = head;
            return;
        }
        self.head = head;
    }

    /// Writes a completion for which an entry is reserved. False if it is blocked and will be written later.
    #[inline]
    pub(super) fn post(&mut self, result: u64, rest: u64) -> bool {
        self.reserved -= 1;
        self.post_unreserved(result, rest)
    }

    /// Writes completions, for each of which an entry is reserved. False if some are blocked and will be
    /// written later.
    #[inline]
    pub(super) fn post_all(&mut self, mut completions: impl ExactSizeIterator<Item = u64>) -> bool {
        let count = completions.len() as u32;
        self.reserved -= count;
        let fits = self.blocked.is_empty() && self.used() + count < self.entries;
        let Some(memory) = self.memory.as_ref().filter(|_| fits) else {
            completions.for_each(|rest| self.block(0, rest));
            return false;
        };
        let mut left = count;
        // Two runs at most: up to the end of the ring, and from its start.
        while left > 0 {
            let run = left.min(self.entries - self.tail);
            let at = memory.offset + u64::from(self.tail) * Self::BYTES;
            let phase = u64::from(self.phase) << PHASE;
            // The client polls the phase tag, so it must become visible last (Base 2.0, section 3.3.3.2).
            let pairs = completions.by_ref().map(|rest| (0, rest | phase));
            let stored = memory.region.store_u64_pairs(at, run as usize, pairs);
            assert_eq!(stored, run as usize, "an iterator of {count} completions ended early");
            left -= run;
            self.tail += run;
            if self.tail == self.entries {
                self.tail = 0;
                self.phase = !self.phase;
            }
        }
        self.dirty = true;
        true
    }

    /// Writes a completion without a reservation. False if it is blocked and will be written later.
    #[inline]
    pub(super) fn post_unreserved(&mut self, result: u64, rest: u64) -> bool {
        if self.memory.is_none() || !self.blocked.is_empty() || self.used() + 1 >= self.entries {
            self.block(result, rest);
            return false;
        }
        self.write(result, rest);
        true
    }

    #[cold]
    fn block(&mut self, result: u64, rest: u64) {
        self.blocked.push_back((result, rest));
    }

    /// Writes blocked completions until the queue is full.
    pub(super) fn flush_blocked(&mut self, doorbells: &ControllerDoorbells) {
        if self.blocked.is_empty() || self.memory.is_none() {
            return;
        }
        self.refresh_head(doorbells);
        while self.used() + 1 < self.entries
            && let Some((result, rest)) = self.blocked.pop_front()
        {
            self.write(result, rest);
        }
    }

    /// The index of its doorbell, and the head as last read.
    pub(super) fn known_head(&self) -> (u64, u32) {
        (self.doorbell, self.head)
    }

    /// Whether completions are blocked.
    pub(super) fn has_blocked(&self) -> bool {
        !self.blocked.is_empty()
    }

    #[inline(always)]
    fn write(&mut self, result: u64, rest: u64) {
        let Some(memory) = &self.memory else { return };
        let at = memory.offset + u64::from(self.tail) * Self::BYTES;
        // The client polls the phase tag, so it must become visible last (Base 2.0, section 3.3.3.2).
        memory.region.store_u64_pair(at, result, rest | u64::from(self.phase) << PHASE);
        self.tail += 1;
        if self.tail == self.entries {
            self.tail = 0;
            self.phase = !self.phase;
        }
        self.dirty = true;
    }

    /// Translates its address again, after DMA ranges have changed.
    pub(super) fn remap(&mut self, memory: &ClientMemory) {
        self.memory = QueueMemory::locate(memory, self.address, u64::from(self.entries) * Self::BYTES, true);
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.memory.as_ref().is_some_and(QueueMemory::is_poisoned)
    }
}

/// Bit of the phase tag in the upper quadword of a completion queue entry.
const PHASE: u32 = 48;

/// The upper quadword of a completion queue entry, without the phase tag.
#[inline]
pub(super) fn cqe_high(sqhd: u16, sqid: u16, cid: u16, status: Status) -> u64 {
    u64::from(sqhd) | u64::from(sqid) << 16 | u64::from(cid) << 32 | u64::from(status.field()) << (PHASE + 1)
}

#[cfg(test)]
mod tests {
    use wire_nvme::Cqe;

    use super::*;

    #[test]
    fn cqe_high_matches_the_wire_encoding() {
        let status = Status::new(3, 0x71).do_not_retry();
        let cqe = Cqe { result: 7, sqhd: 0x1234, sqid: 3, cid: 0xfedc, status, phase: true };
        let bytes = cqe.to_bytes();
        let high = cqe_high(0x1234, 3, 0xfedc, status) | 1 << PHASE;
        assert_eq!(bytes[8..], high.to_le_bytes());
    }
}
