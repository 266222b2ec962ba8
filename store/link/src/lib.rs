//! Connections of the replicated store, sans-IO: both ends prove that they know the cluster's key, or a
//! client's, then messages follow. With TLS 1.3 they are encrypted.
//!
//! A [`Link`] is one connection. Its owner lends it a byte stream whenever that is ready; it reads messages,
//! and writes those that were queued with [`Link::send`]. What a peer sends is bounded before it arrives, and
//! so is what waits to be sent: a peer that reads nothing loses its connection.
//!
//! ```
//! use sockets::{Listen, Network, NetworkFaults, SimulatedNetwork};
//! use store_link::{ClusterKey, Identity, Link, LinkEvent};
//! use wire_replica::{ClientReply, Frame, ReplicaId};
//! let (mut network, _) = SimulatedNetwork::pair(1, NetworkFaults::default());
//! let listener = network.listen(&"127.0.0.1:1".parse().expect("an address"))?;
//! let near = network.connect(network.local_address(listener).expect("it listens"));
//! let near = network.add(near)?;
//! let mut events = Vec::new();
//! network.poll(&mut events);
//! let far = events.into_iter().find_map(|event| match event {
//!     sockets::NetworkEvent::Incoming { stream, .. } => Some(stream),
//!     _ => None,
//! });
//! let far = network.add(far.expect("a connection"))?;
//! let identity = |node| Identity { cluster: [7; 16], node, key: ClusterKey::from_bytes([1; 32]).into() };
//! let mut client = Link::connect(identity(None).into())?;
//! let mut server = Link::accept(identity(Some(ReplicaId(3))).into());
//! client.send(Frame::Reply { client: 1, number: 1, reply: ClientReply::Busy }.encode(9));
//! let mut received = Vec::new();
//! for _ in 0..3 {
//!     client.drive(&mut network.stream(near), &mut received)?;
//!     server.drive(&mut network.stream(far), &mut received)?;
//! }
//! assert!(matches!(received.last(), Some(LinkEvent::Frame { group: 9, .. })));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod error;
mod identity;
mod key;
mod receiver;
mod security;
mod sender;

use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use secret::Secret;
use sha2::Sha256;
use sockets::{ByteStream, StreamLayer};
use wire_replica::{EncodedFrame, Frame, Greeting, GreetingKind, KeyName, ReplicaId};

pub use error::LinkError;
pub use identity::{Identity, NodeAddress};
pub use key::{ClientKey, ClientKeys, ClusterKey, LinkKey};
use receiver::{Received, Receiver};
use security::{Secured, Security};
use sender::Sender;

/// Most bytes that are read from a connection before others get their turn.
const READ_BYTES_MAX: usize = 2 << 20;

/// What happened on a connection.
#[derive(Debug)]
pub enum LinkEvent {
    /// The peer has proved that it knows the key.
    Ready {
        /// The node that it is; `None` for a client.
        peer: Option<ReplicaId>,
        /// The name of the client's key; `None` for the cluster's key.
        key: Option<KeyName>,
    },
    /// A message.
    Frame {
        /// The logical group that it concerns.
        group: u32,
        /// The message.
        frame: Frame,
    },
}

enum HandshakeState {
    /// It accepted, and waits for the Hello.
    Accepting,
    /// It waits for the Proof.
    Challenged { hello: Greeting, challenge: Greeting, secret: Secret },
    /// It connected, and waits for the Challenge.
    Connecting { hello: Greeting },
    /// Messages follow.
    Ready,
}

/// One connection.
pub struct Link {
    identity: Arc<Identity>,
    /// The keys of clients that it takes, beside its own key.
    keys: Arc<ClientKeys>,
    /// The node that it must be, if that is known.
    expected: Option<ReplicaId>,
    security: Security,
    state: HandshakeState,
    receiver: Receiver,
    sender: Sender,
}

impl Link {
    /// The end that connects.
    ///
    /// # Errors
    /// [`LinkError::Random`].
    pub fn connect(identity: Arc<Identity>) -> Result<Link, LinkError> {
        let hello = Greeting {
            kind: GreetingKind::Hello,
            sender: identity.node,
            cluster: identity.cluster,
            nonce: random()?,
            proof: [0; 32],
            key: identity.key.name(),
        };
        let mut link = Link::new(identity, HandshakeState::Accepting, Security::Plain);
        link.sender.greet(&hello);
        link.state = HandshakeState::Connecting { hello };
        Ok(link)
    }

