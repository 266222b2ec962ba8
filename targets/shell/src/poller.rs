//! One core's share of a target, and the poller that runs it.

use reactor::{Core, PollResult, Poller, Shutdown};

/// One core's share of a target: its connections and devices, run by a [`GroupPoller`].
pub trait PollGroup {
    /// Name in statistics and stall reports.
    const NAME: &'static str;

    /// Processes messages, received data, completions and timers. Returns the number of events processed; 0
    /// means idle.
    fn poll(&mut self, core: &Core, now_ns: u64) -> usize;

    /// Time of the next poll that no event triggers.
    fn deadline(&self) -> Option<u64>;

    /// Stops accepting commands and closes each connection when its commands in flight have completed. Called
    /// until it returns `Done`.
    fn shutdown(&mut self, now_ns: u64) -> Shutdown;
}

/// Adapts a [`PollGroup`] to the reactor's `Poller`.
pub struct GroupPoller<G> {
    /// The core that it runs on.
    pub core: Core,
    /// What it runs.
    pub group: G,
}

impl<G: PollGroup> Poller for GroupPoller<G> {
    fn name(&self) -> &str {
        G::NAME
    }

    fn poll(&mut self, now_ns: u64) -> PollResult {
        PollResult::from_count(self.group.poll(&self.core, now_ns))
    }

    fn deadline(&self) -> Option<u64> {
        self.group.deadline()
    }

    fn shutdown(&mut self, now_ns: u64) -> Shutdown {
        self.group.shutdown(now_ns)
    }
}
