//! Inspection of a store that is not open: what it has, and what is damaged.

use std::collections::HashSet;

use bdev::{Access, Registry};
use objects::{Partition, SpaceUse};
use oplog::{Log, RecoveredEntries};
use reactor::Core;
use wire_store::{
    BLOCK_BYTES, BLOCKS_PER_EXTENT, EntryHeader, ImageRecord, LogSuperblock, ObjectId, Onode, OnodeContent,
    Operation, Superblock, crc32c,
};

use crate::StoreError;
use crate::device::StoreDevice;
use crate::disks::{StoreBdevs, StoreDescriptors, read_log_superblock, read_superblocks};
use crate::shard::load::{load_log, load_partition};
use crate::spare::SPARE_GROUP;

/// Blocks of the checksum table in memory: 1 MiB. Extents of an object are mostly adjacent.
const CHECKSUM_BLOCKS_MAX: usize = 256;

/// What is on a device.
#[derive(Clone, Debug)]
pub struct StoreContents {
    /// The superblock.
    pub superblock: Superblock,
    /// Each partition with its log.
    pub partitions: Vec<PartitionContents>,
    /// Images whose records are in place or in a log.
    pub images: Vec<ImageRecord>,
    /// What is wrong, one line each; a partition or log that cannot be read is missing above.
    pub problems: Vec<String>,
}

/// What is in a partition.
#[derive(Clone, Debug)]
pub struct PartitionContents {
    /// Index.
    pub index: u32,
    /// Whether no replica has it: what a replica that moved left there is not looked at.
    pub is_spare: bool,
    /// Its objects.
    pub objects: Vec<Onode>,
    /// Space.
    pub space: SpaceUse,
    /// Entries of the log, which the next opening applies.
    pub entries: Vec<EntryHeader>,
    /// Bytes of the log's area that they take.
    pub log_used_bytes: u64,
    /// Blocks whose checksums were compared.
    pub blocks_checked: u64,
    /// Blocks whose checksums are wrong, with their object, and the block of the object.
    pub damaged: Vec<(u64, ObjectId, usize)>,
}

impl PartitionContents {
    fn spare(index: u32, superblock: &Superblock) -> PartitionContents {
        let (extents, onodes) = superblock.layout().map_or((0, 0), |layout| (layout.extents, layout.onodes));
        PartitionContents {
            index,
            is_spare: true,
            objects: Vec::new(),
            space: SpaceUse {
                extents,
                free_extents: extents,
                onodes,
                free_onodes: onodes,
                ..SpaceUse::default()
            },
            entries: Vec::new(),
            log_used_bytes: 0,
            blocks_checked: 0,
            damaged: Vec::new(),
        }
    }
}

/// Reads the metadata of the store on a bdev, and with `data` every written block, which is compared with its
/// checksum. Blocks that entries of the log change are left out: a crash may have left them in any state, and
/// they are written again when the store is opened. `progress` gets the blocks that were compared so far.
/// Nothing is written.
///
/// # Errors
/// [`StoreError::NoStore`], and what the device reports.
pub async fn inspect(
    core: &Core,
    registry: &Registry,
    bdevs: impl Into<StoreBdevs<'_>>,
    data: bool,
    mut progress: impl FnMut(u64),
) -> Result<StoreContents, StoreError> {
    let descriptors = StoreDescriptors::open(registry, bdevs.into(), Access::ReadOnly)?;
    let disks = descriptors.disks(core)?;
    let superblock = read_superblocks(&disks).await.map_err(|error| descriptors.explain(error))?;
    let device = disks.data.clone();
    let (mut partitions, mut images, mut problems, mut compared) = (Vec::new(), Vec::new(), Vec::new(), 0);
    check_copy(&device, &superblock, &mut problems).await?;
    if disks.has_separate_log() {
        check_log_copy(disks.log(), &mut problems).await?;
    }
    for index in 0..superblock.partitions {
        let loaded = async {
            let (log, entries, _) = load_log(core, disks.log(), &superblock, index).await?;
            let is_spare = superblock.checkpoint_blocks > 0 && log.group() == SPARE_GROUP;
            Ok(match is_spare {
                true => None,
                false => Some((
                    load_partition(&device, &superblock, index, CHECKSUM_BLOCKS_MAX).await?,
                    log,
                    entries,
                )),
            })
        };
        let loaded: Option<(Partition, Log, RecoveredEntries)> = match loaded.await {
            Ok(loaded) => loaded,
            Err(error @ StoreError::Io { .. }) => return Err(error),
            Err(error) => {
                problems.push(error.to_string());
                continue;
            }
        };
        // A replica that moved left its objects without the entries that complete them; the next one begins
        // with none.
        let Some((mut partition, log, entries)) = loaded else {
            partitions.push(PartitionContents::spare(index, &superblock));
            continue;
        };
        collect_images(&partition, &entries, &mut images, &mut problems);
        let mut contents = PartitionContents {
            index,
            is_spare: false,
            objects: partition.objects().cloned().collect(),
            space: partition.space_use(),
            log_used_bytes: log.capacity() - log.room(),
            entries: entries.iter().map(|(entry, _)| entry.clone()).collect(),
            blocks_checked: 0,
            damaged: Vec::new(),
        };
        if data {
            compare(&device, &mut partition, &mut contents, |blocks| progress(compared + blocks)).await?;
            compared += contents.blocks_checked;
        }
        let damaged = contents.damaged.iter().map(|(block, object, at)| {
            format!(
                "block {block}: the checksum of block {at} of object {} of volume {} is wrong",
                object.index, object.volume
            )
        });
        problems.extend(damaged);
        partitions.push(contents);
    }
    images.sort_by_key(|image| image.volume);
    Ok(StoreContents { superblock, partitions, images, problems })
}

