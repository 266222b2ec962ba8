use std::sync::Arc;

use block_io::Status;
use wire_nvme::admin::{Abort, GetFeatures, GetLogPage, Identify, SetFeatures};
use wire_nvme::aer::AsyncEvent;
use wire_nvme::fabrics::{Disconnect, Nqn, PropertyGet, PropertySet};
use wire_nvme::feature::{AsyncEventConfiguration, FeatureId, NumberOfQueues};
use wire_nvme::identify::*;
use wire_nvme::log::*;
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::registers::{ControllerCapabilities, ControllerStatus, NvmeVersion, ShutdownStatus, offset};
use wire_nvme::{DataPointer, NSID_ALL, Sqe};

use super::*;
use crate::harness::{LINUX_CC, connect_sqe, discovery, host, property_set, subsystem};
use crate::{Harness, SubsystemListener, SubsystemNamespace};

const SECOND: u64 = 1_000_000_000;

fn no_data(opcode: AdminOpcode) -> Sqe {
    Sqe { data: DataPointer::transport(0), ..Sqe::new(opcode.to_wire()) }
}

fn property(harness: &mut Harness, offset: u32, wide: bool) -> u64 {
    harness.command(PropertyGet { wide, offset }.to_sqe(), &[]).unwrap().cqe.result
}

fn csts(harness: &mut Harness) -> ControllerStatus {
    ControllerStatus::decode(property(harness, offset::CSTS, false) as u32).unwrap()
}

fn set_cc(harness: &mut Harness, value: u32) -> Status {
    harness.command(property_set(offset::CC, value), &[]).unwrap().cqe.status
}

fn identify(cns: Cns, nsid: u32) -> Sqe {
    let sqe = Identify { cns: cns.to_wire(), ..Identify::default() }.to_sqe(nsid);
    Sqe { data: DataPointer::transport(4096), ..sqe }
}

fn log(page: LogId, length_bytes: u64) -> GetLogPage {
    GetLogPage { lid: page.to_wire(), length_bytes, ..GetLogPage::default() }
}

fn log_sqe(page: GetLogPage, nsid: u32) -> Sqe {
    Sqe { data: DataPointer::transport(page.length_bytes as u32), ..page.to_sqe(nsid) }
}

fn set_feature(feature: FeatureId, cdw11: u32) -> Sqe {
    SetFeatures { fid: feature.to_wire(), cdw11, ..SetFeatures::default() }.to_sqe(0)
}

fn get_feature(feature: FeatureId, select: u8, cdw11: u32) -> Sqe {
    GetFeatures { fid: feature.to_wire(), select, cdw11, uuid_index: 0 }.to_sqe(0)
}

fn data(harness: &mut Harness, sqe: Sqe) -> Vec<u8> {
    let completion = harness.command(sqe, &[]).unwrap();
    assert!(completion.cqe.status.is_success(), "{sqe:?}: {}", completion.cqe.status);
    completion.data
}

fn page(harness: &mut Harness, sqe: Sqe) -> [u8; 4096] {
    data(harness, sqe).try_into().unwrap()
}

fn status(harness: &mut Harness, sqe: Sqe) -> Status {
    harness.command(sqe, &[]).unwrap().cqe.status
}

fn result(harness: &mut Harness, sqe: Sqe) -> u64 {
    let completion = harness.command(sqe, &[]).unwrap();
    assert!(completion.cqe.status.is_success(), "{sqe:?}: {}", completion.cqe.status);
    completion.cqe.result
}

