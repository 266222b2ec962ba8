//! Virtqueues.

codec::fields! {
    /// A virtqueue and a value: its size, its base, or whether it is enabled.
    VringState, 8 {
        /// Index of the virtqueue.
        index: u32,
        /// The value.
        value: u32,
    }
}

codec::fields! {
    /// The areas of a virtqueue, by addresses of the front-end's process. Of a packed one, they are the descriptor ring,
    /// the device's and the driver's event suppression structures.
    VringAddress, 40 {
        /// Index of the virtqueue.
        index: u32,
        /// [`vring_flags`].
        flags: u32,
        /// The descriptor table.
        descriptors: u64,
        /// The used ring.
        used: u64,
        /// The available ring.
        available: u64,
        /// Guest-physical address of the used ring, for the log of dirty pages.
        log: u64,
    }
}

/// Flags of [`VringAddress`].
pub mod vring_flags {
    /// Writes to the used ring are logged.
    pub const LOG: u32 = 1;
}

/// A virtqueue whose eventfd is set, and whether there is one: the payload of the requests for eventfds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringDescriptor {
    /// Index of the virtqueue.
    pub index: u8,
    /// No descriptor comes with the message: the virtqueue is to be polled.
    pub is_absent: bool,
}

impl VringDescriptor {
    const ABSENT: u64 = 1 << 8;

    /// Decodes bits 7:0 and 8; others are ignored.
    pub const fn from_bits(bits: u64) -> VringDescriptor {
        VringDescriptor { index: bits as u8, is_absent: bits & VringDescriptor::ABSENT != 0 }
    }

    /// Encodes it.
    pub const fn to_bits(self) -> u64 {
        self.index as u64 | if self.is_absent { VringDescriptor::ABSENT } else { 0 }
    }
}
