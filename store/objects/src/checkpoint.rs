//! Checkpoints: the metadata that makes what was applied durable.

use wire_store::{BLOCK_BYTES, PartitionLayout, SECTOR_BYTES};

use crate::Partition;
use crate::block_checksums::BlockChecksums;
use crate::partition::Changes;
use crate::plan::MetadataWrite;

/// What a checkpoint writes: checksums, then onodes.
#[derive(Debug)]
pub struct Checkpoint {
    /// Blocks of the device with checksums, in their order: [`BlockChecksums::checkpoint_write`] has their
    /// contents. None if the checksums have another owner.
    pub checksum_blocks: Vec<u64>,
    /// Whether blocks were written for the first time. Then a flush follows the data and the checksums,
    /// before the onodes. It matters for the checksums too: inline data that moved to a block is not in the
    /// log.
    pub flush_before_onodes: bool,
    /// Blocks of onodes, in their order.
    pub onodes: Vec<MetadataWrite>,
}

impl Partition {
    /// Begins a checkpoint of what was applied before, whose checksums the caller has set. The caller waits
    /// for the writes of these operations, writes the checksums, flushes if
    /// [`Checkpoint::flush_before_onodes`], writes the onodes, flushes, frees the log, and when that is
    /// durable calls [`finish_checkpoint`](Self::finish_checkpoint): until then REDO may need the space that
    /// these operations gave up. Reads that were planned before a checkpoint complete before it is finished.
    /// Other operations may be applied meanwhile. It copies 4 KiB for every changed block of onodes.
    ///
    /// # Panics
    /// If a checkpoint is in progress.
    pub fn begin_checkpoint(&mut self) -> Checkpoint {
        assert!(self.in_checkpoint.is_none(), "a checkpoint is in progress");
        let changes = std::mem::take(&mut self.changed);
        let checksums = self.checksums.as_mut();
        let checkpoint = Checkpoint {
            checksum_blocks: checksums.map_or_else(Vec::new, BlockChecksums::begin_checkpoint),
            flush_before_onodes: changes.first_write,
            onodes: changes.onode_blocks.iter().map(|block| self.onode_block(*block)).collect(),
        };
        self.in_checkpoint = Some(changes);
        checkpoint
    }

    /// The checkpoint is durable: extents and onodes that it released are free.
    ///
    /// # Panics
    /// If no checkpoint is in progress.
    pub fn finish_checkpoint(&mut self) {
        let changes = self.in_checkpoint.take().expect("a checkpoint is in progress");
        self.checksums.iter_mut().for_each(BlockChecksums::finish_checkpoint);
        self.free_released(changes);
    }

    /// A write or flush of the checkpoint failed: the next one repeats the metadata. A failed flush may also
    /// have lost data: the caller writes that of the entries since the last complete checkpoint again, or
    /// loads the partition anew.
    ///
    /// # Panics
    /// If no checkpoint is in progress.
    pub fn abort_checkpoint(&mut self) {
        let Changes { onode_blocks, first_write, remapped, released_extents, removed } =
            self.in_checkpoint.take().expect("a checkpoint is in progress");
        self.checksums.iter_mut().for_each(BlockChecksums::abort_checkpoint);
        self.changed.onode_blocks.extend(onode_blocks);
        self.changed.first_write |= first_write;
        self.changed.remapped.extend(remapped);
        self.changed.released_extents.extend(released_extents);
        self.changed.removed.extend(removed);
    }

    fn onode_block(&self, index: u32) -> MetadataWrite {
        let mut bytes = Box::new([0; BLOCK_BYTES]);
        let first = index * PartitionLayout::ONODES_PER_BLOCK;
        for (place, sector) in (first..).zip(bytes.chunks_exact_mut(SECTOR_BYTES)) {
            if let Some(onode) = &self.onodes[place as usize] {
                sector.copy_from_slice(&onode.encode(place));
            }
        }
        MetadataWrite { block: self.start + PartitionLayout::ONODES_START + u64::from(index), bytes }
    }
}
