//! The thread of a node that talks to the map: it hands it proposals, renews the node's lease, and gives each
//! replica the records that change. A second thread waits for changes.
//!
//! The map may be an older copy of itself, as after the restoration of a snapshot. A node knows that by the
//! revision that it has seen, and by the epochs of its groups. It puts the records of groups back that it
//! knows, so that the newest of those that any node knows counts; makes and removes nothing until a person
//! [accepts](ClusterMap::accept_older) the map; and proposes nothing new before other nodes have had the time
//! to put back what they know.

mod older;
mod proposals;
mod review;

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering as AtomicOrdering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cluster_map::{
    ClusterMap, DeviceRecord, GroupId, GroupRecord, KnownMap, LeaseHolder, LeaseOutcome, MapChange,
    MapChanges, MapError, NodeId, NodeRecord, OutReason, PartitionSize, PoolClass, RecoverySettings,
    ReplicaId, ScrubSettings, TlsPolicy,
};
use reactor::{MailboxSender, ReactorHandle};
use store_link::NodeAddress;
use uuid::Uuid;

pub(super) use proposals::{ProposalReceiver, Proposals, proposals};

use super::hosting::{self, HostRequest};
use super::hub::HubInput;
use super::keys::ClientKeyTable;
use super::membership::{Membership, NoRoom};
use super::memory::{Keeper, KeeperWake, KeptMemory};
use super::preferred::PreferredPrimaries;
use super::scrub::ScrubInput;
use crate::{ReplicaHandle, ReplicaInput, ReplicaNode, StoreError};

/// Changes are waited for this long at a time: so soon a thread that waits ends with its node.
const WAIT: Duration = Duration::from_millis(500);
/// Proposals that the map could not take are made again after this time.
const RETRY: Duration = Duration::from_millis(100);
/// Who is there is read at most once in this time: of many changes the first is read at once, and the others
/// together.
const READ_TOGETHER: Duration = Duration::from_millis(200);
/// How long the thread waits at a time when it has nothing to do any more.
const TAKEN_WAIT: Duration = Duration::from_secs(3600);
/// A lease is renewed this many times while it lasts.
const RENEWALS: u32 = 3;

/// What wakes the thread.
pub(super) enum MapRequest {
    /// There are proposals.
    Proposals,
    /// The map has changed.
    Changed(Vec<MapChange>),
    /// Changes cannot be waited for.
    Failed(MapError),
    /// A replica was made, or why it was not.
    Hosted { group: u32, replica: Result<ReplicaHandle, StoreError> },
    /// A replica was removed.
    Removed { group: u32 },
    /// A partition that had failed is spare, or why it is not.
    Discarded { partition: u32, outcome: Result<(), StoreError> },
    /// The node is to stop, and others are to see that; or it goes on after all.
    Leaving(bool),
    /// Ends.
    Stop,
}

/// What the thread needs.
pub(super) struct MapWatchConfig {
    pub(super) map: Arc<dyn ClusterMap>,
    pub(super) cluster: Uuid,
    pub(super) node: ReplicaId,
    /// This process.
    pub(super) holder: LeaseHolder,
    /// The record of the node, with the address where this process listens.
    pub(super) record: NodeRecord,
    /// What the node has seen of the map.
    pub(super) known: KnownMap,
    /// What is reported of the map.
    pub(super) seen: Arc<Mutex<SeenMap>>,
    /// Called once if another process is this node.
    pub(super) taken: Box<dyn FnOnce(LeaseHolder) + Send>,
    pub(super) keys: ClientKeyTable,
    /// Seconds after which the node is down if it does not renew its lease.
    pub(super) lease_seconds: u32,
    /// How long a node is down before it is out.
    pub(super) out_after: Duration,
    pub(super) groups: BTreeMap<u32, ReplicaHandle>,
    /// The size of the node's partitions.
    pub(super) partition: PartitionSize,
    /// Number of them.
    pub(super) partitions: u32,
    /// Where a write is when the node acknowledges it.
    pub(super) class: PoolClass,
    pub(super) hub: MailboxSender<HubInput>,
    pub(super) proposals: Proposals,
    /// Groups that the node has no replica of, although it is to have one.
    pub(super) refused: Arc<Mutex<BTreeMap<u32, Refusal>>>,
    /// Groups whose primary the node has, and that have too few replicas because no other node has room.
    pub(super) without_room: Arc<Mutex<BTreeMap<u32, NoRoom>>>,
    /// The addresses of the nodes, for reports.
    pub(super) addresses: Arc<Mutex<BTreeMap<ReplicaId, NodeAddress>>>,
    /// What is kept of the node in the map.
    pub(super) memory: KeptMemory,
    /// Gets the settings of scrubs.
    pub(super) scrubs: Sender<ScrubInput>,
    /// The replicas.
    pub(super) replicas: Arc<ReplicaNode>,
    /// The reactors that own the replicas; without, replicas are neither made nor removed.
    pub(super) host: Option<Vec<ReactorHandle>>,
}

