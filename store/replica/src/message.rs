//! What replicas send each other, and what goes in and out of one.

use std::sync::Arc;

use wire_store::{EntryHeader, ObjectId};

use crate::{AppliedRequests, EntryId, ReplicatedEntry};

/// A node of the cluster, as the map numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaId(pub u32);

/// The map's record of a logical group. It changes by compare-and-swap of the epoch only, each time to the next epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupConfig {
    /// Counts the records, from 1.
    pub epoch: u32,
    /// The member that orders the operations.
    pub primary: ReplicaId,
    /// The replicas that have every acknowledged entry, the primary among them. Only they become primary.
    pub in_sync: Vec<ReplicaId>,
}

impl GroupConfig {
    /// Whether a replica is in the in-sync set.
    pub fn has(&self, id: ReplicaId) -> bool {
        self.in_sync.contains(&id)
    }
}

/// A message between two replicas of a group. Links may lose, repeat and reorder messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaMessage {
    /// The sender.
    pub from: ReplicaId,
    /// The map's record as the sender knows it. A receiver with an older one adopts it; one with a newer one answers
    /// with [`MessageBody::Config`].
    pub config: Arc<GroupConfig>,
    /// The content.
    pub body: MessageBody,
}

/// The content of a [`ReplicaMessage`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessageBody {
    /// Nothing but the record: the receiver's was old.
    Config,
    /// From the primary: entries, the commit point, and a request for a lease.
    Append(Append),
    /// To the primary: what is durable.
    Appended {
        /// [`Append::sent_ns`] of the newest message that it answers: the lease counts from there.
        sent_ns: u64,
        /// The session of the stream.
        session: u64,
        /// The answer.
        outcome: AppendOutcome,
    },
    /// To the primary, from a replica outside the in-sync set: it asks for a stream of entries.
    Join {
        /// Names the stream. Later ones of a replica are higher.
        session: u64,
        /// Every entry up to this is applied, if `complete`.
        commit_point: u64,
        /// The replica has the data of every entry up to its commit point. Otherwise it needs a copy of all objects.
        complete: bool,
    },
    /// From the primary: drop all data; a copy of all objects follows.
    CopyBegin {
        /// The session of the stream.
        session: u64,
        /// The stream begins after this entry, which is committed.
        base: EntryId,
        /// The requests that are applied up to there.
        applied: Box<AppliedRequests>,
    },
    /// To the primary: the data is dropped.
    CopyBegun {
        /// The session of the stream.
        session: u64,
    },
    /// From the primary: an object.
    CopyObject {
        /// The session of the stream.
        session: u64,
        /// The object.
        object: ObjectId,
        /// Its content, as the storage encodes it.
        content: Arc<[u8]>,
    },
    /// To the primary: the object is written.
    CopyWritten {
        /// The session of the stream.
        session: u64,
        /// The object.
        object: ObjectId,
    },
    /// From the primary: every object is copied.
    CopyEnd {
        /// The session of the stream.
        session: u64,
    },
    /// To the primary: the copy is durable, and the replica is complete.
    CopyEnded {
        /// The session of the stream.
        session: u64,
    },
}

/// Entries from the primary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Append {
    /// Time of the primary when it was sent.
    pub sent_ns: u64,
    /// The session of a learner's stream; 0 for members of the in-sync set.
    pub session: u64,
    /// The entry before the first.
    pub previous: EntryId,
    /// Entries in their order, maybe none.
    pub entries: Vec<Arc<ReplicatedEntry>>,
    /// Entries up to this sequence are committed.
    pub commit_point: u64,
    /// The last entry of the primary's log. Later ones of earlier epochs are not in it.
    pub log_end: u64,
}

