//! Completion queue entries: what a host is answered, 16 bytes.

use ring::Status;

use crate::le::{put16, put64, u16_at, u64_at};

/// Bytes of a completion queue entry (Base 2.0, section 3.3.3.2).
pub const SIZE: usize = 16;

const _: () = assert!(SIZE == at::STATUS + 2);

mod at {
    pub(super) const RESULT: usize = 0;
    pub(super) const SQHD: usize = 8;
    pub(super) const SQID: usize = 10;
    pub(super) const CID: usize = 12;
    pub(super) const STATUS: usize = 14;
}

/// One completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cqe {
    /// Dwords 0 and 1: what the command returns besides data.
    pub result: u64,
    /// How far the controller has taken submissions from the queue: its head, counted from 0.
    pub sqhd: u16,
    /// Submission queue that the command came from; reserved over fabrics.
    pub sqid: u16,
    /// The command's identifier.
    pub cid: u16,
    /// How it ended.
    pub status: Status,
    /// Phase tag, for queues in memory; reserved over fabrics.
    pub phase: bool,
}

impl Cqe {
    /// A completion that returns nothing but its status.
    #[inline]
    pub const fn new(cid: u16, status: Status) -> Cqe {
        Cqe { result: 0, sqhd: 0, sqid: 0, cid, status, phase: false }
    }

    /// The same with `result` in dwords 0 and 1.
    #[inline]
    #[must_use]
    pub const fn with_result(self, result: u64) -> Cqe {
        Cqe { result, ..self }
    }

    /// Reads an entry; any 16 bytes are one.
    #[inline]
    pub fn decode(from: &[u8; SIZE]) -> Cqe {
        let status = u16_at(from, at::STATUS);
        Cqe {
            result: u64_at(from, at::RESULT),
            sqhd: u16_at(from, at::SQHD),
            sqid: u16_at(from, at::SQID),
            cid: u16_at(from, at::CID),
            status: Status::from_field(status >> 1),
            phase: status & 1 != 0,
        }
    }

    /// Writes the entry; the exact inverse of [`decode`](Self::decode).
    #[inline]
    pub fn encode(&self, into: &mut [u8; SIZE]) {
        put64(into, at::RESULT, self.result);
        put16(into, at::SQHD, self.sqhd);
        put16(into, at::SQID, self.sqid);
        put16(into, at::CID, self.cid);
        put16(into, at::STATUS, self.status.field() << 1 | self.phase as u16);
    }

    /// The entry as bytes.
    #[inline]
    pub fn to_bytes(&self) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        self.encode(&mut bytes);
        bytes
    }
}
