//! Command descriptor blocks (SPC-4, chapter 6; SBC-4, chapter 5).

mod formats;

#[cfg(test)]
mod tests;

use crate::bytes::{be16, be24, be32, be64};
use crate::opcode as op;
use crate::{AdditionalSense, Sense};

pub use formats::CommandBits;

bitflags::bitflags! {
    /// Flags of a command that names blocks.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct RangeFlags: u8 {
        /// DPO: the blocks will not be needed soon.
        const DPO = 1 << 0;
        /// FUA: on the medium before the command completes.
        const FUA = 1 << 1;
        /// UNMAP of a WRITE SAME.
        const UNMAP = 1 << 2;
        /// ANCHOR of an UNMAP or WRITE SAME.
        const ANCHOR = 1 << 3;
        /// NDOB of a WRITE SAME(16): no data, zeroes are written.
        const NO_DATA = 1 << 4;
        /// IMMED of a SYNCHRONIZE CACHE or PRE-FETCH.
        const IMMEDIATE = 1 << 5;
    }
}

/// Blocks that a command is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockRange {
    /// First block.
    pub lba: u64,
    /// Number of blocks. 0 is none, except that some commands then mean all that follow.
    pub blocks: u32,
    /// Flags.
    pub flags: RangeFlags,
    /// RDPROTECT, WRPROTECT, VRPROTECT or ORPROTECT: 0 for a device without protection information.
    pub protect: u8,
}

/// A decoded command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "variants and fields have the specifications' names")]
pub enum Cdb {
    TestUnitReady,
    RequestSense {
        descriptor: bool,
        allocation: u32,
    },
    /// `page` is a vital product data page; `None` is standard data.
    Inquiry {
        page: Option<u8>,
        allocation: u32,
    },
    Read(BlockRange),
    Write(BlockRange),
    /// `byte_check` is BYTCHK, 0 to 3.
    WriteAndVerify {
        range: BlockRange,
        byte_check: u8,
    },
    Verify {
        range: BlockRange,
        byte_check: u8,
    },
    OrWrite(BlockRange),
    CompareAndWrite(BlockRange),
    /// `boundary_blocks` is ATOMIC BOUNDARY.
    WriteAtomic {
        range: BlockRange,
        boundary_blocks: u32,
    },
    WriteSame(BlockRange),
    Unmap {
        anchor: bool,
        parameter_bytes: u32,
    },
    PreFetch(BlockRange),
    SynchronizeCache(BlockRange),
    /// `lba` is 0 unless PMI is set.
    ReadCapacity10 {
        lba: u64,
        partial: bool,
    },
    ReadCapacity16 {
        lba: u64,
        partial: bool,
        allocation: u32,
    },
    GetLbaStatus {
        lba: u64,
        allocation: u32,
    },
    ReportLuns {
        select: u8,
        allocation: u32,
    },
    /// `page_control` 0 to 3: current, changeable, default, saved.
    ModeSense {
        ten: bool,
        long_lba: bool,
        no_blocks: bool,
        page_control: u8,
        page: u8,
        subpage: u8,
        allocation: u32,
    },
    ModeSelect {
        ten: bool,
        page_format: bool,
        save: bool,
        parameter_bytes: u32,
    },
    StartStopUnit {
        immediate: bool,
        power_condition: u8,
        no_flush: bool,
        load_eject: bool,
        start: bool,
    },
    PreventAllowMediumRemoval {
        prevent: u8,
    },
    /// `action` is of [`opcode::sanitize`](crate::opcode::sanitize).
    Sanitize {
        action: u8,
        immediate: bool,
        unrestricted_exit: bool,
        parameter_bytes: u32,
    },
    ReadDefectData {
        twelve: bool,
        primary: bool,
        grown: bool,
        format: u8,
        allocation: u32,
    },
    Reserve {
        ten: bool,
    },
    Release {
        ten: bool,
    },
    PersistentReserveIn {
        action: u8,
        allocation: u32,
    },
    PersistentReserveOut {
        action: u8,
        scope: u8,
        kind: u8,
        parameter_bytes: u32,
    },
    ExtendedCopy {
        parameter_bytes: u32,
    },
    ReceiveCopyResults {
        action: u8,
        list: u8,
        allocation: u32,
    },
    ReportTargetPortGroups {
        extended: bool,
        allocation: u32,
    },
    SetTargetPortGroups {
        parameter_bytes: u32,
    },
    /// `options` is REPORTING OPTIONS.
    ReportSupportedOpcodes {
        timeouts: bool,
        options: u8,
        opcode: u8,
        action: u16,
        allocation: u32,
    },
    ReportSupportedFunctions {
        extended: bool,
        allocation: u32,
    },
}

