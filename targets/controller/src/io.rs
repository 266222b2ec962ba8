//! Planning I/O commands: from a submission entry to what the block device is asked.
//!
//! [`plan`] decides and allocates nothing; the transport moves the data and submits the requests.
//! Whether the SGL descriptor is one that the transport knows is asked of [`sgl`](crate::sgl).
//!
//! ```
//! use controller::{Limits, Namespace, NamespaceTable, Subsystem, io};
//! use wire_nvme::{DataPointer, io::ReadWrite, opcode::NvmOpcode};
//! let mut subsystem = Subsystem::new("nqn.2026-11.io.ringbolt:one".parse()?);
//! subsystem.namespaces.push(Namespace::new(1, 2048));
//! let table = NamespaceTable::new(&subsystem, 0, &Limits::default());
//! let mut sqe = ReadWrite { lba: 16, blocks: 8, ..ReadWrite::default() }.to_sqe(NvmOpcode::Read);
//! (sqe.nsid, sqe.data) = (1, DataPointer::transport(4096));
//! let plan = io::plan(&sqe, &table).unwrap();
//! assert_eq!((plan.op, plan.lba, plan.blocks), (io::Op::Read, 16, 8));
//! assert_eq!(plan.data, io::Transfer::ToHost(4096));
//! # Ok::<(), wire_nvme::fabrics::NqnError>(())
//! ```

mod copy;
mod fused;
#[cfg(test)]
mod tests;

pub use copy::{Copying, Piece};
pub(crate) use copy::{RANGES_MAX as COPY_RANGES_MAX, blocks_max, range_blocks_max};
pub use fused::{FUSED_BYTES_MAX, Paired, Pairing};

use std::sync::Arc;

use ring::{Flags, Status};
use wire_nvme::io::{DSM_RANGE_SIZE, DSM_RANGES_MAX, DatasetManagement, DsmRange};
use wire_nvme::log::AnaState;
use wire_nvme::opcode::{FabricsType, NvmOpcode};
use wire_nvme::{DecodeError, NSID_ALL, Sqe};

use crate::reservation::{self, Gate, Reservations, Seat, access};
use crate::{Association, Directory, INVALID_FIELD, INVALID_QUEUE_TYPE, Limits, Subsystem};

/// The namespaces of a subsystem as I/O queues look them up: made anew whenever the subsystem changes,
/// read by every command.
#[derive(Clone, Debug, Default)]
pub struct NamespaceTable {
    // Indexed by namespace identifier less 1; 0 blocks of 0 bytes where there is none.
    entries: Vec<Entry>,
    // By the same index.
    reservations: Vec<Option<Arc<Reservations>>>,
    seat: Option<Seat>,
    transfer_max_bytes: u32,
    memory_based: bool,
    compare_and_write: bool,
}

/// One namespace of a [`NamespaceTable`].
#[derive(Clone, Debug)]
pub struct Entry {
    /// Size in blocks.
    pub blocks: u64,
    /// The transport's key for the block device.
    pub backend: u32,
    /// Bytes of a block as a power of two.
    pub block_log2: u8,
    /// What the address of a buffer of its device is to be a multiple of.
    pub buffer_alignment: u32,
    exists: bool,
    read_only: bool,
    can_unmap: bool,
    can_write_zeroes: bool,
    can_write_uncorrectable: bool,
    // What the host may not do because others have reserved the namespace.
    gate: Arc<Gate>,
    // Success, or what every command is answered because of its ANA group.
    ana: Status,
}

impl Entry {
    fn none() -> Entry {
        Entry {
            blocks: 0,
            backend: 0,
            block_log2: 9,
            buffer_alignment: 4096,
            exists: false,
            read_only: true,
            can_unmap: false,
            can_write_zeroes: false,
            can_write_uncorrectable: false,
            gate: Arc::default(),
            ana: Status::SUCCESS,
        }
    }
}

impl NamespaceTable {
    /// The namespaces of a subsystem, as reached through a port by nobody in particular: reservations concern
    /// hosts, and here there is none.
    pub fn new(subsystem: &Subsystem, portid: u16, limits: &Limits) -> NamespaceTable {
        NamespaceTable::with(subsystem, portid, limits, None)
    }

    /// The namespaces of a subsystem, as a controller's I/O queues reach them through a port.
    pub fn of(
        subsystem: &Subsystem,
        portid: u16,
        limits: &Limits,
        directory: &Arc<Directory>,
        association: &Arc<Association>,
    ) -> NamespaceTable {
        let seat = Seat { directory: directory.clone(), association: association.clone() };
        NamespaceTable::with(subsystem, portid, limits, Some(seat))
    }

