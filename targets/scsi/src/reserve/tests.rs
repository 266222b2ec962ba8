use proptest::prelude::*;
use reservations::{Registrant, ReservationState, Reservations};
use wire_scsi::reserve::ReserveOutList;
use wire_scsi::{AdditionalSense, ScsiStatus};

use super::*;
use crate::Residual;
use crate::test_unit::{Reply, TestUnit, config};

const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];

fn out(test: &mut TestUnit, nexus: &UnitNexus, action: u8, kind: u8, key: u64, action_key: u64) -> Reply {
    let list = ReserveOutList { key, action_key, ..ReserveOutList::default() };
    test.run(nexus, &[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], &list.encode(), 0)
}

fn data_in(test: &mut TestUnit, nexus: &UnitNexus, action: u8) -> Vec<u8> {
    test.run(nexus, &[0x5e, action, 0, 0, 0, 0, 0, 2, 0, 0], &[], 512).good()
}

#[test]
fn every_type_denies_what_spc_4_says() {
    // Type; what a registrant that is no holder may do, and what another may: read, write.
    let table = [
        (1, (true, false), (true, false)),
        (3, (false, false), (false, false)),
        (5, (true, true), (true, false)),
        (6, (true, true), (false, false)),
        (7, (true, true), (true, false)),
        (8, (true, true), (false, false)),
    ];
    for (kind, registrant, other) in table {
        let mut test = TestUnit::new(config(512, 8));
        let nexuses = [1, 2, 3].map(|initiator| test.nexus(initiator));
        assert_eq!(out(&mut test, &nexuses[0], 0, 0, 0, 0xa).status, ScsiStatus::Good);
        assert_eq!(out(&mut test, &nexuses[1], 6, 0, 0, 0xb).status, ScsiStatus::Good);
        assert_eq!(out(&mut test, &nexuses[0], 1, kind, 0xa, 0).status, ScsiStatus::Good);
        for (nexus, (reads, writes)) in nexuses.iter().zip([(true, true), registrant, other]) {
            let is_good = |reply: Reply| match reply.status {
                ScsiStatus::Good => true,
                status => {
                    assert_eq!(
                        (status, reply.residual),
                        (ScsiStatus::ReservationConflict, Residual::Underflow(512))
                    );
                    false
                }
            };
            assert_eq!(is_good(test.run(nexus, &READ, &[], 512)), reads, "{kind}");
            assert_eq!(is_good(test.run(nexus, &WRITE, &[0; 512], 0)), writes, "{kind}");
            test.run(nexus, &[0; 6], &[], 0).good();
        }
        let key = if kind >= 7 { 0 } else { 0xa };
        let held = data_in(&mut test, &nexuses[2], 1);
        assert_eq!((held[15], held[21], held.len()), (key, kind, 24));
        let status = data_in(&mut test, &nexuses[2], 3);
        let all_hold = u8::from(kind >= 7);
        assert_eq!((status[8 + 12], status[8 + 13]), (1, kind));
        let second = 8 + 24 + usize::from(status[8 + 23]);
        assert_eq!((status[second + 7], status[second + 12]), (0xb, all_hold));
    }
}

#[test]
fn losses_are_unit_attentions_of_the_nexuses_that_lost() {
    let mut test = TestUnit::new(config(512, 8));
    let (one, two, three) = (test.nexus(1), test.nexus(2), test.nexus(3));
    for (nexus, key) in [(&one, 1), (&two, 2), (&three, 3)] {
        out(&mut test, nexus, 0, 0, 0, key).good();
    }
    out(&mut test, &one, 1, 5, 1, 0).good();
    out(&mut test, &one, 2, 5, 1, 0).good();
    let released = Some(AdditionalSense::RESERVATIONS_RELEASED);
    assert_eq!(test.run(&two, &[0; 6], &[], 0).additional(), released);
    assert_eq!(test.run(&three, &[0; 6], &[], 0).additional(), released);
    out(&mut test, &one, 4, 1, 1, 2).good();
    assert_eq!(test.run(&two, &[0; 6], &[], 0).additional(), Some(AdditionalSense::REGISTRATIONS_PREEMPTED));
    out(&mut test, &one, 3, 0, 1, 0).good();
    assert_eq!(test.run(&three, &[0; 6], &[], 0).additional(), Some(AdditionalSense::RESERVATIONS_PREEMPTED));
    for nexus in [&one, &two, &three] {
        test.run(nexus, &[0; 6], &[], 0).good();
    }
    assert_eq!(data_in(&mut test, &one, 0), [0, 0, 0, 5, 0, 0, 0, 0]);
}

