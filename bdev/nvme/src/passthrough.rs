//! Passthrough of arbitrary commands to a controller, for tools.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use block_io::Status;
use nvme::{AdminData, AdminError, AdminOutput};
use wire_nvme::Sqe;
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};

use crate::initiator::{Initiator, InitiatorError, PathInfo, QueueKind, TIMEOUT_MARGIN, path_info};
use crate::path::{PathCommand, PathStatus};

/// A passthrough command and its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassthroughCommand {
    /// The kind of queue that it is sent to.
    pub queue: QueueKind,
    /// The submission queue entry. The driver sets the command identifier and the data pointers.
    pub sqe: Sqe,
    /// The data buffer and its direction.
    pub data: AdminData,
    /// The metadata buffer, for I/O commands on a namespace with separate metadata.
    pub metadata: AdminData,
    /// Timeout; `None` for the driver's default.
    pub timeout: Option<Duration>,
}

/// The completion of a passthrough command.
#[derive(Clone, Debug)]
pub struct PassthroughReply {
    /// Status of the completion.
    pub status: Status,
    /// Dwords 0 and 1 of the completion; 0 where an admin command failed.
    pub result: u64,
    /// Data that it returned; empty for writes.
    pub data: Vec<u8>,
    /// Metadata that it returned; empty for writes.
    pub metadata: Vec<u8>,
    /// The path on which it was executed.
    pub path: PathInfo,
}

impl Initiator {
    /// Executes a command on the first enabled path of a name. A command that completes with an error status is an
    /// `Ok` result.
    ///
    /// # Errors
    /// Commands are rejected whose transfer length is known and exceeds `data`, and opcodes that are reserved for the
    /// driver.
    pub fn pass_through(
        &self,
        name: &str,
        command: PassthroughCommand,
    ) -> Result<PassthroughReply, InitiatorError> {
        let group = self.group(name)?;
        self.check(name, &command)?;
        let path = group.paths().into_iter().find(|path| path.status() == PathStatus::Enabled);
        let path = path.ok_or_else(|| InitiatorError::Admin(format!("{name} has no enabled path")))?;
        let timeout = command.timeout.unwrap_or(Duration::from_nanos(path.config.options.timeout_ns));
        let detached = || InitiatorError::Admin("the controller was detached meanwhile".into());
        let no_reply = |error| match error {
            RecvTimeoutError::Timeout => InitiatorError::Timeout("the command"),
            RecvTimeoutError::Disconnected => detached(),
        };
        let PassthroughCommand { queue, sqe, data, metadata, .. } = command;
        let queue_full = || InitiatorError::Admin("the command queue of the controller is full".into());
        match queue {
            QueueKind::Admin => {
                let (reply, answer) = sync_channel(1);
                if !path.submit(PathCommand::Admin { sqe, data, reply }) {
                    return Err(queue_full());
                }
                // The driver has its own timeout; the margin covers commands that were queued before.
                let wait = command.timeout.unwrap_or(timeout + TIMEOUT_MARGIN);
                let (status, AdminOutput { result, data }) =
                    match reactor::blocking::receive_timeout(&answer, wait).map_err(no_reply)? {
                        Ok(answer) => (Status::SUCCESS, answer),
                        Err(AdminError::Status(status)) => {
                            (status, AdminOutput { result: 0, data: Vec::new() })
                        }
                        Err(error) => return Err(InitiatorError::Admin(error.to_string())),
                    };
                Ok(PassthroughReply { status, result, data, metadata: Vec::new(), path: path_info(&path) })
            }
            QueueKind::Io => {
                let (reply, answer) = sync_channel(1);
                let timeout_ns = timeout.as_nanos().try_into().unwrap_or(u64::MAX);
                if !path.submit(PathCommand::Io { sqe, data, metadata, timeout_ns, reply }) {
                    return Err(queue_full());
                }
                let answer = reactor::blocking::receive_timeout(&answer, timeout + TIMEOUT_MARGIN)
                    .map_err(no_reply)?;
                let nvme::PassthroughOutput { status, result, data, metadata } =
                    answer.map_err(InitiatorError::Admin)?;
                Ok(PassthroughReply { status, result, data, metadata, path: path_info(&path) })
            }
        }
    }