async fn check_copy(
    device: &StoreDevice,
    superblock: &Superblock,
    problems: &mut Vec<String>,
) -> Result<(), StoreError> {
    let last = superblock.device_blocks - 1;
    let block = device.read(last * BLOCK_BYTES as u64, BLOCK_BYTES).await?;
    match Superblock::decode(&block.as_slice()[..wire_store::SECTOR_BYTES], last) {
        Ok(copy) if copy == *superblock => {}
        Ok(_) => problems.push(format!("block {last}: the copy of the superblock differs")),
        Err(error) => problems.push(format!("block {last}: the copy of the superblock: {error}")),
    }
    Ok(())
}

async fn check_log_copy(log: &StoreDevice, problems: &mut Vec<String>) -> Result<(), StoreError> {
    let superblock = read_log_superblock(log).await?.map_err(StoreError::NoLogs)?;
    let last = superblock.device_blocks - 1;
    let block = log.read(last * BLOCK_BYTES as u64, BLOCK_BYTES).await?;
    match LogSuperblock::decode(&block.as_slice()[..wire_store::SECTOR_BYTES], last) {
        Ok(copy) if copy == superblock => {}
        Ok(_) => problems.push(format!("log device, block {last}: the copy of the superblock differs")),
        Err(error) => {
            problems.push(format!("log device, block {last}: the copy of the superblock: {error}"));
        }
    }
    Ok(())
}

/// The records of images as the entries of the log leave them.
fn collect_images(
    partition: &Partition,
    entries: &RecoveredEntries,
    images: &mut Vec<ImageRecord>,
    problems: &mut Vec<String>,
) {
    let mut records = std::collections::BTreeMap::new();
    for onode in partition.objects().filter(|onode| onode.id.volume == ImageRecord::VOLUME) {
        if let OnodeContent::Inline(bytes) = &onode.content {
            records.insert(onode.id, bytes.clone());
        }
    }
    for (entry, data) in entries.iter().filter(|(entry, _)| entry.object.volume == ImageRecord::VOLUME) {
        match entry.operation {
            Operation::Write => _ = records.insert(entry.object, data.clone()),
            Operation::Remove => _ = records.remove(&entry.object),
            _ => {}
        }
    }
    for (object, bytes) in records {
        match ImageRecord::decode(&bytes) {
            Ok(record) => images.push(record),
            Err(error) => problems.push(format!("the record of image {}: {error}", object.index)),
        }
    }
}

/// Compares every written block of a partition with its checksum.
async fn compare(
    device: &StoreDevice,
    partition: &mut Partition,
    contents: &mut PartitionContents,
    mut progress: impl FnMut(u64),
) -> Result<(), StoreError> {
    let mut in_log = HashSet::new();
    for entry in &contents.entries {
        let end = (entry.offset + entry.length) as usize;
        in_log.extend(
            (entry.offset as usize / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES)).map(|at| (entry.object, at)),
        );
    }
    for onode in &contents.objects {
        let OnodeContent::Mapped(map) = &onode.content else { continue };
        for (index, extent) in map.extents.iter().enumerate() {
            let first = index * BLOCKS_PER_EXTENT;
            let written = |at: &usize| map.is_written(*at) && !in_log.contains(&(onode.id, *at));
            let blocks: Vec<usize> = (first..first + BLOCKS_PER_EXTENT).filter(written).collect();
            if blocks.is_empty() {
                continue;
            }
            let start = partition.extent_start(*extent);
            let bytes = device.read(start * BLOCK_BYTES as u64, BLOCKS_PER_EXTENT * BLOCK_BYTES).await?;
            for at in blocks {
                let (block, offset) = (start + (at - first) as u64, (at - first) * BLOCK_BYTES);
                contents.blocks_checked += 1;
                let checksums = partition.checksums_mut();
                if checksums.get(block).is_none() {
                    let table_block = checksums.table_block(block);
                    checksums.take_stored(table_block, &*device.read_block(table_block).await?);
                }
                let found = crc32c(&bytes.as_slice()[offset..offset + BLOCK_BYTES]);
                if checksums.get(block) != Some(found) {
                    contents.damaged.push((block, onode.id, at));
                }
            }
        }
        progress(contents.blocks_checked);
    }
    Ok(())
}
