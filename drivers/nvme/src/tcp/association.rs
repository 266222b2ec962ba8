//! The admin half of a controller over TCP: an association without I/O queues of its own.
//!
//! An [`Association`] lives on one core, keeps the controller alive and hears its events. Its
//! [`Membership`] may be sent to any core, where [`IoQueue::open`](super::IoQueue::open) joins the
//! association with an I/O queue.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

use memory::Buffer;
use net::{Event, Network, Sockets};
use reactor::{Core, Period, Poller, Work};
use ring::{Op, Request, Status, Tag};
use wire_nvme::admin::{Identify, SetFeatures};
use wire_nvme::aer::AsyncEvent;
use wire_nvme::fabrics::{CNTLID_DYNAMIC, Connected, PropertyGet, PropertySet};
use wire_nvme::feature::{AsyncEventConfiguration, FeatureId, NumberOfQueues};
use wire_nvme::identify::{self, Cns, ControllerType, IdentifyController, IdentifyNamespace};
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::registers::{Capabilities, Configuration, ControllerStatus, offset};
use wire_nvme::{Cqe, Sqe};

use super::connect::{connect, connect_command};
use super::queue::{Data, Queue};
use crate::error::{AdminError, Failure, OpenError};
use crate::options::Options;
use crate::uri::TcpUri;

/// Entries of the admin queue: what Linux uses.
const ADMIN_DEPTH: u32 = 32;
const TAG_EVENT: Tag = Tag(u64::MAX);
const TAG_KEEP_ALIVE: Tag = Tag(u64::MAX - 1);
/// Events that wait to be looked at. The controller sends no second one of a kind before its log page
/// was read, so that there are never more than kinds.
const EVENTS_MAX: usize = 16;
/// Admin data goes in small pieces; log pages that are longer are read in several.
const SCRATCH_BYTES: usize = 8 << 10;

/// A host's association with one controller over TCP: the admin queue.
///
/// A poller on its core takes in what arrives; dropping the association ends its connection.
pub struct Association {
    inner: Rc<RefCell<Inner>>,
    core: Core,
    timeout_ns: u64,
    keep_alive_ns: u64,
    identity: IdentifyController,
    membership: Membership,
}

/// What the association and its poller share.
struct Inner {
    network: Sockets,
    scratch: Vec<u8>,
    received: Vec<Event<TcpStream>>,
    queue: Queue,
    keep_alive_ns: u64,
    keep_alive_due_ns: u64,
    /// When the Keep Alive that is under way was sent.
    keep_alive_since_ns: Option<u64>,
    events: VecDeque<AsyncEvent>,
    listens: bool,
    /// What the command that is awaited came back with.
    answer: Option<(Request<Buffer>, Cqe)>,
    next_tag: u64,
    /// Until when something is waited for.
    patience_ns: u64,
    /// Who is told of news.
    waker: Option<Waker>,
    closed: bool,
}

struct Pump {
    inner: Rc<RefCell<Inner>>,
    name: String,
}

/// What another core needs to join an association with an I/O queue.
#[derive(Clone)]
pub struct Membership {
    pub(super) uri: TcpUri,
    pub(super) address: SocketAddr,
    pub(super) options: Options,
    pub(super) cntlid: u16,
    pub(super) entries_max: u32,
    pub(super) capsule_bytes: u32,
    pub(super) mdts: u8,
    pub(super) oncs: u16,
    pub(super) qids: Qids,
}

/// Identifiers of I/O queues that nobody uses.
#[derive(Clone, Default)]
pub(super) struct Qids(Arc<Mutex<Vec<u16>>>);

impl Qids {
    fn new(max: u16) -> Qids {
        Qids(Arc::new(Mutex::new((1..=max).rev().collect())))
    }

    pub(super) fn take(&self) -> Option<u16> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    pub(super) fn give(&self, qid: u16) {
        // The oldest is used again last: its connection has had the longest time to end.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(0, qid);
    }
}

