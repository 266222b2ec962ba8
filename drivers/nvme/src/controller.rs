//! A controller, for everybody who uses it.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use reactor::Core;
use wire_nvme::admin::{GetFeatures, GetLogPage, Identify, SetFeatures};
use wire_nvme::identify::{self, Cns, ControllerList, Csi, IdentifyController, NamespaceList};
use wire_nvme::log::HealthLog;
use wire_nvme::manage::{Attachment, FormatNvm, NewNamespace};
use wire_nvme::registers::Version;
use wire_nvme::{NSID_ALL, Sqe};

use crate::device::Device;
use crate::error::{AdminError, Failure, OpenError};
use crate::namespace_info::NamespaceInfo;
use crate::options::Options;
use crate::owner;
use crate::qpair::QueuePair;
use crate::registry::{self, Found};
use crate::shared::{AdminAnswer, AdminData, Ask, Event, Reply, ResetKind, Shared, State};
use crate::uri::Uri;

/// A controller in memory: attached through PCI Express or vfio-user.
///
/// The admin queue lives on the core that attached it, and this is how any thread asks that core: it can be
/// cloned and sent. I/O goes through [`QueuePair`]s, one a core, or through
/// [`Namespace`](crate::Namespace)s, which have one each. When the last of all is gone the controller is
/// shut down.
#[derive(Clone)]
pub struct Controller(Arc<Handle>);

/// What keeps a controller attached.
pub(crate) struct Handle {
    pub(crate) shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.detach.store(true, Ordering::Release);
        // The flag says it too: a full mailbox is looked at soon.
        let _ = self.shared.asks.send(Ask::Detach);
    }
}

/// How often somebody who waits for another core's attaching looks again.
const LOOK_NS: u64 = 1_000_000;

impl Controller {
    pub(crate) fn new(shared: Arc<Shared>) -> Controller {
        Controller(Arc::new(Handle { shared }))
    }

    pub(crate) fn from_handle(handle: Arc<Handle>) -> Controller {
        Controller(handle)
    }

    pub(crate) fn handle(&self) -> &Arc<Handle> {
        &self.0
    }

    /// Attaches the controller that a URI names, or finds the one that this process has attached.
    ///
    /// The first core to attach it owns its admin queue, for as long as anybody uses the controller: its
    /// reactor must run.
    pub async fn attach(core: &Core, uri: &Uri, options: &Options) -> Result<Controller, OpenError> {
        let key = uri.controller();
        let deadline_ns = sys::clock::now_ns() + options.timeout_ns;
        let claim = loop {
            match registry::find(&key) {
                Found::Here(controller) => return Ok(controller),
                Found::Free(claim) => break claim,
                Found::Busy if sys::clock::now_ns() > deadline_ns => {
                    return Err(OpenError::Timeout("attaching on another core"));
                }
                Found::Busy => core.sleep_ns(LOOK_NS).await,
            }
        };
        let device = crate::transport::open(uri, core, options)?;
        let controller = owner::attach(core, device, options).await?;
        let _ = controller.0.shared.key.set(claim.key().to_string());
        claim.attached(Arc::downgrade(&controller.0));
        Ok(controller)
    }

    /// Attaches a controller that is reached through a device of the caller's.
    pub async fn attach_device(
        core: &Core,
        device: Box<dyn Device>,
        options: &Options,
    ) -> Result<Controller, OpenError> {
        owner::attach(core, device, options).await
    }

    /// Makes an I/O queue pair for this core, which need not be the owner's.
    pub async fn qpair(&self, core: &Core, options: &Options) -> Result<QueuePair, OpenError> {
        QueuePair::open(core, &self.0, options).await
    }

    /// What Identify Controller said.
    pub fn identity(&self) -> &IdentifyController {
        &self.0.shared.facts().identity
    }

    /// The version of the specification that the controller follows.
    pub fn version(&self) -> Version {
        self.0.shared.facts().version
    }

    /// I/O queue pairs that can be at a time.
    pub fn queues_max(&self) -> u16 {
        self.0.shared.facts().queues_max
    }

    /// Whether shadow doorbells are in use.
    pub fn has_shadow_doorbells(&self) -> bool {
        self.0.shared.facts().shadow.is_some()
    }

    /// Its name, as the URI has it.
    pub fn name(&self) -> String {
        self.0.shared.device().name()
    }

