//! The kernel's TCP.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;

use rustix::net::{RecvFlags, SendFlags, sockopt};
use slots::Slab;
use sys::{Client, Done, Events, Interest, Watch};

use crate::{ConnectionId, Event, ListenerId, Network, Transfer};

/// Most connections on one core.
const CONNECTIONS_MAX: u32 = 2048;
/// Most listeners on one core.
const LISTENERS_MAX: u32 = 64;
/// Connections accepted from one listener in one poll, so that a flood does not starve the others.
const ACCEPTS_PER_POLL_MAX: usize = 64;
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 512;
/// Up to so many connections on a core, those on which data keeps coming are hot: they are read every
/// turn and not watched, which saves two system calls in each round trip.
const HOT_CONNECTIONS_MAX: usize = 4;
/// How long after its last data a connection stays hot: five round trips over loopback.
const HOT_NS: u64 = 50_000;

/// What a watch reports when the peer has closed its end, in `poll(2)`'s bits: RDHUP, HUP and ERR.
const ENDED: i32 = 0x2000 | 0x10 | 0x8;

/// Set in a watch's tag for listeners; clear for connections.
const LISTENER_BIT: u64 = 1 << 63;

/// Sockets of one core, told of readiness by its ring.
pub struct Sockets {
    client: Client,
    done: Vec<Done>,
    connections: Slab<Connection>,
    listeners: Slab<Listener>,
    /// Connections to report at the next poll whatever the kernel says.
    fresh: Vec<ConnectionId>,
    /// Listeners that were left with connections waiting.
    unfinished: Vec<ListenerId>,
    /// Whether connections may be hot, and how many are.
    may_heat: bool,
    hot_count: usize,
}

struct Connection {
    stream: TcpStream,
    /// What tells of readiness; none while the connection is hot.
    watch: Option<Watch>,
    hot: bool,
    /// Already in the list that the current poll builds.
    reported: bool,
    last_data_ns: u64,
    /// The peer has closed its end. No further event tells so, and a read that brought less than
    /// asked for has not seen it: each such read is followed by another report.
    ended: bool,
}

struct Listener {
    socket: TcpListener,
    watch: Option<Watch>,
}

impl Sockets {
    /// A network on a core's ring.
    pub fn new(events: &Events) -> Sockets {
        Sockets {
            client: events.client(),
            done: Vec::with_capacity(256),
            connections: Slab::with_capacity(CONNECTIONS_MAX),
            listeners: Slab::with_capacity(LISTENERS_MAX),
            fresh: Vec::new(),
            unfinished: Vec::new(),
            may_heat: false,
            hot_count: 0,
        }
    }

    /// The same for a core that spins while there is work: a few busy connections are then read every
    /// turn, ready or not.
    #[must_use]
    pub fn spinning(self, spins: bool) -> Sockets {
        Sockets { may_heat: spins, ..self }
    }

    /// Connections held.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Whether there is no connection.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    fn accept(&mut self, id: ListenerId, events: &mut Vec<Event<TcpStream>>) {
        let Some(listener) = self.listeners.get(id.0) else { return };
        for _ in 0..ACCEPTS_PER_POLL_MAX {
            match listener.socket.accept() {
                Ok((stream, peer)) => events.push(Event::Incoming { listener: id, stream, peer }),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The peer gave up before it was accepted, or descriptors ran out: the others are
                // looked at with the next connection.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(_) => return,
            }
        }
        self.unfinished.push(id);
    }

    /// Reports hot connections, and watches again those on which nothing came for a while.
    fn read_hot(&mut self, events: &mut Vec<Event<TcpStream>>) {
        if self.hot_count == 0 {
            return;
        }
        let crowded = self.connections.len() > HOT_CONNECTIONS_MAX;
        let now_ns = sys::clock::now_ns();
        for (slot, connection) in self.connections.iter_mut().filter(|(_, connection)| connection.hot) {
            if crowded || now_ns.saturating_sub(connection.last_data_ns) > HOT_NS {
                // Watching tells at once if something came meanwhile.
                let watch = self.client.watch(connection.stream.as_fd(), Interest::BOTH, slot.to_bits());
                if let Ok(watch) = watch {
                    connection.watch = Some(watch);
                    connection.hot = false;
                    self.hot_count -= 1;
                }
            }
            if !connection.reported {
                connection.reported = true;
                events.push(Event::Ready(ConnectionId(slot)));
            }
        }
    }
}

impl Network for Sockets {
    type Stream = TcpStream;

    fn listen(&mut self, address: SocketAddr) -> io::Result<ListenerId> {
        let socket = bind(address)?;
        let slot = self.listeners.insert(Listener { socket, watch: None }).map_err(|_| quota())?;
        let tag = LISTENER_BIT | slot.to_bits();
        let Some(listener) = self.listeners.get_mut(slot) else { return Err(quota()) };
        match self.client.watch(listener.socket.as_fd(), Interest::READABLE, tag) {
            Ok(watch) => listener.watch = Some(watch),
            Err(error) => {
                self.listeners.remove(slot);
                return Err(error);
            }
        }
        Ok(ListenerId(slot))
    }

    fn unlisten(&mut self, listener: ListenerId) {
        if let Some(watch) = self.listeners.get(listener.0).and_then(|listener| listener.watch) {
            self.client.unwatch(watch);
        }
        self.listeners.remove(listener.0);
    }

