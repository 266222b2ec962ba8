//! Plans commands about blocks other than READ and WRITE: checks them, and begins their operations.

#[cfg(test)]
mod tests;

use block_io::{Op, RequestFlags};
use wire_scsi::blocks::lba_status_extents;
use wire_scsi::{AdditionalSense, BlockRange, Cdb, RangeFlags, Sense};

use crate::access::check_writable;
use crate::information::Started;
use crate::limits::{COMPARE_AND_WRITE_BLOCKS_MAX, EXTENTS_MAX, TRANSFER_BYTES_MAX, WRITE_SAME_BLOCKS_MAX};
use crate::nexus::UnitNexus;
use crate::operation::{
    Answer, CompareAndWrite, Flush, GetLbaStatus, Merge, MergeWrite, Operation, Pattern, Repeat, Unmap,
    VerifyData, WriteSame, WriteSameState,
};
use crate::response::{Failure, check};
use crate::transfer::{check_range, check_transfer, write_flags};
use crate::unit::LogicalUnit;

fn begin(operation: impl Operation + 'static) -> Result<Started, Failure> {
    Ok(Started::Operation(Box::new(operation)))
}

fn good() -> Result<Started, Failure> {
    Ok(Started::Answer(Answer::good()))
}

fn unsupported() -> Failure {
    check(Sense::illegal(AdditionalSense::INVALID_COMMAND_OPERATION_CODE))
}

fn invalid(byte: u16, bit: Option<u8>) -> Failure {
    check(Sense::invalid_field(byte, bit))
}

/// Starts a command about blocks; `None` if it is another. `data_out_bytes` is what the initiator has.
pub(crate) fn start(cdb: &Cdb, nexus: &UnitNexus, data_out_bytes: u32) -> Option<Result<Started, Failure>> {
    let unit = nexus.unit();
    Some(match cdb {
        Cdb::Write(range) => write_part(nexus, range, data_out_bytes),
        Cdb::CompareAndWrite(range) => compare_and_write(nexus, range, data_out_bytes),
        Cdb::OrWrite(range) => or_write(nexus, range, data_out_bytes),
        Cdb::WriteAndVerify { range, byte_check } => {
            write_and_verify(nexus, range, *byte_check, data_out_bytes)
        }
        Cdb::Verify { range, byte_check } => verify(unit, range, *byte_check, data_out_bytes),
        Cdb::WriteSame(range) => write_same(nexus, range, data_out_bytes),
        Cdb::Unmap { anchor, parameter_bytes } => unmap(nexus, *anchor, *parameter_bytes),
        // Nothing is cached.
        Cdb::PreFetch(range) => check_range(unit, range.lba, range.blocks.into()).and_then(|()| good()),
        Cdb::SynchronizeCache(range) => synchronize(unit, range),
        Cdb::GetLbaStatus { lba, allocation } => get_lba_status(unit, *lba, *allocation),
        _ => return None,
    })
}

/// Most blocks of a COMPARE AND WRITE, whose data-out has two of each.
pub(crate) fn compare_and_write_blocks_max(unit: &LogicalUnit) -> u32 {
    if !bdev::supports_fused() {
        return 0;
    }
    (TRANSFER_BYTES_MAX / 2 / unit.block_bytes()).min(COMPARE_AND_WRITE_BLOCKS_MAX)
}

fn compare_and_write(nexus: &UnitNexus, range: &BlockRange, data_out_bytes: u32) -> Result<Started, Failure> {
    let unit = nexus.unit();
    let blocks_max = compare_and_write_blocks_max(unit);
    if blocks_max == 0 {
        return Err(unsupported());
    }
    check_transfer(unit, range)?;
    check_writable(nexus)?;
    if range.blocks > blocks_max {
        return Err(invalid(13, None));
    }
    let half_bytes = range.blocks * unit.block_bytes();
    // Half of it would be compared with the other half's blocks.
    if data_out_bytes != half_bytes * 2 {
        return Err(invalid(13, None));
    }
    if range.blocks == 0 {
        return good();
    }
    begin(CompareAndWrite::new(range.lba, range.blocks, write_flags(unit, range.flags), half_bytes))
}

fn or_write(nexus: &UnitNexus, range: &BlockRange, data_out_bytes: u32) -> Result<Started, Failure> {
    let unit = nexus.unit();
    if !bdev::supports_fused() {
        return Err(unsupported());
    }
    check_transfer(unit, range)?;
    check_writable(nexus)?;
    let bytes = range.blocks * unit.block_bytes();
    if data_out_bytes < bytes {
        return Err(invalid(10, None));
    }
    if bytes == 0 {
        return good();
    }
    begin(MergeWrite::new(range.lba, range.blocks, write_flags(unit, range.flags), bytes, Merge::Or))
}

/// A WRITE of an initiator that has a part of a block: the rest of the block stays.
fn write_part(nexus: &UnitNexus, range: &BlockRange, data_out_bytes: u32) -> Result<Started, Failure> {
    let unit = nexus.unit();
    check_transfer(unit, range)?;
    check_writable(nexus)?;
    if !bdev::supports_fused() {
        return Err(check(Sense::illegal(AdditionalSense::INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT)));
    }
    let block_bytes = unit.block_bytes();
    let blocks = data_out_bytes.div_ceil(block_bytes);
    let command_bytes = u64::from(range.blocks) * u64::from(block_bytes);
    let merge = Merge::Overlay { bytes: data_out_bytes, command_bytes };
    let flags = write_flags(unit, range.flags);
    begin(MergeWrite::new(range.lba, blocks, flags, blocks * block_bytes, merge))
}

