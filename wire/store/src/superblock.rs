//! The superblock of a device and the headers of its partitions.

use codec::DecodeError;

use crate::fields::{
    array, check_location, check_zero, open, open_version, put, seal, seal_version, u32_at, u64_at,
};
use crate::{BLOCK_BYTES, BLOCKS_PER_EXTENT, SECTOR_BYTES};

const SUPERBLOCK_MAGIC: [u8; 4] = *b"RBSB";
const LOG_SUPERBLOCK_MAGIC: [u8; 4] = *b"RBLS";
const PARTITION_MAGIC: [u8; 4] = *b"RBPT";
/// The version of a superblock whose logs are on a device of their own. Others have version 1.
const SEPARATE_LOGS_VERSION: u16 = 2;

/// The identity of a device and its division into partitions. It is in block 0, and a copy in the last block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The cluster, a UUID.
    pub cluster: [u8; 16],
    /// The node that owns the device, a UUID.
    pub node: [u8; 16],
    /// The device, a UUID.
    pub device: [u8; 16],
    /// Size of the device in blocks when it was formatted.
    pub device_blocks: u64,
    /// Size of each partition in blocks; the first begins at block 1.
    pub partition_blocks: u64,
    /// Number of partitions.
    pub partitions: u32,
    /// Number of onodes of each partition, a multiple of 8.
    pub onodes_per_partition: u32,
    /// Number of operation logs, which follow the partitions, or are on another device.
    pub logs: u32,
    /// Size of each log in blocks, its two headers and checkpoint records included.
    pub log_blocks: u64,
    /// Blocks of each of the two checkpoint records at the end of a log; 0 in a store without replicas.
    pub checkpoint_blocks: u32,
    /// The device that has the logs, a UUID, if that is another one: it begins with a [`LogSuperblock`].
    pub log_device: Option<[u8; 16]>,
}

impl Superblock {
    /// Blocks of a log before its entries: a header each.
    pub const LOG_HEADER_BLOCKS: u64 = 2;

    /// Encodes the superblock for block `location`.
    pub fn encode(&self, location: u64) -> [u8; SECTOR_BYTES] {
        let mut out = [0; SECTOR_BYTES];
        put(&mut out, 16, location.to_le_bytes());
        put(&mut out, 24, self.cluster);
        put(&mut out, 40, self.node);
        put(&mut out, 56, self.device);
        put(&mut out, 72, self.device_blocks.to_le_bytes());
        put(&mut out, 80, self.partition_blocks.to_le_bytes());
        put(&mut out, 88, self.partitions.to_le_bytes());
        put(&mut out, 92, self.onodes_per_partition.to_le_bytes());
        put(&mut out, 96, self.logs.to_le_bytes());
        put(&mut out, 100, self.checkpoint_blocks.to_le_bytes());
        put(&mut out, 104, self.log_blocks.to_le_bytes());
        match self.log_device {
            None => seal(&mut out, SUPERBLOCK_MAGIC),
            Some(log_device) => {
                put(&mut out, 112, log_device);
                seal_version(&mut out, SUPERBLOCK_MAGIC, SEPARATE_LOGS_VERSION);
            }
        }
        out
    }

    /// Decodes what was read from block `location`.
    ///
    /// # Errors
    /// The first field that no superblock of this version and place has.
    pub fn decode(from: &[u8], location: u64) -> Result<Superblock, DecodeError> {
        let version =
            open_version("the superblock", from, SECTOR_BYTES, SUPERBLOCK_MAGIC, SEPARATE_LOGS_VERSION)?;
        let has_separate_logs = version == SEPARATE_LOGS_VERSION;
        check_zero("a reserved field of the superblock", from, 6..8)?;
        check_zero("a reserved field of the superblock", from, 12..16)?;
        check_location(u64_at(from, 16), location, 16)?;
        let end = if has_separate_logs { 128 } else { 112 };
        check_zero("a reserved field of the superblock", from, end..SECTOR_BYTES)?;
        let superblock = Superblock {
            cluster: array(from, 24),
            node: array(from, 40),
            device: array(from, 56),
            device_blocks: u64_at(from, 72),
            partition_blocks: u64_at(from, 80),
            partitions: u32_at(from, 88),
            onodes_per_partition: u32_at(from, 92),
            logs: u32_at(from, 96),
            log_blocks: u64_at(from, 104),
            checkpoint_blocks: u32_at(from, 100),
            log_device: has_separate_logs.then(|| array(from, 112)),
        };
        let partitions = u64::from(superblock.partitions).checked_mul(superblock.partition_blocks);
        let end = partitions.and_then(|blocks| blocks.checked_add(2));
        let Some(end) = end.filter(|end| superblock.partitions > 0 && *end <= superblock.device_blocks)
        else {
            return Err(DecodeError::value("the number of partitions", 88, superblock.partitions.into()));
        };
        let logs = u64::from(superblock.logs).checked_mul(superblock.log_blocks);
        let end = logs.and_then(|blocks| blocks.checked_add(end));
        let has_room = match superblock.logs {
            0 => superblock.log_blocks == 0 && superblock.checkpoint_blocks == 0 && !has_separate_logs,
            _ => superblock.log_area_blocks() > 0,
        };
        let is_beyond = !has_separate_logs && end.is_some_and(|end| end > superblock.device_blocks);
        if !has_room || end.is_none() || is_beyond {
            return Err(DecodeError::value("the size of a log", 104, superblock.log_blocks));
        }
        if superblock.layout().is_none() {
            return Err(DecodeError::value("the size of a partition", 80, superblock.partition_blocks));
        }
        Ok(superblock)
    }

