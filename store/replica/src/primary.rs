//! The primary: orders operations, waits for the in-sync set, reads under leases, changes the in-sync set.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use foldhash::HashSet;
use wire_store::{EntryHeader, ObjectId};

use crate::learners::{Copied, CopyStage};
use crate::repair::Repair;
use crate::replica::{GroupBlocked, Replica, Role};
use crate::scrub_state::Scrub;
use crate::sessions::PrimarySessions;
use crate::{
    Append, AppendOutcome, ClientReply, ClientRequest, EntryId, MessageBody, PlantedReplicaFault, Plants,
    ReplicaAction, ReplicaId, ReplicaSettings, ReplicatedEntry, ScrubOutcome,
};

/// Most entries that a replica was sent and has not acknowledged.
const UNANSWERED_ENTRIES_MAX: u64 = 64;
/// A learner that lacks fewer entries is counted in commits.
const NEARLY_ALL_ENTRIES: u64 = 16;

/// What a primary keeps besides its log.
pub(crate) struct Primary {
    /// Entries up to here were in the log when it became primary: reads wait until they are committed.
    pub(crate) established: u64,
    /// Entries up to here are never given up, as the storage knows.
    pub(crate) stable: u64,
    /// It does not know yet whether other members have more.
    pub(crate) is_comparing: bool,
    /// Writes of clients that came meanwhile.
    pub(crate) waiting_writes: VecDeque<ClientRequest>,
    /// It commits and reads nothing before: until then an earlier primary may have its lease.
    pub(crate) act_after_ns: u64,
    /// When the epoch began.
    pub(crate) epoch_ns: u64,
    pub(crate) peers: BTreeMap<ReplicaId, Peer>,
    /// A write of which the latency is measured, one at a time: its sequence, and when it was appended.
    measured_write: Option<(u64, u64)>,
    /// A read of a client of which the latency is measured: its number, and when it began.
    measured_read: Option<(u64, u64)>,
    pub(crate) sessions: PrimarySessions,
    /// Writes in the log that are not committed: client and number.
    pub(crate) uncommitted: HashSet<(u64, u64)>,
    /// When those of this epoch were appended, by sequence.
    appended_ns: VecDeque<(u64, u64)>,
    waiting_reads: VecDeque<ClientRead>,
    /// Client and number of those that wait and of those in `reading`: a client repeats what is slow.
    read_names: HashSet<(u64, u64)>,
    /// Reads that the storage carries out.
    pub(crate) reading: BTreeMap<u64, ClientRead>,
    /// Reads that it could not, by number.
    pub(crate) repairs: BTreeMap<u64, Repair>,
    /// Reads for followers with unsettled blocks, by number.
    pub(crate) fetches: BTreeMap<u64, FetchOfFollower>,
    /// What is being compared with the members.
    pub(crate) scrub: Option<Scrub>,
}

/// A read for a follower with an unsettled block.
pub(crate) struct FetchOfFollower {
    pub(crate) from: ReplicaId,
    /// The follower's number.
    pub(crate) number: u64,
    /// The commit point before.
    pub(crate) through: u64,
    pub(crate) range: (ObjectId, u32, u32),
}

/// A read of a client.
#[derive(Clone, Copy)]
pub(crate) struct ClientRead {
    /// When it arrived.
    arrived_ns: u64,
    pub(crate) client: u64,
    pub(crate) number: u64,
    pub(crate) object: ObjectId,
    pub(crate) offset: u32,
    pub(crate) length: u32,
}

impl ClientRead {
    pub(crate) fn answer(&self, reply: ClientReply, actions: &mut Vec<ReplicaAction>) {
        actions.push(ReplicaAction::Reply { client: self.client, number: self.number, reply });
    }
}

