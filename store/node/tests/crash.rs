//! A store on a disk with a volatile cache loses nothing that it acknowledged, whenever the power fails, and
//! returns nothing that was never written.
//!
//! A core owns the shards, in virtual time. Tasks write, zero and read images, never the same sectors at
//! once; then the core ends as in a SIGKILL, the disk keeps of each sector that was not flushed one of its
//! versions, and the store is opened again. `RINGBOLT_SEED` runs one seed.
#![allow(clippy::unwrap_used)]

mod process;

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use bdev::testing::CrashDisk;
use bdev::{Access, AsyncChannel, Registry, Request};
use block_io::{Op, Status, Tag};
use control::JobHandle;
use os::clock::VirtualClock;
use process::{Process, TestDisks};
use random::WyRand;
use reactor::Core;
use store_node::{
    FormatOptions, StoreBdevs, StoreCores, StoreError, StoreNode, StoreOptions, StoreThreads, StoreTuning,
    format_device,
};

const SEEDS: u64 = 12;
const ROUNDS: u64 = 5;
const SECTOR: usize = 512;
/// What both are if their objects are allocated as a whole.
const ALLOCATED_BYTES: u64 = 12 << 20;
/// Two images, larger than the disk has room for: writes also fail for want of space.
const IMAGES: [(&str, u64); 2] = [("a", 40 << 20), ("b", 9 << 20)];
/// First sectors of the parts of each image that the load uses: one crosses a border of objects.
const WINDOWS: [u64; 4] = [0, 8192 - 96, 12_000, 16_500];
const WINDOW: u64 = 192;
const CLAIM_MAX: u64 = 48;
/// Sectors of an object.
const OBJECT_SECTORS: u64 = (4 << 20) / SECTOR as u64;

/// By image and sector: the stamp that was acknowledged last, and those that may be there too.
#[derive(Default)]
struct Oracle {
    acknowledged: HashMap<(usize, u64), u32>,
    uncertain: HashMap<(usize, u64), Vec<u32>>,
    busy: HashSet<(usize, u64)>,
    /// Writes in flight, with their stamps.
    writes: Vec<((usize, u64, u64), u32)>,
    stamp: u32,
    counts: Counts,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    reads: u64,
    writes: u64,
    refused: u64,
    redone: u64,
    checkpoints: u64,
    repeated: u64,
    deferred: u64,
    observed: u64,
    interrupted: u64,
    checksum_misses: u64,
}

impl Oracle {
    /// A range of free sectors, which is busy from now on.
    fn claim(&mut self, random: &mut WyRand) -> Option<(usize, u64, u64)> {
        let image = random.below(2) as usize;
        let (mut from, mut count) = (random.below(WINDOW), 1 + random.below(40));
        if random.happens(600) {
            (from, count) = (from / 8 * 8, count.next_multiple_of(8));
        }
        let first = WINDOWS[random.below(WINDOWS.len() as u64) as usize] + from;
        let sectors: Vec<_> = (first..first + count).map(|sector| (image, sector)).collect();
        if sectors.iter().any(|sector| self.busy.contains(sector)) {
            return None;
        }
        self.busy.extend(sectors);
        Some((image, first, count))
    }

    fn release(&mut self, (image, first, count): (usize, u64, u64)) {
        self.writes.retain(|(range, _)| *range != (image, first, count));
        self.busy.retain(|(of, sector)| *of != image || !(first..first + count).contains(sector));
    }

    /// Whether a read has all of a write in flight or nothing, as far as it reads the same sectors of one
    /// object.
    fn check_read(&self, image: usize, first: u64, stamps: &[u32]) -> Result<(), String> {
        for ((of, start, count), stamp) in self.writes.iter().filter(|((of, ..), _)| *of == image) {
            let is_one_object = start / OBJECT_SECTORS == (start + count - 1) / OBJECT_SECTORS;
            let read = (first..).zip(stamps).filter(|(sector, _)| (*start..start + count).contains(sector));
            let (mut new, mut old) = (0, 0);
            read.for_each(|(_, found)| if found == stamp { new += 1 } else { old += 1 });
            if is_one_object && new > 0 && old > 0 {
                return Err(format!(
                    "a read has {new} sectors of {count} from {start} of image {of}, not {old}"
                ));
            }
        }
        Ok(())
    }

