use wire_scsi::{AdditionalSense, ScsiStatus, SenseFormat};

use crate::test_unit::{TestUnit, config};
use crate::{Command, NoPeers, Residual, Step, Task, TaskContext, no_waker};

/// A MODE SELECT(6) of a page.
fn select(page: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let list = [&[0; 4], page].concat();
    (vec![0x15, 0x10, 0, 0, list.len() as u8, 0], list)
}

const CONTROL_SENSE: [u8; 6] = [0x1a, 8, 0x0a, 0, 255, 0];

#[test]
fn software_write_protection_is_set_and_seen_by_others() {
    let mut test = TestUnit::new(config(512, 8));
    let (one, other) = (test.nexus(1), test.nexus(2));
    let mut page = test.run(&one, &CONTROL_SENSE, &[], 255).good()[4..].to_vec();
    page[4] |= 0x08;
    let (cdb, list) = select(&page);
    let reply = test.run(&one, &cdb, &list, 0);
    assert_eq!((reply.status, reply.residual), (ScsiStatus::Good, Residual::None));
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let reply = test.run(&other, &write, &[0; 512], 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::MODE_PARAMETERS_CHANGED));
    for nexus in [&one, &other] {
        let reply = test.run(nexus, &write, &[0; 512], 0);
        assert_eq!(reply.additional(), Some(AdditionalSense::SOFTWARE_WRITE_PROTECTED));
    }
    let sense = test.run(&one, &CONTROL_SENSE, &[], 255).good();
    assert_eq!((sense[2] & 0x80, sense[8]), (0x80, 0x08));
    page[4] = 0;
    let (cdb, list) = select(&page);
    test.run(&one, &cdb, &list, 0).good();
    test.run(&one, &write, &[0; 512], 0).good();
}

#[test]
fn the_cache_is_switched_off_and_writes_reach_the_medium() {
    let mut test = TestUnit::new(config(512, 8));
    let nexus = test.nexus(1);
    let page = test.run(&nexus, &[0x5a, 8, 0x08, 0, 0, 0, 0, 1, 0, 0], &[], 255).good()[8..].to_vec();
    assert_eq!(page[2], 0x04);
    let mut without = page.clone();
    without[2] = 0;
    let list = [&[0; 8], &without[..]].concat();
    test.run(&nexus, &[0x55, 0x10, 0, 0, 0, 0, 0, 0, list.len() as u8, 0], &list, 0).good();
    test.run(&nexus, &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[0; 512], 0).good();
    assert_eq!(test.disk.log.last().map(|(_, flags)| *flags), Some(block_io::RequestFlags::FUA));
    // Current, changeable, default.
    let values =
        [0x08u8, 0x48, 0x88].map(|page| test.run(&nexus, &[0x1a, 8, page, 0, 255, 0], &[], 255).good()[6]);
    assert_eq!(values, [0, 4, 4]);
    let reply = test.run(&nexus, &[0x1a, 8, 0xc8, 0, 255, 0], &[], 255);
    assert_eq!(reply.additional(), Some(AdditionalSense::SAVING_NOT_SUPPORTED));
}

#[test]
fn sense_data_has_the_format_that_d_sense_asks_for() {
    let mut test = TestUnit::new(config(512, 8));
    let nexus = test.nexus(1);
    let mut page = test.run(&nexus, &CONTROL_SENSE, &[], 255).good()[4..].to_vec();
    page[2] |= 0x04;
    let (cdb, list) = select(&page);
    test.run(&nexus, &cdb, &list, 0).good();
    let (waker, mut requests) = (no_waker(), Vec::new());
    let mut context =
        TaskContext { nexus: &nexus, luns: &[], waker: &waker, requests: &mut requests, peers: &mut NoPeers };
    let command = Command { cdb: &[0xc0; 6], ..Command::default() };
    let (_, Step::Done(response)) = Task::start(&command, &mut context) else { panic!() };
    assert_eq!(response.sense_format, SenseFormat::Descriptor);
    assert_eq!(response.sense_bytes()[..4], [0x72, 5, 0x20, 0]);
}

#[test]
fn pages_with_other_changes_are_rejected_as_a_whole() {
    let mut test = TestUnit::new(config(512, 8));
    let nexus = test.nexus(1);
    let page = test.run(&nexus, &CONTROL_SENSE, &[], 255).good()[4..].to_vec();
    let mut protect = page.clone();
    protect[4] |= 0x08;
    let mut other = page.clone();
    other[8] = 1;
    let unknown = [0x3e, 1, 0];
    for bad in [&other[..], &unknown, &page[..11]] {
        let (cdb, list) = select(&[&protect[..], bad].concat());
        let reply = test.run(&nexus, &cdb, &list, 0);
        assert!(reply.additional().is_some_and(|sense| matches!(sense.code, 0x26 | 0x1a)));
        assert!(!test.unit.settings().write_protect);
    }
    for bits in [0x00, 0x11] {
        let reply = test.run(&nexus, &[0x15, bits, 0, 0, 0, 0], &[], 0);
        assert_eq!(reply.additional(), Some(AdditionalSense::INVALID_FIELD_IN_CDB));
    }
    let fixed = bdev::BdevGeometry { write_cache: false, ..config(512, 8).geometry };
    let mut test = TestUnit::new(crate::UnitConfig { geometry: fixed, ..config(512, 8) });
    let nexus = test.nexus(1);
    let mut cache = test.run(&nexus, &[0x1a, 8, 0x08, 0, 255, 0], &[], 255).good()[4..].to_vec();
    cache[2] = 4;
    let (cdb, list) = select(&cache);
    let reply = test.run(&nexus, &cdb, &list, 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::INVALID_FIELD_IN_PARAMETER_LIST));
}
