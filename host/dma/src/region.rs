//! Memory that several cores, devices or processes access concurrently.

mod mapping;
mod volatile;

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, MsyncFlags, ProtFlags};

use crate::sigbus::{SigbusCauses, SigbusGuard};

pub use mapping::RegionMapping;
pub use volatile::VolatileBytes;

/// `statfs(2)`: a file system of huge pages, whose block size is that of a page.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Why a [`SharedRegion`] could not be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// The size, in bytes, is 0 or exceeds the address space.
    #[error("a memory region of {0} bytes cannot be created")]
    Size(u64),
    /// The kernel has no memory for so many bytes, or too many regions are mapped.
    #[error("no memory for a region of {0} bytes")]
    NoMemory(u64),
    /// `mmap` failed.
    #[error("mapping {bytes} bytes: {}", std::io::Error::from_raw_os_error(*.errno))]
    Map {
        /// The requested size.
        bytes: u64,
        /// The Linux error number.
        errno: i32,
    },
    /// A peer's file is no memory: not a memfd, nor on tmpfs or hugetlbfs.
    #[error("the file is neither a memfd nor on tmpfs or hugetlbfs")]
    NotMemory,
    /// `MAP_SYNC` is refused: a store to the file would not be durable.
    #[error(
        "the file is not on persistent memory: its file system must be mounted with DAX (ext4 or xfs on /dev/pmemN, mount -o dax)"
    )]
    NotPersistent,
    /// The processor has no instruction that flushes a line of its caches to persistent memory from user
    /// space.
    #[error("this processor cannot flush its caches to persistent memory from user space")]
    NoCacheFlush,
    /// A peer's file ends before the range.
    #[error("the file has fewer than {0} bytes")]
    Short(u64),
}

/// The expected order of access to a file, by which the kernel reads ahead, see posix_fadvise(2) and
/// madvise(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessOrder {
    /// No read-ahead.
    Random,
    /// Twice the usual read-ahead.
    Sequential,
}

/// An owned mapping whose bytes may be read and written concurrently, as with device memory.
///
/// It is either zeroed anonymous memory, whose pages are allocated on the first write, or a mapping of a
/// file or device that others may map too. It dereferences to [`VolatileBytes`] for access to its bytes;
/// drop unmaps it, unless its [`mapping`](Self::mapping) is held elsewhere.
pub struct SharedRegion {
    memory: VolatileBytes,
    anonymous: bool,
    mapping: Arc<RegionMapping>,
}

// SAFETY: the mapping stays until this value is dropped and is accessed only through the copying and
// atomic methods of `VolatileBytes`, which return no reference to its bytes.
unsafe impl Send for SharedRegion {}
// SAFETY: as above; concurrent copies are documented and can tear nothing but the values of the bytes.
unsafe impl Sync for SharedRegion {}

impl std::ops::Deref for SharedRegion {
    type Target = VolatileBytes;

    #[inline]
    fn deref(&self) -> &VolatileBytes {
        &self.memory
    }
}

impl SharedRegion {
    /// A region of `bytes` zero bytes, of ordinary pages or of transparent hugepages where enabled.
    pub fn new(bytes: u64) -> Result<SharedRegion, RegionError> {
        let size = checked_size(bytes)?;
        let start = crate::arena::map(size, MapFlags::PRIVATE | MapFlags::NORESERVE);
        Ok(SharedRegion::from_mapping(start.ok_or(RegionError::NoMemory(bytes))?, size, true, true))
    }

    /// As [`new`](Self::new), in a memfd, so that a device in another process can map it too
    /// ([`RegionMapping::file`]). Pages that were written once stay allocated: [`zero`](Self::zero) writes
    /// them, because a device that has pinned a page goes on to use that one.
    pub fn new_shared(bytes: u64) -> Result<SharedRegion, RegionError> {
        let failed = |errno: rustix::io::Errno| RegionError::Map { bytes, errno: errno.raw_os_error() };
        checked_size(bytes)?;
        let file = rustix::fs::memfd_create("ringbolt-region", rustix::fs::MemfdFlags::CLOEXEC);
        let file = Arc::new(file.map_err(failed)?);
        // Devices map whole pages.
        let whole = bytes.next_multiple_of(rustix::param::page_size() as u64);
        rustix::fs::ftruncate(&file, whole).map_err(failed)?;
        let region = SharedRegion::map(file.as_fd(), 0, bytes, true)?;
        region.mapping.set_file(file);
        Ok(region)
    }