    /// The same; the peer must be this node.
    ///
    /// # Errors
    /// [`LinkError::Random`].
    pub fn connect_to(identity: Arc<Identity>, node: ReplicaId) -> Result<Link, LinkError> {
        Ok(Link { expected: Some(node), ..Link::connect(identity)? })
    }

    /// The same, with TLS if the node's address has it.
    ///
    /// # Errors
    /// [`LinkError::Random`].
    pub fn connect_at(identity: Arc<Identity>, node: ReplicaId, at: &NodeAddress) -> Result<Link, LinkError> {
        let link = Link::connect_to(identity, node)?;
        Ok(if at.has_tls { link.over_tls() } else { link })
    }

    /// An end that [`connect`](Self::connect) or [`connect_to`](Self::connect_to) has made, with TLS.
    #[must_use]
    pub fn over_tls(self) -> Link {
        Link { security: Security::connector(&self.identity), ..self }
    }

    /// The end that accepts, with TLS and without.
    pub fn accept(identity: Arc<Identity>) -> Link {
        Link::new(identity, HandshakeState::Accepting, Security::Undecided { is_required: false })
    }

    /// The same; clients may have these keys instead of the cluster's.
    pub fn accept_with(identity: Arc<Identity>, keys: Arc<ClientKeys>) -> Link {
        Link { keys, ..Link::accept(identity) }
    }

    /// An end that accepts, with TLS alone.
    #[must_use]
    pub fn requiring_tls(self) -> Link {
        Link { security: Security::Undecided { is_required: true }, ..self }
    }

    fn new(identity: Arc<Identity>, state: HandshakeState, security: Security) -> Link {
        let (receiver, sender) = (Receiver::default(), Sender::default());
        Link { identity, keys: Arc::default(), expected: None, security, state, receiver, sender }
    }

    /// Whether it uses TLS.
    pub fn is_tls(&self) -> bool {
        self.security.is_tls()
    }

    /// Both ends have proved that they know the key.
    pub fn is_ready(&self) -> bool {
        matches!(self.state, HandshakeState::Ready)
    }

    /// Queues a message; [`drive`](Self::drive) writes it, after the greetings.
    pub fn send(&mut self, frame: EncodedFrame) {
        self.sender.queue(frame);
    }

    /// Bytes that wait to be written.
    pub fn queued_bytes(&self) -> usize {
        self.sender.queued_bytes()
    }

    /// Writes what is queued. [`drive`](Self::drive) does too; this is for a stream that has nothing to read.
    ///
    /// # Errors
    /// The connection is to be closed.
    pub fn write(&mut self, stream: &mut impl ByteStream) -> Result<(), LinkError> {
        if !self.is_secured(stream)? {
            return Ok(());
        }
        let is_ready = self.is_ready();
        match &mut self.security {
            Security::Tls(layer) => self.sender.write(&mut layer.stream(stream), is_ready),
            _ => self.sender.write(stream, is_ready),
        }
    }

    /// Whether greetings and messages may be exchanged.
    fn is_secured(&mut self, stream: &mut impl ByteStream) -> Result<bool, LinkError> {
        match self.security.advance(stream, &self.identity, &self.keys)? {
            Secured::Pending => Ok(false),
            Secured::Ready(first) => {
                first.into_iter().for_each(|byte| self.receiver.put_first(byte));
                Ok(true)
            }
        }
    }

    /// Writes what is queued, and appends what arrived. Call it when the stream is ready, and after
    /// [`send`](Self::send). Returns whether more may be there to read although the stream does not become
    /// ready again.
    ///
    /// # Errors
    /// The connection is to be closed. What was appended before counts.
    pub fn drive(
        &mut self,
        stream: &mut impl ByteStream,
        events: &mut Vec<LinkEvent>,
    ) -> Result<bool, LinkError> {
        if !self.is_secured(stream)? {
            return Ok(false);
        }
        let Security::Tls(mut layer) = std::mem::replace(&mut self.security, Security::Plain) else {
            return self.exchange(stream, events);
        };
        let exchanged = self.exchange(&mut layer.stream(stream), events);
        self.security = Security::Tls(layer);
        exchanged
    }

