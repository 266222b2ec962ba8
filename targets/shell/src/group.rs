//! One core's connections and its channels to block devices.

mod active;
mod admission;
mod closing;
mod moving;
mod polled;
mod slow_peers;
mod turn;

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::vec::Drain;

use block_io::Payload;
use dma::{Data, Pool};
use reactor::{Core, Shutdown};
use slots::Slot;
use sockets::{Listen, ListenerId, Network, NetworkEvent, SentEvent, StreamAddress};

use active::{CoreGroups, LastActive};
pub use admission::ConnectionTotals;
pub(crate) use admission::GroupShared;
use polled::add_polled;
use slow_peers::SlowPeers;
use turn::{LimitedStream, TurnSends};

use crate::admissions::ConnectionLimits;
use crate::connections::Connections;
use crate::cores::GroupMessage;
use crate::devices::CoreDevices;
use crate::logins::{GroupLimits, PendingLogins};
use crate::mailboxes::{CoreMailboxes, Inbox};
use crate::memory::{CoreMemory, MemoryLimits};
use crate::moves::GroupMoves;
use crate::poller::PollGroup;
use crate::protocol::{
    CloseReason, IoContext, MoreToRead, Notice, Protocol, ProtocolConnection, REQUEST_TAG_MASK, TargetConfig,
    Turn,
};
use crate::request::Responder;
use crate::timers::{NEVER_NS, TimerOwner, Timers};

/// Bytes received at a time beyond payload that goes directly into its buffer. Half of a typical L2 cache.
const SCRATCH_BYTES: usize = 128 << 10;
/// Connections that are retried in a poll. Each takes a few hundred instructions, and all have their turn
/// within a few polls.
const RETRIES_MAX: usize = 16;
/// Interval for retrying what waits without an event, as for buffers that another core frees.
const RETRY_NS: u64 = 1_000_000;

/// Time after the end of a connection until its memory goes back to the arena: most hosts soon reconnect.
const RELEASE_DELAY_NS: u64 = 1_000_000_000;
/// Chunks of 2 MiB that a core keeps nevertheless.
const CHUNKS_KEPT: usize = 4;

/// The messages and the configuration of a group of connections.
type ConnectionInbox<P, S> = Inbox<GroupMessage<P, S>, <P as Protocol>::Config>;

/// The connections of one core, generic over protocol and network.
///
/// It owns the connections, one channel per block device, the receive scratch area and, on the first core,
/// the listeners. A connection accepted there goes to the group with the fewest connections, and stays or
/// moves.
///
/// Order of a poll: messages; events of the protocol; timers; receive, and poll connections whose peers share
/// memory, which fills the devices' batches; submit and poll devices; send, a limited number of bytes; close
/// connections that are drained. Lists of slots bound the work to the connections that have some. Nothing
/// locks or allocates per I/O; other groups are reached by mailbox and by the atomics of their status.
///
/// [`TargetCores::start`](crate::TargetCores::start) makes one per reactor; [`standalone`](Self::standalone)
/// is one by itself.
pub struct ConnectionGroup<P: Protocol, N: Network> {
    /// Among the groups of the target.
    index: usize,
    /// Index of the reactor.
    core: usize,
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
    sent: Vec<SentEvent>,
    completions: Vec<bdev::Completion>,
    /// Connections that may have more to receive.
    more_to_read: Vec<Slot>,
    /// Spare allocation for the next `more_to_read`.
    more_to_read_spare: Vec<Slot>,
    /// Several connections have something to receive in this turn, or another target of the core is active.
    others_ready: bool,
    /// Something was received or found in this poll.
    is_active: bool,
    /// The groups of this core, and the key of this one.
    core_groups: Rc<CoreGroups>,
    key: u64,
    /// What a turn sends. Connections with more to send stay marked dirty.
    sends: TurnSends,
    /// Connections whose work continues without an event.
    resuming: Vec<Slot>,
    /// Connections that wait for what no event reports.
    waiting: Vec<Slot>,
    /// Connections whose work arrives through memory.
    polled: Vec<Slot>,
    /// How many of them had commands in the last poll.
    polled_busy: usize,
    /// Those that had commands lately.
    polled_active: LastActive,
    /// Connections that close when they are drained.
    closing: Vec<Slot>,
    /// Those that move to other groups.
    moves: GroupMoves,
    logins: PendingLogins,
    /// What the connections of the core hold of its buffers.
    memory: Rc<CoreMemory>,
    slow_peers: SlowPeers,
    timers: Timers,
    /// The events of its connections.
    trace: bdev::TargetTrace,
    stopping: bool,
    /// Who waits until no connection is left.
    drained: Option<Responder<()>>,
}

