//! Who the ends of a connection are, and where.

use sockets::StreamAddress;
use wire_replica::ReplicaId;

use crate::key::LinkKey;

/// Where a node listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeAddress {
    /// The address.
    pub stream: StreamAddress,
    /// Connections to it are made with TLS.
    pub has_tls: bool,
}

/// Who this end is.
#[derive(Clone)]
pub struct Identity {
    /// The cluster, a UUID.
    pub cluster: [u8; 16],
    /// The node; `None` for a client.
    pub node: Option<ReplicaId>,
    /// What this end proves that it knows. A node has the cluster's key.
    pub key: LinkKey,
}
