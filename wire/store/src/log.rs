//! Operation logs: two headers and entries.

use std::ops::Range;

use codec::DecodeError;

use crate::fields::{
    array, check_location, check_zero, open, open_version, put, seal, seal_version, u32_at, u64_at,
};
use crate::{FORMAT_VERSION, OBJECT_BYTES, ObjectId, SECTOR_BYTES};

const LOG_MAGIC: [u8; 4] = *b"RBLH";
const ENTRY_MAGIC: [u8; 4] = *b"RBLE";
/// The version of a header whose log may have entries with a salt.
const SALTED_VERSION: u16 = 2;
/// Where an entry has the UUID of its log, and its salt: the last bytes of the UUID in logs without.
const ENTRY_LOG: usize = 104;
const SALT: usize = 116;
/// Where the data of an entry is, if it does not follow.
const WITHHELD: u8 = 1;
const IN_PLACE: u8 = 2;

/// Bytes that the device of a log writes whole or not at all. Headers and writes of entries begin at such sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum LogSector {
    /// 512 bytes.
    Bytes512 = 512,
    /// 4096 bytes.
    Bytes4096 = 4096,
}

impl LogSector {
    /// Every size.
    pub const ALL: [LogSector; 2] = [LogSector::Bytes512, LogSector::Bytes4096];

    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        self as u64
    }
}

/// How the entries of a log are written. Older programs, which would not find entries of a later layout, reject a log that may
/// have some. Entries of earlier layouts may be left in a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EntryLayout {
    /// Each begins at a sector.
    WholeSectors,
    /// An entry may begin within a sector, after the one before it.
    SharedSectors,
    /// So, and each has a salt, in the place of the last 4 bytes of the log's UUID. Its writer takes another one after each
    /// start and each time that entries are given up, so that what is left of these follows no entry that is written later,
    /// not even an equal one.
    Salted,
}

/// The state of a logical group's log. There are two, in turn; the valid one with the higher generation counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogHeader {
    /// The log, a UUID; entries repeat it.
    pub log: [u8; 16],
    /// Counts headers.
    pub generation: u64,
    /// The logical group.
    pub group: u32,
    /// Epoch of the entry before `head`; 0 if there was none.
    pub epoch: u32,
    /// Size of the area for entries, in bytes: whole sectors, at least one.
    pub capacity: u64,
    /// Position, at a sector, of the first entry that is not durable in the object store. Positions never decrease; the
    /// byte in the area is the position modulo the capacity.
    pub head: u64,
    /// Sequence of the entry at `head`.
    pub head_sequence: u64,
    /// Every entry with a sequence of at most this is committed.
    pub commit_point: u64,
    /// CRC32C of the header of the entry before `head`; 0 if there was none.
    pub previous_crc32c: u32,
    /// Sector of the device.
    pub sector: LogSector,
    /// How entries are written while this header counts.
    pub entries: EntryLayout,
}

impl LogHeader {
    /// Above every capacity, position and sequence: no log gets that far, and sums of them stay below 2^64.
    pub const LIMIT: u64 = 1 << 62;

    /// Encodes the header for its slot, 0 or 1.
    pub fn encode(&self, slot: u32) -> [u8; SECTOR_BYTES] {
        let mut out = [0; SECTOR_BYTES];
        put(&mut out, 12, slot.to_le_bytes());
        put(&mut out, 16, self.log);
        put(&mut out, 32, self.generation.to_le_bytes());
        put(&mut out, 40, self.group.to_le_bytes());
        put(&mut out, 44, self.epoch.to_le_bytes());
        put(&mut out, 48, self.capacity.to_le_bytes());
        put(&mut out, 56, self.head.to_le_bytes());
        put(&mut out, 64, self.head_sequence.to_le_bytes());
        put(&mut out, 72, self.commit_point.to_le_bytes());
        put(&mut out, 80, self.previous_crc32c.to_le_bytes());
        put(&mut out, 84, (self.sector as u32).to_le_bytes());
        out[88] = (self.entries >= EntryLayout::SharedSectors).into();
        let version = if self.entries == EntryLayout::Salted { SALTED_VERSION } else { FORMAT_VERSION };
        seal_version(&mut out, LOG_MAGIC, version);
        out
    }

    /// What an entry with this salt has of the log, for [`EntryHeader::encode`] and [`EntryHeader::decode`].
    pub fn log_of_entry(&self, salt: u32) -> [u8; 16] {
        let mut log = self.log;
        if self.entries == EntryLayout::Salted {
            put(&mut log, SALT - ENTRY_LOG, salt.to_le_bytes());
        }
        log
    }

