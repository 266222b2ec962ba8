//! Formatting a device, and reading what it was formatted as.

use control::JobHandle;
use replica::AppliedRequests;
use uuid::Uuid;
use wire_store::{
    BLOCK_BYTES, CheckpointRecord, DecodeError, LogSuperblock, OBJECT_BYTES, PartitionLayout, SECTOR_BYTES,
    Superblock, UnsettledBlock, crc32c,
};

use crate::StoreError;
use crate::device::StoreDevice;
use crate::disks::{StoreDisks, read_log_superblock};
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

/// Blocks of a checkpoint record: one sector, the applied requests of as many clients as are remembered, and
/// as many unsettled blocks as there can be.
pub(crate) const CHECKPOINT_BLOCKS: u32 =
    (CHECKPOINT_BYTES_MIN + UNSETTLED_MAX * UnsettledBlock::SIZE).div_ceil(BLOCK_BYTES) as u32;
/// Without room for unsettled blocks.
const CHECKPOINT_BYTES_MIN: usize = SECTOR_BYTES + AppliedRequests::ENCODED_BYTES_MAX;

/// The replicas that a device has.
#[derive(Clone, Debug)]
pub struct ReplicaFormat {
    /// The cluster, a UUID.
    pub cluster: Uuid,
    /// The node, a UUID.
    pub node: Uuid,
    /// The logical groups, one a partition.
    pub groups: Vec<u32>,
    /// The groups are new, so that nothing of them is written anywhere. Otherwise the replicas need a copy of
    /// what others have.
    pub are_new: bool,
    /// Generation of the first checkpoint records: 0 if they are new, else
    /// [`generation_now`](Self::generation_now).
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

/// Where the logs are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LogPlace {
    /// On the device with the partitions.
    Here,
    /// On another one, of this many bytes.
    Elsewhere(u64),
}

/// Divides a device of `bytes`, and that of the logs.
fn plan(bytes: u64, logs: LogPlace, options: &FormatOptions) -> Result<Superblock, StoreError> {
    let refuse = |reason: String| Err(StoreError::Geometry(reason));
    let device_blocks = bytes / BLOCK;
    let groups = options.replicas.as_ref().map(|replicas| replicas.groups.len() as u32 + replicas.spare);
    let partitions = groups.or(options.partitions).unwrap_or((bytes >> 34).clamp(1, 16) as u32);
    if !(1..=PARTITIONS_MAX).contains(&partitions) {
        return refuse(format!("{partitions} partitions are not 1 to {PARTITIONS_MAX}"));
    }
    let share = device_blocks.saturating_sub(2) / u64::from(partitions);
    let checkpoint_blocks = if groups.is_some() { CHECKPOINT_BLOCKS } else { 0 };
    let log_overhead = Superblock::LOG_HEADER_BLOCKS + 2 * u64::from(checkpoint_blocks);
    let log_share = match logs {
        LogPlace::Here => share * BLOCK / LOG_SHARE,
        // All that there is, up to the limit.
        LogPlace::Elsewhere(bytes) => {
            let share = (bytes / BLOCK).saturating_sub(2) / u64::from(partitions);
            share.saturating_sub(log_overhead) * BLOCK
        }
    };
    let log_bytes = options.log_bytes.unwrap_or(log_share.clamp(*LOG_BYTES.start(), *LOG_BYTES.end()));
    if log_bytes < LOG_BYTES_MIN {
        return refuse(format!("a log of {log_bytes} bytes is too small: at least {LOG_BYTES_MIN}"));
    }
    let log_blocks = log_overhead + log_bytes.div_ceil(BLOCK);
    let partition_blocks = match logs {
        LogPlace::Here => share.saturating_sub(log_blocks),
        LogPlace::Elsewhere(bytes) => {
            let needed = u64::from(partitions).saturating_mul(log_blocks).saturating_add(2);
            if needed > bytes / BLOCK {
                return refuse(format!(
                    "{bytes} bytes are too few for {partitions} logs of {log_bytes} bytes each: {} are needed",
                    needed.saturating_mul(BLOCK)
                ));
            }
            share
        }
    };
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
        log_device: (logs != LogPlace::Here).then(|| Uuid::new_v4().into_bytes()),
    };
    if superblock.layout().is_none() {
        return refuse(format!(
            "{bytes} bytes are too few for {partitions} partitions with logs of {log_bytes} bytes each"
        ));
    }
    Ok(superblock)
}

/// Least number of different bytes in a block that looks encrypted: in one of random bytes a value is missing
/// with a probability of e^-16.
const ENCRYPTED_BYTES_MIN: usize = 250;
/// Most of chi-squared, of 255 degrees of freedom, of the bytes of such a block: 255 on average, with a
/// deviation of 23. Text, programs and the records of file systems have thousands.
const ENCRYPTED_CHI_SQUARED_MAX: u64 = 400;

