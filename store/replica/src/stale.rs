//! Replicas that lack what they had: their device is an older copy, their log is damaged, or ends before what
//! is known to be committed.
//!
//! What a log has tells nothing of what it had. So a restarted replica is believed only once its log was
//! compared:
//!
//! - What is kept outside of its device comes first ([`GroupMemory`]). A member that has less is *stale*: it
//!   answers no primary and becomes none, says so, leaves the in-sync set, and catches up as any learner
//!   does.
//! - A primary that was not compared since its start asks every member where its log ends, and truncates,
//!   appends and serves nothing before all have answered ([`MessageBody::LogEnd`]), or have left the in-sync
//!   set. The one whose last entry has the highest epoch, and of these the highest sequence, has every
//!   committed entry: the primary hands over to it.
//! - A follower was compared once it has all that a primary has which was compared, as that answers a
//!   question of this run: a message that was sent before the follower's start may say less than it had
//!   acknowledged. So a takeover from a primary that fails asks no other member.
//! - A member that hears of a commit point after the end of its log is stale. Nothing that is known to be
//!   committed is truncated: a replica that has more of it than the primary stays as it is, for a person to
//!   decide.

use crate::follower::Follower;
use crate::replica::{GroupBlocked, Replica, Role};
use crate::{EntryId, MessageBody, PlantedReplicaFault, Plants, ReplicaAction, ReplicaId, log_end_object};

/// What is known of a replica and its group from elsewhere than its device, at its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupMemory {
    /// The newest entry that any node is known to have committed. Every member of the in-sync set has it.
    pub committed: EntryId,
    /// The device is an older copy of itself.
    pub is_older: bool,
    /// In this epoch a person has accepted that entries of earlier epochs are lost; 0 for never.
    pub loss_epoch: u32,
}

/// Why a replica is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StaleReason {
    /// Its device is an older copy of itself.
    OlderDevice,
    /// An entry in the middle of its log is damaged.
    DamagedLog,
    /// Its log ends before what the map has as committed.
    BehindMap,
    /// Its log ended before what other replicas have as committed.
    BehindOthers,
}

impl StaleReason {
    /// For people.
    pub fn text(self) -> &'static str {
        match self {
            StaleReason::OlderDevice => "its device is an older copy of itself",
            StaleReason::DamagedLog => "an entry in the middle of its log is damaged",
            StaleReason::BehindMap => "its log ends before what the map has as committed",
            StaleReason::BehindOthers => "its log ended before what other replicas have as committed",
        }
    }
}

/// The order of last entries: a primary has a newer epoch than all before it, and appends after all that was
/// committed.
fn age(last: EntryId) -> (u32, u64) {
    (last.epoch, last.sequence)
}

impl<F: Plants> Replica<F> {
    /// The last entry that is committed, as far as known; `None` while objects are copied.
    pub fn committed(&self) -> Option<EntryId> {
        self.log.id(self.commit_point).filter(|_| self.complete)
    }

    /// Whether it is a member that has all that members had at some time since its start.
    pub fn is_compared(&self) -> bool {
        self.is_compared && self.is_sound_member()
    }

    /// A member that has what a member has to have.
    pub(crate) fn is_sound_member(&self) -> bool {
        self.is_in_sync() && self.complete && self.stale.is_none()
    }

    /// Entries up to here are committed for certain. The commit point of a start is older.
    pub(crate) fn known_committed(&self) -> u64 {
        self.commit_point.max(self.proven)
    }

    /// What was known from elsewhere at the start.
    pub fn memory(&self) -> GroupMemory {
        self.memory
    }

    /// The last entry of the log.
    pub fn last_entry(&self) -> EntryId {
        self.log.id(self.log.end()).expect("the log has its last entry, or the one before")
    }

