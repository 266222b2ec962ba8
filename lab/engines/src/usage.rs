//! What the machine charged: threads of ours, and threads of the kernel's that work for us.

use std::fs;

pub use sys::{ThreadUsage as Resources, set_io_priority};

/// The calling thread's, since it began.
pub fn thread() -> Resources {
    Resources::now()
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
