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

/// A command to a ublk character device. `address` is that of the entry.
pub(crate) fn ublk(file: SqeFile, request: IoRequest, command: IoCommand, address: u64) -> squeue::Entry {
    /// Of `addr` in the entry (`struct io_uring_sqe` of `linux/io_uring.h`), which the operation's type does not set.
    const ADDRESS_OFFSET: usize = 16;
    const _: () = assert!(size_of::<squeue::Entry>() == 64);
    let command = command.to_bytes();
    let mut entry =
        with_file!(file, file => opcode::UringCmd16::new(file, request.number()).cmd(command).build());
    let field = (&raw mut entry).wrapping_byte_add(ADDRESS_OFFSET).cast::<u64>();
    // SAFETY: an entry is the kernel's structure of 64 bytes, of integers alone, in which the field is inside and aligned.
    unsafe { field.write(address) };
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "UringCmd16 of the io-uring crate breaks the rules of Stacked Borrows")]
    fn a_command_of_ublk_has_its_address_where_the_kernel_reads_it() {
        let command = IoCommand { queue: 1, tag: 2, result: 3, address: 4 };
        let entry = ublk(SqeFile::Descriptor(5), IoRequest::Fetch, command, 0x1122_3344_5566_7788);
        // SAFETY: an entry is 64 bytes of integers.
        let bytes: [u8; 64] = unsafe { std::mem::transmute(entry) };
        assert_eq!(bytes[4..8], 5_u32.to_le_bytes(), "fd");
        assert_eq!(bytes[8..12], IoRequest::Fetch.number().to_le_bytes(), "cmd_op");
        assert_eq!(bytes[16..24], 0x1122_3344_5566_7788_u64.to_le_bytes(), "addr");
        assert_eq!(bytes[48..64], command.to_bytes(), "cmd");
    }
}
