//! Access to bytes that others may write at any time.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::Buffer;

/// Bytes that a device, a peer or another core may write at any time.
///
/// No Rust reference to the bytes ever exists; they are copied in and out. Concurrent copies may mix old
/// and new bytes, as on a disk, and copies are unordered unless the callers synchronise them. Word loads
/// have acquire and word stores release ordering for that purpose. [`SharedRegion`] and
/// [`DeviceBuffer`](crate::DeviceBuffer) own the memory and dereference to this type.
pub struct VolatileBytes {
    pub(super) start: NonNull<u8>,
    pub(super) bytes: usize,
    pub(super) writable: bool,
}

macro_rules! words {
    ($($load:ident, $store:ident, $at:ident, $word:ident, $atomic:ident;)*) => {$(
        #[doc = concat!("Loads the ", stringify!($word), " at `offset`, with acquire ordering.\n\n")]
        /// # Panics
        /// If the word is not inside the memory or not aligned.
        #[inline]
        pub fn $load(&self, offset: u64) -> $word {
            self.$at(offset).load(Ordering::Acquire)
        }

        #[doc = concat!("Stores a ", stringify!($word), " at `offset`, with release ordering.\n\n")]
        /// # Panics
        /// If the word is not inside the memory or not aligned, or the memory is read-only.
        #[inline]
        pub fn $store(&self, offset: u64, value: $word) {
            assert!(self.writable, "a store to read-only memory");
            self.$at(offset).store(value, Ordering::Release);
        }

        #[inline]
        fn $at(&self, offset: u64) -> &std::sync::atomic::$atomic {
            let at = self.range(offset, size_of::<$word>());
            assert!(at.addr().is_multiple_of(size_of::<$word>()), "a word at {offset} is not aligned");
            // SAFETY: inside the memory and aligned, as was just checked; the owner of this value keeps
            // it mapped, and other accesses are atomic or by design unordered copies.
            unsafe { std::sync::atomic::$atomic::from_ptr(at.cast()) }
        }
    )*};
}

impl VolatileBytes {
    /// # Safety
    /// The bytes must stay mapped, and writable if `writable`, for as long as the value is used.
    pub(crate) unsafe fn new(start: NonNull<u8>, bytes: usize, writable: bool) -> VolatileBytes {
        VolatileBytes { start, bytes, writable }
    }

    /// Number of bytes.
    #[inline]
    pub fn len(&self) -> u64 {
        self.bytes as u64
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Address of the first byte, for a device or the kernel.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Stores two words at `offset`, the second after the first, each with release ordering.
    ///
    /// # Panics
    /// If the words are not inside the memory or not aligned, or the memory is read-only.
    #[inline]
    pub fn store_u64_pair(&self, offset: u64, first: u64, second: u64) {
        assert!(self.writable, "a store to read-only memory");
        let at = self.range(offset, 16);
        assert!(at.addr().is_multiple_of(8), "a word at {offset} is not aligned");
        // SAFETY: inside the memory and aligned, as was just checked; as in `store_u64`.
        let words = unsafe { &*at.cast::<[AtomicU64; 2]>() };
        words[0].store(first, Ordering::Release);
        words[1].store(second, Ordering::Release);
    }

    /// Stores up to `count` pairs of words at `offset`, each pair as [`store_u64_pair`](Self::store_u64_pair) does. They
    /// are checked once for all. Takes no more than `count` pairs of the iterator, and returns how many it gave.
    ///
    /// # Panics
    /// If `count` pairs are not inside the memory or not aligned, or the memory is read-only.
    #[inline]
    pub fn store_u64_pairs(
        &self,
        offset: u64,
        count: usize,
        pairs: impl Iterator<Item = (u64, u64)>,
    ) -> usize {
        let cells = self.u64_pairs(offset, count);
        let mut stored = 0;
        for (cell, (first, second)) in cells.iter().zip(pairs) {
            cell[0].store(first, Ordering::Release);
            cell[1].store(second, Ordering::Release);
            stored += 1;
        }
        stored
    }

    /// `count` pairs of words at `offset`, which are checked once for many accesses: a table of descriptors, for example.
    ///
    /// # Panics
    /// If they are not inside the memory or not aligned, or the memory is read-only.
    #[inline]
    pub fn u64_pairs(&self, offset: u64, count: usize) -> &[[AtomicU64; 2]] {
        assert!(self.writable, "a store to read-only memory");
        let bytes = count.checked_mul(16).expect("the pairs are counted in memory");
        let at = self.range(offset, bytes);
        assert!(at.addr().is_multiple_of(8), "a word at {offset} is not aligned");
        // SAFETY: `count` pairs are inside the memory and aligned, as was just checked; as in `store_u64`.
        unsafe { std::slice::from_raw_parts(at.cast::<[AtomicU64; 2]>(), count) }
    }

    /// Stores two words at `offset`, the second after the first, each with release ordering.
    ///
    /// # Panics
    /// If the words are not inside the memory or not aligned, or the memory is read-only.
    #[inline]
    pub fn store_u32_pair(&self, offset: u64, first: u32, second: u32) {
        assert!(self.writable, "a store to read-only memory");
        let at = self.range(offset, 8);
        assert!(at.addr().is_multiple_of(4), "a word at {offset} is not aligned");
        // SAFETY: inside the memory and aligned, as was just checked; as in `store_u64`.
        let words = unsafe { &*at.cast::<[AtomicU32; 2]>() };
        words[0].store(first, Ordering::Release);
        words[1].store(second, Ordering::Release);
    }

    /// Sets bits of the byte at `offset`, with release ordering.
    ///
    /// # Panics
    /// If the byte is not inside the memory, or the memory is read-only.
    #[inline]
    pub fn set_bits_u8(&self, offset: u64, bits: u8) {
        assert!(self.writable, "a store to read-only memory");
        self.at_u8(offset).fetch_or(bits, Ordering::Release);
    }

    /// Copies `N` bytes from `offset`, each loaded once: what the copy is checked for still holds when it is used,
    /// whatever a peer writes. [`read`](Self::read) is faster and does not promise that.
    ///
    /// # Panics
    /// If the range is not inside the memory.
    #[inline]
    pub fn snapshot<const N: usize>(&self, offset: u64) -> [u8; N] {
        let from = self.range(offset, N);
        let mut bytes = [0; N];
        if N.is_multiple_of(8) && from.addr().is_multiple_of(8) {
            // SAFETY: all N bytes are inside the memory and the first is aligned, as was just checked; as in `store_u64`.
            let words = unsafe { std::slice::from_raw_parts(from.cast::<AtomicU64>(), N / 8) };
            for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
                to.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
            }
            return bytes;
        }
        self.snapshot_bytes(offset)
    }

