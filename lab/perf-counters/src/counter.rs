//! Hardware and software event counters (perf_event_open).

use std::io;

use os::{PerfConfig, PerfEvent, PerfKind, PerfTarget};

/// A countable event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CounterEvent {
    /// CPU cycles.
    Cycles,
    /// Retired instructions.
    Instructions,
    /// Last-level cache accesses, as the CPU defines them.
    CacheReferences,
    /// Last-level cache misses.
    CacheMisses,
    /// CPU time in nanoseconds.
    TaskClock,
    /// Context switches.
    ContextSwitches,
    /// Migrations to another CPU.
    Migrations,
}

impl CounterEvent {
    /// All events.
    pub const ALL: [CounterEvent; 7] = [
        CounterEvent::Cycles,
        CounterEvent::Instructions,
        CounterEvent::CacheReferences,
        CounterEvent::CacheMisses,
        CounterEvent::TaskClock,
        CounterEvent::ContextSwitches,
        CounterEvent::Migrations,
    ];

    /// Name, as in perf(1) except for `migrations`.
    pub fn name(self) -> &'static str {
        match self {
            CounterEvent::Cycles => "cycles",
            CounterEvent::Instructions => "instructions",
            CounterEvent::CacheReferences => "cache-references",
            CounterEvent::CacheMisses => "cache-misses",
            CounterEvent::TaskClock => "task-clock",
            CounterEvent::ContextSwitches => "context-switches",
            CounterEvent::Migrations => "migrations",
        }
    }

    /// Type and number in perf_event_open(2).
    fn kind(self) -> PerfKind {
        match self {
            CounterEvent::Cycles => PerfKind::Hardware(0),
            CounterEvent::Instructions => PerfKind::Hardware(1),
            CounterEvent::CacheReferences => PerfKind::Hardware(2),
            CounterEvent::CacheMisses => PerfKind::Hardware(3),
            CounterEvent::TaskClock => PerfKind::Software(1),
            CounterEvent::ContextSwitches => PerfKind::Software(3),
            CounterEvent::Migrations => PerfKind::Software(4),
        }
    }

    fn of(self, target: PerfTarget) -> PerfConfig {
        PerfConfig { kind: self.kind(), target, user_only: false, frequency_hz: 0 }
    }
}

/// A reading of a counter.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CounterValue {
    /// Counted events.
    pub raw: u64,
    /// Nanoseconds that the counter was enabled.
    pub enabled_ns: u64,
    /// Nanoseconds of these that it was counting; less than `enabled_ns` if events are multiplexed.
    pub running_ns: u64,
}

impl CounterValue {
    /// The count, extrapolated for multiplexing.
    pub fn scaled(self) -> f64 {
        if self.running_ns == 0 {
            0.0
        } else {
            self.raw as f64 * self.enabled_ns as f64 / self.running_ns as f64
        }
    }

    /// The difference from an earlier reading.
    pub fn since(self, earlier: CounterValue) -> CounterValue {
        CounterValue {
            raw: self.raw.saturating_sub(earlier.raw),
            enabled_ns: self.enabled_ns.saturating_sub(earlier.enabled_ns),
            running_ns: self.running_ns.saturating_sub(earlier.running_ns),
        }
    }
}

fn read(event: &PerfEvent) -> io::Result<CounterValue> {
    let count = event.read()?;
    Ok(CounterValue { raw: count.raw, enabled_ns: count.enabled_ns, running_ns: count.running_ns })
}

/// Counts events of a process and of the descendants that it creates from now on.
#[derive(Debug)]
pub struct ProcessCounters {
    events: Vec<(CounterEvent, PerfEvent)>,
}

impl ProcessCounters {
    /// Opens counters for `events`; those that the machine cannot count are omitted.
    ///
    /// # Errors
    /// None of the events can be counted: the last error of the kernel.
    pub fn open(process: u32, events: &[CounterEvent]) -> io::Result<ProcessCounters> {
        let mut opened = Vec::new();
        let mut last_error = io::Error::other("no event is asked for");
        for event in events {
            // Inherited events cannot be read as a group, so each one is opened separately.
            match PerfEvent::open(&event.of(PerfTarget::ProcessTree(process)), None) {
                Ok(handle) => opened.push((*event, handle)),
                Err(error) => last_error = error,
            }
        }
        if opened.is_empty() { Err(last_error) } else { Ok(ProcessCounters { events: opened }) }
    }

    /// Current values, including running children.
    ///
    /// # Errors
    /// A failed read of a counter.
    pub fn read(&self) -> io::Result<Vec<(CounterEvent, CounterValue)>> {
        self.events.iter().map(|(event, handle)| Ok((*event, read(handle)?))).collect()
    }
}

/// Counts events of CPUs, for all processes that run on them.
#[derive(Debug)]
pub struct SystemCounters {
    events: Vec<(CounterEvent, Vec<PerfEvent>)>,
}

