//! How the cores of a target reach each other's connections.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use target_shell::GroupWaker;

use crate::worker::WorkerStart;

/// What wakes each core, by the index of its reactor, and what it finds then. Without cores, nothing is shared.
#[derive(Default)]
pub(crate) struct CoreLinks(Box<[CoreLink]>);

#[derive(Default)]
struct CoreLink {
    waker: OnceLock<GroupWaker>,
    is_signalled: AtomicBool,
    /// Workers to start. What connections have for each other is in their [`WorkerExchange`](crate::worker::WorkerExchange)s.
    starts: Mutex<Vec<WorkerStart>>,
}

impl CoreLinks {
    /// Links of so many cores, which [join](Self::join) them.
    pub(crate) fn new(cores: usize) -> Arc<CoreLinks> {
        Arc::new(CoreLinks((0..cores).map(|_| CoreLink::default()).collect()))
    }

    /// A core can be woken from now on.
    pub(crate) fn join(&self, core: usize, waker: &GroupWaker) {
        if let Some(link) = self.0.get(core) {
            let first = link.waker.set(waker.clone());
            assert!(first.is_ok(), "core {core} has joined");
        }
    }

    pub(crate) fn has(&self, core: usize) -> bool {
        core < self.0.len()
    }

    /// Has the connections of a core look at their exchanges.
    pub(crate) fn signal(&self, core: usize) {
        let Some(link) = self.0.get(core) else { return };
        if !link.is_signalled.swap(true, Ordering::AcqRel)
            && let Some(waker) = link.waker.get()
        {
            waker.wake();
        }
    }

    /// Starts a worker on a core.
    pub(crate) fn start(&self, core: usize, start: WorkerStart) {
        if let Some(link) = self.0.get(core) {
            sync::lock(&link.starts).push(start);
            self.signal(core);
        }
    }

    /// The workers that a core has to start; `None` if it was not signalled.
    #[inline]
    pub(crate) fn take(&self, core: usize) -> Option<Vec<WorkerStart>> {
        let link = self.0.get(core)?;
        if !link.is_signalled.load(Ordering::Relaxed) {
            return None;
        }
        link.is_signalled.swap(false, Ordering::AcqRel);
        Some(std::mem::take(&mut sync::lock(&link.starts)))
    }
}
