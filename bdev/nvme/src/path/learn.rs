//! Finding out what a controller offers: namespaces, their identities, their ANA states.

use std::sync::Arc;

use nvme::{AdminData, AdminError, Association, Controller};
use reactor::Core;
use ring::Status;
use uuid::Uuid;
use wire_nvme::Sqe;
use wire_nvme::admin::{GetLogPage, Identify};
use wire_nvme::identify::{
    self, Cns, IdentifyController, IdentifyNamespace, NAMESPACE_LIST_MAX, NamespaceDescriptor, NamespaceList,
    oncs,
};
use wire_nvme::log::{AnaLog, AnaState, LogId};

use super::{Answer, Path};
use crate::namespace::{Identity, Learned};

/// Most namespaces that are looked at on one controller.
const NAMESPACES_MAX: usize = 4096;
/// Most bytes of an ANA log page.
const ANA_BYTES_MAX: u64 = 1 << 20;

/// The ANA state of each group, where it is reported.
pub(crate) type Groups = Option<Vec<(u32, AnaState)>>;

/// Whoever executes a path's admin commands.
pub(super) struct Admin<'a> {
    way: Way<'a>,
    path: &'a Path,
    core: &'a Core,
}

enum Way<'a> {
    Tcp(&'a mut Association),
    Direct(&'a Controller),
}

impl<'a> Admin<'a> {
    pub(super) fn tcp(core: &'a Core, path: &'a Path, association: &'a mut Association) -> Admin<'a> {
        Admin { way: Way::Tcp(association), path, core }
    }

    pub(super) fn direct(core: &'a Core, path: &'a Path, controller: &'a Controller) -> Admin<'a> {
        Admin { way: Way::Direct(controller), path, core }
    }

    /// Executes a command, and returns its result and data.
    pub(super) async fn execute(&mut self, mut sqe: Sqe, data: AdminData) -> Answer {
        let length = if let AdminData::In(length) = data { length } else { 0 };
        if let Some(injected) = self.path.take_admin_fault(sqe.opcode, false) {
            self.path.unless_stopped(self.core.sleep_ns(injected.delay_ns)).await;
            return injected_answer(injected.status, length);
        }
        let answer = match &mut self.way {
            Way::Tcp(association) => {
                // Over fabrics there are SGLs alone, whatever a command that is passed through says.
                sqe.flags = Sqe::FLAGS_SGL;
                match data {
                    AdminData::None => association.command(sqe).await.map(|result| (result, Vec::new())),
                    AdminData::In(length) => association.read(sqe, length).await,
                    AdminData::Out(bytes) => {
                        association.write(sqe, &bytes).await.map(|result| (result, Vec::new()))
                    }
                }
            }
            Way::Direct(controller) => {
                controller.admin(sqe, data).await.map(|answer| (answer.result, answer.data))
            }
        };
        match answer.is_ok().then(|| self.path.take_admin_fault(sqe.opcode, true)).flatten() {
            Some(injected) => injected_answer(injected.status, length),
            None => answer,
        }
    }

    async fn read(&mut self, sqe: Sqe, length: usize) -> Answer {
        self.execute(sqe, AdminData::In(length)).await
    }

    async fn identify(&mut self, cns: Cns, nsid: u32) -> Result<Vec<u8>, AdminError> {
        let view = Identify { cns: cns.to_wire(), ..Identify::default() };
        Ok(self.read(view.to_sqe(nsid), identify::SIZE).await?.1)
    }

    /// The namespaces that are active and can be used.
    pub(super) async fn namespaces(
        &mut self,
        controller: &IdentifyController,
        page_log2: u32,
    ) -> Result<Vec<Learned>, AdminError> {
        let mut nsids: Vec<u32> = Vec::new();
        loop {
            let after = nsids.last().copied().unwrap_or(0);
            let data = self.identify(Cns::ActiveNamespaces, after).await?;
            let list = NamespaceList::decode(page(&data)).map_err(AdminError::Answer)?.0;
            let full = list.len() == NAMESPACE_LIST_MAX;
            nsids.extend(list.into_iter().filter(|nsid| *nsid > after));
            if !full || nsids.len() >= NAMESPACES_MAX {
                break;
            }
        }
        nsids.truncate(NAMESPACES_MAX);
        let mut namespaces = Vec::new();
        for nsid in nsids {
            namespaces.extend(self.namespace(nsid, controller, page_log2).await?);
        }
        Ok(namespaces)
    }

    async fn namespace(
        &mut self,
        nsid: u32,
        controller: &IdentifyController,
        page_log2: u32,
    ) -> Result<Option<Learned>, AdminError> {
        let data = self.identify(Cns::Namespace, nsid).await?;
        let Ok(namespace) = IdentifyNamespace::decode(page(&data)) else { return Ok(None) };
        let format = namespace.formats.get(usize::from(namespace.format));
        let usable = format.filter(|format| {
            (9..=16).contains(&format.data_log2) && (format.metadata_bytes == 0 || format.metadata_bytes == 8)
        });
        let (Some(format), true) = (usable, namespace.nsze > 0) else { return Ok(None) };
        let mut identity = Identity { nguid: namespace.nguid, eui64: namespace.eui64, uuid: None };
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
            Err(AdminError::Status(_)) => {}
            Err(error) => return Err(error),
        }
        let most = memory::BUFFER_BYTES_MAX as u32;
        let transfer_max_bytes = match controller.mdts {
            0 => most,
            mdts => 1u32.checked_shl(u32::from(mdts) + page_log2).unwrap_or(most).min(most),
        };
        let block_size = 1u32 << format.data_log2;
        Ok(Some(Learned {
            nsid,
            identity,
            block_size,
            transfer_max_bytes: transfer_max_bytes.max(block_size),
            unmap: controller.oncs & oncs::DATASET_MANAGEMENT != 0,
            write_zeroes: controller.oncs & oncs::WRITE_ZEROES != 0,
            write_uncorrectable: controller.oncs & oncs::WRITE_UNCORRECTABLE != 0,
            identify: Arc::new(namespace),
        }))
    }

    /// The ANA state of every group; none where the controller does not report it.
    pub(super) async fn ana(&mut self, controller: &IdentifyController) -> Result<Groups, AdminError> {
        if controller.cmic & identify::cmic::ANA == 0 {
            return Ok(None);
        }
        // Groups without their namespaces: those say themselves which group they are in.
        let groups = u64::from(controller.nanagrpid.max(1));
        let whole = AnaLog::HEADER_SIZE as u64 + groups * AnaLog::GROUP_SIZE as u64;
        let length_bytes = whole.clamp(64, ANA_BYTES_MAX).next_multiple_of(4);
        let view = GetLogPage {
            lid: LogId::Ana.to_wire(),
            specific: AnaLog::GROUPS_ONLY,
            length_bytes,
            ..GetLogPage::default()
        };
        let (_, data) = self.read(view.to_sqe(wire_nvme::NSID_ALL), length_bytes as usize).await?;
        let log = AnaLog::decode(&data).map_err(AdminError::Answer)?;
        Ok(Some(log.groups.into_iter().map(|group| (group.id, group.state)).collect()))
    }

    /// Reads a log page, and so lets its event come again.
    pub(super) async fn acknowledge(&mut self, lid: u8, length: u64) -> Result<(), AdminError> {
        let view = GetLogPage { lid, length_bytes: length, ..GetLogPage::default() };
        match self.read(view.to_sqe(wire_nvme::NSID_ALL), length as usize).await {
            // A page that cannot be read leaves the event masked, which harms nobody.
            Ok(_) | Err(AdminError::Status(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn injected_answer(status: Status, length: usize) -> Answer {
    if status.is_success() { Ok((0, vec![0; length])) } else { Err(AdminError::Status(status)) }
}

/// The state of a namespace's group; optimized where nothing is said.
pub(crate) fn state_of(groups: Option<&[(u32, AnaState)]>, anagrpid: u32) -> AnaState {
    let group = groups.and_then(|groups| groups.iter().find(|(id, _)| *id == anagrpid));
    group.map_or(AnaState::Optimized, |(_, state)| *state)
}

/// Whether a status says that the command is not one of the controller's.
pub(super) fn is_unknown(status: Status) -> bool {
    status.same_code(Status::INVALID_OPCODE) || status.same_code(Status::INVALID_FIELD)
}

fn page(data: &[u8]) -> &[u8; identify::SIZE] {
    data.first_chunk().expect("a page was asked for")
}
