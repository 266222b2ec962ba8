//! Deadlines by time: a wheel of short spans, and a heap for what is further off.
//!
//! Putting one in and taking one out are a few instructions each, however many there are. Within a
//! span, deadlines come out in any order; none comes out early, and none that is due stays.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Spans of the wheel: 64 words of 64 bits, over which one word more keeps track.
const SPANS: u64 = 4096;
const NONE: u16 = u16::MAX;

/// Slots, by deadline.
pub(super) struct Calendar {
    /// Log2 of the nanoseconds of a span.
    shift: u32,
    /// The span of the last look; everything before it is out.
    at: u64,
    heads: Box<[u16; SPANS as usize]>,
    /// By slot.
    next: Box<[u16]>,
    due: Box<[u64]>,
    /// A bit a span that is not empty, and a bit a word that is not zero.
    words: [u64; 64],
    word_bits: u64,
    /// Beyond the wheel.
    far: BinaryHeap<Reverse<(u64, u16)>>,
    /// No deadline is before this; `u64::MAX` where there is none.
    earliest: u64,
}

impl Calendar {
    /// For slots below `slots`, in spans of 2^`shift` nanoseconds, from `now` on.
    pub(super) fn new(slots: usize, shift: u32, now: u64) -> Calendar {
        assert!(slots < usize::from(NONE), "{slots} slots");
        Calendar {
            shift,
            at: now >> shift,
            heads: Box::new([NONE; SPANS as usize]),
            next: vec![NONE; slots].into_boxed_slice(),
            due: vec![0; slots].into_boxed_slice(),
            words: [0; 64],
            word_bits: 0,
            far: BinaryHeap::with_capacity(64),
            earliest: u64::MAX,
        }
    }

    /// Puts a slot in that is not in yet.
    #[inline]
    pub(super) fn insert(&mut self, slot: u16, due: u64) {
        self.earliest = self.earliest.min(due);
        let span = (due >> self.shift).max(self.at);
        if span - self.at >= SPANS {
            self.far.push(Reverse((due, slot)));
            return;
        }
        self.due[usize::from(slot)] = due;
        let place = (span % SPANS) as usize;
        self.next[usize::from(slot)] = self.heads[place];
        self.heads[place] = slot;
        self.words[place / 64] |= 1 << (place % 64);
        self.word_bits |= 1 << (place / 64);
    }

    /// When the next is due, at the earliest; `None` where there is none.
    #[inline]
    pub(super) fn earliest(&self) -> Option<u64> {
        (self.earliest != u64::MAX).then_some(self.earliest)
    }

    /// Takes out what is due and tells `take` of each.
    #[inline]
    pub(super) fn expire(&mut self, now: u64, mut take: impl FnMut(u16)) {
        if now < self.earliest {
            return;
        }
        let end = (now >> self.shift).max(self.at);
        while let Some(span) = self.first_span()
            && span < end
        {
            let mut slot = self.empty((span % SPANS) as usize);
            while slot != NONE {
                let next = self.next[usize::from(slot)];
                take(slot);
                slot = next;
            }
        }
        self.at = end;
        // Of the span that is not over, only what is due.
        let place = (end % SPANS) as usize;
        if self.words[place / 64] >> (place % 64) & 1 != 0 {
            let mut slot = self.empty(place);
            while slot != NONE {
                let next = self.next[usize::from(slot)];
                let due = self.due[usize::from(slot)];
                if due <= now {
                    take(slot)
                } else {
                    self.insert(slot, due)
                }
                slot = next;
            }
        }
        self.bring_near(now, &mut take);
        self.find_earliest();
    }

    /// Takes everything out.
    pub(super) fn drain(&mut self, mut take: impl FnMut(u16)) {
        while let Some(span) = self.first_span() {
            let mut slot = self.empty((span % SPANS) as usize);
            while slot != NONE {
                let next = self.next[usize::from(slot)];
                take(slot);
                slot = next;
            }
        }
        self.far.drain().for_each(|Reverse((_, slot))| take(slot));
        self.earliest = u64::MAX;
    }

