//! `io_uring`, and `io_uring_cmd`: NVMe passthrough to the generic device of a namespace, bypassing the
//! block layer.

use block_io::{Channel, Completion, Op, Request, Status};
use dma::Data;
use os::{FileIo, NvmePassthrough, SqeFormat, UringQueueConfig};

use crate::engine::status_of;
use crate::synchronous;
use crate::{EngineConfig, EngineFile, EngineOpenError, IoEngine};

/// `io_uring`: interrupt-driven, with polled completions (IOPOLL), a submission polling thread (SQPOLL), or
/// both.
pub type UringEngine = RingEngine<FileIo>;
/// `io_uring_cmd`: NVMe commands to `/dev/ngXnY`, in any mode of io_uring.
pub type PassthroughEngine = RingEngine<NvmePassthrough>;

/// Conversion of a completion's result to an NVMe status.
pub trait ResultDecoder: SqeFormat {
    /// The status for `result` of a request of `wanted` bytes.
    fn status(op: Op, result: i64, wanted: u64) -> Status;
}

impl ResultDecoder for FileIo {
    #[inline]
    fn status(op: Op, result: i64, wanted: u64) -> Status {
        status_of(op, result, wanted)
    }
}

impl ResultDecoder for NvmePassthrough {
    /// The result is 0, a negative errno, or the status field of the NVMe completion queue entry.
    #[inline]
    fn status(op: Op, result: i64, _: u64) -> Status {
        match result {
            0 => Status::SUCCESS,
            1.. => Status::from_field(result as u16),
            _ => status_of(op, result, 0),
        }
    }
}

/// An engine over one io_uring instance.
pub struct RingEngine<D: SqeFormat> {
    ring: os::UringQueue<EngineFile, D>,
    /// Completions of discards, which finish in `submit`.
    done: Vec<Completion<Data>>,
    reap_max: usize,
}

impl<D: ResultDecoder> RingEngine<D> {
    pub(crate) fn open(
        config: &EngineConfig,
        files: Vec<EngineFile>,
        requests: &[Request<Data>],
    ) -> Result<RingEngine<D>, EngineOpenError> {
        let engine = config.kind.name();
        let too_many = |count, what, max| EngineOpenError::TooMany { engine, count, what, max };
        let depth_max = os::UringQueue::<EngineFile, D>::DEPTH_MAX;
        if config.depth > depth_max {
            return Err(too_many(config.depth as usize, "entries", depth_max as usize));
        }
        let files_max = os::UringQueue::<EngineFile, D>::REGISTERED_MAX;
        if config.register_files && files.len() > files_max {
            return Err(too_many(files.len(), "files", files_max));
        }
        let settings = UringQueueConfig {
            depth: config.depth,
            polling: config.polling,
            nonvectored: config.nonvectored,
            data_sync: config.data_sync,
            batch_max: config.batch_max,
        };
        let mut ring = os::UringQueue::new(&settings, files).map_err(|error| EngineOpenError::Kernel {
            engine,
            call: "io_uring_setup",
            hint: match error.raw_os_error() {
                Some(libc::EPERM) => "; root can enable it with sysctl kernel.io_uring_disabled=0",
                Some(libc::EINVAL) if config.polling.sqpoll_cpu.is_some() => {
                    "; does the CPU of sqthread_poll_cpu exist, and is it online?"
                }
                Some(libc::ENOMEM) => "; raise the limit of locked memory (ulimit -l)",
                _ => "",
            },
            error,
        })?;
        if let Some(priorities) = &config.priorities {
            ring.set_priorities(priorities.clone());
        }
        let kernel_error = |call, hint| move |error| EngineOpenError::Kernel { engine, call, error, hint };
        if config.register_files {
            ring.register_files().map_err(kernel_error("registerfiles", ""))?;
        }
        if config.fixed_buffers {
            let hint = "; raise the limit of locked memory (ulimit -l)";
            ring.register_buffers(requests).map_err(kernel_error("fixedbufs", hint))?;
        }
        let reap_max = if config.reap_max == 0 { usize::MAX } else { config.reap_max as usize };
        Ok(RingEngine { ring, done: Vec::new(), reap_max })
    }
}

impl<D: ResultDecoder> Channel for RingEngine<D> {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    fn submit(&mut self, batch: &mut Vec<Request<Data>>) {
        loop {
            let count = batch.len().min(self.ring.room() - self.done.len());
            let next = synchronous::first_synchronous(&batch[..count]);
            let taken = self.ring.submit(batch, next);
            if taken < next || next == count {
                return;
            }
            self.done.push(synchronous::perform_synchronous(batch.remove(0), self.ring.files()));
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion<Data>>) -> usize {
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

impl<D: ResultDecoder> IoEngine for RingEngine<D> {
    fn wait(&mut self, timeout_ns: u64) {
        if self.done.is_empty() {
            self.ring.wait(timeout_ns);
        }
    }

    fn in_flight(&self) -> usize {
        self.ring.in_flight() + self.done.len()
    }

    fn submission_thread(&self) -> Option<u32> {
        self.ring.sqpoll_thread_id()
    }
}