    /// Maps `bytes` bytes of a file or device from `offset`, shared with all its other mappings.
    ///
    /// If another process truncates the file, access to a page beyond its new end raises SIGBUS.
    pub fn map(
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        writable: bool,
    ) -> Result<SharedRegion, RegionError> {
        SharedRegion::map_with(file, offset, bytes, writable, MapFlags::SHARED)
    }

    fn map_with(
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        writable: bool,
        flags: MapFlags,
    ) -> Result<SharedRegion, RegionError> {
        let size = checked_size(bytes)?;
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address of the kernel's choice aliases no Rust object.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, protection, flags, file, offset) };
        let start = start.map_err(|errno| match errno {
            // Only with `MAP_SYNC`, see mmap(2).
            rustix::io::Errno::OPNOTSUPP if flags.contains(MapFlags::SYNC) => RegionError::NotPersistent,
            errno => RegionError::Map { bytes, errno: errno.raw_os_error() },
        })?;
        let start = NonNull::new(start.cast()).ok_or(RegionError::NoMemory(bytes))?;
        Ok(SharedRegion::from_mapping(start, size, writable, false))
    }

    /// As [`map`](Self::map), for a file of an untrusted peer. If the peer truncates it, the first access to
    /// a missing page replaces the whole region with zeroed memory and marks it
    /// [poisoned](Self::is_poisoned). The first call installs a SIGBUS handler for the process.
    ///
    /// I/O that the kernel does on missing pages, for io_uring for example, fails with `EFAULT` instead.
    pub fn map_untrusted(
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        writable: bool,
    ) -> Result<SharedRegion, RegionError> {
        SharedRegion::map(file, offset, bytes, writable)?.guarded(SigbusCauses::Truncation)
    }

    /// Maps a file with these flags, also where memory of it fails: as
    /// [`map_untrusted`](Self::map_untrusted).
    pub(crate) fn map_guarded(
        file: BorrowedFd<'_>,
        bytes: u64,
        writable: bool,
        flags: MapFlags,
    ) -> Result<SharedRegion, RegionError> {
        SharedRegion::map_with(file, 0, bytes, writable, flags)?.guarded(SigbusCauses::TruncationAndFailure)
    }

    fn guarded(self, causes: SigbusCauses) -> Result<SharedRegion, RegionError> {
        // Mappings are whole pages; for a file of hugepages, the kernel has rejected every other size.
        let length = self.bytes.next_multiple_of(rustix::param::page_size());
        let guard = SigbusGuard::new(self.start, length, causes);
        self.mapping.guard(guard.ok_or(RegionError::NoMemory(self.bytes as u64))?);
        Ok(self)
    }

    /// Maps memory that a peer shares: at least the `bytes` bytes from `offset` of a file of whole pages,
    /// writable, as [`map_untrusted`](Self::map_untrusted) does. Returns the region and the offset in it of
    /// the first of these bytes, since a mapping begins and ends at a page of the file's size.
    ///
    /// # Errors
    /// [`NotMemory`](RegionError::NotMemory) for any other file than memory, because a page fault on it
    /// (FUSE, a network file system) may block for an unbounded time; [`Short`](RegionError::Short), and
    /// those of [`map`](Self::map).
    pub fn map_peer_memory(
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
    ) -> Result<(SharedRegion, u64), RegionError> {
        let failed = |errno: rustix::io::Errno| RegionError::Map { bytes, errno: errno.raw_os_error() };
        // Only files on tmpfs and hugetlbfs, which memfds are, support seals.
        rustix::fs::fcntl_get_seals(file).map_err(|_| RegionError::NotMemory)?;
        let end = offset.checked_add(bytes).filter(|_| bytes > 0).ok_or(RegionError::Size(bytes))?;
        let size = rustix::fs::fstat(file).map_err(failed)?.st_size;
        if u64::try_from(size).is_ok_and(|size| size < end) {
            return Err(RegionError::Short(end));
        }
        let system = rustix::fs::fstatfs(file).map_err(failed)?;
        let page = match system.f_type as u64 {
            HUGETLBFS_MAGIC => system.f_bsize as u64,
            _ => rustix::param::page_size() as u64,
        };
        let start = offset - offset % page;
        let length = (end - start).checked_next_multiple_of(page).ok_or(RegionError::Size(bytes))?;
        Ok((SharedRegion::map_untrusted(file, start, length, true)?, offset - start))
    }

