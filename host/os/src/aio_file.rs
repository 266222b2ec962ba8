//! A file with a context of Linux AIO, for a core whose event loop may have no io_uring.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use dma::Data;
use rustix::event::{EventfdFlags, eventfd};

use crate::aio_queue::{AioContext, FDSYNC, IoEvent, Iocb, PREAD, PREADV, PWRITE, PWRITEV, SIGNAL_EVENTFD};
use crate::drain::drain;
use crate::event_loop::{EventCompletion, FileOperation, RejectedOperation, WriteMode};
use crate::vectors::{IoVectors, check_access};

/// How long drop waits for operations in flight.
const DROP_TIME_MAX: Duration = Duration::from_secs(5);

/// Submissions that end within the system call after which operations signal no more.
const INLINE_SUBMISSIONS: u32 = 64;

/// A file whose operations are those of a Linux AIO context, the kernel's side of libaio.
///
/// [`start`](Self::start) queues an operation, which owns its data from then on, [`submit`](Self::submit)
/// passes all queued ones to the kernel in one system call, and [`reap`](Self::reap) returns them.
/// Completions are read from memory that the kernel shares, without a system call. An operation that
/// completes later makes [`event`](Self::event) readable, unless it [must be polled](Self::must_poll): where
/// operations complete within the submission, as those of the page cache do, the signal would cost a third of
/// the time and say nothing new, so that it is left out while that lasts.
///
/// Drop waits for operations in flight for a limited time, and leaks the memory of those that remain. It
/// costs no time otherwise: the context is destroyed on another thread.
pub struct AioFile {
    file: OwnedFd,
    /// `None` only in `drop`.
    context: Option<AioContext>,
    /// An eventfd that is never read: each completion is an edge, and its counter takes 2⁶⁴ of them.
    event: OwnedFd,
    nowait: bool,
    slots: Box<[AioSlot]>,
    iocbs: Box<[Iocb]>,
    free: Vec<u16>,
    /// Operations that are not submitted yet, and the addresses of their iocbs.
    queue: Vec<u16>,
    addresses: Vec<u64>,
    /// Operations that the kernel refused, with their negative error numbers.
    refused: Vec<(u16, i32)>,
    in_kernel: usize,
    /// Reads and writes that the kernel has, and those of them that do not signal.
    transfers: usize,
    silent: usize,
    /// Reads and writes signal.
    signals: bool,
    /// There was a submission since the last reap.
    is_submitted: bool,
    /// Submissions in a row whose reads and writes ended within them.
    inline_submissions: u32,
    events: Box<[IoEvent]>,
}

/// An operation; the kernel may use its memory until it is complete.
#[derive(Default)]
struct AioSlot {
    tag: u64,
    data: Option<Data>,
    vectors: IoVectors,
    is_transfer: bool,
    is_silent: bool,
}

impl AioFile {
    /// Creates a context for at most `depth` operations of `file`.
    ///
    /// # Errors
    /// Those of `io_setup`: `EAGAIN` if the contexts of all processes exceed `fs.aio-max-nr`, `EPERM` or
    /// `ENOSYS` where it is forbidden or missing; and those of `eventfd`.
    ///
    /// # Panics
    /// If `depth` is 0 or exceeds 32,768.
    pub fn new(file: OwnedFd, depth: u32) -> io::Result<AioFile> {
        assert!((1..=1 << 15).contains(&depth), "an AIO context of {depth} operations");
        Ok(AioFile {
            file,
            context: Some(AioContext::new(depth)?),
            event: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            nowait: false,
            slots: (0..depth).map(|_| AioSlot::default()).collect(),
            iocbs: vec![Iocb::default(); depth as usize].into(),
            free: (0..depth as u16).rev().collect(),
            queue: Vec::with_capacity(depth as usize),
            addresses: Vec::with_capacity(depth as usize),
            refused: Vec::new(),
            in_kernel: 0,
            transfers: 0,
            silent: 0,
            signals: true,
            is_submitted: false,
            inline_submissions: 0,
            events: vec![IoEvent::default(); depth as usize].into(),
        })
    }

