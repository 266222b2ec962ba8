//! What a request becomes: file operations, in order, and what their errors mean.
//!
//! Pure, so that durability can be proven over a simulated disk.

use ring::{Errno, Flags, Op, Status};
use sys::Write;

/// One file operation on the request's whole range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Fill the buffer.
    Read,
    /// Write the buffer.
    Write(Write),
    /// `fdatasync`.
    Sync,
    /// Make zero and give the space back.
    Punch,
    /// Make zero.
    Zero,
    /// Write zeroes from a buffer of the channel's.
    WriteZeroes,
}

/// The operations of a request: the second starts once the first is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The first.
    pub first: Step,
    /// The second, if there is one; it never has a third.
    pub then: Option<Step>,
}

/// What a request becomes, or `None` for what files do not do.
///
/// `fallocate` has no durable form, so that FUA adds an `fdatasync` to what it does; a write has one
/// (`RWF_DSYNC`), and a flush is `fdatasync` alone, as it covers what was acknowledged before.
pub fn plan(op: Op, flags: Flags) -> Option<Plan> {
    let durable = flags.contains(Flags::FUA);
    let then = (durable && matches!(op, Op::Unmap | Op::WriteZeroes)).then_some(Step::Sync);
    let first = match op {
        Op::Read => Step::Read,
        Op::Write if durable => Step::Write(Write::Durable),
        Op::Write => Step::Write(Write::Cached),
        Op::Flush => Step::Sync,
        Op::Unmap => Step::Punch,
        Op::WriteZeroes if flags.contains(Flags::DEALLOCATE) => Step::Punch,
        Op::WriteZeroes => Step::Zero,
        Op::Reset | Op::WriteUncorrectable | Op::Compare => return None,
    };
    Some(Plan { first, then })
}

/// What does the same where the file system cannot do `step`.
pub const fn fallback(step: Step) -> Option<Step> {
    match step {
        Step::Punch => Some(Step::Zero),
        Step::Zero => Some(Step::WriteZeroes),
        Step::Read | Step::Write(_) | Step::Sync | Step::WriteZeroes => None,
    }
}

/// The status of a file operation that failed. The one place where error numbers become statuses.
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
        // EIO, ENODATA and whatever else a medium says.
        _ if matches!(op, Op::Read) => Status::UNRECOVERED_READ_ERROR,
        _ => Status::WRITE_FAULT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_become_the_operations_that_keep_their_promise() {
        let fua = Flags::FUA;
        let both = Flags::FUA.with(Flags::DEALLOCATE);
        let table = [
            (Op::Read, Flags::NONE, Step::Read, None),
            (Op::Write, Flags::NONE, Step::Write(Write::Cached), None),
            (Op::Write, fua, Step::Write(Write::Durable), None),
            (Op::Flush, Flags::NONE, Step::Sync, None),
            (Op::Unmap, Flags::NONE, Step::Punch, None),
            (Op::Unmap, fua, Step::Punch, Some(Step::Sync)),
            (Op::WriteZeroes, Flags::NONE, Step::Zero, None),
            (Op::WriteZeroes, Flags::DEALLOCATE, Step::Punch, None),
            (Op::WriteZeroes, fua, Step::Zero, Some(Step::Sync)),
            (Op::WriteZeroes, both, Step::Punch, Some(Step::Sync)),
        ];
        for (op, flags, first, then) in table {
            assert_eq!(plan(op, flags), Some(Plan { first, then }), "{op:?} {flags:?}");
        }
        assert_eq!(plan(Op::Reset, Flags::NONE), None);
    }

    #[test]
    fn fallbacks_end_in_a_plain_write() {
        assert_eq!(fallback(Step::Punch).and_then(fallback), Some(Step::WriteZeroes));
        assert_eq!(fallback(Step::WriteZeroes), None);
    }

    #[test]
    fn error_numbers_become_statuses_by_direction() {
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
