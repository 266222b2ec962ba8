//! Maps a request to its file operations, and their errors to statuses.
//!
//! Pure functions, so that durability is tested on a simulated disk.

use block_io::{Errno, Op, RequestFlags, Status};
use os::WriteMode;

/// One file operation on the request's whole range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileStep {
    /// Read into the buffer.
    Read,
    /// Write the buffer.
    Write(WriteMode),
    /// `fdatasync`.
    Sync,
    /// Zero the range and deallocate it (`FALLOC_FL_PUNCH_HOLE`).
    Punch,
    /// Zero the range and keep it allocated (`FALLOC_FL_ZERO_RANGE`).
    Zero,
    /// Write zeroes from a buffer of the channel.
    WriteZeroes,
}

/// The file operations of a request: the second starts when the first has completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilePlan {
    /// The first operation.
    pub first: FileStep,
    /// The second operation, if there is one; there is never a third.
    pub then: Option<FileStep>,
}

/// The file operations of a request, or `None` for an operation that files do not support.
///
/// `fallocate` has no durable form, so that FUA adds an `fdatasync`; a write has one (`RWF_DSYNC`). A flush is
/// `fdatasync` alone, which covers all writes that completed before.
pub fn plan(op: Op, flags: RequestFlags) -> Option<FilePlan> {
    let durable = flags.contains(RequestFlags::FUA);
    let then = (durable && matches!(op, Op::Unmap | Op::WriteZeroes)).then_some(FileStep::Sync);
    let atomic = flags.contains(RequestFlags::ATOMIC);
    let first = match op {
        Op::Read => FileStep::Read,
        Op::Write if atomic && durable => FileStep::Write(WriteMode::AtomicDurable),
        Op::Write if atomic => FileStep::Write(WriteMode::Atomic),
        Op::Write if durable => FileStep::Write(WriteMode::Durable),
        Op::Write => FileStep::Write(WriteMode::Cached),
        Op::Flush => FileStep::Sync,
        Op::Unmap => FileStep::Punch,
        Op::WriteZeroes if flags.contains(RequestFlags::DEALLOCATE) => FileStep::Punch,
        Op::WriteZeroes => FileStep::Zero,
        _ => return None,
    };
    Some(FilePlan { first, then })
}

/// The equivalent operation where the file system does not support `step`.
pub const fn fallback(step: FileStep) -> Option<FileStep> {
    match step {
        FileStep::Punch => Some(FileStep::Zero),
        FileStep::Zero => Some(FileStep::WriteZeroes),
        FileStep::Read | FileStep::Write(_) | FileStep::Sync | FileStep::WriteZeroes => None,
    }
}

/// The status of a failed file operation. The only place that maps error numbers to statuses.
pub const fn status_of(op: Op, errno: Errno) -> Status {
    // Numbers of Linux's generic ABI (include/uapi/asm-generic/errno.h).
    const EPERM: i32 = 1;
    const EINTR: i32 = 4;
    const ENXIO: i32 = 6;
    const EAGAIN: i32 = 11;
    const ENOMEM: i32 = 12;
    const EACCES: i32 = 13;
    const EBUSY: i32 = 16;
    const ENODEV: i32 = 19;
    const EINVAL: i32 = 22;
    const EFBIG: i32 = 27;
    const ENOSPC: i32 = 28;
    const EROFS: i32 = 30;
    const EILSEQ: i32 = 84;
    const EOPNOTSUPP: i32 = 95;
    const ETIMEDOUT: i32 = 110;
    const EDQUOT: i32 = 122;
    const ECANCELED: i32 = 125;
    match errno.0 {
        ENOSPC | EFBIG | EDQUOT => Status::CAPACITY_EXCEEDED,
        EROFS => Status::NAMESPACE_WRITE_PROTECTED,
        EPERM | EACCES => Status::ACCESS_DENIED,
        EINVAL => Status::INVALID_FIELD,
        EOPNOTSUPP => Status::INVALID_OPCODE,
        ENXIO | ENODEV => Status::INVALID_NAMESPACE_OR_FORMAT,
        EINTR | EAGAIN | ENOMEM | EBUSY | ETIMEDOUT => Status::COMMAND_INTERRUPTED,
        EILSEQ => Status::GUARD_CHECK_ERROR,
        ECANCELED => Status::ABORT_REQUESTED,
        // EIO, ENODATA and other media errors.
        _ if matches!(op, Op::Read) => Status::UNRECOVERED_READ_ERROR,
        _ => Status::WRITE_FAULT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_map_to_operations_of_the_same_durability() {
        let fua = RequestFlags::FUA;
        let both = RequestFlags::FUA | RequestFlags::DEALLOCATE;
        let table = [
            (Op::Read, RequestFlags::NONE, FileStep::Read, None),
            (Op::Write, RequestFlags::NONE, FileStep::Write(WriteMode::Cached), None),
            (Op::Write, fua, FileStep::Write(WriteMode::Durable), None),
            (Op::Write, RequestFlags::ATOMIC, FileStep::Write(WriteMode::Atomic), None),
            (Op::Write, RequestFlags::ATOMIC | fua, FileStep::Write(WriteMode::AtomicDurable), None),
            (Op::Flush, RequestFlags::NONE, FileStep::Sync, None),
            (Op::Unmap, RequestFlags::NONE, FileStep::Punch, None),
            (Op::Unmap, fua, FileStep::Punch, Some(FileStep::Sync)),
            (Op::WriteZeroes, RequestFlags::NONE, FileStep::Zero, None),
            (Op::WriteZeroes, RequestFlags::DEALLOCATE, FileStep::Punch, None),
            (Op::WriteZeroes, fua, FileStep::Zero, Some(FileStep::Sync)),
            (Op::WriteZeroes, both, FileStep::Punch, Some(FileStep::Sync)),
        ];
        for (op, flags, first, then) in table {
            assert_eq!(plan(op, flags), Some(FilePlan { first, then }), "{op:?} {flags:?}");
        }
        assert_eq!(plan(Op::Reset, RequestFlags::NONE), None);
    }

    #[test]
    fn the_last_fallback_is_a_write_of_zeroes() {
        assert_eq!(fallback(FileStep::Punch).and_then(fallback), Some(FileStep::WriteZeroes));
        assert_eq!(fallback(FileStep::WriteZeroes), None);
    }

    #[test]
    fn error_numbers_map_to_statuses_by_direction() {
        assert_eq!(status_of(Op::Read, Errno(5)), Status::UNRECOVERED_READ_ERROR);
        assert_eq!(status_of(Op::Write, Errno(5)), Status::WRITE_FAULT);
        assert_eq!(status_of(Op::Flush, Errno(5)), Status::WRITE_FAULT);
        assert_eq!(status_of(Op::Write, Errno(28)), Status::CAPACITY_EXCEEDED);
        assert_eq!(status_of(Op::Unmap, Errno(30)), Status::NAMESPACE_WRITE_PROTECTED);
        for errno in 1..200 {
            assert!(!status_of(Op::Read, Errno(errno)).is_success(), "{errno}");
        }
    }
}
