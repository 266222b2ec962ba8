//! Passthrough tests that are shared by the transports.

use std::time::Duration;

use bdev_nvme::{Initiator, InitiatorError, PassthroughCommand, QueueKind};
use block_io::Status;
use nvme::AdminData;
use wire_nvme::Sqe;
use wire_nvme::admin::Identify;
use wire_nvme::io::ReadWrite;
use wire_nvme::opcode::NvmOpcode;

/// Sends passthrough commands that succeed, fail, and are rejected; namespace 1 must have blocks of 512 bytes.
pub(crate) fn check_passthrough(initiator: &Initiator, name: &str) {
    let pass = |queue, sqe, data| {
        let timeout = Some(Duration::from_secs(20));
        initiator
            .pass_through(name, PassthroughCommand { queue, sqe, data, metadata: AdminData::None, timeout })
    };
    let identify = Identify { cns: 1, ..Identify::default() }.to_sqe(0);
    let identified = pass(QueueKind::Admin, identify, AdminData::In(4096)).unwrap();
    assert_eq!((identified.status, identified.data.len()), (Status::SUCCESS, 4096));
    assert_eq!(identified.data[24..64], identified.path.identity.unwrap().mn);
    let io = |opcode: NvmOpcode, lba, blocks| {
        let view = ReadWrite { lba, blocks, ..ReadWrite::default() };
        Sqe { nsid: 1, flags: 0, ..view.to_sqe(opcode) }
    };
    let bytes: Vec<u8> = (0..4096u32).map(|at| (at / 512 + at) as u8).collect();
    let written = pass(QueueKind::Io, io(NvmOpcode::Write, 16, 8), AdminData::Out(bytes.clone())).unwrap();
    assert!(written.status.is_success() && written.data.is_empty());
    let read = pass(QueueKind::Io, io(NvmOpcode::Read, 16, 8), AdminData::In(4096)).unwrap();
    assert!(read.status.is_success() && read.data == bytes);
    let flush = Sqe { nsid: 1, ..Sqe::new(NvmOpcode::Flush.to_wire()) };
    assert!(pass(QueueKind::Io, flush, AdminData::None).unwrap().status.is_success());
    let beyond = pass(QueueKind::Io, io(NvmOpcode::Read, 1 << 40, 8), AdminData::In(4096)).unwrap();
    assert!(beyond.status.same_code(Status::LBA_OUT_OF_RANGE));
    let unknown = pass(QueueKind::Admin, Sqe::new(0xc7), AdminData::None).unwrap();
    assert!(unknown.status.same_code(Status::INVALID_OPCODE), "{}", unknown.status);
    // Transfers beyond the buffer, and opcodes reserved for the driver.
    for (queue, sqe, data) in [
        (QueueKind::Io, io(NvmOpcode::Read, 0, 9), AdminData::In(4096)),
        (QueueKind::Admin, identify, AdminData::In(512)),
        (QueueKind::Admin, Sqe::new(0x0c), AdminData::None),
        (QueueKind::Admin, Sqe::new(0x7f), AdminData::None),
        (QueueKind::Io, Sqe::new(0x00), AdminData::In(2 << 20)),
    ] {
        let refused = pass(queue, sqe, data).unwrap_err();
        assert!(matches!(refused, InitiatorError::Invalid(_)), "{sqe:?}: {refused}");
    }
}
