//! The ring of samples that a perf event shares with the kernel.
//!
//! The kernel writes to this memory, so the only Rust references into it are those to head and tail, which are
//! atomics. The data is read byte by byte through a pointer, after an acquire load of the head.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::PerfEvent;

/// Offsets of head and tail in the first page (`struct perf_event_mmap_page`).
const HEAD: usize = 1024;
const TAIL: usize = 1032;
/// Size of a record header, the smallest record: four bytes of type, two of flags, two of size.
const HEADER_BYTES: u64 = 8;

/// A sampling event with its mapped ring of samples.
#[derive(Debug)]
pub struct SampleRing {
    event: PerfEvent,
    start: NonNull<u8>,
    page_bytes: usize,
    data_bytes: usize,
}

impl SampleRing {
    /// Maps a ring of `pages` pages.
    ///
    /// # Errors
    /// The kernel's error; it limits the locked memory (`kernel.perf_event_mlock_kb`).
    ///
    /// # Panics
    /// If `pages` is not a power of two.
    pub fn new(event: PerfEvent, pages: usize) -> io::Result<SampleRing> {
        assert!(pages.is_power_of_two(), "the number of pages must be a power of two, not {pages}");
        let page_bytes = rustix::param::page_size();
        let data_bytes = page_bytes * pages;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses aliases nothing.
        let start = unsafe {
            mmap(std::ptr::null_mut(), page_bytes + data_bytes, protection, MapFlags::SHARED, &event.0, 0)
        }?;
        let start =
            NonNull::new(start.cast::<u8>()).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
        Ok(SampleRing { event, start, page_bytes, data_bytes })
    }

    /// The event, for [`PerfEvent::set_enabled`].
    pub fn event(&self) -> &PerfEvent {
        &self.event
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset + 8 <= self.page_bytes, "{offset} is not in the first page");
        // SAFETY: inside the mapping, which lives as long as `self`.
        let place = unsafe { self.start.as_ptr().add(offset) };
        // SAFETY: aligned (the offsets are multiples of 8, the mapping of a page), and the kernel accesses
        // head and tail as whole words only.
        unsafe { AtomicU64::from_ptr(place.cast()) }
    }

    /// The byte at a position, which grows without wrapping.
    fn byte(&self, position: u64) -> u8 {
        let offset = self.page_bytes + (position % self.data_bytes as u64) as usize;
        // SAFETY: after the first page and inside the data area, because of the remainder.
        let place = unsafe { self.start.as_ptr().add(offset) };
        // SAFETY: inside the readable mapping; volatile because the kernel writes here.
        unsafe { place.read_volatile() }
    }

    /// Passes every available record, header included, to `on_record`, and returns its space to the kernel.
    pub fn drain(&mut self, on_record: &mut dyn FnMut(&[u8])) {
        let head = self.word(HEAD).load(Ordering::Acquire);
        let mut tail = self.word(TAIL).load(Ordering::Relaxed);
        let mut record = Vec::new();
        while tail < head {
            let size = u64::from(u16::from_le_bytes([self.byte(tail + 6), self.byte(tail + 7)]));
            if size < HEADER_BYTES || size > head - tail {
                // Invalid size: the kernel never writes this, so the rest is untrusted too.
                tail = head;
                break;
            }
            record.clear();
            record.extend((tail..tail + size).map(|position| self.byte(position)));
            on_record(&record);
            tail += size;
        }
        self.word(TAIL).store(tail, Ordering::Release);
    }
}

impl Drop for SampleRing {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping of `new`, and no reference into it outlives `self`.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.page_bytes + self.data_bytes) };
    }
}
