//! A process in virtual time, which tests kill.
// Not every test needs all of it.
#![allow(dead_code)]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use accel::{Cipher, CryptoKey, TweakMode};
use bdev::Registry;
use bdev::testing::CrashDisk;
use os::clock::VirtualClock;
use random::WyRand;
use reactor::{Core, Reactor, ReactorConfig};
use store_node::{NonPriorityThreads, StoreBdevs, StoreThreads};

/// The disks of a process, which lose power together; what is left on one says nothing of the other.
#[derive(Clone)]
pub(crate) struct TestDisks {
    pub(crate) disk: CrashDisk,
    /// That of the logs, if they are on one of their own.
    pub(crate) log: Option<CrashDisk>,
    /// Whether crypto bdevs are on them.
    pub(crate) are_encrypted: bool,
}

impl From<CrashDisk> for TestDisks {
    fn from(disk: CrashDisk) -> TestDisks {
        TestDisks { disk, log: None, are_encrypted: false }
    }
}

impl TestDisks {
    /// Their bdevs in a process.
    pub(crate) fn bdevs(&self) -> StoreBdevs<'static> {
        let [data, log] = if self.are_encrypted { ["CryptoDisk", "CryptoLog"] } else { ["Disk", "Log"] };
        StoreBdevs { data, log: self.log.as_ref().map(|_| log) }
    }

    /// Registers them.
    fn register(&self, registry: &Registry) {
        registry.register("Disk", None, &[], Arc::new(self.disk.clone())).unwrap();
        if let Some(log) = &self.log {
            registry.register("Log", None, &[], Arc::new(log.clone())).unwrap();
        }
        if self.are_encrypted {
            let encrypt = |base: &str, name: &str, mode: TweakMode| {
                let (key, tweak_key) = ("0f".repeat(32), "a5".repeat(32));
                let key = CryptoKey::from_hex(
                    name,
                    Cipher::AesXts,
                    mode,
                    key.as_bytes(),
                    Some(tweak_key.as_bytes()),
                );
                bdev_crypto::create(registry, base, name, Arc::new(key.unwrap())).unwrap();
            };
            encrypt("Disk", "CryptoDisk", TweakMode::SimpleLba);
            if self.log.is_some() {
                encrypt("Log", "CryptoLog", TweakMode::JoinNegLbaWithLba);
            }
        }
    }

    pub(crate) fn fail_power(&self, random: &mut WyRand) {
        self.disk.fail_power(random.next_bits());
        if let Some(log) = &self.log {
            log.fail_power(random.next_bits());
        }
    }

    /// Flushes and FUA writes since the power came on.
    #[allow(dead_code)]
    pub(crate) fn durable_requests(&self) -> usize {
        self.disk.durable_requests() + self.log.as_ref().map_or(0, CrashDisk::durable_requests)
    }
}

/// A process: its registry has the disk, and its core runs tasks until it is killed.
pub(crate) struct Process {
    pub(crate) registry: Registry,
    pub(crate) reactor: Reactor,
    /// Its non-priority thread, if its threads are prioritized.
    store: Option<Reactor>,
    clock: VirtualClock,
    random: WyRand,
}

impl Process {
    pub(crate) fn start(disks: &TestDisks, clock: &VirtualClock, random: &mut WyRand) -> Process {
        Process::with_memory(disks, clock, random, dma::ArenaConfig::default())
    }

    pub(crate) fn with_memory(
        disks: &TestDisks,
        clock: &VirtualClock,
        random: &mut WyRand,
        memory: dma::ArenaConfig,
    ) -> Process {
        let registry = Registry::new();
        disks.register(&registry);
        let arena = dma::Arena::new(memory);
        let config = ReactorConfig::simulated(clock.clone(), random.next_bits(), 1, &arena);
        let reactor = Reactor::new(&config).unwrap();
        Process { registry, reactor, store: None, clock: clock.clone(), random: random.split() }
    }

    /// As [`start`](Self::start), with a non-priority thread for what is in place.
    pub(crate) fn prioritized(disks: &TestDisks, clock: &VirtualClock, random: &mut WyRand) -> Process {
        let mut process = Process::start(disks, clock, random);
        process.add_store_thread(random, dma::ArenaConfig::default());
        process
    }

    /// Adds a non-priority thread with memory of its own.
    pub(crate) fn add_store_thread(&mut self, random: &mut WyRand, memory: dma::ArenaConfig) {
        let config =
            ReactorConfig::simulated(self.clock.clone(), random.next_bits(), 1, &dma::Arena::new(memory));
        self.store = Some(Reactor::new(&ReactorConfig { first_index: 1, ..config }).unwrap());
    }

    /// The core of its non-priority thread.
    pub(crate) fn store_core(&self) -> Option<Core> {
        self.store.as_ref().map(Reactor::core)
    }

    /// The threads of its stores.
    pub(crate) fn threads(&self) -> StoreThreads {
        match &self.store {
            Some(store) => StoreThreads::Prioritized(NonPriorityThreads::on(&[store.handle()])),
            None => StoreThreads::RunToCompletion,
        }
    }

    /// Ends as in a SIGKILL.
    pub(crate) fn discard(self) {
        self.reactor.discard();
        self.store.into_iter().for_each(Reactor::discard);
    }

    /// Turns the cores once. A non-priority thread is slower or faster than its owner.
    pub(crate) fn turn_cores(&mut self) -> bool {
        let mut work = self.reactor.turn();
        if let Some(store) = &mut self.store {
            for _ in 0..self.random.below(3) {
                work |= store.turn();
            }
        }
        work
    }

    pub(crate) fn turn(&mut self) {
        self.turn_cores();
        self.clock.advance_to(self.clock.now_ns() + 1 + self.random.below(20_000));
    }

    /// Turns until the task ends.
    pub(crate) fn run<R: 'static>(&mut self, task: impl Future<Output = R> + 'static) -> R {
        let result = Rc::new(RefCell::new(None));
        let out = result.clone();
        assert!(self.reactor.core().spawn(async move {
            let value = task.await;
            *out.borrow_mut() = Some(value);
        }));
        for _ in 0..5_000_000 {
            self.turn();
            if let Some(result) = result.borrow_mut().take() {
                return result;
            }
        }
        panic!("it does not end");
    }
}
