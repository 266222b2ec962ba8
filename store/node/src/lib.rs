//! A node of the store on one device: operation logs and partitions, executed, and images as block devices.
//!
//! [`format_device`] writes an empty store to a block device; a [`StoreNode`] opens it and registers its
//! images. A device has partitions, each with an operation log; a *shard* is the two of them, owned by one
//! core. A write is acknowledged when it is durable in the log, and goes in place in the background; a read
//! finds it in either. So an image has no volatile cache, and a flush has nothing to do.
//! `docs/STORE-GUARANTEES.md` says what that promises.
//!
//! ```
//! use bdev::{Access, AsyncChannel, Registry, malloc};
//! use store_node::{FormatOptions, StoreCores, StoreNode, format_device};
//! let registry = Registry::new();
//! malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 65536, 512)).expect("a device");
//! let reactor = reactor::Reactor::new(&reactor::ReactorConfig::default()).expect("a reactor");
//! let core = reactor.core();
//! reactor.block_on(async move {
//!     let (cores, job) = (StoreCores::This(&core), control::JobHandle::standalone());
//!     format_device(&registry, "Malloc0", &cores, FormatOptions::default(), &job).await?;
//!     let node = StoreNode::open(&registry, "Malloc0", "store", &cores, &job).await?;
//!     node.create_image("vol", 1 << 30).await?;
//!     let descriptor = registry.open("store/vol", Access::ReadWrite)?;
//!     let io = AsyncChannel::new(&core, descriptor.channel(&core)?);
//!     let mut buffer = core.pool().take(4096).expect("a buffer");
//!     buffer.as_mut_slice().fill(7);
//!     io.write(8, buffer).await.expect("written, and durable");
//!     drop((io, descriptor));
//!     node.close().await;
//!     Ok::<(), store_node::StoreError>(())
//! })?;
//! # Ok::<(), store_node::StoreError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod check;
mod device;
mod device_memory;
mod device_state;
mod disks;
mod error;
mod format;
mod image;
mod node;
mod node_metrics;
pub mod node_rpc;
mod once;
mod replica_node;
pub mod rpc;
mod server;
mod shard;
mod spare;
mod threads;
mod tuning;

pub use check::{PartitionContents, StoreContents, inspect};
pub use disks::{StoreBdevs, class_of};
pub use error::StoreError;
pub use format::{FormatOptions, PARTITIONS_MAX, ReplicaFormat, looks_encrypted};
pub use node::{
    ImageInfo, PartitionStatus, StoreCores, StoreNode, StoreOptions, check_unused, format_device,
};
pub use replica_node::{
    FailedPartition, MakeOutbox, PoolOptions, ReplicaHandle, ReplicaNode, ReplicaNodeConfig,
};
pub use server::{ClientKeyTable, NoRoom, NodeServer, NodeServerConfig};
pub use shard::replication::{Outbox, ReplicaDescription, ReplicaInput};
pub use store_image::{IMAGE_BLOCK_BYTES, TRANSFER_BYTES_MAX};
pub use threads::{NonPriorityThreads, StoreThreads, ThreadMode};
pub use tuning::StoreTuning;

/// Counters of a partition since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardStats {
    /// Entries that were acknowledged.
    pub entries: u64,
    /// Writes to the log; each has one or more entries.
    pub log_writes: u64,
    /// Bytes of these writes.
    pub log_bytes: u64,
    /// Reads.
    pub reads: u64,
    /// Reads that the log answered alone.
    pub reads_from_log: u64,
    /// Reads of blocks under newer bytes of the log. The other reads found nothing in the log.
    pub reads_overlaid: u64,
    /// Reads that waited until newer bytes of the log were in place. None, unless the read policy is `flush`.
    pub reads_flushed: u64,
    /// Reads that were repeated because the blocks were written in place meanwhile.
    pub reads_repeated: u64,
    /// Entries whose data overwrote a block, with only their headers in the log.
    pub entries_overwriting: u64,
    /// Batches written in place.
    pub flushes: u64,
    /// Of these, batches of more than 16 committed entries.
    pub flushes_by_count: u64,
    /// Batches of fewer entries, the oldest of which was committed 100 ms before. Those by neither made room
    /// in the log or on the device, or closed the store.
    pub flushes_by_time: u64,
    /// Entries of these batches.
    pub entries_in_place: u64,
    /// Most bytes of entries that were in memory at a time because they were not in place.
    pub unplaced_bytes_max: u64,
    /// Checkpoints.
    pub checkpoints: u64,
    /// Operations that waited for room in the log or for space.
    pub deferred: u64,
    /// Pieces of reads, and blocks that writes changed in part, whose checksums were in memory when they were
    /// read.
    pub checksum_hits: u64,
    /// Those that needed a read of the checksum table.
    pub checksum_misses: u64,
    /// Blocks whose checksum was wrong.
    pub damaged_blocks: u64,
    /// Entries that were applied again when the store was opened.
    pub entries_redone: u64,
}
