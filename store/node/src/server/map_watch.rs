//! The thread of a node that talks to the map: it hands it proposals, renews the node's lease, and gives each replica the
//! records that change. A second thread waits for changes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cluster_map::{
    ClusterMap, GroupId, GroupRecord, MapChange, MapChanges, MapError, NodeId, Proposed, ReplicaId,
};
use reactor::MailboxSender;
use replica::GroupConfig;
use sockets::StreamAddress;

use super::hub::HubInput;
use crate::{ReplicaHandle, ReplicaInput};

/// Changes are waited for this long at a time: so soon a thread that waits ends with its node.
const WAIT: Duration = Duration::from_millis(500);
/// Proposals that the map could not take are made again after this time.
const RETRY: Duration = Duration::from_millis(100);
/// Requests that wait for the thread. What finds no room waits; proposals need none.
const REQUESTS_MAX: usize = 64;
/// A lease is renewed this many times while it lasts.
const RENEWALS: u32 = 3;

/// What wakes the thread.
enum MapRequest {
    /// There are proposals.
    Proposals,
    /// The map has changed.
    Changed(Vec<MapChange>),
    /// Changes cannot be waited for.
    Failed(MapError),
    /// Ends.
    Stop,
}

/// The proposals of a node's replicas: of each group the newest one.
#[derive(Clone)]
pub(super) struct Proposals {
    pending: Arc<Mutex<BTreeMap<u32, Arc<GroupConfig>>>>,
    requests: SyncSender<MapRequest>,
}

impl Proposals {
    /// Proposes a record. The replica gets the map's answer.
    pub(super) fn add(&self, group: u32, config: Arc<GroupConfig>) {
        sync::lock(&self.pending).insert(group, config);
        // A thread that has other requests looks for proposals after them.
        let (Ok(()) | Err(TrySendError::Full(_) | TrySendError::Disconnected(_))) =
            self.requests.try_send(MapRequest::Proposals);
    }

    fn take(&self) -> BTreeMap<u32, Arc<GroupConfig>> {
        std::mem::take(&mut *sync::lock(&self.pending))
    }

    /// Proposals that were not made, unless there are newer ones.
    fn put_back(&self, proposals: BTreeMap<u32, Arc<GroupConfig>>) {
        let mut pending = sync::lock(&self.pending);
        for (group, config) in proposals {
            pending.entry(group).or_insert(config);
        }
    }
}

/// The other end of [`Proposals`], for the thread.
pub(super) struct ProposalReceiver(Receiver<MapRequest>);

/// Proposals, and what the thread receives them by.
pub(super) fn proposals() -> (Proposals, ProposalReceiver) {
    let (requests, receiver) = sync_channel(REQUESTS_MAX);
    (Proposals { pending: Arc::default(), requests }, ProposalReceiver(receiver))
}

/// What the thread needs.
pub(super) struct MapWatchConfig {
    pub(super) map: Arc<dyn ClusterMap>,
    pub(super) node: ReplicaId,
    /// Seconds after which the node is down if it does not renew its lease.
    pub(super) lease_seconds: u32,
    pub(super) groups: BTreeMap<u32, ReplicaHandle>,
    pub(super) hub: MailboxSender<HubInput>,
    pub(super) proposals: Proposals,
}

/// The threads.
pub(super) struct MapWatch {
    requests: SyncSender<MapRequest>,
    is_stopped: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

struct Watcher {
    config: MapWatchConfig,
    /// The newest records of this node's groups.
    records: BTreeMap<u32, GroupRecord>,
    /// Groups whose replica had no room for its record.
    undelivered: BTreeSet<u32>,
    /// Addresses of the nodes, as they were read last.
    nodes: BTreeMap<ReplicaId, StreamAddress>,
    renew_at: Instant,
    retry_at: Option<Instant>,
    /// The map could not be used: it is logged once.
    is_failing: bool,
}

impl MapWatch {
    pub(super) fn start(config: MapWatchConfig, ProposalReceiver(receiver): ProposalReceiver) -> MapWatch {
        let requests = config.proposals.requests.clone();
        let is_stopped = Arc::new(AtomicBool::new(false));
        let (changes, sender, stopped) = (config.map.changes(), requests.clone(), is_stopped.clone());
        std::thread::spawn(move || follow(changes, &sender, &stopped));
        let mut watcher = Watcher {
            config,
            records: BTreeMap::new(),
            undelivered: BTreeSet::new(),
            nodes: BTreeMap::new(),
            renew_at: Instant::now(),
            retry_at: None,
            is_failing: false,
        };
        let thread = std::thread::spawn(move || watcher.run(&receiver));
        MapWatch { requests, is_stopped, thread }
    }

