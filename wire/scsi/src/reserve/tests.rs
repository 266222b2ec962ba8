use proptest::prelude::*;

use super::*;

#[test]
fn parameter_data_has_the_fields_of_spc_4() {
    let expected = [0, 0, 0, 9, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(encode_keys(9, [1, 0x0102_0304_0506_0708].into_iter()), expected);
    assert_eq!(encode_reservation(2, None), [0, 0, 0, 2, 0, 0, 0, 0]);
    let held = encode_reservation(2, Some((5, PersistentType::ExclusiveAccessRegistrants)));
    assert_eq!(held[4..], [0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 6, 0, 0]);
    let all =
        ReserveCapabilities { names_ports: true, all_target_ports: true, can_persist: true, persists: true };
    assert_eq!(all.encode(), [0, 8, 0x0d, 0x91, 0xea, 1, 0, 0]);
    let one = FullStatus {
        key: 3,
        all_target_ports: true,
        held: Some(PersistentType::WriteExclusive),
        relative_port: 2,
        transport_id: vec![5, 0, 0, 0],
    };
    let expected = [
        [0, 0, 0, 1, 0, 0, 0, 28].as_slice(),
        &[0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 3, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 4, 5, 0, 0, 0],
    ];
    assert_eq!(encode_full_status(1, &[one]), expected.concat());
}

#[test]
fn transport_ids_of_iscsi_are_ports_or_devices() {
    let port = TransportId::IscsiPort("iqn.a,i,0x00023d000001");
    let mut bytes = port.encode();
    assert_eq!((&bytes[..4], bytes.len()), (&[0x45, 0, 0, 24][..], 28));
    assert_eq!(&bytes[4..28], b"iqn.a,i,0x00023d000001\0\0");
    bytes.push(7);
    assert_eq!(TransportId::decode(&bytes), Ok((port, &[7][..])));
    let device = TransportId::IscsiDevice("iqn.a");
    assert_eq!(device.encode().len(), 24);
    assert_eq!(TransportId::decode(&device.encode()), Ok((device, &[][..])));
    // Another protocol, another format, no end, cut off.
    for (at, value) in [(0, 0x46), (0, 0x05), (0, 0x85), (3, 25), (3, 28), (26, b'x')] {
        let mut invalid = port.encode();
        invalid[at] = value;
        if at == 26 {
            invalid[27] = value;
        }
        assert!(TransportId::decode(&invalid).is_err(), "{at} {value:#x}");
    }
    let list = [&[0; 24][..], &[0, 0, 0, 28], &port.encode()].concat();
    assert_eq!(transport_ids(&list), Ok(&port.encode()[..]));
    assert!(transport_ids(&list[..27]).is_err() && transport_ids(&list[..50]).is_err());
}

#[test]
fn a_move_names_a_port_and_srp_ports_have_identifiers() {
    let transport_id = TransportId::SrpPort(*b"0123456789abcdef").encode();
    assert_eq!(transport_id, [&[4, 0, 0, 0, 0, 0, 0, 0], b"0123456789abcdef".as_slice()].concat());
    let list = ReserveMoveList {
        key: 1,
        new_key: 0x0203,
        unregister: true,
        persists: true,
        relative_port: 0x0405,
        transport_id: &transport_id,
    };
    let bytes = list.encode();
    let header = [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 2, 3, 0, 3, 4, 5, 0, 0, 0, 24];
    assert_eq!(bytes[..24], header);
    assert_eq!(ReserveMoveList::decode(&bytes), Ok(list));
    assert!(ReserveMoveList::decode(&bytes[..47]).is_err() && ReserveMoveList::decode(&bytes[..23]).is_err());
}

proptest! {
    #[test]
    fn lists_round_trip_and_any_bytes_are_decoded_or_rejected(
        key: u64,
        action_key: u64,
        names_ports: bool,
        all_target_ports: bool,
        persists: bool,
        bytes in prop::collection::vec(any::<u8>(), 0..80),
    ) {
        let list = ReserveOutList { key, action_key, names_ports, all_target_ports, persists };
        prop_assert_eq!(ReserveOutList::decode(&list.encode()), Ok(list));
        prop_assert_eq!(ReserveOutList::decode(&bytes).is_ok(), bytes.len() >= 24);
        let _ = transport_ids(&bytes);
        if let Ok((id, rest)) = TransportId::decode(&bytes) {
            prop_assert!(rest.len() + 24 <= bytes.len());
            let _ = id.encode();
        }
    }
}
