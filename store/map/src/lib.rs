//! The map of a cluster: nodes, devices, pools, and a record a logical group.
//!
//! [`Topology`] places groups on devices. The [`GroupRecord`] of a group has its primary and its in-sync set, and
//! changes by compare-and-swap of its epoch ([`ClusterMap::propose_group`]). The map is not on the way of an I/O: without
//! it memberships stand still. [`LocalMap`] keeps it in a directory, for clusters on one machine.
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

mod local;
mod placement;
mod record;

pub use local::LocalMap;
pub use placement::Topology;
pub use record::{
    DeviceId, DeviceRecord, GroupId, GroupRecord, ImageEntry, MapError, NodeId, NodeRecord, PoolRecord,
    Proposed,
};
pub use wire_replica::{GroupConfig, ReplicaId};

/// The map of a cluster. Every method returns when what it changed is durable. Several processes may change a map at a time:
/// changes of a record that others change too are compare-and-swap.
pub trait ClusterMap: Send + Sync {
    /// The cluster's identity, the same for ever.
    ///
    /// # Errors
    /// [`MapError`], as of every method.
    fn cluster(&self) -> Result<uuid::Uuid, MapError>;

    /// The nodes.
    ///
    /// # Errors
    /// [`MapError`].
    fn nodes(&self) -> Result<std::collections::BTreeMap<NodeId, NodeRecord>, MapError>;

    /// Adds or changes a node.
    ///
    /// # Errors
    /// [`MapError::SameIdentity`] if another node has its UUID.
    fn put_node(&self, id: NodeId, node: &NodeRecord) -> Result<(), MapError>;

    /// The devices.
    ///
    /// # Errors
    /// [`MapError`].
    fn devices(&self) -> Result<std::collections::BTreeMap<DeviceId, DeviceRecord>, MapError>;

    /// Adds or changes a device.
    ///
    /// # Errors
    /// [`MapError::SameIdentity`] if another device has its UUID, [`MapError::Missing`] if there is no such node.
    fn put_device(&self, id: DeviceId, device: &DeviceRecord) -> Result<(), MapError>;

    /// The pools, by name.
    ///
    /// # Errors
    /// [`MapError`].
    fn pools(&self) -> Result<std::collections::BTreeMap<String, PoolRecord>, MapError>;

    /// Adds a pool, and gives it its groups.
    ///
    /// # Errors
    /// [`MapError::Exists`]; [`MapError::Invalid`] if it has no groups or more in its in-sync sets than replicas.
    fn create_pool(&self, name: &str, pool: &PoolRecord) -> Result<(), MapError>;

    /// The record of a group; `None` if it has none yet.
    ///
    /// # Errors
    /// [`MapError`].
    fn group(&self, id: GroupId) -> Result<Option<GroupRecord>, MapError>;

    /// Replaces the record of a group, if it is that of the epoch before; the first has epoch 1.
    ///
    /// # Errors
    /// [`MapError::Invalid`] if the primary is not in the in-sync set.
    fn propose_group(&self, id: GroupId, record: &GroupRecord) -> Result<Proposed, MapError>;

    /// The images, by pool and name.
    ///
    /// # Errors
    /// [`MapError`].
    fn images(&self) -> Result<std::collections::BTreeMap<(String, String), ImageEntry>, MapError>;

    /// Adds an image to a pool, with a volume that no other one ever had.
    ///
    /// # Errors
    /// [`MapError::Exists`], [`MapError::Missing`] without the pool, [`MapError::Invalid`] if it is no name.
    fn create_image(&self, pool: &str, name: &str, bytes: u64) -> Result<ImageEntry, MapError>;

    /// Changes the size of an image.
    ///
    /// # Errors
    /// [`MapError::Missing`].
    fn resize_image(&self, pool: &str, name: &str, bytes: u64) -> Result<ImageEntry, MapError>;

    /// Removes an image from the map; its objects are for the caller to remove before.
    ///
    /// # Errors
    /// [`MapError::Missing`].
    fn remove_image(&self, pool: &str, name: &str) -> Result<(), MapError>;
}
