use std::collections::BTreeMap;

use proptest::prelude::*;
use ring::Op;

use super::*;

const UP: PathView =
    PathView { connected: true, ana: AnaState::Optimized, waits_until_ns: u64::MAX, preferred: false };
const DOWN: PathView = PathView { connected: false, ..UP };

fn machine(policy: Policy, views: &[PathView]) -> Multipath<()> {
    let mut machine = Multipath::new(policy, 1024, 3);
    views.iter().for_each(|view| {
        machine.add_path(*view);
    });
    machine
}

fn submit(machine: &mut Multipath<()>, tags: std::ops::Range<u64>) {
    tags.for_each(|tag| machine.submit(Request::new(Tag(tag), Op::Write, tag, 1), 7, 0));
}

/// Completes everything that a path was sent.
fn answer(machine: &mut Multipath<()>, path: usize, status: Status) -> usize {
    let sent: Vec<_> = machine.outgoing(path).drain(..).collect();
    let count = sent.len();
    sent.into_iter().for_each(|request| machine.returned(path, request.complete(status), 0));
    count
}

fn outcomes(machine: &mut Multipath<()>) -> BTreeMap<u64, Status> {
    machine.done().drain(..).map(|(_, done)| (done.tag().0, done.status())).collect()
}

#[test]
fn the_active_path_stays_until_it_fails_and_the_other_takes_over() {
    let mut machine = machine(Policy::ActivePassive, &[UP, UP]);
    submit(&mut machine, 0..10);
    assert_eq!((machine.in_flight(0), machine.in_flight(1)), (10, 0));
    machine.set_path(0, DOWN, 0);
    assert_eq!((machine.in_flight(0), machine.in_flight(1)), (0, 10));
    machine.set_path(0, UP, 0);
    submit(&mut machine, 10..11);
    assert_eq!(machine.in_flight(1), 11);
    machine.set_path(0, PathView { preferred: true, ..UP }, 0);
    assert_eq!(machine.current(), Some(0));
    assert_eq!(answer(&mut machine, 1, Status::SUCCESS), 11);
    assert_eq!(outcomes(&mut machine).len(), 11);
}

#[test]
fn a_non_optimized_path_carries_io_only_while_there_is_no_better() {
    let slow = PathView { ana: AnaState::NonOptimized, ..UP };
    let mut machine = machine(Policy::ActiveActive(Selector::RoundRobin { min_io: 1 }), &[slow, UP, slow]);
    submit(&mut machine, 0..4);
    assert_eq!([0, 1, 2].map(|path| machine.in_flight(path)), [0, 4, 0]);
    machine.set_path(1, PathView { ana: AnaState::Inaccessible, ..UP }, 0);
    assert_eq!([0, 1, 2].map(|path| machine.in_flight(path)), [2, 0, 2]);
}

#[test]
fn round_robin_gives_each_path_as_many() {
    for min_io in [1, 4] {
        let policy = Policy::ActiveActive(Selector::RoundRobin { min_io });
        let mut machine = machine(policy, &[UP, UP, UP]);
        submit(&mut machine, 0..300);
        assert_eq!([0, 1, 2].map(|path| machine.in_flight(path)), [100, 100, 100]);
        let runs: Vec<u64> = machine.outgoing(1).iter().map(|request| request.lba).take(8).collect();
        let first = if min_io == 1 { [1, 4, 7, 10, 13, 16, 19, 22] } else { [4, 5, 6, 7, 16, 17, 18, 19] };
        // The first turn of all begins with the current path.
        assert_eq!(runs, first);
    }
}

#[test]
fn queue_depth_picks_the_path_with_the_fewest() {
    let mut machine = machine(Policy::ActiveActive(Selector::QueueDepth), &[UP, UP]);
    submit(&mut machine, 0..10);
    assert_eq!(answer(&mut machine, 1, Status::SUCCESS), 5);
    submit(&mut machine, 10..14);
    assert_eq!((machine.in_flight(0), machine.in_flight(1)), (5, 4));
}

#[test]
fn an_ana_status_takes_the_path_out_until_its_state_was_read() {
    let mut machine = machine(Policy::ActivePassive, &[UP, UP]);
    submit(&mut machine, 0..2);
    assert_eq!(answer(&mut machine, 0, Status::ANA_INACCESSIBLE), 2);
    assert!(machine.is_stale(0) && !machine.is_usable(0));
    assert_eq!(machine.in_flight(1), 2);
    answer(&mut machine, 1, Status::ANA_TRANSITION);
    // Neither is usable, both may be again.
    assert_eq!((outcomes(&mut machine).len(), machine.outstanding()), (0, 2));
    machine.refreshed(1, 0);
    assert_eq!(answer(&mut machine, 1, Status::SUCCESS), 2);
    assert_eq!(outcomes(&mut machine), BTreeMap::from([(0, Status::SUCCESS), (1, Status::SUCCESS)]));
    assert_eq!(machine.counts(0), PathCounts { sent: 2, retried: 2 });
}

