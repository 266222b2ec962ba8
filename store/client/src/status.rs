//! What the nodes of a cluster report, asked over the cluster's network.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use cluster_map::ReplicaId;
use control::json::{self, Value};
use reactor::Core;
use sockets::{ConnectionId, CoreNetwork, Network, NetworkEvent};
use store_link::{Identity, Link, LinkError, LinkEvent, NodeAddress};
use wire_replica::Frame;

/// Nodes that are asked at a time: each answer takes up to 4 MiB.
const ASKED_MAX: usize = 64;
/// The request of a connection: there is one.
const REQUEST: u64 = 1;

/// Why a node's status is not known.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    /// It cannot be connected to.
    #[error("it cannot be reached: {0}")]
    Unreachable(io::Error),
    /// It did not answer in time.
    #[error("timed out")]
    Silent,
    /// It closed the connection before both had proved that they know the key.
    #[error("it closed the connection before it proved its key: is it of another cluster?")]
    Refused,
    /// It proved who it is, and closed the connection when it was asked.
    #[error(
        "it closed the connection instead of an answer: it ends, or its version has no status for other machines"
    )]
    Closed,
    /// The connection failed, or it is another node, or of another cluster.
    #[error("{0}")]
    Link(#[from] LinkError),
    /// It sent something else than its status.
    #[error("its answer is no status: {0}")]
    Malformed(String),
}

struct Asked {
    node: ReplicaId,
    connection: ConnectionId,
    link: Link,
    late_ns: u64,
    /// It may have something to read although no event says so.
    is_readable: bool,
}

struct Asking<N: Network> {
    network: N,
    identity: Arc<Identity>,
    timeout_ns: u64,
    /// Those that are not asked yet.
    waiting: BTreeMap<ReplicaId, NodeAddress>,
    /// By connection.
    asked: BTreeMap<u64, Asked>,
    answers: BTreeMap<ReplicaId, Result<Value, StatusError>>,
}

/// Asks nodes for their status, all at a time up to 64. A node has `timeout_ns` for its answer, the
/// connection included. The value of a node is what its method `store_node_get_status` returns.
pub async fn ask_nodes<N: CoreNetwork>(
    core: &Core,
    identity: Identity,
    nodes: BTreeMap<ReplicaId, NodeAddress>,
    timeout_ns: u64,
) -> BTreeMap<ReplicaId, Result<Value, StatusError>> {
    let mut asking = Asking {
        network: N::of_core(core),
        identity: Arc::new(identity),
        timeout_ns,
        waiting: nodes,
        asked: BTreeMap::new(),
        answers: BTreeMap::new(),
    };
    while let Some(wake_ns) = asking.poll(core.now_ns()) {
        let (mut event, mut late) =
            (pin!(core.next_event()), pin!(core.sleep_ns(wake_ns.saturating_sub(core.now_ns()))));
        std::future::poll_fn(|context| {
            let is_woken = event.as_mut().poll(context).is_ready() | late.as_mut().poll(context).is_ready();
            if is_woken { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
    asking.answers
}

impl<N: CoreNetwork> Asking<N> {
    /// Asks, and takes answers. Returns when it is to be called again if no event comes before; `None` at the
    /// end.
    fn poll(&mut self, now_ns: u64) -> Option<u64> {
        while self.asked.len() < ASKED_MAX
            && let Some((node, address)) = self.waiting.pop_first()
        {
            if let Err(error) = self.ask(node, &address, now_ns) {
                self.answers.insert(node, Err(error));
            }
        }
        let mut events = Vec::new();
        self.network.poll(&mut events);
        for event in events {
            if let NetworkEvent::Ready(connection) = event
                && let Some(asked) = self.asked.get_mut(&connection.0.to_bits())
            {
                asked.is_readable = true;
            }
        }
        for id in self.asked.keys().copied().collect::<Vec<_>>() {
            let Some(asked) = self.asked.get_mut(&id) else { continue };
            let answer = match drive(&mut self.network, asked) {
                None if now_ns >= asked.late_ns => Err(StatusError::Silent),
                None => continue,
                Some(answer) => answer,
            };
            let Some(asked) = self.asked.remove(&id) else { continue };
            self.network.close(asked.connection);
            self.answers.insert(asked.node, answer);
        }
        let is_busy = self.network.is_pending() || self.asked.values().any(|asked| asked.is_readable);
        match self.asked.values().map(|asked| asked.late_ns).min() {
            _ if is_busy || !self.waiting.is_empty() && self.asked.len() < ASKED_MAX => Some(now_ns),
            late_ns => late_ns,
        }
    }

    fn ask(&mut self, node: ReplicaId, address: &NodeAddress, now_ns: u64) -> Result<(), StatusError> {
        let stream = self.network.connect(&address.stream).map_err(StatusError::Unreachable)?;
        let mut link = Link::connect_at(self.identity.clone(), node, address)?;
        link.send(Frame::StatusRequest { number: REQUEST }.encode(0));
        let connection = self.network.add(stream).map_err(StatusError::Unreachable)?;
        let late_ns = now_ns + self.timeout_ns;
        let asked = Asked { node, connection, link, late_ns, is_readable: true };
        self.asked.insert(connection.0.to_bits(), asked);
        Ok(())
    }
}

/// Writes and reads what is there. Returns the answer, or why there will be none.
fn drive<N: Network>(network: &mut N, asked: &mut Asked) -> Option<Result<Value, StatusError>> {
    if !std::mem::take(&mut asked.is_readable) {
        return None;
    }
    let mut received = Vec::new();
    let driven = asked.link.drive(&mut network.stream(asked.connection), &mut received);
    let reports = received.into_iter().filter_map(|event| match event {
        LinkEvent::Frame { frame: Frame::Status { number: REQUEST, report }, .. } => Some(report),
        _ => None,
    });
    if let Some(report) = reports.into_iter().next() {
        return Some(decode(asked.node, &report));
    }
    match driven {
        Ok(is_readable) => {
            asked.is_readable = is_readable;
            None
        }
        Err(LinkError::Closed) if asked.link.is_ready() => Some(Err(StatusError::Closed)),
        Err(LinkError::Closed) => Some(Err(StatusError::Refused)),
        Err(LinkError::Failed(kind)) if !asked.link.is_ready() => {
            Some(Err(StatusError::Unreachable(kind.into())))
        }
        Err(error) => Some(Err(error.into())),
    }
}

/// The status of this node.
fn decode(node: ReplicaId, report: &[u8]) -> Result<Value, StatusError> {
    let malformed = StatusError::Malformed;
    let status: Value = json::from_slice(report).map_err(|error| malformed(error.to_string()))?;
    if let Some(error) = status["error"].as_str() {
        return Err(malformed(error.to_string()));
    }
    match status["node"].as_u64() {
        Some(found) if found == u64::from(node.0) => Ok(status),
        Some(found) => Err(malformed(format!("it is that of node {found}"))),
        None => Err(malformed("it names no node".to_string())),
    }
}

#[cfg(test)]
mod tests;
