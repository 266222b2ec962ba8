//! Reactors on their own threads, and handles for other threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::blocking;
use crate::core::{Core, MailboxSender};
use crate::mailbox;
use crate::reactor::{Reactor, ReactorConfig, StartError};
use crate::stats::{ReactorCounters, ReactorStats};

/// A set of running reactors; dropping it stops them.
pub struct Reactors {
    remotes: Vec<ReactorHandle>,
    threads: Vec<JoinHandle<()>>,
    uring_error: Option<std::io::Error>,
}

/// A handle to a reactor, usable on any thread.
///
/// It posts closures and requests statistics through the reactor's mailbox. A clone costs a reference count.
#[derive(Clone)]
pub struct ReactorHandle(pub(crate) Arc<HandleInner>);

/// The reactor has stopped, or its mailbox has been full for a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the reactor has stopped or accepts no messages")]
pub struct ReactorUnavailable;

pub(crate) struct HandleInner {
    pub(crate) index: usize,
    pub(crate) cpu: u32,
    sender: MailboxSender<ReactorMessage>,
    stopping: AtomicBool,
    terminated: AtomicBool,
    clock: os::clock::Clock,
    pub(crate) counters: ReactorCounters,
}

pub(crate) enum ReactorMessage {
    Run(Box<dyn FnOnce(&Core) + Send>),
    Stats(mpsc::SyncSender<ReactorStats>),
    /// Another core is done with memory of this core's pool.
    CollectMemory,
    Stop,
}

/// Maximum time that a stopping reactor waits for operations in flight, in nanoseconds.
const DRAIN_NS: u64 = 10_000_000_000;
/// Maximum number of attempts to post a message to a full mailbox, 1 ms apart.
const POST_TRIES_MAX: u32 = 1000;

impl Reactors {
    /// Starts one reactor on each core of `config.cpus` and returns once all of them run.
    ///
    /// Without `event_loop.backend` all of them use io_uring, or all epoll if one cannot have a ring: a limit
    /// of locked memory or of descriptors may be enough for some, and a device on a file has to work on each
    /// core.
    pub fn start(config: &ReactorConfig) -> Result<Reactors, StartError> {
        if config.event_loop.backend.is_some() {
            return Reactors::start_all(config);
        }
        let with = |backend| {
            let event_loop = os::EventLoopConfig { backend: Some(backend), ..config.event_loop };
            Reactors::start_all(&ReactorConfig { event_loop, ..config.clone() })
        };
        match with(os::EventBackend::Uring) {
            Err(StartError::Events { source, .. }) => {
                let mut reactors = with(os::EventBackend::Epoll)?;
                reactors.uring_error = Some(source);
                Ok(reactors)
            }
            started => started,
        }
    }

    fn start_all(config: &ReactorConfig) -> Result<Reactors, StartError> {
        let mut reactors = Reactors { remotes: Vec::new(), threads: Vec::new(), uring_error: None };
        for (index, cpu) in config.cpus.cpus().iter().copied().enumerate() {
            let (started, outcome) = mpsc::sync_channel(1);
            let config = config.clone();
            let name = format!("{}-{cpu}", config.name);
            let run = move || match Reactor::for_core(&config, index) {
                Ok(mut reactor) => {
                    let _ = started.send(Ok(reactor.handle()));
                    reactor.run(DRAIN_NS);
                }
                Err(error) => {
                    let _ = started.send(Err(error));
                }
            };
            let thread = std::thread::Builder::new().name(name).spawn(run);
            reactors.threads.push(thread.map_err(|source| StartError::Thread { cpu, source })?);
            match outcome.recv() {
                Ok(remote) => reactors.remotes.push(remote?),
                Err(_) => unreachable!("a reactor's thread reports its start before it ends"),
            }
        }
        Ok(reactors)
    }

    /// The handles, by index of the core in the set.
    pub fn handles(&self) -> &[ReactorHandle] {
        &self.remotes
    }

    /// Why the reactors use epoll although it was not asked for: the kernel refused one of them a ring.
    pub fn uring_error(&self) -> Option<&std::io::Error> {
        self.uring_error.as_ref()
    }

    /// Stops every reactor once nothing is in flight, after at most ten seconds each.
    pub fn stop(mut self) {
        self.stop_all();
    }

