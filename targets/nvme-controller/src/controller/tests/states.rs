//! Registers, resets, shutdown and keep alive.

use super::*;

#[test]
fn disabled_controller_rejects_admin_commands() {
    let mut harness = Harness::new(SubsystemKind::Nvm, 0);
    for opcode in AdminOpcode::ALL.iter().filter(|&&opcode| opcode != AdminOpcode::Fabrics) {
        let expected = Status::COMMAND_SEQUENCE_ERROR.do_not_retry();
        assert_eq!(status(&mut harness, no_data(*opcode)), expected, "{opcode:?}");
    }
    assert_eq!(property(&mut harness, offset::CC, false), 0);
}

#[test]
fn number_of_queues_is_fixed_once_a_queue_exists() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let many = NumberOfQueues { submission: 500, completion: 300 }.to_wire();
    let granted = result(&mut harness, set_feature(FeatureId::NumberOfQueues, many)) as u32;
    assert_eq!(NumberOfQueues::from_wire(granted), Ok(NumberOfQueues { submission: 127, completion: 127 }));
    for (submission, completion) in [(4, 9), (9, 4)] {
        let wanted = NumberOfQueues { submission, completion }.to_wire();
        let granted = result(&mut harness, set_feature(FeatureId::NumberOfQueues, wanted)) as u32;
        assert_eq!(NumberOfQueues::from_wire(granted), Ok(NumberOfQueues { submission: 4, completion: 4 }));
    }
    let lease = harness.controller.association().lease(4).unwrap();
    let answer = status(&mut harness, set_feature(FeatureId::NumberOfQueues, 0));
    assert_eq!(answer, Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
    drop(lease);
    assert_eq!(result(&mut harness, set_feature(FeatureId::NumberOfQueues, 0)), 0);
    assert_eq!(harness.controller.association().lease(2).unwrap_err(), crate::LeaseError::OutOfRange);
    // A reset restores the default.
    set_cc(&mut harness, LINUX_CC & !1);
    harness.enable();
    assert!(harness.controller.association().lease(127).is_ok());
}

#[test]
fn reset_completes_when_io_queues_are_closed() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let association = harness.controller.association().clone();
    assert_eq!(harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]), None);
    status(&mut harness, set_feature(FeatureId::Arbitration, 3));
    let lease = association.lease(1).unwrap();

    assert_eq!(set_cc(&mut harness, LINUX_CC & !1), Status::SUCCESS);
    assert_eq!(harness.actions, [ControllerAction::CloseIoQueues]);
    assert_eq!(harness.completed.last().map(|cqe| cqe.status), Some(Status::ABORT_REQUESTED));
    assert!(!lease.is_valid() && association.is_alive());
    assert_eq!(association.lease(2).unwrap_err(), crate::LeaseError::ControllerDisabled);
    assert!(csts(&mut harness).ready, "an I/O queue is still leased");
    assert_eq!(set_cc(&mut harness, LINUX_CC), Status::COMMAND_SEQUENCE_ERROR);
    assert_eq!(
        status(&mut harness, no_data(AdminOpcode::KeepAlive)),
        Status::COMMAND_SEQUENCE_ERROR.do_not_retry()
    );

    drop(lease);
    assert_eq!(csts(&mut harness), ControllerStatus::RESET);
    assert_eq!(set_cc(&mut harness, LINUX_CC), Status::SUCCESS);
    assert!(association.lease(1).is_ok());
    assert_eq!(
        result(&mut harness, get_feature(FeatureId::Arbitration, 0, 0)),
        0,
        "features are at their defaults"
    );
    assert_eq!(
        result(&mut harness, get_feature(FeatureId::KeepAliveTimer, 0, 0)),
        5000,
        "keep alive belongs to the association"
    );
}