    /// Judges what the start found, when the map's record is known.
    pub(crate) fn judge(&mut self, is_member: bool) {
        let is_older = self.memory.is_older && !self.has_fault(PlantedReplicaFault::IncarnationUnchecked);
        self.stale = if is_older {
            Some(StaleReason::OlderDevice)
        } else if self.is_damaged && self.complete {
            Some(StaleReason::DamagedLog)
        } else {
            (is_member && self.complete && self.is_behind_map()).then_some(StaleReason::BehindMap)
        };
    }

    /// Whether the log ends before what was known to be committed at the start.
    fn is_behind_map(&self) -> bool {
        let (committed, last) = (self.memory.committed, self.last_entry());
        let is_another = self.log.id(committed.sequence).is_some_and(|known| known != committed);
        let is_behind = committed.sequence > last.sequence || committed.epoch > last.epoch || is_another;
        is_behind && !self.has_fault(PlantedReplicaFault::RecordUnchecked)
    }

    /// Entries that it had are not there: it is believed no more, until it is in sync again.
    pub(crate) fn become_stale(&mut self, reason: StaleReason) {
        self.stale.get_or_insert(reason);
        self.is_compared = false;
    }

    /// Another record of the map has been adopted.
    pub(crate) fn membership_changed(&mut self, was_member: bool, actions: &mut Vec<ReplicaAction>) {
        if !self.is_in_sync() {
            self.is_compared = false;
        } else if !was_member && self.complete {
            match &self.role {
                Role::Follower(follower) if follower.is_caught_up => self.become_compared(actions),
                // What an earlier run had made it a member.
                Role::Follower(_) if self.is_behind_map() => self.become_stale(StaleReason::BehindMap),
                _ => {}
            }
        }
    }

    /// It has everything that a member has to have.
    pub(crate) fn become_compared(&mut self, actions: &mut Vec<ReplicaAction>) {
        self.is_compared = true;
        self.is_damaged = false;
        if self.stale.take().is_some() {
            actions.push(ReplicaAction::Restored);
        }
    }

    /// A person has decided that what this replica lacks is lost. It compares its log with those of the
    /// members that are there.
    pub(crate) fn on_accept_loss(&mut self, epoch: u32, actions: &mut Vec<ReplicaAction>) {
        self.memory.loss_epoch = self.memory.loss_epoch.max(epoch);
        self.accepted_epoch = self.accepted_epoch.max(epoch);
        if !self.takes_accepted_loss(actions) {
            return;
        }
        if self.proposal.is_none() {
            self.propose(self.id, self.config.in_sync.clone(), actions);
        }
        if let Role::Follower(follower) = &mut self.role {
            follower.fenced = true;
        }
    }

    /// What it lacks counts as lost, if that was accepted in the record's epoch.
    pub(crate) fn takes_accepted_loss(&mut self, actions: &mut Vec<ReplicaAction>) -> bool {
        let may_serve = self.stale.is_some() && self.is_in_sync() && self.complete;
        if !may_serve || self.accepted_epoch < self.config.epoch {
            return false;
        }
        self.stale = None;
        self.is_damaged = false;
        actions.push(ReplicaAction::Restored);
        true
    }

    /// The primary's history is another one. A member, and a replica with entries that were not given up,
    /// stays as it is; another one gets a copy of all objects.
    pub(crate) fn contradict(&mut self, actions: &mut Vec<ReplicaAction>) {
        if self.is_in_sync() {
            // The primary compares again.
            let commit_point = self.known_committed();
            return self.answer_mismatch(commit_point, actions);
        }
        let loss_epoch = self.memory.loss_epoch;
        if loss_epoch > 0 && self.last_entry().epoch <= loss_epoch {
            self.complete = false;
            return self.join(actions);
        }
        self.contradicts = true;
    }

    /// Whether it is a primary that does not know yet whether others have more.
    pub(crate) fn is_comparing(&self) -> bool {
        matches!(&self.role, Role::Primary(primary) if primary.is_comparing)
    }

