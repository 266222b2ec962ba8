//! The poll group of the vfio-user transport: one core's endpoints and clients.
//!
//! One poll receives messages from clients, fetches new entries of every submission queue, submits the
//! requests in one batch per block device, polls completions, and signals each completion queue once.
//! Doorbells are shared memory, so there is no event for a write: while a client is busy the core does not
//! sleep, and afterwards it polls the doorbells at growing intervals, up to one millisecond.

use std::os::fd::AsFd;
use std::sync::Arc;

use block_io::FabricsStatus;
use dma::Pool;
use nvme_controller::reservation::{DrainRequest, ReservationNotifier};
use nvme_controller::{ConnectOk, ControllerEvent};
use os::{EventClient, EventCompletion, Interest, WatchId};
use reactor::{Core, Shutdown};
use slots::{Slab, Slot};
use sockets::{SocketStream, UnixListenSocket};
use target_shell::{CoreDevices, GroupMail, Inbox, PollGroup, Responder};
use wire_nvme::fabrics::{CONNECT_DATA_SIZE, Connect, ConnectData, Nqn};
use wire_nvme::log::{AddressFamily, TransportAddress, TransportType};

use super::VfioUserShared;
use super::function::{FunctionContext, InjectedFaults, VfioUserFunction};
use super::session::ClientSession;
use super::socket::{self, DisconnectReason};
use crate::snapshot::ConfigSnapshot;

/// Endpoints of one core.
const ENDPOINTS_MAX: u32 = 1024;
/// Maximum interval between two polls of a client's doorbells.
const DOORBELL_POLL_NS_MAX: u64 = 1_000_000;
/// Interval for retrying deferred commands: there is no event for buffers that another core frees.
const MEMORY_RETRY_NS: u64 = 1_000_000;
/// Interval between attempts to accept a client after a failure.
const ACCEPT_RETRY_NS: u64 = 100_000_000;

/// A message to a vfio-user poll group.
pub(crate) enum VfioUserGroupMessage {
    /// Listen in a directory.
    Listen { directory: String, nqn: Nqn, portid: u16, responder: Responder<std::io::Result<()>> },
    /// Stop listening on a port.
    Unlisten { portid: u16, responder: Responder<()> },
    /// Wakes a group whose notifier fired, or for which there is a new configuration.
    Wake,
    /// Report every client.
    Report(Responder<Vec<ClientReport>>),
    /// Inject a fault; replies whether a client is connected at the port.
    Inject { portid: u16, fault: VfioUserFault, responder: Responder<bool> },
}

impl GroupMail for VfioUserGroupMessage {
    const WAKE: Self = VfioUserGroupMessage::Wake;
}

/// A fault that [`NvmfTarget::inject`](crate::NvmfTarget::inject) injects into a client's controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VfioUserFault {
    /// The controller reports a fatal status (CSTS.CFS).
    Fatal,
    /// The next completions, this many, are dropped.
    DropCompletions(u32),
    /// Surprise removal: registers read as all ones and commands are not fetched.
    SurpriseRemoval,
    /// Commands are not fetched from the submission queue with this identifier.
    Stall(u16),
    /// The socket is closed.
    Disconnect,
    /// Ends all injected faults; their effects are not undone.
    None,
}

/// A client as reported to the control plane.
#[derive(Clone, Debug)]
pub(crate) struct ClientReport {
    pub(crate) group: usize,
    pub(crate) directory: String,
    pub(crate) subnqn: Nqn,
    pub(crate) cntlid: u16,
    /// Identifier, entries, commands and errors of every submission queue.
    pub(crate) queues: Vec<(u16, u32, u64, u64)>,
}

/// A directory with a listening socket, and its client if one is connected.
struct Endpoint {
    directory: String,
    nqn: Nqn,
    portid: u16,
    listen_socket: Option<UnixListenSocket>,
    watch: Option<WatchId>,
    session: Option<ClientSession>,
    session_watch: Option<WatchId>,
    /// A client may be waiting in the backlog.
    accept_pending: bool,
    /// When accept is retried after it failed, for lack of descriptors for example; 0 if it did not fail.
    accept_retry_ns: u64,
    /// It is on the group's list of active endpoints.
    active: bool,
}

impl Endpoint {
    /// Has a client, or may have one waiting: to be visited in each poll.
    fn has_work(&self) -> bool {
        self.session.is_some() || self.accept_pending
    }

