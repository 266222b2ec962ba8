//! The target's share of a core: what reaches its connections from elsewhere.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use reservations::{ChangeWaker, PendingGuard};
use scsi::{AbortedTasks, UnitSubscriber};
use target_shell::{Accepted, Connections, GroupWaker, Protocol};

use crate::config::IscsiConfig;
use crate::connection::IscsiConnection;
use crate::failure::IscsiViolation;
use crate::sessions::Sessions;

/// The protocol's state of a core.
pub(crate) struct IscsiCore {
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) events: Arc<CoreEvents>,
    /// Identifiers of the logical units that [`events`](Self::events) subscribes to.
    subscribed: BTreeSet<u64>,
}

/// Events of other cores for the connections of one: it wakes the core, and tells which tasks are to be aborted.
pub(crate) struct CoreEvents {
    is_signalled: AtomicBool,
    /// Number of aborts so far: a task that started after an abort is not concerned.
    sequence: AtomicU64,
    aborts: Mutex<Vec<TaskAbort>>,
    waker: Option<GroupWaker>,
}

/// Tasks to abort.
#[derive(Clone, Debug)]
pub(crate) struct TaskAbort {
    tasks: AbortedTasks,
    /// Tasks with this number or a higher one are not concerned.
    sequence: u64,
    guard: PendingGuard,
}

impl TaskAbort {
    /// Whether a task of a nexus that started at `sequence` is concerned.
    pub(crate) fn concerns(&self, nexus: &scsi::UnitNexus, sequence: u64) -> bool {
        sequence <= self.sequence && self.tasks.contains(nexus)
    }

    /// Keeps the abort pending.
    pub(crate) fn guard(&self) -> PendingGuard {
        self.guard.clone()
    }
}

impl CoreEvents {
    pub(crate) fn new(waker: Option<GroupWaker>) -> Arc<CoreEvents> {
        Arc::new(CoreEvents {
            is_signalled: AtomicBool::new(false),
            sequence: AtomicU64::new(0),
            aborts: Mutex::default(),
            waker,
        })
    }

    /// Events that wake nothing, for tests.
    #[cfg(test)]
    pub(crate) fn idle() -> Arc<CoreEvents> {
        CoreEvents::new(None)
    }

    /// Has the connections of the core look for what has changed.
    pub(crate) fn notify(&self) {
        if !self.is_signalled.swap(true, Ordering::AcqRel)
            && let Some(waker) = &self.waker
        {
            waker.wake();
        }
    }

    /// The number of a task that starts now.
    #[inline]
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence.load(Ordering::Acquire)
    }

    /// The aborts since the last call; `None` without an event.
    #[inline]
    fn take(&self) -> Option<Vec<TaskAbort>> {
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

impl IscsiCore {
    pub(crate) fn new(sessions: Arc<Sessions>, waker: Option<GroupWaker>) -> IscsiCore {
        IscsiCore { sessions, events: CoreEvents::new(waker), subscribed: BTreeSet::new() }
    }
}

impl Protocol for IscsiCore {
    const NAME: &'static str = "iscsi";
    type Config = IscsiConfig;
    type Connection = IscsiConnection;
    type Error = IscsiViolation;

    fn accept(
        &mut self,
        accepted: Accepted,
        config: &Arc<IscsiConfig>,
        now_ns: u64,
    ) -> Option<IscsiConnection> {
        IscsiConnection::new(accepted, config, now_ns)
    }

    fn apply(
        &mut self,
        config: &Arc<IscsiConfig>,
        connections: &mut Connections<IscsiConnection>,
        _now_ns: u64,
    ) {
        let units = || config.nodes.iter().flat_map(|node| &node.units);
        for unit in units().filter(|unit| !self.subscribed.contains(&unit.id)) {
            unit.unit.subscribe(&self.events);
        }
        self.subscribed = units().map(|unit| unit.id).collect();
        connections.update(|_, entry| entry.connection.apply(config));
    }

    #[inline]
    fn begin_poll(&mut self, connections: &mut Connections<IscsiConnection>, _now_ns: u64) -> usize {
        let Some(aborts) = self.events.take() else { return 0 };
        connections.update(|_, entry| {
            let is_closed = entry.is_closed();
            entry.connection.on_event(&aborts, is_closed);
            !is_closed
        });
        1
    }
}