/// Another replica, as its primary knows it.
pub(crate) struct Peer {
    /// A member of the in-sync set, not a learner.
    pub(crate) in_sync: bool,
    /// The session of a learner's stream; 0 for a member.
    pub(crate) session: u64,
    /// The next entry to send.
    pub(crate) next: u64,
    /// Entries up to here are durable there.
    pub(crate) acknowledged: Option<u64>,
    /// Entries up to here are committed there, at least.
    pub(crate) committed: u64,
    /// It answered in this epoch or session, so that `next` is right.
    pub(crate) known: bool,
    /// It answered that it lacks the entry before `next`: it gets no entries until one matches.
    pub(crate) probing: bool,
    /// When the last message was sent; 0 to send one at once.
    pub(crate) sent_ns: u64,
    /// When `acknowledged` last grew, or the first of the unanswered entries was sent.
    pub(crate) progress_ns: u64,
    /// When it was last asked which of the unanswered entries it has.
    pub(crate) asked_ns: u64,
    /// When it last answered.
    pub(crate) answered_ns: u64,
    /// Sending time of the newest message that it answered: its lease begins there.
    pub(crate) lease_from_ns: Option<u64>,
    /// How far a copy of all objects is.
    pub(crate) copy: CopyStage,
    /// What was copied since then.
    pub(crate) copied: Copied,
    /// A learner that is counted in commits and leases.
    pub(crate) joining: bool,
    /// A learner that was proposed in this epoch: the map may have it in the in-sync set.
    pub(crate) proposed: bool,
    /// It made entries durable in this session.
    pub(crate) gained: bool,
    /// Entries were sent in this session, so answers to them may be under way.
    pub(crate) streamed: bool,
    /// It is in the in-sync set, and says that it lost its data, or lacks what a member has to have.
    pub(crate) lost: bool,
    /// Its last entry, and what it knows to be committed, as it answered in this epoch.
    pub(crate) log_end: Option<(EntryId, u64)>,
    /// It answered, maybe in the way of a release that does not say where its log ends.
    pub(crate) is_compared: bool,
}

impl Peer {
    pub(crate) fn new(session: u64, end: u64, now_ns: u64) -> Peer {
        Peer {
            in_sync: session == 0,
            session,
            next: end + 1,
            acknowledged: None,
            committed: 0,
            known: false,
            probing: false,
            sent_ns: 0,
            progress_ns: now_ns,
            asked_ns: 0,
            answered_ns: now_ns,
            lease_from_ns: None,
            copy: CopyStage::None,
            copied: Copied::default(),
            joining: false,
            proposed: false,
            gained: false,
            streamed: false,
            lost: false,
            log_end: None,
            is_compared: false,
        }
    }

    /// Whether commits and reads wait for it.
    fn counts(&self) -> bool {
        self.in_sync || self.joining
    }

    /// Entries up to here need not be sent again.
    pub(crate) fn certain(&self) -> u64 {
        self.acknowledged.unwrap_or(0).max(self.committed)
    }

    /// The entry to go on with after those that are certain. A member has every committed entry, so also
    /// those up to `base`, which are freed.
    fn first_uncertain(&self, base: u64) -> u64 {
        (self.certain() + 1).max(if self.in_sync { base + 1 } else { 0 })
    }

    /// Whether it has promised not to propose itself yet.
    pub(crate) fn has_lease(&self, lease_ns: u64, now_ns: u64) -> bool {
        self.lease_from_ns.is_some_and(|from_ns| now_ns < from_ns + lease_ns)
    }

    fn is_unanswered(&self) -> bool {
        self.next - 1 > self.certain()
    }

    /// When it is to be asked which of the unanswered entries it has.
    fn ask_ns(&self, resend_ns: u64) -> Option<u64> {
        self.is_unanswered().then(|| self.progress_ns.max(self.asked_ns) + resend_ns)
    }

    /// Whether none of the unanswered entries became durable there for so long, whatever else it answers.
    pub(crate) fn stands_still(&self, timeout_ns: u64, now_ns: u64) -> bool {
        self.is_unanswered() && now_ns >= self.progress_ns + timeout_ns
    }
}

