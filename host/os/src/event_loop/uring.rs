//! The io_uring backend.

use std::io;
use std::os::fd::RawFd;

use dma::Buffer;
use io_uring::types::{CancelBuilder, Fd, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, Probe, opcode, squeue};
use wire_ublk::{AutoBufferRegistration, IoCommand, IoRequest};

use super::buffer_group::BufferGroup;
use super::transfers::SendOperation;
use super::{FileOperation, IGNORED, Interest, RawCompletion, SocketCapabilities, WriteMode};
use crate::sqe::{self, SqeFile, SqeMemory};

/// Maximum number of open files on one core.
pub(super) const FILES_MAX: u32 = 1024;
/// Maximum number of registered buffer chunks: 2 GiB of memory.
pub(super) const BUFFERS_MAX: u32 = 1024;
/// Registered buffers after these for the pages of ublk requests: as many as a core serves at a time.
pub(super) const PAGES_MAX: u32 = 2048;
/// Flag of a zero-copy send: its notification reports whether data was copied (`IORING_SEND_ZC_REPORT_USAGE`).
const ZC_REPORT_USAGE: u16 = 1 << 3;

pub(super) struct UringBackend {
    ring: IoUring,
    files_registered: bool,
    chunk_registrations: Vec<ChunkRegistration>,
    unsubmitted: u32,
    pub(super) capabilities: SocketCapabilities,
    /// Flags of zero-copy sends that the kernel knows.
    send_flags: u16,
}

#[derive(Clone, Copy, PartialEq)]
enum ChunkRegistration {
    NotTried,
    Registered,
    Failed,
}

pub(super) struct OperationParameters<'a> {
    /// Index of the registered file; `None` if neither the file nor memory is to be registered.
    pub(super) file: Option<u32>,
    pub(super) fd: RawFd,
    pub(super) operation: FileOperation,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) memory: OperationMemory<'a>,
    pub(super) user_data: u64,
}

/// The memory of a file operation, which its slot owns.
pub(super) enum OperationMemory<'a> {
    None,
    /// The bytes from an offset of a buffer.
    Buffer(&'a Buffer, usize),
    /// The address and number of vectors.
    Vectors(*const libc::iovec, u32),
    /// The bytes from an offset of a registered buffer of the kernel's pages.
    Registered(u16, u32),
}

