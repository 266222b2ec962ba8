//! A simulated disk with a volatile write cache, to prove durability against.
//!
//! [`CrashDisk`] logs what reaches it. A power cut may happen after any entry: [`CrashDisk::image`]
//! makes one of the states that the medium may then have. Each sector of 512 bytes holds either what
//! is certainly durable or anything newer that was written to it, chosen sector by sector: writes
//! that were not flushed are thereby dropped, torn and reordered. Durable is what was written with
//! FUA, once acknowledged, and what was acknowledged before a flush was submitted, once that flush
//! was acknowledged.
//!
//! ```
//! use bdev::{Registry, testing::CrashDisk};
//! let registry = Registry::new();
//! let disk = CrashDisk::create(&registry, "Crash0", 64, 4096, 1)?;
//! assert_eq!(disk.image(disk.log_len(), 7), vec![0; 64 * 4096]);
//! # Ok::<(), bdev::BdevError>(())
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ring::{Flags, Op, Status};

use crate::modules::Dice;
use crate::{Bdev, BdevError, BoxedChannel, Completion, Geometry, Registry, Request, Value};

/// What a power cut leaves whole.
pub const SECTOR_BYTES: usize = 512;

/// The disk as a test sees it. Cheap to clone.
#[derive(Clone)]
pub struct CrashDisk {
    state: Arc<Mutex<State>>,
    geometry: Geometry,
    seed: u64,
    /// A disk that lies: to show that a test would notice.
    ignores_fua: bool,
}

#[derive(Default)]
struct State {
    /// What is read back: everything that was written.
    cache: Vec<u8>,
    log: Vec<Entry>,
}

/// One thing that reached the disk.
struct Entry {
    what: What,
    /// Length of the log when it was acknowledged, if it was.
    acknowledged_at: Option<usize>,
}

enum What {
    Write { offset: usize, data: Vec<u8>, durable: bool },
    Flush,
}

struct Channel {
    disk: CrashDisk,
    dice: Dice,
    executed: Vec<(Request, Option<usize>)>,
}

impl CrashDisk {
    /// A zeroed disk, registered. `seed` decides in which order it completes I/Os.
    pub fn create(
        registry: &Registry,
        name: &str,
        num_blocks: u64,
        block_size: u32,
        seed: u64,
    ) -> Result<CrashDisk, BdevError> {
        CrashDisk::create_as(registry, name, num_blocks, block_size, seed, false)
    }

    /// A disk that acknowledges FUA writes from its cache, as some do. What trusts it loses data.
    pub fn create_lying(
        registry: &Registry,
        name: &str,
        num_blocks: u64,
        block_size: u32,
        seed: u64,
    ) -> Result<CrashDisk, BdevError> {
        CrashDisk::create_as(registry, name, num_blocks, block_size, seed, true)
    }

    fn create_as(
        registry: &Registry,
        name: &str,
        num_blocks: u64,
        block_size: u32,
        seed: u64,
        ignores_fua: bool,
    ) -> Result<CrashDisk, BdevError> {
        let mut geometry = crate::modules::geometry(num_blocks, block_size)?;
        geometry.write_cache = true;
        let state = State { cache: vec![0; geometry.bytes() as usize], log: Vec::new() };
        let disk = CrashDisk { state: Arc::new(Mutex::new(state)), geometry, seed, ignores_fua };
        registry.register(name, None, &[], Arc::new(disk.clone()))?;
        Ok(disk)
    }

    /// Entries so far. A power cut may come after any number of them.
    pub fn log_len(&self) -> usize {
        self.lock().log.len()
    }

    /// Numbers of entries after which a flush was just acknowledged.
    pub fn flush_points(&self) -> Vec<usize> {
        let state = self.lock();
        let flush = |entry: &Entry| matches!(entry.what, What::Flush).then_some(entry.acknowledged_at?);
        state.log.iter().filter_map(flush).collect()
    }

    /// The medium after a power cut behind the first `at` entries: one of many, chosen by `seed`.
    pub fn image(&self, at: usize, seed: u64) -> Vec<u8> {
        let mut dice = Dice::new(seed);
        self.materialise(at, |versions| dice.below(versions as u64) as usize)
    }

    /// The medium with nothing on it but what is certainly durable.
    pub fn image_oldest(&self, at: usize) -> Vec<u8> {
        self.materialise(at, |_| 0)
    }

