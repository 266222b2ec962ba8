//! A virtio SCSI host: commands, task management, and events.

use bdev::null;
use wire_vhost_user::{ConfigHeader, FrontendRequest};
use wire_virtio::Features;
use wire_virtio::scsi::{
    AsyncRequest, CommandHeader, ControlKind, RESPONSE_BYTES, ResponseHeader, ScsiConfig, ScsiEvent,
    TaskFunction, TaskManagementRequest, UnitAddress,
};

use crate::frontend::{Driver, Frontend, Part, TestTarget, wait_until};

pub(crate) const DATA: u64 = 1 << 20;
/// Where the commands of one test are: 4 KiB each, of which the data begins after 2 KiB.
pub(crate) const COMMANDS: u64 = 2 << 20;
pub(crate) const HOST: &str = "scsi";
pub(crate) const GOOD: (u8, u8) = (0, 0);
pub(crate) const CHECK_CONDITION: (u8, u8) = (0, 2);

/// An answer: response and status, residual, sense key with additional sense code and qualifier, bytes written.
#[derive(Debug, PartialEq)]
pub(crate) struct Answer {
    pub(crate) outcome: (u8, u8),
    pub(crate) residual: u32,
    pub(crate) sense: Option<(u8, u8, u8)>,
    pub(crate) written: u32,
}

pub(crate) fn good(written: u32) -> Answer {
    Answer { outcome: GOOD, residual: 0, sense: None, written: RESPONSE_BYTES as u32 + written }
}

pub(crate) fn lun(target: u8) -> u64 {
    UnitAddress { target, lun: 0 }.to_field()
}

/// Adds a command. Data that the device reads is in place.
pub(crate) fn add(queue: &mut Driver<'_>, number: u64, lun: u64, cdb: &[u8], data: &[Part]) -> u16 {
    let at = COMMANDS + number * 4096;
    let header = CommandHeader { lun, tag: number, attribute: 0, priority: 0, reference_number: 0 };
    let mut bytes = header.to_bytes().to_vec();
    bytes.extend(cdb);
    bytes.resize(51, 0);
    queue.memory().write(at, &bytes);
    queue.memory().write(at + 64, &[0xff; RESPONSE_BYTES]);
    let (out, into): (Vec<Part>, Vec<Part>) = data.iter().partition(|part| !part.2);
    let response = (at + 64, RESPONSE_BYTES as u32, true);
    queue.add(&[&[(at, 51, false)][..], &out, &[response], &into].concat())
}

pub(crate) fn answer(queue: &Driver<'_>, number: u64, written: u32) -> Answer {
    let bytes: [u8; RESPONSE_BYTES] = queue.memory().snapshot(COMMANDS + number * 4096 + 64);
    let header = ResponseHeader::decode(&bytes).unwrap();
    let sense = &bytes[ResponseHeader::SIZE..];
    Answer {
        outcome: (header.response, header.status),
        residual: header.residual,
        sense: (header.sense_length > 0).then(|| (sense[2] & 0xf, sense[12], sense[13])),
        written,
    }
}

/// Executes a command.
pub(crate) fn execute(queue: &mut Driver<'_>, lun: u64, cdb: &[u8], data: &[Part]) -> Answer {
    let id = add(queue, 0, lun, cdb, data);
    queue.notify();
    let (used, written) = queue.used(data.len() as u16 + 2);
    assert_eq!(used, id);
    answer(queue, 0, written)
}

/// READ or WRITE with a CDB of ten bytes.
pub(crate) fn transfer(opcode: u8, lba: u8, blocks: u8) -> [u8; 10] {
    [opcode, 0, 0, 0, 0, lba, 0, 0, blocks, 0]
}

pub(crate) const READ: u8 = 0x28;
pub(crate) const WRITE: u8 = 0x2a;
pub(crate) const TEST_UNIT_READY: [u8; 6] = [0; 6];

/// A target with a SCSI controller, whose first targets are `bdevs`.
pub(crate) fn start(name: &str, bdevs: &[&str]) -> TestTarget {
    let target = TestTarget::start(name, |config| config);
    target.target.create_scsi(HOST, false, None).unwrap();
    for bdev in bdevs {
        target.target.add_target(HOST, None, bdev, None).unwrap();
    }
    target
}

pub(crate) fn connect(target: &TestTarget, ring: Features) -> Frontend {
    let features = Features::VERSION_1 | Features::SCSI_HOTPLUG | Features::SCSI_CHANGE | ring;
    Frontend::negotiated(&target.directory.join(HOST), features)
}

