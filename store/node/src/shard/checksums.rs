//! Reads of blocks that are compared with their checksums, and the blocks of the checksum table that they
//! need.
//!
//! Data and checksums are read at the same time. A read whose data is there first waits, and goes on with the
//! checksums that it has: so it ends even if each block of the table is evicted when the next one is read.
//!
//! A shard does that, or the worker of its non-priority thread: both are a [`BlockReader`].

use std::cell::RefCell;
use std::collections::BTreeMap;

use bdev::Completion;
use block_io::{Payload, Status};
use dma::{Buffer, Data};
use objects::BlockChecksums;
use reactor::Core;
use wire_store::{BLOCK_BYTES, crc32c};

use crate::StoreError;
use crate::device::StoreDevice;

/// A read of adjacent blocks.
pub(super) trait BlockRead {
    /// The first of them.
    fn first_block(&self) -> u64;

    /// Whether they are compared with their checksums.
    fn is_verified(&self) -> bool;

    /// Whether everything that is needed of the block with this index comes from the log: it may be damaged.
    fn is_from_log(&self, index: u32) -> bool;
}

/// What waits for the checksum table.
pub(super) struct ChecksumReads<R> {
    /// By block of the table.
    waiting: BTreeMap<u64, Vec<UnverifiedRead<R>>>,
    /// Memory for a block of the table while the pool has none: reads that wait have all of it then.
    spare: Option<Buffer>,
    /// A read of the table could not begin.
    is_blocked: bool,
}

/// A read whose data is there.
pub(super) struct UnverifiedRead<R> {
    read: R,
    buffer: Buffer,
    /// Blocks that were compared.
    verified: u32,
}

impl<R> ChecksumReads<R> {
    /// With a block of memory for when the pool has none.
    pub(super) fn new(spare: Buffer) -> ChecksumReads<R> {
        ChecksumReads { waiting: BTreeMap::new(), spare: Some(spare), is_blocked: false }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether reads wait for a block of the table whose read could not begin.
    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked && !self.waiting.is_empty()
    }

    /// The reads that wait, which wait no longer.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = R> + use<R> {
        let waiting = std::mem::take(&mut self.waiting).into_values().flatten();
        waiting.map(|unverified| unverified.read)
    }
}

/// What reads blocks and has their checksums.
pub(super) trait BlockReader {
    type Read: BlockRead;

    fn core(&self) -> &Core;

    fn checksums(&mut self) -> &mut BlockChecksums;

    /// The reads that wait for the checksum table.
    fn waiting(&mut self) -> &mut ChecksumReads<Self::Read>;

    /// Begins to read a block of the checksum table; gives the memory back if too much is in flight. The
    /// completion goes to [`checksums_read`](Self::checksums_read).
    fn read_table(&mut self, table_block: u64, buffer: Buffer) -> Result<(), Buffer>;

    /// Checksums were needed, and are in memory or not.
    fn count_lookup(&mut self, is_in_memory: bool);

    /// A read ends: the blocks were compared up to the first that is damaged.
    fn read_verified(&mut self, read: Self::Read, buffer: Buffer, damaged: Option<u64>);

    /// A read ends without its checksums.
    fn read_failed(&mut self, read: Self::Read, status: Status);

    /// Begins to read what is not in memory of the checksums of adjacent blocks, which are at most as many as
    /// a block of the table has.
    fn prefetch_checksums(&mut self, block: u64, blocks: u32) {
        let ends = [block, block + u64::from(blocks) - 1];
        let missing = ends.map(|block| self.checksums().get(block).is_none());
        self.count_lookup(!missing.contains(&true));
        for (block, _) in ends.into_iter().zip(missing).filter(|(_, is_missing)| *is_missing) {
            let table_block = self.checksums().table_block(block);
            self.load_checksums(table_block);
        }
    }

    /// Begins to read a block of the checksum table that is neither in memory nor being read.
    fn load_checksums(&mut self, table_block: u64) {
        if !self.checksums().begin_load(table_block) {
            return;
        }
        let buffer = self.core().pool().take(BLOCK_BYTES).or_else(|| self.waiting().spare.take());
        let rejected = match buffer.map(|buffer| self.read_table(table_block, buffer)) {
            Some(Ok(())) => return,
            Some(Err(buffer)) => Some(buffer),
            None => None,
        };
        self.checksums().cancel_load(table_block);
        let waiting = self.waiting();
        waiting.is_blocked = true;
        if let Some(buffer) = rejected {
            waiting.spare.get_or_insert(buffer);
        }
    }

    /// A block of the checksum table was read: reads that wait for it go on.
    fn checksums_read(&mut self, table_block: u64, completion: Completion) {
        let status = completion.status();
        let Payload::Data(Data::One(buffer)) = completion.into_request().payload else {
            unreachable!("a read of one block has one buffer");
        };
        match buffer.as_slice().first_chunk() {
            Some(bytes) if status.is_success() => self.checksums().finish_load(table_block, bytes),
            _ => self.checksums().cancel_load(table_block),
        }
        self.waiting().spare.get_or_insert(buffer);
        for unverified in self.waiting().waiting.remove(&table_block).unwrap_or_default() {
            match status.is_success() {
                true => self.compare(unverified),
                false => self.read_failed(unverified.read, status),
            }
        }
    }

    /// Tries again to read what reads wait for, if that could not begin.
    fn resume_unverified(&mut self) {
        if !self.waiting().is_blocked() {
            return;
        }
        self.waiting().is_blocked = false;
        for unverified in std::mem::take(&mut self.waiting().waiting).into_values().flatten() {
            self.compare(unverified);
        }
    }

    /// Compares what was read with its checksums. If some are not in memory, that goes on when they are.
    fn verify(&mut self, read: Self::Read, buffer: Buffer) {
        self.compare(UnverifiedRead { read, buffer, verified: 0 });
    }

    /// Goes on to compare what was read.
    fn compare(&mut self, mut unverified: UnverifiedRead<Self::Read>) {
        let UnverifiedRead { read, buffer, verified } = &mut unverified;
        let mut damaged = None;
        if read.is_verified() {
            let blocks = (0..).zip(buffer.as_slice().chunks(BLOCK_BYTES)).skip(*verified as usize);
            for (index, bytes) in blocks {
                let block = read.first_block() + u64::from(index);
                match self.checksums().get(block) {
                    Some(expected) if expected == crc32c(bytes) => {}
                    _ if read.is_from_log(index) => {}
                    Some(_) => {
                        damaged = Some(block);
                        break;
                    }
                    None => {
                        *verified = index;
                        let table_block = self.checksums().table_block(block);
                        self.waiting().waiting.entry(table_block).or_default().push(unverified);
                        return self.load_checksums(table_block);
                    }
                }
            }
        }
        let UnverifiedRead { read, buffer, .. } = unverified;
        self.read_verified(read, buffer, damaged);
    }
}

/// The checksum of a block, for background work: no checkpoint is finished meanwhile.
pub(super) async fn stored_checksum(
    reader: &RefCell<impl BlockReader>,
    device: &StoreDevice,
    block: u64,
) -> Result<u32, StoreError> {
    let (found, table_block) = {
        let mut reader = reader.borrow_mut();
        let checksums = reader.checksums();
        (checksums.get(block), checksums.table_block(block))
    };
    if let Some(found) = found {
        return Ok(found);
    }
    let bytes = device.read_block(table_block).await?;
    let mut reader = reader.borrow_mut();
    reader.count_lookup(false);
    let checksums = reader.checksums();
    checksums.take_stored(table_block, &bytes);
    Ok(checksums.get(block).expect("its block of the table was taken"))
}
