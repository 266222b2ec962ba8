//! What the map keeps of nodes and groups, so that a device which is an older copy of itself is not believed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use wire_replica::{EntryId, ReplicaId};

/// What a node has seen. It writes this at each start, when the record of a group changes, at times between,
/// and when it stops.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeMemory {
    /// The identity of its device. Another device has a past of its own.
    pub device: Uuid,
    /// Starts of the node with this device. A device that has fewer is an older copy.
    pub incarnation: u64,
    /// By logical group, what its replica has as committed: every member of an in-sync set has at least that.
    #[serde(default)]
    pub groups: BTreeMap<u32, GroupProgress>,
}

/// How far a group is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u32, u32, u64)", into = "(u32, u32, u64)")]
pub struct GroupProgress {
    /// Epoch of the group's record.
    pub epoch: u32,
    /// The last entry that is committed.
    pub committed: EntryId,
}

impl From<(u32, u32, u64)> for GroupProgress {
    fn from((epoch, of_entry, sequence): (u32, u32, u64)) -> GroupProgress {
        GroupProgress { epoch, committed: EntryId { sequence, epoch: of_entry } }
    }
}

impl From<GroupProgress> for (u32, u32, u64) {
    fn from(GroupProgress { epoch, committed }: GroupProgress) -> (u32, u32, u64) {
        (epoch, committed.epoch, committed.sequence)
    }
}

impl GroupProgress {
    /// The later one of two. What was committed up to the epoch in which a person accepted a loss counts no
    /// more.
    pub fn later(self, other: GroupProgress, loss_epoch: u32) -> GroupProgress {
        let counts = |it: GroupProgress| it.epoch > loss_epoch;
        let age = |it: GroupProgress| (counts(it), it.committed.epoch, it.committed.sequence);
        let epoch = self.epoch.max(other.epoch);
        let newer = if age(other) > age(self) { other } else { self };
        if counts(newer) { GroupProgress { epoch, ..newer } } else { GroupProgress::default() }
    }
}

/// A person has decided that a replica serves which lacks what its group had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedLoss {
    /// The node of the replica.
    #[serde(with = "as_number")]
    pub node: ReplicaId,
    /// The epoch of the group's record then.
    pub epoch: u32,
}

mod as_number {
    use serde::{Deserialize, Deserializer, Serializer};
    use wire_replica::ReplicaId;

    pub(super) fn serialize<S: Serializer>(node: &ReplicaId, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u32(node.0)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<ReplicaId, D::Error> {
        u32::deserialize(from).map(ReplicaId)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_committed_before_an_accepted_loss_counts_no_more() {
        let progress = |epoch, of_entry, sequence| GroupProgress::from((epoch, of_entry, sequence));
        assert_eq!(progress(3, 2, 50).later(progress(4, 3, 40), 0), progress(4, 3, 40));
        assert_eq!(progress(3, 3, 50).later(progress(4, 3, 40), 0), progress(4, 3, 50));
        assert_eq!(progress(3, 3, 50).later(progress(5, 2, 40), 4), progress(5, 2, 40));
        assert_eq!(progress(3, 3, 50).later(progress(4, 2, 40), 4), GroupProgress::default());
    }
}
