//! What the background task of a shard does for a replica besides writing in place.

use std::cell::RefCell;

use replica::{EntryId, ReplicaAction, ReplicaEvent};
use wire_store::{BLOCK_BYTES, EntryHeader, ObjectId, Operation, crc32c};

use super::Replication;
use crate::StoreError;
use crate::device::StoreDevice;
use crate::disks::StoreDisks;
use crate::shard::Shard;
use crate::shard::flusher::{
    BATCH_ENTRIES_MAX, BackgroundWork, begin_checkpoint, checkpoint, end_checkpoint,
};
use crate::shard::overlay::Overlay;

/// Frees entries of the log.
pub(in crate::shard) async fn free(shard: &RefCell<Shard>, device: &StoreDevice) -> Result<(), StoreError> {
    let header = {
        let mut shard = shard.borrow_mut();
        let through = shard.replication.as_ref().map_or(0, |replication| replication.free_through);
        shard.log.free(through + 1).map(|header| (shard.log_start + u64::from(header.slot), header.bytes))
    };
    if let Some((block, bytes)) = header {
        device.write_head(block, &bytes).await?;
        let mut shard = shard.borrow_mut();
        shard.log.freed();
        let through = shard.log.sequences().start - 1;
        shard.placed.freed(through);
    }
    Ok(())
}

/// Writes what the primary has to unsettled blocks. What the log has of these is in place, or waits for this.
pub(in crate::shard) async fn settle(shard: &RefCell<Shard>, disks: &StoreDisks) -> Result<(), StoreError> {
    let next = || shard.borrow_mut().replication.as_mut()?.settles.pop_front();
    let is_proven = |shard: &Shard| {
        let in_place = shard.replication.as_ref().map_or(0, |replication| replication.in_place.sequence);
        shard.placed.proven >= in_place
    };
    // Recovery would miss what entries had written there before.
    if !is_proven(&shard.borrow()) {
        checkpoint(shard, disks).await?;
    }
    while let Some(ReplicaAction::Settle { number, object, offset, data }) = next() {
        let block = {
            let shard = &mut *shard.borrow_mut();
            let block = shard.partition.stored_block(object, offset, false);
            let block = block.filter(|_| shard.placed.is_unsettled(object, offset));
            block.filter(|_| data.len() == BLOCK_BYTES).inspect(|block| {
                shard.generation += 1;
                shard.busy_blocks.insert(*block);
            })
        };
        if let Some(block) = block {
            disks.data.write(block * BLOCK_BYTES as u64, &data).await?;
            let mut shard = shard.borrow_mut();
            shard.set_checksum(block, crc32c(&data));
            shard.is_changed = true;
            shard.busy_blocks.clear();
            shard.placed.settle(object, offset);
        }
        let mut shard = shard.borrow_mut();
        if let Some(replication) = &mut shard.replication {
            replication.events.push_back(ReplicaEvent::Settled { number });
        }
        shard.resume();
    }
    Ok(())
}

/// Removes all objects and entries. The record comes first: from then on a crash leaves a replica that is not
/// complete.
pub(in crate::shard) async fn reset(shard: &RefCell<Shard>, disks: &StoreDisks) -> Result<(), StoreError> {
    let (session, base, record) = {
        let mut shard = shard.borrow_mut();
        shard.placed.clear();
        let replication = shard.replication.as_mut().expect("only a replica is reset");
        let (session, checkpoint) = replication.reset.take().expect("a reset is wanted");
        replication.is_resetting = true;
        replication.complete = false;
        replication.applied = checkpoint.applied;
        replication.in_place = checkpoint.through;
        replication.committed = checkpoint.through;
        (session, checkpoint.through, replication.next_record(&[]))
    };
    record.write(disks.log()).await?;
    reset_log(shard, disks.log(), base).await?;
    {
        let shard = &mut *shard.borrow_mut();
        shard.remove_everything()?;
        shard.applied_below = base.sequence + 1;
    }
    let (_, readers) = begin_checkpoint(shard, &disks.data).await?;
    end_checkpoint(shard, readers).await?;
    let mut shard = shard.borrow_mut();
    if let Some(replication) = &mut shard.replication {
        replication.is_resetting = false;
        replication.events.push_back(ReplicaEvent::ResetDone { session });
    }
    Ok(())
}

