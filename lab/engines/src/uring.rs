//! `io_uring` in the papers' modes, and `io_uring_cmd`: NVMe commands to a namespace's generic device, past
//! the block layer.

use memory::Buffer;
use ring::{Channel, Completion, Op, Request, Status};
use sys::{Commands, Dialect, Transfers, UringConfig};

use crate::aside;
use crate::engine::status_of;
use crate::{Config, Engine, File, OpenError};

/// `io_uring`: default (interrupts), with polled completions, with a polling submission thread, or both.
pub type Uring = Ring<Transfers>;
/// `io_uring_cmd`: commands to `/dev/ngXnY`, in any of io_uring's modes.
pub type Passthrough = Ring<Commands>;

/// What a ring's results mean.
pub trait Results: Dialect {
    /// The status, of a result for a request of so many bytes.
    fn status(op: Op, result: i64, wanted: u64) -> Status;
}

impl Results for Transfers {
    #[inline]
    fn status(op: Op, result: i64, wanted: u64) -> Status {
        status_of(op, result, wanted)
    }
}

impl Results for Commands {
    /// The result is 0, a negative error number, or the status field of the completion queue entry.
    #[inline]
    fn status(op: Op, result: i64, _: u64) -> Status {
        match result {
            0 => Status::SUCCESS,
            1.. => Status::from_field(result as u16),
            _ => status_of(op, result, 0),
        }
    }
}

/// An io_uring, and what needed none.
pub struct Ring<D: Dialect> {
    ring: sys::Uring<File, D>,
    /// Discards, which end at once.
    done: Vec<Completion<Buffer>>,
    reap_max: usize,
}

impl<D: Results> Ring<D> {
    pub(crate) fn open(
        config: &Config,
        files: Vec<File>,
        requests: &[Request<Buffer>],
    ) -> Result<Ring<D>, OpenError> {
        let engine = config.kind.name();
        let too_many = |count, what, max| OpenError::TooMany { engine, count, what, max };
        let depth_max = sys::Uring::<File, D>::DEPTH_MAX;
        if config.depth > depth_max {
            return Err(too_many(config.depth as usize, "entries", depth_max as usize));
        }
        let files_max = sys::Uring::<File, D>::REGISTERED_MAX;
        if config.register_files && files.len() > files_max {
            return Err(too_many(files.len(), "files", files_max));
        }
        let settings = UringConfig {
            depth: config.depth,
            polling: config.polling,
            nonvectored: config.nonvectored,
            data_sync: config.data_sync,
            batch_max: config.batch_max,
        };
        let mut ring = sys::Uring::new(&settings, files).map_err(|error| OpenError::Kernel {
            engine,
            call: "io_uring_setup",
            hint: match error.raw_os_error() {
                Some(libc::EPERM) => "; kernel.io_uring_disabled=0 as root allows it",
                Some(libc::EINVAL) if config.polling.submission_cpu.is_some() => {
                    "; is the core of sqthread_poll_cpu there, and online?"
                }
                Some(libc::ENOMEM) => "; raise the limit of locked memory (ulimit -l)",
                _ => "",
            },
            error,
        })?;
        let kernel = |call, hint| move |error| OpenError::Kernel { engine, call, error, hint };
        if config.register_files {
            ring.register_files().map_err(kernel("registerfiles", ""))?;
        }
        if config.fixed_buffers {
            let hint = "; raise the limit of locked memory (ulimit -l)";
            ring.register_buffers(requests).map_err(kernel("fixedbufs", hint))?;
        }
        let reap_max = if config.reap_max == 0 { usize::MAX } else { config.reap_max as usize };
        Ok(Ring { ring, done: Vec::new(), reap_max })
    }
}

impl<D: Results> Channel for Ring<D> {
    type Request = Request<Buffer>;
    type Completion = Completion<Buffer>;

    fn submit(&mut self, batch: &mut Vec<Request<Buffer>>) {
        loop {
            let count = batch.len().min(self.ring.room() - self.done.len());
            let next = aside::position(&batch[..count]);
            let taken = self.ring.submit(batch, next);
            if taken < next || next == count {
                return;
            }
            self.done.push(aside::perform(batch.remove(0), self.ring.files()));
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion<Buffer>>) -> usize {
        let count = self.done.len();
        if count > 0 {
            sink.append(&mut self.done);
        }
        count
            + self.ring.reap(self.reap_max, sink, |file, request, result| {
                let wanted = u64::from(request.blocks) * u64::from(file.block_bytes());
                D::status(request.op, result, wanted)
            })
    }
}

impl<D: Results> Engine for Ring<D> {
    fn wait(&mut self, timeout_ns: u64) {
        if self.done.is_empty() {
            self.ring.wait(timeout_ns);
        }
    }

    fn in_flight(&self) -> usize {
        self.ring.in_flight() + self.done.len()
    }

    fn submission_thread(&self) -> Option<u32> {
        self.ring.submission_thread()
    }
}
