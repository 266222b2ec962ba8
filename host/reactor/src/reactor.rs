//! The reactor's loop and its configuration.

use std::cell::{OnceCell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dma::{Arena, Pool};
use os::clock::{Clock, VirtualClock};
use os::{CpuSet, EventLoop, clock};
use random::WyRand;

use crate::core::{Core, CoreInner};
use crate::executor::Executor;
use crate::mailbox;
use crate::poller::{Period, PollResult, Poller, Shutdown};
use crate::reactors::{HandleInner, ReactorMessage};
use crate::stats::{PollerStats, ReactorStats, add};

/// What a core does when it has no work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdlePolicy {
    /// Busy-polls for `spin_ns`, then sleeps until an event, a message or a deadline.
    Adaptive {
        /// Nanoseconds without work before it sleeps.
        spin_ns: u64,
    },
    /// Always busy-polls: lowest latency, uses a whole core.
    Spin,
    /// Sleeps immediately: least CPU time, one wake-up per burst.
    Sleep,
}

impl Default for IdlePolicy {
    /// Busy-polls for 100 µs: about ten round trips at queue depth 1 over loopback, so that a closed loop
    /// never sleeps, while ten wake-ups per second cost 0.1 % of a core.
    fn default() -> Self {
        IdlePolicy::Adaptive { spin_ns: 100_000 }
    }
}

/// Configuration of one reactor or of a set.
#[derive(Clone)]
pub struct ReactorConfig {
    /// One reactor starts on each core of this set.
    pub cpus: CpuSet,
    /// Index of the first of these reactors, the others follow: no two of a program have the same, since a
    /// device tells its channels apart by it.
    pub first_index: usize,
    /// What their threads are called, with the number of the core, in lists of threads and in reports of
    /// stalls: 11 bytes at most are seen there.
    pub name: &'static str,
    /// Whether each thread is pinned to its core.
    pub pin: bool,
    /// What to do when there is no work.
    pub idle: IdlePolicy,
    /// The arena of the buffer pools.
    pub arena: Arc<Arena>,
    /// Configuration of the event loop.
    pub event_loop: os::EventLoopConfig,
    /// Stall limit: a longer turn is counted as a stall, and reported on standard error at most once per
    /// second.
    pub stall_ns: u64,
    /// The clock of the cores; `None` is the machine's. With a virtual clock and
    /// [`EventBackend::Virtual`](os::EventBackend::Virtual) a simulation turns the reactors.
    pub clock: Option<VirtualClock>,
    /// Seed of the cores' random generators; `None` draws one from the operating system.
    pub seed: Option<u64>,
}

impl ReactorConfig {
    /// The configuration of simulated cores: virtual time, no kernel interface, and reactors that never sleep
    /// or pin their thread. [`Reactor::for_core`] makes each, and the simulation calls [`Reactor::turn`].
    pub fn simulated(clock: VirtualClock, seed: u64, cores: u32, arena: &Arc<Arena>) -> ReactorConfig {
        ReactorConfig {
            cpus: CpuSet::new((0..cores).collect()).expect("a node has at least one core"),
            first_index: 0,
            name: "reactor",
            pin: false,
            idle: IdlePolicy::Spin,
            arena: arena.clone(),
            event_loop: os::EventLoopConfig {
                backend: Some(os::EventBackend::Virtual),
                ..os::EventLoopConfig::default()
            },
            // Turns take real time, which says nothing about a simulated core.
            stall_ns: u64::MAX,
            clock: Some(clock),
            seed: Some(seed),
        }
    }
}

/// A seed from the operating system.
fn system_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

impl Default for ReactorConfig {
    /// One unpinned reactor, adaptive, at most 1 GiB of buffers, stall limit 100 ms.
    fn default() -> Self {
        ReactorConfig {
            cpus: CpuSet::new(vec![CpuSet::allowed().cpus().first().copied().unwrap_or(0)])
                .expect("a set of one core is not empty"),
            first_index: 0,
            name: "reactor",
            pin: false,
            idle: IdlePolicy::default(),
            arena: Arena::new(dma::ArenaConfig::default()),
            event_loop: os::EventLoopConfig::default(),
            stall_ns: 100_000_000,
            clock: None,
            seed: None,
        }
    }
}

