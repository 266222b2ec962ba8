//! Simulated links between nodes, and the streams that travel over them.
//!
//! Each ordered pair of nodes has a [`LinkConfig`]: delay, jitter, bandwidth, and whether it passes anything. A stream
//! is reliable and in order, as TCP is; jitter reorders streams against each other only. What is sent into a blocked
//! direction waits and travels on when the direction opens, as retransmitted segments do.
//!
//! What an end sent before it closed its stream reaches the other end all the same, as over TCP, and possibly
//! [late](FabricOptions::late_ns).

mod links;

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;

use random::WyRand;
use slots::{Slab, Slot};
use sockets::TransferResult;

pub(crate) use links::SimulatedPlace;
pub use links::{LinkStream, SimulatedLinks};

/// Bytes that a stream holds for its receiver, those on the way included; a sender blocks beyond.
const WINDOW_BYTES: usize = 256 << 10;
/// Largest chunk that arrives at once: a few segments, so that large PDUs arrive in pieces.
const CHUNK_BYTES: usize = 16 << 10;
/// Maximum number of streams of a world at a time, both ends counted.
const ENDPOINTS_MAX: u32 = 4096;
/// First port of connecting streams.
const CLIENT_PORT: u16 = 40_000;

/// A node's index in its world.
pub type NodeId = usize;

/// A core of a node: what a delivery wakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CoreId {
    pub(crate) node: NodeId,
    pub(crate) core: usize,
}

/// One direction between two nodes.
#[derive(Clone, Copy, Debug)]
pub struct LinkConfig {
    /// Time on the way, in nanoseconds.
    pub delay_ns: u64,
    /// Added to it at random, up to this, per chunk.
    pub jitter_ns: u64,
    /// Time that a byte occupies the link, in picoseconds: 800 for 10 Gbit/s.
    pub byte_ps: u64,
    /// Nothing passes until it is opened.
    pub blocked: bool,
}

impl Default for LinkConfig {
    /// A data centre's: 10 µs, 10 Gbit/s.
    fn default() -> Self {
        LinkConfig { delay_ns: 10_000, jitter_ns: 20_000, byte_ps: 800, blocked: false }
    }
}

/// Options of a world's links.
#[derive(Clone, Copy, Debug, Default)]
pub struct FabricOptions {
    /// What a host sent before it closed a stream arrives this much later, in nanoseconds.
    pub late_ns: u64,
}

/// The links and streams of a world.
pub(crate) struct Fabric {
    now_ns: u64,
    random: WyRand,
    options: FabricOptions,
    links: BTreeMap<(NodeId, NodeId), Link>,
    endpoints: Slab<Endpoint>,
    listeners: BTreeMap<SocketAddr, Listening>,
    networks: BTreeMap<u64, Component>,
    last_network: u64,
    last_port: u16,
    /// By time and order of sending.
    deliveries: BTreeMap<(u64, u64), Delivery>,
    sequence: u64,
    /// Cores that got an event since the last [`take_ready`](Self::take_ready).
    ready: Vec<CoreId>,
}

#[derive(Default)]
struct Link {
    config: LinkConfig,
    /// When the last byte has left the sender.
    busy_until_ns: u64,
    /// What arrived while the link was blocked, in order.
    held: VecDeque<Delivery>,
}

/// A network of one component on a core.
struct Component {
    core: CoreId,
    ready: Vec<ConnectionEvent>,
}

enum ConnectionEvent {
    Ready(Slot),
    Incoming { listener: Slot, stream: Slot, peer: SocketAddr },
}

struct Listening {
    network: u64,
    listener: Slot,
    node: NodeId,
}

struct Endpoint {
    node: NodeId,
    /// The network that it was added to, and its connection there.
    owner: Option<(u64, Slot)>,
    peer: Option<Slot>,
    is_client: bool,
    local: SocketAddr,
    remote: SocketAddr,
    state: EndpointState,
    incoming: VecDeque<u8>,
    /// Bytes sent by the peer that have not arrived.
    on_the_way: usize,
    /// Time of the last arrival on the way to this end: arrivals of a stream stay in order.
    last_arrival_ns: u64,
    /// The sender found the window full.
    awaits_window: bool,
    /// The peer closed its end.
    finished: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum EndpointState {
    Connecting,
    Open,
    /// By a reset or a refused connect.
    Failed(io::ErrorKind),
}

enum Arrival {
    Connect,
    Connected,
    Data(Vec<u8>),
    Window,
    Finish,
    Reset(io::ErrorKind),
}

/// Something on its way to an end of a stream.
struct Delivery {
    from: NodeId,
    to: NodeId,
    endpoint: Slot,
    arrival: Arrival,
}

impl Fabric {
    pub(crate) fn new(random: WyRand, options: FabricOptions) -> Fabric {
        Fabric {
            now_ns: 0,
            random,
            options,
            links: BTreeMap::new(),
            endpoints: Slab::with_capacity(ENDPOINTS_MAX),
            listeners: BTreeMap::new(),
            networks: BTreeMap::new(),
            last_network: 0,
            last_port: CLIENT_PORT,
            deliveries: BTreeMap::new(),
            sequence: 0,
            ready: Vec::new(),
        }
    }

