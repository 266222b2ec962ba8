//! Options of transports, subsystems and targets, as hosts see them.

use wire_nvme::feature::HOST_BEHAVIOR_SIZE;
use wire_nvme::io::{DatasetManagement, DsmRange, Prinfo, ReadWrite, WriteZeroes};
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::registers::SUBSYSTEM_RESET;

use super::*;
use crate::{ControllerDirectory, DiscoveryFilter, DiscoveryRecord, NamespaceTable, io};

fn harness_with(subsystem: Subsystem, limits: ControllerLimits) -> Harness {
    let mut harness = Harness::with_limits(subsystem, limits, Arc::default(), 0);
    harness.enable();
    harness
}

fn identify_controller(harness: &mut Harness) -> IdentifyController {
    IdentifyController::decode(&page(harness, identify(Cns::Controller, 0))).unwrap()
}

#[test]
fn masked_commands_are_neither_reported_nor_executed() {
    let masked =
        oncs::COMPARE | oncs::DATASET_MANAGEMENT | oncs::WRITE_ZEROES | oncs::RESERVATIONS | oncs::COPY;
    let limits =
        ControllerLimits { masked_oncs: masked, compare_and_write: false, ..ControllerLimits::default() };
    let table = NamespaceTable::new(&subsystem(), 1, &limits);
    let mut harness = harness_with(subsystem(), limits);
    let controller = identify_controller(&mut harness);
    assert_eq!((controller.oncs & masked, controller.fuses, controller.ocfs), (0, 0, 0));
    assert!(controller.oncs & oncs::VERIFY != 0, "what is not masked stays");
    let namespace = IdentifyNamespace::decode(&page(&mut harness, identify(Cns::Namespace, 1))).unwrap();
    assert_eq!((namespace.rescap, namespace.dlfeat), (0, dlfeat::READS_ZERO));
    let effects = log_sqe(log(LogId::CommandEffects, 4096), NSID_ALL);
    let effects = CommandEffectsLog::decode(&page(&mut harness, effects));
    let notifications = log_sqe(log(LogId::ReservationNotification, 64), 0);
    assert_eq!(status(&mut harness, notifications), Status::INVALID_LOG_PAGE.do_not_retry());
    let mask = get_feature(FeatureId::ReservationMask, 0, 0);
    assert_eq!(status(&mut harness, Sqe { nsid: 1, ..mask }), Status::INVALID_FIELD.do_not_retry());
    for (opcode, is_masked) in [
        (NvmOpcode::Compare, true),
        (NvmOpcode::DatasetManagement, true),
        (NvmOpcode::WriteZeroes, true),
        (NvmOpcode::Copy, true),
        (NvmOpcode::ReservationRegister, true),
        (NvmOpcode::ReservationReport, true),
        (NvmOpcode::Verify, false),
        (NvmOpcode::Read, false),
    ] {
        assert_eq!(effects.io[usize::from(opcode.to_wire())].supported, !is_masked, "{opcode:?}");
        let sqe = ReadWrite { blocks: 1, ..ReadWrite::default() }.to_sqe(opcode);
        let sqe = Sqe { nsid: 1, data: DataPointer::transport(512), ..sqe };
        let refused = Err(Status::INVALID_OPCODE.do_not_retry());
        assert_eq!(io::plan(&sqe, &table).map(drop) == refused, is_masked, "{opcode:?}");
    }
}

