//! Buffers and the per-core pools that they come from.

use std::cell::RefCell;
use std::fmt;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use crate::arena::{Arena, CHUNK_BYTES, Chunk};

/// Smallest buffer: one page, so that every buffer suits direct I/O.
pub const BUFFER_BYTES_MIN: usize = 4096;
/// Largest buffer: half a chunk.
pub const BUFFER_BYTES_MAX: usize = CHUNK_BYTES / 2;

/// 4 KiB, 8 KiB, … 1 MiB.
const CLASSES: usize = (BUFFER_BYTES_MAX / BUFFER_BYTES_MIN).ilog2() as usize + 1;

/// One core's cache of buffers. Cheap to clone; taking and giving back touch no other core
/// unless the cache is empty.
#[derive(Clone)]
pub struct Pool(Rc<Inner>);

struct Inner {
    arena: Arc<Arena>,
    free: RefCell<[Vec<Free>; CLASSES]>,
}

#[derive(Clone, Copy)]
struct Free {
    start: NonNull<u8>,
    chunk: u32,
}

/// Memory owned by one holder, page-aligned, initialised, and good for DMA while it is held.
///
/// Contents are what the last holder left; use [`Buffer::clear`] where they may reach a stranger.
/// Dropped, it goes back to the pool of its core, which is why it cannot leave that core.
pub struct Buffer {
    start: NonNull<u8>,
    pool: Rc<Inner>,
    len: u32,
    /// Class in the low bits, chunk above: a request with its buffer fits a cache line.
    place: u32,
}

const CLASS_BITS: u32 = 4;
const _: () = assert!(CLASSES <= 1 << CLASS_BITS && size_of::<Option<Buffer>>() == 24);

impl Pool {
    /// A cache that draws on `arena`, for the thread that makes it.
    pub fn new(arena: &Arc<Arena>) -> Pool {
        Pool(Rc::new(Inner { arena: arena.clone(), free: RefCell::new(std::array::from_fn(|_| Vec::new())) }))
    }

    /// A buffer of `len` bytes, 1 to [`BUFFER_BYTES_MAX`]; `None` when the arena is at its limit.
    #[inline]
    pub fn take(&self, len: usize) -> Option<Buffer> {
        let class = class_of(len)?;
        let popped = self.0.free.borrow_mut()[class].pop();
        let Free { start, chunk } = match popped {
            Some(free) => free,
            None => self.refill(class)?,
        };
        Some(Buffer {
            start,
            pool: self.0.clone(),
            len: len as u32,
            place: chunk << CLASS_BITS | class as u32,
        })
    }

    /// The arena behind the cache.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.0.arena
    }

    #[cold]
    fn refill(&self, class: usize) -> Option<Free> {
        let Chunk { start, index } = self.0.arena.take_chunk()?;
        let mut free = self.0.free.borrow_mut();
        let bytes = BUFFER_BYTES_MIN << class;
        for offset in (0..CHUNK_BYTES).step_by(bytes).rev() {
            // SAFETY: the chunk is CHUNK_BYTES long and `offset` lies below that.
            let start = unsafe { start.add(offset) };
            free[class].push(Free { start, chunk: index });
        }
        free[class].pop()
    }
}

fn class_of(len: usize) -> Option<usize> {
    if len == 0 || len > BUFFER_BYTES_MAX {
        return None;
    }
    Some(len.div_ceil(BUFFER_BYTES_MIN).next_power_of_two().ilog2() as usize)
}

impl Buffer {
    /// The bytes.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `start..start+len` lies in a chunk that the arena keeps mapped and zeroed at
        // first, and this buffer is its only holder: the pool handed the range out once.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len as usize) }
    }

    /// The bytes, to change them.
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len as usize) }
    }

    /// Number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether it has no bytes, which none that a pool gives has.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Most bytes that [`resize`](Self::resize) allows.
    pub fn capacity(&self) -> usize {
        BUFFER_BYTES_MIN << self.class()
    }

    /// Changes the length within the capacity; bytes that come into view hold what lay there.
    ///
    /// # Panics
    /// If `len` is 0 or above [`capacity`](Self::capacity).
    pub fn resize(&mut self, len: usize) {
        assert!(len > 0 && len <= self.capacity(), "{len} bytes do not fit in {}", self.capacity());
        self.len = len as u32;
    }

    /// Sets every byte to zero.
    #[inline]
    pub fn clear(&mut self) {
        self.as_mut_slice().fill(0);
    }

    /// Address of the first byte, for a device or the kernel. Valid while the buffer is held.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Index of the chunk in its arena, which is also its index among io_uring's registered buffers.
    #[inline]
    pub fn chunk_index(&self) -> u32 {
        self.place >> CLASS_BITS
    }

    #[inline]
    fn class(&self) -> usize {
        (self.place & ((1 << CLASS_BITS) - 1)) as usize
    }

    /// Start address and size of the chunk, to register it.
    pub fn chunk_range(&self) -> (*mut u8, usize) {
        (self.pool.arena.chunk_start(self.chunk_index()).as_ptr(), CHUNK_BYTES)
    }
}

impl Drop for Buffer {
    #[inline]
    fn drop(&mut self) {
        self.pool.free.borrow_mut()[self.class()].push(Free { start: self.start, chunk: self.chunk_index() });
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes at {:p})", self.len, self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    fn pool(chunks: usize) -> Pool {
        Pool::new(&Arena::new(Config { limit_bytes: chunks * CHUNK_BYTES, hugepages: false }))
    }

    #[test]
    fn buffers_do_not_overlap_and_come_back() {
        let pool = pool(1);
        let mut held: Vec<Buffer> = (0..CHUNK_BYTES / 4096).map(|_| pool.take(4096).unwrap()).collect();
        for (index, buffer) in held.iter_mut().enumerate() {
            buffer.as_mut_slice().fill(index as u8);
        }
        for (index, buffer) in held.iter().enumerate() {
            assert!(buffer.as_slice().iter().all(|byte| *byte == index as u8), "buffer {index}");
        }
        assert!(pool.take(4096).is_none(), "the limit holds");
        held.pop();
        assert!(pool.take(1).is_some());
    }

    #[test]
    fn sizes_round_up_to_a_class() {
        let pool = pool(CLASSES);
        for len in [1, 4095, 4096, 4097, 65536, 131_072, 131_073, BUFFER_BYTES_MAX] {
            let mut buffer = pool.take(len).unwrap();
            assert_eq!(buffer.len(), len);
            assert_eq!(buffer.as_ptr() as usize % 4096, 0);
            let capacity = buffer.capacity();
            buffer.resize(capacity);
            buffer.clear();
        }
        assert!(pool.take(0).is_none() && pool.take(BUFFER_BYTES_MAX + 1).is_none());
    }

    #[test]
    fn a_pool_may_go_before_its_buffers() {
        let pool = pool(1);
        let mut buffer = pool.take(8192).unwrap();
        drop(pool);
        buffer.as_mut_slice().fill(1);
        assert_eq!(buffer.chunk_range().1, CHUNK_BYTES);
    }
}
