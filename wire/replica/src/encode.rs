//! Messages to bytes.

use std::sync::Arc;

use wire_store::{EntryHeader, crc32c};

use crate::{
    AppendOutcome, ClientReply, ClientRequest, EncodedFrame, EntryId, Frame, FrameHeader, FrameKind,
    GroupConfig, KNOWS_SESSIONS, MessageBody, ObjectPart, ReplicaMessage, ReplicatedEntry, UNKNOWN_LOG_END,
    spare::empty_head,
};

/// What most messages have besides entries fits.
const FIELDS_BYTES: usize = 96;

impl Frame {
    /// Encodes a message that concerns a logical group. Checksums of entries' data are taken from their headers.
    pub fn encode(&self, group: u32) -> EncodedFrame {
        let mut out = Out::with_room_for(self.entries());
        let kind = match self {
            Frame::Replica(message) => out.replica_message(message),
            Frame::Request(ClientRequest::Write { header, data }) => {
                out.entry(header, data);
                FrameKind::Write
            }
            Frame::Request(ClientRequest::Read { client, number, object, offset, length }) => {
                out.u64(*client);
                out.u64(*number);
                out.bytes(&object.to_bytes());
                out.u32(*offset);
                out.u32(*length);
                FrameKind::Read
            }
            Frame::Reply { client, number, reply } => {
                out.u64(*client);
                out.u64(*number);
                out.reply(reply);
                FrameKind::Reply
            }
            Frame::StatusRequest { number } => {
                out.u64(*number);
                FrameKind::StatusRequest
            }
            Frame::Status { number, report } => {
                out.u64(*number);
                out.u32(crc32c(report));
                out.data(report);
                FrameKind::Status
            }
        };
        let data_bytes = out.data.iter().map(|part| part.len()).sum();
        FrameHeader::seal(kind, group, &mut out.head, data_bytes);
        EncodedFrame { head: out.head, data: out.data }
    }

    /// Entries that it has.
    fn entries(&self) -> usize {
        match self {
            Frame::Replica(ReplicaMessage { body: MessageBody::Append(append), .. }) => append.entries.len(),
            Frame::Request(ClientRequest::Write { .. }) => 1,
            _ => 0,
        }
    }
}

struct Out {
    head: Vec<u8>,
    data: Vec<Arc<[u8]>>,
}

impl Out {
    /// Room for the header, which is zero, and for this many entries.
    fn with_room_for(entries: usize) -> Out {
        let mut head = empty_head(FrameHeader::SIZE + FIELDS_BYTES + entries * EntryHeader::SIZE);
        head.resize(FrameHeader::SIZE, 0);
        Out { head, data: Vec::with_capacity(entries) }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.head.extend_from_slice(bytes);
    }

    fn u32(&mut self, number: u32) {
        self.bytes(&number.to_le_bytes());
    }

    fn u64(&mut self, number: u64) {
        self.bytes(&number.to_le_bytes());
    }

    fn data(&mut self, data: &Arc<[u8]>) {
        if !data.is_empty() {
            self.data.push(data.clone());
        }
    }

    fn entry_id(&mut self, id: EntryId) {
        self.u64(id.sequence);
        self.u32(id.epoch);
    }

    fn part(&mut self, part: ObjectPart) {
        self.bytes(&part.object.to_bytes());
        self.u32(part.number);
    }

    /// An entry as no log has it: its place and what is before it differ between replicas.
    fn entry(&mut self, header: &EntryHeader, data: &Arc<[u8]>) {
        let header = EntryHeader { previous_crc32c: 0, ..header.clone() };
        self.bytes(&header.encode([0; 16], 0));
        self.data(data);
    }

    fn config(&mut self, config: &GroupConfig) {
        self.u32(config.epoch);
        self.u32(config.primary.0);
        self.u32(config.in_sync.len() as u32);
        config.in_sync.iter().for_each(|member| self.u32(member.0));
    }

