//! What the controller reports: Identify, log pages and features.

use super::*;

#[test]
fn identify_inactive_namespace_returns_zeroes() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    for cns in [Cns::Namespace, Cns::CommandSetNamespace, Cns::NamespaceIndependent, Cns::AllocatedNamespace]
    {
        assert_eq!(page(&mut harness, identify(cns, 2)), [0; 4096], "{cns:?}");
    }
}

/// Linux keeps what it read of the controller when it connected, for namespaces that are added later.
#[test]
fn hosts_that_connect_before_the_first_namespace_flush_and_deallocate() {
    let (mut empty, mut without_cache) = (subsystem(), subsystem());
    empty.namespaces.clear();
    without_cache.namespaces.iter_mut().for_each(|namespace| namespace.volatile_cache = false);
    for subsystem in [empty, without_cache] {
        let mut harness = Harness::with_subsystem(subsystem, 0);
        harness.enable();
        let identified = page(&mut harness, identify(Cns::Controller, 0));
        let controller = IdentifyController::decode(&identified).unwrap();
        assert!(controller.vwc & vwc::PRESENT != 0, "no flush would be sent");
        assert!(controller.oncs & oncs::DATASET_MANAGEMENT != 0, "no discard would be sent");
    }
}

/// A namespace with a guard of 64 bits looks like one with a guard of 16 bits to a host that does not read
/// CNS 05h.
#[test]
fn extended_formats_are_reported_and_refused_to_hosts_that_do_not_know_them() {
    use crate::NamespaceTable;
    use wire_nvme::io::ReadWrite;
    use wire_nvme::opcode::NvmOpcode;
    use wire_nvme::protection::{GuardFormat, MetadataFormat, Protection, ProtectionType};
    let protection = Protection::new(ProtectionType::Type1, false).with_guard(GuardFormat::Crc32);
    let mut subsystem = subsystem();
    let metadata = MetadataFormat { bytes: 16, extended: true, protection: Some(protection) };
    subsystem.namespaces = vec![SubsystemNamespace { metadata, ..SubsystemNamespace::new(1, 64) }];
    let mut harness = Harness::with_subsystem(subsystem.clone(), 0);
    harness.enable();
    let controller = IdentifyController::decode(&page(&mut harness, identify(Cns::Controller, 0))).unwrap();
    assert!(controller.ctratt & ctratt::EXTENDED_FORMATS != 0);
    let nvm = NvmNamespace::decode(&page(&mut harness, identify(Cns::CommandSetNamespace, 1)));
    assert_eq!(nvm.extended_formats[0], ExtendedLbaFormat { pif: 1, storage_tag_bits: 16 });
    assert_eq!(nvm.lbstm, 0xffff);
    let namespace = IdentifyNamespace::decode(&page(&mut harness, identify(Cns::Namespace, 1))).unwrap();
    assert_eq!(namespace.metadata_format(Some(&nvm)), Ok(metadata));

    let association = harness.controller.association();
    let table =
        NamespaceTable::for_controller(&subsystem, 0, &harness.limits, &harness.directory, association);
    let read = ReadWrite { blocks: 1, ..ReadWrite::default() }.to_sqe(NvmOpcode::Read);
    let read = Sqe { nsid: 1, data: DataPointer::transport(528), ..read };
    let refused = Err(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
    assert_eq!(crate::io::plan(&read, &table).map(drop), refused);
    let mut behavior = [0; 512];
    behavior[2] = 1;
    let set = set_feature(FeatureId::HostBehavior, 0);
    assert_eq!(harness.command(set, &behavior).unwrap().cqe.status, Status::SUCCESS);
    assert_eq!(crate::io::plan(&read, &table).map(drop), Ok(()));
    // A reset ends it.
    set_cc(&mut harness, 0);
    assert_eq!(crate::io::plan(&read, &table).map(drop), refused);
}

#[test]
fn namespace_lists_start_above_the_given_nsid() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    for cns in [Cns::ActiveNamespaces, Cns::CommandSetActiveNamespaces, Cns::AllocatedNamespaces] {
        for (after, expected) in
            [(0, vec![1, 3]), (1, vec![3]), (2, vec![3]), (3, vec![]), (NSID_ALL - 2, vec![])]
        {
            let list = NamespaceList::decode(&page(&mut harness, identify(cns, after))).unwrap();
            assert_eq!(list.0, expected, "{cns:?} after {after}");
        }
    }
    let controllers = ControllerList::decode(&page(&mut harness, identify(Cns::Controllers, 0))).unwrap();
    assert_eq!(controllers.0, [harness.controller.association().cntlid()]);
    let sets = CommandSetVectors::decode(&page(&mut harness, {
        let sqe =
            Identify { cns: Cns::CommandSets.to_wire(), cntid: 0xffff, ..Identify::default() }.to_sqe(0);
        Sqe { data: DataPointer::transport(4096), ..sqe }
    }));
    assert_eq!(sets.0, [CommandSetVectors::NVM]);
}

