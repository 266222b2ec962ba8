//! Buffers and the per-core pools that they come from.

use std::cell::RefCell;
use std::fmt;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use crate::arena::{Arena, CHUNK_BYTES, Chunk, ChunkMemory};
use crate::region::{Cells, SharedRegion};

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
    state: RefCell<State>,
}

struct State {
    free: [Vec<Free>; CLASSES],
    /// This pool's chunks, by their index in the arena.
    owned: Vec<Option<Owned>>,
    owned_count: usize,
    /// Regions of which parts are handed out, by their index.
    lenders: Vec<Lender>,
}

/// A chunk, carved into buffers of one class.
#[derive(Clone, Copy)]
struct Owned {
    class: usize,
    /// Buffers of it that somebody holds.
    live: u32,
}

#[derive(Clone, Copy)]
struct Free {
    start: NonNull<u8>,
    chunk: u32,
}

/// Memory owned by one holder, page-aligned, initialised, and good for DMA while it is held.
///
/// A buffer that a pool [lent](Pool::lend) is a part of memory that somebody else shares with us: it can
/// be given to devices and copied, but never looked at as a slice.
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
/// The class of buffers that are part of a lender's region; the index above it is the lender's.
const LENT: usize = (1 << CLASS_BITS) - 1;
const _: () = assert!(CLASSES <= LENT && size_of::<Option<Buffer>>() == 24);

/// A region whose parts are handed out as buffers, on one core.
struct Lender {
    /// `None` once it has been taken back and no part of it is held.
    region: Option<Rc<SharedRegion>>,
    live: u32,
    ended: bool,
}

/// Memory that somebody else shares with us, to be handed out in parts. See [`Pool::lend`].
///
/// Dropped, it hands out no more; the region stays mapped until the last part has come back.
pub struct Loan {
    pool: Rc<Inner>,
    region: Rc<SharedRegion>,
    index: u32,
}

impl Loan {
    /// The region.
    #[inline]
    pub fn region(&self) -> &Rc<SharedRegion> {
        &self.region
    }

    /// How many parts of it are held.
    #[inline]
    pub fn lent(&self) -> u32 {
        self.pool.state.borrow().lenders[self.index as usize].live
    }

    /// `len` bytes at `offset` as a buffer; `None` if they are not inside, or none.
    ///
    /// Nothing keeps others from holding or writing the same bytes: they are the lender's.
    #[inline]
    pub fn buffer(&self, offset: u64, len: u32) -> Option<Buffer> {
        let inside = len > 0 && offset.checked_add(len.into()).is_some_and(|end| end <= self.region.len());
        if !inside {
            return None;
        }
        // SAFETY: the offset lies inside the region.
        let start = unsafe { self.region.as_ptr().add(offset as usize) };
        self.pool.state.borrow_mut().lenders[self.index as usize].live += 1;
        let place = self.index << CLASS_BITS | LENT as u32;
        Some(Buffer { start: NonNull::new(start)?, pool: self.pool.clone(), len, place })
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let lender = &mut self.pool.state.borrow_mut().lenders[self.index as usize];
        lender.ended = true;
        if lender.live == 0 {
            lender.region = None;
        }
    }
}

impl Pool {
    /// A cache that draws on `arena`, for the thread that makes it.
    pub fn new(arena: &Arc<Arena>) -> Pool {
        arena.pool_made();
        let state = State {
            free: std::array::from_fn(|_| Vec::new()),
            owned: Vec::new(),
            owned_count: 0,
            lenders: Vec::new(),
        };
        Pool(Rc::new(Inner { arena: arena.clone(), state: RefCell::new(state) }))
    }

