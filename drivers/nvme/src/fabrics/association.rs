//! The admin queue of a fabrics controller: an association, to which any core can add I/O queues.
//!
//! An [`Association`] lives on one core, sends Keep Alive commands and receives asynchronous events. Its
//! [`AssociationHandle`] may be sent to any core, where a [`FabricsIoQueue`](super::FabricsIoQueue) is
//! connected.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use block_io::{FabricsStatus, Op, Request, Tag};
use dma::{Buffer, Data};
use nvme_auth::{Concatenation, TlsPsk};
use reactor::{Core, Period, PollResult, Poller};
use wire_nvme::admin::{Identify, SetFeatures};
use wire_nvme::aer::AsyncEvent;
use wire_nvme::fabrics::{CNTLID_DYNAMIC, ConnectResponse, Nqn, PropertyGet, PropertySet};
use wire_nvme::feature::{
    AsyncEventConfiguration, FeatureId, HOST_BEHAVIOR_SIZE, HostBehavior, NumberOfQueues,
};
use wire_nvme::identify::{
    self, Cns, ControllerType, IdentifyController, IdentifyNamespace, NamespaceDescriptor, NvmNamespace,
    ctratt,
};
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::protection::MetadataFormat;
use wire_nvme::registers::{ControllerCapabilities, ControllerConfiguration, ControllerStatus, offset};
use wire_nvme::{Cqe, Sqe};

use super::authentication::{AuthQueue, authenticate};
use super::connect::connect_command;
use super::keep_alive::{KeepAliveAction, KeepAliveTimer};
use super::queue::{CommandData, FabricsQueue, FabricsUri, QueuePurpose};
use crate::error::{AdminError, ControllerFailure, NvmeOpenError};
use crate::host_credentials::HostCredentials;
use crate::options::Options;
use crate::owner::identify_page;
use crate::shared::{AdminData, AdminOutput};

/// Entries of the admin queue, as in Linux.
const ADMIN_DEPTH: u32 = 32;
const TAG_ASYNC_EVENT: Tag = Tag(u64::MAX);
const TAG_KEEP_ALIVE: Tag = Tag(u64::MAX - 1);
/// Most pending events. The controller sends no second event of a type before its log page is read, so that
/// there are at most as many as types.
const EVENTS_MAX: usize = 16;

/// An association of this host with one controller, with its admin queue over the transport `Q`.
///
/// [`open_over`](Self::open_over) connects, enables and identifies the controller. A poller on the
/// association's core receives responses and events and sends Keep Alive commands. Admin commands execute one
/// at a time: each method borrows the association until its command completes. Dropping the association
/// closes its admin connection.
pub struct Association<Q: FabricsQueue> {
    inner: Rc<RefCell<AssociationInner<Q>>>,
    core: Core,
    timeout_ns: u64,
    identity: IdentifyController,
    /// The controller demands authentication.
    authentication_required: bool,
    handle: AssociationHandle<Q::Remote>,
}

/// State that the association and its poller share.
struct AssociationInner<Q: FabricsQueue> {
    queue: Q,
    keep_alive: KeepAliveTimer,
    events: VecDeque<AsyncEvent>,
    /// When to submit the next Asynchronous Event Request; `None` while one is outstanding, before events are
    /// enabled, and after the controller has refused one for good. It waits for room in `events`.
    event_request_due_ns: Option<u64>,
    event_retry_ns: u64,
    /// Response to the command in flight.
    response: Option<(Request<Data>, Cqe)>,
    next_tag: u64,
    /// Deadline of the command or connection step in progress.
    response_deadline_ns: Option<u64>,
    /// The task to wake on a response, an event, a failure or the deadline.
    waker: Option<Waker>,
    closed: bool,
}

struct AssociationPoller<Q: FabricsQueue> {
    inner: Rc<RefCell<AssociationInner<Q>>>,
    name: String,
}

/// A handle to an association, with which any core can connect I/O queues. `R` is where the controller is.
#[derive(Clone)]
pub struct AssociationHandle<R> {
    pub(super) remote: R,
    pub(super) subnqn: Nqn,
    pub(super) options: Options,
    pub(super) cntlid: u16,
    pub(super) entries_max: u32,
    pub(super) capsule_bytes: u32,
    pub(super) mdts: u8,
    pub(super) oncs: u16,
    pub(super) free_qids: FreeQids,
    /// Until when a controller that fell silent may execute commands; 0 while it has not.
    pub(super) quiesced_ns: Arc<AtomicU64>,
    /// [`HostCredentials::generation`] of the keys with which the admin queue has authenticated last.
    pub(super) authenticated_keys: Arc<AtomicU64>,
}

