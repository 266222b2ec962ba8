//! In-memory streams with injected faults, reproducible by seed.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};

use random::WyRand;
use slots::{Slab, Slot};

use crate::{
    ConnectionId, Listen, ListenerId, Network, NetworkEvent, ReceivedDescriptors, StreamAddress,
    TransferResult,
};

/// Faults of simulated streams, each as a rate in calls per mille.
#[derive(Clone, Copy, Debug, Default)]
pub struct NetworkFaults {
    /// A read or write transfers only a part of the bytes that it could.
    pub cut_per_mille: u32,
    /// A read or write that could transfer bytes returns [`TransferResult::Blocked`].
    pub stall_per_mille: u32,
    /// A connection is reset.
    pub break_per_mille: u32,
}

/// One side of a simulated network; a [`pair`](Self::pair) can connect to each other's listeners.
pub struct SimulatedNetwork {
    pending: Rc<RefCell<Vec<PendingConnection>>>,
    listeners: Slab<StreamAddress>,
    connections: Slab<SimulatedStream>,
    random: WyRand,
    faults: NetworkFaults,
}

/// One end of a simulated connection.
pub struct SimulatedStream {
    incoming: Arc<Mutex<Pipe>>,
    outgoing: Arc<Mutex<Pipe>>,
    /// The process at the other end.
    credentials: Option<os::PeerCredentials>,
}

#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    /// Descriptors by the position in the stream of the byte that carries them.
    attached: VecDeque<(u64, Vec<OwnedFd>)>,
    /// Position in the stream of the first byte of `bytes`.
    position: u64,
    closed: bool,
    broken: bool,
}

struct PendingConnection {
    to: StreamAddress,
    peer: StreamAddress,
    stream: SimulatedStream,
}

/// Capacity of a pipe in bytes; a writer blocks when it is full.
const PIPE_BYTES_MAX: usize = 256 << 10;

impl SimulatedNetwork {
    /// Creates two connected networks. The same seed gives the same faults.
    pub fn pair(seed: u64, faults: NetworkFaults) -> (SimulatedNetwork, SimulatedNetwork) {
        let pending = Rc::new(RefCell::new(Vec::new()));
        let make = |seed| SimulatedNetwork {
            pending: pending.clone(),
            listeners: Slab::with_capacity(16),
            connections: Slab::with_capacity(256),
            random: WyRand::new(seed),
            faults,
        };
        let mut seeds = WyRand::new(seed);
        (make(seeds.next_bits()), make(seeds.next_bits()))
    }

    /// Connects to a listener of either network, which sees its own address as the peer's.
    pub fn connect(&mut self, to: impl Into<StreamAddress>) -> SimulatedStream {
        let to = to.into();
        self.connect_from(to.clone(), to, None)
    }

    /// Connects to a listener of either network, which sees `from` as the peer's address, and this process.
    pub fn connect_from(
        &mut self,
        from: StreamAddress,
        to: StreamAddress,
        credentials: Option<os::PeerCredentials>,
    ) -> SimulatedStream {
        let (one, other) = (Arc::new(Mutex::new(Pipe::default())), Arc::new(Mutex::new(Pipe::default())));
        let far = SimulatedStream { incoming: one.clone(), outgoing: other.clone(), credentials };
        self.pending.borrow_mut().push(PendingConnection { to, peer: from, stream: far });
        SimulatedStream { incoming: other, outgoing: one, credentials: None }
    }

    /// How many of `room` bytes a call transfers; `None` for a stall.
    fn transfer_size(&mut self, room: usize) -> Option<usize> {
        if room == 0 || self.random.happens(self.faults.stall_per_mille) {
            return None;
        }
        let cut = self.random.happens(self.faults.cut_per_mille);
        Some(if cut { 1 + self.random.index(room) } else { room })
    }
}

