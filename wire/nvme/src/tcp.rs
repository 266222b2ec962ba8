//! NVMe/TCP protocol data units.
//!
//! A PDU is a header, an optional header digest, padding up to the negotiated alignment, data and an
//! optional data digest (TCP 1.0, section 3.1). [`CommonHeader::decode`] and [`CommonHeader::layout`]
//! give a receiver all that it needs to split a byte stream into PDUs; the `encode` of each PDU writes
//! the common header for the negotiated [`Framing`] of the connection.
//!
//! ```
//! use wire_nvme::tcp::{CommonHeader, Framing, PduType, R2t};
//! let mut bytes = [0; 24];
//! R2t { cccid: 5, ttag: 1, offset: 0, length: 4096 }.encode(&Framing::PLAIN, &mut bytes);
//! let header = CommonHeader::decode(bytes.first_chunk().unwrap()).unwrap();
//! assert_eq!(header.kind, PduType::R2t);
//! assert_eq!(header.layout(&Framing::PLAIN).unwrap().length, 24);
//! ```

mod init;
mod transfer;

pub use init::{IcReq, IcResp, TermReq};
pub use transfer::{C2hData, CapsuleCmd, CapsuleResp, H2cData, R2t};

use crate::le::{put32, u32_at};

/// Size in bytes of the common header that every PDU starts with.
pub const COMMON_SIZE: usize = 8;
/// Size in bytes of an ICReq or ICResp PDU.
pub const IC_SIZE: usize = 128;
/// Size in bytes of the header of a CapsuleCmd PDU.
pub const CAPSULE_CMD_SIZE: usize = 72;
/// Size in bytes of the header of CapsuleResp, H2CData, C2HData, R2T and TermReq PDUs.
pub const SHORT_SIZE: usize = 24;
/// Size in bytes of the longest header.
pub const HEADER_MAX: usize = IC_SIZE;
/// Size in bytes of the longest TermReq PDU: its header and 128 bytes of the header in error.
pub const TERM_MAX: usize = SHORT_SIZE + 128;
/// The PDU format version that TCP 1.0 defines.
pub const PFV: u16 = 0;

const DIGEST: u32 = crate::digest::SIZE as u32;

const _: () = assert!(CAPSULE_CMD_SIZE == COMMON_SIZE + crate::sqe::SIZE);
const _: () = assert!(SHORT_SIZE == COMMON_SIZE + crate::cqe::SIZE);

/// PDU types (TCP 1.0, section 3.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PduType {
    /// Initialize Connection Request, host to controller.
    IcReq = 0x00,
    /// Initialize Connection Response, controller to host.
    IcResp = 0x01,
    /// Terminate Connection Request, host to controller.
    H2cTermReq = 0x02,
    /// Terminate Connection Request, controller to host.
    C2hTermReq = 0x03,
    /// Command capsule, host to controller.
    CapsuleCmd = 0x04,
    /// Response capsule, controller to host.
    CapsuleResp = 0x05,
    /// Data, host to controller.
    H2cData = 0x06,
    /// Data, controller to host.
    C2hData = 0x07,
    /// Ready to transfer, controller to host.
    R2t = 0x09,
}

impl PduType {
    /// The type with this value; `None` if it is reserved.
    #[inline]
    pub const fn from_u8(value: u8) -> Option<Self> {
        Some(match value {
            0x00 => Self::IcReq,
            0x01 => Self::IcResp,
            0x02 => Self::H2cTermReq,
            0x03 => Self::C2hTermReq,
            0x04 => Self::CapsuleCmd,
            0x05 => Self::CapsuleResp,
            0x06 => Self::H2cData,
            0x07 => Self::C2hData,
            0x09 => Self::R2t,
            _ => return None,
        })
    }

    /// Whether hosts send this type to controllers.
    #[inline]
    pub const fn is_from_host(self) -> bool {
        matches!(self, Self::IcReq | Self::H2cTermReq | Self::CapsuleCmd | Self::H2cData)
    }

    /// Header length in bytes: the only valid HLEN.
    #[inline]
    pub const fn header_length(self) -> usize {
        match self {
            Self::IcReq | Self::IcResp => IC_SIZE,
            Self::CapsuleCmd => CAPSULE_CMD_SIZE,
            _ => SHORT_SIZE,
        }
    }

    // Digests are negotiated by ICReq and ICResp, and Terminate Connection Requests have none
    // (TCP 1.0, section 3.6.2).
    const fn has_digests(self) -> bool {
        !matches!(self, Self::IcReq | Self::IcResp | Self::H2cTermReq | Self::C2hTermReq)
    }

    const fn has_data(self) -> bool {
        matches!(self, Self::CapsuleCmd | Self::H2cData | Self::C2hData | Self::H2cTermReq | Self::C2hTermReq)
    }
}

