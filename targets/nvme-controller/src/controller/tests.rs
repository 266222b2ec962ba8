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

mod events;
mod options;
mod persistent_events;
mod reports;
mod states;

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

fn identify_raw(cns: u8) -> Sqe {
    let sqe = Identify { cns, ..Identify::default() }.to_sqe(0);
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

/// Commands with one invalid field each and their status codes (Base 2.0).
type InvalidCommands = Vec<(&'static str, Sqe, Status)>;

fn invalid_identify_and_log_commands() -> InvalidCommands {
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
    vec![
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
    ]
}

fn invalid_feature_and_fabrics_commands() -> InvalidCommands {
    let dnr = Status::do_not_retry;
    vec![
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
    ]
}

#[test]
fn invalid_commands_fail_with_the_specified_status() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let mut count = 0;
    let rows = [invalid_identify_and_log_commands(), invalid_feature_and_fabrics_commands()].concat();
    for (name, sqe, expected) in rows {
        let completion = harness.command(sqe, &[]).unwrap();
        assert_eq!(completion.cqe.status, expected, "{name}");
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
