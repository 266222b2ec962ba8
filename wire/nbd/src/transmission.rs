//! Requests and replies of the transmission phase.

use bitflags::bitflags;

use crate::DecodeError;
use crate::bytes::{Fields, put};

const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Which headers requests and chunks have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderForm {
    /// Lengths of 32 bits.
    Compact,
    /// Lengths of 64 bits, and chunks that repeat the offset of the request: `EXTENDED_HEADERS` was
    /// negotiated.
    Extended,
}

impl HeaderForm {
    /// Size of the longest request header.
    pub const REQUEST_SIZE_MAX: usize = 32;
    /// Size of the longest chunk header.
    pub const CHUNK_SIZE_MAX: usize = 32;

    /// Size of a request header.
    pub const fn request_size(self) -> usize {
        match self {
            HeaderForm::Compact => 28,
            HeaderForm::Extended => 32,
        }
    }

    /// Size of a chunk header.
    pub const fn chunk_size(self) -> usize {
        match self {
            HeaderForm::Compact => 20,
            HeaderForm::Extended => 32,
        }
    }
}

bitflags! {
    /// Flags of a request.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct CommandFlags: u16 {
        /// The data is on the medium when the reply is sent.
        const FUA = 1 << 0;
        /// Of `WRITE_ZEROES`: do not deallocate.
        const NO_HOLE = 1 << 1;
        /// Of `READ`: reply with one chunk of data.
        const DF = 1 << 2;
        /// Of `BLOCK_STATUS`: reply with one extent.
        const REQ_ONE = 1 << 3;
        /// Of `WRITE_ZEROES`: fail if it is not faster than a write.
        const FAST_ZERO = 1 << 4;
        /// With extended headers: `length` bytes of payload follow.
        const PAYLOAD_LEN = 1 << 5;
        const _ = !0;
    }
}

/// The number of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum NbdCommand {
    /// Read data.
    Read = 0,
    /// Write data, which follows the request.
    Write = 1,
    /// Close the connection; it has no reply.
    Disc = 2,
    /// Make completed writes durable.
    Flush = 3,
    /// Deallocate a range.
    Trim = 4,
    /// Read a range into a cache.
    Cache = 5,
    /// Write zeroes to a range.
    WriteZeroes = 6,
    /// Report what of a range is allocated.
    BlockStatus = 7,
}

impl NbdCommand {
    /// All commands.
    pub const ALL: [NbdCommand; 8] = [
        NbdCommand::Read,
        NbdCommand::Write,
        NbdCommand::Disc,
        NbdCommand::Flush,
        NbdCommand::Trim,
        NbdCommand::Cache,
        NbdCommand::WriteZeroes,
        NbdCommand::BlockStatus,
    ];

    /// The command with this number.
    pub const fn from_number(number: u16) -> Option<NbdCommand> {
        if (number as usize) < NbdCommand::ALL.len() { Some(NbdCommand::ALL[number as usize]) } else { None }
    }
}

impl From<NbdCommand> for u16 {
    fn from(command: NbdCommand) -> u16 {
        command as u16
    }
}

/// The head of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Flags, unknown ones included.
    pub flags: CommandFlags,
    /// The command's number; see [`NbdCommand::from_number`].
    pub command: u16,
    /// Chosen by the client and repeated by the replies.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Number of bytes; below 2^32 without extended headers.
    pub length: u64,
}

impl RequestHeader {
    /// Decodes it; `bytes` has [`HeaderForm::request_size`] bytes or more.
    ///
    /// # Errors
    /// There are too few bytes, or they do not begin with the magic number.
    #[inline]
    pub fn decode(form: HeaderForm, bytes: &[u8]) -> Result<RequestHeader, DecodeError> {
        let mut fields = Fields::new("request", bytes);
        let magic = fields.u32()?;
        let expected = if form == HeaderForm::Compact { REQUEST_MAGIC } else { EXTENDED_REQUEST_MAGIC };
        fields.magic(u64::from(magic), u64::from(expected))?;
        Ok(RequestHeader {
            flags: CommandFlags::from_bits_retain(fields.u16()?),
            command: fields.u16()?,
            cookie: fields.u64()?,
            offset: fields.u64()?,
            length: match form {
                HeaderForm::Compact => u64::from(fields.u32()?),
                HeaderForm::Extended => fields.u64()?,
            },
        })
    }

