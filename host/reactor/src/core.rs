//! What a part of the system sees of the core that it runs on.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use memory::Pool;
use sys::Events;

use crate::executor::{Executor, Sleeper};
use crate::mailbox;
use crate::poller::{Period, Poller};

/// One core, from within. Cheap to clone; stays on its thread.
#[derive(Clone)]
pub struct Core(Rc<Inner>);

pub(crate) struct Inner {
    pub(crate) index: usize,
    pub(crate) cpu: Option<u32>,
    pub(crate) spins: bool,
    pub(crate) events: Events,
    pub(crate) pool: Pool,
    pub(crate) executor: Executor,
    /// Pollers added since the last turn.
    pub(crate) added: RefCell<Vec<(Box<dyn Poller>, Period)>>,
}

/// The sending end of a typed mailbox; wakes the core that receives.
pub struct Sender<T> {
    queue: mailbox::Sender<T>,
    waker: sys::Waker,
}

/// The receiving end of a typed mailbox, to be looked at every turn.
pub type Receiver<T> = mailbox::Receiver<T>;

impl Core {
    pub(crate) fn new(inner: Inner) -> Core {
        Core(Rc::new(inner))
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.0
    }

    /// Position among the reactors that were started together, from 0.
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// The processor that it is pinned to, if it is.
    pub fn cpu(&self) -> Option<u32> {
        self.0.cpu
    }

    /// Whether it looks again for a while when it finds nothing to do, rather than sleep at once.
    pub fn spins(&self) -> bool {
        self.0.spins
    }

    /// The core's ring to the kernel.
    pub fn events(&self) -> &Events {
        &self.0.events
    }

    /// The core's buffers.
    pub fn pool(&self) -> &Pool {
        &self.0.pool
    }

    /// Runs `poller` from the next turn on.
    pub fn add_poller(&self, poller: Box<dyn Poller>, period: Period) {
        self.0.added.borrow_mut().push((poller, period));
    }

    /// Starts a task; `false` when the core has too many. For control work: data paths are pollers.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) -> bool {
        self.0.executor.spawn(Box::pin(task))
    }

    /// Ends after `ns` nanoseconds.
    pub fn sleep_ns(&self, ns: u64) -> impl Future<Output = ()> + use<> {
        Sleep { core: self.clone(), deadline_ns: sys::clock::now_ns() + ns, timer: None }
    }

    /// Ends after the core's ring has next reported something: look at what it was for, and await
    /// this again if that was not it.
    pub fn next_event(&self) -> impl Future<Output = ()> + use<> {
        let core = self.clone();
        let mut registered = false;
        std::future::poll_fn(move |context| {
            if registered {
                return Poll::Ready(());
            }
            registered = true;
            core.0.executor.add_event_waiter(context.waker());
            Poll::Pending
        })
    }

    /// A mailbox whose messages wake this core.
    pub fn mailbox<T>(&self, capacity: usize) -> (Sender<T>, Receiver<T>) {
        let (queue, receiver) = mailbox::bounded(capacity);
        (Sender { queue, waker: self.0.events.waker() }, receiver)
    }
}

impl<T> Sender<T> {
    pub(crate) fn new(queue: mailbox::Sender<T>, waker: sys::Waker) -> Self {
        Sender { queue, waker }
    }

    /// Puts a message in and wakes the receiver's core, or gives it back if there is no room.
    pub fn send(&self, message: T) -> Result<(), T> {
        self.queue.send(message)?;
        self.waker.wake();
        Ok(())
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Sender { queue: self.queue.clone(), waker: self.waker.clone() }
    }
}

struct Sleep {
    core: Core,
    deadline_ns: u64,
    timer: Option<Sleeper>,
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(timer) = &self.timer {
            self.core.0.executor.timer_dropped(timer);
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if sys::clock::now_ns() >= self.deadline_ns {
            return Poll::Ready(());
        }
        match &self.timer {
            // Polled for another reason than that its time has come.
            Some(timer) if timer.borrow().is_some() => {
                timer.replace(Some(context.waker().clone()));
            }
            _ => {
                let waker = context.waker().clone();
                let timer = self.core.0.executor.add_timer(self.deadline_ns, waker);
                self.timer = Some(timer);
            }
        }
        Poll::Pending
    }
}
