//! The order in which the clients of an endpoint are served: one at a time.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use target_shell::GroupWaker;

/// The queues of clients, one for each endpoint, shared by all cores. Cheap to clone.
///
/// The first client of a queue is served, the others wait. A core looks at its clients when [`changes`](Self::changes)
/// has changed, which costs one load in each poll; it is woken.
#[derive(Clone, Default)]
pub(crate) struct Seats(Arc<SeatsInner>);

#[derive(Default)]
struct SeatsInner {
    changes: AtomicU32,
    queues: Mutex<HashMap<u16, VecDeque<WaitingClient>>>,
}

struct WaitingClient {
    number: u32,
    waker: GroupWaker,
}

/// A client's place in the queue of its endpoint, until it is dropped.
pub(super) struct SeatTicket {
    seats: Seats,
    portid: u16,
    number: u32,
}

impl fmt::Debug for Seats {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Seats").finish_non_exhaustive()
    }
}

impl Seats {
    /// Adds a client to the queue of an endpoint. `waker` wakes its core.
    pub(super) fn enter(&self, portid: u16, waker: GroupWaker) -> SeatTicket {
        let mut queues = sync::lock(&self.0.queues);
        let number = self.0.changes.fetch_add(1, Ordering::Release);
        let queue = queues.entry(portid).or_default();
        if let Some(first) = queue.front() {
            // It may have to leave to this one.
            first.waker.wake();
        }
        queue.push_back(WaitingClient { number, waker });
        drop(queues);
        SeatTicket { seats: self.clone(), portid, number }
    }

    /// Changes whenever a client has come or gone.
    #[inline]
    pub(super) fn changes(&self) -> u32 {
        self.0.changes.load(Ordering::Acquire)
    }
}

impl SeatTicket {
    /// The client is served.
    pub(super) fn is_first(&self) -> bool {
        let queues = sync::lock(&self.seats.0.queues);
        let first = queues.get(&self.portid).and_then(VecDeque::front);
        first.is_some_and(|first| first.number == self.number)
    }

    /// Another client waits.
    pub(super) fn is_contended(&self) -> bool {
        sync::lock(&self.seats.0.queues).get(&self.portid).is_some_and(|queue| queue.len() > 1)
    }
}

impl Drop for SeatTicket {
    fn drop(&mut self) {
        let mut queues = sync::lock(&self.seats.0.queues);
        self.seats.0.changes.fetch_add(1, Ordering::Release);
        let Some(queue) = queues.get_mut(&self.portid) else { return };
        queue.retain(|client| client.number != self.number);
        match queue.front() {
            Some(first) => first.waker.wake(),
            None => _ = queues.remove(&self.portid),
        }
    }
}
