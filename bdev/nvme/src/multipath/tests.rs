use std::collections::BTreeMap;

use block_io::Op;
use proptest::prelude::*;

use super::*;

const UP: PathView =
    PathView { connected: true, ana: AnaState::Optimized, wait: IoWait::Unlimited, preferred: false };
const DOWN: PathView = PathView { connected: false, ..UP };

fn multipath(policy: Policy, views: &[PathView]) -> Multipath<()> {
    let mut multipath = Multipath::new(policy, 1024, 3);
    views.iter().for_each(|view| {
        multipath.add_path(*view);
    });
    multipath
}

fn submit(multipath: &mut Multipath<()>, tags: std::ops::Range<u64>) {
    tags.for_each(|tag| multipath.submit(Request::new(Tag(tag), Op::Write, tag, 1), 7, 0));
}

/// Completes all requests that a path was sent.
fn complete_all(multipath: &mut Multipath<()>, path: usize, status: Status) -> usize {
    let sent: Vec<_> = multipath.outgoing(path).drain(..).collect();
    let count = sent.len();
    sent.into_iter().for_each(|request| multipath.path_completed(path, request.complete(status), 0));
    count
}

fn statuses(multipath: &mut Multipath<()>) -> BTreeMap<u64, Status> {
    multipath.completed().drain(..).map(|(_, done)| (done.tag().0, done.status())).collect()
}

#[test]
fn active_passive_fails_over_and_does_not_fail_back_unless_preferred() {
    let mut multipath = multipath(Policy::ActivePassive, &[UP, UP]);
    submit(&mut multipath, 0..10);
    assert_eq!((multipath.in_flight(0), multipath.in_flight(1)), (10, 0));
    multipath.set_path(0, DOWN, 0);
    assert_eq!((multipath.in_flight(0), multipath.in_flight(1)), (0, 10));
    multipath.set_path(0, UP, 0);
    submit(&mut multipath, 10..11);
    assert_eq!(multipath.in_flight(1), 11);
    multipath.set_path(0, PathView { preferred: true, ..UP }, 0);
    assert_eq!(multipath.current(), Some(0));
    assert_eq!(complete_all(&mut multipath, 1, Status::SUCCESS), 11);
    assert_eq!(statuses(&mut multipath).len(), 11);
}

#[test]
fn non_optimized_paths_are_used_only_without_an_optimized_one() {
    let slow = PathView { ana: AnaState::NonOptimized, ..UP };
    let mut multipath =
        multipath(Policy::ActiveActive(Selector::RoundRobin { min_io: 1 }), &[slow, UP, slow]);
    submit(&mut multipath, 0..4);
    assert_eq!([0, 1, 2].map(|path| multipath.in_flight(path)), [0, 4, 0]);
    multipath.set_path(1, PathView { ana: AnaState::Inaccessible, ..UP }, 0);
    assert_eq!([0, 1, 2].map(|path| multipath.in_flight(path)), [2, 0, 2]);
}

#[test]
fn round_robin_distributes_io_evenly() {
    for min_io in [1, 4] {
        let policy = Policy::ActiveActive(Selector::RoundRobin { min_io });
        let mut multipath = multipath(policy, &[UP, UP, UP]);
        submit(&mut multipath, 0..300);
        assert_eq!([0, 1, 2].map(|path| multipath.in_flight(path)), [100, 100, 100]);
        let runs: Vec<u64> = multipath.outgoing(1).iter().map(|request| request.lba).take(8).collect();
        let first = if min_io == 1 { [1, 4, 7, 10, 13, 16, 19, 22] } else { [4, 5, 6, 7, 16, 17, 18, 19] };
        // The first turn starts with the current path.
        assert_eq!(runs, first);
    }
}

