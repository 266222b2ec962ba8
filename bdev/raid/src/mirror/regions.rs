//! The regions of a mirror: which are written, which the bitmap on the members has, and which are to be
//! copied.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// One word a region, changed by all cores: the number of its writes in flight, flags, and a count of writes
/// that wraps.
///
/// A write [begins](Self::begin) before it is submitted and [ends](Self::end) when it is completed. It waits
/// until the bitmap on the members has the region. The bits of idle regions are
/// [taken](Self::take_idle) now and then; a write that begins after that waits for the next bitmap.
pub(crate) struct RegionMap {
    shift: u32,
    words: Box<[AtomicU64]>,
    /// Regions with [`COPY`].
    copies: AtomicUsize,
    is_persistent: bool,
}

const IN_FLIGHT: u64 = 0xffff_ffff;
/// The bitmap on the members has the region.
const STORED: u64 = 1 << 32;
/// Not all members have the data of the region.
const STALE: u64 = 1 << 33;
/// Members with all data may differ in the region: it is read from one of them.
const COPY: u64 = 1 << 34;
/// The count of writes, whose overflow is lost.
const WRITE: u64 = 1 << 40;

impl RegionMap {
    /// `regions` regions of 2^`shift` blocks. Without a bitmap on the members, writes do not wait.
    pub(crate) fn new(shift: u32, regions: u32, is_persistent: bool) -> RegionMap {
        RegionMap {
            shift,
            words: (0..regions).map(|_| AtomicU64::new(0)).collect(),
            copies: AtomicUsize::new(0),
            is_persistent,
        }
    }

    pub(crate) fn is_persistent(&self) -> bool {
        self.is_persistent
    }

    pub(crate) fn len(&self) -> usize {
        self.words.len()
    }

    pub(crate) fn shift(&self) -> u32 {
        self.shift
    }

    /// The blocks of a region of an array of this many.
    pub(crate) fn blocks_of(&self, region: usize, blocks: u64) -> Range<u64> {
        let start = (region as u64) << self.shift;
        start.min(blocks)..(start + (1 << self.shift)).min(blocks)
    }

    fn of(&self, lba: u64, blocks: u32) -> &[AtomicU64] {
        let end = (lba + u64::from(blocks)).div_ceil(1 << self.shift) as usize;
        let end = end.min(self.words.len());
        &self.words[((lba >> self.shift) as usize).min(end)..end]
    }

    /// A write of a range begins. `false` if it must wait until [`is_stored`](Self::is_stored).
    #[inline]
    pub(crate) fn begin(&self, lba: u64, blocks: u32) -> bool {
        if !self.is_persistent {
            return true;
        }
        let mut is_stored = true;
        for word in self.of(lba, blocks) {
            is_stored &= word.fetch_add(WRITE + 1, Ordering::SeqCst) & STORED != 0;
        }
        is_stored
    }

    /// A write that has begun ends.
    #[inline]
    pub(crate) fn end(&self, lba: u64, blocks: u32) {
        if self.is_persistent {
            for word in self.of(lba, blocks) {
                let before = word.fetch_sub(1, Ordering::SeqCst);
                assert!(before & IN_FLIGHT > 0, "a write of block {lba} ends that has not begun");
            }
        }
    }

    /// Whether the bitmap on the members has all regions of a range.
    pub(crate) fn is_stored(&self, lba: u64, blocks: u32) -> bool {
        self.of(lba, blocks).iter().all(|word| word.load(Ordering::SeqCst) & STORED != 0)
    }

    /// Whether members with all data may differ in a range.
    #[inline]
    pub(crate) fn may_differ(&self, lba: u64, blocks: u32) -> bool {
        let may_differ = |word: &AtomicU64| word.load(Ordering::Acquire) & COPY != 0;
        self.copies.load(Ordering::Acquire) > 0 && self.of(lba, blocks).iter().any(may_differ)
    }

    /// Regions in which members with all data may differ.
    pub(crate) fn differing(&self) -> usize {
        self.copies.load(Ordering::Acquire)
    }

    /// What the bitmap on the members is to have: regions with writes in flight, those that it has, and those
    /// that are not everywhere. One bit a region.
    pub(crate) fn marks(&self) -> Vec<u64> {
        self.bits(|word| word & (IN_FLIGHT | STORED | STALE) != 0)
    }

    fn bits(&self, is_set: impl Fn(u64) -> bool) -> Vec<u64> {
        let word = |words: &[AtomicU64]| {
            let set = words.iter().enumerate().filter(|(_, word)| is_set(word.load(Ordering::SeqCst)));
            set.fold(0, |bits, (index, _)| bits | 1 << index)
        };
        self.words.chunks(64).map(word).collect()
    }

    /// The bitmap on the members has these regions now.
    pub(crate) fn set_stored(&self, marks: &[u64]) {
        self.for_marked(marks, |word| _ = word.fetch_or(STORED, Ordering::SeqCst));
    }

    /// These regions are not on all members; with `differ`, not even those with all data are known to be
    /// alike.
    pub(crate) fn set_stale(&self, marks: &[u64], differ: bool) {
        self.for_marked(marks, |word| {
            let flags = STALE | if differ { COPY } else { 0 };
            let before = word.fetch_or(flags, Ordering::SeqCst);
            if differ && before & COPY == 0 {
                self.copies.fetch_add(1, Ordering::AcqRel);
            }
        });
    }

    /// All regions.
    pub(crate) fn all(&self) -> Vec<u64> {
        self.bits(|_| true)
    }

