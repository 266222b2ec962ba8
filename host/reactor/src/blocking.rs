//! What control threads block on: replies of reactors, pauses, and workers.
//!
//! A control thread is not a reactor's thread, so it may wait. In a simulation there is no other thread that could turn
//! the reactors meanwhile: the simulation [installs](install) a [`Driver`], and each wait on its thread runs simulated
//! steps until the reply is there or the simulated time is over. Code of the control plane waits only through this
//! module and is the same in both.
//!
//! ```
//! use std::{sync::mpsc, time::Duration};
//! let (sender, receiver) = mpsc::sync_channel(1);
//! reactor::blocking::spawn_worker("adder", receiver, |(one, other, sum): (u32, u32, mpsc::SyncSender<u32>)| {
//!     let _ = sum.send(one + other);
//! })?;
//! let (sum, result) = mpsc::sync_channel(1);
//! sender.send((2, 3, sum)).expect("the worker lives as long as the sender");
//! assert_eq!(reactor::blocking::receive_timeout(&result, Duration::from_secs(5)), Ok(5));
//! # Ok::<(), std::io::Error>(())
//! ```

use std::cell::RefCell;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, RecvError, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// A simulation, which makes progress while its control thread waits.
pub trait Driver {
    /// Runs one step: some reactors turn, or time advances. `false` if no later step can change anything.
    fn step(&self) -> bool;

    /// The simulated time in nanoseconds.
    fn now_ns(&self) -> u64;

    /// Runs `work` in each step until it returns `None`; `Some` is the number of items that it handled.
    fn add_worker(&self, work: Box<dyn FnMut() -> Option<usize>>);
}

thread_local! {
    static DRIVER: RefCell<Option<Rc<dyn Driver>>> = const { RefCell::new(None) };
}

/// Makes waits of this thread run `driver`, or block again with `None`. Returns the driver before.
pub fn install(driver: Option<Rc<dyn Driver>>) -> Option<Rc<dyn Driver>> {
    DRIVER.replace(driver)
}

fn driver() -> Option<Rc<dyn Driver>> {
    DRIVER.with_borrow(Clone::clone)
}

/// Waits for a message.
///
/// # Errors
/// All senders are dropped, or the simulation can make no further step.
pub fn receive<T>(receiver: &Receiver<T>) -> Result<T, RecvError> {
    match driver() {
        None => receiver.recv(),
        Some(driver) => simulate(&*driver, receiver, u64::MAX).map_err(|_| RecvError),
    }
}

/// Waits for a message for at most `timeout`.
///
/// # Errors
/// The time is over, or all senders are dropped.
pub fn receive_timeout<T>(receiver: &Receiver<T>, timeout: Duration) -> Result<T, RecvTimeoutError> {
    match driver() {
        None => receiver.recv_timeout(timeout),
        Some(driver) => simulate(&*driver, receiver, end_ns(&*driver, timeout)),
    }
}

/// Waits for at most `timeout` until `check` returns a value. It is called with the mutex locked, first at once and then
/// after each notification of `changed`.
///
/// # Errors
/// The time is over. The mutex is locked since the last check, so that the caller can give up what it waits for.
pub fn wait_until<'a, T, R>(
    mutex: &'a Mutex<T>,
    changed: &Condvar,
    timeout: Duration,
    mut check: impl FnMut(&mut T) -> Option<R>,
) -> Result<R, MutexGuard<'a, T>> {
    if let Some(driver) = driver() {
        let end_ns = end_ns(&*driver, timeout);
        loop {
            let mut state = sync::lock(mutex);
            if let Some(value) = check(&mut state) {
                return Ok(value);
            }
            if driver.now_ns() >= end_ns {
                return Err(state);
            }
            // The reactors lock it.
            drop(state);
            if !driver.step() {
                return Err(sync::lock(mutex));
            }
        }
    }
    let deadline = Instant::now() + timeout;
    let mut state = sync::lock(mutex);
    loop {
        if let Some(value) = check(&mut state) {
            return Ok(value);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(state);
        }
        state = changed.wait_timeout(state, left).unwrap_or_else(|error| error.into_inner()).0;
    }
}

/// Waits for a future, which tasks of reactors or other threads complete.
///
/// # Errors
/// The simulation can make no further step.
pub fn block_on<F: Future>(future: F) -> Result<F::Output, RecvError> {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(ThreadWaker(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let driver = driver();
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Ok(output);
        }
        match &driver {
            // Another wake-up than the future's is followed by another poll.
            None => std::thread::park(),
            Some(driver) if driver.step() => {}
            Some(_) => return Err(RecvError),
        }
    }
}

/// Wakes the thread of [`block_on`].
struct ThreadWaker(Thread);

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Pauses for `time`.
pub fn sleep(time: Duration) {
    match driver() {
        None => std::thread::sleep(time),
        Some(driver) => {
            let end_ns = driver.now_ns().saturating_add(time.as_nanos() as u64);
            while driver.now_ns() < end_ns && driver.step() {}
        }
    }
}