#[test]
fn limits_of_deallocation_and_zeroes_are_reported_and_enforced() {
    let limited = Subsystem { unmap_range_max_blocks: 16, write_zeroes_max_log2: 1, ..subsystem() };
    let table = NamespaceTable::new(&limited, 1, &ControllerLimits::default());
    let mut harness = harness_with(limited, ControllerLimits::default());
    let reported = NvmController::decode(&page(&mut harness, identify(Cns::CommandSetController, 0)));
    assert_eq!(reported, NvmController { vsl: 5, wzsl: 1, dmrsl: 16, ..NvmController::default() });
    let zeroes = |nsid, blocks| {
        let command = WriteZeroes { lba: 0, blocks, fua: false, deallocate: false, prinfo: Prinfo::empty() };
        io::plan(&Sqe { nsid, ..command.to_sqe() }, &table).map(drop)
    };
    // 8 KiB: 16 blocks of 512 bytes, 2 of 4096.
    for (nsid, most) in [(1, 16), (3, 2)] {
        assert_eq!(zeroes(nsid, most), Ok(()));
        assert_eq!(zeroes(nsid, most + 1), Err(Status::INVALID_FIELD.do_not_retry()));
    }
    let dsm = DatasetManagement { ranges: 2, deallocate: true, ..DatasetManagement::default() };
    let dsm = Sqe { nsid: 1, data: DataPointer::transport(32), ..dsm.to_sqe() };
    let plan = io::plan(&dsm, &table).unwrap();
    let deallocated = |blocks: u32| {
        let mut data = [0; 32];
        for (into, (lba, blocks)) in data.as_chunks_mut().0.iter_mut().zip([(0, 16), (64, blocks)]) {
            DsmRange { attributes: 0, blocks, lba }.encode(into);
        }
        io::unmap_ranges(&plan, &table, &data).map(Iterator::count)
    };
    assert_eq!(deallocated(16), Ok(2));
    assert_eq!(deallocated(17), Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.do_not_retry()));
}

#[test]
fn failed_commands_have_a_retry_delay_for_hosts_that_honour_it() {
    let limits = ControllerLimits { retry_delays_100ms: [7, 8, 9], ..ControllerLimits::default() };
    let mut harness = harness_with(subsystem(), limits);
    assert_eq!(identify_controller(&mut harness).crdt_100ms, [7, 8, 9]);
    let failed =
        |harness: &Harness, status| harness.controller.association().with_retry_delay(status).retry_delay();
    let honour = |harness: &mut Harness| {
        let mut behavior = [0; HOST_BEHAVIOR_SIZE];
        behavior[0] = 1;
        let set = harness.command(set_feature(FeatureId::HostBehavior, 0), &behavior).unwrap();
        assert_eq!(set.cqe.status, Status::SUCCESS);
    };
    assert_eq!(failed(&harness, Status::NAMESPACE_NOT_READY), 0);
    honour(&mut harness);
    assert_eq!(failed(&harness, Status::NAMESPACE_NOT_READY), 1);
    assert_eq!(failed(&harness, Status::INVALID_FIELD.do_not_retry()), 0);
    // A reset ends it.
    set_cc(&mut harness, 0);
    assert_eq!(failed(&harness, Status::NAMESPACE_NOT_READY), 0);

    let mut without_delay = harness_with(subsystem(), ControllerLimits::default());
    honour(&mut without_delay);
    assert_eq!(failed(&without_delay, Status::NAMESPACE_NOT_READY), 0);
}

