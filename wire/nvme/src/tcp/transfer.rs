//! PDUs that carry commands, responses and data.

use super::{CAPSULE_CMD_SIZE, COMMON_SIZE, Framing, PduFlags, PduLayout, PduType, SHORT_SIZE};
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
    /// Decodes the command; the caller has checked the common header.
    #[inline]
    pub fn decode(from: &[u8; CAPSULE_CMD_SIZE]) -> Sqe {
        Sqe::decode(&array_at(from, COMMON_SIZE))
    }

    /// Encodes the header; the data goes where the layout says.
    #[inline]
    pub fn encode(&self, framing: &Framing, into: &mut [u8; CAPSULE_CMD_SIZE]) -> PduLayout {
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
    /// Decodes the completion; the caller has checked the common header.
    #[inline]
    pub fn decode(from: &[u8; SHORT_SIZE]) -> Cqe {
        Cqe::decode(&array_at(from, COMMON_SIZE))
    }

    /// Encodes the header, which is the whole PDU but for its digest.
    #[inline]
    pub fn encode(&self, framing: &Framing, into: &mut [u8; SHORT_SIZE]) -> PduLayout {
        put(into, COMMON_SIZE, &self.cqe.to_bytes());
        framing.write(PduType::CapsuleResp, 0, 0, into)
    }
}

/// Host to Controller Data Transfer (TCP 1.0, section 3.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct H2cData {
    /// Command Capsule CID.
    pub cccid: u16,
    /// Transfer Tag of the R2T.
    pub ttag: u16,
    /// Data offset in bytes from the start of the command's data.
    pub offset: u32,
    /// Bytes of data.
    pub length: u32,
    /// The last PDU of the R2T (LAST_PDU).
    pub last: bool,
}

impl H2cData {
    /// Decodes the header. The caller has checked the common header, and must check that `length` equals
    /// the data length of the layout (if not, the field at byte 16 is invalid) and is in the range of the
    /// R2T.
    #[inline]
    pub fn decode(from: &[u8; SHORT_SIZE]) -> H2cData {
        H2cData {
            cccid: u16_at(from, at::CCCID),
            ttag: u16_at(from, at::TTAG),
            offset: u32_at(from, at::OFFSET),
            length: u32_at(from, at::LENGTH),
            last: PduFlags::from_bits_retain(from[1]).contains(PduFlags::LAST),
        }
    }

    /// Encodes the header; the data goes where the layout says.
    #[inline]
    pub fn encode(&self, framing: &Framing, into: &mut [u8; SHORT_SIZE]) -> PduLayout {
        put16(into, at::CCCID, self.cccid);
        put16(into, at::TTAG, self.ttag);
        put32(into, at::OFFSET, self.offset);
        put32(into, at::LENGTH, self.length);
        put32(into, at::RESERVED, 0);
        framing.write(PduType::H2cData, PduFlags::LAST.when(self.last), self.length, into)
    }
}

/// Controller to Host Data Transfer (TCP 1.0, section 3.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct C2hData {
    /// Command Capsule CID.
    pub cccid: u16,
    /// Data offset in bytes from the start of the command's data.
    pub offset: u32,
    /// Bytes of data.
    pub length: u32,
    /// The last PDU of the command (LAST_PDU).
    pub last: bool,
    /// The command succeeded and no response capsule follows; only with `last` (SUCCESS).
    pub success: bool,
}

impl C2hData {
    /// Decodes the header; the caller has checked the common header.
    #[inline]
    pub fn decode(from: &[u8; SHORT_SIZE]) -> C2hData {
        C2hData {
            cccid: u16_at(from, at::CCCID),
            offset: u32_at(from, at::OFFSET),
            length: u32_at(from, at::LENGTH),
            last: PduFlags::from_bits_retain(from[1]).contains(PduFlags::LAST),
            success: PduFlags::from_bits_retain(from[1]).contains(PduFlags::SUCCESS),
        }
    }

    /// Encodes the header; the data goes where the layout says.
    #[inline]
    pub fn encode(&self, framing: &Framing, into: &mut [u8; SHORT_SIZE]) -> PduLayout {
        // SUCCESS may be set only where LAST_PDU is (TCP 1.0, section 3.6.2: C2HData).
        debug_assert!(self.last || !self.success, "SUCCESS goes with LAST_PDU only: {self:?}");
        put16(into, at::CCCID, self.cccid);
        put16(into, at::TTAG, 0);
        put32(into, at::OFFSET, self.offset);
        put32(into, at::LENGTH, self.length);
        put32(into, at::RESERVED, 0);
        let flags = PduFlags::LAST.when(self.last) | PduFlags::SUCCESS.when(self.success);
        framing.write(PduType::C2hData, flags, self.length, into)
    }
}

/// Ready to Transfer (TCP 1.0, section 3.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct R2t {
    /// Command Capsule CID.
    pub cccid: u16,
    /// Transfer Tag, which the H2CData PDUs return.
    pub ttag: u16,
    /// Requested data offset in bytes from the start of the command's data.
    pub offset: u32,
    /// Bytes of data.
    pub length: u32,
}

impl R2t {
    /// Decodes the header; the caller has checked the common header.
    #[inline]
    pub fn decode(from: &[u8; SHORT_SIZE]) -> R2t {
        R2t {
            cccid: u16_at(from, at::CCCID),
            ttag: u16_at(from, at::TTAG),
            offset: u32_at(from, at::OFFSET),
            length: u32_at(from, at::LENGTH),
        }
    }

    /// Encodes the header, which is the whole PDU but for its digest.
    #[inline]
    pub fn encode(&self, framing: &Framing, into: &mut [u8; SHORT_SIZE]) -> PduLayout {
        put16(into, at::CCCID, self.cccid);
        put16(into, at::TTAG, self.ttag);
        put32(into, at::OFFSET, self.offset);
        put32(into, at::LENGTH, self.length);
        put32(into, at::RESERVED, 0);
        framing.write(PduType::R2t, 0, 0, into)
    }
}