/// Whether a block may be one that was encrypted: its bytes are spread as evenly as random ones. Those of
/// compressed data can be, too.
pub fn looks_encrypted(block: &[u8; BLOCK_BYTES]) -> bool {
    let mut counts = [0u64; 256];
    block.iter().for_each(|byte| counts[usize::from(*byte)] += 1);
    let expected = BLOCK_BYTES as u64 / 256;
    let squares: u64 = counts.iter().map(|count| count.abs_diff(expected).pow(2)).sum();
    counts.iter().filter(|count| **count > 0).count() >= ENCRYPTED_BYTES_MIN
        && squares / expected <= ENCRYPTED_CHI_SQUARED_MAX
}

/// Refuses a device with a store, with the logs of one, or with what may be an encrypted one.
pub(crate) async fn check_empty(device: &StoreDevice) -> Result<(), StoreError> {
    match read_superblock(device).await {
        Ok(_) => return Err(StoreError::Exists),
        Err(StoreError::NoStore(_) | StoreError::Truncated { .. }) => {}
        Err(error) => return Err(error),
    }
    if read_log_superblock(device).await?.is_ok() {
        return Err(StoreError::Exists);
    }
    match device.read_block(0).await {
        Ok(block) if looks_encrypted(&block) => Err(StoreError::LooksEncrypted),
        _ => Ok(()),
    }
}

