//! Cores in virtual time: what a simulation replaces, and how it turns them.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::rc::Rc;

use os::clock::VirtualClock;
use reactor::{Core, Reactor, ReactorConfig};

fn reactor(clock: &VirtualClock, seed: u64) -> Reactor {
    let arena = dma::Arena::new(dma::ArenaConfig { limit_bytes: 2 << 20, hugepages: false, shared: false });
    Reactor::for_core(&ReactorConfig::simulated(clock.clone(), seed, 2, &arena), 1).unwrap()
}

/// Starts a task that counts how often `wait` completed.
fn count<F: Future<Output = ()>>(core: &Core, wait: impl Fn(&Core) -> F + 'static) -> Rc<Cell<u32>> {
    let (counted, task_core) = (Rc::new(Cell::new(0)), core.clone());
    let cell = counted.clone();
    assert!(core.spawn(async move {
        loop {
            wait(&task_core).await;
            cell.set(cell.get() + 1);
        }
    }));
    counted
}

#[test]
fn timers_fire_when_the_virtual_time_comes_and_deadlines_say_when() {
    let clock = VirtualClock::default();
    clock.advance_to(1000);
    let mut reactor = reactor(&clock, 1);
    let core = reactor.core();
    assert_eq!((core.now_ns(), core.index(), core.clock().is_virtual()), (1000, 1, true));
    let woken = count(&core, |core| core.sleep_ns(500));
    reactor.turn();
    assert_eq!((woken.get(), reactor.deadline()), (0, Some(1500)));
    clock.advance_to(1499);
    reactor.turn();
    assert_eq!(woken.get(), 0);
    clock.advance_to(1500);
    reactor.turn();
    assert_eq!((woken.get(), reactor.deadline()), (1, Some(2000)));
    reactor.discard();
}

#[test]
fn raised_events_and_messages_reach_a_core_that_no_kernel_wakes() {
    let mut reactor = reactor(&VirtualClock::default(), 1);
    let core = reactor.core();
    let events = count(&core, |core| core.next_event());
    reactor.turn();
    core.event_loop().take_wake();
    assert!(!reactor.turn() && events.get() == 0);
    core.event_loop().raise_event();
    assert!(reactor.turn() && events.get() == 1);
    core.event_loop().take_wake();
    let ran = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let flag = ran.clone();
    reactor.handle().post(move |_| flag.store(true, std::sync::atomic::Ordering::Relaxed)).unwrap();
    assert!(core.event_loop().take_wake() && !core.event_loop().take_wake(), "the message wakes once");
    reactor.turn();
    assert!(ran.load(std::sync::atomic::Ordering::Relaxed));
    reactor.discard();
}

#[test]
fn equal_seeds_give_equal_randomness_and_an_environment_is_attached_once() {
    let draw = |seed| {
        let core = reactor(&VirtualClock::default(), seed).core();
        [core.rng().next_bits(), core.rng().next_bits()]
    };
    assert_eq!(draw(7), draw(7));
    assert_ne!(draw(7), draw(8));
    assert_ne!(draw(7)[0], draw(7)[1], "each component gets its own");
    let core = reactor(&VirtualClock::default(), 1).core();
    assert!(core.environment::<u32>().is_none());
    assert!(core.attach_environment(Rc::new(5_u32)) && !core.attach_environment(Rc::new(6_u32)));
    assert_eq!((core.environment::<u32>().as_deref(), core.environment::<u8>()), (Some(&5), None));
}

#[test]
fn a_discarded_reactor_drops_tasks_and_pollers_that_hold_its_core() {
    let reactor = reactor(&VirtualClock::default(), 1);
    let (core, held) = (reactor.core(), Rc::new(()));
    let (own, cell) = (core.clone(), held.clone());
    assert!(core.spawn(async move {
        let _both = (own, cell);
        std::future::pending::<()>().await;
    }));
    drop(core);
    reactor.discard();
    assert_eq!(Rc::strong_count(&held), 1);
}
