use dma::{Arena, ArenaConfig};

use super::*;

/// First windows of 4 at least, 16 at most and 64 together; 100 are shared, 150 for all, 175 for who makes
/// progress.
const LIMITS: MemoryLimits = MemoryLimits {
    first_windows: 64,
    first_window_min: 4,
    first_window_max: 16,
    shared: 100,
    unproven: 150,
    all: 175,
};

fn core() -> Rc<CoreMemory> {
    Rc::new(CoreMemory::new(LIMITS))
}

/// A share of a peer of its own.
fn share(core: &Rc<CoreMemory>, window_max: usize) -> MemoryShare {
    MemoryShare::new(Rc::new(PeerMemory::new(core.clone(), usize::MAX)), window_max)
}

impl MemoryShare {
    fn try_add(&mut self, bytes: usize) -> bool {
        let is_admitted = self.admits(bytes);
        if is_admitted {
            self.add(bytes);
        }
        is_admitted
    }

    /// Takes as much as it may in steps of `bytes`, and returns how much it holds.
    fn fill(&mut self, bytes: usize) -> usize {
        while self.try_add(bytes) {}
        self.held()
    }

    /// Moves as much as a window, so that it widens as far as it may.
    fn earn(&mut self) {
        for _ in 0..16 {
            let held = self.fill(1);
            self.remove(held);
        }
        self.checked(true, false, false);
    }
}

#[test]
fn a_window_widens_while_what_it_holds_is_given_back_and_only_then() {
    let core = core();
    let mut one = share(&core, 40);
    assert_eq!(one.fill(4), 16);
    for _ in 0..100 {
        assert!(!one.try_add(4));
    }
    assert_eq!(one.window(), 16, "nothing was given back");
    let mut widest = Vec::new();
    for _ in 0..4 {
        one.remove(one.held());
        widest.push(one.fill(4));
    }
    assert_eq!(widest, [32, 40, 40, 40]);
    assert_eq!(core.held(), 40);
    drop(one);
    assert_eq!(core.held(), 0);
}

#[test]
fn one_command_always_fits_a_share_that_holds_nothing() {
    let core = core();
    let mut one = share(&core, 1);
    assert!(one.try_add(60) && !one.try_add(1));
    one.remove(60);
    assert!(one.try_add(1));
}

#[test]
fn first_windows_are_smaller_the_more_connections_there_are() {
    let core = core();
    let shares: Vec<MemoryShare> = (0..32).map(|_| share(&core, 100)).collect();
    assert_eq!((shares[0].window(), shares[7].window(), shares[31].window()), (16, 8, 4));
    drop(shares);
    assert_eq!(share(&core, 100).window(), 16);
}

#[test]
fn what_a_connection_has_earned_is_its_own_only_while_others_leave_it() {
    let core = core();
    let (mut one, mut other) = (share(&core, 100), share(&core, 100));
    one.earn();
    other.earn();
    assert_eq!((one.window(), other.window()), (64, 64), "half of what is shared is spare");
    assert_eq!(one.fill(1), 64);
    assert_eq!(other.fill(1), 36);
    // Beyond, it has its first window, however much others hold.
    let mut third = share(&core, 100);
    assert_eq!(third.fill(1), 16);
    assert_eq!(core.held(), 116);
    assert!(core.refusals() > 0, "it would have more if others held less");
}

#[test]
fn the_reserve_is_for_who_has_moved_data_and_silent_newcomers_do_not_get_it() {
    let core = core();
    let mut honest = share(&core, 100);
    honest.earn();
    let mut silent: Vec<MemoryShare> = (0..40).map(|_| share(&core, 100)).collect();
    silent.iter_mut().for_each(|share| _ = share.fill(4));
    assert!((LIMITS.unproven - 3..=LIMITS.unproven).contains(&core.held()), "{}", core.held());
    assert!(!share(&core, 100).admits(4), "there is nothing left for a newcomer");
    assert_eq!(honest.fill(4), 4, "its first window");
    // It may be larger than the first window, if it holds nothing.
    honest.remove(4);
    assert!(honest.try_add(20));
    honest.remove(20);
    // Who was slow has no claim any more, until it moves data again.
    honest.checked(false, true, true);
    assert!(!honest.admits(4));
    honest.checked(false, false, true);
    assert!(!honest.admits(4));
    honest.checked(true, false, true);
    assert!(honest.admits(4));
}

#[test]
fn who_is_slow_while_others_lack_memory_earns_its_window_again() {
    let core = core();
    let mut one = share(&core, 100);
    one.earn();
    assert_eq!(one.window(), 64);
    one.checked(false, true, false);
    assert_eq!(one.window(), 64, "there is enough for all");
    one.checked(false, true, true);
    assert_eq!(one.window(), 16);
}

#[test]
fn a_peer_leaves_a_part_to_others_and_its_connections_with_progress_continue() {
    let core = core();
    let owner = || MemoryOwner::Name(b"one"[..].into());
    let peer = core.strict_peer(owner(), 50);
    assert!(Rc::ptr_eq(&peer, &core.peer(owner(), 7)));
    let mut own: Vec<_> = (0..3).map(|_| MemoryShare::new(peer.clone(), 100)).collect();
    own.iter_mut().for_each(|share| share.earn());
    assert_eq!((own[0].fill(1), peer.held()), (50, 50), "the peer has no more");
    own[1].checked(false, true, false);
    assert_eq!(own[1].fill(1), 0);
    assert!(own[1].peer_refusals() > 0);
    assert_eq!(own[2].fill(1), 16, "it makes progress, and has its first window");
    let mut other = share(&core, 100);
    assert_eq!(other.fill(1), 16);
    drop(own);
    assert_eq!((peer.held(), core.held()), (0, 16));
}