    fn with(subsystem: &Subsystem, portid: u16, limits: &Limits, seat: Option<Seat>) -> NamespaceTable {
        let host = seat.as_ref().map(|seat| seat.association.host_id());
        let last = subsystem.namespaces.last().map_or(0, |namespace| namespace.nsid);
        let mut entries = vec![Entry::none(); last as usize];
        let mut reservations = vec![None; last as usize];
        for namespace in &subsystem.namespaces {
            reservations[namespace.nsid as usize - 1] = Some(namespace.reservations.clone());
            entries[namespace.nsid as usize - 1] = Entry {
                blocks: namespace.blocks,
                backend: namespace.backend,
                block_log2: namespace.block_size.trailing_zeros() as u8,
                buffer_alignment: namespace.buffer_alignment,
                exists: true,
                read_only: namespace.read_only,
                can_unmap: namespace.can_unmap,
                can_write_zeroes: namespace.can_write_zeroes,
                can_write_uncorrectable: namespace.can_write_uncorrectable,
                gate: host.map(|host| namespace.reservations.gate(&host)).unwrap_or_default(),
                ana: match subsystem.ana_state(portid, namespace.anagrpid) {
                    AnaState::Optimized | AnaState::NonOptimized => Status::SUCCESS,
                    AnaState::Inaccessible => Status::ANA_INACCESSIBLE,
                    AnaState::PersistentLoss => Status::ANA_PERSISTENT_LOSS,
                    AnaState::Change => Status::ANA_TRANSITION,
                },
            };
        }
        NamespaceTable {
            entries,
            reservations,
            seat,
            transfer_max_bytes: limits.transfer_max_bytes,
            memory_based: limits.memory_based,
            compare_and_write: limits.compare_and_write,
        }
    }

    /// The namespace that a plan is for.
    #[inline]
    pub fn entry(&self, plan: &Plan) -> &Entry {
        &self.entries[plan.namespace as usize]
    }

    /// The keys of all block devices, for a plan to flush every namespace.
    pub fn backends(&self) -> impl Iterator<Item = u32> {
        self.entries.iter().filter(|entry| entry.exists).map(|entry| entry.backend)
    }

    /// Whether reservations still let a plan be carried out: one that waits may be overtaken by another host's
    /// reservation.
    ///
    /// # Errors
    /// The status to complete the command with.
    #[inline]
    pub fn admit(&self, plan: &Plan) -> Result<(), Status> {
        let class = match plan.op {
            Op::Read | Op::Compare | Op::FusedCompare | Op::Verify => access::READ,
            Op::Write | Op::FusedWrite | Op::Flush | Op::WriteZeroes => access::WRITE,
            Op::Unmap | Op::WriteUncorrectable => access::WRITE,
            Op::Copy => access::READ | access::WRITE,
            Op::FlushAll => {
                let refused = self.entries.iter().any(|entry| entry.gate.denies(access::WRITE));
                return if refused { Err(CONFLICT) } else { Ok(()) };
            }
            // Advice, which Dataset Management is at the least, counts as a write.
            Op::Nothing => access::WRITE,
            Op::Reservation | Op::Disconnect => return Ok(()),
        };
        if self.entry(plan).gate.denies(class) { Err(CONFLICT) } else { Ok(()) }
    }

    /// Executes an [`Op::Reservation`] plan with the data that the host sent.
    pub fn reserve(&self, plan: &Plan, data: &[u8]) -> reservation::Outcome {
        let reservations = self.reservations.get(plan.namespace as usize).and_then(Option::as_ref);
        let (Some(seat), Some(reservations)) = (&self.seat, reservations) else {
            return reservation::Outcome::Done(Status::INTERNAL_ERROR);
        };
        let mut sqe = Sqe::new(plan.blocks as u8);
        (sqe.cdw10, sqe.cdw11) = (plan.lba as u32, (plan.lba >> 32) as u32);
        reservations.execute(seat, plan.namespace + 1, &sqe, data)
    }

    #[inline]
    fn find(&self, nsid: u32) -> Result<(u32, &Entry), Status> {
        // An identifier of 0 wraps around to beyond the end.
        let index = nsid.wrapping_sub(1);
        match self.entries.get(index as usize) {
            Some(entry) if entry.exists && entry.ana.is_success() => Ok((index, entry)),
            Some(entry) if entry.exists => Err(entry.ana),
            _ => Err(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry()),
        }
    }
}

