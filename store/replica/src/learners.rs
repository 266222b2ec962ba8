//! Learners: replicas outside the in-sync set, which get entries, or first a copy of all objects.

use wire_store::ObjectId;

use crate::primary::Peer;
use crate::replica::{Replica, Role};
use crate::{
    Append, AppliedRequests, CopiedPart, EntryId, MessageBody, ObjectPart, PlantedReplicaFault, Plants,
    ReplicaAction, ReplicaId,
};

/// A replica outside the in-sync set that gets entries or a copy, as the primary knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LearnerStatus {
    /// The replica.
    pub id: ReplicaId,
    /// Entries of the log that are not durable there.
    pub entries_behind: u64,
    /// Its copy of all objects, if it needs one.
    pub copy: Option<CopyProgress>,
}

/// How far a copy of all objects is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyProgress {
    /// Objects that the learner has written.
    pub objects: u64,
    /// Bytes of their contents.
    pub bytes: u64,
    /// Since the first of them was to be copied.
    pub elapsed_ns: u64,
}

/// What a learner has of a copy.
#[derive(Clone, Copy, Default)]
pub(crate) struct Copied {
    objects: u64,
    bytes: u64,
    begun_ns: Option<u64>,
}

impl Copied {
    /// What was sent then was answered with what the learner had before it was reset for the copy. Only
    /// probes were sent to it before: one that got entries joins again.
    pub(crate) fn is_later_than(&self, sent_ns: u64) -> bool {
        self.begun_ns.is_some_and(|begun_ns| sent_ns < begun_ns)
    }

    fn progress(self, now_ns: u64) -> CopyProgress {
        let elapsed_ns = self.begun_ns.map_or(0, |begun_ns| now_ns.saturating_sub(begun_ns));
        CopyProgress { objects: self.objects, bytes: self.bytes, elapsed_ns }
    }
}

/// Of the entries that a log may have, the share that waits for the rest of an object before its copy yields
/// no more.
const WAITING_SHARE: u64 = 4;
/// Most learners at once; others ask again.
const LEARNERS_MAX: usize = 8;

/// How far the copy of all objects to a learner is.
pub(crate) enum CopyStage {
    /// None is needed, or it is done.
    None,
    /// Its data is incomplete.
    Needed,
    /// The learner removes its data.
    Resetting {
        /// Entries after this one follow.
        base: EntryId,
        applied: Box<AppliedRequests>,
        sent_ns: u64,
    },
    /// Objects are copied one after the other.
    Objects(ObjectCopy),
    /// All objects are copied; the learner makes them durable.
    Ending { sent_ns: u64 },
}

/// The copy of objects in their order, each in parts. Between two objects the stream of entries advances to
/// `target`, which is committed; while the parts of an object are read and written it stands still. So an
/// entry up to the target has no data if its object is copied later, and the copy has what it wrote. Later
/// entries of a copied object have data and are applied after the copy. Each part has a turn of its own
/// ([`CopyPacer`](crate::CopyPacer)).
pub(crate) struct ObjectCopy {
    /// The last object that is copied.
    limit: Option<ObjectId>,
    /// The last part that is copied.
    last: Option<ObjectPart>,
    /// The last entry to send now.
    target: u64,
    step: CopyStep,
}

enum CopyStep {
    /// Entries up to the target are sent, until the next object has its turn.
    Entries { turn_ns: Option<u64> },
    /// The next part of an object waits for its turn.
    Waiting { turn_ns: u64 },
    /// The storage reads the next part.
    Reading(u64),
    /// The learner writes it.
    Writing { copied: CopiedPart, since_ns: u64, sent_ns: u64 },
}

impl CopyStage {
    /// The last entry to send now; `None` for all.
    pub(crate) fn entries_limit(&self) -> Option<u64> {
        match self {
            CopyStage::Objects(copy) => Some(copy.target),
            _ => None,
        }
    }

    /// Whether an entry for an object is sent without its data. `off_by_one` is a planted error.
    pub(crate) fn withholds(&self, object: ObjectId, off_by_one: bool) -> bool {
        match self {
            CopyStage::Objects(ObjectCopy { limit, .. }) => {
                limit.is_none_or(|limit| object > limit || (off_by_one && object == limit))
            }
            _ => false,
        }
    }

