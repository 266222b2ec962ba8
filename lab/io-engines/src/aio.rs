//! `libaio`: Linux native asynchronous I/O, through its system calls.

use block_io::{Channel, Completion, Request};
use dma::Data;

use crate::engine::status_of;
use crate::synchronous;
use crate::{EngineConfig, EngineFile, EngineOpenError, IoEngine};

/// An AIO context (`io_setup`).
pub struct AioEngine {
    context: os::AioQueue<EngineFile>,
    /// Completions of requests that finish in `submit`: discards and rejected requests.
    done: Vec<Completion<Data>>,
    batch_max: usize,
    reap_max: usize,
}

impl AioEngine {
    pub(crate) fn open(config: &EngineConfig, files: Vec<EngineFile>) -> Result<AioEngine, EngineOpenError> {
        let context = os::AioQueue::new(config.depth, files, config.data_sync, config.userspace_reap);
        let mut context = context.map_err(|error| EngineOpenError::Kernel {
            engine: "libaio",
            call: "io_setup",
            error,
            hint: "; more than fs.aio-max-nr in all processes? lower --iodepth or --numjobs",
        })?;
        if let Some(priorities) = &config.priorities {
            context.set_priorities(priorities.clone());
        }
        let or_unlimited = |value: u32| if value == 0 { usize::MAX } else { value as usize };
        Ok(AioEngine {
            context,
            done: Vec::new(),
            batch_max: or_unlimited(config.batch_max),
            reap_max: or_unlimited(config.reap_max),
        })
    }
}

impl Channel for AioEngine {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    fn submit(&mut self, batch: &mut Vec<Request<Data>>) {
        loop {
            let room = self.context.room() - self.done.len();
            let count = batch.len().min(room).min(self.batch_max);
            if count == 0 {
                return;
            }
            let next = synchronous::first_synchronous(&batch[..count]);
            if next == 0 {
                self.done.push(synchronous::perform_synchronous(batch.remove(0), self.context.files()));
                continue;
            }
            match self.context.submit(batch, next) {
                Ok(taken) if taken == next => {}
                Ok(_) => return,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN | libc::EINTR) => return,
                    number => {
                        // The first request is invalid: it fails, and the others are retried.
                        let request = batch.remove(0);
                        let result = -i64::from(number.unwrap_or(libc::EIO));
                        let status = status_of(request.op, result, 0);
                        self.done.push(request.complete(status));
                    }
                },
            }
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion<Data>>) -> usize {
        let count = self.done.len();
        if count > 0 {
            sink.append(&mut self.done);
        }
        count
            + self.context.reap(self.reap_max, sink, |file, request, result| {
                let expected_bytes = u64::from(request.blocks) * u64::from(file.block_bytes());
                status_of(request.op, result, expected_bytes)
            })
    }
}

impl IoEngine for AioEngine {
    fn wait(&mut self, timeout_ns: u64) {
        if self.done.is_empty() {
            self.context.wait(self.reap_max, timeout_ns);
        }
    }

    fn in_flight(&self) -> usize {
        self.context.in_flight() + self.done.len()
    }
}
