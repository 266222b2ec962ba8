//! Resource usage of a thread.

/// Processor time, context switches and page faults of one thread, or the difference of two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time in nanoseconds, from the thread's CPU clock.
    pub cpu_ns: u64,
    /// Time in user space in nanoseconds; its precision depends on the kernel's accounting.
    pub user_ns: u64,
    /// Time in the kernel in nanoseconds, with the same precision.
    pub system_ns: u64,
    /// Voluntary and involuntary context switches.
    pub switches: u64,
    /// Page faults without I/O.
    pub minor_faults: u64,
    /// Page faults with I/O.
    pub major_faults: u64,
}

impl Usage {
    /// Usage of the calling thread since it started.
    pub fn now() -> Usage {
        let resources = io_engines::usage::current_thread();
        Usage {
            cpu_ns: os::thread_cpu_ns(),
            user_ns: resources.user_ns,
            system_ns: resources.system_ns,
            switches: resources.switches,
            minor_faults: resources.minor_faults,
            major_faults: resources.major_faults,
        }
    }

    /// The difference to an earlier reading.
    pub fn since(self, earlier: Usage) -> Usage {
        Usage {
            cpu_ns: self.cpu_ns.saturating_sub(earlier.cpu_ns),
            user_ns: self.user_ns.saturating_sub(earlier.user_ns),
            system_ns: self.system_ns.saturating_sub(earlier.system_ns),
            switches: self.switches.saturating_sub(earlier.switches),
            minor_faults: self.minor_faults.saturating_sub(earlier.minor_faults),
            major_faults: self.major_faults.saturating_sub(earlier.major_faults),
        }
    }

    /// The sum of two usages.
    pub fn plus(self, other: Usage) -> Usage {
        Usage {
            cpu_ns: self.cpu_ns + other.cpu_ns,
            user_ns: self.user_ns + other.user_ns,
            system_ns: self.system_ns + other.system_ns,
            switches: self.switches + other.switches,
            minor_faults: self.minor_faults + other.minor_faults,
            major_faults: self.major_faults + other.major_faults,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_thread_uses_processor_time() {
        let before = Usage::now();
        let mut random = crate::WyRand::new(1);
        while os::thread_cpu_ns() < before.cpu_ns + 1_000_000 {
            std::hint::black_box(random.next_bits());
        }
        assert!(Usage::now().since(before).cpu_ns >= 1_000_000);
    }
}
