//! After a crash at any moment, a log has every acknowledged entry that was not freed, in order, and nothing that was
//! never appended at that place.
#![allow(clippy::unwrap_used)]

use oplog::{EntryPlace, Log, LogError};
use random::WyRand;
use wire_store::{EntryHeader, LogSector, ObjectId, Operation, SECTOR_BYTES};

const CAPACITY: usize = 8192;

fn create(capacity: usize, sector: LogSector) -> Log {
    Log::create([5; 16], 3, capacity as u64, sector).unwrap()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// Space is used again before the header is durable.
    FreedEarly,
    /// An entry is acknowledged although one before it is not durable.
    AcknowledgedOutOfOrder,
    /// The device has larger sectors than the log was made for.
    LargerSectors,
    /// Entries are given up while one of them is being written.
    TruncatedEarly,
    /// An entry shares a sector that another write has.
    SharedByTwoWrites,
    /// A start takes the salt of the one before it.
    SaltRepeated,
}

/// An entry as it is written.
type Written = (EntryPlace, [u8; EntryHeader::SIZE], Vec<u8>);

/// The entry of this time, and its data: some are empty, and one is at most a bit longer than a sector.
fn entry_of(mtime_ns: u64, sector: LogSector) -> (EntryHeader, Vec<u8>) {
    let mut random = WyRand::new(mtime_ns);
    let lengths = [1, 400, 2 * sector.bytes() - 124];
    let limit = lengths[random.index(lengths.len())];
    let length = random.below(limit);
    let operation = if length == 0 { Operation::Remove } else { Operation::Write };
    let object = ObjectId { group: 3, volume: 1, index: 0, suffix: 0 };
    let data = (0..length).map(|_| random.below(256) as u8).collect();
    (EntryHeader { mtime_ns, ..EntryHeader::new(operation, object, 0, length as u32) }, data)
}

/// Content of the log by sequence, from 1: the times of the entries that were appended. It begins somewhere after a reset.
#[derive(Clone, Debug, Default)]
struct History {
    base: u64,
    entries: Vec<u64>,
}

impl History {
    fn end(&self) -> u64 {
        self.base + self.entries.len() as u64 + 1
    }

    fn get(&self, sequence: u64) -> Option<u64> {
        self.entries.get(sequence.checked_sub(self.base + 1)? as usize).copied()
    }

    /// Whether recovered entries are these.
    fn has(
        &self,
        found: &std::ops::Range<u64>,
        entries: &[(EntryHeader, Vec<u8>)],
        sector: LogSector,
    ) -> bool {
        found.start > self.base
            && found.end <= self.end()
            && found.clone().zip(entries).all(|(sequence, (entry, data))| {
                entry.sequence == sequence
                    && self.get(sequence) == Some(entry.mtime_ns)
                    && entry_of(entry.mtime_ns, sector).1 == *data
            })
    }
}

/// The medium, and writes to it that are in flight: each byte of them may be old or new.
#[derive(Clone)]
struct Medium {
    slots: [[u8; SECTOR_BYTES]; 2],
    area: Vec<u8>,
}

/// Carries out a write: what its entries leave of their sectors is zero.
fn carry_out(log: &Log, write: &[Written], area: &mut [u8]) {
    for span in spans(log, write) {
        area[span].fill(0);
    }
    for (place, header, data) in write {
        log.copy_to(*place, header, data, area);
    }
}

/// The parts of the area that a write changes.
fn spans(log: &Log, write: &[Written]) -> [std::ops::Range<usize>; 2] {
    let bytes = write.iter().map(|(place, ..)| place.bytes as usize).sum();
    log.spans(write[0].0.position, bytes)
}