    fn local_address(&self, listener: ListenerId) -> Option<SocketAddr> {
        self.listeners.get(listener.0)?.socket.local_addr().ok()
    }

    fn local_address_of(stream: &TcpStream) -> Option<SocketAddr> {
        stream.local_addr().ok()
    }

    fn add(&mut self, stream: TcpStream) -> io::Result<ConnectionId> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let entry =
            Connection { stream, watch: None, hot: false, reported: false, last_data_ns: 0, ended: false };
        let slot = self.connections.insert(entry).map_err(|_| quota())?;
        let Some(connection) = self.connections.get_mut(slot) else { return Err(quota()) };
        match self.client.watch(connection.stream.as_fd(), Interest::BOTH, slot.to_bits()) {
            Ok(watch) => connection.watch = Some(watch),
            Err(error) => {
                self.connections.remove(slot);
                return Err(error);
            }
        }
        self.fresh.push(ConnectionId(slot));
        Ok(ConnectionId(slot))
    }

    fn poll(&mut self, events: &mut Vec<Event<TcpStream>>) -> usize {
        let before = events.len();
        for id in std::mem::take(&mut self.unfinished) {
            self.accept(id, events);
        }
        for id in self.fresh.drain(..) {
            if let Some(connection) = self.connections.get_mut(id.0)
                && !connection.reported
            {
                connection.reported = true;
                events.push(Event::Ready(id));
            }
        }
        let mut done = std::mem::take(&mut self.done);
        self.client.reap(&mut done);
        for done in done.drain(..) {
            let slot = slots::Slot::from_bits(done.tag & !LISTENER_BIT);
            if done.tag & LISTENER_BIT != 0 {
                self.accept(ListenerId(slot), events);
            } else if let Some(connection) = self.connections.get_mut(slot) {
                connection.ended |= done.result & ENDED != 0;
                if !connection.reported {
                    connection.reported = true;
                    events.push(Event::Ready(ConnectionId(slot)));
                }
            }
        }
        self.done = done;
        let announced = events.len() - before;
        self.read_hot(events);
        for event in &events[before..] {
            if let Event::Ready(id) = event
                && let Some(connection) = self.connections.get_mut(id.0)
            {
                connection.reported = false;
            }
        }
        announced
    }

    #[inline]
    fn receive(&mut self, id: ConnectionId, parts: &mut [IoSliceMut<'_>]) -> Transfer {
        let population = self.connections.len();
        let Some(connection) = self.connections.get_mut(id.0) else {
            return Transfer::Failed(io::ErrorKind::NotConnected);
        };
        loop {
            // One part is a plain recv, which is a little cheaper than a vectored read.
            let result = match &mut *parts {
                [part] => {
                    rustix::net::recv(&connection.stream, &mut **part, RecvFlags::DONTWAIT).map(|(_, n)| n)
                }
                parts => rustix::io::readv(&connection.stream, parts),
            };
            return match result {
                Ok(0) => Transfer::Closed,
                Ok(count) => {
                    if self.may_heat {
                        let now_ns = sys::clock::now_ns();
                        let steady = now_ns.saturating_sub(connection.last_data_ns) < HOT_NS;
                        connection.last_data_ns = now_ns;
                        if steady
                            && !connection.ended
                            && population <= HOT_CONNECTIONS_MAX
                            && let Some(watch) = connection.watch.take()
                        {
                            self.client.unwatch(watch);
                            connection.hot = true;
                            self.hot_count += 1;
                        }
                    }
                    if connection.ended {
                        self.fresh.push(id);
                    }
                    Transfer::Bytes(count)
                }
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::WOULDBLOCK) => Transfer::Blocked,
                Err(error) => Transfer::Failed(io::Error::from(error).kind()),
            };
        }
    }

    #[inline]
    fn send(&mut self, connection: ConnectionId, parts: &[IoSlice<'_>]) -> Transfer {
        let Some(connection) = self.connections.get(connection.0) else {
            return Transfer::Failed(io::ErrorKind::NotConnected);
        };
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        loop {
            let result = match parts {
                [part] => rustix::net::send(&connection.stream, part, flags),
                parts => rustix::net::sendmsg(&connection.stream, parts, &mut Default::default(), flags),
            };
            return match result {
                Ok(count) => Transfer::Bytes(count),
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::WOULDBLOCK) => Transfer::Blocked,
                Err(error) => Transfer::Failed(io::Error::from(error).kind()),
            };
        }
    }

    fn close(&mut self, connection: ConnectionId) {
        if let Some(watch) = self.connections.get(connection.0).and_then(|connection| connection.watch) {
            self.client.unwatch(watch);
        }
        if let Some(connection) = self.connections.remove(connection.0) {
            self.hot_count -= usize::from(connection.hot);
            // Says so to the peer even while the kernel still holds the stream for the watch.
            let _ = connection.stream.shutdown(std::net::Shutdown::Both);
        }
    }

    fn is_pending(&self) -> bool {
        self.hot_count > 0 || !self.fresh.is_empty() || !self.unfinished.is_empty()
    }
}

fn quota() -> io::Error {
    io::ErrorKind::QuotaExceeded.into()
}

/// A listening socket that other processes' dead connections do not keep from binding.
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(TcpListener::from(socket))
}

/// Begins to connect to a peer. The stream blocks until that is done, and fails if it fails.
pub fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(TcpStream::from(socket)),
        Err(error) => Err(error.into()),
    }
}
