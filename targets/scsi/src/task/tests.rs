use block_io::{Op, RequestFlags, Status, Tag};
use wire_scsi::{AdditionalSense, ScsiStatus, Sense, SenseKey};

use crate::test_unit::{Reply, TestUnit, config};
use crate::{
    Command, NoPeers, Residual, Step, Task, TaskContext, TaskEvent, UnitConfig, absent_unit, no_waker,
};

const BLOCKS: u64 = 100;

fn test_unit() -> TestUnit {
    let mut test = TestUnit::new(config(512, BLOCKS));
    for (at, byte) in test.disk.bytes.iter_mut().enumerate() {
        *byte = (at / 512) as u8 ^ at as u8;
    }
    test
}

fn read_10(lba: u32, blocks: u16) -> [u8; 10] {
    let (lba, blocks) = (lba.to_be_bytes(), blocks.to_be_bytes());
    [0x28, 0, lba[0], lba[1], lba[2], lba[3], 0, blocks[0], blocks[1], 0]
}

fn write_10(lba: u32, blocks: u16) -> [u8; 10] {
    let mut cdb = read_10(lba, blocks);
    cdb[0] = 0x2a;
    cdb
}

#[test]
fn every_length_of_read_and_write_reaches_its_blocks() {
    let mut test = test_unit();
    let nexus = test.nexus(1);
    let cdbs: [(&[u8], &[u8]); 4] = [
        (&[0x08, 0, 0, 3, 2, 0], &[0x0a, 0, 0, 3, 2, 0]),
        (&read_10(3, 2), &write_10(3, 2)),
        (&[0xa8, 0, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0], &[0xaa, 0, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0]),
        (
            &[0x88, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0],
            &[0x8a, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0],
        ),
    ];
    for (value, (read, write)) in cdbs.into_iter().enumerate() {
        let before = test.disk.bytes.clone();
        assert_eq!(test.run(&nexus, read, &[], 1024).good(), before[3 * 512..5 * 512]);
        let reply = test.run(&nexus, write, &[value as u8; 1024], 0);
        assert_eq!((reply.status, reply.residual), (ScsiStatus::Good, Residual::None));
        assert_eq!(test.disk.bytes[3 * 512..5 * 512], [value as u8; 1024]);
        assert_eq!(test.disk.bytes[..3 * 512], before[..3 * 512]);
        assert_eq!(test.disk.bytes[5 * 512..], before[5 * 512..]);
    }
}

#[test]
fn residuals_of_reads_and_writes_are_exact() {
    let mut test = test_unit();
    let nexus = test.nexus(1);
    // Blocks of the command, bytes that the initiator expects.
    for (blocks, expected) in
        [(1, 0), (1, 200), (1, 512), (1, 513), (2, 512), (2, 1023), (1, 10000), (0, 0), (0, 77)]
    {
        let command_bytes = u32::from(blocks) * 512;
        let residual = Residual::of(command_bytes.into(), expected);
        let reply = test.run(&nexus, &read_10(9, blocks), &[], expected);
        assert_eq!(reply.residual, residual, "read {blocks} {expected}");
        let length = command_bytes.min(expected) as usize;
        assert_eq!(reply.good(), test.disk.bytes[9 * 512..9 * 512 + length]);
        // What the initiator has is written, and nothing else.
        let before = test.disk.bytes.clone();
        let reply = test.run(&nexus, &write_10(20, blocks), &vec![0x5a; expected as usize], 0);
        assert_eq!((reply.status, reply.residual), (ScsiStatus::Good, residual), "write {blocks} {expected}");
        assert_eq!(test.disk.bytes[20 * 512..20 * 512 + length], vec![0x5a; length]);
        assert!(test.disk.bytes[20 * 512 + length..] == before[20 * 512 + length..]);
        test.disk.bytes = before;
    }
}

#[test]
fn commands_beyond_the_unit_or_with_protection_are_rejected() {
    let mut test = test_unit();
    let nexus = test.nexus(1);
    let mut failure = |cdb: &[u8]| {
        let reply = test.run(&nexus, cdb, &[0; 512], 0);
        assert_eq!(reply.residual, Residual::Underflow(512));
        reply.additional()
    };
    assert_eq!(failure(&write_10(99, 2)), Some(AdditionalSense::LBA_OUT_OF_RANGE));
    assert_eq!(failure(&write_10(101, 0)), Some(AdditionalSense::LBA_OUT_OF_RANGE));
    assert_eq!(failure(&write_10(u32::MAX, 1)), Some(AdditionalSense::LBA_OUT_OF_RANGE));
    let last = [0x8a, 0, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0];
    assert_eq!(failure(&last), Some(AdditionalSense::LBA_OUT_OF_RANGE));
    let mut protected = write_10(0, 1);
    protected[1] = 0x20;
    assert_eq!(failure(&protected), Some(AdditionalSense::INVALID_FIELD_IN_CDB));
    assert_eq!(failure(&[0xc5; 16]), Some(AdditionalSense::INVALID_COMMAND_OPERATION_CODE));
    assert!(test.disk.log.is_empty());
    assert_eq!(test.run(&nexus, &write_10(100, 0), &[], 0).status, ScsiStatus::Good);
}

