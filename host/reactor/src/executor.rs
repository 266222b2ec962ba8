//! The task executor of a core, for the control plane: one task per connection or job, never one per I/O.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Wake, Waker};

use slots::{Slab, Slot};

/// Maximum number of tasks on one core.
const TASKS_MAX: u32 = 4096;
/// Maximum number of tasks run per turn, so that tasks cannot starve data pollers.
const TASKS_PER_TURN_MAX: usize = 32;

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// The tasks of one core and their timers.
pub(crate) struct Executor {
    tasks: RefCell<Slab<TaskEntry>>,
    timers: RefCell<BinaryHeap<Reverse<Timer>>>,
    /// Number of cancelled timers that are still in `timers`.
    cancelled_timers: Cell<usize>,
    /// Tasks that wait for the next event of the core.
    event_waiters: RefCell<Vec<Waker>>,
    ready: Arc<Ready>,
}

struct TaskEntry {
    /// `None` while the task runs, so that it can spawn other tasks.
    task: Option<Task>,
    /// The same waker for the life of the task, so that `will_wake` recognises it.
    waker: Waker,
}

/// The waker of a timer; `None` once the timer is cancelled or has fired.
pub(crate) type TimerWaker = Rc<RefCell<Option<Waker>>>;

/// Cancelled timers are removed when they exceed this number and half of all timers.
const CANCELLED_TIMERS_MAX: usize = 64;

/// The queue of woken tasks; any thread can push to it.
struct Ready {
    queue: Mutex<VecDeque<Slot>>,
    /// Whether the queue has tasks, so that a turn without any takes no lock. It changes while the queue is locked.
    has_tasks: AtomicBool,
    core: os::Waker,
}

struct TaskWaker {
    slot: Slot,
    ready: Arc<Ready>,
}

struct Timer {
    deadline_ns: u64,
    sleeper: TimerWaker,
}

impl Executor {
    pub(crate) fn new(core: os::Waker) -> Executor {
        Executor {
            tasks: RefCell::new(Slab::with_capacity(TASKS_MAX)),
            timers: RefCell::new(BinaryHeap::new()),
            cancelled_timers: Cell::new(0),
            event_waiters: RefCell::new(Vec::new()),
            ready: Arc::new(Ready {
                queue: Mutex::new(VecDeque::new()),
                has_tasks: AtomicBool::new(false),
                core,
            }),
        }
    }

    /// Starts a task; `false` at [`TASKS_MAX`].
    pub(crate) fn spawn(&self, task: Task) -> bool {
        let mut tasks = self.tasks.borrow_mut();
        let Ok(slot) = tasks.insert(TaskEntry { task: Some(task), waker: Waker::noop().clone() }) else {
            return false;
        };
        if let Some(entry) = tasks.get_mut(slot) {
            entry.waker = Waker::from(Arc::new(TaskWaker { slot, ready: self.ready.clone() }));
        }
        self.ready.push(slot);
        true
    }

    /// Wakes `waker` at `deadline_ns`, unless [`cancel_timer`](Self::cancel_timer) is called first.
    pub(crate) fn add_timer(&self, deadline_ns: u64, waker: Waker) -> TimerWaker {
        let sleeper = Rc::new(RefCell::new(Some(waker)));
        self.timers.borrow_mut().push(Reverse(Timer { deadline_ns, sleeper: sleeper.clone() }));
        sleeper
    }

    /// Cancels a timer; does nothing if it has fired.
    pub(crate) fn cancel_timer(&self, sleeper: &TimerWaker) {
        if sleeper.borrow_mut().take().is_none() {
            return;
        }
        self.cancelled_timers.set(self.cancelled_timers.get() + 1);
        let mut timers = self.timers.borrow_mut();
        if self.cancelled_timers.get() > CANCELLED_TIMERS_MAX.max(timers.len() / 2) {
            timers.retain(|Reverse(timer)| timer.sleeper.borrow().is_some());
            self.cancelled_timers.set(0);
        }
    }

    pub(crate) fn add_event_waiter(&self, waker: &Waker) {
        let mut waiters = self.event_waiters.borrow_mut();
        // A task that dropped its wait and waits again is already in the list.
        if !waiters.iter().any(|one| one.will_wake(waker)) {
            waiters.push(waker.clone());
        }
    }

    /// Wakes the tasks that wait for an event of the core.
    pub(crate) fn wake_event_waiters(&self) {
        let waiters = std::mem::take(&mut *self.event_waiters.borrow_mut());
        waiters.into_iter().for_each(Waker::wake);
    }

    /// Fires expired timers and runs ready tasks; returns the number of tasks that ran.
    pub(crate) fn run(&self, now_ns: u64) -> usize {
        self.fire_timers(now_ns);
        let mut count = 0;
        while count < TASKS_PER_TURN_MAX {
            let Some(slot) = self.ready.pop() else { break };
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

    /// When the executor next has work: `Some(0)` for immediately, `None` for not before a wake-up.
    pub(crate) fn deadline(&self) -> Option<u64> {
        if !self.ready.lock().is_empty() {
            return Some(0);
        }
        self.timers.borrow().peek().map(|Reverse(timer)| timer.deadline_ns)
    }

    /// Drops every task, finished or not.
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
                None => self.cancelled_timers.set(self.cancelled_timers.get().saturating_sub(1)),
            }
        }
    }
}

impl Ready {
    fn push(&self, slot: Slot) {
        {
            let mut queue = self.lock();
            queue.push_back(slot);
            self.has_tasks.store(true, Ordering::Relaxed);
        }
        self.core.wake();
    }

    /// The first task. One that another thread adds meanwhile may be found in the next turn: before a core sleeps,
    /// [`Executor::deadline`] locks the queue.
    fn pop(&self) -> Option<Slot> {
        if !self.has_tasks.load(Ordering::Relaxed) {
            return None;
        }
        let mut queue = self.lock();
        let slot = queue.pop_front();
        self.has_tasks.store(!queue.is_empty(), Ordering::Relaxed);
        slot
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Slot>> {
        sync::lock(&self.queue)
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
    fn cancelled_timers_and_duplicate_waiters_are_removed() {
        let events = os::EventLoop::new(&os::EventLoopConfig::default()).unwrap();
        let executor = Executor::new(events.waker());
        let active = executor.add_timer(5, Waker::noop().clone());
        for _ in 0..10_000 {
            let sleeper = executor.add_timer(u64::MAX, Waker::noop().clone());
            executor.cancel_timer(&sleeper);
            executor.add_event_waiter(Waker::noop());
        }
        assert!(executor.timers.borrow().len() < 2 * CANCELLED_TIMERS_MAX + 2);
        assert_eq!(executor.event_waiters.borrow().len(), 1);
        executor.fire_timers(5);
        assert!(active.borrow().is_none(), "the timer has fired");
    }
}
