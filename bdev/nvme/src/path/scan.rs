//! Scans a controller: its namespaces, their identifiers, and their ANA states.

use std::collections::BTreeSet;
use std::sync::Arc;

use block_io::{ProtectionFlags, Status};
use nvme::{AdminData, AdminError, AdminOutput, AnyController};
use reactor::Core;
use uuid::Uuid;
use wire_nvme::Sqe;
use wire_nvme::admin::{GetLogPage, Identify};
use wire_nvme::identify::{
    self, Cns, IdentifyController, IdentifyNamespace, NAMESPACE_LIST_MAX, NamespaceDescriptor, NamespaceList,
    NvmNamespace, ctratt, oncs,
};
use wire_nvme::log::{AnaLog, AnaState, LogId};

use super::{AdminReply, ControllerPath};
use crate::scanned::{AtomicUnit, NamespaceIds, ScannedNamespace};

/// Maximum number of namespaces of one controller.
const NAMESPACES_MAX: usize = 4096;
/// Maximum length of an ANA log page, in bytes.
const ANA_BYTES_MAX: u64 = 1 << 20;

/// The ANA state of each ANA group; `None` if the controller does not report ANA.
pub(crate) type AnaGroups = Option<Vec<(u32, AnaState)>>;

/// log2 of the unit of MDTS. It is 4 KiB over fabrics and for every controller that supports such pages; for
/// larger ones the limit is only smaller than necessary.
const PAGE_LOG2: u32 = 12;

/// What a scan of a controller has found.
#[derive(Default)]
pub(crate) struct NamespaceScan {
    pub(crate) identified: Vec<ScannedNamespace>,
    /// Active namespaces that were not identified again.
    pub(crate) unchanged: BTreeSet<u32>,
}

/// The namespaces of a controller that have to be identified again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ChangedNamespaces {
    All,
    Some(BTreeSet<u32>),
}

impl ChangedNamespaces {
    /// Of a Changed Namespace List (Base 2.0, section 5.16.1.5). Anything but a plain list means all: more
    /// identifiers than fit, and a list without any, whatever the event was for.
    fn of_log(from: &[u8; identify::SIZE]) -> ChangedNamespaces {
        match NamespaceList::decode(from) {
            Ok(list) if !list.0.is_empty() && !list.0.contains(&wire_nvme::NSID_ALL) => {
                ChangedNamespaces::Some(list.0.into_iter().collect())
            }
            _ => ChangedNamespaces::All,
        }
    }

    pub(crate) fn contains(&self, nsid: u32) -> bool {
        match self {
            ChangedNamespaces::All => true,
            ChangedNamespaces::Some(nsids) => nsids.contains(&nsid),
        }
    }

    pub(crate) fn and(self, other: ChangedNamespaces) -> ChangedNamespaces {
        match (self, other) {
            (ChangedNamespaces::Some(mut nsids), ChangedNamespaces::Some(more)) => {
                nsids.extend(more);
                ChangedNamespaces::Some(nsids)
            }
            _ => ChangedNamespaces::All,
        }
    }
}

/// Executes the admin commands of a path, with error injections applied.
pub(crate) struct AdminExecutor<'a> {
    pub(crate) controller: &'a mut AnyController,
    pub(crate) path: &'a ControllerPath,
    pub(crate) core: &'a Core,
}

