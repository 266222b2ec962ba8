//! What a start reads of a log, what never follows an entry, and logs of earlier versions.
#![allow(clippy::unwrap_used)]

use oplog::{EntryPlace, Log, LogDamage, LogRecovery, RecoveredEntries};
use wire_store::{EntryHeader, EntryLayout, LogHeader, LogSector, ObjectId, Operation, SECTOR_BYTES, crc32c};

const LOG: [u8; 16] = [5; 16];
const CAPACITY: u64 = 1 << 20;
const PIECE: u64 = 16 << 10;

type Slots = [[u8; SECTOR_BYTES]; 2];

fn entry(mtime_ns: u64, length: u32) -> EntryHeader {
    let object = ObjectId { group: 3, volume: 1, index: 0, suffix: 0 };
    let operation = if length == 0 { Operation::Remove } else { Operation::Write };
    EntryHeader { mtime_ns, ..EntryHeader::new(operation, object, 0, length) }
}

fn new_log() -> (Log, Slots, Vec<u8>) {
    let log = Log::create(LOG, 3, CAPACITY, LogSector::Bytes512).unwrap();
    let slots = [log.header().bytes, [0; SECTOR_BYTES]];
    (log, slots, vec![0; CAPACITY as usize])
}

/// Appends an entry of a write of its own, which is durable at once.
fn write(log: &mut Log, area: &mut [u8], mtime_ns: u64, length: u32) -> EntryPlace {
    let data = vec![mtime_ns as u8; length as usize];
    let (place, header) = log.append(entry(mtime_ns, length), &data).unwrap();
    log.copy_to(place, &header, &data, area);
    log.written(place);
    place
}

/// Recovers a log, and returns which parts of its area were read.
fn recover(slots: &Slots, area: &[u8]) -> (Log, RecoveredEntries, Vec<(u64, usize)>) {
    let mut recovery = LogRecovery::new(slots, CAPACITY, PIECE, 77).unwrap();
    let mut pieces = Vec::new();
    while let Some((offset, bytes)) = recovery.next_piece() {
        pieces.push((offset, bytes));
        recovery.take(&area[offset as usize..][..bytes]);
    }
    let (log, entries) = recovery.finish();
    (log, entries, pieces)
}

fn times(entries: &RecoveredEntries) -> Vec<u64> {
    entries.iter().map(|(entry, _)| entry.mtime_ns).collect()
}

#[test]
fn a_start_reads_a_log_from_its_first_entry_to_its_last() {
    let (mut log, slots, mut area) = new_log();
    let piece = PIECE as usize;
    assert_eq!(recover(&slots, &area).2, [(0, piece)]);
    for time in 0..10 {
        write(&mut log, &mut area, time, 4096);
    }
    let (_, entries, pieces) = recover(&slots, &area);
    assert_eq!(entries.len(), 10);
    assert_eq!(pieces, [(0, piece), (PIECE, piece), (2 * PIECE, piece)]);
    // One that is longer than a piece needs several, and its data is whole.
    write(&mut log, &mut area, 10, 100_000);
    let (_, entries, pieces) = recover(&slots, &area);
    assert_eq!((entries.len(), pieces.len()), (11, 9));
    let data = &entries[10].1;
    assert!(data.len() == 100_000 && data.iter().all(|byte| *byte == 10));
}