/// Why a node has no replica of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// The partition that failed, or that may be that of the group.
    pub(super) partition: Option<u32>,
    /// What is wrong.
    pub(super) why: String,
}

/// What a node has seen of the map, for its report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SeenMap {
    /// The map's revision when it was read last.
    pub(super) revision: u64,
    /// The highest that this node has seen.
    pub(super) known_revision: u64,
    /// The highest that any node has seen, if the map is older.
    pub(super) lost: Option<u64>,
    /// Groups with a replica here that the map does not know.
    pub(super) unknown_groups: Vec<u32>,
}

/// The threads.
pub(super) struct MapWatch {
    requests: SyncSender<MapRequest>,
    is_stopped: Arc<AtomicBool>,
    thread: JoinHandle<()>,
    host: Option<JoinHandle<()>>,
    keeper: Keeper,
}

struct Watcher {
    config: MapWatchConfig,
    /// Called when another process is this node; nothing is done after that.
    taken: Option<Box<dyn FnOnce(LeaseHolder) + Send>>,
    is_taken: bool,
    /// How new the map is must be read before it is used: this node starts, or could not use it.
    is_position_stale: bool,
    /// Groups of which the map may have an older record than this node knows, or another one of the same
    /// epoch.
    doubted: BTreeSet<u32>,
    /// Groups of which the map has another record of the epoch that this node knows: they are compared when
    /// the lease is renewed.
    conflicts: BTreeSet<u32>,
    /// Nothing is proposed before this time.
    propose_from: Option<Instant>,
    /// The cores that own the replicas answer while this thread waits for them.
    may_wait: bool,
    /// When it was kept.
    known_saved: Instant,
    /// What was seen cannot be kept: it is logged once.
    is_known_unsaved: bool,
    /// The newest records of the groups that the node has or is to have.
    records: BTreeMap<u32, GroupRecord>,
    /// Groups whose replica had no room for its record.
    undelivered: BTreeSet<u32>,
    membership: Membership,
    /// The device was compared with what the map has of it. Before, no replica gets a record.
    is_remembered: bool,
    /// Groups with a replica on a device that is an older copy of itself, until they are in sync.
    older: BTreeSet<u32>,
    /// How groups are scrubbed.
    scrub: Option<ScrubSettings>,
    /// By group, the losses that people accepted, as replicas know them.
    losses: BTreeMap<u32, u32>,
    keeper: KeeperWake,
    /// Addresses of the nodes, as the connections know them.
    addresses: BTreeMap<ReplicaId, NodeAddress>,
    /// Whether connections to this node use TLS, as the connections know it.
    tls: TlsPolicy,
    /// Replicas that are being made or removed.
    hosting: BTreeSet<u32>,
    /// Partitions that had failed and were to be made spare, each once.
    discarded: BTreeSet<u32>,
    host: Option<Sender<HostRequest>>,
    /// All groups are to be read.
    is_groups_stale: bool,
    /// The rest is to be read, but not before this time.
    read_at: Option<Instant>,
    /// Changes are not read before this time, so that many are read together.
    read_from: Instant,
    /// Something changed that may move a replica.
    is_to_review: bool,
    /// Groups are not where they are wanted because there is no room: what they use changes without a change
    /// of the map.
    waits_for_room: bool,
    preferred: PreferredPrimaries,
    renew_at: Instant,
    /// Its lease is ended, and not renewed.
    is_leaving: bool,
    retry_at: Option<Instant>,
    /// The map could not be used: it is logged once.
    is_failing: bool,
    /// Why the keys of clients cannot be read: it is logged once.
    unreadable_key: Option<String>,
}

