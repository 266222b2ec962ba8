//! Resource usage and I/O priority of the calling thread.

use std::io;

/// CPU time, context switches and page faults of `getrusage(2)`, or the difference of two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadUsage {
    /// CPU time in user mode, in nanoseconds.
    pub user_ns: u64,
    /// CPU time in the kernel, in nanoseconds.
    pub system_ns: u64,
    /// Context switches, voluntary and involuntary.
    pub switches: u64,
    /// Page faults without I/O.
    pub minor_faults: u64,
    /// Page faults with I/O.
    pub major_faults: u64,
}

impl ThreadUsage {
    /// The usage of the calling thread since it started.
    pub fn now() -> ThreadUsage {
        // SAFETY: all zeroes is a valid `rusage`, which contains only integers.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: `usage` is a valid `rusage` for the kernel to write.
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
/// The kernel's error: `EINVAL` for other numbers, `EPERM` for real time without the privilege.
pub fn set_io_priority(class: u8, level: u8) -> io::Result<()> {
    // `IOPRIO_WHO_PROCESS` and `IOPRIO_PRIO_VALUE` of `linux/ioprio.h`; 0 is the calling thread.
    let value = libc::c_int::from(class) << 13 | libc::c_int::from(level);
    // SAFETY: the arguments are integers, not pointers.
    match unsafe { libc::syscall(libc::SYS_ioprio_set, 1, 0, value) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement getrusage")]
    fn cpu_time_of_a_busy_thread_increases() {
        let before = ThreadUsage::now();
        let worked = |usage: ThreadUsage| usage.user_ns + usage.system_ns;
        let mut value = 1u64;
        while worked(ThreadUsage::now()) < worked(before) + 10_000_000 {
            value = std::hint::black_box(value.wrapping_mul(3));
        }
        assert!(ThreadUsage::now().minor_faults >= before.minor_faults);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement ioprio_set")]
    fn an_invalid_io_priority_is_rejected() {
        // On a separate thread, so that the priority of the test thread does not change.
        let thread = std::thread::spawn(|| (set_io_priority(2, 7), set_io_priority(7, 0)));
        let (good, bad) = thread.join().unwrap();
        good.unwrap();
        assert_eq!(bad.unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
