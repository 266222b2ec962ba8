//! Counting events.

use std::io;

use sys::{PerfConfig, PerfEvent, PerfKind, PerfTarget};

/// Something that can be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    /// Processor cycles.
    Cycles,
    /// Instructions that retired.
    Instructions,
    /// Accesses to the last level of cache, as the processor defines them.
    CacheReferences,
    /// Those that missed.
    CacheMisses,
    /// Nanoseconds on a processor.
    TaskClock,
    /// Switches from one thread to another.
    ContextSwitches,
    /// Moves to another processor.
    Migrations,
}

impl Event {
    /// All of them.
    pub const ALL: [Event; 7] = [
        Event::Cycles,
        Event::Instructions,
        Event::CacheReferences,
        Event::CacheMisses,
        Event::TaskClock,
        Event::ContextSwitches,
        Event::Migrations,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Event::Cycles => "cycles",
            Event::Instructions => "instructions",
            Event::CacheReferences => "cache-references",
            Event::CacheMisses => "cache-misses",
            Event::TaskClock => "task-clock",
            Event::ContextSwitches => "context-switches",
            Event::Migrations => "migrations",
        }
    }

    /// Its number in the kernel's interface.
    fn kind(self) -> PerfKind {
        match self {
            Event::Cycles => PerfKind::Hardware(0),
            Event::Instructions => PerfKind::Hardware(1),
            Event::CacheReferences => PerfKind::Hardware(2),
            Event::CacheMisses => PerfKind::Hardware(3),
            Event::TaskClock => PerfKind::Software(1),
            Event::ContextSwitches => PerfKind::Software(3),
            Event::Migrations => PerfKind::Software(4),
        }
    }

    fn of(self, target: PerfTarget) -> PerfConfig {
        PerfConfig { kind: self.kind(), target, user_only: false, frequency_hz: 0 }
    }
}

/// A counter's value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Count {
    /// As counted.
    pub raw: u64,
    /// Nanoseconds that it was switched on.
    pub enabled_ns: u64,
    /// Nanoseconds of these that it counted: fewer where events had to take turns.
    pub running_ns: u64,
}

impl Count {
    /// What it would have been without taking turns.
    pub fn scaled(self) -> f64 {
        if self.running_ns == 0 {
            0.0
        } else {
            self.raw as f64 * self.enabled_ns as f64 / self.running_ns as f64
        }
    }

    /// What came since an earlier reading.
    pub fn since(self, earlier: Count) -> Count {
        Count {
            raw: self.raw.saturating_sub(earlier.raw),
            enabled_ns: self.enabled_ns.saturating_sub(earlier.enabled_ns),
            running_ns: self.running_ns.saturating_sub(earlier.running_ns),
        }
    }
}

fn read(event: &PerfEvent) -> io::Result<Count> {
    let count = event.read()?;
    Ok(Count { raw: count.raw, enabled_ns: count.enabled_ns, running_ns: count.running_ns })
}

/// Counts events of a process and of all that it starts from now on.
#[derive(Debug)]
pub struct Tree {
    events: Vec<(Event, PerfEvent)>,
}

impl Tree {
    /// Counts what can be counted of `events`; the others are left out.
    ///
    /// # Errors
    /// Nothing of it can be counted: what the kernel said last.
    pub fn open(process: u32, events: &[Event]) -> io::Result<Tree> {
        let mut opened = Vec::new();
        let mut last = io::Error::other("no event is asked for");
        for event in events {
            // Events that are inherited cannot be read as a group, so that each stands alone.
            match PerfEvent::open(&event.of(PerfTarget::Tree(process)), None) {
                Ok(number) => opened.push((*event, number)),
                Err(error) => last = error,
            }
        }
        if opened.is_empty() { Err(last) } else { Ok(Tree { events: opened }) }
    }

    /// What was counted until now, living children included.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn read(&self) -> io::Result<Vec<(Event, Count)>> {
        self.events.iter().map(|(event, number)| Ok((*event, read(number)?))).collect()
    }
}

/// Counts events of processors, whoever runs on them.
#[derive(Debug)]
pub struct System {
    events: Vec<(Event, Vec<PerfEvent>)>,
}

