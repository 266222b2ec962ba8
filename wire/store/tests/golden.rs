//! Bytes made by another encoder (Python's `struct`, with a bitwise CRC32C of RFC 3720) from the tables of
//! `docs/formats/store.md` and `docs/formats/image-diff.md`. The checksum covers what follows the first 128
//! bytes.
#![allow(clippy::unwrap_used)]

use wire_store::*;

const SUPERBLOCK: &str = "\
    5242534201000000790bd18f000000000000000000000000010101010101010101010101010101010202020202020202\
    0202020202020202030303030303030303030303030303031027000000000000a00f0000000000000200000040000000\
    0300000000000000f40100000000000000000000000000000000000000000000";
const SUPERBLOCK_2: &str = "\
    5242534202000000e648fa14000000000000000000000000010101010101010101010101010101010202020202020202\
    0202020202020202030303030303030303030303030303031027000000000000a00f0000000000000200000040000000\
    0200000028000000282300000000000008080808080808080808080808080808";
const LOG_SUPERBLOCK: &str = "\
    52424c53010000009e13b10a000000000000000000000000010101010101010101010101010101010202020202020202\
    020202020202020208080808080808080808080808080808204e00000000000003030303030303030303030303030303\
    0200000028000000282300000000000000000000000000000000000000000000";
const PARTITION: &str = "\
    5242505401000000147f9d7200000000a10f000000000000030303030303030303030303030303030100000040000000\
    000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000\
    0000000000000000000000000000000000000000000000000000000000000000";
const INLINE_ONODE: &str = "\
    52424f4e0100010088ad811f110000000700000009000000887766554433221105000000000000006400000000000000\
    c80000000000000003000000050000001581e97df4102211000000000000000000000000000000000000000000000000\
    0000000000000000000000000000000000000000000000000000000000000000";
const MAPPED_ONODE: &str = "\
    52424f4e0100020005a64a35110000000700000009000000887766554433221105000000000000006400000000000000\
    c80000000000000003000000000000001581e97df4102211000000000000000000000000000000000000000000000000\
    0000000000000000000000000000000000000000000000000000000000000000";
const LOG_HEADER: &str = "\
    52424c4801000000b0f9835301000000040404040404040404040404040404040c000000000000000700000003000000\
    00001000000000000030120000000000c800000000000000c7000000000000000d0c0b0a001000000100000000000000\
    0000000000000000000000000000000000000000000000000000000000000000";
const ENTRY: &str = "\
    52424c4501000100b828414befbeadde0700000009000000887766554433221105000000000000006400000000000000\
    c8000000000000000300000000100000c7000000000000004d000000000000004e00000000000000002000000d0c0b0a\
    5634120000000000040404040404040404040404040404041581e97df4102211";
const CHECKPOINT: &str = "\
    5242434b01000100dcdf16e901000000040404040404040404040404040404040d00000000000000c800000000000000\
    0300000007000000cf17ca4d000000000606060606060606060606060606060600000000000000000000000000000000\
    0000000000000000000000000000000000000000000000000000000000000000";
const IMAGE: &str = "\
    5242494d01000100615d260a030000000505050505050505050505050505050509000000000000000000008002000000\
    1581e97df4102211766f6c00000000000000000000000000000000000000000000000000000000000000000000000000\
    0000000000000000000000000000000000000000000000000000000000000000";

const DEVICE_STATE: &str = "\
    52424453010000005aaf1f9f000000001100000000000000030303030303030303030303030303030c00000000000000\
    050000000000000006050403020100004d00000000000000300000000000000000000000000000000000000000000000\
    0000000000000000000000000000000000000000000000000000000000000000";

const DIFF_HEADER: &str = "\
    52424448010000002205e375000000000101010101010101010101010101010102020202020202020202020202020202\
    030303030303030303030303030303030002000400000000000000020000000000f15365000000008877665544332211\
    0706030000000000000000000000000074756573646179000000000000000000";
const DIFF_DATA: &str = "\
    52424452010001001659b32ba97886970020000000000000001000000000000000000000000000002205e37500000000";
const DIFF_ZEROES: &str = "\
    52424452010002009426aa240000000000004000000000000000c0000000000001000000000000002205e37500000000";
