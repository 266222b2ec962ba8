//! Kernel sockets: TCP and UNIX streams.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;

use os::{EventClient, EventCompletion, EventLoop, Interest, WatchId};
use rustix::net::{RecvFlags, SendFlags, Shutdown, sockopt};
use slots::{Slab, Slot};

use self::listeners::{Listeners, RETRY_TAG};
use self::owned::{ConnectionTransfers, Transfers, ZeroCopySource};
use crate::descriptors::{self, ReceivedDescriptors, Wait};
use crate::{
    ConnectionId, Listen, ListenerId, Network, NetworkEvent, OwnedTransfers, RejectedSend, SendPart,
    SendStats, SentEvent, SocketStream, StreamAddress, TransferResult,
};

mod listeners;
mod owned;

/// Maximum number of connections on one core: each has a watch, and the rest of the operations of its event
/// loop ([`os::EventLoopConfig`]) is for everything else.
pub const CONNECTIONS_MAX: u32 = 6144;
/// If a core has at most this many connections, those that receive data continuously are busy-polled: they
/// are read on every turn and have no watch, which saves two system calls per round trip.
const BUSY_POLLED_MAX: usize = 4;
/// How long after its last data a connection is busy-polled: five round trips over loopback.
const BUSY_POLL_NS: u64 = 50_000;
/// Polls between two looks at the clock while a busy-polled connection has no data: an idle turn takes 0.5
/// µs, and a twentieth of it is reading the clock.
const POLLS_PER_CLOCK: u32 = 8;

/// Parts of so few bytes together, of one or two PDUs of 4 KiB, are copied together and sent as one: the
/// kernel takes 0.3 µs longer to send a header and 4 KiB as two parts, and the copy a third of that. Sixteen
/// such PDUs are sent faster as they are.
const JOINED_BYTES_MAX: usize = 9 << 10;

/// The `poll(2)` events that mean that the peer closed the stream: POLLRDHUP, POLLHUP and POLLERR.
const PEER_CLOSED: i32 = 0x2000 | 0x10 | 0x8;

/// Set in the watch tags of listeners, clear in those of connections.
const LISTENER_BIT: u64 = 1 << 63;

/// Permission bits of the file of a UNIX socket, unless they are given.
const UNIX_MODE: u32 = 0o600;

/// The TCP and UNIX sockets of one core, with readiness from its event loop.
///
/// Each connection has an edge-triggered watch, except that a few busy connections can be
/// [busy-polled](Self::with_busy_poll). It owns no buffers: reads and writes use the caller's.
pub struct Sockets {
    client: EventClient,
    done: Vec<EventCompletion>,
    connections: Slab<SocketConnection>,
    listeners: Listeners,
    /// Connections that the next poll reports regardless of kernel events.
    ready_next: Vec<ConnectionId>,
    /// Whether connections may be busy-polled, and how many are.
    busy_poll_allowed: bool,
    busy_polled_count: usize,
    transfers: Option<Box<Transfers>>,
    /// For connections that may send without a copy, although nothing has asked for owned transfers.
    zero_copy: Option<ZeroCopySource>,
    /// Parts that are sent as one.
    joined: Vec<u8>,
}

struct SocketConnection {
    /// Shared with the kernel's operations on it.
    socket: Rc<OwnedFd>,
    /// Reports readiness; `None` while the connection is busy-polled.
    watch: Option<WatchId>,
    busy_polled: bool,
    /// Already among the events of the current poll.
    reported: bool,
    /// When data arrived last; while it is busy-polled, when it was first found to have none, a few polls
    /// later.
    last_data_ns: u64,
    /// Polls since the last data while the connection is busy-polled.
    empty_polls: u32,
    /// The peer closed its end. The kernel reports this once, and a short read does not see it, so each read
    /// is followed by another event.
    peer_closed: bool,
    is_unix: bool,
    /// A listener of this process accepted it.
    is_accepted: bool,
    /// The last send was not complete: the next may send nothing, and is not worth a copy.
    is_full: bool,
    /// Large sends may be zero-copy: [`Network::zero_copy_min_bytes`].
    zero_copy: bool,
    /// The connection has owned transfers; its socket is in blocking mode.
    owned: Option<Box<ConnectionTransfers>>,
}

impl SocketConnection {
    /// Whether a busy-polled connection has had no data for so long that it is watched again.
    #[inline]
    fn is_idle(&mut self) -> bool {
        if !self.empty_polls.is_multiple_of(POLLS_PER_CLOCK) {
            return false;
        }
        let now_ns = os::clock::now_ns();
        if self.empty_polls == POLLS_PER_CLOCK {
            self.last_data_ns = now_ns;
        }
        now_ns.saturating_sub(self.last_data_ns) > BUSY_POLL_NS
    }

