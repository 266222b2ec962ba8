//! Fused Compare and Write (NVM 1.0, section 3.1.1; Base 2.0, section 3.4.2).
//!
//! The two commands are next to each other in a queue. [`Pairing`] is what a queue remembers from one command
//! to the next.

use ring::Status;
use wire_nvme::Sqe;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::sqe::Fuse;

use super::{NamespaceTable, Op, Plan, Transfer, read_write};
use crate::INVALID_FIELD;

/// Most bytes of a fused operation. More than ACWU, which is one block, may be refused (NVM 1.0, section 2.1.4).
pub const FUSED_BYTES_MAX: u32 = 64 << 10;

/// Plans a command whose flags are not those of an ordinary one.
#[cold]
pub(super) fn plan(sqe: &Sqe, table: &NamespaceTable) -> Result<Plan, Status> {
    let psdt_wrong = if table.memory_based { sqe.flags & 0x80 } else { sqe.flags & 0xc0 ^ Sqe::FLAGS_SGL };
    let (opcode, op) = match sqe.fuse() {
        Fuse::First => (NvmOpcode::Compare, Op::FusedCompare),
        Fuse::Second => (NvmOpcode::Write, Op::FusedWrite),
        Fuse::Normal | Fuse::Reserved => return Err(INVALID_FIELD),
    };
    if psdt_wrong != 0 || !table.compare_and_write || sqe.opcode != opcode.to_wire() {
        return Err(INVALID_FIELD);
    }
    let (plan, length) = read_write(sqe, table, op)?;
    if length > FUSED_BYTES_MAX {
        return Err(INVALID_FIELD);
    }
    Ok(Plan { data: Transfer::Fused(length), ..plan })
}

/// What a queue knows of the command before: `T` is how the transport names a first command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pairing<T> {
    /// Nothing that matters.
    #[default]
    None,
    /// It was the first of a fused operation, and waits for the second.
    Waits(T, Plan),
    /// It was the first of a fused operation, and has been refused.
    Refused,
}

/// What becomes of a command that follows another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paired<T> {
    /// It is the second of the operation whose first is named. What the first compares with and what the second
    /// writes is of the same blocks.
    With(T, Plan),
    /// It has nothing to do with the first that is named, which is to be aborted with the status; it is to be
    /// executed as if it came alone.
    Apart(T, Status),
    /// The first that is named is to be aborted with the status; the command itself with the other.
    Neither(T, Status, Status),
    /// It is to be executed as if it came alone.
    Alone,
    /// It is to be aborted with this status.
    Refused(Status),
}

impl<T: Copy> Pairing<T> {
    /// Whether the next command has to be shown to [`follow`](Self::follow) even if it is not fused.
    #[inline]
    pub fn is_open(&self) -> bool {
        !matches!(self, Pairing::None)
    }

    /// A command follows. Its plan, or why there is none, is `planned`; after [`Paired::Alone`] and
    /// [`Paired::Apart`] of a first command, the caller sets the pairing anew.
    pub fn follow(&mut self, sqe: &Sqe, planned: &Result<Plan, Status>) -> Paired<T> {
        let is_second = sqe.fuse() == Fuse::Second;
        match (std::mem::take(self), is_second) {
            // A first alone (Base 2.0, section 3.4.2).
            (Pairing::Waits(first, _), false) => Paired::Apart(first, Status::FUSED_MISSING),
            (Pairing::Waits(first, plan), true) => match planned {
                Ok(second) if is_same_range(&plan, second) => Paired::With(first, *second),
                Ok(_) => Paired::Neither(first, INVALID_FIELD, INVALID_FIELD),
                Err(status) => Paired::Neither(first, Status::FUSED_FAILED, *status),
            },
            (Pairing::Refused, true) => Paired::Refused(Status::FUSED_FAILED),
            // A second alone; what it says cannot make that better.
            (Pairing::None, true) => Paired::Refused(Status::FUSED_MISSING),
            (Pairing::None | Pairing::Refused, false) => Paired::Alone,
        }
    }
}

fn is_same_range(first: &Plan, second: &Plan) -> bool {
    let range = |plan: &Plan| (plan.namespace, plan.lba, plan.blocks);
    range(first) == range(second)
}