    /// A buffer of `len` bytes, 1 to [`BUFFER_BYTES_MAX`]; `None` when the arena is at its limit and
    /// nothing of this core's is free. With every buffer given back there is always one.
    #[inline]
    pub fn take(&self, len: usize) -> Option<Buffer> {
        let class = class_of(len)?;
        let mut state = self.0.state.borrow_mut();
        let (class, Free { start, chunk }) = match state.free[class].pop() {
            Some(free) => (class, free),
            None => self.refill(&mut state, class)?,
        };
        if let Some(owned) = &mut state.owned[chunk as usize] {
            owned.live += 1;
        }
        drop(state);
        Some(Buffer {
            start,
            pool: self.0.clone(),
            len: len as u32,
            place: chunk << CLASS_BITS | class as u32,
        })
    }

    /// Hands out parts of a region as buffers of this core.
    pub fn lend(&self, region: Rc<SharedRegion>) -> Loan {
        let lender = Lender { region: Some(region.clone()), live: 0, ended: false };
        let mut state = self.0.state.borrow_mut();
        let vacant = state.lenders.iter().position(|lender| lender.region.is_none());
        let index = vacant.unwrap_or(state.lenders.len());
        match state.lenders.get_mut(index) {
            Some(place) => *place = lender,
            None => state.lenders.push(lender),
        }
        Loan { pool: self.0.clone(), region, index: index as u32 }
    }

    /// The arena behind the cache.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.0.arena
    }

    /// A buffer of `class` from a new chunk, from a chunk of another class that nobody uses, or, at
    /// the very end, one that is larger than needed.
    #[cold]
    fn refill(&self, state: &mut State, class: usize) -> Option<(usize, Free)> {
        let taken = self.0.arena.take_chunk(state.owned_count == 0);
        if taken.is_some() {
            state.owned_count += 1;
        }
        let taken = taken.map(|Chunk { start, index, .. }| (start, index));
        if let Some((start, index)) = taken.or_else(|| state.idle_chunk(&self.0.arena)) {
            state.carve(start, index, class);
            return state.free[class].pop().map(|free| (class, free));
        }
        (class + 1..CLASSES).find_map(|larger| state.free[larger].pop().map(|free| (larger, free)))
    }
}

impl State {
    /// Takes back a chunk of which no buffer is held.
    fn idle_chunk(&mut self, arena: &Arena) -> Option<(NonNull<u8>, u32)> {
        let idle = |owned: &Option<Owned>| owned.is_some_and(|owned| owned.live == 0);
        let index = self.owned.iter().position(idle)? as u32;
        let class = self.owned[index as usize].take()?.class;
        self.free[class].retain(|free| free.chunk != index);
        Some((arena.chunk_start(index), index))
    }

    fn carve(&mut self, start: NonNull<u8>, index: u32, class: usize) {
        let bytes = BUFFER_BYTES_MIN << class;
        for offset in (0..CHUNK_BYTES).step_by(bytes).rev() {
            // SAFETY: the chunk is CHUNK_BYTES long and `offset` lies below that.
            let start = unsafe { start.add(offset) };
            self.free[class].push(Free { start, chunk: index });
        }
        if self.owned.len() <= index as usize {
            self.owned.resize(index as usize + 1, None);
        }
        self.owned[index as usize] = Some(Owned { class, live: 0 });
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let owned = &self.state.get_mut().owned;
        let indices =
            owned.iter().enumerate().filter(|(_, owned)| owned.is_some()).map(|(index, _)| index as u32);
        self.arena.pool_gone(indices);
    }
}

fn class_of(len: usize) -> Option<usize> {
    if len == 0 || len > BUFFER_BYTES_MAX {
        return None;
    }
    Some(len.div_ceil(BUFFER_BYTES_MIN).next_power_of_two().ilog2() as usize)
}

impl Buffer {
    /// Whether it is part of memory that somebody else shares with us and may write at any moment.
    #[inline]
    pub fn is_lent(&self) -> bool {
        self.class() == LENT
    }

