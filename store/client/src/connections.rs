//! The connections of a channel to the nodes of a cluster.

use std::collections::BTreeMap;
use std::sync::Arc;

use cluster_map::ReplicaId;
use reactor::Core;
use sockets::{ConnectionId, CoreNetwork, Network, NetworkEvent};
use store_link::{Identity, Link, LinkError, LinkEvent, NodeAddress};
use wire_replica::{EncodedFrame, Frame};

/// A node that refused a connection, or lost it, is tried again after this time.
const RECONNECT_NS: u64 = 20_000_000;
/// A node that ends connections before it answers anything is tried again after twice the time before, up to
/// this one: it may have as many connections as it takes.
const RECONNECT_MAX_NS: u64 = 1_000_000_000;
/// After this number of them in a row there is a line in the log.
const UNANSWERED_LOGGED: u32 = 4;
/// A connection that is not ready after this time is given up.
const GREETING_NS: u64 = 1_000_000_000;

/// A node, and the connection to it.
struct NodeConnection {
    address: NodeAddress,
    link: Option<(ConnectionId, Link)>,
    /// When it may be connected to again, or the greetings are too late.
    at_ns: u64,
    /// Something is queued.
    is_dirty: bool,
    /// It is of another cluster, has another key, or does not take this client's.
    is_foreign: bool,
    /// Connections in a row that were ready, and that the node ended before it answered anything.
    unanswered: u32,
}

impl NodeConnection {
    fn new(address: &NodeAddress) -> NodeConnection {
        NodeConnection {
            address: address.clone(),
            link: None,
            at_ns: 0,
            is_dirty: false,
            is_foreign: false,
            unanswered: 0,
        }
    }

    /// The connection has ended. Says when the next one may be made.
    fn ended(&mut self, was_ready: bool, now_ns: u64) {
        self.link = None;
        let wait_ns = RECONNECT_NS << self.unanswered.min(16);
        self.at_ns = now_ns + wait_ns.min(RECONNECT_MAX_NS);
        // One that answers begins with 0 again.
        self.unanswered = if was_ready { self.unanswered.saturating_add(1) } else { self.unanswered };
    }
}

/// The connections of one channel. Those that are not needed are not made.
pub(crate) struct Connections<N: Network> {
    network: N,
    identity: Arc<Identity>,
    nodes: BTreeMap<ReplicaId, NodeConnection>,
    by_connection: BTreeMap<u64, ReplicaId>,
    events: Vec<NetworkEvent<N::Stream>>,
    received: Vec<LinkEvent>,
    /// Connections with more to read than one turn took.
    unread: Vec<ReplicaId>,
}

impl<N: CoreNetwork> Connections<N> {
    pub(crate) fn new(
        core: &Core,
        identity: Arc<Identity>,
        nodes: &BTreeMap<ReplicaId, NodeAddress>,
    ) -> Connections<N> {
        Connections {
            network: N::of_core(core),
            identity,
            nodes: nodes.iter().map(|(id, address)| (*id, NodeConnection::new(address))).collect(),
            by_connection: BTreeMap::new(),
            events: Vec::new(),
            received: Vec::new(),
            unread: Vec::new(),
        }
    }

    /// The nodes have these addresses now. A connection to an old one ends by itself.
    pub(crate) fn set_addresses(&mut self, nodes: &BTreeMap<ReplicaId, NodeAddress>) {
        for (id, address) in nodes {
            let node = self.nodes.entry(*id).or_insert_with(|| NodeConnection::new(address));
            node.address = address.clone();
        }
    }

    /// Queues a message to a node; `false` if it cannot be reached now.
    pub(crate) fn send(
        &mut self,
        node: ReplicaId,
        frame: impl FnOnce() -> EncodedFrame,
        now_ns: u64,
    ) -> bool {
        let Some(to) = self.nodes.get_mut(&node) else { return false };
        if to.link.is_none() {
            if now_ns < to.at_ns {
                return false;
            }
            to.at_ns = now_ns + RECONNECT_NS;
            let connect =
                self.network.connect(&to.address.stream).and_then(|stream| self.network.add(stream));
            let link = Link::connect_at(self.identity.clone(), node, &to.address);
            let (Ok(connection), Ok(link)) = (connect, link) else { return false };
            to.at_ns = now_ns + GREETING_NS;
            to.link = Some((connection, link));
            self.by_connection.insert(connection.0.to_bits(), node);
        }
        if let Some((_, link)) = &mut to.link {
            link.send(frame());
            to.is_dirty = true;
        }
        true
    }

