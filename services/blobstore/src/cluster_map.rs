//! Which clusters of the device a blob's clusters are.

use std::ops::Range;
use std::sync::Arc;

use wire_blob::CLUSTERS_PER_EXTENT_PAGE;

pub(crate) const CHUNK: usize = CLUSTERS_PER_EXTENT_PAGE as usize;
/// An entry of a cluster that is not allocated. Cluster 0 is the super block's.
pub(crate) const UNALLOCATED: u32 = 0;
/// The clusters of an extent page.
pub(crate) type ClusterChunk = [u32; CHUNK];

/// The clusters of a blob, by their index in it.
///
/// Clusters are in chunks as large as an extent page. A chunk without an allocated cluster takes no memory,
/// however large the blob is, and a clone of the map shares chunks until one of them is changed: a snapshot
/// costs a reference for each chunk. A look-up in a blob whose chunks are all there takes no search.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlobClusterMap {
    length: u32,
    allocated: u32,
    // Ascending by the index of the chunk.
    chunks: Vec<(u32, Arc<ClusterChunk>)>,
}

/// Consecutive clusters of a blob that are consecutive on the device, or all unallocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedRun {
    /// The first cluster on the device; `None` if they are unallocated.
    pub cluster: Option<u32>,
    /// Number of clusters, at least 1. The next run may continue this one.
    pub length: u32,
}

impl BlobClusterMap {
    /// A map of this many clusters, none allocated.
    pub fn new(length: u32) -> BlobClusterMap {
        BlobClusterMap { length, ..BlobClusterMap::default() }
    }

    /// Number of clusters, allocated or not.
    pub fn length(&self) -> u32 {
        self.length
    }

    /// Number of allocated clusters.
    pub fn allocated(&self) -> u32 {
        self.allocated
    }

    #[inline]
    fn find(&self, chunk: u32) -> Result<usize, usize> {
        match self.chunks.get(chunk as usize) {
            Some((index, _)) if *index == chunk => Ok(chunk as usize),
            _ => self.chunks.binary_search_by_key(&chunk, |(index, _)| *index),
        }
    }

    /// A chunk, if it has memory.
    pub(crate) fn chunk(&self, chunk: u32) -> Option<&Arc<ClusterChunk>> {
        Some(&self.chunks[self.find(chunk).ok()?].1)
    }

    /// The cluster on the device; `None` if it is not allocated or beyond the blob's end.
    #[inline]
    pub fn get(&self, index: u32) -> Option<u32> {
        let at = self.find(index / CHUNK as u32).ok()?;
        Some(self.chunks[at].1[index as usize % CHUNK]).filter(|cluster| *cluster != UNALLOCATED)
    }

    /// Sets the cluster on the device, or none; what was there before.
    ///
    /// # Panics
    /// If the index is beyond the end, or the cluster is 0, which is the super block's.
    pub fn set(&mut self, index: u32, cluster: Option<u32>) -> Option<u32> {
        assert!(index < self.length, "cluster {index} of a blob of {}", self.length);
        assert_ne!(cluster, Some(UNALLOCATED), "cluster 0 is the super block's");
        let chunk = index / CHUNK as u32;
        let at = match self.find(chunk) {
            Ok(at) => at,
            Err(_) if cluster.is_none() => return None,
            Err(at) => {
                self.chunks.insert(at, (chunk, Arc::new([UNALLOCATED; CHUNK])));
                at
            }
        };
        let entry = &mut Arc::make_mut(&mut self.chunks[at].1)[index as usize % CHUNK];
        let before = std::mem::replace(entry, cluster.unwrap_or(UNALLOCATED));
        let before = (before != UNALLOCATED).then_some(before);
        self.allocated += u32::from(cluster.is_some());
        self.allocated -= u32::from(before.is_some());
        before
    }

    /// Sets the clusters of a chunk that has none, as an extent page has them: 0 for those that are not
    /// allocated.
    ///
    /// # Panics
    /// If they are beyond the end.
    pub(crate) fn set_chunk(&mut self, chunk: u32, entries: &[u32]) {
        let end = u64::from(chunk) * CHUNK as u64 + entries.len() as u64;
        assert!(end <= u64::from(self.length), "clusters up to {end} of a blob of {}", self.length);
        let allocated = entries.iter().filter(|cluster| **cluster != UNALLOCATED).count();
        if let Err(at) = self.find(chunk)
            && allocated > 0
        {
            let mut all = [UNALLOCATED; CHUNK];
            all[..entries.len()].copy_from_slice(entries);
            self.chunks.insert(at, (chunk, Arc::new(all)));
            self.allocated += allocated as u32;
        }
    }

