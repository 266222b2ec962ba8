//! The space that a group uses, and which of its replicas have room for it.

use std::sync::atomic::{AtomicU64, Ordering};

use cluster_map::PartitionSize;
use objects::{SpaceNeed, SpaceUse};
use replica::{ReplicaEvent, ReplicaId};

use super::Shard;

/// What a shard uses of its partition, for any thread.
#[derive(Default)]
pub(crate) struct UsedSpace(AtomicU64);

impl UsedSpace {
    fn set(&self, used: PartitionSize) {
        self.0.store(u64::from(used.extents) << 32 | u64::from(used.onodes), Ordering::Relaxed);
    }

    /// As of the last batch in place or checkpoint.
    pub(crate) fn get(&self) -> PartitionSize {
        let bits = self.0.load(Ordering::Relaxed);
        PartitionSize { extents: (bits >> 32) as u32, onodes: bits as u32 }
    }
}

impl Shard {
    /// What is in use when all accepted entries are in place.
    fn used_space(&self) -> PartitionSize {
        let space = self.partition.space_use();
        PartitionSize {
            extents: space.used_extents() + self.reserved.extents,
            onodes: space.objects + self.reserved.onodes,
        }
    }

    /// Publishes the space in use, and notifies the replica which members of its group have room for that: these may learn. A
    /// member whose partition is of unknown size has none until its node has reported it: a copy would end it when it is full.
    pub(super) fn update_room(&mut self) {
        let used = self.used_space();
        self.used.set(used);
        let Some(replication) = &mut self.replication else { return };
        let has_room = |size: &Option<PartitionSize>| size.is_some_and(|size| size.holds(used));
        let learners = replication.partitions.iter().filter(|(_, size)| has_room(size));
        let learners: Vec<ReplicaId> = learners.map(|(id, _)| *id).collect();
        // Before the map's first record names members there is no event, and every replica may ask.
        if replication.learners != learners {
            replication.learners.clone_from(&learners);
            replication.events.push_back(ReplicaEvent::Learners(learners));
        }
    }

    /// Space of this partition that the smallest one of the group does not have. One that is too small for what the group
    /// has already is not counted: it can have no replica.
    pub(super) fn only_here(&self, partitions: &[(ReplicaId, Option<PartitionSize>)]) -> SpaceNeed {
        let SpaceUse { extents, onodes, .. } = self.partition.space_use();
        let used = self.used_space();
        let mut excess = SpaceNeed::default();
        for partition in partitions.iter().filter_map(|(_, size)| *size).filter(|size| size.holds(used)) {
            excess.extents = excess.extents.max(extents.saturating_sub(partition.extents));
            excess.onodes = excess.onodes.max(onodes.saturating_sub(partition.onodes));
        }
        excess
    }
}
