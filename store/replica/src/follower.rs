//! The follower: a member of the in-sync set or a learner, which takes entries from the primary.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::replica::{Replica, Role};
use crate::{
    Append, AppendOutcome, AppliedRequests, EntryId, MessageBody, ObjectPart, PlantedReplicaFault, Plants,
    ReplicaAction, ReplicaId, StaleReason,
};

/// What a follower keeps besides its log.
pub(crate) struct Follower {
    /// Entries up to here are the primary's.
    matched: u64,
    /// The newest commit point of a primary.
    commit_point: u64,
    /// The newest time of the primary in this epoch.
    sent_ns: Option<u64>,
    /// It proposed itself and answers its old primary no more, so that the old primary's lease ends.
    pub(crate) fenced: bool,
    /// Names the stream, if it is not in sync. 0 before the first.
    session: u64,
    /// When the stream last had a message, or was asked for.
    stream_ns: u64,
    copy: Copy,
    /// All objects are copied; a checkpoint makes the replica complete.
    pub(crate) copy_ended: bool,
    /// It had all that the primary had, at some time in this stream.
    pub(crate) is_caught_up: bool,
    /// The number of its question where the primary's log ends, and when it was sent.
    pub(crate) asked_log_end: Option<(u64, u64)>,
    /// Where the primary's log ended, at some time after this replica asked.
    pub(crate) primary_log_end: Option<u64>,
    /// Reads for the primary of this epoch, by number.
    pub(crate) fetches: BTreeMap<u64, FetchOfPrimary>,
}

/// A read for the primary.
pub(crate) struct FetchOfPrimary {
    /// The primary's number.
    pub(crate) number: u64,
    /// The commit point before.
    pub(crate) through: u64,
    /// The primary wants checksums of the blocks.
    pub(crate) is_scrub: bool,
}

/// How far the copy of all objects is.
enum Copy {
    /// There is none.
    None,
    /// Old data is being removed.
    Resetting,
    /// Objects arrive in their order.
    Objects {
        /// The last part that arrived.
        last: Option<ObjectPart>,
        /// The last one that is written.
        written: Option<ObjectPart>,
    },
}

impl Follower {
    pub(crate) fn new<F: Plants>(replica: &Replica<F>) -> Follower {
        Follower {
            matched: replica.commit_point,
            commit_point: replica.commit_point,
            sent_ns: None,
            fenced: false,
            session: 0,
            stream_ns: 0,
            copy: Copy::None,
            copy_ended: false,
            is_caught_up: false,
            asked_log_end: None,
            primary_log_end: None,
            fetches: BTreeMap::new(),
        }
    }

    /// The same primary has a new epoch.
    pub(crate) fn epoch_began(&mut self, commit_point: u64) {
        self.matched = commit_point;
        self.fenced = false;
        (self.asked_log_end, self.primary_log_end) = (None, None);
        self.fetches.clear();
        // The primary may have restarted with another clock.
        self.sent_ns = None;
    }
}

impl<F: Plants> Replica<F> {
    pub(crate) fn follower_deadline(&self, follower: &Follower) -> Option<u64> {
        if follower.fenced || self.proposal.is_some() {
            return None;
        }
        let leave = self.leave_deadline();
        if self.is_sound_member() {
            leave.into_iter().chain([self.heard_ns + self.settings.grace_ns]).min()
        } else if self.leaving.is_some() && !self.is_in_sync() {
            leave
        } else {
            leave.into_iter().chain([follower.stream_ns + self.settings.retry_ns]).min()
        }
    }

    /// Acts when its time is over: proposes itself, or asks for a stream.
    pub(crate) fn run_follower(&mut self, actions: &mut Vec<ReplicaAction>) {
        if self.proposal.is_some() {
            return;
        }
        self.run_leave(actions);
        if self.leaving.is_some() && !self.is_in_sync() {
            // It asks for no stream.
            return;
        }
        let Role::Follower(follower) = &self.role else {
            return;
        };
        let due = self.follower_deadline(follower).is_some_and(|at_ns| self.now_ns >= at_ns);
        if !due && (follower.session > 0 || self.is_in_sync()) {
            return;
        }
        if self.is_sound_member() {
            let primary = self.config.primary;
            let others = self.config.in_sync.iter().copied().filter(|member| *member != primary);
            let in_sync: Vec<ReplicaId> = others.collect();
            self.propose(self.id, in_sync, actions);
            self.follower().fenced = true;
        } else {
            self.join(actions);
        }
    }

    /// Whether it has all entries of the primary up to a sequence.
    pub(crate) fn has_matched(&self, through: u64) -> bool {
        matches!(&self.role, Role::Follower(follower) if follower.matched >= through)
    }

    pub(crate) fn follower(&mut self) -> &mut Follower {
        match &mut self.role {
            Role::Follower(follower) => follower,
            _ => unreachable!("it is a follower"),
        }
    }