    /// Whether writes that the power failure has interrupted happened as a whole or not at all; all of their
    /// sectors were read since. Those across a border of objects are two.
    fn check_interrupted(&mut self) -> Result<(), String> {
        for ((image, first, count), stamp) in std::mem::take(&mut self.writes) {
            let sectors = first..first + count;
            let written =
                sectors.filter(|sector| self.acknowledged.get(&(image, *sector)) == Some(&stamp)).count();
            let is_one_object = first / OBJECT_SECTORS == (first + count - 1) / OBJECT_SECTORS;
            if is_one_object && written > 0 && written as u64 != count {
                return Err(format!(
                    "{written} of {count} sectors from {first} of image {image} have {stamp}"
                ));
            }
            self.counts.interrupted += u64::from(is_one_object);
        }
        Ok(())
    }

    /// Whether a sector may have this stamp; from now on it has.
    fn check(&mut self, image: usize, sector: u64, found: u32) -> Result<(), String> {
        let key = (image, sector);
        let expected = self.acknowledged.get(&key).copied().unwrap_or(0);
        let uncertain = self.uncertain.remove(&key).unwrap_or_default();
        if found != expected && !uncertain.contains(&found) {
            return Err(format!(
                "sector {sector} of image {image} has {found}, not {expected} or {uncertain:?}"
            ));
        }
        self.acknowledged.insert(key, found);
        Ok(())
    }
}

fn stamp_of(sector: &[u8]) -> Result<u32, String> {
    let stamp = u32::from_le_bytes(sector[..4].try_into().unwrap());
    let is_whole = sector.chunks(4).all(|word| word == stamp.to_le_bytes());
    is_whole.then_some(stamp).ok_or_else(|| format!("a sector mixes {stamp} with something else"))
}

async fn read_and_check(
    io: &AsyncChannel,
    core: &Core,
    oracle: &RefCell<Oracle>,
    (image, first, count): (usize, u64, u64),
) -> Result<(), String> {
    let buffer = core.pool().take(count as usize * SECTOR).unwrap();
    let buffer = io.read(first, buffer).await.map_err(|(status, _)| format!("a read fails: {status}"))?;
    for (sector, bytes) in (first..).zip(buffer.as_slice().chunks(SECTOR)) {
        oracle.borrow_mut().check(image, sector, stamp_of(bytes)?)?;
    }
    Ok(())
}

/// Writes a stamp, or zeroes if it is 0.
async fn write(io: &AsyncChannel, core: &Core, stamp: u32, first: u64, count: u64) -> Status {
    if stamp == 0 {
        let request = Request::new(Tag(0), Op::WriteZeroes, first, count as u32);
        return io.submit(request).await.status();
    }
    let mut buffer = core.pool().take(count as usize * SECTOR).unwrap();
    buffer.as_mut_slice().copy_from_slice(&stamp.to_le_bytes().repeat(SECTOR / 4 * count as usize));
    io.write(first, buffer).await.map_or_else(|(status, _)| status, |_| Status::SUCCESS)
}

/// Reads what others are writing. What a read returned is committed: no crash takes it back.
async fn observe(
    io: Vec<AsyncChannel>,
    core: Core,
    oracle: Rc<RefCell<Oracle>>,
    mut random: WyRand,
) -> Result<(), String> {
    loop {
        let (image, first) =
            (random.below(2) as usize, WINDOWS[random.index(WINDOWS.len())] + random.below(WINDOW));
        let buffer = core.pool().take(8 * SECTOR).unwrap();
        let read =
            io[image].read(first, buffer).await.map_err(|(status, _)| format!("a read fails: {status}"))?;
        let stamps: Result<Vec<u32>, String> = read.as_slice().chunks(SECTOR).map(stamp_of).collect();
        let stamps = stamps?;
        oracle.borrow().check_read(image, first, &stamps)?;
        for (sector, found) in (first..).zip(stamps) {
            let key = (image, sector);
            let oracle = &mut *oracle.borrow_mut();
            // Of the write in flight, which is the only one of its sector; zeroes say nothing.
            let in_flight = oracle.uncertain.get(&key).and_then(|stamps| stamps.last());
            if found != 0 && oracle.busy.contains(&key) && in_flight == Some(&found) {
                oracle.acknowledged.insert(key, found);
                oracle.uncertain.insert(key, Vec::new());
                oracle.counts.observed += 1;
            }
        }
    }
}

