//! Replication of a logical group, sans-IO: PacificA's invariants over an operation log.
//!
//! A [`Replica`] is handed events and the time, and returns actions: messages, appends to its log, entries to
//! apply, proposals for the map. It has no clock, socket or disk. The map's record of the group, a
//! [`GroupConfig`], names the primary and the in-sync set. What holds:
//!
//! - An entry is committed when it is durable in the log of every member of the in-sync set, and of every
//!   learner that is proposed for it. Only committed entries are applied in place, acknowledged and read.
//! - The in-sync set changes by compare-and-swap in the map. A primary counts without a replica only when the
//!   map does. Hence every member has every acknowledged entry, and each may become primary.
//! - A primary reads only while it has a lease of every other member, counted from the *sending* of the
//!   message that the member answered. A member that heard nothing for the longer grace proposes itself, and
//!   answers its old primary no more. A new primary commits nothing before the grace since it last answered
//!   another one has passed.
//! - An [`EntryId`] names an entry: its sequence and the epoch of the primary that appended it. A replica
//!   that restarts as primary takes a new epoch first. Streams begin where names are equal; what differs
//!   after that is truncated.
//! - What the primary cannot read it fetches from another member, and writes it again with an entry, if none
//!   changed it meanwhile.
//! - A primary scrubs a range on request ([`ReplicaEvent::Scrub`]): it compares the checksums of its blocks
//!   with those of the members. What a member cannot read an entry writes again; what differs it reports.
//! - A member may write a block in place before the entry is committed ([`ReplicaSettings::in_place`]). If
//!   its log loses such an entry, the block is unsettled: a follower gets what the primary has there, and a
//!   new primary appends the entry again, as a retry of its client would, before it reads anything.
//! - A replica outside the in-sync set asks for a stream of entries. If the primary's log no longer has them,
//!   all objects are copied in their order, part by part; entries for objects behind the moving limit are
//!   sent with data, those for objects before it without. Copies yield to clients ([`CopyPacer`]). A learner
//!   that has nearly all entries is counted in commits, then proposed for the in-sync set.
//!
//! - A log that was read from a device may be an older one, or end too early. So a restarted replica becomes
//!   primary only if its last entry is the highest of all members, by epoch and sequence, and is not before
//!   what is kept elsewhere ([`GroupMemory`]). One that lacks something says so, leaves the in-sync set and
//!   catches up ([`StaleReason`]).
//!
//! - A replica whose node is to stop leaves the in-sync set first ([`ReplicaEvent::Leave`]). A primary that
//!   has adopted the record of its successor serves nothing any more, and says so: the successor need not
//!   wait for leases. It must come from the primary of the epoch before, and that must have waited for those
//!   from before.
//! - A primary hands over in the same way to the member that placement prefers
//!   ([`ReplicaEvent::PreferredPrimary`]), and stays in sync.
//!
//! Times: the grace is longer than the lease by more than clocks differ in rate (see [`ReplicaSettings`]).
//!
//! ```
//! use replica::{GroupConfig, RecoveredReplica, Replica, ReplicaAction, ReplicaEvent, ReplicaId, ReplicaSettings};
//! # use replica::{ClientReply, ClientRequest};
//! # use wire_store::{EntryHeader, ObjectId, Operation};
//! let only = ReplicaId(1);
//! let empty = RecoveredReplica::default();
//! let mut replica = Replica::new(only, 1, ReplicaSettings { in_sync_min: 1, ..Default::default() }, empty, 0);
//! let mut actions = Vec::new();
//! let map = GroupConfig { epoch: 1, primary: only, in_sync: vec![only] };
//! replica.handle(ReplicaEvent::Map(map.into()), 0, &mut actions);
//! // It may have been the primary before a crash, so it takes a new epoch.
//! let Some(ReplicaAction::Propose(next)) = actions.pop() else { panic!() };
//! replica.handle(ReplicaEvent::Map(next), 0, &mut actions);
//! let object = ObjectId { group: 1, volume: 1, index: 0, suffix: 0 };
//! let header = EntryHeader { client: 5, client_number: 1, ..EntryHeader::new(Operation::Write, object, 0, 4) };
//! let write = ClientRequest::Write { header, data: (*b"data").into() };
//! replica.handle(ReplicaEvent::Request(write), 0, &mut actions);
//! assert!(matches!(actions.pop(), Some(ReplicaAction::Append { append: 1, .. })));
//! let after_grace = ReplicaSettings::default().grace_ns;
//! replica.handle(ReplicaEvent::Appended { append: 1 }, after_grace, &mut actions);
//! assert!(actions.contains(&ReplicaAction::Reply { client: 5, number: 1, reply: ClientReply::Written }));
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod event;
mod faults;
mod follower;
mod learners;
mod leave;
mod log;
mod pacer;
mod preferred;
mod primary;
mod repair;
mod replica;
mod scrub;
mod scrub_state;
mod sessions;
mod stale;
mod unsettled;
mod volumes;

pub use event::{CopiedPart, RecoveredReplica, ReplicaAction, ReplicaCheckpoint, ReplicaEvent};
pub use faults::{NoFaults, PlantedReplicaFault, Plants};
pub use learners::{CopyProgress, LearnerStatus};
pub use leave::LeaveStatus;
pub use pacer::CopyPacer;
pub use replica::{GroupBlocked, Replica, ReplicaSettings, ReplicaStatus};
pub use scrub_state::{ScrubFindings, ScrubOutcome};
pub use stale::{GroupMemory, StaleReason};
pub use volumes::{VolumeStats, VolumeTotals};
pub use wire_replica::{
    Append, AppendOutcome, AppliedRequests, CLIENT_WINDOW, ClientReply, ClientRequest, ClientSession,
    EntryId, GroupConfig, Listing, MessageBody, ObjectPart, ReplicaId, ReplicaMessage, ReplicatedEntry,
    RequestSeen, SESSIONS_MAX, SessionChange, checksums_object, decode_checksums, encode_checksums,
    log_end_object, object_of_checksums,
};
