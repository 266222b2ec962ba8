use std::collections::VecDeque;
use std::sync::Arc;

use block_io::RequestFlags;
use random::WyRand;
use reactor::{Reactor, ReactorConfig};

use super::*;
use crate::error::{self, ErrorConfig, FaultAction, FaultInjection};
use crate::{Access, Bdev, BdevError, BdevGeometry, BoxedChannel, Durability, Registry, malloc};

/// Does what it is given, and keeps what came of it in the order in which it ended.
#[derive(Default)]
struct Script {
    actions: VecDeque<PlannedAction>,
    begun: u64,
    ended: Vec<(u64, Result<Vec<u8>, Status>)>,
}

impl Script {
    fn new(actions: impl IntoIterator<Item = PlannedAction>) -> Script {
        Script { actions: actions.into_iter().collect(), ..Script::default() }
    }
}

impl Planner for Script {
    fn next_io(&mut self) -> Option<PlannedIo> {
        let action = self.actions.pop_front()?;
        self.begun += 1;
        Some(PlannedIo { id: self.begun - 1, action })
    }

    fn complete(&mut self, id: u64, outcome: PlannedOutcome) {
        let bytes = outcome.map(|data| {
            data.map_or_else(Vec::new, |data| {
                let mut bytes = vec![0; data.len()];
                data.copy_to(0, &mut bytes);
                bytes
            })
        });
        self.ended.push((id, bytes));
    }
}

fn write(offset: u64, bytes: Vec<u8>) -> PlannedAction {
    PlannedAction::Write { offset, data: bytes.into(), durable: false }
}

fn read(offset: u64, bytes: usize) -> PlannedAction {
    PlannedAction::Read { offset, bytes }
}

/// A device of 16 MiB in memory.
struct Rig {
    registry: Registry,
}

fn reactor() -> Reactor {
    Reactor::new(&ReactorConfig::default()).unwrap()
}

impl Rig {
    fn new() -> Rig {
        let registry = Registry::new();
        malloc::create(&registry, malloc::MallocConfig::new("M", 32 << 10, 512)).unwrap();
        Rig { registry }
    }

    fn run(&self, name: &str, script: Script) -> Script {
        let reactor = reactor();
        let core = reactor.core();
        let channel = self.registry.open(name, Access::ReadWrite).unwrap().channel(&core).unwrap();
        reactor.block_on(async move { run_plan(&core, channel, script).await })
    }
}

#[test]
fn a_plan_has_the_effect_of_its_actions_between_flushes() {
    let seed = 0x9e37;
    println!("seed {seed:#x}");
    let mut random = WyRand::new(seed);
    let rig = Rig::new();
    let mut image = vec![0u8; 16 << 20];
    for _ in 0..20 {
        let (mut actions, mut expected) = (Vec::new(), Vec::new());
        // Disjoint ranges of one pass, as the order between flushes is open.
        for slot in 0..200u64 {
            let (offset, bytes) = (slot * 65_536, (1 + random.below(128) as usize) * 512);
            let range = offset as usize..offset as usize + bytes;
            match random.below(5) {
                0 => {
                    actions.push(PlannedAction::WriteZeroes { offset, bytes: bytes as u64 });
                    image[range].fill(0);
                }
                1 => {
                    actions.push(PlannedAction::Deallocate { offset, bytes: bytes as u64 });
                    image[range].fill(0);
                }
                2 => {
                    expected.push((actions.len() as u64, image[range].to_vec()));
                    actions.push(read(offset, bytes));
                }
                _ => {
                    let fill = vec![random.below(256) as u8; bytes];
                    image[range].copy_from_slice(&fill);
                    actions.push(write(offset, fill));
                }
            }
        }
        actions.push(PlannedAction::Flush);
        let flushes = actions.len() as u64 - 1;
        actions.push(read(0, 1 << 20));
        expected.push((flushes + 1, image[..1 << 20].to_vec()));
        let script = rig.run("M", Script::new(actions));
        assert_eq!(script.ended.len() as u64, script.begun);
        let end_of = |id: u64| script.ended.iter().position(|(ended, _)| *ended == id).unwrap();
        // All that was begun before the flush has ended before it, and the read after it began later.
        assert_eq!((end_of(flushes), end_of(flushes + 1)), (200, 201));
        for (id, bytes) in expected {
            assert!(script.ended[end_of(id)].1.as_ref().unwrap() == &bytes, "I/O {id}");
        }
    }
}

