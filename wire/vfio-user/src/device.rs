//! Description of the device.

/// Flags of [`DeviceInfo`].
pub mod device_flags {
    /// The device supports `DEVICE_RESET`.
    pub const RESET: u32 = 1 << 0;
    /// The device is a PCI device.
    pub const PCI: u32 = 1 << 1;
}

codec::fields! {
    /// Payload of `DEVICE_GET_INFO`, all zero but `argsz`, and of its reply.
    DeviceInfo, 16 {
        /// Size of the client's buffer in bytes; in the reply, the size that is needed.
        argsz: u32,
        /// See [`device_flags`].
        flags: u32,
        /// Number of regions.
        regions: u32,
        /// Number of interrupt types.
        irqs: u32,
    }
}
