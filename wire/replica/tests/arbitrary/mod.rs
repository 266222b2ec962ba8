//! Random messages that can be encoded: small numbers, so that they concern each other.
#![allow(dead_code, reason = "each test uses its part")]

use std::sync::Arc;

use random::WyRand;
use wire_replica::*;
use wire_store::{EntryHeader, OBJECT_BYTES, ObjectId, Operation, crc32c};

pub(crate) const GROUP: u32 = 3;

/// Mostly small; sometimes as high as can be.
pub(crate) fn number(random: &mut WyRand) -> u64 {
    match random.below(20) {
        0 => NUMBER_LIMIT - 1 - random.below(3),
        1 => random.below(NUMBER_LIMIT),
        _ => random.below(24),
    }
}

fn epoch(random: &mut WyRand) -> u32 {
    if random.happens(10) { EPOCH_LIMIT - 1 } else { random.below(6) as u32 }
}

fn entry_id(random: &mut WyRand) -> EntryId {
    EntryId { sequence: number(random), epoch: epoch(random) }
}

pub(crate) fn object(random: &mut WyRand) -> ObjectId {
    ObjectId { group: GROUP, volume: random.below(3), index: random.below(3) as u32, suffix: 0 }
}

/// A part of an object.
pub(crate) fn part(random: &mut WyRand) -> ObjectPart {
    ObjectPart { object: object(random), number: random.below(3) as u32 }
}

/// An operation of a client, with its data.
pub(crate) fn write(random: &mut WyRand) -> (EntryHeader, Arc<[u8]>) {
    let operation = Operation::ALL[random.index(Operation::ALL.len())];
    let has_range = matches!(operation, Operation::Write | Operation::WriteZeroes);
    let length = if has_range { 1 + random.below(32) as u32 } else { 0 };
    let offset = random.below(OBJECT_BYTES as u64 - 64) as u32;
    let mut header = EntryHeader::new(operation, object(random), offset, length);
    if random.happens(200) {
        let change = match random.happens(700) {
            true => SessionChange::Open { volume: random.below(3), attach_epoch: random.below(4) as u32 },
            false => SessionChange::End { volume: random.below(3) },
        };
        header = change.header(GROUP);
    }
    header.epoch = random.below(4) as u32;
    (header.client, header.client_number) = (random.below(3), number(random));
    (header.version, header.mtime_ns) = (number(random), random.next_bits());
    let data: Vec<u8> = (0..header.data_bytes()).map(|_| random.below(256) as u8).collect();
    header.data_crc32c = crc32c(&data);
    (header, data.into())
}

fn entries(random: &mut WyRand, previous: EntryId) -> Vec<Arc<ReplicatedEntry>> {
    let mut last = previous;
    let count = random.index(ENTRIES_MAX + 1) as u64;
    let count = count.min(NUMBER_LIMIT - 1 - last.sequence);
    let entries = (0..count).map(|_| {
        let (mut header, mut data) = write(random);
        last.sequence += 1;
        if random.happens(200) && last.epoch + 1 < EPOCH_LIMIT {
            last.epoch += 1;
        }
        (header.sequence, header.epoch, header.commit_point) = (last.sequence, last.epoch, number(random));
        if random.happens(100) {
            (header.withheld, header.data_crc32c, data) = (true, 0, [].into());
        }
        Arc::new(ReplicatedEntry { header, data })
    });
    entries.collect()
}

fn applied(random: &mut WyRand, session: u64) -> Box<AppliedRequests> {
    let mut applied = AppliedRequests::default();
    for sequence in 0..random.below(20) {
        applied.record(random.below(4), number(random), sequence);
        if session & KNOWS_SESSIONS != 0 {
            let (volume, attach_epoch) = (random.below(3), random.below(4) as u32);
            let change = match random.happens(700) {
                true => SessionChange::Open { volume, attach_epoch },
                false => SessionChange::End { volume },
            };
            applied.apply(&EntryHeader { client: random.below(9), sequence, ..change.header(GROUP) });
        }
    }
    Box::new(applied)
}

fn content(random: &mut WyRand) -> Arc<[u8]> {
    (0..random.below(40)).map(|_| random.below(256) as u8).collect()
}

pub(crate) fn config(random: &mut WyRand, replicas: u64) -> Arc<GroupConfig> {
    let member = |random: &mut WyRand| ReplicaId(random.below(replicas) as u32);
    let primary = member(random);
    let in_sync = (0..random.below(5)).map(|_| member(random)).collect();
    Arc::new(GroupConfig { epoch: epoch(random), primary, in_sync })
}

