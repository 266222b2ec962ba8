//! The background task of a shard: committed entries go in place, and checkpoints free the log.

use std::cell::RefCell;
use std::rc::Rc;
use std::task::Poll;

use objects::MetadataWrite;
use wire_store::{BLOCK_BYTES, EntryHeader};

use super::Shard;
use super::in_place::InPlaceBatch;
use super::overlay::EntryData;
use crate::StoreError;
use crate::device::{StoreDevice, join_all};

/// Committed entries that start a batch, and most entries of one.
pub(super) const FLUSH_ENTRIES: usize = 16;
const BATCH_ENTRIES_MAX: usize = 1024;
/// A committed entry goes in place after this time even if there are few.
pub(super) const FLUSH_AFTER_NS: u64 = 100_000_000;
/// Metadata writes in flight.
const METADATA_WRITES_MAX: usize = 32;

/// What a shard's background task does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BackgroundWork {
    /// Write committed entries in place.
    Flush,
    /// Make metadata durable and free the log.
    Checkpoint,
    /// End: the shard is closed, or has failed.
    End,
}

/// Runs until the shard is closed or fails.
pub(super) async fn run(shard: Rc<RefCell<Shard>>, device: StoreDevice) {
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
        let result = match work.await {
            BackgroundWork::Flush => flush(&shard, &device).await,
            BackgroundWork::Checkpoint => checkpoint(&shard, &device).await,
            BackgroundWork::End => return shard.borrow_mut().ended(),
        };
        if let Err(error) = result {
            shard.borrow_mut().fail(&error);
        }
    }
}

/// Writes the oldest committed entries in place.
async fn flush(shard: &RefCell<Shard>, device: &StoreDevice) -> Result<(), StoreError> {
    let (batch, entries, bytes) = {
        let mut shard = shard.borrow_mut();
        let count = shard.committed.len().min(BATCH_ENTRIES_MAX);
        let committed: Vec<_> = shard.committed.drain(..count).collect();
        committed.iter().for_each(|entry| shard.release_reservation(entry));
        let bytes: u64 = committed.iter().map(|entry| entry.bytes).sum();
        let entries: Vec<_> = committed.into_iter().map(|entry| (entry.header, entry.data)).collect();
        let batch = apply(&mut shard, &entries)?;
        shard.generation += 1;
        shard.busy_blocks.extend(batch.blocks());
        shard.stats.flushes += 1;
        shard.stats.entries_in_place += entries.len() as u64;
        (batch, entries, bytes)
    };
    batch.write(shard, device, true).await?;
    let mut shard = shard.borrow_mut();
    shard.unplaced_bytes -= bytes;
    for (entry, _) in &entries {
        shard.overlay.forget(entry.object, entry.sequence);
    }
    if let Some((last, _)) = entries.last() {
        shard.applied_below = last.sequence + 1;
    }
    shard.oldest_committed_ns = shard.core.now_ns();
    shard.busy_blocks.clear();
    shard.resume();
    Ok(())
}

/// Applies entries to the metadata; returns the blocks to write.
pub(super) fn apply(
    shard: &mut Shard,
    entries: &[(EntryHeader, EntryData)],
) -> Result<InPlaceBatch, StoreError> {
    shard.is_changed |= !entries.is_empty();
    let mut batch = InPlaceBatch::default();
    let mut pieces = Vec::new();
    for (entry, data) in entries {
        pieces.clear();
        let applied = shard.partition.apply(entry, data.bytes_from(0), &mut pieces);
        applied.map_err(|source| StoreError::Objects { partition: shard.index, source })?;
        batch.add(&pieces, data);
    }
    Ok(batch)
}

/// Makes what is in place durable with its metadata, and frees its entries.
pub(super) async fn checkpoint(shard: &RefCell<Shard>, device: &StoreDevice) -> Result<(), StoreError> {
    let (checkpoint, readers) = {
        let mut shard = shard.borrow_mut();
        let readers = std::mem::take(&mut shard.reading);
        shard.is_changed = false;
        (shard.partition.begin_checkpoint(), readers)
    };
    write_metadata(device, &checkpoint.checksums).await?;
    if checkpoint.flush_before_onodes {
        device.flush().await?;
    }
    write_metadata(device, &checkpoint.onodes).await?;
    device.flush().await?;
    let header = {
        let mut shard = shard.borrow_mut();
        let below = shard.applied_below;
        shard.log.free(below).map(|header| (shard.log_start + u64::from(header.slot), header.bytes))
    };
    if let Some((block, bytes)) = header {
        device.write_head(block, &bytes).await?;
        shard.borrow_mut().log.freed();
    }
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
    shard.resume();
    Ok(())
}

async fn write_metadata(device: &StoreDevice, writes: &[MetadataWrite]) -> Result<(), StoreError> {
    let write = |write: &MetadataWrite| {
        let MetadataWrite { block, bytes } = write.clone();
        async move { device.write(block * BLOCK_BYTES as u64, &bytes[..]).await }
    };
    join_all(METADATA_WRITES_MAX, writes.iter().map(write)).await
}
