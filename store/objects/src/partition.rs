//! The state of a partition, and the plans of operations.

mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use wire_store::{
    BLOCK_BYTES, BLOCKS_PER_EXTENT, EXTENTS_PER_OBJECT, EntryHeader, INLINE_BYTES_MAX, OBJECT_BYTES,
    ObjectBlockMap, ObjectId, Onode, OnodeContent, Operation, PartitionLayout,
};

use crate::block_checksums::BlockChecksums;
use crate::free::FreeExtents;
use crate::{ObjectsError, ReadPiece, ReadSource, WritePiece};

/// The metadata of a partition. One thread owns it; see the crate's documentation for the order of calls.
#[derive(Debug)]
pub struct Partition {
    pub(crate) start: u64,
    pub(crate) layout: PartitionLayout,
    pub(crate) onodes: Vec<Option<Box<Onode>>>,
    index: BTreeMap<ObjectId, u32>,
    free_places: Vec<u32>,
    free: FreeExtents,
    /// `None` once they are detached.
    pub(crate) checksums: Option<BlockChecksums>,
    /// What changed since the last checkpoint began.
    pub(crate) changed: Changes,
    /// What the checkpoint in progress makes durable.
    pub(crate) in_checkpoint: Option<Changes>,
}

/// Changes that a checkpoint makes durable, and what is free afterwards.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Places of onodes, by block.
    pub(crate) onode_blocks: BTreeSet<u32>,
    /// A block was written for the first time.
    pub(crate) first_write: bool,
    /// Objects whose blocks are other ones, or more, than the device knows.
    pub(crate) remapped: BTreeSet<ObjectId>,
    /// Extents that objects gave up, by the object and the index in its map. If the object needs one there
    /// again before they are free, it is the same one. So operations that are applied again after a crash, in
    /// whatever state it left, need no more space than they did.
    pub(crate) released_extents: BTreeMap<(ObjectId, usize), u32>,
    /// Places of removed objects. One that is made again before its place is free gets the same place, so
    /// that no crash leaves it two onodes.
    pub(crate) removed: BTreeMap<ObjectId, u32>,
}

/// How much of a partition is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceUse {
    /// Extents in all.
    pub extents: u32,
    /// Extents that can be allocated now.
    pub free_extents: u32,
    /// Extents that are free after the next checkpoints.
    pub released_extents: u32,
    /// Objects.
    pub objects: u32,
    /// Onodes in all.
    pub onodes: u32,
    /// Onodes that can be allocated now.
    pub free_onodes: u32,
}

/// Extents and onodes that operations need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceNeed {
    /// Extents.
    pub extents: u32,
    /// Onodes.
    pub onodes: u32,
}

impl SpaceNeed {
    /// Whether nothing is needed.
    pub fn is_empty(&self) -> bool {
        *self == SpaceNeed::default()
    }
}

impl std::ops::Add for SpaceNeed {
    type Output = SpaceNeed;

    fn add(self, other: SpaceNeed) -> SpaceNeed {
        SpaceNeed { extents: self.extents + other.extents, onodes: self.onodes + other.onodes }
    }
}

impl SpaceUse {
    /// Extents of objects. Those that were given up are none.
    pub fn used_extents(&self) -> u32 {
        self.extents - self.free_extents - self.released_extents
    }

    /// Whether there is room for both.
    pub fn has_room(&self, reserved: SpaceNeed, need: SpaceNeed) -> bool {
        u64::from(reserved.extents) + u64::from(need.extents) <= self.free_extents.into()
            && u64::from(reserved.onodes) + u64::from(need.onodes) <= self.free_onodes.into()
    }
}

impl Partition {
    pub(crate) fn new(
        start: u64,
        layout: PartitionLayout,
        onodes: Vec<Option<Box<Onode>>>,
        index: BTreeMap<ObjectId, u32>,
        free_places: Vec<u32>,
        free: FreeExtents,
        checksums: BlockChecksums,
    ) -> Partition {
        Partition {
            start,
            layout,
            onodes,
            index,
            free_places,
            free,
            checksums: Some(checksums),
            changed: Changes::default(),
            in_checkpoint: None,
        }
    }

    /// The objects, in the order of their identifiers.
    pub fn objects(&self) -> impl Iterator<Item = &Onode> {
        self.index.values().filter_map(|place| self.onodes[*place as usize].as_deref())
    }

    /// The objects of a logical group.
    pub fn objects_of_group(&self, group: u32) -> impl Iterator<Item = &Onode> {
        let end = |volume, index, suffix| ObjectId { group, volume, index, suffix };
        let range = self.index.range(end(0, 0, 0)..=end(u64::MAX, u32::MAX, u64::MAX));
        range.filter_map(|(_, place)| self.onodes[*place as usize].as_deref())
    }

