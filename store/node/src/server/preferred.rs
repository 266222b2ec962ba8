//! Primaries of this node that are to move to the nodes that placement prefers, and when their replicas are asked to hand over.
//!
//! A group's primary is where its placement has it at first, so primaries are spread as in a new pool, and every node of the
//! cluster agrees on where they belong: none moves back. To even out counts instead would need what all nodes have, and would
//! move other groups after each change.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cluster_map::ReplicaId;

/// A group is left alone for this time after it was found on the wrong node, and after its replica was asked.
const CALM: Duration = Duration::from_secs(5);
/// The node asks one replica in this time: writes of its group wait for a moment.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// The groups whose primary this node is although placement prefers another one.
pub(super) struct PreferredPrimaries {
    /// The preferred node of each, and when its replica is asked.
    waiting: BTreeMap<u32, (ReplicaId, Instant)>,
    next_at: Instant,
}

impl PreferredPrimaries {
    pub(super) fn new(now: Instant) -> PreferredPrimaries {
        PreferredPrimaries { waiting: BTreeMap::new(), next_at: now }
    }

    /// Replaces the groups. Those that wait already, for the same node, wait no longer for that.
    pub(super) fn set(&mut self, preferred: BTreeMap<u32, ReplicaId>, now: Instant) {
        let known = std::mem::take(&mut self.waiting);
        let entry = |(group, node): (u32, ReplicaId)| {
            let at = known.get(&group).filter(|(of, _)| *of == node).map_or(now + CALM, |(_, at)| *at);
            (group, (node, at))
        };
        self.waiting = preferred.into_iter().map(entry).collect();
    }

    /// The group whose replica is to be asked now, if any, and the preferred node.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<(u32, ReplicaId)> {
        if self.deadline().is_none_or(|at| now < at) {
            return None;
        }
        let (group, (node, at)) = self.waiting.iter_mut().min_by_key(|(_, (_, at))| *at)?;
        // One that does not hand over now must not keep the others waiting.
        *at = now + CALM;
        self.next_at = now + ASK_EVERY;
        Some((*group, *node))
    }

    /// When the next one is to be asked.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let first = self.waiting.values().map(|(_, at)| *at).min();
        first.map(|at| at.max(self.next_at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(preferred: &mut PreferredPrimaries, groups: &[(u32, u32)], now: Instant) {
        preferred.set(groups.iter().map(|(group, node)| (*group, ReplicaId(*node))).collect(), now);
    }

    #[test]
    fn one_group_is_asked_at_a_time_and_none_before_it_was_calm() {
        let start = Instant::now();
        let mut preferred = PreferredPrimaries::new(start);
        assert_eq!((preferred.deadline(), preferred.take_due(start)), (None, None));
        set(&mut preferred, &[(3, 1), (4, 2)], start);
        let calm = start + CALM;
        assert_eq!(preferred.deadline(), Some(calm));
        assert_eq!(preferred.take_due(calm - Duration::from_millis(1)), None);
        // What is known is not delayed by a change of others.
        set(&mut preferred, &[(3, 1), (4, 2), (5, 2)], start + Duration::from_secs(3));
        assert_eq!(preferred.take_due(calm), Some((3, ReplicaId(1))));
        assert_eq!(preferred.take_due(calm), None);
        assert_eq!(preferred.deadline(), Some(calm + ASK_EVERY));
        assert_eq!(preferred.take_due(calm + ASK_EVERY), Some((4, ReplicaId(2))));
        // The first one has not handed over: it is asked again, and the others have their turn.
        assert_eq!(preferred.take_due(calm + Duration::from_secs(3)), Some((5, ReplicaId(2))));
        assert_eq!(preferred.take_due(calm + CALM - Duration::from_millis(1)), None);
        assert_eq!(preferred.take_due(calm + CALM), Some((3, ReplicaId(1))));
    }

    #[test]
    fn a_group_that_was_degraded_or_is_preferred_elsewhere_waits_again() {
        let start = Instant::now();
        let mut preferred = PreferredPrimaries::new(start);
        set(&mut preferred, &[(3, 1), (4, 2)], start);
        let later = start + Duration::from_secs(4);
        set(&mut preferred, &[(4, 1)], later);
        set(&mut preferred, &[(3, 1), (4, 1)], later);
        assert_eq!(preferred.deadline(), Some(later + CALM));
        set(&mut preferred, &[], later);
        assert_eq!(preferred.deadline(), None);
    }
}