impl AdminExecutor<'_> {
    /// Executes an admin command and returns its result and data.
    pub(crate) async fn execute(&mut self, sqe: Sqe, data: AdminData) -> AdminReply {
        let length = if let AdminData::In(length) = data { length } else { 0 };
        if let Some(injected) = self.path.take_admin_injection(sqe.opcode, false) {
            self.path.unless_stopped(self.core.sleep_ns(injected.delay_ns)).await;
            return injected_reply(injected.status, length);
        }
        let answer = self.controller.admin(sqe, data).await;
        match answer.is_ok().then(|| self.path.take_admin_injection(sqe.opcode, true)).flatten() {
            Some(injected) => injected_reply(injected.status, length),
            None => answer,
        }
    }

    async fn read(&mut self, sqe: Sqe, length: usize) -> AdminReply {
        self.execute(sqe, AdminData::In(length)).await
    }

    async fn identify(&mut self, cns: Cns, nsid: u32) -> Result<Vec<u8>, AdminError> {
        let view = Identify { cns: cns.to_wire(), ..Identify::default() };
        Ok(self.read(view.to_sqe(nsid), identify::SIZE).await?.data)
    }

    /// The active namespaces whose format is supported. Those that are `known` and not listed in `changed`
    /// are not identified again.
    pub(crate) async fn namespaces(
        &mut self,
        controller: &IdentifyController,
        known: &BTreeSet<u32>,
        changed: &ChangedNamespaces,
    ) -> Result<NamespaceScan, AdminError> {
        let mut nsids: Vec<u32> = Vec::new();
        loop {
            let previous = nsids.last().copied().unwrap_or(0);
            let data = self.identify(Cns::ActiveNamespaces, previous).await?;
            let list = NamespaceList::decode(page(&data)).map_err(AdminError::InvalidResponse)?.0;
            let full = list.len() == NAMESPACE_LIST_MAX;
            nsids.extend(list.into_iter().filter(|nsid| *nsid > previous));
            if !full || nsids.len() >= NAMESPACES_MAX {
                break;
            }
        }
        nsids.truncate(NAMESPACES_MAX);
        let mut scan = NamespaceScan::default();
        for nsid in nsids {
            if known.contains(&nsid) && !changed.contains(nsid) {
                scan.unchanged.insert(nsid);
            } else {
                scan.identified.extend(self.namespace(nsid, controller).await?);
            }
        }
        Ok(scan)
    }

    /// The extended LBA formats of a namespace with protection information, of a controller that has them.
    async fn extended_formats(
        &mut self,
        nsid: u32,
        controller: &IdentifyController,
        namespace: &IdentifyNamespace,
    ) -> Result<Option<NvmNamespace>, AdminError> {
        if controller.ctratt & ctratt::EXTENDED_FORMATS == 0 || namespace.dps & 7 == 0 {
            return Ok(None);
        }
        let data = self.identify(Cns::CommandSetNamespace, nsid).await?;
        Ok(Some(NvmNamespace::decode(page(&data))))
    }

    async fn namespace(
        &mut self,
        nsid: u32,
        controller: &IdentifyController,
    ) -> Result<Option<ScannedNamespace>, AdminError> {
        let data = match self.identify(Cns::Namespace, nsid).await {
            // It was removed after the list was read.
            Err(AdminError::Status(status)) if status.same_code(Status::INVALID_NAMESPACE_OR_FORMAT) => {
                return Ok(None);
            }
            identified => identified?,
        };
        let Ok(namespace) = IdentifyNamespace::decode(page(&data)) else { return Ok(None) };
        let format = namespace.formats.get(usize::from(namespace.format));
        let usable = format.filter(|format| (9..=16).contains(&format.data_log2) && namespace.nsze > 0);
        let Some(format) = usable else { return Ok(None) };
        let nvm = self.extended_formats(nsid, controller, &namespace).await?;
        let metadata = namespace.metadata_format(nvm.as_ref()).ok();
        let usable = metadata.filter(|format| format.bytes == 0 || format.strips(ProtectionFlags::ACTION));
        let Some(metadata) = usable else { return Ok(None) };
        let mut identity = NamespaceIds { nguid: namespace.nguid, eui64: namespace.eui64, uuid: None };
        // Optional before NVMe 1.3.
        match self.identify(Cns::NamespaceDescriptors, nsid).await {
            Ok(data) => {
                for descriptor in NamespaceDescriptor::decode_list(page(&data)).unwrap_or_default() {
                    match descriptor {
                        NamespaceDescriptor::Uuid(uuid) => identity.uuid = Some(Uuid::from_bytes(uuid)),
                        NamespaceDescriptor::Nguid(nguid) => identity.nguid = nguid,
                        NamespaceDescriptor::Eui64(eui64) => identity.eui64 = eui64,
                        NamespaceDescriptor::Csi(_) => {}
                    }
                }
            }
            Err(AdminError::Status(status)) if is_unsupported(status) || status.is_do_not_retry() => {}
            // Without them another namespace could pass for this one.
            Err(error) => return Err(error),
        }
        let limit = dma::BUFFER_BYTES_MAX as u32;
        let transfer_max_bytes = match controller.mdts {
            0 => limit,
            mdts => 1u32.checked_shl(u32::from(mdts) + PAGE_LOG2).unwrap_or(limit).min(limit),
        };
        let block_size = 1u32 << format.data_log2;
        // PRP entries are dword-aligned, and need page boundaries between slices (Base 2.0, section 4.1.1);
        // over TCP slices are copied into the stream.
        let (alignment, virtual_boundary) = match controller.sgls & 3 != 0 {
            _ if self.controller.is_fabrics() => (1, 1),
            true => (4, 1),
            false => (4, 1 << PAGE_LOG2),
        };
        Ok(Some(ScannedNamespace {
            nsid,
            identity,
            block_size,
            metadata,
            transfer_max_bytes: transfer_max_bytes.max(block_size),
            alignment,
            virtual_boundary,
            atomic: AtomicUnit::of(controller, &namespace, transfer_max_bytes / block_size),
            unmap: controller.oncs & oncs::DATASET_MANAGEMENT != 0,
            write_zeroes: controller.oncs & oncs::WRITE_ZEROES != 0,
            write_uncorrectable: controller.oncs & oncs::WRITE_UNCORRECTABLE != 0,
            identify: Arc::new(namespace),
        }))
    }

    /// Reads the ANA log page; `None` if the controller does not report ANA.
    pub(crate) async fn ana(&mut self, controller: &IdentifyController) -> Result<AnaGroups, AdminError> {
        if controller.cmic & identify::cmic::ANA == 0 {
            return Ok(None);
        }
        // Groups without their namespace lists: Identify Namespace has the group of each.
        let groups = u64::from(controller.nanagrpid.max(1));
        let whole = AnaLog::HEADER_SIZE as u64 + groups * AnaLog::GROUP_SIZE as u64;
        let length_bytes = whole.clamp(64, ANA_BYTES_MAX).next_multiple_of(4);
        let view = GetLogPage {
            lid: LogId::Ana.to_wire(),
            specific: AnaLog::GROUPS_ONLY,
            length_bytes,
            ..GetLogPage::default()
        };
        let answer = self.read(view.to_sqe(wire_nvme::NSID_ALL), length_bytes as usize).await?;
        let log = AnaLog::decode(&answer.data).map_err(AdminError::InvalidResponse)?;
        Ok(Some(log.groups.into_iter().map(|group| (group.id, group.state)).collect()))
    }

    /// Reads the Changed Namespace List, which re-enables its asynchronous event.
    pub(crate) async fn changed_namespaces(&mut self) -> Result<ChangedNamespaces, AdminError> {
        let lid = LogId::ChangedNamespaces.to_wire();
        let view = GetLogPage { lid, length_bytes: identify::SIZE as u64, ..GetLogPage::default() };
        match self.read(view.to_sqe(wire_nvme::NSID_ALL), identify::SIZE).await {
            Ok(answer) => Ok(ChangedNamespaces::of_log(page(&answer.data))),
            Err(AdminError::Status(_)) => Ok(ChangedNamespaces::All),
            Err(error) => Err(error),
        }
    }

    /// Reads a log page, which re-enables its asynchronous event.
    pub(crate) async fn acknowledge(&mut self, lid: u8, length: u64) -> Result<(), AdminError> {
        let view = GetLogPage { lid, length_bytes: length, ..GetLogPage::default() };
        match self.read(view.to_sqe(wire_nvme::NSID_ALL), length as usize).await {
            // If the page cannot be read, the event stays masked, which is harmless.
            Ok(_) | Err(AdminError::Status(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn injected_reply(status: Status, length: usize) -> AdminReply {
    match status.is_success() {
        true => Ok(AdminOutput { result: 0, data: vec![0; length] }),
        false => Err(AdminError::Status(status)),
    }
}

/// The state of an ANA group; optimized if it is not reported.
pub(crate) fn ana_state_of(groups: Option<&[(u32, AnaState)]>, anagrpid: u32) -> AnaState {
    let group = groups.and_then(|groups| groups.iter().find(|(id, _)| *id == anagrpid));
    group.map_or(AnaState::Optimized, |(_, state)| *state)
}

/// Whether the status means that the controller does not support the command.
pub(crate) fn is_unsupported(status: Status) -> bool {
    status.same_code(Status::INVALID_OPCODE) || status.same_code(Status::INVALID_FIELD)
}

fn page(data: &[u8]) -> &[u8; identify::SIZE] {
    data.first_chunk().expect("a page was requested")
}
