//! A node that is to stop leaves the in-sync sets of its groups first, so that no lease has to end for it.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use cluster_map::{NodeId, ReplicaId};
use replica::LeaveStatus;

use super::NodeServer;
use crate::{ReplicaInput, StoreError};

/// Nodes that are stopped within this time, as all of a machine or of a cluster are, do not hand over to each other. Nothing
/// says that no other one follows.
const SETTLE: Duration = Duration::from_millis(100);

impl NodeServer {
    /// Has other nodes take over from this one, which then is in no in-sync set. It blocks the thread, for `limit` and the
    /// time that the map takes at most. The node serves meanwhile, and is closed or [stays](Self::stay) then.
    ///
    /// With `force` a group is left where another replica is in sync, although writes need more.
    ///
    /// # Errors
    /// [`StoreError::TooFewInSync`], [`StoreError::NotLeft`]; [`StoreError::LeaveMap`] if the map cannot be used.
    pub fn leave(&self, force: bool, limit: Duration) -> Result<(), StoreError> {
        let end = Instant::now() + limit;
        self.set_leaving(true);
        std::thread::sleep(SETTLE);
        let mut up = self.cluster_map.nodes_up().map_err(StoreError::LeaveMap)?;
        up.remove(&NodeId(self.id().0));
        let (outcome, outcomes) = channel();
        let mut pending = BTreeSet::new();
        for group in self.report.node.groups() {
            let mut successors: Vec<_> = up.iter().map(|node| ReplicaId(node.0)).collect();
            if !successors.is_empty() {
                // Each of them becomes the primary of some groups.
                let first = group as usize % successors.len();
                successors.rotate_left(first);
            }
            let leave = ReplicaInput::Leave { successors, force, outcome: outcome.clone() };
            if self.report.node.replica(group).is_some_and(|replica| replica.send(leave)) {
                pending.insert(group);
            }
        }
        // The channel closes when the last replica has answered or failed.
        drop(outcome);
        let mut too_few = Vec::new();
        loop {
            match outcomes.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok((group, status)) => {
                    pending.remove(&group);
                    too_few.extend((status == LeaveStatus::TooFewInSync).then_some(group));
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    return Err(StoreError::NotLeft { groups: pending.into_iter().collect(), limit });
                }
            }
        }
        too_few.sort_unstable();
        match too_few.is_empty() {
            true => Ok(()),
            false => Err(StoreError::TooFewInSync { groups: too_few }),
        }
    }

    /// The node goes on after all; groups that it has left catch up.
    pub fn stay(&self) {
        for group in self.report.node.groups() {
            if let Some(replica) = self.report.node.replica(group) {
                replica.send(ReplicaInput::Stay);
            }
        }
        self.set_leaving(false);
    }

    fn set_leaving(&self, is_leaving: bool) {
        self.report.is_leaving.store(is_leaving, Ordering::Relaxed);
        self.map.iter().for_each(|map| map.set_leaving(is_leaving));
    }
}