impl Membership {
    /// The controller's identifier.
    pub fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// The controller's address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// I/O queues that can still be opened.
    pub fn queues_left(&self) -> usize {
        self.qids.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

impl Association {
    /// Connects to the controller, enables it and identifies it. The namespace of `uri` is not looked at.
    ///
    /// `io_queues` is how many I/O queues are asked for; discovery controllers have none.
    pub async fn open(
        core: &Core,
        uri: &TcpUri,
        options: &Options,
        io_queues: u16,
    ) -> Result<Association, OpenError> {
        let address = uri.resolve()?;
        let mut network = Sockets::new(core.events()).spinning(core.spins());
        let queue = connect(&mut network, address, ADMIN_DEPTH, uri)?;
        let inner = Rc::new(RefCell::new(Inner {
            network,
            scratch: vec![0; SCRATCH_BYTES],
            received: Vec::new(),
            queue,
            keep_alive_ns: u64::from(options.keep_alive_ms) * 1_000_000,
            keep_alive_due_ns: u64::MAX,
            keep_alive_since_ns: None,
            events: VecDeque::new(),
            listens: false,
            answer: None,
            next_tag: 0,
            patience_ns: u64::MAX,
            waker: None,
            closed: false,
        }));
        let name = format!("nvme admin {address}");
        core.add_poller(Box::new(Pump { inner: inner.clone(), name }), Period::EveryTurn);
        let mut association = Association {
            inner,
            core: core.clone(),
            timeout_ns: options.timeout_ns,
            keep_alive_ns: u64::from(options.keep_alive_ms) * 1_000_000,
            identity: IdentifyController::default(),
            membership: Membership {
                uri: uri.clone(),
                address,
                options: options.clone(),
                cntlid: 0,
                entries_max: 2,
                capsule_bytes: 0,
                mdts: 0,
                oncs: 0,
                qids: Qids::default(),
            },
        };
        association.initialize().await?;
        association.establish(io_queues).await?;
        Ok(association)
    }

    async fn establish(&mut self, io_queues: u16) -> Result<(), OpenError> {
        let (sqe, data) = connect_command(&self.membership, 0, ADMIN_DEPTH, CNTLID_DYNAMIC);
        let connected = self.step("Connect", sqe, Some(&data)).await?;
        self.membership.cntlid = Connected::from_result(connected).cntlid;
        self.membership.entries_max = self.enable().await?;
        let data = self.identify(Cns::Controller, 0, "Identify Controller").await?;
        self.identity = IdentifyController::decode(&data)
            .map_err(|error| OpenError::Answer("Identify Controller", error))?;
        self.membership.mdts = self.identity.mdts;
        self.membership.oncs = self.identity.oncs;
        self.membership.capsule_bytes =
            self.identity.io_command_capsule_bytes.saturating_sub(wire_nvme::sqe::SIZE as u32);
        if self.identity.cntrltype != ControllerType::Discovery && io_queues > 0 {
            let count = u32::from(io_queues);
            let wanted = NumberOfQueues { submission: count, completion: count };
            let granted = self.set_feature(FeatureId::NumberOfQueues, wanted.to_wire()).await;
            let granted = granted.map_err(opening("Set Features (Number of Queues)"))?;
            let granted = NumberOfQueues::from_wire(granted as u32)
                .map_err(|error| OpenError::Answer("Set Features (Number of Queues)", error))?;
            let queues = granted.submission.min(granted.completion).min(count);
            self.membership.qids = Qids::new(queues as u16);
        }
        if self.keep_alive_ns > 0 {
            self.inner.borrow_mut().keep_alive_due_ns = sys::clock::now_ns() + self.keep_alive_ns / 2;
        }
        Ok(())
    }

    async fn identify(
        &mut self,
        cns: Cns,
        nsid: u32,
        what: &'static str,
    ) -> Result<[u8; identify::SIZE], OpenError> {
        let view = Identify { cns: cns.to_wire(), cntid: 0, cns_specific: 0, csi: 0, uuid_index: 0 };
        let (_, data) = self.read(view.to_sqe(nsid), identify::SIZE).await.map_err(opening(what))?;
        Ok(*data.first_chunk().expect("a page was asked for"))
    }

    /// What the controller says of a namespace.
    pub(super) async fn identify_namespace(&mut self, nsid: u32) -> Result<IdentifyNamespace, OpenError> {
        let data = self.identify(Cns::Namespace, nsid, "Identify Namespace").await?;
        IdentifyNamespace::decode(&data).map_err(|error| OpenError::Answer("Identify Namespace", error))
    }

    /// What the controller says of itself.
    pub fn identity(&self) -> &IdentifyController {
        &self.identity
    }

    /// What other cores need to join.
    pub fn membership(&self) -> &Membership {
        &self.membership
    }

    /// Why the controller can no longer be reached, if so.
    pub fn failure(&self) -> Option<Failure> {
        self.inner.borrow().queue.failure
    }

    /// Executes a command that returns `length` bytes; returns its result and the data. What the controller
    /// does not send is zero.
    pub async fn read(&mut self, sqe: Sqe, length: usize) -> Result<(u64, Vec<u8>), AdminError> {
        let mut buffer = self.take(length)?;
        buffer.clear();
        let (request, cqe) = self.execute(sqe, Some(buffer), Data::In(length as u32), &[]).await?;
        let data = request.buffer.map_or_else(Vec::new, |buffer| buffer.as_slice().to_vec());
        Ok((cqe.result, data))
    }

    /// Executes a command that sends `bytes`.
    pub async fn write(&mut self, sqe: Sqe, bytes: &[u8]) -> Result<u64, AdminError> {
        let mut buffer = self.take(bytes.len())?;
        buffer.as_mut_slice().copy_from_slice(bytes);
        let (_, cqe) = self.execute(sqe, Some(buffer), Data::Out(bytes.len() as u32), &[]).await?;
        Ok(cqe.result)
    }

    /// Executes a command without data.
    pub async fn command(&mut self, sqe: Sqe) -> Result<u64, AdminError> {
        Ok(self.execute(sqe, None, Data::None, &[]).await?.1.result)
    }

    /// Sets a feature; returns dword 0 of the completion.
    pub async fn set_feature(&mut self, feature: FeatureId, value: u32) -> Result<u64, AdminError> {
        let set = SetFeatures { fid: feature.to_wire(), save: false, cdw11: value, uuid_index: 0 };
        self.command(set.to_sqe(0)).await
    }

    /// Asks to be told of what `mask`, bits of [`AsyncEventConfiguration`], names, as far as the controller
    /// offers it.
    pub async fn listen(&mut self, mask: u32) -> Result<(), AdminError> {
        let offered = AsyncEventConfiguration(mask & (self.identity.oaes | AsyncEventConfiguration::HEALTH));
        self.set_feature(FeatureId::AsyncEventConfiguration, offered.0).await?;
        let mut inner = self.inner.borrow_mut();
        inner.listens = true;
        inner.request_event();
        Ok(())
    }

    /// An event that the controller told. It tells no other of that kind until its log page was read.
    pub fn next_event(&mut self) -> Option<AsyncEvent> {
        self.inner.borrow_mut().events.pop_front()
    }

    /// Ends when there is an event, or a failure.
    pub async fn news(&self) {
        std::future::poll_fn(|context| {
            let mut inner = self.inner.borrow_mut();
            if !inner.events.is_empty() || inner.queue.failure.is_some() {
                return Poll::Ready(());
            }
            inner.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    fn take(&self, length: usize) -> Result<Buffer, AdminError> {
        if length == 0 || length > memory::BUFFER_BYTES_MAX {
            return Err(AdminError::Length(length));
        }
        self.core.pool().take(length).ok_or(AdminError::NoMemory)
    }

    /// Executes one command and waits for its completion. One at a time: it borrows the association.
    async fn execute(
        &mut self,
        sqe: Sqe,
        buffer: Option<Buffer>,
        data: Data,
        small: &[u8],
    ) -> Result<(Request<Buffer>, Cqe), AdminError> {
        {
            let mut inner = self.inner.borrow_mut();
            if let Some(failure) = inner.queue.failure {
                return Err(AdminError::Failure(failure));
            }
            if inner.queue.is_full() {
                return Err(AdminError::Busy);
            }
            inner.answer = None;
            inner.patience_ns = sys::clock::now_ns() + self.timeout_ns;
            let tag = Tag(inner.next_tag);
            inner.next_tag += 1;
            inner.send(tag, sqe, buffer, data, small);
        }
        std::future::poll_fn(|context| {
            let mut inner = self.inner.borrow_mut();
            if let Some((request, cqe)) = inner.answer.take() {
                inner.patience_ns = u64::MAX;
                let status = cqe.status;
                let answer =
                    if status.is_success() { Ok((request, cqe)) } else { Err(AdminError::Status(status)) };
                return Poll::Ready(
                    inner.queue.failure.map_or(answer, |failure| Err(AdminError::Failure(failure))),
                );
            }
            if inner.queue.failure.is_none() && sys::clock::now_ns() >= inner.patience_ns {
                // A late answer would be for nobody: the association starts over.
                inner.queue.fail(Failure::AdminTimeout);
            }
            if let Some(failure) = inner.queue.failure {
                inner.patience_ns = u64::MAX;
                return Poll::Ready(Err(AdminError::Failure(failure)));
            }
            inner.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Waits until ICReq is answered.
    async fn initialize(&mut self) -> Result<(), OpenError> {
        self.inner.borrow_mut().patience_ns = sys::clock::now_ns() + self.timeout_ns;
        std::future::poll_fn(|context| {
            let mut inner = self.inner.borrow_mut();
            if let Some(failure) = inner.queue.failure {
                return Poll::Ready(Err(failure.into()));
            }
            if inner.queue.is_ready() {
                inner.patience_ns = u64::MAX;
                return Poll::Ready(Ok(()));
            }
            if sys::clock::now_ns() >= inner.patience_ns {
                return Poll::Ready(Err(OpenError::Timeout("ICReq")));
            }
            inner.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    async fn step(&mut self, what: &'static str, sqe: Sqe, small: Option<&[u8]>) -> Result<u64, OpenError> {
        let executed = self.execute(sqe, None, Data::None, small.unwrap_or_default()).await;
        Ok(executed.map_err(opening(what))?.1.result)
    }

    /// Enables the controller and returns the most entries that a queue may have.
    async fn enable(&mut self) -> Result<u32, OpenError> {
        let get = |wide, offset| PropertyGet { wide, offset }.to_sqe();
        let value = self.step("reading CAP", get(true, offset::CAP), None).await?;
        let capabilities = Capabilities::decode(value);
        let configuration = Configuration { enable: true, sqe_log2: 6, cqe_log2: 4, ..Configuration::RESET };
        let value = configuration.encode().into();
        let sqe = PropertySet { wide: false, offset: offset::CC, value }.to_sqe();
        self.step("enabling the controller", sqe, None).await?;
        let timeout_ns = u64::from(capabilities.ready_timeout_500ms.max(1)) * 500_000_000;
        let deadline_ns = sys::clock::now_ns() + timeout_ns;
        loop {
            let value = self.step("reading CSTS", get(false, offset::CSTS), None).await?;
            let status = ControllerStatus::decode(value as u32);
            let status = status.map_err(|error| OpenError::Answer("CSTS", error))?;
            if status.fatal {
                return Err(OpenError::Command("enabling the controller", Status::INTERNAL_ERROR));
            }
            if status.ready {
                return Ok(capabilities.queue_entries_max);
            }
            if sys::clock::now_ns() > deadline_ns {
                return Err(OpenError::Timeout("enabling the controller"));
            }
            // CSTS can only be asked for; the specification has no event for it.
            self.core.sleep_ns(1_000_000).await;
        }
    }
}

impl Drop for Association {
    fn drop(&mut self) {
        self.inner.borrow_mut().closed = true;
    }
}

impl Poller for Pump {
    fn name(&self) -> &str {
        &self.name
    }

    fn poll(&mut self, now_ns: u64) -> Work {
        let mut inner = self.inner.borrow_mut();
        if inner.closed {
            return Work::Finished;
        }
        inner.poll(now_ns);
        Work::None
    }

    fn deadline(&self) -> Option<u64> {
        let inner = self.inner.borrow();
        let deadline_ns = if inner.closed { 0 } else { inner.deadline_ns() };
        (deadline_ns != u64::MAX).then_some(deadline_ns)
    }
}

impl Inner {
    /// Takes in what arrived and keeps the controller alive.
    fn poll(&mut self, now_ns: u64) {
        let was_ready = self.queue.is_ready();
        self.network.poll(&mut self.received);
        for event in self.received.drain(..) {
            if matches!(event, Event::Ready(id) if id == self.queue.connection()) {
                while self.queue.receive(&mut self.network, &mut self.scratch) {}
            }
        }
        let mut told = false;
        for finished in self.queue.finished().drain(..) {
            match finished.request.tag {
                TAG_EVENT => {
                    let event = AsyncEvent::from_result(finished.cqe.result);
                    let event = event.filter(|_| finished.cqe.status.is_success());
                    if let Some(event) = event
                        && self.events.len() < EVENTS_MAX
                    {
                        self.events.push_back(event);
                        told = true;
                    }
                }
                TAG_KEEP_ALIVE => self.keep_alive_since_ns = None,
                Tag(tag) if tag + 1 == self.next_tag => {
                    self.answer = Some((finished.request, finished.cqe));
                }
                // Somebody stopped waiting for it.
                _ => {}
            }
        }
        if told {
            self.request_event();
        }
        self.keep_alive(now_ns);
        let news = self.answer.is_some()
            || !self.events.is_empty()
            || self.queue.failure.is_some()
            || now_ns >= self.patience_ns
            || !was_ready && self.queue.is_ready();
        if news && let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn deadline_ns(&self) -> u64 {
        if self.network.is_pending() {
            return 0;
        }
        let lost = self.keep_alive_since_ns.map_or(u64::MAX, |since| since + self.keep_alive_ns);
        // Who is not there any more need not be woken.
        let patience_ns = if self.waker.is_some() { self.patience_ns } else { u64::MAX };
        self.keep_alive_due_ns.min(lost).min(patience_ns)
    }

    /// Sends a Keep Alive half-way through the timeout, so that one may be lost, and gives up on a
    /// controller that has not answered one for a whole timeout (Base 2.0, section 3.9.4).
    fn keep_alive(&mut self, now_ns: u64) {
        if self.keep_alive_since_ns.is_some_and(|since| now_ns >= since + self.keep_alive_ns) {
            self.keep_alive_since_ns = None;
            self.keep_alive_due_ns = u64::MAX;
            self.queue.fail(Failure::AdminTimeout);
            return;
        }
        if now_ns < self.keep_alive_due_ns || self.queue.failure.is_some() {
            return;
        }
        self.keep_alive_due_ns = now_ns + self.keep_alive_ns / 2;
        if self.keep_alive_since_ns.is_none() && !self.queue.is_full() {
            self.keep_alive_since_ns = Some(now_ns);
            self.send(TAG_KEEP_ALIVE, Sqe::new(AdminOpcode::KeepAlive.to_wire()), None, Data::None, &[]);
        }
    }

    fn request_event(&mut self) {
        if self.listens && self.queue.failure.is_none() && !self.queue.is_full() {
            let sqe = Sqe::new(AdminOpcode::AsyncEventRequest.to_wire());
            self.send(TAG_EVENT, sqe, None, Data::None, &[]);
        }
    }

    fn send(&mut self, tag: Tag, sqe: Sqe, buffer: Option<Buffer>, data: Data, small: &[u8]) {
        let mut request = Request::new(tag, Op::Flush, 0, 0);
        request.buffer = buffer;
        self.queue.submit(sqe, request, data, small);
        self.queue.flush(&mut self.network);
    }
}

fn opening(what: &'static str) -> impl Fn(AdminError) -> OpenError {
    move |error| match error {
        AdminError::Status(status) => OpenError::Command(what, status),
        AdminError::Failure(Failure::AdminTimeout) => OpenError::Timeout(what),
        AdminError::Failure(failure) => OpenError::Failure(failure),
        AdminError::Answer(error) => OpenError::Answer(what, error),
        AdminError::Reset => OpenError::Failure(Failure::Detached),
        AdminError::NoMemory | AdminError::Busy | AdminError::Length(_) => OpenError::NoMemory,
    }
}
