//! Protocol features, the configuration space, and numbers.

bitflags::bitflags! {
    /// Features of the protocol itself. Those of other devices than block devices are left out.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct ProtocolFeatures: u64 {
        /// Several virtqueues.
        const MQ = 1 << 0;
        /// The log of dirty pages is in shared memory.
        const LOG_SHMFD = 1 << 1;
        /// Requests without a reply can be acknowledged.
        const REPLY_ACK = 1 << 3;
        /// The back-end has requests of its own.
        const BACKEND_REQ = 1 << 5;
        /// The back-end has the configuration space.
        const CONFIG = 1 << 9;
        /// Requests in flight are in memory that survives the back-end.
        const INFLIGHT_SHMFD = 1 << 12;
        /// The device can be reset.
        const RESET_DEVICE = 1 << 13;
        /// Memory regions are added and removed one by one.
        const CONFIGURE_MEM_SLOTS = 1 << 15;
        /// The front-end passes on the device status of virtio.
        const STATUS = 1 << 16;
    }
}

codec::fields! {
    /// A number: features, an acknowledgement (0 is success), a [`VringDescriptor`](crate::VringDescriptor).
    U64Payload, 8 {
        /// The number.
        value: u64,
    }
}

codec::fields! {
    /// A range of the configuration space, whose bytes follow.
    ConfigHeader, 12 {
        /// Offset in the configuration space.
        offset: u32,
        /// Bytes.
        size: u32,
        /// Of a write: 0, or 1 if it restores the state after a migration.
        flags: u32,
    }
}
