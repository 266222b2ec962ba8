//! Commands of any kind to a controller, for tools.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use nvme::{AdminData, AdminError};
use ring::Status;
use wire_nvme::Sqe;
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};

use crate::initiator::{GRACE, Initiator, InitiatorError, PathInfo, Queue, info};
use crate::path::{Command, PathStatus};

/// A command, and what it moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passed {
    /// Where it goes.
    pub queue: Queue,
    /// The command. Its identifier and pointers are the driver's.
    pub sqe: Sqe,
    /// Its data.
    pub data: AdminData,
    /// Its metadata; of I/O commands, where the namespace keeps metadata apart.
    pub metadata: AdminData,
    /// How long it is waited for; as long as the driver's own commands where nothing is said.
    pub timeout: Option<Duration>,
}

/// How a command ended that was passed through.
#[derive(Clone, Debug)]
pub struct PassedThrough {
    /// Its status.
    pub status: Status,
    /// Dwords 0 and 1 of the completion; 0 where an admin command failed.
    pub result: u64,
    /// What it returned.
    pub data: Vec<u8>,
    /// Likewise.
    pub metadata: Vec<u8>,
    /// The path that it took.
    pub path: PathInfo,
}

impl Initiator {
    /// Executes a command on the first path of a name that is there. Its failing is no error of this.
    ///
    /// A command that says that it moves more than `data` holds is refused, as far as one can tell from the
    /// command; so are those that are the driver's own.
    pub fn pass_through(&self, name: &str, passed: Passed) -> Result<PassedThrough, InitiatorError> {
        let group = self.group(name)?;
        self.check(name, &passed)?;
        let path = group.paths().into_iter().find(|path| path.status() == PathStatus::Enabled);
        let path = path.ok_or_else(|| InitiatorError::Admin(format!("{name} has no path at the moment")))?;
        let timeout = passed.timeout.unwrap_or(Duration::from_nanos(path.config.options.timeout_ns));
        let gone = || InitiatorError::Admin("the controller was detached meanwhile".into());
        let late = |error| match error {
            RecvTimeoutError::Timeout => InitiatorError::Timeout("the command"),
            RecvTimeoutError::Disconnected => gone(),
        };
        let Passed { queue, sqe, data, metadata, .. } = passed;
        let busy = || InitiatorError::Admin("too much is being asked of the controller".into());
        match queue {
            Queue::Admin => {
                let (reply, answer) = sync_channel(1);
                if !path.ask(Command::Admin { sqe, data, reply }) {
                    return Err(busy());
                }
                // The driver ends it at its own time, so that what was asked before has time too.
                let wait = passed.timeout.unwrap_or(timeout + GRACE);
                let (status, (result, data)) = match answer.recv_timeout(wait).map_err(late)? {
                    Ok(answer) => (Status::SUCCESS, answer),
                    Err(AdminError::Status(status)) => (status, (0, Vec::new())),
                    Err(error) => return Err(InitiatorError::Admin(error.to_string())),
                };
                Ok(PassedThrough { status, result, data, metadata: Vec::new(), path: info(&path) })
            }
            Queue::Io => {
                let (reply, answer) = sync_channel(1);
                let timeout_ns = timeout.as_nanos().try_into().unwrap_or(u64::MAX);
                if !path.ask(Command::Io { sqe, data, metadata, timeout_ns, reply }) {
                    return Err(busy());
                }
                let answer = answer.recv_timeout(timeout + GRACE).map_err(late)?;
                let nvme::IoAnswer { status, result, data, metadata } =
                    answer.map_err(InitiatorError::Admin)?;
                Ok(PassedThrough { status, result, data, metadata, path: info(&path) })
            }
        }
    }

    /// Refuses what would reach memory that is not the command's, or take the driver's place.
    fn check(&self, name: &str, passed: &Passed) -> Result<(), InitiatorError> {
        let Passed { queue, sqe, data, metadata, .. } = passed;
        let invalid = |why: String| Err(InitiatorError::Invalid(why));
        let length = |data: &AdminData| match data {
            AdminData::None => 0,
            AdminData::In(length) => *length as u64,
            AdminData::Out(bytes) => bytes.len() as u64,
        };
        if length(data).max(length(metadata)) > memory::BUFFER_BYTES_MAX as u64 {
            return invalid(format!("a command moves {} bytes at most", memory::BUFFER_BYTES_MAX));
        }
        let block_bytes = match queue {
            Queue::Io => self.block_size(name, sqe.nsid).unwrap_or(0).into(),
            Queue::Admin if DRIVERS_OWN.iter().any(|own| own.to_wire() == sqe.opcode) => {
                return invalid(format!("opcode {:#04x} is the driver's own", sqe.opcode));
            }
            Queue::Admin if *metadata != AdminData::None => {
                return invalid("admin commands have no metadata".into());
            }
            Queue::Admin => 0,
        };
        match moves_bytes(*queue, sqe, block_bytes) {
            Some(bytes) if bytes > length(data) => {
                invalid(format!("the command moves {bytes} bytes, and there are {}", length(data)))
            }
            _ => Ok(()),
        }
    }
}

/// Commands that make and end queues, or that the driver keeps with the controller.
const DRIVERS_OWN: [AdminOpcode; 7] = [
    AdminOpcode::CreateIoCq,
    AdminOpcode::CreateIoSq,
    AdminOpcode::DeleteIoCq,
    AdminOpcode::DeleteIoSq,
    AdminOpcode::DoorbellBufferConfig,
    AdminOpcode::AsyncEventRequest,
    AdminOpcode::Fabrics,
];

/// Bytes that a command says that it moves, where one can tell.
fn moves_bytes(queue: Queue, sqe: &Sqe, block_bytes: u64) -> Option<u64> {
    let is_admin = |opcode: AdminOpcode| queue == Queue::Admin && sqe.opcode == opcode.to_wire();
    let is_io = |opcode: NvmOpcode| queue == Queue::Io && sqe.opcode == opcode.to_wire();
    let Sqe { cdw10, cdw11, cdw12, .. } = *sqe;
    if is_admin(AdminOpcode::Identify) {
        return Some(wire_nvme::identify::SIZE as u64);
    }
    if is_admin(AdminOpcode::GetLogPage) {
        // Counted in dwords from 0, in two halves (Base 2.0, section 5.16.1).
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
    fn what_a_command_says_that_it_moves_is_known() {
        let with = |opcode: u8, cdw10: u32, cdw11: u32, cdw12: u32| {
            let mut sqe = Sqe::new(opcode);
            (sqe.cdw10, sqe.cdw11, sqe.cdw12) = (cdw10, cdw11, cdw12);
            sqe
        };
        for (queue, sqe, bytes) in [
            (Queue::Admin, with(0x06, 1, 0, 0), Some(4096)),
            (Queue::Admin, with(0x02, 0x007f_0002, 0, 0), Some(512)),
            (Queue::Admin, with(0x02, 0xffff_0002, 0xffff, 0), Some(1 << 34)),
            (Queue::Admin, with(0x11, 1023, 0, 0), Some(4096)),
            (Queue::Admin, with(0x18, 0, 0, 0), None),
            (Queue::Io, with(0x02, 0, 0, 7), Some(4096)),
            (Queue::Io, with(0x01, 0, 0, 0xffff_ffff), Some(65536 * 512)),
            (Queue::Io, with(0x09, 0xff, 4, 0), Some(4096)),
            (Queue::Io, with(0x00, 0, 0, 0), None),
        ] {
            assert_eq!(moves_bytes(queue, &sqe, 512), bytes, "{queue:?} {sqe:?}");
        }
    }
}
