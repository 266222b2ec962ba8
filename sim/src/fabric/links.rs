//! The network that the components of a simulated core see.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};

use reactor::Core;
use slots::{Slab, Slot};
use sockets::{
    ConnectionId, CoreNetwork, Listen, ListenerId, Network, NetworkEvent, StreamAddress, TransferResult,
};

use super::{Component, ConnectionEvent, CoreId, Fabric, Listening};

/// The place of a core in its world, attached to the core as its environment.
pub(crate) struct SimulatedPlace {
    pub(crate) fabric: Arc<Mutex<Fabric>>,
    pub(crate) core: CoreId,
}

/// The simulated network of one component of a core: streams over a world's links.
pub struct SimulatedLinks {
    place: Rc<SimulatedPlace>,
    id: u64,
    listeners: Slab<SocketAddr>,
    /// The end of each connection.
    connections: Slab<LinkStream>,
}

/// One end of a stream that belongs to no network. Dropping it closes it.
pub struct LinkStream {
    fabric: Arc<Mutex<Fabric>>,
    endpoint: Slot,
}

impl Drop for LinkStream {
    fn drop(&mut self) {
        sync::lock(&self.fabric).close(self.endpoint);
    }
}

impl SimulatedLinks {
    fn fabric(&self) -> MutexGuard<'_, Fabric> {
        sync::lock(&self.place.fabric)
    }
}

impl Drop for SimulatedLinks {
    fn drop(&mut self) {
        for (_, address) in self.listeners.iter() {
            self.fabric().listeners.remove(address);
        }
        self.fabric().networks.remove(&self.id);
    }
}

impl CoreNetwork for SimulatedLinks {
    /// # Panics
    /// If the core is none of a [`World`](crate::World)'s.
    fn of_core(core: &Core) -> SimulatedLinks {
        let place = core.environment::<SimulatedPlace>().expect("a core of a simulated world");
        let mut fabric = sync::lock(&place.fabric);
        fabric.last_network += 1;
        let id = fabric.last_network;
        fabric.networks.insert(id, Component { core: place.core, ready: Vec::new() });
        drop(fabric);
        let (listeners, connections) =
            (Slab::with_capacity(64), Slab::with_capacity(sockets::CONNECTIONS_MAX));
        SimulatedLinks { place, id, listeners, connections }
    }

    fn connect(&mut self, address: &StreamAddress) -> io::Result<LinkStream> {
        let to = address.tcp().ok_or(io::ErrorKind::Unsupported)?;
        let endpoint = self.fabric().connect(self.place.core, to)?;
        Ok(LinkStream { fabric: self.place.fabric.clone(), endpoint })
    }
}

impl Listen for SimulatedLinks {
    fn listen(&mut self, address: &StreamAddress) -> io::Result<ListenerId> {
        let address = address.tcp().ok_or(io::ErrorKind::Unsupported)?;
        if sync::lock(&self.place.fabric).listeners.contains_key(&address) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let listener =
            self.listeners.insert(address).map_err(|_| io::Error::from(io::ErrorKind::QuotaExceeded))?;
        let listening = Listening { network: self.id, listener, node: self.place.core.node };
        self.fabric().listeners.insert(address, listening);
        Ok(ListenerId(listener))
    }

    fn close_listener(&mut self, listener: ListenerId) {
        if let Some(address) = self.listeners.remove(listener.0) {
            self.fabric().listeners.remove(&address);
        }
    }

    fn local_address(&self, listener: ListenerId) -> Option<StreamAddress> {
        self.listeners.get(listener.0).copied().map(StreamAddress::Tcp)
    }
}

impl Network for SimulatedLinks {
    type Stream = LinkStream;

    fn local_address_of(stream: &LinkStream) -> Option<StreamAddress> {
        let fabric = sync::lock(&stream.fabric);
        fabric.endpoints.get(stream.endpoint).map(|endpoint| StreamAddress::Tcp(endpoint.local))
    }

    fn add(&mut self, stream: LinkStream) -> io::Result<ConnectionId> {
        let endpoint = stream.endpoint;
        let connection =
            self.connections.insert(stream).map_err(|_| io::Error::from(io::ErrorKind::QuotaExceeded))?;
        let mut fabric = sync::lock(&self.place.fabric);
        if let Some(end) = fabric.endpoints.get_mut(endpoint) {
            end.owner = Some((self.id, connection));
        }
        fabric.report(endpoint);
        Ok(ConnectionId(connection))
    }

    fn poll(&mut self, events: &mut Vec<NetworkEvent<LinkStream>>) -> usize {
        let mut fabric = sync::lock(&self.place.fabric);
        let Some(component) = fabric.networks.get_mut(&self.id) else { return 0 };
        if component.ready.is_empty() {
            return 0;
        }
        let ready = std::mem::take(&mut component.ready);
        drop(fabric);
        let count = ready.len();
        events.extend(ready.into_iter().map(|event| match event {
            ConnectionEvent::Ready(connection) => NetworkEvent::Ready(ConnectionId(connection)),
            ConnectionEvent::Incoming { listener, stream, peer } => NetworkEvent::Incoming {
                listener: ListenerId(listener),
                stream: LinkStream { fabric: self.place.fabric.clone(), endpoint: stream },
                peer: peer.into(),
            },
        }));
        count
    }

    fn receive(&mut self, connection: ConnectionId, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        match self.connections.get(connection.0) {
            Some(stream) => sync::lock(&stream.fabric).receive(stream.endpoint, parts),
            None => TransferResult::Failed(io::ErrorKind::NotConnected),
        }
    }

    fn send(&mut self, connection: ConnectionId, parts: &[IoSlice<'_>]) -> TransferResult {
        match self.connections.get(connection.0) {
            Some(stream) => sync::lock(&stream.fabric).transmit(stream.endpoint, parts),
            None => TransferResult::Failed(io::ErrorKind::NotConnected),
        }
    }

    fn remove(&mut self, connection: ConnectionId) -> Option<LinkStream> {
        let stream = self.connections.remove(connection.0)?;
        // What arrives from now on is reported to the network that adds it.
        if let Some(end) = self.fabric().endpoints.get_mut(stream.endpoint) {
            end.owner = None;
        }
        Some(stream)
    }

    fn close(&mut self, connection: ConnectionId) {
        self.connections.remove(connection.0);
    }

    fn is_pending(&self) -> bool {
        self.fabric().networks.get(&self.id).is_some_and(|component| !component.ready.is_empty())
    }
}
