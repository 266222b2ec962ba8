//! What a node reports of itself: the result of `store_node_get_status`, which other machines get over the
//! network.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use bdev::Uuid;
use control::json::{Value, json};
use reactor::{MailboxSender, blocking};
use replica::{CopyProgress, EntryId, GroupBlocked, LearnerStatus, ReplicaId, VolumeStats};
use sockets::StreamAddress;
use store_link::NodeAddress;
use wire_replica::REPORT_BYTES_MAX;

use super::NoRoom;
use super::hub::{ConnectionCounts, HubInput};
use super::map_watch::{Refusal, SeenMap};
use super::scrub::ScrubStatus;
use crate::{FailedPartition, PartitionStatus, ReplicaNode, StoreError};

/// Volumes that are reported, those with the most requests first: each takes some 150 bytes of a message.
const VOLUMES_MAX: usize = 4096;

/// Where what is reported comes from.
pub(super) struct NodeReport {
    pub(super) node: Arc<ReplicaNode>,
    /// Others are to take over.
    pub(super) is_leaving: AtomicBool,
    pub(super) id: ReplicaId,
    pub(super) cluster: Uuid,
    pub(super) bdev_name: String,
    pub(super) address: StreamAddress,
    /// Those of its replicas, in nanoseconds.
    pub(super) lease_ns: u64,
    pub(super) grace_ns: u64,
    /// Groups that it has no replica of although the map says so.
    pub(super) refused: Arc<Mutex<BTreeMap<u32, Refusal>>>,
    /// Groups whose primary it has, and that have too few replicas because no other node has room for what
    /// they use.
    pub(super) without_room: Arc<Mutex<BTreeMap<u32, NoRoom>>>,
    /// The nodes, as the map had them when it was read last.
    pub(super) addresses: Arc<Mutex<BTreeMap<ReplicaId, NodeAddress>>>,
    /// Its connections.
    pub(super) connections: Arc<ConnectionCounts>,
    /// What the node has seen of the map.
    pub(super) seen: Arc<Mutex<SeenMap>>,
    /// What its scrubs do.
    pub(super) scrub: Arc<Mutex<ScrubStatus>>,
}

impl NodeReport {
    /// The report.
    ///
    /// # Errors
    /// [`StoreError::Closed`].
    pub(super) async fn make(&self) -> Result<Value, StoreError> {
        let status = self.node.status().await?;
        let (tls, plain, refused_connections) = self.connections.read();
        let node = |(id, address): (&ReplicaId, &NodeAddress)| json!({ "node": id.0, "address": address.stream.to_string(), "tls": address.has_tls });
        Ok(json!({
            "node": self.id.0,
            "state": if self.is_leaving.load(Ordering::Relaxed) { "leaving" } else { "serves" },
            "cluster": self.cluster.to_string(),
            "address": self.address.to_string(),
            "bdev_name": self.bdev_name,
            "log_bdev_name": self.node.log_device().map(|device| device.name()),
            "encrypted": self.node.is_encrypted(),
            "durability": self.node.durability().name(),
            "lease_ms": self.lease_ns / 1_000_000,
            "grace_ms": self.grace_ns / 1_000_000,
            "replicas": status.iter().filter_map(describe).collect::<Vec<_>>(),
            "volumes": volumes(&self.node),
            "checksum_cache_limit_bytes": self.node.tuning().checksum_cache_bytes,
            "threads": self.node.threads().describe(),
            "spare_partitions": self.node.spare_partitions(),
            "failed_partitions": self.node.failed_partitions().into_iter().map(failed).collect::<Vec<_>>(),
            "refused": sync::lock(&self.refused).iter().map(refused).collect::<Vec<_>>(),
            "without_room": sync::lock(&self.without_room).iter().map(without_room).collect::<Vec<_>>(),
            "connections": { "tls": tls, "plain": plain, "refused": refused_connections },
            "scrub": describe_scrub(&sync::lock(&self.scrub)),
            "map": describe_map(&sync::lock(&self.seen)),
            "nodes": sync::lock(&self.addresses).iter().map(node).collect::<Vec<_>>(),
        }))
    }