#[test]
fn queue_depth_selects_the_least_busy_path() {
    let mut multipath = multipath(Policy::ActiveActive(Selector::QueueDepth), &[UP, UP]);
    submit(&mut multipath, 0..10);
    assert_eq!(complete_all(&mut multipath, 1, Status::SUCCESS), 5);
    submit(&mut multipath, 10..14);
    assert_eq!((multipath.in_flight(0), multipath.in_flight(1)), (5, 4));
}

#[test]
fn an_ana_error_makes_a_path_unusable_until_the_log_is_read() {
    let mut multipath = multipath(Policy::ActivePassive, &[UP, UP]);
    submit(&mut multipath, 0..2);
    assert_eq!(complete_all(&mut multipath, 0, Status::ANA_INACCESSIBLE), 2);
    assert!(multipath.is_ana_stale(0) && !multipath.is_usable(0));
    assert_eq!(multipath.in_flight(1), 2);
    complete_all(&mut multipath, 1, Status::ANA_TRANSITION);
    // Neither is usable, but both may recover.
    assert_eq!((statuses(&mut multipath).len(), multipath.outstanding()), (0, 2));
    multipath.ana_refreshed(1, 0);
    assert_eq!(complete_all(&mut multipath, 1, Status::SUCCESS), 2);
    assert_eq!(statuses(&mut multipath), BTreeMap::from([(0, Status::SUCCESS), (1, Status::SUCCESS)]));
    assert_eq!(multipath.counts(0), PathCounts { sent: 2, retried: 2 });
}

#[test]
fn io_waits_for_a_path_until_the_timeout_and_then_fails() {
    let mut multipath = multipath(Policy::ActivePassive, &[PathView { wait: IoWait::Until(100), ..DOWN }]);
    submit(&mut multipath, 0..3);
    assert_eq!((multipath.deadline_ns(), multipath.outstanding()), (Some(100), 3));
    multipath.dispatch(99);
    assert!(multipath.completed().is_empty());
    multipath.dispatch(100);
    assert!(statuses(&mut multipath).values().all(|status| *status == Status::HOST_PATHING_ERROR));
    // Later I/O fails at once.
    multipath.submit(Request::new(Tag(9), Op::Read, 0, 1), 0, 200);
    assert_eq!(statuses(&mut multipath)[&9], Status::HOST_PATHING_ERROR);
    let lost = PathView { ana: AnaState::PersistentLoss, ..UP };
    multipath.set_path(0, lost, 0);
    submit(&mut multipath, 0..1);
    assert_eq!(statuses(&mut multipath)[&0], Status::ANA_PERSISTENT_LOSS);
}

#[test]
fn media_errors_are_not_retried_on_another_path_and_others_are_bounded() {
    let mut multipath = multipath(Policy::ActivePassive, &[UP, UP]);
    submit(&mut multipath, 0..1);
    complete_all(&mut multipath, 0, Status::UNRECOVERED_READ_ERROR.do_not_retry());
    assert_eq!(statuses(&mut multipath)[&0], Status::UNRECOVERED_READ_ERROR.do_not_retry());
    submit(&mut multipath, 0..1);
    let mut tries = 0;
    while multipath.outstanding() > 0 {
        tries += complete_all(&mut multipath, 0, Status::NAMESPACE_NOT_READY);
        tries += complete_all(&mut multipath, 1, Status::NAMESPACE_NOT_READY);
    }
    assert_eq!((tries, statuses(&mut multipath)[&0]), (4, Status::NAMESPACE_NOT_READY));
}

#[test]
fn a_command_retry_delay_is_respected() {
    let mut multipath = multipath(Policy::ActivePassive, &[UP]);
    submit(&mut multipath, 0..1);
    let request = multipath.outgoing(0).pop().unwrap();
    multipath.path_completed_after(0, request.complete(Status::COMMAND_INTERRUPTED), 50, 10);
    assert_eq!((multipath.deadline_ns(), multipath.in_flight(0)), (Some(60), 0));
    multipath.dispatch(59);
    assert_eq!(multipath.in_flight(0), 0);
    multipath.dispatch(60);
    assert_eq!(complete_all(&mut multipath, 0, Status::SUCCESS), 1);
    assert_eq!(statuses(&mut multipath)[&0], Status::SUCCESS);
}

