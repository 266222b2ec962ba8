//! What the machine charged a thread.

/// Processor time and faults of one thread, or the difference of two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time in nanoseconds, exact.
    pub cpu_ns: u64,
    /// Its part in user space, as exact as the kernel's configuration makes it.
    pub user_ns: u64,
    /// Its part in the kernel, likewise.
    pub system_ns: u64,
    /// Context switches.
    pub switches: u64,
    /// Page faults that needed no disk.
    pub minor_faults: u64,
    /// Page faults that did.
    pub major_faults: u64,
}

impl Usage {
    /// The calling thread's, since it began.
    pub fn now() -> Usage {
        let resources = engines::usage::thread();
        Usage {
            cpu_ns: sys::thread_cpu_ns(),
            user_ns: resources.user_ns,
            system_ns: resources.system_ns,
            switches: resources.switches,
            minor_faults: resources.minor_faults,
            major_faults: resources.major_faults,
        }
    }

    /// What came to it since `earlier`.
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

    /// Both together.
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
        let mut random = crate::Random::new(1);
        while sys::thread_cpu_ns() < before.cpu_ns + 1_000_000 {
            std::hint::black_box(random.next_bits());
        }
        assert!(Usage::now().since(before).cpu_ns >= 1_000_000);
    }
}
