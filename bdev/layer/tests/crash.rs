//! Data that must be durable is on the medium after every power failure.
#![allow(clippy::unwrap_used)]

mod rig;

use bdev::testing::{CrashDisk, SECTOR_BYTES};
use bdev::uring::{FilePlan, FileStep, fallback, plan};
use bdev::{Access, BdevChannel, Request, delay, error};
use block_io::{Channel as _, Op, RequestFlags, Tag};
use proptest::prelude::*;
use rig::Rig;

const BLOCKS: u64 = 32;
const BLOCK_SIZE: u32 = 1024;
const SECTORS: usize = (BLOCKS * BLOCK_SIZE as u64) as usize / SECTOR_BYTES;
/// Blocks of each request's stripe: requests overlap only across batches.
const STRIPE: u64 = 4;

#[derive(Clone, Debug)]
struct RequestSpec {
    op: Op,
    within: u64,
    blocks: u32,
    fua: bool,
    deallocate: bool,
    /// How many steps in a row the file system does not support.
    fallbacks: usize,
}

fn spec() -> impl Strategy<Value = RequestSpec> {
    let ops =
        prop::sample::select(vec![Op::Write, Op::Write, Op::Write, Op::Flush, Op::Unmap, Op::WriteZeroes]);
    (ops, 0..STRIPE, 1..=STRIPE as u32, prop::bool::weighted(0.3), any::<bool>(), 0..3usize).prop_map(
        |(op, within, blocks, fua, deallocate, fallbacks)| RequestSpec {
            op,
            within,
            blocks: blocks.min((STRIPE - within) as u32),
            fua,
            deallocate,
            fallbacks,
        },
    )
}

fn batches() -> impl Strategy<Value = Vec<Vec<RequestSpec>>> {
    prop::collection::vec(prop::collection::vec(spec(), 1..(BLOCKS / STRIPE) as usize), 1..10)
}

/// The versions of each sector, oldest first, and the oldest one that it may hold after a power failure.
struct Durability {
    versions: Vec<Vec<u64>>,
    oldest: Vec<usize>,
    stamp: u64,
}

impl Durability {
    fn new() -> Durability {
        Durability { versions: vec![vec![0]; SECTORS], oldest: vec![0; SECTORS], stamp: 0 }
    }

    fn sectors(index: usize, spec: &RequestSpec) -> std::ops::Range<usize> {
        let sectors = (BLOCK_SIZE as usize) / SECTOR_BYTES;
        let first = (index as u64 * STRIPE + spec.within) as usize * sectors;
        first..first + spec.blocks as usize * sectors
    }

    /// A batch is submitted: its data may be on the medium from now on.
    fn submitted(&mut self, batch: &[RequestSpec]) -> Vec<u64> {
        let mut stamps = Vec::new();
        for (index, spec) in batch.iter().enumerate() {
            self.stamp += 1;
            let stamp = if spec.op == Op::Write { self.stamp } else { 0 };
            stamps.push(stamp);
            if spec.op.has_range() {
                Self::sectors(index, spec).for_each(|sector| self.versions[sector].push(stamp));
            }
        }
        stamps
    }

    /// All requests of the batch have completed.
    fn completed(&mut self, batch: &[RequestSpec]) {
        let flushed = batch.iter().any(|spec| spec.op == Op::Flush);
        let mut written = vec![None; SECTORS];
        for (index, spec) in batch.iter().enumerate().filter(|(_, spec)| spec.op.has_range()) {
            Self::sectors(index, spec).for_each(|sector| written[sector] = Some(spec.fua));
        }
        for (sector, written) in written.into_iter().enumerate() {
            let last = self.versions[sector].len() - 1;
            match written {
                Some(true) => self.oldest[sector] = last,
                // A flush covers writes that completed before it was submitted: not those of its batch.
                Some(false) if flushed => self.oldest[sector] = last - 1,
                None if flushed => self.oldest[sector] = last,
                _ => {}
            }
        }
    }

    /// The first sector whose contents violate the durability rules.
    fn violation(&self, image: &[u8]) -> Option<usize> {
        (0..SECTORS).find(|sector| {
            let bytes = &image[sector * SECTOR_BYTES..][..SECTOR_BYTES];
            let whole = |stamp: &u64| bytes.chunks(8).all(|chunk| chunk == stamp.to_le_bytes());
            !self.versions[*sector][self.oldest[*sector]..].iter().any(whole)
        })
    }
}