impl MapWatch {
    pub(super) fn start(
        mut config: MapWatchConfig,
        ProposalReceiver(receiver): ProposalReceiver,
    ) -> MapWatch {
        let requests = config.proposals.requests.clone();
        let is_stopped = Arc::new(AtomicBool::new(false));
        let (changes, sender, stopped) = (config.map.changes(), requests.clone(), is_stopped.clone());
        std::thread::spawn(move || follow(changes, &sender, &stopped));
        let may_wait = config.host.is_some();
        let host = config.host.take().map(|reactors| {
            let ((sender, receiver), outcomes) = (channel(), requests.clone());
            let node = config.replicas.clone();
            (sender, std::thread::spawn(move || hosting::run(&node, &reactors, &receiver, &outcomes)))
        });
        let (host, host_thread) = host.unzip();
        let keeper = Keeper::start(config.memory.clone());
        let taken = std::mem::replace(&mut config.taken, Box::new(drop));
        // A device may have seen more than the node's directory, which is put back from a copy alone, and the
        // other way round.
        config.known.note_revision(config.replicas.memory().state().map_revision);
        let of_replicas = |(GroupId(group), record): (GroupId, &GroupRecord)| {
            let has_replica = config.groups.contains_key(&group) || config.replicas.may_have_failed(group);
            has_replica.then(|| (group, record.clone()))
        };
        // What this node knew when it ran last: a map that says something older is not believed.
        let records: BTreeMap<_, _> = config.known.groups().filter_map(of_replicas).collect();
        for (group, record) in &records {
            let _ = config.hub.send(HubInput::Members { group: *group, replicas: record.replicas.clone() });
        }
        let tls = config.record.tls;
        let mut watcher = Watcher {
            keeper: keeper.waker(),
            config,
            taken: Some(taken),
            is_taken: false,
            is_position_stale: true,
            doubted: BTreeSet::new(),
            conflicts: BTreeSet::new(),
            propose_from: None,
            may_wait,
            known_saved: Instant::now(),
            is_known_unsaved: false,
            records,
            undelivered: BTreeSet::new(),
            membership: Membership::default(),
            is_remembered: false,
            older: BTreeSet::new(),
            scrub: None,
            losses: BTreeMap::new(),
            addresses: BTreeMap::new(),
            tls,
            hosting: BTreeSet::new(),
            discarded: BTreeSet::new(),
            host,
            is_groups_stale: false,
            read_at: None,
            read_from: Instant::now(),
            is_to_review: false,
            waits_for_room: false,
            preferred: PreferredPrimaries::new(Instant::now()),
            renew_at: Instant::now(),
            is_leaving: false,
            retry_at: None,
            is_failing: false,
            unreadable_key: None,
        };
        let thread = std::thread::spawn(move || watcher.run(&receiver));
        MapWatch { requests, is_stopped, thread, host: host_thread, keeper }
    }

    /// Ends the node's lease, or renews it again.
    pub(super) fn set_leaving(&self, is_leaving: bool) {
        let _ = self.requests.send(MapRequest::Leaving(is_leaving));
    }

    pub(super) fn stop(self) {
        self.is_stopped.store(true, AtomicOrdering::Relaxed);
        let _ = self.requests.send(MapRequest::Stop);
        // The receiver of what the last replica's outcome is goes with the first thread.
        let _ = self.thread.join();
        self.host.map(JoinHandle::join);
        self.keeper.stop();
    }
}

