//! Lanes of one task that wait for each other.

use std::cell::{Cell, RefCell};
use std::task::{Poll, Waker};

/// Lanes that wait for conditions. A lane that may have made one true [notifies](Self::notify) them.
#[derive(Default)]
pub(super) struct LaneWait(RefCell<Vec<Waker>>);

impl LaneWait {
    /// Waits until the condition is true.
    pub(super) async fn until(&self, condition: impl Fn() -> bool) {
        std::future::poll_fn(|context| {
            if condition() {
                return Poll::Ready(());
            }
            let mut wakers = self.0.borrow_mut();
            if !wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                wakers.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    /// A condition may be true.
    pub(super) fn notify(&self) {
        self.0.take().into_iter().for_each(Waker::wake);
    }
}

/// Numbers of what is done by several lanes at a time, and ends in its order.
#[derive(Default)]
pub(super) struct LaneTurns {
    begun: Cell<u64>,
    ended: Cell<u64>,
}

impl LaneTurns {
    /// The number of the next one.
    pub(super) fn begin(&self) -> u64 {
        self.begun.replace(self.begun.get() + 1)
    }

    /// Whether all before one have ended.
    pub(super) fn is_next(&self, number: u64) -> bool {
        self.ended.get() == number
    }

    /// The one whose turn it is has ended.
    pub(super) fn end(&self) {
        self.ended.set(self.ended.get() + 1);
    }
}
