//! The RDMA connections of a core, as a network.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::AsFd;
use std::rc::Rc;

use os::{EventClient, EventCompletion, Interest, WatchId};
use reactor::Core;
use slots::Slab;
use sockets::{
    CONNECTIONS_MAX, ConnectionId, CoreNetwork, Listen, ListenerId, Network, NetworkEvent, QueuePair,
    StreamAddress, TransferResult,
};

use crate::RdmaError;
use crate::connection_manager::{CmEvent, ConnectionRequest, EventChannel, Listener};
use crate::device::{DeviceConfig, MemoryAccess, RdmaDevice};
use crate::functions::WorkCompletion;
use crate::queue_pair::RdmaQueuePair;
use crate::receive_buffers::RECEIVE;

/// Entries of the completion queue that the connections of a core share, 64 bytes each: a connection with 128
/// commands needs 384.
const ENTRIES_MAX: u32 = 1 << 18;
/// Listeners of a core.
const LISTENERS_MAX: u32 = 1024;
/// Tag of the watch of the connection manager; those of devices have their index.
const MANAGER: u64 = u64::MAX;

/// What a protocol over RDMA decides about connections.
#[derive(Clone, Debug)]
pub struct RdmaNetworkConfig {
    /// Bytes of a message that is received, at most.
    pub message_bytes: usize,
    /// Messages that a core can receive from a device before they are handled.
    pub receives: u32,
    /// Requests to connect that wait to be accepted at a listener, at most.
    pub backlog: u16,
    /// What to do with a peer, by what it sent with its request: accept it, or reject it with a message.
    pub admit: fn(&[u8], &RdmaNetworkConfig) -> Result<Admission, Vec<u8>>,
    /// Commands in flight on a connection at most, for [`admit`](Self::admit).
    pub commands_max: u32,
    /// The message of the rejection if resources lack.
    pub no_resources: Vec<u8>,
}

/// How a peer is accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    /// Commands that it can have in flight.
    pub commands: u32,
    /// The message of the acceptance.
    pub reply: Vec<u8>,
}

/// The configuration of a core's [`RdmaNetwork`]s, which its protocol sets before it listens
/// ([`Core::local`]).
#[derive(Debug, Default)]
pub struct RdmaNetworkSettings(RefCell<Option<RdmaNetworkConfig>>);

impl RdmaNetworkSettings {
    /// Sets the configuration for connections from now on.
    pub fn set(&self, config: RdmaNetworkConfig) {
        *self.0.borrow_mut() = Some(config);
    }
}

/// The RDMA connections and listeners of a core.
pub struct RdmaNetwork {
    /// Dropped first: queue pairs, then devices, then listeners, then their channel.
    connections: Slab<RdmaConnection>,
    devices: Vec<Option<(Rc<RdmaDevice>, WatchId)>>,
    listeners: Slab<Listener>,
    manager: Option<(EventChannel, WatchId)>,
    /// Connections by the device's key and the number of the queue pair, and by the identifier in events.
    by_number: HashMap<(usize, u32), ConnectionId>,
    by_key: HashMap<usize, ConnectionId>,
    client: EventClient,
    events: Vec<EventCompletion>,
    completions: Vec<WorkCompletion>,
    /// Connections with events, to be reported.
    ready: Vec<ConnectionId>,
    settings: Rc<RdmaNetworkSettings>,
    core: Core,
}

struct RdmaConnection {
    pair: RdmaQueuePair,
    is_ready: bool,
}

impl RdmaNetwork {
    /// The channel of the connection manager, which is opened when it is first needed.
    fn manager(&mut self) -> Result<&EventChannel, RdmaError> {
        if self.manager.is_none() {
            let channel = EventChannel::new()?;
            let watch = self.client.watch(channel.as_fd(), Interest::READABLE, MANAGER);
            let watch = watch.map_err(|error| RdmaError::Call("watching the connection manager", error))?;
            self.manager = Some((channel, watch));
        }
        Ok(&self.manager.as_ref().expect("it was just opened").0)
    }

    fn mark_ready(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.get_mut(id.0)
            && !std::mem::replace(&mut connection.is_ready, true)
        {
            self.ready.push(id);
        }
    }

