//! The handle to an attached controller.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use reactor::Core;
use wire_nvme::admin::{GetFeatures, GetLogPage, Identify, SetFeatures};
use wire_nvme::identify::{self, Cns, ControllerList, Csi, IdentifyController, NamespaceList};
use wire_nvme::log::HealthLog;
use wire_nvme::manage::{FormatNvm, NamespaceAttachment, NewNamespace};
use wire_nvme::registers::NvmeVersion;
use wire_nvme::{NSID_ALL, Sqe};

use crate::device::NvmeDevice;
use crate::error::{AdminError, ControllerFailure, NvmeOpenError};
use crate::handle::ControllerHandle;
use crate::namespace_info::NamespaceInfo;
use crate::options::Options;
use crate::owner;
use crate::qpair::QueuePair;
use crate::registry::{self, AttachLookup};
use crate::shared::{
    AdminData, AdminOutput, NvmeEvent, Oneshot, OwnerRequest, ResetKind, RunState, SharedController,
};
use crate::uri::Uri;

/// A handle to a controller with a memory-based transport: PCI Express or vfio-user.
///
/// The core that attaches the controller owns its admin queue. A handle can be cloned and sent to any thread; its
/// methods send a request to the owner core and wait for the response. I/O goes through [`QueuePair`]s, one per
/// core, or through [`Namespace`](crate::Namespace)s, which own one each. When the last handle, queue pair and
/// namespace is dropped, the controller is shut down.
#[derive(Clone)]
pub struct Controller(Arc<ControllerHandle>);

/// Interval at which a core checks whether another core has finished attaching the controller.
const ATTACH_POLL_NS: u64 = 1_000_000;

impl Controller {
    fn new(shared: Arc<SharedController>) -> Controller {
        Controller(Arc::new(ControllerHandle { shared }))
    }

    pub(crate) fn handle(&self) -> &Arc<ControllerHandle> {
        &self.0
    }

    /// Attaches the controller that a URI names, or returns a handle to it if this process has attached it already.
    ///
    /// The first core to attach the controller owns its admin queue: its reactor must run for as long as the
    /// controller is in use.
    pub async fn attach(core: &Core, uri: &Uri, options: &Options) -> Result<Controller, NvmeOpenError> {
        let key = uri.controller();
        let deadline_ns = core.now_ns() + options.timeout_ns;
        let claim = loop {
            match registry::find(&key) {
                AttachLookup::Attached(handle) => return Ok(Controller(handle)),
                AttachLookup::Vacant(claim) => break claim,
                AttachLookup::Busy if core.now_ns() > deadline_ns => {
                    return Err(NvmeOpenError::Timeout("attaching on another core"));
                }
                AttachLookup::Busy => core.sleep_ns(ATTACH_POLL_NS).await,
            }
        };
        let device = crate::transport::open(uri, core, options)?;
        let controller = Controller::new(owner::attach(core, device, options).await?);
        controller.0.shared.mappings().retain(Box::new(claim.attached_key()));
        claim.attached(Arc::downgrade(&controller.0));
        Ok(controller)
    }

    /// Attaches a controller through a caller-provided device.
    pub async fn attach_device(
        core: &Core,
        device: Box<dyn NvmeDevice>,
        options: &Options,
    ) -> Result<Controller, NvmeOpenError> {
        Ok(Controller::new(owner::attach(core, device, options).await?))
    }

    /// Creates an I/O queue pair for this core, which need not be the owner.
    pub async fn qpair(&self, core: &Core, options: &Options) -> Result<QueuePair, NvmeOpenError> {
        QueuePair::open(core, &self.0, options).await
    }

    /// The Identify Controller data structure.
    pub fn identity(&self) -> &IdentifyController {
        &self.0.shared.params().identity
    }

    /// The specification version that the controller reports (VS).
    pub fn version(&self) -> NvmeVersion {
        self.0.shared.params().version
    }

    /// Most I/O queue pairs at a time.
    pub fn queues_max(&self) -> u16 {
        self.0.shared.params().queues_max
    }

    /// Number of I/O queue pairs that can still be opened. A dropped queue pair counts once its deletion completed.
    pub fn queues_left(&self) -> usize {
        self.0.shared.free_qids()
    }

    /// Whether shadow doorbells are in use.
    pub fn has_shadow_doorbells(&self) -> bool {
        self.0.shared.params().shadow.is_some()
    }

    /// Device name, as in the URI.
    pub fn name(&self) -> String {
        self.0.shared.device().name()
    }

    /// Why the controller can no longer be used, if it has failed.
    pub fn failure(&self) -> Option<ControllerFailure> {
        self.0.shared.failure().filter(|_| self.0.shared.state_word().state() == RunState::Dead)
    }

    /// Completed controller resets.
    pub fn resets(&self) -> u64 {
        self.0.shared.resets.load(Ordering::Relaxed)
    }