impl UringBackend {
    pub(super) fn new(operations_max: u32) -> io::Result<UringBackend> {
        let entries = operations_max.clamp(64, 1024);
        let mut builder = IoUring::builder();
        // Twice the number of operations: each has one completion, but a watch may have several.
        let completions = (operations_max * 2).next_power_of_two().max(entries * 2);
        builder.setup_cqsize(completions).setup_clamp().setup_submit_all();
        builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
        let ring = builder.build(entries)?;
        let files_registered = ring.submitter().register_files_sparse(FILES_MAX).is_ok();
        let buffers = ring.submitter().register_buffers_sparse(BUFFERS_MAX + PAGES_MAX).is_ok();
        let initial = if buffers { ChunkRegistration::NotTried } else { ChunkRegistration::Failed };
        let chunk_registrations = vec![initial; BUFFERS_MAX as usize];
        let mut probe = Probe::new();
        // Older kernels without this call have none of what it is asked for.
        let _ = ring.submitter().register_probe(&mut probe);
        let capabilities = SocketCapabilities {
            zero_copy_send: probe.is_supported(opcode::SendMsgZc::CODE),
            // Multishot receives are a flag, which came in the same release as this operation (6.0).
            multishot_receive: probe.is_supported(opcode::SendZc::CODE),
        };
        // The flag came in 6.2; the next operation in 6.7.
        let reports_usage = probe.is_supported(opcode::ReadMulti::CODE);
        let send_flags = if reports_usage { ZC_REPORT_USAGE } else { 0 };
        let unsubmitted = 0;
        Ok(UringBackend {
            ring,
            files_registered,
            chunk_registrations,
            unsubmitted,
            capabilities,
            send_flags,
        })
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

    /// The registered-buffer index of the buffer's chunk; registers the chunk on first use.
    ///
    /// Registration fails if RLIMIT_MEMLOCK is too low; the operation then uses unregistered memory.
    fn registered_index(&mut self, buffer: &Buffer) -> Option<u16> {
        let index = buffer.chunk_index()?;
        let state = self.chunk_registrations.get_mut(index as usize)?;
        if *state == ChunkRegistration::NotTried {
            let chunk = buffer.chunk()?;
            let range = libc::iovec { iov_base: chunk.start.cast(), iov_len: chunk.bytes };
            // SAFETY: chunks stay mapped until the arena is dropped, which every buffer keeps alive,
            // and operations that use the registration own a buffer of the chunk.
            let updated = unsafe { self.ring.submitter().register_buffers_update(index, &[range], None) };
            *state = if updated.is_ok() { ChunkRegistration::Registered } else { ChunkRegistration::Failed };
        }
        (*state == ChunkRegistration::Registered).then_some(index as u16)
    }

    pub(super) fn operate(&mut self, request: OperationParameters<'_>) {
        let (length, offset) = (request.length, request.offset);
        // The kernel takes atomic writes from unregistered memory alone.
        let is_atomic =
            matches!(request.operation, FileOperation::Write(WriteMode::Atomic | WriteMode::AtomicDurable));
        let memory = match request.memory {
            OperationMemory::Buffer(buffer, start) => SqeMemory::Contiguous {
                start: buffer.as_ptr().wrapping_add(start),
                bytes: length as u32,
                registered: request.file.filter(|_| !is_atomic).and_then(|_| self.registered_index(buffer)),
            },
            OperationMemory::Vectors(address, count) => SqeMemory::Vectors(address, count),
            // The addresses of such a buffer begin at 0.
            OperationMemory::Registered(index, start) => SqeMemory::Contiguous {
                start: std::ptr::without_provenance_mut(start as usize),
                bytes: length as u32,
                registered: Some(index),
            },
            // Of a read or write of no bytes at all.
            OperationMemory::None => {
                SqeMemory::Contiguous { start: std::ptr::null_mut(), bytes: length as u32, registered: None }
            }
        };
        let file = match request.file.filter(|_| self.files_registered) {
            Some(index) => SqeFile::Registered(index),
            None => SqeFile::Descriptor(request.fd),
        };
        let entry = match request.operation {
            FileOperation::Read => sqe::read(file, memory, offset, 0),
            FileOperation::Write(WriteMode::Cached) => sqe::write(file, memory, offset, 0, 0),
            FileOperation::Write(WriteMode::Durable) => sqe::write(file, memory, offset, libc::RWF_DSYNC, 0),
            FileOperation::Write(WriteMode::Atomic) => sqe::write(file, memory, offset, libc::RWF_ATOMIC, 0),
            FileOperation::Write(WriteMode::AtomicDurable) => {
                sqe::write(file, memory, offset, libc::RWF_ATOMIC | libc::RWF_DSYNC, 0)
            }
            FileOperation::Sync => sqe::sync(file, true),
            FileOperation::Punch => {
                sqe::fallocate(file, offset, length, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
            }
            FileOperation::Zero => {
                sqe::fallocate(file, offset, length, libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE)
            }
        };
        self.push(entry.user_data(request.user_data));
    }

    /// Submits a command to the character device of a ublk disk; a slot owns the memory at its address.
    /// With `pages`, the pages of the next request of the tag are registered.
    pub(super) fn ublk(
        &mut self,
        fd: RawFd,
        request: IoRequest,
        command: IoCommand,
        pages: Option<AutoBufferRegistration>,
        user_data: u64,
    ) {
        let address = pages.map_or(0, AutoBufferRegistration::to_entry_address);
        self.push(sqe::ublk(SqeFile::Descriptor(fd), request, command, address).user_data(user_data));
    }

    /// Submits an operation that does nothing: it completes when the kernel has started those before it.
    pub(super) fn nothing(&mut self, user_data: u64) {
        self.push(opcode::Nop::new().build().user_data(user_data));
    }

    pub(super) fn watch(&mut self, fd: RawFd, interest: Interest, user_data: u64) {
        let entry = opcode::PollAdd::new(Fd(fd), interest.bits()).multi(true).build();
        self.push(entry.user_data(user_data));
    }

    /// Submits the send, which its slot owns.
    pub(super) fn send(&mut self, send: &SendOperation, user_data: u64) {
        let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32;
        let entry = opcode::SendMsgZc::new(Fd(send.fd()), send.header()).flags(flags).ioprio(self.send_flags);
        self.push(entry.build().user_data(user_data));
    }

    /// Submits a multishot receive into buffers of the group `group`.
    pub(super) fn receive(&mut self, fd: RawFd, group: u16, user_data: u64) {
        self.push(opcode::RecvMulti::new(Fd(fd), group).build().user_data(user_data));
    }

    pub(super) fn register_group(&mut self, group: &BufferGroup, id: u16) -> io::Result<()> {
        let (address, entries) = (group.address(), group.entries());
        // SAFETY: the ring's memory and the buffers in it stay allocated until the event loop drops the group, which
        // it does after it has unregistered it and when no receive uses it.
        unsafe { self.ring.submitter().register_buf_ring_with_flags(address, entries, id, 0) }
    }

    pub(super) fn unregister_group(&mut self, id: u16) {
        let _ = self.ring.submitter().unregister_buf_ring(id);
    }

    pub(super) fn cancel(&mut self, user_data: u64) {
        self.push(opcode::AsyncCancel::new(user_data).build().user_data(IGNORED));
    }

    pub(super) fn unwatch(&mut self, user_data: u64) {
        // Not POLL_REMOVE: that fails while a wake-up of the poll is in progress, and the poll would
        // then keep the file open for ever.
        self.cancel(user_data);
    }

    pub(super) fn cancel_all(&mut self) {
        // Requests that a disk executes cannot be cancelled; they complete by themselves.
        let time_max = Timespec::new().sec(1);
        let _ = self.ring.submitter().register_sync_cancel(Some(time_max), CancelBuilder::any());
    }

    fn push(&mut self, entry: squeue::Entry) {
        if self.ring.submission().is_full() {
            self.submit();
        }
        // SAFETY: memory that the entry points to is owned by the operation's slot until its
        // last completion is reaped; a descriptor is owned by the file table or, for a watch, kept open by
        // the caller until `unwatch`, and an entry with a closed descriptor only fails.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "the submission queue is full right after a submit");
        self.unsubmitted += 1;
    }

    fn submit(&mut self) {
        match self.ring.submit() {
            Ok(count) => self.unsubmitted -= count as u32,
            // Out of memory, or completions must be reaped first: the entries stay queued and are
            // submitted in a later turn.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY | libc::EINTR)) => {}
            Err(error) => panic!("io_uring_enter on our own ring cannot fail, but did: {error}"),
        }
    }

    /// Submits queued entries and, with `wait`, sleeps; makes no system call if nothing is queued and no task work is
    /// pending.
    pub(super) fn enter(&mut self, wait: Option<Option<u64>>) {
        let result = match wait {
            None => {
                let work = self.ring.submission().taskrun();
                if self.unsubmitted == 0 && !work {
                    return;
                }
                let flags = if work { EnterFlags::GETEVENTS } else { EnterFlags::empty() };
                // SAFETY: no argument is passed, so there is no pointer that must be valid.
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
    pub(super) fn next(&mut self) -> Option<RawCompletion> {
        let entry = self.ring.completion().next()?;
        Some(RawCompletion { user_data: entry.user_data(), result: entry.result(), flags: entry.flags() })
    }
}