    /// The objects from one identifier to another, in their order.
    pub fn objects_between(&self, first: ObjectId, last: ObjectId) -> impl Iterator<Item = ObjectId> {
        // Of none, if they are not in their order.
        let range = (first <= last).then(|| self.index.range(first..=last));
        range.into_iter().flatten().map(|(id, _)| *id)
    }

    /// An object's onode; `None` if there is no such object, which reads as zeroes.
    pub fn onode(&self, id: ObjectId) -> Option<&Onode> {
        self.onodes[*self.index.get(&id)? as usize].as_deref()
    }

    /// Whether a checkpoint is in progress, which may free space.
    pub fn is_in_checkpoint(&self) -> bool {
        self.in_checkpoint.is_some()
    }

    /// How much is in use.
    pub fn space_use(&self) -> SpaceUse {
        let in_checkpoint = self.in_checkpoint.as_ref().map_or(0, |changes| changes.released_extents.len());
        SpaceUse {
            extents: self.layout.extents,
            free_extents: self.free.count(),
            released_extents: (self.changed.released_extents.len() + in_checkpoint) as u32,
            objects: self.index.len() as u32,
            onodes: self.layout.onodes,
            free_onodes: self.free_places.len() as u32,
        }
    }

    /// The most that an operation needs when it is applied later, after others that were accepted before it.
    /// A caller that logs operations first reserves it. `after_release`: one of these may give up space of
    /// the object, which is then no longer counted as its own.
    ///
    /// # Errors
    /// [`ObjectsError::Range`].
    pub fn space_need(&self, entry: &EntryHeader, after_release: bool) -> Result<SpaceNeed, ObjectsError> {
        let end = checked_end(entry.offset, entry.length)?;
        let indices = match entry.operation {
            Operation::Write => write::extent_indices(entry.offset, end),
            Operation::Preallocate => preallocated_indices(entry, end),
            Operation::WriteZeroes | Operation::Remove => return Ok(SpaceNeed::default()),
        };
        let onode = self.onode(entry.object).filter(|_| !after_release);
        let extents = match onode.map(|onode| &onode.content) {
            Some(OnodeContent::Mapped(map)) => indices.filter(|index| map.extents[*index] == 0).count(),
            // Inline data may move to the first extent.
            _ => indices.len() + usize::from(!indices.contains(&0)),
        };
        Ok(SpaceNeed { extents: extents as u32, onodes: onode.is_none().into() })
    }

    /// The checksums of its blocks.
    ///
    /// # Panics
    /// If they were [detached](Self::detach_checksums).
    pub fn checksums(&self) -> &BlockChecksums {
        self.checksums.as_ref().expect("the checksums are not detached")
    }

    /// The same, to be changed.
    ///
    /// # Panics
    /// As [`checksums`](Self::checksums).
    pub fn checksums_mut(&mut self) -> &mut BlockChecksums {
        self.checksums.as_mut().expect("the checksums are not detached")
    }

    /// Hands the checksums to another owner, while no checkpoint is in progress. From now on checkpoints of
    /// the partition have no blocks of the checksum table: the owner makes those durable in the same order,
    /// between the data and the onodes.
    ///
    /// # Panics
    /// If a checkpoint is in progress, or they are detached.
    pub fn detach_checksums(&mut self) -> BlockChecksums {
        assert!(self.in_checkpoint.is_none(), "a checkpoint is in progress");
        self.checksums.take().expect("the checksums are not detached")
    }

    /// The block of the device for a whole block of an object, if it was written; `durable` if a crash leaves
    /// it there.
    pub fn stored_block(&self, id: ObjectId, offset: u32, durable: bool) -> Option<u64> {
        let Some(OnodeContent::Mapped(map)) = self.onode(id).map(|onode| &onode.content) else { return None };
        let is_remapped = |changes: &Changes| changes.remapped.contains(&id);
        if durable && (is_remapped(&self.changed) || self.in_checkpoint.as_ref().is_some_and(is_remapped)) {
            return None;
        }
        self.device_block(map, offset as usize / BLOCK_BYTES)
    }

    /// Records an operation that has overwritten a block in place.
    pub fn overwritten(&mut self, entry: &EntryHeader) {
        if let Some(&place) = self.index.get(&entry.object) {
            self.record_version(place, entry);
        }
    }

