//! A disk in memory that a power failure can hit.

use std::collections::BTreeMap;

use crate::read::BlobSegment;
use crate::{BlobStore, BlobStoreDevice, BlobStoreLoader, LoadError, LoadOptions, StoreAction};

pub(super) const SECTOR: usize = 512;
/// Bytes of the external snapshot.
const EXTERNAL_BYTES: u64 = 20 * super::CLUSTER as u64;

/// Random numbers from a seed.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    pub(super) fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }

    pub(super) fn pick<T: Clone>(&mut self, from: &[T]) -> Option<T> {
        from.get(self.below(from.len())).cloned()
    }
}

/// A write of which it is not certain that it would survive.
struct Volatile {
    number: u64,
    offset: usize,
    data: Vec<u8>,
}

pub(super) struct Disk {
    pub(super) device: BlobStoreDevice,
    durable: Vec<u8>,
    /// In the order in which they completed.
    cached: Vec<Volatile>,
    in_flight: BTreeMap<u64, (StoreAction, u64)>,
    next: u64,
}

impl Disk {
    pub(super) fn new(device: BlobStoreDevice) -> Disk {
        // What other programs left there.
        let durable = vec![0xdd; device.bytes as usize];
        Disk { device, durable, cached: Vec::new(), in_flight: BTreeMap::new(), next: 0 }
    }

    /// A disk with this content.
    pub(super) fn with(device: BlobStoreDevice, durable: Vec<u8>) -> Disk {
        Disk { durable, ..Disk::new(device) }
    }

    pub(super) fn grow(&mut self, bytes: u64) {
        self.device.bytes = bytes;
        self.durable.resize(bytes as usize, 0xdd);
    }

    pub(super) fn begin(&mut self, id: u64, action: StoreAction) {
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

    /// Reads pieces of a blob.
    pub(super) fn read(&self, segments: &[BlobSegment]) -> Vec<u8> {
        let mut out = Vec::new();
        for segment in segments {
            let at = out.len();
            out.resize(at + segment.length() as usize, 0);
            match segment {
                BlobSegment::Device { offset, .. } => self.read_at(*offset, &mut out[at..]),
                BlobSegment::Zeroes { .. } => {}
                BlobSegment::External { offset, .. } => {
                    for (step, sector) in out[at..].chunks_mut(SECTOR).enumerate() {
                        let tag = external_tag(offset + (step * SECTOR) as u64);
                        fill(sector, tag);
                    }
                }
            }
        }
        out
    }

    fn writes(&self, action: &StoreAction) -> Option<(usize, Vec<u8>)> {
        Some(match action {
            StoreAction::Write { offset, data } => (*offset as usize, data.clone()),
            StoreAction::WriteZeroes { offset, bytes } => (*offset as usize, vec![0; *bytes as usize]),
            // What is read afterwards is not promised.
            StoreAction::Deallocate { offset, bytes } => (*offset as usize, vec![0xdd; *bytes as usize]),
            StoreAction::Copy { from, offset } => (*offset as usize, self.read(from)),
            StoreAction::Flush => return None,
        })
    }

    /// Completes an I/O. If it fails, it may have been done in part.
    pub(super) fn complete(&mut self, id: u64, is_ok: bool) {
        let (action, began) = self.in_flight.remove(&id).unwrap();
        match self.writes(&action) {
            Some((offset, data)) if self.device.has_volatile_cache || !is_ok => {
                self.cached.push(Volatile { number: self.next, offset, data });
                self.next += 1;
            }
            Some((offset, data)) => {
                for write in &mut self.cached {
                    // What failed before is overwritten.
                    let (from, to) = (
                        write.offset.max(offset),
                        (write.offset + write.data.len()).min(offset + data.len()),
                    );
                    if from < to {
                        write.data[from - write.offset..to - write.offset]
                            .copy_from_slice(&data[from - offset..to - offset]);
                    }
                }
                self.durable[offset..offset + data.len()].copy_from_slice(&data);
            }
            None if is_ok => {
                for write in self.cached.extract_if(.., |write| write.number < began) {
                    self.durable[write.offset..write.offset + write.data.len()].copy_from_slice(&write.data);
                }
            }
            None => {}
        }
    }

    /// What is left after a power failure: of what was not durable, some is there, some is not, and some is
    /// in parts of what the device writes as a whole.
    pub(super) fn crash(&self, dice: &mut Dice) -> Disk {
        let in_flight = self.in_flight.values().filter_map(|(action, _)| self.writes(action));
        let cached = self.cached.iter().map(|write| (write.offset, write.data.clone()));
        let writes: Vec<(usize, Vec<u8>)> = cached.chain(in_flight).collect();
        let mut left = Disk::new(self.device);
        left.durable.clone_from(&self.durable);
        let unit = (self.device.atomic_write_bytes as usize).max(SECTOR);
        let (whole, chance) = (dice.percent(40), [0, 15, 50, 85, 100][dice.below(5)]);
        for (offset, data) in writes {
            let survives = dice.percent(chance);
            let mut at = 0;
            while at < data.len() {
                let end = ((offset + at + 1).next_multiple_of(unit) - offset).min(data.len());
                if if whole { survives } else { dice.percent(chance) } {
                    left.durable[offset + at..offset + end].copy_from_slice(&data[at..end]);
                }
                at = end;
            }
        }
        left
    }

    pub(super) fn load(&self, scan: bool) -> Result<BlobStore, LoadError> {
        self.load_with(LoadOptions { scan, ..LoadOptions::default() })
    }

    pub(super) fn load_with(&self, options: LoadOptions) -> Result<BlobStore, LoadError> {
        let mut loader = BlobStoreLoader::new(self.device.bytes, options);
        loop {
            while let Some(read) = loader.next_read() {
                let mut content = vec![0; read.length];
                self.read_at(read.offset, &mut content);
                loader.complete(read.id, Some(&content));
            }
            if let Some(outcome) = loader.outcome() {
                return outcome;
            }
        }
    }

    /// The bytes that a reader of another program sees.
    pub(super) fn image(&self) -> Vec<u8> {
        let mut image = vec![0; self.durable.len()];
        self.read_at(0, &mut image);
        image
    }
}

/// What the external snapshot has at an offset.
pub(super) fn external_tag(offset: u64) -> u64 {
    match offset < EXTERNAL_BYTES {
        true => 0xe000_0000_0000_0000 | (offset / super::UNIT as u64 + 1),
        false => 0,
    }
}

/// Fills a sector with a tag.
pub(super) fn fill(sector: &mut [u8], tag: u64) {
    sector.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = tag.to_le_bytes());
}

/// The tag of a sector, if it is all of one.
pub(super) fn tag_of(sector: &[u8]) -> Option<u64> {
    let words = sector.as_chunks::<8>().0;
    words.iter().all(|word| *word == words[0]).then(|| u64::from_le_bytes(words[0]))
}