    /// I/O commands for which an abort was requested after a timeout.
    pub fn aborts(&self) -> u64 {
        self.0.shared.aborts.load(Ordering::Relaxed)
    }

    /// Takes the oldest pending asynchronous event. At most 64 are pending; then the oldest is dropped.
    pub fn next_event(&self) -> Option<NvmeEvent> {
        self.0.shared.pop_event()
    }

    /// Executes any admin command: raw passthrough. Data is copied through a buffer of the owner, 1 MiB at most.
    ///
    /// The driver fills in the command identifier and the data pointer only. Commands that create or delete queues,
    /// Doorbell Buffer Config and Asynchronous Event Request are rejected: the driver issues them itself.
    pub async fn admin(&self, sqe: Sqe, data: AdminData) -> Result<AdminOutput, AdminError> {
        use wire_nvme::opcode::AdminOpcode as Op;
        let reserved =
            [Op::CreateIoCq, Op::CreateIoSq, Op::DeleteIoCq, Op::DeleteIoSq, Op::DoorbellBufferConfig];
        if reserved.iter().any(|op| op.to_wire() == sqe.opcode)
            || sqe.opcode == Op::AsyncEventRequest.to_wire()
        {
            return Err(AdminError::Status(block_io::Status::INVALID_OPCODE.do_not_retry()));
        }
        self.send_request(|reply| OwnerRequest::Admin { sqe: Sqe { flags: 0, ..sqe }, data, reply }).await?
    }

    async fn send_request<T>(
        &self,
        make: impl FnOnce(Arc<Oneshot<T>>) -> OwnerRequest,
    ) -> Result<T, AdminError> {
        let shared = &self.0.shared;
        let reply = Oneshot::new();
        if shared.state_word().state() == RunState::Dead {
            return Err(AdminError::Failure(shared.failure().unwrap_or(ControllerFailure::Detached)));
        }
        shared.requests.send(make(reply.clone())).map_err(|_| AdminError::Busy)?;
        let mut answer = std::pin::pin!(reply.receive());
        std::future::poll_fn(|context| match answer.as_mut().poll(context) {
            // The owner's reactor has ended and dropped the request.
            std::task::Poll::Pending if Arc::strong_count(&reply) == 1 => {
                let failure = shared.failure().unwrap_or(ControllerFailure::Detached);
                std::task::Poll::Ready(Err(AdminError::Failure(failure)))
            }
            poll => poll.map(Ok),
        })
        .await
    }

    /// Executes Identify and returns the 4096-byte data structure.
    pub async fn identify(&self, view: &Identify, nsid: u32) -> Result<Vec<u8>, AdminError> {
        Ok(self.admin(view.to_sqe(nsid), AdminData::In(identify::SIZE)).await?.data)
    }

    /// Active namespaces in ascending order of identifier.
    pub async fn active_namespaces(&self) -> Result<Vec<u32>, AdminError> {
        let mut all = Vec::new();
        loop {
            let view = Identify { cns: Cns::ActiveNamespaces.to_wire(), ..Identify::default() };
            let after = all.last().copied().unwrap_or(0);
            let data = self.identify(&view, after).await?;
            let page = owner::identify_page(&data);
            let list = NamespaceList::decode(page).map_err(AdminError::InvalidResponse)?;
            let full = list.0.len() == identify::NAMESPACE_LIST_MAX;
            // A list that does not ascend beyond the requested identifier would loop forever.
            if list.0.first().is_some_and(|first| *first <= after) {
                return Err(AdminError::Failure(ControllerFailure::InvalidResponse(
                    "Identify (active namespaces)",
                )));
            }
            all.extend(list.0);
            if !full {
                return Ok(all);
            }
        }
    }

    /// Properties of a namespace. Once known, they are updated by the controller's asynchronous events.
    pub async fn namespace(&self, nsid: u32) -> Result<NamespaceInfo, NvmeOpenError> {
        let shared = &self.0.shared;
        if nsid == 0 || nsid == NSID_ALL {
            return Err(NvmeOpenError::NoNamespace(nsid));
        }
        if let Some(info) = shared.namespace(nsid) {
            return Ok(info);
        }
        let answer = self.send_request(|reply| OwnerRequest::IdentifyNamespace { nsid, reply }).await;
        answer.and_then(|inner| inner).map_err(|error| error.while_opening("Identify Namespace"))?;
        match (shared.namespace(nsid), shared.unsupported_reason(nsid)) {
            (Some(info), _) => Ok(info),
            (None, Some(why)) => Err(NvmeOpenError::UnsupportedFormat(nsid, why)),
            (None, None) => Err(NvmeOpenError::NoNamespace(nsid)),
        }
    }

