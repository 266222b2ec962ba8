//! A partition whose device fails, and one whose blocks are with a non-priority thread: every read and every
//! close is answered, and neither memory nor slow reads of that thread stop the others.
#![allow(clippy::unwrap_used)]

mod process;

use std::cell::RefCell;
use std::rc::Rc;

use bdev::error::{ErrorConfig, FaultAction, FaultInjection};
use bdev::testing::CrashDisk;
use bdev::{Access, AsyncChannel, Registry, error};
use block_io::{Op, Status};
use control::JobHandle;
use dma::{ArenaConfig, Buffer, Pool};
use os::clock::VirtualClock;
use process::{Process, TestDisks};
use random::WyRand;
use reactor::Core;
use store_node::{
    FormatOptions, PartitionStatus, StoreCores, StoreError, StoreNode, StoreOptions, StoreTuning,
    format_device,
};

const DEVICE: &str = "EE_Disk";
const MS: u64 = 1_000_000;

/// Which threads do the work of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Threads {
    One,
    Prioritized,
}

const BOTH: [Threads; 2] = [Threads::One, Threads::Prioritized];

/// A store of one partition on an error device, with an image.
struct Store {
    process: Process,
    clock: VirtualClock,
    node: Rc<StoreNode>,
    io: AsyncChannel,
    core: Core,
    /// Blocks of objects on the device.
    data: std::ops::Range<u64>,
}

fn small_memory() -> ArenaConfig {
    ArenaConfig { limit_bytes: 16 << 20, hugepages: false, ..ArenaConfig::default() }
}

impl Store {
    fn open(threads: Threads) -> Store {
        let (clock, mut random) = (VirtualClock::default(), WyRand::new(1));
        let disks = TestDisks::from(CrashDisk::create(&Registry::new(), "Disk", 32 << 8, 4096, 1).unwrap());
        let mut process = Process::with_memory(&disks, &clock, &mut random, small_memory());
        if threads == Threads::Prioritized {
            process.add_store_thread(&mut random, small_memory());
        }
        let options = StoreOptions { name: "s", tuning: StoreTuning::default(), threads: process.threads() };
        let (registry, core) = (process.registry.clone(), process.reactor.core());
        let opened = process.run(async move {
            let (cores, job) = (StoreCores::This(&core), JobHandle::standalone());
            let format =
                FormatOptions { partitions: Some(1), log_bytes: Some(1 << 20), ..FormatOptions::default() };
            format_device(&registry, "Disk", &cores, format, &job).await?;
            error::create(&registry, ErrorConfig::new("Disk"))?;
            let node = StoreNode::open(&registry, DEVICE, options, &cores, &job).await?;
            node.create_image("vol", 12 << 20).await?;
            let descriptor = registry.open("s/vol", Access::ReadWrite)?;
            let io = AsyncChannel::new(&core, descriptor.channel(&core)?);
            Ok::<_, StoreError>((Rc::new(node), io))
        });
        let (node, io) = opened.unwrap();
        let (superblock, core) = (node.superblock(), process.reactor.core());
        let (start, layout) = (superblock.partition_start(0), superblock.layout().unwrap());
        let data = start + layout.extents_start..start + superblock.partition_blocks;
        Store { process, clock, node, io, core, data }
    }

    fn inject(&self, op: Op, action: FaultAction) {
        let fault =
            FaultInjection { range: Some(self.data.clone()), ..FaultInjection::once(Some(op), action) };
        error::inject(&self.process.registry, DEVICE, fault).unwrap();
    }

    fn resume(&self) {
        error::resume_pending(&self.process.registry, DEVICE).unwrap();
    }

    fn status(&mut self) -> PartitionStatus {
        let node = self.node.clone();
        self.process.run(async move { node.status().await }).unwrap().remove(0)
    }

