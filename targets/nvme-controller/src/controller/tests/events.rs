//! Asynchronous events and what causes them.

use super::*;
use crate::NamespaceTable;

fn with_namespace(blocks: u64) -> Arc<Subsystem> {
    let mut next = subsystem();
    next.namespaces.push(SubsystemNamespace::new(5, blocks));
    Arc::new(next)
}

#[test]
fn namespace_event_is_masked_until_the_log_is_read() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    status(
        &mut harness,
        set_feature(FeatureId::AsyncEventConfiguration, AsyncEventConfiguration::NAMESPACE.bits()),
    );
    let changed = GetLogPage { retain_event: true, ..log(LogId::ChangedNamespaces, 4096) };
    let read_retain = log_sqe(changed, NSID_ALL);
    let read = log_sqe(GetLogPage { retain_event: false, ..changed }, NSID_ALL);
    let list = |page: [u8; 4096]| NamespaceList::decode(&page).unwrap().0;

    // A change without an outstanding request completes the next request.
    harness.deliver(ControllerEvent::SubsystemChanged(with_namespace(8)));
    assert!(harness.completed.is_empty());
    let first = harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]).unwrap();
    assert_eq!(AsyncEvent::from_result(first.cqe.result), Some(AsyncEvent::NAMESPACE_CHANGED));

    // Until the log is read without RAE, another change raises no event but is in the log.
    assert_eq!(harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]), None);
    let mut without = subsystem();
    without.namespaces.remove(0);
    harness.deliver(ControllerEvent::SubsystemChanged(Arc::new(without)));
    assert_eq!(list(page(&mut harness, read_retain)), [1, 5]);
    assert_eq!(list(page(&mut harness, read_retain)), [1, 5]);
    assert_eq!(harness.pending.len(), 1);
    assert_eq!(list(page(&mut harness, read)), [1, 5]);
    assert!(list(page(&mut harness, read)).is_empty());
    assert_eq!(harness.pending.len(), 1, "reading raises no event");

    // The next change, a resize, raises an event again.
    let unread = Sqe { data: DataPointer::transport(4092), ..read };
    harness.deliver(ControllerEvent::SubsystemChanged(with_namespace(8)));
    harness.deliver(ControllerEvent::SubsystemChanged(with_namespace(16)));
    assert_eq!(harness.pending.len(), 0);
    // A failed read does not clear the log.
    assert_eq!(status(&mut harness, unread), Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
    assert_eq!(list(page(&mut harness, read_retain)), [1, 5]);
    // An identical snapshot raises no event.
    page(&mut harness, read);
    assert_eq!(harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]), None);
    harness.deliver(ControllerEvent::SubsystemChanged(with_namespace(16)));
    assert_eq!(harness.pending.len(), 1);
}

#[test]
fn changed_namespace_list_overflow_reports_all_namespaces() {
    let mut many = subsystem();
    many.namespaces_max = 4096;
    let mut harness = Harness::with_subsystem(many.clone(), 0);
    harness.enable();
    many.namespaces = (1..=1026).map(|nsid| SubsystemNamespace::new(nsid, 8)).collect();
    harness.deliver(ControllerEvent::SubsystemChanged(Arc::new(many)));
    let list = page(&mut harness, log_sqe(log(LogId::ChangedNamespaces, 4096), 0));
    assert_eq!(NamespaceList::decode(&list).unwrap().0, [NSID_ALL]);
    let active = NamespaceList::decode(&page(&mut harness, identify(Cns::ActiveNamespaces, 0))).unwrap();
    assert_eq!((active.0.len(), active.0[1023]), (1024, 1024));
}

#[test]
fn temperature_threshold_raises_event_and_warning() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let warning = |harness: &mut Harness| {
        let health = log_sqe(log(LogId::Health, 512), NSID_ALL);
        HealthLog::decode(data(harness, health).as_slice().try_into().unwrap()).critical_warning
    };
    let set = |harness: &mut Harness, under: bool, kelvins: u16| {
        let threshold = u32::from(under) << 20 | u32::from(kelvins);
        assert_eq!(status(harness, set_feature(FeatureId::TemperatureThreshold, threshold)), Status::SUCCESS);
    };
    assert_eq!(harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]), None);
    // The temperature is 293 K. The event is disabled.
    set(&mut harness, false, 293);
    assert_eq!((harness.pending.len(), warning(&mut harness)), (1, 2));
    let wanted = AsyncEventConfiguration::TEMPERATURE.bits();
    assert_eq!(
        status(&mut harness, set_feature(FeatureId::AsyncEventConfiguration, wanted)),
        Status::SUCCESS
    );
    for (under, beyond, within) in [(false, 200, 294), (true, 293, 292)] {
        set(&mut harness, under, within);
        assert_eq!((harness.pending.len(), warning(&mut harness)), (1, 0));
        set(&mut harness, under, beyond);
        assert_eq!(harness.pending.len(), 0);
        let reported = harness.completed.last().map(|cqe| cqe.result);
        assert_eq!(reported, Some(0x02_01_01));
        // Reading the page clears the event until a threshold is set again.
        assert_eq!(warning(&mut harness), 2);
        assert_eq!(harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]), None);
        assert_eq!(harness.pending.len(), 1);
        set(&mut harness, under, within);
    }
}

