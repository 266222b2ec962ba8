//! Typed commands: everything that [`ring::Op`] has no word for.
//!
//! A [`Command`] owns its buffers from submission to completion, like a request, and comes back as an
//! [`Executed`]. The functions here fill in the fields that differ; the driver fills in the command
//! identifier and how the data is described.

use memory::Buffer;
use ring::{Status, Tag};
use wire_nvme::Sqe;
use wire_nvme::io::{Copy, DatasetManagement, ReadWrite, WriteUncorrectable, WriteZeroes};
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::reservation::{Acquire, Register, Release, Report};
use wire_nvme::zone::{Append, ManagementReceive, ManagementSend};

/// A command on its way to the device, with the memory that it needs.
#[derive(Debug)]
pub struct Command {
    /// The caller's name for it.
    pub tag: Tag,
    /// The command. Its identifier, data pointer and metadata pointer are the driver's.
    pub sqe: Sqe,
    /// Its data, the whole buffer.
    pub data: Option<Buffer>,
    /// Its metadata, where the namespace keeps metadata apart.
    pub metadata: Option<Buffer>,
    /// The data pointer is filled in: commands of the driver's own alone, because an address that a device
    /// writes to is not for safe code to choose.
    pub(crate) pointing: bool,
}

/// A command on its way back.
#[derive(Debug)]
pub struct Executed {
    pub(crate) command: Command,
    pub(crate) status: Status,
    pub(crate) result: u64,
}

impl Executed {
    /// The caller's name for it.
    pub fn tag(&self) -> Tag {
        self.command.tag
    }

    /// How it ended.
    pub fn status(&self) -> Status {
        self.status
    }

    /// Dwords 0 and 1 of the completion: what the command returns besides data.
    pub fn result(&self) -> u64 {
        self.result
    }

    /// The command that it was, with its buffers.
    pub fn command(&self) -> &Command {
        &self.command
    }

    /// Gives the command back, to be read from or used again.
    pub fn into_command(self) -> Command {
        self.command
    }
}

impl Command {
    /// Any command: raw passthrough.
    ///
    /// Nothing is checked but that the buffers can be described. The device reads or writes at most the
    /// bytes of `data` if it keeps to the command; the caller answers for a command that moves more.
    pub fn raw(tag: Tag, sqe: Sqe, data: Option<Buffer>, metadata: Option<Buffer>) -> Command {
        Command { tag, sqe, data, metadata, pointing: false }
    }

    pub(crate) fn pointing(sqe: Sqe) -> Command {
        Command { tag: Tag(0), sqe, data: None, metadata: None, pointing: true }
    }

    fn with(tag: Tag, nsid: u32, sqe: Sqe, data: Option<Buffer>) -> Command {
        Command { tag, sqe: Sqe { nsid, flags: 0, ..sqe }, data, metadata: None, pointing: false }
    }

    /// The same with metadata in a buffer of its own.
    #[must_use]
    pub fn with_metadata(self, metadata: Buffer) -> Command {
        Command { metadata: Some(metadata), ..self }
    }

    /// Read, with everything that a read can ask for: protection information, hints, directives.
    pub fn read(tag: Tag, nsid: u32, view: &ReadWrite, data: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(NvmOpcode::Read), Some(data))
    }

    /// Write, likewise.
    pub fn write(tag: Tag, nsid: u32, view: &ReadWrite, data: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(NvmOpcode::Write), Some(data))
    }

    /// Compare: fails with [`Status::COMPARE_FAILURE`] where the blocks are not `data`.
    pub fn compare(tag: Tag, nsid: u32, view: &ReadWrite, data: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(NvmOpcode::Compare), Some(data))
    }

    /// Compare and write as one: the write happens if the comparison held. Submit both together, in order;
    /// each completes by itself.
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

    /// Verify: the device reads and checks the blocks, and sends nothing.
    pub fn verify(tag: Tag, nsid: u32, view: &ReadWrite) -> Command {
        Command::with(tag, nsid, view.to_sqe(NvmOpcode::Verify), None)
    }

    /// Write Uncorrectable: reading the blocks fails until they are written again.
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
    pub fn copy(tag: Tag, nsid: u32, view: &Copy, ranges: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(), Some(ranges))
    }

    /// Reservation Register; `keys` holds 16 bytes.
    pub fn reservation_register(tag: Tag, nsid: u32, view: &Register, keys: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(), Some(keys))
    }

    /// Reservation Acquire; `keys` holds 16 bytes.
    pub fn reservation_acquire(tag: Tag, nsid: u32, view: &Acquire, keys: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(), Some(keys))
    }

    /// Reservation Release; `key` holds 8 bytes.
    pub fn reservation_release(tag: Tag, nsid: u32, view: &Release, key: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(), Some(key))
    }

    /// Reservation Report into `data`, as much as there is room for.
    pub fn reservation_report(tag: Tag, nsid: u32, extended: bool, data: Buffer) -> Command {
        let sqe = Report { extended, length_bytes: data.len() as u64 / 4 * 4 }.to_sqe();
        Command::with(tag, nsid, sqe, Some(data))
    }

    /// Zone Management Send: open, close, finish, reset and so on.
    pub fn zone_send(tag: Tag, nsid: u32, view: &ManagementSend, data: Option<Buffer>) -> Command {
        Command::with(tag, nsid, view.to_sqe(), data)
    }

    /// Zone Management Receive: the report of zones.
    pub fn zone_report(tag: Tag, nsid: u32, view: &ManagementReceive, data: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(), Some(data))
    }

    /// Zone Append; the completion's result is the first block that was written.
    pub fn zone_append(tag: Tag, nsid: u32, view: &Append, data: Buffer) -> Command {
        Command::with(tag, nsid, view.to_sqe(), Some(data))
    }

    /// Ends it without its having been sent.
    pub(crate) fn refuse(self, status: Status) -> Executed {
        Executed { command: self, status, result: 0 }
    }
}