    /// When a silent client is disconnected for another that waits; `None` if none waits.
    fn seat_deadline_ns(&self) -> Option<u64> {
        if self.accept_pending { self.session.as_ref()?.seat_deadline_ns() } else { None }
    }
}

/// The vfio-user endpoints of one core, with their clients.
///
/// It owns the listening sockets, the client sessions and one channel per block device. Order of a poll: socket
/// events; control messages; reservation changes; for each active endpoint accept, receive and fetch; submit and poll
/// devices; for each active endpoint interrupts, pending replies and disconnects. Endpoints without a client cost nothing. A session is dropped only when all
/// its device requests have completed, because they may use the client's memory.
pub(crate) struct VfioUserPollGroup {
    index: usize,
    pool: Pool,
    clock: os::clock::Clock,
    shared: VfioUserShared,
    devices: CoreDevices,
    endpoints: Slab<Endpoint>,
    /// Endpoints with a client, or with one that may be waiting.
    active: Vec<Slot>,
    events: EventClient,
    inbox: Inbox<VfioUserGroupMessage, ConfigSnapshot>,
    /// Reports reservation changes that affect clients of this core.
    notifier: Arc<ReservationNotifier>,
    done: Vec<EventCompletion>,
    completions: Vec<bdev::Completion>,
    /// SIGBUS faults in client memory that were handled so far.
    sigbus_count_seen: u32,
    /// Commands are deferred or completions are blocked: poll again soon, there is no event.
    needs_retry: bool,
    stopping: bool,
}

impl VfioUserPollGroup {
    pub(crate) fn new(
        core: &Core,
        shared: VfioUserShared,
        inbox: Inbox<VfioUserGroupMessage, ConfigSnapshot>,
        notifier: Arc<ReservationNotifier>,
    ) -> VfioUserPollGroup {
        VfioUserPollGroup {
            index: core.index(),
            pool: core.pool().clone(),
            clock: core.clock().clone(),
            shared,
            devices: CoreDevices::default(),
            endpoints: Slab::with_capacity(ENDPOINTS_MAX),
            active: Vec::new(),
            events: core.event_loop().client(),
            inbox,
            notifier,
            done: Vec::new(),
            completions: Vec::with_capacity(256),
            sigbus_count_seen: dma::sigbus_fault_count(),
            needs_retry: false,
            stopping: false,
        }
    }

    fn process_messages(&mut self, core: &Core, now_ns: u64) -> usize {
        let mut count = 0;
        while let Some(message) = self.inbox.messages.receive() {
            count += 1;
            match message {
                VfioUserGroupMessage::Listen { directory, nqn, portid, responder } => {
                    // The requester has reported a failure: listening now would contradict it.
                    if responder.is_abandoned() {
                        continue;
                    }
                    if let Err(Ok(())) = responder.answer(self.listen(directory, nqn, portid)) {
                        self.unlisten(Some(portid), now_ns);
                    }
                }
                VfioUserGroupMessage::Unlisten { portid, responder } => {
                    self.unlisten(Some(portid), now_ns);
                    _ = responder.answer(());
                }
                VfioUserGroupMessage::Wake => {}
                VfioUserGroupMessage::Report(responder) => _ = responder.answer(self.report()),
                VfioUserGroupMessage::Inject { portid, fault, responder } => {
                    if !responder.is_abandoned() {
                        _ = responder.answer(self.inject(portid, fault));
                    }
                }
            }
        }
        // A change of configuration wakes the group by a message.
        if let Some((generation, snapshot)) = self.inbox.subscription.take() {
            self.apply(core, snapshot, now_ns);
            self.inbox.subscription.acknowledge(generation);
        }
        count
    }

    /// Handles a reservation change: delivers notifications, completes pending reservation commands, and
    /// starts the drains that other commands wait for.
    #[cold]
    fn on_reservation_change(&mut self, drains: &[DrainRequest], now_ns: u64) {
        for slot in self.slots() {
            let Some(endpoint) = self.endpoints.get_mut(slot) else { continue };
            let Some(session) = &mut endpoint.session else { continue };
            session.function.drain(drains, now_ns);
            if !session.closed {
                session.function.complete_pending_reservations();
                session.function.controller_event(ControllerEvent::ReservationChanged, now_ns);
            }
        }
    }