bitflags::bitflags! {
    /// Flags of the common header; reserved bits are kept as received.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct PduFlags: u8 {
        /// HDGSTF: a header digest follows the header.
        const HEADER_DIGEST = 1 << 0;
        /// DDGSTF: a data digest follows the data.
        const DATA_DIGEST = 1 << 1;
        /// LAST_PDU: the last data of its transfer.
        const LAST = 1 << 2;
        /// SUCCESS: the command succeeded and no response capsule follows.
        const SUCCESS = 1 << 3;
    }
}

impl PduFlags {
    #[inline]
    const fn when(self, condition: bool) -> u8 {
        if condition { self.bits() } else { 0 }
    }
}

/// The negotiated PDU format for one direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Framing {
    /// Headers are followed by a digest.
    pub header_digest: bool,
    /// Data is followed by a digest.
    pub data_digest: bool,
    /// PDU Data Alignment in bytes: the data offset is a multiple of it; 4 to 128 in steps of 4. HPDA for
    /// PDUs from the controller, CPDA for PDUs from the host.
    pub data_alignment_bytes: u8,
}

impl Framing {
    /// No digests and no padding: the format of ICReq and ICResp.
    pub const PLAIN: Framing = Framing { header_digest: false, data_digest: false, data_alignment_bytes: 4 };

    /// The layout of a PDU with `data_length` bytes of data.
    ///
    /// # Panics
    /// If the PDU would exceed 4 GiB.
    #[inline]
    pub fn layout(&self, kind: PduType, data_length: u32) -> PduLayout {
        let header_length = kind.header_length() as u32;
        let header_digest = self.header_digest && kind.has_digests();
        let headers = header_length + if header_digest { DIGEST } else { 0 };
        if data_length == 0 {
            return PduLayout {
                header_length: header_length as u8,
                header_digest,
                data_offset: 0,
                data_length: 0,
                data_digest: false,
                length: headers,
            };
        }
        let data_digest = self.data_digest && kind.has_digests();
        let data_offset = if kind.has_digests() { self.align(headers) } else { headers };
        let trailer = if data_digest { DIGEST } else { 0 };
        let length = data_length.checked_add(data_offset + trailer).expect("a PDU is shorter than 4 GiB");
        // 76 bytes of headers rounded up to a multiple of at most 128 are at most 152: PDO fits.
        debug_assert!(data_offset <= 152, "data starts at byte {data_offset}");
        PduLayout {
            header_length: header_length as u8,
            header_digest,
            data_offset: data_offset as u8,
            data_length,
            data_digest,
            length,
        }
    }

    // Headers are whole dwords, and all known hosts request that alignment: avoids a division.
    #[inline]
    fn align(&self, offset: u32) -> u32 {
        if self.data_alignment_bytes <= 4 {
            offset
        } else {
            offset.next_multiple_of(self.data_alignment_bytes.into())
        }
    }

    #[inline]
    fn is_aligned(&self, offset: u8) -> bool {
        offset & 3 == 0
            && (self.data_alignment_bytes <= 4 || offset.is_multiple_of(self.data_alignment_bytes))
    }

    #[inline]
    fn write(&self, kind: PduType, extra: u8, data_length: u32, into: &mut [u8]) -> PduLayout {
        let layout = self.layout(kind, data_length);
        into[0] = kind as u8;
        into[1] = extra
            | PduFlags::HEADER_DIGEST.when(layout.header_digest)
            | PduFlags::DATA_DIGEST.when(layout.data_digest);
        into[2] = layout.header_length;
        into[3] = layout.data_offset;
        put32(into, 4, layout.length);
        layout
    }
}

/// Offsets and lengths of the parts of a PDU, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PduLayout {
    /// Header length in bytes without the digest (HLEN).
    pub header_length: u8,
    /// Whether a header digest follows the header.
    pub header_digest: bool,
    /// PDU Data Offset (PDO); 0 without data.
    pub data_offset: u8,
    /// Length of the data.
    pub data_length: u32,
    /// Whether a data digest follows the data.
    pub data_digest: bool,
    /// Length of the whole PDU in bytes (PLEN).
    pub length: u32,
}

impl PduLayout {
    /// Bytes before the data: header, header digest and padding. The whole PDU if it has no data.
    #[inline]
    pub const fn prefix_length(&self) -> usize {
        if self.data_length == 0 { self.length as usize } else { self.data_offset as usize }
    }
}

/// The first eight bytes of every PDU (TCP 1.0, section 3.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommonHeader {
    /// PDU type.
    pub kind: PduType,
    /// PDU-type specific flags (FLAGS).
    pub flags: PduFlags,
    /// Header length in bytes, without the digest (HLEN).
    pub hlen: u8,
    /// Data offset in bytes from the start of the PDU (PDO).
    pub pdo: u8,
    /// Length of the whole PDU in bytes (PLEN).
    pub plen: u32,
}

