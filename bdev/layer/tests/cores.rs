//! Several cores on one device, with a control thread beside them.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bdev::{Access, Channel, Completion, Descriptor, Device, Registry, Request, malloc};
use reactor::{Config, Period, Poller, Reactors, Shutdown, Work};
use ring::{Channel as _, Op, Status, Tag};
use sys::CpuSet;

/// Keeps reads in flight until the device is gone, then drains.
struct Load {
    channel: Channel,
    batch: Vec<Request>,
    sink: Vec<Completion>,
    done: Arc<AtomicU64>,
    refused: Arc<AtomicU64>,
    finished: Arc<AtomicU64>,
}

impl Poller for Load {
    fn name(&self) -> &str {
        "load"
    }

    fn poll(&mut self, _now_ns: u64) -> Work {
        self.channel.submit(&mut self.batch);
        let count = self.channel.poll(&mut self.sink);
        for completion in self.sink.drain(..) {
            if completion.status().is_success() {
                self.done.fetch_add(1, Ordering::Relaxed);
                self.batch.push(completion.into_request());
            } else {
                assert!(completion.status().same_code(Status::INVALID_NAMESPACE_OR_FORMAT));
                self.refused.fetch_add(1, Ordering::Relaxed);
            }
        }
        if self.batch.is_empty() && self.channel.outstanding() == 0 {
            self.finished.fetch_add(1, Ordering::Relaxed);
            return Work::Finished;
        }
        Work::count(count)
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
fn statistics_are_read_and_a_device_removed_while_cores_use_it() {
    let config = Config { cpus: CpuSet::new(vec![0, 1]).unwrap(), ..Config::default() };
    let reactors = Reactors::start(&config).unwrap();
    let registry = Registry::new();
    let device = malloc::create(&registry, malloc::MallocConfig::new("M", 1024, 512)).unwrap();
    let counters: [Arc<AtomicU64>; 3] = std::array::from_fn(|_| Arc::default());
    for remote in reactors.remotes() {
        let descriptor = registry.open("M", Access::ReadWrite).unwrap();
        let [done, refused, finished] = counters.clone();
        let start = move |core: &reactor::Core| {
            let channel = descriptor.channel(core).unwrap();
            let buffer = || core.pool().take(4096).unwrap();
            let batch = (0..DEPTH).map(|tag| Request::read(Tag(tag), tag * 8, 8, buffer())).collect();
            let load = Load { channel, batch, sink: Vec::new(), done, refused, finished };
            core.add_poller(Box::new(load), Period::EveryTurn);
        };
        remote.call(start).unwrap();
    }
    let [done, refused, finished] = &counters;
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
    assert_eq!(refused.load(Ordering::Relaxed), 2 * DEPTH, "each core's I/Os were refused once");
    let stats = device.stats();
    assert_eq!(stats.op(Op::Read).ops, done.load(Ordering::Relaxed));
    assert_eq!(stats.histogram(Op::Read).count(), stats.op(Op::Read).ops);
    assert_eq!(stats.op(Op::Read).errors, 2 * DEPTH);
    reactors.stop();
}

#[test]
fn control_objects_cross_threads() {
    fn assert_send<T: Send>() {}
    fn assert_sync<T: Sync>() {}
    assert_send::<Descriptor>();
    assert_send::<Registry>();
    assert_sync::<Registry>();
    assert_send::<Arc<Device>>();

    // Two threads fight for a claim: never both hold it.
    let registry = Registry::new();
    malloc::create(&registry, malloc::MallocConfig::new("M", 8, 512)).unwrap();
    let held = Arc::new(AtomicBool::new(false));
    let claim = |by: &'static str| {
        let (registry, held) = (registry.clone(), held.clone());
        std::thread::spawn(move || {
            let mut won = 0;
            for _ in 0..2000 {
                let Ok(claim) = registry.open("M", Access::Exclusive { by }) else { continue };
                assert!(!held.swap(true, Ordering::SeqCst), "{by} claims what is claimed");
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