#[test]
fn a_log_that_begins_in_the_middle_of_its_area_is_read_around_the_end() {
    let (mut log, mut slots, mut area) = new_log();
    let (mut first, mut time) = (1, 0);
    // 4,608 bytes each: 200 of them leave 126,976 bytes up to the end of the area.
    for _ in 0..200 {
        write(&mut log, &mut area, 0, 4096);
    }
    for _ in 0..300 {
        let header = log.free(log.sequences().end - 1).unwrap();
        slots[header.slot as usize] = header.bytes;
        log.freed();
        first = log.sequences().start;
        time += 1;
        write(&mut log, &mut area, time, 4096);
    }
    for _ in 0..40 {
        write(&mut log, &mut area, 1000, 4096);
    }
    let (recovered, entries, pieces) = recover(&slots, &area);
    assert_eq!((recovered.sequences(), entries.len()), (first..first + 42, 42));
    assert!(pieces.len() <= 14, "{pieces:?}");
    // A full log is read whole.
    while log.room() >= 4608 {
        write(&mut log, &mut area, 2000, 4096);
    }
    let (recovered, entries, pieces) = recover(&slots, &area);
    assert_eq!((recovered.sequences(), entries.len()), (log.sequences(), 227));
    let read: u64 = pieces.iter().map(|(_, bytes)| *bytes as u64).sum();
    assert!((CAPACITY..CAPACITY + PIECE).contains(&read), "{read}");
}

#[test]
fn an_equal_entry_is_not_followed_by_what_followed_the_one_that_was_given_up() {
    // Two writes, of which a crash leaves the second: the first was in flight, and gets its place again, now with another
    // entry in its sector. What is behind it was never acknowledged.
    let (mut log, slots, mut area) = new_log();
    let lost = write(&mut log, &mut area, 1, 0);
    write(&mut log, &mut area, 2, 0);
    let whole = area.clone();
    area[lost.position as usize..][..SECTOR_BYTES].fill(0);
    let (mut log, entries, _) = recover(&slots, &area);
    assert_eq!(times(&entries), []);
    let first = log.append(entry(1, 0), &[]).unwrap();
    let second = log.append_to_write(entry(3, 0), &[]).unwrap();
    assert_eq!((first.0.position, second.0.position), (0, 128), "they share a sector");
    for (place, header) in [first, second] {
        log.copy_to(place, &header, &[], &mut area);
        log.written(place);
    }
    assert_eq!(times(&recover(&slots, &area).1), [1, 3]);

    // The same after entries were given up by their owner.
    let (mut log, _, _) = recover(&slots, &whole);
    log.truncate(1);
    let mut area = whole;
    let first = log.append(entry(1, 0), &[]).unwrap();
    let second = log.append_to_write(entry(3, 0), &[]).unwrap();
    for (place, header) in [first, second] {
        log.copy_to(place, &header, &[], &mut area);
        log.written(place);
    }
    assert_eq!(times(&recover(&slots, &area).1), [1, 3]);
    // And again, without a start between the two.
    log.truncate(1);
    let first = log.append(entry(1, 0), &[]).unwrap();
    let (place, header) = log.append(entry(4, 0), &[]).unwrap();
    log.copy_to(first.0, &first.1, &[], &mut area);
    log.copy_to(place, &header, &[], &mut area);
    log.written(first.0);
    log.written(place);
    assert_eq!(times(&recover(&slots, &area).1), [1, 4]);
    log.truncate(1);
    let first = log.append(entry(1, 0), &[]).unwrap();
    let second = log.append_to_write(entry(5, 0), &[]).unwrap();
    for (place, header) in [first, second] {
        log.copy_to(place, &header, &[], &mut area);
    }
    assert_eq!(times(&recover(&slots, &area).1), [1, 5]);
}

