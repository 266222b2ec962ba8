//! The superblocks that SPDK wrote.
#![allow(clippy::unwrap_used)]

use std::io::Read;
use std::path::Path;

use serde_json::{Value, json};
use wire_raid::*;

fn path(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The first 20 KiB of an image.
fn head(name: &str) -> Vec<u8> {
    let file = std::fs::File::open(path(&format!("{name}.img.zst"))).unwrap();
    let image = ruzstd::decoding::StreamingDecoder::new(std::io::BufReader::new(file)).unwrap();
    let mut bytes = Vec::new();
    image.take(20 << 10).read_to_end(&mut bytes).unwrap();
    bytes
}

fn shown(name: &str) -> Value {
    let text = std::fs::read(path(&format!("{name}.json"))).unwrap();
    serde_json::from_slice::<Value>(&text).unwrap()
}

#[test]
fn superblocks_of_spdk_are_decoded_as_it_shows_them_and_encoded_to_the_same_bytes() {
    let arrays = [("raid0", RaidLevel::Raid0), ("raid1", RaidLevel::Raid1), ("concat", RaidLevel::Concat)];
    for (name, level) in arrays {
        let shown = shown(name)["bdev"][0].clone();
        let raid = &shown["driver_specific"]["raid"];
        for index in 0..2 {
            let bytes = head(&format!("{name}-{index}"));
            let superblock = RaidSuperblock::decode(&bytes).unwrap();
            assert_eq!((superblock.level, superblock.sequence, superblock.slots), (level, 1, 2), "{name}");
            assert_eq!(shown["name"], superblock.name);
            assert_eq!(shown["uuid"], superblock.uuid.to_string());
            assert_eq!(shown["num_blocks"], superblock.blocks);
            assert_eq!(shown["block_size"], superblock.block_bytes);
            let strip_kb = superblock.strip_blocks * superblock.block_bytes / 1024;
            assert_eq!(raid["strip_size_kb"], strip_kb);
            for (slot, member) in superblock.members.iter().enumerate() {
                let expected = &raid["base_bdevs_list"][slot];
                assert_eq!((usize::from(member.slot), member.state), (slot, MemberState::Configured));
                assert_eq!(expected["uuid"], json!(member.uuid.to_string()));
                assert_eq!(expected["data_offset"], member.data_offset);
                assert_eq!(expected["data_size"], member.data_blocks);
            }
            let length = RaidSuperblock::length(&bytes).unwrap();
            assert_eq!(superblock.encode(), bytes[..length]);
            assert!(bytes[length..].iter().all(|byte| *byte == 0));
        }
    }
}

#[test]
fn the_superblock_of_the_member_that_stayed_is_newer_and_says_what_is_missing() {
    let [stayed, stale] = [0, 1].map(|index| {
        let bytes = head(&format!("raid1-degraded-{index}"));
        RaidSuperblock::decode(&bytes).unwrap()
    });
    assert_eq!((stayed.sequence, stale.sequence), (2, 1));
    let states = |superblock: &RaidSuperblock| {
        superblock.members.iter().map(|member| member.state).collect::<Vec<MemberState>>()
    };
    assert_eq!(states(&stayed), [MemberState::Configured, MemberState::Missing]);
    assert_eq!(states(&stale), [MemberState::Configured; 2]);
    assert_eq!(stayed.members[1].uuid, stale.members[1].uuid);
}

#[test]
fn spdk_leaves_the_space_of_the_bitmap_empty() {
    let file = std::fs::File::open(path("raid1-0.img.zst")).unwrap();
    let image = ruzstd::decoding::StreamingDecoder::new(std::io::BufReader::new(file)).unwrap();
    let mut bytes = Vec::new();
    image.take(DATA_OFFSET_BYTES_MIN).read_to_end(&mut bytes).unwrap();
    assert!(bytes[512..].iter().all(|byte| *byte == 0));
    for offset in INTENT_OFFSETS {
        let error = IntentPage::decode(&bytes[offset as usize..], offset).unwrap_err();
        assert_eq!(error.to_string(), "the magic of the bitmap at byte 0 has the value 0x0");
    }
}
