//! Which replicas a node has, and where those of its groups are to be: it makes and removes its own, and proposes moves.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::Sender;
use std::time::Instant;

use cluster_map::{GroupId, GroupRecord, MapError, ReplicaId};

use super::{Refusal, Watcher};
use crate::server::hosting::HostRequest;
use crate::server::hub::HubInput;
use crate::server::membership::{NoRoom, Placement};
use crate::{FailedPartition, PoolOptions, ReplicaHandle, StoreError};

/// Groups that a primary's node moves at a time.
const MOVES_MAX: usize = 4;

impl Watcher {
    /// Makes and removes replicas as the records say, and proposes records as placement wants.
    pub(super) fn review(&mut self) -> Result<(), MapError> {
        if !self.membership.is_known {
            return Ok(());
        }
        self.report_unknown();
        if self.is_map_older() {
            // Nothing moves, and nothing is made or removed.
            self.preferred.set(BTreeMap::new(), Instant::now());
            return Ok(());
        }
        self.review_hosting();
        let node = self.config.node;
        let is_moving = |record: &GroupRecord, wanted: &[ReplicaId]| {
            record.learners().any(|it| wanted.contains(&it) && self.membership.is_up(it))
        };
        let (mut moving, mut moves) = (0, Vec::new());
        let (mut without_room, mut waits_for_room) = (BTreeMap::new(), false);
        let mut preferred = BTreeMap::new();
        for (group, record) in self.records.iter().filter(|(_, record)| record.config.primary == node) {
            let Some(replica) = self.config.groups.get(group) else { continue };
            let Some(pool) = self.membership.pool_of(*group) else { continue };
            let replicas = pool.replicas as usize;
            let used = replica.used();
            let Placement { nodes: wanted, without_room: unfit, no_room } =
                self.membership.wanted(*group, replicas, record, used);
            waits_for_room |= !unfit.is_empty() || no_room.is_some();
            without_room.extend(no_room.map(|no_room| (*group, no_room)));
            if is_moving(record, &wanted) {
                moving += 1;
            }
            if let Some(next) = record.towards(&wanted, replicas) {
                moves.push((GroupId(*group), next));
            }
            let are_up = wanted.iter().all(|node| self.membership.is_up(*node));
            let other = record.preferred_primary(&wanted, replicas).filter(|_| are_up);
            preferred.extend(other.map(|other| (*group, other)));
        }
        self.preferred.set(preferred, Instant::now());
        self.waits_for_room = waits_for_room;
        self.report_room(without_room);
        // A copy has the device to itself: few at a time.
        moves.retain(|(GroupId(group), next)| {
            let is_copy = next.replicas.len() > self.records[group].replicas.len();
            moving += usize::from(is_copy);
            !is_copy || moving <= MOVES_MAX
        });
        self.propose_records(moves)
    }

    /// Lists the groups with a replica here that the map does not know, and logs those that are new.
    pub(super) fn report_unknown(&self) {
        let is_unknown =
            |group: &u32| self.membership.pool_of(*group).is_none() && !self.membership.is_removed(*group);
        let unknown: Vec<u32> = self.config.groups.keys().copied().filter(is_unknown).collect();
        let mut seen = sync::lock(&self.config.seen);
        if !unknown.is_empty() && unknown != seen.unknown_groups {
            log::warn!("the map has no pool with groups {unknown:?}, whose replicas here are kept");
        }
        seen.unknown_groups = unknown;
    }

    /// Lists the groups for which too few nodes have room, and logs those that are new.
    pub(super) fn report_room(&self, without_room: BTreeMap<u32, NoRoom>) {
        let mut reported = sync::lock(&self.config.without_room);
        for (group, no_room) in without_room.iter().filter(|(group, _)| !reported.contains_key(group)) {
            log::warn!("group {group} has too few replicas: {no_room}");
        }
        *reported = without_room;
    }

