//! Task management: which tasks a function concerns, on all cores.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use reservations::{ChangeWaker, PendingChange, PendingGuard};

use crate::nexus::UnitNexus;
use crate::unit::LogicalUnit;

/// A task management function that ends tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitFunction {
    /// Aborts the tasks of the nexus with this tag of the transport, one at most, on any core.
    AbortTask(u64),
    /// Aborts the tasks of the nexus.
    AbortTaskSet,
    /// Aborts the tasks of all nexuses.
    ClearTaskSet,
    /// Aborts the tasks of all nexuses and resets the unit.
    LogicalUnitReset,
    /// Aborts the tasks of the nexus, which is lost and established again.
    NexusReset,
}

/// The tasks of a unit that a function concerns, and what becomes of them.
#[derive(Clone, Debug)]
pub struct ManagedTasks {
    unit: Weak<LogicalUnit>,
    /// Identifiers; `None` for all.
    nexuses: Option<Arc<[u64]>>,
    /// The tag of the only one; `None` for all.
    tag: Option<u64>,
    action: TaskAction,
}

#[derive(Clone, Debug)]
pub(crate) enum TaskAction {
    Abort,
    /// They are aborted because the unit or the nexus is reset.
    Reset,
    /// Nothing: there is one.
    Find(Arc<AtomicBool>),
}

/// A transport's core, or a connection, that executes tasks of a unit.
pub trait UnitSubscriber: Send + Sync + std::fmt::Debug {
    /// Manages tasks that have been started. A clone of the guard is held until that is done, and aborted tasks have ended,
    /// for a bounded time. Called on any thread, without a lock of the unit.
    fn manage(&self, tasks: &ManagedTasks, guard: &PendingGuard);
}

/// A function that asks whether there is a task: QUERY TASK or QUERY TASK SET.
#[derive(Debug)]
pub struct TaskQuery {
    change: Arc<PendingChange>,
    is_found: Arc<AtomicBool>,
}

impl ManagedTasks {
    pub(crate) fn new(
        unit: Weak<LogicalUnit>,
        nexuses: Option<Arc<[u64]>>,
        action: TaskAction,
    ) -> ManagedTasks {
        ManagedTasks { unit, nexuses, tag: None, action }
    }

    pub(crate) fn with_tag(self, tag: Option<u64>) -> ManagedTasks {
        ManagedTasks { tag, ..self }
    }

    /// Whether tasks of a nexus are among them.
    pub fn contains(&self, nexus: &UnitNexus) -> bool {
        std::ptr::eq(self.unit.as_ptr(), Arc::as_ptr(nexus.unit()))
            && self.nexuses.as_ref().is_none_or(|ids| ids.contains(&nexus.id()))
    }

    /// Whether they are aborted because of a reset.
    pub(crate) fn are_reset(&self) -> bool {
        matches!(self.action, TaskAction::Reset)
    }

    /// Whether a task of a nexus that it contains is one of them. `tag` is that of a command that was not answered.
    pub(crate) fn concern(&self, tag: Option<u64>) -> bool {
        match (&self.action, self.tag) {
            (_, Some(wanted)) => tag == Some(wanted),
            (TaskAction::Find(_), None) => tag.is_some(),
            (TaskAction::Abort | TaskAction::Reset, None) => true,
        }
    }

    /// One was found. Returns whether it is to be aborted.
    pub(crate) fn find(&self) -> bool {
        if let TaskAction::Find(is_found) = &self.action {
            // The guard is dropped later.
            is_found.store(true, Ordering::Relaxed);
            return false;
        }
        true
    }
}

impl TaskQuery {
    /// A query and what cores need to answer it.
    pub(crate) fn new(waker: Arc<dyn ChangeWaker>) -> (TaskQuery, TaskAction, PendingGuard) {
        let (change, guard) = PendingChange::new(waker);
        let is_found = Arc::new(AtomicBool::new(false));
        (TaskQuery { change, is_found: is_found.clone() }, TaskAction::Find(is_found), guard)
    }

    /// Whether there is such a task; `None` until all cores have looked.
    pub fn outcome(&self) -> Option<bool> {
        self.change.outcome().map(|_| self.is_found.load(Ordering::Relaxed))
    }
}