    pub(crate) fn join(&mut self, actions: &mut Vec<ReplicaAction>) {
        self.sessions += 1;
        let (now_ns, session) = (self.now_ns, self.sessions);
        // A member that is stale says that it does not have what a member has.
        let (commit_point, complete) = (self.commit_point, self.complete && !self.is_in_sync());
        let follower = self.follower();
        follower.session = session;
        follower.stream_ns = now_ns;
        follower.copy = Copy::None;
        follower.copy_ended = false;
        follower.is_caught_up = false;
        follower.matched = commit_point;
        if self.config.primary != self.id {
            let join = MessageBody::Join { session, commit_point, complete };
            self.send(self.config.primary, join, actions);
        }
    }

    /// The follower, if a message of the primary in this session concerns it. It has heard its primary then.
    fn stream(&mut self, from: ReplicaId, session: u64) -> Option<&mut Follower> {
        let in_sync = self.is_in_sync();
        let stranger = from != self.config.primary && !self.has_fault(PlantedReplicaFault::EpochUnchecked);
        let is_sound = self.complete && self.stale.is_none();
        let now_ns = self.now_ns;
        let Role::Follower(follower) = &mut self.role else {
            return None;
        };
        let expected = if in_sync { 0 } else { follower.session };
        if stranger || follower.fenced || session != expected || (in_sync && !is_sound) {
            return None;
        }
        follower.stream_ns = now_ns;
        self.heard_ns = now_ns;
        Some(follower)
    }

    pub(crate) fn on_append(&mut self, from: ReplicaId, append: Append, actions: &mut Vec<ReplicaAction>) {
        let Some(follower) = self.stream(from, append.session) else {
            return;
        };
        if matches!(follower.copy, Copy::Resetting) {
            return;
        }
        let (durable, known_committed) = (self.log.durable(), self.known_committed());
        let misses_nets = self.has_fault(PlantedReplicaFault::PromoteUnprepared);
        if self.is_in_sync() && append.commit_point > durable && !misses_nets {
            // What is committed was durable here.
            return self.become_stale(StaleReason::BehindOthers);
        }
        let Some(log_end) = append.log_end else {
            let last = self.log.id(durable).expect("the log has its last durable entry, or the one before");
            let (sent_ns, committed) = (append.sent_ns, known_committed);
            if self.is_in_sync() {
                self.send(from, MessageBody::LogEnd { sent_ns, last, committed }, actions);
            }
            return;
        };
        self.follower().sent_ns = self.follower().sent_ns.max(Some(append.sent_ns));
        let sequence = append.previous.sequence;
        let known = self.log.id(sequence);
        let skips = self.has_fault(PlantedReplicaFault::SkipReconciliation);
        let is_another = known.is_some_and(|known| known != append.previous);
        if !skips && (log_end < known_committed || (is_another && sequence <= known_committed)) {
            return self.contradict(actions);
        }
        let matches = sequence <= self.commit_point || known.is_some_and(|_| !is_another || skips);
        let following = append.entries.iter().zip(sequence + 1..);
        if !matches || following.clone().any(|(entry, expected)| entry.header.sequence != expected) {
            return self.answer(from, AppendOutcome::Mismatch { commit_point: self.commit_point }, actions);
        }
        let count = append.entries.len() as u64;
        for (entry, sequence) in append.entries.into_iter().zip(sequence + 1..) {
            let known = self.log.id(sequence);
            let same = known == Some(entry.id()) || (skips && known.is_some());
            if sequence <= self.commit_point || same {
                continue;
            }
            if sequence <= known_committed && known.is_some() {
                return self.contradict(actions);
            }
            if entry.header.withheld && self.is_in_sync() {
                // A member had all entries that its primary may skip.
                return self.become_stale(StaleReason::BehindOthers);
            }
            if known.is_some() {
                self.truncate(sequence, actions);
            }
            self.append(entry, actions);
        }
        // What an earlier primary appended after the end of this one's log was never committed.
        let after = log_end.max(known_committed) + 1;
        if self.log.id(after).is_some_and(|id| id.epoch < self.config.epoch) {
            self.truncate(after, actions);
        }
        let (end, in_sync) = (self.log.end(), self.is_in_sync());
        let follower = self.follower();
        let matched = follower.matched.max(sequence + count).min(end);
        follower.matched = matched;
        follower.commit_point = follower.commit_point.max(append.commit_point);
        follower.is_caught_up |= !in_sync && matched >= log_end;
        self.compare_with_primary();
        self.commit_durable(actions);
        if count == 0 || self.log.durable() >= matched {
            self.answer(from, AppendOutcome::Durable(matched.min(self.log.durable())), actions);
        }
        self.commit_early(actions);
    }

    /// It lacks the primary's entry before those that it got, or the primary lacks what is committed.
    pub(crate) fn answer_mismatch(&mut self, commit_point: u64, actions: &mut Vec<ReplicaAction>) {
        self.answer(self.config.primary, AppendOutcome::Mismatch { commit_point }, actions);
    }

