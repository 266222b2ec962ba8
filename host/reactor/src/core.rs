//! The interface of a core for the code that runs on it.

use std::any::Any;
use std::cell::{OnceCell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use dma::Pool;
use os::EventLoop;
use os::clock::Clock;
use random::WyRand;

use crate::executor::{Executor, TimerWaker};
use crate::mailbox;
use crate::poller::{Period, Poller};

/// A core's event loop, buffer pool, clock, randomness, pollers and tasks, for code on that core.
///
/// Code on a core takes the time from [`now_ns`](Self::now_ns) and random numbers from [`rng`](Self::rng),
/// never from the process: a simulation replaces both when it creates the reactor
/// ([`ReactorConfig::simulated`](crate::ReactorConfig::simulated)).
///
/// A clone costs a reference count; a `Core` cannot leave its thread.
#[derive(Clone)]
pub struct Core(Rc<CoreInner>);

pub(crate) struct CoreInner {
    pub(crate) index: usize,
    pub(crate) cpu: Option<u32>,
    pub(crate) spins: bool,
    pub(crate) event_loop: EventLoop,
    pub(crate) pool: Pool,
    pub(crate) clock: Clock,
    pub(crate) random: RefCell<WyRand>,
    pub(crate) environment: OnceCell<Rc<dyn Any>>,
    /// A value of each type that was asked for.
    pub(crate) locals: RefCell<Vec<Rc<dyn Any>>>,
    pub(crate) executor: Executor,
    /// Pollers that were added since the last turn.
    pub(crate) new_pollers: RefCell<Vec<(Box<dyn Poller>, Period)>>,
}

/// The sender of a typed mailbox; `send` wakes the receiving core.
pub struct MailboxSender<T> {
    queue: mailbox::Sender<T>,
    waker: os::Waker,
}

/// The receiver of a typed mailbox. A poller must check it on every turn.
pub type MailboxReceiver<T> = mailbox::Receiver<T>;

impl Core {
    pub(crate) fn new(inner: CoreInner) -> Core {
        Core(Rc::new(inner))
    }

    pub(crate) fn inner(&self) -> &CoreInner {
        &self.0
    }

    /// Index among the reactors of the program: see
    /// [`ReactorConfig::first_index`](crate::ReactorConfig::first_index).
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// The CPU that the thread is pinned to; `None` if it is not pinned.
    pub fn cpu(&self) -> Option<u32> {
        self.0.cpu
    }

    /// Whether the reactor busy-polls for a while when idle, instead of sleeping immediately.
    pub fn spins(&self) -> bool {
        self.0.spins
    }

    /// The core's event loop (io_uring or epoll).
    pub fn event_loop(&self) -> &EventLoop {
        &self.0.event_loop
    }

    /// The core's buffer pool.
    pub fn pool(&self) -> &Pool {
        &self.0.pool
    }

    /// The core's time in nanoseconds: that of [`os::clock`], or virtual time.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.0.clock.now_ns()
    }

    /// The core's clock, for code that outlives a call and has no core at hand.
    pub fn clock(&self) -> &Clock {
        &self.0.clock
    }

    /// A random generator of its own for the caller. Simulated cores give the same generators in the same
    /// order.
    pub fn rng(&self) -> WyRand {
        self.0.random.borrow_mut().split()
    }

    /// Attaches what simulated components of this core find with [`environment`](Self::environment), such as
    /// the core's place in a simulated network. Returns whether nothing was attached before.
    pub fn attach_environment(&self, environment: Rc<dyn Any>) -> bool {
        self.0.environment.set(environment).is_ok()
    }

    /// What was attached, if it is a `T`.
    pub fn environment<T: 'static>(&self) -> Option<Rc<T>> {
        self.0.environment.get().cloned()?.downcast().ok()
    }

    /// The core's value of a type, made when it is first asked for: what components of a core have in common
    /// that do not know each other. The search takes a comparison for each type, so a component keeps what it
    /// gets.
    pub fn local<T: Default + 'static>(&self) -> Rc<T> {
        let mut locals = self.0.locals.borrow_mut();
        if let Some(local) = locals.iter().find_map(|local| local.clone().downcast().ok()) {
            return local;
        }
        let made = Rc::<T>::default();
        locals.push(made.clone());
        made
    }

    /// Runs `poller` from the next turn on.
    pub fn add_poller(&self, poller: Box<dyn Poller>, period: Period) {
        self.0.new_pollers.borrow_mut().push((poller, period));
    }

    /// Starts a task; `false` if the core has the maximum number of tasks. For the control plane only: the
    /// data path uses pollers.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) -> bool {
        self.0.executor.spawn(Box::pin(task))
    }

    /// Completes after `ns` nanoseconds.
    pub fn sleep_ns(&self, ns: u64) -> impl Future<Output = ()> + use<> {
        Sleep { core: self.clone(), deadline_ns: self.now_ns() + ns, timer: None }
    }

    /// Completes after the next event of the core. Wake-ups may be spurious: check the condition, and await
    /// again if it does not hold.
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

    /// Creates a mailbox for at least `capacity` messages, whose sender wakes this core if it sleeps. A
    /// poller that has the receiver returns `Some(0)` from [`deadline`](crate::Poller::deadline) while a
    /// message is there: one that arrives after its poll finds the core awake.
    pub fn mailbox<T>(&self, capacity: usize) -> (MailboxSender<T>, MailboxReceiver<T>) {
        let (queue, receiver) = mailbox::bounded(capacity);
        (MailboxSender { queue, waker: self.0.event_loop.waker() }, receiver)
    }
}

impl<T> MailboxSender<T> {
    pub(crate) fn new(queue: mailbox::Sender<T>, waker: os::Waker) -> Self {
        MailboxSender { queue, waker }
    }

    /// Sends a message and wakes the receiving core; returns the message as the error if the mailbox is full.
    pub fn send(&self, message: T) -> Result<(), T> {
        self.queue.send(message)?;
        self.waker.wake();
        Ok(())
    }
}

impl<T> Clone for MailboxSender<T> {
    fn clone(&self) -> Self {
        MailboxSender { queue: self.queue.clone(), waker: self.waker.clone() }
    }
}

struct Sleep {
    core: Core,
    deadline_ns: u64,
    timer: Option<TimerWaker>,
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(timer) = &self.timer {
            self.core.0.executor.cancel_timer(timer);
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.core.now_ns() >= self.deadline_ns {
            return Poll::Ready(());
        }
        match &self.timer {
            // Spurious poll: the timer has not expired yet.
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
