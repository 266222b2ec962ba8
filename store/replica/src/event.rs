//! What goes in and out of a replica.

use std::sync::Arc;

use wire_replica::{
    AppliedRequests, ClientReply, ClientRequest, EntryId, GroupConfig, ObjectPart, ReplicaId, ReplicaMessage,
    ReplicatedEntry,
};
use wire_store::ObjectId;

use crate::{GroupMemory, ScrubOutcome};

/// A checkpoint: the state in place that makes entries of the log superfluous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaCheckpoint {
    /// All entries up to this one are in place.
    pub through: EntryId,
    /// The requests that are applied.
    pub applied: AppliedRequests,
    /// The replica has the data of every entry up to there.
    pub complete: bool,
}

/// What the storage has after a start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveredReplica {
    /// The newest durable checkpoint.
    pub checkpoint: ReplicaCheckpoint,
    /// The entry before the first of the log; the checkpoint's or an earlier one.
    pub base: EntryId,
    /// The entries of the log, in their order. One whose data is not known any more, because a later one
    /// replaced it in place, is withheld.
    pub entries: Vec<Arc<ReplicatedEntry>>,
    /// Blocks that have the data of entries which are not in the log: those whose data is in place although
    /// that of an earlier one is not, and what [`ReplicaAction::Truncate`] left.
    pub unsettled: Vec<Arc<ReplicatedEntry>>,
    /// An entry in the middle of the log is damaged for certain: it lacks what it had from there on.
    pub is_damaged: bool,
}

/// A new group: nothing is written yet, and nothing is missing.
impl Default for RecoveredReplica {
    fn default() -> RecoveredReplica {
        let checkpoint = ReplicaCheckpoint {
            through: EntryId::default(),
            applied: AppliedRequests::default(),
            complete: true,
        };
        let (base, entries, unsettled) = (EntryId::default(), Vec::new(), Vec::new());
        RecoveredReplica { checkpoint, base, entries, unsettled, is_damaged: false }
    }
}

/// A part of an object that was read for a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopiedPart {
    /// Which part.
    pub part: ObjectPart,
    /// It is the object's last one.
    pub is_last: bool,
    /// As the storage encodes it.
    pub content: Arc<[u8]>,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplicaEvent {
    /// The deadline has passed.
    Timer,
    /// A message of another replica.
    Message(ReplicaMessage),
    /// A request of a client.
    Request(ClientRequest),
    /// What is known of the group from elsewhere than the replica's device. It comes before the first
    /// [`ReplicaEvent::Map`].
    Memory(GroupMemory),
    /// A person has decided that this replica, which is the only one that is there and lacks what it had,
    /// serves: what it lacks is lost. The group's record has this epoch.
    AcceptLoss {
        /// The epoch.
        epoch: u32,
    },
    /// The map's record as of now or earlier in this run: a read, a notification or the outcome of a
    /// proposal.
    Map(Arc<GroupConfig>),
    /// The replicas that may become learners, instead of those that were named before; without, all may. They
    /// are those of the map's record of the group whose storage has room for what this one has: one that has
    /// left the group still asks until it is removed. A primary neither copies to others nor sends them
    /// entries, unless they are in sync or may be.
    Learners(Vec<ReplicaId>),
    /// Writes need this many replicas in sync from now on: that of the primary counts.
    InSyncMin(usize),
    /// The node is to stop: the replica leaves the in-sync set, and hands over if it is the primary, so that
    /// no lease has to end for it. [`Replica::leave_status`](crate::Replica::leave_status) says how far it
    /// is.
    Leave {
        /// Replicas whose nodes stay up, in the order in which they are wanted as primary.
        successors: Vec<ReplicaId>,
        /// Leaves also if fewer of these are in sync than writes need, as long as there is one.
        force: bool,
    },
    /// The node goes on: [`ReplicaEvent::Leave`] does not hold any more.
    Stay,
    /// Placement prefers another member as primary. If this one is the primary, nothing has changed for
    /// [`ReplicaSettings::transfer_after_ns`](crate::ReplicaSettings::transfer_after_ns) and all members
    /// answer, it proposes that one, and hands over; else it does nothing.
    PreferredPrimary(ReplicaId),
    /// Compares a range of whole blocks, not longer than a read may be, with what the members in sync have.
    /// Only a primary does. [`ReplicaAction::Scrubbed`] answers; another one that comes before ends it.
    Scrub {
        /// Names it.
        scrub: u64,
        /// The object.
        object: ObjectId,
        /// Offset in the object, in bytes.
        offset: u32,
        /// Length in bytes. What a member cannot read is written again only if this is one block.
        length: u32,
    },
    /// All appends up to this number are durable.
    Appended {
        /// [`ReplicaAction::Append`]'s number.
        append: u64,
    },
    /// The log has little room: a checkpoint frees what is applied, entries for replicas that come back
    /// included.
    LogLow,
    /// The checkpoint is durable.
    Checkpointed {
        /// [`ReplicaAction::Checkpoint`]'s number.
        checkpoint: u64,
    },
    /// The outcome of [`ReplicaAction::Read`], `None` if the device cannot read it or it is damaged.
    ReadDone {
        /// The read's number.
        read: u64,
        /// The data.
        data: Option<Arc<[u8]>>,
    },
    /// [`ReplicaAction::Reset`] is durable.
    ResetDone {
        /// The session.
        session: u64,
    },
    /// The outcome of [`ReplicaAction::ReadObject`]: the part, or `None` if there are no more.
    ObjectRead {
        /// The read's number.
        read: u64,
        /// The part and its content.
        part: Option<CopiedPart>,
    },
    /// [`ReplicaAction::Truncate`] is done.
    Truncated {
        /// Its number.
        truncation: u64,
        /// Sequences of the entries that are in place: only their blocks are unsettled.
        in_place: Vec<u64>,
    },
    /// [`ReplicaAction::Settle`] is done; a later checkpoint makes it durable.
    Settled {
        /// Its number.
        number: u64,
    },
    /// [`ReplicaAction::WriteObject`] is done; a later checkpoint makes it durable.
    ObjectWritten {
        /// The session.
        session: u64,
        /// The part.
        part: ObjectPart,
    },
}

