//! The thread of a node that reads the map, and hands it proposals.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use cluster_map::{ClusterMap, GroupId, GroupRecord, MapError, Proposed, ReplicaId};
use reactor::MailboxSender;
use replica::GroupConfig;
use sockets::StreamAddress;

use super::hub::HubInput;
use crate::{ReplicaHandle, ReplicaInput};

/// How often the map is read: others' changes arrive with their messages as well.
const READ_EVERY: Duration = Duration::from_millis(500);

/// What the thread does.
pub(super) enum MapRequest {
    /// Proposes a record.
    Propose { group: u32, config: Arc<GroupConfig> },
    /// Ends.
    Stop,
}

/// The thread.
pub(super) struct MapWatch {
    requests: Sender<MapRequest>,
    thread: JoinHandle<()>,
}

struct Watcher {
    map: Arc<dyn ClusterMap>,
    groups: BTreeMap<u32, ReplicaHandle>,
    hub: MailboxSender<HubInput>,
    /// Addresses of the nodes, as they were read last.
    nodes: BTreeMap<ReplicaId, StreamAddress>,
    /// The last read failed: it is logged once.
    is_failing: bool,
}

impl MapWatch {
    pub(super) fn start(
        map: Arc<dyn ClusterMap>,
        groups: BTreeMap<u32, ReplicaHandle>,
        hub: MailboxSender<HubInput>,
        requests: Sender<MapRequest>,
        receiver: Receiver<MapRequest>,
    ) -> MapWatch {
        let mut watcher = Watcher { map, groups, hub, nodes: BTreeMap::new(), is_failing: false };
        let thread = std::thread::spawn(move || watcher.run(&receiver));
        MapWatch { requests, thread }
    }

    pub(super) fn stop(self) {
        let _ = self.requests.send(MapRequest::Stop);
        let _ = self.thread.join();
    }
}

impl Watcher {
    fn run(&mut self, requests: &Receiver<MapRequest>) {
        loop {
            let read = self.read();
            self.report(read);
            match requests.recv_timeout(READ_EVERY) {
                Ok(MapRequest::Propose { group, config }) => {
                    let proposed = self.propose(group, config);
                    self.report(proposed);
                }
                Ok(MapRequest::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn report(&mut self, outcome: Result<(), MapError>) {
        match outcome {
            Err(error) if !self.is_failing => {
                log::warn!("the map cannot be used, memberships stand still: {error}");
                self.is_failing = true;
            }
            Ok(()) if self.is_failing => {
                log::info!("the map can be used again");
                self.is_failing = false;
            }
            _ => {}
        }
    }

    /// Hands each replica its record, and the connections the addresses.
    fn read(&mut self) -> Result<(), MapError> {
        let mut nodes = BTreeMap::new();
        for (id, node) in self.map.nodes()? {
            let address = node.addresses.iter().find_map(|address| address.parse().ok());
            nodes.extend(address.map(|address| (ReplicaId(id.0), StreamAddress::Tcp(address))));
        }
        if nodes != self.nodes {
            self.nodes = nodes.clone();
            let _ = self.hub.send(HubInput::Nodes(nodes));
        }
        for (group, replica) in &self.groups {
            if let Some(record) = self.map.group(GroupId(*group))? {
                replica.send(ReplicaInput::Map(Arc::new(record.config)));
            }
        }
        Ok(())
    }

    fn propose(&self, group: u32, config: Arc<GroupConfig>) -> Result<(), MapError> {
        let Some(known) = self.map.group(GroupId(group))? else { return Ok(()) };
        let record = GroupRecord { config: (*config).clone(), replicas: known.replicas };
        let now = match self.map.propose_group(GroupId(group), &record)? {
            Proposed::Accepted => {
                let GroupConfig { epoch, primary, in_sync } = &record.config;
                let in_sync: Vec<u32> = in_sync.iter().map(|member| member.0).collect();
                log::info!("group {group}, epoch {epoch}: primary {}, in sync {in_sync:?}", primary.0);
                record.config
            }
            Proposed::Superseded(other) => other.config,
            Proposed::Missing => return Ok(()),
        };
        if let Some(replica) = self.groups.get(&group) {
            replica.send(ReplicaInput::Map(Arc::new(now)));
        }
        Ok(())
    }
}
