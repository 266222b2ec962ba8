//! Stream sockets for a polled core.
//!
//! [`Network`] is what protocols see: readiness in batches, then vectored reads and writes that
//! never block. [`Sockets`] is the kernel's TCP behind it, told of readiness by the core's ring
//! (io_uring, or epoll where that is not allowed). [`Simulation`] is a pair of networks in memory
//! that cuts, delays and breaks streams as its seed says, for tests.
//!
//! Reading goes straight to where the bytes belong: the caller names the rest of a payload's buffer
//! first and a scratch area after it, and one call fills both. Idle connections hold no buffers.
//!
//! ```
//! use net::{Network, Sockets};
//! let events = sys::Events::new(&sys::Config::default())?;
//! let mut sockets = Sockets::new(&events);
//! let listener = sockets.listen("127.0.0.1:0".parse().expect("an address"))?;
//! println!("listening on {}", sockets.local_address(listener).expect("it was just made"));
//! # Ok::<(), std::io::Error>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod simulation;
mod sockets;

use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;

pub use simulation::{Faults, Simulation};
pub use sockets::{Sockets, connect};

use slots::Slot;

/// A connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionId(pub Slot);

/// A listening socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerId(pub Slot);

/// What happened on a network.
#[derive(Debug)]
pub enum Event<S> {
    /// A peer connected. The stream belongs to no network yet; [`Network::add`] it to one.
    Incoming {
        /// Where it came in.
        listener: ListenerId,
        /// The connection.
        stream: S,
        /// Who it is.
        peer: SocketAddr,
    },
    /// A connection can be read or written again, or has ended, which reading tells.
    Ready(ConnectionId),
}

/// How a read or a write went.
#[derive(Debug)]
pub enum Transfer {
    /// So many bytes, at least one.
    Bytes(usize),
    /// None now; [`Event::Ready`] follows.
    Blocked,
    /// The peer has closed its end; only reads say this.
    Closed,
    /// The connection is broken.
    Failed(io::ErrorKind),
}

/// One core's stream connections. Nothing here blocks.
pub trait Network {
    /// A connection that belongs to no network, to be handed between cores.
    type Stream: Send;

    /// Starts listening. Port 0 takes any free one; see [`local_address`](Self::local_address).
    fn listen(&mut self, address: SocketAddr) -> io::Result<ListenerId>;

    /// Stops listening; connections stay.
    fn unlisten(&mut self, listener: ListenerId);

    /// The address that a listener has.
    fn local_address(&self, listener: ListenerId) -> Option<SocketAddr>;

    /// The near address of a connection that belongs to no network, where it is known.
    fn local_address_of(stream: &Self::Stream) -> Option<SocketAddr>;

    /// Takes a connection over. It is reported ready at the next poll.
    fn add(&mut self, stream: Self::Stream) -> io::Result<ConnectionId>;

    /// Appends what happened since the last call; returns how much that was.
    fn poll(&mut self, events: &mut Vec<Event<Self::Stream>>) -> usize;

    /// Reads into `parts`, in order. Call it again until it says [`Transfer::Blocked`] or fewer
    /// bytes than asked for; after either, an [`Event::Ready`] announces more.
    fn receive(&mut self, connection: ConnectionId, parts: &mut [IoSliceMut<'_>]) -> Transfer;

    /// Writes from `parts`, in order.
    fn send(&mut self, connection: ConnectionId, parts: &[IoSlice<'_>]) -> Transfer;

    /// Closes a connection; what was sent still leaves.
    fn close(&mut self, connection: ConnectionId);

    /// Whether [`poll`](Self::poll) has something to report that no event of the core announces.
    fn is_pending(&self) -> bool;
}

#[cfg(test)]
mod tests;