    /// Changes a direction. What waited at a blocked one travels on, in order, when it is opened.
    pub(crate) fn set_link(&mut self, from: NodeId, to: NodeId, config: LinkConfig) {
        let link = self.links.entry((from, to)).or_default();
        link.config = config;
        if !config.blocked {
            for delivery in std::mem::take(&mut link.held) {
                self.send(delivery, 0);
            }
        }
    }

    pub(crate) fn link(&self, from: NodeId, to: NodeId) -> LinkConfig {
        self.links.get(&(from, to)).map_or_else(LinkConfig::default, |link| link.config)
    }

    pub(crate) fn next_delivery_ns(&self) -> Option<u64> {
        self.deliveries.first_key_value().map(|((at_ns, _), _)| *at_ns)
    }

    /// Sets the time and delivers what is due.
    pub(crate) fn advance_to(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        while let Some(entry) = self.deliveries.first_entry()
            && entry.key().0 <= now_ns
        {
            let delivery = entry.remove();
            let link = self.links.entry((delivery.from, delivery.to)).or_default();
            if link.config.blocked {
                link.held.push_back(delivery);
            } else {
                self.deliver(delivery);
            }
        }
    }

    pub(crate) fn take_ready(&mut self) -> Vec<CoreId> {
        std::mem::take(&mut self.ready)
    }

    /// Ends a node's processes: its listeners and streams are gone, and its peers learn of it as the links allow.
    pub(crate) fn crash(&mut self, node: NodeId) {
        self.listeners.retain(|_, listening| listening.node != node);
        self.networks.retain(|_, component| component.core.node != node);
        let gone = |(slot, endpoint): (Slot, &Endpoint)| (endpoint.node == node).then_some(slot);
        let slots: Vec<Slot> = self.endpoints.iter().filter_map(gone).collect();
        for slot in slots {
            self.abort(slot);
        }
        // What the node had not got through a blocked direction is retransmitted by no one.
        for ((from, _), link) in &mut self.links {
            if *from == node {
                link.held.retain(|delivery| matches!(delivery.arrival, Arrival::Reset(_)));
            }
        }
    }

    /// Queues a delivery behind the others of its link and stream; `bytes` is what it occupies the link for.
    fn send(&mut self, delivery: Delivery, bytes: usize) {
        let link = self.links.entry((delivery.from, delivery.to)).or_default();
        let left_ns = link.busy_until_ns.max(self.now_ns) + bytes as u64 * link.config.byte_ps / 1000;
        link.busy_until_ns = left_ns;
        let jitter_ns = self.random.below(link.config.jitter_ns + 1);
        let mut at_ns = left_ns + link.config.delay_ns + jitter_ns;
        if let Some(endpoint) = self.endpoints.get_mut(delivery.endpoint) {
            at_ns = at_ns.max(endpoint.last_arrival_ns);
            endpoint.last_arrival_ns = at_ns;
        }
        self.sequence += 1;
        self.deliveries.insert((at_ns, self.sequence), delivery);
    }

    fn deliver(&mut self, delivery: Delivery) {
        if let Arrival::Connect = delivery.arrival {
            return self.accept(delivery);
        }
        let Some(endpoint) = self.endpoints.get_mut(delivery.endpoint) else { return };
        match delivery.arrival {
            Arrival::Data(bytes) => {
                endpoint.on_the_way = endpoint.on_the_way.saturating_sub(bytes.len());
                if let EndpointState::Failed(_) = endpoint.state {
                    return;
                }
                endpoint.incoming.extend(bytes);
            }
            Arrival::Connected if endpoint.state == EndpointState::Connecting => {
                endpoint.state = EndpointState::Open;
            }
            Arrival::Connected | Arrival::Connect => {}
            Arrival::Window => endpoint.awaits_window = false,
            Arrival::Finish => endpoint.finished = true,
            Arrival::Reset(kind) => {
                endpoint.state = EndpointState::Failed(kind);
                endpoint.peer = None;
                endpoint.incoming.clear();
            }
        }
        self.report(delivery.endpoint);
    }

