//! A shard that belongs to a replica of a logical group: it carries out what the replica decides.
//!
//! What goes to the log is in one queue ([`Replication::log_queue`]): it waits for room there, for memory,
//! and for entries that are being written before others take their places. What concerns objects is in
//! another ([`Replication::object_queue`]), because room in the log may need what waits there. An entry that
//! is committed is where [`Shard::committed`](super::Shard) keeps those of a store without replicas, and goes
//! in place as they do.
//!
//! A checkpoint records what is in place, which may be more than the replica asked for, with the requests
//! that are applied up to there. So a checkpoint can be made at any time, also when an entry waits for the
//! space that others gave up.

mod actions;
mod background;
mod recovery;
mod start;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use cluster_map::{PartitionSize, PoolClass};
use foldhash::HashSet;
use reactor::{MailboxReceiver, MailboxSender};
use replica::{
    AppliedRequests, ClientReply, ClientRequest, CopyPacer, EntryId, GroupConfig, GroupMemory, LearnerStatus,
    LeaveStatus, ObjectPart, Replica, ReplicaAction, ReplicaCheckpoint, ReplicaEvent, ReplicaId,
    ReplicaMessage, ReplicaStatus,
};
use wire_store::{BLOCK_BYTES, CheckpointRecord, EntryHeader, ObjectId, Operation, UnsettledBlock, crc32c};

use super::copies::ObjectReads;
use super::scrub_state::Scrubs;
use super::{CommittedEntry, RETRY_NS, ShardReply, UnacknowledgedEntry};
use crate::StoreError;
use crate::device::StoreDevice;
pub(super) use background::{free, reset, settle};
pub(crate) use start::{ReplicaOptions, start};

/// Requests that wait for room in the log; more are refused as busy.
const WAITING_REQUESTS_MAX: usize = 1024;
/// Reads of the replica that the device carries out at a time.
const READS_MAX: usize = 1024;

/// What comes in from the network and the map.
#[derive(Debug)]
pub enum ReplicaInput {
    /// A message of another replica.
    Message(ReplicaMessage),
    /// A request of a client.
    Request(ClientRequest),
    /// What is known of the group from elsewhere than the device: it comes before the first record.
    Memory(GroupMemory),
    /// A person has decided that this replica serves: see [`ReplicaEvent::AcceptLoss`].
    AcceptLoss {
        /// The epoch of the record then.
        epoch: u32,
    },
    /// The map's record of the group.
    Map(Arc<GroupConfig>),
    /// The group's replicas with the sizes of their partitions, as far as known. Without, the primary's own
    /// one says what fits.
    Partitions(Vec<(ReplicaId, Option<PartitionSize>)>),
    /// What the group's pool demands: see [`ReplicaEvent::InSyncMin`].
    InSyncMin(usize),
    /// The node is to stop: see [`ReplicaEvent::Leave`].
    Leave {
        /// Replicas whose nodes stay up.
        successors: Vec<ReplicaId>,
        /// Leaves also if too few of these are in sync.
        force: bool,
        /// Gets the group and the status that is not [`LeaveStatus::Pending`]; dropped without if the replica
        /// has failed.
        outcome: Sender<(u32, LeaveStatus)>,
    },
    /// The node goes on.
    Stay,
    /// Placement prefers another replica as primary: see [`ReplicaEvent::PreferredPrimary`].
    PreferredPrimary(ReplicaId),
}

/// Where a replica's messages go. It does not block; what it cannot send it drops.
pub trait Outbox {
    /// Sends a message to another replica of the group.
    fn send(&mut self, group: u32, to: ReplicaId, message: ReplicaMessage);

    /// Answers a client.
    fn reply(&mut self, group: u32, client: u64, number: u64, reply: ClientReply);

    /// Proposes a record to the map, which answers with [`ReplicaInput::Map`].
    fn propose(&mut self, group: u32, config: Arc<GroupConfig>);

    /// The replica, which lacked what it had, is in sync again.
    fn restored(&mut self, _group: u32) {}
}