    /// Decodes what was read from a slot.
    ///
    /// # Errors
    /// The first field that no header of this version and slot has.
    pub fn decode(from: &[u8], slot: u32) -> Result<LogHeader, DecodeError> {
        let version = open_version("the log header", from, SECTOR_BYTES, LOG_MAGIC, SALTED_VERSION)?;
        check_location(u32_at(from, 12).into(), slot.into(), 12)?;
        check_zero("a reserved field of the log header", from, 6..8)?;
        check_zero("a reserved field of the log header", from, 89..SECTOR_BYTES)?;
        let entries = match (version, from[88]) {
            (FORMAT_VERSION, 0) => EntryLayout::WholeSectors,
            (FORMAT_VERSION, 1) => EntryLayout::SharedSectors,
            (SALTED_VERSION, 1) => EntryLayout::Salted,
            _ => return Err(DecodeError::value("whether entries share sectors", 88, from[88].into())),
        };
        for (what, at) in [("the capacity", 48), ("the head", 56), ("the sequence of the head", 64)] {
            if u64_at(from, at) >= LogHeader::LIMIT {
                return Err(DecodeError::value(what, at as u32, u64_at(from, at)));
            }
        }
        if u64_at(from, 48) == 0 {
            return Err(DecodeError::value("the capacity", 48, 0));
        }
        let size = u32_at(from, 84);
        let sector = LogSector::ALL.into_iter().find(|known| *known as u32 == size);
        let sector = sector.ok_or(DecodeError::value("the sector size", 84, size.into()))?;
        for (what, at) in [("the capacity", 48), ("the head", 56)] {
            if !u64_at(from, at).is_multiple_of(sector.bytes()) {
                return Err(DecodeError::value(what, at as u32, u64_at(from, at)));
            }
        }
        Ok(LogHeader {
            log: array(from, 16),
            generation: u64_at(from, 32),
            group: u32_at(from, 40),
            epoch: u32_at(from, 44),
            capacity: u64_at(from, 48),
            head: u64_at(from, 56),
            head_sequence: u64_at(from, 64),
            commit_point: u64_at(from, 72),
            previous_crc32c: u32_at(from, 80),
            sector,
            entries,
        })
    }
}

/// What an entry does to its object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Operation {
    /// Writes the data that follows the header.
    Write = 1,
    /// Writes zeroes, and gives space back.
    WriteZeroes = 2,
    /// Allocates the blocks of a range, or every block of the object if the length is 0.
    Preallocate = 3,
    /// Removes the object.
    Remove = 4,
}

impl Operation {
    /// Every operation.
    pub const ALL: [Operation; 4] =
        [Operation::Write, Operation::WriteZeroes, Operation::Preallocate, Operation::Remove];
}

/// An entry without its data, which follows if the operation is a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryHeader {
    /// The operation.
    pub operation: Operation,
    /// The object, whose group is the log's.
    pub object: ObjectId,
    /// Version that the object gets.
    pub version: u64,
    /// Number of the operation in its logical group, without gaps.
    pub sequence: u64,
    /// Epoch in which it was appended.
    pub epoch: u32,
    /// Offset in the object, in bytes.
    pub offset: u32,
    /// Length in bytes; 0 for operations on the whole object.
    pub length: u32,
    /// The commit point that its sender knew.
    pub commit_point: u64,
    /// The client that sent it.
    pub client: u64,
    /// The client's number of the request: a retry has the same.
    pub client_number: u64,
    /// When it was received, in nanoseconds since 1970; 0 for what changes no content, as a repair.
    pub mtime_ns: u64,
    /// CRC32C of the data; 0 without.
    pub data_crc32c: u32,
    /// CRC32C of the header of the entry before it, so that remains of an abandoned tail never follow a new entry.
    pub previous_crc32c: u32,
    /// The data was withheld from a replica that gets a copy of the object later: no data follows, and the entry is not
    /// applied.
    pub withheld: bool,
    /// The data is not in the log: it is written to its block once the header is durable, before the entry is
    /// acknowledged. Only logs have such entries.
    pub in_place: bool,
}

impl EntryHeader {
    /// Size of the header.
    pub const SIZE: usize = 128;

    /// An operation on a range of an object, everything else zero.
    pub const fn new(operation: Operation, object: ObjectId, offset: u32, length: u32) -> EntryHeader {
        EntryHeader {
            operation,
            object,
            version: 0,
            sequence: 0,
            epoch: 0,
            offset,
            length,
            commit_point: 0,
            client: 0,
            client_number: 0,
            mtime_ns: 0,
            data_crc32c: 0,
            previous_crc32c: 0,
            withheld: false,
            in_place: false,
        }
    }

    /// Bytes of data that follow the header.
    pub fn data_bytes(&self) -> usize {
        let has_data = self.operation == Operation::Write && !self.withheld && !self.in_place;
        if has_data { self.length as usize } else { 0 }
    }

    /// Whether nothing is left of what a range of an object had before this operation.
    pub fn replaces(&self, object: ObjectId, range: Range<u32>) -> bool {
        let is_whole = match self.operation {
            Operation::Write | Operation::WriteZeroes => {
                self.offset <= range.start && range.end <= self.offset + self.length
            }
            Operation::Remove => true,
            Operation::Preallocate => false,
        };
        is_whole && self.object == object
    }

    /// The salt of an encoded header; in logs without salts, the last 4 bytes of their UUID.
    pub fn salt(from: &[u8; EntryHeader::SIZE]) -> u32 {
        u32_at(from, SALT)
    }

