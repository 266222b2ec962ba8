//! `psync`, `pvsync2`, `falloc` and `ftruncate`: one blocking system call per I/O; and `mmap`, which has none.

use std::io::{IoSlice, IoSliceMut};

use block_io::{Channel, Completion, Op, Request};
use dma::Data;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, ReadWriteFlags, pread, preadv2, pwrite, pwritev2};

use crate::engine::status_of;
use crate::mapped::MappedFiles;
use crate::{EngineConfig, EngineFile, EngineKind, EngineOpenError, IoEngine};

/// The system call of reads and writes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SyncCall {
    Positioned,
    Vectored,
    Allocate,
    Truncate,
}

/// One I/O at a time: `submit` blocks until it is complete.
pub struct SyncEngine {
    files: Vec<EngineFile>,
    /// With `mmap`.
    mapped: Option<MappedFiles>,
    /// The completion that is not yet polled; at most one.
    done: Vec<Completion<Data>>,
    call: SyncCall,
    flags: ReadWriteFlags,
    data_sync: bool,
}

impl SyncEngine {
    pub(crate) fn new(config: &EngineConfig, files: Vec<EngineFile>) -> SyncEngine {
        let hipri = config.polling.iopoll && config.kind == EngineKind::Pvsync2;
        SyncEngine {
            files,
            mapped: None,
            done: Vec::with_capacity(1),
            call: match config.kind {
                EngineKind::Pvsync2 => SyncCall::Vectored,
                EngineKind::Allocate => SyncCall::Allocate,
                EngineKind::Truncate => SyncCall::Truncate,
                _ => SyncCall::Positioned,
            },
            flags: if hipri { ReadWriteFlags::HIPRI } else { ReadWriteFlags::empty() },
            data_sync: config.data_sync,
        }
    }

    pub(crate) fn mapped(
        config: &EngineConfig,
        files: Vec<EngineFile>,
    ) -> Result<SyncEngine, EngineOpenError> {
        let mapped = Some(MappedFiles::map(&files, config.access_order)?);
        Ok(SyncEngine { mapped, ..SyncEngine::new(config, files) })
    }

    /// Performs a request; returns the number of bytes or a negative errno, and the requested bytes.
    #[inline]
    fn perform(&self, request: &mut Request<Data>) -> (i64, u64) {
        let file = &self.files[request.flow as usize];
        let offset = request.lba * u64::from(file.block_bytes());
        let bytes = u64::from(request.blocks) * u64::from(file.block_bytes());
        if let Some(mapped) = &self.mapped {
            return (mapped.perform(file, request, (offset, bytes)), bytes);
        }
        let result = match (request.op, request.data_mut().and_then(Data::single_mut)) {
            (op @ (Op::Read | Op::Write), Some(buffer)) => {
                assert!(bytes as usize <= buffer.len(), "{bytes} bytes in a buffer of {}", buffer.len());
                self.transfer(file, op, &mut buffer.as_mut_slice()[..bytes as usize], offset)
            }
            (Op::Read | Op::Write, None) => self.transfer_slices(file, request, offset, bytes),
            (Op::Flush, _) => i64::from(file.flush(self.data_sync)),
            (Op::Unmap, _) => i64::from(file.discard(offset, bytes)),
            _ => -i64::from(libc::EOPNOTSUPP),
        };
        (result, bytes)
    }

    /// A block of several buffers.
    fn transfer_slices(
        &self,
        file: &EngineFile,
        request: &mut Request<Data>,
        offset: u64,
        bytes: u64,
    ) -> i64 {
        let op = request.op;
        let Some(data) = request.data_mut() else { return -i64::from(libc::EINVAL) };
        assert!(bytes as usize <= data.len(), "{bytes} bytes in buffers of {}", data.len());
        let is_readable = matches!(self.call, SyncCall::Positioned | SyncCall::Vectored);
        if !is_readable {
            return -i64::from(libc::EOPNOTSUPP);
        }
        loop {
            let result = match op {
                Op::Read => {
                    let mut slices: Vec<IoSliceMut<'_>> =
                        data.parts_mut(0, bytes as usize).map(IoSliceMut::new).collect();
                    preadv2(file, &mut slices, offset, self.flags)
                }
                _ => {
                    let slices: Vec<IoSlice<'_>> = data.parts(0, bytes as usize).map(IoSlice::new).collect();
                    pwritev2(file, &slices, offset, self.flags)
                }
            };
            match result {
                Ok(bytes) => return bytes as i64,
                Err(Errno::INTR) => {}
                Err(error) => return -i64::from(error.raw_os_error()),
            }
        }
    }

    #[inline]
    fn transfer(&self, file: &EngineFile, op: Op, data: &mut [u8], offset: u64) -> i64 {
        loop {
            let result = match (self.call, op) {
                (SyncCall::Positioned, Op::Read) => pread(file, &mut *data, offset),
                (SyncCall::Positioned, _) => pwrite(file, data, offset),
                (SyncCall::Vectored, Op::Read) => {
                    preadv2(file, &mut [IoSliceMut::new(data)], offset, self.flags)
                }
                (SyncCall::Vectored, _) => pwritev2(file, &[IoSlice::new(data)], offset, self.flags),
                (SyncCall::Allocate, op) => allocate(file, op, offset, data.len()),
                (SyncCall::Truncate, _) => rustix::fs::ftruncate(file, offset).map(|()| data.len()),
            };
            match result {
                Ok(bytes) => return bytes as i64,
                Err(Errno::INTR) => {}
                Err(error) => return -i64::from(error.raw_os_error()),
            }
        }
    }
}

/// Allocates a range; for a read, without extending the file.
fn allocate(file: &EngineFile, op: Op, offset: u64, bytes: usize) -> rustix::io::Result<usize> {
    let mode = if op == Op::Read { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() };
    fallocate(file, mode, offset, bytes as u64).map(|()| bytes)
}

impl Channel for SyncEngine {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    #[inline]
    fn submit(&mut self, batch: &mut Vec<Request<Data>>) {
        if !self.done.is_empty() || batch.is_empty() {
            return;
        }
        let request = if batch.len() == 1 { batch.pop() } else { Some(batch.remove(0)) };
        if let Some(mut request) = request {
            let (result, bytes) = self.perform(&mut request);
            let status = status_of(request.op, result, bytes);
            self.done.push(request.complete(status));
        }
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Completion<Data>>) -> usize {
        let count = self.done.len();
        sink.append(&mut self.done);
        count
    }
}

impl IoEngine for SyncEngine {
    fn wait(&mut self, timeout_ns: u64) {
        if self.done.is_empty() {
            std::thread::sleep(std::time::Duration::from_nanos(timeout_ns));
        }
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }
}