    /// A member says where its log ends.
    pub(crate) fn on_log_end(&mut self, from: ReplicaId, sent_ns: u64, last: EntryId, committed: u64) {
        let now_ns = self.now_ns;
        if let Some(peer) = self.peer(from, 0) {
            peer.lease_from_ns = peer.lease_from_ns.max(Some(sent_ns.min(now_ns)));
            peer.log_end = Some((last, committed));
            peer.is_compared = true;
        }
    }

    /// A follower that was not compared since its start asks where the primary's log ends.
    pub(crate) fn ask_primary_log_end(&mut self, actions: &mut Vec<ReplicaAction>) {
        let (now_ns, number) = (self.now_ns, self.sessions + 1);
        let Role::Follower(follower) = &self.role else { return };
        let is_due = self.asks_log_end(follower)
            && follower.asked_log_end.is_none_or(|(_, sent_ns)| now_ns >= sent_ns + self.settings.resend_ns);
        if is_due {
            // Unlike reads, sessions differ from those before a restart in the same epoch.
            self.sessions = number;
            self.follower().asked_log_end = Some((number, now_ns));
            let object = log_end_object(self.settings.group);
            let fetch = MessageBody::Fetch { number, object, offset: 0, length: 1 };
            self.send(self.config.primary, fetch, actions);
        }
    }

    fn asks_log_end(&self, follower: &Follower) -> bool {
        let is_behind = !self.is_compared && follower.primary_log_end.is_none();
        is_behind && self.is_sound_member() && !follower.fenced && self.config.primary != self.id
    }

    /// When it asks next.
    pub(crate) fn log_end_deadline(&self, follower: &Follower) -> Option<u64> {
        let (_, sent_ns) = follower.asked_log_end.filter(|_| self.asks_log_end(follower))?;
        Some(sent_ns + self.settings.resend_ns)
    }

    /// A member asks where this primary's log ends.
    pub(crate) fn answer_log_end(&mut self, from: ReplicaId, number: u64, actions: &mut Vec<ReplicaAction>) {
        let through = self.log.end();
        if matches!(self.role, Role::Primary(_)) && !self.is_comparing() && self.stale.is_none() {
            let data = Some([0].into());
            self.send(from, MessageBody::Fetched { number, through, data }, actions);
        }
    }

    /// The primary may have answered where its log ends. Returns whether it has.
    pub(crate) fn on_primary_log_end(&mut self, from: ReplicaId, number: u64, through: u64) -> bool {
        let primary = self.config.primary;
        let Role::Follower(follower) = &mut self.role else { return false };
        if from != primary || follower.asked_log_end.is_none_or(|(asked, _)| asked != number) {
            return false;
        }
        follower.primary_log_end = Some(through);
        self.compare_with_primary();
        true
    }

    /// The follower was compared if it has all that the primary had since it asked.
    pub(crate) fn compare_with_primary(&mut self) {
        let Role::Follower(follower) = &self.role else { return };
        let has_all = follower.primary_log_end.is_some_and(|end| self.has_matched(end));
        self.is_compared |= has_all && self.is_sound_member();
    }

    /// Ends the comparison when all have answered, or hands over to a member that has more.
    pub(crate) fn compare_logs(&mut self, actions: &mut Vec<ReplicaAction>) {
        let (own, known) = (self.last_entry(), self.known_committed());
        let Role::Primary(primary) = &self.role else { return };
        if !primary.is_comparing {
            return;
        }
        let members = primary.peers.iter().filter(|(_, peer)| peer.in_sync && !peer.lost);
        let ends = members.clone().filter_map(|(id, peer)| Some((*id, peer.log_end?)));
        let newest = ends.clone().max_by_key(|(_, (last, _))| age(*last));
        if let Some((successor, _)) = newest.filter(|(_, (last, _))| age(*last) > age(own)) {
            let committed = ends.map(|(_, (_, committed))| committed).max().unwrap_or(0);
            return self.yield_to(successor, committed > own.sequence, actions);
        }
        if !members.clone().all(|(_, peer)| peer.is_compared) {
            return;
        }
        // One of these has less than it had.
        let lacks = |(last, committed): (EntryId, u64)| last.sequence < known || committed > own.sequence;
        let lost: Vec<ReplicaId> = ends.filter(|(_, end)| lacks(*end)).map(|(id, _)| id).collect();
        self.end_comparison(&lost, actions);
    }

