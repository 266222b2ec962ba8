//! What surrounds a message on a stream.

use std::sync::Arc;

use codec::{Crc32c, DecodeError, next_field, put_field};

use crate::{
    AppliedRequests, ClientReply, ClientRequest, ENTRIES_MAX, MEMBERS_MAX, MESSAGE_VERSION,
    OBJECT_PART_BYTES_MAX, REPORT_BYTES_MAX, ReplicaMessage, TRANSFER_BYTES_MAX,
};

const MAGIC: [u8; 4] = *b"RBMS";
/// Offset of the checksum.
const CHECKSUM: usize = 8;
/// Bytes of a body without lists, at most.
const FIXED_BYTES_MAX: usize = 256;

/// The message of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// [`MessageBody::Config`](crate::MessageBody::Config).
    Config = 1,
    /// [`MessageBody::Append`](crate::MessageBody::Append).
    Append = 2,
    /// [`MessageBody::Appended`](crate::MessageBody::Appended).
    Appended = 3,
    /// [`MessageBody::Join`](crate::MessageBody::Join).
    Join = 4,
    /// [`MessageBody::CopyBegin`](crate::MessageBody::CopyBegin).
    CopyBegin = 5,
    /// [`MessageBody::CopyBegun`](crate::MessageBody::CopyBegun).
    CopyBegun = 6,
    /// [`MessageBody::CopyObject`](crate::MessageBody::CopyObject).
    CopyObject = 7,
    /// [`MessageBody::CopyWritten`](crate::MessageBody::CopyWritten).
    CopyWritten = 8,
    /// [`MessageBody::CopyEnd`](crate::MessageBody::CopyEnd).
    CopyEnd = 9,
    /// [`MessageBody::CopyEnded`](crate::MessageBody::CopyEnded).
    CopyEnded = 10,
    /// [`MessageBody::Fetch`](crate::MessageBody::Fetch).
    Fetch = 11,
    /// [`MessageBody::Fetched`](crate::MessageBody::Fetched).
    Fetched = 12,
    /// [`MessageBody::Unsettled`](crate::MessageBody::Unsettled).
    Unsettled = 13,
    /// [`MessageBody::HandOver`](crate::MessageBody::HandOver).
    HandOver = 14,
    /// [`MessageBody::Leave`](crate::MessageBody::Leave).
    Leave = 15,
    /// [`MessageBody::LogEnd`](crate::MessageBody::LogEnd).
    LogEnd = 16,
    /// [`ClientRequest::Write`].
    Write = 32,
    /// [`ClientRequest::Read`].
    Read = 33,
    /// [`ClientReply`].
    Reply = 34,
    /// [`Frame::StatusRequest`].
    StatusRequest = 35,
    /// [`Frame::Status`].
    Status = 36,
}

impl FrameKind {
    /// Every kind.
    pub const ALL: [FrameKind; 21] = [
        FrameKind::Config,
        FrameKind::Append,
        FrameKind::Appended,
        FrameKind::Join,
        FrameKind::CopyBegin,
        FrameKind::CopyBegun,
        FrameKind::CopyObject,
        FrameKind::CopyWritten,
        FrameKind::CopyEnd,
        FrameKind::CopyEnded,
        FrameKind::Fetch,
        FrameKind::Fetched,
        FrameKind::Unsettled,
        FrameKind::HandOver,
        FrameKind::Leave,
        FrameKind::LogEnd,
        FrameKind::Write,
        FrameKind::Read,
        FrameKind::Reply,
        FrameKind::StatusRequest,
        FrameKind::Status,
    ];

    /// Most bytes of its body and its data.
    pub fn limits(self) -> (usize, usize) {
        let message = FIXED_BYTES_MAX + MEMBERS_MAX * 4;
        let transfer = TRANSFER_BYTES_MAX as usize;
        match self {
            FrameKind::Append => {
                (message + ENTRIES_MAX * wire_store::EntryHeader::SIZE, ENTRIES_MAX * transfer)
            }
            FrameKind::CopyBegin => (message + AppliedRequests::ENCODED_BYTES_MAX, 0),
            FrameKind::CopyObject => (message, OBJECT_PART_BYTES_MAX),
            FrameKind::Fetched => (message, transfer),
            FrameKind::Unsettled => (message + wire_store::EntryHeader::SIZE, transfer),
            FrameKind::Write | FrameKind::Reply => (FIXED_BYTES_MAX, transfer),
            FrameKind::Status => (FIXED_BYTES_MAX, REPORT_BYTES_MAX),
            _ => (message, 0),
        }
    }
}

/// The first bytes of a message on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// The message.
    pub kind: FrameKind,
    /// The logical group that it concerns.
    pub group: u32,
    /// Bytes of the body, which follows the header.
    pub body_bytes: u32,
    /// Bytes of data, which follow the body.
    pub data_bytes: u32,
    /// CRC32C of header, taken as zero here, and body.
    checksum: u32,
}

