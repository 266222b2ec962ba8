//! Commands that complete later: when their change is saved, and the I/O that it aborts has ended.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::ReservationError;

/// Told when a [`PendingChange`] completes, on the thread that completes it.
pub trait ChangeWaker: Send + Sync + fmt::Debug {
    /// The outcome of a change is known; see [`PendingChange::outcome`].
    fn wake(&self);
}

/// The completion of a reservation command: it completes when every [`PendingGuard`] is dropped.
#[derive(Debug)]
pub struct PendingChange {
    guards: AtomicUsize,
    error: OnceLock<ReservationError>,
    waker: Arc<dyn ChangeWaker>,
}

/// Keeps a [`PendingChange`] pending: one guard for the command, and one for each drain. Dropping the last one wakes.
#[derive(Debug)]
pub struct PendingGuard(Arc<PendingChange>);

impl PendingChange {
    /// A pending change, with its first guard.
    pub fn new(waker: Arc<dyn ChangeWaker>) -> (Arc<PendingChange>, PendingGuard) {
        let pending = Arc::new(PendingChange { guards: AtomicUsize::new(1), error: OnceLock::new(), waker });
        (pending.clone(), PendingGuard(pending))
    }

    /// How the command completes; `None` while the change is pending.
    pub fn outcome(&self) -> Option<Result<(), ReservationError>> {
        if self.guards.load(Ordering::Acquire) > 0 {
            return None;
        }
        Some(self.error.get().map_or(Ok(()), |error| Err(*error)))
    }
}

impl PendingGuard {
    /// Whether it is one of the same change.
    pub fn is_of(&self, other: &PendingGuard) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Drops the guard with an error: the command fails, with the first error that was given.
    pub fn fail(self, error: ReservationError) {
        let _ = self.0.error.set(error);
    }
}

impl Clone for PendingGuard {
    fn clone(&self) -> PendingGuard {
        self.0.guards.fetch_add(1, Ordering::Relaxed);
        PendingGuard(self.0.clone())
    }
}

impl Drop for PendingGuard {
    fn drop(&mut self) {
        if self.0.guards.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.waker.wake();
        }
    }
}