const DIFF_END: &str = "\
    524244520100030056de575e000000000002000400000000000000000000000002000000000000002205e37500000000";

const ID: ObjectId = ObjectId { group: 7, volume: 0x1122_3344_5566_7788, index: 9, suffix: 5 };

/// The first 128 bytes, in hexadecimal.
fn head(bytes: &[u8]) -> String {
    bytes[..128].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn superblock() -> Superblock {
    Superblock {
        cluster: [1; 16],
        node: [2; 16],
        device: [3; 16],
        device_blocks: 10_000,
        partition_blocks: 4000,
        partitions: 2,
        onodes_per_partition: 64,
        logs: 3,
        log_blocks: 500,
        checkpoint_blocks: 0,
        log_device: None,
    }
}

fn with_separate_logs() -> Superblock {
    Superblock { logs: 2, log_blocks: 9000, checkpoint_blocks: 40, log_device: Some([8; 16]), ..superblock() }
}

fn log_superblock() -> LogSuperblock {
    LogSuperblock::of(&with_separate_logs(), 20_000).unwrap()
}

fn device_state() -> DeviceState {
    DeviceState {
        device: [3; 16],
        generation: 12,
        incarnation: 5,
        map_revision: 0x0102_0304_0506,
        volumes_end: 77,
        groups_end: 48,
    }
}

fn onode(content: OnodeContent) -> Onode {
    Onode { id: ID, version: 100, sequence: 200, epoch: 3, mtime_ns: 1_234_567_890_123_456_789, content }
}

fn mapped() -> Onode {
    let mut map = ObjectBlockMap::default();
    (map.extents[0], map.extents[63]) = (5, 0x0102_0304);
    for block in [0, 7, 1023] {
        assert!(!map.set_written(block, true));
    }
    onode(OnodeContent::Mapped(Box::new(map)))
}

fn log_header() -> LogHeader {
    LogHeader {
        log: [4; 16],
        generation: 12,
        group: 7,
        epoch: 3,
        capacity: 1 << 20,
        head: 0x12_3000,
        head_sequence: 200,
        commit_point: 199,
        previous_crc32c: 0x0a0b_0c0d,
        sector: LogSector::Bytes4096,
        entries: EntryLayout::SharedSectors,
    }
}

fn entry() -> EntryHeader {
    EntryHeader {
        operation: Operation::Write,
        object: ID,
        version: 100,
        sequence: 200,
        epoch: 3,
        offset: 8192,
        length: 4096,
        commit_point: 199,
        client: 77,
        client_number: 78,
        mtime_ns: 1_234_567_890_123_456_789,
        data_crc32c: 0xdead_beef,
        previous_crc32c: 0x0a0b_0c0d,
        withheld: false,
        in_place: false,
    }
}

const APPLIED: &[u8] = b"applied";

fn checkpoint() -> CheckpointRecord {
    CheckpointRecord {
        log: [4; 16],
        generation: 13,
        sequence: 200,
        epoch: 3,
        complete: true,
        applied_bytes: APPLIED.len() as u32,
        applied_crc32c: crc32c(APPLIED),
        unsettled: 0,
        boot: [6; 16],
    }
}

/// A slot with the record.
fn checkpoint_slot() -> Vec<u8> {
    [&checkpoint().encode()[..], APPLIED, &[0; 20]].concat()
}

fn image() -> ImageRecord {
    ImageRecord {
        uuid: [5; 16],
        volume: 9,
        bytes: 10 << 30,
        created_ns: 1_234_567_890_123_456_789,
        removing: true,
        name: "vol".into(),
    }
}

#[test]
fn encodings_are_those_of_the_documented_tables() {
    assert_eq!(head(&superblock().encode(0)), SUPERBLOCK);
    assert_eq!(head(&with_separate_logs().encode(0)), SUPERBLOCK_2);
    assert_eq!(head(&log_superblock().encode(0)), LOG_SUPERBLOCK);
    let header = PartitionHeader { device: [3; 16], index: 1, onodes: 64 };
    assert_eq!(head(&header.encode(4001)), PARTITION);
    assert_eq!(head(&onode(OnodeContent::Inline(b"small".to_vec())).encode(17)), INLINE_ONODE);
    assert_eq!(head(&mapped().encode(17)), MAPPED_ONODE);
    assert_eq!(head(&log_header().encode(1)), LOG_HEADER);
    assert_eq!(head(&entry().encode([4; 16], 0x12_3456)), ENTRY);
    assert_eq!(head(&checkpoint().encode()), CHECKPOINT);
    assert_eq!(head(&image().encode()), IMAGE);
    assert_eq!(head(&device_state().encode(17)), DEVICE_STATE);
}

#[test]
fn a_device_of_an_earlier_release_has_no_state() {
    assert_eq!(DeviceState::decode(&[0; SECTOR_BYTES], 0), Ok(None));
    assert_eq!(DeviceState::decode(&device_state().encode(17), 17), Ok(Some(device_state())));
}

#[test]
fn what_was_encoded_is_decoded() {
    assert_eq!(Superblock::decode(&superblock().encode(17), 17), Ok(superblock()));
    assert_eq!(Superblock::decode(&with_separate_logs().encode(17), 17), Ok(with_separate_logs()));
    assert_eq!(LogSuperblock::decode(&log_superblock().encode(17), 17), Ok(log_superblock()));
    assert_eq!(ImageRecord::decode(&image().encode()), Ok(image()));
    assert_eq!(LogHeader::decode(&log_header().encode(1), 1), Ok(log_header()));
    assert_eq!(EntryHeader::decode(&entry().encode([4; 16], 512), [4; 16], 512), Ok(entry()));
    assert_eq!(Onode::decode(&mapped().encode(17), 17), Ok(Some(mapped())));
}

#[test]
fn a_checkpoint_record_counts_with_its_applied_requests() {
    let slot = checkpoint_slot();
    assert_eq!(CheckpointRecord::decode(&slot, [4; 16], 1), Ok(checkpoint()));
    let known = 512 + APPLIED.len();
    for length in 0..known {
        assert!(CheckpointRecord::decode(&slot[..length], [4; 16], 1).is_err(), "{length} bytes");
    }
    for bit in 0..known * 8 {
        let mut damaged = slot.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(CheckpointRecord::decode(&damaged, [4; 16], 1).is_err(), "bit {bit} flipped");
    }
    for (log, slot_index) in [([5; 16], 1), ([4; 16], 0)] {
        assert!(CheckpointRecord::decode(&slot, log, slot_index).is_err());
    }
    let moved = CheckpointRecord { generation: 1 << 62, ..checkpoint() };
    assert!(CheckpointRecord::decode(&[&moved.encode()[..], APPLIED].concat(), [4; 16], 0).is_err());
}

#[test]
fn checkpoint_records_are_behind_the_area_of_a_log() {
    let superblock = Superblock { checkpoint_blocks: 40, ..superblock() };
    assert_eq!(superblock.log_area_blocks(), 418);
    assert_eq!((superblock.checkpoint_start(0, 0), superblock.checkpoint_start(0, 1)), (8421, 8461));
    assert_eq!(superblock.log_start(1), 8501);
    assert_eq!(Superblock::decode(&superblock.encode(0), 0), Ok(superblock.clone()));
    let too_long = Superblock { checkpoint_blocks: 249, ..superblock };
    assert!(Superblock::decode(&too_long.encode(0), 0).is_err());
}

#[test]
fn a_log_header_beyond_any_log_is_rejected() {
    for wrong in [
        LogHeader { capacity: 1 << 62, ..log_header() },
        LogHeader { head: u64::MAX, ..log_header() },
        LogHeader { capacity: 0, ..log_header() },
        LogHeader { capacity: (1 << 20) + 1, ..log_header() },
        LogHeader { capacity: (1 << 20) + 512, ..log_header() },
        LogHeader { head: 0x12_3200, ..log_header() },
        LogHeader { head: 0x12_3456, sector: LogSector::Bytes512, ..log_header() },
        LogHeader { head_sequence: u64::MAX - 1, ..log_header() },
    ] {
        assert!(
            matches!(LogHeader::decode(&wrong.encode(0), 0), Err(DecodeError::Value { .. })),
            "{wrong:?}"
        );
    }
}

#[test]
fn a_written_block_without_an_extent_is_rejected() {
    for (block, extent) in [(0, 0), (15, 0), (16, 1), (1023, 63)] {
        let mut map = ObjectBlockMap::default();
        map.set_written(block, true);
        let without = onode(OnodeContent::Mapped(Box::new(map.clone())));
        let expected = DecodeError::Text { what: "the onode", reason: "a block has no extent" };
        assert_eq!(Onode::decode(&without.encode(3), 3), Err(expected), "block {block}");
        map.extents[extent] = 9;
        let with = onode(OnodeContent::Mapped(Box::new(map)));
        assert_eq!(Onode::decode(&with.encode(3), 3), Ok(Some(with)));
    }
}

#[test]
fn headers_of_logs_with_salts_have_version_2() {
    let salted = LogHeader { entries: EntryLayout::Salted, ..log_header() };
    let mut bytes = salted.encode(1);
    assert_eq!((&bytes[4..6], bytes[88]), (&[2, 0][..], 1));
    assert_eq!(LogHeader::decode(&bytes, 1), Ok(salted.clone()));
    for (at, value, what) in [(4, 3, "the format version"), (88, 0, "whether entries share sectors")] {
        let before = std::mem::replace(&mut bytes[at], value);
        bytes[8..12].fill(0);
        let checksum = crc32c(&bytes);
        bytes[8..12].copy_from_slice(&checksum.to_le_bytes());
        let expected = DecodeError::Value { what, at: at as u32, value: value.into() };
        assert_eq!(LogHeader::decode(&bytes, 1), Err(expected));
        bytes[at] = before;
    }
    let encoded = entry().encode(salted.log_of_entry(0x0102_0304), 512);
    assert_eq!(encoded[104..120], [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 2, 1]);
    assert_eq!(EntryHeader::salt(&encoded), 0x0102_0304);
    assert_eq!(EntryHeader::decode(&encoded, salted.log_of_entry(0x0102_0304), 512), Ok(entry()));
    assert_eq!(log_header().log_of_entry(0x0102_0304), [4; 16]);
}

#[test]
fn a_log_header_with_another_sector_size_is_rejected() {
    for size in [0u32, 1, 511, 1024, 8192] {
        let mut bytes = log_header().encode(0);
        bytes[84..88].copy_from_slice(&size.to_le_bytes());
        bytes[8..12].fill(0);
        let checksum = crc32c(&bytes);
        bytes[8..12].copy_from_slice(&checksum.to_le_bytes());
        let expected = DecodeError::Value { what: "the sector size", at: 84, value: size.into() };
        assert_eq!(LogHeader::decode(&bytes, 0), Err(expected));
    }
    let smaller = LogHeader { head: 0x12_3200, sector: LogSector::Bytes512, ..log_header() };
    assert_eq!(LogHeader::decode(&smaller.encode(0), 0), Ok(smaller));
}

#[test]
fn areas_of_a_partition_do_not_overlap_and_fit() {
    let mut superblock = superblock();
    for partition_blocks in [26, 27, 4000, 1 << 20, 1 << 28] {
        superblock.partition_blocks = partition_blocks;
        let layout = superblock.layout().unwrap();
        let table = layout.extents_start - layout.checksums_start;
        let data = u64::from(layout.extents) * BLOCKS_PER_EXTENT as u64;
        assert_eq!(layout.checksums_start, PartitionLayout::ONODES_START + 8);
        assert!(table * PartitionLayout::CHECKSUMS_PER_BLOCK >= data);
        assert!(layout.extents_start + data <= partition_blocks);
        // At most an extent and a rounded block of the table are unused.
        assert!(layout.extents_start + data + 17 > partition_blocks);
    }
    superblock.partition_blocks = 25;
    assert_eq!(superblock.layout(), None);
}

/// Decodes `bytes` as every structure; the names of those that accept it.
fn accepted(bytes: &[u8], place: u64) -> Vec<&'static str> {
    let mut names = Vec::new();
    names.extend(Superblock::decode(bytes, place).ok().map(|_| "superblock"));
    names.extend(LogSuperblock::decode(bytes, place).ok().map(|_| "log superblock"));
    names.extend(PartitionHeader::decode(bytes, place).ok().map(|_| "partition"));
    names.extend(Onode::decode(bytes, place as u32).ok().map(|_| "onode"));
    names.extend(LogHeader::decode(bytes, place as u32).ok().map(|_| "log"));
    names.extend(EntryHeader::decode(bytes, [4; 16], place).ok().map(|_| "entry"));
    names.extend(ImageRecord::decode(bytes).ok().map(|_| "image"));
    names.extend(DeviceState::decode(bytes, place).ok().map(|_| "device state"));
    names
}

