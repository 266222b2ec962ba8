//! Paths that are lost, restored, selected and discovered.

use std::time::{Duration, Instant};

use bdev_nvme::{
    Attach, ControllerOperation, DiscoveryConfig, ErrorInjection, InitiatorError, PassthroughCommand,
    PathConfig, PathStatus, Policy, QueueKind, Selector, TransportId,
};
use block_io::{Op, Status};
use control::JobHandle;
use nvme::AdminData;
use wire_nvme::admin::GetLogPage;
use wire_nvme::log::AnaState;

use crate::sides::{
    HostSide, NQN, SECOND, TargetSide, finish, medium, under_load, wait_for, wait_for_progress,
};

#[test]
fn attach_fails_at_once_without_a_target() {
    let host = HostSide::start();
    let error = host.initiator.attach(Attach::new("Nvme0", HostSide::path("1"))).unwrap_err();
    assert!(error.to_string().contains("connect"), "{error}");
    assert!(host.initiator.controllers().is_empty());
}

#[test]
fn io_waits_for_a_lost_target_and_resumes_after_reconnection() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into()]);
    let ports = side.ports();
    let host = HostSide::start();
    host.attach(&ports[0]);
    let (stop, steps, outcome) = under_load(&host);
    wait_for_progress(&steps);
    drop(side);
    wait_for("the loss", || host.initiator.controllers()[0].paths[0].status == PathStatus::Reconnecting);
    assert!(outcome.try_recv().is_err(), "I/O failed although it should wait");
    let side = TargetSide::start(&medium, &ports);
    wait_for_progress(&steps);
    assert_eq!(host.initiator.controllers()[0].paths[0].status, PathStatus::Enabled);
    assert!(finish(&stop, &outcome) >= 40);
    drop(host);
    drop(side);
}

#[test]
fn io_fails_after_the_fast_fail_timeout_and_the_bdev_is_removed_after_the_loss_timeout() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into()]);
    let host = HostSide::start();
    let mut path = HostSide::path(&side.ports()[0]);
    path.reconnect.fast_fail_ns = Some(SECOND / 2);
    path.reconnect.loss_timeout_ns = Some(3 * SECOND);
    host.initiator.attach(Attach::new("Nvme0", path)).unwrap();
    let (_stop, steps, outcome) = under_load(&host);
    wait_for_progress(&steps);
    let lost = Instant::now();
    drop(side);
    let failed = outcome.recv_timeout(Duration::from_secs(30)).unwrap().unwrap_err();
    assert_eq!(failed.1, Status::HOST_PATHING_ERROR);
    assert!(lost.elapsed() >= Duration::from_millis(400), "{:?}", lost.elapsed());
    assert!(host.registry.find("Nvme0n1").is_some());
    wait_for("the removal of the device", || host.registry.find("Nvme0n1").is_none());
    assert!(lost.elapsed() >= Duration::from_millis(2500), "{:?}", lost.elapsed());
}

#[test]
fn io_moves_to_the_path_with_the_best_ana_state() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let ports = side.ports();
    let host = HostSide::start();
    // The path whose queue connects first becomes the current one: the second is attached only under load.
    host.attach(&ports[0]);
    let (stop, steps, outcome) = under_load(&host);
    wait_for_progress(&steps);
    assert_eq!(host.attach(&ports[1]), ["Nvme0n1"]);
    wait_for("both paths", || {
        let paths = host.initiator.io_paths(None);
        paths.len() == 2 && paths.iter().all(|path| path.connected)
    });
    assert_eq!(host.current_port().as_ref(), Some(&ports[0]));
    for turn in 0..6 {
        let (to, from) = ((turn % 2) ^ 1, turn % 2);
        side.set(from, [AnaState::Inaccessible, AnaState::NonOptimized, AnaState::Change][turn / 2]);
        wait_for("the other path", || host.current_port().as_ref() == Some(&ports[to]));
        wait_for_progress(&steps);
        side.set(from, AnaState::Optimized);
        wait_for("the state", || {
            host.initiator.io_paths(None).iter().all(|path| path.ana == AnaState::Optimized)
        });
    }
    // Neither path is usable: I/O waits.
    side.set(0, AnaState::Inaccessible);
    side.set(1, AnaState::Inaccessible);
    wait_for("both states", || {
        host.initiator.io_paths(None).iter().all(|path| path.ana == AnaState::Inaccessible)
    });
    assert!(outcome.try_recv().is_err());
    side.set(1, AnaState::NonOptimized);
    wait_for_progress(&steps);
    assert_eq!(host.current_port().as_ref(), Some(&ports[1]));
    assert!(finish(&stop, &outcome) > 100);
}

