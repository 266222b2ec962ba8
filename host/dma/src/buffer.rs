//! Buffers: contiguous, counted parts of DMA memory.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use crate::arena::{Arena, ChunkMemory};
use crate::external::ExternalSource;
use crate::pool::{Pool, PoolInner};
use crate::region::{RegionMapping, VolatileBytes};

/// What a buffer is part of, and so what its drop does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Home {
    /// An allocation of its pool, of which there is no other buffer.
    Whole,
    /// An allocation of its pool, of which there are or were other buffers: the pool counts them.
    Part,
    /// Memory that is not its pool's: a shared region, or data of another core.
    External,
}

/// Who may write the bytes of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum BufferAccess {
    /// The holder of this buffer alone.
    Exclusive,
    /// No holder: there are or were other buffers of the same bytes.
    ReadOnly,
    /// A peer or device too, at any moment.
    Volatile,
}

/// A contiguous, counted part of memory that is initialised and good for DMA while it is held.
///
/// [`Pool::take`] gives a whole allocation, page-aligned. A buffer can be [split](Self::split_off) into disjoint parts
/// and [joined](Self::join) again, or [shared](Self::share), after which all holders can only read; none of these
/// copies. The allocation goes back to the pool of its core with the last of its buffers: counts are the core's own
/// and not atomic, which is why a buffer cannot leave its core except as a [`Parcel`](crate::Parcel).
///
/// A buffer of [external memory](Pool::attach_external) is part of a region that a peer or device writes at the same
/// time: it can be given to devices and copied, but not borrowed as a slice.
///
/// Contents are what the last holder left; use [`clear`](Self::clear) where they may reach a peer.
pub struct Buffer {
    start: NonNull<u8>,
    pool: Rc<PoolInner>,
    len: u32,
    /// Of the chunk in its arena, or of the pool's entry for external memory.
    index: u16,
    home: Home,
    access: BufferAccess,
}

// With the enums' spare values, `Data` and `Option<Data>` take no more: a request fits a cache line.
const _: () = assert!(size_of::<Option<Buffer>>() == 24);

impl Buffer {
    #[inline]
    pub(crate) fn new(
        start: NonNull<u8>,
        pool: Rc<PoolInner>,
        len: u32,
        index: u16,
        home: Home,
        access: BufferAccess,
    ) -> Buffer {
        Buffer { start, pool, len, index, home, access }
    }

    #[inline]
    pub(crate) fn pool(&self) -> &Rc<PoolInner> {
        &self.pool
    }

    #[inline]
    pub(crate) fn access(&self) -> BufferAccess {
        self.access
    }

    /// Whether its memory is not of its pool: it is lent by a peer, or was adopted from another core.
    #[inline]
    pub fn is_adopted(&self) -> bool {
        self.home == Home::External
    }

    #[inline]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// The pool that it goes back to.
    pub fn home(&self) -> Pool {
        Pool(self.pool.clone())
    }

    /// Whether it is part of memory that a peer shares with us and may write at any moment.
    #[inline]
    pub fn is_external(&self) -> bool {
        self.access == BufferAccess::Volatile
    }

