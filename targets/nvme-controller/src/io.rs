//! Planning of I/O commands: translates a submission queue entry into a block device request.
//!
//! [`plan`] validates a command without allocating; [`IoQueue`](crate::IoQueue) executes it.
//! [`sgl`](crate::sgl) validates the SGL descriptor.
//!
//! ```
//! use nvme_controller::{ControllerLimits, NamespaceTable, Subsystem, SubsystemNamespace, io};
//! use wire_nvme::{DataPointer, io::ReadWrite, opcode::NvmOpcode};
//! let mut subsystem = Subsystem::new("nqn.2026-11.io.ringbolt:one".parse()?);
//! subsystem.namespaces.push(SubsystemNamespace::new(1, 2048));
//! let table = NamespaceTable::new(&subsystem, 0, &ControllerLimits::default());
//! let mut sqe = ReadWrite { lba: 16, blocks: 8, ..ReadWrite::default() }.to_sqe(NvmOpcode::Read);
//! (sqe.nsid, sqe.data) = (1, DataPointer::transport(4096));
//! let plan = io::plan(&sqe, &table).unwrap();
//! assert_eq!((plan.op, plan.lba, plan.blocks), (io::IoOp::Read, 16, 8));
//! assert_eq!(plan.data, io::DataTransfer::ToHost(4096));
//! # Ok::<(), wire_nvme::fabrics::NqnError>(())
//! ```

mod copy;
mod fused;
mod namespaces;
mod protection;
#[cfg(test)]
mod tests;

pub(crate) use copy::CopyOperation;
pub(crate) use copy::{RANGES_MAX as COPY_RANGES_MAX, copy_blocks_max, copy_range_blocks_max};
pub use fused::FUSED_BYTES_MAX;
pub(crate) use fused::{FusedMatch, FusedPairing};
pub use namespaces::{NamespaceEntry, NamespaceTable};

use block_io::{Op, ProtectionFlags, RequestFlags, Status};
use wire_nvme::identify::oncs;
use wire_nvme::io::{DSM_RANGE_SIZE, DSM_RANGES_MAX, DatasetManagement, DsmRange};
use wire_nvme::opcode::{FabricsType, NvmOpcode};
use wire_nvme::{DecodeError, NSID_ALL, Sqe};

use crate::reservation::{self, access};
use crate::{INVALID_FIELD, INVALID_QUEUE_TYPE};

/// The operation of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoOp {
    /// Read blocks and send them to the host.
    Read,
    /// Write the host's data.
    Write,
    /// Read blocks, check their protection information, and send them to the host, with it or without.
    ProtectedRead,
    /// Write the host's data with protection information that is checked or generated.
    ProtectedWrite,
    /// Flush one namespace.
    Flush,
    /// Flush every block device of [`NamespaceTable::backends`]; the first failure is the command's status.
    FlushAll,
    /// Zero blocks.
    WriteZeroes,
    /// Deallocate the ranges in the host's data; see [`unmap_ranges`].
    Unmap,
    /// Compare blocks with the host's data.
    Compare,
    /// First command of a fused operation: compare blocks with the host's data and, if equal, execute the
    /// second one.
    FusedCompare,
    /// Second command of a fused operation: write the host's data if the comparison succeeded, with no other
    /// write in between.
    FusedWrite,
    /// Make reads of the blocks fail until they are written.
    WriteUncorrectable,
    /// Copy blocks from the ranges in the host's data; see `CopyOperation`.
    Copy,
    /// Read blocks into a buffer of the transport and discard them; the status says whether they are
    /// readable.
    Verify,
    /// A reservation command, which does not reach the block device: see
    /// [`NamespaceTable::execute_reservation`]. The plan's `lba` holds dwords 10 and 11 of the command, its
    /// `blocks` the opcode.
    Reservation,
    /// Complete with success without accessing the block device; the host's data is received and discarded.
    NoOp,
    /// Complete with success, then close the queue (Disconnect).
    Disconnect,
}

