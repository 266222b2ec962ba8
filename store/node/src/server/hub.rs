//! The connections of a node.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;

use cluster_map::TlsPolicy;
use foldhash::HashMap;
use reactor::{Core, MailboxReceiver, MailboxSender, Period, PollResult, Poller, Shutdown};
use replica::{ClientReply, MessageBody, ReplicaId, ReplicaMessage};
use slots::{Slab, Slot};
use sockets::{ConnectionId, ListenerId, Network, NetworkEvent, ServerNetwork, StreamAddress};
use store_link::{Identity, Link, LinkError, LinkEvent, NodeAddress};
use wire_replica::{Frame, KeyName};

use super::client_limits::{ClientConnections, ConnectionLimits};
use super::keys::{KeyGrants, KeyRights};
use crate::once::OnceSender;
use crate::{ReplicaHandle, ReplicaInput, StoreError};

/// Connections at a time that have not proved that they know the key.
pub(super) const GREETING_MAX: usize = 64;
/// How long a connection may take for its greetings.
const GREETING_NS: u64 = 2_000_000_000;
/// A node that refused a connection, or lost it, is tried again after this time.
const RECONNECT_NS: u64 = 20_000_000;
/// A report that is not there after this time is asked for again: the mailbox was full when it came.
const REPORT_NS: u64 = 2_000_000_000;
/// Messages taken from the mailbox in one poll.
const INPUTS_PER_POLL: usize = 1024;

/// What cores and the map's thread ask of it.
pub(super) enum HubInput {
    /// The replicas of this node.
    Replicas(BTreeMap<u32, ReplicaHandle>),
    /// The nodes that have or get a replica of a group: others do not join it.
    Members { group: u32, replicas: Vec<ReplicaId> },
    /// The addresses of all nodes.
    Nodes(BTreeMap<ReplicaId, NodeAddress>),
    /// Whether connections to this node use TLS.
    Tls(TlsPolicy),
    /// The keys of clients.
    Keys(Arc<KeyGrants>),
    /// Sends a message to another node.
    Send { group: u32, to: ReplicaId, message: Box<ReplicaMessage> },
    /// Answers a client.
    Reply { group: u32, client: u64, number: u64, reply: ClientReply },
    /// Who makes reports of the node; requests wait for it.
    Reporter(SyncSender<()>),
    /// A report that was asked for; `None` if the node ends.
    Report(Option<Arc<[u8]>>),
    /// Another process is this node: connections end, and none is made or accepted.
    Fence,
    /// Ends; the sender is dropped then.
    Close(OnceSender<()>),
}

/// Connections of nodes and clients that have proved who they are.
#[derive(Default)]
pub(super) struct ConnectionCounts {
    /// With TLS.
    pub(super) tls: AtomicU32,
    /// Without.
    pub(super) plain: AtomicU32,
    /// Connections that were refused because there were too many.
    pub(super) refused: AtomicU64,
}

impl ConnectionCounts {
    /// Those with TLS, without, and refused ones.
    pub(super) fn read(&self) -> (u32, u32, u64) {
        let Self { tls, plain, refused } = self;
        (tls.load(Ordering::Relaxed), plain.load(Ordering::Relaxed), refused.load(Ordering::Relaxed))
    }

    fn of(&self, link: &Link) -> &AtomicU32 {
        if link.is_tls() { &self.tls } else { &self.plain }
    }
}

/// How the connections of a node begin.
pub(super) struct HubConfig {
    pub(super) identity: Arc<Identity>,
    pub(super) grants: Arc<KeyGrants>,
    pub(super) tls: TlsPolicy,
    pub(super) counts: Arc<ConnectionCounts>,
    pub(super) limits: ConnectionLimits,
}

struct Connection {
    id: ConnectionId,
    link: Link,
    /// Who it is, once that is proved: a node or, with `None`, a client.
    peer: Option<Option<ReplicaId>>,
    /// The keys of clients that it may prove.
    grants: Arc<KeyGrants>,
    /// The client's key that it proved, and its rights; with the cluster's key it has all.
    key: Option<(KeyName, KeyRights)>,
    /// It counts as one of a client.
    is_counted: bool,
    /// The node that it was opened to.
    opened_to: Option<ReplicaId>,
    /// When its greetings are too late.
    late_ns: u64,
    /// Something is queued.
    is_dirty: bool,
    /// Something may be there to read.
    is_readable: bool,
}

