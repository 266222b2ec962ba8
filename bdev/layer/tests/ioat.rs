//! Malloc devices through the engine `ioat`: its driver, against the software model behind vfio-user.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use accel::{AccelOp, Engine, IoatChannelInfo};
use bdev::malloc::{self, MallocConfig};
use bdev::{Access, BdevChannel, Completion, Registry, Request};
use block_io::{Channel as _, Op, Status, Tag};
use ioat::IoatAddress;
use ioat_model::{IoatFault, IoatModel, IoatServer, StopHandle};
use random::WyRand;
use reactor::{IdlePolicy, Reactor, ReactorConfig};

const BLOCK: usize = 512;
const BLOCKS: u64 = 8192;

/// A model's thread, with a core and a malloc device that copies through it.
struct Rig {
    channel: BdevChannel,
    registry: Registry,
    reactor: Reactor,
    stop: StopHandle,
    thread: Option<JoinHandle<IoatModel>>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn served(faults: &[IoatFault]) -> (PathBuf, StopHandle, JoinHandle<IoatModel>) {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("ringbolt-bdev-ioat-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(name);
    let _ = std::fs::remove_file(&path);
    let mut model = IoatModel::new();
    faults.iter().for_each(|fault| model.inject(*fault));
    let server = IoatServer::bind(&path, model).unwrap();
    let stop = server.stop_handle();
    (path, stop, std::thread::spawn(move || server.run().unwrap()))
}

impl Rig {
    fn new(faults: &[IoatFault]) -> Rig {
        let arena =
            dma::Arena::new(dma::ArenaConfig { limit_bytes: 64 << 20, hugepages: false, shared: true });
        let reactor =
            Reactor::new(&ReactorConfig { idle: IdlePolicy::Spin, arena, ..ReactorConfig::default() })
                .unwrap();
        let registry = Registry::new();
        let (path, stop, thread) = served(faults);
        assert_eq!(registry.accel().scan_ioat(&[IoatAddress::VfioUser(path)]).unwrap(), 1);
        for op in [AccelOp::Copy, AccelOp::Fill] {
            assert!(registry.accel().assign(op, Engine::Ioat));
        }
        malloc::create(&registry, MallocConfig::new("M", BLOCKS, BLOCK as u32)).unwrap();
        let descriptor = registry.open("M", Access::ReadWrite).unwrap();
        let channel = descriptor.channel(&reactor.core()).unwrap();
        Rig { channel, registry, reactor, stop, thread: Some(thread) }
    }

    fn info(&self) -> IoatChannelInfo {
        let [info] = &self.registry.accel().ioat_channels()[..] else { panic!("one function was found") };
        info.clone()
    }

    fn run(&mut self, mut batch: Vec<Request>) -> Vec<Completion> {
        let (expected, mut sink, begun) = (batch.len(), Vec::new(), Instant::now());
        while sink.len() < expected {
            self.channel.submit(&mut batch);
            self.reactor.turn();
            self.channel.poll(&mut sink);
            assert!(begun.elapsed() < Duration::from_secs(30), "{} of {expected}", sink.len());
        }
        sink
    }

    fn write(&mut self, lba: u64, blocks: u32, fill: impl Fn(usize) -> u8) {
        let mut data = self.reactor.core().pool().take_data(blocks as usize * BLOCK).unwrap();
        let bytes: Vec<u8> = (0..blocks as usize * BLOCK).map(fill).collect();
        data.copy_from(0, &bytes);
        let done = self.run(vec![Request::write(Tag(0), lba, blocks, data)]);
        assert_eq!(done[0].status(), Status::SUCCESS);
    }

    fn read(&mut self, lba: u64, blocks: u32) -> Vec<u8> {
        let data = self.reactor.core().pool().take_data(blocks as usize * BLOCK).unwrap();
        let done = self.run(vec![Request::read(Tag(0), lba, blocks, data)]).pop().unwrap();
        assert_eq!(done.status(), Status::SUCCESS);
        let mut bytes = vec![0xcc; blocks as usize * BLOCK];
        done.into_request().take_data().unwrap().copy_to(0, &mut bytes);
        bytes
    }

    /// Writes until the device has executed an operation: the start of its channel takes some turns, and the
    /// memory is mapped by a thread.
    fn start(&mut self) {
        let begun = Instant::now();
        while self.info().executed == 0 {
            self.write(0, 1, |_| 0);
            assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", self.info());
        }
    }

    /// Random requests, several at a time, each range by one of them only; against a model in memory.
    fn compare(&mut self, seed: u64, rounds: u32) {
        let mut rng = WyRand::new(seed);
        // More operations than the ring has entries.
        self.write(0, BLOCKS as u32, |at| (at % 253) as u8);
        let mut model = self.read(0, BLOCKS as u32);
        assert!(model.iter().enumerate().all(|(at, byte)| *byte == (at % 253) as u8), "seed {seed}");
        for round in 0..rounds {
            let mut batch = Vec::new();
            let share = BLOCKS / 8;
            for part in 0..8 {
                let lba = part * share + rng.below(share);
                let blocks = 1 + rng.below((share - lba % share).min(300));
                let range = lba as usize * BLOCK..(lba + blocks) as usize * BLOCK;
                let op = [Op::Read, Op::Write, Op::WriteZeroes, Op::Unmap][rng.below(4) as usize];
                let mut request = Request::new(Tag(lba), op, lba, blocks as u32);
                if op.has_data() {
                    let mut data = self.reactor.core().pool().take_data(range.len()).unwrap();
                    let bytes: Vec<u8> = (0..range.len()).map(|at| (at / 3) as u8 ^ round as u8).collect();
                    data.copy_from(0, &bytes);
                    if op == Op::Write {
                        model[range].copy_from_slice(&bytes);
                    }
                    request.set_data(Some(data));
                } else {
                    model[range].fill(0);
                }
                batch.push(request);
            }
            for done in self.run(batch) {
                let (op, lba) = (done.request().op, done.request().lba as usize);
                assert_eq!(done.status(), Status::SUCCESS, "seed {seed} round {round} {op:?} {lba}");
                if op == Op::Read {
                    let data = done.into_request().take_data().unwrap();
                    let mut found = vec![0; data.len()];
                    data.copy_to(0, &mut found);
                    assert!(found == model[lba * BLOCK..][..found.len()], "seed {seed} round {round} {lba}");
                }
            }
        }
        assert!(self.read(0, BLOCKS as u32) == model, "seed {seed}");
    }
}

#[test]
fn reads_writes_and_zeroes_are_executed_by_the_device_and_counted() {
    let mut rig = Rig::new(&[]);
    rig.start();
    let before = (rig.info(), rig.registry.accel().stats());
    rig.write(100, 64, |at| (at % 251) as u8);
    assert!(rig.read(100, 64).iter().enumerate().all(|(at, byte)| *byte == (at % 251) as u8));
    let zeroes = rig.run(vec![Request::new(Tag(0), Op::WriteZeroes, 110, 4)]);
    assert_eq!(zeroes[0].status(), Status::SUCCESS);
    let bytes = rig.read(109, 6);
    assert!(
        bytes[BLOCK..5 * BLOCK].iter().all(|byte| *byte == 0) && bytes[..BLOCK].iter().any(|byte| *byte != 0)
    );
    let (info, stats) = (rig.info(), rig.registry.accel().stats());
    assert_eq!((info.executed - before.0.executed, info.failed, info.core), (4, 0, Some(0)));
    assert_eq!(info.bytes - before.0.bytes, (64 + 64 + 4 + 6) * BLOCK as u64);
    let counted = |op: AccelOp| stats[op.index()].executed - before.1[op.index()].executed;
    assert_eq!((counted(AccelOp::Copy), counted(AccelOp::Fill)), (3, 1));
}

#[test]
fn random_requests_match_a_model() {
    let mut rig = Rig::new(&[]);
    rig.start();
    rig.compare(1, 60);
    let info = rig.info();
    assert!(info.executed > 400 && info.failed == 0, "{info:?}");
}

#[test]
fn what_a_device_fails_at_is_executed_by_the_cpu() {
    for (fault, failure) in [
        (IoatFault::HaltEvery(150), None),
        (IoatFault::PartialEvery(150), None),
        (IoatFault::StallAfter(30), None),
        (IoatFault::StopAfter(30), Some("not start in time")),
        (IoatFault::BackwardAfter(30), Some("it was not given")),
        (IoatFault::ForgeAfter(30, 0xffff_ffff_ffff_ffff), Some("in state 7")),
        (IoatFault::ForgeAfter(30, 0x40), Some("it was not given")),
    ] {
        let mut rig = Rig::new(&[fault]);
        rig.start();
        rig.compare(2, 8);
        let info = rig.info();
        assert!(info.failed > 0, "{fault:?}: {info:?}");
        let is_it = match (&info.failure, failure) {
            (None, None) => info.resets > 1,
            (Some(found), Some(expected)) => found.contains(expected),
            _ => false,
        };
        assert!(is_it, "{fault:?}: {info:?}, expected {failure:?}");
    }
}

#[test]
fn a_device_that_cannot_be_reset_is_closed_and_its_requests_are_executed_by_the_cpu() {
    for fault in [IoatFault::NoReset, IoatFault::NoSuspend] {
        // The channel is suspended and reset when it starts.
        let mut rig = Rig::new(&[fault]);
        let begun = Instant::now();
        while rig.info().failure.is_none() {
            rig.write(0, 8, |at| at as u8);
            assert!(begun.elapsed() < Duration::from_secs(30));
        }
        assert!(rig.read(0, 8).iter().enumerate().all(|(at, byte)| *byte == at as u8));
        let failure = rig.info().failure.unwrap();
        assert!(
            failure.contains("not reset in time") || failure.contains("not suspended in time"),
            "{failure}"
        );
    }
}

#[test]
fn a_server_that_ends_costs_no_request_and_a_new_one_is_found_by_a_scan() {
    let mut rig = Rig::new(&[]);
    rig.start();
    rig.write(0, 8, |at| at as u8);
    rig.stop.stop();
    rig.thread.take().unwrap().join().unwrap();
    // The first of these is given to it, and times out.
    rig.compare(3, 4);
    let info = rig.info();
    assert!(info.failure.is_some() && info.core.is_none(), "{info:?}");
    let (path, stop, thread) = served(&[]);
    rig.registry.accel().scan_ioat(&[IoatAddress::VfioUser(path)]).unwrap();
    (rig.stop, rig.thread) = (stop, Some(thread));
    let begun = Instant::now();
    let executed = |rig: &Rig| rig.registry.accel().ioat_channels().last().unwrap().executed;
    while executed(&rig) == 0 {
        rig.write(0, 8, |at| at as u8);
        assert!(begun.elapsed() < Duration::from_secs(30));
    }
    rig.compare(4, 4);
}

#[test]
fn what_the_device_does_not_reach_is_copied_by_the_cpu() {
    let mut rig = Rig::new(&[]);
    rig.start();
    // Less than a megabyte is not mapped for a device.
    malloc::create(&rig.registry, MallocConfig::new("small", 64, BLOCK as u32)).unwrap();
    let descriptor = rig.registry.open("small", Access::ReadWrite).unwrap();
    rig.channel = descriptor.channel(&rig.reactor.core()).unwrap();
    let before = rig.info().executed;
    rig.write(0, 8, |at| at as u8);
    assert!(rig.read(0, 8).iter().enumerate().all(|(at, byte)| *byte == at as u8));
    assert_eq!(rig.info().executed, before);
}