    /// Reads the events of the connection manager.
    #[cold]
    fn read_manager(&mut self, events: &mut Vec<NetworkEvent<ConnectionRequest>>) {
        while let Some((channel, _)) = &self.manager {
            match channel.next() {
                Ok(Some(CmEvent::Request { listener, request })) => {
                    let mut known = self.listeners.iter();
                    let listener = known.find(|(_, known)| known.key() == listener);
                    // One whose listener was closed meanwhile is rejected by its drop.
                    if let (Some((slot, _)), Some(peer)) = (listener, request.peer()) {
                        let peer = StreamAddress::Tcp(peer);
                        events.push(NetworkEvent::Incoming {
                            listener: ListenerId(slot),
                            stream: request,
                            peer,
                        });
                    }
                }
                Ok(Some(CmEvent::Ended { connection })) => {
                    if let Some(id) = self.by_key.get(&connection).copied()
                        && let Some(known) = self.connections.get_mut(id.0)
                    {
                        known.pair.ended();
                        self.mark_ready(id);
                    }
                }
                // Of connections that this end makes, which a network does not.
                Ok(Some(_)) => {}
                Ok(None) => return,
                Err(error) => return log::warn!(target: "rdma", "{error}"),
            }
        }
    }

    /// Passes completions of a device to their connections; returns their number.
    fn poll_device(&mut self, device: &Rc<RdmaDevice>) -> usize {
        let mut completions = std::mem::take(&mut self.completions);
        let count = device.poll(&mut completions);
        for completion in completions.drain(..) {
            let id = self.by_number.get(&(device.key(), completion.qp_number)).copied();
            let connection = id.and_then(|id| self.connections.get_mut(id.0));
            let is_lost = connection.is_none() || completion.status != 0;
            if is_lost && completion.id & RECEIVE != 0 {
                device.release_message(completion.id as u32);
            }
            if let Some(connection) = connection {
                connection.pair.completed(&completion);
            }
            if let Some(id) = id {
                self.mark_ready(id);
            }
        }
        self.completions = completions;
        device.post_receives();
        count
    }

    /// The device of a request, which is opened for the first connection on it.
    fn device(
        &mut self,
        request: &ConnectionRequest,
        config: &RdmaNetworkConfig,
    ) -> Result<Rc<RdmaDevice>, RdmaError> {
        let key = RdmaDevice::key_of(request.id());
        if let Some((known, _)) = self.devices.iter().flatten().find(|(known, _)| known.key() == key) {
            return Ok(known.clone());
        }
        let wanted = DeviceConfig {
            receives: config.receives,
            message_bytes: config.message_bytes,
            entries_max: ENTRIES_MAX,
            access: MemoryAccess::Own,
        };
        let device = RdmaDevice::open(&self.core, request.id(), &wanted)?;
        let at = self.devices.iter().position(Option::is_none).unwrap_or(self.devices.len());
        let watch = self.client.watch(device.as_fd(), Interest::READABLE, at as u64);
        let watch = watch.map_err(|error| RdmaError::Call("watching the device", error))?;
        if at == self.devices.len() {
            self.devices.push(None);
        }
        self.devices[at] = Some((device.clone(), watch));
        Ok(device)
    }

    fn accept(
        &mut self,
        request: ConnectionRequest,
        config: &RdmaNetworkConfig,
        admission: &Admission,
    ) -> Result<ConnectionId, RdmaError> {
        if self.connections.is_full() {
            let error = io::Error::other("the core has as many connections as it may");
            return Err(RdmaError::Call("adding a connection", error));
        }
        request.id().migrate(self.manager()?)?;
        let device = self.device(&request, config)?;
        let pair = RdmaQueuePair::accept(request, &device, admission.commands, &admission.reply)?;
        let (number, key) = (pair.number(), pair.key());
        let slot = self.connections.insert(RdmaConnection { pair, is_ready: false });
        let id = ConnectionId(slot.unwrap_or_else(|_| unreachable!("it is not full")));
        self.by_number.insert((device.key(), number), id);
        self.by_key.insert(key, id);
        self.mark_ready(id);
        Ok(id)
    }

    /// Closes devices without connections.
    fn close_unused(&mut self) {
        for place in &mut self.devices {
            if let Some((_, watch)) = place.take_if(|(device, _)| Rc::strong_count(device) == 1) {
                self.client.unwatch(watch);
            }
        }
    }
}

impl Network for RdmaNetwork {
    type Stream = ConnectionRequest;

    fn local_address_of(stream: &ConnectionRequest) -> Option<StreamAddress> {
        stream.local().map(StreamAddress::Tcp)
    }

