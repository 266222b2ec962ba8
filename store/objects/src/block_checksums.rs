//! The checksums of a partition's blocks, by blocks of the device.

use wire_store::{BLOCK_BYTES, BLOCKS_PER_EXTENT, PartitionLayout};

use crate::checksums::ChecksumTable;
use crate::plan::MetadataWrite;

/// The checksum table of a partition, of which a bounded number of blocks is in memory.
///
/// A [`Partition`](crate::Partition) has it, until its caller [detaches](crate::Partition::detach_checksums)
/// it for the thread that reads and writes the blocks. One thread owns it then; what it does for a checkpoint
/// is independent of the partition: [`begin_checkpoint`](Self::begin_checkpoint), the writes, a flush,
/// [`finish_checkpoint`](Self::finish_checkpoint).
#[derive(Debug)]
pub struct BlockChecksums {
    start: u64,
    layout: PartitionLayout,
    table: ChecksumTable,
}

impl BlockChecksums {
    /// Of a partition that starts at this block. At most `cached_max` blocks of the table are in memory, and
    /// at least one.
    pub(crate) fn new(start: u64, layout: PartitionLayout, cached_max: usize) -> BlockChecksums {
        let blocks = (layout.extents_start - layout.checksums_start) as usize;
        BlockChecksums { start, layout, table: ChecksumTable::new(blocks, cached_max) }
    }

    /// The CRC32C of a written block of the device; `None` if it is not in memory: then the caller reads its
    /// [`table_block`](Self::table_block).
    ///
    /// # Panics
    /// If the block does not belong to an extent of the partition.
    pub fn get(&self, block: u64) -> Option<u32> {
        self.table.get(self.data_index(block))
    }

    /// Sets the CRC32C of a block that the caller writes.
    ///
    /// # Panics
    /// If the block does not belong to an extent of the partition.
    pub fn set(&mut self, block: u64, crc32c: u32) {
        self.table.set(self.data_index(block), crc32c);
    }

    /// The block of the device that has a block's checksum.
    ///
    /// # Panics
    /// If the block does not belong to an extent of the partition.
    pub fn table_block(&self, block: u64) -> u64 {
        self.device_block((self.data_index(block) / PartitionLayout::CHECKSUMS_PER_BLOCK) as u32)
    }

    /// Begins to read a block of the table, at any time; whether it is neither in memory nor being read.
    /// [`finish_load`](Self::finish_load) or [`cancel_load`](Self::cancel_load) follows.
    ///
    /// # Panics
    /// If the block does not belong to the table.
    pub fn begin_load(&mut self, table_block: u64) -> bool {
        self.table.begin_load(self.table_index(table_block))
    }

    /// Takes a block of the table whose read was begun. It is in memory until others are taken.
    ///
    /// # Panics
    /// If the block does not belong to the table.
    pub fn finish_load(&mut self, table_block: u64, bytes: &[u8; BLOCK_BYTES]) {
        self.table.finish_load(self.table_index(table_block), bytes);
    }

    /// The read of a block of the table failed, or was not possible.
    ///
    /// # Panics
    /// If the block does not belong to the table.
    pub fn cancel_load(&mut self, table_block: u64) {
        self.table.cancel_load(self.table_index(table_block));
    }

    /// Takes a block of the table that was read while no checkpoint was finished or aborted, for callers that
    /// do nothing else meanwhile.
    ///
    /// # Panics
    /// If the block does not belong to the table.
    pub fn take_stored(&mut self, table_block: u64, bytes: &[u8; BLOCK_BYTES]) {
        self.table.cache_stored(self.table_index(table_block), bytes);
    }

    /// Whether enough checksums changed since the last checkpoint began that one is due: changes are in
    /// memory.
    pub fn has_many_changes(&self) -> bool {
        self.table.has_many_changes()
    }

    /// Blocks of the table that are in memory.
    pub fn cached_blocks(&self) -> usize {
        self.table.cached()
    }

    /// Begins a checkpoint of the changes; returns the blocks of the device that it writes, in their order:
    /// [`checkpoint_write`](Self::checkpoint_write) has their contents.
    pub fn begin_checkpoint(&mut self) -> Vec<u64> {
        self.table.begin_checkpoint().into_iter().map(|index| self.device_block(index)).collect()
    }

    /// What the checkpoint in progress writes to one of its blocks; `None` if that is not in memory: the
    /// caller reads it, and calls this with what is `stored` there.
    ///
    /// # Panics
    /// If the block does not belong to the table.
    pub fn checkpoint_write(
        &mut self,
        block: u64,
        stored: Option<&[u8; BLOCK_BYTES]>,
    ) -> Option<MetadataWrite> {
        let bytes = self.table.checkpoint_bytes(self.table_index(block), stored)?;
        Some(MetadataWrite { block, bytes })
    }

    /// The device has what the checkpoint wrote.
    pub fn finish_checkpoint(&mut self) {
        self.table.finish_checkpoint();
    }

    /// The device may have some of what the checkpoint wrote.
    pub fn abort_checkpoint(&mut self) {
        self.table.abort_checkpoint();
    }

    /// Index in the table of a block of the device.
    fn data_index(&self, block: u64) -> u64 {
        let index = block.checked_sub(self.start + self.layout.extents_start);
        let blocks = u64::from(self.layout.extents) * BLOCKS_PER_EXTENT as u64;
        let index = index.filter(|index| *index < blocks);
        index.unwrap_or_else(|| panic!("block {block} is not in an extent of the partition"))
    }

    /// The block of the device of a block of the table.
    fn device_block(&self, index: u32) -> u64 {
        self.start + self.layout.checksums_start + u64::from(index)
    }

    /// Index of a block of the table.
    fn table_index(&self, block: u64) -> u32 {
        let index = block.checked_sub(self.start + self.layout.checksums_start);
        let blocks = self.layout.extents_start - self.layout.checksums_start;
        let index = index.filter(|index| *index < blocks);
        index.unwrap_or_else(|| panic!("block {block} is not in the checksum table")) as u32
    }
}