    /// Why it can no longer be used, if so.
    pub fn failure(&self) -> Option<Failure> {
        self.0.shared.failure().filter(|_| self.0.shared.signal().state() == State::Dead)
    }

    /// Resets that it went through.
    pub fn resets(&self) -> u64 {
        self.0.shared.resets.load(Ordering::Relaxed)
    }

    /// Commands whose abort was asked for because they took too long.
    pub fn aborts(&self) -> u64 {
        self.0.shared.aborts.load(Ordering::Relaxed)
    }

    /// The oldest asynchronous event that nobody has taken yet. Of 64 that wait the oldest is lost.
    pub fn next_event(&self) -> Option<Event> {
        self.0.shared.pop_event()
    }

    /// Any admin command: raw passthrough. Data goes through a buffer of the owner's, 1 MiB at most.
    ///
    /// The command is executed as it is, but for its identifier and data pointer. Commands that create or
    /// delete queues are refused: they are the driver's own.
    pub async fn admin(&self, sqe: Sqe, data: AdminData) -> Result<AdminAnswer, AdminError> {
        use wire_nvme::opcode::AdminOpcode as Op;
        let reserved =
            [Op::CreateIoCq, Op::CreateIoSq, Op::DeleteIoCq, Op::DeleteIoSq, Op::DoorbellBufferConfig];
        if reserved.iter().any(|op| op.to_wire() == sqe.opcode)
            || sqe.opcode == Op::AsyncEventRequest.to_wire()
        {
            return Err(AdminError::Status(ring::Status::INVALID_OPCODE.do_not_retry()));
        }
        self.ask(|reply| Ask::Admin { sqe: Sqe { flags: 0, ..sqe }, data, reply }).await?
    }

    async fn ask<T>(&self, make: impl FnOnce(Arc<Reply<T>>) -> Ask) -> Result<T, AdminError> {
        let shared = &self.0.shared;
        let reply = Reply::new();
        if shared.signal().state() == State::Dead {
            return Err(AdminError::Failure(shared.failure().unwrap_or(Failure::Detached)));
        }
        shared.asks.send(make(reply.clone())).map_err(|_| AdminError::Busy)?;
        let mut answer = std::pin::pin!(reply.take());
        std::future::poll_fn(|context| match answer.as_mut().poll(context) {
            // Whoever would have answered is gone with its reactor.
            std::task::Poll::Pending if Arc::strong_count(&reply) == 1 => {
                let failure = shared.failure().unwrap_or(Failure::Detached);
                std::task::Poll::Ready(Err(AdminError::Failure(failure)))
            }
            poll => poll.map(Ok),
        })
        .await
    }

    /// Identify, any structure.
    pub async fn identify(&self, view: &Identify, nsid: u32) -> Result<Vec<u8>, AdminError> {
        Ok(self.admin(view.to_sqe(nsid), AdminData::In(identify::SIZE)).await?.data)
    }

    /// The namespaces that are active, by rising identifier.
    pub async fn active_namespaces(&self) -> Result<Vec<u32>, AdminError> {
        let mut all = Vec::new();
        loop {
            let view = Identify { cns: Cns::ActiveNamespaces.to_wire(), ..Identify::default() };
            let after = all.last().copied().unwrap_or(0);
            let data = self.identify(&view, after).await?;
            let page = owner_page(&data);
            let list = NamespaceList::decode(page).map_err(AdminError::Answer)?;
            let full = list.0.len() == identify::NAMESPACE_LIST_MAX;
            // A list that does not rise above what was asked for would never end.
            if list.0.first().is_some_and(|first| *first <= after) {
                return Err(AdminError::Failure(Failure::Answer("Identify (active namespaces)")));
            }
            all.extend(list.0);
            if !full {
                return Ok(all);
            }
        }
    }

    /// What a namespace is. Known namespaces are kept up to date by the controller's events.
    pub async fn namespace(&self, nsid: u32) -> Result<NamespaceInfo, OpenError> {
        let shared = &self.0.shared;
        if nsid == 0 || nsid == NSID_ALL {
            return Err(OpenError::NoNamespace(nsid));
        }
        if let Some(info) = shared.namespace(nsid) {
            return Ok(info);
        }
        let answer = self.ask(|reply| Ask::Namespace { nsid, reply }).await;
        answer.and_then(|inner| inner).map_err(|error| owner::opening("Identify Namespace", error))?;
        match (shared.namespace(nsid), shared.refusal(nsid)) {
            (Some(info), _) => Ok(info),
            (None, Some(why)) => Err(OpenError::Format(nsid, why)),
            (None, None) => Err(OpenError::NoNamespace(nsid)),
        }
    }

