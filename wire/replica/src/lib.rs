//! Messages of the replicated store: between the replicas of a logical group, and between clients and its
//! primary.
//!
//! A message on a stream is a [`FrameHeader`] of 32 bytes, a body and data. The header names the lengths,
//! which have limits; a CRC32C covers header and body; the data has a CRC32C in the body, and each entry's
//! data its own, which goes into the logs as it is. Integers are little-endian.
//! `docs/formats/store-messages.md` has the tables.
//!
//! A connection begins with three [`Greeting`]s, in which both ends prove that they know the cluster's key,
//! or that of a client.
//!
//! A decoded message has only numbers whose sums do not overflow, entries that follow each other, and objects
//! of the frame's group. What they mean is for the receiver to judge.
//!
//! ```
//! use wire_replica::{ClientReply, Frame, FrameHeader};
//! let frame = Frame::Reply { client: 7, number: 1, reply: ClientReply::Data((*b"data").into()) };
//! let encoded = frame.encode(3);
//! let (header, body) = encoded.head.split_first_chunk().expect("a header");
//! let header = FrameHeader::decode(header)?;
//! assert_eq!((header.body_bytes as usize, header.data_bytes), (body.len(), 4));
//! assert_eq!(Frame::decode(&header, body, b"data")?, frame);
//! # Ok::<(), wire_replica::DecodeError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod applied;
mod checksums;
mod decode;
mod encode;
mod frame;
mod greeting;
mod listing;
mod message;
mod session;
mod spare;

pub use applied::{AppliedRequests, CLIENT_WINDOW, CLIENTS_MAX, ClientSession, RequestSeen, SESSIONS_MAX};
pub use checksums::{checksums_object, decode_checksums, encode_checksums, object_of_checksums};
pub use codec::DecodeError;
pub use frame::{EncodedFrame, Frame, FrameHeader, FrameKind};
pub use greeting::{Greeting, GreetingKind, KeyName};
pub use listing::{ListItem, ListedVolume, Listing, decode_list, encode_list};
pub use message::{
    Append, AppendOutcome, ClientReply, ClientRequest, EntryId, GroupConfig, MessageBody, ObjectPart,
    ReplicaId, ReplicaMessage, ReplicatedEntry, log_end_object,
};
pub use session::{SessionChange, is_data_object};
pub use spare::{recycle, recycle_head, share_data, share_entry};

/// Version of the messages.
pub const MESSAGE_VERSION: u16 = 3;
/// Most entries of a message.
pub const ENTRIES_MAX: usize = 16;
/// Most bytes of a write or a read.
pub const TRANSFER_BYTES_MAX: u32 = 128 << 10;
/// Most bytes of a part of a copied object as the storage encodes it: as much as a transfer, and where it
/// belongs.
pub const OBJECT_PART_BYTES_MAX: usize = TRANSFER_BYTES_MAX as usize + (4 << 10);
/// Most bytes of a node's status: the replicas of a device, 1,024 at most, take about 1 KiB each.
pub const REPORT_BYTES_MAX: usize = 4 << 20;
/// Most members of an in-sync set.
pub const MEMBERS_MAX: usize = 64;
/// Above every sequence, commit point, time, session and number, so that sums of them stay below 2^64.
pub const NUMBER_LIMIT: u64 = 1 << 62;
/// The end of the log in an [`Append`] that does not say it. Versions that do not know this truncate nothing
/// then, and answer as always.
pub(crate) const UNKNOWN_LOG_END: u64 = NUMBER_LIMIT - 1;
/// Sessions of the streams of replicas that know those of clients have this bit: a copy begins with the
/// sessions of clients.
pub const KNOWS_SESSIONS: u64 = 1 << 61;
/// Above every epoch.
pub const EPOCH_LIMIT: u32 = 1 << 31;