/// Free I/O queue identifiers of an association.
#[derive(Clone, Default)]
pub(super) struct FreeQids(Arc<Mutex<Vec<u16>>>);

impl FreeQids {
    fn new(max: u16) -> FreeQids {
        FreeQids(Arc::new(Mutex::new((1..=max).rev().collect())))
    }

    pub(super) fn alloc(&self) -> Option<u16> {
        sync::lock(&self.0).pop()
    }

    pub(super) fn free(&self, qid: u16) {
        // Reused last, so that the old connection has the most time to close.
        sync::lock(&self.0).insert(0, qid);
    }
}

impl<R> AssociationHandle<R> {
    /// Controller identifier (CNTLID).
    pub fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// Where the controller is.
    pub fn remote(&self) -> &R {
        &self.remote
    }

    /// Number of I/O queues that can still be opened.
    pub fn queues_left(&self) -> usize {
        sync::lock(&self.free_qids.0).len()
    }
}

impl<Q: FabricsQueue> Association<Q> {
    /// Connects to the controller, enables it and identifies it. The namespace of `uri` is ignored.
    ///
    /// `io_queues` is the number of I/O queues requested; discovery controllers have none.
    pub async fn open_over(
        core: &Core,
        uri: &Q::Uri,
        options: &Options,
        io_queues: u16,
    ) -> Result<Association<Q>, NvmeOpenError> {
        let mut remote = Q::resolve(uri)?;
        let mut generation = 0;
        if options.concat {
            let mut plain = Association::<Q>::begin(core, remote.clone(), uri.subnqn(), options)?;
            plain.initialize().await?;
            let psk = plain.concatenate().await?;
            generation = plain.handle.authenticated_keys.load(Ordering::Acquire);
            Q::use_psk(&mut remote, psk)?;
        }
        let mut association = Association::begin(core, remote, uri.subnqn(), options)?;
        association.handle.authenticated_keys.store(generation, Ordering::Release);
        association.initialize().await?;
        association.establish(io_queues).await?;
        Ok(association)
    }

    /// An association whose admin queue is being connected.
    fn begin(
        core: &Core,
        remote: Q::Remote,
        subnqn: &Nqn,
        options: &Options,
    ) -> Result<Association<Q>, NvmeOpenError> {
        let queue = Q::connect(core, &remote, ADMIN_DEPTH, QueuePurpose::Admin, options)?;
        let keep_alive = KeepAliveTimer::new(u64::from(options.keep_alive_ms) * 1_000_000);
        let quiesced_ns = keep_alive.quiesced_ns().clone();
        let inner = Rc::new(RefCell::new(AssociationInner {
            queue,
            keep_alive,
            events: VecDeque::new(),
            event_request_due_ns: None,
            event_retry_ns: options.event_retry_ns,
            response: None,
            next_tag: 0,
            response_deadline_ns: None,
            waker: None,
            closed: false,
        }));
        let name = format!("nvme admin {remote}");
        core.add_poller(Box::new(AssociationPoller { inner: inner.clone(), name }), Period::EveryTurn);
        Ok(Association {
            inner,
            core: core.clone(),
            timeout_ns: options.timeout_ns,
            identity: IdentifyController::default(),
            authentication_required: false,
            handle: AssociationHandle {
                remote,
                subnqn: subnqn.clone(),
                options: options.clone(),
                cntlid: 0,
                entries_max: 2,
                capsule_bytes: 0,
                mdts: 0,
                oncs: 0,
                free_qids: FreeQids::default(),
                quiesced_ns,
                authenticated_keys: Arc::default(),
            },
        })
    }