    /// Whether this process may have a context.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn probe() -> io::Result<()> {
        AioContext::new(1).map(AioContext::destroy_later)
    }

    /// Has reads and writes fail with `EAGAIN` where the kernel would wait for something (`RWF_NOWAIT`).
    pub fn set_nowait(&mut self, nowait: bool) {
        self.nowait = nowait;
    }

    /// Becomes readable, again with each completion of an operation that signals. Nothing reads it: watch it
    /// edge-triggered.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Number of operations that were started and not reaped.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether [`event`](Self::event) does not become readable with every completion: call
    /// [`submit`](Self::submit) and [`reap`](Self::reap) soon.
    pub fn must_poll(&self) -> bool {
        self.silent > 0 || !self.refused.is_empty() || !self.queue.is_empty()
    }

    /// Queues an operation on `length` bytes at `offset` of the file, from or to the data's bytes at `start`.
    /// The [`EventCompletion`] with `tag` returns the data.
    ///
    /// # Errors
    /// `WouldBlock` if as many operations as the context takes are in flight; `Unsupported` for
    /// [`Punch`](FileOperation::Punch) and [`Zero`](FileOperation::Zero), which AIO does not have.
    ///
    /// # Panics
    /// As [`EventClient::submit_operation`](crate::EventClient::submit_operation).
    pub fn start(
        &mut self,
        operation: FileOperation,
        offset: u64,
        length: u64,
        data: Option<(Data, usize)>,
        tag: u64,
    ) -> Result<(), RejectedOperation> {
        let (data, start) = match data {
            Some((data, start)) => (Some(data), start),
            None => (None, 0),
        };
        let (single, vectored, mut rw_flags) = match operation {
            FileOperation::Read => (PREAD, PREADV, 0),
            FileOperation::Write(WriteMode::Cached) => (PWRITE, PWRITEV, 0),
            FileOperation::Write(WriteMode::Durable) => (PWRITE, PWRITEV, libc::RWF_DSYNC),
            FileOperation::Write(WriteMode::Atomic) => (PWRITE, PWRITEV, libc::RWF_ATOMIC),
            FileOperation::Write(WriteMode::AtomicDurable) => {
                (PWRITE, PWRITEV, libc::RWF_ATOMIC | libc::RWF_DSYNC)
            }
            FileOperation::Sync => (FDSYNC, FDSYNC, 0),
            FileOperation::Punch | FileOperation::Zero => {
                return Err(RejectedOperation { reason: io::ErrorKind::Unsupported, data });
            }
        };
        let is_transfer = operation != FileOperation::Sync;
        check_access(data.as_ref(), start, if is_transfer { length } else { 0 }, single == PREAD);
        if is_transfer && self.nowait {
            rw_flags |= libc::RWF_NOWAIT;
        }
        let Some(index) = self.free.pop() else {
            return Err(RejectedOperation { reason: io::ErrorKind::WouldBlock, data });
        };
        let slot = &mut self.slots[usize::from(index)];
        (slot.tag, slot.data, slot.is_transfer) = (tag, data, is_transfer);
        let (opcode, address, bytes) = match &slot.data {
            // A sync has to have neither memory nor a range.
            _ if !is_transfer => (single, 0, 0),
            Some(Data::One(buffer)) => (single, buffer.as_ptr().wrapping_add(start) as u64, length),
            Some(many) => {
                let (list, count) = slot.vectors.describe(many.slices(), start, length as usize);
                (vectored, list.expose_provenance() as u64, count.into())
            }
            None => (single, 0, 0),
        };
        // An offset beyond the largest of a file is a negative one, which every kernel refuses.
        let offset = if is_transfer { i64::try_from(offset).unwrap_or(i64::MIN) } else { 0 };
        let fd = self.file.as_raw_fd() as u32;
        let iocb =
            Iocb { data: index.into(), rw_flags, opcode, fd, address, bytes, offset, ..Iocb::default() };
        let place = &mut self.iocbs[usize::from(index)];
        *place = iocb;
        self.addresses.push((&raw const *place).expose_provenance() as u64);
        self.queue.push(index);
        Ok(())
    }

    /// Passes queued operations to the kernel. Those for which it has no resources now stay queued.
    pub fn submit(&mut self) {
        if self.queue.is_empty() {
            return;
        }
        let event = self.event.as_raw_fd() as u32;
        for index in &self.queue {
            let (slot, iocb) = (&mut self.slots[usize::from(*index)], &mut self.iocbs[usize::from(*index)]);
            slot.is_silent = slot.is_transfer && !self.signals;
            (iocb.flags, iocb.eventfd) = if slot.is_silent { (0, 0) } else { (SIGNAL_EVENTFD, event) };
        }
        while !self.queue.is_empty() {
            let Some(context) = &mut self.context else { return };
            match context.submit(&self.addresses) {
                Ok(0) => return,
                Ok(count) => {
                    self.is_submitted = true;
                    for index in self.queue.drain(..count) {
                        let slot = &self.slots[usize::from(index)];
                        self.in_kernel += 1;
                        self.transfers += usize::from(slot.is_transfer);
                        self.silent += usize::from(slot.is_silent);
                    }
                    self.addresses.drain(..count);
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN | libc::EINTR) => return,
                    number => {
                        // The kernel refuses the first; the others are tried.
                        self.addresses.remove(0);
                        self.refused.push((self.queue.remove(0), -number.unwrap_or(libc::EIO)));
                    }
                },
            }
        }
    }

    /// Appends the operations that have ended to `out`; returns their number.
    pub fn reap(&mut self, out: &mut Vec<EventCompletion>) -> usize {
        let before = out.len();
        while let Some((index, result)) = self.refused.pop() {
            let done = self.complete(index, result);
            out.push(done);
        }
        while self.in_kernel > 0 {
            let Some(context) = &mut self.context else { break };
            if context.is_empty() {
                break;
            }
            let count = match context.is_readable() {
                true => context.read(&mut self.events),
                false => context.get_events(0, &mut self.events, Some(0)),
            };
            for at in 0..count {
                let IoEvent { data, result, .. } = self.events[at];
                let index = data as u16;
                let slot = &self.slots[usize::from(index)];
                self.in_kernel -= 1;
                self.transfers -= usize::from(slot.is_transfer);
                self.silent -= usize::from(slot.is_silent);
                let done = self.complete(index, result.clamp(i32::MIN.into(), i32::MAX.into()) as i32);
                out.push(done);
            }
            if count < self.events.len() {
                break;
            }
        }
        if std::mem::take(&mut self.is_submitted) {
            self.adapt();
        }
        out.len() - before
    }

    /// After the first reap that follows a submission: decides whether later reads and writes signal.
    fn adapt(&mut self) {
        if self.transfers > 0 {
            (self.signals, self.inline_submissions) = (true, 0);
        } else if self.signals {
            self.inline_submissions += 1;
            self.signals = self.inline_submissions < INLINE_SUBMISSIONS;
        }
    }

    fn complete(&mut self, index: u16, result: i32) -> EventCompletion {
        let slot = &mut self.slots[usize::from(index)];
        self.free.push(index);
        EventCompletion { tag: slot.tag, result, data: slot.data.take() }
    }
}

impl Drop for AioFile {
    /// Waits for operations in flight, because the kernel may still write into their buffers, and leaks the
    /// memory of those that do not complete.
    fn drop(&mut self) {
        let Some(mut context) = self.context.take() else { return };
        let mut left = self.in_kernel;
        let ended = drain(DROP_TIME_MAX, || {
            if left > 0 {
                left -= context.get_events(1, &mut self.events, Some(100_000_000)).min(left);
            }
            left == 0
        });
        if !ended {
            std::mem::forget(std::mem::take(&mut self.slots));
        }
        context.destroy_later();
    }
}

impl std::fmt::Debug for AioFile {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "AioFile({} in flight)", self.in_flight())
    }
}

// Miri does not implement Linux AIO.
#[cfg(all(test, not(miri)))]
mod tests;