    /// Encodes the header for a position of a log.
    pub fn encode(&self, log: [u8; 16], position: u64) -> [u8; EntryHeader::SIZE] {
        let mut out = [0; EntryHeader::SIZE];
        out[6] = self.operation as u8;
        out[7] = if self.in_place { IN_PLACE } else { self.withheld.into() };
        put(&mut out, 12, self.data_crc32c.to_le_bytes());
        self.object.put(&mut out, 16);
        put(&mut out, 40, self.version.to_le_bytes());
        put(&mut out, 48, self.sequence.to_le_bytes());
        put(&mut out, 56, self.epoch.to_le_bytes());
        put(&mut out, 60, self.length.to_le_bytes());
        put(&mut out, 64, self.commit_point.to_le_bytes());
        put(&mut out, 72, self.client.to_le_bytes());
        put(&mut out, 80, self.client_number.to_le_bytes());
        put(&mut out, 88, self.offset.to_le_bytes());
        put(&mut out, 92, self.previous_crc32c.to_le_bytes());
        put(&mut out, 96, position.to_le_bytes());
        put(&mut out, ENTRY_LOG, log);
        put(&mut out, 120, self.mtime_ns.to_le_bytes());
        seal(&mut out, ENTRY_MAGIC);
        out
    }

    /// Decodes what was read at a position of a log. The data is not checked.
    ///
    /// # Errors
    /// The first field that no entry of this version, log and position has. After the last entry that was written
    /// completely, any bytes can be found: an entry of an earlier lap has another position.
    pub fn decode(from: &[u8], log: [u8; 16], position: u64) -> Result<EntryHeader, DecodeError> {
        open("the log entry", from, EntryHeader::SIZE, ENTRY_MAGIC)?;
        check_location(u64_at(from, 96), position, 96)?;
        if array(from, ENTRY_LOG) != log {
            return Err(DecodeError::Text { what: "the log entry", reason: "it belongs to another log" });
        }
        let operation = Operation::ALL.into_iter().find(|known| *known as u8 == from[6]);
        let entry = EntryHeader {
            operation: operation.ok_or(DecodeError::value("the operation", 6, from[6].into()))?,
            object: ObjectId::at(from, 16),
            version: u64_at(from, 40),
            sequence: u64_at(from, 48),
            epoch: u32_at(from, 56),
            offset: u32_at(from, 88),
            length: u32_at(from, 60),
            commit_point: u64_at(from, 64),
            client: u64_at(from, 72),
            client_number: u64_at(from, 80),
            mtime_ns: u64_at(from, 120),
            data_crc32c: u32_at(from, 12),
            previous_crc32c: u32_at(from, 92),
            withheld: from[7] == WITHHELD,
            in_place: from[7] == IN_PLACE,
        };
        let is_write = entry.operation == Operation::Write;
        if from[7] > IN_PLACE || (entry.in_place && !is_write) {
            return Err(DecodeError::value("where the data is", 7, from[7].into()));
        }
        let end = u64::from(entry.offset) + u64::from(entry.length);
        let is_range_valid = match entry.operation {
            Operation::Write | Operation::WriteZeroes => entry.length > 0,
            Operation::Preallocate => true,
            Operation::Remove => entry.length == 0,
        };
        if end > OBJECT_BYTES as u64 || !is_range_valid {
            return Err(DecodeError::value("the length of the operation", 60, entry.length.into()));
        }
        Ok(entry)
    }
}

const _: () = assert!(16 + ObjectId::SIZE == 40);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_replaces_the_ranges_that_it_covers() {
        let object = ObjectId { group: 0, volume: 1, index: 2, suffix: 0 };
        let replaces = |operation, start, end| {
            EntryHeader::new(operation, object, 4096, 4096).replaces(object, start..end)
        };
        for operation in [Operation::Write, Operation::WriteZeroes] {
            assert!(replaces(operation, 4096, 8192) && replaces(operation, 5000, 6000));
            assert!(!replaces(operation, 4095, 8192) && !replaces(operation, 4096, 8193));
        }
        assert!(replaces(Operation::Remove, 0, 16384) && !replaces(Operation::Preallocate, 4096, 8192));
        let other = EntryHeader::new(Operation::Remove, ObjectId { index: 3, ..object }, 0, 0);
        assert!(!other.replaces(object, 0..1));
    }

    #[test]
    fn an_operation_has_a_range_or_none() {
        let object = ObjectId { group: 0, volume: 1, index: 2, suffix: 0 };
        for (operation, with_range, without) in [
            (Operation::Write, true, false),
            (Operation::WriteZeroes, true, false),
            (Operation::Preallocate, true, true),
            (Operation::Remove, false, true),
        ] {
            for (length, is_valid) in [(4096, with_range), (0, without)] {
                let entry = EntryHeader::new(operation, object, 0, length);
                let decoded = EntryHeader::decode(&entry.encode([7; 16], 512), [7; 16], 512);
                assert_eq!(decoded.is_ok(), is_valid, "{operation:?} of {length} bytes");
            }
        }
    }
}
