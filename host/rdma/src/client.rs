//! A queue pair that connects to a listener.
//!
//! Its own resources of the device are made when the address is resolved; a core's clients share none.

use std::ffi::c_int;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::rc::Rc;

use os::{EventClient, EventCompletion, Interest};
use reactor::Core;
use sockets::{PeerMemory, QueuePair};

use crate::RdmaError;
use crate::connection_manager::{ActiveId, CmEvent, EventChannel};
use crate::device::{DeviceConfig, MemoryAccess, RdmaDevice};
use crate::functions::WorkCompletion;
use crate::queue_pair::RdmaQueuePair;
use crate::receive_buffers::RECEIVE;

/// How long an address or a route may take to resolve, in milliseconds.
const RESOLVE_TIMEOUT_MS: c_int = 5000;

/// What a client asks of its connection.
#[derive(Clone, Debug)]
pub struct RdmaClientConfig {
    /// The address of this machine that the connection comes from; without, that of the route.
    pub source: Option<SocketAddr>,
    /// Commands in flight at most.
    pub commands: u32,
    /// Bytes of a message that is received, at most.
    pub message_bytes: usize,
    /// The message of the request to connect.
    pub request: Vec<u8>,
}

/// How far a connection is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RdmaClientState {
    /// It is being made.
    Connecting,
    /// It can be used.
    Connected,
    /// It could not be made, has failed or was closed; what the peer said when it rejected it.
    Ended(io::ErrorKind, Vec<u8>),
}

/// A queue pair of one connection, made by this end.
pub struct RdmaClient {
    /// Dropped first: the queue pair, its identifier, the device, and then the channel of their events.
    pair: Option<RdmaQueuePair>,
    id: Option<ActiveId>,
    device: Option<Rc<RdmaDevice>>,
    channel: EventChannel,
    client: EventClient,
    events: Vec<EventCompletion>,
    completions: Vec<WorkCompletion>,
    config: RdmaClientConfig,
    state: RdmaClientState,
    core: Core,
}

impl RdmaClient {
    /// Begins to connect; nothing blocks.
    ///
    /// # Errors
    /// The libraries cannot be loaded, or no RDMA device reaches the address.
    pub fn connect(
        core: &Core,
        address: SocketAddr,
        config: RdmaClientConfig,
    ) -> Result<RdmaClient, RdmaError> {
        let channel = EventChannel::new()?;
        let client = core.event_loop().client();
        let watched = client.watch(channel.as_fd(), Interest::READABLE, 0);
        watched.map_err(|error| RdmaError::Call("watching the connection manager", error))?;
        let id = ActiveId::resolve(&channel, config.source, address, RESOLVE_TIMEOUT_MS)?;
        Ok(RdmaClient {
            pair: None,
            id: Some(id),
            device: None,
            channel,
            client,
            events: Vec::new(),
            completions: Vec::new(),
            config,
            state: RdmaClientState::Connecting,
            core: core.clone(),
        })
    }

    /// How far the connection is.
    pub fn state(&self) -> &RdmaClientState {
        &self.state
    }

    /// Handles what has happened; returns the number of events. Those of the queue pair are then taken from
    /// it.
    pub fn poll(&mut self) -> u64 {
        let mut count = self.client.reap(&mut self.events) as u64;
        if count > 0 {
            self.events.clear();
            self.device.iter().for_each(|device| device.take_notifications());
            self.read_manager();
        }
        if let Some(device) = self.device.clone() {
            count += self.poll_device(&device);
            // What completes after the last poll and before the device is armed is not notified of.
            if count == 0 && device.arm() {
                count += self.poll_device(&device);
            }
        }
        count
    }

    /// Whether [`poll`](Self::poll) has to be called without an event.
    pub fn is_pending(&self) -> bool {
        self.device.as_ref().is_some_and(|device| !device.is_armed())
    }

