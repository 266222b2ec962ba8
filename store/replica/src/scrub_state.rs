//! What a scrub of a range has found, and what it waits for.

use std::collections::BTreeMap;
use std::sync::Arc;

use wire_replica::ReplicaId;
use wire_store::ObjectId;

/// How the scrub of a range ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScrubOutcome {
    /// The replica is not the primary.
    NotPrimary,
    /// It serves no reads now, the group's record has changed, what a member cannot read was written
    /// meanwhile, or the log is full: it may be tried again.
    Interrupted,
    /// The primary cannot read the range. Members were not asked.
    Unreadable,
    /// The members were asked.
    Compared(ScrubFindings),
}

/// What members have of a range that the primary has read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubFindings {
    /// Members that cannot read it. If it is one block, an entry writes that again.
    pub unreadable: Vec<ReplicaId>,
    /// Offsets of blocks that a member has with other data than the primary, and the member.
    pub differing: Vec<(u32, ReplicaId)>,
    /// Blocks that were other data at a member, and may be because they were written meanwhile.
    pub overtaken: u32,
    /// Members that did not answer, or whose release does not know checksums.
    pub unanswered: Vec<ReplicaId>,
}

/// A range that is compared.
pub(crate) struct Scrub {
    pub(crate) scrub: u64,
    /// The number of the read, and of the requests to members.
    pub(crate) read: u64,
    pub(crate) object: ObjectId,
    pub(crate) offset: u32,
    pub(crate) length: u32,
    /// Entries up to here are in what was read.
    pub(crate) through: u64,
    /// What the primary has, once it is read.
    pub(crate) data: Option<Arc<[u8]>>,
    pub(crate) answers: BTreeMap<ReplicaId, MemberChecksums>,
    /// When members were last asked, and how often.
    pub(crate) sent_ns: u64,
    pub(crate) attempts: u32,
}

/// What a member has answered.
pub(crate) enum MemberChecksums {
    Unreadable,
    /// Those of the blocks, with the entries up to a sequence.
    Known(u64, Vec<u32>),
    /// Its release does not know them.
    Unknown,
}
