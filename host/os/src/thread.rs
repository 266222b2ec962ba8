//! Resource usage, I/O priority and memory policy of the calling thread.

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

/// Where the kernel allocates memory that a thread touches first: `set_mempolicy(2)`. Nodes are those of
/// `/sys/devices/system/node`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryPolicy {
    /// The default of the system.
    Default,
    /// On this node, or another where it has no memory.
    Preferred(u32),
    /// On these nodes alone.
    Bind(Vec<u32>),
    /// On these nodes in turn.
    Interleave(Vec<u32>),
    /// On the node of the CPU on which the thread runs.
    Local,
}

/// Nodes of a mask: the kernel's largest `MAX_NUMNODES`.
const NODES_MAX: usize = 1024;

/// Sets the memory policy of the calling thread, which threads that it starts inherit.
///
/// # Errors
/// The kernel's error: `EINVAL` for nodes that do not exist or that the thread may not use, `ENOSYS` without NUMA.
pub fn set_memory_policy(policy: &MemoryPolicy) -> io::Result<()> {
    // `MPOL_*` of `linux/mempolicy.h`.
    let (mode, nodes): (libc::c_int, &[u32]) = match policy {
        MemoryPolicy::Default => (0, &[]),
        MemoryPolicy::Preferred(node) => (1, std::slice::from_ref(node)),
        MemoryPolicy::Bind(nodes) => (2, nodes),
        MemoryPolicy::Interleave(nodes) => (3, nodes),
        MemoryPolicy::Local => (4, &[]),
    };
    let mut mask = [0u64; NODES_MAX / 64];
    for node in nodes {
        let word = mask.get_mut(*node as usize / 64).ok_or(io::ErrorKind::InvalidInput)?;
        *word |= 1 << (node % 64);
    }
    // The kernel reads one bit less than this number.
    let (address, bits) = match nodes {
        [] => (std::ptr::null(), 0),
        _ => (mask.as_ptr(), NODES_MAX + 1),
    };
    // SAFETY: the kernel reads NODES_MAX bits of `mask`, which lives until the call returns, or nothing.
    match unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, address, bits) } {
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

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement set_mempolicy")]
    fn a_memory_policy_holds_for_the_memory_of_its_thread() {
        let policy_of = |policy: MemoryPolicy| {
            std::thread::spawn(move || {
                set_memory_policy(&policy).map(|()| {
                    let map = std::fs::read_to_string("/proc/thread-self/numa_maps").unwrap_or_default();
                    // Address, policy, and what is mapped there.
                    map.lines().next().and_then(|line| line.split(' ').nth(1)).map(str::to_string)
                })
            })
            .join()
            .unwrap()
        };
        let bound = match policy_of(MemoryPolicy::Bind(vec![0])) {
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => return,
            bound => bound.unwrap(),
        };
        // Without numa_maps there is nothing to compare.
        assert!(bound.is_none_or(|policy| policy == "bind:0"));
        for policy in [MemoryPolicy::Default, MemoryPolicy::Local, MemoryPolicy::Interleave(vec![0])] {
            policy_of(policy).unwrap();
        }
        for node in [1023, 1024] {
            assert!(policy_of(MemoryPolicy::Preferred(node)).is_err(), "{node}");
        }
    }
}
