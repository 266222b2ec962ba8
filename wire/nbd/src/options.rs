//! Options of a client, and the replies to them.

use crate::bytes::{Fields, put, text};
use crate::handshake::{OPTION_MAGIC, TransmissionFlags};
use crate::{DecodeError, ExportReply};

/// Longest string of the protocol, names of exports included.
pub const STRING_BYTES_MAX: u32 = 4096;
/// Begins each reply to an option.
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Set in the kind of each reply that is an error.
pub const OPTION_REPLY_ERROR: u32 = 1 << 31;

/// The number of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum OptionCode {
    /// Select an export and begin the transmission phase, without a reply on failure.
    ExportName = 1,
    /// End the session.
    Abort = 2,
    /// List exports.
    List = 3,
    /// Begin TLS.
    StartTls = 5,
    /// Describe an export.
    Info = 6,
    /// Select an export and begin the transmission phase.
    Go = 7,
    /// Use structured replies.
    StructuredReply = 8,
    /// List metadata contexts.
    ListMetaContext = 9,
    /// Select metadata contexts.
    SetMetaContext = 10,
    /// Use extended headers.
    ExtendedHeaders = 11,
}

impl OptionCode {
    /// All options.
    pub const ALL: [OptionCode; 10] = [
        OptionCode::ExportName,
        OptionCode::Abort,
        OptionCode::List,
        OptionCode::StartTls,
        OptionCode::Info,
        OptionCode::Go,
        OptionCode::StructuredReply,
        OptionCode::ListMetaContext,
        OptionCode::SetMetaContext,
        OptionCode::ExtendedHeaders,
    ];

    /// The option with this number.
    pub fn from_number(number: u32) -> Option<OptionCode> {
        OptionCode::ALL.into_iter().find(|code| *code as u32 == number)
    }
}

/// The head of an option; `length` bytes of data follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// The option's number; see [`OptionCode::from_number`].
    pub option: u32,
    /// Bytes of data.
    pub length: u32,
}

impl OptionHeader {
    /// Encoded size.
    pub const SIZE: usize = 16;

    /// Decodes it.
    ///
    /// # Errors
    /// It does not begin with the magic number.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<OptionHeader, DecodeError> {
        let mut fields = Fields::new("option", bytes);
        let magic = fields.u64()?;
        fields.magic(magic, OPTION_MAGIC)?;
        Ok(OptionHeader { option: fields.u32()?, length: fields.u32()? })
    }

    /// Encodes it.
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        put(&mut bytes, 0, OPTION_MAGIC.to_be_bytes());
        put(&mut bytes, 8, self.option.to_be_bytes());
        put(&mut bytes, 12, self.length.to_be_bytes());
        bytes
    }
}

/// The kind of a reply to an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum OptionReplyKind {
    /// The last reply of an option that succeeds.
    Ack = 1,
    /// An export: the length of its name, its name, and a description.
    Server = 2,
    /// An [`Info`].
    Info = 3,
    /// A metadata context: its identifier and name.
    MetaContext = 4,
    /// The option is unknown.
    ErrUnsup = OPTION_REPLY_ERROR | 1,
    /// The server's policy forbids the option.
    ErrPolicy = OPTION_REPLY_ERROR | 2,
    /// The option's data is invalid.
    ErrInvalid = OPTION_REPLY_ERROR | 3,
    /// Not supported on the server's platform.
    ErrPlatform = OPTION_REPLY_ERROR | 4,
    /// TLS is required first.
    ErrTlsReqd = OPTION_REPLY_ERROR | 5,
    /// There is no such export.
    ErrUnknown = OPTION_REPLY_ERROR | 6,
    /// The server is shutting down.
    ErrShutdown = OPTION_REPLY_ERROR | 7,
    /// The client must obey the block sizes.
    ErrBlockSizeReqd = OPTION_REPLY_ERROR | 8,
    /// The option's data is too long.
    ErrTooBig = OPTION_REPLY_ERROR | 9,
    /// Extended headers are required first.
    ErrExtHeaderReqd = OPTION_REPLY_ERROR | 10,
}

impl OptionReplyKind {
    /// All kinds.
    pub const ALL: [OptionReplyKind; 14] = [
        OptionReplyKind::Ack,
        OptionReplyKind::Server,
        OptionReplyKind::Info,
        OptionReplyKind::MetaContext,
        OptionReplyKind::ErrUnsup,
        OptionReplyKind::ErrPolicy,
        OptionReplyKind::ErrInvalid,
        OptionReplyKind::ErrPlatform,
        OptionReplyKind::ErrTlsReqd,
        OptionReplyKind::ErrUnknown,
        OptionReplyKind::ErrShutdown,
        OptionReplyKind::ErrBlockSizeReqd,
        OptionReplyKind::ErrTooBig,
        OptionReplyKind::ErrExtHeaderReqd,
    ];
}

/// The head of a reply to an option; `length` bytes of data follow, which are a message for humans if it is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The number of the option.
    pub option: u32,
    /// The kind of the reply.
    pub kind: OptionReplyKind,
    /// Bytes of data.
    pub length: u32,
}

impl OptionReplyHeader {
    /// Encoded size.
    pub const SIZE: usize = 20;