/// Writes an empty store. The superblock is written last: a device whose formatting was interrupted has none.
///
/// # Errors
/// [`StoreError::Exists`] and [`StoreError::LooksEncrypted`] without `force`; [`StoreError::Geometry`]; what
/// the device reports.
pub(crate) async fn format(
    disks: &StoreDisks,
    options: &FormatOptions,
    job: &JobHandle,
) -> Result<Superblock, StoreError> {
    let (data, log) = (&disks.data, disks.log());
    let logs = if disks.has_separate_log() { LogPlace::Elsewhere(log.bytes()) } else { LogPlace::Here };
    let superblock = plan(data.bytes(), logs, options)?;
    for device in disks.all() {
        match check_empty(device).await {
            Err(StoreError::Exists | StoreError::LooksEncrypted) if options.force => {}
            checked => checked?,
        }
    }
    for device in disks.all() {
        // The copy first: a device whose formatting was interrupted has neither.
        device.write_head(last_block(device), &[]).await?;
        device.write_head(0, &[]).await?;
    }
    job.set_total(superblock.partitions.into(), "partitions");
    for index in 0..superblock.partitions {
        if job.is_cancelled() {
            return Err(StoreError::Cancelled);
        }
        spare::format_objects(data, &superblock, index).await?;
        job.advance(1);
    }
    for index in 0..superblock.logs {
        let group = |replicas: &ReplicaFormat| replicas.groups.get(index as usize).copied();
        let group =
            options.replicas.as_ref().map_or(index, |replicas| group(replicas).unwrap_or(SPARE_GROUP));
        let uuid = Uuid::new_v4().into_bytes();
        log.write_head(superblock.log_start(index) + 1, &[]).await?;
        if let Some(replicas) = &options.replicas {
            let (generation, are_new) = (replicas.generation, replicas.are_new);
            spare::format_records(log, &superblock, index, uuid, generation, are_new).await?;
        }
        spare::write_owner(log, &superblock, index, uuid, group).await?;
    }
    disks.flush().await?;
    if let Some(of_log) = LogSuperblock::of(&superblock, log.bytes() / BLOCK) {
        let last = of_log.device_blocks - 1;
        log.write_head(last, &of_log.encode(last)).await?;
        log.write_head(0, &of_log.encode(0)).await?;
        log.flush().await?;
    }
    let last = superblock.device_blocks - 1;
    data.write_head(last, &superblock.encode(last)).await?;
    data.write_head(0, &superblock.encode(0)).await?;
    data.flush().await?;
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

/// Reads the superblock, or its copy, and compares it with the device.
///
/// # Errors
/// [`StoreError::NoStore`], [`StoreError::Truncated`], and what the device reports.
pub(crate) async fn read_superblock(device: &StoreDevice) -> Result<Superblock, StoreError> {
    let superblock = read_head(device, Superblock::decode).await?.map_err(StoreError::NoStore)?;
    let expected = superblock.device_blocks.saturating_mul(BLOCK);
    if expected > device.bytes() {
        return Err(StoreError::Truncated { found: device.bytes(), expected });
    }
    Ok(superblock)
}

/// Decodes what a device begins with, or the copy in its last block where that is damaged. The error is that
/// of the first.
///
/// # Errors
/// What the device reports, if neither can be read.
pub(crate) async fn read_head<T>(
    device: &StoreDevice,
    decode: impl Fn(&[u8], u64) -> Result<T, DecodeError>,
) -> Result<Result<T, DecodeError>, StoreError> {
    let first = match device.read(0, BLOCK_BYTES).await {
        Ok(block) => Ok(decode(&block.as_slice()[..SECTOR_BYTES], 0)),
        Err(error) => Err(error),
    };
    if let Ok(Ok(head)) = first {
        return Ok(Ok(head));
    }
    let last = last_block(device);
    let copy = device.read(last * BLOCK, BLOCK_BYTES).await;
    match copy.map(|block| decode(&block.as_slice()[..SECTOR_BYTES], last)) {
        Ok(Ok(head)) => {
            let reason = match &first {
                Ok(Err(error)) => error.to_string(),
                Err(error) => error.to_string(),
                Ok(Ok(_)) => String::new(),
            };
            log::warn!("the superblock is damaged ({reason}): its copy in the last block is used");
            Ok(Ok(head))
        }
        _ => first,
    }
}

/// The last block of a device, which has the copy of its superblock unless the device has grown.
fn last_block(device: &StoreDevice) -> u64 {
    (device.bytes() / BLOCK).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evenly_spread_bytes_look_encrypted() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        for _ in 0..100 {
            let block: [u8; BLOCK_BYTES] = std::array::from_fn(|_| random());
            assert!(looks_encrypted(&block));
        }
        let mut half: [u8; BLOCK_BYTES] = std::array::from_fn(|_| random());
        half[BLOCK_BYTES / 2..].fill(0);
        let text: [u8; BLOCK_BYTES] = std::array::from_fn(|index| b"a text with letters"[index % 19]);
        for block in [half, text, [0; BLOCK_BYTES]] {
            assert!(!looks_encrypted(&block));
        }
    }

    #[test]
    fn a_plan_fits_every_device_that_is_large_enough() {
        for (bytes, partitions) in [(8 << 20, 1), (64 << 20, 1), (1 << 30, 1), (100 << 30, 6), (10 << 40, 16)]
        {
            let superblock = plan(bytes, LogPlace::Here, &FormatOptions::default()).unwrap();
            assert_eq!(superblock.partitions, partitions, "{bytes} bytes");
            assert_eq!(Superblock::decode(&superblock.encode(0), 0), Ok(superblock.clone()));
            let extents = u64::from(superblock.layout().unwrap().extents) << 16;
            assert!(extents * u64::from(partitions) * 10 > bytes * 8 - (20 << 20), "{extents} of {bytes}");
        }
    }

    #[test]
    fn partitions_take_a_device_whose_logs_are_elsewhere() {
        let elsewhere = |bytes, log_bytes| {
            let options = FormatOptions { partitions: Some(4), log_bytes, ..FormatOptions::default() };
            plan(1 << 30, LogPlace::Elsewhere(bytes), &options)
        };
        let all = elsewhere(64 << 20, None).unwrap();
        assert_eq!(Superblock::decode(&all.encode(0), 0), Ok(all.clone()));
        assert_eq!(all.partition_blocks, ((1 << 18) - 2) / 4);
        assert_eq!(all.log_blocks, ((64 << 8) - 2) / 4);
        let of_log = LogSuperblock::of(&all, 64 << 8).unwrap();
        assert_eq!(LogSuperblock::decode(&of_log.encode(0), 0), Ok(of_log));
        assert_eq!(elsewhere(64 << 20, Some(1 << 20)).unwrap().log_area_blocks(), 256);
        for (bytes, log_bytes) in [(4 << 20, None), (64 << 20, Some(16 << 20)), (0, None)] {
            let error = elsewhere(bytes, log_bytes).unwrap_err().to_string();
            assert!(error.contains("too few for 4 logs"), "{error}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_reason() {
        let refused = |bytes, partitions, log_bytes| {
            let options = FormatOptions { partitions, log_bytes, ..FormatOptions::default() };
            plan(bytes, LogPlace::Here, &options).unwrap_err().to_string()
        };
        assert!(refused(1 << 20, None, None).contains("too few"));
        assert!(refused(1 << 30, Some(0), None).contains("0 partitions"));
        assert!(refused(1 << 30, Some(1025), None).contains("1025 partitions"));
        assert!(refused(1 << 30, None, Some(4096)).contains("too small"));
        assert!(refused(1 << 30, None, Some(u64::MAX - 4096)).contains("too few"));
    }
}
