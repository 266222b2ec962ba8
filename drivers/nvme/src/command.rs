//! Typed commands: NVMe commands that [`block_io::Op`] does not cover.
//!
//! A [`Command`] owns its buffers from submission to completion, like a request, and returns as a
//! [`CommandCompletion`]. The constructors fill in the command-specific fields; the driver fills in the command
//! identifier, PSDT and the data pointer.

use block_io::{Status, Tag};
use dma::Buffer;
use wire_nvme::Sqe;
use wire_nvme::io::{CopyCommand, DatasetManagement, ReadWrite, WriteUncorrectable, WriteZeroes};
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::reservation::{
    ReservationAcquire, ReservationRegister, ReservationRelease, ReservationReport,
};
use wire_nvme::zone::{ZoneAppend, ZoneManagementReceive, ZoneManagementSend};

/// A command to submit, with its buffers.
#[derive(Debug)]
pub struct Command {
    /// Chosen by the caller; returned with the completion.
    pub tag: Tag,
    /// The submission queue entry. The driver fills in command identifier, data pointer and metadata pointer.
    pub sqe: Sqe,
    /// Data buffer; the data pointer covers all of it.
    pub data: Option<Buffer>,
    /// Metadata buffer, for namespaces with separate metadata.
    pub metadata: Option<Buffer>,
    /// The data pointer in `sqe` is used as it is. Internal to the driver: safe code must not choose an address that a
    /// device writes to.
    pub(crate) has_data_pointer: bool,
}

/// A completed command.
#[derive(Debug)]
pub struct CommandCompletion {
    pub(crate) command: Command,
    pub(crate) status: Status,
    pub(crate) result: u64,
}

impl CommandCompletion {
    /// The tag of the submitted command.
    pub fn tag(&self) -> Tag {
        self.command.tag
    }

    /// Completion status.
    pub fn status(&self) -> Status {
        self.status
    }

    /// Dwords 0 and 1 of the completion queue entry.
    pub fn result(&self) -> u64 {
        self.result
    }

    /// The submitted command with its buffers.
    pub fn command(&self) -> &Command {
        &self.command
    }

    /// Returns the command, so that its buffers can be read or reused.
    pub fn into_command(self) -> Command {
        self.command
    }
}

impl Command {
    /// Any command: raw passthrough.
    ///
    /// The driver checks only that the buffers can be described by a data pointer. The caller must ensure that the
    /// command transfers no more bytes than `data` and `metadata` hold.
    pub fn raw(tag: Tag, sqe: Sqe, data: Option<Buffer>, metadata: Option<Buffer>) -> Command {
        Command { tag, sqe, data, metadata, has_data_pointer: false }
    }

    pub(crate) fn with_data_pointer(sqe: Sqe) -> Command {
        Command { tag: Tag(0), sqe, data: None, metadata: None, has_data_pointer: true }
    }

    fn with(tag: Tag, nsid: u32, sqe: Sqe, data: Option<Buffer>) -> Command {
        Command { tag, sqe: Sqe { nsid, flags: 0, ..sqe }, data, metadata: None, has_data_pointer: false }
    }

    /// Adds a separate metadata buffer.
    #[must_use]
    pub fn with_metadata(self, metadata: Buffer) -> Command {
        Command { metadata: Some(metadata), ..self }
    }

    /// Read, with all options: protection information, dataset management hints, directives.
    pub fn read(tag: Tag, nsid: u32, view: &ReadWrite, data: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(NvmOpcode::Read), Some(data))
    }

    /// Write, with all options.
    pub fn write(tag: Tag, nsid: u32, view: &ReadWrite, data: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(NvmOpcode::Write), Some(data))
    }

    /// Compare: fails with [`Status::COMPARE_FAILURE`] if the blocks differ from `data`.
    pub fn compare(tag: Tag, nsid: u32, view: &ReadWrite, data: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(NvmOpcode::Compare), Some(data))
    }

    /// Fused compare and write: the write is executed if the compare succeeds. Submit both together, in order; each
    /// has a completion of its own.
    pub fn compare_and_write(
        tags: (Tag, Tag),
        nsid: u32,
        view: &ReadWrite,
        expected: Buffer,
        data: Buffer,
    ) -> [Command; 2] {
        let mut compare = Command::compare(tags.0, nsid, view, expected);
        let mut write = Command::write(tags.1, nsid, view, data);
        compare.sqe.flags |= 1;
        write.sqe.flags |= 2;
        [compare, write]
    }

    /// Verify: the device reads and checks the blocks without a data transfer.
    pub fn verify(tag: Tag, nsid: u32, view: &ReadWrite) -> Command {
        Command::with(tag, nsid, view.to_sqe(NvmOpcode::Verify), None)
    }

    /// Write Uncorrectable: reads of the blocks fail until they are written again.
    pub fn write_uncorrectable(tag: Tag, nsid: u32, view: &WriteUncorrectable) -> Command {
        Command::with(tag, nsid, view.to_sqe(), None)
    }

    /// Write Zeroes.
    pub fn write_zeroes(tag: Tag, nsid: u32, view: &WriteZeroes) -> Command {
        Command::with(tag, nsid, view.to_sqe(), None)
    }

    /// Flush.
    pub fn flush(tag: Tag, nsid: u32) -> Command {
        Command::with(tag, nsid, Sqe::new(NvmOpcode::Flush.to_wire()), None)
    }

    /// Dataset Management; `ranges` holds as many [`DsmRange`](wire_nvme::io::DsmRange)s as `view` says.
    pub fn dataset_management(tag: Tag, nsid: u32, view: &DatasetManagement, ranges: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(), Some(ranges))
    }

    /// Copy within the namespace; `ranges` holds as many source ranges as `view` says.
    pub fn copy(tag: Tag, nsid: u32, view: &CopyCommand, ranges: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(), Some(ranges))
    }

    /// Reservation Register; `keys` holds 16 bytes.
    pub fn reservation_register(tag: Tag, nsid: u32, view: &ReservationRegister, keys: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(), Some(keys))
    }

    /// Reservation Acquire; `keys` holds 16 bytes.
    pub fn reservation_acquire(tag: Tag, nsid: u32, view: &ReservationAcquire, keys: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(), Some(keys))
    }

    /// Reservation Release; `key` holds 8 bytes.
    pub fn reservation_release(tag: Tag, nsid: u32, view: &ReservationRelease, key: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(), Some(key))
    }

    /// Reservation Report into `data`, truncated to its length.
    pub fn reservation_report(tag: Tag, nsid: u32, extended: bool, data: Buffer) -> Command {
        let sqe = ReservationReport { extended, length_bytes: data.len() as u64 / 4 * 4 }.to_sqe();
        Command::with(tag, nsid, sqe, Some(data))
    }

    /// Zone Management Send: open, close, finish, reset and so on.
    pub fn zone_send(tag: Tag, nsid: u32, view: &ZoneManagementSend, data: Option<Buffer>) -> Command {
        Command::with(tag, nsid, view.to_sqe(), data)
    }

    /// Zone Management Receive: the report of zones.
    pub fn zone_report(tag: Tag, nsid: u32, view: &ZoneManagementReceive, data: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(), Some(data))
    }

    /// Zone Append; the result of the completion is the first LBA written.
    pub fn zone_append(tag: Tag, nsid: u32, view: &ZoneAppend, data: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(), Some(data))
    }

    /// Completes the command with an error without submitting it.
    pub(crate) fn reject(self, status: Status) -> CommandCompletion {
        CommandCompletion { command: self, status, result: 0 }
    }
}