    /// Writes what is queued, and reads. Messages go to `sink`; nodes whose connections ended to `lost`.
    pub(crate) fn poll(
        &mut self,
        now_ns: u64,
        mut sink: impl FnMut(ReplicaId, Frame),
        mut lost: impl FnMut(ReplicaId),
    ) -> usize {
        let mut work = self.network.poll(&mut self.events);
        let ready = self.events.drain(..).filter_map(|event| match event {
            NetworkEvent::Ready(connection) => self.by_connection.get(&connection.0.to_bits()).copied(),
            _ => None,
        });
        // Those that are only written to are marked, and come second.
        let ready = ready.chain(self.unread.drain(..)).map(|id| (id, false));
        let mut ready: Vec<(ReplicaId, bool)> = ready.collect();
        for (id, node) in &mut self.nodes {
            let is_late =
                node.link.as_ref().is_some_and(|(_, link)| !link.is_ready()) && now_ns >= node.at_ns;
            if is_late || std::mem::take(&mut node.is_dirty) {
                ready.push((*id, true));
            }
        }
        ready.sort_unstable();
        ready.dedup_by_key(|(id, _)| *id);
        for (id, is_written_only) in ready {
            let Some(node) = self.nodes.get_mut(&id) else { continue };
            let Some((connection, link)) = &mut node.link else { continue };
            let mut stream = self.network.stream(*connection);
            let driven = match is_written_only {
                true => link.write(&mut stream).map(|()| false),
                false => link.drive(&mut stream, &mut self.received),
            };
            let is_late = !link.is_ready() && now_ns >= node.at_ns;
            for event in self.received.drain(..) {
                work += 1;
                if let LinkEvent::Frame { frame, .. } = event {
                    node.unanswered = 0;
                    sink(id, frame);
                }
            }
            let error = match driven {
                Ok(false) if !is_late => continue,
                Ok(true) => {
                    self.unread.push(id);
                    continue;
                }
                Ok(false) => LinkError::Failed(std::io::ErrorKind::TimedOut),
                Err(error) => error,
            };
            match error {
                LinkError::Closed | LinkError::Failed(_) => log::debug!("node {}: {error}", id.0),
                _ if node.is_foreign => {}
                _ => log::error!("node {}: {error}", id.0),
            }
            node.is_foreign = matches!(error, LinkError::Key | LinkError::Cluster | LinkError::ClientKey(_));
            self.by_connection.remove(&connection.0.to_bits());
            self.network.close(*connection);
            let was_ready = link.is_ready();
            node.ended(was_ready, now_ns);
            if was_ready && node.unanswered == UNANSWERED_LOGGED {
                log::warn!(
                    "node {} ends connections before it answers: it may have as many of clients with this key as it takes, \
                     and its log says so then",
                    id.0
                );
            }
            lost(id);
        }
        work
    }

    /// Each of these nodes is of another cluster, has another key, or does not take this client's: to wait
    /// does not help.
    pub(crate) fn are_foreign(&self, nodes: &[ReplicaId]) -> bool {
        !nodes.is_empty() && nodes.iter().all(|node| self.nodes.get(node).is_some_and(|node| node.is_foreign))
    }

    /// When it has something to do, if nothing arrives before.
    pub(crate) fn deadline(&self) -> Option<u64> {
        if self.network.is_pending()
            || !self.unread.is_empty()
            || self.nodes.values().any(|node| node.is_dirty)
        {
            return Some(0);
        }
        let greeting = |node: &NodeConnection| node.link.as_ref().is_some_and(|(_, link)| !link.is_ready());
        self.nodes.values().filter(|node| greeting(node)).map(|node| node.at_ns).min()
    }
}

#[cfg(test)]
mod tests;
