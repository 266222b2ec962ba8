//! Instructions that a thread executes, counted by the processor.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// A counter of the instructions that the calling thread executes in user mode.
///
/// Reading it is a system call, some hundred nanoseconds: it is for measurements, not to be left on.
#[derive(Debug)]
pub struct Instructions(OwnedFd);

/// `struct perf_event_attr` up to its first published size (`PERF_ATTR_SIZE_VER0`).
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    config1: u64,
}

const _: () = assert!(size_of::<Attributes>() == 64);

const TYPE_HARDWARE: u32 = 0;
const COUNT_INSTRUCTIONS: u64 = 1;
const EXCLUDE_KERNEL: u64 = 1 << 5;
const EXCLUDE_HYPERVISOR: u64 = 1 << 6;
const CLOSE_ON_EXEC: u32 = 1 << 3;

impl Instructions {
    /// Starts counting what this thread executes.
    ///
    /// # Errors
    /// Machines without such a counter, which many virtual machines are, and settings of
    /// `kernel.perf_event_paranoid` above 2.
    pub fn of_this_thread() -> io::Result<Instructions> {
        let attributes = Attributes {
            kind: TYPE_HARDWARE,
            size: size_of::<Attributes>() as u32,
            config: COUNT_INSTRUCTIONS,
            flags: EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR,
            ..Attributes::default()
        };
        let (this_thread, any_cpu, no_group) = (0, -1, -1);
        // SAFETY: the kernel reads `size` bytes of the structure, which lives until the call returns.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                &raw const attributes,
                this_thread,
                any_cpu,
                no_group,
                CLOSE_ON_EXEC,
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call returned a new descriptor that nobody else has.
        Ok(Instructions(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
    }

    /// Instructions since it was made; 0 if the kernel does not say.
    pub fn count(&self) -> u64 {
        let mut count = [0; 8];
        // SAFETY: the buffer is as long as is said.
        let read = unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
        if read == 8 { u64::from_ne_bytes(count) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri counts nothing")]
    fn counting_works_or_says_why_not() {
        match Instructions::of_this_thread() {
            Ok(counter) => {
                let before = counter.count();
                std::hint::black_box((0..1000u64).map(std::hint::black_box).sum::<u64>());
                assert!(counter.count() - before > 1000);
            }
            Err(error) => {
                println!("SKIPPED: no instruction counter here: {error}");
                assert!(error.raw_os_error().is_some());
            }
        }
    }
}
