//! The poll group of the NVMe/TCP transport: one core's connections and its channels to block devices.
//!
//! One poll receives from every ready connection, submits the resulting requests in one batch per device,
//! polls completions, and sends the responses of each connection in one call. A null or malloc device
//! completes within the same poll.

pub(crate) mod devices;
mod rate_limited_log;
#[cfg(any(test, fuzzing))]
pub mod simulated;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::SyncSender;

use block_io::Status;
use dma::Pool;
use nvme_controller::ControllerEvent;
use nvme_controller::reservation::{DrainRequest, PendingCommands, ReservationNotifier};
use nvme_controller::{ControllerDirectory, NamespaceTable, SubsystemPort};
use reactor::{Core, MailboxReceiver, MailboxSender, Shutdown};
use slots::{Slab, Slot};
use sockets::{ConnectionId, ListenerId, Network, NetworkEvent, StreamAddress};
use wire_nvme::fabrics::Nqn;
use wire_nvme::log::TransportAddress;

use self::devices::CoreDevices;
use self::rate_limited_log::RateLimitedLog;
use crate::command::CommandTable;
use crate::connection::{CloseReason, ConnectionState, IncomingPdu, NvmfConnection, QueueCounters};
use crate::group_poller::PollGroup;
use crate::limits::TcpLimits;
use crate::queue::ConnectionRole;
use crate::snapshot::ConfigSnapshot;

/// Connections of a group: those of a core. A request's tag has 16 bits for the connection.
const CONNECTIONS_MAX: u32 = sockets::CONNECTIONS_MAX;
const _: () = assert!(CONNECTIONS_MAX <= 1 << 16);
/// Bytes received at a time beyond payload that goes directly into its buffer. Half of a typical L2 cache.
const SCRATCH_BYTES: usize = 128 << 10;
/// Interval for retrying deferred commands: there is no event for buffers that another core frees.
const RETRY_NS: u64 = 1_000_000;

/// What a poll group lends to a connection while it processes received data.
pub(crate) struct ConnectionContext<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) shared: &'a TcpGroupShared,
    pub(crate) now_ns: u64,
    devices: &'a mut CoreDevices,
    outstanding_requests: &'a mut u32,
}

/// State shared by all connections of a group.
pub(crate) struct TcpGroupShared {
    pub(crate) limits: TcpLimits,
    pub(crate) directory: Arc<ControllerDirectory>,
    pub(crate) snapshot: Arc<ConfigSnapshot>,
}

/// A message to a TCP poll group.
pub(crate) enum TcpGroupMessage<S> {
    /// The mailboxes of all groups, this one included, by index.
    Peers(Vec<MailboxSender<TcpGroupMessage<S>>>),
    /// Apply a new configuration, then reply.
    Apply(Arc<ConfigSnapshot>, SyncSender<()>),
    /// An accepted connection, assigned to this group.
    Incoming { stream: S, port: SubsystemPort, peer: SocketAddr },
    /// Listen on an address.
    Listen { address: SocketAddr, portid: u16, reply: SyncSender<std::io::Result<SocketAddr>> },
    /// Stop listening on a port.
    Unlisten { portid: u16, reply: SyncSender<()> },
    /// Wakes a group whose [`GroupStatus::recheck`] is set or whose notifier fired.
    Recheck,
    /// Report every connection.
    Report(SyncSender<Vec<ConnectionReport>>),
}

/// A connection as reported to the control plane.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionReport {
    pub(crate) group: usize,
    pub(crate) subnqn: Option<Nqn>,
    pub(crate) cntlid: u16,
    /// `None` before Connect.
    pub(crate) qid: Option<u16>,
    pub(crate) peer: SocketAddr,
    pub(crate) local: TransportAddress,
    pub(crate) entries: u32,
    pub(crate) counters: QueueCounters,
}

