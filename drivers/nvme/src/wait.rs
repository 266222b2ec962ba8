//! Async helpers for tasks of a reactor core.

use std::pin::Pin;
use std::task::Poll;

/// Completes as soon as either future completes.
pub(crate) async fn race<A, B>(
    mut one: Pin<&mut impl Future<Output = A>>,
    mut other: Pin<&mut impl Future<Output = B>>,
) {
    std::future::poll_fn(|context| {
        let done = one.as_mut().poll(context).is_ready() || other.as_mut().poll(context).is_ready();
        if done { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Yields to the reactor for one turn. (A zero-length timer would complete at once.)
pub(crate) async fn next_turn() {
    let mut waited = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut waited, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
