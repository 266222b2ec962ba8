//! The client's memory, as the device reaches it.

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use memory::{Loan, Pool, SharedRegion};
use rustix::io::Errno;
use wire_vfio_user::{DmaMap, DmaUnmap, dma_flags, unmap_flags};

/// Ranges that a client may have mapped at a time, as it is told. Each is a mapping of this process, of
/// which the kernel allows 65,530 by default.
pub(super) const RANGES_MAX: usize = 8192;
/// Ranges are whole pages.
const PAGE: u64 = 4096;

/// The ranges of memory that the client lets the device reach, by rising address.
#[derive(Default)]
pub(super) struct Memory {
    ranges: Vec<Range>,
    /// Where the last look-up ended: the next is mostly there, too.
    last: std::cell::Cell<usize>,
}

/// One range.
struct Range {
    address: u64,
    size: u64,
    writable: bool,
    /// `None` for memory that cannot be mapped here.
    loan: Option<Loan>,
}

/// Part of a range.
#[derive(Clone, Copy)]
pub(super) struct Spot<'a> {
    pub(super) loan: &'a Loan,
    pub(super) offset: u64,
    pub(super) writable: bool,
}

/// A range that was taken away, and of which parts are still with devices.
pub(super) struct Leaving(Vec<Loan>);

impl Leaving {
    /// Whether nothing of it is used any more.
    pub(super) fn is_unused(&self) -> bool {
        self.0.iter().all(|loan| loan.lent() == 0)
    }
}

impl Memory {
    /// Lets the device reach a range.
    pub(super) fn map(&mut self, pool: &Pool, map: &DmaMap, file: Option<OwnedFd>) -> Result<(), Errno> {
        let DmaMap { argsz, flags, offset, address, size } = *map;
        let known = dma_flags::READ | dma_flags::WRITE | dma_flags::MMAP | dma_flags::FILE_IO;
        let whole = |value: u64| value.is_multiple_of(PAGE);
        if (argsz as usize) < DmaMap::SIZE
            || flags & !known != 0
            || flags & (dma_flags::READ | dma_flags::WRITE) == 0
            || !whole(address)
            || !whole(size)
            || !whole(offset)
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
        let loan = match file {
            Some(file) if flags & dma_flags::FILE_IO == 0 && is_memory(&file) => {
                check_size(&file, offset + size)?;
                let region = SharedRegion::map_foreign(file.as_fd(), offset, size, writable);
                let region = region.map_err(|error| match error {
                    memory::RegionError::Map { errno, .. } => Errno::from_raw_os_error(errno),
                    _ => Errno::NOMEM,
                })?;
                Some(pool.lend(Rc::new(region)))
            }
            _ => None,
        };
        self.ranges.insert(at, Range { address, size, writable, loan });
        self.last.set(0);
        Ok(())
    }

    /// Takes a range away, which must be as it was mapped, or everything.
    pub(super) fn unmap(&mut self, unmap: &DmaUnmap) -> Result<Leaving, Errno> {
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
        Ok(Leaving(range.loan.into_iter().collect()))
    }

    /// Takes everything away.
    pub(super) fn unmap_all(&mut self) -> Leaving {
        self.last.set(0);
        Leaving(self.ranges.drain(..).filter_map(|range| range.loan).collect())
    }

    /// Where `bytes` bytes at an address lie, if they are in one range that can be reached.
    #[inline]
    pub(super) fn find(&self, address: u64, bytes: u64) -> Option<Spot<'_>> {
        let last = self.last.get();
        if let Some(range) = self.ranges.get(last)
            && let Some(spot) = range.spot(address, bytes)
        {
            return Some(spot);
        }
        let at = self.ranges.partition_point(|range| range.address <= address).checked_sub(1)?;
        self.last.set(at);
        self.ranges[at].spot(address, bytes)
    }

    /// Whether the client has taken memory away without a word.
    pub(super) fn is_poisoned(&self) -> bool {
        let mut loans = self.ranges.iter().filter_map(|range| range.loan.as_ref());
        loans.any(|loan| loan.region().is_poisoned())
    }
}

impl Range {
    #[inline]
    fn spot(&self, address: u64, bytes: u64) -> Option<Spot<'_>> {
        let offset = address.wrapping_sub(self.address);
        let inside = offset < self.size && bytes <= self.size - offset;
        if !inside {
            return None;
        }
        Some(Spot { loan: self.loan.as_ref()?, offset, writable: self.writable })
    }
}

/// Whether a descriptor is of memory: a memfd, or a file on tmpfs or hugetlbfs. Only these can be sealed.
///
/// What else can be mapped may make whoever touches it wait for as long as its maker pleases: a file
/// of FUSE, or on a network.
fn is_memory(file: &OwnedFd) -> bool {
    rustix::fs::fcntl_get_seals(file).is_ok()
}

fn check_size(file: &OwnedFd, need: u64) -> Result<(), Errno> {
    let size = rustix::fs::fstat(file)?.st_size;
    if u64::try_from(size).is_ok_and(|size| size >= need) { Ok(()) } else { Err(Errno::INVAL) }
}
