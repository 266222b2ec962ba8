//! Queues in the client's memory.

use std::collections::VecDeque;
use std::rc::Rc;

use controller::QueueLease;
use memory::SharedRegion;
use wire_nvme::{cqe, sqe};

use super::doorbells::Doorbells;
use super::memory::Memory;

/// Where a queue lies, while the client lets the device reach it.
pub(super) struct Place {
    region: Rc<SharedRegion>,
    offset: u64,
}

impl Place {
    /// The memory of a queue, if it is in one range that can be reached and, where wanted, written.
    pub(super) fn find(memory: &Memory, address: u64, bytes: u64, written: bool) -> Option<Place> {
        let spot = memory.find(address, bytes).filter(|spot| spot.writable || !written)?;
        Some(Place { region: spot.loan.region().clone(), offset: spot.offset })
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

/// A submission queue.
pub(super) struct Submission {
    pub(super) entries: u32,
    /// The next entry to fetch.
    pub(super) head: u32,
    pub(super) cqid: u16,
    /// Which doorbell is its tail.
    pub(super) doorbell: u64,
    pub(super) address: u64,
    /// `None` while the client has taken its memory away.
    pub(super) place: Option<Place>,
    /// Commands that were fetched and not answered.
    pub(super) in_flight: u32,
    pub(super) state: State,
    /// The right to its identifier; none for the admin queue.
    pub(super) _lease: Option<QueueLease>,
    /// A doorbell value that it cannot have, of which the client was told.
    pub(super) refused: u32,
    pub(super) commands: u64,
    pub(super) errors: u64,
}

/// What becomes of a submission queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Commands are fetched.
    Active,
    /// It was deleted by this admin command, which is answered when everything fetched has been.
    Deleting(u16),
    /// The controller was reset or shut down: what is under way is not answered.
    Closed,
}

impl Submission {
    pub(super) const BYTES: u64 = sqe::SIZE as u64;

    /// Fetches the next entries, as many as are wanted, fit, and lie in one piece; none without its memory.
    #[inline]
    pub(super) fn fetch(&mut self, wanted: u32, out: &mut [[u8; sqe::SIZE]]) -> u32 {
        let Some(place) = &self.place else { return 0 };
        let count = wanted.min(self.entries - self.head).min(out.len() as u32);
        let bytes = out[..count as usize].as_flattened_mut();
        place.region.read(place.offset + u64::from(self.head) * Self::BYTES, bytes);
        self.head += count;
        if self.head == self.entries {
            self.head = 0;
        }
        self.in_flight += count;
        self.commands += u64::from(count);
        count
    }

    /// How many entries there are before this tail, which is below the number of entries.
    #[inline]
    pub(super) fn waiting(&self, tail: u32) -> u32 {
        if tail >= self.head { tail - self.head } else { tail + self.entries - self.head }
    }

    /// Looks for its memory again.
    pub(super) fn replace(&mut self, memory: &Memory) {
        self.place = Place::find(memory, self.address, u64::from(self.entries) * Self::BYTES, false);
    }
}

/// A completion queue.
pub(super) struct Completion {
    pub(super) entries: u32,
    /// Where the next entry goes.
    tail: u32,
    phase: bool,
    /// How far the client has got, as far as was looked.
    head: u32,
    /// Entries that commands under way will need.
    reserved: u32,
    /// Which doorbell is its head.
    doorbell: u64,
    address: u64,
    /// `None` while the client has taken its memory away.
    place: Option<Place>,
    /// Raised when something was written.
    pub(super) vector: Option<u16>,
    /// Entries that found neither room nor memory.
    held: VecDeque<(u64, u64)>,
    /// Something was written since the last interrupt.
    pub(super) dirty: bool,
    refused: u32,
}

/// The client wrote a head that the queue cannot have.
pub(super) struct BadHead;

impl Completion {
    pub(super) const BYTES: u64 = cqe::SIZE as u64;

    pub(super) fn new(entries: u32, address: u64, place: Place, doorbell: u64, vector: Option<u16>) -> Self {
        Completion {
            entries,
            tail: 0,
            phase: true,
            head: 0,
            reserved: 0,
            doorbell,
            address,
            place: Some(place),
            vector,
            held: VecDeque::new(),
            dirty: false,
            refused: 0,
        }
    }

    #[inline]
    fn used(&self) -> u32 {
        if self.tail >= self.head { self.tail - self.head } else { self.tail + self.entries - self.head }
    }

    #[inline]
    fn free(&self) -> u32 {
        (self.entries - 1).saturating_sub(self.used() + self.reserved + self.held.len() as u32)
    }