/// One of the tasks that load the images.
async fn load(
    io: Vec<AsyncChannel>,
    core: Core,
    oracle: Rc<RefCell<Oracle>>,
    mut random: WyRand,
) -> Result<(), String> {
    loop {
        let claimed = oracle.borrow_mut().claim(&mut random);
        let Some(range) = claimed else {
            core.sleep_ns(1000).await;
            continue;
        };
        let (image, first, count) = range;
        let kind = random.below(10);
        if kind < 3 {
            read_and_check(&io[image], &core, &oracle, range).await?;
            oracle.borrow_mut().counts.reads += 1;
        } else {
            let stamp = {
                let oracle = &mut *oracle.borrow_mut();
                oracle.stamp += 1;
                let stamp = if kind < 9 { oracle.stamp } else { 0 };
                if stamp != 0 {
                    oracle.writes.push((range, stamp));
                }
                for sector in first..first + count {
                    oracle.uncertain.entry((image, sector)).or_default().push(stamp);
                }
                stamp
            };
            let status = write(&io[image], &core, stamp, first, count).await;
            let oracle = &mut *oracle.borrow_mut();
            if status.is_success() {
                for sector in first..first + count {
                    oracle.uncertain.remove(&(image, sector));
                    oracle.acknowledged.insert((image, sector), stamp);
                }
                oracle.counts.writes += 1;
            } else if status == Status::CAPACITY_EXCEEDED {
                // It may have happened in part, where it crosses a border of objects.
                oracle.counts.refused += 1;
            } else {
                return Err(format!("a write fails: {status}"));
            }
        }
        oracle.borrow_mut().release(range);
    }
}

async fn open(
    registry: Registry,
    bdevs: StoreBdevs<'static>,
    core: Core,
    objects: Objects,
    threads: StoreThreads,
) -> Result<(StoreNode, Vec<AsyncChannel>), StoreError> {
    let (cores, job) = (StoreCores::This(&core), JobHandle::standalone());
    let default = StoreTuning::default();
    let checksum_cache_bytes = if objects == Objects::Thin { default.checksum_cache_bytes } else { 0 };
    let tuning = StoreTuning { checksum_cache_bytes, ..default };
    let options = StoreOptions { name: "s", tuning, threads };
    let node = StoreNode::open(&registry, bdevs, options, &cores, &job).await?;
    for (name, bytes) in IMAGES {
        match node.images().iter().any(|image| image.name == name) {
            true => {}
            false if objects == Objects::Thin => drop(node.create_image(name, bytes).await?),
            false => drop(node.create_preallocated_image(name, ALLOCATED_BYTES, &job).await?),
        }
    }
    let mut io = Vec::new();
    for (name, _) in IMAGES {
        let descriptor = registry.open(&format!("s/{name}"), Access::ReadWrite)?;
        io.push(AsyncChannel::new(&core, descriptor.channel(&core)?));
    }
    Ok((node, io))
}

/// Opens the store, compares it with the oracle, and loads it for a while.
fn run_round(
    process: &mut Process,
    bdevs: StoreBdevs<'static>,
    objects: Objects,
    oracle: &Rc<RefCell<Oracle>>,
    random: &mut WyRand,
) -> Result<StoreNode, String> {
    let (registry, core) = (process.registry.clone(), process.reactor.core());
    let threads = process.threads();
    let opened = process.run(open(registry, bdevs, core, objects, threads));
    let (node, io) = opened.map_err(|error| format!("opening: {error}"))?;
    let core = process.reactor.core();
    for (image, channel) in io.iter().enumerate() {
        for window in WINDOWS {
            let (io, core, oracle) = (channel.clone(), core.clone(), oracle.clone());
            let range = (image, window, WINDOW + CLAIM_MAX);
            process.run(async move { read_and_check(&io, &core, &oracle, range).await })?;
        }
    }
    oracle.borrow_mut().check_interrupted()?;
    let failure = Rc::new(RefCell::new(None));
    for index in 0..14 {
        let (io, task_core, oracle, random) = (io.clone(), core.clone(), oracle.clone(), random.split());
        let failure = failure.clone();
        assert!(core.spawn(async move {
            let error = match index {
                0..12 => load(io, task_core, oracle, random).await.err(),
                _ => observe(io, task_core, oracle, random).await.err(),
            };
            *failure.borrow_mut() = error;
        }));
    }
    for _ in 0..500 + random.below(8000) {
        process.turn();
        if let Some(error) = failure.borrow_mut().take() {
            return Err(error);
        }
    }
    Ok(node)
}