struct Rig {
    log: Log,
    medium: Medium,
    /// Writes that are not durable: entries that share sectors are in one.
    in_flight: Vec<Vec<Written>>,
    /// The newest write has not begun.
    is_open: bool,
    /// The data of every entry.
    appended: History,
    /// Writes of entries that were given up, which land later.
    late: Vec<Vec<Written>>,
    /// Times of entries that were given up, the first one last: they may come again.
    given_up: Vec<u64>,
    /// What was in the log before the entries from a sequence on were given up, or lost. A crash may find it again.
    earlier: Vec<(u64, History)>,
    /// Sequences below were acknowledged.
    acknowledged: u64,
    /// Entries that began in a sector of another one.
    shared: u64,
    random: WyRand,
    fault: Fault,
    /// Bytes of the device's sectors.
    sector_bytes: usize,
}

impl Rig {
    fn new(seed: u64, fault: Fault) -> Rig {
        let sector = LogSector::ALL[seed as usize % 2];
        // The same number of sectors.
        let capacity = CAPACITY / SECTOR_BYTES * sector.bytes() as usize;
        let log = create(capacity, sector);
        let sector_bytes = if fault == Fault::LargerSectors { 4096 } else { sector.bytes() as usize };
        let slots = [log.header().bytes, [0; SECTOR_BYTES]];
        let medium = Medium { slots, area: vec![0; capacity] };
        let random = WyRand::new(seed);
        Rig {
            log,
            medium,
            in_flight: Vec::new(),
            is_open: false,
            appended: History::default(),
            late: Vec::new(),
            given_up: Vec::new(),
            earlier: Vec::new(),
            acknowledged: 1,
            shared: 0,
            random,
            fault,
            sector_bytes,
        }
    }

    fn append(&mut self) {
        // Time makes every entry different, as in life, but one that comes again.
        let again = self.given_up.pop().filter(|_| self.random.happens(800));
        let mtime_ns = again.unwrap_or_else(|| {
            self.given_up.clear();
            self.random.next_bits()
        });
        let (entry, data) = entry_of(mtime_ns, self.log.sector());
        let is_same_write = self.is_open && self.random.happens(600);
        let appended = match is_same_write || self.fault == Fault::SharedByTwoWrites {
            true => self.log.append_to_write(entry, &data),
            false => self.log.append(entry, &data),
        };
        match appended {
            Ok((place, header)) => {
                assert_eq!(place.sequence, self.appended.end());
                self.appended.entries.push(mtime_ns);
                let is_shared = !place.position.is_multiple_of(self.log.sector().bytes());
                self.shared += u64::from(is_shared);
                if !is_same_write {
                    self.in_flight.push(Vec::new());
                }
                self.in_flight.last_mut().unwrap().push((place, header, data));
                self.is_open = true;
            }
            Err(error) => assert_eq!(error, LogError::Full),
        }
    }

    fn complete_one(&mut self) {
        if self.random.happens(300)
            && let Some(write) = self.late.pop()
        {
            carry_out(&self.log, &write, &mut self.medium.area);
        }
        if self.in_flight.is_empty() {
            return;
        }
        let index = self.random.index(self.in_flight.len());
        self.is_open &= index + 1 < self.in_flight.len();
        let write = self.in_flight.remove(index);
        carry_out(&self.log, &write, &mut self.medium.area);
        for (place, ..) in write {
            let acknowledged = self.log.written(place);
            self.acknowledged = self.acknowledged.max(acknowledged.end);
            if self.fault == Fault::AcknowledgedOutOfOrder {
                self.acknowledged = self.acknowledged.max(place.sequence + 1);
            }
        }
    }

    fn free(&mut self) -> Result<(), String> {
        let head = self.log.sequences().start;
        let below = head + self.random.below(4);
        let Some(write) = self.log.free(below) else { return Ok(()) };
        if self.fault == Fault::FreedEarly {
            self.log.freed();
            (0..4).for_each(|_| self.append());
            (0..4).for_each(|_| self.complete_one());
        }
        // The header is torn: old or new up to some byte.
        let mut torn = self.medium.clone();
        let to = self.random.index(SECTOR_BYTES);
        torn.slots[write.slot as usize][..to].copy_from_slice(&write.bytes[..to]);
        self.check(&torn)?;
        if self.fault != Fault::FreedEarly {
            (0..2).for_each(|_| self.append());
            self.complete_one();
        }
        self.medium.slots[write.slot as usize] = write.bytes;
        if self.fault != Fault::FreedEarly {
            self.log.freed();
        }
        Ok(())
    }

