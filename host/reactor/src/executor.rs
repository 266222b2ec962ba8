//! Tasks of the control plane on a core: one per connection or job, never one per I/O.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use slots::{Slab, Slot};

/// Most tasks on one core.
const TASKS_MAX: u32 = 4096;
/// Most tasks run in one turn, so that data pollers get theirs.
const TASKS_PER_TURN_MAX: usize = 32;

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// The tasks of one core and their timers.
pub(crate) struct Executor {
    tasks: RefCell<Slab<Option<Task>>>,
    timers: RefCell<BinaryHeap<Reverse<Timer>>>,
    /// Who waits for the core's ring to report anything.
    event_waiters: RefCell<Vec<Waker>>,
    ready: Arc<Ready>,
}

/// Tasks that were woken, from any thread.
struct Ready {
    queue: Mutex<VecDeque<Slot>>,
    core: sys::Waker,
}

struct TaskWaker {
    slot: Slot,
    ready: Arc<Ready>,
}

struct Timer {
    deadline_ns: u64,
    waker: Waker,
}

impl Executor {
    pub(crate) fn new(core: sys::Waker) -> Executor {
        Executor {
            tasks: RefCell::new(Slab::with_capacity(TASKS_MAX)),
            timers: RefCell::new(BinaryHeap::new()),
            event_waiters: RefCell::new(Vec::new()),
            ready: Arc::new(Ready { queue: Mutex::new(VecDeque::new()), core }),
        }
    }

    /// Takes a task in; `false` when there are too many.
    pub(crate) fn spawn(&self, task: Task) -> bool {
        match self.tasks.borrow_mut().insert(Some(task)) {
            Ok(slot) => {
                self.ready.push(slot);
                true
            }
            Err(_) => false,
        }
    }

    pub(crate) fn add_timer(&self, deadline_ns: u64, waker: Waker) {
        self.timers.borrow_mut().push(Reverse(Timer { deadline_ns, waker }));
    }

    pub(crate) fn add_event_waiter(&self, waker: Waker) {
        self.event_waiters.borrow_mut().push(waker);
    }

    /// The core's ring has reported something.
    pub(crate) fn event_happened(&self) {
        let waiters = std::mem::take(&mut *self.event_waiters.borrow_mut());
        waiters.into_iter().for_each(Waker::wake);
    }

    /// Runs what is ready; returns how many tasks that were.
    pub(crate) fn run(&self, now_ns: u64) -> usize {
        self.fire_timers(now_ns);
        let mut count = 0;
        while count < TASKS_PER_TURN_MAX {
            let Some(slot) = self.ready.lock().pop_front() else { break };
            count += 1;
            // The task is out of the table while it runs, so that it may spawn others.
            let Some(mut task) = self.tasks.borrow_mut().get_mut(slot).and_then(Option::take) else {
                continue;
            };
            let waker = Waker::from(Arc::new(TaskWaker { slot, ready: self.ready.clone() }));
            match task.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(()) => drop(self.tasks.borrow_mut().remove(slot)),
                Poll::Pending => {
                    if let Some(entry) = self.tasks.borrow_mut().get_mut(slot) {
                        *entry = Some(task);
                    }
                }
            }
        }
        count
    }

    /// When it next has something to run, `Some(0)` for at once.
    pub(crate) fn deadline(&self) -> Option<u64> {
        if !self.ready.lock().is_empty() {
            return Some(0);
        }
        self.timers.borrow().peek().map(|Reverse(timer)| timer.deadline_ns)
    }

    /// Drops every task, whatever it waits for.
    pub(crate) fn clear(&self) {
        let tasks = std::mem::replace(&mut *self.tasks.borrow_mut(), Slab::with_capacity(0));
        drop(tasks);
    }

    fn fire_timers(&self, now_ns: u64) {
        loop {
            let mut timers = self.timers.borrow_mut();
            match timers.peek() {
                Some(Reverse(timer)) if timer.deadline_ns <= now_ns => {}
                _ => return,
            }
            let Some(Reverse(timer)) = timers.pop() else { return };
            drop(timers);
            timer.waker.wake();
        }
    }
}

impl Ready {
    fn push(&self, slot: Slot) {
        self.lock().push_back(slot);
        self.core.wake();
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Slot>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.ready.push(self.slot);
    }
}

impl PartialEq for Timer {
    fn eq(&self, other: &Self) -> bool {
        self.deadline_ns == other.deadline_ns
    }
}

impl Eq for Timer {}

impl PartialOrd for Timer {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Timer {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.deadline_ns.cmp(&other.deadline_ns)
    }
}