/// The connections of one core, generic over the network so that tests run it on a simulated one.
///
/// It owns the connections, one channel per block device, the receive scratch area and, on the first core,
/// the TCP listeners. A connection accepted there goes to the group with the fewest connections and stays.
///
/// Order of a poll: messages; reservation changes; receive, which fills the devices' batches; submit and
/// poll devices; send; timers; close connections that are drained. Lists of slots (`dirty`,
/// `waiting_for_buffer`, `ready_copies`, `closing`) bound the work to the connections that need it. Nothing locks or allocates per
/// I/O; other groups are reached by mailbox and by the atomics of [`GroupStatus`].
pub(crate) struct TcpPollGroup<N: Network> {
    index: usize,
    network: N,
    pool: Pool,
    clock: os::clock::Clock,
    shared: TcpGroupShared,
    devices: CoreDevices,
    connections: Slab<ConnectionEntry>,
    /// The slot of each connection, by the index of its [`ConnectionId`].
    by_network: Vec<Option<Slot>>,
    listeners: Vec<(ListenerId, u16)>,
    messages: MailboxReceiver<TcpGroupMessage<N::Stream>>,
    peers: Vec<MailboxSender<TcpGroupMessage<N::Stream>>>,
    /// The shared status of all groups, by index.
    statuses: Arc<[GroupStatus]>,
    /// Reports reservation changes that affect connections of this core.
    pub(crate) notifier: Option<Arc<ReservationNotifier>>,
    scratch: Vec<u8>,
    events: Vec<NetworkEvent<N::Stream>>,
    completions: Vec<bdev::Completion>,
    /// Connections with something to send.
    dirty: Vec<Slot>,
    /// Connections that may have more to receive.
    more_to_read: Vec<Slot>,
    /// Spare allocation for the next `more_to_read`.
    more_to_read_spare: Vec<Slot>,
    /// Connections with a Copy whose next piece can start.
    ready_copies: Vec<Slot>,
    /// Connections with a command that waits for a buffer.
    waiting_for_buffer: Vec<Slot>,
    /// Connections that close when their commands in flight have completed.
    closing: Vec<Slot>,
    /// Connections whose outstanding device requests a reservation command waits for.
    draining: Vec<Slot>,
    /// Next handshake or keep-alive timeout; may be too early, never too late.
    timer_ns: u64,
    flows: u16,
    stopping: bool,
    log: RateLimitedLog,
}

/// What other groups read and set: the load of a group, and a request to recheck its I/O queues.
#[derive(Default)]
pub(crate) struct GroupStatus {
    connections: AtomicU32,
    /// The controllers of some I/O queues may be gone.
    recheck: AtomicBool,
}

struct ConnectionEntry {
    connection: NvmfConnection,
    /// Outstanding device requests of this connection.
    outstanding_requests: u32,
    dirty: bool,
    waiting_for_buffer: bool,
    closing: bool,
    /// The socket is closed; the entry waits only for outstanding device requests.
    closed: bool,
}

impl ConnectionContext<'_> {
    /// Adds a request to the batch of its device.
    ///
    /// # Errors
    /// The device was removed.
    #[inline]
    pub(crate) fn submit(&mut self, key: u32, request: bdev::Request) -> Result<(), Status> {
        self.devices.submit(key, request)?;
        *self.outstanding_requests += 1;
        Ok(())
    }
}

impl<N: Network> TcpPollGroup<N> {
    pub(crate) fn new(
        core: &Core,
        network: N,
        limits: TcpLimits,
        directory: Arc<ControllerDirectory>,
        statuses: Arc<[GroupStatus]>,
        messages: MailboxReceiver<TcpGroupMessage<N::Stream>>,
    ) -> TcpPollGroup<N> {
        TcpPollGroup {
            index: core.index(),
            network,
            pool: core.pool().clone(),
            clock: core.clock().clone(),
            shared: TcpGroupShared { limits, directory, snapshot: Arc::default() },
            devices: CoreDevices::default(),
            connections: Slab::with_capacity(CONNECTIONS_MAX),
            by_network: Vec::new(),
            listeners: Vec::new(),
            messages,
            peers: Vec::new(),
            statuses,
            notifier: None,
            scratch: vec![0; SCRATCH_BYTES],
            events: Vec::new(),
            completions: Vec::with_capacity(256),
            dirty: Vec::new(),
            more_to_read: Vec::new(),
            more_to_read_spare: Vec::new(),
            ready_copies: Vec::new(),
            waiting_for_buffer: Vec::new(),
            closing: Vec::new(),
            draining: Vec::new(),
            timer_ns: u64::MAX,
            flows: 0,
            stopping: false,
            log: RateLimitedLog::default(),
        }
    }