impl Primary {
    pub(crate) fn new<F: Plants>(replica: &Replica<F>) -> Primary {
        let uncommitted = replica.commit_point + 1..=replica.log.end();
        let headers = uncommitted.filter_map(|sequence| replica.log.get(sequence)).map(|entry| &entry.header);
        let compares_nothing =
            [PlantedReplicaFault::TruncateForOlderPrimary, PlantedReplicaFault::TransferUnprepared];
        let mut primary = Primary {
            established: replica.log.end(),
            stable: 0,
            is_comparing: !replica.is_compared
                && !compares_nothing.into_iter().any(|it| replica.has_fault(it)),
            waiting_writes: VecDeque::new(),
            act_after_ns: match replica.has_fault(PlantedReplicaFault::HandOverAssumed) {
                true => replica.now_ns,
                false => replica.heard_ns + replica.settings.grace_ns,
            },
            epoch_ns: replica.now_ns,
            peers: BTreeMap::new(),
            measured_write: None,
            measured_read: None,
            sessions: PrimarySessions::new(&replica.log, replica.commit_point, replica.now_ns),
            uncommitted: headers.map(|header| (header.client, header.client_number)).collect(),
            appended_ns: VecDeque::new(),
            waiting_reads: VecDeque::new(),
            read_names: HashSet::default(),
            reading: BTreeMap::new(),
            repairs: BTreeMap::new(),
            fetches: BTreeMap::new(),
            scrub: None,
        };
        primary.set_members(replica.id, &replica.config.in_sync, replica.log.end(), replica.now_ns);
        primary
    }

    /// Members of a new epoch answer anew. Their leases stay: a promise to wait holds whatever the epoch.
    fn set_members(&mut self, own: ReplicaId, in_sync: &[ReplicaId], end: u64, now_ns: u64) {
        self.epoch_ns = now_ns;
        self.peers.retain(|id, peer| !peer.in_sync || in_sync.contains(id));
        for peer in self.peers.values_mut() {
            (peer.joining, peer.proposed) = (false, false);
        }
        for member in in_sync.iter().filter(|member| **member != own) {
            let earlier = self.peers.remove(member);
            let mut peer = Peer::new(0, end, now_ns);
            peer.lease_from_ns = earlier.and_then(|earlier| earlier.lease_from_ns);
            self.peers.insert(*member, peer);
        }
    }
}

impl<F: Plants> Replica<F> {
    pub(crate) fn primary(&mut self) -> &mut Primary {
        match &mut self.role {
            Role::Primary(primary) => primary,
            _ => unreachable!("it is the primary"),
        }
    }

    pub(crate) fn continue_as_primary(&mut self, actions: &mut Vec<ReplicaAction>) {
        let (own, end, now_ns) = (self.id, self.log.end(), self.now_ns);
        let (config, is_compared) = (self.config.clone(), self.is_compared);
        self.interrupt_scrub(actions);
        let primary = self.primary();
        primary.set_members(own, &config.in_sync, end, now_ns);
        if !is_compared {
            // Learners join again.
            primary.is_comparing = true;
            primary.peers.retain(|_, peer| peer.in_sync);
        }
        // One that was proposed, and is no member, may have left the group.
        self.end_other_streams(actions);
    }

    /// The stream of a replica, if this is its session.
    pub(crate) fn peer(&mut self, id: ReplicaId, session: u64) -> Option<&mut Peer> {
        let now_ns = self.now_ns;
        let Role::Primary(primary) = &mut self.role else {
            return None;
        };
        let peer = primary.peers.get_mut(&id).filter(|peer| peer.session == session)?;
        peer.answered_ns = now_ns;
        Some(peer)
    }

    pub(crate) fn on_appended(
        &mut self,
        from: ReplicaId,
        sent_ns: u64,
        session: u64,
        outcome: AppendOutcome,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let (now_ns, end, base) = (self.now_ns, self.log.end(), self.log.base().sequence);
        let is_comparing = self.is_comparing();
        let lease_from_ns =
            if self.has_fault(PlantedReplicaFault::LeaseFromReceipt) { now_ns } else { sent_ns.min(now_ns) };
        let Some(peer) = self.peer(from, session) else {
            return;
        };
        peer.lease_from_ns = peer.lease_from_ns.max(Some(lease_from_ns));
        if is_comparing {
            // It was asked where its log ends, and is of a release that does not say it.
            peer.is_compared = true;
            return;
        }
        peer.known = true;
        if peer.copied.is_later_than(sent_ns) {
            return;
        }
        match outcome {
            // Nothing that was sent is after the end.
            AppendOutcome::Durable(through) if through > end => {}
            AppendOutcome::Mismatch { commit_point } if commit_point > end => match peer.in_sync {
                true => self.compare_again(actions),
                // It has what this one lacks, and keeps it.
                false => _ = self.primary().peers.remove(&from),
            },
            AppendOutcome::Durable(through) => {
                let through = Some(through);
                if peer.acknowledged < through {
                    peer.gained |= peer.acknowledged.is_some();
                    peer.acknowledged = through;
                    peer.progress_ns = now_ns;
                }
                peer.next = peer.next.max(peer.certain() + 1);
                peer.probing = false;
            }
            AppendOutcome::Mismatch { commit_point } => {
                peer.committed = peer.committed.max(commit_point);
                let next = peer.first_uncertain(base);
                if !peer.probing || peer.next != next {
                    (peer.probing, peer.next, peer.sent_ns) = (true, next, 0);
                }
                peer.progress_ns = now_ns;
            }
        }
    }