/// Answer to an [`Append`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppendOutcome {
    /// Entries up to this sequence are the primary's and durable.
    Durable(u64),
    /// The receiver lacks the entry before the first, or has another one. Its entries up to the commit point are right.
    Mismatch {
        /// Its commit point.
        commit_point: u64,
    },
}

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientRequest {
    /// Anything that goes to the log; `client` and `client_number` of the header name the request, a retry has the same.
    Write {
        /// The operation.
        header: EntryHeader,
        /// What a write writes.
        data: Arc<[u8]>,
    },
    /// A read of a range of an object.
    Read {
        /// The client.
        client: u64,
        /// Its number of the request.
        number: u64,
        /// The object.
        object: ObjectId,
        /// Offset in the object, in bytes.
        offset: u32,
        /// Length in bytes.
        length: u32,
    },
}

/// The answer to a [`ClientRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientReply {
    /// The write is committed: durable in the log of every replica of the in-sync set.
    Written,
    /// Committed data.
    Data(Arc<[u8]>),
    /// Another replica is the primary, or will be. Nothing happened.
    NotPrimary {
        /// The primary as far as known.
        primary: Option<ReplicaId>,
    },
    /// Too much is in flight. Nothing happened; a retry later may succeed.
    Busy,
    /// The number is older than the client's newest ones: it may have happened or not.
    TooOld,
    /// The device could not read.
    Failed,
}

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
    /// The entries of the log, in their order.
    pub entries: Vec<Arc<ReplicatedEntry>>,
}

/// A new group: nothing is written yet, and nothing is missing.
impl Default for RecoveredReplica {
    fn default() -> RecoveredReplica {
        let checkpoint = ReplicaCheckpoint {
            through: EntryId::default(),
            applied: AppliedRequests::default(),
            complete: true,
        };
        RecoveredReplica { checkpoint, base: EntryId::default(), entries: Vec::new() }
    }
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
    /// The map's record as of now or earlier in this run: a read, a notification or the outcome of a proposal.
    Map(Arc<GroupConfig>),
    /// All appends up to this number are durable.
    Appended {
        /// [`ReplicaAction::Append`]'s number.
        append: u64,
    },
    /// The checkpoint is durable.
    Checkpointed {
        /// [`ReplicaAction::Checkpoint`]'s number.
        checkpoint: u64,
    },
    /// The outcome of [`ReplicaAction::Read`], `None` if the device failed.
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
    /// The outcome of [`ReplicaAction::ReadObject`]: the object, or `None` if there are no more.
    ObjectRead {
        /// The read's number.
        read: u64,
        /// The object and its content.
        object: Option<(ObjectId, Arc<[u8]>)>,
    },
    /// [`ReplicaAction::WriteObject`] is done; a later checkpoint makes it durable.
    ObjectWritten {
        /// The session.
        session: u64,
        /// The object.
        object: ObjectId,
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
    /// The log ends before this sequence.
    Truncate {
        /// The sequence.
        from: u64,
    },
    /// The entry is committed: applies it to its object. The log keeps it until [`Free`](Self::Free).
    Apply {
        /// The entry.
        entry: Arc<ReplicatedEntry>,
    },
    /// Makes durable what was applied and copied so far, with this record; [`ReplicaEvent::Checkpointed`] then.
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
    /// Reads a range of an object, as of the entries up to a sequence; [`ReplicaEvent::ReadDone`] with the data.
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
    /// Removes all objects and entries, and makes a checkpoint of `record`; [`ReplicaEvent::ResetDone`] when that is
    /// durable.
    Reset {
        /// The session.
        session: u64,
        /// The record, which is not complete.
        record: Box<ReplicaCheckpoint>,
    },
    /// Reads the first object after another, as of all that was applied; [`ReplicaEvent::ObjectRead`] with it.
    ReadObject {
        /// Counts reads.
        read: u64,
        /// The object before it; `None` for the first of the group.
        after: Option<ObjectId>,
    },
    /// Writes a copied object; [`ReplicaEvent::ObjectWritten`] then.
    WriteObject {
        /// The session.
        session: u64,
        /// The object.
        object: ObjectId,
        /// Its content.
        content: Arc<[u8]>,
    },
    /// Replaces the map's record if its epoch is the one before this record's. [`ReplicaEvent::Map`] has the record as
    /// it is then, whatever the outcome.
    Propose(Arc<GroupConfig>),
}