    fn process_messages(&mut self, core: &Core, now_ns: u64) -> usize {
        let mut count = 0;
        while let Some(message) = self.messages.receive() {
            count += 1;
            match message {
                TcpGroupMessage::Peers(peers) => self.peers = peers,
                TcpGroupMessage::Apply(snapshot, reply) => {
                    self.apply(core, snapshot, now_ns);
                    let _ = reply.send(());
                }
                TcpGroupMessage::Incoming { stream, port, peer } => {
                    self.add_connection(stream, port, peer, now_ns)
                }
                TcpGroupMessage::Listen { address, portid, reply } => {
                    let _ = reply.send(self.listen(address, portid));
                }
                TcpGroupMessage::Unlisten { portid, reply } => {
                    self.unlisten(Some(portid));
                    let _ = reply.send(());
                }
                TcpGroupMessage::Recheck => {}
                TcpGroupMessage::Report(reply) => {
                    let _ = reply.send(self.report());
                }
            }
        }
        if self.statuses[self.index].recheck.load(Ordering::Acquire) {
            self.statuses[self.index].recheck.store(false, Ordering::Relaxed);
            self.recheck_io_queues(now_ns);
        }
        count
    }

    /// Handles a reservation change: delivers notifications, completes pending reservation commands, and
    /// starts the drains that other commands wait for.
    #[cold]
    fn on_reservation_change(&mut self, drains: &[DrainRequest], now_ns: u64) {
        let slots: Vec<Slot> = self.connections.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            let Some(entry) = self.connections.get_mut(slot) else { continue };
            let state = &mut entry.connection.state;
            if let ConnectionRole::Io(queue) = &state.role
                && entry.outstanding_requests > 0
            {
                let tickets = DrainRequest::guards_for(drains, queue.lease.association());
                if !tickets.is_empty() {
                    state.drain_guards.extend(tickets);
                    self.draining.push(slot);
                }
            }
            if entry.closed {
                continue;
            }
            state.complete_pending_reservations();
            state.controller_event(ControllerEvent::ReservationChanged, now_ns);
            self.mark_dirty(slot);
        }
    }

    /// Releases the drain guards of connections without outstanding device requests.
    fn release_drain_guards(&mut self) {
        let connections = &mut self.connections;
        self.draining.retain(|slot| {
            // The guards of a removed connection were dropped with it.
            let Some(entry) = connections.get_mut(*slot) else { return false };
            if entry.outstanding_requests == 0 {
                entry.connection.state.drain_guards.clear();
            }
            entry.outstanding_requests > 0
        });
    }

    fn listen(&mut self, address: SocketAddr, portid: u16) -> std::io::Result<SocketAddr> {
        let listener = self.network.listen(&address.into())?;
        self.listeners.push((listener, portid));
        Ok(self.network.local_address(listener).and_then(|local| local.tcp()).unwrap_or(address))
    }

    /// Closes the listener of a port, or all listeners.
    fn unlisten(&mut self, portid: Option<u16>) {
        let network = &mut self.network;
        self.listeners.retain(|(listener, id)| {
            let keep = portid.is_some_and(|portid| portid != *id);
            if !keep {
                network.close_listener(*listener);
            }
            keep
        });
    }

    /// Assigns an accepted connection to the group with the fewest connections.
    fn assign_connection(
        &mut self,
        listener: ListenerId,
        stream: N::Stream,
        peer: StreamAddress,
        now_ns: u64,
    ) {
        let Some((_, portid)) = self.listeners.iter().find(|(id, _)| *id == listener) else { return };
        // The target listens on IP addresses only.
        let Some(peer) = peer.tcp() else { return };
        let total: u32 = self.statuses.iter().map(|status| status.connections.load(Ordering::Relaxed)).sum();
        if self.stopping || total >= self.shared.limits.connections_max {
            // Dropping the stream closes it. The host may retry when others have disconnected.
            return;
        }
        let local = N::local_address_of(&stream).or_else(|| self.network.local_address(listener));
        let Some(local) = local.and_then(|local| local.tcp()) else { return };
        let port = SubsystemPort { portid: *portid, address: crate::address::transport_address(local) };
        let connections = |group: &usize| self.statuses[*group].connections.load(Ordering::Relaxed);
        let least_loaded = (0..self.statuses.len()).min_by_key(connections);
        let group = least_loaded.unwrap_or(self.index);
        self.statuses[group].connections.fetch_add(1, Ordering::Relaxed);
        match self.peers.get(group) {
            Some(peer_group) if group != self.index => {
                if peer_group.send(TcpGroupMessage::Incoming { stream, port, peer }).is_err() {
                    // Its mailbox is full, so the group is overloaded: the connection is closed and the host retries.
                    self.statuses[group].connections.fetch_sub(1, Ordering::Relaxed);
                }
            }
            _ => self.add_connection(stream, port, peer, now_ns),
        }
    }

    /// Logs that a connection was not accepted; the network retries.
    #[cold]
    fn log_failed_accept(&mut self, listener: ListenerId, error: &std::io::Error) {
        let local = self.network.local_address(listener).and_then(|local| local.tcp());
        if let Some(local) = local {
            self.log.log(self.clock.now_ns(), local, format!("a connection was not accepted: {error}"));
        }
    }

    fn add_connection(&mut self, stream: N::Stream, port: SubsystemPort, peer: SocketAddr, now_ns: u64) {
        let added = if self.connections.is_full() { None } else { self.network.add(stream).ok() };
        let Some(id) = added else {
            self.statuses[self.index].connections.fetch_sub(1, Ordering::Relaxed);
            return;
        };
        self.flows = self.flows.wrapping_add(1);
        let deadline_ns = now_ns.saturating_add(self.shared.limits.ic_timeout_ns);
        let connection = NvmfConnection::new(id, port, peer, self.flows, deadline_ns);
        let entry = ConnectionEntry {
            connection,
            outstanding_requests: 0,
            dirty: false,
            waiting_for_buffer: false,
            closing: false,
            closed: false,
        };
        let Ok(slot) = self.connections.insert(entry) else { panic!("a slab with room has none") };
        if let Some(entry) = self.connections.get_mut(slot) {
            let generation = slot.to_bits() >> 32 & 0xffff;
            entry.connection.state.tag_base = u64::from(slot.index()) << 48 | generation << 32;
        }
        let index = id.0.index() as usize;
        if self.by_network.len() <= index {
            self.by_network.resize(index + 1, None);
        }
        self.by_network[index] = Some(slot);
        self.timer_ns = self.timer_ns.min(deadline_ns);
    }

    /// Receives on a connection.
    #[inline]
    fn receive(&mut self, slot: Slot, now_ns: u64) {
        self.process(slot, now_ns, |connection, network, context, scratch| {
            connection.receive(network, context, scratch)
        });
    }

    /// Retries the commands of a connection that wait for a buffer.
    fn retry_deferred(&mut self, slot: Slot, now_ns: u64) {
        if let Some(entry) = self.connections.get_mut(slot) {
            entry.waiting_for_buffer = false;
        }
        self.process(slot, now_ns, |connection, _, context, _| connection.resume(context));
    }

    /// Runs `receive` on a connection with the group's resources, then updates the lists that the connection is in.
    #[inline]
    fn process(
        &mut self,
        slot: Slot,
        now_ns: u64,
        receive: impl FnOnce(
            &mut NvmfConnection,
            &mut N,
            &mut ConnectionContext<'_>,
            &mut [u8],
        ) -> Result<bool, CloseReason>,
    ) {
        let Some(entry) = self.connections.get_mut(slot) else { return };
        if entry.closed {
            return;
        }
        let mut context = ConnectionContext {
            pool: &self.pool,
            shared: &self.shared,
            now_ns,
            devices: &mut self.devices,
            outstanding_requests: &mut entry.outstanding_requests,
        };
        let result = receive(&mut entry.connection, &mut self.network, &mut context, &mut self.scratch);
        self.after_receive(slot, result, now_ns);
    }

    fn after_receive(&mut self, slot: Slot, received: Result<bool, CloseReason>, now_ns: u64) {
        let Some(entry) = self.connections.get_mut(slot) else { return };
        match received {
            Ok(more) => {
                if entry.connection.is_waiting() && !entry.waiting_for_buffer {
                    entry.waiting_for_buffer = true;
                    self.waiting_for_buffer.push(slot);
                }
                if more {
                    self.more_to_read.push(slot);
                }
                self.timer_ns = self.timer_ns.min(entry.connection.state.timer_ns());
                self.mark_dirty(slot);
            }
            Err(end) => self.close(slot, end, now_ns),
        }
    }

    #[inline]
    fn mark_dirty(&mut self, slot: Slot) {
        if let Some(entry) = self.connections.get_mut(slot)
            && !entry.dirty
        {
            entry.dirty = true;
            self.dirty.push(slot);
        }
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
        for completion in completions.drain(..) {
            let tag = completion.tag().0;
            let Some(slot) = self.connections.slot_at((tag >> 48) as u32) else { continue };
            let Some(entry) = self.connections.get_mut(slot) else { continue };
            if entry.connection.state.tag_base != tag & !0xffff_ffff {
                continue;
            }
            entry.outstanding_requests -= 1;
            if entry.closed {
                if entry.outstanding_requests == 0 {
                    self.connections.remove(slot);
                }
                continue;
            }
            entry.connection.state.complete(completion);
            if !entry.dirty {
                entry.dirty = true;
                self.dirty.push(slot);
            }
        }
        self.completions = completions;
        count
    }

    #[inline]
    fn flush_all(&mut self, now_ns: u64) {
        let mut dirty = std::mem::take(&mut self.dirty);
        for slot in dirty.drain(..) {
            let Some(entry) = self.connections.get_mut(slot) else { continue };
            entry.dirty = false;
            if entry.closed {
                continue;
            }
            let flushed = entry.connection.flush(&mut self.network);
            let state = &mut entry.connection.state;
            let close_io_queues = std::mem::take(&mut state.close_io_queues);
            if state.drain_deadline_ns.is_some() && !entry.closing {
                entry.closing = true;
                self.closing.push(slot);
            }
            if !state.ready_copies.is_empty() {
                self.ready_copies.push(slot);
            }
            if let Err(end) = flushed {
                self.close(slot, end, now_ns);
            }
            if close_io_queues {
                self.recheck_all_groups(now_ns);
            }
        }
        // Closing connections may have marked others dirty.
        dirty.append(&mut self.dirty);
        self.dirty = dirty;
        if !self.ready_copies.is_empty() {
            self.advance_copies(now_ns);
        }
    }

    /// Starts the next pieces of Copy commands.
    #[cold]
    fn advance_copies(&mut self, now_ns: u64) {
        for slot in std::mem::take(&mut self.ready_copies) {
            self.process(slot, now_ns, |connection, _, context, _| connection.resume(context));
        }
    }

    fn recheck_all_groups(&mut self, now_ns: u64) {
        for (group, peer) in self.peers.iter().enumerate() {
            if group != self.index {
                // The flag is authoritative; the message only wakes. A group with a full mailbox is awake.
                self.statuses[group].recheck.store(true, Ordering::Release);
                let _ = peer.send(TcpGroupMessage::Recheck);
            }
        }
        self.recheck_io_queues(now_ns);
    }

    /// Drains I/O queues whose controller is gone.
    fn recheck_io_queues(&mut self, now_ns: u64) {
        let is_orphaned = |state: &ConnectionState| matches!(&state.role, ConnectionRole::Io(queue) if !queue.lease.is_valid());
        let slots: Vec<Slot> = self
            .connections
            .iter()
            .filter(|(_, entry)| !entry.closed && is_orphaned(&entry.connection.state))
            .map(|(slot, _)| slot)
            .collect();
        for slot in slots {
            self.drain_connection(slot, now_ns);
        }
    }

    /// Drains a connection, then closes it.
    fn drain_connection(&mut self, slot: Slot, now_ns: u64) {
        let Some(entry) = self.connections.get_mut(slot) else { return };
        entry.connection.state.begin_drain(now_ns);
        self.mark_dirty(slot);
    }

    /// Closes connections that are drained, and those whose drain timed out.
    fn close_drained(&mut self, now_ns: u64) {
        let mut closing = std::mem::take(&mut self.closing);
        closing.retain(|slot| {
            let Some(entry) = self.connections.get_mut(*slot).filter(|entry| !entry.closed) else {
                return false;
            };
            let is_timed_out =
                entry.connection.state.drain_deadline_ns.is_none_or(|until_ns| until_ns <= now_ns);
            let is_done = is_timed_out || entry.connection.is_drained();
            if is_done {
                self.close(*slot, CloseReason::Controller, now_ns);
            }
            !is_done
        });
        // I/O queues of controllers that were just closed.
        closing.append(&mut self.closing);
        self.closing = closing;
    }

    /// Closes a connection. Its queue identifier stays in use until outstanding device requests complete, so
    /// that a late write cannot overwrite a newer one.
    fn close(&mut self, slot: Slot, end: CloseReason, now_ns: u64) {
        let Some(entry) = self.connections.get_mut(slot) else { return };
        if entry.closed {
            return;
        }
        if let Some(text) = end.log_message() {
            self.log.log(now_ns, entry.connection.state.peer, text);
        }
        // Best effort: the TermReq PDU with the reason may be in the queue.
        let _ = entry.connection.flush(&mut self.network);
        let id: ConnectionId = entry.connection.id;
        self.network.close(id);
        if let Some(known) = self.by_network.get_mut(id.0.index() as usize) {
            *known = None;
        }
        entry.closed = true;
        self.statuses[self.index].connections.fetch_sub(1, Ordering::Relaxed);
        // A controller ends with its admin queue, and its I/O queues end with the controller.
        let was_admin = matches!(entry.connection.state.role, ConnectionRole::Admin(_));
        if was_admin {
            entry.connection.state.role = ConnectionRole::Closed;
        }
        if entry.outstanding_requests == 0 {
            self.connections.remove(slot);
        }
        if was_admin {
            self.recheck_all_groups(now_ns);
        }
    }

    /// Handles handshake and keep-alive timeouts.
    fn run_timers(&mut self, now_ns: u64) {
        let due: Vec<Slot> = self
            .connections
            .iter()
            .filter(|(_, entry)| !entry.closed && entry.connection.state.timer_ns() <= now_ns)
            .map(|(slot, _)| slot)
            .collect();
        for slot in due {
            let Some(entry) = self.connections.get_mut(slot) else { continue };
            let state = &mut entry.connection.state;
            if matches!(state.role, ConnectionRole::Admin(_)) {
                state.controller_event(ControllerEvent::Tick, now_ns);
                self.mark_dirty(slot);
            } else {
                self.close(slot, CloseReason::Timeout, now_ns);
            }
        }
        let timers = self.connections.iter().map(|(_, entry)| entry.connection.state.timer_ns());
        self.timer_ns = timers.min().unwrap_or(u64::MAX);
    }

    /// Applies a new configuration to all connections.
    fn apply(&mut self, core: &Core, snapshot: Arc<ConfigSnapshot>, now_ns: u64) {
        self.devices.apply(core, &snapshot);
        let slots: Vec<Slot> = self.connections.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            let Some(entry) = self.connections.get_mut(slot) else { continue };
            if entry.closed {
                continue;
            }
            let state = &mut entry.connection.state;
            match &mut state.role {
                ConnectionRole::Io(queue) => match snapshot.subsystem(&queue.subsystem.nqn) {
                    Some(subsystem) if !Arc::ptr_eq(&subsystem, &queue.subsystem) => {
                        // A plan holds an index into the old table; the new table may have another namespace there.
                        let backend_of =
                            |subsystem: &nvme_controller::Subsystem, plan: &nvme_controller::io::IoPlan| {
                                subsystem.namespace(plan.namespace + 1).map(|namespace| namespace.backend)
                            };
                        state.commands.reject_stale(|plan| {
                            backend_of(&queue.subsystem, plan) == backend_of(&subsystem, plan)
                        });
                        let limits = &self.shared.limits.controller;
                        queue.namespaces = NamespaceTable::for_controller(
                            &subsystem,
                            state.port.portid,
                            limits,
                            &self.shared.directory,
                            queue.lease.association(),
                        );
                        queue.subsystem = subsystem;
                        // The controller makes the same check, possibly on another core and later.
                        let host = queue.lease.association().hostnqn();
                        if !queue.subsystem.listens_on(state.port.portid) || !queue.subsystem.allows(host) {
                            state.begin_drain(now_ns);
                        }
                    }
                    Some(_) => {}
                    None => {
                        // Its backend keys may soon be reused for other devices: commands not yet submitted are rejected.
                        state.commands.reject_stale(|_| false);
                        queue.namespaces = NamespaceTable::default();
                        state.begin_drain(now_ns);
                    }
                },
                ConnectionRole::Admin(controller) => {
                    let current = controller.subsystem().clone();
                    match snapshot.subsystem(&current.nqn) {
                        Some(subsystem) if !Arc::ptr_eq(&subsystem, &current) => {
                            state.controller_event(ControllerEvent::SubsystemChanged(subsystem), now_ns);
                        }
                        Some(_) => {}
                        None => state.controller_event(ControllerEvent::SubsystemRemoved, now_ns),
                    }
                    state.controller_event(
                        ControllerEvent::DiscoveryChanged(snapshot.discovery.clone()),
                        now_ns,
                    );
                }
                _ => continue,
            }
            self.mark_dirty(slot);
        }
        self.shared.snapshot = snapshot;
    }

    fn report(&self) -> Vec<ConnectionReport> {
        let report = |entry: &ConnectionEntry| {
            let state = &entry.connection.state;
            let association = match &state.role {
                ConnectionRole::Admin(controller) => Some((controller.association(), 0)),
                ConnectionRole::Io(queue) => Some((queue.lease.association(), queue.lease.qid())),
                _ => None,
            };
            ConnectionReport {
                group: self.index,
                subnqn: association.map(|(association, _)| association.subnqn().clone()),
                cntlid: association.map_or(0xffff, |(association, _)| association.cntlid()),
                qid: association.map(|(_, qid)| qid),
                peer: state.peer,
                local: state.port.address.clone(),
                entries: state.sq_entries,
                counters: state.stats,
            }
        };
        self.connections.iter().filter(|(_, entry)| !entry.closed).map(|(_, entry)| report(entry)).collect()
    }
}