#[test]
fn log_pages_can_be_read_at_offsets() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let whole = data(&mut harness, log_sqe(log(LogId::CommandEffects, 4096), 0));
    let mut parts = Vec::new();
    for offset in (0..4096).step_by(512) {
        parts
            .extend(data(&mut harness, log_sqe(GetLogPage { offset, ..log(LogId::CommandEffects, 512) }, 0)));
    }
    assert_eq!(parts, whole);
    // Bytes beyond the end are zero.
    let beyond_end =
        data(&mut harness, log_sqe(GetLogPage { offset: 4092, ..log(LogId::CommandEffects, 8) }, 0));
    assert_eq!(beyond_end, [0; 8]);
    assert_eq!(data(&mut harness, log_sqe(log(LogId::FirmwareSlot, 1024), 0))[512..], [0; 512]);
}

#[test]
fn supported_log_pages_and_features_match_behavior() {
    let mut without_cache = subsystem();
    without_cache.namespaces.remove(0);
    for subsystem in [subsystem(), without_cache, Subsystem::discovery(Nqn::discovery())] {
        let mut harness = Harness::with_subsystem(subsystem, 0);
        harness.enable();
        let pages = data(&mut harness, log_sqe(log(LogId::SupportedLogPages, 1024), 0));
        let pages = SupportedLogPages::decode(pages.as_slice().try_into().unwrap());
        for lid in 0..=255u8 {
            let mut page = GetLogPage { lid, length_bytes: 512, ..GetLogPage::default() };
            if lid == LogId::PersistentEvents.to_wire() {
                page.specific = wire_nvme::log::persistent_event_action::ESTABLISH;
            }
            let answer = status(&mut harness, log_sqe(page, 0));
            assert_eq!(
                answer.is_success(),
                pages.0[usize::from(lid)].supported,
                "log page {lid:#x}: {answer}"
            );
        }
        let features = data(&mut harness, log_sqe(log(LogId::FeatureEffects, 1024), 0));
        let features = FeatureEffectsLog::decode(features.as_slice().try_into().unwrap());
        for fid in 0..=255u8 {
            for select in 0..4 {
                // Reservation features are namespace specific.
                let nsid = if matches!(fid, 0x82 | 0x83) { 3 } else { 0 };
                let get =
                    GetFeatures { fid, select, cdw11: u32::from(fid == 0x81), uuid_index: 0 }.to_sqe(nsid);
                let length = if fid == FeatureId::HostBehavior.to_wire() { 512 } else { 16 };
                let get = Sqe { data: DataPointer::transport(length), ..get };
                let answer = status(&mut harness, get);
                assert_eq!(
                    answer.is_success(),
                    features.0[usize::from(fid)].supported,
                    "feature {fid:#x}: {answer}"
                );
            }
        }
    }
}