    /// Whether its holder may write it, or have a device write it: not after [`share`](Self::share).
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.access != BufferAccess::ReadOnly
    }

    /// The bytes.
    ///
    /// # Panics
    /// If the buffer is [external](Self::is_external): its bytes may change at any moment.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        assert!(!self.is_external(), "external memory can be copied, not borrowed");
        // SAFETY: `start..start+len` lies in memory that stays mapped while the buffer is held and was zeroed at first.
        // It is this buffer's alone, or no holder can write it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len as usize) }
    }

    /// The bytes, to change them.
    ///
    /// # Panics
    /// If the buffer is [external](Self::is_external) or [shared](Self::share).
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        assert!(
            self.access == BufferAccess::Exclusive,
            "{:?} memory can't be borrowed for writing",
            self.access
        );
        // SAFETY: as in `as_slice`; no other buffer covers these bytes, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len as usize) }
    }

    /// Number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether it has no bytes, which no buffer has that a pool gives.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Most bytes that [`resize`](Self::resize) allows.
    pub fn capacity(&self) -> usize {
        match self.home {
            Home::Whole => self.pool.state.borrow_mut().allocation_bytes(self.index),
            Home::Part | Home::External => self.len(),
        }
    }

    /// Changes the length within the capacity; bytes that come into view hold what lay there.
    ///
    /// # Panics
    /// If `len` is 0 or above [`capacity`](Self::capacity).
    pub fn resize(&mut self, len: usize) {
        assert!(len > 0 && len <= self.capacity(), "{len} bytes do not fit in {}", self.capacity());
        self.len = len as u32;
    }

    /// Cuts the buffer at `at`: it keeps the bytes before, and the result has the others. Both stay where they are.
    ///
    /// # Panics
    /// If `at` is 0 or not below the length: there are no empty buffers.
    pub fn split_off(&mut self, at: usize) -> Buffer {
        assert!(at > 0 && at < self.len(), "a buffer of {} bytes can't be split at {at}", self.len);
        let mut tail = self.duplicate();
        // SAFETY: `at` is below the length.
        tail.start = unsafe { self.start.add(at) };
        tail.len -= at as u32;
        self.len = at as u32;
        tail
    }

    /// Undoes [`split_off`](Self::split_off): one buffer of two that are neighbours in one allocation or external region.
    ///
    /// # Errors
    /// Gives both back if they are not neighbours, or differ in who may write them.
    pub fn join(mut self, next: Buffer) -> Result<Buffer, (Buffer, Buffer)> {
        let end = self.start.as_ptr().addr() + self.len();
        let neighbours = end == next.start.as_ptr().addr()
            && Rc::ptr_eq(&self.pool, &next.pool)
            && (self.home, self.index, self.access) == (next.home, next.index, next.access)
            && match self.home {
                Home::Whole => false,
                Home::Part => {
                    self.pool.state.borrow_mut().same_allocation(self.index, self.start, next.start)
                }
                Home::External => true,
            };
        let len = self.len.checked_add(next.len).filter(|_| neighbours);
        let Some(len) = len else { return Err((self, next)) };
        self.len = len;
        drop(next);
        self.become_whole();
        Ok(self)
    }

    /// Whether it is an allocation of its pool of which there is no other buffer. A [`share`](Self::share) of it ends with
    /// [`make_writable`](Self::make_writable) once the other buffers are gone; that of a part, or of memory that is not the
    /// pool's, does not.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.home == Home::Whole
    }

    /// Another buffer of the same bytes. From now on neither can write them; see
    /// [`make_writable`](Self::make_writable).
    pub fn share(&mut self) -> Buffer {
        if self.access == BufferAccess::Exclusive {
            self.access = BufferAccess::ReadOnly;
        }
        self.duplicate()
    }

    /// Makes the buffer writable again if no other buffer of its allocation is left. Returns whether it is writable.
    pub fn make_writable(&mut self) -> bool {
        if self.access == BufferAccess::ReadOnly
            && self.home == Home::Part
            && self.pool.state.borrow_mut().sole_holder(self.start, self.index).0
        {
            self.access = BufferAccess::Exclusive;
            self.become_whole();
        }
        self.is_writable()
    }

    /// Another buffer of the same bytes and access, counted.
    fn duplicate(&mut self) -> Buffer {
        let mut state = self.pool.state.borrow_mut();
        match self.home {
            Home::External => state.external[self.index as usize].live += 1,
            home => state.add_holder(self.start, self.index, home == Home::Whole),
        }
        drop(state);
        if self.home == Home::Whole {
            self.home = Home::Part;
        }
        Buffer { pool: self.pool.clone(), ..*self }
    }

    /// Stops counting once this is the only buffer of its allocation, from the first byte on.
    fn become_whole(&mut self) {
        if self.home == Home::Part
            && self.access == BufferAccess::Exclusive
            && self.pool.state.borrow_mut().sole_holder(self.start, self.index) == (true, true)
        {
            self.home = Home::Whole;
        }
    }

    /// Drops a buffer of memory that is not its pool's: a count, without a call.
    ///
    /// # Panics
    /// If it is its pool's.
    #[inline(always)]
    pub fn release(self) {
        // Without the value in the message: a buffer whose address is taken is not passed in registers.
        assert!(self.home == Home::External, "memory of the pool goes back to it");
        let this = ManuallyDrop::new(self);
        this.pool.release_external(this.index);
        // SAFETY: the buffer is not dropped, and so its pool is dropped here alone.
        drop(unsafe { std::ptr::read(&this.pool) });
    }

    /// Sets every byte to zero.
    ///
    /// # Panics
    /// If the buffer is [shared](Self::share).
    #[inline]
    pub fn clear(&mut self) {
        assert!(self.is_writable(), "shared memory can't be written");
        // SAFETY: `start..start+len` is mapped while the buffer is held, and writable, external or not.
        unsafe { std::ptr::write_bytes(self.start.as_ptr(), 0, self.len as usize) }
    }

    /// Copies from `offset` of the buffer, external or not.
    ///
    /// # Panics
    /// If the range is not inside.
    #[inline]
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) {
        self.cells().read(offset as u64, out);
    }

    /// Copies to `offset` of the buffer, external or not.
    ///
    /// # Panics
    /// If the range is not inside, or the buffer is [shared](Self::share).
    #[inline]
    pub fn copy_from(&mut self, offset: usize, data: &[u8]) {
        self.cells().write(offset as u64, data);
    }

    #[inline]
    fn cells(&self) -> VolatileBytes {
        // SAFETY: the bytes stay mapped while the buffer is held, and the cells are used at once.
        unsafe { VolatileBytes::new(self.start, self.len as usize, self.is_writable()) }
    }

    /// Address of the first byte, for a device or the kernel. Valid while the buffer is held.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Index of the chunk in its arena, which is also its index among io_uring's registered buffers; `None` for memory
    /// that is not the arena's.
    #[inline]
    pub fn chunk_index(&self) -> Option<u32> {
        match self.home {
            Home::Whole | Home::Part => Some(self.index.into()),
            Home::External => self.pool.state.borrow().external[self.index as usize].chunk.map(u32::from),
        }
    }

    /// The region that it is part of, if it is [external](Self::is_external), for a device that maps the whole region.
    /// `read` is called with it.
    pub fn with_region<R>(&self, read: impl FnOnce(&Arc<RegionMapping>) -> R) -> Option<R> {
        if self.home != Home::External {
            return None;
        }
        match &self.pool.state.borrow().external[self.index as usize].source {
            Some(ExternalSource::Region(region)) => Some(read(region.mapping())),
            _ => None,
        }
    }

    /// Index of the chunk in its arena, or, for external memory, of its entry: a key for caches that compare addresses
    /// as well.
    #[inline]
    pub fn backing_index(&self) -> u32 {
        self.index.into()
    }

    /// The arena of its pool, which keeps the buffer's chunk mapped.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.pool.arena
    }

    /// The chunk, to register or map it; `None` for memory that is not the arena's.
    pub fn chunk(&self) -> Option<ChunkMemory> {
        Some(self.pool.arena.chunk(self.chunk_index()?))
    }
}