#[test]
fn io_waits_for_a_path_as_long_as_it_may_and_then_fails_as_a_path_does() {
    let mut machine = machine(Policy::ActivePassive, &[PathView { waits_until_ns: 100, ..DOWN }]);
    submit(&mut machine, 0..3);
    assert_eq!((machine.deadline_ns(), machine.outstanding()), (Some(100), 3));
    machine.dispatch(99);
    assert!(machine.done().is_empty());
    machine.dispatch(100);
    assert!(outcomes(&mut machine).values().all(|status| *status == Status::HOST_PATHING_ERROR));
    // From then on at once.
    machine.submit(Request::new(Tag(9), Op::Read, 0, 1), 0, 200);
    assert_eq!(outcomes(&mut machine)[&9], Status::HOST_PATHING_ERROR);
    let lost = PathView { ana: AnaState::PersistentLoss, ..UP };
    machine.set_path(0, lost, 0);
    submit(&mut machine, 0..1);
    assert_eq!(outcomes(&mut machine)[&0], Status::ANA_PERSISTENT_LOSS);
}

#[test]
fn errors_of_the_medium_are_not_the_paths() {
    let mut machine = machine(Policy::ActivePassive, &[UP, UP]);
    submit(&mut machine, 0..1);
    answer(&mut machine, 0, Status::UNRECOVERED_READ_ERROR.do_not_retry());
    assert_eq!(outcomes(&mut machine)[&0], Status::UNRECOVERED_READ_ERROR.do_not_retry());
    submit(&mut machine, 0..1);
    let mut tries = 0;
    while machine.outstanding() > 0 {
        tries += answer(&mut machine, 0, Status::NAMESPACE_NOT_READY);
        tries += answer(&mut machine, 1, Status::NAMESPACE_NOT_READY);
    }
    assert_eq!((tries, outcomes(&mut machine)[&0]), (4, Status::NAMESPACE_NOT_READY));
}

#[test]
fn a_retry_delay_is_kept() {
    let mut machine = machine(Policy::ActivePassive, &[UP]);
    submit(&mut machine, 0..1);
    let request = machine.outgoing(0).pop().unwrap();
    machine.returned_later(0, request.complete(Status::COMMAND_INTERRUPTED), 50, 10);
    assert_eq!((machine.deadline_ns(), machine.in_flight(0)), (Some(60), 0));
    machine.dispatch(59);
    assert_eq!(machine.in_flight(0), 0);
    machine.dispatch(60);
    assert_eq!(answer(&mut machine, 0, Status::SUCCESS), 1);
    assert_eq!(outcomes(&mut machine)[&0], Status::SUCCESS);
}

#[derive(Clone, Debug)]
enum Step {
    Submit(u8),
    /// What the path was sent is on its way.
    Take(u8, u8),
    /// One of what is on its way comes back.
    Return(u8, u8, u8),
    Set(u8, u8),
    Refresh(u8),
    Pass(u8),
    Policy(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1..6u8).prop_map(Step::Submit),
        4 => (0..3u8, 0..8u8).prop_map(|(path, count)| Step::Take(path, count)),
        8 => (0..3u8, any::<u8>(), 0..8u8).prop_map(|(path, which, status)| Step::Return(path, which, status)),
        3 => (0..3u8, 0..7u8).prop_map(|(path, view)| Step::Set(path, view)),
        2 => (0..3u8).prop_map(Step::Refresh),
        1 => (0..50u8).prop_map(Step::Pass),
        1 => (0..3u8).prop_map(Step::Policy),
    ]
}

fn policy(index: u8) -> Policy {
    match index {
        0 => Policy::ActivePassive,
        1 => Policy::ActiveActive(Selector::RoundRobin { min_io: 2 }),
        _ => Policy::ActiveActive(Selector::QueueDepth),
    }
}

fn view(index: u8, now_ns: u64) -> PathView {
    match index {
        0 => DOWN,
        1 => PathView { waits_until_ns: 0, ..DOWN },
        2 => PathView { waits_until_ns: now_ns + 40, ..DOWN },
        3 => PathView { ana: AnaState::Inaccessible, ..UP },
        4 => PathView { ana: AnaState::NonOptimized, ..UP },
        5 => PathView { ana: AnaState::PersistentLoss, ..UP },
        _ => UP,
    }
}