/// Why a CDB cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CdbError {
    /// No such operation code, or the CDB is shorter than the command.
    #[error("invalid operation code")]
    Opcode,
    /// A field is invalid.
    #[error("invalid field at byte {byte} of the CDB")]
    Field {
        /// The byte.
        byte: u16,
        /// The most significant bit of the field, if it is not a whole byte.
        bit: Option<u8>,
    },
}

impl CdbError {
    /// The sense data that reports it.
    pub const fn sense(self) -> Sense {
        match self {
            CdbError::Opcode => Sense::illegal(AdditionalSense::INVALID_COMMAND_OPERATION_CODE),
            CdbError::Field { byte, bit } => Sense::invalid_field(byte, bit),
        }
    }
}

const fn field(byte: u16, bit: u8) -> CdbError {
    CdbError::Field { byte, bit: Some(bit) }
}

/// Bytes of a CDB with this operation code (SPC-4, section 4.2.5.1); `None` if it is variable or vendor-specific.
const fn cdb_bytes(opcode: u8) -> Option<usize> {
    match opcode >> 5 {
        0 => Some(6),
        1 | 2 => Some(10),
        4 => Some(16),
        5 => Some(12),
        _ => None,
    }
}

/// NACA in the CONTROL byte, which no command here allows.
const NACA: u8 = 0x04;

impl Cdb {
    /// Decodes a CDB; what follows it is ignored. Fields that a device without protection information, media or
    /// removable parts does not use are ignored too.
    ///
    /// # Errors
    /// The command is unknown, cut off, or has a field that is not supported.
    #[inline]
    pub fn decode(bytes: &[u8]) -> Result<Cdb, CdbError> {
        let opcode = *bytes.first().ok_or(CdbError::Opcode)?;
        let length = cdb_bytes(opcode).ok_or(CdbError::Opcode)?;
        let cdb = bytes.get(..length).ok_or(CdbError::Opcode)?;
        if cdb[length - 1] & NACA != 0 {
            // An unknown command is reported as that.
            return Err(
                CommandBits::find(opcode, None).map_or(CdbError::Opcode, |_| field(length as u16 - 1, 2))
            );
        }
        Ok(match opcode {
            op::READ_10 | op::READ_12 | op::READ_16 => Cdb::Read(range(cdb)),
            op::WRITE_10 | op::WRITE_12 | op::WRITE_16 => Cdb::Write(range(cdb)),
            op::READ_6 => Cdb::Read(range_6(cdb)),
            op::WRITE_6 => Cdb::Write(range_6(cdb)),
            op::WRITE_AND_VERIFY_10 | op::WRITE_AND_VERIFY_12 | op::WRITE_AND_VERIFY_16 => {
                Cdb::WriteAndVerify { range: verified_range(cdb), byte_check: cdb[1] >> 1 & 3 }
            }
            op::VERIFY_10 | op::VERIFY_12 | op::VERIFY_16 => {
                Cdb::Verify { range: verified_range(cdb), byte_check: cdb[1] >> 1 & 3 }
            }
            op::ORWRITE_16 => Cdb::OrWrite(range(cdb)),
            op::COMPARE_AND_WRITE => {
                Cdb::CompareAndWrite(BlockRange { blocks: cdb[13].into(), ..range(cdb) })
            }
            op::WRITE_ATOMIC_16 => {
                let blocks = be16(cdb, 12).into();
                Cdb::WriteAtomic {
                    range: BlockRange { blocks, ..range(cdb) },
                    boundary_blocks: be16(cdb, 10).into(),
                }
            }
            op::WRITE_SAME_10 | op::WRITE_SAME_16 => {
                let mut flags = RangeFlags::empty();
                flags.set(RangeFlags::UNMAP, cdb[1] & 0x08 != 0);
                flags.set(RangeFlags::ANCHOR, cdb[1] & 0x10 != 0);
                flags.set(RangeFlags::NO_DATA, opcode == op::WRITE_SAME_16 && cdb[1] & 0x01 != 0);
                Cdb::WriteSame(BlockRange { flags, ..range(cdb) })
            }
            op::PRE_FETCH_10 | op::PRE_FETCH_16 => Cdb::PreFetch(cache_range(cdb)),
            op::SYNCHRONIZE_CACHE_10 | op::SYNCHRONIZE_CACHE_16 => Cdb::SynchronizeCache(cache_range(cdb)),
            op::UNMAP => Cdb::Unmap { anchor: cdb[1] & 1 != 0, parameter_bytes: be16(cdb, 7).into() },
            _ => decode_uncommon(opcode, cdb)?,
        })
    }
}

