//! The operation log of a replica as a device has it: the product's log on a medium in memory.

use std::sync::Arc;

use oplog::Log;
use random::WyRand;
use replica::{EntryId, ReplicatedEntry};
use wire_store::{EntryHeader, LogSector, SECTOR_BYTES};

use super::cluster::GROUP;

/// Room for more entries than a replica ever keeps here.
const CAPACITY: usize = 256 << 10;

/// A log with its headers and its area.
#[derive(Clone)]
pub(super) struct LogMedium {
    log: Log,
    slots: [[u8; SECTOR_BYTES]; 2],
    area: Vec<u8>,
    /// Of the entries since the last start. Those of truncations are between this and the next one.
    salt: u32,
}

impl LogMedium {
    pub(super) fn new() -> LogMedium {
        let log = Log::create([1; 16], GROUP, CAPACITY as u64, LogSector::Bytes512).expect("it has sectors");
        let slots = [log.header().bytes, [0; SECTOR_BYTES]];
        LogMedium { log, slots, area: vec![0; CAPACITY], salt: 0 }
    }

    /// An entry is durable, but for data that goes in place. Of what was committed when it was sent, entries up to
    /// `durable` have their data here.
    pub(super) fn append(&mut self, entry: &ReplicatedEntry, in_place: bool, durable: u64) {
        let (mut header, data) = logged(entry, in_place);
        header.commit_point = header.commit_point.min(durable);
        let (place, header) = self.log.append(header, data).expect("there is room");
        assert_eq!(place.sequence, entry.header.sequence, "the replica and its log count alike");
        self.log.copy_to(place, &header, data, &mut self.area);
        self.log.written(place);
    }

    /// A crash tears the write of an entry: its first bytes are there, the others are not.
    pub(super) fn append_torn(&mut self, entry: &ReplicatedEntry, in_place: bool, random: &mut WyRand) {
        let (mut header, data) = logged(entry, in_place);
        header.commit_point = 0;
        let (place, header) = self.log.append(header, data).expect("there is room");
        let before = self.area.clone();
        self.log.copy_to(place, &header, data, &mut self.area);
        let written = EntryHeader::SIZE + data.len();
        let kept = random.index(written);
        for span in self.log.spans(place.position + kept as u64, written - kept) {
            self.area[span.clone()].copy_from_slice(&before[span]);
        }
    }

    /// The log ends before a sequence.
    pub(super) fn truncate(&mut self, from: u64) {
        self.log.truncate(from);
    }

    /// Entries up to this one are superfluous.
    pub(super) fn free(&mut self, through: EntryId) {
        let write = self.log.free(through.sequence + 1).expect("there is something to free");
        self.write_header(&write);
        assert_eq!(self.base(), through);
    }

    /// There are no entries; the next one follows `base`.
    pub(super) fn reset(&mut self, base: EntryId) {
        let write = self.log.reset(base.sequence, base.epoch);
        self.write_header(&write);
    }

    fn write_header(&mut self, write: &oplog::HeaderWrite) {
        self.slots[write.slot as usize] = write.bytes;
        self.log.freed();
    }

    /// The entry before the first.
    fn base(&self) -> EntryId {
        EntryId { sequence: self.log.sequences().start - 1, epoch: self.log.base_epoch() }
    }

    /// Flips a bit of the last entry, if that is after `through` and has its data here. Returns whether there
    /// is one.
    pub(super) fn damage_last(&mut self, through: u64, random: &mut WyRand) -> bool {
        let (log, entries) = Log::recover(&self.slots, &self.area, self.salt).expect("one header is valid");
        let Some((header, data)) = entries.last().filter(|(it, _)| it.sequence > through && !it.in_place)
        else {
            return false;
        };
        let place = log.place_of(header.sequence).expect("it is in the log");
        let at = random.index(EntryHeader::SIZE + data.len());
        let [first, second] = log.spans(place.position + at as u64, 1);
        let span = if first.is_empty() { second } else { first };
        self.area[span.start] ^= 1 << random.below(8);
        true
    }

    /// What a start finds.
    pub(super) fn recover(&mut self) -> (EntryId, Vec<Arc<ReplicatedEntry>>) {
        self.salt += 1 << 16;
        let (log, entries) = Log::recover(&self.slots, &self.area, self.salt).expect("one header is valid");
        self.log = log;
        let entries = entries.into_iter().map(|(header, data)| {
            // What is before an entry in the log is not the replica's matter.
            let header = EntryHeader { previous_crc32c: 0, ..header };
            Arc::new(ReplicatedEntry { header, data: data.into() })
        });
        (self.base(), entries.collect())
    }
}

/// What the log has of an entry.
fn logged(entry: &ReplicatedEntry, in_place: bool) -> (EntryHeader, &[u8]) {
    let header = EntryHeader { in_place, ..entry.header.clone() };
    (header, if in_place { &[] } else { &entry.data })
}