#[test]
fn event_requests_are_limited_and_abortable() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    for _ in 0..4 {
        assert_eq!(harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]), None);
    }
    let fifth = harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]).unwrap();
    assert_eq!(fifth.cqe.status, Status::ASYNC_EVENT_LIMIT_EXCEEDED.do_not_retry());
    let cid = *harness.pending.first().unwrap();
    assert_eq!(result(&mut harness, Abort { sqid: 0, cid }.to_sqe()), 0, "aborted");
    assert_eq!(
        harness.completed.last().map(|cqe| (cqe.cid, cqe.status)),
        Some((cid, Status::ABORT_REQUESTED))
    );
    assert_eq!(result(&mut harness, Abort { sqid: 0, cid }.to_sqe()), 1, "no longer outstanding");
    assert_eq!(result(&mut harness, Abort { sqid: 3, cid: 9 }.to_sqe()), 1, "not on the admin queue");
    assert_eq!(harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]), None);
}

#[test]
fn ana_states_are_reported_per_port() {
    let mut reporting = subsystem();
    reporting.ana_reporting = true;
    reporting.listeners = vec![
        SubsystemListener { portid: 1, ana: vec![(2, AnaState::Inaccessible)] },
        SubsystemListener::default(),
    ];
    let mut harness = Harness::with_subsystem(reporting.clone(), 0);
    harness.enable();
    let controller = IdentifyController::decode(&page(&mut harness, identify(Cns::Controller, 0))).unwrap();
    assert!(controller.cmic & cmic::ANA != 0 && controller.oaes & oaes::ANA != 0);
    assert_eq!((controller.anagrpmax, controller.nanagrpid), (32, 32));
    let namespace = IdentifyNamespace::decode(&page(&mut harness, identify(Cns::Namespace, 3))).unwrap();
    assert_eq!(namespace.anagrpid, 2);

    let read = log_sqe(log(LogId::Ana, 4096), 0);
    let group = |id, change_count, state, nsids| AnaGroup { id, change_count, state, nsids };
    let expected =
        vec![group(1, 0, AnaState::Optimized, vec![1]), group(2, 0, AnaState::Inaccessible, vec![3])];
    assert_eq!(AnaLog::decode(&page(&mut harness, read)), Ok(AnaLog { change_count: 0, groups: expected }));
    let groups_only = log_sqe(GetLogPage { specific: AnaLog::GROUPS_ONLY, ..log(LogId::Ana, 4096) }, 0);
    let groups = AnaLog::decode(&page(&mut harness, groups_only)).unwrap().groups;
    assert!(groups.len() == 2 && groups.iter().all(|group| group.nsids.is_empty()));

    status(
        &mut harness,
        set_feature(FeatureId::AsyncEventConfiguration, AsyncEventConfiguration::ANA.bits()),
    );
    assert_eq!(harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]), None);
    // A change on another port raises no event.
    reporting.listeners[1].ana.push((1, AnaState::Inaccessible));
    harness.deliver(ControllerEvent::SubsystemChanged(Arc::new(reporting.clone())));
    assert_eq!(harness.completed, []);
    reporting.listeners[0].ana.clear();
    harness.deliver(ControllerEvent::SubsystemChanged(Arc::new(reporting)));
    assert_eq!(harness.completed.last().map(|cqe| cqe.result), Some(AsyncEvent::ANA_CHANGED.to_result()));
    assert_eq!(AnaLog::decode(&page(&mut harness, read)).unwrap().change_count, 1);
}

/// The subsystem of the harness, of which namespace 3 is visible to these hosts only.
fn with_visibility(hosts: &[Nqn]) -> Arc<Subsystem> {
    let mut next = subsystem();
    next.namespaces[1].visible_hosts = Some(hosts.iter().cloned().collect());
    Arc::new(next)
}