    /// Writes `bytes` of one value from a byte on.
    fn write(&mut self, offset: u64, bytes: usize, byte: u8) {
        let (io, core) = (self.io.clone(), self.core.clone());
        self.process.run(async move {
            let mut buffer = core.pool().take(bytes).unwrap();
            buffer.as_mut_slice().fill(byte);
            io.write(offset / 512, buffer).await.unwrap();
        });
    }

    /// Begins to read from a byte on.
    fn begin_read(&mut self, offset: u64, bytes: usize) -> Outcome<Result<Buffer, Status>> {
        let buffer = self.core.pool().take(bytes).unwrap();
        let io = self.io.clone();
        self.begin(async move { io.read(offset / 512, buffer).await.map_err(|(status, _)| status) })
    }

    fn begin_close(&mut self) -> Outcome<()> {
        let node = self.node.clone();
        self.begin(async move { node.close().await })
    }

    fn begin<R: 'static>(&mut self, task: impl Future<Output = R> + 'static) -> Outcome<R> {
        let outcome = Outcome(Rc::default());
        let out = outcome.0.clone();
        assert!(self.core.spawn(async move {
            let value = task.await;
            *out.borrow_mut() = Some(value);
        }));
        outcome
    }

    fn run_for(&mut self, time_ns: u64) {
        let end_ns = self.clock.now_ns() + time_ns;
        while self.clock.now_ns() < end_ns {
            self.process.turn();
        }
    }

    fn wait<R>(&mut self, outcome: &Outcome<R>) -> R {
        for _ in 0..10_000 {
            if let Some(value) = outcome.take() {
                return value;
            }
            self.run_for(MS);
        }
        panic!("not within ten seconds");
    }

    fn wait_until(&mut self, is_reached: impl Fn(&PartitionStatus) -> bool) {
        for _ in 0..10_000 {
            if is_reached(&self.status()) {
                return;
            }
            self.run_for(MS);
        }
        panic!("not within ten seconds: {:?}", self.status());
    }

    /// Writes a block, and waits until it is in place.
    fn write_in_place(&mut self, byte: u8) {
        self.write(0, 4096, byte);
        self.wait_until(|status| status.entries_to_place == 0);
    }
}

/// What a task returned.
struct Outcome<R>(Rc<RefCell<Option<R>>>);

impl<R> Outcome<R> {
    fn take(&self) -> Option<R> {
        self.0.borrow_mut().take()
    }

    fn is_there(&self) -> bool {
        self.0.borrow().is_some()
    }
}

/// Everything that a pool has, in buffers of this size.
fn take_all(pool: &Pool, bytes: usize) -> Vec<Buffer> {
    std::iter::from_fn(|| pool.take(bytes)).collect()
}

/// The read was planned before the batch, and is planned again when it finds other checksums. Then the log
/// has all of it, or a part, and the batch keeps the other blocks busy without end.
#[test]
fn a_read_that_returns_after_its_batch_has_failed_is_answered() {
    for (threads, bytes) in BOTH.into_iter().flat_map(|threads| [(threads, 4096), (threads, 12 << 10)]) {
        let mut store = Store::open(threads);
        // The longer read has a hole between them, and reads one after the other.
        store.write(0, 4096, 1);
        store.write(8192, 4096, 1);
        store.wait_until(|status| status.entries_to_place == 0);
        store.inject(Op::Read, FaultAction::Pending);
        let read = store.begin_read(0, bytes);
        store.run_for(MS);
        store.inject(Op::Write, FaultAction::Fail(Status::INTERNAL_ERROR));
        store.write(0, 4096, 2);
        store.wait_until(|status| status.failed.is_some());
        assert!(!read.is_there());
        store.resume();
        assert_eq!(store.wait(&read).unwrap_err(), Status::INTERNAL_ERROR, "{threads:?}, {bytes} bytes");
        // Those that begin now fail at once.
        let read = store.begin_read(0, bytes);
        assert_eq!(store.wait(&read).unwrap_err(), Status::INTERNAL_ERROR, "{threads:?}, {bytes} bytes");
        store.process.discard();
    }
}