    /// A connect arrives: the listener gets the other end, or the connect is refused.
    fn accept(&mut self, delivery: Delivery) {
        let Some(client) = self.endpoints.get(delivery.endpoint) else { return };
        let (address, peer_address) = (client.remote, client.local);
        let back =
            |arrival| Delivery { from: delivery.to, to: delivery.from, endpoint: delivery.endpoint, arrival };
        let Some(listening) = self.listeners.get(&address) else {
            return self.send(back(Arrival::Reset(io::ErrorKind::ConnectionRefused)), 0);
        };
        let (network, listener) = (listening.network, listening.listener);
        let server = Endpoint {
            node: delivery.to,
            owner: None,
            peer: Some(delivery.endpoint),
            is_client: false,
            local: address,
            remote: peer_address,
            state: EndpointState::Open,
            incoming: VecDeque::new(),
            on_the_way: 0,
            last_arrival_ns: 0,
            awaits_window: false,
            finished: false,
        };
        let Ok(server) = self.endpoints.insert(server) else {
            return self.send(back(Arrival::Reset(io::ErrorKind::ConnectionRefused)), 0);
        };
        if let Some(client) = self.endpoints.get_mut(delivery.endpoint) {
            client.peer = Some(server);
        }
        self.send(back(Arrival::Connected), 0);
        if let Some(component) = self.networks.get_mut(&network) {
            component.ready.push(ConnectionEvent::Incoming { listener, stream: server, peer: peer_address });
            self.ready.push(component.core);
        }
    }

    /// Reports a connection ready to its network.
    fn report(&mut self, endpoint: Slot) {
        let Some((network, connection)) = self.endpoints.get(endpoint).and_then(|endpoint| endpoint.owner)
        else {
            return;
        };
        if let Some(component) = self.networks.get_mut(&network) {
            component.ready.push(ConnectionEvent::Ready(connection));
            self.ready.push(component.core);
        }
    }

    fn connect(&mut self, core: CoreId, to: SocketAddr) -> io::Result<Slot> {
        self.last_port = if self.last_port == u16::MAX { CLIENT_PORT } else { self.last_port + 1 };
        let client = Endpoint {
            node: core.node,
            owner: None,
            peer: None,
            is_client: true,
            local: SocketAddr::new(node_address(core.node), self.last_port),
            remote: to,
            state: EndpointState::Connecting,
            incoming: VecDeque::new(),
            on_the_way: 0,
            last_arrival_ns: 0,
            awaits_window: false,
            finished: false,
        };
        let endpoint =
            self.endpoints.insert(client).map_err(|_| io::Error::from(io::ErrorKind::QuotaExceeded))?;
        let node = node_of(to).ok_or(io::ErrorKind::AddrNotAvailable)?;
        self.send(Delivery { from: core.node, to: node, endpoint, arrival: Arrival::Connect }, 0);
        Ok(endpoint)
    }

    fn receive(&mut self, slot: Slot, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        let Some(endpoint) = self.endpoints.get_mut(slot) else {
            return TransferResult::Failed(io::ErrorKind::NotConnected);
        };
        if let EndpointState::Failed(kind) = endpoint.state {
            return TransferResult::Failed(kind);
        }
        if endpoint.incoming.is_empty() {
            return if endpoint.finished { TransferResult::Closed } else { TransferResult::Blocked };
        }
        let mut count = 0;
        for part in parts {
            let length = part.len().min(endpoint.incoming.len());
            for (to, from) in part.iter_mut().zip(endpoint.incoming.drain(..length)) {
                *to = from;
            }
            count += length;
        }
        let (node, peer) = (endpoint.node, endpoint.peer);
        if let Some(peer) = peer
            && let Some(sender) = self.endpoints.get(peer)
            && sender.awaits_window
        {
            let to = sender.node;
            self.send(Delivery { from: node, to, endpoint: peer, arrival: Arrival::Window }, 0);
        }
        TransferResult::Bytes(count)
    }

