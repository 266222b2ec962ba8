//! The connections of one core, and its side of the block devices.
//!
//! A turn takes in what has arrived on every connection, hands the requests that came of it to the
//! devices in one batch each, takes back what completed, and sends the responses of each connection
//! in one call. A null or memory device completes within the same turn.

mod complaints;
pub(crate) mod devices;
#[cfg(any(test, fuzzing))]
pub mod simulated;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::SyncSender;

use controller::Event as ControllerEvent;
use controller::reservation::{Bell, Drain, Parked};
use controller::{Directory, NamespaceTable, Port};
use memory::Pool;
use net::{ConnectionId, Event, ListenerId, Network};
use reactor::{Core, Receiver, Sender, Shutdown};
use ring::Status;
use slots::{Slab, Slot};
use wire_nvme::fabrics::Nqn;
use wire_nvme::log::TransportAddress;

use self::complaints::Complaints;
use self::devices::Devices;
use crate::command::Commands;
use crate::connection::{Connection, Counters, Current, End, State};
use crate::group_poller::Turns;
use crate::limits::Limits;
use crate::picture::Picture;
use crate::queue::Role;

/// Connections that a group can hold: 16 bits of a request's tag name one.
const CONNECTIONS_MAX: u32 = 4096;
/// Bytes read at a time beyond what goes into place directly. Half of a typical L2 cache.
const SCRATCH_BYTES: usize = 128 << 10;
/// When to look again for memory that another core may have given back; there is no event for that.
const RETRY_NS: u64 = 1_000_000;

/// What a core lends to a connection that takes in bytes.
pub(crate) struct Lent<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) shared: &'a Shared,
    pub(crate) now_ns: u64,
    devices: &'a mut Devices,
    at_devices: &'a mut u32,
}

/// What all connections of a group know.
pub(crate) struct Shared {
    pub(crate) limits: Limits,
    pub(crate) directory: Arc<Directory>,
    pub(crate) picture: Arc<Picture>,
}

/// What is said to a group.
pub(crate) enum Message<S> {
    /// The other groups, this one included, by index.
    Peers(Vec<Sender<Message<S>>>),
    /// The configuration has changed.
    Apply(Arc<Picture>, SyncSender<()>),
    /// A connection for this group.
    Incoming { stream: S, port: Port, peer: SocketAddr },
    /// Listen on an address.
    Listen { address: SocketAddr, portid: u16, answer: SyncSender<std::io::Result<SocketAddr>> },
    /// Stop listening on a port.
    Unlisten { portid: u16, answer: SyncSender<()> },
    /// Wakes a group whose [`Board::look`] was set.
    Look,
    /// Tell of every connection.
    Report(SyncSender<Vec<ConnectionReport>>),
}

/// What a group tells of a connection.
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
    pub(crate) counters: Counters,
}

pub(crate) struct Group<N: Network> {
    index: usize,
    network: N,
    pool: Pool,
    shared: Shared,
    devices: Devices,
    connections: Slab<Entry>,
    /// The connection of each of the network's, by the index of its name.
    by_network: Vec<Option<Slot>>,
    listeners: Vec<(ListenerId, u16)>,
    messages: Receiver<Message<N::Stream>>,
    peers: Vec<Sender<Message<N::Stream>>>,
    /// What the groups know of each other, by index.
    boards: Arc<[Board]>,
    /// Rings when reservations concern connections of this core.
    pub(crate) bell: Option<Arc<Bell>>,
    scratch: Vec<u8>,
    events: Vec<Event<N::Stream>>,
    completions: Vec<bdev::Completion>,
    /// Connections with something to send.
    dirty: Vec<Slot>,
    /// Connections that may have more to read.
    again: Vec<Slot>,
    /// Room for the next of those.
    spare: Vec<Slot>,
    /// Connections with a Copy that can go on.
    going: Vec<Slot>,
    /// Connections with a command that has no room.
    waiting: Vec<Slot>,
    /// Connections that end when they have answered what they have.
    leaving: Vec<Slot>,
    /// Connections whose requests at devices somebody waits for.
    draining: Vec<Slot>,
    /// The next handshake or keep alive timeout, or earlier.
    timer_ns: u64,
    flows: u16,
    stopping: bool,
    complaints: Complaints,
}

