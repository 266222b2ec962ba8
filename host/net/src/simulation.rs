//! Streams in memory, cut and broken as a seed says.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slots::{Slab, Slot};

use crate::{ConnectionId, Event, ListenerId, Network, Transfer};

/// What goes wrong on simulated streams, each in thousandths of the calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// A read or write moves only some of the bytes that it could.
    pub cut_per_mille: u32,
    /// A read or write that could move bytes says that it would block.
    pub stall_per_mille: u32,
    /// A connection breaks.
    pub break_per_mille: u32,
}

/// One side's network. Two that were made together reach each other's listeners.
pub struct Simulation {
    shared: Rc<RefCell<Vec<Pending>>>,
    listeners: Slab<SocketAddr>,
    connections: Slab<Stream>,
    dice: u64,
    faults: Faults,
}

/// An end of a simulated connection.
pub struct Stream {
    incoming: Arc<Mutex<Pipe>>,
    outgoing: Arc<Mutex<Pipe>>,
}

#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    closed: bool,
    broken: bool,
}

struct Pending {
    to: SocketAddr,
    stream: Stream,
}

/// Bytes that a pipe holds before its writer blocks.
const PIPE_BYTES_MAX: usize = 256 << 10;

impl Simulation {
    /// Two networks that reach each other. The same seed gives the same faults.
    pub fn pair(seed: u64, faults: Faults) -> (Simulation, Simulation) {
        let shared = Rc::new(RefCell::new(Vec::new()));
        let make = |dice| Simulation {
            shared: shared.clone(),
            listeners: Slab::with_capacity(16),
            connections: Slab::with_capacity(256),
            dice,
            faults,
        };
        (make(seed | 1), make(seed.rotate_left(32) | 1))
    }

    /// Connects to a listener of either network.
    pub fn connect(&mut self, to: SocketAddr) -> Stream {
        let (one, other) = (Arc::new(Mutex::new(Pipe::default())), Arc::new(Mutex::new(Pipe::default())));
        let far = Stream { incoming: one.clone(), outgoing: other.clone() };
        self.shared.borrow_mut().push(Pending { to, stream: far });
        Stream { incoming: other, outgoing: one }
    }

    /// A number below `bound`, from the seed (xorshift64*).
    fn roll(&mut self, bound: u64) -> u64 {
        self.dice ^= self.dice >> 12;
        self.dice ^= self.dice << 25;
        self.dice ^= self.dice >> 27;
        (self.dice.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound.max(1)
    }

    fn happens(&mut self, per_mille: u32) -> bool {
        per_mille > 0 && self.roll(1000) < u64::from(per_mille)
    }

    /// How much of `room` a call moves, `None` for a stall.
    fn portion(&mut self, room: usize) -> Option<usize> {
        if room == 0 || self.happens(self.faults.stall_per_mille) {
            return None;
        }
        let cut = self.happens(self.faults.cut_per_mille);
        Some(if cut { 1 + self.roll(room as u64) as usize } else { room })
    }
}

fn lock(pipe: &Mutex<Pipe>) -> MutexGuard<'_, Pipe> {
    pipe.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Network for Simulation {
    type Stream = Stream;

    fn listen(&mut self, address: SocketAddr) -> io::Result<ListenerId> {
        self.listeners.insert(address).map(ListenerId).map_err(|_| io::ErrorKind::QuotaExceeded.into())
    }

    fn unlisten(&mut self, listener: ListenerId) {
        self.listeners.remove(listener.0);
    }

    fn local_address(&self, listener: ListenerId) -> Option<SocketAddr> {
        self.listeners.get(listener.0).copied()
    }

    fn local_address_of(_stream: &Stream) -> Option<SocketAddr> {
        None
    }

    fn add(&mut self, stream: Stream) -> io::Result<ConnectionId> {
        self.connections.insert(stream).map(ConnectionId).map_err(|_| io::ErrorKind::QuotaExceeded.into())
    }

    /// Reports every connection each time: readiness is never an edge that a test could miss.
    fn poll(&mut self, events: &mut Vec<Event<Stream>>) -> usize {
        let before = events.len();
        let listeners: Vec<(Slot, SocketAddr)> =
            self.listeners.iter().map(|(slot, address)| (slot, *address)).collect();
        let mut pending = self.shared.borrow_mut();
        for (slot, address) in listeners {
            while let Some(position) = pending.iter().position(|pending| pending.to == address) {
                let stream = pending.remove(position).stream;
                events.push(Event::Incoming { listener: ListenerId(slot), stream, peer: address });
            }
        }
        events.extend(self.connections.iter().map(|(slot, _)| Event::Ready(ConnectionId(slot))));
        events.len() - before
    }

    fn receive(&mut self, connection: ConnectionId, parts: &mut [IoSliceMut<'_>]) -> Transfer {
        let Some(stream) = self.connections.get(connection.0) else {
            return Transfer::Failed(io::ErrorKind::NotConnected);
        };
        let incoming = stream.incoming.clone();
        let mut pipe = lock(&incoming);
        if pipe.broken {
            return Transfer::Failed(io::ErrorKind::ConnectionReset);
        }
        if pipe.bytes.is_empty() {
            return if pipe.closed { Transfer::Closed } else { Transfer::Blocked };
        }
        if self.happens(self.faults.break_per_mille) {
            pipe.broken = true;
            return Transfer::Failed(io::ErrorKind::ConnectionReset);
        }
        let room: usize = parts.iter().map(|part| part.len()).sum();
        let Some(mut left) = self.portion(room.min(pipe.bytes.len())) else { return Transfer::Blocked };
        let moved = left;
        for part in parts {
            let count = left.min(part.len());
            for (to, from) in part.iter_mut().zip(pipe.bytes.drain(..count)) {
                *to = from;
            }
            left -= count;
        }
        Transfer::Bytes(moved)
    }

    fn send(&mut self, connection: ConnectionId, parts: &[IoSlice<'_>]) -> Transfer {
        let Some(stream) = self.connections.get(connection.0) else {
            return Transfer::Failed(io::ErrorKind::NotConnected);
        };
        let outgoing = stream.outgoing.clone();
        let mut pipe = lock(&outgoing);
        if pipe.broken || pipe.closed {
            return Transfer::Failed(io::ErrorKind::BrokenPipe);
        }
        let offered: usize = parts.iter().map(|part| part.len()).sum();
        let room = PIPE_BYTES_MAX.saturating_sub(pipe.bytes.len());
        let Some(mut left) = self.portion(offered.min(room)) else { return Transfer::Blocked };
        let moved = left;
        for part in parts {
            let count = left.min(part.len());
            pipe.bytes.extend(&part[..count]);
            left -= count;
        }
        Transfer::Bytes(moved)
    }

    fn close(&mut self, connection: ConnectionId) {
        self.connections.remove(connection.0);
    }

    fn is_pending(&self) -> bool {
        true
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        lock(&self.outgoing).closed = true;
        // What the peer sends from here on meets nobody.
        lock(&self.incoming).broken = true;
    }
}