/// Why a reactor could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Neither io_uring nor epoll is available.
    #[error("neither io_uring nor epoll can be set up on core {cpu}: {source}")]
    Events {
        /// The core.
        cpu: u32,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The process may not run on the core.
    #[error("cannot pin a thread to core {cpu}: {source}")]
    Pin {
        /// The core.
        cpu: u32,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The thread could not be created.
    #[error("cannot create a thread for core {cpu}: {source}")]
    Thread {
        /// The core.
        cpu: u32,
        /// The kernel's error.
        source: std::io::Error,
    },
}

/// Maximum number of messages processed per turn, so that messages cannot starve data pollers.
const MESSAGES_PER_TURN_MAX: usize = 64;
/// Capacity of a core's message queue.
const MESSAGES_MAX: usize = 1024;

/// One core's event loop, on the thread that created it.
///
/// Each [`turn`](Self::turn) reaps kernel events, processes messages, runs the pollers, then the ready tasks,
/// and sleeps if there was no work and the [`IdlePolicy`] allows it. It owns the pollers and, through
/// [`Core`], the event loop, the buffer pool and the tasks.
pub struct Reactor {
    core: Core,
    name: &'static str,
    idle: IdlePolicy,
    stall_ns: u64,
    messages: mailbox::Receiver<ReactorMessage>,
    remote: Arc<HandleInner>,
    pollers: Vec<RegisteredPoller>,
    idle_since_ns: u64,
    stall_reported_ns: u64,
    turn_end_ticks: u64,
    stopping: bool,
}

struct RegisteredPoller {
    poller: Box<dyn Poller>,
    period: Period,
    next_ns: u64,
    busy_ticks: u64,
    runs: u64,
    busy_runs: u64,
    /// The poller returned [`PollResult::Finished`] and is removed at the end of the turn.
    is_finished: bool,
}

impl Reactor {
    /// A reactor on the calling thread, for the first core of `config.cpus`.
    pub fn new(config: &ReactorConfig) -> Result<Reactor, StartError> {
        Reactor::for_core(config, 0)
    }

    /// A reactor on the calling thread, for core `place` of `config.cpus`; pins the thread if `config.pin`.
    /// Its index counts from [`ReactorConfig::first_index`].
    pub fn for_core(config: &ReactorConfig, place: usize) -> Result<Reactor, StartError> {
        let (cpu, index) = (config.cpus.cpus()[place], config.first_index + place);
        if config.pin {
            os::pin_thread_to(cpu).map_err(|source| StartError::Pin { cpu, source })?;
        }
        let events =
            EventLoop::new(&config.event_loop).map_err(|source| StartError::Events { cpu, source })?;
        let (sender, messages) = mailbox::bounded(MESSAGES_MAX);
        let clock = config.clock.clone().map_or_else(Clock::monotonic, Clock::from);
        let remote = Arc::new(HandleInner::new(index, cpu, sender, events.waker(), clock.clone()));
        let pool = Pool::new(&config.arena);
        // A message, so that a turn without returned memory costs nothing, and a sleeping core wakes up.
        let home = remote.clone();
        pool.on_return(move || home.collect_memory());
        let seed = config.seed.unwrap_or_else(system_seed);
        let now_ns = clock.now_ns();
        let core = Core::new(CoreInner {
            index,
            cpu: config.pin.then_some(cpu),
            spins: config.idle != IdlePolicy::Sleep,
            pool,
            executor: Executor::new(events.waker()),
            event_loop: events,
            clock,
            random: RefCell::new(WyRand::new(seed ^ (index as u64) << 48)),
            environment: OnceCell::new(),
            locals: RefCell::new(Vec::new()),
            new_pollers: RefCell::new(Vec::new()),
        });
        Ok(Reactor {
            core,
            name: config.name,
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

    /// The core's interface for pollers and tasks.
    pub fn core(&self) -> Core {
        self.core.clone()
    }

    /// The handle for other threads.
    pub fn handle(&self) -> crate::ReactorHandle {
        crate::ReactorHandle(self.remote.clone())
    }

    /// Runs turns until `future` completes; it runs as a task of this core.
    pub fn block_on<R: 'static>(mut self, future: impl Future<Output = R> + 'static) -> R {
        self.wait_for(future)
    }

    /// As [`block_on`](Self::block_on), for a thread that goes on to turn the reactor.
    pub fn wait_for<R: 'static>(&mut self, future: impl Future<Output = R> + 'static) -> R {
        let result = Rc::new(RefCell::new(None));
        let out = result.clone();
        let spawned = self.core.spawn(async move {
            let value = future.await;
            *out.borrow_mut() = Some(value);
        });
        assert!(spawned, "a reactor has room for one more task");
        loop {
            self.turn();
            if let Some(value) = result.borrow_mut().take() {
                return value;
            }
        }
    }

    /// Drops the pollers and the tasks where they stand, as when the process ends. Without it, a task that
    /// holds the core keeps both alive.
    pub fn discard(mut self) {
        self.pollers.clear();
        self.core.inner().new_pollers.borrow_mut().clear();
        self.core.inner().executor.clear();
    }

    /// Runs one turn: events, messages, pollers, tasks, and sleep if the policy allows it.
    /// Returns whether there was work.
    pub fn turn(&mut self) -> bool {
        let mut start_ticks = clock::ticks();
        let start_ns = self.core.clock().at_ticks(start_ticks);
        let mut work = self.core.event_loop().turn();
        if work > 0 {
            self.core.inner().executor.wake_event_waiters();
        }
        work += self.process_messages();
        self.register_new_pollers();
        if work > 0 {
            // Events and messages are not the pollers' work.
            start_ticks = clock::ticks();
        }
        work += self.run_pollers(start_ns, start_ticks);
        work += self.core.inner().executor.run(start_ns);
        self.account(work > 0);
        if work > 0 {
            self.idle_since_ns = start_ns;
        } else if !self.stopping {
            self.idle_or_sleep(start_ns);
        }
        work > 0
    }

    /// Runs until it is stopped, then until nothing is in flight, for at most `drain_ns` nanoseconds.
    pub(crate) fn run(&mut self, drain_ns: u64) {
        while !self.remote.is_stopping() {
            self.turn();
        }
        self.stopping = true;
        let deadline_ns = self.core.now_ns().saturating_add(drain_ns);
        loop {
            self.turn();
            let now_ns = self.core.now_ns();
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

    fn process_messages(&mut self) -> usize {
        let mut count = 0;
        while count < MESSAGES_PER_TURN_MAX
            && let Some(message) = self.messages.receive()
        {
            count += 1;
            match message {
                ReactorMessage::Run(run) => run(&self.core),
                ReactorMessage::Stats(reply) => {
                    // Include pollers that an earlier message of this turn added.
                    self.register_new_pollers();
                    // The send fails if the requester timed out or was dropped, which is fine.
                    let _ = reply.send(self.stats());
                }
                ReactorMessage::CollectMemory => _ = self.core.pool().collect(),
                ReactorMessage::Stop => self.remote.set_stopping(),
            }
            if count == MESSAGES_PER_TURN_MAX {
                // The mailbox may have been full when memory was returned.
                self.core.pool().collect();
            }
        }
        count
    }

    fn register_new_pollers(&mut self) {
        if self.core.inner().new_pollers.borrow().is_empty() {
            return;
        }
        let added = std::mem::take(&mut *self.core.inner().new_pollers.borrow_mut());
        self.pollers.extend(added.into_iter().map(|(poller, period)| RegisteredPoller {
            poller,
            period,
            next_ns: 0,
            busy_ticks: 0,
            runs: 0,
            busy_runs: 0,
            is_finished: false,
        }));
    }

    /// Runs the pollers that are due, from `before` ticks on. An idle poller, which takes as long as reading
    /// the clock, is not timed: its time counts for the next busy one of the turn.
    fn run_pollers(&mut self, now_ns: u64, mut before: u64) -> usize {
        let mut count = 0;
        let mut finished = false;
        for entry in &mut self.pollers {
            if let Period::EveryNs(period_ns) = entry.period {
                if now_ns < entry.next_ns {
                    continue;
                }
                entry.next_ns = now_ns + period_ns;
            }
            entry.runs += 1;
            match entry.poller.poll(now_ns) {
                PollResult::Idle => {}
                PollResult::Busy(some) => {
                    count += some as usize;
                    entry.busy_runs += 1;
                    let after = clock::ticks();
                    entry.busy_ticks += after.wrapping_sub(before);
                    before = after;
                }
                PollResult::Finished => {
                    finished = true;
                    count += 1;
                    entry.is_finished = true;
                }
            }
        }
        if finished {
            self.pollers.retain(|entry| !entry.is_finished);
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
        let now_ns = self.core.now_ns();
        if now_ns.saturating_sub(self.stall_reported_ns) < 1_000_000_000 && self.stall_reported_ns != 0 {
            return;
        }
        self.stall_reported_ns = now_ns;
        let busiest = self.pollers.iter().max_by_key(|entry| entry.busy_ticks);
        log::warn!(
            target: "reactor",
            "{} on core {}: one turn took {} ms (limit {} ms; busiest poller {}); the core was blocked or \
             taken away",
            self.name,
            self.remote.cpu,
            ns / 1_000_000,
            self.stall_ns / 1_000_000,
            busiest.map_or("none", |entry| entry.poller.name()),
        );
    }

    fn idle_or_sleep(&mut self, now_ns: u64) {
        let spin_ns = match self.idle {
            // No PAUSE: no other thread waits for this core, and PAUSE may cause a VM exit in a guest.
            IdlePolicy::Spin => return,
            IdlePolicy::Adaptive { spin_ns } => spin_ns,
            IdlePolicy::Sleep => 0,
        };
        if now_ns.saturating_sub(self.idle_since_ns) < spin_ns {
            return;
        }
        let waker = self.core.event_loop().waker();
        waker.prepare_sleep();
        // A sender after this point sees the sleeping flag and wakes the core; earlier messages are seen
        // below.
        let deadline_ns = self.deadline();
        let now_ns = self.core.now_ns();
        let sleeps = self.messages.is_empty() && deadline_ns.is_none_or(|deadline_ns| deadline_ns > now_ns);
        if sleeps {
            if self.core.event_loop().wait(deadline_ns.map(|deadline_ns| deadline_ns - now_ns)) > 0 {
                self.core.inner().executor.wake_event_waiters();
            }
            let end = clock::ticks();
            let counters = &self.remote.counters;
            add(&counters.sleep_ns, clock::ticks_to_ns(end.saturating_sub(self.turn_end_ticks)));
            add(&counters.sleeps, 1);
            self.turn_end_ticks = end;
        }
        waker.finish_sleep();
    }

    /// When the reactor must turn again even if nothing wakes it; `Some(0)` for at once.
    pub fn deadline(&self) -> Option<u64> {
        if !self.core.inner().new_pollers.borrow().is_empty() {
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
        self.remote.set_terminated();
    }
}