/// The command sequence of Linux 6.x from Connect to the first block device.
#[test]
fn linux_initialization_discovers_namespaces() {
    let mut harness = Harness::new(SubsystemKind::Nvm, 5000);
    let cap = ControllerCapabilities::decode(property(&mut harness, offset::CAP, true));
    assert_eq!((cap.queue_entries_max, cap.page_min_log2, cap.nvm_command_set), (128, 12, true));
    // nvme_enable_ctrl compares CRTO, in the same units, with CAP.TO.
    assert!(property(&mut harness, offset::CRTO, false) >= cap.ready_timeout_500ms.into());
    assert_eq!(set_cc(&mut harness, LINUX_CC), Status::SUCCESS);
    assert!(csts(&mut harness).ready);
    assert_eq!(
        NvmeVersion::decode(property(&mut harness, offset::VS, false) as u32),
        NvmeVersion::new(2, 0, 0)
    );

    let controller = IdentifyController::decode(&page(&mut harness, identify(Cns::Controller, 0))).unwrap();
    // nvme_check_ctrl_fabric_info and nvme_tcp_setup_ctrl.
    assert_eq!(controller.cntlid, harness.controller.association().cntlid());
    assert!(controller.kas_100ms > 0 && controller.maxcmd > 0);
    assert_eq!((controller.io_command_capsule_bytes, controller.io_response_capsule_bytes), (64 + 8192, 16));
    assert_eq!((controller.in_capsule_offset_bytes, controller.sgls & 3), (0, 1));
    assert_eq!((controller.sqes, controller.cqes, controller.mdts), (0x66, 0x44, 5));
    assert_eq!(
        (controller.subnqn.as_str(), controller.cntrltype),
        ("nqn.2026-11.io.ringbolt:one", ControllerType::Io)
    );
    assert!(controller.lpa & lpa::COMMAND_EFFECTS != 0);

    let effects = log_sqe(log(LogId::CommandEffects, 4096), NSID_ALL);
    let effects = CommandEffectsLog::decode(&page(&mut harness, effects));
    assert!(effects.admin[usize::from(AdminOpcode::Identify.to_wire())].supported);
    assert!(!effects.admin[usize::from(AdminOpcode::FormatNvm.to_wire())].supported);
    assert!(effects.io[1].supported && effects.io[1].changes_blocks && !effects.io[2].changes_blocks);

    let command_set = NvmController::decode(&page(&mut harness, identify(Cns::CommandSetController, 0)));
    assert_eq!(command_set, NvmController { vsl: 5, ..NvmController::default() });
    // nvme_hwmon_init.
    let health = log_sqe(log(LogId::Health, 512), NSID_ALL);
    let health = HealthLog::decode(data(&mut harness, health).as_slice().try_into().unwrap());
    assert_eq!((health.critical_warning, health.temperature_kelvins), (0, 293));

    let queues = NumberOfQueues { submission: 8, completion: 8 };
    let granted = result(&mut harness, set_feature(FeatureId::NumberOfQueues, queues.to_wire()));
    assert_eq!(NumberOfQueues::from_wire(granted as u32), Ok(queues));
    let lease = harness.controller.association().lease(8).unwrap();
    assert!(lease.is_valid());
    assert_eq!(harness.controller.association().lease(9).unwrap_err(), crate::LeaseError::OutOfRange);

    assert_eq!(status(&mut harness, no_data(AdminOpcode::KeepAlive)), Status::SUCCESS);
    let events = controller.oaes & AsyncEventConfiguration::NAMESPACE.bits();
    assert_eq!(result(&mut harness, set_feature(FeatureId::AsyncEventConfiguration, events)), 0);
    assert_eq!(harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]), None);

    let list = NamespaceList::decode(&page(&mut harness, identify(Cns::ActiveNamespaces, 0))).unwrap();
    assert_eq!(list.0, [1, 3]);
    let descriptors = page(&mut harness, identify(Cns::NamespaceDescriptors, 1));
    let expected = vec![
        NamespaceDescriptor::Eui64([2; 8]),
        NamespaceDescriptor::Nguid([1; 16]),
        NamespaceDescriptor::Uuid([3; 16]),
        NamespaceDescriptor::Csi(Csi::Nvm),
    ];
    assert_eq!(NamespaceDescriptor::decode_list(&descriptors), Ok(expected));
    let namespace = IdentifyNamespace::decode(&page(&mut harness, identify(Cns::Namespace, 3))).unwrap();
    assert_eq!((namespace.nsze, namespace.formats[0].data_log2, namespace.nmic), (256, 12, 1));
    assert_eq!((namespace.nvmcap, namespace.anagrpid), (1 << 20, 0));
    let independent =
        NamespaceIndependent::decode(&page(&mut harness, identify(Cns::NamespaceIndependent, 3)));
    assert_eq!(independent.nsfeat, NamespaceIndependent::NO_VOLATILE_CACHE);
    assert_eq!(independent.nstat, NamespaceIndependent::READY);
}

