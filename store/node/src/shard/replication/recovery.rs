//! What a crash left of entries whose data is not in the log.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use oplog::RecoveredEntries;
use replica::ReplicatedEntry;
use wire_store::{BLOCK_BYTES, EntryHeader, ObjectId, UnsettledBlock, crc32c};

use crate::StoreError;
use crate::device::{StoreDevice, join_all};
use crate::shard::Shard;
use crate::shard::placed::{UnsettledEntry, unsettled_block};

/// Blocks that are read at a time.
const READS_MAX: usize = 32;

/// A block of an object.
type ObjectBlock = (ObjectId, u32);

/// What the log and its blocks have.
pub(super) struct RecoveredBlocks {
    /// The entries up to the first whose data is not there.
    pub(super) entries: RecoveredEntries,
    /// The same for the replica, with the data where it is known.
    pub(super) replicated: Vec<Arc<ReplicatedEntry>>,
    /// Blocks with the data of others.
    pub(super) unsettled: Vec<Arc<ReplicatedEntry>>,
    /// By sequence, the blocks of the device that have the data of these entries.
    pub(super) blocks: HashMap<u64, u64>,
}

/// Compares blocks with the entries of the log that changed them, and with those that `recorded` lists.
/// Entries up to `through` are in place.
pub(super) async fn recover_blocks(
    shard: &RefCell<Shard>,
    device: &StoreDevice,
    mut entries: RecoveredEntries,
    recorded: Vec<UnsettledBlock>,
    through: u64,
) -> Result<RecoveredBlocks, StoreError> {
    let last = last_of_blocks(&entries);
    let listed = recorded.iter().map(|block| (block.object, block.offset));
    let stored = read_blocks(shard, device, last.keys().copied().chain(listed).collect()).await?;
    let has = |block: ObjectBlock, data_crc32c: u32| {
        stored.get(&block).is_some_and(|stored| stored.data_crc32c == data_crc32c)
    };
    let has_data_of = |header: &EntryHeader| has((header.object, header.offset), header.data_crc32c);
    let is_last = |header: &EntryHeader| last.get(&(header.object, header.offset)) == Some(&header.sequence);

    let proven = entries.iter().map(|(header, _)| header.commit_point).max().unwrap_or(0).max(through);
    let mut unsettled: Vec<UnsettledBlock> = recorded;
    // The log may still have what was to be truncated.
    let is_in_log = |block: &UnsettledBlock| {
        entries.iter().any(|(header, _)| header.in_place && unsettled_block(header) == *block)
    };
    unsettled.retain(|block| has((block.object, block.offset), block.data_crc32c) && !is_in_log(block));
    let is_unsettled = |header: &EntryHeader| {
        unsettled.iter().any(|block| (block.object, block.offset) == (header.object, header.offset))
    };
    // Of entries that are followed by another one in place, the data was there, and committed.
    let is_there = |header: &EntryHeader| {
        !header.in_place
            || header.sequence <= proven
            || !is_last(header)
            || has_data_of(header)
            || is_unsettled(header)
    };
    let kept = entries.iter().take_while(|(header, _)| is_there(header)).count();
    let lost = entries.split_off(kept);
    let lost_blocks = lost.iter().map(|(header, _)| header).filter(|it| it.in_place && has_data_of(it));
    for block in lost_blocks.map(unsettled_block) {
        // An earlier start may have listed it.
        if !unsettled.iter().any(|other| (other.object, other.offset) == (block.object, block.offset)) {
            unsettled.push(block);
        }
    }
    let last = last_of_blocks(&entries);
    let is_last = |header: &EntryHeader| last.get(&(header.object, header.offset)) == Some(&header.sequence);
    let is_unsettled = |header: &EntryHeader| {
        unsettled.iter().any(|block| (block.object, block.offset) == (header.object, header.offset))
    };

    let mut recovered = RecoveredBlocks {
        replicated: Vec::with_capacity(kept),
        unsettled: Vec::new(),
        blocks: HashMap::new(),
        entries: Vec::new(),
    };
    let shard = &mut *shard.borrow_mut();
    if let Some((first, _)) = lost.first() {
        log::info!("the log of group {} ends before entry {}", shard.log.group(), first.sequence);
        shard.log.truncate(first.sequence);
    }
    for (header, data) in &entries {
        // What is before an entry in the log is not the replica's matter.
        let replicated = EntryHeader { previous_crc32c: 0, in_place: false, ..header.clone() };
        let stored = stored.get(&(header.object, header.offset)).filter(|_| header.in_place);
        if let Some(stored) = stored.filter(|_| header.sequence > through) {
            shard.placed.insert_recovered(stored.block, header.sequence);
        }
        let last = stored.filter(|_| is_last(header));
        let found = last.filter(|stored| stored.data_crc32c == header.data_crc32c);
        // What committed entries have changed since is in the block, and is applied again.
        let last = last.filter(|_| !is_unsettled(header));
        recovered.replicated.push(Arc::new(match (header.in_place, last) {
            (false, _) => ReplicatedEntry { header: replicated, data: data.as_slice().into() },
            (true, Some(stored)) => {
                let header = EntryHeader { data_crc32c: stored.data_crc32c, ..replicated };
                ReplicatedEntry { header, data: stored.data.clone() }
            }
            (true, None) => {
                let header = EntryHeader { withheld: true, data_crc32c: 0, ..replicated };
                ReplicatedEntry { header, data: [].into() }
            }
        }));
        match found {
            Some(stored) if header.sequence > through => {
                shard.placed.insert(header, stored.block);
                shard.partition.checksums_mut().set(stored.block, stored.data_crc32c);
                recovered.blocks.insert(header.sequence, stored.block);
            }
            _ if header.in_place => shard.placed.insert_committed(header),
            _ => {}
        }
    }
    recovered.unsettled = list_unsettled(shard, &unsettled, &stored);
    recovered.entries = entries;
    Ok(recovered)
}

