use block_io::{Op, Status};
use reservations::ChangeWaker;
use wire_scsi::ScsiStatus;

use super::*;
use crate::test_unit::{TestUnit, config};
use crate::{Command, NoPeers, Step, Task, TaskContext, TaskEvent, UnitConfig, no_waker};

const ERASE: [u8; 10] = [0x48, 0x02, 0, 0, 0, 0, 0, 0, 0, 0];
const EXIT: [u8; 10] = [0x48, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0];
/// With AUSE.
const ERASE_UNRESTRICTED: [u8; 10] = [0x48, 0x22, 0, 0, 0, 0, 0, 0, 0, 0];
/// With IMMED.
const ERASE_AT_ONCE: [u8; 10] = [0x48, 0x82, 0, 0, 0, 0, 0, 0, 0, 0];

/// What a transport lends to tasks.
struct TestTransport {
    requests: Vec<bdev::Request>,
    peers: NoPeers,
    waker: Arc<dyn ChangeWaker>,
}

impl TestTransport {
    fn new() -> TestTransport {
        TestTransport { requests: Vec::new(), peers: NoPeers, waker: no_waker() }
    }

    fn context<'a>(&'a mut self, nexus: &'a UnitNexus) -> TaskContext<'a> {
        let TestTransport { requests, peers, waker } = self;
        TaskContext { nexus, luns: &[0], waker, requests, peers }
    }
}

#[test]
fn an_erased_unit_reads_as_zeroes_and_is_flushed() {
    let mut test = TestUnit::new(config(512, 64));
    let nexus = test.nexus(1);
    for cdb in [ERASE, ERASE_AT_ONCE] {
        test.disk.bytes.fill(7);
        test.disk.log.clear();
        test.run(&nexus, &cdb, &[], 0).good();
        assert!(test.disk.bytes.iter().all(|byte| *byte == 0));
        let operations: Vec<Op> = test.disk.log.iter().map(|(op, _)| *op).collect();
        assert_eq!(operations, [Op::Unmap, Op::Flush]);
        test.run(&nexus, &[0; 6], &[], 0).good();
    }
    test.run(&nexus, &EXIT, &[], 0).good();
    // WABEREQ: blocks can be read.
    assert_eq!(test.run(&nexus, &[0x12, 1, 0xb1, 0, 64, 0], &[], 64).good()[7] >> 6, 1);
}

#[test]
fn what_is_not_supported_or_not_allowed_erases_nothing() {
    let mut test = TestUnit::new(config(512, 64));
    let nexus = test.nexus(1);
    test.disk.bytes.fill(7);
    let invalid = Some(AdditionalSense::INVALID_FIELD_IN_CDB);
    // OVERWRITE of a thin unit, CRYPTOGRAPHIC ERASE, none, and parameters.
    for (action, bytes) in [(1, 0), (1, 4), (3, 0), (4, 0), (2, 8), (0x1f, 8)] {
        let reply = test.run(&nexus, &[0x48, action, 0, 0, 0, 0, 0, 0, bytes, 0], &[0; 8], 0);
        assert_eq!(reply.additional(), invalid, "{action}");
    }
    test.unit.apply_settings(wire_scsi::mode::ModeSettings { write_protect: true, ..test.unit.settings() });
    let reply = test.run(&nexus, &ERASE, &[], 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::SOFTWARE_WRITE_PROTECTED));
    assert!(test.disk.bytes.iter().all(|byte| *byte == 7));
    let mut test = TestUnit::new(UnitConfig { can_unmap: false, ..config(512, 64) });
    let nexus = test.nexus(1);
    assert_eq!(test.run(&nexus, &ERASE, &[], 0).additional(), invalid);
    let mut test = TestUnit::new(UnitConfig { read_only: true, ..config(512, 64) });
    let nexus = test.nexus(1);
    let unknown = Some(AdditionalSense::INVALID_COMMAND_OPERATION_CODE);
    assert_eq!(test.run(&nexus, &ERASE, &[], 0).additional(), unknown);
}