    /// Data arrived; returns whether it arrives in a steady stream, so that busy polling pays.
    #[inline]
    fn on_data(&mut self) -> bool {
        if self.busy_polled {
            self.empty_polls = 0;
            return false;
        }
        let now_ns = os::clock::now_ns();
        let steady = now_ns.saturating_sub(self.last_data_ns) < BUSY_POLL_NS;
        self.last_data_ns = now_ns;
        steady
    }
}

impl Sockets {
    /// Creates a network on a core's event loop.
    pub fn new(events: &EventLoop) -> Sockets {
        Sockets {
            client: events.client(),
            done: Vec::with_capacity(256),
            connections: Slab::with_capacity(CONNECTIONS_MAX),
            listeners: Listeners::new(),
            ready_next: Vec::new(),
            busy_poll_allowed: false,
            busy_polled_count: 0,
            transfers: None,
            zero_copy: None,
            joined: Vec::new(),
        }
    }

    /// Enables busy polling, for a core that polls continuously while there is work: a few busy connections
    /// are then read on every turn without readiness events.
    #[must_use]
    pub fn with_busy_poll(self, spins: bool) -> Sockets {
        Sockets { busy_poll_allowed: spins, ..self }
    }

    /// Number of connections.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Whether there is no connection.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// Listens on a UNIX socket whose file has the permission bits `mode`. See [`UnixListenSocket::bind`].
    ///
    /// [`UnixListenSocket::bind`]: crate::UnixListenSocket::bind
    pub fn listen_unix(&mut self, path: &Path, mode: u32) -> io::Result<ListenerId> {
        self.listeners.listen_unix(&self.client, path, mode)
    }

    /// Reports connections that are ready regardless of kernel events.
    fn report_again(&mut self, events: &mut Vec<NetworkEvent<SocketStream>>) {
        for id in self.ready_next.drain(..) {
            if let Some(connection) = self.connections.get_mut(id.0)
                && !connection.reported
            {
                connection.reported = true;
                events.push(NetworkEvent::Ready(id));
            }
        }
    }

    /// Translates the event loop's completions.
    fn on_completions(&mut self, events: &mut Vec<NetworkEvent<SocketStream>>) {
        let mut done = std::mem::take(&mut self.done);
        for done in done.drain(..) {
            let slot = Slot::from_bits(done.tag & !LISTENER_BIT);
            if done.tag == RETRY_TAG {
                self.listeners.retry(events);
            } else if done.tag & LISTENER_BIT != 0 {
                self.listeners.accept(ListenerId(slot), events);
            } else if let Some(connection) = self.connections.get_mut(slot) {
                connection.peer_closed |= done.result & PEER_CLOSED != 0;
                if !connection.reported {
                    connection.reported = true;
                    events.push(NetworkEvent::Ready(ConnectionId(slot)));
                }
            }
        }
        self.done = done;
    }

    /// Reports busy-polled connections, and watches those again that became idle.
    fn report_busy_polled(&mut self, events: &mut Vec<NetworkEvent<SocketStream>>) {
        let crowded = self.connections.len() > BUSY_POLLED_MAX;
        for (slot, connection) in self.connections.iter_mut().filter(|(_, connection)| connection.busy_polled)
        {
            connection.empty_polls = connection.empty_polls.saturating_add(1);
            if crowded || connection.is_idle() {
                // A new watch reports data that has already arrived.
                let watch = self.client.watch(connection.socket.as_fd(), Interest::BOTH, slot.to_bits());
                if let Ok(watch) = watch {
                    connection.watch = Some(watch);
                    connection.busy_polled = false;
                    self.busy_polled_count -= 1;
                }
            }
            if !connection.reported {
                connection.reported = true;
                events.push(NetworkEvent::Ready(ConnectionId(slot)));
            }
        }
    }
}