impl<N: Network> PollGroup for TcpPollGroup<N> {
    const NAME: &'static str = "nvmf_tcp";

    fn poll(&mut self, core: &Core, now_ns: u64) -> usize {
        let mut count = self.process_messages(core, now_ns);
        if let Some(drains) = self.notifier.as_ref().and_then(|notifier| notifier.take()) {
            self.on_reservation_change(&drains, now_ns);
            count += 1;
        }
        let mut events = std::mem::take(&mut self.events);
        count += self.network.poll(&mut events);
        let mut more_to_read =
            std::mem::replace(&mut self.more_to_read, std::mem::take(&mut self.more_to_read_spare));
        for slot in more_to_read.drain(..) {
            self.receive(slot, now_ns);
            count += 1;
        }
        self.more_to_read_spare = more_to_read;
        for slot in std::mem::take(&mut self.waiting_for_buffer) {
            self.retry_deferred(slot, now_ns);
        }
        for event in events.drain(..) {
            match event {
                NetworkEvent::Incoming { listener, stream, peer } => {
                    self.assign_connection(listener, stream, peer, now_ns)
                }
                NetworkEvent::AcceptFailed { listener, error } => self.log_failed_accept(listener, &error),
                NetworkEvent::Ready(id) => {
                    let Some(Some(slot)) = self.by_network.get(id.0.index() as usize).copied() else {
                        continue;
                    };
                    self.receive(slot, now_ns);
                }
            }
        }
        self.events = events;
        count += self.drive_devices();
        if !self.draining.is_empty() {
            self.release_drain_guards();
        }
        if !self.dirty.is_empty() {
            self.flush_all(now_ns);
        }
        if now_ns >= self.timer_ns {
            self.run_timers(now_ns);
            self.flush_all(now_ns);
            count += 1;
        }
        if !self.closing.is_empty() {
            self.close_drained(now_ns);
        }
        count
    }