/// Tells the shard and the replica which blocks are unsettled, with their data.
fn list_unsettled(
    shard: &mut Shard,
    unsettled: &[UnsettledBlock],
    stored: &HashMap<ObjectBlock, StoredBlock>,
) -> Vec<Arc<ReplicatedEntry>> {
    let list = |block: &UnsettledBlock| {
        let UnsettledBlock { object, offset, data_crc32c, client, client_number } = *block;
        let stored = &stored[&(object, offset)];
        shard.partition.checksums_mut().set(stored.block, stored.data_crc32c);
        shard.placed.unsettled.push(UnsettledEntry::new(*block, stored.block));
        let header = EntryHeader::new(wire_store::Operation::Write, object, offset, BLOCK_BYTES as u32);
        let header = EntryHeader { data_crc32c, client, client_number, ..header };
        Arc::new(ReplicatedEntry { header, data: stored.data.clone() })
    };
    unsettled.iter().map(list).collect()
}

/// The last entry in place of each block.
fn last_of_blocks(entries: &RecoveredEntries) -> HashMap<ObjectBlock, u64> {
    let in_place = entries.iter().map(|(header, _)| header).filter(|header| header.in_place);
    in_place.map(|header| ((header.object, header.offset), header.sequence)).collect()
}

/// A block as it is on the device.
struct StoredBlock {
    block: u64,
    data_crc32c: u32,
    data: Arc<[u8]>,
}

async fn read_blocks(
    shard: &RefCell<Shard>,
    device: &StoreDevice,
    wanted: Vec<ObjectBlock>,
) -> Result<HashMap<ObjectBlock, StoredBlock>, StoreError> {
    let stored = RefCell::new(HashMap::new());
    let read = |(object, offset): ObjectBlock| {
        let stored = &stored;
        async move {
            let block = shard.borrow().partition.stored_block(object, offset, false);
            let Some(block) = block else { return Ok(()) };
            let buffer = device.read(block * BLOCK_BYTES as u64, BLOCK_BYTES).await?;
            let data_crc32c = crc32c(buffer.as_slice());
            let data = buffer.as_slice().into();
            stored.borrow_mut().insert((object, offset), StoredBlock { block, data_crc32c, data });
            Ok(())
        }
    };
    join_all(READS_MAX, wanted.into_iter().map(read)).await?;
    Ok(stored.into_inner())
}