#[test]
fn disabled_controller_rejects_admin_commands() {
    let mut harness = Harness::new(SubsystemKind::Nvm, 0);
    for opcode in AdminOpcode::ALL.iter().filter(|&&opcode| opcode != AdminOpcode::Fabrics) {
        let expected = Status::COMMAND_SEQUENCE_ERROR.do_not_retry();
        assert_eq!(status(&mut harness, no_data(*opcode)), expected, "{opcode:?}");
    }
    assert_eq!(property(&mut harness, offset::CC, false), 0);
}

/// Commands with one invalid field each and their status codes (Base 2.0).
#[test]
fn invalid_commands_fail_with_the_specified_status() {
    let dnr = Status::do_not_retry;
    let with_flags = |sqe: Sqe, flags| Sqe { flags, ..sqe };
    let with_buffer = |sqe: Sqe, length| Sqe { data: DataPointer::transport(length), ..sqe };
    let controller = identify(Cns::Controller, 0);
    let health = |page: GetLogPage, nsid| log_sqe(GetLogPage { lid: LogId::Health.to_wire(), ..page }, nsid);
    let whole = log(LogId::Health, 512);
    let csi = |cns: Cns, csi| {
        let sqe = Identify { cns: cns.to_wire(), csi, ..Identify::default() }.to_sqe(1);
        Sqe { data: DataPointer::transport(4096), ..sqe }
    };
    let rows: Vec<(&str, Sqe, Status)> = vec![
        ("fused first", with_flags(controller, 0x41), dnr(Status::INVALID_FIELD)),
        ("fused second", with_flags(controller, 0x42), dnr(Status::INVALID_FIELD)),
        ("fused reserved", with_flags(controller, 0x43), dnr(Status::INVALID_FIELD)),
        (
            "fused event request",
            with_flags(no_data(AdminOpcode::AsyncEventRequest), 0x41),
            dnr(Status::INVALID_FIELD),
        ),
        ("PRPs", with_flags(controller, 0x00), dnr(Status::INVALID_FIELD)),
        ("SGL metadata", with_flags(controller, 0x80), dnr(Status::INVALID_FIELD)),
        ("reserved data pointer", with_flags(controller, 0xc0), dnr(Status::INVALID_FIELD)),
        ("buffer too short", with_buffer(controller, 4092), dnr(Status::DATA_SGL_LENGTH_INVALID)),
        ("buffer too long", with_buffer(controller, 8192), dnr(Status::DATA_SGL_LENGTH_INVALID)),
        (
            "in-capsule buffer",
            Sqe { data: DataPointer::capsule(0, 4096), ..controller },
            dnr(Status::SGL_TYPE_INVALID),
        ),
        ("unknown structure", identify(Cns::NvmSets, 0), dnr(Status::INVALID_FIELD)),
        ("reserved structure", identify_raw(0x0f), dnr(Status::INVALID_FIELD)),
        ("namespace 0", identify(Cns::Namespace, 0), dnr(Status::INVALID_NAMESPACE_OR_FORMAT)),
        ("namespace above NN", identify(Cns::Namespace, 33), dnr(Status::INVALID_NAMESPACE_OR_FORMAT)),
        ("all namespaces", identify(Cns::Namespace, NSID_ALL), dnr(Status::INVALID_NAMESPACE_OR_FORMAT)),
        (
            "descriptors of an inactive namespace",
            identify(Cns::NamespaceDescriptors, 2),
            dnr(Status::INVALID_NAMESPACE_OR_FORMAT),
        ),
        (
            "list after FFFFFFFEh",
            identify(Cns::ActiveNamespaces, NSID_ALL - 1),
            dnr(Status::INVALID_NAMESPACE_OR_FORMAT),
        ),
        ("zoned namespace", csi(Cns::CommandSetNamespace, 2), dnr(Status::INVALID_FIELD)),
        ("reserved command set", csi(Cns::CommandSetController, 9), dnr(Status::INVALID_FIELD)),
        ("unknown log", log_sqe(log(LogId::DeviceSelfTest, 512), 0), dnr(Status::INVALID_LOG_PAGE)),
        ("discovery log", log_sqe(log(LogId::Discovery, 512), 0), dnr(Status::INVALID_LOG_PAGE)),
        ("ANA log without ANA", log_sqe(log(LogId::Ana, 512), 0), dnr(Status::INVALID_LOG_PAGE)),
        (
            "log offset not dword aligned",
            health(GetLogPage { offset: 2, ..whole }, 0),
            dnr(Status::INVALID_FIELD),
        ),
        (
            "log offset by index",
            health(GetLogPage { offset_is_index: true, ..whole }, 0),
            dnr(Status::INVALID_FIELD),
        ),
        (
            "log offset beyond the end",
            health(GetLogPage { offset: 516, ..whole }, 0),
            dnr(Status::INVALID_FIELD),
        ),
        ("log offset of 2^64", health(GetLogPage { offset: !3, ..whole }, 0), dnr(Status::INVALID_FIELD)),
        (
            "log longer than MDTS",
            health(GetLogPage { length_bytes: (128 << 10) + 4, ..whole }, 0),
            dnr(Status::INVALID_FIELD),
        ),
        (
            "log of 16 GiB",
            health(GetLogPage { length_bytes: 1 << 34, ..whole }, 0),
            dnr(Status::INVALID_FIELD),
        ),
        ("log buffer too short", with_buffer(health(whole, 0), 508), dnr(Status::DATA_SGL_LENGTH_INVALID)),
        ("health log of a namespace", health(whole, 1), dnr(Status::INVALID_FIELD)),
        ("unknown feature", get_feature(FeatureId::Timestamp, 0, 0), dnr(Status::INVALID_FIELD)),
        (
            "interrupt coalescing",
            get_feature(FeatureId::InterruptCoalescing, 0, 0),
            dnr(Status::INVALID_FIELD),
        ),
        ("reserved select", get_feature(FeatureId::Arbitration, 4, 0), dnr(Status::INVALID_FIELD)),
        ("short host identifier", get_feature(FeatureId::HostIdentifier, 0, 0), dnr(Status::INVALID_FIELD)),
        (
            "set host identifier",
            set_feature(FeatureId::HostIdentifier, 1),
            dnr(Status::COMMAND_SEQUENCE_ERROR),
        ),
        (
            "saved feature",
            SetFeatures { fid: 1, save: true, ..SetFeatures::default() }.to_sqe(0),
            dnr(Status::FEATURE_NOT_SAVEABLE),
        ),
        (
            "namespace-specific set of a controller feature",
            SetFeatures { fid: 1, ..SetFeatures::default() }.to_sqe(1),
            dnr(Status::FEATURE_NOT_NAMESPACE_SPECIFIC),
        ),
        ("65536 queues", set_feature(FeatureId::NumberOfQueues, 0xffff), dnr(Status::INVALID_FIELD)),
        ("cache off", set_feature(FeatureId::VolatileWriteCache, 0), dnr(Status::FEATURE_NOT_CHANGEABLE)),
        ("power state 1", set_feature(FeatureId::PowerManagement, 1), dnr(Status::INVALID_FIELD)),
        (
            "threshold of sensor 2",
            set_feature(FeatureId::TemperatureThreshold, 2 << 16),
            dnr(Status::INVALID_FIELD),
        ),
        (
            "deallocated block errors",
            set_feature(FeatureId::ErrorRecovery, 1 << 16),
            dnr(Status::INVALID_FIELD),
        ),
        ("create a queue", no_data(AdminOpcode::CreateIoSq), dnr(Status::INVALID_OPCODE)),
        ("format", no_data(AdminOpcode::FormatNvm), dnr(Status::INVALID_OPCODE)),
        ("vendor specific", Sqe::new(0xc0), dnr(Status::INVALID_OPCODE)),
        ("second Connect", connect_sqe(0, 32, 0), dnr(Status::COMMAND_SEQUENCE_ERROR)),
        ("Disconnect", Disconnect { record_format: 0 }.to_sqe(), Status::new(1, 0x85).do_not_retry()),
        ("authentication", Sqe { nsid: 5, ..Sqe::new(0x7f) }, dnr(Status::INVALID_OPCODE)),
        ("reserved fabrics type", Sqe { nsid: 3, ..Sqe::new(0x7f) }, dnr(Status::INVALID_OPCODE)),
        ("narrow CAP", PropertyGet { wide: false, offset: offset::CAP }.to_sqe(), dnr(Status::INVALID_FIELD)),
        ("wide VS", PropertyGet { wide: true, offset: offset::VS }.to_sqe(), dnr(Status::INVALID_FIELD)),
        ("reserved property", PropertyGet { wide: false, offset: 0x44 }.to_sqe(), dnr(Status::INVALID_FIELD)),
        (
            "reserved size",
            Sqe { cdw10: 2, ..PropertyGet { wide: false, offset: 0x14 }.to_sqe() },
            dnr(Status::INVALID_FIELD),
        ),
        ("set VS", property_set(offset::VS, 1), dnr(Status::INVALID_FIELD)),
        ("subsystem reset", property_set(offset::NSSR, 0x4e56_4d65), dnr(Status::INVALID_FIELD)),
        (
            "wide CC",
            PropertySet { wide: true, offset: offset::CC, value: 1 }.to_sqe(),
            dnr(Status::INVALID_FIELD),
        ),
        ("reserved SHN", property_set(offset::CC, LINUX_CC | 3 << 14), dnr(Status::INVALID_FIELD)),
    ];
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let mut count = 0;
    for (name, sqe, expected) in &rows {
        let completion = harness.command(*sqe, &[]).unwrap();
        assert_eq!(completion.cqe.status, *expected, "{name}");
        assert!(csts(&mut harness).ready, "{name}");
        count += 1;
    }
    // Every failed command is in the error log, newest first.
    let health = log_sqe(log(LogId::Health, 512), 0);
    let health = HealthLog::decode(data(&mut harness, health).as_slice().try_into().unwrap());
    assert_eq!(health.error_log_entries, count);
    let errors = data(&mut harness, log_sqe(log(LogId::ErrorInformation, 64 * 16), 0));
    let entries: Vec<ErrorEntry> = errors.as_chunks().0.iter().map(ErrorEntry::decode).collect();
    assert_eq!(entries[0].count as u128, count);
    assert_eq!(entries[15].count as u128, count - 15);
    assert!(entries[0].status.same_code(Status::INVALID_FIELD));
}

