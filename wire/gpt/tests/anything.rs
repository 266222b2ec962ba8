//! Values round-trip; arbitrary bytes, also with valid CRCs, are decoded or rejected.
#![allow(clippy::unwrap_used)]

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use wire_gpt::*;

fn guid() -> impl Strategy<Value = Uuid> {
    (1..u128::MAX).prop_map(Uuid::from_u128)
}

fn entry() -> impl Strategy<Value = GptEntry> {
    (guid(), guid(), any::<u64>(), any::<u64>(), any::<u64>(), vec(any::<u16>(), NAME_UNITS)).prop_map(
        |(type_guid, unique_guid, first_lba, last_lba, attributes, name)| GptEntry {
            type_guid,
            unique_guid,
            first_lba,
            last_lba,
            attributes,
            name: name.try_into().unwrap(),
        },
    )
}

fn header() -> impl Strategy<Value = GptHeader> {
    let lbas = (any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>());
    (lbas, guid(), 0..512u32, 0..3u32).prop_map(|(lbas, disk_guid, entry_count, shift)| GptHeader {
        lba: lbas.0,
        alternate_lba: lbas.1,
        first_usable_lba: lbas.2.min(lbas.3),
        last_usable_lba: lbas.2.max(lbas.3),
        disk_guid,
        entries_lba: lbas.4,
        entry_count,
        entry_bytes: 128 << shift,
        entries_crc: 0,
    })
}

fn table() -> impl Strategy<Value = GptTable> {
    (header(), btree_map(0..512u32, entry(), 0..12)).prop_map(|(header, entries)| GptTable {
        entries: entries.into_iter().filter(|(index, _)| *index < header.entry_count).collect(),
        header,
    })
}

/// A header with a valid CRC of anything.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes[..8].copy_from_slice(b"EFI PART");
    bytes[8..16].copy_from_slice(&[0, 0, 1, 0, 92, 0, 0, 0]);
    bytes[16..20].fill(0);
    let crc = codec::crc32(&bytes[..92]);
    bytes[16..20].copy_from_slice(&crc.to_le_bytes());
    bytes
}

proptest! {
    #[test]
    fn tables_round_trip(table in table()) {
        let (header, array) = table.encode();
        let mut block = header.encode().to_vec();
        block.resize(512, 0);
        prop_assert_eq!(GptHeader::decode(&block), Ok(header));
        prop_assert_eq!(GptTable::decode(&header, &array), Ok(GptTable { header, ..table.clone() }));
        let (valid, rest) = table.valid_entries();
        prop_assert_eq!(valid.len() + rest.len(), table.entries.len());
        for (at, (_, one)) in valid.iter().enumerate() {
            prop_assert!(one.blocks().is_some());
            let is_apart = |other: &GptEntry| other.last_lba < one.first_lba || one.last_lba < other.first_lba;
            prop_assert!(valid[..at].iter().all(|(_, other)| is_apart(other)));
        }
    }

    #[test]
    fn mbrs_round_trip(blocks in any::<u32>()) {
        let mbr = ProtectiveMbr { blocks };
        prop_assert_eq!(ProtectiveMbr::decode(&mbr.encode()), Ok(mbr));
    }

    #[test]
    fn any_bytes_are_decoded_or_rejected(
        bytes in vec(any::<u8>(), 0..700),
        small in vec(0..3u8, 92..512),
        lba in any::<u64>(),
    ) {
        let _ = ProtectiveMbr::decode(&bytes);
        let _ = GptEntry::decode(&bytes);
        for block in [bytes.clone(), small.clone(), sealed(small)] {
            let Ok(header) = GptHeader::decode(&block) else { continue };
            prop_assert!(header.entries_bytes() <= ENTRIES_BYTES_MAX);
            prop_assert_eq!(GptHeader::decode(&header.encode()), Ok(header));
            for blocks in [0, 1, 2, lba, u64::MAX] {
                let _ = header.check_on(lba, blocks, 512);
                let _ = header.check_on(header.lba, blocks, 512);
            }
            let whole = GptHeader { entries_crc: codec::crc32(&bytes), entry_bytes: 128, ..header };
            let _ = GptTable::decode(&header, &bytes);
            let _ = GptTable::decode(&GptHeader { entry_count: bytes.len() as u32 / 128, ..whole }, &bytes);
        }
    }
}
