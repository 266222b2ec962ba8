//! Identify (Base 2.0, section 5.17).

use block_io::Status;
use wire_nvme::admin;
use wire_nvme::identify::{
    CONTROLLER_LIST_MAX, Cns, CommandSetVectors, ControllerList, ControllerType, Csi, DiscoveryType,
    ExtendedLbaFormat, IdentifyController, IdentifyNamespace, LbaFormat, NAMESPACE_LIST_MAX,
    NamespaceDescriptor, NamespaceIndependent, NamespaceList, NvmController, NvmNamespace, SIZE, anacap,
    ascii, cmic, ctratt, dlfeat, fuses, lpa, oacs, oaes, ocfs, oncs, sgls, vwc,
};
use wire_nvme::log::TransportType;
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::{NSID_ALL, Sqe, cqe, sqe};

use super::properties::VERSION;
use super::{AdminResult, Controller};
use crate::{INVALID_FIELD, SubsystemKind, SubsystemNamespace, io};

/// Supported admin commands without effects on namespaces or the controller's capabilities.
pub(super) const EFFECT_FREE_COMMANDS: [AdminOpcode; 5] = [
    AdminOpcode::GetLogPage,
    AdminOpcode::Identify,
    AdminOpcode::Abort,
    AdminOpcode::GetFeatures,
    AdminOpcode::AsyncEventRequest,
];

/// Admin commands of memory-based transports: they create and delete I/O queues.
pub(super) const QUEUE_COMMANDS: [AdminOpcode; 4] =
    [AdminOpcode::CreateIoSq, AdminOpcode::DeleteIoSq, AdminOpcode::CreateIoCq, AdminOpcode::DeleteIoCq];

/// Longest normal shutdown (RTD3E): closing I/O queues waits for the I/O in flight at block devices.
const SHUTDOWN_US: u32 = 10_000_000;
/// Longest time in the ANA Change state (ANATT).
const ANA_TRANSITION_S: u8 = 10;
/// Concurrent Abort commands (ACL). Abort completes synchronously, so the limit is never reached.
const ABORTS_MAX: u16 = 4;

type IdentifyPage = [u8; SIZE];

