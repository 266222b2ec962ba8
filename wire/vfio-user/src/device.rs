//! What a device is.

/// Flags of [`DeviceInfo`].
pub mod device_flags {
    /// `DEVICE_RESET` works.
    pub const RESET: u32 = 1 << 0;
    /// It is a PCI device.
    pub const PCI: u32 = 1 << 1;
}

fields! {
    /// Payload of `DEVICE_GET_INFO`, all zero but `argsz`, and of its reply.
    DeviceInfo, 16 {
        /// Bytes that the client has room for; in the reply, bytes that there are.
        argsz: u32,
        /// See [`device_flags`].
        flags: u32,
        /// Number of regions.
        regions: u32,
        /// Number of kinds of interrupts.
        irqs: u32,
    }
}