    /// Appends clusters that are not allocated; `None` if there would be more than a blob can have.
    pub fn extend(&mut self, clusters: u32) -> Option<()> {
        self.length = self.length.checked_add(clusters)?;
        Some(())
    }

    /// Removes the clusters from `length` on, if there are more.
    pub fn truncate(&mut self, length: u32) {
        if length >= self.length {
            return;
        }
        let keep = self.chunks.partition_point(|(chunk, _)| chunk * (CHUNK as u32) < length);
        self.chunks.truncate(keep);
        if let Some((chunk, entries)) = self.chunks.last_mut() {
            let end = (length - *chunk * CHUNK as u32) as usize;
            if end < CHUNK && entries[end..].iter().any(|cluster| *cluster != UNALLOCATED) {
                Arc::make_mut(entries)[end..].fill(UNALLOCATED);
            }
        }
        self.length = length;
        self.allocated = self.iter().count() as u32;
    }

    /// The entries of the chunk with this index as an extent page has them: 0 for clusters that are not
    /// allocated, up to the end of the blob. `None` if no cluster is allocated.
    pub(crate) fn extents(&self, chunk: u32) -> Option<&[u32]> {
        let entries = &self.chunks[self.find(chunk).ok()?].1[..];
        let length = (self.length - chunk * CHUNK as u32).min(CHUNK as u32);
        let entries = &entries[..length as usize];
        entries.iter().any(|cluster| *cluster != UNALLOCATED).then_some(entries)
    }