    /// Encodes it at the beginning of `out` and returns its size. Without extended headers, the length is cut
    /// to 32 bits.
    pub fn encode(&self, form: HeaderForm, out: &mut [u8]) -> usize {
        let magic = if form == HeaderForm::Compact { REQUEST_MAGIC } else { EXTENDED_REQUEST_MAGIC };
        put(out, 0, magic.to_be_bytes());
        put(out, 4, self.flags.bits().to_be_bytes());
        put(out, 6, self.command.to_be_bytes());
        put(out, 8, self.cookie.to_be_bytes());
        put(out, 16, self.offset.to_be_bytes());
        match form {
            HeaderForm::Compact => put(out, 24, (self.length as u32).to_be_bytes()),
            HeaderForm::Extended => put(out, 24, self.length.to_be_bytes()),
        }
        form.request_size()
    }
}

/// A reply without structure. The data of a read that succeeded follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimpleReply {
    /// The error's value; 0 is success.
    pub error: u32,
    /// Of the request.
    pub cookie: u64,
}

impl SimpleReply {
    /// Encoded size.
    pub const SIZE: usize = 16;

    /// Decodes it.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<SimpleReply, DecodeError> {
        let mut fields = Fields::new("simple reply", bytes);
        let magic = fields.u32()?;
        fields.magic(u64::from(magic), u64::from(SIMPLE_REPLY_MAGIC))?;
        Ok(SimpleReply { error: fields.u32()?, cookie: fields.u64()? })
    }

    /// Encodes it at the beginning of `out` and returns its size.
    #[inline]
    pub fn encode(&self, out: &mut [u8]) -> usize {
        put(out, 0, SIMPLE_REPLY_MAGIC.to_be_bytes());
        put(out, 4, self.error.to_be_bytes());
        put(out, 8, self.cookie.to_be_bytes());
        Self::SIZE
    }
}

bitflags! {
    /// Flags of a chunk.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ChunkFlags: u16 {
        /// It is the last chunk of its reply.
        const DONE = 1 << 0;
        const _ = !0;
    }
}

/// The type of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum ChunkKind {
    /// No data; success unless an error came before.
    None = 0,
    /// An offset and data.
    OffsetData = 1,
    /// An offset and the 32-bit size of a range of zeroes.
    OffsetHole = 2,
    /// A context's identifier and [`Extent`]s of 32 bits.
    BlockStatus = 5,
    /// A context's identifier, the number of extents, and [`Extent`]s of 64 bits.
    BlockStatusExt = 6,
    /// An [`ErrorChunk`].
    Error = 1 << 15 | 1,
    /// An [`ErrorChunk`] and an offset.
    ErrorOffset = 1 << 15 | 2,
}

impl ChunkKind {
    /// All kinds.
    pub const ALL: [ChunkKind; 7] = [
        ChunkKind::None,
        ChunkKind::OffsetData,
        ChunkKind::OffsetHole,
        ChunkKind::BlockStatus,
        ChunkKind::BlockStatusExt,
        ChunkKind::Error,
        ChunkKind::ErrorOffset,
    ];
}

/// The head of a chunk of a structured reply; `length` bytes follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// Flags.
    pub flags: ChunkFlags,
    /// What follows.
    pub kind: ChunkKind,
    /// Of the request.
    pub cookie: u64,
    /// Offset of the request; 0 without extended headers.
    pub offset: u64,
    /// Bytes that follow; below 2^32 without extended headers.
    pub length: u64,
}