const STATUSES: [Status; 8] = [
    Status::SUCCESS,
    Status::SUCCESS,
    Status::SUCCESS,
    Status::ANA_INACCESSIBLE,
    Status::ANA_TRANSITION,
    Status::HOST_PATHING_ERROR,
    Status::NAMESPACE_NOT_READY,
    Status::UNRECOVERED_READ_ERROR.do_not_retry(),
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// Whatever the paths do and in whatever order: each request completes exactly once, with its own name,
    /// none is lost, and none is put on a path that is not usable.
    #[test]
    fn every_request_completes_exactly_once(first in 0..3u8, steps in prop::collection::vec(step(), 1..200)) {
        let mut machine = machine(policy(first), &[UP, UP, DOWN]);
        let mut away: [Vec<Request<()>>; 3] = Default::default();
        let mut completed = BTreeMap::new();
        let (mut now_ns, mut submitted) = (0u64, 0u64);
        let check = |machine: &mut Multipath<()>, completed: &mut BTreeMap<u64, u32>| {
            for (note, done) in machine.done().drain(..) {
                prop_assert_eq!(u64::from(note), done.tag().0 % 5);
                prop_assert_eq!(done.request().lba, done.tag().0 * 3);
                *completed.entry(done.tag().0).or_insert(0) += 1;
            }
            for path in 0..3 {
                prop_assert!(machine.is_usable(path) || machine.outgoing(path).is_empty());
            }
            Ok(())
        };
        for step in steps {
            match step {
                Step::Submit(count) => for _ in 0..count {
                    let request = Request::new(Tag(submitted), Op::Write, submitted * 3, 1);
                    machine.submit(request, (submitted % 5) as u32, now_ns);
                    submitted += 1;
                },
                Step::Take(path, count) => {
                    let path = usize::from(path);
                    let outgoing = machine.outgoing(path);
                    let count = usize::from(count).min(outgoing.len());
                    away[path].extend(outgoing.drain(..count));
                }
                Step::Return(path, which, status) => {
                    let path = usize::from(path);
                    if !away[path].is_empty() {
                        let which = usize::from(which) % away[path].len();
                        let request = away[path].swap_remove(which);
                        machine.returned(path, request.complete(STATUSES[usize::from(status)]), now_ns);
                    }
                }
                Step::Set(path, index) => {
                    let path = usize::from(path);
                    let new = view(index, now_ns);
                    machine.set_path(path, new, now_ns);
                    if !new.connected {
                        // A lost link gives back what it had.
                        for request in std::mem::take(&mut away[path]) {
                            machine.returned(path, request.complete(Status::HOST_PATHING_ERROR), now_ns);
                        }
                    }
                }
                Step::Refresh(path) => machine.refreshed(path.into(), now_ns),
                Step::Pass(ns) => {
                    now_ns += u64::from(ns);
                    machine.dispatch(now_ns);
                }
                Step::Policy(index) => machine.set_policy(policy(index)),
            }
            check(&mut machine, &mut completed)?;
            let there: usize = away.iter().map(Vec::len).sum();
            prop_assert!(machine.outstanding() + completed.len() == submitted as usize && there <= machine.outstanding());
        }
        // At last one path works.
        machine.set_path(0, UP, now_ns);
        machine.refreshed(0, now_ns);
        while machine.outstanding() > 0 {
            for (path, away) in away.iter_mut().enumerate() {
                away.append(machine.outgoing(path));
                for request in away.drain(..) {
                    machine.returned(path, request.complete(Status::SUCCESS), now_ns);
                }
            }
            machine.dispatch(now_ns);
            check(&mut machine, &mut completed)?;
        }
        prop_assert_eq!(completed.len() as u64, submitted);
        prop_assert!(completed.values().all(|times| *times == 1));
    }

    /// Nothing goes to a worse path while a better one is usable, and nothing waits while any is.
    #[test]
    fn the_best_usable_path_is_taken(first in 0..3u8, views in prop::collection::vec(0..7u8, 1..5)) {
        let views: Vec<PathView> = views.into_iter().map(|index| view(index, 0)).collect();
        let mut machine = machine(policy(first), &views);
        submit(&mut machine, 0..20);
        let best = (0..views.len()).filter_map(|path| machine.paths[path].rank()).min();
        let sent: u32 = (0..views.len()).map(|path| machine.in_flight(path)).sum();
        prop_assert_eq!(sent, if best.is_some() { 20 } else { 0 });
        for path in 0..views.len() {
            prop_assert!(machine.in_flight(path) == 0 || machine.paths[path].rank() == best);
        }
    }
}