impl Drop for Buffer {
    #[inline]
    fn drop(&mut self) {
        match self.home {
            Home::Whole => self.pool.state.borrow_mut().free(self.start, self.index),
            Home::Part => self.pool.state.borrow_mut().remove_holder(self.start, self.index),
            Home::External => self.pool.release_external(self.index),
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes at {:p}", self.len, self.start)?;
        match self.access {
            BufferAccess::Exclusive => f.write_str(")"),
            BufferAccess::ReadOnly => f.write_str(", read-only)"),
            BufferAccess::Volatile => f.write_str(", external)"),
        }
    }
}

/// A buffer whose bytes a device reads and writes while we do: the memory of a queue.
///
/// Its bytes are reached through [`VolatileBytes`].
pub struct DeviceBuffer {
    cells: VolatileBytes,
    buffer: Buffer,
}

impl DeviceBuffer {
    /// Takes a buffer and sets it to zero.
    ///
    /// # Panics
    /// If it is [shared](Buffer::share).
    pub fn new(mut buffer: Buffer) -> DeviceBuffer {
        buffer.clear();
        // SAFETY: the buffer is kept, and dropped together with the cells.
        let cells = unsafe { VolatileBytes::new(buffer.start, buffer.len as usize, true) };
        DeviceBuffer { cells, buffer }
    }

    /// The buffer, to find out where a device sees it.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }
}

impl std::ops::Deref for DeviceBuffer {
    type Target = VolatileBytes;

    #[inline]
    fn deref(&self) -> &VolatileBytes {
        &self.cells
    }
}

#[cfg(test)]
mod tests;
