//! Values round-trip; arbitrary bytes, also with a valid checksum, are decoded or rejected.
#![allow(clippy::unwrap_used)]

use codec::Crc32c;
use proptest::prelude::*;
use wire_store::*;

/// Gives bytes the head that makes decoders look at the rest.
fn sealed(mut bytes: Vec<u8>, magic: &[u8; 4]) -> Vec<u8> {
    bytes[..4].copy_from_slice(magic);
    bytes[4..6].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    checksummed(bytes)
}

fn checksummed(mut bytes: Vec<u8>) -> Vec<u8> {
    let mut checksum = Crc32c::new();
    checksum.update(&bytes[..8]);
    checksum.update(&[0; 4]);
    checksum.update(&bytes[12..]);
    bytes[8..12].copy_from_slice(&checksum.to_bytes());
    bytes
}

/// Mostly zeroes, so that reserved fields often are.
fn sparse(length: usize) -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec((0..length, any::<u8>()), 0..12).prop_map(move |set| {
        let mut bytes = vec![0; length];
        set.into_iter().for_each(|(at, value)| bytes[at] = value);
        bytes
    })
}

proptest! {
    #[test]
    fn whatever_is_decoded_is_encoded_to_the_same_bytes(sector in sparse(512), kind in 0u8..3) {
        let mut with_kind = sector.clone();
        with_kind[6] = kind;
        let place = u32::from_le_bytes(sector[12..16].try_into().unwrap());
        let location = u64::from_le_bytes(sector[16..24].try_into().unwrap());
        let bytes = sealed(sector.clone(), b"RBSB");
        if let Ok(value) = Superblock::decode(&bytes, location) {
            prop_assert_eq!(&value.encode(location)[..], &bytes[..]);
        }
        let mut second = bytes.clone();
        second[4] = 2;
        let second = checksummed(second);
        if let Ok(value) = Superblock::decode(&second, location) {
            prop_assert_eq!(&value.encode(location)[..], &second[..]);
        }
        let bytes = sealed(sector.clone(), b"RBLS");
        if let Ok(value) = LogSuperblock::decode(&bytes, location) {
            prop_assert_eq!(&value.encode(location)[..], &bytes[..]);
        }
        let bytes = sealed(sector.clone(), b"RBDS");
        if let Ok(Some(value)) = DeviceState::decode(&bytes, location) {
            prop_assert_eq!(&value.encode(location)[..], &bytes[..]);
        }
        let bytes = sealed(sector.clone(), b"RBPT");
        if let Ok(value) = PartitionHeader::decode(&bytes, location) {
            prop_assert_eq!(&value.encode(location)[..], &bytes[..]);
        }
        let bytes = sealed(with_kind.clone(), b"RBON");
        if let Ok(Some(value)) = Onode::decode(&bytes, place) {
            prop_assert_eq!(&value.encode(place)[..], &bytes[..]);
        }
        let mut with_sizes = sector;
        with_sizes[48..50].copy_from_slice(&[0, 0x10]);
        with_sizes[56..58].copy_from_slice(&[0, 0x20]);
        with_sizes[88] = kind.min(1);
        with_sizes[84..88].copy_from_slice(&(LogSector::ALL[usize::from(kind) % 2] as u32).to_le_bytes());
        let bytes = sealed(with_sizes, b"RBLH");
        if let Ok(value) = LogHeader::decode(&bytes, place) {
            prop_assert_eq!(&value.encode(place)[..], &bytes[..]);
        }
        let mut second = bytes;
        second[4] = 2;
        let second = checksummed(second);
        if let Ok(value) = LogHeader::decode(&second, place) {
            prop_assert_eq!(&value.encode(place)[..], &second[..]);
        }
        let bytes = sealed(with_kind[..128].to_vec(), b"RBLE");
        let (log, at) = (bytes[104..120].try_into().unwrap(), u64::from_le_bytes(bytes[96..104].try_into().unwrap()));
        if let Ok(value) = EntryHeader::decode(&bytes, log, at) {
            prop_assert_eq!(&value.encode(log, at)[..], &bytes[..]);
        }
        let bytes = sealed(with_kind[..ImageRecord::SIZE].to_vec(), b"RBIM");
        if let Ok(value) = ImageRecord::decode(&bytes) {
            prop_assert_eq!(&value.encode()[..], &bytes[..]);
        }
    }

    #[test]
    fn onodes_round_trip(
        numbers in any::<(u32, u64, u32, u64)>(),
        data in proptest::collection::vec(any::<u8>(), 0..=INLINE_BYTES_MAX),
        written in proptest::collection::vec(0..BLOCKS_PER_OBJECT, 0..50),
        place in any::<u32>(),
    ) {
        let id = ObjectId { group: numbers.0, volume: numbers.1, index: numbers.2, suffix: numbers.3 };
        let mut map = Box::<ObjectBlockMap>::default();
        for block in written {
            map.extents[block / BLOCKS_PER_EXTENT] = 1 + block as u32;
            map.set_written(block, true);
        }
        for content in [OnodeContent::Inline(data.clone()), OnodeContent::Mapped(map.clone())] {
            let onode = Onode { version: numbers.1, epoch: numbers.0, ..Onode::new(id, content) };
            prop_assert_eq!(Onode::decode(&onode.encode(place), place), Ok(Some(onode)));
        }
    }
}