#[test]
fn errors_are_conflicts_or_name_the_field() {
    let mut test = TestUnit::new(config(512, 8));
    let (one, two) = (test.nexus(1), test.nexus(2));
    assert_eq!(out(&mut test, &one, 0, 0, 7, 1).status, ScsiStatus::ReservationConflict, "not registered");
    assert_eq!(out(&mut test, &one, 0, 0, 0, 0).status, ScsiStatus::Good);
    assert_eq!(out(&mut test, &one, 6, 0, 9, 0).status, ScsiStatus::Good);
    assert_eq!(data_in(&mut test, &one, 0), [0; 8]);
    out(&mut test, &one, 0, 0, 0, 1).good();
    assert_eq!(out(&mut test, &one, 0, 0, 2, 3).status, ScsiStatus::ReservationConflict, "another key");
    assert_eq!(out(&mut test, &two, 1, 1, 0, 0).status, ScsiStatus::ReservationConflict);
    out(&mut test, &one, 1, 1, 1, 0).good();
    assert_eq!(out(&mut test, &one, 2, 3, 1, 0).additional(), Some(AdditionalSense::INVALID_RELEASE));
    let invalid_list = Some(AdditionalSense::INVALID_FIELD_IN_PARAMETER_LIST);
    assert_eq!(out(&mut test, &one, 4, 1, 1, 0).additional(), invalid_list, "preempts no key");
    let list = ReserveOutList { key: 1, action_key: 2, persists: true, ..ReserveOutList::default() };
    let reply = test.run(&one, &[0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0], &list.encode(), 0);
    assert_eq!(reply.additional(), invalid_list, "there is no file for it");
    let invalid = Some(AdditionalSense::INVALID_FIELD_IN_CDB);
    assert_eq!(out(&mut test, &one, 1, 2, 1, 0).additional(), invalid, "no such type");
    assert_eq!(out(&mut test, &one, 1, 0x11, 1, 0).additional(), invalid, "no such scope");
    assert_eq!(out(&mut test, &one, 8, 1, 1, 0).additional(), invalid, "no such action");
    let reply = test.run(&one, &[0x5f, 0, 0, 0, 0, 0, 0, 0, 20, 0], &[0; 20], 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR));
    let reply = test.run(&one, &[0x5e, 4, 0, 0, 0, 0, 0, 2, 0, 0], &[], 512);
    assert_eq!(reply.additional(), invalid);
    assert_eq!(data_in(&mut test, &one, 2), [0, 8, 0x0c, 0x90, 0xea, 1, 0, 0]);
    let keys = test.run(&one, &[0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0], &[], 512);
    assert_eq!((keys.residual, keys.good()), (Residual::Underflow(504), vec![0, 0, 0, 1, 0, 0, 0, 8]));
}

