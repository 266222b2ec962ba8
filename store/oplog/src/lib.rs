//! The operation log of a logical group, sans-IO: where entries are written, when their space is free, and what a crash
//! leaves.
//!
//! A [`Log`] gives each operation its sequence and its place ([`Log::append`]); the owner writes the bytes. Entries are
//! acknowledged in their order, which [`Log::written`] decides. When a prefix is durable in the object store, the owner
//! writes a [`LogHeader`] that says so ([`Log::free`]), and the space is used again once the header is durable
//! ([`Log::freed`]): otherwise a crash would find the old header and the new bytes. A full log is backpressure.
//!
//! A write to the device begins and ends at sectors, [`LogSector`], and no sector is written again: power loss damages no
//! entry of another write. Entries of one write are next to each other ([`Log::append_to_write`]), so that small ones share
//! sectors.
//! An entry that was given up may remain in a sector that others are in, with another one in its place in the next sector.
//! Recovery takes the one that begins at a sector.
//!
//! A replica gives up entries that its primary does not have ([`Log::truncate`]), and all of them before it gets a copy of
//! all objects ([`Log::reset`]). The header names the entry before the first by sequence and epoch.
//!
//! The data of an entry with [`EntryHeader::in_place`] is not in the log: the owner writes it to its block once the header
//! is durable, and calls [`Log::written`] after both. What is there after a crash the owner decides.
//!
//! [`LogRecovery`] finds the acknowledged entries after a crash, and maybe more that were written completely: it reads from
//! the first entry to the end of the last one, and no further. Each entry has the checksum of the one before it, and a salt
//! that is another one after each recovery and each time that entries are given up, so that what is behind the end
//! never follows a new entry, not even one that is equal to an entry which was given up.
//!
//! ```
//! use oplog::Log;
//! use wire_store::{EntryHeader, LogSector, ObjectId, Operation};
//! let mut log = Log::create([1; 16], 7, 1 << 16, LogSector::Bytes512)?;
//! let mut area = vec![0; 1 << 16];
//! let slots = [log.header().bytes, [0; 512]];
//! let object = ObjectId { group: 7, volume: 1, index: 0, suffix: 0 };
//! let entry = EntryHeader::new(Operation::Write, object, 0, 4);
//! let (place, header) = log.append(entry, b"data").expect("there is room");
//! log.copy_to(place, &header, b"data", &mut area);
//! assert_eq!(log.written(place), 1..2);
//! let (_, entries) = Log::recover(&slots, &area, 0x1234_5678)?;
//! assert_eq!(entries[0].1, b"data");
//! # Ok::<(), oplog::LogError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod recovery;

use std::collections::VecDeque;
use std::ops::Range;

use wire_store::{DecodeError, EntryHeader, EntryLayout, LogHeader, LogSector, SECTOR_BYTES, crc32c};

pub use recovery::{LogDamage, LogRecovery};

/// Why a log, a recovery or an entry is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    /// Neither header is valid. It is the error of the first.
    #[error("neither header of the log is valid: {0}")]
    Header(DecodeError),
    /// The area is not as long as the header says.
    #[error("the log's area has {found} bytes instead of {expected}")]
    Size {
        /// Bytes of the area.
        found: u64,
        /// Bytes according to the header.
        expected: u64,
    },
    /// A log has at least one sector, and less than [`LogHeader::LIMIT`] bytes.
    #[error("no log has an area of {0} bytes")]
    Capacity(u64),
    /// There is no room until entries are freed.
    #[error("the log is full")]
    Full,
    /// The entry is longer than the log: freeing entries does not help.
    #[error("an entry of {entry} bytes never fits in a log of {capacity}")]
    TooLong {
        /// Bytes of the entry with its padding.
        entry: u64,
        /// Bytes of the area.
        capacity: u64,
    },
}

/// Entries with their data, in their order.
pub type RecoveredEntries = Vec<(EntryHeader, Vec<u8>)>;