/// Commands that are not about a range of blocks.
fn decode_uncommon(opcode: u8, cdb: &[u8]) -> Result<Cdb, CdbError> {
    Ok(match opcode {
        op::TEST_UNIT_READY => Cdb::TestUnitReady,
        op::REQUEST_SENSE => Cdb::RequestSense { descriptor: cdb[1] & 1 != 0, allocation: cdb[4].into() },
        op::INQUIRY => {
            let page = (cdb[1] & 1 != 0).then_some(cdb[2]);
            // The page must be 0 for standard data (SPC-4, section 6.6.1).
            if page.is_none() && cdb[2] != 0 {
                return Err(CdbError::Field { byte: 2, bit: None });
            }
            Cdb::Inquiry { page, allocation: be16(cdb, 3).into() }
        }
        op::READ_CAPACITY_10 => Cdb::ReadCapacity10 { lba: be32(cdb, 2).into(), partial: cdb[8] & 1 != 0 },
        op::SERVICE_ACTION_IN_16 => service_action_in(cdb)?,
        op::REPORT_LUNS => Cdb::ReportLuns { select: cdb[2], allocation: be32(cdb, 6) },
        op::MODE_SENSE_6 => mode_sense(cdb, false, cdb[4].into()),
        op::MODE_SENSE_10 => mode_sense(cdb, true, be16(cdb, 7).into()),
        op::MODE_SELECT_6 => mode_select(cdb, false, cdb[4].into()),
        op::MODE_SELECT_10 => mode_select(cdb, true, be16(cdb, 7).into()),
        op::START_STOP_UNIT => Cdb::StartStopUnit {
            immediate: cdb[1] & 1 != 0,
            power_condition: cdb[4] >> 4,
            no_flush: cdb[4] & 4 != 0,
            load_eject: cdb[4] & 2 != 0,
            start: cdb[4] & 1 != 0,
        },
        op::PREVENT_ALLOW_MEDIUM_REMOVAL => Cdb::PreventAllowMediumRemoval { prevent: cdb[4] & 3 },
        op::SANITIZE => sanitize(cdb)?,
        op::READ_DEFECT_DATA_10 => Cdb::ReadDefectData {
            twelve: false,
            primary: cdb[2] & 0x10 != 0,
            grown: cdb[2] & 0x08 != 0,
            format: cdb[2] & 7,
            allocation: be16(cdb, 7).into(),
        },
        op::READ_DEFECT_DATA_12 => Cdb::ReadDefectData {
            twelve: true,
            primary: cdb[1] & 0x10 != 0,
            grown: cdb[1] & 0x08 != 0,
            format: cdb[1] & 7,
            allocation: be32(cdb, 6),
        },
        op::RESERVE_6 | op::RESERVE_10 => {
            reservation_of_extents(cdb)?;
            Cdb::Reserve { ten: opcode == op::RESERVE_10 }
        }
        op::RELEASE_6 | op::RELEASE_10 => {
            reservation_of_extents(cdb)?;
            Cdb::Release { ten: opcode == op::RELEASE_10 }
        }
        op::PERSISTENT_RESERVE_IN => {
            Cdb::PersistentReserveIn { action: cdb[1] & 0x1f, allocation: be16(cdb, 7).into() }
        }
        op::PERSISTENT_RESERVE_OUT => Cdb::PersistentReserveOut {
            action: cdb[1] & 0x1f,
            scope: cdb[2] >> 4,
            kind: cdb[2] & 0xf,
            parameter_bytes: be32(cdb, 5),
        },
        op::EXTENDED_COPY if cdb[1] & 0x1f == 0 => Cdb::ExtendedCopy { parameter_bytes: be32(cdb, 10) },
        op::RECEIVE_COPY_RESULTS => {
            Cdb::ReceiveCopyResults { action: cdb[1] & 0x1f, list: cdb[2], allocation: be32(cdb, 10) }
        }
        op::MAINTENANCE_IN => maintenance_in(cdb)?,
        op::MAINTENANCE_OUT if cdb[1] & 0x1f == op::maintenance_out::SET_TARGET_PORT_GROUPS => {
            Cdb::SetTargetPortGroups { parameter_bytes: be32(cdb, 6) }
        }
        op::EXTENDED_COPY | op::MAINTENANCE_OUT => return Err(field(1, 4)),
        _ => return Err(CdbError::Opcode),
    })
}