    /// Sends what is due, commits, reads, proposes.
    pub(crate) fn run_primary(&mut self, actions: &mut Vec<ReplicaAction>) {
        self.compare_logs(actions);
        if self.stale.is_some() {
            // The others take over: by its proposal, or because they hear nothing of it.
            return self.interrupt_scrub(actions);
        }
        self.run_learners(actions);
        // Before entries are sent: it may append one.
        self.run_scrub(actions);
        self.advance_commit(actions);
        let mut peer = self.primary().peers.keys().next().copied();
        while let Some(id) = peer {
            self.stream_to(id, actions);
            let after = (Bound::Excluded(id), Bound::Unbounded);
            peer = self.primary().peers.range(after).next().map(|(id, _)| *id);
        }
        self.read_waiting(actions);
        self.run_repairs(actions);
        self.run_sessions(actions);
        self.propose_members(actions);
        self.run_leave(actions);
    }

    fn stream_to(&mut self, id: ReplicaId, actions: &mut Vec<ReplicaAction>) {
        let (now_ns, end, base) = (self.now_ns, self.log.end(), self.log.base().sequence);
        let (resend_ns, heartbeat_ns) = (self.settings.resend_ns, self.settings.heartbeat_ns);
        let skipped_through = self.log.skipped_through();
        if self.is_comparing() {
            return self.ask_log_end(id, actions);
        }
        let Some(peer) = self.primary().peers.get_mut(&id) else {
            return;
        };
        if matches!(peer.copy, CopyStage::Resetting { .. }) {
            return;
        }
        if !peer.known {
            if peer.next <= base {
                peer.next = end + 1;
            }
            if peer.sent_ns == 0 || now_ns >= peer.sent_ns + resend_ns {
                self.send_entries(id, 0, actions);
            }
            return;
        }
        if peer.in_sync && peer.next <= base {
            // What it was to be asked about is freed meanwhile: a member has it.
            peer.next = base + 1;
        }
        let asks = peer.ask_ns(resend_ns).is_some_and(|ask_ns| now_ns >= ask_ns);
        if asks {
            peer.asked_ns = now_ns;
        }
        if peer.proposed && (peer.next <= base || matches!(peer.copy, CopyStage::Needed)) {
            // What the map may have made a member gets no copy: its data stays. Only the map's answer ends
            // this.
            peer.sent_ns = now_ns;
            return;
        }
        let needs_copy = match peer.copy {
            CopyStage::Needed => true,
            CopyStage::None => !peer.in_sync && peer.next <= base.max(skipped_through),
            _ => false,
        };
        if needs_copy {
            if peer.streamed {
                // An answer from before the copy must not count after it: the learner joins again.
                self.primary().peers.remove(&id);
            } else {
                self.begin_copy(id, actions);
            }
            return;
        }
        if peer.probing {
            if peer.sent_ns == 0 || now_ns >= peer.sent_ns + resend_ns {
                self.send_entries(id, 0, actions);
            }
            return;
        }
        let limit = peer.copy.entries_limit().unwrap_or(end);
        let mut sent = asks;
        if asks {
            // Entries are sent again only if its answer is that it lacks them: a slow replica would get
            // slower.
            self.send_entries(id, 0, actions);
        }
        loop {
            let peer = self.primary().peers.get_mut(&id).expect("it was there");
            let window = (peer.certain() + UNANSWERED_ENTRIES_MAX).max(peer.next - 1);
            let count =
                (limit.min(window) + 1).saturating_sub(peer.next).min(wire_replica::ENTRIES_MAX as u64);
            if count == 0 {
                break;
            }
            if !peer.is_unanswered() {
                peer.progress_ns = now_ns;
            }
            self.send_entries(id, count, actions);
            sent = true;
        }
        let peer = &self.primary().peers[&id];
        if !sent && now_ns >= peer.sent_ns + heartbeat_ns {
            self.send_entries(id, 0, actions);
        }
    }

