//! Buffers that the kernel selects for receives: a ring of provided buffers (`IORING_REGISTER_PBUF_RING`).

use std::io;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use dma::{Buffer, Pool};
use slots::Slot;

/// `struct io_uring_buf`: address, length, identifier, and two bytes that are the ring's tail in the first entry.
const ENTRY_BYTES: usize = 16;
const LENGTH_AT: usize = 8;
const ID_AT: usize = 12;
const TAIL_AT: usize = 14;

/// The kernel's limit of entries.
const ENTRIES_MAX: u16 = 1 << 15;

/// A ring of buffers that belong to the kernel until a completion names them.
///
/// It owns the ring's memory and each buffer in it. A buffer that the kernel has filled is [taken](Self::take) and
/// belongs to the receiver; [`replenish`](Self::replenish) puts another in its place. The kernel must have ended every
/// receive that may select a buffer before the group is dropped; the event loop counts them in `receives`.
pub(super) struct BufferGroup {
    pub(super) client: Slot,
    /// Number of receives in flight.
    pub(super) receives: u32,
    pool: Pool,
    bytes: usize,
    /// The ring, which the kernel reads.
    memory: Buffer,
    tail: u16,
    /// The buffers that the kernel has, by identifier.
    buffers: Box<[Option<Buffer>]>,
    /// The identifiers without buffer.
    vacant: Vec<u16>,
}

impl BufferGroup {
    /// Takes as many of `count` buffers as the pool gives.
    pub(super) fn new(client: Slot, pool: &Pool, count: u16, bytes: usize) -> io::Result<BufferGroup> {
        let is_valid = count.is_power_of_two() && count <= ENTRIES_MAX;
        if !is_valid || bytes == 0 || bytes > dma::BUFFER_BYTES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let out_of_memory = || io::Error::from(io::ErrorKind::OutOfMemory);
        // A buffer is page-aligned, as the kernel requires.
        let mut memory = pool.take(usize::from(count) * ENTRY_BYTES).ok_or_else(out_of_memory)?;
        memory.clear();
        let mut group = BufferGroup {
            client,
            receives: 0,
            pool: pool.clone(),
            bytes,
            memory,
            tail: 0,
            buffers: (0..count).map(|_| None).collect(),
            vacant: (0..count).rev().collect(),
        };
        group.replenish();
        if group.available() == 0 { Err(out_of_memory()) } else { Ok(group) }
    }

    /// Address of the ring, which stays valid as long as the group.
    pub(super) fn address(&self) -> u64 {
        self.memory.as_ptr().expose_provenance() as u64
    }

    /// Number of entries.
    pub(super) fn entries(&self) -> u16 {
        self.buffers.len() as u16
    }

    /// Number of buffers that the kernel has.
    pub(super) fn available(&self) -> usize {
        self.buffers.len() - self.vacant.len()
    }

    /// Takes the buffer that a completion names, with `length` bytes; `None` if there are none in it.
    ///
    /// # Panics
    /// If the kernel does not have the buffer, which is a bug of the kernel or ours.
    pub(super) fn take(&mut self, id: u16, length: usize) -> Option<Buffer> {
        let taken = self.buffers.get_mut(usize::from(id)).and_then(Option::take);
        let Some(mut buffer) = taken else {
            panic!("the kernel returned buffer {id}, which it does not have")
        };
        self.vacant.push(id);
        if length == 0 {
            return None;
        }
        buffer.resize(length);
        Some(buffer)
    }

    /// Puts a buffer of the pool into each vacant place; returns whether there is none left.
    pub(super) fn replenish(&mut self) -> bool {
        while let Some(id) = self.vacant.last().copied() {
            let Some(buffer) = self.pool.take(self.bytes) else { return false };
            self.vacant.pop();
            self.provide(id, buffer);
        }
        true
    }

