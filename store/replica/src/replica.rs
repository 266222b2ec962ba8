//! A replica of a logical group: what its roles share.

use std::sync::Arc;

use crate::follower::Follower;
use crate::leave::Leaving;
use crate::log::EntryLog;
use crate::primary::Primary;
use crate::unsettled::UnsettledBlocks;
use crate::volumes::VolumeCounters;
use crate::{
    AppliedRequests, ClientReply, ClientRequest, CopyPacer, EntryId, GroupConfig, GroupMemory, MessageBody,
    NoFaults, PlantedReplicaFault, Plants, RecoveredReplica, ReplicaAction, ReplicaCheckpoint, ReplicaEvent,
    ReplicaId, ReplicaMessage, ReplicatedEntry, StaleReason, VolumeTotals,
};

/// Times and limits. All replicas of a group have the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaSettings {
    /// The logical group.
    pub group: u32,
    /// Writes are acknowledged only with this many replicas in sync.
    pub in_sync_min: usize,
    /// How long a member's answer lets the primary read, from sending what it answers.
    pub lease_ns: u64,
    /// How long a member waits for its primary before it proposes itself. Longer than the lease by more than
    /// clocks differ.
    pub grace_ns: u64,
    /// A primary sends each member at least one message in this time.
    pub heartbeat_ns: u64,
    /// A replica that has not acknowledged entries is asked after this time which of them it has; other
    /// messages without an answer are sent again.
    pub resend_ns: u64,
    /// Proposals without an answer, and requests to join, are repeated after this time.
    pub retry_ns: u64,
    /// The session of a client that has said nothing for this time ends: longer than a client repeats a
    /// request after it last said that it lives.
    pub session_timeout_ns: u64,
    /// A learner that makes no progress for this time loses its stream.
    pub learner_timeout_ns: u64,
    /// A primary hands over to the preferred one when its record has been the same for this time. Each change
    /// of a primary makes writes wait for a moment, and a node that has just come back may fail again.
    pub transfer_after_ns: u64,
    /// Applied entries that cause a checkpoint.
    pub checkpoint_entries: u64,
    /// Entries that the log keeps although a checkpoint has them, for replicas that come back.
    pub retained_entries: u64,
    /// Most entries in the log. A write is refused as busy then.
    pub entries_max: usize,
    /// Most reads that wait for leases.
    pub reads_max: usize,
    /// What is repaired is whole blocks of this many bytes.
    pub block_bytes: u32,
    /// Storages write whole blocks in place once the headers of their entries are durable, before they are
    /// committed.
    pub in_place: bool,
    /// A read of an object of which the log has entries has them written in place and waits for that, as in
    /// the paper (Oh et al., section V-G); else storages lay them over what the device has.
    pub reads_flush: bool,
}

impl Default for ReplicaSettings {
    fn default() -> ReplicaSettings {
        const MS: u64 = 1_000_000;
        ReplicaSettings {
            group: 1,
            in_sync_min: 2,
            lease_ns: 400 * MS,
            grace_ns: 450 * MS,
            heartbeat_ns: 100 * MS,
            resend_ns: 60 * MS,
            retry_ns: 150 * MS,
            session_timeout_ns: 120_000 * MS,
            learner_timeout_ns: 1000 * MS,
            transfer_after_ns: 5000 * MS,
            checkpoint_entries: 16,
            retained_entries: 1024,
            entries_max: 4096,
            reads_max: 256,
            block_bytes: wire_store::BLOCK_BYTES as u32,
            in_place: false,
            reads_flush: false,
        }
    }
}

impl ReplicaSettings {
    /// The default, with another lease and grace. In a lease a primary sends four messages, and can repeat
    /// one that was lost.
    pub fn with_lease(lease_ns: u64, grace_ns: u64) -> ReplicaSettings {
        let default = ReplicaSettings::default();
        let resend_ns = default.resend_ns.min(lease_ns * 3 / 20);
        ReplicaSettings { lease_ns, grace_ns, heartbeat_ns: lease_ns / 4, resend_ns, ..default }
    }
}

