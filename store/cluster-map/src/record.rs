//! What the map has.

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use wire_replica::{GroupConfig, ReplicaId};

/// A machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// A device of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u32);

/// A logical group, in the whole cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u32);

/// Whether connections to a node use TLS. Those that the node makes are as the other node's policy says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TlsPolicy {
    /// Others connect without it. Who connects with it is served too.
    #[default]
    Off,
    /// Others connect with it. Who connects without it is served too: a program that has an older map, or of
    /// an older version.
    On,
    /// Others connect with it, and none is served without it.
    Required,
}

impl TlsPolicy {
    /// As the map has it.
    pub fn name(self) -> &'static str {
        match self {
            TlsPolicy::Off => "off",
            TlsPolicy::On => "on",
            TlsPolicy::Required => "required",
        }
    }

    /// Whether others connect without TLS.
    pub fn is_off(&self) -> bool {
        *self == TlsPolicy::Off
    }
}

/// A node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Identity.
    pub uuid: Uuid,
    /// Where others connect to it: `HOST:PORT`.
    pub addresses: Vec<String>,
    /// The failure domain: replicas of a group are in different ones.
    pub domain: String,
    /// Whether connections to it use TLS.
    #[serde(default, skip_serializing_if = "TlsPolicy::is_off")]
    pub tls: TlsPolicy,
    /// It is to have no data: [`ClusterMap::out`](crate::ClusterMap::out) says so, and why. The record itself
    /// does not.
    #[serde(skip)]
    pub out: bool,
}

/// Why a node is to have no data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutReason {
    /// An operator said so.
    Operator,
    /// It was down for too long. When it is up again, it is in again.
    Down,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceRecord {
    /// Identity, as in its superblock.
    pub uuid: Uuid,
    /// The node that it is in.
    #[serde(with = "as_number")]
    pub node: NodeId,
    /// Its share of data, in GiB by custom.
    pub weight: u32,
    /// It is to have no data.
    #[serde(default)]
    pub out: bool,
    /// The size of its partitions, all the same; a node that starts says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<PartitionSize>,
    /// What survives a write that it acknowledged, its logs' device considered; a node that starts says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<PoolClass>,
    /// Number of its partitions, each of which takes a replica; a node that starts says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partitions: Option<u32>,
}

/// What a partition has room for, or what a group uses of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionSize {
    /// Extents of 64 KiB.
    pub extents: u32,
    /// Objects.
    pub onodes: u32,
}

impl PartitionSize {
    /// What is missing for this use of space: extents and objects.
    pub fn lacks(&self, used: PartitionSize) -> PartitionSize {
        PartitionSize {
            extents: used.extents.saturating_sub(self.extents),
            onodes: used.onodes.saturating_sub(self.onodes),
        }
    }

    /// Whether there is room for this use of space.
    pub fn holds(&self, used: PartitionSize) -> bool {
        self.lacks(used) == PartitionSize::default()
    }
}

/// Where a write of a pool is when it is acknowledged; the weakest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolClass {
    /// In the device's cache of every replica in sync. A replica whose machine is booted again gets a copy;
    /// if all in sync are, the data of the group is lost.
    Memory,
    /// Durable on the device of every replica in sync.
    #[default]
    Disk,
    /// In the persistent memory of the logs of every replica in sync.
    Pmem,
}

impl PoolClass {
    /// Every class.
    pub const ALL: [PoolClass; 3] = [PoolClass::Disk, PoolClass::Memory, PoolClass::Pmem];

    /// Its name, as in records.
    pub fn name(self) -> &'static str {
        match self {
            PoolClass::Disk => "disk",
            PoolClass::Memory => "memory",
            PoolClass::Pmem => "pmem",
        }
    }

    fn is_default(&self) -> bool {
        *self == PoolClass::default()
    }
}

/// A pool: images whose groups have the same number of replicas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolRecord {
    /// First of its logical groups.
    pub first_group: u32,
    /// Number of its logical groups.
    pub groups: u32,
    /// Replicas of a group.
    pub replicas: u32,
    /// With fewer replicas in sync, its groups wait.
    pub in_sync_min: u32,
    /// When a write is acknowledged. It never changes.
    #[serde(default, skip_serializing_if = "PoolClass::is_default")]
    pub class: PoolClass,
}

impl PoolRecord {
    /// Where a write is when it is acknowledged, if replicas are on these devices: a promise of the pool is
    /// worth what the weakest of them is. A device that says nothing counts as what the pool wants.
    pub fn class_on<'a>(&self, devices: impl IntoIterator<Item = &'a DeviceRecord>) -> PoolClass {
        devices
            .into_iter()
            .filter_map(|device| device.class)
            .min()
            .map_or(self.class, |it| it.min(self.class))
    }
}

/// Who has an image attached for writing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageLock {
    /// Raised with each holder that shares with none before: logical groups refuse writes of a lower one.
    pub attach_epoch: u32,
    /// Those that have it attached: one, or several that share it.
    pub holders: Vec<ImageHolder>,
}

