use proptest::prelude::*;

use super::*;

const DEVICE: Uuid = Uuid::from_bytes([0xd; 16]);

fn state() -> ReservationState {
    ReservationState {
        generation: 0,
        reservation: Some(ActiveReservation {
            kind: ReservationType::WriteExclusiveRegistrants,
            holder: [2; 16],
        }),
        registrations: vec![
            Registration { host: [1; 16], key: 0xabc },
            Registration { host: [2; 16], key: u64::MAX },
        ],
        persistent: true,
    }
}

/// The output of SPDK's `nvmf_ns_reservation_store_json`, in its order and with its whitespace.
#[test]
fn a_file_written_by_spdk_is_decoded() {
    let text = r#"{
  "ptpl": true,
  "rtype": 5,
  "crkey": 2748,
  "bdev_uuid": "0d0d0d0d-0d0d-0d0d-0d0d-0d0d0d0d0d0d",
  "holder_uuid": "",
  "registrants": [
    { "rkey": 2748, "host_uuid": "01010101-0101-0101-0101-010101010101" },
    { "rkey": 18446744073709551615, "host_uuid": "02020202-0202-0202-0202-020202020202" }
  ]
}"#;
    let reservation = Some(ActiveReservation { kind: ReservationType::WriteExclusiveAll, holder: [1; 16] });
    assert_eq!(decode(text.as_bytes(), DEVICE), Ok(ReservationState { reservation, ..state() }));
}

#[test]
fn a_file_round_trips_and_a_truncated_one_is_rejected() {
    let bytes = encode(&state(), DEVICE);
    assert_eq!(decode(&bytes, DEVICE), Ok(state()));
    // The last byte is a newline.
    for length in 0..bytes.len() - 1 {
        assert!(decode(&bytes[..length], DEVICE).is_err(), "{length} bytes");
    }
    // Without PTPL nothing is persisted.
    let volatile = encode(&ReservationState { persistent: false, ..state() }, DEVICE);
    assert_eq!(decode(&volatile, DEVICE), Ok(ReservationState::default()));
    assert!(!String::from_utf8(volatile).unwrap().contains("abc"));
}

#[test]
fn errors_name_the_invalid_field() {
    let text = String::from_utf8(encode(&state(), DEVICE)).unwrap();
    let with = |from: &str, to: &str| {
        assert!(text.contains(from), "{text}");
        decode(text.replace(from, to).as_bytes(), DEVICE).unwrap_err()
    };
    let other = Uuid::from_bytes([0xe; 16]);
    assert!(decode(text.as_bytes(), other).unwrap_err().contains("belong to device"));
    assert!(with("\"rtype\":3", "\"rtype\":7").contains("rtype 7 is not"));
    assert!(with("\"rtype\":3", "\"rtype\":\"x\"").contains("rtype is not a number"));
    assert!(with("\"rtype\":3", "\"magic\":3").contains("unknown field 'magic'"));
    assert!(with("\"crkey\":18446744073709551615", "\"crkey\":5").contains("not the key of a registrant"));
    assert!(with("\"rkey\":2748", "\"rkey\":0").contains("has no key"));
    assert!(
        with(&format!("{}", Uuid::from_bytes([1; 16])), &format!("{}", Uuid::from_bytes([2; 16])))
            .contains("twice")
    );
    assert!(decode(&vec![b' '; BYTES_MAX as usize + 1], DEVICE).unwrap_err().contains("longer"));
    assert!(decode(b"", DEVICE).is_err() && decode(b"[]", DEVICE).is_err());
}

proptest! {
    #[test]
    fn arbitrary_bytes_decode_or_fail_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode(&bytes, DEVICE);
    }

    #[test]
    fn any_state_round_trips(
        hosts in prop::collection::btree_map(any::<[u8; 16]>(), 1..=u64::MAX, 1..20),
        kind in 0..=6u8,
        which in any::<prop::sample::Index>(),
    ) {
        let registrations: Vec<_> = hosts.into_iter().map(|(host, key)| Registration { host, key }).collect();
        let holder = which.get(&registrations).host;
        let reservation = ReservationType::from_wire(kind).map(|kind| ActiveReservation { kind, holder });
        let state = ReservationState { generation: 0, reservation, registrations, persistent: true };
        prop_assert_eq!(decode(&encode(&state, DEVICE), DEVICE), Ok(state));
    }
}

#[test]
fn a_file_is_replaced_atomically() {
    let path = std::env::temp_dir().join(format!("ringbolt-ptpl-{}", std::process::id()));
    assert_eq!(load(&path, DEVICE).unwrap(), ReservationState::default());
    // A leftover temporary file of a killed writer is ignored.
    let mut temporary = path.clone().into_os_string();
    temporary.push(".new");
    std::fs::write(&temporary, "{\"ptpl").unwrap();
    assert_eq!(load(&path, DEVICE).unwrap(), ReservationState::default());
    os::replace_file(&path, 0o666, &encode(&state(), DEVICE)).unwrap();
    assert!(!Path::new(&temporary).exists());
    assert_eq!(load(&path, DEVICE).unwrap(), state());
    std::fs::write(&path, &encode(&state(), DEVICE)[..100]).unwrap();
    let error = load(&path, DEVICE).unwrap_err().to_string();
    assert!(error.contains("does not hold reservations") && error.lines().count() == 1, "{error}");
    std::fs::remove_file(&path).unwrap();
}