/// What other groups see of one, and tell it.
#[derive(Default)]
pub(crate) struct Board {
    connections: AtomicU32,
    /// Some I/O queues may no longer be wanted.
    look: AtomicBool,
}

struct Entry {
    connection: Connection,
    /// Requests of this connection that devices have.
    at_devices: u32,
    dirty: bool,
    waiting: bool,
    leaving: bool,
    /// The network's side is closed; only devices hold it up.
    closed: bool,
}

impl Lent<'_> {
    /// Puts a request into the batch for its device.
    ///
    /// # Errors
    /// The device is not there any more.
    #[inline]
    pub(crate) fn submit(&mut self, key: u32, request: bdev::Request) -> Result<(), Status> {
        self.devices.put(key, request)?;
        *self.at_devices += 1;
        Ok(())
    }
}

impl<N: Network> Group<N> {
    pub(crate) fn new(
        core: &Core,
        network: N,
        limits: Limits,
        directory: Arc<Directory>,
        boards: Arc<[Board]>,
        messages: Receiver<Message<N::Stream>>,
    ) -> Group<N> {
        Group {
            index: core.index(),
            network,
            pool: core.pool().clone(),
            shared: Shared { limits, directory, picture: Arc::default() },
            devices: Devices::default(),
            connections: Slab::with_capacity(CONNECTIONS_MAX),
            by_network: Vec::new(),
            listeners: Vec::new(),
            messages,
            peers: Vec::new(),
            boards,
            bell: None,
            scratch: vec![0; SCRATCH_BYTES],
            events: Vec::new(),
            completions: Vec::with_capacity(256),
            dirty: Vec::new(),
            again: Vec::new(),
            spare: Vec::new(),
            going: Vec::new(),
            waiting: Vec::new(),
            leaving: Vec::new(),
            draining: Vec::new(),
            timer_ns: u64::MAX,
            flows: 0,
            stopping: false,
            complaints: Complaints::default(),
        }
    }

    fn take_messages(&mut self, core: &Core, now_ns: u64) -> usize {
        let mut count = 0;
        while let Some(message) = self.messages.receive() {
            count += 1;
            match message {
                Message::Peers(peers) => self.peers = peers,
                Message::Apply(picture, answer) => {
                    self.apply(core, picture, now_ns);
                    let _ = answer.send(());
                }
                Message::Incoming { stream, port, peer } => self.adopt(stream, port, peer, now_ns),
                Message::Listen { address, portid, answer } => {
                    let _ = answer.send(self.listen(address, portid));
                }
                Message::Unlisten { portid, answer } => {
                    self.unlisten(Some(portid));
                    let _ = answer.send(());
                }
                Message::Look => {}
                Message::Report(answer) => {
                    let _ = answer.send(self.report());
                }
            }
        }
        if self.boards[self.index].look.load(Ordering::Acquire) {
            self.boards[self.index].look.store(false, Ordering::Relaxed);
            self.look(now_ns);
        }
        count
    }