    fn bring_near(&mut self, now: u64, take: &mut impl FnMut(u16)) {
        while let Some(Reverse((due, slot))) = self.far.peek().copied()
            && (due <= now || (due >> self.shift) - self.at < SPANS)
        {
            self.far.pop();
            if due <= now { take(slot) } else { self.insert(slot, due) }
        }
    }

    #[inline]
    fn find_earliest(&mut self) {
        let mut earliest = self.far.peek().map_or(u64::MAX, |Reverse((due, _))| *due);
        if let Some(span) = self.first_span() {
            let mut slot = self.heads[(span % SPANS) as usize];
            while slot != NONE {
                earliest = earliest.min(self.due[usize::from(slot)]);
                slot = self.next[usize::from(slot)];
            }
        }
        self.earliest = earliest;
    }

    /// The first span at or after the last look that is not empty.
    #[inline]
    fn first_span(&self) -> Option<u64> {
        if self.word_bits == 0 {
            return None;
        }
        let place = (self.at % SPANS) as u32;
        let (word, bit) = (place / 64, place % 64);
        let here = self.words[word as usize] >> bit;
        let ahead = if here != 0 {
            here.trailing_zeros()
        } else {
            // The words after this one, then those before it, then the rest of this one.
            let turned = self.word_bits.rotate_right((word + 1) % 64);
            let words = turned.trailing_zeros() + 1;
            let found = self.words[((word + words) % 64) as usize];
            words * 64 - bit + found.trailing_zeros()
        };
        Some(self.at + u64::from(ahead))
    }

    #[inline]
    fn empty(&mut self, place: usize) -> u16 {
        self.words[place / 64] &= !(1 << (place % 64));
        if self.words[place / 64] == 0 {
            self.word_bits &= !(1 << (place / 64));
        }
        std::mem::replace(&mut self.heads[place], NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn everything_comes_out_once_when_it_is_due_and_never_before() {
        for (shift, reach) in [(0, 3000), (4, 100_000), (7, 2_000_000), (8, 500)] {
            let mut random = Random::new(u64::from(shift) + 1);
            let mut calendar = Calendar::new(512, shift, 12_345);
            let mut now = 12_345;
            let mut due = vec![None; 512];
            for _ in 0..200_000 {
                if random.below(3) > 0 {
                    if let Some(slot) = (0..512).find(|slot| due[*slot].is_none()) {
                        let at = now + random.below(reach);
                        due[slot] = Some(at);
                        calendar.insert(slot as u16, at);
                    }
                } else {
                    now += random.below(reach / 8);
                    let mut out = Vec::new();
                    calendar.expire(now, |slot| out.push(slot));
                    for slot in out {
                        let at = due[usize::from(slot)].take().expect("out once");
                        assert!(at <= now, "{at} at {now}");
                    }
                    let late = due.iter().flatten().filter(|at| **at <= now).count();
                    assert_eq!(late, 0, "shift {shift}, {now}");
                    assert_eq!(calendar.earliest(), due.iter().flatten().min().copied());
                }
            }
            let mut out = 0;
            calendar.drain(|_| out += 1);
            assert_eq!(out, due.iter().flatten().count());
            assert_eq!(calendar.earliest(), None);
        }
    }

    #[test]
    fn a_long_pause_loses_nothing() {
        let mut calendar = Calendar::new(4, 7, 0);
        for (slot, due) in [(0, 100), (1, 400_000), (2, 900_000), (3, 70_000_000_000)] {
            calendar.insert(slot, due);
        }
        let mut out = Vec::new();
        calendar.expire(60_000_000_000, |slot| out.push(slot));
        out.sort_unstable();
        assert_eq!(out, [0, 1, 2]);
        assert_eq!(calendar.earliest(), Some(70_000_000_000));
        calendar.expire(u64::MAX >> 1, |slot| out.push(slot));
        assert_eq!(out, [0, 1, 2, 3]);
    }
}