#[test]
fn a_write_that_a_silent_controller_may_execute_is_not_repeated_before_it_stopped() {
    let mut multipath = multipath(Policy::ActivePassive, &[UP, UP]);
    multipath.submit(Request::new(Tag(0), Op::WriteZeroes, 0, 1), 0, 0);
    multipath.submit(Request::new(Tag(1), Op::Read, 0, 1), 0, 0);
    let sent = std::mem::take(multipath.outgoing(0));
    multipath.set_path(0, PathView { connected: false, ..UP }, 10);
    for request in sent {
        multipath.path_lost(0, request.complete(Status::HOST_PATHING_ERROR), 50, 10);
    }
    // The read moves at once, the write when the controller has stopped.
    assert_eq!((multipath.in_flight(1), multipath.deadline_ns()), (1, Some(50)));
    multipath.dispatch(49);
    assert_eq!(multipath.in_flight(1), 1);
    multipath.dispatch(50);
    assert_eq!(multipath.in_flight(1), 2);
    // Without another path the error waits too.
    let sent = std::mem::take(multipath.outgoing(1));
    let gone = PathView { wait: IoWait::No, ..DOWN };
    multipath.set_path(0, gone, 60);
    multipath.set_path(1, gone, 60);
    for request in sent {
        multipath.path_lost(1, request.complete(Status::HOST_PATHING_ERROR), 90, 60);
    }
    assert_eq!(statuses(&mut multipath).into_keys().collect::<Vec<_>>(), [1]);
    multipath.dispatch(90);
    assert_eq!(statuses(&mut multipath)[&0], Status::HOST_PATHING_ERROR);
}

#[derive(Clone, Debug)]
enum Step {
    Submit(u8),
    /// The path's queue accepts some of its outgoing requests.
    Take(u8, u8),
    /// One of the requests in flight completes.
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
        1 => PathView { wait: IoWait::No, ..DOWN },
        2 => PathView { wait: IoWait::Until(now_ns + 40), ..DOWN },
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

