//! The order of commands, and task management.

use super::*;

#[test]
fn commands_outside_the_window_are_ignored_and_a_gap_ends_the_connection() {
    let mut target = plain_target();
    let mut initiator = Initiator::begin(&mut target, &[]);
    let ready = |initiator: &mut Initiator, target: &mut SimulatedTarget, cmd_sn: u32| {
        let right = std::mem::replace(&mut initiator.cmd_sn, cmd_sn);
        initiator.command(target, [0; 16], 0, (false, false), &[], true);
        initiator.cmd_sn = right;
    };
    // The depth is 8: numbers 2 to 9 are in the window.
    for ignored in [0, 1, 10, u32::MAX] {
        ready(&mut initiator, &mut target, ignored);
    }
    ready(&mut initiator, &mut target, 2);
    let response = initiator.read(&mut target).response();
    assert_eq!((response.initiator_task_tag, response.exp_cmd_sn, response.max_cmd_sn), (102, 3, 9));
    ready(&mut initiator, &mut target, 4);
    assert!(initiator.try_read(&mut target).is_none());
}

#[test]
fn functions_abort_tasks_and_answer_when_they_have_ended() {
    let mut target = plain_target();
    let mut initiator = Initiator::begin(&mut target, &[("ImmediateData", "No")]);
    for (function, response) in [
        (TaskFunction::AbortTask, TaskResponse::Complete),
        (TaskFunction::AbortTaskSet, TaskResponse::Complete),
        (TaskFunction::ClearTaskSet, TaskResponse::Complete),
        (TaskFunction::LogicalUnitReset, TaskResponse::Complete),
        (TaskFunction::TargetWarmReset, TaskResponse::Complete),
        (TaskFunction::TaskReassign, TaskResponse::ReassignmentNotSupported),
        (TaskFunction::ClearAca, TaskResponse::NotSupported),
    ] {
        // A write that waits for its data.
        let tag = initiator.command(&mut target, transfer(WRITE, 0, 8), 4096, (false, true), &[], true);
        let received = initiator.read(&mut target);
        if received.opcode() != Opcode::R2t {
            // The unit attention after a reset.
            assert_eq!(received.sense().0, 0x29);
            initiator.command(&mut target, transfer(WRITE, 0, 8), 4096, (false, true), &[], true);
            assert_eq!(initiator.read(&mut target).opcode(), Opcode::R2t);
        }
        let referenced_task_tag = initiator.cmd_sn - 1 + 100;
        let request = TaskManagementRequest {
            immediate: true,
            function: function.into(),
            initiator_task_tag: 5,
            referenced_task_tag,
            cmd_sn: initiator.cmd_sn,
            ..TaskManagementRequest::default()
        };
        initiator.send_pdu(&mut target, &request.to_bytes(), &[]);
        let answer = TaskManagementResponse::decode(&initiator.read(&mut target).header).unwrap();
        assert_eq!(
            (answer.initiator_task_tag, answer.response),
            (5, u8::from(response)),
            "{function:?} {tag}"
        );
    }
    let request = TaskManagementRequest {
        immediate: true,
        function: TaskFunction::AbortTask.into(),
        referenced_task_tag: 9999,
        cmd_sn: initiator.cmd_sn,
        ..TaskManagementRequest::default()
    };
    initiator.send_pdu(&mut target, &request.to_bytes(), &[]);
    let answer = TaskManagementResponse::decode(&initiator.read(&mut target).header).unwrap();
    assert_eq!(answer.response, u8::from(TaskResponse::NoTask));
}

#[test]
fn a_command_that_is_aborted_before_it_arrives_is_not_executed() {
    let mut target = plain_target();
    let mut initiator = Initiator::begin(&mut target, &[]);
    let abort = |initiator: &mut Initiator, target: &mut SimulatedTarget, ref_cmd_sn: u32, cmd_sn: u32| {
        let request = TaskManagementRequest {
            immediate: true,
            function: TaskFunction::AbortTask.into(),
            initiator_task_tag: 7,
            referenced_task_tag: ref_cmd_sn + 100,
            ref_cmd_sn,
            cmd_sn,
            ..TaskManagementRequest::default()
        };
        initiator.send_pdu(target, &request.to_bytes(), &[]);
        let answer = TaskManagementResponse::decode(&initiator.read(target).header).unwrap();
        (answer.response, answer.exp_cmd_sn)
    };
    let (complete, no_task) = (u8::from(TaskResponse::Complete), u8::from(TaskResponse::NoTask));
    // Number 2 is next. Those that were received, of which the function is not after, and beyond the window.
    for (ref_cmd_sn, cmd_sn) in [(1, 3), (3, 3), (4, 3), (99, 200)] {
        assert_eq!(abort(&mut initiator, &mut target, ref_cmd_sn, cmd_sn), (no_task, 2));
    }
    assert_eq!(abort(&mut initiator, &mut target, 3, 5), (complete, 2));
    assert_eq!(abort(&mut initiator, &mut target, 2, 5), (complete, 4));
    // They arrive, and are ignored; the next command is executed.
    for cmd_sn in [2, 3, 4] {
        initiator.cmd_sn = cmd_sn;
        initiator.command(&mut target, [0; 16], 0, (false, false), &[], true);
    }
    let response = initiator.read(&mut target).response();
    assert_eq!((response.initiator_task_tag, response.exp_cmd_sn, response.max_cmd_sn), (104, 5, 11));
    assert_eq!(abort(&mut initiator, &mut target, 3, 6).0, no_task);
}
