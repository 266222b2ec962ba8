//! Per-core pools: chunks of an arena, carved into allocations of a few sizes.

use std::cell::RefCell;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use crate::arena::{Arena, CHUNK_BYTES, Chunk};
use crate::buffer::{Buffer, BufferAccess, Home};
use crate::data::Data;
use crate::external::{ExternalEntry, ExternalSource};
use crate::parcel::Returns;

/// Smallest allocation: one page, so that every buffer suits direct I/O.
pub const BUFFER_BYTES_MIN: usize = 4096;
/// Largest allocation: half a chunk. Longer data is [`Data`] of several buffers.
pub const BUFFER_BYTES_MAX: usize = CHUNK_BYTES / 2;

/// 4 KiB, 8 KiB, … 1 MiB.
pub(crate) const CLASSES: usize = (BUFFER_BYTES_MAX / BUFFER_BYTES_MIN).ilog2() as usize + 1;

/// One core's cache of buffers.
///
/// A pool draws 2 MiB chunks from its [`Arena`], carves each into allocations of one size class, and keeps what is
/// free in a list per class. [`take`](Self::take) and the drop of a [`Buffer`] cost a few instructions and touch no
/// other core, unless the list is empty. Cloning gives another handle to the same cache; it is `!Send`.
#[derive(Clone)]
pub struct Pool(pub(crate) Rc<PoolInner>);

pub(crate) struct PoolInner {
    pub(crate) arena: Arc<Arena>,
    pub(crate) state: RefCell<PoolState>,
    /// Where other cores put data that they are done with.
    pub(crate) returns: Arc<Returns>,
}

pub(crate) struct PoolState {
    free: [Vec<Free>; CLASSES],
    /// This pool's chunks, by their index in the arena.
    owned: Vec<Option<OwnedChunk>>,
    owned_count: usize,
    /// Memory that is not the pool's and of which parts are handed out, by index.
    pub(crate) external: Vec<ExternalEntry>,
    /// Entries of `external` that are free.
    pub(crate) free_external: Vec<u16>,
    /// What the chunks of each class have not counted themselves.
    counts: [PoolCounts; CLASSES],
}

/// What a pool has handed out of one size since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounts {
    /// Bytes of such an allocation.
    pub bytes: usize,
    /// Allocations handed out.
    pub taken: u64,
    /// How often all were in use, and a chunk of the arena or of another size was divided.
    pub refills: u64,
    /// How often there was none, and the taker got nothing.
    pub failures: u64,
}

/// A chunk, carved into allocations of one class.
struct OwnedChunk {
    start: NonNull<u8>,
    class: u8,
    /// Allocations of it that were handed out since it was carved.
    taken: u64,
    /// Of those, the ones that came back, modulo 2^32.
    freed: u32,
    /// Buffers per allocation, where one was split or shared.
    holders: Option<Box<[u32; ALLOCATIONS_MAX]>>,
}

/// Allocations of a chunk, if it has the smallest.
const ALLOCATIONS_MAX: usize = CHUNK_BYTES / BUFFER_BYTES_MIN;

#[derive(Clone, Copy)]
struct Free {
    start: NonNull<u8>,
    chunk: u16,
}

impl OwnedChunk {
    /// Allocations of it that are in use. Counted by a difference, which costs an allocation no more than one counter.
    fn live(&self) -> u32 {
        (self.taken as u32).wrapping_sub(self.freed)
    }

    fn allocation_index(&self, start: NonNull<u8>) -> usize {
        (start.as_ptr().addr() - self.start.as_ptr().addr()) >> class_shift(self.class)
    }

    fn allocation_start(&self, index: usize) -> NonNull<u8> {
        // SAFETY: an index of an address inside of the chunk; the allocation starts at or before that address.
        unsafe { self.start.add(index << class_shift(self.class)) }
    }

    fn holders(&mut self, start: NonNull<u8>) -> &mut u32 {
        let index = self.allocation_index(start);
        &mut self.holders.get_or_insert_with(|| Box::new([0; ALLOCATIONS_MAX]))[index]
    }
}

const fn class_shift(class: u8) -> u32 {
    BUFFER_BYTES_MIN.ilog2() + class as u32
}

impl Pool {
    /// A cache that draws on `arena`, for the thread that creates it.
    pub fn new(arena: &Arc<Arena>) -> Pool {
        arena.register_pool();
        let state = PoolState {
            free: std::array::from_fn(|_| Vec::new()),
            owned: Vec::new(),
            owned_count: 0,
            external: Vec::new(),
            free_external: Vec::new(),
            counts: std::array::from_fn(|class| PoolCounts {
                bytes: BUFFER_BYTES_MIN << class,
                ..PoolCounts::default()
            }),
        };
        Pool(Rc::new(PoolInner { arena: arena.clone(), state: RefCell::new(state), returns: Arc::default() }))
    }

