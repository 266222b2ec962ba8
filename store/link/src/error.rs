//! Why connections end.

use std::io;

use codec::DecodeError;
use tls::TlsFailure;
use wire_replica::{KeyName, ReplicaId};

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The peer closed it.
    #[error("the peer closed the connection")]
    Closed,
    /// It broke.
    #[error("the connection failed: {0}")]
    Failed(io::ErrorKind),
    /// The peer sent something that no message is.
    #[error("the peer sent something else than a message: {0}")]
    Malformed(#[from] DecodeError),
    /// The peer sent a greeting that is not due.
    #[error("the peer's greetings are not in their order")]
    Order,
    /// The peer is of another cluster.
    #[error("the peer is of another cluster")]
    Cluster,
    /// The peer does not know the cluster's key.
    #[error("the peer does not have the key of this cluster")]
    Key,
    /// The node does not take this key of a client, or the client does not have it.
    #[error(
        "the client key {0} is not one of this cluster: it is unknown, was deleted, or has another secret"
    )]
    ClientKey(KeyName),
    /// The key by which a client connected is none of the cluster any more.
    #[error("the client key {0} was deleted")]
    KeyDeleted(KeyName),
    /// The node has as many connections of clients, or with this key, as it takes.
    #[error("the node has as many connections of clients as it takes")]
    TooMany,
    /// The peer is another node than this address was of.
    #[error("the peer is node {found:?}, not {expected:?}")]
    Node {
        /// What it says.
        found: Option<ReplicaId>,
        /// What was expected.
        expected: Option<ReplicaId>,
    },
    /// The peer does not read what it is sent.
    #[error("the peer does not read: {0} bytes wait")]
    Slow(usize),
    /// The peer connected without TLS.
    #[error("the peer connected without TLS, which this node requires")]
    NoTls,
    /// A step of TLS failed.
    #[error("TLS of the connection: {0}")]
    Tls(TlsFailure),
    /// The system has no random numbers.
    #[error("the system has no random numbers")]
    Random,
}