    /// Decodes it.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<OptionReplyHeader, DecodeError> {
        let mut fields = Fields::new("option reply", bytes);
        let magic = fields.u64()?;
        fields.magic(magic, REPLY_MAGIC)?;
        let (option, number, length) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let kind = OptionReplyKind::ALL.into_iter().find(|kind| *kind as u32 == number);
        let kind = kind.ok_or(DecodeError::value("option reply", 12, u64::from(number)))?;
        Ok(OptionReplyHeader { option, kind, length })
    }

    /// Encodes it.
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        put(&mut bytes, 0, REPLY_MAGIC.to_be_bytes());
        put(&mut bytes, 8, self.option.to_be_bytes());
        put(&mut bytes, 12, (self.kind as u32).to_be_bytes());
        put(&mut bytes, 16, self.length.to_be_bytes());
        bytes
    }
}

/// The number of an [`Info`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum InfoKind {
    /// Size and flags, which every export reports.
    Export = 0,
    /// The canonical name.
    Name = 1,
    /// The description.
    Description = 2,
    /// Sizes of requests.
    BlockSize = 3,
}

/// What an export says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Info<'a> {
    /// Size and flags.
    Export(ExportReply),
    /// The canonical name.
    Name(&'a str),
    /// The description.
    Description(&'a str),
    /// Sizes of requests, in bytes.
    BlockSize {
        /// Offsets and lengths are multiples of it.
        minimum: u32,
        /// The multiple that is efficient.
        preferred: u32,
        /// Most bytes of data in a request.
        payload_max: u32,
    },
}

impl<'a> Info<'a> {
    /// Decodes it.
    pub fn decode(bytes: &'a [u8]) -> Result<Info<'a>, DecodeError> {
        let mut fields = Fields::new("info", bytes);
        let info = match fields.u16()? {
            0 => {
                let (size, flags) = (fields.u64()?, fields.u16()?);
                Info::Export(ExportReply { size, flags: TransmissionFlags::from_bits_retain(flags) })
            }
            1 => return text("info", fields.rest()).map(Info::Name),
            2 => return text("info", fields.rest()).map(Info::Description),
            3 => {
                let (minimum, preferred) = (fields.u32()?, fields.u32()?);
                Info::BlockSize { minimum, preferred, payload_max: fields.u32()? }
            }
            kind => return Err(DecodeError::value("info", 0, u64::from(kind))),
        };
        fields.end()?;
        Ok(info)
    }

    /// Appends its encoding.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let kind = |kind: InfoKind| (kind as u16).to_be_bytes();
        match self {
            Info::Export(export) => {
                out.extend(kind(InfoKind::Export));
                out.extend(export.to_bytes());
            }
            Info::Name(name) => {
                out.extend(kind(InfoKind::Name));
                out.extend(name.as_bytes());
            }
            Info::Description(text) => {
                out.extend(kind(InfoKind::Description));
                out.extend(text.as_bytes());
            }
            Info::BlockSize { minimum, preferred, payload_max } => {
                out.extend(kind(InfoKind::BlockSize));
                for size in [minimum, preferred, payload_max] {
                    out.extend(size.to_be_bytes());
                }
            }
        }
    }
}

/// The data of [`OptionCode::Info`] and [`OptionCode::Go`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// Name of the export; empty for the default export.
    pub name: &'a str,
    kinds: &'a [u8],
}

impl<'a> InfoRequest<'a> {
    /// Decodes it.
    pub fn decode(bytes: &'a [u8]) -> Result<InfoRequest<'a>, DecodeError> {
        let mut fields = Fields::new("info request", bytes);
        let name = fields.string()?;
        let count = fields.u16()?;
        let kinds = fields.take(usize::from(count) * 2)?;
        fields.end()?;
        Ok(InfoRequest { name, kinds })
    }

    /// Appends the encoding of a request.
    pub fn encode(name: &str, kinds: &[u16], out: &mut Vec<u8>) {
        out.extend((name.len() as u32).to_be_bytes());
        out.extend(name.as_bytes());
        out.extend((kinds.len() as u16).to_be_bytes());
        kinds.iter().for_each(|kind| out.extend(kind.to_be_bytes()));
    }

    /// The information asked for, by number; unknown ones are to be ignored.
    pub fn kinds(&self) -> impl Iterator<Item = u16> + 'a {
        self.kinds.as_chunks().0.iter().map(|kind| u16::from_be_bytes(*kind))
    }

    /// Whether it asks for `kind`.
    pub fn asks(&self, kind: InfoKind) -> bool {
        self.kinds().any(|asked| asked == kind as u16)
    }
}

/// The data of [`OptionCode::ListMetaContext`] and [`OptionCode::SetMetaContext`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetaContextRequest<'a> {
    /// Name of the export.
    pub name: &'a str,
    /// Number of queries.
    pub count: u32,
    queries: &'a [u8],
}

impl<'a> MetaContextRequest<'a> {
    /// Decodes it.
    pub fn decode(bytes: &'a [u8]) -> Result<MetaContextRequest<'a>, DecodeError> {
        let mut fields = Fields::new("metadata context request", bytes);
        let name = fields.string()?;
        let count = fields.u32()?;
        let queries = fields.rest();
        let mut fields = Fields::new("metadata context request", queries);
        for _ in 0..count {
            fields.string()?;
        }
        fields.end()?;
        Ok(MetaContextRequest { name, count, queries })
    }

    /// Appends the encoding of a request.
    pub fn encode(name: &str, queries: &[&str], out: &mut Vec<u8>) {
        out.extend((name.len() as u32).to_be_bytes());
        out.extend(name.as_bytes());
        out.extend((queries.len() as u32).to_be_bytes());
        for query in queries {
            out.extend((query.len() as u32).to_be_bytes());
            out.extend(query.as_bytes());
        }
    }

    /// The queries.
    pub fn queries(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let mut fields = Fields::new("metadata context request", self.queries);
        std::iter::from_fn(move || fields.string().ok())
    }
}