/// The range of a 10, 12 or 16 byte command with DPO and FUA.
#[inline]
fn range(cdb: &[u8]) -> BlockRange {
    let mut flags = RangeFlags::empty();
    flags.set(RangeFlags::DPO, cdb[1] & 0x10 != 0);
    flags.set(RangeFlags::FUA, cdb[1] & 0x08 != 0);
    let (lba, blocks) = lba_and_length(cdb);
    BlockRange { lba, blocks, flags, protect: cdb[1] >> 5 }
}

#[inline]
fn lba_and_length(cdb: &[u8]) -> (u64, u32) {
    match cdb.len() {
        10 => (be32(cdb, 2).into(), be16(cdb, 7).into()),
        12 => (be32(cdb, 2).into(), be32(cdb, 6)),
        _ => (be64(cdb, 2), be32(cdb, 10)),
    }
}

/// READ(6) and WRITE(6): a length of 0 is 256 blocks.
fn range_6(cdb: &[u8]) -> BlockRange {
    let blocks = if cdb[4] == 0 { 256 } else { cdb[4].into() };
    let lba = u64::from(be24(cdb, 1) & 0x1f_ffff);
    BlockRange { lba, blocks, ..BlockRange::default() }
}

/// The range of a command with DPO, and with BYTCHK where others have FUA.
fn verified_range(cdb: &[u8]) -> BlockRange {
    let range = range(cdb);
    BlockRange { flags: range.flags & RangeFlags::DPO, ..range }
}

/// The range of a command with IMMED.
fn cache_range(cdb: &[u8]) -> BlockRange {
    let (lba, blocks) = lba_and_length(cdb);
    let flags = if cdb[1] & 2 != 0 { RangeFlags::IMMEDIATE } else { RangeFlags::empty() };
    BlockRange { lba, blocks, flags, protect: 0 }
}