    fn transmit(&mut self, slot: Slot, parts: &[IoSlice<'_>]) -> TransferResult {
        let Some(endpoint) = self.endpoints.get(slot) else {
            return TransferResult::Failed(io::ErrorKind::NotConnected);
        };
        match endpoint.state {
            EndpointState::Failed(_) => return TransferResult::Failed(io::ErrorKind::BrokenPipe),
            EndpointState::Connecting => return TransferResult::Blocked,
            EndpointState::Open => {}
        }
        let (from, peer) = (endpoint.node, endpoint.peer);
        let Some((peer, receiver)) = peer.and_then(|peer| Some((peer, self.endpoints.get_mut(peer)?))) else {
            return TransferResult::Failed(io::ErrorKind::BrokenPipe);
        };
        let to = receiver.node;
        let mut room = WINDOW_BYTES.saturating_sub(receiver.incoming.len() + receiver.on_the_way);
        let mut bytes = Vec::new();
        for part in parts {
            let length = part.len().min(room);
            bytes.extend_from_slice(&part[..length]);
            room -= length;
        }
        receiver.on_the_way += bytes.len();
        if bytes.is_empty() {
            if let Some(endpoint) = self.endpoints.get_mut(slot) {
                endpoint.awaits_window = true;
            }
            return TransferResult::Blocked;
        }
        let count = bytes.len();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            // Now and then a short chunk, so that headers arrive in pieces.
            let most = if self.random.happens(20) { 1 + self.random.index(200) } else { CHUNK_BYTES };
            let (chunk, tail) = rest.split_at(most.min(rest.len()));
            let arrival = Arrival::Data(chunk.to_vec());
            self.send(Delivery { from, to, endpoint: peer, arrival }, chunk.len());
            rest = tail;
        }
        TransferResult::Bytes(count)
    }

    /// Closes an end after what it sent.
    fn close(&mut self, slot: Slot) {
        let Some(endpoint) = self.endpoints.get(slot) else { return };
        if endpoint.is_client && self.options.late_ns > 0 {
            self.postpone(slot, self.options.late_ns);
        }
        let Some(endpoint) = self.endpoints.remove(slot) else { return };
        if let Some(peer) = endpoint.peer
            && let Some(other) = self.endpoints.get(peer)
        {
            let to = other.node;
            self.send(Delivery { from: endpoint.node, to, endpoint: peer, arrival: Arrival::Finish }, 0);
        }
    }

    /// What is on the way to the peer of a closing host arrives `late_ns` later.
    fn postpone(&mut self, slot: Slot, late_ns: u64) {
        let Some(peer) = self.endpoints.get(slot).and_then(|endpoint| endpoint.peer) else { return };
        let is_its = |delivery: &Delivery| delivery.endpoint == peer;
        let mut late: Vec<Delivery> = Vec::new();
        let keys: Vec<(u64, u64)> =
            self.deliveries.iter().filter(|(_, delivery)| is_its(delivery)).map(|(key, _)| *key).collect();
        for key in keys {
            late.extend(self.deliveries.remove(&key));
        }
        for link in self.links.values_mut() {
            let (own, others) = std::mem::take(&mut link.held).into_iter().partition(is_its);
            link.held = others;
            late.extend::<VecDeque<Delivery>>(own);
        }
        if let Some(peer) = self.endpoints.get_mut(peer) {
            peer.last_arrival_ns = peer.last_arrival_ns.max(self.now_ns + late_ns);
        }
        for delivery in late {
            self.send(delivery, 0);
        }
    }

    /// Removes an end; the peer gets a reset behind what is on the way to it.
    fn abort(&mut self, slot: Slot) {
        let Some(endpoint) = self.endpoints.remove(slot) else { return };
        if let Some(peer) = endpoint.peer
            && let Some(other) = self.endpoints.get(peer)
        {
            let (from, to) = (endpoint.node, other.node);
            let arrival = Arrival::Reset(io::ErrorKind::ConnectionReset);
            self.send(Delivery { from, to, endpoint: peer, arrival }, 0);
        }
    }
}

/// The address of a node: 10.0.0.1 for node 0, and so on.
pub fn node_address(node: NodeId) -> std::net::IpAddr {
    let node = u8::try_from(node + 1).expect("a world has fewer than 255 nodes");
    std::net::Ipv4Addr::new(10, 0, 0, node).into()
}

fn node_of(address: SocketAddr) -> Option<NodeId> {
    match address {
        SocketAddr::V4(address) => usize::from(address.ip().octets()[3]).checked_sub(1),
        SocketAddr::V6(_) => None,
    }
}

#[cfg(test)]
mod tests;