    /// Executes Connect.
    async fn connect(&mut self) -> Result<ConnectResponse, NvmeOpenError> {
        let (sqe, data) =
            connect_command(&self.handle.options, &self.handle.subnqn, 0, ADMIN_DEPTH, CNTLID_DYNAMIC);
        let connected = match self.execute(sqe, None, CommandData::None, &data).await {
            Err(AdminError::Status(status)) => {
                return Err(NvmeOpenError::ConnectRejected(FabricsStatus(status)));
            }
            connected => connected.map_err(|error| error.while_opening("Connect"))?.1.result,
        };
        let connected = ConnectResponse::from_result(connected);
        self.authentication_required = connected.authentication_required;
        Ok(connected)
    }

    /// Authenticates on a connection that serves nothing else (Base 2.1, section 8.3.4.5.9). Returns the key
    /// of TLS with which the host connects anew.
    async fn concatenate(&mut self) -> Result<TlsPsk, NvmeOpenError> {
        self.connect().await?;
        let psk = self.authenticate(Concatenation::NewTlsPsk).await?;
        psk.ok_or(NvmeOpenError::InvalidArgument("the authentication has generated no key of TLS"))
    }

    async fn establish(&mut self, io_queues: u16) -> Result<(), NvmeOpenError> {
        let connected = self.connect().await?;
        match self.handle.options.concat {
            // The key of its TLS is that of both ends' authentication.
            true if !connected.authentication_required => {}
            true => self.replace_psk().await?,
            false if connected.secure_channel_required => return Err(NvmeOpenError::SecureChannelRequired),
            false => drop(self.authenticate(Concatenation::None).await?),
        }
        self.handle.cntlid = connected.cntlid;
        self.handle.entries_max = self.enable().await?;
        let data = self.identify(Cns::Controller, 0, "Identify Controller").await?;
        self.identity = IdentifyController::decode(&data)
            .map_err(|error| NvmeOpenError::InvalidResponse("Identify Controller", error))?;
        self.handle.mdts = self.identity.mdts;
        self.handle.oncs = self.identity.oncs;
        self.handle.capsule_bytes =
            self.identity.io_command_capsule_bytes.saturating_sub(wire_nvme::sqe::SIZE as u32);
        let behavior = HostBehavior {
            command_retry: self.identity.crdt_100ms != [0; 3],
            extended_formats: self.identity.ctratt & ctratt::EXTENDED_FORMATS != 0,
        };
        if behavior != HostBehavior::default() {
            self.set_host_behavior(behavior).await?;
        }
        if self.identity.cntrltype != ControllerType::Discovery && io_queues > 0 {
            let count = u32::from(io_queues);
            let wanted = NumberOfQueues { submission: count, completion: count };
            let granted = self.set_feature(FeatureId::NumberOfQueues, wanted.to_wire()).await;
            let granted = granted.map_err(|error| error.while_opening("Set Features (Number of Queues)"))?;
            let granted = NumberOfQueues::from_wire(granted as u32)
                .map_err(|error| NvmeOpenError::InvalidResponse("Set Features (Number of Queues)", error))?;
            let queues = granted.submission.min(granted.completion).min(count);
            self.handle.free_qids = FreeQids::new(queues as u16);
        }
        let (now_ns, quiesce_wait) = (self.core.now_ns(), self.handle.options.quiesce_wait);
        self.inner.borrow_mut().keep_alive.start(&self.identity, quiesce_wait, now_ns);
        Ok(())
    }

    /// Authenticates with the keys of now, which generates the key of TLS for further queues.
    async fn replace_psk(&mut self) -> Result<(), NvmeOpenError> {
        match self.authenticate(Concatenation::ReplaceTlsPsk).await? {
            Some(psk) => Q::use_psk(&mut self.handle.remote, psk),
            None => Ok(()),
        }
    }

    /// Authenticates with the keys of now.
    async fn authenticate(&mut self, how: Concatenation) -> Result<Option<TlsPsk>, NvmeOpenError> {
        let (options, subnqn) = (self.handle.options.clone(), self.handle.subnqn.clone());
        // Before the keys: those that are set meanwhile are newer.
        let generation = options.authentication.as_ref().map_or(0, HostCredentials::generation);
        let psk = authenticate(self, 0, self.authentication_required, &options, &subnqn, how).await?;
        self.handle.authenticated_keys.store(generation, Ordering::Release);
        Ok(psk)
    }

