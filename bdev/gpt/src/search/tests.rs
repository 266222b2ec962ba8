use proptest::collection::vec;
use proptest::prelude::*;
use uuid::Uuid;
use wire_gpt::{GptEntry, NAME_UNITS, PartitionType};

use super::*;

const BLOCKS: u64 = 4096;

/// A table of one partition, whose header is in `lba`.
fn table(lba: u64, entries_lba: u64, entry_count: u32) -> GptTable {
    let entry = GptEntry {
        type_guid: PartitionType::SPDK.0,
        unique_guid: Uuid::from_u128(9),
        first_lba: 1024,
        last_lba: 1033,
        attributes: 0,
        name: [0; NAME_UNITS],
    };
    let header = GptHeader {
        lba,
        alternate_lba: BLOCKS - lba,
        first_usable_lba: 1024,
        last_usable_lba: 3000,
        disk_guid: Uuid::from_u128(8),
        entries_lba,
        entry_count,
        entry_bytes: 128,
        entries_crc: 0,
    };
    let entries = if entry_count == 0 { vec![] } else { vec![(entry_count - 1, entry)] };
    let table = GptTable { header, entries };
    GptTable { header: table.encode().0, ..table }
}

/// A disk of 512-byte blocks with a protective MBR.
fn disk(tables: &[&GptTable]) -> Vec<u8> {
    let mut disk = vec![0; BLOCKS as usize * 512];
    disk[..512].copy_from_slice(&ProtectiveMbr::of(BLOCKS).encode());
    for table in tables {
        let (header, array) = table.encode();
        let (at, entries) = (header.lba as usize * 512, header.entries_lba as usize * 512);
        disk[at..at + 92].copy_from_slice(&header.encode());
        disk[entries..entries + array.len()].copy_from_slice(&array);
    }
    disk
}

/// Searches a disk of which the blocks of `bad` cannot be read. Returns what was read too.
fn search_with(disk: &[u8], block_bytes: u32, bad: &[u64]) -> (SearchStep, Vec<(u64, u32)>) {
    let blocks = disk.len() as u64 / u64::from(block_bytes);
    let (mut search, mut step) = TableSearch::new(blocks, block_bytes);
    let mut reads = Vec::new();
    while let SearchStep::Read { lba, blocks: count } = step {
        reads.push((lba, count));
        assert!(count > 0 && count * block_bytes <= 1 << 20 && lba + u64::from(count) <= blocks);
        assert!(reads.len() <= 4, "{reads:?}");
        let at = (lba * u64::from(block_bytes)) as usize;
        let is_bad = bad.iter().any(|bad| (lba..lba + u64::from(count)).contains(bad));
        let data = &disk[at..at + (count * block_bytes) as usize];
        step = search.read((!is_bad).then_some(data));
    }
    (step, reads)
}

fn search(disk: &[u8]) -> (SearchStep, Vec<(u64, u32)>) {
    search_with(disk, 512, &[])
}

fn found(table: &GptTable, primary: Option<TableError>) -> SearchStep {
    SearchStep::Found(FoundTable { table: table.clone(), primary })
}

#[test]
fn a_table_at_the_start_takes_one_read() {
    let primary = table(1, 2, 128);
    assert_eq!(search(&disk(&[&primary])), (found(&primary, None), vec![(0, 64)]));
    let none = table(1, 2, 0);
    assert_eq!(search(&disk(&[&none])).0, found(&none, None));
    let none = table(1, 4096, 0);
    assert_eq!(search(&disk(&[&none])).0, found(&none, None));
}

#[test]
fn entries_that_are_elsewhere_or_many_are_read_too() {
    for (lba, count, blocks) in [(3500, 128, 32), (2, 2048, 512), (40, 128, 32)] {
        let primary = table(1, lba, count);
        assert_eq!(search(&disk(&[&primary])), (found(&primary, None), vec![(0, 64), (lba, blocks)]));
    }
}