    fn send_entries(&mut self, id: ReplicaId, count: u64, actions: &mut Vec<ReplicaAction>) {
        let (now_ns, commit_point, log_end) = (self.now_ns, self.commit_point, self.log.end());
        let off_by_one = self.has_fault(PlantedReplicaFault::CopyLimitOffByOne);
        let Role::Primary(primary) = &mut self.role else {
            return;
        };
        let peer = primary.peers.get_mut(&id).expect("it is a peer");
        let previous = self.log.id(peer.next - 1).expect("the entry before the next is in the log");
        let entries = (peer.next..peer.next + count).map(|sequence| {
            let entry = self.log.get(sequence).expect("it is in the log");
            if peer.copy.withholds(entry.header.object, off_by_one) && !entry.header.withheld {
                Arc::new(withhold(entry))
            } else {
                entry.clone()
            }
        });
        let entries = entries.collect();
        peer.next += count;
        peer.streamed |= count > 0;
        peer.sent_ns = now_ns;
        let session = peer.session;
        let log_end = Some(log_end);
        let append = Append { sent_ns: now_ns, session, previous, entries, commit_point, log_end };
        self.send(id, MessageBody::Append(append), actions);
    }

    pub(crate) fn on_primary_request(&mut self, request: ClientRequest, actions: &mut Vec<ReplicaAction>) {
        let reads_max = self.settings.reads_max;
        match request {
            ClientRequest::Write { .. } if self.is_comparing() => {
                // An entry of this epoch would make this log the newest one.
                let (client, number) = request.name();
                let waiting = &mut self.primary().waiting_writes;
                if waiting.len() < reads_max {
                    waiting.push_back(request);
                } else {
                    actions.push(ReplicaAction::Reply { client, number, reply: ClientReply::Busy });
                }
            }
            ClientRequest::Write { header, data } => {
                let (client, number) = (header.client, header.client_number);
                if let Some(reply) = self.write(header, data, actions) {
                    actions.push(ReplicaAction::Reply { client, number, reply });
                }
            }
            ClientRequest::Read { client, number, object, offset, length } => {
                let arrived_ns = self.now_ns;
                let primary = self.primary();
                if primary.read_names.contains(&(client, number)) {
                    return;
                }
                if primary.waiting_reads.len() >= reads_max {
                    actions.push(ReplicaAction::Reply { client, number, reply: ClientReply::Busy });
                } else {
                    primary.read_names.insert((client, number));
                    primary.waiting_reads.push_back(ClientRead {
                        arrived_ns,
                        client,
                        number,
                        object,
                        offset,
                        length,
                    });
                }
            }
        }
    }

    /// Appends a write. Returns the answer if there is one at once.
    fn write(
        &mut self,
        header: EntryHeader,
        data: Arc<[u8]>,
        actions: &mut Vec<ReplicaAction>,
    ) -> Option<ClientReply> {
        let request = (header.client, header.client_number);
        if !self.has_fault(PlantedReplicaFault::RetryTwice) {
            if header.client != 0 && self.primary().uncommitted.contains(&request) {
                // Its commit answers the retry as well.
                return None;
            }
            if let Some(reply) = self.refusal(&header) {
                return Some(reply);
            }
        }
        if self.log.len() >= self.settings.entries_max {
            return Some(ClientReply::Busy);
        }
        self.append_as_primary(header, data, actions);
        None
    }