struct Peer {
    address: NodeAddress,
    connection: Option<Slot>,
    again_ns: u64,
}

/// Requests for a report of the node. One report is made at a time, by another thread, and answers all
/// requests that were there when it was begun; of each connection the last one counts.
#[derive(Default)]
struct Reports {
    reporter: Option<SyncSender<()>>,
    /// Requests for the next report: connection, and number of the request.
    requests: Vec<(Slot, u64)>,
    /// Those that the report answers that is being made.
    answered: Vec<(Slot, u64)>,
    /// When it was begun.
    begun_ns: Option<u64>,
}

impl Reports {
    fn add(&mut self, slot: Slot, number: u64) {
        self.requests.retain(|(of, _)| *of != slot);
        self.requests.push((slot, number));
    }

    /// Has a report made, if one is needed and none is being made.
    fn begin(&mut self, now_ns: u64) {
        let is_begun = self.begun_ns.is_some_and(|begun_ns| now_ns < begun_ns + REPORT_NS);
        if is_begun || self.requests.is_empty() {
            return;
        }
        if let Some(reporter) = &self.reporter {
            self.answered.append(&mut self.requests);
            self.begun_ns = Some(now_ns);
            // One that has not begun the last one yet needs no other request.
            let _ = reporter.try_send(());
        }
    }

    /// Those that a report answers.
    fn end(&mut self) -> Vec<(Slot, u64)> {
        self.begun_ns = None;
        std::mem::take(&mut self.answered)
    }

    fn forget(&mut self, slot: Slot) {
        self.requests.retain(|(of, _)| *of != slot);
        self.answered.retain(|(of, _)| *of != slot);
    }
}

/// The poller of a node's connections.
pub(super) struct Hub<N: Network> {
    network: N,
    identity: Arc<Identity>,
    tls: TlsPolicy,
    counts: Arc<ConnectionCounts>,
    grants: Arc<KeyGrants>,
    inputs: MailboxReceiver<HubInput>,
    listener: ListenerId,
    replicas: BTreeMap<u32, ReplicaHandle>,
    members: BTreeMap<u32, Vec<ReplicaId>>,
    connections: Slab<Connection>,
    by_id: HashMap<u64, Slot>,
    peers: BTreeMap<ReplicaId, Peer>,
    /// The newest connection that each node has opened.
    opened_by: BTreeMap<ReplicaId, Slot>,
    /// The connection of each client's last request.
    clients: HashMap<u64, Slot>,
    client_connections: ClientConnections,
    events: Vec<NetworkEvent<N::Stream>>,
    received: Vec<LinkEvent>,
    /// Connections to write to, or with more to read.
    ready: Vec<Slot>,
    greeting: usize,
    reports: Reports,
    is_fenced: bool,
    closed: Option<OnceSender<()>>,
    now_ns: u64,
}

impl<N: ServerNetwork> Hub<N> {
    /// Listens on this core.
    pub(super) fn start(
        core: &Core,
        config: HubConfig,
        listen: &StreamAddress,
    ) -> Result<(MailboxSender<HubInput>, StreamAddress), StoreError> {
        let HubConfig { identity, grants, tls, counts, limits } = config;
        let mut network = N::of_core(core);
        let listener = network
            .listen(listen)
            .map_err(|source| StoreError::Listen { address: listen.clone(), source })?;
        let address = network.local_address(listener).unwrap_or_else(|| listen.clone());
        let (sender, inputs) = core.mailbox(super::HUB_MAILBOX);
        let hub = Hub {
            network,
            identity,
            tls,
            counts,
            grants,
            inputs,
            listener,
            replicas: BTreeMap::new(),
            members: BTreeMap::new(),
            connections: Slab::with_capacity(limits.all),
            by_id: HashMap::default(),
            peers: BTreeMap::new(),
            opened_by: BTreeMap::new(),
            clients: HashMap::default(),
            client_connections: ClientConnections::new(limits),
            events: Vec::new(),
            received: Vec::new(),
            ready: Vec::new(),
            greeting: 0,
            reports: Reports::default(),
            is_fenced: false,
            closed: None,
            now_ns: core.now_ns(),
        };
        core.add_poller(Box::new(hub), Period::EveryTurn);
        Ok((sender, address))
    }

