//! The I/O that an open store asks for.

use crate::read::BlobSegment;

/// What a store's device promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobStoreDevice {
    /// Bytes of the device.
    pub bytes: u64,
    /// Bytes of a logical block: every offset and length of an action is a multiple of it, and of 512.
    pub block_bytes: u32,
    /// Whether a write may be lost by a power failure until a flush that begins after it has completed.
    pub has_volatile_cache: bool,
    /// Bytes that a power failure leaves written as a whole or not at all, if they are aligned to that. 512
    /// is assumed where the device promises nothing. Where it is 4096 or more, pages need no second copy.
    pub atomic_write_bytes: u32,
}

/// An I/O that the store needs. Any number may be in flight, and they complete in any order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreIo {
    /// Names the I/O in [`OpenBlobStore::complete`](super::OpenBlobStore::complete). Ids are not used twice.
    pub id: u64,
    /// What to do.
    pub action: StoreAction,
}

/// What an I/O does. Offsets are bytes of the store's device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreAction {
    /// Write metadata.
    Write {
        /// Where.
        offset: u64,
        /// What: a multiple of a block.
        data: Vec<u8>,
    },
    /// Make a range read as zeroes.
    WriteZeroes {
        /// Where.
        offset: u64,
        /// Bytes.
        bytes: u64,
    },
    /// Say that the content is of no use any more. A device without that completes it and does nothing.
    Deallocate {
        /// Where.
        offset: u64,
        /// Bytes.
        bytes: u64,
    },
    /// Copy data of a blob's parent. The runner reads the segments in order, external snapshots included, and
    /// writes them to consecutive bytes. At most one cluster.
    Copy {
        /// The data.
        from: Vec<BlobSegment>,
        /// Where to.
        offset: u64,
    },
    /// Make durable what has completed before. It is no barrier: the store itself waits for what must be
    /// before or after. Only asked for where the device has a volatile cache.
    Flush,
}

/// The device failed an I/O; how far it was done is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreIoFailed;
