//! Why the store refuses a device, or ends one.

use std::time::Duration;

use bdev::BdevError;
use block_io::Status;
use cluster_map::MapError;
use objects::ObjectsError;
use oplog::LogError;
use uuid::Uuid;
use wire_store::DecodeError;

/// What went wrong with a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The block device cannot be used.
    #[error(transparent)]
    Bdev(#[from] BdevError),
    /// A read, write or flush of the device failed.
    #[error("{what} of the device at byte {offset}: {status}")]
    Io {
        /// What failed.
        what: &'static str,
        /// Where.
        offset: u64,
        /// How.
        status: Status,
    },
    /// Prioritized threads cannot be started or placed.
    #[error("the threads of the store cannot be started: {0}")]
    Threads(String),
    /// What a device remembers of its past cannot be written.
    #[error("what the node has seen cannot be kept on its device: {0}")]
    Memory(String),
    /// The first block is no superblock.
    #[error("the device has no store: {0}")]
    NoStore(DecodeError),
    /// What the crypto bdev gives of its device is no superblock.
    #[error(
        "{bdev} has no store when it is decrypted with its key: the key or the device is another one than \
         when it was formatted, or it was formatted without a key; nothing on it is changed"
    )]
    NotDecrypted {
        /// The crypto bdev.
        bdev: String,
    },
    /// The device has the logs of a store.
    #[error(
        "the device has the logs of the store on device {device}: name that one, and this one for its logs"
    )]
    LogsOnly {
        /// UUID of the device with the partitions.
        device: Uuid,
    },
    /// The store has its logs on another device, and none is named.
    #[error("the store has its logs on another device, {wanted}: name it (--log, log_bdev_name)")]
    LogWanted {
        /// UUID of the device with the logs.
        wanted: Uuid,
    },
    /// The store has its logs on its own device.
    #[error("the store has its logs on its own device: name none for them")]
    LogNotWanted,
    /// The device that is named for the logs has none.
    #[error("the device that is named for the logs has none: {0}")]
    NoLogs(DecodeError),
    /// The device has the logs of another store.
    #[error(
        "the device that is named for the logs is {found}, and has those of another store: this one's are on {wanted}"
    )]
    ForeignLogDevice {
        /// UUID of the device with the logs of this store.
        wanted: Uuid,
        /// UUID of the device that was named.
        found: Uuid,
    },
    /// The logs of replicas would be lost, and their data not.
    #[error(
        "{log} keeps what is written in memory, and {data} outlives that: the logs of a node need a device that lasts as long \
         as its data"
    )]
    LogInMemory {
        /// The block device for the logs.
        log: String,
        /// That with the data.
        data: String,
    },
    /// Formatting would destroy a store.
    #[error("the device has a store already; force formats it again")]
    Exists,
    /// Formatting may destroy an encrypted store.
    #[error(
        "the device begins with data that looks encrypted, as that of an encrypted node does: force formats \
         it all the same"
    )]
    LooksEncrypted,
    /// The device cannot be formatted like this.
    #[error("{0}")]
    Geometry(String),
    /// The device is smaller than when it was formatted.
    #[error("the device has {found} bytes, the store on it {expected}: it was truncated")]
    Truncated {
        /// Bytes of the device.
        found: u64,
        /// Bytes according to the superblock.
        expected: u64,
    },
    /// What a partition has is not valid.
    #[error("partition {partition}: {source}")]
    Objects {
        /// The partition.
        partition: u32,
        /// What is wrong.
        source: ObjectsError,
    },
    /// A log is not valid.
    #[error("log {log}: {source}")]
    Log {
        /// The log.
        log: u32,
        /// What is wrong.
        source: LogError,
    },
    /// The group's partition on the device is damaged, and is kept.
    #[error("partition {partition} of logical group {group} is damaged: {reason}")]
    Damaged {
        /// The partition.
        partition: u32,
        /// The logical group.
        group: u32,
        /// What is wrong.
        reason: String,
    },
    /// A replica that the node is to get finds no partition.
    #[error("the device has no partition left for logical group {0}")]
    NoSpare(u32),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: sockets::StreamAddress,
        /// Why.
        source: std::io::Error,
    },
    /// The device belongs to another cluster or another node.
    #[error(
        "the device {device} belongs to another {what}, and is not changed: start this node with the device that it had, or \
         replace the node to begin with an empty one"
    )]
    Foreign {
        /// The block device.
        device: String,
        /// `cluster` or `node`.
        what: &'static str,
    },
    /// Another process is this node.
    #[error(
        "another process is node {node}: it listens on {address}. If that is another machine or directory, this one is a copy of it, \
         and one of the two must go; if it has ended, start this one again in {seconds} s"
    )]
    AnotherProcess {
        /// The node.
        node: u32,
        /// Where the other one listens.
        address: String,
        /// How long the other one's lease lasts at most after its end.
        seconds: u32,
    },
    /// The map cannot be used at the start.
    #[error(transparent)]
    Map(#[from] MapError),
    /// Neither checkpoint record of a replica is valid.
    #[error("the replica of group {group}: neither checkpoint record is valid: {source}")]
    CheckpointRecord {
        /// The logical group.
        group: u32,
        /// What is wrong with the first.
        source: DecodeError,
    },
    /// The log of a replica does not have the entry that its checkpoint ends with.
    #[error("log {log} does not have entry {sequence}, with which the checkpoint of its replica ends")]
    Checkpoint {
        /// The log.
        log: u32,
        /// The entry.
        sequence: u64,
    },
    /// The log belongs to another logical group.
    #[error("log {log} belongs to logical group {group}")]
    ForeignLog {
        /// The log.
        log: u32,
        /// The group in its header.
        group: u32,
    },
    /// The device could tear a sector that the log takes for whole.
    #[error(
        "the device writes {device} bytes whole or not at all, the log was made for {log}: format it again"
    )]
    Sector {
        /// Bytes of the log's sectors.
        log: u64,
        /// Bytes of the device's.
        device: u64,
    },
    /// A block does not have its checksum.
    #[error("block {block} of the device is damaged: its checksum is another")]
    Checksum {
        /// The block of the device.
        block: u64,
    },
    /// A record of an image is not valid.
    #[error("the record of image {volume}: {source}")]
    Image {
        /// The volume.
        volume: u32,
        /// What is wrong.
        source: DecodeError,
    },
    /// No memory for I/O.
    #[error("no buffers are free: --memory is used up")]
    NoBuffers,
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// Too many requests wait for a core.
    #[error("the store is busy: try again")]
    Busy,
    /// A node is not stopped, because others could not serve without it.
    #[error(
        "without this node fewer replicas of {} than the pool demands are in sync on nodes that are up: `ringbolt store status` says \
         what the others wait for",
        groups_named(groups)
    )]
    TooFewInSync {
        /// The logical groups.
        groups: Vec<u32>,
    },
    /// A node is not stopped, because others did not take over in time.
    #[error("no other node has taken over {} within {} ms: the map or the other nodes do not answer", groups_named(groups), limit.as_millis())]
    NotLeft {
        /// The logical groups.
        groups: Vec<u32>,
        /// How long they had.
        limit: Duration,
    },
    /// A node is not stopped, because the map cannot say who takes over.
    #[error("no other node can take over: {0}")]
    LeaveMap(MapError),
    /// A core does not answer, or the store is closed.
    #[error("the store is closed")]
    Closed,
    /// An operation of the store failed.
    #[error("{what}: {status}")]
    Failed {
        /// The operation.
        what: &'static str,
        /// How.
        status: Status,
    },
    /// There is no image of this name.
    #[error("there is no image {0}")]
    NoImage(String),
    /// The name is in use.
    #[error("there is an image {0} already")]
    ImageExists(String),
    /// The image cannot be like this.
    #[error("{0}")]
    InvalidImage(String),
}

impl StoreError {
    /// Whether what one partition has is damaged, or cannot be read: others may be in order. What cannot be
    /// written concerns the device, which may be full.
    pub(crate) fn is_damage(&self) -> bool {
        match self {
            StoreError::Io { what, .. } => *what == "read",
            StoreError::Objects { .. }
            | StoreError::Log { .. }
            | StoreError::CheckpointRecord { .. }
            | StoreError::Checkpoint { .. }
            | StoreError::Checksum { .. } => true,
            _ => false,
        }
    }
}

/// The first groups of a list, and how many there are.
fn groups_named(groups: &[u32]) -> String {
    /// A line has room for so many.
    const NAMED_MAX: usize = 8;
    let named = groups.iter().take(NAMED_MAX).map(u32::to_string).collect::<Vec<_>>().join(", ");
    match groups.len() {
        1 => format!("group {named}"),
        count if count <= NAMED_MAX => format!("groups {named}"),
        count => format!("{count} groups ({named}, ...)"),
    }
}