    /// A buffer of `len` bytes, 1 to [`BUFFER_BYTES_MAX`]; `None` when the arena is at its limit and nothing of this
    /// core's is free. When all of a core's buffers are back there is always one.
    #[inline]
    pub fn take(&self, len: usize) -> Option<Buffer> {
        let class = class_of(len)?;
        let buffer = self.allocate(len, class);
        if buffer.is_none() {
            self.count_failure(class);
        }
        buffer
    }

    /// Data of `len` bytes: one buffer if there is one, otherwise several, the largest that there are. `None` when all
    /// that is free is less than `len`, or if `len` is 0.
    #[inline]
    pub fn take_data(&self, len: usize) -> Option<Data> {
        match class_of(len).and_then(|class| self.allocate(len, class)) {
            Some(buffer) => Some(Data::One(buffer)),
            None => self.take_slices(len),
        }
    }

    /// Several buffers of `len` bytes together; they go back if there are too few.
    #[cold]
    fn take_slices(&self, len: usize) -> Option<Data> {
        let class_max = class_of(len.min(BUFFER_BYTES_MAX))?;
        let (mut class, mut left, mut slices) = (class_max, len, Vec::new());
        while left > 0 {
            let bytes = left.min(BUFFER_BYTES_MIN << class);
            // The last may need less than those before it.
            class = class.min(class_of(bytes)?);
            match self.allocate(bytes, class) {
                Some(buffer) => {
                    left -= bytes;
                    slices.push(buffer);
                }
                None if class > 0 => class -= 1,
                None => {
                    self.count_failure(class_max);
                    return None;
                }
            }
        }
        Data::gather(slices)
    }

    #[cold]
    fn count_failure(&self, class: usize) {
        self.0.state.borrow_mut().counts[class].failures += 1;
    }

    /// A buffer of `len` bytes from an allocation of `class`.
    #[inline]
    fn allocate(&self, len: usize, class: usize) -> Option<Buffer> {
        let mut state = self.0.state.borrow_mut();
        let Free { start, chunk } = match state.free[class].pop() {
            Some(free) => free,
            None => {
                drop(state);
                self.collect();
                state = self.0.state.borrow_mut();
                match state.free[class].pop() {
                    Some(free) => free,
                    None => self.refill(&mut state, class)?,
                }
            }
        };
        if let Some(owned) = &mut state.owned[chunk as usize] {
            owned.taken += 1;
        }
        drop(state);
        Some(Buffer::new(start, self.0.clone(), len as u32, chunk, Home::Whole, BufferAccess::Exclusive))
    }

    /// Gives chunks of which no buffer is in use back to the arena, for other cores and for the kernel, but keeps
    /// `keep` chunks. Returns how many. It visits everything that is free: for quiet moments.
    pub fn release_idle(&self, keep: usize) -> usize {
        self.collect();
        let mut state = self.0.state.borrow_mut();
        let released = state.remove_idle_chunks(keep.max(1));
        self.0.arena.release_chunks(&released);
        released.len()
    }

    /// What it has handed out since it was made, by size from the smallest. An allocation that stood in for a smaller
    /// one counts as what it is.
    pub fn counts(&self) -> Vec<PoolCounts> {
        let state = self.0.state.borrow();
        let mut counts = state.counts;
        for chunk in state.owned.iter().flatten() {
            counts[chunk.class as usize].taken += chunk.taken;
        }
        counts.to_vec()
    }

    /// The arena behind the cache.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.0.arena
    }

    /// An allocation of `class` from a new chunk, from an idle chunk of another class, or, when neither is left, a
    /// larger allocation.
    #[cold]
    fn refill(&self, state: &mut PoolState, class: usize) -> Option<Free> {
        let taken = self.0.arena.take_chunk(state.owned_count == 0);
        if taken.is_some() {
            state.owned_count += 1;
        }
        let taken = taken.map(|Chunk { start, index, .. }| (start, index as u16));
        if let Some((start, index)) = taken.or_else(|| state.reclaim_idle_chunk()) {
            state.carve(start, index, class);
            state.counts[class].refills += 1;
            return state.free[class].pop();
        }
        (class + 1..CLASSES).find_map(|larger| state.free[larger].pop())
    }
}

impl PoolState {
    /// Takes back a chunk of which no allocation is in use.
    fn reclaim_idle_chunk(&mut self) -> Option<(NonNull<u8>, u16)> {
        let idle = |owned: &Option<OwnedChunk>| owned.as_ref().is_some_and(|owned| owned.live() == 0);
        let index = self.owned.iter().position(idle)?;
        let OwnedChunk { start, class, taken, .. } = self.owned[index].take()?;
        self.counts[class as usize].taken += taken;
        self.free[class as usize].retain(|free| free.chunk as usize != index);
        Some((start, index as u16))
    }