#[test]
fn no_io_fails_when_one_of_two_paths_is_lost() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let ports = side.ports();
    let host = HostSide::start();
    host.attach(&ports[0]);
    host.attach(&ports[1]);
    host.initiator.set_policy("Nvme0n1", Policy::ActiveActive(Selector::RoundRobin { min_io: 1 })).unwrap();
    let (stop, steps, outcome) = under_load(&host);
    wait_for_progress(&steps);
    for lost in [0, 1] {
        side.target.remove_listener(NQN, side.addresses[lost].clone()).unwrap();
        wait_for("the loss", || {
            host.initiator.controllers()[0].paths.iter().any(|path| path.status != PathStatus::Enabled)
        });
        wait_for_progress(&steps);
        side.target.add_listener(NQN, side.addresses[lost].clone()).unwrap();
        wait_for("both paths", || host.initiator.io_paths(None).iter().all(|path| path.connected));
        wait_for_progress(&steps);
    }
    let is_last = |id: &TransportId| id.service().is_some_and(|(_, port)| port == ports[1]);
    host.initiator.detach("Nvme0", is_last, &JobHandle::standalone()).unwrap();
    wait_for_progress(&steps);
    assert_eq!(host.initiator.controllers()[0].paths.len(), 1);
    host.initiator.reset("Nvme0").unwrap();
    wait_for_progress(&steps);
    assert!(finish(&stop, &outcome) > 100);
}

#[test]
fn path_statistics_count_io_of_each_path() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let host = HostSide::start();
    for port in side.ports() {
        let path = PathConfig { count_io: true, ..HostSide::path(&port) };
        host.initiator.attach(Attach::new("Nvme0", path)).unwrap();
    }
    // Three, as the load alternates writes and reads, and each path must get some of both.
    host.initiator.set_policy("Nvme0n1", Policy::ActiveActive(Selector::RoundRobin { min_io: 3 })).unwrap();
    wait_for("both paths", || host.initiator.io_paths(None).iter().all(|path| path.connected));
    let (stop, _, outcome) = under_load(&host);
    let steps = finish(&stop, &outcome);
    let stats = host.initiator.path_stats("Nvme0n1").unwrap();
    assert_eq!(stats.len(), 2);
    for op in [Op::Read, Op::Write] {
        let counts: Vec<_> = stats.iter().map(|(_, stats)| *stats.op(op)).collect();
        assert_eq!(counts.iter().map(|counts| counts.ops).sum::<u64>(), steps, "{counts:?}");
        assert!(
            counts.iter().all(|counts| counts.ops > 0 && counts.bytes == counts.ops * 4096),
            "{counts:?}"
        );
        assert!(counts.iter().all(|counts| counts.latency_min_ticks <= counts.latency_max_ticks));
    }
    assert!(host.initiator.path_stats("Nvme1n1").is_err());
}

#[test]
fn a_disabled_controller_gets_no_io_until_it_is_enabled() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let host = HostSide::start();
    for port in side.ports() {
        host.attach(&port);
    }
    wait_for("both paths", || host.initiator.io_paths(None).iter().all(|path| path.connected));
    let (stop, steps, outcome) = under_load(&host);
    wait_for_progress(&steps);
    let status = |path: usize| host.initiator.controllers()[0].paths[path].status;
    let first = host.initiator.controllers()[0].paths[0].cntlid;
    let operate =
        |cntlid, operation| host.initiator.operate("Nvme0", cntlid, operation, &JobHandle::standalone());
    // The other path is used; disabling twice has no further effect.
    for _ in 0..2 {
        operate(Some(first), ControllerOperation::Disable).unwrap();
        assert_eq!((status(0), status(1)), (PathStatus::Disabled, PathStatus::Enabled));
        assert_eq!(host.current_port().as_ref(), Some(&side.ports()[1]));
    }
    wait_for_progress(&steps);
    operate(Some(first), ControllerOperation::Reset).unwrap();
    assert_eq!(status(0), PathStatus::Disabled, "a reset must not enable it");
    operate(Some(first), ControllerOperation::Enable).unwrap();
    assert_eq!(status(0), PathStatus::Enabled);
    wait_for_progress(&steps);
    assert!(operate(Some(u16::MAX), ControllerOperation::Enable).is_err());
    finish(&stop, &outcome);
    // Without a path that may recover I/O fails at once, whatever the timeouts for lost paths.
    operate(None, ControllerOperation::Disable).unwrap();
    let (_stop, _, outcome) = under_load(&host);
    let failed = outcome.recv_timeout(Duration::from_secs(30)).unwrap().unwrap_err();
    assert_eq!(failed, (1, Status::HOST_PATHING_ERROR));
    assert!(host.registry.find("Nvme0n1").is_some());
    operate(None, ControllerOperation::Enable).unwrap();
    let read = host.with_io(|core, io| async move {
        let outcome = io.read(0, core.pool().take(4096).unwrap()).await;
        outcome.map_or_else(|(status, _)| status, |_| Status::SUCCESS)
    });
    assert_eq!(read.recv_timeout(Duration::from_secs(30)).unwrap(), Status::SUCCESS);
    // A disabled controller can be detached.
    operate(None, ControllerOperation::Disable).unwrap();
    host.initiator.detach("Nvme0", |_| true, &JobHandle::standalone()).unwrap();
    assert!(host.registry.find("Nvme0n1").is_none());
}

