//! What asynchronous code waits for besides its core's timers and events.

use std::pin::Pin;
use std::task::Poll;

/// Ends when either does.
pub(crate) async fn first<A, B>(
    mut one: Pin<&mut impl Future<Output = A>>,
    mut other: Pin<&mut impl Future<Output = B>>,
) {
    std::future::poll_fn(|context| {
        let done = one.as_mut().poll(context).is_ready() || other.as_mut().poll(context).is_ready();
        if done { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Lets the reactor run everything else once more. A timer of no time would end at once.
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
