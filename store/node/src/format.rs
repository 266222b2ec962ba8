//! Formatting a device, and reading what it was formatted as.

use control::JobHandle;
use replica::{AppliedRequests, CLIENTS_MAX};
use uuid::Uuid;
use wire_store::{
    BLOCK_BYTES, CheckpointRecord, OBJECT_BYTES, PartitionLayout, SECTOR_BYTES, Superblock, UnsettledBlock,
    crc32c,
};

use crate::StoreError;
use crate::device::StoreDevice;
use crate::shard::UNSETTLED_MAX;
use crate::spare::{self, SPARE_GROUP};

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Onodes for each object that fits, so that thin objects of a few extents find one.
const ONODES_PER_OBJECT: u64 = 4;
/// Most partitions of a device, each with a log and a core that owns it.
pub const PARTITIONS_MAX: u32 = 1024;
/// Without an option, a log has a 32nd of its partition, within these bounds.
const LOG_SHARE: u64 = 32;
const LOG_BYTES: std::ops::RangeInclusive<u64> = (1 << 20)..=(64 << 20);
/// A log holds several of the longest entries.
const LOG_BYTES_MIN: u64 = 256 << 10;

/// Blocks of a checkpoint record: one sector, the applied requests of as many clients as are remembered, and as many
/// unsettled blocks as there can be.
pub(crate) const CHECKPOINT_BLOCKS: u32 =
    (CHECKPOINT_BYTES_MIN + UNSETTLED_MAX * UnsettledBlock::SIZE).div_ceil(BLOCK_BYTES) as u32;
/// Without room for unsettled blocks.
const CHECKPOINT_BYTES_MIN: usize = SECTOR_BYTES + AppliedRequests::encoded_bytes(CLIENTS_MAX);

/// The replicas that a device has.
#[derive(Clone, Debug)]
pub struct ReplicaFormat {
    /// The cluster, a UUID.
    pub cluster: Uuid,
    /// The node, a UUID.
    pub node: Uuid,
    /// The logical groups, one a partition.
    pub groups: Vec<u32>,
    /// The groups are new, so that nothing of them is written anywhere. Otherwise the replicas need a copy of what others
    /// have.
    pub are_new: bool,
    /// Generation of the first checkpoint records: 0 if they are new, else [`generation_now`](Self::generation_now).
    pub generation: u64,
    /// Partitions for replicas that the node gets later.
    pub spare: u32,
}

impl ReplicaFormat {
    /// A generation for replicas of a node that had others before: later than those of theirs.
    pub fn generation_now() -> u64 {
        spare::generation_after(0)
    }
}

/// How to format a device.
#[derive(Clone, Debug, Default)]
pub struct FormatOptions {
    /// Partitions; without, one for each 16 GiB, 1 to 16. Each is owned by one core.
    pub partitions: Option<u32>,
    /// Bytes of each partition's log; without, a 32nd of the partition, 1 to 64 MiB.
    pub log_bytes: Option<u64>,
    /// Destroys a store that is there.
    pub force: bool,
    /// It has replicas of logical groups. Then their number is that of the partitions.
    pub replicas: Option<ReplicaFormat>,
}

/// Divides a device of `bytes`.
fn plan(bytes: u64, options: &FormatOptions) -> Result<Superblock, StoreError> {
    let refuse = |reason: String| Err(StoreError::Geometry(reason));
    let device_blocks = bytes / BLOCK;
    let groups = options.replicas.as_ref().map(|replicas| replicas.groups.len() as u32 + replicas.spare);
    let partitions = groups.or(options.partitions).unwrap_or((bytes >> 34).clamp(1, 16) as u32);
    if !(1..=PARTITIONS_MAX).contains(&partitions) {
        return refuse(format!("{partitions} partitions are not 1 to {PARTITIONS_MAX}"));
    }
    let share = device_blocks.saturating_sub(2) / u64::from(partitions);
    let log_bytes =
        options.log_bytes.unwrap_or((share * BLOCK / LOG_SHARE).clamp(*LOG_BYTES.start(), *LOG_BYTES.end()));
    if log_bytes < LOG_BYTES_MIN {
        return refuse(format!("a log of {log_bytes} bytes is too small: at least {LOG_BYTES_MIN}"));
    }
    let checkpoint_blocks = if groups.is_some() { CHECKPOINT_BLOCKS } else { 0 };
    let records = 2 * u64::from(checkpoint_blocks);
    let log_blocks = Superblock::LOG_HEADER_BLOCKS + log_bytes.div_ceil(BLOCK) + records;
    let partition_blocks = share.saturating_sub(log_blocks);
    let objects = (partition_blocks * BLOCK).div_ceil(OBJECT_BYTES as u64) * ONODES_PER_OBJECT;
    let per_block = u64::from(PartitionLayout::ONODES_PER_BLOCK);
    let onodes = u32::try_from(objects.next_multiple_of(per_block).max(8 * per_block)).unwrap_or(!7);
    let of_replicas = |uuid: fn(&ReplicaFormat) -> Uuid| {
        options.replicas.as_ref().map_or_else(Uuid::new_v4, uuid).into_bytes()
    };
    let superblock = Superblock {
        cluster: of_replicas(|replicas| replicas.cluster),
        node: of_replicas(|replicas| replicas.node),
        device: Uuid::new_v4().into_bytes(),
        device_blocks,
        partition_blocks,
        partitions,
        onodes_per_partition: onodes,
        logs: partitions,
        log_blocks,
        checkpoint_blocks,
    };
    if superblock.layout().is_none() {
        return refuse(format!(
            "{bytes} bytes are too few for {partitions} partitions with logs of {log_bytes} bytes each"
        ));
    }
    Ok(superblock)
}

