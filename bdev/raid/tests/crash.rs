//! Power failures of mirrors: members as a crash may have left them, assembled, copied and compared.
#![allow(clippy::unwrap_used)]

mod rig;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bdev::testing::CrashDisk;
use bdev::{Access, AsyncChannel};
use control::json::json;
use random::WyRand;
use rig::{BLOCK, OFFSET, Program};

/// Blocks of the array: 512 KiB, which is 8 regions.
const BLOCKS: u64 = 1024;
const WRITERS: u64 = 4;
/// Rounds of a writer, so that logs stay short.
const ROUNDS_MAX: u64 = 2000;

/// What happened to each block, in order.
#[derive(Default)]
struct History {
    /// Value, and when it was issued; when its write was acknowledged as durable, if it was.
    writes: Vec<(u64, u64, u64, Option<u64>)>,
    /// Lengths of the disks' logs when something had changed.
    cuts: Vec<[usize; 2]>,
}

impl History {
    /// The values that a block may have after a crash at a cut: the last one that was durable, or a later
    /// one.
    fn allowed(&self, lba: u64, cut: u64) -> Vec<u64> {
        let issued = self.writes.iter().filter(|write| write.0 == lba && write.2 <= cut);
        let mut allowed = vec![0];
        for (_, value, _, durable) in issued {
            if durable.is_some_and(|at| at <= cut) {
                allowed.clear();
            }
            allowed.push(*value);
        }
        allowed
    }
}

/// Writes blocks until it is stopped, and notes each moment at which the power may fail.
struct Workload {
    stop: Arc<AtomicBool>,
    history: Arc<Mutex<Option<History>>>,
}

impl Workload {
    fn start(program: &Program, disks: [CrashDisk; 2], seed: u64, rounds: u64) -> Workload {
        let stop = Arc::new(AtomicBool::new(false));
        let history: Arc<Mutex<Option<History>>> = Arc::default();
        let descriptor = program.registry.open("r", Access::ReadWrite).unwrap();
        let (ends, kept) = (stop.clone(), history.clone());
        let run = move |core: &reactor::Core| {
            let core = core.clone();
            let shared = Rc::new(RefCell::new(History::default()));
            let running = Rc::new(RefCell::new(WRITERS));
            let io = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
            for writer in 0..WRITERS {
                let (core, shared, running) = (core.clone(), shared.clone(), running.clone());
                let (io, ends) = (io.clone(), ends.clone());
                core.clone().spawn(async move {
                    let mut rng = WyRand::new(seed * WRITERS + writer);
                    let mut buffer = core.pool().take(BLOCK).unwrap();
                    for round in 1u64.. {
                        if ends.load(Ordering::SeqCst) || round > rounds {
                            break;
                        }
                        let lba = rng.below(BLOCKS / WRITERS) * WRITERS + writer;
                        let (value, is_durable) = (round << 8 | writer | 0x80, rng.below(2) == 0);
                        buffer
                            .as_mut_slice()
                            .chunks_mut(8)
                            .for_each(|at| at.copy_from_slice(&value.to_le_bytes()));
                        let index = {
                            let mut history = shared.borrow_mut();
                            let now = history.cuts.len() as u64;
                            history.writes.push((lba, value, now, None));
                            history.writes.len() - 1
                        };
                        let written = if is_durable {
                            io.write_durable(lba, buffer).await
                        } else {
                            io.write(lba, buffer).await
                        };
                        buffer = written.unwrap_or_else(|(status, _)| panic!("seed {seed}: {status}"));
                        if is_durable {
                            let mut history = shared.borrow_mut();
                            let now = history.cuts.len() as u64;
                            history.writes[index].3 = Some(now);
                        }
                        core.sleep_ns(rng.below(100_000)).await;
                    }
                    *running.borrow_mut() -= 1;
                });
            }
            let core_of_task = core.clone();
            core.spawn(async move {
                while *running.borrow() > 0 {
                    let cut = [disks[0].log_len(), disks[1].log_len()];
                    {
                        let mut history = shared.borrow_mut();
                        if history.cuts.last() != Some(&cut) {
                            history.cuts.push(cut);
                        }
                    }
                    // Longer than it takes to ask for it, so that others run.
                    core_of_task.sleep_ns(2000).await;
                }
                let cut = [disks[0].log_len(), disks[1].log_len()];
                shared.borrow_mut().cuts.push(cut);
                *kept.lock().unwrap() = Some(shared.take());
            });
        };
        program.handle().post(run).unwrap();
        Workload { stop, history }
    }

