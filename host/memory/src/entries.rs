//! The entries of a queue that a device shares.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Buffer, DeviceBuffer};

/// A ring of entries, of `WORDS` little-endian words each, that a device reads or writes.
///
/// Their number is a power of two, and positions go round: every position names an entry. So there is nothing left
/// to check when one is written or looked at.
pub struct Entries<const WORDS: usize> {
    memory: DeviceBuffer,
    mask: u32,
}

impl<const WORDS: usize> Entries<WORDS> {
    /// A ring at the start of `memory`.
    ///
    /// # Panics
    /// If `count` is no power of two, or the memory is too short or begins at no word.
    pub fn new(memory: DeviceBuffer, count: u32) -> Entries<WORDS> {
        assert!(count.is_power_of_two(), "{count} entries");
        let bytes = u64::from(count) * WORDS as u64 * 8;
        assert!(bytes <= memory.len(), "{count} entries take {bytes} bytes and not {}", memory.len());
        assert!(memory.as_ptr().cast::<u64>().is_aligned(), "a ring of words begins at none");
        Entries { memory, mask: count - 1 }
    }

    /// The buffer, to find out where a device sees it.
    pub fn buffer(&self) -> &Buffer {
        self.memory.buffer()
    }

    /// Number of entries, less one: what of a position is an index.
    #[inline(always)]
    pub fn mask(&self) -> u32 {
        self.mask
    }

    /// The ring for a loop over it: what a processor's registers hold of it, since the writes of the loop might
    /// change anything else.
    #[inline(always)]
    pub fn cursor(&self) -> Cursor<'_, WORDS> {
        Cursor { first: self.memory.as_ptr().cast(), mask: self.mask, ring: PhantomData }
    }

    /// Makes every byte zero.
    pub fn clear(&self) {
        for position in 0..=self.mask {
            self.cursor().write(position, &[0; WORDS]);
        }
    }
}

/// The same ring, for as long as it is borrowed.
#[derive(Clone, Copy)]
pub struct Cursor<'a, const WORDS: usize> {
    first: *mut u64,
    mask: u32,
    ring: PhantomData<&'a Entries<WORDS>>,
}

impl<const WORDS: usize> Cursor<'_, WORDS> {
    /// Writes the entry at a position, in any order of its words.
    #[inline(always)]
    pub fn write(&self, position: u32, words: &[u64; WORDS]) {
        let entry = self.entry(position);
        for (at, word) in words.iter().enumerate() {
            // SAFETY: `at` is below WORDS, so that this is inside the entry.
            let to = unsafe { entry.add(at) };
            // SAFETY: inside the memory, which is ours to write and aligned as `Entries::new` checked. No reference to
            // it exists.
            unsafe { to.write(word.to_le()) };
        }
    }

    /// Loads word `at` of the entry at a position, with acquire ordering.
    ///
    /// # Panics
    /// If entries have no such word.
    #[inline(always)]
    pub fn load(&self, position: u32, at: usize) -> u64 {
        assert!(at < WORDS, "word {at} of an entry of {WORDS}");
        // SAFETY: inside the entry, as was just checked.
        let from = unsafe { self.entry(position).add(at) };
        // SAFETY: inside the memory and aligned, as `Entries::new` checked; a device's accesses are no data race of
        // this program's, and ours are this one and `write`, on one core.
        let word = unsafe { AtomicU64::from_ptr(from) };
        u64::from_le(word.load(Ordering::Acquire))
    }

    #[inline(always)]
    fn entry(&self, position: u32) -> *mut u64 {
        let index = (position & self.mask) as usize;
        // SAFETY: an index of at most `mask`, and `Entries::new` checked that so many are inside the memory, which
        // is borrowed for as long as this is.
        unsafe { self.first.add(index * WORDS) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, Config, Pool};

    fn ring(bytes: usize, count: u32) -> Entries<2> {
        let config = Config { limit_bytes: 4 << 20, hugepages: false, ..Config::default() };
        let pool = Pool::new(&Arena::new(config));
        Entries::new(DeviceBuffer::new(pool.take(bytes).unwrap()), count)
    }

    #[test]
    fn entries_lie_one_after_another_and_positions_go_round() {
        let memory = ring(4096, 256);
        let ring = memory.cursor();
        ring.write(257, &[0x0807_0605_0403_0201, 9]);
        ring.write(u32::MAX, &[u64::MAX; 2]);
        let mut bytes = [0; 48];
        memory.memory.read(0, &mut bytes);
        assert_eq!(bytes[16..26], [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]);
        assert!(bytes[..16].iter().chain(&bytes[25..]).all(|byte| *byte == 0));
        assert_eq!((ring.load(1, 1), ring.load(255, 0), ring.load(254, 1)), (9, u64::MAX, 0));
        memory.clear();
        assert_eq!((ring.load(1, 0), ring.load(255, 1)), (0, 0));
    }

    #[test]
    #[should_panic(expected = "3 entries")]
    fn a_number_that_does_not_go_round_is_refused() {
        ring(4096, 3);
    }

    #[test]
    #[should_panic(expected = "entries take")]
    fn a_short_memory_is_refused() {
        ring(4096, 512);
    }
}
