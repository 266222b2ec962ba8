//! A disk in memory that a power failure can hit.

use std::collections::BTreeMap;

use blobstore::{BlobStore, BlobStoreDevice, LoadError, LoadOptions, load_with};
use random::WyRand;

use crate::request::BlobFsAction;

const SECTOR: usize = 512;

/// A write since the last flush.
struct Volatile {
    number: u64,
    offset: usize,
    data: Vec<u8>,
    /// It was written past the cache. What is older in the cache does not replace it.
    is_durable: bool,
}

pub(super) struct Disk {
    pub(super) device: BlobStoreDevice,
    durable: Vec<u8>,
    /// In the order in which they completed.
    cached: Vec<Volatile>,
    in_flight: BTreeMap<u64, (BlobFsAction, u64)>,
    next: u64,
}

impl Disk {
    pub(super) fn new(device: BlobStoreDevice) -> Disk {
        // What other programs left there.
        let durable = vec![0xdd; device.bytes as usize];
        Disk { device, durable, cached: Vec::new(), in_flight: BTreeMap::new(), next: 0 }
    }

    pub(super) fn begin(&mut self, id: u64, action: BlobFsAction) {
        self.in_flight.insert(id, (action, self.next));
    }

    pub(super) fn in_flight(&self) -> Vec<u64> {
        self.in_flight.keys().copied().collect()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) {
        let start = offset as usize;
        out.copy_from_slice(&self.durable[start..start + out.len()]);
        for write in &self.cached {
            let (from, to) =
                (write.offset.max(start), (write.offset + write.data.len()).min(start + out.len()));
            if from < to {
                out[from - start..to - start]
                    .copy_from_slice(&write.data[from - write.offset..to - write.offset]);
            }
        }
    }

    fn writes(action: &BlobFsAction) -> Option<(usize, Vec<u8>)> {
        match action {
            BlobFsAction::Write { offset, data, .. } => Some((*offset as usize, data.clone())),
            BlobFsAction::WriteZeroes { offset, bytes } => Some((*offset as usize, vec![0; *bytes as usize])),
            // What is read afterwards is not promised.
            BlobFsAction::Deallocate { offset, bytes } => {
                Some((*offset as usize, vec![0xdd; *bytes as usize]))
            }
            BlobFsAction::Read { .. } | BlobFsAction::Flush => None,
        }
    }

    /// Completes an I/O, and returns what was read.
    pub(super) fn complete(&mut self, id: u64) -> Vec<u8> {
        let (action, began) = self.in_flight.remove(&id).unwrap();
        if let BlobFsAction::Read { offset, bytes } = action {
            let mut data = vec![0; bytes];
            self.read_at(offset, &mut data);
            return data;
        }
        match Disk::writes(&action) {
            Some((offset, data)) if self.device.has_volatile_cache => {
                let is_durable = matches!(action, BlobFsAction::Write { durable: true, .. });
                self.cached.push(Volatile { number: self.next, offset, data, is_durable });
                self.next += 1;
            }
            Some((offset, data)) => self.durable[offset..offset + data.len()].copy_from_slice(&data),
            None => {
                for write in self.cached.extract_if(.., |write| write.number < began) {
                    self.durable[write.offset..write.offset + write.data.len()].copy_from_slice(&write.data);
                }
            }
        }
        Vec::new()
    }

    /// What is left after a power failure: of what was not durable, some is there, some is not, and some is
    /// in parts of what the device writes as a whole.
    pub(super) fn crash(&self, random: &mut WyRand) -> Disk {
        let in_flight = self.in_flight.values().filter_map(|(action, _)| Disk::writes(action));
        let in_flight = in_flight.map(|(offset, data)| (offset, data, false));
        let cached = self.cached.iter().map(|write| (write.offset, write.data.clone(), write.is_durable));
        let mut left = Disk::new(self.device);
        left.durable.clone_from(&self.durable);
        let unit = (self.device.atomic_write_bytes as usize).max(SECTOR);
        let (whole, chance) = (random.happens(400), [0, 150, 500, 850, 1000][random.index(5)]);
        for (offset, data, is_durable) in cached.chain(in_flight) {
            if is_durable {
                left.durable[offset..offset + data.len()].copy_from_slice(&data);
                continue;
            }
            let survives = random.happens(chance);
            let mut at = 0;
            while at < data.len() {
                let end = ((offset + at + 1).next_multiple_of(unit) - offset).min(data.len());
                if if whole { survives } else { random.happens(chance) } {
                    left.durable[offset + at..offset + end].copy_from_slice(&data[at..end]);
                }
                at = end;
            }
        }
        left
    }

    pub(super) fn load(&self) -> Result<BlobStore, LoadError> {
        load_with(self.device.bytes, LoadOptions::default(), |offset, out| {
            self.read_at(offset, out);
            Ok(())
        })
    }
}
