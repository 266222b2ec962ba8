//! The loop.

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memory::{Arena, Pool};
use sys::{CpuSet, Events, clock};

use crate::core::{Core, Inner};
use crate::executor::Executor;
use crate::mailbox;
use crate::poller::{Period, Poller, Shutdown, Work};
use crate::reactors::{Message, RemoteInner};
use crate::stats::{PollerStats, ReactorStats, add};

/// What a core does when it finds nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdlePolicy {
    /// Looks again for so many nanoseconds, then sleeps until an event, a message or a deadline.
    Adaptive {
        /// Nanoseconds without work before it sleeps.
        spin_ns: u64,
    },
    /// Always looks again: lowest latency, a whole core.
    Spin,
    /// Sleeps at once: least processor time, a wake-up on every burst.
    Sleep,
}

impl Default for IdlePolicy {
    /// Spins for 100 µs: about ten round trips at depth 1 over loopback, so that a closed loop never
    /// sleeps, while ten wake-ups a second cost a thousandth of a core.
    fn default() -> Self {
        IdlePolicy::Adaptive { spin_ns: 100_000 }
    }
}

/// How reactors are started.
#[derive(Clone)]
pub struct Config {
    /// One reactor a core of this set.
    pub cpus: CpuSet,
    /// Whether each thread is pinned to its core.
    pub pin: bool,
    /// What to do without work.
    pub idle: IdlePolicy,
    /// Where buffers come from.
    pub arena: Arc<Arena>,
    /// The ring to the kernel.
    pub events: sys::Config,
    /// A turn longer than this is counted as a stall, and reported at most once a second.
    pub stall_ns: u64,
}

impl Default for Config {
    /// One unpinned reactor, adaptive, 1 GiB of buffers at most, stalls from 100 ms.
    fn default() -> Self {
        Config {
            cpus: CpuSet::new(vec![CpuSet::allowed().cpus().first().copied().unwrap_or(0)])
                .expect("a set of one core is not empty"),
            pin: false,
            idle: IdlePolicy::default(),
            arena: Arena::new(memory::Config::default()),
            events: sys::Config::default(),
            stall_ns: 100_000_000,
        }
    }
}

