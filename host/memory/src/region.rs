//! Memory that several cores or a device write at once.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::Buffer;
use crate::guard::Guard;

/// Why a region could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// The size is 0 or above what an address space holds.
    #[error("a memory region of {0} bytes cannot be made")]
    Size(u64),
    /// The machine has not that much.
    #[error("no memory for a region of {0} bytes")]
    NoMemory(u64),
    /// The kernel did not map it.
    #[error("mapping {bytes} bytes: {}", std::io::Error::from_raw_os_error(*.errno))]
    Map {
        /// How many bytes were wanted.
        bytes: u64,
        /// The error number.
        errno: i32,
    },
}

/// Bytes that a device, a peer or another core may write at any moment.
///
/// There is never a Rust reference to them; they are copied in and out. Copies that overlap in time
/// may mix old and new bytes, as on a disk, and nothing is promised between two copies without a
/// synchronisation of the callers' own, for which single words are loaded with acquire and stored with
/// release ordering. Whoever owns the memory lends out its cells: a [`SharedRegion`] or a
/// [`DeviceBuffer`](crate::DeviceBuffer).
pub struct Cells {
    start: NonNull<u8>,
    bytes: usize,
    writable: bool,
}

macro_rules! words {
    ($($load:ident, $store:ident, $at:ident, $word:ident, $atomic:ident;)*) => {$(
        #[doc = concat!("Loads the ", stringify!($word), " at `offset`, with acquire ordering.\n\n")]
        /// # Panics
        /// If it is not inside, or not aligned.
        #[inline]
        pub fn $load(&self, offset: u64) -> $word {
            self.$at(offset).load(Ordering::Acquire)
        }

        #[doc = concat!("Stores a ", stringify!($word), " at `offset`, with release ordering.\n\n")]
        /// # Panics
        /// If it is not inside, not aligned, or the memory is read-only.
        #[inline]
        pub fn $store(&self, offset: u64, value: $word) {
            assert!(self.writable, "a store to read-only memory");
            self.$at(offset).store(value, Ordering::Release);
        }

        #[inline]
        fn $at(&self, offset: u64) -> &std::sync::atomic::$atomic {
            let at = self.range(offset, size_of::<$word>());
            assert!(at.addr().is_multiple_of(size_of::<$word>()), "a word at {offset} is not aligned");
            // SAFETY: inside the memory and aligned, as was just checked; the owner of these cells
            // keeps it mapped, and other accesses are atomic or by design unordered copies.
            unsafe { std::sync::atomic::$atomic::from_ptr(at.cast()) }
        }
    )*};
}

impl Cells {
    /// # Safety
    /// The bytes stay mapped, and writable if said so, for as long as the value is used.
    pub(crate) unsafe fn new(start: NonNull<u8>, bytes: usize, writable: bool) -> Cells {
        Cells { start, bytes, writable }
    }

    /// Number of bytes.
    #[inline]
    pub fn len(&self) -> u64 {
        self.bytes as u64
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Address of the first byte, for a device or the kernel.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Copies out from `offset`.
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

    /// Copies in at `offset`.
    ///
    /// # Panics
    /// If the range is not inside, or the memory is read-only.
    #[inline]
    pub fn write(&self, offset: u64, data: &[u8]) {
        assert!(self.writable, "a write to read-only memory");
        let to = self.range(offset, data.len());
        // SAFETY: as in `read`, with the roles changed.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) }
    }

    /// Fills a buffer, lent or not, from `offset`.
    ///
    /// # Panics
    /// If the range is not inside.
    #[inline]
    pub fn read_into(&self, offset: u64, buffer: &mut Buffer) {
        let from = self.range(offset, buffer.len());
        // SAFETY: both are that long. A lent buffer may lie in the very same memory, so they may overlap.
        unsafe { std::ptr::copy(from, buffer.as_ptr(), buffer.len()) }
    }

    /// Copies a buffer, lent or not, to `offset`.
    ///
    /// # Panics
    /// If the range is not inside, or the memory is read-only.
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
    fn range(&self, offset: u64, length: usize) -> *mut u8 {
        let inside = offset <= self.bytes as u64 && length <= self.bytes - offset as usize;
        assert!(inside, "{length} bytes at {offset} are not inside a region of {} bytes", self.bytes);
        // SAFETY: offset is at most the mapping's size.
        unsafe { self.start.as_ptr().add(offset as usize) }
    }
}

/// A mapping with a device's semantics: whoever writes it may do so while another reads.
///
/// Its bytes are reached through its [`Cells`]. It is zeroed memory of our own, whose pages are the
/// machine's only once written, or a mapping of a file or device that others have too.
pub struct SharedRegion {
    cells: Cells,
    anonymous: bool,
    /// Of a foreign file: what to do when it is gone.
    guard: Option<Guard>,
}

// SAFETY: the mapping is owned by this value until drop and is reached only through the copying and
// atomic methods of its cells, which hand out no reference.
unsafe impl Send for SharedRegion {}
// SAFETY: as above; overlapping copies are the documented behaviour of the bytes and cannot tear
// anything but the bytes' values.
unsafe impl Sync for SharedRegion {}

impl std::ops::Deref for SharedRegion {
    type Target = Cells;

    #[inline]
    fn deref(&self) -> &Cells {
        &self.cells
    }
}

impl SharedRegion {
    /// A region of `bytes` zero bytes; ordinary pages, transparent hugepages where enabled.
    pub fn new(bytes: u64) -> Result<SharedRegion, RegionError> {
        let size = size(bytes)?;
        let start = crate::arena::map(size, MapFlags::PRIVATE | MapFlags::NORESERVE);
        Ok(SharedRegion::own(start.ok_or(RegionError::NoMemory(bytes))?, size, true, true))
    }