fn mode_sense(cdb: &[u8], ten: bool, allocation: u32) -> Cdb {
    Cdb::ModeSense {
        ten,
        long_lba: ten && cdb[1] & 0x10 != 0,
        no_blocks: cdb[1] & 0x08 != 0,
        page_control: cdb[2] >> 6,
        page: cdb[2] & 0x3f,
        subpage: cdb[3],
        allocation,
    }
}

fn mode_select(cdb: &[u8], ten: bool, parameter_bytes: u32) -> Cdb {
    Cdb::ModeSelect { ten, page_format: cdb[1] & 0x10 != 0, save: cdb[1] & 1 != 0, parameter_bytes }
}

fn service_action_in(cdb: &[u8]) -> Result<Cdb, CdbError> {
    let (lba, allocation) = (be64(cdb, 2), be32(cdb, 10));
    match cdb[1] & 0x1f {
        op::service_action_in::READ_CAPACITY_16 => {
            Ok(Cdb::ReadCapacity16 { lba, partial: cdb[14] & 1 != 0, allocation })
        }
        op::service_action_in::GET_LBA_STATUS => Ok(Cdb::GetLbaStatus { lba, allocation }),
        _ => Err(field(1, 4)),
    }
}

/// Reserved fields are checked, since the command destroys data.
fn sanitize(cdb: &[u8]) -> Result<Cdb, CdbError> {
    if cdb[1] & 0x40 != 0 {
        // ZNR, of devices with zones.
        return Err(field(1, 6));
    }
    if let Some(at) = (2..7).find(|at| cdb[*at] != 0) {
        return Err(CdbError::Field { byte: at as u16, bit: None });
    }
    let action = cdb[1] & 0x1f;
    if !matches!(
        action,
        op::sanitize::OVERWRITE
            | op::sanitize::BLOCK_ERASE
            | op::sanitize::CRYPTOGRAPHIC_ERASE
            | op::sanitize::EXIT_FAILURE_MODE
    ) {
        return Err(field(1, 4));
    }
    Ok(Cdb::Sanitize {
        action,
        immediate: cdb[1] & 0x80 != 0,
        unrestricted_exit: cdb[1] & 0x20 != 0,
        parameter_bytes: be16(cdb, 7).into(),
    })
}

/// Third parties and extents, of SPC-2 and before.
fn reservation_of_extents(cdb: &[u8]) -> Result<(), CdbError> {
    match cdb[1] & 0x13 {
        0 => Ok(()),
        bits if bits & 0x10 != 0 => Err(field(1, 4)),
        bits if bits & 0x02 != 0 && cdb.len() == 10 => Err(field(1, 1)),
        bits if bits & 0x01 != 0 => Err(field(1, 0)),
        _ => Ok(()),
    }
}

fn maintenance_in(cdb: &[u8]) -> Result<Cdb, CdbError> {
    let allocation = be32(cdb, 6);
    match cdb[1] & 0x1f {
        op::maintenance_in::REPORT_TARGET_PORT_GROUPS => match cdb[1] >> 5 {
            0 => Ok(Cdb::ReportTargetPortGroups { extended: false, allocation }),
            1 => Ok(Cdb::ReportTargetPortGroups { extended: true, allocation }),
            _ => Err(field(1, 7)),
        },
        op::maintenance_in::REPORT_SUPPORTED_OPERATION_CODES => Ok(Cdb::ReportSupportedOpcodes {
            timeouts: cdb[2] & 0x80 != 0,
            options: cdb[2] & 7,
            opcode: cdb[3],
            action: be16(cdb, 4),
            allocation,
        }),
        op::maintenance_in::REPORT_SUPPORTED_TASK_MANAGEMENT_FUNCTIONS => {
            Ok(Cdb::ReportSupportedFunctions { extended: cdb[2] & 0x80 != 0, allocation })
        }
        _ => Err(field(1, 4)),
    }
}
