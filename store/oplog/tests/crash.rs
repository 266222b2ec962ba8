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
}

/// Content of the log by sequence, from 1: what was appended. It begins somewhere after a reset.
#[derive(Clone, Debug, Default)]
struct History {
    base: u64,
    entries: Vec<Vec<u8>>,
}

impl History {
    fn end(&self) -> u64 {
        self.base + self.entries.len() as u64 + 1
    }

    fn get(&self, sequence: u64) -> Option<&Vec<u8>> {
        self.entries.get(sequence.checked_sub(self.base + 1)? as usize)
    }

    /// Whether recovered entries are these.
    fn has(&self, found: &std::ops::Range<u64>, entries: &[(EntryHeader, Vec<u8>)]) -> bool {
        found.start > self.base
            && found.end <= self.end()
            && found.clone().zip(entries).all(|(sequence, (entry, data))| {
                entry.sequence == sequence && self.get(sequence) == Some(data)
            })
    }
}

/// The medium, and writes to it that are in flight: each byte of them may be old or new.
#[derive(Clone)]
struct Medium {
    slots: [[u8; SECTOR_BYTES]; 2],
    area: Vec<u8>,
}

struct Rig {
    log: Log,
    medium: Medium,
    /// Appended entries whose write is not durable.
    in_flight: Vec<(EntryPlace, [u8; EntryHeader::SIZE], Vec<u8>)>,
    /// The data of every entry.
    appended: History,
    /// Writes of entries that were given up, which land later.
    late: Vec<(EntryPlace, [u8; EntryHeader::SIZE], Vec<u8>)>,
    /// What was in the log before the entries from a sequence on were given up, while a crash may find it again.
    earlier: Vec<(u64, History)>,
    /// Sequences below were acknowledged.
    acknowledged: u64,
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
        let (in_flight, late, appended, earlier) = (Vec::new(), Vec::new(), History::default(), Vec::new());
        Rig { log, medium, in_flight, late, appended, earlier, acknowledged: 1, random, fault, sector_bytes }
    }

    fn append(&mut self) {
        let sector_bytes = self.log.sector().bytes();
        let length = self.random.below(2 * sector_bytes - 124) as u32;
        let operation = if length == 0 { Operation::Remove } else { Operation::Write };
        let object = ObjectId { group: 3, volume: 1, index: 0, suffix: 0 };
        let data: Vec<u8> = (0..length).map(|_| self.random.below(256) as u8).collect();
        // Time makes every entry different, as in life.
        let entry = EntryHeader {
            mtime_ns: self.random.next_bits(),
            ..EntryHeader::new(operation, object, 0, length)
        };
        match self.log.append(entry, &data) {
            Ok((place, header)) => {
                assert_eq!(place.sequence, self.appended.end());
                self.appended.entries.push(data.clone());
                self.in_flight.push((place, header, data));
            }
            Err(error) => assert_eq!(error, LogError::Full),
        }
    }

    fn complete_one(&mut self) {
        if self.random.happens(300)
            && let Some((place, header, data)) = self.late.pop()
        {
            self.log.copy_to(place, &header, &data, &mut self.medium.area);
        }
        if self.in_flight.is_empty() {
            return;
        }
        let index = self.random.index(self.in_flight.len());
        let (place, header, data) = self.in_flight.swap_remove(index);
        self.log.copy_to(place, &header, &data, &mut self.medium.area);
        let acknowledged = self.log.written(place);
        self.acknowledged = self.acknowledged.max(acknowledged.end);
        // Once another entry is durable in the place of the first that was given up, that one is gone.
        self.earlier.retain(|(from, _)| *from >= acknowledged.end);
        if self.fault == Fault::AcknowledgedOutOfOrder {
            self.acknowledged = self.acknowledged.max(place.sequence + 1);
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
        let (writing, others) =
            std::mem::take(&mut self.in_flight).into_iter().partition(|(place, ..)| place.sequence >= from);
        self.in_flight = writing;
        if self.fault == Fault::TruncatedEarly {
            for (place, ..) in &self.in_flight {
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
        self.appended.entries.truncate((from - self.appended.base - 1) as usize);
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
        for (place, header, data) in &self.in_flight {
            let mut new = image.area.clone();
            self.log.copy_to(*place, header, data, &mut new);
            let torn_per_mille = [0, 20, 500, 1000][self.random.index(4)];
            for (old, new) in image.area.chunks_mut(64).zip(new.chunks(64)) {
                if !self.random.happens(torn_per_mille) {
                    old.copy_from_slice(new);
                }
            }
            if self.random.happens(250) {
                let [first, second] = self.log.spans(place.position, place.bytes as usize);
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
        let (log, entries) = Log::recover(&image.slots, &image.area).map_err(|error| error.to_string())?;
        let found = log.sequences();
        if found.start > self.acknowledged || found.end < self.acknowledged {
            return Err(format!("acknowledged below {}, recovered {found:?}", self.acknowledged));
        }
        if found.clone().count() != entries.len() {
            return Err(format!("{} of {found:?}", entries.len()));
        }
        let mut histories =
            std::iter::once(&self.appended).chain(self.earlier.iter().map(|(_, earlier)| earlier));
        let history = histories.find(|history| history.has(&found, &entries));
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
                        self.appended = history;
                        (self.log, self.medium) = (log, image);
                        self.in_flight.clear();
                        self.earlier.clear();
                        self.late.clear();
                    }
                }
            }
        }
        Ok(())
    }
}

fn run(seed: u64, fault: Fault) -> Result<(), String> {
    Rig::new(seed, fault).run()
}

fn seeds() -> std::ops::Range<u64> {
    match std::env::var("RINGBOLT_SEED") {
        Ok(seed) => seed.parse().map(|seed| seed..seed + 1).unwrap(),
        Err(_) => 0..2000,
    }
}

#[test]
fn acknowledged_entries_survive_every_crash() {
    for seed in seeds() {
        run(seed, Fault::None).unwrap_or_else(|error| panic!("RINGBOLT_SEED={seed}: {error}"));
    }
}

#[test]
fn planted_faults_are_found() {
    let faults =
        [Fault::FreedEarly, Fault::AcknowledgedOutOfOrder, Fault::LargerSectors, Fault::TruncatedEarly];
    for fault in faults {
        assert!((0..2000).any(|seed| run(seed, fault).is_err()), "{fault:?} is not found");
    }
}

#[test]
fn a_log_without_a_valid_header_or_of_another_size_is_rejected() {
    let log = create(CAPACITY, LogSector::Bytes512);
    let (slots, zeroes) = ([log.header().bytes, [0; SECTOR_BYTES]], [[0; SECTOR_BYTES]; 2]);
    let error = Log::recover(&zeroes, &[0; CAPACITY]).unwrap_err().to_string();
    assert_eq!(error, "neither header of the log is valid: the log header: the magic number is another");
    let error = Log::recover(&slots, &[0; 100]).unwrap_err();
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
    let (mut log, _) = Log::recover(&slots, &[0; 8192]).unwrap();
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