#[test]
fn a_failure_stays_until_it_is_ended() {
    let mut test = TestUnit::new(config(512, 64));
    let nexus = test.nexus(1);
    let failed = Some(AdditionalSense::SANITIZE_FAILED);
    test.disk.failure = Some(Status::WRITE_FAULT);
    assert_eq!(test.run(&nexus, &ERASE, &[], 0).additional(), Some(AdditionalSense::WRITE_FAULT));
    assert_eq!(test.run(&nexus, &[0; 6], &[], 0).additional(), failed);
    let refused = test.run(&nexus, &EXIT, &[], 0).additional();
    assert_eq!(refused, Some(AdditionalSense::INVALID_FIELD_IN_CDB));
    test.run(&nexus, &[0x12, 0, 0, 0, 36, 0], &[], 36).good();
    let sense = test.run(&nexus, &[0x03, 0, 0, 0, 18, 0], &[], 18).good();
    assert_eq!((sense[2] & 0xf, sense[12], sense[13]), (3, 0x31, 3));
    test.disk.failures.extend([Status::SUCCESS, Status::WRITE_FAULT]);
    let reply = test.run(&nexus, &ERASE_UNRESTRICTED, &[], 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::WRITE_FAULT), "the flush has failed");
    assert_eq!(test.run(&nexus, &[0; 6], &[], 0).additional(), failed);
    test.run(&nexus, &EXIT, &[], 0).good();
    test.run(&nexus, &[0; 6], &[], 0).good();
    test.disk.failure = Some(Status::WRITE_FAULT);
    test.run(&nexus, &ERASE, &[], 0);
    test.run(&nexus, &ERASE, &[], 0).good();
    test.run(&nexus, &[0; 6], &[], 0).good();
}

#[test]
fn an_operation_outlives_its_command_and_its_nexus() {
    let mut test = TestUnit::new(config(512, 64));
    test.disk.bytes.fill(7);
    let (nexus, other) = (test.nexus(1), test.nexus(2));
    let mut transport = TestTransport::new();
    let mut context = transport.context(&nexus);
    let command = Command { cdb: &ERASE, ..Command::default() };
    let mut other_transport = TestTransport::new();
    let mut context_of_other = other_transport.context(&other);
    let read = Command { cdb: &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], data_in_bytes: 512, ..command };
    let (mut earlier, _) = Task::start(&read, &mut context_of_other);
    let (mut task, step) = Task::start(&command, &mut context);
    assert!(matches!(step, Step::Pending));
    // What is aborted for it leaves a unit attention.
    assert!(matches!(earlier.resume(TaskEvent::Abort, &mut context_of_other), Step::Aborted));
    let mut run = test.next_sanitize().unwrap();
    let request = run.next_request().unwrap();
    let cleared = Some(AdditionalSense::COMMANDS_CLEARED);
    assert_eq!(test.run(&other, &[0; 6], &[], 0).additional(), cleared);
    // Its command is aborted, and its nexus lost.
    assert!(matches!(task.resume(TaskEvent::Abort, &mut context), Step::Aborted));
    assert!(context.requests.is_empty());
    drop((task, nexus));
    test.unit.manage(crate::UnitFunction::LogicalUnitReset, &other, no_waker());
    assert_eq!(test.run(&other, &[0; 6], &[], 0).additional(), Some(AdditionalSense::BUS_DEVICE_RESET));
    for cdb in [&[0; 6][..], &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &ERASE, &EXIT] {
        let reply = test.run(&other, cdb, &[], 512);
        assert_eq!(
            (reply.status, reply.additional()),
            (ScsiStatus::CheckCondition, Some(AdditionalSense::SANITIZE_IN_PROGRESS))
        );
        assert_eq!(reply.sense.unwrap().progress, Some(0));
    }
    let sense = test.run(&other, &[0x03, 0, 0, 0, 18, 0], &[], 18).good();
    assert_eq!((sense[2] & 0xf, sense[12], sense[13], sense[15]), (2, 4, 0x1b, 0x80));
    let execute = |test: &mut TestUnit, request| test.disk.execute(&mut vec![request]).remove(0);
    run.complete(execute(&mut test, request));
    let flush = run.next_request().unwrap();
    let sense = test.run(&other, &[0x03, 0, 0, 0, 18, 0], &[], 18).good();
    assert_eq!(sense[16..18], [0xff, 0xff], "all is erased, and not durable");
    run.complete(execute(&mut test, flush));
    assert!(run.next_request().is_none() && run.has_finished());
    drop(run);
    test.run(&other, &[0; 6], &[], 0).good();
    assert!(test.disk.bytes.iter().all(|byte| *byte == 0));
}