fn identify_raw(cns: u8) -> Sqe {
    let sqe = Identify { cns, ..Identify::default() }.to_sqe(0);
    Sqe { data: DataPointer::transport(4096), ..sqe }
}

#[test]
fn identify_inactive_namespace_returns_zeroes() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    for cns in [Cns::Namespace, Cns::CommandSetNamespace, Cns::NamespaceIndependent, Cns::AllocatedNamespace]
    {
        assert_eq!(page(&mut harness, identify(cns, 2)), [0; 4096], "{cns:?}");
    }
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
            let page = GetLogPage { lid, length_bytes: 512, ..GetLogPage::default() };
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
    let short = harness.command(set, &retry[..511]).unwrap().cqe.status;
    assert_eq!(short, Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
    retry[0] = 2;
    assert_eq!(harness.command(set, &retry).unwrap().cqe.status, Status::INVALID_FIELD.do_not_retry());
    let host_id = Sqe { data: DataPointer::transport(16), ..get_feature(FeatureId::HostIdentifier, 0, 1) };
    assert_eq!(data(&mut harness, host_id), [7; 16]);
}

#[test]
fn number_of_queues_is_fixed_once_a_queue_exists() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let many = NumberOfQueues { submission: 500, completion: 300 }.to_wire();
    let granted = result(&mut harness, set_feature(FeatureId::NumberOfQueues, many)) as u32;
    assert_eq!(NumberOfQueues::from_wire(granted), Ok(NumberOfQueues { submission: 127, completion: 127 }));
    for (submission, completion) in [(4, 9), (9, 4)] {
        let wanted = NumberOfQueues { submission, completion }.to_wire();
        let granted = result(&mut harness, set_feature(FeatureId::NumberOfQueues, wanted)) as u32;
        assert_eq!(NumberOfQueues::from_wire(granted), Ok(NumberOfQueues { submission: 4, completion: 4 }));
    }
    let lease = harness.controller.association().lease(4).unwrap();
    let answer = status(&mut harness, set_feature(FeatureId::NumberOfQueues, 0));
    assert_eq!(answer, Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
    drop(lease);
    assert_eq!(result(&mut harness, set_feature(FeatureId::NumberOfQueues, 0)), 0);
    assert_eq!(harness.controller.association().lease(2).unwrap_err(), crate::LeaseError::OutOfRange);
    // A reset restores the default.
    set_cc(&mut harness, LINUX_CC & !1);
    harness.enable();
    assert!(harness.controller.association().lease(127).is_ok());
}

