//! A timer wheel with a heap for deadlines beyond its range.
//!
//! Insertion and expiry take a few instructions each, independent of the number of timers. Within a tick,
//! timers expire in any order; no timer expires early, and [`expire`](TimerWheel::expire) leaves none that
//! is due.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Ticks of the wheel: a two-level bitmap of 64 words of 64 bits marks those that have timers.
const TICKS: u64 = 4096;
const NONE: u16 = u16::MAX;
/// The deadline of a wheel without timers.
const NEVER: u64 = u64::MAX;

/// Request slots ordered by deadline.
pub(super) struct TimerWheel {
    /// Log2 of the tick length in nanoseconds.
    shift: u32,
    /// The current tick: all earlier timers have expired.
    current: u64,
    /// First slot of the list of each tick.
    heads: Box<[u16; TICKS as usize]>,
    /// By slot: the next slot of the same tick.
    next: Box<[u16]>,
    /// By slot: the deadline.
    due: Box<[u64]>,
    /// One bit per tick that has timers, and one bit per non-zero word.
    words: [u64; 64],
    word_bits: u64,
    /// Timers beyond the range of the wheel.
    overflow: BinaryHeap<Reverse<(u64, u16)>>,
    /// The earliest deadline, or [`NEVER`].
    earliest: u64,
}

impl TimerWheel {
    /// A wheel for slots below `slots`, with ticks of 2^`shift` nanoseconds, starting at `now`.
    pub(super) fn new(slots: usize, shift: u32, now: u64) -> TimerWheel {
        assert!(slots < usize::from(NONE), "{slots} slots");
        TimerWheel {
            shift,
            current: now >> shift,
            heads: Box::new([NONE; TICKS as usize]),
            next: vec![NONE; slots].into_boxed_slice(),
            due: vec![0; slots].into_boxed_slice(),
            words: [0; 64],
            word_bits: 0,
            overflow: BinaryHeap::with_capacity(64),
            earliest: NEVER,
        }
    }

    /// Adds a timer for a slot that has none.
    #[inline]
    pub(super) fn insert(&mut self, slot: u16, due: u64) {
        self.earliest = self.earliest.min(due);
        let tick = (due >> self.shift).max(self.current);
        if tick - self.current >= TICKS {
            self.overflow.push(Reverse((due, slot)));
            return;
        }
        self.due[usize::from(slot)] = due;
        let index = (tick % TICKS) as usize;
        self.next[usize::from(slot)] = self.heads[index];
        self.heads[index] = slot;
        self.words[index / 64] |= 1 << (index % 64);
        self.word_bits |= 1 << (index / 64);
    }

    /// The earliest deadline; `None` if there is none.
    #[inline]
    pub(super) fn earliest(&self) -> Option<u64> {
        (self.earliest != NEVER).then_some(self.earliest)
    }

