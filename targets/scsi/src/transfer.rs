//! READ and WRITE: one device request with the data as it is.

use block_io::{Op, Payload, RequestFlags, Tag};
use dma::Data;
use wire_scsi::{AdditionalSense, BlockRange, RangeFlags, Sense};

use crate::access::check_writable;
use crate::limits::TRANSFER_BYTES_MAX;
use crate::nexus::UnitNexus;
use crate::response::{DataIn, Failure, Residual, check};
use crate::task::Step;
use crate::unit::LogicalUnit;

/// A read or a write of blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    lba: u64,
    /// Blocks that are transferred: those that the initiator has data or room for.
    blocks: u32,
    flags: RequestFlags,
    is_write: bool,
    /// Bytes of all blocks that the CDB names.
    command_bytes: u64,
}

/// Checks that the blocks of a command are on the unit (SBC-4, section 4.3.2). A range without blocks may begin at
/// its end.
pub(crate) fn check_range(unit: &LogicalUnit, lba: u64, blocks: u64) -> Result<(), Failure> {
    let end = lba.checked_add(blocks);
    if end.is_some_and(|end| end <= unit.blocks()) {
        return Ok(());
    }
    Err(out_of_range())
}

#[cold]
fn out_of_range() -> Failure {
    check(Sense::illegal(AdditionalSense::LBA_OUT_OF_RANGE))
}

/// Checks the range of a command that transfers its blocks: protection, length and place.
pub(crate) fn check_transfer(unit: &LogicalUnit, range: &BlockRange) -> Result<(), Failure> {
    if range.protect != 0 {
        // There is no protection information.
        return Err(check(Sense::invalid_field(1, Some(7))));
    }
    check_range(unit, range.lba, range.blocks.into())?;
    if u64::from(range.blocks) * u64::from(unit.block_bytes()) > u64::from(TRANSFER_BYTES_MAX) {
        return Err(check(Sense::illegal(AdditionalSense::INVALID_FIELD_IN_CDB)));
    }
    Ok(())
}

/// Most blocks of a WRITE ATOMIC, whose length has 16 bits; 0 if the device promises nothing.
pub(crate) fn atomic_blocks_max(unit: &LogicalUnit) -> u32 {
    let transfer_blocks = TRANSFER_BYTES_MAX / unit.block_bytes().max(1);
    let geometry = &unit.config().geometry;
    let most = geometry.atomic_write_blocks.min(transfer_blocks).min(u16::MAX.into());
    let unit_min = geometry.atomic_write_unit_min_blocks;
    if unit_min == 0 {
        return most;
    }
    let power_of_two = most.checked_ilog2().map_or(0, |log2| 1 << log2);
    if power_of_two >= unit_min { power_of_two } else { 0 }
}

/// The unit of a WRITE ATOMIC's length and place in blocks; 0 for any length, anywhere.
pub(crate) fn atomic_unit_blocks(unit: &LogicalUnit) -> u32 {
    if atomic_blocks_max(unit) == 0 { 0 } else { unit.config().geometry.atomic_write_unit_min_blocks }
}

/// The flags of a device's write.
pub(crate) fn write_flags(unit: &LogicalUnit, flags: RangeFlags) -> RequestFlags {
    let is_durable = flags.contains(RangeFlags::FUA) && unit.config().geometry.write_cache;
    if is_durable || unit.writes_through() { RequestFlags::FUA } else { RequestFlags::NONE }
}

impl Transfer {
    /// A read for an initiator that expects so many bytes.
    #[inline]
    pub(crate) fn read(nexus: &UnitNexus, range: &BlockRange, expected: u32) -> Result<Transfer, Failure> {
        let unit = nexus.unit();
        check_transfer(unit, range)?;
        // A block of which the initiator expects a part is read as a whole.
        let blocks = range.blocks.min(expected.div_ceil(unit.block_bytes()));
        Ok(Transfer::new(unit, range, blocks, RequestFlags::NONE, false))
    }

    /// A write of an initiator that has so many bytes, of whole blocks.
    #[inline]
    pub(crate) fn write(nexus: &UnitNexus, range: &BlockRange, expected: u32) -> Result<Transfer, Failure> {
        let unit = nexus.unit();
        check_transfer(unit, range)?;
        check_writable(nexus)?;
        let blocks = range.blocks.min(expected / unit.block_bytes());
        Ok(Transfer::new(unit, range, blocks, write_flags(unit, range.flags), true))
    }