/// When a close is answered the device may be opened anew. The thread that has the blocks has a read in
/// flight when the partition fails, before or after the close begins.
#[test]
fn a_close_of_a_partition_that_fails_is_answered_once_its_device_is_closed() {
    for closes_first in [false, true] {
        let mut store = Store::open(Threads::Prioritized);
        store.write_in_place(1);
        store.inject(Op::Read, FaultAction::Pending);
        let read = store.begin_read(0, 4096);
        store.run_for(MS);
        store.inject(Op::Write, FaultAction::Fail(Status::INTERNAL_ERROR));
        store.write(0, 4096, 2);
        if !closes_first {
            store.wait_until(|status| status.failed.is_some());
        }
        let closed = store.begin_close();
        store.wait_until(|status| status.failed.is_some());
        store.run_for(200 * MS);
        assert!(!closed.is_there(), "closes first: {closes_first}");
        // A second one waits as well.
        let closed_again = store.begin_close();
        store.run_for(200 * MS);
        assert!(!closed_again.is_there(), "closes first: {closes_first}");
        store.resume();
        store.wait(&read).unwrap_err();
        while !closed.is_there() {
            store.process.turn();
        }
        // What the owner has ends in its next turns; the other thread does nothing any more.
        let Store { mut process, node, io, core, .. } = store;
        drop((node, io, core));
        for _ in 0..10 {
            process.reactor.turn();
        }
        let access = Access::Exclusive { by: "the test" };
        drop(process.registry.open(DEVICE, access).expect("nothing has the device"));
        process.discard();
    }
}

/// With one thread as well, of which the answer does not depend on the read.
#[test]
fn a_close_of_a_failed_partition_is_answered() {
    for threads in BOTH {
        let mut store = Store::open(threads);
        store.inject(Op::Write, FaultAction::Fail(Status::INTERNAL_ERROR));
        store.write(0, 4096, 2);
        store.wait_until(|status| status.failed.is_some());
        for _ in 0..2 {
            let closed = store.begin_close();
            store.wait(&closed);
        }
        store.process.discard();
    }
}

/// A read waits for memory of the non-priority thread, and no checkpoint for the read.
#[test]
fn checkpoints_go_on_while_a_read_has_no_memory() {
    let mut store = Store::open(Threads::Prioritized);
    let object = 4 << 20;
    store.write(object, 128 << 10, 1);
    store.wait_until(|status| status.entries_to_place == 0);
    let other = store.process.store_core().unwrap();
    let mut taken = take_all(other.pool(), 4096);
    // Enough for batches and checkpoints, and no memory for the read, whose blocks are adjacent.
    let count = taken.len();
    taken.truncate(count - 64);
    assert!(other.pool().take(128 << 10).is_none());
    let read = store.begin_read(object, 128 << 10);
    store.run_for(10 * MS);
    let before = store.status().stats.checkpoints;
    // Several times what the log has, of blocks that are not adjacent: a batch writes one at a time.
    for index in 0..1024 {
        store.write(index % 64 * 8192, 4096, 2);
    }
    let after = store.status().stats.checkpoints;
    assert!(after > before + 1, "{before} {after}");
    assert!(!read.is_there());
    drop(taken);
    let read = store.wait(&read).unwrap();
    assert!(read.as_slice().iter().all(|byte| *byte == 1));
    store.process.discard();
}

/// The blocks of a read are in memory of the thread that read them.
#[test]
fn a_read_of_whole_blocks_takes_no_memory_of_the_priority_thread() {
    let mut store = Store::open(Threads::Prioritized);
    store.write_in_place(1);
    let mut taken = take_all(store.core.pool(), 4096);
    // That of the request.
    let (buffer, io) = (taken.pop().unwrap(), store.io.clone());
    let read = store.begin(async move { io.read(0, buffer).await.map_err(|(status, _)| status) });
    let read = store.wait(&read).unwrap();
    assert!(read.as_slice().iter().all(|byte| *byte == 1));
    assert!(store.core.pool().take(4096).is_none());
    drop((taken, read));
    store.process.discard();
}