    /// The indexes of the chunks that have, or had, an allocated cluster.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = u32> + '_ {
        self.chunks.iter().map(|(chunk, _)| *chunk)
    }

    /// Whether a chunk is the same as that of another map, without looking at it.
    pub(crate) fn shares(&self, other: &BlobClusterMap, chunk: u32) -> bool {
        let end = |map: &BlobClusterMap| map.length.min(chunk.saturating_add(1).saturating_mul(CHUNK as u32));
        match (self.find(chunk), other.find(chunk)) {
            (Ok(own), Ok(others)) => {
                end(self) == end(other) && Arc::ptr_eq(&self.chunks[own].1, &other.chunks[others].1)
            }
            _ => false,
        }
    }

    /// The run that begins at this index, at most to the end of a chunk if it is allocated.
    ///
    /// # Panics
    /// If the index is beyond the end.
    pub fn run(&self, index: u32) -> MappedRun {
        self.run_within(index, u32::MAX)
    }

    /// As [`run`](Self::run), at most `max` clusters, at least 1, of which the cost depends.
    ///
    /// # Panics
    /// If the index is beyond the end.
    #[inline]
    pub fn run_within(&self, index: u32, max: u32) -> MappedRun {
        assert!(index < self.length, "cluster {index} of a blob of {}", self.length);
        let (chunk, within) = (index / CHUNK as u32, index as usize % CHUNK);
        let end_of = |next: Option<&(u32, _)>| match next {
            Some((chunk, _)) => self.length.min(chunk * CHUNK as u32),
            None => self.length,
        };
        let at = match self.find(chunk) {
            Ok(at) => at,
            Err(next) => {
                let length = end_of(self.chunks.get(next)) - index;
                return MappedRun { cluster: None, length: length.min(max.max(1)) };
            }
        };
        let entries = &self.chunks[at].1[within..];
        let entries = &entries[..entries.len().min(max.max(1) as usize)];
        let left = (self.length - index) as usize;
        if entries[0] == UNALLOCATED {
            let length = entries.iter().take_while(|cluster| **cluster == UNALLOCATED).count();
            return MappedRun { cluster: None, length: length.min(left) as u32 };
        }
        let follows = entries.windows(2).take_while(|pair| pair[0].checked_add(1) == Some(pair[1])).count();
        MappedRun { cluster: Some(entries[0]), length: (1 + follows).min(left) as u32 }
    }

    /// Allocated clusters as ranges of the device, ascending by index, each within a chunk.
    pub(crate) fn allocated_runs(&self) -> impl Iterator<Item = Range<u32>> + '_ {
        let mut index = 0;
        std::iter::from_fn(move || {
            while index < self.length {
                let run = self.run(index);
                index += run.length;
                if let Some(cluster) = run.cluster {
                    return Some(cluster..cluster + run.length);
                }
            }
            None
        })
    }

    /// Allocated clusters as their index in the blob and their place on the device, ascending by index.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.chunks.iter().flat_map(|(chunk, entries)| {
            let first = chunk * CHUNK as u32;
            let set = entries.iter().enumerate().filter(|(_, cluster)| **cluster != UNALLOCATED);
            set.map(move |(within, cluster)| (first + within as u32, *cluster))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_huge_thin_map_takes_memory_for_allocated_chunks_only() {
        let mut map = BlobClusterMap::new(u32::MAX);
        map.set(u32::MAX - 1, Some(9));
        assert_eq!(map.chunks.len(), 1);
        assert_eq!(map.run(0), MappedRun { cluster: None, length: u32::MAX / 512 * 512 });
        assert_eq!(map.get(u32::MAX - 1), Some(9));
        assert_eq!(map.extend(1), None);
    }

    #[test]
    fn a_changed_clone_leaves_the_original() {
        let mut original = BlobClusterMap::new(1024);
        original.set(3, Some(7));
        original.set(600, Some(8));
        let mut changed = original.clone();
        changed.set(3, Some(9));
        assert_eq!((original.get(3), changed.get(3)), (Some(7), Some(9)));
        assert!(Arc::ptr_eq(&original.chunks[1].1, &changed.chunks[1].1));
    }

    #[test]
    fn a_chunk_is_set_as_its_clusters_are() {
        let entries: Vec<u32> = (0..300).map(|at| if at % 3 == 0 { 0 } else { at + 9 }).collect();
        let (mut whole, mut each) = (BlobClusterMap::new(2000), BlobClusterMap::new(2000));
        whole.set_chunk(2, &entries);
        // It has clusters already.
        whole.set_chunk(2, &[1; 300]);
        whole.set_chunk(1, &[0; 300]);
        for (at, cluster) in entries.iter().enumerate().filter(|(_, cluster)| **cluster != 0) {
            each.set(2 * CHUNK as u32 + at as u32, Some(*cluster));
        }
        assert_eq!(whole, each);
        assert_eq!(whole.allocated(), 200);
    }

    proptest! {
        #[test]
        fn maps_agree_with_a_table(
            length in 1..2000u32, changes in proptest::collection::vec((any::<u32>(), proptest::option::of(1..40u32)), 0..200),
        ) {
            let mut map = BlobClusterMap::new(length);
            let mut table = BTreeMap::new();
            for (index, cluster) in changes {
                let index = index % length;
                let before = match cluster {
                    Some(cluster) => table.insert(index, cluster),
                    None => table.remove(&index),
                };
                prop_assert_eq!(map.set(index, cluster), before);
            }
            prop_assert_eq!(map.allocated() as usize, table.len());
            let (mut shorter, end) = (map.clone(), length / 2);
            shorter.truncate(end);
            let mut expected = BlobClusterMap::new(end);
            table.range(..end).for_each(|(index, cluster)| assert_eq!(expected.set(*index, Some(*cluster)), None));
            prop_assert_eq!((shorter.length(), shorter.allocated()), (end, expected.allocated()));
            prop_assert!(shorter.iter().eq(expected.iter()));
            prop_assert_eq!(map.iter().collect::<BTreeMap<_, _>>(), table.clone());
            prop_assert!(map.allocated_runs().flatten().eq(table.values().copied()));
            let mut index = 0;
            while index < length {
                let run = map.run(index);
                for step in 0..run.length {
                    let expected = run.cluster.map(|first| first + step);
                    prop_assert_eq!(table.get(&(index + step)).copied(), expected);
                    prop_assert_eq!(map.get(index + step), expected);
                }
                index += run.length;
            }
            prop_assert_eq!(index, length);
            for index in 0..length {
                let run = map.run(index);
                for max in [1, 2, 700] {
                    let shorter = map.run_within(index, max);
                    prop_assert_eq!((shorter.cluster, shorter.length), (run.cluster, run.length.min(max)));
                }
            }
        }
    }
}
