//! A replica whose node is to stop: it leaves the in-sync set, and a primary hands over, before the node is silent.
//!
//! It asks the primary to propose the set without it; a primary asks a member to propose itself, and serves until it has
//! adopted that record. The one that proposes is always one that stays: its data is there when the map has the record. Then
//! the replica says to the primary that it has left, until that answers.

use crate::primary::Primary;
use crate::replica::{Replica, Role};
use crate::{GroupConfig, MessageBody, Plants, ReplicaAction, ReplicaId};

/// How far a replica has left its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaveStatus {
    /// The map or the primary has not answered.
    Pending,
    /// It is not in sync, and the primary knows.
    Left,
    /// It stays in sync: fewer replicas would be than writes need, or, if it is forced, no other one.
    TooFewInSync,
}

/// What [`ReplicaEvent::Leave`](crate::ReplicaEvent::Leave) asked for.
pub(crate) struct Leaving {
    successors: Vec<ReplicaId>,
    force: bool,
    /// It is not in sync, and the primary knows.
    is_confirmed: bool,
    /// When it last asked, and how often it did.
    asked_ns: Option<u64>,
    asked: usize,
}

impl Leaving {
    pub(crate) fn new(successors: Vec<ReplicaId>, force: bool) -> Leaving {
        Leaving { successors, force, is_confirmed: false, asked_ns: None, asked: 0 }
    }
}

impl<F: Plants> Replica<F> {
    /// How far it has left the group; `None` if it is not to.
    pub fn leave_status(&self) -> Option<LeaveStatus> {
        let leaving = self.leaving.as_ref()?;
        let is_primary_up = leaving.successors.contains(&self.config.primary);
        Some(if self.is_in_sync() {
            match self.members_without_it(leaving) {
                Some(_) => LeaveStatus::Pending,
                None => LeaveStatus::TooFewInSync,
            }
        } else if leaving.is_confirmed || !is_primary_up {
            // Before the map was read, it is no member as well.
            LeaveStatus::Left
        } else {
            LeaveStatus::Pending
        })
    }

    /// The in-sync set without this replica, if enough of it are up.
    fn members_without_it(&self, leaving: &Leaving) -> Option<Vec<ReplicaId>> {
        let others = self.config.in_sync.iter().copied().filter(|member| *member != self.id);
        let others: Vec<ReplicaId> = others.collect();
        let up = others.iter().filter(|member| leaving.successors.contains(member)).count();
        let enough = if leaving.force { 1 } else { self.settings.in_sync_min.max(1) };
        (up >= enough).then_some(others)
    }

    /// When it asks next.
    pub(crate) fn leave_deadline(&self) -> Option<u64> {
        let leaving = self.leaving.as_ref()?;
        let is_pending = self.leave_status() == Some(LeaveStatus::Pending);
        is_pending
            .then(|| leaving.asked_ns.map_or(self.now_ns, |asked_ns| asked_ns + self.settings.resend_ns))
    }

    /// Asks another replica for what it needs to leave, if that is due.
    pub(crate) fn run_leave(&mut self, actions: &mut Vec<ReplicaAction>) {
        if self.leave_deadline().is_none_or(|at_ns| self.now_ns < at_ns) {
            return;
        }
        let (asked, is_in_sync) = (self.leave_request(), self.is_in_sync());
        if let Some(leaving) = &mut self.leaving {
            // A primary may have proposed it once more meanwhile.
            leaving.is_confirmed &= !is_in_sync;
            leaving.asked_ns = Some(self.now_ns);
            leaving.asked += 1;
        }
        if let Some((to, body)) = asked {
            self.send(to, body, actions);
        }
    }

