//! What the kernel charges the calling thread, and in what order it serves it.

use std::io;

/// Processor time, switches and faults, as `getrusage(2)` has them, or the difference of two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadUsage {
    /// Processor time in user space, nanoseconds.
    pub user_ns: u64,
    /// In the kernel.
    pub system_ns: u64,
    /// Context switches, wanted and not.
    pub switches: u64,
    /// Page faults that needed no disk.
    pub minor_faults: u64,
    /// Page faults that did.
    pub major_faults: u64,
}

impl ThreadUsage {
    /// The calling thread's, since it began.
    pub fn now() -> ThreadUsage {
        // SAFETY: all zeroes are a value of this structure of numbers.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the structure is ours and of the kernel's shape.
        let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
        assert_eq!(result, 0, "getrusage of the calling thread cannot fail");
        let ns = |time: libc::timeval| time.tv_sec as u64 * 1_000_000_000 + time.tv_usec as u64 * 1_000;
        ThreadUsage {
            user_ns: ns(usage.ru_utime),
            system_ns: ns(usage.ru_stime),
            switches: (usage.ru_nvcsw + usage.ru_nivcsw) as u64,
            minor_faults: usage.ru_minflt as u64,
            major_faults: usage.ru_majflt as u64,
        }
    }
}

/// Sets the I/O priority of the calling thread: class 1 real time, 2 best effort, 3 idle; level 0 to 7.
///
/// # Errors
/// What the kernel says: `EINVAL` for other numbers, `EPERM` of real time for a user who may not.
pub fn set_io_priority(class: u8, level: u8) -> io::Result<()> {
    // `IOPRIO_WHO_PROCESS` and `IOPRIO_PRIO_VALUE` of `linux/ioprio.h`; 0 is the calling thread.
    let value = libc::c_int::from(class) << 13 | libc::c_int::from(level);
    // SAFETY: numbers only.
    match unsafe { libc::syscall(libc::SYS_ioprio_set, 1, 0, value) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri charges nothing")]
    fn a_thread_that_works_is_charged() {
        let before = ThreadUsage::now();
        let worked = |usage: ThreadUsage| usage.user_ns + usage.system_ns;
        let mut value = 1u64;
        while worked(ThreadUsage::now()) < worked(before) + 10_000_000 {
            value = std::hint::black_box(value.wrapping_mul(3));
        }
        assert!(ThreadUsage::now().minor_faults >= before.minor_faults);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no such call")]
    fn an_io_priority_is_one_of_the_kernels() {
        // On a thread of its own, which takes the priority with it.
        let tried = std::thread::spawn(|| (set_io_priority(2, 7), set_io_priority(7, 0)));
        let (good, bad) = tried.join().unwrap();
        good.unwrap();
        assert_eq!(bad.unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
