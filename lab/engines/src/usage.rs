//! What the machine charged: threads of ours, and threads of the kernel's that work for us.

use std::fs;

/// Processor time, switches and faults, as `getrusage(2)` has them, or the difference of two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
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

/// The calling thread's, since it began.
pub fn thread() -> Resources {
    // SAFETY: all zeroes are a value of this structure of numbers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is ours and of the kernel's shape.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    assert_eq!(result, 0, "getrusage of the calling thread cannot fail");
    let ns = |time: libc::timeval| time.tv_sec as u64 * 1_000_000_000 + time.tv_usec as u64 * 1_000;
    Resources {
        user_ns: ns(usage.ru_utime),
        system_ns: ns(usage.ru_stime),
        switches: (usage.ru_nvcsw + usage.ru_nivcsw) as u64,
        minor_faults: usage.ru_minflt as u64,
        major_faults: usage.ru_majflt as u64,
    }
}

/// Nanoseconds that a thread of this process has run, by the scheduler's own count; `None` when it has ended.
pub fn task_ns(thread: u32) -> Option<u64> {
    schedstat(&format!("/proc/self/task/{thread}/schedstat"))
}

/// Nanoseconds of the workers (`iou-wrk-*`) that io_uring keeps in this process for what would block.
/// Those that have ended are not in it.
pub fn uring_workers_ns() -> u64 {
    named_ns("/proc/self/task", "iou-wrk-")
}

/// Nanoseconds of every kernel worker (`kworker/*`) of the machine, whoever it works for.
pub fn kernel_workers_ns() -> u64 {
    named_ns("/proc", "kworker/")
}

/// Sets the I/O priority of the calling thread: class 1 real time, 2 best effort, 3 idle; level 0 to 7.
pub fn set_io_priority(class: u8, level: u8) -> std::io::Result<()> {
    // `IOPRIO_WHO_PROCESS` and `IOPRIO_PRIO_VALUE` of `linux/ioprio.h`; 0 is the calling thread.
    let value = libc::c_int::from(class) << 13 | libc::c_int::from(level);
    // SAFETY: numbers only.
    match unsafe { libc::syscall(libc::SYS_ioprio_set, 1, 0, value) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn named_ns(directory: &str, prefix: &str) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let named = entries.filter(|entry| {
        let digits = entry.file_name().as_encoded_bytes().first().is_some_and(u8::is_ascii_digit);
        digits && fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name.starts_with(prefix))
    });
    named.filter_map(|entry| schedstat(&entry.path().join("schedstat").to_string_lossy())).sum()
}

/// The first of three numbers: time on a processor.
fn schedstat(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_thread_is_charged() {
        let own = std::path::PathBuf::from("/proc/thread-self").canonicalize().unwrap();
        let id: u32 = own.file_name().unwrap().to_str().unwrap().parse().unwrap();
        let (before, ran) = (thread(), task_ns(id).unwrap());
        let mut value = 1u64;
        while thread().user_ns + thread().system_ns < before.user_ns + before.system_ns + 20_000_000 {
            value = std::hint::black_box(value.wrapping_mul(3));
        }
        assert!(task_ns(id).unwrap() > ran);
        assert_eq!(task_ns(u32::MAX), None);
    }
}
