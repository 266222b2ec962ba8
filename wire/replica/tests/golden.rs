//! Bytes made by another encoder (Python's `struct`, with a bitwise CRC32C of RFC 3720) from the tables of
//! `docs/formats/store-messages.md`.
#![allow(clippy::unwrap_used)]

mod arbitrary;

use std::sync::Arc;

use wire_replica::*;
use wire_store::{EntryHeader, ObjectId, Operation, crc32c};

const APPEND: &str = "\
    52424d53030002009d0def73070000004c01000004000000000000000000000002000000060000000100000003000000\
    010000000200000003000000e8030000000000000000000000000000c70000000000000005000000c600000000000000\
    c9000000000000000200000052424c4501000100c35c16d4d17dd8ae0700000009000000887766554433221105000000\
    000000006400000000000000c8000000000000000500000004000000c6000000000000004d000000000000004e000000\
    0000000000200000000000000000000000000000000000000000000000000000000000001581e97df410221152424c45\
    0100010118322aeb000000000700000009000000887766554433221105000000000000006400000000000000c9000000\
    000000000600000000020000c7000000000000004d000000000000004f00000000000000001000000000000000000000\
    00000000000000000000000000000000000000001581e97df410221164617461";
const APPENDED: &str = "\
    52424d53030003006edddd21070000003800000000000000000000000000000002000000060000000100000003000000\
    010000000200000003000000e8030000000000002c00000000000000010000009600000000000000";
const COPY_BEGIN: &str = "\
    52424d5303000500a265f71a07000000cc00000000000000000000000000000002000000060000000100000003000000\
    0100000002000000030000002c00000000000000c70000000000000005000000010000004d0000000000000006040000\
    00000000c700000000000000400000000000000000000000000000000000000000000000000000000000000000000000\
    000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000\
    0000000000000000000000000000000000000000000000000000000000000000000000000000000000010000";
const COPY_OBJECT: &str = "\
    52424d5303000700c260b879070000004400000007000000000000000000000002000000060000000100000003000000\
    0100000002000000030000002c0000000000000007000000090000008877665544332211050000000000000003000000\
    3375af61636f6e74656e74";
const FETCH: &str = "\
    52424d5303000b0052d45478070000004400000000000000000000000000000002000000060000000100000003000000\
    010000000200000003000000500000000000000007000000090000008877665544332211050000000000000000200000\
    00100000";
const FETCHED: &str = "\
    52424d5303000c00e0ce0f8d070000003400000004000000000000000000000002000000060000000100000003000000\
    01000000020000000300000050000000000000009600000000000000010000006e3af3e8666f7572";
const UNSETTLED: &str = "\
    52424d5303000d00b102a82b07000000ac00000004000000000000000000000002000000060000000100000003000000\
    0100000002000000030000005000000000000000960000000000000052424c4501000100c35c16d4d17dd8ae07000000\
    09000000887766554433221105000000000000006400000000000000c8000000000000000500000004000000c6000000\
    000000004d000000000000004e0000000000000000200000000000000000000000000000000000000000000000000000\
    000000001581e97df410221164617461";
const HAND_OVER: &str = "\
    52424d5303000e002aa679af070000001c00000000000000000000000000000002000000060000000100000003000000\
    010000000200000003000000";
const LEAVE: &str = "\
    52424d5303000f00831094a5070000001c00000000000000000000000000000002000000060000000100000003000000\
    010000000200000003000000";
const LOG_END: &str = "\
    52424d53030010000bf110e0070000003800000000000000000000000000000002000000060000000100000003000000\
    010000000200000003000000e803000000000000c90000000000000006000000c600000000000000";
const PROBE: &str = "\
    52424d530300020007c876cc070000004c00000000000000000000000000000002000000060000000100000003000000\
    010000000200000003000000e8030000000000000000000000000000c70000000000000005000000c600000000000000\
    ffffffffffffff3f00000000";
const READ: &str = "\
    52424d5303002100a546a2a207000000300000000000000000000000000000004d000000000000005000000000000000\
    0700000009000000887766554433221105000000000000000020000000100000";
const REPLY: &str = "\
    52424d5303002200e060bf0107000000180000000400000000000000000000004d000000000000005000000000000000\
    010000006e3af3e8666f7572";