/// Has the unit attention of a new nexus reported.
pub(crate) fn greet(queue: &mut Driver<'_>, target: u8) {
    let sense = execute(queue, lun(target), &TEST_UNIT_READY, &[]).sense;
    assert_eq!(sense, Some((6, 0x29, 0)), "POWER ON of target {target}");
}

#[test]
fn commands_are_executed_over_split_and_packed_virtqueues() {
    for (name, ring) in [("scsi-split", Features::EVENT_IDX), ("scsi-packed", Features::RING_PACKED)] {
        let target = start(name, &["Malloc0", "Null0"]);
        let frontend = connect(&target, ring);
        let mut queue = frontend.start_queue(2, 16, 0);
        greet(&mut queue, 0);
        greet(&mut queue, 1);
        for round in 0..20_u8 {
            let bytes: Vec<u8> = (0..4096).map(|at| (at as u8).wrapping_mul(7) ^ round).collect();
            frontend.memory.write(DATA, &bytes);
            let parts = [(DATA, 512, false), (DATA + 512, 3584, false)];
            assert_eq!(
                execute(&mut queue, lun(0), &transfer(WRITE, round * 8, 8), &parts),
                good(0),
                "{name}"
            );
            let back = [(DATA + 8192, 1024, true), (DATA + 16384, 3072, true)];
            assert_eq!(
                execute(&mut queue, lun(0), &transfer(READ, round * 8, 8), &back),
                good(4096),
                "{name}"
            );
            let mut read = vec![0; 4096];
            frontend.memory.read(DATA + 8192, &mut read[..1024]);
            frontend.memory.read(DATA + 16384, &mut read[1024..]);
            assert!(read == bytes, "{name}, round {round}");
        }
        // READ CAPACITY(10) has parameter data; INQUIRY less of it than there is room for.
        let capacity = execute(&mut queue, lun(1), &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[(DATA, 8, true)]);
        assert_eq!(capacity, good(8));
        assert_eq!(frontend.memory.snapshot::<8>(DATA), [0, 0, 0x0f, 0xff, 0, 0, 2, 0]);
        let inquiry = execute(&mut queue, lun(0), &[0x12, 0, 0, 0, 255, 0], &[(DATA, 255, true)]);
        assert_eq!((inquiry.outcome, inquiry.residual + inquiry.written), (GOOD, 255 + 108), "{inquiry:?}");
        // A part of a block, which the device reads elsewhere.
        frontend.memory.write(DATA, &[0xee; 1024]);
        let part = execute(&mut queue, lun(0), &transfer(READ, 0, 1), &[(DATA, 100, true)]);
        assert_eq!((part.outcome, part.written), ((1, 0), 108 + 100), "an overrun: {part:?}");
        let expected: Vec<u8> = (0..100).map(|at| (at as u8).wrapping_mul(7)).collect();
        assert_eq!(frontend.memory.snapshot::<100>(DATA), *expected);
        assert_eq!(frontend.memory.snapshot::<8>(DATA + 100), [0xee; 8], "what follows is not touched");
        // COMPARE AND WRITE has several requests.
        frontend.memory.write(DATA, &[0; 512]);
        frontend.memory.write(DATA + 512, &[9; 512]);
        let mut cdb = [0; 16];
        (cdb[0], cdb[9], cdb[13]) = (0x89, 200, 1);
        let parts = [(DATA, 1024, false)];
        assert_eq!(execute(&mut queue, lun(0), &cdb, &parts), good(0));
        let sense = execute(&mut queue, lun(0), &cdb, &parts).sense;
        assert_eq!(sense, Some((0xe, 0x1d, 0)), "MISCOMPARE");
    }
}

