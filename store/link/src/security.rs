//! TLS of a connection, with keys that follow from the cluster's key and from those of clients.
//!
//! Both ends have one key already, so that TLS 1.3 needs no certificates: the pre-shared key is derived from
//! it, and the identity names the cluster and, for a client's key, the key. Greetings follow inside as they
//! do without TLS. The end that accepts sees by the first byte whether the other one uses TLS.

use std::fmt::Write as _;
use std::io::IoSliceMut;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use secret::Secret;
use sha2::Sha256;
use sockets::{ByteStream, HandshakeStatus, StreamLayer, TransferResult};
use tls::{Psk, PskHash, PskSource, ServerCredentials, TlsFailure, TlsLayer};
use wire_replica::KeyName;

use crate::error::LinkError;
use crate::identity::Identity;
use crate::key::ClientKeys;

/// First byte of a handshake's record (RFC 8446, section 5.1). A greeting begins with another one.
const HANDSHAKE_RECORD: u8 = 22;
/// Alerts of a node that does not have the key of this end, or another one of this name: illegal_parameter,
/// decrypt_error and unknown_psk_identity (RFC 8446, sections 4.2.11 and 6.2).
const KEY_ALERTS: [u8; 3] = [47, 51, 115];
/// Bytes of records that a handshake receives at a time.
const SCRATCH_BYTES: usize = 4 << 10;

/// What is between a connection's bytes and its greetings.
pub(crate) enum Security {
    /// It was accepted, and nothing has arrived.
    Undecided { is_required: bool },
    /// Nothing.
    Plain,
    /// TLS.
    Tls(Box<TlsLayer>),
}

/// How far a connection is.
pub(crate) enum Secured {
    /// It waits for the peer.
    Pending,
    /// Greetings and messages may be exchanged. The first byte of a connection without TLS was received.
    Ready(Option<u8>),
}

impl Security {
    /// Of the end that connects.
    pub(crate) fn connector(identity: &Identity) -> Security {
        let key = &identity.key;
        let psk = psk(identity.cluster, key.name(), key.secret());
        Security::Tls(Box::new(TlsLayer::client(psk)))
    }

    /// Whether TLS is used.
    pub(crate) fn is_tls(&self) -> bool {
        matches!(self, Security::Tls(_))
    }

    /// Continues until greetings can be exchanged.
    pub(crate) fn advance<S: ByteStream>(
        &mut self,
        stream: &mut S,
        identity: &Arc<Identity>,
        keys: &Arc<ClientKeys>,
    ) -> Result<Secured, LinkError> {
        if let Security::Undecided { is_required } = *self {
            let mut first = [0];
            match stream.receive(&mut [IoSliceMut::new(&mut first)]) {
                TransferResult::Bytes(_) => {}
                TransferResult::Blocked => return Ok(Secured::Pending),
                TransferResult::Closed => return Err(LinkError::Closed),
                TransferResult::Failed(kind) => return Err(LinkError::Failed(kind)),
            }
            if first[0] != HANDSHAKE_RECORD {
                if is_required {
                    return Err(LinkError::NoTls);
                }
                *self = Security::Plain;
                return Ok(Secured::Ready(Some(first[0])));
            }
            let psks = LinkPsks { identity: identity.clone(), keys: keys.clone() };
            let mut layer = Box::new(TlsLayer::server(ServerCredentials::of_keys(Arc::new(psks))));
            layer.put_received(&first).map_err(|error| LinkError::Tls(error.0))?;
            *self = Security::Tls(layer);
        }
        let Security::Tls(layer) = self else { return Ok(Secured::Ready(None)) };
        if layer.is_established() {
            return Ok(Secured::Ready(None));
        }
        match layer.handshake(stream, &mut [0; SCRATCH_BYTES]) {
            HandshakeStatus::Done => Ok(Secured::Ready(None)),
            HandshakeStatus::Pending => Ok(Secured::Pending),
            HandshakeStatus::Closed => Err(LinkError::Closed),
            HandshakeStatus::Failed(kind) => Err(match layer.failure() {
                Some(TlsFailure::PeerAlert(alert)) if KEY_ALERTS.contains(&alert) => {
                    identity.key.name().map_or(LinkError::Key, LinkError::ClientKey)
                }
                failure => failure.map_or(LinkError::Failed(kind), LinkError::Tls),
            }),
        }
    }
}

/// The keys that a node takes.
struct LinkPsks {
    identity: Arc<Identity>,
    keys: Arc<ClientKeys>,
}

impl PskSource for LinkPsks {
    fn find(&self, identity: &str) -> Option<Psk> {
        let cluster = self.identity.cluster;
        let name = match identity.strip_prefix(&psk_identity(cluster, None))? {
            "" => return Some(psk(cluster, None, self.identity.key.secret())),
            rest => KeyName::new(rest.strip_prefix(':')?)?,
        };
        Some(psk(cluster, Some(name), self.keys.secret(name)?))
    }
}

/// `ringbolt-store:` and the cluster's UUID, and for a client's key `:NAME`.
fn psk_identity(cluster: [u8; 16], name: Option<KeyName>) -> String {
    let mut identity = String::from("ringbolt-store:");
    for byte in cluster {
        write!(identity, "{byte:02x}").expect("a string takes all that is written");
    }
    if let Some(name) = name {
        write!(identity, ":{name}").expect("a string takes all that is written");
    }
    identity
}

/// The key of TLS. It proves nothing that a greeting does: the labels differ.
fn psk(cluster: [u8; 16], name: Option<KeyName>, secret: &Secret) -> Psk {
    let identity = psk_identity(cluster, name);
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.reveal()).expect("HMAC takes keys of any length");
    mac.update(b"TLS 1.3\0");
    mac.update(identity.as_bytes());
    let key = Secret::new(mac.finalize().into_bytes().to_vec());
    Psk::new(identity, key, PskHash::Sha256).expect("a key of 32 bytes and a short identity")
}