#[test]
fn a_command_longer_than_the_limit_is_rejected() {
    let mut test = TestUnit::new(config(4096, 300));
    let nexus = test.nexus(1);
    assert_eq!(test.run(&nexus, &read_10(0, 256), &[], 1 << 20).good().len(), 1 << 20);
    let reply = test.run(&nexus, &read_10(0, 257), &[], 257 << 12);
    assert_eq!(reply.additional(), Some(AdditionalSense::INVALID_FIELD_IN_CDB));
}

#[test]
fn failures_of_the_device_become_sense_data() {
    let mut test = test_unit();
    let nexus = test.nexus(1);
    test.disk.failure = Some(Status::UNRECOVERED_READ_ERROR);
    let reply = test.run(&nexus, &read_10(0, 1), &[], 512);
    let sense = Sense::new(SenseKey::MediumError, AdditionalSense::UNRECOVERED_READ_ERROR);
    let expected = Reply {
        status: ScsiStatus::CheckCondition,
        sense: Some(sense),
        data: Vec::new(),
        residual: Residual::Underflow(512),
    };
    assert_eq!(reply, expected);
    test.disk.failure = Some(Status::RESERVATION_CONFLICT);
    let reply = test.run(&nexus, &write_10(0, 1), &[0; 512], 0);
    assert_eq!((reply.status, reply.sense), (ScsiStatus::ReservationConflict, None));
    assert_eq!(reply.residual, Residual::None, "all data was transferred");
}