    /// As [`snapshot`](Self::snapshot), two little-endian words at any offset: what is in their bits needs no shifts of
    /// single bytes.
    ///
    /// # Panics
    /// If the words are not inside the memory.
    #[inline]
    pub fn snapshot_u64_pair(&self, offset: u64) -> [u64; 2] {
        let from = self.range(offset, 16);
        let skipped = from.addr() % 8;
        // Aligned words contain the range. Only at the ends of the memory they are not all inside.
        let is_inside = offset >= skipped as u64 && self.bytes - offset as usize >= 24 - skipped;
        let load = |word: &AtomicU64| u64::from_le(word.load(Ordering::Relaxed));
        if skipped == 0 {
            // SAFETY: both words are inside the memory and aligned, as was just checked; as in `store_u64`.
            let words = unsafe { &*from.cast::<[AtomicU64; 2]>() };
            return [load(&words[0]), load(&words[1])];
        }
        if !is_inside {
            let bytes = u128::from_le_bytes(self.snapshot_bytes(offset));
            return [bytes as u64, (bytes >> 64) as u64];
        }
        // SAFETY: the memory begins no later, as was just checked.
        let from = unsafe { from.sub(skipped) };
        // SAFETY: all three words are inside the memory and aligned, as was just checked; as in `store_u64`.
        let words = unsafe { &*from.cast::<[AtomicU64; 3]>() };
        let [first, second, third] = [load(&words[0]), load(&words[1]), load(&words[2])];
        let (right, left) = (8 * skipped, 64 - 8 * skipped);
        [first >> right | second << left, second >> right | third << left]
    }

    /// As [`snapshot`](Self::snapshot), byte by byte. Not inlined: together, both are compiled to shifts of single bytes.
    #[inline(never)]
    fn snapshot_bytes<const N: usize>(&self, offset: u64) -> [u8; N] {
        let from = self.range(offset, N);
        // SAFETY: all N bytes are inside the memory, as was just checked; as in `store_u64`.
        let cells = unsafe { std::slice::from_raw_parts(from.cast::<AtomicU8>(), N) };
        let mut bytes = [0; N];
        for (to, cell) in bytes.iter_mut().zip(cells) {
            *to = cell.load(Ordering::Relaxed);
        }
        bytes
    }

