//! What was promised to be durable is on the medium after every power cut.
#![allow(clippy::unwrap_used)]

mod rig;

use bdev::testing::{CrashDisk, SECTOR_BYTES};
use bdev::uring::{Plan, Step, fallback, plan};
use bdev::{Access, Channel, Request, delay, error};
use proptest::prelude::*;
use rig::Rig;
use ring::{Flags, Op, Tag};

const BLOCKS: u64 = 32;
const BLOCK_SIZE: u32 = 1024;
const SECTORS: usize = (BLOCKS * BLOCK_SIZE as u64) as usize / SECTOR_BYTES;
/// Blocks of each request of a batch, which overlap only from batch to batch.
const STRIPE: u64 = 4;

#[derive(Clone, Debug)]
struct Draw {
    op: Op,
    within: u64,
    blocks: u32,
    fua: bool,
    deallocate: bool,
    /// The file system cannot do the first step, so many times over.
    fallbacks: usize,
}

fn draw() -> impl Strategy<Value = Draw> {
    let ops =
        prop::sample::select(vec![Op::Write, Op::Write, Op::Write, Op::Flush, Op::Unmap, Op::WriteZeroes]);
    (ops, 0..STRIPE, 1..=STRIPE as u32, prop::bool::weighted(0.3), any::<bool>(), 0..3usize).prop_map(
        |(op, within, blocks, fua, deallocate, fallbacks)| Draw {
            op,
            within,
            blocks: blocks.min((STRIPE - within) as u32),
            fua,
            deallocate,
            fallbacks,
        },
    )
}

fn batches() -> impl Strategy<Value = Vec<Vec<Draw>>> {
    prop::collection::vec(prop::collection::vec(draw(), 1..(BLOCKS / STRIPE) as usize), 1..10)
}

/// For each sector what was written to it, oldest first, and from which version on it may be found.
struct Promises {
    versions: Vec<Vec<u64>>,
    oldest: Vec<usize>,
    stamp: u64,
}

impl Promises {
    fn new() -> Promises {
        Promises { versions: vec![vec![0]; SECTORS], oldest: vec![0; SECTORS], stamp: 0 }
    }

    fn sectors(index: usize, draw: &Draw) -> std::ops::Range<usize> {
        let sectors = (BLOCK_SIZE as usize) / SECTOR_BYTES;
        let first = (index as u64 * STRIPE + draw.within) as usize * sectors;
        first..first + draw.blocks as usize * sectors
    }

    /// A batch is on its way: what it writes may be found from now on.
    fn submitted(&mut self, batch: &[Draw]) -> Vec<u64> {
        let mut stamps = Vec::new();
        for (index, draw) in batch.iter().enumerate() {
            self.stamp += 1;
            let stamp = if draw.op == Op::Write { self.stamp } else { 0 };
            stamps.push(stamp);
            if draw.op.has_range() {
                Self::sectors(index, draw).for_each(|sector| self.versions[sector].push(stamp));
            }
        }
        stamps
    }

    /// The batch has been acknowledged, whole.
    fn acknowledged(&mut self, batch: &[Draw]) {
        let flushed = batch.iter().any(|draw| draw.op == Op::Flush);
        let mut written = vec![None; SECTORS];
        for (index, draw) in batch.iter().enumerate().filter(|(_, draw)| draw.op.has_range()) {
            Self::sectors(index, draw).for_each(|sector| written[sector] = Some(draw.fua));
        }
        for (sector, written) in written.into_iter().enumerate() {
            let last = self.versions[sector].len() - 1;
            match written {
                Some(true) => self.oldest[sector] = last,
                // A flush covers what was acknowledged before it was submitted: not its own batch.
                Some(false) if flushed => self.oldest[sector] = last - 1,
                None if flushed => self.oldest[sector] = last,
                _ => {}
            }
        }
    }

    /// The first sector that an image breaks a promise about.
    fn broken_by(&self, image: &[u8]) -> Option<usize> {
        (0..SECTORS).find(|sector| {
            let bytes = &image[sector * SECTOR_BYTES..][..SECTOR_BYTES];
            let whole = |stamp: &u64| bytes.chunks(8).all(|chunk| chunk == stamp.to_le_bytes());
            !self.versions[*sector][self.oldest[*sector]..].iter().any(whole)
        })
    }
}

fn request(rig: &Rig, tag: usize, op: Op, flags: Flags, draw: &Draw, stamp: u64) -> Request {
    let mut request = Request::new(Tag(tag as u64), op, tag as u64 * STRIPE + draw.within, draw.blocks);
    request.flags = flags;
    if op == Op::Write {
        let mut buffer = rig.buffer((draw.blocks * BLOCK_SIZE) as usize, 0);
        buffer.as_mut_slice().chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&stamp.to_le_bytes()));
        request.buffer = Some(buffer);
    }
    request
}

fn flags(draw: &Draw) -> Flags {
    let fua = if draw.fua { Flags::FUA } else { Flags::NONE };
    if draw.deallocate { fua.with(Flags::DEALLOCATE) } else { fua }
}

/// Runs batches and cuts the power everywhere; whether every image kept every promise.
fn survives(
    disk: &CrashDisk,
    batches: &[Vec<Draw>],
    seed: u64,
    mut run: impl FnMut(&[Draw], &[u64]),
) -> Result<(), String> {
    let mut promises = Promises::new();
    for (number, batch) in batches.iter().enumerate() {
        let before = disk.log_len();
        let stamps = promises.submitted(batch);
        run(batch, &stamps);
        let check = |promises: &Promises, at: usize| {
            let some = (0..4).map(|image| disk.image(at, seed ^ image << 32 ^ at as u64));
            match some.chain([disk.image_oldest(at)]).find_map(|image| promises.broken_by(&image)) {
                Some(sector) => Err(format!("batch {number}, {at} entries: sector {sector}")),
                None => Ok(()),
            }
        };
        for at in before..disk.log_len() {
            check(&promises, at)?;
        }
        promises.acknowledged(batch);
        check(&promises, disk.log_len())?;
    }
    Ok(())
}