    fn take_input(&mut self, input: HubInput) {
        match input {
            HubInput::Replicas(replicas) => {
                self.members.retain(|group, _| replicas.contains_key(group));
                self.replicas = replicas;
            }
            HubInput::Members { group, replicas } => _ = self.members.insert(group, replicas),
            HubInput::Nodes(nodes) => {
                // Connections to old addresses end by themselves.
                let peers = nodes.into_iter().map(|(id, address)| {
                    let known = self.peers.remove(&id).filter(|known| known.address == address);
                    (id, known.unwrap_or(Peer { address, connection: None, again_ns: 0 }))
                });
                self.peers = peers.collect::<Vec<_>>().into_iter().collect();
                self.close_plain();
            }
            HubInput::Tls(tls) => {
                self.tls = tls;
                self.close_plain();
            }
            HubInput::Keys(grants) => self.set_keys(grants),
            HubInput::Send { group, to, message } => {
                if let Some(slot) = self.connection_to(to) {
                    self.send(slot, group, &Frame::Replica(*message));
                }
            }
            HubInput::Reply { group, client, number, reply } => {
                if let Some(slot) = self.clients.get(&client).copied() {
                    self.send(slot, group, &Frame::Reply { client, number, reply });
                }
            }
            HubInput::Reporter(reporter) => {
                self.reports.reporter = Some(reporter);
                self.reports.begin(self.now_ns);
            }
            HubInput::Report(report) => {
                let answered = self.reports.end();
                for (slot, number) in answered {
                    if let Some(report) = report.clone() {
                        self.send(slot, 0, &Frame::Status { number, report });
                    }
                }
                self.reports.begin(self.now_ns);
            }
            HubInput::Fence => {
                self.is_fenced = true;
                self.close_all();
            }
            HubInput::Close(closed) => self.closed = Some(closed),
        }
    }

    /// Connections have the rights of their keys from now on. Those whose key is none any more end.
    fn set_keys(&mut self, grants: Arc<KeyGrants>) {
        self.grants = grants;
        let mut deleted = Vec::new();
        for (slot, connection) in self.connections.iter_mut() {
            let Some((name, rights)) = &mut connection.key else { continue };
            match self.grants.rights_of_same(*name, rights) {
                Some(known) => *rights = known.clone(),
                None => deleted.push((slot, *name)),
            }
        }
        deleted.into_iter().for_each(|(slot, name)| self.close(slot, &LinkError::KeyDeleted(name)));
    }

    /// Ends connections without TLS that would have it now.
    fn close_plain(&mut self) {
        let has_tls = |connection: &Connection| match connection.opened_to {
            Some(node) => self.peers.get(&node).is_some_and(|peer| peer.address.has_tls),
            None => self.tls == TlsPolicy::Required,
        };
        let plain = |connection: &Connection| !connection.link.is_tls() && has_tls(connection);
        let plain: Vec<Slot> =
            self.connections.iter().filter(|(_, it)| plain(it)).map(|(slot, _)| slot).collect();
        plain.into_iter().for_each(|slot| self.close(slot, &LinkError::Closed));
    }