    /// Proposes the member that has more, once for each epoch. One that lacks what is committed leaves with
    /// that.
    fn yield_to(&mut self, successor: ReplicaId, is_behind: bool, actions: &mut Vec<ReplicaAction>) {
        if self.proposal.is_some() {
            return;
        }
        let mut in_sync = self.config.in_sync.clone();
        if is_behind {
            self.become_stale(StaleReason::BehindOthers);
            in_sync.retain(|member| *member != self.id);
        }
        self.propose(successor, in_sync, actions);
    }

    fn end_comparison(&mut self, lost: &[ReplicaId], actions: &mut Vec<ReplicaAction>) {
        self.become_compared(actions);
        let ends = self.primary().peers.iter().filter_map(|(id, peer)| Some((*id, peer.log_end?.0)));
        let ends: Vec<(ReplicaId, EntryId)> = ends.collect();
        let next_of = |last: EntryId| match self.log.id(last.sequence) == Some(last) {
            true => last.sequence + 1,
            false => self.log.end() + 1,
        };
        let next: Vec<(ReplicaId, u64)> = ends.into_iter().map(|(id, last)| (id, next_of(last))).collect();
        let Role::Primary(primary) = &mut self.role else { return };
        primary.is_comparing = false;
        for (id, next) in next {
            primary.peers.get_mut(&id).expect("it is a peer").next = next;
        }
        for (id, peer) in &mut primary.peers {
            peer.lost |= lost.contains(id);
            peer.sent_ns = 0;
        }
        let waiting = std::mem::take(&mut primary.waiting_writes);
        self.append_unsettled(actions);
        for request in waiting {
            self.on_primary_request(request, actions);
        }
    }

    /// A member knows more to be committed than this primary has, or something else in its place: one of the
    /// two lacks what it had. The logs are compared in another epoch.
    pub(crate) fn compare_again(&mut self, actions: &mut Vec<ReplicaAction>) {
        if self.proposal.is_none() {
            self.is_compared = false;
            self.propose(self.id, self.config.in_sync.clone(), actions);
        }
    }

    /// Why a stale replica, or one that is compared, does not serve.
    pub(crate) fn doubt(&self) -> Option<GroupBlocked> {
        match &self.role {
            Role::Primary(_) if self.stale.is_some() => Some(GroupBlocked::Stale),
            Role::Primary(primary) if primary.is_comparing => Some(GroupBlocked::Comparing),
            Role::Follower(_) if self.stale.is_some() && self.is_in_sync() => Some(GroupBlocked::Stale),
            _ => None,
        }
    }

    /// Asks a member where its log ends.
    pub(crate) fn ask_log_end(&mut self, id: ReplicaId, actions: &mut Vec<ReplicaAction>) {
        let (now_ns, commit_point, previous) = (self.now_ns, self.commit_point, self.last_entry());
        let (resend_ns, heartbeat_ns) = (self.settings.resend_ns, self.settings.heartbeat_ns);
        let Some(peer) = self.primary().peers.get_mut(&id).filter(|peer| peer.in_sync) else { return };
        let is_due = match peer.is_compared {
            true => now_ns >= peer.sent_ns + heartbeat_ns,
            false => peer.sent_ns == 0 || now_ns >= peer.sent_ns + resend_ns,
        };
        if !is_due {
            return;
        }
        peer.sent_ns = now_ns;
        let append = crate::Append {
            sent_ns: now_ns,
            session: 0,
            previous,
            entries: Vec::new(),
            commit_point,
            log_end: None,
        };
        self.send(id, MessageBody::Append(append), actions);
    }
}