fn all_structures() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("superblock", superblock().encode(17).to_vec()),
        ("superblock", with_separate_logs().encode(17).to_vec()),
        ("log superblock", log_superblock().encode(17).to_vec()),
        ("partition", PartitionHeader { device: [3; 16], index: 1, onodes: 64 }.encode(17).to_vec()),
        ("onode", onode(OnodeContent::Inline(b"small".to_vec())).encode(17).to_vec()),
        ("onode", mapped().encode(17).to_vec()),
        ("log", log_header().encode(17).to_vec()),
        ("entry", entry().encode([4; 16], 17).to_vec()),
        ("image", image().encode().to_vec()),
        ("device state", device_state().encode(17).to_vec()),
    ]
}

#[test]
fn foreign_misplaced_truncated_and_damaged_structures_are_rejected() {
    for (name, bytes) in all_structures() {
        assert_eq!(accepted(&bytes, 17), [name]);
        // A record of an image is the data of an object, which says where it belongs.
        assert!(name == "image" || accepted(&bytes, 18).is_empty(), "a misplaced {name}");
        for length in 0..bytes.len() {
            assert!(accepted(&bytes[..length], 17).is_empty(), "{name} of {length} bytes");
        }
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(accepted(&damaged, 17).is_empty(), "{name} with bit {bit} flipped");
        }
    }
    assert_eq!(
        EntryHeader::decode(&entry().encode([4; 16], 17), [5; 16], 17).unwrap_err().to_string(),
        "the log entry: it belongs to another log"
    );
}