    /// Removes chunks of which no allocation is in use until `keep` are left, and returns their indices.
    fn remove_idle_chunks(&mut self, keep: usize) -> Vec<u32> {
        let surplus = self.owned_count.saturating_sub(keep);
        let is_idle =
            |(_, owned): &(usize, &Option<OwnedChunk>)| owned.as_ref().is_some_and(|owned| owned.live() == 0);
        let idle = self.owned.iter().enumerate().filter(is_idle).map(|(index, _)| index as u32);
        let removed: Vec<u32> = idle.take(surplus).collect();
        for index in &removed {
            if let Some(OwnedChunk { class, taken, .. }) = self.owned[*index as usize].take() {
                self.counts[class as usize].taken += taken;
            }
        }
        self.owned_count -= removed.len();
        if !removed.is_empty() {
            let owned = &self.owned;
            for free in &mut self.free {
                free.retain(|free| owned[free.chunk as usize].is_some());
                free.shrink_to(2 * free.len());
            }
        }
        removed
    }

    fn carve(&mut self, start: NonNull<u8>, chunk: u16, class: usize) {
        let bytes = BUFFER_BYTES_MIN << class;
        for offset in (0..CHUNK_BYTES).step_by(bytes).rev() {
            // SAFETY: the chunk is CHUNK_BYTES long and `offset` lies below that.
            let start = unsafe { start.add(offset) };
            self.free[class].push(Free { start, chunk });
        }
        if self.owned.len() <= chunk as usize {
            self.owned.resize_with(chunk as usize + 1, || None);
        }
        let owned = OwnedChunk { start, class: class as u8, taken: 0, freed: 0, holders: None };
        self.owned[chunk as usize] = Some(owned);
    }

    fn owned(&mut self, chunk: u16) -> &mut OwnedChunk {
        self.owned[chunk as usize].as_mut().expect("a chunk of which a buffer is held belongs to its pool")
    }

    /// Bytes of an allocation in `chunk`.
    pub(crate) fn allocation_bytes(&mut self, chunk: u16) -> usize {
        BUFFER_BYTES_MIN << self.owned(chunk).class
    }

    /// Frees the allocation at `start`, of which no buffer is held.
    #[inline]
    pub(crate) fn free(&mut self, start: NonNull<u8>, chunk: u16) {
        let owned = self.owned(chunk);
        owned.freed = owned.freed.wrapping_add(1);
        let class = owned.class;
        self.free[class as usize].push(Free { start, chunk });
    }

    /// Counts one more buffer of the allocation around `start`; `whole` says that there was exactly one.
    pub(crate) fn add_holder(&mut self, start: NonNull<u8>, chunk: u16, whole: bool) {
        let holders = self.owned(chunk).holders(start);
        *holders = if whole { 2 } else { *holders + 1 };
    }

    /// Counts one buffer less of the allocation around `start`, and frees it with the last.
    pub(crate) fn remove_holder(&mut self, start: NonNull<u8>, chunk: u16) {
        let owned = self.owned(chunk);
        let holders = owned.holders(start);
        *holders -= 1;
        if *holders == 0 {
            let start = owned.allocation_start(owned.allocation_index(start));
            self.free(start, chunk);
        }
    }

    /// Whether exactly one buffer of the allocation around `start` is held, and whether it begins there.
    pub(crate) fn sole_holder(&mut self, start: NonNull<u8>, chunk: u16) -> (bool, bool) {
        let owned = self.owned(chunk);
        let sole = *owned.holders(start) == 1;
        (sole, owned.allocation_start(owned.allocation_index(start)) == start)
    }

    /// Frees an entry that has ended and of which no buffer is held; gives what kept its memory mapped.
    pub(crate) fn free_unused_external(&mut self, index: u16) -> Option<ExternalSource> {
        let entry = &mut self.external[index as usize];
        if entry.live > 0 || !entry.ended {
            return None;
        }
        self.free_external.push(index);
        entry.source.take()
    }

    /// Whether two addresses of `chunk` lie in the same allocation.
    pub(crate) fn same_allocation(&mut self, chunk: u16, one: NonNull<u8>, other: NonNull<u8>) -> bool {
        let owned = self.owned(chunk);
        owned.allocation_index(one) == owned.allocation_index(other)
    }
}

impl Drop for PoolInner {
    fn drop(&mut self) {
        let owned = &self.state.get_mut().owned;
        let indices =
            owned.iter().enumerate().filter(|(_, owned)| owned.is_some()).map(|(index, _)| index as u32);
        self.arena.unregister_pool(indices);
    }
}

pub(crate) fn class_of(len: usize) -> Option<usize> {
    if len == 0 || len > BUFFER_BYTES_MAX {
        return None;
    }
    Some(len.div_ceil(BUFFER_BYTES_MIN).next_power_of_two().ilog2() as usize)
}

#[cfg(test)]
mod tests;
