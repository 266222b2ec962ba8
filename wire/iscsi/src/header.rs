//! What all PDUs have: the basic header's common fields, padding and digests.

use codec::{Crc32c, DecodeError};

/// Bytes of the basic header segment.
pub const HEADER_BYTES: usize = 48;
/// Bytes of a header digest or data digest.
pub const DIGEST_BYTES: usize = codec::CRC32C_SIZE;
/// A task tag or transfer tag that names nothing.
pub const RESERVED_TAG: u32 = u32::MAX;

macro_rules! opcodes {
    ($($(#[$meta:meta])* $name:ident = $value:literal,)*) => {
        /// The operation of a PDU (RFC 7143, section 11.2.1.2).
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Opcode { $($(#[$meta])* $name = $value,)* }

        impl Opcode {
            /// Every opcode.
            pub const ALL: &'static [Opcode] = &[$(Opcode::$name,)*];

            const fn decode(value: u8) -> Option<Opcode> {
                match value { $($value => Some(Opcode::$name),)* _ => None }
            }
        }
    };
}

opcodes! {
    /// NOP-Out.
    NopOut = 0x00,
    /// SCSI Command.
    ScsiCommand = 0x01,
    /// SCSI Task Management Function Request.
    TaskManagementRequest = 0x02,
    /// Login Request.
    LoginRequest = 0x03,
    /// Text Request.
    TextRequest = 0x04,
    /// SCSI Data-Out.
    DataOut = 0x05,
    /// Logout Request.
    LogoutRequest = 0x06,
    /// SNACK Request.
    SnackRequest = 0x10,
    /// NOP-In.
    NopIn = 0x20,
    /// SCSI Response.
    ScsiResponse = 0x21,
    /// SCSI Task Management Function Response.
    TaskManagementResponse = 0x22,
    /// Login Response.
    LoginResponse = 0x23,
    /// Text Response.
    TextResponse = 0x24,
    /// SCSI Data-In.
    DataIn = 0x25,
    /// Logout Response.
    LogoutResponse = 0x26,
    /// Ready To Transfer.
    R2t = 0x31,
    /// Asynchronous Message.
    AsyncMessage = 0x32,
    /// Reject.
    Reject = 0x3f,
}

/// The fields that all headers have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BasicHeader {
    /// What the PDU is.
    pub opcode: Opcode,
    /// A request for immediate delivery, outside the order of command numbers.
    pub immediate: bool,
    /// The last or only PDU of a sequence.
    pub is_final: bool,
    /// Bytes of additional header segments, a multiple of four.
    pub ahs_length: u32,
    /// Bytes of data, without padding.
    pub data_length: u32,
    /// The initiator's name of the task.
    pub initiator_task_tag: u32,
}

impl BasicHeader {
    /// Decodes the common fields.
    ///
    /// # Errors
    /// `from` is shorter than [`HEADER_BYTES`], or the opcode is unknown.
    #[inline]
    pub fn decode(from: &[u8]) -> Result<BasicHeader, DecodeError> {
        let Some(from) = from.first_chunk::<HEADER_BYTES>() else {
            return Err(DecodeError::Length { what: "iSCSI header", got: from.len(), need: HEADER_BYTES });
        };
        let opcode = from[0] & 0x3f;
        let (ahs_length, data_length) = BasicHeader::lengths(from);
        Ok(BasicHeader {
            opcode: Opcode::decode(opcode).ok_or(DecodeError::value("opcode", 0, opcode.into()))?,
            immediate: from[0] & 0x40 != 0,
            is_final: from[1] & 0x80 != 0,
            ahs_length,
            data_length,
            initiator_task_tag: u32::from_be_bytes([from[16], from[17], from[18], from[19]]),
        })
    }

    /// Bytes of additional header segments and of data, which a header has whatever its opcode is.
    #[inline]
    pub const fn lengths(from: &[u8; HEADER_BYTES]) -> (u32, u32) {
        (from[4] as u32 * 4, u32::from_be_bytes([0, from[5], from[6], from[7]]))
    }
}

/// `length` with padding to a multiple of four.
#[inline]
pub const fn padded(length: usize) -> usize {
    length.next_multiple_of(4)
}

/// The digest over `pieces`, padding included, in the order of transmission (RFC 7143, section 13.1).
#[inline]
pub fn digest(pieces: &[&[u8]]) -> [u8; DIGEST_BYTES] {
    let mut checksum = Crc32c::new();
    pieces.iter().for_each(|piece| checksum.update(piece));
    checksum.to_bytes()
}
