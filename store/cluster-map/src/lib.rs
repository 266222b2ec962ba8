//! The map of a cluster: nodes, devices, pools, and a record a logical group.
//!
//! [`Topology`] places groups on devices. The [`GroupRecord`] of a group has its primary and its in-sync set,
//! and changes by compare-and-swap of its epoch ([`ClusterMap::propose_group`]). The map is not on the way of
//! an I/O: without it memberships stand still. [`LocalMap`] keeps it in a directory, for clusters on one
//! machine, [`EtcdMap`] in etcd, for those on several. [`MapLocation`] says which.
//!
//! A map may be an older copy of itself: its [`MapPosition`] says how new it is, nodes say what it lacks
//! ([`ClusterMap::report_lost`]) and put back the records of groups that they know
//! ([`ClusterMap::raise_group`]). Numbers of volumes and of the groups of later pools are random, so that
//! none is given twice, whatever a map has lost.
//!
//! ```
//! use cluster_map::{ClusterMap, GroupConfig, GroupId, GroupRecord, LocalMap, Proposed, ReplicaId};
//! let path = std::env::temp_dir().join(format!("ringbolt-map-example-{}", std::process::id()));
//! let map = LocalMap::open(&path)?;
//! let record = |epoch, in_sync: &[u32]| GroupRecord {
//!     config: GroupConfig { epoch, primary: ReplicaId(1), in_sync: in_sync.iter().copied().map(ReplicaId).collect() },
//!     replicas: vec![ReplicaId(1), ReplicaId(2)],
//! };
//! assert_eq!(map.propose_group(GroupId(7), &record(1, &[1, 2]))?, Proposed::Accepted);
//! assert_eq!(map.propose_group(GroupId(7), &record(2, &[1]))?, Proposed::Accepted);
//! // Who is late learns what the record is.
//! assert_eq!(map.propose_group(GroupId(7), &record(2, &[1, 2]))?, Proposed::Superseded(record(2, &[1])));
//! # std::fs::remove_dir_all(&path)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod backup;
mod chain;
mod checks;
mod etcd;
mod groups;
mod image;
mod keys;
mod known;
mod layers;
mod lease;
mod local;
mod location;
mod membership;
mod memory;
mod place;
mod placement;
mod position;
mod record;
mod recovery;
mod scrub;
mod settings;

pub use backup::MapBackup;
pub use chain::{
    ChildVolume, Images, LAYERS_MAX, SNAPSHOTS_MAX, check_snapshot_name, children_of, parents_of, snapshot_of,
};
pub use checks::check_image_name;
pub use etcd::{EtcdFiles, EtcdMap};
pub use groups::random_volume;
pub use image::{ImageEntry, RemovedImage, TrashedImage};
pub use keys::{ClientKeyRecord, PoolAccess};
pub use known::KnownMap;
pub use layers::{ImageLayers, ImageSnapshot, ParentVolume, SnapshotRequest, UnfinishedImport};
pub use lease::{LeaseHolder, LeaseOutcome};
pub use local::LocalMap;
pub use location::{EtcdOptions, MapLocation};
pub use memory::{AcceptedLoss, GroupProgress, NodeMemory};
pub use place::DirectoryPlace;
pub use placement::Topology;
pub use position::MapPosition;
pub use record::{
    DeviceId, DeviceRecord, GroupId, GroupRecord, ImageHolder, ImageLock, MapError, NodeId, NodeRecord,
    OutReason, PartitionSize, PoolClass, PoolRecord, Proposed, TlsPolicy,
};
pub use recovery::RecoverySettings;
pub use scrub::{GroupScrub, ScrubDifference, ScrubSettings, ScrubStart};
pub use settings::ClusterSettings;
pub use wire_replica::{EntryId, GroupConfig, KeyName, ReplicaId};

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