    fn stop_all(&mut self) {
        for remote in &self.remotes {
            remote.stop();
        }
        for thread in self.threads.drain(..) {
            // A panic has already been reported on standard error.
            let _ = thread.join();
        }
    }
}

impl Drop for Reactors {
    fn drop(&mut self) {
        self.stop_all();
    }
}

impl ReactorHandle {
    /// Queues `work` to run on the core. Messages of one thread run in order. Waits up to a second if the
    /// mailbox is full.
    pub fn post(&self, work: impl FnOnce(&Core) + Send + 'static) -> Result<(), ReactorUnavailable> {
        self.send(ReactorMessage::Run(Box::new(work)))
    }

    /// Runs `work` on the core and waits for its result. Must not be called on a reactor, which it would
    /// block.
    pub fn call<R: Send + 'static>(
        &self,
        work: impl FnOnce(&Core) -> R + Send + 'static,
    ) -> Result<R, ReactorUnavailable> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.post(move |core| {
            let _ = sender.send(work(core));
        })?;
        self.wait(&receiver)
    }

    /// The reactor's statistics, with those of each poller. Blocks like [`call`](Self::call).
    pub fn stats(&self) -> Result<ReactorStats, ReactorUnavailable> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.send(ReactorMessage::Stats(sender))?;
        self.wait(&receiver)
    }

    /// As [`stats`](Self::stats), but waits for `timeout` at most.
    pub fn stats_within(&self, timeout: Duration) -> Result<ReactorStats, ReactorUnavailable> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.send(ReactorMessage::Stats(sender))?;
        blocking::receive_timeout(&receiver, timeout).map_err(|_| ReactorUnavailable)
    }

    /// Index among the reactors of the program: see [`ReactorConfig::first_index`].
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// The CPU that it was started for.
    pub fn cpu(&self) -> u32 {
        self.0.cpu
    }

    /// The core's clock. Clocks of one machine agree; each simulation has its own.
    pub fn clock(&self) -> &os::clock::Clock {
        &self.0.clock
    }

    /// Waits for a reply or for the end of the reactor, which never processes messages posted as it ended.
    fn wait<R>(&self, reply: &mpsc::Receiver<R>) -> Result<R, ReactorUnavailable> {
        loop {
            match blocking::receive_timeout(reply, Duration::from_millis(100)) {
                Ok(value) => return Ok(value),
                Err(mpsc::RecvTimeoutError::Timeout) if !self.0.terminated.load(Ordering::Acquire) => {}
                Err(_) => return reply.try_recv().map_err(|_| ReactorUnavailable),
            }
        }
    }

    fn stop(&self) {
        if self.send(ReactorMessage::Stop).is_err() {
            self.0.set_stopping();
        }
    }

    fn send(&self, mut message: ReactorMessage) -> Result<(), ReactorUnavailable> {
        for _ in 0..POST_TRIES_MAX {
            if self.0.is_stopping() {
                return Err(ReactorUnavailable);
            }
            match self.0.sender.send(message) {
                Ok(()) => return Ok(()),
                Err(back) => message = back,
            }
            // Full: control messages are rare, so the core is far behind. No event reports free space,
            // and control threads may block.
            blocking::sleep(Duration::from_millis(1));
        }
        Err(ReactorUnavailable)
    }
}

impl HandleInner {
    pub(crate) fn new(
        index: usize,
        cpu: u32,
        queue: mailbox::Sender<ReactorMessage>,
        waker: os::Waker,
        clock: os::clock::Clock,
    ) -> Self {
        let sender = MailboxSender::new(queue, waker);
        HandleInner {
            index,
            cpu,
            sender,
            stopping: AtomicBool::new(false),
            terminated: AtomicBool::new(false),
            clock,
            counters: ReactorCounters::default(),
        }
    }

    /// Has the reactor collect memory that another core returned. If the mailbox is full, it does so when it
    /// has processed some of it.
    pub(crate) fn collect_memory(&self) {
        let _ = self.sender.send(ReactorMessage::CollectMemory);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    pub(crate) fn set_stopping(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Messages posted after this call are never processed.
    pub(crate) fn set_terminated(&self) {
        self.set_stopping();
        self.terminated.store(true, Ordering::Release);
    }
}
