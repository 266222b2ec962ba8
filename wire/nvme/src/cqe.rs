//! Completion queue entries, 16 bytes.

use block_io::Status;

use crate::le::{put16, put64, u16_at, u64_at};

/// Size in bytes of a completion queue entry (Base 2.0, section 3.3.3.2).
pub const SIZE: usize = 16;

const _: () = assert!(SIZE == at::STATUS + 2);

mod at {
    pub(super) const RESULT: usize = 0;
    pub(super) const SQHD: usize = 8;
    pub(super) const SQID: usize = 10;
    pub(super) const CID: usize = 12;
    pub(super) const STATUS: usize = 14;
}

/// A completion queue entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cqe {
    /// Dwords 0 and 1: the command specific result.
    pub result: u64,
    /// SQ Head Pointer: how far the controller has fetched commands from the submission queue.
    pub sqhd: u16,
    /// SQ Identifier of the command; reserved for message-based transports.
    pub sqid: u16,
    /// Command Identifier.
    pub cid: u16,
    /// Status Field.
    pub status: Status,
    /// Phase Tag of memory-based transports; reserved for message-based ones.
    pub phase: bool,
}

impl Cqe {
    /// A completion with a result of 0.
    #[inline]
    pub const fn new(cid: u16, status: Status) -> Cqe {
        Cqe { result: 0, sqhd: 0, sqid: 0, cid, status, phase: false }
    }

    /// Sets dwords 0 and 1 to `result`.
    #[inline]
    #[must_use]
    pub const fn with_result(self, result: u64) -> Cqe {
        Cqe { result, ..self }
    }

    /// Decodes 16 bytes; every value is valid.
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

    /// Encodes the entry; the exact inverse of [`decode`](Self::decode).
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