    /// Gives up the last few entries.
    fn truncate(&mut self) {
        let sequences = self.log.sequences();
        let from = sequences.end.saturating_sub(self.random.below(4)).max(sequences.start);
        let is_given_up = |write: &Vec<Written>| write.iter().any(|(place, ..)| place.sequence >= from);
        let (writing, others) = std::mem::take(&mut self.in_flight).into_iter().partition(is_given_up);
        (self.in_flight, self.is_open) = (writing, false);
        if self.fault == Fault::TruncatedEarly {
            for (place, ..) in self.in_flight.iter().flatten() {
                self.log.written(*place);
            }
            self.late.append(&mut self.in_flight);
        }
        while !self.in_flight.is_empty() {
            self.complete_one();
        }
        self.in_flight = others;
        self.earlier.push((from, self.appended.clone()));
        self.log.truncate(from);
        self.given_up = self.appended.entries.split_off((from - self.appended.base - 1) as usize);
        self.given_up.reverse();
        self.acknowledged = self.acknowledged.min(from);
    }

    /// Gives up all entries; the next one has any sequence.
    fn reset(&mut self) -> Result<(), String> {
        while !self.in_flight.is_empty() {
            self.complete_one();
        }
        let sequences = self.log.sequences();
        let base = self.random.below(sequences.end + 3);
        let write = self.log.reset(base, 9);
        // Until the header is durable, the old entries are there.
        let mut torn = self.medium.clone();
        let to = self.random.index(SECTOR_BYTES);
        torn.slots[write.slot as usize][..to].copy_from_slice(&write.bytes[..to]);
        if torn.slots[write.slot as usize] != write.bytes {
            self.check(&torn)?;
        }
        self.medium.slots[write.slot as usize] = write.bytes;
        self.log.freed();
        assert_eq!((self.log.sequences(), self.log.base_epoch()), (base + 1..base + 1, 9));
        self.appended = History { base, entries: Vec::new() };
        self.earlier.clear();
        self.acknowledged = base + 1;
        Ok(())
    }

    /// A crash: what is in flight is lost, whole or torn, and a torn sector may hold anything.
    fn crash_image(&mut self) -> Medium {
        let mut image = self.medium.clone();
        for write in &self.in_flight {
            let mut new = image.area.clone();
            carry_out(&self.log, write, &mut new);
            let torn_per_mille = [0, 20, 500, 1000][self.random.index(4)];
            for (old, new) in image.area.chunks_mut(64).zip(new.chunks(64)) {
                if !self.random.happens(torn_per_mille) {
                    old.copy_from_slice(new);
                }
            }
            if self.random.happens(250) {
                let [first, second] = spans(&self.log, write);
                let size = self.sector_bytes;
                let sectors =
                    (first.start / size..first.end.div_ceil(size)).chain(0..second.end.div_ceil(size));
                let torn = sectors.clone().nth(self.random.index(sectors.count())).unwrap() * size;
                image.area[torn..torn + size].fill_with(|| self.random.below(256) as u8);
            }
        }
        image
    }

    /// Recovers a log; returns it with what is in it.
    fn check(&mut self, image: &Medium) -> Result<(Log, History), String> {
        let salt = if self.fault == Fault::SaltRepeated { 0 } else { self.random.next_bits() as u32 };
        let recovered = Log::recover(&image.slots, &image.area, salt);
        let (log, entries) = recovered.map_err(|error| error.to_string())?;
        let found = log.sequences();
        if found.start > self.acknowledged || found.end < self.acknowledged {
            return Err(format!("acknowledged below {}, recovered {found:?}", self.acknowledged));
        }
        if found.clone().count() != entries.len() {
            return Err(format!("{} of {found:?}", entries.len()));
        }
        // Once another entry is acknowledged instead of one that was given up, that one does not come back.
        let is_possible = |(from, earlier): &&(u64, History)| {
            (*from..self.acknowledged).all(|sequence| earlier.get(sequence) == self.appended.get(sequence))
        };
        let earlier = self.earlier.iter().filter(is_possible).map(|(_, earlier)| earlier);
        let mut histories = std::iter::once(&self.appended).chain(earlier);
        let history = histories.find(|history| history.has(&found, &entries, self.log.sector()));
        let mut history =
            history.cloned().ok_or(format!("an entry of {found:?} is another or was abandoned"))?;
        history.entries.truncate((found.end - 1 - history.base) as usize);
        Ok((log, history))
    }