#[test]
fn command_effects_log_matches_supported_commands() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let effects =
        CommandEffectsLog::decode(&page(&mut harness, log_sqe(log(LogId::CommandEffects, 4096), 0)));
    for opcode in (0..=255u8).filter(|&opcode| opcode != wire_nvme::opcode::FABRICS) {
        let unknown = Some(Status::INVALID_OPCODE.do_not_retry());
        let answer = harness.command(Sqe::new(opcode), &[]).map(|completion| completion.cqe.status);
        assert_eq!(
            answer == unknown,
            !effects.admin[usize::from(opcode)].supported,
            "admin command {opcode:#x}"
        );
    }
    let table = crate::NamespaceTable::new(&subsystem(), 1, &harness.limits);
    for opcode in (0..=255u8).filter(|&opcode| opcode != wire_nvme::opcode::FABRICS) {
        let answer = crate::io::plan(&Sqe { nsid: 1, ..Sqe::new(opcode) }, &table);
        let unknown = answer == Err(Status::INVALID_OPCODE.do_not_retry());
        assert_eq!(unknown, !effects.io[usize::from(opcode)].supported, "I/O command {opcode:#x}");
    }
}

#[test]
fn get_features_returns_the_set_value() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let settable = [
        (FeatureId::Arbitration, 0x0102_0305, 0, 0x0102_0305),
        (FeatureId::PowerManagement, 0, 0, 0),
        (FeatureId::TemperatureThreshold, 350, 0, 350),
        (FeatureId::TemperatureThreshold, 1 << 20 | 260, 1 << 20, 260),
        (FeatureId::ErrorRecovery, 0x1234, 0, 0x1234),
        (FeatureId::VolatileWriteCache, 1, 0, 1),
        (FeatureId::NumberOfQueues, 3 << 16 | 3, 0, 3 << 16 | 3),
        (FeatureId::WriteAtomicity, 1, 0, 1),
        (FeatureId::AsyncEventConfiguration, 0x100, 0, 0x100),
        (FeatureId::KeepAliveTimer, 30_000, 0, 30_000),
    ];
    for (feature, value, selector, expected) in settable {
        assert_eq!(status(&mut harness, set_feature(feature, value)), Status::SUCCESS, "{feature:?}");
        assert_eq!(result(&mut harness, get_feature(feature, 0, selector)), expected, "{feature:?}");
    }
    // Defaults differ from the current value; capabilities are reported.
    assert_eq!(result(&mut harness, get_feature(FeatureId::NumberOfQueues, 1, 0)), 126 << 16 | 126);
    assert_eq!(result(&mut harness, get_feature(FeatureId::TemperatureThreshold, 2, 0)), 343);
    assert_eq!(result(&mut harness, get_feature(FeatureId::Arbitration, 3, 0)), 4);
    assert_eq!(result(&mut harness, get_feature(FeatureId::ErrorRecovery, 3, 0)), 6);
    let behavior = Sqe { data: DataPointer::transport(512), ..get_feature(FeatureId::HostBehavior, 0, 0) };
    assert_eq!(data(&mut harness, behavior), [0; 512]);
    let set = set_feature(FeatureId::HostBehavior, 0);
    assert_eq!(data_from_host(&set), 512);
    let mut retry = [0; 512];
    retry[0] = 1;
    assert_eq!(harness.command(set, &retry).unwrap().cqe.status, Status::SUCCESS);
    assert_eq!(data(&mut harness, behavior), retry);
    assert!(!harness.controller.association().knows_extended_formats());
    retry[2] = 1;
    assert_eq!(harness.command(set, &retry).unwrap().cqe.status, Status::SUCCESS);
    assert_eq!(data(&mut harness, behavior), retry);
    assert!(harness.controller.association().knows_extended_formats());
    let short = harness.command(set, &retry[..511]).unwrap().cqe.status;
    assert_eq!(short, Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
    retry[0] = 2;
    assert_eq!(harness.command(set, &retry).unwrap().cqe.status, Status::INVALID_FIELD.do_not_retry());
    let host_id = Sqe { data: DataPointer::transport(16), ..get_feature(FeatureId::HostIdentifier, 0, 1) };
    assert_eq!(data(&mut harness, host_id), [7; 16]);
}

#[test]
fn health_log_data_units_are_thousands_of_512_bytes() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let counters = HealthCounters {
        bytes_read: 512_000,
        bytes_written: 512_001,
        reads: 7,
        writes: 8,
        busy_minutes: 9,
        power_on_hours: 10,
        media_errors: 11,
    };
    harness.deliver(ControllerEvent::Health(counters));
    let health = data(&mut harness, log_sqe(log(LogId::Health, 512), NSID_ALL));
    let health = HealthLog::decode(health.as_slice().try_into().unwrap());
    assert_eq!((health.data_units_read, health.data_units_written), (1, 2));
    assert_eq!((health.host_reads, health.host_writes, health.media_errors), (7, 8, 11));
}