#[test]
fn the_backup_table_is_used_where_the_primary_one_is_broken_or_cannot_be_read() {
    let (primary, backup) = (table(1, 900, 128), table(4095, 4063, 128));
    let whole = disk(&[&primary, &backup]);
    let reads = vec![(0, 64), (900, 32), (4032, 64)];
    let (step, seen) = search_with(&whole, 512, &[910]);
    assert_eq!((step, seen), (found(&backup, Some(TableError::Unreadable)), reads));
    let mut broken = whole.clone();
    broken[900 * 512 + 5] ^= 1;
    let error = TableError::Broken(DecodeError::value(
        "the CRC of the entries",
        88,
        primary.header.entries_crc.into(),
    ));
    assert_eq!(search(&broken).0, found(&backup, Some(error)));
    broken[4095 * 512] = 0;
    let SearchStep::Nothing(nothing) = search(&broken).0 else { panic!("both are broken") };
    let text = nothing.to_string();
    assert!(text.starts_with("the primary table: the CRC of the entries at byte 88"), "{text}");
    assert!(text.contains("; the backup table: the signature of the header at byte 0"), "{text}");
    assert_eq!(
        search_with(&whole, 512, &[900, 4095]).0,
        SearchStep::Nothing(NoTable::Broken {
            primary: TableError::Unreadable,
            backup: TableError::Unreadable
        })
    );
    // Its entries may be far from its header.
    let backup = table(4095, 3500, 128);
    let broken = disk(&[&backup]);
    assert_eq!(search(&broken).1, [(0, 64), (4032, 64), (3500, 32)]);
}

#[test]
fn there_is_no_table_without_a_protective_mbr_of_this_device() {
    let mut disk = disk(&[&table(1, 2, 128), &table(4095, 4063, 128)]);
    assert_eq!(search_with(&disk, 512, &[0]), (SearchStep::Nothing(NoTable::Unreadable), vec![(0, 64)]));
    disk[..512].copy_from_slice(&ProtectiveMbr::of(BLOCKS + 1).encode());
    let SearchStep::Nothing(nothing) = search(&disk).0 else { panic!("of another device") };
    assert_eq!(nothing.to_string(), "the protective MBR is of a device with 4097 blocks, not 4096");
    disk[..512].copy_from_slice(&ProtectiveMbr::of(u64::MAX).encode());
    assert!(matches!(search(&disk).0, SearchStep::Found(_)));
    disk[510] = 0;
    assert!(matches!(search(&disk).0, SearchStep::Nothing(NoTable::Unprotected(_))));
    for (blocks, block_bytes) in [(0, 512), (1, 512), (BLOCKS, 520), (BLOCKS, 0), (BLOCKS, 1 << 20)] {
        let step = TableSearch::new(blocks, block_bytes).1;
        assert_eq!(step, SearchStep::Nothing(NoTable::Geometry { blocks, block_bytes }));
    }
}

/// With a valid protective MBR, and headers with valid CRCs.
fn sealed(mut disk: Vec<u8>, block: usize) -> Vec<u8> {
    let blocks = disk.len() / block;
    disk[..512].copy_from_slice(&ProtectiveMbr::of(blocks as u64).encode());
    for lba in [1, blocks - 1] {
        let header = &mut disk[lba * block..lba * block + 92];
        header[..20].copy_from_slice(b"EFI PART\0\0\x01\0\x5c\0\0\0\0\0\0\0");
        let crc = codec::crc32(header);
        header[16..20].copy_from_slice(&crc.to_le_bytes());
    }
    disk
}

proptest! {
    #[test]
    fn any_disk_is_searched_within_its_bounds(
        blocks in 2..100usize,
        block in prop::sample::select(vec![512usize, 1024, 4096]),
        bytes in vec((any::<prop::sample::Index>(), any::<u8>()), 0..64),
        fields in vec((0..4u8, 24..92usize), 0..40),
        bad in vec(0..100u64, 0..3),
    ) {
        let mut disk = vec![0; blocks * block];
        bytes.iter().for_each(|(at, value)| disk[at.index(blocks * block)] = *value);
        for (value, at) in fields {
            disk[block + at] = value;
            disk[(blocks - 1) * block + at] = value;
        }
        search_with(&disk, block as u32, &bad);
        search_with(&sealed(disk, block), block as u32, &bad);
    }
}
