//! `perf_event_open(2)`, and the ring of samples that it shares with the kernel.
//!
//! All of the crate's `unsafe` is here. A ring is memory that the kernel writes: it is never a Rust
//! reference, but read a word at a time through a pointer, after the head was loaded with acquire.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// `struct perf_event_attr`, as of the fifth version of it (112 bytes), which every kernel since 4.1 takes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Attributes {
    pub(crate) kind: u32,
    pub(crate) size: u32,
    pub(crate) config: u64,
    /// Period, or frequency where the flag says so.
    pub(crate) sample: u64,
    pub(crate) sample_type: u64,
    pub(crate) read_format: u64,
    pub(crate) flags: u64,
    pub(crate) wakeup: u32,
    pub(crate) breakpoint: u32,
    pub(crate) config1: u64,
    pub(crate) config2: u64,
    pub(crate) branches: u64,
    pub(crate) registers_user: u64,
    pub(crate) stack_user: u32,
    pub(crate) clock: i32,
    pub(crate) registers_interrupt: u64,
    pub(crate) aux_watermark: u32,
    pub(crate) stack_max: u16,
    pub(crate) reserved: u16,
}

const _: () = assert!(size_of::<Attributes>() == 112);

/// Starts switched off.
pub(crate) const DISABLED: u64 = 1;
/// Counts children as well.
pub(crate) const INHERIT: u64 = 1 << 1;
/// `sample` is a frequency.
pub(crate) const FREQUENCY: u64 = 1 << 10;

const CLOSE_ON_EXEC: libc::c_ulong = 1 << 3;
/// `_IO('$', 0)` and `_IO('$', 1)`.
const ENABLE: libc::c_ulong = 0x2400;
const DISABLE: libc::c_ulong = 0x2401;

/// Opens an event of a process (on any processor) or of a processor (of any process).
///
/// # Errors
/// What the kernel says: `ENOENT` for an event that this machine does not count, `EACCES` or `EPERM`
/// where it may not be asked.
pub(crate) fn open(
    attributes: &Attributes,
    process: i32,
    cpu: i32,
    group: Option<&OwnedFd>,
) -> io::Result<OwnedFd> {
    let attributes = Attributes { size: size_of::<Attributes>() as u32, ..*attributes };
    let group = group.map_or(-1, AsRawFd::as_raw_fd);
    // SAFETY: the structure lives across the call, and its size is in it; the kernel reads that much.
    let number = unsafe {
        libc::syscall(libc::SYS_perf_event_open, &raw const attributes, process, cpu, group, CLOSE_ON_EXEC)
    };
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given this number out, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(number as i32) })
}

/// Switches an event on or off.
///
/// # Errors
/// What the kernel says.
pub(crate) fn switch(event: &OwnedFd, on: bool) -> io::Result<()> {
    // SAFETY: the request takes no pointer.
    let status = unsafe { libc::ioctl(event.as_raw_fd(), if on { ENABLE } else { DISABLE }, 0) };
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Where head and tail stand in the first page.
const HEAD: usize = 1024;
const TAIL: usize = 1032;

/// The samples of one event.
#[derive(Debug)]
pub(crate) struct Ring {
    start: NonNull<u8>,
    page: usize,
    data: usize,
}

impl Ring {
    /// Maps a ring of a power of two of pages.
    ///
    /// # Errors
    /// What the kernel says; it bounds what may be locked.
    pub(crate) fn map(event: &OwnedFd, pages: usize) -> io::Result<Ring> {
        assert!(pages.is_power_of_two(), "the kernel wants a power of two, not {pages}");
        let page = rustix::param::page_size();
        let length = page * (1 + pages);
        // SAFETY: a new mapping at a place that the kernel chooses; it overlaps nothing of ours.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                event.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Ring { start, page, data: page * pages })
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset + 8 <= self.page, "{offset} is not in the first page");
        // SAFETY: within the mapping, which lives as long as self.
        let place = unsafe { self.start.as_ptr().add(offset) };
        // SAFETY: aligned (the offsets are multiples of 8, the mapping of a page), and the kernel accesses
        // head and tail as whole words only.
        unsafe { AtomicU64::from_ptr(place.cast()) }
    }

    /// A byte of the ring, by its ever growing position.
    fn byte(&self, position: u64) -> u8 {
        let offset = self.page + (position % self.data as u64) as usize;
        // SAFETY: after the first page and within the data, which the remainder sees to.
        let place = unsafe { self.start.as_ptr().add(offset) };
        // SAFETY: readable; volatile because the kernel writes here.
        unsafe { place.read_volatile() }
    }

    /// Gives every record that is there to `take`, and its room back to the kernel.
    pub(crate) fn drain(&mut self, take: &mut dyn FnMut(&[u8])) {
        let head = self.word(HEAD).load(Ordering::Acquire);
        let mut tail = self.word(TAIL).load(Ordering::Relaxed);
        let mut record = Vec::new();
        while tail < head {
            // The header: four bytes of type, two of mode, two of size.
            let size = u64::from(u16::from_le_bytes([self.byte(tail + 6), self.byte(tail + 7)]));
            if size < 8 || size > head - tail {
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

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: exactly what was mapped, and no reference into it outlives self.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.page + self.data) };
    }
}