    /// Appends an entry with the next name. While logs are compared nothing is: an entry of this epoch would
    /// make this log the newest one.
    pub(crate) fn append_as_primary(
        &mut self,
        header: EntryHeader,
        data: Arc<[u8]>,
        actions: &mut Vec<ReplicaAction>,
    ) {
        debug_assert!(!self.is_comparing(), "entries are appended after the comparison");
        let (sequence, epoch, commit_point) = (self.log.end() + 1, self.config.epoch, self.commit_point);
        self.primary().uncommitted.insert((header.client, header.client_number));
        let now_ns = self.now_ns;
        self.primary().measured_write.get_or_insert((sequence, now_ns));
        self.primary().appended_ns.push_back((sequence, now_ns));
        let header = EntryHeader { sequence, epoch, commit_point, ..header };
        self.primary().sessions.appended(&header);
        self.append(wire_replica::share_entry(ReplicatedEntry { header, data }), actions);
    }

    fn advance_commit(&mut self, actions: &mut Vec<ReplicaAction>) {
        let Role::Primary(primary) = &mut self.role else {
            return;
        };
        let early = self.faults.has(PlantedReplicaFault::AcknowledgeBeforeReplicas);
        let shrinks = self.faults.has(PlantedReplicaFault::ShrinkAfterAcknowledge);
        let (now_ns, lease_ns) = (self.now_ns, self.settings.lease_ns);
        if primary.is_comparing {
            return;
        }
        if now_ns < primary.act_after_ns || self.config.in_sync.len() < self.settings.in_sync_min {
            // Every replica that may become primary has these. A copy for a learner, which commits may wait
            // for, must not wait for them.
            let counted = primary.peers.values().filter(|peer| peer.counts());
            let through = counted.map(|peer| peer.acknowledged.unwrap_or(0)).min().unwrap_or(u64::MAX);
            let through = through.min(self.log.durable());
            if self.settings.in_place && through > primary.stable.max(self.commit_point) {
                primary.stable = through;
                actions.push(ReplicaAction::Stable { through });
            }
            return;
        }
        let epoch_ns = primary.epoch_ns;
        let counted = primary.peers.values().filter(|peer| {
            peer.counts() && !early && !(shrinks && is_silent(peer, epoch_ns, lease_ns, now_ns))
        });
        let through = counted.map(|peer| peer.acknowledged.unwrap_or(0)).min().unwrap_or(u64::MAX);
        let through = through.min(self.log.durable());
        for sequence in self.commit_point + 1..=through {
            let header = &self.log.get(sequence).expect("it is in the log").header;
            primary.uncommitted.remove(&(header.client, header.client_number));
            // What an earlier primary appended has none.
            let appended = primary.appended_ns.pop_front_if(|(appended, _)| *appended <= sequence);
            if let Some((_, appended_ns)) = appended
                && header.client != 0
            {
                let took_ns = now_ns - appended_ns;
                self.volumes.changed(header.operation, header.object, header.length, took_ns);
            }
        }
        primary.sessions.committed(through);
        if let Some((_, begun_ns)) = primary.measured_write.take_if(|(sequence, _)| *sequence <= through) {
            self.pacer.observe_write(now_ns - begun_ns, now_ns);
        }
        self.commit(through, true, actions);
    }

    /// Why it does not serve.
    pub(crate) fn primary_blocked(&self, primary: &Primary) -> Option<GroupBlocked> {
        if primary.is_comparing {
            return Some(GroupBlocked::Comparing);
        }
        if self.config.in_sync.len() < self.settings.in_sync_min {
            return Some(GroupBlocked::TooFewInSync);
        }
        self.reads_blocked(primary)
    }

    pub(crate) fn reads_blocked(&self, primary: &Primary) -> Option<GroupBlocked> {
        let has_lease = |peer: &Peer| peer.has_lease(self.settings.lease_ns, self.now_ns);
        let stale = self.has_fault(PlantedReplicaFault::StalePrimary);
        if primary.is_comparing {
            Some(GroupBlocked::Comparing)
        } else if self.now_ns < primary.act_after_ns {
            Some(GroupBlocked::EarlierLease)
        } else if self.commit_point < primary.established {
            Some(GroupBlocked::Reconciling)
        } else if !stale && !primary.peers.values().filter(|peer| peer.counts()).all(has_lease) {
            Some(GroupBlocked::MemberSilent)
        } else {
            None
        }
    }

