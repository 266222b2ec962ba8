//! Identify (Base 2.0, section 5.17).

use ring::Status;
use wire_nvme::admin;
use wire_nvme::identify::{
    CONTROLLER_LIST_MAX, Cns, CommandSetVectors, ControllerList, ControllerType, Csi, DiscoveryType,
    IdentifyController, IdentifyNamespace, LbaFormat, NAMESPACE_LIST_MAX, NamespaceDescriptor,
    NamespaceIndependent, NamespaceList, NvmController, NvmNamespace, SIZE, anacap, ascii, cmic, ctratt,
    dlfeat, fuses, lpa, oacs, oaes, ocfs, oncs, sgls, vwc,
};
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::{NSID_ALL, Sqe, cqe, sqe};

use super::properties::VERSION;
use super::{Answer, Controller};
use crate::{INVALID_FIELD, Kind, Namespace, io};

/// Firmware revision: eight characters at most.
pub(super) const FIRMWARE: &str = env!("CARGO_PKG_VERSION");

/// Admin commands that are supported and change nothing worth telling.
pub(super) const WITHOUT_EFFECT: [AdminOpcode; 5] = [
    AdminOpcode::GetLogPage,
    AdminOpcode::Identify,
    AdminOpcode::Abort,
    AdminOpcode::GetFeatures,
    AdminOpcode::AsyncEventRequest,
];

/// Admin commands that queues in memory bring.
pub(super) const QUEUES: [AdminOpcode; 4] =
    [AdminOpcode::CreateIoSq, AdminOpcode::DeleteIoSq, AdminOpcode::CreateIoCq, AdminOpcode::DeleteIoCq];

/// How long a shutdown may take (RTD3E): closing I/O queues waits for their devices.
const SHUTDOWN_US: u32 = 10_000_000;
/// Longest time in the ANA change state (ANATT).
const ANA_TRANSITION_S: u8 = 10;
/// Abort commands at once (ACL). They are answered at once, so this is for show.
const ABORTS_MAX: u16 = 4;

type Page = [u8; SIZE];

