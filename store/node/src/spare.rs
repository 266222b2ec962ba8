//! Partitions of a device with replicas that have no replica: a new one gets one of them, and one that is removed gives it
//! back. Each change is one write of a sector, so that a crash leaves the state before or after it.

use std::time::{SystemTime, UNIX_EPOCH};

use objects::PartitionLoader;
use oplog::Log;
use uuid::Uuid;
use wire_store::{BLOCK_BYTES, CheckpointRecord, LogHeader, SECTOR_BYTES, Superblock};

use crate::StoreError;
use crate::device::StoreDevice;
use crate::disks::StoreDisks;
use crate::format::first_record;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// The logical group of a partition's log that is of none.
pub(crate) const SPARE_GROUP: u32 = u32::MAX;

/// The newest header of a partition's log.
pub(crate) struct LogOwner {
    pub(crate) group: u32,
    log: [u8; 16],
    slot: u32,
}

/// Reads which group a partition's log is of.
pub(crate) async fn read_owner(
    device: &StoreDevice,
    superblock: &Superblock,
    index: u32,
) -> Result<LogOwner, StoreError> {
    let start = superblock.log_start(index);
    let mut newest: Option<(u64, LogOwner)> = None;
    let mut invalid = None;
    for slot in 0..2 {
        let block = device.read_of_two((start + u64::from(slot)) * BLOCK, BLOCK_BYTES).await?;
        match LogHeader::decode(&block.as_slice()[..SECTOR_BYTES], slot) {
            Ok(header) if newest.as_ref().is_none_or(|(generation, _)| *generation < header.generation) => {
                let owner = LogOwner { group: header.group, log: header.log, slot };
                newest = Some((header.generation, owner));
            }
            Ok(_) => {}
            Err(error) => invalid = Some(error),
        }
    }
    let failed = |source| StoreError::Log { log: index, source: oplog::LogError::Header(source) };
    newest.map(|(_, owner)| owner).ok_or_else(|| failed(invalid.expect("neither is valid")))
}

/// The generation of a partition's newest checkpoint record; 0 if it has none.
pub(crate) async fn read_generation(
    device: &StoreDevice,
    superblock: &Superblock,
    index: u32,
    owner: &LogOwner,
) -> Result<u64, StoreError> {
    let newest = newest_record(device, superblock, index, owner).await?;
    Ok(newest.map_or(0, |record| record.generation))
}

async fn newest_record(
    device: &StoreDevice,
    superblock: &Superblock,
    index: u32,
    owner: &LogOwner,
) -> Result<Option<CheckpointRecord>, StoreError> {
    let mut newest: Option<CheckpointRecord> = None;
    for slot in 0..2 {
        let start = superblock.checkpoint_start(index, slot) * BLOCK;
        let bytes = superblock.checkpoint_blocks as usize * BLOCK_BYTES;
        let record = device.read_of_two(start, bytes).await?;
        if let Ok(record) = CheckpointRecord::decode(record.as_slice(), owner.log, slot) {
            newest = newest.into_iter().chain([record]).max_by_key(|record| record.generation);
        }
    }
    Ok(newest)
}

/// Whether a replica's device may have lost what counted as durable: its machine was booted again.
pub(crate) async fn is_lost(
    device: &StoreDevice,
    superblock: &Superblock,
    index: u32,
    boot: [u8; 16],
) -> Result<bool, StoreError> {
    let owner = read_owner(device, superblock, index).await?;
    let newest = newest_record(device, superblock, index, &owner).await?;
    // A machine that loses its power may leave no record.
    Ok(newest.is_none_or(|record| record.boot != [0; 16] && record.boot != boot))
}

/// A generation for the first checkpoint record of a replica that is not new. Its sessions begin there: they are later than
/// those of a replica that the node had before, on this device (`known`) or on another one, since generations grow by less
/// than one a second. It counts seconds since 2025, because sessions have 30 bits of it.
pub(crate) fn generation_after(known: u64) -> u64 {
    const YEAR_2025: u64 = 1_735_689_600;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    now.saturating_sub(YEAR_2025).min(1 << 29).max(known + 1)
}

/// Empties a partition's objects.
pub(crate) async fn format_objects(
    device: &StoreDevice,
    superblock: &Superblock,
    index: u32,
) -> Result<(), StoreError> {
    let invalid = |source| StoreError::Objects { partition: index, source };
    let loader = PartitionLoader::new(superblock.clone(), index).map_err(invalid)?;
    device.write_zeroes(loader.start() * BLOCK, loader.metadata_blocks() * BLOCK).await?;
    let header = loader.header();
    device.write(header.block * BLOCK, &header.bytes[..]).await
}

/// Writes the records of a replica whose log has this identity.
pub(crate) async fn format_records(
    device: &StoreDevice,
    superblock: &Superblock,
    index: u32,
    log: [u8; 16],
    generation: u64,
    is_complete: bool,
) -> Result<(), StoreError> {
    let (first, applied) = first_record(log, generation, is_complete);
    device.write_head(superblock.checkpoint_start(index, 1 - first.slot()), &[]).await?;
    let bytes = [&first.encode()[..], &applied].concat();
    device.write_head(superblock.checkpoint_start(index, first.slot()), &bytes).await
}

/// Gives a spare partition to a replica, which is complete if its group is new.
pub(crate) async fn give_to(
    disks: &StoreDisks,
    superblock: &Superblock,
    index: u32,
    group: u32,
    generation: u64,
    is_new: bool,
) -> Result<(), StoreError> {
    format_objects(&disks.data, superblock, index).await?;
    let log = Uuid::new_v4().into_bytes();
    format_records(disks.log(), superblock, index, log, generation, is_new).await?;
    disks.flush().await?;
    // The header of a spare partition is in slot 0, and slot 1 has none.
    write_owner(disks.log(), superblock, index, log, group).await?;
    disks.log().flush().await
}

/// Takes a partition from its replica, which is closed or was never opened: neither header may be valid then.
pub(crate) async fn take_back(
    device: &StoreDevice,
    superblock: &Superblock,
    index: u32,
) -> Result<(), StoreError> {
    let owner = match read_owner(device, superblock, index).await {
        Err(StoreError::Log { .. }) => {
            LogOwner { group: SPARE_GROUP, log: Uuid::new_v4().into_bytes(), slot: 0 }
        }
        read => read?,
    };
    let second = superblock.log_start(index) + 1;
    if owner.slot == 1 {
        write_owner(device, superblock, index, owner.log, SPARE_GROUP).await?;
        device.flush().await?;
        device.write_head(second, &[]).await?;
    } else {
        device.write_head(second, &[]).await?;
        device.flush().await?;
        write_owner(device, superblock, index, owner.log, SPARE_GROUP).await?;
    }
    device.flush().await
}

/// Writes the first header of a log.
pub(crate) async fn write_owner(
    device: &StoreDevice,
    superblock: &Superblock,
    index: u32,
    log: [u8; 16],
    group: u32,
) -> Result<(), StoreError> {
    let capacity = superblock.log_area_blocks() * BLOCK;
    let log = Log::create(log, group, capacity, device.sector());
    let log = log.map_err(|source| StoreError::Log { log: index, source })?;
    device.write_head(superblock.log_start(index), &log.header().bytes).await
}