    /// Whether the learner has not written an object for so long.
    fn is_stuck(&self, now_ns: u64, timeout_ns: u64) -> bool {
        match self {
            CopyStage::Objects(ObjectCopy { step: CopyStep::Writing { since_ns, .. }, .. }) => {
                now_ns >= since_ns + timeout_ns
            }
            _ => false,
        }
    }

    /// When it has something to do; `u64::MAX` for never.
    pub(crate) fn deadline(&self, now_ns: u64, resend_ns: u64) -> u64 {
        match self {
            CopyStage::None | CopyStage::Needed => u64::MAX,
            CopyStage::Resetting { sent_ns, .. } | CopyStage::Ending { sent_ns } => sent_ns + resend_ns,
            CopyStage::Objects(copy) => match copy.step {
                CopyStep::Entries { turn_ns: Some(turn_ns) } | CopyStep::Waiting { turn_ns }
                    if now_ns < turn_ns =>
                {
                    turn_ns
                }
                CopyStep::Entries { .. } | CopyStep::Waiting { .. } | CopyStep::Reading(_) => u64::MAX,
                CopyStep::Writing { sent_ns, .. } => sent_ns + resend_ns,
            },
        }
    }
}

impl<F: Plants> Replica<F> {
    pub(crate) fn on_join(
        &mut self,
        from: ReplicaId,
        session: u64,
        commit_point: u64,
        complete: bool,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let (now_ns, end) = (self.now_ns, self.log.end());
        let has = self.config.has(from);
        let Role::Primary(primary) = &mut self.role else {
            return;
        };
        if has {
            if let Some(peer) = primary.peers.get_mut(&from) {
                peer.lost |= !complete;
            }
            return;
        }
        if primary.is_comparing {
            // No replica is to follow one that may lack something. It asks again.
            return;
        }
        let earlier = primary.peers.get(&from);
        let learners = primary.peers.values().filter(|peer| !peer.in_sync).count();
        let late = earlier.is_some_and(|earlier| session <= earlier.session);
        if late || session == 0 || (earlier.is_none() && learners >= LEARNERS_MAX) {
            return;
        }
        // What the map may have made a member counts as one.
        let may_learn = self.learners.as_ref().is_none_or(|learners| learners.contains(&from));
        if !may_learn && earlier.is_none_or(|earlier| !earlier.proposed) {
            return;
        }
        if complete && commit_point > end {
            // It has what this one lacks, and nothing is taken from it: it learns where the log ends.
            let previous = self.last_entry();
            let (entries, commit_point, log_end) = (Vec::new(), self.commit_point, Some(end));
            let append = Append { sent_ns: now_ns, session, previous, entries, commit_point, log_end };
            return self.send(from, MessageBody::Append(append), actions);
        }
        let mut peer = Peer::new(session, end, now_ns);
        // What an incomplete one has goes.
        peer.committed = commit_point.min(end);
        peer.proposed = earlier.is_some_and(|earlier| earlier.proposed);
        peer.joining = peer.proposed;
        if !complete {
            (peer.known, peer.copy) = (true, CopyStage::Needed);
        }
        primary.peers.insert(from, peer);
    }

    pub(crate) fn on_learners(&mut self, replicas: Vec<ReplicaId>, actions: &mut Vec<ReplicaAction>) {
        self.learners = Some(replicas);
        self.end_other_streams(actions);
    }

    /// Ends the streams to replicas that may not learn. What they got would end their replicas when those are
    /// full, or they have left the group: the map takes none of these into the in-sync set, and would be
    /// asked again at once. They wait, and ask again.
    pub(crate) fn end_other_streams(&mut self, actions: &mut Vec<ReplicaAction>) {
        let (Role::Primary(primary), Some(learners)) = (&mut self.role, &self.learners) else {
            return;
        };
        let before = primary.peers.len();
        primary.peers.retain(|id, peer| peer.in_sync || peer.proposed || learners.contains(id));
        if primary.peers.len() < before {
            self.free_superfluous(actions);
        }
    }

    /// A learner needs entries that the log does not have: starts to copy all objects.
    pub(crate) fn begin_copy(&mut self, id: ReplicaId, actions: &mut Vec<ReplicaAction>) {
        let base = self.log.id(self.commit_point).expect("the log has the last committed entry");
        let (applied, now_ns) = (Box::new(self.applied.clone()), self.now_ns);
        let Some(peer) = self.primary().peers.get_mut(&id) else {
            return;
        };
        (peer.joining, peer.probing) = (false, false);
        peer.next = base.sequence + 1;
        peer.copy = CopyStage::Resetting { base, applied: applied.clone(), sent_ns: now_ns };
        let session = peer.session;
        self.send(id, MessageBody::CopyBegin { session, base, applied }, actions);
    }