/// What a command comes down to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Read blocks and send them to the host.
    Read,
    /// Write the host's data.
    Write,
    /// Flush one namespace.
    Flush,
    /// Flush every namespace of [`NamespaceTable::backends`]; the first failure is the answer.
    FlushAll,
    /// Zero blocks.
    WriteZeroes,
    /// Deallocate the ranges in the host's data; see [`unmaps`].
    Unmap,
    /// Compare blocks with the host's data.
    Compare,
    /// The first of a fused operation: compare blocks with the host's data, and do the second if they are equal.
    FusedCompare,
    /// The second of a fused operation: write the host's data if the first found blocks equal, with no other write
    /// in between.
    FusedWrite,
    /// Reads of blocks fail from now on, until they are written.
    WriteUncorrectable,
    /// Copy blocks from the ranges in the host's data; see [`Copying`].
    Copy,
    /// Read blocks into a buffer of the transport's, and throw them away: whether they can be read is the answer.
    Verify,
    /// A reservation command, which no device sees: see [`NamespaceTable::reserve`]. The plan's `lba` holds dwords
    /// 10 and 11 of the command, its `blocks` the opcode.
    Reservation,
    /// Success, without asking anyone. The host's data, if any, is taken and dropped.
    Nothing,
    /// Answer with success, then end the queue (Disconnect).
    Disconnect,
}

/// The data of a command, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// None.
    None,
    /// From the controller to the host.
    ToHost(u32),
    /// From the host to the controller.
    FromHost(u32),
    /// From the host to the controller, of one of the commands of a fused operation.
    Fused(u32),
    /// From the controller to the host, which answers without a device.
    Answer(u32),
}

/// What to do for a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// First block, where `op` has a range.
    pub lba: u64,
    /// Number of blocks, where `op` has a range.
    pub blocks: u32,
    /// Index into the table, for [`NamespaceTable::entry`]; of no meaning for operations without a
    /// namespace.
    pub namespace: u32,
    /// The data.
    pub data: Transfer,
    /// What to do.
    pub op: Op,
    /// FUA and DEALLOCATE.
    pub flags: Flags,
}

const CONFLICT: Status = Status::RESERVATION_CONFLICT.do_not_retry();

const BARE: Plan =
    Plan { lba: 0, blocks: 0, namespace: 0, data: Transfer::None, op: Op::Nothing, flags: Flags::NONE };

const FUA: u32 = 1 << 30;
const DEAC: u32 = 1 << 25;
// PRINFO and STC: no namespace has protection information.
const PROTECTION: u32 = 0xf << 26 | 1 << 24;
// DTYPE: there are no directives.
const DIRECTIVE: u32 = 0xf << 20;

/// Plans a command of an I/O queue.
///
/// # Errors
/// The status to complete the command with; nothing is to be transferred.
#[inline]
pub fn plan(sqe: &Sqe, table: &NamespaceTable) -> Result<Plan, Status> {
    // FUSE is 00b but for fused operations. PSDT is 01b over fabrics, where data is
    // described by SGLs, and 00b or 01b with queues in memory (Base 2.0, section 3.3.3.1).
    let wrong = if table.memory_based { sqe.flags & 0x83 } else { sqe.flags & 0xc3 ^ Sqe::FLAGS_SGL };
    if wrong != 0 {
        return fused::plan(sqe, table);
    }
    const READ: u8 = NvmOpcode::Read.to_wire();
    const WRITE: u8 = NvmOpcode::Write.to_wire();
    match sqe.opcode {
        READ => {
            let (plan, length) = read_write(sqe, table, Op::Read)?;
            Ok(Plan { data: Transfer::ToHost(length), ..plan })
        }
        WRITE => {
            let (plan, length) = read_write(sqe, table, Op::Write)?;
            Ok(Plan { data: Transfer::FromHost(length), ..plan })
        }
        _ => {
            let plan = seldom(sqe, table)?;
            table.admit(&plan)?;
            Ok(plan)
        }
    }
}