    /// Plans a read; appends its pieces, which cover the range in order.
    ///
    /// # Errors
    /// [`ObjectsError::Range`].
    pub fn plan_read(
        &self,
        id: ObjectId,
        offset: u32,
        length: u32,
        pieces: &mut Vec<ReadPiece>,
    ) -> Result<(), ObjectsError> {
        let end = checked_end(offset, length)?;
        let content = self.onode(id).map(|onode| &onode.content);
        let map = match content {
            None => {
                pieces.push(ReadPiece { length, source: ReadSource::Zeroes });
                return Ok(());
            }
            Some(OnodeContent::Inline(data)) => {
                let bytes = data.get(offset as usize..).unwrap_or(&[]);
                let inline = bytes.len().min(length as usize);
                if inline > 0 {
                    let source = ReadSource::Inline(bytes[..inline].to_vec());
                    pieces.push(ReadPiece { length: inline as u32, source });
                }
                if length > inline as u32 {
                    pieces.push(ReadPiece { length: length - inline as u32, source: ReadSource::Zeroes });
                }
                return Ok(());
            }
            Some(OnodeContent::Mapped(map)) => map,
        };
        let first = pieces.len();
        let mut at = offset;
        while at < end {
            let (block, skip) = (at as usize / BLOCK_BYTES, at % BLOCK_BYTES as u32);
            let length = (BLOCK_BYTES as u32 - skip).min(end - at);
            let source = match self.device_block(map, block) {
                Some(block) => ReadSource::Stored { block, skip },
                None => ReadSource::Zeroes,
            };
            push_read(pieces, first, ReadPiece { length, source });
            at += length;
        }
        Ok(())
    }

    /// The block of the device that has a block of an object; `None` if it was not written.
    fn device_block(&self, map: &ObjectBlockMap, block: usize) -> Option<u64> {
        map.is_written(block).then(|| self.place_of(map.extents[block / BLOCKS_PER_EXTENT], block))
    }

    /// The block of the device for a block of an object in `extent`.
    fn place_of(&self, extent: u32, block: usize) -> u64 {
        self.extent_start(extent) + (block % BLOCKS_PER_EXTENT) as u64
    }

    /// The first block of an extent on the device.
    pub fn extent_start(&self, extent: u32) -> u64 {
        self.start + self.layout.extent_block(extent)
    }

    /// Applies an operation: changes the metadata, and appends the writes to perform. `data` is the
    /// operation's, and at least [`INLINE_BYTES_MAX`] bytes of it if it is longer.
    ///
    /// The caller performs the pieces, those of one block in their order, and calls
    /// [`BlockChecksums::set`] for every block.
    ///
    /// # Errors
    /// [`ObjectsError::Full`] and [`ObjectsError::Range`]; nothing was changed.
    pub fn apply(
        &mut self,
        entry: &EntryHeader,
        data: &[u8],
        pieces: &mut Vec<WritePiece>,
    ) -> Result<(), ObjectsError> {
        let end = checked_end(entry.offset, entry.length)?;
        if data.len() < entry.data_bytes().min(INLINE_BYTES_MAX) {
            return Err(ObjectsError::Range);
        }
        if entry.operation != Operation::Write {
            self.changed.remapped.insert(entry.object);
        }
        match entry.operation {
            Operation::Remove => self.remove(entry.object),
            Operation::WriteZeroes if self.onode(entry.object).is_none() => {}
            Operation::Write => self.write(entry, end, Some(data), pieces)?,
            Operation::WriteZeroes => self.write(entry, end, None, pieces)?,
            Operation::Preallocate => {
                self.preallocate(entry.object, preallocated_indices(entry, end), pieces)?
            }
        }
        if let Some(&place) = self.index.get(&entry.object) {
            self.record_version(place, entry);
        }
        Ok(())
    }

    fn record_version(&mut self, place: u32, entry: &EntryHeader) {
        let onode = self.onodes[place as usize].as_mut().expect("an indexed object has an onode");
        (onode.version, onode.sequence) = (entry.version, entry.sequence);
        onode.epoch = entry.epoch;
        if entry.mtime_ns > 0 {
            onode.mtime_ns = entry.mtime_ns;
        }
        self.changed.onode_blocks.insert(place / PartitionLayout::ONODES_PER_BLOCK);
    }

    fn remove(&mut self, id: ObjectId) {
        let Some(place) = self.index.remove(&id) else { return };
        let onode = self.onodes[place as usize].take();
        if let Some(OnodeContent::Mapped(map)) = onode.map(|onode| onode.content) {
            for (index, &extent) in map.extents.iter().enumerate().filter(|(_, extent)| **extent != 0) {
                self.changed.released_extents.insert((id, index), extent);
            }
        }
        self.changed.removed.insert(id, place);
        self.changed.onode_blocks.insert(place / PartitionLayout::ONODES_PER_BLOCK);
    }

    /// Gives an object the extents with these indices.
    fn preallocate(
        &mut self,
        id: ObjectId,
        indices: Range<usize>,
        pieces: &mut Vec<WritePiece>,
    ) -> Result<(), ObjectsError> {
        let inline = match self.onode(id).map(|onode| &onode.content) {
            Some(OnodeContent::Mapped(_)) => None,
            Some(OnodeContent::Inline(data)) => Some(data.clone()),
            None => Some(Vec::new()),
        };
        let is_data_moved = inline.as_ref().is_some_and(|data| !data.is_empty());
        self.check_space(id, indices.clone(), is_data_moved)?;
        let place = self.ensure_onode(id);
        if let Some(inline) = inline {
            self.move_out_of_line(place, inline, pieces);
        }
        for index in indices {
            self.claim_extent(place, index);
        }
        Ok(())
    }