#[test]
fn invalid_commands_are_answered() {
    let target = start("scsi-invalid", &["Malloc0"]);
    let frontend = connect(&target, Features::empty());
    let mut queue = frontend.start_queue(3, 16, 0);
    // No target, a LUN that is no address, data in both directions, and outside of memory.
    let bad_target = (3, 0);
    assert_eq!(execute(&mut queue, lun(1), &TEST_UNIT_READY, &[]).outcome, bad_target);
    assert_eq!(execute(&mut queue, lun(200), &TEST_UNIT_READY, &[]).outcome, bad_target);
    assert_eq!(execute(&mut queue, 0, &TEST_UNIT_READY, &[]).outcome, bad_target);
    let failure = (9, 0);
    let both = [(DATA, 512, false), (DATA, 512, true)];
    assert_eq!(execute(&mut queue, lun(0), &transfer(READ, 0, 1), &both).outcome, failure);
    let outside = [(crate::frontend::MEMORY_BYTES, 512, true)];
    assert_eq!(execute(&mut queue, lun(0), &transfer(READ, 0, 1), &outside).outcome, failure);
    // Another LUN of the target has no unit.
    let other = UnitAddress { target: 0, lun: 1 }.to_field();
    let absent = execute(&mut queue, other, &TEST_UNIT_READY, &[]);
    assert_eq!((absent.outcome, absent.sense), (CHECK_CONDITION, Some((5, 0x25, 0))));
    greet(&mut queue, 0);
    let unknown = execute(&mut queue, lun(0), &[0xff], &[]);
    assert_eq!((unknown.outcome, unknown.sense), (CHECK_CONDITION, Some((5, 0x20, 0))));
    // Data that is not there.
    let short = execute(&mut queue, lun(0), &transfer(WRITE, 0, 1), &[]);
    assert_eq!(short.outcome, (1, 0), "{short:?}");
    assert_eq!(execute(&mut queue, lun(0), &transfer(READ, 0, 1), &[(DATA, 512, true)]), good(512));
}

/// Executes a task management function, with commands in flight, which are left alone.
pub(crate) fn manage(queue: &mut Driver<'_>, function: TaskFunction, tag: u64) -> u8 {
    let request = TaskManagementRequest {
        kind: ControlKind::TaskManagement.to_wire(),
        function: function.to_wire(),
        lun: lun(0),
        tag,
    };
    control(queue, &request.to_bytes(), 1)[0]
}

fn control(queue: &mut Driver<'_>, request: &[u8], room: u32) -> Vec<u8> {
    queue.memory().write(DATA, request);
    queue.memory().write(DATA + 512, &[0xee; 8]);
    let id = queue.add(&[(DATA, request.len() as u32, false), (DATA + 512, room, true)]);
    queue.notify();
    assert_eq!(queue.used(2), (id, room));
    let mut bytes = vec![0; room as usize];
    queue.memory().read(DATA + 512, &mut bytes);
    bytes
}

#[test]
fn task_management_ends_commands() {
    let target = start("scsi-manage", &["Slow0"]);
    let frontend = connect(&target, Features::empty());
    let mut functions = frontend.start_queue(0, 16, 64 << 10);
    let mut queue = frontend.start_queue(2, 32, 0);
    greet(&mut queue, 0);
    let (complete, succeeded, rejected) = (0, 10, 11);
    let read = |queue: &mut Driver<'_>, number: u64| {
        add(queue, number, lun(0), &transfer(READ, 0, 1), &[(DATA + 4096, 512, true)]);
        queue.kick();
    };
    assert_eq!(manage(&mut functions, TaskFunction::QueryTaskSet, 0), complete);
    for (function, expected) in [
        (TaskFunction::AbortTask, 2),
        (TaskFunction::AbortTaskSet, 2),
        (TaskFunction::ClearTaskSet, 2),
        (TaskFunction::LogicalUnitReset, 4),
    ] {
        read(&mut queue, 5);
        wait_until("a command in flight", || manage(&mut functions, TaskFunction::QueryTask, 5) == succeeded);
        assert_eq!(manage(&mut functions, TaskFunction::QueryTask, 6), complete, "another tag");
        assert_eq!(manage(&mut functions, function, 5), complete, "{function:?}");
        // The command has ended before the function.
        let (_, written) = queue.try_used(3).expect("the command has ended");
        assert_eq!((answer(&queue, 5, written).outcome, written), ((expected, 0), 108), "{function:?}");
    }
    let reset = execute(&mut queue, lun(0), &TEST_UNIT_READY, &[]);
    assert_eq!((reset.outcome, reset.sense), (CHECK_CONDITION, Some((6, 0x29, 3))), "BUS DEVICE RESET");
    assert_eq!(manage(&mut functions, TaskFunction::AbortTask, 77), complete, "no such command");
    assert_eq!(manage(&mut functions, TaskFunction::ClearAca, 0), rejected);
    let query = AsyncRequest { kind: ControlKind::AsyncQuery.to_wire(), lun: lun(0), requested: u32::MAX };
    assert_eq!(control(&mut functions, &query.to_bytes(), 5), [0; 5], "no notification is reported");
    assert_eq!(execute(&mut queue, lun(0), &transfer(READ, 0, 1), &[(DATA, 512, true)]), good(512));
}