/// The data transfer of a command, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataTransfer {
    /// None.
    None,
    /// Block device data, to the host.
    ToHost(u32),
    /// Host data, to the controller.
    FromHost(u32),
    /// Host data of one command of a fused operation.
    Fused(u32),
    /// Data that the controller generates, to the host.
    ControllerData(u32),
}

/// A validated I/O command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoPlan {
    /// First block, if `op` has a range.
    pub lba: u64,
    /// Number of blocks, if `op` has a range; number of ranges for Copy and Dataset Management.
    pub blocks: u32,
    /// Index into the table, for [`NamespaceTable::entry`]; unused by operations without a namespace.
    pub namespace: u16,
    /// Storage tag, to generate or to check.
    pub storage_tag: u16,
    /// The data transfer.
    pub data: DataTransfer,
    /// The operation.
    pub op: IoOp,
    /// FUA and DEALLOCATE.
    pub flags: RequestFlags,
    /// PRINFO and STC, of operations that check or generate protection information.
    pub protection: ProtectionFlags,
    /// Application tag and its mask, to generate or to check.
    pub application_tag: u16,
    /// See `application_tag`.
    pub application_mask: u16,
}

// Kept in every command's slot.
const _: () = assert!(size_of::<IoPlan>() == 32);

const CONFLICT: Status = Status::RESERVATION_CONFLICT.do_not_retry();

const EMPTY_PLAN: IoPlan = IoPlan {
    lba: 0,
    blocks: 0,
    namespace: 0,
    storage_tag: 0,
    data: DataTransfer::None,
    op: IoOp::NoOp,
    flags: RequestFlags::NONE,
    protection: ProtectionFlags::empty(),
    application_tag: 0,
    application_mask: 0,
};

pub(crate) const READ: u8 = NvmOpcode::Read.to_wire();
pub(crate) const WRITE: u8 = NvmOpcode::Write.to_wire();
const FUA: u32 = 1 << 30;
const DEAC: u32 = 1 << 25;
// STC, which must be clear without storage tags.
const STORAGE_TAG: u32 = 1 << 24;
// PRINFO and STC, which must be clear without protection information.
const PROTECTION: u32 = 0xf << 26 | STORAGE_TAG;
// DTYPE, which must be clear: directives are not supported.
const DIRECTIVE: u32 = 0xf << 20;

/// Plans a command of an I/O queue.
///
/// # Errors
/// The status to complete the command with; no data is transferred.
#[inline(always)]
pub fn plan(sqe: &Sqe, table: &NamespaceTable) -> Result<IoPlan, Status> {
    if table.invalid_flags(sqe.flags) != 0 {
        return fused::plan(sqe, table);
    }
    match sqe.opcode {
        READ => read_write(sqe, table, IoOp::Read),
        WRITE => read_write(sqe, table, IoOp::Write),
        _ => plan_uncommon(sqe, table),
    }
}

/// A Read or Write that needs nothing uncommon: [`plain_transfer`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlainTransfer {
    /// [`Op::Read`] or [`Op::Write`].
    pub(crate) op: Op,
    pub(crate) lba: u64,
    pub(crate) blocks: u32,
    pub(crate) bytes: u32,
    /// Index into the table.
    namespace: u16,
    /// Of the namespace's entry.
    pub(crate) backend: u32,
    /// Of the namespace's entry.
    pub(crate) buffer_alignment: u32,
    /// [`RequestFlags::FUA`] or none.
    pub(crate) flags: RequestFlags,
}

impl PlainTransfer {
    /// Of the plan of a Read or Write of so many bytes.
    #[inline(always)]
    pub(crate) fn of(plan: &IoPlan, op: Op, bytes: u32, table: &NamespaceTable) -> PlainTransfer {
        let IoPlan { lba, blocks, namespace, flags, .. } = *plan;
        let NamespaceEntry { backend, buffer_alignment, .. } = *table.entry(plan);
        PlainTransfer { op, lba, blocks, bytes, namespace, backend, buffer_alignment, flags }
    }