pub(crate) fn replica_message(random: &mut WyRand, replicas: u64) -> ReplicaMessage {
    let config = config(random, replicas);
    let session = match random.below(3) {
        0 => 0,
        1 => KNOWS_SESSIONS | random.below(24),
        _ => number(random),
    };
    let body = match random.below(13) {
        0 => MessageBody::Config,
        1..=3 => {
            let previous = entry_id(random);
            let commit_point = number(random);
            // The highest one says that it is not known.
            let log_end = Some(number(random)).filter(|end| *end < NUMBER_LIMIT - 1 && random.happens(900));
            let (sent_ns, entries) = (number(random), entries(random, previous));
            MessageBody::Append(Append { sent_ns, session, previous, entries, commit_point, log_end })
        }
        4 => {
            let through = number(random);
            let outcome = if random.happens(500) {
                AppendOutcome::Durable(through)
            } else {
                AppendOutcome::Mismatch { commit_point: through }
            };
            MessageBody::Appended { sent_ns: number(random), session, outcome }
        }
        5 => MessageBody::Join { session, commit_point: number(random), complete: random.happens(500) },
        6 => MessageBody::CopyBegin { session, base: entry_id(random), applied: applied(random, session) },
        7 => MessageBody::CopyObject { session, part: part(random), content: content(random) },
        8 => MessageBody::CopyWritten { session, part: part(random) },
        9 => MessageBody::Fetch {
            number: number(random),
            object: object(random),
            offset: random.below(4096) as u32,
            length: 1 + random.below(8) as u32,
        },
        10 => MessageBody::Fetched {
            number: number(random),
            through: number(random),
            data: random.happens(700).then(|| content(random)),
        },
        11 => {
            let (header, data) = write(random);
            let entry = Arc::new(ReplicatedEntry { header, data });
            MessageBody::Unsettled { number: number(random), through: number(random), entry }
        }
        _ => match random.below(6) {
            0 => MessageBody::CopyBegun { session },
            1 => MessageBody::CopyEnd { session },
            2 => MessageBody::HandOver,
            3 => MessageBody::Leave,
            4 => MessageBody::LogEnd {
                sent_ns: number(random),
                last: entry_id(random),
                committed: number(random),
            },
            _ => MessageBody::CopyEnded { session },
        },
    };
    ReplicaMessage { from: ReplicaId(random.below(replicas) as u32), config, body }
}

pub(crate) fn request(random: &mut WyRand) -> ClientRequest {
    if random.happens(500) {
        let (header, data) = write(random);
        return ClientRequest::Write { header, data };
    }
    let (client, number, object) = (random.below(3), number(random), object(random));
    ClientRequest::Read { client, number, object, offset: random.below(4096) as u32, length: 512 }
}

pub(crate) fn frame(random: &mut WyRand) -> Frame {
    match random.below(5) {
        4 if random.happens(500) => Frame::StatusRequest { number: number(random) },
        4 => Frame::Status { number: number(random), report: content(random) },
        0 => Frame::Request(request(random)),
        1 => {
            let reply = match random.below(13) {
                0 => ClientReply::Written,
                1 => ClientReply::Data(content(random)),
                2 => ClientReply::NotPrimary { primary: None },
                3 => ClientReply::NotPrimary { primary: Some(ReplicaId(random.below(4) as u32)) },
                4 => ClientReply::Busy,
                5 => ClientReply::TooOld,
                6 => ClientReply::NoSpace,
                7 => ClientReply::Denied,
                8 => ClientReply::SessionEnded,
                9 => ClientReply::Fenced,
                10 => ClientReply::TooManySessions,
                11 => ClientReply::SessionOpened { token: random.below(1 << 32) as u32 },
                _ => ClientReply::Failed,
            };
            Frame::Reply { client: random.next_bits(), number: number(random), reply }
        }
        _ => Frame::Replica(replica_message(random, 4)),
    }
}

/// The bytes of a message, and where the data begins.
pub(crate) fn bytes(frame: &Frame) -> (Vec<u8>, usize) {
    let EncodedFrame { head, data } = frame.encode(GROUP);
    let at = head.len();
    let data = data.iter().flat_map(|part| part.iter().copied());
    (head.into_iter().chain(data).collect(), at)
}

/// What a receiver makes of bytes that begin with a message.
pub(crate) fn received(bytes: &[u8]) -> Result<Frame, DecodeError> {
    let what = "the message";
    let need = FrameHeader::SIZE;
    let Some((header, rest)) = bytes.split_first_chunk() else {
        return Err(DecodeError::Length { what, got: bytes.len(), need });
    };
    let header = FrameHeader::decode(header)?;
    let (body, need) = (header.body_bytes as usize, (header.body_bytes + header.data_bytes) as usize);
    if rest.len() < need {
        return Err(DecodeError::Length { what, got: rest.len(), need });
    }
    Frame::decode(&header, &rest[..body], &rest[body..need])
}
