//! `posixaio`: threads with blocking system calls, as the C library's POSIX AIO.

use std::io;

use block_io::{Channel, Completion, Request};
use dma::Data;

use crate::engine::status_of;
use crate::synchronous;
use crate::{EngineConfig, EngineFile, IoEngine};

/// A queue of threads. One file has one I/O in execution at a time, whatever the depth.
pub struct PosixAioEngine {
    queue: os::ThreadQueue<EngineFile>,
    /// Completions of requests that finish in `submit`: discards and rejected requests.
    done: Vec<Completion<Data>>,
    batch_max: usize,
    reap_max: usize,
}

impl PosixAioEngine {
    pub(crate) fn new(config: &EngineConfig, files: Vec<EngineFile>) -> PosixAioEngine {
        let or_unlimited = |value: u32| if value == 0 { usize::MAX } else { value as usize };
        PosixAioEngine {
            queue: os::ThreadQueue::new(config.depth, files, config.data_sync),
            done: Vec::new(),
            batch_max: or_unlimited(config.batch_max),
            reap_max: or_unlimited(config.reap_max),
        }
    }

    /// Fails the first request: no thread can be started, and without one no later request would complete.
    #[cold]
    fn fail_first(&mut self, batch: &mut Vec<Request<Data>>, error: &io::Error) {
        let request = batch.remove(0);
        let status = status_of(request.op, -i64::from(error.raw_os_error().unwrap_or(libc::EIO)), 0);
        self.done.push(request.complete(status));
    }
}

impl Channel for PosixAioEngine {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    fn submit(&mut self, batch: &mut Vec<Request<Data>>) {
        loop {
            let room = self.queue.room() - self.done.len();
            let count = batch.len().min(room).min(self.batch_max);
            if count == 0 {
                return;
            }
            let next = synchronous::first_synchronous(&batch[..count]);
            if next == 0 {
                // As fio: a trim waits until nothing is in flight, and is executed by the submitter.
                if self.queue.in_flight() > 0 {
                    return;
                }
                self.done.push(synchronous::perform_synchronous(batch.remove(0), self.queue.files()));
                continue;
            }
            if let Err(error) = self.queue.submit(batch, next) {
                self.fail_first(batch, &error);
            }
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion<Data>>) -> usize {
        let count = self.done.len();
        if count > 0 {
            sink.append(&mut self.done);
        }
        count
            + self.queue.reap(self.reap_max, sink, |file, request, result| {
                let expected_bytes = u64::from(request.blocks) * u64::from(file.block_bytes());
                status_of(request.op, result, expected_bytes)
            })
    }
}

impl IoEngine for PosixAioEngine {
    fn wait(&mut self, timeout_ns: u64) {
        if self.done.is_empty() {
            self.queue.wait(timeout_ns);
        }
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight() + self.done.len()
    }

    fn worker_threads(&self) -> Vec<u32> {
        self.queue.thread_ids()
    }
}
