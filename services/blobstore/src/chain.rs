//! What a blob reads of its snapshots, without a walk along their chain.

use std::sync::Arc;

use crate::blob::{Blob, BlobParent};
use crate::cluster_map::{CHUNK, ClusterChunk, UNALLOCATED};
use crate::store::BlobStore;

/// Chunks that have clusters of several snapshots and so memory of their own, 2 KiB each. More are not
/// merged, and their readers walk along the chain.
const MERGED_MAX: usize = 4096;

/// The snapshots below a blob, as one map.
///
/// A chunk of the map is merged when it is read first: at a cost that grows with the snapshots, once. From
/// then on a cluster costs two table accesses, however long the chain is. If one snapshot has all clusters of
/// a chunk, its own chunk is used; others take up to 8 MiB in all. The map is that of one state of the store:
/// [`is_current`](Self::is_current) compares it with another.
#[derive(Debug)]
pub struct SnapshotChain {
    /// The youngest first.
    snapshots: Vec<Arc<Blob>>,
    /// What no snapshot has is zero, and not on an external snapshot.
    ends_in_zeroes: bool,
    /// By index, as far as they were read.
    chunks: Vec<ChainChunk>,
    merged: usize,
}

#[derive(Clone, Debug)]
enum ChainChunk {
    Unread,
    /// No snapshot has a cluster of it.
    Empty,
    Known(Arc<ClusterChunk>),
    /// There are [`MERGED_MAX`] already.
    Unmerged,
}

/// What a [`SnapshotChain`] has in place of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainCluster {
    /// This cluster of the store.
    Cluster(u32),
    /// Zeroes.
    Zeroes,
    /// Bytes of an external snapshot, or a cluster that only [`BlobStore::read`] finds.
    Unknown,
}

/// The snapshots of a blob, the youngest first, and whether zeroes follow; `None` if the blob is no clone of
/// a snapshot, or one is missing or can be written, or the blob is its own ancestor.
fn ancestors<'a>(store: &'a BlobStore, blob: &Blob) -> Option<(Vec<&'a Arc<Blob>>, bool)> {
    let (mut found, mut parent) = (Vec::new(), blob.parent());
    while let BlobParent::Snapshot(id) = parent {
        if found.len() > store.blobs().len() {
            return None;
        }
        // In a damaged store a parent may be a volume, whose writes would not be seen here.
        let snapshot = store.blobs().shared(*id).filter(|snapshot| snapshot.is_read_only())?;
        found.push(snapshot);
        parent = snapshot.parent();
    }
    let ends_in_zeroes = *parent == BlobParent::None;
    (!found.is_empty()).then_some((found, ends_in_zeroes))
}

impl SnapshotChain {
    /// The snapshots below a blob of the store; `None` if it is no clone of a snapshot, or its chain has no
    /// end.
    pub fn of(store: &BlobStore, blob: &Blob) -> Option<SnapshotChain> {
        let (snapshots, ends_in_zeroes) = ancestors(store, blob)?;
        let snapshots = snapshots.into_iter().cloned().collect();
        Some(SnapshotChain { snapshots, ends_in_zeroes, chunks: Vec::new(), merged: 0 })
    }

    /// Whether the chain of the blob in this state of the store is the same. The cost is a look-up for each
    /// snapshot; [`BlobTable::chains`](crate::BlobTable::chains) says when it is needed.
    pub fn is_current(&self, store: &BlobStore, blob: &Blob) -> bool {
        let Some((snapshots, ends_in_zeroes)) = ancestors(store, blob) else { return false };
        ends_in_zeroes == self.ends_in_zeroes
            && snapshots.len() == self.snapshots.len()
            && snapshots.iter().zip(&self.snapshots).all(|(now, before)| Arc::ptr_eq(now, before))
    }

    /// What the chain has in place of the blob's cluster with this index.
    #[inline]
    pub fn cluster(&mut self, index: u32) -> ChainCluster {
        let (chunk, within) = (index as usize / CHUNK, index as usize % CHUNK);
        if let Some(ChainChunk::Known(entries)) = self.chunks.get(chunk)
            && entries[within] != UNALLOCATED
        {
            return ChainCluster::Cluster(entries[within]);
        }
        self.uncommon(index)
    }

    #[cold]
    fn uncommon(&mut self, index: u32) -> ChainCluster {
        let (chunk, within) = (index as usize / CHUNK, index as usize % CHUNK);
        if self.chunks.len() <= chunk {
            self.chunks.resize(chunk + 1, ChainChunk::Unread);
        }
        if let ChainChunk::Unread = self.chunks[chunk] {
            self.chunks[chunk] = self.merge(chunk as u32);
        }
        let hole = if self.ends_in_zeroes { ChainCluster::Zeroes } else { ChainCluster::Unknown };
        match &self.chunks[chunk] {
            ChainChunk::Known(entries) if entries[within] != UNALLOCATED => {
                ChainCluster::Cluster(entries[within])
            }
            ChainChunk::Known(_) | ChainChunk::Empty => hole,
            ChainChunk::Unread | ChainChunk::Unmerged => ChainCluster::Unknown,
        }
    }

    fn merge(&mut self, chunk: u32) -> ChainChunk {
        let first = chunk * CHUNK as u32;
        let mut whole = None::<Arc<ClusterChunk>>;
        // Beyond the end of a snapshot are zeroes, whatever older ones have there.
        let mut end = CHUNK;
        let mut is_merged = false;
        for snapshot in &self.snapshots {
            let map = snapshot.clusters();
            end = end.min(map.length().saturating_sub(first) as usize);
            let Some(entries) = map.chunk(chunk) else { continue };
            let Some(younger) = &mut whole else {
                if entries[end..].iter().all(|cluster| *cluster == UNALLOCATED) {
                    whole = Some(entries.clone());
                    continue;
                }
                let mut shorter = [UNALLOCATED; CHUNK];
                shorter[..end].copy_from_slice(&entries[..end]);
                (whole, is_merged) = (Some(Arc::new(shorter)), true);
                continue;
            };
            let pairs = || younger.iter().zip(&entries[..end]);
            if !pairs().any(|(young, old)| *young == UNALLOCATED && *old != UNALLOCATED) {
                continue;
            }
            if !is_merged && self.merged == MERGED_MAX {
                return ChainChunk::Unmerged;
            }
            is_merged = true;
            for (young, old) in Arc::make_mut(younger).iter_mut().zip(&entries[..end]) {
                *young = if *young == UNALLOCATED { *old } else { *young };
            }
        }
        self.merged += usize::from(is_merged);
        whole.map_or(ChainChunk::Empty, ChainChunk::Known)
    }
}

#[cfg(test)]
mod tests;
