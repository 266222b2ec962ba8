//! A question to a core, and its answer.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use reactor::blocking;

/// The requester's end of a question to another thread.
///
/// Either the requester gets the answer, or the responder learns that it does not wait any longer: both ends agree on
/// which of the two happened, so that a core that was blocked can leave undone what was given up.
#[derive(Debug)]
pub struct Request<T>(Arc<Exchange<T>>);

/// The end that answers a [`Request`]. Dropped without an answer, the requester gets [`NoAnswer::Stopped`].
#[derive(Debug)]
pub struct Responder<T>(Arc<Exchange<T>>);

/// Why a [`Request`] has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoAnswer {
    /// The responder is gone: its core has stopped.
    Stopped,
    /// The time has passed. The request is abandoned.
    Timeout,
}

#[derive(Debug)]
struct Exchange<T> {
    state: Mutex<ExchangeState<T>>,
    changed: Condvar,
}

#[derive(Debug)]
enum ExchangeState<T> {
    Waiting,
    Answered(T),
    /// The requester does not wait any longer.
    Abandoned,
    /// The responder was dropped without an answer.
    Unanswered,
}

impl<T> Request<T> {
    /// A request, with the end that answers it.
    pub fn new() -> (Request<T>, Responder<T>) {
        let exchange =
            Arc::new(Exchange { state: Mutex::new(ExchangeState::Waiting), changed: Condvar::new() });
        (Request(exchange.clone()), Responder(exchange))
    }

    /// Waits for the answer. On a reactor's thread it would block the core.
    ///
    /// # Errors
    /// [`NoAnswer`]; the responder knows.
    pub fn wait(self, timeout: Duration) -> Result<T, NoAnswer> {
        let waited = blocking::wait_until(&self.0.state, &self.0.changed, timeout, |state| {
            match std::mem::replace(state, ExchangeState::Abandoned) {
                ExchangeState::Answered(value) => return Some(Ok(value)),
                ExchangeState::Unanswered => return Some(Err(NoAnswer::Stopped)),
                ExchangeState::Waiting | ExchangeState::Abandoned => {}
            }
            *state = ExchangeState::Waiting;
            None
        });
        waited.unwrap_or_else(|mut state| {
            *state = ExchangeState::Abandoned;
            Err(NoAnswer::Timeout)
        })
    }
}

impl<T> Drop for Request<T> {
    fn drop(&mut self) {
        *sync::lock(&self.0.state) = ExchangeState::Abandoned;
    }
}

impl<T> Responder<T> {
    /// Whether the requester does not wait any longer: what it asked for must not be done.
    pub fn is_abandoned(&self) -> bool {
        matches!(*sync::lock(&self.0.state), ExchangeState::Abandoned)
    }

    /// Answers.
    ///
    /// # Errors
    /// The requester does not wait any longer and gets no answer: what was done must be undone.
    pub fn answer(self, value: T) -> Result<(), T> {
        let mut state = sync::lock(&self.0.state);
        if matches!(*state, ExchangeState::Abandoned) {
            return Err(value);
        }
        *state = ExchangeState::Answered(value);
        drop(state);
        self.0.changed.notify_one();
        Ok(())
    }
}

impl<T> Drop for Responder<T> {
    fn drop(&mut self) {
        let mut state = sync::lock(&self.0.state);
        if matches!(*state, ExchangeState::Waiting) {
            *state = ExchangeState::Unanswered;
            drop(state);
            self.0.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_agree_whether_a_request_was_answered() {
        let (request, responder) = Request::new();
        assert_eq!(responder.answer(7), Ok(()));
        assert_eq!(request.wait(Duration::ZERO), Ok(7));

        let (request, responder) = Request::new();
        assert_eq!(request.wait(Duration::ZERO), Err(NoAnswer::Timeout));
        assert!(responder.is_abandoned());
        assert_eq!(responder.answer(7), Err(7));

        let (request, responder) = Request::<u8>::new();
        drop(responder);
        assert_eq!(request.wait(Duration::from_secs(60)), Err(NoAnswer::Stopped));
    }

    #[test]
    fn an_answer_wakes_the_requester() {
        let (request, responder) = Request::new();
        let core = std::thread::spawn(move || responder.answer("done"));
        assert_eq!(request.wait(Duration::from_secs(60)), Ok("done"));
        core.join().unwrap().unwrap();
    }
}
