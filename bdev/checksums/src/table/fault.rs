//! Faults that tests plant, to see that the crash tests would find them.

/// What is done too early, or left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TableFault {
    /// Writes begin before the region's bit is durable.
    BitAfterWrite,
    /// The bit is cleared before the checksums are durable.
    ClearedBeforeDurable,
    /// Checksums are written and the bit is cleared while writes are in flight.
    ClosedDuringWrites,
    /// The checksums are believed although another program has changed data.
    BelievedAfterOthers,
}
