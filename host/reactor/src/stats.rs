//! Reactor and poller statistics.

use std::sync::atomic::{AtomicU64, Ordering};

/// Statistics of one reactor since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReactorStats {
    /// Nanoseconds in turns with work.
    pub busy_ns: u64,
    /// Nanoseconds in turns without work.
    pub idle_ns: u64,
    /// Nanoseconds asleep in the kernel.
    pub sleep_ns: u64,
    /// Number of turns.
    pub turns: u64,
    /// Number of sleeps.
    pub sleeps: u64,
    /// Number of turns longer than the stall limit.
    pub stalls: u64,
    /// Nanoseconds of the longest turn.
    pub turn_max_ns: u64,
    /// Statistics of each poller.
    pub pollers: Vec<PollerStats>,
}

/// Statistics of one poller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PollerStats {
    /// See [`Poller::name`](crate::Poller::name).
    pub name: String,
    /// Nanoseconds in calls with work.
    pub busy_ns: u64,
    /// Number of calls.
    pub runs: u64,
    /// Number of calls with work.
    pub busy_runs: u64,
}

/// Counters that the core writes and other threads read.
#[derive(Debug, Default)]
pub(crate) struct ReactorCounters {
    pub(crate) busy_ns: AtomicU64,
    pub(crate) idle_ns: AtomicU64,
    pub(crate) sleep_ns: AtomicU64,
    pub(crate) turns: AtomicU64,
    pub(crate) sleeps: AtomicU64,
    pub(crate) stalls: AtomicU64,
    pub(crate) turn_max_ns: AtomicU64,
}

impl ReactorCounters {
    pub(crate) fn snapshot(&self) -> ReactorStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ReactorStats {
            busy_ns: load(&self.busy_ns),
            idle_ns: load(&self.idle_ns),
            sleep_ns: load(&self.sleep_ns),
            turns: load(&self.turns),
            sleeps: load(&self.sleeps),
            stalls: load(&self.stalls),
            turn_max_ns: load(&self.turn_max_ns),
            pollers: Vec::new(),
        }
    }
}

/// Adds to a counter that only this thread writes: a load and a store instead of a locked instruction.
#[inline]
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Ordering::Relaxed) + amount, Ordering::Relaxed);
}