#[test]
fn reset_completes_when_io_queues_are_closed() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let association = harness.controller.association().clone();
    assert_eq!(harness.command(no_data(AdminOpcode::AsyncEventRequest), &[]), None);
    status(&mut harness, set_feature(FeatureId::Arbitration, 3));
    let lease = association.lease(1).unwrap();

    assert_eq!(set_cc(&mut harness, LINUX_CC & !1), Status::SUCCESS);
    assert_eq!(harness.actions, [ControllerAction::CloseIoQueues]);
    assert_eq!(harness.completed.last().map(|cqe| cqe.status), Some(Status::ABORT_REQUESTED));
    assert!(!lease.is_valid() && association.is_alive());
    assert_eq!(association.lease(2).unwrap_err(), crate::LeaseError::ControllerDisabled);
    assert!(csts(&mut harness).ready, "an I/O queue is still leased");
    assert_eq!(set_cc(&mut harness, LINUX_CC), Status::COMMAND_SEQUENCE_ERROR);
    assert_eq!(
        status(&mut harness, no_data(AdminOpcode::KeepAlive)),
        Status::COMMAND_SEQUENCE_ERROR.do_not_retry()
    );

    drop(lease);
    assert_eq!(csts(&mut harness), ControllerStatus::RESET);
    assert_eq!(set_cc(&mut harness, LINUX_CC), Status::SUCCESS);
    assert!(association.lease(1).is_ok());
    assert_eq!(
        result(&mut harness, get_feature(FeatureId::Arbitration, 0, 0)),
        0,
        "features are at their defaults"
    );
    assert_eq!(
        result(&mut harness, get_feature(FeatureId::KeepAliveTimer, 0, 0)),
        5000,
        "keep alive belongs to the association"
    );
}