    /// Executes Get Log Page, in several commands if the page is longer than 64 KiB.
    pub async fn log_page(&self, view: &GetLogPage, nsid: u32) -> Result<Vec<u8>, AdminError> {
        let mut data = Vec::new();
        let length = usize::try_from(view.length_bytes).unwrap_or(usize::MAX);
        if length == 0 || !length.is_multiple_of(4) || length > LOG_BYTES_MAX {
            return Err(AdminError::InvalidLength(length));
        }
        while data.len() < length {
            let step = (length - data.len()).min(LOG_CHUNK_BYTES);
            let part = GetLogPage {
                length_bytes: step as u64,
                offset: view.offset + if view.offset_is_index { 0 } else { data.len() as u64 },
                ..*view
            };
            data.extend(self.admin(part.to_sqe(nsid), AdminData::In(step)).await?.data);
        }
        Ok(data)
    }

    /// The SMART / Health Information log page.
    pub async fn health(&self) -> Result<HealthLog, AdminError> {
        let view = GetLogPage { lid: 0x02, length_bytes: 512, ..GetLogPage::default() };
        let data = self.log_page(&view, NSID_ALL).await?;
        let page = data.first_chunk().expect("the log page has 512 bytes");
        Ok(HealthLog::decode(page))
    }

    /// Executes Get Features; the low dword of the result is the value.
    pub async fn features(
        &self,
        view: &GetFeatures,
        nsid: u32,
        data: AdminData,
    ) -> Result<AdminOutput, AdminError> {
        self.admin(view.to_sqe(nsid), data).await
    }

    /// Executes Set Features.
    pub async fn set_features(
        &self,
        view: &SetFeatures,
        nsid: u32,
        data: AdminData,
    ) -> Result<AdminOutput, AdminError> {
        self.admin(view.to_sqe(nsid), data).await
    }

    /// Executes Format NVM, then identifies the namespace again.
    pub async fn format(&self, view: &FormatNvm, nsid: u32) -> Result<(), AdminError> {
        self.admin(view.to_sqe(nsid), AdminData::None).await?;
        self.refresh(nsid).await
    }

    /// Creates a namespace and returns its identifier. It is not attached to any controller yet.
    pub async fn create_namespace(&self, new: &NewNamespace, csi: Csi) -> Result<u32, AdminError> {
        let mut data = [0; identify::SIZE];
        new.encode(&mut data);
        let answer = self.admin(NewNamespace::to_create_sqe(csi), AdminData::Out(data.to_vec())).await?;
        Ok(answer.result as u32)
    }

    /// Deletes a namespace.
    pub async fn delete_namespace(&self, nsid: u32) -> Result<(), AdminError> {
        self.admin(NewNamespace::to_delete_sqe(nsid), AdminData::None).await?;
        self.refresh(nsid).await
    }

    /// Attaches a namespace to controllers, or detaches it from them.
    pub async fn attach_namespace(
        &self,
        nsid: u32,
        controllers: &[u16],
        attach: bool,
    ) -> Result<(), AdminError> {
        if controllers.is_empty() || controllers.len() > identify::CONTROLLER_LIST_MAX {
            return Err(AdminError::InvalidLength(controllers.len()));
        }
        let mut data = [0; identify::SIZE];
        ControllerList(controllers.to_vec()).encode(&mut data);
        self.admin(NamespaceAttachment { attach }.to_sqe(nsid), AdminData::Out(data.to_vec())).await?;
        self.refresh(nsid).await
    }

    /// Identifies a namespace again, if it is known.
    pub(crate) async fn refresh(&self, nsid: u32) -> Result<(), AdminError> {
        if self.0.shared.namespaces().contains(&nsid) {
            self.send_request(|reply| OwnerRequest::IdentifyNamespace { nsid, reply }).await??;
            self.0.shared.notify_namespace_change();
        }
        Ok(())
    }

    /// Resets the controller by CC.EN. Commands in flight complete with
    /// [`Status::ABORTED_BY_HOST`](block_io::Status::ABORTED_BY_HOST); queue pairs reconnect by themselves.
    pub async fn reset(&self) -> Result<(), ControllerFailure> {
        self.reset_by(ResetKind::Controller).await
    }

    /// Resets the NVM subsystem (NSSR) if the controller supports it, otherwise the controller by CC.EN.
    pub async fn reset_subsystem(&self) -> Result<(), ControllerFailure> {
        self.reset_by(ResetKind::Subsystem).await
    }

    /// Resets the function if the transport supports it, otherwise the controller by CC.EN.
    pub async fn reset_function(&self) -> Result<(), ControllerFailure> {
        self.reset_by(ResetKind::Function).await
    }

    async fn reset_by(&self, kind: ResetKind) -> Result<(), ControllerFailure> {
        match self.send_request(|reply| OwnerRequest::Reset { kind, reply: Some(reply) }).await {
            Ok(outcome) => outcome,
            Err(AdminError::Failure(failure)) => Err(failure),
            Err(_) => Err(ControllerFailure::ResetFailed),
        }
    }
}

/// Most bytes of one log page: well above the largest that controllers keep.
const LOG_BYTES_MAX: usize = 64 << 20;
/// Bytes read by one Get Log Page command.
const LOG_CHUNK_BYTES: usize = 64 << 10;
