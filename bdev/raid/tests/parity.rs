//! raid5f: the layout of SPDK, whole stripes only, members lost, returned and replaced at every step.
#![allow(clippy::unwrap_used)]

mod rig;

use accel::{AccelOp, Engine, InjectType, Injection};
use bdev::error;
use bdev::error::{FaultAction, FaultInjection};
use bdev_raid::ParityLayout;
use block_io::{Op, Status};
use control::json::{Value, json};
use proptest::prelude::*;
use rig::{BLOCK, OFFSET, Program};

/// Blocks of a strip: 4 KiB.
const STRIP: u64 = 8;
/// Rows of a member: 16 stripes, so 8 regions of 64 KiB where there are three members.
const ROWS: u64 = 16 * STRIP;

fn params(members: usize, superblock: bool) -> Value {
    let bases: Vec<String> = (0..members).map(|index| format!("m{index}")).collect();
    json!({
        "name": "r", "raid_level": "raid5f", "strip_size_kb": 4, "base_bdevs": bases,
        "superblock": superblock,
    })
}

/// An array of members `m0`, `m1`, … that can be pulled.
fn created(members: usize, superblock: bool) -> Program {
    let program = Program::start();
    for index in 0..members {
        let name = format!("m{index}");
        program.medium(&name, OFFSET + ROWS);
        program.insert(&name, index as u64);
    }
    assert_eq!(program.call("bdev_raid_create", params(members, superblock)), json!(true));
    program
}

fn layout(members: usize) -> ParityLayout {
    ParityLayout::new(members, STRIP as u32)
}

/// Contents that differ from block to block.
fn pattern(seed: u64, blocks: u64) -> Vec<u8> {
    let block = |index: u64| (seed * 1_000_003 + index).to_le_bytes().repeat(BLOCK / 8);
    (0..blocks).flat_map(block).collect()
}

/// The rows of each member, whose exclusive or is zero.
fn rows(program: &Program, members: usize, first: u64) -> Vec<Vec<u8>> {
    let of = |index: usize| {
        let bytes = program.contents(&format!("m{index}"));
        bytes[first as usize * BLOCK..].to_vec()
    };
    (0..members).map(of).collect()
}

fn has_parity(rows: &[Vec<u8>]) -> bool {
    (0..rows[0].len()).all(|at| rows.iter().fold(0, |sum, row| sum ^ row[at]) == 0)
}

#[test]
fn stripes_are_where_spdk_has_them_and_only_whole_ones_are_written() {
    for members in [3, 4] {
        for superblock in [false, true] {
            let program = created(members, superblock);
            let shape = layout(members);
            let stripe = shape.stripe_blocks();
            let shown = program.show("r");
            // Without a superblock, data begins at block 0.
            let first = if superblock { OFFSET } else { 0 };
            let stripes = if superblock { 16 } else { (OFFSET + ROWS) / STRIP };
            assert_eq!(shown["num_blocks"], json!(stripes * stripe));
            assert_eq!(shown["write_unit_size"], json!(stripe));
            assert_eq!(shown["driver_specific"]["raid"]["raid_level"], json!("raid5f"));
            assert_eq!(shown["supported_io_types"]["unmap"], json!(false));
            let contents = pattern(7, 6 * stripe);
            program.write("r", 0, &contents).unwrap();
            let rows = rows(&program, members, first);
            for lba in 0..6 * stripe {
                let piece = shape.piece(lba, 1);
                let at = piece.lba as usize * BLOCK;
                let expected = &contents[lba as usize * BLOCK..][..BLOCK];
                assert_eq!(&rows[piece.place][at..at + BLOCK], expected, "block {lba}");
            }
            assert!(has_parity(&rows));
            for (lba, blocks) in [(0, 1), (1, stripe), (STRIP, stripe), (stripe, stripe - 1), (0, stripe + 1)]
            {
                let refused = program.write("r", lba, &pattern(9, blocks)).unwrap_err();
                assert_eq!(refused, Status::INVALID_FIELD.do_not_retry(), "{blocks} at {lba}");
            }
            // Of the last one the whole stripe was written, as the layer divides requests.
            assert_eq!(
                program.read("r", stripe, 5 * stripe as usize * BLOCK).unwrap(),
                contents[stripe as usize * BLOCK..]
            );
            for (lba, blocks) in [(0, 1), (3, STRIP), (STRIP - 1, stripe), (5, 4 * stripe + 1)] {
                let found = program.read("r", stripe + lba, blocks as usize * BLOCK).unwrap();
                let at = (stripe + lba) as usize * BLOCK;
                let expected = contents.get(at..at + blocks as usize * BLOCK);
                if let Some(expected) = expected {
                    assert_eq!(found, expected, "{blocks} at {lba}");
                }
            }
        }
    }
}

