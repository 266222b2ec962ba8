//! The epoll backend, for kernels and containers without io_uring.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use rustix::event::{Timespec, epoll};

use super::{Interest, RawCompletion};

/// `IORING_CQE_F_MORE`: a watch stays until it is removed.
const MORE: u32 = 1 << 1;

/// Maximum number of events per `epoll_wait`.
const EVENTS_MAX: usize = 256;

pub(super) struct EpollBackend {
    instance: OwnedFd,
    events: Vec<epoll::Event>,
    next: usize,
}

impl EpollBackend {
    pub(super) fn new() -> io::Result<EpollBackend> {
        let instance = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(EpollBackend { instance, events: Vec::with_capacity(EVENTS_MAX), next: 0 })
    }

    pub(super) fn watch(&mut self, fd: RawFd, interest: Interest, user_data: u64) -> io::Result<()> {
        let flags = epoll::EventFlags::from_bits_retain(interest.bits()) | epoll::EventFlags::ET;
        let data = epoll::EventData::new_u64(user_data);
        // SAFETY: used only for this call; the caller keeps the descriptor open until `unwatch`.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        Ok(epoll::add(&self.instance, fd, data, flags)?)
    }

    pub(super) fn unwatch(&mut self, fd: RawFd) {
        // SAFETY: used only for this call; the caller keeps the descriptor open until `unwatch` returns.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let _ = epoll::delete(&self.instance, fd);
    }

    /// Reads the available events; `None` does not wait, `Some(None)` waits without a timeout.
    pub(super) fn wait(&mut self, wait: Option<Option<u64>>) -> io::Result<()> {
        let timeout = match wait {
            None => Some(Timespec { tv_sec: 0, tv_nsec: 0 }),
            Some(None) => None,
            Some(Some(ns)) => {
                Some(Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 })
            }
        };
        self.events.clear();
        self.next = 0;
        match epoll::wait(&self.instance, rustix::buffer::spare_capacity(&mut self.events), timeout.as_ref())
        {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn next(&mut self) -> Option<RawCompletion> {
        let event = self.events.get(self.next)?;
        self.next += 1;
        let flags = event.flags;
        Some(RawCompletion { user_data: event.data.u64(), result: flags.bits() as i32, flags: MORE })
    }
}