/// Read, Write, Compare and Verify (NVM 1.0, sections 3.2.4, 3.2.6, 3.2.1 and 3.2.5), with the bytes that are moved.
#[inline]
fn read_write(sqe: &Sqe, table: &NamespaceTable, op: Op) -> Result<(Plan, u32), Status> {
    let (namespace, entry) = table.find(sqe.nsid)?;
    let (lba, blocks) = range(sqe, entry, PROTECTION | DIRECTIVE)?;
    let writes = matches!(op, Op::Write | Op::FusedWrite);
    if entry.read_only && writes {
        return Err(Status::NAMESPACE_WRITE_PROTECTED.do_not_retry());
    }
    if entry.gate.denies(if writes { access::WRITE } else { access::READ }) {
        return Err(CONFLICT);
    }
    // At most 65536 blocks of at most 2 GiB: no overflow.
    let bytes = u64::from(blocks) << entry.block_log2;
    if bytes > u64::from(table.transfer_max_bytes) {
        // More than MDTS (Base 2.0, section 5.17.2.1), or than VSL, which is the same.
        return Err(INVALID_FIELD);
    }
    let bytes = bytes as u32;
    // With queues in memory the length is what the data pointer is read with.
    if !table.memory_based && op != Op::Verify && sqe.data.length() != bytes {
        return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
    }
    let flags = if sqe.cdw12 & FUA != 0 { Flags::FUA } else { Flags::NONE };
    Ok((Plan { lba, blocks, namespace, data: Transfer::None, op, flags }, bytes))
}

/// The range of a command, with the bits of dword 12 that must be clear.
#[inline]
fn range(sqe: &Sqe, entry: &Entry, clear: u32) -> Result<(u64, u32), Status> {
    if sqe.cdw12 & clear != 0 || sqe.mptr != 0 {
        return Err(field_status(sqe));
    }
    let lba = u64::from(sqe.cdw10) | u64::from(sqe.cdw11) << 32;
    let blocks = (sqe.cdw12 & 0xffff) + 1;
    if lba >= entry.blocks || u64::from(blocks) > entry.blocks - lba {
        return Err(Status::LBA_OUT_OF_RANGE.do_not_retry());
    }
    Ok((lba, blocks))
}

#[cold]
fn field_status(sqe: &Sqe) -> Status {
    if sqe.cdw12 & PROTECTION != 0 {
        return Status::INVALID_PROTECTION_INFORMATION.do_not_retry();
    }
    INVALID_FIELD
}

fn seldom(sqe: &Sqe, table: &NamespaceTable) -> Result<Plan, Status> {
    match NvmOpcode::from_wire(sqe.opcode) {
        Some(NvmOpcode::Flush) => {
            // VWC says that every namespace may be flushed at once (NVM 1.0, section 3.2; Base 2.0,
            // section 7.1).
            if sqe.nsid == NSID_ALL {
                return Ok(Plan { op: Op::FlushAll, ..BARE });
            }
            let (namespace, _) = table.find(sqe.nsid)?;
            Ok(Plan { op: Op::Flush, namespace, ..BARE })
        }
        Some(NvmOpcode::WriteZeroes) => {
            let (namespace, entry) = table.find(sqe.nsid)?;
            if !entry.can_write_zeroes {
                return Err(Status::INVALID_OPCODE.do_not_retry());
            }
            let (lba, blocks) = range(sqe, entry, PROTECTION | DIRECTIVE)?;
            if entry.read_only {
                return Err(Status::NAMESPACE_WRITE_PROTECTED.do_not_retry());
            }
            let fua = if sqe.cdw12 & FUA != 0 { Flags::FUA } else { Flags::NONE };
            let deallocate = if sqe.cdw12 & DEAC != 0 { Flags::DEALLOCATE } else { Flags::NONE };
            Ok(Plan { op: Op::WriteZeroes, lba, blocks, namespace, flags: fua.with(deallocate), ..BARE })
        }
        Some(NvmOpcode::WriteUncorrectable) => {
            let (namespace, entry) = table.find(sqe.nsid)?;
            if !entry.can_write_uncorrectable {
                return Err(Status::INVALID_OPCODE.do_not_retry());
            }
            let (lba, blocks) = range(sqe, entry, PROTECTION | DIRECTIVE)?;
            if entry.read_only {
                return Err(Status::NAMESPACE_WRITE_PROTECTED.do_not_retry());
            }
            Ok(Plan { op: Op::WriteUncorrectable, lba, blocks, namespace, ..BARE })
        }
        Some(NvmOpcode::Copy) => copy::plan(sqe, table),
        Some(NvmOpcode::DatasetManagement) => dataset_management(sqe, table),
        Some(NvmOpcode::Compare) => {
            let (plan, length) = read_write(sqe, table, Op::Compare)?;
            Ok(Plan { data: Transfer::FromHost(length), ..plan })
        }
        Some(NvmOpcode::Verify) => Ok(read_write(sqe, table, Op::Verify)?.0),
        Some(
            opcode @ (NvmOpcode::ReservationRegister
            | NvmOpcode::ReservationReport
            | NvmOpcode::ReservationAcquire
            | NvmOpcode::ReservationRelease),
        ) => reserve(sqe, table, opcode),
        Some(NvmOpcode::Fabrics) if !table.memory_based => fabrics(sqe),
        _ => Err(Status::INVALID_OPCODE.do_not_retry()),
    }
}

