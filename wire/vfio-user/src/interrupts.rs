//! Interrupts.

/// The kinds of interrupts of a PCI device, by index.
pub mod irq {
    /// The interrupt pin.
    pub const INTX: u32 = 0;
    /// MSI.
    pub const MSI: u32 = 1;
    /// MSI-X.
    pub const MSIX: u32 = 2;
    /// An error of the device.
    pub const ERROR: u32 = 3;
    /// A request to give the device back.
    pub const REQUEST: u32 = 4;
    /// How many there are.
    pub const COUNT: u32 = 5;
}

/// Flags of [`IrqInfo`].
pub mod irq_flags {
    /// It can be signalled through an eventfd.
    pub const EVENTFD: u32 = 1 << 0;
    /// It can be masked.
    pub const MASKABLE: u32 = 1 << 1;
    /// It masks itself when it fires.
    pub const AUTOMASKED: u32 = 1 << 2;
    /// Vectors cannot be added one by one.
    pub const NORESIZE: u32 = 1 << 3;
}

/// Flags of [`SetIrqs`]: one of `DATA` and one of `ACTION`.
pub mod irq_set {
    /// No data: the action is for every vector of the range.
    pub const DATA_NONE: u32 = 1 << 0;
    /// A byte for each vector follows, 1 where the action is to be done.
    pub const DATA_BOOL: u32 = 1 << 1;
    /// A descriptor for each vector comes with the message; none takes them away.
    pub const DATA_EVENTFD: u32 = 1 << 2;
    /// Mask.
    pub const ACTION_MASK: u32 = 1 << 3;
    /// Unmask.
    pub const ACTION_UNMASK: u32 = 1 << 4;
    /// Trigger, or with descriptors: say what to signal when the device triggers.
    pub const ACTION_TRIGGER: u32 = 1 << 5;
    /// The data flags.
    pub const DATA_MASK: u32 = DATA_NONE | DATA_BOOL | DATA_EVENTFD;
    /// The action flags.
    pub const ACTION_MASK_ALL: u32 = ACTION_MASK | ACTION_UNMASK | ACTION_TRIGGER;
}

fields! {
    /// Payload of `DEVICE_GET_IRQ_INFO`, all zero but `argsz` and `index`, and of its reply.
    IrqInfo, 16 {
        /// Bytes that the client has room for; in the reply, bytes that there are.
        argsz: u32,
        /// See [`irq_flags`].
        flags: u32,
        /// Which kind; see [`irq`].
        index: u32,
        /// Number of vectors.
        count: u32,
    }
}

fields! {
    /// Payload of `DEVICE_SET_IRQS`, before its data.
    SetIrqs, 20 {
        /// Bytes of this structure and of the data behind it.
        argsz: u32,
        /// See [`irq_set`].
        flags: u32,
        /// Which kind; see [`irq`].
        index: u32,
        /// First vector.
        start: u32,
        /// Number of vectors.
        count: u32,
    }
}