impl SimulatedNetwork {
    /// Reads bytes, and the descriptors that come with them.
    fn transfer_in(
        &mut self,
        connection: ConnectionId,
        parts: &mut [IoSliceMut<'_>],
    ) -> (TransferResult, Vec<OwnedFd>) {
        let without = |result| (result, Vec::new());
        let Some(stream) = self.connections.get(connection.0) else {
            return without(TransferResult::Failed(io::ErrorKind::NotConnected));
        };
        let incoming = stream.incoming.clone();
        let mut pipe = lock(&incoming);
        if pipe.broken {
            return without(TransferResult::Failed(io::ErrorKind::ConnectionReset));
        }
        if pipe.bytes.is_empty() {
            return without(if pipe.closed { TransferResult::Closed } else { TransferResult::Blocked });
        }
        if self.random.happens(self.faults.break_per_mille) {
            pipe.broken = true;
            return without(TransferResult::Failed(io::ErrorKind::ConnectionReset));
        }
        let room: usize = parts.iter().map(|part| part.len()).sum();
        let Some(cut) = self.transfer_size(room.min(pipe.bytes.len())) else {
            return without(TransferResult::Blocked);
        };
        let (moved, descriptors) = pipe.take_descriptors(cut);
        let mut left = moved;
        for part in parts {
            let count = left.min(part.len());
            for (to, from) in part.iter_mut().zip(pipe.bytes.drain(..count)) {
                *to = from;
            }
            left -= count;
        }
        pipe.position += moved as u64;
        (TransferResult::Bytes(moved), descriptors)
    }

    fn transfer_out(
        &mut self,
        connection: ConnectionId,
        parts: &[IoSlice<'_>],
        descriptors: &[BorrowedFd<'_>],
    ) -> TransferResult {
        let Some(stream) = self.connections.get(connection.0) else {
            return TransferResult::Failed(io::ErrorKind::NotConnected);
        };
        let outgoing = stream.outgoing.clone();
        let mut pipe = lock(&outgoing);
        if pipe.broken || pipe.closed {
            return TransferResult::Failed(io::ErrorKind::BrokenPipe);
        }
        let offered: usize = parts.iter().map(|part| part.len()).sum();
        let room = PIPE_BYTES_MAX.saturating_sub(pipe.bytes.len());
        let Some(moved) = self.transfer_size(offered.min(room)) else { return TransferResult::Blocked };
        if !descriptors.is_empty() {
            let duplicates: io::Result<Vec<OwnedFd>> =
                descriptors.iter().map(|descriptor| descriptor.try_clone_to_owned()).collect();
            match duplicates {
                Ok(duplicates) => {
                    let position = pipe.position + pipe.bytes.len() as u64;
                    pipe.attached.push_back((position, duplicates));
                }
                Err(error) => return TransferResult::Failed(error.kind()),
            }
        }
        let mut left = moved;
        for part in parts {
            let count = left.min(part.len());
            pipe.bytes.extend(&part[..count]);
            left -= count;
        }
        TransferResult::Bytes(moved)
    }
}

impl Pipe {
    /// The descriptors of the next `count` bytes, and the number of bytes that are read with them: as in the
    /// kernel, a read ends before the next byte with descriptors.
    fn take_descriptors(&mut self, count: usize) -> (usize, Vec<OwnedFd>) {
        let end = self.position + count as u64;
        let is_before = |attached: &(u64, Vec<OwnedFd>)| attached.0 < end;
        let first = self.attached.pop_front_if(|attached| is_before(attached));
        let descriptors = first.map(|(_, descriptors)| descriptors);
        let limit = self.attached.front().filter(|next| descriptors.is_some() && is_before(next));
        let count = limit.map_or(count, |(at, _)| (at - self.position) as usize);
        (count, descriptors.unwrap_or_default())
    }
}

fn lock(pipe: &Mutex<Pipe>) -> MutexGuard<'_, Pipe> {
    sync::lock(pipe)
}

impl Listen for SimulatedNetwork {
    fn listen(&mut self, address: &StreamAddress) -> io::Result<ListenerId> {
        self.listeners
            .insert(address.clone())
            .map(ListenerId)
            .map_err(|_| io::ErrorKind::QuotaExceeded.into())
    }

    fn close_listener(&mut self, listener: ListenerId) {
        self.listeners.remove(listener.0);
    }

    fn local_address(&self, listener: ListenerId) -> Option<StreamAddress> {
        self.listeners.get(listener.0).cloned()
    }
}

impl Network for SimulatedNetwork {
    type Stream = SimulatedStream;

    fn local_address_of(_stream: &SimulatedStream) -> Option<StreamAddress> {
        None
    }

    fn peer_credentials_of(stream: &SimulatedStream) -> Option<os::PeerCredentials> {
        stream.credentials
    }

    fn add(&mut self, stream: SimulatedStream) -> io::Result<ConnectionId> {
        self.connections.insert(stream).map(ConnectionId).map_err(|_| io::ErrorKind::QuotaExceeded.into())
    }

    /// Reports every connection on each call, so that readiness is level-triggered.
    fn poll(&mut self, events: &mut Vec<NetworkEvent<SimulatedStream>>) -> usize {
        let before = events.len();
        let listeners: Vec<(Slot, StreamAddress)> =
            self.listeners.iter().map(|(slot, address)| (slot, address.clone())).collect();
        let mut pending = self.pending.borrow_mut();
        for (slot, address) in listeners {
            while let Some(position) = pending.iter().position(|pending| pending.to == address) {
                let PendingConnection { stream, peer, .. } = pending.remove(position);
                events.push(NetworkEvent::Incoming { listener: ListenerId(slot), stream, peer });
            }
        }
        events.extend(self.connections.iter().map(|(slot, _)| NetworkEvent::Ready(ConnectionId(slot))));
        events.len() - before
    }

    fn receive(&mut self, connection: ConnectionId, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        // The descriptors that come with the bytes are closed.
        self.transfer_in(connection, parts).0
    }

    fn send(&mut self, connection: ConnectionId, parts: &[IoSlice<'_>]) -> TransferResult {
        self.transfer_out(connection, parts, &[])
    }

    fn remove(&mut self, connection: ConnectionId) -> Option<SimulatedStream> {
        self.connections.remove(connection.0)
    }

    fn close(&mut self, connection: ConnectionId) {
        self.connections.remove(connection.0);
    }

    fn is_pending(&self) -> bool {
        true
    }

    fn receive_with_descriptors(
        &mut self,
        connection: ConnectionId,
        parts: &mut [IoSliceMut<'_>],
        descriptors: &mut ReceivedDescriptors,
    ) -> TransferResult {
        let (result, arrived) = self.transfer_in(connection, parts);
        match descriptors.extend(arrived) {
            Ok(()) => result,
            Err(error) => TransferResult::Failed(error.kind()),
        }
    }

    fn send_with_descriptors(
        &mut self,
        connection: ConnectionId,
        parts: &[IoSlice<'_>],
        descriptors: &[BorrowedFd<'_>],
    ) -> TransferResult {
        if descriptors.len() > crate::DESCRIPTORS_PER_MESSAGE_MAX {
            return TransferResult::Failed(io::ErrorKind::InvalidInput);
        }
        self.transfer_out(connection, parts, descriptors)
    }
}

impl Drop for SimulatedStream {
    fn drop(&mut self) {
        lock(&self.outgoing).closed = true;
        // The peer's later writes fail.
        lock(&self.incoming).broken = true;
    }
}