/// Where the logs are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Logs {
    /// On the disk.
    Here,
    /// On another one.
    Elsewhere,
    /// On persistent memory, which tears writes within sectors.
    OnPmem,
    /// On another one, and crypto bdevs are on both.
    Encrypted,
    /// On another one, which acknowledges FUA writes from its cache.
    IgnoringFua,
}

/// What images are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Objects {
    /// Thin, and all checksums are in one block of the table.
    Thin,
    /// Allocated as a whole: checksums of each object are in another block of the table, of which a partition
    /// has one in memory.
    Allocated,
}

/// Which threads do the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Threads {
    /// One.
    One,
    /// A priority thread and a non-priority thread.
    Prioritized,
}

/// The disks of a run.
fn make_disks(seed: u64, bytes: u64, logs: Logs, ignores_fua: bool) -> TestDisks {
    let make = |name: &str, bytes: u64, block_size: u32, ignores_fua: bool| {
        let create = if ignores_fua { CrashDisk::create_ignoring_fua } else { CrashDisk::create };
        create(&Registry::new(), name, bytes / u64::from(block_size), block_size, seed).unwrap()
    };
    let block_size = if seed.is_multiple_of(3) { 4096 } else { 512 };
    let disk = make("Disk", bytes, block_size, ignores_fua);
    let log = (logs != Logs::Here).then(|| {
        let block_size = if seed.is_multiple_of(2) { 4096 } else { 512 };
        if logs == Logs::OnPmem {
            let blocks = (1 << 20) / u64::from(block_size);
            return CrashDisk::create_pmem(&Registry::new(), "Log", blocks, block_size, seed).unwrap();
        }
        make("Log", 1 << 20, block_size, ignores_fua || logs == Logs::IgnoringFua)
    });
    TestDisks { disk, log, are_encrypted: logs == Logs::Encrypted }
}

fn run_seed(
    seed: u64,
    logs: Logs,
    objects: Objects,
    threads: Threads,
    ignores_fua: bool,
) -> Result<Counts, String> {
    let mut random = WyRand::new(seed);
    let clock = VirtualClock::default();
    // Some disks have less space than the load needs.
    let (bytes, log_bytes): (u64, u64) =
        if seed.is_multiple_of(4) { (2 << 20, 384 << 10) } else { (4 << 20, 256 << 10) };
    let bytes = if objects == Objects::Thin { bytes } else { bytes + 2 * ALLOCATED_BYTES + (8 << 20) };
    // As much space for data.
    let bytes = if logs == Logs::Here { bytes } else { bytes - 2 * log_bytes };
    let disks = make_disks(seed, bytes, logs, ignores_fua);
    let bdevs = disks.bdevs();
    let start = match threads {
        Threads::One => Process::start,
        Threads::Prioritized => Process::prioritized,
    };
    let mut process = start(&disks, &clock, &mut random);
    let (registry, core) = (process.registry.clone(), process.reactor.core());
    let options =
        FormatOptions { partitions: Some(2), log_bytes: Some(log_bytes), ..FormatOptions::default() };
    process
        .run(async move {
            format_device(&registry, bdevs, &StoreCores::This(&core), options, &JobHandle::standalone()).await
        })
        .map_err(|error| error.to_string())?;
    let oracle = Rc::new(RefCell::new(Oracle::default()));
    for round in 0..ROUNDS {
        let node = run_round(&mut process, bdevs, objects, &oracle, &mut random);
        let node = node.map_err(|error| format!("round {round}: {error}"))?;
        let partitions = process.run(async move { node.status().await });
        for partition in partitions.map_err(|error| error.to_string())? {
            let counts = &mut oracle.borrow_mut().counts;
            counts.redone += partition.stats.entries_redone;
            counts.checkpoints += partition.stats.checkpoints;
            counts.repeated += partition.stats.reads_repeated;
            counts.deferred += partition.stats.deferred;
            counts.checksum_misses += partition.stats.checksum_misses;
            if objects == Objects::Allocated && partition.checksum_cache_bytes > 4096 {
                return Err(format!("{} bytes of checksums are in memory", partition.checksum_cache_bytes));
            }
        }
        process.discard();
        oracle.borrow_mut().busy.clear();
        disks.fail_power(&mut random);
        process = start(&disks, &clock, &mut random);
    }
    process.discard();
    let counts = oracle.borrow().counts;
    Ok(counts)
}

