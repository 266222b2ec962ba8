//! raid1: members lost, returned and replaced under load, read errors, and what is copied.
#![allow(clippy::unwrap_used)]

mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bdev::error::{FaultAction, FaultInjection};
use bdev::{Access, AsyncChannel, BlockDevice, error};
use block_io::{Op, Status};
use control::json::{Value, json};
use random::WyRand;
use rig::{BLOCK, OFFSET, Program};

/// Blocks of the array: 4 MiB.
const BLOCKS: u64 = 8192;

fn create(program: &Program, bases: &[&str], superblock: bool) {
    let params = json!({ "name": "r", "raid_level": "raid1", "base_bdevs": bases, "superblock": superblock });
    assert_eq!(program.call("bdev_raid_create", params), json!(true));
}

/// With members `m0` and `m1` that can be pulled, of an array with a superblock.
fn created(superblock: bool) -> Program {
    let program = Program::start();
    for (index, name) in (0..).zip(["m0", "m1"]) {
        program.medium(name, OFFSET + BLOCKS);
        program.insert(name, index);
    }
    create(&program, &["m0", "m1"], superblock);
    program
}

/// Writers of a mirror, each of blocks of its own; it checks what it reads.
struct Load {
    stop: Arc<AtomicBool>,
    running: Arc<AtomicU64>,
    done: Arc<AtomicU64>,
}

const WRITERS: u64 = 8;

impl Load {
    fn start(program: &Program, device: &Arc<BlockDevice>) -> Load {
        let load = Load { stop: Arc::default(), running: Arc::default(), done: Arc::default() };
        for writer in 0..WRITERS {
            let descriptor = program.registry.open(device.name(), Access::ReadWrite).unwrap();
            let (stop, running, done) = (load.stop.clone(), load.running.clone(), load.done.clone());
            running.fetch_add(1, Ordering::SeqCst);
            let blocks = device.geometry().blocks / WRITERS;
            let run = move |core: &reactor::Core| {
                let core = core.clone();
                core.clone().spawn(async move {
                    let io = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
                    let mut rng = WyRand::new(writer);
                    let mut model = vec![None; blocks as usize];
                    let mut buffer = core.pool().take(BLOCK).unwrap();
                    for round in 1u64.. {
                        if stop.load(Ordering::SeqCst) {
                            break;
                        }
                        let at = rng.below(blocks);
                        let lba = writer * blocks + at;
                        let value = round << 8 | writer;
                        buffer.as_mut_slice()[..8].copy_from_slice(&value.to_le_bytes());
                        buffer = io
                            .write(lba, buffer)
                            .await
                            .unwrap_or_else(|(status, _)| panic!("write {lba}: {status}"));
                        model[at as usize] = Some(value);
                        let at = rng.below(blocks);
                        buffer = io
                            .read(writer * blocks + at, buffer)
                            .await
                            .unwrap_or_else(|(status, _)| panic!("read: {status}"));
                        if let Some(expected) = model[at as usize] {
                            let found = u64::from_le_bytes(buffer.as_slice()[..8].try_into().unwrap());
                            assert_eq!(found, expected, "block {at} of writer {writer}");
                        }
                        done.fetch_add(1, Ordering::SeqCst);
                    }
                    running.fetch_sub(1, Ordering::SeqCst);
                });
            };
            program.handle().post(run).unwrap();
        }
        load
    }

    /// Waits for some more rounds.
    fn proceeds(&self, program: &Program) {
        let before = self.done.load(Ordering::SeqCst);
        program.until("writers proceed", || self.done.load(Ordering::SeqCst) > before + 200);
    }

    fn stop(self, program: &Program) {
        self.stop.store(true, Ordering::SeqCst);
        program.until("writers end", || self.running.load(Ordering::SeqCst) == 0);
    }
}

fn are_alike(program: &Program, offset: u64) {
    let data = |name: &str| program.contents(name)[offset as usize * BLOCK..].to_vec();
    let (one, other) = (data("m0"), data("m1"));
    let differing = one.chunks(BLOCK).zip(other.chunks(BLOCK)).filter(|(one, other)| one != other);
    assert_eq!(differing.count(), 0, "blocks differ");
    assert!(one.iter().any(|byte| *byte != 0));
}