impl SystemCounters {
    /// Opens counters for `events` on each of `cpus`; those that the machine cannot count are omitted. On
    /// each CPU the events form a group: they count at the same times, so their ratios are meaningful.
    ///
    /// # Errors
    /// None of the events can be counted: the last error of the kernel.
    pub fn open(cpus: &[u32], events: &[CounterEvent]) -> io::Result<SystemCounters> {
        let mut opened: Vec<(CounterEvent, Vec<PerfEvent>)> = Vec::new();
        let mut last_error = io::Error::other("no event is asked for");
        for event in events {
            let open_on = |(index, cpu): (usize, &u32)| {
                let leader = opened.first().map(|(leader, handles)| (leader.kind(), &handles[index]));
                // A software event must not lead a group of hardware events.
                let is_same_type = |leader| {
                    matches!(
                        (leader, event.kind()),
                        (PerfKind::Hardware(_), PerfKind::Hardware(_))
                            | (PerfKind::Software(_), PerfKind::Software(_))
                    )
                };
                let leader = leader.filter(|(kind, _)| is_same_type(*kind)).map(|(_, handle)| handle);
                PerfEvent::open(&event.of(PerfTarget::Cpu(*cpu)), leader)
            };
            match cpus.iter().enumerate().map(open_on).collect::<io::Result<Vec<PerfEvent>>>() {
                Ok(handles) => opened.push((*event, handles)),
                Err(error) => last_error = error,
            }
        }
        if opened.is_empty() || cpus.is_empty() {
            Err(last_error)
        } else {
            Ok(SystemCounters { events: opened })
        }
    }

    /// Current values, summed over all CPUs.
    ///
    /// # Errors
    /// A failed read of a counter.
    pub fn read(&self) -> io::Result<Vec<(CounterEvent, CounterValue)>> {
        let sum = |handles: &Vec<PerfEvent>| {
            handles.iter().try_fold(CounterValue::default(), |sum, handle| {
                let count = read(handle)?;
                Ok::<CounterValue, io::Error>(CounterValue {
                    raw: sum.raw + count.raw,
                    enabled_ns: sum.enabled_ns + count.enabled_ns,
                    running_ns: sum.running_ns + count.running_ns,
                })
            })
        };
        self.events.iter().map(|(event, handles)| Ok((*event, sum(handles)?))).collect()
    }
}

/// Availability of each event on this machine: its name with `yes`, or `no:` and the reason.
pub fn probe() -> Vec<(String, String)> {
    let own = std::process::id();
    let state = |event: CounterEvent| match ProcessCounters::open(own, &[event]) {
        Ok(_) => "yes".to_string(),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
            "no: the machine does not count it".to_string()
        }
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            "no: the machine does not count it".to_string()
        }
        Err(error) => format!("no: {error} (sysctl kernel.perf_event_paranoid)"),
    };
    CounterEvent::ALL.into_iter().map(|event| (event.name().to_string(), state(event))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether software events are permitted; reports a skipped test if not, as in some containers.
    fn is_permitted() -> bool {
        let is_permitted = ProcessCounters::open(std::process::id(), &[CounterEvent::TaskClock]).is_ok();
        if !is_permitted {
            eprintln!("SKIPPED: perf_event_open is not allowed here");
        }
        is_permitted
    }

    #[test]
    fn multiplexed_counts_are_extrapolated() {
        let count = CounterValue { raw: 100, enabled_ns: 1000, running_ns: 250 };
        assert_eq!(count.scaled(), 400.0);
        assert_eq!(CounterValue { running_ns: 0, ..count }.scaled(), 0.0);
        let later = CounterValue { raw: 300, enabled_ns: 3000, running_ns: 1250 };
        assert_eq!(later.since(count), CounterValue { raw: 200, enabled_ns: 2000, running_ns: 1000 });
    }

    #[test]
    fn cpu_time_includes_descendants() {
        if !is_permitted() {
            return;
        }
        let mut child = std::process::Command::new("sh");
        child.arg("-c").arg("sleep 0.2; (i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done) & wait");
        let mut child = child.spawn().unwrap();
        let tree =
            ProcessCounters::open(child.id(), &[CounterEvent::TaskClock, CounterEvent::ContextSwitches])
                .unwrap();
        assert!(child.wait().unwrap().success());
        let counts = tree.read().unwrap();
        let of = |event| counts.iter().find(|(known, _)| *known == event).unwrap().1.scaled();
        assert!(of(CounterEvent::TaskClock) > 2e6, "the grandchild used CPU time: {counts:?}");
        assert!(of(CounterEvent::ContextSwitches) >= 1.0, "{counts:?}");
    }

    #[test]
    fn probe_reports_every_event() {
        let states = probe();
        assert_eq!(states.len(), CounterEvent::ALL.len());
        assert!(states.iter().all(|(_, state)| state == "yes" || state.starts_with("no: ")), "{states:?}");
    }

    #[test]
    fn opening_without_process_event_or_cpu_fails() {
        assert!(ProcessCounters::open(u32::MAX, &[CounterEvent::TaskClock]).is_err());
        assert!(ProcessCounters::open(1, &[]).is_err());
        assert!(SystemCounters::open(&[], &[CounterEvent::TaskClock]).is_err());
    }
}