/// Why a group serves no requests at a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupBlocked {
    /// The map's record was not read yet.
    NoMap,
    /// Another replica is the primary.
    NotPrimary,
    /// The primary was silent; the map has not answered the proposal of another one.
    NoPrimary,
    /// A new primary waits until the earlier one's leases have lapsed.
    EarlierLease,
    /// A new primary waits until all members have its entries.
    Reconciling,
    /// A member does not answer; the map has not answered the proposal to go on without it.
    MemberSilent,
    /// Fewer replicas are in sync than writes need.
    TooFewInSync,
    /// The primary lost its data, and no other replica in sync has taken over.
    DataLost,
    /// The replica lacks what it had, and no other replica in sync has taken over.
    Stale,
    /// A restarted primary waits until all members have said where their logs end.
    Comparing,
}

/// The state of a replica, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// Epoch of the map's record.
    pub epoch: u32,
    /// The last entry of the log.
    pub log_end: u64,
    /// The last entry that is committed, as far as known.
    pub commit_point: u64,
    /// Every entry up to the commit point is applied here, none of it missing.
    pub complete: bool,
    /// Ranges that it could not read, and wrote again with what another replica has, since its start.
    pub repaired: u64,
    /// Blocks with what a client had written in place whose session ended before it was committed, and that
    /// this replica appended when it became primary, as it has overwritten what was there. Since its start.
    pub revived: u64,
    /// Blocks that have the data of entries which the log lost, and wait for what the primary has.
    pub unsettled: usize,
    /// Why it is not believed, until it is in sync again; `None` if it is.
    pub stale: Option<StaleReason>,
    /// It has entries that are committed, and that the primary does not have: it stays as it is.
    pub contradicts: bool,
    /// Clients that have a session.
    pub sessions: usize,
    /// Why it does not serve reads and writes; `None` if it does.
    pub blocked: Option<GroupBlocked>,
}

#[allow(clippy::large_enum_variant, reason = "a replica has one, which does not move")]
pub(crate) enum Role {
    /// The map was not read since the start. What an earlier run promised is unknown, so messages are
    /// ignored.
    Starting,
    Follower(Follower),
    Primary(Primary),
}

/// A proposal that the map has not answered.
#[derive(Debug)]
pub(crate) struct Proposal {
    pub config: Arc<GroupConfig>,
    pub again_ns: u64,
}

/// A replica of a logical group. See the [crate](crate) for what it does, [`ReplicaEvent`] and
/// [`ReplicaAction`] for how.
pub struct Replica<F = NoFaults> {
    pub(crate) id: ReplicaId,
    pub(crate) settings: ReplicaSettings,
    pub(crate) faults: F,
    pub(crate) config: Arc<GroupConfig>,
    pub(crate) role: Role,
    pub(crate) log: EntryLog,
    /// Entries up to here are committed and applied.
    pub(crate) commit_point: u64,
    pub(crate) applied: AppliedRequests,
    /// Not while objects are copied.
    pub(crate) complete: bool,
    pub(crate) proposal: Option<Proposal>,
    /// When it last answered a primary, or started. Before a grace has passed since, another primary may
    /// read.
    pub(crate) heard_ns: u64,
    pub(crate) now_ns: u64,
    checkpoints: u64,
    checkpointing: Option<Checkpointing>,
    checkpointed: EntryId,
    /// The log had little room since the last checkpoint ended.
    pub(crate) log_low: bool,
    pub(crate) reads: u64,
    pub(crate) repaired: u64,
    pub(crate) revived: u64,
    /// When the next part of a copy is read.
    pub(crate) pacer: Arc<CopyPacer>,
    /// Requests of clients, while it is the primary.
    pub(crate) volumes: VolumeCounters,
    pub(crate) unsettled: UnsettledBlocks,
    /// The last session of a stream that it asked for. Higher at each start.
    pub(crate) sessions: u64,
    /// The replicas that may become learners; `None` for all.
    pub(crate) learners: Option<Vec<ReplicaId>>,
    /// Its node is to stop.
    pub(crate) leaving: Option<Leaving>,
    /// The epoch before which it was the primary, if it has handed over.
    pub(crate) handed_over: u32,
    /// What was known from elsewhere at the start.
    pub(crate) memory: GroupMemory,
    /// The start found a damaged log.
    pub(crate) is_damaged: bool,
    /// Why it is not believed.
    pub(crate) stale: Option<StaleReason>,
    /// As a member, it has all that members had at some time since the start.
    pub(crate) is_compared: bool,
    /// Entries of the log prove that those up to here are committed.
    pub(crate) proven: u64,
    /// It has what the primary lacks.
    pub(crate) contradicts: bool,
    /// The epoch in which a person decided that this replica serves; 0 for never.
    pub(crate) accepted_epoch: u32,
}

