//! Interrupt types and vectors.

/// Indexes of the interrupt types of a PCI device.
pub mod irq {
    /// The INTx pin.
    pub const INTX: u32 = 0;
    /// MSI.
    pub const MSI: u32 = 1;
    /// MSI-X.
    pub const MSIX: u32 = 2;
    /// Device error.
    pub const ERROR: u32 = 3;
    /// Request to release the device.
    pub const REQUEST: u32 = 4;
    /// Number of interrupt types.
    pub const COUNT: u32 = 5;
}

/// Flags of [`IrqInfo`].
pub mod irq_flags {
    /// Eventfds can signal it.
    pub const EVENTFD: u32 = 1 << 0;
    /// It is maskable.
    pub const MASKABLE: u32 = 1 << 1;
    /// It is masked automatically when it is triggered.
    pub const AUTOMASKED: u32 = 1 << 2;
    /// Vectors cannot be added or removed individually.
    pub const NORESIZE: u32 = 1 << 3;
}

/// Flags of [`SetIrqs`]: one of `DATA` and one of `ACTION`.
pub mod irq_set {
    /// No data: the action applies to every vector of the range.
    pub const DATA_NONE: u32 = 1 << 0;
    /// One byte per vector follows; the action applies where it is 1.
    pub const DATA_BOOL: u32 = 1 << 1;
    /// One eventfd per vector comes with the message; without eventfds they are removed.
    pub const DATA_EVENTFD: u32 = 1 << 2;
    /// Mask the vectors.
    pub const ACTION_MASK: u32 = 1 << 3;
    /// Unmask the vectors.
    pub const ACTION_UNMASK: u32 = 1 << 4;
    /// Trigger the vectors or, with `DATA_EVENTFD`, set the eventfds that the device signals.
    pub const ACTION_TRIGGER: u32 = 1 << 5;
    /// All data flags.
    pub const DATA_MASK: u32 = DATA_NONE | DATA_BOOL | DATA_EVENTFD;
    /// All action flags.
    pub const ACTION_MASK_ALL: u32 = ACTION_MASK | ACTION_UNMASK | ACTION_TRIGGER;
}

codec::fields! {
    /// Payload of `DEVICE_GET_IRQ_INFO`, all zero but `argsz` and `index`, and of its reply.
    IrqInfo, 16 {
        /// Size of the client's buffer in bytes; in the reply, the size that is needed.
        argsz: u32,
        /// See [`irq_flags`].
        flags: u32,
        /// Interrupt type; see [`irq`].
        index: u32,
        /// Number of vectors.
        count: u32,
    }
}

codec::fields! {
    /// Payload of `DEVICE_SET_IRQS`, before its data.
    SetIrqs, 20 {
        /// Bytes of this structure and of the data after it.
        argsz: u32,
        /// See [`irq_set`].
        flags: u32,
        /// Interrupt type; see [`irq`].
        index: u32,
        /// First vector.
        start: u32,
        /// Number of vectors.
        count: u32,
    }
}