    /// A connection has proved who it is.
    ///
    /// # Errors
    /// [`LinkError::KeyDeleted`]: its key was deleted meanwhile. [`LinkError::TooMany`]: it is a client's,
    /// and there are too many.
    fn greeted(
        &mut self,
        slot: Slot,
        peer: Option<ReplicaId>,
        key: Option<KeyName>,
    ) -> Result<(), LinkError> {
        self.greeting -= 1;
        let Some(connection) = self.connections.get_mut(slot) else { return Ok(()) };
        connection.peer = Some(peer);
        self.counts.of(&connection.link).fetch_add(1, Ordering::Relaxed);
        if let (Some(node), None) = (peer, connection.opened_to) {
            self.opened_by.insert(node, slot);
        }
        if let Some(name) = key {
            let proved = connection.grants.rights(name);
            let rights = proved.and_then(|proved| self.grants.rights_of_same(name, proved));
            let rights = rights.ok_or(LinkError::KeyDeleted(name))?;
            connection.key = Some((name, rights.clone()));
        }
        if peer.is_none() {
            connection.is_counted = self.client_connections.admit(key);
            if !connection.is_counted {
                self.log_refusal();
                return Err(LinkError::TooMany);
            }
        }
        Ok(())
    }

    /// The connection to a node: one that was opened to it or by it, else a new one. The address of a node
    /// that has just started is not known yet, or was another one before. Without a connection messages are
    /// lost, as on a link.
    fn connection_to(&mut self, node: ReplicaId) -> Option<Slot> {
        let opened = self.peers.get(&node).and_then(|peer| peer.connection);
        if let Some(slot) = opened.or_else(|| self.opened_by.get(&node).copied()) {
            return Some(slot);
        }
        let peer = self.peers.get_mut(&node)?;
        if self.is_fenced || self.now_ns < peer.again_ns {
            return None;
        }
        peer.again_ns = self.now_ns + RECONNECT_NS;
        let link = Link::connect_at(self.identity.clone(), node, &peer.address).ok()?;
        let stream = self.network.connect(&peer.address.stream).ok()?;
        let slot = self.add(stream, link, Some(node))?;
        self.peers.get_mut(&node)?.connection = Some(slot);
        Some(slot)
    }

    fn add(&mut self, stream: N::Stream, link: Link, opened_to: Option<ReplicaId>) -> Option<Slot> {
        let id = self.network.add(stream).ok()?;
        let late_ns = self.now_ns + GREETING_NS;
        let (is_counted, is_dirty, is_readable) = (false, false, true);
        let (peer, key, grants) = (None, None, self.grants.clone());
        let connection =
            Connection { id, link, peer, grants, key, is_counted, opened_to, late_ns, is_dirty, is_readable };
        let Ok(slot) = self.connections.insert(connection) else {
            self.network.close(id);
            self.log_refusal();
            return None;
        };
        self.by_id.insert(id.0.to_bits(), slot);
        self.greeting += 1;
        self.ready.push(slot);
        Some(slot)
    }

    /// A connection is refused: a line says so, and who has the others.
    fn log_refusal(&mut self) {
        self.counts.refused.fetch_add(1, Ordering::Relaxed);
        if let Some(line) = self.client_connections.refused(self.connections.len(), self.now_ns) {
            log::warn!("{line}");
        }
    }

    fn send(&mut self, slot: Slot, group: u32, frame: &Frame) {
        let Some(connection) = self.connections.get_mut(slot) else { return };
        connection.link.send(frame.encode(group));
        if !std::mem::replace(&mut connection.is_dirty, true) {
            self.ready.push(slot);
        }
    }

    fn accept(&mut self, stream: N::Stream) {
        if self.is_fenced {
            return;
        }
        if self.greeting >= GREETING_MAX {
            // The one that has taken longest goes, so that silent ones keep no other out.
            let greeting = |it: &Connection| it.peer.is_none() && it.opened_to.is_none();
            let accepted = self.connections.iter().filter(|(_, it)| greeting(it));
            if let Some((slot, _)) = accepted.min_by_key(|(_, it)| it.late_ns) {
                self.close(slot, &LinkError::Failed(std::io::ErrorKind::TimedOut));
            }
        }
        let link = Link::accept_with(self.identity.clone(), self.grants.secrets.clone());
        let is_required = self.tls == TlsPolicy::Required;
        self.add(stream, if is_required { link.requiring_tls() } else { link }, None);
    }