#[test]
fn what_is_no_raid5f_is_rejected() {
    let program = Program::start();
    for (index, name) in (0..).zip(["m0", "m1", "m2"]) {
        program.malloc(name, OFFSET + ROWS, index);
    }
    for (bases, strip_kb, reason) in [
        (&["m0", "m1"][..], 4, "3 to 64 members"),
        (&["m0", "m1", "m2"], 0, "no power of two"),
        (&["m0", "m1", "m2"], 1 << 18, "more than 268435456"),
    ] {
        let params = json!({
            "name": "r", "raid_level": "raid5f", "strip_size_kb": strip_kb, "base_bdevs": bases,
        });
        let (code, message) = program.failure("bdev_raid_create", params);
        let is_named = message.contains(reason) || message.contains("not a power of two");
        assert!(code == -22 && is_named, "{message}");
    }
    assert!(program.registry.claims().is_empty());
}

#[test]
fn a_read_error_is_answered_by_the_others_and_written_again() {
    let program = Program::start();
    for (index, name) in (0..).zip(["m0", "m1", "m2"]) {
        program.malloc(name, OFFSET + ROWS, index);
        program.call("bdev_error_create", json!({ "base_name": name, "uuid": rig::uuid(10 + index) }));
        program.wait();
    }
    let mut params = params(3, true);
    params["base_bdevs"] = json!(["EE_m0", "EE_m1", "EE_m2"]);
    program.call("bdev_raid_create", params);
    let contents = pattern(1, 16 * 2 * STRIP);
    program.write("r", 0, &contents).unwrap();
    let fail = |base: &str| {
        let fault = FaultInjection::once(Some(Op::Read), FaultAction::Fail(Status::UNRECOVERED_READ_ERROR));
        error::inject(&program.registry, base, fault).unwrap();
    };
    // The medium has lost it, which the rewrite repairs.
    program.write_lost("m0", OFFSET + 2);
    fail("EE_m0");
    assert_eq!(program.read("r", 0, 4 * BLOCK).unwrap(), contents[..4 * BLOCK]);
    program.until("it is written again", || {
        program.read("m0", OFFSET + 2, BLOCK).unwrap() == contents[2 * BLOCK..3 * BLOCK]
    });
    assert_eq!(program.members("r").len(), 3);
    fail("EE_m0");
    fail("EE_m1");
    assert!(program.read("r", 0, BLOCK).is_err());
    assert_eq!(program.members("r").len(), 3, "what two cannot read says nothing of the rest");
}

#[test]
fn a_member_that_fails_a_write_is_recorded_and_the_next_one_is_the_users_error() {
    let program = Program::start();
    for (index, name) in (0..).zip(["m0", "m1", "m2"]) {
        program.malloc(name, OFFSET + ROWS, index);
        program.call("bdev_error_create", json!({ "base_name": name, "uuid": rig::uuid(10 + index) }));
        program.wait();
    }
    let mut params = params(3, true);
    params["base_bdevs"] = json!(["EE_m0", "EE_m1", "EE_m2"]);
    program.call("bdev_raid_create", params);
    let stripe = 2 * STRIP;
    program.write("r", 0, &pattern(1, stripe)).unwrap();
    let fail = |base: &str| {
        let fault = FaultInjection::once(Some(Op::Write), FaultAction::Fail(Status::WRITE_FAULT));
        error::inject(&program.registry, base, fault).unwrap();
    };
    fail("EE_m1");
    program.write("r", 0, &pattern(2, stripe)).unwrap();
    let superblock = wire_raid::RaidSuperblock::decode(&program.read("m0", 0, 1024).unwrap()).unwrap();
    assert_eq!(superblock.members[1].state, wire_raid::MemberState::Failed);
    assert_eq!(superblock.level, wire_raid::RaidLevel::Raid5f);
    assert_eq!(program.read("r", 0, stripe as usize * BLOCK).unwrap(), pattern(2, stripe));
    fail("EE_m2");
    assert!(program.write("r", stripe, &pattern(3, stripe)).is_err());
    assert_eq!(program.members("r"), ["EE_m0", "EE_m2"]);
    program.write("r", stripe, &pattern(4, stripe)).unwrap();
    assert_eq!(program.read("r", 0, stripe as usize * BLOCK).unwrap(), pattern(2, stripe));
    assert_eq!(program.read("r", stripe, stripe as usize * BLOCK).unwrap(), pattern(4, stripe));
}

