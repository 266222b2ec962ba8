//! The io_uring backend.

use std::io;
use std::os::fd::RawFd;

use io_uring::types::{CancelBuilder, Fd, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, opcode, squeue};
use memory::Buffer;

use super::{IGNORED, Interest, Operation, Raw, Write};
use crate::sqe::{self, Handle, Memory};

/// Files that can be open at a time on one core.
pub(super) const FILES_MAX: u32 = 1024;
/// Chunks of buffer memory that can be registered: 2 GiB of them.
const BUFFERS_MAX: u32 = 1024;

pub(super) struct Uring {
    ring: IoUring,
    files_registered: bool,
    buffers_registered: Vec<Registered>,
    unsubmitted: u32,
}

#[derive(Clone, Copy, PartialEq)]
enum Registered {
    Unknown,
    Yes,
    No,
}

pub(super) struct FileOperation<'a> {
    pub(super) file: u32,
    pub(super) fd: RawFd,
    pub(super) operation: Operation,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) buffer: Option<(&'a Buffer, usize)>,
    pub(super) user_data: u64,
}

impl Uring {
    pub(super) fn new(operations_max: u32) -> io::Result<Uring> {
        let entries = operations_max.clamp(64, 1024);
        let mut builder = IoUring::builder();
        // Twice the operations: each has at most one completion, a watch may have several.
        let completions = (operations_max * 2).next_power_of_two().max(entries * 2);
        builder.setup_cqsize(completions).setup_clamp().setup_submit_all();
        builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
        let ring = builder.build(entries)?;
        let files_registered = ring.submitter().register_files_sparse(FILES_MAX).is_ok();
        let buffers = ring.submitter().register_buffers_sparse(BUFFERS_MAX).is_ok();
        let unknown = if buffers { Registered::Unknown } else { Registered::No };
        let buffers_registered = vec![unknown; BUFFERS_MAX as usize];
        Ok(Uring { ring, files_registered, buffers_registered, unsubmitted: 0 })
    }

    pub(super) fn register_file(&mut self, index: u32, fd: RawFd) {
        if self.files_registered {
            let updated = self.ring.submitter().register_files_update(index, &[fd]);
            self.files_registered = updated.is_ok();
        }
    }

    pub(super) fn unregister_file(&mut self, index: u32) {
        if self.files_registered {
            let _ = self.ring.submitter().register_files_update(index, &[-1]);
        }
    }

    /// The index under which the buffer's chunk is registered, registering it at first sight.
    ///
    /// Registering can fail for want of RLIMIT_MEMLOCK; the operation then names plain memory.
    fn registered(&mut self, buffer: &Buffer) -> Option<u16> {
        let index = buffer.chunk_index()?;
        let state = self.buffers_registered.get_mut(index as usize)?;
        if *state == Registered::Unknown {
            let chunk = buffer.chunk()?;
            let range = libc::iovec { iov_base: chunk.start.cast(), iov_len: chunk.bytes };
            // SAFETY: chunks stay mapped until the arena is gone, which every buffer keeps alive,
            // and operations that use the registration hold a buffer of the chunk.
            let updated = unsafe { self.ring.submitter().register_buffers_update(index, &[range], None) };
            *state = if updated.is_ok() { Registered::Yes } else { Registered::No };
        }
        (*state == Registered::Yes).then_some(index as u16)
    }

    pub(super) fn operate(&mut self, request: FileOperation<'_>) {
        let registered = request.buffer.and_then(|(buffer, _)| self.registered(buffer));
        let start = request
            .buffer
            .map_or(std::ptr::null_mut(), |(buffer, start)| buffer.as_ptr().wrapping_add(start));
        let (length, offset) = (request.length, request.offset);
        let memory = Memory { start, bytes: length as u32, registered };
        let file = match self.files_registered {
            true => Handle::Registered(request.file),
            false => Handle::Descriptor(request.fd),
        };
        let entry = match request.operation {
            Operation::Read => sqe::read(file, memory, offset),
            Operation::Write(Write::Cached) => sqe::write(file, memory, offset, 0),
            Operation::Write(Write::Durable) => sqe::write(file, memory, offset, libc::RWF_DSYNC),
            Operation::Sync => sqe::sync(file, true),
            Operation::Punch => {
                sqe::fallocate(file, offset, length, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
            }
            Operation::Zero => {
                sqe::fallocate(file, offset, length, libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE)
            }
        };
        self.push(entry.user_data(request.user_data));
    }

    pub(super) fn watch(&mut self, fd: RawFd, interest: Interest, user_data: u64) {
        let entry = opcode::PollAdd::new(Fd(fd), interest.0).multi(true).build();
        self.push(entry.user_data(user_data));
    }

    pub(super) fn unwatch(&mut self, user_data: u64) {
        // Not POLL_REMOVE: that fails while a wake-up of the poll is under way, and the poll would
        // hold the file open for good.
        self.push(opcode::AsyncCancel::new(user_data).build().user_data(IGNORED));
    }

    pub(super) fn cancel_all(&mut self) {
        // What a disk works on is not found, and ends by itself.
        let time_max = Timespec::new().sec(1);
        let _ = self.ring.submitter().register_sync_cancel(Some(time_max), CancelBuilder::any());
    }

    fn push(&mut self, entry: squeue::Entry) {
        if self.ring.submission().is_full() {
            self.submit();
        }
        // SAFETY: buffers that the entry points to are owned by the operation's slot until its
        // completion was reaped; descriptors are held by the file table or, for watches, by the
        // caller until `unwatch`, and a closed one only fails the entry.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "the submission queue is full right after it was handed over");
        self.unsubmitted += 1;
    }

    fn submit(&mut self) {
        match self.ring.submit() {
            Ok(count) => self.unsubmitted -= count as u32,
            // Out of memory for now, or completions must be reaped first: what is queued stays
            // queued and goes with a later turn.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY | libc::EINTR)) => {}
            Err(error) => panic!("io_uring_enter on our own ring cannot fail, but did: {error}"),
        }
    }

    /// Hands over and, with `wait`, sleeps; makes no system call where there is no reason for one.
    pub(super) fn enter(&mut self, wait: Option<Option<u64>>) {
        let result = match wait {
            None => {
                let work = self.ring.submission().taskrun();
                if self.unsubmitted == 0 && !work {
                    return;
                }
                let flags = if work { EnterFlags::GETEVENTS } else { EnterFlags::empty() };
                // SAFETY: no argument is passed, so that there is nothing to be valid.
                unsafe { self.ring.submitter().enter::<()>(self.unsubmitted, 0, flags.bits(), None) }
            }
            Some(None) => self.ring.submit_and_wait(1),
            Some(Some(timeout_ns)) => {
                let time =
                    Timespec::new().sec(timeout_ns / 1_000_000_000).nsec((timeout_ns % 1_000_000_000) as u32);
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time))
            }
        };
        match result {
            Ok(count) => self.unsubmitted -= count as u32,
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME) => self.unsubmitted = 0,
                Some(libc::EAGAIN | libc::EBUSY | libc::EINTR) => {}
                _ => panic!("io_uring_enter on our own ring cannot fail, but did: {error}"),
            },
        }
    }

    #[inline]
    pub(super) fn next(&mut self) -> Option<Raw> {
        let entry = self.ring.completion().next()?;
        Some(Raw {
            user_data: entry.user_data(),
            result: entry.result(),
            more: io_uring::cqueue::more(entry.flags()),
        })
    }
}