    /// What [`plan`] returns for the command.
    #[inline(always)]
    pub(crate) fn plan(self) -> IoPlan {
        let PlainTransfer { op, lba, blocks, bytes, namespace, flags, .. } = self;
        let (op, data) = match op {
            Op::Write => (IoOp::Write, DataTransfer::FromHost(bytes)),
            _ => (IoOp::Read, DataTransfer::ToHost(bytes)),
        };
        IoPlan { lba, blocks, namespace, data, op, flags, ..EMPTY_PLAN }
    }
}

/// The transfer of a Read or Write of a namespace without metadata; `None` of all others, and if it is to be
/// rejected. Then [`plan`] decides.
///
/// Nothing here takes the address of the entry or of the result, so that both stay in registers: a third of
/// what a plan costs.
#[inline(always)]
pub(crate) fn plain_transfer(sqe: &Sqe, op: Op, table: &NamespaceTable) -> Option<PlainTransfer> {
    let invalid_flags = table.invalid_flags(sqe.flags);
    let uncommon = sqe.cdw12 & (PROTECTION | DIRECTIVE);
    if invalid_flags != 0 || uncommon != 0 || sqe.mptr != 0 {
        return None;
    }
    let (namespace, entry) = table.find_plain(sqe.nsid)?;
    let lba = u64::from(sqe.cdw10) | u64::from(sqe.cdw11) << 32;
    let blocks = (sqe.cdw12 & 0xffff) + 1;
    // At most 65536 blocks of at most 2 GiB: no overflow.
    let bytes = u64::from(blocks) << entry.block_log2;
    let is_inside = lba < entry.blocks && u64::from(blocks) <= entry.blocks - lba;
    let class = if op == Op::Write { access::WRITE } else { access::READ };
    let is_denied = entry.read_only && op == Op::Write || entry.deny_mask.denies(class);
    if !is_inside || is_denied || bytes > u64::from(table.transfer_max_bytes) {
        return None;
    }
    let bytes = bytes as u32;
    if !table.memory_based && sqe.data.length() != bytes {
        return None;
    }
    let flags = if sqe.cdw12 & FUA != 0 { RequestFlags::FUA } else { RequestFlags::NONE };
    let (backend, buffer_alignment) = (entry.backend, entry.buffer_alignment);
    Some(PlainTransfer { op, lba, blocks, bytes, namespace, backend, buffer_alignment, flags })
}

/// Plans Read, Write, Compare and Verify (NVM 1.0, sections 3.2.4, 3.2.6, 3.2.1 and 3.2.5).
#[inline(always)]
fn read_write(sqe: &Sqe, table: &NamespaceTable, op: IoOp) -> Result<IoPlan, Status> {
    let Some((namespace, entry)) = table.find_plain(sqe.nsid) else {
        return protection::read_write(sqe, table, op);
    };
    let (lba, blocks) = block_range(sqe, entry, PROTECTION | DIRECTIVE)?;
    // At most 65536 blocks of at most 2 GiB: no overflow.
    let bytes = u64::from(blocks) << entry.block_log2;
    plan_range(sqe, table, op, (namespace, entry), (lba, blocks), bytes)
}