    fn deadline(&self) -> Option<u64> {
        let ready = !self.more_to_read.is_empty() || !self.messages.is_empty() || self.network.is_pending();
        if ready {
            return Some(0);
        }
        // There is no event either when queues on other cores close.
        let retry = !self.waiting_for_buffer.is_empty() || !self.closing.is_empty();
        let memory = retry.then(|| self.clock.now_ns() + RETRY_NS);
        let timer = (self.timer_ns != u64::MAX).then_some(self.timer_ns);
        [self.devices.deadline(), memory, timer].into_iter().flatten().min()
    }

    fn shutdown(&mut self, now_ns: u64) -> Shutdown {
        self.stopping = true;
        self.unlisten(None);
        let all: Vec<Slot> = self.connections.iter().map(|(slot, _)| slot).collect();
        for slot in all {
            self.drain_connection(slot, now_ns);
        }
        if self.connections.is_empty() { Shutdown::Done } else { Shutdown::Draining }
    }
}

impl NvmfConnection {
    fn new(
        id: ConnectionId,
        port: SubsystemPort,
        peer: SocketAddr,
        flow: u16,
        deadline_ns: u64,
    ) -> NvmfConnection {
        NvmfConnection {
            id,
            receiver: nvme_tcp::PduReceiver::default(),
            state: ConnectionState {
                role: ConnectionRole::AwaitingIcReq,
                // Before Connect completes, one command at a time.
                commands: CommandTable::new(1),
                sender: nvme_tcp::PduSender::default(),
                send_framing: wire_nvme::tcp::Framing::PLAIN,
                receive_framing: wire_nvme::tcp::Framing::PLAIN,
                incoming_pdu: IncomingPdu::None,
                tag_base: 0,
                flow,
                port,
                peer,
                handshake_deadline_ns: deadline_ns,
                send_blocked: false,
                sq_entries: 1,
                sq_head: 0,
                sq_flow_control_disabled: false,
                c2h_success: false,
                deferred: std::collections::VecDeque::new(),
                pairing: nvme_controller::io::FusedPairing::None,
                ready_copies: Vec::new(),
                pending_reservations: PendingCommands::default(),
                drain_guards: Vec::new(),
                drain_deadline_ns: None,
                terminated: false,
                close_io_queues: false,
                stats: QueueCounters::default(),
            },
        }
    }
}

impl ConnectionState {
    /// The next timeout of the connection; `u64::MAX` for none.
    fn timer_ns(&self) -> u64 {
        match &self.role {
            ConnectionRole::Admin(controller) => controller.deadline().unwrap_or(u64::MAX),
            ConnectionRole::AwaitingIcReq | ConnectionRole::AwaitingConnect => self.handshake_deadline_ns,
            _ => u64::MAX,
        }
    }
}