#[test]
fn injected_errors_reach_the_user_or_cause_a_failover() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let host = HostSide::start();
    let path = HostSide::path(&side.ports()[0]);
    host.initiator.attach(Attach { retries_max: 0, ..Attach::new("Nvme0", path) }).unwrap();
    let injection =
        |status, submit, count, delay_ns| Some(ErrorInjection { opcode: 2, count, status, submit, delay_ns });
    let inject = |injection| host.initiator.inject("Nvme0", QueueKind::Io, 2, injection).unwrap();
    // It does not apply to queues that are opened later.
    inject(injection(Status::UNRECOVERED_READ_ERROR, true, 1, 0));
    let (command, commands) = std::sync::mpsc::sync_channel(0);
    let (result, results) = std::sync::mpsc::sync_channel(1);
    let done = host.with_io(move |core, io| async move {
        loop {
            match commands.try_recv() {
                Ok(false) => break,
                Ok(true) => {
                    let began = Instant::now();
                    let outcome = io.read(0, core.pool().take(4096).unwrap()).await;
                    let status = outcome.map_or_else(|(status, _)| status, |_| Status::SUCCESS);
                    result.send((status, began.elapsed())).unwrap();
                }
                Err(_) => core.sleep_ns(100_000).await,
            }
        }
    });
    let read = || {
        command.send(true).unwrap();
        results.recv_timeout(Duration::from_secs(30)).unwrap()
    };
    assert_eq!(read().0, Status::SUCCESS);
    inject(injection(Status::UNRECOVERED_READ_ERROR, true, 2, 0));
    let statuses = [read().0, read().0, read().0];
    assert_eq!(statuses, [Status::UNRECOVERED_READ_ERROR, Status::UNRECOVERED_READ_ERROR, Status::SUCCESS]);
    let sent = || {
        let stats = host.initiator.transport_stats();
        let [of_tcp] = stats[..] else { panic!("{stats:?}") };
        assert_eq!((of_tcp.core, of_tcp.trtype), (0, "TCP"));
        assert!(of_tcp.counts.arrivals > 0 && of_tcp.counts.polls >= of_tcp.counts.idle_polls);
        (of_tcp.counts.submitted, of_tcp.counts.completed)
    };
    let before = sent();
    inject(injection(Status::WRITE_FAULT, false, 1, 20_000_000));
    let (status, took) = read();
    assert!(status == Status::WRITE_FAULT && took >= Duration::from_millis(20), "{status} {took:?}");
    assert_eq!(sent(), before, "the command was sent");
    // An injection that is removed before it applies.
    inject(injection(Status::UNRECOVERED_READ_ERROR, true, 9, 0));
    inject(None);
    assert_eq!(read().0, Status::SUCCESS);
    assert_eq!(sent(), (before.0 + 1, before.1 + 1));
    // Delayed forever, until a reset closes its queue: then it is retried.
    inject(injection(Status::SUCCESS, false, 1, u64::MAX));
    command.send(true).unwrap();
    host.initiator.reset("Nvme0").unwrap();
    assert_eq!(results.recv_timeout(Duration::from_secs(30)).unwrap().0, Status::SUCCESS);
    // With a second path, a path related error causes a failover.
    host.attach(&side.ports()[1]);
    wait_for("both paths", || host.initiator.io_paths(None).iter().all(|path| path.connected));
    inject(injection(Status::ANA_INACCESSIBLE, true, 1, 0));
    assert_eq!(read().0, Status::SUCCESS);
    command.send(false).unwrap();
    done.recv_timeout(Duration::from_secs(30)).unwrap();
    // Injections for admin commands apply to the first path too.
    let health = || {
        let view = GetLogPage { lid: 2, length_bytes: 512, ..GetLogPage::default() };
        let sqe = view.to_sqe(wire_nvme::NSID_ALL);
        let (data, metadata) = (AdminData::In(512), AdminData::None);
        let passed = PassthroughCommand { queue: QueueKind::Admin, sqe, data, metadata, timeout: None };
        host.initiator.pass_through("Nvme0", passed).unwrap().status
    };
    for submit in [true, false] {
        let injection = ErrorInjection {
            opcode: 2,
            count: 1,
            status: Status::INTERNAL_ERROR,
            submit,
            delay_ns: 1_000_000,
        };
        host.initiator.inject("Nvme0", QueueKind::Admin, 2, Some(injection)).unwrap();
        assert_eq!((health(), health()), (Status::INTERNAL_ERROR, Status::SUCCESS));
    }
}

