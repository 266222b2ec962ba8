//! The layouts of libnvme's `types.h`, which nvme-cli decodes.

use super::*;

#[test]
fn the_header_has_the_layout_of_libnvme() {
    let view = PersistentEventHeader {
        events: 0x0102,
        length_bytes: 0x0304,
        timestamp: event_timestamp(0x1111_2222_3333),
        power_on_hours: 5,
        power_cycles: 6,
        vid: 0x1234,
        ssvid: 0x5678,
        serial: identify::ascii("S1"),
        model: identify::ascii("M1"),
        subnqn: "nqn.2026-11.io.ringbolt:one".to_owned(),
        generation: 7,
        context_port: Some(9),
        supported: 1 << 1 | 1 << 11,
    };
    let mut bytes = [0xa5; 512];
    view.encode(&mut bytes);
    let mut expected = [0; 512];
    let mut set = |at: usize, value: &[u8]| expected[at..at + value.len()].copy_from_slice(value);
    set(0, &[0x0d]);
    set(4, &[2, 1]);
    set(8, &[4, 3]);
    set(16, &[3]);
    set(18, &[0xec, 0x01]);
    set(20, &[0x33, 0x33, 0x22, 0x22, 0x11, 0x11, 0x02, 0]);
    set(28, &[5]);
    set(44, &[6]);
    set(52, &[0x34, 0x12, 0x78, 0x56]);
    set(56, b"S1                  M1                                      ");
    set(116, b"nqn.2026-11.io.ringbolt:one");
    set(372, &[7, 0, 9, 0, 5, 0]);
    set(480, &[2, 8]);
    assert_eq!(bytes, expected);
    assert_eq!(PersistentEventHeader::decode(&bytes), Ok(view));
    for at in [0, 16] {
        let mut other = bytes;
        other[at] ^= 1;
        assert!(PersistentEventHeader::decode(&other).is_err(), "byte {at}");
    }
    bytes[116..372].fill(b'x');
    assert!(PersistentEventHeader::decode(&bytes).is_err(), "the NQN has no end");
}

#[test]
fn events_have_the_layout_of_libnvme() {
    let view = PersistentEvent {
        kind: PersistentEventType::ChangeNamespace,
        cntlid: 0x0102,
        timestamp: 0x0304,
        port: Some(0x0506),
        data_bytes: 48,
    };
    let mut bytes = [0xa5; 24];
    view.encode(&mut bytes);
    let expected = [6, 1, 21, 1, 2, 1, 4, 3, 0, 0, 0, 0, 0, 0, 6, 5, 0, 0, 0, 0, 0, 0, 48, 0];
    assert_eq!(bytes, expected);
    assert_eq!(PersistentEvent::decode(&bytes), Ok(view));
    let none = PersistentEvent { port: None, ..view };
    none.encode(&mut bytes);
    assert_eq!((bytes[3], bytes[14], bytes[15]), (3, 0, 0));
    assert_eq!(PersistentEvent::decode(&bytes), Ok(none));
    for (at, value) in [(0, 0), (0, 0x0f), (2, 20), (3, 2), (20, 1)] {
        let mut other = bytes;
        other[at] = value;
        assert!(PersistentEvent::decode(&other).is_err(), "{value} in byte {at}");
    }
}

#[test]
fn the_data_of_events_has_the_layout_of_libnvme() {
    let reset = ControllerReset { cntlid: 0x0102, power_cycle: 3, power_on_ms: 4, timestamp: 5 };
    let bytes = ControllerReset::encode("0.1.0", Some(&reset));
    assert_eq!(bytes[..10], *b"0.1.0   \x02\x01");
    assert_eq!((bytes.len(), bytes[24], bytes[28], bytes[36]), (44, 3, 4, 5));
    assert_eq!(ControllerReset::decode(&bytes), Ok(Some(reset)));
    assert_eq!(ControllerReset::decode(&ControllerReset::encode("0.1.0", None)), Ok(None));
    assert!(ControllerReset::decode(&bytes[..43]).is_err());

    let change = ChangeNamespace { deleted: true, blocks: 0x0102, shared: true, anagrpid: 3, nsid: 4 };
    let mut bytes = [0xa5; 48];
    change.encode(&mut bytes);
    let mut expected = [0; 48];
    (expected[0], expected[8], expected[9], expected[24], expected[25]) = (1, 2, 1, 2, 1);
    (expected[34], expected[36], expected[44]) = (1, 3, 4);
    assert_eq!(bytes, expected);
    assert_eq!(ChangeNamespace::decode(&bytes), Ok(change));
    bytes[0] = 2;
    assert!(ChangeNamespace::decode(&bytes).is_err());

    let feature = SetFeature { cdw10: 0x0b, cdw11: 0x0102 };
    let mut bytes = [0xa5; 12];
    feature.encode(&mut bytes);
    assert_eq!(bytes, [2, 0, 0, 0, 0x0b, 0, 0, 0, 2, 1, 0, 0]);
    assert_eq!(SetFeature::decode(&bytes), Ok(feature));
    bytes[0] = 3;
    assert!(SetFeature::decode(&bytes).is_err());
}
