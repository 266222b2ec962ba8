//! Loading a partition, and the header of a new one.

use std::collections::BTreeMap;

use wire_store::{
    BLOCK_BYTES, DecodeError, Onode, OnodeContent, PartitionHeader, PartitionLayout, SECTOR_BYTES, Superblock,
};

use crate::block_checksums::BlockChecksums;
use crate::free::UsedExtents;
use crate::partition::Partition;
use crate::{MetadataWrite, ObjectsError};

/// Loads a partition: it takes the partition's first blocks, in order, up to [`blocks`](Self::blocks).
///
/// The caller reads in pieces of any number of blocks, sequentially: 0.5 MiB of onodes a GiB with four onodes
/// for each object's size. Checksums are read when they are needed.
#[derive(Debug)]
pub struct PartitionLoader {
    superblock: Superblock,
    index: u32,
    layout: PartitionLayout,
    next: u64,
    onodes: Vec<Option<Box<Onode>>>,
}

impl PartitionLoader {
    /// Starts to load partition `index`.
    ///
    /// # Errors
    /// [`ObjectsError::Foreign`] if the superblock has no such partition.
    pub fn new(superblock: Superblock, index: u32) -> Result<PartitionLoader, ObjectsError> {
        match superblock.layout().filter(|_| index < superblock.partitions) {
            Some(layout) => Ok(PartitionLoader { superblock, index, layout, next: 0, onodes: Vec::new() }),
            None => Err(ObjectsError::Foreign { block: 0 }),
        }
    }

    /// First block on the device.
    pub fn start(&self) -> u64 {
        self.superblock.partition_start(self.index)
    }

    /// Number of blocks to read.
    pub fn blocks(&self) -> u64 {
        self.layout.checksums_start
    }

    /// Number of blocks before those of objects: what is read, and the checksums.
    pub fn metadata_blocks(&self) -> u64 {
        self.layout.extents_start
    }

    /// The blocks with which the partition starts when it is empty: the header, then zeroes up to
    /// [`metadata_blocks`](Self::metadata_blocks), which the caller writes first.
    pub fn header(&self) -> MetadataWrite {
        let header =
            PartitionHeader { device: self.superblock.device, index: self.index, onodes: self.layout.onodes };
        let mut bytes = Box::new([0; BLOCK_BYTES]);
        bytes[..SECTOR_BYTES].copy_from_slice(&header.encode(self.start()));
        MetadataWrite { block: self.start(), bytes }
    }

    /// Takes the next block.
    ///
    /// # Errors
    /// What is wrong with it, with its place.
    pub fn push(&mut self, bytes: &[u8; BLOCK_BYTES]) -> Result<(), ObjectsError> {
        let (relative, block) = (self.next, self.start() + self.next);
        let invalid = |source: DecodeError| ObjectsError::Invalid { block, source };
        if relative == 0 {
            let header = PartitionHeader::decode(&bytes[..SECTOR_BYTES], block).map_err(invalid)?;
            let expected = (self.superblock.device, self.index, self.layout.onodes);
            if (header.device, header.index, header.onodes) != expected {
                return Err(ObjectsError::Foreign { block });
            }
            // A growing table would be copied several times: a part of the time until a large device serves.
            self.onodes.reserve_exact(self.layout.onodes as usize);
        } else if relative < self.layout.checksums_start {
            for sector in bytes.chunks_exact(SECTOR_BYTES) {
                let place = self.onodes.len() as u32;
                self.onodes.push(Onode::decode(sector, place).map_err(invalid)?.map(Box::new));
            }
        } else {
            return Err(ObjectsError::Incomplete);
        }
        self.next += 1;
        Ok(())
    }

    /// Checks what was taken as a whole. At most `checksum_blocks_max` blocks of the checksum table, of 4 KiB
    /// each for 4 MiB of data, are in memory, and at least one.
    ///
    /// # Errors
    /// Onodes that contradict each other, or blocks that are missing.
    pub fn finish(self, checksum_blocks_max: usize) -> Result<Partition, ObjectsError> {
        if self.next != self.blocks() {
            return Err(ObjectsError::Incomplete);
        }
        let start = self.start();
        let mut used = UsedExtents::none(self.layout.extents);
        let (mut objects, mut free_places) = (Vec::new(), Vec::new());
        let block_of = |place: u32| {
            start + PartitionLayout::ONODES_START + u64::from(place / PartitionLayout::ONODES_PER_BLOCK)
        };
        for (place, onode) in self.onodes.iter().enumerate() {
            let place = place as u32;
            let Some(onode) = onode else {
                free_places.push(place);
                continue;
            };
            objects.push((onode.id, place));
            if let OnodeContent::Mapped(map) = &onode.content {
                let taken = |extent: &u32| *extent != 0 && !used.take(*extent);
                if let Some(extent) = map.extents.iter().copied().find(taken) {
                    return Err(ObjectsError::Extent { block: block_of(place), extent, object: onode.id });
                }
            }
        }
        // In order, a map is made in one go.
        objects.sort_unstable();
        if let Some([_, (object, place)]) = objects.array_windows().find(|[one, two]| one.0 == two.0) {
            return Err(ObjectsError::Twice { block: block_of(*place), object: *object });
        }
        let index = BTreeMap::from_iter(objects);
        // The lowest place is taken first.
        free_places.reverse();
        let checksums = BlockChecksums::new(start, self.layout, checksum_blocks_max);
        Ok(Partition::new(start, self.layout, self.onodes, index, free_places, used.into_free(), checksums))
    }
}