    /// The bell rang: controllers have notifications, commands may be answered, others want to be waited for.
    #[cold]
    fn rung(&mut self, drains: &[Drain], now_ns: u64) {
        let slots: Vec<Slot> = self.connections.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            let Some(entry) = self.connections.get_mut(slot) else { continue };
            let state = &mut entry.connection.state;
            if let Role::Io(queue) = &state.role
                && entry.at_devices > 0
            {
                let tickets = Drain::tickets(drains, queue.lease.association());
                if !tickets.is_empty() {
                    state.drains.extend(tickets);
                    self.draining.push(slot);
                }
            }
            if entry.closed {
                continue;
            }
            state.unpark();
            state.control(ControllerEvent::Bell, now_ns);
            self.mark(slot);
        }
    }

    /// Tells those who wait that devices have nothing more of a connection.
    fn drained(&mut self) {
        let connections = &mut self.connections;
        self.draining.retain(|slot| {
            // Of a connection that is gone the tickets are, too.
            let Some(entry) = connections.get_mut(*slot) else { return false };
            if entry.at_devices == 0 {
                entry.connection.state.drains.clear();
            }
            entry.at_devices > 0
        });
    }

    fn listen(&mut self, address: SocketAddr, portid: u16) -> std::io::Result<SocketAddr> {
        let listener = self.network.listen(address)?;
        self.listeners.push((listener, portid));
        Ok(self.network.local_address(listener).unwrap_or(address))
    }

    /// Stops listening on a port, or on all.
    fn unlisten(&mut self, portid: Option<u16>) {
        let network = &mut self.network;
        self.listeners.retain(|(listener, id)| {
            let stay = portid.is_some_and(|portid| portid != *id);
            if !stay {
                network.unlisten(*listener);
            }
            stay
        });
    }

    /// Gives a new connection to the group with the fewest.
    fn incoming(&mut self, listener: ListenerId, stream: N::Stream, peer: SocketAddr, now_ns: u64) {
        let Some((_, portid)) = self.listeners.iter().find(|(id, _)| *id == listener) else { return };
        let total: u32 = self.boards.iter().map(|board| board.connections.load(Ordering::Relaxed)).sum();
        if self.stopping || total >= self.shared.limits.connections_max {
            // Dropping the stream closes it: the host may try again when others have gone.
            return;
        }
        let local = N::local_address_of(&stream).or_else(|| self.network.local_address(listener));
        let Some(local) = local else { return };
        let port = Port { portid: *portid, address: crate::address::transport_address(local) };
        let load = |group: &usize| self.boards[*group].connections.load(Ordering::Relaxed);
        let least = (0..self.boards.len()).min_by_key(load);
        let group = least.unwrap_or(self.index);
        self.boards[group].connections.fetch_add(1, Ordering::Relaxed);
        match self.peers.get(group) {
            Some(peer_group) if group != self.index => {
                if peer_group.send(Message::Incoming { stream, port, peer }).is_err() {
                    // Its mailbox is full: it is far behind, and the host had better try again.
                    self.boards[group].connections.fetch_sub(1, Ordering::Relaxed);
                }
            }
            _ => self.adopt(stream, port, peer, now_ns),
        }
    }

    fn adopt(&mut self, stream: N::Stream, port: Port, peer: SocketAddr, now_ns: u64) {
        let added = if self.connections.is_full() { None } else { self.network.add(stream).ok() };
        let Some(id) = added else {
            self.boards[self.index].connections.fetch_sub(1, Ordering::Relaxed);
            return;
        };
        self.flows = self.flows.wrapping_add(1);
        let deadline_ns = now_ns.saturating_add(self.shared.limits.ic_timeout_ns);
        let connection = Connection::new(id, port, peer, self.flows, deadline_ns);
        let entry =
            Entry { connection, at_devices: 0, dirty: false, waiting: false, leaving: false, closed: false };
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

    /// Takes in what has arrived on a connection.
    #[inline]
    fn service(&mut self, slot: Slot, now_ns: u64) {
        self.with(slot, now_ns, |connection, network, lent, scratch| {
            connection.receive(network, lent, scratch)
        });
    }

    /// Tries again what had no room on a connection.
    fn resume(&mut self, slot: Slot, now_ns: u64) {
        if let Some(entry) = self.connections.get_mut(slot) {
            entry.waiting = false;
        }
        self.with(slot, now_ns, |connection, _, lent, _| connection.resume(lent));
    }

    /// Lends a connection what it needs to take in bytes, and sees to what comes of it.
    #[inline]
    fn with(
        &mut self,
        slot: Slot,
        now_ns: u64,
        take_in: impl FnOnce(&mut Connection, &mut N, &mut Lent<'_>, &mut [u8]) -> Result<bool, End>,
    ) {
        let Some(entry) = self.connections.get_mut(slot) else { return };
        if entry.closed {
            return;
        }
        let mut lent = Lent {
            pool: &self.pool,
            shared: &self.shared,
            now_ns,
            devices: &mut self.devices,
            at_devices: &mut entry.at_devices,
        };
        let taken = take_in(&mut entry.connection, &mut self.network, &mut lent, &mut self.scratch);
        self.after(slot, taken, now_ns);
    }

    fn after(&mut self, slot: Slot, received: Result<bool, End>, now_ns: u64) {
        let Some(entry) = self.connections.get_mut(slot) else { return };
        match received {
            Ok(more) => {
                if entry.connection.is_waiting() && !entry.waiting {
                    entry.waiting = true;
                    self.waiting.push(slot);
                }
                if more {
                    self.again.push(slot);
                }
                self.timer_ns = self.timer_ns.min(entry.connection.state.timer_ns());
                self.mark(slot);
            }
            Err(end) => self.end(slot, end, now_ns),
        }
    }

    #[inline]
    fn mark(&mut self, slot: Slot) {
        if let Some(entry) = self.connections.get_mut(slot)
            && !entry.dirty
        {
            entry.dirty = true;
            self.dirty.push(slot);
        }
    }

    /// Hands batches to devices and takes back what completed.
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
            entry.at_devices -= 1;
            if entry.closed {
                if entry.at_devices == 0 {
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
            if state.leaving_until_ns.is_some() && !entry.leaving {
                entry.leaving = true;
                self.leaving.push(slot);
            }
            if !state.going.is_empty() {
                self.going.push(slot);
            }
            if let Err(end) = flushed {
                self.end(slot, end, now_ns);
            }
            if close_io_queues {
                self.tell_all_to_look(now_ns);
            }
        }
        // Ending connections may have marked others meanwhile.
        dirty.append(&mut self.dirty);
        self.dirty = dirty;
        if !self.going.is_empty() {
            self.go_on(now_ns);
        }
    }

    /// Begins the next pieces of copies.
    #[cold]
    fn go_on(&mut self, now_ns: u64) {
        for slot in std::mem::take(&mut self.going) {
            self.with(slot, now_ns, |connection, _, lent, _| connection.resume(lent));
        }
    }

    fn tell_all_to_look(&mut self, now_ns: u64) {
        for (group, peer) in self.peers.iter().enumerate() {
            if group != self.index {
                // The flag is what counts; a group whose mailbox is full is awake without the message.
                self.boards[group].look.store(true, Ordering::Release);
                let _ = peer.send(Message::Look);
            }
        }
        self.look(now_ns);
    }

    /// Lets I/O queues go that are no longer wanted.
    fn look(&mut self, now_ns: u64) {
        let unwanted = |state: &State| matches!(&state.role, Role::Io(queue) if !queue.lease.is_wanted());
        let slots: Vec<Slot> = self
            .connections
            .iter()
            .filter(|(_, entry)| !entry.closed && unwanted(&entry.connection.state))
            .map(|(slot, _)| slot)
            .collect();
        for slot in slots {
            self.leave(slot, now_ns);
        }
    }

    /// Lets a connection answer what it has, and then ends it.
    fn leave(&mut self, slot: Slot, now_ns: u64) {
        let Some(entry) = self.connections.get_mut(slot) else { return };
        entry.connection.state.leave(now_ns);
        self.mark(slot);
    }

    /// Ends connections that have answered what they had, and those that cannot in time.
    fn part(&mut self, now_ns: u64) {
        let mut leaving = std::mem::take(&mut self.leaving);
        leaving.retain(|slot| {
            let Some(entry) = self.connections.get_mut(*slot).filter(|entry| !entry.closed) else {
                return false;
            };
            let late = entry.connection.state.leaving_until_ns.is_none_or(|until_ns| until_ns <= now_ns);
            let over = late || entry.connection.has_answered();
            if over {
                self.end(*slot, End::Controller, now_ns);
            }
            !over
        });
        // Queues of controllers that have just ended.
        leaving.append(&mut self.leaving);
        self.leaving = leaving;
    }

    /// Closes a connection. What devices have of it is waited for before its queue is free again, so
    /// that a late write cannot follow a newer one.
    fn end(&mut self, slot: Slot, end: End, now_ns: u64) {
        let Some(entry) = self.connections.get_mut(slot) else { return };
        if entry.closed {
            return;
        }
        if let Some(why) = end.complaint() {
            self.complaints.say(entry.connection.state.peer, why);
        }
        // Whatever can still be said is: the reason why, above all.
        let _ = entry.connection.flush(&mut self.network);
        let id: ConnectionId = entry.connection.id;
        self.network.close(id);
        if let Some(known) = self.by_network.get_mut(id.0.index() as usize) {
            *known = None;
        }
        entry.closed = true;
        self.boards[self.index].connections.fetch_sub(1, Ordering::Relaxed);
        // A controller ends with its admin queue, and with it its I/O queues.
        let was_admin = matches!(entry.connection.state.role, Role::Admin(_));
        if was_admin {
            entry.connection.state.role = Role::Ended;
        }
        if entry.at_devices == 0 {
            self.connections.remove(slot);
        }
        if was_admin {
            self.tell_all_to_look(now_ns);
        }
    }

    /// Handshakes and keep alives.
    fn tick(&mut self, now_ns: u64) {
        let due: Vec<Slot> = self
            .connections
            .iter()
            .filter(|(_, entry)| !entry.closed && entry.connection.state.timer_ns() <= now_ns)
            .map(|(slot, _)| slot)
            .collect();
        for slot in due {
            let Some(entry) = self.connections.get_mut(slot) else { continue };
            let state = &mut entry.connection.state;
            if matches!(state.role, Role::Admin(_)) {
                state.control(ControllerEvent::Tick, now_ns);
                self.mark(slot);
            } else {
                self.end(slot, End::Timeout, now_ns);
            }
        }
        let timers = self.connections.iter().map(|(_, entry)| entry.connection.state.timer_ns());
        self.timer_ns = timers.min().unwrap_or(u64::MAX);
    }

    /// Takes over a new configuration.
    fn apply(&mut self, core: &Core, picture: Arc<Picture>, now_ns: u64) {
        self.devices.apply(core, &picture);
        let slots: Vec<Slot> = self.connections.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            let Some(entry) = self.connections.get_mut(slot) else { continue };
            if entry.closed {
                continue;
            }
            let state = &mut entry.connection.state;
            match &mut state.role {
                Role::Io(queue) => match picture.subsystem(&queue.subsystem.nqn) {
                    Some(subsystem) if !Arc::ptr_eq(&subsystem, &queue.subsystem) => {
                        // A plan names a namespace of the old table; the new one may have another there.
                        let device = |subsystem: &controller::Subsystem, plan: &controller::io::Plan| {
                            subsystem.namespace(plan.namespace + 1).map(|namespace| namespace.backend)
                        };
                        state
                            .commands
                            .refuse(|plan| device(&queue.subsystem, plan) == device(&subsystem, plan));
                        let limits = &self.shared.limits.controller;
                        queue.namespaces = NamespaceTable::of(
                            &subsystem,
                            state.port.portid,
                            limits,
                            &self.shared.directory,
                            queue.lease.association(),
                        );
                        queue.subsystem = subsystem;
                        // Its controller sees the same, but perhaps on another core and later.
                        let host = queue.lease.association().hostnqn();
                        if !queue.subsystem.listens_on(state.port.portid) || !queue.subsystem.allows(host) {
                            state.leave(now_ns);
                        }
                    }
                    Some(_) => {}
                    None => {
                        // Keys of its devices may soon be those of others: what has not begun never will.
                        state.commands.refuse(|_| false);
                        queue.namespaces = NamespaceTable::default();
                        state.leave(now_ns);
                    }
                },
                Role::Admin(controller) => {
                    let known = controller.subsystem().clone();
                    match picture.subsystem(&known.nqn) {
                        Some(subsystem) if !Arc::ptr_eq(&subsystem, &known) => {
                            state.control(ControllerEvent::Subsystem(subsystem), now_ns);
                        }
                        Some(_) => {}
                        None => state.control(ControllerEvent::SubsystemRemoved, now_ns),
                    }
                    state.control(ControllerEvent::Discovery(picture.discovery.clone()), now_ns);
                }
                _ => continue,
            }
            self.mark(slot);
        }
        self.shared.picture = picture;
    }

    fn report(&self) -> Vec<ConnectionReport> {
        let report = |entry: &Entry| {
            let state = &entry.connection.state;
            let association = match &state.role {
                Role::Admin(controller) => Some((controller.association(), 0)),
                Role::Io(queue) => Some((queue.lease.association(), queue.lease.qid())),
                _ => None,
            };
            ConnectionReport {
                group: self.index,
                subnqn: association.map(|(association, _)| association.subnqn().clone()),
                cntlid: association.map_or(0xffff, |(association, _)| association.cntlid()),
                qid: association.map(|(_, qid)| qid),
                peer: state.peer,
                local: state.port.address.clone(),
                entries: state.entries,
                counters: state.stats,
            }
        };
        self.connections.iter().filter(|(_, entry)| !entry.closed).map(|(_, entry)| report(entry)).collect()
    }
}