#[test]
fn reserve_and_release_exclude_other_nexuses_until_reset_or_loss() {
    let mut test = TestUnit::new(config(512, 8));
    let (one, two) = (test.nexus(1), test.nexus(2));
    let (reserve, release) = ([0x16, 0, 0, 0, 0, 0], [0x17, 0, 0, 0, 0, 0]);
    let conflict = ScsiStatus::ReservationConflict;
    test.run(&one, &reserve, &[], 0).good();
    test.run(&one, &[0x56, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0).good();
    for cdb in [&reserve[..], &[0; 6], &READ] {
        assert_eq!(test.run(&two, cdb, &[], 0).status, conflict);
    }
    test.run(&two, &release, &[], 0).good();
    test.run(&two, &[0x12, 0, 0, 0, 36, 0], &[], 36).good();
    assert_eq!(test.run(&two, &[0; 6], &[], 0).status, conflict, "the release of another has no effect");
    assert_eq!(out(&mut test, &one, 0, 0, 0, 1).status, conflict, "both kinds exclude each other");
    test.run(&one, &[0x57, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0).good();
    test.run(&two, &reserve, &[], 0).good();
    drop(two);
    test.run(&one, &reserve, &[], 0).good();
    let two = test.unit.attach(one.ports()).unwrap();
    two.unit().manage(crate::UnitFunction::LogicalUnitReset, &two, crate::no_waker());
    for nexus in [&one, &two] {
        assert_eq!(test.run(nexus, &[0; 6], &[], 0).additional(), Some(AdditionalSense::BUS_DEVICE_RESET));
    }
    test.run(&two, &reserve, &[], 0).good();
    test.run(&two, &release, &[], 0).good();
    out(&mut test, &one, 0, 0, 0, 1).good();
    assert_eq!(test.run(&two, &reserve, &[], 0).status, conflict, "a registration excludes it");
}

#[test]
fn reserve_excludes_other_units_of_the_device_and_users_that_are_no_nexus() {
    let mut test = TestUnit::new(config(512, 8));
    let (one, two) = (test.nexus(1), test.nexus(2));
    let other = crate::LogicalUnit::new(config(512, 8), test.unit.reservations().clone());
    let elsewhere = other.attach(two.ports()).unwrap();
    let (reserve, release) = ([0x16, 0, 0, 0, 0, 0], [0x17, 0, 0, 0, 0, 0]);
    test.run(&elsewhere, &[0; 6], &[], 0);
    test.run(&one, &reserve, &[], 0).good();
    for cdb in [&READ[..], &reserve] {
        assert_eq!(test.run(&elsewhere, cdb, &[], 512).status, ScsiStatus::ReservationConflict);
    }
    test.run(&one, &READ, &[], 512).good();
    test.run(&one, &reserve, &[], 0).good();
    test.run(&one, &release, &[], 0).good();
    test.run(&elsewhere, &READ, &[], 512).good();
    // A unit that is reserved, and goes, excludes no initiator.
    test.run(&elsewhere, &reserve, &[], 0).good();
    assert_eq!(test.run(&one, &reserve, &[], 0).status, ScsiStatus::ReservationConflict);
    drop((elsewhere, other));
    test.run(&one, &reserve, &[], 0).good();
}

fn with_list(test: &mut TestUnit, nexus: &UnitNexus, action: u8, list: &[u8]) -> Reply {
    test.run(nexus, &[0x5f, action, 0, 0, 0, 0, 0, 0, list.len() as u8, 0], list, 0)
}

/// A list with SPEC_I_PT.
fn with_ports(key: u64, flags: ReserveOutList, ports: &[&str]) -> Vec<u8> {
    let ids: Vec<u8> = ports.iter().flat_map(|port| TransportId::IscsiPort(port).encode()).collect();
    let list = ReserveOutList { action_key: key, names_ports: true, ..flags };
    [&list.encode()[..], &(ids.len() as u32).to_be_bytes(), &ids].concat()
}

fn registrants(test: &TestUnit) -> Vec<(String, String, u64)> {
    let state = test.unit.reservations().state();
    let ports = |one: &reservations::Registration| {
        let (initiator, target) = one.registrant.scsi_ports().unwrap();
        (initiator.replace("iqn.test:", ""), target.replace("iqn.test:disk,t,", ""), one.key)
    };
    state.registrations.iter().map(ports).collect()
}

#[test]
fn a_registration_names_ports_or_is_for_all_target_ports() {
    let mut test = TestUnit::new(config(512, 8));
    test.unit.set_ports([1, 2].map(|tag| crate::TargetPort::iscsi("iqn.test:disk", tag)).to_vec());
    let (one, two) = (test.nexus(1), test.nexus(2));
    let plain = ReserveOutList::default();
    // The ISID is as its initiator writes it.
    let list = with_ports(5, plain, &["iqn.test:host,i,0x2", "iqn.test:third,i,0x00000000000A"]);
    with_list(&mut test, &one, 0, &list).good();
    let entry = |initiator: &str, target: &str, key| (initiator.to_string(), target.to_string(), key);
    let (first, second) = ("host,i,0x000000000001", "host,i,0x000000000002");
    let expected =
        [entry(first, "0x0001", 5), entry(second, "0x0001", 5), entry("third,i,0x00000000000a", "0x0001", 5)];
    assert_eq!(registrants(&test), expected);
    // Two is registered by it, and need not register.
    out(&mut test, &two, 1, 5, 5, 0).good();
    assert_eq!(test.unit.reservations().state().generation, 1);
    let invalid = Some(AdditionalSense::INVALID_FIELD_IN_PARAMETER_LIST);
    assert_eq!(with_list(&mut test, &one, 0, &list).additional(), invalid, "one is registered");
    out(&mut test, &two, 3, 0, 5, 0).good();
    while one.take_attention().is_some() {}
    let all = ReserveOutList { all_target_ports: true, ..plain };
    let register = ReserveOutList { action_key: 6, ..all };
    with_list(&mut test, &one, 0, &register.encode()).good();
    assert_eq!(registrants(&test), [entry(first, "0x0001", 6), entry(first, "0x0002", 6)]);
    let status = data_in(&mut test, &one, 3);
    let second_status = 8 + 24 + usize::from(status[8 + 23]);
    assert_eq!((status[8 + 19], status[second_status + 19]), (1, 2), "relative ports");
    let remove = ReserveOutList { key: 6, ..all };
    with_list(&mut test, &one, 0, &remove.encode()).good();
    assert_eq!(registrants(&test), []);
    with_list(&mut test, &one, 0, &with_ports(7, all, &["iqn.test:host,i,0x2"])).good();
    assert_eq!(registrants(&test).len(), 4);
}

#[test]
fn lists_of_ports_that_cannot_be_registered_register_none() {
    let mut test = TestUnit::new(config(512, 8));
    let (one, two) = (test.nexus(1), test.nexus(2));
    out(&mut test, &two, 0, 0, 0, 9).good();
    let plain = ReserveOutList::default();
    let good = with_ports(5, plain, &["iqn.test:third,i,0xa"]);
    let invalid = Some(AdditionalSense::INVALID_FIELD_IN_PARAMETER_LIST);
    let cut = Some(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR);
    let id = TransportId::IscsiDevice("iqn.test:third").encode();
    let device = [&good[..24], &(id.len() as u32).to_be_bytes(), &id].concat();
    let mut srp = good.clone();
    srp[28] = 4;
    let cases = [
        (0, device, invalid),
        (0, srp, invalid),
        (0, with_ports(5, plain, &["iqn.test:third,i,0xx"]), invalid),
        (0, with_ports(5, plain, &["iqn.test:third,i,0x1000000000000"]), invalid),
        (0, good[..good.len() - 1].to_vec(), cut),
        (0, good[..26].to_vec(), cut),
        (6, good.clone(), invalid),
    ];
    for (action, list, additional) in cases {
        assert_eq!(with_list(&mut test, &one, action, &list).additional(), additional);
    }
    // One of them has another key.
    let list = with_ports(5, plain, &["iqn.test:third,i,0xa", "iqn.test:host,i,0x2"]);
    assert_eq!(with_list(&mut test, &one, 0, &list).status, ScsiStatus::ReservationConflict);
    assert_eq!(registrants(&test).len(), 1);
}

#[test]
fn a_reservation_moves_to_a_nexus_that_is_registered_by_it() {
    let mut test = TestUnit::new(config(512, 8));
    test.unit.set_ports([1, 2].map(|tag| crate::TargetPort::iscsi("iqn.test:disk", tag)).to_vec());
    let (one, two) = (test.nexus(1), test.nexus(2));
    let list = |key, new_key, unregister, relative_port, port: &str| {
        let transport_id = TransportId::IscsiPort(port).encode();
        let list = ReserveMoveList {
            key,
            new_key,
            unregister,
            persists: false,
            relative_port,
            transport_id: &transport_id,
        };
        list.encode()
    };
    let to_two = list(1, 9, true, 1, "iqn.test:host,i,0x000000000002");
    let conflict = ScsiStatus::ReservationConflict;
    assert_eq!(with_list(&mut test, &one, 7, &to_two).status, conflict, "it is not registered");
    out(&mut test, &one, 0, 0, 0, 1).good();
    assert_eq!(with_list(&mut test, &one, 7, &to_two).status, conflict, "there is no reservation");
    out(&mut test, &one, 1, 1, 1, 0).good();
    let invalid = Some(AdditionalSense::INVALID_FIELD_IN_PARAMETER_LIST);
    for bad in [
        list(1, 0, true, 1, "iqn.test:host,i,0x2"),
        list(1, 9, true, 3, "iqn.test:host,i,0x2"),
        list(1, 9, true, 1, "iqn.test:host,i,0x1"),
    ] {
        assert_eq!(with_list(&mut test, &one, 7, &bad).additional(), invalid);
    }
    assert_eq!(with_list(&mut test, &one, 7, &list(2, 9, true, 1, "iqn.test:host,i,0x2")).status, conflict);
    with_list(&mut test, &one, 7, &to_two).good();
    assert_eq!(registrants(&test).len(), 1);
    test.run(&two, &WRITE, &[0; 512], 0).good();
    assert_eq!(test.run(&one, &WRITE, &[0; 512], 0).status, conflict);
    // Back, through the other port, without giving the registration up.
    with_list(&mut test, &two, 7, &list(9, 1, false, 2, "iqn.test:host,i,0x1")).good();
    assert_eq!(registrants(&test).len(), 2);
    assert_eq!(test.run(&two, &WRITE, &[0; 512], 0).status, conflict);
}

#[test]
fn registrants_have_transport_ids_of_their_own_protocol() {
    let mut test = TestUnit::new(config(512, 8));
    let one = test.nexus(1);
    let long = "a controller with a long name";
    for (name, key) in [("vm,i,0x1", 2), (long, 3)] {
        let machine = test.unit.attach(&NexusPorts::virtio(name, 0)).unwrap();
        test.run(&machine, &[0; 6], &[], 0);
        out(&mut test, &machine, 0, 0, 0, key).good();
        let list = with_ports(5, ReserveOutList::default(), &["iqn.test:third,i,0xa"]);
        assert!(with_list(&mut test, &machine, 0, &list).additional().is_some());
    }
    let status = data_in(&mut test, &one, 3);
    let ids: Vec<&[u8]> = vec![&status[8 + 24..8 + 48], &status[8 + 48 + 24..]];
    assert_eq!((ids[0][0], &ids[0][8..]), (4, &b"vm,i,0x1\0\0\0\0\0\0\0\0"[..]));
    assert_eq!((ids[1][0], &ids[1][8..16], ids[1].len()), (4, &b"a contro"[..], 24));
    assert_ne!(srp_identifier(long), srp_identifier("a controller with another name"));
}

/// SPC-4, section 5.13.11: what a nexus is told that loses a registration or a reservation.
fn attention_of(event: reservations::LossEvent) -> AdditionalSense {
    match event {
        reservations::LossEvent::RegistrationPreempted => AdditionalSense { code: 0x2a, qualifier: 5 },
        reservations::LossEvent::ReservationReleased => AdditionalSense { code: 0x2a, qualifier: 4 },
        reservations::LossEvent::ReservationPreempted => AdditionalSense { code: 0x2a, qualifier: 3 },
    }
}

/// READ KEYS and READ RESERVATION report the state.
fn check_reports(test: &mut TestUnit, nexus: &UnitNexus, state: &ReservationState) {
    let generation = state.generation.to_be_bytes();
    let keys: Vec<u8> = state.registrations.iter().flat_map(|one| one.key.to_be_bytes()).collect();
    let length = (keys.len() as u32).to_be_bytes();
    assert_eq!(data_in(test, nexus, 0), [&generation[..], &length, &keys].concat());
    let held = state.reservation.as_ref().map_or(Vec::new(), |held| {
        let is_shared = held.kind.is_all_registrants();
        let key = if is_shared { 0 } else { state.key_of(&held.holder).unwrap() };
        let kind = (1..9).find(|code| type_from_wire(*code) == Some(held.kind)).unwrap();
        [&key.to_be_bytes()[..], &[0, 0, 0, 0, 0, kind, 0, 0]].concat()
    });
    let length = (held.len() as u32).to_be_bytes();
    assert_eq!(data_in(test, nexus, 1), [&generation[..], &length, &held].concat());
}

proptest! {
    /// The unit's commands have the effects of the device's reservation state, which is its oracle.
    #[test]
    fn any_commands_of_several_nexuses_have_the_effects_of_the_state(
        commands in prop::collection::vec((0..3usize, 0..7u8, 0..9u8, 0..4u64, 0..4u64), 1..50),
    ) {
        let mut test = TestUnit::new(config(512, 8));
        let nexuses = [1, 2, 3].map(|initiator| test.nexus(initiator));
        let mut oracle = ReservationState::default();
        for (who, action, kind, key, action_key) in commands {
            let nexus = &nexuses[who];
            while nexus.take_attention().is_some() {}
            let registrant: &Registrant = nexus.registrant();
            let wire = type_from_wire(kind);
            let registered = oracle.key_of(registrant);
            let expected = match action {
                0 if registered.unwrap_or(0) != key => Err(ScsiStatus::ReservationConflict),
                0 | 6 if action_key == 0 && registered.is_none() => Ok(None),
                0 | 6 if action_key == 0 => {
                    Ok(Some(ReservationCommand::Unregister { expected: None, persist: None }))
                }
                0 | 6 => Ok(Some(ReservationCommand::Replace { expected: None, key: action_key, persist: None })),
                3 => Ok(Some(ReservationCommand::Clear { key })),
                _ => match (action, wire) {
                    (_, None) => Err(ScsiStatus::CheckCondition),
                    (1, Some(kind)) => Ok(Some(ReservationCommand::Acquire { key, kind })),
                    (2, Some(kind)) => Ok(Some(ReservationCommand::Release { key, kind })),
                    (_, Some(kind)) => {
                        Ok(Some(ReservationCommand::Preempt { key, victim: action_key, kind, abort: action == 5 }))
                    }
                },
            };
            let mut notices = Vec::new();
            let expected = expected.and_then(|command| match command {
                None => Ok(()),
                Some(command) => match oracle.apply(registrant, &command) {
                    Ok(effects) => {
                        notices = effects.notices;
                        Ok(())
                    }
                    Err(ReservationError::Conflict) => Err(ScsiStatus::ReservationConflict),
                    Err(_) => Err(ScsiStatus::CheckCondition),
                },
            });
            let reply = out(&mut test, nexus, action, kind, key, action_key);
            prop_assert_eq!(reply.status, expected.err().unwrap_or(ScsiStatus::Good));
            prop_assert_eq!(test.unit.reservations().state(), oracle.clone());
            for nexus in &nexuses {
                let attentions: Vec<_> = std::iter::from_fn(|| nexus.take_attention()).collect();
                let of_nexus = notices.iter().filter(|notice| notice.registrant == *nexus.registrant());
                let losses: Vec<_> = of_nexus.map(|notice| attention_of(notice.event)).collect();
                prop_assert_eq!(attentions, losses);
                let denied = oracle.denied(nexus.registrant());
                let reads = test.run(nexus, &READ, &[], 512).status == ScsiStatus::Good;
                let writes = test.run(nexus, &WRITE, &[0; 512], 0).status == ScsiStatus::Good;
                prop_assert_eq!(reads, denied & reservations::access::READ == 0);
                prop_assert_eq!(writes, denied & reservations::access::WRITE == 0);
            }
        }
        check_reports(&mut test, &nexuses[0], &oracle);
        let _: &Reservations = test.unit.reservations();
    }
}