impl ChunkHeader {
    /// Decodes it; `bytes` has [`HeaderForm::chunk_size`] bytes or more.
    pub fn decode(form: HeaderForm, bytes: &[u8]) -> Result<ChunkHeader, DecodeError> {
        let mut fields = Fields::new("chunk", bytes);
        let magic = fields.u32()?;
        let expected =
            if form == HeaderForm::Compact { STRUCTURED_REPLY_MAGIC } else { EXTENDED_REPLY_MAGIC };
        fields.magic(u64::from(magic), u64::from(expected))?;
        let (flags, number, cookie) = (fields.u16()?, fields.u16()?, fields.u64()?);
        let kind = ChunkKind::ALL.into_iter().find(|kind| *kind as u16 == number);
        let kind = kind.ok_or(DecodeError::value("chunk", 6, u64::from(number)))?;
        let (offset, length) = match form {
            HeaderForm::Compact => (0, u64::from(fields.u32()?)),
            HeaderForm::Extended => (fields.u64()?, fields.u64()?),
        };
        Ok(ChunkHeader { flags: ChunkFlags::from_bits_retain(flags), kind, cookie, offset, length })
    }

    /// Encodes it at the beginning of `out` and returns its size. Without extended headers, the offset is
    /// left out and the length cut to 32 bits.
    #[inline]
    pub fn encode(&self, form: HeaderForm, out: &mut [u8]) -> usize {
        let magic = if form == HeaderForm::Compact { STRUCTURED_REPLY_MAGIC } else { EXTENDED_REPLY_MAGIC };
        put(out, 0, magic.to_be_bytes());
        put(out, 4, self.flags.bits().to_be_bytes());
        put(out, 6, (self.kind as u16).to_be_bytes());
        put(out, 8, self.cookie.to_be_bytes());
        match form {
            HeaderForm::Compact => put(out, 16, (self.length as u32).to_be_bytes()),
            HeaderForm::Extended => {
                put(out, 16, self.offset.to_be_bytes());
                put(out, 24, self.length.to_be_bytes());
            }
        }
        form.chunk_size()
    }
}

/// The payload of an error chunk, without a message for humans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorChunk {
    /// The error's value, not 0.
    pub error: u32,
}

impl ErrorChunk {
    /// Encoded size.
    pub const SIZE: usize = 6;

    /// Decodes it. A message that follows is left to the caller.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<ErrorChunk, DecodeError> {
        let error = Fields::new("error chunk", bytes).u32()?;
        if error == 0 { Err(DecodeError::value("error chunk", 0, 0)) } else { Ok(ErrorChunk { error }) }
    }

    /// Encodes it at the beginning of `out` and returns its size.
    pub fn encode(&self, out: &mut [u8]) -> usize {
        put(out, 0, self.error.to_be_bytes());
        put(out, 4, 0u16.to_be_bytes());
        Self::SIZE
    }
}

/// Flags of an [`Extent`] in the context `base:allocation`.
pub mod state {
    /// Not allocated.
    pub const HOLE: u64 = 1 << 0;
    /// Reads return zeroes.
    pub const ZERO: u64 = 1 << 1;
}

/// A descriptor of `BLOCK_STATUS`: a range that follows the previous one, and its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes, not 0.
    pub length: u64,
    /// Flags of the context, such as [`state::HOLE`].
    pub flags: u64,
}

impl Extent {
    /// Encoded size.
    pub const fn size(form: HeaderForm) -> usize {
        match form {
            HeaderForm::Compact => 8,
            HeaderForm::Extended => 16,
        }
    }

    /// Decodes it; `bytes` has [`Extent::size`] bytes or more.
    pub fn decode(form: HeaderForm, bytes: &[u8]) -> Result<Extent, DecodeError> {
        let mut fields = Fields::new("extent", bytes);
        match form {
            HeaderForm::Compact => {
                Ok(Extent { length: u64::from(fields.u32()?), flags: u64::from(fields.u32()?) })
            }
            HeaderForm::Extended => Ok(Extent { length: fields.u64()?, flags: fields.u64()? }),
        }
    }

    /// Encodes it at the beginning of `out` and returns its size. Without extended headers, both are cut to
    /// 32 bits.
    pub fn encode(&self, form: HeaderForm, out: &mut [u8]) -> usize {
        match form {
            HeaderForm::Compact => {
                put(out, 0, (self.length as u32).to_be_bytes());
                put(out, 4, (self.flags as u32).to_be_bytes());
            }
            HeaderForm::Extended => {
                put(out, 0, self.length.to_be_bytes());
                put(out, 8, self.flags.to_be_bytes());
            }
        }
        Extent::size(form)
    }
}