/// A header to write, and its slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderWrite {
    /// The slot, 0 or 1.
    pub slot: u32,
    /// The content.
    pub bytes: [u8; SECTOR_BYTES],
}

/// Most entries in a row of which each begins in a sector of the one before it: they are one request to the device.
const SHARING_ENTRIES_MAX: u32 = 32;
/// Entries that share a sector begin at multiples of this.
const ENTRY_ALIGNMENT: u64 = EntryHeader::SIZE as u64;

/// The place of an entry in the log: its position and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryPlace {
    /// Sequence of the entry.
    pub sequence: u64,
    /// Its position: a sector, unless it shares that with the entry before it.
    pub position: u64,
    /// Bytes by which the log grows: header, data and padding, less what was left of a shared sector. Whole sectors.
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct LoggedEntry {
    place: EntryPlace,
    /// Position after its data.
    end: u64,
    /// Entries before it that begin in a sector of the one before them, in a row; 0 if it begins at a sector.
    sharing: u32,
    epoch: u32,
    header_crc32c: u32,
    written: bool,
}

/// The log of a logical group. One priority thread owns it.
#[derive(Clone, Debug)]
pub struct Log {
    /// The header that is durable.
    durable: LogHeader,
    /// The header that is being written.
    freeing: Option<LogHeader>,
    entries: VecDeque<LoggedEntry>,
    tail: u64,
    next_sequence: u64,
    /// Entries below are acknowledged.
    acknowledged: u64,
    previous_crc32c: u32,
    /// What new entries have as their salt.
    salt: u32,
}

impl Log {
    /// An empty log. The owner first zeroes both slots and flushes, so that no header of an earlier log counts, then writes
    /// [`header`](Self::header). Sequences start at 1. A `capacity` that is not whole sectors is rounded down.
    ///
    /// # Errors
    /// [`LogError::Capacity`].
    pub fn create(log: [u8; 16], group: u32, capacity: u64, sector: LogSector) -> Result<Log, LogError> {
        if capacity < sector.bytes() || capacity >= LogHeader::LIMIT {
            return Err(LogError::Capacity(capacity));
        }
        Ok(Log::empty(LogHeader {
            log,
            generation: 0,
            group,
            epoch: 0,
            capacity: capacity - capacity % sector.bytes(),
            head: 0,
            head_sequence: 1,
            commit_point: 0,
            previous_crc32c: 0,
            sector,
            entries: EntryLayout::Salted,
        }))
    }

    fn empty(durable: LogHeader) -> Log {
        Log {
            tail: durable.head,
            next_sequence: durable.head_sequence,
            acknowledged: durable.head_sequence,
            previous_crc32c: durable.previous_crc32c,
            freeing: None,
            entries: VecDeque::new(),
            salt: 0,
            durable,
        }
    }

    /// Appends an operation: sets its sequence and checksums, and returns its place and the header to write there. The
    /// checksum of data that goes in place is the caller's.
    ///
    /// # Errors
    /// [`LogError::Full`] and [`LogError::TooLong`]; nothing was changed.
    ///
    /// # Panics
    /// If the data is not as long as the entry says, or the object belongs to another group.
    pub fn append(
        &mut self,
        entry: EntryHeader,
        data: &[u8],
    ) -> Result<(EntryPlace, [u8; EntryHeader::SIZE]), LogError> {
        self.append_at(self.tail, entry, data)
    }

    /// As [`append`](Self::append), for an entry that is written by the same request to the device as the one before it,
    /// if it begins in the same sector.
    ///
    /// # Errors
    /// As of [`append`](Self::append).
    ///
    /// # Panics
    /// As [`append`](Self::append).
    pub fn append_to_write(
        &mut self,
        entry: EntryHeader,
        data: &[u8],
    ) -> Result<(EntryPlace, [u8; EntryHeader::SIZE]), LogError> {
        let bytes = (EntryHeader::SIZE + entry.data_bytes()) as u64;
        let may_share = |position: &u64| {
            let last = self.entries.back().expect("it shares a sector with it");
            // The parts of the area are written by different requests.
            let lap = |position| position / self.durable.capacity;
            self.durable.entries == EntryLayout::Salted
                && last.sharing + 1 < SHARING_ENTRIES_MAX
                && lap(last.place.position) == lap(position + bytes - 1)
        };
        self.append_at(self.shared_position().filter(may_share).unwrap_or(self.tail), entry, data)
    }