/// A replica, for people.
#[derive(Clone, Debug)]
pub struct ReplicaDescription {
    /// The logical group.
    pub group: u32,
    /// The map's record as it knows it.
    pub config: GroupConfig,
    /// Its state.
    pub status: ReplicaStatus,
    /// The last entry that it has as committed; `None` while objects are copied.
    pub committed: Option<EntryId>,
    /// The last entry of its log.
    pub last: EntryId,
    /// What was known from elsewhere when it started.
    pub memory: GroupMemory,
    /// Entries up to here are in place.
    pub in_place: u64,
    /// When it acknowledges a write.
    pub class: PoolClass,
    /// Replicas that catch up, if it is the primary.
    pub learners: Vec<LearnerStatus>,
}

/// A write of a checkpoint record.
pub(super) struct RecordWrite {
    offset: u64,
    bytes: Vec<u8>,
}

impl RecordWrite {
    /// Writes it; it is durable on return.
    pub(super) async fn write(&self, device: &StoreDevice) -> Result<(), StoreError> {
        device.write(self.offset, &self.bytes).await?;
        device.flush().await
    }
}

/// Where the two records of a log are.
#[derive(Clone, Copy)]
struct RecordPlaces {
    starts: [u64; 2],
    bytes: usize,
}

/// The replica of a shard, and what it waits for.
pub(super) struct Replication {
    group: u32,
    pub(super) replica: Replica,
    outbox: Box<dyn Outbox>,
    /// Those of all replicas of the group, as far as known.
    pub(super) partitions: Vec<(ReplicaId, Option<PartitionSize>)>,
    /// Those that have room for what this one has, as the replica knows them.
    pub(super) learners: Vec<ReplicaId>,
    /// The last session of which a copied object found no room here.
    refused_copy: Option<u64>,
    /// Parts of copied objects that are not in place: the primary waits for each.
    copies_to_place: usize,
    pub(super) events: VecDeque<ReplicaEvent>,
    /// When the replica wants the next [`ReplicaEvent::Timer`].
    replica_deadline: Option<u64>,
    /// Gets the outcome of leaving, once.
    leave_outcome: Option<Sender<(u32, LeaveStatus)>>,
    /// The node is to stop.
    node_leaves: bool,
    /// The device hangs.
    hangs: bool,
    /// Scratch, empty between events.
    actions: Vec<ReplicaAction>,
    log_queue: VecDeque<ReplicaAction>,
    object_queue: VecDeque<ReplicaAction>,
    /// Reads that the device has not begun.
    reads: VecDeque<ReplicaAction>,
    /// Unsettled blocks to write.
    settles: VecDeque<ReplicaAction>,
    /// Writes of clients that wait for room in the log.
    waiting: VecDeque<ClientRequest>,
    /// Client and number of each.
    waiting_names: HashSet<(u64, u64)>,
    /// Of each entry of [`Shard::unacknowledged`](super::Shard), the number of its append.
    appends: VecDeque<u64>,
    /// Entries that are durable and not committed here.
    durable: VecDeque<CommittedEntry>,
    /// Entries up to here are committed.
    committed: EntryId,
    /// Entries up to here are in place, and the requests that they are.
    in_place: EntryId,
    applied: AppliedRequests,
    complete: bool,
    /// The checkpoint that the replica waits for.
    checkpoint: Option<(u64, Box<ReplicaCheckpoint>)>,
    /// The record that is being written is that checkpoint.
    is_recording: bool,
    /// What is in the last record.
    recorded_through: u64,
    free_through: u64,
    /// The blocks of the entries from here on, which are to be truncated, are listed as unsettled.
    given_up: Option<u64>,
    reset: Option<(u64, Box<ReplicaCheckpoint>)>,
    is_resetting: bool,
    log_low_sent: bool,
    /// Entries up to here were in the log at the start: blocks that they change in part are not verified.
    recovered_through: u64,
    log_uuid: [u8; 16],
    generation: u64,
    places: RecordPlaces,
    class: PoolClass,
    /// See [`CheckpointRecord::boot`].
    boot: [u8; 16],
    reading: usize,
    sender: MailboxSender<ShardReply>,
    replies: MailboxReceiver<ShardReply>,
    pub(super) object_reads: ObjectReads,
    pub(super) scrubs: Scrubs,
    /// Shared by the replicas of the node.
    pub(super) pacer: Arc<CopyPacer>,
}