    /// Get Log Page, in pieces where it is longer than one buffer.
    pub async fn log_page(&self, view: &GetLogPage, nsid: u32) -> Result<Vec<u8>, AdminError> {
        let mut data = Vec::new();
        let length = usize::try_from(view.length_bytes).unwrap_or(usize::MAX);
        if length == 0 || !length.is_multiple_of(4) || length > LOG_BYTES_MAX {
            return Err(AdminError::Length(length));
        }
        while data.len() < length {
            let step = (length - data.len()).min(LOG_STEP_BYTES);
            let part = GetLogPage {
                length_bytes: step as u64,
                offset: view.offset + if view.offset_is_index { 0 } else { data.len() as u64 },
                ..*view
            };
            data.extend(self.admin(part.to_sqe(nsid), AdminData::In(step)).await?.data);
        }
        Ok(data)
    }

    /// The health log.
    pub async fn health(&self) -> Result<HealthLog, AdminError> {
        let view = GetLogPage { lid: 0x02, length_bytes: 512, ..GetLogPage::default() };
        let data = self.log_page(&view, NSID_ALL).await?;
        let page = data.first_chunk().expect("512 bytes were asked for");
        Ok(HealthLog::decode(page))
    }

    /// Get Features; the result's low dword is the value.
    pub async fn features(
        &self,
        view: &GetFeatures,
        nsid: u32,
        data: AdminData,
    ) -> Result<AdminAnswer, AdminError> {
        self.admin(view.to_sqe(nsid), data).await
    }

    /// Set Features.
    pub async fn set_features(
        &self,
        view: &SetFeatures,
        nsid: u32,
        data: AdminData,
    ) -> Result<AdminAnswer, AdminError> {
        self.admin(view.to_sqe(nsid), data).await
    }

    /// Format NVM. What is known of the namespace is learned anew.
    pub async fn format(&self, view: &FormatNvm, nsid: u32) -> Result<(), AdminError> {
        self.admin(view.to_sqe(nsid), AdminData::None).await?;
        self.refresh(nsid).await
    }

    /// Makes a namespace, which is attached to no controller yet; returns its identifier.
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
            return Err(AdminError::Length(controllers.len()));
        }
        let mut data = [0; identify::SIZE];
        ControllerList(controllers.to_vec()).encode(&mut data);
        self.admin(Attachment { attach }.to_sqe(nsid), AdminData::Out(data.to_vec())).await?;
        self.refresh(nsid).await
    }

    async fn refresh(&self, nsid: u32) -> Result<(), AdminError> {
        if self.0.shared.namespaces().contains(&nsid) {
            self.ask(|reply| Ask::Namespace { nsid, reply }).await??;
            self.0.shared.note_change();
        }
        Ok(())
    }

    /// Resets the controller by CC.EN. Commands in flight complete with
    /// [`Status::ABORTED_BY_HOST`](ring::Status::ABORTED_BY_HOST); queue pairs go on by themselves.
    pub async fn reset(&self) -> Result<(), Failure> {
        self.reset_by(ResetKind::Controller).await
    }

    /// Resets the whole NVM subsystem (NSSR), where the controller can; by CC.EN where not.
    pub async fn reset_subsystem(&self) -> Result<(), Failure> {
        self.reset_by(ResetKind::Subsystem).await
    }

    /// Resets the function, where the transport can; by CC.EN where not.
    pub async fn reset_function(&self) -> Result<(), Failure> {
        self.reset_by(ResetKind::Function).await
    }

    async fn reset_by(&self, how: ResetKind) -> Result<(), Failure> {
        match self.ask(|reply| Ask::Reset { how, reply: Some(reply) }).await {
            Ok(outcome) => outcome,
            Err(AdminError::Failure(failure)) => Err(failure),
            Err(_) => Err(Failure::ResetFailed),
        }
    }
}

/// Most bytes of one log page read: the largest that anybody keeps, with room.
const LOG_BYTES_MAX: usize = 64 << 20;
/// Bytes asked for at a time.
const LOG_STEP_BYTES: usize = 64 << 10;

fn owner_page(data: &[u8]) -> &[u8; identify::SIZE] {
    data.first_chunk().expect("Identify data was asked for with a whole page")
}