#[test]
fn shutdown_completes_when_io_queues_are_closed() {
    for notification in [1 << 14, 2 << 14] {
        let mut harness = Harness::enabled(SubsystemKind::Nvm);
        let lease = harness.controller.association().lease(1).unwrap();
        assert_eq!(set_cc(&mut harness, LINUX_CC | notification), Status::SUCCESS);
        assert_eq!(harness.actions, [ControllerAction::CloseIoQueues]);
        assert_eq!(csts(&mut harness).shutdown, ShutdownStatus::Occurring);
        drop(lease);
        assert_eq!(csts(&mut harness).shutdown, ShutdownStatus::Complete);
        // A reset ends the shutdown state.
        set_cc(&mut harness, LINUX_CC & !1);
        set_cc(&mut harness, LINUX_CC);
        assert_eq!(csts(&mut harness), ControllerStatus { ready: true, ..ControllerStatus::RESET });
    }
}

#[test]
fn unsupported_configuration_sets_fatal_status() {
    // Unsupported entry sizes, page size, command set and arbitration.
    for value in [
        0x0000_0001,
        0x0056_0001,
        LINUX_CC | 7 << 4,
        LINUX_CC | 1 << 7,
        LINUX_CC | 1 << 11,
        LINUX_CC | 1 << 24,
    ] {
        let mut harness = Harness::new(SubsystemKind::Nvm, 0);
        assert_eq!(set_cc(&mut harness, value), Status::SUCCESS, "{value:#x}");
        assert!(csts(&mut harness).fatal && !csts(&mut harness).ready, "{value:#x}");
        assert!(!harness.controller.association().is_enabled());
        // A reset recovers.
        set_cc(&mut harness, 0);
        harness.enable();
        assert!(csts(&mut harness).ready);
    }
}

#[test]
fn keep_alive_expires_without_host_activity() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let association = harness.controller.association().clone();
    let lease = association.lease(1).unwrap();
    assert_eq!(harness.controller.deadline(), Some(5 * SECOND));
    assert_eq!(harness.advance(4 * SECOND), None);
    status(&mut harness, no_data(AdminOpcode::KeepAlive));
    assert_eq!(harness.controller.deadline(), Some(9 * SECOND));
    assert_eq!(association.keep_alive_deadline_ns(), 9 * SECOND);
    // Other commands do not restart it; the feature does.
    assert_eq!(harness.advance(4 * SECOND), None);
    status(&mut harness, get_feature(FeatureId::KeepAliveTimer, 0, 0));
    assert_eq!(harness.controller.deadline(), Some(9 * SECOND));
    status(&mut harness, set_feature(FeatureId::KeepAliveTimer, 5000));
    assert_eq!(association.keep_alive_deadline_ns(), 13 * SECOND);
    assert_eq!(harness.advance(5 * SECOND - 1), None);
    assert_eq!(harness.advance(1), Some(TerminationReason::KeepAliveExpired));
    assert_eq!(
        harness.actions,
        [ControllerAction::CloseIoQueues, ControllerAction::Terminate(TerminationReason::KeepAliveExpired)]
    );
    assert!(!lease.is_valid());
    assert_eq!(harness.controller.deadline(), None);
    // Commands that still arrive complete.
    assert_eq!(status(&mut harness, no_data(AdminOpcode::KeepAlive)), Status::KEEP_ALIVE_EXPIRED);
    let cntlid = association.cntlid();
    drop(harness.controller);
    assert!(!association.is_alive() && harness.directory.find(association.subnqn(), cntlid).is_none());
}

#[test]
fn command_after_expiry_does_not_restart_keep_alive() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    harness.now_ns = 6 * SECOND;
    assert_eq!(status(&mut harness, no_data(AdminOpcode::KeepAlive)), Status::KEEP_ALIVE_EXPIRED);
    assert_eq!(
        harness.actions.last(),
        Some(&ControllerAction::Terminate(TerminationReason::KeepAliveExpired))
    );
}

