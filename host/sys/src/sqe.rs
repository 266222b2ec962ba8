//! Entries of an io_uring's submission queue, as every ring here makes them.

use std::os::fd::RawFd;

use io_uring::types::FsyncFlags;
use io_uring::{opcode, squeue};

/// A file, as an entry names it.
#[derive(Clone, Copy)]
pub(crate) enum Handle {
    /// By its index among the registered ones.
    Registered(u32),
    /// By its descriptor.
    Descriptor(RawFd),
}

/// Memory, as an entry names it: with the index of the registered range that it lies in, if it does.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) start: *mut u8,
    pub(crate) bytes: u32,
    pub(crate) registered: Option<u16>,
}

/// The two ways to name a file are two types, and every opcode takes either.
macro_rules! with_file {
    ($handle:expr, $file:ident => $entry:expr) => {
        match $handle {
            $crate::sqe::Handle::Registered(index) => {
                let $file = io_uring::types::Fixed(index);
                $entry
            }
            $crate::sqe::Handle::Descriptor(fd) => {
                let $file = io_uring::types::Fd(fd);
                $entry
            }
        }
    };
}
pub(crate) use with_file;

#[inline]
pub(crate) fn read(file: Handle, to: Memory, offset: u64) -> squeue::Entry {
    let Memory { start, bytes, registered } = to;
    with_file!(file, file => match registered {
        Some(index) => opcode::ReadFixed::new(file, start, bytes, index).offset(offset).build(),
        None => opcode::Read::new(file, start, bytes).offset(offset).build(),
    })
}

/// `flags` are `RWF_*`.
#[inline]
pub(crate) fn write(file: Handle, from: Memory, offset: u64, flags: i32) -> squeue::Entry {
    let Memory { start, bytes, registered } = from;
    with_file!(file, file => match registered {
        Some(index) => {
            opcode::WriteFixed::new(file, start, bytes, index).offset(offset).rw_flags(flags).build()
        }
        None => opcode::Write::new(file, start, bytes).offset(offset).rw_flags(flags).build(),
    })
}

pub(crate) fn sync(file: Handle, data_only: bool) -> squeue::Entry {
    let flags = if data_only { FsyncFlags::DATASYNC } else { FsyncFlags::empty() };
    with_file!(file, file => opcode::Fsync::new(file).flags(flags).build())
}

/// `mode` is `FALLOC_FL_*`.
pub(crate) fn fallocate(file: Handle, offset: u64, bytes: u64, mode: i32) -> squeue::Entry {
    with_file!(file, file => opcode::Fallocate::new(file, bytes).offset(offset).mode(mode).build())
}
