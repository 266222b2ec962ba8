//! A simulated disk with a volatile write cache, for tests of durability.
//!
//! [`CrashDisk`] logs the writes and flushes that reach it. A power failure may happen after any log entry:
//! [`CrashDisk::image`] returns one of the states that the medium may then have. Each sector of 512 bytes holds
//! either its durable version or any newer one, chosen sector by sector: writes that were not flushed are thereby
//! dropped, torn and reordered. A write with FUA is durable once it completed; any other write is durable once a
//! flush completed that was submitted after the write completed.
//!
//! ```
//! use bdev::{Registry, testing::CrashDisk};
//! let registry = Registry::new();
//! let disk = CrashDisk::create(&registry, "Crash0", 64, 4096, 1)?;
//! assert_eq!(disk.image(disk.log_len(), 7), vec![0; 64 * 4096]);
//! # Ok::<(), bdev::BdevError>(())
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use block_io::{Op, Payload, RequestFlags, Status};
use random::WyRand;

use crate::{
    Bdev, BdevError, BdevGeometry, BlockDevice, BoxedChannel, Completion, Durability, Registry, Request,
};

/// Unit of atomicity at a power failure, in bytes.
pub const SECTOR_BYTES: usize = 512;

/// That of persistent memory.
const PMEM_WORD_BYTES: usize = 8;

/// The disk as a test sees it. Cheap to clone.
#[derive(Clone)]
pub struct CrashDisk {
    state: Arc<Mutex<CrashDiskState>>,
    geometry: BdevGeometry,
    seed: u64,
    kind: CrashDiskKind,
}

/// What of a write survives a power failure.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CrashDiskKind {
    /// With FUA or after a flush all, before that any sectors of it.
    Sectors,
    /// The same with blocks instead of sectors.
    Blocks,
    /// As `Sectors`, but FUA has no effect: a faulty disk, to show that a test detects it.
    IgnoringFua,
    /// When it is completed all, before that any words of it.
    Pmem,
}

#[derive(Default)]
struct CrashDiskState {
    /// The contents that reads return: all writes applied.
    cache: Vec<u8>,
    /// The medium when the power came on, before the log.
    medium: Vec<u8>,
    log: Vec<CrashLogEntry>,
    /// Counts power failures; an I/O from before the last one completes without effect.
    power_failures: u64,
}

/// A write or flush that the disk executed.
struct CrashLogEntry {
    op: LogOp,
    /// Length of the log when it completed; `None` before.
    completed_at: Option<usize>,
}

enum LogOp {
    Write { offset: usize, data: Vec<u8>, durable: bool },
    Flush,
}

struct CrashDiskChannel {
    disk: CrashDisk,
    rng: WyRand,
    /// With its log entry and the power failures before it.
    executed: Vec<(Request, Option<(usize, u64)>)>,
}

/// Creates a [`pmem`](crate::pmem) device with blocks of 512 bytes on a file that need not be on persistent memory. It writes
/// and flushes in the same way, and nothing is durable.
///
/// # Errors
/// Those of [`pmem::create`](crate::pmem::create), without those of other files.
pub fn create_volatile_pmem(
    registry: &Registry,
    name: &str,
    path: &std::path::Path,
) -> Result<Arc<BlockDevice>, BdevError> {
    crate::modules::pmem::create_volatile(registry, crate::pmem::PmemConfig::new(name, path))
}

impl CrashDisk {
    /// Creates and registers a zeroed disk. `seed` determines the order in which I/Os complete.
    pub fn create(
        registry: &Registry,
        name: &str,
        num_blocks: u64,
        block_size: u32,
        seed: u64,
    ) -> Result<CrashDisk, BdevError> {
        CrashDisk::create_as(registry, name, num_blocks, block_size, seed, CrashDiskKind::Sectors)
    }

    /// Creates a disk that writes each block whole or not at all.
    pub fn create_atomic(
        registry: &Registry,
        name: &str,
        num_blocks: u64,
        block_size: u32,
        seed: u64,
    ) -> Result<CrashDisk, BdevError> {
        CrashDisk::create_as(registry, name, num_blocks, block_size, seed, CrashDiskKind::Blocks)
    }

    /// Creates a faulty disk that completes FUA writes from its volatile cache.
    pub fn create_ignoring_fua(
        registry: &Registry,
        name: &str,
        num_blocks: u64,
        block_size: u32,
        seed: u64,
    ) -> Result<CrashDisk, BdevError> {
        CrashDisk::create_as(registry, name, num_blocks, block_size, seed, CrashDiskKind::IgnoringFua)
    }