#[test]
fn a_subsystem_reset_resets_every_controller_of_the_subsystem() {
    let resettable = || Subsystem { subsystem_reset: true, ..subsystem() };
    let directory = Arc::new(ControllerDirectory::new());
    let connect = |subsystem| {
        let limits = ControllerLimits::default();
        let mut harness = Harness::with_limits(subsystem, limits, directory.clone(), 0);
        harness.enable();
        harness
    };
    let other_nqn: Nqn = "nqn.2026-11.io.ringbolt:other".parse().unwrap();
    let (mut writer, mut sibling) = (connect(resettable()), connect(resettable()));
    let mut stranger = connect(Subsystem { nqn: other_nqn, ..resettable() });
    let lease = sibling.controller.association().lease(1).unwrap();
    let cap = ControllerCapabilities::decode(property(&mut writer, offset::CAP, true));
    assert!(cap.subsystem_reset && property(&mut writer, offset::NSSR, false) == 0);

    // Any other value has no effect.
    let write =
        |harness: &mut Harness, at, value| harness.command(property_set(at, value), &[]).unwrap().cqe.status;
    assert_eq!(write(&mut writer, offset::NSSR, 1), Status::SUCCESS);
    assert!(csts(&mut writer).ready && writer.actions.is_empty());

    assert_eq!(write(&mut writer, offset::NSSR, SUBSYSTEM_RESET), Status::SUCCESS);
    let reset = ControllerStatus { subsystem_reset_occurred: true, ..ControllerStatus::RESET };
    assert_eq!((csts(&mut writer), &writer.actions[..]), (reset, &[ControllerAction::CloseIoQueues][..]));
    for harness in [&mut sibling, &mut stranger] {
        harness.deliver(ControllerEvent::ReservationChanged);
    }
    assert_eq!(sibling.actions, [ControllerAction::CloseIoQueues]);
    assert!(!lease.is_valid() && csts(&mut sibling).ready, "an I/O queue is still leased");
    drop(lease);
    assert_eq!(csts(&mut sibling), reset);
    assert!(csts(&mut stranger).ready && stranger.actions.is_empty());

    // It is once, and the host clears it.
    sibling.enable();
    assert_eq!(csts(&mut sibling), ControllerStatus { ready: true, ..reset });
    assert_eq!(write(&mut sibling, offset::CSTS, ControllerStatus::NSSRO), Status::SUCCESS);
    assert_eq!(csts(&mut sibling), ControllerStatus { ready: true, ..ControllerStatus::RESET });
    sibling.deliver(ControllerEvent::ReservationChanged);
    assert!(csts(&mut sibling).ready);
}

#[test]
fn without_subsystem_reset_its_properties_are_not_writable() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let cap = ControllerCapabilities::decode(property(&mut harness, offset::CAP, true));
    assert!(!cap.subsystem_reset);
    for at in [offset::NSSR, offset::CSTS] {
        let answer = status(&mut harness, property_set(at, SUBSYSTEM_RESET));
        assert_eq!(answer, Status::INVALID_FIELD.do_not_retry(), "{at:#x}");
    }
    assert!(csts(&mut harness).ready);
}

/// Records of a discovery log: what differs of each from the address 192.0.2.1, port 4420, over TCP.
fn filtered_log(filter: DiscoveryFilter) -> DiscoveryLog {
    let address = |trtype, traddr: &str, trsvcid: &str| TransportAddress {
        trtype,
        adrfam: AddressFamily::Ipv4,
        traddr: traddr.to_owned(),
        trsvcid: trsvcid.to_owned(),
    };
    let addresses = [
        ("same", address(TransportType::Tcp, "192.0.2.1", "4420"), 1),
        ("wildcard", address(TransportType::Tcp, "0.0.0.0", "4420"), 2),
        ("port", address(TransportType::Tcp, "192.0.2.1", "4421"), 3),
        ("address", address(TransportType::Tcp, "192.0.2.2", "4420"), 4),
        ("transport", address(TransportType::Rdma, "192.0.2.1", "4420"), 5),
        ("referral", address(TransportType::Rdma, "198.51.100.1", "8009"), 0),
    ];
    let records = addresses.map(|(name, address, portid)| DiscoveryRecord {
        subnqn: format!("nqn.2026-11.io.ringbolt:{name}").parse().unwrap(),
        subtype: SubsystemType::Nvm,
        address,
        portid,
        secure_channel: false,
        hosts: crate::AllowedHosts::Any,
        admin_label: (name == "port").then(|| "rack-7".to_owned()),
    });
    DiscoveryLog::new(2, move || records.into()).with_filter(filter)
}

fn discovery_page(harness: &mut Harness, extended: bool) -> Vec<u8> {
    let specific = if extended { discovery_option::EXTENDED } else { 0 };
    let header = GetLogPage { specific, ..log(LogId::Discovery, 1024) };
    let header = data(harness, log_sqe(header, 0));
    let header = DiscoveryHeader::decode(header.as_slice().try_into().unwrap()).unwrap();
    let length = match extended {
        true => u64::from(header.tdlpl),
        false => 1024 * (header.numrec + 1),
    };
    let all = GetLogPage { specific, ..log(LogId::Discovery, length) };
    data(harness, log_sqe(all, 0))
}

