//! Events of other cores for the tasks of one.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use reservations::{ChangeWaker, PendingGuard};

use crate::functions::{ManagedTasks, UnitSubscriber};
use crate::nexus::UnitNexus;

/// Events of other cores for the tasks of one: it wakes the core, and collects the task management functions.
///
/// A core that executes tasks has one. It is the [`UnitSubscriber`] of the core's units and the
/// [`ChangeWaker`] of its tasks.
pub struct CoreEvents {
    is_signalled: AtomicBool,
    /// Number of functions so far: a task that started after one is not aborted by it.
    sequence: AtomicU64,
    functions: Mutex<Vec<TaskManagement>>,
    waker: Option<Box<dyn Fn() + Send + Sync>>,
}

/// A task management function, which a core executes for its tasks.
#[derive(Clone, Debug)]
pub struct TaskManagement {
    tasks: ManagedTasks,
    /// Tasks with this number or a lower one were started before.
    sequence: u64,
    guard: PendingGuard,
}

impl TaskManagement {
    /// Whether tasks of a nexus are concerned.
    pub fn contains(&self, nexus: &UnitNexus) -> bool {
        self.tasks.contains(nexus)
    }

    /// Whether a task is concerned that started at `sequence`; `tag` is that of a command that was not answered.
    pub(crate) fn concerns(&self, nexus: &UnitNexus, tag: Option<u64>, sequence: u64) -> bool {
        sequence <= self.sequence && self.tasks.contains(nexus) && self.tasks.concern(tag)
    }

    /// Concerns tasks with this number, too.
    pub(crate) fn extend_to(&mut self, sequence: u64) {
        self.sequence = sequence;
    }

    /// Which tasks.
    pub(crate) fn tasks(&self) -> &ManagedTasks {
        &self.tasks
    }

    /// Whether a task waits for it already.
    pub(crate) fn is_among(&self, guards: &[PendingGuard]) -> bool {
        guards.iter().any(|guard| guard.is_of(&self.guard))
    }

    /// Keeps the function pending.
    pub(crate) fn guard(&self) -> PendingGuard {
        self.guard.clone()
    }
}

impl CoreEvents {
    /// Events of a core that `waker` wakes. Without it they wake nothing, for tests.
    pub fn new(waker: Option<Box<dyn Fn() + Send + Sync>>) -> Arc<CoreEvents> {
        Arc::new(CoreEvents {
            is_signalled: AtomicBool::new(false),
            sequence: AtomicU64::new(0),
            functions: Mutex::default(),
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

    /// The functions since the last call; `None` without an event.
    #[inline]
    pub fn take(&self) -> Option<Vec<TaskManagement>> {
        if !self.is_signalled.load(Ordering::Relaxed) {
            return None;
        }
        self.is_signalled.store(false, Ordering::SeqCst);
        Some(std::mem::take(&mut sync::lock(&self.functions)))
    }
}

impl std::fmt::Debug for CoreEvents {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("CoreEvents")
    }
}

impl UnitSubscriber for CoreEvents {
    fn manage(&self, tasks: &ManagedTasks, guard: &PendingGuard) {
        let sequence = self.sequence.fetch_add(1, Ordering::AcqRel);
        let function = TaskManagement { tasks: tasks.clone(), sequence, guard: guard.clone() };
        sync::lock(&self.functions).push(function);
        self.notify();
    }
}

impl ChangeWaker for CoreEvents {
    fn wake(&self) {
        self.notify();
    }
}
