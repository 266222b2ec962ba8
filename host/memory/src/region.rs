//! Memory that several cores or a device write at once.

use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags};

/// Why a region could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// The size is 0 or above what an address space holds.
    #[error("a memory region of {0} bytes cannot be made")]
    Size(u64),
    /// The machine has not that much.
    #[error("no memory for a region of {0} bytes")]
    NoMemory(u64),
}

/// Zeroed memory with a device's semantics: whoever writes it may do so while another reads.
///
/// There is never a Rust reference to its bytes; they are copied in and out. Copies that overlap in
/// time may mix old and new bytes, as on a disk, and nothing is promised between two copies
/// without a synchronisation of the callers' own. Pages are the machine's only once written.
pub struct SharedRegion {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is owned by this value until drop and is reached only through the copying
// methods below, which hand out no reference.
unsafe impl Send for SharedRegion {}
// SAFETY: as above; overlapping copies are the documented behaviour of the bytes and cannot tear
// anything but the bytes' values.
unsafe impl Sync for SharedRegion {}

impl SharedRegion {
    /// A region of `bytes` zero bytes; ordinary pages, transparent hugepages where enabled.
    pub fn new(bytes: u64) -> Result<SharedRegion, RegionError> {
        let size = usize::try_from(bytes).ok().filter(|size| *size > 0 && *size <= isize::MAX as usize);
        let size = size.ok_or(RegionError::Size(bytes))?;
        let start = crate::arena::map(size, MapFlags::PRIVATE | MapFlags::NORESERVE);
        Ok(SharedRegion { start: start.ok_or(RegionError::NoMemory(bytes))?, bytes: size })
    }

    /// Number of bytes.
    pub fn len(&self) -> u64 {
        self.bytes as u64
    }

    /// Whether it has no bytes, which none has.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Copies out of the region from `offset`.
    ///
    /// # Panics
    /// If the range is not inside.
    #[inline]
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        let from = self.range(offset, out.len());
        // SAFETY: `range` checked that the source lies inside the mapping; `out` is a reference and
        // so cannot overlap memory that no reference ever points to.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) }
    }

    /// Copies into the region at `offset`.
    ///
    /// # Panics
    /// If the range is not inside.
    #[inline]
    pub fn write(&self, offset: u64, data: &[u8]) {
        let to = self.range(offset, data.len());
        // SAFETY: as in `read`, with the roles changed.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) }
    }

    /// Makes the range zero and gives whole pages of it back to the machine.
    ///
    /// # Panics
    /// If the range is not inside.
    pub fn zero(&self, offset: u64, bytes: u64) {
        let length = usize::try_from(bytes).expect("a range inside fits the address space");
        let from = self.range(offset, length);
        let page = rustix::param::page_size();
        let head = (from.align_offset(page)).min(length);
        let pages = (length - head) / page * page;
        // SAFETY: head is at most the checked length.
        unsafe { std::ptr::write_bytes(from, 0, head) };
        if pages > 0 {
            // SAFETY: head is at most the checked length.
            let aligned = unsafe { from.add(head) };
            // Miri knows no advice.
            // SAFETY: whole pages inside this private anonymous mapping; discarded, they read as zero.
            let dropped = !cfg!(miri)
                && unsafe { rustix::mm::madvise(aligned.cast(), pages, Advice::LinuxDontNeed) }.is_ok();
            if !dropped {
                // SAFETY: the same bytes; locked pages cannot be dropped, so they are written.
                unsafe { std::ptr::write_bytes(aligned, 0, pages) };
            }
        }
        // SAFETY: head + pages is at most the checked length.
        let tail = unsafe { from.add(head + pages) };
        // SAFETY: what is left of the checked length.
        unsafe { std::ptr::write_bytes(tail, 0, length - head - pages) };
    }

    #[inline]
    fn range(&self, offset: u64, length: usize) -> *mut u8 {
        let inside = offset <= self.bytes as u64 && length <= self.bytes - offset as usize;
        assert!(inside, "{length} bytes at {offset} are not inside a region of {} bytes", self.bytes);
        // SAFETY: offset is at most the mapping's size.
        unsafe { self.start.as_ptr().add(offset as usize) }
    }
}

impl Drop for SharedRegion {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `new` made, with no pointer into it outside this value.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_reaches_ragged_ends_and_nothing_else() {
        let region = SharedRegion::new(64 << 10).unwrap();
        for (offset, bytes) in [(0, 64 << 10), (1, 1), (4000, 9000), (4096, 8192), (65535, 1), (5, 0)] {
            region.write(0, &[0xee; 64 << 10]);
            region.zero(offset, bytes);
            let mut all = vec![0; 64 << 10];
            region.read(0, &mut all);
            for (position, byte) in all.iter().enumerate() {
                let inside = (position as u64) >= offset && (position as u64) < offset + bytes;
                assert_eq!(*byte == 0, inside, "byte {position} after zeroing {bytes} at {offset}");
            }
        }
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert_eq!(SharedRegion::new(0).err(), Some(RegionError::Size(0)));
        assert_eq!(SharedRegion::new(u64::MAX).err(), Some(RegionError::Size(u64::MAX)));
    }

    #[test]
    #[should_panic(expected = "not inside")]
    fn a_range_outside_is_refused() {
        SharedRegion::new(4096).unwrap().read(4095, &mut [0; 2]);
    }
}