    /// Writes the changed pages to the file and waits for that, as `msync(MS_SYNC)` does.
    ///
    /// # Errors
    /// The kernel's, if it could not write them.
    pub fn sync(&self) -> std::io::Result<()> {
        // SAFETY: the pages of this mapping, which this value keeps mapped; the kernel only reads them.
        Ok(unsafe { rustix::mm::msync(self.start.as_ptr().cast(), self.bytes, MsyncFlags::SYNC) }?)
    }

    /// Tells the kernel in which order a mapping of a file is accessed.
    ///
    /// # Errors
    /// The kernel's.
    pub fn expect_order(&self, order: AccessOrder) -> std::io::Result<()> {
        let advice = match order {
            AccessOrder::Random => Advice::Random,
            AccessOrder::Sequential => Advice::Sequential,
        };
        // SAFETY: the pages of this mapping, which this value keeps mapped; how the kernel reads ahead
        // changes no byte.
        Ok(unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), self.bytes, advice) }?)
    }

    /// Whether its file was truncated and zeroed memory has replaced the region.
    pub fn is_poisoned(&self) -> bool {
        self.mapping.is_poisoned()
    }

    /// The same memory for another core, which counts its references by itself. The last region of a mapping
    /// unmaps it.
    pub fn share(&self) -> SharedRegion {
        let VolatileBytes { start, bytes, writable } = self.memory;
        // SAFETY: of the mapping that the returned value holds beside it, with its size and protection.
        let memory = unsafe { VolatileBytes::new(start, bytes, writable) };
        SharedRegion { memory, anonymous: self.anonymous, mapping: self.mapping.clone() }
    }

    /// The mapping behind it, which stays for as long as it is held.
    pub fn mapping(&self) -> &Arc<RegionMapping> {
        &self.mapping
    }

    fn from_mapping(start: NonNull<u8>, bytes: usize, writable: bool, anonymous: bool) -> SharedRegion {
        // SAFETY: the mapping was just made with this size and protection, and is unmapped only when
        // `mapping`, which the returned value holds beside the `VolatileBytes`, is dropped.
        let memory = unsafe { VolatileBytes::new(start, bytes, writable) };
        // SAFETY: the mapping was just made, and nothing else unmaps it.
        let mapping = Arc::new(unsafe { RegionMapping::new(start, bytes, writable) });
        SharedRegion { memory, anonymous, mapping }
    }

    /// Sets the range to zero; whole pages of anonymous memory are returned to the kernel.
    ///
    /// # Panics
    /// If the range is not inside the memory, or the memory is read-only.
    pub fn zero(&self, offset: u64, bytes: u64) {
        assert!(self.writable, "a write to read-only memory");
        let length = usize::try_from(bytes).expect("a range inside the memory fits the address space");
        let from = self.range(offset, length);
        let page = rustix::param::page_size();
        let head = (from.align_offset(page)).min(length);
        let pages = (length - head) / page * page;
        // SAFETY: head is at most the checked length.
        unsafe { std::ptr::write_bytes(from, 0, head) };
        if pages > 0 {
            // SAFETY: head is at most the checked length.
            let aligned = unsafe { from.add(head) };
            // Miri does not implement madvise, and only private anonymous pages read as zero once discarded.
            // SAFETY: whole pages inside this mapping.
            let dropped = self.anonymous
                && !cfg!(miri)
                && unsafe { rustix::mm::madvise(aligned.cast(), pages, Advice::LinuxDontNeed) }.is_ok();
            if !dropped {
                // SAFETY: the same range. Locked pages cannot be discarded, so they are written.
                unsafe { std::ptr::write_bytes(aligned, 0, pages) };
            }
        }
        // SAFETY: head + pages is at most the checked length.
        let tail = unsafe { from.add(head + pages) };
        // SAFETY: the remainder of the checked length.
        unsafe { std::ptr::write_bytes(tail, 0, length - head - pages) };
    }
}