struct Checkpointing {
    number: u64,
    through: EntryId,
    complete: bool,
}

impl Replica<NoFaults> {
    /// A replica with what its storage has. `incarnation` is higher at each start of the node.
    ///
    /// # Panics
    /// If the log does not begin at the checkpoint or before it, or ends before it: the storage checks what
    /// it reads.
    pub fn new(
        id: ReplicaId,
        incarnation: u32,
        settings: ReplicaSettings,
        recovered: RecoveredReplica,
        now_ns: u64,
    ) -> Replica<NoFaults> {
        Replica::with_faults(id, incarnation, settings, recovered, now_ns, NoFaults)
    }
}

impl<F: Plants> Replica<F> {
    /// A replica that makes errors on purpose, for simulations.
    pub fn with_faults(
        id: ReplicaId,
        incarnation: u32,
        settings: ReplicaSettings,
        recovered: RecoveredReplica,
        now_ns: u64,
        faults: F,
    ) -> Replica<F> {
        let RecoveredReplica { checkpoint, base, entries, unsettled, is_damaged } = recovered;
        let proven = entries.iter().map(|entry| entry.header.commit_point).max().unwrap_or(0);
        let end = base.sequence + entries.len() as u64;
        let through = checkpoint.through.sequence;
        assert!(
            (base.sequence..=end).contains(&through),
            "the log begins after the checkpoint or ends before it"
        );
        let none = GroupConfig { epoch: 0, primary: id, in_sync: Vec::new() };
        Replica {
            id,
            sessions: wire_replica::KNOWS_SESSIONS | u64::from(incarnation) << 32,
            settings,
            faults,
            config: Arc::new(none),
            role: Role::Starting,
            log: EntryLog::new(base, entries),
            commit_point: checkpoint.through.sequence,
            applied: checkpoint.applied,
            complete: checkpoint.complete,
            proposal: None,
            heard_ns: now_ns,
            now_ns,
            checkpoints: 0,
            checkpointing: None,
            checkpointed: checkpoint.through,
            log_low: false,
            reads: 0,
            repaired: 0,
            revived: 0,
            pacer: Arc::default(),
            volumes: VolumeCounters::default(),
            unsettled: UnsettledBlocks::new(unsettled, end + 1),
            learners: None,
            leaving: None,
            handed_over: 0,
            memory: GroupMemory::default(),
            is_damaged,
            stale: None,
            is_compared: false,
            proven: proven.min(end),
            contradicts: false,
            accepted_epoch: 0,
        }
    }

    /// Has requests of clients counted in the totals of its node.
    pub fn set_volume_totals(&mut self, totals: Arc<VolumeTotals>) {
        self.volumes = VolumeCounters::new(totals);
    }

    /// Has copies share their turns with those of other replicas.
    pub fn set_copy_pacer(&mut self, pacer: Arc<CopyPacer>) {
        self.pacer = pacer;
    }

