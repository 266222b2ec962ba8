//! NVMe/TCP protocol data units.
//!
//! A PDU is a header, an optional header digest, padding up to the agreed alignment, data and an
//! optional data digest (TCP 1.0, section 3.1). [`CommonHeader::decode`] and [`CommonHeader::layout`]
//! tell a receiver all that it needs to cut a byte stream into PDUs; the `encode` of each PDU fills in
//! the common header for the [`Framing`] that the connection agreed on.
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

/// Bytes of the common header that every PDU starts with.
pub const COMMON_SIZE: usize = 8;
/// Bytes of an ICReq or ICResp PDU.
pub const IC_SIZE: usize = 128;
/// Bytes of the header of a CapsuleCmd PDU.
pub const CAPSULE_CMD_SIZE: usize = 72;
/// Bytes of the header of CapsuleResp, H2CData, C2HData, R2T and TermReq PDUs.
pub const SHORT_SIZE: usize = 24;
/// Bytes of the longest header.
pub const HEADER_MAX: usize = IC_SIZE;
/// Bytes of the longest TermReq PDU: its header and 128 bytes of the header in error.
pub const TERM_MAX: usize = SHORT_SIZE + 128;
/// The PDU format version that TCP 1.0 defines.
pub const PFV: u16 = 0;

const DIGEST: u32 = crate::digest::SIZE as u32;

const _: () = assert!(CAPSULE_CMD_SIZE == COMMON_SIZE + crate::sqe::SIZE);
const _: () = assert!(SHORT_SIZE == COMMON_SIZE + crate::cqe::SIZE);

/// Kinds of PDU (TCP 1.0, section 3.6).
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
    /// The kind with this number.
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

    /// Whether hosts send it, and controllers therefore accept it.
    #[inline]
    pub const fn is_from_host(self) -> bool {
        matches!(self, Self::IcReq | Self::H2cTermReq | Self::CapsuleCmd | Self::H2cData)
    }

    /// Bytes of its header: the only HLEN that is valid.
    #[inline]
    pub const fn header_length(self) -> usize {
        match self {
            Self::IcReq | Self::IcResp => IC_SIZE,
            Self::CapsuleCmd => CAPSULE_CMD_SIZE,
            _ => SHORT_SIZE,
        }
    }

    // Digests are agreed on by ICReq and ICResp, and a connection that is being terminated has none
    // (TCP 1.0, section 3.6.2).
    const fn has_digests(self) -> bool {
        !matches!(self, Self::IcReq | Self::IcResp | Self::H2cTermReq | Self::C2hTermReq)
    }

    const fn has_data(self) -> bool {
        matches!(self, Self::CapsuleCmd | Self::H2cData | Self::C2hData | Self::H2cTermReq | Self::C2hTermReq)
    }
}

/// Flags of the common header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u8);

impl Flags {
    /// HDGSTF: a header digest follows the header.
    pub const HEADER_DIGEST: Flags = Flags(1 << 0);
    /// DDGSTF: a data digest follows the data.
    pub const DATA_DIGEST: Flags = Flags(1 << 1);
    /// LAST_PDU: the last data of its transfer.
    pub const LAST: Flags = Flags(1 << 2);
    /// SUCCESS: the command succeeded and no response capsule follows.
    pub const SUCCESS: Flags = Flags(1 << 3);

    /// Whether every flag of `other` is set.
    #[inline]
    pub const fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    #[inline]
    const fn when(self, condition: bool) -> u8 {
        if condition { self.0 } else { 0 }
    }
}

/// What the two sides agreed on for one direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Framing {
    /// Headers are followed by a digest.
    pub header_digest: bool,
    /// Data is followed by a digest.
    pub data_digest: bool,
    /// Data starts at a multiple of so many bytes from the start of its PDU: 4 to 128 in steps of 4.
    /// HPDA for what the controller sends, CPDA for what the host sends.
    pub data_alignment_bytes: u8,
}

impl Framing {
    /// No digests and no padding: what holds before ICReq and ICResp are exchanged.
    pub const PLAIN: Framing = Framing { header_digest: false, data_digest: false, data_alignment_bytes: 4 };

    /// The layout of a PDU that is about to be sent with `data_length` bytes of data.
    ///
    /// # Panics
    /// When the PDU would be longer than 4 GiB.
    #[inline]
    pub fn layout(&self, kind: PduType, data_length: u32) -> Layout {
        let header_length = kind.header_length() as u32;
        let header_digest = self.header_digest && kind.has_digests();
        let headers = header_length + if header_digest { DIGEST } else { 0 };
        if data_length == 0 {
            return Layout {
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
        Layout {
            header_length: header_length as u8,
            header_digest,
            data_offset: data_offset as u8,
            data_length,
            data_digest,
            length,
        }
    }

    // Headers are whole dwords, and every host seen so far asks for no more: no division for those.
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
    fn write(&self, kind: PduType, extra: u8, data_length: u32, into: &mut [u8]) -> Layout {
        let layout = self.layout(kind, data_length);
        into[0] = kind as u8;
        into[1] = extra
            | Flags::HEADER_DIGEST.when(layout.header_digest)
            | Flags::DATA_DIGEST.when(layout.data_digest);
        into[2] = layout.header_length;
        into[3] = layout.data_offset;
        put32(into, 4, layout.length);
        layout
    }
}

/// Where the parts of one PDU lie, counted in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of the header without its digest (HLEN).
    pub header_length: u8,
    /// Whether a header digest follows the header.
    pub header_digest: bool,
    /// Where the data starts (PDO); 0 when there is none.
    pub data_offset: u8,
    /// Bytes of data.
    pub data_length: u32,
    /// Whether a data digest follows the data.
    pub data_digest: bool,
    /// Bytes of the whole PDU (PLEN).
    pub length: u32,
}

impl Layout {
    /// Bytes before the data: header, header digest and padding. The whole PDU when it has no data.
    #[inline]
    pub const fn prefix_length(&self) -> usize {
        if self.data_length == 0 { self.length as usize } else { self.data_offset as usize }
    }
}

/// The first eight bytes of every PDU (TCP 1.0, section 3.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommonHeader {
    /// What the PDU is.
    pub kind: PduType,
    /// Flags.
    pub flags: Flags,
    /// Header length in bytes, without the digest (HLEN).
    pub hlen: u8,
    /// Data offset in bytes from the start of the PDU (PDO).
    pub pdo: u8,
    /// Length of the whole PDU in bytes (PLEN).
    pub plen: u32,
}

