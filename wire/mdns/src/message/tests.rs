use proptest::prelude::*;

use super::*;

fn name(text: &str) -> DnsName {
    text.parse().unwrap()
}

/// A response with compressed names, byte by byte after RFC 1035, section 4.1.
#[test]
fn compressed_names_are_followed() {
    let mut bytes = vec![0, 0, 0x84, 0, 0, 0, 0, 1, 0, 0, 0, 1];
    bytes.extend(b"\x0a_nvme-disc\x04_tcp\x05local\0");
    bytes.extend([0, 12, 0, 1, 0, 0, 0x11, 0x94, 0, 6]);
    bytes.extend(b"\x03one\xc0\x0c");
    // The instance that the pointer record names.
    bytes.extend([0xc0, 0x2d, 0, 33, 0x80, 1, 0, 0, 0, 120, 0, 11, 0, 0, 0, 0, 0x1f, 0x49]);
    bytes.extend(b"\x02h1\xc0\x1c");
    assert_eq!((bytes[0x2d], bytes[0x1c]), (3, 5));
    let expected = DnsMessage {
        is_response: true,
        questions: Vec::new(),
        answers: vec![DnsRecord {
            name: name("_nvme-disc._tcp.local"),
            ttl_s: 4500,
            flush: false,
            data: RecordData::Pointer(name("one._nvme-disc._tcp.local")),
        }],
        additional: vec![DnsRecord {
            name: name("one._nvme-disc._tcp.local"),
            ttl_s: 120,
            flush: true,
            data: RecordData::Service { host: name("h1.local"), port: 8009 },
        }],
    };
    assert_eq!(DnsMessage::decode(&bytes), Ok(expected.clone()));
    assert_eq!(DnsMessage::decode(&expected.encode()), Ok(expected));
    for length in 0..bytes.len() {
        assert!(DnsMessage::decode(&bytes[..length]).is_err(), "{length} bytes");
    }
}

#[test]
fn pointers_that_do_not_go_backward_are_rejected() {
    let question = |name: &[u8]| [&[0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0], name, &[0, 12, 0, 1]].concat();
    assert!(DnsMessage::decode(&question(b"\x01a\0")).is_ok());
    for bad in
        [&b"\xc0\x0c"[..], b"\xc0\x0e\0\0", b"\x01a\xc0\x0c", b"\x40\0", b"\x80\0", b"\xff\xff", b"\x3fa\0"]
    {
        assert!(DnsMessage::decode(&question(bad)).is_err(), "{bad:x?}");
    }
    // A name of 256 bytes.
    let long = [&[63; 64][..], &[63; 64], &[63; 64], &[62; 63], &[0]].concat();
    assert!(DnsMessage::decode(&question(&long)).is_err());
    let longest = [&[63; 64][..], &[63; 64], &[63; 64], &[61; 62], &[0]].concat();
    assert!(DnsMessage::decode(&question(&longest)).is_ok());
}

#[test]
fn counts_are_bounded() {
    let mut bytes = vec![0; HEADER];
    bytes[4..6].copy_from_slice(&(RECORDS_MAX as u16 + 1).to_be_bytes());
    bytes.extend([0, 0, 1, 0, 1].repeat(RECORDS_MAX + 1));
    assert!(DnsMessage::decode(&bytes).is_err());
    bytes[4..6].copy_from_slice(&(RECORDS_MAX as u16).to_be_bytes());
    assert_eq!(DnsMessage::decode(&bytes).unwrap().questions.len(), RECORDS_MAX);
    assert!(DnsMessage::decode(&vec![0; MESSAGE_BYTES_MAX + 1]).is_err());
    // Other opcodes, response codes and classes.
    assert!(DnsMessage::decode(&[0, 0, 0x08, 0, 0, 0, 0, 0, 0, 0, 0, 0]).is_err());
    assert!(DnsMessage::decode(&[0, 0, 0x80, 3, 0, 0, 0, 0, 0, 0, 0, 0]).is_err());
    let chaos = [&[0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0][..], b"\x01a\0", &[0, 12, 0, 3]].concat();
    assert_eq!(DnsMessage::decode(&chaos), Ok(DnsMessage::default()));
}

#[test]
fn names_are_equal_in_any_case() {
    assert_eq!(name("A.Local."), name("a.local"));
    assert_ne!(name("a.local"), name("a-local"));
    assert!(name("One._tcp.local").is_child_of(&name("_TCP.local")));
    assert!(!name("one.x._tcp.local").is_child_of(&name("_tcp.local")));
    assert!(!name("_tcp.local").is_child_of(&name("_tcp.local")));
    assert_eq!(name("a.b").to_string(), "a.b");
    for bad in ["", ".", "a..b", &"x".repeat(64)] {
        assert!(bad.parse::<DnsName>().is_err(), "{bad}");
    }
}

fn names() -> impl Strategy<Value = DnsName> {
    prop::collection::vec(prop::collection::vec(any::<u8>(), 1..9), 0..5).prop_map(|labels| {
        labels.iter().fold(DnsName::default(), |parent, label| parent.child(label).unwrap())
    })
}

fn records() -> impl Strategy<Value = DnsRecord> {
    let data = prop_oneof![
        any::<u32>().prop_map(|bits| RecordData::Ipv4(bits.into())),
        any::<u128>().prop_map(|bits| RecordData::Ipv6(bits.into())),
        names().prop_map(RecordData::Pointer),
        (names(), any::<u16>()).prop_map(|(host, port)| RecordData::Service { host, port }),
        prop::collection::vec(prop::collection::vec(any::<u8>(), 1..256), 0..4).prop_map(RecordData::Text),
    ];
    (names(), any::<u32>(), any::<bool>(), data).prop_map(|(name, ttl_s, flush, data)| DnsRecord {
        name,
        ttl_s,
        flush,
        data,
    })
}

proptest! {
    #[test]
    fn messages_round_trip(
        is_response: bool,
        questions in prop::collection::vec((names(), any::<u16>()), 0..4),
        answers in prop::collection::vec(records(), 0..4),
        additional in prop::collection::vec(records(), 0..4),
    ) {
        let questions = questions.into_iter().map(|(name, kind)| DnsQuestion { name, kind }).collect();
        let message = DnsMessage { is_response, questions, answers, additional };
        prop_assert_eq!(DnsMessage::decode(&message.encode()), Ok(message));
    }

    #[test]
    fn any_bytes_decode_or_fail(
        mut bytes in prop::collection::vec(prop_oneof![2 => Just(0), 1 => 0..16u8, 1 => any::<u8>()], 0..200),
        counts in prop::array::uniform4(0..3u8),
    ) {
        // Mostly a plausible header.
        for (index, count) in counts.iter().enumerate() {
            if let Some(byte) = bytes.get_mut(4 + 2 * index) {
                *byte = 0;
            }
            if let Some(byte) = bytes.get_mut(5 + 2 * index) {
                *byte = *count;
            }
        }
        if let Ok(message) = DnsMessage::decode(&bytes) {
            let again = DnsMessage::decode(&message.encode()).map(|again| again.answers.len());
            prop_assert_eq!(again, Ok(message.answers.len()));
        }
    }
}
