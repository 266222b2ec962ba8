//! What the machine charged a thread.

/// Processor time and faults of one thread, or the difference of two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time in nanoseconds, exact.
    pub cpu_ns: u64,
    /// Its part in user space, in steps of the kernel's 10 ms tick.
    pub user_ns: u64,
    /// Its part in the kernel, in the same steps.
    pub system_ns: u64,
    /// Context switches.
    pub switches: u64,
    /// Page faults that needed no disk.
    pub minor_faults: u64,
    /// Page faults that did.
    pub major_faults: u64,
}

/// The kernel's USER_HZ: 100 on every architecture that Ringbolt runs on.
const TICK_NS: u64 = 10_000_000;

impl Usage {
    /// The calling thread's, since it began. What `/proc` does not say counts as 0.
    pub fn now() -> Usage {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap_or_default();
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
        Usage { cpu_ns: sys::thread_cpu_ns(), ..parse(&stat, &status) }
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

/// proc(5): of `stat`, after the name in brackets, fields 10, 12, 14 and 15; of `status`, two lines.
fn parse(stat: &str, status: &str) -> Usage {
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields: Vec<u64> = after_name.split_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
    // Field 3, the state, is the first after the name.
    let field = |number: usize| fields.get(number - 3).copied().unwrap_or(0);
    let switches = status.lines().filter_map(|line| line.split_once("ctxt_switches:"));
    Usage {
        cpu_ns: 0,
        minor_faults: field(10),
        major_faults: field(12),
        user_ns: field(14) * TICK_NS,
        system_ns: field(15) * TICK_NS,
        switches: switches.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_and_spaces_shifts_nothing() {
        let stat = "77 (a) b) (c) R 1 2 3 4 5 6 10 11 12 13 140 150 16 17";
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t4\nnonvoluntary_ctxt_switches:\t5\n";
        let usage = parse(stat, status);
        assert_eq!((usage.minor_faults, usage.major_faults, usage.switches), (10, 12, 9));
        assert_eq!((usage.user_ns, usage.system_ns), (1_400_000_000, 1_500_000_000));
    }

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
