//! Several cores that use one device concurrently with a control thread.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bdev::{Access, BdevChannel, BlockDevice, Completion, Descriptor, Registry, Request, malloc};
use block_io::{Channel as _, Op, Status, Tag};
use os::CpuSet;
use reactor::{Period, PollResult, Poller, ReactorConfig, Reactors, Shutdown};

/// Keeps reads in flight until the device is removed, then drains.
struct Load {
    channel: BdevChannel,
    batch: Vec<Request>,
    sink: Vec<Completion>,
    done: Arc<AtomicU64>,
    rejected: Arc<AtomicU64>,
    finished: Arc<AtomicU64>,
}

impl Poller for Load {
    fn name(&self) -> &str {
        "load"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        self.channel.submit(&mut self.batch);
        let count = self.channel.poll(&mut self.sink);
        for completion in self.sink.drain(..) {
            if completion.status().is_success() {
                self.done.fetch_add(1, Ordering::Relaxed);
                self.batch.push(completion.into_request());
            } else {
                assert!(completion.status().same_code(Status::INVALID_NAMESPACE_OR_FORMAT));
                self.rejected.fetch_add(1, Ordering::Relaxed);
            }
        }
        if self.batch.is_empty() && self.channel.outstanding() == 0 {
            self.finished.fetch_add(1, Ordering::Relaxed);
            return PollResult::Finished;
        }
        PollResult::from_count(count)
    }

    fn deadline(&self) -> Option<u64> {
        if self.batch.is_empty() { self.channel.deadline() } else { Some(0) }
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        if self.channel.outstanding() == 0 { Shutdown::Done } else { Shutdown::Draining }
    }
}

const DEPTH: u64 = 8;

#[test]
fn statistics_and_removal_are_safe_while_cores_do_io() {
    let config = ReactorConfig { cpus: CpuSet::new(vec![0, 1]).unwrap(), ..ReactorConfig::default() };
    let reactors = Reactors::start(&config).unwrap();
    let registry = Registry::new();
    let device = malloc::create(&registry, malloc::MallocConfig::new("M", 1024, 512)).unwrap();
    let counters: [Arc<AtomicU64>; 3] = std::array::from_fn(|_| Arc::default());
    for remote in reactors.handles() {
        let descriptor = registry.open("M", Access::ReadWrite).unwrap();
        let [done, rejected, finished] = counters.clone();
        let start = move |core: &reactor::Core| {
            let channel = descriptor.channel(core).unwrap();
            let buffer = || core.pool().take(4096).unwrap();
            let batch = (0..DEPTH).map(|tag| Request::read(Tag(tag), tag * 8, 8, buffer())).collect();
            let load = Load { channel, batch, sink: Vec::new(), done, rejected, finished };
            core.add_poller(Box::new(load), Period::EveryTurn);
        };
        remote.call(start).unwrap();
    }
    let [done, rejected, finished] = &counters;
    let start = Instant::now();
    let mut last = 0;
    while done.load(Ordering::Relaxed) < 20_000 {
        let reads = device.stats().op(Op::Read).ops;
        assert!(reads >= last, "{reads} after {last}");
        last = reads;
        assert!(start.elapsed() < Duration::from_secs(30));
    }
    assert_eq!(device.channel_stats().len(), 2);
    registry.unregister("M").unwrap();
    assert!(device.wait_closed(Duration::from_secs(30)));
    assert_eq!(finished.load(Ordering::Relaxed), 2);
    assert_eq!(rejected.load(Ordering::Relaxed), 2 * DEPTH, "each I/O was rejected once");
    let stats = device.stats();
    assert_eq!(stats.op(Op::Read).ops, done.load(Ordering::Relaxed));
    assert_eq!(stats.histogram(Op::Read).count(), stats.op(Op::Read).ops);
    assert_eq!(stats.op(Op::Read).errors, 2 * DEPTH);
    reactors.stop();
}

#[test]
fn control_objects_are_send_and_claims_are_exclusive_across_threads() {
    fn assert_send<T: Send>() {}
    fn assert_sync<T: Sync>() {}
    assert_send::<Descriptor>();
    assert_send::<Registry>();
    assert_sync::<Registry>();
    assert_send::<Arc<BlockDevice>>();

    // Two threads compete for a claim: at most one holds it.
    let registry = Registry::new();
    malloc::create(&registry, malloc::MallocConfig::new("M", 8, 512)).unwrap();
    let held = Arc::new(AtomicBool::new(false));
    let claim = |by: &'static str| {
        let (registry, held) = (registry.clone(), held.clone());
        std::thread::spawn(move || {
            let mut won = 0;
            for _ in 0..2000 {
                let Ok(claim) = registry.open("M", Access::Exclusive { by }) else { continue };
                assert!(!held.swap(true, Ordering::SeqCst), "{by} got a claim that is held");
                held.store(false, Ordering::SeqCst);
                drop(claim);
                won += 1;
            }
            won
        })
    };
    let threads = [claim("a"), claim("b")];
    assert!(threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u32>() > 0);
}