#[test]
fn transient_failures_are_repeated_and_others_reported() {
    let rig = Rig::new();
    error::create(&rig.registry, ErrorConfig::new("M")).unwrap();
    let fail = |status: Status, count: u64| {
        let fault = FaultInjection::once(Some(Op::Write), FaultAction::Fail(status));
        error::inject(&rig.registry, "EE_M", FaultInjection { count: Some(count), ..fault }).unwrap();
    };
    fail(Status::COMMAND_INTERRUPTED, 3);
    let script = rig.run("EE_M", Script::new([write(0, vec![1; 512]), PlannedAction::Flush, read(0, 512)]));
    assert_eq!(script.ended[0], (0, Ok(vec![1; 512])));
    assert_eq!(script.ended[2], (2, Ok(vec![1; 512])));
    for (status, count) in [(Status::COMMAND_INTERRUPTED, 9), (Status::WRITE_FAULT, 1)] {
        fail(status, count);
        let script = rig.run("EE_M", Script::new([write(0, vec![2; 512])]));
        assert!(script.ended[0].1.as_ref().is_err_and(|error| error.same_code(status)), "{:?}", script.ended);
        let script = rig.run("EE_M", Script::new([write(0, vec![3; 512])]));
        assert_eq!(script.ended[0], (0, Ok(vec![3; 512])), "all of the failures are used up");
    }
}

#[test]
fn an_io_without_memory_waits_for_it() {
    let rig = Rig::new();
    let reactor = reactor();
    let core = reactor.core();
    // All of the largest buffers.
    let mut taken: Vec<_> = std::iter::from_fn(|| core.pool().take(dma::BUFFER_BYTES_MAX)).collect();
    while let Some(buffer) = core.pool().take(4096) {
        taken.push(buffer);
    }
    let channel = rig.registry.open("M", Access::ReadWrite).unwrap().channel(&core).unwrap();
    let script = reactor.block_on(async move {
        let freed = core.clone();
        core.spawn(async move {
            freed.sleep_ns(5_000_000).await;
            drop(taken);
        });
        run_plan(&core, channel, Script::new([write(0, vec![5; 8192]), PlannedAction::Flush, read(0, 8192)]))
            .await
    });
    assert_eq!(script.ended[2], (2, Ok(vec![5; 8192])));
}

/// A device in memory that neither writes zeroes nor deallocates.
struct Plain(Arc<crate::BlockDevice>);

impl Bdev for Plain {
    fn product_name(&self) -> &'static str {
        "plain"
    }

    fn geometry(&self) -> BdevGeometry {
        self.0.geometry()
    }

    fn durability(&self) -> Durability {
        self.0.durability()
    }

    fn supports(&self, op: Op) -> bool {
        matches!(op, Op::Read | Op::Write | Op::Flush)
    }

    fn open(&self, core: &Core) -> Result<BoxedChannel, BdevError> {
        self.0.bdev().open(core)
    }
}

#[test]
fn zeroes_are_written_with_data_where_a_device_needs_it() {
    let rig = Rig::new();
    let below = rig.registry.find("M").unwrap();
    rig.registry.register("P", None, &[], Arc::new(Plain(below))).unwrap();
    let (start, bytes) = (1 << 20, (5 << 20) + 1536);
    let fill = (0..16).map(|index| write(index << 20, vec![9; 1 << 20]));
    let zero = [PlannedAction::Flush, PlannedAction::WriteZeroes { offset: start, bytes }];
    let after = [PlannedAction::Flush, PlannedAction::Deallocate { offset: 0, bytes: 512 }];
    let script = rig.run("P", Script::new(fill.chain(zero).chain(after)));
    assert!(script.ended.iter().all(|(_, outcome)| outcome.is_ok()), "{:?}", script.ended.last());
    let script = rig.run("P", Script::new((0..16).map(|index| read(index << 20, 1 << 20))));
    let mut image = vec![0; 16 << 20];
    for (index, bytes) in script.ended {
        image[(index as usize) << 20..][..1 << 20].copy_from_slice(&bytes.unwrap());
    }
    let zeroes = start as usize..(start + bytes) as usize;
    let is_right = |(at, byte): (usize, &u8)| *byte == if zeroes.contains(&at) { 0 } else { 9 };
    assert!(image.iter().enumerate().all(is_right));
}

#[test]
fn durable_writes_have_fua() {
    let rig = Rig::new();
    let reactor = reactor();
    let core = reactor.core();
    let channel = rig.registry.open("M", Access::ReadWrite).unwrap().channel(&core).unwrap();
    let mut runner = PlanRunner::new(&core, channel);
    let action = PlannedAction::Write { offset: 0, data: vec![1; 512].into(), durable: true };
    let mut script = Script::default();
    runner.begin(PlannedIo { id: 0, action }, &mut script).unwrap();
    assert!(runner.requests[0].flags.contains(RequestFlags::FUA));
}
