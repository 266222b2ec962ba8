//! Commands that make and remove I/O queues in memory (Base 2.0, sections 5.5, 5.6, 5.22 and 5.23).

use crate::Sqe;
use crate::le::bit;
use crate::opcode::AdminOpcode;
use crate::sqe::DataPointer;

/// Create I/O Completion Queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CreateIoCq {
    /// PRP entry 1: where the queue lies.
    pub address: u64,
    /// Its identifier.
    pub qid: u16,
    /// Its entries, 1 to 65536.
    pub entries: u32,
    /// It is contiguous in memory, and `address` is where it lies rather than a list of pages.
    pub contiguous: bool,
    /// Completions raise an interrupt.
    pub interrupts: bool,
    /// Which interrupt.
    pub vector: u16,
}

impl CreateIoCq {
    /// The view of a command; any command has one.
    pub fn of(sqe: &Sqe) -> CreateIoCq {
        CreateIoCq {
            address: sqe.data.low,
            qid: sqe.cdw10 as u16,
            entries: (sqe.cdw10 >> 16) + 1,
            contiguous: bit(sqe.cdw11.into(), 0),
            interrupts: bit(sqe.cdw11.into(), 1),
            vector: (sqe.cdw11 >> 16) as u16,
        }
    }

    /// A command with this content; data pointers are PRPs.
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
    /// PRP entry 1: where the queue lies.
    pub address: u64,
    /// Its identifier.
    pub qid: u16,
    /// Its entries, 1 to 65536.
    pub entries: u32,
    /// It is contiguous in memory, and `address` is where it lies rather than a list of pages.
    pub contiguous: bool,
    /// Priority, for weighted arbitration.
    pub priority: u8,
    /// The completion queue that its commands are answered on.
    pub cqid: u16,
}

impl CreateIoSq {
    /// The view of a command; any command has one.
    pub fn of(sqe: &Sqe) -> CreateIoSq {
        CreateIoSq {
            address: sqe.data.low,
            qid: sqe.cdw10 as u16,
            entries: (sqe.cdw10 >> 16) + 1,
            contiguous: bit(sqe.cdw11.into(), 0),
            priority: (sqe.cdw11 >> 1 & 3) as u8,
            cqid: (sqe.cdw11 >> 16) as u16,
        }
    }

    /// A command with this content; data pointers are PRPs.
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

/// Delete I/O Submission Queue, or Delete I/O Completion Queue: which, the opcode says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeleteQueue {
    /// The queue's identifier.
    pub qid: u16,
}

impl DeleteQueue {
    /// The view of a command; any command has one.
    pub const fn of(sqe: &Sqe) -> DeleteQueue {
        DeleteQueue { qid: sqe.cdw10 as u16 }
    }

    /// A command with this content: `opcode` is that of one of the two.
    pub fn to_sqe(&self, opcode: AdminOpcode) -> Sqe {
        Sqe { flags: 0, cdw10: self.qid.into(), ..Sqe::new(opcode.to_wire()) }
    }
}

fn queue(qid: u16, entries: u32) -> u32 {
    assert!((1..=65536).contains(&entries), "a queue of {entries} entries");
    u32::from(qid) | (entries - 1) << 16
}
