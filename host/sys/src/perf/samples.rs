//! The ring of samples that an event shares with the kernel.
//!
//! It is memory that the kernel writes: never a Rust reference but to the two words of its ends, which are
//! atomics, and read a byte at a time through a pointer after the head was loaded with acquire.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::PerfEvent;

/// Where head and tail stand in the first page (`struct perf_event_mmap_page`).
const HEAD: usize = 1024;
const TAIL: usize = 1032;
/// Smallest record: four bytes of type, two of mode, two of size.
const HEADER_BYTES: u64 = 8;

/// An event that samples, and its samples.
#[derive(Debug)]
pub struct Samples {
    event: PerfEvent,
    start: NonNull<u8>,
    page_bytes: usize,
    data_bytes: usize,
}

impl Samples {
    /// Maps room for samples, a power of two of pages.
    ///
    /// # Errors
    /// What the kernel says; it bounds what may be locked (`kernel.perf_event_mlock_kb`).
    ///
    /// # Panics
    /// If `pages` is no power of two.
    pub fn of(event: PerfEvent, pages: usize) -> io::Result<Samples> {
        assert!(pages.is_power_of_two(), "the kernel wants a power of two, not {pages}");
        let page_bytes = rustix::param::page_size();
        let data_bytes = page_bytes * pages;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place that the kernel chooses; it overlaps nothing of ours.
        let start = unsafe {
            mmap(std::ptr::null_mut(), page_bytes + data_bytes, protection, MapFlags::SHARED, &event.0, 0)
        }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Samples { event, start, page_bytes, data_bytes })
    }

    /// The event.
    pub fn event(&self) -> &PerfEvent {
        &self.event
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset + 8 <= self.page_bytes, "{offset} is not in the first page");
        // SAFETY: within the mapping, which lives as long as self.
        let place = unsafe { self.start.as_ptr().add(offset) };
        // SAFETY: aligned (the offsets are multiples of 8, the mapping of a page), and the kernel accesses
        // head and tail as whole words only.
        unsafe { AtomicU64::from_ptr(place.cast()) }
    }

    /// A byte of the ring, by its ever growing position.
    fn byte(&self, position: u64) -> u8 {
        let offset = self.page_bytes + (position % self.data_bytes as u64) as usize;
        // SAFETY: after the first page and within the data, which the remainder sees to.
        let place = unsafe { self.start.as_ptr().add(offset) };
        // SAFETY: readable; volatile because the kernel writes here.
        unsafe { place.read_volatile() }
    }

    /// Gives every record that is there to `take`, header included, and its room back to the kernel.
    pub fn drain(&mut self, take: &mut dyn FnMut(&[u8])) {
        let head = self.word(HEAD).load(Ordering::Acquire);
        let mut tail = self.word(TAIL).load(Ordering::Relaxed);
        let mut record = Vec::new();
        while tail < head {
            let size = u64::from(u16::from_le_bytes([self.byte(tail + 6), self.byte(tail + 7)]));
            if size < HEADER_BYTES || size > head - tail {
                // Not what the kernel promises; nothing after it can be trusted either.
                tail = head;
                break;
            }
            record.clear();
            record.extend((tail..tail + size).map(|position| self.byte(position)));
            take(&record);
            tail += size;
        }
        self.word(TAIL).store(tail, Ordering::Release);
    }
}

impl Drop for Samples {
    fn drop(&mut self) {
        // SAFETY: exactly what was mapped, and no reference into it outlives self.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.page_bytes + self.data_bytes) };
    }
}