/// Passes on what changes. It ends with the thread that receives it, at the latest when it has waited.
fn follow(mut changes: Box<dyn MapChanges>, requests: &SyncSender<MapRequest>, is_stopped: &AtomicBool) {
    while !is_stopped.load(AtomicOrdering::Relaxed) {
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
            match requests.recv_timeout(self.wake_at().saturating_duration_since(Instant::now())) {
                Ok(MapRequest::Changed(changes)) => self.note(changes),
                // Another endpoint is waited for; the lease says whether none answers.
                Ok(MapRequest::Failed(error)) => {
                    self.is_position_stale = true;
                    log::debug!("changes of the map: {error}");
                }
                Ok(MapRequest::Hosted { group, replica }) => self.hosted(group, replica),
                Ok(MapRequest::Removed { group }) => {
                    self.hosting.remove(&group);
                    self.restored([group]);
                    // Others may find a partition now.
                    sync::lock(&self.config.refused).clear();
                    self.is_to_review = true;
                }
                Ok(MapRequest::Discarded { partition, outcome }) => self.discarded(partition, outcome),
                Ok(MapRequest::Proposals) | Err(RecvTimeoutError::Timeout) => {}
                Ok(MapRequest::Leaving(is_leaving)) => {
                    self.is_leaving = is_leaving;
                    self.renew_at = Instant::now();
                    if is_leaving && let Err(error) = self.end_lease() {
                        log::debug!("others do not see yet that this node stops: {error}");
                    }
                }
                Ok(MapRequest::Stop) | Err(RecvTimeoutError::Disconnected) => {
                    // Others see it go at once.
                    let _ = self.end_lease();
                    self.host = None;
                    // Who stops it may be the core that it would wait for.
                    self.may_wait = false;
                    self.save_known();
                    return;
                }
            };
            if self.retry_at.is_some_and(|at| at <= Instant::now()) {
                self.retry_at = None;
            }
            if self.is_taken {
                continue;
            }
            let restored = std::mem::take(&mut *sync::lock(&self.config.proposals.restored));
            self.restored(restored);
            self.deliver();
            if let Err(error) = self.use_map() {
                self.is_position_stale = true;
                if !std::mem::replace(&mut self.is_failing, true) {
                    log::warn!("the map cannot be used, memberships stand still: {error}");
                }
                // Those that wait for the map ask again soon after it is back.
                self.retry_at = Some(Instant::now() + RETRY);
            }
            self.save_known();
            self.ask_to_hand_over();
        }
    }

    fn end_lease(&self) -> Result<(), MapError> {
        self.config.map.end_lease(NodeId(self.config.node.0), &self.config.holder)
    }

    fn wake_at(&self) -> Instant {
        if self.is_taken {
            return Instant::now() + TAKEN_WAIT;
        }
        // What waits for the map waits for the next attempt, if one failed.
        let read_at = self.read_at.filter(|_| self.retry_at.is_none());
        [self.retry_at, read_at, self.ask_at(), self.propose_from]
            .into_iter()
            .flatten()
            .fold(self.renew_at, Instant::min)
    }

    /// Everything that needs the map. Proposals come first: groups wait for them. A process that may be this
    /// node no more proposes nothing, and what the map is worth is known before it is changed.
    fn use_map(&mut self) -> Result<(), MapError> {
        let is_due = Instant::now() >= self.renew_at;
        let renewed = if is_due { self.renew() } else { Ok(()) };
        if self.is_taken {
            return Ok(());
        }
        self.remember()?;
        if self.is_position_stale {
            self.read_position()?;
        }
        self.put_back()?;
        let proposed = self.propose_pending();
        let now = Instant::now();
        renewed?;
        if is_due {
            self.mark_overdue()?;
            self.is_to_review |= self.waits_for_room;
            self.doubted.append(&mut self.conflicts);
        }
        proposed?;
        if self.read_at.is_some_and(|at| at <= now) {
            self.read_membership()?;
            if self.is_taken {
                return Ok(());
            }
        }
        if self.is_groups_stale {
            self.read_groups()?;
            self.put_back()?;
        }
        if std::mem::take(&mut self.is_to_review) {
            self.review().inspect_err(|_| self.is_to_review = true)?;
        }
        if !self.doubted.is_empty() {
            self.retry_at = Some(Instant::now() + RETRY);
        }
        self.is_used();
        Ok(())
    }

    /// Compares the device with what the map has of it, once.
    fn remember(&mut self) -> Result<(), MapError> {
        if self.is_remembered {
            return Ok(());
        }
        let remembered = self.config.memory.compare()?;
        for (group, memory) in &remembered.groups {
            let replica = self.config.groups.get(group);
            if replica.is_some_and(|replica| !replica.send(ReplicaInput::Memory(*memory))) {
                let what = format!("record of group {group}");
                return Err(MapError::Storage { what, reason: "its core is busy".to_string() });
            }
        }
        if remembered.is_older {
            // What failed may be as old.
            let failed = self.config.replicas.failed_partitions().into_iter().filter_map(|it| it.group);
            self.older = remembered.groups.into_keys().chain(failed).collect();
        }
        self.is_remembered = true;
        self.deliver();
        Ok(())
    }

    /// Replicas of an older device are in sync again, or gone.
    fn restored(&mut self, groups: impl IntoIterator<Item = u32>) {
        let was_older = !self.older.is_empty();
        for group in groups {
            self.older.remove(&group);
        }
        if was_older && self.older.is_empty() {
            self.config.memory.is_restored();
        }
    }

    /// Passes on what people have decided about replicas of this node.
    fn read_losses(&mut self) -> Result<(), MapError> {
        let losses = self.config.map.accepted_losses()?;
        let epochs = losses.iter().map(|(group, loss)| (group.0, loss.epoch)).collect();
        for (GroupId(group), loss) in losses {
            let is_new = self.losses.insert(group, loss.epoch) != Some(loss.epoch);
            if is_new
                && loss.node == self.config.node
                && let Some(replica) = self.config.groups.get(&group)
                && !replica.send(ReplicaInput::AcceptLoss { epoch: loss.epoch })
            {
                self.losses.remove(&group);
            }
        }
        self.config.memory.accept(&epochs);
        Ok(())
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
        let renewed = match self.is_leaving {
            true => Ok(LeaseOutcome::Held),
            false => self.config.map.renew_lease(NodeId(self.config.node.0), &self.config.holder, seconds),
        };
        self.renew_at = Instant::now() + if renewed.is_ok() { lease / RENEWALS } else { RETRY };
        if let LeaseOutcome::Taken(other) = renewed? {
            self.stop_for(other);
        }
        Ok(())
    }

    /// Another process is this node: this one serves nothing any more.
    fn stop_for(&mut self, other: LeaseHolder) {
        log::error!(
            "another process is node {}, and listens on {}: this one serves no more",
            self.config.node.0,
            other.address
        );
        self.is_taken = true;
        let _ = self.config.hub.send(HubInput::Fence);
        self.taken.take().into_iter().for_each(|taken| taken(other.clone()));
    }

    /// Notes what changed; it is read when the map is used.
    fn note(&mut self, changes: Vec<MapChange>) {
        for change in changes {
            match change {
                MapChange::Group(GroupId(group), record) => self.set_record(group, record),
                MapChange::Everything => {
                    self.is_position_stale = true;
                    self.is_groups_stale = true;
                    self.read_at = Some(Instant::now());
                }
                MapChange::Other if self.read_at.is_none() => {
                    self.read_at = Some(self.read_from.max(Instant::now()));
                }
                MapChange::Other => {}
            }
        }
    }

    /// Reads who is there, and hands the connections the addresses of the nodes.
    fn read_membership(&mut self) -> Result<(), MapError> {
        self.read_position()?;
        let (known, pools) = (self.membership.partitions.clone(), self.membership.pools.clone());
        let recovery = self.membership.recovery;
        self.membership.read(&*self.config.map, self.config.cluster, Instant::now())?;
        (self.read_at, self.read_from) = (None, Instant::now() + READ_TOGETHER);
        if self.membership.partitions != known || self.membership.pools != pools {
            self.undelivered.extend(self.config.groups.keys());
            self.deliver();
        }
        self.is_to_review = true;
        self.recover_as(recovery);
        self.scrub_as(self.membership.pools != pools)?;
        self.read_keys()?;
        self.read_losses()?;
        let addresses = self.membership.addresses();
        if addresses != self.addresses {
            self.addresses = addresses.clone();
            sync::lock(&self.config.addresses).clone_from(&addresses);
            let _ = self.config.hub.send(HubInput::Nodes(addresses));
        }
        let tls = self.membership.node(self.config.node).map_or(self.tls, |own| own.tls);
        if tls != self.tls {
            log::info!("TLS of connections to this node is {} now, and was {}", tls.name(), self.tls.name());
            self.tls = tls;
            let _ = self.config.hub.send(HubInput::Tls(tls));
        }
        self.register()?;
        if self.is_taken {
            return Ok(());
        }
        if self.membership.out_reason(self.config.node) == Some(OutReason::Down) {
            log::info!("this node was out because it was down, and is in again");
            self.config.map.set_out(NodeId(self.config.node.0), None)?;
        }
        self.record_own_device().inspect_err(|_| self.read_at = Some(Instant::now()))?;
        self.mark_overdue()
    }

    /// Follows how operators want the cluster to recover, if that was another way before.
    fn recover_as(&self, before: RecoverySettings) {
        let RecoverySettings { noout, rate } = self.membership.recovery;
        if noout != before.noout {
            log::info!("noout is {} now", if noout { "on" } else { "off" });
        }
        if rate != before.rate {
            match rate {
                Some(rate) => log::info!("this node copies {rate} bytes a second at most"),
                None => log::info!("copies of this node have no rate any more"),
            }
            self.config.replicas.set_recovery_rate(rate);
        }
    }

    /// Follows how operators want groups to be scrubbed, if that or the pools have changed.
    fn scrub_as(&mut self, are_other_pools: bool) -> Result<(), MapError> {
        let settings = self.config.map.scrub()?;
        if are_other_pools || self.scrub.as_ref() != Some(&settings) {
            let _ = self.config.scrubs.send(ScrubInput::Settings(settings.clone(), self.membership.ranges()));
            self.scrub = Some(settings);
        }
        Ok(())
    }

    /// Reads the keys of clients, and hands the connections those that changed.
    fn read_keys(&mut self) -> Result<(), MapError> {
        match self.config.keys.update(&*self.config.map, &self.membership.pools) {
            Ok(false) => {}
            Ok(true) => {
                let _ = self.config.hub.send(HubInput::Keys(self.config.keys.grants()));
            }
            // What cannot be read gives no rights and takes none: memberships do not wait for it.
            Err(error @ MapError::Record { .. }) => {
                if self.unreadable_key.as_ref() != Some(&error.to_string()) {
                    log::warn!("the keys of clients stay as they were: {error}");
                }
                self.unreadable_key = Some(error.to_string());
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        self.unreadable_key = None;
        Ok(())
    }

    /// Says in the map where this node listens, if it says something else: a copy of the node was there
    /// meanwhile, or the map is older.
    fn register(&mut self) -> Result<(), MapError> {
        let (id, record) = (NodeId(self.config.node.0), &self.config.record);
        match self.membership.node(self.config.node) {
            Some(known) if known.uuid != record.uuid => {
                // An operator replaced it.
                let address = known.addresses.first().cloned().unwrap_or_default();
                self.stop_for(LeaseHolder { id: Uuid::nil(), address, place: String::new() });
                Ok(())
            }
            Some(known) if known.addresses == record.addresses => Ok(()),
            Some(known) => {
                let record = NodeRecord { addresses: record.addresses.clone(), ..known.clone() };
                self.config.map.put_node(id, &record)
            }
            None => self.config.map.put_node(id, record),
        }
    }

    /// Says in the map how large this node's partitions are and how many, if it does not say so: primaries
    /// accept what fits everywhere, and pools get what is free; and what its devices are, for clients. The
    /// map's change is read as that of another node.
    fn record_own_device(&self) -> Result<(), MapError> {
        let Some((id, device)) = self.membership.device_of(NodeId(self.config.node.0)) else { return Ok(()) };
        let known = DeviceRecord {
            partition: Some(self.config.partition),
            partitions: Some(self.config.partitions),
            class: Some(self.config.class),
            ..device.clone()
        };
        if known != *device {
            self.config.map.put_device(id, &known)?;
        }
        Ok(())
    }

    /// Says which nodes are out because they are down for too long.
    fn mark_overdue(&mut self) -> Result<(), MapError> {
        if self.is_map_older() {
            return Ok(());
        }
        let (node, after) = (self.config.node, self.config.out_after);
        for overdue in self.membership.overdue(node, after, Instant::now()) {
            // One that came back meanwhile is none.
            if !self.config.map.nodes_up()?.contains(&overdue) {
                log::warn!("node {} is down for {} s, and out", overdue.0, after.as_secs());
                self.config.map.set_out(overdue, Some(OutReason::Down))?;
                self.read_at = Some(Instant::now());
            }
        }
        Ok(())
    }

    fn read_groups(&mut self) -> Result<(), MapError> {
        let mut unread: BTreeSet<u32> = self.records.keys().copied().collect();
        for pool in self.membership.pools().collect::<Vec<_>>() {
            for (GroupId(group), record) in self.config.map.groups(pool)? {
                unread.remove(&group);
                self.set_record(group, record);
            }
        }
        // The map has none of these.
        self.doubted.extend(unread);
        self.is_groups_stale = false;
        Ok(())
    }

    /// Takes the record of a group, if the node has or is to have a replica of it.
    fn set_record(&mut self, group: u32, record: GroupRecord) {
        let is_known = self.config.groups.contains_key(&group) || self.records.contains_key(&group);
        let is_known = is_known || self.config.replicas.failed_partition_of(group).is_some();
        if !is_known && !record.replicas.contains(&self.config.node) {
            return;
        }
        let known = self.records.get(&group);
        let is_doubtful = |known: &GroupRecord| match record.config.epoch.cmp(&known.config.epoch) {
            Ordering::Less => true,
            Ordering::Equal => *known != record,
            Ordering::Greater => false,
        };
        if known.is_some_and(is_doubtful) {
            // It may only be late.
            self.doubted.insert(group);
            return;
        }
        self.doubted.remove(&group);
        self.is_to_review |= known != Some(&record);
        if known.is_none_or(|known| known.replicas != record.replicas) {
            let replicas = record.replicas.clone();
            let _ = self.config.hub.send(HubInput::Members { group, replicas });
        }
        if self.config.groups.contains_key(&group) {
            self.config.known.note_group(GroupId(group), &record);
        }
        self.records.insert(group, record);
        self.undelivered.insert(group);
        self.deliver();
        self.keeper.wake();
    }

    /// When a primary is to be asked to hand over to the preferred node. Without the map nothing is known of
    /// that node.
    fn ask_at(&self) -> Option<Instant> {
        let may_ask = !self.is_leaving && self.retry_at.is_none();
        self.preferred.deadline().filter(|_| may_ask)
    }

    fn ask_to_hand_over(&mut self) {
        let now = Instant::now();
        if self.ask_at().is_none_or(|at| now < at) {
            return;
        }
        if let Some((group, node)) = self.preferred.take_due(now)
            && let Some(replica) = self.config.groups.get(&group)
        {
            replica.send(ReplicaInput::PreferredPrimary(node));
        }
    }

    fn deliver(&mut self) {
        if !self.is_remembered {
            return;
        }
        // An older copy of the map may have other pools: it is not believed.
        let is_older = self.is_map_older();
        let deliver = |group: &u32| {
            let (Some(replica), Some(record)) = (self.config.groups.get(group), self.records.get(group))
            else {
                return false;
            };
            let partitions = self.membership.partitions_of(&record.replicas);
            let pool = self.membership.pool_of(*group).filter(|_| !is_older);
            let demand = pool.map(|pool| ReplicaInput::InSyncMin(pool.in_sync_min as usize));
            let knows_pool = demand.is_none_or(|demand| replica.send(demand));
            let is_delivered = knows_pool
                && replica.send(ReplicaInput::Partitions(partitions))
                && replica.send(ReplicaInput::Map(Arc::new(record.config.clone())));
            !is_delivered
        };
        self.undelivered.retain(deliver);
        if !self.undelivered.is_empty() {
            self.retry_at = Some(Instant::now() + RETRY);
        }
    }
}