impl<P: Protocol, N: Listen> ConnectionGroup<P, N> {
    pub(crate) fn new(
        core: &Core,
        network: N,
        protocol: P,
        shared: Arc<GroupShared<P, N::Stream>>,
        inbox: Option<ConnectionInbox<P, N::Stream>>,
    ) -> ConnectionGroup<P, N> {
        let core_groups = core.local::<CoreGroups>();
        let key = core_groups.add();
        let memory = core.local::<CoreMemory>();
        memory.set_limits(MemoryLimits::of_core(core.pool().arena().limit_bytes(), shared.statuses.len()));
        let trace = shared.registry.target_trace(core.index(), P::NAME);
        let slow_peers = SlowPeers::new(shared.limits.transfer_timeout_ns);
        let logins = PendingLogins::new(&shared.limits, shared.statuses.len(), os::descriptor_limit());
        ConnectionGroup {
            // A group by itself is the first.
            index: inbox.as_ref().map_or(0, |inbox| inbox.index),
            core: core.index(),
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
            sent: Vec::new(),
            completions: Vec::with_capacity(256),
            more_to_read: Vec::new(),
            more_to_read_spare: Vec::new(),
            others_ready: false,
            is_active: false,
            core_groups,
            key,
            sends: TurnSends::default(),
            resuming: Vec::new(),
            waiting: Vec::new(),
            polled: Vec::new(),
            polled_busy: 0,
            polled_active: LastActive::default(),
            closing: Vec::new(),
            moves: GroupMoves::default(),
            logins,
            memory,
            slow_peers,
            timers: Timers::default(),
            trace,
            stopping: false,
            drained: None,
        }
    }

    /// A group without others and without a control plane, for simulations: it is called directly.
    pub fn standalone(core: &Core, network: N, protocol: P, limits: GroupLimits) -> ConnectionGroup<P, N> {
        let shared = GroupShared::new(limits, 1, CoreMailboxes::default());
        ConnectionGroup::new(core, network, protocol, Arc::new(shared), None)
    }

    /// The connections.
    pub fn connections(&self) -> &Connections<P::Connection> {
        &self.connections
    }

    /// The connections of the target, on all its cores.
    pub fn totals(&self) -> ConnectionTotals {
        self.shared.totals()
    }

