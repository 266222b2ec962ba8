//! Non-blocking stream sockets for a polled core.
//!
//! [`Network`] is the interface for protocols: batches of readiness events, then vectored reads and writes
//! that never block; [`Listen`] is that of servers. [`Sockets`] implements both with kernel TCP and UNIX
//! sockets and gets readiness from the core's event loop (io_uring, or epoll where io_uring is not allowed).
//! [`SimulatedNetwork`] is a pair of in-memory networks for tests that shortens, delays and breaks streams,
//! reproducibly by seed.
//!
//! A protocol reads and writes a [`ByteStream`]; [`PlainStream`] is a connection as it is, and a
//! [`StreamLayer`], as TLS, one with a handshake before. UNIX sockets and their simulation carry file
//! descriptors with the bytes. With [`OwnedTransfers`], which not every network has, the network owns memory
//! until the kernel no longer uses it (zero-copy sends, receives into buffers that the kernel selects).
//!
//! Reads are zero-copy into the payload: the caller passes the rest of the payload's buffer first and a
//! scratch area after it, and one call fills both. Idle connections use no buffers.
//!
//! ```
//! use sockets::{Listen, Sockets};
//! let event_loop = os::EventLoop::new(&os::EventLoopConfig::default())?;
//! let mut sockets = Sockets::new(&event_loop);
//! let listener = sockets.listen(&"127.0.0.1:0".parse().expect("an address"))?;
//! println!("listening on {}", sockets.local_address(listener).expect("the listener exists"));
//! # Ok::<(), std::io::Error>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod address;
mod byte_stream;
mod core_network;
mod descriptors;
mod layer;
mod listen;
mod queue_pair;
mod simulation;
mod sockets;
mod stream;
mod transfers;
mod unix_listener;
mod zero_copy;

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;

pub use address::{OtherAddress, StreamAddress, parse_ip};
pub use byte_stream::{ByteStream, FlushStatus, PlainStream};
pub use core_network::{CoreNetwork, ServerNetwork};
pub use descriptors::{
    DESCRIPTORS_PER_MESSAGE_MAX, MessageQueue, ReceivedDescriptors, RejectedMessage, Wait,
    receive_with_descriptors, send_with_descriptors,
};
pub use layer::{HandshakeStatus, NoLayer, StreamLayer};
pub use listen::Listen;
pub use os::{PeerCredentials, RejectedSend, SendPart, SocketCapabilities};
pub use queue_pair::{
    PeerMemory, QueuePair, QueuePairEvent, ReceivedMessage, RejectedWork, SENT_MESSAGE_BYTES_MAX, Work,
};
pub use simulation::{NetworkFaults, SimulatedNetwork, SimulatedStream};
pub use sockets::{CONNECTIONS_MAX, Sockets};
pub use stream::{ConnectOptions, SocketStream, connect, connect_with};
pub use transfers::{OwnedTransferConfig, OwnedTransfers, ReceiveEnd, SendStats, SentEvent, TransferEvent};
pub use unix_listener::UnixListenSocket;
pub use zero_copy::{ZERO_COPY_SEND, ZeroCopySwitch};

use slots::Slot;

/// Identifies a connection of a [`Network`]; stale once the connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionId(pub Slot);

/// Identifies a listening socket of a [`Network`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerId(pub Slot);

/// An event of [`Network::poll`]; `S` is [`Network::Stream`].
#[derive(Debug)]
pub enum NetworkEvent<S> {
    /// A connection was accepted. It belongs to no network until [`Network::add`].
    Incoming {
        /// The listener that accepted it.
        listener: ListenerId,
        /// The accepted connection.
        stream: S,
        /// The peer's address.
        peer: StreamAddress,
    },
    /// A connection was not accepted. It was aborted before (`ECONNABORTED` or an error of the network), or
    /// resources are short (`EMFILE`, `ENFILE`, `ENOBUFS`, `ENOMEM`): it then stays in the accept queue, and
    /// accept is retried ten times a second, each time with this event, until it succeeds.
    AcceptFailed {
        /// The listener.
        listener: ListenerId,
        /// The error of accept.
        error: io::Error,
    },
    /// A connection is readable or writable again, or was closed, which the next read reports.
    Ready(ConnectionId),
}

/// The result of a read or a write.
#[derive(Debug)]
pub enum TransferResult {
    /// The number of bytes transferred, at least one.
    Bytes(usize),
    /// Nothing can be transferred now; [`NetworkEvent::Ready`] follows.
    Blocked,
    /// The peer closed its end of the stream; returned only by reads.
    Closed,
    /// The connection failed.
    Failed(io::ErrorKind),
}

impl TransferResult {
    /// The result of a call that reads or writes, which is repeated while a signal interrupts it. The end of
    /// a stream is `Bytes(0)`.
    #[inline]
    pub fn of(mut call: impl FnMut() -> io::Result<usize>) -> TransferResult {
        loop {
            return match call() {
                Ok(count) => TransferResult::Bytes(count),
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::WouldBlock => TransferResult::Blocked,
                    kind => TransferResult::Failed(kind),
                },
            };
        }
    }
}

