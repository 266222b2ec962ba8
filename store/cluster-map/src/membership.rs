//! How a group gets the replicas that placement wants: new members first, which become learners and get a copy; the old ones
//! leave when all new ones are in sync.

use crate::{GroupConfig, GroupRecord, PartitionSize, ReplicaId};

impl GroupRecord {
    /// The record that brings the group closer to the replicas that it is to have, if one does now. Its primary's node
    /// proposes it.
    ///
    /// No member leaves before `wanted` are as many as the pool demands (`replicas`) and all in sync, so a change never has
    /// fewer copies than the group had. The in-sync set only loses members here: only the primary says who is in sync.
    pub fn towards(&self, wanted: &[ReplicaId], replicas: usize) -> Option<GroupRecord> {
        let GroupConfig { epoch, primary, in_sync } = &self.config;
        let missing = wanted.iter().filter(|wanted| !self.replicas.contains(wanted));
        let missing: Vec<ReplicaId> = missing.copied().collect();
        let epoch = epoch + 1;
        if !missing.is_empty() {
            let config = GroupConfig { epoch, ..self.config.clone() };
            let replicas = self.replicas.iter().copied().chain(missing).collect();
            return Some(GroupRecord { config, replicas });
        }
        let is_ready = wanted.len() >= replicas && wanted.iter().all(|wanted| in_sync.contains(wanted));
        if !is_ready || self.replicas.len() == wanted.len() {
            return None;
        }
        let primary = if wanted.contains(primary) { *primary } else { wanted[0] };
        let in_sync = in_sync.iter().copied().filter(|member| wanted.contains(member)).collect();
        let config = GroupConfig { epoch, primary, in_sync };
        Some(GroupRecord { config, replicas: wanted.to_vec() })
    }

    /// The member that placement prefers as primary, if another one is the primary: the first one, as in a new group. None while
    /// a replica moves or is not in sync.
    pub fn preferred_primary(&self, wanted: &[ReplicaId], replicas: usize) -> Option<ReplicaId> {
        let GroupConfig { primary, in_sync, .. } = &self.config;
        let is_steady = wanted.len() >= replicas
            && wanted.len() == self.replicas.len()
            && wanted.iter().all(|wanted| in_sync.contains(wanted));
        let preferred = wanted.first().copied().filter(|_| is_steady)?;
        (preferred != *primary).then_some(preferred)
    }

    /// Whether a node has room for what the group uses. A member in sync has it already. One that has not said how large its
    /// partitions are may have room.
    pub fn has_room(&self, node: ReplicaId, partition: Option<PartitionSize>, used: PartitionSize) -> bool {
        self.config.has(node) || partition.is_none_or(|partition| partition.holds(used))
    }

    /// The record without members in sync that are no replicas: a learner that left meanwhile may be proposed by a primary that
    /// does not know. The primary adopts the record, and counts the learner no more.
    pub fn without_strangers(mut self) -> GroupRecord {
        let replicas = &self.replicas;
        self.config.in_sync.retain(|member| replicas.contains(member));
        self
    }

