//! Connections whose peers complete a handshake before the protocol sees them, on a simulated network.
#![allow(clippy::unwrap_used)]

use std::cell::RefCell;
use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::rc::Rc;
use std::sync::Arc;

use reactor::{Reactor, ReactorConfig};
use sockets::{
    ByteStream, ConnectionId, HandshakeStatus, Network, NetworkFaults, SimulatedNetwork, StreamAddress,
    StreamLayer, TransferResult,
};
use target_shell::{
    Accepted, CloseReason, ConnectionGroup, ConnectionLimits, GroupLimits, IoContext, Layered, MoreToRead,
    PollGroup, Protocol, ProtocolConnection,
};

/// What a peer has to send first.
const HELLO: &[u8] = b"hello";
/// Time for it.
const HANDSHAKE_NS: u64 = 1000;
/// Every byte of the protocol is changed by this.
const KEY: u8 = 0x55;

/// A toy of a cipher, after a greeting.
#[derive(Default)]
struct Cipher {
    greeting: Vec<u8>,
}

struct CipherStream<'a, S>(&'a mut S);

impl StreamLayer for Cipher {
    const BYTES_MAX: usize = HELLO.len();

    type Stream<'a, S: ByteStream + 'a> = CipherStream<'a, S>;

    fn handshake<S: ByteStream>(&mut self, stream: &mut S, _scratch: &mut [u8]) -> HandshakeStatus {
        while self.greeting.len() < HELLO.len() {
            let mut rest = [0; HELLO.len()];
            let rest = &mut rest[self.greeting.len()..];
            match stream.receive(&mut [IoSliceMut::new(rest)]) {
                TransferResult::Bytes(count) => self.greeting.extend_from_slice(&rest[..count]),
                TransferResult::Blocked => return HandshakeStatus::Pending,
                TransferResult::Closed => return HandshakeStatus::Closed,
                TransferResult::Failed(kind) => return HandshakeStatus::Failed(kind),
            }
        }
        match self.greeting == HELLO {
            true => HandshakeStatus::Done,
            false => HandshakeStatus::Failed(ErrorKind::InvalidData),
        }
    }

    fn stream<'a, S: ByteStream>(&'a mut self, below: &'a mut S) -> CipherStream<'a, S> {
        CipherStream(below)
    }
}

impl<S: ByteStream> ByteStream for CipherStream<'_, S> {
    fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        let result = self.0.receive(parts);
        for part in parts {
            part.iter_mut().for_each(|byte| *byte ^= KEY);
        }
        result
    }

    fn send(&mut self, parts: &[IoSlice<'_>]) -> TransferResult {
        let all: Vec<u8> = parts.iter().flat_map(|part| part.iter().map(|byte| byte ^ KEY)).collect();
        self.0.send(&[IoSlice::new(&all)])
    }
}

/// Echoes what it receives, and notes it.
#[derive(Default)]
struct Echo {
    seen: Rc<RefCell<Vec<u8>>>,
    unsent: Vec<u8>,
    draining: bool,
}

/// The state of a core: what its connections have received.
struct EchoCore {
    seen: Rc<RefCell<Vec<u8>>>,
}

impl Protocol for EchoCore {
    const NAME: &'static str = "layered_echo";
    type Config = ();
    type Connection = Layered<Cipher, Echo>;
    type Error = &'static str;

    fn accept(&mut self, _: Accepted, _: &Arc<()>, now_ns: u64) -> Option<Layered<Cipher, Echo>> {
        let echo = Echo { seen: self.seen.clone(), ..Echo::default() };
        Some(Layered::new(Cipher::default(), echo, now_ns + HANDSHAKE_NS))
    }
}

impl ProtocolConnection<EchoCore> for Echo {
    fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        scratch: &mut [u8],
        _context: &mut IoContext<'_, EchoCore>,
    ) -> Result<MoreToRead, CloseReason<&'static str>> {
        let count = CloseReason::check(stream.receive(&mut [IoSliceMut::new(scratch)]))?;
        self.seen.borrow_mut().extend_from_slice(&scratch[..count]);
        self.unsent.extend_from_slice(&scratch[..count]);
        Ok(MoreToRead::No)
    }

    fn flush<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), CloseReason<&'static str>> {
        if !self.unsent.is_empty() {
            let sent = CloseReason::check(stream.send(&[IoSlice::new(&self.unsent)]))?;
            self.unsent.drain(..sent);
        }
        Ok(())
    }

    fn begin_drain(&mut self) {
        self.draining = true;
    }

    fn is_draining(&self) -> bool {
        self.draining
    }
}