    pub(super) fn review_hosting(&mut self) {
        let Some(host) = self.host.clone() else { return };
        let node = self.config.node;
        for group in self.config.groups.keys().copied().collect::<Vec<_>>() {
            let is_member = self.records.get(&group).is_none_or(|record| record.replicas.contains(&node));
            if is_member && !self.membership.is_removed(group) {
                continue;
            }
            // It is no member any more: its data is superfluous.
            self.config.groups.remove(&group);
            self.records.remove(&group);
            self.config.known.forget_group(GroupId(group));
            let _ = self.config.hub.send(HubInput::Replicas(self.config.groups.clone()));
            self.hosting.insert(group);
            let _ = host.send(HostRequest::Remove { group });
        }
        self.review_failed(&host);
        for (group, record) in &self.records {
            let is_here = self.config.groups.contains_key(group) || !record.replicas.contains(&node);
            let Some(pool) = self.membership.pool_of(*group).filter(|_| !is_here) else { continue };
            if !sync::lock(&self.config.refused).contains_key(group) && self.hosting.insert(*group) {
                // Nothing is served in the first epoch: the first primary takes another one.
                let (is_new, pool) = (record.config.epoch == 1, PoolOptions::from(pool));
                let _ = host.send(HostRequest::Add { group: *group, is_new, pool });
            }
        }
        let config = &self.config;
        self.records.retain(|group, record| {
            let is_here = config.groups.contains_key(group) || record.replicas.contains(&node);
            is_here || config.replicas.failed_partition_of(*group).is_some()
        });
    }

    /// A partition that failed is kept while what it has may be the only copy. If others are in sync, and
    /// this node is not, it is made spare, once in a run of the node: the group's replica here gets a copy
    /// then.
    fn review_failed(&mut self, host: &Sender<HostRequest>) {
        let failed = self.config.replicas.failed_partitions();
        let named: BTreeSet<u32> = failed.iter().filter_map(|it| it.group).collect();
        // One whose group is not known may be that of any of these.
        let missing = self.records.keys().copied().filter(|group| {
            !self.config.groups.contains_key(group) && !named.contains(group) && self.is_needed(*group)
        });
        let missing: Vec<u32> = missing.collect();
        let mut refused = sync::lock(&self.config.refused);
        for FailedPartition { index, group, reason } in failed {
            let groups = group.map_or_else(|| missing.clone(), |group| vec![group]);
            let is_kept = groups.iter().any(|group| self.is_needed(*group));
            if !is_kept && self.discarded.insert(index) {
                log::warn!("partition {index} is discarded: other nodes have what it had");
                let _ = host.send(HostRequest::Discard { partition: index });
            }
            for group in groups {
                refused.insert(group, Refusal { partition: Some(index), why: reason.clone() });
            }
        }
    }

    /// Whether this node may have what no other one has of a group.
    fn is_needed(&self, group: u32) -> bool {
        // In the first epoch nothing is written.
        let is_member = |record: &GroupRecord| record.config.epoch > 1 && record.config.has(self.config.node);
        match self.membership.pool_of(group) {
            Some(_) => self.records.get(&group).is_none_or(is_member),
            None => !self.membership.is_removed(group),
        }
    }

    /// A partition that had failed is spare now, or it is not.
    pub(super) fn discarded(&mut self, partition: u32, outcome: Result<(), StoreError>) {
        self.is_to_review = true;
        if let Err(error) = outcome {
            return log::error!("partition {partition} cannot be made spare: {error}");
        }
        // Others may find a partition now.
        let refused = std::mem::take(&mut *sync::lock(&self.config.refused));
        let of_partition = refused.into_iter().filter(|(_, it)| it.partition == Some(partition));
        self.restored(of_partition.map(|(group, _)| group).collect::<Vec<_>>());
    }

    pub(super) fn hosted(&mut self, group: u32, replica: Result<ReplicaHandle, StoreError>) {
        self.hosting.remove(&group);
        match replica {
            Ok(replica) => {
                log::info!("group {group}: this node has a replica now");
                sync::lock(&self.config.refused).remove(&group);
                self.config.groups.insert(group, replica);
                if let Some(record) = self.records.get(&group) {
                    self.config.known.note_group(GroupId(group), record);
                }
                let _ = self.config.hub.send(HubInput::Replicas(self.config.groups.clone()));
                self.undelivered.insert(group);
                self.is_to_review = true;
                self.deliver();
            }
            Err(error) => {
                log::error!("group {group}: this node can have no replica: {error}");
                let partition = self.config.replicas.failed_partition_of(group).map(|it| it.index);
                let refusal = Refusal { partition, why: error.to_string() };
                sync::lock(&self.config.refused).insert(group, refusal);
            }
        }
    }
}