#[test]
fn a_newcomer_of_a_peer_has_its_first_window_unless_the_peer_has_a_strict_limit() {
    for (is_strict, first) in [(false, 16), (true, 0)] {
        let core = core();
        let owner = MemoryOwner::Name(b"one"[..].into());
        let peer = if is_strict { core.strict_peer(owner, 50) } else { core.peer(owner, 50) };
        let mut silent = MemoryShare::new(peer.clone(), 100);
        silent.earn();
        assert_eq!(silent.fill(1), 50);
        assert_eq!(MemoryShare::new(peer, 100).fill(1), first);
    }
}

#[test]
fn one_command_larger_than_a_first_window_may_be_beyond_the_shared_half() {
    let core = core();
    let mut holders: Vec<MemoryShare> = (0..9).map(|_| share(&core, 100)).collect();
    holders.iter_mut().for_each(|share| assert!(share.try_add(11)));
    let (mut one, mut other) = (share(&core, 100), share(&core, 100));
    assert!(one.try_add(1000));
    assert!(!other.try_add(1000), "one at a time");
    one.remove(1000);
    one.checked(true, false, true);
    assert!(other.try_add(1000));
    drop(other);
    assert!(one.try_add(500));
    assert_eq!(core.held(), 599);
}

#[test]
fn the_only_large_command_may_be_admitted_again_and_leaves_its_place_at_the_next_check() {
    let core = core();
    let mut holders: Vec<MemoryShare> = (0..9).map(|_| share(&core, 100)).collect();
    holders.iter_mut().for_each(|share| assert!(share.try_add(11)));
    let (mut one, mut other) = (share(&core, 100), share(&core, 100));
    assert!(one.admits(1000));
    // The pool had no buffers for it, or there is another one after it in the same second.
    for _ in 0..3 {
        assert!(one.try_add(1000));
        one.remove(1000);
    }
    one.checked(true, false, true);
    assert!(other.try_add(1000), "the place is free");
}

/// Connections that have moved data, and then take as much as they may and give nothing back.
fn sleepers(peer: &Rc<PeerMemory>, count: usize) -> Vec<MemoryShare> {
    let mut shares: Vec<_> = (0..count).map(|_| MemoryShare::new(peer.clone(), 100)).collect();
    shares.iter_mut().for_each(|share| share.earn());
    shares
}

#[test]
fn a_peer_leaves_half_of_the_reserve_to_others_even_if_all_its_connections_moved_data() {
    let core = core();
    let peer = |max| Rc::new(PeerMemory::new(core.clone(), max));
    let (mut honest, mut third) = (share(&core, 100), share(&core, 100));
    honest.earn();
    third.earn();
    let hostile = peer(usize::MAX);
    let mut asleep = sleepers(&hostile, 60);
    asleep.iter_mut().for_each(|share| _ = share.fill(4));
    let reserve = LIMITS.all - LIMITS.unproven;
    assert!(core.held() <= LIMITS.unproven + reserve / 2, "{}", core.held());
    assert_eq!(honest.fill(4), 4, "its first window");
    // The same from one address under other names.
    let named = peer(usize::MAX);
    let mut renamed: Vec<_> = sleepers(&named, 10);
    for share in renamed.drain(..) {
        assert!(!share.with_source(hostile.clone()).admits(4));
    }
    assert!(third.admits(4) && core.refusals() > 0);
    // What comes back to the reserve is there for its peer again.
    let held = core.held();
    drop(asleep);
    assert!(core.held() < held);
    assert_eq!((hostile.reserved.get(), core.reserved.get()), (0, honest.held()));
    drop(honest);
    assert_eq!(core.reserved.get(), 0);
}

#[test]
fn data_that_comes_at_once_has_no_window_while_there_is_enough_and_then_the_first() {
    let arena = Arena::new(ArenaConfig { limit_bytes: 8 << 20, hugepages: false, shared: false });
    let pool = Pool::new(&arena);
    let core = core();
    let mut one = share(&core, 100);
    let taken: Vec<_> = (0..10).map(|_| one.take_at_once(10, &pool).unwrap()).collect();
    assert_eq!((one.held(), core.held()), (100, 100));
    assert_eq!(one.take_at_once(1, &pool).err(), Some(NoMemory::Lacking));
    // Its window is not affected.
    assert!(one.fits(1000));
    let mut other = share(&core, 100);
    assert!(other.take_at_once(16, &pool).is_ok() && other.take_at_once(1, &pool).is_err());
    drop(taken);
    one.remove_at_once(100);
    drop((one, other));
    assert_eq!(core.held(), 0);
}

#[test]
fn a_refusal_says_whether_the_connection_itself_or_others_hold_the_memory() {
    let arena = Arena::new(ArenaConfig { limit_bytes: 2 << 20, hugepages: false, shared: false });
    let pool = Pool::new(&arena);
    let mut one = MemoryShare::new(Rc::new(PeerMemory::new(Rc::default(), usize::MAX)), 8192);
    let first = one.take(8192, &pool).unwrap();
    assert_eq!(one.take(4096, &pool).err(), Some(NoMemory::Full));
    let mut other = MemoryShare::unlimited();
    let mut rest = Vec::new();
    // The largest that there is, in whole units.
    while let Ok(buffer) = other.take_buffer(40960, 8192, &pool) {
        assert!(buffer.len() == 40960 || buffer.len() == 16384 || buffer.len() == 8192, "{}", buffer.len());
        rest.push(buffer);
    }
    assert_eq!(other.held(), rest.iter().map(Buffer::len).sum::<usize>());
    assert_eq!(other.take(8192, &pool).err(), Some(NoMemory::Lacking));
    drop(first);
    one.remove(8192);
    assert!(other.take_buffer(40960, 8192, &pool).is_ok());
}