    fn append_at(
        &mut self,
        position: u64,
        mut entry: EntryHeader,
        data: &[u8],
    ) -> Result<(EntryPlace, [u8; EntryHeader::SIZE]), LogError> {
        assert_eq!((data.len(), entry.object.group), (entry.data_bytes(), self.durable.group));
        let alone = entry_bytes(data.len(), self.durable.sector);
        if alone > self.durable.capacity {
            return Err(LogError::TooLong { entry: alone, capacity: self.durable.capacity });
        }
        let place = self.place_at(position, data.len());
        if place.bytes > self.room() {
            return Err(LogError::Full);
        }
        entry.sequence = self.next_sequence;
        entry.previous_crc32c = self.previous_crc32c;
        if !entry.in_place {
            entry.data_crc32c = crc32c(data);
        }
        let header = entry.encode(self.durable.log_of_entry(self.salt), place.position);
        self.push(place, &entry, &header);
        Ok((place, header))
    }

    /// Where the next entry may begin in the last sector of the one before it.
    fn shared_position(&self) -> Option<u64> {
        let position = self.entries.back()?.end.next_multiple_of(ENTRY_ALIGNMENT);
        let may_share = self.durable.entries >= EntryLayout::SharedSectors;
        (may_share && position < self.tail).then_some(position)
    }

    /// The place of the next entry if it is at this position.
    fn place_at(&self, position: u64, data_bytes: usize) -> EntryPlace {
        let end = position + (EntryHeader::SIZE + data_bytes) as u64;
        let bytes = end.next_multiple_of(self.durable.sector.bytes()) - self.tail;
        EntryPlace { sequence: self.next_sequence, position, bytes }
    }

    fn push(&mut self, place: EntryPlace, entry: &EntryHeader, header: &[u8; EntryHeader::SIZE]) {
        let header_crc32c = crc32c(header);
        self.previous_crc32c = header_crc32c;
        let before = self.entries.back().filter(|_| !self.is_at_sector(place.position));
        self.entries.push_back(LoggedEntry {
            place,
            end: place.position + (EntryHeader::SIZE + entry.data_bytes()) as u64,
            sharing: before.map_or(0, |before| before.sharing + 1),
            epoch: entry.epoch,
            header_crc32c,
            written: false,
        });
        self.tail += place.bytes;
        self.next_sequence += 1;
    }

    /// Whether what begins at a position begins a sector.
    fn is_at_sector(&self, position: u64) -> bool {
        position.is_multiple_of(self.durable.sector.bytes())
    }

    /// Sector of the device that the log was made for. A device with larger ones could damage acknowledged entries.
    pub fn sector(&self) -> LogSector {
        self.durable.sector
    }

    /// Its UUID.
    pub fn uuid(&self) -> [u8; 16] {
        self.durable.log
    }

    /// The logical group whose operations it has.
    pub fn group(&self) -> u32 {
        self.durable.group
    }

    /// Bytes of the area for entries.
    pub fn capacity(&self) -> u64 {
        self.durable.capacity
    }

    /// Bytes that can be appended.
    pub fn room(&self) -> u64 {
        self.durable.capacity - (self.tail - self.durable.head)
    }

    /// Epoch of the entry before the first of [`sequences`](Self::sequences); 0 if there was none.
    pub fn base_epoch(&self) -> u32 {
        self.durable.epoch
    }