/// Plans a transfer of `bytes` bytes.
#[inline(always)]
fn plan_range(
    sqe: &Sqe,
    table: &NamespaceTable,
    op: IoOp,
    (namespace, entry): (u16, &NamespaceEntry),
    (lba, blocks): (u64, u32),
    bytes: u64,
) -> Result<IoPlan, Status> {
    let is_write = matches!(op, IoOp::Write | IoOp::FusedWrite);
    if entry.read_only && is_write {
        return Err(Status::NAMESPACE_WRITE_PROTECTED.do_not_retry());
    }
    if entry.deny_mask.denies(if is_write { access::WRITE } else { access::READ }) {
        return Err(CONFLICT);
    }
    if bytes > u64::from(table.transfer_max_bytes) {
        // More than MDTS (Base 2.0, section 5.17.2.1), or VSL, which has the same value.
        return Err(INVALID_FIELD);
    }
    let bytes = bytes as u32;
    // Memory-based transports parse the data pointer with this length.
    if !table.memory_based && op != IoOp::Verify && sqe.data.length() != bytes {
        return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
    }
    let flags = if sqe.cdw12 & FUA != 0 { RequestFlags::FUA } else { RequestFlags::NONE };
    let data = match op {
        IoOp::Read => DataTransfer::ToHost(bytes),
        IoOp::Write | IoOp::Compare => DataTransfer::FromHost(bytes),
        IoOp::FusedCompare | IoOp::FusedWrite => DataTransfer::Fused(bytes),
        _ => DataTransfer::None,
    };
    Ok(IoPlan { lba, blocks, namespace, data, op, flags, ..EMPTY_PLAN })
}

/// The block range of a command. `clear` are the bits of dword 12 that must be clear.
#[inline]
fn block_range(sqe: &Sqe, entry: &NamespaceEntry, clear: u32) -> Result<(u64, u32), Status> {
    if sqe.cdw12 & clear != 0 || sqe.mptr != 0 {
        return Err(invalid_field_status(sqe));
    }
    let lba = u64::from(sqe.cdw10) | u64::from(sqe.cdw11) << 32;
    let blocks = (sqe.cdw12 & 0xffff) + 1;
    if lba >= entry.blocks || u64::from(blocks) > entry.blocks - lba {
        return Err(Status::LBA_OUT_OF_RANGE.do_not_retry());
    }
    Ok((lba, blocks))
}

#[cold]
fn invalid_field_status(sqe: &Sqe) -> Status {
    if sqe.cdw12 & PROTECTION != 0 {
        return Status::INVALID_PROTECTION_INFORMATION.do_not_retry();
    }
    INVALID_FIELD
}

/// Plans a command that is neither a Read nor a Write.
#[cold]
fn plan_uncommon(sqe: &Sqe, table: &NamespaceTable) -> Result<IoPlan, Status> {
    let plan = plan_by_opcode(sqe, table)?;
    table.check_reservation(&plan)?;
    Ok(plan)
}

/// The bit of ONCS that reports a command; 0 for a command that is not optional.
pub(crate) const fn optional_command(opcode: NvmOpcode) -> u16 {
    match opcode {
        NvmOpcode::Compare => oncs::COMPARE,
        NvmOpcode::WriteUncorrectable => oncs::WRITE_UNCORRECTABLE,
        NvmOpcode::DatasetManagement => oncs::DATASET_MANAGEMENT,
        NvmOpcode::WriteZeroes => oncs::WRITE_ZEROES,
        NvmOpcode::Verify => oncs::VERIFY,
        NvmOpcode::Copy => oncs::COPY,
        NvmOpcode::ReservationRegister
        | NvmOpcode::ReservationReport
        | NvmOpcode::ReservationAcquire
        | NvmOpcode::ReservationRelease => oncs::RESERVATIONS,
        _ => 0,
    }
}

