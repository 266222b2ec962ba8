//! A transport's group with the core that it runs on.

use reactor::{Core, Poller, Shutdown, Work};

/// What one core does for a transport.
pub(crate) trait Turns {
    /// Its name in statistics and stall reports.
    const NAME: &'static str;

    /// Does what there is to do; how many things.
    fn turn(&mut self, core: &Core, now_ns: u64) -> usize;

    /// When it must run again although no event announces it.
    fn deadline(&self) -> Option<u64>;

    /// Takes no more from hosts, and lets each go when it has been answered what it has under way. Asked again
    /// until nothing is left.
    fn shutdown(&mut self, now_ns: u64) -> Shutdown;
}

/// A group on its core.
pub(crate) struct GroupPoller<G> {
    pub(crate) core: Core,
    pub(crate) group: G,
}

impl<G: Turns> Poller for GroupPoller<G> {
    fn name(&self) -> &str {
        G::NAME
    }

    fn poll(&mut self, now_ns: u64) -> Work {
        Work::count(self.group.turn(&self.core, now_ns))
    }

    fn deadline(&self) -> Option<u64> {
        self.group.deadline()
    }

    fn shutdown(&mut self, now_ns: u64) -> Shutdown {
        self.group.shutdown(now_ns)
    }
}
