//! A primary that hands over to the member that placement prefers.
//!
//! After a failure or a restart another member has taken over, and stays primary: nodes that were restarted first would have
//! too many primaries, and the last one few. Only the primary proposes another one, and changes nothing else; it serves until it
//! has adopted that record. It waits until the record has been the same for a while with all members in sync, so a member that
//! comes and goes moves it once in that time at most.

use crate::primary::is_silent;
use crate::replica::{Replica, Role};
use crate::{PlantedReplicaFault, Plants, ReplicaAction, ReplicaId};

impl<F: Plants> Replica<F> {
    /// Proposes a member as primary in its place, if nothing else happens to the group.
    pub(crate) fn on_preferred_primary(&mut self, preferred: ReplicaId, actions: &mut Vec<ReplicaAction>) {
        let Role::Primary(primary) = &self.role else { return };
        let (now_ns, lease_ns, epoch_ns) = (self.now_ns, self.settings.lease_ns, primary.epoch_ns);
        let is_calm = now_ns >= epoch_ns + self.settings.transfer_after_ns
            && self.leaving.is_none()
            && self.proposal.is_none()
            && self.primary_blocked(primary).is_none();
        // A learner is about to be a member, or was one and comes back.
        let are_in_sync = primary
            .peers
            .values()
            .all(|peer| peer.in_sync && peer.known && !is_silent(peer, epoch_ns, lease_ns, now_ns));
        let is_known = primary.peers.contains_key(&preferred);
        let unprepared = self.has_fault(PlantedReplicaFault::TransferUnprepared);
        if is_calm && is_known && (are_in_sync || unprepared) {
            let mut in_sync = self.config.in_sync.clone();
            if unprepared && !in_sync.contains(&preferred) {
                in_sync.push(preferred);
            }
            self.propose(preferred, in_sync, actions);
        }
    }

    /// Whether it is a primary that has proposed another one. If a member becomes silent before the map answers, it proposes to
    /// go on without that one instead: the map takes one of the two.
    pub(crate) fn is_transferring(&self) -> bool {
        let proposed = self.proposal.as_ref().map(|proposal| proposal.config.primary);
        matches!(self.role, Role::Primary(_)) && proposed.is_some_and(|primary| primary != self.id)
    }
}