fn plan_by_opcode(sqe: &Sqe, table: &NamespaceTable) -> Result<IoPlan, Status> {
    let opcode = NvmOpcode::from_wire(sqe.opcode);
    match opcode.filter(|opcode| optional_command(*opcode) & table.masked_oncs == 0) {
        Some(NvmOpcode::Flush) => {
            // VWC reports that FFFFFFFFh flushes all namespaces (NVM 1.0, section 3.2; Base 2.0, section
            // 7.1).
            if sqe.nsid == NSID_ALL {
                return Ok(IoPlan { op: IoOp::FlushAll, ..EMPTY_PLAN });
            }
            let (namespace, _) = table.find(sqe.nsid)?;
            Ok(IoPlan { op: IoOp::Flush, namespace, ..EMPTY_PLAN })
        }
        Some(NvmOpcode::WriteZeroes) => {
            let (namespace, entry) = table.find(sqe.nsid)?;
            if !entry.can_write_zeroes {
                return Err(Status::INVALID_OPCODE.do_not_retry());
            }
            // Zeroed blocks read with protection information that disables checks, whatever PRINFO asks for.
            let clear = match entry.metadata.protection {
                Some(protection) if protection.storage_tag_bits > 0 => DIRECTIVE,
                Some(_) => STORAGE_TAG | DIRECTIVE,
                None => PROTECTION | DIRECTIVE,
            };
            let (lba, blocks) = block_range(sqe, entry, clear)?;
            if u64::from(blocks) << entry.block_log2 > table.write_zeroes_max_bytes {
                // More than WZSL (NVM 1.0, section 3.2.8).
                return Err(INVALID_FIELD);
            }
            if entry.read_only {
                return Err(Status::NAMESPACE_WRITE_PROTECTED.do_not_retry());
            }
            let fua = if sqe.cdw12 & FUA != 0 { RequestFlags::FUA } else { RequestFlags::NONE };
            let deallocate =
                if sqe.cdw12 & DEAC != 0 { RequestFlags::DEALLOCATE } else { RequestFlags::NONE };
            Ok(IoPlan {
                op: IoOp::WriteZeroes,
                lba,
                blocks,
                namespace,
                flags: fua | deallocate,
                ..EMPTY_PLAN
            })
        }
        Some(NvmOpcode::WriteUncorrectable) => {
            let (namespace, entry) = table.find(sqe.nsid)?;
            if !entry.can_write_uncorrectable {
                return Err(Status::INVALID_OPCODE.do_not_retry());
            }
            let (lba, blocks) = block_range(sqe, entry, PROTECTION | DIRECTIVE)?;
            if entry.read_only {
                return Err(Status::NAMESPACE_WRITE_PROTECTED.do_not_retry());
            }
            Ok(IoPlan { op: IoOp::WriteUncorrectable, lba, blocks, namespace, ..EMPTY_PLAN })
        }
        Some(NvmOpcode::Copy) => copy::plan(sqe, table),
        Some(NvmOpcode::DatasetManagement) => plan_dataset_management(sqe, table),
        Some(NvmOpcode::Compare) => read_write(sqe, table, IoOp::Compare),
        Some(NvmOpcode::Verify) => read_write(sqe, table, IoOp::Verify),
        Some(
            opcode @ (NvmOpcode::ReservationRegister
            | NvmOpcode::ReservationReport
            | NvmOpcode::ReservationAcquire
            | NvmOpcode::ReservationRelease),
        ) => plan_reservation(sqe, table, opcode),
        Some(NvmOpcode::Fabrics) if !table.memory_based => plan_fabrics(sqe),
        _ => Err(Status::INVALID_OPCODE.do_not_retry()),
    }
}

/// Plans Dataset Management (NVM 1.0, section 3.2.3). Deallocate is executed; access hints are ignored.
fn plan_dataset_management(sqe: &Sqe, table: &NamespaceTable) -> Result<IoPlan, Status> {
    let (namespace, entry) = table.find(sqe.nsid)?;
    let command = DatasetManagement::from_sqe(sqe);
    // Linux always sends a buffer of 256 ranges.
    let required = u32::from(command.ranges) * DSM_RANGE_SIZE as u32;
    let length = if table.memory_based { required } else { sqe.data.length() };
    if length < required || length > (DSM_RANGES_MAX * DSM_RANGE_SIZE) as u32 {
        return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
    }
    if command.deallocate && entry.read_only {
        return Err(Status::NAMESPACE_WRITE_PROTECTED.do_not_retry());
    }
    let op = if command.deallocate && entry.can_unmap { IoOp::Unmap } else { IoOp::NoOp };
    Ok(IoPlan {
        op,
        namespace,
        blocks: command.ranges.into(),
        data: DataTransfer::FromHost(length),
        ..EMPTY_PLAN
    })
}

