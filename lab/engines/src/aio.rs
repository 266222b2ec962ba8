//! `libaio`: the kernel's older asynchronous interface, by its system calls.

use memory::Buffer;
use ring::{Channel, Completion, Request};

use crate::aside;
use crate::engine::status_of;
use crate::{Config, Engine, File, OpenError};

/// A context of the kernel's asynchronous I/O.
pub struct Aio {
    context: sys::Aio<File>,
    /// Discards, and what the kernel refused: both end at once.
    done: Vec<Completion<Buffer>>,
    batch_max: usize,
    reap_max: usize,
}

impl Aio {
    pub(crate) fn open(config: &Config, files: Vec<File>) -> Result<Aio, OpenError> {
        let context = sys::Aio::new(config.depth, files, config.data_sync, config.userspace_reap);
        let context = context.map_err(|error| OpenError::Kernel {
            engine: "libaio",
            call: "io_setup",
            error,
            hint: "; more than fs.aio-max-nr in all processes? lower --iodepth or --numjobs",
        })?;
        let limit = |value: u32| if value == 0 { usize::MAX } else { value as usize };
        Ok(Aio {
            context,
            done: Vec::new(),
            batch_max: limit(config.batch_max),
            reap_max: limit(config.reap_max),
        })
    }
}

impl Channel for Aio {
    type Request = Request<Buffer>;
    type Completion = Completion<Buffer>;

    fn submit(&mut self, batch: &mut Vec<Request<Buffer>>) {
        loop {
            let room = self.context.room() - self.done.len();
            let count = batch.len().min(room).min(self.batch_max);
            if count == 0 {
                return;
            }
            let next = aside::position(&batch[..count]);
            if next == 0 {
                self.done.push(aside::perform(batch.remove(0), self.context.files()));
                continue;
            }
            match self.context.submit(batch, next) {
                Ok(taken) if taken == next => {}
                Ok(_) => return,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN | libc::EINTR) => return,
                    number => {
                        // The first is at fault; it ends, the others are tried again.
                        let request = batch.remove(0);
                        let result = -i64::from(number.unwrap_or(libc::EIO));
                        let status = status_of(request.op, result, 0);
                        self.done.push(request.complete(status));
                    }
                },
            }
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion<Buffer>>) -> usize {
        let count = self.done.len();
        if count > 0 {
            sink.append(&mut self.done);
        }
        count
            + self.context.reap(self.reap_max, sink, |file, request, result| {
                let wanted = u64::from(request.blocks) * u64::from(file.block_bytes());
                status_of(request.op, result, wanted)
            })
    }
}

impl Engine for Aio {
    fn wait(&mut self, timeout_ns: u64) {
        if self.done.is_empty() {
            self.context.wait(self.reap_max, timeout_ns);
        }
    }

    fn in_flight(&self) -> usize {
        self.context.in_flight() + self.done.len()
    }
}