    /// The bytes.
    ///
    /// # Panics
    /// If the buffer is [lent](Self::is_lent): nobody promises that its bytes stand still.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        assert!(!self.is_lent(), "lent memory is copied, not looked at");
        // SAFETY: `start..start+len` lies in a chunk that the arena keeps mapped and zeroed at
        // first, and this buffer is its only holder: the pool handed the range out once.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len as usize) }
    }

    /// The bytes, to change them.
    ///
    /// # Panics
    /// If the buffer is [lent](Self::is_lent).
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        assert!(!self.is_lent(), "lent memory is copied, not looked at");
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
        if self.is_lent() { self.len() } else { BUFFER_BYTES_MIN << self.class() }
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
        // SAFETY: `start..start+len` is mapped and writable while the buffer is held, lent or not.
        unsafe { std::ptr::write_bytes(self.start.as_ptr(), 0, self.len as usize) }
    }

    /// Copies from `offset` of the buffer, lent or not.
    ///
    /// # Panics
    /// If the range is not inside.
    #[inline]
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) {
        self.cells().read(offset as u64, out);
    }

    /// Copies to `offset` of the buffer, lent or not.
    ///
    /// # Panics
    /// If the range is not inside.
    #[inline]
    pub fn copy_from(&mut self, offset: usize, data: &[u8]) {
        self.cells().write(offset as u64, data);
    }

    #[inline]
    fn cells(&self) -> Cells {
        // SAFETY: the bytes stay mapped while the buffer is held, and the cells are used at once.
        unsafe { Cells::new(self.start, self.len as usize, true) }
    }

    /// Address of the first byte, for a device or the kernel. Valid while the buffer is held.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Index of the chunk in its arena, which is also its index among io_uring's registered buffers;
    /// `None` for a lent buffer.
    #[inline]
    pub fn chunk_index(&self) -> Option<u32> {
        if self.is_lent() { None } else { Some(self.home_index()) }
    }

    /// Index of the chunk in its arena, or, for a lent buffer, of its loan. Whoever compares addresses besides need
    /// not ask which.
    #[inline]
    pub fn home_index(&self) -> u32 {
        self.place >> CLASS_BITS
    }

    #[inline]
    fn class(&self) -> usize {
        (self.place & ((1 << CLASS_BITS) - 1)) as usize
    }

    /// The arena of its pool, which keeps the buffer's chunk mapped.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.pool.arena
    }

    /// The chunk, to register or map it; `None` for a lent buffer.
    pub fn chunk(&self) -> Option<ChunkMemory> {
        Some(self.pool.arena.chunk(self.chunk_index()?))
    }
}

impl Drop for Buffer {
    #[inline]
    fn drop(&mut self) {
        let chunk = self.place >> CLASS_BITS;
        let mut state = self.pool.state.borrow_mut();
        if self.is_lent() {
            let lender = &mut state.lenders[chunk as usize];
            lender.live -= 1;
            if lender.live == 0 && lender.ended {
                lender.region = None;
            }
            return;
        }
        state.free[self.class()].push(Free { start: self.start, chunk });
        if let Some(owned) = &mut state.owned[chunk as usize] {
            owned.live -= 1;
        }
    }
}

/// A buffer whose bytes a device reads and writes while we do: the memory of a queue.
///
/// Its bytes are reached through [`Cells`].
pub struct DeviceBuffer {
    cells: Cells,
    buffer: Buffer,
}

impl DeviceBuffer {
    /// Takes a buffer over and sets it to zero.
    pub fn new(mut buffer: Buffer) -> DeviceBuffer {
        buffer.clear();
        // SAFETY: the buffer is kept, and dropped together with the cells.
        let cells = unsafe { Cells::new(buffer.start, buffer.len as usize, true) };
        DeviceBuffer { cells, buffer }
    }

    /// The buffer, to find out where a device sees it.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }
}

impl std::ops::Deref for DeviceBuffer {
    type Target = Cells;

    #[inline]
    fn deref(&self) -> &Cells {
        &self.cells
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
        Pool::new(&Arena::new(Config {
            limit_bytes: chunks * CHUNK_BYTES,
            hugepages: false,
            ..Default::default()
        }))
    }