#[test]
fn writes_are_durable_if_fua_asks_for_it() {
    let mut test = test_unit();
    let nexus = test.nexus(1);
    let mut fua = write_10(0, 1);
    fua[1] = 0x18;
    test.run(&nexus, &fua, &[0; 512], 0).good();
    test.run(&nexus, &write_10(0, 1), &[0; 512], 0).good();
    // SYNCHRONIZE CACHE, of both lengths, the second with IMMED.
    test.run(&nexus, &[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0).good();
    test.run(&nexus, &[0x91, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0).good();
    let none = RequestFlags::NONE;
    let expected = [(Op::Write, RequestFlags::FUA), (Op::Write, none), (Op::Flush, none), (Op::Flush, none)];
    assert_eq!(test.disk.log, expected);
    test.disk.failure = Some(Status::WRITE_FAULT);
    let reply = test.run(&nexus, &[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::WRITE_FAULT));
}

#[test]
fn a_read_only_unit_rejects_writes_and_says_so() {
    let mut test = TestUnit::new(UnitConfig { read_only: true, ..config(512, 8) });
    let nexus = test.nexus(1);
    let reply = test.run(&nexus, &write_10(0, 1), &[0; 512], 0);
    assert_eq!(reply.sense, Some(Sense::new(SenseKey::DataProtect, AdditionalSense::WRITE_PROTECTED)));
    // MODE SENSE(6) of all pages, without block descriptor: WP and DPOFUA.
    let mode = test.run(&nexus, &[0x1a, 8, 0x3f, 0, 255, 0], &[], 255).good();
    assert_eq!((mode[0] as usize + 1, mode[2], mode[3]), (mode.len(), 0x90, 0));
}

#[test]
fn a_unit_attention_precedes_all_but_inquiry_report_luns_and_request_sense() {
    let mut test = test_unit();
    let nexus = crate::test_unit::nexus(&test.unit, 1);
    assert_eq!(test.run(&nexus, &[0x12, 0, 0, 0, 36, 0], &[], 36).good().len(), 36);
    let luns = test.run(&nexus, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256);
    assert_eq!(luns.residual, Residual::Underflow(256 - 24));
    assert_eq!(luns.good()[..4], [0, 0, 0, 16]);
    // Even an unknown command reports it.
    assert_eq!(test.run(&nexus, &[0xc5; 16], &[], 0).additional(), Some(AdditionalSense::POWER_ON));
    let unknown = Some(AdditionalSense::INVALID_COMMAND_OPERATION_CODE);
    assert_eq!(test.run(&nexus, &[0xc5; 16], &[], 0).additional(), unknown);
    test.unit.resize(90);
    let sense = test.run(&nexus, &[0x03, 1, 0, 0, 252, 0], &[], 252).good();
    assert_eq!(sense[..4], [0x72, 6, 0x2a, 0x09]);
    let sense = test.run(&nexus, &[0x03, 0, 0, 0, 8, 0], &[], 252);
    assert_eq!((sense.residual, sense.good()), (Residual::Underflow(244), vec![0x70, 0, 0, 0, 0, 0, 0, 10]));
    let capacity = test.run(&nexus, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 8).good();
    assert_eq!(capacity, [0, 0, 0, 89, 0, 0, 2, 0]);
}

#[test]
fn an_aborted_task_has_no_answer_and_ends_after_its_requests() {
    let mut test = test_unit();
    let nexus = test.nexus(1);
    let waker = no_waker();
    let mut requests = Vec::new();
    let mut context =
        TaskContext { nexus: &nexus, luns: &[], waker: &waker, requests: &mut requests, peers: &mut NoPeers };
    let command = Command { cdb: &read_10(0, 1), data_in_bytes: 512, tag: Tag(3), ..Command::default() };
    let (mut task, step) = Task::start(&command, &mut context);
    assert!(matches!(step, Step::DataIn(512)));
    assert!(matches!(task.resume(TaskEvent::Abort, &mut context), Step::Aborted));
    let (mut task, _) = Task::start(&command, &mut context);
    let memory = test.pool.take(512).unwrap().into();
    assert!(matches!(task.resume(TaskEvent::DataIn(memory), &mut context), Step::InFlight));
    assert!(matches!(task.resume(TaskEvent::Abort, &mut context), Step::InFlight));
    let completion = test.disk.execute(context.requests).remove(0);
    assert!(matches!(task.resume(TaskEvent::Completed(completion), &mut context), Step::Aborted));
    let (mut task, _) = Task::start(&command, &mut context);
    let Step::Done(busy) = task.resume(TaskEvent::NoMemory, &mut context) else { panic!() };
    assert_eq!((busy.status, busy.residual), (ScsiStatus::Busy, Residual::Underflow(512)));
}

#[test]
fn a_lun_without_unit_answers_three_commands() {
    let command = |cdb| Command { cdb, data_in_bytes: 96, ..Command::default() };
    let inquiry = Reply::of(absent_unit(&command(&[0x12, 0, 0, 0, 96, 0]), &[1])).good();
    assert_eq!((inquiry[0], inquiry.len()), (0x7f, 96));
    let luns = Reply::of(absent_unit(&command(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 96, 0, 0]), &[1])).good();
    assert_eq!(luns, [0, 0, 0, 8, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    let sense = Reply::of(absent_unit(&command(&[0x03, 0, 0, 0, 96, 0]), &[])).good();
    assert_eq!((sense[2], sense[12]), (5, 0x25));
    let other = Reply::of(absent_unit(&command(&[0; 6]), &[]));
    assert_eq!(other.additional(), Some(AdditionalSense::LOGICAL_UNIT_NOT_SUPPORTED));
}

#[test]
fn supported_commands_are_reported_and_executed() {
    let mut test = test_unit();
    let nexus = test.nexus(1);
    let report =
        |options: u8, opcode: u8, action: u8| [0xa3, 0x0c, options, opcode, 0, action, 0, 0, 0x10, 0, 0, 0];
    let all = test.run(&nexus, &report(0, 0, 0), &[], 4096).good();
    assert_eq!(u32::from_be_bytes([all[0], all[1], all[2], all[3]]) as usize, all.len() - 4);
    for command in all[4..].chunks(8) {
        let (opcode, action, has_action) = (command[0], command[3], command[5] & 1 != 0);
        let options = if has_action { 2 } else { 1 };
        let one = test.run(&nexus, &report(options, opcode, action), &[], 4096).good();
        assert_eq!((one[1] & 7, one[3], one[4]), (3, command[7], opcode));
        assert_eq!(test.run(&nexus, &report(3, opcode, action), &[], 4096).good(), one);
        let reply = test.run(&nexus, &report(3 - options, opcode, action), &[], 4096);
        assert_eq!(reply.additional(), Some(AdditionalSense::INVALID_FIELD_IN_CDB));
        // It is known, whatever it says to its fields.
        let mut cdb = vec![0; command[7].into()];
        cdb[0] = opcode;
        cdb[1] = if has_action { action } else { 0 };
        let reply = test.run(&nexus, &cdb, &[], 0);
        assert_ne!(reply.additional(), Some(AdditionalSense::INVALID_COMMAND_OPERATION_CODE), "{opcode:#x}");
        test.run(&nexus, &[0x17, 0, 0, 0, 0, 0], &[], 0);
    }
    for (opcode, action) in [(0x9c, 0), (0xc0, 0), (0x48, 1)] {
        let options = if opcode == 0x48 { 2 } else { 1 };
        assert_eq!(test.run(&nexus, &report(options, opcode, action), &[], 4096).good(), [0, 1, 0, 0]);
    }
    assert_eq!(
        test.run(&nexus, &[0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0], &[], 16).good(),
        [0xda, 0, 0, 0]
    );
    assert_eq!(test.run(&nexus, &[0x37, 0, 0x1d, 0, 0, 0, 0, 0, 32, 0], &[], 32).good(), [0, 0x1d, 0, 0]);
    test.disk.log.clear();
    test.run(&nexus, &[0x1b, 0, 0, 0, 0, 0], &[], 0).good();
    assert_eq!(test.disk.log, [(Op::Flush, RequestFlags::NONE)]);
    for bits in [0x02, 0x10] {
        let reply = test.run(&nexus, &[0x1b, 0, 0, 0, bits, 0], &[], 0);
        assert_eq!(reply.additional(), Some(AdditionalSense::INVALID_FIELD_IN_CDB));
    }
}

/// A CDB; bytes of its data-in and data-out, and whether the latter has to be there as a whole; and its start.
type DataCase<'a> = (&'a [u8], u32, u32, bool, &'a [u8]);

/// Every byte that the initiator expects is transferred or counted, and so is every byte that a command has beyond that.
#[test]
fn residuals_count_every_byte_of_either_direction() {
    let unmap = [0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 0];
    let select = [0, 0, 0, 0, 8, 18, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let cases: [DataCase<'_>; 15] = [
        (&[0; 6], 0, 0, false, &[]),
        (&[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], 0, 0, false, &[]),
        (&[0x34, 0, 0, 0, 0, 0, 0, 0, 9, 0], 0, 0, false, &[]),
        (&[0x2f, 0, 0, 0, 0, 3, 0, 0, 9, 0], 0, 0, false, &[]),
        (&[0x12, 0, 0, 0, 96, 0], 96, 0, false, &[]),
        (&[0x12, 1, 0x83, 0, 20, 0], 20, 0, false, &[]),
        (&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], 8, 0, false, &[]),
        (&[0x03, 0, 0, 0, 252, 0], 18, 0, false, &[]),
        (&[0x28, 0, 0, 0, 0, 3, 0, 0, 3, 0], 1536, 0, false, &[]),
        (&[0x28, 0, 0, 0, 0, 3, 0, 0, 0, 0], 0, 0, false, &[]),
        (&[0x2a, 0, 0, 0, 0, 3, 0, 0, 3, 0], 0, 1536, false, &[]),
        (&[0x2e, 2, 0, 0, 0, 3, 0, 0, 3, 0], 0, 1536, false, &[]),
        (&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], 0, 24, true, &unmap),
        (&[0x15, 0x10, 0, 0, 24, 0], 0, 24, true, &select),
        (&[0x41, 0, 0, 0, 0, 3, 0, 0, 9, 0], 0, 512, true, &[]),
    ];
    let mut test = TestUnit::new(config(512, 64));
    let nexus = test.nexus(1);
    for (cdb, has_in, has_out, is_whole, list) in cases {
        for expected in
            [0, 1, 7, 8, 17, 18, 19, 20, 23, 24, 25, 95, 96, 97, 511, 512, 513, 1535, 1536, 1537, 9000]
        {
            for is_out in [false, true] {
                let (room, have) = if is_out { (0, expected) } else { (expected, 0) };
                let mut data = list.to_vec();
                data.resize(have as usize, 0);
                let reply = test.run(&nexus, cdb, &data, room);
                let what = format!("{cdb:x?}: {room} in, {have} out");
                let is_refused = is_whole && (if cdb[0] == 0x41 { have != has_out } else { have < has_out });
                assert_eq!(reply.sense.is_some(), is_refused, "{what}: {reply:?}");
                let received = if is_refused { 0 } else { has_in.min(room) };
                assert_eq!(reply.data.len() as u32, received, "{what}");
                // What is refused before its data is received has transferred none of it. Data of the other direction
                // than the initiator's is beyond what it expects, as a whole.
                let residual = match (has_in, has_out) {
                    _ if is_refused => Residual::of(0, expected),
                    (0, 0) => Residual::of(0, expected),
                    (0, out) => Residual::of(out.into(), have),
                    (data_in, _) => Residual::of(data_in.into(), room),
                };
                assert_eq!(reply.residual, residual, "{what}");
                while nexus.take_attention().is_some() {}
            }
        }
    }
}