    fn listen(&mut self, directory: String, nqn: Nqn, portid: u16) -> std::io::Result<()> {
        let socket = socket::listen(&directory)?;
        let endpoint = Endpoint {
            directory,
            nqn,
            portid,
            listen_socket: Some(socket),
            watch: None,
            session: None,
            session_watch: None,
            accept_pending: false,
            accept_retry_ns: 0,
            active: false,
        };
        let inserted = self.endpoints.insert(endpoint);
        let slot = inserted.map_err(|_| std::io::Error::from(std::io::ErrorKind::QuotaExceeded))?;
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return Ok(()) };
        let Some(socket) = &endpoint.listen_socket else { return Ok(()) };
        match self.events.watch(socket.as_fd(), Interest::READABLE, event(slot, LISTENER)) {
            Ok(watch) => endpoint.watch = Some(watch),
            Err(error) => {
                self.endpoints.remove(slot);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Closes the endpoint of a port, or all endpoints. Clients are asked to release the device, drained, and
    /// disconnected.
    fn unlisten(&mut self, portid: Option<u16>, now_ns: u64) {
        for slot in self.slots() {
            let Some(endpoint) = self.endpoints.get_mut(slot) else { continue };
            if portid.is_some_and(|portid| portid != endpoint.portid) {
                continue;
            }
            if let Some(watch) = endpoint.watch.take() {
                self.events.unwatch(watch);
            }
            endpoint.listen_socket = None;
            if let Some(session) = endpoint.session.as_mut().filter(|session| !session.closed) {
                session.function.begin_drain(now_ns);
            }
            self.disconnect_if_drained(slot, now_ns);
        }
    }

    /// Disconnects a client whose drain is complete.
    fn disconnect_if_drained(&mut self, slot: Slot, now_ns: u64) {
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return };
        match &endpoint.session {
            Some(session) if !session.closed && session.function.is_drain_complete(now_ns) => {
                self.disconnect(slot, None)
            }
            _ => self.reap(slot),
        }
    }

    fn slots(&self) -> Vec<Slot> {
        self.endpoints.iter().map(|(slot, _)| slot).collect()
    }

    /// Disconnects a client. The session stays until its outstanding device requests complete.
    fn disconnect(&mut self, slot: Slot, reason: Option<DisconnectReason>) {
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return };
        if let Some(watch) = endpoint.session_watch.take() {
            self.events.unwatch(watch);
        }
        if let Some(session) = &mut endpoint.session
            && !session.closed
        {
            if let Some(reason) = reason.filter(|reason| *reason != DisconnectReason::Closed) {
                log::warn!(target: "nvmf", "vfio-user {}: {reason}", endpoint.directory);
            }
            session.closed = true;
            session.function.disconnect();
        }
        self.reap(slot);
    }