    /// Rejects commands that would transfer beyond their buffers, and those reserved for the driver.
    fn check(&self, name: &str, command: &PassthroughCommand) -> Result<(), InitiatorError> {
        let PassthroughCommand { queue, sqe, data, metadata, .. } = command;
        let invalid = |why: String| Err(InitiatorError::Invalid(why));
        let length = |data: &AdminData| match data {
            AdminData::None => 0,
            AdminData::In(length) => *length as u64,
            AdminData::Out(bytes) => bytes.len() as u64,
        };
        if length(data).max(length(metadata)) > dma::BUFFER_BYTES_MAX as u64 {
            return invalid(format!("a command transfers at most {} bytes", dma::BUFFER_BYTES_MAX));
        }
        let block_bytes = match queue {
            QueueKind::Io => self.block_size(name, sqe.nsid).unwrap_or(0).into(),
            QueueKind::Admin if DRIVER_OPCODES.iter().any(|opcode| opcode.to_wire() == sqe.opcode) => {
                return invalid(format!("opcode {:#04x} is reserved for the driver", sqe.opcode));
            }
            QueueKind::Admin if *metadata != AdminData::None => {
                return invalid("admin commands have no metadata".into());
            }
            QueueKind::Admin => 0,
        };
        match transfer_bytes(*queue, sqe, block_bytes) {
            Some(bytes) if bytes > length(data) => {
                invalid(format!("the command transfers {bytes} bytes, but the buffer has {}", length(data)))
            }
            _ => Ok(()),
        }
    }
}

/// Commands that create and delete queues, or that the driver keeps outstanding.
const DRIVER_OPCODES: [AdminOpcode; 7] = [
    AdminOpcode::CreateIoCq,
    AdminOpcode::CreateIoSq,
    AdminOpcode::DeleteIoCq,
    AdminOpcode::DeleteIoSq,
    AdminOpcode::DoorbellBufferConfig,
    AdminOpcode::AsyncEventRequest,
    AdminOpcode::Fabrics,
];

/// Transfer length of a command in bytes; `None` if its fields do not tell.
fn transfer_bytes(queue: QueueKind, sqe: &Sqe, block_bytes: u64) -> Option<u64> {
    let is_admin = |opcode: AdminOpcode| queue == QueueKind::Admin && sqe.opcode == opcode.to_wire();
    let is_io = |opcode: NvmOpcode| queue == QueueKind::Io && sqe.opcode == opcode.to_wire();
    let Sqe { cdw10, cdw11, cdw12, .. } = *sqe;
    if is_admin(AdminOpcode::Identify) {
        return Some(wire_nvme::identify::SIZE as u64);
    }
    if is_admin(AdminOpcode::GetLogPage) {
        // NUMDL and NUMDU: dwords, 0's based (Base 2.0, section 5.16.1).
        return Some((u64::from(cdw10 >> 16 | cdw11 << 16) + 1) * 4);
    }
    if is_admin(AdminOpcode::FirmwareDownload) {
        return Some((u64::from(cdw10) + 1) * 4);
    }
    if is_io(NvmOpcode::Read) || is_io(NvmOpcode::Write) || is_io(NvmOpcode::Compare) {
        return Some((u64::from(cdw12 & 0xffff) + 1) * block_bytes);
    }
    if is_io(NvmOpcode::DatasetManagement) {
        return Some((u64::from(cdw10 & 0xff) + 1) * wire_nvme::io::DSM_RANGE_SIZE as u64);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_transfer_length_is_computed_from_the_command() {
        let with = |opcode: u8, cdw10: u32, cdw11: u32, cdw12: u32| {
            let mut sqe = Sqe::new(opcode);
            (sqe.cdw10, sqe.cdw11, sqe.cdw12) = (cdw10, cdw11, cdw12);
            sqe
        };
        for (queue, sqe, bytes) in [
            (QueueKind::Admin, with(0x06, 1, 0, 0), Some(4096)),
            (QueueKind::Admin, with(0x02, 0x007f_0002, 0, 0), Some(512)),
            (QueueKind::Admin, with(0x02, 0xffff_0002, 0xffff, 0), Some(1 << 34)),
            (QueueKind::Admin, with(0x11, 1023, 0, 0), Some(4096)),
            (QueueKind::Admin, with(0x18, 0, 0, 0), None),
            (QueueKind::Io, with(0x02, 0, 0, 7), Some(4096)),
            (QueueKind::Io, with(0x01, 0, 0, 0xffff_ffff), Some(65536 * 512)),
            (QueueKind::Io, with(0x09, 0xff, 4, 0), Some(4096)),
            (QueueKind::Io, with(0x00, 0, 0, 0), None),
        ] {
            assert_eq!(transfer_bytes(queue, &sqe, 512), bytes, "{queue:?} {sqe:?}");
        }
    }
}
