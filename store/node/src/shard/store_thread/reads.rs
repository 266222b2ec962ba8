//! Reads on a non-priority thread: blocks, compared with their checksums.
//!
//! Data and blocks of the checksum table are read at the same time. A read whose data is there first waits,
//! with what it has compared so far.

use std::collections::BTreeMap;

use bdev::{Completion, Request};
use block_io::{Payload, Status, Tag};
use dma::{Buffer, Data};
use slots::Slot;
use std::sync::atomic::Ordering;
use wire_store::{BLOCK_BYTES, crc32c};

use super::StoreRead;
use super::worker::StoreWorker;

/// A request to the device, by the tag that it has.
pub(super) enum WorkerIo {
    Read(StoreRead),
    /// Of this block of the checksum table.
    Checksums(u64),
}

/// What waits for the checksum table.
pub(super) struct ChecksumWaiters {
    /// By block of the table.
    reads: BTreeMap<u64, Vec<Unverified>>,
    /// Memory for a block of the table while the pool has none: reads that wait have all of it then.
    spare: Option<Buffer>,
    /// A read of the table could not begin.
    is_blocked: bool,
}

/// A read whose data is there.
struct Unverified {
    read: StoreRead,
    buffer: Buffer,
    /// Blocks that were compared.
    verified: u32,
}

impl ChecksumWaiters {
    pub(super) fn new(spare: Buffer) -> ChecksumWaiters {
        ChecksumWaiters { reads: BTreeMap::new(), spare: Some(spare), is_blocked: false }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.reads.is_empty()
    }

    /// Whether reads wait for a block of the table whose read could not begin.
    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked && !self.reads.is_empty()
    }
}

impl StoreWorker {
    /// Begins a read; without memory it is tried again.
    pub(super) fn read(&mut self, read: StoreRead) {
        let StoreRead { block, blocks, verify, .. } = read;
        let bytes = blocks as usize * BLOCK_BYTES;
        let Some(buffer) = self.core.pool().take(bytes) else { return self.parked.push(read) };
        match self.ios.insert(WorkerIo::Read(read)) {
            Ok(slot) => {
                self.push_read(slot, block, bytes, buffer);
                if verify {
                    self.prefetch_checksums(block, blocks);
                }
            }
            Err(WorkerIo::Read(read)) => self.parked.push(read),
            Err(_) => unreachable!("it was a read"),
        }
    }

    fn push_read(&mut self, slot: Slot, block: u64, bytes: usize, buffer: Buffer) {
        let lba = block * BLOCK_BYTES as u64 / self.block_bytes;
        let blocks = bytes as u64 / self.block_bytes;
        self.requests.push(Request::read(Tag(slot.to_bits()), lba, blocks as u32, buffer));
    }

    /// Begins to read what is not in memory of the checksums of adjacent blocks, which are at most as many as
    /// a block of the table has.
    fn prefetch_checksums(&mut self, block: u64, blocks: u32) {
        let ends = [block, block + u64::from(blocks) - 1];
        let missing = ends.map(|block| self.checksums.get(block).is_none());
        match missing.contains(&true) {
            true => self.count_miss(),
            false => _ = self.state.checksum_hits.fetch_add(1, Ordering::Relaxed),
        }
        for (block, _) in ends.into_iter().zip(missing).filter(|(_, is_missing)| *is_missing) {
            self.load_checksums(self.checksums.table_block(block));
        }
    }

    pub(super) fn count_miss(&self) {
        self.state.checksum_misses.fetch_add(1, Ordering::Relaxed);
    }

    /// Begins to read a block of the checksum table that is neither in memory nor being read.
    fn load_checksums(&mut self, table_block: u64) {
        if !self.checksums.begin_load(table_block) {
            return;
        }
        let buffer = self.core.pool().take(BLOCK_BYTES).or_else(|| self.waiting.spare.take());
        let io = WorkerIo::Checksums(table_block);
        match buffer.map(|buffer| (buffer, self.ios.insert(io))) {
            Some((buffer, Ok(slot))) => self.push_read(slot, table_block, BLOCK_BYTES, buffer),
            rejected => {
                self.checksums.cancel_load(table_block);
                self.waiting.is_blocked = true;
                if let Some((buffer, _)) = rejected {
                    self.waiting.spare.get_or_insert(buffer);
                }
            }
        }
    }

    /// A request has ended.
    pub(super) fn complete(&mut self, io: WorkerIo, completion: Completion) {
        let status = completion.status();
        let Payload::Data(Data::One(buffer)) = completion.into_request().payload else {
            unreachable!("a read has one buffer");
        };
        match io {
            WorkerIo::Read(read) if !status.is_success() => self.reply(read.tag, Err(status)),
            WorkerIo::Read(read) => self.verify(Unverified { read, buffer, verified: 0 }),
            WorkerIo::Checksums(table_block) => self.checksums_read(table_block, status, buffer),
        }
    }

    /// A block of the checksum table was read: reads that wait for it go on.
    fn checksums_read(&mut self, table_block: u64, status: Status, buffer: Buffer) {
        match buffer.as_slice().first_chunk() {
            Some(bytes) if status.is_success() => self.checksums.finish_load(table_block, bytes),
            _ => self.checksums.cancel_load(table_block),
        }
        self.waiting.spare.get_or_insert(buffer);
        for unverified in self.waiting.reads.remove(&table_block).unwrap_or_default() {
            match status.is_success() {
                true => self.verify(unverified),
                false => self.reply(unverified.read.tag, Err(status)),
            }
        }
    }

    /// Tries again to read what reads wait for.
    pub(super) fn resume_unverified(&mut self) {
        if !self.waiting.is_blocked() {
            return;
        }
        self.waiting.is_blocked = false;
        for unverified in std::mem::take(&mut self.waiting.reads).into_values().flatten() {
            self.verify(unverified);
        }
    }

    /// Compares what was read with its checksums, and answers. If some are not in memory, that goes on when
    /// they are.
    fn verify(&mut self, mut unverified: Unverified) {
        let Unverified { read, buffer, verified } = &mut unverified;
        let mut damaged = None;
        if read.verify {
            let blocks = (0..).zip(buffer.as_slice().chunks(BLOCK_BYTES)).skip(*verified as usize);
            for (index, bytes) in blocks {
                let block = read.block + u64::from(index);
                match self.checksums.get(block) {
                    Some(expected) if expected == crc32c(bytes) => {}
                    _ if read.from_log.contains(&index) => {}
                    Some(_) => {
                        damaged = Some(block);
                        break;
                    }
                    None => {
                        *verified = index;
                        let table_block = self.checksums.table_block(block);
                        self.waiting.reads.entry(table_block).or_default().push(unverified);
                        return self.load_checksums(table_block);
                    }
                }
            }
        }
        let Unverified { read, buffer, .. } = unverified;
        self.reply(read.tag, Ok((Data::One(buffer).into_parcel(), damaged)));
    }
}
