//! Files on persistent memory, through a file system with DAX.

use std::os::fd::BorrowedFd;

use rustix::mm::MapFlags;

use crate::cache_flush::CacheFlush;
use crate::{Buffer, RegionError, SharedRegion};

/// A file on persistent memory, mapped so that what is stored and flushed is durable, without a system call: the file system
/// makes the place of each page durable before the first store to it (`MAP_SYNC`).
///
/// Writes go through [`write_from`](Self::write_from) and [`zero`](Self::zero), which store and begin to flush, and
/// [`persist`](Self::persist), which ends that for all that this thread wrote before. Of a power failure before that, each
/// aligned 8 bytes survive as they were before or after. Accesses are unordered otherwise, as those of a [`SharedRegion`].
///
/// Memory that failed, and pages that the file has no longer, do not end the process: the whole region is ordinary memory
/// from then on, and [`is_poisoned`](Self::is_poisoned). What was read or persisted counts only if it is not poisoned
/// afterwards.
pub struct PersistentRegion {
    region: SharedRegion,
    flush: CacheFlush,
}

impl PersistentRegion {
    /// Maps the first `bytes` bytes of a file. Pages that the file has no blocks for get them with the first store; if the file
    /// system is full then, the region is poisoned.
    ///
    /// # Errors
    /// [`RegionError::NotPersistent`] if the file system is not mounted with DAX, or its memory is not persistent;
    /// [`RegionError::NoCacheFlush`] if the processor cannot flush from user space; those of [`SharedRegion::map`].
    pub fn map(file: BorrowedFd<'_>, bytes: u64, writable: bool) -> Result<PersistentRegion, RegionError> {
        PersistentRegion::map_with(file, bytes, writable, MapFlags::SHARED_VALIDATE | MapFlags::SYNC)
    }

    /// As [`map`](Self::map), of any file: nothing is durable. For tests, and for programs that measure.
    ///
    /// # Errors
    /// Those of [`map`](Self::map), without the first.
    pub fn map_volatile(
        file: BorrowedFd<'_>,
        bytes: u64,
        writable: bool,
    ) -> Result<PersistentRegion, RegionError> {
        PersistentRegion::map_with(file, bytes, writable, MapFlags::SHARED)
    }

    fn map_with(
        file: BorrowedFd<'_>,
        bytes: u64,
        writable: bool,
        flags: MapFlags,
    ) -> Result<PersistentRegion, RegionError> {
        let flush = CacheFlush::detect().ok_or(RegionError::NoCacheFlush)?;
        let region = SharedRegion::map_guarded(file, bytes, writable, flags)?;
        Ok(PersistentRegion { region, flush })
    }

    /// Number of bytes.
    pub fn len(&self) -> u64 {
        self.region.len()
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.region.is_empty()
    }

    /// The instruction that flushes a line.
    pub fn flush_instruction(&self) -> &'static str {
        self.flush.name()
    }

    /// Fills a buffer, external or not, from `offset`.
    ///
    /// # Panics
    /// If the range is not inside the region.
    #[inline]
    pub fn read_into(&self, offset: u64, buffer: &mut Buffer) {
        self.region.read_into(offset, buffer);
    }

    /// Copies a buffer, external or not, to `offset`, and begins to flush it.
    ///
    /// # Panics
    /// If the range is not inside the region, or the region is read-only.
    #[inline]
    pub fn write_from(&self, offset: u64, buffer: &Buffer) {
        self.region.write_from(offset, buffer);
        self.flush_range(offset, buffer.len());
    }

    /// Sets a range to zero, and begins to flush it.
    ///
    /// # Panics
    /// If the range is not inside the region, or the region is read-only.
    pub fn zero(&self, offset: u64, bytes: u64) {
        self.region.zero(offset, bytes);
        self.flush_range(
            offset,
            usize::try_from(bytes).expect("a range inside the memory fits the address space"),
        );
    }

    #[inline]
    fn flush_range(&self, offset: u64, bytes: usize) {
        let start = self.region.as_ptr().wrapping_add(offset as usize);
        // SAFETY: the range was just written, so it is inside the mapping.
        unsafe { self.flush.flush(start, bytes) };
    }

    /// Makes all durable that this thread wrote before. It counts if the region is not poisoned afterwards.
    #[inline]
    pub fn persist(&self) {
        self.flush.fence();
    }

    /// Whether memory failed, or the file was truncated: reads return zeroes, and nothing is durable.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.region.is_poisoned()
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::cache_flush::recorded::{self, Flushed};
    use crate::sigbus::tests::memfd;
    use crate::{Arena, ArenaConfig, Pool};

    fn buffer(pool: &Pool, bytes: usize, fill: u8) -> Buffer {
        let mut buffer = pool.take(bytes).unwrap();
        buffer.as_mut_slice().fill(fill);
        buffer
    }

    /// The bytes of the file that were flushed since the last call, in lines, and how often it was waited for them.
    fn flushed(region: &PersistentRegion) -> (Vec<usize>, usize) {
        let (mut lines, mut fences) = (Vec::new(), 0);
        for each in recorded::take() {
            match each {
                Flushed::Line(address) => lines.push(address - region.region.as_ptr().addr()),
                Flushed::Fence => fences += 1,
            }
        }
        (lines, fences)
    }

    #[test]
    fn a_file_that_is_not_on_persistent_memory_is_refused() {
        let file = memfd(4096);
        assert_eq!(PersistentRegion::map(file.as_fd(), 4096, true).err(), Some(RegionError::NotPersistent));
    }

    /// What is written is in the file, and each of its lines is flushed after the copy, and waited for.
    #[test]
    fn what_is_written_is_flushed() {
        let pool = Pool::new(&Arena::new(ArenaConfig { limit_bytes: 4 << 20, ..Default::default() }));
        let file = memfd(16 << 10);
        let region = PersistentRegion::map_volatile(file.as_fd(), 16 << 10, true).unwrap();
        assert_eq!(region.flush.name(), region.flush_instruction());
        recorded::take();
        region.write_from(512, &buffer(&pool, 512, 7));
        assert_eq!(flushed(&region), ((512..1024).step_by(64).collect(), 0));
        region.zero(640, 100);
        assert_eq!(flushed(&region), (vec![640, 704], 0));
        region.persist();
        assert_eq!(flushed(&region), (vec![], 1));
        let mut found = vec![0; 512];
        rustix::io::pread(&file, &mut found, 512).unwrap();
        let expected: Vec<u8> = (0..512).map(|at| if (128..228).contains(&at) { 0 } else { 7 }).collect();
        assert_eq!(found, expected);
        let mut read = buffer(&pool, 512, 1);
        region.read_into(512, &mut read);
        assert_eq!(read.as_slice(), expected);
    }

    #[test]
    fn a_truncated_file_poisons_its_region_and_no_other() {
        let pool = Pool::new(&Arena::new(ArenaConfig { limit_bytes: 4 << 20, ..Default::default() }));
        let (file, other) = (memfd(8192), memfd(8192));
        let region = PersistentRegion::map_volatile(file.as_fd(), 8192, true).unwrap();
        let other = PersistentRegion::map_volatile(other.as_fd(), 8192, true).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        region.write_from(4096, &buffer(&pool, 4096, 7));
        region.persist();
        assert!(region.is_poisoned() && !other.is_poisoned());
    }
}