/// The map of a cluster. Every method returns when what it changed is durable. Several processes may change a
/// map at a time: changes of a record that others change too are compare-and-swap.
pub trait ClusterMap: Send + Sync {
    /// The cluster's identity, the same for ever.
    ///
    /// # Errors
    /// [`MapError`], as of every method.
    fn cluster(&self) -> Result<uuid::Uuid, MapError>;

    /// What is the same on all nodes. A map without it has the default.
    ///
    /// # Errors
    /// [`MapError::Invalid`] if the lease and the grace are none.
    fn settings(&self) -> Result<ClusterSettings, MapError>;

    /// Sets it, before there are nodes: those that run would go on with others.
    ///
    /// # Errors
    /// As [`settings`](Self::settings); [`MapError::Exists`] if it is set, [`MapError::Invalid`] if there is
    /// a node.
    fn create_settings(&self, settings: &ClusterSettings) -> Result<(), MapError>;

    /// The nodes.
    ///
    /// # Errors
    /// [`MapError`].
    fn nodes(&self) -> Result<BTreeMap<NodeId, NodeRecord>, MapError>;

    /// Adds or changes a node.
    ///
    /// # Errors
    /// [`MapError::SameIdentity`] if another node has its UUID, [`MapError::Removed`] if the node was
    /// removed.
    fn put_node(&self, id: NodeId, node: &NodeRecord) -> Result<(), MapError>;

    /// Adds a node with a number that no other one has.
    ///
    /// # Errors
    /// As [`put_node`](Self::put_node).
    fn create_node(&self, node: &NodeRecord) -> Result<NodeId, MapError>;

    /// Removes a node for good, with its devices: its number and its identity are not used again.
    ///
    /// # Errors
    /// [`MapError::Missing`].
    fn remove_node(&self, id: NodeId) -> Result<(), MapError>;

    /// The devices.
    ///
    /// # Errors
    /// [`MapError`].
    fn devices(&self) -> Result<BTreeMap<DeviceId, DeviceRecord>, MapError>;

    /// Adds or changes a device.
    ///
    /// # Errors
    /// [`MapError::SameIdentity`] if another device has its UUID, [`MapError::Missing`] if there is no such
    /// node.
    fn put_device(&self, id: DeviceId, device: &DeviceRecord) -> Result<(), MapError>;

    /// The pools, by name.
    ///
    /// # Errors
    /// [`MapError`].
    fn pools(&self) -> Result<BTreeMap<String, PoolRecord>, MapError>;

    /// The first of this many groups that no pool has or had. Those of a cluster's first pool begin with 0,
    /// and others are random: a map that is an older copy of itself does not know all that there were.
    ///
    /// # Errors
    /// [`MapError::Invalid`] if there are none.
    fn free_groups(&self, groups: u32) -> Result<u32, MapError>;

    /// The groups of pools that were removed. What is neither in a pool nor here is unknown to this map.
    ///
    /// # Errors
    /// [`MapError`].
    fn removed_groups(&self) -> Result<Vec<Range<u32>>, MapError>;

    /// Adds a pool, and gives it its groups.
    ///
    /// # Errors
    /// [`MapError::Exists`]; [`MapError::Invalid`] if it has no groups, those of another one, or more in its
    /// in-sync sets than replicas.
    fn create_pool(&self, name: &str, pool: &PoolRecord) -> Result<(), MapError>;

    /// Changes how many replicas the groups of a pool have and need in sync, if it is still `known`. Returns
    /// whether it is changed.
    ///
    /// # Errors
    /// [`MapError::Missing`]; [`MapError::Invalid`] if something else would change, or more were needed in
    /// sync than there are.
    fn change_pool(&self, name: &str, known: &PoolRecord, to: &PoolRecord) -> Result<bool, MapError>;

    /// Gives a pool another name. If it is interrupted the pool has both names, and some of its images each,
    /// until it is repeated.
    ///
    /// # Errors
    /// [`MapError::Missing`]; [`MapError::Exists`] if another pool has that name; [`MapError::Invalid`] if it
    /// is none, an image of the pool is attached or has to be emptied, or a client key has rights on the
    /// pool.
    fn rename_pool(&self, name: &str, to: &str) -> Result<(), MapError>;