/// Writes, and compares even if BYTCHK asks only for a check of the medium.
fn write_and_verify(
    nexus: &UnitNexus,
    range: &BlockRange,
    byte_check: u8,
    data_out_bytes: u32,
) -> Result<Started, Failure> {
    let unit = nexus.unit();
    if byte_check > 1 {
        return Err(invalid(1, Some(2)));
    }
    check_transfer(unit, range)?;
    check_writable(nexus)?;
    // What is verified is on the medium.
    let write = Some(write_flags(unit, range.flags | RangeFlags::FUA));
    verify_data(unit, range, write, data_out_bytes)
}

/// Only whole blocks that the initiator has are used: of a part of one, unlike with WRITE, nothing is compared or written.
fn verify_data(
    unit: &LogicalUnit,
    range: &BlockRange,
    write: Option<RequestFlags>,
    data_out_bytes: u32,
) -> Result<Started, Failure> {
    let blocks = range.blocks.min(data_out_bytes / unit.block_bytes());
    let command_bytes = u64::from(range.blocks) * u64::from(unit.block_bytes());
    if blocks == 0 {
        return Ok(Started::Answer(Answer { data_out_bytes: command_bytes, ..Answer::good() }));
    }
    let bytes = blocks * unit.block_bytes();
    begin(VerifyData { lba: range.lba, blocks, write, bytes, command_bytes, is_compared: false })
}

fn verify(
    unit: &LogicalUnit,
    range: &BlockRange,
    byte_check: u8,
    data_out_bytes: u32,
) -> Result<Started, Failure> {
    let (range_of, block_bytes) = ((range.lba, u64::from(range.blocks)), unit.block_bytes());
    match byte_check {
        1 => {
            check_transfer(unit, range)?;
            return verify_data(unit, range, None, data_out_bytes);
        }
        2 => return Err(invalid(1, Some(2))),
        _ => {}
    }
    if range.protect != 0 {
        return Err(invalid(1, Some(7)));
    }
    check_range(unit, range.lba, range.blocks.into())?;
    if range.blocks == 0 {
        return good();
    }
    if byte_check == 0 {
        // Whether the medium can be read.
        return begin(Repeat::new(Op::Read, RequestFlags::NONE, range_of, block_bytes, Pattern::None));
    }
    if data_out_bytes < block_bytes {
        return Err(invalid(1, Some(2)));
    }
    begin(Repeat::new(Op::Compare, RequestFlags::NONE, range_of, block_bytes, Pattern::DataOut))
}

fn write_same(nexus: &UnitNexus, range: &BlockRange, data_out_bytes: u32) -> Result<Started, Failure> {
    let unit = nexus.unit();
    let unmaps = range.flags.contains(RangeFlags::UNMAP);
    if range.flags.contains(RangeFlags::ANCHOR) {
        return Err(invalid(1, Some(4)));
    }
    if unmaps && !unit.config().can_unmap {
        return Err(invalid(1, Some(3)));
    }
    if range.protect != 0 {
        return Err(invalid(1, Some(7)));
    }
    check_range(unit, range.lba, range.blocks.into())?;
    check_writable(nexus)?;
    // 0 would mean all blocks to the end (WSNZ).
    if range.blocks == 0 || range.blocks > WRITE_SAME_BLOCKS_MAX {
        return Err(check(Sense::illegal(AdditionalSense::INVALID_FIELD_IN_CDB)));
    }
    // Initiators send no block with UNMAP, too.
    let has_no_data = range.flags.contains(RangeFlags::NO_DATA) || unmaps && data_out_bytes == 0;
    if !has_no_data && data_out_bytes != unit.block_bytes() {
        return Err(check(Sense::illegal(AdditionalSense::INVALID_FIELD_IN_CDB)));
    }
    begin(WriteSame {
        lba: range.lba,
        blocks: range.blocks.into(),
        flags: write_flags(unit, RangeFlags::empty()),
        unmaps,
        has_no_data,
        state: WriteSameState::Receiving,
    })
}

fn unmap(nexus: &UnitNexus, anchor: bool, parameter_bytes: u32) -> Result<Started, Failure> {
    if !nexus.unit().config().can_unmap {
        return Err(unsupported());
    }
    if anchor {
        return Err(invalid(1, Some(0)));
    }
    check_writable(nexus)?;
    if parameter_bytes == 0 {
        return good();
    }
    begin(Unmap::new(parameter_bytes))
}

fn synchronize(unit: &LogicalUnit, range: &BlockRange) -> Result<Started, Failure> {
    check_range(unit, range.lba, range.blocks.into())?;
    // Without a cache that can be flushed there is none.
    if !unit.config().can_flush {
        return good();
    }
    begin(Flush { is_immediate: range.flags.contains(RangeFlags::IMMEDIATE) })
}

fn get_lba_status(unit: &LogicalUnit, lba: u64, allocation: u32) -> Result<Started, Failure> {
    check_range(unit, lba, 1)?;
    let extents_max = lba_status_extents(allocation).min(EXTENTS_MAX);
    begin(GetLbaStatus::new(lba, unit.blocks(), allocation, extents_max))
}