impl CommonHeader {
    /// Decodes a common header.
    ///
    /// # Errors
    /// A reserved type, or an HLEN that is wrong for the type; both terminate the connection.
    #[inline]
    pub fn decode(from: &[u8; COMMON_SIZE]) -> Result<CommonHeader, FatalError> {
        let Some(kind) = PduType::from_u8(from[0]) else {
            return Err(FatalError::field(0));
        };
        let header = CommonHeader {
            kind,
            flags: PduFlags::from_bits_retain(from[1]),
            hlen: from[2],
            pdo: from[3],
            plen: u32_at(from, 4),
        };
        if usize::from(header.hlen) != kind.header_length() {
            return Err(FatalError::field(2));
        }
        Ok(header)
    }

    /// Encodes a common header; the exact inverse of [`decode`](Self::decode).
    #[inline]
    pub fn encode(&self, into: &mut [u8; COMMON_SIZE]) {
        into[0] = self.kind as u8;
        into[1] = self.flags.bits();
        into[2] = self.hlen;
        into[3] = self.pdo;
        put32(into, 4, self.plen);
    }

    /// Validates flags, PDO and PLEN against the negotiated framing of the PDU's direction, and returns the
    /// layout.
    ///
    /// The receiver must limit `data_length` to its buffers itself.
    ///
    /// # Errors
    /// The fatal error to send in a Terminate Connection Request; its information is the offset of the
    /// invalid field.
    #[inline]
    pub fn layout(&self, framing: &Framing) -> Result<PduLayout, FatalError> {
        let digests = self.kind.has_digests();
        let header_digest = self.flags.contains(PduFlags::HEADER_DIGEST);
        let data_digest = self.flags.contains(PduFlags::DATA_DIGEST);
        if header_digest != (framing.header_digest && digests) {
            return Err(FatalError::field(1));
        }
        let headers = u32::from(self.hlen) + if header_digest { DIGEST } else { 0 };
        if self.plen <= headers || !self.kind.has_data() {
            // DDGSTF without data has no meaning and is ignored: hosts differ.
            if self.plen != headers || matches!(self.kind, PduType::H2cData | PduType::C2hData) {
                return Err(FatalError::field(4));
            }
            return Ok(PduLayout {
                header_length: self.hlen,
                header_digest,
                data_offset: 0,
                data_length: 0,
                data_digest: false,
                length: self.plen,
            });
        }
        if data_digest != (framing.data_digest && digests) {
            return Err(FatalError::field(1));
        }
        let data_offset = if digests { self.pdo } else { self.hlen };
        if u32::from(data_offset) < headers || digests && !framing.is_aligned(data_offset) {
            return Err(FatalError::field(3));
        }
        let around = u32::from(data_offset) + if data_digest { DIGEST } else { 0 };
        if self.plen <= around || !digests && self.plen as usize > TERM_MAX {
            return Err(FatalError::field(4));
        }
        Ok(PduLayout {
            header_length: self.hlen,
            header_digest,
            data_offset,
            data_length: self.plen - around,
            data_digest,
            length: self.plen,
        })
    }
}

/// Fatal Error Status: the reason for a connection termination (TCP 1.0, section 3.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum FatalStatus {
    /// A field of a PDU header is invalid; the information is its offset.
    InvalidHeaderField = 0x01,
    /// A PDU that is unexpected in the current state.
    SequenceError = 0x02,
    /// The header digest does not match; the information is the digest that was received.
    HeaderDigestError = 0x03,
    /// Data outside the range of its R2T.
    DataOutOfRange = 0x04,
    /// More data than allowed in one PDU (to a host), or more R2Ts than allowed (to a controller).
    LimitExceeded = 0x05,
    /// An unsupported parameter; the information is its offset.
    UnsupportedParameter = 0x06,
}

impl FatalStatus {
    /// The status with this value; `None` if it is reserved.
    pub const fn from_u16(value: u16) -> Option<Self> {
        Some(match value {
            1 => Self::InvalidHeaderField,
            2 => Self::SequenceError,
            3 => Self::HeaderDigestError,
            4 => Self::DataOutOfRange,
            5 => Self::LimitExceeded,
            6 => Self::UnsupportedParameter,
            _ => return None,
        })
    }
}

/// A fatal transport error: the content of a TermReq PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("fatal NVMe/TCP transport error: {status:?}, information {information:#x}")]
pub struct FatalError {
    /// Fatal Error Status (FES).
    pub status: FatalStatus,
    /// Fatal Error Information (FEI); its meaning depends on the status.
    pub information: u32,
}

impl FatalError {
    /// The header field that starts at byte `offset` of the PDU is invalid.
    #[inline]
    pub const fn field(offset: u32) -> FatalError {
        FatalError { status: FatalStatus::InvalidHeaderField, information: offset }
    }

    /// The parameter that starts at byte `offset` of the PDU is not supported.
    #[inline]
    pub const fn unsupported(offset: u32) -> FatalError {
        FatalError { status: FatalStatus::UnsupportedParameter, information: offset }
    }

    /// A status without information.
    #[inline]
    pub const fn from_status(status: FatalStatus) -> FatalError {
        FatalError { status, information: 0 }
    }
}