    /// Closes the connection. Afterwards the peer accesses no memory.
    pub fn close(&mut self) {
        self.pair = None;
        self.end(io::ErrorKind::ConnectionAborted, Vec::new());
    }

    /// The queue pair, once the connection is made.
    pub fn pair(&mut self) -> Option<&mut dyn QueuePair> {
        self.pair.as_mut().map(|pair| pair as &mut dyn QueuePair)
    }

    /// Where the peer finds a buffer, which it may read and write as long as the connection exists.
    ///
    /// # Errors
    /// The buffer is not of the core's pool, or the device refuses to register it.
    pub fn peer_memory(&self, buffer: &dma::Buffer) -> Result<PeerMemory, dma::DmaError> {
        let device = self.device.as_ref().ok_or(dma::DmaError::Gone)?;
        let (range, key) = device.locate_for_peer(buffer)?;
        Ok(PeerMemory { address: range.address, key })
    }

    fn end(&mut self, kind: io::ErrorKind, message: Vec<u8>) {
        if !matches!(self.state, RdmaClientState::Ended(..)) {
            self.state = RdmaClientState::Ended(kind, message);
        }
    }

    #[cold]
    fn read_manager(&mut self) {
        loop {
            let step = match self.channel.next() {
                Ok(None) => return,
                Ok(Some(event)) => self.handle(event),
                Err(error) => Err(error),
            };
            if let Err(error) = step {
                log::warn!(target: "rdma", "{error}");
                return self.end(io::ErrorKind::ConnectionAborted, Vec::new());
            }
        }
    }

    fn handle(&mut self, event: CmEvent) -> Result<(), RdmaError> {
        match event {
            CmEvent::AddressResolved => {
                if let Some(id) = &self.id {
                    id.resolve_route(RESOLVE_TIMEOUT_MS)?;
                }
            }
            CmEvent::RouteResolved => self.request()?,
            CmEvent::Established => self.state = RdmaClientState::Connected,
            CmEvent::Unreachable => self.end(io::ErrorKind::HostUnreachable, Vec::new()),
            CmEvent::Rejected { message } => self.end(io::ErrorKind::ConnectionRefused, message),
            CmEvent::Ended { .. } => {
                if let Some(pair) = &mut self.pair {
                    pair.ended();
                }
                self.end(io::ErrorKind::ConnectionReset, Vec::new());
            }
            CmEvent::Request { .. } | CmEvent::Other => {}
        }
        Ok(())
    }

    /// Makes the queue pair on the device that was found, and requests the connection.
    fn request(&mut self) -> Result<(), RdmaError> {
        let Some(id) = self.id.take() else { return Ok(()) };
        let RdmaClientConfig { commands, message_bytes, request, .. } = &self.config;
        // A response for each command; one that the peer sends beyond those fails the connection.
        let receives = *commands + 1;
        let wanted = DeviceConfig {
            receives,
            message_bytes: *message_bytes,
            entries_max: receives + RdmaQueuePair::requests(*commands),
            access: MemoryAccess::OfPeer,
        };
        let device = RdmaDevice::open(&self.core, id.id(), &wanted)?;
        let watched = self.client.watch(device.as_fd(), Interest::READABLE, 0);
        watched.map_err(|error| RdmaError::Call("watching the device", error))?;
        self.pair = Some(RdmaQueuePair::request(id, &device, *commands, request)?);
        self.device = Some(device);
        Ok(())
    }

    fn poll_device(&mut self, device: &Rc<RdmaDevice>) -> u64 {
        let count = device.poll(&mut self.completions);
        for completion in self.completions.drain(..) {
            if completion.status != 0 && completion.id & RECEIVE != 0 {
                device.release_message(completion.id as u32);
            }
            if let Some(pair) = &mut self.pair {
                pair.completed(&completion);
            }
        }
        device.post_receives();
        count as u64
    }
}

impl std::fmt::Debug for RdmaClient {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("RdmaClient").field("state", &self.state).finish_non_exhaustive()
    }
}
