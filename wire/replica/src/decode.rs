//! Bytes to messages.

use std::sync::Arc;

use codec::DecodeError;
use wire_store::{EntryHeader, OBJECT_BYTES, ObjectId, crc32c};

use crate::{
    Append, AppendOutcome, AppliedRequests, ClientReply, ClientRequest, ENTRIES_MAX, EPOCH_LIMIT, EntryId,
    Frame, FrameHeader, FrameKind, GroupConfig, MEMBERS_MAX, MessageBody, NUMBER_LIMIT, ObjectPart,
    ReplicaId, ReplicaMessage, ReplicatedEntry, TRANSFER_BYTES_MAX, UNKNOWN_LOG_END, share_data, share_entry,
};

impl Frame {
    /// Decodes a message of which header, body and data have arrived.
    ///
    /// # Errors
    /// The first field that no such message has; a wrong length or checksum, of the data too.
    pub fn decode(header: &FrameHeader, body: &[u8], data: &[u8]) -> Result<Frame, DecodeError> {
        header.check(body)?;
        if data.len() != header.data_bytes as usize {
            let (got, need) = (data.len(), header.data_bytes as usize);
            return Err(DecodeError::Length { what: "the data of the message", got, need });
        }
        let mut from = Fields { rest: body, length: body.len(), group: header.group, data };
        let frame = match header.kind {
            FrameKind::Write => {
                let ReplicatedEntry { header, data } = from.entry()?;
                if header.withheld {
                    return Err(DecodeError::value("whether the data was withheld", 7, 1));
                }
                Frame::Request(ClientRequest::Write { header, data })
            }
            FrameKind::Read => from.read()?,
            FrameKind::Reply => from.reply()?,
            FrameKind::StatusRequest => {
                Frame::StatusRequest { number: from.number("the number of the request")? }
            }
            FrameKind::Status => {
                let (number, checksum) = (from.number("the number of the request")?, from.u32()?);
                Frame::Status { number, report: from.data(from.data.len(), checksum)? }
            }
            kind => Frame::Replica(from.replica_message(kind)?),
        };
        match (from.rest, from.data) {
            ([], []) => Ok(frame),
            (rest, data) => {
                let (got, need) = (body.len() + data.len(), body.len() - rest.len());
                Err(DecodeError::Length { what: "the message with its data", got, need })
            }
        }
    }
}

/// What is left of a body and its data.
pub(crate) struct Fields<'a> {
    rest: &'a [u8],
    length: usize,
    group: u32,
    data: &'a [u8],
}