    fn for_marked(&self, marks: &[u64], change: impl Fn(&AtomicU64)) {
        for (bits, words) in marks.iter().zip(self.words.chunks(64)) {
            let marked = words.iter().enumerate().filter(|(index, _)| bits >> index & 1 != 0);
            marked.for_each(|(_, word)| change(word));
        }
    }

    /// The regions that are to be copied.
    pub(crate) fn to_copy(&self) -> Vec<usize> {
        let is_to_copy = |region: &usize| self.words[*region].load(Ordering::SeqCst) & (STALE | COPY) != 0;
        (0..self.words.len()).filter(is_to_copy).collect()
    }

    /// Whether members with all data may differ in a region.
    pub(crate) fn differs(&self, region: usize) -> bool {
        self.words[region].load(Ordering::SeqCst) & COPY != 0
    }

    /// A region was copied: to all members, if it `is_everywhere`.
    pub(crate) fn copied(&self, region: usize, is_everywhere: bool) {
        let flags = COPY | if is_everywhere { STALE } else { 0 };
        if self.words[region].fetch_and(!flags, Ordering::SeqCst) & COPY != 0 {
            self.copies.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// The members with all data cannot differ any more.
    pub(crate) fn clear_differing(&self) {
        for word in &self.words {
            if word.fetch_and(!COPY, Ordering::SeqCst) & COPY != 0 {
                self.copies.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Takes the regions that all members have, and that were not written since the last call with the same
    /// `seen`: the bitmap on the members may go without them. With `at_once`, those without writes in flight.
    pub(crate) fn take_idle(&self, seen: &mut Vec<u64>, at_once: bool) -> Vec<usize> {
        seen.resize(self.words.len(), u64::MAX);
        let mut taken = Vec::new();
        for (region, (word, seen)) in self.words.iter().zip(seen).enumerate() {
            let now = word.load(Ordering::SeqCst);
            let was_seen = std::mem::replace(seen, now / WRITE) == now / WRITE;
            let is_idle = now & (IN_FLIGHT | STALE | COPY) == 0 && now & STORED != 0;
            if is_idle
                && (was_seen || at_once)
                && word.compare_exchange(now, now & !STORED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
            {
                taken.push(region);
            }
        }
        taken
    }

    /// The bitmap on the members has regions still that were [taken](Self::take_idle).
    pub(crate) fn put_back(&self, taken: &[usize]) {
        taken.iter().for_each(|region| _ = self.words[*region].fetch_or(STORED, Ordering::SeqCst));
    }

    /// Whether the bitmap on the members has regions that could be taken at some time.
    pub(crate) fn has_stored(&self) -> bool {
        self.words.iter().any(|word| word.load(Ordering::Relaxed) & STORED != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> RegionMap {
        RegionMap::new(3, 130, true)
    }

    #[test]
    fn a_write_waits_for_all_of_its_regions_and_keeps_them_marked() {
        let map = map();
        assert!(!map.begin(7, 2));
        assert_eq!(map.marks(), [0b11, 0, 0]);
        map.set_stored(&[0b01, 0, 0]);
        assert!(!map.is_stored(7, 2) && map.is_stored(0, 8));
        map.set_stored(&[0b10, 0, 0]);
        assert!(map.is_stored(7, 2) && map.begin(0, 16));
        let mut seen = Vec::new();
        map.end(7, 2);
        assert!(map.take_idle(&mut seen, true).is_empty(), "writes are in flight");
        map.end(0, 16);
        assert_eq!(map.take_idle(&mut seen, false), [0, 1]);
        assert!(!map.begin(8, 1), "the bitmap goes without it");
        assert_eq!(map.marks(), [0b10, 0, 0]);
        map.put_back(&[1]);
        assert!(map.is_stored(8, 1));
    }

    #[test]
    fn a_region_that_was_written_since_is_not_idle() {
        let map = map();
        let mut seen = Vec::new();
        map.set_stored(&map.all());
        assert!(map.take_idle(&mut seen, false).is_empty());
        assert!(map.begin(129 * 8, 8));
        map.end(129 * 8, 8);
        assert_eq!(map.take_idle(&mut seen, false), (0..129).collect::<Vec<usize>>());
        assert_eq!(map.take_idle(&mut seen, false), [129]);
        assert!(!map.has_stored());
    }

    #[test]
    fn a_stale_region_stays_marked_until_it_is_everywhere() {
        let map = map();
        map.set_stale(&[0b1, 0, 0b10], true);
        map.set_stored(&map.all());
        assert!(map.may_differ(7, 2) && !map.may_differ(8, 8));
        assert_eq!((map.to_copy(), map.differing()), (vec![0, 129], 2));
        let mut seen = Vec::new();
        map.take_idle(&mut seen, true);
        assert_eq!(map.marks(), [1, 0, 2]);
        map.copied(0, false);
        map.copied(129, true);
        assert_eq!((map.to_copy(), map.differing()), (vec![0], 0));
        assert_eq!(map.take_idle(&mut seen, true), [129]);
        assert_eq!(map.blocks_of(129, 1039), 1032..1039);
        map.set_stale(&[0b1, 0, 0b10], true);
        map.clear_differing();
        assert_eq!((map.to_copy(), map.differing()), (vec![0, 129], 0), "they stay stale");
        assert_eq!(map.of(u64::from(u32::MAX), 5).len(), 0, "beyond a device that was larger");
    }

    #[test]
    fn without_a_bitmap_writes_do_not_wait() {
        let map = RegionMap::new(3, 130, false);
        assert!(map.begin(0, 100));
        map.end(0, 100);
        assert_eq!(map.marks(), [0, 0, 0]);
    }
}
