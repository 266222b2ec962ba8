//! Values round-trip; arbitrary bytes, also with valid CRCs, are decoded or rejected by name.
#![allow(clippy::unwrap_used)]

use proptest::collection::vec;
use proptest::prelude::*;
use wire_raid::*;

fn level() -> impl Strategy<Value = RaidLevel> {
    prop::sample::select(vec![RaidLevel::Raid0, RaidLevel::Raid1, RaidLevel::Raid5f, RaidLevel::Concat])
}

fn state() -> impl Strategy<Value = MemberState> {
    let states = vec![MemberState::Missing, MemberState::Configured, MemberState::Failed, MemberState::Spare];
    prop::sample::select(states)
}

fn superblock() -> impl Strategy<Value = RaidSuperblock> {
    let numbers = (any::<u64>(), any::<u32>(), any::<u32>(), any::<u64>());
    let members = vec((1..u64::MAX, any::<u32>(), any::<u32>(), state()), 1..256);
    (1..u128::MAX, "[a-zA-Z0-9 ü]{1,31}", numbers, level(), members).prop_map(
        |(uuid, name, numbers, level, members)| {
            let (blocks, block_bytes, strip_blocks, sequence) = numbers;
            let slots = members.len() as u8;
            let member = |(slot, one): (usize, (u64, u32, u32, MemberState))| RaidMember {
                uuid: Uuid::from_u64_pair(one.0, slot as u64),
                data_offset: one.1.into(),
                data_blocks: one.2.into(),
                state: one.3,
                slot: slot as u8,
            };
            let members = members.into_iter().enumerate().map(member).collect();
            let uuid = Uuid::from_u128(uuid);
            RaidSuperblock { uuid, name, blocks, block_bytes, level, strip_blocks, sequence, slots, members }
        },
    )
}

fn page() -> impl Strategy<Value = IntentPage> {
    let numbers = (any::<u128>(), any::<u64>(), any::<u64>(), any::<u64>(), 0..64u32);
    (numbers, vec(any::<bool>(), 0..INTENT_REGIONS_MAX as usize)).prop_map(|(numbers, set)| {
        let (array, sequence, complete_since, generation, region_shift) = numbers;
        let mut bits = vec![0; set.len().div_ceil(64)];
        for (region, _) in set.iter().enumerate().filter(|(_, is_set)| **is_set) {
            bits[region / 64] |= 1 << (region % 64);
        }
        IntentPage {
            array: Uuid::from_u128(array),
            sequence,
            complete_since,
            generation: generation >> 2,
            is_clean: bits.iter().all(|word| *word == 0),
            region_shift,
            regions: set.len() as u32,
            bits,
        }
    })
}

/// A superblock of anything with a valid signature, length and CRC.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let length = bytes.len() as u32;
    bytes[..12].copy_from_slice(b"SPDKRAID\x01\0\0\0");
    bytes[12..16].copy_from_slice(&length.to_le_bytes());
    bytes[16..20].fill(0);
    let zeroes = vec![0; bytes.len()];
    let crc = codec::crc32c(&bytes) ^ codec::crc32c(&zeroes);
    bytes[16..20].copy_from_slice(&crc.to_le_bytes());
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn superblocks_round_trip(superblock in superblock()) {
        let bytes = superblock.encode();
        prop_assert_eq!(RaidSuperblock::length(&bytes), Ok(bytes.len()));
        prop_assert_eq!(RaidSuperblock::decode(&bytes), Ok(superblock));
    }

    #[test]
    fn a_changed_byte_is_found(superblock in superblock(), at in any::<prop::sample::Index>(), xor in 1..=255u8) {
        let mut bytes = superblock.encode();
        let at = at.index(bytes.len());
        bytes[at] ^= xor;
        prop_assert!(RaidSuperblock::decode(&bytes).is_err(), "byte {}", at);
    }

    #[test]
    fn pages_round_trip_where_they_belong(page in page(), at in any::<prop::sample::Index>(), xor in 1..=255u8) {
        let [here, there] = INTENT_OFFSETS;
        let mut bytes = page.encode(here);
        prop_assert!(IntentPage::decode(&bytes, there).is_err());
        prop_assert_eq!(IntentPage::decode(&bytes, here), Ok(page));
        let at = at.index(bytes.len());
        bytes[at] ^= xor;
        prop_assert!(IntentPage::decode(&bytes, here).is_err(), "byte {}", at);
    }

    #[test]
    fn any_bytes_are_decoded_or_rejected(bytes in vec(any::<u8>(), 0..700), small in vec(0..3u8, 256..1024)) {
        _ = RaidSuperblock::decode(&bytes);
        _ = IntentPage::decode(&bytes, 0);
        if let Ok(superblock) = RaidSuperblock::decode(&sealed(small)) {
            prop_assert!(superblock.members.iter().all(|member| member.slot < superblock.slots));
            prop_assert_eq!(RaidSuperblock::decode(&superblock.encode()), Ok(superblock));
        }
    }
}

/// A field of a valid superblock with a wrong value, and the error that names it.
#[test]
fn each_field_that_is_wrong_is_named() {
    let member = |slot: u8| RaidMember {
        uuid: Uuid::from_u128(u128::from(slot) + 2),
        data_offset: 2048,
        data_blocks: 8,
        state: MemberState::Configured,
        slot,
    };
    let superblock = RaidSuperblock {
        uuid: Uuid::from_u128(1),
        name: "r".into(),
        blocks: 8,
        block_bytes: 512,
        level: RaidLevel::Raid1,
        strip_blocks: 0,
        sequence: 1,
        slots: 2,
        members: vec![member(0), member(1)],
    };
    let valid = superblock.encode();
    assert!(RaidSuperblock::decode(&sealed(valid.clone())).is_ok());
    for (range, value, expected) in [
        (24..40, 0, "the UUID of the array at byte 24 has the value 0x0"),
        (40..104, b'x', "the name of the array: it has no end"),
        (40..41, 0, "the name of the array: it is empty"),
        (40..41, 0xff, "the name of the array: it is not UTF-8"),
        (116..117, 7, "the level of the array at byte 116 has the value 0x7"),
        (136..137, 0, "the number of members at byte 136 has the value 0x0"),
        (255..256, 3, "the length of the list of members at byte 255 has the value 0x3"),
        (256..272, 0, "the UUID of a member at byte 256 has the value 0x0"),
        (280..288, 255, "the size of a member's data at byte 280 has the value 0xffffffffffffffff"),
        (288..289, 4, "the state of a member at byte 288 has the value 0x4"),
        (296..297, 2, "the slot of a member at byte 296 has the value 0x2"),
        (360..361, 0, "the slot of a member, which another has at byte 360 has the value 0x0"),
    ] {
        let mut bytes = valid.clone();
        bytes[range].fill(value);
        assert_eq!(RaidSuperblock::decode(&sealed(bytes)).unwrap_err().to_string(), expected);
    }
    for (at, value, expected) in [
        (0, 0, "the signature of the superblock at byte 0 has the value 0x50444b52414944"),
        (8, 2, "the major version of the superblock at byte 8 has the value 0x2"),
        (14, 1, "the length of the superblock at byte 12 has the value 0x10180"),
        (16, 0, "the CRC of the superblock at byte 16 has the value "),
    ] {
        let mut bytes = valid.clone();
        bytes[at] = value;
        let error = RaidSuperblock::decode(&bytes).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let short = RaidSuperblock::decode(&valid[..300]).unwrap_err();
    assert_eq!(short.to_string(), "the superblock is 300 bytes long, but 384 are needed");
}
