//! raid5f: the layout of SPDK, whole stripes only, members lost, returned and replaced at every step.
#![allow(clippy::unwrap_used)]

mod rig;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use accel::{AccelOp, Engine, InjectType, Injection};
use bdev::error;
use bdev::error::{FaultAction, FaultInjection};
use bdev::{Access, AsyncChannel};
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
    superblock: bool,
    model: Vec<u8>,
    /// The place of the member that is gone, and the name of its device if that is there.
    gone: Option<(usize, Option<String>)>,
    /// The device in each place, below its error device.
    names: Vec<String>,
    made: u64,
}

impl Modelled {
    fn new(members: usize, superblock: bool) -> Modelled {
        let program = Program::start();
        let (model, names) = (Vec::new(), Vec::new());
        let mut modelled = Modelled { program, members, superblock, model, gone: None, names, made: 0 };
        modelled.names = (0..members).map(|_| modelled.device()).collect();
        let bases: Vec<String> = modelled.names.iter().map(|name| format!("EE_{name}")).collect();
        let mut params = params(members, superblock);
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
        let first = if self.superblock { OFFSET } else { 0 };
        let rows: Vec<Vec<u8>> =
            names.iter().map(|name| self.program.contents(name)[first as usize * BLOCK..].to_vec()).collect();
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
        superblock: bool,
        steps in steps(),
    ) {
        let mut modelled = Modelled::new(members, superblock);
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
            let mut modelled = Modelled::new(3, true);
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

#[test]
fn an_array_without_superblocks_is_saved_without_the_member_that_was_removed() {
    let program = created(3, false);
    program.write("r", 0, &pattern(1, 8 * STRIP)).unwrap();
    program.call("bdev_raid_remove_base_bdev", json!({ "name": "m1" }));
    let saved = program.saved();
    let call = saved.iter().find(|call| call["method"] == "bdev_raid_create").unwrap();
    assert_eq!(call["params"]["base_bdevs"], json!(["m0", "removed_base_bdev_1", "m2"]));
    let mut params = call["params"].clone();
    program.call("bdev_raid_delete", json!({ "name": "r" }));
    program.call("bdev_raid_create", params.clone());
    assert_eq!(program.read("r", 0, 8 * STRIP as usize * BLOCK).unwrap(), pattern(1, 8 * STRIP));
    program.call("bdev_raid_delete", json!({ "name": "r" }));
    params["base_bdevs"] = json!(["m0", "removed_base_bdev_1", "removed_base_bdev_2"]);
    let (code, message) = program.failure("bdev_raid_create", params);
    assert_eq!((code, message.as_str()), (-22, "base_bdevs: 1 of 3 members are none of an array"));
}

/// A disk in memory that executes what is in flight in any order, as disks may.
struct ShuffledDisk {
    contents: Arc<Mutex<Vec<u8>>>,
    /// Of the next channel: no two have the same order.
    seed: AtomicU64,
}

struct ShuffledChannel {
    contents: Arc<Mutex<Vec<u8>>>,
    pending: Vec<bdev::Request>,
    rng: random::WyRand,
}

impl bdev::Bdev for ShuffledDisk {
    fn product_name(&self) -> &'static str {
        "Shuffled disk"
    }

    fn geometry(&self) -> bdev::BdevGeometry {
        bdev::BdevGeometry::new(BLOCK as u32, ROWS)
    }

    fn durability(&self) -> bdev::Durability {
        bdev::Durability::None
    }

    fn supports(&self, op: Op) -> bool {
        matches!(op, Op::Read | Op::Write)
    }

    fn open(&self, _core: &reactor::Core) -> Result<bdev::BoxedChannel, bdev::BdevError> {
        let rng = random::WyRand::new(self.seed.fetch_add(1, Ordering::SeqCst));
        Ok(Box::new(ShuffledChannel { contents: self.contents.clone(), pending: Vec::new(), rng }))
    }
}

impl block_io::Channel for ShuffledChannel {
    type Request = bdev::Request;
    type Completion = bdev::Completion;

    fn submit(&mut self, batch: &mut Vec<bdev::Request>) {
        self.pending.append(batch);
    }

    fn poll(&mut self, sink: &mut Vec<bdev::Completion>) -> usize {
        if self.pending.is_empty() || self.rng.below(2) == 0 {
            return 0;
        }
        let index = self.rng.below(self.pending.len() as u64) as usize;
        let mut request = self.pending.swap_remove(index);
        let mut contents = self.contents.lock().unwrap();
        let at = request.lba as usize * BLOCK;
        let range = at..at + request.blocks as usize * BLOCK;
        if let block_io::Payload::Data(data) = &mut request.payload {
            match request.op {
                Op::Write => data.copy_to(0, &mut contents[range]),
                _ => data.copy_from(0, &contents[range]),
            }
        }
        sink.push(request.complete(Status::SUCCESS));
        1
    }