    pub(crate) fn on_copy_begun(&mut self, from: ReplicaId, session: u64) {
        let now_ns = self.now_ns;
        if let Some(peer) = self.peer(from, session)
            && let CopyStage::Resetting { base, .. } = peer.copy
        {
            peer.probing = false;
            peer.acknowledged = Some(base.sequence);
            peer.committed = base.sequence;
            peer.next = base.sequence + 1;
            peer.copied = Copied { begun_ns: Some(now_ns), ..Copied::default() };
            let (target, step) = (base.sequence, CopyStep::Entries { turn_ns: None });
            peer.copy = CopyStage::Objects(ObjectCopy { limit: None, last: None, target, step });
        }
    }

    pub(crate) fn on_object_read(
        &mut self,
        read: u64,
        part: Option<CopiedPart>,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let now_ns = self.now_ns;
        let Role::Primary(primary) = &mut self.role else {
            return;
        };
        let reading = primary.peers.iter_mut().find_map(|(id, peer)| match &mut peer.copy {
            CopyStage::Objects(copy) if matches!(copy.step, CopyStep::Reading(number) if number == read) => {
                Some((*id, peer))
            }
            _ => None,
        });
        let Some((id, peer)) = reading else {
            return;
        };
        let session = peer.session;
        let body = match (part, &mut peer.copy) {
            (Some(copied), CopyStage::Objects(copy)) => {
                let (part, content) = (copied.part, copied.content.clone());
                self.pacer.sent(content.len() as u64, now_ns);
                copy.step = CopyStep::Writing { copied, since_ns: now_ns, sent_ns: now_ns };
                MessageBody::CopyObject { session, part, content }
            }
            _ => {
                peer.copy = CopyStage::Ending { sent_ns: now_ns };
                MessageBody::CopyEnd { session }
            }
        };
        self.send(id, body, actions);
    }

    pub(crate) fn on_copy_written(&mut self, from: ReplicaId, session: u64, part: ObjectPart) {
        let (commit_point, end, now_ns) = (self.commit_point, self.log.end(), self.now_ns);
        let (is_urgent, log_low) = (self.copies_are_urgent(), self.log_low);
        let waiting_max = self.settings.entries_max as u64 / WAITING_SHARE;
        let advances = self.has_fault(PlantedReplicaFault::CopyAdvancedInObject);
        let pacer = self.pacer.clone();
        if let Some(Peer { copy: CopyStage::Objects(copy), copied, .. }) = self.peer(from, session)
            && let CopyStep::Writing { copied: written, .. } = &copy.step
            && written.part == part
        {
            copied.objects += u64::from(written.is_last);
            copied.bytes += written.content.len() as u64;
            copy.last = Some(part);
            copy.step = if written.is_last {
                (copy.limit, copy.target) = (Some(part.object), commit_point);
                CopyStep::Entries { turn_ns: None }
            } else {
                copy.target = if advances { commit_point } else { copy.target };
                // Entries wait in the log for the rest of the object: before it is full, the copy yields no
                // more.
                let is_late = log_low || end.saturating_sub(copy.target) > waiting_max;
                let turn_ns = if is_late { now_ns } else { pacer.turn_ns(now_ns, is_urgent) };
                CopyStep::Waiting { turn_ns }
            };
        }
    }

    /// Another failure would lose data, or stop writes.
    fn copies_are_urgent(&self) -> bool {
        self.config.in_sync.len() < self.settings.in_sync_min.max(2)
    }

    pub(crate) fn on_copy_ended(&mut self, from: ReplicaId, session: u64) {
        if let Some(peer) = self.peer(from, session)
            && matches!(peer.copy, CopyStage::Ending { .. })
        {
            peer.copy = CopyStage::None;
        }
    }