/// The sequence of a persistent discovery by nvme-cli.
#[test]
fn discovery_log_is_filtered_by_host() {
    let mut harness = Harness::enabled(SubsystemKind::Discovery);
    let controller = IdentifyController::decode(&page(&mut harness, identify(Cns::Controller, 0))).unwrap();
    assert_eq!(controller.cntrltype, ControllerType::Discovery);
    assert_eq!(controller.subnqn, Nqn::discovery().as_str());
    assert_eq!(controller.oaes, oaes::DISCOVERY);
    assert_eq!((controller.in_capsule_offset_bytes, controller.sgls & 3), (0, 1));
    status(
        &mut harness,
        set_feature(FeatureId::AsyncEventConfiguration, AsyncEventConfiguration::DISCOVERY.bits()),
    );
    assert_eq!(harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]), None);

    let head = log_sqe(log(LogId::Discovery, 1024), 0);
    let header = |harness: &mut Harness| {
        DiscoveryHeader::decode(data(harness, head).as_slice().try_into().unwrap()).unwrap()
    };
    assert_eq!(header(&mut harness), DiscoveryHeader { genctr: 1, numrec: 2, ..DiscoveryHeader::default() });
    let entries = log_sqe(GetLogPage { offset: 1024, ..log(LogId::Discovery, 2048) }, 0);
    let entries = data(&mut harness, entries);
    let entries: Vec<DiscoveryEntry> =
        entries.as_chunks().0.iter().map(|entry| DiscoveryEntry::decode(entry).unwrap()).collect();
    assert_eq!(entries[0].subtype, SubsystemType::CurrentDiscovery);
    assert_eq!(entries[0].eflags, DiscoveryEntry::EXPLICIT_PERSISTENT);
    assert_eq!(
        (entries[1].subnqn.as_str(), entries[1].subtype),
        ("nqn.2026-11.io.ringbolt:one", SubsystemType::Nvm)
    );
    assert_eq!(entries[1].address.traddr, "192.0.2.1", "a wildcard is replaced by the local address");
    assert!(entries[1].admin_queue_entries_max >= 32);

    // A change that is visible only to another host raises no event.
    harness.deliver(ControllerEvent::DiscoveryChanged(Arc::new(discovery(2, 2))));
    assert_eq!(harness.completed, []);
    harness.deliver(ControllerEvent::DiscoveryChanged(Arc::new(discovery(3, 1))));
    assert_eq!(
        harness.completed.last().map(|cqe| cqe.result),
        Some(AsyncEvent::DISCOVERY_CHANGED.to_result())
    );
    assert_eq!(header(&mut harness), DiscoveryHeader { genctr: 3, numrec: 1, ..DiscoveryHeader::default() });
}

#[test]
fn the_records_of_the_discovery_log_are_made_for_discovery_controllers_only() {
    let unread = || DiscoveryLog::new(2, || panic!("a controller with namespaces has no discovery log"));
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    harness.deliver(ControllerEvent::DiscoveryChanged(Arc::new(unread())));
    assert_eq!(harness.completed, []);
}

#[test]
fn discovery_controller_supports_identify_controller_only() {
    let mut harness = Harness::enabled(SubsystemKind::Discovery);
    for cns in Cns::ALL.iter().filter(|&&cns| cns != Cns::Controller) {
        let answer = status(&mut harness, identify(*cns, 1));
        assert_eq!(answer, Status::INVALID_FIELD.do_not_retry(), "{cns:?}");
    }
    assert_eq!(
        status(&mut harness, Abort { sqid: 0, cid: 1 }.to_sqe()),
        Status::INVALID_OPCODE.do_not_retry()
    );
    // Entry sizes of 0 are accepted.
    let mut harness = Harness::new(SubsystemKind::Discovery, 0);
    set_cc(&mut harness, 1);
    assert!(csts(&mut harness).ready);
}
