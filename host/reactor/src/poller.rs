//! Pollers: the functions that a reactor calls on every turn.

/// The result of a poll. Any other result than [`PollResult::Idle`] keeps the core awake and counts the time as busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollResult {
    /// There was no work.
    Idle,
    /// The number of items (events, completions, messages) processed; at least 1.
    Busy(u32),
    /// The poller has finished and the reactor drops it.
    Finished,
}

impl PollResult {
    /// [`PollResult::Idle`] for 0, otherwise [`PollResult::Busy`]; saturates.
    pub fn from_count(count: usize) -> PollResult {
        if count == 0 { PollResult::Idle } else { PollResult::Busy(u32::try_from(count).unwrap_or(u32::MAX)) }
    }
}

/// The progress of a poller's shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// Operations are in flight; call again.
    Draining,
    /// Nothing is in flight; the poller can be dropped.
    Done,
}

/// How often a poller runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Period {
    /// Every turn of the reactor.
    EveryTurn,
    /// Once per this number of nanoseconds; later if a turn takes longer.
    EveryNs(u64),
}

/// A component's periodic work on one core, like an SPDK poller.
///
/// The reactor calls [`poll`](Self::poll) once per [`Period`], and sleeps at most until
/// [`deadline`](Self::deadline). When it stops, it calls [`poll`](Self::poll) and then
/// [`shutdown`](Self::shutdown) on every turn until that returns [`Shutdown::Done`]. A poller never blocks
/// and bounds the work of one call.
pub trait Poller {
    /// The name in statistics and stall reports.
    fn name(&self) -> &str;

    /// Processes the pending work. `now_ns` is the core's time at the start of the turn.
    fn poll(&mut self, now_ns: u64) -> PollResult;

    /// When the poller must run again even without an event: `Some(0)` prevents the core from sleeping,
    /// `None` waits for events, messages and wake-ups.
    fn deadline(&self) -> Option<u64> {
        None
    }

    /// Called on every turn while the reactor stops: accepts no new work and reports whether work is in flight.
    fn shutdown(&mut self, now_ns: u64) -> Shutdown {
        let _ = now_ns;
        Shutdown::Done
    }
}