    /// Epoch of an entry of the log; `None` if it is not there.
    pub fn epoch_of(&self, sequence: u64) -> Option<u32> {
        if sequence + 1 == self.durable.head_sequence {
            return Some(self.durable.epoch);
        }
        let index = sequence.checked_sub(self.durable.head_sequence)?;
        self.entries.get(usize::try_from(index).ok()?).map(|entry| entry.epoch)
    }

    /// Where an entry of the log is; `None` if it is not there.
    pub fn place_of(&self, sequence: u64) -> Option<EntryPlace> {
        let index = sequence.checked_sub(self.durable.head_sequence)?;
        self.entries.get(usize::try_from(index).ok()?).map(|entry| entry.place)
    }

    /// A header is being written, after [`free`](Self::free) or [`reset`](Self::reset).
    pub fn is_freeing(&self) -> bool {
        self.freeing.is_some()
    }

    /// Sequences of the entries in the log, freed ones included while that is not durable.
    pub fn sequences(&self) -> Range<u64> {
        self.durable.head_sequence..self.next_sequence
    }

    /// Entries up to this sequence are durable, as far as [`written`](Self::written) said.
    pub fn durable_through(&self) -> u64 {
        self.acknowledged - 1
    }

    /// An entry is durable. Returns the sequences that are now acknowledged: those up to the first that is not durable,
    /// because recovery ends there.
    pub fn written(&mut self, place: EntryPlace) -> Range<u64> {
        let first = self.durable.head_sequence;
        let index = place.sequence.checked_sub(first).map(|index| index as usize);
        if let Some(entry) = index.and_then(|index| self.entries.get_mut(index)) {
            entry.written = true;
        }
        let from = self.acknowledged;
        let unacknowledged = self.entries.iter().skip((from - first) as usize);
        self.acknowledged += unacknowledged.take_while(|entry| entry.written).count() as u64;
        from..self.acknowledged
    }

    /// The header that is durable, for [`create`](Self::create).
    pub fn header(&self) -> HeaderWrite {
        header_write(&self.durable)
    }

    /// Whether [`free`](Self::free) frees something.
    pub fn can_free(&self, sequence: u64) -> bool {
        self.freeing.is_none() && self.freeable(sequence) > 0
    }

    /// Acknowledged entries below a sequence that leave no other entry in their sectors.
    fn freeable(&self, sequence: u64) -> usize {
        let below = sequence.min(self.acknowledged).saturating_sub(self.durable.head_sequence) as usize;
        let ends_sector = |count: &usize| {
            self.entries.get(*count).is_none_or(|next| self.is_at_sector(next.place.position))
        };
        (0..=below).rev().find(ends_sector).unwrap_or(0)
    }

    /// Entries with a sequence below `sequence` are durable in the object store. Returns the header to write; `None` if
    /// one is being written, or if nothing is freed. Only acknowledged entries are freed, and whole sectors.
    pub fn free(&mut self, sequence: u64) -> Option<HeaderWrite> {
        let count = self.freeable(sequence);
        if count == 0 || self.freeing.is_some() {
            return None;
        }
        let last = self.entries[count - 1];
        let mut header = self.durable.clone();
        header.generation += 1;
        header.head = self.entries.get(count).map_or(self.tail, |next| next.place.position);
        header.head_sequence = last.place.sequence + 1;
        header.epoch = last.epoch;
        header.previous_crc32c = last.header_crc32c;
        Some(self.write_header(header))
    }

    fn write_header(&mut self, mut header: LogHeader) -> HeaderWrite {
        // A log of an earlier version has its own layout until this header is durable.
        header.entries = EntryLayout::Salted;
        let write = header_write(&header);
        self.freeing = Some(header);
        write
    }

