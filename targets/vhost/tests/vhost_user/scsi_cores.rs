//! A virtio SCSI host whose virtqueues are on two cores.

use std::os::fd::AsFd;

use bdev::{delay, malloc};
use dma::SharedRegion;
use wire_vhost_user::{FrontendRequest, MemoryRegion, MemoryTable};
use wire_virtio::Features;
use wire_virtio::scsi::{RESPONSE_BYTES, ScsiEvent, TaskFunction, UnitAddress};
use wire_virtio::split::used;

use crate::frontend::{Driver, Frontend, GUEST, MEMORY_BYTES, TestTarget, USER, memfd, wait_until};
use crate::scsi::{
    CHECK_CONDITION, DATA, GOOD, HOST, READ, TEST_UNIT_READY, WRITE, add, answer, connect, execute, good,
    greet, lun, manage, start, transfer,
};
use crate::sessions::{inflight_memory, set_inflight};

/// Where the areas of the second request queue are.
const SECOND: u64 = 32 << 10;
/// Where those of the control queue and of the event queue are.
const CONTROL: u64 = 64 << 10;
const EVENTS: u64 = 96 << 10;
const ABORTED: (u8, u8) = (2, 0);
const RESET: (u8, u8) = (4, 0);
const BAD_TARGET: (u8, u8) = (3, 0);
const COMPLETE: u8 = 0;
const SUCCEEDED: u8 = 10;

/// The request queues: one is with the connection, the other one on another core.
fn request_queues(frontend: &Frontend) -> [Driver<'_>; 2] {
    [frontend.start_queue(2, 32, 0), frontend.start_queue(3, 32, SECOND)]
}

/// Adds a read, and waits until it is in flight: a write behind it has completed. The data is in `into`.
fn read_in_flight(queue: &mut Driver<'_>, number: u64, into: u64) {
    add(queue, number, lun(0), &transfer(READ, 0, 1), &[(into, 512, true)]);
    let write = add(queue, number + 8, lun(0), &transfer(WRITE, 9, 1), &[(DATA + 8192, 512, false)]);
    queue.kick();
    assert_eq!(queue.used(3), (write, RESPONSE_BYTES as u32));
    assert_eq!(answer(queue, number + 8, RESPONSE_BYTES as u32), good(0));
}

/// Reads on both queues, with the numbers 5 and 6.
fn reads_in_flight(queues: &mut [Driver<'_>; 2]) {
    for (number, queue) in (5..).zip(queues) {
        read_in_flight(queue, number, DATA + 4096);
    }
}

/// The answer of a command that has ended.
fn ended(queue: &mut Driver<'_>, number: u64) -> (u8, u8) {
    let (_, written) = queue.try_used(3).expect("the command has ended");
    answer(queue, number, written).outcome
}

fn cpus(target: &TestTarget) -> Vec<(usize, u32)> {
    let controllers = target.target.controllers().unwrap();
    let host = controllers.into_iter().find(|one| one.name == HOST).unwrap();
    host.sessions[0].running.clone()
}

#[test]
fn functions_of_the_control_queue_reach_commands_of_every_reactor() {
    let target = start("cores-functions", &[]);
    // Slower than the test's thread may be.
    malloc::create(&target.registry, malloc::MallocConfig::new("Malloc2", 4096, 512)).unwrap();
    let slower = delay::DelayConfig::new("Malloc2", "Slower0", 1000);
    let reads = 500_000;
    let slower = delay::DelayConfig { avg_read_latency_us: reads, p99_read_latency_us: reads, ..slower };
    delay::create(&target.registry, slower).unwrap();
    target.target.add_target(HOST, Some(0), "Slower0", None).unwrap();
    let frontend = connect(&target, Features::empty());
    let mut functions = frontend.start_queue(0, 32, CONTROL);
    let mut queues = request_queues(&frontend);
    let cpus = cpus(&target);
    assert_eq!(cpus.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 2, 3]);
    assert!(cpus[0].1 == cpus[1].1 && cpus[1].1 != cpus[2].1, "{cpus:?}");
    greet(&mut queues[1], 0);
    assert_eq!(execute(&mut queues[0], lun(0), &TEST_UNIT_READY, &[]), good(0), "the nexus is the same");
    for (function, expected) in [
        (TaskFunction::AbortTask, ABORTED),
        (TaskFunction::AbortTaskSet, ABORTED),
        (TaskFunction::ClearTaskSet, ABORTED),
        (TaskFunction::LogicalUnitReset, RESET),
        (TaskFunction::NexusReset, RESET),
    ] {
        reads_in_flight(&mut queues);
        assert_eq!(manage(&mut functions, TaskFunction::QueryTask, 6), SUCCEEDED);
        assert_eq!(manage(&mut functions, TaskFunction::QueryTaskSet, 0), SUCCEEDED);
        assert_eq!(manage(&mut functions, TaskFunction::QueryTask, 7), COMPLETE, "another tag");
        assert_eq!(manage(&mut functions, TaskFunction::AbortTask, 7), COMPLETE, "another tag");
        assert_eq!(manage(&mut functions, function, 6), COMPLETE, "{function:?}");
        // Commands end before the function.
        assert_eq!(ended(&mut queues[1], 6), expected, "{function:?}");
        if function == TaskFunction::AbortTask {
            let (_, written) = queues[0].used(3);
            assert_eq!(answer(&queues[0], 5, written), good(512), "the other one");
        } else {
            assert_eq!(ended(&mut queues[0], 5), expected, "{function:?}");
        }
        assert_eq!(manage(&mut functions, TaskFunction::QueryTaskSet, 0), COMPLETE);
        let attention = match function {
            TaskFunction::LogicalUnitReset => 3,
            TaskFunction::NexusReset => 7,
            _ => continue,
        };
        let reset = execute(&mut queues[1], lun(0), &TEST_UNIT_READY, &[]);
        assert_eq!((reset.outcome, reset.sense), (CHECK_CONDITION, Some((6, 0x29, attention))));
        assert_eq!(execute(&mut queues[0], lun(0), &TEST_UNIT_READY, &[]), good(0), "it is reported once");
    }
}

