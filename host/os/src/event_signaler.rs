//! Signals of eventfds that another process owns.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::aio_queue::{AioContext, IoEvent, Iocb};

/// Events that the kernel keeps for us; each signal takes back those of earlier ones.
const EVENTS: u32 = 16;

/// Signals eventfds without ever waiting.
///
/// A write to an eventfd whose counter is full blocks unless the descriptor is non-blocking, and a process that shares
/// it may change that at any time, also between a check and the write. So this has the kernel signal it: the completion
/// of an AIO request (an empty read of `/dev/null`, which ends within `io_submit`) adds 1 to the request's eventfd and
/// never waits. One system call a signal, as a write is.
pub struct EventSignaler {
    context: AioContext,
    /// The file of the request.
    _null: File,
    iocb: Box<Iocb>,
    events: [IoEvent; EVENTS as usize],
}

impl EventSignaler {
    /// Creates a signaler.
    ///
    /// # Errors
    /// The kernel has no AIO, or its contexts exceed `fs.aio-max-nr`.
    pub fn new() -> io::Result<EventSignaler> {
        let null = File::open("/dev/null")?;
        let iocb = Box::new(Iocb::empty_read(null.as_raw_fd() as u32));
        Ok(EventSignaler {
            context: AioContext::new(EVENTS)?,
            _null: null,
            iocb,
            events: [IoEvent::default(); EVENTS as usize],
        })
    }

    /// Adds 1 to the counter of an eventfd. A full counter stays as it is: its reader is woken already.
    ///
    /// # Errors
    /// `EINVAL` if it is not an eventfd.
    pub fn signal(&mut self, eventfd: BorrowedFd<'_>) -> io::Result<()> {
        // The event of the last signal, which has been completed.
        match self.context.is_readable() {
            true => _ = self.context.read(&mut self.events),
            false => _ = self.context.get_events(0, &mut self.events, Some(0)),
        }
        self.iocb.eventfd = eventfd.as_raw_fd() as u32;
        let address = (&raw const *self.iocb).expose_provenance() as u64;
        self.context.submit(&[address]).map(|_| ())
    }
}

impl std::fmt::Debug for EventSignaler {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("EventSignaler")
    }
}

/// Whether a file is an eventfd, by its name in `/proc`: a signal would tell too, but not without effect.
pub fn is_eventfd(file: BorrowedFd<'_>) -> bool {
    let link = rustix::fs::readlink(format!("/proc/self/fd/{}", file.as_raw_fd()), Vec::new());
    link.is_ok_and(|link| link.as_bytes().starts_with(b"anon_inode:[eventfd"))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn counter(file: BorrowedFd<'_>) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(file, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no AIO")]
    fn a_full_counter_does_not_block() {
        let mut signaler = EventSignaler::new().unwrap();
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        for _ in 0..100 {
            signaler.signal(event.as_fd()).unwrap();
        }
        assert_eq!(counter(event.as_fd()), 100);
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        signaler.signal(event.as_fd()).unwrap();
        signaler.signal(event.as_fd()).unwrap();
        assert!(counter(event.as_fd()) >= u64::MAX - 1);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no AIO")]
    fn only_eventfds_are_signalled() {
        let mut signaler = EventSignaler::new().unwrap();
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(signaler.signal(writer.as_fd()).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert!(!is_eventfd(writer.as_fd()));
        assert!(is_eventfd(eventfd(0, EventfdFlags::empty()).unwrap().as_fd()));
    }
}
