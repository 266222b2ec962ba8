//! Messages round-trip; what was cut short, damaged or made up is rejected.
#![allow(clippy::unwrap_used)]

mod arbitrary;

use arbitrary::{bytes, frame, received};
use random::WyRand;
use wire_replica::*;

#[test]
fn what_was_encoded_is_decoded() {
    let mut random = WyRand::new(1);
    for _ in 0..3000 {
        let frame = frame(&mut random);
        let (bytes, _) = bytes(&frame);
        assert_eq!(received(&bytes), Ok(frame));
    }
}

#[test]
fn a_message_that_is_cut_short_or_damaged_is_rejected() {
    let mut random = WyRand::new(2);
    for _ in 0..400 {
        let frame = frame(&mut random);
        let (bytes, _) = bytes(&frame);
        assert!(received(&bytes[..random.index(bytes.len())]).is_err());
        for _ in 0..20 {
            let mut damaged = bytes.clone();
            let at = random.index(bytes.len());
            damaged[at] ^= 1 << random.below(8);
            assert!(received(&damaged).is_err(), "bit of byte {at} of {frame:?}");
        }
    }
}

/// A header and checksum that are right, around anything.
fn sealed(bytes: &mut [u8], body: usize) {
    bytes[16..20].copy_from_slice(&(body as u32).to_le_bytes());
    let data = (bytes.len() - FrameHeader::SIZE - body) as u32;
    bytes[20..24].copy_from_slice(&data.to_le_bytes());
    bytes[8..12].fill(0);
    let checksum = wire_store::crc32c(&bytes[..FrameHeader::SIZE + body]);
    bytes[8..12].copy_from_slice(&checksum.to_le_bytes());
}

#[test]
fn changed_fields_under_a_right_checksum_are_decoded_to_the_same_bytes_or_rejected() {
    let mut random = WyRand::new(3);
    let (mut accepted, mut rejected) = (0, 0);
    for _ in 0..30_000 {
        let (mut changed, at) = bytes(&frame(&mut random));
        for _ in 0..1 + random.below(3) {
            let index = random.index(at);
            changed[index] = if random.happens(500) { 0xff } else { random.below(256) as u8 };
        }
        let body = at - FrameHeader::SIZE;
        let body = if random.happens(100) { random.index(body + 1) } else { body };
        sealed(&mut changed, body);
        match received(&changed) {
            Ok(frame) => {
                let (again, _) = bytes(&frame);
                match &frame {
                    // A table of a version without sessions has more numbers of a client than are told apart.
                    Frame::Replica(ReplicaMessage { body: MessageBody::CopyBegin { .. }, .. }) => {
                        assert_eq!(received(&again), Ok(frame));
                    }
                    _ => assert_eq!(again[24..], changed[24..], "{frame:?}"),
                }
                accepted += 1;
            }
            Err(_) => rejected += 1,
        }
    }
    assert!(accepted > 1000 && rejected > 1000, "{accepted} accepted, {rejected} rejected");
}

#[test]
fn lengths_beyond_any_message_are_rejected_before_the_body_arrives() {
    let frame = Frame::Replica(arbitrary::replica_message(&mut WyRand::new(4), 3));
    let (good, _) = bytes(&frame);
    for kind in FrameKind::ALL {
        let (body_max, data_max) = kind.limits();
        for (body, data, is_valid) in
            [(body_max, data_max, true), (body_max + 1, 0, false), (0, data_max + 1, false)]
        {
            let mut header: [u8; FrameHeader::SIZE] = *good.first_chunk().unwrap();
            header[6] = kind as u8;
            header[16..20].copy_from_slice(&(body as u32).to_le_bytes());
            header[20..24].copy_from_slice(&(data as u32).to_le_bytes());
            assert_eq!(FrameHeader::decode(&header).is_ok(), is_valid, "{kind:?} {body} {data}");
        }
    }
}

#[test]
fn the_longest_messages_are_within_their_limits() {
    let mut applied = AppliedRequests::default();
    for client in 1..=CLIENTS_MAX as u64 + 1 {
        applied.record(client, 1, client);
        let change = SessionChange::Open { volume: client, attach_epoch: 1 };
        applied.apply(&wire_store::EntryHeader { client, sequence: client, ..change.header(3) });
    }
    assert_eq!(applied.session_count(), SESSIONS_MAX);
    let members = (0..MEMBERS_MAX as u32).map(ReplicaId).collect();
    let config = std::sync::Arc::new(GroupConfig { epoch: 1, primary: ReplicaId(0), in_sync: members });
    for session in [1, KNOWS_SESSIONS | 1] {
        let applied = Box::new(applied.clone());
        let body = MessageBody::CopyBegin { session, base: EntryId::default(), applied };
        let message = ReplicaMessage { from: ReplicaId(1), config: config.clone(), body };
        let (encoded, _) = bytes(&Frame::Replica(message.clone()));
        let received = received(&encoded).unwrap();
        // A version without sessions gets what it knows.
        assert_eq!(received == Frame::Replica(message), session != 1);
    }
}

#[test]
fn a_write_never_comes_withheld_and_an_object_belongs_to_the_group() {
    let mut random = WyRand::new(5);
    let (header, data) = loop {
        let (header, data) = arbitrary::write(&mut random);
        if !data.is_empty() {
            break (header, data);
        }
    };
    let withheld = wire_store::EntryHeader { withheld: true, data_crc32c: 0, ..header.clone() };
    let request = ClientRequest::Write { header: withheld, data: [].into() };
    let expected = DecodeError::value("whether the data was withheld", 7, 1);
    assert_eq!(received(&bytes(&Frame::Request(request)).0), Err(expected));
    let EncodedFrame { head, .. } =
        Frame::Request(ClientRequest::Write { header, data: data.clone() }).encode(8);
    let foreign = [head, data.to_vec()].concat();
    assert_eq!(received(&foreign), Err(DecodeError::value("the group of the entry", 0, 3)));
}

#[test]
fn applied_requests_round_trip_and_unordered_clients_are_rejected() {
    let mut applied = AppliedRequests::default();
    let mut random = WyRand::new(6);
    for sequence in 1..5000 {
        applied.record(1 + random.below(50), random.below(3000), sequence);
    }
    let mut encoded = Vec::new();
    applied.encode(&mut encoded);
    assert_eq!(AppliedRequests::decode(&encoded), Ok(applied));
    let longer = [&encoded[..], &[0]].concat();
    for wrong in [&encoded[..encoded.len() - 1], &longer] {
        assert!(AppliedRequests::decode(wrong).is_err());
    }
    encoded[8..16].copy_from_slice(&99u64.to_le_bytes());
    assert!(AppliedRequests::decode(&encoded).is_err());
}