/// Gives up every entry of the log.
pub(super) async fn reset_log(
    shard: &RefCell<Shard>,
    device: &StoreDevice,
    base: EntryId,
) -> Result<(), StoreError> {
    let (block, bytes) = {
        let mut shard = shard.borrow_mut();
        let header = shard.log.reset(base.sequence, base.epoch);
        (shard.log_start + u64::from(header.slot), header.bytes)
    };
    device.write_head(block, &bytes).await?;
    shard.borrow_mut().log.freed();
    Ok(())
}

impl Shard {
    /// Forgets every committed entry, and removes every object.
    fn remove_everything(&mut self) -> Result<(), StoreError> {
        for entry in std::mem::take(&mut self.committed) {
            self.unplaced.remove(entry.bytes);
            self.release_reservation(&entry.header, entry.need);
        }
        self.overlay = Overlay::default();
        self.generation += 1;
        let all: Vec<ObjectId> = self.partition.objects().map(|onode| onode.id).collect();
        for object in all {
            let removal = EntryHeader::new(Operation::Remove, object, 0, 0);
            let removed = self.partition.apply(&removal, &[], &mut Vec::new());
            removed.map_err(|source| StoreError::Objects { partition: self.index, source })?;
        }
        Ok(())
    }

    /// What the background task does now.
    pub(in crate::shard) fn replica_work(&self, replication: &Replication) -> Option<BackgroundWork> {
        if replication.reset.is_some() {
            let is_quiet = self.unacknowledged.is_empty() && self.log_writes == 0;
            return is_quiet.then_some(BackgroundWork::Reset);
        }
        if self.log.can_free(replication.free_through + 1) {
            return Some(BackgroundWork::Free);
        }
        let wanted = replication.checkpoint.as_ref().map(|(_, record)| record.through.sequence);
        let is_reached = wanted.is_some_and(|through| through <= replication.in_place.sequence);
        let is_due = (self.checkpoint_wanted && self.is_changed) || self.has_many_changed_checksums();
        if is_reached || is_due || self.placed.wants_record() {
            return Some(BackgroundWork::Checkpoint);
        }
        let next = self.committed.front();
        let waits_to_settle = next.is_some_and(|next| self.placed.waits_to_settle(&next.header));
        if !replication.settles.is_empty() && (next.is_none() || waits_to_settle) {
            return Some(BackgroundWork::Settle);
        }
        let is_wanted = wanted.is_some()
            || self.is_closing
            || !replication.settles.is_empty()
            || replication.is_redoing()
            || replication.copies_to_place > 0
            || !self.waiting_for_flush.is_empty()
            // Space is freed by a checkpoint of what is in place.
            || self.checkpoint_wanted
            || self.unplaced.is_half_full();
        let is_enough = self.has_enough_to_flush() || is_wanted;
        if next.is_some() && !waits_to_settle && (is_enough || self.is_flush_due()) {
            let is_unproven = next.is_some_and(|next| self.is_unproven(&next.header));
            return Some(if is_unproven { BackgroundWork::Checkpoint } else { BackgroundWork::Flush });
        }
        self.is_closing.then_some(BackgroundWork::End)
    }

    fn is_unproven(&self, header: &EntryHeader) -> bool {
        !header.in_place && self.placed.is_unproven(header.object, header.sequence)
    }

    /// Committed entries that may go in place now.
    pub(in crate::shard) fn flushable(&self) -> usize {
        let may_go = |header: &EntryHeader| !self.placed.waits_to_settle(header) && !self.is_unproven(header);
        let next = self.committed.iter().take(BATCH_ENTRIES_MAX);
        next.take_while(|entry| may_go(&entry.header)).count()
    }
}