fn request(rig: &Rig, tag: usize, op: Op, flags: RequestFlags, spec: &RequestSpec, stamp: u64) -> Request {
    let mut request = Request::new(Tag(tag as u64), op, tag as u64 * STRIPE + spec.within, spec.blocks);
    request.flags = flags;
    if op == Op::Write {
        let mut buffer = rig.buffer((spec.blocks * BLOCK_SIZE) as usize, 0);
        buffer.as_mut_slice().chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&stamp.to_le_bytes()));
        request.set_data(Some(buffer));
    }
    request
}

fn flags(spec: &RequestSpec) -> RequestFlags {
    let fua = if spec.fua { RequestFlags::FUA } else { RequestFlags::NONE };
    if spec.deallocate { fua | RequestFlags::DEALLOCATE } else { fua }
}

/// Runs batches and simulates a power failure after each log entry; fails if an image violates the rules.
fn survives(
    disk: &CrashDisk,
    batches: &[Vec<RequestSpec>],
    seed: u64,
    mut run: impl FnMut(&[RequestSpec], &[u64]),
) -> Result<(), String> {
    let mut durability = Durability::new();
    for (number, batch) in batches.iter().enumerate() {
        let before = disk.log_len();
        let stamps = durability.submitted(batch);
        run(batch, &stamps);
        let check = |durability: &Durability, at: usize| {
            let some = (0..4).map(|image| disk.image(at, seed ^ image << 32 ^ at as u64));
            match some.chain([disk.image_oldest(at)]).find_map(|image| durability.violation(&image)) {
                Some(sector) => Err(format!("batch {number}, {at} entries: sector {sector}")),
                None => Ok(()),
            }
        };
        for at in before..disk.log_len() {
            check(&durability, at)?;
        }
        durability.completed(batch);
        check(&durability, disk.log_len())?;
    }
    Ok(())
}

/// Runs a batch on a channel.
fn run_on_channel(rig: &mut Rig, channel: &mut BdevChannel, batch: &[RequestSpec], stamps: &[u64]) {
    let requests = batch.iter().zip(stamps).enumerate();
    let requests: Vec<Request> =
        requests.map(|(tag, (spec, stamp))| request(rig, tag, spec.op, flags(spec), spec, *stamp)).collect();
    let done = rig.run(channel, requests);
    assert!(done.iter().all(|completion| completion.status().is_success()));
}

/// Runs a batch as the uring device would: executes the file operations of each request on the disk.
fn run_as_file_operations(
    rig: &mut Rig,
    channel: &mut BdevChannel,
    batch: &[RequestSpec],
    stamps: &[u64],
    plan: impl Fn(Op, RequestFlags) -> Option<FilePlan>,
) {
    let plans: Vec<FilePlan> = batch.iter().map(|spec| plan(spec.op, flags(spec)).unwrap()).collect();
    for second in [false, true] {
        let mut requests = Vec::new();
        for (tag, ((spec, stamp), plan)) in batch.iter().zip(stamps).zip(&plans).enumerate() {
            let mut step = plan.first;
            for _ in 0..spec.fallbacks {
                step = fallback(step).unwrap_or(step);
            }
            if second {
                let Some(then) = plan.then else { continue };
                step = then;
            }
            let (op, flags) = match step {
                FileStep::Write(os::WriteMode::Durable | os::WriteMode::AtomicDurable) => {
                    (Op::Write, RequestFlags::FUA)
                }
                FileStep::Write(os::WriteMode::Cached | os::WriteMode::Atomic) | FileStep::WriteZeroes => {
                    (Op::Write, RequestFlags::NONE)
                }
                FileStep::Sync => (Op::Flush, RequestFlags::NONE),
                FileStep::Punch => (Op::Unmap, RequestFlags::NONE),
                FileStep::Zero => (Op::WriteZeroes, RequestFlags::NONE),
                FileStep::Read => (Op::Read, RequestFlags::NONE),
            };
            requests.push(request(rig, tag, op, flags, spec, *stamp));
        }
        rig.run(channel, requests);
    }
}

fn open(rig: &Rig, name: &str) -> BdevChannel {
    rig.registry.open(name, Access::ReadWrite).unwrap().channel(&rig.core).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn completed_writes_are_durable_through_the_layer(
        batches in batches(),
        seed in any::<u64>(),
        stacked in any::<bool>(),
    ) {
        let mut rig = Rig::new();
        let disk = CrashDisk::create(&rig.registry, "C", BLOCKS, BLOCK_SIZE, seed).unwrap();
        if stacked {
            error::create(&rig.registry, error::ErrorConfig::new("C")).unwrap();
            delay::create(&rig.registry, delay::DelayConfig::new("EE_C", "D", 5)).unwrap();
        }
        let mut channel = open(&rig, if stacked { "D" } else { "C" });
        let outcome =
            survives(&disk, &batches, seed, |batch, stamps| run_on_channel(&mut rig, &mut channel, batch, stamps));
        prop_assert_eq!(outcome, Ok(()));
    }

    #[test]
    fn completed_writes_are_durable_through_the_file_operations(batches in batches(), seed in any::<u64>()) {
        let mut rig = Rig::new();
        let disk = CrashDisk::create(&rig.registry, "C", BLOCKS, BLOCK_SIZE, seed).unwrap();
        let mut channel = open(&rig, "C");
        let outcome = survives(&disk, &batches, seed, |batch, stamps| {
            run_as_file_operations(&mut rig, &mut channel, batch, stamps, plan);
        });
        prop_assert_eq!(outcome, Ok(()));
    }
}

