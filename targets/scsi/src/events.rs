//! Events of other cores for the tasks of one.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use reservations::{ChangeWaker, PendingGuard};

use crate::nexus::UnitNexus;
use crate::unit::{AbortedTasks, UnitSubscriber};

/// Events of other cores for the tasks of one: it wakes the core, and collects which tasks are to be aborted.
///
/// A core that executes tasks has one. It is the [`UnitSubscriber`] of the core's units and the
/// [`ChangeWaker`] of its tasks.
pub struct CoreEvents {
    is_signalled: AtomicBool,
    /// Number of aborts so far: a task that started after an abort is not concerned.
    sequence: AtomicU64,
    aborts: Mutex<Vec<TaskAbort>>,
    waker: Option<Box<dyn Fn() + Send + Sync>>,
}

/// Tasks to abort.
#[derive(Clone, Debug)]
pub struct TaskAbort {
    tasks: AbortedTasks,
    /// Tasks with this number or a lower one are concerned.
    sequence: u64,
    guard: PendingGuard,
}

impl TaskAbort {
    /// Whether a task of a nexus that started at `sequence` is concerned.
    pub fn concerns(&self, nexus: &UnitNexus, sequence: u64) -> bool {
        sequence <= self.sequence && self.tasks.contains(nexus)
    }

    /// Keeps the abort pending.
    pub fn guard(&self) -> PendingGuard {
        self.guard.clone()
    }
}

impl CoreEvents {
    /// Events of a core that `waker` wakes. Without it they wake nothing, for tests.
    pub fn new(waker: Option<Box<dyn Fn() + Send + Sync>>) -> Arc<CoreEvents> {
        Arc::new(CoreEvents {
            is_signalled: AtomicBool::new(false),
            sequence: AtomicU64::new(0),
            aborts: Mutex::default(),
            waker,
        })
    }

    /// Has the connections of the core look for what has changed.
    pub fn notify(&self) {
        if !self.is_signalled.swap(true, Ordering::AcqRel)
            && let Some(waker) = &self.waker
        {
            waker();
        }
    }

    /// The number of a task that starts now.
    #[inline]
    pub fn sequence(&self) -> u64 {
        self.sequence.load(Ordering::Acquire)
    }

    /// The aborts since the last call; `None` without an event.
    #[inline]
    pub fn take(&self) -> Option<Vec<TaskAbort>> {
        if !self.is_signalled.load(Ordering::Relaxed) {
            return None;
        }
        self.is_signalled.store(false, Ordering::SeqCst);
        Some(std::mem::take(&mut sync::lock(&self.aborts)))
    }
}

impl std::fmt::Debug for CoreEvents {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("CoreEvents")
    }
}

impl UnitSubscriber for CoreEvents {
    fn abort(&self, aborted: &AbortedTasks, guard: &PendingGuard) {
        let sequence = self.sequence.fetch_add(1, Ordering::AcqRel);
        let abort = TaskAbort { tasks: aborted.clone(), sequence, guard: guard.clone() };
        sync::lock(&self.aborts).push(abort);
        self.notify();
    }
}

impl ChangeWaker for CoreEvents {
    fn wake(&self) {
        self.notify();
    }
}