    /// Creates persistent memory: a completed write is durable, and of another one each aligned 8 bytes.
    pub fn create_pmem(
        registry: &Registry,
        name: &str,
        num_blocks: u64,
        block_size: u32,
        seed: u64,
    ) -> Result<CrashDisk, BdevError> {
        CrashDisk::create_as(registry, name, num_blocks, block_size, seed, CrashDiskKind::Pmem)
    }

    fn create_as(
        registry: &Registry,
        name: &str,
        num_blocks: u64,
        block_size: u32,
        seed: u64,
        kind: CrashDiskKind,
    ) -> Result<CrashDisk, BdevError> {
        let mut geometry =
            crate::modules::geometry(num_blocks, block_size, &crate::MetadataConfig::default())?;
        geometry.write_cache = kind != CrashDiskKind::Pmem;
        let state = CrashDiskState {
            cache: vec![0; geometry.bytes() as usize],
            medium: vec![0; geometry.bytes() as usize],
            log: Vec::new(),
            power_failures: 0,
        };
        let disk = CrashDisk { state: Arc::new(Mutex::new(state)), geometry, seed, kind };
        registry.register(name, None, &[], Arc::new(disk.clone()))?;
        Ok(disk)
    }

    /// Bytes that are written whole or not at all.
    fn atomic_bytes(&self) -> usize {
        match self.kind {
            CrashDiskKind::Sectors | CrashDiskKind::IgnoringFua => SECTOR_BYTES,
            CrashDiskKind::Blocks => self.geometry.block_size as usize,
            CrashDiskKind::Pmem => PMEM_WORD_BYTES,
        }
    }

    /// Whether a write is durable when it is completed.
    fn is_durable(&self, flags: RequestFlags) -> bool {
        match self.kind {
            CrashDiskKind::Sectors | CrashDiskKind::Blocks => flags.contains(RequestFlags::FUA),
            CrashDiskKind::IgnoringFua => false,
            CrashDiskKind::Pmem => true,
        }
    }

    /// Number of log entries. A power failure may follow any of them.
    pub fn log_len(&self) -> usize {
        self.lock().log.len()
    }

    /// Lengths of the log at which a flush completed.
    pub fn flush_points(&self) -> Vec<usize> {
        let state = self.lock();
        let flush = |entry: &CrashLogEntry| matches!(entry.op, LogOp::Flush).then_some(entry.completed_at?);
        state.log.iter().filter_map(flush).collect()
    }

    /// Flushes and FUA writes since the power came on.
    pub fn durable_requests(&self) -> usize {
        let state = self.lock();
        let is_durable =
            |entry: &&CrashLogEntry| matches!(entry.op, LogOp::Flush | LogOp::Write { durable: true, .. });
        state.log.iter().filter(is_durable).count()
    }

    /// One possible medium after a power failure that follows the first `at` entries, selected by `seed`.
    pub fn image(&self, at: usize, seed: u64) -> Vec<u8> {
        let mut rng = WyRand::new(seed);
        self.build_image(at, |versions| rng.below(versions as u64) as usize)
    }

    /// The medium after a power failure that keeps only durable data.
    pub fn image_oldest(&self, at: usize) -> Vec<u8> {
        self.build_image(at, |_| 0)
    }

    /// Fails the power and restores it: the disk then holds one of the possible media, selected by `seed`, and its log
    /// is empty.
    pub fn fail_power(&self, seed: u64) {
        let image = self.image(self.log_len(), seed);
        let mut state = self.lock();
        (state.cache, state.medium) = (image.clone(), image);
        state.log.clear();
        state.power_failures += 1;
    }

    /// Changes bytes on the medium and in the cache, as a disk that loses data without noticing.
    pub fn damage(&self, range: std::ops::Range<usize>) {
        let mut state = self.lock();
        let CrashDiskState { cache, medium, .. } = &mut *state;
        for bytes in [cache, medium] {
            bytes[range.clone()].iter_mut().for_each(|byte| *byte ^= 0x5a);
        }
    }