/// Writes an empty store. The superblock is written last: a device whose formatting was interrupted has none.
///
/// # Errors
/// [`StoreError::Exists`] without `force`; [`StoreError::Geometry`]; what the device reports.
pub(crate) async fn format(
    device: &StoreDevice,
    options: &FormatOptions,
    job: &JobHandle,
) -> Result<Superblock, StoreError> {
    let superblock = plan(device.bytes(), options)?;
    match read_superblock(device).await {
        Ok(_) if !options.force => return Err(StoreError::Exists),
        Ok(_) | Err(StoreError::NoStore(_) | StoreError::Truncated { .. }) => {}
        Err(error) => return Err(error),
    }
    device.write_head(0, &[]).await?;
    job.set_total(superblock.partitions.into(), "partitions");
    for index in 0..superblock.partitions {
        if job.is_cancelled() {
            return Err(StoreError::Cancelled);
        }
        spare::format_objects(device, &superblock, index).await?;
        job.advance(1);
    }
    for index in 0..superblock.logs {
        let group = |replicas: &ReplicaFormat| replicas.groups.get(index as usize).copied();
        let group =
            options.replicas.as_ref().map_or(index, |replicas| group(replicas).unwrap_or(SPARE_GROUP));
        let log = Uuid::new_v4().into_bytes();
        device.write_head(superblock.log_start(index) + 1, &[]).await?;
        if let Some(replicas) = &options.replicas {
            let (generation, are_new) = (replicas.generation, replicas.are_new);
            spare::format_records(device, &superblock, index, log, generation, are_new).await?;
        }
        spare::write_owner(device, &superblock, index, log, group).await?;
    }
    device.flush().await?;
    let last = superblock.device_blocks - 1;
    device.write_head(last, &superblock.encode(last)).await?;
    device.write_head(0, &superblock.encode(0)).await?;
    device.flush().await?;
    Ok(superblock)
}

/// The checkpoint record of a replica that has nothing, and its applied requests.
pub(crate) fn first_record(log: [u8; 16], generation: u64, complete: bool) -> (CheckpointRecord, Vec<u8>) {
    let mut applied = Vec::new();
    AppliedRequests::default().encode(&mut applied);
    let record = CheckpointRecord {
        log,
        generation,
        sequence: 0,
        epoch: 0,
        complete,
        applied_bytes: applied.len() as u32,
        applied_crc32c: crc32c(&applied),
        unsettled: 0,
        boot: [0; 16],
    };
    (record, applied)
}

/// Reads the superblock, and compares it with the device.
///
/// # Errors
/// [`StoreError::NoStore`], [`StoreError::Truncated`], and what the device reports.
pub(crate) async fn read_superblock(device: &StoreDevice) -> Result<Superblock, StoreError> {
    let block = device.read(0, BLOCK_BYTES).await?;
    let superblock = Superblock::decode(&block.as_slice()[..SECTOR_BYTES], 0).map_err(StoreError::NoStore)?;
    let expected = superblock.device_blocks.saturating_mul(BLOCK);
    if expected > device.bytes() {
        return Err(StoreError::Truncated { found: device.bytes(), expected });
    }
    Ok(superblock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_fits_every_device_that_is_large_enough() {
        for (bytes, partitions) in [(8 << 20, 1), (64 << 20, 1), (1 << 30, 1), (100 << 30, 6), (10 << 40, 16)]
        {
            let superblock = plan(bytes, &FormatOptions::default()).unwrap();
            assert_eq!(superblock.partitions, partitions, "{bytes} bytes");
            assert_eq!(Superblock::decode(&superblock.encode(0), 0), Ok(superblock.clone()));
            let extents = u64::from(superblock.layout().unwrap().extents) << 16;
            assert!(extents * u64::from(partitions) * 10 > bytes * 8 - (20 << 20), "{extents} of {bytes}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_reason() {
        let refused = |bytes, partitions, log_bytes| {
            let options = FormatOptions { partitions, log_bytes, ..FormatOptions::default() };
            plan(bytes, &options).unwrap_err().to_string()
        };
        assert!(refused(1 << 20, None, None).contains("too few"));
        assert!(refused(1 << 30, Some(0), None).contains("0 partitions"));
        assert!(refused(1 << 30, Some(1025), None).contains("1025 partitions"));
        assert!(refused(1 << 30, None, Some(4096)).contains("too small"));
        assert!(refused(1 << 30, None, Some(u64::MAX - 4096)).contains("too few"));
    }
}
