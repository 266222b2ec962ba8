//! `psync` and `pvsync2`: a system call an I/O.

use std::os::fd::RawFd;

use memory::Buffer;
use ring::{Channel, Completion, Op, Request};

use crate::engine::status_of;
use crate::{Config, Engine, File, Kind};

/// One I/O at a time: submitting is doing.
pub struct Sync {
    files: Vec<File>,
    /// Not yet polled; at most one.
    done: Vec<Completion<Buffer>>,
    vectored: bool,
    flags: libc::c_int,
    data_sync: bool,
}

impl Sync {
    pub(crate) fn new(config: &Config, files: Vec<File>) -> Sync {
        let hipri = config.polling.completion && config.kind == Kind::Pvsync2;
        Sync {
            files,
            done: Vec::with_capacity(1),
            vectored: config.kind == Kind::Pvsync2,
            flags: if hipri { libc::RWF_HIPRI } else { 0 },
            data_sync: config.data_sync,
        }
    }

    /// Does it; bytes, or a negative error number.
    #[inline]
    fn perform(&self, request: &Request<Buffer>) -> (i64, u64) {
        let file = &self.files[request.flow as usize];
        let offset = request.lba * u64::from(file.block_bytes());
        let bytes = u64::from(request.blocks) * u64::from(file.block_bytes());
        let result = match (request.op, &request.buffer) {
            (Op::Read | Op::Write, Some(buffer)) => {
                assert!(bytes as usize <= buffer.len(), "{bytes} bytes in a buffer of {}", buffer.len());
                self.transfer(file.raw_fd(), request.op, buffer, bytes as usize, offset as libc::off_t)
            }
            (Op::Flush, _) => i64::from(file.flush(self.data_sync)),
            (Op::Unmap, _) => i64::from(file.discard(offset, bytes)),
            _ => -i64::from(libc::EOPNOTSUPP),
        };
        (result, bytes)
    }

    #[inline]
    fn transfer(&self, fd: RawFd, op: Op, buffer: &Buffer, bytes: usize, offset: libc::off_t) -> i64 {
        let start = buffer.as_ptr().cast::<libc::c_void>();
        let vector = libc::iovec { iov_base: start, iov_len: bytes };
        loop {
            let result = match (self.vectored, op) {
                // SAFETY: the buffer is held and at least `bytes` long; the kernel is done with it on return.
                (false, Op::Read) => unsafe { libc::pread(fd, start, bytes, offset) },
                // SAFETY: as above.
                (false, _) => unsafe { libc::pwrite(fd, start, bytes, offset) },
                // SAFETY: as above, and the vector lives until the call returns.
                (true, Op::Read) => unsafe { libc::preadv2(fd, &raw const vector, 1, offset, self.flags) },
                // SAFETY: as above.
                (true, _) => unsafe { libc::pwritev2(fd, &raw const vector, 1, offset, self.flags) },
            };
            if result >= 0 {
                return result as i64;
            }
            let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            if error != libc::EINTR {
                return -i64::from(error);
            }
        }
    }
}

impl Channel for Sync {
    type Request = Request<Buffer>;
    type Completion = Completion<Buffer>;

    #[inline]
    fn submit(&mut self, batch: &mut Vec<Request<Buffer>>) {
        if !self.done.is_empty() || batch.is_empty() {
            return;
        }
        let request = if batch.len() == 1 { batch.pop() } else { Some(batch.remove(0)) };
        if let Some(request) = request {
            let (result, bytes) = self.perform(&request);
            let status = status_of(request.op, result, bytes);
            self.done.push(request.complete(status));
        }
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Completion<Buffer>>) -> usize {
        let count = self.done.len();
        sink.append(&mut self.done);
        count
    }
}

impl Engine for Sync {
    fn wait(&mut self, timeout_ns: u64) {
        if self.done.is_empty() {
            std::thread::sleep(std::time::Duration::from_nanos(timeout_ns));
        }
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }
}
