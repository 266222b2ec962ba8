use block_io::Status;
use wire_scsi::ScsiStatus;

use super::*;
use crate::test_unit::{Reply, TestUnit, config, copy_target as target};
use crate::{UnitConfig, UnitNexus};

const BLOCK: usize = 512;

/// A unit of another device.
fn other_unit(block_bytes: u32) -> TestUnit {
    let uuid = bdev::Uuid::from_bytes(*b"another device..");
    TestUnit::new(UnitConfig { uuid, ..config(block_bytes, 2000) })
}

fn segment(source_lba: u64, destination_lba: u64, blocks: u16) -> CopySegment {
    CopySegment { source: 0, destination: 0, blocks, source_lba, destination_lba }
}

fn list(targets: &[[u8; TARGET_BYTES]], segments: &[[u8; SEGMENT_BYTES]]) -> Vec<u8> {
    let (targets, segments) = (targets.as_flattened(), segments.as_flattened());
    let mut list = vec![0; 16];
    list[2..4].copy_from_slice(&(targets.len() as u16).to_be_bytes());
    list[8..12].copy_from_slice(&(segments.len() as u32).to_be_bytes());
    [&list, targets, segments].concat()
}

fn copy(test: &mut TestUnit, nexus: &UnitNexus, list: &[u8]) -> Reply {
    let mut cdb = [0; 16];
    cdb[0] = 0x83;
    cdb[10..14].copy_from_slice(&(list.len() as u32).to_be_bytes());
    test.run(nexus, &cdb, list, 0)
}

