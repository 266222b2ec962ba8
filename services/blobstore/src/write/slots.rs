//! Where copies of pages are written before the pages are replaced in place.

use wire_blob::{CopyTarget, PageCopy};

/// A page for a copy. There is at most one copy of a target.
struct CopySlot {
    offset: u64,
    target: Option<CopyTarget>,
    state: SlotState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    /// The copy, if there is one, is that of a page that is durable.
    Free,
    /// The copy is written, and the page is not yet.
    Busy,
    /// The page is written. A flush after this one makes it durable.
    Written { flushes: u64 },
}

#[derive(Default)]
pub(super) struct CopySlots {
    slots: Vec<CopySlot>,
    number: u64,
    next: usize,
}

impl CopySlots {
    pub(super) fn new(places: impl Iterator<Item = u64>) -> CopySlots {
        let slot = |offset| CopySlot { offset, target: None, state: SlotState::Free };
        CopySlots { slots: places.map(slot).collect(), number: 0, next: 0 }
    }

    /// Where all of them are.
    pub(super) fn offsets(&self) -> impl Iterator<Item = u64> + '_ {
        self.slots.iter().map(|slot| slot.offset)
    }

    /// Whether more than half of the slots are free: enough that a few may be taken for long.
    pub(super) fn has_many_free(&self) -> bool {
        let free = self.slots.iter().filter(|slot| slot.state == SlotState::Free).count();
        free > self.slots.len() / 2
    }

    /// Takes a slot for a copy: where to write what. `None` if all are in use, or the target's is, unless the
    /// caller has that, and no write to it is in flight.
    pub(super) fn take(
        &mut self,
        target: CopyTarget,
        content: &[u8],
        is_again: bool,
    ) -> Option<(u64, Vec<u8>)> {
        let same = self.slots.iter().position(|slot| slot.target == Some(target));
        let count = self.slots.len();
        let is_free = |at: &usize| self.slots[*at].state == SlotState::Free;
        let at = match same {
            Some(at) => Some(at).filter(|at| is_again || is_free(at))?,
            None => (0..count).map(|step| (self.next + step) % count).find(is_free)?,
        };
        self.number += 1;
        let copy = PageCopy { target, number: self.number, content: content.to_vec() };
        // What is written in place was made so that a copy is possible.
        let bytes = copy.encode().expect("a page of which a copy is possible").to_vec();
        self.next = (at + 1) % count;
        let slot = &mut self.slots[at];
        slot.target = Some(target);
        slot.state = SlotState::Busy;
        Some((slot.offset, bytes))
    }

    /// The page itself is written, after `flushes` began.
    pub(super) fn written(&mut self, target: CopyTarget, flushes: u64) {
        let slot = self.slots.iter_mut().find(|slot| slot.target == Some(target));
        if let Some(slot) = slot.filter(|slot| slot.state == SlotState::Busy) {
            slot.state = SlotState::Written { flushes };
        }
    }

    /// The flush with this number, counted from 1, has completed, and all before it.
    pub(super) fn flushed(&mut self, flush: u64) {
        for slot in &mut self.slots {
            if matches!(slot.state, SlotState::Written { flushes } if flushes < flush) {
                slot.state = SlotState::Free;
            }
        }
    }

    /// Whether a flush would free a slot.
    pub(super) fn needs_flush(&self) -> bool {
        self.slots.iter().any(|slot| matches!(slot.state, SlotState::Written { .. }))
    }

    /// Forgets the copies of pages that are to be free; where they are, to be zeroed. Then they are
    /// [`erased`](Self::erased).
    pub(super) fn forget(&mut self, pages: &[u32]) -> Vec<u64> {
        let mut offsets = Vec::new();
        for slot in &mut self.slots {
            if matches!(slot.target, Some(CopyTarget::Page(page)) if pages.contains(&page)) {
                (slot.target, slot.state) = (None, SlotState::Busy);
                offsets.push(slot.offset);
            }
        }
        offsets
    }

    /// Zeroes were written over copies, and are durable.
    pub(super) fn erased(&mut self, offsets: &[u64]) {
        let erased = self.slots.iter_mut().filter(|slot| offsets.contains(&slot.offset));
        erased.for_each(|slot| slot.state = SlotState::Free);
    }
}