    /// Members that are to have a copy and do not yet.
    pub fn learners(&self) -> impl Iterator<Item = ReplicaId> {
        self.replicas.iter().copied().filter(|replica| !self.config.in_sync.contains(replica))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(numbers: &[u32]) -> Vec<ReplicaId> {
        numbers.iter().copied().map(ReplicaId).collect()
    }

    fn record(epoch: u32, primary: u32, in_sync: &[u32], replicas: &[u32]) -> GroupRecord {
        let config = GroupConfig { epoch, primary: ReplicaId(primary), in_sync: ids(in_sync) };
        GroupRecord { config, replicas: ids(replicas) }
    }

    #[test]
    fn members_join_before_others_leave() {
        let at = record(5, 1, &[1, 2], &[1, 2, 3]);
        let wanted = ids(&[1, 2, 4]);
        // Node 3 is out: 4 becomes a learner.
        let joined = record(6, 1, &[1, 2], &[1, 2, 3, 4]);
        assert_eq!(at.towards(&wanted, 3), Some(joined.clone()));
        assert_eq!(joined.learners().collect::<Vec<_>>(), ids(&[3, 4]));
        assert_eq!(joined.towards(&wanted, 3), None);
        // The primary found it in sync.
        let in_sync = record(7, 1, &[1, 2, 4], &[1, 2, 3, 4]);
        let done = record(8, 1, &[1, 2, 4], &[1, 2, 4]);
        assert_eq!(in_sync.towards(&wanted, 3), Some(done.clone()));
        assert_eq!(done.towards(&wanted, 3), None);
        // Node 3 is in again before that: it stays, and 4 leaves when 3 is in sync.
        let back = ids(&[1, 2, 3]);
        assert_eq!(joined.towards(&back, 3), None);
        assert_eq!(
            record(7, 1, &[1, 2, 3], &[1, 2, 3, 4]).towards(&back, 3),
            Some(record(8, 1, &[1, 2, 3], &[1, 2, 3]))
        );
    }

    #[test]
    fn a_primary_that_leaves_hands_over_to_a_member() {
        let at = record(3, 1, &[1, 2, 3], &[1, 2, 3]);
        assert_eq!(at.towards(&ids(&[2, 3]), 2), Some(record(4, 2, &[2, 3], &[2, 3])));
    }

    #[test]
    fn the_first_of_its_placement_is_preferred_as_primary_when_all_are_in_sync() {
        let wanted = ids(&[2, 1, 3]);
        let preferred = |record: GroupRecord| record.preferred_primary(&wanted, 3);
        assert_eq!(preferred(record(5, 1, &[1, 3, 2], &[1, 2, 3])), Some(ReplicaId(2)));
        assert_eq!(preferred(record(5, 2, &[1, 3, 2], &[1, 2, 3])), None);
        // One is not in sync, whichever it is.
        assert_eq!(preferred(record(5, 1, &[1, 3], &[1, 2, 3])), None);
        assert_eq!(preferred(record(5, 1, &[1, 2], &[1, 2, 3])), None);
        // One is about to move.
        assert_eq!(preferred(record(5, 1, &[1, 2, 4], &[1, 2, 4])), None);
        assert_eq!(preferred(record(5, 1, &[1, 2, 3, 4], &[1, 2, 3, 4])), None);
        // Too few nodes are in.
        assert_eq!(record(5, 1, &[1, 2], &[1, 2]).preferred_primary(&ids(&[2, 1]), 3), None);
        assert_eq!(record(5, 1, &[1], &[1]).preferred_primary(&[], 0), None);
    }

    #[test]
    fn a_learner_that_left_is_not_proposed() {
        let proposed = record(7, 2, &[2, 1, 3], &[1, 2]);
        assert!(proposed.check().is_err());
        let valid = proposed.without_strangers();
        assert_eq!(valid, record(7, 2, &[2, 1], &[1, 2]));
        valid.check().unwrap();
    }

    #[test]
    fn with_too_few_nodes_no_member_leaves() {
        let at = record(3, 1, &[1, 2], &[1, 2, 3]);
        assert_eq!(at.towards(&ids(&[1, 2]), 3), None);
        assert_eq!(at.towards(&[], 3), None);
    }

    #[test]
    fn steps_end_where_placement_wants_and_every_one_is_valid() {
        let mut random = random::WyRand::new(7);
        for _ in 0..5000 {
            let all = [1, 2, 3, 4, 5, 6];
            let pick = |random: &mut random::WyRand| {
                let mut picked = Vec::new();
                while picked.len() < 3 {
                    let id = all[random.index(all.len())];
                    if !picked.contains(&id) {
                        picked.push(id);
                    }
                }
                picked
            };
            let (before, wanted) = (pick(&mut random), ids(&pick(&mut random)));
            let mut at = record(1, before[0], &before, &before);
            for step in 0.. {
                assert!(step < 8, "{at:?} does not become {wanted:?}");
                let Some(next) = at.towards(&wanted, 3) else {
                    // The primary takes a learner that is wanted into the in-sync set.
                    let Some(learner) = at.learners().find(|it| wanted.contains(it)) else { break };
                    at.config.in_sync.push(learner);
                    at.config.epoch += 1;
                    continue;
                };
                next.check().unwrap();
                assert_eq!(next.config.epoch, at.config.epoch + 1);
                // Every member in sync was in sync before, and never are there fewer than before the change.
                assert!(next.config.in_sync.iter().all(|member| at.config.in_sync.contains(member)));
                assert!(next.config.in_sync.len() >= 3);
                at = next;
            }
            at.replicas.sort_unstable();
            let mut wanted = wanted;
            wanted.sort_unstable();
            assert_eq!(at.replicas, wanted);
        }
    }
}