    /// Removes the timers that are due and passes each slot to `take`.
    #[inline]
    pub(super) fn expire(&mut self, now: u64, mut take: impl FnMut(u16)) {
        if now < self.earliest {
            return;
        }
        let end = (now >> self.shift).max(self.current);
        while let Some(tick) = self.first_tick()
            && tick < end
        {
            let mut slot = self.take_list((tick % TICKS) as usize);
            while slot != NONE {
                let next = self.next[usize::from(slot)];
                take(slot);
                slot = next;
            }
        }
        self.current = end;
        // In the current tick, only the timers that are due.
        let index = (end % TICKS) as usize;
        if self.words[index / 64] >> (index % 64) & 1 != 0 {
            let mut slot = self.take_list(index);
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
        self.cascade(now, &mut take);
        self.update_earliest();
    }

    /// Removes all timers.
    pub(super) fn drain(&mut self, mut take: impl FnMut(u16)) {
        while let Some(tick) = self.first_tick() {
            let mut slot = self.take_list((tick % TICKS) as usize);
            while slot != NONE {
                let next = self.next[usize::from(slot)];
                take(slot);
                slot = next;
            }
        }
        self.overflow.drain().for_each(|Reverse((_, slot))| take(slot));
        self.earliest = NEVER;
    }

    fn cascade(&mut self, now: u64, take: &mut impl FnMut(u16)) {
        while let Some(Reverse((due, slot))) = self.overflow.peek().copied()
            && (due <= now || (due >> self.shift) - self.current < TICKS)
        {
            self.overflow.pop();
            if due <= now { take(slot) } else { self.insert(slot, due) }
        }
    }

    #[inline]
    fn update_earliest(&mut self) {
        let mut earliest = self.overflow.peek().map_or(NEVER, |Reverse((due, _))| *due);
        if let Some(tick) = self.first_tick() {
            let mut slot = self.heads[(tick % TICKS) as usize];
            while slot != NONE {
                earliest = earliest.min(self.due[usize::from(slot)]);
                slot = self.next[usize::from(slot)];
            }
        }
        self.earliest = earliest;
    }

    /// The first tick with timers, at or after the current one.
    #[inline]
    fn first_tick(&self) -> Option<u64> {
        if self.word_bits == 0 {
            return None;
        }
        let index = (self.current % TICKS) as u32;
        let (word, bit) = (index / 64, index % 64);
        let here = self.words[word as usize] >> bit;
        let ahead = if here != 0 {
            here.trailing_zeros()
        } else {
            // The following words, then the preceding ones, then the rest of this word.
            let rotated = self.word_bits.rotate_right((word + 1) % 64);
            let words = rotated.trailing_zeros() + 1;
            let found = self.words[((word + words) % 64) as usize];
            words * 64 - bit + found.trailing_zeros()
        };
        Some(self.current + u64::from(ahead))
    }

    #[inline]
    fn take_list(&mut self, index: usize) -> u16 {
        self.words[index / 64] &= !(1 << (index % 64));
        if self.words[index / 64] == 0 {
            self.word_bits &= !(1 << (index / 64));
        }
        std::mem::replace(&mut self.heads[index], NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::ModelRng;

    #[test]
    fn every_timer_expires_once_and_never_early() {
        for (shift, delay_max) in [(0, 3000), (4, 100_000), (7, 2_000_000), (8, 500)] {
            let mut random = ModelRng::new(u64::from(shift) + 1);
            let mut wheel = TimerWheel::new(512, shift, 12_345);
            let mut now = 12_345;
            let mut due = vec![None; 512];
            for _ in 0..200_000 {
                if random.below(3) > 0 {
                    if let Some(slot) = (0..512).find(|slot| due[*slot].is_none()) {
                        let deadline = now + random.below(delay_max);
                        due[slot] = Some(deadline);
                        wheel.insert(slot as u16, deadline);
                    }
                } else {
                    now += random.below(delay_max / 8);
                    let mut expired = Vec::new();
                    wheel.expire(now, |slot| expired.push(slot));
                    for slot in expired {
                        let deadline = due[usize::from(slot)].take().expect("expires once");
                        assert!(deadline <= now, "{deadline} at {now}");
                    }
                    let late = due.iter().flatten().filter(|deadline| **deadline <= now).count();
                    assert_eq!(late, 0, "shift {shift}, {now}");
                    assert_eq!(wheel.earliest(), due.iter().flatten().min().copied());
                }
            }
            let mut expired = 0;
            wheel.drain(|_| expired += 1);
            assert_eq!(expired, due.iter().flatten().count());
            assert_eq!(wheel.earliest(), None);
        }
    }

    #[test]
    fn a_long_gap_between_polls_loses_no_timer() {
        let mut wheel = TimerWheel::new(4, 7, 0);
        for (slot, due) in [(0, 100), (1, 400_000), (2, 900_000), (3, 70_000_000_000)] {
            wheel.insert(slot, due);
        }
        let mut expired = Vec::new();
        wheel.expire(60_000_000_000, |slot| expired.push(slot));
        expired.sort_unstable();
        assert_eq!(expired, [0, 1, 2]);
        assert_eq!(wheel.earliest(), Some(70_000_000_000));
        wheel.expire(u64::MAX >> 1, |slot| expired.push(slot));
        assert_eq!(expired, [0, 1, 2, 3]);
    }
}