/// Most bytes of host data of Reservation Register, Acquire and Release: the keys, and padding that a host
/// may send.
const KEYS_BYTES_MAX: u32 = 4096;

/// Plans the reservation commands (Base 2.0, sections 7.2 to 7.5).
fn plan_reservation(sqe: &Sqe, table: &NamespaceTable, opcode: NvmOpcode) -> Result<IoPlan, Status> {
    let (namespace, _) = table.find(sqe.nsid)?;
    let required = reservation::data_bytes(opcode, sqe);
    if required > u64::from(table.transfer_max_bytes) {
        return Err(INVALID_FIELD);
    }
    let required = required as u32;
    let length = if table.memory_based { required } else { sqe.data.length() };
    let report = opcode == NvmOpcode::ReservationReport;
    let fits = if report { length == required } else { (required..=KEYS_BYTES_MAX).contains(&length) };
    if !fits {
        return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
    }
    let data = if report { DataTransfer::ControllerData(length) } else { DataTransfer::FromHost(length) };
    let lba = u64::from(sqe.cdw10) | u64::from(sqe.cdw11) << 32;
    Ok(IoPlan { op: IoOp::Reservation, lba, blocks: sqe.opcode.into(), namespace, data, ..EMPTY_PLAN })
}

/// Plans fabrics commands on a connected I/O queue (Base 2.0, section 6).
fn plan_fabrics(sqe: &Sqe) -> Result<IoPlan, Status> {
    match wire_nvme::fabrics::fabrics_type(sqe) {
        Ok(FabricsType::Disconnect) if wire_nvme::fabrics::Disconnect::from_sqe(sqe).record_format != 0 => {
            Err(Status::CONNECT_INCOMPATIBLE_FORMAT.do_not_retry())
        }
        Ok(FabricsType::Disconnect) => Ok(IoPlan { op: IoOp::Disconnect, ..EMPTY_PLAN }),
        Ok(FabricsType::Connect) => Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
        Ok(FabricsType::PropertyGet | FabricsType::PropertySet) => Err(INVALID_QUEUE_TYPE),
        _ => Err(Status::INVALID_OPCODE.do_not_retry()),
    }
}

/// The ranges that an [`IoOp::Unmap`] plan deallocates, as first block and number of blocks. Validates all
/// ranges first and skips empty ones.
///
/// `data` is the host's data; the plan's `blocks` is the number of ranges in it.
///
/// # Errors
/// A range ends beyond the namespace or is longer than DMRSL, or the data is too short; nothing must be
/// deallocated then.
pub fn unmap_ranges<'a>(
    plan: &IoPlan,
    table: &NamespaceTable,
    data: &'a [u8],
) -> Result<impl Iterator<Item = (u64, u32)> + use<'a>, Status> {
    let too_short = |_: DecodeError| Status::DATA_SGL_LENGTH_INVALID.do_not_retry();
    let ranges = u16::try_from(plan.blocks).map_err(|_| Status::INTERNAL_ERROR)?;
    let end = table.entry(plan).blocks;
    for range in DsmRange::list(data, ranges).map_err(too_short)? {
        if range.blocks > table.unmap_range_max_blocks {
            return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.do_not_retry());
        }
        if range.lba > end || u64::from(range.blocks) > end - range.lba {
            return Err(Status::LBA_OUT_OF_RANGE.do_not_retry());
        }
    }
    let list = DsmRange::list(data, ranges).map_err(too_short)?;
    Ok(list.filter(|range| range.blocks != 0).map(|range| (range.lba, range.blocks)))
}