#[test]
fn shutdown_completes_when_io_queues_are_closed() {
    for notification in [1 << 14, 2 << 14] {
        let mut harness = Harness::enabled(SubsystemKind::Nvm);
        let lease = harness.controller.association().lease(1).unwrap();
        assert_eq!(set_cc(&mut harness, LINUX_CC | notification), Status::SUCCESS);
        assert_eq!(harness.actions, [ControllerAction::CloseIoQueues]);
        assert_eq!(csts(&mut harness).shutdown, ShutdownStatus::Occurring);
        drop(lease);
        assert_eq!(csts(&mut harness).shutdown, ShutdownStatus::Complete);
        // A reset ends the shutdown state.
        set_cc(&mut harness, LINUX_CC & !1);
        set_cc(&mut harness, LINUX_CC);
        assert_eq!(csts(&mut harness), ControllerStatus { ready: true, ..ControllerStatus::RESET });
    }
}

#[test]
fn unsupported_configuration_sets_fatal_status() {
    // Unsupported entry sizes, page size, command set and arbitration.
    for value in [
        0x0000_0001,
        0x0056_0001,
        LINUX_CC | 7 << 4,
        LINUX_CC | 1 << 7,
        LINUX_CC | 1 << 11,
        LINUX_CC | 1 << 24,
    ] {
        let mut harness = Harness::new(SubsystemKind::Nvm, 0);
        assert_eq!(set_cc(&mut harness, value), Status::SUCCESS, "{value:#x}");
        assert!(csts(&mut harness).fatal && !csts(&mut harness).ready, "{value:#x}");
        assert!(!harness.controller.association().is_enabled());
        // A reset recovers.
        set_cc(&mut harness, 0);
        harness.enable();
        assert!(csts(&mut harness).ready);
    }
}