    fn deadline(&self) -> Option<u64> {
        (!self.pending.is_empty()).then_some(0)
    }
}

/// Writers of the same stripes at the same time, and a member that has to be made of the others: the parity is
/// that of the last write of each, and no read has blocks that were never written.
#[test]
fn writes_of_one_stripe_at_the_same_time_take_turns() {
    let program = Program::start();
    let contents = [0, 1, 2].map(|seed| {
        let contents = Arc::new(Mutex::new(vec![0; ROWS as usize * BLOCK]));
        let disk = ShuffledDisk { contents: contents.clone(), seed: AtomicU64::new(seed * 1000) };
        program.registry.register(&format!("d{seed}"), None, &[], Arc::new(disk)).unwrap();
        program.wait();
        contents
    });
    let mut params = params(3, false);
    params["base_bdevs"] = json!(["d0", "d1", "d2"]);
    program.call("bdev_raid_create", params);
    program.write("r", 0, &pattern(0, 4 * STRIP)).unwrap();
    for is_degraded in [false, true] {
        if is_degraded {
            program.call("bdev_raid_remove_base_bdev", json!({ "name": "d0" }));
        }
        let running = Arc::new(AtomicU64::new(8));
        for writer in 0..8u64 {
            let descriptor = program.registry.open("r", Access::ReadWrite).unwrap();
            let running = running.clone();
            let run = move |core: &reactor::Core| {
                let core = core.clone();
                core.clone().spawn(async move {
                    let io = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
                    let mut buffer = core.pool().take(2 * STRIP as usize * BLOCK).unwrap();
                    for round in 0..100u64 {
                        let lba = round % 2 * 2 * STRIP;
                        let value = [writer as u8 + 1, round as u8];
                        buffer.as_mut_slice().chunks_mut(2).for_each(|at| at.copy_from_slice(&value));
                        let written = io.write(lba, buffer).await;
                        buffer = written.unwrap_or_else(|(status, _)| panic!("{status}"));
                        let read = io.read(lba, buffer).await;
                        buffer = read.unwrap_or_else(|(status, _)| panic!("{status}"));
                        let is_written = |block: &[u8]| {
                            let value = [block[0], block[1]];
                            (1..9).contains(&value[0])
                                && value[1] < 100
                                && block.chunks(2).all(|at| at == value)
                        };
                        let mut blocks = buffer.as_slice().chunks(BLOCK);
                        assert!(blocks.all(is_written), "a block was never written");
                    }
                    running.fetch_sub(1, Ordering::SeqCst);
                });
            };
            program.handle().post(run).unwrap();
        }
        program.until("the writers end", || running.load(Ordering::SeqCst) == 0);
        if !is_degraded {
            let rows: Vec<Vec<u8>> = contents.iter().map(|one| one.lock().unwrap().clone()).collect();
            assert!(has_parity(&rows));
        }
    }
}

/// Writers of stripes of their own, which check what they read while members go, return and are replaced.
#[test]
fn members_go_and_return_under_load() {
    for superblock in [true, false] {
        let program = created(4, superblock);
        let stripe = 3 * STRIP;
        let stripes = program.show("r")["num_blocks"].as_u64().unwrap() / stripe;
        let (stop, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let writers = 4;
        let running = Arc::new(AtomicU64::new(writers));
        for writer in 0..writers {
            let descriptor = program.registry.open("r", Access::ReadWrite).unwrap();
            let (stop, done, running) = (stop.clone(), done.clone(), running.clone());
            let run = move |core: &reactor::Core| {
                let core = core.clone();
                core.clone().spawn(async move {
                    let io = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
                    let mut rng = random::WyRand::new(writer);
                    let mut model = vec![None; (stripes / writers) as usize];
                    let mut buffer = core.pool().take(stripe as usize * BLOCK).unwrap();
                    for round in 1u64.. {
                        if stop.load(Ordering::SeqCst) > 0 {
                            break;
                        }
                        let at = rng.below(stripes / writers);
                        let data = pattern(writer << 32 | round, stripe);
                        buffer.as_mut_slice().copy_from_slice(&data);
                        let lba = (at * writers + writer) * stripe;
                        let written = io.write(lba, buffer).await;
                        buffer = written.unwrap_or_else(|(status, _)| panic!("write {lba}: {status}"));
                        model[at as usize] = Some(round);
                        let at = rng.below(stripes / writers);
                        let lba = (at * writers + writer) * stripe;
                        let read = io.read(lba, buffer).await;
                        buffer = read.unwrap_or_else(|(status, _)| panic!("read {lba}: {status}"));
                        if let Some(round) = model[at as usize] {
                            let expected = pattern(writer << 32 | round, stripe);
                            assert!(buffer.as_slice() == expected, "stripe {at} of writer {writer}");
                        }
                        done.fetch_add(1, Ordering::SeqCst);
                    }
                    running.fetch_sub(1, Ordering::SeqCst);
                });
            };
            program.handle().post(run).unwrap();
        }
        let proceeds = || {
            let before = done.load(Ordering::SeqCst);
            program.until("writers proceed", || done.load(Ordering::SeqCst) > before + 100);
        };
        for index in 0..4 {
            let name = format!("m{index}");
            proceeds();
            if index % 2 == 0 {
                program.pull(&name);
                proceeds();
                program.insert(&name, index);
            } else {
                program.call("bdev_raid_remove_base_bdev", json!({ "name": name }));
                proceeds();
            }
            if !superblock || index % 2 == 1 {
                let params = json!({ "raid_bdev": "r", "base_bdev": name });
                program.call("bdev_raid_add_base_bdev", params);
            }
            program.until_in_sync("r");
        }
        stop.store(1, Ordering::SeqCst);
        program.until("writers end", || running.load(Ordering::SeqCst) == 0);
        let first = if superblock { OFFSET } else { 0 };
        assert!(has_parity(&rows(&program, 4, first)));
    }
}
