//! The tables that sgdisk wrote, as sfdisk reads them.
#![allow(clippy::unwrap_used)]

use std::io::Read;
use std::path::Path;

use serde_json::Value;
use wire_gpt::*;

const BYTES: usize = 64 << 20;

fn path(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn image(name: &str) -> Vec<u8> {
    let file = std::fs::File::open(path(&format!("{name}.img.zst"))).unwrap();
    let mut image = ruzstd::decoding::StreamingDecoder::new(std::io::BufReader::new(file)).unwrap();
    let mut bytes = Vec::new();
    image.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes.len(), BYTES);
    bytes
}

fn sfdisk(name: &str) -> Value {
    let text = std::fs::read(path(&format!("{name}.sfdisk.json"))).unwrap();
    serde_json::from_slice::<Value>(&text).unwrap()["partitiontable"].clone()
}

fn table(image: &[u8], lba: u64, block: usize) -> Result<GptTable, DecodeError> {
    let at = |lba: u64| lba as usize * block;
    let header = GptHeader::decode(&image[at(lba)..at(lba + 1)])?;
    header.check_on(lba, (BYTES / block) as u64, block as u32)?;
    GptTable::decode(&header, &image[at(header.entries_lba)..])
}

#[test]
fn tables_of_sgdisk_are_decoded_as_sfdisk_shows_them_and_encoded_to_the_same_bytes() {
    for (name, block) in [("gpt512", 512), ("gpt4096", 4096)] {
        let (image, shown) = (image(name), sfdisk(name));
        let last = (BYTES / block) as u64 - 1;
        let mbr = ProtectiveMbr::decode(&image).unwrap();
        assert!(mbr.covers(last + 1) && !mbr.covers(last), "{name}");
        let [primary, backup] = [PRIMARY_LBA, last].map(|lba| table(&image, lba, block).unwrap());
        assert_eq!((primary.header.alternate_lba, backup.header.alternate_lba), (last, 1));
        assert_eq!(primary.entries, backup.entries);
        assert_eq!(shown["id"], primary.header.disk_guid.to_string());
        assert_eq!(shown["firstlba"], primary.header.first_usable_lba);
        assert_eq!(shown["lastlba"], primary.header.last_usable_lba);
        let listed = shown["partitions"].as_array().unwrap();
        assert_eq!(listed.len(), primary.entries.len());
        for (shown, (index, entry)) in listed.iter().zip(&primary.entries) {
            assert!(shown["node"].as_str().unwrap().ends_with(&(index + 1).to_string()), "{shown}");
            assert_eq!((&shown["start"], &shown["size"]), (&entry.first_lba.into(), &entry.blocks().into()));
            assert_eq!(shown["type"], entry.type_guid.to_string().to_uppercase());
            assert_eq!(shown["uuid"], entry.unique_guid.to_string().to_uppercase());
            assert_eq!(shown["name"], entry.name_text());
        }
        assert_eq!(primary.valid_entries(), (primary.entries.clone(), vec![]));
        for table in [primary, backup] {
            let (header, array) = table.encode();
            assert_eq!(header, table.header);
            let at = header.lba as usize * block;
            assert_eq!(header.encode(), image[at..at + HEADER_BYTES]);
            let at = header.entries_lba as usize * block;
            assert_eq!(array, image[at..at + array.len()]);
        }
    }
    let mut recorded = image("gpt512")[446..512].to_vec();
    // Cylinder, head and sector of the end, which nothing reads: here those that mean that it has none.
    recorded[5..8].fill(0xff);
    assert_eq!(ProtectiveMbr::of(131_072).encode()[446..], recorded);
}

#[test]
fn what_is_broken_in_an_image_is_named() {
    let of = |name: &str, lba| table(&image(name), lba, 512).unwrap_err().to_string();
    assert_eq!(of("gpt512-primary-broken", 1), "the CRC of the header at byte 16 has the value 0x58585858");
    assert!(table(&image("gpt512-primary-broken"), 131_071, 512).is_ok());
    for lba in [1, 131_071] {
        assert!(of("gpt512-both-broken", lba).starts_with("the CRC of the header"));
        assert!(of("gpt512-entry-crc", lba).starts_with("the CRC of the entries"));
    }
    let error = ProtectiveMbr::decode(&image("gpt512-no-mbr")).unwrap_err().to_string();
    assert_eq!(error, "the signature of the MBR at byte 510 has the value 0x0");
}

#[test]
fn each_wrong_field_of_an_mbr_is_named() {
    let good = ProtectiveMbr { blocks: 99 }.encode();
    for (at, value, message) in [
        (510, 0, "the signature of the MBR at byte 510 has the value 0xaa00"),
        (450, 0x83, "the type of the MBR's partition at byte 450 has the value 0x83"),
        (454, 2, "the start of the protective partition at byte 454 has the value 0x2"),
    ] {
        let mut bytes = good;
        bytes[at] = value;
        assert_eq!(ProtectiveMbr::decode(&bytes).unwrap_err().to_string(), message);
    }
    let error = ProtectiveMbr::decode(&good[..511]).unwrap_err().to_string();
    assert_eq!(error, "the MBR is 511 bytes long, but 512 are needed");
    // In another place than the first.
    let mut moved = good;
    moved.copy_within(446..462, 494);
    moved[446..462].fill(0);
    assert_eq!(ProtectiveMbr::decode(&moved), Ok(ProtectiveMbr { blocks: 99 }));
    assert!(ProtectiveMbr::of(u64::MAX).covers(7) && ProtectiveMbr::of(1 << 32).covers(1 << 40));
}

