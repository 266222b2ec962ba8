//! Per-core pools: chunks of an arena, carved into allocations of a few sizes.

use std::cell::RefCell;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use crate::arena::{Arena, CHUNK_BYTES, Chunk};
use crate::buffer::{Buffer, BufferAccess, Home};
use crate::external::{ExternalEntry, ExternalSource};
use crate::parcel::Returns;

/// Smallest allocation: one page, so that every buffer suits direct I/O.
pub const BUFFER_BYTES_MIN: usize = 4096;
/// Largest allocation: half a chunk. Longer data is [`Data`](crate::Data) of several buffers.
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
}

/// A chunk, carved into allocations of one class.
struct OwnedChunk {
    start: NonNull<u8>,
    class: u8,
    /// Allocations of it that are in use.
    live: u32,
    /// Buffers per allocation, where one was split or shared; empty until then.
    holders: Box<[u32]>,
}

#[derive(Clone, Copy)]
struct Free {
    start: NonNull<u8>,
    chunk: u16,
}

impl OwnedChunk {
    fn allocation_index(&self, start: NonNull<u8>) -> usize {
        (start.as_ptr().addr() - self.start.as_ptr().addr()) >> class_shift(self.class)
    }

    fn allocation_start(&self, index: usize) -> NonNull<u8> {
        // SAFETY: an index of an address inside of the chunk; the allocation starts at or before that address.
        unsafe { self.start.add(index << class_shift(self.class)) }
    }

    fn holders(&mut self, start: NonNull<u8>) -> &mut u32 {
        let index = self.allocation_index(start);
        if self.holders.is_empty() {
            self.holders = vec![0; CHUNK_BYTES >> class_shift(self.class)].into_boxed_slice();
        }
        &mut self.holders[index]
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
        };
        Pool(Rc::new(PoolInner { arena: arena.clone(), state: RefCell::new(state), returns: Arc::default() }))
    }

    /// A buffer of `len` bytes, 1 to [`BUFFER_BYTES_MAX`]; `None` when the arena is at its limit and nothing of this
    /// core's is free. When all of a core's buffers are back there is always one.
    #[inline]
    pub fn take(&self, len: usize) -> Option<Buffer> {
        let class = class_of(len)?;
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
            owned.live += 1;
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
            return state.free[class].pop();
        }
        (class + 1..CLASSES).find_map(|larger| state.free[larger].pop())
    }
}

impl PoolState {
    /// Takes back a chunk of which no allocation is in use.
    fn reclaim_idle_chunk(&mut self) -> Option<(NonNull<u8>, u16)> {
        let idle = |owned: &Option<OwnedChunk>| owned.as_ref().is_some_and(|owned| owned.live == 0);
        let index = self.owned.iter().position(idle)?;
        let OwnedChunk { start, class, .. } = self.owned[index].take()?;
        self.free[class as usize].retain(|free| free.chunk as usize != index);
        Some((start, index as u16))
    }

    /// Removes chunks of which no allocation is in use until `keep` are left, and returns their indices.
    fn remove_idle_chunks(&mut self, keep: usize) -> Vec<u32> {
        let surplus = self.owned_count.saturating_sub(keep);
        let is_idle =
            |(_, owned): &(usize, &Option<OwnedChunk>)| owned.as_ref().is_some_and(|owned| owned.live == 0);
        let idle = self.owned.iter().enumerate().filter(is_idle).map(|(index, _)| index as u32);
        let removed: Vec<u32> = idle.take(surplus).collect();
        for index in &removed {
            self.owned[*index as usize] = None;
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
        let owned = OwnedChunk { start, class: class as u8, live: 0, holders: Box::default() };
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
        owned.live -= 1;
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
