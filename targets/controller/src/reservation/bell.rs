//! How cores are told that a reservation changed, and how a command waits for others.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use wire_nvme::fabrics::Nqn;

use super::HostId;
use crate::Association;

/// How one core is told to look at what others have done. Rung by any thread, looked at by its core every turn.
pub struct Bell {
    rung: AtomicBool,
    drains: Mutex<Vec<Drain>>,
    wake: Box<dyn Fn() + Send + Sync>,
}

/// The commands of some hosts are to end. What a core has of them at devices is waited for before the ticket is
/// dropped; what has not begun is looked at anew before it does.
#[derive(Clone, Debug)]
pub struct Drain {
    /// The subsystem.
    pub subnqn: Nqn,
    /// The hosts.
    pub hosts: Arc<[HostId]>,
    /// Dropped when all has ended.
    pub ticket: Ticket,
}

impl Drain {
    /// The tickets of those that concern the commands of an association.
    pub fn tickets(drains: &[Drain], association: &Association) -> Vec<Ticket> {
        let host = association.host_id();
        let concerns = |drain: &&Drain| drain.subnqn == *association.subnqn() && drain.hosts.contains(&host);
        drains.iter().filter(concerns).map(|drain| drain.ticket.clone()).collect()
    }
}

/// The bells of every core.
#[derive(Debug, Default)]
pub(crate) struct Bells(Mutex<Vec<Weak<Bell>>>);

impl fmt::Debug for Bell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bell").field("rung", &self.rung).finish_non_exhaustive()
    }
}

impl Bell {
    /// Whether it was rung since the last time, and what is to be drained. One load when it was not.
    #[inline]
    pub fn take(&self) -> Option<Vec<Drain>> {
        if !self.rung.load(Ordering::Acquire) {
            return None;
        }
        // Whatever is done before the next ring is seen after this.
        self.rung.swap(false, Ordering::AcqRel);
        Some(std::mem::take(&mut *self.drains.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    fn ring(&self, drain: Option<Drain>) {
        if let Some(drain) = drain {
            self.drains.lock().unwrap_or_else(PoisonError::into_inner).push(drain);
        }
        self.rung.store(true, Ordering::Release);
        (self.wake)();
    }
}

impl Bells {
    /// A bell for one core, which `wake` wakes; heard of as long as it exists.
    pub(crate) fn add(&self, wake: Box<dyn Fn() + Send + Sync>) -> Arc<Bell> {
        let bell = Arc::new(Bell { rung: AtomicBool::new(false), drains: Mutex::default(), wake });
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(&bell));
        bell
    }

    /// Rings every bell, with something to drain or without.
    pub(crate) fn ring(&self, drain: Option<&Drain>) {
        let all: Vec<Weak<Bell>> = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for bell in all.iter().filter_map(Weak::upgrade) {
            bell.ring(drain.cloned());
        }
    }
}

/// A command that waits until every [`Ticket`] is gone.
#[derive(Debug)]
pub struct Pending {
    left: AtomicUsize,
    failed: AtomicBool,
    bells: Arc<Bells>,
}

/// One thing that a command waits for. Dropping it ends that; when the last is gone, every bell rings.
#[derive(Debug)]
pub struct Ticket(Arc<Pending>);

impl Pending {
    pub(crate) fn new(bells: Arc<Bells>) -> (Arc<Pending>, Ticket) {
        let pending = Arc::new(Pending { left: AtomicUsize::new(1), failed: AtomicBool::new(false), bells });
        (pending.clone(), Ticket(pending))
    }

    /// What to answer, once there is nothing more to wait for.
    pub fn outcome(&self) -> Option<ring::Status> {
        if self.left.load(Ordering::Acquire) > 0 {
            return None;
        }
        let failed = self.failed.load(Ordering::Acquire);
        Some(if failed { ring::Status::INTERNAL_ERROR } else { ring::Status::SUCCESS })
    }
}

/// Commands that are done but for what they wait for, each with what its transport knows it by.
#[derive(Debug)]
pub struct Parked<T>(Vec<(T, Arc<Pending>)>);

impl<T> Default for Parked<T> {
    fn default() -> Self {
        Parked(Vec::new())
    }
}

impl<T> Parked<T> {
    /// Adds a command. What it waits for may have come to pass meanwhile, and the bell with it, so the caller
    /// looks at once.
    pub fn push(&mut self, command: T, pending: Arc<Pending>) {
        self.0.push((command, pending));
    }

    /// Takes out a command that has nothing left to wait for, with what to answer.
    pub fn pop_done(&mut self) -> Option<(T, ring::Status)> {
        let (at, status) =
            self.0.iter().enumerate().find_map(|(at, (_, pending))| Some((at, pending.outcome()?)))?;
        Some((self.0.remove(at).0, status))
    }

    /// Takes out all, which are not answered.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.0.drain(..).map(|(command, _)| command)
    }
}

impl Ticket {
    /// What was waited for has failed, and so will the command.
    pub fn fail(self) {
        self.0.failed.store(true, Ordering::Release);
    }
}

impl Clone for Ticket {
    fn clone(&self) -> Ticket {
        self.0.left.fetch_add(1, Ordering::Relaxed);
        Ticket(self.0.clone())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.0.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.bells.ring(None);
        }
    }
}