impl Controller {
    pub(super) fn identify(&mut self, sqe: &Sqe) -> AdminResult {
        let command = admin::Identify::from_sqe(sqe);
        let mut page: IdentifyPage = [0; SIZE];
        let cns = Cns::from_wire(command.cns).ok_or(INVALID_FIELD)?;
        match (cns, self.view.kind) {
            (Cns::Controller, _) => self.identify_controller().encode(&mut page),
            // A discovery controller has no namespaces (Base 2.0, section 3.1.2.3).
            (_, SubsystemKind::Discovery) => return Err(INVALID_FIELD),
            (Cns::Namespace | Cns::AllocatedNamespace, _) => {
                if let Some(namespace) = self.active_namespace(sqe.nsid)? {
                    self.identify_namespace(namespace).encode(&mut page);
                    // A host needs this structure to use a namespace, so that it knows now which one it is.
                    self.association().set_identified(namespace.nsid, namespace.identity());
                }
            }
            (Cns::ActiveNamespaces | Cns::AllocatedNamespaces, _) => {
                self.namespaces_after(sqe.nsid)?.encode(&mut page)
            }
            (Cns::CommandSetActiveNamespaces | Cns::CommandSetAllocatedNamespaces, _) => {
                check_command_set(command.csi)?;
                self.namespaces_after(sqe.nsid)?.encode(&mut page);
            }
            (Cns::NamespaceDescriptors, _) => {
                let namespace = self.active_namespace(sqe.nsid)?;
                let namespace = namespace.ok_or(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry())?;
                NamespaceDescriptor::encode_list(&namespace.descriptors(), &mut page);
            }
            (Cns::CommandSetNamespace | Cns::CommandSetAllocatedNamespace, _) => {
                check_command_set(command.csi)?;
                if let Some(namespace) = self.active_namespace(sqe.nsid)? {
                    nvm_namespace(namespace).encode(&mut page);
                }
            }
            (Cns::CommandSetController, _) => {
                check_command_set(command.csi)?;
                // Verify reads at most as much as a Read (VSL = MDTS). Dataset Management has no limit of
                // ranges but the 256 of its format.
                let limits = NvmController {
                    vsl: self.limits.mdts(),
                    wzsl: self.view.write_zeroes_max_log2,
                    dmrsl: self.view.unmap_range_max_blocks,
                    ..NvmController::default()
                };
                limits.encode(&mut page);
            }
            (Cns::NamespaceIndependent, _) => {
                if let Some(namespace) = self.active_namespace(sqe.nsid)? {
                    self.namespace_independent(namespace).encode(&mut page);
                }
            }
            (Cns::Controllers | Cns::NamespaceControllers, _) => {
                if cns == Cns::NamespaceControllers && self.active_namespace(sqe.nsid)?.is_none() {
                    return Err(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
                }
                let all = self.registration.directory.controllers(&self.view.nqn);
                let namespace =
                    self.subsystem.namespace(sqe.nsid).filter(|_| cns == Cns::NamespaceControllers);
                let sees = |hostnqn| namespace.is_none_or(|namespace| namespace.is_visible_to(hostnqn));
                let attached = all.iter().filter(|association| sees(association.hostnqn()));
                let from = attached.map(|association| association.cntlid()).filter(|&id| id >= command.cntid);
                ControllerList(from.take(CONTROLLER_LIST_MAX).collect()).encode(&mut page);
            }
            (Cns::CommandSets, _) => {
                // CNTID is this controller's identifier or FFFFh.
                if command.cntid != 0xffff && command.cntid != self.association().cntlid() {
                    return Err(INVALID_FIELD);
                }
                CommandSetVectors(vec![CommandSetVectors::NVM]).encode(&mut page);
            }
            _ => return Err(INVALID_FIELD),
        }
        self.respond_with_data(sqe, page.to_vec())
    }

    /// The namespace with this identifier; `None` if the identifier is valid but inactive.
    fn active_namespace(&self, nsid: u32) -> Result<Option<&SubsystemNamespace>, Status> {
        if !self.view.is_valid_nsid(nsid) {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
        }
        Ok(self.view.namespace(nsid))
    }

    /// Active namespace identifiers greater than `nsid` (Base 2.0, section 5.17.2.2).
    fn namespaces_after(&self, nsid: u32) -> Result<NamespaceList, Status> {
        if nsid >= NSID_ALL - 1 {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
        }
        let namespaces = self.view.namespaces.iter().map(|namespace| namespace.nsid);
        Ok(NamespaceList(namespaces.filter(|&id| id > nsid).take(NAMESPACE_LIST_MAX).collect()))
    }

    fn identify_controller(&self) -> IdentifyController {
        let (subsystem, limits) = (&self.view, &self.limits);
        let common = IdentifyController {
            vid: limits.pci_vendor,
            ssvid: limits.pci_vendor,
            sn: ascii(&subsystem.serial),
            mn: ascii(&subsystem.model),
            fr: ascii(crate::FIRMWARE),
            mdts: limits.mdts(),
            cntlid: self.association().cntlid(),
            ver: VERSION,
            rtd3e_us: SHUTDOWN_US,
            ctratt: ctratt::HOST_ID_128,
            aborts_max: ABORTS_MAX,
            async_events_max: limits.async_events_max,
            error_log_entries: limits.error_log_entries,
            kas_100ms: (limits.keep_alive_granularity_ms / 100) as u16,
            maxcmd: u16::try_from(limits.io_queue_entries_max).unwrap_or(u16::MAX),
            sgls: sgls::SUPPORTED
                | sgls::OFFSET
                | match limits.transport {
                    TransportType::Rdma => sgls::KEYED,
                    _ => sgls::TRANSPORT,
                },
            subnqn: subsystem.nqn.as_str().to_owned(),
            lpa: lpa::EXTENDED | lpa::MISCELLANEOUS,
            io_command_capsule_bytes: sqe::SIZE as u32,
            io_response_capsule_bytes: cqe::SIZE as u32,
            msdbd: 1,
            ..IdentifyController::default()
        };
        if subsystem.kind == SubsystemKind::Discovery {
            return IdentifyController {
                cntrltype: ControllerType::Discovery,
                dctype: DiscoveryType::Direct,
                oaes: oaes::DISCOVERY,
                ..common
            };
        }
        let capacity =
            |namespace: &SubsystemNamespace| u128::from(namespace.blocks) * u128::from(namespace.block_size);
        let mut identify = IdentifyController {
            cmic: cmic::MULTIPLE_PORTS | cmic::MULTIPLE_CONTROLLERS,
            ctratt: common.ctratt | ctratt::EXTENDED_FORMATS,
            oaes: oaes::NAMESPACE,
            cntrltype: ControllerType::Io,
            lpa: common.lpa | lpa::COMMAND_EFFECTS | lpa::PERSISTENT_EVENTS,
            persistent_events_64kib: 1,
            // One firmware slot, read-only.
            frmw: 1 << 1 | 1,
            wctemp: super::log::COMPOSITE_KELVINS_MAX,
            cctemp: super::log::COMPOSITE_KELVINS_MAX + 10,
            tnvmcap: subsystem.namespaces.iter().map(capacity).sum(),
            sqes: 0x66,
            cqes: 0x44,
            nn: subsystem.namespaces_max,
            mnan: subsystem.namespaces_max,
            crdt_100ms: limits.retry_delays_100ms,
            oncs: self.optional_commands(),
            // ACWU is one block, as is the atomic write unit. A larger fused operation is atomic against
            // other writes, but a read may see a part of it.
            fuses: if limits.compare_and_write { fuses::COMPARE_AND_WRITE } else { 0 },
            ocfs: if limits.has_optional(oncs::COPY) { ocfs::FORMAT_0 } else { 0 },
            vwc: vwc::FLUSH_ALL | if subsystem.has_volatile_cache() { vwc::PRESENT } else { 0 },
            io_command_capsule_bytes: sqe::SIZE as u32 + limits.in_capsule_bytes,
            // OFCS: Disconnect deletes an I/O queue.
            ofcs: 1,
            ..common
        };
        if limits.memory_based {
            // Capsule sizes, keep alive and MAXCMD apply to fabrics only.
            identify = IdentifyController {
                kas_100ms: 0,
                maxcmd: 0,
                sgls: sgls::SUPPORTED | sgls::BIT_BUCKET,
                io_command_capsule_bytes: 0,
                io_response_capsule_bytes: 0,
                msdbd: 0,
                ofcs: 0,
                oacs: if limits.shadow_doorbells { oacs::DOORBELL_BUFFER } else { 0 },
                ..identify
            };
        }
        if subsystem.ana_reporting {
            identify.cmic |= cmic::ANA;
            identify.oaes |= oaes::ANA;
            identify.anatt_s = ANA_TRANSITION_S;
            identify.anacap = anacap::OPTIMIZED
                | anacap::NON_OPTIMIZED
                | anacap::INACCESSIBLE
                | anacap::PERSISTENT_LOSS
                | anacap::CHANGE;
            // Each namespace may have its own group.
            identify.anagrpmax = subsystem.namespaces_max;
            identify.nanagrpid = subsystem.namespaces_max;
        }
        identify
    }

    /// Optional commands (ONCS), which are per controller.
    fn optional_commands(&self) -> u16 {
        let namespaces = &self.view.namespaces;
        let mut optional =
            oncs::COMPARE | oncs::COPY | oncs::SAVE_AND_SELECT | oncs::VERIFY | oncs::RESERVATIONS;
        // Hosts read this once: one that connects before the first namespace is added can deallocate, too.
        if namespaces.is_empty() || namespaces.iter().any(|namespace| namespace.can_unmap) {
            optional |= oncs::DATASET_MANAGEMENT;
        }
        // A host uses Write Zeroes, and Write Uncorrectable, on every namespace.
        if namespaces.iter().all(|namespace| namespace.can_write_zeroes) {
            optional |= oncs::WRITE_ZEROES;
        }
        if namespaces.iter().all(|namespace| namespace.can_write_uncorrectable) {
            optional |= oncs::WRITE_UNCORRECTABLE;
        }
        optional & !self.limits.masked_oncs
    }

    /// Reservation capabilities of a namespace (RESCAP).
    fn reservation_capabilities(&self, namespace: &SubsystemNamespace) -> u8 {
        match self.limits.has_optional(oncs::RESERVATIONS) {
            true => namespace.reservations.capabilities(),
            false => 0,
        }
    }

    fn identify_namespace(&self, namespace: &SubsystemNamespace) -> IdentifyNamespace {
        let block_log2 = namespace.block_size.trailing_zeros() as u8;
        let (format, protection) = (namespace.metadata, namespace.metadata.protection);
        IdentifyNamespace {
            nsze: namespace.blocks,
            ncap: namespace.blocks,
            nuse: namespace.blocks,
            formats: vec![LbaFormat { metadata_bytes: format.bytes, data_log2: block_log2, performance: 0 }],
            extended_lba: format.extended,
            // Metadata can only be interleaved.
            mc: u8::from(format.extended),
            dpc: protection.map_or(0, |protection| {
                1 << (protection.kind.to_wire() - 1) | if protection.first { 1 << 3 } else { 1 << 4 }
            }),
            dps: protection
                .map_or(0, |protection| protection.kind.to_wire() | u8::from(protection.first) << 3),
            nmic: 1,
            rescap: self.reservation_capabilities(namespace),
            dlfeat: if namespace.can_unmap {
                let zeroes = namespace.can_write_zeroes && self.limits.has_optional(oncs::WRITE_ZEROES);
                dlfeat::READS_ZERO | if zeroes { dlfeat::WRITE_ZEROES } else { 0 }
            } else {
                0
            },
            copy_range_blocks_max: io::copy_range_blocks_max(block_log2),
            copy_blocks_max: io::copy_blocks_max(block_log2),
            copy_ranges_max: io::COPY_RANGES_MAX,
            noiob: namespace.optimal_boundary_blocks,
            nvmcap: u128::from(namespace.blocks) * u128::from(namespace.block_size),
            anagrpid: self.ana_group(namespace),
            nsattr: namespace.read_only.into(),
            nguid: namespace.nguid,
            eui64: namespace.eui64,
            ..IdentifyNamespace::default()
        }
    }

    fn namespace_independent(&self, namespace: &SubsystemNamespace) -> NamespaceIndependent {
        NamespaceIndependent {
            nsfeat: if namespace.volatile_cache { 0 } else { NamespaceIndependent::NO_VOLATILE_CACHE },
            nmic: 1,
            rescap: self.reservation_capabilities(namespace),
            anagrpid: self.ana_group(namespace),
            nsattr: namespace.read_only.into(),
            nstat: NamespaceIndependent::READY,
            ..NamespaceIndependent::default()
        }
    }

    fn ana_group(&self, namespace: &SubsystemNamespace) -> u32 {
        if self.view.ana_reporting { namespace.anagrpid } else { 0 }
    }
}

/// The extended format of a namespace's only LBA format.
fn nvm_namespace(namespace: &SubsystemNamespace) -> NvmNamespace {
    let mut nvm = NvmNamespace::default();
    if let Some(protection) = namespace.metadata.protection {
        nvm.lbstm = protection.storage_mask();
        nvm.extended_formats[0] = ExtendedLbaFormat {
            pif: protection.guard.to_wire(),
            storage_tag_bits: protection.storage_tag_bits,
        };
    }
    nvm
}

fn check_command_set(csi: u8) -> Result<(), Status> {
    match Csi::from_wire(csi) {
        Some(Csi::Nvm) => Ok(()),
        _ => Err(INVALID_FIELD),
    }
}