impl FrameHeader {
    /// Size of the header.
    pub const SIZE: usize = 32;

    /// Decodes a header. Its checksum is checked with the body.
    ///
    /// # Errors
    /// The first field that no header of this version has; more bytes than such a message has.
    pub fn decode(from: &[u8; FrameHeader::SIZE]) -> Result<FrameHeader, DecodeError> {
        let mut rest = &from[..];
        let magic: [u8; 4] = next_field(&mut rest);
        if magic != MAGIC {
            return Err(DecodeError::Text { what: "the message", reason: "the magic number is another" });
        }
        let version = u16::from_le_bytes(next_field(&mut rest));
        if version != MESSAGE_VERSION {
            return Err(DecodeError::value("the version of the message", 4, version.into()));
        }
        let [kind, reserved] = next_field(&mut rest);
        let known = FrameKind::ALL.into_iter().find(|known| *known as u8 == kind);
        let mut number = || u32::from_le_bytes(next_field(&mut rest));
        let (checksum, group, body_bytes, data_bytes) = (number(), number(), number(), number());
        let reserved = u64::from(reserved) | u64::from_le_bytes(next_field(&mut rest));
        if reserved != 0 {
            return Err(DecodeError::value("a reserved field of the message", 7, reserved));
        }
        let kind = known.ok_or(DecodeError::value("the kind of the message", 6, kind.into()))?;
        let (body_max, data_max) = kind.limits();
        if body_bytes as usize > body_max {
            return Err(DecodeError::value("the length of the body", 16, body_bytes.into()));
        }
        if data_bytes as usize > data_max {
            return Err(DecodeError::value("the length of the data", 20, data_bytes.into()));
        }
        Ok(FrameHeader { kind, group, body_bytes, data_bytes, checksum })
    }

    fn to_bytes(self) -> [u8; FrameHeader::SIZE] {
        let mut bytes = [0; FrameHeader::SIZE];
        let mut rest = &mut bytes[..];
        put_field(&mut rest, &MAGIC);
        put_field(&mut rest, &MESSAGE_VERSION.to_le_bytes());
        put_field(&mut rest, &[self.kind as u8, 0]);
        for number in [self.checksum, self.group, self.body_bytes, self.data_bytes] {
            put_field(&mut rest, &number.to_le_bytes());
        }
        bytes
    }

    fn expected_checksum(&self, body: &[u8]) -> u32 {
        let mut checksum = Crc32c::new();
        checksum.update(&FrameHeader { checksum: 0, ..*self }.to_bytes());
        checksum.update(body);
        checksum.value()
    }

    /// Checks the checksum of header and body.
    ///
    /// # Errors
    /// Another length, or another checksum.
    pub(crate) fn check(&self, body: &[u8]) -> Result<(), DecodeError> {
        if body.len() != self.body_bytes as usize {
            let (got, need) = (body.len(), self.body_bytes as usize);
            return Err(DecodeError::Length { what: "the body of the message", got, need });
        }
        if self.expected_checksum(body) != self.checksum {
            return Err(DecodeError::value(
                "the checksum of the message",
                CHECKSUM as u32,
                self.checksum.into(),
            ));
        }
        Ok(())
    }

    /// The header before a body, in its first bytes, and data.
    pub(crate) fn seal(kind: FrameKind, group: u32, head: &mut [u8], data_bytes: usize) {
        let (header, body) = head.split_first_chunk_mut().expect("room for the header");
        let (body_bytes, data_bytes) = (body.len() as u32, data_bytes as u32);
        let unsealed = FrameHeader { kind, group, body_bytes, data_bytes, checksum: 0 };
        *header = FrameHeader { checksum: unsealed.expected_checksum(body), ..unsealed }.to_bytes();
    }
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Between replicas.
    Replica(ReplicaMessage),
    /// From a client.
    Request(ClientRequest),
    /// To a client.
    Reply {
        /// The client.
        client: u64,
        /// Its number of the request.
        number: u64,
        /// The answer.
        reply: ClientReply,
    },
    /// Asks a node for its status. It concerns no group. A node of a version that does not know it closes the connection.
    StatusRequest {
        /// Names the request on its connection.
        number: u64,
    },
    /// The answer of the node.
    Status {
        /// The request.
        number: u64,
        /// What the method `store_node_get_status` returns, as JSON: what a node reports differs between versions, and a
        /// receiver shows what it knows.
        report: Arc<[u8]>,
    },
}

/// A message to send: the head, then the data, which is shared with the message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedFrame {
    /// Header and body.
    pub head: Vec<u8>,
    /// What follows, part by part.
    pub data: Vec<Arc<[u8]>>,
}
