//! Logical units on the block layer: what several nexuses do at once, each on a channel of its own.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::sync::Arc;

use bdev::{Access, BdevChannel, Descriptor, Registry, error, malloc};
use block_io::{Channel as _, Op, Status, Tag};
use dma::Data;
use proptest::prelude::*;
use reactor::{Core, IdlePolicy, Reactor, ReactorConfig};
use scsi::{
    Command, DataIn, LogicalUnit, NexusPorts, NoPeers, ReactorSanitizer, Response, Step, Task, TaskContext,
    TaskEvent, UnitConfig, UnitNexus, no_waker,
};
use wire_scsi::{AdditionalSense, ScsiStatus};

const BLOCK: usize = 512;
/// Turns of the reactor after which a command is lost: far more than any needs.
const TURNS_MAX: u32 = 10_000_000;

/// A session: one command at a time.
struct Session {
    nexus: Arc<UnitNexus>,
    channel: BdevChannel,
    core: Core,
    task: Option<(Task, VecDeque<u8>)>,
    batch: Vec<bdev::Request>,
}

impl Session {
    fn new(unit: &LogicalUnit, device: Descriptor, core: &Core, initiator: u64) -> Session {
        let nexus = unit.attach(&NexusPorts::iscsi("iqn.test:host", initiator, "iqn.test:disk", 1)).unwrap();
        let channel = device.channel(core).unwrap();
        let mut session = Session { nexus, channel, core: core.clone(), task: None, batch: Vec::new() };
        // The unit attention of a new nexus.
        assert_eq!(session.start(&[0; 6], &[], 0).unwrap().status, ScsiStatus::CheckCondition);
        session
    }

    fn memory(&self, bytes: u32) -> Data {
        self.core.pool().take(bytes as usize).unwrap().into()
    }

    /// Starts a command; the response, if it has ended.
    fn start(&mut self, cdb: &[u8], data_out: &[u8], data_in_bytes: u32) -> Option<Response> {
        let data_out_bytes = data_out.len() as u32;
        let command = Command { cdb, data_out_bytes, data_in_bytes, tag: Tag(1), ..Command::default() };
        let nexus = self.nexus.clone();
        let waker = no_waker();
        let mut context = TaskContext {
            nexus: &nexus,
            luns: &[0],
            waker: &waker,
            requests: &mut self.batch,
            peers: &mut NoPeers,
        };
        let (task, step) = Task::start(&command, &mut context);
        self.task = Some((task, data_out.iter().copied().collect()));
        self.take(step)
    }

    /// Takes a step, and those that follow without the device.
    fn take(&mut self, mut step: Step) -> Option<Response> {
        loop {
            let event = match step {
                Step::InFlight => return None,
                Step::Done(response) => {
                    self.task = None;
                    return Some(response);
                }
                Step::DataOut(bytes) => {
                    let mut data = self.memory(bytes);
                    let out = self.task.as_mut().unwrap().1.make_contiguous();
                    data.copy_from(0, &out[..bytes as usize]);
                    TaskEvent::DataOut(data)
                }
                Step::DataIn(bytes) => TaskEvent::DataIn(self.memory(bytes)),
                Step::Memory(bytes) => TaskEvent::Memory(self.memory(bytes)),
                other => panic!("{other:?}"),
            };
            step = self.resume(event);
        }
    }

    fn resume(&mut self, event: TaskEvent) -> Step {
        let nexus = self.nexus.clone();
        let waker = no_waker();
        let mut context = TaskContext {
            nexus: &nexus,
            luns: &[0],
            waker: &waker,
            requests: &mut self.batch,
            peers: &mut NoPeers,
        };
        self.task.as_mut().unwrap().0.resume(event, &mut context)
    }

    /// Moves requests and completions; the response, if the command has ended.
    fn poll(&mut self) -> Option<Response> {
        self.channel.submit(&mut self.batch);
        let mut completions = Vec::new();
        self.channel.poll(&mut completions);
        let mut response = None;
        for completion in completions {
            let step = self.resume(TaskEvent::Completed(completion));
            response = self.take(step).or(response);
        }
        response
    }
}