    /// First block of a partition.
    pub fn partition_start(&self, partition: u32) -> u64 {
        1 + u64::from(partition) * self.partition_blocks
    }

    /// First block of a log, on the device that has the logs: those of its headers, then its area, then the checkpoint
    /// records.
    pub fn log_start(&self, log: u32) -> u64 {
        let first = if self.log_device.is_some() { 1 } else { self.partition_start(self.partitions) };
        first + u64::from(log) * self.log_blocks
    }

    /// Blocks of a log's area for entries.
    pub fn log_area_blocks(&self) -> u64 {
        let records = 2 * u64::from(self.checkpoint_blocks);
        self.log_blocks.saturating_sub(Self::LOG_HEADER_BLOCKS + records)
    }

    /// First block of a checkpoint record of a log, in slot 0 or 1.
    pub fn checkpoint_start(&self, log: u32, slot: u32) -> u64 {
        let area = self.log_start(log) + Self::LOG_HEADER_BLOCKS + self.log_area_blocks();
        area + u64::from(slot * self.checkpoint_blocks)
    }

    /// The areas of a partition; `None` if a partition has no room for an extent.
    pub fn layout(&self) -> Option<PartitionLayout> {
        PartitionLayout::new(self.partition_blocks, self.onodes_per_partition)
    }
}

/// The identity of a device that has the logs of another one, in their order from block 1. It is in block 0, and a copy in the
/// last block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSuperblock {
    /// The cluster, a UUID.
    pub cluster: [u8; 16],
    /// The node that owns the device, a UUID.
    pub node: [u8; 16],
    /// This device, a UUID: [`Superblock::log_device`].
    pub log_device: [u8; 16],
    /// The device with the partitions, a UUID: [`Superblock::device`].
    pub device: [u8; 16],
    /// Size of this device in blocks when it was formatted.
    pub device_blocks: u64,
    /// As in the superblock of the device with the partitions.
    pub logs: u32,
    /// As in the superblock of the device with the partitions.
    pub checkpoint_blocks: u32,
    /// As in the superblock of the device with the partitions.
    pub log_blocks: u64,
}

impl LogSuperblock {
    /// That of the device that a superblock names, if that has this many blocks.
    pub fn of(superblock: &Superblock, device_blocks: u64) -> Option<LogSuperblock> {
        Some(LogSuperblock {
            cluster: superblock.cluster,
            node: superblock.node,
            log_device: superblock.log_device?,
            device: superblock.device,
            device_blocks,
            logs: superblock.logs,
            checkpoint_blocks: superblock.checkpoint_blocks,
            log_blocks: superblock.log_blocks,
        })
    }

    /// Encodes the superblock for block `location`.
    pub fn encode(&self, location: u64) -> [u8; SECTOR_BYTES] {
        let mut out = [0; SECTOR_BYTES];
        put(&mut out, 16, location.to_le_bytes());
        put(&mut out, 24, self.cluster);
        put(&mut out, 40, self.node);
        put(&mut out, 56, self.log_device);
        put(&mut out, 72, self.device_blocks.to_le_bytes());
        put(&mut out, 80, self.device);
        put(&mut out, 96, self.logs.to_le_bytes());
        put(&mut out, 100, self.checkpoint_blocks.to_le_bytes());
        put(&mut out, 104, self.log_blocks.to_le_bytes());
        seal(&mut out, LOG_SUPERBLOCK_MAGIC);
        out
    }

