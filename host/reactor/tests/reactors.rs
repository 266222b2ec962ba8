//! Reactors on real threads.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use reactor::{Config, IdlePolicy, Period, Poller, Reactor, Reactors, Shutdown, Work};
use sys::CpuSet;

fn config(idle: IdlePolicy) -> Config {
    Config { cpus: CpuSet::allowed(), pin: true, idle, ..Config::default() }
}

const POLICIES: [IdlePolicy; 3] =
    [IdlePolicy::Spin, IdlePolicy::Sleep, IdlePolicy::Adaptive { spin_ns: 1000 }];

#[test]
fn a_call_is_answered_on_the_core_whatever_the_policy() {
    for idle in POLICIES {
        let reactors = Reactors::start(&config(idle)).unwrap();
        for _ in 0..200 {
            for remote in reactors.remotes() {
                let index = remote.call(|core| core.index()).unwrap();
                assert_eq!(index, remote.index());
            }
        }
        reactors.stop();
    }
}

#[test]
fn an_idle_reactor_uses_no_processor() {
    let reactors = Reactors::start(&config(IdlePolicy::default())).unwrap();
    let remote = &reactors.remotes()[0];
    let before = remote.call(|_| sys::thread_cpu_ns()).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let after = remote.call(|_| sys::thread_cpu_ns()).unwrap();
    assert!(after - before < 30_000_000, "{} ns of 300 ms", after - before);
    assert!(remote.stats().unwrap().sleeps > 0);
}

struct Counter {
    count: Arc<AtomicU64>,
    until: u64,
    in_flight: u32,
}

impl Poller for Counter {
    fn name(&self) -> &str {
        "counter"
    }

    fn poll(&mut self, _now_ns: u64) -> Work {
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        if count >= self.until { Work::Finished } else { Work::Some(1) }
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        self.in_flight = self.in_flight.saturating_sub(1);
        if self.in_flight == 0 { Shutdown::Done } else { Shutdown::Draining }
    }
}

#[test]
fn a_poller_runs_until_it_says_that_it_is_finished() {
    let reactors = Reactors::start(&config(IdlePolicy::Sleep)).unwrap();
    let count = Arc::new(AtomicU64::new(0));
    let shared = count.clone();
    let remote = reactors.remotes()[0].clone();
    remote
        .call(move |core| {
            core.add_poller(Box::new(Counter { count: shared, until: 1000, in_flight: 0 }), Period::EveryTurn)
        })
        .unwrap();
    while remote.stats().unwrap().pollers.iter().any(|poller| poller.name == "counter") {
        std::thread::yield_now();
    }
    assert_eq!(count.load(Ordering::Relaxed), 1000);
}

#[test]
fn stopping_waits_for_what_is_in_flight() {
    let reactors = Reactors::start(&config(IdlePolicy::Spin)).unwrap();
    let count = Arc::new(AtomicU64::new(0));
    let shared = count.clone();
    reactors.remotes()[0]
        .call(move |core| {
            let poller = Counter { count: shared, until: u64::MAX, in_flight: 50 };
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
    reactors.remotes()[0]
        .call(move |core| {
            let poller = Counter { count: shared, until: 20, in_flight: 0 };
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
fn tasks_sleep_and_talk_on_one_core() {
    let reactor = Reactor::new(&Config::default()).unwrap();
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
fn a_message_to_a_typed_mailbox_wakes_its_core() {
    struct Echo(reactor::Receiver<u64>, std::sync::mpsc::Sender<u64>);
    impl Poller for Echo {
        fn name(&self) -> &str {
            "echo"
        }
        fn poll(&mut self, _now_ns: u64) -> Work {
            let mut count = 0;
            while let Some(value) = self.0.receive() {
                self.1.send(value).unwrap();
                count += 1;
            }
            Work::count(count)
        }
        fn deadline(&self) -> Option<u64> {
            if self.0.is_empty() { None } else { Some(0) }
        }
    }
    for idle in POLICIES {
        let reactors = Reactors::start(&config(idle)).unwrap();
        let (answers, answer) = std::sync::mpsc::channel();
        let sender = reactors.remotes()[0]
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
fn a_core_that_cannot_be_had_is_an_error() {
    let config = Config { cpus: CpuSet::new(vec![1023]).unwrap(), pin: true, ..Config::default() };
    assert!(matches!(Reactors::start(&config), Err(reactor::StartError::Pin { cpu: 1023, .. })));
}

#[test]
fn a_stopped_reactor_refuses_messages() {
    let reactors = Reactors::start(&config(IdlePolicy::Sleep)).unwrap();
    let remote = reactors.remotes()[0].clone();
    reactors.stop();
    assert_eq!(remote.call(|_| ()), Err(reactor::Gone));
}