impl Replication {
    /// An entry of the log is durable, with all before it.
    pub(super) fn is_durable(&mut self, entry: UnacknowledgedEntry) {
        let UnacknowledgedEntry { place, header, data, need, placed, .. } = entry;
        let (bytes, copied) = (place.bytes, None);
        self.durable.push_back(CommittedEntry { header, data, bytes, need, copied, placed });
        let append = self.appends.pop_front().expect("it was appended");
        match self.events.back_mut() {
            Some(ReplicaEvent::Appended { append: newest }) => *newest = append,
            _ => self.events.push_back(ReplicaEvent::Appended { append }),
        }
    }

    /// Whether blocks that an entry changes in part have their checksums: a crash may have left them without.
    pub(super) fn is_verified(&self, sequence: u64) -> bool {
        sequence > self.recovered_through
    }

    /// A committed entry is in place, or a part of a copied object.
    pub(super) fn is_in_place(&mut self, entry: &CommittedEntry) {
        let EntryHeader { sequence, epoch, object, .. } = entry.header;
        if sequence > self.in_place.sequence {
            self.in_place = EntryId { sequence, epoch };
            self.applied.apply(&entry.header);
        }
        if !self.is_redoing() {
            self.object_reads.wake();
        }
        if let Some((session, number)) = entry.copied {
            self.copies_to_place = self.copies_to_place.saturating_sub(1);
            let part = ObjectPart { object, number };
            self.events.push_back(ReplicaEvent::ObjectWritten { session, part });
        }
    }

    /// The record of what is in place now.
    pub(super) fn next_record(&mut self, unsettled: &[UnsettledBlock]) -> RecordWrite {
        if let Some((_, wanted)) = &self.checkpoint
            && wanted.through.sequence <= self.in_place.sequence
        {
            self.complete = wanted.complete;
            self.is_recording = true;
        }
        self.generation += 1;
        self.recorded_through = self.in_place.sequence;
        let mut applied = Vec::new();
        self.applied.encode(&mut applied);
        let applied_bytes = applied.len() as u32;
        unsettled.iter().for_each(|block| block.encode(&mut applied));
        let record = CheckpointRecord {
            log: self.log_uuid,
            generation: self.generation,
            sequence: self.in_place.sequence,
            epoch: self.in_place.epoch,
            complete: self.complete,
            applied_bytes,
            applied_crc32c: crc32c(&applied),
            unsettled: unsettled.len() as u32,
            boot: self.boot,
        };
        let mut bytes = record.encode().to_vec();
        bytes.extend_from_slice(&applied);
        bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
        assert!(bytes.len() <= self.places.bytes, "a record of {} bytes has no room", bytes.len());
        RecordWrite { offset: self.places.starts[record.slot() as usize], bytes }
    }

    /// The record is durable. Returns the sequence up to which it has entries.
    pub(super) fn is_checkpointed(&mut self) -> u64 {
        self.log_low_sent = false;
        if std::mem::take(&mut self.is_recording)
            && let Some((checkpoint, _)) = self.checkpoint.take()
        {
            self.events.push_back(ReplicaEvent::Checkpointed { checkpoint });
        }
        self.recorded_through
    }

    /// Whether nothing is to be done at this time.
    fn is_idle(&self, now_ns: u64) -> bool {
        let is_due = self.replica_deadline.is_some_and(|at_ns| at_ns <= now_ns);
        let queues = [&self.log_queue, &self.object_queue, &self.reads];
        !is_due
            && self.events.is_empty()
            && self.waiting.is_empty()
            && queues.into_iter().all(VecDeque::is_empty)
            && !self.is_reset()
            && (self.reading == 0 || self.replies.is_empty())
    }

    /// When it has something to do, if nothing happens until then.
    pub(super) fn deadline(&self, now_ns: u64) -> Option<u64> {
        if !self.events.is_empty() || !self.replies.is_empty() {
            return Some(0);
        }
        // What waits for memory is tried again.
        let waits = !self.log_queue.is_empty() || !self.object_queue.is_empty() || !self.waiting.is_empty();
        let retry = waits.then_some(now_ns + RETRY_NS);
        self.replica_deadline.into_iter().chain(retry).min()
    }

    /// The device hangs, or answers again: the replica leaves its group for that time.
    pub(super) fn device_hangs(&mut self, hangs: bool) {
        self.hangs = hangs;
        if !self.node_leaves {
            self.leave_or_stay();
        }
    }