fn one(op: Op, fua: bool) -> RequestSpec {
    RequestSpec { op, within: 0, blocks: 2, fua, deallocate: false, fallbacks: 0 }
}

#[test]
fn a_disk_that_ignores_fua_is_detected() {
    let mut rig = Rig::new();
    let disk = CrashDisk::create_ignoring_fua(&rig.registry, "C", BLOCKS, BLOCK_SIZE, 1).unwrap();
    let mut channel = open(&rig, "C");
    let batches = vec![vec![one(Op::Write, true)]];
    let outcome =
        survives(&disk, &batches, 1, |batch, stamps| run_on_channel(&mut rig, &mut channel, batch, stamps));
    assert!(outcome.is_err(), "was not detected");
}

#[test]
fn file_plans_without_durability_are_detected() {
    let without_sync = |op, flags| plan(op, flags).map(|plan| FilePlan { then: None, ..plan });
    let without_dsync = |op, flags| plan(op, if op == Op::Write { RequestFlags::NONE } else { flags });
    type Mutant = fn(Op, RequestFlags) -> Option<FilePlan>;
    let mutants: [(Mutant, Op); 2] = [(without_sync, Op::WriteZeroes), (without_dsync, Op::Write)];
    for (mutant, op) in mutants {
        let mut rig = Rig::new();
        let disk = CrashDisk::create(&rig.registry, "C", BLOCKS, BLOCK_SIZE, 1).unwrap();
        let mut channel = open(&rig, "C");
        let batches = vec![vec![one(Op::Write, true)], vec![one(op, true)]];
        let outcome = survives(&disk, &batches, 1, |batch, stamps| {
            run_as_file_operations(&mut rig, &mut channel, batch, stamps, mutant);
        });
        assert!(outcome.is_err(), "{op:?} without durability was not detected");
    }
}

#[test]
fn a_power_failure_leaves_one_of_the_images_and_forgets_what_was_in_flight() {
    let mut rig = Rig::new();
    let disk = CrashDisk::create(&rig.registry, "C", BLOCKS, BLOCK_SIZE, 1).unwrap();
    let mut channel = open(&rig, "C");
    rig.write(&mut channel, 0, 1, 1);
    rig.one(&mut channel, Request::new(Tag(0), Op::Flush, 0, 0));
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..100 {
        rig.write(&mut channel, 0, 1, 2);
        // In flight when the power fails: its completion must not make anything durable.
        let mut batch = vec![Request::write(Tag(9), 1, 1, rig.buffer(1024, 3))];
        channel.submit(&mut batch);
        disk.fail_power(seed);
        assert_eq!(disk.log_len(), 0);
        let mut done = Vec::new();
        while done.is_empty() {
            channel.poll(&mut done);
        }
        let medium = disk.image_oldest(0);
        seen.insert((medium[0], medium[512]));
        assert!([0, 3].contains(&medium[1024]));
        // Durable again for the next round.
        rig.write(&mut channel, 0, 1, 1);
        rig.one(&mut channel, Request::new(Tag(0), Op::Flush, 0, 0));
    }
    assert_eq!(seen.len(), 4, "each sector is the old or the new version: {seen:?}");
}

#[test]
fn images_have_dropped_torn_and_reordered_writes() {
    let mut rig = Rig::new();
    let disk = CrashDisk::create(&rig.registry, "C", BLOCKS, BLOCK_SIZE, 1).unwrap();
    let mut channel = open(&rig, "C");
    for fill in 1..=2 {
        rig.write(&mut channel, 0, 1, fill);
        rig.write(&mut channel, 1, 1, fill);
    }
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..500 {
        let image = disk.image(disk.log_len(), seed);
        seen.insert([image[0], image[512], image[1024], image[1536]]);
    }
    assert_eq!(seen.len(), 81, "three versions of four sectors each");
    rig.simple(&mut channel, Op::Flush, 0, 0, RequestFlags::NONE);
    assert_eq!(disk.flush_points().len(), 1);
    assert_eq!(disk.image_oldest(disk.log_len())[..2048], [2; 2048]);
}