    /// The place of an object whose removal is not durable.
    fn removed_place(&self, id: ObjectId) -> Option<u32> {
        let in_checkpoint = || self.in_checkpoint.as_ref()?.removed.get(&id);
        self.changed.removed.get(&id).or_else(in_checkpoint).copied()
    }

    /// Whether an object can get an onode and the extents with these indices, and the first if `first_too`.
    fn check_space(&self, id: ObjectId, indices: Range<usize>, first_too: bool) -> Result<(), ObjectsError> {
        let map = match self.onode(id).map(|onode| &onode.content) {
            Some(OnodeContent::Mapped(map)) => Some(map),
            _ => None,
        };
        let has_extent = |index: &usize| {
            map.is_some_and(|map| map.extents[*index] != 0) || self.released_extent(id, *index).is_some()
        };
        let first = (first_too && !indices.contains(&0)).then_some(0);
        let missing = indices.chain(first).filter(|index| !has_extent(index)).count();
        let has_onode = self.index.contains_key(&id) || self.removed_place(id).is_some();
        let fits = missing <= self.free.count() as usize && (has_onode || !self.free_places.is_empty());
        if fits { Ok(()) } else { Err(ObjectsError::Full) }
    }

    /// The extent that an object gave up at an index of its map, while that is not durable.
    fn released_extent(&self, id: ObjectId, index: usize) -> Option<u32> {
        let in_checkpoint = || self.in_checkpoint.as_ref()?.released_extents.get(&(id, index));
        self.changed.released_extents.get(&(id, index)).or_else(in_checkpoint).copied()
    }

    /// The extent at an index of an object's map, which gets one if it has none. Space was checked.
    fn claim_extent(&mut self, place: u32, index: usize) -> u32 {
        let extent = self.map_at(place).extents[index];
        if extent != 0 {
            return extent;
        }
        let key = (self.onodes[place as usize].as_ref().expect("the place is in use").id, index);
        let extent = match self.released_extent(key.0, index) {
            Some(extent) => {
                self.changed.released_extents.remove(&key);
                self.in_checkpoint.as_mut().and_then(|changes| changes.released_extents.remove(&key));
                extent
            }
            None => self.free.allocate().expect("space was checked"),
        };
        self.map_at_mut(place).extents[index] = extent;
        extent
    }

    /// The place of an object's onode, which is made if it does not exist.
    fn ensure_onode(&mut self, id: ObjectId) -> u32 {
        if let Some(&place) = self.index.get(&id) {
            return place;
        }
        let place = match self.removed_place(id) {
            Some(place) => {
                self.changed.removed.remove(&id);
                self.in_checkpoint.as_mut().and_then(|changes| changes.removed.remove(&id));
                place
            }
            None => self.free_places.pop().expect("space was checked"),
        };
        self.onodes[place as usize] = Some(Box::new(Onode::new(id, OnodeContent::Inline(Vec::new()))));
        self.index.insert(id, place);
        place
    }

    /// A checkpoint is complete: what it released is free.
    pub(crate) fn free_released(&mut self, changes: Changes) {
        changes.released_extents.into_values().for_each(|extent| self.free.release(extent));
        self.free_places.extend(changes.removed.into_values());
    }
}

/// The extents of an object that an operation allocates.
fn preallocated_indices(entry: &EntryHeader, end: u32) -> Range<usize> {
    if entry.length == 0 { 0..EXTENTS_PER_OBJECT } else { write::extent_indices(entry.offset, end) }
}

fn checked_end(offset: u32, length: u32) -> Result<u32, ObjectsError> {
    let end = offset.checked_add(length).filter(|end| *end as usize <= OBJECT_BYTES);
    end.ok_or(ObjectsError::Range)
}

/// Appends a piece, or extends the last one of this read if they are adjacent.
fn push_read(pieces: &mut Vec<ReadPiece>, first: usize, piece: ReadPiece) {
    if let Some(last) = pieces[first..].last_mut() {
        let adjacent = match (&last.source, &piece.source) {
            (ReadSource::Zeroes, ReadSource::Zeroes) => true,
            (ReadSource::Stored { block, skip }, ReadSource::Stored { block: next, .. }) => {
                block + u64::from(skip + last.length) / BLOCK_BYTES as u64 == *next
            }
            _ => false,
        };
        if adjacent {
            last.length += piece.length;
            return;
        }
    }
    pieces.push(piece);
}