    /// Copies `out.len()` bytes from `offset` to `out`.
    ///
    /// # Panics
    /// If the range is not inside the memory.
    #[inline]
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        let from = self.range(offset, out.len());
        // SAFETY: `range` checked that the source is inside the mapping; `out` is a reference and so
        // cannot overlap memory to which no reference exists.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) }
    }

    /// Copies `data` to `offset`.
    ///
    /// # Panics
    /// If the range is not inside the memory, or the memory is read-only.
    #[inline]
    pub fn write(&self, offset: u64, data: &[u8]) {
        assert!(self.writable, "a write to read-only memory");
        let to = self.range(offset, data.len());
        // SAFETY: as in `read`, with the roles changed.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) }
    }

    /// Fills a buffer, external or not, from `offset`.
    ///
    /// # Panics
    /// If the range is not inside the memory.
    #[inline]
    pub fn read_into(&self, offset: u64, buffer: &mut Buffer) {
        let from = self.range(offset, buffer.len());
        // SAFETY: both ranges are `buffer.len()` bytes long and mapped. An external buffer may be a part of the
        // same memory, so the copy allows overlap.
        unsafe { std::ptr::copy(from, buffer.as_ptr(), buffer.len()) }
    }

    /// Copies a buffer, external or not, to `offset`.
    ///
    /// # Panics
    /// If the range is not inside the memory, or the memory is read-only.
    #[inline]
    pub fn write_from(&self, offset: u64, buffer: &Buffer) {
        assert!(self.writable, "a write to read-only memory");
        let to = self.range(offset, buffer.len());
        // SAFETY: as in `read_into`, with the roles changed.
        unsafe { std::ptr::copy(buffer.as_ptr(), to, buffer.len()) }
    }

    words! {
        load_u8, store_u8, at_u8, u8, AtomicU8;
        load_u16, store_u16, at_u16, u16, AtomicU16;
        load_u32, store_u32, at_u32, u32, AtomicU32;
        load_u64, store_u64, at_u64, u64, AtomicU64;
    }

    #[inline]
    pub(super) fn range(&self, offset: u64, length: usize) -> *mut u8 {
        let inside = self.bytes.checked_sub(length).is_some_and(|last| offset <= last as u64);
        assert!(inside, "{length} bytes at {offset} are not inside a region of {} bytes", self.bytes);
        // SAFETY: `offset` is at most the size of the mapping.
        unsafe { self.start.as_ptr().add(offset as usize) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SharedRegion;

    #[test]
    fn word_accesses_match_copies() {
        let region = SharedRegion::new(4096).unwrap();
        region.write(8, &[1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(region.load_u8(9), 2);
        assert_eq!(region.load_u16(10), 0x0403);
        assert_eq!(region.load_u32(12), 0x0807_0605);
        region.store_u64(8, 0);
        assert_eq!(region.load_u64(8), 0);
    }

    #[test]
    fn pairs_are_stored_up_to_their_count() {
        let region = SharedRegion::new(4096).unwrap();
        let mut pairs = (1..).map(|value| (value, value << 8));
        assert_eq!(region.store_u64_pairs(4064, 2, pairs.by_ref()), 2);
        assert_eq!([4064, 4072, 4080, 4088].map(|at| region.load_u64(at)), [1, 1 << 8, 2, 2 << 8]);
        assert_eq!(pairs.next(), Some((3, 3 << 8)), "no more are taken");
        assert_eq!(region.store_u64_pairs(0, 3, [(7, 8)].into_iter()), 1);
        assert_eq!([0, 8, 16].map(|at| region.load_u64(at)), [7, 8, 0]);
    }

    #[test]
    fn pairs_are_the_memory_that_they_lie_in() {
        let region = SharedRegion::new(4096).unwrap();
        region.store_u32_pair(12, 7, 8);
        assert_eq!([8, 12, 16, 20].map(|at| region.load_u32(at)), [0, 7, 8, 0]);
        let pairs = region.u64_pairs(8, 2);
        assert_eq!(pairs[0].each_ref().map(|word| word.load(Ordering::Relaxed)), [7 << 32, 8]);
        pairs[1][1].store(9, Ordering::Relaxed);
        assert_eq!((pairs.len(), region.load_u64(32)), (2, 9));
    }

    #[test]
    #[should_panic(expected = "not inside")]
    fn pairs_beyond_the_end_are_rejected_before_any_is_stored() {
        SharedRegion::new(4096).unwrap().store_u64_pairs(4080, 2, [(1, 1), (2, 2)].into_iter());
    }

    #[test]
    #[should_panic(expected = "not aligned")]
    fn an_unaligned_word_is_rejected() {
        SharedRegion::new(4096).unwrap().load_u32(2);
    }

    #[test]
    fn snapshots_match_copies_at_every_offset() {
        let region = SharedRegion::new(4096).unwrap();
        let bytes: Vec<u8> = (0..64).collect();
        region.write(0, &bytes);
        for offset in 0..48 {
            assert_eq!(region.snapshot::<16>(offset as u64), bytes[offset..offset + 16]);
            assert_eq!(region.snapshot::<3>(offset as u64), bytes[offset..offset + 3]);
        }
        // Of memory that begins and ends between two words, too, where the words around a pair are not all inside.
        for (start, length) in [(0, 64), (3, 58), (8, 17)] {
            let first = NonNull::new(region.as_ptr().wrapping_add(start)).unwrap();
            // SAFETY: a part of the region, which stays mapped.
            let part = unsafe { VolatileBytes::new(first, length, true) };
            for at in 0..=length - 16 {
                let words = part.snapshot_u64_pair(at as u64);
                let expected = &bytes[start + at..][..16];
                assert_eq!(
                    words.map(u64::to_le_bytes).as_flattened(),
                    expected,
                    "{at} of {length} at {start}"
                );
            }
        }
        region.set_bits_u8(5, 0x82);
        assert_eq!(region.load_u8(5), 0x87);
    }

    #[test]
    #[should_panic(expected = "not inside")]
    fn a_range_outside_is_rejected() {
        SharedRegion::new(4096).unwrap().read(4095, &mut [0; 2]);
    }
}
