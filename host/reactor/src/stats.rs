//! Where a reactor's time went.

use std::sync::atomic::{AtomicU64, Ordering};

/// Time and turns of one reactor since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReactorStats {
    /// Nanoseconds of turns that found work.
    pub busy_ns: u64,
    /// Nanoseconds of turns that found none.
    pub idle_ns: u64,
    /// Nanoseconds asleep in the kernel.
    pub sleep_ns: u64,
    /// Turns.
    pub turns: u64,
    /// Times that it went to sleep.
    pub sleeps: u64,
    /// Turns that ran longer than the stall limit.
    pub stalls: u64,
    /// The longest turn.
    pub turn_max_ns: u64,
    /// Each poller's share.
    pub pollers: Vec<PollerStats>,
}

/// Time of one poller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PollerStats {
    /// Its name.
    pub name: String,
    /// Nanoseconds of calls that found work.
    pub busy_ns: u64,
    /// Calls.
    pub runs: u64,
    /// Calls that found work.
    pub busy_runs: u64,
}

/// The counters that other threads read while the core writes them.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) busy_ns: AtomicU64,
    pub(crate) idle_ns: AtomicU64,
    pub(crate) sleep_ns: AtomicU64,
    pub(crate) turns: AtomicU64,
    pub(crate) sleeps: AtomicU64,
    pub(crate) stalls: AtomicU64,
    pub(crate) turn_max_ns: AtomicU64,
}

impl Counters {
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

/// Adds to a counter that only this thread writes: a load and a store, no locked instruction.
#[inline]
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Ordering::Relaxed) + amount, Ordering::Relaxed);
}