/// Starts a thread that calls `handle` with each message until all senders are dropped. In a simulation the messages
/// are handled between the turns of the reactors.
///
/// # Errors
/// The thread cannot be created.
pub fn spawn_worker<T: Send + 'static>(
    name: &str,
    receiver: Receiver<T>,
    mut handle: impl FnMut(T) + Send + 'static,
) -> io::Result<()> {
    let Some(driver) = driver() else {
        let work = move || {
            while let Ok(message) = receiver.recv() {
                handle(message);
            }
        };
        return std::thread::Builder::new().name(name.into()).spawn(work).map(drop);
    };
    driver.add_worker(Box::new(move || {
        let mut count = 0;
        loop {
            match receiver.try_recv() {
                Ok(message) => handle(message),
                Err(TryRecvError::Empty) => return Some(count),
                Err(TryRecvError::Disconnected) => return None,
            }
            count += 1;
        }
    }));
    Ok(())
}

fn end_ns(driver: &dyn Driver, timeout: Duration) -> u64 {
    driver.now_ns().saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX))
}

fn simulate<T>(driver: &dyn Driver, receiver: &Receiver<T>, end_ns: u64) -> Result<T, RecvTimeoutError> {
    loop {
        match receiver.try_recv() {
            Ok(value) => return Ok(value),
            Err(TryRecvError::Disconnected) => return Err(RecvTimeoutError::Disconnected),
            Err(TryRecvError::Empty) if driver.now_ns() >= end_ns || !driver.step() => {
                return Err(RecvTimeoutError::Timeout);
            }
            Err(TryRecvError::Empty) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::mpsc::sync_channel;

    type Worker = Box<dyn FnMut() -> Option<usize>>;

    #[derive(Default)]
    struct CountingDriver {
        steps: Cell<u64>,
        workers: RefCell<Vec<Worker>>,
    }

    impl Driver for CountingDriver {
        fn step(&self) -> bool {
            self.steps.set(self.steps.get() + 1);
            self.workers.borrow_mut().retain_mut(|work| work().is_some());
            true
        }

        fn now_ns(&self) -> u64 {
            self.steps.get() * 1_000_000
        }

        fn add_worker(&self, work: Worker) {
            self.workers.borrow_mut().push(work);
        }
    }

    #[test]
    fn a_future_is_awaited_that_another_thread_completes() {
        let (sender, receiver) = sync_channel::<Waker>(1);
        let mut polls = 0;
        let other = std::thread::spawn(move || receiver.recv().unwrap().wake());
        let future = std::future::poll_fn(move |context| {
            polls += 1;
            if polls > 1 {
                return Poll::Ready(polls);
            }
            sender.send(context.waker().clone()).unwrap();
            Poll::Pending
        });
        assert_eq!(block_on(future), Ok(2));
        other.join().unwrap();
    }

    #[test]
    fn a_wait_runs_the_simulation_until_the_reply_or_the_simulated_timeout() {
        let driver = Rc::new(CountingDriver::default());
        install(Some(driver.clone()));
        let (requests, worker) = sync_channel(4);
        spawn_worker("echo", worker, |(value, reply): (u32, std::sync::mpsc::SyncSender<u32>)| {
            let _ = reply.send(value);
        })
        .unwrap();
        let (reply, answer) = sync_channel(1);
        requests.send((7, reply.clone())).unwrap();
        assert_eq!(receive(&answer), Ok(7));
        let before = driver.now_ns();
        assert_eq!(receive_timeout(&answer, Duration::from_millis(5)), Err(RecvTimeoutError::Timeout));
        assert_eq!(driver.now_ns() - before, 5_000_000);
        sleep(Duration::from_millis(3));
        assert_eq!(driver.now_ns() - before, 8_000_000);
        let (state, changed) = (Mutex::new(0), Condvar::new());
        let deadline = |_: &mut u64| (driver.now_ns() - before >= 10_000_000).then_some("due");
        assert_eq!(wait_until(&state, &changed, Duration::MAX, deadline).ok(), Some("due"));
        let never = |_: &mut u64| None::<()>;
        drop(wait_until(&state, &changed, Duration::from_millis(2), never).unwrap_err());
        assert_eq!(driver.now_ns() - before, 12_000_000);
        let until = driver.now_ns() + 3_000_000;
        let later = std::future::poll_fn(|_| match driver.now_ns() {
            now if now >= until => Poll::Ready(now),
            _ => Poll::Pending,
        });
        assert_eq!(block_on(later), Ok(until), "each step of the simulation is followed by a poll");
        drop((requests, reply));
        assert_eq!(receive_timeout(&answer, Duration::MAX), Err(RecvTimeoutError::Disconnected));
        driver.step();
        assert!(driver.workers.borrow().is_empty(), "the worker ends with its senders");
        install(None);
    }
}