    /// Decodes what was read from block `location`.
    ///
    /// # Errors
    /// The first field that no such superblock of this version and place has.
    pub fn decode(from: &[u8], location: u64) -> Result<LogSuperblock, DecodeError> {
        open("the superblock of a log device", from, SECTOR_BYTES, LOG_SUPERBLOCK_MAGIC)?;
        check_zero("a reserved field of the superblock of a log device", from, 6..8)?;
        check_zero("a reserved field of the superblock of a log device", from, 12..16)?;
        check_location(u64_at(from, 16), location, 16)?;
        check_zero("a reserved field of the superblock of a log device", from, 112..SECTOR_BYTES)?;
        let superblock = LogSuperblock {
            cluster: array(from, 24),
            node: array(from, 40),
            log_device: array(from, 56),
            device_blocks: u64_at(from, 72),
            device: array(from, 80),
            logs: u32_at(from, 96),
            checkpoint_blocks: u32_at(from, 100),
            log_blocks: u64_at(from, 104),
        };
        let end = u64::from(superblock.logs).checked_mul(superblock.log_blocks);
        let end = end.and_then(|blocks| blocks.checked_add(2));
        let has_area = superblock.log_blocks
            > Superblock::LOG_HEADER_BLOCKS + 2 * u64::from(superblock.checkpoint_blocks);
        let fits = end.is_some_and(|end| end <= superblock.device_blocks);
        if superblock.logs == 0 || !has_area || !fits {
            return Err(DecodeError::value("the size of a log", 104, superblock.log_blocks));
        }
        Ok(superblock)
    }
}

/// The areas of a partition, in blocks from its start: header, onodes, checksums, extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionLayout {
    /// Number of onodes.
    pub onodes: u32,
    /// First block of the checksum table.
    pub checksums_start: u64,
    /// First block of extent 1. Extents count from 1.
    pub extents_start: u64,
    /// Number of extents.
    pub extents: u32,
}

impl PartitionLayout {
    /// First block of the onodes.
    pub const ONODES_START: u64 = 1;

    /// Onodes of a block.
    pub const ONODES_PER_BLOCK: u32 = (BLOCK_BYTES / SECTOR_BYTES) as u32;

    /// Checksums of a block of the table, four bytes each.
    pub const CHECKSUMS_PER_BLOCK: u64 = (BLOCK_BYTES / 4) as u64;

    fn new(partition_blocks: u64, onodes: u32) -> Option<PartitionLayout> {
        if onodes == 0 || !onodes.is_multiple_of(Self::ONODES_PER_BLOCK) {
            return None;
        }
        let checksums_start = Self::ONODES_START + u64::from(onodes / Self::ONODES_PER_BLOCK);
        let rest = partition_blocks.checked_sub(checksums_start)?;
        // A block of the table serves 1024 blocks; the table is rounded up.
        let table = rest.div_ceil(Self::CHECKSUMS_PER_BLOCK + 1);
        let extents = u32::try_from((rest - table) / BLOCKS_PER_EXTENT as u64).ok()?;
        (extents > 0 && extents < u32::MAX).then_some(PartitionLayout {
            onodes,
            checksums_start,
            extents_start: checksums_start + table,
            extents,
        })
    }

    /// First block of an extent, from the start of the partition.
    pub fn extent_block(&self, extent: u32) -> u64 {
        self.extents_start + u64::from(extent - 1) * BLOCKS_PER_EXTENT as u64
    }
}

/// The first block of a partition: to which device it belongs, and which one it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionHeader {
    /// The device, a UUID.
    pub device: [u8; 16],
    /// Index of the partition.
    pub index: u32,
    /// Number of onodes.
    pub onodes: u32,
}

impl PartitionHeader {
    /// Encodes the header for block `location` of the device.
    pub fn encode(&self, location: u64) -> [u8; SECTOR_BYTES] {
        let mut out = [0; SECTOR_BYTES];
        put(&mut out, 16, location.to_le_bytes());
        put(&mut out, 24, self.device);
        put(&mut out, 40, self.index.to_le_bytes());
        put(&mut out, 44, self.onodes.to_le_bytes());
        seal(&mut out, PARTITION_MAGIC);
        out
    }

    /// Decodes what was read from block `location` of the device.
    ///
    /// # Errors
    /// The first field that no header of this version and place has.
    pub fn decode(from: &[u8], location: u64) -> Result<PartitionHeader, DecodeError> {
        open("the partition header", from, SECTOR_BYTES, PARTITION_MAGIC)?;
        check_zero("a reserved field of the partition header", from, 6..8)?;
        check_zero("a reserved field of the partition header", from, 12..16)?;
        check_location(u64_at(from, 16), location, 16)?;
        check_zero("a reserved field of the partition header", from, 48..SECTOR_BYTES)?;
        Ok(PartitionHeader { device: array(from, 24), index: u32_at(from, 40), onodes: u32_at(from, 44) })
    }
}
