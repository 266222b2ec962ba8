//! Opening a partition with its log: what a crash left is applied again.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use objects::{ObjectsError, Partition, PartitionLoader, entries_to_redo};
use oplog::{Log, LogDamage, LogRecovery, RecoveredEntries};
use reactor::Core;
use wire_store::{BLOCK_BYTES, SECTOR_BYTES, Superblock};

use super::overlay::EntryData;
use super::{Shard, flusher};
use crate::StoreError;
use crate::device::{STREAM_BYTES, StoreDevice};
use crate::disks::{StoreDescriptors, StoreDisks};

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Entries that are applied again in one batch.
const REDO_ENTRIES: usize = 1024;

/// Opens a shard, applies its log, and makes the result durable, so that the log is empty.
pub(crate) async fn open(
    core: &Core,
    descriptors: &StoreDescriptors,
    superblock: &Superblock,
    index: u32,
) -> Result<(Rc<RefCell<Shard>>, StoreDisks), StoreError> {
    let (shard, disks, entries, damage) = load(core, descriptors, superblock, index).await?;
    if let Some(damage) = damage {
        log::error!("partition {index}: {damage}: it and all later writes that are not in place are lost");
    }
    redo(&shard, &disks, &entries).await?;
    Ok((shard, disks))
}

/// Reads a partition and its log.
pub(super) async fn load(
    core: &Core,
    descriptors: &StoreDescriptors,
    superblock: &Superblock,
    index: u32,
) -> Result<(Rc<RefCell<Shard>>, StoreDisks, RecoveredEntries, Option<LogDamage>), StoreError> {
    let disks = descriptors.disks(core)?;
    // What a killed process wrote may only be in the devices' caches.
    disks.flush().await?;
    let checksum_blocks_max = descriptors.checksum_blocks_max(superblock);
    let partition = load_partition(&disks.data, superblock, index, checksum_blocks_max).await?;
    let (log, entries, damage) = load_log(core, disks.log(), superblock, index).await?;
    let (of_log, of_device) = (log.sector().bytes(), disks.log().sector().bytes());
    if of_log < of_device {
        return Err(StoreError::Sector { log: of_log, device: of_device });
    }
    let channel = descriptors.data.channel(core)?;
    let log_channel = descriptors.separate_log().map(|log| log.channel(core)).transpose()?;
    let log_start = superblock.log_start(index);
    let spare = disks.data.buffer(BLOCK_BYTES).await?;
    let mut shard = Shard::new(core, (channel, log_channel), index, partition, log, log_start, spare);
    shard.tuning = descriptors.tuning;
    Ok((Rc::new(RefCell::new(shard)), disks, entries, damage))
}

async fn redo(
    shard: &RefCell<Shard>,
    disks: &StoreDisks,
    entries: &RecoveredEntries,
) -> Result<(), StoreError> {
    let to_redo = entries_to_redo(entries).map(|(entry, data)| {
        let data =
            if data.is_empty() { EntryData::None } else { EntryData::Recovered(Arc::new(data.clone())) };
        (entry.clone(), data)
    });
    let to_redo: Vec<_> = to_redo.collect();
    for entries in to_redo.chunks(REDO_ENTRIES) {
        let (batch, applied) =
            flusher::apply(&mut shard.borrow_mut(), entries.iter().map(|(entry, data)| (entry, data)))?;
        if applied < entries.len() {
            let (partition, source) = (shard.borrow().index, ObjectsError::Full);
            return Err(StoreError::Objects { partition, source });
        }
        batch.write(shard, &disks.data, false).await?;
    }
    {
        let mut shard = shard.borrow_mut();
        shard.applied_below = shard.log.sequences().end;
        shard.stats.entries_redone = entries.len() as u64;
    }
    if !entries.is_empty() {
        flusher::checkpoint(shard, disks).await?;
    }
    Ok(())
}

/// Reads the metadata of a partition, but for checksums: at most so many blocks of these are cached later.
pub(crate) async fn load_partition(
    device: &StoreDevice,
    superblock: &Superblock,
    index: u32,
    checksum_blocks_max: usize,
) -> Result<Partition, StoreError> {
    let invalid = |source| StoreError::Objects { partition: index, source };
    let mut loader = PartitionLoader::new(superblock.clone(), index).map_err(invalid)?;
    let (mut at, end) = (loader.start() * BLOCK, (loader.start() + loader.blocks()) * BLOCK);
    while at < end {
        let buffer = device.read(at, (end - at).min(STREAM_BYTES as u64) as usize).await?;
        for block in buffer.as_slice().as_chunks::<BLOCK_BYTES>().0 {
            loader.push(block).map_err(invalid)?;
        }
        at += buffer.len() as u64;
    }
    loader.finish(checksum_blocks_max).map_err(invalid)
}

/// Finds the entries of a log: of its area, what has them is read.
pub(crate) async fn load_log(
    core: &Core,
    device: &StoreDevice,
    superblock: &Superblock,
    index: u32,
) -> Result<(Log, RecoveredEntries, Option<LogDamage>), StoreError> {
    let start = superblock.log_start(index);
    let mut slots = [[0; SECTOR_BYTES]; 2];
    for (block, slot) in (start..).zip(&mut slots) {
        let buffer = device.read_of_two(block * BLOCK, BLOCK_BYTES).await?;
        slot.copy_from_slice(&buffer.as_slice()[..SECTOR_BYTES]);
    }
    let first = (start + Superblock::LOG_HEADER_BLOCKS) * BLOCK;
    let area_bytes = superblock.log_area_blocks() * BLOCK;
    let salt = core.rng().next_bits() as u32;
    let mut recovery = LogRecovery::new(&slots, area_bytes, STREAM_BYTES as u64, salt)
        .map_err(|source| StoreError::Log { log: index, source })?;
    while let Some((offset, bytes)) = recovery.next_piece() {
        recovery.take(device.read(first + offset, bytes).await?.as_slice());
    }
    let damage = recovery.damage();
    let (log, entries) = recovery.finish();
    // Replicas are of any groups.
    if log.group() != index && superblock.checkpoint_blocks == 0 {
        return Err(StoreError::ForeignLog { log: index, group: log.group() });
    }
    Ok((log, entries, damage))
}