#[test]
fn an_operation_that_is_dropped_has_failed_and_its_command_too() {
    let mut test = TestUnit::new(config(512, 64));
    let (nexus, other) = (test.nexus(1), test.nexus(2));
    let mut transport = TestTransport::new();
    let mut context = transport.context(&nexus);
    let command = Command { cdb: &ERASE, ..Command::default() };
    let (mut task, _) = Task::start(&command, &mut context);
    assert!(matches!(task.resume(TaskEvent::Changed, &mut context), Step::Pending));
    drop(test.next_sanitize().unwrap());
    let Step::Done(response) = task.resume(TaskEvent::Changed, &mut context) else { panic!("it waits") };
    assert_eq!(response.status, ScsiStatus::CheckCondition);
    assert_eq!(test.run(&other, &[0; 6], &[], 0).additional(), Some(AdditionalSense::SANITIZE_FAILED));
    // Without a unit there is nothing to execute.
    let (task, _) = Task::start(&command, &mut context);
    let mut run = test.next_sanitize().unwrap();
    drop((task, nexus, other, test));
    assert!(run.next_request().is_none() && !run.has_finished());
}

#[test]
fn a_command_that_ends_while_others_are_aborted_changes_nothing() {
    let mut test = TestUnit::new(config(512, 64));
    let events = crate::CoreEvents::new(None);
    test.unit.subscribe(&events);
    let (nexus, other) = (test.nexus(1), test.nexus(2));
    let mut transport = TestTransport::new();
    let mut context = transport.context(&nexus);
    let (mut task, step) = Task::start(&Command { cdb: &ERASE, ..Command::default() }, &mut context);
    assert!(matches!(step, Step::Pending) && test.next_sanitize().is_none());
    let in_progress = Some(AdditionalSense::SANITIZE_IN_PROGRESS);
    assert_eq!(test.run(&other, &[0; 6], &[], 0).additional(), in_progress);
    assert!(matches!(task.resume(TaskEvent::Abort, &mut context), Step::Aborted));
    test.run(&other, &[0; 6], &[], 0).good();
    assert!(test.disk.log.is_empty());
}

#[test]
fn a_unit_without_an_executor_has_no_sanitize() {
    let mut test = TestUnit::new(config(512, 64));
    test.unit = crate::LogicalUnit::new(config(512, 64), Arc::default());
    let nexus = test.nexus(1);
    let unknown = Some(AdditionalSense::INVALID_COMMAND_OPERATION_CODE);
    assert_eq!(test.run(&nexus, &ERASE, &[], 0).additional(), unknown);
}

/// OVERWRITE with these flags and parameters.
fn overwrite(flags: u8, parameters: &[u8]) -> [u8; 10] {
    let [high, low] = (parameters.len() as u16).to_be_bytes();
    [0x48, flags | 1, 0, 0, 0, 0, 0, high, low, 0]
}

