//! The connection manager: listeners, requests to connect, and the events of connections.

use std::ffi::c_int;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};

use crate::RdmaError;
use crate::functions::{
    CmChannel, CmEventRecord, CmId, ConnectionParameters, Context, Functions, PORT_SPACE_TCP,
    QueuePairHandle, event, functions,
};

/// A queue of events, of one core.
pub(crate) struct EventChannel {
    functions: &'static Functions,
    channel: NonNull<CmChannel>,
}

/// What has happened to a listener or a connection.
#[derive(Debug)]
pub(crate) enum CmEvent {
    /// A peer wants to connect to the listener with this identifier.
    Request { listener: usize, request: ConnectionRequest },
    /// The address of a peer is resolved to a device.
    AddressResolved,
    /// The route to a peer is resolved.
    RouteResolved,
    /// A connection that was requested is made.
    Established,
    /// A peer is not reached.
    Unreachable,
    /// A peer has rejected a request, with a message.
    Rejected { message: Vec<u8> },
    /// The connection with this identifier has ended, or could not be made.
    Ended { connection: usize },
    /// Something that changes nothing.
    Other,
}

impl EventChannel {
    /// An empty queue, whose descriptor does not block.
    ///
    /// # Errors
    /// The libraries cannot be loaded, or the kernel has no connection manager.
    pub(crate) fn new() -> Result<EventChannel, RdmaError> {
        let functions = functions()?;
        // SAFETY: it takes nothing.
        let channel = NonNull::new(unsafe { (functions.cm.rdma_create_event_channel)() });
        let channel = channel.ok_or_else(|| RdmaError::last("opening the connection manager"))?;
        let opened = EventChannel { functions, channel };
        let what = "setting the connection manager's descriptor to not block";
        rustix::io::ioctl_fionbio(opened.as_fd(), true)
            .map_err(|error| RdmaError::Call(what, error.into()))?;
        Ok(opened)
    }

    /// The next event; `None` if there is none at present.
    pub(crate) fn next(&self) -> Result<Option<CmEvent>, RdmaError> {
        let mut record = ptr::null_mut();
        // SAFETY: the channel is open, and the result is a place for a pointer.
        if unsafe { (self.functions.cm.rdma_get_cm_event)(self.channel.as_ptr(), &mut record) } != 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock => Ok(None),
                _ => Err(RdmaError::Call("reading an event of the connection manager", error)),
            };
        }
        // SAFETY: the call has succeeded, so the record is valid until it is acknowledged.
        let CmEventRecord { id, listener, kind, connection: parameters, .. } = unsafe { record.read() };
        let message = || {
            let length = usize::from(parameters.private_data_length);
            match parameters.private_data.is_null() {
                true => Vec::new(),
                false => {
                    // SAFETY: the record has the private data until it is acknowledged.
                    unsafe { std::slice::from_raw_parts(parameters.private_data.cast::<u8>(), length) }
                        .to_vec()
                }
            }
        };
        let found = match kind {
            event::CONNECT_REQUEST => {
                let private_data = message();
                let id = NonNull::new(id).expect("a request has an identifier");
                let id = OwnedId { functions: self.functions, id };
                let request = ConnectionRequest {
                    id: Some(id),
                    private_data,
                    initiator_depth: parameters.initiator_depth,
                    refusal: Vec::new(),
                };
                CmEvent::Request { listener: listener.addr(), request }
            }
            event::ADDR_RESOLVED => CmEvent::AddressResolved,
            event::ROUTE_RESOLVED => CmEvent::RouteResolved,
            event::ESTABLISHED => CmEvent::Established,
            event::ADDR_ERROR | event::ROUTE_ERROR | event::UNREACHABLE => CmEvent::Unreachable,
            event::REJECTED => CmEvent::Rejected { message: message() },
            event::DISCONNECTED | event::DEVICE_REMOVAL | event::TIMEWAIT_EXIT | event::CONNECT_ERROR => {
                CmEvent::Ended { connection: id.addr() }
            }
            _ => CmEvent::Other,
        };
        // SAFETY: the record came from this channel, and nothing refers to it any more.
        unsafe { (self.functions.cm.rdma_ack_cm_event)(record) };
        Ok(Some(found))
    }

    pub(crate) fn as_ptr(&self) -> *mut CmChannel {
        self.channel.as_ptr()
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open as long as `self`.
        let fd = unsafe { self.channel.as_ref() }.fd;
        // SAFETY: the descriptor is the channel's.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: listeners and connections of the channel are dropped before it: they are fields before it.
        unsafe { (self.functions.cm.rdma_destroy_event_channel)(self.channel.as_ptr()) };
    }
}

