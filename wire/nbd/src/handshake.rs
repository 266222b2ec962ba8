//! The beginning of a connection, and the reply that ends the handshake of `EXPORT_NAME`.

use bitflags::bitflags;

use crate::DecodeError;
use crate::bytes::{Fields, put};

/// `NBDMAGIC`.
const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, which also begins each option.
pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;

bitflags! {
    /// Handshake flags of the server.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct HandshakeFlags: u16 {
        /// Fixed newstyle: every option is answered.
        const FIXED_NEWSTYLE = 1 << 0;
        /// The zeroes after the reply to `EXPORT_NAME` may be left out.
        const NO_ZEROES = 1 << 1;
        const _ = !0;
    }
}

bitflags! {
    /// Flags of the client, sent first.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ClientFlags: u32 {
        /// The client speaks fixed newstyle.
        const FIXED_NEWSTYLE = 1 << 0;
        /// The client expects no zeroes after the reply to `EXPORT_NAME`.
        const NO_ZEROES = 1 << 1;
        const _ = !0;
    }
}

bitflags! {
    /// What an export offers in the transmission phase.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct TransmissionFlags: u16 {
        /// Always set.
        const HAS_FLAGS = 1 << 0;
        /// Writes are rejected.
        const READ_ONLY = 1 << 1;
        /// `FLUSH` is supported.
        const SEND_FLUSH = 1 << 2;
        /// [`CommandFlags::FUA`](crate::CommandFlags::FUA) is supported.
        const SEND_FUA = 1 << 3;
        /// The medium rotates.
        const ROTATIONAL = 1 << 4;
        /// `TRIM` is supported.
        const SEND_TRIM = 1 << 5;
        /// `WRITE_ZEROES` is supported.
        const SEND_WRITE_ZEROES = 1 << 6;
        /// [`CommandFlags::DF`](crate::CommandFlags::DF) is supported.
        const SEND_DF = 1 << 7;
        /// A flush on one connection covers the writes of all.
        const CAN_MULTI_CONN = 1 << 8;
        /// `RESIZE`, an extension.
        const SEND_RESIZE = 1 << 9;
        /// `CACHE` is supported.
        const SEND_CACHE = 1 << 10;
        /// [`CommandFlags::FAST_ZERO`](crate::CommandFlags::FAST_ZERO) is supported.
        const SEND_FAST_ZERO = 1 << 11;
        /// `BLOCK_STATUS` takes a payload that selects contexts.
        const BLOCK_STATUS_PAYLOAD = 1 << 12;
        const _ = !0;
    }
}

/// The first bytes of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdGreeting {
    /// What the server offers.
    pub flags: HandshakeFlags,
}

impl NbdGreeting {
    /// Encoded size.
    pub const SIZE: usize = 18;

    /// Decodes it.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<NbdGreeting, DecodeError> {
        let mut fields = Fields::new("greeting", bytes);
        let (magic, option_magic) = (fields.u64()?, fields.u64()?);
        fields.magic(magic, MAGIC)?;
        fields.magic(option_magic, OPTION_MAGIC)?;
        Ok(NbdGreeting { flags: HandshakeFlags::from_bits_retain(fields.u16()?) })
    }

    /// Encodes it.
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        put(&mut bytes, 0, MAGIC.to_be_bytes());
        put(&mut bytes, 8, OPTION_MAGIC.to_be_bytes());
        put(&mut bytes, 16, self.flags.bits().to_be_bytes());
        bytes
    }
}

impl ClientFlags {
    /// Encoded size.
    pub const SIZE: usize = 4;

    /// Decodes them.
    ///
    /// # Errors
    /// A flag is unknown: the server must close the connection ("Client flags").
    pub fn decode(bytes: [u8; Self::SIZE]) -> Result<ClientFlags, DecodeError> {
        let bits = u32::from_be_bytes(bytes);
        let known = ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES;
        match bits & !known.bits() {
            0 => Ok(ClientFlags::from_bits_retain(bits)),
            _ => Err(DecodeError::value("client flags", 0, u64::from(bits))),
        }
    }

    /// Encodes them.
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        self.bits().to_be_bytes()
    }
}

/// Zeroes that follow an [`ExportReply`] unless the client declined them.
pub const EXPORT_ZEROES: usize = 124;

/// The reply to `EXPORT_NAME`, which begins the transmission phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportReply {
    /// Size in bytes.
    pub size: u64,
    /// What the export offers.
    pub flags: TransmissionFlags,
}

impl ExportReply {
    /// Encoded size, without the zeroes.
    pub const SIZE: usize = 10;

    /// Decodes it.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<ExportReply, DecodeError> {
        let mut fields = Fields::new("export", bytes);
        let (size, flags) = (fields.u64()?, fields.u16()?);
        Ok(ExportReply { size, flags: TransmissionFlags::from_bits_retain(flags) })
    }

    /// Encodes it.
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        put(&mut bytes, 0, self.size.to_be_bytes());
        put(&mut bytes, 8, self.flags.bits().to_be_bytes());
        bytes
    }
}