    pub(crate) fn has_fault(&self, fault: PlantedReplicaFault) -> bool {
        self.faults.has(fault)
    }

    /// Takes an event at a time of its own clock, in nanoseconds, which never goes back and runs while the
    /// machine is suspended. Appends what the owner does now to `actions`.
    pub fn handle(&mut self, event: ReplicaEvent, now_ns: u64, actions: &mut Vec<ReplicaAction>) {
        self.handle_batch([event], now_ns, actions);
    }

    /// Takes events that happened at about the same time: entries that they append travel together.
    pub fn handle_batch(
        &mut self,
        events: impl IntoIterator<Item = ReplicaEvent>,
        now_ns: u64,
        actions: &mut Vec<ReplicaAction>,
    ) {
        self.now_ns = self.now_ns.max(now_ns);
        events.into_iter().for_each(|event| self.take(event, actions));
        match self.role {
            Role::Starting => {}
            Role::Follower(_) => {
                self.run_follower(actions);
                self.settle_blocks(actions);
                self.ask_primary_log_end(actions);
            }
            Role::Primary(_) => self.run_primary(actions),
        }
        self.repeat_proposal(actions);
        self.consider_checkpoint(actions);
    }

    fn take(&mut self, event: ReplicaEvent, actions: &mut Vec<ReplicaAction>) {
        match event {
            ReplicaEvent::Timer => {}
            ReplicaEvent::Message(message) => self.on_message(message, actions),
            ReplicaEvent::Request(request) => self.on_request(request, actions),
            ReplicaEvent::Memory(memory) => self.memory = memory,
            ReplicaEvent::AcceptLoss { epoch } => self.on_accept_loss(epoch, actions),
            ReplicaEvent::Map(config) => self.on_map(config, actions),
            ReplicaEvent::Learners(replicas) => self.on_learners(replicas, actions),
            ReplicaEvent::InSyncMin(in_sync_min) => self.settings.in_sync_min = in_sync_min,
            ReplicaEvent::Leave { successors, force } => self.leaving = Some(Leaving::new(successors, force)),
            ReplicaEvent::Stay => self.leaving = None,
            ReplicaEvent::PreferredPrimary(preferred) => self.on_preferred_primary(preferred, actions),
            ReplicaEvent::Scrub { scrub, object, offset, length } => {
                self.begin_scrub(scrub, (object, offset, length), actions);
            }
            ReplicaEvent::Appended { append } => {
                self.log.appended(append);
                self.answer_durable(actions);
            }
            ReplicaEvent::LogLow => self.log_low = true,
            ReplicaEvent::Checkpointed { checkpoint } => self.on_checkpointed(checkpoint, actions),
            ReplicaEvent::ReadDone { read, data } => self.on_read_done(read, data, actions),
            ReplicaEvent::ResetDone { session } => self.on_reset_done(session, actions),
            ReplicaEvent::ObjectRead { read, part } => self.on_object_read(read, part, actions),
            ReplicaEvent::Truncated { truncation, in_place } => {
                self.unsettled.confirm(truncation, &in_place);
                self.answer_durable(actions);
            }
            ReplicaEvent::Settled { number } => {
                self.unsettled.settled(number);
                self.answer_durable(actions);
            }
            ReplicaEvent::ObjectWritten { session, part } => self.on_object_written(session, part, actions),
        }
    }

    /// When to call [`handle`](Self::handle) with [`ReplicaEvent::Timer`], if nothing else happens; `None`
    /// for never.
    pub fn deadline(&self) -> Option<u64> {
        let role = match &self.role {
            Role::Starting => None,
            Role::Follower(follower) => {
                let others = [self.settle_deadline(follower), self.log_end_deadline(follower)];
                self.follower_deadline(follower).into_iter().chain(others.into_iter().flatten()).min()
            }
            Role::Primary(primary) => Some(self.primary_deadline(primary)),
        };
        let proposal = self.proposal.as_ref().map(|proposal| proposal.again_ns);
        [role, proposal].into_iter().flatten().min()
    }