    fn drive(&mut self, slot: Slot) {
        let Some(connection) = self.connections.get_mut(slot) else { return };
        connection.is_dirty = false;
        let mut stream = self.network.stream(connection.id);
        let driven = match std::mem::take(&mut connection.is_readable) {
            true => connection.link.drive(&mut stream, &mut self.received),
            false => connection.link.write(&mut stream).map(|()| false),
        };
        let mut received = std::mem::take(&mut self.received);
        let mut refused = None;
        for event in received.drain(..) {
            match event {
                LinkEvent::Ready { peer, key } => {
                    refused = self.greeted(slot, peer, key).err();
                    if refused.is_some() {
                        break;
                    }
                }
                LinkEvent::Frame { group, frame } => self.take_frame(slot, group, frame),
            }
        }
        self.received = received;
        match refused.map_or(driven, Err) {
            Ok(false) => {}
            Ok(true) => self.readable(slot),
            Err(error) => self.close(slot, &error),
        }
    }

    /// A connection is driven in this turn, and read.
    fn readable(&mut self, slot: Slot) {
        if let Some(connection) = self.connections.get_mut(slot) {
            connection.is_readable = true;
            self.ready.push(slot);
        }
    }

    fn take_frame(&mut self, slot: Slot, group: u32, frame: Frame) {
        let Some(connection) = self.connections.get(slot) else { return };
        let Some(peer) = connection.peer else { return };
        let rights = connection.key.as_ref().map(|(_, rights)| rights);
        match frame {
            // Only the node itself speaks for it.
            Frame::Replica(message) if peer == Some(message.from) => {
                // One that is no member any more, and does not know, would be proposed and refused again and
                // again.
                let is_join = matches!(message.body, MessageBody::Join { .. });
                let members = self.members.get(&group);
                if is_join && members.is_some_and(|members| !members.contains(&message.from)) {
                    return;
                }
                if let Some(replica) = self.replicas.get(&group) {
                    replica.send(ReplicaInput::Message(message));
                }
            }
            Frame::Request(request) => {
                let (client, number) = request.name();
                if rights.is_some_and(|rights| !rights.permit(group, &request)) {
                    self.send(slot, group, &Frame::Reply { client, number, reply: ClientReply::Denied });
                    return;
                }
                self.clients.insert(client, slot);
                let is_taken = self
                    .replicas
                    .get(&group)
                    .is_some_and(|replica| replica.send(ReplicaInput::Request(request)));
                if !is_taken {
                    let reply = match self.replicas.contains_key(&group) {
                        true => ClientReply::Busy,
                        false => ClientReply::NotPrimary { primary: None },
                    };
                    self.send(slot, group, &Frame::Reply { client, number, reply });
                }
            }
            // It names all groups, and who is where.
            Frame::StatusRequest { number } if rights.is_some() => {
                let report = (*br#"{"error":"a client key has no right to the status of nodes"}"#).into();
                self.send(slot, 0, &Frame::Status { number, report });
            }
            Frame::StatusRequest { number } => {
                self.reports.add(slot, number);
                self.reports.begin(self.now_ns);
            }
            Frame::Replica(_) | Frame::Reply { .. } | Frame::Status { .. } => {}
        }
    }

    fn close(&mut self, slot: Slot, error: &LinkError) {
        let Some(connection) = self.connections.remove(slot) else { return };
        match error {
            // One that is refused is counted and logged with others.
            LinkError::Closed | LinkError::Failed(_) | LinkError::TooMany => {
                log::debug!("a connection of the store: {error}")
            }
            _ => log::warn!("a connection of the store: {error}"),
        }
        self.by_id.remove(&connection.id.0.to_bits());
        self.network.close(connection.id);
        match connection.peer {
            None => self.greeting -= 1,
            Some(_) => _ = self.counts.of(&connection.link).fetch_sub(1, Ordering::Relaxed),
        }
        if connection.is_counted {
            self.client_connections.remove(connection.key.map(|(name, _)| name));
        }
        self.clients.retain(|_, of| *of != slot);
        self.opened_by.retain(|_, of| *of != slot);
        self.reports.forget(slot);
        if let Some(peer) = connection.opened_to.and_then(|node| self.peers.get_mut(&node))
            && peer.connection == Some(slot)
        {
            peer.connection = None;
        }
    }

    fn close_all(&mut self) {
        let open: Vec<Slot> = self.connections.iter().map(|(slot, _)| slot).collect();
        open.into_iter().for_each(|slot| self.close(slot, &LinkError::Closed));
    }

    fn close_late(&mut self) {
        if self.greeting == 0 {
            return;
        }
        let late = |connection: &Connection| connection.peer.is_none() && connection.late_ns <= self.now_ns;
        let late: Vec<Slot> =
            self.connections.iter().filter(|(_, it)| late(it)).map(|(slot, _)| slot).collect();
        late.into_iter().for_each(|slot| self.close(slot, &LinkError::Failed(std::io::ErrorKind::TimedOut)));
    }
}

impl<N: ServerNetwork> Poller for Hub<N> {
    fn name(&self) -> &str {
        "store connections"
    }

