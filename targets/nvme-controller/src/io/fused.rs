//! Fused Compare and Write (NVM 1.0, section 3.1.1; Base 2.0, section 3.4.2).
//!
//! The two commands are adjacent in a queue. Each queue keeps a [`FusedPairing`] from one command to the
//! next.

use block_io::Status;
use wire_nvme::Sqe;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::sqe::Fuse;

use super::{DataTransfer, IoOp, IoPlan, NamespaceTable, read_write};
use crate::INVALID_FIELD;

/// Most bytes of a fused operation. A controller may reject more than ACWU, which is one block (NVM 1.0,
/// section 2.1.4).
pub const FUSED_BYTES_MAX: u32 = 64 << 10;

/// Plans a command whose FUSE or PSDT bits are not those of an ordinary command.
#[cold]
pub(super) fn plan(sqe: &Sqe, table: &NamespaceTable) -> Result<IoPlan, Status> {
    let psdt_wrong = if table.memory_based { sqe.flags & 0x80 } else { sqe.flags & 0xc0 ^ Sqe::FLAGS_SGL };
    let (opcode, op) = match sqe.fuse() {
        Fuse::First => (NvmOpcode::Compare, IoOp::FusedCompare),
        Fuse::Second => (NvmOpcode::Write, IoOp::FusedWrite),
        Fuse::Normal | Fuse::Reserved => return Err(INVALID_FIELD),
    };
    if psdt_wrong != 0 || !table.compare_and_write || sqe.opcode != opcode.to_wire() {
        return Err(INVALID_FIELD);
    }
    let plan = read_write(sqe, table, op)?;
    if matches!(plan.data, DataTransfer::Fused(bytes) if bytes > FUSED_BYTES_MAX) {
        return Err(INVALID_FIELD);
    }
    Ok(plan)
}

/// Whether the previous command of a queue was the first of a fused operation. `T` identifies a command for
/// the transport.
///
/// The transport keeps one per submission queue. If [`expects_second`](Self::expects_second) or the command
/// is fused, it calls [`match_next`](Self::match_next); after it accepted or rejected a first command it sets
/// the pairing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum FusedPairing<T> {
    /// The previous command was not the first of a fused operation.
    #[default]
    None,
    /// The first command is pending until the second arrives.
    FirstPending(T, IoPlan),
    /// The first command was rejected, so the second is aborted.
    FirstRejected,
}

/// How to handle a command and the pending first command, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FusedMatch<T> {
    /// It is the second command of the pending first one, with the same block range: execute both.
    Matched(T, IoPlan),
    /// It is not a second command: abort the first with the status, and execute this one independently.
    FirstAborted(T, Status),
    /// Abort the first command with the first status and this one with the second.
    BothAborted(T, Status, Status),
    /// Execute it independently.
    Independent,
    /// Abort it with the status.
    Rejected(Status),
}

impl<T: Copy> FusedPairing<T> {
    /// Whether the next command must be passed to [`match_next`](Self::match_next) even if it is not fused.
    #[inline]
    pub(crate) fn expects_second(&self) -> bool {
        !matches!(self, FusedPairing::None)
    }

    /// Matches the next command with the previous one and resets the pairing. `planned` is the result of
    /// planning it. After [`FusedMatch::Independent`] or [`FusedMatch::FirstAborted`] for a first command,
    /// the caller sets the pairing again.
    pub(crate) fn match_next(&mut self, sqe: &Sqe, planned: &Result<IoPlan, Status>) -> FusedMatch<T> {
        let is_second = sqe.fuse() == Fuse::Second;
        match (std::mem::take(self), is_second) {
            // A first command without a second (Base 2.0, section 3.4.2).
            (FusedPairing::FirstPending(first, _), false) => {
                FusedMatch::FirstAborted(first, Status::FUSED_MISSING)
            }
            (FusedPairing::FirstPending(first, plan), true) => match planned {
                Ok(second) if is_same_range(&plan, second) => FusedMatch::Matched(first, *second),
                Ok(_) => FusedMatch::BothAborted(first, INVALID_FIELD, INVALID_FIELD),
                Err(status) => FusedMatch::BothAborted(first, Status::FUSED_FAILED, *status),
            },
            (FusedPairing::FirstRejected, true) => FusedMatch::Rejected(Status::FUSED_FAILED),
            // A second command without a first; its own status is irrelevant.
            (FusedPairing::None, true) => FusedMatch::Rejected(Status::FUSED_MISSING),
            (FusedPairing::None | FusedPairing::FirstRejected, false) => FusedMatch::Independent,
        }
    }
}

fn is_same_range(first: &IoPlan, second: &IoPlan) -> bool {
    let range = |plan: &IoPlan| (plan.namespace, plan.lba, plan.blocks);
    range(first) == range(second)
}