    fn replica_message(&mut self, message: &ReplicaMessage) -> FrameKind {
        self.u32(message.from.0);
        self.config(&message.config);
        match &message.body {
            MessageBody::Config => FrameKind::Config,
            MessageBody::HandOver => FrameKind::HandOver,
            MessageBody::Leave => FrameKind::Leave,
            MessageBody::Append(append) => {
                self.u64(append.sent_ns);
                self.u64(append.session);
                self.entry_id(append.previous);
                self.u64(append.commit_point);
                self.u64(append.log_end.unwrap_or(UNKNOWN_LOG_END));
                self.u32(append.entries.len() as u32);
                for entry in &append.entries {
                    let ReplicatedEntry { header, data } = &**entry;
                    self.entry(header, data);
                }
                FrameKind::Append
            }
            MessageBody::Appended { sent_ns, session, outcome } => {
                self.u64(*sent_ns);
                self.u64(*session);
                let (mismatch, number) = match outcome {
                    AppendOutcome::Durable(through) => (0, *through),
                    AppendOutcome::Mismatch { commit_point } => (1, *commit_point),
                };
                self.u32(mismatch);
                self.u64(number);
                FrameKind::Appended
            }
            MessageBody::LogEnd { sent_ns, last, committed } => {
                self.u64(*sent_ns);
                self.entry_id(*last);
                self.u64(*committed);
                FrameKind::LogEnd
            }
            MessageBody::Join { session, commit_point, complete } => {
                self.u64(*session);
                self.u64(*commit_point);
                self.u32((*complete).into());
                FrameKind::Join
            }
            MessageBody::CopyBegin { session, base, applied } => {
                self.u64(*session);
                self.entry_id(*base);
                match session & KNOWS_SESSIONS {
                    0 => applied.encode_without_sessions(&mut self.head),
                    _ => applied.encode(&mut self.head),
                }
                FrameKind::CopyBegin
            }
            MessageBody::CopyBegun { session } => {
                self.u64(*session);
                FrameKind::CopyBegun
            }
            MessageBody::CopyObject { session, part, content } => {
                self.u64(*session);
                self.part(*part);
                self.u32(crc32c(content));
                self.data(content);
                FrameKind::CopyObject
            }
            MessageBody::CopyWritten { session, part } => {
                self.u64(*session);
                self.part(*part);
                FrameKind::CopyWritten
            }
            MessageBody::CopyEnd { session } => {
                self.u64(*session);
                FrameKind::CopyEnd
            }
            MessageBody::Fetch { number, object, offset, length } => {
                self.u64(*number);
                self.bytes(&object.to_bytes());
                self.u32(*offset);
                self.u32(*length);
                FrameKind::Fetch
            }
            MessageBody::Fetched { number, through, data } => {
                self.u64(*number);
                self.u64(*through);
                self.u32(data.is_some().into());
                self.u32(data.as_ref().map_or(0, |data| crc32c(data)));
                data.iter().for_each(|data| self.data(data));
                FrameKind::Fetched
            }
            MessageBody::Unsettled { number, through, entry } => {
                self.u64(*number);
                self.u64(*through);
                self.entry(&entry.header, &entry.data);
                FrameKind::Unsettled
            }
            MessageBody::CopyEnded { session } => {
                self.u64(*session);
                FrameKind::CopyEnded
            }
        }
    }

    fn reply(&mut self, reply: &ClientReply) {
        let (kind, number) = match reply {
            ClientReply::Written => (0, 0),
            ClientReply::Data(data) => {
                self.data(data);
                (1, crc32c(data))
            }
            ClientReply::NotPrimary { primary: None } => (2, 0),
            ClientReply::NotPrimary { primary: Some(primary) } => (3, primary.0),
            ClientReply::Busy => (4, 0),
            ClientReply::TooOld => (5, 0),
            ClientReply::Failed => (6, 0),
            ClientReply::NoSpace => (7, 0),
            ClientReply::Denied => (8, 0),
            ClientReply::SessionEnded => (9, 0),
            ClientReply::Fenced => (10, 0),
            ClientReply::TooManySessions => (11, 0),
            ClientReply::SessionOpened { token } => (12, *token),
        };
        self.u32(kind);
        self.u32(number);
    }
}
