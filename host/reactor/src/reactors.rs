//! Reactors on threads of their own, and how other threads reach them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::core::{Core, Sender};
use crate::mailbox;
use crate::reactor::{Config, Reactor, StartError};
use crate::stats::{Counters, ReactorStats};

/// A set of running reactors. Dropped, it stops them.
pub struct Reactors {
    remotes: Vec<Remote>,
    threads: Vec<JoinHandle<()>>,
}

/// One reactor, seen from any thread.
#[derive(Clone)]
pub struct Remote(pub(crate) Arc<RemoteInner>);

/// The reactor has stopped, or its mailbox has been full for a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the reactor has stopped or does not take messages")]
pub struct Gone;

pub(crate) struct RemoteInner {
    pub(crate) index: usize,
    cpu: u32,
    sender: Sender<Message>,
    stopping: AtomicBool,
    ended: AtomicBool,
    pub(crate) counters: Counters,
}

pub(crate) enum Message {
    Run(Box<dyn FnOnce(&Core) + Send>),
    Stats(mpsc::SyncSender<ReactorStats>),
    Stop,
}

/// How long a reactor that stops waits for what is in flight.
const DRAIN_NS: u64 = 10_000_000_000;
/// How long a message waits for room.
const POST_TRIES_MAX: u32 = 1000;

impl Reactors {
    /// Starts one reactor on each core of `config.cpus` and returns when all of them run.
    pub fn start(config: &Config) -> Result<Reactors, StartError> {
        let mut reactors = Reactors { remotes: Vec::new(), threads: Vec::new() };
        for (index, cpu) in config.cpus.cpus().iter().copied().enumerate() {
            let (started, outcome) = mpsc::sync_channel(1);
            let config = config.clone();
            let run = move || match Reactor::on(&config, index) {
                Ok(mut reactor) => {
                    let _ = started.send(Ok(reactor.remote()));
                    reactor.run(DRAIN_NS);
                }
                Err(error) => {
                    let _ = started.send(Err(error));
                }
            };
            let thread = std::thread::Builder::new().name(format!("reactor-{cpu}")).spawn(run);
            reactors.threads.push(thread.map_err(|source| StartError::Thread { cpu, source })?);
            match outcome.recv() {
                Ok(remote) => reactors.remotes.push(remote?),
                Err(_) => unreachable!("a reactor's thread answers before it ends"),
            }
        }
        Ok(reactors)
    }

    /// The reactors, by index.
    pub fn remotes(&self) -> &[Remote] {
        &self.remotes
    }

    /// Stops every reactor once nothing is in flight, at the latest after ten seconds.
    pub fn stop(mut self) {
        self.stop_all();
    }

    fn stop_all(&mut self) {
        for remote in &self.remotes {
            remote.stop();
        }
        for thread in self.threads.drain(..) {
            // A reactor that panicked has already said why on standard error.
            let _ = thread.join();
        }
    }
}

impl Drop for Reactors {
    fn drop(&mut self) {
        self.stop_all();
    }
}

impl Remote {
    /// Runs `work` on the core, soon. Order is kept among the messages of one thread.
    pub fn post(&self, work: impl FnOnce(&Core) + Send + 'static) -> Result<(), Gone> {
        self.send(Message::Run(Box::new(work)))
    }

    /// Runs `work` on the core and waits for its answer. Not to be called on a reactor.
    pub fn call<R: Send + 'static>(&self, work: impl FnOnce(&Core) -> R + Send + 'static) -> Result<R, Gone> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.post(move |core| {
            let _ = sender.send(work(core));
        })?;
        self.wait(&receiver)
    }

    /// Where the reactor's time went, per poller too.
    pub fn stats(&self) -> Result<ReactorStats, Gone> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.send(Message::Stats(sender))?;
        self.wait(&receiver)
    }

    /// Position among the reactors that were started together, from 0.
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// The core that it was started for.
    pub fn cpu(&self) -> u32 {
        self.0.cpu
    }

    /// An answer, or the end of the reactor: what was posted as it ended is never looked at.
    fn wait<R>(&self, answer: &mpsc::Receiver<R>) -> Result<R, Gone> {
        loop {
            match answer.recv_timeout(Duration::from_millis(100)) {
                Ok(answer) => return Ok(answer),
                Err(mpsc::RecvTimeoutError::Timeout) if !self.0.ended.load(Ordering::Acquire) => {}
                Err(_) => return answer.try_recv().map_err(|_| Gone),
            }
        }
    }

    fn stop(&self) {
        if self.send(Message::Stop).is_err() {
            self.0.set_stopping();
        }
    }

    fn send(&self, mut message: Message) -> Result<(), Gone> {
        for _ in 0..POST_TRIES_MAX {
            if self.0.is_stopping() {
                return Err(Gone);
            }
            match self.0.sender.send(message) {
                Ok(()) => return Ok(()),
                Err(back) => message = back,
            }
            // Full: control messages are rare, so the core is far behind. There is no event for
            // room, and control threads may wait.
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(Gone)
    }
}

impl RemoteInner {
    pub(crate) fn new(index: usize, cpu: u32, queue: mailbox::Sender<Message>, waker: sys::Waker) -> Self {
        let sender = Sender::new(queue, waker);
        RemoteInner {
            index,
            cpu,
            sender,
            stopping: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            counters: Counters::default(),
        }
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    pub(crate) fn set_stopping(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Nothing that is posted from here on is looked at.
    pub(crate) fn set_ended(&self) {
        self.set_stopping();
        self.ended.store(true, Ordering::Release);
    }
}
