//! Create and Delete I/O Submission and Completion Queue (memory-based transports; Base 2.0, sections 5.5,
//! 5.6, 5.22 and 5.23).

use crate::Sqe;
use crate::le::bit;
use crate::opcode::AdminOpcode;
use crate::sqe::DataPointer;

/// Create I/O Completion Queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CreateIoCq {
    /// PRP entry 1: address of the queue, or of its PRP list.
    pub address: u64,
    /// Queue Identifier.
    pub qid: u16,
    /// Queue Size in entries, 1 to 65536.
    pub entries: u32,
    /// Physically Contiguous (PC): `address` is that of the queue rather than of a PRP list.
    pub contiguous: bool,
    /// Interrupts Enabled (IEN).
    pub interrupts: bool,
    /// Interrupt Vector (IV).
    pub vector: u16,
}

impl CreateIoCq {
    /// Decodes the command dwords; every value is valid.
    pub fn from_sqe(sqe: &Sqe) -> CreateIoCq {
        CreateIoCq {
            address: sqe.data.low,
            qid: sqe.cdw10 as u16,
            entries: (sqe.cdw10 >> 16) + 1,
            contiguous: bit(sqe.cdw11.into(), 0),
            interrupts: bit(sqe.cdw11.into(), 1),
            vector: (sqe.cdw11 >> 16) as u16,
        }
    }

    /// Encodes the command with PRPs.
    pub fn to_sqe(&self) -> Sqe {
        let bits = u32::from(self.contiguous) | u32::from(self.interrupts) << 1;
        Sqe {
            flags: 0,
            data: DataPointer::prp(self.address, 0),
            cdw10: queue(self.qid, self.entries),
            cdw11: bits | u32::from(self.vector) << 16,
            ..Sqe::new(AdminOpcode::CreateIoCq.to_wire())
        }
    }
}

/// Create I/O Submission Queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CreateIoSq {
    /// PRP entry 1: address of the queue, or of its PRP list.
    pub address: u64,
    /// Queue Identifier.
    pub qid: u16,
    /// Queue Size in entries, 1 to 65536.
    pub entries: u32,
    /// Physically Contiguous (PC): `address` is that of the queue rather than of a PRP list.
    pub contiguous: bool,
    /// Queue Priority (QPRIO), for weighted round robin arbitration.
    pub priority: u8,
    /// Completion Queue Identifier for its commands.
    pub cqid: u16,
}

impl CreateIoSq {
    /// Decodes the command dwords; every value is valid.
    pub fn from_sqe(sqe: &Sqe) -> CreateIoSq {
        CreateIoSq {
            address: sqe.data.low,
            qid: sqe.cdw10 as u16,
            entries: (sqe.cdw10 >> 16) + 1,
            contiguous: bit(sqe.cdw11.into(), 0),
            priority: (sqe.cdw11 >> 1 & 3) as u8,
            cqid: (sqe.cdw11 >> 16) as u16,
        }
    }

    /// Encodes the command with PRPs.
    pub fn to_sqe(&self) -> Sqe {
        let bits = u32::from(self.contiguous) | u32::from(self.priority & 3) << 1;
        Sqe {
            flags: 0,
            data: DataPointer::prp(self.address, 0),
            cdw10: queue(self.qid, self.entries),
            cdw11: bits | u32::from(self.cqid) << 16,
            ..Sqe::new(AdminOpcode::CreateIoSq.to_wire())
        }
    }
}

/// Delete I/O Submission Queue or Delete I/O Completion Queue, depending on the opcode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeleteQueue {
    /// Queue Identifier.
    pub qid: u16,
}

impl DeleteQueue {
    /// Decodes the command dwords; every value is valid.
    pub const fn from_sqe(sqe: &Sqe) -> DeleteQueue {
        DeleteQueue { qid: sqe.cdw10 as u16 }
    }

    /// Encodes the command; `opcode` is that of one of the two.
    pub fn to_sqe(&self, opcode: AdminOpcode) -> Sqe {
        Sqe { flags: 0, cdw10: self.qid.into(), ..Sqe::new(opcode.to_wire()) }
    }
}

fn queue(qid: u16, entries: u32) -> u32 {
    assert!((1..=65536).contains(&entries), "a queue of {entries} entries");
    u32::from(qid) | (entries - 1) << 16
}
