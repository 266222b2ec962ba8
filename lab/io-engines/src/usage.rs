//! CPU time of threads: those of this process, and kernel threads that work for it.

use std::fs;

pub use os::{ThreadUsage, set_io_priority};

/// Resource usage of the calling thread since its start.
pub fn current_thread() -> ThreadUsage {
    ThreadUsage::now()
}

/// CPU time in nanoseconds of a thread of this process, from schedstat; `None` if it has exited.
pub fn task_ns(thread: u32) -> Option<u64> {
    schedstat(&format!("/proc/self/task/{thread}/schedstat"))
}

/// CPU time of threads of this process: nanoseconds in user mode and in the kernel. Threads that have exited are not
/// included.
pub fn tasks_ns(threads: &[u32]) -> [u64; 2] {
    let each = threads.iter().filter_map(|thread| {
        let total = task_ns(*thread)?;
        // The times of `stat` have the resolution of clock ticks: only their proportion is used.
        let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
        let ticks = |index| stat.rsplit(')').next()?.split_whitespace().nth(index)?.parse::<u64>().ok();
        let (user, system) = (ticks(UTIME)?, ticks(STIME)?);
        let user_ns = (u128::from(total) * u128::from(user) / u128::from((user + system).max(1))) as u64;
        Some([user_ns, total - user_ns])
    });
    each.fold([0, 0], |sum, one| [sum[0] + one[0], sum[1] + one[1]])
}

/// Indexes of `utime` and `stime` among the fields behind the name of a thread: see proc(5).
const UTIME: usize = 11;
const STIME: usize = 12;

/// CPU time in nanoseconds of this process's io_uring workers (`iou-wrk-*`), which perform blocking
/// requests. Workers that have exited are not included.
pub fn uring_workers_ns() -> u64 {
    named_ns("/proc/self/task", "iou-wrk-")
}

/// CPU time in nanoseconds of all kernel workers (`kworker/*`) of the machine.
pub fn kernel_workers_ns() -> u64 {
    named_ns("/proc", "kworker/")
}

fn named_ns(directory: &str, prefix: &str) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let named = entries.filter(|entry| {
        let digits = entry.file_name().as_encoded_bytes().first().is_some_and(u8::is_ascii_digit);
        digits && fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name.starts_with(prefix))
    });
    named.filter_map(|entry| schedstat(&entry.path().join("schedstat").to_string_lossy())).sum()
}

/// The first field of a schedstat file: CPU time in nanoseconds.
fn schedstat(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_usage_counts_cpu_time() {
        let own = std::path::PathBuf::from("/proc/thread-self").canonicalize().unwrap();
        let id: u32 = own.file_name().unwrap().to_str().unwrap().parse().unwrap();
        let (before, cpu_ns) = (current_thread(), task_ns(id).unwrap());
        let mut value = 1u64;
        while current_thread().user_ns + current_thread().system_ns
            < before.user_ns + before.system_ns + 20_000_000
        {
            value = std::hint::black_box(value.wrapping_mul(3));
        }
        assert!(task_ns(id).unwrap() > cpu_ns);
        let used: u64 = tasks_ns(&[id, u32::MAX]).iter().sum();
        assert!(used > cpu_ns, "{used} {cpu_ns}");
        assert_eq!(tasks_ns(&[]), [0, 0]);
        assert_eq!(task_ns(u32::MAX), None);
    }
}
