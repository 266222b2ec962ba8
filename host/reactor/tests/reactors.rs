//! Integration tests of reactors on real threads.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use os::CpuSet;
use reactor::{IdlePolicy, Period, PollResult, Poller, Reactor, ReactorConfig, Reactors, Shutdown};

fn config(idle: IdlePolicy) -> ReactorConfig {
    ReactorConfig { cpus: CpuSet::allowed(), pin: true, idle, ..ReactorConfig::default() }
}

const POLICIES: [IdlePolicy; 3] =
    [IdlePolicy::Spin, IdlePolicy::Sleep, IdlePolicy::Adaptive { spin_ns: 1000 }];

#[test]
fn a_call_runs_on_its_core_with_every_idle_policy() {
    for idle in POLICIES {
        let reactors = Reactors::start(&config(idle)).unwrap();
        for _ in 0..200 {
            for remote in reactors.handles() {
                let index = remote.call(|core| core.index()).unwrap();
                assert_eq!(index, remote.index());
            }
        }
        reactors.stop();
    }
}

#[test]
fn memory_that_another_core_is_done_with_is_collected_at_once() {
    for idle in POLICIES {
        let first = Reactors::start(&config(idle)).unwrap();
        let second = Reactors::start(&config(idle)).unwrap();
        let (owner, user) = (&first.handles()[0], &second.handles()[0]);
        for _ in 0..20 {
            let parcel =
                owner.call(|core| dma::Data::from(core.pool().take(4096).unwrap()).into_parcel()).unwrap();
            // The parcel is home when the call returns, and its owner was told before the next call.
            user.call(move |core| drop(core.pool().adopt(parcel).unwrap())).unwrap();
            let uncollected = owner.call(|core| core.pool().collect()).unwrap();
            assert_eq!(uncollected, 0, "{idle:?}");
        }
    }
}

#[test]
fn an_idle_reactor_uses_no_cpu_time() {
    let reactors = Reactors::start(&config(IdlePolicy::default())).unwrap();
    let remote = &reactors.handles()[0];
    let before = remote.call(|_| os::thread_cpu_ns()).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let after = remote.call(|_| os::thread_cpu_ns()).unwrap();
    assert!(after - before < 30_000_000, "{} ns of 300 ms", after - before);
    assert!(remote.stats().unwrap().sleeps > 0);
}

struct CountingPoller {
    count: Arc<AtomicU64>,
    until: u64,
    in_flight: u32,
}

impl Poller for CountingPoller {
    fn name(&self) -> &str {
        "counter"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        if count >= self.until { PollResult::Finished } else { PollResult::Busy(1) }
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        self.in_flight = self.in_flight.saturating_sub(1);
        if self.in_flight == 0 { Shutdown::Done } else { Shutdown::Draining }
    }
}

#[test]
fn a_poller_runs_until_it_returns_finished() {
    let reactors = Reactors::start(&config(IdlePolicy::Sleep)).unwrap();
    let count = Arc::new(AtomicU64::new(0));
    let shared = count.clone();
    let remote = reactors.handles()[0].clone();
    remote
        .call(move |core| {
            core.add_poller(
                Box::new(CountingPoller { count: shared, until: 1000, in_flight: 0 }),
                Period::EveryTurn,
            )
        })
        .unwrap();
    while remote.stats().unwrap().pollers.iter().any(|poller| poller.name == "counter") {
        std::thread::yield_now();
    }
    assert_eq!(count.load(Ordering::Relaxed), 1000);
}

#[test]
fn stop_waits_for_operations_in_flight() {
    let reactors = Reactors::start(&config(IdlePolicy::Spin)).unwrap();
    let count = Arc::new(AtomicU64::new(0));
    let shared = count.clone();
    reactors.handles()[0]
        .call(move |core| {
            let poller = CountingPoller { count: shared, until: u64::MAX, in_flight: 50 };
            core.add_poller(Box::new(poller), Period::EveryTurn);
        })
        .unwrap();
    reactors.stop();
    assert!(count.load(Ordering::Relaxed) >= 50);
}

#[test]
fn a_periodic_poller_wakes_a_sleeping_core() {
    let reactors = Reactors::start(&config(IdlePolicy::Sleep)).unwrap();
    let count = Arc::new(AtomicU64::new(0));
    let shared = count.clone();
    reactors.handles()[0]
        .call(move |core| {
            let poller = CountingPoller { count: shared, until: 20, in_flight: 0 };
            core.add_poller(Box::new(poller), Period::EveryNs(1_000_000));
        })
        .unwrap();
    let start = Instant::now();
    while count.load(Ordering::Relaxed) < 20 {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::yield_now();
    }
    assert!(start.elapsed() >= Duration::from_millis(19));
}

#[test]
fn tasks_sleep_concurrently_on_one_core() {
    let reactor = Reactor::new(&ReactorConfig::default()).unwrap();
    let core = reactor.core();
    let seen = Rc::new(Cell::new(0));
    let total = reactor.block_on({
        let seen = seen.clone();
        async move {
            for wait_us in [300, 100, 200] {
                let (inner, seen) = (core.clone(), seen.clone());
                core.spawn(async move {
                    inner.sleep_ns(wait_us * 1000).await;
                    seen.set(seen.get() * 10 + wait_us / 100);
                });
            }
            core.sleep_ns(20_000_000).await;
            seen.get()
        }
    });
    assert_eq!(total, 123);
}

#[test]
fn a_message_to_a_typed_mailbox_wakes_the_core() {
    struct Echo(reactor::MailboxReceiver<u64>, std::sync::mpsc::Sender<u64>);
    impl Poller for Echo {
        fn name(&self) -> &str {
            "echo"
        }
        fn poll(&mut self, _now_ns: u64) -> PollResult {
            let mut count = 0;
            while let Some(value) = self.0.receive() {
                self.1.send(value).unwrap();
                count += 1;
            }
            PollResult::from_count(count)
        }
        fn deadline(&self) -> Option<u64> {
            if self.0.is_empty() { None } else { Some(0) }
        }
    }
    for idle in POLICIES {
        let reactors = Reactors::start(&config(idle)).unwrap();
        let (answers, answer) = std::sync::mpsc::channel();
        let sender = reactors.handles()[0]
            .call(move |core| {
                let (sender, receiver) = core.mailbox(16);
                core.add_poller(Box::new(Echo(receiver, answers)), Period::EveryTurn);
                sender
            })
            .unwrap();
        for value in 0..2000 {
            sender.send(value).unwrap();
            assert_eq!(answer.recv_timeout(Duration::from_secs(20)), Ok(value), "{idle:?}");
        }
    }
}

#[test]
fn pinning_to_an_unavailable_core_fails() {
    let config =
        ReactorConfig { cpus: CpuSet::new(vec![1023]).unwrap(), pin: true, ..ReactorConfig::default() };
    assert!(matches!(Reactors::start(&config), Err(reactor::StartError::Pin { cpu: 1023, .. })));
}

#[test]
fn a_stopped_reactor_rejects_messages() {
    let reactors = Reactors::start(&config(IdlePolicy::Sleep)).unwrap();
    let remote = reactors.handles()[0].clone();
    reactors.stop();
    assert_eq!(remote.call(|_| ()), Err(reactor::ReactorUnavailable));
}