/// An identifier of the connection manager, which is destroyed when it is dropped.
#[derive(Debug)]
pub(crate) struct OwnedId {
    functions: &'static Functions,
    id: NonNull<CmId>,
}

// SAFETY: librdmacm's calls may be made on any thread.
unsafe impl Send for OwnedId {}

impl std::fmt::Debug for Functions {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Functions")
    }
}

impl OwnedId {
    /// One without an address, whose events come from the channel.
    fn new(channel: &EventChannel) -> Result<OwnedId, RdmaError> {
        let functions = channel.functions;
        let mut id = ptr::null_mut();
        // SAFETY: the channel is open, and the result is a place for a pointer.
        let created = unsafe {
            (functions.cm.rdma_create_id)(channel.as_ptr(), &mut id, ptr::null_mut(), PORT_SPACE_TCP)
        };
        let id = NonNull::new(id).filter(|_| created == 0);
        let id = id.ok_or_else(|| RdmaError::last("making an identifier of the connection manager"))?;
        Ok(OwnedId { functions, id })
    }

    pub(crate) fn as_ptr(&self) -> *mut CmId {
        self.id.as_ptr()
    }

    /// Names it in events.
    pub(crate) fn key(&self) -> usize {
        self.id.as_ptr().addr()
    }

    /// Its queue pair; null before that is made.
    pub(crate) fn queue_pair(&self) -> *mut QueuePairHandle {
        // SAFETY: the identifier is valid until the drop of `self`.
        unsafe { self.id.as_ref() }.qp
    }

    /// Its device; null before it has one.
    pub(crate) fn context(&self) -> *mut Context {
        // SAFETY: as above.
        unsafe { self.id.as_ref() }.verbs
    }

    pub(crate) fn functions(&self) -> &'static Functions {
        self.functions
    }

    fn local(&self) -> Option<SocketAddr> {
        // SAFETY: the identifier is valid, and its address is set once it is bound.
        socket_address(unsafe { &self.id.as_ref().local })
    }

    fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: as above; a request has the peer's address.
        socket_address(unsafe { &self.id.as_ref().peer })
    }

    /// Moves its events to the channel of another core.
    pub(crate) fn migrate(&self, channel: &EventChannel) -> Result<(), RdmaError> {
        // SAFETY: both are valid. Its events so far are acknowledged.
        match unsafe { (self.functions.cm.rdma_migrate_id)(self.id.as_ptr(), channel.as_ptr()) } {
            0 => Ok(()),
            _ => Err(RdmaError::last("moving a connection to another core")),
        }
    }
}

impl Drop for OwnedId {
    fn drop(&mut self) {
        // SAFETY: it is valid, has no queue pair any more, and its events are acknowledged.
        unsafe { (self.functions.cm.rdma_destroy_id)(self.id.as_ptr()) };
    }
}

/// An identifier of a connection that this end makes.
#[derive(Debug)]
pub(crate) struct ActiveId(OwnedId);