    fn run(&mut self) -> Result<(), String> {
        for _ in 0..120 {
            match self.random.below(9) {
                0..3 => self.append(),
                3..6 => self.complete_one(),
                6 => self.free()?,
                7 if self.random.happens(700) => self.truncate(),
                7 if self.random.happens(300) => self.reset()?,
                _ => {
                    let image = self.crash_image();
                    let (log, history) = self.check(&image)?;
                    // Every fourth time, go on after it: what was not recovered is abandoned.
                    if self.random.happens(250) {
                        self.acknowledged = log.sequences().end;
                        let lost = self.appended.entries.iter().skip(history.entries.len());
                        self.given_up = lost.rev().copied().collect();
                        let before = std::mem::replace(&mut self.appended, history);
                        self.earlier.push((self.appended.end(), before));
                        (self.log, self.medium) = (log, image);
                        (self.in_flight, self.is_open) = (Vec::new(), false);
                        self.late.clear();
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns how many entries shared sectors.
fn run(seed: u64, fault: Fault) -> Result<u64, String> {
    let mut rig = Rig::new(seed, fault);
    rig.run()?;
    Ok(rig.shared)
}

fn seeds() -> std::ops::Range<u64> {
    match std::env::var("RINGBOLT_SEED") {
        Ok(seed) => seed.parse().map(|seed| seed..seed + 1).unwrap(),
        Err(_) => 0..2000,
    }
}

#[test]
fn acknowledged_entries_survive_every_crash() {
    let mut shared = 0;
    for seed in seeds() {
        shared += run(seed, Fault::None).unwrap_or_else(|error| panic!("RINGBOLT_SEED={seed}: {error}"));
    }
    assert!(shared > 0 || seeds().count() == 1);
}

#[test]
fn planted_faults_are_found() {
    let faults = [
        Fault::FreedEarly,
        Fault::AcknowledgedOutOfOrder,
        Fault::LargerSectors,
        Fault::TruncatedEarly,
        Fault::SharedByTwoWrites,
        Fault::SaltRepeated,
    ];
    for fault in faults {
        assert!((0..2000).any(|seed| run(seed, fault).is_err()), "{fault:?} is not found");
    }
}

#[test]
fn a_log_without_a_valid_header_or_of_another_size_is_rejected() {
    let log = create(CAPACITY, LogSector::Bytes512);
    let (slots, zeroes) = ([log.header().bytes, [0; SECTOR_BYTES]], [[0; SECTOR_BYTES]; 2]);
    let error = Log::recover(&zeroes, &[0; CAPACITY], 1).unwrap_err().to_string();
    assert_eq!(error, "neither header of the log is valid: the log header: the magic number is another");
    let error = Log::recover(&slots, &[0; 100], 1).unwrap_err();
    assert_eq!(error, LogError::Size { found: 100, expected: CAPACITY as u64 });
}

#[test]
fn an_entry_longer_than_the_log_is_not_backpressure() {
    let mut log = create(1024 + 511, LogSector::Bytes512);
    let object = ObjectId { group: 3, volume: 1, index: 0, suffix: 0 };
    let entry = |length| EntryHeader::new(Operation::Write, object, 0, length);
    let error = log.append(entry(897), &[0; 897]).unwrap_err();
    assert_eq!(error, LogError::TooLong { entry: 1536, capacity: 1024 });
    let (place, _) = log.append(entry(896), &[0; 896]).unwrap();
    assert_eq!((place.bytes, log.room()), (1024, 0));
    assert_eq!(log.append(entry(1), &[0]).unwrap_err(), LogError::Full);
}

#[test]
fn entries_take_whole_sectors_of_the_device_that_the_log_was_made_for() {
    let log = create(2 * 4096 + 4095, LogSector::Bytes4096);
    let slots = [log.header().bytes, [0; SECTOR_BYTES]];
    let (mut log, _) = Log::recover(&slots, &[0; 8192], 1).unwrap();
    let object = ObjectId { group: 3, volume: 1, index: 0, suffix: 0 };
    let (place, _) = log.append(EntryHeader::new(Operation::Write, object, 0, 1), &[0]).unwrap();
    assert_eq!((place.bytes, log.room(), log.sector()), (4096, 4096, LogSector::Bytes4096));
}

#[test]
fn a_log_without_a_sector_is_not_made() {
    let create = |capacity, sector| Log::create([5; 16], 3, capacity, sector).map(|log| log.room());
    assert_eq!(create(511, LogSector::Bytes512), Err(LogError::Capacity(511)));
    assert_eq!(create(4095, LogSector::Bytes4096), Err(LogError::Capacity(4095)));
    assert_eq!(create(1 << 62, LogSector::Bytes4096), Err(LogError::Capacity(1 << 62)));
    assert_eq!(create(4096, LogSector::Bytes4096), Ok(4096));
}

#[test]
fn entries_of_one_write_share_sectors_and_whole_sectors_are_freed() {
    let mut log = create(1 << 16, LogSector::Bytes512);
    let object = ObjectId { group: 3, volume: 1, index: 0, suffix: 0 };
    let remove = || EntryHeader::new(Operation::Remove, object, 0, 0);
    let mut area = vec![0; 1 << 16];
    let mut places = vec![log.append(remove(), &[]).unwrap()];
    places.extend((0..4).map(|_| log.append_to_write(remove(), &[]).unwrap()));
    let written: Vec<_> = places.iter().map(|(place, _)| (place.position, place.bytes)).collect();
    assert_eq!(written, [(0, 512), (128, 0), (256, 0), (384, 0), (512, 512)]);
    for (place, header) in &places {
        log.copy_to(*place, header, &[], &mut area);
        log.written(*place);
    }
    // The second sector is kept whole.
    assert!(!log.can_free(4) && log.can_free(5));
    let header = log.free(5).unwrap();
    log.freed();
    assert_eq!((log.sequences(), log.room()), (5..6, (1 << 16) - 512));
    let slots = [[0; SECTOR_BYTES], header.bytes];
    let (recovered, entries) = Log::recover(&slots, &area, 1).unwrap();
    assert_eq!((recovered.sequences(), entries.len()), (5..6, 1));
}

#[test]
fn what_was_given_up_in_a_shared_sector_does_not_hide_what_follows() {
    let mut log = create(1 << 16, LogSector::Bytes512);
    let object = ObjectId { group: 3, volume: 1, index: 0, suffix: 0 };
    let remove = |mtime_ns| EntryHeader { mtime_ns, ..EntryHeader::new(Operation::Remove, object, 0, 0) };
    let mut area = vec![0; 1 << 16];
    let first = log.append(remove(1), &[]).unwrap();
    for (place, header) in [first, log.append_to_write(remove(2), &[]).unwrap()] {
        log.copy_to(place, &header, &[], &mut area);
        log.written(place);
    }
    log.truncate(2);
    let (place, header) = log.append(remove(3), &[]).unwrap();
    assert_eq!((place.sequence, place.position), (2, 512));
    let slots = [log.header().bytes, [0; SECTOR_BYTES]];
    let times = |area: &[u8]| -> Vec<u64> {
        Log::recover(&slots, area, 1).unwrap().1.iter().map(|(entry, _)| entry.mtime_ns).collect()
    };
    assert_eq!(times(&area), [1, 2]);
    log.copy_to(place, &header, &[], &mut area);
    assert_eq!(times(&area), [1, 3]);
}
