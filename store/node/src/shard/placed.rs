//! Blocks that are overwritten in place before their entries are committed, so that the log has only the headers.
//!
//! The header is durable first, then the data is written to its block; the entry is acknowledged after both. What holds:
//!
//! - A block is overwritten so only where the device writes it whole or not at all, a crash leaves it in the same place, and
//!   everything before it on the block is in place and committed. So its data can be told by its checksum.
//! - Nothing reads the block until the entry is committed or stable. A read in flight is repeated.
//! - Other entries replace what such an entry wrote only when the log or a checkpoint proves that it was committed:
//!   recovery, which compares the block with the checksum in the header, must not miss it.
//! - Recovery ends the log at the first entry whose data is not there. Blocks with the data of later ones, and of entries
//!   that a primary did not have, are unsettled (see [`replica`]); the checkpoint record lists them.

use std::collections::VecDeque;

use dma::Buffer;
use foldhash::HashMap;
use oplog::EntryPlace;
use wire_store::{BLOCK_BYTES, EntryHeader, ObjectId, Operation, UnsettledBlock};

use super::reads::ReadState;

/// Blocks that are written before their entries are committed. More are logged with their data.
pub(super) const UNCOMMITTED_MAX: usize = 256;
/// Unsettled blocks that a record has room for: those of two crashes, and of what a primary did not have.
pub(crate) const UNSETTLED_MAX: usize = 3 * UNCOMMITTED_MAX;

/// What a shard keeps about them.
#[derive(Default)]
pub(super) struct PlacedBlocks {
    pub(super) is_enabled: bool,
    /// The device promises to write a block whole or not at all, so that writes ask it for that.
    pub(super) is_atomic: bool,
    /// By block of the device: the sequence of the entry that changed it and is not committed.
    uncommitted: HashMap<u64, u64>,
    /// Entries up to here are never given up.
    stable: u64,
    /// Entries up to here are committed, as the log or a checkpoint proves after any crash.
    pub(super) proven: u64,
    /// By object, the newest entry in place that no checkpoint has.
    newest: HashMap<ObjectId, u64>,
    /// Blocks that an entry of the log found at the start had changed in place: earlier ones are not applied there.
    recovered: HashMap<u64, u64>,
    pub(super) unsettled: Vec<UnsettledEntry>,
    /// How often some were added; of these, what the last record has, and what a durable one has.
    additions: u64,
    recording: u64,
    recorded: u64,
    /// What the last record lists, and what a durable one does. Recovery takes what is in these blocks for that.
    recording_blocks: Vec<UnsettledBlock>,
    recorded_blocks: Vec<UnsettledBlock>,
    /// Sequences of the entries of the log without data.
    in_log: VecDeque<u64>,
    /// Writes that wait for a slot.
    pub(super) to_write: VecDeque<PlacedWrite>,
    /// Counts completed writes: a read that one overtook may find another checksum.
    pub(super) written: u64,
    /// Reads of blocks in `uncommitted`.
    pub(super) waiting: Vec<ReadState>,
}

/// A write of a block.
pub(super) struct PlacedWrite {
    pub(super) place: EntryPlace,
    pub(super) block: u64,
    pub(super) data_crc32c: u32,
    pub(super) data: Buffer,
}

/// An unsettled block.
#[derive(Clone, Copy)]
pub(super) struct UnsettledEntry {
    pub(super) block: UnsettledBlock,
    /// The block of the device.
    stored: u64,
    /// A committed entry that replaces the block, and is not in place.
    replaced_by: Option<u64>,
}

impl UnsettledEntry {
    pub(super) fn new(block: UnsettledBlock, stored: u64) -> UnsettledEntry {
        UnsettledEntry { block, stored, replaced_by: None }
    }

    fn is_touched(&self, header: &EntryHeader) -> bool {
        let UnsettledBlock { object, offset, .. } = self.block;
        let (start, end) = match header.operation {
            Operation::Write | Operation::WriteZeroes => (header.offset, header.offset + header.length),
            Operation::Remove => (0, u32::MAX),
            Operation::Preallocate => (0, 0),
        };
        object == header.object && start < offset + BLOCK_BYTES as u32 && offset < end
    }

