//! What was read ahead: chunks of files, of bounded size, the least recently used out first.

use std::collections::BTreeMap;

use crate::index::FileNumber;

/// Bytes of a chunk.
pub(crate) const CHUNK_BYTES: u64 = 64 << 10;

struct CachedChunk {
    data: Vec<u8>,
    used: u64,
}

/// The chunks. A look-up, an insertion and an eviction each cost a search of a map.
pub(crate) struct ReadCache {
    bytes_max: usize,
    bytes: usize,
    chunks: BTreeMap<(FileNumber, u64), CachedChunk>,
    /// By last use.
    order: BTreeMap<u64, (FileNumber, u64)>,
    uses: u64,
}

impl ReadCache {
    pub(crate) fn new(bytes_max: usize) -> ReadCache {
        ReadCache { bytes_max, bytes: 0, chunks: BTreeMap::new(), order: BTreeMap::new(), uses: 0 }
    }

    /// The bytes that are cached.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies a range of a file to `out`, if all of it is cached.
    pub(crate) fn read(&mut self, file: FileNumber, offset: u64, out: &mut [u8]) -> bool {
        let end = offset + out.len() as u64;
        let mut at = offset;
        while at < end {
            let (index, within) = (at / CHUNK_BYTES, (at % CHUNK_BYTES) as usize);
            let Some(chunk) = self.chunks.get_mut(&(file, index)) else { return false };
            let length = (chunk.data.len().saturating_sub(within)).min((end - at) as usize);
            let until = CHUNK_BYTES - within as u64;
            if length == 0 || (length as u64) < until.min(end - at) {
                return false;
            }
            let start = (at - offset) as usize;
            out[start..start + length].copy_from_slice(&chunk.data[within..within + length]);
            self.uses += 1;
            self.order.remove(&chunk.used);
            chunk.used = self.uses;
            self.order.insert(self.uses, (file, index));
            at += length as u64;
        }
        true
    }

    /// Keeps what was read from `offset`, a multiple of a chunk, on.
    pub(crate) fn insert(&mut self, file: FileNumber, offset: u64, data: &[u8]) {
        for (index, data) in (offset / CHUNK_BYTES..).zip(data.chunks(CHUNK_BYTES as usize)) {
            if data.len() > self.bytes_max {
                return;
            }
            self.remove(file, index);
            self.uses += 1;
            self.order.insert(self.uses, (file, index));
            self.bytes += data.len();
            self.chunks.insert((file, index), CachedChunk { data: data.to_vec(), used: self.uses });
            while self.bytes > self.bytes_max
                && let Some((_, (file, index))) = self.order.first_key_value().map(|(k, v)| (*k, *v))
            {
                self.remove(file, index);
            }
        }
    }

    /// Forgets what a write or a truncation changes.
    pub(crate) fn invalidate(&mut self, file: FileNumber, range: std::ops::Range<u64>) {
        let first = range.start / CHUNK_BYTES;
        let end = range.end.div_ceil(CHUNK_BYTES).max(first);
        let found = self.chunks.range((file, first)..(file, end)).map(|((_, index), _)| *index);
        for index in found.collect::<Vec<_>>() {
            self.remove(file, index);
        }
    }

    fn remove(&mut self, file: FileNumber, index: u64) {
        if let Some(chunk) = self.chunks.remove(&(file, index)) {
            self.order.remove(&chunk.used);
            self.bytes -= chunk.data.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileNumber = FileNumber(1);

    #[test]
    fn the_cache_has_no_more_than_its_limit_and_keeps_what_was_used_last() {
        let mut cache = ReadCache::new(3 * CHUNK_BYTES as usize);
        cache.insert(FILE, 0, &vec![1; 3 * CHUNK_BYTES as usize]);
        let mut out = [0; 10];
        assert!(cache.read(FILE, 5, &mut out) && out == [1; 10]);
        cache.insert(FILE, 3 * CHUNK_BYTES, &vec![2; CHUNK_BYTES as usize]);
        assert_eq!(cache.bytes(), 3 * CHUNK_BYTES as usize);
        assert!(cache.read(FILE, 0, &mut out) && !cache.read(FILE, CHUNK_BYTES, &mut out));
        assert!(cache.read(FILE, 3 * CHUNK_BYTES - 5, &mut out) && out[..5] == [1; 5] && out[5..] == [2; 5]);
    }

    #[test]
    fn a_part_of_a_chunk_answers_no_more_than_it_has() {
        let mut cache = ReadCache::new(1 << 20);
        cache.insert(FILE, 0, &[1; 100]);
        let mut out = [0; 10];
        assert!(cache.read(FILE, 90, &mut out) && !cache.read(FILE, 91, &mut out));
        cache.insert(FILE, CHUNK_BYTES, &[2; 100]);
        assert!(!cache.read(FILE, 95, &mut [0; 70000]));
    }

    #[test]
    fn what_is_written_is_forgotten() {
        let mut cache = ReadCache::new(1 << 20);
        cache.insert(FILE, 0, &vec![1; 4 * CHUNK_BYTES as usize]);
        cache.invalidate(FILE, CHUNK_BYTES + 5..CHUNK_BYTES + 6);
        let mut out = [0; 10];
        assert!(cache.read(FILE, 0, &mut out) && !cache.read(FILE, CHUNK_BYTES, &mut out));
        assert!(cache.read(FILE, 2 * CHUNK_BYTES, &mut out));
        cache.invalidate(FILE, 0..u64::MAX);
        assert_eq!(cache.bytes(), 0);
    }
}