impl System {
    /// Counts what can be counted of `events` on all of `cpus`. On each processor the events are a group:
    /// they count at the same times, so that their ratios mean something.
    ///
    /// # Errors
    /// Nothing of it can be counted: what the kernel said last.
    pub fn open(cpus: &[u32], events: &[Event]) -> io::Result<System> {
        let mut opened: Vec<(Event, Vec<PerfEvent>)> = Vec::new();
        let mut last = io::Error::other("no event is asked for");
        for event in events {
            let on = |(place, cpu): (usize, &u32)| {
                let leader = opened.first().map(|(leader, numbers)| (leader.kind(), &numbers[place]));
                // The kernel's own events may lead no group of the processor's.
                let alike = |leader| {
                    matches!(
                        (leader, event.kind()),
                        (PerfKind::Hardware(_), PerfKind::Hardware(_))
                            | (PerfKind::Software(_), PerfKind::Software(_))
                    )
                };
                let leader = leader.filter(|(kind, _)| alike(*kind)).map(|(_, number)| number);
                PerfEvent::open(&event.of(PerfTarget::Cpu(*cpu)), leader)
            };
            match cpus.iter().enumerate().map(on).collect::<io::Result<Vec<PerfEvent>>>() {
                Ok(numbers) => opened.push((*event, numbers)),
                Err(error) => last = error,
            }
        }
        if opened.is_empty() || cpus.is_empty() { Err(last) } else { Ok(System { events: opened }) }
    }

    /// What was counted until now, over all processors.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn read(&self) -> io::Result<Vec<(Event, Count)>> {
        let sum = |numbers: &Vec<PerfEvent>| {
            numbers.iter().try_fold(Count::default(), |sum, number| {
                let count = read(number)?;
                Ok::<Count, io::Error>(Count {
                    raw: sum.raw + count.raw,
                    enabled_ns: sum.enabled_ns + count.enabled_ns,
                    running_ns: sum.running_ns + count.running_ns,
                })
            })
        };
        self.events.iter().map(|(event, numbers)| Ok((*event, sum(numbers)?))).collect()
    }
}

/// What this machine counts: each event's name with `yes`, or why not.
pub fn probe() -> Vec<(String, String)> {
    let own = std::process::id();
    let state = |event: Event| match Tree::open(own, &[event]) {
        Ok(_) => "yes".to_string(),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
            "no: the machine does not count it".to_string()
        }
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            "no: the machine does not count it".to_string()
        }
        Err(error) => format!("no: {error} (sysctl kernel.perf_event_paranoid)"),
    };
    Event::ALL.into_iter().map(|event| (event.name().to_string(), state(event))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Says so where even the kernel's own events may not be counted, as in some containers.
    fn allowed() -> bool {
        let allowed = Tree::open(std::process::id(), &[Event::TaskClock]).is_ok();
        if !allowed {
            eprintln!("SKIPPED: perf_event_open is not allowed here");
        }
        allowed
    }

    #[test]
    fn turns_are_made_up_for() {
        let count = Count { raw: 100, enabled_ns: 1000, running_ns: 250 };
        assert_eq!(count.scaled(), 400.0);
        assert_eq!(Count { running_ns: 0, ..count }.scaled(), 0.0);
        let later = Count { raw: 300, enabled_ns: 3000, running_ns: 1250 };
        assert_eq!(later.since(count), Count { raw: 200, enabled_ns: 2000, running_ns: 1000 });
    }

    #[test]
    fn time_on_a_processor_is_counted_with_that_of_children() {
        if !allowed() {
            return;
        }
        let mut child = std::process::Command::new("sh");
        child.arg("-c").arg("sleep 0.2; (i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done) & wait");
        let mut child = child.spawn().unwrap();
        let tree = Tree::open(child.id(), &[Event::TaskClock, Event::ContextSwitches]).unwrap();
        assert!(child.wait().unwrap().success());
        let counts = tree.read().unwrap();
        let of = |event| counts.iter().find(|(known, _)| *known == event).unwrap().1.scaled();
        assert!(of(Event::TaskClock) > 2e6, "the child's child worked: {counts:?}");
        assert!(of(Event::ContextSwitches) >= 1.0, "{counts:?}");
    }

    #[test]
    fn every_event_says_whether_it_is_counted() {
        let states = probe();
        assert_eq!(states.len(), Event::ALL.len());
        assert!(states.iter().all(|(_, state)| state == "yes" || state.starts_with("no: ")), "{states:?}");
    }

    #[test]
    fn a_process_that_is_not_there_is_an_error() {
        assert!(Tree::open(u32::MAX, &[Event::TaskClock]).is_err());
        assert!(Tree::open(1, &[]).is_err());
        assert!(System::open(&[], &[Event::TaskClock]).is_err());
    }
}