    /// Reserves room for as many of `wanted` completions as there is, looking at the doorbell only where
    /// what is known does not suffice.
    #[inline]
    pub(super) fn reserve(&mut self, wanted: u32, doorbells: &Doorbells) -> Result<u32, BadHead> {
        let mut free = self.free();
        let mut looked = Ok(());
        if free < wanted {
            looked = self.look(doorbells);
            free = self.free();
        }
        let count = free.min(wanted);
        self.reserved += count;
        looked.map(|()| count).or_else(|bad| if count > 0 { Ok(count) } else { Err(bad) })
    }

    /// Gives room back that is not needed.
    #[inline]
    pub(super) fn release(&mut self, count: u32) {
        self.reserved -= count;
    }

    fn look(&mut self, doorbells: &Doorbells) -> Result<(), BadHead> {
        let Some(head) = doorbells.load(self.doorbell) else { return Ok(()) };
        let taken = if head >= self.head { head - self.head } else { head + self.entries - self.head };
        // No further than what was written.
        if head >= self.entries || taken > self.used() {
            let is_new = self.refused != head;
            self.refused = head;
            return if is_new { Err(BadHead) } else { Ok(()) };
        }
        self.head = head;
        Ok(())
    }

    /// Writes an entry for which there was a reservation. False if it is kept until there is room and memory.
    #[inline]
    pub(super) fn post(&mut self, result: u64, rest: u64) -> bool {
        self.reserved -= 1;
        self.post_unreserved(result, rest)
    }

    /// Writes an entry. False if it is kept until there is room and memory.
    #[inline]
    pub(super) fn post_unreserved(&mut self, result: u64, rest: u64) -> bool {
        if self.place.is_none() || !self.held.is_empty() || self.used() + 1 >= self.entries {
            self.hold(result, rest);
            return false;
        }
        self.write(result, rest);
        true
    }

    #[cold]
    fn hold(&mut self, result: u64, rest: u64) {
        self.held.push_back((result, rest));
    }

    /// Writes what was kept, as far as there is room.
    pub(super) fn unhold(&mut self, doorbells: &Doorbells) {
        if self.held.is_empty() || self.place.is_none() {
            return;
        }
        let _ = self.look(doorbells);
        while self.used() + 1 < self.entries
            && let Some((result, rest)) = self.held.pop_front()
        {
            self.write(result, rest);
        }
    }

    /// Its doorbell, and how far the client has got as far as was looked.
    pub(super) fn known_head(&self) -> (u64, u32) {
        (self.doorbell, self.head)
    }

    /// Whether something waits for room or memory.
    pub(super) fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    #[inline(always)]
    fn write(&mut self, result: u64, rest: u64) {
        let Some(place) = &self.place else { return };
        let at = place.offset + u64::from(self.tail) * Self::BYTES;
        place.region.store_u64(at, result);
        // The phase tag is what the client waits for: it becomes visible last (Base 2.0, section 3.3.3.2).
        place.region.store_u64(at + 8, rest | u64::from(self.phase) << PHASE);
        self.tail += 1;
        if self.tail == self.entries {
            self.tail = 0;
            self.phase = !self.phase;
        }
        self.dirty = true;
    }

    /// Looks for its memory again.
    pub(super) fn replace(&mut self, memory: &Memory) {
        self.place = Place::find(memory, self.address, u64::from(self.entries) * Self::BYTES, true);
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.place.as_ref().is_some_and(Place::is_poisoned)
    }
}

/// Where the phase tag is in the second half of an entry.
const PHASE: u32 = 48;

/// The second half of an entry, but for the phase tag.
#[inline]
pub(super) fn rest(sqhd: u16, sqid: u16, cid: u16, status: ring::Status) -> u64 {
    u64::from(sqhd) | u64::from(sqid) << 16 | u64::from(cid) << 32 | u64::from(status.field()) << (PHASE + 1)
}

#[cfg(test)]
mod tests {
    use ring::Status;
    use wire_nvme::Cqe;

    use super::*;

    #[test]
    fn entries_are_what_the_encoding_says() {
        let status = Status::new(3, 0x71).do_not_retry();
        let cqe = Cqe { result: 7, sqhd: 0x1234, sqid: 3, cid: 0xfedc, status, phase: true };
        let bytes = cqe.to_bytes();
        let high = rest(0x1234, 3, 0xfedc, status) | 1 << PHASE;
        assert_eq!(bytes[8..], high.to_le_bytes());
    }
}