    fn truncate(&mut self, from: u64, actions: &mut Vec<ReplicaAction>) {
        let removed = self.log.truncate(from);
        let is_tracked = self.settings.in_place && !self.has_fault(PlantedReplicaFault::TruncateUnsettled);
        let removed = if is_tracked { removed } else { Vec::new() };
        let truncation = self.unsettled.truncated(from, removed, self.settings.block_bytes);
        actions.push(ReplicaAction::Truncate { truncation, from });
    }

    fn answer(&mut self, to: ReplicaId, outcome: AppendOutcome, actions: &mut Vec<ReplicaAction>) {
        let in_sync = self.is_in_sync();
        let outcome = match outcome {
            // One that lacks what is committed becomes no member.
            AppendOutcome::Durable(through) if !in_sync && self.is_of_past_session() => {
                AppendOutcome::Durable(through.min(self.commit_point.saturating_sub(1)))
            }
            outcome => outcome,
        };
        let follower = self.follower();
        if let Some(sent_ns) = follower.sent_ns {
            let session = if in_sync { 0 } else { follower.session };
            self.send(to, MessageBody::Appended { sent_ns, session, outcome }, actions);
        }
    }

    /// More of the log is durable.
    pub(crate) fn answer_durable(&mut self, actions: &mut Vec<ReplicaAction>) {
        let durable = self.log.durable();
        let Role::Follower(follower) = &self.role else {
            return;
        };
        if !follower.fenced {
            let durable = AppendOutcome::Durable(follower.matched.min(durable));
            self.answer(self.config.primary, durable, actions);
        }
        self.commit_durable(actions);
        self.commit_early(actions);
    }

    /// Applies what is committed and durable here. So a learner whose device is slow does not get further
    /// ahead of it than the primary sends before an answer.
    fn commit_durable(&mut self, actions: &mut Vec<ReplicaAction>) {
        let durable = self.log.durable();
        let follower = self.follower();
        let through = follower.commit_point.min(follower.matched).min(durable);
        self.commit(through, false, actions);
    }

    /// The planted error: applies what is durable here.
    fn commit_early(&mut self, actions: &mut Vec<ReplicaAction>) {
        if self.has_fault(PlantedReplicaFault::ApplyUncommitted) {
            self.commit(self.log.durable(), false, actions);
        }
    }

    pub(crate) fn on_copy_begin(
        &mut self,
        from: ReplicaId,
        session: u64,
        base: EntryId,
        applied: AppliedRequests,
        actions: &mut Vec<ReplicaAction>,
    ) {
        if self.is_in_sync() {
            return;
        }
        let Some(follower) = self.stream(from, session) else {
            return;
        };
        match follower.copy {
            Copy::None => {
                follower.copy = Copy::Resetting;
                follower.matched = base.sequence;
                self.reset(session, base, applied, actions);
            }
            Copy::Resetting => {}
            Copy::Objects { .. } => self.send(from, MessageBody::CopyBegun { session }, actions),
        }
    }

    pub(crate) fn on_reset_done(&mut self, session: u64, actions: &mut Vec<ReplicaAction>) {
        let primary = self.config.primary;
        if let Role::Follower(follower) = &mut self.role
            && follower.session == session
            && matches!(follower.copy, Copy::Resetting)
        {
            follower.copy = Copy::Objects { last: None, written: None };
            self.send(primary, MessageBody::CopyBegun { session }, actions);
        }
    }

    pub(crate) fn on_copy_object(
        &mut self,
        from: ReplicaId,
        session: u64,
        part: ObjectPart,
        content: Arc<[u8]>,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let Some(Follower { copy: Copy::Objects { last, written }, .. }) = self.stream(from, session) else {
            return;
        };
        // A part that was sent twice and arrives late must not replace what was written since.
        if last.is_none_or(|last| last < part) {
            *last = Some(part);
            actions.push(ReplicaAction::WriteObject { session, part, content });
        } else if *written >= Some(part) {
            self.send(from, MessageBody::CopyWritten { session, part }, actions);
        }
    }

    pub(crate) fn on_object_written(
        &mut self,
        session: u64,
        part: ObjectPart,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let primary = self.config.primary;
        if let Role::Follower(follower) = &mut self.role
            && follower.session == session
            && let Copy::Objects { written, .. } = &mut follower.copy
        {
            *written = (*written).max(Some(part));
            self.send(primary, MessageBody::CopyWritten { session, part }, actions);
        }
    }

    pub(crate) fn on_copy_end(&mut self, from: ReplicaId, session: u64, actions: &mut Vec<ReplicaAction>) {
        let complete = self.complete;
        if let Some(follower @ Follower { copy: Copy::Objects { .. }, .. }) = self.stream(from, session) {
            follower.copy_ended = true;
            if complete {
                self.answer_copy_end(actions);
            }
        }
    }

    /// The checkpoint that ends a copy is durable.
    pub(crate) fn answer_copy_end(&mut self, actions: &mut Vec<ReplicaAction>) {
        if let Role::Follower(Follower { session, copy_ended: true, .. }) = self.role {
            self.send(self.config.primary, MessageBody::CopyEnded { session }, actions);
        }
    }
}