    /// Removes a disconnected client without outstanding device requests, and a closed endpoint without a client.
    fn reap(&mut self, slot: Slot) {
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return };
        if endpoint.session.as_ref().is_some_and(ClientSession::is_done) {
            // This closes the socket, which the client observes.
            endpoint.session = None;
            // The next client may be waiting in the backlog.
            endpoint.accept_pending = true;
        }
        if endpoint.session.is_none() && endpoint.listen_socket.is_none() {
            self.endpoints.remove(slot);
        }
    }

    fn apply(&mut self, core: &Core, snapshot: Arc<ConfigSnapshot>, now_ns: u64) {
        self.devices.apply(core, &snapshot.devices, "nvmf");
        self.shared.snapshot = snapshot;
        for slot in self.slots() {
            let Some(endpoint) = self.endpoints.get_mut(slot) else { continue };
            let Some(session) = endpoint.session.as_mut().filter(|session| !session.closed) else { continue };
            session.function.apply(&self.shared, now_ns);
            self.disconnect_if_drained(slot, now_ns);
        }
    }

    fn report(&self) -> Vec<ClientReport> {
        let one = |endpoint: &Endpoint| {
            let session = endpoint.session.as_ref().filter(|session| !session.closed)?;
            let association = session.function.association();
            Some(ClientReport {
                group: self.index,
                directory: endpoint.directory.clone(),
                subnqn: association.subnqn().clone(),
                cntlid: association.cntlid(),
                queues: session.function.sq_stats().collect(),
            })
        };
        self.endpoints.iter().filter_map(|(_, endpoint)| one(endpoint)).collect()
    }

    fn inject(&mut self, portid: u16, fault: VfioUserFault) -> bool {
        let entry = self.endpoints.iter().find(|(_, endpoint)| endpoint.portid == portid);
        let Some(slot) = entry.map(|(slot, _)| slot) else { return false };
        let session = self.endpoints.get_mut(slot).and_then(|endpoint| endpoint.session.as_mut());
        let Some(session) = session.filter(|session| !session.closed) else { return false };
        let function = &mut session.function;
        match fault {
            VfioUserFault::Fatal => function.fail(),
            VfioUserFault::DropCompletions(count) => function.faults.drop_completions = count,
            VfioUserFault::SurpriseRemoval => function.faults.surprise_removed = true,
            VfioUserFault::Stall(qid) => function.faults.stalled = Some(qid),
            VfioUserFault::Disconnect => self.disconnect(slot, None),
            VfioUserFault::None => function.faults = InjectedFaults::default(),
        }
        true
    }

    /// Accepts the next client, unless one is connected.
    fn accept(&mut self, slot: Slot, now_ns: u64) {
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return };
        if self.stopping || endpoint.session.is_some() {
            return;
        }
        let accepted = endpoint.listen_socket.as_ref().map(UnixListenSocket::accept);
        let accepted = match accepted.unwrap_or(Ok(None)) {
            Ok(accepted) => accepted,
            Err(error) => {
                // The client stays in the backlog, which the event loop does not report again.
                if endpoint.accept_retry_ns == 0 {
                    log::warn!(
                        target: "nvmf",
                        "vfio-user {}: accept failed and is retried: {error}",
                        endpoint.directory
                    );
                }
                endpoint.accept_retry_ns = now_ns + ACCEPT_RETRY_NS;
                return;
            }
        };
        endpoint.accept_retry_ns = 0;
        let Some(stream) = accepted else {
            endpoint.accept_pending = false;
            return;
        };
        match create_function(&self.shared, endpoint, now_ns) {
            Ok(function) => self.add_session(slot, stream, function, now_ns),
            Err(reason) => {
                log::warn!(target: "nvmf", "vfio-user {}: client rejected: {reason}", endpoint.directory)
            }
        }
    }

    fn add_session(&mut self, slot: Slot, stream: SocketStream, function: VfioUserFunction, now_ns: u64) {
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return };
        let session = ClientSession::new(stream, function, now_ns);
        match self.events.watch(session.stream().as_fd(), Interest::BOTH, event(slot, CLIENT)) {
            Ok(watch) => {
                endpoint.session_watch = Some(watch);
                endpoint.session = Some(session);
            }
            Err(error) => {
                log::warn!(target: "nvmf", "vfio-user {}: client rejected: {error}", endpoint.directory)
            }
        }
    }

    /// Processes socket events.
    fn process_socket_events(&mut self) -> usize {
        let mut socket_events = std::mem::take(&mut self.done);
        let count = self.events.reap(&mut socket_events);
        for EventCompletion { tag, .. } in socket_events.drain(..) {
            let Some(slot) = self.endpoints.slot_at((tag >> 1) as u32) else { continue };
            let Some(endpoint) = self.endpoints.get_mut(slot) else { continue };
            if tag & 1 == LISTENER {
                endpoint.accept_pending = true;
                if !std::mem::replace(&mut endpoint.active, true) {
                    self.active.push(slot);
                }
            } else if let Some(session) = &mut endpoint.session {
                session.readable = true;
            }
        }
        self.done = socket_events;
        count
    }

    /// Accepts a client, or processes the messages and commands of the connected one.
    fn process_client(&mut self, slot: Slot, now_ns: u64) -> usize {
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return 0 };
        let Some(session) = &mut endpoint.session else {
            if endpoint.accept_pending && now_ns >= endpoint.accept_retry_ns {
                self.accept(slot, now_ns);
                return 1;
            }
            return 0;
        };
        if session.closed {
            return 0;
        }
        let mut context = FunctionContext {
            pool: &self.pool,
            devices: &mut self.devices,
            shared: &self.shared,
            now_ns,
            tag_base: u64::from(slot.index()) << 48,
            flow: slot.index() as u16,
        };
        let mut count = 0;
        let mut outcome = Ok(0);
        if session.readable {
            outcome = session.receive(&mut context);
        }
        if (session.function.has_ready() || session.function.is_waiting()) && session.function.is_drained() {
            session.function.retry(&mut context);
        }
        if session.function.is_running()
            && session.function.is_drained()
            && !session.function.faults.surprise_removed
        {
            count += session.function.fetch(&mut context);
        }
        match outcome {
            Ok(messages) => count += messages,
            Err(end) => self.disconnect(slot, Some(end)),
        }
        count
    }

    /// Submits each device's batch and polls completions.
    #[inline]
    fn drive_devices(&mut self) -> usize {
        if self.devices.are_idle() {
            return 0;
        }
        let mut completions = std::mem::take(&mut self.completions);
        self.devices.drive(&mut completions);
        let count = completions.len();
        // One run per endpoint; usually there is only one.
        let endpoint_of = |completion: &bdev::Completion| completion.tag().0 >> 48;
        for run in completions.chunk_by(|one, next| endpoint_of(one) == endpoint_of(next)) {
            if let Some(session) = session_at(&mut self.endpoints, endpoint_of(&run[0])) {
                session.function.complete_direct(run);
            }
        }
        // Those are complete; dropping them returns lent buffers.
        completions.retain(|completion| !VfioUserFunction::is_direct(completion));
        for completion in completions.drain(..) {
            if let Some(session) = session_at(&mut self.endpoints, endpoint_of(&completion)) {
                session.function.complete(completion);
            }
        }
        self.completions = completions;
        count
    }

    /// Signals interrupts, runs timers, and sends replies that waited for devices.
    fn finish_poll(&mut self, slot: Slot, now_ns: u64) -> usize {
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return 0 };
        let Some(session) = &mut endpoint.session else { return 0 };
        session.function.expire_drain(now_ns);
        if session.closed {
            self.reap(slot);
            return 0;
        }
        self.needs_retry |= session.function.flush_blocked_completions();
        session.function.interrupt();
        if session.function.deadline().is_some_and(|deadline| deadline <= now_ns) {
            session.function.controller_event(ControllerEvent::Tick, now_ns);
        }
        self.needs_retry |= session.function.is_waiting();
        let mut count = 0;
        if session.is_pending() {
            match session.complete_pending_reply() {
                Ok(sent) => count += usize::from(sent),
                Err(end) => {
                    self.disconnect(slot, Some(end));
                    return 1;
                }
            }
        }
        if session.function.is_drain_complete(now_ns) {
            self.disconnect(slot, None);
        } else if endpoint.seat_deadline_ns().is_some_and(|deadline_ns| deadline_ns <= now_ns) {
            self.disconnect(slot, Some(DisconnectReason::Silent));
        }
        count
    }

    /// Whether an endpoint is visited in the next poll.
    fn stays_active(&mut self, slot: Slot) -> bool {
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return false };
        endpoint.active = endpoint.has_work();
        endpoint.active
    }

    /// Disconnects clients whose shared memory raised SIGBUS, because they truncated the file.
    #[cold]
    fn disconnect_poisoned(&mut self) {
        for slot in self.slots() {
            let session = self.endpoints.get_mut(slot).and_then(|endpoint| endpoint.session.as_ref());
            if session.is_some_and(|session| !session.closed && session.function.is_poisoned()) {
                self.disconnect(
                    slot,
                    Some(DisconnectReason::InvalidMessage("it truncated memory that it shares")),
                );
            }
        }
    }

    /// The endpoints with work. After a poll they include all that have a client.
    fn active(&self) -> impl Iterator<Item = &Endpoint> {
        self.active.iter().filter_map(|slot| self.endpoints.get(*slot))
    }

    /// Time of the next doorbell poll.
    fn doorbell_poll_ns(&self, now_ns: u64) -> Option<u64> {
        let sessions = self.active().filter_map(|endpoint| endpoint.session.as_ref());
        let running = sessions.filter(|session| !session.closed && session.function.is_running());
        let idle_ns =
            running.map(|session| now_ns.saturating_sub(session.function.last_activity_ns)).min()?;
        // A command waits at most an eighth of the idle time before it.
        Some(now_ns + (idle_ns / 8).min(DOORBELL_POLL_NS_MAX))
    }
}

