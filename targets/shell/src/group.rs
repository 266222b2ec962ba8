//! One core's connections and its channels to block devices.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use dma::Pool;
use reactor::{Core, Shutdown};
use slots::Slot;
use sockets::{ListenerId, Network, NetworkEvent, StreamAddress};

use crate::connections::Connections;
use crate::cores::GroupMessage;
use crate::devices::CoreDevices;
use crate::logins::{GroupLimits, PendingLogins};
use crate::mailboxes::{CoreMailboxes, Inbox};
use crate::poller::PollGroup;
use crate::protocol::{
    Accepted, CloseReason, IoContext, MoreToRead, Notice, Protocol, ProtocolConnection, TargetConfig,
};
use crate::timers::{NEVER_NS, TimerOwner, Timers};

/// Bytes received at a time beyond payload that goes directly into its buffer. Half of a typical L2 cache.
const SCRATCH_BYTES: usize = 128 << 10;
/// Interval for retrying what waits without an event, as for buffers that another core frees.
const RETRY_NS: u64 = 1_000_000;

/// Time after the end of a connection until its memory goes back to the arena: most hosts soon reconnect.
const RELEASE_DELAY_NS: u64 = 1_000_000_000;
/// Chunks of 2 MiB that a core keeps nevertheless.
const CHUNKS_KEPT: usize = 4;

/// What the groups of a target share.
pub(crate) struct GroupShared<P: Protocol, S> {
    limits: GroupLimits,
    statuses: Box<[GroupStatus]>,
    peers: CoreMailboxes<GroupMessage<P, S>>,
}

/// What other groups read and set: the load of a group, and a request to recheck its connections.
#[derive(Default)]
struct GroupStatus {
    /// All connections, and those of them whose peers have not logged in.
    connections: AtomicU32,
    pending_logins: AtomicU32,
    recheck: AtomicBool,
}

impl<P: Protocol, S> GroupShared<P, S> {
    pub(crate) fn new(
        limits: GroupLimits,
        cores: usize,
        peers: CoreMailboxes<GroupMessage<P, S>>,
    ) -> GroupShared<P, S> {
        GroupShared { limits, statuses: (0..cores).map(|_| GroupStatus::default()).collect(), peers }
    }

    /// Connections of the target whose peers have logged in.
    fn logged_in(&self) -> u32 {
        let logged_in = |status: &GroupStatus| {
            let pending = status.pending_logins.load(Ordering::Relaxed);
            status.connections.load(Ordering::Relaxed).saturating_sub(pending)
        };
        self.statuses.iter().map(logged_in).sum()
    }
}

/// The messages and the configuration of a group of connections.
type ConnectionInbox<P, S> = Inbox<GroupMessage<P, S>, <P as Protocol>::Config>;

/// The connections of one core, generic over protocol and network.
///
/// It owns the connections, one channel per block device, the receive scratch area and, on the first core, the
/// listeners. A connection accepted there goes to the group with the fewest connections and stays.
///
/// Order of a poll: messages; events of the protocol; receive, which fills the devices' batches; submit and poll
/// devices; send; timers; close connections that are drained. Lists of slots bound the work to the connections that
/// have some. Nothing locks or allocates per I/O; other groups are reached by mailbox and by the atomics of their status.
///
/// [`TargetCores::start`](crate::TargetCores::start) makes one per reactor; [`standalone`](Self::standalone) is one by
/// itself.
pub struct ConnectionGroup<P: Protocol, N: Network> {
    index: usize,
    network: N,
    pool: Pool,
    clock: os::clock::Clock,
    protocol: P,
    config: Arc<P::Config>,
    devices: CoreDevices,
    connections: Connections<P::Connection>,
    listeners: Vec<(ListenerId, u16)>,
    inbox: Option<ConnectionInbox<P, N::Stream>>,
    shared: Arc<GroupShared<P, N::Stream>>,
    scratch: Vec<u8>,
    events: Vec<NetworkEvent<N::Stream>>,
    completions: Vec<bdev::Completion>,
    /// Connections that may have more to receive.
    more_to_read: Vec<Slot>,
    /// Spare allocation for the next `more_to_read`.
    more_to_read_spare: Vec<Slot>,
    /// Connections whose work continues without an event.
    resuming: Vec<Slot>,
    /// Connections that wait for what no event reports.
    waiting: Vec<Slot>,
    /// Connections that close when they are drained.
    closing: Vec<Slot>,
    logins: PendingLogins,
    timers: Timers,
    flows: u16,
    stopping: bool,
}