/// One that has an image attached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageHolder {
    /// This attachment.
    pub id: Uuid,
    /// The lease of its process: [`ClusterMap::holder_age`](crate::ClusterMap::holder_age) says whether it
    /// lives.
    pub lease: Uuid,
    /// Who it is, for people.
    pub name: String,
    /// Its address, for people.
    pub address: String,
    /// When it attached the image, in seconds since 1970.
    pub since: u64,
    /// Others may have it too, if they share it as well.
    pub shared: bool,
    /// Its machine, as far as processes see each other there.
    pub machine: String,
    /// The process, and when it began, in ticks of the machine.
    pub process: u32,
    /// See `process`.
    pub started: u64,
}

impl ImageLock {
    /// Most holders that share an image.
    pub const HOLDERS_MAX: usize = 64;
}

/// A logical group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupRecord {
    /// Epoch, primary and in-sync set.
    pub config: GroupConfig,
    /// The replicas that it is to have. Those that are not in sync are learners.
    pub replicas: Vec<ReplicaId>,
}

/// The outcome of a proposal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proposed {
    /// The map has it.
    Accepted,
    /// The map has another record; it is this.
    Superseded(GroupRecord),
    /// There is no record, and the proposal is not for the first one.
    Missing,
}

/// Why the map cannot answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MapError {
    /// The file, or the server of the map.
    #[error("the cluster map {what}: {reason}")]
    Storage {
        /// Where it is.
        what: String,
        /// What is wrong.
        reason: String,
    },
    /// A record is not what this version writes.
    #[error("the cluster map has an unreadable record of {what}: {reason}")]
    Record {
        /// Which.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Two nodes or devices with one identity.
    #[error("{what} {uuid} is in the cluster already, as number {number}: a copied identity is refused")]
    SameIdentity {
        /// `node` or `device`.
        what: &'static str,
        /// The identity.
        uuid: Uuid,
        /// Who has it.
        number: u32,
    },
    /// A node that was removed from the cluster.
    #[error(
        "node {} was removed from the cluster, and its number is not used again: `ringbolt store add-node` adds an empty one", .0.0
    )]
    Removed(NodeId),
    /// There is one with this name.
    #[error("{0} exists")]
    Exists(String),
    /// There is none.
    #[error("there is no {0}")]
    Missing(String),
    /// A snapshot that is protected from removal.
    #[error("snapshot {0} is protected: `ringbolt image snapshot unprotect` ends that")]
    ProtectedSnapshot(String),
    /// An image that is protected from removal.
    #[error("image {0} is protected: `ringbolt image unprotect` ends that")]
    Protected(String),
    /// Another one changed it since it was read.
    #[error("{0} was changed by another one at the same time")]
    Changed(String),
    /// A record that makes no sense.
    #[error("{0}")]
    Invalid(String),
}

impl GroupRecord {
    /// Checks that the primary is in sync, and every member is a replica.
    ///
    /// # Errors
    /// [`MapError::Invalid`].
    pub fn check(&self) -> Result<(), MapError> {
        let GroupConfig { epoch, primary, in_sync } = &self.config;
        let stranger = in_sync.iter().find(|member| !self.replicas.contains(member));
        let repeated = in_sync.iter().enumerate().find(|(index, member)| in_sync[..*index].contains(member));
        let reason = match (self.config.has(*primary), stranger, repeated) {
            (false, ..) => format!("its primary {} is not in sync", primary.0),
            (_, Some(stranger), _) => format!("{} is in sync and not a replica", stranger.0),
            (.., Some((_, member))) => format!("{} is in sync twice", member.0),
            _ if *epoch == 0 => "its epoch is 0".to_string(),
            _ => return Ok(()),
        };
        Err(MapError::Invalid(format!("the record of a group is refused: {reason}")))
    }
}

/// A node's number.
mod as_number {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::NodeId;

    pub(super) fn serialize<S: Serializer>(node: &NodeId, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u32(node.0)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<NodeId, D::Error> {
        u32::deserialize(from).map(NodeId)
    }
}

/// The members' numbers, as JSON has a group.
#[derive(Serialize, Deserialize)]
struct GroupJson {
    epoch: u32,
    primary: u32,
    in_sync: Vec<u32>,
    replicas: Vec<u32>,
}

impl Serialize for GroupRecord {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let numbers = |ids: &[ReplicaId]| ids.iter().map(|id| id.0).collect();
        let GroupConfig { epoch, primary, in_sync } = &self.config;
        let (in_sync, replicas) = (numbers(in_sync), numbers(&self.replicas));
        GroupJson { epoch: *epoch, primary: primary.0, in_sync, replicas }.serialize(to)
    }
}

impl<'de> Deserialize<'de> for GroupRecord {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<GroupRecord, D::Error> {
        let GroupJson { epoch, primary, in_sync, replicas } = GroupJson::deserialize(from)?;
        let ids = |numbers: Vec<u32>| numbers.into_iter().map(ReplicaId).collect();
        let config = GroupConfig { epoch, primary: ReplicaId(primary), in_sync: ids(in_sync) };
        Ok(GroupRecord { config, replicas: ids(replicas) })
    }
}