#[test]
fn a_namespace_appears_for_a_host_when_it_is_made_visible_to_it() {
    let other: Nqn = "nqn.2014-08.org.nvmexpress:uuid:5c9a2f60-1111-4d5f-9d0b-7d3a1f7d2c11".parse().unwrap();
    let mut harness =
        Harness::with_subsystem(Subsystem::clone(&with_visibility(std::slice::from_ref(&other))), 0);
    assert_eq!(set_cc(&mut harness, LINUX_CC), Status::SUCCESS);
    let enable = set_feature(FeatureId::AsyncEventConfiguration, AsyncEventConfiguration::NAMESPACE.bits());
    status(&mut harness, enable);
    let list =
        |harness: &mut Harness, cns| NamespaceList::decode(&page(harness, identify(cns, 0))).unwrap().0;
    let changed = |harness: &mut Harness| {
        NamespaceList::decode(&page(harness, log_sqe(log(LogId::ChangedNamespaces, 4096), NSID_ALL)))
            .unwrap()
            .0
    };
    let descriptors = identify(Cns::NamespaceDescriptors, 3);
    assert_eq!(list(&mut harness, Cns::ActiveNamespaces), [1]);
    assert_eq!(page(&mut harness, identify(Cns::Namespace, 3)), [0; 4096], "as an inactive one");
    assert_eq!(status(&mut harness, descriptors), Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());

    // It becomes visible to one more host, which is no change for this one; then to this one.
    harness.deliver(ControllerEvent::SubsystemChanged(with_visibility(&[])));
    assert_eq!(harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]), None);
    harness.deliver(ControllerEvent::SubsystemChanged(with_visibility(&[other.clone(), host()])));
    let event = harness.completed.last().map(|cqe| cqe.result);
    assert_eq!(event, Some(AsyncEvent::NAMESPACE_CHANGED.to_result()));
    assert_eq!(changed(&mut harness), [3]);
    assert_eq!(list(&mut harness, Cns::ActiveNamespaces), [1, 3]);
    assert_ne!(page(&mut harness, identify(Cns::Namespace, 3)), [0; 4096]);
    let controllers = page(&mut harness, identify(Cns::NamespaceControllers, 3));
    assert_eq!(ControllerList::decode(&controllers).unwrap().0.len(), 1);

    // The other host is removed, which is no change for this one.
    assert_eq!(harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]), None);
    let events = harness.completed.len();
    harness.deliver(ControllerEvent::SubsystemChanged(with_visibility(&[host()])));
    assert_eq!(harness.completed.len(), events);
    harness.deliver(ControllerEvent::SubsystemChanged(with_visibility(&[other])));
    assert_eq!(harness.completed.len(), events + 1);
    assert_eq!((changed(&mut harness), list(&mut harness, Cns::ActiveNamespaces)), (vec![3], vec![1]));
}

/// A command that a host sent to the namespace that was there must not reach the one that has taken its
/// identifier.
#[test]
fn a_namespace_that_replaced_another_is_served_when_the_host_has_identified_it() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let table = |harness: &Harness, subsystem: &Subsystem| {
        let association = harness.controller.association();
        NamespaceTable::for_controller(subsystem, 0, &harness.limits, &harness.directory, association)
    };
    let is_served = |table: &NamespaceTable| {
        let read = wire_nvme::io::ReadWrite { lba: 0, blocks: 1, ..Default::default() };
        let sqe = read.to_sqe(wire_nvme::opcode::NvmOpcode::Read);
        let data = DataPointer::transport(512);
        let planned = crate::io::plan(&Sqe { nsid: 1, flags: Sqe::FLAGS_SGL, data, ..sqe }, table);
        if let Err(status) = planned {
            assert_eq!(status, Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
        }
        planned.is_ok()
    };
    let first = subsystem();
    let mut replaced = subsystem();
    replaced.namespaces[0].uuid = uuid::Uuid::from_bytes([4; 16]);
    replaced.namespaces[0].backend = 12;
    // A host that has identified nothing has nothing to mistake.
    assert!(is_served(&table(&harness, &first)) && is_served(&table(&harness, &replaced)));
    page(&mut harness, identify(Cns::Namespace, 1));
    assert!(is_served(&table(&harness, &first)));
    // A core of an I/O queue may apply a change before that of the controller.
    let mut early = table(&harness, &replaced);
    assert!(!is_served(&early));
    page(&mut harness, identify(Cns::Namespace, 1));
    assert!(!early.is_identified(1), "the controller still reports the first one");
    harness.deliver(ControllerEvent::SubsystemChanged(Arc::new(replaced.clone())));
    // The descriptors alone do not have its format.
    page(&mut harness, identify(Cns::NamespaceDescriptors, 1));
    assert!(!early.is_identified(1) && !is_served(&table(&harness, &replaced)));
    page(&mut harness, identify(Cns::Namespace, 1));
    assert!(early.is_identified(1) && is_served(&table(&harness, &replaced)));
    early.open_replaced(1);
    assert!(is_served(&early));
    // A resize is no replacement; a format is.
    replaced.namespaces[0].blocks *= 2;
    assert!(is_served(&table(&harness, &replaced)));
    replaced.namespaces[0].block_size = 4096;
    assert!(!is_served(&table(&harness, &replaced)));
}