    /// Its state, for people.
    pub fn status(&self) -> ReplicaStatus {
        let blocked = match &self.role {
            Role::Starting => Some(GroupBlocked::NoMap),
            Role::Follower(follower) if follower.fenced => Some(GroupBlocked::NoPrimary),
            Role::Follower(_) if self.config.primary == self.id && !self.complete => {
                Some(GroupBlocked::DataLost)
            }
            _ if self.doubt().is_some() => self.doubt(),
            Role::Follower(_) => Some(GroupBlocked::NotPrimary),
            Role::Primary(primary) => self.primary_blocked(primary),
        };
        ReplicaStatus {
            epoch: self.config.epoch,
            log_end: self.log.end(),
            commit_point: self.commit_point,
            complete: self.complete,
            repaired: self.repaired,
            revived: self.revived,
            unsettled: self.unsettled.len(),
            stale: self.stale,
            contradicts: self.contradicts,
            sessions: self.applied.session_count(),
            blocked,
        }
    }

    /// Which replica it is.
    pub fn id(&self) -> ReplicaId {
        self.id
    }

    /// The map's record as far as known; its epoch is 0 before the map was read.
    pub fn config(&self) -> &GroupConfig {
        &self.config
    }

    /// The requests that are applied up to the commit point.
    pub fn applied(&self) -> &AppliedRequests {
        &self.applied
    }

    pub(crate) fn is_in_sync(&self) -> bool {
        self.config.has(self.id)
    }

    pub(crate) fn send(&self, to: ReplicaId, body: MessageBody, actions: &mut Vec<ReplicaAction>) {
        let message = ReplicaMessage { from: self.id, config: self.config.clone(), body };
        actions.push(ReplicaAction::Send { to, message });
    }

    fn on_message(&mut self, message: ReplicaMessage, actions: &mut Vec<ReplicaAction>) {
        if matches!(self.role, Role::Starting) {
            return;
        }
        if message.config.epoch > self.config.epoch {
            self.adopt(message.config, actions);
        } else if message.config.epoch < self.config.epoch
            && !self.has_fault(PlantedReplicaFault::EpochUnchecked)
        {
            if message.body != MessageBody::Config {
                self.send(message.from, MessageBody::Config, actions);
            }
            return;
        }
        let from = message.from;
        match message.body {
            MessageBody::Config => {}
            MessageBody::HandOver => self.on_hand_over(from, actions),
            MessageBody::Leave => self.on_leave(from, actions),
            MessageBody::Append(append) => self.on_append(from, append, actions),
            MessageBody::CopyBegin { session, base, applied } => {
                self.on_copy_begin(from, session, base, *applied, actions);
            }
            MessageBody::CopyObject { session, part, content } => {
                self.on_copy_object(from, session, part, content, actions);
            }
            MessageBody::CopyEnd { session } => self.on_copy_end(from, session, actions),
            MessageBody::Appended { sent_ns, session, outcome } => {
                self.on_appended(from, sent_ns, session, outcome, actions);
            }
            MessageBody::LogEnd { sent_ns, last, committed } => {
                self.on_log_end(from, sent_ns, last, committed);
            }
            MessageBody::Join { session, commit_point, complete } => {
                self.on_join(from, session, commit_point, complete, actions);
            }
            MessageBody::CopyBegun { session } => self.on_copy_begun(from, session),
            MessageBody::CopyWritten { session, part } => self.on_copy_written(from, session, part),
            MessageBody::CopyEnded { session } => self.on_copy_ended(from, session),
            MessageBody::Fetch { number, object, offset, length } => {
                self.on_fetch(from, number, (object, offset, length), actions);
            }
            MessageBody::Fetched { number, through, data } => {
                self.on_fetched(from, number, through, data, actions);
            }
            MessageBody::Unsettled { number, through, entry } => {
                self.on_unsettled(from, (number, through), entry, actions);
            }
        }
    }