impl<'a> Fields<'a> {
    /// The fields of a structure that has no data.
    pub(crate) fn new(bytes: &'a [u8]) -> Fields<'a> {
        Fields { rest: bytes, length: bytes.len(), group: 0, data: &[] }
    }

    /// Bytes that are left.
    pub(crate) fn rest(&self) -> usize {
        self.rest.len()
    }

    fn at(&self) -> u32 {
        (self.length - self.rest.len()) as u32
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let Some((field, rest)) = self.rest.split_first_chunk() else {
            let (got, need) = (self.length, self.at() as usize + N);
            return Err(DecodeError::Length { what: "the body of the message", got, need });
        };
        self.rest = rest;
        Ok(*field)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    /// A number below a limit.
    fn below(&mut self, what: &'static str, limit: u32) -> Result<u32, DecodeError> {
        let at = self.at();
        let number = self.u32()?;
        if number < limit { Ok(number) } else { Err(DecodeError::value(what, at, number.into())) }
    }

    pub(crate) fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    /// A sequence, a time, a session or a number of a request.
    pub(crate) fn number(&mut self, what: &'static str) -> Result<u64, DecodeError> {
        let at = self.at();
        let number = self.u64()?;
        if number < NUMBER_LIMIT { Ok(number) } else { Err(DecodeError::value(what, at, number)) }
    }

    fn entry_id(&mut self) -> Result<EntryId, DecodeError> {
        let sequence = self.number("the sequence")?;
        Ok(EntryId { sequence, epoch: self.below("the epoch", EPOCH_LIMIT)? })
    }

    fn part(&mut self) -> Result<ObjectPart, DecodeError> {
        Ok(ObjectPart { object: self.object()?, number: self.u32()? })
    }

    fn object(&mut self) -> Result<ObjectId, DecodeError> {
        let at = self.at();
        let object = ObjectId::from_bytes(&self.bytes()?);
        if object.group == self.group {
            Ok(object)
        } else {
            Err(DecodeError::value("the group of the object", at, object.group.into()))
        }
    }

    /// The next bytes of the data, with this checksum.
    fn data(&mut self, bytes: usize, checksum: u32) -> Result<Arc<[u8]>, DecodeError> {
        let Some((data, rest)) = self.data.split_at_checked(bytes) else {
            let (got, need) = (self.data.len(), bytes);
            return Err(DecodeError::Length { what: "the data of the message", got, need });
        };
        self.data = rest;
        // An entry without data has the checksum 0, which is that of no bytes.
        if crc32c(data) == checksum {
            Ok(share_data(data))
        } else {
            Err(DecodeError::Text { what: "the data of the message", reason: "the checksum is wrong" })
        }
    }

    fn entry(&mut self) -> Result<ReplicatedEntry, DecodeError> {
        let at = self.at();
        let header = EntryHeader::decode(&self.bytes::<{ EntryHeader::SIZE }>()?, [0; 16], 0)?;
        let numbers = [header.sequence, header.commit_point, header.client_number];
        for number in numbers.into_iter().chain([header.version]) {
            if number >= NUMBER_LIMIT {
                return Err(DecodeError::value("a number of the entry", at, number));
            }
        }
        let data_bytes = header.data_bytes();
        for (what, value, valid) in [
            ("the epoch of the entry", header.epoch, header.epoch < EPOCH_LIMIT),
            ("the group of the entry", header.object.group, header.object.group == self.group),
            ("where the data of the entry is", 2, !header.in_place),
            ("the link of the entry", header.previous_crc32c, header.previous_crc32c == 0),
            ("the length of the entry", header.length, data_bytes <= TRANSFER_BYTES_MAX as usize),
        ] {
            if !valid {
                return Err(DecodeError::value(what, at, value.into()));
            }
        }
        let data = self.data(data_bytes, header.data_crc32c)?;
        Ok(ReplicatedEntry { header, data })
    }

    fn config(&mut self) -> Result<GroupConfig, DecodeError> {
        let epoch = self.below("the epoch", EPOCH_LIMIT)?;
        let primary = ReplicaId(self.u32()?);
        let count = self.below("the number of members", MEMBERS_MAX as u32 + 1)?;
        let members = (0..count).map(|_| self.u32().map(ReplicaId));
        let in_sync = members.collect::<Result<Vec<_>, _>>()?;
        Ok(GroupConfig { epoch, primary, in_sync })
    }

    fn replica_message(&mut self, kind: FrameKind) -> Result<ReplicaMessage, DecodeError> {
        let from = ReplicaId(self.u32()?);
        let config = Arc::new(self.config()?);
        // Fields are in the order of the encoding.
        let body = match kind {
            FrameKind::Config => MessageBody::Config,
            FrameKind::HandOver => MessageBody::HandOver,
            FrameKind::Leave => MessageBody::Leave,
            FrameKind::Append => MessageBody::Append(self.append()?),
            FrameKind::LogEnd => MessageBody::LogEnd {
                sent_ns: self.number("the time")?,
                last: self.entry_id()?,
                committed: self.number("the commit point")?,
            },
            FrameKind::Appended => MessageBody::Appended {
                sent_ns: self.number("the time")?,
                session: self.session()?,
                outcome: self.outcome()?,
            },
            FrameKind::Join => MessageBody::Join {
                session: self.session()?,
                commit_point: self.number("the commit point")?,
                complete: self.below("whether the replica is complete", 2)? == 1,
            },
            FrameKind::CopyBegin => MessageBody::CopyBegin {
                session: self.session()?,
                base: self.entry_id()?,
                applied: Box::new(AppliedRequests::decode_fields(self)?),
            },
            FrameKind::CopyBegun => MessageBody::CopyBegun { session: self.session()? },
            FrameKind::CopyObject => {
                let (session, part, checksum) = (self.session()?, self.part()?, self.u32()?);
                let content = self.data(self.data.len(), checksum)?;
                MessageBody::CopyObject { session, part, content }
            }
            FrameKind::CopyWritten => {
                MessageBody::CopyWritten { session: self.session()?, part: self.part()? }
            }
            FrameKind::CopyEnd => MessageBody::CopyEnd { session: self.session()? },
            FrameKind::CopyEnded => MessageBody::CopyEnded { session: self.session()? },
            FrameKind::Fetch => {
                let number = self.number("the number of the request")?;
                let (object, offset, length) = self.range()?;
                MessageBody::Fetch { number, object, offset, length }
            }
            FrameKind::Fetched => {
                let number = self.number("the number of the request")?;
                let through = self.number("the sequence")?;
                let is_read = self.below("whether the range was read", 2)? == 1;
                let checksum = self.u32()?;
                let data = self.data(self.data.len(), checksum)?;
                if !is_read && !data.is_empty() {
                    return Err(DecodeError::value("whether the range was read", self.at() - 8, 0));
                }
                MessageBody::Fetched { number, through, data: is_read.then_some(data) }
            }
            FrameKind::Unsettled => MessageBody::Unsettled {
                number: self.number("the number of the request")?,
                through: self.number("the sequence")?,
                entry: Arc::new(self.entry()?),
            },
            FrameKind::Write
            | FrameKind::Read
            | FrameKind::Reply
            | FrameKind::StatusRequest
            | FrameKind::Status => unreachable!("it is decoded elsewhere"),
        };
        Ok(ReplicaMessage { from, config, body })
    }

    fn session(&mut self) -> Result<u64, DecodeError> {
        self.number("the session")
    }

    fn outcome(&mut self) -> Result<AppendOutcome, DecodeError> {
        let mismatch = self.below("the outcome", 2)? == 1;
        let sequence = self.number("the sequence")?;
        Ok(if mismatch {
            AppendOutcome::Mismatch { commit_point: sequence }
        } else {
            AppendOutcome::Durable(sequence)
        })
    }

    fn append(&mut self) -> Result<Append, DecodeError> {
        let sent_ns = self.number("the time")?;
        let session = self.session()?;
        let previous = self.entry_id()?;
        let commit_point = self.number("the commit point")?;
        let log_end = Some(self.number("the end of the log")?).filter(|end| *end != UNKNOWN_LOG_END);
        let count = self.below("the number of entries", ENTRIES_MAX as u32 + 1)?;
        let mut entries = Vec::with_capacity(count as usize);
        let mut last = previous;
        for _ in 0..count {
            let at = self.at();
            let entry = self.entry()?;
            let id = entry.id();
            if id.sequence != last.sequence + 1 || id.epoch < last.epoch {
                return Err(DecodeError::value("the sequence of the entry", at, id.sequence));
            }
            last = id;
            entries.push(share_entry(entry));
        }
        Ok(Append { sent_ns, session, previous, entries, commit_point, log_end })
    }

    fn read(&mut self) -> Result<Frame, DecodeError> {
        let client = self.u64()?;
        let number = self.number("the number of the request")?;
        let (object, offset, length) = self.range()?;
        Ok(Frame::Request(ClientRequest::Read { client, number, object, offset, length }))
    }

    /// A range of an object, as long as a transfer at most.
    fn range(&mut self) -> Result<(ObjectId, u32, u32), DecodeError> {
        let object = self.object()?;
        let offset = self.u32()?;
        let at = self.at();
        let length = self.u32()?;
        let end = u64::from(offset) + u64::from(length);
        if length == 0 || length > TRANSFER_BYTES_MAX || end > OBJECT_BYTES as u64 {
            return Err(DecodeError::value("the length of the read", at, length.into()));
        }
        Ok((object, offset, length))
    }

    fn reply(&mut self) -> Result<Frame, DecodeError> {
        let client = self.u64()?;
        let request = self.number("the number of the request")?;
        let at = self.at();
        let kind = self.u32()?;
        let number = self.u32()?;
        let reply = match (kind, number) {
            (0, 0) => ClientReply::Written,
            (1, checksum) => ClientReply::Data(self.data(self.data.len(), checksum)?),
            (2, 0) => ClientReply::NotPrimary { primary: None },
            (3, primary) => ClientReply::NotPrimary { primary: Some(ReplicaId(primary)) },
            (4, 0) => ClientReply::Busy,
            (5, 0) => ClientReply::TooOld,
            (6, 0) => ClientReply::Failed,
            (7, 0) => ClientReply::NoSpace,
            (8, 0) => ClientReply::Denied,
            (9, 0) => ClientReply::SessionEnded,
            (10, 0) => ClientReply::Fenced,
            (11, 0) => ClientReply::TooManySessions,
            (12, token) => ClientReply::SessionOpened { token },
            (0 | 2.., number) if number != 0 && kind <= 6 => {
                return Err(DecodeError::value("a reserved field of the answer", at + 4, number.into()));
            }
            _ => return Err(DecodeError::value("the answer", at, kind.into())),
        };
        Ok(Frame::Reply { client, number: request, reply })
    }
}