    /// `bytes` bytes of a file or device from `offset`, shared with whoever else maps it.
    ///
    /// The file may be shrunk by whoever else has it: reaching a page that is gone raises SIGBUS.
    pub fn map(
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        writable: bool,
    ) -> Result<SharedRegion, RegionError> {
        let size = size(bytes)?;
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address of the kernel's choice aliases no Rust object.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, file, offset)
        };
        let start = start.map_err(|errno| RegionError::Map { bytes, errno: errno.raw_os_error() })?;
        let start = NonNull::new(start.cast()).ok_or(RegionError::NoMemory(bytes))?;
        Ok(SharedRegion::own(start, size, writable, false))
    }

    /// As [`map`](Self::map), for a file of a peer that is not trusted: should the peer shrink it, the whole
    /// region reads as zeroes from the first access on that finds nothing, and
    /// [`is_poisoned`](Self::is_poisoned). Installs a handler of SIGBUS for the process, once.
    ///
    /// What the kernel is told to read or write there, by io_uring for example, fails with `EFAULT` instead.
    pub fn map_foreign(
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        writable: bool,
    ) -> Result<SharedRegion, RegionError> {
        let mut region = SharedRegion::map(file, offset, bytes, writable)?;
        // Whole pages, as mappings are; a file of huge ones has been refused with any other size.
        let length = region.bytes.next_multiple_of(rustix::param::page_size());
        region.guard = Some(Guard::new(region.start, length).ok_or(RegionError::NoMemory(bytes))?);
        Ok(region)
    }

    /// Whether its file has shrunk and memory of our own has taken its place.
    pub fn is_poisoned(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::is_poisoned)
    }

    fn own(start: NonNull<u8>, bytes: usize, writable: bool, anonymous: bool) -> SharedRegion {
        // SAFETY: the mapping was just made so and is unmapped when this value, which owns the cells,
        // is dropped.
        let cells = unsafe { Cells::new(start, bytes, writable) };
        SharedRegion { cells, anonymous, guard: None }
    }

    /// Makes the range zero and gives whole pages of it back to the machine where it can.
    ///
    /// # Panics
    /// If the range is not inside, or the memory is read-only.
    pub fn zero(&self, offset: u64, bytes: u64) {
        assert!(self.writable, "a write to read-only memory");
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
            // Miri knows no advice, and only private anonymous pages read as zero once discarded.
            // SAFETY: whole pages inside this mapping.
            let dropped = self.anonymous
                && !cfg!(miri)
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
}

fn size(bytes: u64) -> Result<usize, RegionError> {
    let size = usize::try_from(bytes).ok().filter(|size| *size > 0 && *size <= isize::MAX as usize);
    size.ok_or(RegionError::Size(bytes))
}

impl Drop for SharedRegion {
    fn drop(&mut self) {
        // Its addresses are somebody else's in a moment.
        self.guard = None;
        // SAFETY: exactly the mapping that was made for this value, with no pointer into it outside this value.
        let _ = unsafe { rustix::mm::munmap(self.cells.as_ptr().cast(), self.cells.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn zero_reaches_ragged_ends_and_nothing_else() {
        const BYTES: usize = 16 << 10;
        let region = SharedRegion::new(BYTES as u64).unwrap();
        for (offset, bytes) in [(0, BYTES), (1, 1), (4000, 9000), (4096, 8192), (BYTES - 1, 1), (5, 0)] {
            region.write(0, &[0xee; BYTES]);
            region.zero(offset as u64, bytes as u64);
            let (mut all, mut expected) = (vec![0; BYTES], vec![0xee; BYTES]);
            region.read(0, &mut all);
            expected[offset..offset + bytes].fill(0);
            assert!(all == expected, "after zeroing {bytes} at {offset}");
        }
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert_eq!(SharedRegion::new(0).err(), Some(RegionError::Size(0)));
        assert_eq!(SharedRegion::new(u64::MAX).err(), Some(RegionError::Size(u64::MAX)));
    }

    #[test]
    fn words_are_where_copies_put_them() {
        let region = SharedRegion::new(4096).unwrap();
        region.write(8, &[1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(region.load_u8(9), 2);
        assert_eq!(region.load_u16(10), 0x0403);
        assert_eq!(region.load_u32(12), 0x0807_0605);
        region.store_u64(8, 0);
        assert_eq!(region.load_u64(8), 0);
    }

    #[test]
    #[should_panic(expected = "not aligned")]
    fn a_word_across_two_is_refused() {
        SharedRegion::new(4096).unwrap().load_u32(2);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn a_file_is_shared_with_who_else_maps_it() {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 8192).unwrap();
        let one = SharedRegion::map(file.as_fd(), 4096, 4096, true).unwrap();
        let other = SharedRegion::map(file.as_fd(), 0, 8192, false).unwrap();
        one.store_u32(0, 7);
        assert_eq!(other.load_u32(4096), 7);
        one.zero(0, 4096);
        assert_eq!(other.load_u32(4096), 0);
        assert!(matches!(
            SharedRegion::map(file.as_fd(), 1, 4096, true),
            Err(RegionError::Map { bytes: 4096, .. })
        ));
    }

    #[test]
    #[should_panic(expected = "not inside")]
    fn a_range_outside_is_refused() {
        SharedRegion::new(4096).unwrap().read(4095, &mut [0; 2]);
    }
}
