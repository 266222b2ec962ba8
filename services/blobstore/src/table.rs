//! The blobs of a state.

use std::collections::BTreeMap;
use std::sync::Arc;

use wire_blob::BlobId;

use crate::blob::Blob;

/// Blobs whose first pages are next to each other are copied together when one of them changes.
const CHUNK_PAGES: u32 = 128;

#[derive(Clone, Debug, PartialEq, Eq)]
struct BlobEntry {
    blob: Arc<Blob>,
    /// Ascending.
    clones: Vec<BlobId>,
}

/// Blobs by id, with the clones of each.
///
/// Copies share what is not changed: a copy costs a reference for each 128 metadata pages that have a blob's
/// first, and a change copies the references of one such chunk.
#[derive(Clone, Debug, Default)]
pub struct BlobTable {
    // Ascending by the index of the chunk; none is empty.
    chunks: Vec<(u32, Arc<BTreeMap<BlobId, BlobEntry>>)>,
    length: usize,
    chains: u64,
}

impl PartialEq for BlobTable {
    /// Whether the blobs are the same, by whatever changes they became so.
    fn eq(&self, other: &BlobTable) -> bool {
        self.length == other.length && self.chunks == other.chunks
    }
}

impl Eq for BlobTable {}

fn chunk_of(id: BlobId) -> u32 {
    id.page().map_or(u32::MAX, |page| page / CHUNK_PAGES)
}

impl BlobTable {
    /// A table of blobs that were loaded.
    pub(crate) fn new(blobs: BTreeMap<BlobId, Blob>, mut clones: BTreeMap<BlobId, Vec<BlobId>>) -> BlobTable {
        let mut table = BlobTable { chunks: Vec::new(), length: blobs.len(), chains: 0 };
        let mut chunk = BTreeMap::new();
        let mut blobs = blobs.into_iter().peekable();
        while let Some((id, blob)) = blobs.next() {
            let clones = clones.remove(&id).unwrap_or_default();
            chunk.insert(id, BlobEntry { blob: Arc::new(blob), clones });
            if blobs.peek().is_none_or(|(next, _)| chunk_of(*next) != chunk_of(id)) {
                table.chunks.push((chunk_of(id), Arc::new(std::mem::take(&mut chunk))));
            }
        }
        table
    }

    fn find(&self, chunk: u32) -> Result<usize, usize> {
        self.chunks.binary_search_by_key(&chunk, |(index, _)| *index)
    }

    fn entry(&self, id: BlobId) -> Option<&BlobEntry> {
        self.chunks[self.find(chunk_of(id)).ok()?].1.get(&id)
    }

    /// A blob.
    pub fn get(&self, id: &BlobId) -> Option<&Blob> {
        self.entry(*id).map(|entry| &*entry.blob)
    }

    /// A blob, to be kept beyond this state of the store.
    pub fn shared(&self, id: BlobId) -> Option<&Arc<Blob>> {
        self.entry(id).map(|entry| &entry.blob)
    }

    /// Counts the changes of what blobs read of others: of parents, and of blobs that are read-only. Two
    /// states of one store with the same number have the same chains of snapshots.
    pub fn chains(&self) -> u64 {
        self.chains
    }

    /// Whether there is such a blob.
    pub fn contains_key(&self, id: &BlobId) -> bool {
        self.entry(*id).is_some()
    }

    /// Number of blobs.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The blobs, ascending by id.
    pub fn values(&self) -> impl Iterator<Item = &Blob> {
        self.chunks.iter().flat_map(|(_, chunk)| chunk.values().map(|entry| &*entry.blob))
    }

    /// The clones of a blob, ascending.
    pub fn clones(&self, id: BlobId) -> &[BlobId] {
        self.entry(id).map_or(&[], |entry| &entry.clones)
    }

    /// Adds a blob, or replaces one. Its clones stay.
    pub(crate) fn set(&mut self, blob: Arc<Blob>) {
        let id = blob.id();
        let at = match self.find(chunk_of(id)) {
            Ok(at) => at,
            Err(at) => {
                self.chunks.insert(at, (chunk_of(id), Arc::default()));
                at
            }
        };
        let chunk = Arc::make_mut(&mut self.chunks[at].1);
        match chunk.get_mut(&id) {
            Some(entry) => {
                let is_writable = !entry.blob.is_read_only() && !blob.is_read_only();
                self.chains += u64::from(!is_writable || entry.blob.parent() != blob.parent());
                entry.blob = blob;
            }
            None => {
                self.chains += 1;
                chunk.insert(id, BlobEntry { blob, clones: Vec::new() });
                self.length += 1;
            }
        }
    }

    pub(crate) fn remove(&mut self, id: BlobId) {
        let Ok(at) = self.find(chunk_of(id)) else { return };
        let chunk = Arc::make_mut(&mut self.chunks[at].1);
        self.length -= usize::from(chunk.remove(&id).is_some());
        self.chains += 1;
        if chunk.is_empty() {
            self.chunks.remove(at);
        }
    }

    /// Adds a clone to a blob's, or removes it.
    pub(crate) fn set_clone(&mut self, of: BlobId, clone: BlobId, is_clone: bool) {
        let Ok(at) = self.find(chunk_of(of)) else { return };
        let Some(entry) = Arc::make_mut(&mut self.chunks[at].1).get_mut(&of) else { return };
        match (entry.clones.binary_search(&clone), is_clone) {
            (Err(at), true) => entry.clones.insert(at, clone),
            (Ok(at), false) => drop(entry.clones.remove(at)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_copy_leaves_the_original() {
        let ids = [0, 1, 127, 128, 4000].map(BlobId::from_page);
        let blobs = ids.map(|id| (id, Blob::new(id))).into();
        let clones = BTreeMap::from([(ids[0], vec![ids[3]])]);
        let original = BlobTable::new(blobs, clones);
        assert_eq!((original.len(), original.chunks.len()), (5, 3));
        let mut changed = original.clone();
        changed.remove(ids[4]);
        changed.set_clone(ids[0], ids[1], true);
        changed.set_clone(ids[0], ids[3], false);
        let new = BlobId::from_page(9000);
        changed.set(Arc::new(Blob::new(new)));
        let found: Vec<BlobId> = changed.values().map(Blob::id).collect();
        assert_eq!(found, [ids[0], ids[1], ids[2], ids[3], new]);
        assert_eq!((changed.len(), changed.clones(ids[0])), (5, &ids[1..2]));
        assert_eq!((original.len(), original.clones(ids[0])), (5, &ids[3..4]));
        assert!(original.contains_key(&ids[4]) && !changed.contains_key(&ids[4]));
        assert!(Arc::ptr_eq(&original.chunks[1].1, &changed.chunks[1].1));
    }
}