    fn read_waiting(&mut self, actions: &mut Vec<ReplicaAction>) {
        let Role::Primary(primary) = &self.role else {
            return;
        };
        if primary.waiting_reads.is_empty() || self.reads_blocked(primary).is_some() {
            return;
        }
        let dirty = self.has_fault(PlantedReplicaFault::DirtyRead);
        let through = if dirty { self.log.end() } else { self.commit_point };
        for waiting in std::mem::take(&mut self.primary().waiting_reads) {
            self.reads += 1;
            let read = self.reads;
            let ClientRead { object, offset, length, .. } = waiting;
            let now_ns = self.now_ns;
            let primary = self.primary();
            primary.measured_read.get_or_insert((read, now_ns));
            primary.reading.insert(read, waiting);
            actions.push(ReplicaAction::Read { read, object, offset, length, through });
        }
    }

    pub(crate) fn on_read_done(
        &mut self,
        read: u64,
        data: Option<Arc<[u8]>>,
        actions: &mut Vec<ReplicaAction>,
    ) {
        match &mut self.role {
            Role::Primary(Primary { scrub: Some(scrub), .. }) if scrub.reads(read) => {
                self.on_scrub_read(data, actions);
            }
            Role::Primary(primary) => {
                if let Some(FetchOfFollower { from, number, through, range }) = primary.fetches.remove(&read)
                {
                    return match data {
                        Some(_) => self.send(from, MessageBody::Fetched { number, through, data }, actions),
                        None => self.begin_repair_for_follower(read, range, actions),
                    };
                }
                let Some(request) = primary.reading.remove(&read) else { return };
                primary.read_names.remove(&(request.client, request.number));
                if let Some((_, begun_ns)) = primary.measured_read.take_if(|(measured, _)| *measured == read)
                {
                    self.pacer.observe_read(self.now_ns - begun_ns, self.now_ns);
                }
                match data {
                    Some(data) => {
                        let took_ns = self.now_ns - request.arrived_ns;
                        self.volumes.read(request.object, request.length, took_ns);
                        request.answer(ClientReply::Data(data), actions);
                    }
                    None => self.begin_repair(read, request, actions),
                }
            }
            Role::Follower(_) => self.answer_fetch(read, data, actions),
            Role::Starting => {}
        }
    }

    /// It is no longer primary: requests are for the new one, which knows those that are in its log.
    pub(crate) fn refuse_requests(&mut self, primary: Primary, actions: &mut Vec<ReplicaAction>) {
        let mut writes: Vec<_> = primary.uncommitted.into_iter().filter(|(client, _)| *client != 0).collect();
        // In an order that repeats.
        writes.sort_unstable();
        let waiting: Vec<_> = primary.waiting_writes.iter().map(ClientRequest::name).collect();
        for (client, number) in writes.into_iter().chain(waiting) {
            actions.push(ReplicaAction::Reply { client, number, reply: self.not_primary() });
        }
        for read in primary.waiting_reads.into_iter().chain(primary.reading.into_values()) {
            read.answer(self.not_primary(), actions);
        }
        for repair in primary.repairs.into_values() {
            repair.refuse(self.not_primary(), actions);
        }
        primary.scrub.into_iter().for_each(|scrub| scrub.end(ScrubOutcome::NotPrimary, actions));
    }

