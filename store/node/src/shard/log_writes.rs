//! Writes to the log: entries share them, and are acknowledged in their order.

use std::cell::Cell;
use std::rc::Rc;

use bdev::{Completion, Request};
use block_io::{RequestFlags, Status, Tag};
use dma::Data;
use oplog::EntryPlace;
use wire_store::{BLOCK_BYTES, EntryHeader, OBJECT_BYTES, Operation, Superblock};

use super::overlay::ByteSource;
use super::{CommittedEntry, DeviceIo, EntryBytes, PlacedWrite, Shard, UnacknowledgedEntry};
use crate::StoreError;

/// Writes to the log in flight; entries that arrive meanwhile share the next one.
const LOG_WRITES_MAX: usize = 2;
/// Most bytes and entries of one write to the log.
const LOG_WRITE_BYTES: u64 = 1 << 20;
const LOG_WRITE_ENTRIES: usize = 256;
/// Data of entries that are copied into the memory of one write: copying more costs as much as another
/// request.
const COPIED_BYTES_MAX: usize = 16 << 10;

/// A write of entries to the log, as one request or, around the end of the area, as two.
pub(super) struct LogWrite {
    pub(super) places: Vec<EntryPlace>,
    pub(super) requests_left: Cell<u32>,
}

impl Shard {
    /// Submits what was appended, several entries in one write. Without memory it is tried again in a later
    /// poll.
    pub(super) fn submit_log_writes(&mut self) {
        while self.unwritten > 0 && self.log_writes < LOG_WRITES_MAX && self.has_io_slots() {
            let first = self.unacknowledged.len() - self.unwritten;
            let Some((mut data, places)) = self.take_log_write(first) else { return };
            let (capacity, bytes) = (self.log.capacity(), data.len() as u64);
            let start = places[0].position % capacity;
            self.unwritten -= places.len();
            let rest = (start + bytes > capacity).then(|| data.split_off((capacity - start) as usize));
            let requests_left = Cell::new(1 + u32::from(rest.is_some()));
            let write = Rc::new(LogWrite { places, requests_left });
            rest.into_iter().for_each(|rest| self.push_log_write(0, rest, write.clone()));
            self.push_log_write(start, data, write);
            self.log_writes += 1;
            self.stats.log_writes += 1;
            self.stats.log_bytes += bytes;
        }
    }

    /// The bytes of the next write, which begins with this unacknowledged entry, and the places of its
    /// entries. Short entries are copied together: each slice of a request would be one for the device, if it
    /// is not whole pages.
    fn take_log_write(&mut self, first: usize) -> Option<(Data, Vec<EntryPlace>)> {
        let places = self.places_of_write(first);
        let are_copied = places.len() > 1 && is_copied(&self.unacknowledged[first].header);
        let entries = self.unacknowledged.range_mut(first..).take(places.len());
        let bytes = places.iter().map(|place| place.bytes as usize).sum();
        if !are_copied {
            let mut buffers = Vec::with_capacity(places.len());
            for entry in entries.map(|entry| &mut entry.bytes) {
                buffers.push(match entry.take().expect("it was not written") {
                    EntryBytes::All(buffer) => buffer,
                    EntryBytes::Header(header) => {
                        let Some(mut buffer) = self.core.pool().take(bytes) else {
                            *entry = Some(EntryBytes::Header(header));
                            return None;
                        };
                        write_padded(buffer.as_mut_slice(), &header);
                        buffer
                    }
                });
            }
            return Some((Data::gather(buffers).expect("an entry has bytes"), places));
        }
        let mut buffer = self.core.pool().take(bytes)?;
        let mut out = buffer.as_mut_slice();
        let ends = places[1..].iter().map(|place| place.position - places[0].position);
        let mut at = 0;
        for (entry, end) in entries.zip(ends.chain([bytes as u64])) {
            let (to, rest) = out.split_at_mut(end as usize - at);
            match entry.bytes.take().expect("it was not written") {
                EntryBytes::All(from) => {
                    write_padded(to, &from.as_slice()[..EntryHeader::SIZE + entry.header.data_bytes()]);
                }
                EntryBytes::Header(header) => write_padded(to, &header),
            }
            (out, at) = (rest, end as usize);
        }
        Some((Data::One(buffer), places))
    }

    /// The places of the entries of the next write, of which none begins in a sector of another write.
    fn places_of_write(&self, first: usize) -> Vec<EntryPlace> {
        let (capacity, sector) = (self.log.capacity(), self.log.sector().bytes());
        let unwritten = self.unacknowledged.range(first..);
        let start = self.unacknowledged[first].place.position % capacity;
        let are_copied = is_copied(&self.unacknowledged[first].header);
        let (mut bytes, mut places, mut whole) = (0, Vec::new(), 0);
        for UnacknowledgedEntry { place, header, .. } in unwritten {
            let begins_sector = place.position.is_multiple_of(sector);
            if begins_sector {
                whole = places.len();
            }
            // Only the first entry may go on at the start of the area.
            let is_full = places.len() >= LOG_WRITE_ENTRIES
                || bytes + place.bytes > LOG_WRITE_BYTES.min(capacity - start)
                || is_copied(header) != are_copied;
            if is_full && whole > 0 {
                places.truncate(whole);
                break;
            }
            bytes += place.bytes;
            places.push(*place);
        }
        places
    }

    /// Whether there are slots for the requests of one write to the log.
    fn has_io_slots(&self) -> bool {
        self.ios.len() + 2 <= self.ios.capacity()
    }

