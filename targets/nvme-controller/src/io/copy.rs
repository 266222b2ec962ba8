//! Copy (NVM 1.0, section 3.2.2), executed as one device request for each source range.
//!
//! [`CopyOperation::current_range`] returns the next range, which the block device layer copies, then
//! [`CopyOperation::complete_range`] is called.

use block_io::{RequestFlags, Status};
use wire_nvme::Sqe;
use wire_nvme::io::{COPY_RANGE_SIZE, CopyCommand, CopyRange};

use super::{DataTransfer, EMPTY_PLAN, FUA, IoOp, IoPlan, NamespaceEntry, NamespaceTable, PROTECTION};
use crate::INVALID_FIELD;

/// Most source ranges of a Copy (MSRC): one 4 KiB page.
pub(crate) const RANGES_MAX: u16 = 128;
/// Most bytes of a Copy (MCL) and of each of its ranges (MSSRL): a few milliseconds on a fast device.
const BYTES_MAX: u64 = 16 << 20;

/// PRINFOR and STCR, the protection fields for reading that only Copy has.
const SOURCE_PROTECTION: u32 = 0xf << 12 | 1 << 25;

/// Most blocks of a Copy (MCL) for a block size.
pub(crate) fn copy_blocks_max(block_log2: u8) -> u32 {
    ((BYTES_MAX >> block_log2) as u32).max(1)
}

/// Most blocks of a source range (MSSRL) for a block size.
pub(crate) fn copy_range_blocks_max(block_log2: u8) -> u16 {
    u16::try_from(copy_blocks_max(block_log2)).unwrap_or(u16::MAX)
}

/// Plans a Copy. The plan's `blocks` is the number of ranges in the host's data.
pub(super) fn plan(sqe: &Sqe, table: &NamespaceTable) -> Result<IoPlan, Status> {
    let (namespace, entry) = table.find(sqe.nsid)?;
    if !entry.hidden_protection.is_empty() {
        // Reference tags count from the LBA, and the block layer copies whole blocks.
        return Err(Status::INVALID_OPCODE.do_not_retry());
    }
    // Only source ranges of format 0 (OCFS).
    let command = CopyCommand::from_sqe(sqe).ok_or(INVALID_FIELD)?;
    if sqe.cdw12 & (PROTECTION | SOURCE_PROTECTION) != 0 {
        return Err(Status::INVALID_PROTECTION_INFORMATION.do_not_retry());
    }
    if sqe.cdw12 & super::DIRECTIVE != 0 || sqe.mptr != 0 {
        return Err(INVALID_FIELD);
    }
    if entry.read_only {
        return Err(Status::NAMESPACE_WRITE_PROTECTED.do_not_retry());
    }
    if command.ranges > RANGES_MAX {
        return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.do_not_retry());
    }
    let required = u32::from(command.ranges) * COPY_RANGE_SIZE as u32;
    let length = if table.memory_based { required } else { sqe.data.length() };
    if length < required || length > u32::from(RANGES_MAX) * COPY_RANGE_SIZE as u32 {
        return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
    }
    if command.lba >= entry.blocks {
        return Err(Status::LBA_OUT_OF_RANGE.do_not_retry());
    }
    Ok(IoPlan {
        op: IoOp::Copy,
        lba: command.lba,
        blocks: command.ranges.into(),
        namespace,
        data: DataTransfer::FromHost(length),
        flags: if sqe.cdw12 & FUA != 0 { RequestFlags::FUA } else { RequestFlags::NONE },
        ..EMPTY_PLAN
    })
}

/// A Copy command in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CopyOperation {
    /// The transport's key for the block device.
    pub(crate) backend: u32,
    plan: IoPlan,
    ranges: Vec<(u64, u32)>,
    /// The current range.
    index: usize,
    to: u64,
}

/// A source range of a [`CopyOperation`], with its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyPart {
    /// First block to read.
    pub(crate) from: u64,
    /// First block to write.
    pub(crate) to: u64,
    /// Number of blocks, 1 at least.
    pub(crate) blocks: u32,
}

impl CopyOperation {
    /// Starts an [`IoOp::Copy`] plan with the ranges in the host's data, after it has validated all of them.
    ///
    /// # Errors
    /// The status to complete the command with; nothing must be copied then. A destination that overlaps a
    /// source fails with Invalid Field, since the result would be undefined.
    pub(crate) fn new(plan: &IoPlan, table: &NamespaceTable, data: &[u8]) -> Result<CopyOperation, Status> {
        let NamespaceEntry { blocks: end, backend, block_log2, .. } = *table.entry(plan);
        let count = plan.blocks as usize;
        let list = data.as_chunks::<COPY_RANGE_SIZE>().0.get(..count);
        let list = list.ok_or(Status::DATA_SGL_LENGTH_INVALID.do_not_retry())?;
        let ranges: Vec<(u64, u32)> =
            list.iter().map(CopyRange::decode).map(|range| (range.lba, range.blocks)).collect();
        let total: u64 = ranges.iter().map(|(_, blocks)| u64::from(*blocks)).sum();
        let too_long = |(_, blocks): &(u64, u32)| *blocks > copy_range_blocks_max(block_log2).into();
        if ranges.iter().any(too_long) || total > copy_blocks_max(block_log2).into() {
            return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.do_not_retry());
        }
        let exceeds_end = |lba: u64, blocks: u64| lba > end || blocks > end - lba;
        let out_of_range = |(lba, blocks): &(u64, u32)| exceeds_end(*lba, (*blocks).into());
        if ranges.iter().any(out_of_range) || exceeds_end(plan.lba, total) {
            return Err(Status::LBA_OUT_OF_RANGE.do_not_retry());
        }
        let overlaps =
            |(lba, blocks): &(u64, u32)| *lba < plan.lba + total && plan.lba < *lba + u64::from(*blocks);
        if ranges.iter().any(overlaps) {
            return Err(INVALID_FIELD);
        }
        Ok(CopyOperation { backend, plan: *plan, ranges, index: 0, to: plan.lba })
    }

    /// Flags of the writes (FUA).
    pub(crate) fn flags(&self) -> RequestFlags {
        self.plan.flags
    }

    /// Checks before the next range that the namespace still exists and reservations still permit the copy.
    ///
    /// # Errors
    /// The status to complete the command with.
    pub(crate) fn check_access(&self, table: &NamespaceTable) -> Result<(), Status> {
        let (_, entry) = table.find(u32::from(self.plan.namespace) + 1)?;
        if entry.backend != self.backend {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
        }
        table.check_reservation(&self.plan)
    }

    /// The range to copy; `None` at the end. It stays the same until
    /// [`complete_range`](Self::complete_range).
    pub(crate) fn current_range(&self) -> Option<CopyPart> {
        let (from, blocks) = *self.ranges.get(self.index)?;
        Some(CopyPart { from, to: self.to, blocks })
    }

    /// Advances to the next range, after the current one was copied.
    pub(crate) fn complete_range(&mut self) {
        if let Some(part) = self.current_range() {
            self.to += u64::from(part.blocks);
            self.index += 1;
        }
    }

    /// Number of the first source range that was not copied entirely: dword 0 of a failed completion.
    pub(crate) fn index(&self) -> u32 {
        self.index as u32
    }
}