    fn on_request(&mut self, request: ClientRequest, actions: &mut Vec<ReplicaAction>) {
        if matches!(self.role, Role::Primary(_)) {
            return self.on_primary_request(request, actions);
        }
        let (client, number) = request.name();
        actions.push(ReplicaAction::Reply { client, number, reply: self.not_primary() });
    }

    pub(crate) fn not_primary(&self) -> ClientReply {
        let known = Some(self.config.primary).filter(|primary| *primary != self.id);
        ClientReply::NotPrimary { primary: known }
    }

    fn on_map(&mut self, config: Arc<GroupConfig>, actions: &mut Vec<ReplicaAction>) {
        let starting = matches!(self.role, Role::Starting);
        if starting {
            self.judge(config.has(self.id));
            if self.accepted_epoch >= config.epoch && self.complete && self.stale.take().is_some() {
                // A person accepted the loss before this start.
                actions.push(ReplicaAction::Restored);
            }
        }
        let is_sound = self.complete && self.stale.is_none();
        if starting && config.primary == self.id && config.has(self.id) && is_sound {
            // An earlier run may have appended entries in this epoch that its log lost and others have: their
            // names must not be given again.
            self.config = config;
            let mut follower = Follower::new(self);
            follower.fenced = true;
            self.role = Role::Follower(follower);
            self.propose(self.config.primary, self.config.in_sync.clone(), actions);
        } else if starting || config.epoch > self.config.epoch {
            self.adopt(config, actions);
        }
    }

    /// Takes a newer record of the map, and the role that it gives.
    fn adopt(&mut self, config: Arc<GroupConfig>, actions: &mut Vec<ReplicaAction>) {
        let earlier = std::mem::replace(&mut self.config, config);
        self.proposal = None;
        self.contradicts &= earlier.primary == self.config.primary;
        self.ask_to_leave_again();
        self.membership_changed(earlier.has(self.id), actions);
        let primary = self.config.primary == self.id && self.is_sound_member();
        match (&mut self.role, primary) {
            (Role::Primary(_), true) => self.continue_as_primary(actions),
            (_, true) => {
                self.unsettled.forget_requests();
                self.role = Role::Primary(Primary::new(self));
                if !self.is_comparing() {
                    self.append_unsettled(actions);
                }
            }
            (Role::Follower(follower), false) if earlier.primary == self.config.primary => {
                follower.epoch_began(self.commit_point);
                self.unsettled.forget_requests();
            }
            (_, false) => {
                let role = std::mem::replace(&mut self.role, Role::Starting);
                self.unsettled.forget_requests();
                // The new primary gets the time to send its first message.
                self.heard_ns = self.now_ns;
                self.role = Role::Follower(Follower::new(self));
                if let Role::Primary(primary) = role {
                    self.hand_over(&primary, earlier.epoch, actions);
                    self.refuse_requests(primary, actions);
                }
            }
        }
        if primary {
            self.notify_removed(&earlier, actions);
        }
    }

    /// Proposes the next epoch's record.
    pub(crate) fn propose(
        &mut self,
        primary: ReplicaId,
        in_sync: Vec<ReplicaId>,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let config = Arc::new(GroupConfig { epoch: self.config.epoch + 1, primary, in_sync });
        actions.push(ReplicaAction::Propose(config.clone()));
        self.proposal = Some(Proposal { config, again_ns: self.now_ns + self.settings.retry_ns });
    }

    fn repeat_proposal(&mut self, actions: &mut Vec<ReplicaAction>) {
        if let Some(proposal) = &mut self.proposal
            && self.now_ns >= proposal.again_ns
        {
            proposal.again_ns = self.now_ns + self.settings.retry_ns;
            actions.push(ReplicaAction::Propose(proposal.config.clone()));
        }
    }

