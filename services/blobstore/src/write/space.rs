//! What is free: metadata pages and clusters.

use std::collections::BTreeSet;

use wire_blob::BitMask;

/// Numbers that are given out, the lowest first.
pub(super) struct Space {
    used: BitMask,
    free: u32,
    /// No number below is free.
    next: u32,
    /// Those with several owners: none of them can know that the others are gone.
    shared: BTreeSet<u32>,
}

impl Space {
    pub(super) fn new(used: BitMask, shared: BTreeSet<u32>) -> Space {
        Space { free: used.length() - used.count_ones(), used, next: 0, shared }
    }

    pub(super) fn free(&self) -> u32 {
        self.free
    }

    pub(super) fn used(&self) -> &BitMask {
        &self.used
    }

    pub(super) fn take(&mut self) -> Option<u32> {
        self.take_from(0)
    }

    /// Takes a number that is not below `first`.
    pub(super) fn take_from(&mut self, first: u32) -> Option<u32> {
        let number = self.used.next_zero(self.next.max(first))?;
        self.used.set(number);
        // Otherwise some below `first` may be free.
        if self.next >= first {
            self.next = number + 1;
        }
        self.free -= 1;
        Some(number)
    }

    /// Frees numbers, except those with other owners.
    ///
    /// # Panics
    /// If one is free already.
    pub(super) fn release(&mut self, numbers: impl IntoIterator<Item = u32>) {
        for number in numbers {
            if self.shared.contains(&number) {
                continue;
            }
            assert!(self.used.clear(number), "{number} of {:?} is free already", self.used.kind());
            self.next = self.next.min(number);
            self.free += 1;
        }
    }

    /// Adds numbers up to `length`.
    pub(super) fn extend(&mut self, length: u32) {
        self.free += length.saturating_sub(self.used.length());
        self.used.extend(length);
    }
}