    /// Removes a pool without images, and the records of its groups.
    ///
    /// # Errors
    /// [`MapError::Missing`]; [`MapError::Invalid`] if it has images.
    fn remove_pool(&self, name: &str) -> Result<(), MapError>;

    /// The record of a group; `None` if it has none yet.
    ///
    /// # Errors
    /// [`MapError`].
    fn group(&self, id: GroupId) -> Result<Option<GroupRecord>, MapError>;

    /// The records of the groups from one number to before another.
    ///
    /// # Errors
    /// [`MapError`].
    fn groups(&self, range: Range<u32>) -> Result<BTreeMap<GroupId, GroupRecord>, MapError> {
        let mut groups = BTreeMap::new();
        for id in range.map(GroupId) {
            groups.extend(self.group(id)?.map(|record| (id, record)));
        }
        Ok(groups)
    }

    /// Replaces the record of a group, if it is that of the epoch before; the first has epoch 1.
    ///
    /// # Errors
    /// [`MapError::Invalid`] if the primary is not in the in-sync set.
    fn propose_group(&self, id: GroupId, record: &GroupRecord) -> Result<Proposed, MapError>;

    /// The same for different groups, which may be cheaper than one by one. The outcomes are in their order.
    ///
    /// # Errors
    /// [`MapError`]; some of them may be accepted then.
    fn propose_groups(&self, proposals: &[(GroupId, GroupRecord)]) -> Result<Vec<Proposed>, MapError> {
        proposals.iter().map(|(id, record)| self.propose_group(*id, record)).collect()
    }

    /// Replaces the record of a group by one of a higher epoch, whatever it is, or adds it: the map is an
    /// older copy of itself, and lacks this record, which it had.
    ///
    /// # Errors
    /// As [`propose_group`](Self::propose_group).
    fn raise_group(&self, id: GroupId, record: &GroupRecord) -> Result<Proposed, MapError>;

    /// The images, by pool and name.
    ///
    /// # Errors
    /// [`MapError`].
    fn images(&self) -> Result<BTreeMap<(String, String), ImageEntry>, MapError>;

    /// Adds an image to a pool, with a volume that no other one ever had.
    ///
    /// # Errors
    /// [`MapError::Exists`], [`MapError::Missing`] without the pool, [`MapError::Invalid`] if it is no name.
    fn create_image(&self, pool: &str, name: &str, bytes: u64) -> Result<ImageEntry, MapError>;

    /// Changes the record of an image that is still `known`. Returns whether it is changed: others may have
    /// done so meanwhile.
    ///
    /// # Errors
    /// [`MapError::Missing`].
    fn change_image(
        &self,
        pool: &str,
        name: &str,
        known: &ImageEntry,
        to: &ImageEntry,
    ) -> Result<bool, MapError>;

    /// Gives an image another name, in one step; with `known`, only if it is still that image.
    ///
    /// # Errors
    /// [`MapError::Missing`], [`MapError::Changed`]; [`MapError::Exists`] if another one has that name,
    /// [`MapError::Invalid`] if it is none.
    fn rename_image(
        &self,
        pool: &str,
        name: &str,
        to: &str,
        known: Option<&ImageEntry>,
    ) -> Result<(), MapError>;

    /// Removes an image, in one step: it has no name any more, and its volume is one of those to be emptied.
    /// With `known`, only if it is still that image.
    ///
    /// # Errors
    /// [`MapError::Missing`], [`MapError::Changed`]; [`MapError::Protected`].
    fn remove_image(
        &self,
        pool: &str,
        name: &str,
        known: Option<&ImageEntry>,
    ) -> Result<RemovedImage, MapError>;

    /// The images that were removed while their objects are not, by volume.
    ///
    /// # Errors
    /// [`MapError`].
    fn removed_images(&self) -> Result<BTreeMap<u64, RemovedImage>, MapError>;

