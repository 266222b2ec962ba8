//! The guest's memory.

use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use dma::{Buffer, ExternalMemory, Pool, RegionError, SharedRegion};
use wire_vhost_user::MemoryRegion;

use crate::chain::GuestRange;
use crate::limits::MEMORY_REGIONS_MAX;

/// The regions of the guest's memory that the front-end has described, in ascending order of guest address.
///
/// Buffers in a region are lent to devices without a copy and keep it mapped; the removal of a region waits for them
/// ([`RemovedRegions`]).
#[derive(Default)]
pub(crate) struct GuestMemory {
    regions: Vec<GuestRegion>,
    /// Indices of the regions of the last translations: usually the next one hits one of them. There are two because a
    /// driver's requests and their data may each have a region.
    recent: [Cell<usize>; 2],
}

struct GuestRegion {
    described: MemoryRegion,
    /// Offset of its first byte in the mapping.
    offset: u64,
    external: ExternalMemory,
}

/// Why memory was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The size is 0, or addresses overflow.
    #[error("a memory region has an invalid range")]
    Range,
    /// Two regions have guest addresses in common.
    #[error("memory regions overlap")]
    Overlap,
    /// There are too many regions.
    #[error("there are too many memory regions")]
    TooMany,
    /// No region has this range.
    #[error("there is no such memory region")]
    NotFound,
    /// A region comes without its file, or a file without a region.
    #[error("regions and files do not match")]
    Files,
    /// The file cannot be mapped.
    #[error("a memory region cannot be mapped: {0}")]
    Map(#[from] RegionError),
}

/// Regions that were removed, but of which buffers may still be lent to devices.
#[derive(Default)]
pub(crate) struct RemovedRegions(Vec<ExternalMemory>);

impl RemovedRegions {
    /// Whether all buffers have been returned.
    pub(crate) fn are_returned(&self) -> bool {
        self.0.iter().all(|external| external.live_buffers() == 0)
    }

    /// Whether a place is in one of them.
    pub(crate) fn contain(&self, place: &GuestPlace) -> bool {
        self.0.iter().any(|external| Rc::ptr_eq(external.region(), &place.region))
    }
}

/// A place in guest memory that stays mapped.
#[derive(Clone)]
pub(crate) struct GuestPlace {
    pub(crate) region: Rc<SharedRegion>,
    pub(crate) offset: u64,
}

/// A place of a core's, on its way to another one.
pub(crate) struct SharedPlace {
    region: SharedRegion,
    offset: u64,
}

impl GuestPlace {
    /// The same place, for another core.
    pub(crate) fn share(&self) -> SharedPlace {
        SharedPlace { region: self.region.share(), offset: self.offset }
    }
}

impl From<SharedPlace> for GuestPlace {
    fn from(SharedPlace { region, offset }: SharedPlace) -> GuestPlace {
        GuestPlace { region: Rc::new(region), offset }
    }
}

/// A region of a core's, on its way to another one, which maps nothing.
pub(crate) struct SharedGuestRegion {
    described: MemoryRegion,
    offset: u64,
    region: SharedRegion,
}

/// Contiguous mapped bytes from a guest address on.
#[derive(Clone, Copy)]
pub(crate) struct GuestPiece<'a> {
    external: &'a ExternalMemory,
    /// Offset in the mapping.
    pub(crate) offset: u64,
    /// Number of bytes, at least 1.
    pub(crate) length: u32,
}

impl<'a> GuestPiece<'a> {
    #[inline]
    pub(crate) fn region(&self) -> &'a Rc<SharedRegion> {
        self.external.region()
    }

    #[inline]
    pub(crate) fn place(&self) -> GuestPlace {
        GuestPlace { region: self.region().clone(), offset: self.offset }
    }

    /// The bytes as a buffer for a device.
    #[inline]
    pub(crate) fn buffer(&self) -> Option<Buffer> {
        self.external.buffer(self.offset, self.length)
    }
}

impl GuestMemory {
    /// Adds a region, whose bytes are in `file`.
    pub(crate) fn add(
        &mut self,
        pool: &Pool,
        described: MemoryRegion,
        file: &OwnedFd,
    ) -> Result<(), MemoryError> {
        let MemoryRegion { guest_address, size, user_address, mmap_offset } = described;
        let ends = [guest_address, user_address, mmap_offset].map(|start| start.checked_add(size));
        if size == 0 || ends.contains(&None) {
            return Err(MemoryError::Range);
        }
        if self.regions.len() >= MEMORY_REGIONS_MAX {
            return Err(MemoryError::TooMany);
        }
        let at = self.regions.partition_point(|region| region.described.guest_address < guest_address);
        let before = at.checked_sub(1).and_then(|before| self.regions.get(before));
        let overlaps = before
            .is_some_and(|before| before.described.guest_address + before.described.size > guest_address)
            || self.regions.get(at).is_some_and(|after| after.described.guest_address < guest_address + size);
        if overlaps {
            return Err(MemoryError::Overlap);
        }
        let (region, offset) = SharedRegion::map_peer_memory(file.as_fd(), mmap_offset, size)?;
        let external = pool.try_attach_external(Rc::new(region)).ok_or(MemoryError::TooMany)?;
        self.regions.insert(at, GuestRegion { described, offset, external });
        self.forget_recent();
        Ok(())
    }