impl CommonHeader {
    /// Reads a common header.
    ///
    /// # Errors
    /// A reserved type and an HLEN that the type does not have; both end the connection.
    #[inline]
    pub fn decode(from: &[u8; COMMON_SIZE]) -> Result<CommonHeader, Fatal> {
        let Some(kind) = PduType::from_u8(from[0]) else {
            return Err(Fatal::field(0));
        };
        let header =
            CommonHeader { kind, flags: Flags(from[1]), hlen: from[2], pdo: from[3], plen: u32_at(from, 4) };
        if usize::from(header.hlen) != kind.header_length() {
            return Err(Fatal::field(2));
        }
        Ok(header)
    }

    /// Writes a common header; the exact inverse of [`decode`](Self::decode).
    #[inline]
    pub fn encode(&self, into: &mut [u8; COMMON_SIZE]) {
        into[0] = self.kind as u8;
        into[1] = self.flags.0;
        into[2] = self.hlen;
        into[3] = self.pdo;
        put32(into, 4, self.plen);
    }

    /// Checks flags, PDO and PLEN against each other and against what was agreed on for the direction
    /// that the PDU came from, and says where its parts lie.
    ///
    /// What remains for the receiver is to bound `data_length`: nothing here knows its buffers.
    ///
    /// # Errors
    /// The fatal error to terminate the connection with; its information is the offset of the field.
    #[inline]
    pub fn layout(&self, framing: &Framing) -> Result<Layout, Fatal> {
        let digests = self.kind.has_digests();
        let header_digest = self.flags.contains(Flags::HEADER_DIGEST);
        let data_digest = self.flags.contains(Flags::DATA_DIGEST);
        if header_digest != (framing.header_digest && digests) {
            return Err(Fatal::field(1));
        }
        let headers = u32::from(self.hlen) + if header_digest { DIGEST } else { 0 };
        if self.plen <= headers || !self.kind.has_data() {
            // DDGSTF without data says nothing and is let pass: hosts differ.
            if self.plen != headers || matches!(self.kind, PduType::H2cData | PduType::C2hData) {
                return Err(Fatal::field(4));
            }
            return Ok(Layout {
                header_length: self.hlen,
                header_digest,
                data_offset: 0,
                data_length: 0,
                data_digest: false,
                length: self.plen,
            });
        }
        if data_digest != (framing.data_digest && digests) {
            return Err(Fatal::field(1));
        }
        let data_offset = if digests { self.pdo } else { self.hlen };
        if u32::from(data_offset) < headers || digests && !framing.is_aligned(data_offset) {
            return Err(Fatal::field(3));
        }
        let around = u32::from(data_offset) + if data_digest { DIGEST } else { 0 };
        if self.plen <= around || !digests && self.plen as usize > TERM_MAX {
            return Err(Fatal::field(4));
        }
        Ok(Layout {
            header_length: self.hlen,
            header_digest,
            data_offset,
            data_length: self.plen - around,
            data_digest,
            length: self.plen,
        })
    }
}

/// Fatal Error Status: why a connection is terminated (TCP 1.0, section 3.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum FatalStatus {
    /// A field of a PDU header is invalid; the information is its offset.
    InvalidHeaderField = 0x01,
    /// A PDU that is not expected in this state.
    SequenceError = 0x02,
    /// The header digest does not match; the information is the digest that was received.
    HeaderDigestError = 0x03,
    /// Data outside the range that was asked for.
    DataOutOfRange = 0x04,
    /// More data than allowed in one PDU (to a host), or more R2Ts than allowed (to a controller).
    LimitExceeded = 0x05,
    /// An unsupported parameter; the information is its offset.
    UnsupportedParameter = 0x06,
}

impl FatalStatus {
    /// The status with this number.
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

/// A transport error that ends the connection: what the TermReq PDU about it carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("NVMe/TCP connection is to be terminated: {status:?}, information {information:#x}")]
pub struct Fatal {
    /// Fatal Error Status (FES).
    pub status: FatalStatus,
    /// Fatal Error Information (FEI); what it means depends on the status.
    pub information: u32,
}

impl Fatal {
    /// The header field that starts at byte `offset` of the PDU is invalid.
    #[inline]
    pub const fn field(offset: u32) -> Fatal {
        Fatal { status: FatalStatus::InvalidHeaderField, information: offset }
    }

    /// The parameter that starts at byte `offset` of the PDU is not supported.
    #[inline]
    pub const fn unsupported(offset: u32) -> Fatal {
        Fatal { status: FatalStatus::UnsupportedParameter, information: offset }
    }

    /// A status without information.
    #[inline]
    pub const fn of(status: FatalStatus) -> Fatal {
        Fatal { status, information: 0 }
    }
}