    fn is_replaced(&self, header: &EntryHeader) -> bool {
        let UnsettledBlock { object, offset, .. } = self.block;
        header.replaces(object, offset..offset + BLOCK_BYTES as u32)
    }
}

/// Whether an entry is of the kind that can go in place.
pub(super) fn is_whole_block(header: &EntryHeader) -> bool {
    header.operation == Operation::Write
        && header.length as usize == BLOCK_BYTES
        && header.offset.is_multiple_of(BLOCK_BYTES as u32)
        && !header.withheld
}

/// What a block has if the entry's data is unsettled.
pub(super) fn unsettled_block(header: &EntryHeader) -> UnsettledBlock {
    let EntryHeader { object, offset, data_crc32c, client, client_number, .. } = *header;
    UnsettledBlock { object, offset, data_crc32c, client, client_number }
}

impl PlacedBlocks {
    /// Whether an entry may overwrite this block of the device.
    pub(super) fn may_write(&self, header: &EntryHeader, block: u64) -> bool {
        self.uncommitted.len() < UNCOMMITTED_MAX
            && self.uncommitted.len() + self.unsettled.len() < UNSETTLED_MAX
            && !self.uncommitted.contains_key(&block)
            && !self.unsettled.iter().any(|unsettled| unsettled.is_touched(header))
            && !self.recorded_blocks.iter().any(|it| (it.object, it.offset) == (header.object, header.offset))
            && !self
                .recording_blocks
                .iter()
                .any(|it| (it.object, it.offset) == (header.object, header.offset))
    }

    /// An entry overwrites a block, or has.
    pub(super) fn insert(&mut self, header: &EntryHeader, block: u64) {
        self.uncommitted.insert(block, header.sequence);
        self.insert_committed(header);
    }

    /// The same of an entry that is committed.
    pub(super) fn insert_committed(&mut self, header: &EntryHeader) {
        self.newest.insert(header.object, header.sequence);
        self.in_log.push_back(header.sequence);
    }

    /// At the start, an entry has changed a block. Those before it are not applied there.
    pub(super) fn insert_recovered(&mut self, block: u64, sequence: u64) {
        self.recovered.insert(block, sequence);
    }

    /// An entry is committed. Returns whether reads may go on.
    pub(super) fn commit(&mut self, header: &EntryHeader, block: Option<u64>) -> bool {
        // It is durable itself.
        self.proven = self.proven.max(header.commit_point);
        // One that is in place was there before, and those before it.
        let is_overtaken =
            |block| self.recovered.get(&block).is_some_and(|sequence| *sequence > header.sequence);
        for unsettled in self.unsettled.iter_mut().filter(|it| !header.in_place && it.is_replaced(header)) {
            if !is_overtaken(unsettled.stored) {
                unsettled.replaced_by = Some(header.sequence);
            }
        }
        let is_of_entry = |block: &u64| self.uncommitted.get(block) == Some(&header.sequence);
        if let Some(block) = block.filter(is_of_entry) {
            self.uncommitted.remove(&block);
        }
        block.is_some() && !self.waiting.is_empty()
    }

    /// Entries up to a sequence are never given up.
    pub(super) fn set_stable(&mut self, through: u64) {
        self.stable = self.stable.max(through);
    }

    /// Whether a block has what may be given up.
    pub(super) fn is_uncertain(&self, block: u64) -> bool {
        self.uncommitted.get(&block).is_some_and(|sequence| *sequence > self.stable)
    }

    pub(super) fn has_uncommitted(&self) -> bool {
        !self.uncommitted.is_empty()
    }

    /// Entries from a sequence on are given up; the blocks of these are unsettled.
    pub(super) fn give_up(&mut self, lost: impl Iterator<Item = UnsettledEntry>) {
        let before = self.unsettled.len();
        self.unsettled.extend(lost);
        self.additions += u64::from(self.unsettled.len() > before);
    }