impl<P: Protocol, N: Network> ConnectionGroup<P, N> {
    pub(crate) fn new(
        core: &Core,
        network: N,
        protocol: P,
        shared: Arc<GroupShared<P, N::Stream>>,
        inbox: Option<ConnectionInbox<P, N::Stream>>,
    ) -> ConnectionGroup<P, N> {
        let logins = PendingLogins::new(&shared.limits, shared.statuses.len());
        ConnectionGroup {
            index: core.index(),
            network,
            pool: core.pool().clone(),
            clock: core.clock().clone(),
            protocol,
            config: Arc::default(),
            devices: CoreDevices::default(),
            connections: Connections::new(),
            listeners: Vec::new(),
            inbox,
            shared,
            scratch: vec![0; SCRATCH_BYTES],
            events: Vec::new(),
            completions: Vec::with_capacity(256),
            more_to_read: Vec::new(),
            more_to_read_spare: Vec::new(),
            resuming: Vec::new(),
            waiting: Vec::new(),
            closing: Vec::new(),
            logins,
            timers: Timers::default(),
            flows: 0,
            stopping: false,
        }
    }

    /// A group without others and without a control plane, for simulations: it is called directly.
    pub fn standalone(core: &Core, network: N, protocol: P, limits: GroupLimits) -> ConnectionGroup<P, N> {
        let shared = GroupShared::new(limits, core.index() + 1, CoreMailboxes::default());
        ConnectionGroup::new(core, network, protocol, Arc::new(shared), None)
    }

    /// The connections.
    pub fn connections(&self) -> &Connections<P::Connection> {
        &self.connections
    }

    /// Listens on an address. Returns it with the port that was assigned for port 0.
    pub fn listen(&mut self, address: &StreamAddress, portid: u16) -> io::Result<StreamAddress> {
        let listener = self.network.listen(address)?;
        self.listeners.push((listener, portid));
        Ok(self.network.local_address(listener).unwrap_or_else(|| address.clone()))
    }

    /// Closes the listeners of a port, or all.
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

    /// Applies a configuration to devices and connections.
    pub fn apply(&mut self, core: &Core, config: Arc<P::Config>, now_ns: u64) {
        self.devices.apply(core, config.devices(), P::LOG_TARGET);
        self.protocol.apply(&config, &mut self.connections, now_ns);
        self.config = config;
    }

    fn process_messages(&mut self, core: &Core, now_ns: u64) -> usize {
        let mut count = 0;
        while let Some(message) = self.inbox.as_mut().and_then(|inbox| inbox.messages.receive()) {
            count += 1;
            self.process_message(message, now_ns);
        }
        // A change of configuration wakes the group by a message. If the mailbox was full, there were others.
        if count > 0
            && let Some((generation, config)) =
                self.inbox.as_mut().and_then(|inbox| inbox.subscription.take())
        {
            self.apply(core, config, now_ns);
            if let Some(inbox) = &mut self.inbox {
                inbox.subscription.acknowledge(generation);
            }
        }
        let recheck = &self.shared.statuses[self.index].recheck;
        if recheck.load(Ordering::Acquire) {
            recheck.store(false, Ordering::Relaxed);
            self.protocol.recheck(&mut self.connections, now_ns);
        }
        count
    }