    /// The report as a message has it.
    async fn encode(&self) -> Result<Arc<[u8]>, StoreError> {
        let mut text = self.make().await?.to_string();
        if text.len() > REPORT_BYTES_MAX {
            let bytes = text.len();
            let error = format!("it has {bytes} bytes, and a message {REPORT_BYTES_MAX} at most");
            text = json!({ "node": self.id.0, "error": error }).to_string();
        }
        Ok(text.into_bytes().into())
    }
}

/// Starts the thread that makes reports for other machines: the core of the connections does not wait for the
/// other cores. It ends with the connections.
pub(super) fn start_reporter(report: &Arc<NodeReport>, hub: MailboxSender<HubInput>) {
    let (sender, requests): (SyncSender<()>, Receiver<()>) = sync_channel(1);
    let (report, answers) = (Arc::downgrade(report), hub.clone());
    let make = move |()| {
        let made = report.upgrade().and_then(|report| blocking::block_on(report.encode()).ok()?.ok());
        // One that finds no room is lost, and made again for the next request.
        let _ = answers.send(HubInput::Report(made));
    };
    match blocking::spawn_worker("store reports", requests, make) {
        Ok(()) => _ = hub.send(HubInput::Reporter(sender)),
        Err(error) => log::warn!("other machines get no status of this node: {error}"),
    }
}

fn describe_scrub(status: &ScrubStatus) -> Value {
    let current = status.current.map(|(group, begun, bytes)| {
        json!({ "group": group, "bytes": bytes, "elapsed_s": begun.elapsed().as_secs() })
    });
    json!({
        "current": current,
        "groups": status.groups,
        "bytes": status.bytes,
        "damaged_copies": status.damaged,
        "repaired_copies": status.repaired,
        "differing_copies": status.differing,
    })
}

fn describe_map(seen: &SeenMap) -> Value {
    json!({
        "revision": seen.revision,
        "known_revision": seen.known_revision,
        "lost_revision": seen.lost,
        "unknown_groups": seen.unknown_groups,
    })
}

fn failed(FailedPartition { index, group, reason }: FailedPartition) -> Value {
    json!({ "partition": index, "group": group, "why": reason })
}

fn refused((group, Refusal { partition, why }): (&u32, &Refusal)) -> Value {
    json!({ "group": group, "partition": partition, "why": why })
}

fn without_room((group, no_room): (&u32, &NoRoom)) -> Value {
    json!({
        "group": group,
        "node": no_room.node.0,
        "missing_extents": no_room.missing.extents,
        "missing_objects": no_room.missing.onodes,
        "why": no_room.to_string(),
    })
}