    fn poll(&mut self, now_ns: u64) -> PollResult {
        self.now_ns = now_ns;
        let mut work = 0;
        while work < INPUTS_PER_POLL {
            let Some(input) = self.inputs.receive() else { break };
            self.take_input(input);
            work += 1;
        }
        if self.closed.is_some() {
            self.close_all();
            self.network.close_listener(self.listener);
            self.closed = None;
            return PollResult::Finished;
        }
        let mut events = std::mem::take(&mut self.events);
        work += self.network.poll(&mut events);
        for event in events.drain(..) {
            match event {
                NetworkEvent::Incoming { stream, .. } => self.accept(stream),
                NetworkEvent::AcceptFailed { error, .. } => {
                    log::warn!("a connection is not accepted: {error}")
                }
                NetworkEvent::Ready(id) => {
                    if let Some(slot) = self.by_id.get(&id.0.to_bits()) {
                        self.readable(*slot);
                    }
                }
            }
        }
        self.events = events;
        let mut ready = std::mem::take(&mut self.ready);
        ready.drain(..).for_each(|slot| self.drive(slot));
        // What was queued meanwhile is the next turn's.
        ready.append(&mut self.ready);
        self.ready = ready;
        self.close_late();
        PollResult::from_count(work)
    }

    fn deadline(&self) -> Option<u64> {
        if !self.ready.is_empty() || !self.inputs.is_empty() || self.network.is_pending() {
            return Some(0);
        }
        let late = self.connections.iter().filter(|(_, it)| it.peer.is_none()).map(|(_, it)| it.late_ns);
        if self.greeting > 0 { late.min() } else { None }
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        Shutdown::Done
    }
}

#[cfg(test)]
mod tests {
    use replica::{ClientRequest, GroupConfig};
    use sockets::{CoreNetwork, Sockets};
    use store_link::ClusterKey;

    use super::*;

    fn identity(node: Option<u32>) -> Arc<Identity> {
        let key = ClusterKey::from_bytes([1; 32]).into();
        Arc::new(Identity { cluster: [1; 16], node: node.map(ReplicaId), key })
    }

    fn reactor() -> reactor::Reactor {
        // The test's own network does not end a sleep.
        let idle = reactor::IdlePolicy::Spin;
        reactor::Reactor::new(&reactor::ReactorConfig { idle, ..Default::default() }).unwrap()
    }

    fn read_request() -> Frame {
        let object = wire_store::ObjectId { group: 9, volume: 1, index: 0, suffix: 0 };
        Frame::Request(ClientRequest::Read { client: 5, number: 1, object, offset: 0, length: 4096 })
    }