/// A unit on a device in memory.
struct Rig {
    reactor: Reactor,
    registry: Registry,
    device: &'static str,
    unit: Arc<LogicalUnit>,
}

impl Rig {
    fn new() -> Rig {
        let arena = dma::Arena::new(dma::ArenaConfig {
            limit_bytes: 64 << 20,
            hugepages: false,
            ..Default::default()
        });
        let config = ReactorConfig { idle: IdlePolicy::Spin, arena, ..ReactorConfig::default() };
        let (reactor, registry) = (Reactor::new(&config).unwrap(), Registry::new());
        malloc::create(&registry, malloc::MallocConfig::new("M", 256, BLOCK as u32)).unwrap();
        let device = registry.find("M").unwrap();
        let unit = LogicalUnit::new(UnitConfig::of_device(&device, false), Arc::default());
        Rig { reactor, registry, device: "M", unit }
    }

    fn session(&self, initiator: u64) -> Session {
        let device = self.registry.open(self.device, Access::ReadWrite).unwrap();
        Session::new(&self.unit, device, &self.reactor.core(), initiator)
    }

    fn run(
        &mut self,
        session: &mut Session,
        cdb: &[u8],
        data_out: &[u8],
        data_in_bytes: u32,
    ) -> (ScsiStatus, Vec<u8>) {
        let mut response = session.start(cdb, data_out, data_in_bytes);
        for _ in 0..TURNS_MAX {
            if let Some(response) = response {
                return (response.status, bytes(&response.data));
            }
            self.reactor.turn();
            response = session.poll();
        }
        panic!("a command does not end");
    }

    /// Runs until the command of each session is answered.
    fn finish(&mut self, sessions: &mut [Session], responses: &mut [Option<Response>]) {
        for _ in 0..TURNS_MAX {
            if responses.iter().all(Option::is_some) {
                return;
            }
            self.reactor.turn();
            for (session, response) in sessions.iter_mut().zip(&mut *responses) {
                if response.is_none() {
                    *response = session.poll();
                }
            }
        }
        panic!("a command does not end");
    }
}

fn bytes(data: &DataIn) -> Vec<u8> {
    match data {
        DataIn::None => Vec::new(),
        DataIn::Bytes(bytes) => bytes.clone(),
        DataIn::Data(data, valid) => {
            let mut bytes = vec![0; *valid as usize];
            data.copy_to(0, &mut bytes);
            bytes
        }
    }
}

const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 9, 0, 0, 1, 0];
const COMPARE_AND_WRITE: [u8; 16] = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0];
const OR_WRITE: [u8; 16] = [0x8b, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0];

/// A COMPARE AND WRITE has found another block than was expected, of which every byte is another one.
fn is_miscompare(sense: wire_scsi::Sense) -> bool {
    let is_of_block = |offset: u64| offset.is_multiple_of(BLOCK as u64);
    sense.key == wire_scsi::SenseKey::Miscompare && sense.information.is_some_and(is_of_block)
}

#[test]
fn of_compare_and_writes_at_once_exactly_one_wins() {
    if !bdev::supports_fused() {
        return println!("SKIPPED: no membarrier");
    }
    let mut rig = Rig::new();
    let mut sessions = [1, 2, 3].map(|initiator| rig.session(initiator));
    for counter in 0..60u8 {
        let data = [[counter; BLOCK], [counter + 1; BLOCK]].concat();
        let mut responses = sessions.each_mut().map(|one| one.start(&COMPARE_AND_WRITE, &data, 0));
        rig.finish(&mut sessions, &mut responses);
        let won = responses.iter().flatten().filter(|response| response.status == ScsiStatus::Good).count();
        assert_eq!(won, 1);
        for response in responses.into_iter().flatten() {
            assert!(response.sense.is_none_or(is_miscompare));
        }
    }
    assert_eq!(rig.run(&mut sessions[0], &READ, &[], 512), (ScsiStatus::Good, vec![60; BLOCK]));
}

