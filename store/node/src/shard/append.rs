//! Entries that are appended to the log: what they hold until they are in place.

use dma::Buffer;
use objects::SpaceNeed;
use oplog::EntryPlace;
use wire_store::{EntryHeader, Operation};

use super::log_writes::is_copied;
use super::messages::Reply;
use super::overlay::EntryData;
use super::{EntryBytes, Shard, UnacknowledgedEntry};

impl Shard {
    /// Appends an entry to the log, which has space for it. `buffer` has space for the header, then the data,
    /// then zeroes.
    pub(super) fn append(&mut self, header: EntryHeader, mut buffer: Buffer, need: SpaceNeed, reply: Reply) {
        let (place, bytes) =
            self.place(&header, &buffer.as_slice()[EntryHeader::SIZE..][..header.data_bytes()]);
        buffer.as_mut_slice()[..EntryHeader::SIZE].copy_from_slice(&bytes);
        let to_write = buffer.share();
        let data = match header.data_bytes() {
            0 => EntryData::None,
            _ => EntryData::logged(buffer, self.store.is_some()),
        };
        self.reserve(&header, need);
        let bytes = Some(EntryBytes::All(to_write));
        self.unacknowledged.push_back(UnacknowledgedEntry {
            place,
            header,
            data,
            bytes,
            need,
            reply,
            placed: None,
            to_place: None,
        });
        self.unwritten += 1;
        self.unplaced.add(place.bytes);
        self.stats.unplaced_bytes_max = self.stats.unplaced_bytes_max.max(self.unplaced.bytes());
    }

    /// Appends an entry whose data overwrites a block.
    pub(super) fn append_in_place(&mut self, header: EntryHeader, data: Buffer, block: u64) {
        let (place, bytes) = self.place(&header, &[]);
        let need = SpaceNeed::default();
        self.reserve(&header, need);
        self.placed.insert(&header, block);
        self.unacknowledged.push_back(UnacknowledgedEntry {
            place,
            header,
            data: EntryData::None,
            bytes: Some(EntryBytes::Header(bytes)),
            need,
            reply: Reply::None,
            placed: Some(block),
            to_place: Some(data),
        });
        self.unwritten += 1;
        self.unplaced.add(place.bytes);
        self.stats.entries_overwriting += 1;
    }

    /// Gives an entry its place in the log, which has room for it.
    fn place(&mut self, header: &EntryHeader, data: &[u8]) -> (EntryPlace, [u8; EntryHeader::SIZE]) {
        let last = self.unacknowledged.back().filter(|_| self.unwritten > 0);
        let is_same_write = is_copied(header) && last.is_some_and(|last| is_copied(&last.header));
        let appended = match is_same_write {
            true => self.log.append_to_write(header.clone(), data),
            false => self.log.append(header.clone(), data),
        };
        appended.expect("room was checked")
    }

    /// The space of a replica's entry. One that overwrites a block has it already, and what an entry without
    /// its data wrote comes with a copy: reserved space would keep that out, which the entry waits for.
    pub(super) fn space_of_entry(&self, header: &EntryHeader, after_release: bool) -> SpaceNeed {
        match header.in_place || header.withheld {
            true => SpaceNeed::default(),
            false => self.partition.space_need(header, after_release).unwrap_or_default(),
        }
    }

    /// Reserves the space of an entry that is not applied to the partition yet.
    pub(super) fn reserve(&mut self, header: &EntryHeader, need: SpaceNeed) {
        let unapplied = self.unapplied.entry(header.object).or_default();
        unapplied.all += 1;
        unapplied.releasing += u32::from(gives_up_space(header.operation));
        unapplied.logged += u32::from(!header.in_place);
        self.reserved.extents += need.extents;
        self.reserved.onodes += need.onodes;
    }

    pub(super) fn release_reservation(&mut self, header: &EntryHeader, need: SpaceNeed) {
        self.reserved.extents -= need.extents;
        self.reserved.onodes -= need.onodes;
        if let Some(unapplied) = self.unapplied.get_mut(&header.object) {
            unapplied.all -= 1;
            unapplied.releasing -= u32::from(gives_up_space(header.operation));
            unapplied.logged -= u32::from(!header.in_place);
            if unapplied.all == 0 {
                self.unapplied.remove(&header.object);
            }
        }
    }
}

pub(super) fn gives_up_space(operation: Operation) -> bool {
    matches!(operation, Operation::WriteZeroes | Operation::Remove)
}