    /// The objects of a removed image are removed as well.
    ///
    /// # Errors
    /// [`MapError`].
    fn image_is_empty(&self, removed: &RemovedImage) -> Result<(), MapError>;

    /// Who has the image of a volume attached; `None` if no client ever had.
    ///
    /// # Errors
    /// [`MapError`].
    fn image_lock(&self, pool: &str, volume: u64) -> Result<Option<ImageLock>, MapError>;

    /// Changes who has the image of a volume attached, if that is still `known`. Returns whether it is
    /// changed.
    ///
    /// # Errors
    /// [`MapError`].
    fn change_image_lock(
        &self,
        pool: &str,
        volume: u64,
        known: Option<&ImageLock>,
        to: &ImageLock,
    ) -> Result<bool, MapError>;

    /// Says that a process which has images attached lives, for some seconds from now; call it again before.
    ///
    /// # Errors
    /// [`MapError`].
    fn renew_holder(&self, lease: uuid::Uuid, seconds: u32) -> Result<(), MapError>;

    /// Ends what [`renew_holder`](Self::renew_holder) said.
    ///
    /// # Errors
    /// [`MapError`].
    fn end_holder(&self, lease: uuid::Uuid) -> Result<(), MapError>;

    /// When a process that has images attached last said that it lives; `None` if that is too long ago.
    ///
    /// # Errors
    /// [`MapError`].
    fn holder_age(&self, lease: uuid::Uuid) -> Result<Option<Duration>, MapError>;

    /// The keys of clients.
    ///
    /// # Errors
    /// [`MapError`].
    fn client_keys(&self) -> Result<BTreeMap<KeyName, ClientKeyRecord>, MapError>;

    /// Adds the key of a client.
    ///
    /// # Errors
    /// [`MapError::Exists`], [`MapError::Missing`] without one of its pools, [`MapError::Invalid`] if it has
    /// no rights, or there are too many.
    fn create_client_key(&self, name: KeyName, record: &ClientKeyRecord) -> Result<(), MapError>;

    /// Removes the key of a client. Nodes end its connections when they see that.
    ///
    /// # Errors
    /// [`MapError::Missing`].
    fn remove_client_key(&self, name: KeyName) -> Result<(), MapError>;

    /// Says that a process is a node, which is up for some seconds from now; call it again before. Another
    /// process of the same node is refused meanwhile, unless it is in the place of one that has ended. This
    /// says who is up, not who may write.
    ///
    /// # Errors
    /// [`MapError`].
    fn renew_lease(&self, node: NodeId, holder: &LeaseHolder, seconds: u32)
    -> Result<LeaseOutcome, MapError>;

    /// Ends what [`renew_lease`](Self::renew_lease) said for this process.
    ///
    /// # Errors
    /// [`MapError`].
    fn end_lease(&self, node: NodeId, holder: &LeaseHolder) -> Result<(), MapError>;

    /// The nodes that are up.
    ///
    /// # Errors
    /// [`MapError`].
    fn nodes_up(&self) -> Result<BTreeSet<NodeId>, MapError>;

    /// The nodes that are to have no data, and why. [`NodeRecord::out`] says the same.
    ///
    /// # Errors
    /// [`MapError`].
    fn out(&self) -> Result<BTreeMap<NodeId, OutReason>, MapError>;

    /// Takes a node out, or in again.
    ///
    /// # Errors
    /// [`MapError`].
    fn set_out(&self, node: NodeId, reason: Option<OutReason>) -> Result<(), MapError>;

    /// How the cluster recovers. A map without it has the default.
    ///
    /// # Errors
    /// [`MapError`].
    fn recovery(&self) -> Result<RecoverySettings, MapError>;

    /// Changes it if it is still `known`. Returns whether it is changed.
    ///
    /// # Errors
    /// [`MapError::Invalid`] if the rate is too low.
    fn change_recovery(&self, known: &RecoverySettings, to: &RecoverySettings) -> Result<bool, MapError>;

