//! Constructors of io_uring submission queue entries (SQEs).

use std::os::fd::RawFd;

use io_uring::types::FsyncFlags;
use io_uring::{opcode, squeue};
use wire_ublk::{IoCommand, IoRequest};

/// The file of an SQE.
#[derive(Clone, Copy)]
pub(crate) enum SqeFile {
    /// The index of a registered file.
    Registered(u32),
    /// A file descriptor.
    Descriptor(RawFd),
}

/// The memory of an SQE.
#[derive(Clone, Copy)]
pub(crate) enum SqeMemory {
    /// Consecutive bytes, with the index of the registered buffer that contains them, if any.
    Contiguous { start: *mut u8, bytes: u32, registered: Option<u16> },
    /// The address and number of I/O vectors.
    Vectors(*const libc::iovec, u32),
}

/// Binds `$file` to the `io_uring` type for the handle, because the crate has two types for files.
macro_rules! with_file {
    ($handle:expr, $file:ident => $entry:expr) => {
        match $handle {
            $crate::sqe::SqeFile::Registered(index) => {
                let $file = io_uring::types::Fixed(index);
                $entry
            }
            $crate::sqe::SqeFile::Descriptor(fd) => {
                let $file = io_uring::types::Fd(fd);
                $entry
            }
        }
    };
}
pub(crate) use with_file;

/// `priority` is an I/O priority of `linux/ioprio.h`; 0 for that of the thread that submits.
#[inline]
pub(crate) fn read(file: SqeFile, to: SqeMemory, offset: u64, priority: u16) -> squeue::Entry {
    with_file!(file, file => match to {
        SqeMemory::Contiguous { start, bytes, registered: Some(index) } => {
            opcode::ReadFixed::new(file, start, bytes, index).offset(offset).ioprio(priority).build()
        }
        SqeMemory::Contiguous { start, bytes, registered: None } => {
            opcode::Read::new(file, start, bytes).offset(offset).ioprio(priority).build()
        }
        SqeMemory::Vectors(vectors, count) => {
            opcode::Readv::new(file, vectors, count).offset(offset).ioprio(priority).build()
        }
    })
}

/// `flags` are `RWF_*`, `priority` as for [`read`].
#[inline]
pub(crate) fn write(file: SqeFile, from: SqeMemory, offset: u64, flags: i32, priority: u16) -> squeue::Entry {
    with_file!(file, file => match from {
        SqeMemory::Contiguous { start, bytes, registered: Some(index) } => {
            opcode::WriteFixed::new(file, start, bytes, index).offset(offset).rw_flags(flags).ioprio(priority).build()
        }
        SqeMemory::Contiguous { start, bytes, registered: None } => {
            opcode::Write::new(file, start, bytes).offset(offset).rw_flags(flags).ioprio(priority).build()
        }
        SqeMemory::Vectors(vectors, count) => {
            opcode::Writev::new(file, vectors, count).offset(offset).rw_flags(flags).ioprio(priority).build()
        }
    })
}

pub(crate) fn sync(file: SqeFile, data_only: bool) -> squeue::Entry {
    let flags = if data_only { FsyncFlags::DATASYNC } else { FsyncFlags::empty() };
    with_file!(file, file => opcode::Fsync::new(file).flags(flags).build())
}

/// `mode` is `FALLOC_FL_*`.
pub(crate) fn fallocate(file: SqeFile, offset: u64, bytes: u64, mode: i32) -> squeue::Entry {
    with_file!(file, file => opcode::Fallocate::new(file, bytes).offset(offset).mode(mode).build())
}

/// A command to a ublk character device.
pub(crate) fn ublk(file: SqeFile, request: IoRequest, command: IoCommand) -> squeue::Entry {
    let command = command.to_bytes();
    with_file!(file, file => opcode::UringCmd16::new(file, request.number()).cmd(command).build())
}
