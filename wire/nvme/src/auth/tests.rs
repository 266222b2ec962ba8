use proptest::prelude::*;

use super::*;

fn hex(text: &str) -> Vec<u8> {
    let digits: String = text.split_whitespace().collect();
    (0..digits.len() / 2).map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap()).collect()
}

/// The bytes are those of the figures of Base 2.0, section 8.13.5, field by field.
#[test]
fn messages_have_the_specified_bytes() {
    let (c1, c2, r1) = ([0xc1; 32], [0xc2; 32], [0xa1; 32]);
    let table = [
        (
            AuthBody::Negotiate(AuthNegotiate {
                concatenation: 0,
                protocols: vec![AuthProtocol { id: 1, hashes: vec![1, 2, 3], groups: vec![0, 1] }],
            }),
            format!("0000 0000 3412 00 01  01 00 03 02 010203{} 0001{}", "00".repeat(27), "00".repeat(28)),
        ),
        (
            AuthBody::Challenge(AuthChallenge {
                hash: AuthHash::Sha256,
                group: DhGroup::Null,
                sequence: 0x0403_0201,
                challenge: &c1,
                dh_value: &[],
            }),
            format!("0101 0000 3412 20 00 01 00 0000 01020304 {}", "c1".repeat(32)),
        ),
        (
            AuthBody::Reply(AuthReply { sequence: 7, response: &r1, challenge: Some(&c2), dh_value: &[] }),
            format!("0102 0000 3412 20 00 01 00 0000 07000000 {}{}", "a1".repeat(32), "c2".repeat(32)),
        ),
        (
            AuthBody::Reply(AuthReply { sequence: 0, response: &r1, challenge: None, dh_value: &[] }),
            format!("0102 0000 3412 20 00 00 00 0000 00000000 {}{}", "a1".repeat(32), "00".repeat(32)),
        ),
        (
            AuthBody::Success1(32, Some(&r1)),
            format!("0103 0000 3412 20 00 01 00000000000000 {}", "a1".repeat(32)),
        ),
        (AuthBody::Success1(48, None), "0103 0000 3412 30 00 00 00000000000000".into()),
        (AuthBody::Success2, "0104 0000 3412 00000000000000000000".into()),
        (AuthBody::Failure1(AuthFailure::Failed), "00f1 0000 3412 01 01".into()),
        (AuthBody::Failure2(AuthFailure::IncorrectMessage), "00f0 0000 3412 01 07".into()),
    ];
    for (body, bytes) in table {
        let message = AuthMessage { transaction: 0x1234, body };
        let bytes = hex(&bytes);
        assert_eq!(message.encode(), bytes, "{message:?}");
        assert_eq!(AuthMessage::decode(&bytes), Ok(message.clone()));
        assert_eq!(AuthMessageKind::of(&bytes), Some(message.kind()));
        assert_eq!(transaction_of(&bytes), 0x1234);
        // A message is valid in a larger buffer, and not without its last byte.
        assert_eq!(AuthMessage::decode(&[&bytes[..], &[0; 9]].concat()), Ok(message));
        assert!(AuthMessage::decode(&bytes[..bytes.len() - 1]).is_err());
    }
}

#[test]
fn commands_have_the_specified_bytes() {
    let send = AuthCommand::new(0x1234).to_send().to_bytes();
    // SGLs describe data over fabrics.
    assert_eq!(send[..5], [0x7f, 0x40, 0, 0, 0x05]);
    assert_eq!(send[40..48], [0, 1, 1, 0xe9, 0x34, 0x12, 0, 0]);
    let receive = AuthCommand::new(4096).to_receive();
    assert_eq!(receive.to_bytes()[4], 0x06);
    assert_eq!(AuthCommand::from_sqe(&receive), AuthCommand::new(4096));
    assert!(AuthCommand::from_sqe(&receive).is_of_nvme());
    assert!(!AuthCommand { protocol: 0xea, ..AuthCommand::new(1) }.is_of_nvme());
}

#[test]
fn values_that_contradict_each_other_are_errors() {
    let challenge = AuthBody::Challenge(AuthChallenge {
        hash: AuthHash::Sha256,
        group: DhGroup::Ffdhe2048,
        sequence: 1,
        challenge: &[1; 32],
        dh_value: &[2; 256],
    });
    let good = AuthMessage { transaction: 1, body: challenge }.encode();
    // Length of the hash; another hash; an unknown one; another group; an unknown one; length of the value.
    for (at, value) in [(6, 48), (6, 0), (8, 2), (8, 0), (8, 4), (9, 0), (9, 2), (9, 6), (10, 1), (11, 3)] {
        let mut bytes = good.clone();
        bytes[at] = value;
        bytes.extend([0; 2048]);
        assert!(AuthMessage::decode(&bytes).is_err(), "byte {at} is {value}");
    }
    for bytes in ["0105 0000 0000 0000", "00f2 0000 0000 0101", "00f1 0000 0000 0201", "00f1 0000 0000 0108"]
    {
        assert!(AuthMessage::decode(&hex(bytes)).is_err(), "{bytes}");
    }
    let mut negotiate = hex(&format!("0000 0000 0000 0001 0100 1e1e {}", "00".repeat(60)));
    assert!(AuthMessage::decode(&negotiate).is_ok());
    negotiate[10] = 31;
    assert!(AuthMessage::decode(&negotiate).is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_an_error_or_round_trip(
        start in prop::sample::select(vec![[0, 0], [1, 1], [1, 2], [1, 3], [1, 4], [0, 0xf0], [0, 0xf1], [9, 9]]),
        length in prop::sample::select(vec![32u8, 48, 64, 0, 255]),
        dh in prop::sample::select(vec![0u16, 256, 384, 512, 768, 1024, 7]),
        mut rest in prop::collection::vec(prop_oneof![Just(0), Just(1), any::<u8>()], 0..1400),
    ) {
        if rest.len() > 12 {
            rest[..2].copy_from_slice(&start);
            rest[6] = length;
            rest[10..12].copy_from_slice(&dh.to_le_bytes());
        }
        if let Ok(message) = AuthMessage::decode(&rest) {
            let encoded = message.encode();
            prop_assert!(encoded.len() <= rest.len());
            prop_assert_eq!(AuthMessage::decode(&encoded), Ok(message));
        }
    }
}
