//! What every transport passes through.

use std::time::Duration;

use bdev_nvme::{Initiator, InitiatorError, Passed, Queue};
use nvme::AdminData;
use ring::Status;
use wire_nvme::Sqe;
use wire_nvme::admin::Identify;
use wire_nvme::io::ReadWrite;
use wire_nvme::opcode::NvmOpcode;

/// Identifies, writes, reads and fails, by commands of the caller's own; namespace 1 has blocks of 512 bytes.
pub(crate) fn passing_through(initiator: &Initiator, name: &str) {
    let pass = |queue, sqe, data| {
        let timeout = Some(Duration::from_secs(20));
        initiator.pass_through(name, Passed { queue, sqe, data, metadata: AdminData::None, timeout })
    };
    let identify = Identify { cns: 1, ..Identify::default() }.to_sqe(0);
    let told = pass(Queue::Admin, identify, AdminData::In(4096)).unwrap();
    assert_eq!((told.status, told.data.len()), (Status::SUCCESS, 4096));
    assert_eq!(told.data[24..64], told.path.identity.unwrap().mn);
    let io = |opcode: NvmOpcode, lba, blocks| {
        let view = ReadWrite { lba, blocks, ..ReadWrite::default() };
        Sqe { nsid: 1, flags: 0, ..view.to_sqe(opcode) }
    };
    let bytes: Vec<u8> = (0..4096u32).map(|at| (at / 512 + at) as u8).collect();
    let written = pass(Queue::Io, io(NvmOpcode::Write, 16, 8), AdminData::Out(bytes.clone())).unwrap();
    assert!(written.status.is_success() && written.data.is_empty());
    let read = pass(Queue::Io, io(NvmOpcode::Read, 16, 8), AdminData::In(4096)).unwrap();
    assert!(read.status.is_success() && read.data == bytes);
    let flush = Sqe { nsid: 1, ..Sqe::new(NvmOpcode::Flush.to_wire()) };
    assert!(pass(Queue::Io, flush, AdminData::None).unwrap().status.is_success());
    let past = pass(Queue::Io, io(NvmOpcode::Read, 1 << 40, 8), AdminData::In(4096)).unwrap();
    assert!(past.status.same_code(Status::LBA_OUT_OF_RANGE));
    let unknown = pass(Queue::Admin, Sqe::new(0xc7), AdminData::None).unwrap();
    assert!(unknown.status.same_code(Status::INVALID_OPCODE), "{}", unknown.status);
    // More than there is memory for, and what is the driver's own.
    for (queue, sqe, data) in [
        (Queue::Io, io(NvmOpcode::Read, 0, 9), AdminData::In(4096)),
        (Queue::Admin, identify, AdminData::In(512)),
        (Queue::Admin, Sqe::new(0x0c), AdminData::None),
        (Queue::Admin, Sqe::new(0x7f), AdminData::None),
        (Queue::Io, Sqe::new(0x00), AdminData::In(2 << 20)),
    ] {
        let refused = pass(queue, sqe, data).unwrap_err();
        assert!(matches!(refused, InitiatorError::Invalid(_)), "{sqe:?}: {refused}");
    }
}
