//! Tasks of the control plane on a core: one per connection or job, never one per I/O.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
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
    tasks: RefCell<Slab<Entry>>,
    timers: RefCell<BinaryHeap<Reverse<Timer>>>,
    /// Timers that nobody waits for any more.
    idle_timers: Cell<usize>,
    /// Who waits for the core's ring to report anything.
    event_waiters: RefCell<Vec<Waker>>,
    ready: Arc<Ready>,
}

struct Entry {
    /// Out while it runs, so that it may spawn others.
    task: Option<Task>,
    /// The same for as long as the task lives, so that who is woken can be told.
    waker: Waker,
}

/// Whom a timer wakes; `None` once nobody waits for it.
pub(crate) type Sleeper = Rc<RefCell<Option<Waker>>>;

/// Timers that nobody waits for are dropped when there are more of them than this and than of others.
const IDLE_TIMERS_MAX: usize = 64;

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
    sleeper: Sleeper,
}

impl Executor {
    pub(crate) fn new(core: sys::Waker) -> Executor {
        Executor {
            tasks: RefCell::new(Slab::with_capacity(TASKS_MAX)),
            timers: RefCell::new(BinaryHeap::new()),
            idle_timers: Cell::new(0),
            event_waiters: RefCell::new(Vec::new()),
            ready: Arc::new(Ready { queue: Mutex::new(VecDeque::new()), core }),
        }
    }

    /// Takes a task in; `false` when there are too many.
    pub(crate) fn spawn(&self, task: Task) -> bool {
        let mut tasks = self.tasks.borrow_mut();
        let Ok(slot) = tasks.insert(Entry { task: Some(task), waker: Waker::noop().clone() }) else {
            return false;
        };
        if let Some(entry) = tasks.get_mut(slot) {
            entry.waker = Waker::from(Arc::new(TaskWaker { slot, ready: self.ready.clone() }));
        }
        self.ready.push(slot);
        true
    }

    /// Wakes at a time, unless [`timer_dropped`](Self::timer_dropped) says before that nobody waits.
    pub(crate) fn add_timer(&self, deadline_ns: u64, waker: Waker) -> Sleeper {
        let sleeper = Rc::new(RefCell::new(Some(waker)));
        self.timers.borrow_mut().push(Reverse(Timer { deadline_ns, sleeper: sleeper.clone() }));
        sleeper
    }

    /// Nobody waits for a timer any more.
    pub(crate) fn timer_dropped(&self, sleeper: &Sleeper) {
        if sleeper.borrow_mut().take().is_none() {
            return;
        }
        self.idle_timers.set(self.idle_timers.get() + 1);
        let mut timers = self.timers.borrow_mut();
        if self.idle_timers.get() > IDLE_TIMERS_MAX.max(timers.len() / 2) {
            timers.retain(|Reverse(timer)| timer.sleeper.borrow().is_some());
            self.idle_timers.set(0);
        }
    }

    pub(crate) fn add_event_waiter(&self, waker: &Waker) {
        let mut waiters = self.event_waiters.borrow_mut();
        // A task that gave up waiting and waits again is there already.
        if !waiters.iter().any(|one| one.will_wake(waker)) {
            waiters.push(waker.clone());
        }
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
            let entry =
                self.tasks.borrow_mut().get_mut(slot).map(|entry| (entry.task.take(), entry.waker.clone()));
            let Some((Some(mut task), waker)) = entry else { continue };
            match task.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(()) => drop(self.tasks.borrow_mut().remove(slot)),
                Poll::Pending => {
                    if let Some(entry) = self.tasks.borrow_mut().get_mut(slot) {
                        entry.task = Some(task);
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
            match timer.sleeper.borrow_mut().take() {
                Some(waker) => waker.wake(),
                None => self.idle_timers.set(self.idle_timers.get().saturating_sub(1)),
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_waits_for_is_let_go() {
        let events = sys::Events::new(&sys::Config::default()).unwrap();
        let executor = Executor::new(events.waker());
        let kept = executor.add_timer(5, Waker::noop().clone());
        for _ in 0..10_000 {
            let sleeper = executor.add_timer(u64::MAX, Waker::noop().clone());
            executor.timer_dropped(&sleeper);
            executor.add_event_waiter(Waker::noop());
        }
        assert!(executor.timers.borrow().len() < 2 * IDLE_TIMERS_MAX + 2);
        assert_eq!(executor.event_waiters.borrow().len(), 1);
        executor.fire_timers(5);
        assert!(kept.borrow().is_none(), "it has been woken");
    }
}