    /// Changes how many connections of the target there may be, for those that log in from now on.
    pub fn set_limits(&self, limits: ConnectionLimits) {
        self.shared.admissions().set_limits(limits);
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

    /// Applies the latest configuration, if it was not yet.
    fn apply_latest(&mut self, core: &Core, now_ns: u64) {
        let latest = self.inbox.as_mut().and_then(|inbox| inbox.subscription.take());
        let Some((generation, config)) = latest else { return };
        self.apply(core, config, now_ns);
        if let Some(inbox) = &mut self.inbox {
            inbox.subscription.acknowledge(generation);
        }
    }

    fn process_messages(&mut self, core: &Core, now_ns: u64) -> usize {
        let mut count = 0;
        while let Some(message) = self.inbox.as_mut().and_then(|inbox| inbox.messages.receive()) {
            count += 1;
            if matches!(message, GroupMessage::Moved(_)) {
                // The other core may have applied it already.
                self.apply_latest(core, now_ns);
            }
            self.process_message(message, now_ns);
        }
        // A change of configuration wakes the group by a message. If the mailbox was full, there were others.
        if count > 0 {
            self.apply_latest(core, now_ns);
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
            GroupMessage::Moved(moved) => self.attach_moved(*moved, now_ns),
            GroupMessage::Loads(responder) => {
                if !responder.is_abandoned() {
                    _ = responder.answer(self.take_loads(now_ns));
                }
            }
            GroupMessage::Move(moves) => self.begin_moves(moves, now_ns),
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
            GroupMessage::Drain(responder) => self.drained = Some(responder),
            GroupMessage::Query(query) => query(&mut self.protocol, &mut self.connections),
            GroupMessage::SendStats(responder) => _ = responder.answer(self.network.send_stats()),
        }
    }

    /// Passes the ends of owned sends to their connections.
    #[cold]
    fn process_sent(&mut self, now_ns: u64) {
        let mut sent = std::mem::take(&mut self.sent);
        for SentEvent { connection, tag, result } in sent.drain(..) {
            // The network's identifier may be another connection's by now.
            let Some(slot) = self.connections.by_id(connection) else { continue };
            let Some(entry) = self.connections.slab.get_mut(slot) else { continue };
            if entry.id != connection {
                continue;
            }
            entry.connection.sent(tag);
            self.connections.mark_dirty(slot);
            if let Err(kind) = result {
                self.close(slot, CloseReason::Network(kind), now_ns);
            }
        }
        self.sent = sent;
    }

    /// Receives on a connection.
    #[inline]
    fn receive(&mut self, slot: Slot, now_ns: u64) {
        self.process(slot, now_ns, |connection, mut stream, scratch, context| {
            connection.receive(&mut stream, scratch, context)
        });
    }

    /// Runs `process` on a connection with the group's resources, then updates the lists that the connection
    /// is in.
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
            turn: Turn::new(self.others_ready, entry.has_more),
            devices: &mut self.devices,
            requests: &mut entry.requests,
        };
        let stream = self.network.stream(entry.id);
        let result = process(&mut entry.connection, stream, &mut self.scratch, &mut context);
        // With its requests in flight, those that it has just begun included.
        probe::probe!(ringbolt, connection_received, self.core, slot.index(), entry.requests.outstanding);
        self.after_receive(slot, result, now_ns);
    }

    /// Whether several connections have something to receive. One that continues may have an event, too.
    #[inline]
    fn are_several_ready(&self, events: &[NetworkEvent<N::Stream>]) -> bool {
        let continues = self.more_to_read.len();
        let is_counted = |event: &NetworkEvent<N::Stream>| match event {
            NetworkEvent::Ready(id) => self.connections.by_id(*id) == self.more_to_read.first().copied(),
            _ => false,
        };
        match continues {
            0 => events.len() > 1,
            1 => events.iter().any(|event| !is_counted(event)),
            _ => true,
        }
    }

    fn after_receive(
        &mut self,
        slot: Slot,
        received: Result<MoreToRead, CloseReason<P::Error>>,
        now_ns: u64,
    ) {
        let Some(entry) = self.connections.slab.get_mut(slot) else { return };
        match received {
            Ok(MoreToRead::Unchanged) => {}
            Ok(more) => {
                self.is_active = true;
                if entry.connection.is_waiting() && !entry.waiting {
                    entry.waiting = true;
                    self.waiting.push(slot);
                }
                // Once, however often it was processed in this turn.
                if more == MoreToRead::Yes && !entry.has_more {
                    entry.has_more = true;
                    self.more_to_read.push(slot);
                }
                self.timers.arm(slot, entry.connection.deadline_ns(), &mut entry.timer_ns);
                add_polled::<P>(&mut self.polled, slot, entry);
                self.connections.mark_dirty(slot);
            }
            Err(reason) => self.close(slot, reason, now_ns),
        }
    }

    /// Continues connections that wait for what no event reports: some of them in each poll, in turn, so that
    /// a thousand that wait for memory cost the others no more than a few do.
    fn retry_waiting(&mut self, now_ns: u64) {
        let count = self.waiting.len().min(RETRIES_MAX);
        let later = self.waiting.split_off(count);
        for slot in std::mem::replace(&mut self.waiting, later) {
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
        let mut left = completions.drain(..);
        // Completions of one connection usually come in a row.
        let base_of = |completion: &bdev::Completion| completion.tag().0 & !REQUEST_TAG_MASK;
        while let Some(tag_base) = left.as_slice().first().map(base_of) {
            let row = left.as_slice().iter().take_while(|one| base_of(one) == tag_base).count();
            let done = self.connections.complete::<P>(tag_base, &mut left, row);
            discard(&mut left, done);
        }
        drop(left);
        self.completions = completions;
        count
    }

    #[inline]
    fn flush_all(&mut self, now_ns: u64) {
        self.sends.begin();
        let mut dirty = std::mem::take(&mut self.connections.dirty);
        for slot in dirty.drain(..) {
            self.flush(slot, self.sends.share(), now_ns);
        }
        // Closing connections may have marked others dirty.
        dirty.append(&mut self.connections.dirty);
        self.connections.dirty = dirty;
        if !self.sends.bulk.is_empty() {
            self.flush_bulk(now_ns);
        }
        if !self.resuming.is_empty() {
            self.resume(now_ns);
        }
    }

    /// Sends what a connection has, up to a number of bytes, and processes what has changed with it.
    #[inline]
    fn flush(&mut self, slot: Slot, limit: usize, now_ns: u64) {
        let Some(entry) = self.connections.slab.get_mut(slot) else { return };
        entry.dirty = false;
        if entry.closed {
            return;
        }
        let mut stream = LimitedStream::new(self.network.stream(entry.id), limit);
        let flushed = entry.connection.flush(&mut stream);
        self.sends.used(stream.sent());
        if stream.is_cut() {
            entry.dirty = true;
            self.sends.bulk.push_back(slot);
        }
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

    /// Continues connections that had more to send than their share, for the rest of the turn, and the first
    /// in any case.
    #[cold]
    fn flush_bulk(&mut self, now_ns: u64) {
        for _ in 0..self.sends.bulk.len() {
            let Some(slot) = self.sends.bulk.pop_front() else { return };
            self.flush(slot, self.sends.share(), now_ns);
            if self.sends.is_used_up() {
                return;
            }
        }
    }

    /// Continues connections that have work without an event.
    #[cold]
    fn resume(&mut self, now_ns: u64) {
        self.others_ready |= self.resuming.len() > 1 || self.polled_busy > 0;
        for slot in std::mem::take(&mut self.resuming) {
            self.process(slot, now_ns, |connection, _, _, context| connection.resume(context));
        }
    }

    /// Handles deadlines that have passed.
    fn run_timers(&mut self, now_ns: u64) {
        while let Some((at_ns, owner)) = self.timers.pop_expired(now_ns) {
            let slot = match owner {
                TimerOwner::Connection(slot) => slot,
                TimerOwner::Group => {
                    self.pool.release_idle(CHUNKS_KEPT);
                    continue;
                }
                TimerOwner::Check => {
                    self.check_transfers(now_ns);
                    continue;
                }
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
                    add_polled::<P>(&mut self.polled, slot, entry);
                    self.connections.mark_dirty(slot);
                }
                Err(reason) => self.close(slot, reason, now_ns),
            }
        }
    }
}