    /// For every sequence of path events each request completes exactly once, with its own tag, and none is assigned
    /// to a path that is not usable.
    #[test]
    fn every_request_completes_exactly_once(first in 0..3u8, steps in prop::collection::vec(step(), 1..200)) {
        let mut multipath = multipath(policy(first), &[UP, UP, DOWN]);
        let mut in_flight: [Vec<Request<()>>; 3] = Default::default();
        let mut completed = BTreeMap::new();
        let (mut now_ns, mut submitted) = (0u64, 0u64);
        let check = |multipath: &mut Multipath<()>, completed: &mut BTreeMap<u64, u32>| {
            for (user_data, done) in multipath.completed().drain(..) {
                prop_assert_eq!(u64::from(user_data), done.tag().0 % 5);
                prop_assert_eq!(done.request().lba, done.tag().0 * 3);
                *completed.entry(done.tag().0).or_insert(0) += 1;
            }
            for path in 0..3 {
                prop_assert!(multipath.is_usable(path) || multipath.outgoing(path).is_empty());
            }
            Ok(())
        };
        for step in steps {
            match step {
                Step::Submit(count) => for _ in 0..count {
                    let request = Request::new(Tag(submitted), Op::Write, submitted * 3, 1);
                    multipath.submit(request, (submitted % 5) as u32, now_ns);
                    submitted += 1;
                },
                Step::Take(path, count) => {
                    let path = usize::from(path);
                    let outgoing = multipath.outgoing(path);
                    let count = usize::from(count).min(outgoing.len());
                    in_flight[path].extend(outgoing.drain(..count));
                }
                Step::Return(path, which, status) => {
                    let path = usize::from(path);
                    if !in_flight[path].is_empty() {
                        let which = usize::from(which) % in_flight[path].len();
                        let request = in_flight[path].swap_remove(which);
                        multipath.path_completed(path, request.complete(STATUSES[usize::from(status)]), now_ns);
                    }
                }
                Step::Set(path, index) => {
                    let path = usize::from(path);
                    let new = view(index, now_ns);
                    multipath.set_path(path, new, now_ns);
                    if !new.connected {
                        // A lost link fails its requests in flight.
                        for request in std::mem::take(&mut in_flight[path]) {
                            multipath.path_completed(path, request.complete(Status::HOST_PATHING_ERROR), now_ns);
                        }
                    }
                }
                Step::Refresh(path) => multipath.ana_refreshed(path.into(), now_ns),
                Step::Pass(ns) => {
                    now_ns += u64::from(ns);
                    multipath.dispatch(now_ns);
                }
                Step::Policy(index) => multipath.set_policy(policy(index)),
            }
            check(&mut multipath, &mut completed)?;
            let count: usize = in_flight.iter().map(Vec::len).sum();
            prop_assert_eq!(multipath.outstanding() + completed.len(), submitted as usize);
            prop_assert!(count <= multipath.outstanding());
        }
        // Finally one path recovers.
        multipath.set_path(0, UP, now_ns);
        multipath.ana_refreshed(0, now_ns);
        while multipath.outstanding() > 0 {
            for (path, in_flight) in in_flight.iter_mut().enumerate() {
                in_flight.append(multipath.outgoing(path));
                for request in in_flight.drain(..) {
                    multipath.path_completed(path, request.complete(Status::SUCCESS), now_ns);
                }
            }
            multipath.dispatch(now_ns);
            check(&mut multipath, &mut completed)?;
        }
        prop_assert_eq!(completed.len() as u64, submitted);
        prop_assert!(completed.values().all(|times| *times == 1));
    }

    /// No request uses a worse path while a better one is usable, and none waits while any is usable.
    #[test]
    fn the_best_usable_path_is_selected(first in 0..3u8, views in prop::collection::vec(0..7u8, 1..5)) {
        let views: Vec<PathView> = views.into_iter().map(|index| view(index, 0)).collect();
        let mut multipath = multipath(policy(first), &views);
        submit(&mut multipath, 0..20);
        let best = (0..views.len()).filter_map(|path| multipath.paths[path].rank()).min();
        let sent: u32 = (0..views.len()).map(|path| multipath.in_flight(path)).sum();
        prop_assert_eq!(sent, if best.is_some() { 20 } else { 0 });
        for path in 0..views.len() {
            prop_assert!(multipath.in_flight(path) == 0 || multipath.paths[path].rank() == best);
        }
    }
}

#[test]
fn a_namespace_that_a_controller_refuses_is_not_used_until_it_was_identified() {
    let refused = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
    let mut multipath = multipath(Policy::ActivePassive, &[UP, UP]);
    submit(&mut multipath, 0..2);
    assert_eq!(complete_all(&mut multipath, 0, refused), 2);
    assert!(multipath.is_namespace_stale(0) && !multipath.is_usable(0));
    assert_eq!(complete_all(&mut multipath, 1, Status::SUCCESS), 2);
    assert_eq!(statuses(&mut multipath).len(), 2);
    // Without another path it waits; what was refused twice fails, whatever it waits for.
    multipath.set_path(1, PathView { wait: IoWait::No, ..DOWN }, 0);
    submit(&mut multipath, 2..3);
    assert_eq!((multipath.in_flight(0), statuses(&mut multipath).len()), (0, 0));
    let mut tries = 0;
    while multipath.outstanding() > 0 {
        multipath.namespace_identified(0, 0);
        tries += complete_all(&mut multipath, 0, refused);
    }
    assert_eq!(statuses(&mut multipath)[&2], refused);
    assert_eq!(tries, 4, "three retries, and the first attempt");
}