#[test]
fn the_parity_is_of_the_acceleration_framework() {
    let program = created(3, false);
    let accel = program.registry.accel().clone();
    let executed = || accel.stats()[AccelOp::Xor.index()].executed;
    let before = executed();
    program.write("r", 0, &pattern(1, 4 * STRIP)).unwrap();
    assert_eq!(executed(), before + 2, "one a stripe");
    assert!(accel.assign(AccelOp::Xor, Engine::Error));
    let injection = Injection { kind: InjectType::Failure, count: 1, interval: 0, errno: 5 };
    accel.inject(AccelOp::Xor, injection);
    let refused = program.write("r", 0, &pattern(2, 2 * STRIP)).unwrap_err();
    assert_eq!(refused, Status::INTERNAL_ERROR);
    let bytes = 2 * STRIP as usize * BLOCK;
    assert_eq!(program.read("r", 0, bytes).unwrap(), pattern(1, 4 * STRIP)[..bytes]);
    program.write("r", 0, &pattern(3, 2 * STRIP)).unwrap();
    assert_eq!(program.read("r", 0, bytes).unwrap(), pattern(3, 2 * STRIP));
}

#[test]
fn an_array_that_lacks_a_member_starts_again_without_it_and_takes_it_back() {
    let stripe = 2 * STRIP;
    let (mut images, contents) = {
        let program = created(3, true);
        program.write("r", 0, &pattern(1, 16 * stripe)).unwrap();
        program.call("bdev_raid_remove_base_bdev", json!({ "name": "m1" }));
        program.write("r", 3 * stripe, &pattern(2, stripe)).unwrap();
        let contents = program.contents("r");
        program.call("bdev_raid_delete", json!({ "name": "r" }));
        let images: Vec<Vec<u8>> = (0..3).map(|index| program.contents(&format!("m{index}"))).collect();
        (images, contents)
    };
    let program = Program::start();
    program.disk("m0", &images[0], 0);
    assert!(program.raids("online").is_empty());
    program.disk("m2", &images[2], 2);
    assert_eq!(program.members("r"), ["m0", "m2"]);
    assert!(program.contents("r") == contents, "the member that is missing is made of the others");
    // It is stale, and gets what it lacks.
    program.disk("m1", &images[1], 1);
    program.until_in_sync("r");
    assert!(program.contents("r") == contents);
    assert!(has_parity(&rows(&program, 3, OFFSET)));
    program.call("bdev_raid_remove_base_bdev", json!({ "name": "m0" }));
    assert!(program.contents("r") == contents, "without another one");
    drop(program);
    // Two that say that all are there start by request only.
    images[1].truncate(0);
    let program = created(3, true);
    program.write("r", 0, &contents).unwrap();
    program.call("bdev_raid_delete", json!({ "name": "r" }));
    let images: Vec<Vec<u8>> = (0..3).map(|index| program.contents(&format!("m{index}"))).collect();
    drop(program);
    let program = Program::start();
    program.disk("m0", &images[0], 0);
    let (code, message) = program.failure("bdev_raid_start_degraded", json!({ "name": "r" }));
    assert!(code == -22 && message.contains("lacks two members"), "{message}");
    program.disk("m1", &images[1], 1);
    assert!(program.raids("online").is_empty());
    program.call("bdev_raid_start_degraded", json!({ "name": "r" }));
    assert!(program.contents("r") == contents);
}

/// A step of the model test.
#[derive(Clone, Debug)]
enum Step {
    Write { stripe: u64, count: u64, seed: u64 },
    Read { lba: u64, blocks: u64 },
    Pull(usize),
    Return,
    Replace,
    FailWrite(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..16u64, 1..4u64, any::<u32>())
            .prop_map(|(stripe, count, seed)| Step::Write { stripe, count, seed: seed.into() }),
        4 => (any::<u64>(), any::<u64>()).prop_map(|(lba, blocks)| Step::Read { lba, blocks }),
        1 => (0..4usize).prop_map(Step::Pull),
        1 => Just(Step::Return),
        1 => Just(Step::Replace),
        1 => (0..4usize).prop_map(Step::FailWrite),
    ];
    prop::collection::vec(step, 1..24)
}

/// An array on error devices on devices that can be pulled.
struct Modelled {
    program: Program,
    members: usize,
    model: Vec<u8>,
    /// The place of the member that is gone, and the name of its device if that is there.
    gone: Option<(usize, Option<String>)>,
    /// The device in each place, below its error device.
    names: Vec<String>,
    made: u64,
}

impl Modelled {
    fn new(members: usize) -> Modelled {
        let program = Program::start();
        let mut modelled =
            Modelled { program, members, model: Vec::new(), gone: None, names: Vec::new(), made: 0 };
        modelled.names = (0..members).map(|_| modelled.device()).collect();
        let bases: Vec<String> = modelled.names.iter().map(|name| format!("EE_{name}")).collect();
        let mut params = params(members, true);
        params["base_bdevs"] = json!(bases);
        modelled.program.call("bdev_raid_create", params);
        let blocks = modelled.program.show("r")["num_blocks"].as_u64().unwrap();
        modelled.model = vec![0; blocks as usize * BLOCK];
        modelled
    }