/// Dataset Management (NVM 1.0, section 3.2.3). Only deallocation does anything; the rest is advice.
fn dataset_management(sqe: &Sqe, table: &NamespaceTable) -> Result<Plan, Status> {
    let (namespace, entry) = table.find(sqe.nsid)?;
    let command = DatasetManagement::of(sqe);
    // Linux sends room for 256 ranges whatever their number is.
    let need = u32::from(command.ranges) * DSM_RANGE_SIZE as u32;
    let length = if table.memory_based { need } else { sqe.data.length() };
    if length < need || length > (DSM_RANGES_MAX * DSM_RANGE_SIZE) as u32 {
        return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
    }
    if command.deallocate && entry.read_only {
        return Err(Status::NAMESPACE_WRITE_PROTECTED.do_not_retry());
    }
    let op = if command.deallocate && entry.can_unmap { Op::Unmap } else { Op::Nothing };
    Ok(Plan { op, namespace, blocks: command.ranges.into(), data: Transfer::FromHost(length), ..BARE })
}

/// Most data of a reservation command, Report aside: keys, and whatever a host puts behind them.
const KEYS_BYTES_MAX: u32 = 4096;

/// The reservation commands (Base 2.0, sections 7.2 to 7.5).
fn reserve(sqe: &Sqe, table: &NamespaceTable, opcode: NvmOpcode) -> Result<Plan, Status> {
    let (namespace, _) = table.find(sqe.nsid)?;
    let need = reservation::data_bytes(opcode, sqe);
    if need > u64::from(table.transfer_max_bytes) {
        return Err(INVALID_FIELD);
    }
    let need = need as u32;
    let length = if table.memory_based { need } else { sqe.data.length() };
    let report = opcode == NvmOpcode::ReservationReport;
    let fits = if report { length == need } else { (need..=KEYS_BYTES_MAX).contains(&length) };
    if !fits {
        return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
    }
    let data = if report { Transfer::Answer(length) } else { Transfer::FromHost(length) };
    let lba = u64::from(sqe.cdw10) | u64::from(sqe.cdw11) << 32;
    Ok(Plan { op: Op::Reservation, lba, blocks: sqe.opcode.into(), namespace, data, ..BARE })
}

/// Fabrics commands on an I/O queue that exists (Base 2.0, section 6).
fn fabrics(sqe: &Sqe) -> Result<Plan, Status> {
    match wire_nvme::fabrics::fabrics_type(sqe) {
        Ok(FabricsType::Disconnect) if wire_nvme::fabrics::Disconnect::of(sqe).record_format != 0 => {
            Err(Status::CONNECT_INCOMPATIBLE_FORMAT.do_not_retry())
        }
        Ok(FabricsType::Disconnect) => Ok(Plan { op: Op::Disconnect, ..BARE }),
        Ok(FabricsType::Connect) => Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
        Ok(FabricsType::PropertyGet | FabricsType::PropertySet) => Err(INVALID_QUEUE_TYPE),
        _ => Err(Status::INVALID_OPCODE.do_not_retry()),
    }
}

/// The ranges that an [`Op::Unmap`] plan deallocates, as first block and number of blocks. All of them
/// are checked before the first is returned; empty ones are left out.
///
/// `data` is what the host sent; the plan's `blocks` is the number of ranges in it.
///
/// # Errors
/// A range beyond the end of the namespace; nothing is to be deallocated then.
pub fn unmaps<'a>(
    plan: &Plan,
    table: &NamespaceTable,
    data: &'a [u8],
) -> Result<impl Iterator<Item = (u64, u32)> + use<'a>, Status> {
    let short = |_: DecodeError| Status::DATA_SGL_LENGTH_INVALID.do_not_retry();
    let ranges = u16::try_from(plan.blocks).map_err(|_| Status::INTERNAL_ERROR)?;
    let end = table.entry(plan).blocks;
    for range in DsmRange::list(data, ranges).map_err(short)? {
        if range.lba > end || u64::from(range.blocks) > end - range.lba {
            return Err(Status::LBA_OUT_OF_RANGE.do_not_retry());
        }
    }
    let list = DsmRange::list(data, ranges).map_err(short)?;
    Ok(list.filter(|range| range.blocks != 0).map(|range| (range.lba, range.blocks)))
}