/// The stream connections of one core. No method blocks. [`Listen`] adds those that peers open.
///
/// The caller repeats [`poll`](Self::poll) and serves the connections that it reports. A `Network` owns its
/// connections; [`close`](Self::close) releases one.
pub trait Network {
    /// A connection that belongs to no network, for transfer between cores.
    type Stream: Send;

    /// The local address of a connection that belongs to no network, if known.
    fn local_address_of(stream: &Self::Stream) -> Option<StreamAddress>;

    /// The process at the other end of a UNIX socket that belongs to no network; `None` for other
    /// connections, or if the network does not know it.
    fn peer_credentials_of(stream: &Self::Stream) -> Option<os::PeerCredentials> {
        let _ = stream;
        None
    }

    /// Adds a connection to this network. The next poll reports it ready.
    fn add(&mut self, stream: Self::Stream) -> io::Result<ConnectionId>;

    /// Appends the events since the last call; returns their number, which need not include
    /// busy-polled connections.
    fn poll(&mut self, events: &mut Vec<NetworkEvent<Self::Stream>>) -> usize;

    /// Reads into `parts`, in order. Repeat until it returns [`TransferResult::Blocked`] or fewer bytes than
    /// requested; after that, a [`NetworkEvent::Ready`] reports more data.
    fn receive(&mut self, connection: ConnectionId, parts: &mut [IoSliceMut<'_>]) -> TransferResult;

    /// Writes from `parts`, in order.
    fn send(&mut self, connection: ConnectionId, parts: &[IoSlice<'_>]) -> TransferResult;

    /// As [`receive`](Self::receive), and adds the file descriptors that come with the bytes to
    /// `descriptors`. They arrive with the byte that they were sent with, and a read never includes bytes
    /// behind the next one that has some; `receive` closes them. It returns `Failed(QuotaExceeded)` if they
    /// exceed the limit of `descriptors`, or if this process may open no more; all descriptors of the read
    /// are closed then, and the connection should be.
    ///
    /// Only UNIX sockets and their simulation carry descriptors. On other connections it is `receive`.
    #[inline]
    fn receive_with_descriptors(
        &mut self,
        connection: ConnectionId,
        parts: &mut [IoSliceMut<'_>],
        descriptors: &mut ReceivedDescriptors,
    ) -> TransferResult {
        let _ = descriptors;
        self.receive(connection, parts)
    }

    /// As [`send`](Self::send), and passes duplicates of `descriptors`, at most
    /// [`DESCRIPTORS_PER_MESSAGE_MAX`], with the first byte: with [`TransferResult::Bytes`] all of them,
    /// otherwise none. [`MessageQueue`] keeps track of this. It returns `Failed(Unsupported)` for descriptors
    /// on a connection that cannot carry them.
    #[inline]
    fn send_with_descriptors(
        &mut self,
        connection: ConnectionId,
        parts: &[IoSlice<'_>],
        descriptors: &[BorrowedFd<'_>],
    ) -> TransferResult {
        match descriptors {
            [] => self.send(connection, parts),
            _ => TransferResult::Failed(io::ErrorKind::Unsupported),
        }
    }

    /// See [`ByteStream::zero_copy_min_bytes`].
    #[inline]
    fn zero_copy_min_bytes(&self, connection: ConnectionId) -> Option<usize> {
        let _ = connection;
        None
    }

    /// See [`ByteStream::send_owned`]. [`reap_sent`](Self::reap_sent) reports its end.
    fn send_owned(
        &mut self,
        connection: ConnectionId,
        parts: Vec<SendPart>,
        tag: u64,
    ) -> Result<(), RejectedSend> {
        let _ = (connection, tag);
        Err(RejectedSend { reason: io::ErrorKind::Unsupported, parts })
    }

    /// Appends the ends of owned sends since the last call. Call it after [`poll`](Self::poll). Returns false
    /// while no connection may have any: then nothing is done.
    #[inline]
    fn reap_sent(&mut self, out: &mut Vec<SentEvent>) -> bool {
        let _ = out;
        false
    }

    /// See [`ByteStream::queue_pair`].
    #[inline]
    fn queue_pair(&mut self, connection: ConnectionId) -> Option<&mut dyn QueuePair> {
        let _ = connection;
        None
    }

    /// How the owned sends so far were sent.
    fn send_stats(&self) -> SendStats {
        SendStats::default()
    }

    /// The byte stream of a connection.
    #[inline]
    fn stream(&mut self, connection: ConnectionId) -> PlainStream<'_, Self>
    where
        Self: Sized,
    {
        PlainStream { network: self, connection }
    }

    /// Takes a connection out of this network, for [`add`](Self::add) of another core's. Bytes that have
    /// arrived and were not read move with it. `None` if it stays: this network cannot, or the kernel uses
    /// memory of its owned transfers.
    fn remove(&mut self, connection: ConnectionId) -> Option<Self::Stream> {
        let _ = connection;
        None
    }

    /// Closes a connection; data that was sent is still delivered, unless the kernel still uses memory of
    /// owned sends: then the connection is reset.
    fn close(&mut self, connection: ConnectionId);

    /// Whether [`poll`](Self::poll) has events that the core's event loop will not report.
    fn is_pending(&self) -> bool;
}

#[cfg(test)]
mod tests;