impl<N: Network> Turns for Group<N> {
    const NAME: &'static str = "nvmf_tcp";

    fn turn(&mut self, core: &Core, now_ns: u64) -> usize {
        let mut count = self.take_messages(core, now_ns);
        if let Some(drains) = self.bell.as_ref().and_then(|bell| bell.take()) {
            self.rung(&drains, now_ns);
            count += 1;
        }
        let mut events = std::mem::take(&mut self.events);
        count += self.network.poll(&mut events);
        let mut again = std::mem::replace(&mut self.again, std::mem::take(&mut self.spare));
        for slot in again.drain(..) {
            self.service(slot, now_ns);
            count += 1;
        }
        self.spare = again;
        for slot in std::mem::take(&mut self.waiting) {
            self.resume(slot, now_ns);
        }
        for event in events.drain(..) {
            match event {
                Event::Incoming { listener, stream, peer } => self.incoming(listener, stream, peer, now_ns),
                Event::Ready(id) => {
                    let Some(Some(slot)) = self.by_network.get(id.0.index() as usize).copied() else {
                        continue;
                    };
                    self.service(slot, now_ns);
                }
            }
        }
        self.events = events;
        count += self.drive_devices();
        if !self.draining.is_empty() {
            self.drained();
        }
        if !self.dirty.is_empty() {
            self.flush_all(now_ns);
        }
        if now_ns >= self.timer_ns {
            self.tick(now_ns);
            self.flush_all(now_ns);
            count += 1;
        }
        if !self.leaving.is_empty() {
            self.part(now_ns);
        }
        count
    }