/// The client of a request's tag.
fn session_at(endpoints: &mut Slab<Endpoint>, index: u64) -> Option<&mut ClientSession> {
    let slot = endpoints.slot_at(index as u32)?;
    endpoints.get_mut(slot)?.session.as_mut()
}

const LISTENER: u64 = 0;
const CLIENT: u64 = 1;

fn event(slot: Slot, what: u64) -> u64 {
    u64::from(slot.index()) << 1 | what
}

/// Creates the controller of a new client, as a Connect command would.
fn create_function(
    shared: &VfioUserShared,
    endpoint: &Endpoint,
    now_ns: u64,
) -> Result<VfioUserFunction, String> {
    let limits = &shared.limits.controller;
    let sqe = Connect {
        record_format: 0,
        qid: 0,
        queue_entries: limits.admin_queue_entries_max,
        attributes: Default::default(),
        kato_ms: 0,
    }
    .to_sqe();
    let hostnqn = super::host_nqn(&endpoint.directory);
    let connect = ConnectData {
        host_id: *super::host_uuid(&endpoint.directory).as_bytes(),
        cntlid: wire_nvme::fabrics::CNTLID_DYNAMIC,
        subnqn: endpoint.nqn.clone(),
        hostnqn: hostnqn.clone(),
    };
    let mut data = [0; CONNECT_DATA_SIZE];
    connect.encode(&mut data);
    let address = TransportAddress {
        trtype: TransportType::IntraHost,
        adrfam: AddressFamily::IntraHost,
        traddr: endpoint.directory.clone(),
        trsvcid: "0".to_owned(),
    };
    let connect_context = nvme_controller::ConnectContext {
        directory: &shared.directory,
        limits,
        port: nvme_controller::SubsystemPort { portid: endpoint.portid, address },
    };
    let connected =
        nvme_controller::connect(&sqe, &data, &connect_context, |nqn| shared.snapshot.subsystem(nqn));
    match connected {
        Ok(ConnectOk::Admin(admin)) => {
            let function = VfioUserFunction::new(admin, shared, endpoint.portid, now_ns);
            function.map_err(|errno| format!("cannot allocate doorbells or interrupts: {errno}"))
        }
        Ok(ConnectOk::Io(_)) => Err("Connect created an I/O queue".into()),
        Err(error) => Err(format!("{} (its host NQN is {hostnqn})", FabricsStatus(error.status))),
    }
}

