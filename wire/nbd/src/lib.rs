//! Encodings of the NBD protocol: the fixed newstyle handshake and the transmission phase.
//!
//! A server greets with a [`NbdGreeting`]; the client answers with [`ClientFlags`] and sends options, each an
//! [`OptionHeader`] with data ([`InfoRequest`], [`MetaContextRequest`]), which are answered by
//! [`OptionReplyHeader`]s with data ([`Info`]). In the transmission phase a [`RequestHeader`] is answered by
//! a [`SimpleReply`] or by chunks, each a [`ChunkHeader`] with data. Requests and chunks are longer where
//! extended headers were negotiated ([`HeaderForm`]). Integers are big-endian. The format is that of
//! `doc/proto.md` of the NBD project.
//!
//! ```
//! use wire_nbd::{NbdCommand, CommandFlags, HeaderForm, RequestHeader};
//! let read = RequestHeader {
//!     flags: CommandFlags::DF,
//!     command: NbdCommand::Read.into(),
//!     cookie: 7,
//!     offset: 4096,
//!     length: 512,
//! };
//! let mut bytes = [0; HeaderForm::REQUEST_SIZE_MAX];
//! let size = read.encode(HeaderForm::Compact, &mut bytes);
//! assert_eq!(RequestHeader::decode(HeaderForm::Compact, &bytes[..size])?, read);
//! # Ok::<(), wire_nbd::DecodeError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod bytes;
mod errors;
mod handshake;
mod options;
mod transmission;

pub use codec::DecodeError;
pub use errors::NbdError;
pub use handshake::{
    ClientFlags, EXPORT_ZEROES, ExportReply, HandshakeFlags, NbdGreeting, TransmissionFlags,
};
pub use options::{
    Info, InfoKind, InfoRequest, MetaContextRequest, OPTION_REPLY_ERROR, OptionCode, OptionHeader,
    OptionReplyHeader, OptionReplyKind, STRING_BYTES_MAX,
};
pub use transmission::{
    ChunkFlags, ChunkHeader, ChunkKind, CommandFlags, ErrorChunk, Extent, HeaderForm, NbdCommand,
    RequestHeader, SimpleReply, state,
};

/// The metadata context of allocation, the only one that the protocol itself defines.
pub const BASE_ALLOCATION: &str = "base:allocation";