impl ActiveId {
    /// Begins to resolve the address of a peer to a device.
    ///
    /// # Errors
    /// There is no RDMA device.
    pub(crate) fn resolve(
        channel: &EventChannel,
        source: Option<SocketAddr>,
        address: SocketAddr,
        timeout_ms: c_int,
    ) -> Result<ActiveId, RdmaError> {
        let id = OwnedId::new(channel)?;
        let mut source = source.map(raw_address);
        let mut raw = raw_address(address);
        let from = source.as_mut().map_or(ptr::null_mut(), |source| ptr::from_mut(source).cast());
        let resolve = channel.functions.cm.rdma_resolve_addr;
        // SAFETY: the identifier is valid, and the addresses outlive the call.
        match unsafe { resolve(id.as_ptr(), from, (&raw mut raw).cast(), timeout_ms) } {
            0 => Ok(ActiveId(id)),
            _ => Err(RdmaError::last("resolving the address")),
        }
    }

    pub(crate) fn id(&self) -> &OwnedId {
        &self.0
    }

    /// Begins to resolve the route, once the address is resolved.
    pub(crate) fn resolve_route(&self, timeout_ms: c_int) -> Result<(), RdmaError> {
        // SAFETY: the identifier is valid.
        match unsafe { (self.0.functions.cm.rdma_resolve_route)(self.0.as_ptr(), timeout_ms) } {
            0 => Ok(()),
            _ => Err(RdmaError::last("resolving the route")),
        }
    }

    /// Requests the connection, after the queue pair was made, with a message. `reads_max` is how many reads
    /// of our memory the device can serve at a time.
    pub(crate) fn request(self, message: &[u8], reads_max: u8) -> Result<OwnedId, RdmaError> {
        let id = self.0;
        let mut parameters = ConnectionParameters {
            private_data: message.as_ptr().cast(),
            private_data_length: message.len().min(u8::MAX.into()) as u8,
            responder_resources: reads_max.max(1),
            // A host reads nothing of the target's memory.
            initiator_depth: 0,
            flow_control: 0,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: 1,
            qp_number: 0,
        };
        // SAFETY: the identifier has a queue pair, and the message outlives the call.
        match unsafe { (id.functions.cm.rdma_connect)(id.as_ptr(), &mut parameters) } {
            0 => Ok(id),
            _ => {
                let error = RdmaError::last("requesting a connection");
                // SAFETY: the identifier is valid and has a queue pair.
                unsafe { (id.functions.cm.rdma_destroy_qp)(id.as_ptr()) };
                Err(error)
            }
        }
    }
}

/// Waits for peers on an address. Its events come from the channel that it was opened with.
pub(crate) struct Listener {
    id: OwnedId,
}

impl Listener {
    /// Binds to an address of an RDMA device, or to all with an unspecified one, and listens. Port 0 is any.
    ///
    /// # Errors
    /// The address is in use, or no device has it.
    pub(crate) fn open(
        channel: &EventChannel,
        address: SocketAddr,
        backlog: u16,
    ) -> Result<Listener, RdmaError> {
        let functions = channel.functions;
        let id = OwnedId::new(channel)?;
        let mut raw = raw_address(address);
        // SAFETY: the identifier is valid, and the address is one of its family.
        if unsafe { (functions.cm.rdma_bind_addr)(id.as_ptr(), (&raw mut raw).cast()) } != 0 {
            return Err(RdmaError::last("binding to the address"));
        }
        // SAFETY: the identifier is bound.
        if unsafe { (functions.cm.rdma_listen)(id.as_ptr(), backlog.into()) } != 0 {
            return Err(RdmaError::last("listening"));
        }
        Ok(Listener { id })
    }

    pub(crate) fn key(&self) -> usize {
        self.id.key()
    }

    /// The address that it is bound to.
    pub(crate) fn local(&self) -> Option<SocketAddr> {
        let mut address = self.id.local()?;
        // SAFETY: the identifier is valid.
        address.set_port(u16::from_be(unsafe { (self.id.functions.cm.rdma_get_src_port)(self.id.as_ptr()) }));
        Some(address)
    }
}

