//! Notification of other cores about changed reservations, and commands that wait for a change to complete.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use reservations::{ChangeWaker, PendingChange, PendingGuard, ReservationError};
use wire_nvme::fabrics::Nqn;

use super::{HostId, outcome_status};
use crate::ControllerAssociation;

/// Notifies one core about reservation changes of other cores: new notifications of controllers, completed
/// [`PendingChange`]s and [`DrainRequest`]s.
///
/// Any thread notifies; the core calls [`take`](Self::take) once per poll, which costs one atomic load if
/// nothing happened. `wake` interrupts a core that sleeps.
pub struct ReservationNotifier {
    notified: AtomicBool,
    drains: Mutex<Vec<DrainRequest>>,
    wake: Box<dyn Fn() + Send + Sync>,
}

/// A request to drain the I/O of some hosts (Preempt and Abort). A core holds a clone of the guard until the
/// I/O that it has in flight at block devices completed; commands that are not submitted yet are checked
/// against the reservation again.
#[derive(Clone, Debug)]
pub struct DrainRequest {
    /// NQN of the subsystem.
    pub subnqn: Nqn,
    /// The identifiers of the preempted hosts.
    pub hosts: Arc<[HostId]>,
    /// Drop every clone when the I/O is drained.
    pub guard: PendingGuard,
}

impl DrainRequest {
    /// The guards of the requests that apply to the host of an association.
    pub fn guards_for(drains: &[DrainRequest], association: &ControllerAssociation) -> Vec<PendingGuard> {
        let host = association.host_id();
        let concerns =
            |drain: &&DrainRequest| drain.subnqn == *association.subnqn() && drain.hosts.contains(&host);
        drains.iter().filter(concerns).map(|drain| drain.guard.clone()).collect()
    }
}

/// How long the I/O of a preempted host may delay the Preempt and Abort command. Far below the time that hosts wait for
/// a command (30 s in Linux).
pub const PREEMPT_TIMEOUT_NS: u64 = 3_000_000_000;

/// The guards that a connection with outstanding device requests holds for preempted hosts, for a bounded time.
///
/// While there are any, the connection starts no command. [`release`](Self::release) them when no device request is
/// outstanding. When they [`expire`](Self::expire), the Preempt and Abort commands fail and the connection has to be
/// closed: a request that a device does not complete must delay its own host only, and success would promise that it
/// cannot reach the medium any more.
#[derive(Debug, Default)]
pub struct DrainGuards {
    guards: Vec<PendingGuard>,
    deadline_ns: u64,
}

impl DrainGuards {
    /// Adds the guards of the requests that apply to the host of an association; whether there are any.
    pub fn add(&mut self, drains: &[DrainRequest], association: &ControllerAssociation, now_ns: u64) -> bool {
        let added = DrainRequest::guards_for(drains, association);
        if self.guards.is_empty() {
            self.deadline_ns = now_ns.saturating_add(PREEMPT_TIMEOUT_NS);
        }
        let concerns = !added.is_empty();
        self.guards.extend(added);
        concerns
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.guards.is_empty()
    }

    /// When the guards expire; `None` without guards.
    #[inline]
    pub fn deadline_ns(&self) -> Option<u64> {
        (!self.guards.is_empty()).then_some(self.deadline_ns)
    }

    /// No device request is outstanding.
    pub fn release(&mut self) {
        self.guards.clear();
    }

    /// Fails the commands that wait, if the time is over. The connection has to be closed then.
    pub fn expire(&mut self, now_ns: u64) -> bool {
        let expired = self.deadline_ns().is_some_and(|deadline_ns| deadline_ns <= now_ns);
        if expired {
            self.guards.drain(..).for_each(|guard| guard.fail(ReservationError::NotDrained));
        }
        expired
    }
}

/// The notifiers of all cores.
#[derive(Debug, Default)]
pub(crate) struct ReservationNotifiers(Mutex<Vec<Weak<ReservationNotifier>>>);

impl fmt::Debug for ReservationNotifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReservationNotifier").field("notified", &self.notified).finish_non_exhaustive()
    }
}

impl ReservationNotifier {
    /// The drain requests since the last call, maybe none; `None` if nothing was notified since, which costs
    /// one load.
    #[inline]
    pub fn take(&self) -> Option<Vec<DrainRequest>> {
        if !self.notified.load(Ordering::Acquire) {
            return None;
        }
        // Acquire: what notifying threads did before is visible after this.
        self.notified.swap(false, Ordering::AcqRel);
        Some(std::mem::take(&mut *sync::lock(&self.drains)))
    }

    fn notify(&self, drain: Option<DrainRequest>) {
        if let Some(drain) = drain {
            sync::lock(&self.drains).push(drain);
        }
        self.notified.store(true, Ordering::Release);
        (self.wake)();
    }
}

impl ReservationNotifiers {
    /// Adds a notifier for one core, which `wake` wakes. Dropping the notifier removes it.
    pub(crate) fn add(&self, wake: Box<dyn Fn() + Send + Sync>) -> Arc<ReservationNotifier> {
        let notifier = Arc::new(ReservationNotifier {
            notified: AtomicBool::new(false),
            drains: Mutex::default(),
            wake,
        });
        let mut all = sync::lock(&self.0);
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(&notifier));
        notifier
    }

    /// Notifies every core, with a drain request or without.
    pub(crate) fn notify_all(&self, drain: Option<&DrainRequest>) {
        let all: Vec<Weak<ReservationNotifier>> = sync::lock(&self.0).clone();
        for notifier in all.iter().filter_map(Weak::upgrade) {
            notifier.notify(drain.cloned());
        }
    }
}

impl ChangeWaker for ReservationNotifiers {
    fn wake(&self) {
        self.notify_all(None);
    }
}

/// Commands whose [`PendingChange`]s are not complete yet. `T` identifies a command for the transport.
#[derive(Debug)]
pub struct PendingCommands<T>(Vec<(T, Arc<PendingChange>)>);

impl<T> Default for PendingCommands<T> {
    fn default() -> Self {
        PendingCommands(Vec::new())
    }
}

impl<T> PendingCommands<T> {
    /// Adds a command. Its change may have completed before, so the caller must call
    /// [`pop_completed`](Self::pop_completed) afterwards.
    pub fn push(&mut self, command: T, pending: Arc<PendingChange>) {
        self.0.push((command, pending));
    }

    /// Removes a command whose change is complete, with the status to complete it with.
    pub fn pop_completed(&mut self) -> Option<(T, block_io::Status)> {
        let (at, status) =
            self.0.iter().enumerate().find_map(|(at, (_, pending))| Some((at, outcome_status(pending)?)))?;
        Some((self.0.remove(at).0, status))
    }

    /// Removes all commands, without completing them.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.0.drain(..).map(|(command, _)| command)
    }
}