    /// Authenticates anew on the admin queue if the host has got other keys since the last time (Base 2.0,
    /// section 8.13). I/O queues follow when they are polled: a controller may take new keys of a host with
    /// the exchange on the admin queue. Without keys nothing is done.
    ///
    /// # Errors
    /// The ends do not accept each other, or the controller does not answer. The association has failed then.
    pub async fn reauthenticate(&mut self) -> Result<(), NvmeOpenError> {
        let credentials = self.handle.options.authentication.as_ref();
        let known = self.handle.authenticated_keys.load(Ordering::Acquire);
        let has_new_keys = credentials.is_some_and(|one| one.generation() != known && one.keys().is_some());
        if !has_new_keys {
            return Ok(());
        }
        let authenticated = match self.handle.options.concat {
            true => self.replace_psk().await,
            false => self.authenticate(Concatenation::None).await.map(drop),
        };
        let mut inner = self.inner.borrow_mut();
        if authenticated.is_err() && inner.queue.failure().is_none() {
            inner.queue.fail(ControllerFailure::Reauthentication);
        }
        authenticated
    }

    async fn identify(
        &mut self,
        cns: Cns,
        nsid: u32,
        what: &'static str,
    ) -> Result<[u8; identify::SIZE], NvmeOpenError> {
        let view = Identify { cns: cns.to_wire(), cntid: 0, cns_specific: 0, csi: 0, uuid_index: 0 };
        let answer = self.admin(view.to_sqe(nsid), AdminData::In(identify::SIZE)).await;
        Ok(*identify_page(&answer.map_err(|error| error.while_opening(what))?.data))
    }

    /// Executes Identify Namespace.
    pub(super) async fn identify_namespace(&mut self, nsid: u32) -> Result<IdentifyNamespace, NvmeOpenError> {
        let data = self.identify(Cns::Namespace, nsid, "Identify Namespace").await?;
        IdentifyNamespace::decode(&data)
            .map_err(|error| NvmeOpenError::InvalidResponse("Identify Namespace", error))
    }

    /// Tells the controller what the host can deal with.
    async fn set_host_behavior(&mut self, behavior: HostBehavior) -> Result<(), NvmeOpenError> {
        let mut data = [0; HOST_BEHAVIOR_SIZE];
        behavior.encode(&mut data);
        let fid = FeatureId::HostBehavior.to_wire();
        let set = SetFeatures { fid, save: false, cdw11: 0, uuid_index: 0 };
        match self.admin(set.to_sqe(0), AdminData::Out(data.to_vec())).await {
            // Namespaces with other formats can be used all the same, and commands be retried at once.
            Ok(_) | Err(AdminError::Status(_)) => Ok(()),
            Err(error) => Err(error.while_opening("Set Features (Host Behavior Support)")),
        }
    }

    /// The format of the metadata of a namespace with this Identify Namespace data.
    pub(super) async fn metadata_format(
        &mut self,
        nsid: u32,
        identify: &IdentifyNamespace,
    ) -> Result<MetadataFormat, NvmeOpenError> {
        let nvm = match self.identity.ctratt & ctratt::EXTENDED_FORMATS != 0 && identify.dps & 7 != 0 {
            true => Some(self.identify(Cns::CommandSetNamespace, nsid, "Identify Namespace (NVM)").await?),
            false => None,
        };
        let nvm = nvm.map(|nvm| NvmNamespace::decode(&nvm));
        identify.metadata_format(nvm.as_ref()).map_err(|why| NvmeOpenError::UnsupportedFormat(nsid, why))
    }

    /// The UUID of a namespace; `None` if it has none.
    pub(super) async fn namespace_uuid(&mut self, nsid: u32) -> Result<Option<[u8; 16]>, NvmeOpenError> {
        const WHAT: &str = "Identify Namespace (descriptors)";
        let view = Identify { cns: Cns::NamespaceDescriptors.to_wire(), ..Identify::default() };
        let data = match self.admin(view.to_sqe(nsid), AdminData::In(identify::SIZE)).await {
            Ok(answer) => answer.data,
            // Optional before NVMe 1.3.
            Err(AdminError::Status(_)) => return Ok(None),
            Err(error) => return Err(error.while_opening(WHAT)),
        };
        let list = NamespaceDescriptor::decode_list(identify_page(&data))
            .map_err(|error| NvmeOpenError::InvalidResponse(WHAT, error))?;
        Ok(list.into_iter().find_map(|descriptor| match descriptor {
            NamespaceDescriptor::Uuid(uuid) => Some(uuid),
            _ => None,
        }))
    }

