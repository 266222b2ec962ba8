//! A value that another core or thread gives once, to be awaited.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

struct OnceSlot<T> {
    value: Option<T>,
    /// The sender is gone.
    is_closed: bool,
    waker: Option<Waker>,
}

/// Gives the value; without one, the receiver gets `None` when this is dropped.
pub(crate) struct OnceSender<T>(Arc<Mutex<OnceSlot<T>>>);

/// Completes with the value.
pub(crate) struct OnceReceiver<T>(Arc<Mutex<OnceSlot<T>>>);

pub(crate) fn once<T>() -> (OnceSender<T>, OnceReceiver<T>) {
    let shared = Arc::new(Mutex::new(OnceSlot { value: None, is_closed: false, waker: None }));
    (OnceSender(shared.clone()), OnceReceiver(shared))
}

impl<T> OnceSender<T> {
    pub(crate) fn send(self, value: T) {
        sync::lock(&self.0).value = Some(value);
    }
}

impl<T> Drop for OnceSender<T> {
    fn drop(&mut self) {
        let mut shared = sync::lock(&self.0);
        shared.is_closed = true;
        let waker = shared.waker.take();
        drop(shared);
        waker.into_iter().for_each(Waker::wake);
    }
}

impl<T> Future for OnceReceiver<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut shared = sync::lock(&self.0);
        match shared.value.take() {
            Some(value) => Poll::Ready(Some(value)),
            None if shared.is_closed => Poll::Ready(None),
            None => {
                shared.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}