#[test]
fn keep_alive_expires_without_host_activity() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let association = harness.controller.association().clone();
    let lease = association.lease(1).unwrap();
    assert_eq!(harness.controller.deadline(), Some(5 * SECOND));
    assert_eq!(harness.advance(4 * SECOND), None);
    status(&mut harness, no_data(AdminOpcode::KeepAlive));
    assert_eq!(harness.controller.deadline(), Some(9 * SECOND));
    assert_eq!(association.keep_alive_deadline_ns(), 9 * SECOND);
    // Other commands do not restart it; the feature does.
    assert_eq!(harness.advance(4 * SECOND), None);
    status(&mut harness, get_feature(FeatureId::KeepAliveTimer, 0, 0));
    assert_eq!(harness.controller.deadline(), Some(9 * SECOND));
    status(&mut harness, set_feature(FeatureId::KeepAliveTimer, 5000));
    assert_eq!(association.keep_alive_deadline_ns(), 13 * SECOND);
    assert_eq!(harness.advance(5 * SECOND - 1), None);
    assert_eq!(harness.advance(1), Some(TerminationReason::KeepAliveExpired));
    assert_eq!(
        harness.actions,
        [ControllerAction::CloseIoQueues, ControllerAction::Terminate(TerminationReason::KeepAliveExpired)]
    );
    assert!(!lease.is_valid());
    assert_eq!(harness.controller.deadline(), None);
    // Commands that still arrive complete.
    assert_eq!(status(&mut harness, no_data(AdminOpcode::KeepAlive)), Status::KEEP_ALIVE_EXPIRED);
    let cntlid = association.cntlid();
    drop(harness.controller);
    assert!(!association.is_alive() && harness.directory.find(association.subnqn(), cntlid).is_none());
}

#[test]
fn command_after_expiry_does_not_restart_keep_alive() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    harness.now_ns = 6 * SECOND;
    assert_eq!(status(&mut harness, no_data(AdminOpcode::KeepAlive)), Status::KEEP_ALIVE_EXPIRED);
    assert_eq!(
        harness.actions.last(),
        Some(&ControllerAction::Terminate(TerminationReason::KeepAliveExpired))
    );
}

#[test]
fn keep_alive_timeout_is_rounded_up_and_changeable() {
    let mut harness = Harness::new(SubsystemKind::Nvm, 4100);
    harness.enable();
    assert_eq!(harness.controller.deadline(), Some(5 * SECOND), "a granularity of one second");
    status(&mut harness, set_feature(FeatureId::KeepAliveTimer, 0));
    assert_eq!(harness.controller.deadline(), None);
    status(&mut harness, set_feature(FeatureId::KeepAliveTimer, u32::MAX));
    assert_eq!(harness.controller.deadline(), Some(4_294_968 * SECOND));
    assert_eq!(Harness::new(SubsystemKind::Nvm, 0).controller.deadline(), None);
    assert_eq!(Harness::new(SubsystemKind::Discovery, 30_000).controller.deadline(), Some(30 * SECOND));
    let mut idle = Harness::new(SubsystemKind::Discovery, 0);
    assert_eq!(idle.controller.deadline(), Some(120 * SECOND));
    assert_eq!(idle.advance(120 * SECOND), Some(TerminationReason::Idle));
}

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

#[test]
fn controller_terminates_when_host_or_subsystem_is_removed() {
    let mut closed = subsystem();
    closed.allow_any_host = false;
    let mut allowed = closed.clone();
    allowed.hosts.insert(host());
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    harness.deliver(ControllerEvent::SubsystemChanged(Arc::new(allowed)));
    assert_eq!(harness.actions, []);
    harness.deliver(ControllerEvent::SubsystemChanged(Arc::new(closed)));
    assert_eq!(
        harness.actions,
        [ControllerAction::CloseIoQueues, ControllerAction::Terminate(TerminationReason::HostNotAllowed)]
    );

    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    harness.deliver(ControllerEvent::SubsystemRemoved);
    assert_eq!(
        harness.actions,
        [ControllerAction::CloseIoQueues, ControllerAction::Terminate(TerminationReason::SubsystemRemoved)]
    );
    assert_eq!(status(&mut harness, no_data(AdminOpcode::KeepAlive)), Status::ABORTED_SQ_DELETION);
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
    let mut next_log = discovery(2);
    next_log.records.pop();
    harness.deliver(ControllerEvent::DiscoveryChanged(Arc::new(next_log.clone())));
    assert_eq!(harness.completed, []);
    next_log.records.pop();
    next_log.generation = 3;
    harness.deliver(ControllerEvent::DiscoveryChanged(Arc::new(next_log)));
    assert_eq!(
        harness.completed.last().map(|cqe| cqe.result),
        Some(AsyncEvent::DISCOVERY_CHANGED.to_result())
    );
    assert_eq!(header(&mut harness), DiscoveryHeader { genctr: 3, numrec: 1, ..DiscoveryHeader::default() });
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