    /// Whom it asks now, and how.
    fn leave_request(&self) -> Option<(ReplicaId, MessageBody)> {
        let leaving = self.leaving.as_ref()?;
        match &self.role {
            Role::Starting => None,
            Role::Primary(primary) => {
                // Until then an earlier primary may serve, and its own commit point may be older than the true one.
                let is_early = self.now_ns < primary.act_after_ns || primary.is_comparing;
                if is_early || self.commit_point < primary.established {
                    return None;
                }
                let answers = |id: &&ReplicaId| {
                    let peer = primary.peers.get(id);
                    peer.is_some_and(|peer| {
                        peer.in_sync && peer.has_lease(self.settings.lease_ns, self.now_ns)
                    })
                };
                // Another one each time: the map may be out of reach for one of them.
                let answering: Vec<_> = leaving.successors.iter().filter(answers).collect();
                let successor = answering.get(leaving.asked.checked_rem(answering.len())?)?;
                Some((**successor, MessageBody::Leave))
            }
            Role::Follower(follower) => {
                let primary = self.config.primary;
                // One that is in sync has handed over because another one was preferred, and then was to leave.
                let hands_over = self.handed_over == self.config.epoch && !self.is_in_sync();
                let body = if hands_over { MessageBody::HandOver } else { MessageBody::Leave };
                let is_primary_up = leaving.successors.contains(&primary);
                (is_primary_up && !follower.fenced && primary != self.id).then_some((primary, body))
            }
        }
    }

    /// There is another record: it asks at once for what is left to do.
    pub(crate) fn ask_to_leave_again(&mut self) {
        if let Some(leaving) = &mut self.leaving {
            leaving.asked_ns = None;
        }
    }

    /// Members of the record before get nothing any more from which they learn that they are none: one that leaves waits for
    /// that.
    pub(crate) fn notify_removed(&self, earlier: &GroupConfig, actions: &mut Vec<ReplicaAction>) {
        for member in earlier.in_sync.iter().filter(|member| !self.config.has(**member)) {
            self.send(*member, MessageBody::Config, actions);
        }
    }

    /// It was the primary until now. Its successor serves at once if it is that of the next epoch, and this one may have
    /// served: then the leases from before have ended, and this one's are of no use.
    pub(crate) fn hand_over(
        &mut self,
        primary: &Primary,
        earlier_epoch: u32,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let is_next = self.config.epoch == earlier_epoch + 1;
        if is_next && self.now_ns >= primary.act_after_ns {
            self.handed_over = self.config.epoch;
            self.send(self.config.primary, MessageBody::HandOver, actions);
            if let Some(leaving) = &mut self.leaving {
                leaving.asked_ns = Some(self.now_ns);
            }
        } else if self.config.primary != self.id {
            // It may not know yet.
            self.send(self.config.primary, MessageBody::Config, actions);
        }
    }

    /// The primary of the epoch before serves nothing any more, and none before it does.
    pub(crate) fn on_hand_over(&mut self, from: ReplicaId, actions: &mut Vec<ReplicaAction>) {
        let now_ns = self.now_ns;
        if let Role::Primary(primary) = &mut self.role {
            primary.act_after_ns = primary.act_after_ns.min(now_ns);
            // A member stays one, until it asks to leave.
            if !self.config.has(from) {
                self.on_leave(from, actions);
            }
        }
    }

    /// Another replica wants to leave the in-sync set, or has left it: it gets no entries any more, and the answer. Or this is
    /// the answer to this one.
    pub(crate) fn on_leave(&mut self, from: ReplicaId, actions: &mut Vec<ReplicaAction>) {
        let (is_member, is_primary) = (self.config.has(from), self.config.primary == from);
        let is_complete_member = self.is_sound_member();
        match &mut self.role {
            // It may have more than this one: it asks again.
            Role::Primary(primary) if is_member && primary.is_comparing => {}
            Role::Primary(_) if is_member => self.propose_without(from, actions),
            Role::Primary(primary) => {
                // What the map may have made a member stays until the map has answered.
                if primary.peers.get(&from).is_some_and(|peer| peer.proposed) {
                    return;
                }
                if primary.peers.remove(&from).is_some() {
                    self.free_superfluous(actions);
                }
                self.send(from, MessageBody::Leave, actions);
            }
            Role::Follower(follower) if is_primary => {
                let may_take_over = is_complete_member && !follower.fenced;
                match &mut self.leaving {
                    Some(leaving) if !is_complete_member => leaving.is_confirmed = true,
                    // It answers the primary until the map has the record: that hands over then.
                    None if may_take_over => self.propose_without(from, actions),
                    _ => {}
                }
            }
            _ => {}
        }
    }

    /// Proposes itself as primary, or to stay it, without another member.
    fn propose_without(&mut self, member: ReplicaId, actions: &mut Vec<ReplicaAction>) {
        if self.proposal.is_none() && member != self.id {
            let others = self.config.in_sync.iter().copied().filter(|other| *other != member).collect();
            self.propose(self.id, others, actions);
        }
    }
}