impl PollGroup for VfioUserPollGroup {
    const NAME: &'static str = "nvmf_vfio_user";

    fn poll(&mut self, core: &Core, now_ns: u64) -> usize {
        let mut count = self.process_socket_events();
        if !self.inbox.messages.is_empty() {
            count += self.process_messages(core, now_ns);
        }
        if let Some(drains) = self.notifier.take() {
            self.on_reservation_change(&drains, now_ns);
            count += 1;
        }
        self.needs_retry = false;
        let mut active = std::mem::take(&mut self.active);
        for slot in &active {
            count += self.process_client(*slot, now_ns);
        }
        count += self.drive_devices();
        active.retain(|slot| {
            count += self.finish_poll(*slot, now_ns);
            self.stays_active(*slot)
        });
        self.active = active;
        let faults = dma::sigbus_fault_count();
        if faults != self.sigbus_count_seen {
            self.sigbus_count_seen = faults;
            self.disconnect_poisoned();
        }
        count
    }

    fn deadline(&self) -> Option<u64> {
        let mut poll_now = !self.inbox.messages.is_empty();
        let mut timer = None;
        for endpoint in self.active() {
            let session = endpoint.session.as_ref();
            if endpoint.accept_pending && session.is_none() {
                timer = [timer, Some(endpoint.accept_retry_ns)].into_iter().flatten().min();
            }
            let drain = session.and_then(|session| session.function.drain_guard_deadline_ns());
            timer = [timer, drain].into_iter().flatten().min();
            if let Some(session) = session.filter(|session| !session.closed) {
                poll_now |= session.readable && !session.is_pending();
                poll_now |= session.function.has_ready();
                let deadlines = [timer, session.function.deadline(), endpoint.seat_deadline_ns()];
                timer = deadlines.into_iter().flatten().min();
            }
        }
        if poll_now {
            return Some(0);
        }
        let now_ns = self.clock.now_ns();
        let doorbells =
            if self.shared.limits.doorbells_trapped { None } else { self.doorbell_poll_ns(now_ns) };
        let memory = self.needs_retry.then(|| now_ns + MEMORY_RETRY_NS);
        [self.devices.deadline(), doorbells, memory, timer].into_iter().flatten().min()
    }

    fn shutdown(&mut self, now_ns: u64) -> Shutdown {
        self.stopping = true;
        self.unlisten(None, now_ns);
        if self.endpoints.is_empty() { Shutdown::Done } else { Shutdown::Draining }
    }
}
