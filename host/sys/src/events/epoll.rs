//! The epoll backend, for kernels and containers without io_uring.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use rustix::event::{Timespec, epoll};

use super::{Interest, Raw};

/// Events taken from the kernel at a time.
const EVENTS_MAX: usize = 256;

pub(super) struct Epoll {
    instance: OwnedFd,
    events: Vec<epoll::Event>,
    next: usize,
}

impl Epoll {
    pub(super) fn new() -> io::Result<Epoll> {
        let instance = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Epoll { instance, events: Vec::with_capacity(EVENTS_MAX), next: 0 })
    }

    pub(super) fn watch(&mut self, fd: RawFd, interest: Interest, user_data: u64) -> io::Result<()> {
        let flags = epoll::EventFlags::from_bits_retain(interest.0) | epoll::EventFlags::ET;
        let data = epoll::EventData::new_u64(user_data);
        // SAFETY: only used for this call; the caller keeps the descriptor open until `unwatch`.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        Ok(epoll::add(&self.instance, fd, data, flags)?)
    }

    pub(super) fn unwatch(&mut self, fd: RawFd) {
        // SAFETY: only used for this call; the caller keeps the descriptor open until now.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let _ = epoll::delete(&self.instance, fd);
    }

    /// Takes in what happened; `None` does not wait, `Some(None)` waits without end.
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

    pub(super) fn next(&mut self) -> Option<Raw> {
        let event = self.events.get(self.next)?;
        self.next += 1;
        let flags = event.flags;
        Some(Raw { user_data: event.data.u64(), result: flags.bits() as i32, more: true })
    }
}
