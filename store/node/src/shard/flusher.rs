//! The background task of a shard: committed entries go in place, and checkpoints free the log.

use std::cell::RefCell;
use std::rc::Rc;
use std::task::Poll;

use objects::{Checkpoint, MetadataWrite, ObjectsError};
use wire_store::{BLOCK_BYTES, EntryHeader};

use super::checksums::BlockReader;
use super::in_place::InPlaceBatch;
use super::overlay::EntryData;
use super::replication::RecordWrite;
use super::store_thread::{SentBatch, StoreRequest};
use super::{Shard, replication, store_thread};
use crate::StoreError;
use crate::device::{StoreDevice, join_all};
use crate::disks::StoreDisks;
use crate::threads::WakeCause;

/// Most entries of a batch.
pub(super) const BATCH_ENTRIES_MAX: usize = 1024;
/// Metadata writes in flight.
const METADATA_WRITES_MAX: usize = 32;

/// What a shard's background task does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BackgroundWork {
    /// Write committed entries in place.
    Flush,
    /// Make metadata durable and free the log.
    Checkpoint,
    /// Free entries of a replica's log.
    Free,
    /// Write what the primary has to unsettled blocks.
    Settle,
    /// Remove all objects and entries of a replica.
    Reset,
    /// End: the shard is closed, or has failed.
    End,
}