    fn provide(&mut self, id: u16, buffer: Buffer) {
        let index = self.tail & (self.entries() - 1);
        let entry = usize::from(index) * ENTRY_BYTES;
        let start = buffer.as_ptr().expose_provenance() as u64;
        self.buffers[usize::from(id)] = Some(buffer);
        // SAFETY: the entry is inside the ring's memory and 16-byte aligned; the kernel only reads it.
        unsafe { AtomicU64::from_ptr(self.at(entry).cast()) }.store(start, Ordering::Relaxed);
        // SAFETY: as above, 8 bytes into the entry.
        unsafe { AtomicU32::from_ptr(self.at(entry + LENGTH_AT).cast()) }
            .store(self.bytes as u32, Ordering::Relaxed);
        // SAFETY: as above, 12 bytes into the entry.
        unsafe { AtomicU16::from_ptr(self.at(entry + ID_AT).cast()) }.store(id, Ordering::Relaxed);
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: as above, 14 bytes into the first entry. The release publishes the entry with the tail.
        unsafe { AtomicU16::from_ptr(self.at(TAIL_AT).cast()) }.store(self.tail, Ordering::Release);
    }

    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.memory.len(), "{offset} is behind the ring");
        self.memory.as_ptr().wrapping_add(offset)
    }
}

#[cfg(test)]
mod tests {
    use dma::Arena;

    use super::*;

    fn pool(chunks: usize) -> Pool {
        let config = dma::ArenaConfig {
            limit_bytes: chunks * dma::BUFFER_BYTES_MAX * 2,
            hugepages: false,
            ..dma::ArenaConfig::default()
        };
        Pool::new(&Arena::new(config))
    }

    fn words(group: &BufferGroup, index: usize) -> (u64, u32, u16, u16) {
        let mut entry = [0; ENTRY_BYTES];
        group.memory.copy_to(index * ENTRY_BYTES, &mut entry);
        (
            u64::from_le_bytes(*entry.first_chunk().unwrap()),
            u32::from_le_bytes(*entry[8..].first_chunk().unwrap()),
            u16::from_le_bytes(*entry[12..].first_chunk().unwrap()),
            u16::from_le_bytes(*entry[14..].first_chunk().unwrap()),
        )
    }

    #[test]
    fn a_used_buffer_is_replaced_and_belongs_to_the_receiver() {
        let pool = pool(2);
        let mut group = BufferGroup::new(Slot::from_bits(0), &pool, 4, 5000).unwrap();
        assert_eq!((group.available(), words(&group, 0).3), (4, 4), "the tail");
        let first = group.buffers[0].as_ref().unwrap().as_ptr();
        assert_eq!(words(&group, 0), (first.addr() as u64, 5000, 0, 4));
        assert_eq!((words(&group, 3).1, words(&group, 3).2), (5000, 3));
        let taken = group.take(0, 77).unwrap();
        assert_eq!((taken.as_ptr(), taken.len(), group.available()), (first, 77, 3));
        assert!(group.replenish());
        // The fifth entry is in the place of the first, and has another buffer.
        let (address, length, id, tail) = words(&group, 0);
        assert_eq!((length, id, tail, group.available()), (5000, 0, 5, 4));
        assert_ne!(address, first.addr() as u64);
        assert!(group.take(2, 0).is_none(), "the kernel used a buffer for nothing");
        assert_eq!(group.available(), 3);
    }

    #[test]
    fn places_stay_vacant_while_the_pool_is_empty() {
        // One chunk for the ring, one for two buffers.
        let pool = pool(2);
        let mut group = BufferGroup::new(Slot::from_bits(0), &pool, 4, dma::BUFFER_BYTES_MAX).unwrap();
        assert_eq!(group.available(), 2);
        let taken = group.take(1, 1).unwrap();
        assert!(!group.replenish());
        assert_eq!(group.available(), 1);
        drop(taken);
        assert!(!group.replenish(), "two places are still vacant");
        assert_eq!(group.available(), 2);
    }

    #[test]
    fn invalid_sizes_are_rejected() {
        let new = |count, bytes| BufferGroup::new(Slot::from_bits(0), &pool(2), count, bytes).map(drop);
        for (count, bytes) in [(0, 4096), (3, 4096), (4, 0), (4, dma::BUFFER_BYTES_MAX + 1)] {
            assert_eq!(new(count, bytes).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{count} {bytes}");
        }
    }
}
