//! Blocks of the checksum table, which are read when a read of data needs them.
//!
//! Data and checksums are read at the same time. A read whose data is there first waits, and goes on with the
//! checksums that it has: so it ends even if each block of the table is evicted when the next one is read.

use std::cell::RefCell;
use std::collections::BTreeMap;

use bdev::{Completion, Request};
use block_io::{Payload, Tag};
use dma::{Buffer, Data};
use objects::BlockChecksums;
use wire_store::{BLOCK_BYTES, crc32c};

use super::in_place::ChecksumOwner;
use super::reads::{DeviceRun, ReadState};
use super::{DeviceIo, Reply, Shard};
use crate::StoreError;
use crate::device::StoreDevice;

/// What waits for the checksum table.
#[derive(Default)]
pub(super) struct ChecksumReads {
    /// By block of the table.
    waiting: BTreeMap<u64, Vec<UnverifiedRead>>,
    /// Memory for a block of the table while the pool has none: reads that wait have all of it then.
    spare: Option<Buffer>,
    /// A read of the table could not begin.
    is_blocked: bool,
}

/// A read whose data is there.
pub(super) struct UnverifiedRead {
    pub(super) read: ReadState,
    pub(super) run: DeviceRun,
    pub(super) buffer: Buffer,
    /// Blocks of the run that were compared.
    pub(super) verified: u32,
}

impl ChecksumReads {
    /// Takes the memory that is there when the pool has none.
    pub(super) fn reserve(&mut self, spare: Buffer) {
        self.spare = Some(spare);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether reads wait for a block of the table whose read could not begin.
    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked && !self.waiting.is_empty()
    }

    /// The reads that wait end without a result.
    pub(super) fn take_replies(&mut self) -> impl Iterator<Item = Reply> + use<> {
        std::mem::take(&mut self.waiting)
            .into_values()
            .flatten()
            .map(|unverified| unverified.read.into_reply())
    }
}

impl Shard {
    /// Begins to read what is not in memory of the checksums of adjacent blocks, which are at most as many as
    /// a block of the table has.
    pub(super) fn prefetch_checksums(&mut self, block: u64, blocks: u32) {
        let ends = [block, block + u64::from(blocks) - 1];
        let missing = ends.map(|block| self.partition.checksum(block).is_none());
        match missing.contains(&true) {
            true => self.stats.checksum_misses += 1,
            false => self.stats.checksum_hits += 1,
        }
        for (block, _) in ends.into_iter().zip(missing).filter(|(_, is_missing)| *is_missing) {
            self.load_checksums(self.partition.checksum_block(block));
        }
    }

    /// Begins to read a block of the checksum table that is neither in memory nor being read.
    fn load_checksums(&mut self, table_block: u64) {
        if !self.partition.checksums_mut().begin_load(table_block) {
            return;
        }
        let buffer = self.core.pool().take(BLOCK_BYTES).or_else(|| self.checksums.spare.take());
        let io = DeviceIo::Checksums(table_block);
        match buffer.map(|buffer| (buffer, self.ios.insert(io))) {
            Some((buffer, Ok(slot))) => {
                let lba = table_block * BLOCK_BYTES as u64 / self.block_bytes;
                let blocks = BLOCK_BYTES as u64 / self.block_bytes;
                self.requests.push(Request::read(Tag(slot.to_bits()), lba, blocks as u32, buffer));
            }
            rejected => {
                self.partition.checksums_mut().cancel_load(table_block);
                self.checksums.is_blocked = true;
                if let Some((buffer, _)) = rejected {
                    self.checksums.spare.get_or_insert(buffer);
                }
            }
        }
    }

    /// A block of the checksum table was read: reads that wait for it go on.
    pub(super) fn checksums_read(&mut self, table_block: u64, completion: Completion) {
        let status = completion.status();
        let Payload::Data(Data::One(buffer)) = completion.into_request().payload else {
            unreachable!("a read of one block has one buffer");
        };
        match buffer.as_slice().first_chunk() {
            Some(bytes) if status.is_success() => {
                self.partition.checksums_mut().finish_load(table_block, bytes)
            }
            _ => self.partition.checksums_mut().cancel_load(table_block),
        }
        self.checksums.spare.get_or_insert(buffer);
        for unverified in self.checksums.waiting.remove(&table_block).unwrap_or_default() {
            match status.is_success() {
                true => self.verify(unverified),
                false => unverified.read.into_reply().send(status, None),
            }
        }
    }

    /// Tries again to read what reads wait for.
    pub(super) fn resume_unverified(&mut self) {
        self.checksums.is_blocked = false;
        for unverified in std::mem::take(&mut self.checksums.waiting).into_values().flatten() {
            self.verify(unverified);
        }
    }

    /// Compares what was read with its checksums. If some are not in memory, that goes on when they are.
    pub(super) fn verify(&mut self, mut unverified: UnverifiedRead) {
        let UnverifiedRead { read, run, buffer, verified } = &mut unverified;
        let mut damaged = None;
        if read.is_verified() {
            let blocks = (0..).zip(buffer.as_slice().chunks(BLOCK_BYTES)).skip(*verified as usize);
            for (index, bytes) in blocks {
                let block = run.block + u64::from(index);
                match self.partition.checksum(block) {
                    Some(expected) if expected == crc32c(bytes) => {}
                    _ if read.is_from_log(run, index) => {}
                    Some(_) => {
                        damaged = Some(block);
                        break;
                    }
                    None => {
                        *verified = index;
                        let table_block = self.partition.checksum_block(block);
                        self.checksums.waiting.entry(table_block).or_default().push(unverified);
                        return self.load_checksums(table_block);
                    }
                }
            }
        }
        let UnverifiedRead { read, run, buffer, .. } = unverified;
        self.read_verified(read, run, buffer, damaged);
    }
}

impl ChecksumOwner for RefCell<Shard> {
    fn with<R>(&self, work: impl FnOnce(&mut BlockChecksums) -> R) -> R {
        work(self.borrow_mut().partition.checksums_mut())
    }

    fn count_miss(&self) {
        self.borrow_mut().stats.checksum_misses += 1;
    }
}

/// The checksum of a block, for the background task: no checkpoint is finished meanwhile.
pub(super) async fn stored_checksum(
    owner: &impl ChecksumOwner,
    device: &StoreDevice,
    block: u64,
) -> Result<u32, StoreError> {
    let (found, table_block) = owner.with(|checksums| (checksums.get(block), checksums.table_block(block)));
    if let Some(found) = found {
        return Ok(found);
    }
    let bytes = device.read_block(table_block).await?;
    owner.count_miss();
    Ok(owner.with(|checksums| {
        checksums.take_stored(table_block, &bytes);
        checksums.get(block).expect("its block of the table was taken")
    }))
}