    /// The Identify Controller data structure.
    pub fn identity(&self) -> &IdentifyController {
        &self.identity
    }

    /// The handle with which other cores connect I/O queues.
    pub fn handle(&self) -> &AssociationHandle<Q::Remote> {
        &self.handle
    }

    /// Why the association has failed, if it has.
    pub fn failure(&self) -> Option<ControllerFailure> {
        self.inner.borrow().queue.failure()
    }

    /// Executes an admin command; bytes that the controller does not send are zero.
    pub async fn admin(&mut self, sqe: Sqe, data: AdminData) -> Result<AdminOutput, AdminError> {
        let buffer = data.take_buffer(self.core.pool())?;
        // Fabrics support SGLs only.
        let sqe = Sqe { flags: Sqe::FLAGS_SGL, ..sqe };
        let (request, cqe) = self.execute(sqe, buffer, CommandData::of(&data), &[]).await?;
        let data = data.read_back(request.data().and_then(Data::single));
        Ok(AdminOutput { result: cqe.result, data })
    }

    /// Executes a command without data.
    async fn command(&mut self, sqe: Sqe) -> Result<u64, AdminError> {
        Ok(self.execute(sqe, None, CommandData::None, &[]).await?.1.result)
    }

    /// Sets a feature; returns dword 0 of the completion.
    pub async fn set_feature(&mut self, feature: FeatureId, value: u32) -> Result<u64, AdminError> {
        let set = SetFeatures { fid: feature.to_wire(), save: false, cdw11: value, uuid_index: 0 };
        self.command(set.to_sqe(0)).await
    }

    /// Enables the asynchronous events in `mask` that the controller supports, and submits an Asynchronous
    /// Event Request.
    pub async fn enable_events(&mut self, mask: AsyncEventConfiguration) -> Result<(), AdminError> {
        let notices = AsyncEventConfiguration::from_bits_retain(self.identity.oaes);
        let offered = mask & (notices | AsyncEventConfiguration::HEALTH);
        self.set_feature(FeatureId::AsyncEventConfiguration, offered.bits()).await?;
        let mut inner = self.inner.borrow_mut();
        inner.event_request_due_ns = Some(0);
        inner.request_event(0);
        Ok(())
    }

    /// Takes the oldest pending event. The controller masks events of its type until the log page is read.
    pub fn next_event(&mut self) -> Option<AsyncEvent> {
        let mut inner = self.inner.borrow_mut();
        let event = inner.events.pop_front();
        inner.request_event(self.core.now_ns());
        event
    }