    /// When groups are scrubbed. A map without it has the default.
    ///
    /// # Errors
    /// [`MapError`].
    fn scrub(&self) -> Result<ScrubSettings, MapError>;

    /// Changes it if it is still `known`. Returns whether it is changed.
    ///
    /// # Errors
    /// [`MapError::Invalid`] if no scrub would end with it.
    fn change_scrub(&self, known: &ScrubSettings, to: &ScrubSettings) -> Result<bool, MapError>;

    /// By group, the last scrub that was finished. Changes of it need not be reported.
    ///
    /// # Errors
    /// [`MapError`].
    fn group_scrubs(&self) -> Result<BTreeMap<GroupId, GroupScrub>, MapError>;

    /// Replaces what is known of the last scrub of a group; its primary does.
    ///
    /// # Errors
    /// [`MapError`].
    fn put_group_scrub(&self, group: GroupId, scrub: &GroupScrub) -> Result<(), MapError>;

    /// What each node has seen. Changes of it are not reported.
    ///
    /// # Errors
    /// [`MapError`].
    fn node_memories(&self) -> Result<BTreeMap<NodeId, NodeMemory>, MapError>;

    /// Replaces what a node has seen; the node alone does.
    ///
    /// # Errors
    /// [`MapError`].
    fn put_node_memory(&self, node: NodeId, memory: &NodeMemory) -> Result<(), MapError>;

    /// By group, the last loss that a person accepted.
    ///
    /// # Errors
    /// [`MapError`].
    fn accepted_losses(&self) -> Result<BTreeMap<GroupId, AcceptedLoss>, MapError>;

    /// Accepts a loss.
    ///
    /// # Errors
    /// [`MapError`].
    fn accept_loss(&self, group: GroupId, loss: &AcceptedLoss) -> Result<(), MapError>;
    /// How new the map is.
    ///
    /// # Errors
    /// [`MapError`].
    fn position(&self) -> Result<MapPosition, MapError>;

    /// Says that the map was at a higher revision before. It is older than itself then, until that is
    /// [accepted](Self::accept_older).
    ///
    /// # Errors
    /// [`MapError`].
    fn report_lost(&self, revision: u64) -> Result<(), MapError>;

    /// Makes the map newer than what it lacks. Returns its position.
    ///
    /// # Errors
    /// [`MapError`].
    fn accept_older(&self) -> Result<MapPosition, MapError>;

    /// All records but those of leases, as of one moment.
    ///
    /// # Errors
    /// [`MapError`].
    fn backup(&self) -> Result<MapBackup, MapError>;

    /// Replaces all records but those of leases. A group keeps its record if that has a higher epoch. The map
    /// is newer than itself, the backup and `known` afterwards; if it fails, it is older than itself until it
    /// is repeated.
    ///
    /// # Errors
    /// [`MapError::Invalid`] if the backup is of another cluster or kind of map.
    fn restore(&self, backup: &MapBackup, known: u64) -> Result<MapPosition, MapError>;

    /// What changes from now on.
    fn changes(&self) -> Box<dyn MapChanges>;
}

/// A change of the map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapChange {
    /// All may be different.
    Everything,
    /// The record of a group.
    Group(GroupId, GroupRecord),
    /// Something else: nodes, who is up or out, devices, pools, images, keys of clients.
    Other,
}

/// The changes of a map, in their order.
pub trait MapChanges: Send {
    /// Waits for changes; none may be there after `limit`, or a little later. The first is
    /// [`MapChange::Everything`].
    ///
    /// # Errors
    /// [`MapError`]: it is called again after [`retry_after`](Self::retry_after), and loses nothing.
    fn wait(&mut self, limit: Duration) -> Result<Vec<MapChange>, MapError>;

    /// How long to wait after an error.
    fn retry_after(&self) -> Duration;
}
