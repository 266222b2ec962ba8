//! Power failures of raid5f: members as a crash may have left them in the middle of stripes, assembled, and
//! each of them lost afterwards.
#![allow(clippy::unwrap_used)]

mod rig;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use bdev::testing::CrashDisk;
use bdev::{Access, AsyncChannel};
use control::json::json;
use random::WyRand;
use rig::{BLOCK, OFFSET, Program};

const STRIP: u64 = 8;
/// Blocks of a stripe of three members.
const STRIPE: u64 = 2 * STRIP;
const STRIPES: u64 = 64;
const ROWS: u64 = STRIPES * STRIP;
const WRITERS: u64 = 4;
const ROUNDS: u64 = 60;
const MEMBERS: usize = 3;

/// Value of a stripe, when its write was issued, and when it was acknowledged as durable.
#[derive(Clone, Copy)]
struct StripeWrite {
    stripe: u64,
    value: u64,
    issued: u64,
    durable: Option<u64>,
}

#[derive(Default)]
struct History {
    writes: Vec<StripeWrite>,
    /// Lengths of the disks' logs when something had changed.
    cuts: Vec<[usize; MEMBERS]>,
}

impl History {
    /// The values that each block of a stripe may have after a crash at a cut.
    fn allowed(&self, stripe: u64, cut: u64) -> Vec<u64> {
        let mut allowed = vec![0];
        for write in self.writes.iter().filter(|write| write.stripe == stripe && write.issued <= cut) {
            if write.durable.is_some_and(|at| at <= cut) {
                allowed.clear();
            }
            allowed.push(write.value);
        }
        allowed
    }
}

fn run(program: &Program, disks: [CrashDisk; MEMBERS], seed: u64) -> History {
    let history: Arc<Mutex<Option<History>>> = Arc::default();
    let descriptor = program.registry.open("r", Access::ReadWrite).unwrap();
    let kept = history.clone();
    let start = move |core: &reactor::Core| {
        let core = core.clone();
        let shared = Rc::new(RefCell::new(History::default()));
        let running = Rc::new(RefCell::new(WRITERS));
        let io = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
        for writer in 0..WRITERS {
            let (core, shared, running, io) = (core.clone(), shared.clone(), running.clone(), io.clone());
            core.clone().spawn(async move {
                let mut rng = WyRand::new(seed * WRITERS + writer);
                let mut buffer = core.pool().take(STRIPE as usize * BLOCK).unwrap();
                for round in 1..=ROUNDS {
                    let stripe = rng.below(STRIPES / WRITERS) * WRITERS + writer;
                    let (value, is_durable) = (round << 8 | writer | 0x80, rng.below(2) == 0);
                    for block in buffer.as_mut_slice().chunks_mut(BLOCK) {
                        block[..8].copy_from_slice(&value.to_le_bytes());
                    }
                    let index = {
                        let mut history = shared.borrow_mut();
                        let issued = history.cuts.len() as u64;
                        history.writes.push(StripeWrite { stripe, value, issued, durable: None });
                        history.writes.len() - 1
                    };
                    let written = if is_durable {
                        io.write_durable(stripe * STRIPE, buffer).await
                    } else {
                        io.write(stripe * STRIPE, buffer).await
                    };
                    buffer = written.unwrap_or_else(|(status, _)| panic!("seed {seed}: {status}"));
                    if is_durable {
                        let mut history = shared.borrow_mut();
                        let now = history.cuts.len() as u64;
                        history.writes[index].durable = Some(now);
                    }
                    core.sleep_ns(rng.below(100_000)).await;
                }
                *running.borrow_mut() -= 1;
            });
        }
        let core_of_task = core.clone();
        core.spawn(async move {
            loop {
                let is_over = *running.borrow() == 0;
                let cut = [0, 1, 2].map(|index: usize| disks[index].log_len());
                if shared.borrow().cuts.last() != Some(&cut) {
                    shared.borrow_mut().cuts.push(cut);
                }
                if is_over {
                    break;
                }
                // Longer than it takes to ask for it, so that others run.
                core_of_task.sleep_ns(2000).await;
            }
            *kept.lock().unwrap() = Some(shared.take());
        });
    };
    program.handle().post(start).unwrap();
    program.until("the writers end", || history.lock().unwrap().is_some());
    history.lock().unwrap().take().unwrap()
}

const NAMES: [&str; MEMBERS] = ["A", "B", "C"];

fn crash(seed: u64) {
    let program = Program::start();
    let create =
        |name| CrashDisk::create(&program.registry, name, OFFSET + ROWS, BLOCK as u32, seed).unwrap();
    let disks = NAMES.map(create);
    program.wait();
    let uuids = NAMES.map(|name| program.registry.find(name).unwrap().uuid().to_string());
    program.call(
        "bdev_raid_create",
        json!({
            "name": "r", "raid_level": "raid5f", "strip_size_kb": 4, "base_bdevs": NAMES,
            "superblock": true,
        }),
    );
    let history = run(&program, disks.clone(), seed);
    let mut rng = WyRand::new(seed);
    let mut cuts: Vec<usize> = (0..10).map(|_| rng.below(history.cuts.len() as u64) as usize).collect();
    cuts.push(history.cuts.len() - 1);
    for cut in cuts {
        let image_seed = rng.below(u64::MAX - 3);
        let images =
            [0, 1, 2].map(|index| disks[index].image(history.cuts[cut][index], image_seed + index as u64));
        check(&format!("seed {seed} cut {cut}"), &images, &uuids, &history, cut as u64);
    }
}

fn check(what: &str, images: &[Vec<u8>; MEMBERS], uuids: &[String; MEMBERS], history: &History, cut: u64) {
    let program = Program::start();
    for (name, (image, uuid)) in NAMES.iter().zip(images.iter().zip(uuids)) {
        program.medium(name, OFFSET + ROWS);
        program.write_image(&format!("{name}-medium"), image);
        program.insert_with(name, uuid);
    }
    let before = program.contents("r");
    program.until_in_sync("r");
    let contents = program.contents("r");
    assert!(before == contents, "{what}: a read was of another version");
    let rows = NAMES.map(|name| program.contents(name)[OFFSET as usize * BLOCK..].to_vec());
    for at in (0..rows[0].len()).step_by(8) {
        let word = |row: &Vec<u8>| u64::from_le_bytes(row[at..at + 8].try_into().unwrap());
        let sum = rows.iter().fold(0, |sum, row| sum ^ word(row));
        assert_eq!(sum, 0, "{what}: the parity of row {} is of other data", at / BLOCK);
    }
    for (block, bytes) in (0..).zip(contents.chunks(BLOCK)) {
        let value = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let allowed = history.allowed(block / STRIPE, cut);
        assert!(allowed.contains(&value), "{what}: block {block} has {value:#x}, not one of {allowed:#x?}");
    }
    for name in NAMES {
        program.call("bdev_raid_remove_base_bdev", json!({ "name": name }));
        assert!(program.contents("r") == contents, "{what}: without {name}");
        program.call("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": name }));
        program.until_in_sync("r");
    }
}

#[test]
fn the_parity_is_made_again_after_a_crash_in_a_stripe() {
    let first = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    for seed in first..first + 3 {
        crash(seed);
    }
}