    /// Gives up the entries from a sequence on; others take their places. A crash before the next entry is durable finds
    /// them again. No write of such an entry is in flight: one that lands later would damage an entry in its place.
    ///
    /// # Panics
    /// If an entry is not [`written`](Self::written) or is being freed.
    pub fn truncate(&mut self, from: u64) {
        let first = self.durable.head_sequence;
        let freed = self.freeing.as_ref().map_or(first, |header| header.head_sequence);
        assert!(from >= freed, "entry {from} is freed");
        let removed = self.entries.range(((from - first) as usize).min(self.entries.len())..);
        assert!(removed.clone().all(|entry| entry.written), "an entry from {from} on is being written");
        let Some(place) = removed.clone().next().map(|entry| entry.place) else { return };
        self.entries.truncate((from - first) as usize);
        self.salt = self.salt.wrapping_add(1);
        // A sector that has an entry which is kept is not written again.
        self.tail = place.position.next_multiple_of(self.durable.sector.bytes());
        self.next_sequence = from;
        self.acknowledged = self.acknowledged.min(from);
        self.previous_crc32c =
            self.entries.back().map_or(self.durable.previous_crc32c, |entry| entry.header_crc32c);
    }

    /// Gives up all entries: the next one follows an entry with this sequence and epoch, of which another replica has the
    /// data. Returns the header to write; [`freed`](Self::freed) when it is durable, and nothing is appended before.
    ///
    /// # Panics
    /// If a header or an entry is being written, or the sequence is not below [`LogHeader::LIMIT`].
    pub fn reset(&mut self, sequence: u64, epoch: u32) -> HeaderWrite {
        assert!(
            self.freeing.is_none() && self.entries.iter().all(|entry| entry.written),
            "a write is in flight"
        );
        assert!(sequence + 1 < LogHeader::LIMIT, "no log has sequence {sequence}");
        let mut header = self.durable.clone();
        header.generation += 1;
        (header.head, header.head_sequence, header.epoch) = (self.tail, sequence + 1, epoch);
        // An entry that was given up and stands at the head, maybe with this sequence, must not follow.
        let salt = [header.generation, self.previous_crc32c.into()].map(u64::to_le_bytes).concat();
        header.previous_crc32c = crc32c(&salt);
        self.write_header(header)
    }

    /// The header of [`free`](Self::free) is durable: the space is used again.
    ///
    /// # Panics
    /// If there is none.
    pub fn freed(&mut self) {
        let header = self.freeing.take().expect("a header is being written");
        while self.entries.pop_front_if(|entry| entry.place.position < header.head).is_some() {}
        if self.entries.is_empty() {
            // After a reset this is another sequence, with no entry before it.
            self.next_sequence = header.head_sequence;
            self.acknowledged = header.head_sequence;
            self.previous_crc32c = header.previous_crc32c;
        }
        self.durable = header;
    }

    /// The parts of the area for bytes at a position: the second is not empty if they go on at its start.
    pub fn spans(&self, position: u64, bytes: usize) -> [Range<usize>; 2] {
        let at = (position % self.durable.capacity) as usize;
        let first = bytes.min(self.durable.capacity as usize - at);
        [at..at + first, 0..bytes - first]
    }

    /// Copies an entry to its place, for logs in memory.
    pub fn copy_to(&self, place: EntryPlace, header: &[u8; EntryHeader::SIZE], data: &[u8], area: &mut [u8]) {
        for (position, bytes) in [(place.position, &header[..]), (place.position + header.len() as u64, data)]
        {
            let [first, second] = self.spans(position, bytes.len());
            let (left, right) = bytes.split_at(first.len());
            area[first].copy_from_slice(left);
            area[second].copy_from_slice(right);
        }
    }
}

/// Most bytes of an entry with this many bytes of data: header, data and padding, whole sectors.
pub fn entry_bytes(data_bytes: usize, sector: LogSector) -> u64 {
    ((EntryHeader::SIZE + data_bytes) as u64).next_multiple_of(sector.bytes())
}

fn header_write(header: &LogHeader) -> HeaderWrite {
    let slot = (header.generation % 2) as u32;
    HeaderWrite { slot, bytes: header.encode(slot) }
}