impl Listen for Sockets {
    fn listen(&mut self, address: &StreamAddress) -> io::Result<ListenerId> {
        match address {
            StreamAddress::Tcp(address) => self.listeners.listen_tcp(&self.client, *address),
            StreamAddress::Unix(path) => self.listen_unix(path, UNIX_MODE),
            StreamAddress::Other(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn close_listener(&mut self, listener: ListenerId) {
        self.listeners.close(&self.client, listener);
    }

    fn local_address(&self, listener: ListenerId) -> Option<StreamAddress> {
        self.listeners.local_address(listener)
    }
}

impl Network for Sockets {
    type Stream = SocketStream;

    fn local_address_of(stream: &SocketStream) -> Option<StreamAddress> {
        stream.local_address()
    }

    fn peer_credentials_of(stream: &SocketStream) -> Option<os::PeerCredentials> {
        stream.peer_credentials().ok()
    }

    fn add(&mut self, stream: SocketStream) -> io::Result<ConnectionId> {
        rustix::io::ioctl_fionbio(&stream.socket, true)?;
        if !stream.is_unix {
            sockopt::set_tcp_nodelay(&stream.socket, true)?;
        }
        let zero_copy = !stream.is_unix && self.allows_zero_copy(stream.is_accepted);
        let entry = SocketConnection {
            socket: Rc::new(stream.socket),
            watch: None,
            busy_polled: false,
            reported: false,
            last_data_ns: 0,
            empty_polls: 0,
            peer_closed: false,
            is_unix: stream.is_unix,
            is_accepted: stream.is_accepted,
            is_full: false,
            zero_copy,
            owned: None,
        };
        let slot = self.connections.insert(entry).map_err(|_| quota_exceeded())?;
        let Some(connection) = self.connections.get_mut(slot) else { return Err(quota_exceeded()) };
        match self.client.watch(connection.socket.as_fd(), Interest::BOTH, slot.to_bits()) {
            Ok(watch) => connection.watch = Some(watch),
            Err(error) => {
                self.connections.remove(slot);
                return Err(error);
            }
        }
        self.ready_next.push(ConnectionId(slot));
        Ok(ConnectionId(slot))
    }

    fn poll(&mut self, events: &mut Vec<NetworkEvent<SocketStream>>) -> usize {
        let before = events.len();
        if self.listeners.is_pending() {
            self.listeners.accept_unfinished(events);
        }
        if !self.ready_next.is_empty() {
            self.report_again(events);
        }
        if self.client.reap(&mut self.done) > 0 {
            self.on_completions(events);
        }
        let announced = events.len() - before;
        if self.busy_polled_count > 0 {
            self.report_busy_polled(events);
        }
        for event in &events[before..] {
            if let NetworkEvent::Ready(id) = event
                && let Some(connection) = self.connections.get_mut(id.0)
            {
                connection.reported = false;
            }
        }
        if self.transfers.is_some() { announced + self.serve_transfers(events, before) } else { announced }
    }

    #[inline]
    fn receive(&mut self, id: ConnectionId, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        let connection_count = self.connections.len();
        let Some(connection) = self.connections.get_mut(id.0) else {
            return TransferResult::Failed(io::ErrorKind::NotConnected);
        };
        loop {
            // A plain recv is slightly cheaper than a vectored read.
            let result = match &mut *parts {
                [part] => {
                    rustix::net::recv(&*connection.socket, &mut **part, RecvFlags::DONTWAIT).map(|(_, n)| n)
                }
                parts if connection.owned.is_none() => rustix::io::readv(&*connection.socket, parts),
                // In blocking mode.
                parts => rustix::net::recvmsg(
                    &*connection.socket,
                    parts,
                    &mut Default::default(),
                    RecvFlags::DONTWAIT,
                )
                .map(|received| received.bytes),
            };
            return match result {
                Ok(0) => TransferResult::Closed,
                Ok(count) => {
                    if self.busy_poll_allowed
                        && connection.on_data()
                        && !connection.peer_closed
                        && connection_count <= BUSY_POLLED_MAX
                        && let Some(watch) = connection.watch.take()
                    {
                        self.client.unwatch(watch);
                        connection.busy_polled = true;
                        connection.empty_polls = 0;
                        self.busy_polled_count += 1;
                    }
                    if connection.peer_closed {
                        self.ready_next.push(id);
                    }
                    TransferResult::Bytes(count)
                }
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::WOULDBLOCK) => TransferResult::Blocked,
                Err(error) => TransferResult::Failed(io::Error::from(error).kind()),
            };
        }
    }

    #[inline]
    fn send(&mut self, connection: ConnectionId, parts: &[IoSlice<'_>]) -> TransferResult {
        let Some(connection) = self.connections.get_mut(connection.0) else {
            return TransferResult::Failed(io::ErrorKind::NotConnected);
        };
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let is_joined = !connection.is_full && join(parts, &mut self.joined);
        loop {
            let result = match parts {
                _ if is_joined => rustix::net::send(&*connection.socket, &self.joined, flags),
                [part] => rustix::net::send(&*connection.socket, part, flags),
                parts => rustix::net::sendmsg(&*connection.socket, parts, &mut Default::default(), flags),
            };
            return match result {
                Ok(count) => {
                    connection.is_full = is_joined && count < self.joined.len();
                    TransferResult::Bytes(count)
                }
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    connection.is_full = true;
                    TransferResult::Blocked
                }
                Err(error) => TransferResult::Failed(io::Error::from(error).kind()),
            };
        }
    }

    /// Only operations on the socket share it with the kernel's side of this core.
    fn remove(&mut self, id: ConnectionId) -> Option<SocketStream> {
        let connection = self.connections.get(id.0)?;
        let is_idle = connection.owned.as_ref().is_none_or(|owned| owned.is_idle());
        if !is_idle || Rc::strong_count(&connection.socket) > 1 {
            return None;
        }
        if let Some(watch) = connection.watch {
            self.client.unwatch(watch);
        }
        let connection = self.connections.remove(id.0)?;
        self.busy_polled_count -= usize::from(connection.busy_polled);
        let SocketConnection { is_unix, is_accepted, socket, .. } = connection;
        Some(SocketStream { socket: Rc::into_inner(socket)?, is_unix, is_accepted })
    }

    fn close(&mut self, id: ConnectionId) {
        if let Some(watch) = self.connections.get(id.0).and_then(|connection| connection.watch) {
            self.client.unwatch(watch);
        }
        if let Some(connection) = self.connections.remove(id.0) {
            self.busy_polled_count -= usize::from(connection.busy_polled);
            if connection.owned.as_ref().is_some_and(|owned| owned.has_kernel_sends()) {
                // A peer that does not read would otherwise keep the memory of these sends for as long as it
                // likes.
                let _ = rustix::net::connect_unspec(&*connection.socket);
            }
            // Closes the stream for the peer even while the kernel still references the file for the watch.
            let _ = rustix::net::shutdown(&*connection.socket, Shutdown::Both);
            if let (Some(owned), Some(transfers)) = (connection.owned, &mut self.transfers) {
                transfers.on_close(id, *owned);
            }
        }
    }

    #[inline]
    fn zero_copy_min_bytes(&self, connection: ConnectionId) -> Option<usize> {
        let transfers = self.transfers.as_ref()?;
        transfers.zero_copy_min_bytes(self.connections.get(connection.0)?)
    }

    fn send_owned(
        &mut self,
        connection: ConnectionId,
        parts: Vec<SendPart>,
        tag: u64,
    ) -> Result<(), RejectedSend> {
        self.submit_send(connection, parts, tag)
    }

    #[inline]
    fn reap_sent(&mut self, out: &mut Vec<SentEvent>) -> bool {
        let Some(transfers) = &mut self.transfers else { return false };
        transfers.reap_sent(out);
        true
    }

    /// All zero without [`with_owned_transfers`](Sockets::with_owned_transfers) or
    /// [`with_zero_copy`](Sockets::with_zero_copy).
    fn send_stats(&self) -> SendStats {
        self.transfers.as_ref().map(|transfers| transfers.stats).unwrap_or_default()
    }

    fn is_pending(&self) -> bool {
        self.busy_polled_count > 0
            || !self.ready_next.is_empty()
            || self.listeners.is_pending()
            || self.transfers.as_ref().is_some_and(|transfers| transfers.is_pending())
    }

    fn receive_with_descriptors(
        &mut self,
        connection: ConnectionId,
        parts: &mut [IoSliceMut<'_>],
        descriptors: &mut ReceivedDescriptors,
    ) -> TransferResult {
        let Some(entry) = self.connections.get(connection.0) else {
            return TransferResult::Failed(io::ErrorKind::NotConnected);
        };
        let result = TransferResult::of(|| {
            descriptors::receive_with_descriptors(&*entry.socket, parts, descriptors, Wait::No)
        });
        match result {
            TransferResult::Bytes(0) => TransferResult::Closed,
            TransferResult::Bytes(_) if entry.peer_closed => {
                self.ready_next.push(connection);
                result
            }
            result => result,
        }
    }

    fn send_with_descriptors(
        &mut self,
        connection: ConnectionId,
        parts: &[IoSlice<'_>],
        descriptors: &[BorrowedFd<'_>],
    ) -> TransferResult {
        let Some(connection) = self.connections.get(connection.0) else {
            return TransferResult::Failed(io::ErrorKind::NotConnected);
        };
        // TCP ignores them.
        if !connection.is_unix && !descriptors.is_empty() {
            return TransferResult::Failed(io::ErrorKind::Unsupported);
        }
        TransferResult::of(|| {
            descriptors::send_with_descriptors(&*connection.socket, parts, descriptors, Wait::No)
        })
    }
}

/// Copies parts together if that is faster than to send them as they are; returns whether it has.
#[inline]
pub(crate) fn join(parts: &[IoSlice<'_>], joined: &mut Vec<u8>) -> bool {
    if parts.len() < 2 {
        return false;
    }
    let mut bytes = 0;
    for part in parts {
        bytes += part.len();
        if bytes > JOINED_BYTES_MAX {
            return false;
        }
    }
    joined.clear();
    parts.iter().for_each(|part| joined.extend_from_slice(part));
    true
}

fn quota_exceeded() -> io::Error {
    io::ErrorKind::QuotaExceeded.into()
}