/// Drops the next `count` completions. Their usual drop is a call that saves registers for uncommon payloads;
/// lent memory, of which memory-based transports have one buffer a command, is given back without it.
#[inline(never)]
fn discard(completions: &mut Drain<'_, bdev::Completion>, count: usize) {
    for _ in 0..count {
        let first = completions.as_slice().first().map(|completion| &completion.request().payload);
        if !matches!(first, Some(Payload::Data(Data::One(buffer))) if buffer.is_external()) {
            drop(completions.next());
            continue;
        }
        let Some(completion) = completions.next() else { return };
        let Payload::Data(Data::One(buffer)) = completion.into_request().payload else {
            unreachable!("its payload was looked at")
        };
        buffer.release();
    }
}

impl<P: Protocol, N: Listen> PollGroup for ConnectionGroup<P, N> {
    const NAME: &'static str = P::NAME;

    fn poll(&mut self, core: &Core, now_ns: u64) -> usize {
        let mut count = self.process_messages(core, now_ns);
        if self.drained.is_some() {
            self.continue_drain();
        }
        count += self.protocol.begin_poll(&mut self.connections, now_ns);
        // Before anything is received: after a pause, connections whose time is over must not execute what
        // came late.
        if now_ns >= self.timers.next_ns() {
            self.run_timers(now_ns);
            count += 1;
        }
        let mut events = std::mem::take(&mut self.events);
        count += self.network.poll(&mut events);
        if self.network.reap_sent(&mut self.sent) {
            self.process_sent(now_ns);
        }
        self.others_ready = self.are_several_ready(&events) || self.core_groups.has_other(self.key, now_ns);
        if !self.more_to_read.is_empty() {
            let spare = std::mem::take(&mut self.more_to_read_spare);
            let mut more_to_read = std::mem::replace(&mut self.more_to_read, spare);
            for slot in more_to_read.drain(..) {
                if let Some(entry) = self.connections.slab.get_mut(slot) {
                    entry.has_more = false;
                }
                self.receive(slot, now_ns);
                count += 1;
            }
            self.more_to_read_spare = more_to_read;
        }
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
                    // One that continues in the next turn has had this one.
                    if let Some(slot) = self.connections.by_id(id)
                        && !self.connections.slab.get(slot).is_some_and(|entry| entry.has_more)
                    {
                        self.receive(slot, now_ns);
                    }
                }
            }
        }
        self.events = events;
        if !self.polled.is_empty() {
            count += self.poll_connections(now_ns);
        }
        let completed = self.drive_devices();
        count += completed;
        if completed > 0 {
            self.protocol.after_completions(&mut self.connections);
        }
        if !self.connections.dirty.is_empty() || !self.sends.bulk.is_empty() {
            self.flush_all(now_ns);
        }
        if !self.closing.is_empty() {
            self.close_drained(now_ns);
        }
        if !self.moves.are_none() {
            self.continue_moves(now_ns);
        }
        if std::mem::take(&mut self.is_active) {
            self.core_groups.note(self.key, now_ns);
            if !self.timers.is_check_armed() {
                self.arm_check(now_ns);
            }
        }
        count
    }

    fn deadline(&self) -> Option<u64> {
        let has_messages = self.inbox.as_ref().is_some_and(|inbox| !inbox.messages.is_empty());
        let has_more = !self.more_to_read.is_empty() || !self.sends.bulk.is_empty();
        if has_more || has_messages || !self.moves.are_none() || self.network.is_pending() {
            return Some(0);
        }
        // There is no event either when connections on other cores close.
        let retry = !self.waiting.is_empty() || !self.closing.is_empty();
        let retry = retry || self.drained.is_some();
        let waiting = retry.then(|| self.clock.now_ns() + RETRY_NS);
        let timer = self.timers.next_ns().min(self.protocol.deadline_ns());
        let timer = Some(timer).filter(|at_ns| *at_ns != NEVER_NS);
        [self.devices.deadline(), waiting, timer, self.next_poll_ns()].into_iter().flatten().min()
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        self.shared.transit.stop();
        let is_done = self.end_connections() && self.shared.transit.is_empty();
        if is_done { Shutdown::Done } else { Shutdown::Draining }
    }
}