impl Controller {
    pub(super) fn identify(&mut self, sqe: &Sqe) -> Answer {
        let command = admin::Identify::of(sqe);
        let mut page: Page = [0; SIZE];
        let cns = Cns::from_wire(command.cns).ok_or(INVALID_FIELD)?;
        match (cns, self.subsystem.kind) {
            (Cns::Controller, _) => self.identify_controller().encode(&mut page),
            // A discovery controller has no namespaces to ask about (Base 2.0, section 3.1.2.3).
            (_, Kind::Discovery) => return Err(INVALID_FIELD),
            (Cns::Namespace | Cns::AllocatedNamespace, _) => {
                if let Some(namespace) = self.active(sqe.nsid)? {
                    self.identify_namespace(namespace).encode(&mut page);
                }
            }
            (Cns::ActiveNamespaces | Cns::AllocatedNamespaces, _) => {
                self.namespaces_after(sqe.nsid)?.encode(&mut page)
            }
            (Cns::CommandSetActiveNamespaces | Cns::CommandSetAllocatedNamespaces, _) => {
                nvm(command.csi)?;
                self.namespaces_after(sqe.nsid)?.encode(&mut page);
            }
            (Cns::NamespaceDescriptors, _) => {
                let namespace = self.active(sqe.nsid)?;
                let namespace = namespace.ok_or(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry())?;
                NamespaceDescriptor::encode_list(&namespace.descriptors(), &mut page);
            }
            (Cns::CommandSetNamespace | Cns::CommandSetAllocatedNamespace, _) => {
                nvm(command.csi)?;
                if self.active(sqe.nsid)?.is_some() {
                    NvmNamespace::default().encode(&mut page);
                }
            }
            (Cns::CommandSetController, _) => {
                nvm(command.csi)?;
                // Write Zeroes takes what its command can say, Dataset Management 256 ranges; Verify reads as
                // much as a Read does.
                let limits = NvmController { vsl: self.limits.mdts(), ..NvmController::default() };
                limits.encode(&mut page);
            }
            (Cns::NamespaceIndependent, _) => {
                if let Some(namespace) = self.active(sqe.nsid)? {
                    self.namespace_independent(namespace).encode(&mut page);
                }
            }
            (Cns::Controllers | Cns::NamespaceControllers, _) => {
                if cns == Cns::NamespaceControllers && self.active(sqe.nsid)?.is_none() {
                    return Err(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
                }
                let membership = &self.membership;
                let all = membership.directory.controllers(&self.subsystem.nqn);
                let from =
                    all.iter().map(|association| association.cntlid()).filter(|&id| id >= command.cntid);
                ControllerList(from.take(CONTROLLER_LIST_MAX).collect()).encode(&mut page);
            }
            (Cns::CommandSets, _) => {
                // Of this controller, by its identifier or by FFFFh.
                if command.cntid != 0xffff && command.cntid != self.association().cntlid() {
                    return Err(INVALID_FIELD);
                }
                CommandSetVectors(vec![CommandSetVectors::NVM]).encode(&mut page);
            }
            _ => return Err(INVALID_FIELD),
        }
        self.send(sqe, page.to_vec())
    }

    /// The namespace, `None` when the identifier is valid but stands for none.
    fn active(&self, nsid: u32) -> Result<Option<&Namespace>, Status> {
        if !self.subsystem.is_valid_nsid(nsid) {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
        }
        Ok(self.subsystem.namespace(nsid))
    }

    /// Identifiers over `nsid` (Base 2.0, section 5.17.2.2).
    fn namespaces_after(&self, nsid: u32) -> Result<NamespaceList, Status> {
        if nsid >= NSID_ALL - 1 {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
        }
        let namespaces = self.subsystem.namespaces.iter().map(|namespace| namespace.nsid);
        Ok(NamespaceList(namespaces.filter(|&id| id > nsid).take(NAMESPACE_LIST_MAX).collect()))
    }

    fn identify_controller(&self) -> IdentifyController {
        let (subsystem, limits) = (&self.subsystem, &self.limits);
        let common = IdentifyController {
            vid: limits.pci_vendor,
            ssvid: limits.pci_vendor,
            sn: ascii(&subsystem.serial),
            mn: ascii(&subsystem.model),
            fr: ascii(FIRMWARE),
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
            sgls: sgls::SUPPORTED | sgls::OFFSET | sgls::TRANSPORT,
            subnqn: subsystem.nqn.as_str().to_owned(),
            lpa: lpa::EXTENDED | lpa::MISCELLANEOUS,
            io_command_capsule_bytes: sqe::SIZE as u32,
            io_response_capsule_bytes: cqe::SIZE as u32,
            msdbd: 1,
            ..IdentifyController::default()
        };
        if subsystem.kind == Kind::Discovery {
            return IdentifyController {
                cntrltype: ControllerType::Discovery,
                dctype: DiscoveryType::Direct,
                oaes: oaes::DISCOVERY,
                ..common
            };
        }
        let capacity =
            |namespace: &Namespace| u128::from(namespace.blocks) * u128::from(namespace.block_size);
        let mut optional =
            oncs::COMPARE | oncs::COPY | oncs::SAVE_AND_SELECT | oncs::VERIFY | oncs::RESERVATIONS;
        if subsystem.namespaces.iter().any(|namespace| namespace.can_unmap) {
            optional |= oncs::DATASET_MANAGEMENT;
        }
        // A host that is told of Write Zeroes uses it on every namespace.
        if subsystem.namespaces.iter().all(|namespace| namespace.can_write_zeroes) {
            optional |= oncs::WRITE_ZEROES;
        }
        // A host uses this too wherever it likes.
        if subsystem.namespaces.iter().all(|namespace| namespace.can_write_uncorrectable) {
            optional |= oncs::WRITE_UNCORRECTABLE;
        }
        let mut identify = IdentifyController {
            cmic: cmic::MULTIPLE_PORTS | cmic::MULTIPLE_CONTROLLERS,
            oaes: oaes::NAMESPACE,
            cntrltype: ControllerType::Io,
            lpa: common.lpa | lpa::COMMAND_EFFECTS,
            // One slot, which is read-only.
            frmw: 1 << 1 | 1,
            wctemp: super::log::COMPOSITE_KELVINS_MAX,
            cctemp: super::log::COMPOSITE_KELVINS_MAX + 10,
            tnvmcap: subsystem.namespaces.iter().map(capacity).sum(),
            sqes: 0x66,
            cqes: 0x44,
            nn: subsystem.namespaces_max,
            mnan: subsystem.namespaces_max,
            oncs: optional,
            // One block is compared and written atomically (ACWU), as it is written; more may be, but a read may
            // see a part of it.
            fuses: if limits.compare_and_write { fuses::COMPARE_AND_WRITE } else { 0 },
            ocfs: ocfs::FORMAT_0,
            vwc: vwc::FLUSH_ALL | if subsystem.has_volatile_cache() { vwc::PRESENT } else { 0 },
            io_command_capsule_bytes: sqe::SIZE as u32 + limits.in_capsule_bytes,
            // Disconnect deletes an I/O queue.
            ofcs: 1,
            ..common
        };
        if limits.memory_based {
            // What is said of capsules, keep alive and commands outstanding is for fabrics alone.
            identify = IdentifyController {
                kas_100ms: 0,
                maxcmd: 0,
                sgls: sgls::SUPPORTED,
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
            // As many groups as there may be namespaces, each in one of its own.
            identify.anagrpmax = subsystem.namespaces_max;
            identify.nanagrpid = subsystem.namespaces_max;
        }
        identify
    }

    fn identify_namespace(&self, namespace: &Namespace) -> IdentifyNamespace {
        let block_log2 = namespace.block_size.trailing_zeros() as u8;
        IdentifyNamespace {
            nsze: namespace.blocks,
            ncap: namespace.blocks,
            nuse: namespace.blocks,
            formats: vec![LbaFormat { metadata_bytes: 0, data_log2: block_log2, performance: 0 }],
            nmic: 1,
            rescap: namespace.reservations.capabilities(),
            dlfeat: if namespace.can_unmap {
                dlfeat::READS_ZERO | if namespace.can_write_zeroes { dlfeat::WRITE_ZEROES } else { 0 }
            } else {
                0
            },
            copy_range_blocks_max: io::range_blocks_max(block_log2),
            copy_blocks_max: io::blocks_max(block_log2),
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

    fn namespace_independent(&self, namespace: &Namespace) -> NamespaceIndependent {
        NamespaceIndependent {
            nsfeat: if namespace.volatile_cache { 0 } else { NamespaceIndependent::NO_VOLATILE_CACHE },
            nmic: 1,
            rescap: namespace.reservations.capabilities(),
            anagrpid: self.ana_group(namespace),
            nsattr: namespace.read_only.into(),
            nstat: NamespaceIndependent::READY,
            ..NamespaceIndependent::default()
        }
    }

    fn ana_group(&self, namespace: &Namespace) -> u32 {
        if self.subsystem.ana_reporting { namespace.anagrpid } else { 0 }
    }
}

fn nvm(csi: u8) -> Result<(), Status> {
    match Csi::from_wire(csi) {
        Some(Csi::Nvm) => Ok(()),
        _ => Err(INVALID_FIELD),
    }
}