    /// Waits until an event is pending or the association has failed.
    pub async fn wait_event(&self) {
        std::future::poll_fn(|context| {
            let mut inner = self.inner.borrow_mut();
            if !inner.events.is_empty() || inner.queue.failure().is_some() {
                return Poll::Ready(());
            }
            inner.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Executes one command and waits for its completion. One command at a time: it borrows the association.
    async fn execute(
        &mut self,
        sqe: Sqe,
        buffer: Option<Buffer>,
        data: CommandData,
        inline_data: &[u8],
    ) -> Result<(Request<Data>, Cqe), AdminError> {
        {
            let mut inner = self.inner.borrow_mut();
            if let Some(failure) = inner.queue.failure() {
                return Err(AdminError::Failure(failure));
            }
            if inner.queue.is_full() {
                return Err(AdminError::Busy);
            }
            inner.response = None;
            inner.response_deadline_ns = Some(self.core.now_ns() + self.timeout_ns);
            let tag = Tag(inner.next_tag);
            inner.next_tag += 1;
            inner.send(tag, sqe, buffer, data, inline_data);
        }
        std::future::poll_fn(|context| {
            let mut inner = self.inner.borrow_mut();
            if let Some((request, cqe)) = inner.response.take() {
                inner.response_deadline_ns = None;
                return Poll::Ready(match (cqe.status, inner.queue.failure()) {
                    // A controller that answers and then closes the connection has answered.
                    (status, _) if status.is_success() => Ok((request, cqe)),
                    (_, Some(failure)) => Err(AdminError::Failure(failure)),
                    (status, None) => Err(AdminError::Status(status)),
                });
            }
            if inner.queue.failure().is_none() && is_due(inner.response_deadline_ns, self.core.now_ns()) {
                // Fail the association: a late response would have no requester.
                inner.fell_silent();
            }
            if let Some(failure) = inner.queue.failure() {
                inner.response_deadline_ns = None;
                return Poll::Ready(Err(AdminError::Failure(failure)));
            }
            inner.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Waits until the transport is ready for commands.
    async fn initialize(&mut self) -> Result<(), NvmeOpenError> {
        let deadline_ns = self.core.now_ns() + self.handle.options.handshake_ns();
        self.inner.borrow_mut().response_deadline_ns = Some(deadline_ns);
        std::future::poll_fn(|context| {
            let mut inner = self.inner.borrow_mut();
            if let Some(failure) = inner.queue.failure() {
                return Poll::Ready(Err(Q::connect_error(&self.handle.remote, failure)));
            }
            if inner.queue.is_ready() {
                inner.response_deadline_ns = None;
                return Poll::Ready(Ok(()));
            }
            if is_due(inner.response_deadline_ns, self.core.now_ns()) {
                return Poll::Ready(Err(NvmeOpenError::Timeout(Q::HANDSHAKE)));
            }
            inner.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    async fn setup_command(&mut self, what: &'static str, sqe: Sqe) -> Result<u64, NvmeOpenError> {
        self.command(sqe).await.map_err(|error| error.while_opening(what))
    }

    /// Enables the controller and returns the most entries that a queue may have.
    async fn enable(&mut self) -> Result<u32, NvmeOpenError> {
        let get = |wide, offset| PropertyGet { wide, offset }.to_sqe();
        let value = self.setup_command("reading CAP", get(true, offset::CAP)).await?;
        let capabilities = ControllerCapabilities::decode(value);
        let configuration = ControllerConfiguration {
            enable: true,
            sqe_log2: 6,
            cqe_log2: 4,
            ..ControllerConfiguration::RESET
        };
        let value = configuration.encode().into();
        let sqe = PropertySet { wide: false, offset: offset::CC, value }.to_sqe();
        self.setup_command("enabling the controller", sqe).await?;
        let timeout_ns = u64::from(capabilities.ready_timeout_500ms.max(1)) * 500_000_000;
        let deadline_ns = self.core.now_ns() + timeout_ns;
        loop {
            let value = self.setup_command("reading CSTS", get(false, offset::CSTS)).await?;
            let status = ControllerStatus::decode(value as u32);
            let status = status.map_err(|error| NvmeOpenError::InvalidResponse("CSTS", error))?;
            if status.fatal {
                return Err(ControllerFailure::Fatal.into());
            }
            if status.ready {
                return Ok(capabilities.queue_entries_max);
            }
            if self.core.now_ns() > deadline_ns {
                return Err(NvmeOpenError::Timeout("enabling the controller"));
            }
            // CSTS must be polled; the specification defines no event for it.
            self.core.sleep_ns(1_000_000).await;
        }
    }
}

impl<Q: FabricsQueue> AuthQueue for Association<Q> {
    async fn send(&mut self, sqe: Sqe, message: &[u8]) -> Result<(), NvmeOpenError> {
        let sent = self.execute(sqe, None, CommandData::None, message).await;
        sent.map(drop).map_err(|error| error.while_opening("Authentication Send"))
    }

    async fn receive(&mut self, sqe: Sqe, bytes: usize) -> Result<Vec<u8>, NvmeOpenError> {
        let received = self.admin(sqe, AdminData::In(bytes)).await;
        received.map(|answer| answer.data).map_err(|error| error.while_opening("Authentication Receive"))
    }
}

impl<Q: FabricsQueue> Drop for Association<Q> {
    fn drop(&mut self) {
        let mut inner = self.inner.borrow_mut();
        if inner.queue.failure().is_none() {
            let is_silent = inner.keep_alive.is_unanswered();
            inner.keep_alive.stop(is_silent);
        }
        inner.closed = true;
    }
}

impl<Q: FabricsQueue> Poller for AssociationPoller<Q> {
    fn name(&self) -> &str {
        &self.name
    }

    fn poll(&mut self, now_ns: u64) -> PollResult {
        let mut inner = self.inner.borrow_mut();
        if inner.closed {
            return PollResult::Finished;
        }
        inner.poll(now_ns);
        PollResult::Idle
    }

    fn deadline(&self) -> Option<u64> {
        let inner = self.inner.borrow();
        if inner.closed { Some(0) } else { inner.deadline_ns() }
    }
}

fn is_due(at_ns: Option<u64>, now_ns: u64) -> bool {
    at_ns.is_some_and(|at_ns| now_ns >= at_ns)
}

impl<Q: FabricsQueue> AssociationInner<Q> {
    /// Processes what was received and sends Keep Alive when it is due.
    fn poll(&mut self, now_ns: u64) {
        let was_ready = self.queue.is_ready();
        self.queue.receive();
        let has_failed = self.queue.failure().is_some();
        for completed in self.queue.completions().drain(..) {
            match completed.request.tag {
                TAG_ASYNC_EVENT if completed.cqe.status.is_success() => {
                    // An event of an unknown type has no log page to read, but others may follow it.
                    self.events.extend(AsyncEvent::from_result(completed.cqe.result));
                    self.event_request_due_ns = Some(now_ns);
                }
                TAG_ASYNC_EVENT if completed.cqe.status.is_do_not_retry() => {}
                TAG_ASYNC_EVENT => self.event_request_due_ns = Some(now_ns + self.event_retry_ns),
                // A failed queue completes what it had in flight.
                TAG_KEEP_ALIVE if has_failed => {}
                TAG_KEEP_ALIVE => self.keep_alive.answered(now_ns),
                Tag(tag) if tag + 1 == self.next_tag => {
                    self.response = Some((completed.request, completed.cqe));
                }
                // The requester was dropped.
                _ => {}
            }
        }
        self.request_event(now_ns);
        self.keep_alive(now_ns);
        let wake = self.response.is_some()
            || !self.events.is_empty()
            || self.queue.failure().is_some()
            || is_due(self.response_deadline_ns, now_ns)
            || !was_ready && self.queue.is_ready();
        if wake && let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn deadline_ns(&self) -> Option<u64> {
        if self.queue.is_pending() {
            return Some(0);
        }
        let deadlines = [
            self.keep_alive.deadline_ns(),
            // Without a waiting task the deadline is irrelevant.
            self.response_deadline_ns.filter(|_| self.waker.is_some()),
            // While the queue of events is full, taking one submits the request.
            self.event_request_due_ns.filter(|_| self.events.len() < EVENTS_MAX),
        ];
        deadlines.into_iter().flatten().min()
    }

    fn keep_alive(&mut self, now_ns: u64) {
        if self.queue.failure().is_some() {
            self.keep_alive.stop(false);
            return;
        }
        match self.keep_alive.due(now_ns) {
            KeepAliveAction::None => {}
            KeepAliveAction::Silent => self.fell_silent(),
            KeepAliveAction::Send if self.queue.is_full() => {}
            KeepAliveAction::Send => {
                self.keep_alive.sent(now_ns);
                let sqe = Sqe::new(AdminOpcode::KeepAlive.to_wire());
                self.send(TAG_KEEP_ALIVE, sqe, None, CommandData::None, &[]);
            }
        }
    }

    /// Fails the association of a controller that does not answer. It may have received commands all the
    /// same, and executes them until its keep alive timer expires.
    fn fell_silent(&mut self) {
        self.keep_alive.stop(true);
        self.queue.fail(ControllerFailure::AdminTimeout);
    }

    /// Submits an Asynchronous Event Request if one is due and there is room for its event.
    fn request_event(&mut self, now_ns: u64) {
        if self.queue.failure().is_some() {
            self.event_request_due_ns = None;
        }
        if is_due(self.event_request_due_ns, now_ns)
            && self.events.len() < EVENTS_MAX
            && !self.queue.is_full()
        {
            self.event_request_due_ns = None;
            let sqe = Sqe::new(AdminOpcode::AsyncEventRequest.to_wire());
            self.send(TAG_ASYNC_EVENT, sqe, None, CommandData::None, &[]);
        }
    }

    fn send(&mut self, tag: Tag, sqe: Sqe, buffer: Option<Buffer>, data: CommandData, inline_data: &[u8]) {
        let mut request = Request::new(tag, Op::Flush, 0, 0);
        request.set_data(buffer);
        self.queue.submit(sqe, request, data, inline_data);
        self.queue.flush();
    }
}