#[test]
fn a_log_of_an_earlier_version_is_read_and_gets_salts_with_its_next_header() {
    let mut header = LogHeader {
        log: LOG,
        generation: 4,
        group: 3,
        epoch: 0,
        capacity: CAPACITY,
        head: 0,
        head_sequence: 1,
        commit_point: 0,
        previous_crc32c: 0,
        sector: LogSector::Bytes512,
        entries: EntryLayout::SharedSectors,
    };
    // Three entries, two of them in a sector, as that version wrote them.
    let (mut area, mut previous_crc32c) = (vec![0; CAPACITY as usize], 0);
    for (sequence, position) in [(1, 0), (2, 128), (3, 512)] {
        let bytes = EntryHeader { sequence, previous_crc32c, ..entry(sequence, 0) }.encode(LOG, position);
        area[position as usize..][..EntryHeader::SIZE].copy_from_slice(&bytes);
        previous_crc32c = crc32c(&bytes);
    }
    let mut slots = [header.encode(0), [0; SECTOR_BYTES]];
    let (mut log, entries, _) = recover(&slots, &area);
    assert_eq!(times(&entries), [1, 2, 3]);
    // In a log whose entries begin at sectors, the second one does not count.
    header.entries = EntryLayout::WholeSectors;
    assert_eq!(times(&recover(&[header.encode(0), [0; SECTOR_BYTES]], &area).1), [1]);

    // Until a header of this version is durable, entries are as that version reads them, and share no sectors.
    write(&mut log, &mut area, 4, 0);
    let (place, bytes) = log.append_to_write(entry(5, 0), &[]).unwrap();
    assert_eq!((place.position, &bytes[104..120]), (1536, &LOG[..]));
    log.copy_to(place, &bytes, &[], &mut area);
    log.written(place);
    let write = log.free(4).unwrap();
    let (place, bytes) = log.append(entry(6, 0), &[]).unwrap();
    assert_eq!(&bytes[104..120], &LOG[..]);
    log.copy_to(place, &bytes, &[], &mut area);
    assert_eq!(times(&recover(&slots, &area).1), [1, 2, 3, 4, 5, 6]);
    slots[write.slot as usize] = write.bytes;
    log.freed();
    let decoded = LogHeader::decode(&slots[1], 1).unwrap();
    assert_eq!((decoded.entries, decoded.generation), (EntryLayout::Salted, 5));
    let (place, bytes) = log.append(entry(7, 0), &[]).unwrap();
    assert_eq!(&bytes[104..120], &[&LOG[..12], &77u32.to_le_bytes()].concat()[..]);
    log.copy_to(place, &bytes, &[], &mut area);
    let (place, bytes) = log.append_to_write(entry(8, 0), &[]).unwrap();
    assert_eq!(place.position % SECTOR_BYTES as u64, 128);
    log.copy_to(place, &bytes, &[], &mut area);
    assert_eq!(times(&recover(&slots, &area).1), [4, 5, 6, 7, 8]);
}

/// Entries of which each knows those up to `durable` before it to be durable.
fn write_knowing(log: &mut Log, area: &mut [u8], commit_point: u64) -> EntryPlace {
    let (place, header) = log.append(EntryHeader { commit_point, ..entry(7, 4096) }, &[7; 4096]).unwrap();
    log.copy_to(place, &header, &[7; 4096], area);
    log.written(place);
    place
}

fn damage(slots: &Slots, area: &[u8]) -> (u64, Option<LogDamage>) {
    let mut recovery = LogRecovery::new(slots, CAPACITY, CAPACITY, 77).unwrap();
    while let Some((offset, bytes)) = recovery.next_piece() {
        recovery.take(&area[offset as usize..][..bytes]);
    }
    let damage = recovery.damage();
    (recovery.finish().1.len() as u64, damage)
}

#[test]
fn damage_in_the_middle_of_a_log_is_told_from_a_crash() {
    let (mut log, slots, mut area) = new_log();
    // Three writes are in flight at a time.
    let places: Vec<EntryPlace> =
        (1..=10_u64).map(|sequence| write_knowing(&mut log, &mut area, sequence.saturating_sub(3))).collect();
    assert_eq!(damage(&slots, &area), (10, None));
    for place in &places {
        // In the header, and in the data.
        for at in [9, EntryHeader::SIZE + 70] {
            let mut damaged = area.clone();
            damaged[place.position as usize + at] ^= 4;
            let sequence = place.sequence;
            // The last ones may be what a crash tore, while later ones were complete.
            let proof = (sequence <= 7).then_some(LogDamage { sequence, proof: sequence + 3 });
            assert_eq!(damage(&slots, &damaged), (sequence - 1, proof));
        }
    }
    // What was given up was never committed, and proves nothing.
    log.truncate(8);
    write_knowing(&mut log, &mut area, 7);
    assert_eq!(damage(&slots, &area), (8, None));
}