#[test]
fn acknowledged_writes_survive_power_failures() {
    survive_power_failures(Logs::Here, Objects::Thin, Threads::One);
}

/// What is in place is with another thread, which may be slower or faster.
#[test]
fn acknowledged_writes_survive_power_failures_with_prioritized_threads() {
    survive_power_failures(Logs::Here, Objects::Thin, Threads::Prioritized);
}

/// Checksums that are read, evicted and written meanwhile are right.
#[test]
fn acknowledged_writes_survive_power_failures_with_most_checksums_on_the_disk() {
    for threads in [Threads::One, Threads::Prioritized] {
        let misses = survive_power_failures(Logs::Here, Objects::Allocated, threads).checksum_misses;
        assert!(is_one_seed() || misses > 10_000, "{misses}");
    }
}

/// What is left on the two disks after a power failure differs.
#[test]
fn acknowledged_writes_survive_power_failures_with_the_logs_elsewhere() {
    survive_power_failures(Logs::Elsewhere, Objects::Thin, Threads::One);
    survive_power_failures(Logs::Elsewhere, Objects::Thin, Threads::Prioritized);
}

/// Persistent memory writes 8 bytes whole, and no sector: the logs do not rely on that.
#[test]
fn acknowledged_writes_survive_power_failures_with_the_logs_on_pmem() {
    survive_power_failures(Logs::OnPmem, Objects::Thin, Threads::One);
}

/// A block that was torn is decrypted to parts of what it had before and of what it was to have, as without
/// encryption.
#[test]
fn acknowledged_writes_survive_power_failures_of_encrypted_disks() {
    survive_power_failures(Logs::Encrypted, Objects::Thin, Threads::One);
    survive_power_failures(Logs::Encrypted, Objects::Thin, Threads::Prioritized);
}

fn survive_power_failures(logs: Logs, objects: Objects, threads: Threads) -> Counts {
    let seeds = match std::env::var("RINGBOLT_SEED") {
        Ok(seed) => seed.parse().map(|seed: u64| seed..seed + 1).unwrap(),
        Err(_) if objects == Objects::Allocated || logs == Logs::Encrypted => 0..SEEDS / 2,
        Err(_) => 0..SEEDS,
    };
    let mut total = Counts::default();
    for seed in seeds {
        let counts = run_seed(seed, logs, objects, threads, false)
            .unwrap_or_else(|error| panic!("RINGBOLT_SEED={seed}: {error}"));
        total.reads += counts.reads;
        total.writes += counts.writes;
        total.refused += counts.refused;
        total.redone += counts.redone;
        total.checkpoints += counts.checkpoints;
        total.repeated += counts.repeated;
        total.deferred += counts.deferred;
        total.observed += counts.observed;
        total.interrupted += counts.interrupted;
        total.checksum_misses += counts.checksum_misses;
    }
    println!("{total:?}");
    let Counts { reads, writes, refused, redone, checkpoints, repeated, .. } = total;
    let Counts { deferred, observed, interrupted, .. } = total;
    // Allocated images have all their space.
    let refused = if objects == Objects::Thin { refused } else { 1 };
    let all = [reads, writes, refused, redone, checkpoints, repeated, deferred, observed, interrupted];
    assert!(
        is_one_seed() || all.iter().all(|count| *count > 0),
        "the load does not reach everything: {total:?}"
    );
    total
}

/// A single seed reaches less.
fn is_one_seed() -> bool {
    std::env::var("RINGBOLT_SEED").is_ok()
}

/// The test finds a disk that acknowledges the log's writes from its cache.
#[test]
fn a_disk_that_ignores_fua_is_found() {
    let all = [Threads::One, Threads::Prioritized];
    for (logs, threads) in [Logs::Here, Logs::Elsewhere].into_iter().zip(all) {
        let found = (0..SEEDS).find_map(|seed| run_seed(seed, logs, Objects::Thin, threads, true).err());
        println!("found, logs {logs:?}: {}", found.expect("nothing is found"));
    }
    // The disk of the logs alone.
    let found = (0..SEEDS)
        .find_map(|seed| run_seed(seed, Logs::IgnoringFua, Objects::Thin, Threads::One, false).err());
    println!("found: {}", found.expect("nothing is found"));
}
