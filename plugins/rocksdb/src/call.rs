//! What a thread waits for: a reply of the reactor.
//!
//! A thread polls before it sleeps: a reply from memory, or of a fast device, comes sooner than a sleeping
//! thread wakes. Where there is one CPU only, nothing would run meanwhile, so it sleeps at once.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use blobfs::BlobFsError;

/// How long a thread polls.
const POLL: Duration = Duration::from_micros(25);
/// Rounds between looks at the clock.
const ROUNDS: u32 = 64;
/// How often a sleeping thread looks whether the reactor still runs.
const LOOK: Duration = Duration::from_millis(500);

const PENDING: u32 = 0;
const SLEEPS: u32 = 1;
const ENDED: u32 = 2;

struct CallState<T> {
    state: AtomicU32,
    result: Mutex<Option<Result<T, BlobFsError>>>,
    changed: Condvar,
}

/// What a thread waits with.
pub(crate) struct Call<T>(Arc<CallState<T>>);

/// What the reactor replies with. Dropped, it fails the call: the reactor has ended.
pub(crate) struct CallReply<T>(Option<Arc<CallState<T>>>);

/// A call that has not ended.
pub(crate) fn call<T>() -> (Call<T>, CallReply<T>) {
    let state =
        CallState { state: AtomicU32::new(PENDING), result: Mutex::new(None), changed: Condvar::new() };
    let state = Arc::new(state);
    (Call(state.clone()), CallReply(Some(state)))
}

fn has_many_cpus() -> bool {
    static MANY: OnceLock<bool> = OnceLock::new();
    *MANY.get_or_init(|| std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1))
}

impl<T> Call<T> {
    /// Whether the reply is there.
    pub(crate) fn has_ended(&self) -> bool {
        self.0.state.load(Ordering::Acquire) == ENDED
    }

    /// Waits for the reply. `is_over` says that there will be none any more.
    pub(crate) fn wait(self, is_over: impl Fn() -> bool) -> Result<T, BlobFsError> {
        if has_many_cpus() && !self.has_ended() {
            let start = Instant::now();
            while !self.has_ended() && start.elapsed() < POLL {
                (0..ROUNDS).for_each(|_| std::hint::spin_loop());
            }
        }
        let mut result = sync::lock(&self.0.result);
        loop {
            if let Some(result) = result.take() {
                return result;
            }
            if is_over() {
                return Err(BlobFsError::Broken);
            }
            // A reply between this and the wait needs the lock, so it finds the thread waiting.
            _ = self.0.state.compare_exchange(PENDING, SLEEPS, Ordering::AcqRel, Ordering::Acquire);
            let waited = self.0.changed.wait_timeout(result, LOOK);
            result = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }
}

impl<T> CallReply<T> {
    /// Ends the call.
    pub(crate) fn end(mut self, result: Result<T, BlobFsError>) {
        if let Some(state) = self.0.take() {
            end(&state, result);
        }
    }
}

fn end<T>(state: &CallState<T>, result: Result<T, BlobFsError>) {
    *sync::lock(&state.result) = Some(result);
    if state.state.swap(ENDED, Ordering::AcqRel) == SLEEPS {
        state.changed.notify_one();
    }
}

impl<T> Drop for CallReply<T> {
    fn drop(&mut self) {
        if let Some(state) = self.0.take() {
            end(&state, Err(BlobFsError::Broken));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_wakes_a_thread_that_sleeps() {
        let (waiting, reply) = call();
        let thread = std::thread::spawn(move || waiting.wait(|| false));
        reply.end(Ok(5));
        assert_eq!(thread.join().unwrap(), Ok(5));
    }

    #[test]
    fn a_call_without_an_answerer_fails() {
        let (waiting, reply) = call::<u32>();
        drop(reply);
        assert_eq!(waiting.wait(|| false), Err(BlobFsError::Broken));
        let (waiting, _reply) = call::<u32>();
        assert_eq!(waiting.wait(|| true), Err(BlobFsError::Broken));
    }
}