const NOT_PRIMARY: &str = "\
    52424d530300220043f15c5207000000180000000000000000000000000000004d000000000000005000000000000000\
    0300000002000000";

const STATUS_REQUEST: &str = "\
    52424d530300230014843af607000000080000000000000000000000000000005000000000000000";
const STATUS: &str = "\
    52424d53030024004375a3c8070000000c0000000a00000000000000000000005000000000000000b72d594c7b226e6f\
    6465223a327d";

const OBJECT: ObjectId = ObjectId { group: 7, volume: 0x1122_3344_5566_7788, index: 9, suffix: 5 };

fn entry(sequence: u64, epoch: u32, offset: u32, length: u32) -> EntryHeader {
    EntryHeader {
        version: 100,
        sequence,
        epoch,
        commit_point: sequence - 2,
        client: 77,
        client_number: sequence - 122,
        mtime_ns: 1_234_567_890_123_456_789,
        ..EntryHeader::new(Operation::Write, OBJECT, offset, length)
    }
}

fn message(body: MessageBody) -> Frame {
    let in_sync = [1, 2, 3].map(ReplicaId).into();
    let config = Arc::new(GroupConfig { epoch: 6, primary: ReplicaId(1), in_sync });
    Frame::Replica(ReplicaMessage { from: ReplicaId(2), config, body })
}

fn append() -> MessageBody {
    let written = EntryHeader { data_crc32c: crc32c(b"data"), ..entry(200, 5, 8192, 4) };
    let withheld = EntryHeader { withheld: true, ..entry(201, 6, 4096, 512) };
    let entries = [(written, &b"data"[..]), (withheld, b"")];
    let entries = entries.map(|(header, data)| Arc::new(ReplicatedEntry { header, data: data.into() }));
    let previous = EntryId { sequence: 199, epoch: 5 };
    MessageBody::Append(Append {
        sent_ns: 1000,
        session: 0,
        previous,
        entries: entries.into(),
        commit_point: 198,
        log_end: Some(201),
    })
}

/// From a primary that does not know where the newest log ends: the documented number, which earlier releases
/// take for an end.
fn probe() -> MessageBody {
    let MessageBody::Append(append) = append() else { unreachable!("it is one") };
    MessageBody::Append(Append { entries: Vec::new(), log_end: None, ..append })
}

fn copy_begin() -> MessageBody {
    let mut applied = AppliedRequests::default();
    applied.record(77, 1000, 198);
    applied.record(77, 1030, 199);
    let base = EntryId { sequence: 199, epoch: 5 };
    MessageBody::CopyBegin { session: 44, base, applied: Box::new(applied) }
}

