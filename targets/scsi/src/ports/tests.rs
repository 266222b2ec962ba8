use wire_scsi::ScsiStatus;

use super::*;
use crate::UnitNexus;
use crate::test_unit::{Reply, TestUnit, config};

const TARGET: &str = "iqn.test:disk";
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];

fn test_unit(tags: &[u16]) -> TestUnit {
    let test = TestUnit::new(config(512, 8));
    test.unit.set_ports(tags.iter().map(|tag| TargetPort::iscsi(TARGET, *tag)).collect());
    test
}

/// A nexus through a portal group.
fn nexus(test: &mut TestUnit, initiator: u64, tag: u16) -> Arc<UnitNexus> {
    let ports = NexusPorts::iscsi("iqn.test:host", initiator, TARGET, tag);
    let nexus = test.unit.attach(&ports).unwrap();
    test.run(&nexus, &[0; 6], &[], 0);
    nexus
}

fn set(test: &mut TestUnit, nexus: &UnitNexus, states: &[(u16, u8)]) -> Reply {
    let mut list = vec![0; 4];
    for (group, state) in states {
        let [high, low] = group.to_be_bytes();
        list.extend([*state, 0, high, low]);
    }
    test.run(nexus, &[0xa4, 0x0a, 0, 0, 0, 0, 0, 0, 0, list.len() as u8, 0, 0], &list, 0)
}

#[test]
fn initiators_see_and_set_the_states_of_groups() {
    let mut test = test_unit(&[1, 7]);
    let (one, two) = (nexus(&mut test, 1, 1), nexus(&mut test, 2, 7));
    let inquiry = test.run(&one, &[0x12, 0, 0, 0, 96, 0], &[], 96).good();
    assert_eq!(inquiry[5] >> 4 & 3, 3);
    let report = [0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    let expected = [0, 0xf, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0xf, 0, 7, 0, 0, 0, 1, 0, 0, 0, 7];
    assert_eq!(test.run(&one, &report, &[], 256).good()[4..], expected);
    set(&mut test, &one, &[(1, 1), (7, 2)]).good();
    // The initiator that has changed them knows.
    test.run(&one, &READ, &[], 512).good();
    let changed = Some(AdditionalSense::ASYMMETRIC_ACCESS_CHANGED);
    assert_eq!(test.run(&two, &[0; 6], &[], 0).additional(), changed);
    let standby = Some(AdditionalSense::TARGET_PORT_STANDBY);
    for cdb in [&READ[..], &[0; 6], &[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0]] {
        assert_eq!(test.run(&two, cdb, &[], 512).additional(), standby);
    }
    for cdb in [&report[..], &[0x12, 0, 0, 0, 96, 0], &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0]] {
        test.run(&two, cdb, &[], 256).good();
    }
    let reported = test.run(&two, &report, &[], 256).good();
    assert_eq!((reported[4], reported[9], reported[16], reported[21]), (1, 1, 2, 1));
    // The target changes a state on its own.
    assert!(
        test.unit.set_access(7, AccessState::Unavailable) && !test.unit.set_access(8, AccessState::Standby)
    );
    assert_eq!(test.run(&one, &[0; 6], &[], 0).additional(), changed);
    assert_eq!(test.run(&two, &[0; 6], &[], 0).additional(), changed);
    let unavailable = Some(AdditionalSense::TARGET_PORT_UNAVAILABLE);
    assert_eq!(test.run(&two, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 8).additional(), unavailable);
    set(&mut test, &two, &[(7, 0)]).good();
    test.run(&two, &READ, &[], 512).good();
    assert_eq!(test.run(&one, &[0; 6], &[], 0).additional(), changed);
    assert_eq!(test.run(&one, &report, &[], 256).good()[21], 1);
}

#[test]
fn lists_that_cannot_be_applied_change_nothing() {
    let mut test = test_unit(&[1, 7]);
    let one = nexus(&mut test, 1, 1);
    let invalid = Some(AdditionalSense::INVALID_FIELD_IN_PARAMETER_LIST);
    for states in [[(7, 2), (1, 4)], [(7, 2), (9, 0)], [(7, 2), (1, 0xf)]] {
        assert_eq!(set(&mut test, &one, &states).additional(), invalid);
    }
    let cut = test.run(&one, &[0xa4, 0x0a, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0], &[0; 7], 0);
    assert_eq!(cut.additional(), Some(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR));
    set(&mut test, &one, &[]).good();
    assert!(test.unit.ports().describe().iter().all(|group| group.state == AccessState::Optimized));
    // Without ports there are no groups.
    let mut test = test_unit(&[]);
    let one = nexus(&mut test, 1, 1);
    for reply in [
        set(&mut test, &one, &[(1, 0)]),
        test.run(&one, &[0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256),
    ] {
        assert_eq!(reply.additional(), Some(AdditionalSense::INVALID_COMMAND_OPERATION_CODE));
    }
    assert_eq!(test.run(&one, &[0x12, 0, 0, 0, 96, 0], &[], 96).good()[5] >> 4 & 3, 0);
}

#[test]
fn groups_that_remain_keep_their_state() {
    let mut test = test_unit(&[1, 2]);
    let one = nexus(&mut test, 1, 1);
    test.unit.set_access(1, AccessState::Standby);
    test.unit.set_ports([1, 3].map(|tag| TargetPort::iscsi(TARGET, tag)).to_vec());
    let states: Vec<_> = test.unit.ports().describe().iter().map(|one| (one.group, one.state)).collect();
    assert_eq!(states, [(1, AccessState::Standby), (3, AccessState::Optimized)]);
    assert_eq!(one.access(), AccessState::Standby);
    assert_eq!(test.run(&one, &[0; 6], &[], 0).status, ScsiStatus::CheckCondition);
}
