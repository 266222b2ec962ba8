//! What replicas of a group send each other, and clients send them.

use std::sync::Arc;

use wire_store::{EntryHeader, ObjectId};

use crate::AppliedRequests;

/// A node of the cluster, as the map numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaId(pub u32);

/// The map's record of a logical group. It changes by compare-and-swap of the epoch only, each time to the
/// next epoch.
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

/// Names an entry: the primary of an epoch gives each sequence once, so equal names are equal entries, with
/// equal entries before them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct EntryId {
    /// Number of the operation in its logical group, from 1.
    pub sequence: u64,
    /// Epoch in which the entry was appended.
    pub epoch: u32,
}

/// Names a part of an object, as it is copied: the storage divides objects. Parts are ordered by object, then
/// by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectPart {
    /// The object.
    pub object: ObjectId,
    /// Number of the part, from 0.
    pub number: u32,
}

/// An entry of the log of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicatedEntry {
    /// The operation, with sequence, epoch, client and number.
    pub header: EntryHeader,
    /// What a write writes; empty if it is withheld from a learner, to which the object is copied later.
    pub data: Arc<[u8]>,
}

impl ReplicatedEntry {
    /// The entry's name.
    pub fn id(&self) -> EntryId {
        EntryId { sequence: self.header.sequence, epoch: self.header.epoch }
    }
}

/// A message between two replicas of a group. Links may lose, repeat and reorder messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaMessage {
    /// The sender.
    pub from: ReplicaId,
    /// The map's record as the sender knows it. A receiver with an older one adopts it; one with a newer one
    /// answers with [`MessageBody::Config`].
    pub config: Arc<GroupConfig>,
    /// The content.
    pub body: MessageBody,
}

/// A fetch of the first byte of this object asks a primary where its log ends, which
/// [`MessageBody::Fetched`] has as `through`. It does not exist: a primary of a release that does not know it
/// reads a zero, and says what it has committed.
pub fn log_end_object(group: u32) -> ObjectId {
    ObjectId { group, volume: 0, index: 0, suffix: 0x6c6f_6765_0000_0000 }
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
        /// The replica has the data of every entry up to its commit point. Otherwise it needs a copy of all
        /// objects.
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
    /// From the primary: a part of an object.
    CopyObject {
        /// The session of the stream.
        session: u64,
        /// Which part.
        part: ObjectPart,
        /// Its content, as the storage encodes it.
        content: Arc<[u8]>,
    },
    /// To the primary: the part is written.
    CopyWritten {
        /// The session of the stream.
        session: u64,
        /// Which part.
        part: ObjectPart,
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
    /// From the primary, whose device cannot read a range: it asks a member for it. Or to the primary, from a
    /// follower: for what it has in an unsettled block, or where its log ends ([`log_end_object`]). A primary
    /// that scrubs asks for checksums instead of data ([`checksums_object`](crate::checksums_object)).
    Fetch {
        /// Names the request in the epoch.
        number: u64,
        /// The object.
        object: ObjectId,
        /// Offset in the object, in bytes.
        offset: u32,
        /// Length in bytes.
        length: u32,
    },
    /// To the primary: the range.
    Fetched {
        /// The request.
        number: u64,
        /// Every entry up to this is in the data; later ones may be.
        through: u64,
        /// The data; `None` if the member cannot read it either.
        data: Option<Arc<[u8]>>,
    },
    /// To the primary: a block of the range has the data of an entry that the member's log lost.
    Unsettled {
        /// The request.
        number: u64,
        /// The member's commit point. If the entry is a repair, its data has every entry up to this.
        through: u64,
        /// The entry.
        entry: Arc<ReplicatedEntry>,
    },
    /// To the primary of the record, from that of the epoch before, which waited for earlier leases and
    /// serves nothing any more: no other replica has a lease from before.
    HandOver,
    /// To the primary, from a member of the in-sync set: the answer to an [`Append`] that does not say where
    /// its log ends.
    LogEnd {
        /// [`Append::sent_ns`] of the message that it answers: the lease counts from there.
        sent_ns: u64,
        /// The last durable entry of its log.
        last: EntryId,
        /// Entries up to here were committed, as far as it knows.
        committed: u64,
    },
    /// To the primary, from a replica that is to stop, is not in sync and wants no stream; the primary
    /// answers with the same when it has none for it.
    Leave,
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
    /// The last entry of the primary's log. Later ones of earlier epochs are not in it. `None` from a primary
    /// that does not know yet whether others have more: nothing is truncated, and the answer is
    /// [`MessageBody::LogEnd`]. It has no entries then.
    pub log_end: Option<u64>,
}

/// Answer to an [`Append`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppendOutcome {
    /// Entries up to this sequence are the primary's and durable.
    Durable(u64),
    /// The receiver lacks the entry before the first, or has another one. Its entries up to the commit point
    /// are right.
    Mismatch {
        /// Its commit point.
        commit_point: u64,
    },
}

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientRequest {
    /// Anything that goes to the log; `client` and `client_number` of the header name the request, a retry
    /// has the same. `epoch` is the attach epoch of the client's session, 0 for a client without one, and
    /// `sequence` its token; [`SessionChange`](crate::SessionChange) opens and ends it.
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

impl ClientRequest {
    /// The client, and its number of the request.
    pub fn name(&self) -> (u64, u64) {
        match self {
            ClientRequest::Write { header, .. } => (header.client, header.client_number),
            ClientRequest::Read { client, number, .. } => (*client, *number),
        }
    }
}

/// The answer to a [`ClientRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientReply {
    /// The write is committed: durable in the log of every replica of the in-sync set.
    Written,
    /// The session is open. Requests of the client carry the token as their sequence.
    SessionOpened {
        /// See [`AppliedRequests::token`].
        token: u32,
    },
    /// Committed data.
    Data(Arc<[u8]>),
    /// Another replica is the primary, or will be: it is to get the request, with the same number, and
    /// applies it once.
    NotPrimary {
        /// The primary as far as known.
        primary: Option<ReplicaId>,
    },
    /// Too much is in flight. Nothing happened; a retry later may succeed.
    Busy,
    /// The number is older than the client's newest ones: it may have happened or not.
    TooOld,
    /// The device could not read, or the log is too short for the write.
    Failed,
    /// The primary's device is full. Nothing happened.
    NoSpace,
    /// The client's key has no right to it, or clients with sessions use the volume and this one has none.
    /// Nothing happened.
    Denied,
    /// The client has no session in the group, because it was silent for too long: the request may have
    /// happened or not. It is not repeated; another session has another client.
    SessionEnded,
    /// Another client has attached the image since: the request may have happened or not, and does not happen
    /// any more.
    Fenced,
    /// The group has as many sessions as it may have. Nothing happened; a retry later may succeed.
    TooManySessions,
}