#[test]
fn keep_alive_timeout_is_rounded_up_and_changeable() {
    let mut harness = Harness::new(SubsystemKind::Nvm, 4100);
    harness.enable();
    assert_eq!(harness.controller.deadline(), Some(5 * SECOND), "a granularity of one second");
    status(&mut harness, set_feature(FeatureId::KeepAliveTimer, 0));
    assert_eq!(harness.controller.deadline(), None);
    status(&mut harness, set_feature(FeatureId::KeepAliveTimer, u32::MAX));
    assert_eq!(harness.controller.deadline(), Some(4_294_968 * SECOND));
    assert_eq!(Harness::new(SubsystemKind::Nvm, 0).controller.deadline(), None);
    assert_eq!(Harness::new(SubsystemKind::Discovery, 30_000).controller.deadline(), Some(30 * SECOND));
    let mut idle = Harness::new(SubsystemKind::Discovery, 0);
    assert_eq!(idle.controller.deadline(), Some(120 * SECOND));
    assert_eq!(idle.advance(120 * SECOND), Some(TerminationReason::Idle));
}

#[test]
fn controller_terminates_when_host_or_subsystem_is_removed() {
    let mut closed = subsystem();
    closed.allow_any_host = false;
    let mut allowed = closed.clone();
    allowed.hosts.insert(host());
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    harness.deliver(ControllerEvent::SubsystemChanged(Arc::new(allowed)));
    assert_eq!(harness.actions, []);
    harness.deliver(ControllerEvent::SubsystemChanged(Arc::new(closed)));
    assert_eq!(
        harness.actions,
        [ControllerAction::CloseIoQueues, ControllerAction::Terminate(TerminationReason::HostNotAllowed)]
    );

    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    harness.deliver(ControllerEvent::SubsystemRemoved);
    assert_eq!(
        harness.actions,
        [ControllerAction::CloseIoQueues, ControllerAction::Terminate(TerminationReason::SubsystemRemoved)]
    );
    assert_eq!(status(&mut harness, no_data(AdminOpcode::KeepAlive)), Status::ABORTED_SQ_DELETION);
}

/// Hosts of PCI Express read the timer although there is no Keep Alive command (Base 2.0, section 5.27.1.12).
#[test]
fn a_memory_based_controller_reports_a_keep_alive_timer_of_zero() {
    use crate::harness::{connect_data, connect_sqe, subnqn, subsystem};
    let directory = Arc::new(crate::ControllerDirectory::new());
    let limits = Arc::new(ControllerLimits { memory_based: true, ..ControllerLimits::default() });
    let place = crate::ConnectContext {
        secure: None,
        directory: &directory,
        limits: &limits,
        port: crate::SubsystemPort::default(),
    };
    let data = connect_data(subnqn(), wire_nvme::fabrics::CNTLID_DYNAMIC);
    let subsystem = Arc::new(subsystem());
    let connected = crate::connect(&connect_sqe(0, 32, 0), &data, &place, |_| Some(subsystem));
    let Ok(crate::ConnectOk::Admin(admin)) = connected else { panic!("{connected:?}") };
    let mut controller = Controller::new(admin, limits.clone(), Arc::default(), 0);
    controller.write_cc(LINUX_CC, &mut Vec::new());
    let mut run = |sqe: Sqe| {
        let mut actions = Vec::new();
        let sqe = Sqe { flags: 0, ..sqe };
        controller.handle(ControllerEvent::Command { sqe: &sqe, data: &[] }, 0, &mut actions);
        match actions.pop() {
            Some(ControllerAction::Complete(completion)) => (completion.cqe.status, completion.cqe.result),
            other => panic!("{other:?}"),
        }
    };
    let (timer, success) = (FeatureId::KeepAliveTimer, Status::SUCCESS);
    assert_eq!(run(get_feature(timer, 0, 0)), (success, 0));
    assert_eq!(run(get_feature(timer, 3, 0)), (success, 0), "it is not changeable");
    assert_eq!(run(set_feature(timer, 0)).0, success);
    assert_eq!(run(set_feature(timer, 5000)).0, Status::FEATURE_NOT_CHANGEABLE.do_not_retry());
    assert_eq!(controller.association().keep_alive_deadline_ns(), u64::MAX);
}