    fn exchange(
        &mut self,
        stream: &mut impl ByteStream,
        events: &mut Vec<LinkEvent>,
    ) -> Result<bool, LinkError> {
        self.sender.write(stream, self.is_ready())?;
        let mut bytes = 0;
        loop {
            let (count, may_be_more) = self.receiver.read(stream)?;
            bytes += count;
            self.take_messages(events)?;
            if !may_be_more {
                break;
            }
            if bytes >= READ_BYTES_MAX {
                return Ok(true);
            }
        }
        // Greetings may have been answered, and messages may follow them.
        self.sender.write(stream, self.is_ready())?;
        Ok(false)
    }

    fn take_messages(&mut self, events: &mut Vec<LinkEvent>) -> Result<(), LinkError> {
        while let Some(received) = self.receiver.next(self.is_ready())? {
            match received {
                Received::Greeting(greeting) => {
                    if let Some((peer, key)) = self.greet(greeting)? {
                        self.state = HandshakeState::Ready;
                        events.push(LinkEvent::Ready { peer, key });
                    }
                }
                Received::Frame { group, frame } => events.push(LinkEvent::Frame { group, frame }),
            }
        }
        Ok(())
    }

    /// Takes a greeting. Returns the peer, and its key if that is a client's, if it was the last one.
    fn greet(&mut self, greeting: Greeting) -> Result<Option<AuthenticatedPeer>, LinkError> {
        if greeting.cluster != self.identity.cluster {
            return Err(LinkError::Cluster);
        }
        let key = &self.identity.key;
        match (&self.state, greeting.kind) {
            (HandshakeState::Accepting, GreetingKind::Hello) => {
                let mut challenge = Greeting {
                    kind: GreetingKind::Challenge,
                    sender: self.identity.node,
                    cluster: self.identity.cluster,
                    nonce: random()?,
                    proof: [0; 32],
                    key: None,
                };
                let secret = match greeting.key {
                    None => key.secret().clone(),
                    // The proof for an unknown key is one that no client can check, so that its peer ends the
                    // connection with a named error, as for another secret.
                    Some(name) => match self.keys.secret(name) {
                        Some(secret) => secret.clone(),
                        None => Secret::new(random()?),
                    },
                };
                challenge.proof =
                    proof(&secret, b"acceptor", &greeting, &challenge).finalize().into_bytes().into();
                self.sender.greet(&challenge);
                self.state = HandshakeState::Challenged { hello: greeting, challenge, secret };
                Ok(None)
            }
            (HandshakeState::Connecting { hello }, GreetingKind::Challenge) => {
                proof(key.secret(), b"acceptor", hello, &greeting)
                    .verify_slice(&greeting.proof)
                    .map_err(|_| wrong_key(hello))?;
                if self.expected.is_some() && self.expected != greeting.sender {
                    return Err(LinkError::Node { found: greeting.sender, expected: self.expected });
                }
                let proof =
                    proof(key.secret(), b"connector", hello, &greeting).finalize().into_bytes().into();
                let kind = GreetingKind::Proof;
                let answer = Greeting { kind, nonce: [0; 32], proof, key: None, ..hello.clone() };
                self.sender.greet(&answer);
                Ok(Some((greeting.sender, None)))
            }
            (HandshakeState::Challenged { hello, challenge, secret }, GreetingKind::Proof) => {
                let expected = proof(secret, b"connector", hello, challenge);
                expected.verify_slice(&greeting.proof).map_err(|_| wrong_key(hello))?;
                Ok(Some((hello.sender, hello.key)))
            }
            _ => Err(LinkError::Order),
        }
    }
}

/// A node or a client, and its key if that is a client's.
type AuthenticatedPeer = (Option<ReplicaId>, Option<KeyName>);

/// A proof is not that of the key which the Hello names.
fn wrong_key(hello: &Greeting) -> LinkError {
    hello.key.map_or(LinkError::Key, LinkError::ClientKey)
}

/// The proof of one end. Verifying takes the same time whatever differs.
fn proof(secret: &Secret, label: &[u8], hello: &Greeting, challenge: &Greeting) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.reveal()).expect("HMAC takes keys of any length");
    mac.update(label);
    mac.update(&hello.encode());
    mac.update(&Greeting { proof: [0; 32], ..challenge.clone() }.encode());
    mac
}

fn random() -> Result<[u8; 32], LinkError> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|_| LinkError::Random)?;
    Ok(bytes)
}