    /// Leaves the group if the device hangs, and stays otherwise.
    fn leave_or_stay(&mut self) {
        let own = self.replica.id();
        let others = self.replica.config().in_sync.iter().copied().filter(|member| *member != own);
        self.events.push_back(match self.hangs {
            true => ReplicaEvent::Leave { successors: others.collect(), force: false },
            false => ReplicaEvent::Stay,
        });
    }

    /// Passes on that the replica has left its group, or cannot.
    fn report_leave(&mut self) {
        let status = self.replica.leave_status().filter(|status| *status != LeaveStatus::Pending);
        if let Some(status) = status
            && let Some(outcome) = self.leave_outcome.take()
        {
            let _ = outcome.send((self.group, status));
        }
    }

    pub(super) fn describe(&self) -> ReplicaDescription {
        ReplicaDescription {
            group: self.group,
            config: self.replica.config().clone(),
            status: self.replica.status(),
            committed: self.replica.committed(),
            last: self.replica.last_entry(),
            memory: self.replica.memory(),
            in_place: self.in_place.sequence,
            class: self.class,
            learners: self.replica.learners(),
        }
    }

    /// Entries that were in the log at the start are committed and not in place yet: blocks that they change
    /// may have neither the old nor the new checksum. What is read waits for them.
    pub(super) fn is_redoing(&self) -> bool {
        self.in_place.sequence < self.recovered_through.min(self.committed.sequence)
    }

    /// Whether entries that were in the log at the start, and may be in place, change a range of an object.
    /// Others get them with a copy of the object, so that its blocks need not have their checksums.
    pub(super) fn may_be_changed(&self, object: ObjectId, range: Range<u32>) -> bool {
        self.durable.iter().any(|CommittedEntry { header, .. }| {
            let end = header.offset + header.length;
            let is_all = header.operation == Operation::Remove;
            header.sequence <= self.recovered_through
                && header.object == object
                && (is_all || (header.offset < range.end && range.start < end))
        })
    }

    /// An object for a copy.
    pub(super) fn object_was_read(&mut self, event: ReplicaEvent) {
        self.events.push_back(event);
    }

    /// A read of the replica's own.
    pub(super) fn read_for_repair(&mut self, read: ClientRequest) {
        self.events.push_back(ReplicaEvent::Request(read));
    }

    /// Whether nothing of the log or of the objects may be begun.
    fn is_reset(&self) -> bool {
        self.reset.is_some() || self.is_resetting
    }

    /// Sorts out what the replica decided.
    fn dispatch(&mut self, action: ReplicaAction) {
        match action {
            ReplicaAction::Send { to, message } => self.outbox.send(self.group, to, message),
            ReplicaAction::Reply { client, number, reply } => {
                let reply = self.object_reads.take_reply(client, number, reply);
                if let Some(reply) = reply.and_then(|reply| self.scrubs.take_reply(client, number, reply)) {
                    self.outbox.reply(self.group, client, number, reply);
                }
            }
            ReplicaAction::Scrubbed { scrub, outcome } => self.scrubs.take_outcome(scrub, outcome),
            ReplicaAction::Propose(config) => self.outbox.propose(self.group, config),
            ReplicaAction::Restored => self.outbox.restored(self.group),
            ReplicaAction::Append { .. } | ReplicaAction::Truncate { .. } => self.log_queue.push_back(action),
            ReplicaAction::Free { through } => self.free_through = through.sequence,
            ReplicaAction::Reset { session, record } => {
                self.log_queue.clear();
                self.object_queue.clear();
                self.reads.clear();
                self.object_reads.clear();
                self.copies_to_place = 0;
                self.settles.clear();
                self.checkpoint = None;
                self.is_recording = false;
                self.reset = Some((session, record));
            }
            ReplicaAction::Apply { .. }
            | ReplicaAction::Stable { .. }
            | ReplicaAction::Settle { .. }
            | ReplicaAction::Checkpoint { .. }
            | ReplicaAction::Read { .. }
            | ReplicaAction::ReadObject { .. }
            | ReplicaAction::WriteObject { .. } => self.object_queue.push_back(action),
        }
    }
}
