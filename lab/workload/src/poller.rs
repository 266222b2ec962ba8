//! A job on a reactor.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;

use memory::Buffer;
use reactor::{Poller, Shutdown, Work};
use ring::{Channel, Completion, Request};

use crate::generator::Generator;
use crate::result::JobResult;

/// Any ring of block I/O.
pub type DynChannel = dyn Channel<Request = Request<Buffer>, Completion = Completion<Buffer>>;

/// What other threads see of a job while it runs, and how they stop it.
#[derive(Debug, Default)]
pub struct Progress {
    ios: AtomicU64,
    faults: AtomicU64,
    go: AtomicBool,
    stop: AtomicBool,
}

impl Progress {
    /// Whether the job is to end.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// What others are to see.
    pub(crate) fn publish(&self, ios: u64, faults: u64) {
        self.ios.store(ios, Ordering::Relaxed);
        self.faults.store(faults, Ordering::Relaxed);
    }

    /// I/Os that completed.
    pub fn ios(&self) -> u64 {
        self.ios.load(Ordering::Relaxed)
    }

    /// Failed I/Os and wrong blocks.
    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    /// Lets the job begin.
    pub fn go(&self) {
        self.go.store(true, Ordering::Release);
    }

    /// Asks the job to end.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Drives a [`Generator`], once [`Progress::go`] was called, every turn of its reactor and sends the result when the job is over.
pub struct JobPoller {
    generator: Option<Generator>,
    channel: Box<DynChannel>,
    progress: Arc<Progress>,
    results: mpsc::Sender<(u32, JobResult)>,
    /// The job's number among its copies, and that of its logs.
    seat: (u32, u32),
    now_ns: u64,
}

impl JobPoller {
    /// The result goes to `results` with the first of `seat`, the job's number; the second is the number
    /// of its logs. Nothing is sent if the reactor ends first.
    pub fn new(
        generator: Generator,
        channel: Box<DynChannel>,
        progress: Arc<Progress>,
        results: mpsc::Sender<(u32, JobResult)>,
        seat: (u32, u32),
    ) -> JobPoller {
        JobPoller { generator: Some(generator), channel, progress, results, seat, now_ns: 0 }
    }
}

impl Poller for JobPoller {
    fn name(&self) -> &str {
        "workload"
    }

    fn poll(&mut self, now_ns: u64) -> Work {
        let Some(generator) = &mut self.generator else { return Work::Finished };
        self.now_ns = now_ns;
        if !self.progress.go.load(Ordering::Acquire) {
            let stopped = self.progress.stop.load(Ordering::Relaxed);
            return if stopped { Work::Finished } else { Work::None };
        }
        if self.progress.stop.load(Ordering::Relaxed) {
            generator.stop();
        }
        let count = generator.turn(&mut *self.channel);
        self.progress.ios.store(generator.completed(), Ordering::Relaxed);
        self.progress.faults.store(generator.faults(), Ordering::Relaxed);
        if !generator.is_over() {
            return Work::count(count);
        }
        if let Some(generator) = self.generator.take() {
            // Nobody listens any more: the result is not wanted.
            let mut result = generator.finish(self.seat.1);
            result.number = self.seat.0;
            let _ = self.results.send((self.seat.0, result));
        }
        Work::Finished
    }

    fn deadline(&self) -> Option<u64> {
        let generator = self.generator.as_ref()?.deadline_ns(self.now_ns);
        [generator, self.channel.deadline()].into_iter().flatten().min()
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        let Some(generator) = &mut self.generator else { return Shutdown::Done };
        if !self.progress.go.load(Ordering::Acquire) {
            return Shutdown::Done;
        }
        generator.stop();
        if generator.is_over() { Shutdown::Done } else { Shutdown::Draining }
    }
}