#[test]
fn encodings_are_those_of_the_documented_tables() {
    let outcome = AppendOutcome::Mismatch { commit_point: 150 };
    let appended = MessageBody::Appended { sent_ns: 1000, session: 44, outcome };
    let part = ObjectPart { object: OBJECT, number: 3 };
    let copy = MessageBody::CopyObject { session: 44, part, content: (*b"content").into() };
    let fetch = MessageBody::Fetch { number: 80, object: OBJECT, offset: 8192, length: 4096 };
    let fetched = MessageBody::Fetched { number: 80, through: 150, data: Some((*b"four").into()) };
    let written = EntryHeader { data_crc32c: crc32c(b"data"), ..entry(200, 5, 8192, 4) };
    let written = Arc::new(ReplicatedEntry { header: written, data: (*b"data").into() });
    let unsettled = MessageBody::Unsettled { number: 80, through: 150, entry: written };
    let last = EntryId { sequence: 201, epoch: 6 };
    let log_end = MessageBody::LogEnd { sent_ns: 1000, last, committed: 198 };
    let read = ClientRequest::Read { client: 77, number: 80, object: OBJECT, offset: 8192, length: 4096 };
    let reply = |reply| Frame::Reply { client: 77, number: 80, reply };
    let not_primary = ClientReply::NotPrimary { primary: Some(ReplicaId(2)) };
    for (frame, expected) in [
        (message(append()), APPEND),
        (message(appended), APPENDED),
        (message(copy_begin()), COPY_BEGIN),
        (message(copy), COPY_OBJECT),
        (message(fetch), FETCH),
        (message(fetched), FETCHED),
        (message(unsettled), UNSETTLED),
        (message(MessageBody::HandOver), HAND_OVER),
        (message(MessageBody::Leave), LEAVE),
        (message(log_end), LOG_END),
        (message(probe()), PROBE),
        (Frame::Request(read), READ),
        (reply(ClientReply::Data((*b"four").into())), REPLY),
        (reply(not_primary), NOT_PRIMARY),
        (Frame::StatusRequest { number: 80 }, STATUS_REQUEST),
        (Frame::Status { number: 80, report: (*br#"{"node":2}"#).into() }, STATUS),
    ] {
        let EncodedFrame { head, data } = frame.encode(7);
        let bytes = [head, data.concat()].concat();
        let hexadecimal: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hexadecimal, expected, "{frame:?}");
        assert_eq!(arbitrary::received(&bytes), Ok(frame));
    }
}

/// As Python's `struct` packs the table of `docs/formats/store-messages.md`.
const CHALLENGE: &str = "\
    5242475203000200070000000000000001010101010101010101010101010101000102030405060708090a0b0c0d0e0f\
    101112131415161718191a1b1c1d1e1f0909090909090909090909090909090909090909090909090909090909090909";

#[test]
fn a_greeting_has_the_documented_bytes_and_no_others() {
    let challenge = Greeting {
        kind: GreetingKind::Challenge,
        sender: Some(ReplicaId(7)),
        cluster: [1; 16],
        nonce: std::array::from_fn(|index| index as u8),
        proof: [9; 32],
        key: None,
    };
    let bytes = challenge.encode();
    assert_eq!(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), CHALLENGE);
    assert_eq!(Greeting::decode(&bytes), Ok(challenge.clone()));
    let client = Greeting { kind: GreetingKind::Hello, sender: None, proof: [0; 32], ..challenge.clone() };
    assert_eq!(Greeting::decode(&client.encode()), Ok(client));
    for at in [0, 4, 6, 7, 12, 15] {
        let mut wrong = bytes;
        wrong[at] ^= 0x40;
        assert!(Greeting::decode(&wrong).is_err(), "byte {at}");
    }
    for kind in [GreetingKind::Hello, GreetingKind::Proof] {
        assert!(Greeting::decode(&Greeting { kind, ..challenge.clone() }.encode()).is_err());
    }
}

/// As Python's `struct` packs the table of `docs/formats/store-messages.md`.
const NAMED_HELLO: &str = "\
    5242475203000100ffffffff0000000001010101010101010101010101010101000102030405060708090a0b0c0d0e0f\
    101112131415161718191a1b1c1d1e1f6261636b75702d312e6100000000000000000000000000000000000000000000";

#[test]
fn a_hello_names_the_key_of_a_client_and_no_node_does() {
    let key = KeyName::new("backup-1.a").unwrap();
    let hello = Greeting {
        kind: GreetingKind::Hello,
        sender: None,
        cluster: [1; 16],
        nonce: std::array::from_fn(|index| index as u8),
        proof: [0; 32],
        key: Some(key),
    };
    let bytes = hello.encode();
    assert_eq!(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), NAMED_HELLO);
    assert_eq!(Greeting::decode(&bytes), Ok(hello.clone()));
    assert_eq!(key.to_string(), "backup-1.a");
    let longest = KeyName::new(&"x".repeat(32)).unwrap();
    let named = Greeting { key: Some(longest), ..hello.clone() };
    assert_eq!(Greeting::decode(&named.encode()), Ok(named));
    for name in ["", " ", "a b", "a/b", "\u{e4}", "a\0b", &"x".repeat(33)] {
        assert_eq!(KeyName::new(name), None, "{name:?}");
    }
    // A node has the cluster's key, and no name has zeroes in it.
    assert!(Greeting::decode(&Greeting { sender: Some(ReplicaId(1)), ..hello }.encode()).is_err());
    for at in [64, 66, 90] {
        let mut wrong = bytes;
        wrong[at] = if at == 90 { b'x' } else { 0 };
        assert!(Greeting::decode(&wrong).is_err(), "byte {at}");
    }
}