#[test]
fn targets_come_and_go_and_are_resized() {
    let target = start("scsi-events", &["Null0"]);
    let frontend = connect(&target, Features::empty());
    let mut events = frontend.start_queue(1, 8, 64 << 10);
    let mut queue = frontend.start_queue(2, 16, 0);
    for number in 0..4 {
        events.add(&[(DATA + 64 * number, 16, true)]);
    }
    events.kick();
    greet(&mut queue, 0);
    assert_eq!(events.try_used(1), None, "there is nothing to report");
    let mut event = |number: u64| {
        assert_eq!(events.used(1).1, 16);
        let event = ScsiEvent::decode(&frontend.memory.snapshot::<16>(DATA + 64 * number)).unwrap();
        (event.event, UnitAddress::decode(event.lun).unwrap().target, event.reason)
    };
    assert_eq!(target.target.add_target(HOST, Some(5), "Malloc0", None).unwrap(), 5);
    assert_eq!(event(0), (ScsiEvent::TRANSPORT_RESET, 5, ScsiEvent::RESET_RESCAN));
    greet(&mut queue, 5);
    null::resize(&target.registry, "Null0", 8192).unwrap();
    assert_eq!(event(1), (ScsiEvent::PARAMETER_CHANGE, 0, 0x092a));
    let sense = execute(&mut queue, lun(0), &TEST_UNIT_READY, &[]).sense;
    assert_eq!(sense, Some((6, 0x2a, 9)), "CAPACITY DATA HAS CHANGED");
    target.target.remove_target(HOST, 5).unwrap();
    assert_eq!(event(2), (ScsiEvent::TRANSPORT_RESET, 5, ScsiEvent::RESET_REMOVED));
    assert_eq!(execute(&mut queue, lun(5), &TEST_UNIT_READY, &[]).outcome, (3, 0));
    // A target whose device is removed goes, too.
    target.target.add_target(HOST, None, "Malloc0", None).unwrap();
    assert_eq!(event(3), (ScsiEvent::TRANSPORT_RESET, 1, ScsiEvent::RESET_RESCAN));
    target.registry.unregister("Malloc0").unwrap();
    events.add(&[(DATA, 16, true)]);
    events.kick();
    assert_eq!(events.used(1).1, 16);
    let event = ScsiEvent::decode(&frontend.memory.snapshot::<16>(DATA)).unwrap();
    let address = UnitAddress { target: 1, lun: 0 };
    assert_eq!((event.lun, event.reason), (address.to_event_field(), ScsiEvent::RESET_REMOVED));
}

/// As after a migration: POWER ON is reported to a driver that begins, and not to one that continues.
#[test]
fn reservations_persist_in_the_file_of_a_target() {
    let target = start("scsi-persist", &[]);
    let file = target.directory.join("reservations");
    let frontend = connect(&target, Features::EVENT_IDX);
    let mut queue = frontend.start_queue(2, 16, 0);
    // REGISTER with APTPL, and READ KEYS.
    let parameters = [&[0; 8][..], &0xa_u64.to_be_bytes(), &[0, 0, 0, 0, 1, 0, 0, 0]].concat();
    let (register, read_keys) = ([0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0], [0x5e, 0, 0, 0, 0, 0, 0, 0, 64, 0]);
    let keys = |queue: &mut Driver<'_>| {
        assert_eq!(execute(queue, lun(0), &read_keys, &[(DATA + 4096, 64, true)]).sense, None);
        let mut data = [0; 16];
        frontend.memory.read(DATA + 4096, &mut data);
        (data[7], data[15])
    };
    for (ptpl_file, before, registered) in
        [(Some(&file), (0, 0), None), (Some(&file), (8, 0xa), None), (None, (0, 0), Some((5, 0x26, 0)))]
    {
        target.target.add_target(HOST, Some(0), "Malloc0", ptpl_file.cloned()).unwrap();
        greet(&mut queue, 0);
        frontend.memory.write(DATA + 4096, &[0; 64]);
        assert_eq!(keys(&mut queue), before, "{ptpl_file:?}");
        if before.0 == 0 {
            frontend.memory.write(DATA, &parameters);
            let sense = execute(&mut queue, lun(0), &register, &[(DATA, 24, false)]).sense;
            assert_eq!(sense, registered, "{ptpl_file:?}");
        }
        target.target.remove_target(HOST, 0).unwrap();
    }
}