#[test]
fn an_unknown_version_is_named() {
    let mut bytes = superblock().encode(0);
    bytes[4] = 3;
    let error = Superblock::decode(&bytes, 0).unwrap_err();
    assert_eq!(error.to_string(), "the format version at byte 4 has the value 0x3");
    let mut bytes = log_superblock().encode(0);
    bytes[4] = 2;
    let error = LogSuperblock::decode(&bytes, 0).unwrap_err();
    assert_eq!(error.to_string(), "the format version at byte 4 has the value 0x2");
}

#[test]
fn a_superblock_with_impossible_geometry_is_rejected() {
    let change = |change: fn(&mut Superblock)| {
        let mut changed = superblock();
        change(&mut changed);
        Superblock::decode(&changed.encode(0), 0).unwrap_err().to_string()
    };
    assert!(change(|s| s.partitions = 3).contains("number of partitions"));
    assert!(change(|s| s.partitions = 0).contains("number of partitions"));
    assert!(change(|s| s.partition_blocks = u64::MAX).contains("number of partitions"));
    assert!(change(|s| s.partition_blocks = 9).contains("size of a partition"));
    assert!(change(|s| s.onodes_per_partition = 63).contains("size of a partition"));
    assert!(change(|s| s.onodes_per_partition = !7).contains("size of a partition"));
    assert!(change(|s| s.logs = 4).contains("size of a log"));
    assert!(change(|s| s.logs = 0).contains("size of a log"));
    assert!(change(|s| s.log_blocks = 2).contains("size of a log"));
    assert!(change(|s| s.log_blocks = u64::MAX).contains("size of a log"));
}