/// The driver makes a command available, and aborts it before the device was notified.
#[test]
fn a_command_that_was_not_fetched_is_aborted() {
    let target = start("cores-unfetched", &["Slow0"]);
    let frontend = connect(&target, Features::empty());
    let mut functions = frontend.start_queue(0, 32, CONTROL);
    let mut queues = request_queues(&frontend);
    greet(&mut queues[0], 0);
    for queue in &mut queues {
        for round in 0..3 {
            wait_until("the device asks for notifications", || queue.wants_notification(0));
            add(queue, 5, lun(0), &transfer(READ, 0, 1), &[(DATA + 4096, 512, true)]);
            assert_eq!(manage(&mut functions, TaskFunction::AbortTask, 5), COMPLETE);
            let outcome = ended(queue, 5);
            // The test's thread may be slower than the read.
            assert!(outcome == ABORTED || outcome == GOOD, "{round}: {outcome:?}");
        }
    }
}

#[test]
fn targets_come_and_go_with_commands_in_flight_on_two_reactors() {
    let target = start("cores-hotplug", &["Slow0"]);
    let frontend = connect(&target, Features::empty());
    let mut events = frontend.start_queue(1, 32, EVENTS);
    let mut queues = request_queues(&frontend);
    let mut event = || {
        let at = DATA + (64 << 10);
        events.add(&[(at, 16, true)]);
        events.kick();
        assert_eq!(events.used(1).1, 16);
        let event = ScsiEvent::decode(&frontend.memory.snapshot::<16>(at)).unwrap();
        (UnitAddress { target: 0, lun: 0 }.to_event_field() == event.lun).then_some(event.reason)
    };
    for round in 0..10 {
        // Each reactor knows the target when the driver learns of it.
        let (first, second) = (round % 2, 1 - round % 2);
        greet(&mut queues[first], 0);
        assert_eq!(execute(&mut queues[second], lun(0), &TEST_UNIT_READY, &[]), good(0), "{round}");
        reads_in_flight(&mut queues);
        target.target.remove_target(HOST, 0).unwrap();
        assert_eq!(event(), Some(ScsiEvent::RESET_REMOVED));
        for (number, queue) in (5..).zip(&mut queues) {
            let refused = add(queue, 0, lun(0), &TEST_UNIT_READY, &[]);
            queue.kick();
            for _ in 0..2 {
                let (id, written) = queue.used(3);
                match id == refused {
                    true => assert_eq!(answer(queue, 0, written).outcome, BAD_TARGET, "{round}"),
                    false => assert_eq!(answer(queue, number, written), good(512), "{round}: it is executed"),
                }
            }
        }
        target.target.add_target(HOST, Some(0), "Slow0", None).unwrap();
        assert_eq!(event(), Some(ScsiEvent::RESET_RESCAN));
    }
}

#[test]
fn commands_of_both_reactors_survive_the_connection() {
    for ring in [Features::empty(), Features::RING_PACKED] {
        let target = start(&format!("cores-survive-{}", ring.bits()), &["Slow0"]);
        let frontend = connect(&target, ring);
        let memory = inflight_memory(&frontend, 4, 32);
        set_inflight(&frontend, &memory);
        let mut queues = request_queues(&frontend);
        greet(&mut queues[0], 0);
        for round in 0..3 {
            reads_in_flight(&mut queues);
            let bases = [&queues[0], &queues[1]].map(|queue| match queue.is_packed {
                true => 0x8000_8000,
                false => queue.memory().load_u16(queue.used_at() + used::INDEX).into(),
            });
            frontend.reconnect(&target.directory.join(HOST));
            set_inflight(&frontend, &memory);
            for ((number, queue), base) in (5..).zip(&mut queues).zip(bases) {
                queue.start(base);
                let (_, written) = queue.used(3);
                assert_eq!(answer(queue, number, written), good(512), "{round}: no reset is reported");
                assert_eq!(queue.try_used(3), None, "{round}: it is used once");
            }
        }
        // The front-end goes, and a driver begins.
        reads_in_flight(&mut queues);
        frontend.stream.replace(std::os::unix::net::UnixStream::pair().unwrap().0);
        target.wait_for_no_connections();
        let next = connect(&target, ring);
        let mut queues = request_queues(&next);
        greet(&mut queues[1], 0);
        assert_eq!(execute(&mut queues[0], lun(0), &TEST_UNIT_READY, &[]), good(0));
    }
}