fn describe(status: &PartitionStatus) -> Option<Value> {
    let replica = status.replica.as_ref()?;
    let in_sync: Vec<u32> = replica.config.in_sync.iter().map(|member| member.0).collect();
    let state = match replica.status.blocked {
        _ if status.failed.is_some() => "failed",
        None => "primary",
        Some(GroupBlocked::NotPrimary) if replica.status.complete => "replica",
        Some(GroupBlocked::NotPrimary) => "copying",
        Some(_) => "waiting",
    };
    Some(json!({
        "group": replica.group,
        "class": replica.class.name(),
        "state": state,
        "failure": status.failed.as_deref(),
        "out_of_space": status.is_out_of_space,
        "waits_for": replica.status.blocked.filter(|_| state == "waiting").map(reason),
        "epoch": replica.config.epoch,
        "primary": replica.config.primary.0,
        "in_sync": in_sync,
        "complete": replica.status.complete,
        "stale": replica.status.stale.map(|reason| reason.text()),
        "has_more_than_primary": replica.status.contradicts,
        "last_entry": entry_name(replica.last),
        "known_committed": entry_name(replica.memory.committed),
        "log_end": replica.status.log_end,
        "commit_point": replica.status.commit_point,
        "sessions": replica.status.sessions,
        "in_place": replica.in_place,
        "log_bytes": status.log_bytes,
        "log_used_bytes": status.log_used_bytes,
        "objects": status.space.objects,
        "extents": status.space.extents,
        "free_extents": status.space.free_extents,
        "used_extents": status.space.used_extents(),
        "reads": status.stats.reads,
        "reads_from_log": status.stats.reads_from_log,
        "reads_overlaid": status.stats.reads_overlaid,
        "reads_flushed": status.stats.reads_flushed,
        "flushes": status.stats.flushes,
        "flushes_by_count": status.stats.flushes_by_count,
        "flushes_by_time": status.stats.flushes_by_time,
        "entries_overwriting": status.stats.entries_overwriting,
        "learners": replica.learners.iter().map(learner).collect::<Vec<_>>(),
        "unsettled_blocks": replica.status.unsettled,
        "checkpoints": status.stats.checkpoints,
        "checksum_cache_bytes": status.checksum_cache_bytes,
        "checksum_hits": status.stats.checksum_hits,
        "checksum_misses": status.stats.checksum_misses,
        "damaged_blocks": status.stats.damaged_blocks,
        "repaired_ranges": replica.status.repaired,
        "revived_blocks": replica.status.revived,
    }))
}

/// What clients did to each volume, through the primaries of this node.
fn volumes(node: &ReplicaNode) -> Vec<Value> {
    let mut sums: Vec<_> = node.volumes().into_iter().collect();
    sums.sort_by_key(|(_, stats)| std::cmp::Reverse(stats.reads.saturating_add(stats.writes)));
    sums.truncate(VOLUMES_MAX);
    let describe = |(volume, stats): (Option<u64>, VolumeStats)| {
        json!({
            "volume": volume,
            "reads": stats.reads,
            "read_bytes": stats.read_bytes,
            "read_ns": stats.read_ns,
            "writes": stats.writes,
            "written_bytes": stats.written_bytes,
            "write_ns": stats.write_ns,
            "others": stats.others,
        })
    };
    sums.into_iter().map(describe).collect()
}

fn entry_name(entry: EntryId) -> Value {
    json!({ "sequence": entry.sequence, "epoch": entry.epoch })
}

fn learner(status: &LearnerStatus) -> Value {
    let per_second = |copy: CopyProgress| {
        let ns = copy.elapsed_ns.max(1);
        u64::try_from(u128::from(copy.bytes) * 1_000_000_000 / u128::from(ns)).unwrap_or(u64::MAX)
    };
    json!({
        "node": status.id.0,
        "entries_behind": status.entries_behind,
        "copying": status.copy.is_some(),
        "copied_objects": status.copy.map(|copy| copy.objects),
        "copied_bytes": status.copy.map(|copy| copy.bytes),
        "copied_bytes_per_second": status.copy.map(per_second),
    })
}

/// What a group waits for.
fn reason(blocked: GroupBlocked) -> &'static str {
    match blocked {
        GroupBlocked::NoMap => "the map's record was not read yet",
        GroupBlocked::NotPrimary => "another replica is the primary",
        GroupBlocked::NoPrimary => "the primary is silent, and the map has not answered",
        GroupBlocked::EarlierLease => "an earlier primary may still read",
        GroupBlocked::Reconciling => "entries of an earlier primary are being committed",
        GroupBlocked::MemberSilent => "a replica is silent, and the map has not answered",
        GroupBlocked::DataLost => {
            "its data is lost: the primary has none, and no replica in sync has taken over"
        }
        GroupBlocked::Stale => {
            "it lacks what the group had, and no other replica in sync is there: start the nodes of the others, or \
                               `ringbolt store accept-loss` says what is lost if it serves"
        }
        GroupBlocked::Comparing => {
            "a restarted primary does not know yet whether the other replicas in sync have more"
        }
        GroupBlocked::TooFewInSync => "fewer replicas are in sync than the pool demands",
    }
}