/// Straight through a channel.
fn through(rig: &mut Rig, channel: &mut Channel, batch: &[Draw], stamps: &[u64]) {
    let requests = batch.iter().zip(stamps).enumerate();
    let requests: Vec<Request> =
        requests.map(|(tag, (draw, stamp))| request(rig, tag, draw.op, flags(draw), draw, *stamp)).collect();
    let done = rig.run(channel, requests);
    assert!(done.iter().all(|completion| completion.status().is_success()));
}

/// As the file device would: each request's operations, replayed on the disk below.
fn as_files(
    rig: &mut Rig,
    channel: &mut Channel,
    batch: &[Draw],
    stamps: &[u64],
    plan: impl Fn(Op, Flags) -> Option<Plan>,
) {
    let plans: Vec<Plan> = batch.iter().map(|draw| plan(draw.op, flags(draw)).unwrap()).collect();
    for second in [false, true] {
        let mut requests = Vec::new();
        for (tag, ((draw, stamp), plan)) in batch.iter().zip(stamps).zip(&plans).enumerate() {
            let mut step = plan.first;
            for _ in 0..draw.fallbacks {
                step = fallback(step).unwrap_or(step);
            }
            if second {
                let Some(then) = plan.then else { continue };
                step = then;
            }
            let (op, flags) = match step {
                Step::Write(sys::Write::Durable) => (Op::Write, Flags::FUA),
                Step::Write(sys::Write::Cached) | Step::WriteZeroes => (Op::Write, Flags::NONE),
                Step::Sync => (Op::Flush, Flags::NONE),
                Step::Punch => (Op::Unmap, Flags::NONE),
                Step::Zero => (Op::WriteZeroes, Flags::NONE),
                Step::Read => (Op::Read, Flags::NONE),
            };
            requests.push(request(rig, tag, op, flags, draw, *stamp));
        }
        rig.run(channel, requests);
    }
}

fn open(rig: &Rig, name: &str) -> Channel {
    rig.registry.open(name, Access::ReadWrite).unwrap().channel(&rig.core).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn the_layer_keeps_what_it_promised(batches in batches(), seed in any::<u64>(), stacked in any::<bool>()) {
        let mut rig = Rig::new();
        let disk = CrashDisk::create(&rig.registry, "C", BLOCKS, BLOCK_SIZE, seed).unwrap();
        if stacked {
            error::create(&rig.registry, error::ErrorConfig::new("C")).unwrap();
            delay::create(&rig.registry, delay::DelayConfig::new("EE_C", "D", 5)).unwrap();
        }
        let mut channel = open(&rig, if stacked { "D" } else { "C" });
        let outcome =
            survives(&disk, &batches, seed, |batch, stamps| through(&mut rig, &mut channel, batch, stamps));
        prop_assert_eq!(outcome, Ok(()));
    }

    #[test]
    fn the_file_devices_operations_keep_what_it_promised(batches in batches(), seed in any::<u64>()) {
        let mut rig = Rig::new();
        let disk = CrashDisk::create(&rig.registry, "C", BLOCKS, BLOCK_SIZE, seed).unwrap();
        let mut channel = open(&rig, "C");
        let outcome = survives(&disk, &batches, seed, |batch, stamps| {
            as_files(&mut rig, &mut channel, batch, stamps, plan);
        });
        prop_assert_eq!(outcome, Ok(()));
    }
}

fn one(op: Op, fua: bool) -> Draw {
    Draw { op, within: 0, blocks: 2, fua, deallocate: false, fallbacks: 0 }
}

#[test]
fn a_disk_that_lies_about_fua_is_caught() {
    let mut rig = Rig::new();
    let disk = CrashDisk::create_lying(&rig.registry, "C", BLOCKS, BLOCK_SIZE, 1).unwrap();
    let mut channel = open(&rig, "C");
    let batches = vec![vec![one(Op::Write, true)]];
    let outcome =
        survives(&disk, &batches, 1, |batch, stamps| through(&mut rig, &mut channel, batch, stamps));
    assert!(outcome.is_err(), "went unnoticed");
}

#[test]
fn plans_that_forget_durability_are_caught() {
    let forgets_sync = |op, flags| plan(op, flags).map(|plan| Plan { then: None, ..plan });
    let forgets_dsync = |op, flags| plan(op, if op == Op::Write { Flags::NONE } else { flags });
    type Mutant = fn(Op, Flags) -> Option<Plan>;
    let mutants: [(Mutant, Op); 2] = [(forgets_sync, Op::WriteZeroes), (forgets_dsync, Op::Write)];
    for (mutant, op) in mutants {
        let mut rig = Rig::new();
        let disk = CrashDisk::create(&rig.registry, "C", BLOCKS, BLOCK_SIZE, 1).unwrap();
        let mut channel = open(&rig, "C");
        let batches = vec![vec![one(Op::Write, true)], vec![one(op, true)]];
        let outcome = survives(&disk, &batches, 1, |batch, stamps| {
            as_files(&mut rig, &mut channel, batch, stamps, mutant);
        });
        assert!(outcome.is_err(), "{op:?} without durability went unnoticed");
    }
}

#[test]
fn images_are_dropped_torn_and_reordered() {
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
    rig.simple(&mut channel, Op::Flush, 0, 0, Flags::NONE);
    assert_eq!(disk.flush_points().len(), 1);
    assert_eq!(disk.image_oldest(disk.log_len())[..2048], [2; 2048]);
}