#[test]
fn a_discovery_filter_shows_what_the_address_of_the_host_has_in_common() {
    let none = DiscoveryFilter::default();
    let rows: [(DiscoveryFilter, &[&str]); 5] = [
        (none, &["same", "wildcard", "port", "address", "transport", "referral"]),
        (DiscoveryFilter { transport: true, ..none }, &["same", "wildcard", "port", "address", "referral"]),
        (DiscoveryFilter { address: true, ..none }, &["same", "wildcard", "port", "transport", "referral"]),
        (DiscoveryFilter { svcid: true, ..none }, &["same", "wildcard", "address", "transport", "referral"]),
        (DiscoveryFilter { transport: true, address: true, svcid: true }, &["same", "wildcard", "referral"]),
    ];
    for (filter, expected) in rows {
        let mut harness = Harness::enabled(SubsystemKind::Discovery);
        harness.deliver(ControllerEvent::DiscoveryChanged(Arc::new(filtered_log(filter))));
        let page = discovery_page(&mut harness, false);
        let entries = page[1024..].as_chunks().0.iter().map(|entry| DiscoveryEntry::decode(entry).unwrap());
        let names: Vec<String> =
            entries.map(|entry| entry.subnqn.as_str().rsplit(':').next().unwrap().to_owned()).collect();
        assert_eq!(names, expected, "{filter:?}");
    }
}

#[test]
fn a_filter_that_hides_nothing_of_a_host_raises_no_event() {
    let mut harness = Harness::enabled(SubsystemKind::Discovery);
    let changes = set_feature(FeatureId::AsyncEventConfiguration, oaes::DISCOVERY);
    assert_eq!(status(&mut harness, changes), Status::SUCCESS);
    let all = DiscoveryFilter { transport: true, ..DiscoveryFilter::default() };
    harness.deliver(ControllerEvent::DiscoveryChanged(Arc::new(discovery(2, 3).with_filter(all))));
    assert_eq!(harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]), None);
    let other_port = filtered_log(DiscoveryFilter { svcid: true, ..all });
    harness.deliver(ControllerEvent::DiscoveryChanged(Arc::new(other_port)));
    assert_eq!(
        harness.completed.last().map(|cqe| cqe.result),
        Some(AsyncEvent::DISCOVERY_CHANGED.to_result())
    );
}

#[test]
fn extended_entries_of_the_discovery_log_carry_the_admin_label() {
    let mut harness = Harness::enabled(SubsystemKind::Discovery);
    let pages = data(&mut harness, log_sqe(log(LogId::SupportedLogPages, 1024), 0));
    let pages = SupportedLogPages::decode(pages.as_slice().try_into().unwrap());
    let support = pages.0[usize::from(LogId::Discovery.to_wire())].specific;
    assert_eq!(support, u16::from(discovery_option::EXTENDED));
    let log = filtered_log(DiscoveryFilter { transport: true, ..DiscoveryFilter::default() });
    harness.deliver(ControllerEvent::DiscoveryChanged(Arc::new(log)));
    let page = discovery_page(&mut harness, true);
    let header = DiscoveryHeader::decode(page.first_chunk().unwrap()).unwrap();
    assert_eq!((header.numrec, header.dlpf, header.tdlpl), (5, 1, page.len() as u32));
    let (mut rest, mut labels) = (&page[1024..], Vec::new());
    while !rest.is_empty() {
        let (entry, length) = ExtendedDiscoveryEntry::decode(rest).unwrap();
        labels.push((entry.entry.portid, entry.admin_label));
        rest = &rest[length..];
    }
    let expected = [(1, None), (2, None), (3, Some("rack-7".to_owned())), (4, None), (0, None)];
    assert_eq!(labels, expected);
}
