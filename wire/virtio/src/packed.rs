//! Packed virtqueues (virtio 1.3, section 2.8).
//!
//! One ring of descriptors, which the driver makes available and the device overwrites with used ones. A side that
//! passes the end of the ring inverts its wrap counter, which tells new descriptors from old ones.

use crate::descriptor_flags::{AVAILABLE, USED};

codec::fields! {
    /// An entry of the ring, or of an indirect table.
    PackedDescriptor, 16 {
        /// Guest-physical address.
        address: u64,
        /// Bytes; of a used descriptor those that the device has written.
        length: u32,
        /// The driver's identifier of the chain, valid in its last descriptor and in the used one.
        id: u16,
        /// [`descriptor_flags`](crate::descriptor_flags).
        flags: u16,
    }
}

impl PackedDescriptor {
    /// As [`split::Descriptor::from_words`](crate::split::Descriptor::from_words).
    #[inline]
    pub const fn from_words([address, rest]: [u64; 2]) -> PackedDescriptor {
        PackedDescriptor { address, length: rest as u32, id: (rest >> 32) as u16, flags: (rest >> 48) as u16 }
    }
}

/// Offset of a descriptor's flags.
pub const FLAGS: u64 = 14;

codec::fields! {
    /// What a side wants to be notified of: the event suppression structures.
    EventSuppression, 4 {
        /// With [`DESCRIPTOR`](Self::DESCRIPTOR): bits 14:0 are an index, bit 15 is the wrap counter of that position.
        offset_wrap: u16,
        /// One of the constants.
        flags: u16,
    }
}

impl EventSuppression {
    /// Flags: every notification.
    pub const ENABLE: u16 = 0;
    /// Flags: none.
    pub const DISABLE: u16 = 1;
    /// Flags: when the position in `offset_wrap` is passed, with `EVENT_IDX`.
    pub const DESCRIPTOR: u16 = 2;
}

/// A position in the ring with the wrap counter that belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPosition {
    /// Index of a descriptor, below the size of the ring.
    pub index: u16,
    /// The wrap counter, which begins as 1.
    pub wrap: bool,
}

impl RingPosition {
    /// The first position.
    pub const START: RingPosition = RingPosition { index: 0, wrap: true };

    /// Decodes bits 14:0 (index) and 15 (wrap counter).
    pub const fn from_bits(bits: u16) -> RingPosition {
        RingPosition { index: bits & 0x7fff, wrap: bits & 0x8000 != 0 }
    }

    /// The inverse of [`from_bits`](Self::from_bits).
    pub const fn to_bits(self) -> u16 {
        self.index & 0x7fff | (self.wrap as u16) << 15
    }

    /// The position `count` descriptors later, at most `size`, in a ring of `size`.
    #[must_use]
    #[inline]
    pub const fn advanced(self, count: u16, size: u16) -> RingPosition {
        let sum = self.index as u32 + count as u32;
        match sum.checked_sub(size as u32) {
            Some(index) => RingPosition { index: index as u16, wrap: !self.wrap },
            None => RingPosition { index: sum as u16, wrap: self.wrap },
        }
    }

    /// Whether the descriptor here, with these flags, has been made available.
    #[inline]
    pub const fn is_available(self, flags: u16) -> bool {
        (flags & AVAILABLE != 0) == self.wrap && (flags & USED != 0) != self.wrap
    }

    /// The flags `AVAILABLE` and `USED` of a descriptor that is used here.
    #[inline]
    pub const fn used_flags(self) -> u16 {
        if self.wrap { AVAILABLE | USED } else { 0 }
    }

    /// The flags `AVAILABLE` and `USED` of a descriptor that is made available here.
    #[inline]
    pub const fn available_flags(self) -> u16 {
        if self.wrap { AVAILABLE } else { USED }
    }
}