    /// Whether a record is to be written because some are in none.
    pub(super) fn wants_record(&self) -> bool {
        self.additions > self.recording
    }

    /// Whether a durable record has all of them.
    pub(super) fn is_recorded(&self) -> bool {
        self.additions == self.recorded
    }

    /// A record begins; what it lists.
    pub(super) fn begin_record(&mut self) -> Vec<UnsettledBlock> {
        self.recording = self.additions;
        self.recording_blocks = self.unsettled.iter().map(|unsettled| unsettled.block).collect();
        self.recording_blocks.clone()
    }

    /// They are not in the log any more.
    pub(super) fn truncate(&mut self, from: u64) {
        self.uncommitted.retain(|_, sequence| *sequence < from);
        self.recovered.retain(|_, sequence| *sequence < from);
        self.newest.values_mut().for_each(|sequence| *sequence = (*sequence).min(from - 1));
        while self.in_log.pop_back_if(|sequence| *sequence >= from).is_some() {}
    }

    /// The log does not have entries up to this one.
    pub(super) fn freed(&mut self, through: u64) {
        while self.in_log.pop_front_if(|sequence| *sequence <= through).is_some() {}
    }

    /// Bytes of data that the log would have.
    pub(super) fn bytes_in_log(&self) -> u64 {
        self.in_log.len() as u64 * BLOCK_BYTES as u64
    }

    /// A checkpoint has the entries up to this one.
    pub(super) fn checkpointed(&mut self, through: u64) {
        self.recorded = self.recording;
        self.recorded_blocks.clone_from(&self.recording_blocks);
        self.proven = self.proven.max(through);
        self.newest.retain(|_, sequence| *sequence > through);
        self.recovered.retain(|_, sequence| *sequence > through);
    }

    /// What is to be proven before an entry is applied: that those before it, which may have changed its blocks, are
    /// committed. Returns whether a checkpoint is needed for that.
    pub(super) fn is_unproven(&self, object: ObjectId, sequence: u64) -> bool {
        let newest = self.newest.get(&object).copied().unwrap_or(0);
        newest.min(sequence.saturating_sub(1)) > self.proven
    }

    /// Whether an entry changes a part of an unsettled block, so that it waits until that is settled.
    pub(super) fn waits_to_settle(&self, header: &EntryHeader) -> bool {
        self.unsettled
            .iter()
            .any(|it| it.replaced_by.is_none() && it.is_touched(header) && !it.is_replaced(header))
    }

    /// Whether an entry does not change a block of the device, because a later one has, or will.
    pub(super) fn is_overtaken(&self, header: &EntryHeader, block: u64) -> bool {
        self.recovered.get(&block).is_some_and(|sequence| *sequence > header.sequence)
    }

    /// Committed entries up to this one are in place: they have settled what they replace.
    pub(super) fn in_place(&mut self, through: u64) {
        self.unsettled.retain(|it| it.replaced_by.is_none_or(|sequence| sequence > through));
    }

    /// Whether a block is unsettled, and no committed entry replaces it.
    pub(super) fn is_unsettled(&self, object: ObjectId, offset: u32) -> bool {
        let is_this = |it: &&UnsettledEntry| (it.block.object, it.block.offset) == (object, offset);
        self.unsettled.iter().filter(is_this).any(|it| it.replaced_by.is_none())
    }

    /// A block has what the primary has.
    pub(super) fn settle(&mut self, object: ObjectId, offset: u32) {
        self.unsettled.retain(|it| (it.block.object, it.block.offset) != (object, offset));
    }

    /// Everything is removed.
    pub(super) fn clear(&mut self) {
        let PlacedBlocks { is_enabled, is_atomic, .. } = *self;
        let (waiting, written) = (std::mem::take(&mut self.waiting), self.written);
        *self = PlacedBlocks { is_enabled, is_atomic, waiting, written, ..PlacedBlocks::default() };
    }
}