#[test]
fn logs_on_a_device_of_their_own_begin_at_block_1() {
    let superblock = with_separate_logs();
    assert_eq!((superblock.log_start(0), superblock.log_start(1)), (1, 9001));
    assert_eq!((superblock.log_area_blocks(), superblock.checkpoint_start(1, 1)), (8918, 17_961));
    // The partitions may take all of the other device but its superblocks.
    let all = Superblock { device_blocks: 8002, ..with_separate_logs() };
    assert_eq!(Superblock::decode(&all.encode(0), 0), Ok(all));
    let none = Superblock { logs: 0, log_blocks: 0, checkpoint_blocks: 0, ..with_separate_logs() };
    assert!(Superblock::decode(&none.encode(0), 0).unwrap_err().to_string().contains("size of a log"));
}

#[test]
fn a_log_device_with_impossible_geometry_is_rejected() {
    let fits = LogSuperblock { device_blocks: 18_002, ..log_superblock() };
    assert_eq!(LogSuperblock::decode(&fits.encode(0), 0), Ok(fits));
    for wrong in [
        LogSuperblock { device_blocks: 18_001, ..log_superblock() },
        LogSuperblock { logs: 0, ..log_superblock() },
        LogSuperblock { log_blocks: u64::MAX, ..log_superblock() },
        LogSuperblock { log_blocks: 82, ..log_superblock() },
        LogSuperblock { checkpoint_blocks: u32::MAX, ..log_superblock() },
    ] {
        let error = LogSuperblock::decode(&wrong.encode(0), 0).unwrap_err().to_string();
        assert!(error.contains("size of a log"), "{wrong:?}: {error}");
    }
}