struct World {
    group: ConnectionGroup<EchoCore, SimulatedNetwork>,
    peers: SimulatedNetwork,
    seen: Rc<RefCell<Vec<u8>>>,
    now_ns: u64,
    // Dropped last: the fields above use its buffers.
    reactor: Reactor,
}

impl World {
    fn new() -> World {
        let reactor = Reactor::new(&ReactorConfig::default()).unwrap();
        let (near, peers) = SimulatedNetwork::pair(7, NetworkFaults::default());
        let seen: Rc<RefCell<Vec<u8>>> = Rc::default();
        let limits = GroupLimits {
            connections: ConnectionLimits::new(8),
            logins_max: 2,
            logins_per_peer_max: 2,
            ..GroupLimits::default()
        };
        let protocol = EchoCore { seen: seen.clone() };
        let mut group = ConnectionGroup::standalone(&reactor.core(), near, protocol, limits);
        group.listen(&World::address(), 1).unwrap();
        World { group, peers, seen, now_ns: 1, reactor }
    }

    fn address() -> StreamAddress {
        "10.0.0.1:1".parse().unwrap()
    }

    fn connect(&mut self) -> ConnectionId {
        let stream = self.peers.connect(World::address());
        let id = self.peers.add(stream).unwrap();
        self.poll();
        id
    }

    fn poll(&mut self) {
        for _ in 0..4 {
            self.now_ns += 1;
            self.group.poll(&self.reactor.core(), self.now_ns);
        }
    }

    fn send(&mut self, id: ConnectionId, bytes: &[u8]) {
        self.peers.send(id, &[IoSlice::new(bytes)]);
        self.poll();
    }

    /// What the peer receives; `None` if it is disconnected.
    fn receive(&mut self, id: ConnectionId) -> Option<Vec<u8>> {
        let mut bytes = [0; 64];
        match self.peers.receive(id, &mut [IoSliceMut::new(&mut bytes)]) {
            TransferResult::Bytes(count) => Some(bytes[..count].to_vec()),
            TransferResult::Blocked => Some(Vec::new()),
            TransferResult::Closed | TransferResult::Failed(_) => None,
        }
    }
}

fn secret(text: &[u8]) -> Vec<u8> {
    text.iter().map(|byte| byte ^ KEY).collect()
}

#[test]
fn a_protocol_sees_a_peer_after_its_handshake() {
    let mut world = World::new();
    let peer = world.connect();
    world.send(peer, b"hel");
    assert_eq!((world.receive(peer), world.seen.borrow().len()), (Some(Vec::new()), 0));
    // The rest of the handshake, and the first bytes of the protocol behind it.
    world.send(peer, &[b"lo".to_vec(), secret(b"one")].concat());
    assert_eq!(world.receive(peer), Some(secret(b"one")));
    world.send(peer, &secret(b"two"));
    assert_eq!(world.receive(peer), Some(secret(b"two")));
    assert_eq!(&world.seen.borrow()[..], b"onetwo");
    // The time for the handshake does not matter any more.
    world.now_ns += 2 * HANDSHAKE_NS;
    world.send(peer, &secret(b"three"));
    assert_eq!(world.receive(peer), Some(secret(b"three")));
}

#[test]
fn a_peer_that_fails_its_handshake_or_takes_too_long_is_disconnected() {
    let mut world = World::new();
    let (wrong, slow) = (world.connect(), world.connect());
    world.send(wrong, b"hullo");
    world.send(slow, b"hell");
    assert_eq!((world.receive(wrong), world.receive(slow)), (None, Some(Vec::new())));
    world.now_ns += HANDSHAKE_NS;
    world.poll();
    assert_eq!((world.receive(slow), world.seen.borrow().len()), (None, 0));
}

#[test]
fn handshakes_make_room_for_newer_ones_and_count_no_longer_when_they_are_done() {
    let mut world = World::new();
    let done = world.connect();
    world.send(done, HELLO);
    let (first, second) = (world.connect(), world.connect());
    assert_eq!((world.receive(first), world.receive(second)), (Some(Vec::new()), Some(Vec::new())));
    let third = world.connect();
    assert_eq!((world.receive(first), world.receive(third)), (None, Some(Vec::new())));
    world.send(done, &secret(b"x"));
    assert_eq!(world.receive(done), Some(secret(b"x")));
}
