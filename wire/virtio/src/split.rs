//! Split virtqueues (virtio 1.3, section 2.7).
//!
//! The driver owns the descriptor table and the available ring, the device owns the used ring. Offsets are in bytes from
//! the start of each of the three areas; `size` is the number of descriptors, a power of two.

codec::fields! {
    /// An entry of the descriptor table: a buffer, and the rest of its chain.
    Descriptor, 16 {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        length: u32,
        /// [`descriptor_flags`](crate::descriptor_flags).
        flags: u16,
        /// The next descriptor of the chain, with the flag `NEXT`.
        next: u16,
    }
}

impl Descriptor {
    /// The descriptor that is these two little-endian words: [`decode`](Self::decode) takes ten times the instructions.
    #[inline]
    pub const fn from_words([address, rest]: [u64; 2]) -> Descriptor {
        Descriptor { address, length: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
    }
}

codec::fields! {
    /// An entry of the used ring.
    UsedElement, 8 {
        /// The first descriptor of the chain.
        id: u32,
        /// Bytes that the device has written, from the start of the chain's writable part.
        written: u32,
    }
}

/// The ring of chains that the driver has made available.
pub mod available {
    /// Flag: the driver wants no notifications; a hint, unused with `EVENT_IDX`.
    pub const NO_INTERRUPT: u16 = 1;
    /// Offset of the flags.
    pub const FLAGS: u64 = 0;
    /// Offset of the index, which counts the entries ever added and wraps.
    pub const INDEX: u64 = 2;

    /// Offset of the entry with this index.
    #[inline]
    pub const fn entry(index: u16, size: u16) -> u64 {
        4 + 2 * (index & (size - 1)) as u64
    }

    /// Offset of `used_event`: the driver wants a notification when the used index passes it.
    #[inline]
    pub const fn used_event(size: u16) -> u64 {
        4 + 2 * size as u64
    }

    /// Bytes of the ring.
    pub const fn bytes(size: u16, event_index: bool) -> u64 {
        used_event(size) + if event_index { 2 } else { 0 }
    }
}

/// The ring of chains that the device has used.
pub mod used {
    /// Flag: the device wants no notifications; a hint, unused with `EVENT_IDX`.
    pub const NO_NOTIFY: u16 = 1;
    /// Offset of the flags.
    pub const FLAGS: u64 = 0;
    /// Offset of the index, which counts the entries ever added and wraps.
    pub const INDEX: u64 = 2;

    /// Offset of the entry with this index.
    #[inline]
    pub const fn entry(index: u16, size: u16) -> u64 {
        4 + 8 * (index & (size - 1)) as u64
    }

    /// Offset of `avail_event`: the device wants a notification when the available index passes it.
    #[inline]
    pub const fn available_event(size: u16) -> u64 {
        4 + 8 * size as u64
    }

    /// Bytes of the ring.
    pub const fn bytes(size: u16, event_index: bool) -> u64 {
        available_event(size) + if event_index { 2 } else { 0 }
    }
}

/// Bytes of the descriptor table.
pub const fn table_bytes(size: u16) -> u64 {
    Descriptor::SIZE as u64 * size as u64
}
