//! Memory that is not the pool's own, handed out in counted parts.

use std::rc::Rc;

use crate::buffer::{Buffer, BufferAccess, Home};
use crate::parcel::Parcel;
use crate::pool::{Pool, PoolInner};
use crate::region::SharedRegion;

/// Most external regions and adopted parcels of one pool at a time: an index is 16 bits wide.
pub(crate) const EXTERNAL_MAX: usize = 1 << 16;

/// Memory of which parts are handed out as buffers, on one core.
pub(crate) struct ExternalEntry {
    /// What keeps the memory mapped; `None` where the entry is free.
    pub(crate) source: Option<ExternalSource>,
    /// Buffers that are held of it.
    pub(crate) live: u32,
    /// Whether nothing more is handed out of it: the entry is freed with the last buffer.
    pub(crate) ended: bool,
    /// The chunk that it lies in, where that is one of the pool's arena.
    pub(crate) chunk: Option<u16>,
}

/// What keeps external memory mapped.
pub(crate) enum ExternalSource {
    /// Memory that a peer or device shares with us.
    Region(Rc<SharedRegion>),
    /// Data of another core.
    Parcel(Parcel),
    /// Data of another core in several slices, each of which has an entry.
    Slices(#[expect(dead_code, reason = "kept for its drop")] Rc<Parcel>),
}

/// Memory that a peer shares with us, handed out in parts. See [`Pool::attach_external`].
///
/// Dropped, it hands out no more; the region stays mapped until the last part has been dropped.
pub struct ExternalMemory {
    pool: Rc<PoolInner>,
    region: Rc<SharedRegion>,
    index: u16,
}

impl ExternalMemory {
    /// The region.
    #[inline]
    pub fn region(&self) -> &Rc<SharedRegion> {
        &self.region
    }

    /// How many buffers of it are held.
    #[inline]
    pub fn live_buffers(&self) -> u32 {
        self.pool.state.borrow().external[self.index as usize].live
    }

    /// `len` bytes at `offset` as a buffer; `None` if they are not inside, or `len` is 0.
    ///
    /// Nothing keeps others from holding or writing the same bytes: they are the entry's.
    #[inline]
    pub fn buffer(&self, offset: u64, len: u32) -> Option<Buffer> {
        let inside = len > 0 && offset.checked_add(len.into()).is_some_and(|end| end <= self.region.len());
        if !inside {
            return None;
        }
        // SAFETY: the offset lies inside the region.
        let start = unsafe { self.region.as_ptr().add(offset as usize) };
        let start = std::ptr::NonNull::new(start)?;
        self.pool.state.borrow_mut().external[self.index as usize].live += 1;
        Some(Buffer::new(start, self.pool.clone(), len, self.index, Home::External, BufferAccess::Volatile))
    }
}

impl Drop for ExternalMemory {
    fn drop(&mut self) {
        self.pool.end_external(self.index);
    }
}

impl Pool {
    /// Hands out parts of a region as buffers of this core.
    ///
    /// # Panics
    /// With 65,536 regions and adopted parcels at a time.
    pub fn attach_external(&self, region: Rc<SharedRegion>) -> ExternalMemory {
        self.try_attach_external(region).expect("fewer than 65,536 at a time")
    }

    /// As [`attach_external`](Self::attach_external); `None` with 65,536 regions and adopted parcels at a time.
    pub fn try_attach_external(&self, region: Rc<SharedRegion>) -> Option<ExternalMemory> {
        let entry = ExternalEntry {
            source: Some(ExternalSource::Region(region.clone())),
            live: 0,
            ended: false,
            chunk: None,
        };
        let index = self.0.add_external(entry).ok()?;
        Some(ExternalMemory { pool: self.0.clone(), region, index })
    }
}

impl PoolInner {
    /// Adds an entry; gives it back if there are [`EXTERNAL_MAX`].
    pub(crate) fn add_external(&self, entry: ExternalEntry) -> Result<u16, Box<ExternalEntry>> {
        let mut state = self.state.borrow_mut();
        let vacant = state.free_external.pop();
        match vacant {
            Some(index) => {
                state.external[index as usize] = entry;
                Ok(index)
            }
            None if state.external.len() == EXTERNAL_MAX => Err(Box::new(entry)),
            None => {
                state.external.push(entry);
                Ok((state.external.len() - 1) as u16)
            }
        }
    }

    /// Whether `count` entries can be added.
    pub(crate) fn has_room_for_external(&self, count: usize) -> bool {
        let state = self.state.borrow();
        EXTERNAL_MAX - state.external.len() + state.free_external.len() >= count
    }

    /// Nothing more is handed out of an entry.
    fn end_external(&self, index: u16) {
        let mut state = self.state.borrow_mut();
        state.external[index as usize].ended = true;
        let source = state.free_unused_external(index);
        drop(state);
        // A parcel goes back to its core, and a region is unmapped, outside of the borrow.
        drop(source);
    }

    /// A buffer of an entry was dropped.
    #[inline]
    pub(crate) fn release_external(&self, index: u16) {
        let mut state = self.state.borrow_mut();
        let entry = &mut state.external[index as usize];
        entry.live -= 1;
        let is_unused = entry.live == 0 && entry.ended;
        drop(state);
        if is_unused {
            self.free_released(index);
        }
    }

    /// Frees an entry whose last buffer was dropped after its end.
    #[cold]
    #[inline(never)]
    fn free_released(&self, index: u16) {
        let source = self.state.borrow_mut().free_unused_external(index);
        // What keeps the memory mapped may drop buffers of this pool in turn.
        drop(source);
    }
}
