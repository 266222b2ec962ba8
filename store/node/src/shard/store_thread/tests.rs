use std::cell::RefCell;
use std::rc::Rc;

use dma::{Arena, ArenaConfig, Pool};
use os::clock::VirtualClock;
use reactor::{Reactor, ReactorConfig};

use super::*;

/// What a pool adopts at a time.
const ADOPTED_MAX: usize = 65_536;

/// Parcels of another core, all of the same memory.
fn parcels(pool: &Pool, count: usize) -> Vec<Parcel> {
    let mut buffer = pool.take(4096).unwrap();
    (0..count).map(|_| Data::One(buffer.share()).into_parcel()).collect()
}

/// With more batches than have all of their memory adopted at once, each could have a part and wait for the
/// others.
#[test]
fn batches_that_adopt_memory_do_not_wait_for_each_other() {
    let home = Pool::new(&Arena::new(ArenaConfig::default()));
    let (clock, arena) = (VirtualClock::default(), Arena::new(ArenaConfig::default()));
    let mut reactor = Reactor::new(&ReactorConfig::simulated(clock.clone(), 1, 1, &arena)).unwrap();
    let core = reactor.core();
    let adopt = |parcel| core.pool().adopt(parcel).unwrap();
    // There is capacity for two more.
    let mut adopted: Vec<Data> = parcels(&home, ADOPTED_MAX - 2).into_iter().map(adopt).collect();
    let written = Rc::new(RefCell::new(Vec::new()));
    let begin = |name: &'static str| {
        let data = parcels(&home, 3).into_iter().map(SentData::Logged).collect();
        let batch = SentBatch { blocks: BTreeMap::new(), data };
        let (of_task, written) = (core.clone(), written.clone());
        assert!(core.spawn(async move {
            let batch = batch.adopt(&of_task).await;
            of_task.sleep_ns(1).await;
            written.borrow_mut().push((name, batch.data.len()));
        }));
    };
    // The first has two of three entries, and the second begins when there is capacity for one.
    begin("first");
    reactor.turn();
    adopted.pop();
    begin("second");
    for _ in 0..100 {
        reactor.turn();
        clock.advance_to(clock.now_ns() + ADOPT_WAIT_NS);
    }
    assert_eq!(*written.borrow(), [("first", 3), ("second", 3)]);
    // Nothing else has waited for them to be dropped.
    assert_eq!(adopted.len(), ADOPTED_MAX - 3);
    drop(adopted);
    reactor.discard();
}