#[test]
fn a_member_goes_returns_and_is_replaced_under_load() {
    for superblock in [true, false] {
        let program = created(superblock);
        let device = program.registry.find("r").unwrap();
        let load = Load::start(&program, &device);
        load.proceeds(&program);
        // It goes, and its removal does not wait for the others.
        program.pull("m1");
        load.proceeds(&program);
        let raid = program.raid("r");
        assert_eq!((&raid["num_base_bdevs_operational"], &raid["state"]), (&json!(1), &json!("online")));
        assert_eq!(raid["base_bdevs_list"][1]["name"], Value::Null);
        program.insert("m1", 1);
        if !superblock {
            program.call("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "m1" }));
        }
        program.until_in_sync("r");
        load.proceeds(&program);
        // The other one, by the method.
        assert_eq!(program.call("bdev_raid_remove_base_bdev", json!({ "name": "m0" })), json!(true));
        load.proceeds(&program);
        assert_eq!(program.members("r"), ["m1"]);
        assert_eq!(program.show("m0")["claimed"], false);
        // A new one in its place.
        program.malloc("new", OFFSET + BLOCKS, 9);
        program.call("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "new" }));
        program.until_in_sync("r");
        load.proceeds(&program);
        program.pull("m1");
        load.proceeds(&program);
        assert_eq!(program.members("r"), ["new"]);
        // Data of the load was compared all the time, now from the new one alone.
        load.stop(&program);
        drop(device);
        let saved = program.saved();
        let call = saved.iter().find(|call| call["method"] == "bdev_raid_create");
        assert_eq!(call.is_none(), superblock);
        program.call("bdev_malloc_delete", json!({ "name": "new" }));
        program.until("the mirror goes with its last member", || program.registry.find("r").is_none());
    }
}

#[test]
fn members_are_alike_after_load_with_a_loss() {
    let program = created(true);
    let device = program.registry.find("r").unwrap();
    let load = Load::start(&program, &device);
    for _ in 0..3 {
        load.proceeds(&program);
        program.pull("m1");
        load.proceeds(&program);
        program.insert("m1", 1);
        program.until_in_sync("r");
    }
    load.proceeds(&program);
    load.stop(&program);
    are_alike(&program, OFFSET);
}

#[test]
fn a_member_that_is_lost_while_it_is_copied_to_is_done_without() {
    let program = created(true);
    program.write("r", 0, &[1; BLOCK]).unwrap();
    program.call("bdev_raid_remove_base_bdev", json!({ "name": "m1" }));
    program.call(
        "bdev_raid_set_options",
        json!({ "process_max_bandwidth_mb_sec": 1, "process_window_size_kb": 64 }),
    );
    // The options are those of arrays that are made later.
    program.call("bdev_raid_delete", json!({ "name": "r" }));
    program.call("bdev_examine", json!({ "name": "m0" }));
    program.wait();
    program.malloc("new", OFFSET + BLOCKS, 9);
    program.call("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "new" }));
    program.until("it is copied to", || {
        program.raid("r")["process"]["progress"]["blocks"].as_u64().is_some_and(|blocks| blocks > 0)
    });
    let process = program.raid("r")["process"].clone();
    assert_eq!((&process["type"], &process["target"]), (&json!("rebuild"), &json!("new")), "{process}");
    let add = json!({ "raid_bdev": "r", "base_bdev": "m1" });
    assert_eq!(program.failure("bdev_raid_add_base_bdev", add).0, -1);
    program.call("bdev_malloc_delete", json!({ "name": "new" }));
    program.until("it is done without", || program.members("r") == ["m0"]);
    assert_eq!(program.raid("r")["process"], Value::Null);
    assert_eq!(program.read("r", 0, BLOCK).unwrap(), [1; BLOCK]);
}

#[test]
fn a_read_error_is_answered_from_the_other_member_and_written_again() {
    let program = Program::start();
    for (index, name) in (0..).zip(["m0", "m1"]) {
        program.malloc(name, OFFSET + BLOCKS, index);
        program.call("bdev_error_create", json!({ "base_name": name, "uuid": rig::uuid(10 + index) }));
        program.wait();
    }
    create(&program, &["EE_m0", "EE_m1"], true);
    program.write("r", 8, &[1; 8 * BLOCK]).unwrap();
    let fail = |base: &str, op| {
        let fault = FaultInjection::once(Some(op), FaultAction::Fail(Status::UNRECOVERED_READ_ERROR));
        error::inject(&program.registry, base, fault).unwrap();
    };
    // The medium has lost it, which the rewrite repairs.
    program.write_lost("m0", OFFSET + 8);
    fail("EE_m0", Op::Read);
    assert_eq!(program.read("r", 8, 8 * BLOCK).unwrap(), [1; 8 * BLOCK]);
    program.until("it is written again", || program.read("m0", OFFSET + 8, BLOCK).unwrap() == [1; BLOCK]);
    assert_eq!(program.members("r").len(), 2);
    fail("EE_m0", Op::Read);
    fail("EE_m1", Op::Read);
    assert!(program.read("r", 8, BLOCK).is_err());
    assert_eq!(program.members("r").len(), 2, "what neither can read says nothing of the rest");
}

#[test]
fn a_member_that_fails_a_write_is_recorded_before_the_write_is_acknowledged() {
    let program = Program::start();
    for (index, name) in (0..).zip(["m0", "m1"]) {
        program.malloc(name, OFFSET + BLOCKS, index);
        program.call("bdev_error_create", json!({ "base_name": name, "uuid": rig::uuid(10 + index) }));
        program.wait();
    }
    create(&program, &["EE_m0", "EE_m1"], true);
    program.write("r", 0, &[1; BLOCK]).unwrap();
    let fault = FaultInjection::once(Some(Op::Write), FaultAction::Fail(Status::WRITE_FAULT));
    error::inject(&program.registry, "EE_m0", fault).unwrap();
    program.write("r", 0, &[2; BLOCK]).unwrap();
    let superblock = wire_raid::RaidSuperblock::decode(&program.read("m1", 0, 1024).unwrap()).unwrap();
    assert_eq!(superblock.members[0].state, wire_raid::MemberState::Failed);
    assert_eq!(superblock.sequence, 2);
    assert_eq!(program.read("r", 0, BLOCK).unwrap(), [2; BLOCK]);
    assert_eq!(program.members("r"), ["EE_m1"]);
    // The last one keeps its place, and the user gets the error.
    let fault = FaultInjection::once(Some(Op::Write), FaultAction::Fail(Status::WRITE_FAULT));
    error::inject(&program.registry, "EE_m1", fault).unwrap();
    assert!(program.write("r", 0, &[3; BLOCK]).is_err());
    assert_eq!(program.members("r"), ["EE_m1"]);
    program.write("r", 0, &[4; BLOCK]).unwrap();
}

#[test]
fn reads_are_spread_over_members() {
    let program = created(false);
    let descriptor = program.registry.open("r", Access::ReadWrite).unwrap();
    program.on_core(move |core| async move {
        let io = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
        let done = std::rc::Rc::new(std::cell::Cell::new(0));
        for lba in 0..64 {
            let (io, done, buffer) = (io.clone(), done.clone(), core.pool().take(BLOCK).unwrap());
            core.spawn(async move {
                io.read(lba, buffer).await.map(drop).map_err(|(status, _)| status).unwrap();
                done.set(done.get() + 1);
            });
        }
        while done.get() < 64 {
            core.sleep_ns(1000).await;
        }
    });
    for name in ["m0", "m1"] {
        let stats = program.call("bdev_get_iostat", json!({ "name": name }));
        let reads = stats["bdevs"][0]["num_read_ops"].as_u64().unwrap();
        assert!((20..60).contains(&reads), "{name}: {reads}");
    }
}

#[test]
fn all_is_copied_when_that_is_asked_for() {
    let program = Program::start();
    for (index, name) in (0..).zip(["m0", "m1"]) {
        program.malloc(name, OFFSET + BLOCKS, index);
    }
    program.write("m0", OFFSET + 77, &[1; BLOCK]).unwrap();
    let params = json!({ "name": "r", "raid_level": "1", "base_bdevs": ["m0", "m1"], "superblock": true,
        "resync": "full" });
    program.call("bdev_raid_create", params);
    // From the first one, also before it is copied.
    assert_eq!(program.read("r", 77, BLOCK).unwrap(), [1; BLOCK]);
    program.until_in_sync("r");
    are_alike(&program, OFFSET);
}

fn bytes_written(program: &Program, name: &str) -> u64 {
    let stats = program.call("bdev_get_iostat", json!({ "name": name }));
    stats["bdevs"][0]["bytes_written"].as_u64().unwrap()
}

#[test]
fn a_member_that_returns_gets_what_it_lacks_only() {
    let program = created(true);
    let piece = vec![1; 64 << 10];
    (0..BLOCKS).step_by(128).for_each(|lba| program.write("r", lba, &piece).unwrap());
    program.plane.drain();
    program.pull("m1");
    program.write("r", 1000, &[2; BLOCK]).unwrap();
    // What is done without it is not forgotten when the mirror is marked clean.
    program.plane.drain();
    program.insert("m1", 1);
    program.until_in_sync("r");
    are_alike(&program, OFFSET);
    let written = bytes_written(&program, "m1");
    assert!((BLOCK as u64..512 << 10).contains(&written), "{written} bytes");
    // Another one gets all.
    program.call("bdev_raid_remove_base_bdev", json!({ "name": "m1" }));
    program.malloc("new", OFFSET + BLOCKS, 9);
    program.call("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "new" }));
    program.until_in_sync("r");
    assert!(bytes_written(&program, "new") >= BLOCKS * BLOCK as u64);
}

#[test]
fn a_copy_that_a_restart_has_interrupted_continues() {
    let images = {
        let program = created(true);
        let piece = vec![1; 64 << 10];
        (0..BLOCKS).step_by(128).for_each(|lba| program.write("r", lba, &piece).unwrap());
        program.plane.drain();
        program.call("bdev_raid_remove_base_bdev", json!({ "name": "m1" }));
        program.call("bdev_raid_delete", json!({ "name": "r" }));
        let slow = json!({ "process_max_bandwidth_mb_sec": 2, "process_window_size_kb": 64 });
        program.call("bdev_raid_set_options", slow);
        program.call("bdev_examine", json!({ "name": "m0" }));
        program.wait();
        program.malloc("new", OFFSET + BLOCKS, 9);
        program.call("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "new" }));
        program.until("half of it is copied", || {
            program.raid("r")["process"]["progress"]["percent"].as_u64().is_some_and(|percent| percent > 50)
        });
        program.plane.drain();
        ["m0", "new"].map(|name| program.contents(name))
    };
    let program = Program::start();
    program.disk("m0", &images[0], 0);
    assert_eq!(program.members("r"), ["m0"], "the other one is being copied to");
    program.disk("m1", &images[1], 9);
    program.until_in_sync("r");
    are_alike(&program, OFFSET);
    let written = bytes_written(&program, "m1");
    assert!((64 << 10..BLOCKS * BLOCK as u64 * 6 / 10).contains(&written), "{written} bytes");
}

/// Members of a mirror that was closed, of which the second differs in a block.
fn differing() -> [Vec<u8>; 2] {
    let program = created(true);
    program.write("r", 0, &[1; BLOCK]).unwrap();
    program.plane.drain();
    let mut images = ["m0", "m1"].map(|name| program.contents(name));
    images[1][(OFFSET as usize + 5000) * BLOCK] = 7;
    images
}

fn assembled(images: &[Vec<u8>; 2], options: Value) -> bool {
    let program = Program::start();
    program.call("bdev_raid_set_options", options);
    (0..).zip(images).for_each(|(index, image)| program.disk(&format!("m{index}"), image, index));
    program.until_in_sync("r");
    let data = |name: &str| program.contents(name)[OFFSET as usize * BLOCK..].to_vec();
    data("m0") == data("m1")
}

#[test]
fn a_bitmap_is_believed_only_if_no_other_has_opened_the_array_since() {
    let mut images = differing();
    assert!(!assembled(&images, json!({})), "nothing was written since, it says");
    assert!(assembled(&images, json!({ "resync": "full" })));
    // As SPDK, which increments the number when it opens the array.
    for image in &mut images {
        let mut superblock = wire_raid::RaidSuperblock::decode(image).unwrap();
        superblock.sequence += 1;
        let bytes = superblock.encode();
        image[..bytes.len()].copy_from_slice(&bytes);
    }
    assert!(assembled(&images, json!({})));
}

#[test]
fn a_member_that_was_used_without_the_others_does_not_return() {
    // Both are of one mirror, and each was used without the other.
    let images = differing();
    let alone = |index: usize| {
        let program = Program::start();
        (0..).zip(&images).for_each(|(at, image)| program.disk(&format!("m{at}"), image, at));
        program.until_in_sync("r");
        program.call("bdev_raid_remove_base_bdev", json!({ "name": format!("m{}", 1 - index) }));
        program.write("r", 9, &[index as u8 + 1; BLOCK]).unwrap();
        program.contents(&format!("m{index}"))
    };
    let (one, other) = (alone(0), alone(1));
    let program = Program::start();
    program.disk("m0", &one, 0);
    program.disk("m1", &other, 1);
    assert_eq!(program.members("r"), ["m0"]);
    assert_eq!(program.read("r", 9, BLOCK).unwrap(), [1; BLOCK]);
    assert_eq!(program.read("m1", OFFSET + 9, BLOCK).unwrap(), [2; BLOCK], "it is as it was");
    let add = json!({ "raid_bdev": "r", "base_bdev": "m1" });
    let (code, message) = program.failure("bdev_raid_add_base_bdev", add);
    assert_eq!(code, -22);
    assert!(message.starts_with("m1 was used without the present members of the array r"), "{message}");
}

#[test]
fn a_mirror_starts_without_a_member_that_does_not_return_on_request() {
    let images = {
        let program = created(true);
        let piece = vec![1; 64 << 10];
        (0..BLOCKS).step_by(128).for_each(|lba| program.write("r", lba, &piece).unwrap());
        program.plane.drain();
        ["m0", "m1"].map(|name| program.contents(name))
    };
    let program = Program::start();
    let start = json!({ "name": "r" });
    assert_eq!(program.failure("bdev_raid_start_degraded", start.clone()).0, -19);
    program.disk("m1", &images[1], 1);
    assert_eq!(program.raid("r")["state"], "configuring");
    assert_eq!(program.call("bdev_raid_start_degraded", start.clone()), json!(true));
    assert_eq!(program.members("r"), ["m1"]);
    assert_eq!(program.failure("bdev_raid_start_degraded", start).0, -22);
    program.write("r", 300, &[2; BLOCK]).unwrap();
    // It does return, later: with what it lacks.
    program.disk("m0", &images[0], 0);
    program.until_in_sync("r");
    are_alike(&program, OFFSET);
    let written = bytes_written(&program, "m0");
    assert!((BLOCK as u64..512 << 10).contains(&written), "{written} bytes");
    let superblock = wire_raid::RaidSuperblock::decode(&program.read("m0", 0, 1024).unwrap()).unwrap();
    assert!(superblock.members.iter().all(|member| member.state == wire_raid::MemberState::Configured));
}

#[test]
fn a_member_that_is_removed_from_an_idle_mirror_is_free_at_once() {
    let program = created(true);
    let descriptor = program.registry.open("r", Access::ReadWrite).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (opened, ends) = (Arc::new(AtomicBool::new(false)), stop.clone());
    let is_open = opened.clone();
    let user = move |core: &reactor::Core| {
        let core = core.clone();
        core.clone().spawn(async move {
            // It is used once and is idle then.
            let mut channel = descriptor.channel(&core).unwrap();
            let buffer = core.pool().take(BLOCK).unwrap();
            block_io::Channel::submit(
                &mut channel,
                &mut vec![block_io::Request::write(block_io::Tag(0), 0, 1, buffer)],
            );
            let mut sink = Vec::new();
            while block_io::Channel::poll(&mut channel, &mut sink) == 0 {
                core.sleep_ns(1000).await;
            }
            is_open.store(true, Ordering::SeqCst);
            while !ends.load(Ordering::SeqCst) {
                core.sleep_ns(100_000).await;
            }
            drop(channel);
        });
    };
    program.handle().post(user).unwrap();
    program.until("the user has a channel", || opened.load(Ordering::SeqCst));
    let remove = json!({ "name": "m0" });
    assert_eq!(program.call("bdev_raid_remove_base_bdev", remove.clone()), json!(true));
    assert_eq!(program.show("m0")["claimed"], false);
    let add = json!({ "raid_bdev": "r", "base_bdev": "m0" });
    assert_eq!(program.call("bdev_raid_add_base_bdev", add), json!(true));
    program.until_in_sync("r");
    // So does the deletion of its bdev, and the medium below is free.
    program.call("bdev_passthru_delete", json!({ "name": "m1" }));
    assert_eq!(program.show("m1-medium")["claimed"], false);
    stop.store(true, Ordering::SeqCst);
}
