//! The poller that runs a job on a reactor.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

use block_io::{Channel, Completion, Request};
use dma::Data;
use reactor::{PollResult, Poller, Shutdown};

use crate::generator::Generator;
use crate::result::JobResult;

/// Any block I/O channel, as a trait object.
pub type DynChannel = dyn Channel<Request = Request<Data>, Completion = Completion<Data>>;

/// The shared state of a running job: its counters, which other threads read, and the start and stop flags.
#[derive(Debug, Default)]
pub struct Progress {
    ios: AtomicU64,
    faults: AtomicU64,
    begun: AtomicBool,
    stop: AtomicBool,
    ended: AtomicBool,
    /// I/Os and bytes of seconds, where the job's group is judged by them. The runner takes them.
    rates: Mutex<Vec<(u64, u64)>>,
}

impl Progress {
    /// Whether the job was asked to stop.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Publishes the counters.
    pub(crate) fn publish(&self, ios: u64, faults: u64) {
        self.ios.store(ios, Ordering::Relaxed);
        self.faults.store(faults, Ordering::Relaxed);
    }

    /// The job does no more I/O.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Whether the job does no more I/O.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Publishes rates of seconds.
    pub(crate) fn publish_rates(&self, rates: Vec<(u64, u64)>) {
        if !rates.is_empty() {
            sync::lock(&self.rates).extend(rates);
        }
    }

    /// Takes the rates that were published.
    pub(crate) fn take_rates(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut *sync::lock(&self.rates))
    }

    /// Completed I/Os.
    pub fn ios(&self) -> u64 {
        self.ios.load(Ordering::Relaxed)
    }

    /// Failed I/Os and verification mismatches.
    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    /// Lets the job start I/O.
    pub fn begin(&self) {
        self.begun.store(true, Ordering::Release);
    }

    /// Asks the job to stop.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Runs a [`Generator`] on every turn of its reactor after [`Progress::begin`], and sends the result when the job
/// has finished.
pub struct JobPoller {
    generator: Option<Generator>,
    channel: Box<DynChannel>,
    progress: Arc<Progress>,
    results: mpsc::Sender<(u32, JobResult)>,
    /// Number of the job's copy, and number in the names of its log files.
    numbers: (u32, u32),
    now_ns: u64,
}

impl JobPoller {
    /// `numbers` are the number of the job's copy, which is sent with the result, and the number in the names
    /// of its log files. Nothing is sent if the reactor stops first.
    pub fn new(
        generator: Generator,
        channel: Box<DynChannel>,
        progress: Arc<Progress>,
        results: mpsc::Sender<(u32, JobResult)>,
        seat: (u32, u32),
    ) -> JobPoller {
        JobPoller { generator: Some(generator), channel, progress, results, numbers: seat, now_ns: 0 }
    }
}

impl Poller for JobPoller {
    fn name(&self) -> &str {
        "workload"
    }

    fn poll(&mut self, now_ns: u64) -> PollResult {
        let Some(generator) = &mut self.generator else { return PollResult::Finished };
        self.now_ns = now_ns;
        if !self.progress.begun.load(Ordering::Acquire) {
            let stopped = self.progress.stop.load(Ordering::Relaxed);
            return if stopped { PollResult::Finished } else { PollResult::Idle };
        }
        if self.progress.stop.load(Ordering::Relaxed) {
            generator.stop();
        }
        let count = generator.turn(&mut *self.channel);
        self.progress.ios.store(generator.completed(), Ordering::Relaxed);
        self.progress.faults.store(generator.faults(), Ordering::Relaxed);
        self.progress.publish_rates(generator.take_rates());
        if !generator.is_finished() {
            return PollResult::from_count(count);
        }
        self.progress.end();
        if let Some(generator) = self.generator.take() {
            // Sending fails if the receiver is gone; then the result is not needed.
            let mut result = generator.finish(self.numbers.1);
            result.number = self.numbers.0;
            let _ = self.results.send((self.numbers.0, result));
        }
        PollResult::Finished
    }

    fn deadline(&self) -> Option<u64> {
        let generator = self.generator.as_ref()?.deadline_ns(self.now_ns);
        [generator, self.channel.deadline()].into_iter().flatten().min()
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        let Some(generator) = &mut self.generator else { return Shutdown::Done };
        if !self.progress.begun.load(Ordering::Acquire) {
            return Shutdown::Done;
        }
        generator.stop();
        if generator.is_finished() { Shutdown::Done } else { Shutdown::Draining }
    }
}