    fn push_log_write(&mut self, offset: u64, data: Data, write: Rc<LogWrite>) {
        let area = (self.log_start + Superblock::LOG_HEADER_BLOCKS) * BLOCK_BYTES as u64;
        let block_bytes = self.log_block_bytes();
        let blocks = data.len() as u64 / block_bytes;
        let slot = self.ios.insert(DeviceIo::Log(write)).ok().expect("room was checked");
        let lba = (area + offset) / block_bytes;
        let mut request = Request::write(Tag(slot.to_bits()), lba, blocks as u32, data);
        if !self.is_volatile {
            request.flags = RequestFlags::FUA;
        }
        match &mut self.log_channel {
            Some(log) => log.requests.push(request),
            None => self.requests.push(request),
        }
    }

    /// Bytes of a block of the device with the logs.
    pub(super) fn log_block_bytes(&self) -> u64 {
        self.log_channel.as_ref().map_or(self.block_bytes, |log| log.channel.block_size().into())
    }

    /// A write to the log is durable: entries are too, but those whose data is to be written in place now.
    pub(super) fn headers_written(&mut self, places: &[EntryPlace]) {
        if !self.placed.is_enabled {
            return self.log_written(places);
        }
        let first = self.unacknowledged.front().map_or(0, |entry| entry.place.sequence);
        let mut durable = Vec::with_capacity(places.len());
        for place in places {
            let entry = &mut self.unacknowledged[(place.sequence - first) as usize];
            match (entry.placed, entry.to_place.take()) {
                (Some(block), Some(data)) => {
                    let data_crc32c = entry.header.data_crc32c;
                    let write = PlacedWrite { place: *place, block, data_crc32c, data };
                    self.placed.to_write.push_back(write);
                }
                _ => durable.push(*place),
            }
        }
        if !durable.is_empty() {
            self.log_written(&durable);
        }
    }

    /// Submits what overwrites blocks.
    pub(super) fn submit_placed_writes(&mut self) {
        while !self.placed.to_write.is_empty() && self.has_io_slots() {
            let write = self.placed.to_write.pop_front().expect("it is not empty");
            let PlacedWrite { place, block, data_crc32c, data } = write;
            let io = DeviceIo::Placed(place, block, data_crc32c);
            let slot = self.ios.insert(io).ok().expect("room was checked");
            let (lba, blocks) = (block * BLOCK_BYTES as u64, data.len() as u64);
            let (lba, blocks) = (lba / self.block_bytes, blocks / self.block_bytes);
            let mut request = Request::write(Tag(slot.to_bits()), lba, blocks as u32, Data::One(data));
            request.flags.set(RequestFlags::FUA, !self.is_volatile);
            request.flags.set(RequestFlags::ATOMIC, self.placed.is_atomic);
            self.requests.push(request);
        }
    }

    /// A block is overwritten: its entry is durable.
    pub(super) fn placed_written(
        &mut self,
        place: EntryPlace,
        block: u64,
        data_crc32c: u32,
        completion: &Completion,
    ) {
        let status = completion.status();
        if !status.is_success() {
            let offset = block * BLOCK_BYTES as u64;
            self.fail(&StoreError::Io { what: "write in place", offset, status });
        }
        if self.failed.is_none() {
            self.set_checksum(block, data_crc32c);
            self.is_changed = true;
            self.placed.written += 1;
            self.log_written(&[place]);
        }
    }

    /// Entries of a write are durable.
    pub(super) fn log_written(&mut self, places: &[EntryPlace]) {
        let first = self.log.sequences().start;
        let mut acknowledged = first..first;
        for place in places {
            let range = self.log.written(*place);
            acknowledged = if acknowledged.is_empty() { range } else { acknowledged.start..range.end };
        }
        for _ in acknowledged {
            let entry = self.unacknowledged.pop_front().expect("it was appended");
            if let Some(replication) = &mut self.replication {
                replication.is_durable(entry);
                continue;
            }
            let UnacknowledgedEntry { place, header, data, need, reply, .. } = entry;
            let (bytes, copied, placed) = (place.bytes, None, None);
            self.commit(CommittedEntry { header, data, bytes, need, copied, placed });
            reply.send(Status::SUCCESS, None);
        }
    }

    /// An entry is committed, with all before it: reads find it.
    pub(super) fn commit(&mut self, entry: CommittedEntry) {
        let CommittedEntry { header, data, .. } = &entry;
        let range = header.offset..header.offset + header.length;
        match header.operation {
            _ if header.withheld || header.in_place => {}
            Operation::Write => {
                let source = ByteSource::Data(data.clone(), 0);
                self.overlay.insert(header.object, range, header.sequence, source);
            }
            Operation::WriteZeroes => {
                self.overlay.insert(header.object, range, header.sequence, ByteSource::Zeroes);
            }
            Operation::Remove => {
                let all = 0..OBJECT_BYTES as u32;
                self.overlay.insert(header.object, all, header.sequence, ByteSource::Zeroes);
            }
            Operation::Preallocate => {}
        }
        if self.committed.is_empty() {
            self.oldest_committed_ns = self.core.now_ns();
        }
        self.stats.entries += 1;
        let resumes = self.placed.commit(&entry.header, entry.placed);
        self.committed.push_back(entry);
        if resumes {
            self.resume_waiting();
        }
    }
}

/// Writes what the log gets of an entry, and zeroes up to the next one.
fn write_padded(to: &mut [u8], bytes: &[u8]) {
    let (entry, padding) = to.split_at_mut(bytes.len());
    entry.copy_from_slice(bytes);
    padding.fill(0);
}

/// Whether an entry is short enough to be copied together with others.
pub(super) fn is_copied(header: &EntryHeader) -> bool {
    header.data_bytes() <= COPIED_BYTES_MAX
}
