//! Bytes of QEMU's `docs/interop/vhost-user.rst`, and round trips.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use wire_vhost_user::inflight::{self, InflightDescription};
use wire_vhost_user::*;

#[test]
fn a_message_has_the_layout_of_the_specification() {
    // Request, flags (version 1, need_reply), size.
    let header = VhostUserHeader {
        needs_reply: true,
        ..VhostUserHeader::request(FrontendRequest::SetMemTable.to_wire(), 40)
    };
    assert_eq!(header.to_bytes(), [5, 0, 0, 0, 9, 0, 0, 0, 40, 0, 0, 0]);
    assert_eq!(header.reply(8).to_bytes(), [5, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0]);
    let change = VhostUserHeader::request(BackendRequest::ConfigChange.to_wire(), 0);
    assert_eq!(change.to_bytes(), [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    for version in [0, 2, 3] {
        assert!(VhostUserHeader::decode(&[1, 0, 0, 0, version, 0, 0, 0, 0, 0, 0, 0]).is_err());
    }
}

#[test]
fn a_memory_table_has_the_layout_of_the_specification() {
    let region = MemoryRegion { guest_address: 1, size: 2, user_address: 3, mmap_offset: 4 };
    let bytes = MemoryTable(vec![region]).to_bytes();
    let mut expected = vec![1, 0, 0, 0, 0, 0, 0, 0];
    for value in 1..=4_u64 {
        expected.extend(value.to_le_bytes());
    }
    assert_eq!(bytes, expected);
    assert_eq!(MemoryTable::decode(&bytes), Ok(MemoryTable(vec![region])));
    assert!(MemoryTable::decode(&bytes[..39]).is_err());
    assert!(MemoryTable::decode(&[9, 0, 0, 0, 0, 0, 0, 0]).is_err());
    // A single region has padding instead of a count.
    let single = SingleRegion::from(region);
    assert_eq!(single.to_bytes()[8..], bytes[8..]);
    assert_eq!(single.region(), region);
}

#[test]
fn vrings_have_the_layout_of_the_specification() {
    assert_eq!(VringState { index: 2, value: 256 }.to_bytes(), [2, 0, 0, 0, 0, 1, 0, 0]);
    let address =
        VringAddress { index: 1, flags: vring_flags::LOG, descriptors: 2, used: 3, available: 4, log: 5 };
    let bytes = address.to_bytes();
    assert_eq!(bytes[..8], [1, 0, 0, 0, 1, 0, 0, 0]);
    for (at, value) in [(8, 2), (16, 3), (24, 4), (32, 5)] {
        assert_eq!(bytes[at], value);
    }
    assert_eq!(VringDescriptor { index: 3, is_absent: true }.to_bits(), 0x103);
    assert_eq!(
        ConfigHeader { offset: 32, size: 1, flags: 0 }.to_bytes(),
        [32, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    );
}

#[test]
fn numbers_are_those_of_the_specification() {
    let frontend: Vec<u32> = FrontendRequest::ALL.iter().map(|request| request.to_wire()).collect();
    let known: Vec<u32> = (1..=18).chain([21, 23, 24, 25, 31, 32, 34, 36, 37, 38, 39, 40]).collect();
    assert_eq!(frontend, known);
    for value in 0..64 {
        let request = FrontendRequest::from_wire(value);
        assert_eq!(request.map(FrontendRequest::to_wire), known.contains(&value).then_some(value));
    }
    let features: Vec<u32> = ProtocolFeatures::all().iter().map(|bit| bit.bits().trailing_zeros()).collect();
    assert_eq!(features, [0, 1, 3, 5, 9, 12, 13, 15, 16]);
}

#[test]
fn areas_of_requests_in_flight_have_the_layout_of_the_specification() {
    // struct QueueRegionSplit and DescStateSplit, QueueRegionPacked and DescStatePacked.
    use inflight::{packed, split};
    assert_eq!((split::entry(0), split::entry(1), split::bytes(128)), (16, 32, 2112));
    assert_eq!((packed::entry(0), packed::entry(1), packed::bytes(128)), (32, 64, 4160));
    let description = InflightDescription { mmap_size: 4096, mmap_offset: 0, queues: 2, queue_size: 128 };
    assert_eq!(description.to_bytes()[16..], [2, 0, 128, 0]);
}

proptest! {
    #[test]
    fn arbitrary_bytes_round_trip(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        macro_rules! round_trip {
            ($($type:ident),*) => {$(
                if let Ok(decoded) = $type::decode(&bytes) {
                    prop_assert_eq!(&decoded.to_bytes()[..], &bytes[..$type::SIZE]);
                } else {
                    prop_assert!(bytes.len() < $type::SIZE);
                }
            )*};
        }
        round_trip!(
            MemoryRegion, SingleRegion, LogBase, VringState, VringAddress, U64Payload, ConfigHeader, InflightDescription
        );
        if let Ok(table) = MemoryTable::decode(&bytes) {
            prop_assert_eq!(MemoryTable::decode(&table.to_bytes()), Ok(table));
        }
        if let Some(Ok(header)) = bytes.first_chunk().map(VhostUserHeader::decode) {
            prop_assert_eq!(VhostUserHeader::decode(&header.to_bytes()), Ok(header));
        }
    }

    #[test]
    fn descriptors_round_trip(bits in 0..512_u64) {
        prop_assert_eq!(VringDescriptor::from_bits(bits).to_bits(), bits);
    }
}
