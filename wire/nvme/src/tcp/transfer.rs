//! PDUs that carry commands, responses and data: the ones that every I/O pays for.

use super::{CAPSULE_CMD_SIZE, COMMON_SIZE, Flags, Framing, Layout, PduType, SHORT_SIZE};
use crate::le::{array_at, put, put16, put32, u16_at, u32_at};
use crate::{Cqe, Sqe};

mod at {
    pub(super) const CCCID: usize = 8;
    pub(super) const TTAG: usize = 10;
    pub(super) const OFFSET: usize = 12;
    pub(super) const LENGTH: usize = 16;
    pub(super) const RESERVED: usize = 20;
}

/// Command capsule (TCP 1.0, section 3.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapsuleCmd {
    /// The command.
    pub sqe: Sqe,
    /// Bytes of data in the capsule.
    pub data_length: u32,
}

impl CapsuleCmd {
    /// The command of a capsule; its common header is the caller's to check.
    #[inline]
    pub fn decode(from: &[u8; CAPSULE_CMD_SIZE]) -> Sqe {
        Sqe::decode(&array_at(from, COMMON_SIZE))
    }

    /// Writes the header; the data goes where the layout says.
    #[inline]
    pub fn encode(&self, framing: &Framing, into: &mut [u8; CAPSULE_CMD_SIZE]) -> Layout {
        put(into, COMMON_SIZE, &self.sqe.to_bytes());
        framing.write(PduType::CapsuleCmd, 0, self.data_length, into)
    }
}

/// Response capsule (TCP 1.0, section 3.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapsuleResp {
    /// The completion.
    pub cqe: Cqe,
}

impl CapsuleResp {
    /// The completion of a capsule; its common header is the caller's to check.
    #[inline]
    pub fn decode(from: &[u8; SHORT_SIZE]) -> Cqe {
        Cqe::decode(&array_at(from, COMMON_SIZE))
    }

    /// Writes the header, which is the whole PDU but for its digest.
    #[inline]
    pub fn encode(&self, framing: &Framing, into: &mut [u8; SHORT_SIZE]) -> Layout {
        put(into, COMMON_SIZE, &self.cqe.to_bytes());
        framing.write(PduType::CapsuleResp, 0, 0, into)
    }
}

/// Host to Controller Data Transfer (TCP 1.0, section 3.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct H2cData {
    /// The command that the data belongs to.
    pub cccid: u16,
    /// The tag of the R2T that asked for it.
    pub ttag: u16,
    /// Where the data goes, in bytes from the start of the command's data.
    pub offset: u32,
    /// Bytes of data.
    pub length: u32,
    /// Whether this is the last data of the R2T.
    pub last: bool,
}

impl H2cData {
    /// Reads the header. The caller has checked the common header, and checks that `length` is the
    /// layout's data length (at fault: the field at byte 16) and within what its R2T asked for.
    #[inline]
    pub fn decode(from: &[u8; SHORT_SIZE]) -> H2cData {
        H2cData {
            cccid: u16_at(from, at::CCCID),
            ttag: u16_at(from, at::TTAG),
            offset: u32_at(from, at::OFFSET),
            length: u32_at(from, at::LENGTH),
            last: Flags(from[1]).contains(Flags::LAST),
        }
    }

    /// Writes the header; the data goes where the layout says.
    #[inline]
    pub fn encode(&self, framing: &Framing, into: &mut [u8; SHORT_SIZE]) -> Layout {
        put16(into, at::CCCID, self.cccid);
        put16(into, at::TTAG, self.ttag);
        put32(into, at::OFFSET, self.offset);
        put32(into, at::LENGTH, self.length);
        put32(into, at::RESERVED, 0);
        framing.write(PduType::H2cData, Flags::LAST.when(self.last), self.length, into)
    }
}

/// Controller to Host Data Transfer (TCP 1.0, section 3.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct C2hData {
    /// The command that the data belongs to.
    pub cccid: u16,
    /// Where the data goes, in bytes from the start of the command's data.
    pub offset: u32,
    /// Bytes of data.
    pub length: u32,
    /// Whether this is the last data of the command.
    pub last: bool,
    /// Whether the command succeeded and no response capsule follows; only with `last`.
    pub success: bool,
}

impl C2hData {
    /// Reads the header; its common header is the caller's to check.
    #[inline]
    pub fn decode(from: &[u8; SHORT_SIZE]) -> C2hData {
        C2hData {
            cccid: u16_at(from, at::CCCID),
            offset: u32_at(from, at::OFFSET),
            length: u32_at(from, at::LENGTH),
            last: Flags(from[1]).contains(Flags::LAST),
            success: Flags(from[1]).contains(Flags::SUCCESS),
        }
    }

    /// Writes the header; the data goes where the layout says.
    #[inline]
    pub fn encode(&self, framing: &Framing, into: &mut [u8; SHORT_SIZE]) -> Layout {
        // SUCCESS may be set only where LAST_PDU is (TCP 1.0, section 3.6.2: C2HData).
        debug_assert!(self.last || !self.success, "SUCCESS goes with LAST_PDU only: {self:?}");
        put16(into, at::CCCID, self.cccid);
        put16(into, at::TTAG, 0);
        put32(into, at::OFFSET, self.offset);
        put32(into, at::LENGTH, self.length);
        put32(into, at::RESERVED, 0);
        let flags = Flags::LAST.when(self.last) | Flags::SUCCESS.when(self.success);
        framing.write(PduType::C2hData, flags, self.length, into)
    }
}

/// Ready to Transfer (TCP 1.0, section 3.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct R2t {
    /// The command whose data is asked for.
    pub cccid: u16,
    /// The controller's tag, which the data brings back.
    pub ttag: u16,
    /// Where the data starts, in bytes from the start of the command's data.
    pub offset: u32,
    /// Bytes of data.
    pub length: u32,
}

impl R2t {
    /// Reads the header; its common header is the caller's to check.
    #[inline]
    pub fn decode(from: &[u8; SHORT_SIZE]) -> R2t {
        R2t {
            cccid: u16_at(from, at::CCCID),
            ttag: u16_at(from, at::TTAG),
            offset: u32_at(from, at::OFFSET),
            length: u32_at(from, at::LENGTH),
        }
    }

    /// Writes the header, which is the whole PDU but for its digest.
    #[inline]
    pub fn encode(&self, framing: &Framing, into: &mut [u8; SHORT_SIZE]) -> Layout {
        put16(into, at::CCCID, self.cccid);
        put16(into, at::TTAG, self.ttag);
        put32(into, at::OFFSET, self.offset);
        put32(into, at::LENGTH, self.length);
        put32(into, at::RESERVED, 0);
        framing.write(PduType::R2t, 0, 0, into)
    }
}
