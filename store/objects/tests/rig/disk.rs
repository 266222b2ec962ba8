//! A disk with a volatile cache, whose sectors are atomic.

use std::collections::BTreeMap;

use random::WyRand;
use wire_store::{BLOCK_BYTES, SECTOR_BYTES};

#[derive(Clone)]
pub(crate) struct Disk {
    /// What reads return.
    cache: Vec<u8>,
    /// What was flushed.
    medium: Vec<u8>,
    /// Versions of each sector since the last flush, oldest first.
    unflushed: BTreeMap<usize, Vec<Vec<u8>>>,
}

impl Disk {
    pub(crate) fn new(blocks: u64) -> Disk {
        let bytes = vec![0; blocks as usize * BLOCK_BYTES];
        Disk::of(bytes)
    }

    fn of(bytes: Vec<u8>) -> Disk {
        Disk { cache: bytes.clone(), medium: bytes, unflushed: BTreeMap::new() }
    }

    pub(crate) fn read(&self, block: u64) -> &[u8; BLOCK_BYTES] {
        self.cache[block as usize * BLOCK_BYTES..].first_chunk().unwrap()
    }

    pub(crate) fn write(&mut self, block: u64, bytes: &[u8]) {
        assert_eq!(bytes.len() % BLOCK_BYTES, 0);
        self.write_part(block, bytes);
    }

    pub(crate) fn write_part(&mut self, block: u64, bytes: &[u8]) {
        let at = block as usize * BLOCK_BYTES;
        self.cache[at..at + bytes.len()].copy_from_slice(bytes);
        for (sector, bytes) in (at / SECTOR_BYTES..).zip(bytes.chunks(SECTOR_BYTES)) {
            self.unflushed.entry(sector).or_default().push(bytes.to_vec());
        }
    }

    pub(crate) fn flush(&mut self) {
        for (sector, versions) in std::mem::take(&mut self.unflushed) {
            self.medium[sector * SECTOR_BYTES..][..SECTOR_BYTES].copy_from_slice(versions.last().unwrap());
        }
    }

    /// A disk as a power failure can leave it: each sector has any of its versions.
    pub(crate) fn image(&self, random: &mut WyRand) -> Disk {
        // Mostly lost, mostly written, or anything.
        let lost_per_mille = [50, 500, 950][random.index(3)];
        let mut image = self.medium.clone();
        for (sector, versions) in &self.unflushed {
            if !random.happens(lost_per_mille) {
                let version = &versions[random.index(versions.len())];
                image[sector * SECTOR_BYTES..][..SECTOR_BYTES].copy_from_slice(version);
            }
        }
        Disk::of(image)
    }
}