/// Runs until the shard is closed or fails.
pub(super) async fn run(shard: Rc<RefCell<Shard>>, disks: StoreDisks) {
    loop {
        let work = std::future::poll_fn(|context| {
            let mut shard = shard.borrow_mut();
            match shard.background_work() {
                Some(work) => Poll::Ready(work),
                None => {
                    shard.background = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        });
        let work = work.await;
        // A static probe point: one NOP until a tracer attaches. The address tells shards apart.
        probe::probe!(ringbolt, store_work_begin, Rc::as_ptr(&shard), work as usize);
        let result = match work {
            BackgroundWork::Flush => flush(&shard, &disks.data).await,
            BackgroundWork::Checkpoint => checkpoint(&shard, &disks).await,
            BackgroundWork::Settle => replication::settle(&shard, &disks).await,
            BackgroundWork::Free => replication::free(&shard, disks.log()).await,
            BackgroundWork::Reset => replication::reset(&shard, &disks).await,
            BackgroundWork::End => {
                store_thread::close(&shard).await;
                return shard.borrow_mut().ended();
            }
        };
        probe::probe!(ringbolt, store_work_end, Rc::as_ptr(&shard), work as usize, result.is_err());
        if let Err(error) = result {
            shard.borrow_mut().fail(&error);
        }
    }
}

/// Writes the oldest committed entries in place.
async fn flush(shard: &RefCell<Shard>, device: &StoreDevice) -> Result<(), StoreError> {
    let (batch, entries, verify, cause) = {
        let mut shard = shard.borrow_mut();
        let by_count = shard.has_enough_to_flush();
        let by_time = !by_count && shard.is_flush_due();
        let count = shard.flushable();
        let mut entries: Vec<_> = shard.committed.drain(..count).collect();
        let (batch, applied) = apply(&mut shard, entries.iter().map(|entry| (&entry.header, &entry.data)))?;
        // What finds no room waits for a checkpoint, which frees what earlier entries gave up.
        for entry in entries.drain(applied..).rev() {
            shard.committed.push_front(entry);
            shard.checkpoint_wanted = true;
        }
        let is_full = applied == 0 && !shard.is_changed;
        if is_full || (shard.replication.is_none() && applied < count) {
            let source = objects::ObjectsError::Full;
            return Err(StoreError::Objects { partition: shard.index, source });
        }
        for entry in &entries {
            shard.release_reservation(&entry.header, entry.need);
        }
        shard.generation += 1;
        shard.busy_blocks.extend(batch.blocks());
        shard.stats.flushes += 1;
        shard.stats.flushes_by_count += u64::from(by_count);
        shard.stats.flushes_by_time += u64::from(by_time);
        shard.stats.entries_in_place += entries.len() as u64;
        let first = entries.first().map_or(0, |entry| entry.header.sequence);
        let verify = shard.replication.as_ref().is_none_or(|replication| replication.is_verified(first));
        let cause = match (by_count, by_time, shard.waiting_for_flush.is_empty()) {
            (true, ..) => WakeCause::Count,
            (_, true, _) => WakeCause::Time,
            (_, _, false) => WakeCause::WaitingRead,
            _ => WakeCause::FullLog,
        };
        (batch, entries, verify, cause)
    };
    write_batch(shard, device, batch, verify, cause).await?;
    let mut shard = shard.borrow_mut();
    for entry in &entries {
        shard.unplaced.remove(entry.bytes);
        shard.overlay.forget(entry.header.object, entry.header.sequence);
    }
    if let Some(last) = entries.last() {
        shard.applied_below = last.header.sequence + 1;
        shard.placed.in_place(last.header.sequence);
    }
    if let Some(replication) = &mut shard.replication {
        entries.iter().for_each(|entry| replication.is_in_place(entry));
    }
    shard.oldest_committed_ns = shard.core.now_ns();
    shard.busy_blocks.clear();
    shard.update_room();
    shard.resume();
    Ok(())
}

/// Writes a batch, on the thread that has the blocks of the partition.
async fn write_batch(
    shard: &RefCell<Shard>,
    device: &StoreDevice,
    batch: InPlaceBatch,
    verify: bool,
    cause: WakeCause,
) -> Result<(), StoreError> {
    let is_here = shard.borrow().store.is_none();
    if is_here || batch.is_empty() {
        return batch.write(shard, device, verify).await;
    }
    let batch = SentBatch::new(batch);
    store_thread::perform(shard, cause, |done| StoreRequest::Batch { batch, verify, done }).await
}

/// Applies entries to the metadata, until one finds no room; returns the blocks to write, and the number of
/// entries.
pub(super) fn apply<'a>(
    shard: &mut Shard,
    entries: impl Iterator<Item = (&'a EntryHeader, &'a EntryData)>,
) -> Result<(InPlaceBatch, usize), StoreError> {
    let mut batch = InPlaceBatch::default();
    let mut pieces = Vec::new();
    let mut count = 0;
    for (entry, data) in entries {
        if entry.in_place {
            shard.partition.overwritten(entry);
        } else if !entry.withheld {
            pieces.clear();
            match shard.partition.apply(entry, data.bytes_from(0), &mut pieces) {
                Ok(()) => batch.add(&pieces, data, |block| shard.placed.is_overtaken(entry, block)),
                Err(ObjectsError::Full) => break,
                Err(source) => return Err(StoreError::Objects { partition: shard.index, source }),
            }
        }
        shard.is_changed = true;
        count += 1;
    }
    Ok((batch, count))
}

/// Makes what is in place durable with its metadata, and frees its entries or, with a replica, records it.
pub(super) async fn checkpoint(shard: &RefCell<Shard>, disks: &StoreDisks) -> Result<(), StoreError> {
    let (record, readers) = begin_checkpoint(shard, &disks.data).await?;
    if let Some(record) = record {
        record.write(disks.log()).await?;
        return end_checkpoint(shard, readers).await;
    }
    let header = {
        let mut shard = shard.borrow_mut();
        let below = shard.applied_below;
        shard.log.free(below).map(|header| (shard.log_start + u64::from(header.slot), header.bytes))
    };
    if let Some((block, bytes)) = header {
        disks.log().write_head(block, &bytes).await?;
        shard.borrow_mut().log.freed();
    }
    end_checkpoint(shard, readers).await
}

/// Makes what is in place durable with its metadata. Returns a replica's record of it, and what reads hold
/// that were planned before.
pub(super) async fn begin_checkpoint(
    shard: &RefCell<Shard>,
    device: &StoreDevice,
) -> Result<(Option<RecordWrite>, Rc<()>), StoreError> {
    let (checkpoint, record, readers) = {
        let mut shard = shard.borrow_mut();
        let readers = std::mem::take(&mut shard.reading);
        shard.is_changed = false;
        let unsettled = shard.placed.begin_record();
        let record = shard.replication.as_mut().map(|replication| replication.next_record(&unsettled));
        (shard.partition.begin_checkpoint(), record, readers)
    };
    if shard.borrow().store.is_some() {
        let request = |done| StoreRequest::Checkpoint { checkpoint, done };
        store_thread::perform(shard, WakeCause::Checkpoint, request).await?;
        return Ok((record, readers));
    }
    write_checkpoint(shard, device, &checkpoint).await?;
    Ok((record, readers))
}

/// The checkpoint is durable.
pub(super) async fn end_checkpoint(shard: &RefCell<Shard>, readers: Rc<()>) -> Result<(), StoreError> {
    // Reads that were planned before may still read what is free afterwards.
    std::future::poll_fn(|context| {
        if Rc::strong_count(&readers) == 1 {
            return Poll::Ready(());
        }
        shard.borrow_mut().waits_for_readers = Some(context.waker().clone());
        Poll::Pending
    })
    .await;
    let mut shard = shard.borrow_mut();
    shard.partition.finish_checkpoint();
    shard.stats.checkpoints += 1;
    shard.checkpoint_wanted = false;
    if let Some(replication) = &mut shard.replication {
        let through = replication.is_checkpointed();
        shard.placed.checkpointed(through);
    }
    shard.update_room();
    shard.resume();
    Ok(())
}

/// Makes what is in place durable with its metadata, in the order that recovery relies on.
pub(super) async fn write_checkpoint(
    reader: &RefCell<impl BlockReader>,
    device: &StoreDevice,
    checkpoint: &Checkpoint,
) -> Result<(), StoreError> {
    let checksums = checkpoint.checksum_blocks.iter().map(|block| write_checksums(reader, device, *block));
    join_all(METADATA_WRITES_MAX, checksums).await?;
    if checkpoint.flush_before_onodes {
        device.flush().await?;
    }
    let onodes = checkpoint
        .onodes
        .iter()
        .map(|MetadataWrite { block, bytes }| device.write(*block * BLOCK_BYTES as u64, &bytes[..]));
    join_all(METADATA_WRITES_MAX, onodes).await?;
    device.flush().await
}

/// Writes a block of the checksum table, with what the device has of it if it is not in memory.
async fn write_checksums(
    reader: &RefCell<impl BlockReader>,
    device: &StoreDevice,
    block: u64,
) -> Result<(), StoreError> {
    let cached = reader.borrow_mut().checksums().checkpoint_write(block, None);
    let write = match cached {
        Some(write) => write,
        None => {
            let stored = device.read_block(block).await?;
            let write = reader.borrow_mut().checksums().checkpoint_write(block, Some(&stored));
            write.expect("the stored block is given")
        }
    };
    device.write(block * BLOCK_BYTES as u64, &write.bytes[..]).await
}
