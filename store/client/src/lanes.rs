//! Copies of several objects at a time.

use std::pin::Pin;
use std::task::Poll;

/// Objects that are copied at a time: enough for the latencies of several nodes, and 2 MiB of memory.
pub(crate) const LANES: usize = 16;

/// Copies one object at a time.
pub(crate) type Lane<'a, E> = Pin<Box<dyn Future<Output = Result<(), E>> + 'a>>;

/// Runs lanes to their ends, or to the first error.
pub(crate) async fn run_lanes<E>(mut lanes: Vec<Lane<'_, E>>, mut progress: impl FnMut()) -> Result<(), E> {
    let all = std::future::poll_fn(move |context| {
        let mut index = 0;
        while let Some(lane) = lanes.get_mut(index) {
            match lane.as_mut().poll(context) {
                Poll::Ready(Ok(())) => drop(lanes.swap_remove(index)),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => index += 1,
            }
        }
        progress();
        if lanes.is_empty() { Poll::Ready(Ok(())) } else { Poll::Pending }
    });
    all.await
}