/// What the owner does, in this order. Those to the storage are carried out as if one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplicaAction {
    /// Sends a message.
    Send {
        /// The receiver.
        to: ReplicaId,
        /// The message.
        message: ReplicaMessage,
    },
    /// Answers a client.
    Reply {
        /// The client.
        client: u64,
        /// Its number of the request.
        number: u64,
        /// The answer.
        reply: ClientReply,
    },
    /// Writes an entry after the last one of the log; [`ReplicaEvent::Appended`] when it is durable.
    Append {
        /// Counts appends.
        append: u64,
        /// The entry.
        entry: Arc<ReplicatedEntry>,
    },
    /// The log ends before this sequence. Blocks that have the data of its entries are unsettled from then
    /// on, and this is durable first.
    Truncate {
        /// Counts truncations. [`ReplicaEvent::Truncated`] answers.
        truncation: u64,
        /// The sequence.
        from: u64,
    },
    /// Replaces the data of an unsettled block by what the primary has; [`ReplicaEvent::Settled`] then.
    /// Entries that are not in place follow.
    Settle {
        /// Counts these, with reads.
        number: u64,
        /// The object.
        object: ObjectId,
        /// Offset in the object, in bytes.
        offset: u32,
        /// What the block has.
        data: Arc<[u8]>,
    },
    /// The entry is committed: applies it to its object. The log keeps it until [`Free`](Self::Free).
    Apply {
        /// The entry.
        entry: Arc<ReplicatedEntry>,
    },
    /// Entries up to this one are never given up, although too few replicas are in sync to commit them: reads
    /// of what they changed in place wait no more.
    Stable {
        /// The sequence.
        through: u64,
    },
    /// Makes durable what was applied and copied so far, with this record; [`ReplicaEvent::Checkpointed`]
    /// then.
    Checkpoint {
        /// Counts checkpoints.
        checkpoint: u64,
        /// The record.
        record: Box<ReplicaCheckpoint>,
    },
    /// The log's entries up to this one are superfluous.
    Free {
        /// The entry.
        through: EntryId,
    },
    /// Reads a range of an object, as of the entries up to a sequence; [`ReplicaEvent::ReadDone`] with the
    /// data. A block that an uncommitted entry changed in place is read when that is committed or stable.
    Read {
        /// Counts reads.
        read: u64,
        /// The object.
        object: ObjectId,
        /// Offset in the object, in bytes.
        offset: u32,
        /// Length in bytes.
        length: u32,
        /// Entries up to here count; later ones do not. All of them are applied.
        through: u64,
    },
    /// Removes all objects and entries, and makes a checkpoint of `record`; [`ReplicaEvent::ResetDone`] when
    /// that is durable.
    Reset {
        /// The session.
        session: u64,
        /// The record, which is not complete.
        record: Box<ReplicaCheckpoint>,
    },
    /// Reads the first part of an object after another part, as of all that was applied;
    /// [`ReplicaEvent::ObjectRead`] with it. The first one of an object says what the learner needs to make
    /// it, and later ones change what that has made. If the object is removed meanwhile, the first part of
    /// the next one follows.
    ReadObject {
        /// Counts reads.
        read: u64,
        /// The part before it; `None` for the first of the group.
        after: Option<ObjectPart>,
    },
    /// Writes a part of a copied object; [`ReplicaEvent::ObjectWritten`] then.
    WriteObject {
        /// The session.
        session: u64,
        /// The part.
        part: ObjectPart,
        /// Its content.
        content: Arc<[u8]>,
    },
    /// A scrub has ended.
    Scrubbed {
        /// [`ReplicaEvent::Scrub`]'s name.
        scrub: u64,
        /// What it found.
        outcome: ScrubOutcome,
    },
    /// The replica, which lacked what it had, is in sync again, or a person has decided that it is to serve.
    Restored,
    /// Replaces the map's record if its epoch is the one before this record's. [`ReplicaEvent::Map`] has the
    /// record as it is then, whatever the outcome.
    Propose(Arc<GroupConfig>),
}