#[test]
fn the_outcome_of_a_copy_is_kept_for_its_nexus() {
    let mut test = TestUnit::new(config(512, 64));
    let (nexus, other) = (test.nexus(1), test.nexus(2));
    let own = target(&test.unit);
    let mut two = list(&[own], &[segment(0, 10, 2), segment(11, 60, 2)].map(|one| one.encode()));
    two[0] = 9;
    let status_of = |test: &mut TestUnit, nexus: &UnitNexus, identifier: u8| {
        test.run(nexus, &[0x84, 0, identifier, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256)
    };
    copy(&mut test, &nexus, &two).good();
    assert_eq!(status_of(&mut test, &nexus, 9).good(), [0, 0, 0, 8, 1, 0, 2, 0, 0, 0, 8, 0]);
    for reply in [status_of(&mut test, &nexus, 8), status_of(&mut test, &other, 9)] {
        assert_eq!(reply.additional(), Some(AdditionalSense::INVALID_FIELD_IN_CDB));
    }
    test.disk.failures.extend([Status::SUCCESS, Status::INTERNAL_ERROR]);
    assert!(copy(&mut test, &nexus, &two).additional().is_some());
    assert_eq!(status_of(&mut test, &nexus, 9).good(), [0, 0, 0, 8, 2, 0, 1, 0, 0, 0, 4, 0]);
    // No list identifier: there is nothing to ask for afterwards.
    two[1] = 0x18;
    copy(&mut test, &nexus, &two).good();
    assert!(status_of(&mut test, &nexus, 9).additional().is_some());
}

#[test]
fn segments_are_copied_in_order_within_the_unit() {
    let mut test = TestUnit::new(config(512, 64));
    let nexus = test.nexus(1);
    test.disk.bytes[..2 * BLOCK].fill(1);
    let own = target(&test.unit);
    let segments = [segment(0, 10, 2), segment(5, 5, 0), segment(11, 62, 2)].map(|one| one.encode());
    copy(&mut test, &nexus, &list(&[own], &segments)).good();
    assert_eq!(test.disk.bytes[10 * BLOCK..12 * BLOCK], [1; 2 * BLOCK]);
    assert_eq!(test.disk.bytes[62 * BLOCK..], [[1; BLOCK], [0; BLOCK]].concat());
    copy(&mut test, &nexus, &[]).good();
    // Every identifier of the device identification page names the unit.
    let page = test.run(&nexus, &[0x12, 1, 0x83, 1, 0, 0], &[], 256).good();
    let mut rest = &page[4..];
    let mut count = 0;
    while !rest.is_empty() {
        let (descriptor, following) = rest.split_at(4 + usize::from(rest[3]));
        rest = following;
        if descriptor[1] & 0x30 == 0 {
            let mut target = [0; TARGET_BYTES];
            target[0] = TARGET_IDENTIFICATION;
            let length = descriptor.len().min(24);
            target[4..4 + length].copy_from_slice(&descriptor[..length]);
            copy(&mut test, &nexus, &list(&[target], &[segment(0, 1, 1).encode()])).good();
            count += 1;
        }
    }
    assert_eq!(count, 3);
    test.disk.failure = Some(Status::WRITE_FAULT);
    let reply = copy(&mut test, &nexus, &list(&[own], &[segment(0, 1, 1).encode()]));
    assert_eq!(reply.additional(), Some(AdditionalSense::WRITE_FAULT));
}

#[test]
fn lists_that_cannot_be_executed_copy_nothing() {
    let mut test = TestUnit::new(config(512, 64));
    let nexus = test.nexus(1);
    let own = target(&test.unit);
    let good = segment(0, 1, 1).encode();
    let mut fibre = own;
    fibre[0] = 0xe0;
    let mut other = own;
    other[12] ^= 1;
    let mut stream = good;
    stream[0] = 3;
    let elsewhere = CopySegment { destination: 1, ..segment(0, 1, 1) }.encode();
    let whole = list(&[own], &[good]);
    let cases = [
        (list(&[fibre], &[good]), AdditionalSense::UNSUPPORTED_TARGET_DESCRIPTOR),
        (list(&[own], &[good, stream]), AdditionalSense::UNSUPPORTED_SEGMENT_DESCRIPTOR),
        (list(&[own; 17], &[good]), AdditionalSense::TOO_MANY_TARGET_DESCRIPTORS),
        (list(&[own], &[good; 17]), AdditionalSense::TOO_MANY_SEGMENT_DESCRIPTORS),
        (list(&[own; 17], &[good; 20]), AdditionalSense::PARAMETER_LIST_LENGTH_ERROR),
        (whole[..whole.len() - 1].to_vec(), AdditionalSense::PARAMETER_LIST_LENGTH_ERROR),
        (list(&[own], &[good, elsewhere]), AdditionalSense::COPY_TARGET_UNREACHABLE),
        (list(&[other], &[good]), AdditionalSense::COPY_TARGET_UNREACHABLE),
        (list(&[own], &[good, segment(0, 63, 2).encode()]), AdditionalSense::NONE),
        (list(&[own], &[segment(u64::MAX, 0, 2).encode()]), AdditionalSense::NONE),
    ];
    for (list, additional) in cases {
        assert_eq!(copy(&mut test, &nexus, &list).additional(), Some(additional));
    }
    assert!(test.disk.log.is_empty());
    let limits = test.run(&nexus, &[0x84, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256).good();
    assert_eq!(limits[8..20], [0, 16, 0, 16, 0, 0, 4, 0, 1, 0xff, 0xfe, 0]);
    let status = test.run(&nexus, &[0x84, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256);
    assert_eq!(status.additional(), Some(AdditionalSense::INVALID_FIELD_IN_CDB));
    let mut test = TestUnit::new(UnitConfig { read_only: true, ..config(512, 64) });
    let nexus = test.nexus(1);
    let reply = copy(&mut test, &nexus, &whole);
    assert_eq!(
        (reply.status, reply.additional()),
        (ScsiStatus::CheckCondition, Some(AdditionalSense::WRITE_PROTECTED))
    );
}

/// From the first target to the second, or back.
fn between(source: u16, source_lba: u64, destination_lba: u64, blocks: u16) -> [u8; SEGMENT_BYTES] {
    CopySegment { source, destination: 1 - source, blocks, source_lba, destination_lba }.encode()
}

#[test]
fn segments_are_copied_between_units_of_a_session() {
    let mut test = TestUnit::new(config(512, 2000));
    let nexus = test.nexus(1);
    let other = other_unit(512);
    let targets = [target(&test.unit), target(&other.unit)];
    test.add_peer(other);
    let pattern: Vec<u8> = (0..1500 * BLOCK).map(|at| (at / 7) as u8).collect();
    test.disk.bytes[..pattern.len()].copy_from_slice(&pattern);
    // More than the memory of a piece, there and back, within the other unit, and an empty one.
    let within = CopySegment { source: 1, destination: 1, blocks: 5, source_lba: 100, destination_lba: 1990 };
    let mut whole = list(
        &targets,
        &[between(0, 0, 100, 1500), between(1, 100, 1600, 3), within.encode(), between(1, 0, 0, 0)],
    );
    whole[0] = 7;
    copy(&mut test, &nexus, &whole).good();
    let peer = &test.peers.peers[0].disk.bytes;
    assert!(peer[100 * BLOCK..1600 * BLOCK] == pattern && peer[..100 * BLOCK] == vec![0; 100 * BLOCK]);
    assert_eq!(peer[1990 * BLOCK..1995 * BLOCK], pattern[..5 * BLOCK]);
    assert_eq!(test.disk.bytes[1600 * BLOCK..1603 * BLOCK], pattern[..3 * BLOCK]);
    let status = test.run(&nexus, &[0x84, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256).good();
    let bytes = (1508 * BLOCK as u32).to_be_bytes();
    assert_eq!(status, [&[0, 0, 0, 8, 1, 0, 3, 0][..], &bytes].concat());
}

#[test]
fn a_descriptor_that_names_several_units_names_none() {
    // Equal in the part of the serial number that a descriptor has room for.
    let counted = |number: u128| {
        let uuid = bdev::Uuid::from_u128(7 << 80 | number);
        TestUnit::new(UnitConfig { uuid, ..config(512, 64) })
    };
    let mut test = counted(0);
    let nexus = test.nexus(1);
    let other = counted(1);
    let by_naa = [target(&test.unit), target(&other.unit)];
    let serial = crate::identity::serial(&test.unit);
    let mut by_t10 = [0; TARGET_BYTES];
    by_t10[..4].copy_from_slice(&by_naa[0][..4]);
    by_t10[4..8].copy_from_slice(&[2, 1, 0, 20]);
    by_t10[8..28].copy_from_slice(format!("RINGBOLT{}", &serial[..12]).as_bytes());
    let one = list(&[by_t10], &[segment(0, 1, 1).encode()]);
    copy(&mut test, &nexus, &one).good();
    test.add_peer(other);
    assert_eq!(copy(&mut test, &nexus, &one).additional(), Some(AdditionalSense::COPY_TARGET_UNREACHABLE));
    test.disk.bytes[..BLOCK].fill(7);
    copy(&mut test, &nexus, &list(&by_naa, &[between(0, 0, 1, 1)])).good();
    assert_eq!(test.peers.peers[0].disk.bytes[BLOCK..2 * BLOCK], [7; BLOCK]);
}

#[test]
fn a_unit_that_may_not_be_copied_from_or_to_is_not() {
    let mut test = TestUnit::new(config(512, 2000));
    let nexus = test.nexus(1);
    let other = other_unit(512);
    let (targets, unit) = ([target(&test.unit), target(&other.unit)], other.unit.clone());
    let (read, write) = (list(&targets, &[between(1, 0, 0, 1)]), list(&targets, &[between(0, 0, 0, 1)]));
    let unreachable = Some(AdditionalSense::COPY_TARGET_UNREACHABLE);
    assert_eq!(copy(&mut test, &nexus, &read).additional(), unreachable, "it is not in the session");
    test.add_peer(other);
    copy(&mut test, &nexus, &read).good();
    let failed = |reply: Reply| {
        assert_eq!(reply.sense.unwrap().key, SenseKey::CopyAborted);
        assert_eq!(reply.additional(), Some(AdditionalSense::THIRD_PARTY_DEVICE_FAILURE));
    };
    unit.apply_settings(wire_scsi::mode::ModeSettings { write_protect: true, ..unit.settings() });
    failed(copy(&mut test, &nexus, &write));
    copy(&mut test, &nexus, &read).good();
    unit.apply_settings(unit.default_settings());
    let holder = crate::test_unit::nexus(&unit, 9);
    assert!(unit.reserve(&holder));
    failed(copy(&mut test, &nexus, &write));
    failed(copy(&mut test, &nexus, &read));
    unit.release(&holder);
    // An error of its device.
    test.peers.peers[0].disk.failure = Some(Status::WRITE_FAULT);
    let mut named = write.clone();
    named[0] = 3;
    failed(copy(&mut test, &nexus, &named));
    let status = test.run(&nexus, &[0x84, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256).good();
    assert_eq!(status, [0, 0, 0, 8, 2, 0, 0, 0, 0, 0, 0, 0]);
    let beyond = copy(&mut test, &nexus, &list(&targets, &[between(0, 0, 1999, 2)]));
    assert_eq!(beyond.sense.unwrap().key, SenseKey::CopyAborted);
    // Blocks of another length.
    let mut test = TestUnit::new(config(512, 64));
    let nexus = test.nexus(1);
    let other = other_unit(4096);
    let targets = [target(&test.unit), target(&other.unit)];
    test.add_peer(other);
    let reply = copy(&mut test, &nexus, &list(&targets, &[between(0, 0, 0, 1)]));
    assert_eq!(reply.additional(), Some(AdditionalSense::INCORRECT_COPY_TARGET_TYPE));
}

#[test]
fn a_copy_that_is_aborted_has_failed() {
    let mut test = TestUnit::new(config(512, 64));
    let nexus = test.nexus(1);
    let mut list = list(&[target(&test.unit)], &[segment(0, 10, 2).encode()]);
    list[0] = 4;
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x83, list.len() as u8);
    let (waker, mut requests) = (crate::no_waker(), Vec::new());
    let mut context = crate::TaskContext {
        nexus: &nexus,
        luns: &[0],
        waker: &waker,
        requests: &mut requests,
        peers: &mut crate::NoPeers,
    };
    let command = crate::Command { cdb: &cdb, data_out_bytes: list.len() as u32, ..Default::default() };
    let (mut task, _) = crate::Task::start(&command, &mut context);
    let data = crate::TaskEvent::DataOut(test.sliced(&list));
    assert!(matches!(task.resume(data, &mut context), crate::Step::InFlight));
    let status = [0x84, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    assert_eq!(test.run(&nexus, &status, &[], 256).good()[4], 0, "in progress");
    let _ = task.resume(crate::TaskEvent::Abort, &mut context);
    assert_eq!(test.run(&nexus, &status, &[], 256).good()[4], 2);
}