    /// Lets the writers end their rounds, or `stops` them before.
    fn end(self, program: &Program, stops: bool) -> History {
        self.stop.store(stops, Ordering::SeqCst);
        program.until("the writers end", || self.history.lock().unwrap().is_some());
        self.history.lock().unwrap().take().unwrap()
    }
}

/// Runs a workload on a mirror, with `disturb` beside it, and crashes at some of its moments.
fn crash(seed: u64, stops: bool, disturb: impl FnOnce(&Program)) {
    let program = Program::start();
    let disks = ["A", "B"]
        .map(|name| CrashDisk::create(&program.registry, name, OFFSET + BLOCKS, BLOCK as u32, seed).unwrap());
    program.wait();
    let uuids = ["A", "B"].map(|name| program.registry.find(name).unwrap().uuid().to_string());
    let params = json!({ "name": "r", "raid_level": "raid1", "base_bdevs": ["A", "B"], "superblock": true });
    program.call("bdev_raid_create", params);
    // Log entries of the creation count as well.
    let rounds = if stops { ROUNDS_MAX } else { 150 };
    let workload = Workload::start(&program, disks.clone(), seed, rounds);
    disturb(&program);
    let history = workload.end(&program, stops);
    assert!(history.writes.len() > 10, "{} writes", history.writes.len());
    let mut rng = WyRand::new(seed);
    let mut cuts: Vec<usize> = (0..12).map(|_| rng.below(history.cuts.len() as u64) as usize).collect();
    cuts.push(history.cuts.len() - 1);
    for cut in cuts {
        let image_seed = rng.below(u64::MAX);
        let images =
            [0, 1].map(|index| disks[index].image(history.cuts[cut][index], image_seed + index as u64));
        check(
            &format!("seed {seed} cut {cut} of {}", history.cuts.len()),
            &images,
            &uuids,
            &history,
            cut as u64,
        );
    }
}

fn check(what: &str, images: &[Vec<u8>; 2], uuids: &[String; 2], history: &History, cut: u64) {
    let program = Program::start();
    for (name, (image, uuid)) in ["A", "B"].iter().zip(images.iter().zip(uuids)) {
        program.medium(name, OFFSET + BLOCKS);
        program.write_image(&format!("{name}-medium"), image);
        program.insert_with(name, uuid);
    }
    // What is read before it is copied is what is there afterwards.
    let before = program.contents("r");
    program.until_in_sync("r");
    let contents = program.contents("r");
    assert!(before == contents, "{what}: a read was of another version");
    let data = |name: &str| program.contents(name)[OFFSET as usize * BLOCK..].to_vec();
    let (one, other) = (data("A"), data("B"));
    for lba in 0..BLOCKS {
        let range = lba as usize * BLOCK..(lba as usize + 1) * BLOCK;
        assert!(one[range.clone()] == other[range.clone()], "{what}: members differ in block {lba}");
        let value = u64::from_le_bytes(contents[range.start..range.start + 8].try_into().unwrap());
        let allowed = history.allowed(lba, cut);
        assert!(allowed.contains(&value), "{what}: block {lba} has {value:#x}, not one of {allowed:#x?}");
    }
}

fn seeds() -> std::ops::Range<u64> {
    let first = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    first..first + 3
}

#[test]
fn what_was_acknowledged_survives_a_crash_and_members_are_alike() {
    for seed in seeds() {
        crash(seed, false, |_| {});
    }
}

#[test]
fn regions_that_leave_the_bitmap_are_alike_after_a_crash() {
    for seed in seeds() {
        crash(seed, false, |program| {
            for _ in 0..10 {
                // Marks the mirror clean as far as it is.
                program.plane.drain();
            }
        });
    }
}

#[test]
fn a_crash_while_a_member_goes_and_returns_loses_nothing() {
    for seed in seeds() {
        crash(seed, true, |program| {
            program.call("bdev_raid_remove_base_bdev", json!({ "name": "B" }));
            program.call("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "B" }));
            program.until_in_sync("r");
            program.call("bdev_raid_remove_base_bdev", json!({ "name": "A" }));
            program.plane.drain();
            program.call("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "A" }));
            program.until_in_sync("r");
        });
    }
}