    /// Accepts the peer on this core, or rejects it.
    fn add(&mut self, mut request: ConnectionRequest) -> io::Result<ConnectionId> {
        let settings = self.settings.clone();
        let Some(config) = &*settings.0.borrow() else { return Err(io::ErrorKind::Unsupported.into()) };
        let admission = match (config.admit)(request.private_data(), config) {
            Ok(admission) => admission,
            Err(reply) => {
                request.refuse_with(&reply);
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
        };
        request.refuse_with(&config.no_resources);
        let peer = request.peer();
        self.accept(request, config, &admission).map_err(|error| {
            // A device that was opened for it is of no use.
            self.close_unused();
            let peer = peer.map_or_else(|| "a peer".into(), |peer| peer.to_string());
            log::warn!(target: "rdma", "{peer} was not accepted: {error}");
            error.into_io()
        })
    }

    fn poll(&mut self, events: &mut Vec<NetworkEvent<ConnectionRequest>>) -> usize {
        let before = events.len();
        if self.client.reap(&mut self.events) > 0 {
            for event in std::mem::take(&mut self.events) {
                match event.tag {
                    MANAGER => self.read_manager(events),
                    at => {
                        if let Some(Some((device, _))) = self.devices.get(at as usize) {
                            device.take_notifications();
                        }
                    }
                }
            }
        }
        for at in 0..self.devices.len() {
            let Some((device, _)) = &self.devices[at] else { continue };
            let device = device.clone();
            // What completes after the last poll and before the device is armed is not notified of.
            if self.poll_device(&device) == 0 && device.arm() {
                self.poll_device(&device);
            }
        }
        for id in std::mem::take(&mut self.ready) {
            if let Some(connection) = self.connections.get_mut(id.0) {
                connection.is_ready = false;
                events.push(NetworkEvent::Ready(id));
            }
        }
        events.len() - before
    }

    fn receive(&mut self, _connection: ConnectionId, _parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        TransferResult::Failed(io::ErrorKind::Unsupported)
    }

    fn send(&mut self, _connection: ConnectionId, _parts: &[IoSlice<'_>]) -> TransferResult {
        TransferResult::Failed(io::ErrorKind::Unsupported)
    }

    #[inline]
    fn queue_pair(&mut self, connection: ConnectionId) -> Option<&mut dyn QueuePair> {
        self.connections.get_mut(connection.0).map(|connection| &mut connection.pair as &mut dyn QueuePair)
    }

    fn close(&mut self, connection: ConnectionId) {
        let Some(closed) = self.connections.remove(connection.0) else { return };
        self.by_number.remove(&(closed.pair.device().key(), closed.pair.number()));
        self.by_key.remove(&closed.pair.key());
        drop(closed);
        self.close_unused();
    }

    /// A device that is not armed has to be polled once more before the core sleeps.
    fn is_pending(&self) -> bool {
        !self.ready.is_empty() || self.devices.iter().flatten().any(|(device, _)| !device.is_armed())
    }
}

impl Listen for RdmaNetwork {
    fn listen(&mut self, address: &StreamAddress) -> io::Result<ListenerId> {
        let address = address.tcp().ok_or(io::ErrorKind::Unsupported)?;
        let backlog = self.settings.0.borrow().as_ref().map(|config| config.backlog);
        let backlog = backlog.ok_or(io::ErrorKind::Unsupported)?;
        let manager = self.manager().map_err(RdmaError::into_io)?;
        let listener = Listener::open(manager, address, backlog).map_err(RdmaError::into_io)?;
        let slot = self.listeners.insert(listener).map_err(|_| io::ErrorKind::QuotaExceeded)?;
        Ok(ListenerId(slot))
    }

    fn close_listener(&mut self, listener: ListenerId) {
        self.listeners.remove(listener.0);
    }

    fn local_address(&self, listener: ListenerId) -> Option<StreamAddress> {
        self.listeners.get(listener.0)?.local().map(StreamAddress::Tcp)
    }
}

impl CoreNetwork for RdmaNetwork {
    fn of_core(core: &Core) -> RdmaNetwork {
        RdmaNetwork {
            connections: Slab::with_capacity(CONNECTIONS_MAX),
            devices: Vec::new(),
            listeners: Slab::with_capacity(LISTENERS_MAX),
            manager: None,
            by_number: HashMap::new(),
            by_key: HashMap::new(),
            client: core.event_loop().client(),
            events: Vec::new(),
            completions: Vec::new(),
            ready: Vec::new(),
            settings: core.local(),
            core: core.clone(),
        }
    }

    /// Connections are accepted only.
    fn connect(&mut self, _address: &StreamAddress) -> io::Result<ConnectionRequest> {
        Err(io::ErrorKind::Unsupported.into())
    }
}
