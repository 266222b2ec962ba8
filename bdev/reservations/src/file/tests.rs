use proptest::prelude::*;

use super::*;

const DEVICE: Uuid = Uuid::from_bytes([0xd; 16]);

fn state() -> ReservationState {
    ReservationState {
        generation: 0,
        reservation: Some(ActiveReservation {
            kind: ReservationType::WriteExclusiveRegistrants,
            holder: Registrant::nvme_host([2; 16]),
        }),
        registrations: vec![
            Registration { registrant: Registrant::nvme_host([1; 16]), key: 0xabc },
            Registration { registrant: Registrant::nvme_host([2; 16]), key: u64::MAX },
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
    let holder = Registrant::nvme_host([1; 16]);
    let reservation = Some(ActiveReservation { kind: ReservationType::WriteExclusiveAll, holder });
    assert_eq!(decode_file(text.as_bytes(), DEVICE), Ok(ReservationState { reservation, ..state() }));
}

#[test]
fn a_file_round_trips_and_a_truncated_one_is_rejected() {
    let bytes = encode_file(&state(), DEVICE);
    assert_eq!(decode_file(&bytes, DEVICE), Ok(state()));
    // The last byte is a newline.
    for length in 0..bytes.len() - 1 {
        assert!(decode_file(&bytes[..length], DEVICE).is_err(), "{length} bytes");
    }
    // Without PTPL nothing is persisted.
    let volatile = encode_file(&ReservationState { persistent: false, ..state() }, DEVICE);
    assert_eq!(decode_file(&volatile, DEVICE), Ok(ReservationState::default()));
    assert!(!String::from_utf8(volatile).unwrap().contains("abc"));
}

#[test]
fn errors_name_the_invalid_field() {
    let text = String::from_utf8(encode_file(&state(), DEVICE)).unwrap();
    let with = |from: &str, to: &str| {
        assert!(text.contains(from), "{text}");
        decode_file(text.replace(from, to).as_bytes(), DEVICE).unwrap_err()
    };
    let other = Uuid::from_bytes([0xe; 16]);
    assert!(decode_file(text.as_bytes(), other).unwrap_err().contains("belong to device"));
    assert!(with("\"rtype\":3", "\"rtype\":7").contains("rtype 7 is not"));
    assert!(with("\"rtype\":3", "\"rtype\":\"x\"").contains("rtype is not a number"));
    assert!(with("\"rtype\":3", "\"magic\":3").contains("unknown field 'magic'"));
    assert!(with("\"crkey\":18446744073709551615", "\"crkey\":5").contains("not the key of a registrant"));
    assert!(with("\"rkey\":2748", "\"rkey\":0").contains("has no key"));
    assert!(
        with(&format!("{}", Uuid::from_bytes([1; 16])), &format!("{}", Uuid::from_bytes([2; 16])))
            .contains("twice")
    );
    assert!(decode_file(&vec![b' '; FILE_BYTES_MAX + 1], DEVICE).unwrap_err().contains("longer"));
    assert!(decode_file(b"", DEVICE).is_err() && decode_file(b"[]", DEVICE).is_err());
}

proptest! {
    #[test]
    fn arbitrary_bytes_decode_or_fail_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode_file(&bytes, DEVICE);
    }

    #[test]
    fn any_state_round_trips(
        hosts in prop::collection::btree_map(any::<[u8; 16]>(), 1..=u64::MAX, 0..20),
        nexuses in prop::collection::btree_map(("[a-z\"\\\\é]{1,9}", "[a-z,]{1,9}"), 1..=u64::MAX, 1..20),
        kind in prop::option::of(prop::sample::select(&ReservationType::ALL[..])),
        which in any::<prop::sample::Index>(),
    ) {
        let hosts = hosts.into_iter().map(|(id, key)| (Registrant::nvme_host(id), key));
        let nexuses = nexuses
            .into_iter()
            .map(|((initiator, target), key)| (Registrant::scsi_nexus(&initiator, &target).unwrap(), key));
        let registrations: Vec<_> =
            hosts.chain(nexuses).map(|(registrant, key)| Registration { registrant, key }).collect();
        let holder = which.get(&registrations).registrant.clone();
        let reservation = kind.map(|kind| ActiveReservation { kind, holder });
        let state = ReservationState { generation: 0, reservation, registrations, persistent: true };
        prop_assert_eq!(decode_file(&encode_file(&state, DEVICE), DEVICE), Ok(state));
    }
}

#[test]
fn the_largest_file_is_decoded() {
    let name = |index: usize| format!("{index:04}{}", "\"".repeat(252));
    let registration = |index| {
        let registrant = Registrant::scsi_nexus(&name(index), &name(0)).unwrap();
        Registration { registrant, key: u64::MAX }
    };
    let registrations = (0..REGISTRANTS_MAX).map(registration).collect();
    let state = ReservationState { registrations, reservation: None, persistent: true, generation: 0 };
    let bytes = encode_file(&state, DEVICE);
    assert!(bytes.len() <= FILE_BYTES_MAX, "{}", bytes.len());
    assert_eq!(decode_file(&bytes, DEVICE), Ok(state));
}