    /// Proposes to go on without members that are silent, or with a learner that has everything.
    fn propose_members(&mut self, actions: &mut Vec<ReplicaAction>) {
        let is_transferring = self.is_transferring();
        if self.proposal.is_some() && !is_transferring {
            return;
        }
        let (now_ns, end, commit_point) = (self.now_ns, self.log.end(), self.commit_point);
        let lease_ns = self.settings.lease_ns;
        let unprepared = self.has_fault(PlantedReplicaFault::PromoteUnprepared);
        let own = self.id;
        let primary = self.primary();
        let epoch_ns = primary.epoch_ns;
        let silent = |peer: &Peer| peer.in_sync && is_silent(peer, epoch_ns, lease_ns, now_ns);
        let mut in_sync = vec![own];
        let members = primary.peers.iter().filter(|(_, peer)| peer.in_sync && !silent(peer));
        in_sync.extend(members.map(|(id, _)| *id));
        if primary.peers.values().any(silent) {
            return self.propose(own, in_sync, actions);
        }
        if now_ns < primary.act_after_ns || is_transferring || primary.is_comparing {
            return;
        }
        // A new primary's commit point may be older than the true one, which its log's end is not. What is
        // stable may have been read.
        let committed_max = commit_point.max(primary.established).max(primary.stable);
        for (id, peer) in &mut primary.peers {
            let nearly = peer.acknowledged.is_some_and(|through| through + NEARLY_ALL_ENTRIES >= end);
            if peer.in_sync || !matches!(peer.copy, CopyStage::None) || !peer.known || !nearly {
                continue;
            }
            let has_all = peer.acknowledged >= Some(committed_max);
            // Commits do not begin to wait for one whose device may hang.
            peer.joining |= !unprepared && (has_all || peer.gained);
            if unprepared || (has_all && peer.has_lease(lease_ns, now_ns)) {
                peer.proposed = true;
                in_sync.push(*id);
                return self.propose(own, in_sync, actions);
            }
        }
    }

    pub(crate) fn primary_deadline(&self, primary: &Primary) -> u64 {
        let ReplicaSettings { heartbeat_ns, resend_ns, lease_ns, learner_timeout_ns, .. } = self.settings;
        let mut deadline = u64::MAX;
        if self.stale.is_some() {
            return deadline;
        }
        if primary.act_after_ns > self.now_ns {
            deadline = primary.act_after_ns;
        }
        let repairs = primary.repairs.values().map(|repair| repair.sent_ns + resend_ns);
        deadline = deadline.min(repairs.min().unwrap_or(u64::MAX));
        let scrub = primary.scrub.as_ref().and_then(|scrub| scrub.deadline(resend_ns));
        deadline = deadline.min(scrub.unwrap_or(u64::MAX));
        deadline = deadline.min(self.leave_deadline().unwrap_or(u64::MAX));
        deadline = deadline.min(self.sessions_deadline(&primary.sessions));
        for peer in primary.peers.values() {
            deadline = deadline.min(peer.copy.deadline(self.now_ns, resend_ns));
            if matches!(peer.copy, CopyStage::Resetting { .. }) {
                // Only the copy's own deadline counts.
            } else if primary.is_comparing {
                let wait_ns = if peer.is_compared { heartbeat_ns } else { resend_ns };
                deadline = deadline.min(if peer.in_sync { peer.sent_ns + wait_ns } else { u64::MAX });
            } else if !peer.known || peer.probing {
                deadline = deadline.min(peer.sent_ns + resend_ns);
            } else {
                deadline = deadline.min(peer.sent_ns + heartbeat_ns);
                deadline = deadline.min(peer.ask_ns(resend_ns).unwrap_or(u64::MAX));
            }
            if peer.in_sync && (self.proposal.is_none() || self.is_transferring()) {
                deadline = deadline.min(peer.lease_from_ns.unwrap_or(0).max(primary.epoch_ns) + lease_ns);
            } else if !peer.in_sync && !peer.proposed {
                let timeout_ns = if peer.joining { lease_ns } else { learner_timeout_ns };
                deadline = deadline.min(peer.answered_ns + timeout_ns);
            }
        }
        deadline.max(self.now_ns + 1)
    }
}

/// The entry without its data.
fn withhold(entry: &ReplicatedEntry) -> ReplicatedEntry {
    let header = EntryHeader { withheld: true, data_crc32c: 0, ..entry.header.clone() };
    ReplicatedEntry { header, data: [].into() }
}

/// Whether a member has not answered for a lease, so that it may propose itself soon, or holds commits up for
/// as long.
pub(crate) fn is_silent(peer: &Peer, epoch_ns: u64, lease_ns: u64, now_ns: u64) -> bool {
    peer.lost
        || now_ns >= peer.lease_from_ns.unwrap_or(0).max(epoch_ns) + lease_ns
        || peer.stands_still(lease_ns, now_ns)
}