#[test]
fn no_reset_is_reported_to_a_driver_that_continues() {
    for (name, ring) in [("scsi-on-split", Features::empty()), ("scsi-on-packed", Features::RING_PACKED)] {
        let target = start(name, &["Malloc0"]);
        let frontend = connect(&target, ring);
        let mut queue = frontend.start_queue(2, 16, 0);
        greet(&mut queue, 0);
        let base = frontend.stop_queue(2);
        frontend.reconnect(&target.directory.join(HOST));
        queue.start(base);
        assert_eq!(execute(&mut queue, lun(0), &TEST_UNIT_READY, &[]), good(0), "{name}");
        target.target.remove_target(HOST, 0).unwrap();
        target.target.add_target(HOST, Some(0), "Malloc0", None).unwrap();
        greet(&mut queue, 0);
    }
}

#[test]
fn an_idle_host_is_not_polled_for_its_event_buffers() {
    let target = start("scsi-idle", &["Malloc0"]);
    let frontend = connect(&target, Features::empty());
    let mut events = frontend.start_queue(1, 8, 64 << 10);
    events.add(&[(DATA, 16, true)]);
    let mut queue = frontend.start_queue(2, 16, 0);
    greet(&mut queue, 0);
    for _ in 0..3 {
        wait_until("the device asks for notifications", || queue.wants_notification(0));
        assert_eq!(execute(&mut queue, lun(0), &TEST_UNIT_READY, &[]), good(0));
    }
}

#[test]
fn the_configuration_space_is_that_of_a_scsi_host() {
    let target = start("scsi-config", &[]);
    let frontend = connect(&target, Features::empty());
    let header = ConfigHeader { offset: 0, size: ScsiConfig::SIZE as u32, flags: 0 };
    let bytes = [&header.to_bytes()[..], &[0; ScsiConfig::SIZE]].concat();
    frontend.send(FrontendRequest::GetConfig, &bytes, &[]);
    let reply = frontend.reply(FrontendRequest::GetConfig).unwrap();
    let config = ScsiConfig::decode(&reply[ConfigHeader::SIZE..]).unwrap();
    let sizes = (config.sense_size, config.cdb_size, config.event_info_size);
    assert_eq!((sizes, config.max_target, config.max_lun), ((96, 32, 16), 7, 16383));
    let write = |offset: u32, value: u32| {
        let header = ConfigHeader { offset, size: 4, flags: 0 };
        let bytes = [&header.to_bytes()[..], &value.to_le_bytes()].concat();
        frontend.ask(FrontendRequest::SetConfig, &bytes, &[])
    };
    let results = [(20, 96), (24, 32), (24, 64), (0, 254)].map(|(offset, value)| write(offset, value));
    assert_eq!(results, [Some(0), Some(0), Some(1), Some(1)], "sizes remain as they are");
}

#[test]
fn a_delayed_controller_listens_when_it_is_started() {
    let target = TestTarget::start("scsi-delay", |config| config);
    let socket = target.directory.join("late");
    target.target.create_scsi("late", true, None).unwrap();
    assert!(!socket.exists());
    target.target.start_scsi("late").unwrap();
    assert!(socket.exists() && target.target.start_scsi("late").is_err());
    let added = |number, bdev| target.target.add_target("late", number, bdev, None);
    for number in 0..8 {
        let bdev = ["Null0", "Malloc0"][number % 2];
        assert_eq!(added(None, bdev).unwrap(), number as u8);
    }
    let errors = [added(None, "Null0"), added(Some(8), "Null0"), added(Some(3), "Null0")];
    let errors = errors.map(|result| result.unwrap_err().to_string());
    assert_eq!(errors[0], "there is no free SCSI target");
    assert_eq!(errors[1], "scsi_target_num: 8: expected 0 to 7");
    assert_eq!(errors[2], "SCSI target 3 exists");
    target.target.remove_target("late", 3).unwrap();
    assert_eq!(target.target.remove_target("late", 3).unwrap_err().to_string(), "there is no SCSI target 3");
    assert!(
        added(None, "Missing0").is_err() && target.target.add_target("disk", None, "Null0", None).is_err()
    );
    assert_eq!(added(None, "Null0").unwrap(), 3);
    target.target.delete("late").unwrap();
    assert!(!socket.exists());
}
