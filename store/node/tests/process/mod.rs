//! A process in virtual time, which tests kill.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use bdev::Registry;
use bdev::testing::CrashDisk;
use os::clock::VirtualClock;
use random::WyRand;
use reactor::{Reactor, ReactorConfig};

/// A process: its registry has the disk, and its core runs tasks until it is killed.
pub(crate) struct Process {
    pub(crate) registry: Registry,
    pub(crate) reactor: Reactor,
    clock: VirtualClock,
    random: WyRand,
}

impl Process {
    pub(crate) fn start(disk: &CrashDisk, clock: &VirtualClock, random: &mut WyRand) -> Process {
        let registry = Registry::new();
        registry.register("Disk", None, &[], Arc::new(disk.clone())).unwrap();
        let arena = dma::Arena::new(dma::ArenaConfig::default());
        let config = ReactorConfig::simulated(clock.clone(), random.next_bits(), 1, &arena);
        let reactor = Reactor::new(&config).unwrap();
        Process { registry, reactor, clock: clock.clone(), random: random.split() }
    }

    pub(crate) fn turn(&mut self) {
        self.reactor.turn();
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
