//! Reservation changes, as the connections of a core see them.

use std::sync::Arc;

use nvme_controller::ControllerAssociation;
use nvme_controller::reservation::{DrainGuards, DrainRequest, ReservationNotifier};
use slots::Slot;
use target_shell::{Connections, NEVER_NS};

/// A connection whose controller or I/O is subject to reservations.
pub(crate) trait ReservedConnection {
    /// The association whose I/O it carries; `None` if it carries none.
    fn io_association(&self) -> Option<Arc<ControllerAssociation>>;

    /// What it holds while its device requests are outstanding and its host is preempted. It starts no command then.
    fn drain_guards(&mut self) -> &mut DrainGuards;

    /// Delivers notifications, and completes pending reservation commands.
    fn on_reservation_change(&mut self, now_ns: u64);

    /// Closes the connection.
    fn begin_drain(&mut self);
}

/// Passes the reservation changes of other cores to the connections of one.
///
/// Each poll calls [`poll`](Self::poll), which costs two loads if nothing happened, and
/// [`release`](Self::release) after device requests have completed.
pub(crate) struct ReservationWatch {
    notifier: Option<Arc<ReservationNotifier>>,
    /// Connections whose outstanding device requests a reservation command waits for.
    draining: Vec<Slot>,
    /// When the first of them stops to wait; `NEVER_NS` for never.
    deadline_ns: u64,
}

impl ReservationWatch {
    /// `None` is for a target without other cores.
    pub(crate) fn new(notifier: Option<Arc<ReservationNotifier>>) -> ReservationWatch {
        ReservationWatch { notifier, draining: Vec::new(), deadline_ns: NEVER_NS }
    }

    /// When [`poll`](Self::poll) is due; `NEVER_NS` for never.
    pub(crate) fn deadline_ns(&self) -> u64 {
        self.deadline_ns
    }

    /// Handles changes and expired drains. Returns the number of events.
    #[inline]
    pub(crate) fn poll<C: ReservedConnection>(
        &mut self,
        connections: &mut Connections<C>,
        now_ns: u64,
    ) -> usize {
        if self.deadline_ns <= now_ns {
            self.expire_drains(connections, now_ns);
        }
        let Some(drains) = self.notifier.as_ref().and_then(|notifier| notifier.take()) else { return 0 };
        self.on_change(&drains, connections, now_ns);
        1
    }

    /// Handles a reservation change, and starts the drains that commands of other hosts wait for.
    #[cold]
    fn on_change<C: ReservedConnection>(
        &mut self,
        drains: &[DrainRequest],
        connections: &mut Connections<C>,
        now_ns: u64,
    ) {
        connections.update(|slot, entry| {
            let (outstanding, is_closed) = (entry.outstanding_requests(), entry.is_closed());
            let connection = &mut entry.connection;
            if outstanding > 0
                && let Some(association) = connection.io_association()
            {
                let guards = connection.drain_guards();
                if guards.add(drains, &association, now_ns) {
                    self.draining.push(slot);
                }
                self.deadline_ns = self.deadline_ns.min(guards.deadline_ns().unwrap_or(NEVER_NS));
            }
            if is_closed {
                return false;
            }
            connection.on_reservation_change(now_ns);
            true
        });
    }

    /// Closes connections of preempted hosts whose device requests did not end in time. The preempting hosts' commands
    /// complete with an error.
    #[cold]
    fn expire_drains<C: ReservedConnection>(&mut self, connections: &mut Connections<C>, now_ns: u64) {
        let mut next_ns = NEVER_NS;
        connections.update(|_, entry| {
            let guards = entry.connection.drain_guards();
            let expired = guards.expire(now_ns);
            next_ns = next_ns.min(guards.deadline_ns().unwrap_or(NEVER_NS));
            if !expired || entry.is_closed() {
                return false;
            }
            let peer = entry.peer();
            log::warn!(target: "nvmf", "{peer}: closed, as I/O of its preempted host did not end in time");
            entry.connection.begin_drain();
            true
        });
        self.deadline_ns = next_ns;
    }

    /// Releases the drain guards of connections without outstanding device requests.
    #[inline]
    pub(crate) fn release<C: ReservedConnection>(&mut self, connections: &mut Connections<C>) {
        if self.draining.is_empty() {
            return;
        }
        self.draining.retain(|slot| {
            // The guards of a removed connection were dropped with it.
            let Some(entry) = connections.get_mut(*slot) else { return false };
            let is_idle = entry.outstanding_requests() == 0;
            if is_idle {
                entry.connection.drain_guards().release();
            }
            !is_idle
        });
    }
}