fn header() -> GptHeader {
    GptHeader {
        lba: 1,
        alternate_lba: 999,
        first_usable_lba: 34,
        last_usable_lba: 966,
        disk_guid: Uuid::from_u128(7),
        entries_lba: 2,
        entry_count: 128,
        entry_bytes: 128,
        entries_crc: 0,
    }
}

/// With a valid CRC.
fn changed(at: usize, value: u32) -> Vec<u8> {
    let mut bytes = header().encode().to_vec();
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    bytes[16..20].fill(0);
    let crc = codec::crc32(&bytes);
    bytes[16..20].copy_from_slice(&crc.to_le_bytes());
    bytes
}

#[test]
fn each_wrong_field_of_a_header_is_named() {
    for (at, value, message) in [
        (0, 0, "the signature of the header at byte 0 has the value 0x5452415000000000"),
        (8, 0x2_0000, "the revision of the header at byte 8 has the value 0x20000"),
        (12, 91, "the size of the header at byte 12 has the value 0x5b"),
        (12, 93, "the size of the header at byte 12 has the value 0x5d"),
        (12, u32::MAX, "the size of the header at byte 12 has the value 0xffffffff"),
        (48, 33, "the last usable block at byte 48 has the value 0x21"),
        (80, 2049, "the number of entries at byte 80 has the value 0x801"),
        (80, u32::MAX, "the number of entries at byte 80 has the value 0xffffffff"),
        (84, 0, "the size of an entry at byte 84 has the value 0x0"),
        (84, 64, "the size of an entry at byte 84 has the value 0x40"),
        (84, 192, "the size of an entry at byte 84 has the value 0xc0"),
        (84, 1 << 31, "the size of an entry at byte 84 has the value 0x80000000"),
    ] {
        assert_eq!(GptHeader::decode(&changed(at, value)).unwrap_err().to_string(), message);
    }
    let mut bytes = header().encode();
    bytes[40] = 35;
    let error = GptHeader::decode(&bytes).unwrap_err().to_string();
    assert!(error.starts_with("the CRC of the header at byte 16 has the value 0x"), "{error}");
    let error = GptHeader::decode(&bytes[..91]).unwrap_err().to_string();
    assert_eq!(error, "the header is 91 bytes long, but 92 are needed");
    assert_eq!(GptHeader::decode(&changed(80, 2048)).unwrap().entries_bytes(), ENTRIES_BYTES_MAX);
}

#[test]
fn a_header_that_is_not_of_its_device_names_the_field() {
    assert_eq!(header().check_on(1, 1000, 512), Ok(()));
    let check = |header: GptHeader| header.check_on(1, 1000, 512).unwrap_err().to_string();
    for (header, message) in [
        (GptHeader { lba: 2, ..header() }, "the block of the header at byte 24 has the value 0x2"),
        (
            GptHeader { last_usable_lba: 1000, ..header() },
            "the last usable block at byte 48 has the value 0x3e8",
        ),
        (
            GptHeader { first_usable_lba: 1, ..header() },
            "the first usable block at byte 40 has the value 0x1",
        ),
        (
            GptHeader { first_usable_lba: 0, ..header() },
            "the first usable block at byte 40 has the value 0x0",
        ),
        (
            GptHeader { entries_lba: 3, ..header() },
            "the first block of the entries at byte 72 has the value 0x3",
        ),
        (
            GptHeader { entries_lba: 0, ..header() },
            "the first block of the entries at byte 72 has the value 0x0",
        ),
        (
            GptHeader { entries_lba: 969, ..header() },
            "the first block of the entries at byte 72 has the value 0x3c9",
        ),
        (
            GptHeader { entries_lba: u64::MAX, ..header() },
            "the first block of the entries at byte 72 has the value 0xffffffffffffffff",
        ),
    ] {
        assert_eq!(check(header), message);
    }
    // A primary table whose entries are at the end.
    assert_eq!(GptHeader { entries_lba: 968, ..header() }.check_on(1, 1000, 512), Ok(()));
}

#[test]
fn partitions_that_overlap_or_are_outside_are_not_valid() {
    let entry = |first_lba, last_lba| GptEntry {
        type_guid: PartitionType::SPDK.0,
        unique_guid: Uuid::from_u128(u128::from(first_lba)),
        first_lba,
        last_lba,
        attributes: 0,
        name: [0; NAME_UNITS],
    };
    let ranges =
        [(34, 40), (41, 50), (50, 50), (33, 33), (960, 967), (60, 59), (100, 200), (110, 120), (121, 130)];
    let entries = (3..).zip(ranges.map(|(first, last)| entry(first, last))).collect();
    let (valid, rest) = GptTable { header: header(), entries }.valid_entries();
    assert_eq!(valid, [(3, entry(34, 40))]);
    assert_eq!(rest, [4, 5, 6, 7, 8, 9, 10, 11]);
    assert_eq!((entry(60, 59).blocks(), entry(0, u64::MAX).blocks()), (None, None));
}

#[test]
fn types_have_names_and_guids() {
    assert_eq!(PartitionType::parse("SPDK"), Some(PartitionType::SPDK));
    assert_eq!(PartitionType::parse("7C5222BD-8F5D-4087-9C00-BF9843C7B58C"), Some(PartitionType::SPDK_OLD));
    let linux = "0fc63daf-8483-4772-8e79-3d69d8477de4";
    assert_eq!(PartitionType::parse("linux").unwrap().0.to_string(), linux);
    for text in ["", "linu", "all", "00000000-0000-0000-0000-000000000000", "0fc63daf"] {
        assert_eq!(PartitionType::parse(text), None, "{text}");
    }
    assert!(PartitionType::names().all(|name| PartitionType::parse(name).is_some()));
}