    pub(super) fn stop(self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        let _ = self.requests.send(MapRequest::Stop);
        let _ = self.thread.join();
    }
}

/// Passes on what changes. It ends with the thread that receives it, at the latest when it has waited.
fn follow(mut changes: Box<dyn MapChanges>, requests: &SyncSender<MapRequest>, is_stopped: &AtomicBool) {
    while !is_stopped.load(Ordering::Relaxed) {
        let (request, pause) = match changes.wait(WAIT) {
            Ok(found) if found.is_empty() => continue,
            Ok(found) => (MapRequest::Changed(found), Duration::ZERO),
            Err(error) => (MapRequest::Failed(error), changes.retry_after()),
        };
        if requests.send(request).is_err() {
            return;
        }
        // Nothing says when a map can be used again.
        std::thread::sleep(pause);
    }
}

impl Watcher {
    fn run(&mut self, requests: &Receiver<MapRequest>) {
        loop {
            let now = Instant::now();
            let wake_at = self.retry_at.map_or(self.renew_at, |at| at.min(self.renew_at));
            let outcome = match requests.recv_timeout(wake_at.saturating_duration_since(now)) {
                Ok(MapRequest::Changed(changes)) => self.apply(changes),
                Ok(MapRequest::Failed(error)) => {
                    // Another endpoint is waited for; the lease says whether none answers.
                    log::debug!("changes of the map: {error}");
                    Ok(())
                }
                Ok(MapRequest::Proposals) | Err(RecvTimeoutError::Timeout) => Ok(()),
                Ok(MapRequest::Stop) | Err(RecvTimeoutError::Disconnected) => {
                    // Others see it go at once.
                    let _ = self.config.map.end_lease(NodeId(self.config.node.0));
                    return;
                }
            };
            if self.retry_at.is_some_and(|at| at <= Instant::now()) {
                self.retry_at = None;
            }
            self.deliver();
            let mut used = outcome.and_then(|()| self.propose_pending());
            if Instant::now() >= self.renew_at {
                let renewed = self.renew();
                used = used.and(renewed);
            }
            if let Err(error) = used {
                // Those that wait for the map ask again soon after it is back.
                if !std::mem::replace(&mut self.is_failing, true) {
                    log::warn!("the map cannot be used, memberships stand still: {error}");
                }
                self.retry_at = Some(Instant::now() + RETRY);
            }
        }
    }

    /// The map has answered.
    fn is_used(&mut self) {
        if std::mem::take(&mut self.is_failing) {
            log::info!("the map can be used again");
        }
    }

    fn renew(&mut self) -> Result<(), MapError> {
        let seconds = self.config.lease_seconds;
        let lease = Duration::from_secs(seconds.into());
        let renewed = self.config.map.renew_lease(NodeId(self.config.node.0), seconds);
        self.renew_at = Instant::now() + if renewed.is_ok() { lease / RENEWALS } else { RETRY };
        renewed.inspect(|()| self.is_used())
    }

    fn apply(&mut self, changes: Vec<MapChange>) -> Result<(), MapError> {
        let is_read = changes.contains(&MapChange::Everything);
        if is_read || changes.contains(&MapChange::Other) {
            self.read_nodes()?;
        }
        if is_read {
            self.read_groups()?;
        }
        for change in changes {
            if let MapChange::Group(GroupId(group), record) = change {
                self.set_record(group, record);
            }
        }
        self.is_used();
        Ok(())
    }

    /// Hands the connections the addresses of the nodes.
    fn read_nodes(&mut self) -> Result<(), MapError> {
        let mut nodes = BTreeMap::new();
        for (id, node) in self.config.map.nodes()? {
            let address = node.addresses.iter().find_map(|address| address.parse().ok());
            nodes.extend(address.map(|address| (ReplicaId(id.0), StreamAddress::Tcp(address))));
        }
        if nodes != self.nodes {
            self.nodes = nodes.clone();
            let _ = self.config.hub.send(HubInput::Nodes(nodes));
        }
        Ok(())
    }

    fn read_groups(&mut self) -> Result<(), MapError> {
        for pool in self.config.map.pools()?.values() {
            for (GroupId(group), record) in
                self.config.map.groups(pool.first_group..pool.first_group + pool.groups)?
            {
                self.set_record(group, record);
            }
        }
        Ok(())
    }

    /// Hands a replica its record.
    fn set_record(&mut self, group: u32, record: GroupRecord) {
        if !self.config.groups.contains_key(&group) {
            return;
        }
        if self.records.get(&group).is_none_or(|known| known.config.epoch <= record.config.epoch) {
            self.records.insert(group, record);
            self.undelivered.insert(group);
            self.deliver();
        }
    }

    fn deliver(&mut self) {
        let deliver = |group: &u32| {
            let (Some(replica), Some(record)) = (self.config.groups.get(group), self.records.get(group))
            else {
                return false;
            };
            !replica.send(ReplicaInput::Map(Arc::new(record.config.clone())))
        };
        self.undelivered.retain(deliver);
        if !self.undelivered.is_empty() {
            self.retry_at = Some(Instant::now() + RETRY);
        }
    }

    /// Makes the proposals that wait. Those that cannot be made wait for the next attempt.
    fn propose_pending(&mut self) -> Result<(), MapError> {
        let pending = self.config.proposals.take();
        if pending.is_empty() {
            return Ok(());
        }
        let proposed = self.propose(&pending);
        if proposed.is_err() {
            self.config.proposals.put_back(pending);
        }
        proposed.inspect(|()| self.is_used())
    }

    fn propose(&mut self, pending: &BTreeMap<u32, Arc<GroupConfig>>) -> Result<(), MapError> {
        let mut proposals = Vec::with_capacity(pending.len());
        for (group, config) in pending {
            let id = GroupId(*group);
            // The record before it says which replicas there are.
            let known = self.records.get(group).filter(|known| known.config.epoch + 1 == config.epoch);
            let known = match known {
                Some(known) => Some(known.clone()),
                None => self.config.map.group(id)?,
            };
            if let Some(GroupRecord { replicas, .. }) = known {
                proposals.push((id, GroupRecord { config: (**config).clone(), replicas }));
            }
        }
        let outcomes = self.config.map.propose_groups(&proposals)?;
        for ((GroupId(group), record), outcome) in proposals.into_iter().zip(outcomes) {
            match outcome {
                Proposed::Accepted => {
                    let GroupConfig { epoch, primary, in_sync } = &record.config;
                    let in_sync: Vec<u32> = in_sync.iter().map(|member| member.0).collect();
                    log::info!("group {group}, epoch {epoch}: primary {}, in sync {in_sync:?}", primary.0);
                    self.set_record(group, record);
                }
                Proposed::Superseded(other) => self.set_record(group, other),
                Proposed::Missing => {}
            }
        }
        Ok(())
    }
}
