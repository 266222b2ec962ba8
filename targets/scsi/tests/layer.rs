//! Logical units on the block layer: what several nexuses do at once, each on a channel of its own.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::sync::Arc;

use bdev::{Access, BdevChannel, Registry, malloc};
use block_io::{Channel as _, Tag};
use dma::Data;
use reactor::{Core, IdlePolicy, Reactor, ReactorConfig};
use scsi::{
    Command, DataIn, LogicalUnit, NexusPorts, NoPeers, Response, Step, Task, TaskContext, TaskEvent,
    UnitConfig, UnitNexus, no_waker,
};
use wire_scsi::ScsiStatus;

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
    fn new(unit: &LogicalUnit, registry: &Registry, core: &Core, initiator: u64) -> Session {
        let nexus = unit.attach(&NexusPorts::iscsi("iqn.test:host", initiator, "iqn.test:disk", 1)).unwrap();
        let channel = registry.open("M", Access::ReadWrite).unwrap().channel(core).unwrap();
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
        Rig { reactor, registry, unit }
    }

    fn session(&self, initiator: u64) -> Session {
        Session::new(&self.unit, &self.registry, &self.reactor.core(), initiator)
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
            assert!(response.sense.is_none_or(|sense| sense.key == wire_scsi::SenseKey::Miscompare));
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
