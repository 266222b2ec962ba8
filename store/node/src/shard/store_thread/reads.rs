//! Reads on a non-priority thread.

use std::sync::atomic::Ordering;

use bdev::Completion;
use block_io::{Payload, Status};
use dma::{Buffer, Data};
use objects::BlockChecksums;
use reactor::Core;
use wire_store::BLOCK_BYTES;

use super::worker::StoreWorker;
use super::{ReadOutcome, StoreRead};
use crate::shard::checksums::{BlockRead, BlockReader, ChecksumReads};
use crate::shard::reads::read_request;

/// A request to the device, by the tag that it has.
pub(super) enum WorkerIo {
    Read(StoreRead),
    /// Of this block of the checksum table.
    Checksums(u64),
}

impl BlockRead for StoreRead {
    fn first_block(&self) -> u64 {
        self.block
    }

    fn is_verified(&self) -> bool {
        self.verify
    }

    fn is_from_log(&self, index: u32) -> bool {
        self.from_log.contains(&index)
    }
}

impl StoreWorker {
    /// Begins a read. Without memory it goes back: its owner's checkpoints would wait for it while it waited
    /// here.
    pub(super) fn read(&mut self, read: StoreRead) {
        let StoreRead { tag, block, blocks, verify, .. } = read;
        let buffer = self.core.pool().take(blocks as usize * BLOCK_BYTES);
        match buffer.map(|buffer| (buffer, self.ios.insert(WorkerIo::Read(read)))) {
            Some((buffer, Ok(slot))) => {
                self.requests.push(read_request(slot, block, buffer, self.block_bytes));
                if verify {
                    self.prefetch_checksums(block, blocks);
                }
            }
            _ => self.reply(tag, ReadOutcome::NoMemory),
        }
    }

    /// A request has ended.
    pub(super) fn complete(&mut self, io: WorkerIo, completion: Completion) {
        let read = match io {
            WorkerIo::Read(read) => read,
            WorkerIo::Checksums(table_block) => return self.checksums_read(table_block, completion),
        };
        let status = completion.status();
        if !status.is_success() {
            return self.read_failed(read, status);
        }
        let Payload::Data(Data::One(buffer)) = completion.into_request().payload else {
            unreachable!("a read has one buffer");
        };
        self.verify(read, buffer);
    }
}

impl BlockReader for StoreWorker {
    type Read = StoreRead;

    fn core(&self) -> &Core {
        &self.core
    }

    fn checksums(&mut self) -> &mut BlockChecksums {
        &mut self.checksums
    }

    fn waiting(&mut self) -> &mut ChecksumReads<StoreRead> {
        &mut self.waiting
    }

    fn read_table(&mut self, table_block: u64, buffer: Buffer) -> Result<(), Buffer> {
        let Ok(slot) = self.ios.insert(WorkerIo::Checksums(table_block)) else { return Err(buffer) };
        self.requests.push(read_request(slot, table_block, buffer, self.block_bytes));
        Ok(())
    }

    fn count_lookup(&mut self, is_in_memory: bool) {
        let counter = if is_in_memory { &self.state.checksum_hits } else { &self.state.checksum_misses };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn read_verified(&mut self, read: StoreRead, buffer: Buffer, damaged: Option<u64>) {
        self.reply(read.tag, ReadOutcome::Done(Data::One(buffer).into_parcel(), damaged));
    }

    fn read_failed(&mut self, read: StoreRead, status: Status) {
        self.reply(read.tag, ReadOutcome::Failed(status));
    }
}