    fn device(&mut self) -> String {
        let name = format!("d{}", self.made);
        self.program.malloc(&name, OFFSET + ROWS, 100 + self.made);
        let params = json!({ "base_name": name, "uuid": rig::uuid(200 + self.made) });
        self.program.call("bdev_error_create", params);
        self.program.wait();
        self.made += 1;
        name
    }

    fn step(&mut self, step: &Step) {
        let stripe = (self.members as u64 - 1) * STRIP;
        let total = self.model.len() as u64 / BLOCK as u64;
        match step {
            Step::Write { stripe: first, count, seed } => {
                let lba = first * stripe;
                let blocks = (count * stripe).min(total - lba);
                let data = pattern(*seed, blocks);
                self.program.write("r", lba, &data).unwrap();
                self.model[lba as usize * BLOCK..][..data.len()].copy_from_slice(&data);
            }
            Step::Read { lba, blocks } => {
                let lba = lba % total;
                let blocks = blocks % (total - lba).min(4 * stripe) + 1;
                let blocks = blocks.min(total - lba);
                let found = self.program.read("r", lba, blocks as usize * BLOCK).unwrap();
                let expected = &self.model[lba as usize * BLOCK..][..found.len()];
                assert!(found == expected, "{blocks} blocks at {lba}");
            }
            Step::Pull(place) if self.gone.is_none() => {
                let place = place % self.members;
                let name = self.names[place].clone();
                self.program.call("bdev_raid_remove_base_bdev", json!({ "name": format!("EE_{name}") }));
                self.gone = Some((place, Some(name)));
            }
            Step::FailWrite(place) if self.gone.is_none() => {
                let place = place % self.members;
                let name = self.names[place].clone();
                let fault = FaultInjection::once(Some(Op::Write), FaultAction::Fail(Status::WRITE_FAULT));
                error::inject(&self.program.registry, &format!("EE_{name}"), fault).unwrap();
                let data = pattern(place as u64, stripe);
                self.program.write("r", 0, &data).unwrap();
                self.model[..data.len()].copy_from_slice(&data);
                let members = self.members - 1;
                self.program.until("it is released", || self.program.members("r").len() == members);
                self.gone = Some((place, Some(name)));
            }
            Step::Return => {
                if let Some((place, Some(name))) = self.gone.clone() {
                    self.join(place, &name);
                }
            }
            Step::Replace => {
                if let Some((place, _)) = self.gone.clone() {
                    let name = self.device();
                    self.join(place, &name);
                }
            }
            Step::Pull(_) | Step::FailWrite(_) => {}
        }
    }

    /// Adds a member, and lets the copy run while the next steps do.
    fn join(&mut self, place: usize, name: &str) {
        let params = json!({ "raid_bdev": "r", "base_bdev": format!("EE_{name}") });
        self.program.call("bdev_raid_add_base_bdev", params);
        self.names[place] = name.to_string();
        self.program.until_in_sync("r");
        self.gone = None;
    }

    fn check(mut self) {
        let contents = self.program.contents("r");
        assert!(contents == self.model, "with the members that there are");
        if let Some((place, Some(name))) = self.gone.clone() {
            self.join(place, &name);
        }
        let names = self.names.clone();
        let rows: Vec<Vec<u8>> = names
            .iter()
            .map(|name| self.program.contents(name)[OFFSET as usize * BLOCK..].to_vec())
            .collect();
        assert!(has_parity(&rows), "the exclusive or of all members is zero");
        for place in 0..self.members {
            let name = format!("EE_{}", self.names[place]);
            self.program.call("bdev_raid_remove_base_bdev", json!({ "name": name }));
            assert!(self.program.contents("r") == self.model, "without member {place}");
            self.program.call("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": name }));
            self.program.until_in_sync("r");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn the_array_is_its_model_whatever_member_goes_returns_or_is_replaced(
        members in 3..5usize,
        steps in steps(),
    ) {
        let mut modelled = Modelled::new(members);
        for step in &steps {
            modelled.step(step);
        }
        modelled.check();
    }
}

#[test]
fn each_member_goes_after_each_step() {
    let stripe = 2 * STRIP;
    for place in 0..3 {
        for at in 0..4 {
            let mut modelled = Modelled::new(3);
            for round in 0..4u64 {
                modelled.step(&Step::Write { stripe: round * 3, count: 3, seed: round });
                if round == at {
                    modelled.step(&Step::Pull(place));
                }
                modelled.step(&Step::Read { lba: round * stripe + 3, blocks: 3 * stripe });
            }
            modelled.check();
        }
    }
}