    #[cold]
    fn process_message(&mut self, message: GroupMessage<P, N::Stream>, now_ns: u64) {
        match message {
            GroupMessage::Wake => {}
            GroupMessage::Incoming { stream, accepted } => self.add_connection(stream, accepted, now_ns),
            GroupMessage::Listen { address, portid, responder } => {
                // The requester has reported a failure: listening now would contradict it.
                if responder.is_abandoned() {
                    return;
                }
                if let Err(Ok(_)) = responder.answer(self.listen(&address, portid)) {
                    self.unlisten(Some(portid));
                }
            }
            GroupMessage::Unlisten { portid, responder } => {
                self.unlisten(portid);
                _ = responder.answer(());
            }
            GroupMessage::Query(query) => query(&mut self.protocol, &mut self.connections),
        }
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
        let connections_of = |group: usize| self.shared.statuses[group].connections.load(Ordering::Relaxed);
        if self.stopping || self.shared.logged_in() >= self.shared.limits.connections_max {
            // Dropping the stream closes it. The peer may retry when others have disconnected.
            return;
        }
        let local = N::local_address_of(&stream).or_else(|| self.network.local_address(listener));
        let Some(local) = local else { return };
        // The group that adds it assigns the flow.
        let accepted = Accepted { portid: *portid, local, peer, flow: 0 };
        let groups = 0..self.shared.statuses.len();
        let group = groups.min_by_key(|group| connections_of(*group)).unwrap_or(self.index);
        // It counts as a pending login until its group knows better.
        let status = &self.shared.statuses[group];
        status.pending_logins.fetch_add(1, Ordering::Relaxed);
        status.connections.fetch_add(1, Ordering::Relaxed);
        if group == self.index || self.shared.peers.is_empty() {
            return self.add_connection(stream, accepted, now_ns);
        }
        if self.shared.peers.send(group, GroupMessage::Incoming { stream, accepted }).is_err() {
            // Its mailbox is full, so the group is overloaded: the connection is closed and the peer retries.
            let status = &self.shared.statuses[group];
            status.connections.fetch_sub(1, Ordering::Relaxed);
            status.pending_logins.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Logs that a connection was not accepted; the network retries.
    #[cold]
    fn log_failed_accept(&mut self, listener: ListenerId, error: &io::Error) {
        if let Some(local) = self.network.local_address(listener) {
            log::warn!(target: P::LOG_TARGET, "{local}: a connection was not accepted: {error}");
        }
    }

    fn add_connection(&mut self, stream: N::Stream, accepted: Accepted, now_ns: u64) {
        self.flows = self.flows.wrapping_add(1);
        let accepted = Accepted { flow: self.flows, ..accepted };
        let peer = accepted.peer.clone();
        let added = if self.connections.slab.is_full() {
            None
        } else {
            self.protocol.accept(accepted, &self.config, now_ns)
        };
        let added = added.and_then(|connection| Some((connection, self.network.add(stream).ok()?)));
        let status = &self.shared.statuses[self.index];
        let Some((connection, id)) = added else {
            status.connections.fetch_sub(1, Ordering::Relaxed);
            status.pending_logins.fetch_sub(1, Ordering::Relaxed);
            return;
        };
        let awaits_login = connection.awaits_login();
        let slot = self.connections.insert(connection, id, peer.clone());
        if let Some(entry) = self.connections.slab.get_mut(slot) {
            entry.awaits_login = awaits_login;
            self.timers.arm(slot, entry.connection.deadline_ns(), &mut entry.timer_ns);
        }
        if !awaits_login {
            status.pending_logins.fetch_sub(1, Ordering::Relaxed);
        } else if let Some(replaced) = self.logins.add(slot, &peer) {
            log::warn!(target: P::LOG_TARGET, "too many connections have not logged in; the oldest is closed");
            self.close(replaced, CloseReason::Limit, now_ns);
        }
        // It may want to speak first.
        self.connections.mark_dirty(slot);
    }

    /// Receives on a connection.
    #[inline]
    fn receive(&mut self, slot: Slot, now_ns: u64) {
        self.process(slot, now_ns, |connection, mut stream, scratch, context| {
            connection.receive(&mut stream, scratch, context)
        });
    }

    /// Runs `process` on a connection with the group's resources, then updates the lists that the connection is in.
    #[inline]
    fn process(
        &mut self,
        slot: Slot,
        now_ns: u64,
        process: impl FnOnce(
            &mut P::Connection,
            sockets::PlainStream<'_, N>,
            &mut [u8],
            &mut IoContext<'_, P>,
        ) -> Result<MoreToRead, CloseReason<P::Error>>,
    ) {
        let Some(entry) = self.connections.slab.get_mut(slot) else { return };
        if entry.closed {
            return;
        }
        let mut context = IoContext {
            pool: &self.pool,
            protocol: &mut self.protocol,
            config: &self.config,
            now_ns,
            devices: &mut self.devices,
            requests: &mut entry.requests,
        };
        let stream = self.network.stream(entry.id);
        let result = process(&mut entry.connection, stream, &mut self.scratch, &mut context);
        self.after_receive(slot, result, now_ns);
    }

    fn after_receive(
        &mut self,
        slot: Slot,
        received: Result<MoreToRead, CloseReason<P::Error>>,
        now_ns: u64,
    ) {
        let Some(entry) = self.connections.slab.get_mut(slot) else { return };
        match received {
            Ok(more) => {
                if entry.connection.is_waiting() && !entry.waiting {
                    entry.waiting = true;
                    self.waiting.push(slot);
                }
                if more == MoreToRead::Yes {
                    self.more_to_read.push(slot);
                }
                self.timers.arm(slot, entry.connection.deadline_ns(), &mut entry.timer_ns);
                self.connections.mark_dirty(slot);
            }
            Err(reason) => self.close(slot, reason, now_ns),
        }
    }

    /// Continues connections that wait for what no event reports.
    fn retry_waiting(&mut self, now_ns: u64) {
        for slot in std::mem::take(&mut self.waiting) {
            if let Some(entry) = self.connections.slab.get_mut(slot) {
                entry.waiting = false;
            }
            self.process(slot, now_ns, |connection, _, _, context| connection.resume(context));
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
            let Some(slot) = self.connections.slab.slot_at((tag >> 48) as u32) else { continue };
            let Some(entry) = self.connections.slab.get_mut(slot) else { continue };
            if entry.requests.tag_base != tag & !0xffff_ffff {
                continue;
            }
            entry.requests.outstanding -= 1;
            if entry.closed {
                if entry.requests.outstanding == 0 {
                    self.connections.slab.remove(slot);
                }
                continue;
            }
            entry.connection.complete(tag as u32, completion);
            if !entry.dirty {
                entry.dirty = true;
                self.connections.dirty.push(slot);
            }
        }
        self.completions = completions;
        count
    }

    #[inline]
    fn flush_all(&mut self, now_ns: u64) {
        let mut dirty = std::mem::take(&mut self.connections.dirty);
        for slot in dirty.drain(..) {
            let Some(entry) = self.connections.slab.get_mut(slot) else { continue };
            entry.dirty = false;
            if entry.closed {
                continue;
            }
            let flushed = entry.connection.flush(&mut self.network.stream(entry.id));
            let notice = entry.connection.take_notice();
            if entry.connection.is_draining() && !entry.closing {
                entry.closing = true;
                entry.drain_deadline_ns = now_ns.saturating_add(self.shared.limits.drain_timeout_ns);
                self.closing.push(slot);
            }
            if entry.connection.wants_resume() {
                self.resuming.push(slot);
            }
            if let Err(reason) = flushed {
                self.close(slot, reason, now_ns);
            }
            if notice != Notice::default() {
                self.process_notice(slot, notice, now_ns);
            }
        }
        // Closing connections may have marked others dirty.
        dirty.append(&mut self.connections.dirty);
        self.connections.dirty = dirty;
        if !self.resuming.is_empty() {
            self.resume(now_ns);
        }
    }

    #[cold]
    fn process_notice(&mut self, slot: Slot, notice: Notice, now_ns: u64) {
        if notice.logged_in {
            self.end_pending_login(slot);
            // Others may have logged in since it was accepted.
            if self.shared.logged_in() > self.shared.limits.connections_max {
                self.close(slot, CloseReason::Limit, now_ns);
            }
        }
        if notice.recheck {
            self.recheck_all_groups(now_ns);
        }
    }

    /// The peer of a connection has logged in, or the connection is closed.
    fn end_pending_login(&mut self, slot: Slot) {
        let Some(entry) = self.connections.slab.get_mut(slot) else { return };
        if std::mem::take(&mut entry.awaits_login) {
            self.logins.remove(slot);
            self.shared.statuses[self.index].pending_logins.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Continues connections that have work without an event.
    #[cold]
    fn resume(&mut self, now_ns: u64) {
        for slot in std::mem::take(&mut self.resuming) {
            self.process(slot, now_ns, |connection, _, _, context| connection.resume(context));
        }
    }

    fn recheck_all_groups(&mut self, now_ns: u64) {
        for group in 0..self.shared.peers.len() {
            if group != self.index {
                // The flag is authoritative; the message only wakes. A group with a full mailbox is awake.
                self.shared.statuses[group].recheck.store(true, Ordering::Release);
                _ = self.shared.peers.send(group, GroupMessage::Wake);
            }
        }
        self.protocol.recheck(&mut self.connections, now_ns);
    }

    /// Closes connections that are drained, and those whose drain timed out.
    fn close_drained(&mut self, now_ns: u64) {
        let mut closing = std::mem::take(&mut self.closing);
        closing.retain(|slot| {
            let Some(entry) = self.connections.slab.get_mut(*slot).filter(|entry| !entry.closed) else {
                return false;
            };
            let is_done = entry.drain_deadline_ns <= now_ns || entry.connection.is_drained();
            if is_done {
                self.close(*slot, CloseReason::Drained, now_ns);
            }
            !is_done
        });
        // The close of these may have begun the drain of others.
        closing.append(&mut self.closing);
        self.closing = closing;
    }

    /// Closes a connection. The protocol's part stays until outstanding device requests complete, so that a late write
    /// cannot overwrite a newer one.
    fn close(&mut self, slot: Slot, reason: CloseReason<P::Error>, now_ns: u64) {
        let Some(entry) = self.connections.slab.get_mut(slot) else { return };
        if entry.closed {
            return;
        }
        if let CloseReason::Protocol(error) = &reason {
            log::warn!(target: P::LOG_TARGET, "{}: {error}", entry.peer);
        }
        // Best effort: a message with the reason may be queued.
        _ = entry.connection.flush(&mut self.network.stream(entry.id));
        self.network.close(entry.id);
        if let Some(known) = self.connections.by_network.get_mut(entry.id.0.index() as usize) {
            *known = None;
        }
        entry.closed = true;
        self.timers.arm_group(now_ns.saturating_add(RELEASE_DELAY_NS));
        self.end_pending_login(slot);
        let Some(entry) = self.connections.slab.get_mut(slot) else { return };
        self.shared.statuses[self.index].connections.fetch_sub(1, Ordering::Relaxed);
        let recheck = entry.connection.on_close();
        if entry.requests.outstanding == 0 {
            self.connections.slab.remove(slot);
        }
        if recheck {
            self.recheck_all_groups(now_ns);
        }
    }

    /// Handles deadlines that have passed.
    fn run_timers(&mut self, now_ns: u64) {
        while let Some((at_ns, owner)) = self.timers.pop_expired(now_ns) {
            let TimerOwner::Connection(slot) = owner else {
                self.pool.release_idle(CHUNKS_KEPT);
                continue;
            };
            let Some(entry) = self.connections.slab.get_mut(slot) else { continue };
            if entry.closed || entry.timer_ns != at_ns {
                continue;
            }
            entry.timer_ns = NEVER_NS;
            if entry.connection.deadline_ns() > now_ns {
                self.timers.arm(slot, entry.connection.deadline_ns(), &mut entry.timer_ns);
                continue;
            }
            match entry.connection.on_deadline(&mut self.protocol, now_ns) {
                Ok(()) => {
                    // What is still due is due in the next poll, so that this loop ends.
                    let next_ns = entry.connection.deadline_ns().max(now_ns + 1);
                    self.timers.arm(slot, next_ns, &mut entry.timer_ns);
                    self.connections.mark_dirty(slot);
                }
                Err(reason) => self.close(slot, reason, now_ns),
            }
        }
    }
}

impl<P: Protocol, N: Network> PollGroup for ConnectionGroup<P, N> {
    const NAME: &'static str = P::NAME;

    fn poll(&mut self, core: &Core, now_ns: u64) -> usize {
        let mut count = self.process_messages(core, now_ns);
        count += self.protocol.begin_poll(&mut self.connections, now_ns);
        let mut events = std::mem::take(&mut self.events);
        count += self.network.poll(&mut events);
        let spare = std::mem::take(&mut self.more_to_read_spare);
        let mut more_to_read = std::mem::replace(&mut self.more_to_read, spare);
        for slot in more_to_read.drain(..) {
            self.receive(slot, now_ns);
            count += 1;
        }
        self.more_to_read_spare = more_to_read;
        if !self.waiting.is_empty() {
            self.retry_waiting(now_ns);
        }
        for event in events.drain(..) {
            match event {
                NetworkEvent::Incoming { listener, stream, peer } => {
                    self.assign_connection(listener, stream, peer, now_ns)
                }
                NetworkEvent::AcceptFailed { listener, error } => self.log_failed_accept(listener, &error),
                NetworkEvent::Ready(id) => {
                    if let Some(slot) = self.connections.by_id(id) {
                        self.receive(slot, now_ns);
                    }
                }
            }
        }
        self.events = events;
        let completed = self.drive_devices();
        count += completed;
        if completed > 0 {
            self.protocol.after_completions(&mut self.connections);
        }
        if !self.connections.dirty.is_empty() {
            self.flush_all(now_ns);
        }
        if now_ns >= self.timers.next_ns() {
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
        let has_messages = self.inbox.as_ref().is_some_and(|inbox| !inbox.messages.is_empty());
        if !self.more_to_read.is_empty() || has_messages || self.network.is_pending() {
            return Some(0);
        }
        // There is no event either when connections on other cores close.
        let retry = !self.waiting.is_empty() || !self.closing.is_empty();
        let waiting = retry.then(|| self.clock.now_ns() + RETRY_NS);
        let timer = self.timers.next_ns().min(self.protocol.deadline_ns());
        let timer = Some(timer).filter(|at_ns| *at_ns != NEVER_NS);
        [self.devices.deadline(), waiting, timer].into_iter().flatten().min()
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        self.stopping = true;
        self.unlisten(None);
        self.connections.update(|_, entry| {
            entry.connection.begin_drain();
            true
        });
        if self.connections.is_empty() { Shutdown::Done } else { Shutdown::Draining }
    }
}