    /// An atomic write (SBC-4, section 5.47) of an initiator that has so many bytes: all blocks or none.
    #[cold]
    pub(crate) fn write_atomic(
        nexus: &UnitNexus,
        range: &BlockRange,
        boundary_blocks: u32,
        expected: u32,
    ) -> Result<Transfer, Failure> {
        let unit = nexus.unit();
        let blocks_max = atomic_blocks_max(unit);
        if blocks_max == 0 {
            return Err(check(Sense::illegal(AdditionalSense::INVALID_COMMAND_OPERATION_CODE)));
        }
        check_transfer(unit, range)?;
        check_writable(nexus)?;
        // An alignment of its own would keep such a boundary too, but initiators that align writes to their length need none.
        let device_boundary = u64::from(unit.config().geometry.atomic_write_boundary_blocks);
        let first = range.lba.checked_rem(device_boundary).unwrap_or(0);
        let is_crossing = device_boundary > 0 && first + u64::from(range.blocks) > device_boundary;
        // A length that is no power of two, and a place that is no multiple of the length, fit the unit that page B0 has, and
        // not the device.
        let unit_blocks = atomic_unit_blocks(unit);
        let is_unit = unit_blocks == 0 || (range.blocks.is_power_of_two() && range.blocks >= unit_blocks);
        let is_aligned = unit_blocks == 0 || range.lba.is_multiple_of(range.blocks.max(1).into());
        let invalid_byte = if range.blocks > 0 && !is_unit {
            Some(12)
        } else if is_crossing || !is_aligned {
            Some(2)
        } else if boundary_blocks > 0 {
            // MAXIMUM ATOMIC BOUNDARY SIZE is 0.
            Some(10)
        } else if range.blocks > blocks_max || expected / unit.block_bytes() < range.blocks {
            Some(12)
        } else {
            None
        };
        if let Some(byte) = invalid_byte {
            return Err(check(Sense::invalid_field(byte, None)));
        }
        let flags = write_flags(unit, range.flags) | RequestFlags::ATOMIC;
        Ok(Transfer::new(unit, range, range.blocks, flags, true))
    }

    #[inline]
    fn new(
        unit: &LogicalUnit,
        range: &BlockRange,
        blocks: u32,
        flags: RequestFlags,
        is_write: bool,
    ) -> Transfer {
        let command_bytes = u64::from(range.blocks) * u64::from(unit.block_bytes());
        Transfer { lba: range.lba, blocks, flags, is_write, command_bytes }
    }

    /// Blocks to transfer; without any, no data is needed.
    #[inline]
    pub(crate) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Whether it is a write of an initiator that has a part of a block, too: see [`blocks`](crate::blocks).
    #[inline]
    pub(crate) fn leaves_part(&self, unit: &LogicalUnit, data_out_bytes: u32) -> bool {
        self.is_write && self.bytes(unit) < self.command_bytes.min(data_out_bytes.into())
    }

    /// Bytes to transfer.
    #[inline]
    pub(crate) fn bytes(&self, unit: &LogicalUnit) -> u64 {
        u64::from(self.blocks) * u64::from(unit.block_bytes())
    }

    /// Data of a write, or memory of a read.
    #[inline]
    pub(crate) fn first_step(&self, unit: &LogicalUnit) -> Step {
        let bytes = self.bytes(unit) as u32;
        if self.is_write { Step::DataOut(bytes) } else { Step::DataIn(bytes) }
    }

    #[inline]
    pub(crate) fn request(&self, tag: Tag, data: Data) -> bdev::Request {
        let op = if self.is_write { Op::Write } else { Op::Read };
        let mut request = bdev::Request::with_payload(tag, op, self.lba, self.blocks, Payload::Data(data));
        request.flags = self.flags;
        request
    }

    /// The data-in and the residual of a command that succeeds.
    #[inline]
    pub(crate) fn result(
        &self,
        data: Option<Data>,
        expected_in: u32,
        expected_out: u32,
    ) -> (DataIn, Residual) {
        if self.command_bytes == 0 {
            return (DataIn::None, Residual::of(0, expected_in.max(expected_out)));
        }
        if self.is_write {
            return (DataIn::None, Residual::of(self.command_bytes, expected_out));
        }
        let valid = self.command_bytes.min(expected_in.into()) as u32;
        let data = data.map_or(DataIn::None, |data| DataIn::Data(data, valid));
        (data, Residual::of(self.command_bytes, expected_in))
    }

    /// The residual of a command that fails: a write's data was transferred, a read's was not.
    pub(crate) fn residual_of_failure(&self, expected_in: u32, expected_out: u32) -> Residual {
        if self.is_write {
            Residual::of(self.command_bytes, expected_out)
        } else {
            Residual::of(0, expected_in)
        }
    }
}
