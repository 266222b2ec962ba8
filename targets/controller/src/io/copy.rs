//! Copy (NVM 1.0, section 3.2.2): reads and writes of bounded pieces, one after the other.
//!
//! A [`Copying`] says which piece is next; the transport reads and writes it, and tells when it has.

use ring::{Flags, Status};
use wire_nvme::Sqe;
use wire_nvme::io::{COPY_RANGE_SIZE, Copy, CopyRange};

use super::{Entry, FUA, NamespaceTable, Op, PROTECTION, Plan, Transfer};
use crate::INVALID_FIELD;

/// Source ranges of one Copy (MSRC): a page of them.
pub(crate) const RANGES_MAX: u16 = 128;
/// Bytes of one Copy (MCL), and of each of its ranges: some milliseconds of a fast device.
const BYTES_MAX: u64 = 16 << 20;

/// PRINFOR and STCR, which only a Copy has.
const SOURCE_PROTECTION: u32 = 0xf << 12 | 1 << 25;

/// Most blocks of a Copy (MCL), of blocks of so many bytes as a power of two.
pub(crate) fn blocks_max(block_log2: u8) -> u32 {
    ((BYTES_MAX >> block_log2) as u32).max(1)
}

/// Most blocks of one of its ranges (MSSRL).
pub(crate) fn range_blocks_max(block_log2: u8) -> u16 {
    u16::try_from(blocks_max(block_log2)).unwrap_or(u16::MAX)
}

/// Plans a Copy; `blocks` of the plan is the number of ranges in the host's data.
pub(super) fn plan(sqe: &Sqe, table: &NamespaceTable) -> Result<Plan, Status> {
    let (namespace, entry) = table.find(sqe.nsid)?;
    // Only source ranges of format 0 (OCFS).
    let command = Copy::of(sqe).ok_or(INVALID_FIELD)?;
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
    let need = u32::from(command.ranges) * COPY_RANGE_SIZE as u32;
    let length = if table.memory_based { need } else { sqe.data.length() };
    if length < need || length > u32::from(RANGES_MAX) * COPY_RANGE_SIZE as u32 {
        return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
    }
    if command.lba >= entry.blocks {
        return Err(Status::LBA_OUT_OF_RANGE.do_not_retry());
    }
    Ok(Plan {
        op: Op::Copy,
        lba: command.lba,
        blocks: command.ranges.into(),
        namespace,
        data: Transfer::FromHost(length),
        flags: if sqe.cdw12 & FUA != 0 { Flags::FUA } else { Flags::NONE },
    })
}

/// A Copy that goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copying {
    /// The transport's key for the block device.
    pub backend: u32,
    plan: Plan,
    block_log2: u8,
    ranges: Vec<(u64, u32)>,
    /// Of the range at `index`, `done_blocks` are copied.
    index: usize,
    done_blocks: u32,
    to: u64,
    piece_blocks_max: u32,
}

/// A part of a [`Copying`] that is read and then written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First block that is read.
    pub from: u64,
    /// First block that is written.
    pub to: u64,
    /// Number of blocks, 1 at least.
    pub blocks: u32,
}

impl Copying {
    /// Begins an [`Op::Copy`] plan with the ranges that the host sent. All of them are checked first.
    ///
    /// # Errors
    /// The status to complete the command with; nothing is to be copied then. Where the destination overlaps
    /// a source it is Invalid Field, since what would be copied then is not defined.
    pub fn new(plan: &Plan, table: &NamespaceTable, data: &[u8]) -> Result<Copying, Status> {
        let Entry { blocks: end, backend, block_log2, .. } = *table.entry(plan);
        let count = plan.blocks as usize;
        let list = data.as_chunks::<COPY_RANGE_SIZE>().0.get(..count);
        let list = list.ok_or(Status::DATA_SGL_LENGTH_INVALID.do_not_retry())?;
        let ranges: Vec<(u64, u32)> =
            list.iter().map(CopyRange::decode).map(|range| (range.lba, range.blocks)).collect();
        let total: u64 = ranges.iter().map(|(_, blocks)| u64::from(*blocks)).sum();
        let too_long = |(_, blocks): &(u64, u32)| *blocks > range_blocks_max(block_log2).into();
        if ranges.iter().any(too_long) || total > blocks_max(block_log2).into() {
            return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.do_not_retry());
        }
        let beyond = |lba: u64, blocks: u64| lba > end || blocks > end - lba;
        let out_of_range = |(lba, blocks): &(u64, u32)| beyond(*lba, (*blocks).into());
        if ranges.iter().any(out_of_range) || beyond(plan.lba, total) {
            return Err(Status::LBA_OUT_OF_RANGE.do_not_retry());
        }
        let overlaps =
            |(lba, blocks): &(u64, u32)| *lba < plan.lba + total && plan.lba < *lba + u64::from(*blocks);
        if ranges.iter().any(overlaps) {
            return Err(INVALID_FIELD);
        }
        let piece_blocks_max = (table.transfer_max_bytes >> block_log2).max(1);
        let (plan, to) = (*plan, plan.lba);
        Ok(Copying { backend, plan, block_log2, ranges, index: 0, done_blocks: 0, to, piece_blocks_max })
    }

    /// FUA of its writes.
    pub fn flags(&self) -> Flags {
        self.plan.flags
    }

    /// Whether it may go on: its namespace is still there, and reservations have not come in between.
    ///
    /// # Errors
    /// The status to complete the command with.
    pub fn admit(&self, table: &NamespaceTable) -> Result<(), Status> {
        let (_, entry) = table.find(self.plan.namespace + 1)?;
        if entry.backend != self.backend {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
        }
        table.admit(&self.plan)
    }

    /// Bytes of its largest piece.
    pub fn bytes_max(&self) -> usize {
        let longest = self.ranges.iter().map(|(_, blocks)| *blocks).max().unwrap_or(0);
        (longest.min(self.piece_blocks_max) as usize) << self.block_log2
    }

    /// The piece that is next, `None` at the end. It stays the same until it is [`done`](Self::done).
    pub fn next(&self) -> Option<Piece> {
        let (lba, blocks) = *self.ranges.get(self.index)?;
        let blocks = (blocks - self.done_blocks).min(self.piece_blocks_max);
        Some(Piece { from: lba + u64::from(self.done_blocks), to: self.to, blocks })
    }

    /// Bytes of a piece.
    pub fn bytes(&self, piece: &Piece) -> usize {
        (piece.blocks as usize) << self.block_log2
    }

    /// The piece that was next has been written.
    pub fn done(&mut self) {
        let Some(piece) = self.next() else { return };
        self.to += u64::from(piece.blocks);
        self.done_blocks += piece.blocks;
        if self.done_blocks == self.ranges[self.index].1 {
            (self.index, self.done_blocks) = (self.index + 1, 0);
        }
    }

    /// Number of the first source range that was not copied as a whole: dword 0 of a completion that tells of a
    /// failure.
    pub fn range(&self) -> u32 {
        self.index as u32
    }
}