    #[test]
    fn buffers_do_not_overlap_and_come_back() {
        let pool = pool(1);
        // Miri is slow: a chunk of few buffers, and their ends only.
        let bytes = if cfg!(miri) { 262_144 } else { 4096 };
        let mut held: Vec<Buffer> = (0..CHUNK_BYTES / bytes).map(|_| pool.take(bytes).unwrap()).collect();
        for (index, buffer) in held.iter_mut().enumerate() {
            let bytes = buffer.as_mut_slice();
            (bytes[0], bytes[bytes.len() - 1]) = (index as u8, index as u8);
        }
        for (index, buffer) in held.iter().enumerate() {
            let bytes = buffer.as_slice();
            assert_eq!((bytes[0], bytes[bytes.len() - 1]), (index as u8, index as u8));
        }
        assert!(pool.take(bytes).is_none(), "the limit holds");
        held.pop();
        assert!(pool.take(1).is_some());
    }

    #[test]
    fn a_loan_ends_with_the_last_part_of_it() {
        let pool = pool(1);
        let region = Rc::new(SharedRegion::new(16 << 10).unwrap());
        let loan = pool.lend(region.clone());
        let mut part = loan.buffer(4096, 512).unwrap();
        assert!(part.is_lent() && part.chunk().is_none());
        part.copy_from(0, &[7; 512]);
        assert_eq!(region.load_u8(4096 + 511), 7);
        for (offset, len) in [(0, 0), (16 << 10, 1), (1, 16 << 10), (u64::MAX, 1)] {
            assert!(loan.buffer(offset, len).is_none(), "{len} bytes at {offset}");
        }
        drop(loan);
        assert_eq!(Rc::strong_count(&region), 2);
        drop(part);
        assert_eq!(Rc::strong_count(&region), 1);
        let again = pool.lend(region);
        assert_eq!(again.index, 0);
    }

    #[test]
    #[should_panic(expected = "not looked at")]
    fn lent_memory_is_no_slice() {
        let loan = pool(1).lend(Rc::new(SharedRegion::new(4096).unwrap()));
        let _ = loan.buffer(0, 4096).unwrap().as_slice();
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
        assert_eq!(buffer.chunk().unwrap().bytes, CHUNK_BYTES);
    }

    #[test]
    fn a_chunk_that_nobody_uses_serves_another_size() {
        let pool = pool(1);
        let small: Vec<Buffer> = (0..CHUNK_BYTES / 4096).map(|_| pool.take(4096).unwrap()).collect();
        assert!(pool.take(131_072).is_none());
        drop(small);
        let large: Vec<Buffer> = (0..CHUNK_BYTES / 131_072).map(|_| pool.take(131_072).unwrap()).collect();
        assert!(pool.take(4096).is_none());
        drop(large);
        assert!(pool.take(4096).is_some());
    }

    #[test]
    fn a_larger_buffer_serves_when_nothing_else_is_left() {
        let pool = pool(1);
        let one = pool.take(131_072).unwrap();
        let mut small = pool.take(512).unwrap();
        assert_eq!((small.len(), small.capacity()), (512, 131_072));
        small.as_mut_slice().fill(1);
        drop((one, small));
        assert!(pool.take(131_072).is_some());
    }

    #[test]
    fn every_pool_gets_a_chunk_and_gives_it_back_at_its_end() {
        let arena =
            Arena::new(Config { limit_bytes: 2 * CHUNK_BYTES, hugepages: false, ..Default::default() });
        let (greedy, modest) = (Pool::new(&arena), Pool::new(&arena));
        let held: Vec<Buffer> = std::iter::from_fn(|| greedy.take(BUFFER_BYTES_MAX)).collect();
        assert_eq!(held.len(), 2, "one chunk is kept for the other");
        assert!(modest.take(4096).is_some());
        drop(modest);
        assert!(greedy.take(4096).is_some(), "a pool that is gone needs no chunk");
        drop((held, greedy));
        assert_eq!(arena.taken_bytes(), 0);
        assert!(Pool::new(&arena).take(4096).is_some());
    }
}
