//! `null`: an engine without I/O.

use block_io::{Channel, Completion, Request, Status};
use dma::Data;

use crate::{EngineConfig, IoEngine};

/// Completes every request at the next poll, to measure the overhead of the caller.
pub struct NullEngine {
    queue: Vec<Request<Data>>,
    depth: usize,
}

impl NullEngine {
    pub(crate) fn new(config: &EngineConfig) -> NullEngine {
        NullEngine { queue: Vec::with_capacity(config.depth as usize), depth: config.depth as usize }
    }
}

impl Channel for NullEngine {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    #[inline]
    fn submit(&mut self, batch: &mut Vec<Request<Data>>) {
        if self.queue.is_empty() && batch.len() <= self.depth {
            std::mem::swap(&mut self.queue, batch);
            return;
        }
        let count = batch.len().min(self.depth - self.queue.len());
        self.queue.extend(batch.drain(..count));
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Completion<Data>>) -> usize {
        let count = self.queue.len();
        sink.extend(self.queue.drain(..).map(|request| request.complete(Status::SUCCESS)));
        count
    }
}

impl IoEngine for NullEngine {
    fn wait(&mut self, timeout_ns: u64) {
        if self.queue.is_empty() {
            std::thread::sleep(std::time::Duration::from_nanos(timeout_ns));
        }
    }

    fn in_flight(&self) -> usize {
        self.queue.len()
    }
}