    fn deadline(&self) -> Option<u64> {
        let now = !self.again.is_empty() || !self.messages.is_empty() || self.network.is_pending();
        if now {
            return Some(0);
        }
        // Nor is there an event for the end of queues on other cores.
        let retry = !self.waiting.is_empty() || !self.leaving.is_empty();
        let memory = retry.then(|| sys::clock::now_ns() + RETRY_NS);
        let timer = (self.timer_ns != u64::MAX).then_some(self.timer_ns);
        [self.devices.deadline(), memory, timer].into_iter().flatten().min()
    }

    fn shutdown(&mut self, now_ns: u64) -> Shutdown {
        self.stopping = true;
        self.unlisten(None);
        let all: Vec<Slot> = self.connections.iter().map(|(slot, _)| slot).collect();
        for slot in all {
            self.leave(slot, now_ns);
        }
        if self.connections.is_empty() { Shutdown::Done } else { Shutdown::Draining }
    }
}

impl Connection {
    fn new(id: ConnectionId, port: Port, peer: SocketAddr, flow: u16, deadline_ns: u64) -> Connection {
        Connection {
            id,
            receiver: nvme_tcp::Receiver::default(),
            state: State {
                role: Role::AwaitingIcReq,
                // Connect comes alone.
                commands: Commands::new(1),
                sender: nvme_tcp::Sender::default(),
                outgoing: wire_nvme::tcp::Framing::PLAIN,
                incoming: wire_nvme::tcp::Framing::PLAIN,
                current: Current::None,
                tag_base: 0,
                flow,
                port,
                peer,
                deadline_ns,
                blocked: false,
                entries: 1,
                head: 0,
                flow_control_off: false,
                data_tells_success: false,
                aside: std::collections::VecDeque::new(),
                pairing: controller::io::Pairing::None,
                going: Vec::new(),
                parked: Parked::default(),
                drains: Vec::new(),
                leaving_until_ns: None,
                terminated: false,
                close_io_queues: false,
                stats: Counters::default(),
            },
        }
    }
}

impl State {
    /// When the connection next needs a look although nothing arrives.
    fn timer_ns(&self) -> u64 {
        match &self.role {
            Role::Admin(controller) => controller.deadline().unwrap_or(u64::MAX),
            Role::AwaitingIcReq | Role::AwaitingConnect => self.deadline_ns,
            _ => u64::MAX,
        }
    }
}