/// A peer that wants to connect. Dropping it rejects the peer.
#[derive(Debug)]
pub struct ConnectionRequest {
    /// `None` once it is accepted.
    id: Option<OwnedId>,
    private_data: Vec<u8>,
    /// Reads of its memory that may be in flight.
    initiator_depth: u8,
    /// The message of the rejection, if it is dropped before it is accepted.
    refusal: Vec<u8>,
}

impl ConnectionRequest {
    /// What the peer sent with its request.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    pub(crate) fn id(&self) -> &OwnedId {
        self.id.as_ref().expect("it is not accepted yet")
    }

    pub(crate) fn local(&self) -> Option<SocketAddr> {
        self.id.as_ref()?.local()
    }

    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.id.as_ref()?.peer()
    }

    /// Sets the message of a rejection, which the drop sends unless the peer is accepted.
    pub(crate) fn refuse_with(&mut self, private_data: &[u8]) {
        self.refusal = private_data.to_vec();
    }

    /// Accepts the peer, after the queue pair was made, with a message. `reads_max` is how many reads of its
    /// memory the device can have in flight. Returns the identifier.
    pub(crate) fn accept(mut self, private_data: &[u8], reads_max: u8) -> Result<OwnedId, RdmaError> {
        let id = self.id.take().expect("it is not accepted yet");
        let mut parameters = ConnectionParameters {
            private_data: private_data.as_ptr().cast(),
            private_data_length: private_data.len().min(u8::MAX.into()) as u8,
            // The target's memory is not read by hosts.
            responder_resources: 0,
            initiator_depth: self.initiator_depth.min(reads_max).max(1),
            flow_control: 0,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: 1,
            qp_number: 0,
        };
        // SAFETY: the identifier has a queue pair, and the message outlives the call.
        match unsafe { (id.functions.cm.rdma_accept)(id.as_ptr(), &mut parameters) } {
            0 => Ok(id),
            _ => {
                let error = RdmaError::last("accepting a connection");
                // SAFETY: the identifier is valid and has a queue pair.
                unsafe { (id.functions.cm.rdma_destroy_qp)(id.as_ptr()) };
                Err(error)
            }
        }
    }
}

impl Drop for ConnectionRequest {
    fn drop(&mut self) {
        let Some(id) = self.id.take() else { return };
        let length = self.refusal.len().min(u8::MAX.into()) as u8;
        // SAFETY: the identifier is valid, and the data has this length. If it fails, the peer is gone.
        unsafe { (id.functions.cm.rdma_reject)(id.as_ptr(), self.refusal.as_ptr().cast(), length) };
    }
}

/// An address as the kernel takes it.
fn raw_address(address: SocketAddr) -> libc::sockaddr_storage {
    // SAFETY: zero bytes are a valid value.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    match address {
        SocketAddr::V4(address) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage is large and aligned enough for every address.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(raw) };
        }
        SocketAddr::V6(address) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: address.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            };
            // SAFETY: as above.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(raw) };
        }
    }
    storage
}

/// The IP address of a structure of the kernel; `None` of another family.
fn socket_address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    match c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says what it is.
            let raw = unsafe { (&raw const *storage).cast::<libc::sockaddr_in>().read() };
            let ip = IpAddr::from(raw.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddr::new(ip, u16::from_be(raw.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let raw = unsafe { (&raw const *storage).cast::<libc::sockaddr_in6>().read() };
            let ip = IpAddr::from(raw.sin6_addr.s6_addr);
            Some(SocketAddr::new(ip, u16::from_be(raw.sin6_port)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_the_kernel() {
        for text in ["192.0.2.7:4420", "[2001:db8::1]:4420", "0.0.0.0:0"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(socket_address(&raw_address(address)), Some(address));
        }
        // SAFETY: zero bytes are a valid value.
        assert_eq!(socket_address(&unsafe { std::mem::zeroed() }), None);
    }
}
