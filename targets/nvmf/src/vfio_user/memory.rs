//! The client's memory that is mapped for DMA.

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use dma::{ExternalMemory, Pool, SharedRegion};
use rustix::io::Errno;
use wire_vfio_user::{DmaMap, DmaUnmap, dma_flags, unmap_flags};

/// Maximum DMA ranges of a client (`max_dma_maps`). Each is a mapping of this process, of which the kernel
/// allows 65,530 by default.
pub(super) const RANGES_MAX: usize = 8192;
/// DMA ranges consist of whole pages.
const PAGE: u64 = 4096;

/// The client's DMA ranges, in ascending order of address.
///
/// `DMA_MAP` adds a range and maps its file here; `DMA_UNMAP` removes it. Buffers in a range are lent to devices
/// without a copy, so an unmap completes only when all of them are returned.
#[derive(Default)]
pub(super) struct ClientMemory {
    ranges: Vec<DmaRange>,
    /// Index of the range of the last translation: usually the next one hits it, too.
    last: std::cell::Cell<usize>,
}

/// A DMA range.
struct DmaRange {
    address: u64,
    size: u64,
    writable: bool,
    /// `None` if the range has no file that can be mapped.
    external: Option<ExternalMemory>,
}

/// A translated address: the memory of a range and an offset in it.
#[derive(Clone, Copy)]
pub(super) struct DmaTarget<'a> {
    pub(super) external: &'a ExternalMemory,
    pub(super) offset: u64,
    pub(super) writable: bool,
}

/// Ranges that were unmapped, but of which buffers may still be lent to devices.
pub(super) struct UnmappedRanges(Vec<ExternalMemory>);

impl UnmappedRanges {
    /// Whether all buffers have been returned.
    pub(super) fn is_unused(&self) -> bool {
        self.0.iter().all(|external| external.live_buffers() == 0)
    }
}

impl ClientMemory {
    /// Adds a range (`DMA_MAP`).
    ///
    /// # Errors
    /// `EINVAL` for invalid parameters or a file that is too short, `ENOSPC` above `RANGES_MAX`, `EEXIST` for an
    /// overlap, or the error of `mmap`.
    pub(super) fn map(&mut self, pool: &Pool, map: &DmaMap, file: Option<OwnedFd>) -> Result<(), Errno> {
        let DmaMap { argsz, flags, offset, address, size } = *map;
        let known_flags = dma_flags::READ | dma_flags::WRITE | dma_flags::MMAP | dma_flags::FILE_IO;
        let is_aligned = |value: u64| value.is_multiple_of(PAGE);
        if (argsz as usize) < DmaMap::SIZE
            || flags & !known_flags != 0
            || flags & (dma_flags::READ | dma_flags::WRITE) == 0
            || !is_aligned(address)
            || !is_aligned(size)
            || !is_aligned(offset)
            || size == 0
            || address.checked_add(size).is_none()
            || offset.checked_add(size).is_none()
            || flags & (dma_flags::MMAP | dma_flags::FILE_IO) != 0 && file.is_none()
        {
            return Err(Errno::INVAL);
        }
        if self.ranges.len() >= RANGES_MAX {
            return Err(Errno::NOSPC);
        }
        let at = self.ranges.partition_point(|range| range.address < address);
        let before = at.checked_sub(1).and_then(|before| self.ranges.get(before));
        let overlaps = before.is_some_and(|before| before.address + before.size > address)
            || self.ranges.get(at).is_some_and(|after| after.address < address + size);
        if overlaps {
            return Err(Errno::EXIST);
        }
        let writable = flags & dma_flags::WRITE != 0;
        let external = match file {
            Some(file) if flags & dma_flags::FILE_IO == 0 && is_memory(&file) => {
                check_size(&file, offset + size)?;
                let region = SharedRegion::map_untrusted(file.as_fd(), offset, size, writable);
                let region = region.map_err(|error| match error {
                    dma::RegionError::Map { errno, .. } => Errno::from_raw_os_error(errno),
                    _ => Errno::NOMEM,
                })?;
                Some(pool.try_attach_external(Rc::new(region)).ok_or(Errno::NOSPC)?)
            }
            _ => None,
        };
        self.ranges.insert(at, DmaRange { address, size, writable, external });
        self.last.set(0);
        Ok(())
    }

    /// Removes a range, which must match one that was mapped, or all ranges (`DMA_UNMAP`).
    pub(super) fn unmap(&mut self, unmap: &DmaUnmap) -> Result<UnmappedRanges, Errno> {
        let DmaUnmap { argsz, flags, address, size } = *unmap;
        if (argsz as usize) < DmaUnmap::SIZE || flags & !unmap_flags::ALL != 0 {
            return Err(Errno::INVAL);
        }
        self.last.set(0);
        if flags & unmap_flags::ALL != 0 {
            if address != 0 || size != 0 {
                return Err(Errno::INVAL);
            }
            return Ok(self.unmap_all());
        }
        let found = self.ranges.iter().position(|range| range.address == address && range.size == size);
        let range = self.ranges.remove(found.ok_or(Errno::NOENT)?);
        Ok(UnmappedRanges(range.external.into_iter().collect()))
    }

    /// Removes all ranges.
    pub(super) fn unmap_all(&mut self) -> UnmappedRanges {
        self.last.set(0);
        UnmappedRanges(self.ranges.drain(..).filter_map(|range| range.external).collect())
    }

    /// Translates an I/O address; `None` unless all `bytes` lie in one mapped range.
    #[inline]
    pub(super) fn translate(&self, address: u64, bytes: u64) -> Option<DmaTarget<'_>> {
        let last = self.last.get();
        if let Some(range) = self.ranges.get(last)
            && let Some(mapped) = range.translate(address, bytes)
        {
            return Some(mapped);
        }
        let at = self.ranges.partition_point(|range| range.address <= address).checked_sub(1)?;
        self.last.set(at);
        self.ranges[at].translate(address, bytes)
    }

    /// Whether an access to a range raised SIGBUS, because the client truncated the file.
    pub(super) fn is_poisoned(&self) -> bool {
        let mut externals = self.ranges.iter().filter_map(|range| range.external.as_ref());
        externals.any(|external| external.region().is_poisoned())
    }
}

impl DmaRange {
    #[inline]
    fn translate(&self, address: u64, bytes: u64) -> Option<DmaTarget<'_>> {
        let offset = address.wrapping_sub(self.address);
        let is_inside = offset < self.size && bytes <= self.size - offset;
        if !is_inside {
            return None;
        }
        Some(DmaTarget { external: self.external.as_ref()?, offset, writable: self.writable })
    }
}

/// Whether a descriptor is a memfd, or a file on tmpfs or hugetlbfs. Only these support seals.
///
/// A page fault on any other file (FUSE, a network file system) may block for an unbounded time.
fn is_memory(file: &OwnedFd) -> bool {
    rustix::fs::fcntl_get_seals(file).is_ok()
}

fn check_size(file: &OwnedFd, need: u64) -> Result<(), Errno> {
    let size = rustix::fs::fstat(file)?.st_size;
    if u64::try_from(size).is_ok_and(|size| size >= need) { Ok(()) } else { Err(Errno::INVAL) }
}
