//! Encodings of iSCSI (RFC 7143): PDU headers, digests and the text keys of login and text requests.
//!
//! A PDU starts with a header of [`HEADER_BYTES`], decoded first as a [`BasicHeader`] for its opcode and the
//! sizes of what follows: additional header segments, the header digest, data padded to four bytes
//! ([`padded`]), the data digest ([`digest`]). The structure of its opcode has its other fields:
//! [`LoginRequest`], [`ScsiCommand`], [`DataIn`], …. [`TextKeys`] iterates over the keys in a data segment;
//! [`text`] has the forms of values. Integers are big-endian.
//!
//! ```
//! use wire_iscsi::{BasicHeader, NopOut, Opcode, RESERVED_TAG};
//! let ping = NopOut { immediate: true, initiator_task_tag: 7, target_transfer_tag: RESERVED_TAG, ..Default::default() };
//! let bytes = ping.to_bytes();
//! let header = BasicHeader::decode(&bytes)?;
//! assert_eq!((header.opcode, header.immediate, header.initiator_task_tag), (Opcode::NopOut, true, 7));
//! assert_eq!(NopOut::decode(&bytes)?, ping);
//! # Ok::<(), wire_iscsi::DecodeError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod codes;
mod fields;
mod header;
mod initiator;
mod target;
pub mod text;

pub use codec::DecodeError;
pub use codes::{
    AsyncEvent, LoginStage, LoginStatus, LogoutReason, LogoutResponse, RejectReason, ScsiServiceResponse,
    TaskFunction, TaskResponse,
};
pub use header::{BasicHeader, DIGEST_BYTES, HEADER_BYTES, Opcode, RESERVED_TAG, digest, padded};
pub use initiator::{
    DataOut, LoginRequest, LogoutRequest, NopOut, ScsiCommand, SnackRequest, TaskManagementRequest,
    TextRequest,
};
pub use target::{
    AsyncMessage, DataIn, LoginResponse, LogoutReply, NopIn, R2t, Reject, ScsiResponse,
    TaskManagementResponse, TextResponse,
};
pub use text::{TextKeys, TextWriter};