    /// Appends an entry to the log.
    pub(crate) fn append(&mut self, entry: Arc<ReplicatedEntry>, actions: &mut Vec<ReplicaAction>) {
        let append = self.log.append(entry.clone());
        actions.push(ReplicaAction::Append { append, entry });
    }

    /// Applies the entries up to a sequence, which are committed. `replies` says whether their clients get
    /// answers.
    pub(crate) fn commit(&mut self, through: u64, replies: bool, actions: &mut Vec<ReplicaAction>) {
        while self.commit_point < through {
            self.commit_point += 1;
            let entry = self.log.get(self.commit_point).expect("committed entries are in the log").clone();
            let (client, number) = (entry.header.client, entry.header.client_number);
            self.applied.apply(&entry.header);
            self.forget_session(self.commit_point);
            self.unsettled.is_replaced(&entry.header);
            let reply = (replies && client != 0).then(|| self.reply_to_committed(&entry.header));
            if !entry.header.withheld {
                actions.push(ReplicaAction::Apply { entry });
            }
            if let Some(reply) = reply {
                actions.push(ReplicaAction::Reply { client, number, reply });
            }
        }
    }

    fn consider_checkpoint(&mut self, actions: &mut Vec<ReplicaAction>) {
        let entries = self.commit_point - self.checkpointed.sequence;
        let copied = matches!(&self.role, Role::Follower(follower) if follower.copy_ended && !self.complete);
        let full = entries > 0 && self.log.len() >= self.settings.entries_max;
        let low = entries > 0 && self.log_low;
        if self.log_low {
            // A learner that needed entries may have them now.
            self.free_superfluous(actions);
        }
        let due = entries >= self.settings.checkpoint_entries || full || low || copied;
        if self.checkpointing.is_none() && due {
            let complete = self.complete || copied;
            let through = self.log.id(self.commit_point).expect("the log has the last committed entry");
            self.checkpoints += 1;
            let number = self.checkpoints;
            self.checkpointing = Some(Checkpointing { number, through, complete });
            let record = ReplicaCheckpoint { through, applied: self.applied.clone(), complete };
            actions.push(ReplicaAction::Checkpoint { checkpoint: number, record: Box::new(record) });
            if self.has_fault(PlantedReplicaFault::FreeEarly) {
                self.free(through.sequence, actions);
            }
        }
    }

    fn on_checkpointed(&mut self, checkpoint: u64, actions: &mut Vec<ReplicaAction>) {
        if let Some(done) = self.checkpointing.take_if(|checkpointing| checkpointing.number == checkpoint) {
            self.checkpointed = done.through;
            if done.complete && !self.complete {
                self.complete = true;
                self.answer_copy_end(actions);
            }
            self.free_superfluous(actions);
            self.log_low = false;
        }
    }

    /// Frees entries that are in place, neither retained nor needed by a learner.
    pub(crate) fn free_superfluous(&mut self, actions: &mut Vec<ReplicaAction>) {
        let retained = if self.log_low { 0 } else { self.settings.retained_entries };
        let through = self.log.end().saturating_sub(retained).min(self.learners_need());
        self.free(self.checkpointed.sequence.min(through), actions);
    }

    fn free(&mut self, through: u64, actions: &mut Vec<ReplicaAction>) {
        if self.log.free(through) {
            actions.push(ReplicaAction::Free { through: self.log.base() });
        }
    }

    /// Drops all entries and objects; a copy follows.
    pub(crate) fn reset(
        &mut self,
        session: u64,
        base: EntryId,
        applied: AppliedRequests,
        actions: &mut Vec<ReplicaAction>,
    ) {
        self.complete = false;
        self.proven = 0;
        self.unsettled = UnsettledBlocks::default();
        self.log.reset(base);
        self.commit_point = base.sequence;
        self.checkpointing = None;
        self.checkpointed = base;
        self.applied = applied.clone();
        let record = Box::new(ReplicaCheckpoint { through: base, applied, complete: false });
        actions.push(ReplicaAction::Reset { session, record });
    }
}