#[test]
fn an_overwritten_unit_has_the_pattern_of_the_last_pass() {
    // More than the memory of one write, and no multiple of it.
    let mut test = TestUnit::new(UnitConfig { can_unmap: false, ..config(512, 1300) });
    let nexus = test.nexus(1);
    for (flags, first, passes) in [(0, 0x01, 1), (0x80, 0x83, 3), (0, 0x82, 2), (0, 0x02, 2)] {
        test.disk.bytes.fill(7);
        test.disk.log.clear();
        let parameters = [first, 0, 0, 3, 0xaa, 0xbb, 0xcc];
        let reply = test.run(&nexus, &overwrite(flags, &parameters), &parameters, 0);
        assert_eq!(reply.residual, crate::Residual::None);
        reply.good();
        let is_inverted = first & 0x80 != 0 && passes % 2 == 0;
        let block: Vec<u8> = [0xaa, 0xbb, 0xcc]
            .iter()
            .cycle()
            .take(512)
            .map(|byte| byte ^ if is_inverted { 0xff } else { 0 })
            .collect();
        assert!(test.disk.bytes.chunks(512).all(|written| written == block), "{first:#x}");
        let writes = test.disk.log.iter().filter(|(op, _)| *op == Op::Write).count();
        assert_eq!((writes, test.disk.log.last().unwrap().0), (passes * 3, Op::Flush));
        test.run(&nexus, &[0; 6], &[], 0).good();
    }
    // A pattern of a whole block.
    let whole = [&[1, 0, 2, 0][..], &[9; 512]].concat();
    test.run(&nexus, &overwrite(0, &whole), &whole, 0).good();
    assert!(test.disk.bytes.iter().all(|byte| *byte == 9));
    let report = [0xa3, 0x0c, 2, 0x48, 0, 1, 0, 0, 0, 64, 0, 0];
    assert_eq!(test.run(&nexus, &report, &[], 64).good()[1] & 7, 3);
    // On a device that may put blocks elsewhere, it would leave what they were.
    let mut thin = TestUnit::new(config(512, 64));
    let nexus = thin.nexus(1);
    let reply = thin.run(&nexus, &overwrite(0, &whole), &whole, 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::INVALID_FIELD_IN_CDB));
    assert_eq!(thin.run(&nexus, &report, &[], 64).good()[1] & 7, 1);
}

#[test]
fn an_overwrite_without_valid_parameters_changes_nothing() {
    let mut test = TestUnit::new(UnitConfig { can_unmap: false, ..config(512, 64) });
    let nexus = test.nexus(1);
    test.disk.bytes.fill(7);
    let list = Some(AdditionalSense::INVALID_FIELD_IN_PARAMETER_LIST);
    for parameters in [[0, 0, 0, 1, 9], [0x21, 0, 0, 1, 9], [1, 0, 0, 2, 9], [1, 0, 0, 0, 9]] {
        assert_eq!(test.run(&nexus, &overwrite(0, &parameters), &parameters, 0).additional(), list);
    }
    let long = [&[1, 0, 2, 1][..], &[9; 513]].concat();
    let reply = test.run(&nexus, &overwrite(0, &long), &long, 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::INVALID_FIELD_IN_CDB));
    let cut = test.run(&nexus, &overwrite(0, &long[..20]), &long[..10], 0);
    assert_eq!(cut.additional(), Some(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR));
    assert!(test.disk.log.is_empty());
    test.run(&nexus, &[0; 6], &[], 0).good();
    // A write that fails leaves a failed unit, until OVERWRITE succeeds.
    let parameters = [2, 0, 0, 1, 9];
    test.disk.failures.extend([Status::SUCCESS, Status::WRITE_FAULT]);
    let reply = test.run(&nexus, &overwrite(0, &parameters), &parameters, 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::WRITE_FAULT));
    assert_eq!(test.run(&nexus, &[0; 6], &[], 0).additional(), Some(AdditionalSense::SANITIZE_FAILED));
    test.run(&nexus, &overwrite(0, &parameters), &parameters, 0).good();
    test.run(&nexus, &[0; 6], &[], 0).good();
}