#[test]
fn a_reset_waits_for_commands_of_both_reactors_and_loses_their_nexus_once() {
    let target = start("cores-reset", &["Slow0"]);
    let frontend = connect(&target, Features::empty());
    let features = frontend.features.bits().to_le_bytes();
    for round in 0..4 {
        frontend.memory.write(0, &[0; 128 << 10]);
        let mut queues = request_queues(&frontend);
        let (first, second) = (round % 2, 1 - round % 2);
        greet(&mut queues[first], 0);
        assert_eq!(execute(&mut queues[second], lun(0), &TEST_UNIT_READY, &[]), good(0), "{round}");
        // RESERVE(6), which the loss of the nexus ends.
        assert_eq!(execute(&mut queues[second], lun(0), &[0x16, 0, 0, 0, 0, 0], &[]), good(0), "{round}");
        reads_in_flight(&mut queues);
        frontend.set(FrontendRequest::ResetDevice, &[], &[]);
        for (number, queue) in (5..).zip(&mut queues) {
            let (_, written) = queue.try_used(3).expect("the reset has waited");
            assert_eq!(answer(queue, number, written), good(512), "{round}");
        }
        frontend.set(FrontendRequest::SetFeatures, &features, &[]);
    }
}

#[test]
fn the_memory_table_changes_while_commands_of_two_reactors_are_in_flight() {
    let target = start("cores-tables", &["Slow0"]);
    let frontend = connect(&target, Features::empty());
    let mut queues = request_queues(&frontend);
    greet(&mut queues[0], 0);
    let main = MemoryRegion { guest_address: GUEST, size: MEMORY_BYTES, user_address: USER, mmap_offset: 0 };
    let more = MemoryRegion {
        guest_address: GUEST + MEMORY_BYTES,
        size: 1 << 20,
        user_address: 0x1000,
        mmap_offset: 0,
    };
    for round in 0..3 {
        let file = memfd(1 << 20);
        let other = SharedRegion::map(file.as_fd(), 0, 1 << 20, true).unwrap();
        let table = MemoryTable(vec![main, more]).to_bytes();
        frontend.set(FrontendRequest::SetMemTable, &table, &[frontend.file.as_fd(), file.as_fd()]);
        for (number, queue) in (5..).zip(&mut queues) {
            read_in_flight(queue, number, MEMORY_BYTES + 4096 * number);
        }
        // The table without the memory is acknowledged when both reads have completed.
        let table = MemoryTable(vec![main]).to_bytes();
        frontend.set(FrontendRequest::SetMemTable, &table, &[frontend.file.as_fd()]);
        for (number, queue) in (5..).zip(&mut queues) {
            let (_, written) = queue.try_used(3).expect("the read has completed");
            assert_eq!(answer(queue, number, written), good(512), "{round}");
            let beyond = execute(queue, lun(0), &transfer(READ, 0, 1), &[(MEMORY_BYTES, 512, true)]);
            assert_eq!(beyond.outcome, (9, 0), "{round}: the memory is gone");
        }
        drop(other);
    }
}

/// Commands are made available on both cores, and functions at once: these do not end before the commands.
#[test]
fn functions_end_after_commands_of_two_reactors_that_are_on_their_way() {
    let target = start("cores-race", &["Slow0"]);
    let frontend = connect(&target, Features::empty());
    let mut functions = frontend.start_queue(0, 32, CONTROL);
    let mut queues = request_queues(&frontend);
    greet(&mut queues[0], 0);
    for round in 0..60 {
        for (number, queue) in (5..).zip(&mut queues) {
            add(queue, number, lun(0), &transfer(READ, 0, 1), &[(DATA + 4096, 512, true)]);
            queue.kick();
        }
        let is_reset = round % 2 == 1;
        let function = if is_reset { TaskFunction::LogicalUnitReset } else { TaskFunction::AbortTaskSet };
        assert_eq!(manage(&mut functions, function, 0), COMPLETE);
        for (number, queue) in (5..).zip(&mut queues) {
            let outcome = ended(queue, number);
            // A command that is fetched when the unit was reset reports that. The test's thread may be slower than the reads.
            let expected: &[_] = if is_reset { &[RESET, CHECK_CONDITION, GOOD] } else { &[ABORTED, GOOD] };
            assert!(expected.contains(&outcome), "round {round}: {number}: {outcome:?}");
        }
        if is_reset {
            // The unit attention, unless it was reported.
            execute(&mut queues[0], lun(0), &TEST_UNIT_READY, &[]);
        }
    }
}
