//! Proposals of replicas, on their way to the map.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use cluster_map::{GroupId, GroupRecord, MapError, Proposed, ReplicaId};
use replica::GroupConfig;

use super::{MapRequest, Watcher};

/// Requests that wait for the thread. What finds no room waits; proposals need none.
const REQUESTS_MAX: usize = 64;

/// The proposals of a node's replicas: of each group the newest one.
#[derive(Clone)]
pub(in crate::server) struct Proposals {
    pub(super) pending: Arc<Mutex<BTreeMap<u32, Arc<GroupConfig>>>>,
    /// Groups whose replica here lacked something, and is in sync again.
    pub(super) restored: Arc<Mutex<BTreeSet<u32>>>,
    pub(super) requests: SyncSender<MapRequest>,
}

impl Proposals {
    /// Proposes a record. The replica gets the map's answer.
    pub(in crate::server) fn add(&self, group: u32, config: Arc<GroupConfig>) {
        sync::lock(&self.pending).insert(group, config);
        self.wake();
    }

    /// A replica that lacked something is in sync again.
    pub(in crate::server) fn restored(&self, group: u32) {
        sync::lock(&self.restored).insert(group);
        self.wake();
    }

    pub(super) fn wake(&self) {
        // A thread that has other requests looks for proposals after them.
        let (Ok(()) | Err(TrySendError::Full(_) | TrySendError::Disconnected(_))) =
            self.requests.try_send(MapRequest::Proposals);
    }

    pub(super) fn take(&self) -> BTreeMap<u32, Arc<GroupConfig>> {
        std::mem::take(&mut *sync::lock(&self.pending))
    }

    /// Proposals that were not made, unless there are newer ones.
    pub(super) fn put_back(&self, proposals: BTreeMap<u32, Arc<GroupConfig>>) {
        let mut pending = sync::lock(&self.pending);
        for (group, config) in proposals {
            pending.entry(group).or_insert(config);
        }
    }
}

/// The other end of [`Proposals`], for the thread.
pub(in crate::server) struct ProposalReceiver(pub(super) Receiver<MapRequest>);

/// Proposals, and what the thread receives them by.
pub(in crate::server) fn proposals() -> (Proposals, ProposalReceiver) {
    let (requests, receiver) = sync_channel(REQUESTS_MAX);
    let (pending, restored) = (Arc::default(), Arc::default());
    (Proposals { pending, restored, requests }, ProposalReceiver(receiver))
}

impl Watcher {
    /// Makes the proposals that wait. Those that cannot be made wait for the next attempt.
    pub(super) fn propose_pending(&mut self) -> Result<(), MapError> {
        if self.propose_from.is_some_and(|from| Instant::now() < from) {
            return Ok(());
        }
        self.propose_from = None;
        let pending = self.config.proposals.take();
        if pending.is_empty() {
            return Ok(());
        }
        let proposed = self.propose(&pending);
        if proposed.is_err() {
            self.config.proposals.put_back(pending);
        }
        proposed
    }

    pub(super) fn propose(&mut self, pending: &BTreeMap<u32, Arc<GroupConfig>>) -> Result<(), MapError> {
        let mut proposals = Vec::with_capacity(pending.len());
        for (group, config) in pending {
            let id = GroupId(*group);
            // The record before it says which replicas there are.
            let known = self.records.get(group).filter(|known| known.config.epoch + 1 == config.epoch);
            let known = match known {
                Some(known) => Some(known.clone()),
                None => self.config.map.group(id)?,
            };
            let Some(GroupRecord { replicas, .. }) = known else { continue };
            let record = GroupRecord { config: (**config).clone(), replicas }.without_strangers();
            match record.check() {
                Ok(()) => proposals.push((id, record)),
                Err(error) => log::error!("group {group}: a proposal is dropped: {error}"),
            }
        }
        self.propose_records(proposals)
    }

    pub(super) fn propose_records(&mut self, proposals: Vec<(GroupId, GroupRecord)>) -> Result<(), MapError> {
        if proposals.is_empty() {
            return Ok(());
        }
        let outcomes = self.config.map.propose_groups(&proposals)?;
        for ((GroupId(group), record), outcome) in proposals.into_iter().zip(outcomes) {
            match outcome {
                Proposed::Accepted => {
                    let GroupConfig { epoch, primary, in_sync } = &record.config;
                    let numbers = |ids: &[ReplicaId]| ids.iter().map(|id| id.0).collect::<Vec<_>>();
                    let (in_sync, replicas) = (numbers(in_sync), numbers(&record.replicas));
                    let primary = primary.0;
                    log::info!(
                        "group {group}, epoch {epoch}: primary {primary}, in sync {in_sync:?} of {replicas:?}"
                    );
                    self.set_record(group, record);
                }
                Proposed::Superseded(other) => {
                    let is_older = other.config.epoch + 1 < record.config.epoch;
                    self.set_record(group, other);
                    if is_older {
                        self.propose_later(group, record);
                    }
                }
                Proposed::Missing => self.propose_later(group, record),
            }
        }
        Ok(())
    }

    /// Proposes a record again when the one before it was put back into the map, which lacks it.
    pub(super) fn propose_later(&mut self, group: u32, record: GroupRecord) {
        if self.records.get(&group).is_some_and(|known| known.config.epoch + 1 == record.config.epoch) {
            self.doubted.insert(group);
            self.config.proposals.put_back([(group, Arc::new(record.config))].into());
        }
    }
}