#[test]
fn discovery_attaches_and_detaches_as_the_log_page_changes() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let ports = side.ports();
    let host = HostSide::start();
    let mut path = HostSide::path(&ports[0]);
    let uri = format!("nvme+tcp://127.0.0.1:{}/nqn.2014-08.org.nvmexpress.discovery", ports[0]);
    path.id = TransportId(uri.parse().unwrap());
    let discovery =
        DiscoveryConfig { name: "Found".into(), path, retries_max: 3, policy: Policy::ActivePassive };
    host.initiator.start_discovery(discovery.clone(), Some(Duration::from_secs(30))).unwrap();
    let paths = || host.initiator.controllers().first().map_or(0, |controller| controller.paths.len());
    assert_eq!((paths(), host.initiator.discoveries()[0].entries.len()), (2, 2));
    assert!(host.registry.find("Found0n1").is_some());
    assert!(host.initiator.start_discovery(discovery.clone(), None).is_err());
    side.target.remove_listener(NQN, side.addresses[1].clone()).unwrap();
    wait_for("the path to be detached", || paths() == 1);
    side.target.add_listener(NQN, side.addresses[1].clone()).unwrap();
    wait_for("the path", || paths() == 2);
    host.initiator.stop_discovery("Found", &JobHandle::standalone()).unwrap();
    assert!(paths() == 0 && host.registry.find("Found0n1").is_none());
    // A cancelled stop ends the service, and leaves what it has not detached.
    host.initiator.start_discovery(discovery, Some(Duration::from_secs(30))).unwrap();
    let outcome = host.initiator.stop_discovery("Found", &cancelled_job());
    assert_eq!((outcome, paths()), (Err(InitiatorError::Cancelled), 2));
    assert!(host.initiator.discoveries().is_empty());
    host.initiator.detach("Found0", |_| true, &JobHandle::standalone()).unwrap();
    assert_eq!(paths(), 0);
}

fn cancelled_job() -> JobHandle {
    let job = JobHandle::standalone();
    job.cancel().unwrap();
    job
}

#[test]
fn a_cancelled_operation_leaves_the_remaining_paths() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let host = HostSide::start();
    for port in side.ports() {
        host.attach(&port);
    }
    let initiator = &host.initiator;
    let statuses =
        || initiator.controllers()[0].paths.iter().map(|path| path.status).collect::<Vec<PathStatus>>();
    assert_eq!(initiator.detach("Nvme0", |_| true, &cancelled_job()), Err(InitiatorError::Cancelled));
    let outcome = initiator.operate("Nvme0", None, ControllerOperation::Disable, &cancelled_job());
    assert_eq!(outcome, Err(InitiatorError::Cancelled));
    assert_eq!(statuses(), [PathStatus::Enabled, PathStatus::Enabled]);
    // The target's reactors are blocked: connections are accepted and not answered.
    let block = |reactor: &reactor::ReactorHandle| {
        let (release, released) = std::sync::mpsc::channel::<()>();
        let wait = move |_: &reactor::Core| {
            let _ = released.recv();
        };
        reactor.post(wait).unwrap();
        release
    };
    let releases: Vec<_> = side.reactors.as_ref().unwrap().handles().iter().map(block).collect();
    let job = JobHandle::standalone();
    std::thread::scope(|threads| {
        let reset = threads.spawn(|| initiator.operate("Nvme0", None, ControllerOperation::Reset, &job));
        wait_for("the reset", || statuses()[0] == PathStatus::Reconnecting);
        let began = Instant::now();
        job.cancel().unwrap();
        assert_eq!(reset.join().unwrap(), Err(InitiatorError::Cancelled));
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    });
    drop(releases);
    // The reset in progress goes on.
    wait_for("both paths", || statuses() == [PathStatus::Enabled, PathStatus::Enabled]);
}
