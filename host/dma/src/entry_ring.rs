//! Ring of fixed-size queue entries in memory that a device shares.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Buffer, DeviceBuffer};

/// A ring of entries, of `WORDS` little-endian 64-bit words each, that a device reads or writes.
///
/// The number of entries is a power of two and positions wrap, so every position is valid and accesses need no
/// bounds check.
pub struct EntryRing<const WORDS: usize> {
    memory: DeviceBuffer,
    mask: u32,
}

impl<const WORDS: usize> EntryRing<WORDS> {
    /// A ring at the start of `memory`.
    ///
    /// # Panics
    /// If `count` is not a power of two, or the memory is too short or not aligned to a word.
    pub fn new(memory: DeviceBuffer, count: u32) -> EntryRing<WORDS> {
        assert!(count.is_power_of_two(), "{count} entries");
        let bytes = u64::from(count) * WORDS as u64 * 8;
        assert!(bytes <= memory.len(), "{count} entries take {bytes} bytes and not {}", memory.len());
        assert!(memory.as_ptr().cast::<u64>().is_aligned(), "the memory of a ring is not aligned to a word");
        EntryRing { memory, mask: count - 1 }
    }

    /// The underlying buffer, to look up its device address.
    pub fn buffer(&self) -> &Buffer {
        self.memory.buffer()
    }

    /// Number of entries less one; `position & mask` is the index.
    #[inline(always)]
    pub fn mask(&self) -> u32 {
        self.mask
    }

    /// Copies address and mask into a view, for loops over the ring: the compiler can keep them in registers
    /// across the loop's writes to the ring.
    #[inline(always)]
    pub fn view(&self) -> EntryRingView<'_, WORDS> {
        EntryRingView { first: self.memory.as_ptr().cast(), mask: self.mask, ring: PhantomData }
    }

    /// Sets every byte to zero.
    pub fn clear(&self) {
        for position in 0..=self.mask {
            self.view().write(position, &[0; WORDS]);
        }
    }
}

/// A borrowed [`EntryRing`] as address and mask; see [`EntryRing::view`].
#[derive(Clone, Copy)]
pub struct EntryRingView<'a, const WORDS: usize> {
    first: *mut u64,
    mask: u32,
    ring: PhantomData<&'a EntryRing<WORDS>>,
}

impl<const WORDS: usize> EntryRingView<'_, WORDS> {
    /// Writes the entry at `position`; the order of the word stores is unspecified.
    #[inline(always)]
    pub fn write(&self, position: u32, words: &[u64; WORDS]) {
        let entry = self.entry(position);
        for (at, word) in words.iter().enumerate() {
            // SAFETY: `at` is below WORDS, so this is inside the entry.
            let to = unsafe { entry.add(at) };
            // SAFETY: inside the memory, which is writable, and aligned as `EntryRing::new` checked. No reference to
            // it exists.
            unsafe { to.write(word.to_le()) };
        }
    }

    /// Loads word `at` of the entry at `position`, with acquire ordering.
    ///
    /// # Panics
    /// If `at` is not below `WORDS`.
    #[inline(always)]
    pub fn load(&self, position: u32, at: usize) -> u64 {
        assert!(at < WORDS, "word {at} of an entry of {WORDS}");
        // SAFETY: inside the entry, as was just checked.
        let from = unsafe { self.entry(position).add(at) };
        // SAFETY: inside the memory and aligned, as `EntryRing::new` checked; a device's accesses are not a data race
        // in this program, whose only accesses are this one and `write`, on one core.
        let word = unsafe { AtomicU64::from_ptr(from) };
        u64::from_le(word.load(Ordering::Acquire))
    }

    #[inline(always)]
    fn entry(&self, position: u32) -> *mut u64 {
        let index = (position & self.mask) as usize;
        // SAFETY: the index is at most `mask`, and `EntryRing::new` checked that `mask + 1` entries are inside the
        // memory, which is borrowed for as long as this view.
        unsafe { self.first.add(index * WORDS) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, ArenaConfig, Pool};

    fn ring(bytes: usize, count: u32) -> EntryRing<2> {
        let config = ArenaConfig { limit_bytes: 4 << 20, hugepages: false, ..ArenaConfig::default() };
        let pool = Pool::new(&Arena::new(config));
        EntryRing::new(DeviceBuffer::new(pool.take(bytes).unwrap()), count)
    }

    #[test]
    fn entries_are_contiguous_and_positions_wrap() {
        let memory = ring(4096, 256);
        let ring = memory.view();
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
    fn a_count_that_is_not_a_power_of_two_is_rejected() {
        ring(4096, 3);
    }

    #[test]
    #[should_panic(expected = "entries take")]
    fn a_memory_that_is_too_short_is_rejected() {
        ring(4096, 512);
    }
}