    /// Ends streams that make no progress, and continues copies.
    pub(crate) fn run_learners(&mut self, actions: &mut Vec<ReplicaAction>) {
        let now_ns = self.now_ns;
        let (resend_ns, lease_ns) = (self.settings.resend_ns, self.settings.lease_ns);
        let learner_timeout_ns = self.settings.learner_timeout_ns;
        let (full, log_low) = (self.log.len() >= self.settings.entries_max, self.log_low);
        let mut reads = self.reads;
        let mut messages = Vec::new();
        let has_unsettled = !self.unsettled.is_empty();
        let (is_urgent, commit_point) = (self.copies_are_urgent(), self.commit_point);
        let primary = self.primary();
        // A copy has what unsettled blocks have here: the entries that were appended again for them must
        // stay.
        let is_settled = !has_unsettled || primary.stable >= primary.established;
        let before = primary.peers.len();
        primary.peers.retain(|_, peer| {
            // While commits wait for it, clients do.
            let timeout_ns = if peer.joining { lease_ns } else { learner_timeout_ns };
            let silent = now_ns >= peer.answered_ns + timeout_ns || peer.stands_still(timeout_ns, now_ns);
            // A full log frees what learners need: clients come first. One without room for an object answers
            // all else.
            let is_stuck = log_low && peer.copy.is_stuck(now_ns, learner_timeout_ns);
            peer.in_sync || peer.proposed || !(silent || is_stuck || (full && !peer.joining))
        });
        if primary.peers.len() < before {
            self.free_superfluous(actions);
        }
        let Role::Primary(primary) = &mut self.role else { return };
        for (id, peer) in &mut primary.peers {
            let session = peer.session;
            match &mut peer.copy {
                CopyStage::Resetting { base, applied, sent_ns } if now_ns >= *sent_ns + resend_ns => {
                    *sent_ns = now_ns;
                    let (base, applied) = (*base, applied.clone());
                    messages.push((*id, MessageBody::CopyBegin { session, base, applied }));
                }
                CopyStage::Ending { sent_ns } if now_ns >= *sent_ns + resend_ns => {
                    *sent_ns = now_ns;
                    messages.push((*id, MessageBody::CopyEnd { session }));
                }
                CopyStage::Objects(copy) => match &mut copy.step {
                    CopyStep::Entries { turn_ns } if is_settled && peer.acknowledged >= Some(copy.target) => {
                        let turn_ns = *turn_ns.get_or_insert_with(|| self.pacer.turn_ns(now_ns, is_urgent));
                        if now_ns < turn_ns {
                            // The stream need not stand still until then.
                            copy.target = commit_point;
                        } else {
                            reads += 1;
                            copy.step = CopyStep::Reading(reads);
                            actions.push(ReplicaAction::ReadObject { read: reads, after: copy.last });
                        }
                    }
                    CopyStep::Waiting { turn_ns } if is_settled && now_ns >= *turn_ns => {
                        reads += 1;
                        copy.step = CopyStep::Reading(reads);
                        actions.push(ReplicaAction::ReadObject { read: reads, after: copy.last });
                    }
                    CopyStep::Writing { copied, sent_ns, .. } if now_ns >= *sent_ns + resend_ns => {
                        *sent_ns = now_ns;
                        let (part, content) = (copied.part, copied.content.clone());
                        messages.push((*id, MessageBody::CopyObject { session, part, content }));
                    }
                    _ => {}
                },
                _ => {}
            }
        }
        self.reads = reads;
        for (id, body) in messages {
            self.send(id, body, actions);
        }
    }

    /// The learners, while this is the primary.
    pub fn learners(&self) -> Vec<LearnerStatus> {
        let Role::Primary(primary) = &self.role else {
            return Vec::new();
        };
        let learners = primary.peers.iter().filter(|(_, peer)| !peer.in_sync);
        let describe = |(id, peer): (&ReplicaId, &Peer)| LearnerStatus {
            id: *id,
            entries_behind: self.log.end().saturating_sub(peer.certain()),
            copy: (!matches!(peer.copy, CopyStage::None)).then(|| peer.copied.progress(self.now_ns)),
        };
        learners.map(describe).collect()
    }

    /// Entries after this are needed for streams.
    pub(crate) fn learners_need(&self) -> u64 {
        let Role::Primary(primary) = &self.role else {
            return u64::MAX;
        };
        let learners = primary.peers.values().filter(|peer| !peer.in_sync && peer.known);
        let needed = learners.map(|peer| match &peer.copy {
            CopyStage::Resetting { base, .. } => base.sequence,
            _ => peer.certain(),
        });
        needed.min().unwrap_or(u64::MAX)
    }
}