fn checked_size(bytes: u64) -> Result<usize, RegionError> {
    let size = usize::try_from(bytes).ok().filter(|size| *size > 0 && *size <= isize::MAX as usize);
    size.ok_or(RegionError::Size(bytes))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    #[test]
    fn a_shared_region_is_the_same_memory_and_outlives_the_first() {
        let region = SharedRegion::new(4096).unwrap();
        let shared = region.share();
        region.write(8, b"ring");
        assert_eq!(shared.snapshot::<4>(8), *b"ring");
        assert_eq!(shared.mapping().id(), region.mapping().id());
        drop(region);
        std::thread::spawn(move || shared.store_u32(0, 7)).join().unwrap();
    }

    #[test]
    fn zero_clears_exactly_an_unaligned_range() {
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

    /// A device that has pinned a page goes on to use that one: a page that is zeroed must stay the same.
    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement memfd")]
    fn a_shared_region_in_a_file_keeps_its_pages_and_others_can_map_it() {
        const BYTES: u64 = 3 * 4096 + 100;
        let region = SharedRegion::new_shared(BYTES).unwrap();
        let file = region.mapping().file().unwrap().clone();
        let (other, offset) = SharedRegion::map_peer_memory(file.as_fd(), 0, 4 * 4096).unwrap();
        assert_eq!((offset, region.len()), (0, BYTES));
        region.write(BYTES - 4, b"ring");
        assert_eq!(other.snapshot::<4>(BYTES - 4), *b"ring");
        region.write(4096, &[7; 4096]);
        let before = rustix::fs::fstat(&file).unwrap().st_blocks;
        region.zero(0, BYTES);
        assert_eq!((other.load_u64(4096), other.load_u32(BYTES - 4)), (0, 0));
        assert!(rustix::fs::fstat(&file).unwrap().st_blocks >= before, "pages were discarded");
        assert!(SharedRegion::new(4096).unwrap().mapping().file().is_none());
        assert_eq!(SharedRegion::new_shared(0).err(), Some(RegionError::Size(0)));
    }

    #[test]
    fn invalid_sizes_are_rejected() {
        assert_eq!(SharedRegion::new(0).err(), Some(RegionError::Size(0)));
        assert_eq!(SharedRegion::new(u64::MAX).err(), Some(RegionError::Size(u64::MAX)));
    }

    /// A device reaches the pages at an address: it must not do so when the address is other memory.
    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement file mappings")]
    fn devices_release_a_region_before_it_is_unmapped() {
        struct OnRelease(std::sync::mpsc::Sender<bool>, usize);
        impl Drop for OnRelease {
            fn drop(&mut self) {
                let range = format!("{:x}-", self.1);
                let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
                let _ = self.0.send(maps.lines().any(|line| line.starts_with(&range)));
            }
        }
        let (released, is_released) = std::sync::mpsc::channel();
        // Not a neighbour of other anonymous memory, with which the kernel would list it as one.
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 8192).unwrap();
        let region = SharedRegion::map(file.as_fd(), 0, 8192, true).unwrap();
        let other = SharedRegion::new(4096).unwrap();
        assert_ne!(region.mapping().id(), other.mapping().id());
        let mapping = region.mapping().clone();
        assert_eq!(
            (mapping.start(), mapping.len(), mapping.is_writable()),
            (region.as_ptr().addr(), 8192, true)
        );
        mapping.keep(Box::new(OnRelease(released, mapping.start())));
        drop(region);
        assert!(is_released.try_recv().is_err(), "the mapping is held");
        drop(mapping);
        assert!(is_released.recv().unwrap(), "it is still mapped");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement file mappings")]
    fn mappings_of_one_file_share_its_bytes() {
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
    #[cfg_attr(miri, ignore = "Miri does not implement file mappings")]
    fn memory_of_a_peer_is_mapped_from_any_offset_and_other_files_are_rejected() {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 3 * 4096).unwrap();
        rustix::io::pwrite(&file, b"here", 4096 + 16).unwrap();
        let (region, offset) = SharedRegion::map_peer_memory(file.as_fd(), 4096 + 16, 4096).unwrap();
        assert_eq!((region.len(), offset), (8192, 16));
        assert_eq!(&region.snapshot::<4>(offset), b"here");
        let short = SharedRegion::map_peer_memory(file.as_fd(), 4096, 3 * 4096).err();
        assert_eq!(short, Some(RegionError::Short(4 * 4096)));
        let overflow = SharedRegion::map_peer_memory(file.as_fd(), u64::MAX, 2).err();
        assert_eq!(overflow, Some(RegionError::Size(2)));
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(SharedRegion::map_peer_memory(null.as_fd(), 0, 1).err(), Some(RegionError::NotMemory));
    }
}