    #[test]
    fn clients_with_one_key_keep_no_node_out() {
        let mut reactor = reactor();
        let counts = Arc::new(ConnectionCounts::default());
        let limits = ConnectionLimits { all: 8, of_clients: 3, of_key: 2 };
        let (grants, tls, of_hub) = (Arc::default(), TlsPolicy::Off, counts.clone());
        let config = HubConfig { identity: identity(Some(1)), grants, tls, counts: of_hub, limits };
        let listen = "127.0.0.1:0".parse().unwrap();
        let (_inputs, address) = Hub::<Sockets>::start(&reactor.core(), config, &listen).unwrap();
        let mut network = Sockets::of_core(&reactor.core());
        // Whether a node or a client gets an answer, or its connection ends.
        let connect = |reactor: &mut reactor::Reactor, network: &mut Sockets, node| {
            let stream = network.connect(&address).unwrap();
            let id = network.add(stream).unwrap();
            let mut link = Link::connect_to(identity(node), ReplicaId(1)).unwrap();
            link.send(read_request().encode(9));
            let mut received = Vec::new();
            for _ in 0..1_000_000 {
                reactor.turn();
                network.poll(&mut Vec::new());
                let driven = link.drive(&mut network.stream(id), &mut received);
                if driven.is_err() || received.len() == 2 {
                    return (driven.is_ok(), id);
                }
            }
            panic!("{received:?}");
        };
        let (is_served, first) = connect(&mut reactor, &mut network, None);
        assert!(is_served && connect(&mut reactor, &mut network, None).0);
        assert!(!connect(&mut reactor, &mut network, None).0);
        assert!(connect(&mut reactor, &mut network, Some(2)).0);
        assert_eq!(counts.refused.load(Ordering::Relaxed), 1);
        // One that ends leaves its place to another.
        network.close(first);
        let plain = || counts.plain.load(Ordering::Relaxed);
        assert!((0..1_000_000).any(|_| {
            reactor.turn();
            plain() == 2
        }));
        assert!(connect(&mut reactor, &mut network, None).0);
    }

    #[test]
    fn a_node_that_has_connected_gets_messages_whether_its_address_is_known_or_not() {
        let mut reactor = reactor();
        let listen = "127.0.0.1:0".parse().unwrap();
        let (grants, counts) = (Arc::default(), Arc::default());
        let limits = ConnectionLimits::default();
        let config = HubConfig { identity: identity(Some(1)), grants, tls: TlsPolicy::Off, counts, limits };
        let (inputs, address) = Hub::<Sockets>::start(&reactor.core(), config, &listen).unwrap();

        let mut network = Sockets::of_core(&reactor.core());
        let stream = network.connect(&address).unwrap();
        let id = network.add(stream).unwrap();
        let mut link = Link::connect_to(identity(Some(2)), ReplicaId(1)).unwrap();
        let mut receive = |link: &mut Link, count| {
            let mut received = Vec::new();
            for _ in 0..1_000_000 {
                reactor.turn();
                network.poll(&mut Vec::new());
                link.drive(&mut network.stream(id), &mut received).unwrap();
                if received.len() == count {
                    return received;
                }
            }
            panic!("{received:?}");
        };
        // The answer says that the greetings are over at both ends.
        link.send(read_request().encode(9));
        let received = receive(&mut link, 2);
        assert!(matches!(&received[1], LinkEvent::Frame { group: 9, frame: Frame::Reply { client: 5, .. } }));
        let config = GroupConfig { epoch: 3, primary: ReplicaId(1), in_sync: vec![ReplicaId(1)] };
        let message =
            ReplicaMessage { from: ReplicaId(1), config: Arc::new(config), body: MessageBody::Config };
        // The last one is where it listened before.
        let nowhere = NodeAddress { stream: "127.0.0.1:1".parse().unwrap(), has_tls: false };
        for nodes in [BTreeMap::new(), BTreeMap::from([(ReplicaId(2), nowhere)])] {
            assert!(inputs.send(HubInput::Nodes(nodes)).is_ok());
            // The first one is for a node that did not connect.
            for to in [3, 2] {
                let message = Box::new(message.clone());
                assert!(inputs.send(HubInput::Send { group: to, to: ReplicaId(to), message }).is_ok());
            }
            let received = receive(&mut link, 1);
            let LinkEvent::Frame { group: 2, frame: Frame::Replica(arrived) } = &received[0] else {
                panic!("{received:?}");
            };
            assert_eq!(*arrived, message);
        }
    }
}