    fn build_image(&self, at: usize, mut choose: impl FnMut(usize) -> usize) -> Vec<u8> {
        let state = self.lock();
        let log = &state.log[..at.min(state.log.len())];
        let is_completed =
            |entry: &CrashLogEntry, by: usize| entry.completed_at.is_some_and(|then| then <= by);
        // Completed before a flush was submitted that has completed.
        let flushed = |index: usize, entry: &CrashLogEntry| {
            log.iter().enumerate().skip(index).any(|(submitted_at, flush)| {
                matches!(flush.op, LogOp::Flush)
                    && is_completed(flush, at)
                    && is_completed(entry, submitted_at)
            })
        };
        let unit = self.atomic_bytes();
        // The versions that each sector may hold, oldest first.
        let mut sectors: BTreeMap<usize, Vec<&[u8]>> = BTreeMap::new();
        for (index, entry) in log.iter().enumerate() {
            let LogOp::Write { offset, data, durable } = &entry.op else { continue };
            let durable = (*durable && is_completed(entry, at)) || flushed(index, entry);
            for (position, sector) in data.chunks(unit).enumerate() {
                let number = offset / unit + position;
                let first = &state.medium[number * unit..][..unit];
                let versions = sectors.entry(number).or_insert_with(|| vec![first]);
                if durable {
                    versions.clear();
                }
                versions.push(sector);
            }
        }
        let mut image = state.medium.clone();
        for (sector, versions) in sectors {
            let version = versions[choose(versions.len())];
            image[sector * unit..][..unit].copy_from_slice(version);
        }
        image
    }

    /// Executes a request and logs it; returns its log entry and the power failures before it, if it has one.
    fn execute(&self, request: &mut Request) -> Option<(usize, u64)> {
        let (offset, length) = crate::modules::bytes_of(request, self.geometry.block_size);
        let (offset, length) = (offset as usize, length as usize);
        let mut state = self.lock();
        let data = match (request.op, &mut request.payload) {
            (Op::Read, Payload::Data(data)) => {
                data.copy_from(0, &state.cache[offset..offset + length]);
                return None;
            }
            (Op::Write, Payload::Data(data)) => {
                let mut written = vec![0; length];
                data.copy_to(0, &mut written);
                written
            }
            (Op::Unmap | Op::WriteZeroes, _) => vec![0; length],
            (Op::Flush, _) => {
                state.log.push(CrashLogEntry { op: LogOp::Flush, completed_at: None });
                return Some((state.log.len() - 1, state.power_failures));
            }
            _ => return None,
        };
        state.cache[offset..offset + length].copy_from_slice(&data);
        let op = LogOp::Write { offset, data, durable: self.is_durable(request.flags) };
        state.log.push(CrashLogEntry { op, completed_at: None });
        Some((state.log.len() - 1, state.power_failures))
    }

    fn record_completion(&self, (index, power_failures): (usize, u64)) {
        let mut state = self.lock();
        if power_failures != state.power_failures {
            return;
        }
        let now = state.log.len();
        state.log[index].completed_at = Some(now);
    }

    fn lock(&self) -> MutexGuard<'_, CrashDiskState> {
        sync::lock(&self.state)
    }
}

impl Bdev for CrashDisk {
    fn product_name(&self) -> &'static str {
        "Crash disk"
    }

    fn geometry(&self) -> BdevGeometry {
        self.geometry
    }

    fn durability(&self) -> Durability {
        if self.kind == CrashDiskKind::Pmem { Durability::Pmem } else { Durability::Disk }
    }

    fn supports(&self, op: Op) -> bool {
        matches!(op, Op::Read | Op::Write | Op::Flush | Op::Unmap | Op::WriteZeroes)
    }

    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let rng = WyRand::new(self.seed ^ core.index() as u64);
        Ok(Box::new(CrashDiskChannel { disk: self.clone(), rng, executed: Vec::new() }))
    }

    fn depth(&self) -> u32 {
        32
    }
}

impl block_io::Channel for CrashDiskChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for mut request in batch.drain(..) {
            let logged = self.disk.execute(&mut request);
            self.executed.push((request, logged));
        }
    }

    /// Completes a random number of the executed requests, in random order.
    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let count = self.rng.below(self.executed.len() as u64 + 1) as usize;
        for _ in 0..count {
            let position = self.rng.below(self.executed.len() as u64) as usize;
            let (request, logged) = self.executed.swap_remove(position);
            logged.into_iter().for_each(|entry| self.disk.record_completion(entry));
            sink.push(request.complete(Status::SUCCESS));
        }
        count
    }

    fn deadline(&self) -> Option<u64> {
        (!self.executed.is_empty()).then_some(0)
    }
}