/// Why reactors could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Neither io_uring nor epoll.
    #[error("no ring to the kernel on core {cpu}: {source}")]
    Events {
        /// The core.
        cpu: u32,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// A core that may not be used.
    #[error("a thread cannot be pinned to core {cpu}: {source}")]
    Pin {
        /// The core.
        cpu: u32,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// No more threads.
    #[error("no thread for core {cpu}: {source}")]
    Thread {
        /// The core.
        cpu: u32,
        /// What the kernel said.
        source: std::io::Error,
    },
}

/// Most messages taken in one turn, so that data pollers get theirs.
const MESSAGES_PER_TURN_MAX: usize = 64;
/// Messages that can wait at a core. Posting to a full one is refused.
const MESSAGES_MAX: usize = 1024;

/// One core's loop, on the thread that made it.
pub struct Reactor {
    core: Core,
    idle: IdlePolicy,
    stall_ns: u64,
    messages: mailbox::Receiver<Message>,
    remote: Arc<RemoteInner>,
    pollers: Vec<Entry>,
    idle_since_ns: u64,
    stall_reported_ns: u64,
    turn_end_ticks: u64,
    stopping: bool,
}

struct Entry {
    poller: Box<dyn Poller>,
    period: Period,
    next_ns: u64,
    busy_ticks: u64,
    runs: u64,
    busy_runs: u64,
}

impl Reactor {
    /// A reactor for the calling thread, of the first core of `config.cpus`.
    pub fn new(config: &Config) -> Result<Reactor, StartError> {
        Reactor::on(config, 0)
    }

    /// The reactor of the `index`th core, pinning the calling thread where asked.
    pub(crate) fn on(config: &Config, index: usize) -> Result<Reactor, StartError> {
        let cpu = config.cpus.cpus()[index];
        if config.pin {
            sys::pin_to(cpu).map_err(|source| StartError::Pin { cpu, source })?;
        }
        let events = Events::new(&config.events).map_err(|source| StartError::Events { cpu, source })?;
        let (sender, messages) = mailbox::bounded(MESSAGES_MAX);
        let remote = Arc::new(RemoteInner::new(index, cpu, sender, events.waker()));
        let core = Core::new(Inner {
            index,
            cpu: config.pin.then_some(cpu),
            spins: config.idle != IdlePolicy::Sleep,
            pool: Pool::new(&config.arena),
            executor: Executor::new(events.waker()),
            events,
            added: RefCell::new(Vec::new()),
        });
        let now_ns = clock::now_ns();
        Ok(Reactor {
            core,
            idle: config.idle,
            stall_ns: config.stall_ns,
            messages,
            remote,
            pollers: Vec::new(),
            idle_since_ns: now_ns,
            stall_reported_ns: 0,
            turn_end_ticks: clock::ticks(),
            stopping: false,
        })
    }

    /// The core that it runs.
    pub fn core(&self) -> Core {
        self.core.clone()
    }

    /// What other threads reach it by.
    pub fn remote(&self) -> crate::Remote {
        crate::Remote(self.remote.clone())
    }

    /// Runs turns until `future` is done. The future is polled as a task of this core.
    pub fn block_on<R: 'static>(mut self, future: impl Future<Output = R> + 'static) -> R {
        let result = Rc::new(RefCell::new(None));
        let out = result.clone();
        let spawned = self.core.spawn(async move {
            let value = future.await;
            *out.borrow_mut() = Some(value);
        });
        assert!(spawned, "a new reactor has room for its first task");
        loop {
            self.turn();
            if let Some(value) = result.borrow_mut().take() {
                return value;
            }
        }
    }

    /// One turn: events, messages, pollers, tasks, and sleep if the policy says so.
    /// Returns whether there was work.
    pub fn turn(&mut self) -> bool {
        let start_ns = clock::now_ns();
        let mut work = self.core.events().turn();
        if work > 0 {
            self.core.inner().executor.event_happened();
        }
        work += self.take_messages();
        self.adopt_pollers();
        work += self.run_pollers(start_ns);
        work += self.core.inner().executor.run(start_ns);
        self.account(work > 0);
        if work > 0 {
            self.idle_since_ns = start_ns;
        } else if !self.stopping {
            self.rest(start_ns);
        }
        work > 0
    }

    /// Runs until told to stop, then until nothing is in flight or `drain_ns` have passed.
    pub(crate) fn run(&mut self, drain_ns: u64) {
        while !self.remote.is_stopping() {
            self.turn();
        }
        self.stopping = true;
        let deadline_ns = clock::now_ns().saturating_add(drain_ns);
        loop {
            self.turn();
            let now_ns = clock::now_ns();
            let mut drained = true;
            for entry in &mut self.pollers {
                drained &= entry.poller.shutdown(now_ns) == Shutdown::Done;
            }
            if drained || now_ns >= deadline_ns {
                break;
            }
        }
        self.core.inner().executor.clear();
    }

    fn take_messages(&mut self) -> usize {
        let mut count = 0;
        while count < MESSAGES_PER_TURN_MAX
            && let Some(message) = self.messages.receive()
        {
            count += 1;
            match message {
                Message::Run(run) => run(&self.core),
                Message::Stats(answer) => {
                    // A poller that was added a message ago counts.
                    self.adopt_pollers();
                    // The asker may have given up; then nobody misses the answer.
                    let _ = answer.send(self.stats());
                }
                Message::Stop => self.remote.set_stopping(),
            }
        }
        count
    }

    fn adopt_pollers(&mut self) {
        if self.core.inner().added.borrow().is_empty() {
            return;
        }
        let added = std::mem::take(&mut *self.core.inner().added.borrow_mut());
        self.pollers.extend(added.into_iter().map(|(poller, period)| Entry {
            poller,
            period,
            next_ns: 0,
            busy_ticks: 0,
            runs: 0,
            busy_runs: 0,
        }));
    }

    fn run_pollers(&mut self, now_ns: u64) -> usize {
        let mut count = 0;
        let mut finished = false;
        let mut before = clock::ticks();
        for entry in &mut self.pollers {
            if let Period::EveryNs(period_ns) = entry.period {
                if now_ns < entry.next_ns {
                    continue;
                }
                entry.next_ns = now_ns + period_ns;
            }
            let work = entry.poller.poll(now_ns);
            let after = clock::ticks();
            entry.runs += 1;
            match work {
                Work::None => {}
                Work::Some(some) => {
                    count += some as usize;
                    entry.busy_runs += 1;
                    entry.busy_ticks += after.wrapping_sub(before);
                }
                Work::Finished => {
                    finished = true;
                    count += 1;
                    entry.runs = u64::MAX;
                }
            }
            before = after;
        }
        if finished {
            self.pollers.retain(|entry| entry.runs != u64::MAX);
        }
        count
    }

    fn account(&mut self, worked: bool) {
        let end = clock::ticks();
        let ns = clock::ticks_to_ns(end.saturating_sub(self.turn_end_ticks));
        self.turn_end_ticks = end;
        let counters = &self.remote.counters;
        add(if worked { &counters.busy_ns } else { &counters.idle_ns }, ns);
        add(&counters.turns, 1);
        if ns > counters.turn_max_ns.load(Ordering::Relaxed) {
            counters.turn_max_ns.store(ns, Ordering::Relaxed);
        }
        if ns > self.stall_ns {
            self.report_stall(ns);
        }
    }

    #[cold]
    fn report_stall(&mut self, ns: u64) {
        add(&self.remote.counters.stalls, 1);
        let now_ns = clock::now_ns();
        if now_ns.saturating_sub(self.stall_reported_ns) < 1_000_000_000 && self.stall_reported_ns != 0 {
            return;
        }
        self.stall_reported_ns = now_ns;
        let busiest = self.pollers.iter().max_by_key(|entry| entry.busy_ticks);
        eprintln!(
            "reactor {}: one turn took {} ms (limit {} ms; busiest poller {}); the core was blocked or taken away",
            self.remote.index,
            ns / 1_000_000,
            self.stall_ns / 1_000_000,
            busiest.map_or("none", |entry| entry.poller.name()),
        );
    }

    fn rest(&mut self, now_ns: u64) {
        let spin_ns = match self.idle {
            // No PAUSE: nobody waits for what this core holds, and in a guest it may trap.
            IdlePolicy::Spin => return,
            IdlePolicy::Adaptive { spin_ns } => spin_ns,
            IdlePolicy::Sleep => 0,
        };
        if now_ns.saturating_sub(self.idle_since_ns) < spin_ns {
            return;
        }
        let waker = self.core.events().waker();
        waker.prepare_sleep();
        // Whoever sends from here on sees a sleeper and wakes it; who sent before is seen here.
        let deadline_ns = self.deadline();
        let now_ns = clock::now_ns();
        let sleeps = self.messages.is_empty() && deadline_ns.is_none_or(|deadline_ns| deadline_ns > now_ns);
        if sleeps {
            if self.core.events().wait(deadline_ns.map(|deadline_ns| deadline_ns - now_ns)) > 0 {
                self.core.inner().executor.event_happened();
            }
            let end = clock::ticks();
            let counters = &self.remote.counters;
            add(&counters.sleep_ns, clock::ticks_to_ns(end.saturating_sub(self.turn_end_ticks)));
            add(&counters.sleeps, 1);
            self.turn_end_ticks = end;
        }
        waker.awake();
    }

    fn deadline(&self) -> Option<u64> {
        if !self.core.inner().added.borrow().is_empty() {
            return Some(0);
        }
        let pollers = self.pollers.iter().filter_map(|entry| match entry.period {
            Period::EveryTurn => entry.poller.deadline(),
            Period::EveryNs(_) => Some(entry.next_ns),
        });
        pollers.chain(self.core.inner().executor.deadline()).min()
    }

    fn stats(&self) -> ReactorStats {
        let pollers = self.pollers.iter().map(|entry| PollerStats {
            name: entry.poller.name().to_string(),
            busy_ns: clock::ticks_to_ns(entry.busy_ticks),
            runs: entry.runs,
            busy_runs: entry.busy_runs,
        });
        ReactorStats { pollers: pollers.collect(), ..self.remote.counters.snapshot() }
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.remote.set_ended();
    }
}