    /// Removes a region. As the specification says, the offset in the file does not count.
    pub(crate) fn remove(&mut self, described: &MemoryRegion) -> Result<RemovedRegions, MemoryError> {
        let is_it = |region: &GuestRegion| {
            MemoryRegion { mmap_offset: described.mmap_offset, ..region.described } == *described
        };
        let found = self.regions.iter().position(is_it).ok_or(MemoryError::NotFound)?;
        self.forget_recent();
        Ok(RemovedRegions(vec![self.regions.remove(found).external]))
    }

    /// Its regions, for another core.
    pub(crate) fn share(&self) -> Vec<SharedGuestRegion> {
        let share = |one: &GuestRegion| SharedGuestRegion {
            described: one.described,
            offset: one.offset,
            region: one.external.region().share(),
        };
        self.regions.iter().map(share).collect()
    }

    /// Has the regions that another core has. Returns those that it has no more.
    pub(crate) fn replace(
        &mut self,
        pool: &Pool,
        shared: Vec<SharedGuestRegion>,
    ) -> Result<RemovedRegions, MemoryError> {
        let mut before = std::mem::take(self);
        for SharedGuestRegion { described, offset, region } in shared {
            let is_it = |one: &GuestRegion| {
                one.described == described && one.external.region().mapping().id() == region.mapping().id()
            };
            let external = match before.regions.iter().position(is_it) {
                Some(at) => before.regions.remove(at).external,
                None => pool.try_attach_external(Rc::new(region)).ok_or(MemoryError::TooMany)?,
            };
            self.regions.push(GuestRegion { described, offset, external });
        }
        Ok(before.clear())
    }

    /// Removes all regions.
    pub(crate) fn clear(&mut self) -> RemovedRegions {
        self.forget_recent();
        RemovedRegions(self.regions.drain(..).map(|region| region.external).collect())
    }

    /// The first of the `length` bytes at a guest address that are contiguous; `None` if the first is not mapped, or
    /// there are none.
    #[inline]
    pub(crate) fn piece(&self, address: u64, length: u32) -> Option<GuestPiece<'_>> {
        for index in &self.recent {
            if let Some(region) = self.regions.get(index.get())
                && let Some(piece) = region.piece(address, length)
            {
                return Some(piece);
            }
        }
        self.find(address, length)
    }

    /// A range that is contiguous.
    #[inline]
    pub(crate) fn whole(&self, range: &GuestRange) -> Option<GuestPiece<'_>> {
        let piece = self.piece(range.address, range.length)?;
        if piece.length == range.length { Some(piece) } else { None }
    }

    /// As [`piece`](Self::piece), in any region.
    #[inline(never)]
    fn find(&self, address: u64, length: u32) -> Option<GuestPiece<'_>> {
        let at = self.regions.partition_point(|region| region.described.guest_address <= address);
        let at = at.checked_sub(1)?;
        self.recent[1].set(self.recent[0].replace(at));
        self.regions[at].piece(address, length)
    }

    /// Regions have other indices now.
    fn forget_recent(&self) {
        self.recent.iter().for_each(|index| index.set(0));
    }

    /// `bytes` bytes at an address of the front-end, in one region.
    pub(crate) fn by_user_address(&self, address: u64, bytes: u64) -> Option<GuestPlace> {
        self.regions.iter().find_map(|region| {
            let offset = address.wrapping_sub(region.described.user_address);
            let is_inside = offset < region.described.size && bytes <= region.described.size - offset;
            is_inside.then(|| GuestPlace {
                region: region.external.region().clone(),
                offset: region.offset + offset,
            })
        })
    }

    /// The guest address of an address of the front-end.
    pub(crate) fn guest_address(&self, user_address: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let offset = user_address.wrapping_sub(region.described.user_address);
            (offset < region.described.size).then(|| region.described.guest_address + offset)
        })
    }

    /// The guest address of a buffer's first byte.
    pub(crate) fn guest_address_of(&self, buffer: &Buffer) -> Option<u64> {
        self.guest_address_at(buffer.as_ptr().addr())
    }

    /// The guest address of a place.
    pub(crate) fn guest_address_of_place(&self, place: &GuestPlace) -> Option<u64> {
        self.guest_address_at(place.region.as_ptr().addr() + place.offset as usize)
    }

    /// The guest address of an address of this process.
    fn guest_address_at(&self, address: usize) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let start = region.external.region().as_ptr().addr() + region.offset as usize;
            let offset = address.wrapping_sub(start) as u64;
            (offset < region.described.size).then(|| region.described.guest_address + offset)
        })
    }

    /// Whether an access to a region raised SIGBUS, because the client truncated the file.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.regions.iter().any(|region| region.external.region().is_poisoned())
    }
}

impl GuestRegion {
    #[inline]
    fn piece(&self, address: u64, length: u32) -> Option<GuestPiece<'_>> {
        let offset = address.wrapping_sub(self.described.guest_address);
        if offset >= self.described.size || length == 0 {
            return None;
        }
        let left = self.described.size - offset;
        let length = length.min(u32::try_from(left).unwrap_or(u32::MAX));
        Some(GuestPiece { external: &self.external, offset: self.offset + offset, length })
    }
}
