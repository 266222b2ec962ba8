//! The region of requests in flight, which the front-end keeps while the back-end is gone.
//!
//! The region has one area for each virtqueue, all of the same size, 64-byte aligned: [`split`] or [`packed`]
//! followed by one entry for each descriptor. Offsets are from the start of an area.

codec::fields! {
    /// The payload of `GET_INFLIGHT_FD` and `SET_INFLIGHT_FD`. Front-ends send it with four bytes of padding.
    InflightDescription, 20 {
        /// Bytes of the region.
        mmap_size: u64,
        /// Offset of the region in its file.
        mmap_offset: u64,
        /// Number of virtqueues.
        queues: u16,
        /// Number of descriptors of each.
        queue_size: u16,
    }
}

/// The version of the region's format.
pub const VERSION: u16 = 1;
/// Alignment of areas in bytes.
pub const ALIGNMENT: u64 = 64;

/// The area of a split virtqueue (`QueueRegionSplit`).
pub mod split {
    /// Offset of the features, a `u64` without meaning yet.
    pub const FEATURES: u64 = 0;
    /// Offset of the version, a `u16`.
    pub const VERSION: u64 = 8;
    /// Offset of the number of entries, a `u16`.
    pub const ENTRIES: u64 = 10;
    /// Offset of the head of the batch that was used last, a `u16`.
    pub const LAST_BATCH_HEAD: u64 = 12;
    /// Offset of the used index after that batch, a `u16`.
    pub const USED_INDEX: u64 = 14;

    /// Offset of the entry of a descriptor (`DescStateSplit`).
    #[inline]
    pub const fn entry(descriptor: u16) -> u64 {
        16 + 16 * descriptor as u64
    }

    /// Offset in an entry: 1 if the request with this first descriptor is in flight, a `u8`.
    pub const INFLIGHT: u64 = 0;
    /// Offset in an entry: the head before it in its batch, a `u16`.
    pub const NEXT: u64 = 6;
    /// Offset in an entry: when the request was fetched, in order, a `u64`.
    pub const COUNTER: u64 = 8;

    /// Bytes of the area.
    pub const fn bytes(size: u16) -> u64 {
        entry(size).next_multiple_of(super::ALIGNMENT)
    }
}

/// The area of a packed virtqueue (`QueueRegionPacked`).
pub mod packed {
    /// Offset of the version, a `u16`.
    pub const VERSION: u64 = 8;
    /// Offset of the number of entries, a `u16`.
    pub const ENTRIES: u64 = 10;
    /// Offset of the first free entry, a `u16`.
    pub const FREE_HEAD: u64 = 12;
    /// Offset of the first free entry before the update in progress, a `u16`.
    pub const OLD_FREE_HEAD: u64 = 14;
    /// Offset of the next used index, a `u16`.
    pub const USED_INDEX: u64 = 16;
    /// Offset of the next used index before the update in progress, a `u16`.
    pub const OLD_USED_INDEX: u64 = 18;
    /// Offset of the used wrap counter, a `u8`.
    pub const USED_WRAP: u64 = 20;
    /// Offset of the used wrap counter before the update in progress, a `u8`.
    pub const OLD_USED_WRAP: u64 = 21;

    /// Offset of an entry (`DescStatePacked`).
    #[inline]
    pub const fn entry(index: u16) -> u64 {
        32 + 32 * index as u64
    }

    /// Offset in an entry: 1 if the request is in flight, a `u8`.
    pub const INFLIGHT: u64 = 0;
    /// Offset in an entry: the next entry of the chain or of the free list, a `u16`.
    pub const NEXT: u64 = 2;
    /// Offset in an entry: the last entry of the chain, a `u16`.
    pub const LAST: u64 = 4;
    /// Offset in an entry: the number of descriptors of the chain, a `u16`.
    pub const COUNT: u64 = 6;
    /// Offset in an entry: when the request was fetched, in order, a `u64`.
    pub const COUNTER: u64 = 8;
    /// Offset in an entry: the descriptor's identifier, a `u16`.
    pub const ID: u64 = 16;
    /// Offset in an entry: the descriptor's flags, a `u16`.
    pub const FLAGS: u64 = 18;
    /// Offset in an entry: the descriptor's length, a `u32`.
    pub const LENGTH: u64 = 20;
    /// Offset in an entry: the descriptor's address, a `u64`.
    pub const ADDRESS: u64 = 24;

    /// Bytes of the area.
    pub const fn bytes(size: u16) -> u64 {
        entry(size).next_multiple_of(super::ALIGNMENT)
    }
}