#[test]
fn logs_follow_the_partitions() {
    let superblock = superblock();
    assert_eq!((superblock.log_start(0), superblock.log_start(2)), (8001, 9001));
}

#[test]
fn an_image_needs_a_name() {
    let named = |name: &str| ImageRecord::decode(&ImageRecord { name: name.into(), ..image() }.encode());
    assert!(named("").unwrap_err().to_string().contains("length of the image's name"));
    let longest = "x".repeat(ImageRecord::NAME_BYTES_MAX);
    assert_eq!(named(&longest).unwrap().name, longest);
}

#[test]
fn an_entry_says_that_its_data_is_in_place() {
    let in_place = EntryHeader { in_place: true, ..entry() };
    let mut bytes = in_place.encode([1; 16], 512);
    assert_eq!((bytes[7], in_place.data_bytes()), (2, 0));
    assert_eq!(EntryHeader::decode(&bytes, [1; 16], 512), Ok(in_place));
    bytes[7] = 3;
    let sum = crc32c(&[&bytes[..8], &[0; 4], &bytes[12..]].concat());
    bytes[8..12].copy_from_slice(&sum.to_le_bytes());
    assert!(EntryHeader::decode(&bytes, [1; 16], 512).is_err());
}

#[test]
fn unsettled_blocks_follow_the_applied_requests_of_a_record() {
    let block = UnsettledBlock { object: ID, offset: 8192, data_crc32c: 7, client: 77, client_number: 78 };
    let mut following = APPLIED.to_vec();
    block.encode(&mut following);
    let record = CheckpointRecord { unsettled: 1, applied_crc32c: crc32c(&following), ..checkpoint() };
    let mut slot = [&record.encode()[..], &following].concat();
    assert_eq!(CheckpointRecord::decode(&slot, [4; 16], 1), Ok(record));
    assert_eq!(UnsettledBlock::decode_all(&following[APPLIED.len()..]), Ok(vec![block]));
    *slot.last_mut().unwrap() ^= 1;
    assert!(CheckpointRecord::decode(&slot, [4; 16], 1).is_err());
    following[APPLIED.len() + 24] = 1;
    assert!(UnsettledBlock::decode_all(&following[APPLIED.len()..]).is_err());
}

#[test]
fn the_stream_of_a_diff_has_the_bytes_of_the_tables() {
    let snapshot = |id, bytes, name: &str| DiffSnapshot { id: [id; 16], bytes, name: name.to_string() };
    let header = DiffHeader {
        image: [1; 16],
        image_name: "vol".to_string(),
        to: snapshot(2, (64 << 20) + 512, "tuesday"),
        from: Some(snapshot(3, 32 << 20, "monday")),
        created: 1_700_000_000,
        chain: 0x1122_3344_5566_7788,
    };
    assert_eq!(head(&header.encode()), DIFF_HEADER);
    let hexadecimal = |bytes: [u8; DiffRecord::SIZE]| bytes.map(|byte| format!("{byte:02x}")).concat();
    let mut encoder = DiffEncoder::new(&header, 0);
    assert_eq!(hexadecimal(encoder.data(8192, &[7; 4096])), DIFF_DATA);
    assert_eq!(hexadecimal(encoder.zeroes(4 << 20, 12 << 20)), DIFF_ZEROES);
    assert_eq!(hexadecimal(encoder.end()), DIFF_END);
}