    fn materialise(&self, at: usize, mut choose: impl FnMut(usize) -> usize) -> Vec<u8> {
        let state = self.lock();
        let log = &state.log[..at.min(state.log.len())];
        let is_acknowledged = |entry: &Entry, by: usize| entry.acknowledged_at.is_some_and(|then| then <= by);
        // Everything acknowledged by the time that the last acknowledged flush was submitted.
        let flushed = |index: usize, entry: &Entry| {
            log.iter().enumerate().skip(index).any(|(submitted_at, flush)| {
                matches!(flush.what, What::Flush)
                    && is_acknowledged(flush, at)
                    && is_acknowledged(entry, submitted_at)
            })
        };
        // Per sector: what it may hold, oldest first.
        let mut sectors: BTreeMap<usize, Vec<&[u8]>> = BTreeMap::new();
        let blank: &[u8] = &[0; SECTOR_BYTES];
        for (index, entry) in log.iter().enumerate() {
            let What::Write { offset, data, durable } = &entry.what else { continue };
            let durable = (*durable && is_acknowledged(entry, at)) || flushed(index, entry);
            for (position, sector) in data.chunks(SECTOR_BYTES).enumerate() {
                let versions = sectors.entry(offset / SECTOR_BYTES + position).or_insert_with(|| vec![blank]);
                if durable {
                    versions.clear();
                }
                versions.push(sector);
            }
        }
        let mut image = vec![0; self.geometry.bytes() as usize];
        for (sector, versions) in sectors {
            let chosen = versions[choose(versions.len())];
            image[sector * SECTOR_BYTES..][..SECTOR_BYTES].copy_from_slice(chosen);
        }
        image
    }

    /// Does a request at once and logs it; gives the log's index of it, to acknowledge.
    fn execute(&self, request: &mut Request) -> Option<usize> {
        let (offset, length) = crate::modules::bytes_of(request, self.geometry.block_size);
        let (offset, length) = (offset as usize, length as usize);
        let mut state = self.lock();
        let data = match (request.op, &mut request.buffer) {
            (Op::Read, Some(buffer)) => {
                buffer.as_mut_slice().copy_from_slice(&state.cache[offset..offset + length]);
                return None;
            }
            (Op::Write, Some(buffer)) => buffer.as_slice().to_vec(),
            (Op::Unmap | Op::WriteZeroes, _) => vec![0; length],
            (Op::Flush, _) => {
                state.log.push(Entry { what: What::Flush, acknowledged_at: None });
                return Some(state.log.len() - 1);
            }
            (Op::Read | Op::Write | Op::Reset | Op::WriteUncorrectable | Op::Compare, _) => return None,
        };
        state.cache[offset..offset + length].copy_from_slice(&data);
        let durable = request.flags.contains(Flags::FUA) && !self.ignores_fua;
        let what = What::Write { offset, data, durable };
        state.log.push(Entry { what, acknowledged_at: None });
        Some(state.log.len() - 1)
    }

    fn acknowledge(&self, index: usize) {
        let mut state = self.lock();
        let now = state.log.len();
        state.log[index].acknowledged_at = Some(now);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bdev for CrashDisk {
    fn product_name(&self) -> &'static str {
        "Crash disk"
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn supports(&self, op: Op) -> bool {
        !matches!(op, Op::Reset | Op::WriteUncorrectable | Op::Compare)
    }

    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let dice = Dice::new(self.seed ^ core.index() as u64);
        Ok(Box::new(Channel { disk: self.clone(), dice, executed: Vec::new() }))
    }

    fn driver_specific(&self) -> Vec<(&'static str, Value)> {
        vec![("durability", "simulated".into())]
    }

    fn depth(&self) -> u32 {
        32
    }
}

impl ring::Channel for Channel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for mut request in batch.drain(..) {
            let logged = self.disk.execute(&mut request);
            self.executed.push((request, logged));
        }
    }

    /// Completes some of what was submitted, in any order.
    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let count = self.dice.below(self.executed.len() as u64 + 1) as usize;
        for _ in 0..count {
            let position = self.dice.below(self.executed.len() as u64) as usize;
            let (request, logged) = self.executed.swap_remove(position);
            logged.into_iter().for_each(|index| self.disk.acknowledge(index));
            sink.push(request.complete(Status::SUCCESS));
        }
        count
    }

    fn deadline(&self) -> Option<u64> {
        (!self.executed.is_empty()).then_some(0)
    }
}