#[test]
fn orwrites_at_once_lose_no_bit() {
    if !bdev::supports_fused() {
        return println!("SKIPPED: no membarrier");
    }
    let mut rig = Rig::new();
    let mut sessions = [1, 2, 3, 4].map(|initiator| rig.session(initiator));
    for round in 0..2 {
        let mut number = 0;
        let mut responses = sessions.each_mut().map(|one| {
            number += 1;
            one.start(&OR_WRITE, &[1 << (round * 4 + number - 1); BLOCK], 0)
        });
        rig.finish(&mut sessions, &mut responses);
        assert!(responses.iter().flatten().all(|response| response.status == ScsiStatus::Good));
    }
    assert_eq!(rig.run(&mut sessions[0], &READ, &[], 512), (ScsiStatus::Good, vec![0xff; BLOCK]));
}

#[test]
fn what_is_written_and_deallocated_is_what_get_lba_status_reports() {
    let mut rig = Rig::new();
    let mut session = rig.session(1);
    // WRITE SAME(16) of 96 blocks from block 32 on, in whole extents of the device, and UNMAP of the last 64.
    let same = [0x93, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0, 0, 96, 0, 0];
    assert_eq!(rig.run(&mut session, &same, &[5; BLOCK], 0).0, ScsiStatus::Good);
    let list = [0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0, 64, 0, 0, 0, 0];
    assert_eq!(rig.run(&mut session, &[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &list, 0).0, ScsiStatus::Good);
    let read = |lba| [0x28, 0, 0, 0, 0, lba, 0, 0, 1, 0];
    assert_eq!(rig.run(&mut session, &read(63), &[], 512).1, [5; BLOCK]);
    assert_eq!(rig.run(&mut session, &read(64), &[], 512).1, [0; BLOCK]);
    let verify = [0x8f, 6, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0, 0, 32, 0, 0];
    assert_eq!(rig.run(&mut session, &verify, &[5; BLOCK], 0).0, ScsiStatus::Good);
    let (status, extents) =
        rig.run(&mut session, &[0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256);
    assert_eq!(status, ScsiStatus::Good);
    // Extents follow each other to the end, and what was written is mapped.
    let mut next = 0;
    for extent in extents[8..].chunks(16) {
        let lba = u64::from_be_bytes(*extent.first_chunk().unwrap());
        let blocks = u64::from(u32::from_be_bytes(*extent[8..].first_chunk().unwrap()));
        assert_eq!(lba, next);
        next += blocks;
        let overlaps = lba < 64 && next > 32;
        assert!(extent[12] == 0 || !overlaps, "blocks {lba} to {next} hold data");
    }
    assert_eq!(next, 256);
}

/// What a session of [`concurrent_commands_have_an_order`] does with blocks that each have one value.
#[derive(Clone, Debug)]
enum Operation {
    Read,
    Write(u8),
    /// Compares with these, and writes the value.
    CompareAndWrite(Vec<u8>, u8),
    OrWrite(u8),
}

/// A command of one session: the first block, how many, and what.
#[derive(Clone, Debug)]
struct Concurrent {
    lba: usize,
    blocks: usize,
    operation: Operation,
}

const RANGE: usize = 5;

fn concurrent() -> impl Strategy<Value = Concurrent> {
    let value = 0..3u8;
    (0..RANGE, 1..=RANGE).prop_flat_map(move |(lba, blocks)| {
        let blocks = blocks.min(RANGE - lba);
        let compared = prop_oneof![
            // The same value in all blocks is what is there most often.
            value.clone().prop_map(move |value| vec![value; blocks]),
            prop::collection::vec(value.clone(), blocks),
        ];
        let operation = prop_oneof![
            1 => Just(Operation::Read),
            1 => value.clone().prop_map(Operation::Write),
            3 => (compared, value.clone()).prop_map(|(one, other)| Operation::CompareAndWrite(one, other)),
            1 => value.clone().prop_map(Operation::OrWrite),
        ];
        operation.prop_map(move |operation| Concurrent { lba, blocks, operation })
    })
}

impl Concurrent {
    fn start(&self, session: &mut Session) -> Option<Response> {
        let (lba, blocks) = (self.lba as u8, self.blocks as u8);
        let filled = |values: &[u8]| values.iter().flat_map(|value| [*value; BLOCK]).collect::<Vec<u8>>();
        match &self.operation {
            Operation::Read => {
                let cdb = [0x28, 0, 0, 0, 0, lba, 0, 0, blocks, 0];
                session.start(&cdb, &[], u32::from(blocks) * BLOCK as u32)
            }
            Operation::Write(value) => {
                let cdb = [0x2a, 0, 0, 0, 0, lba, 0, 0, blocks, 0];
                session.start(&cdb, &filled(&vec![*value; self.blocks]), 0)
            }
            Operation::CompareAndWrite(compared, value) => {
                let cdb = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, lba, 0, 0, 0, blocks, 0, 0];
                let data = [filled(compared), filled(&vec![*value; self.blocks])].concat();
                session.start(&cdb, &data, 0)
            }
            Operation::OrWrite(value) => {
                let cdb = [0x8b, 0, 0, 0, 0, 0, 0, 0, 0, lba, 0, 0, 0, blocks, 0, 0];
                session.start(&cdb, &filled(&vec![*value; self.blocks]), 0)
            }
        }
    }

    /// Executes it alone: whether it succeeds, and the values that it reads.
    fn execute(&self, blocks: &mut [u8; RANGE]) -> (bool, Vec<u8>) {
        let blocks = &mut blocks[self.lba..self.lba + self.blocks];
        match &self.operation {
            Operation::Read => return (true, blocks.to_vec()),
            Operation::Write(value) => blocks.fill(*value),
            Operation::CompareAndWrite(compared, _) if blocks != &compared[..] => return (false, Vec::new()),
            Operation::CompareAndWrite(_, value) => blocks.fill(*value),
            Operation::OrWrite(value) => blocks.iter_mut().for_each(|block| *block |= value),
        }
        (true, Vec::new())
    }
}

/// All orders of `count` commands.
fn orders(count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let shorter = orders(count - 1);
    let insert = |order: &Vec<usize>, at: usize| {
        let mut order = order.clone();
        order.insert(at, count - 1);
        order
    };
    shorter.iter().flat_map(|order| (0..count).map(move |at| insert(order, at))).collect()
}

/// The value of each block.
fn values(bytes: &[u8]) -> Vec<u8> {
    let blocks = bytes.chunks(BLOCK);
    blocks
        .map(|block| {
            assert!(block.iter().all(|byte| *byte == block[0]), "a block is torn");
            block[0]
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Commands of several nexuses at once have the results, and leave the blocks, of the same commands one after the
    /// other, in some order.
    #[test]
    fn concurrent_commands_have_an_order(
        rounds in prop::collection::vec(prop::collection::vec(concurrent(), 4), 1..25),
    ) {
        if !bdev::supports_fused() {
            println!("SKIPPED: no membarrier");
            return Ok(());
        }
        let mut rig = Rig::new();
        let mut sessions = [1, 2, 3, 4].map(|initiator| rig.session(initiator));
        let mut blocks = [0; RANGE];
        for round in rounds {
            let mut commands = round.iter();
            let mut responses = sessions.each_mut().map(|one| commands.next().unwrap().start(one));
            rig.finish(&mut sessions, &mut responses);
            let results: Vec<(bool, Vec<u8>)> = responses
                .iter()
                .flatten()
                .map(|response| {
                    let is_good = response.status == ScsiStatus::Good;
                    assert!(is_good || response.sense.is_some_and(is_miscompare), "{response:?}");
                    (is_good, values(&bytes(&response.data)))
                })
                .collect();
            let whole = [0x28, 0, 0, 0, 0, 0, 0, 0, RANGE as u8, 0];
            let after = values(&rig.run(&mut sessions[0], &whole, &[], (RANGE * BLOCK) as u32).1);
            let is_order = |order: &Vec<usize>| {
                let mut model = blocks;
                order.iter().all(|at| round[*at].execute(&mut model) == results[*at]) && model[..] == after[..]
            };
            prop_assert!(orders(round.len()).iter().any(is_order), "{:?}: {:?} {:?}", round, results, after);
            blocks.copy_from_slice(&after);
        }
    }
}

/// Gives the unit an executor on a device; it works as long as the descriptor is there.
fn set_sanitizer(rig: &Rig, unit: &LogicalUnit, device: &str) -> Arc<Descriptor> {
    let descriptor = Arc::new(rig.registry.open(device, Access::ReadWrite).unwrap());
    unit.set_sanitizer(ReactorSanitizer::new(&[rig.reactor.handle()], 7, &descriptor).unwrap());
    descriptor
}

/// Starts an operation through a nexus that is lost at once. Returns what the unit says after its end.
fn sanitize(rig: &mut Rig, other: &mut Session, cdb: &[u8], data_out: &[u8]) -> Option<AdditionalSense> {
    let mut lost = rig.session(9);
    assert_eq!(lost.start(cdb, data_out, 0).unwrap().status, ScsiStatus::Good);
    drop(lost);
    for _ in 0..TURNS_MAX {
        let sense = other.start(&[0; 6], &[], 0).unwrap().sense.map(|sense| sense.additional);
        if sense != Some(AdditionalSense::SANITIZE_IN_PROGRESS) {
            return sense;
        }
        rig.reactor.turn();
    }
    panic!("the operation does not end");
}

#[test]
fn a_unit_is_sanitized_although_the_nexus_is_lost() {
    let write = [0x2a, 0, 0, 0, 0, 9, 0, 0, 1, 0];
    let erase = [0x48, 0x82, 0, 0, 0, 0, 0, 0, 0, 0];
    let parameters = [0x82, 0, 0, 1, 0x5a];
    let overwrite = [0x48, 0x81, 0, 0, 0, 0, 0, 0, 5, 0];
    for (can_unmap, cdb, data_out, expected) in
        [(true, &erase, &[][..], 0), (false, &overwrite, &parameters[..], 0xa5)]
    {
        let mut rig = Rig::new();
        let device = rig.registry.find("M").unwrap();
        let config = UnitConfig { can_unmap, ..UnitConfig::of_device(&device, false) };
        rig.unit = LogicalUnit::new(config, Arc::default());
        let descriptor = set_sanitizer(&rig, &rig.unit, "M");
        let mut session = rig.session(1);
        rig.run(&mut session, &write, &[7; BLOCK], 0);
        assert_eq!(sanitize(&mut rig, &mut session, cdb, data_out), None);
        assert_eq!(rig.run(&mut session, &READ, &[], BLOCK as u32).1, [expected; BLOCK]);
        // The target has closed the device.
        drop(descriptor);
        let failed = Some(AdditionalSense::SANITIZE_FAILED);
        assert_eq!(sanitize(&mut rig, &mut session, cdb, data_out), failed);
    }
}

#[test]
fn a_device_that_fails_leaves_a_failed_unit() {
    let mut rig = Rig::new();
    error::create(&rig.registry, error::ErrorConfig::new("M")).unwrap();
    let device = rig.registry.find("EE_M").unwrap();
    rig.unit = LogicalUnit::new(UnitConfig::of_device(&device, false), Arc::default());
    rig.device = "EE_M";
    let _descriptor = set_sanitizer(&rig, &rig.unit, "EE_M");
    let mut session = rig.session(1);
    let fault = error::FaultInjection::once(Some(Op::Flush), error::FaultAction::Fail(Status::WRITE_FAULT));
    error::inject(&rig.registry, "EE_M", fault).unwrap();
    let erase = [0x48, 0xa2, 0, 0, 0, 0, 0, 0, 0, 0];
    let failed = Some(AdditionalSense::SANITIZE_FAILED);
    assert_eq!(sanitize(&mut rig, &mut session, &erase, &[]), failed);
    let exit = [0x48, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(rig.run(&mut session, &exit, &[], 0).0, ScsiStatus::Good);
    assert_eq!(sanitize(&mut rig, &mut session, &erase, &[]), None);
}
